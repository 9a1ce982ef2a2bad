"""stages/FROM_TRL.md is true: every row of its tables, run by TRL's trainer and by this project's stage.

Left out where TRL is not installed (it is in the extra ``bench``). Settings are read from the page, so a row cannot say
what nobody tried. Rows that say *the same* must agree in loss, gradient norm, clipped gradient and weights of three
steps; rows that differ must differ, and have a test here that shows why.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest
import torch
import yaml

pytest.importorskip("trl", minversion="1.16", reason="TRL is in the extra `bench`")
pytest.importorskip("datasets")

from storage.datasets import open_dataset  # noqa: E402
from tests.common import written  # noqa: E402
from tests.peers import our_side, trl_side  # noqa: E402
from tests.peers.completions import PAIRS, RATE, apart, chat, from_another_engine, uneven  # noqa: E402
from tests.peers.page import DEFAULTS, PAGE, ROWS, Row  # noqa: E402

# --- the rows that both sides train on --------------------------------------------------------------------------------

CONVERSATIONS = [
    {"messages": chat(f"say {'a' * (i % 5)} {i}", "b" * (1 + i % 4) + " x", f"and {i}?", "c" * (1 + i % 3))}
    for i in range(12)
]
ANSWERS = [
    {"prompt": chat(f"say {'a' * (i % 7)} {i}"), "completion": chat("", "b" * (1 + i % 5) + " x")[1:]}
    for i in range(12)
]
#: Of one length in a step: TRL takes the mean of each answer and then of answers.
EVEN = [
    {
        "messages": chat(
            f"say {'a' * (i % 5)} {i}", ("what is two plus", "answer: two or four", "is what four is 4")[i // 4]
        )
    }
    for i in range(12)
]
FOUR = [{"messages": chat(f"say {'a' * (i % 5)} {i}", "ccc")} for i in range(12)]
TEXTS = [{"text": "the quick brown fox " * (1 + i % 3) + str(i)} for i in range(12)]
MARGINS = [{**row, "margin": 0.2 * (i % 4)} for i, row in enumerate(PAIRS)]
TRIPLES = [{**row, "reference": chat("", "gold " * (1 + i % 3) + str(i))[1:]} for i, row in enumerate(PAIRS)]
LABELLED = [
    {"prompt": chat(f"q {i}"), "completion": chat("", "yes " * (1 + i % 3) + "x" + str(i))[1:], "label": i % 3 != 1}
    for i in range(12)
]


def told_prompts(prompts: str, folder) -> str:
    """The prompts, with feedback for the teacher in every second row."""
    rows = [
        {**one, "extra_json": json.dumps({"privileged_context": f"mind the {i}"} if i % 2 else {})}
        for i, one in enumerate(open_dataset(prompts).iter_rows())
    ]
    written(str(folder / "told"), "told", "prompts/1", rows)
    return str(folder / "told")


def both(row: Row, models, prompts, folder):
    """(our run, TRL's, the weights that both started from)."""
    theirs, ours, section = row.settings("theirs"), row.settings("ours"), row.section
    policy, other, reward = models["policy"], models["other"], models["reward"]
    start = lambda: trl_side.flat(trl_side.model_of(policy))  # noqa: E731
    if section.startswith("BEMACallback of a reference"):
        return (
            our_side.align(policy, other, PAIRS, folder / "ours", **ours),
            trl_side.averaged_reference(policy, other, PAIRS, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("BEMACallback"):
        return (
            our_side.sft(policy, CONVERSATIONS, folder / "ours", **ours),
            trl_side.averaged_sft(policy, CONVERSATIONS, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("TPOTrainer"):
        return (
            our_side.align(policy, other, TRIPLES, folder / "ours", **ours),
            trl_side.tpo(policy, TRIPLES, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("A2POTrainer"):
        settings = {"prompts_per_step": 4, "learning_rate": RATE, **ours}
        run, sampled = our_side.on_policy(policy, other, prompts, folder / "ours", change=uneven, **settings)
        return (
            run,
            trl_side.a2po(policy, other, sampled, folder / "trl", limit=8, learning_rate=RATE, **theirs),
            start(),
        )
    if section.startswith(("Optimizer", "SFTTrainer")):
        data = {"SFTTrainer/Prompt": ANSWERS, "SFTTrainer/Plain": TEXTS}.get(section, CONVERSATIONS)
        theirs = {"assistant_only_loss": data is CONVERSATIONS, **theirs}
        return (
            our_side.sft(policy, data, folder / "ours", **ours),
            trl_side.sft(policy, data, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("RewardTrainer"):
        data = MARGINS if "margin" in row.theirs else PAIRS
        from stages.reward_models.reward_heads import load_reward_model

        return (
            our_side.reward(reward, data, folder / "ours", **ours),
            trl_side.reward(reward, data, folder / "trl", **theirs),
            trl_side.flat(load_reward_model(reward).double()),
        )
    if section.startswith("DPOTrainer"):
        return (
            our_side.align(policy, other, PAIRS, folder / "ours", **ours),
            trl_side.dpo(policy, other, PAIRS, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("OnlineDPOTrainer"):
        run = our_side.align(policy, other, PAIRS, folder / "ours", **ours)
        return (
            run,
            trl_side.online_dpo(
                policy, other, [item for batch in run.batches for item in batch["items"]], folder / "trl", **theirs
            ),
            start(),
        )
    if section.startswith("KTOTrainer"):
        return (
            our_side.align(policy, other, LABELLED, folder / "ours", **ours),
            trl_side.kto(policy, other, LABELLED, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("CPOTrainer, ORPOTrainer"):
        kind = trl_side.cpo if section.endswith("/CPOTrainer") else trl_side.orpo
        return (
            our_side.align(policy, other, PAIRS, folder / "ours", **ours),
            kind(policy, PAIRS, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("GKDTrainer"):
        return (
            our_side.distill(policy, other, CONVERSATIONS, folder / "ours", **ours),
            trl_side.gkd(policy, other, CONVERSATIONS, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("GOLDTrainer"):
        return (
            our_side.distill_across(policy, models["other tokenizer"], EVEN, folder / "ours", **ours),
            trl_side.gold(policy, models["other tokenizer"], EVEN, folder / "trl", **theirs),
            start(),
        )
    if section.startswith("IWOPDTrainer"):
        run, said = our_side.self_distilled(policy, FOUR, folder / "ours", other, **ours)
        lengths = [len(ids) for step in said for ids in step]
        # TRL divides by the tokens of the data's own answers
        asked = [
            {"messages": chat(*(m["content"] for m in r["messages"][:-1]), "c" * (n - 1))}
            for r, n in zip(FOUR, lengths)
        ]
        return run, trl_side.iw_opd(policy, other, asked, said, folder / "trl", **theirs), start()
    if section.startswith("SDFTTrainer"):
        run, said = our_side.self_distilled(policy, CONVERSATIONS, folder / "ours", **ours)
        assert {len(ids) for step in said for ids in step} == {4}  # else the means of answers are others
        return run, trl_side.sdft(policy, CONVERSATIONS, said, folder / "trl", **theirs), start()
    if section.startswith("SDPOTrainer"):
        tokenizer = trl_side.tokenizer_of(policy)

        def said(samples, iteration):
            uneven(samples, iteration)
            for sample in samples:
                sample.text = tokenizer.decode(sample.ids, skip_special_tokens=True)

        asked = told_prompts(prompts, folder) if "include_environment_feedback=true" in row.theirs else prompts
        settings = {"learning_rate": RATE, **ours}
        run, sampled = our_side.on_policy(policy, policy, asked, folder / "ours", change=said, **settings)
        return run, trl_side.sdpo(policy, sampled, folder / "trl", 4, 8, learning_rate=RATE, **theirs), start()
    assert section.startswith(("GRPOTrainer", "RLOOTrainer", "GMPOTrainer")), section
    sampler = section.endswith("/With")
    if ours.get("multi_objective_aggregation"):
        ours = {
            **ours,
            "reward_override": "none",
            "rewards": [{"name": "first", "kind": "length"}, {"name": "second", "kind": "length", "weight": 0.5}],
        }
        theirs = {**theirs, "reward_weights": [1.0, 0.5]}
    run, sampled = our_side.on_policy(
        policy,
        other,
        prompts,
        folder / "ours",
        change=from_another_engine if sampler else uneven,
        **{"learning_rate": RATE, **ours},
    )
    kind = section[:4].lower()
    return (
        run,
        trl_side.on_policy(
            kind,
            policy,
            other,
            sampled,
            folder / "trl",
            num_generations=4,
            limit=8,
            sampler=sampler,
            **{"learning_rate": RATE, **theirs},
        ),
        start(),
    )


def agree(ours, theirs, start, losses: bool = True) -> None:
    assert len(ours.losses) == len(theirs.losses) == trl_side.STEPS
    for k in range(trl_side.STEPS):
        # Adam divides by roots of squares, which enlarges the rounding of TRL's float32 where gradients are next to
        # nothing
        near = 1e-5 if k == 0 else 5e-3
        assert ours.rates[k] == pytest.approx(theirs.rates[k], rel=1e-9)
        if losses:
            assert ours.losses[k] == pytest.approx(theirs.losses[k], rel=near, abs=near / 3)
        assert ours.norms[k] == pytest.approx(theirs.norms[k], rel=near, abs=1e-9)
        assert apart(ours.gradients[k], theirs.gradients[k]) < near or float(theirs.gradients[k].norm()) < 1e-9
        assert apart(ours.weights[k] - start, theirs.weights[k] - start) < 5e-3
    assert float((theirs.weights[-1] - start).norm()) > 1e-2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section.split('Trainer')[0]}: {row.theirs}")
def test_a_row_of_the_page_is_true(row, models, prompts, tmp_path):
    ours, theirs, start = both(row, models, prompts, tmp_path)
    if row.says.startswith("the same"):
        agree(ours, theirs, start, losses="gradient" not in row.says.split(";")[0])
    else:
        assert any(apart(a, b) > 1e-3 for a, b in zip(ours.weights, theirs.weights)) or any(
            apart(a, b) > 1e-3 for a, b in zip(ours.gradients, theirs.gradients)
        )


def test_every_difference_is_explained():
    assert {row.theirs for row in ROWS if row.says.startswith("differs")} == set(EXPLAINED)


#: One row of each loop, on another architecture.
OTHER = (
    "lr_scheduler_type=constant weight_decay=0.1",
    "loss_type=[sigmoid, bco_pair, sft] loss_weights=[0.8, 0.2, 1.0]",
    "loss_type=grpo beta=0.1 num_iterations=3",
)


@pytest.mark.parametrize("theirs", OTHER)
def test_biases_and_tied_embeddings_agree_too(theirs, models, prompts, tmp_path):
    ours, theirs, start = both(
        row_of(theirs), {**models, "policy": models["qwen2"], "other": models["qwen2"]}, prompts, tmp_path
    )
    agree(ours, theirs, start)


# --- why rows differ --------------------------------------------------------------------------------------------------


def row_of(theirs: str) -> Row:
    return next(row for row in ROWS if row.theirs == theirs)


def the_first_step_of_a_warm_up(models, prompts, folder):
    ours, theirs, _ = both(row_of("lr_scheduler_type=constant_with_warmup warmup_steps=2"), models, prompts, folder)
    assert theirs.rates == pytest.approx([0.0, 0.5e-2, 1e-2]) and ours.rates == pytest.approx([0.5e-2, 1e-2, 1e-2])


def noise_of_a_rows_own_length(models, prompts, folder):
    """What is added to the embeddings of a batch of two rows, of 6 and of 12 tokens, is within alpha / sqrt(tokens *
    width): of each row here, of the longer one in TRL.
    """
    from transformers.integrations.neftune import neftune_post_forward_hook

    from stages.batching import collate, make_item
    from stages.sft import Noise

    model, alpha = our_side.policy_of(models["policy"]), 5.0
    embedding = model.get_input_embeddings()
    width, rows = embedding.weight.shape[-1], [list(range(20, 26)), list(range(20, 32))]
    batch = collate([make_item(str(k), [], [ids], [[1] * len(ids)]) for k, ids in enumerate(rows)])
    mine = Noise(alpha, our_side.rng)(batch, model).split([6, 12])
    embedding.neftune_noise_alpha, embedding.training = alpha, True
    ids = torch.tensor([rows[0] + [3] * 6, rows[1]])
    plain = embedding(ids)
    theirs = (neftune_post_forward_hook(embedding, (ids,), plain.clone()) - plain).detach()
    for k, length in enumerate((6, 12)):
        for found, bound in (
            (mine[k], alpha / (length * width) ** 0.5),
            (theirs[k, :length], alpha / (12 * width) ** 0.5),
        ):
            assert 0.9 * bound < float(found.abs().max()) <= bound * (1 + 1e-6)


def the_loss_of_a_pack_is_that_of_its_rows(models, prompts, folder):
    theirs = trl_side.sft(
        models["policy"],
        CONVERSATIONS,
        folder / "trl",
        assistant_only_loss=True,
        packing=True,
        max_steps=1,
        max_length=512,
    )
    ours = our_side.sft(models["policy"], CONVERSATIONS, folder / "ours", step_rows=12, total=1, batch_size=12)
    assert (
        ours.losses == pytest.approx(theirs.losses, rel=2e-5) and apart(ours.gradients[0], theirs.gradients[0]) < 1e-4
    )


def kto_on_the_same_mismatched_pairs(models, prompts, folder):
    row = row_of("loss_type=kto desirable_weight=1.2")
    ours = our_side.align(
        models["policy"], models["other"], LABELLED, folder / "ours", rotate=True, **row.settings("ours")
    )
    theirs = trl_side.kto(models["policy"], models["other"], LABELLED, folder / "trl", **row.settings("theirs"))
    agree(ours, theirs, trl_side.flat(trl_side.model_of(models["policy"])))


def tokens_are_chosen_once_for_a_batch(models, prompts, folder):
    """Of three steps on one batch the first agrees, later ones do not: TRL's tokens moved."""
    ours, theirs, _ = both(row_of("loss_type=grpo top_entropy_quantile=0.3 num_iterations=3"), models, prompts, folder)
    assert apart(ours.gradients[0], theirs.gradients[0]) < 1e-4 < apart(ours.gradients[2], theirs.gradients[2])


def no_mean_depends_on_how_a_batch_is_cut(models, prompts, folder):
    """TRL's gradient is the mean of those of its two halves, each over its own tokens; with as many tokens in both the
    two would agree.
    """
    ours, theirs, _ = both(
        row_of("loss_type=bnpo per_device_train_batch_size=4 gradient_accumulation_steps=2"), models, prompts, folder
    )
    whole, whole_theirs, _ = both(row_of("loss_type=bnpo"), models, prompts, folder / "whole")
    assert ours.losses == whole.losses and apart(whole.gradients[0], whole_theirs.gradients[0]) < 1e-5
    counts = [sum(map(sum, batch["completion_mask"])) for batch in theirs.batches[:2]]
    assert counts[0] != counts[1] and sum(counts) == sum(map(sum, whole_theirs.batches[0]["completion_mask"]))


def a_step_has_whole_groups(models, prompts, folder):
    ours, theirs, _ = both(
        row_of("loss_type=grpo per_device_train_batch_size=4 steps_per_generation=2"), models, prompts, folder
    )
    groups = [[response.tolist() for response in batch["items"][0].responses] for batch in ours.batches[:2]]
    assert [len(batch["items"]) for batch in ours.batches[:2]] == [1, 1] and [len(group) for group in groups] == [4, 4]
    dealt = [
        [[i for i, m in zip(ids, mask) if m] for ids, mask in zip(batch["completion_ids"], batch["completion_mask"])]
        for batch in theirs.batches[:2]
    ]
    assert sorted(dealt[0] + dealt[1]) == sorted(groups[0] + groups[1]) and sorted(dealt[0]) not in [
        sorted(group) for group in groups
    ]


def until_a_burn_in_ends_the_weights_are_as_they_are(models, prompts, folder):
    """TRL's copy is that of the start until its first update."""
    row = row_of("update_freq=2 update_after=1")
    ours, theirs, start = both(row, models, prompts, folder)
    plain = our_side.sft(models["policy"], CONVERSATIONS, folder / "plain")
    assert torch.equal(ours.weights[0], plain.weights[0]) and torch.equal(ours.weights[1], plain.weights[0])
    assert apart(theirs.weights[1], start) < 1e-6 < 1e-3 < apart(ours.weights[1], start)
    assert apart(ours.weights[2] - start, theirs.weights[2] - start) < 1e-4


EXPLAINED = {
    "update_freq=2 update_after=1": until_a_burn_in_ends_the_weights_are_as_they_are,
    "loss_type=bnpo per_device_train_batch_size=4 gradient_accumulation_steps=2": no_mean_depends_on_how_a_batch_is_cut,
    "loss_type=grpo per_device_train_batch_size=4 steps_per_generation=2": a_step_has_whole_groups,
    "lr_scheduler_type=constant_with_warmup warmup_steps=2": the_first_step_of_a_warm_up,
    "assistant_only_loss=true neftune_noise_alpha=5": noise_of_a_rows_own_length,
    "assistant_only_loss=true packing=true max_length=256": the_loss_of_a_pack_is_that_of_its_rows,
    "loss_type=kto desirable_weight=1.2": kto_on_the_same_mismatched_pairs,
    "loss_type=grpo top_entropy_quantile=0.3 num_iterations=3": tokens_are_chosen_once_for_a_batch,
}


@pytest.mark.parametrize("why", EXPLAINED.values(), ids=lambda why: why.__name__)
def test_why_a_row_differs(why, models, prompts, tmp_path):
    why(models, prompts, tmp_path)


# --- names, defaults, and what else is not the same -------------------------------------------------------------------

#: The stage of a trainer of TRL's.
STAGES = {
    "SFT": "sft",
    "DPO": "align",
    "KTO": "align",
    "Reward": "reward_model",
    "GRPO": "rl",
    "RLOO": "rl",
    "Distillation": "distill",
    "SDPO": "rl",
}


def settings_of(trainer: str) -> list[str]:
    """What TRL itself declares for a trainer, beside what transformers does."""
    import trl
    from trl.experimental.sdpo import SDPOConfig

    kind = SDPOConfig if trainer == "SDPO" else getattr(trl, f"{trainer}Config")
    own = {n for c in kind.__mro__ if c.__module__.startswith("trl.") for n in vars(c).get("__annotations__", ())}
    found = sorted(own & {f.name for f in dataclasses.fields(kind)})
    assert len(found) > 15 and {"model_init_kwargs", "bf16"} <= set(found)
    return found


@pytest.mark.parametrize("trainer", STAGES)
def test_every_setting_of_trls_has_an_answer(trainer):
    """A setting of a later version fails here until it is a setting of the stage or flows/names.py says what there is
    in its place.
    """
    from flows.config import build
    from stages.registry import get_stage
    from stages.spec import ConfigError

    config, silent = get_stage(STAGES[trainer]).SPEC.config, []
    for name in (n for n in settings_of(trainer) if n not in config.model_fields):
        with pytest.raises(ConfigError) as told:
            build(config, {name: 1})
        _, _, answer = str(told.value).partition(f"unknown key {name!r}; ")
        if not answer or answer.startswith(("did you mean", "all keys", "nothing here")):
            silent.append((name, answer))
    assert not silent
    with pytest.raises(ConfigError, match="did you mean|all keys"):
        build(config, {"a_setting_of_tomorrow": 1})


@pytest.mark.parametrize("trainer, name, value, ours", [(*one[:3], one[5]) for one in DEFAULTS])
def test_a_default_of_trl_is_what_the_page_says(trainer, name, value, ours):
    import trl

    default = next(f.default for f in dataclasses.fields(getattr(trl, f"{trainer}Config")) if f.name == name)
    assert getattr(default, "value", default) == yaml.safe_load(value) != yaml.safe_load(ours)


def test_trl_trains_what_the_template_writes_behind_the_end_of_turn(models, tmp_path):
    """ChatML: conversations with marked answers agree; in prompt-completion rows TRL's targets go on by the line break,
    and a reward model reads there.
    """
    theirs = trl_side.sft(models["chatml"], CONVERSATIONS, tmp_path / "trl", assistant_only_loss=True)
    ours = our_side.sft(models["chatml"], CONVERSATIONS, tmp_path / "ours")
    agree(ours, theirs, trl_side.flat(trl_side.model_of(models["chatml"])))
    tokenizer = trl_side.tokenizer_of(models["chatml"])
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    theirs = trl_side.sft(models["chatml"], ANSWERS, tmp_path / "trl-2")
    ours = our_side.sft(models["chatml"], ANSWERS, tmp_path / "ours-2")
    for labels, item in zip(theirs.batches[0]["labels"], ours.batches[0]["items"]):
        mine = [i for i, m in zip(item.responses[0].tolist(), item.masks[0]) if m]
        assert [i for i in labels if i != -100] == mine + line_break and mine[-1] == tokenizer.eos_token_id
    read = [
        (
            trl_side.reward(models[name], PAIRS, tmp_path / f"trl-{name}"),
            our_side.reward(models[name], PAIRS, tmp_path / f"ours-{name}"),
        )
        for name in ("reward", "chatml_reward")
    ]
    assert [a.losses[0] == pytest.approx(b.losses[0], rel=1e-5) for a, b in read] == [True, False]


def test_tools_and_their_answers_are_the_same_tokens(models, tmp_path):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "adds",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            },
        }
    ]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}+2?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": i}}}],
                },
                {"role": "tool", "name": "add", "content": str(i + 2)},
                {"role": "assistant", "content": f"It is {i + 2}."},
            ],
            "tools": tools,
        }
        for i in range(12)
    ]
    theirs = trl_side.sft(models["tools"], rows, tmp_path / "trl", assistant_only_loss=True, max_length=512)
    ours = our_side.sft(models["tools"], rows, tmp_path / "ours", max_length=512)
    for step in range(trl_side.STEPS):
        for ids, labels, item in zip(
            theirs.batches[step]["input_ids"], theirs.batches[step]["labels"], ours.batches[step]["items"]
        ):
            n = len(item.responses[0])
            assert ids[:n] == item.responses[0].tolist() and [i != -100 for i in labels] == [
                *item.masks[0].astype(bool).tolist(),
                *[False] * (len(ids) - n),
            ]
    agree(ours, theirs, trl_side.flat(trl_side.model_of(models["tools"])))


def test_long_pairs_are_cut_differently(models, tmp_path):
    """Prompt and longest answer within 40 tokens: TRL's DPO cuts at the end, so that a long prompt leaves little of the
    answers, and its reward trainer has none of these rows; here the prompt loses its beginning."""
    rows = [
        {"prompt": chat("w" * 20 + str(i)), "chosen": chat("", "x" * 14)[1:], "rejected": chat("", "z" * 16)[1:]}
        for i in range(10, 22)
    ]
    ours = our_side.align(models["policy"], models["other"], rows, tmp_path / "ours", method="dpo", max_length=40)
    whole = our_side.align(models["policy"], models["other"], rows, tmp_path / "whole", method="dpo").batches[0][
        "items"
    ][0]
    theirs = trl_side.dpo(models["policy"], models["other"], rows, tmp_path / "trl", max_length=40)
    item, n = ours.batches[0]["items"][0], len(whole.prompt)
    # the end of turn is one of them
    assert n < 40 < n + 14 and [len(r) for r in item.responses] == [15, 17] == [len(r) for r in whole.responses]
    assert item.prompt.tolist() == whole.prompt.tolist()[n - (40 - 17) :]
    assert [sum(mask) for mask in theirs.batches[0]["completion_mask"]] == [40 - n] * 8 and theirs.batches[0][
        "input_ids"
    ][0] == [*whole.prompt.tolist(), *whole.responses[0].tolist()][:40]
    assert trl_side.reward(models["reward"], rows, tmp_path / "trl-2", max_length=40).losses == []  # no row is left


def test_control_tokens_in_a_text_are_text_here(models, tmp_path):
    """A user who writes <|im_end|> ends the turn in TRL's rows, and has written ten characters here."""
    rows = [{"messages": chat(f"say <|im_end|> {i}", "b" * (1 + i % 4))} for i in range(12)]
    theirs = trl_side.sft(models["policy"], rows, tmp_path / "trl", assistant_only_loss=True)
    ours = our_side.sft(models["policy"], rows, tmp_path / "ours")
    end = trl_side.tokenizer_of(models["policy"]).eos_token_id
    assert (
        theirs.batches[0]["input_ids"][0].count(end) == 3
        and ours.batches[0]["items"][0].responses[0].tolist().count(end) == 2
    )


def test_plain_strings_are_a_chat_here(models, tmp_path):
    """Strings are messages here and texts without a template in TRL, the end token behind the answer; the template that
    the page gives makes both the same, spaces included.
    """
    plain = re.search(r"`chat_template=FILE` of `([^`]+)`", PAGE)[1]
    answers = [{"prompt": f"say {'a' * (i % 7)} {i}:", "completion": f" {'b' * (1 + i % 5)} x"} for i in range(12)]
    pairs = [
        {"prompt": f"q {i}:", "chosen": " yes" * (1 + i % 3), "rejected": " no" * (1 + i % 4) + str(i)}
        for i in range(12)
    ]
    policy, other = models["policy"], models["other"]
    start = trl_side.flat(trl_side.model_of(policy))
    theirs = trl_side.sft(policy, answers, tmp_path / "trl"), trl_side.dpo(policy, other, pairs, tmp_path / "trl-2")
    chats = (
        our_side.sft(policy, answers, tmp_path / "ours-0"),
        our_side.align(policy, other, pairs, tmp_path / "ours-1", method="dpo"),
    )
    assert all(apart(a.gradients[0], b.gradients[0]) > 1e-2 for a, b in zip(chats, theirs))
    bare = shutil.copytree(policy, tmp_path / "bare")
    (bare / "chat_template.jinja").write_text(plain)
    texts = (
        our_side.sft(str(bare), answers, tmp_path / "ours-2"),
        our_side.align(str(bare), other, pairs, tmp_path / "ours-3", method="dpo"),
    )
    for a, b in zip(texts, theirs):
        agree(a, b, start)


def rl(models, prompts, folder, change, ours: dict, theirs: dict):
    run, sampled = our_side.on_policy(
        models["policy"], models["other"], prompts, folder / "ours", change=change, learning_rate=RATE, **ours
    )
    return run, trl_side.on_policy(
        "grpo",
        models["policy"],
        models["other"],
        sampled,
        folder / "trl",
        num_generations=4,
        limit=8,
        learning_rate=RATE,
        **theirs,
    )


def test_a_sampled_pad_token_is_learned_here_alone(models, prompts, tmp_path, monkeypatch):
    """Its embedding has no gradient in transformers; everything else has the same one."""
    pad, load = 3, trl_side.model_of
    monkeypatch.setattr(trl_side, "model_of", lambda path: load(path, every_token=False))

    def change(samples, iteration):
        uneven(samples, iteration)
        for sample in samples[::2]:
            sample.ids = [pad, *sample.ids[1:], 40]
            sample.logps = [*sample.logps, -1.0][: len(sample.ids)]

    settings = {"max_grad_norm": 1e9}
    ours, theirs = rl(
        models,
        prompts,
        tmp_path,
        change,
        {"preset": "grpo", "beta": 0.0, "loss_agg_mode": "token-mean", **settings},
        {"loss_type": "dapo", **settings},
    )
    sizes = {name: p.shape for name, p in sorted(load(models["policy"]).named_parameters())}
    start = sum(shape.numel() for name, shape in sizes.items() if name < "model.embed_tokens.weight")
    row = slice(
        start + pad * sizes["model.embed_tokens.weight"][1], start + (pad + 1) * sizes["model.embed_tokens.weight"][1]
    )
    assert not theirs.gradients[0][row].any() and float(ours.gradients[0][row].norm()) > 1e-3
    rest = ours.gradients[0].clone()
    rest[row] = 0.0
    assert apart(rest, theirs.gradients[0]) < 1e-5


def test_a_step_that_trains_nothing_moves_nothing_here(models, prompts, tmp_path):
    def change(samples, iteration):
        uneven(samples, iteration)
        for sample in samples if iteration else ():
            sample.ids[-1], sample.finish_reason = 40, "length"

    ours, theirs = rl(
        models,
        prompts,
        tmp_path,
        change,
        {"preset": "grpo", "beta": 0.0, "seq_denominator": "all", "truncation_policy": "mask"},
        {"loss_type": "grpo", "mask_truncated_completions": True},
    )
    assert apart(ours.weights[0], theirs.weights[0]) < 1e-4 and not theirs.gradients[1].any()
    assert (
        torch.equal(ours.weights[1], ours.weights[0]) and float((theirs.weights[1] - theirs.weights[0]).norm()) > 1e-2
    )


def test_unscorable_completions_are_in_no_denominator_here(models, prompts, tmp_path):
    counts = []

    def change(samples, iteration):
        uneven(samples, iteration)
        samples[1].total = float("nan")
        counts.append((sum(len(s.ids) for s in samples), len(samples[1].ids)))

    ours, theirs = rl(
        models,
        prompts,
        tmp_path,
        change,
        {"preset": "grpo", "beta": 0.0, "loss_agg_mode": "token-mean"},
        {"loss_type": "dapo"},
    )
    every, lost = counts[0]
    assert lost and ours.norms[0] * (every - lost) == pytest.approx(theirs.norms[0] * every, rel=1e-5)


#: The tests of the last table, by its first column.
ALSO = {
    "plain strings": test_plain_strings_are_a_chat_here,
    "after the end of turn": test_trl_trains_what_the_template_writes_behind_the_end_of_turn,
    "long pairs": test_long_pairs_are_cut_differently,
    "control tokens": test_control_tokens_in_a_text_are_text_here,
    "pad token": test_a_sampled_pad_token_is_learned_here_alone,
    "steps that train nothing": test_a_step_that_trains_nothing_moves_nothing_here,
    "unscorable completions": test_unscorable_completions_are_in_no_denominator_here,
}


def test_every_other_difference_has_a_test():
    assert re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## What else")[2], re.M) == list(ALSO)


def test_trl_computes_in_bfloat16_unless_told(tmp_path):
    import trl

    config = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert config.bf16 and config.gradient_checkpointing
