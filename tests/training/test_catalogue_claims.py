"""What the catalogue says in words about sft, distill, reward models, rejection sampling and align: defaults, what is
dropped, what is refused, what is logged.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.harness import execute
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import assistant, silent, user

BASE = {"batch_size": 4, "max_steps": 2, "max_length": 96, "learning_rate": 1e-3}


def write(path, kind, rows):
    write_dataset(
        str(path),
        path.name,
        kind,
        [
            complete_row(
                kind,
                r,
                dataset="d",
                source="s",
                origin="human",
                split=r.get("split", "validation" if i % 6 == 0 else "train"),
            )
            for i, r in enumerate(rows)
        ],
    )
    return str(path)


def pair(i, **more):
    return {
        "prompt": user(f"which {i}? " + "hm " * (i % 5)),
        "chosen": assistant("yes " * (1 + i % 3) + "good"),
        "rejected": assistant("no " * (1 + i % 4) + str(i)),
        "pairs_in_group": 1,
        **more,
    }


def metrics_of(made):
    rows = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row], rows


def warnings_of(stage_made):
    events = []
    result = execute(stage_made, events.append)
    return result, json.dumps(events)


# -- direct alignment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method,expected", (("dpo", math.log(2)), ("ipo", 25.0), ("kto", 0.5)))
@pytest.mark.parametrize("update", ("frozen", "ema"))
def test_the_reference_is_computed_in_the_precision_of_training(tiny, data, spec, method, expected, update):
    """da.dpo: "ref computed with different dtype". In bfloat16 too policy equals reference at step 0."""
    made = spec(
        "align",
        {**BASE, "method": method, "compute_dtype": "bfloat16", "reference_update": update},
        {"model": tiny["policy"], "data": data["pairs"]},
        "half",
    )
    execute(made, silent)
    first = metrics_of(made)[0][0]
    assert first["loss"] == pytest.approx(expected, rel=1e-3) and abs(first["displacement/chosen_shift"]) < 1e-2


def test_a_cache_whose_values_are_not_the_references_is_not_used(tiny, data, spec, tmp_path):
    """da.ref_cache: a sample is compared with the live reference, whatever the fingerprints say."""
    made = spec("align", BASE, {"model": tiny["policy"], "data": data["pairs"]}, "first")
    rows = list(open_dataset(execute(made, silent)["outputs"]["ref_logps"]["path"]).iter_rows())
    for name, shift, reused in (("true", 0.0, len(rows)), ("false", 1.0, 0)):
        made = spec("align", BASE, {"model": tiny["policy"], "data": data["pairs"]}, name)
        path = write(
            tmp_path / f"cache-{name}",
            "ref_logps/1",
            [{**r, "ref_chosen_logp": r["ref_chosen_logp"] + shift} for r in rows],
        )
        made["inputs"]["ref_logps"] = {"kind": "dataset", "path": path, "ref": "c", "digest": "c"}
        result, events = warnings_of(made)
        assert open_dataset(result["outputs"]["ref_logps"]["path"]).manifest["counts"]["from_cache"] == reused
        assert ("wrong_reference_cache" in events) == (reused == 0)


def test_a_cache_of_rankings_with_tied_responses_serves_where_none_was_left_out(tiny, spec, tmp_path):
    """pl_dpo leaves tied responses out and sppo keeps them: rows without ties are reused, and no others; only rows of
    the run count as reused.
    """
    rows = [
        {
            "prompt": user(f"rank {i}"),
            "completions": [assistant(f"best {i}"), assistant("good " * (1 + i % 2)), assistant("no")],
            "ranks": [1, 2, 2 if i == 8 else 3],
        }
        for i in range(12)
    ]
    path = write(tmp_path / "ranked", "rankings/1", rows)

    def run(method, cache=None, steps=3):
        config = {**BASE, "method": method, "max_steps": steps}
        made = spec("align", config, {"model": tiny["policy"], "data": path}, f"{method}-{bool(cache)}-{steps}")
        if cache:
            made["inputs"]["ref_logps"] = {"kind": "dataset", "path": cache, "ref": "c", "digest": "c"}
        result = execute(made, silent)
        found = result["outputs"]["ref_logps"]["path"]
        return result["summary"], found, open_dataset(found).manifest["counts"]

    alone, _, _ = run("pl_dpo")
    _, cache, counts = run("sppo")
    assert counts["rows"] == 12
    again, _, counts = run("pl_dpo", cache)
    assert again == alone and (counts["rows"], counts["from_cache"]) == (12, 11)
    _, _, counts = run("sppo", cache, steps=1)
    assert counts["from_cache"] == counts["rows"] == 6, "4 rows of one step and 2 validation rows"


def test_options_out_of_range_are_refused(tiny, data, spec):
    for method, options, more, text in (
        ("odpo", {"offset_fn": "ln"}, {}, "log, identity"),
        ("robust_dpo", {"label_smoothing": 0.5}, {}, "< 0.5"),
        ("discopop", {"discopop_tau": 0.0}, {}, "discopop_tau"),
        ("kto", {"desirable_weight": -1.0}, {}, "desirable_weight"),
        ("bco", {"momentum": 1.0}, {}, "momentum"),
        ("cpo", {}, {"nll_coef": 0.0}, "reference_free"),
    ):
        with pytest.raises(ValueError, match=text):
            execute(
                spec(
                    "align",
                    {**BASE, "method": method, "options": options, **more},
                    {"model": tiny["policy"], "data": data["pairs"]},
                    "wrong",
                ),
                silent,
            )


def test_a_reference_with_another_vocabulary_is_refused(tiny, data, spec, tmp_path):
    import shutil

    shutil.copytree(tiny["other"], tmp_path / "alien")
    file = tmp_path / "alien/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="another tokenizer"):
        execute(
            spec(
                "align",
                BASE,
                {"model": tiny["policy"], "data": data["pairs"], "reference": str(tmp_path / "alien")},
                "alien",
            ),
            silent,
        )


# -- rows that say nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage,data_kind", (("sft", "demonstrations"), ("align", "pairs"), ("reward_model", "pairs")))
def test_a_weight_of_zero_counts_nothing(tiny, data, spec, tmp_path, stage, data_kind):
    """Rows of weight 0 beside weighted ones leave the step as if they were not there (section 0: sum w l / sum w)."""
    rows = [r for r in open_dataset(data[data_kind]).iter_rows() if r["split"] == "train"][:8]
    losses = []
    for name, weighted in (
        ("half", [{**r, "weight": 2.0 * (i % 2)} for i, r in enumerate(rows)]),
        ("kept", [{**r, "weight": 2.0} for r in rows[1::2]]),
    ):
        path = write(tmp_path / name, rows[0]["schema"], [{**r, "split": "train"} for r in weighted])
        made = spec(stage, {**BASE, "batch_size": 8}, {"model": tiny["policy"], "data": path}, name)
        execute(made, silent)
        losses.append(metrics_of(made)[0][0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_ties_train_no_hard_label(tiny, spec, tmp_path):
    """rm.bt: a tie is dropped from training and counted, unless the loss reads label_prob."""
    path = write(tmp_path / "ties", "pairs/1", [pair(i, label_prob=0.5 if i % 2 else 0.9) for i in range(24)])
    ties = 12
    for stage, config, dropped in (
        ("reward_model", {"objective": "bt"}, ties),
        ("reward_model", {"objective": "soft_label"}, 0),
        ("reward_model", {"objective": "pairwise"}, ties),
        ("reward_model", {"objective": "t2t_pair"}, ties),
        ("align", {"method": "dpo"}, ties),
        ("align", {"method": "mdpo"}, ties),
        ("align", {"method": "soft_dpo"}, 0),
    ):
        summary = execute(
            spec(
                stage,
                {**BASE, **config, "max_steps": 1},
                {"model": tiny["policy"], "data": path},
                f"{stage}-{'-'.join(config.values())}",
            ),
            silent,
        )["summary"]
        assert summary.get("dropped/tie", 0) == dropped, (stage, config)
    judged = execute(
        spec(
            "reward_model",
            {**BASE, "max_steps": 1},
            {
                "model": tiny["policy"],
                "data": write(
                    tmp_path / "held", "pairs/1", [pair(i, label_prob=0.5 if i in (0, 6) else 1.0) for i in range(24)]
                ),
            },
            "held",
        ),
        silent,
    )["summary"]
    assert judged["validation/pairs"] == 2, "nobody can be right about a tie"


def test_a_margin_tightens_or_the_run_says_that_there_is_none(tiny, spec, tmp_path):
    """rm.margin: m >= 0; a pair with a negative one would relax the loss, and pairs without any are plain bt."""
    for name, margin, negative in (("some", lambda i: -1.0 if i in (1, 2) else 0.5, 2), ("none", lambda i: None, 0)):
        path = write(tmp_path / name, "pairs/1", [pair(i, margin=margin(i)) for i in range(18)])
        result, events = warnings_of(
            spec(
                "reward_model",
                {**BASE, "objective": "margin", "max_steps": 1},
                {"model": tiny["policy"], "data": path},
                name,
            )
        )
        assert result["summary"].get("dropped/negative_margin", 0) == negative and ("no_margins" in events) == (
            name == "none"
        )


def test_pairs_that_a_template_writes_alike_are_dropped(tiny, spec, tmp_path):
    """Section 0: identical again after tokenisation, without any truncation."""
    from stages.chat import load_tokenizer
    from stages.models.modeling import load_policy, save_policy

    tokenizer = load_tokenizer(tiny["policy"])
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'].strip()")
    trimming = str(tmp_path / "trimming")
    save_policy(load_policy(tiny["policy"]), tokenizer, trimming)
    rows = [pair(i) for i in range(18)]
    path = write(
        tmp_path / "alike",
        "pairs/1",
        [
            {**r, "rejected": assistant(r["chosen"][0]["content"] + "  ")} if i in (1, 2, 3) else r
            for i, r in enumerate(rows)
        ],
    )
    for stage in ("align", "reward_model"):
        summary = execute(spec(stage, {**BASE, "max_steps": 1}, {"model": trimming, "data": path}, stage), silent)[
            "summary"
        ]
        assert summary["dropped/identical_after_tokenisation"] == 3 and summary["pairs"] == 12


def test_the_token_that_begins_a_document_is_not_trained():
    """sft.mask: full = all but BOS; also where BOS and EOS are one token, whose second one is trained."""
    from types import SimpleNamespace

    from stages.sft import encode_text

    class Texts:
        @staticmethod
        def iter_rows(columns, split):
            return iter([{"text": "ab"}, {"text": "c"}, {"text": "de"}])

        @staticmethod
        def rows_of(split):
            return 3

    renderer = SimpleNamespace(tokenizer=SimpleNamespace(bos_token_id=0), text_ids=lambda text: [0, *map(ord, text), 0])
    (first, second), _ = encode_text(Texts, "train", renderer, SimpleNamespace(max_length=8))
    assert first.responses[0].tolist() == [0, 97, 98, 0, 0, 99, 0, 0] and first.masks[0].tolist() == [
        0,
        1,
        1,
        1,
        0,
        1,
        1,
        0,
    ]
    assert second.responses[0].tolist() == [100, 101, 0] and second.masks[0].tolist() == [
        0,
        1,
        1,
    ], "a row's first token has no predictor"


# -- settings ----------------------------------------------------------------------------------------------------------


def test_defaults_of_the_catalogue():
    from stages.align import Config as Align
    from stages.distill import Config as Distill
    from stages.reward_model import Config as Reward
    from stages.sft import Config as SFT

    assert (
        SFT().learning_rate,
        SFT(lora_rank=8).learning_rate,
        SFT(lora_rank=8, learning_rate=1e-5).learning_rate,
    ) == (2e-5, pytest.approx(2e-4), 1e-5)
    assert (Align().learning_rate, Align(lora_rank=8).learning_rate) == (5e-7, pytest.approx(5e-6)) and Reward(
        lora_rank=8
    ).learning_rate == 1e-5
    assert SFT(**SFT(lora_rank=8).model_dump()).learning_rate == pytest.approx(2e-4), (
        "resolved settings come back as they are"
    )
    gkd = Distill(method="on_policy")
    assert (gkd.direction, gkd.jsd_beta, gkd.lmbda, gkd.sampling_temperature) == ("jsd", 0.5, 0.5, 0.9)
    assert Distill().direction == "forward" and Distill(method="on_policy", direction="reverse").direction == "reverse"
    with pytest.raises(ValueError, match="last, mean or min"):
        Reward(objective="orm", aggregation="prod")


def test_rank_stabilised_lora_counts_by_the_root_of_the_rank(tiny):
    from stages.models.adapters import add_lora
    from stages.models.modeling import load_policy
    from stages.settings import OptimizerConfig

    for stabilised, expected in ((False, 8 / 4), (True, 8 / 2)):
        model = add_lora(
            load_policy(tiny["policy"]), OptimizerConfig(lora_rank=4, lora_alpha=8, lora_rslora=stabilised), 0
        )
        assert {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")} == {expected}


def test_the_best_pass_by_a_divergence_is_the_lowest(tiny, data, spec):
    made = spec(
        "distill",
        {**BASE, "max_steps": 3, "learning_rate": 1e-2, "select_by": "kl", "eval_every": 1},
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "kl",
    )
    made["inputs"]["teacher"] = {"kind": "model", "path": tiny["other"], "ref": "t", "digest": "t"}
    summary = execute(made, silent)["summary"]
    passes = [row["validation/kl"] for row in metrics_of(made)[1] if "validation/kl" in row]
    assert (
        summary["validation/kl"] == pytest.approx(min(passes))
        and summary["validation/kl"] < summary["validation/kl_before"]
    )


def test_a_constant_divides_token_sums(tiny, data, spec):
    """AGG seq-mean-token-sum-norm: the sum mode over the constant, by default max_length."""
    losses = {}
    for name, config in (
        ("sum", {"loss_agg_mode": "seq-mean-token-sum"}),
        ("norm", {"loss_agg_mode": "seq-mean-token-sum-norm"}),
        ("given", {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7}),
    ):
        made = spec(
            "sft", {**BASE, **config, "max_steps": 1}, {"model": tiny["policy"], "data": data["demonstrations"]}, name
        )
        execute(made, silent)
        losses[name] = metrics_of(made)[0][0]["loss"]
    assert losses["norm"] == pytest.approx(losses["sum"] / 96) and losses["given"] == pytest.approx(losses["sum"] / 7)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_sft_logs_accuracy_tokens_and_cut_rows(tiny, data, spec):
    """Section H: token accuracy, the unaggregated token count, the share of cut rows; accuracy against argmax over
    whole logits.
    """
    from stages.chat import renderer_for
    from stages.models.modeling import load_policy

    made = spec(
        "sft",
        {**BASE, "batch_size": 64, "max_steps": 1, "max_length": 36},
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "log",
    )
    execute(made, silent)
    logged, model, renderer = metrics_of(made)[0][0], load_policy(tiny["policy"]).eval(), renderer_for(tiny["policy"])
    right = total = cut = rows = 0
    for row in open_dataset(data["demonstrations"]).iter_rows(split="train"):
        found = renderer.conversation(row["messages"], train_turns=row["train_turns"], max_length=36)
        if not found.n_targets:
            continue
        best = model(torch.tensor([found.ids])).logits[0, :-1].argmax(-1).numpy()
        mask = np.array(found.mask[1:], bool)
        right = right + (best == np.array(found.ids[1:]))[mask].sum()
        total = total + mask.sum()
        cut = cut + found.truncated
        rows = rows + 1
    assert 0 < cut < rows
    assert logged["mean_token_accuracy"] == pytest.approx(right / total) and logged["trained_tokens"] == total
    assert logged["truncated_fraction"] == pytest.approx(cut / rows)


def test_sft_says_what_becomes_of_held_out_pairs(tiny, data, spec, tmp_path):
    """sft.nll, log: mean S_pi of rejected answers while chosen ones are learned, beside that of the chosen ones, at
    every pass; the published weights' from their own logits.
    """
    from stages.chat import renderer_for
    from stages.models.modeling import load_policy

    made = spec(
        "sft",
        {**BASE, "max_steps": 4, "eval_every": 2},
        {"model": tiny["policy"], "data": data["demonstrations"], "pairs": data["pairs"]},
        "watched",
    )
    result, plain = execute(made, silent), tmp_path / "plain"
    logged = [row for row in metrics_of(made)[1] if "validation/logps/rejected" in row]
    assert len(logged) == 3

    def by_hand(path):
        model, renderer = load_policy(path).eval(), renderer_for(path)
        sums = {"chosen": [], "rejected": []}
        for row in open_dataset(data["pairs"]).iter_rows(split="validation"):
            for side, found in sums.items():
                prompt, ids, mask = renderer.completion_ids(row["prompt"], row[side])
                logps = model(torch.tensor([[*prompt, *ids]])).logits[0, :-1].log_softmax(-1)
                at = [len(prompt) - 1 + k for k, on in enumerate(mask) if on]
                found.append(sum(float(logps[t, ids[t - len(prompt) + 1]].detach()) for t in at))
        return {side: float(np.mean(found)) for side, found in sums.items()}

    before, after = by_hand(tiny["policy"]), by_hand(result["outputs"]["model"]["path"])
    for side in ("chosen", "rejected"):
        assert logged[0][f"validation/logps/{side}"] == pytest.approx(before[side], rel=1e-4)
        assert logged[-1][f"validation/logps/{side}"] == pytest.approx(after[side], rel=1e-4)
        assert result["summary"][f"validation/logps/{side}_before"] == pytest.approx(before[side], rel=1e-4)
        assert result["summary"][f"validation/logps/{side}"] == pytest.approx(after[side], rel=1e-4)
        assert before[side] != pytest.approx(after[side], rel=1e-3)
    # watching changes nothing
    other = spec(
        "sft",
        {**BASE, "max_steps": 4, "eval_every": 2},
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "unwatched",
    )
    weights = [
        Path(found["outputs"]["model"]["path"], "model.safetensors").read_bytes()
        for found in (result, execute(other, silent))
    ]
    assert weights[0] == weights[1]
    # and there has to be something to watch
    all_train = write(plain, "pairs/1", [pair(i, split="train") for i in range(4)])
    nothing = spec("sft", BASE, {"model": tiny["policy"], "data": data["demonstrations"], "pairs": all_train}, "none")
    with pytest.raises(ValueError, match="no validation rows"):
        execute(nothing, silent)


# -- rejection sampling ------------------------------------------------------------------------------------------------


def test_means_of_a_selection_are_of_the_same_rows_under_names_of_their_own(tiny, data, spec, tmp_path):
    """Copies of an answer count in the mean reward as in the share of right ones; components called as a number of the
    total keep theirs."""
    group = [("a", 1.0, True), ("a", 1.0, True), ("a", 1.0, True), ("b", 0.0, False)]
    rows = [
        {
            "prompt": user("question"),
            "prompt_idx": 0,
            "completion_idx": j,
            "completion": assistant(text),
            "scores": [{"source": "best", "value": value}, {"source": "selected", "value": 10 * value}],
            "reward": value,
            "correct": right,
            "kept": True,
            "split": "train",
        }
        for j, (text, value, right) in enumerate(group)
    ]
    made = spec("rejection", {}, {"model": tiny["policy"], "prompts": data["prompts"]}, "means")
    made["inputs"]["candidates"] = {
        "kind": "dataset",
        "path": write(tmp_path / "candidates", "candidates/1", rows),
        "ref": "c",
        "digest": "c",
    }
    summary = execute(made, silent)["summary"]
    assert summary["reward"] == summary["correct/mean"] == 0.75
    assert (summary["valid"], summary["duplicates"], summary["completions"]) == (2, 2, 4)
    assert summary["reward/best"] == summary["reward/selected"] == 1.0
    assert (summary["reward/component=best"], summary["reward/component=selected"]) == (0.75, 7.5)
    assert summary["reward/component=selected/selected"] == 10.0
    # an answer without a verdict is neither right nor wrong, sampled or selected
    rows[3] |= {"prompt": user("another"), "prompt_idx": 1, "completion_idx": 0, "correct": None}
    made = spec("rejection", {}, {"model": tiny["policy"], "prompts": data["prompts"]}, "verdicts")
    path = write(tmp_path / "judged", "candidates/1", rows)
    made["inputs"]["candidates"] = {"kind": "dataset", "path": path, "ref": "d", "digest": "d"}
    summary = execute(made, silent)["summary"]
    assert (summary["selected"], summary["correct/mean"], summary["correct/selected"]) == (2, 1.0, 1.0)
    assert "truncated/correct" not in summary
    # one that was cut counts by what there is of it, as in evaluate, and is not selected
    rows[3] |= {"correct": True, "kept": False, "drop_reason": "truncated"}
    rows[2] |= {"correct": False}
    made = spec("rejection", {}, {"model": tiny["policy"], "prompts": data["prompts"]}, "cut")
    path = write(tmp_path / "cut", "candidates/1", rows)
    made["inputs"]["candidates"] = {"kind": "dataset", "path": path, "ref": "e", "digest": "e"}
    summary = execute(made, silent)["summary"]
    assert (summary["selected"], summary["correct/mean"], summary["truncated/correct"]) == (1, 0.75, 1)


def test_selectors_of_the_whole_matrix(tiny, data, spec, tmp_path):
    """rs.select: a cap per prompt, the size-matched random control, copies of a text that could not be scored."""
    prompts = [(user(f"question {i}"), [("a", 9.0), ("a", 9.0), ("b", 8.0), ("c", None), ("c", 7.0)]) for i in range(3)]
    rows = [
        {
            "prompt": prompt,
            "prompt_idx": i,
            "completion_idx": j,
            "completion": assistant(text),
            "scores": [],
            "reward": None if value is None else value - i,
            "correct": None,
            "kept": value is not None,
            "drop_reason": None if value is not None else "truncated",
            "split": "train",
        }
        for i, (prompt, group) in enumerate(prompts)
        for j, (text, value) in enumerate(group)
    ]
    path = write(tmp_path / "candidates", "candidates/1", rows)

    def selected(name, **config):
        made = spec("rejection", config, {"model": tiny["policy"], "prompts": data["prompts"]}, name)
        made["inputs"]["candidates"] = {"kind": "dataset", "path": path, "ref": "c", "digest": "c"}
        result = execute(made, silent)
        return [
            (r["messages"][0]["content"], r["messages"][-1]["content"])
            for r in open_dataset(result["outputs"]["selected"]["path"]).iter_rows()
        ], result["summary"]

    best, summary = selected("best", select="top_k_overall", k=3)
    assert best == [("question 0", "a"), ("question 0", "b"), ("question 1", "a")]
    assert (summary["duplicates"], summary["failed"], summary["reward/best"]) == (
        3,
        0,
        8.0,
    ) and "distinct_2" not in summary, "one word has no pair"
    capped, _ = selected("capped", select="top_k_overall", k=3, max_per_prompt=1)
    assert capped == [(f"question {i}", "a") for i in range(3)]
    chance, _ = selected("chance", select="random_k_overall", k=4)
    assert len(set(chance)) == 4 and chance != selected("more", select="top_k_overall", k=4)[0]
    low, _ = selected("low", select="top_k_per_prompt", k=3)
    assert [text for _, text in low] == ["a", "b", "c"] * 3, "an unscorable copy does not hide a scored one"


@pytest.mark.parametrize(
    "text,finish,total,reason",
    (
        ("fine", "eos", 1.0, None),
        (" \n", "eos", 1.0, "empty"),
        ("", "length", 1.0, "truncated"),
        ("fine", "eos", math.nan, "unscorable"),
    ),
)
def test_what_is_no_answer_is_never_selected(text, finish, total, reason):
    """Section 0: truncated, empty and failed completions are no targets and no chosen responses."""
    from stages.generation import Sample
    from stages.candidates.rows import candidate

    sample = Sample(
        {"prompt": user("q"), "prompt_id": "p", "group_id": "p", "split": "train", "weight": 1.0},
        [1],
        0,
        [2],
        None,
        finish,
        text,
    )
    sample.total, sample.parts = total, {}
    row = candidate(sample, 0, {}, {})
    assert (row["kept"], row["drop_reason"]) == (reason is None, reason)
