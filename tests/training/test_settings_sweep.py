"""Settings in combination (tests/sweep.py): a seeded part of a covering array for each stage that trains, in float64.

Whatever micro-batches, packing and recomputation a run has, and where it is killed, it says and publishes the same; and
what it trains is what transformers and torch train by plain means (tests/replay.py). A new setting of a schema is in
the sweep by itself, or has to say in ``LEFT_OUT`` why it is not.
"""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from stages.registry import get_stage
from stages.spec import ConfigError
from tests import replay, sweep
from tests.common import assistant

STAGES = ("sft", "align", "reward_model", "distill")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return sweep.World(tmp_path_factory.mktemp("sweep"))


def combinations(stage: str, seed: int, count: int, wanted=lambda combination: True) -> list[dict]:
    return [c for c in sweep.covering(stage, np.random.default_rng(seed), 3 * count, busy=0.2)[0] if wanted(c)][:count]


def told(stage: str, combination: dict) -> dict:
    return {name: value for name, value in combination.items() if value != sweep.axes(stage)[name][0]}


@pytest.mark.parametrize("stage", STAGES)
def test_every_setting_is_swept_or_says_why_not(stage):
    swept = sweep.axes(stage)
    for name, field in get_stage(stage).SPEC.config.model_fields.items():
        values = sweep.values_of(stage, name, field)
        assert (name in swept) == (len(values) > 1) and (name in swept or name in sweep.LEFT_OUT), name
    assert not [name for _, name in sweep.VALUES if name in sweep.LEFT_OUT]


@pytest.mark.parametrize("stage", STAGES)
def test_a_combination_is_covered_or_refused_with_what_to_write(stage):
    found, impossible = sweep.covering(stage, np.random.default_rng(7), 15)
    assert len(found) == 15
    for pair, said in impossible.items():
        assert any(
            word in said
            for word in (
                "write",
                "leave",
                "takes",
                "no such",
                "no class",
                "unknown to our forward",
                "no experts",
                "a decoder",
            )
        ), (pair, said)


@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_change_a_result_does_not(stage, world, tmp_path, monkeypatch):
    """Micro-batches, packing, recomputed activations, and a kill behind a checkpoint."""
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    ran = 0
    for n, combination in enumerate(combinations(stage, 11, 3)):
        settings, inputs = sweep.settings_of(stage, combination), world.inputs(stage, combination)
        with sweep.float64():
            try:
                summary = sweep.run(stage, settings, inputs, tmp_path / "whole")["summary"]
            except (ValueError, RuntimeError) as error:
                assert "write" in str(error) or "leave" in str(error) or "give" in str(error) or "et " in str(error), (
                    told(stage, combination),
                    error,
                )
                shutil.rmtree(tmp_path / "whole")
                continue
            other = {
                "max_tokens_per_micro_batch": 4096 if combination["max_tokens_per_micro_batch"] == 90 else 90,
                "packing": "sorted" if combination["packing"] == "best_fit" else "best_fit",
                "activation_checkpointing": not combination["activation_checkpointing"],
            }
            sweep.run(stage, {**settings, **other}, inputs, tmp_path / "cut")
            # one multiplies in bfloat16, the other rounds moments; some metrics are float32
            tolerance = 2e-3 if combination["optimizer"] in ("muon", "adamw_8bit") else 1e-6
            for whole, cut in zip(sweep.metrics(tmp_path / "whole"), sweep.metrics(tmp_path / "cut"), strict=True):
                assert whole.keys() == cut.keys()
                for name, value in whole.items():
                    assert math.isfinite(value)
                    assert cut[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (
                        name,
                        told(stage, combination),
                    )
            published = sweep.weights(tmp_path / "whole")
            for name, value in sweep.weights(tmp_path / "cut").items():
                assert torch.allclose(value, published[name], rtol=0, atol=tolerance), (name, told(stage, combination))
            if summary["steps"] > 1:
                with pytest.raises(sweep.Killed):
                    sweep.run(stage, settings, inputs, tmp_path / "killed", kill_after=1 + n % (summary["steps"] - 1))
                assert sweep.run(stage, settings, inputs, tmp_path / "killed")["summary"] == summary
                assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (
                    tmp_path / "whole/metrics.jsonl"
                ).read_bytes(), told(stage, combination)
                assert all(
                    torch.equal(value, published[name]) for name, value in sweep.weights(tmp_path / "killed").items()
                ), told(stage, combination)
        ran += 1
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
    assert ran >= 1


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_say_and_publish_what_one_process_does(stage, world, tmp_path, forks):
    """Whole rows on either rank; sums of float64, so that nothing but the order of additions differs."""
    compared = 0
    for combination in combinations(
        stage, 19, 2, lambda c: c["optimizer"] not in ("muon", "adamw_8bit") and not c.get("lora_dropout")
    ):
        settings, inputs = sweep.settings_of(stage, combination), world.inputs(stage, combination)
        try:
            with sweep.float64():
                sweep.run(stage, settings, inputs, tmp_path / "one")
        except (ValueError, RuntimeError) as error:
            assert "rite" in str(error) or "give" in str(error) or "et " in str(error), (
                told(stage, combination),
                error,
            )
        else:
            forks.run(
                stage, json.dumps(settings), json.dumps(inputs), tmp_path / "two", target="tests.sweep:ranked", ranks=2
            )
            for one, two in zip(sweep.metrics(tmp_path / "one"), sweep.metrics(tmp_path / "two"), strict=True):
                assert one.keys() == two.keys()
                for name, value in one.items():
                    assert two[name] == pytest.approx(value, rel=1e-6, abs=1e-6), (name, told(stage, combination))
            published = sweep.weights(tmp_path / "one")
            for name, value in sweep.weights(tmp_path / "two").items():
                assert torch.allclose(value, published[name], rtol=0, atol=1e-6), (name, told(stage, combination))
            compared += 1
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
    assert compared >= 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_is_that_of_plain_transformers(stage, world, tmp_path):
    """Loss, gradient norm, rate and epoch of every step, every validation pass, the pass that is selected, and the
    published weights.
    """
    compared = 0
    for combination in combinations(stage, 3, 5, lambda c: replay.why_not(stage, c) is None):
        try:
            with sweep.float64():
                sweep.run(
                    stage, sweep.settings_of(stage, combination), world.inputs(stage, combination), tmp_path / "run"
                )
        except (ValueError, RuntimeError) as error:
            assert "write" in str(error), (told(stage, combination), error)
        else:
            found = replay.differences(stage, combination, tmp_path / "run", replay.replayed(stage, combination, world))
            assert not found, (told(stage, combination), found[:5])
            compared += 1
        shutil.rmtree(tmp_path / "run")
    assert compared >= 2


#: Beside the seeded part: what has numbers of a whole step or of the run so far, rows of its own, or a part of the
#: model of its own.
REPLAYED = [
    ("align", {"method": "kto", "z_ref_mode": "heldout", "eval_every": 1, "options": {"desirable_weight": 1.4}}),
    ("align", {"method": "kto", "reference_update": "tr_soft", "reference_interval": 2, "lora_rank": 3}),
    (
        "align",
        {
            "reference_update": "bema",
            "reference_bema": {"update_freq": 1, "lag": 3.0, "bias_power": 0.5},
            "reference_interval": 2,
            "given": "reference",
            "lora_rank": 3,
        },
    ),
    ("align", {"method": "tpo", "max_length": 72, "eval_every": 2}),
    ("align", {"method": "tpo_l", "options": {"label_smoothing": 0.2}}),
    ("align", {"method": "bco", "options": {"momentum": 0.5}, "given": "reference"}),
    ("align", {"method": "aql", "max_length": 72}),
    ("align", {"method": "aot_paired", "given": "reference"}),
    ("align", {"method": "aot_unpaired", "options": {"label_smoothing": 0.2}}),
    ("align", {"method": "mdpo", "corruption": "shuffle", "max_length": 72}),
    ("align", {"method": "2d_dpo", "segment_pairing": "top_chosen_vs_bottom_rejected"}),
    ("align", {"method": "2d_dpo", "aspect_weights": {"a": 0.75, "b": 0.25}}),
    ("align", {"method": "pl_dpo", "max_length": 72}),
    ("align", {"method": "sppo", "win_probability": "bradley_terry"}),
    ("align", {"method": "rrhf", "options": {"average": True}}),
    ("align", {"method": "orpo", "options": {"nll_on_prompt": True}}),
    ("align", {"method": "wpo", "options": {"aligned": True}}),
    ("sft", {"bema": {"update_freq": 2, "update_after": 1, "lag": 2.0}, "lora_rank": 3, "eval_every": 1}),
    ("sft", {"neftune_noise_alpha": 5.0, "model": "gemma2"}),
    ("sft", {"curriculum": "length", "max_steps": None}),
    ("sft", {"data": "text/1", "train_on": "full", "max_length": 72}),
    ("sft", {"self_paced_threshold": 5.7, "self_paced_threshold_end": 8.0, "curriculum": "difficulty"}),
    ("reward_model", {"model": "bert"}),
    ("reward_model", {"model": "bert", "pooling": "cls", "train_layers": "head_and_last", "last_layers": 1}),
    ("reward_model", {"model": "bert", "objective": "prm", "step_classes": 3}),
    ("reward_model", {"objective": "prm", "max_length": 72}),
    ("reward_model", {"objective": "plackett_luce", "tie_policy": "use_pairs", "top_ranks": 2}),
    ("reward_model", {"objective": "pairwise", "use_soft_labels": True}),
    ("reward_model", {"objective": "t2t_pair"}),
    ("reward_model", {"objective": "control_tokens", "max_length": 72}),
    ("reward_model", {"objective": "orm", "outcome_head": "gain_bias", "lm_loss_weight": 0.3}),
    ("reward_model", {"curriculum": "stage_index", "lm_loss_weight": 0.3}),
    ("reward_model", {"objective": "regression", "attributes": ["help", "truth"], "centre_annotators": True}),
    ("distill", {"soft_weight": 0.3, "soft_weight_end": 1.0, "soft_weight_schedule": "cosine", "eval_every": 2}),
    ("distill", {"method": "context", "context": "be brief", "given": "nothing", "lora_rank": 3, "max_length": 72}),
    (
        "distill",
        {"data": "teacher_logps/1", "given": "nothing", "tail": "renormalise", "distillation_temperature": 2.0},
    ),
    ("distill", {"method": "on_policy", "direction": "jsd", "sampling_temperature": 1e-6, "max_completion_length": 6}),
    ("distill", {"objective": "uld", "soft_weight": 0.3, "distillation_temperature": 2.0}),
    ("distill", {"objective": "gold", "direction": "jsd", "matched_weight": 0.3, "unmatched_weight": 0.3}),
    (
        "distill",
        {
            "objective": "iw_opd",
            "method": "on_policy",
            "lmbda": 1.0,
            "iw_opd_gamma": 0.3,
            "distillation_temperature": 2.0,
            "sampling_temperature": 1e-6,
            "max_completion_length": 6,
        },
    ),
    (
        "distill",
        {
            "method": "on_policy",
            "lmbda": 1.0,
            "context": "a good answer is: {answer}",
            "given": "nothing",
            "teacher_update": "ema",
            "teacher_decay": 0.5,
            "direction": "reverse",
            "sampling_temperature": 1e-6,
            "max_completion_length": 6,
            "max_length": 96,
        },
    ),
    (
        "distill",
        {
            "method": "on_policy",
            "lmbda": 1.0,
            "context": "{prompt} as {answer}",
            "given": "nothing",
            "sampling_temperature": 1e-6,
            "max_completion_length": 6,
            "max_length": 96,
            "lora_rank": 3,
        },
    ),
    (
        "distill",
        {"method": "context", "context": "be brief", "given": "nothing", "teacher_update": "ema", "teacher_decay": 0.5},
    ),
    (
        "distill",
        {
            "method": "context",
            "context": "be brief",
            "given": "nothing",
            "teacher_update": "ema",
            "teacher_decay": 0.5,
            "lora_rank": 3,
        },
    ),
]


@pytest.mark.parametrize(
    "stage,pinned",
    REPLAYED,
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values()))[:48],
)
def test_every_kind_of_step_is_that_of_plain_transformers(stage, pinned, world, tmp_path):
    """In several micro-batches, over the end of an epoch with a short last batch."""
    combination = (
        {name: values[0] for name, values in sweep.axes(stage).items()}
        | {"max_tokens_per_micro_batch": 90, "packing": "best_fit"}
        | pinned
    )
    assert sweep.refused(stage, combination) is None and replay.why_not(stage, combination) is None
    with sweep.float64():
        sweep.run(stage, sweep.settings_of(stage, combination), world.inputs(stage, combination), tmp_path / "run")
    assert not replay.differences(stage, combination, tmp_path / "run", replay.replayed(stage, combination, world))


def test_the_plain_run_sees_a_difference(world, tmp_path):
    """What it compares with is no copy: another rate, mask or weight of a row is another run."""
    combination = {name: values[0] for name, values in sweep.axes("sft").items()}
    with sweep.float64():
        sweep.run("sft", sweep.settings_of("sft", combination), world.inputs("sft", combination), tmp_path / "run")
    assert not replay.differences("sft", combination, tmp_path / "run", replay.replayed("sft", combination, world))
    for other in (
        {"train_on": "final_message"},
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"weight_decay": 0.1},
        {"lr_schedule": "linear"},
        {"max_length": 72},
    ):
        assert replay.differences(
            "sft", combination, tmp_path / "run", replay.replayed("sft", combination | other, world)
        ), other


@pytest.mark.parametrize("stage", STAGES)
def test_rows_that_weigh_nothing_or_less_are_refused(stage, world, tmp_path):
    """Weights of 0 train nothing at all, and a weight below 0 trains a row away from its labels."""
    combination = {name: values[0] for name, values in sweep.axes(stage).items()}
    inputs, kind = world.inputs(stage, combination), "demonstrations/1" if stage in ("sft", "distill") else "pairs/1"
    for name, weight, said in (
        ("nothing", lambda i: 0.0, "weight 0.*give"),
        ("less", lambda i: -1.0 if i == 0 else 1.0, "weight -1.*write"),
        ("unknown", lambda i: math.nan if i == 0 else 1.0, "weight nan.*write"),
    ):
        rows = [{**row, "weight": weight(i)} for i, row in enumerate(sweep.rows_of(kind))]
        with pytest.raises((ValueError, RuntimeError), match=said):
            sweep.run(
                stage,
                sweep.settings_of(stage, combination),
                {**inputs, "data": world.data(kind, rows, f"{name}-{stage}")},
                tmp_path / name,
            )


@pytest.mark.parametrize(
    "stage,kind,change,said",
    [
        ("align", "pairs/1", {"label_prob": 0.5}, "12 tie.*method=soft_dpo"),
        ("reward_model", "pairs/1", {"label_prob": 0.5}, "12 tie.*objective=soft_label"),
        ("align", "pairs/1", {"split": "test"}, "none for training.*train split"),
        ("sft", "demonstrations/1", {"split": "test"}, "none for training.*train split"),
        (
            "align",
            "pairs/1",
            {"chosen": assistant("the same"), "rejected": assistant("the same")},
            "11 of 12 are identical_after_tokenisation.*differ",
        ),
    ],
)
def test_no_row_is_left_says_which_rows_and_what_to_do(stage, kind, change, said, world, tmp_path):
    """Data of ties alone was answered with `raise max_length`."""
    combination = {name: values[0] for name, values in sweep.axes(stage).items()}
    inputs = world.inputs(stage, combination) | {
        "data": world.data(
            kind,
            [{**row, **change} for row in sweep.rows_of(kind)],
            f"{stage}-{sorted(change)}{said[:7]}".replace(" ", ""),
        )
    }
    with pytest.raises(ConfigError, match=f"No row is left.*{said}") as refused:
        sweep.run(stage, sweep.settings_of(stage, combination), inputs, tmp_path / "run")
    assert "max_length" not in str(refused.value)


def test_experts_say_what_adapters_on_them_do_not_have(world):
    """peft adapts stacked experts without dropout and without DoRA; to write all-linear, which is what is written,
    would not help.
    """
    from stages.models.adapters import add_lora
    from stages.models.modeling import ModelError, load_policy
    from stages.settings import OptimizerConfig

    for changes, instead in (({"lora_dropout": 0.1}, "lora_dropout=0"), ({"lora_dora": True}, "lora_dora=false")):
        with pytest.raises(ModelError, match=f"experts.*write lora_targets=q_proj,k_proj,v_proj,o_proj.*{instead}"):
            add_lora(load_policy(world.model("olmoe")), OptimizerConfig(lora_rank=2, **changes), 0)
        add_lora(
            load_policy(world.model("olmoe")),
            OptimizerConfig(lora_rank=2, lora_targets="q_proj,k_proj,v_proj,o_proj", **changes),
            0,
        )
    with pytest.raises(ModelError, match="write all-linear or some of: c_attn, c_fc, c_proj, lm_head"):
        add_lora(load_policy(world.model("gpt2")), OptimizerConfig(lora_rank=2, lora_targets="q_proj,v_proj"), 0)
