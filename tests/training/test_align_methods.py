"""Every row of DIRECT_METHODS through the align stage's own encoder and one training step, against an independent
computation.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.algorithms import DIRECT_METHODS
from stages.align import Config
from stages.running import randomness
from stages.training import Trainer
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import assistant, user


@pytest.fixture(scope="module")
def preferences(tmp_path_factory):
    """Paths of one small dataset per kind; every row in train, every fourth also (as another prompt) in validation."""
    root = tmp_path_factory.mktemp("preferences")

    def made(kind, make, n=8):
        rows = [
            complete_row(
                kind, make(i), dataset="made", source="s", origin="human", split="validation" if i % 4 == 3 else "train"
            )
            for i in range(n)
        ]
        path = str(root / kind.replace("/", "-"))
        write_dataset(path, "made", kind, rows)
        return path

    def aspects(*scores):
        return [{"aspect": str(k), "score": s} for k, s in enumerate(scores)]

    return {
        "pairs": made(
            "pairs/1",
            lambda i: {
                "prompt": user(f"number {i}. Say something. " + "hm " * (i % 3)),
                "chosen": assistant("yes " * (1 + i % 3) + "."),
                "rejected": assistant("no " * (1 + i % 2) + str(i)),
                "chosen_score": 2.5 + 0.25 * i,
                "rejected_score": 0.5,
                "label_prob": 0.9 - 0.05 * i,
                "extra_json": json.dumps({"reference": "gold " * (1 + i % 4) + str(i)}),
                "weight": 1.0 + i % 2,
            },
        ),
        "unpaired": made(
            "unpaired/1",
            lambda i: {
                "prompt": user(f"question {i}?"),
                "completion": assistant("ok " * (1 + i % 3) + str(i)),
                "label": i % 3 != 1,
                "label_kind": "thumbs",
            },
        ),
        "rankings": made(
            "rankings/1",
            lambda i: {
                "prompt": user(f"rank {i}"),
                "completions": [assistant(t) for t in ("b" * (1 + i % 2), "best one", "cc c", "worst of all")],
                "ranks": [2, 1, 3, 4],
                "scores": [0.6, 0.9 - 0.01 * i, 0.5, 0.1],
            },
        ),
        "segments": made(
            "segments/1",
            lambda i: {
                "prompt": user(f"explain {i}"),
                "chosen": assistant("first part. second part."),
                "rejected": assistant("wrong. also wrong. more"),
                "offset_unit": "char",
                "chosen_segments": [
                    {"start": 0, "end": 11, "scores": aspects(0.9, 0.7)},
                    {"start": 11, "end": 24, "scores": aspects(0.4)},
                ],
                "rejected_segments": [
                    {"start": 0, "end": 6, "scores": aspects(0.2)},
                    {"start": 6, "end": 18, "scores": aspects(0.6)},
                    {"start": 18, "end": 23, "scores": aspects(0.1)},
                ],
            },
        ),
    }


DATA = {"pairs": "pairs", "conditions": "pairs", "unpaired": "unpaired", "rankings": "rankings", "segments": "segments"}


class World:
    """A policy and a reference in float64, the items of a method, and their token log-probs by the plainest means."""

    def __init__(self, tiny, preferences, split="train", **config):
        from stages.chat import renderer_for
        from stages.direct.direct_alignment import DirectAlignment
        from stages.direct.preference_items import Encoder
        from stages.models.modeling import freeze, load_policy

        self.config = Config(max_length=96, max_grad_norm=1e9, learning_rate=1e-9, **config)
        self.objective = DirectAlignment(self.config)
        self.method = self.objective.method
        self.policy, self.reference = load_policy(tiny["policy"]).double(), freeze(load_policy(tiny["other"]).double())
        encode = Encoder(
            renderer_for(tiny["policy"]),
            self.objective.reads,
            self.config,
            lambda *purpose: randomness.rng(0, "align", *purpose),
        )
        self.items = encode(open_dataset(preferences[DATA[self.method.data]]), split)
        self.dropped = encode.dropped
        self.rows = self.items + [i.extra["mismatched"] for i in self.items if "mismatched" in i.extra]
        for item in self.rows if self.method.needs_reference else ():
            with torch.no_grad():
                values = [self.logps(self.reference, item, k) for k in range(len(item.responses))]
            item.extra["ref_tokens"] = values
            if self.config.ld_alpha is not None:
                item.extra["ref"] = [[float(part.sum()) for part in parts(values, item, k)] for k in range(2)]
            elif self.method.data == "segments":
                item.extra["ref"] = [
                    [float(v[a:b].sum()) for a, b in side] for v, side in zip(values, item.extra["segments"])
                ]
            else:
                item.extra["ref"] = [float(v.sum()) for v in values]

    def logps(self, model, item, k):
        """Per-token log-probs of response k, 0 where no target, from the model's own logits."""
        ids = torch.tensor([[*item.prompt.tolist(), *item.responses[k].tolist()]])
        logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        start = len(item.prompt)
        logp = torch.cat([logp.new_zeros(1), logp])[start:]
        return torch.where(torch.tensor(item.masks[k].astype(bool)), logp, 0.0)

    def step(self):
        """(loss, flat gradient) of one training step of the stage's own trainer."""
        trainer = Trainer(self.policy, self.objective, self.config, 1)
        self.objective.prepare(self.policy, self.items, "cpu")
        loss = trainer.step(self.items)["loss"]
        return loss, torch.cat([p.grad.flatten() for p in self.policy.parameters()])

    def independent(self, formula):
        """(loss, flat gradient) from `formula(rows)`, rows = one dict per item with policy and reference sums, lengths
        and columns.
        """
        self.policy.zero_grad(set_to_none=True)
        rows = []
        for item in self.items:
            tokens = [self.logps(self.policy, item, k) for k in range(len(item.responses))]
            rows.append(
                {
                    "S": [t.sum() for t in tokens],
                    "tokens": tokens,
                    "n": [int(m.sum()) for m in item.masks],
                    **item.extra,
                    "mis": (
                        self.logps(self.policy, item.extra["mismatched"], 0).sum().item()
                        - item.extra["mismatched"].extra["ref"][0]
                        if "mismatched" in item.extra
                        else None
                    ),
                }
            )
        total = formula(rows)
        total.backward()
        return float(total.detach()), torch.cat([p.grad.flatten() for p in self.policy.parameters()])


def parts(tokens, item, k):
    """(log-probs of response k within the number of trained tokens of the pair's shorter response, those beyond)."""
    trained = tokens[k][torch.tensor(item.masks[k].astype(bool))]
    common = min(int(m.sum()) for m in item.masks[:2])
    return trained[:common], trained[common:]


def sig(x):
    return 1 / (1 + torch.exp(-x))


def L(x):
    return -torch.log(sig(x))


def H(r):
    return r["S"][0] - r["ref"][0], r["S"][1] - r["ref"][1]


def pairwise(f):
    """Weighted mean over pairs of f(row, h_w, h_l)."""

    def loss(rows):
        return sum(r["weight"] * f(r, *H(r)) for r in rows) / sum(r["weight"] for r in rows)

    return loss


def free(f):
    """The same for f(row, policy chosen, policy rejected) without a reference."""

    def loss(rows):
        return sum(r["weight"] * f(r, r["S"][0], r["S"][1]) for r in rows) / sum(r["weight"] for r in rows)

    return loss


def M(r):
    return r["S"][0] / r["n"][0], r["S"][1] / r["n"][1]


def log_odds_ratio(r):
    a, b = (torch.log(torch.exp(m) / (1 - torch.exp(m))) for m in M(r))
    return a - b


def aot_paired(rows):
    policy = torch.stack([r["S"][0] - r["S"][1] for r in rows])
    ref = torch.tensor([r["ref"][0] - r["ref"][1] for r in rows], dtype=torch.float64)
    return L(0.1 * (torch.sort(policy)[0] - torch.sort(ref)[0])).mean()


def aot_unpaired(rows):
    w, l = (torch.stack(x) for x in zip(*(H(r) for r in rows)))
    return L(0.1 * (torch.sort(w)[0] - torch.sort(l)[0])).mean()


def aql(rows):
    h = torch.stack([H(r)[0] - H(r)[1] for r in rows])
    mean = sum(r["weight"] * float(x) for r, x in zip(rows, h.detach())) / sum(r["weight"] for r in rows)
    m = 0.5 + 0.01 * (1 / (1 + math.exp(-mean)) - 0.5)
    q = sig(-0.05 * (h - m))
    return sum(r["weight"] * x for r, x in zip(rows, q * L(0.05 * h) + (1 - q) * (1 - 0.05 * h).clamp(min=0))) / sum(
        r["weight"] for r in rows
    )


def kto(rows):
    z0 = max(0.0, sum(r["mis"] for r in rows) / len(rows))
    out = []
    for r in rows:
        ratio = r["S"][0] - r["ref"][0]
        v = sig(0.1 * (ratio - z0)) if r["label"] else sig(0.1 * (z0 - ratio))
        out.append(1 - v)
    return sum(out) / len(out)


def unpaired(f):
    return lambda rows: sum(f(0.1 * (r["S"][0] - r["ref"][0]), r["label"]) for r in rows) / len(rows)


def plackett_luce(rows):
    total = 0.0
    for r in rows:
        e = [torch.exp(0.1 * (s - q)) for s, q in zip(r["S"], r["ref"])]
        for k in range(len(e) - 1):
            total = total - torch.log(e[k] / sum(e[k:]))
    return total / len(rows)


def sppo(rows):
    total = 0.0
    for r in rows:
        n = len(r["S"])
        for k in range(n):
            win = (n - 1 - k) / (n - 1)  # distinct ranks, best first
            total = total + (r["S"][k] - r["ref"][k] - 1000.0 * (win - 0.5)) ** 2 / n
    return total / len(rows)


def rrhf(rows):
    total = 0.0
    for r in rows:
        p = [s / n for s, n in zip(r["S"], r["n"])]
        total = (
            total
            - r["S"][int(np.argmax(r["rewards"]))]
            + sum(
                (p[i] - p[j]).clamp(min=0.0)
                for i in range(len(p))
                for j in range(len(p))
                if r["rewards"][i] < r["rewards"][j]
            )
        )
    return total / len(rows)


def two_d(rows):
    total = 0.0
    for r in rows:
        for k in range(2):
            (a, b), (c, d) = r["segments"][0][k], r["segments"][1][k]
            total = total + L(
                0.1
                * (
                    r["segment_weights"][0][k] * (r["tokens"][0][a:b].sum() - r["ref"][0][k])
                    - r["segment_weights"][1][k] * (r["tokens"][1][c:d].sum() - r["ref"][1][k])
                )
            )
    return total / len(rows)


def bernoulli_kl(a, b):
    p = sig(torch.as_tensor(b))
    return p * torch.log(p / sig(a)) + (1 - p) * torch.log((1 - p) / (1 - sig(a)))


def exo(u, eps=1e-3):
    return sig(u) * torch.log(sig(u) / (1 - eps)) + sig(-u) * torch.log(sig(-u) / eps)


def nll(r):
    return -r["S"][0] / r["n"][0]


def with_gold(f):
    """The pairs' mean, and of the third responses' tokens, by the weights of their rows."""

    def loss(rows):
        tokens = sum(r["weight"] * r["n"][2] for r in rows)
        return free(f)(rows) - sum(r["weight"] * r["S"][2] for r in rows) / tokens

    return loss


FORMULAS = {
    "dpo": pairwise(lambda r, w, l: L(0.1 * (w - l))),
    "cdpo": pairwise(lambda r, w, l: 0.9 * L(0.1 * (w - l)) + 0.1 * L(-0.1 * (w - l))),
    "robust_dpo": pairwise(lambda r, w, l: (0.9 * L(0.1 * (w - l)) - 0.1 * L(-0.1 * (w - l))) / 0.8),
    "soft_dpo": pairwise(
        lambda r, w, l: r["label_prob"] * L(0.1 * (w - l)) + (1 - r["label_prob"]) * L(-0.1 * (w - l))
    ),
    "ipo": pairwise(lambda r, w, l: (w - l - 5.0) ** 2),
    "soft_ipo": pairwise(lambda r, w, l: (w - l - (r["label_prob"] - 0.5) / 0.1) ** 2),
    "hinge_norm": pairwise(lambda r, w, l: (1 - 0.05 * (w - l)).clamp(min=0)),
    "length_norm": pairwise(lambda r, w, l: L(5.0 * (w / r["n"][0] - l / r["n"][1]))),
    "apo_zero": pairwise(lambda r, w, l: 1 - sig(0.1 * w) + sig(0.1 * l)),
    "apo_down": pairwise(lambda r, w, l: sig(0.1 * w) + 1 - sig(0.1 * (w - l))),
    "discopop": pairwise(
        lambda r, w, l: (1 - sig((w - l))) * L(0.05 * (w - l)) + sig((w - l)) * torch.exp(-0.05 * (w - l))
    ),
    "discovered": pairwise(lambda r, w, l: 0.9 * (0.5 if w < l else 1.0) * L(0.05 * (w - l))),
    "pfl": pairwise(
        lambda r, w, l: 0.5 * L(0.05 * (w - l)) if r["S"][0] > r["S"][1] else 2 * (1 - 0.05 * (w - l)).clamp(min=0)
    ),
    "aql": aql,
    "written": pairwise(lambda r, w, l: L(0.05 * (w - l))),  # its example is DPO's loss
    "cal_dpo": pairwise(lambda r, w, l: L(w - l) + 0.5 * ((w - 5) ** 2 + (l + 5) ** 2)),
    "nca_pair": pairwise(lambda r, w, l: L(0.1 * w) + 0.5 * L(-0.1 * w) + 0.5 * L(-0.1 * l)),
    "exo_pair": pairwise(lambda r, w, l: exo(0.1 * (w - l))),
    "r_dpo": pairwise(lambda r, w, l: L(0.1 * (w - l) + 0.05 * r["n"][0] - 0.05 * r["n"][1])),
    "wpo": pairwise(lambda r, w, l: torch.exp(sum(M(r))).item() * L(0.1 * (w - l))),
    "aot_unpaired": aot_unpaired,
    "aot_paired": aot_paired,
    "dpo_nll": pairwise(lambda r, w, l: L(0.1 * (w - l)) + nll(r)),
    "mdpo": pairwise(lambda r, w, l: L(0.1 * (w - l)) + L(0.1 * (w - (r["S"][2] - r["ref"][2]))) + L(0.1 * w)),
    "2d_dpo": two_d,
    "odpo": pairwise(lambda r, w, l: L(0.1 * (w - l) - math.log(r["score_gap"]))),
    "rpo": pairwise(lambda r, w, l: bernoulli_kl(0.1 * (w - l), r["score_gap"])),
    "rebel": pairwise(lambda r, w, l: (w - l - r["score_gap"]) ** 2),
    "pl_dpo": plackett_luce,
    "sppo": sppo,
    "rrhf": rrhf,
    "sppo_hard": pairwise(lambda r, w, l: (w - 500.0) ** 2 + (l + 500.0) ** 2),
    "kto": kto,
    "bco": unpaired(lambda reward, good: L(reward) if good else L(-reward)),
    "bco_pair": pairwise(lambda r, w, l: L(0.1 * w) + L(-0.1 * l)),
    "apo_zero_unpaired": unpaired(lambda reward, good: 1 - sig(reward) if good else sig(reward)),
    "reference_free": free(lambda r, w, l: L(0.1 * (w - l))),
    "simpo": free(lambda r, w, l: L(2.0 * (M(r)[0] - M(r)[1]) - 0.5)),
    "alphapo": free(
        lambda r, w, l: L(
            2.0 * (1 - torch.exp(-0.25 * M(r)[0])) / 0.25 - 2.0 * (1 - torch.exp(-0.25 * M(r)[1])) / 0.25 - 0.5
        )
    ),
    "cpo": free(lambda r, w, l: L(0.1 * (w - l)) - w),
    "tpo": with_gold(lambda r, w, l: L(0.01 * (w - l))),
    "tpo_l": with_gold(lambda r, w, l: L(2.0 * (M(r)[0] - M(r)[1]) - 0.5)),
    "orpo": free(lambda r, w, l: 0.1 * L(log_odds_ratio(r)) + nll(r)),
    "slic": free(lambda r, w, l: (1.0 - w + l).clamp(min=0) - 0.1 * w),
}


def test_every_method_has_an_independent_formula():
    assert set(FORMULAS) == set(DIRECT_METHODS)


@pytest.mark.parametrize("method", list(DIRECT_METHODS))
def test_one_step_equals_an_independent_computation(tiny, preferences, method):
    """Loss and gradient of one optimizer step, through encoder, batching and objective, in float64 (models of another
    init as reference).
    """
    world = World(tiny, preferences, method=method, max_tokens_per_micro_batch=150)
    assert len(world.items) == 6
    expected, gradient = world.independent(FORMULAS[method])
    loss, ours = world.step()
    # float32 norms and rotary tables inside the model round between layouts
    assert loss == pytest.approx(expected, rel=2e-6)
    assert gradient.abs().max() > 0
    assert torch.allclose(ours, gradient, rtol=0, atol=2e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("method", list(DIRECT_METHODS))
def test_a_step_is_the_same_however_it_is_cut(tiny, preferences, method):
    """One micro-batch, one per item, and the items backwards: value and gradient to 1e-12, for every row of the
    table.
    """
    from tests.training.test_invariance import gradient

    world = World(tiny, preferences, method=method)
    world.objective.prepare(world.policy, world.items, "cpu")
    value, whole = gradient(world.policy, world.objective, world.items, 10**6)
    for max_tokens, order in ((1, world.items), (150, world.items[::-1])):
        other_value, other = gradient(world.policy, world.objective, order, max_tokens)
        assert other_value == pytest.approx(value, rel=1e-12)
        assert torch.allclose(other, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))


@pytest.mark.parametrize("method", ["kto", "bco", "aql", "apo_zero_unpaired", "pl_dpo"])
def test_a_row_counts_by_its_weight_in_every_number_of_a_step(tiny, preferences, method):
    """Weight 0 is as if the row were not there, weight 2 as if it were there twice: in the loss, in KTO's z0, in BCO's
    running means, in AQL's mean margin.
    """
    world = World(tiny, preferences, method=method)
    first, second, *others = world.items

    def numbers(*weighted):
        for item, weight in weighted:
            item.extra["weight"] = weight
        items = [item for item, _ in weighted]
        world.objective.z0, world.objective.means = 0.0, {"chosen": 0.0, "rejected": 0.0}
        trainer = Trainer(world.policy, world.objective, world.config, 1)
        found = {**world.objective.prepare(world.policy, items, "cpu"), **trainer.step(items)}
        world.objective.after_step(found)
        assert not any(name.startswith("weighted/") for name in found)
        return {
            name: found[name] for name in ("loss", "grad_norm", "kl", "mean_h") if name in found
        } | world.objective.means

    twice = replace(second, extra=dict(second.extra))
    plain = numbers(*((item, 1.0) for item in (second, twice, *others)))
    weighted = numbers((first, 0.0), (second, 2.0), *((item, 1.0) for item in others))
    assert weighted == pytest.approx(plain, rel=1e-4)  # norms inside the model are float32
    assert numbers(*((item, 1.0) for item in world.items)) != pytest.approx(plain, rel=1e-3)
    assert method != "kto" or plain["kl"] > 0
    assert all(math.isfinite(value) for value in numbers(*((item, 0.0) for item in world.items)).values())


def test_rows_of_weight_0_are_not_matched(tiny, preferences, tmp_path):
    """AOT sorts all rows of a step and weighs none, so a row that counts nothing is left out, and said to be."""
    rows = [
        {**row, "weight": 0.0 if i == 2 else 1.0}
        for i, row in enumerate(open_dataset(preferences["pairs"]).iter_rows())
    ]
    write_dataset(str(tmp_path / "rows"), "made", "pairs/1", rows)
    for method in ("aot_paired", "aot_unpaired"):
        world = World(tiny, {"pairs": str(tmp_path / "rows")}, method=method)
        assert (
            len(world.items) == 5
            and rows[2]["row_id"] not in {item.row_id for item in world.items}
            and world.dropped["weight_0"] == 1
        )


def test_pairs_that_truncation_makes_identical_are_dropped_and_counted(tiny, tmp_path):
    """Answers that differ behind the cut only teach nothing; those that differ before it stay, cut."""
    from stages.chat import renderer_for
    from stages.direct.preference_items import Encoder

    same = "yes " * 40
    answers = [("yes " * 3, "no"), (same + "good", same + "bad"), ("no " + same, same)]
    rows = [
        complete_row(
            "pairs/1",
            {"prompt": user(f"number {i}"), "chosen": assistant(a), "rejected": assistant(b)},
            dataset="made",
            source="s",
            origin="human",
            split="train",
        )
        for i, (a, b) in enumerate(answers)
    ]
    write_dataset(str(tmp_path / "pairs"), "made", "pairs/1", rows)
    encode = Encoder(
        renderer_for(tiny["policy"]),
        DIRECT_METHODS["dpo"],
        Config(max_length=48),
        lambda *purpose: randomness.rng(0, "align", *purpose),
    )
    items = encode(open_dataset(str(tmp_path / "pairs")), "train")
    assert {i.row_id for i in items} == {rows[0]["row_id"], rows[2]["row_id"]}
    assert encode.dropped["identical_after_truncation"] == 1 and encode.dropped["truncated"] == 2


def test_orpos_nll_may_count_the_prompt(tiny, preferences):
    """da.orpo, nll_on_prompt: the reference code's NLL over prompt and chosen answer; the odds stay those of the
    answers.
    """
    world = World(tiny, preferences, method="orpo", options={"nll_on_prompt": True})
    plain = World(tiny, preferences, method="orpo")
    for item, other in zip(world.items, plain.items):
        assert [int(m.sum()) for m in item.masks] == [
            *(int(m.sum()) for m in other.masks),
            len(other.prompt) + len(other.responses[0]) - 1,
        ]
    expected = world.independent(free(lambda r, w, l: 0.1 * L(log_odds_ratio(r)) - r["S"][2] / r["n"][2]))
    found = world.step()
    assert found[0] == pytest.approx(expected[0], rel=1e-7) and torch.allclose(
        found[1], expected[1], rtol=1e-5, atol=1e-7
    )
    assert abs(found[0] - plain.step()[0]) > 1e-3


def test_a_segments_score_is_the_mean_of_its_aspects_or_their_weighted_sum():
    """da.2d_dpo aspect_weights: one without a weighted aspect has no score."""
    from stages.direct.preference_items import segment_score

    scores = [{"aspect": "help", "score": 0.9}, {"aspect": "safe", "score": 0.5}]
    assert segment_score(scores, {}) == pytest.approx(0.7) and segment_score([], {}) == 0.0
    assert segment_score(scores, {"safe": 0.75, "help": 0.25}) == pytest.approx(0.6)
    assert segment_score(scores, {"safe": 1.0}) == 0.5 and segment_score(scores[:1], {"safe": 1.0}) is None
    with pytest.raises(ValueError, match="aspect_weights sum to 1.2; write weights that sum to 1"):
        Config(method="2d_dpo", aspect_weights={"help": 0.7, "safe": 0.5})


def test_a_segment_without_a_token_leaves_its_index_unpaired(tiny, tmp_path):
    """da.2d_dpo pairing=by_index: where no token begins in a segment, those behind it keep their partners."""
    from stages.chat import renderer_for
    from stages.direct.direct_alignment import DirectAlignment
    from stages.direct.preference_items import Encoder

    def segments(ends, scores):
        starts = [0, *ends[:-1]]
        return [
            {"start": a, "end": b, "scores": [{"aspect": "q", "score": s}]} for a, b, s in zip(starts, ends, scores)
        ]

    row = {
        "prompt": user("explain"),
        "chosen": assistant("first part. second part."),
        "rejected": assistant("wrong part. also wrong."),
        "offset_unit": "char",
        "chosen_segments": segments([12, 12, 24], [0.9, 0.8, 0.7]),
        "rejected_segments": segments([4, 12, 23], [0.1, 0.2, 0.3]),
    }
    path = str(tmp_path / "segments")
    made = complete_row("segments/1", row, dataset="made", source="s", origin="human", split="train")
    write_dataset(path, "made", "segments/1", [made])
    config = Config(max_length=96, method="2d_dpo")
    encode = Encoder(renderer_for(tiny["policy"]), DirectAlignment(config).reads, config, None)
    (item,) = encode(open_dataset(path), "train")
    assert item.extra["segment_weights"] == [[0.9, 0.7], [0.1, 0.3]], "0.7 belongs to 0.3, not to 0.2"
    assert [len(side) for side in item.extra["segments"]] == [2, 2] and encode.dropped["unpaired_segments"] == 1
