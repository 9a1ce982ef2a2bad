"""Groups that were sampled before: those of this run's last iterations (REPLAY), or those of another run (input
``stored``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

from stages.generation import Sample
from stages.policy.schedules import freshness_guard, replay_plan
from stages.rollouts.groups import Group, override_reward
from stages.rollouts.prompts import Passes


class ReplayWindow:
    """The groups of the last iterations and which of them are trained on again.

    Args:
        config: ``replay_window``, ``replay_fraction``, ``max_staleness``, ``prompts_per_step``.
        prompts: ``(row, prompt ids)``, by whose row ids groups are kept. rng: ``Stage.rng``.
        total_steps: the limit of staleness where ``max_staleness`` sets none.
    """

    def __init__(self, config, prompts, rng, total_steps: int):
        self.config, self.rng, self.total_steps = config, rng, total_steps
        self.rows = {row["row_id"]: row for row, _ in prompts}
        self.window: list[dict] = []

    def draw(self, iteration: int, version: int) -> tuple[list[Group], dict[str, float]]:
        """Groups of older iterations, not older than ``max_staleness`` optimizer steps (ASYNC), and metrics."""
        config = self.config
        plan = replay_plan(
            iteration,
            [w["iteration"] for w in self.window],
            config.prompts_per_step,
            config.replay_window,
            config.replay_fraction,
        )
        self.window = [w for w in self.window if w["iteration"] not in plan["evicted"]]
        pool = [g for w in self.window if w["iteration"] in plan["eligible_replay"] for g in w["groups"]]
        fit = freshness_guard(version, [g["version"] for g in pool], config.max_staleness or self.total_steps)
        usable = [g for g, ok in zip(pool, fit) if ok]
        n = min(plan["num_replay"], len(usable))
        picks = self.rng("replay", iteration).permutation(len(usable))[:n]
        return [full_group(usable[i], self.rows, fresh=False) for i in picks], {
            "replay/share": n / config.prompts_per_step,
            "replay/rejected_stale": float(len(pool) - len(usable)),
        }

    def add(self, iteration: int, groups: list[Group]) -> None:
        self.window.append({"iteration": iteration, "groups": [plain_group(g) for g in groups]})

    def state(self) -> list[dict]:
        return self.window

    def restore(self, state: list[dict]) -> None:
        self.window = state


def plain_group(group: Group) -> dict:
    """A group as JSON, its prompt by row id; without opponents."""
    return {
        "row_id": group.prompt["row_id"],
        "ids": list(group.ids),
        "version": group.version,
        "samples": [plain_sample(s) for s in group.samples],
        "greedy_sample": None if group.greedy_sample is None else plain_sample(group.greedy_sample),
    }


def plain_sample(sample: Sample) -> dict:
    """A sample as JSON, without its prompt."""
    return {k: v for k, v in vars(sample).items() if k not in ("prompt", "prompt_ids")}


def full_group(plain: dict, rows: dict[str, dict], fresh: bool) -> Group:
    """The group that :func:`plain_group` wrote; ``rows``: the prompts by row id."""
    row, best = rows[plain["row_id"]], plain["greedy_sample"]
    return Group(
        row,
        plain["ids"],
        [Sample(row, plain["ids"], **s) for s in plain["samples"]],
        plain["version"],
        fresh,
        greedy_sample=None if best is None else Sample(row, plain["ids"], **best),
    )


class StoredGroups:
    """Groups of a ``rollouts/1`` dataset, in shuffled passes: off-policy training without sampling.

    Args:
        stage: for its input, config and random numbers. prompts: ``(row, prompt ids)``; a prompt that is not among them
            is known by its stored columns only.

    Raises:
        ValueError: there are no rows, or reward_override=format_only and no stored format.
    """

    def __init__(self, stage, prompts):
        self.stage = stage
        self.groups = _groups_of(stage.dataset("stored").iter_rows(), {row["prompt_id"]: row for row, _ in prompts})
        self.cursor = 0
        self.passes = Passes(stage.rng, "stored", len(self.groups))
        _compare_rewards(stage, [s for g in self.groups for s in g.samples])
        for k, group in enumerate(self.groups):
            for g, sample in enumerate(group.samples):
                override_reward(stage, sample, "stored", k, g)

    def keep(self, prompt_ids: Collection[str]) -> None:
        """Go on with the groups of these prompts only; raises ValueError where there are none."""
        kept = [g for g in self.groups if g.prompt["prompt_id"] in prompt_ids]
        if not kept:
            raise ValueError(
                "no group of the input stored belongs to a prompt with a baseline; give rollouts of the prompts in"
                " data, or other baselines."
            )
        if len(kept) < len(self.groups):
            self.groups, self.passes = kept, Passes(self.stage.rng, "stored", len(kept))

    def take(self, n: int) -> list[Group]:
        """The next ``n`` groups."""
        self.cursor += n
        return [self.groups[self.passes[k]] for k in range(self.cursor - n, self.cursor)]

    def state(self) -> int:
        return self.cursor

    def restore(self, state: int) -> None:
        self.cursor = state


def _groups_of(rows: Iterable[dict], by_id: dict[str, dict]) -> list[Group]:
    groups = [group for group, _ in groups_with_rows(rows, by_id)]
    if not groups:
        raise ValueError(
            "the input stored has no rows; give a rollouts/1 dataset, for example the rollouts output of an rl stage."
        )
    return groups


def groups_with_rows(rows: Iterable[dict], by_id: dict[str, dict]) -> list[tuple[Group, list[dict]]]:
    """Groups in the dataset's order, each with its rows: completions of one draw of a prompt in an iteration, without
    texts, their rewards from the stored components.
    """
    groups: dict[tuple, tuple[Group, list[dict]]] = {}
    for row in rows:
        prompt = by_id.get(row["prompt_id"]) or {k: row[k] for k in ("row_id", "prompt_id", "group_id", "dataset")}
        parts, weights, total = components_of(row)
        extra = json.loads(row["extra_json"] or "{}")
        draw = extra.get("draw", 0)
        group, own = groups.setdefault(
            (row["iteration"], row["prompt_id"], tuple(row["prompt_ids"]), draw),
            (Group(prompt, list(row["prompt_ids"]), [], -1, False), []),
        )
        own.append(row)
        group.samples.append(
            Sample(
                prompt,
                row["prompt_ids"],
                len(group.samples),
                list(row["completion_ids"]),
                [float(v) for v in row["logp_rollout"] or row["logp_old"]],
                row.get("finish_reason") or ("eos" if row["terminated"] else "length"),
                "",
                total,
                parts,
                {},
                row["is_correct"],
                tool_mask=row["tool_mask"],
                mode=extra.get("mode", "fresh"),
                parent=extra.get("parent_sample_id"),
                failure=lost_to(row, extra),
                weights=weights,
                step_rewards=(
                    (list(row["step_ends"]), list(row["step_rewards"]))
                    if extra.get("steps_paid") and row["step_rewards"] is not None
                    else None
                ),
            )
        )
    return list(groups.values())


def components_of(row: dict) -> tuple[dict, dict, float]:
    """(value by component, weight by component, their weighted sum, NaN of an unscorable one) of a stored row."""
    paid = [c for c in row["reward_components"] if c["name"] != "overlong"]
    total = sum(c["weight"] * c["value"] for c in paid if c["value"] is not None)
    return (
        {c["name"]: c["value"] for c in paid},
        {c["name"]: c["weight"] for c in paid},
        float("nan") if row["reward_tier"] == "unscorable" else total,
    )


def lost_to(row: dict, extra: dict) -> str | None:
    """Why the environment of a stored trajectory failed; None where it did not."""
    if row.get("finish_reason") != "failure":
        return None
    return next(iter((extra.get("unscorable") or {}).values()), "its environment failed")


def _compare_rewards(stage, samples: list[Sample]) -> None:
    """Say where ``rewards`` are not those that the stored completions earned, which is what training reads."""
    asked = {(c.name, c.weight) for c in stage.config.rewards}
    paid = {(name, weight) for s in samples for name, weight in s.weights.items() if "/" not in name}
    missing = [
        c.name for c in stage.config.rewards if c.kind == "format" and any(c.name not in s.parts for s in samples)
    ]
    if stage.config.reward_override == "format_only" and missing:
        raise ValueError(
            f"reward_override=format_only reads the stored values of {', '.join(missing)}, which the input stored does"
            " not have for every completion; write reward_override=random or inverted, or store rollouts of a run with"
            " that component."
        )
    if not asked <= paid or {name for name, weight in paid if weight} - {name for name, _ in asked}:
        stage.warn(
            "stored_rewards",
            "Training pays what the stored rollouts earned"
            f" ({', '.join(f'{name} x {weight:g}' for name, weight in sorted(paid))}), not the configured rewards"
            f" ({', '.join(f'{name} x {weight:g}' for name, weight in sorted(asked))}), which score validation answers"
            " only. To train on others, give rollouts that were scored with them (the stage rescore does so for a"
            " rubric).",
        )
