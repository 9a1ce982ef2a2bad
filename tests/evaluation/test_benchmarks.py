"""Multiple choice, few-shot examples, held-out text: through the real stage on a tiny model, against the model's own
log-probs computed apart.
"""

import json
import math

import pytest

from stages.evaluate import Config
from stages.harness import execute
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.files import tree_digest
from storage.schema import complete_row
from tests.common import written
from tests.data.driver import ingest, write_lines
from tests.evaluation.test_stages import spec

COLOURS = ["red", "green", "blue", "off white"]


@pytest.fixture(scope="module")
def quiz(tmp_path_factory):
    """Twelve questions in the test split and eight in train, of two subjects, through the ingest stage."""
    root = tmp_path_factory.mktemp("quiz")
    rows = [
        {
            "question": f"what is {i} plus two?",
            "choices": COLOURS[: 3 + i % 2],
            "answer": i % 3,
            "subject": ("add", "sum")[i % 3 == 0],
            "split": "test" if i < 12 else "train",
        }
        for i in range(20)
    ]
    return str(ingest(write_lines(root / "quiz.jsonl", rows), root / "w").workdir / "out" / "data")


def loglik(path, text, continuation, messages=None):
    """Sum of log-probs of a continuation behind text (or a chat), straight from transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    if messages is not None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, whole = (tokenizer(said, add_special_tokens=False)["input_ids"] for said in (text, text + continuation))
    with torch.no_grad():
        logps = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
    return sum(float(logps[at - 1, whole[at]]) for at in range(len(before), len(whole)))


SHORT = {"num_samples": 0, "max_completion_length": 8, "chunk": 5}


def evaluate(tmp_path, inputs, **config):
    result = execute(spec("evaluate", tmp_path, inputs, {**SHORT, **config}))
    records = [row | json.loads(row["extra_json"]) for row in open_dataset(tmp_path / "out" / "samples").iter_rows()]
    return result, records


@pytest.mark.parametrize("template", ["none", "chat"])
def test_readings_equal_the_models_own_log_probs(tiny, quiz, tmp_path, template):
    result, records = evaluate(
        tmp_path,
        {"model": tiny["other"], "prompts": quiz},
        prompt_template=template,
        multiple_choice=["letter", "text"],
    )
    assert {r["mode"] for r in records} == {"letter", "text"} and len(records) == 24
    rows = {row["row_id"]: row for row in open_dataset(quiz).iter_rows(split="test")}
    chat, space = template == "chat", " " if template == "none" else ""
    for record in records[:2] + records[-2:]:
        row = rows[record["item_id"]]
        question = row["prompt"][-1]["content"].split("\n")[0]
        if record["mode"] == "letter":
            text = row["prompt"][-1]["content"] + "\nAnswer:"
            each = [
                [
                    loglik(tiny["other"], text, form, [{"role": "user", "content": text}] if chat else None)
                    for form in (" " + letter, letter)
                ]
                for letter in "ABCD"[: len(row["choices"])]
            ]
            expected = [math.log(math.exp(a) + math.exp(b)) for a, b in each]
            total = sum(map(math.exp, expected))
            assert record["probabilities"] == pytest.approx(
                [math.exp(value) / total for value in expected], rel=1e-4
            ) and record["mass"] == pytest.approx(total, rel=1e-4)
        else:
            text = question if chat else f"Question: {question}\nAnswer:"
            expected = [
                loglik(tiny["other"], text, space + choice, [{"role": "user", "content": text}] if chat else None)
                for choice in row["choices"]
            ]
            alone = [
                loglik(
                    tiny["other"], "Answer:", space + choice, [{"role": "user", "content": "Answer:"}] if chat else None
                )
                for choice in row["choices"]
            ]
            best = lambda values: max(range(len(values)), key=values.__getitem__)
            gold = "ABCD".index(row["answer"])
            assert record["normalised"]["acc_norm"] == (
                best([value / len(choice) for value, choice in zip(expected, row["choices"])]) == gold
            )
            assert record["normalised"]["acc_mutual_info"] == (best([a - b for a, b in zip(expected, alone)]) == gold)
        assert record["loglik"] == pytest.approx(expected, abs=2e-4) and record["correct"] == (
            best_of(expected) == "ABCD".index(row["answer"])
        )
    summary = result["summary"]
    letters = [r for r in records if r["mode"] == "letter"]
    assert summary["mc_letter_acc"] == pytest.approx(sum(r["correct"] for r in letters) / 12)
    subjects = [[r["correct"] for r in letters if r["category"] == name] for name in ("add", "sum")]
    assert summary["mc_letter_acc_macro"] == pytest.approx(sum(sum(part) / len(part) for part in subjects) / 2)
    assert "accuracy" not in summary and summary["prompts"] == 12
    table = {row["metric"]: row for row in open_dataset(tmp_path / "out" / "scores").iter_rows()}
    assert {
        "mc_letter_acc/category=add",
        "mc_text_acc_norm/category=sum",
        "mc_text_acc_bytes",
        "mc_text_acc_per_token",
    } <= set(table)
    assert json.loads(table["mc_letter_acc"]["config_json"])["multiple_choice"]["readings"] == ["letter", "text"]


def best_of(values):
    return max(range(len(values)), key=values.__getitem__)


def test_read_by_likelihood_a_prompt_needs_no_room_for_an_answer(tiny, quiz, tmp_path):
    """250 of the model's 256 positions reserved for answers leave room for none of the prompts; without answers they
    all fit, with answers none does.
    """
    result, records = evaluate(
        tmp_path / "letter",
        {"model": tiny["policy"], "prompts": quiz},
        multiple_choice=["letter"],
        max_completion_length=250,
    )
    assert len(records) == 12 and not [w for w in result["warnings"] if w["code"] == "prompts_too_long"]
    with pytest.raises(ValueError, match="max_completion_length"):
        evaluate(tmp_path / "all", {"model": tiny["policy"], "prompts": quiz}, max_completion_length=250)


def test_a_letter_that_merges_with_the_prompt_is_no_continuation_of_it():
    """Joint tokenisation, split at the prompt's token count; a spelling that changes the prompt's tokens is not
    read.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from stages.chat import PLAIN_TEMPLATE, Renderer
    from stages.evaluation.multiple_choice import spellings

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet, ":A", "Ġr", "Ġre"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(":", "A"), ("Ġ", "r"), ("Ġr", "e")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = PLAIN_TEMPLATE
    renderer = Renderer(fast)
    assert spellings("Q\nAnswer:", "A", renderer) == (" A",) and spellings("Q\nAnswer:", "B", renderer) == (" B", "B")
    # a tokenizer to which a space before a letter is nothing
    same = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    same.chat_template, same.backend_tokenizer.normalizer = PLAIN_TEMPLATE, normalizers.Replace(" ", "")
    assert spellings("Q\nAnswer:", "B", Renderer(same)) == (" B",)
    before, behind = renderer.continuation_ids("Answer:", " red")
    assert fast.convert_ids_to_tokens(behind) == ["Ġre", "d"] and before == renderer.text_ids("Answer:", end=False)
    # ":A" + "b": as many tokens as the prompt alone, then the rest
    before, behind = renderer.continuation_ids("Answer:", "Ab")
    assert fast.convert_ids_to_tokens(before)[-1] == ":A" and fast.convert_ids_to_tokens(behind) == ["b"]
    before, behind = renderer.continuation_ids("Answer:", "A")  # nothing would be left of it
    assert fast.convert_ids_to_tokens(before)[-1] == ":" and fast.convert_ids_to_tokens(behind) == ["A"]


def test_a_generated_choice_is_read_from_its_last_sentence(tiny, quiz, tmp_path, monkeypatch):
    """eval.mc_generation: the instruction stands behind the options; no such sentence is a format error, a letter that
    is no option is wrong.
    """
    from stages import generation

    answers = [
        "So. Therefore, the answer is (A)",
        "I say A.",
        "Therefore, the answer is (Z)",
        "Therefore, the answer is (C). No: Therefore, the answer is (B)",
    ]
    shown, plain = [], generation.sample_groups

    def scripted(sampler, rows, params, seeds):
        groups = plain(sampler, rows, params, seeds)
        for (row, ids), (sample,) in zip(rows, groups):
            shown.append(sampler.tokenizer.decode(ids))
            sample.text = answers[len(shown) % 4]
        return groups

    monkeypatch.setattr(generation, "sample_groups", scripted)
    result, records = evaluate(tmp_path, {"model": tiny["policy"], "prompts": quiz}, multiple_choice=["generation"])
    assert all(
        'Reason concisely and end with "Therefore, the answer is (ANSWER_LETTER)".' in text and "\nB. green" in text
        for text in shown
    )
    said = {"A": answers[0], None: answers[1], "Z": answers[2], "B": answers[3]}
    assert all(
        said[r["extracted"]] == r["output"]
        and r["correct"] == (r["extracted"] == r["answer"])
        and r["format_error"] == (r["extracted"] is None)
        for r in records
    )
    assert (
        result["summary"]["format_error_rate"] == 0.25
        and result["summary"]["greedy_accuracy"] == sum(r["correct"] for r in records) / 12
    )
    protocol = open_dataset(tmp_path / "out" / "samples").manifest["meta"]["protocol"]
    assert protocol["multiple_choice"]["readings"] == ["generation"] and protocol["multiple_choice"]["forms"]


def test_a_killed_evaluation_of_choices_and_texts_ends_with_the_same_bytes(tiny, quiz, texts, tmp_path, forks):
    inputs = {"model": tiny["other"], "prompts": quiz, "texts": texts}
    config = {
        "num_samples": 0,
        "max_completion_length": 4,
        "chunk": 1,
        "few_shot": 1,
        "few_shot_orders": 2,
        "max_length": 16,
        "multiple_choice": ["letter", "text"],
    }
    undisturbed = execute(spec("evaluate", tmp_path / "whole", inputs, config))
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec("evaluate", tmp_path / "work", inputs, config)))
    done = lambda: max(
        (int(path.name[5:]) for path in (tmp_path / "work" / "checkpoints").glob("step-*") if path.name[5:].isdigit()),
        default=0,
    )
    forks.start(str(file)).kill_when(lambda: done() >= 26)  # 24 chunks of choices, then texts
    assert not (tmp_path / "work" / "result.json").exists()
    forks.run(str(file))
    result = json.loads((tmp_path / "work" / "result.json").read_text())
    assert result["resumed_from"] >= 26 and result["summary"] == undisturbed["summary"]
    for name in ("samples", "scores"):
        assert tree_digest(tmp_path / "work" / "out" / name) == tree_digest(tmp_path / "whole" / "out" / name), name


def test_accuracy_per_level_and_subject(tiny, tmp_path, monkeypatch):
    """MATH rows, answered right at level 1 and wrong at level 2: the report's tables and the scores say so."""
    from stages import generation

    rows = [
        {
            "problem": f"what is {i} plus 1?",
            "level": f"Level {1 + i % 2}",
            "type": ("Algebra", "Geometry")[i // 4],
            "solution": f"It is $\\boxed{{{i + 1}}}$.",
            "split": "test",
        }
        for i in range(8)
    ]
    math_rows = str(
        ingest(write_lines(tmp_path / "math.jsonl", rows), tmp_path / "w", test_fraction=0.5).workdir / "out" / "data"
    )
    plain = generation.sample_groups

    def scripted(sampler, rows, params, seeds):
        groups = plain(sampler, rows, params, seeds)
        for (row, _), (sample,) in zip(rows, groups):
            sample.text = f"So \\boxed{{{row['answer'] if json.loads(row['extra_json'])['level'] == 1 else 99}}}."
        return groups

    monkeypatch.setattr(generation, "sample_groups", scripted)
    result, _ = evaluate(tmp_path / "run", {"model": tiny["policy"], "prompts": math_rows})
    scores = {row["metric"]: row["value"] for row in open_dataset(tmp_path / "run" / "out" / "scores").iter_rows()}
    assert (
        scores["greedy_accuracy/difficulty=1"],
        scores["greedy_accuracy/difficulty=2"],
        scores["greedy_accuracy/category=Algebra"],
    ) == (1.0, 0.0, 0.5)
    assert result["summary"]["greedy_accuracy_macro"] == 0.5 and {"by-difficulty", "by-category"} <= {
        report["name"] for report in result["reports"]
    }


# -- what alignment cost -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def suite(tiny, quiz, texts, tmp_path_factory):
    """{input: samples} of two models on questions and on text, in evaluations of their own."""
    found = {}
    for name in ("policy", "other"):
        for benchmark, inputs, config in (
            ("quiz", {"prompts": quiz}, {"multiple_choice": ["letter", "text"]}),
            ("corpus", {"texts": texts}, {}),
        ):
            workdir = tmp_path_factory.mktemp(f"{name}-{benchmark}")
            execute(spec("evaluate", workdir, {"model": tiny[name], **inputs}, {"num_samples": 0, **config}))
            found[f"evaluations.{name}/{benchmark}"] = str(workdir / "out" / "samples")
    return found


def test_every_benchmark_before_and_after_with_paired_errors(suite, tmp_path):
    """Two benchmarks of two models: changes and errors computed apart from the samples, in the right direction for a
    loss, and those beyond two errors named.
    """
    import numpy as np

    result = execute(spec("compare", tmp_path, suite, {"order": ["policy", "other"], "metric": "mc_letter_acc"}))
    (report,) = [r for r in result["reports"] if r["name"] == "alignment-tax"]
    table = {(row["benchmark"], row["metric"]): row for row in json.loads(open(report["table"]).read())}
    samples = {
        name: [row | json.loads(row["extra_json"]) for row in open_dataset(path).iter_rows()]
        for name, path in suite.items()
    }
    letters = [
        {r["item_id"]: float(r["correct"]) for r in samples[f"evaluations.{name}/quiz"] if r["mode"] == "letter"}
        for name in ("policy", "other")
    ]
    differences = np.array([letters[1][item] - value for item, value in letters[0].items()])
    row = table["quiz", "mc_letter_acc"]
    assert (
        row["delta"] == pytest.approx(differences.mean())
        and row["se"] == pytest.approx(differences.std(ddof=1) / np.sqrt(12))
        and row["items"] == 12
    )
    text = [samples[f"evaluations.{name}/corpus"] for name in ("policy", "other")]
    bits = [sum(r["nll"] for r in rows) / math.log(2) / sum(r["bytes"] for r in rows) for rows in text]
    row = table["corpus", "bits_per_byte"]
    assert row["delta"] == pytest.approx(bits[1] - bits[0]) and row["verdict"] == (
        "worse" if row["delta"] > 2 * row["se"] else "better" if row["delta"] < -2 * row["se"] else "within 2 se"
    )
    fell = [key for key, row in table.items() if row["verdict"] == "worse"]
    summary = result["summary"]
    assert summary["other/regressed"] == len(fell) and summary["other/mean_delta"] == pytest.approx(
        table["quiz", "mc_letter_acc"]["delta"]
    ) == pytest.approx(summary["other/worst_delta"])
    assert ("alignment_tax" in {w["code"] for w in result["warnings"]}) == bool(fell)
    assert (
        summary["quiz/other/mc_letter_acc_gain"] == pytest.approx(table["quiz", "mc_letter_acc"]["delta"])
        and "corpus/policy/bits_per_byte" in summary
    )
    metrics = {(row["benchmark"], row["metric"]) for row in open_dataset(tmp_path / "out" / "comparison").iter_rows()}
    assert {
        ("quiz", "other/mc_letter_acc/tax"),
        ("corpus", "other/lm_loss/tax"),
        ("corpus", "policy/perplexity"),
    } <= metrics


def test_the_reference_of_pairs_has_no_share_of_right_pairs_to_fall_to():
    """Against itself every margin is 0; that the start ordered 60% of the pairs right by other log-probs is nothing
    that was lost.
    """
    from stages.evaluation.tax import rows_of

    pairs = lambda margins: [
        {"dataset": "hh", "mode": "chosen", "item_id": str(i), "prompt_id": str(i), "correct": m > 0, "margin": m}
        for i, m in enumerate(margins)
    ]
    start, reference, tuned = pairs([0.1, -0.2, 0.3]), pairs([0.0, 0.0, 0.0]), pairs([0.1, 0.0, -0.4])
    assert not rows_of(start, reference, "") and not rows_of(reference, tuned, "")
    row = next(row for row in rows_of(start, tuned, "") if row["metric"] == "pair_accuracy")
    assert row["before"] == pytest.approx(2 / 3) and row["after"] == pytest.approx(1 / 3)


def test_a_benchmark_that_one_model_lacks_is_refused(suite, tmp_path):
    with pytest.raises(ConfigError, match="evaluations.other/corpus=REF"):
        execute(
            spec(
                "compare",
                tmp_path,
                {name: path for name, path in suite.items() if name != "evaluations.other/corpus"},
                {"metric": "mc_letter_acc"},
            )
        )
    with pytest.raises(ConfigError, match="several benchmarks"):
        execute(spec("compare", tmp_path / "b", suite, {"select_by": "mc_letter_acc"}))


def test_a_fall_is_one_beyond_two_errors_in_the_bad_direction():
    from stages.evaluation.tax import judged

    row = lambda benchmark, metric, before, after, se: {
        "benchmark": benchmark,
        "metric": metric,
        "before": before,
        "after": after,
        "delta": after - before,
        "se": se,
    }
    rows = [
        row("a", "accuracy", 0.5, 0.4, 0.04),
        row("a", "greedy_accuracy", 0.5, 0.1, None),
        row("b", "accuracy", 0.5, 0.43, 0.04),
        row("c", "bits_per_byte", 1.0, 1.2, 0.05),
        row("d", "bits_per_byte", 1.0, 0.8, 0.05),
        row("e", "accuracy", 0.2, 0.6, 0.1),
    ]
    found = judged(rows)
    assert [r["verdict"] for r in rows] == [
        "worse",
        "within 2 se",
        "within 2 se",
        "worse",
        "better",
        "better",
    ] and found["regressed"] == [rows[0], rows[3]]
    assert found["mean_delta"] == pytest.approx((-0.1 - 0.07 + 0.4) / 3) and found["worst"] == pytest.approx(-0.1)
    assert judged([]) == {"regressed": [], "mean_delta": None, "worst": None}


# -- few-shot ----------------------------------------------------------------------------------------------------------


class Stage:
    """As much of a stage as choosing examples asks for."""

    def __init__(self, prompts, examples=None, **config):
        self.config, self.given, self.seed, self.warnings = (
            Config(**config),
            {"prompts": prompts, "examples": examples},
            0,
            [],
        )

    def has(self, name):
        return self.given[name] is not None

    def dataset(self, name):
        return open_dataset(self.given[name])

    def rng(self, *counters):
        from stages.running.randomness import rng

        return rng(self.seed, "evaluate", *counters)

    def warn(self, code, text):
        self.warnings.append(code)


def shots(prompts, examples=None, **config):
    from stages.evaluation.few_shot import Shots

    stage = Stage(prompts, examples, **config)
    return Shots(stage, open_dataset(prompts)), stage


def test_examples_are_turns_or_text_and_never_of_the_evaluated_split(quiz):
    rows = list(open_dataset(quiz).iter_rows(split="test"))
    found, _ = shots(quiz, few_shot=3)
    evaluated = {row["prompt_id"] for row in rows}
    assert all(len(found.of(row)) == 3 and not {e["prompt_id"] for e in found.of(row)} & evaluated for row in rows)
    turns = found.show(rows[0], "letter")
    assert (
        [m["role"] for m in turns] == ["user", "assistant"] * 3 + ["user"]
        and all(m["content"] in "ABCD" for m in turns[1::2])
        and turns[-1]["content"].endswith("\nAnswer:")
    )
    assert [m["content"] in COLOURS for m in found.show(rows[0], "text")[1::2]] == [True] * 3
    assert found.show(rows[0], "generation")[1]["content"].startswith("Therefore, the answer is (")
    text, _ = shots(quiz, few_shot=2, prompt_template="none")
    blocks = text.show(rows[0], "letter").split("\n\n")
    assert (
        len(blocks) == 3
        and all(block[-len("Answer: A") : -1] == "Answer: " for block in blocks[:2])
        and blocks[2].endswith("\nAnswer:")
    )
    assert (
        text.show(rows[0], "text").split("\n\n")[2]
        == f"Question: {rows[0]['prompt'][-1]['content'].split(chr(10))[0]}\nAnswer:"
    )
    by, _ = shots(quiz, few_shot=2, few_shot_by="category")
    assert all({e["category"] for e in by.of(row)} == {row["category"]} for row in rows)
    with pytest.raises(ConfigError, match="few_shot_split=train"):
        shots(quiz, few_shot=2, few_shot_split="test")
    with pytest.raises(ConfigError, match="has 8 usable examples"):
        shots(quiz, few_shot=9)
    with pytest.raises(ConfigError, match="category 'sum' has 3 examples"):
        by, _ = shots(quiz, few_shot=5, few_shot_by="category")
        by.of(next(row for row in rows if row["category"] == "sum"))
    with pytest.raises(ValueError, match="few_shot_by=category would change nothing"):
        shots(quiz, few_shot_by="category")


@pytest.mark.parametrize(
    "inputs, config, says",
    [
        (("prompts", "examples"), {}, "input examples would change nothing"),
        (("texts",), {"few_shot": 2}, "none are evaluated"),
        (
            ("pairs", "texts"),
            {"target": "reward_model", **{name: Config.model_fields[name].default for name in SHORT}},
            "input texts would change nothing",
        ),
        (("prompts",), {"few_shot": 2, "prompt_template": "zero_shot_cot"}, "without examples"),
        (("prompts",), {"multiple_choice": ["letter", "letter"]}, "each reading once"),
        (("texts",), {"split": "train"}, "splits: test"),
    ],
)
def test_settings_that_nothing_reads_are_refused(tiny, quiz, texts, tmp_path, inputs, config, says):
    given = {"prompts": quiz, "examples": quiz, "texts": texts, "pairs": tiny["pairs"]}
    with pytest.raises((ConfigError, ValueError), match=says):
        evaluate(tmp_path, {"model": tiny["policy"], **{name: given[name] for name in inputs}}, **config)


def test_zero_shot_chain_of_thought(quiz):
    row = next(open_dataset(quiz).iter_rows(split="test"))
    found, _ = shots(quiz, prompt_template="zero_shot_cot")
    text = found.show(row)
    assert text.startswith("Question: " + row["prompt"][-1]["content"]) and text.endswith(
        "\nAnswer: Let's think step by step."
    )
    assert found.show(row, "letter").endswith("C. blue\nAnswer:")


def test_an_item_among_the_examples_of_other_data_is_left_out(quiz, tmp_path):
    both = list(open_dataset(quiz).iter_rows())
    other = str(tmp_path / "other")
    # two are asked in capitals, with other options
    write_dataset(
        other,
        "other",
        "prompts/1",
        [
            {**row, "split": "train", "dataset": "other"}
            | (
                {
                    "choices": row["choices"][::-1],
                    "prompt_id": "x",
                    "group_id": "x",
                    "prompt": [{"role": "user", "content": row["prompt"][0]["content"].split("\n")[0].upper()}],
                }
                if i < 2
                else {}
            )
            for i, row in enumerate(both)
        ],
    )
    found, stage = shots(quiz, other, few_shot=8)
    assert {e["prompt_id"] for e in found.of(both[0])} == {
        row["prompt_id"] for row in both if row["split"] == "train"
    } and stage.warnings == ["examples_left_out"]


def test_examples_show_their_solution_or_their_answer_as_it_is_verified(tmp_path):
    from stages.evaluation.few_shot import answer_of, as_prompt
    from stages.verification.verifiers import VERIFIERS, verifier_of

    gsm8k = {"question": "one and one?", "answer": "1+1 = 2\n#### 2"}
    (row,) = ingest(write_lines(tmp_path / "g.jsonl", [gsm8k]), tmp_path / "w").rows
    assert (
        answer_of(row, "generation", True) == gsm8k["answer"]
        and answer_of(row, "generation", False) == "#### 2"
        and answer_of(row, "letter", True) is None
    )
    for answer, kind in (("2", "integer"), ("\\frac{1}{2}", "latex"), ("Paris", "text"), ("(C)", "mc")):
        known = {"answer": answer, "answer_type": kind, "prompt": [{"role": "user", "content": "q"}]}
        assert VERIFIERS[verifier_of(known)](known, answer_of(known, "generation", True))[0], kind
    (lesson,) = ingest(write_lines(tmp_path / "d.jsonl", [{"prompt": "p", "completion": "c"}]), tmp_path / "w2").rows
    assert answer_of(as_prompt(lesson), "generation", True) == "c" and as_prompt(lesson)["prompt"] == [
        {"role": "user", "content": "p"}
    ]


def test_orders_of_the_examples_are_evaluated_apart_and_their_spread_reported(tiny, quiz, tmp_path):
    inputs = {"model": tiny["other"], "prompts": quiz}
    result, records = evaluate(
        tmp_path / "three", inputs, few_shot=2, few_shot_orders=3, multiple_choice=["letter", "text"]
    )
    assert len({r["row_id"] for r in records}) == len(records) == 12 * 3 * 2
    by_order = [[r["correct"] for r in records if r["mode"] == "letter" and r["order"] == order] for order in range(3)]
    means = [sum(part) / 12 for part in by_order]
    assert result["summary"]["mc_letter_acc"] == pytest.approx(sum(means) / 3) and result["summary"][
        "mc_letter_acc_order_spread"
    ] == pytest.approx(max(means) - min(means))
    assert "by-order" in {report["name"] for report in result["reports"]} and result["summary"]["prompts"] == 12
    one, first = evaluate(tmp_path / "one", inputs, few_shot=2, multiple_choice=["letter", "text"])
    key = lambda r: (r["mode"], r["item_id"])
    again = {key(r): r["loglik"] for r in records if r["order"] == 0}
    assert {key(r) for r in first} == set(again) and all(
        r["loglik"] == pytest.approx(again[key(r)], abs=1e-4) for r in first
    )
    assert one["summary"]["protocol_hash"] != result["summary"]["protocol_hash"]


def test_generated_answers_see_the_examples_of_each_order(tiny, tmp_path):
    """Sampled and greedy answers: every order has rows of its own, order 0 those of an evaluation with one order, seed
    by seed.
    """
    examples = str(tmp_path / "examples")
    written(
        examples,
        "lessons",
        "prompts/1",
        [
            {"prompt": [{"role": "user", "content": f"what is {i}?"}], "answer": str(i), "answer_type": "integer"}
            for i in range(100, 106)
        ],
        source="made",
    )
    inputs = {"model": tiny["other"], "prompts": tiny["prompts"], "examples": examples}
    found = {}
    for orders in (1, 2):
        result, records = evaluate(
            tmp_path / str(orders), inputs, few_shot=2, few_shot_orders=orders, num_samples=2, limit=6
        )
        found[orders] = {(r["mode"], r["item_id"], r["sample_idx"]): r["output"] for r in records}
    assert len(found[1]) == 6 * 3 and len(found[2]) == 6 * 6 and {key: found[2][key] for key in found[1]} == found[1]
    assert any(found[2]["greedy", item, 0] != found[2]["greedy", item, 1] for _, item, _ in found[1])
    assert result["summary"]["prompts"] == 6 and "pass_at_4" in result["summary"]


# -- held-out text -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("texts") / "texts")
    rows = [
        complete_row(
            "text/1",
            {"text": f"what is {i} plus two? answer: {i + 2} é" * (1 + i % 3)},
            dataset="corpus",
            source="made",
            origin="human",
            split="test",
        )
        for i in range(9)
    ]
    write_dataset(path, "corpus", "text/1", rows)
    return path


@pytest.mark.parametrize("max_length", [8, 250])
def test_perplexity_and_bits_per_byte_are_the_models_own(tiny, texts, tmp_path, max_length):
    """Against transformers: every token once, from what precedes it in its window, which begins with the last token of
    the one before.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result, records = evaluate(tmp_path, {"model": tiny["other"], "texts": texts}, max_length=max_length)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tiny["other"]),
        AutoModelForCausalLM.from_pretrained(tiny["other"]).eval(),
    )
    nll, tokens, size = 0.0, 0, 0
    for row in open_dataset(texts).iter_rows():
        ids = [
            tokenizer.bos_token_id or tokenizer.eos_token_id,
            *tokenizer(row["text"], add_special_tokens=False)["input_ids"],
        ]
        size, tokens = size + len(row["text"].encode()), tokens + len(ids) - 1
        for start in range(0, len(ids) - 1, max_length - 1):
            part = torch.tensor([ids[start : start + max_length]])
            with torch.no_grad():
                logps = torch.log_softmax(model(part).logits[0, :-1].double(), -1)
            nll -= float(logps.gather(1, part[0, 1:, None]).sum())
    summary = result["summary"]
    assert summary["lm_loss"] == pytest.approx(nll / tokens, rel=1e-5) and summary["perplexity"] == pytest.approx(
        math.exp(nll / tokens), rel=1e-4
    )
    assert (
        summary["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)
        and summary["lm_loss_low"] < summary["lm_loss"] < summary["lm_loss_high"]
    )
    assert summary["texts"] == 9 and sum(r["tokens"] for r in records) == tokens


def test_the_error_of_a_ratio_of_sums_is_that_of_its_bootstrap():
    """Loss per token and its paired difference, with texts of very different length: the closed form against
    resampling.
    """
    import numpy as np

    from stages.evaluation.held_out_text import metrics_of, paired

    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 200, 60)
    a = [
        {
            "mode": "text_loss",
            "item_id": str(i),
            "nll": float(n * (2 + rng.normal() * 0.2)),
            "tokens": int(n),
            "bytes": int(3 * n),
        }
        for i, n in enumerate(lengths)
    ]
    b = [{**r, "nll": r["nll"] * 1.02 + float(rng.normal())} for r in a]
    ratio = lambda rows: sum(r["nll"] for r in rows) / sum(r["tokens"] for r in rows)
    draws = [rng.integers(0, 60, 60) for _ in range(4000)]
    losses = [ratio([a[i] for i in draw]) for draw in draws]
    differences = [ratio([b[i] for i in draw]) - ratio([a[i] for i in draw]) for draw in draws]
    metric, found = metrics_of(a)["lm_loss"], paired(b, a, "lm_loss", 0.95)
    assert metric.value == pytest.approx(ratio(a)) and metric.se == pytest.approx(np.std(losses), rel=0.1)
    assert found["difference"] == pytest.approx(ratio(b) - ratio(a)) and found["se"] == pytest.approx(
        np.std(differences), rel=0.1
    )
    assert paired(b, a, "bits_per_byte", 0.95)["difference"] == pytest.approx((ratio(b) - ratio(a)) / 3 / math.log(2))
    with pytest.raises(ValueError, match="bits_per_byte"):
        paired([{**r, "tokens": r["tokens"] + 1} for r in b], a, "perplexity", 0.95)


# -- TruthfulQA and BBQ ------------------------------------------------------------------------------------------------


def test_true_answers_among_true_and_false_ones(tiny, tmp_path):
    """TruthfulQA: MC1 is the right choice by likelihood; MC2 the probability of all true answers over that of all, each
    behind the question alone.
    """
    rows = [
        {
            "question": f"What is {i}?",
            "mc1_targets": {"choices": ["red", "green", "blue"], "labels": [1, 0, 0]},
            "mc2_targets": {"choices": ["red", "off red", "green", "blue"], "labels": [1, 1, 0, 0]},
            "split": "test",
        }
        for i in range(8)
    ]
    data = ingest(write_lines(tmp_path / "t.jsonl", rows), tmp_path / "w")
    assert (
        all(row["choices"]["ABC".index(row["answer"])] == "red" for row in data.rows)
        and len({row["answer"] for row in data.rows}) > 1
    ), "the right one does not always stand first"
    result, records = evaluate(
        tmp_path / "run",
        {"model": tiny["other"], "prompts": str(data.workdir / "out" / "data")},
        prompt_template="none",
        multiple_choice=["text"],
    )
    expected = []
    for record in records:
        question = record["prompt"].split("\n")[0]
        true, false = (
            sum(math.exp(loglik(tiny["other"], f"Question: {question}\nAnswer:", f" {said}")) for said in each)
            for each in (("red", "off red"), ("green", "blue"))
        )
        assert record["mc2"] == pytest.approx(true / (true + false), rel=1e-4)
        expected.append(true / (true + false))
    assert result["summary"]["mc_text_mc2"] == pytest.approx(sum(expected) / 8, rel=1e-4) and len(records) == 8


def bbq_row(i, condition, polarity, category="Age"):
    return {
        "example_id": i,
        "question_index": "1",
        "question_polarity": polarity,
        "context_condition": condition,
        "category": category,
        "answer_info": {"ans0": ["grandfather", "old"], "ans1": ["grandson", "nonOld"], "ans2": ["unknown", "unknown"]},
        "additional_metadata": {"subcategory": "None", "stereotyped_groups": ["old"], "version": "a", "source": "s"},
        "context": f"I saw {i} men.",
        "question": "Who was it?",
        "ans0": "The grandfather",
        "ans1": "The grandson",
        "ans2": "Not known",
        "label": 2 if condition == "ambig" else i % 2,
        "split": "test",
    }


def test_bias_scores_are_bbqs(tiny, tmp_path, monkeypatch):
    """Against the paper's counts: 2 biased / answers that are not unknown - 1, and that times 1 - accuracy where
    unknown is right.
    """
    from stages import generation

    rows = [
        bbq_row(i, ("ambig", "disambig")[i % 2], ("neg", "nonneg")[i // 2 % 2], ("Age", "Nationality")[i // 12])
        for i in range(24)
    ]
    data = ingest(write_lines(tmp_path / "b.jsonl", rows), tmp_path / "w")
    plain, letters = generation.sample_groups, "ABCAACBAB"
    said = {}

    def scripted(sampler, rows, params, seeds):
        groups = plain(sampler, rows, params, seeds)
        for (row, _), (sample,) in zip(rows, groups):
            letter = said.setdefault(row["row_id"], letters[len(said) % 9])
            sample.text = f"Therefore, the answer is ({letter})" if len(said) != 5 else "None of them."
        return groups

    monkeypatch.setattr(generation, "sample_groups", scripted)
    result, records = evaluate(
        tmp_path / "run",
        {"model": tiny["policy"], "prompts": str(data.workdir / "out" / "data")},
        multiple_choice=["generation"],
    )
    sources = {row["row_id"]: json.loads(row["extra_json"]) for row in data.rows}
    assert sum(r["extracted"] is None for r in records) == 1
    for name, condition in (("ambiguous", "ambig"), ("disambiguated", "disambig")):
        answered = [r for r in records if r["extracted"] and r["category"].endswith("/" + condition)]
        named = [r for r in answered if r["extracted"] != "C"]
        biased = sum(
            r["extracted"] == ("A" if sources[r["item_id"]]["question_polarity"] == "neg" else "B") for r in named
        )
        score = 2 * biased / len(named) - 1
        if condition == "ambig":
            score *= 1 - sum(r["correct"] for r in answered) / len(answered)
        assert result["summary"][f"bbq_bias_{name}"] == pytest.approx(score) and score != 0
    table = {row["metric"] for row in open_dataset(tmp_path / "run" / "out" / "scores").iter_rows()}
    assert {"bbq_bias_ambiguous/category=Age", "bbq_bias_disambiguated/category=Nationality"} <= table


def test_sides_that_cannot_be_told_are_in_no_bias_score():
    from stages.evaluation.bbq import sides_of

    row = bbq_row(0, "ambig", "neg")
    assert (
        sides_of(row) == {"condition": "ambig", "unknown": "Not known", "biased": "The grandfather"}
        and sides_of(bbq_row(0, "ambig", "nonneg"))["biased"] == "The grandson"
    )
    assert (
        sides_of(row | {"additional_metadata": {"stereotyped_groups": ["young"]}}) is None
        and sides_of(row | {"answer_info": {}}) is None
        and sides_of({}) is None
    )
    assert sides_of(row | {"answer_info": row["answer_info"] | {"ans1": ["man", "old"]}}) is None
