"""Trained reward models at work: responses in, one calibrated number each.

    scorer = load_scorer(path, device)
    scores = scorer.score([Response(prompt_messages, completion_messages), ...])

A response is text (messages): it is rendered with the *reward model's* own template and tokenizer, so any reward model
scores any policy. Only when both are identical are the policy's token ids taken as they are
(:meth:`Scorer.reads_ids_of`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stages.batching import make_item, per_response
from stages.models.modeling import ModelError
from stages.pairs import both_orders, cut
from stages.reward_models.reward_heads import (
    ChatReader,
    PlainReader,
    RewardCard,
    has_card,
    load_frozen_reward,
    read_card,
    reader_for,
    response_outputs,
    token_outputs,
)


@dataclass(frozen=True)
class Response:
    """What is scored. prompt, completion: messages; ids: prompt and completion ids of the policy that wrote it, where
    known; start: how many of these ids are the prompt; row: the prompt row, for facts and safety tags; group: what it
    is compared within by models that compare, its prompt where None (two draws of a prompt are two groups); ended:
    False for an answer that was cut, which gets no end token."""

    prompt: list[dict]
    completion: list[dict]
    ids: Sequence[int] | None = None
    row: dict | None = None
    group: Hashable = None
    start: int = 0
    ended: bool = True

    @property
    def text(self) -> str:
        return "\n".join(m.get("content") or "" for m in self.completion)


class Scorer:
    """A frozen reward model. ``disagreement`` holds one spread per response after :meth:`score`, None where there is
    one model, ``beside`` other numbers per response, by name.
    """

    relative = False  # True: a score compares the responses of one prompt with each other
    needs_group = False  # True: it scores in the context of a group (stages/reward_models/preference_module.py)
    why_not = "the reward model reads no token of it"
    beside: Mapping[str, list[float | None]] = {}

    def __init__(
        self,
        path: str,
        card: RewardCard,
        device: str = "cpu",
        max_tokens: int = 8192,
        model=None,
        reader=None,
        frozen: str = "auto",
    ):
        self.path, self.card, self.device, self.max_tokens, self.frozen = path, card, device, max_tokens, frozen
        self.bias = card.bias
        self.disagreement: list[float] | None = None
        self.model, self.reader = model, reader
        if model is None:
            self.load()

    def load(self) -> None:
        self.model = load_frozen_reward(self.path, self.device, self.frozen)
        self.reader = reader_for(self.path, self.model, self.card.max_length, self.card.pooling, self.card.template())

    def score(self, responses: Sequence[Response]) -> list[float]:
        """Calibrated score of each response, in order."""
        raise NotImplementedError

    def reads_ids_of(self, renderer) -> bool:
        """Whether the token ids of a policy can be scored as they are: same template, same vocabulary."""
        return False

    def lengths(self, responses: Sequence[Response]) -> list[int]:
        """Tokens of each response, as this model reads them."""
        return [len(self.reader.plain(r.text)) for r in responses]

    def _prompt(self, response: Response) -> list[dict]:
        from stages.reward_models.reward_data import with_facts

        return with_facts(response.row or {}, response.prompt, bool(self.card.options.get("facts")))

    def _item(self, response: Response, words: list[str] | None = None):
        """The response as training read it, cut the same way; with ``words`` once behind each of them."""
        from collections import Counter

        from stages.reward_models.reward_data import Drop, build

        times = len(words) if words else 1
        try:
            return build(
                self.reader,
                {"row_id": "scored"},
                self._prompt(response),
                [response.completion] * times,
                Counter(),
                counts={},
                words=words,
                ends=[response.ended] * times,
            )
        except Drop:
            return None

    def _outputs(self, items, read) -> list:
        return [values[0] for values in per_response(items, self.max_tokens, self.device, read, self.model)]

    def _over_items(self, responses, read) -> list:
        """``read(batch) -> one value per response`` over the responses that have a token; NaN for the others."""
        items = [self._item(r) for r in responses]
        found = iter(self._outputs([i for i in items if i is not None], read))
        return [next(found) if item is not None else math.nan for item in items]


class ScalarScorer(Scorer):
    """``rm.head``: the score is the head's output plus the calibration bias."""

    def load(self) -> None:
        super().load()
        if type(self.reader) is ChatReader and not has_card(self.path):
            self.reader = PlainReader(self.reader.renderer, self.reader.max_length, self.model.config.pad_token_id)

    def score(self, responses):
        # each by what is known of it, whatever the others are
        known = [r for r in responses if r.ids is not None]
        texts = [r for r in responses if r.ids is None]
        by_ids = iter(self.score_ids([list(r.ids) for r in known], [r.start for r in known]) if known else ())
        by_text = iter([v + self.bias for v in self._over_items(texts, self._read)] if texts else ())
        return [next(by_text if r.ids is None else by_ids) for r in responses]

    def _read(self, batch) -> list[float]:
        return self._scalar(response_outputs(self.model, batch, self.card.pooling))

    def _scalar(self, outputs_SC) -> list[float]:
        return outputs_SC[:, 0].tolist()

    def reads_ids_of(self, renderer) -> bool:
        return (
            renderer is not None
            and type(self.reader) is ChatReader
            and not self.reader.merged
            and not self.card.options.get("facts")
            and self.reader.renderer.template_hash == renderer.template_hash
            and self.reader.tokenizer.get_vocab() == renderer.tokenizer.get_vocab()
        )

    def score_ids(self, rows: list[list[int]], starts: Sequence[int] | None = None) -> list[float]:
        """Calibrated scalar of each token-id row, in the order given. Length-sorted inside (``rs.length_sort``).

        starts: where the response of each row begins; a row with more tokens than the model reads is cut there as in
        training, and gets NaN where its response is not told.
        """
        if any(not len(row) for row in rows):
            raise ModelError("A reward model cannot score an empty row; give at least one token.")
        room = self.reader.room
        if starts is not None:
            rows = [_cut_ids(row, start, room) for row, start in zip(rows, starts)]
        items = [make_item(str(i), [], [row], [[0] * len(row)]) for i, row in enumerate(rows) if len(row) <= room]
        found = iter(self._outputs(items, self._read))
        return [next(found) + self.bias if len(row) <= room else math.nan for row in rows]


def _cut_ids(row: list[int], start: int, room: int) -> list[int]:
    """A prompt and, from ``start`` on, its response within ``room`` tokens, cut as :func:`build` cuts them."""
    prompt, ((response, _),), _ = cut(row[:start], [(row[start:], [])], room)
    return [*prompt, *response]


class ControlScorer(Scorer):
    """``rm.pmp`` by control tokens: r(GOOD:x) - r(BAD:x), the log-odds that the answer x is a good one."""

    def _item(self, response):
        from stages.reward_models.reward_data import CONTROL_WORDS

        return super()._item(response, list(self.card.options.get("label_words") or CONTROL_WORDS))

    def score(self, responses):
        return [v + self.bias for v in self._over_items(responses, self._read)]

    def _read(self, batch) -> list[float]:
        return response_outputs(self.model, batch, self.card.pooling)[:, 0].tolist()

    def _outputs(self, items, read):
        both = per_response(items, self.max_tokens, self.device, read, self.model)
        return [good - bad for good, bad in both]


class RatingScorer(ScalarScorer):
    """``rm.regression``: outputs back on the rating scale, then their weighted sum over attributes."""

    def _scalar(self, outputs_SC):
        options = self.card.options
        ratings = outputs_SC * outputs_SC.new_tensor(options["std"]) + outputs_SC.new_tensor(options["mean"])
        return (ratings @ ratings.new_tensor(options["weights"])).tolist()


class ValueScorer(Scorer):
    """``rm.value``: the value predicted at the last token."""

    def score(self, responses):
        return [
            v + self.bias
            for v in self._over_items(responses, lambda batch: self._along(token_outputs(self.model, batch), batch))
        ]

    def _along(self, outputs_NC, batch) -> list[float]:
        return [self._one(values) for values in self._split(outputs_NC, batch)]

    def _split(self, outputs_NC, batch) -> list[np.ndarray]:
        """Outputs of each response's own tokens, in order."""
        counts = np.bincount(batch.seq_N.cpu().numpy(), minlength=batch.mask_SL.shape[0])
        return np.split(outputs_NC.double().cpu().numpy(), np.cumsum(counts)[:-1])

    def _one(self, values) -> float:
        return float(values[-1, 0])


class OutcomeScorer(ValueScorer):
    """``rm.orm``: probability that the answer is right, at the last token, or its mean or minimum along the
    solution.
    """

    def _one(self, values):
        p = 1.0 / (1.0 + np.exp(-(values[:, 0] + self.card.options.get("offset", 0.0))))
        return float(
            {"last": lambda: p[-1], "mean": p.mean, "min": p.min}[self.card.options.get("aggregation", "last")]()
        )


class StepScorer(ValueScorer):
    """``rm.prm``: step probabilities, aggregated. ``step_probabilities`` gives them one by one."""

    def _item(self, response):
        from stages.reward_models.reward_data import Drop, step_item

        options = self.card.options
        steps = split_steps(response.text, options["separator"])
        try:
            return step_item(
                self.reader,
                {"row_id": "scored"},
                self._prompt(response),
                steps,
                options["separator"],
                [[0.0]] * len(steps),
            )
        except Drop:
            return None

    def _one(self, values):
        return aggregate_steps(self._positive(values), self.card.options.get("aggregation", "prod"))

    @staticmethod
    def _classes(values) -> np.ndarray:
        z = np.exp(values - values.max(-1, keepdims=True))
        return z / z.sum(-1, keepdims=True)

    def _positive(self, values) -> np.ndarray:
        return positive(self._classes(values), self.card.options.get("neutral_as", "positive"))

    def step_classes(self, responses) -> list[list[list[float]]]:
        """Probability of each class (wrong, right; or wrong, neutral, right) of every step of every response; an empty
        list where nothing could be read.
        """
        return self._steps(responses, self._classes)

    def step_probabilities(self, responses) -> list[list[float]]:
        """P(step is right) of every step of every response; an empty list where nothing could be read."""
        return self._steps(responses, self._positive)

    def _steps(self, responses, of) -> list[list]:
        found = self._over_items(
            responses, lambda batch: [of(v).tolist() for v in self._split(token_outputs(self.model, batch), batch)]
        )
        return [f if isinstance(f, list) else [] for f in found]


def split_steps(text: str, separator: str) -> list[str]:
    """Non-empty steps of a solution's text."""
    return [step for step in text.split(separator) if step.strip()]


def positive(classes, neutral_as: str = "positive") -> np.ndarray:
    """P(step counts as right) from class probabilities ``[steps, 2 or 3]``; a neutral class counts as told
    (``rm.prm``).
    """
    classes = np.asarray(classes, float)
    return classes[:, -1] + (classes[:, 1] if classes.shape[1] == 3 and neutral_as == "positive" else 0.0)


def aggregate_steps(p, how: str = "prod") -> float:
    """One solution score from step probabilities: ``prod`` (Lightman), ``min``, ``mean`` or ``last``; no step gives
    NaN.
    """
    p = np.asarray(p, float)
    if not p.size:
        return math.nan
    if how not in ("prod", "min", "mean", "last"):
        raise ValueError(f"aggregation={how!r} of step scores is unknown; write prod, min, mean or last")
    return float(p[-1] if how == "last" else getattr(p, how)())


# -- models that compare -----------------------------------------------------------------------------------------------


class ComparingScorer(Scorer):
    """A model that says which of two responses is better. As a scalar, by ``ranking``: mean win probability against the
    other responses of the same prompt (``round_robin``, ``rs.rank``), how far it came in a knock-out of m - 1
    comparisons (``tournament``, ``rm.t2t_pair``; the champion gets 1), or logit P(y > y_b) with y_b one of the
    responses, drawn by their text (``baseline``, the reward of ``rs.rso``; y_b gets 0). A response without a rival gets
    0.5, or the logit 0."""

    relative = True
    ranking = "round_robin"

    def preferences(self, pairs: Sequence[tuple[Response, Response]]) -> list[float]:
        """P(first is better) of each pair, both presentation orders averaged (:func:`stages.pairs.both_orders`)."""
        both = self.one_order([*pairs, *[(b, a) for a, b in pairs]])
        forward, backward = np.asarray(both[: len(pairs)]), np.asarray(both[len(pairs) :])
        self.inconsistency = np.abs(forward + backward - 1).tolist()
        return both_orders(forward, backward).tolist()

    def one_order(self, pairs) -> list[float]:
        """P(first is better) with the first shown first."""
        raise NotImplementedError

    def score(self, responses):
        from stages.selection import intransitive, round_robin

        cycles: list[float | None] = [None] * len(responses)
        self.beside = {"intransitive": cycles}
        scores = [0.0 if self.ranking == "baseline" else 0.5] * len(responses)
        for members in same_prompt(responses):
            if self.ranking == "baseline":
                drawn = members[drawn_by_text([responses[i] for i in members])]
                others = [i for i in members if i != drawn]
                p = np.clip(
                    self.preferences([(responses[i], responses[drawn]) for i in others]) if others else [],
                    1e-12,
                    1 - 1e-12,
                )
                for i, value in zip(others, np.log(p / (1 - p))):
                    scores[i] = float(value)
                continue
            if self.ranking == "tournament" and len(members) > 1:
                games, champion = self.best([responses[i] for i in members])
                depth = [0] * len(members)
                for winner, loser in games:
                    depth[winner] = max(depth[winner], depth[loser]) + 1
                for i, reached in zip(members, depth):
                    scores[i] = reached / depth[champion]
                continue
            table = np.full((len(members), len(members)), 0.5)
            index = [(i, j) for i in range(len(members)) for j in range(i + 1, len(members))]
            for (i, j), p in zip(
                index,
                self.preferences([(responses[members[i]], responses[members[j]]) for i, j in index]) if index else [],
            ):
                table[i, j], table[j, i] = p, 1 - p
            mean, _ = round_robin(table)
            cyclic = intransitive(table)  # what no score per response can say
            for member, value in zip(members, mean):
                scores[member], cycles[member] = float(value) if len(members) > 1 else 0.5, cyclic
        return scores

    def best(self, responses: Sequence[Response]) -> tuple[list[tuple[int, int]], int | None]:
        """Knock-out tournament: (winner, loser) pairs in order of play, and the champion's index (``rm.t2t_pair``)."""
        from stages.selection import tournament

        return tournament(len(responses), lambda i, j: self.preferences([(responses[i], responses[j])])[0] >= 0.5)


def drawn_by_text(responses: Sequence[Response]) -> int:
    """Place of one of the responses, as good as drawn: by a digest of all their texts, so that the same responses give
    the same one in every run.
    """
    import hashlib

    return int.from_bytes(
        hashlib.sha256("\0".join(r.text for r in responses).encode("utf-8", "surrogatepass")).digest()[:8], "big"
    ) % len(responses)


def same_prompt(responses: Sequence[Response]) -> list[list[int]]:
    """Indices of the responses of each ``group``, or of each prompt where they have none, in order of first
    appearance.
    """
    import json

    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, response in enumerate(responses):
        groups[
            json.dumps(response.prompt, sort_keys=True, default=str) if response.group is None else response.group
        ].append(i)
    return list(groups.values())


def score_in_blocks(stage, name: str, scorer: Scorer, responses: Sequence[Response]) -> list[float]:
    """Scores of all responses, block by block (:mod:`stages.running.blocks`); what is compared with each other is
    scored together.
    """
    from stages.running.blocks import in_blocks

    units = same_prompt(responses) if scorer.relative else [[i] for i in range(len(responses))]

    def scores(part):
        found = iter(scorer.score([responses[i] for unit in part for i in unit]))
        return [[next(found) for _ in unit] for unit in part]

    out = [math.nan] * len(responses)
    for unit, values in zip(
        units,
        in_blocks(
            stage, name, units, scores, 64 if scorer.relative else 512, "prompts" if scorer.relative else "responses"
        ),
    ):
        for i, value in zip(unit, values):
            out[i] = value
    return out


class PairwiseScorer(ComparingScorer):
    """``rm.pairwise``: one logit for two responses in one context."""

    def one_order(self, pairs):
        from stages.reward_models.reward_data import comparison_ids

        rows = [
            self.reader.wrap([], ids, [1] * len(ids))
            for ids in (comparison_ids(self.reader, self._prompt(a), a.completion, b.completion)[0] for a, b in pairs)
        ]
        items = [make_item("scored", prompt, [ids], [mask], first=(first,)) for prompt, ids, mask, first in rows]
        logits = self._outputs(
            items, lambda batch: response_outputs(self.model, batch, self.card.pooling)[:, 0].tolist()
        )
        return [1.0 / (1.0 + math.exp(-z)) for z in logits]


class LabelScorer(Scorer):
    """A causal LM whose next word is the label: P(word) over the full vocabulary, or normalised over the words."""

    words_by_default: tuple[str, ...] = ()

    def load(self) -> None:
        from stages.models.modeling import load_frozen

        self.model = load_frozen(self.path, self.device, self.frozen)
        self.reader = reader_for(self.path, self.model, self.card.max_length, template=self.card.template())

    @property
    def words(self) -> list[str]:
        return self.card.options.get("label_words") or list(self.words_by_default)

    @property
    def templates(self) -> tuple[str, str]:
        """What it was trained to read of one response, and of two."""
        from stages.reward_models.reward_data import LABEL_REQUESTS

        return LABEL_REQUESTS[self.card.options.get("label_request") or "sections"]

    def word_logps(self, requests: list[list[int]], words: Sequence[str]) -> np.ndarray:
        """Log-probability of every label word behind every request ``[requests, words]``; words of several tokens
        multiply.
        """
        from stages.models.modeling import target_logps

        ids = [self.reader.plain(word) for word in words]
        items = [
            make_item(str(i), request, ids, [[1] * len(word) for word in ids], by_response=())
            for i, request in enumerate(requests)
        ]

        def read(batch):
            sums = torch.zeros(batch.mask_SL.shape[0], dtype=torch.float64)
            return sums.index_add_(0, batch.seq_N.cpu(), target_logps(self.model, batch)[0].double().cpu()).tolist()

        return np.array(per_response(items, self.max_tokens, self.device, read, self.model)).reshape(
            len(requests), len(words)
        )


def label_probability(logps, normalise_over_labels: bool) -> np.ndarray:
    """P(first word) of each row of word log-probs ``[n, words]``; over the full vocabulary unless normalised
    (``rm.t2t_point``).
    """
    logps = np.asarray(logps, float)
    if not normalise_over_labels:
        return np.exp(logps[:, 0])
    shifted = np.exp(logps - logps.max(1, keepdims=True))
    return shifted[:, 0] / shifted.sum(1)


class PointLabelScorer(LabelScorer):
    """``rm.t2t_point``: the score is P(Good)."""

    words_by_default = ("Good", "Bad")

    def score(self, responses):
        from stages.reward_models.reward_data import fill
        from stages.reward_models.reward_heads import transcript

        requests = [
            fill(self.reader, self.templates[0], context=transcript(self._prompt(r)), a=transcript(r.completion))[0]
            for r in responses
        ]
        normalise = bool(self.card.options.get("normalise_over_labels"))
        return (
            [float(p) + self.bias for p in label_probability(self.word_logps(requests, self.words), normalise)]
            if requests
            else []
        )


class PairLabelScorer(LabelScorer, ComparingScorer):
    """``rm.t2t_pair``: P(A), normalised over the two letters."""

    words_by_default = ("A", "B")

    def one_order(self, pairs):
        from stages.reward_models.reward_data import comparison_ids

        requests = [
            comparison_ids(self.reader, self._prompt(a), a.completion, b.completion, self.templates[1])[0]
            for a, b in pairs
        ]
        return label_probability(self.word_logps(requests, self.words), True).tolist() if requests else []


# -- models made of models ---------------------------------------------------------------------------------------------


class ImplicitScorer(Scorer):
    """``rm.implicit``: beta (log pi(y|x) - log ref(y|x)) of a tuned policy and its reference, sums over the response's
    tokens.
    """

    def load(self) -> None:
        from stages.models.modeling import load_frozen

        self.policy, self.reference = (
            load_frozen(str(Path(self.path, name)), self.device, self.frozen) for name in ("policy", "reference")
        )
        self.reader = reader_for(
            str(Path(self.path, "policy")), self.policy, self.card.max_length, template=self.card.template()
        )

    def score(self, responses):
        from stages.decoding.likelihood import response_logps
        from stages.losses import implicit_rewards

        items = [self._item(r) for r in responses]
        real = [i for i in items if i is not None]
        mine, theirs = (
            np.array([sum(row[0]) for row in response_logps(m, real, self.max_tokens, self.device)])
            for m in (self.policy, self.reference)
        )
        found = iter((implicit_rewards(mine, theirs, self.card.options["beta"]) + self.bias).tolist())
        return [next(found) if item is not None else math.nan for item in items]


class CombinedScorer(Scorer):
    """Several calibrated models as one: ``rm.ensemble`` (mean, min, uwo), ``rm.multi`` (weighted, safety_gate)."""

    def load(self) -> None:
        self.members = {
            name: load_scorer(str(Path(self.path, "members", name)), self.device, self.max_tokens, self.frozen)
            for name in self.card.options["members"]
        }
        first = next(iter(self.members.values()))
        self.reader, self.relative = first.reader, any(m.relative for m in self.members.values())

    def reads_ids_of(self, renderer) -> bool:
        return all(m.reads_ids_of(renderer) for m in self.members.values())

    def score(self, responses):
        table = {name: member.score(responses) for name, member in self.members.items()}
        self.table = table
        self.beside = {f"member_{name}": scores for name, scores in table.items()}
        self.disagreement = np.std(list(table.values()), axis=0).tolist() if responses else []
        return [v + self.bias for v in combine_members(table, self.card.options, [r.row for r in responses])]


def combine_members(table: dict[str, list[float]], options: dict, rows: Sequence[dict | None]) -> list[float]:
    """One score per response from the calibrated scores of several models.

    ``mean``, ``min``, ``uwo`` (mean - uncertainty_coef * population variance), ``weighted`` (weights sum to 1; of scores
    with mean 0 and standard deviation 1 on the anchor's answers where ``standard`` has both), ``safety_gate`` (Llama 2).
    """
    from stages.selection import combine_scores, weighted_score

    how = options["combine"]
    if how in ("mean", "min", "uwo"):
        return combine_scores(list(table.values()), options.get("uncertainty_coef", 0.1))[how].tolist()
    if how == "weighted":
        names, standard = list(options["weights"]), options.get("standard", {})
        table = {
            n: [(s - standard[n][0]) / standard[n][1] for s in v] if n in standard else v for n, v in table.items()
        }
        return [
            weighted_score([table[n][i] for n in names], [options["weights"][n] for n in names])
            for i in range(len(rows))
        ]
    if how == "safety_gate":
        tagged = [bool(row) and "safety" in (row.get("category"), row.get("domain")) for row in rows]
        # scores are logits: the gate is at that of the threshold, and what it lets through need not be squashed
        threshold = options.get("safety_threshold", 0.15)
        least = math.log(threshold / (1 - threshold))
        return safety_gate(table[options["helpful"]], table[options["safety"]], tagged, least).tolist()
    raise ValueError(f"combine={how!r} is unknown; write mean, min, uwo, weighted or safety_gate")


def safety_gate(helpful, safety, safety_prompt, threshold: float = 0.15) -> np.ndarray:
    """The safety score where the prompt is a safety prompt or safety < threshold, else helpfulness; all in (0, 1), or
    all logits of such (``rm.multi``, Llama 2).
    """
    safety = np.asarray(safety, float)
    return np.where(np.asarray(safety_prompt, bool) | (safety < threshold), safety, np.asarray(helpful, float))


def load_scorer(path: str, device: str = "cpu", max_tokens: int = 8192, frozen: str = "auto") -> Scorer:
    """The scorer of a reward-model directory, as its card says; ``frozen``: how its matrices are kept
    (``frozen_dtype``).

    Raises:
        ModelError: no reward model in the directory.
    """
    from stages.algorithms import resolve
    from stages.reward_models.reward_objectives import REWARD_OBJECTIVES

    card = read_card(path)
    if card.objective == "combined":
        return CombinedScorer(path, card, device, max_tokens, frozen=frozen)
    if card.objective == "implicit":
        return ImplicitScorer(path, card, device, max_tokens, frozen=frozen)
    if card.objective == "group_preference":
        return resolve("stages.reward_models.preference_module:GroupPreferenceScorer")(path, card, device, max_tokens)
    if card.objective not in REWARD_OBJECTIVES:
        raise ModelError(
            f"{path} was written with objective {card.objective!r}, which this version does not know; train it again"
            f" with one of: {', '.join(REWARD_OBJECTIVES)}."
        )
    return resolve(REWARD_OBJECTIVES[card.objective].score)(path, card, device, max_tokens, frozen=frozen)
