"""The align stage on every kind of data: conversions, options, degenerate rows, moving references, and kill -9 with a
state of its own.
"""

import json
import math
from types import SimpleNamespace
from pathlib import Path

import pytest
import torch

from stages.align import Config, agrees, both_fell, displaced, overfits, rows_seen, values_of
from stages.direct.direct_alignment import DirectAlignment
from stages.harness import execute
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import assistant, silent, user, written
from tests.training.test_align_methods import World, preferences  # noqa: F401
from tests.training.test_resume import outputs


def steps_of(made):
    return [json.loads(line) for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "method,kind",
    [
        ("simpo", "pairs"),
        ("orpo", "pairs"),
        ("kto", "unpaired"),
        ("kto", "pairs"),
        ("bco", "rankings"),
        ("dpo", "rankings"),
        ("dpo", "unpaired"),
        ("sppo", "rankings"),
        ("pl_dpo", "pairs"),
        ("2d_dpo", "segments"),
        ("mdpo", "pairs"),
        ("aot_unpaired", "pairs"),
        ("aot_paired", "pairs"),
    ],
)
def test_a_stage_run_trains_and_says_what_it_saw(tiny, preferences, spec, method, kind):
    """From a dataset of one kind, converted where the method wants another; two steps; the reference cache only where
    there is a reference.
    """
    if (method, kind) == ("dpo", "unpaired"):
        with pytest.raises(Exception, match="No row is left"):  # every row has a prompt of its own: no pair
            execute(
                spec(
                    "align",
                    {"method": method, "max_steps": 1, "max_length": 96},
                    {"model": tiny["policy"], "data": preferences[kind]},
                    "none",
                ),
                silent,
            )
        return
    made = spec(
        "align",
        {"method": method, "max_steps": 2, "batch_size": 4, "max_length": 96, "learning_rate": 1e-4},
        {"model": tiny["policy"], "data": preferences[kind]},
        f"{method}-{kind}",
    )
    result = execute(made, silent)
    free = method in ("simpo", "orpo")
    assert ("ref_logps" in result["outputs"]) == (not free)
    metrics = steps_of(made)[-1]["metrics"]
    assert not any("weighted/" in name for step in steps_of(made) for name in step["metrics"])
    assert math.isfinite(result["summary"]["validation/loss"]) and result["summary"]["skipped_steps"] == 0
    assert metrics["validation/displacement/chosen_shift"] == pytest.approx(
        result["summary"]["validation/displacement/chosen_shift"]
    )
    if not free:
        again = spec(
            "align", made["config"], {"model": tiny["policy"], "data": preferences[kind]}, f"{method}-{kind}-again"
        )
        again["inputs"]["ref_logps"] = {
            "kind": "dataset",
            "path": result["outputs"]["ref_logps"]["path"],
            "ref": "r",
            "digest": "r",
        }
        second = execute(again, silent)
        counts = open_dataset(second["outputs"]["ref_logps"]["path"]).manifest["counts"]
        assert counts["from_cache"] == counts["rows"] and second["summary"] == result["summary"]


def test_formatting_tokens_are_left_out_of_both_sides(tiny, preferences):
    """mask_formatting (Llama 3): without the end of turn nothing but the text's own tokens is a target, of chosen and
    rejected alike; nothing else changes.
    """
    from stages.algorithms import DIRECT_METHODS
    from stages.chat import renderer_for
    from stages.direct.preference_items import Encoder

    renderer, rows = renderer_for(tiny["policy"]), open_dataset(preferences["pairs"])
    plain, masked = (
        Encoder(renderer, DIRECT_METHODS["dpo"], Config(max_length=96, mask_formatting=on), None)(rows, "train")
        for on in (False, True)
    )
    assert plain and [item.row_id for item in plain] == [item.row_id for item in masked]
    for before, after in zip(plain, masked):
        assert list(before.prompt) == list(after.prompt)
        for ids, mask, own, own_mask in (
            map(list, four) for four in zip(before.responses, before.masks, after.responses, after.masks)
        ):
            assert (
                ids[-1] in renderer.stop_ids
                and own == ids[:-1]
                and own_mask == mask[:-1]
                and sum(own_mask) == sum(mask) - 1
            )


def test_masked_formatting_is_no_reason_to_warn_of_stop_tokens(tiny, preferences, spec):
    """What mask_formatting leaves out on purpose is not reported as a fault; a max_length that cuts answers still
    is.
    """

    def warnings(**settings):
        heard = []
        execute(
            spec(
                "align",
                {"method": "dpo", "max_steps": 1, "batch_size": 4, "max_length": 96, **settings},
                {"model": tiny["policy"], "data": preferences["pairs"]},
                str(settings),
            ),
            heard.append,
        )
        return [event["code"] for event in heard if event["event"] == "warning"]

    assert "stop_token_not_trained" in warnings(max_length=10)
    assert "stop_token_not_trained" not in warnings() + warnings(mask_formatting=True)


def test_loss_at_the_reference(tiny, preferences, spec):
    """Policy equals reference before the first step: DPO ln 2, KTO half its weight, APO 1, IPO (1/(2 tau))^2, 2D-DPO ln
    2 per segment.
    """
    for method, kind, expected in (
        ("dpo", "pairs", math.log(2)),
        ("kto", "unpaired", 0.5),
        ("apo_zero", "pairs", 1.0),
        ("ipo", "pairs", 25.0),
        ("2d_dpo", "segments", 2 * math.log(2)),
        ("mdpo", "pairs", 3 * math.log(2)),
        ("bco", "unpaired", math.log(2)),
        ("pl_dpo", "rankings", math.log(24)),
    ):
        made = spec(
            "align",
            {"method": method, "max_steps": 1, "batch_size": 4, "max_length": 96},
            {"model": tiny["policy"], "data": preferences[kind]},
            method,
        )
        execute(made, silent)
        assert steps_of(made)[0]["metrics"]["validation/loss"] == pytest.approx(expected, rel=1e-4), method


def test_exo_without_smoothing_is_refused_before_anything_is_loaded():
    """Its loss would be infinite: alone or in a sum, said with the settings and not at the first forward."""
    unsmoothed = {"method": "exo_pair", "options": {"label_smoothing": 0.0}}
    for settings in (unsmoothed, {"method": "dpo", "also": [{**unsmoothed, "weight": 1.0}]}):
        with pytest.raises(ValueError, match="label_smoothing=0.0 of method exo_pair: write a number >= 1e-12"):
            DirectAlignment(Config(**settings))
    for method, smoothing in (("exo_pair", 1e-3), ("dpo", 0.0)):
        DirectAlignment(Config(method=method, options={"label_smoothing": smoothing}))


def test_impossible_settings_say_what_to_write(tiny, preferences, spec):
    for config, inputs, text in (
        ({"method": "simpo"}, {"reference": "policy"}, "leave the reference input"),
        ({"method": "rrhf", "beta": 0.1}, {}, "no beta"),
        ({"method": "orpo", "reference_update": "ema"}, {}, "reference_update out"),
        ({"method": "kto", "nll_coef": 1.0}, {}, "leave it out"),
        ({"method": "cdpo", "options": {"smoothing": 0.1}}, {}, "label_smoothing"),
        ({"method": "pl_dpo", "logp_reduction": "mean"}, {}, "leave it out"),
        ({"method": "odpo", "options": {"offset_fn": 1.0}}, {}, "'log'"),
        ({"method": "2d_dpo"}, {}, "segments/1"),
        ({"method": "dpo", "reference_update": "ema"}, {"ref_logps": "policy"}, "ref_logps input out"),
    ):
        made = spec(
            "align", {**config, "max_steps": 1}, {"model": tiny["policy"], "data": preferences["pairs"]}, "wrong"
        )
        made["inputs"] |= {
            name: {"kind": "model", "path": tiny["policy"], "ref": "x", "digest": "x"} for name in inputs
        }
        with pytest.raises(ValueError, match=text):
            execute(made, silent)


@pytest.mark.parametrize(
    "config,text",
    [
        *(
            (
                {"reference_update": update, "select_by": name, "eval_every": 4},
                "measured from another reference.*reference_update=frozen",
            )
            for update, name in (
                ("per_interval", "loss"),
                ("ema", "rewards/accuracies"),
                ("tr_soft", "displacement/both_fell_fraction"),
            )
        ),
        *(
            ({"method": f"aot_{kind}", "logp_reduction": "mean"}, "by their sums; leave logp_reduction out")
            for kind in ("paired", "unpaired")
        ),
        ({"method": "wpo", "logp_reduction": "mean"}, "leave logp_reduction out"),
    ],
)
def test_what_a_moving_reference_or_means_would_make_meaningless_is_refused(config, text):
    with pytest.raises(ConfigError, match=text):
        DirectAlignment(Config(**config))
    kept = {"reference_update": "frozen"} if "reference_update" in config else {"logp_reduction": "sum"}
    DirectAlignment(Config(**{**config, **kept}))
    if "select_by" in config:
        DirectAlignment(Config(**{**config, "select_by": "logps/chosen"}))


# -- the cache of reference log-probs ---------------------------------------------------------------------------------


def test_a_cache_is_for_the_weights_tokens_and_precision_that_it_was_made_with():
    """da.ref_cache: reference, tokenizer, template, max_length, precision, what is scored; and nothing that has no part
    in a log-prob.
    """
    from stages.align import fingerprints

    def prints(role="model", digest="d", template="t", vocabulary="v", seed=0, **config):
        stage = SimpleNamespace(config=Config(**config), seed=seed, inputs={role: SimpleNamespace(digest=digest)})
        return fingerprints(stage, role, SimpleNamespace(template_hash=template, vocabulary_hash=vocabulary))

    mdpo, pairing = {"method": "mdpo"}, {"method": "2d_dpo"}
    for plain, others in (
        (
            {},
            (
                {"digest": "e"},
                {"template": "u"},
                {"vocabulary": "w"},
                {"max_length": 512},
                {"compute_dtype": "bfloat16"},
                {"mask_formatting": True},
                {"ld_alpha": 0.5},
                {"role": "reference", "frozen_dtype": "bfloat16"},
                {"lora_rank": 8, "frozen_dtype": "bfloat16"},
            ),
        ),
        (mdpo, ({**mdpo, "corruption": "shuffle"}, {**mdpo, "corruption_share": 0.25}, {**mdpo, "seed": 1})),
        (
            pairing,
            (
                {**pairing, "segment_pairing": "top_chosen_vs_bottom_rejected"},
                {**pairing, "aspect_weights": {"help": 1.0}},
            ),
        ),
    ):
        assert all(prints(**given) != prints(**plain) for given in others)
    for given in (
        {"beta": 0.3},
        {"batch_size": 8},
        {"seed": 1},
        {"method": "ipo"},
        {"role": "reference", "frozen_dtype": "float32"},
        {"max_tokens_per_micro_batch": 64},
    ):
        assert prints(**given) == prints()
    assert prints(ld_alpha=0.5) == prints(ld_alpha=0.25)


def test_a_cache_that_is_wrong_behind_the_sample_is_noticed_at_the_first_loss(tiny, preferences, spec, tmp_path):
    """da.dpo: policy equals reference at step 0, so the loss is ln 2; beside an NLL it is more, and that is no fault."""
    from stages.training import TrainingError

    def run(name, cache=None, **config):
        made = spec(
            "align",
            {"max_steps": 1, "batch_size": 6, "max_length": 96, **config},
            {"model": tiny["policy"], "data": preferences["pairs"]},
            name,
        )
        if cache:
            made["inputs"]["ref_logps"] = {"kind": "dataset", "path": cache, "ref": name, "digest": name}
        return execute(made, silent)["outputs"]["ref_logps"]["path"]

    rows = list(open_dataset(run("first")).iter_rows())
    wrong = [{**row, "ref_chosen_logp": row["ref_chosen_logp"] + 3.0 * (i >= 4)} for i, row in enumerate(rows)]
    path = str(tmp_path / "wrong")
    write_dataset(path, "wrong", "ref_logps/1", wrong)
    with pytest.raises(TrainingError, match="must be ln 2 = 0.6931, but it is 0.[67].*drop the ref_logps input"):
        run("wrong", path)
    run("beside an NLL", nll_coef=1.0)


# -- degenerate rows ------------------------------------------------------------------------------------------------


def test_identical_responses_have_no_gradient(tiny, preferences):
    world = World(tiny, preferences, method="dpo")
    for item in world.items:
        object.__setattr__(item, "responses", (item.responses[0],) * 2)
        object.__setattr__(item, "masks", (item.masks[0],) * 2)
        item.extra["ref"] = [item.extra["ref"][0]] * 2
    loss, gradient = world.step()
    assert loss == pytest.approx(math.log(2)) and gradient.abs().max() < 1e-12


def test_equal_or_missing_scores_are_dropped_where_the_loss_needs_them(tiny, preferences, tmp_path):
    rows = list(open_dataset(preferences["pairs"]).iter_rows(split="train"))
    rows[0]["chosen_score"] = rows[0]["rejected_score"]
    rows[1]["chosen_score"] = rows[1]["margin"] = None
    written(str(tmp_path / "d"), "d", "pairs/1", [r for r in rows])
    data = {**preferences, "pairs": str(tmp_path / "d")}
    odpo, rpo, dpo = (World(tiny, data, method=m) for m in ("odpo", "rpo", "dpo"))
    assert (len(odpo.items), len(rpo.items), len(dpo.items)) == (4, 5, 6)
    assert odpo.dropped["score_gap_not_positive"] == odpo.dropped["no_score"] == rpo.dropped["no_score"] == 1


def test_responses_that_a_tie_leaves_out_are_counted(tiny, tmp_path):
    """Plackett-Luce has one response per rank; what is left out is said."""
    rows = [
        complete_row(
            "rankings/1",
            {
                "prompt": user(f"r{i}"),
                "completions": [assistant(t) for t in ("a", "bb", "ccc", "dd d")],
                "ranks": ranks,
            },
            dataset="d",
            source="s",
            origin="human",
        )
        for i, ranks in enumerate(([1, 2, 2, 2], [1, 2, 3, 4], [1, 1, 1, 1]))
    ]
    write_dataset(str(tmp_path / "r"), "d", "rankings/1", rows)
    from stages.algorithms import DIRECT_METHODS
    from stages.chat import renderer_for
    from stages.direct.preference_items import Encoder

    encode = Encoder(
        renderer_for(tiny["policy"]), DIRECT_METHODS["pl_dpo"], Config(method="pl_dpo", max_length=96), None
    )
    items = encode(open_dataset(str(tmp_path / "r")), "train")
    assert (
        [len(i.responses) for i in items] == [2, 4]
        and encode.dropped["tied_responses"] == 2 + 3
        and encode.dropped["no_order"] == 1
    )


def test_kto_learns_from_a_batch_with_one_label_and_warns_about_weights(tiny, preferences):
    from stages.align import data_warnings

    world = World(tiny, preferences, method="kto")
    world.items = [i for i in world.items if i.extra["label"]]
    loss, gradient = world.step()
    assert 0 < loss < 1 and torch.isfinite(gradient).all() and gradient.abs().max() > 0
    assert "add rows of the other label" in data_warnings(world.config, world.objective, world.items, [])[0]
    world = World(tiny, preferences, method="kto", options={"desirable_weight": 5.0})
    assert "options.desirable_weight between" in data_warnings(world.config, world.objective, world.items, [])[0]
    # four good rows and two bad ones, of which each counts as two
    world = World(tiny, preferences, method="kto")
    assert "options.desirable_weight between" in " ".join(data_warnings(world.config, world.objective, world.items, []))
    for item in world.items:
        item.extra["weight"] = 1.0 if item.extra["label"] else 2.0
    assert data_warnings(world.config, world.objective, world.items, []) == []


@pytest.mark.parametrize(
    "method,kind",
    [
        ("dpo", "pairs"),
        ("length_norm", "pairs"),
        ("kto", "unpaired"),
        ("bco", "unpaired"),
        ("pl_dpo", "rankings"),
        ("2d_dpo", "segments"),
        ("mdpo", "pairs"),
    ],
)
@pytest.mark.parametrize("room", [4096, 40])
def test_at_the_reference_nothing_is_right_or_fell(tiny, preferences, spec, method, kind, room):
    """Rounding decided: the shares of a first step and of validation before it were others with every
    max_tokens_per_micro_batch.
    """
    made = spec(
        "align",
        {"method": method, "max_steps": 1, "batch_size": 4, "max_length": 96, "max_tokens_per_micro_batch": room},
        {"model": tiny["policy"], "data": preferences[kind]},
        f"{method}-{room}",
    )
    execute(made, silent)
    first = steps_of(made)[0]["metrics"]
    shares = {
        name: value
        for name, value in {**first, **steps_of(made)[1]["metrics"]}.items()
        if name.endswith(("rewards/accuracies", "displaced_fraction", "both_fell_fraction"))
    }
    assert len(shares) >= 2 and all(
        value == (0.5 if name.endswith("accuracies") else 0.0) for name, value in shares.items()
    ), shares


def test_a_difference_beyond_rounding_counts_and_one_within_does_not():
    """In float32 and in float64, whose steps near -200 are 1.5e-5 and 2.8e-14."""
    from stages.direct.direct_alignment import pair_metrics
    from stages.losses import displacement_metrics

    for dtype, within, beyond in ((torch.float32, 2e-4, 2e-3), (torch.float64, 4e-13, 4e-12)):
        for difference, right, fell in (
            (0.0, 0.5, 0.0),
            (within, 0.5, 0.0),
            (-within, 0.5, 0.0),
            (beyond, 1.0, 0.0),
            (-beyond, 0.0, 1.0),
        ):
            policy, ref = torch.tensor([-200.0 + difference], dtype=dtype), torch.tensor([-200.0], dtype=dtype)
            still = torch.tensor([-1.0], dtype=dtype)
            found = pair_metrics(0.1, policy, still, ref, still, torch.stack([policy - ref, still - still], 1))
            assert (
                float(found["rewards/accuracies"][0]),
                float(found["displacement/displaced_fraction"][0]),
                float(found["displacement/both_fell_fraction"][0]),
            ) == (right, fell, 0.0), (dtype, difference)
            sums = displacement_metrics(policy, still, ref, still)
            assert float(sums["accuracy"]) == right and float(found["displacement/chosen_shift"][0]) == pytest.approx(
                difference, rel=0.1, abs=1e-14
            )


@pytest.mark.parametrize("method", ["kto", "bco", "apo_zero_unpaired"])
@pytest.mark.parametrize("label", [True, False])
def test_one_label_alone_is_warned_of(tiny, preferences, method, label):
    """bco, whose shift is midway between two classes, and apo_zero_unpaired trained on one without a word."""
    from stages.align import data_warnings

    world = World(tiny, preferences, method=method)
    assert not any("other label" in text for text in data_warnings(world.config, world.objective, world.items, []))
    one = [i for i in world.items if i.extra["label"] == label]
    assert f"all rows are {'desirable' if label else 'undesirable'}; {method} learns" in " ".join(
        data_warnings(world.config, world.objective, one, [])
    )


@pytest.mark.parametrize(
    "config,warned",
    [
        ({"batch_size": 3}, "write batch_size=4"),
        ({"batch_size": 3, "max_steps": 2}, None),
        ({"batch_size": 4}, None),
        ({"batch_size": 7}, None),
        ({"batch_size": 2, "z_ref_mode": "zero"}, None),
        ({"batch_size": 2}, "write batch_size=4"),
        ({"batch_size": 1}, "raise batch_size"),
        ({"batch_size": 1, "z_ref_mode": "zero"}, None),
    ],
)
def test_kto_says_where_a_step_of_one_row_has_no_z0(tiny, preferences, config, warned):
    """Seven rows in steps of three end in a step of one, if the run gets there (da.kto: batch of 1)."""
    from stages.align import data_warnings

    world = World(tiny, preferences, method="kto", **config)
    texts = [t for t in data_warnings(world.config, world.objective, (world.items * 2)[:7], []) if "z0" in t]
    assert (len(texts) == 1 and warned in texts[0]) if warned else not texts


def test_z0_is_of_mismatched_prompts_mean_first_clamp_after(tiny, preferences):
    world = World(tiny, preferences, method="kto")
    for item in world.items:
        other = next(o for o in world.items if item.extra["mismatched"].row_id.endswith(o.row_id))
        assert other.extra["prompt_id"] != item.extra["prompt_id"]
        assert (
            item.extra["mismatched"].prompt.tolist() == item.prompt.tolist()
            and item.extra["mismatched"].responses[0].tolist() == other.responses[0].tolist()
        )
    ratios = []
    for item in world.items:
        with torch.no_grad():
            ratios.append(
                float(world.logps(world.policy, item.extra["mismatched"], 0).sum())
                - item.extra["mismatched"].extra["ref"][0]
            )
    alone = next(item for item, ratio in zip(world.items, ratios) if ratio > 0.0)
    assert world.objective.prepare(world.policy, [alone], "cpu")["kl"] == 0.0
    for shift in (0.0, 1e4):
        for item, ratio in zip(world.items, ratios):
            item.extra["mismatched"].extra["ref"][0] += shift
        z0 = world.objective.prepare(world.policy, world.items, "cpu")["kl"]
        assert z0 == pytest.approx(max(0.0, sum(ratios) / len(ratios) - shift), rel=1e-5)
    assert DirectAlignment(Config(method="kto", z_ref_mode="zero")).prepare(world.policy, world.items, "cpu") == {}


def test_a_held_out_z0_needs_validation_passes_while_it_trains(tiny, preferences, spec):
    """Without them z0 would be that of the start, which is z_ref_mode=zero."""
    with pytest.raises(ValueError, match="write eval_every=STEPS, or z_ref_mode=batch_mismatched"):
        Config(method="kto", z_ref_mode="heldout")
    inputs = {"model": tiny["policy"], "data": preferences["unpaired"]}
    config = {
        "method": "kto",
        "z_ref_mode": "heldout",
        "max_steps": 3,
        "batch_size": 4,
        "max_length": 96,
        "learning_rate": 3e-2,
        "warmup_ratio": 0.0,
    }
    with pytest.raises(ConfigError, match="the run of 3 optimizer steps has none while it trains.*smaller eval_every"):
        execute(spec("align", {**config, "eval_every": 3}, inputs, "late"), silent)
    made = spec("align", {**config, "eval_every": 1}, inputs, "held-out")
    execute(made, silent)
    used, held_out = (
        {step["step"]: step["metrics"][name] for step in steps_of(made) if name in step["metrics"]}
        for name in ("kl", "validation/kl")
    )
    assert [used[k + 1] for k in range(3)] == [held_out[k] for k in range(3)], (
        "each step under the estimate of the validation pass before it"
    )


@pytest.mark.parametrize("length", (24, 30, 200))
def test_mismatched_rows_fit_into_max_length(tiny, length, tmp_path):
    """A long prompt with another row's long answer is cut as any row is; what fits is as it was."""
    rows = [
        complete_row(
            "unpaired/1",
            {
                "prompt": user("why " * n),
                "completion": assistant("so " * n),
                "label": bool(i % 2),
                "label_kind": "thumbs",
            },
            dataset="d",
            source="s",
            origin="human",
        )
        for i, n in enumerate((1, 3, 8, 14, 20))
    ]
    write_dataset(str(tmp_path / "d"), "d", "unpaired/1", rows)
    from stages.algorithms import DIRECT_METHODS
    from stages.chat import renderer_for
    from stages.direct.preference_items import Encoder
    from stages.running import randomness

    items = Encoder(
        renderer_for(tiny["policy"]),
        DIRECT_METHODS["kto"],
        Config(method="kto", max_length=length),
        lambda *p: randomness.rng(0, "align", *p),
    )(open_dataset(str(tmp_path / "d")), "train")
    others = [item.extra["mismatched"] for item in items]
    assert len(others) == 5 and max(len(o.prompt) + len(o.responses[0]) for o in others) <= length
    by_name = {item.row_id: item for item in items}
    for other in others:
        mine, theirs = (by_name[name] for name in other.row_id.split("~"))
        if len(mine.prompt) + len(theirs.responses[0]) <= length:
            assert (
                other.prompt.tolist() == mine.prompt.tolist()
                and other.responses[0].tolist() == theirs.responses[0].tolist()
            )
        assert (
            mine.prompt.tolist()[len(mine.prompt) - len(other.prompt) :] == other.prompt.tolist()
            and len(other.prompt) > 0
            and sum(other.masks[0]) > 0
        )


def test_what_settings_cannot_do_for_this_run_is_said(tiny, preferences, spec):
    """A reference that would move after the last step, row weights that sorted matching cannot have, an NLL that is
    asked about the prompt and switched off.
    """

    def warnings(name, **settings):
        result = execute(
            spec(
                "align",
                {"max_steps": 3, "batch_size": 4, "max_length": 96, **settings},
                {"model": tiny["policy"], "data": preferences["pairs"]},
                name,
            ),
            silent,
        )
        return {w["code"]: w["text"] for w in result["warnings"]}

    late = warnings("late", reference_update="tr_soft", reference_interval=3)
    assert "3 optimizer steps" in late["reference_never_moves"] and "reference_never_moves" not in warnings(
        "moves", reference_update="tr_soft", reference_interval=2
    )
    for method in ("aot_unpaired", "aot_paired"):
        assert "weight" in warnings(method, method=method)["align_settings"]
    with pytest.raises(ConfigError, match="nll_coef=0.*leave options.nll_on_prompt out"):
        DirectAlignment(Config(method="orpo", nll_coef=0.0, options={"nll_on_prompt": True}))
    DirectAlignment(Config(method="orpo", nll_coef=0.0, options={"nll_on_prompt": False}))


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo", "simpo", "exo_pair", "discopop", "wpo", "alphapo", "rpo"])
def test_extreme_log_probs_stay_finite(tiny, preferences, method):
    """A reference 1e4 nats away on either side, and a policy that is certain."""
    world = World(tiny, preferences, method=method)
    for sign, item in zip([1, -1] * 3, world.items):
        if "ref" in item.extra:
            item.extra["ref"] = [v + sign * 1e4 * (1 - 2 * k) for k, v in enumerate(item.extra["ref"])]
    loss, gradient = world.step()
    assert math.isfinite(loss) and torch.isfinite(gradient).all()
    with torch.no_grad():
        for p in world.policy.parameters():
            p.mul_(30.0)
    loss, gradient = world.step()
    assert math.isfinite(loss) and torch.isfinite(gradient).all()


# -- options --------------------------------------------------------------------------------------------------------


def test_ipo_with_mean_log_ratios_and_simpo_with_nll(tiny, preferences):
    from tests.training.test_align_methods import FORMULAS, free, nll, pairwise

    world = World(tiny, preferences, method="ipo", logp_reduction="mean")
    expected, gradient = world.independent(pairwise(lambda r, w, l: (w / r["n"][0] - l / r["n"][1] - 5.0) ** 2))
    loss, ours = world.step()
    assert loss == pytest.approx(expected, rel=2e-6) and torch.allclose(
        ours, gradient, rtol=0, atol=2e-6 * float(gradient.abs().max())
    )
    world = World(tiny, preferences, method="simpo", nll_coef=0.3)
    simpo, _ = world.independent(FORMULAS["simpo"])
    both, gradient = world.independent(lambda rows: FORMULAS["simpo"](rows) + free(lambda r, w, l: 0.3 * nll(r))(rows))
    loss, ours = world.step()
    assert (
        loss == pytest.approx(both, rel=2e-6)
        and loss > simpo
        and torch.allclose(ours, gradient, rtol=0, atol=2e-6 * float(gradient.abs().max()))
    )


def test_slic_regularises_towards_target_answers(tiny, preferences, spec, tmp_path):
    """Of a prompt's demonstrations the first is the target; a pair whose prompt has none is left out."""
    pairs = list(open_dataset(preferences["pairs"]).iter_rows())

    def targets(name, *answers):
        rows = [
            {"messages": r["prompt"] + assistant(text), "train_turns": [len(r["prompt"])]}
            for text in answers
            for r in pairs[1:]
        ]
        path = written(str(tmp_path / name), "t", "demonstrations/1", rows)
        return {"targets": {"kind": "dataset", "path": path, "ref": name, "digest": name}}

    losses = []
    for k, given in enumerate(({}, targets("one", "the target"), targets("two", "the target", "another, longer one"))):
        made = spec(
            "align",
            {"method": "slic", "max_steps": 1, "batch_size": 4, "max_length": 96},
            {"model": tiny["policy"], "data": preferences["pairs"]},
            f"slic{k}",
        )
        made["inputs"] |= given
        summary = execute(made, silent)["summary"]
        losses.append(summary["validation/loss"])
        assert summary.get("dropped/no_target_answer", 0) == len(given)
    assert losses[0] != losses[1] == losses[2]


def test_bco_delta_is_a_running_mean_of_both_classes():
    objective = DirectAlignment(Config(method="bco", options={"momentum": 0.5}))
    step = {"loss": 0.7, "grad_norm": 1.0}
    objective.after_step({**step, "weighted/chosen": 1.0, "weighted/rejected": -3.0})
    assert objective.delta == pytest.approx(0.5 * (0.5 - 1.5))
    objective.after_step({**step, "weighted/chosen": 1.0})  # no undesirable row in this step
    objective.after_step({**step, "weighted/chosen": math.nan, "weighted/rejected": math.inf})
    assert objective.means == {"chosen": 0.75, "rejected": -1.5}
    for name in step:  # a step that the trainer skipped, though its rewards are numbers
        metrics = {**step, name: math.inf, "weighted/chosen": 9.0, "weighted/rejected": 9.0}
        objective.after_step(metrics)
        assert objective.means == {"chosen": 0.75, "rejected": -1.5} and not any("weighted" in n for n in metrics)


def test_a_skipped_step_moves_neither_weights_nor_the_shift_of_bco(tiny):
    from stages.batching import make_item
    from stages.models.modeling import load_policy
    from stages.training import Trainer

    config = Config(method="bco", options={"momentum": 0.5}, warmup_ratio=0)
    objective, model = DirectAlignment(config), load_policy(tiny["policy"])
    trainer, before = Trainer(model, objective, config, 3), next(model.parameters()).detach().clone()

    def rows(ref: float):
        return [
            make_item(f"{label}", [11, 12], [[13, 14]], [[1, 1]], weight=1.0, label=label, ref=[value])
            for label, value in ((True, 0.0), (False, ref))
        ]

    metrics = trainer.step(rows(math.nan))
    assert math.isfinite(metrics["weighted/chosen"]) and metrics["skipped_steps"] == 1.0
    objective.after_step(metrics)
    assert objective.means == {"chosen": 0.0, "rejected": 0.0} and torch.equal(before, next(model.parameters()))
    objective.after_step(trainer.step(rows(0.0)))
    assert objective.means["chosen"] and objective.means["rejected"]


PARTS = [("Aa.  Bb? Cc! Dd", ["Aa.", "Bb?", "Cc!", "Dd"], " "), ("a. b\n\nc. d\n\ne", ["a. b", "c. d", "e"], "\n\n")]


@pytest.mark.parametrize("text,parts,between", [*PARTS, ("a b c", ["a", "b", "c"], " "), ("a b", ["a", "b"], " ")])
@pytest.mark.parametrize("share,gone", ((0.01, (1, 1, 1)), (0.5, (2, 2, 1)), (0.99, (3, 2, 1))))
def test_corruption_changes_paragraphs_else_sentences_else_words_of_the_last_message(text, parts, between, share, gone):
    """A share of the parts (of 4, 3 or 2), at least one and never all, is dropped or cut off; the order is another."""
    import numpy as np

    from stages.direct.preference_items import corrupt

    messages, left = [{"role": "system", "content": "be. brief"}, *user(text)], len(parts) - gone[4 - len(parts)]

    def spoiled(mode, seed=0):
        first, last = corrupt(messages, mode, share, np.random.default_rng(seed))
        assert first == messages[0] and last["role"] == "user"
        return last["content"].split(between)

    assert spoiled("truncate") == parts[:left]
    drawn = [spoiled("drop", seed) for seed in range(20)]
    assert all(len(kept) == left and kept == [part for part in parts if part in kept] for kept in drawn)
    assert {part for kept in drawn for part in kept} == set(parts)
    mixed = [spoiled("shuffle", seed) for seed in range(20)]
    assert all(sorted(one) == sorted(parts) and one != parts for one in mixed)
    assert len({tuple(one) for one in mixed}) > (len(parts) > 2)
    assert corrupt(user("word"), "drop", share, np.random.default_rng(0)) is None


def test_probabilities_to_win_are_means_over_the_other_responses():
    from stages.direct.preference_items import win_probabilities

    scores = [math.log(3), 0.0, 0.0]
    assert win_probabilities("ranks", [1, 2, 2], scores) == [1.0, 0.25, 0.25]
    assert win_probabilities("bradley_terry", [1, 2, 2], scores) == pytest.approx([0.75, 0.375, 0.375], rel=1e-12)
    assert win_probabilities("scores", [1, 2, 3], [1.0, 0.4, 0.0]) == [1.0, 0.4, 0.0]
    for outside in (1.2, -0.1):
        with pytest.raises(ValueError, match="write win_probability=bradley_terry"):
            win_probabilities("scores", [1, 2], [0.5, outside])


def encoded(tiny, tmp_path, kind, rows, **config):
    """(items, what was dropped, the renderer) of rows with one method."""
    from stages.chat import renderer_for
    from stages.direct.direct_alignment import DirectAlignment
    from stages.direct.preference_items import Encoder

    config, renderer = Config(**{"max_length": 96, **config}), renderer_for(tiny["policy"])
    made = [complete_row(kind, row, dataset="d", source="s", origin="human", split="train") for row in rows]
    write_dataset(str(tmp_path), "d", kind, made)
    encode = Encoder(renderer, DirectAlignment(config).reads, config, None)
    return encode(open_dataset(str(tmp_path)), "train"), encode.dropped, renderer


@pytest.mark.parametrize("method,win", (("rrhf", "ranks"), ("sppo", "ranks"), ("sppo", "bradley_terry")))
def test_rankings_come_best_first_with_scores_or_ranks_as_rewards(tiny, tmp_path, method, win):
    texts = ["middle", "worst one", "best", "middling"]
    rows = [
        {"prompt": user(f"rank {k}"), "completions": [assistant(t) for t in texts], "ranks": ranks, "scores": scores}
        for k, (ranks, scores) in enumerate(
            (([2, 3, 1, 2], [0.5, -1.0, 2.0, 0.25]), ([2, 3, 1, 2], None), ([1] * 4, [4.0, 3.0, 2.0, 1.0]))
        )
    ]
    items, dropped, renderer = encoded(tiny, tmp_path / "r", "rankings/1", rows, method=method, win_probability=win)
    unscored = win == "ranks"
    assert (len(items), dropped["no_order"], dropped["no_score"]) == (1 + unscored, 1, 1 - unscored)
    for item, rewards in zip(items, ([2.0, 0.5, 0.25, -1.0], [-1.0, -2.0, -2.0, -3.0])):
        assert [renderer.decode(ids.tolist()).split("<")[0] for ids in item.responses] == [
            texts[i] for i in (2, 0, 3, 1)
        ]
        assert item.extra["rewards"] == rewards
        if win == "ranks":
            assert item.extra["win_prob"] == pytest.approx([1.0, 0.5, 0.5, 0.0])


def test_segments_in_tokens_are_those_that_are_left_and_trained(tiny, tmp_path):
    """Ends are cut to what is left of a response; where no pair of segments is left, the row is dropped."""

    def segments(*spans):
        return [{"start": a, "end": b, "scores": [{"aspect": "x", "score": s}]} for a, b, s in spans]

    row = {
        "prompt": user("explain"),
        "chosen": assistant("first part. second part."),
        "rejected": assistant("wrong. also wrong."),
        "offset_unit": "token",
        "chosen_segments": segments((0, 2, 0.9), (2, 3, 0.8), (3, 900, 0.7)),
        "rejected_segments": segments((0, 1, 0.1), (800, 900, 0.2), (1, 4, 0.3)),
    }
    none = row | {"prompt": user("explain it"), "rejected_segments": segments((800, 900, 0.2), (900, 901, 0.1))}
    (item,), dropped, _ = encoded(tiny, tmp_path / "s", "segments/1", [row, none], method="2d_dpo")
    longest = len(item.responses[0])
    assert item.extra["segments"] == [[(0, 2), (3, longest)], [(0, 1), (1, 4)]] and longest < 900
    assert item.extra["segment_weights"] == [[0.9, 0.7], [0.1, 0.3]]
    assert (dropped["unpaired_segments"], dropped["no_segment"]) == (1 + 3, 1)


def test_the_displacement_alarm_needs_three_falls_in_a_row():
    falling = [[0.0, 0.0], [-1.0, 1.0], [-2.0, 2.0], [-3.0, 3.0]]
    assert displaced(falling) and not displaced(falling[:3]) and not displaced(falling[:3] + [[-1.5, 4.0]])
    assert displaced([[9.0, -9.0], *falling]) and not displaced([*falling, [-4.0, 3.0]])
    assert not displaced([[0.0, 0.0], [-1.0, 1.0], [-1.0, 2.0], [-3.0, 3.0]]), "what stays is no fall"


def test_two_passes_in_a_row_in_which_both_sides_fell_are_an_alarm_while_it_trains():
    def rows(*shares):
        name = "validation/displacement/both_fell_fraction"
        return [{"step": 0, "loss": 0.7}, *({name: share} for share in shares)]

    assert both_fell(rows(0.0, 0.6, 0.7), 2) and not both_fell(rows(0.0, 0.6), 2) and both_fell(rows(0.0, 0.6), 1)
    assert not both_fell(rows(0.0, 0.6, 0.5, 0.9), 2) and not both_fell(rows(), 1) and not both_fell(rows("nan"), 1)


def test_more_than_99_percent_of_training_rows_with_no_gain_on_held_out_ones_is_an_alarm():
    def rows(train, held_out):
        return [{"loss": 0.1, "rewards/accuracies": a} for a in train] + [
            {"validation/rewards/accuracies": a} for a in held_out
        ]

    assert overfits(rows([0.5] * 30 + [1.0] * 4, [0.5, 0.8, 0.8]), 32)
    assert not overfits(rows([0.5] * 30 + [1.0] * 4, [0.5, 0.8]), 32), "held-out rows still gain"
    assert not overfits(rows([0.5] * 30 + [1.0, 1.0, 0.9, 1.0], [0.5, 0.8, 0.8]), 32)
    assert not overfits(rows([1.0] * 3, [0.5, 0.5]), 32), "fewer than a hundred rows"
    assert not overfits(rows([1.0] * 50, [0.5]), 32) and not overfits(rows([1.0] * 50, []), 32)
    assert not overfits(rows([1.0] * 90 + [0.9] + [1.0] * 9, [0.5, 0.5]), 100), "of the last tenth"


def test_a_run_that_overfits_says_so(tiny, spec, tmp_path):
    """Held-out pairs that prefer the opposite of what is learned."""
    texts = "yes good", "no bad"
    made = [
        complete_row(
            "pairs/1",
            {
                "prompt": user(f"which {i}?"),
                "chosen": assistant(texts[i % 5 == 4]),
                "rejected": assistant(texts[i % 5 != 4]),
            },
            dataset="made",
            source="s",
            origin="human",
            split="validation" if i % 5 == 4 else "train",
        )
        for i in range(10)
    ]
    write_dataset(str(tmp_path / "pairs"), "made", "pairs/1", made)
    config = {"batch_size": 8, "max_length": 64, "max_steps": 40, "learning_rate": 1e-3, "eval_every": 20}
    heard = []
    for name, steps in (("long", 40), ("short", 10)):
        events = []
        execute(
            spec(
                "align",
                {**config, "max_steps": steps},
                {"model": tiny["policy"], "data": str(tmp_path / "pairs")},
                name,
            ),
            events.append,
        )
        told = next((i for i, e in enumerate(events) if e.get("code") == "preferences_overfit"), None)
        heard.append(None if told is None else [e["step"] for e in events[:told] if e["event"] == "metric"][-1])
    assert heard == [19, None], "at the pass behind step 20, while it trains"


def test_cached_values_are_parted_by_response_and_compared_as_they_round():
    stored = {"schema": "ref_values/1", "ref_values": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "parts": [1, 2, 3]}
    assert values_of(stored) == [[1.0], [2.0, 3.0], [4.0, 5.0, 6.0]]
    assert values_of({**stored, "parts": None}) == stored["ref_values"]
    exact, low = Config(), Config(compute_dtype="bfloat16")
    assert agrees([-100.0, -2.0], [-100.05, -2.0], exact) and not agrees([-100.0, -2.0], [-100.5, -2.0], exact)
    assert agrees([-100.0, -2.0], [-101.5, -2.0], low) and not agrees([-100.0, -2.0], [-103.0, -2.0], low)
    assert agrees([[-1.0, -2.0], [-3.0]], [[-1.0, -2.0], [-3.0]], exact) and not agrees([[-1.0]], [[-1.0, -1.0]], exact)


def test_a_whole_epoch_reads_every_row_once():
    rows = list(range(6))
    for steps, size in ((None, 2), (2, 3), (3, 2), (9, 4)):
        assert rows_seen(None, rows, Config(max_steps=steps, batch_size=size)) is rows


def test_the_displacement_alarm_hears_every_validation_pass_also_those_before_a_kill(tiny, preferences):
    from stages.direct.direct_alignment import AlignmentRows
    from stages.training import Trainer

    world = World(tiny, preferences, method="dpo")
    stage, trainer = (
        SimpleNamespace(config=world.config, device="cpu"),
        Trainer(world.policy, world.objective, world.config, 1),
    )
    source, resumed = (AlignmentRows(stage, world.policy, world.objective, world.items, world.items) for _ in range(2))
    first = source.evaluate(trainer)
    resumed.restore(json.loads(json.dumps(source.state()[0])), None)
    with torch.no_grad():
        world.policy.get_output_embeddings().weight.mul_(1.1)
    second = resumed.evaluate(trainer)
    seen = [[found["displacement/chosen_shift"], found["rewards/margins"]] for found in (first, second)]
    assert resumed.history == seen and seen[0] != seen[1]


def test_likelihoods_that_both_fell_on_held_out_rows_are_warned_of(tiny, preferences, spec):
    """da.displacement: the loss falls with a growing margin, by making the rejected answers unlikely faster than the
    chosen ones; and one that makes both likelier.
    """

    def trained(name, code):
        made = spec(
            "align",
            {
                "method": "written",
                "options": {"code": code},
                "max_steps": 3,
                "batch_size": 6,
                "max_length": 96,
                "learning_rate": 1e-2,
            },
            {"model": tiny["policy"], "data": preferences["pairs"]},
            name,
        )
        result = execute(made, silent)
        return (
            result["summary"]["validation/displacement/both_fell_fraction"],
            "likelihood_displacement" in {w["code"] for w in result["warnings"]},
        )

    assert trained("fall", "softplus(pc - rc) + 3 * softplus(pr - rr)") == (1.0, True)
    assert trained("rise", "3 * softplus(rc - pc) + softplus(rr - pr)") == (0.0, False)


# -- moving references ----------------------------------------------------------------------------------------------


def test_reference_updates(tiny, tmp_path):
    """tr_soft mixes every interval, ema every step, per_interval copies; the rules of ``da.reference``."""
    from stages.direct.direct_alignment import MovingReference
    from stages.models.modeling import freeze, load_policy, load_weights, weights_file

    policy, start = load_policy(tiny["policy"]), load_policy(tiny["other"])
    pi, ref = (next(m.parameters()).detach().clone() for m in (policy, start))
    expected = {
        "tr_soft": [ref, 0.6 * pi + 0.4 * ref],
        "ema": [0.1 * pi + 0.9 * ref, 0.19 * pi + 0.81 * ref],
        "per_interval": [ref, pi],
    }
    for mode, after in expected.items():
        config = Config(reference_update=mode, reference_interval=2, reference_decay=0.9)
        moving = MovingReference(config, freeze(load_policy(tiny["other"])), "cpu")
        for step, want in enumerate(after, 1):
            moving.after_step(step, policy)
            assert torch.allclose(next(moving.model.parameters()), want, atol=1e-6), (mode, step)
        twin = MovingReference(Config(reference_update=mode), freeze(load_policy(tiny["other"])), "cpu")
        weights_file(moving.model)(tmp_path / mode)
        load_weights(twin.model, tmp_path / mode)
        assert torch.equal(next(twin.model.parameters()), next(moving.model.parameters()))


def test_a_reference_is_the_bias_corrected_average_of_the_policy(tiny, tmp_path):
    """Every two steps behind a burn-in of one, from where the policy started and not from where the reference did; the
    same from a checkpoint.
    """
    from stages.direct.direct_alignment import MovingReference
    from stages.models.modeling import freeze, load_policy

    config = Config(
        reference_update="bema",
        reference_bema={"update_freq": 1, "update_after": 1, "lag": 3.0, "bias_power": 0.5},
        reference_interval=2,
    )
    made = lambda: MovingReference(
        config, freeze(load_policy(tiny["other"])), "cpu", freeze(load_policy(tiny["policy"]))
    )
    moving, policy = made(), load_policy(tiny["policy"])
    name, parameter = next(iter(policy.named_parameters()))
    of = lambda reference: dict(reference.model.named_parameters())[name].detach().double()
    given, seen, mean = of(moving), [parameter.detach().double()], None
    expected = given
    for step in range(1, 8):
        with torch.no_grad():
            parameter.add_(0.1 * torch.sin(step + parameter))
        moving.after_step(step, policy)
        seen.append(parameter.detach().double())
        if step == 1:
            mean = seen[1]
        else:
            beta = (3.0 + step) ** -0.5
            mean = (1 - beta) * mean + beta * seen[step]
            if step % 2:
                expected = mean + (3.0 + step) ** -0.5 * (seen[step] - seen[1])
        assert torch.allclose(of(moving), expected, rtol=0, atol=1e-6), step
        if step == 4:
            state, files = moving.state()
            for file, write in files.items():
                write(tmp_path / file)
            moving = made()
            moving.restore(state, SimpleNamespace(path=lambda file: tmp_path / file))
    assert not torch.allclose(expected, given, atol=1e-2)


def test_an_averaged_reference_moves_with_its_average():
    assert Config(reference_update="bema", reference_bema={"update_freq": 7}).reference_interval == 7
    again = Config(**Config(reference_update="bema", reference_bema={"update_freq": 7}).resolved())
    assert again.reference_interval == 7 and again.reference_bema.update_freq == 7
    with pytest.raises(ValueError, match="write reference_interval=14, or reference_bema='{update_freq: 10}'"):
        Config(reference_update="bema", reference_bema={"update_freq": 7}, reference_interval=10)


GOLD = {
    "a text": ("the gold", "the gold"),
    "messages": ([{"role": "assistant", "content": "the gold"}], "the gold"),
    "with the prompt": ([*user("hi"), {"role": "assistant", "content": "the gold"}], "the gold"),
    "a question more": ([*user("other"), {"role": "assistant", "content": "the gold"}], None),
    "nothing said": ([], None),
    "the prompt alone": (user("hi"), None),
    "a number": (3, None),
    "no text": ([{"role": "assistant", "content": None}], None),
}


@pytest.mark.parametrize("said, wanted", GOLD.values(), ids=GOLD)
def test_a_gold_answer_comes_with_its_row(said, wanted):
    from stages.direct.preference_items import gold_answer

    found = gold_answer({"prompt": user("hi"), "extra_json": json.dumps({"reference": said})})
    assert found == (None if wanted is None else [{"role": "assistant", "content": wanted}])
    assert gold_answer({"prompt": user("hi"), "extra_json": None}) is None


def test_tpo_learns_from_the_gold_answers_of_its_rows_or_of_the_input_targets(tiny, spec, tmp_path):
    """From a file as TRL's TPOTrainer takes it; the same answers as an input give the same numbers, others other ones,
    and rows without one are left out.
    """
    gold = lambda i: assistant("gold " * (1 + i % 3) + str(i))
    rows = [
        {
            "prompt": user(f"number {i}"),
            "chosen": assistant("yes " * (1 + i % 3)),
            "rejected": assistant("no " * (1 + i % 2) + str(i)),
            "split": "validation" if i % 4 == 3 else "train",
        }
        for i in range(12)
    ]

    def ingested(name, rows):
        from tests.data.driver import ingest, write_lines

        found = ingest(write_lines(tmp_path / f"{name}.jsonl", rows), tmp_path / name)
        assert found.counts["rows_kept"] == len(rows), found.refused
        assert "column_unread" not in {warning["code"] for warning in found.result["warnings"]}
        return str(tmp_path / name / "out" / "data")

    def run(name, data, targets=None):
        config = {"method": "tpo", "max_steps": 2, "batch_size": 4, "max_length": 96, "learning_rate": 1e-3}
        made = spec("align", config, {"model": tiny["policy"], "data": data}, name)
        if targets is not None:
            made["inputs"] |= {"targets": {"kind": "dataset", "path": targets, "ref": "t", "digest": "t"}}
        return execute(made, silent)["summary"]

    with_gold = ingested("gold", [{**row, "reference": gold(i)} for i, row in enumerate(rows)])
    plain, some = (
        ingested("plain", rows),
        ingested("half", [{**row, **({"reference": gold(i)} if i % 2 else {})} for i, row in enumerate(rows)]),
    )
    answers = lambda shift: written(
        str(tmp_path / f"answers{shift}"),
        "t",
        "demonstrations/1",
        [{"messages": row["prompt"] + gold(i + shift), "train_turns": [1]} for i, row in enumerate(rows)],
    )
    own = run("own", with_gold)
    assert run("given", plain, answers(0))["validation/loss"] == own["validation/loss"]
    assert run("others", with_gold, answers(1))["validation/loss"] != own["validation/loss"]
    assert run("some", some)["pairs"] == 3
    with pytest.raises(ConfigError, match="no target answer: give the input targets=DEMONSTRATIONS"):
        run("none", plain)
    with pytest.raises(ValueError, match="write nll_coef=1, or method=reference_free"):
        DirectAlignment(Config(method="tpo", nll_coef=0.0))
    with pytest.raises(ValueError, match="write nll_coef=1, or method=simpo"):
        DirectAlignment(Config(method="tpo_l", nll_coef=0.0))


@pytest.mark.parametrize("mode", ["ema", "tr_soft", "per_interval"])
def test_a_skipped_step_does_not_move_the_reference_and_is_not_counted(tiny, mode):
    """Of three steps the first is skipped: an interval of two ends with the third."""
    from stages.direct.direct_alignment import AlignmentRows, MovingReference
    from stages.models.modeling import freeze, load_policy

    how = {"reference_decay": 0.9} if mode == "ema" else {"reference_interval": 2}
    config = Config(reference_update=mode, max_steps=3, batch_size=1, **how)
    moving, policy = MovingReference(config, freeze(load_policy(tiny["other"])), "cpu"), load_policy(tiny["policy"])
    stage = SimpleNamespace(config=config, device="cpu")
    source = AlignmentRows(stage, policy, DirectAlignment(config), [None], [], moving)
    before, after = next(moving.model.parameters()).detach().clone(), []
    for step, loss in enumerate((math.inf, 0.7, 0.7), 1):
        source.after_step(step, {"loss": loss, "grad_norm": 1.0, "skipped_steps": 1.0})
        after.append(not torch.equal(before, next(moving.model.parameters())))
    assert after == [False, mode == "ema", True]


def test_dpo_loss_is_ln2_again_right_after_the_reference_is_copied(tiny, preferences, spec):
    made = spec(
        "align",
        {
            "max_steps": 5,
            "batch_size": 6,
            "max_length": 96,
            "learning_rate": 1e-2,
            "lr_schedule": "constant",
            "warmup_ratio": 0.0,
            "reference_update": "per_interval",
            "reference_interval": 2,
        },
        {"model": tiny["policy"], "data": preferences["pairs"]},
        "moving",
    )
    result = execute(made, silent)
    losses = {s["step"]: s["metrics"]["loss"] for s in steps_of(made) if "loss" in s["metrics"]}
    assert [abs(losses[k] - math.log(2)) < 1e-5 for k in range(1, 6)] == [True, False, True, False, True]
    assert "ref_logps" not in result["outputs"]


# -- kill -9 ----------------------------------------------------------------------------------------------------------

STATEFUL = {
    "bco": {"method": "bco", "options": {"momentum": 0.5}},
    "kto_heldout": {"method": "kto", "z_ref_mode": "heldout", "eval_every": 2},
    "tr_dpo": {"method": "dpo", "reference_update": "tr_soft", "reference_interval": 3},
    "bema": {
        "method": "dpo",
        "reference_update": "bema",
        "reference_bema": {"update_freq": 1, "update_after": 1},
        "reference_interval": 2,
        "bema": {"update_freq": 3, "lag": 2.0},
        "lora_rank": 3,
        "frozen_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("name", list(STATEFUL))
def test_an_interrupted_run_with_a_state_of_its_own_ends_with_the_same_bytes(tiny, data, spec, name, monkeypatch):
    """Ended inside a step after a checkpoint of every step, twice; weights, metrics and summary equal the uninterrupted
    run.
    """
    from stages import training

    class Killed(BaseException):
        pass

    config = {**STATEFUL[name], "learning_rate": 1e-3, "batch_size": 6, "max_steps": 10, "max_length": 96}
    inputs = {"model": tiny["policy"], "data": data["pairs"]}
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "1000")
    execute(spec("align", config, inputs, "whole"), silent)
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    killed = spec("align", config, inputs, "killed")
    step = training.Trainer.step
    for at in (4, 7):

        def dying(self, items, at=at):
            if self.step_index == at:
                raise Killed
            return step(self, items)

        monkeypatch.setattr(training.Trainer, "step", dying)
        with pytest.raises(Killed):
            execute(killed, silent)
    monkeypatch.setattr(training.Trainer, "step", step)
    assert execute(killed, silent)["resumed_from"] == 7
    assert outputs(Path(killed["workdir"])) == outputs(Path(killed["workdir"]).parent / "whole")


@pytest.mark.parametrize(
    "config, inputs, says",
    [
        ({"options": {"foo": 1}}, {}, "no option"),
        ({"method": "kto", "logp_reduction": "mean"}, {}, "logp_reduction"),
        ({"method": "orpo"}, {"reference": "policy"}, "reference input"),
        ({"reference_interval": 3}, {}, "reference_update=tr_soft"),
        ({"reference_bema": {"update_freq": 3}}, {}, "write reference_update=bema"),
        ({"reference_update": "ema", "reference_alpha": 0.5}, {}, "tr_soft"),
        ({"win_probability": "scores"}, {}, "method=sppo"),
        ({"corruption_share": 0.25}, {}, "method=mdpo"),
        ({"z_ref_mode": "zero"}, {}, "method=kto"),
        ({"nll_reduction": "seq-sum"}, {}, "nll_coef=1"),
    ],
)
def test_refused_settings_are_the_users_to_change(tiny, preferences, spec, config, inputs, says):
    """ConfigError: exit code 2 and no traceback, as the command line promises."""
    with pytest.raises(ConfigError, match=says):
        execute(
            spec(
                "align",
                {"max_steps": 1, "max_length": 96, **config},
                {"model": tiny["policy"], "data": preferences["pairs"], **{k: tiny[v] for k, v in inputs.items()}},
                "refused",
            ),
            silent,
        )


def test_settings_of_a_run_without_what_reads_them_are_refused():
    for given, says in (
        ({"lora_alpha": 32}, "lora_rank=16"),
        ({"lora_targets": "q_proj"}, "lora_rank=16"),
        ({"decay_ratio": 0.3}, "lr_schedule=wsd"),
        ({"eval_every": 5, "eval_rows": 0}, "eval_rows=500"),
        ({"lr_schedule": "constant", "min_lr_ratio": 0.1}, "does not decay"),
    ):
        with pytest.raises(ValueError, match=says):
            Config(**given)
    Config(**Config().model_dump())
    Config(lora_rank=8, lora_alpha=32, eval_every=5)
