"""An RL run computed again from what it left: rollouts, curves and the weights before each step.

Written from the catalogue (methods/rl.md) in numpy and plain transformers, float64, without the formulas of ``stages``:
of the production code only the resolved row (which axis has which value) and the items of a step (which completions it
holds) are read. :class:`Watch` notes weights and gradients around every optimizer step of a run in this process,
:func:`audit` says where they differ from what the rollouts give.
"""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import torch
from torch.func import functional_call


class Watch:
    """Notes every optimizer step inside the block: ``policy`` and ``critic``, lists of weights before, items, metrics,
    gradients, weights after. ``die_at``: a policy step before which the run is ended as if it had been killed."""

    class Killed(BaseException):
        pass

    def __init__(self, die_at: int | None = None):
        self.policy, self.critic, self.die_at = [], [], die_at

    def __enter__(self):
        from stages.training import Trainer

        self.original = original = Trainer.step

        def step(trainer, items):
            kind = self.critic if type(trainer.objective).__name__ == "ValueRegression" else self.policy
            if kind is self.policy and self.die_at is not None and len(self.policy) == self.die_at:
                raise Watch.Killed
            before = weights_of(trainer.model)
            found = original(trainer, items)
            grads = {name: p.grad.detach().clone() for name, p in trainer.parameters.items() if p.grad is not None}
            kind.append(
                SimpleNamespace(
                    before=before,
                    items=list(items),
                    metrics=dict(found),
                    grads=grads,
                    trained=list(trainer.parameters),
                    after=weights_of(trainer.model),
                )
            )
            return found

        Trainer.step = step
        return self

    def __exit__(self, *_):
        from stages.training import Trainer

        Trainer.step = self.original


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- models -----------------------------------------------------------------------------------------------------------


class Model:
    """A causal LM, or a scalar head on one, through the library's own forward in float64, as a function of weights."""

    def __init__(self, path: str, head: bool = False, scale: float = 1.0):
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
        self.net, self.scale, self.head = (
            kind.from_pretrained(path, dtype=torch.float32, **({"num_labels": 1} if head else {})).double().eval(),
            scale,
            head,
        )
        self.own = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        embedding = self.net.get_input_embeddings()
        embedding.padding_idx = None  # a sampled pad token is a token

    def plain(self, weights: dict) -> dict:
        """Weights by the plain model's names, adapters merged: W + scale B A."""
        out = {}
        for name, value in weights.items():
            short = name.removeprefix("base_model.model.")
            if ".lora_" in name or name.startswith("value_head") or ".value_head" in name:
                continue
            value = value.double()
            if ".base_layer." in short:
                a, b = (weights[name.replace("base_layer.weight", f"lora_{x}.default.weight")].double() for x in "AB")
                value = value + self.scale * b @ a
            out[short.replace(".base_layer.", ".")] = value
        return out

    def read(self, weights: dict, rows):
        """(log softmax over the vocabulary, hidden states) at the positions that predict each completion token, and the
        hidden state at the last token, per row.
        """
        lists = [list(r["prompt_ids"]) + list(r["completion_ids"]) for r in rows]
        ids = torch.zeros(len(lists), max(map(len, lists)), dtype=torch.long)
        for k, row in enumerate(lists):
            ids[k, : len(row)] = torch.tensor(row)
        core = {n.split(".", 1)[1]: v for n, v in weights.items() if n.startswith("model.")}
        states = functional_call(self.net.model, core, (ids,), {"use_cache": False}).last_hidden_state
        out = []
        for k, r in enumerate(rows):
            p, n = len(r["prompt_ids"]), len(r["completion_ids"])
            out.append((states[k, p - 1 : p + n - 1], states[k, p + n - 1]))
        return out


def altered(c) -> bool:
    """Whether the sampler draws from something else than softmax(logits / temperature)."""
    return bool(
        c.top_p < 1
        or c.top_k
        or c.min_p
        or c.min_tokens
        or c.repetition_penalty != 1.0
        or c.frequency_penalty
        or c.presence_penalty
        or c.bad_words
        or c.logit_bias
    )


def logits_of(hidden, weights):
    return hidden @ weights["lm_head.weight"].t()


def log_softmax(hidden, weights, temperature):
    return torch.log_softmax(hidden @ weights["lm_head.weight"].t() / temperature, -1)


def picked(logps, row):
    return logps.gather(1, torch.tensor(list(row["completion_ids"]), dtype=torch.long)[:, None])[:, 0]


def drawn_from(logits, row, c, stop_ids, tokenizer):
    """Log-probs of what the sampler draws from: stop tokens banned before min_tokens, and the last token of a bad word
    behind its first ones; biases; the repetition penalty over prompt and completion so far; frequency and presence
    penalties over the completion; temperature, top-k, then top-p over what is left (the smallest set whose mass reaches
    top_p), then min-p."""
    out = torch.full_like(logits, -math.inf)
    words = [
        tokenizer.encode(spelling, add_special_tokens=False)
        for word in c.bad_words
        for spelling in (word, " " + word.lstrip())
    ]
    for t, row_logits in enumerate(logits):
        z = row_logits.clone()
        before = list(row["completion_ids"])[:t]
        if t < c.min_tokens:
            z[list(stop_ids)] = -math.inf
        for *first, last in words:
            if before[t - len(first) :] == first and len(first) <= t:
                z[last] = -math.inf
        for token, bias in c.logit_bias.items():
            z[token] += bias
        if c.repetition_penalty != 1.0:
            said = list({*row["prompt_ids"], *before})
            z[said] = torch.where(z[said] > 0, z[said] / c.repetition_penalty, z[said] * c.repetition_penalty)
        for token in set(before):
            z[token] -= c.frequency_penalty * before.count(token) + c.presence_penalty
        row_t = torch.log_softmax(z / c.temperature, -1)
        out[t] = _filtered(row_t, c)
    return out


def _filtered(row, c):
    keep = torch.ones_like(row, dtype=torch.bool)
    if c.top_k:
        keep &= row >= row.topk(c.top_k).values[-1]
    if c.top_p < 1:
        order = row.masked_fill(~keep, -math.inf).argsort(descending=True)
        mass = row[order].exp() * keep[order] / row[keep].exp().sum()
        n = int((mass.cumsum(0) < c.top_p).sum()) + 1
        allowed = torch.zeros_like(keep)
        allowed[order[:n]] = True
        keep &= allowed
    if c.min_p:
        keep &= row >= row.max() + math.log(c.min_p)
    return row.masked_fill(~keep, -math.inf) - row[keep].logsumexp(0)


# --- rewards ----------------------------------------------------------------------------------------------------------


def equal(values) -> bool:
    values = np.asarray(values, float)
    return len(values) < 2 or np.ptp(values) <= 1e-7 * np.abs(values).max()


def is_sure(comp, value) -> bool:
    """Whether a tier's value is the last word: any but that of a reward model whose own opinion is not likely enough."""
    if value is None or comp.tier != "learned":
        return value is not None
    p = 1 / (1 + math.exp(-value))
    return max(p, 1 - p) >= comp.min_confidence


def std(values, ddof):
    values = np.asarray(values, float)
    return math.sqrt(((values - values.mean()) ** 2).sum() / max(len(values) - ddof, 1))


class Iteration:
    """The rows of one iteration and everything that follows from them, step by step of rl.md 1.4."""

    def __init__(self, run, number, rows, start):
        self.run, self.c, self.row, self.number, self.rows, self.start = run, run.c, run.row, number, rows, start
        self.B = len(rows)
        keys = [
            (
                r["prompt_id"],
                tuple(r["prompt_ids"]),
                json.loads(r["extra_json"] or "{}").get("draw", 0),
                r["policy_version"],
            )
            for r in rows
        ]
        self.group = np.array([list(dict.fromkeys(keys)).index(k) for k in keys])
        self.own = [1 - np.array(r["tool_mask"] if r["tool_mask"] is not None else [0] * r["length"]) for r in rows]
        self.scorable = np.array([r["reward_tier"] != "unscorable" for r in rows])
        self.ended = np.array([r["terminated"] for r in rows])
        self.silent = False  # whether a group says nothing of what it was compared with
        self.unseen = False  # whether advantages read a number that no row holds
        self.fresh = np.array([run.stored or r["policy_version"] == run.version_of(number) for r in rows])

    def say(self, what, found, expected, tolerance=2e-5):
        found, expected = np.asarray(found, float), np.asarray(expected, float)
        if found.shape != expected.shape or not np.allclose(
            found, expected, rtol=tolerance, atol=tolerance, equal_nan=True
        ):
            worst = (
                ""
                if found.shape != expected.shape or not found.size
                else (
                    f" (largest difference {np.nanmax(np.abs(found - expected)):.3g} at"
                    f" {int(np.nanargmax(np.abs(found - expected)))})"
                )
            )
            self.run.problems.append(
                f"iteration {self.number}, {what}: stored {np.array2string(found.ravel()[:6], precision=6)}, computed"
                f" {np.array2string(expected.ravel()[:6], precision=6)}{worst}"
            )

    def log(self, name, expected, tolerance=1e-4):
        """The logged metric ``name`` of the iteration's first step."""
        found = self.run.metrics[self.start].get(name)
        if found is None or (expected is None) or not np.isclose(found, expected, rtol=tolerance, atol=tolerance):
            if not (found is None and expected is None):
                self.run.problems.append(f"iteration {self.number}, metric {name}: logged {found}, computed {expected}")

    # 3, 4: log-probs and rewards
    def check_logps(self):
        run, c = self.run, self.c
        loose = 0.1 if c.compute_dtype != "float32" else 2e-4
        # of stored rows of another run nobody knows the sampler's weights
        for version in sorted(
            {r["policy_version"] for r in self.rows if r["policy_version"] >= 0 or self.row.on_policy_logps}
        ):
            at = [i for i, r in enumerate(self.rows) if r["policy_version"] == version]
            rows = [self.rows[i] for i in at]
            with torch.no_grad():
                w = run.weights_at(max(version, 0))
                sampler = [logits_of(h, w) for h, _ in run.model.read(w, rows)]
                w = run.weights_at(self.start)
                trainer = [log_softmax(h, w, c.temperature) for h, _ in run.model.read(w, rows)]
            mixed = altered(c)
            for i, mu, now in zip(at, sampler, trainer):
                r, own = self.rows[i], self.own[i] == 1
                drawn = picked(
                    (
                        drawn_from(mu, r, c, run.stop_ids, run.tokenizer)
                        if mixed and not c.environment
                        else torch.log_softmax(mu / c.temperature, -1)
                    ),
                    r,
                )
                corrected = (
                    c.importance_correction != "none"
                    or c.rejection != "none"
                    or mixed
                    or c.compute_dtype != "float32"
                    or c.sampling_dtype != "float32"
                )
                if self.row.on_policy_logps and version != self.start:
                    old = picked(now, r)
                elif self.row.behaviour_ratio or (not corrected):
                    old = drawn  # whoever sampled
                else:
                    old = picked(now, r)
                if not (mixed and c.environment and old is drawn):  # whose turns each begin anew
                    self.say(f"logp_old of row {i}", np.array(r["logp_old"])[own], old.numpy()[own], loose)
                if r["logp_rollout"] is not None and version >= 0:
                    if not (mixed and c.environment):
                        self.say(
                            f"logp_rollout of row {i}",
                            np.array(r["logp_rollout"])[own],
                            drawn.numpy()[own],
                            max(loose, 1e-2 * bool(c.min_p or c.top_p < 1)),
                        )
                if self.own[i].min(initial=1) == 0 and np.array(r["logp_old"])[~own].any():
                    run.problems.append(f"row {i}: log-probs on tokens of tools")
        self.old = [np.where(o == 1, np.array(r["logp_old"], float), 0.0) for r, o in zip(self.rows, self.own)]
        self.mu = [
            np.array(r["logp_rollout"] if r["logp_rollout"] is not None else r["logp_old"], float) for r in self.rows
        ]
        self.ref = None
        if self.row.needs_reference or c.monitor_kl:
            with torch.no_grad():
                w = run.reference_at(self.start, self.number)
                self.full_ref = (
                    [log_softmax(h, w, c.temperature) for h, _ in run.other_model.read(w, self.rows)]
                    if w is not None
                    else None
                )
            self.ref = [np.array(r["logp_ref"], float) for r in self.rows]
            for i, r in enumerate(self.rows):
                o = self.own[i] == 1
                self.say(
                    f"logp_ref of row {i}",
                    self.ref[i][o],
                    picked(self.full_ref[i], r).numpy()[o] if w is not None else self.old[i][o],
                    loose,
                )
            self.ref = [np.where(o == 1, x, 0.0) for x, o in zip(self.ref, self.own)]
        with torch.no_grad():
            w = run.weights_at(self.start)
            states = run.model.read(w, self.rows)
            self.full_old = [log_softmax(h, w, c.temperature) for h, _ in states]
        self.values = None
        if self.row.needs_critic:
            self.values = [np.array(r["values"], float) for r in self.rows]
            found, after = run.values_at(self.start, self.rows, states)
            for i, r in enumerate(self.rows):
                expected = (
                    np.full(r["length"], found[i][0])
                    if self.row.critic_target == "bandit" and r["length"]
                    else found[i]
                )
                o = self.own[i] == 1
                self.say(f"values of row {i}", self.values[i][o], expected[o], max(loose, 1e-3))
            boots = self.row.truncation_policy == "bootstrap"
            self.say(
                "bootstrap",
                [r["bootstrap_value"] for r in self.rows],
                [
                    0.0 if e or not boots else v[0] if self.row.critic_target == "bandit" and len(v) else a
                    for e, a, v in zip(self.ended, after, found)
                ],
                max(loose, 1e-3),
            )
            self.boot = np.array([r["bootstrap_value"] for r in self.rows])

    def rewards(self):
        run, c, row = self.run, self.c, self.row
        parts = [{p["name"]: p["value"] for p in r["reward_components"]} for r in self.rows]
        stored = [{p["name"]: p["weight"] for p in r["reward_components"]} for r in self.rows]
        self.parts = parts
        lengths = np.array([r["length"] for r in self.rows])
        # that it was drawn under
        limit = np.array([c.completion_limit(max(r["policy_version"], 0)) for r in self.rows])
        cache = (
            np.round(row.soft_punish_share * limit)
            if c.soft_punish_cache is None
            else np.full(self.B, c.soft_punish_cache)
        )
        overlong = (
            np.where(cache > 0, np.clip((limit - cache - lengths) / np.maximum(cache, 1), -1, 0), 0.0)
            if c.reward_override == "none"
            else np.zeros(self.B)
        )
        cache = cache.max()
        self.cache, self.overlong = cache if c.reward_override == "none" else 0, overlong
        for i, p in enumerate(parts):
            self.say(f"overlong of row {i}", p.pop("overlong", 0.0), overlong[i])
        for comp in c.rewards:
            expected = [run.component(comp, r) for r in self.rows]
            for i, value in enumerate(expected):
                # a later tier is not asked, of which its tier says more below
                if value is not None and not (comp.tier and parts[i].get(comp.name) is None):
                    self.say(
                        f"component {comp.name} of row {i}",
                        parts[i][comp.name] if parts[i].get(comp.name) is not None else np.nan,
                        value,
                        1e-3,
                    )
        self.weight = {
            comp.name: (
                run.multiplier(comp, self.number)
                if comp.at_least is not None
                else comp.weight
                if self.start >= comp.from_step
                else 0.0
            )
            for comp in c.rewards
        }
        totals, scales = np.full(self.B, np.nan), np.ones(self.B)
        primary = lambda comp: (
            (
                comp.on_missing
                or ("invalidate" if comp.kind in ("verifier", "python", "model", "environment", "majority") else "skip")
            )
            == "invalidate"
        )
        cascade = sorted((comp for comp in c.rewards if comp.tier), key=lambda x: "rule learned judge".index(x.tier))
        for i, p in enumerate(parts):
            rewards, decided = c.rewards, None
            if cascade:  # the first tier that can say it, and is sure, counts (REWARD-ROUTER)
                decided = next((comp for comp in cascade if is_sure(comp, p.get(comp.name))), None)
                rewards = [comp for comp in c.rewards if not comp.tier or comp is decided]
                self.say(
                    f"tier of row {i}",
                    ["", "rule", "learned", "judge", "unscorable"].index(self.rows[i]["reward_tier"] or ""),
                    ["", "rule", "learned", "judge", "unscorable"].index(decided.tier if decided else "unscorable"),
                )
                settled = cascade.index(decided) if decided else len(cascade)
                if any(p.get(comp.name) is not None for comp in cascade[settled + 1 :]):
                    run.problems.append(f"row {i}: a tier was asked although an earlier one had settled it")
                if decided is None:
                    continue
            if not any(p.get(comp.name) is None and primary(comp) for comp in rewards):
                have = [comp for comp in rewards if p.get(comp.name) is not None]
                lost, left = (
                    sum(
                        self.weight[comp.name]
                        for comp in rewards
                        if p.get(comp.name) is None and comp.on_missing == "renormalise"
                    ),
                    sum(self.weight[comp.name] for comp in have),
                )
                scales[i] = scale = (lost + left) / left if lost and left else 1.0
                if not have or (lost and not left):
                    continue
                totals[i] = sum(scale * self.weight[comp.name] * p[comp.name] for comp in have)
                if self.fresh[i]:
                    self.say(
                        f"weights of row {i}",
                        [stored[i][comp.name] for comp in have],
                        [scale * self.weight[comp.name] for comp in have],
                    )
        if c.reward_override == "inverted":
            totals = -totals
        elif c.reward_override == "format_only":
            totals = np.array(
                [sum(comp.weight * p[comp.name] for comp in c.rewards if comp.kind == "format") for p in parts]
            )
        elif c.reward_override == "random":  # 0 or 1 by chance
            totals = None
        if not self.fresh.all() and any(comp.at_least is not None or comp.from_step for comp in c.rewards):
            totals = None
        self.kept = np.ones(self.B, bool) if row.truncation_policy != "mask" else self.ended.copy()
        self.totals = totals
        if totals is not None:
            self.say("scorable", self.scorable, np.isfinite(totals))
            self.say(
                "score", [0.0 if r["score"] is None else r["score"] for r in self.rows], np.nan_to_num(totals), 1e-5
            )
            earned = totals + overlong
            rewards = np.where(
                self.ended,
                earned,
                {
                    "score": earned,
                    "mask": earned,
                    "zero": 0 * earned,
                    "bootstrap": 0 * earned,
                    "penalty": (earned if c.missing_eos_mode == "subtract" else 0.0) - c.missing_eos_penalty,
                }[row.truncation_policy],
            )
            if c.environment and row.truncation_policy == "bootstrap":
                rewards = earned
            rewards = np.where(np.isfinite(totals), rewards, np.nan)
            self.plain = rewards.copy()
            if c.multi_objective_aggregation == "normalize_then_sum":
                counted = np.isfinite(totals) & (self.kept | c.truncated_in_stats)
                made = np.zeros(self.B)
                for values, weight in [
                    *(([p.get(comp.name) for p in parts], self.weight[comp.name] * scales) for comp in c.rewards),
                    (list(overlong), np.ones(self.B)),
                ]:
                    for g in np.unique(self.group):
                        at = [i for i in np.flatnonzero((self.group == g) & counted) if values[i] is not None]
                        if at and not equal([values[i] for i in at]):
                            mean, spread = (
                                np.mean([values[i] for i in at]),
                                std([values[i] for i in at], row.std_ddof) + row.std_eps,
                            )
                            for i in at:
                                made[i] += weight[i] * (values[i] - mean) / spread
                rewards = np.where(np.isfinite(totals), made, np.nan)
            if c.reward_norm != "none" or c.reward_clip:
                paid = np.isfinite(rewards) & (self.ended | (row.truncation_policy != "bootstrap"))
                x = rewards[paid]
                if len(x):
                    if c.reward_norm in ("whiten", "whiten_without_shift"):
                        y = np.zeros_like(x) if equal(x) else (x - x.mean()) / (x.std() + 1e-8)
                        x = y + (x.mean() if c.reward_norm != "whiten" else 0.0)
                    elif c.reward_norm == "minmax":
                        x = (x - x.min()) / np.ptp(x) if np.ptp(x) else np.full_like(x, 0.5)
                    elif c.reward_norm == "running":
                        run.seen = np.concatenate([run.seen, x[self.fresh[paid]]])  # replayed ones were seen before
                        x = (
                            (x - run.seen.mean()) / (run.seen.std() + 1e-8)
                            if run.seen.std() > 1e-7 * abs(run.seen.mean())
                            else np.zeros_like(x)
                        )
                    rewards[paid] = x if not c.reward_clip else np.clip(x, -c.reward_clip, c.reward_clip)
            self.say("reward", [r["reward"] for r in self.rows], np.where(np.isfinite(rewards), rewards, 0.0), 1e-4)
        else:
            plain = (
                c.reward_norm == "none" and not c.reward_clip and c.multi_objective_aggregation == "sum_then_normalize"
            )
            self.plain = np.where(self.scorable, [r["reward"] for r in self.rows], np.nan) if plain else None
            if (
                plain
                and c.reward_override == "random"
                and not self.cache
                and row.truncation_policy in ("score", "mask")
            ):
                self.say("random rewards", [r["reward"] in (0.0, 1.0) for r in self.rows], np.ones(self.B))
        self.R = np.where(self.scorable, [r["reward"] for r in self.rows], np.nan)

    # 6 to 9: shaping, advantages, filters
    def credit(self):
        run, c, row = self.run, self.c, self.row
        self.rejected = [np.zeros(r["length"], bool) for r in self.rows]
        self.is_weight = None
        if c.importance_correction != "none" or c.rejection != "none":
            self.reject_and_weigh()
        dropped = self.rejected if c.rejection_scope == "drop" else [np.zeros_like(x) for x in self.rejected]
        in_stats = self.scorable & (self.kept | c.truncated_in_stats)
        kept = self.scorable & self.kept
        coef = run.reward_coef(self.number)
        self.coef = coef
        kl = None
        if coef and self.ref is not None:
            d = [a - b for a, b in zip(self.old, self.ref)]
            kl = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: np.exp(-x) - 1 + x}.get(
                c.kl_reward_estimator
            )
            if kl is None:
                kl = [
                    np.where(o == 1, ((p.exp() * (p - q)).sum(-1)).numpy(), 0.0)
                    for p, q, o in zip(self.full_old, self.full_ref, self.own)
                ]
            else:
                kl = [np.where(o == 1, kl(x), 0.0) for x, o in zip(d, self.own)]
        base = np.where(self.scorable, self.R, 0.0)
        penalty = [coef * k if kl else np.zeros(r["length"]) for k, r in zip(kl or self.old, self.rows)]
        count = np.array([max(o.sum(), 1) for o in self.own])
        off = np.array([p.sum() for p in penalty])
        shaped = base - (off / count if row.kl_reward_mode == "sequence_mean" else off)
        self.shaped = shaped
        self.say(
            "shaped_reward",
            [r["shaped_reward"] if r["shaped_reward"] is not None else 0.0 for r in self.rows],
            np.where(self.scorable, shaped, 0.0),
            1e-4,
        )
        turns = [
            ([t["end"] - 1 for t in r["turns"]], [t["reward"] for t in r["turns"]]) if r["turns"] is not None else None
            for r in self.rows
        ]
        self.turns = turns

        def tokens(total, i):
            out, at = np.zeros(self.rows[i]["length"]), np.flatnonzero(self.own[i])
            if turns[i] is not None:
                for end, reward in zip(*turns[i]):
                    out[end] = reward
                if turns[i][0]:
                    out[turns[i][0][-1]] += total - sum(turns[i][1])
            elif len(at):
                out[at[-1]] += total
            return out

        if coef and row.kl_reward_mode == "token_terminal":
            token_rewards = [tokens(base[i], i) - penalty[i] for i in range(self.B)]
            outcome = [np.full(r["length"], s) for r, s in zip(self.rows, shaped)]
        elif coef and row.kl_reward_mode == "token_broadcast":
            token_rewards = [base[i] - penalty[i] for i in range(self.B)]
            outcome = token_rewards
        else:
            token_rewards = [tokens(shaped[i], i) for i in range(self.B)]
            outcome = [np.full(r["length"], s) for r, s in zip(self.rows, shaped)]
        self.token_rewards = [np.where(o == 1, t, 0.0) for t, o in zip(token_rewards, self.own)]
        for i, r in enumerate(self.rows):
            self.say(f"token_rewards of row {i}", r["token_rewards"], self.token_rewards[i], 1e-4)
        A, informative = self.advantages(shaped, outcome, in_stats)
        self.informative = informative & kept
        on = [(o == 1) & k & ~x for o, k, x in zip(self.own, kept, dropped)]
        A = [np.where(m, a, 0.0) for a, m in zip(A, on)]
        self.A_raw = A
        if row.needs_critic:
            self.check_targets(shaped, outcome, on)
        if row.whiten:
            dead = ~self.informative & (c.zero_advantage == "mask") & row.compares
            seen = [m & ~x for m, x in zip(on, dead)]
            flat = np.concatenate([a[m] for a, m in zip(A, seen)])
            A = [np.where(m, a, 0.0) for a, m in zip(A, seen)]
            if flat.size:
                flat = np.zeros_like(flat) if equal(flat) else flat
                spread = std(flat, row.adv_norm_ddof)
                A = [np.where(m, (a - flat.mean()) / (spread + 1e-8) if spread else 0.0, 0.0) for a, m in zip(A, seen)]
        if c.advantage_clip:
            A = [np.clip(a, -c.advantage_clip, c.advantage_clip) for a in A]
        for i, r in enumerate(self.rows if not self.unseen else ()):
            self.say(f"advantages of row {i}", r["advantages"], A[i], 2e-4)
        self.A = [np.array(r["advantages"], float) for r in self.rows]
        if self.unseen:
            self.A_raw = [np.full(r["length"], np.nan) for r in self.rows]
            self.informative = kept
        trained = kept & (self.informative | (c.zero_advantage == "keep") | (not row.compares))
        self.trained = trained
        for i, r in enumerate(self.rows):
            self.say(f"loss_mask of row {i}", r["loss_mask"], self.own[i] * trained[i] * ~dropped[i])
        self.mask = [(o == 1) & t & ~x for o, t, x in zip(self.own, trained, dropped)]

    def reject_and_weigh(self):
        c = self.c
        d = [np.where(o == 1, np.clip(a - b, -20, 20), 0.0) for a, b, o in zip(self.old, self.mu, self.own)]
        if c.rejection != "none":
            for i, x in enumerate(d):
                at = np.flatnonzero(self.own[i])
                if not len(at):
                    continue
                p, q = np.exp(self.mu[i][at]), np.exp(self.old[i][at])
                P, Q = np.clip(p, 1e-6, 1 - 1e-6), np.clip(q, 1e-6, 1 - 1e-6)
                s = {
                    "ratio": x[at],
                    "k2": x[at] ** 2 / 2,
                    "k3": np.exp(x[at]) - 1 - x[at],
                    "tv": np.abs(p - q),
                    "binary_kl": P * np.log(P / Q) + (1 - P) * np.log((1 - P) / (1 - Q)),
                }[c.rejection_statistic]
                s = {"token": s, "sequence_sum": s.sum(), "sequence_mean": s.mean(), "sequence_max": s.max()}[
                    c.rejection
                ]
                s = np.exp(s) if c.rejection_statistic == "ratio" else s
                self.rejected[i][at] = (s > c.rejection_max) | (
                    (s < c.rejection_min) & (c.rejection_statistic == "ratio")
                )
        if c.importance_correction != "none":
            level, rule = c.importance_correction.split("_")
            w = [np.exp(x) if level == "token" else np.full(len(x), np.exp(np.clip(x.sum(), -20, 20))) for x in d]
            low, high = c.importance_clip_min, c.importance_clip_max
            w = [np.clip(x, low, high) if rule == "truncate" else np.where((x < low) | (x > high), 0.0, x) for x in w]
            if c.importance_normalise:
                flat = np.concatenate([x[o == 1] if level == "token" else x[o == 1][:1] for x, o in zip(w, self.own)])
                w = [x / flat.mean() if flat.mean() > 0 else x for x in w]
            self.is_weight = w
            for i, r in enumerate(self.rows):
                o = self.own[i] == 1
                if c.rejection == "none" or c.rejection_scope == "drop":
                    self.say(f"is_weights of row {i}", np.array(r["is_weights"])[o], w[i][o], 1e-3)
        if c.rejection != "none" and c.rejection_scope == "zero":
            self.is_weight = [
                np.where(x, 0.0, 1.0 if self.is_weight is None else self.is_weight[i])
                for i, x in enumerate(self.rejected)
            ]

    def advantages(self, shaped, outcome, in_stats):
        """Before whitening: a list of token advantages, and whether each row's group has a signal."""
        run, row = self.run, self.row
        kind, B = row.advantage, self.B
        whole, informative = np.zeros(B), np.zeros(B, bool)
        spread = lambda values: [np.full(r["length"], v) for r, v in zip(self.rows, values)]
        to_go = []
        for t, o in zip(self.token_rewards, self.own):
            G, running = np.zeros(len(t)), 0.0
            for k in reversed(range(len(t))):
                if o[k]:
                    running = t[k] + row.gamma * running
                    G[k] = running
            to_go.append(G)
        self.to_go = to_go
        if kind in ("reward_minus_baseline", "reward_to_go"):
            b = run.baseline(self, shaped, in_stats)
            ok = self.scorable & np.isfinite(b)
            if kind == "reward_to_go":
                return [np.where(k, G - v, 0.0) for G, v, k in zip(to_go, b, ok)], ok
            ok = ok & in_stats
            return spread(np.where(ok, shaped - np.where(ok, b, 0.0), 0.0)), ok
        if kind in ("group_mean", "leave_one_out", "leave_one_out_max", "length_weighted") and not (
            kind == "leave_one_out" and run.steps_paid
        ):
            live = in_stats & self.scorable
            for g in np.unique(self.group):
                at = np.flatnonzero((self.group == g) & live)
                r = shaped[at]
                if len(at) < 2 or equal(r):
                    continue
                informative[at] = True
                n = len(at)
                if kind == "leave_one_out":
                    whole[at] = [x - (r.sum() - x) / (n - 1) for x in r]
                elif kind == "length_weighted":
                    L = np.array([self.own[i].sum() for i in at])
                    whole[at] = r - (r * L).sum() / L.sum()
                elif kind == "leave_one_out_max":
                    gain = [r[k] - np.delete(r, k).max() for k in range(n)]
                    best = np.where(np.arange(n) == np.argmax(r), np.maximum(gain, 0.0), 0.0)
                    whole[at] = best / (std(r, row.std_ddof) + row.std_eps if row.scale == "group" else 1.0)
                    informative[at] = best.max() > 1e-7 * np.abs(r).max()
                else:
                    whole[at] = (r - r.mean()) / (std(r, row.std_ddof) + row.std_eps if row.scale == "group" else 1.0)
            if kind == "group_mean" and row.scale in ("batch", "batch_centered") and informative.any():
                whole /= std(shaped[live] if row.scale == "batch" else whole[live], row.std_ddof) + row.std_eps
            return spread(whole), informative
        if kind == "turn_returns" or (kind == "leave_one_out" and run.steps_paid):
            return self.turn_advantages(in_stats, kind == "leave_one_out")
        if kind == "token_baseline":
            out = [np.zeros(r["length"]) for r in self.rows]
            for g in np.unique(self.group):
                at = [i for i in np.flatnonzero((self.group == g) & in_stats) if self.scorable[i]]
                if len(at) < 2:
                    continue
                places, W = [np.flatnonzero(self.own[i]) for i in at], []
                for i, place in zip(at, places):
                    chosen = torch.nn.functional.one_hot(
                        torch.tensor(list(self.rows[i]["completion_ids"])), self.full_old[i].shape[-1]
                    ).double()
                    energy = (chosen - self.full_old[i].exp()).square().sum(-1).numpy()
                    if self.is_weight is not None:
                        energy = energy * self.is_weight[i] ** 2
                    W.append(energy[place].cumsum())
                for t in range(max(map(len, places), default=0)):
                    alive = [k for k, place in enumerate(places) if len(place) > t]
                    total = sum(W[k][t] for k in alive)
                    b = (
                        sum(W[k][t] * to_go[at[k]][places[k][t]] for k in alive) / total
                        if len(alive) > 1 and total > 0
                        else 0.0
                    )
                    for k in alive:
                        out[at[k]][places[k][t]] = to_go[at[k]][places[k][t]] - b
                informative[at] = any(out[i].any() for i in at)
            return out, informative
        if kind == "process":
            out = [np.zeros(r["length"]) for r in self.rows]
            for g in np.unique(self.group):
                at = [i for i in np.flatnonzero(self.group == g) if in_stats[i]]
                flat = [x for i in at for x in self.steps(i)[1]]
                if flat and not equal(flat):
                    mean, s = np.mean(flat), std(flat, row.std_ddof) + row.std_eps
                    for i in at:
                        for end, reward in zip(*self.steps(i)):
                            out[i][: end + 1] += (reward - mean) / s
                informative[at] = any((out[i] * self.own[i]).any() for i in at)
            return out, informative
        if kind == "vine":
            out = [np.zeros(r["length"]) for r in self.rows]
            for i, r in enumerate(self.rows):
                begin = 0
                for end, v, after in zip(r["step_ends"], r["step_values"], [*r["step_values"][1:], shaped[i]]):
                    out[i][begin : end + 1], begin = after - v, end + 1
            return out, np.array([o.any() for o in out]) & self.scorable
        if kind == "win_rate":
            if row.opponent != "self":  # other completions, that no row holds
                self.unseen = bool(row.whiten or self.c.advantage_clip)
                return [np.array(r["advantages"], float) for r in self.rows], self.learned()
            for g in np.unique(self.group):
                at = np.flatnonzero((self.group == g) & in_stats & self.scorable)
                for i in np.flatnonzero((self.group == g) & self.scorable):
                    if len(at):
                        whole[i] = (
                            np.mean([1 / (1 + np.exp(self.R[j] - self.R[i])) for j in at])
                            - 0.5
                            - (self.R[i] - shaped[i])
                        )
                        informative[i] = True
            return spread(whole), informative
        if kind == "gae":
            out = []
            for i, r in enumerate(self.rows):
                lam = (
                    row.lam if row.lam_alpha is None else max(0.0, 1 - 1 / (row.lam_alpha * max(self.own[i].sum(), 1)))
                )
                out.append(self.gae(i, lam))
            return out, self.scorable
        if kind == "reward_minus_value":
            return [o - v for o, v in zip(outcome, self.values)], self.scorable
        raise AssertionError(f"write the advantage {kind}")

    def learned(self):
        """Whether a row is learned from, which alone says of comparisons with completions that no row holds how they
        went; where that is so of no row of a group, nothing does.
        """
        found = np.array([any(r["loss_mask"]) for r in self.rows])
        self.silent = any(
            self.scorable[self.group == g].any() and not found[self.group == g].any() for g in np.unique(self.group)
        )
        return found

    def steps(self, i):
        r = self.rows[i]
        return self.turns[i] if self.turns[i] is not None else (r["step_ends"] or [], r["step_rewards"] or [])

    def turn_advantages(self, in_stats, leave_one_out):
        row, out, informative = self.row, [np.zeros(r["length"]) for r in self.rows], np.zeros(self.B, bool)
        for g in np.unique(self.group):
            at = [i for i in np.flatnonzero(self.group == g) if in_stats[i] and self.steps(i)[0]]
            G = {}
            for i in at:
                own, running = self.token_rewards[i][list(self.steps(i)[0])], 0.0
                back = []
                for x in own[::-1]:
                    running = x + row.gamma * running
                    back.append(running)
                G[i] = back[::-1]
            if len(at) < 2:
                continue
            scale = std([x for i in at for x in G[i]], row.std_ddof) + row.std_eps if row.scale == "group" else 1.0
            for i in at:
                begin = 0
                for k, end in enumerate(self.steps(i)[0]):
                    others = [j for j in at if not (leave_one_out and j == i)]
                    here = [G[j][k] for j in others if len(G[j]) > k]
                    alone = sum(len(G[j]) > k for j in at) < 2
                    out[i][begin : end + 1] = (
                        G[i][k] - (np.mean([G[j][0] for j in others]) if alone else np.mean(here))
                    ) / scale
                    begin = end + 1
                out[i] = np.where((self.own[i] == 1) & (np.abs(out[i]) > 1e-9), out[i], 0.0)
            informative[at] = any(out[i].any() for i in at)
        return out, informative

    def gae(self, i, lam, add_values=False):
        row, o, v, t = self.row, self.own[i], self.values[i], self.token_rewards[i]
        out, running, after = np.zeros(len(t)), 0.0, self.boot[i]
        for k in reversed(range(len(t))):
            if o[k]:
                running = t[k] + row.gamma * after - v[k] + row.gamma * lam * running
                after, out[k] = v[k], running + (v[k] if add_values else 0.0)
        return out

    def check_targets(self, shaped, outcome, on):
        row, kind = self.row, self.row.critic_target
        for i, r in enumerate(self.rows):
            if kind in ("lambda_return", "mc_return", "td0"):
                target = self.gae(
                    i,
                    {
                        "lambda_return": row.lam if row.lam_critic is None else row.lam_critic,
                        "mc_return": 1.0,
                        "td0": 0.0,
                    }[kind],
                    True,
                )
            elif kind == "n_step":
                at = np.flatnonzero(self.own[i])
                target = np.zeros(r["length"])
                for k, t in enumerate(at):
                    ahead = at[k : k + row.n_steps]
                    end = k + row.n_steps
                    target[t] = sum(
                        row.gamma**j * self.token_rewards[i][s] for j, s in enumerate(ahead)
                    ) + row.gamma ** len(ahead) * (self.values[i][at[end]] if end < len(at) else self.boot[i])
            elif kind == "kl_adjusted_outcome":
                target = outcome[i] + self.boot[i]
            elif kind == "soft_bellman":
                d = self.old[i] - self.ref[i]
                target = self.to_go[i] - row.options["beta"] * d[::-1].cumsum()[::-1]
            else:
                target = np.full(r["length"], (self.R[i] if self.scorable[i] else 0.0) + self.boot[i])
            self.say(f"returns of row {i}", r["returns"], np.where(on[i], target, 0.0), 1e-3)

    # what is logged about all of it
    def check_teachers(self):
        """Each teacher's prompt shows the first successful other answer of the group, and what was said of this one."""
        run, c, read = self.run, self.run.c, 0
        least = 1.0 if c.success_reward_threshold is None else c.success_reward_threshold
        by_verdict = c.success_reward_threshold is None
        for i, r in enumerate(self.rows):
            extra = json.loads(r["extra_json"])
            found, others = extra["teacher"], [j for j in range(self.B) if self.group[j] == self.group[i]]
            right = [
                k
                for k, j in enumerate(others)
                if (j != i or not c.dont_reprompt_on_self_success)
                and (
                    bool(self.rows[j]["is_correct"])
                    if by_verdict and self.rows[j]["is_correct"] is not None
                    else (self.rows[j]["score"] or 0.0) >= least and self.rows[j]["score"] is not None
                )
            ]
            shown = right[0] if right and c.use_successful_as_teacher else None
            said = extra.get("feedback") if c.include_environment_feedback else None
            if shown is not None and c.environment_feedback_only_without_solution:
                said = None
            if (found["solution"], found["feedback"]) != (shown, said):
                run.problems.append(f"row {i} shows {found['solution']}, {found['feedback']} and not {shown}, {said}")
            if (found["prompt_ids"] is None) != (shown is None and said is None):
                run.problems.append(f"row {i}: the teacher reads {found}")
            if found["prompt_ids"] is not None:
                read += 1
                text = run.tokenizer.decode(found["prompt_ids"], skip_special_tokens=True)
                answer = "" if shown is None else self.rows[others[shown]]["completion_ids"]
                answer = run.tokenizer.decode(answer, skip_special_tokens=True) if shown is not None else ""
                for part in (answer.strip() if not c.remove_thinking_from_demonstration else "", said or ""):
                    if part not in text:
                        run.problems.append(f"row {i}: {part!r} is not in what the teacher reads")
        self.log("self_distillation/reprompt_sample_fraction", read / self.B)

    def check_metrics(self):
        c, row, rows = self.c, self.row, self.rows
        shown = self.fresh if self.fresh.any() else ~self.fresh
        at = np.flatnonzero(shown)
        lengths = np.array([rows[i]["length"] for i in at], float)
        self.log("completions/mean_length", lengths.mean())
        self.log("completions/max_length", lengths.max())
        self.log("completions/min_length", lengths.min())
        self.log("completions/clipped_ratio", np.mean(~self.ended[at]))
        for name, of in (("mean", np.mean), ("min", np.min), ("max", np.max)):
            ended = lengths[self.ended[at]]
            self.log(f"completions/{name}_terminated_length", of(ended) if len(ended) else None)
        if not row.dynamic_sampling:
            self.log(
                "completions/generated_tokens",
                sum(self.own[i].sum() for i in at) if self.fresh.any() and not self.run.stored else 0.0,
            )
        self.log("reward/unscorable_fraction", np.mean(~self.scorable[at]))
        if self.plain is not None and np.isfinite(self.plain[at]).any():
            x = self.plain[at]
            ok = np.isfinite(x)
            self.log("reward", x[ok].mean())
            if row.advantage != "process":
                groups = [x[(self.group[at] == g) & ok] for g in np.unique(self.group[at])]
                groups = [g for g in groups if len(g)]
                self.log("reward_std", np.mean([std(g, row.std_ddof) for g in groups]))
                self.log(
                    "frac_reward_zero_std",
                    np.mean([equal(g) for g in groups if len(g) > 1]) if any(len(g) > 1 for g in groups) else None,
                )
        if self.totals is not None and np.isfinite(self.totals[at]).any():
            self.log("reward/raw", np.nanmean(self.totals[at]))
        for comp in c.rewards:
            values = [self.parts[i][comp.name] for i in at if self.parts[i].get(comp.name) is not None]
            if values:
                self.log(f"reward/{comp.name}", np.mean(values))
                self.log(f"reward/{comp.name}/std", np.std(values))
        verdicts = [rows[i]["is_correct"] for i in at if rows[i]["is_correct"] is not None]
        self.log("completions/correct_fraction", np.mean(verdicts) if verdicts else None)
        if self.ref is not None:
            self.log("kl/sequence_sum", np.mean([(self.old[i] - self.ref[i]).sum() for i in at]), 1e-3)
        if self.cache:
            self.log("reward/overlong", self.overlong[at].mean())
        flat, raw = (np.concatenate([a[m] for a, m in zip(which, self.mask)]) for which in (self.A, self.A_raw))
        self.log("groups/trained_sequences", self.trained.sum())
        self.log("groups/trained_tokens", sum(m.sum() for m in self.mask))
        if not self.unseen and not self.silent:
            self.log(
                "groups/informative_fraction",
                np.mean([self.informative[self.group == g].any() for g in np.unique(self.group)]),
            )
        if flat.size:
            for name, value in (
                ("mean", flat.mean()),
                ("std", flat.std()),
                ("min", flat.min()),
                ("max", flat.max()),
                ("positive_fraction", (flat > 0).mean()),
                ("zero_fraction", (flat == 0).mean()),
            ):
                self.log(f"advantage/{name}", value, 1e-3)
            if not self.unseen:
                self.log("advantage/mean_raw", raw.mean(), 1e-3)
                self.log("advantage/std_raw", raw.std(), 1e-3)
        if self.coef:
            self.log("kl/reward_coef", self.coef)
            counted = self.scorable & (self.kept | c.truncated_in_stats)
            self.log("reward/shaped", self.shaped[counted].mean() if counted.any() else 0.0)
        if row.needs_critic and flat.size:
            returns = np.concatenate([np.array(r["returns"])[m] for r, m in zip(rows, self.mask)])
            values = np.concatenate([v[m] for v, m in zip(self.values, self.mask)])
            self.log(
                "critic/explained_variance",
                1 - (returns - values).var() / returns.var() if returns.var() > 1e-12 else None,
                1e-3,
            )
            delta = np.concatenate([self.gae(i, 0.0)[m] for i, m in enumerate(self.mask)])
            self.log("critic/td_error", np.abs(delta).mean(), 1e-3)
        if self.is_weight is not None and c.importance_correction != "none" and flat.size:
            w = np.concatenate([x[m] for x, m in zip(self.is_weight, self.mask)])
            if c.rejection == "none" or c.rejection_scope == "drop":
                self.log("sampling/importance_weight/mean", w.mean(), 1e-3)
                self.log(
                    "sampling/importance_weight/ess_fraction",
                    w.sum() ** 2 / (len(w) * (w**2).sum()) if w.any() else 0.0,
                    1e-3,
                )


# --- the loss of one step ---------------------------------------------------------------------------------------------


class Step:
    """One optimizer step over some of an iteration's tokens: ``masks`` and ``rows`` say which."""

    def __init__(self, it: Iteration, number: int, noted):
        self.it, self.c, self.row, self.number, self.noted = it, it.c, it.row, number, noted
        self.masks, self.present = [np.zeros(r["length"], bool) for r in it.rows], set()
        self.learned, self.close, self.ptx, self.skipped = {}, {}, [], set()
        groups = {}
        for i, r in enumerate(it.rows):
            groups.setdefault(it.group[i], []).append(i)
        waiting = list(groups.values())
        for item in noted.items:
            if item.extra.get("ptx"):
                self.ptx.append(item)
                continue
            places = item.places if item.places is not None else range(len(item.responses))
            at = next(
                at
                for at in waiting
                if max(places, default=0) < len(at)
                and [list(it.rows[at[k]]["completion_ids"]) for k in places] == [x.tolist() for x in item.responses]
            )
            waiting.remove(at)
            for k, (place, mask) in enumerate(zip(places, item.masks)):
                i = at[place]
                self.masks[i] |= mask.astype(bool)
                self.present.add(i)
                if item.extra.get("skip_forward"):
                    self.skipped.add(i)
                for name, into in (("learned", self.learned), ("kept_close", self.close)):
                    if name in item.extra:
                        into[i] = np.array(item.extra[name][k])

    def agg(self, values):
        """AGG over the step's tokens of {row: tensor}."""
        c, mode, masks = self.c, self.row.aggregation, self.masks
        live = [i for i in sorted(self.present) if masks[i].any()]
        S = len(self.present) if c.seq_denominator == "all" else len(live)
        if not live:
            return torch.zeros((), dtype=torch.float64)
        m = {i: torch.tensor(masks[i]) for i in live}
        if mode == "token-mean" and c.token_norm_scope == "group":
            groups = sorted({self.it.group[i] for i in live})
            return sum(
                sum(values[i][m[i]].sum() for i in live if self.it.group[i] == g)
                / sum(masks[i].sum() for i in live if self.it.group[i] == g)
                for g in groups
            ) / len(groups)
        if mode == "token-mean":
            return sum(values[i][m[i]].sum() for i in live) / sum(int(masks[i].sum()) for i in live)
        if mode == "seq-mean-token-mean":
            return sum(values[i][m[i]].mean() for i in live) / S
        scale = (c.loss_scale_factor or c.longest_completion) if mode == "seq-mean-token-sum-norm" else 1.0
        return sum(values[i][m[i]].sum() for i in live) / S / scale

    def loss(self):
        it, c, row, run = self.it, self.c, self.row, self.it.run
        leaves = {n: w.double().requires_grad_(n in self.noted.trained) for n, w in self.noted.before.items()}
        plain = run.model.plain(leaves)
        states = run.model.read(plain, it.rows)
        full = [log_softmax(h, plain, c.temperature) for h, _ in states]
        new = [picked(f, r) for f, r in zip(full, it.rows)]
        self.new, self.full = new, full
        old, A = [torch.tensor(x) for x in it.old], [torch.tensor(x) for x in it.A]
        ref = [torch.tensor(x) for x in it.ref] if it.ref is not None else None
        H = [-(f.exp() * f).sum(-1) for f in full]
        self.H = H
        high = row.epsilon if row.epsilon_high is None else row.epsilon_high
        m = [torch.tensor(x) for x in self.masks]
        live = [i for i in sorted(self.present) if self.masks[i].any()]
        d = [torch.where(k, n - o, 0.0) for n, o, k in zip(new, old, m)]
        self.d = d
        terms = {}
        if row.objective:
            terms["policy"] = self.own_loss(live, m, new, old, ref, d)
        else:
            level = "token" if row.surrogate in ("logp", "vespo", "geo_mean", "dppo_tv", "dppo_kl") else row.ratio_level
            out, self.low, self.high = {}, 0, 0
            for i in live:
                x = torch.where(m[i], new[i] - new[i].detach(), 0.0) if row.surrogate == "stopgrad_ratio" else d[i]
                x = (
                    x
                    if level == "token"
                    else torch.where(m[i], x.sum() / (m[i].sum() if level == "sequence_mean" else 1), 0.0)
                )
                rho, a, s = x.clamp(-20, 20).exp(), A[i], row.surrogate
                w = torch.tensor(it.is_weight[i]) if it.is_weight is not None else torch.ones_like(a)
                if s == "clip":
                    J = torch.minimum(rho * a, rho.clamp(1 - row.epsilon, 1 + high) * a)
                    if row.clip_ratio_c:
                        J = torch.where(a < 0, torch.maximum(J, row.clip_ratio_c * a), J)
                    self.low += int(((a < 0) & (rho < 1 - row.epsilon) & m[i]).sum())
                    self.high += int(((a > 0) & (rho > 1 + high) & m[i]).sum())
                elif s in ("none", "stopgrad_ratio"):
                    J = rho * a
                elif s == "logp":
                    J = a * new[i]
                elif s == "cispo":
                    J = rho.detach().clamp(max=1 + high) * a * new[i]
                elif s == "sapo":
                    tau = torch.where(a > 0, run.option("tau_pos", 1.0), run.option("tau_neg", 1.05))
                    J = 4 / tau * torch.sigmoid(tau * (rho - 1)) * a
                elif s == "vespo":
                    log_w = d[i].sum().detach() + (
                        torch.where(m[i], w.log().clamp(math.log(1e-8), 20), 0.0).sum()
                        if it.is_weight is not None
                        else 0.0
                    )
                    log_w = log_w.clamp(math.log(1e-8), 20)
                    k = torch.where(a >= 0, run.option("k_pos", 2.0), run.option("k_neg", 3.0))
                    rate = torch.where(a >= 0, run.option("lambda_pos", 3.0), run.option("lambda_neg", 2.0))
                    J, w = torch.exp(k * log_w + rate * (1 - log_w.exp())) * a * new[i], torch.ones_like(a)
                elif s == "geo_mean":
                    y = torch.where(
                        (a > 0) & (d[i] > high), high, torch.where((a < 0) & (d[i] < -row.epsilon), -row.epsilon, d[i])
                    )
                    J = torch.exp(y.sum() / m[i].sum()) * a
                elif s in ("dppo_tv", "dppo_kl"):
                    p, q = new[i].detach().exp(), old[i].exp()
                    P, Q = p.clamp(1e-6, 1 - 1e-6), q.clamp(1e-6, 1 - 1e-6)
                    far = (p - q).abs() if s == "dppo_tv" else Q * (Q / P).log() + (1 - Q) * ((1 - Q) / (1 - P)).log()
                    stop = ((a > 0) & (p > q) & (far > high)) | ((a < 0) & (p < q) & (far > row.epsilon))
                    J = torch.where(stop, 0.0, rho.detach().clamp(max=row.clip_ratio_c or math.inf) * a * new[i])
                else:
                    raise AssertionError(f"write the surrogate {s}")
                l = -J * w
                if i in self.learned:
                    l = l * torch.tensor(self.learned[i])
                if i in self.close:
                    l = (
                        l
                        + c.covariance_kl_coef
                        * torch.tensor(self.close[i])
                        * torch.where(d[i].abs() > 1e-4, d[i], 0.0).abs()
                    )
                if c.off_policy_mask_threshold is not None:
                    drift = torch.where(m[i], torch.tensor(it.mu[i]) - new[i].detach(), 0.0).sum() / m[i].sum()
                    l = torch.where((a >= 0) | (drift <= c.off_policy_mask_threshold), l, 0.0)
                out[i] = l
            terms["policy"] = self.agg(out)
        if row.distillation_weight:
            policy = terms.pop("policy")
            if row.distillation_weight < 1:
                terms["policy"] = (1 - row.distillation_weight) * policy
            terms["distillation"] = row.distillation_weight * self.agg(self.distilled(live, new, full, d))
        if row.kl_loss_coef:
            terms["kl"] = run.loss_coef(it.number) * self.agg({i: self.kl(i, new, old, ref, d) for i in live})
        if c.entropy_coef or c.use_adaptive_entropy:
            terms["entropy_bonus"] = -run.entropy_coef(self.number) * self.agg({i: H[i] for i in live})
        if row.positive_nll_coef:
            right = [i for i in live if it.rows[i]["is_correct"]]
            n = sum(int(self.masks[i].sum()) for i in right)
            terms["positive_nll"] = (
                -row.positive_nll_coef * sum(new[i][m[i]].sum() for i in right) / n
                if n
                else torch.zeros((), dtype=torch.float64)
            )
        if row.needs_critic and c.critic_mode == "shared":
            terms["value"] = c.vf_coef * self.value_loss(
                (
                    [h @ leaves["value_head.weight"][0] for h, _ in states]
                    if "value_head.weight" in leaves
                    else [h @ next(v for n, v in leaves.items() if "value_head" in n)[0] for h, _ in states]
                ),
                live,
                m,
            )
        if row.ptx_coef:
            rows = [
                {"prompt_ids": i.responses[0][:1].tolist(), "completion_ids": i.responses[0][1:].tolist()}
                for i in self.ptx
            ]
            found = run.model.read(plain, rows)
            nll = [-picked(log_softmax(h, plain, 1.0), r) for (h, _), r in zip(found, rows)]
            terms["ptx"] = (
                row.ptx_coef
                * sum(n.sum() for n in nll)
                / (sum(map(len, nll)) if c.ptx_agg == "token-mean" else sum(i.extra["documents"] for i in self.ptx))
            )
        total = sum(terms.values())
        names = [n for n in leaves if leaves[n].requires_grad]
        grads = (
            torch.autograd.grad(total, [leaves[n] for n in names], allow_unused=True)
            if total.requires_grad
            else [None] * len(names)
        )
        return (
            {k: float(v) for k, v in terms.items()},
            float(total),
            {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, grads)},
        )

    def distilled(self, live, new, full, d):
        """{row: loss of its tokens} of self-distillation: the reference of the step behind the prompt that the rollout
        says it read, 0 where it read none.
        """
        it, c, run = self.it, self.c, self.it.run
        weights, out = run.reference_at(self.number, it.number), {}
        for i in live:
            read = json.loads(it.rows[i]["extra_json"])["teacher"]["prompt_ids"]
            if read is None:
                out[i] = 0.0 * new[i]
                continue
            own = {"prompt_ids": read, "completion_ids": it.rows[i]["completion_ids"]}
            with torch.no_grad():
                ((h, _),) = run.other_model.read(weights, [own])
                p = log_softmax(h, weights, c.temperature)
            q, a = full[i], c.distillation_alpha
            if c.distillation_mode == "sampled_token":
                gap = new[i].detach() - picked(p, own)
                loss = gap * new[i]
            elif a == 0:
                loss = (p.exp() * (p - q)).sum(-1)
            elif a == 1:
                loss = (q.exp() * (q - p)).sum(-1)
            else:
                mixed = (a * p.exp() + (1 - a) * q.exp()).log()
                loss = a * (p.exp() * (p - mixed)).sum(-1) + (1 - a) * (q.exp() * (q - mixed)).sum(-1)
            if c.distillation_is_clip is not None:
                loss = loss * d[i].detach().exp().clamp(max=c.distillation_is_clip)
            out[i] = loss
        return out

    def kl(self, i, new, old, ref, d):
        it, row, c = self.it, self.row, self.c
        if row.kl_loss_estimator == "full":
            q, p = (it.full_old if row.kl_target == "old" else it.full_ref)[i], self.full[i]
            return (p.exp() * (p - q)).sum(-1) if row.kl_direction == "reverse" else (q.exp() * (q - p)).sum(-1)
        x = new[i] - (old[i] if row.kl_target == "old" else ref[i])
        kl = {"k2": x * x / 2, "k3": torch.exp(-x) - 1 + x}[row.kl_loss_estimator]
        return kl * d[i].exp() if c.kl_is_weighted else kl

    def value_loss(self, V, live, m):
        it, c, row = self.it, self.c, self.row
        out = {}
        for i in live:
            target, was = torch.tensor(np.array(it.rows[i]["returns"], float)), torch.tensor(it.values[i])
            e = (V[i] - target) ** 2
            if c.cliprange_value is not None:
                e = torch.maximum(e, (was + (V[i] - was).clamp(-c.cliprange_value, c.cliprange_value) - target) ** 2)
            out[i] = e * (0.5 if c.value_loss_half else 1.0)
        if row.critic_target == "bandit":
            S = len(self.present) if c.seq_denominator == "all" else len(live)
            return sum(out[i][m[i]][0] for i in live) / S
        return self.agg(out)

    def own_loss(self, live, m, new, old, ref, d):
        it, row = self.it, self.row
        S = len(self.present) if self.c.seq_denominator == "all" else len(live)
        total = lambda xs, i: torch.where(m[i], xs[i], 0.0).sum()
        name, o = row.objective.rpartition(":")[2], row.options
        A = {i: float(it.A[i][np.flatnonzero(self.masks[i])[0]]) for i in live}
        if not live:
            return torch.zeros((), dtype=torch.float64)
        if name == "tapered":
            out = 0.0
            for i in live:
                w = float(d[i].sum().clamp(-20, 20).exp())
                low, high = o["clip_pos"] if A[i] > 0 else o["clip_neg"]
                out = out - min(max(w, low), high) * A[i] * total(new, i)
            return out / S
        if name == "mirror_descent":
            return -sum(A[i] * total(new, i) - o["tau"] / 2 * d[i].sum() ** 2 for i in live) / S
        if name == "optimal_advantage":
            return sum((o["beta"] * (total(new, i) - total(ref, i)) - A[i]) ** 2 for i in live) / S
        if name == "win_rate_regression":
            return sum((d[i].sum() - o["eta"] * A[i]) ** 2 for i in live) / S
        if name == "soft_bellman":
            out = {}
            for i in live:
                l = torch.where(m[i], new[i] - ref[i], 0.0)
                later = l.detach().flip(0).cumsum(0).flip(0) - l.detach()
                out[i] = (torch.tensor(it.values[i]) - torch.tensor(it.to_go[i]) + o["beta"] * (l + later)) ** 2
            return self.agg(out)
        pairs = []
        for g in dict.fromkeys(it.group[i] for i in live):
            own = [i for i in live if it.group[i] == g]
            pairs += list(zip(own[0::2], own[1::2]))
        if not pairs:
            return torch.zeros((), dtype=torch.float64)
        out = 0.0
        for i, j in pairs:
            D = it.shaped[i] - it.shaped[j]
            if name == "pairwise_ppo":
                hi, hj = d[i].sum().clamp(-20, 20), d[j].sum().clamp(-20, 20)
                ri, rj, e = hi.exp(), hj.exp(), o["epsilon"]
                if o["form"] == "joint":
                    z = hi - hj
                    out = out - (ri * rj).detach() * torch.minimum(D * z, D * z.clamp(-e, e)) / 2
                else:
                    f = lambda w, r: torch.minimum(r * w, r.clamp(1 - e, 1 + e) * w)
                    out = out - (f(rj.detach() * D, ri) + f(-ri.detach() * D, rj)) / 2
            else:
                h = (total(new, i) - total(ref, i)) - (total(new, j) - total(ref, j))
                if name == "contrastive":
                    out = out + (D - o["beta"] * h) ** 2 / (2 * o["beta"])
                elif name == "on_policy_ipo":
                    out = out + (h - (1 / (1 + np.exp(-D)) - 0.5) / o["tau"]) ** 2
                else:
                    raise AssertionError(f"write the loss {name}")
        return out / len(pairs)

    def check(self):
        it, c, run = self.it, self.c, self.it.run
        logged = self.noted.metrics
        rough = c.compute_dtype != "float32"

        def differ(what, found, expected, tolerance):
            if found is None or not np.isclose(found, expected, rtol=tolerance, atol=tolerance * 0.1 + 1e-6):
                run.problems.append(f"step {self.number}, {what}: logged {found}, computed {expected}")

        self.check_learned()
        terms, loss, grads = self.loss()
        if logged.get("empty_step"):
            if any(float(g.norm()) > 1e-6 for g in grads.values()):
                run.problems.append(
                    f"step {self.number}: skipped as empty, and the loss has a gradient"
                    f" {max(float(g.norm()) for g in grads.values())}"
                )
            if any(not torch.equal(self.noted.before[n], self.noted.after[n]) for n in self.noted.before):
                run.problems.append(f"step {self.number}: an empty step moved weights")
            return
        tolerance = 0.1 if rough else 3e-4
        scale = max(abs(loss), sum(abs(v) for v in terms.values()), 1e-3)
        if abs(logged["loss"] - loss) > tolerance * scale + 5e-6:
            run.problems.append(f"step {self.number}, loss: logged {logged['loss']}, computed {loss} of {terms}")
        self.check_critic(differ, tolerance)
        if self.row.update == "trust_region":
            return
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        differ("grad_norm", logged["grad_norm"], norm, 0.2 if rough else 3e-3)
        factor = min(1.0, c.max_grad_norm / (norm + 1e-6))
        if not rough:
            for name, g in grads.items():
                found = self.noted.grads.get(name)
                found = torch.zeros_like(g) if found is None else found.double()
                if float((found - factor * g).norm()) > 4e-3 * factor * norm + 1e-5 * factor:
                    run.problems.append(
                        f"step {self.number}, gradient of {name}: off by {float((found - factor * g).norm()):.3g} of"
                        f" {factor * norm:.3g}"
                    )
                    break
            if c.optimizer == "sgd" and not c.momentum:
                moved = max(
                    float(
                        (
                            self.noted.before[n].double()
                            - logged["learning_rate"]
                            * (
                                self.noted.grads[n].double()
                                + c.weight_decay * self.noted.before[n].double() * (self.noted.before[n].ndim > 1)
                            )
                            - self.noted.after[n].double()
                        )
                        .abs()
                        .max()
                    )
                    for n in grads
                    if n in self.noted.grads
                )
                if moved > 1e-6:
                    run.problems.append(f"step {self.number}, weights after the step are off by {moved:.3g}")
        live = [i for i in sorted(self.present) if self.masks[i].any() and i not in self.skipped]
        n = sum(int(self.masks[i].sum()) for i in live)
        if not n:
            return
        m = {i: torch.tensor(self.masks[i]) for i in live}
        mean = lambda of: float(sum(of[i].detach()[m[i]].sum() for i in live)) / n
        loose = 0.1 if rough else 2e-3
        if "entropy" in logged:
            differ("entropy", logged["entropy"], mean(self.H), loose)
        if (
            not self.row.objective
            and self.row.surrogate in ("clip", "none", "cispo", "sapo")
            and self.row.ratio_level == "token"
        ):
            for k, f in (
                ("k1", lambda x: -x),
                ("k2", lambda x: x * x / 2),
                ("k3", lambda x: x.exp() - 1 - x),
                ("ratio", lambda x: x.exp()),
            ):
                name = "policy/ratio" if k == "ratio" else f"approx_kl/{k}"
                differ(name, logged[name], mean([f(x) for x in self.d]), loose)
            high = self.row.epsilon if self.row.epsilon_high is None else self.row.epsilon_high
            if not rough:
                if self.row.surrogate in ("clip", "cispo"):
                    low = self.row.epsilon if self.row.surrogate == "clip" else 1.0  # cispo has no lower bound
                    differ(
                        "policy/outside_range",
                        logged["policy/outside_range"],
                        mean([((x.exp() < 1 - low) | (x.exp() > 1 + high)).double() for x in self.d]),
                        1e-6,
                    )
                if self.row.surrogate == "clip":
                    A = [torch.tensor(a) for a in self.it.A]
                    differ(
                        "clip_ratio/low_mean",
                        logged["clip_ratio/low_mean"],
                        mean([((x.exp() < 1 - self.row.epsilon) & (a < 0)).double() for x, a in zip(self.d, A)]),
                        1e-6,
                    )
                    differ(
                        "clip_ratio/high_mean",
                        logged["clip_ratio/high_mean"],
                        mean([((x.exp() > 1 + high) & (a > 0)).double() for x, a in zip(self.d, A)]),
                        1e-6,
                    )
        off = mean([(x.exp() - 1).abs() for x in self.d])
        differ("policy/ratio_deviation", logged["policy/ratio_deviation"], off, max(loose, 1e-3))
        on_policy = (
            not run.stored
            and not c.replay_fraction
            and (not c.async_rollouts or it.number == 0)
            and not (self.row.behaviour_ratio and altered(c))
        )
        if self.number == it.start and on_policy and off > (0.05 if rough else 1e-4):
            run.problems.append(f"step {self.number}: ratios are {off} off 1 where nothing has moved")
        if self.row.needs_reference and it.ref is not None:
            x = [a - torch.tensor(b) for a, b in zip(self.new, it.ref)]
            differ("kl", logged["kl"], mean([(-y).exp() - 1 + y for y in x]), loose)

    def check_critic(self, differ, tolerance):
        """The separate critic's loss: squared errors of today's values, aggregated as the policy's loss (of one value
        per prompt without a constant).
        """
        it, c, run = self.it, self.c, self.it.run
        if not self.row.needs_critic or c.critic_mode == "shared":
            return
        noted = run.watch.critic[len(run.watch.critic) - len(run.steps) + self.number]
        if noted.metrics.get("empty_step"):
            return
        w = {n: v.double() for n, v in noted.before.items()}
        with torch.no_grad():
            V = [h @ w["score.weight"][0] + run.critic_bias for h, _ in run.critic_model.read(w, it.rows)]
        masks, first = self.masks, self.row.critic_target == "bandit"
        masks = [m & (m.cumsum() == 1) for m in masks] if first else masks
        errors = {}
        for i in self.present:
            target, was = torch.tensor(np.array(it.rows[i]["returns"], float)), torch.tensor(it.values[i])
            e = (V[i] - target) ** 2
            if c.cliprange_value is not None:
                e = torch.maximum(e, (was + (V[i] - was).clamp(-c.cliprange_value, c.cliprange_value) - target) ** 2)
            errors[i] = (e * (0.5 if c.value_loss_half else 1.0))[torch.tensor(masks[i])]
        live = [i for i in self.present if len(errors[i])]
        S = len(self.present) if c.seq_denominator == "all" else len(live)
        mode = self.row.aggregation
        if mode == "token-mean" and c.token_norm_scope == "group" and not first:
            groups = [[i for i in live if it.group[i] == g] for g in sorted({it.group[i] for i in live})]
            means = [sum(errors[i].sum() for i in own) / sum(len(errors[i]) for i in own) for own in groups]
        loss = (
            sum(means) / len(means)
            if mode == "token-mean" and c.token_norm_scope == "group" and not first
            else sum(errors[i].mean() for i in live) / S
            if mode == "seq-mean-token-mean"
            else sum(errors[i].sum() for i in live)
            / (S if mode.startswith("seq-mean-token-sum") else sum(len(errors[i]) for i in live))
            / ((c.loss_scale_factor or c.longest_completion) if mode.endswith("norm") and not first else 1.0)
        )
        differ("critic loss", noted.metrics["loss"], float(loss), max(tolerance, 1e-3))

    def check_learned(self):
        """Tokens that the policy loss learns from: those of highest entropy (top_entropy_quantile), less those of the
        covariance band.
        """
        it, c = self.it, self.c
        if c.top_entropy_quantile >= 1 or not self.learned or c.compute_dtype != "float32":
            return
        H = [(-(f.exp() * f).sum(-1)).numpy() for f in it.full_old]
        flat = np.concatenate([h[m] for h, m in zip(H, it.mask)])
        if not flat.size:
            return
        bound = np.quantile(flat, 1 - c.top_entropy_quantile)
        for i, own in self.learned.items():
            for h, m, got in zip(H[i], it.mask[i], own):
                if m and abs(h - bound) > 1e-4 and (bool(got) != (h >= bound)) and not (c.covariance_clip and not got):
                    it.run.problems.append(
                        f"step {self.number}: a token of entropy {h} beside the bound {bound} is"
                        f" {'in' if got else 'out'}"
                    )
                    return


# --- a run ------------------------------------------------------------------------------------------------------------


class Run:
    """Everything of one run, and what is wrong with it (``problems``)."""

    def __init__(self, config, inputs, rows, metrics, watch, tokenizer, stored=False):
        from stages.rl import Config, resolve_preset

        self.c, self.inputs, self.watch, self.tokenizer, self.stored = (
            Config(**config),
            inputs,
            watch,
            tokenizer,
            stored,
        )
        self.row, self.problems = resolve_preset(self.c)[0], []
        c = self.c
        rank = c.lora_rank
        scale = (c.lora_alpha or 2 * rank) / (math.sqrt(rank) if c.lora_rslora else rank) if rank else 1.0
        self.model = Model(inputs["model"], scale=scale)
        self.other_model = self.model if "reference" not in inputs else Model(inputs["reference"])
        self.steps = watch.policy
        self.metrics = [dict(m) for m in metrics]
        self.updates = self.row.num_iterations * c.num_minibatches
        self.by_iteration = {k: list(g) for k, g in itertools.groupby(rows, lambda r: r["iteration"])}
        self.seen, self.average, self.coefs = np.zeros(0), None, {}
        self.steps_paid = any(x.step_credit != "none" for x in c.rewards)
        self.lambdas = {x.name: [x.weight] for x in c.rewards if x.at_least is not None}
        self.stop_ids = {tokenizer.eos_token_id}
        self.critic_model = None

    def option(self, name, default):
        return torch.tensor(float(self.row.options.get(name, self.c.options.get(name, default))), dtype=torch.float64)

    def version_of(self, iteration):
        lag = 1 if self.c.async_rollouts and iteration else 0
        return (iteration - lag) * self.updates

    def weights_at(self, step):
        noted = self.steps[step].before if step < len(self.steps) else self.steps[-1].after
        return self.model.plain(noted)

    def reference_at(self, step, iteration):
        """Weights of the reference when optimizer step ``step`` begins; None: the policy that started the iteration."""
        c = self.c
        if c.ref_mode == "previous":
            return None
        w = {n: v.clone() for n, v in self.other_model.own.items()}
        # through an iteration, and then all its moves at once
        held = self.row.kl_loss_coef and self.row.kl_target == "ref" and self.row.kl_loss_estimator == "full"
        for k in range(1, step + 1):
            due = c.ref_mode == "ema" or (c.ref_mode == "refresh" and k % c.ref_sync_steps == 0)
            keep = c.ref_decay if c.ref_mode == "ema" else 1 - c.ref_sync_alpha
            if due:
                now = self.weights_at(-(-k // self.updates) * self.updates if held else k)
                w = {n: keep * v + (1 - keep) * now[n] for n, v in w.items()}
        return w

    def values_at(self, step, rows, states):
        with torch.no_grad():
            if self.c.critic_mode == "shared":
                head = next(v for n, v in self.steps[step].before.items() if "value_head" in n).double()[0]
                return [(h @ head).numpy() for h, _ in states], [float(last @ head) for _, last in states]
            from stages.reward_models.reward_heads import read_card

            path = (
                self.inputs["reward_model"]
                if "reward_model" in self.inputs and self.c.critic_init != "policy"
                else self.inputs["model"]
            )
            self.critic_model = self.critic_model or Model(path, head=True)
            bias = read_card(path).bias if path != self.inputs["model"] else 0.0
            self.critic_bias = bias
            noted = self.watch.critic[len(self.watch.critic) - len(self.steps) + step].before
            w = {n: v.double() for n, v in noted.items()}
            found = self.critic_model.read(w, rows)
            head = w["score.weight"][0]
            return [(h @ head + bias).numpy() for h, _ in found], [float(last @ head + bias) for _, last in found]

    def component(self, comp, r):
        """The value of a component from the row alone, where it can be computed."""
        ids = list(r["completion_ids"])
        if comp.kind == "length_penalty":
            return -comp.length_alpha * len(ids)
        if comp.kind == "truncation":
            return 0.0 if r["terminated"] else -comp.missing_eos_penalty
        if comp.kind == "length":
            return (
                0.0
                if len(ids) <= comp.max_length - comp.cache_length
                else (
                    -1.0
                    if len(ids) > comp.max_length
                    else (comp.max_length - comp.cache_length - len(ids)) / comp.cache_length
                )
            )
        if comp.kind == "python" and "completion_ids" in comp.source and "completion," not in comp.source:
            space: dict = {}
            exec(comp.source, space)
            value = space["score"](completion_ids=ids)
            value = value["reward"] if isinstance(value, dict) else value
            return None if value is None else float(value)
        if comp.kind == "model" and not self.c.environment:
            if not r["terminated"]:
                return comp.cut_reward
            if not self.tokenizer.decode(ids, skip_special_tokens=True).strip():
                return comp.empty_reward
            if self.c.stop_strings or comp.squash != "none" or comp.normalise != "none" or comp.clip:
                return None
            from stages.reward_models.reward_heads import read_card

            self.reward_model = getattr(self, "reward_model", None) or Model(self.inputs["reward_model"], head=True)
            w = self.reward_model.own
            with torch.no_grad():
                ((_, last),) = self.reward_model.read(w, [r])
            return float(last @ w["score.weight"][0]) + read_card(self.inputs["reward_model"]).bias
        return None

    def multiplier(self, comp, iteration):
        """lambda <- max(0, lambda + step (c - mean R)) after every batch, over all that was sampled."""
        known = self.lambdas[comp.name]
        return known[min(iteration, len(known) - 1)]

    def baseline(self, it, shaped, in_stats):
        kind, c = self.row.read_baseline, self.c
        live = shaped[in_stats & it.scorable]
        if kind == "none":
            return np.zeros(it.B)
        if kind == "constant":
            return np.full(it.B, c.baseline_value)
        if kind == "batch_mean":
            return np.full(it.B, live.mean() if len(live) else 0.0)
        if kind == "moving_average":
            live = shaped[in_stats & it.scorable & it.fresh]  # replayed ones were counted before
            if not len(live):
                return np.full(it.B, 0.0 if self.average is None else self.average)
            used = live.mean() if self.average is None else self.average
            self.average = (
                live.mean()
                if self.average is None
                else c.baseline_decay * self.average + (1 - c.baseline_decay) * live.mean()
            )
            return np.full(it.B, used)
        # greedy, table, v_star: completions that no row holds; one number per prompt
        b = np.full(it.B, np.nan)
        it.learned()
        for i, r in enumerate(it.rows):
            on = np.flatnonzero(r["loss_mask"])
            if self.row.whiten or c.advantage_clip:
                it.unseen = True
            elif len(on):
                b[i] = (it.to_go[i][on[0]] if self.row.advantage == "reward_to_go" else shaped[i]) - r["advantages"][
                    on[0]
                ]
        for g in np.unique(it.group):
            own = b[(it.group == g) & np.isfinite(b)]
            if len(own) and np.ptp(own) > 1e-4:
                self.problems.append(f"iteration {it.number}: the baseline {kind} differs inside a group: {own}")
        return np.where(np.isfinite(b), b, np.nan)

    def reward_coef(self, iteration):
        if not self.row.kl_reward_coef:
            return 0.0
        return self.row.kl_reward_coef if self.row.kl_loss_coef else self.coef(iteration)

    def entropy_coef(self, step):
        """The coefficient that a step pays: of Skywork-OR1's controller, by the entropies of the steps before it."""
        c = self.c
        coef = c.entropy_coef
        if not c.use_adaptive_entropy:
            return coef
        last = math.inf
        for m in self.metrics[:step]:
            if "entropy" in m and not m.get("empty_step"):
                last = m["entropy"]
                move = c.entropy_coef_delta if last <= c.entropy_target else -c.entropy_coef_delta
                coef = min(max(coef + move, c.entropy_coef_min), c.entropy_coef_max)
        return coef if last <= c.entropy_target else 0.0

    def loss_coef(self, iteration):
        return self.coef(iteration)

    def coef(self, iteration):
        return self.coefs.get(iteration, self.row.kl_loss_coef or self.row.kl_reward_coef)

    def move_coef(self, it):
        """The KL controller after an iteration (KL-CTRL)."""
        row, c = self.row, self.c
        if row.kl_controller == "fixed":
            return
        if row.kl_loss_coef and row.kl_target == "old":
            w = self.weights_at(it.start + self.updates)
            with torch.no_grad():
                new = [
                    picked(log_softmax(h, w, c.temperature), r).numpy()
                    for (h, _), r in zip(self.model.read(w, it.rows), it.rows)
                ]
            d = np.concatenate([(n - o)[m] for n, o, m in zip(new, it.old, it.mask)])
            kl = float((np.exp(d) - 1 - d).mean()) if len(d) else 0.0
        else:
            d = [a - b for a, b, fresh in zip(it.old, it.ref, it.fresh) if fresh]
            count = [o.sum() for o, fresh in zip(it.own, it.fresh) if fresh]
            kl = {
                "sequence_sum": np.mean([x.sum() for x in d]),
                "sequence_mean": np.mean([x.sum() / max(n, 1) for x, n in zip(d, count)]),
                "token_mean": sum(x.sum() for x in d) / max(sum(count), 1),
            }[c.kl_unit]
        now = self.coef(it.number)
        if row.kl_controller == "adaptive_ppo":
            now = now / 2 if kl < row.target_kl / 1.5 else now * 2 if kl > 1.5 * row.target_kl else now
        else:
            measured = it.B if row.kl_loss_coef and row.kl_target == "old" else it.fresh.sum()
            gain = measured / c.kl_horizon if c.kl_horizon else c.k_beta
            now *= 1 + gain * min(max(kl / row.target_kl - 1, -0.2), 0.2)
        self.coefs[it.number + 1] = min(max(now, c.kl_coef_min or 0.0), c.kl_coef_max or math.inf)

    def check(self) -> list[str]:
        c = self.c
        for number, rows in self.by_iteration.items():
            start = number * self.updates
            it = Iteration(self, number, rows, start)
            it.check_logps()
            it.rewards()
            it.credit()
            for name in self.lambdas:
                comp = next(x for x in c.rewards if x.name == name)
                values = [it.parts[i][name] for i in range(it.B) if it.fresh[i] and it.parts[i].get(name) is not None]
                known = self.lambdas[name]
                if self.row.dynamic_sampling:  # also over groups that were thrown out, which no row holds
                    short = self.metrics[start].get(f"reward/{name}/shortfall")
                    known.append(known[-1] if short is None else max(0.0, known[-1] + comp.multiplier_step * short))
                elif values:
                    known.append(max(0.0, known[-1] + comp.multiplier_step * (comp.at_least - np.mean(values))))
                    it.log(f"reward/{name}/shortfall", comp.at_least - np.mean(values))
            it.check_metrics()
            if self.row.distillation_weight:
                it.check_teachers()
            for first in range(start, min(start + self.updates, len(self.steps)), c.num_minibatches):
                seen = [np.zeros(r["length"], int) for r in rows]
                for number_of_step in range(first, min(first + c.num_minibatches, len(self.steps))):
                    step = Step(it, number_of_step, self.steps[number_of_step])
                    step.check()
                    seen = [s + m for s, m in zip(seen, step.masks)]
                if first + c.num_minibatches <= len(self.steps) and any((s != m).any() for s, m in zip(seen, it.mask)):
                    self.problems.append(
                        f"iteration {number}: a pass over the batch does not train every trained token once,"
                        f" {[s.tolist() for s in seen][:3]} for {[m.astype(int).tolist() for m in it.mask][:3]}"
                    )
            self.move_coef(it)
        return self.problems


def audit(config, inputs, rows, metrics, watch, tokenizer, stored=False) -> list[str]:
    """What of a run's rollouts, curves, losses, gradients and weights does not follow from its configuration; [] where
    all does.
    """
    return Run(config, inputs, rows, metrics, watch, tokenizer, stored).check()
