"""Which prompts come next: shuffled passes, curricula, and the band of difficulty that is trained on at all.

``none``                shuffled passes over all prompts
``easy_to_hard``        by the rows' difficulty, easiest first                                                   (CURRICULUM)
``cosine, gaussian``    a level of difficulty drawn by the part of the run that is done, then a prompt of it     (E2H)
``rerank``              by what each prompt's last group could teach, those without a signal left out           (PROMPT-RERANK)
``pass_at_k``           shuffled passes over the prompts whose pass@k is high enough for this part of the run    (PASSK-CURR)
``self_paced``          the same over those whose share of wrong answers is below a threshold that grows        (SELF-PACED)

``difficulty_band`` leaves out prompts by their pass rate under the starting policy, ``no_resampling_pass_rate`` from
the first group on that is right more often, whatever their order (DIFF-FILTER).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from stages.measures.sampling import pass_at_k
from stages.policy.schedules import ADMITTING, admitted_prompts, e2h_probabilities, learning_scores, rerank
from stages.selection import difficulty_band, order_by_difficulty
from stages.spec import ConfigError


class Passes:
    """Row numbers in passes over ``n`` rows, each pass shuffled anew: position ``k`` is a function of (run, purpose,
    k).
    """

    def __init__(self, rng, purpose: str, n: int):
        self.rng, self.purpose, self.n, self.epoch = rng, purpose, n, -1

    def __getitem__(self, k: int) -> int:
        epoch, index = divmod(k, self.n)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self.rng(self.purpose, epoch).permutation(self.n)
        return int(self.order[index])


class PromptOrder:
    """The prompts of a run in their order, and what was learned about them.

    Args:
        config: the RL stage's config (``curriculum``, ``passk_*``, ``difficulty_band``, ``prompts_per_step``).
        prompts: ``(row, prompt ids)`` of every prompt.
        rng: counter-based random numbers (``Stage.rng``).
        total_steps: optimizer steps of the run.

    Raises:
        ValueError: a curriculum by difficulty and a prompt without one.
    """

    def __init__(self, config, prompts: Sequence[tuple[dict, list[int]]], rng, total_steps: int):
        self.config, self.rng, self.total_steps = config, rng, total_steps
        self.cut = False  # prompts were left out (difficulty_band, v_star)
        self.cursor = 0  # prompts taken so far
        self.queue: list[int] = []  # still to come in this pass (rerank) or batch (ADMITTING)
        self.drawn: set[str] = set()  # row ids that came in this pass (ADMITTING)
        self.scores: dict[str, float] = {}  # what each prompt's last group could teach, by row id (rerank)
        # samples and right ones of each prompt, by row id (ADMITTING, difficulty_band)
        self.counts: dict[str, tuple[int, int]] = {}
        self.solved: set[str] = set()  # prompts whose last group passed no_resampling_pass_rate
        self._use(prompts)

    def _use(self, prompts) -> None:
        self.prompts, self.passes = prompts, Passes(self.rng, "prompts", len(prompts))
        by_level = self.config.curriculum in ("easy_to_hard", "cosine", "gaussian")
        self.levels = [difficulty_of(row, self.config.curriculum) for row, _ in prompts] if by_level else []

    def take(self, n: int, version: int) -> list[tuple[dict, list[int]]]:
        """The next ``n`` prompts at optimizer step ``version``; solved ones are passed over, unless an order keeps on
        giving them.
        """
        chosen, passed = [], 0
        while len(chosen) < n:
            prompt = self.prompts[self._index(self.cursor, version)]
            self.cursor += 1
            if prompt[0]["row_id"] in self.solved and passed < 4 * len(self.prompts):
                passed += 1
                continue
            chosen.append(prompt)
        return chosen

    def _index(self, k: int, version: int) -> int:
        config = self.config
        if config.curriculum in ("rerank", *ADMITTING):
            self.queue = self.queue or (self._reranked() if config.curriculum == "rerank" else self._admitted(version))
            return self.queue.pop(0)
        if config.curriculum == "none":
            return self.passes[k]
        if config.curriculum == "easy_to_hard":
            at, rng = k % len(self.prompts), self.rng("curriculum", k)
            if at and rng.random() < config.curriculum_mix:
                at = int(rng.integers(0, at))
            return order_by_difficulty(self.levels)[0][at]
        steps = sorted(set(self.levels))
        chances = e2h_probabilities(
            config.curriculum, version, self.total_steps, len(steps), config.curriculum_beta, config.curriculum_sigma
        )
        rng = self.rng("curriculum", k)
        level = steps[int(rng.choice(len(steps), p=chances))]
        return int(rng.choice([i for i, v in enumerate(self.levels) if v == level]))

    def _reranked(self) -> list[int]:
        at = {row["row_id"]: i for i, (row, _) in enumerate(self.prompts)}
        if not self.scores.keys() & at.keys():
            return self.rng("prompts", self.cursor).permutation(len(self.prompts)).tolist()
        unknown = [i for row_id, i in at.items() if row_id not in self.scores]  # nothing of them could be scored so far
        known = [at[row_id] for row_id in rerank(self.scores)[0] if row_id in at]
        return known + unknown or self.rng("prompts", self.cursor).permutation(len(self.prompts)).tolist()

    def _admitted(self, version: int) -> list[int]:
        config = self.config
        admitted = set(admitted_prompts(config, self.counts, version / self.total_steps))
        known = [i for i, (row, _) in enumerate(self.prompts) if row["row_id"] in admitted]
        left = [i for i in known if self.prompts[i][0]["row_id"] not in self.drawn]
        if not left:  # a new pass
            left, self.drawn = known, set()
        # judged anew for every batch
        chosen = [left[int(i)] for i in self.rng("prompts", self.cursor).permutation(len(left))][
            : config.prompts_per_step
        ]
        self.drawn |= {self.prompts[i][0]["row_id"] for i in chosen}
        return chosen

    # -- what is learned about prompts ------------------------------------------------------------------------------
    def learn(self, groups: Iterable) -> None:
        """Take note of new groups, dropped ones included; one that nothing could be scored of changes nothing that is
        known.
        """
        groups = list(groups)
        if self.config.curriculum == "rerank":
            if (
                self.config.rerank_score == "confidence"
                and groups
                and not any(s.logps for g in groups for s in g.samples)
            ):
                raise ConfigError(
                    "rerank_score=confidence orders prompts by the log-probs of answers, and"
                    f" engine={self.config.engine} gives none; write rerank_score=mean_deviation, or engine=builtin or"
                    " vllm."
                )
            known = {
                g.prompt["row_id"]: (
                    [s.total for s in g.samples if np.isfinite(s.total)],
                    [v for s in g.samples for v, own in zip(s.logps or (), s.action_mask) if own],
                )
                for g in groups
            }
            known = {
                row_id: (totals, logps)
                for row_id, (totals, logps) in known.items()
                if totals and (logps or self.config.rerank_score != "confidence")
            }
            self.scores |= learning_scores(
                {row_id: totals for row_id, (totals, _) in known.items()},
                self.config.rerank_score,
                {row_id: logps for row_id, (_, logps) in known.items()},
            )
        if self.config.curriculum in ADMITTING:
            self.counts |= self.enough(verdicts_of((g.prompt["row_id"], g.samples) for g in groups))
        if self.config.no_resampling_pass_rate is not None:
            rates = verdicts_of((g.prompt["row_id"], g.samples) for g in groups)
            self.solved |= {
                row_id for row_id, (n, right) in rates.items() if right / n > self.config.no_resampling_pass_rate
            }

    def enough(self, counts: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """The counts that say enough: pass@k needs k samples."""
        needed = self.config.passk_k if self.config.curriculum == "pass_at_k" else 1
        return {row_id: (n, right) for row_id, (n, right) in counts.items() if n >= needed}

    def metrics(self, groups: Sequence) -> dict[str, float]:
        """The levels that these groups' prompts have (CURRICULUM, E2H), and what is known of the prompts' pass
        rates.
        """
        found = {}
        if self.levels:
            drawn = [difficulty_of(g.prompt, self.config.curriculum) for g in groups]
            found["curriculum/mean_level"] = float(np.mean(drawn))
            levels = sorted(set(self.levels))
            found |= {
                f"curriculum/level_{level:g}": drawn.count(level) / len(drawn) for level in levels if len(levels) <= 20
            }
        if self.counts:
            found["curriculum/pool_pass_rate"] = float(np.mean([right / n for n, right in self.counts.values()]))
        if self.config.curriculum == "pass_at_k":
            chances = [
                p for n, right in self.counts.values() if (p := pass_at_k(n, right, self.config.passk_k)) is not None
            ]
            found[f"curriculum/pool_pass_at_{self.config.passk_k}"] = float(np.mean(chances)) if chances else 0.0
        if self.config.no_resampling_pass_rate is not None:
            found["curriculum/solved_prompts"] = float(len(self.solved))
        return found

    @property
    def wants_counts(self) -> bool:
        """Whether every prompt's pass rate must be known before the first prompt is taken."""
        return not self.counts and (self.config.curriculum in ADMITTING or self.config.difficulty_band is not None)

    def start_from(self, counts: dict[str, tuple[int, int]]) -> set[str]:
        """Pass rates of the starting policy, ``{row id: (samples, right ones)}``: the row ids of the prompts that are
        trained on. Prompts without a pass rate are left out.

        Raises:
            ValueError: no prompt lies in ``difficulty_band``, or none has enough samples with a verdict.
        """
        if not counts:
            raise ValueError(
                f"no prompt has {self.config.passk_k} samples with a verdict, so pass rates are unknown; write a larger"
                " passk_samples (or give prompt_stats of more samples), or look at why completions cannot be scored"
            )
        kept = set(counts)
        if self.config.difficulty_band:
            low, high = self.config.difficulty_band
            kept = {row_id for row_id, (n, c) in counts.items() if difficulty_band([c], n, low, high)[0]}
            if not kept:
                raise ValueError(
                    f"no prompt has a pass rate in difficulty_band=[{low:g}, {high:g}]; widen it, or start from a model"
                    " that solves some of them"
                )
        self.counts = {row_id: found for row_id, found in counts.items() if row_id in kept}
        self._keep(kept)
        return kept

    def leave_out(self, row_ids: set[str]) -> None:
        """Go on without these prompts; raises ValueError where none would be left."""
        kept = {row["row_id"] for row, _ in self.prompts} - row_ids
        if not kept:
            raise ValueError(
                "no prompt was answered right by the starting policy, so there is nothing to learn from; use easier"
                " prompts, more baseline_samples, or a better starting model"
            )
        self._keep(kept)

    def _keep(self, row_ids: set[str]) -> None:
        if any(row["row_id"] not in row_ids for row, _ in self.prompts):
            self.cut = True
            self._use([p for p in self.prompts if p[0]["row_id"] in row_ids])

    def state(self) -> dict:
        return {
            "cursor": self.cursor,
            "queue": list(self.queue),
            "drawn": sorted(self.drawn),
            "solved": sorted(self.solved),
            "scores": list(self.scores.items()),
            "counts": list(self.counts.items()),  # pairs: ties keep their order, and a checkpoint sorts keys
            "kept": [row["row_id"] for row, _ in self.prompts] if self.cut else None,
        }

    def restore(self, state: dict) -> None:
        self.cursor = state["cursor"]
        self.queue = list(state["queue"])
        self.scores = dict(state["scores"])
        self.counts = dict(state["counts"])
        self.solved, self.drawn = set(state["solved"]), set(state["drawn"])
        if state["kept"] is not None:
            self._keep(set(state["kept"]))


def difficulty_of(row: dict, curriculum: str) -> float:
    """Difficulty of a prompt as its ``extra_json`` gives it: difficulty, level, or 1 - pass_rate."""
    found = json.loads(row.get("extra_json") or "{}")
    value = found.get("difficulty", found.get("level", 1.0 - found["pass_rate"] if "pass_rate" in found else None))
    if value is None:
        raise ValueError(
            f"curriculum={curriculum} needs a difficulty for every prompt, but {row['row_id'][:12]} has none; write "
            'extra_json={"difficulty": 2} (or level, or pass_rate) into the prompts, or curriculum=none.'
        )
    return float(value)


def verdicts_of(groups: Iterable[tuple[str, Sequence]]) -> dict[str, tuple[int, int]]:
    """:func:`verdict_counts` of the ``(row id, samples)``; of those that the policy said."""
    return verdict_counts(
        (row_id, [s.correct for s in samples if s.mode != "sft"], any(np.isfinite(s.total) for s in samples))
        for row_id, samples in groups
    )


def verdict_counts(groups: Iterable[tuple[str, Sequence[bool | None], bool]]) -> dict[str, tuple[int, int]]:
    """{row id: (samples with a verdict, right ones)} of the ``(row id, verdicts, whether any could be scored)`` where
    there is a verdict; raises ValueError where rewards say of no sample whether it is right, although they could score
    some."""
    groups = list(groups)
    found = {
        row_id: (len(known), sum(known))
        for row_id, verdicts, _ in groups
        if (known := [v for v in verdicts if v is not None])
    }
    if not found and any(scored for *_, scored in groups):
        raise ValueError(
            "curriculum=pass_at_k, curriculum=self_paced, difficulty_band and no_resampling_pass_rate need to know"
            " which completions are right; add a reward of kind verifier, code or environment, or leave them out."
        )
    return found


def verdicts_on(samples: Sequence) -> tuple[int, int]:
    """(samples, right ones) of a prompt, (0, 0) where not every sample has a verdict."""
    verdicts = [s.correct for s in samples]
    return (0, 0) if None in verdicts else (len(verdicts), sum(verdicts))


def counts_of(prompts, stats: Iterable[dict]) -> dict[str, tuple[int, int]]:
    """{row id: (samples with a verdict, right ones)} of every prompt, from the last of its ``prompt_stats/1`` rows that
    has a pass rate; rows that do not say how many were judged count all of their n.
    """
    found: dict[str, tuple[int, int, int]] = {}
    for row in stats:
        if row["pass_at_1"] is not None and row["iteration"] >= found.get(row["prompt_id"], (-1,))[0]:
            judged = json.loads(row.get("extra_json") or "{}").get("verdicts")
            n, right = judged or (row["n"], round(row["n"] * row["pass_at_1"]))
            found[row["prompt_id"]] = row["iteration"], n, right
    missing = [row["prompt_id"] for row, _ in prompts if row["prompt_id"] not in found]
    if missing:
        raise ValueError(
            f"the input prompt_stats knows nothing about prompt {missing[0]} and {len(missing) - 1} more; give"
            " statistics of these prompts, or leave the input out so that passk_samples are drawn."
        )
    return {row["row_id"]: found[row["prompt_id"]][1:] for row, _ in prompts}
