"""In-context scores without training: how much demonstrations raise the likelihood of an answer (``rs.icdpo``, Song et
al.).

S(x, y) = log p(y | d, x) - log p(y | x), sums over the tokens of y, one frozen model before and after it has read
demonstrations d. The demonstrations of a prompt are retrieved in two steps that depend on nothing but the texts and the
model: TF-IDF cosine of the prompts keeps the nearest ``coarse``, cosine of the model's mean hidden states orders them.
Ties go to the earlier row; a demonstration of the prompt itself is never taken.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from stages.batching import make_item, per_response


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


class TfIdf:
    """Cosine similarity of texts to a fixed list of texts, by words weighted with log((1 + n) / (1 + df)) + 1."""

    def __init__(self, texts: Sequence[str]):
        counts = [Counter(words(text)) for text in texts]
        seen = Counter(word for count in counts for word in count)
        self.idf = {word: math.log((1 + len(texts)) / (1 + n)) + 1 for word, n in seen.items()}
        self.entries: dict[str, list[tuple[int, float]]] = {}
        for i, count in enumerate(counts):
            for word, weight in self._weights(count).items():
                self.entries.setdefault(word, []).append((i, weight))
        self.size = len(texts)

    def _weights(self, count: Counter) -> dict[str, float]:
        weights = {word: n * self.idf[word] for word, n in sorted(count.items()) if word in self.idf}
        norm = math.sqrt(sum(w * w for w in weights.values())) or 1.0
        return {word: w / norm for word, w in weights.items()}

    def similarities(self, text: str) -> np.ndarray:
        """``[n]``, between 0 and 1."""
        out = np.zeros(self.size)
        for word, weight in self._weights(Counter(words(text))).items():
            for i, other in self.entries[word]:
                out[i] += weight * other
        return out


def nearest(similarities, k: int) -> list[int]:
    """Indices of the k largest, best first, ties to the lower index."""
    return [int(i) for i in np.argsort(-np.round(np.asarray(similarities, float), 9), kind="stable")[:k]]


def with_demonstrations(prompt: list[dict], demonstrations: Sequence[tuple[list[dict], list[dict]]]) -> list[dict]:
    """The conversation with each demonstration's turns in front of it, behind a leading system message."""
    first = 1 if prompt and prompt[0]["role"] == "system" else 0
    shown = [
        m for question, answer in demonstrations for m in [*(q for q in question if q["role"] != "system"), *answer]
    ]
    return [*prompt[:first], *shown, *prompt[first:]]


class InContextScorer:
    """Demonstrations, their retrieval, and S(x, y) under one frozen causal LM.

    Args:
        model, renderer: the frozen model and how messages become its ids. dataset: ``demonstrations/1``.
        count, coarse: demonstrations shown, and kept by the first step. max_tokens: prompt tokens with demonstrations
            at most, and at most three quarters of the model's positions, so that an answer has room; the least similar
            ones are left out until it fits.
    """

    def __init__(
        self,
        model,
        renderer,
        dataset,
        *,
        count: int = 4,
        coarse: int = 32,
        max_tokens: int = 1024,
        device: str = "cpu",
        batch_tokens: int = 8192,
    ):
        self.model = model
        self.renderer = renderer
        self.count = count
        self.coarse = coarse
        self.device = device
        self.batch_tokens = batch_tokens
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_tokens = max_tokens if positions is None else min(max_tokens, 3 * positions // 4)
        self.rows = []
        for row in dataset.iter_rows():
            turn = min(row["train_turns"] or [len(row["messages"]) - 1])
            if 0 < turn == len(row["messages"]) - 1 and row["kept"] is not False:
                self.rows.append((row["row_id"], row["prompt_id"], row["messages"][:turn], row["messages"][turn:]))
        if not self.rows:
            raise ValueError(
                "the input demonstrations has no row that answers a prompt in one turn; give demonstrations/1 rows with"
                " one trained last turn"
            )
        self.index = TfIdf([_text(question) for _, _, question, _ in self.rows])
        self._vectors: dict[int, np.ndarray] = {}
        self._chosen: dict[str, tuple[list[int], list[int] | None]] = {}

    def _embed(self, texts: Sequence[list[dict]]) -> list[np.ndarray]:
        """Mean hidden state of each prompt as the model reads it, length 1."""
        from stages.models.modeling import hidden_states

        def mean(batch):
            states = hidden_states(self.model, batch).float()
            return [
                part.mean(0).cpu().numpy()
                for part in states.split([n for _, responses in batch.segments for n in responses])
            ]

        items = [make_item("prompt", [], [ids], [[0] * len(ids)]) for ids in map(self.renderer.prompt_ids, texts)]
        found = [row[0].astype(float) for row in per_response(items, self.batch_tokens, self.device, mean, self.model)]
        return [v / (np.linalg.norm(v) or 1.0) for v in found]

    def retrieve(self, prompt_row: dict) -> tuple[list[str], list[int] | None]:
        """(row ids of the demonstrations, the most similar last; ids of the prompt behind them). Ids None where not one
        of them fits.
        """
        key = prompt_row["prompt_id"]
        if key not in self._chosen:
            similar = self.index.similarities(_text(prompt_row["prompt"]))
            near = [
                i for i in nearest(similar, self.coarse + sum(r[1] == key for r in self.rows)) if self.rows[i][1] != key
            ][: self.coarse]
            fresh = [i for i in near if i not in self._vectors]
            self._vectors.update(zip(fresh, self._embed([self.rows[i][2] for i in fresh]) if fresh else []))
            query = self._embed([prompt_row["prompt"]])[0]
            best = [near[i] for i in nearest([self._vectors[i] @ query for i in near], self.count)][::-1]
            ids = None
            while best:
                ids = self.renderer.prompt_ids(
                    with_demonstrations(prompt_row["prompt"], [self.rows[i][2:] for i in best])
                )
                if len(ids) <= self.max_tokens:
                    break
                best, ids = best[1:], None
            self._chosen[key] = best, ids
        best, ids = self._chosen[key]
        return [self.rows[i][0] for i in best], ids

    def score(self, rows: Sequence[dict]) -> list[float | None]:
        """S of every row (prompt_row, prompt_ids, completion_ids), nats; None where no demonstration fits or the
        completion is empty.
        """
        groups: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            if len(row["completion_ids"]) and self.retrieve(row["prompt_row"])[1] is not None:
                groups.setdefault(row["prompt_row"]["prompt_id"], []).append(i)
        out: list[float | None] = [None] * len(rows)
        before, after = (
            self._sums(
                [
                    (prompt(rows[members[0]]), [rows[i]["completion_ids"] for i in members])
                    for members in groups.values()
                ]
            )
            for prompt in (lambda row: row["prompt_ids"], lambda row: self.retrieve(row["prompt_row"])[1])
        )
        for members, plain, shown in zip(groups.values(), before, after):
            for i, a, b in zip(members, plain, shown):
                out[i] = icdpo_score(b, a)
        return out

    def _sums(self, groups) -> list[list[float]]:
        """Sum of the token log-probs of every completion of every (prompt ids, completions); a prompt is computed
        once.
        """
        from stages.decoding.likelihood import response_logps

        items = [
            make_item("scored", prompt, completions, [[1] * len(c) for c in completions], by_response=())
            for prompt, completions in groups
        ]
        return [
            [math.fsum(logps) for logps in row]
            for row in response_logps(self.model, items, self.batch_tokens, self.device)
        ]


def icdpo_score(logp_with_demonstrations: float, logp_plain: float) -> float:
    """S = log p(y | d, x) - log p(y | x), sums over tokens (``rs.icdpo``)."""
    return logp_with_demonstrations - logp_plain


def _text(messages: list[dict]) -> str:
    return " ".join(m.get("content") or "" for m in messages if m["role"] != "system")
