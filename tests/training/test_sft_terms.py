"""Unlikelihood and self-paced learning: settings of ``sft``, against independent computations and in the stage."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.batching import collate, make_item
from stages.direct.direct_losses import unlikelihood_loss
from stages.harness import execute
from stages.models import modeling
from stages.models.modeling import Head, column_logps, load_policy
from stages.sft import Config, NextToken, recent_tokens
from tests.common import assistant, silent, user
from tests.training.test_invariance import gradient, text_items

SFT = {"learning_rate": 1e-2, "batch_size": 8, "num_train_epochs": 2, "max_length": 64}


@pytest.mark.parametrize("softcap,scale,temperature", [(None, 1.0, 1.0), (4.0, 0.7, 1.3)])
def test_columns_equal_plain_softmax_with_gradients(softcap, scale, temperature, monkeypatch):
    """Chunks of three positions; the last row asks for every token, so nothing is left."""
    monkeypatch.setattr(modeling, "HEAD_CHUNK_ELEMENTS", 40)
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 6), (13, 6), (13,))
    )
    head = Head(weight, bias, scale, softcap)
    z = head.logits(hidden) / temperature
    plain = torch.log_softmax(z, -1)
    logits, most = Head.logits, []
    monkeypatch.setattr(Head, "logits", lambda self, h: most.append(len(h)) or logits(self, h))
    for k in (1, 4, 13):
        columns = torch.stack([torch.randperm(13)[:k] for _ in range(9)])
        upstream, upstream_rest = torch.randn(9, k, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
        logps, rest = column_logps(head, hidden, columns, temperature, rest=True)
        picked = plain.gather(1, columns)
        left = plain.scatter(1, columns, -torch.inf).logsumexp(-1)
        assert (
            torch.allclose(logps, picked, atol=1e-12)
            and torch.allclose(rest, left, atol=1e-12)
            and (k < 13 or rest.isneginf().all())
        )
        mine, theirs = (logps * upstream).sum(), (picked * upstream).sum()
        if k < 13:
            mine, theirs = mine + (rest * upstream_rest).sum(), theirs + (left * upstream_rest).sum()
        else:  # nothing is left: no gradient, whatever comes back
            mine = mine + (torch.where(rest.isfinite(), rest, 0.0) * upstream_rest).sum()
        for a, b in zip(*(torch.autograd.grad(x, (hidden, weight, bias), retain_graph=True) for x in (mine, theirs))):
            assert torch.allclose(a, b, atol=1e-11)
    assert max(most) == 3  # never the logits of the whole batch, forward or backward


def negatives_by_hand(tokens, sequences, window):
    """{c among the trained tokens before t of the same response, at most ``window`` back} without the token itself."""
    return [
        {tokens[j] for j in range(max(0, t - window), t) if sequences[j] == sequences[t]} - {tokens[t]}
        for t in range(len(tokens))
    ]


@pytest.mark.parametrize("window", (1, 3, 100))
def test_recent_tokens_are_those_before_in_the_response_each_once(window):
    rng = np.random.default_rng(0)
    sequences = np.sort(rng.integers(0, 5, 60))
    tokens = rng.integers(0, 4, 60)
    found, valid = recent_tokens(torch.tensor(tokens), torch.tensor(sequences), window)
    for t, wanted in enumerate(negatives_by_hand(tokens.tolist(), sequences.tolist(), window)):
        mine = found[t][valid[t]].tolist()
        assert len(mine) == len(set(mine)) and set(mine) == wanted
        assert set(found[t][~valid[t]].tolist()) <= {tokens[t]}
    alone, none = recent_tokens(torch.tensor([7]), torch.tensor([0]), 5)
    assert alone.tolist() == [[7]] and not none.any()


def by_hand(model, item, coef, window, weight=1.0):
    """(sum of token losses of a row, number of trained tokens) through the model's own logits."""
    ids, mask = torch.tensor(item.responses[0].astype(np.int64)), item.masks[0]
    logp = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1], -1)
    at = [j for j in range(1, len(ids)) if mask[j]]
    nll = -sum(logp[j - 1, ids[j]] for j in at)
    extra = 0.0
    for j, wanted in zip(at, negatives_by_hand([int(ids[j]) for j in at], [0] * len(at), window)):
        extra = extra - sum(torch.log(1 - logp[j - 1, c].exp()) for c in wanted)
    return nll, nll + coef * extra, len(at)


def repeating_items(seed=0):
    rng = np.random.default_rng(seed)
    return [
        make_item(f"row-{i}", [], [rng.integers(10, 14, 12 + i).tolist()], [[1] * (12 + i)], weight=1.0 + i % 2)
        for i in range(5)
    ]


def test_unlikelihood_equals_an_independent_computation(tiny):
    model = load_policy(tiny["policy"]).double()
    model._posttrain_lean = False
    items = repeating_items()
    objective = NextToken("token-mean", unlikelihood_coef=0.7, unlikelihood_window=5)
    value, ours = gradient(model, objective, items, 40)
    model.zero_grad(set_to_none=True)
    parts = [(by_hand(model, i, 0.7, 5), i.extra["weight"]) for i in items]
    loss = sum(w * total for (_, total, _), w in parts) / sum(w * n for (_, _, n), w in parts)
    loss.backward()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert value == pytest.approx(float(loss.detach()), rel=1e-9) and torch.allclose(ours, theirs, atol=1e-9)
    assert torch.allclose(
        gradient(model, NextToken("token-mean", 0.0), items, 40)[1],
        gradient(model, NextToken("token-mean"), items, 40)[1],
    )
    assert not torch.allclose(gradient(model, NextToken("token-mean"), items, 40)[1], ours, atol=1e-4)


def test_a_repeated_token_that_is_certain_stays_finite():
    logps = torch.tensor([0.0, -1e-9, -0.5], requires_grad=True)
    value = unlikelihood_loss(logps)
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logps.grad).all() and (logps.grad > 0).all()
    assert float(value[2].detach()) == pytest.approx(-np.log(1 - np.exp(-0.5)), rel=1e-6)


@pytest.mark.parametrize("mode", ("token-mean", "seq-mean-token-mean"))
def test_self_paced_trains_the_easy_rows_only(tiny, mode):
    """The gradient is that of the admitted rows, over the counts of all; v is constant in the weights."""
    model = load_policy(tiny["policy"]).double()
    model._posttrain_lean = False
    items = text_items(np.random.default_rng(0))
    losses = [gradient(model, NextToken("token-mean"), [i], 10**6)[0] for i in items]
    threshold = sorted(losses)[3]  # strict: the row that equals it stays out
    easy = [i for i, loss in zip(items, losses) if loss < threshold]
    assert len(easy) == 3
    plain, counts = NextToken(mode), NextToken(mode).counts(items)
    plain.counts = lambda _: counts
    expected = gradient(model, plain, easy, 10**6)
    for max_tokens in (1, 10**6):
        value, ours = gradient(model, NextToken(mode, threshold=threshold), items, max_tokens)
        assert value == pytest.approx(expected[0], rel=1e-9) and torch.allclose(ours, expected[1], atol=1e-10)
    sums = NextToken(mode, threshold=threshold)(model, collate(items))
    assert float(sums.metrics["admitted"][0]) == 3 and counts["rows"] == 7
    none = gradient(model, NextToken(mode, threshold=1e-3), items, 60)
    assert none[0] == 0.0 and not none[1].any()
    everything = gradient(model, NextToken(mode, threshold=1e9), items, 60)
    assert torch.equal(everything[1], gradient(model, NextToken(mode), items, 60)[1])


def metrics_of(made):
    return [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]


def test_the_stage_unlearns_repetition(tiny, data, spec):
    """Rows that repeat one letter: with the term, the model gives repeats less mass than without."""
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    path = str(Path(data["demonstrations"]).parent / "alternating")
    write_dataset(
        path,
        "alternating",
        "demonstrations/1",
        [
            complete_row(
                "demonstrations/1",
                {
                    "messages": [
                        {"role": "user", "content": f"say {i}"},
                        {"role": "assistant", "content": "".join("xyz"[(i + j) % 3] for j in range(9))},
                    ],
                    "train_turns": [1],
                    "kept": True,
                },
                dataset="a",
                source="s",
                origin="human",
            )
            for i in range(24)
        ],
    )
    mass = {}
    for coef in (0.0, 5.0):
        made = spec(
            "sft",
            {**SFT, "num_train_epochs": 3, "unlikelihood_coef": coef},
            {"model": tiny["policy"], "data": path},
            f"u{coef}",
        )
        model = load_policy(execute(made, silent)["outputs"]["model"]["path"])
        from stages.chat import renderer_for
        from stages.harness import Stage
        from stages.registry import get_stage
        from stages.sft import encode_demonstrations

        stage = Stage(get_stage("sft"), {**made, "workdir": made["workdir"] + "-look"}, silent)
        items, _ = encode_demonstrations(stage.dataset("data"), "train", renderer_for(tiny["policy"]), stage.config)
        with torch.no_grad():
            sums = NextToken("token-mean", 1.0)(model, collate(items))
        mass[coef] = float(sums.metrics["repeat_probability"][0]) / sum(i.n_targets for i in items)
        rows = metrics_of(made)
        assert all(("unlikelihood" in r) == bool(coef) for r in rows if "loss" in r)
    assert mass[5.0] < 0.8 * mass[0.0]


def test_the_stage_lets_harder_rows_in(tiny, data, spec):
    made = spec(
        "sft",
        {
            **SFT,
            "self_paced_threshold": 5.0,
            "self_paced_threshold_end": 20.0,
            "learning_rate": 1e-4,
            "num_train_epochs": 3,
        },
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "paced",
    )
    result = execute(made, silent)
    steps = [r for r in metrics_of(made) if "loss" in r]
    thresholds = [r["self_paced_threshold"] for r in steps]
    assert (
        thresholds[0] == 5.0
        and thresholds[-1] == pytest.approx(20.0)
        and np.allclose(np.diff(np.log(thresholds)), np.log(4) / (len(steps) - 1))
    )
    assert steps[0]["admitted"] < 0.5 and steps[-1]["admitted"] == 1.0
    assert result["summary"]["validation/nll"] > 5.0  # validation counts rows that training has not let in
    plain = execute(
        spec("sft", {**SFT, "max_steps": 1}, {"model": tiny["policy"], "data": data["demonstrations"]}, "plain"), silent
    )
    assert plain["summary"]["validation/nll_before"] == result["summary"]["validation/nll_before"]


def test_a_threshold_below_everything_is_said(tiny, data, spec):
    made = spec(
        "sft",
        {**SFT, "self_paced_threshold": 1e-3, "max_steps": 2},
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "low",
    )
    result = execute(made, silent)
    assert [w["code"] for w in result["warnings"]] == ["self_paced_nothing"]
    with pytest.raises(ValueError, match="self_paced_threshold=2"):
        Config(self_paced_threshold=3.0, self_paced_threshold_end=2.0)


def test_distillation_does_not_show_settings_of_sft_alone():
    from stages.distill import Config as Distill

    assert not {"unlikelihood_coef", "unlikelihood_window", "self_paced_threshold", "self_paced_threshold_end"} & set(
        Distill.model_fields
    )


@pytest.mark.parametrize(
    "given,says",
    [
        ({"loss_scale_factor": 100.0}, "loss_agg_mode=seq-mean-token-sum-norm"),
        ({"curriculum_stages": 5}, "curriculum=length"),
        ({"unlikelihood_window": 8}, "unlikelihood_coef=1"),
        ({"lora_alpha": 8.0}, "lora_rank=16"),
    ],
)
def test_settings_that_this_run_would_not_read_are_refused(given, says):
    with pytest.raises(ValueError, match=f"would change nothing.*{says}"):
        Config(**given)
    whole = Config(
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=100.0,
        curriculum="length",
        curriculum_stages=5,
        unlikelihood_coef=1.0,
        unlikelihood_window=8,
    )
    assert Config(**whole.model_dump()) == whole and Config(**Config().model_dump()) == Config()


def test_settings_of_answers_or_turns_that_are_not_there_are_refused(tiny, data, spec, tmp_path):
    """Without a reward model no answers are judged, and plain text has no turns."""
    from stages.spec import ConfigError
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    write_dataset(
        str(tmp_path / "text"),
        "t",
        "text/1",
        [
            complete_row("text/1", {"text": f"word {i} " * 20}, dataset="t", source="s", origin="human")
            for i in range(8)
        ],
    )
    for rows, given, says in (
        (data["demonstrations"], {"eval_prompts": 8}, "without the input reward_model"),
        (data["demonstrations"], {"eval_completion_length": 8}, "reward_model"),
        (data["demonstrations"], {"eval_every": 1, "eval_rows": 0}, "eval_rows=500, or give the input reward_model"),
        (str(tmp_path / "text"), {"train_on": "final_turn"}, "write train_on=full"),
        (str(tmp_path / "text"), {"train_on": "final_message"}, "write train_on=full"),
    ):
        with pytest.raises(ConfigError, match=f"would change nothing.*{says}"):
            execute(
                spec("sft", {**SFT, "max_steps": 1, **given}, {"model": tiny["policy"], "data": rows}, says[-6:]),
                silent,
            )
    execute(
        spec(
            "sft",
            {**SFT, "max_steps": 1, "train_on": "full"},
            {"model": tiny["policy"], "data": str(tmp_path / "text")},
            "whole",
        ),
        silent,
    )


def test_answers_that_cannot_be_scored_do_not_count(tiny, spec, tmp_path):
    """The first assistant turn of each of the first validation rows is answered; the means of a pass are over what has
    a score, a length and an end.
    """
    from types import SimpleNamespace

    from stages.chat import renderer_for
    from stages.harness import Stage
    from stages.models.modeling import load_policy
    from stages.registry import get_stage
    from stages.sft import Answers
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    talks = [
        [{"role": "system", "content": "be brief"}, *user("a"), *assistant("b"), *user("c"), *assistant("d")],
        assistant("nobody asked"),
        *(user(text) + assistant("yes") for text in "efgh"),
    ]
    rows = [
        complete_row(
            "demonstrations/1",
            {"messages": talk, "train_turns": [len(talk) - 1], "kept": True},
            dataset="d",
            source="s",
            origin="human",
            split="validation",
        )
        for talk in talks
    ]
    write_dataset(str(tmp_path / "d"), "d", "demonstrations/1", rows)
    inputs = {"model": tiny["policy"], "data": str(tmp_path / "d"), "reward_model": tiny["reward"]}
    stage = Stage(get_stage("sft"), spec("sft", {"eval_prompts": 4, "eval_completion_length": 5}, inputs, "a"), silent)
    renderer = renderer_for(tiny["policy"])
    answers = Answers(stage, stage.dataset("data"), renderer, load_policy(tiny["policy"]))
    prompts = [talks[0][:2], *(user(text) for text in "efg")]
    assert [[(m["role"], m["content"]) for m in row["prompt"]] for row in answers.prompts] == [
        [(m["role"], m["content"]) for m in p] for p in prompts
    ]
    params, given = answers.params, []
    assert (params.temperature, params.max_new_tokens, params.stop_ids) == (0.0, 5, renderer.stop_ids)

    ends = [("eos", 3), ("length", 5), ("stop", 2), ("length", 5)]

    def generate(ids, params, seeds):
        assert ids == [renderer.prompt_ids(p) for p in prompts] and params is answers.params
        return [[SimpleNamespace(text=f"t{n}{k}", ids=[0] * n, finish_reason=r)] for k, (r, n) in enumerate(ends)]

    def score(responses):
        given.append([r.completion[0]["content"] for r in responses])
        return scores

    released = []
    answers.sampler = SimpleNamespace(generate=generate, release=lambda: released.append(1))
    answers.scorer = SimpleNamespace(score=score)
    scores = [1.0, 4.0]  # the model is not asked about the two that were cut, which count -1
    assert answers.judge() == {"reward": 0.75, "answer_length": 3.75, "stop_rate": 0.5}
    assert given == [["t30", "t22"]] and released == [1]
    scores = [math.nan, 4.0]
    assert answers.judge()["reward"] == pytest.approx((4 - 1 - 1) / 3)
    ends, scores = [("eos", 3)] * 4, [math.nan] * 4
    assert math.isnan(answers.judge()["reward"])


def test_where_nothing_is_held_out_it_is_said_how(tiny, spec, tmp_path):
    from stages.spec import ConfigError
    from stages.training import TrainingError
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    rows = [
        {"messages": user(f"say {i}") + assistant("b" * (1 + i)), "train_turns": [1], "kept": True} for i in range(8)
    ]
    write_dataset(
        str(tmp_path / "rows"),
        "rows",
        "demonstrations/1",
        [complete_row("demonstrations/1", row, dataset="rows", source="s", origin="human") for row in rows],
    )
    inputs = {"model": tiny["policy"], "data": str(tmp_path / "rows")}
    settings = {**SFT, "max_steps": 1, "num_train_epochs": 1, "eval_every": 1}
    told = execute(spec("sft", settings, inputs, "watched"), silent)["warnings"]
    assert [w["text"] for w in told if w["code"] == "no_validation_rows"][0].count("validation_fraction=0.05") == 1
    with pytest.raises(TrainingError, match="select_by=loss needs validation rows.*ingest.*validation_fraction=0.05"):
        execute(spec("sft", {**settings, "select_by": "loss"}, inputs, "chosen"), silent)
    asked = [{"prompt": user(f"what is {i}?"), "answer": str(i), "answer_type": "integer"} for i in range(4)]
    write_dataset(
        str(tmp_path / "asked"),
        "asked",
        "prompts/1",
        [complete_row("prompts/1", row, dataset="asked", source="s", origin="human") for row in asked],
    )
    settings = {"preset": "grpo", "max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "eval_prompts": 2}
    with pytest.raises(ConfigError, match="eval_prompts=2 asks validation prompts.*validation_fraction=0.05"):
        execute(spec("rl", settings, {**inputs, "data": str(tmp_path / "asked")}, "asked"), silent)
