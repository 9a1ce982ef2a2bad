"""rescore: stored answers scored under another rubric, without generating them again, and a review of the rubric's
items (GRAPE-OPS).

Takes the candidates of ``rejection`` or the rollouts of ``rl``. Only the rubric is scored; other components keep their
stored values. Given the ``scores`` of an earlier run, items whose version did not change are not scored again, so a
rubric with one new item costs one item. Confidences are averaged over the whole dataset. The answers come back with new
rewards: ``rejection`` selects from them again (``candidates=``), off-policy presets of ``rl`` train on them
(``stored=``). A killed run continues at its last block.
"""

from __future__ import annotations

import json

from pydantic import Field

from stages.reward.components import FixedComponent, RewardComponent
from stages.settings import ReadWhen, refuse_unread_inputs
from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    rewards: list[FixedComponent] = Field(
        default_factory=lambda: [RewardComponent(kind="rubric")],
        description=(
            "As in the run that made the data: one component of kind rubric, scored anew, and others, whose "
            "stored values count."
        ),
    )
    block: int = Field(256, ge=1, description="Answers scored as one resumable unit.")


SPEC = StageSpec(
    name="rescore",
    config=Config,
    gpu=True,
    inputs={
        "data": InputSpec("dataset", kinds=("candidates/1", "rollouts/1"), doc="Answers of a rejection or rl run."),
        "prompts": InputSpec("dataset", kinds=("prompts/1",), doc="Their prompts, with categories and answers."),
        "rubric": InputSpec(
            "dataset", kinds=("rubric_items/1",), doc="The rubric: a file (YAML, JSON, JSON Lines) or a dataset."
        ),
        "scores": InputSpec(
            "dataset",
            kinds=("rubric_scores/1",),
            required=False,
            doc="Item scores of an earlier run, kept where the item is the same.",
        ),
        "model": InputSpec("model", required=False, doc="The policy of the rollouts, for its tokenizer."),
        "judge": InputSpec("model", required=False, use="words", doc="Causal LM of judged items."),
        "reward_model": InputSpec("model", required=False, doc="Scorer of reward-model items."),
    },
    outputs={
        "data": OutputSpec("dataset", doc="The same rows with new rewards."),
        "rubric_scores": OutputSpec("dataset"),
        "rubric_confidence": OutputSpec("dataset"),
    },
)


#: Inputs that are read under a condition only (``stages.settings.refuse_unread_inputs``).
INPUTS_READ_WHEN: ReadWhen = (
    (("judge",), lambda read: "judge" in read, "no item of the rubric asks it; write scorer: {kind: judge} in one"),
    (
        ("reward_model",),
        lambda read: "reward_model" in read,
        "no item of the rubric asks it; write scorer: {kind: model} in one",
    ),
)


def run(stage):
    from stages.reporting.reports import document, facts
    from stages.reward.rewards import Rewards, concerns, inputs_read, placed
    from stages.reward.rubric_reward import RubricScorer, rubric_metrics, score_rows, unscored, write_review
    from stages.reward.rubrics import load
    from stages.running.blocks import remaining_blocks
    from stages.spec import ConfigError
    from storage.datasets import open_dataset

    config = stage.config
    rubrics = [c for c in config.rewards if c.kind == "rubric"]
    if len(rubrics) != 1:
        raise ConfigError(
            f"rescore: rewards holds {len(rubrics)} components of kind rubric; write one, for example rewards='[{{name:"
            " rubric, kind: rubric}]'"
        )
    component, data = rubrics[0], stage.dataset("data")
    rows = list(data.iter_rows())
    if not rows:
        raise ConfigError(
            "rescore: the input data has no rows; give the candidates of a rejection run or the rollouts of an rl run"
        )
    known = {}
    for row in stage.dataset("scores").iter_rows() if stage.has("scores") else ():
        if row["score"] is not None:
            known[
                row["sample_row_id"],
                row["category"],
                row["item_id"],
                row["item_version"].rpartition("-")[2],
                row["scorer_id"],
            ] = row
    renderer = _renderer(stage, data.kind)
    asked = _asked(stage, data.kind, rows, renderer)
    scorer = RubricScorer(component, load(stage), stage.inputs, renderer, stage.device, known)
    refuse_unread_inputs(SPEC.name, stage.inputs, INPUTS_READ_WHEN, inputs_read(scorer.readers, stage.inputs))
    writer = stage.writer("rubric_scores", "rubric_scores/1")
    # as in the run that made them, what was lost and what is routed to other components is not shown to the rubric
    at = [i for i, row in enumerate(asked) if not row["lost"] and concerns(component, row["prompt_row"])]
    size = scorer.rows_at_once(len(at), config.block)
    for _, block in remaining_blocks(stage, at, size, "answers"):
        found = scorer.items([asked[i] for i in block])
        writer.write(
            [one for i, items in zip(block, found) for one in score_rows(rows[i], items, rows[i].get("iteration"))]
        )
    writer.close({"answers": len(at)})
    items_of: dict[str, list[dict]] = {row["row_id"]: [] for row in rows}
    for one in open_dataset(str(stage.workdir / "out" / "rubric_scores")).iter_rows():
        items_of[one["sample_row_id"]].append(one)
    values: list = placed(at, scorer.aggregate([items_of[rows[i]["row_id"]] for i in at]), [None] * len(rows))
    rewards = Rewards(list(config.rewards), {}, None)
    made, before, after = [], [], []
    for row, one, value in zip(rows, asked, values):
        stored = (
            {c["name"]: c["value"] for c in row["reward_components"]}
            if data.kind == "rollouts/1"
            else {c["source"]: c["value"] for c in row["scores"]}
        )
        parts = {}
        for other in config.rewards:
            if other is not component and other.name not in stored and not one["lost"]:
                raise ConfigError(
                    f"rescore: the data has no values of the component {other.name!r} (it has"
                    f" {', '.join(stored) or 'none'}); leave it out of rewards"
                )
            parts[other.name] = value if other is component else None if one["lost"] else stored[other.name]
        why = unscored(items_of[row["row_id"]]) if value is None and items_of[row["row_id"]] else None
        total = rewards.total_of(parts, _reasons(row, one, parts, config.rewards, {component.name: why} if why else {}))
        made.append(_rewarded(data.kind, row, total, config.rewards))
        before.append(None if row.get("reward_tier") == "unscorable" else row["reward"])
        after.append(None if made[-1].get("reward_tier") == "unscorable" else made[-1]["reward"])
    out = stage.writer("data", data.kind)
    out.write(made)
    out.close({"answers": len(made)})
    review = write_review(stage)
    pairs = [(b, a) for b, a in zip(before, after) if b is not None and a is not None]
    summary = {
        "answers": len(rows),
        "unscorable": sum(v is None for v in values),
        "items": len(review),
        "items_flagged": sum(r["flagged"] for r in review),
        "items_without_discrimination": sum(not r["discriminates"] for r in review),
        "items_reused": sum(
            (
                one["sample_row_id"],
                one["category"],
                one["item_id"],
                one["item_version"].rpartition("-")[2],
                one["scorer_id"],
            )
            in known
            for own in items_of.values()
            for one in own
        ),
    }
    if pairs:
        summary |= {
            "reward/before": sum(b for b, _ in pairs) / len(pairs),
            "reward": sum(a for _, a in pairs) / len(pairs),
            "reward/changed": sum(abs(a - b) > 1e-12 for b, a in pairs) / len(pairs),
        }
    summary |= rubric_metrics([items_of[row["row_id"]] for row in rows], values, component.flag_below)
    stage.summary(summary)
    stage.report("summary", markdown=document("Answers scored under another rubric", facts(summary)))


def _renderer(stage, kind: str):
    from stages.chat import renderer_for
    from stages.spec import ConfigError

    if kind == "rollouts/1" and not stage.has("model"):
        raise ConfigError(
            "rescore: rollouts hold token ids; give model=MODEL_REF, the policy of that run, to read them"
        )
    return renderer_for(stage.path("model")) if stage.has("model") else None


def _asked(stage, kind: str, rows, renderer) -> list[dict]:
    """The rows as scorers take them."""
    from stages.decoding.sampler import text_of
    from stages.generation import by_prompt_id, opens_thought, stored_completion
    from stages.rollouts.replay import lost_to
    from stages.spec import ConfigError

    prompts = by_prompt_id(stage, stage.dataset("prompts").iter_rows(), {row["prompt_id"] for row in rows})
    lost = sorted({row["prompt_id"] for row in rows} - set(prompts))
    if lost:
        raise ConfigError(
            f"rescore: the input prompts lacks {len(lost)} prompts of the data (first {lost[0]}); give the prompts"
            " dataset of the run that made it"
        )
    out, opens = [], opens_thought(renderer.tokenizer if renderer else None)
    for row in rows:
        opened = renderer is not None and opens(
            row["prompt_ids"] if kind == "rollouts/1" else renderer.prompt_ids(row["prompt"])
        )
        if kind == "rollouts/1":
            ids, finish = list(row["completion_ids"]), "eos" if row["terminated"] else "length"
            lost = lost_to(row, json.loads(row["extra_json"] or "{}"))
            text = text_of(renderer.tokenizer, [t for t in ids if t not in renderer.stop_ids])
        else:
            (ids, finish, lost), text = stored_completion(renderer, row), row["completion"][-1].get("content") or ""
        out.append(
            {
                "row_id": row["row_id"],
                "prompt_row": prompts[row["prompt_id"]],
                "completion_text": text,
                "completion_ids": ids,
                "finish_reason": finish,
                "opened": opened,
                "lost": lost,
            }
        )
    return out


def _reasons(row: dict, asked: dict, parts: dict, components, known: dict[str, str]) -> dict[str, str]:
    """Why components have no value, by name: what is ``known`` of now, else what the prompt and the stored row say."""
    from stages.reward.rewards import concerns
    from stages.reward.verdicts import ANOTHERS, NOT_ASKED

    stored = json.loads(row["extra_json"] or "{}").get("unscorable") or {}
    return {
        c.name: (
            ANOTHERS
            if not concerns(c, asked["prompt_row"])
            else asked["lost"]
            or known.get(c.name)
            or stored.get(c.name)
            or (NOT_ASKED if c.tier else "no value is stored")
        )
        for c in components
        if parts[c.name] is None
    }


def _rewarded(kind: str, row: dict, scored, components) -> dict:
    """The row with another reward (``stages.reward.verdicts.Scored``); what was computed from the old one (advantages,
    returns) is taken out.
    """
    from stages.reward.verdicts import failures

    total, extra = scored.total, json.loads(row["extra_json"] or "{}")
    if kind == "candidates/1":
        reason = (
            row["drop_reason"]
            if row["drop_reason"] not in (None, "unscorable")
            else "unscorable"
            if total is None
            else None
        )
        return {
            **row,
            "scores": [{"source": k, "value": v} for k, v in scored.parts.items()],
            "reward": total,
            "kept": reason is None,
            "drop_reason": reason,
            "extra_json": json.dumps(extra | {"unscorable": scored.reasons, "tier": scored.tier}, sort_keys=True),
        }
    extra.pop("unscorable", None)
    if failed := failures(scored.parts, scored.reasons):
        extra["unscorable"] = failed
    # the factor of each value in the total; of one without a total, as configured
    weights = scored.weights or {c.name: c.weight for c in components if not c.tier}
    kept = [c for c in row["reward_components"] if c["name"] == "overlong"]
    return {
        **row,
        "reward_components": [{"name": k, "value": v, "weight": weights.get(k, 0.0)} for k, v in scored.parts.items()]
        + kept,
        "score": total,
        "reward": 0.0 if total is None else total + sum(c["value"] for c in kept),
        "reward_tier": "unscorable" if total is None else scored.tier,
        "extra_json": json.dumps(extra) if extra else None,
        **dict.fromkeys(
            ("token_rewards", "advantages", "returns", "values", "bootstrap_value", "shaped_reward", "step_rewards")
        ),
        "step_values": None,  # VinePPO's, mean rewards of continuations
    }
