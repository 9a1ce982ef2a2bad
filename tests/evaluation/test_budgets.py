"""What more tokens buy, what alignment changed, what a perturbation costs, and which model is best at a KL: through the
real stages, against counts made apart.
"""

import json

import pytest

from stages.evaluation import compute, perturbed, scores, shift
from stages.harness import execute
from stages.measures import frontier
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import written
from tests.data.driver import ingest, write_lines
from tests.evaluation.test_benchmarks import evaluate, quiz  # noqa: F401
from tests.evaluation.test_stages import evaluations, spec  # noqa: F401


def record(item, k, tokens, correct, **more):
    return {
        "item_id": item,
        "prompt_id": item,
        "group_id": None,
        "mode": "sample",
        "sample_idx": k,
        "tokens": tokens,
        "correct": correct,
        "extracted": str(k) if correct is False else "x",
        "finish": "eos",
        "reward": None,
        "kl": None,
        "format_error": False,
        "output": "o",
        "prompt": "p",
        **more,
    }


def test_a_sample_longer_than_the_budget_is_wrong():
    """The catalogue's vector as records, unscored samples aside."""
    records = [
        record("a", 0, 100, False),
        record("a", 1, 300, True),
        record("b", 0, 800, True),
        record("b", 1, 1200, True),
        record("c", 0, 5, None),
    ]
    assert [row["accuracy"] for row in compute.by_tokens(records, [250, 500, 1500])] == [0.0, 0.25, 0.75]
    shown = compute.by_tokens(records)
    assert (
        shown[-1]["tokens"] == 1200
        and shown[-1]["accuracy"] == 0.75
        and all(a["accuracy"] <= b["accuracy"] for a, b in zip(shown, shown[1:]))
    )
    metrics = scores.all_metrics(records)
    rows = compute.by_samples(records, metrics)
    assert [row["samples"] for row in rows] == [1, 2] and rows[1]["tokens"] == 2 * (200 + 1000) / 2
    assert (
        rows[1]["at least one right (pass@k)"] == metrics["pass_at_2"].value == 1.0
        and rows[1]["vote (maj@k)"] == metrics["maj_at_2"].value == 0.75
    )
    assert metrics["length_correct_correlation"].value == pytest.approx(
        scores.statistics.pearson([100, 300, 800, 1200], [0, 1, 1, 1])
    )
    assert compute.by_tokens([]) == [] and compute.metrics([record("a", 0, 3, True), record("a", 1, 4, True)]) == {}


def test_an_evaluation_draws_what_tokens_and_samples_buy(evaluations):  # noqa: F811
    result, out = evaluations["other"]
    reports = {report["name"]: report for report in result["reports"]}
    table = json.loads(open(reports["accuracy-by-samples"]["table"]).read())
    assert [row["samples"] for row in table] == [1, 2, 3] and table[2]["at least one right (pass@k)"] == pytest.approx(
        result["summary"]["pass_at_3"]
    )
    assert table[1]["best by the reward model"] == pytest.approx(result["summary"]["best_of_2_accuracy"])
    tokens = json.loads(open(reports["accuracy-by-tokens"]["table"]).read())
    assert tokens[-1]["accuracy"] == pytest.approx(result["summary"]["accuracy"])


def test_ranks_are_those_of_the_models_own_forward(tiny, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = {"num_samples": 0, "max_completion_length": 8, "chunk": 6, "token_shift": True}
    result = execute(
        spec(
            "evaluate",
            tmp_path,
            {"model": tiny["other"], "prompts": tiny["prompts"], "reference": tiny["policy"]},
            config,
        )
    )
    records = scores.records_of(open_dataset(tmp_path / "out" / "samples").iter_rows())
    prompts = {row["row_id"]: row["prompt"] for row in open_dataset(tiny["prompts"]).iter_rows()}
    model = AutoModelForCausalLM.from_pretrained(tiny["policy"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny["policy"])
    for r in records[:4]:
        text = tokenizer.apply_chat_template(prompts[r["item_id"]], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids + r["token_ids"]])).logits[0]
        assert r["base_ranks"] == [
            1 + int((logits[len(ids) + t - 1] > logits[len(ids) + t - 1, token]).sum())
            for t, token in enumerate(r["token_ids"])
        ]
    ranks, summary = [rank for r in records for rank in r["base_ranks"]], result["summary"]
    assert (
        summary["token_shift/unshifted"] == pytest.approx(sum(rank == 1 for rank in ranks) / len(ranks))
        and summary["token_shift/shifted_low"] < summary["token_shift/shifted"]
    )
    assert summary["token_shift/top3"] == pytest.approx(
        summary["token_shift/unshifted"] + summary["token_shift/marginal"]
    )
    bands = json.loads(
        open(next(r["table"] for r in result["reports"] if r["name"] == "token-shift-by-position")).read()
    )
    assert [row["position"] for row in bands[:3]] == ["0", "1", "2-3"] and sum(row["tokens"] for row in bands) == len(
        ranks
    )
    same = execute(
        spec(
            "evaluate",
            tmp_path / "same",
            {"model": tiny["policy"], "prompts": tiny["prompts"], "reference": tiny["policy"]},
            config,
        )
    )
    assert same["summary"]["token_shift/unshifted"] == 1.0  # a model's own greedy tokens
    without = execute(
        spec(
            "evaluate",
            tmp_path / "without",
            {"model": tiny["other"], "prompts": tiny["prompts"], "reference": tiny["policy"]},
            {**config, "token_shift": False},
        )
    )
    assert {name: value for name, value in summary.items() if not name.startswith("token_shift/")} == without["summary"]


def test_token_shift_says_what_it_needs(tiny, tmp_path):
    with pytest.raises(ConfigError, match="--input reference=BASE_MODEL"):
        execute(
            spec(
                "evaluate",
                tmp_path,
                {"model": tiny["other"], "prompts": tiny["prompts"]},
                {"token_shift": True, "max_completion_length": 8},
            )
        )
    with pytest.raises(ConfigError, match="write greedy=true"):
        execute(
            spec(
                "evaluate",
                tmp_path,
                {"model": tiny["other"], "prompts": tiny["prompts"], "reference": tiny["policy"]},
                {"token_shift": True, "greedy": False, "max_completion_length": 8},
            )
        )


def test_most_shifted_tokens_are_counted():
    records = [{"token_ids": [5, 6, 5], "base_ranks": [4, 1, 9]}, {"token_ids": [6], "base_ranks": [7]}]
    assert shift.most_shifted(records, str) == [
        {"token": "'5'", "shifted": 2, "of": 2, "share": 1.0},
        {"token": "'6'", "shifted": 1, "of": 2, "share": 0.5},
    ]


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Ten sums with a form of other numbers, four of them with one of other names too, one alone; through ingest, whose
    extra columns are kept.
    """
    root = tmp_path_factory.mktemp("changed")
    rows = [
        {"prompt": f"what is {i} plus two?", "answer": str(i + 2), "pair_id": f"q{i}", "perturbation": "original"}
        for i in range(10)
    ]
    rows += [
        {"prompt": f"what is {i + 50} plus two?", "answer": str(i + 52), "pair_id": f"q{i}", "perturbation": "numbers"}
        for i in range(10)
    ]
    rows += [
        {"prompt": f"Bob asks what is {i} plus two?", "answer": str(i + 2), "pair_id": f"q{i}", "perturbation": "names"}
        for i in range(4)
    ]
    rows += [{"prompt": "what is ninety plus two?", "answer": "92", "pair_id": "alone", "perturbation": "numbers"}]
    return str(
        ingest(
            write_lines(root / "sums.jsonl", [row | {"split": "test"} for row in rows]), root / "w", kind="prompts/1"
        ).workdir
        / "out"
        / "data"
    )


def test_perturbed_items_are_paired_with_their_originals(tiny, changed, tmp_path):
    result, records = evaluate(tmp_path, {"model": tiny["other"], "prompts": changed})
    assert sum(r["pair"] == "alone" for r in records) == 1 and result["summary"]["prompts"] == 10
    assert any(w["code"] == "perturbed_prompts_alone" and "1 pair_ids" in w["text"] for w in result["warnings"])
    records = scores.records_of(open_dataset(tmp_path / "out" / "samples").iter_rows())
    forms = {}
    for i in range(10):  # what a model would do that knows the items by heart, but for two
        forms[f"q{i}", ""] = i < 8
        forms[f"q{i}", "numbers"] = i in (0, 9)
        forms[f"q{i}", "names"] = i < 4 and i != 3
    for r in records:
        r["correct"] = forms.get((r["pair"], r["perturbation"]), True)
    rows = {(row["metric"], row["perturbation"]): row for row in perturbed.table(records)}
    numbers = rows["greedy_accuracy", "numbers"]
    assert (
        numbers["pairs"],
        numbers["original"],
        numbers["perturbed"],
        numbers["right to wrong"],
        numbers["wrong to right"],
    ) == (10, 0.8, 0.2, 7, 1)
    assert (
        numbers["gap"] == pytest.approx(0.6)
        and numbers["low"] > 0
        and numbers["McNemar p"] == pytest.approx(scores.statistics.mcnemar_exact(7, 1))
    )
    assert rows["greedy_accuracy", "names"]["pairs"] == 4 and rows["greedy_accuracy", "names"]["gap"] == 0.25
    metrics = scores.all_metrics(records)
    assert metrics["greedy_accuracy"].value == 0.8 and metrics["greedy_accuracy"].n == 10  # of the originals alone
    assert metrics["perturbed/greedy_accuracy/gap"].value == pytest.approx((0.6 * 10 + 0.25 * 4) / 14)
    assert metrics["perturbed/greedy_accuracy/gap/perturbation=names"].value == 0.25


def test_perturbed_items_are_in_no_number_of_the_gate_and_of_clean_scores(tmp_path):
    """Originals all right, their forms all wrong: whoever reads the samples says what the evaluation said."""
    from types import SimpleNamespace

    from stages import promote

    asked = [
        complete_row(
            "prompts/1",
            {"prompt": [{"role": "user", "content": f"what is {i} plus two, and what is it not?"}], "answer": "1"},
            dataset="bench",
            source="s",
            origin="human",
            split="test",
        )
        for i in range(8)
    ]
    write_dataset(str(tmp_path / "prompts"), "bench", "prompts/1", asked)
    samples = str(tmp_path / "samples")
    write_dataset(
        samples,
        "samples",
        "eval_samples/1",
        [
            complete_row(
                "eval_samples/1",
                {
                    "run_id": "r",
                    "item_id": row["row_id"],
                    "sample_idx": 0,
                    "output": "",
                    "correct": i % 2 == 0,
                    "format_error": False,
                    "tokens": 1,
                    "group_id": row["group_id"],
                    "prompt_id": row["prompt_id"],
                    "extra_json": json.dumps(
                        {"mode": "greedy", "finish": "stop", "pair": str(i // 2), "perturbation": "numbers" * (i % 2)}
                    ),
                },
                dataset="bench",
                source="s",
                origin="ai",
                split="test",
            )
            for i, row in enumerate(asked)
        ],
        meta={"protocol": {"prompts": "p"}, "model": "m"},
    )
    assert scores.all_metrics(scores.records_of(open_dataset(samples).iter_rows()))["accuracy"].value == 1.0
    text = str(tmp_path / "text")
    written(text, "text", "text/1", [{"text": "nothing of it"}])
    clean = execute(
        spec(
            "contamination",
            tmp_path / "c",
            {"prompts": str(tmp_path / "prompts"), "samples": samples, "training.text": text},
            {},
        )
    )["summary"]
    assert clean["accuracy"] == clean["accuracy_clean"] == clean["greedy_accuracy"] == 1.0
    judged = promote.Evaluation(
        "candidate",
        *promote.load_records(SimpleNamespace(dataset=lambda name: open_dataset(samples)), "candidate_samples"),
        {"protocol": {"prompts": "p"}, "model": "m"},
    )
    (row,) = promote.decide(promote.Config(min_prompts=2), judged, baseline=judged)["evidence"]
    assert (
        judged.metrics["accuracy"].value == row["candidate"] == 1.0
        and row["n"] == 4
        and judged.on("all").metrics.keys() >= {"perturbed/accuracy/gap"}
    )


def test_options_are_reordered_and_the_letter_moves_along(tiny, quiz, tmp_path):  # noqa: F811
    inputs = {"model": tiny["other"], "prompts": quiz}
    plain, before = evaluate(tmp_path / "plain", inputs)
    result, records = evaluate(tmp_path / "both", inputs, perturb_options=True)
    asked = {row["row_id"]: row for row in open_dataset(quiz).iter_rows(split="test")}
    twins = [r for r in records if r["mode"] == "letter" and r["perturbation"]]
    assert len(twins) == 12 and {r["pair"] for r in twins} == set(asked)
    for r in twins:
        row = asked[r["pair"]]
        lines = r["prompt"].split("\n")[1 : 1 + len(row["choices"])]
        assert lines != row["prompt"][-1]["content"].split("\n")[1 : 1 + len(row["choices"])]
        assert f"{r['answer']}. {row['choices']['ABCD'.index(row['answer'])]}" in lines
    said = {name: value for name, value in plain["summary"].items() if name != "protocol_hash"}
    kept = {
        name: value
        for name, value in result["summary"].items()
        if not name.startswith("perturbed/") and name != "protocol_hash"
    }
    # other rows in a batch
    assert set(kept) == set(said) and all(
        value == pytest.approx(said[name], rel=1e-4) if isinstance(value, float) else value == said[name]
        for name, value in kept.items()
    )
    assert result["summary"]["protocol_hash"] != plain["summary"]["protocol_hash"]
    assert "perturbed/mc_letter_acc/gap" in result["summary"]
    text = [r for r in records if r["mode"] == "text"]
    assert {r["pair"]: r["loglik"][0] for r in text if not r["perturbation"]}.keys() == asked.keys()
    with pytest.raises(ConfigError, match="there are none"):
        evaluate(tmp_path / "none", {"model": tiny["other"], "prompts": tiny["prompts"]}, perturb_options=True)


def test_two_originals_of_a_pair_are_refused(tiny, tmp_path):
    rows = [
        complete_row(
            "prompts/1",
            {
                "prompt": [{"role": "user", "content": f"one {i}"}],
                "answer": "1",
                "extra_json": '{"pair_id": "a", "perturbation": ""}',
            },
            dataset="d",
            source="s",
            origin="human",
            split="test",
        )
        for i in range(2)
    ]
    write_dataset(str(tmp_path / "twice"), "twice", "prompts/1", rows)
    with pytest.raises(ConfigError, match="two originals"):
        evaluate(tmp_path / "run", {"model": tiny["other"], "prompts": str(tmp_path / "twice")})


def test_the_frontier_is_that_of_the_vector_and_its_area_is_that_of_stairs():
    points = {
        "ref": (0.0, 0.1),
        "a": (1.0, 0.5),
        "worse": (2.0, 0.4),
        "b": (1.5, 0.6),
        "late": (3.0, 0.55),
        "again": (1.5, 0.6),
    }
    assert frontier.of(points) == {"ref", "a", "b"}
    spread = list(points.values())
    assert [frontier.reward_at(spread, kl) for kl in (0.5, 1.0, 9.0)] == [0.1, 0.5, 0.6] and frontier.reward_at(
        spread, -1
    ) is None
    assert (
        frontier.area(spread, 3.0) == pytest.approx((1 * 0.1 + 0.5 * 0.5 + 1.5 * 0.6) / 3)
        and frontier.area([(1.0, 2.0)], 1.0) is None
    )
    table = frontier.table(points, "reward")
    assert [row["model"] for row in table if row["on the frontier"]] == ["ref", "a", "b"] and table[-1][
        "best reward at this KL or less"
    ] == 0.6


def test_compare_draws_reward_against_kl_and_accuracy_against_tokens(evaluations, tmp_path):  # noqa: F811
    result = execute(
        spec(
            "compare",
            tmp_path,
            {f"evaluations.{name}": str(out / "samples") for name, (_, out) in evaluations.items()},
            {"kl_budgets": [0.01, 1000]},
        )
    )
    summary, means = result["summary"], {name: evaluations[name][0]["summary"] for name in evaluations}
    assert summary["policy/on_kl_frontier"] == 1.0 and summary["other/on_kl_frontier"] == float(
        means["other"]["reward"] > means["policy"]["reward"]
    )
    assert summary["kl_frontier/reward_at_kl=0.01"] == pytest.approx(means["policy"]["reward"])
    assert summary["kl_frontier/reward_at_kl=1000"] == pytest.approx(max(m["reward"] for m in means.values()))
    names = {report["name"] for report in result["reports"]}
    assert {"kl-frontier", "accuracy-by-tokens"} <= names


def test_thoughts_are_closed_and_drawn_out(tiny, tmp_path):
    """The forced tokens stand where they should, before them is what would have been sampled anyway, and what is not
    forced is not touched.
    """
    from transformers import AutoTokenizer

    from stages.evaluation import forcing

    tokenizer = AutoTokenizer.from_pretrained(tiny["policy"])
    ids = tokenizer("one two</think> four", add_special_tokens=False)["input_ids"]
    begun, behind = forcing.span(tokenizer, ids)
    assert (
        tokenizer.decode(ids[:begun]) == "one two"
        and tokenizer.decode(ids[begun:behind]) == "</think>"
        and forcing.span(tokenizer, ids[:begun]) is None
    )
    config = {"num_samples": 2, "greedy": False, "max_completion_length": 24, "chunk": 6}
    run = lambda name, **more: (
        execute(
            spec("evaluate", tmp_path / name, {"model": tiny["policy"], "prompts": tiny["prompts"]}, {**config, **more})
        ),
        scores.records_of(open_dataset(tmp_path / name / "out" / "samples").iter_rows()),
    )
    _, free = run("free")
    result, closed = run("closed", think_max=4)
    assert result["summary"]["forced/closed_rate"] == 1.0 and all(
        "</think>" in r["output"] and r["forced"] == {"closed": True, "waits": 0} for r in closed
    )
    for before, after in zip(free, closed):
        thought = after["output"].split("\n</think>")[0]
        # up to a character that was cut in two
        assert before["output"].startswith(thought.split("\ufffd")[0]) and after["tokens"] <= 24
    _, none = run("none", think_max=0)
    assert all(r["output"].startswith("\n</think>\n\n") for r in none)
    result, waited = run("waited", think_min=20)
    # no thought is closed, so none is drawn out
    assert result["summary"]["forced/waits"] == 0.0 and [r["output"] for r in waited] == [r["output"] for r in free]
    with pytest.raises(ConfigError, match="leave the input reference out"):
        execute(
            spec(
                "evaluate",
                tmp_path / "kl",
                {"model": tiny["policy"], "prompts": tiny["prompts"], "reference": tiny["policy"]},
                {**config, "think_max": 4},
            )
        )
    with pytest.raises(ConfigError, match="larger think_max"):
        run("both", think_max=4, think_min=5)


def test_a_thought_that_ends_early_waits(tiny):
    """A sampler that closes at once, then goes on: its end is taken away, Wait put there, and it continues from that,
    twice at most.
    """
    from types import SimpleNamespace

    from transformers import AutoTokenizer

    from stages.chat import renderer_for
    from stages.decoding.sampler import Completion
    from stages.decoding.sampling import SamplingParams
    from stages.evaluation import forcing
    from stages.generation import Sample

    renderer, tokenizer = renderer_for(tiny["policy"]), AutoTokenizer.from_pretrained(tiny["policy"])
    code = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    asked = []

    class Closing:
        tokenizer, model = renderer.tokenizer, None

        def generate(self, prompts, params, seeds):
            asked.extend(tokenizer.decode(ids) for ids in prompts)
            return [[Completion(code(" no</think>yes"), [0.0], "eos", "")] for _ in prompts]

    first = Sample({"row_id": "r"}, code("Q"), 0, code("so</think>4"), None, "eos", "so</think>4")
    config = SimpleNamespace(think_min=1000, think_max=None, think_waits=2)
    ((made,),) = forcing.forced(
        config,
        Closing(),
        renderer,
        [({"row_id": "r"}, code("Q"))],
        [[first]],
        SamplingParams(max_new_tokens=2000, stop_ids=frozenset(renderer.stop_ids)),
        lambda *a: 1,
    )
    assert (
        asked == ["QsoWait", "QsoWait noWait"]
        and made.text == "soWait noWait no</think>yes"
        and made.forced == {"waits": 2, "closed": False}
    )
