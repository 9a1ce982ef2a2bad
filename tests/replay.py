"""The same training by plain means: rows through ``apply_chat_template`` and character offsets, one conversation at a
time through transformers' own forward in float64, torch's optimizers.

:func:`replayed` does what a stage is asked to do for the combinations of tests/sweep.py that :func:`why_not` lets
through; :func:`differences` holds a run of the stage against it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from stages.algorithms import DIRECT_METHODS
from stages.registry import get_stage
from stages.running.randomness import rng as counted_rng, seed_for
from tests import formulas, sweep
from tests.architectures import in_float64

SEED = 5


def why_not(stage: str, c: dict) -> str | None:
    """Why a combination is not replayed; None where it is."""
    if c.get("lora_dropout") or c["optimizer"] in ("muon", "adamw_8bit"):
        return "masks drawn elsewhere, products in bfloat16, or moments in 8 bits"
    if c["lora_rank"] and c["model"] == "olmoe":
        return "adapters on experts"
    if c.get("method") == "on_policy" and c["sampling_temperature"] > 1e-3:
        return "answers that are drawn"
    if stage == "distill" and c["method"] == "on_policy" and c["objective"] in ("uld", "gold"):
        return "answers that the teacher's tokenizer reads anew"
    if stage == "reward_model" and (c.get("init_head", "fresh") != "fresh" or c.get("spoiled_fraction")):
        return "a head that is there, or rows spoiled by probes"
    if stage == "reward_model" and c["max_length"] < 512 and c["objective"] in ("pairwise", "t2t_point", "t2t_pair"):
        return "requests whose parts are cut"
    return None


@dataclass
class Row:
    """Token ids and targets (0/1) of every conversation that the loss of a row reads, and what it weighs."""

    sequences: list[tuple[list[int], list[int]]]
    weight: float
    more: dict = field(default_factory=dict)


# -- rows --------------------------------------------------------------------------------------------------------------


class Rendered:
    """Conversations as ids with the character span of each assistant turn."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids)

    def text(self, messages, prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    def ids(self, messages, turns, full: bool = False) -> tuple[list[int], list[int]]:
        text = self.text(messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [(len(self.text(messages[:t], True)), len(self.text(messages[: t + 1]).rstrip("\n"))) for t in turns]
        mask = [int(full or any(a <= start and end <= b for a, b in spans)) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], [0, *mask[1:]]

    def answers(self, prompt, completions, max_length: int):
        """(prompt ids, [(ids, mask)]): responses up to their end token, cut at their end to half of the room at least,
        then the prompt at its beginning.
        """
        start = self.tokenizer(self.text(prompt, True), add_special_tokens=False)["input_ids"]
        found = []
        for completion in completions:
            ids, mask = self.ids([*prompt, *completion], range(len(prompt), len(prompt) + len(completion)))
            assert ids[: len(start)] == start
            ids, mask = ids[len(start) :], mask[len(start) :]
            end = max(i for i, m in enumerate(mask) if m) + 1
            found.append((ids, mask, end))
        longest = max(len(ids) for ids, _, _ in found)
        return start, found, longest


def clean(messages) -> list[dict]:
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


def demonstrations(rendered: Rendered, rows, config) -> list[Row]:
    made = []
    for row in rows:
        messages = clean(row["messages"])
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
        turns = {
            "all_assistant": row["train_turns"] or assistants,
            "final_turn": [i for i in assistants if i > last_user],
            "final_message": assistants[-1:],
            "full": [],
        }[config.train_on]
        ids, mask = rendered.ids(messages, turns, config.train_on == "full")
        ids, mask = ids[: config.max_length], mask[: config.max_length]
        if sum(mask):
            made.append(
                Row(
                    [(ids, mask)],
                    row["weight"],
                    {
                        "row_id": row["row_id"],
                        "difficulty": json.loads(row["extra_json"])["difficulty"],
                        "messages": messages,
                        "turns": turns,
                    },
                )
            )
    return made


def wrapped(rendered: Rendered, rows, config) -> list[Row]:
    """Plain texts with their end tokens, one behind the other, in rows of ``max_length``."""
    ids = [
        i
        for row in rows
        for i in [
            *rendered.tokenizer(row["text"], add_special_tokens=False)["input_ids"],
            rendered.tokenizer.eos_token_id,
        ]
    ]
    parts = [ids[k : k + config.max_length] for k in range(0, len(ids), config.max_length)]
    return [
        Row([(part, [0, *[1] * (len(part) - 1)])], 1.0, {"row_id": f"{rows[0]['split']}-{k}"})
        for k, part in enumerate(parts)
        if len(part) > 1
    ]


def cut(start, found, longest, max_length: int, trimmed: bool):
    """([(ids, mask)] of whole conversations within ``max_length``, responses as they are compared, tokens of the
    prompt); ``trimmed``: lengths are those without what stands behind the end token."""
    if trimmed:
        found = [(ids[:end], mask[:end], end) for ids, mask, end in found]
        longest = max(len(ids) for ids, _, _ in found)
    if len(start) + longest > max_length:
        room = max(max_length // 2, max_length - len(start))
        found = [(ids[:room], mask[:room], end) for ids, mask, end in found]
        start = start[len(start) - (max_length - min(longest, room)) :]
    return (
        [(start + ids[:end], [0] * len(start) + mask[:end]) for ids, mask, end in found],
        [tuple(ids) for ids, _, _ in found],
        len(start),
    )


def encoded(
    rendered: Rendered,
    prompt,
    completions,
    config,
    trimmed: bool = False,
    formatting: bool = False,
    listwise: bool = False,
    differ: int | None = None,
):
    """(sequences, tokens of the prompt), or None where two responses (of the first ``differ``) are the same or one has no
    target.
    """
    start, found, longest = rendered.answers(clean(prompt), [clean(c) for c in completions], config.max_length)
    sequences, texts, before = cut(start, found, longest, config.max_length, trimmed)
    was_cut, texts = len(start) + longest > config.max_length, texts[:differ]
    if len(set(texts)) < len(texts) and (not listwise or was_cut or len(texts) == 2):
        return None
    if formatting:  # without the special tokens among the targets
        sequences = [(ids, [m * (i not in rendered.special) for i, m in zip(ids, mask)]) for ids, mask in sequences]
    return (sequences, before) if all(sum(mask) for _, mask in sequences) else None


def pairs(
    rendered: Rendered,
    rows,
    config,
    soft: bool,
    trimmed: bool = False,
    positive: bool = False,
    formatting: bool = False,
    gold: bool = False,
) -> list[Row]:
    made = []
    for row in rows:
        if row["label_prob"] == 0.5 and not soft or positive and row["chosen_score"] <= row["rejected_score"]:
            continue
        answers = [row["chosen"], row["rejected"]]
        if gold:
            answers.append([{"role": "assistant", "content": json.loads(row["extra_json"])["reference"]}])
        found = encoded(rendered, row["prompt"], answers, config, trimmed, formatting, differ=2)
        if found is not None:
            made.append(
                Row(
                    found[0],
                    row["weight"],
                    {
                        "label_prob": 1.0 if row["label_prob"] is None else row["label_prob"],
                        "margin": row["margin"] or 0.0,
                        "score_gap": row["chosen_score"] - row["rejected_score"],
                        "row": row,
                        "before": found[1],
                    },
                )
            )
    return made


def single(rendered: Rendered, rows, config) -> list[Row]:
    """Single responses with a label."""
    found = [
        (row, encoded(rendered, row["prompt"], [row["completion"]], config, formatting=config.mask_formatting))
        for row in rows
    ]
    return [
        Row(one[0], row["weight"], {"label": row["label"], "prompt_id": row["prompt_id"], "before": one[1]})
        for row, one in found
        if one is not None
    ]


def with_others(made: list[Row], max_length: int, split: str) -> list[Row]:
    """``more["other"]``: the prompt of a row with the answer of the next row, in a fixed order, that has another
    prompt.
    """
    order = list(counted_rng(SEED, "align", "mismatched", split).permutation(len(made)))
    for at, i in enumerate(order):
        for k in [*order[at + 1 :], *order[:at]]:
            if made[k].more["prompt_id"] != made[i].more["prompt_id"]:
                start, (ids, mask) = (
                    made[i].sequences[0][0][: made[i].more["before"]],
                    (part[made[k].more["before"] :] for part in made[k].sequences[0]),
                )
                if len(start) + len(ids) > max_length:
                    room = max(max_length // 2, max_length - len(start))
                    ids, mask = ids[:room], mask[:room]
                    start = start[len(start) + len(ids) - max_length :]
                made[i].more["other"] = (start + ids, [0] * len(start) + mask)
                break
    return made


def ranked(rendered: Rendered, rows, config) -> list[Row]:
    """Responses best first; for Plackett-Luce, which has no ties, the first of equals."""
    made = []
    for row in rows:
        order = sorted(range(len(row["ranks"])), key=lambda i: (row["ranks"][i], i))
        if config.method == "pl_dpo":
            order = [i for n, i in enumerate(order) if n == 0 or row["ranks"][i] != row["ranks"][order[n - 1]]]
        found = encoded(
            rendered,
            row["prompt"],
            [row["completions"][i] for i in order],
            config,
            formatting=config.mask_formatting,
            listwise=True,
        )
        if found is not None and len(order) > 1:
            made.append(
                Row(
                    found[0],
                    row["weight"],
                    {"ranks": [row["ranks"][i] for i in order], "rewards": [row["scores"][i] for i in order]},
                )
            )
    return made


def segmented(rendered: Rendered, rows, config) -> list[Row]:
    """``more["spans"]``: ((positions, score) of the chosen side, of the rejected side) of every segment that both
    have.
    """
    made = []
    for row in rows:
        found = encoded(
            rendered, row["prompt"], [row["chosen"], row["rejected"]], config, formatting=config.mask_formatting
        )
        if found is None:
            continue
        sides = []
        for (ids, mask), name in zip(found[0], ("chosen_segments", "rejected_segments")):
            begins, at = [], 0
            for token in ids[found[1] :]:
                begins.append(at)
                at += len(rendered.tokenizer.decode([token]))
            sides.append([])
            for segment in row[name]:
                inside = [found[1] + k for k, begin in enumerate(begins) if segment["start"] <= begin < segment["end"]]
                given = {a["aspect"]: a["score"] for a in segment["scores"]}
                if missing := set(config.aspect_weights) - set(given):
                    inside, given = [], dict.fromkeys(missing, 0.0)
                shares = config.aspect_weights or dict.fromkeys(given, 1 / len(given))
                score = sum(share * given.get(aspect, 0.0) for aspect, share in shares.items())
                sides[-1].append(([k for k in inside if mask[k]], score))
        if config.segment_pairing == "top_chosen_vs_bottom_rejected":
            sides = [[one for one in side if one[0]] for side in sides]
            sides = [sorted(sides[0], key=lambda s: -s[1]), sorted(sides[1], key=lambda s: s[1])]
        if spans := [(a, b) for a, b in zip(*sides) if a[0] and b[0]]:
            made.append(Row(found[0], row["weight"], {"spans": spans}))
    return made


def corrupted(rendered: Rendered, made: list[Row], config) -> list[Row]:
    """Pairs with a third conversation: the chosen answer behind the prompt whose last message lost words, or their
    order.
    """
    kept = []
    for one in made:
        row, words = one.more["row"], one.more["row"]["prompt"][-1]["content"].split()
        if len(words) < 2:
            continue
        rng = counted_rng(SEED, "align", "corrupt", row["row_id"])
        n = min(len(words) - 1, max(1, round(config.corruption_share * len(words))))
        if config.corruption == "drop":
            gone = set(rng.choice(len(words), size=n, replace=False))
            words = [w for i, w in enumerate(words) if i not in gone]
        elif config.corruption == "truncate":
            words = words[:-n]
        else:
            order = list(rng.permutation(len(words)))
            words = [words[i] for i in (order if order != sorted(order) else order[::-1])]
        messages = [*clean(row["prompt"][:-1]), {"role": row["prompt"][-1]["role"], "content": " ".join(words)}]
        answer, targets = (part[one.more["before"] :] for part in one.sequences[0])
        other = rendered.tokenizer(rendered.text(messages, True), add_special_tokens=False)["input_ids"][
            -max(1, config.max_length - len(answer)) :
        ]
        one.sequences.append((other + answer, [0] * len(other) + targets))
        kept.append(one)
    return kept


# -- the loss of a step ------------------------------------------------------------------------------------------------


def logps_of(model, ids, mask, router=None):
    """(log-probs of the targets, mean log-prob over the vocabulary there, log-probs of all tokens there)."""
    out = model(
        input_ids=torch.tensor([ids]), use_cache=False, **({"output_router_logits": True} if router is not None else {})
    )
    if router is not None:
        router.append(out.router_logits)
    at = [i for i, m in enumerate(mask) if m]
    every = torch.log_softmax(out.logits[0].double(), -1)[[i - 1 for i in at]]
    return every.gather(1, torch.tensor(ids)[at][:, None])[:, 0], every.mean(-1), every, [ids[i] for i in at]


def easy_first(rows, difficulty, parts: int) -> list[list[Row]]:
    """Parts of equal size, the first ones larger by one, from the smallest difficulty to the largest; each in the order
    of the rows.
    """
    order, found, at = sorted(range(len(rows)), key=lambda i: (difficulty[i], i)), [], 0
    for k in range(parts):
        n = len(rows) // parts + (k < len(rows) % parts)
        found.append([rows[i] for i in sorted(order[at : at + n])])
        at += n
    return [part for part in found if part]


def balance(router, config, loads=None):
    """E sum_e f_e P_e over all layers and tokens (Switch Transformers, eq. 4; of every choice that a token makes);
    ``loads``: logits that f, which has no gradient, is taken of.
    """
    each = [
        torch.cat([part for parts in rows for part in parts]) for rows in (router, router if loads is None else loads)
    ]
    chosen = each[1].topk(config.num_experts_per_tok, -1).indices
    f = torch.nn.functional.one_hot(chosen, config.num_experts).to(each[0].dtype).mean(0)
    return config.num_experts * (f * each[0].softmax(-1).mean(0)).sum()


class Sft:
    def __init__(self, c, config):
        self.config = config
        self.router = config.router_aux_loss_coef

    def rows(self, rendered, rows, limit=None):
        return (wrapped if rows and "text" in rows[0] else demonstrations)(rendered, rows, self.config)[:limit]

    def parts(self, train) -> list[list[Row]]:
        """The rows in the parts that are trained one after the other."""
        config = self.config
        return (
            easy_first(
                train,
                [
                    sum(row.sequences[0][1]) if config.curriculum == "length" else row.more["difficulty"]
                    for row in train
                ],
                config.curriculum_stages,
            )
            if config.curriculum != "none"
            else [train]
        )

    @contextlib.contextmanager
    def noise(self, model, row):
        """NEFTune: uniform on what the embedding gives, within alpha / sqrt(tokens * hidden size)."""

        def noisy(module, given, embedded):
            draw = counted_rng(SEED, "sft", "neftune", self.step, row.more["row_id"]).random(
                tuple(embedded.shape[1:]), dtype=np.float32
            )
            return embedded + torch.from_numpy(
                (draw * 2 - 1) * np.float32(self.config.neftune_noise_alpha / math.sqrt(draw.size))
            )

        hook = model.get_input_embeddings().register_forward_hook(noisy)
        yield
        hook.remove()

    def __call__(self, model, rows, share=None):
        """share: of the run that is done, None in validation."""
        config, router = self.config, None
        coefficient = (
            (getattr(model.config, "router_aux_loss_coef", None) if self.router is None else self.router)
            if share is not None and getattr(model.config, "num_experts", None)
            else None
        )
        router, loads = ([] if coefficient else None), [] if config.neftune_noise_alpha else None
        total, tokens, sequences, seen, right, admitted, repeats = 0.0, 0.0, 0.0, [], 0.0, 0.0, 0.0
        for row in rows:
            ids, mask = row.sequences[0]
            if router is not None and config.neftune_noise_alpha:  # which has no part in the loads
                with torch.no_grad():
                    logps_of(model, ids, mask, loads)
            with (
                self.noise(model, row) if share is not None and config.neftune_noise_alpha else contextlib.nullcontext()
            ):
                logps, means, every, targets = logps_of(model, ids, mask, router)
            seen.append(logps.detach())
            right += float((every.argmax(-1) == torch.tensor(targets)).sum())
            loss = -logps
            if config.loss_type == "dft":
                loss = -logps.detach().exp() * logps
            if config.label_smoothing_factor:
                loss = -(1 - config.label_smoothing_factor) * logps - config.label_smoothing_factor * means
            if config.unlikelihood_coef:
                more = []
                for t, target in enumerate(targets):
                    wrong = sorted(set(targets[max(0, t - config.unlikelihood_window) : t]) - {target})
                    more.append(-torch.log1p(-every[t, wrong].exp()).sum() if wrong else every.new_zeros(()))
                    repeats += float(every[t, wrong].detach().exp().sum())
                loss = loss + config.unlikelihood_coef * torch.stack(more)
            tokens, sequences = tokens + row.weight * len(loss), sequences + row.weight
            loss = {
                "token-mean": loss.sum(),
                "seq-mean-token-sum": loss.sum(),
                "seq-mean-token-mean": loss.mean(),
                "seq-mean-token-sum-norm": loss.sum() / (config.loss_scale_factor or config.max_length),
            }[config.loss_agg_mode]
            if share is not None and config.self_paced_threshold:
                threshold = (
                    config.self_paced_threshold
                    * ((config.self_paced_threshold_end or config.self_paced_threshold) / config.self_paced_threshold)
                    ** share
                )
                loss = loss * float(-logps.mean() < threshold)
                admitted += float(-logps.mean() < threshold)
            total = total + row.weight * loss
        total = total / max(tokens if config.loss_agg_mode == "token-mean" else sequences, 1e-12)
        if coefficient:
            total = total + coefficient * balance(router, model.config, loads)
        found = {
            "target_nll": -torch.cat(seen).mean(),
            "trained_tokens": float(sum(map(len, seen))),
            "target_fraction": sum(map(len, seen)) / sum(len(row.sequences[0][0]) for row in rows),
        }
        found |= (
            {"repeat_probability": repeats / sum(map(len, seen))}
            if config.unlikelihood_coef
            else {"mean_token_accuracy": right / sum(map(len, seen))}
        )
        return total, {
            **found,
            **({"admitted": admitted / len(rows)} if share is not None and config.self_paced_threshold else {}),
        }


def share_above(differences):
    """Share above 0, where what is 0 but for rounding counts one half."""
    return (0.5 + 0.5 * torch.where(differences.abs() > 1e-9, differences.detach().sign(), 0.0)).mean()


class Align:
    def __init__(self, c, config):
        self.config, self.method = config, DIRECT_METHODS[c["method"]]
        method = self.method
        self.beta = config.beta if config.beta is not None else method.default_beta
        self.reduction = config.logp_reduction or method.logp_reduction
        self.nll = method.nll_coef if config.nll_coef is None else config.nll_coef
        self.nll_reduction = config.nll_reduction or method.nll_reduction
        self.options = {**method.options, **method.settings, **config.options}
        self.reference, self.z0, self.running = None, 0.0, {"chosen": 0.0, "rejected": 0.0}

    def rows(self, rendered, rows, limit=None):
        return self._rows(rendered, rows, limit)[:limit]

    def parts(self, train) -> list[list[Row]]:
        return [train]

    def _rows(self, rendered, rows, limit):
        config, split = self.config, rows[0]["split"] if rows else "train"
        if config.stage_index is not None and split == "train":
            rows = [row for row in rows if row["stage_index"] == config.stage_index]
        if self.method.data == "unpaired":
            found = single(rendered, rows, config)[:limit]
            return with_others(found, config.max_length, split) if self.method.name == "kto" else found
        if self.method.data == "rankings":
            return ranked(rendered, rows, config)
        if self.method.data == "segments":
            return segmented(rendered, rows, config)
        found = pairs(
            rendered,
            rows,
            config,
            "label_prob" in self.method.columns,
            positive=self.method.positive_gap,
            formatting=config.mask_formatting,
            gold=self.method.name.startswith("tpo"),
        )
        if self.method.name.startswith("aot"):
            found = [Row(row.sequences, 1.0, row.more) for row in found if row.weight]
        return corrupted(rendered, found, config) if self.method.name == "mdpo" else found

    def score(self, h):
        kind, a = self.config.f_divergence_type, self.config.f_alpha_divergence_coef
        if kind == "forward_kl" or kind == "alpha_divergence" and a == 0:
            return 1 - torch.exp(-h)
        if kind == "js_divergence":
            return h - F.softplus(h) + math.log(2)
        return (1 - torch.exp(-(1 - a) * h)) / (1 - a) if kind == "alpha_divergence" and a < 1 else h

    def held(self, ids, mask):
        with torch.no_grad():
            return logps_of(self.reference, ids, mask)[0]

    def __call__(self, model, rows, share=None):
        config, router = self.config, [] if self.config.router_aux_loss_coef and share is not None else None
        weight = torch.tensor([row.weight for row in rows], dtype=torch.float64)
        scale = max(float(weight.sum()), 1e-12)
        each, metrics, nll = {"unpaired": self.unpaired, "rankings": self.rankings, "segments": self.segments}.get(
            self.method.data, self.pairs
        )(model, rows, weight, scale, router, share)
        total = config.loss_weight * (each * weight).sum() / scale
        if self.nll:
            total = total + self.nll * nll[self.nll_reduction]
        if router:
            total = total + config.router_aux_loss_coef * balance(router, model.config)
        return total, metrics

    def after_step(self):
        """BCO's running means of the rewards of either class, by the weights of their rows."""
        for name, value in getattr(self, "seen", {}).items():
            self.running[name] = self.options["momentum"] * self.running[name] + (1 - self.options["momentum"]) * value

    def unpaired(self, model, rows, weight, scale, router, share):
        config, name = self.config, self.method.name
        policy = torch.stack([logps_of(model, *row.sequences[0], router)[0].sum() for row in rows])
        ratio = policy - torch.stack([self.held(*row.sequences[0]).sum() for row in rows])
        if name == "kto" and (
            config.z_ref_mode == "batch_mismatched" or config.z_ref_mode == "heldout" and share is None
        ):
            self.z0 = 0.0
            with torch.no_grad():
                other = [
                    (
                        row.weight,
                        float(logps_of(model, *row.more["other"])[0].sum() - self.held(*row.more["other"]).sum()),
                    )
                    for row in rows
                    if "other" in row.more
                ]
            if len(rows) > 1 and sum(w for w, _ in other):
                self.z0 = max(0.0, sum(w * r for w, r in other) / sum(w for w, _ in other))
        delta = (self.running["chosen"] + self.running["rejected"]) / 2
        each = torch.stack(
            [
                formulas.value_of_one(name, r, row.more["label"], self.beta, self.options, self.z0, delta)
                for r, row in zip(ratio, rows)
            ]
        )
        good = torch.tensor([row.more["label"] for row in rows])
        beyond = torch.where(good, 1.0, -1.0) * (self.beta * (ratio - self.z0) - (delta if name == "bco" else 0.0))
        metrics = {"desirable_fraction": good.double().mean(), "rewards/accuracies": share_above(beyond)}
        if good.any():
            metrics["displacement/displaced_fraction"] = (ratio[good] < -1e-9).double().mean()
        if name == "kto":
            metrics["kl"] = torch.tensor(self.z0)
        if name == "bco":
            metrics["delta"] = torch.tensor(delta)
        seen = {}
        for side, of in (("chosen", good), ("rejected", ~good)):
            if of.any():
                metrics |= {
                    f"rewards/{side}": self.beta * ratio[of].mean(),
                    f"logps/{side}": policy[of].mean(),
                    f"displacement/{side}_shift": ratio[of].mean(),
                    f"length/{side}": sum(sum(row.sequences[0][1]) for row, o in zip(rows, of) if o) / int(of.sum()),
                }
                if weight[of].sum():
                    seen[side] = float((self.beta * ratio.detach() * weight)[of].sum() / weight[of].sum())
        if share is not None and name == "bco":
            self.seen = seen
        if good.any() and (~good).any():
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return each, metrics, {}

    def rankings(self, model, rows, weight, scale, router, share):
        each, ends, starts = [], [], []
        for row in rows:
            policy = [logps_of(model, ids, mask, router)[0].sum() for ids, mask in row.sequences]
            held = [self.held(ids, mask).sum() for ids, mask in row.sequences]
            ref = held if self.method.needs_reference else None
            each.append(
                formulas.ranking_loss(
                    self.method.name,
                    policy,
                    ref,
                    [sum(mask) for _, mask in row.sequences],
                    row.more["rewards"],
                    row.more["ranks"],
                    self.beta,
                    self.options,
                    self.config.win_probability,
                )
            )
            ends.append(torch.stack([policy[0], policy[-1]]).detach())
            starts.append(torch.stack([held[0], held[-1]]))
        ends, starts = torch.stack(ends, 1), torch.stack(starts, 1)
        compared = ends - starts if self.method.needs_reference else ends
        return torch.stack(each), self.watched(ends, ends - starts, compared), {}

    def segments(self, model, rows, weight, scale, router, share):
        each, ends, starts = [], [], []
        for row in rows:
            sides, policy, held = [], [], []
            for k, (ids, mask) in enumerate(row.sequences):
                at = [i for i, m in enumerate(mask) if m]
                values, fixed = logps_of(model, ids, mask, router)[0], self.held(ids, mask)
                sides.append(dict(zip(at, values - fixed)))
                paired = [at.index(i) for pair in row.more["spans"] for i in pair[k][0]]
                policy.append(values.detach()[paired].sum())
                held.append(fixed[paired].sum())
            each.append(
                sum(
                    formulas.logistic(
                        self.beta * a * sum(sides[0][k] for k in of) - self.beta * b * sum(sides[1][k] for k in than)
                    )
                    for (of, a), (than, b) in row.more["spans"]
                )
            )
            ends.append(torch.stack(policy))
            starts.append(torch.stack(held))
        ends, starts = torch.stack(ends, 1), torch.stack(starts, 1)
        return torch.stack(each), self.watched(ends, ends - starts, ends - starts), {}

    def watched(self, policy, shifts, compared):
        """Metrics of chosen and rejected [2, rows]: log-probs, less the reference's, and what the loss compares."""
        beta, margins = 1.0 if self.beta is None else self.beta, compared[0] - compared[1]
        fell = shifts < -1e-9
        return {
            "logps/chosen": policy[0].mean(),
            "logps/rejected": policy[1].mean(),
            "rewards/margins": beta * margins.mean(),
            "rewards/chosen": beta * compared[0].mean(),
            "rewards/rejected": beta * compared[1].mean(),
            "rewards/accuracies": share_above(margins),
            "gradient_weight": torch.sigmoid(-beta * margins).mean(),
            "displacement/chosen_shift": shifts[0].mean(),
            "displacement/rejected_shift": shifts[1].mean(),
            "displacement/displaced_fraction": fell[0].double().mean(),
            "displacement/both_fell_fraction": (fell[0] & fell[1]).double().mean(),
        }

    def pairs(self, model, rows, weight, scale, router, share):
        config, name = self.config, self.method.name
        columns = {
            key: []
            for key in (
                "pc",
                "pr",
                "rc",
                "rr",
                "lc",
                "lr",
                "xc",
                "xr",
                "yc",
                "yr",
                "ac",
                "ar",
                "third",
                "whole",
                "places",
            )
        }
        for row in rows:
            found = [logps_of(model, ids, mask, router) for ids, mask in row.sequences]
            tokens, held = [f[0] for f in found], [self.held(ids, mask) for ids, mask in row.sequences]
            common = min(map(len, tokens[:2]))
            for k, side in enumerate("cr"):
                columns["l" + side].append(torch.tensor(float(len(tokens[k])), dtype=torch.float64))
                columns["a" + side].append((tokens[k] - torch.logsumexp(2 * found[k][2], -1)).mean())
                for key, values, compared in (("p", tokens[k], "x"), ("r", held[k], "y")):
                    columns[key + side].append(values.sum())
                    columns[compared + side].append(
                        values.sum()
                        if config.ld_alpha is None
                        else values[:common].sum() + config.ld_alpha * values[common:].sum()
                    )
            columns["third"].append((tokens[-1] - held[-1]).sum())
            if self.options.get("nll_on_prompt"):  # prompt and chosen answer, all but the first token
                ids = row.sequences[0][0]
                columns["whole"].append(logps_of(model, ids, [0, *[1] * (len(ids) - 1)], router)[0].sum())
                columns["places"].append(torch.tensor(float(len(ids) - 1), dtype=torch.float64))
            elif name.startswith("tpo"):  # the gold answer
                columns["whole"].append(tokens[2].sum())
                columns["places"].append(torch.tensor(float(len(tokens[2])), dtype=torch.float64))
        v = {key: torch.stack(values) for key, values in columns.items() if values}
        x, y = [v["xc"], v["xr"]], [v["yc"], v["yr"]]
        if config.f_divergence_type != "reverse_kl":
            x, y = [self.score(a - b) for a, b in zip(x, y)], [torch.zeros_like(a) for a in x]
        if self.reduction == "mean":
            x, y = ([a / n for a, n in zip(side, (v["lc"], v["lr"]))] for side in (x, y))
        y = y if self.method.needs_reference else [None, None]
        of_rows = {
            key: torch.tensor([row.more[key] for row in rows], dtype=torch.float64)
            for key in ("label_prob", "score_gap")
        }
        mean = float((x[0] - y[0] - x[1] + y[1]).mean()) if name == "aql" else 0.0
        if name == "aql":
            mean = float(((x[0] - y[0] - x[1] + y[1]) * weight).sum() / scale)
        each = formulas.pair_losses(
            name,
            *x,
            *y,
            self.beta,
            self.options,
            n_w=v["lc"],
            n_l=v["lr"],
            mean_w=v["pc"] / v["lc"],
            mean_l=v["pr"] / v["lr"],
            aligned_w=v["ac"],
            aligned_l=v["ar"],
            h_corrupted=v["third"],
            step_mean=torch.tensor(mean),
            **of_rows,
        )
        whole, places = (v["whole"], v["places"]) if "whole" in v else (v["pc"], v["lc"])
        nll = {
            "seq-mean": -(whole / places * weight).sum() / scale,
            "seq-sum": -(whole * weight).sum() / scale,
            "token-mean": -(whole * weight).sum() / max(float((places * weight).sum()), 1e-12),
        }
        compared = torch.stack([(a if b is None else a - b).detach() for a, b in zip(x, y)])
        policy, ref = torch.stack([v["pc"], v["pr"]]).detach(), torch.stack([v["rc"], v["rr"]])
        metrics = self.watched(policy, policy - ref, compared)
        if self.reduction == "mean" and not self.method.needs_reference:
            metrics["log_odds"] = (formulas.log_odds(compared[0]) - formulas.log_odds(compared[1])).mean()
        return (
            each,
            {"length/chosen": v["lc"].mean(), "length/rejected": v["lr"].mean(), **metrics},
            nll,
        )


class Reward:
    def __init__(self, c, config):
        self.config = config
        self.objective = {"auto": "bt"}.get(c["objective"], c["objective"])
        self.encoder = c["model"] == "bert"
        self.scale, self.shifts, self.pad, self.tied = None, {}, None, None
        self.per_token = self.objective in ("value", "orm", "prm")
        self.labels = self.objective in ("t2t_point", "t2t_pair")
        self.pooling = {"auto": "mean" if self.encoder and not self.per_token else "last"}.get(
            config.pooling, config.pooling
        )
        self.softly = config.use_soft_labels or self.objective == "soft_label"

    # -- what the model reads
    def plain(self, rendered, text: str) -> list[int]:
        return rendered.tokenizer(text, add_special_tokens=False)["input_ids"]

    def said(self, messages) -> str:
        return (
            messages[0]["content"]
            if len(messages) == 1
            else "\n\n".join(
                {"user": "Human", "assistant": "Assistant", "system": "System"}[m["role"]] + ": " + m["content"]
                for m in messages
            )
        )

    def prompted(self, prompt):
        return (
            [*clean(prompt[:-1]), {"role": prompt[-1]["role"], "content": prompt[-1]["content"] + "\n\n[FACTS]\nnone"}]
            if self.config.facts
            else clean(prompt)
        )

    def start(self, rendered, messages) -> list[int]:
        return (
            self.plain(rendered, self.said(messages))
            if self.encoder
            else rendered.tokenizer(rendered.text(messages, True), add_special_tokens=False)["input_ids"]
        )

    def whole(self, rendered, start, ids, mask, more=()):
        """(ids, mask, tokens of the first segment) of a row; encoders write theirs around both texts."""
        if not self.encoder:
            return start + ids, [0] * len(start) + mask, len(start)
        end = rendered.tokenizer.eos_token_id
        first = [rendered.tokenizer.convert_tokens_to_ids("<|endoftext|>"), *start, end]
        return [*first, *ids, end], [0] * len(first) + mask + [0], len(first)

    def encoded(self, rendered, prompt, completions, distinct: bool, words=()):
        config, prompt = self.config, self.prompted(prompt)
        if self.encoder:
            start = self.start(rendered, prompt)
            found = [
                (ids, [1] * len(ids), len(ids))
                for ids in (self.plain(rendered, self.said(clean(c))) for c in completions)
            ]
            longest, room = max(len(ids) for ids, _, _ in found), config.max_length - 3
        else:
            start, found, longest = rendered.answers(prompt, [clean(c) for c in completions], config.max_length)
            room = config.max_length
        for k, word in enumerate(self.plain(rendered, f"{w}:") for w in words):
            ids, mask, end = found[k]
            found[k] = (word + ids, [0] * len(word) + mask, len(word) + end)
        longest = max(len(ids) for ids, _, _ in found)
        sequences, texts, before = cut(start, found, longest, room, True)
        was_cut = len(start) + max(end for _, _, end in found) > room
        if (
            distinct
            and len(set(texts)) < len(texts)
            and (was_cut or len(texts) == 2)
            or not all(sum(mask) for _, mask in sequences)
        ):
            return None
        return [self.whole(rendered, ids[:before], ids[before:], mask[before:]) for ids, mask in sequences]

    def request(self, rendered, text: str, label: str | None = None):
        if self.encoder:
            return self.whole(rendered, [], (ids := self.plain(rendered, text)), [1] * len(ids))
        ids = self.start(rendered, [{"role": "user", "content": text}])
        word = [] if label is None else self.plain(rendered, label)
        return ids + word, [int(label is None)] * len(ids) + [1] * len(word), 0

    def rows(self, rendered, rows, limit=None):
        config, kind, training = self.config, self.objective, self.scale is None
        self.pad = rendered.tokenizer.pad_token_id
        made = [one for row in rows for one in self.made(rendered, row)]
        if kind == "regression":
            values = np.array([row.more["targets"] for row in made], dtype=float)
            w = np.array([row.weight for row in made])
            copies = np.repeat(values, (2 * w).astype(int), 0)  # weights are halves
            if training and config.centre_annotators:
                names = [row.more["annotator"] for row in made]
                named = np.repeat(names, (2 * w).astype(int))
                self.shifts = {n: np.nanmean(copies, 0) - np.nanmean(copies[named == n], 0) for n in set(names)}
                copies = copies + np.nan_to_num(np.array([self.shifts[n] for n in named]))
            values = values + np.array(
                [np.nan_to_num(self.shifts.get(row.more["annotator"], np.zeros(values.shape[1]))) for row in made]
            )
            self.scale = self.scale or (np.nanmean(copies, 0), np.nanstd(copies, 0))
            for row, target in zip(made, (values - self.scale[0]) / self.scale[1]):
                row.more["targets"] = target
        if kind == "orm" and training and config.balance:
            kept = []
            for prompt in {row.more["prompt"] for row in made}:
                sides = [
                    [row for row in made if row.more["prompt"] == prompt and row.more["target"] == side and row.weight]
                    for side in (0.0, 1.0)
                ]
                kept += [id(row) for side in sides for row in side[: min(map(len, sides))]]
            made = [row for row in made if id(row) in kept]
        self.scale = self.scale or ()
        return made[:limit]

    def made(self, rendered, row) -> list[Row]:
        config, kind, weight = self.config, self.objective, row["weight"]
        if kind in ("bt", "margin", "soft_label", "pairwise", "t2t_point", "t2t_pair"):
            if row["label_prob"] == 0.5 and not (self.softly and not self.labels):
                return []
            more = {
                "label_prob": 1.0 if row["label_prob"] is None or not self.softly else row["label_prob"],
                "margin": row["margin"] or 0.0,
                "row": row,
            }
            if kind in ("bt", "margin", "soft_label"):
                found = self.encoded(rendered, row["prompt"], [row["chosen"], row["rejected"]], True)
                return [] if found is None else [Row(found, weight, more)]
            prompt = self.said(self.prompted(row["prompt"]))
            sides = [self.said(clean(row[name])) for name in ("chosen", "rejected")]
            if sides[0] == sides[1]:
                return []
            both = "[CONTEXT]\n{}\n\n[RESPONSE A]\n{}\n\n[RESPONSE B]\n{}\n\n[PREFERRED RESPONSE]"
            one = "[CONTEXT]\n{}\n\n[RESPONSE]\n{}\n\n[QUALITY]"
            if config.label_request == "slic":
                both, one = "[Context] {} [Summary A] {} [Summary B] {}", "[Context] {} [Summary] {}"
            if kind == "pairwise":
                return [
                    Row(
                        [self.request(rendered, both.format(prompt, a, b)) for a, b in (sides, sides[::-1])],
                        weight,
                        more,
                    )
                ]
            if kind == "t2t_pair":
                return [
                    Row([self.request(rendered, both.format(prompt, a, b), label)], weight, more)
                    for a, b, label in ((*sides, "A"), (*sides[::-1], "B"))
                ]
            return [
                Row([self.request(rendered, one.format(prompt, side), label)], weight, more)
                for side, label in zip(sides, ("Good", "Bad"))
            ]
        if kind == "control_tokens":
            if row["label_prob"] == 0.5:
                return []
            sides, words = [row["chosen"], row["rejected"]], config.label_words or ["GOOD", "BAD"]
            found = self.encoded(
                rendered, row["prompt"], [*sides[:1] * 2, *sides[1:] * 2], True, [*words, *reversed(words)]
            )
            same = found is not None and found[0] == found[3]
            return [] if found is None or same else [Row(found, weight, {"pairs": [(0, 1), (2, 3)]})]
        if kind in ("kwise_pairs", "plackett_luce"):
            order = sorted(range(len(row["ranks"])), key=lambda i: (row["ranks"][i], i))
            ranks, top = [row["ranks"][i] for i in order], config.top_ranks or len(order)
            listwise = kind == "plackett_luce"
            certain = min(top, len(order)) if listwise else len(order)
            if listwise and any(ranks[k] == ranks[k + 1] for k in range(min(top, len(order) - 1))):
                if config.tie_policy == "drop_item":
                    keep = [0]
                    for k in range(1, len(order)):
                        if ranks[k] != ranks[keep[-1]] or len(keep) > top:
                            keep.append(k)
                    order, ranks = [order[k] for k in keep], [ranks[k] for k in keep]
                    certain = min(top, len(order))
                else:
                    listwise, certain = False, sum(rank <= ranks[min(top, len(ranks)) - 1] for rank in ranks)
            pairs = [(i, j) for i in range(certain) for j in range(len(ranks)) if ranks[i] < ranks[j]]
            found = self.encoded(rendered, row["prompt"], [row["completions"][i] for i in order], True)
            return [Row(found, weight, {"pairs": pairs, "listwise": listwise})] if found and pairs else []
        if kind == "prm":
            labels = list(row["labels"])
            if config.after_first_error == "drop" and -1 in labels:
                labels = labels[: labels.index(-1) + 1]
            start, ids, ends = self.start(rendered, self.prompted(row["prompt"])), [], []
            for step in row["completions"][: len(labels)]:
                ids += self.plain(rendered, step) + self.plain(rendered, row["separator"] or "\n\n")
                ends.append(len(ids) - 1)
            room = config.max_length - 3 * self.encoder
            if len(start) + len(ids) > room:
                most = max(room // 2, room - len(start))
                start, ids = start[len(start) - (room - min(len(ids), most)) :], ids[:most]
            ends = [end for end in ends if end < len(ids)]
            if not ends:
                return []
            ids = ids[: ends[-1] + 1]
            return [
                Row(
                    [self.whole(rendered, start, ids, [int(k in ends) for k in range(len(ids))])],
                    weight,
                    {"labels": labels[: len(ends)]},
                )
            ]
        found = self.encoded(rendered, row["prompt"], [row["completion"]], False)
        if found is None:
            return []
        more = {
            "target": float(row["label"]) if row.get("label") is not None else row["score"],
            "prompt": str(row["prompt"]),
            "annotator": (row.get("ann") or {}).get("annotator_id"),
        }
        if kind == "regression":
            given = {a["aspect"]: a["score"] for a in row["aspects"]}
            more["targets"] = (
                [given.get(a, math.nan) for a in config.attributes] if config.attributes else [row["score"]]
            )
            if all(map(math.isnan, more["targets"])):
                return []
        return [Row(found, weight, more)]

    def parts(self, train) -> list[list[Row]]:
        by, config = self.config.curriculum, self.config
        if by == "none":
            return [train]
        if by == "stage_index":
            return [
                part
                for k in sorted({row.more["row"]["stage_index"] for row in train})
                if (part := [row for row in train if row.more["row"]["stage_index"] == k])
            ]
        ease = {
            "margin": lambda r: r["margin"],
            "score_gap": lambda r: abs(r["chosen_score"] - r["rejected_score"]),
            "rank_gap": lambda r: r["rank_gap"],
            "confidence": lambda r: abs(r["label_prob"] - 0.5),
        }[by]
        return easy_first(train, [-ease(row.more["row"]) for row in train], config.curriculum_stages)

    # -- the model
    def prepare(self, model, path: str, c: dict, config) -> None:
        """What is trained beside the backbone, and which layers."""
        self.head = "classifier" if self.encoder else "score"
        if self.labels:
            return
        if config.lm_loss_weight or config.outcome_head == "gain_bias" and self.objective == "orm":
            policy = loaded(path, "align", c, config)
            self.softcap = getattr(policy.config, "final_logit_softcapping", None)
            self.tied = policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
            if not self.tied:
                model.kept_lm_head = policy.get_output_embeddings()
        if config.outcome_head == "gain_bias" and self.objective == "orm":
            model.gain, model.offset = (
                torch.nn.Parameter(torch.ones((), dtype=torch.float64)),
                torch.nn.Parameter(torch.zeros((), dtype=torch.float64)),
            )
            model.score.weight.requires_grad_(False)
        if config.train_layers != "all":
            kept = [
                *getattr(model, self.head).parameters(),
                *(getattr(model, n) for n in ("gain", "offset") if hasattr(model, n)),
            ]
            if config.train_layers == "head_and_last":
                layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
                kept += [p for layer in layers[-config.last_layers :] for p in layer.parameters()]
            kept = {id(p) for p in kept if p.requires_grad}
            for p in model.parameters():
                p.requires_grad_(id(p) in kept)

    def settle(self, model) -> None:
        """The plain classifier that is published."""
        if hasattr(model, "gain"):
            with torch.no_grad():
                model.score.weight.copy_(model.gain * self.reserved(model)[0][None])
            del model.gain, model.offset
        if hasattr(model, "kept_lm_head"):
            del model.kept_lm_head

    def lm_head(self, model):
        return (
            (model.get_input_embeddings().weight, None)
            if self.tied
            else (model.kept_lm_head.weight, getattr(model.kept_lm_head, "bias", None))
        )

    def reserved(self, model):
        weight, bias = self.lm_head(model)
        return weight[self.pad], 0.0 if bias is None else bias[self.pad]

    def states(self, model, ids, first, router=None):
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        more = (
            {
                "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
                "token_type_ids": torch.tensor([[int(i >= first) for i in range(len(ids))]]),
            }
            if self.encoder
            else {"use_cache": False}
        )
        if self.pooling == "cls":
            return None, base(input_ids=torch.tensor([ids]), **more).logits[0]
        out = getattr(base, base.base_model_prefix)(
            input_ids=torch.tensor([ids]), **more, **({"output_router_logits": True} if router is not None else {})
        )
        if router is not None:
            router.append(out.router_logits)
        states = out.last_hidden_state[0]
        return states, getattr(base, self.head)

    def outputs(self, model, ids, mask, first, router=None):
        """(outputs of the head, states): of the sequence [C], or of every target [N, C]."""
        states, head = self.states(model, ids, first, router)
        if states is None:
            return head, None
        if not self.per_token:
            return head(states.mean(0) if self.pooling == "mean" else states[-1]), states
        states_of_targets = states[[i for i, m in enumerate(mask) if m]]
        if hasattr(model, "gain"):
            weight, bias = self.reserved(model)
            return (model.gain * (states_of_targets @ weight + bias) + model.offset)[:, None], states
        return head(states_of_targets), states

    def __call__(self, model, rows, share=None):
        config, kind = self.config, self.objective
        router = [] if config.router_aux_loss_coef and share is not None else None
        total, count, scores_seen, right, decided, words, spoken = 0.0, 0.0, [], 0.0, 0, 0.0, 0.0
        for row in rows:
            if self.labels:
                logps = logps_of(model, *row.sequences[0][:2], router)[0]
                total, count = total - row.weight * logps.sum(), count + row.weight * len(logps)
                right, decided = right + float(logps.detach().exp().sum()), decided + len(logps)
                continue
            found = [self.outputs(model, *sequence, router) for sequence in row.sequences]
            s = [o[..., 0] for o, _ in found]
            scores_seen += [] if self.per_token else [v.detach() for v in s]
            if kind in ("bt", "margin", "soft_label"):
                z = s[0] - s[1] - (row.more["margin"] if kind == "margin" or config.use_margin else 0.0)
                p = (
                    row.more["label_prob"] * (1 - config.label_smoothing)
                    + (1 - row.more["label_prob"]) * config.label_smoothing
                )
                loss, by = (
                    p * F.softplus(-z)
                    + (1 - p) * F.softplus(z)
                    + config.center_rewards_coefficient * (s[0] + s[1]) ** 2,
                    1.0,
                )
                right, decided = right + float(s[0] > s[1]), decided + 1
            elif kind == "pairwise":
                p = (
                    row.more["label_prob"] * (1 - config.label_smoothing)
                    + (1 - row.more["label_prob"]) * config.label_smoothing
                )
                a, b = torch.sigmoid(s[0]), torch.sigmoid(s[1])
                loss = (
                    -(p * torch.log(a) + (1 - p) * torch.log(1 - a) + (1 - p) * torch.log(b) + p * torch.log(1 - b)) / 2
                )
                by = 1.0
                right, decided = right + float(a > b), decided + 1
            elif kind in ("kwise_pairs", "plackett_luce", "control_tokens"):
                each = [F.softplus(s[j] - s[i]) for i, j in row.more["pairs"]]
                right, decided = right + float(sum(s[i] > s[j] for i, j in row.more["pairs"])), decided + len(each)
                if row.more.get("listwise"):
                    factors = [
                        torch.logsumexp(torch.stack(s[k:]), 0) - s[k]
                        for k in range(min(config.top_ranks or len(s), len(s) - 1))
                    ]
                    loss, by = sum(factors) / (len(s) - 1 if config.normalise_by_k else 1), 1.0
                elif kind == "plackett_luce" or kind == "kwise_pairs" and config.pair_weighting == "per_prompt":
                    loss, by = sum(each) / len(each), 1.0
                else:
                    loss, by = sum(each), float(len(each))
            elif kind == "regression":
                target = torch.tensor(row.more["targets"])
                error = (found[0][0] - target)[~target.isnan()]
                loss = (
                    error**2
                    if config.regression_loss == "mse"
                    else torch.where(error.abs() <= 1, error**2, 2 * error.abs() - 1)
                ).mean()
                by = 1.0
            elif kind == "prm":
                logs = torch.log_softmax(found[0][0], -1)
                classes = [label + 1 if config.step_classes == 3 else int(label >= 0) for label in row.more["labels"]]
                loss, by = -sum(logs[k, one] for k, one in enumerate(classes)), float(len(classes))
                right, decided = right + float((logs.argmax(-1) == torch.tensor(classes)).sum()), decided + len(classes)
            else:
                target = row.more["target"]
                each = (s[0] - target) ** 2 if kind == "value" else F.softplus(s[0]) - target * s[0]
                loss, by = each.sum(), float(each.numel())
                if kind != "value":
                    right, decided = right + float((s[0].flatten()[-1] > 0) == (target > 0.5)), decided + 1
            total, count = total + row.weight * loss, count + row.weight * by
            if config.lm_loss_weight:
                (ids, mask, _), states = row.sequences[0], found[0][1]
                at = [i for i, m in enumerate(mask) if m]
                weight, bias = self.lm_head(model)
                logits = F.linear(states[[i - 1 for i in at]], weight, bias)
                if self.softcap:
                    logits = self.softcap * torch.tanh(logits / self.softcap)
                words = words - row.weight * torch.log_softmax(logits, -1)[range(len(at)), [ids[i] for i in at]].sum()
                spoken += row.weight * len(at)
        total = total / max(count, 1e-12)
        if config.lm_loss_weight:
            total = total + config.lm_loss_weight * words / max(spoken, 1e-12)
        if router:
            total = total + config.router_aux_loss_coef * balance(router, model.config)
        return total, {
            **({"mean_reward": torch.stack(scores_seen).mean()} if scores_seen and kind != "pairwise" else {}),
            **({"label_probability" if self.labels else "accuracy": right / decided} if decided else {}),
        }


class Distill:
    def __init__(self, c, config):
        self.config, self.captured, self.teacher = config, c["data"] == "teacher_logps/1", None
        self.direction = (
            config.direction if config.method != "on_policy" or "direction" in config.model_fields_set else "jsd"
        )
        if config.objective == "iw_opd":
            self.direction = "reverse"

    def rows(self, rendered, rows, limit=None):
        config, self.rendered = self.config, rendered
        made = demonstrations(rendered, rows, config)
        if config.context is not None:
            for row in made:
                talk = row.more["messages"]
                last = max(row.more["turns"])
                asked = max(i for i, m in enumerate(talk[:last]) if m["role"] == "user")
                text = config.context.format(answer=talk[last]["content"], prompt=talk[asked]["content"])
                if "{prompt}" in config.context:
                    own = [*talk[:asked], {"role": "user", "content": text}, *talk[asked + 1 :]]
                elif talk[0]["role"] == "system":
                    own = [{"role": "system", "content": f"{text}\n\n{talk[0]['content']}"}, *talk[1:]]
                else:
                    own = [{"role": "system", "content": text}, *talk]
                row.more["read"] = own
                ids, mask = rendered.ids(
                    own,
                    [t + len(own) - len(row.more["messages"]) for t in row.more["turns"]],
                    config.train_on == "full",
                )
                mine, targets = row.sequences[0]
                same = [i for i, m in zip(ids, mask) if m][: sum(targets)] == [i for i, m in zip(mine, targets) if m]
                # where all tokens are trained, the teacher's begin with the context
                row.more["theirs"] = (ids, mask) if same else None
        return [row for row in made if row.more.get("theirs", ()) is not None][:limit]

    def parts(self, train) -> list[list[Row]]:
        return [train]

    def answered(self, model, rows) -> list[Row]:
        """Some rows with the most likely answer of the model as it is."""
        config, draws, found = self.config, counted_rng(SEED, "distill", "own answers", self.step).random(len(rows)), []
        for row, draw in zip(rows, draws):
            if draw < config.lmbda:
                prompt = self.rendered.tokenizer(
                    self.rendered.text(row.more["messages"][:-1], True), add_special_tokens=False
                )["input_ids"]
                ids = list(prompt)
                with torch.no_grad():
                    while len(ids) < len(prompt) + config.max_completion_length and (
                        len(ids) == len(prompt) or ids[-1] != self.rendered.tokenizer.eos_token_id
                    ):
                        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
                more = {**row.more, "own": True}
                if "read" in more:
                    read = self.rendered.tokenizer(
                        self.rendered.text(more["read"][:-1], True), add_special_tokens=False
                    )["input_ids"]
                    more["theirs"] = (
                        [*read, *ids[len(prompt) :]],
                        [0] * len(read) + [1] * (len(ids) - len(prompt)),
                    )
                row = Row([(ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt)))], row.weight, more)
            found.append(row)
        return found

    def __call__(self, model, rows, share=None):
        config, T = self.config, self.config.distillation_temperature
        router = [] if config.router_aux_loss_coef and share is not None else None
        soft = config.soft_weight
        if config.soft_weight_end is not None:
            done = (
                1.0
                if share is None
                else share
                if config.soft_weight_schedule == "linear"
                else (1 - math.cos(math.pi * share)) / 2
            )
            soft = soft + (config.soft_weight_end - soft) * done
        if share is not None and config.method == "on_policy":
            rows = self.answered(model, rows)
        apart, hard, tokens, seen = 0.0, 0.0, 0.0, []
        for row in rows:
            logps, _, every, _ = logps_of(model, *row.sequences[0], router)
            with torch.no_grad():
                theirs = logps_of(self.teacher, *row.more.get("theirs", row.sequences[0]))[2][: len(logps)]
            q, p = torch.log_softmax(every / T, -1), torch.log_softmax(theirs / T, -1)
            if self.captured:  # in float32, as the file has it
                top, at = p.topk(sweep.TOP_K, -1)
                p, q = (
                    (logs.gather(1, at), torch.log1p(-logs.gather(1, at).exp().sum(-1, keepdim=True)))
                    for logs in (p, q)
                )
                p = (
                    (p[0].to(torch.float32).double(), p[1].to(torch.float32).double())
                    if p[0].dtype == torch.float64
                    else p
                )
                if config.tail == "bucket":
                    p, q = torch.cat(p, -1), torch.cat(q, -1)
                else:
                    p, q = p[0] - (p[0].logsumexp(-1, keepdim=True) if config.tail == "renormalise" else 0.0), q[0]
            own = config.objective == "iw_opd" and row.more.get("own")
            if config.objective == "uld":
                value = (q.exp().sort(-1).values - p.exp().sort(-1).values).abs().sum(-1)
            elif own:
                at = torch.tensor([[i] for i, m in zip(*row.sequences[0]) if m])
                said, read = q.gather(1, at)[:, 0], p.gather(1, at)[:, 0]
                gained, gone = (read - said).tolist(), 0.0
                whole = max(sum(map(abs, gained)), 1e-8)
                for n, gain in enumerate(gained):
                    gained[n], gone = gain * (1 + config.iw_opd_gamma * (1 - gone / whole)), gone + abs(gain)
                value = -torch.tensor(gained, dtype=said.dtype) * said
            elif self.direction == "jsd":
                middle = torch.log(config.jsd_beta * p.exp() + (1 - config.jsd_beta) * q.exp())
                value = config.jsd_beta * (p.exp() * (p - middle)).sum(-1) + (1 - config.jsd_beta) * (
                    q.exp() * (q - middle)
                ).sum(-1)
            else:
                value = (p.exp() * (p - q)).sum(-1) if self.direction == "forward" else (q.exp() * (q - p)).sum(-1)
            seen.append((said - read if own else value).detach())
            if config.objective == "gold":  # every entry has its counterpart
                value = value * (1.0 if config.matched_weight is None else config.matched_weight)
                seen[-1] = value.detach()
            apart = apart + row.weight * T * T * value.sum()
            hard = hard - row.weight * logps.sum() * (not row.more.get("own"))
            tokens = tokens + row.weight * len(logps)
        total = (soft * apart + (1 - soft) * hard) / max(tokens, 1e-12)
        if router:
            total = total + config.router_aux_loss_coef * balance(router, model.config)
        name = "distance" if config.objective in ("uld", "gold") else "kl"
        return total, {name: torch.cat(seen).mean(), "trained_tokens": float(sum(map(len, seen)))}


# -- the run -----------------------------------------------------------------------------------------------------------


def rate(step: int, total: int, config) -> float:
    """Learning rate of a 0-based step, written out once more."""
    warm = (
        min(config.warmup_steps, total) if config.warmup_steps is not None else int(config.warmup_ratio * total + 1e-9)
    )
    peak, low = config.learning_rate, config.min_lr_ratio
    if step < warm:
        return peak * (step + 1) / warm
    kind, left = config.lr_schedule, total - warm
    if kind == "constant":
        return peak
    if kind == "inverse_sqrt":
        return peak * max(low, (max(1, warm) / (step + 1)) ** 0.5)
    if kind == "wsd":
        decay = round(config.decay_ratio * total)
        start = max(warm, total - decay)
        x, kind = max(0, step - start) / max(1, total - start), config.decay_type
    else:
        x = (step - warm) / max(1, left)
    if kind == "cosine_with_restarts":
        x = (x * config.lr_cycles) % 1.0
    share = {
        "linear": 1 - x,
        "cosine": (1 + math.cos(math.pi * x)) / 2,
        "cosine_with_restarts": (1 + math.cos(math.pi * x)) / 2,
        "polynomial": (1 - x) ** config.lr_power,
        "1-sqrt": 1 - x**0.5,
    }[kind]
    return peak * (low + (1 - low) * share)


def loaded(path: str, stage: str, c: dict, config):
    """The model in float64 as the stage starts from it."""
    if stage == "reward_model" and not c["objective"].startswith("t2t"):
        from stages.reward_models.reward_heads import new_reward_model

        with sweep.float64():
            outputs = (
                max(1, len(config.attributes))
                if c["objective"] == "regression"
                else config.step_classes
                if c["objective"] == "prm"
                else 1
            )
            model = new_reward_model(path, "cpu", seed_for(SEED, stage, "head"), outputs=outputs).double()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager" if c["model"] == "gemma2" else "sdpa"
        )
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def with_adapter(model, stage: str, config):
    from peft import LoraConfig, get_peft_model

    targets = config.lora_targets if config.lora_targets == "all-linear" else config.lora_targets.split(",")
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(SEED, stage, "lora") % 2**63)
        return get_peft_model(
            model,
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha or 2 * config.lora_rank,
                use_rslora=config.lora_rslora,
                use_dora=config.lora_dora,
                target_modules=targets,
                exclude_modules=[n for n in config.lora_exclude.split(",") if n] or None,
                modules_to_save=[n for n in config.lora_modules_to_save.split(",") if n] or None,
                task_type="SEQ_CLS" if hasattr(model, "score") or hasattr(model, "classifier") else "CAUSAL_LM",
            ),
        ).eval()


def replayed(stage: str, c: dict, world: sweep.World) -> dict:
    """{"steps": [{"loss", "grad_norm", "learning_rate", "epoch"}], "validation": [(step, loss, metrics)], "weights",
    "selected"}.
    """
    config = get_stage(stage).SPEC.config(**sweep.settings_of(stage, c))
    inputs = world.inputs(stage, c)
    model = loaded(inputs["model"], stage, c, config)
    objective = {"sft": Sft, "align": Align, "reward_model": Reward, "distill": Distill}[stage](c, config)
    if stage == "distill":
        objective.teacher = loaded(
            world.model(c["model"], 1) if objective.captured else inputs.get("teacher", inputs["model"]),
            stage,
            c,
            config,
        )
    if stage == "align":
        objective.reference = loaded(inputs.get("reference", inputs["model"]), stage, c, config)
        if not objective.method.needs_reference:
            objective.reference = copy.deepcopy(model)
    if stage == "reward_model":
        objective.prepare(model, inputs["model"], c, config)
    if config.lora_rank:
        model = with_adapter(model, stage, config)
        if stage == "reward_model" and not objective.labels:
            for parameter in getattr(model.get_base_model(), objective.head).parameters():
                parameter.requires_grad_(True)
    with in_float64():
        return _trained(stage, c, config, model, objective, inputs["data"], world)


def in_steps(parts: list[list[Row]], config, stage: str) -> list[tuple[list[Row], dict]]:
    """(rows, {"epoch"} or {"curriculum_stage"}) of every optimizer step: the parts one after the other, each shuffled
    anew in every one of its epochs.
    """
    sizes = [min(config.batch_size, len(part)) for part in parts]
    lengths = [-(-len(part) // size) for part, size in zip(parts, sizes)]
    counts = [max(1, round(config.num_train_epochs * n)) for n in lengths]
    if config.max_steps is not None:
        shares = [config.max_steps * n / sum(counts) for n in counts]
        counts = [math.floor(x + 1e-9) for x in shares]
        for k in sorted(range(len(parts)), key=lambda k: (-round(shares[k] - counts[k], 9), k))[
            : config.max_steps - sum(counts)
        ]:
            counts[k] += 1
    staged = getattr(config, "curriculum", "none") != "none"
    found = []
    for k, (part, size, length, count) in enumerate(zip(parts, sizes, lengths, counts)):
        for step in range(count):
            epoch, index = divmod(step, length)
            order = counted_rng(SEED, stage, "order", epoch).permutation(len(part))
            found.append(
                (
                    [part[i] for i in order[index * size : (index + 1) * size]],
                    {"curriculum_stage": float(k)} if staged else {"epoch": (step + 1) / length},
                )
            )
    return found


def _trained(stage: str, c: dict, config, model, objective, data: str, world: sweep.World) -> dict:
    rendered = Rendered(world.tokenizer)
    kind = data.rsplit("rows-", 1)[1].replace("-", "/") if "rows-" in data else "demonstrations/1"
    rows = sweep.rows_of(kind)
    train = objective.rows(rendered, [r for r in rows if r["split"] == "train"])
    held = objective.rows(rendered, [r for r in rows if r["split"] == "validation"], config.eval_rows)
    steps = in_steps(objective.parts(train), config, stage)
    total = len(steps)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(
            groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon
        ),
        "sgd": lambda: torch.optim.SGD(groups, lr=1.0, momentum=config.momentum or 0.0),
        "adafactor": lambda: torch.optim.Adafactor(groups),
    }[config.optimizer]()
    average = {n: p.detach().clone() for n, p in trained.items()} if config.ema_decay or config.bema else None
    unbiased = Unbiased(config.bema, trained) if config.bema else None
    ahead = None
    if stage == "align" and config.reference_update == "bema":
        plain = copy.deepcopy(model).merge_and_unload() if config.lora_rank else model
        ahead = Unbiased(config.reference_bema, dict(plain.named_parameters()))
    every = {"epoch": max(1, -(-len(train) // config.batch_size))}.get(config.eval_every, config.eval_every)
    found, best, patience = {"steps": [], "validation": [], "rows": len(train)}, None, 0

    def put(values):
        with torch.no_grad():
            for n, p in trained.items():
                p.copy_(values[n])

    def validate(step):
        nonlocal best, patience
        if not held:
            return False
        kept = {n: p.detach().clone() for n, p in trained.items()}
        if average is not None:
            put(average)
        with torch.no_grad():
            loss, metrics = objective(model, held)
        found["validation"].append((step, float(loss), {k: float(v) for k, v in metrics.items()}))
        if config.select_by:
            if best is None or float(loss) < best[0]:
                best, patience = (float(loss), step, {n: p.detach().clone() for n, p in trained.items()}), 0
            else:
                patience += 1
        put(kept)
        return bool(config.select_by) and 0 < config.early_stopping_patience <= patience

    validate(0)
    stopped = False
    for step, (chosen, epochs) in enumerate(steps):
        objective.step = step
        optimizer.zero_grad()
        loss, metrics = objective(model, chosen, share=step / max(1, total - 1))
        if loss.requires_grad:
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), config.max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = rate(step, total, config)
        optimizer.step()
        if unbiased is not None:
            moved = unbiased.after_step(trained)
            burning_in = unbiased.t < config.bema.update_after + config.bema.update_freq
            average = moved or ({n: p.detach().clone() for n, p in trained.items()} if burning_in else average)
        elif average is not None:
            for n, a in average.items():
                a.mul_(config.ema_decay).add_(trained[n].detach(), alpha=1 - config.ema_decay)
        getattr(objective, "after_step", lambda: None)()
        found["steps"].append(
            {
                "loss": float(loss),
                "grad_norm": norm,
                "learning_rate": rate(step, total, config),
                **epochs,
                **{k: float(v) for k, v in metrics.items()},
            }
        )
        if ahead is not None:
            plain = copy.deepcopy(model).merge_and_unload() if config.lora_rank else model
            moved = ahead.after_step(dict(plain.named_parameters()))
            if moved and (step + 1 - config.reference_bema.update_after) % config.reference_interval == 0:
                with torch.no_grad():
                    for n, p in objective.reference.named_parameters():
                        p.copy_(moved[n])
        elif (
            stage == "align"
            and config.reference_update != "frozen"
            and (config.reference_update == "ema" or (step + 1) % config.reference_interval == 0)
        ):
            keep = {"ema": config.reference_decay, "tr_soft": 1 - config.reference_alpha, "per_interval": 0.0}[
                config.reference_update
            ]
            plain = copy.deepcopy(model).merge_and_unload() if config.lora_rank else model
            with torch.no_grad():
                for a, b in zip(objective.reference.parameters(), plain.parameters()):
                    a.mul_(keep).add_(b, alpha=1 - keep)
        if stage == "distill" and config.teacher_update == "ema":
            plain = copy.deepcopy(model).merge_and_unload() if config.lora_rank else model
            with torch.no_grad():
                for a, b in zip(objective.teacher.parameters(), plain.parameters()):
                    a.mul_(config.teacher_decay).add_(b, alpha=1 - config.teacher_decay)
        if every and (step + 1) % every == 0 and step + 1 < total and validate(step + 1):
            stopped = True
            break
    if not stopped:
        validate(len(found["steps"]))
    put(best[2] if best else average if average is not None else {n: p.detach().clone() for n, p in trained.items()})
    getattr(objective, "settle", lambda model: None)(model)
    plain = model.merge_and_unload() if config.lora_rank else model
    with tempfile.TemporaryDirectory() as folder:  # names and shapes as files have them
        plain.save_pretrained(Path(folder, "out/model"))
        return {**found, "weights": sweep.weights(Path(folder)), "selected": best and best[1]}


class Unbiased:
    """BEMA by its formulas, in new tensors at every update."""

    def __init__(self, config, start):
        self.config, self.t = config, 0
        self.start = self.mean = {n: p.detach().clone() for n, p in start.items()}

    def after_step(self, now) -> dict | None:
        """The average, where this step gives one."""
        config, self.t = self.config, self.t + 1
        now = {n: p.detach().clone() for n, p in now.items()}
        if self.t == config.update_after:
            self.start = self.mean = now
        if self.t <= config.update_after or (self.t - config.update_after) % config.update_freq:
            return None
        age = config.lag + config.multiplier * self.t
        beta, alpha = max(age**-config.ema_power, config.min_ema_multiplier), age**-config.bias_power
        self.mean = {n: (1 - beta) * w + beta * now[n] for n, w in self.mean.items()}
        return {n: w + alpha * (now[n] - self.start[n]) for n, w in self.mean.items()}


def differences(stage: str, c: dict, run: Path, plain: dict, tolerance: float = 1e-6) -> list[str]:
    """What a run of the stage says or publishes otherwise."""
    said = []

    loose = c["forward"] == "model" and c["model"] not in ("gpt2", "gpt-neox")  # whose norms round to float32

    def differ(what, ours, theirs, within=2e-5 if loose else tolerance):
        if not abs(ours - theirs) <= within * max(1.0, abs(theirs)):
            said.append(f"{what}: {ours} for {theirs}")

    if loose:
        tolerance = 1e-3
    rows = sweep.metrics(run)
    steps = [r for r in rows if "loss" in r]
    if len(steps) != len(plain["steps"]):
        return [f"{len(steps)} steps for {len(plain['steps'])}"]
    of_held_out_rows = stage == "align" and not DIRECT_METHODS[c["method"]].needs_reference
    for ours, theirs in zip(steps, plain["steps"]):
        for name, value in theirs.items():
            if name in ours:
                differ(f"step {ours['step']} {name}", ours[name], value)
            elif not (of_held_out_rows and name.startswith("displacement/")):
                said.append(f"step {ours['step']}: no {name}")
    judged = [(r["step"], r) for r in rows if "validation/loss" in r]
    if [s for s, _ in judged] != [s for s, *_ in plain["validation"]]:
        said.append(f"validated at {[s for s, _ in judged]} for {[s for s, *_ in plain['validation']]}")
    for (step, ours), (_, loss, metrics) in zip(judged, plain["validation"]):
        differ(f"validation loss at {step}", ours["validation/loss"], loss)
        for name, value in metrics.items():
            if f"validation/{name}" in ours:
                differ(f"validation {name} at {step}", ours[f"validation/{name}"], value)
            else:
                said.append(f"validation at {step}: no {name}")
    published = sweep.weights(run)
    for name, value in published.items():
        if name not in plain["weights"]:
            said.append(f"no weight {name}")
        # Adam steps by the learning rate also where a gradient is nothing but rounding
        elif not torch.allclose(
            value.double(), plain["weights"][name], rtol=0, atol=10 * tolerance * max(1.0, c["learning_rate"] / 1e-3)
        ):
            said.append(f"weight {name}: off by {float((value - plain['weights'][name]).abs().max()):.2e}")
    return said
