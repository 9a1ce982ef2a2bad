"""Dynamic Fine-Tuning, label smoothing and embedding noise (NEFTune) in sft, against independent computations and in
the stage.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.batching import collate, make_item
from stages.harness import execute
from stages.models import modeling
from stages.models.modeling import Head, hidden_states, load_policy, token_and_mean_logps, token_logps
from stages.running import randomness
from stages.sft import Config, NextToken, Noise
from tests.common import silent
from tests.training.test_invariance import gradient, text_items

SFT = {"learning_rate": 1e-2, "batch_size": 8, "num_train_epochs": 2, "max_length": 64}


@pytest.mark.parametrize(
    "softcap,scale,chunk,keep",
    [(None, 1.0, 1 << 20, 1 << 25), (None, 0.7, 40, 80), (4.0, 0.7, 40, 80), (None, 1.0, 40, 0)],
)
def test_the_mean_over_the_vocabulary_comes_from_the_same_pass(softcap, scale, chunk, keep, monkeypatch):
    """Values and gradients of log-probs and means against plain softmax, in chunks of three positions, kept and
    computed again.
    """
    monkeypatch.setattr(modeling, "HEAD_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(modeling, "HEAD_KEEP_ELEMENTS", keep)
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 6), (13, 6), (13,))
    )
    targets, head = torch.randint(0, 13, (9,)), Head(weight, bias, scale, softcap)
    plain = torch.log_softmax(head.logits(hidden), -1)
    picked, mean = plain.gather(1, targets[:, None])[:, 0], plain.mean(-1)
    hits = torch.zeros(9, dtype=torch.bool)
    logps, means = token_and_mean_logps(head, hidden, targets, hits)
    assert (
        torch.allclose(logps, picked, atol=1e-12)
        and torch.allclose(means, mean, atol=1e-12)
        and hits.tolist() == (plain.argmax(-1) == targets).tolist()
    )
    up, up_mean = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    for ours, theirs in (
        ((logps * up + means * up_mean).sum(), (picked * up + mean * up_mean).sum()),
        ((means * up_mean).sum(), (mean * up_mean).sum()),
        ((logps * up).sum(), (picked * up).sum()),
    ):
        for a, b in zip(*(torch.autograd.grad(x, (hidden, weight, bias), retain_graph=True) for x in (ours, theirs))):
            assert torch.allclose(a, b, atol=1e-11)
    assert torch.equal(token_logps(head, hidden, targets)[0], logps)


def by_hand(model, items, loss_of, noise=None):
    """token-mean of loss_of(log-prob of the target, all log-probs) over weighted rows, through the model's own logits,
    one row at a time.
    """
    total = weights = 0.0
    for item in items:
        ids = torch.tensor(item.responses[0].astype(np.int64))
        embedded = model.get_input_embeddings()(ids[None])
        given = (
            {"input_ids": ids[None]}
            if noise is None
            else {"inputs_embeds": embedded + torch.as_tensor(noise(item), dtype=embedded.dtype)}
        )
        logp = torch.log_softmax(model(**given, use_cache=False).logits[0, :-1], -1)
        for j in (j for j in range(1, len(ids)) if item.masks[0][j]):
            total = total + item.extra["weight"] * loss_of(logp[j - 1, ids[j]], logp[j - 1])
            weights = weights + item.extra["weight"]
    return total / weights


TERMS = {
    "dft": ({"loss_type": "dft"}, lambda one, every: -one.detach().exp() * one),
    "smoothing": ({"label_smoothing_factor": 0.2}, lambda one, every: -0.8 * one - 0.2 * every.mean()),
}


@pytest.mark.parametrize("name", list(TERMS))
def test_a_step_equals_an_independent_computation_however_it_is_cut(tiny, name):
    model = load_policy(tiny["policy"]).double()
    settings, loss_of = TERMS[name]
    items = text_items(np.random.default_rng(0))
    objective = NextToken("token-mean", **settings)
    value, ours = gradient(model, objective, items, 10**6)
    model.zero_grad(set_to_none=True)
    loss = by_hand(model, items, loss_of)
    loss.backward()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert value == pytest.approx(float(loss.detach()), rel=2e-6) and torch.allclose(
        ours, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max())
    )
    for max_tokens, order in ((1, items), (60, items[::-1])):
        other, part = gradient(model, objective, order, max_tokens)
        assert other == pytest.approx(value, rel=1e-12) and torch.allclose(
            part, ours, rtol=0, atol=1e-12 * float(ours.abs().max())
        )
    with torch.no_grad():
        shown, plain = (o(model, collate(items)).metrics for o in (objective, NextToken("token-mean")))
    assert float(shown["target_nll"][0]) == float(plain["target_nll"][0]) and float(
        shown["mean_token_accuracy"][0]
    ) == float(plain["mean_token_accuracy"][0])


def test_the_other_terms_go_with_dft(tiny):
    """Unlikelihood is added to it as to the likelihood; the threshold of self-paced learning stays the NLL's."""
    model = load_policy(tiny["policy"]).double()
    items = text_items(np.random.default_rng(1))
    value = {
        kind: gradient(model, NextToken("token-mean", coef, 5, loss_type=kind[0]), items, 60)
        for kind in (("nll", 0), ("nll", 1), ("dft", 0), ("dft", 1))
        for coef in (0.5 * kind[1],)
    }
    assert value["dft", 1][0] - value["dft", 0][0] == pytest.approx(value["nll", 1][0] - value["nll", 0][0], rel=1e-9)
    with torch.no_grad():
        admitted = [
            float(NextToken("token-mean", threshold=5.6, loss_type=t)(model, collate(items)).metrics["admitted"][0])
            for t in ("nll", "dft")
        ]
    assert admitted[0] == admitted[1]


# -- NEFTune -----------------------------------------------------------------------------------------------------------


def noise_for(alpha=5.0, seed=0):
    return Noise(alpha, lambda *purpose: randomness.rng(seed, "sft", *purpose))


@pytest.mark.parametrize("own", (True, False))
def test_noise_is_added_to_the_embeddings_and_to_nothing_else(tiny, own):
    """Our forward and the model's own, against the model fed with noisy embeddings row by row; micro-batches and order
    change nothing.
    """
    model = load_policy(tiny["policy"]).double()
    if not own:
        model._posttrain_lean = False
    items, noise = text_items(np.random.default_rng(2)), noise_for()
    noise.step = 3
    objective = NextToken("token-mean", noise=noise)
    value, ours = gradient(model, objective, items, 10**6)
    quiet, _ = gradient(model, NextToken("token-mean"), items, 10**6)
    assert abs(value - quiet) > 1e-6
    width = model.config.hidden_size

    def of(item):
        n = len(item.responses[0])
        return (randomness.rng(0, "sft", "neftune", 3, item.row_id).random((n, width), dtype=np.float32) * 2 - 1) * (
            5.0 / np.sqrt(n * width)
        )

    model.zero_grad(set_to_none=True)
    loss = by_hand(model, items, lambda one, every: -one, of)
    loss.backward()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert value == pytest.approx(float(loss.detach()), rel=2e-6) and torch.allclose(
        ours, theirs, rtol=0, atol=5e-6 * float(theirs.abs().max())
    )
    tolerance = 1e-12 if own else 2e-6
    for max_tokens, order in ((1, items), (60, items[::-1])):
        other, part = gradient(model, objective, order, max_tokens)
        assert other == pytest.approx(value, rel=tolerance) and torch.allclose(
            part, ours, rtol=0, atol=tolerance * float(ours.abs().max())
        )
    with torch.no_grad():  # validation is without
        assert float(objective(model, collate(items)).loss["nll"][0]) == float(
            NextToken("token-mean")(model, collate(items)).loss["nll"][0]
        )
    assert not model.get_input_embeddings()._forward_hooks


def test_noise_is_uniform_and_anew_for_every_row_and_step():
    class Width:
        def get_input_embeddings(self):
            return torch.nn.Embedding(3, 32)

    items = [make_item(f"r{i}", [], [[1] * n], [[1] * n], weight=1.0) for i, n in enumerate((50, 200))]
    noise = noise_for(alpha=10.0)
    found = noise(collate(items), Width())
    assert found.shape == (250, 32) and found.dtype == torch.float32
    for part, n in ((found[:50], 50), (found[50:], 200)):
        bound = 10.0 / np.sqrt(n * 32)
        assert part.abs().max() <= bound and part.abs().max() > 0.99 * bound and abs(float(part.mean())) < 0.05 * bound
        assert float(part.std()) == pytest.approx(bound / np.sqrt(3), rel=0.03)
    assert torch.equal(noise(collate(items[1:]), Width()), found[50:])  # whatever else is in the micro-batch
    noise.step = 1
    assert not torch.equal(noise(collate(items), Width()), found)


def metrics_of(made):
    return [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "settings",
    [{"loss_type": "dft"}, {"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5.0, "self_paced_threshold": 50.0}],
)
def test_the_stage_learns_with_each(tiny, data, spec, settings):
    made = spec("sft", {**SFT, **settings}, {"model": tiny["policy"], "data": data["demonstrations"]}, "one")
    summary = execute(made, silent)["summary"]
    assert summary["validation/nll"] < summary["validation/nll_before"]
    plain = spec("sft", {**SFT, "max_steps": 1}, {"model": tiny["policy"], "data": data["demonstrations"]}, "plain")
    # the NLL, without noise, whatever is trained
    assert execute(plain, silent)["summary"]["validation/nll_before"] == summary["validation/nll_before"]
    losses = [metrics_of(m)[1]["loss"] for m in (made, plain)]
    assert losses[0] != losses[1]


def test_a_training_whose_loss_explodes_is_warned_of(tiny, data, spec):
    """Its loss is finite and its exit code 0, and its model was published without a word."""
    codes, inputs = {}, {"model": tiny["policy"], "data": data["demonstrations"]}
    for rate in (10.0, 1e-4):
        done = execute(spec("sft", {**SFT, "learning_rate": rate, "max_steps": 4}, inputs, f"rate{rate}"), silent)
        codes[rate] = {warning["code"]: warning["text"] for warning in done["warnings"]}
    assert "learning_rate below 10," in codes[10.0]["diverged"] and "diverged" not in codes[1e-4]


def test_noise_of_a_resumed_run_is_that_of_the_whole_one(tiny, data, spec, monkeypatch):
    from stages import training
    from tests.training.test_resume import outputs

    class Killed(BaseException):
        pass

    config, inputs = {**SFT, "neftune_noise_alpha": 5.0}, {"model": tiny["policy"], "data": data["demonstrations"]}
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "1000")
    execute(spec("sft", config, inputs, "whole"), silent)
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    killed, step = spec("sft", config, inputs, "killed"), training.Trainer.step

    def dying(self, items):
        if self.step_index == 4:
            raise Killed
        return step(self, items)

    monkeypatch.setattr(training.Trainer, "step", dying)
    with pytest.raises(Killed):
        execute(killed, silent)
    monkeypatch.setattr(training.Trainer, "step", step)
    assert execute(killed, silent)["resumed_from"] == 4
    assert outputs(Path(killed["workdir"])) == outputs(Path(killed["workdir"]).parent / "whole")


def test_noise_goes_through_a_model_that_is_not_ours():
    """GPT-2: no forward of ours, learned positions; the noise still reaches the embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=260,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).double()
    items, noise = text_items(np.random.default_rng(3)), noise_for(alpha=50.0)
    batch = collate(items)
    made = noise(batch, model)
    states = hidden_states(model, batch, batch.src_N, made)
    at = 0
    for item in items:
        n = len(item.responses[0])
        ids = torch.tensor(item.responses[0].astype(np.int64))
        alone = model.transformer(
            inputs_embeds=(model.transformer.wte(ids) + made[at : at + n])[None]
        ).last_hidden_state[0]
        mine = (batch.src_N >= at) & (batch.src_N < at + n)
        assert torch.allclose(states[mine], alone[batch.src_N[mine] - at], atol=1e-9)
        at += n
    assert not torch.allclose(states, hidden_states(model, batch, batch.src_N), atol=1e-3)


@pytest.mark.parametrize(
    "config,says",
    [
        ({"label_smoothing_factor": 0.1, "loss_type": "dft"}, "write one of the two"),
        ({"label_smoothing_factor": 0.1, "unlikelihood_coef": 1.0}, "pushes down tokens"),
        ({"neftune_noise_alpha": 5.0, "forward": "compiled"}, "forward=auto"),
        ({"label_smoothing_factor": 1.0}, "less than 1"),
        ({"neftune_noise_alpha": 0.0}, "greater than 0"),
    ],
)
def test_terms_that_do_not_go_together_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        Config(**config)


def test_distillation_does_not_show_these_settings():
    from stages.distill import Config as Distill

    assert not {"loss_type", "label_smoothing_factor", "neftune_noise_alpha"} & set(Distill.model_fields)
