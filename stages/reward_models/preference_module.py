"""Group Preference Optimization's module: a group's preferences predicted in context (``rm.gpo``, Zhao et al. 2023).

A point is a frozen model's embedding x of (question, response) with the group's rating y. A small transformer reads m
points with their ratings, the context, and predicts the ratings of others:

* a token is (x, y), with y = 0 in targets; there are no positional encodings;
* every point attends to the context alone (:func:`attention_mask`), and a target's own x travels on the residual
  stream. So the order of the context does not matter, and a target's prediction does not depend on the other targets.

Not to be confused with Generalized Preference Optimization, another "GPO". Legend: B episodes, P points of each, E
embedding size, H hidden size.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from stages.batching import per_response
from stages.models.modeling import ModelError, freeze
from stages.reward_models.reward_heads import RewardCard, load_frozen_reward, mean_states, reader_for, write_card
from stages.reward_models.reward_scorers import Response, Scorer

MODULE_FILE = "group_preference.safetensors"


def attention_mask(context_BP: torch.Tensor) -> torch.Tensor:
    """bool ``[B, P, P]``: query i may attend to key j where that is a context point."""
    return context_BP[:, None, :].expand(-1, context_BP.shape[1], -1)


def gaussian_nll(mean, target, log_variance=0.0):
    """-log N(target; mean, exp(log_variance)), nats per point, any shape (``rm.gpo``; unit variance by default)."""
    log_variance = torch.as_tensor(log_variance, dtype=mean.dtype, device=mean.device)
    return 0.5 * (math.log(2 * math.pi) + log_variance + (target - mean) ** 2 * torch.exp(-log_variance))


class Block(nn.Module):
    """Pre-norm attention over the context points and a GELU network, both on the residual stream."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, h_BPH, allowed_BPP):
        x = self.norm_attention(h_BPH)
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed_BPP[:, None])
        h_BPH = h_BPH + self.out(seen.transpose(1, 2).flatten(2))
        return h_BPH + self.down(F.gelu(self.up(self.norm_mlp(h_BPH))))


class PreferenceModule(nn.Module):
    """Predicts ratings of points from a context of rated ones; ratings and embeddings are standardised inside.

    Args:
        embedding: E. learned_variance: predict each rating's variance too, else it is 1 in standardised units.
    """

    def __init__(
        self, embedding: int, hidden: int = 128, layers: int = 4, heads: int = 4, learned_variance: bool = False
    ):
        super().__init__()
        if hidden % heads:
            raise ValueError(
                f"hidden_size={hidden} is not a multiple of num_heads={heads}; write for example"
                f" hidden_size={heads * (hidden // heads + 1)}"
            )
        self.settings = {
            "embedding": embedding,
            "hidden": hidden,
            "layers": layers,
            "heads": heads,
            "learned_variance": learned_variance,
        }
        for name, shape in (("x_mean", (embedding,)), ("x_std", (embedding,)), ("y_mean", ()), ("y_std", ())):
            self.register_buffer(name, torch.zeros(shape) if name.endswith("mean") else torch.ones(shape))
        self.inputs = nn.Linear(embedding + 1, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 2 if learned_variance else 1)

    def standardise(self, x_NE, y_N, weight_N=None) -> None:
        """Take mean and standard deviation of these points (those of training), each as often as it weighs."""
        for name, values in (("x", x_NE), ("y", y_N)):
            if weight_N is None or bool((weight_N == weight_N[0]).all()):
                mean, std = values.mean(0), values.std(0, unbiased=False)
            else:
                share = (weight_N / weight_N.sum()).view(-1, *[1] * (values.dim() - 1))
                mean = (share * values).sum(0)
                std = (share * (values - mean) ** 2).sum(0).sqrt()
            getattr(self, f"{name}_mean").copy_(mean)
            getattr(self, f"{name}_std").copy_(torch.where(std > 1e-6, std, torch.ones_like(std)))

    def forward(self, x_BPE, y_BP, context_BP):
        """(standardised mean ``[B, P]``, log variance ``[B, P]``) of every point's rating; ``context_BP`` marks the
        points whose ratings are seen.
        """
        y = torch.where(context_BP, (y_BP - self.y_mean) / self.y_std, 0.0)
        h = self.inputs(torch.cat([(x_BPE - self.x_mean) / self.x_std, y[..., None]], -1))
        allowed = attention_mask(context_BP)
        for block in self.blocks:
            h = block(h, allowed)
        out = self.head(self.norm(h))
        return out[..., 0], (
            out[..., 1].clamp(-10.0, 10.0) if self.settings["learned_variance"] else torch.zeros_like(out[..., 0])
        )


class ContextLikelihood:
    """Objective: the targets' negative log-likelihood given the context, per target over the whole step (standardised
    ratings).

    An item's extras are ``x`` [P, E], ``y`` [P], ``m``: the first m points are the context, and the rows' ``weights``
    [P] (1 where there are none), as often as which a target counts. Its response stands for the points alone, so that
    micro-batches are planned by their number.
    """

    def counts(self, items):
        return {
            "targets": float(sum(weights_of(i)[i.extra["m"] :].sum() for i in items)),
            "points": float(sum(len(i.extra["y"]) - i.extra["m"] for i in items)),
            "episodes": float(len(items)),
        }

    def __call__(self, module, batch):
        from stages.training import Sums

        device = module.y_mean.device
        x, y, context, target = padded(batch.items, device)
        mean, log_variance = module(x.to(module.x_mean.dtype), y.to(module.y_mean.dtype), context)
        wanted = (y.to(mean.dtype) - module.y_mean) / module.y_std
        weight = torch.zeros_like(mean)
        for b, item in enumerate(batch.items):
            weight[b, : len(item.extra["y"])] = torch.as_tensor(weights_of(item), dtype=mean.dtype)
        nll = torch.where(target, weight * gaussian_nll(mean, wanted, log_variance), 0.0).sum()
        square = torch.where(target, (mean - wanted) ** 2, 0.0).sum().detach() * module.y_std**2
        return Sums(
            {"nll": (nll, "targets")}, {"mse": (square, "points"), "context_size": (context.sum().float(), "episodes")}
        )


def weights_of(item) -> np.ndarray:
    """Weights [P] of an episode's points."""
    return np.asarray(item.extra.get("weights", np.ones(len(item.extra["y"]))), np.float64)


def padded(items: Sequence, device: str = "cpu"):
    """(x ``[B, P, E]``, y ``[B, P]``, context ``[B, P]``, target ``[B, P]``) of episodes; what is padded is neither
    context nor target.
    """
    longest = max(len(i.extra["y"]) for i in items)
    x = torch.zeros(len(items), longest, items[0].extra["x"].shape[1])
    y = torch.zeros(len(items), longest)
    context = torch.zeros(len(items), longest, dtype=torch.bool)
    target = torch.zeros(len(items), longest, dtype=torch.bool)
    for b, item in enumerate(items):
        n, m = len(item.extra["y"]), item.extra["m"]
        x[b, :n], y[b, :n] = torch.as_tensor(item.extra["x"]), torch.as_tensor(item.extra["y"])
        context[b, :m], target[b, m:n] = True, True
    return x.to(device), y.to(device), context.to(device), target.to(device)


# -- points ------------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    """One rated response of a group. ``embedding`` is None until it is computed."""

    group: str
    prompt: list[dict]
    completion: list[dict]
    y: float
    row_id: str
    embedding: np.ndarray | None = None
    weight: float = 1.0

    @property
    def question(self) -> str:
        return json.dumps(self.prompt, sort_keys=True)


def points_of(dataset, group: str | None = None, split: str | None = None) -> list[Point]:
    """Points of a dataset, or of a split of it, in row order, of one group or all: ratings give their score, pairs 1 and
    0 (or ``label_prob`` and the rest). Rows of weight 0 give none.

    A row's group is its column ``group`` (kept in ``extra_json``), else its annotator.

    Raises:
        ValueError: a row without either.
    """
    points = []
    for row in dataset.iter_rows(split=split) if split else dataset.iter_rows():
        if not row["weight"]:
            continue
        if dataset.kind == "group_preferences/1":
            found = [
                Point(
                    row["group"],
                    [{"role": "user", "content": row["question"]}],
                    [{"role": "assistant", "content": row["response"]}],
                    row["y"],
                    row["row_id"],
                    np.array(row["embedding"], np.float32) if row["embedding"] else None,
                    row["weight"],
                )
            ]
        else:
            name = json.loads(row.get("extra_json") or "{}").get("group") or (row.get("ann") or {}).get("annotator_id")
            if name is None:
                raise ValueError(
                    f"row {row['row_id']} of {dataset.name} has no group; ingest data with a column `group` (or"
                    " annotator_id)"
                )
            if dataset.kind == "ratings/1":
                sides = [("completion", row["score"])]
            else:
                p = 1.0 if row.get("label_prob") is None else row["label_prob"]
                sides = [("chosen", p), ("rejected", 1.0 - p)]
            found = [
                Point(str(name), row["prompt"], row[side], float(y), row["row_id"], weight=row["weight"])
                for side, y in sides
            ]
        points += [p for p in found if group is None or p.group == group]
    return points


class Embedder:
    """A frozen decoder or encoder that reads question and response as one text: x is the mean of its last hidden
    states.
    """

    def __init__(self, path: str, device: str = "cpu", max_length: int | None = None, max_tokens: int = 8192):
        self.device, self.max_tokens = device, max_tokens
        self.model = load_frozen_reward(path, device)
        self.reader = reader_for(path, self.model, max_length, "mean")

    @property
    def size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    def __call__(self, texts: Iterable[tuple[list[dict], list[dict]]]) -> list[np.ndarray | None]:
        """x ``[E]`` of each (prompt, completion), float32; None where nothing of the response can be read."""
        from stages.reward_models.reward_data import Drop, build

        items = []
        for prompt, completion in texts:
            try:
                items.append(build(self.reader, {"row_id": "embedded"}, prompt, [completion], Counter(), counts={}))
            except Drop:
                items.append(None)

        def means(batch):
            return list(mean_states(self.model, batch).float().cpu().numpy())

        found = iter(per_response([i for i in items if i is not None], self.max_tokens, self.device, means, self.model))
        return [None if item is None else next(found)[0] for item in items]


# -- the published model -----------------------------------------------------------------------------------------------


def save(directory, embedder: Embedder, module: PreferenceModule, card: RewardCard) -> None:
    """A model directory: the embedder as it was, the module beside it, and the card."""
    from safetensors.torch import save_file

    embedder.model.save_pretrained(directory, safe_serialization=True)
    embedder.reader.tokenizer.save_pretrained(directory)
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()},
        str(Path(directory, MODULE_FILE)),
    )
    write_card(directory, card)


class GroupPreferenceScorer(Scorer):
    """``rm.gpo`` as a reward: the rating that the observed group would give. Tell it the group with :meth:`observe`
    first.
    """

    needs_group = True
    why_not = "the embedding model reads no token of it"

    def load(self) -> None:
        from safetensors.torch import load_file

        self.embedder = Embedder(self.path, self.device, self.card.max_length, self.max_tokens)
        self.reader = self.embedder.reader
        self.module = PreferenceModule(**self.card.options["module"])
        self.module.load_state_dict(load_file(str(Path(self.path, MODULE_FILE))))
        self.model = freeze(self.module.to(self.device))

    def observe(self, points: Sequence[Point]) -> None:
        """Take these rated points as the context of every score.

        Raises:
            ModelError: no point, or embeddings of another model's size.
        """
        computed = iter(self.embedder((p.prompt, p.completion) for p in points if p.embedding is None))
        vectors = [(p.embedding if p.embedding is not None else next(computed), p.y) for p in points]
        known = [(x, y) for x, y in vectors if x is not None]
        size = self.module.settings["embedding"]
        if not known:
            raise ModelError(
                "the context has no rated response of this group that can be read; give context=DATASET with rows of"
                " the group, or write another group=NAME"
            )
        if any(len(x) != size for x, _ in known):
            raise ModelError(
                f"the context's embeddings do not have the {size} numbers of this model's; leave them out of the rows,"
                " and they are computed"
            )
        self.context = (
            torch.tensor(np.stack([x for x, _ in known])),
            torch.tensor([y for _, y in known], dtype=torch.float32),
        )

    @torch.no_grad()
    def predict(self, x_NE) -> np.ndarray:
        """Predicted rating of each embedding ``[N]``, in the units of the data."""
        x, y = self.context
        m = len(y)
        points = torch.cat([x, torch.as_tensor(np.asarray(x_NE, np.float32))])[None].to(self.device)
        ratings = torch.cat([y, torch.zeros(points.shape[1] - m)])[None].to(self.device)
        mean, _ = self.module(points, ratings, (torch.arange(points.shape[1], device=points.device) < m)[None])
        return (mean[0, m:] * self.module.y_std + self.module.y_mean).double().cpu().numpy()

    def score(self, responses: Sequence[Response]) -> list[float]:
        if not hasattr(self, "context"):
            raise ModelError(
                "a group preference model scores in the context of a group; use a reward component {kind:"
                " group_preference, group: NAME} with the inputs group_preference=MODEL and context=DATASET"
            )
        found = self.embedder((r.prompt, r.completion) for r in responses)
        scores = iter(
            self.predict([x for x in found if x is not None]).tolist() if any(x is not None for x in found) else []
        )
        return [math.nan if x is None else next(scores) + self.bias for x in found]
