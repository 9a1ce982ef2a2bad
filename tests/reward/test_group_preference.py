"""Group preferences in context (rm.gpo): the invariances of the module, learning from groups, and the reward of one
group.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.batching import collate, make_item
from stages.harness import execute
from stages.reward_models.preference_module import (
    ContextLikelihood,
    GroupPreferenceScorer,
    PreferenceModule,
    attention_mask,
    gaussian_nll,
    points_of,
)
from stages.reward_models.reward_scorers import Response, load_scorer
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import silent
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.training.conftest import spec  # noqa: F401
from tests.training.test_invariance import gradient


def module(seed=0, **settings):
    torch.manual_seed(seed)
    made = PreferenceModule(6, hidden=16, layers=2, heads=4, **settings).double()
    made.standardise(torch.randn(50, 6, dtype=torch.float64) * 2 + 1, torch.randn(50, dtype=torch.float64) * 3 - 2)
    return made


def episodes(n=6, seed=0):
    rng = np.random.default_rng(seed)
    items = []
    for i in range(n):
        size = int(rng.integers(3, 9))
        items.append(
            make_item(
                f"g{i}",
                [],
                [[0] * size],
                [[1] * size],
                x=rng.normal(size=(size, 6)),
                y=rng.normal(size=size),
                m=int(rng.integers(1, size)),
            )
        )
    return items


@torch.no_grad()
def predicted(made, x, y, m):
    return made(torch.tensor(x)[None], torch.tensor(y)[None], (torch.arange(len(y)) < m)[None])


@pytest.mark.parametrize("learned", (False, True))
def test_the_order_of_the_context_and_other_targets_change_nothing(learned):
    made, rng = module(learned_variance=learned), np.random.default_rng(1)
    x, y, m = rng.normal(size=(9, 6)), rng.normal(size=9), 5
    mean, log_variance = predicted(made, x, y, m)
    order = np.concatenate([rng.permutation(m), np.arange(m, 9)])
    permuted = predicted(made, x[order], y[order], m)
    assert torch.allclose(permuted[0][0, m:], mean[0, m:], atol=1e-12) and torch.allclose(
        permuted[1][0, m:], log_variance[0, m:], atol=1e-12
    )
    for t in range(m, 9):  # each target alone, with another rating of its own, and with changed neighbours
        alone = predicted(made, np.concatenate([x[:m], x[t : t + 1]]), np.concatenate([y[:m], [99.0]]), m)
        assert alone[0][0, m] == pytest.approx(float(mean[0, t]), abs=1e-12)
    moved = x.copy()
    moved[m + 1 :] += 5.0
    assert torch.allclose(predicted(made, moved, y, m)[0][0, : m + 1], mean[0, : m + 1], atol=1e-12)
    other = y.copy()
    other[0] += 1.0
    assert not torch.allclose(predicted(made, x, other, m)[0][0, m:], mean[0, m:], atol=1e-6)
    assert (log_variance == 0).all() != learned
    assert attention_mask(torch.arange(4)[None] < 2).int().tolist() == [[[1, 1, 0, 0]] * 4]


def attended(made, x, y, m):
    """The module, one point after the other, without masks: keys and values are gathered from the context."""
    with torch.no_grad():
        x, y = (torch.tensor(x) - made.x_mean) / made.x_std, (torch.tensor(y) - made.y_mean) / made.y_std
        h = [made.inputs(torch.cat([x[i], (y[i] if i < m else torch.zeros_like(y[i]))[None]])) for i in range(len(y))]
        for block in made.blocks:
            normed = [block.norm_attention(v) for v in h]
            keys, values = ([layer(v) for v in normed[:m]] for layer in (block.key, block.value))
            seen = []
            for v in normed:
                heads = []
                for part in torch.arange(16).split(4):
                    scores = torch.stack([block.query(v)[part] @ k[part] / 2.0 for k in keys]).softmax(0)
                    heads.append(sum(s * w[part] for s, w in zip(scores, values)))
                seen.append(torch.cat(heads))
            h = [v + block.out(s) for v, s in zip(h, seen)]
            h = [v + block.down(torch.nn.functional.gelu(block.up(block.norm_mlp(v)))) for v in h]
        return torch.stack([made.head(made.norm(v))[0] for v in h])


def test_the_loss_equals_an_independent_computation_however_episodes_are_batched():
    made, items = module(), episodes()
    objective = ContextLikelihood()
    value, whole = gradient(made, objective, items, 10**6)
    expected = total = 0.0
    for item in items:
        m, y = item.extra["m"], torch.tensor(item.extra["y"])
        mean, wanted = attended(made, item.extra["x"], item.extra["y"], m)[m:], ((y - made.y_mean) / made.y_std)[m:]
        expected += float((0.5 * np.log(2 * np.pi) + 0.5 * (mean - wanted) ** 2).sum())
        total += len(wanted)
    assert value == pytest.approx(expected / total, rel=1e-5)  # y passes through float32 between item and module
    for max_tokens, order in ((1, items), (9, items[::-1])):
        other, ours = gradient(made, objective, order, max_tokens)
        assert other == pytest.approx(value, rel=1e-12) and torch.allclose(
            ours, whole, rtol=0, atol=1e-12 * float(whole.abs().max()) + 1e-13
        )
    per_target = []
    for k, item in enumerate(items):  # a target of weight 2 is two targets
        m = item.extra["m"]
        item.extra["weights"] = np.array([1.0 + (k + i) % 3 for i in range(len(item.extra["y"]))])
        mean = attended(made, item.extra["x"], item.extra["y"], m)[m:]
        wanted = ((torch.tensor(item.extra["y"]) - made.y_mean) / made.y_std)[m:]
        nll = 0.5 * np.log(2 * np.pi) + 0.5 * (mean - wanted) ** 2
        per_target += [float(v) for v, n in zip(nll, item.extra["weights"][m:]) for _ in range(int(n))]
    assert gradient(made, objective, items, 10**6)[0] == pytest.approx(np.mean(per_target), rel=1e-5)
    for item in items:
        del item.extra["weights"]
    made.zero_grad()
    objective(made, collate(items)).loss["nll"][0].backward()
    step = 1e-5
    with torch.no_grad():  # the gradient of one weight by finite differences
        weight = made.blocks[0].value.weight
        weight[3, 2] += step
        up = float(objective(made, collate(items)).loss["nll"][0])
        weight[3, 2] -= 2 * step
        down = float(objective(made, collate(items)).loss["nll"][0])
        weight[3, 2] += step
    assert float(weight.grad[3, 2]) == pytest.approx((up - down) / (2 * step), rel=1e-5)
    theirs = -torch.distributions.Normal(0.5, 2.0).log_prob(torch.tensor(2.0)).item()
    assert float(gaussian_nll(torch.tensor(0.5), torch.tensor(2.0), np.log(4.0))) == pytest.approx(theirs)


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Points of 40 groups with embeddings: every group weighs the two axes of an answer in its own way."""
    rng, rows = np.random.default_rng(0), []
    for g in range(40):
        taste = np.array([np.cos(g), np.sin(g)])
        for question in range(14):
            for answer in range(2):
                x = rng.normal(size=4)
                rows.append(
                    complete_row(
                        "group_preferences/1",
                        {
                            "group": f"g{g}",
                            "question": f"q{question}",
                            "response": f"{g}.{question}.{answer}",
                            "embedding": x.tolist(),
                            "y": float(x[:2] @ taste),
                        },
                        dataset="tastes",
                        source="made",
                        origin="human",
                    )
                )
    path = str(tmp_path_factory.mktemp("groups") / "points")
    write_dataset(path, "tastes", "group_preferences/1", rows)
    return path


def test_more_context_predicts_unseen_groups_better(groups, tiny, spec):  # noqa: F811
    config = {
        "max_steps": 250,
        "batch_size": 16,
        "hidden_size": 32,
        "num_layers": 2,
        "learning_rate": 3e-3,
        "eval_context_sizes": [1, 4, 12],
        "eval_repeats": 4,
    }
    result = execute(spec("group_preference", config, {"model": tiny["policy"], "data": groups}, "gpo"), silent)
    summary = result["summary"]
    assert summary["groups"] == 32 and summary["held_out_groups"] == 8 and summary["points"] == 32 * 28
    assert (
        summary["held_out/mse_at_12"] < 0.5 * summary["held_out/mse_at_1"]
        and summary["held_out/mse_at_12"] < 0.3 * summary["held_out/mse_at_0"]
    )
    assert summary["held_out/accuracy_at_12"] > 0.85 > summary["held_out/accuracy_at_1"] and not result["warnings"]
    again = execute(
        spec(
            "group_preference",
            {**config, "max_steps": 3, "likelihood": "learned_variance"},
            {"model": tiny["policy"], "data": groups},
            "short",
        ),
        silent,
    )
    assert [w["code"] for w in again["warnings"]] == ["context_does_not_help"] or again["summary"][
        "held_out/mse_at_12"
    ] < again["summary"]["held_out/mse_at_0"]


def test_what_is_held_out_or_weighs_nothing_is_not_learned_from(groups, tiny, spec, tmp_path):  # noqa: F811
    rows = [row for row in open_dataset(groups).iter_rows() if row["group"] in ("g0", "g1", "g2")]
    other = [
        {**row, "y": 9.0, "response": f"{row['response']} {k}", **({"weight": 0.0} if k else {"split": "test"})}
        for row in rows[::3]
        for k in (0, 1)
    ]
    config = {"max_steps": 2, "batch_size": 4, "hidden_size": 8, "num_layers": 1, "held_out_share": 0.3}
    made = []
    for name, content in (
        ("some", rows),
        ("more", [row for pair in zip(rows, other) for row in pair] + rows[len(other) :]),
    ):
        write_dataset(str(tmp_path / name), name, "group_preferences/1", content)
        inputs = {"model": tiny["policy"], "data": str(tmp_path / name)}
        result = execute(spec("group_preference", {**config, "eval_context_sizes": [2]}, inputs, f"{name}-run"), silent)
        path = Path(result["outputs"]["model"]["path"], "group_preference.safetensors")
        made.append((path.read_bytes(), result["summary"]))
    assert made[0] == made[1] and made[0][1]["points"] == 2 * len(rows) / 3


def test_ratings_are_standardised_by_weight():
    x, y, weight = torch.randn(5, 6), torch.randn(5), torch.tensor([2.0, 1.0, 3.0, 1.0, 1.0])
    weighted, repeated = PreferenceModule(6, 16, 1), PreferenceModule(6, 16, 1)
    weighted.standardise(x, y, weight)
    repeated.standardise(*(v.repeat_interleave(weight.long(), 0) for v in (x, y)))
    for name in ("x_mean", "x_std", "y_mean", "y_std"):
        assert torch.allclose(getattr(weighted, name), getattr(repeated, name))


def test_a_context_is_held_against_the_mean_rating_of_the_same_questions():
    """A calm group with two questions is in no context of three, so it says nothing of whether that helps."""
    from types import SimpleNamespace

    from stages.group_preference import Config, Group, judge, judged_episodes
    from stages.running.randomness import rng

    stage = SimpleNamespace(
        config=Config(eval_context_sizes=[1, 3], eval_repeats=2),
        device="cpu",
        rng=lambda *purpose: rng(1, "test", *purpose),
    )
    make = lambda name, y: Group(
        [
            SimpleNamespace(group=name, question=f"q{k}", embedding=np.full(6, k, np.float32), y=value, weight=1.0)
            for k, value in enumerate(y)
        ]
    )
    made = module().float()
    mean = float(made.y_mean)
    groups = [make("calm", [mean, mean]), make("wild", [mean + d for d in (3.0, -3.0, 3.0, -3.0, 3.0)])]
    table = judge(stage, made, groups)
    assert [(row["context"], row["groups"]) for row in table] == [(0, 2), (1, 2), (3, 1)]
    for row in table[1:]:
        wanted = np.concatenate(
            [
                item.extra["y"][item.extra["m"] :]
                for size, _, item in judged_episodes(stage, groups)
                if size == row["context"]
            ]
        )
        assert row["mse_of_mean"] == pytest.approx(float(((wanted.astype(float) - mean) ** 2).mean()), rel=1e-5)
    assert table[0]["mse"] == table[0]["mse_of_mean"] < table[2]["mse_of_mean"] == pytest.approx(9.0, rel=1e-5)


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
    """Ratings in words: group `long` likes long answers, `short` short ones; a pair dataset of the same groups."""
    root, rng = tmp_path_factory.mktemp("rated"), np.random.default_rng(0)
    user, assistant = (lambda t: [{"role": "user", "content": t}]), (lambda t: [{"role": "assistant", "content": t}])
    ratings, pairs = [], []
    for g in range(8):
        for q in range(6):
            lengths = rng.permutation(8)[:2] + 1
            scores = [float(n if g % 2 else 9 - n) for n in lengths]
            more = {"extra_json": json.dumps({"group": f"{'long' if g % 2 else 'short'}{g}"})}
            answers = [assistant("a" * n) for n in lengths]
            ratings += [
                complete_row(
                    "ratings/1",
                    {"prompt": user(f"q {q}"), "completion": a, "score": s, "scale_min": 1.0, "scale_max": 8.0, **more},
                    dataset="r",
                    source="s",
                    origin="human",
                )
                for a, s in zip(answers, scores)
            ]
            best = int(np.argmax(scores))
            pairs.append(
                complete_row(
                    "pairs/1",
                    {
                        "prompt": user(f"q {q}"),
                        "chosen": answers[best],
                        "rejected": answers[1 - best],
                        "pairs_in_group": 1,
                        **more,
                    },
                    dataset="p",
                    source="s",
                    origin="human",
                )
            )
    paths = {"ratings": str(root / "ratings"), "pairs": str(root / "pairs")}
    write_dataset(paths["ratings"], "r", "ratings/1", ratings)
    write_dataset(paths["pairs"], "p", "pairs/1", pairs)
    return paths


def trained(spec, tiny, rated, kind="ratings"):  # noqa: F811
    config = {
        "max_steps": 150,
        "batch_size": 8,
        "hidden_size": 32,
        "num_layers": 2,
        "learning_rate": 3e-3,
        "held_out_share": 0.0,
        "eval_context_sizes": [2],
    }
    return execute(
        spec("group_preference", config, {"model": tiny["policy"], "data": rated[kind]}, f"gpo-{kind}"), silent
    )


def test_the_published_module_rewards_one_group(spec, tiny, rated):  # noqa: F811
    """Through rejection sampling: every stored score is what the scorer says in the group's context; another group,
    other scores.
    """
    path = trained(spec, tiny, rated)["outputs"]["model"]["path"]
    chosen = {}
    for group in ("long1", "short0"):
        made = spec(
            "rejection",
            {
                "num_generations": 4,
                "max_completion_length": 12,
                "rewards": [{"kind": "group_preference", "group": group}],
                "max_prompts": 6,
                "block": 4,
                "split": "test",
                "allow_empty": True,
            },
            {"model": tiny["policy"], "prompts": tiny["prompts"], "group_preference": path},
            f"rs-{group}",
        )
        made["inputs"]["context"] = {"kind": "dataset", "path": rated["ratings"], "ref": "c", "digest": "c"}
        rows = [
            r
            for r in open_dataset(execute(made, silent)["outputs"]["candidates"]["path"]).iter_rows()
            if r["kept"] and r["completion"][0]["content"].strip()
        ]
        scorer = load_scorer(path)
        assert isinstance(scorer, GroupPreferenceScorer)
        scorer.observe(points_of(open_dataset(rated["ratings"]), group))
        again = scorer.score([Response(r["prompt"], r["completion"]) for r in rows])
        assert rows and np.allclose([r["reward"] for r in rows], again, atol=1e-4)
        answers = [
            Response([{"role": "user", "content": "q 3"}], [{"role": "assistant", "content": "a" * n}]) for n in (1, 8)
        ]
        chosen[group] = scorer.score(answers)
        # targets are independent
        assert chosen[group] == pytest.approx([scorer.score([a])[0] for a in answers], abs=1e-4)
        scorer.observe(points_of(open_dataset(rated["ratings"]), group)[::-1])
        assert scorer.score(answers) == pytest.approx(chosen[group], abs=1e-4)
    assert chosen["long1"][1] > chosen["long1"][0] and chosen["short0"][0] > chosen["short0"][1]


def test_pairs_become_points_and_what_is_missing_is_said(spec, tiny, rated, tmp_path):  # noqa: F811
    points = points_of(open_dataset(rated["pairs"]), "long1")
    assert [p.y for p in points] == [1.0, 0.0] * 6 and all(
        len(a.completion[0]["content"]) > len(b.completion[0]["content"]) for a, b in zip(points[::2], points[1::2])
    )
    none = [{**row, "weight": float(i > 0)} for i, row in enumerate(open_dataset(rated["pairs"]).iter_rows())]
    write_dataset(str(tmp_path / "none"), "none", "pairs/1", none)
    first = json.loads(none[0]["extra_json"])["group"]
    assert len(points_of(open_dataset(str(tmp_path / "none")), first)) == 2 * 5
    path = trained(spec, tiny, rated, "pairs")["outputs"]["model"]["path"]
    given = {"model": tiny["policy"], "prompts": tiny["prompts"], "group_preference": path}
    for rewards, more, text in (
        (
            [{"kind": "group_preference", "group": "nobody"}],
            {"context": rated["pairs"]},
            "its groups are: long1, long3",
        ),
        ([{"kind": "group_preference", "group": "long1"}], {}, "'context'"),
        ([{"kind": "model", "input": "group_preference"}], {}, "kind: group_preference"),
    ):
        made = spec(
            "rejection",
            {"num_generations": 2, "max_completion_length": 4, "rewards": rewards, "split": "test"},
            given,
            "no",
        )
        made["inputs"] |= {k: {"kind": "dataset", "path": v, "ref": "c", "digest": "c"} for k, v in more.items()}
        with pytest.raises(Exception, match=text):
            execute(made, silent)
    with pytest.raises(ValueError, match="group=NAME"):
        from stages.reward.components import RewardComponent

        RewardComponent(kind="group_preference")


def test_a_tenth_of_thirty_groups_is_three(tmp_path):
    """In floating point 0.1 x 30 is a little above 3, which would be rounded up to 4."""
    from types import SimpleNamespace

    from stages.group_preference import grouped
    from stages.reward_models.preference_module import Point

    def points(groups):
        return [
            Point(f"g{g}", [{"role": "user", "content": f"q{q}"}], [], 1.0, f"{g} {q}", np.zeros(2, np.float32))
            for g in range(groups)
            for q in range(2)
        ]

    for share, groups, aside in ((0.1, 30, 3), (0.1, 31, 4), (0.2, 5, 1), (0.0, 5, 0), (0.01, 5, 1)):
        stage = SimpleNamespace(
            config=SimpleNamespace(held_out_share=share),
            workdir=tmp_path,
            rng=lambda *path: np.random.default_rng(0),
        )
        train, held_out, _ = grouped(stage, points(groups), None)
        assert (len(train), len(held_out)) == (groups - aside, aside)
