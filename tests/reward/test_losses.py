"""One step of every objective equals an independent computation: plain transformers forwards, one response at a time,
float64.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.batching import collate, plan
from stages.reward_models.reward_data import (
    Drop,
    annotator_shifts,
    balanced,
    control_items,
    encode,
    pair_difficulty,
    pair_items,
    ranking_items,
    standardise,
)
from stages.reward_models.reward_heads import (
    ChatReader,
    add_gain_bias,
    drop_lm_head,
    keep_lm_head,
    new_reward_model,
    reader_for,
    resolve_pooling,
    response_outputs,
    score_head,
)
from stages.reward_models.reward_losses import RewardLoss
from stages.reward_model import Config
from stages.reward_models.reward_objectives import READ_BY, REWARD_OBJECTIVES, objective_for
from stages.spec import ConfigError
from storage.datasets import open_dataset

softplus = torch.nn.functional.softplus


def setup(path, data, objective, n=4, outputs=1, **settings):
    """(model, items, loss object) on the first rows of a dataset, everything in float64."""
    row = REWARD_OBJECTIVES[objective]
    config = Config(objective=objective, max_length=96, **{**dict(row.settings), **settings})
    if row.reads == "labels":
        from stages.models.modeling import load_policy

        model, pooling = load_policy(path).double(), "last"
    else:
        model = new_reward_model(path, seed=1, outputs=outputs).double()
        pooling = resolve_pooling(config.pooling, model, row.reads)
    # the independent computation runs the model's own forward, whose norms round to float32
    model._posttrain_lean = False
    reader = reader_for(path, model, config.max_length, pooling)
    items = encode(row, open_dataset(data), "train", reader, config, limit=n)
    return model, items, RewardLoss(row, config, pooling), config


def ours(model, items, loss, max_tokens=10**6):
    counts = loss.counts(items)
    model.zero_grad(set_to_none=True)
    value = 0.0
    for group in plan(items, max_tokens):
        part = sum(total / counts[by] for total, by in loss(model, collate(group)).loss.values())
        part.backward()
        value += float(part.detach())
    return value, gradients(model)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


def states(model, item, k, first=None):
    """Hidden states [T, H] of one response behind its prompt, by transformers' own forward; its first response
    position.
    """
    ids = torch.tensor([[*item.prompt.tolist(), *item.responses[k].tolist()]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.reads_both_ways if hasattr(model, "reads_both_ways") else False:
        inputs["token_type_ids"] = (torch.arange(ids.shape[1]) >= item.extra["first"][k]).long()[None]
    return model.base_model(**inputs).last_hidden_state[0], len(item.prompt)


def last_score(model, item, k):
    return score_head(model)(states(model, item, k)[0][-1])


def target_outputs(model, item):
    """Head outputs at the trained tokens of the item's only response."""
    h, start = states(model, item, 0)
    at = [start + j for j, m in enumerate(item.masks[0]) if m]
    return score_head(model)(h[at])


def pair_loss(model, items, each):
    return sum(each(last_score(model, i, 0)[0], last_score(model, i, 1)[0], i.extra) for i in items) / len(items)


def bt(margin=False, soft=False, smooth=0.0, centre=0.0):
    def each(a, b, extra):
        d = a - b - (extra["margin"] if margin else 0.0)
        p = extra["label_prob"] if soft else 1.0
        p = p * (1 - smooth) + (1 - p) * smooth
        return (
            -p * torch.nn.functional.logsigmoid(d)
            - (1 - p) * torch.nn.functional.logsigmoid(-d)
            + centre * (a + b) ** 2
        )

    return lambda model, items, config: pair_loss(model, items, each)


def kwise(model, items, config):
    losses, counts = [], []
    for item in items:
        s = [last_score(model, item, k)[0] for k in range(len(item.responses))]
        each = [softplus(s[j] - s[i]) for i in range(len(s)) for j in range(i + 1, len(s))]
        losses.append(sum(each))
        counts.append(len(each))
    return (
        sum(l / c for l, c in zip(losses, counts)) / len(items)
        if config.pair_weighting == "per_prompt"
        else sum(losses) / sum(counts)
    )


def listwise(model, items, config):
    total = 0.0
    for item in items:
        s = torch.stack([last_score(model, item, k)[0] for k in range(len(item.responses))])
        probability = 1.0
        for k in range(min(len(s) - 1, config.top_ranks or 99)):
            probability = probability * s[k].exp() / s[k:].exp().sum()
        total = total - probability.log() / ((len(s) - 1) if config.normalise_by_k else 1)
    return total / len(items)


def regress(model, items, config):
    total = 0.0
    for item in items:
        out = last_score(model, item, 0)
        errors = [abs(out[k] - t) for k, t in enumerate(item.extra["targets"]) if t == t]
        total = total + sum(e**2 if config.regression_loss == "mse" or e <= 1 else 2 * e - 1 for e in errors) / len(
            errors
        )
    return total / len(items)


def per_token(each):
    def loss(model, items, config):
        values = [each(z, item.extra["target"]) for item in items for z in target_outputs(model, item)[:, 0]]
        return sum(values) / len(values)

    return loss


def bce(z, y):
    return softplus(-z) if y else softplus(z)


def steps(model, items, config):
    values = []
    for item in items:
        for out, label in zip(target_outputs(model, item), item.extra["labels"]):
            klass = label + 1 if config.step_classes == 3 else int(label >= 0)
            values.append(out.logsumexp(0) - out[klass])
    return sum(values) / len(values)


def pairwise(model, items, config):
    total = 0.0
    for item in items:
        p = item.extra["label_prob"]
        p = p * (1 - config.label_smoothing) + (1 - p) * config.label_smoothing
        forward, backward = (last_score(model, item, k)[0] for k in (0, 1))
        total = (
            total + p * (softplus(-forward) + softplus(backward)) + (1 - p) * (softplus(forward) + softplus(-backward))
        )
    return total / 2 / len(items)


def label_words(model, items, config):
    values = []
    for item in items:
        ids = [*item.prompt.tolist(), *item.responses[0].tolist()]
        logp = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        values += [-logp[j - 1, ids[j]] for j in range(len(item.prompt), len(ids))]
    return sum(values) / len(values)


def control_words(model, items, config):
    values = [
        softplus(last_score(model, item, k + 1)[0] - last_score(model, item, k)[0])
        for item in items
        for k in range(0, len(item.responses), 2)
    ]
    return sum(values) / len(values)


CASES = {
    "bt": ("pairs", "bt", {}, bt()),
    "margin": ("pairs", "margin", {}, bt(margin=True)),
    "soft": ("pairs", "soft_label", {}, bt(soft=True)),
    "bt smoothed, centred": (
        "pairs",
        "bt",
        {"label_smoothing": 0.1, "center_rewards_coefficient": 0.01},
        bt(smooth=0.1, centre=0.01),
    ),
    "kwise per prompt": ("rankings", "kwise_pairs", {}, kwise),
    "kwise per pair": ("rankings", "kwise_pairs", {"pair_weighting": "per_pair"}, kwise),
    "plackett-luce": ("rankings", "plackett_luce", {}, listwise),
    "plackett-luce top": ("rankings", "plackett_luce", {"top_ranks": 1}, listwise),
    "plackett-luce / K": ("rankings", "plackett_luce", {"normalise_by_k": True}, listwise),
    "regression": ("ratings", "regression", {"attributes": ["help", "truth"]}, regress),
    "huber": ("ratings", "regression", {"regression_loss": "huber"}, regress),
    "pointwise": (
        "labels",
        "pointwise_bce",
        {},
        lambda m, items, c: sum(bce(last_score(m, i, 0)[0], i.extra["target"]) for i in items) / len(items),
    ),
    "orm": ("labels", "orm", {}, per_token(bce)),
    "value": ("labels", "value", {}, per_token(lambda z, y: (z - y) ** 2)),
    "prm 2": ("steps", "prm", {}, steps),
    "prm 3": ("steps", "prm", {"step_classes": 3}, steps),
    "pairwise": ("pairs", "pairwise", {}, pairwise),
    "pairwise soft, smoothed": ("pairs", "pairwise", {"use_soft_labels": True, "label_smoothing": 0.2}, pairwise),
    "control tokens of pairs": ("pairs", "control_tokens", {}, control_words),
    "control tokens of labels": ("labels", "control_tokens", {"label_words": ["yes", "no"]}, control_words),
    "t2t_point": ("pairs", "t2t_point", {}, label_words),
    "t2t_pair": ("pairs", "t2t_pair", {}, label_words),
}
OUTPUTS = {"prm 2": 2, "prm 3": 3, "regression": 2}


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_equals_an_independent_computation(tiny, rows, name):
    data, objective, settings, expected = CASES[name]
    model, items, loss, config = setup(tiny["policy"], rows[data], objective, outputs=OUTPUTS.get(name, 1), **settings)
    if objective == "regression":
        standardise(items, None)
    value, grads = ours(model, items, loss)
    split_value, split = ours(model, items, loss, max_tokens=1)
    model.zero_grad(set_to_none=True)
    plain = expected(model, items, config)
    plain.backward()
    # transformers keeps norms and rotary tables in float32 inside, the training forward does not: that is all they may
    # differ by.
    assert value == pytest.approx(float(plain.detach()), rel=2e-6) and split_value == pytest.approx(value, rel=1e-12)
    theirs = gradients(model)
    assert set(grads) == set(theirs)
    largest = max(float(g.abs().max()) for g in theirs.values())
    for key, g in theirs.items():
        assert torch.allclose(grads[key], g, rtol=0, atol=1e-5 * float(g.abs().max())), key
        assert torch.allclose(split[key], grads[key], rtol=0, atol=1e-12 * largest), key


@pytest.mark.parametrize(
    "name",
    [
        "bt",
        "kwise per prompt",
        "kwise per pair",
        "plackett-luce",
        "huber",
        "pointwise",
        "orm",
        "value",
        "prm 2",
        "pairwise",
        "control tokens of pairs",
        "t2t_pair",
    ],
)
def test_row_weights_share_the_step_however_small_they_are(tiny, rows, name):
    """A step is the weighted mean of its rows, also where the weights of all of them add up to less than one; metrics
    of answers count every row once.
    """
    from stages.settings import OptimizerConfig
    from stages.training import Trainer

    data, objective, settings, _ = CASES[name]
    model, items, loss, config = setup(tiny["policy"], rows[data], objective, outputs=OUTPUTS.get(name, 1), **settings)
    if objective == "regression":
        standardise(items, None)
    trainer = Trainer(model, loss, OptimizerConfig(), 1)
    term, by = next((term, by) for term, (_, by) in loss(model, collate(items)).loss.items())
    alone = [trainer.evaluate([item]) for item in items]
    shares = np.linspace(1.0, 2.0, len(items)) * [item.extra["counts"][by] for item in items]
    expected = float(np.dot(shares, [m["loss"] for m in alone]) / shares.sum())
    norms = []
    for scale in (1.0, 1e-3):
        weighted = []
        for item, weight in zip(items, np.linspace(scale, 2 * scale, len(items))):
            counts = {k: v * (weight if k == by else 1.0) for k, v in item.extra["counts"].items()}
            extra = {**item.extra, "weight": weight, "counts": counts} | (
                {"pair_weight": item.extra["pair_weight"] * weight} if "pair_weight" in item.extra else {}
            )
            weighted.append(replace(item, extra=extra))
        found = trainer.evaluate(weighted)
        assert found["loss"] == pytest.approx(expected, rel=1e-6) and term not in found, (
            "one term is the loss itself, and not logged twice"
        )
        assert {**found, "loss": 0.0} == pytest.approx({**trainer.evaluate(items), "loss": 0.0}, rel=1e-6)
        norms.append(trainer.gradient_norm(weighted))
    assert norms[1] == pytest.approx(norms[0], rel=1e-6) and norms[0] > 0


def test_metrics_equal_an_independent_computation(tiny, rows):
    """What the log says of scores, attributes, outcomes, orders and steps, of responses whose scores lie on both sides
    of every border.
    """
    from stages.settings import OptimizerConfig
    from stages.training import Trainer

    def mean(values):
        return float(np.mean([float(v) for v in values]))

    def both(model, item):
        return [torch.sigmoid(last_score(model, item, k)[0]) for k in (0, 1)]

    def by_attribute(model, items):
        return {
            "absolute_error": mean(
                np.nanmean(np.abs(last_score(model, i, 0).numpy() - i.extra["targets"])) for i in items
            )
        }

    expected = {
        "bt": lambda m, items: (
            lambda s: {
                "accuracy": mean(a > b for a, b in s),
                "margin": mean(a - b for a, b in s),
                "mean_reward": mean(x for one in s for x in one),
                "score_square_mean": mean(x * x for one in s for x in one),
            }
        )([[last_score(m, i, k)[0] for k in (0, 1)] for i in items]),
        "regression": by_attribute,
        "orm": lambda m, items: {
            "accuracy": mean((target_outputs(m, i)[-1, 0] > 0) == (i.extra["target"] > 0.5) for i in items),
            "base_rate": mean(i.extra["target"] for i in items),
        },
        "pairwise": lambda m, items: {
            "accuracy": mean(a > b for a, b in (both(m, i) for i in items)),
            "order_inconsistency": mean(abs(a + b - 1) for a, b in (both(m, i) for i in items)),
        },
        "prm 3": lambda m, items: {
            "accuracy": mean(
                o.argmax() == np.argmax(t) for i in items for o, t in zip(target_outputs(m, i), i.extra["targets"])
            ),
            "base_rate": mean(t[-1] for i in items for t in i.extra["targets"]),
        },
    }
    for name, metrics in expected.items():
        data, objective, settings, _ = CASES[name]
        model, items, loss, _ = setup(
            tiny["policy"], rows[data], objective, n=12, outputs=OUTPUTS.get(name, 1), **settings
        )
        if objective == "regression":
            standardise(items, None)
        trainer = Trainer(model, loss, OptimizerConfig(max_tokens_per_micro_batch=300), 1)
        for _ in range(2):  # the head as it is, and turned around
            found = trainer.evaluate(items)
            with torch.no_grad():
                wanted = metrics(model, items)
                score_head(model).weight.neg_()
            assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-9), name


def test_every_objective_is_among_the_cases():
    from stages.reward_models.reward_objectives import REWARD_OBJECTIVES

    assert {objective for _, objective, _, _ in CASES.values()} == set(REWARD_OBJECTIVES)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_encoder_pools_what_transformers_pools(encoder, rows, pooling):
    """Padding, micro-batches and segment ids change nothing; cls is the model's own head, mean averages prompt and
    response tokens.
    """
    model, items, loss, _ = setup(encoder, rows["pairs"], "bt", pooling=pooling)
    batched = response_outputs(model, collate(items), pooling)[:, 0]
    alone = []
    for item in items:
        for k, ids in enumerate(item.responses):
            inputs = {
                "input_ids": torch.tensor(ids[None].astype(np.int64)),
                "token_type_ids": (torch.arange(len(ids)) >= item.extra["first"][k]).long()[None],
            }
            if pooling == "cls":
                alone.append(model(**inputs).logits[0, 0])
            else:
                alone.append(score_head(model)(model.base_model(**inputs).last_hidden_state[0].mean(0))[0])
    assert torch.allclose(batched, torch.stack(alone), atol=1e-6)
    text = loss_text(encoder, items[0])
    assert text.startswith("[CLS]") and text.count("[SEP]") == 2 and "good" in text.split("[SEP]")[1]


def test_special_token_text_in_what_an_encoder_reads_is_text(encoder):
    """An answer that writes [SEP] would end its own segment, and [MASK] be a word that the model fills in."""
    from transformers import AutoTokenizer

    from stages.reward_models.reward_heads import EncoderReader

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    reader = EncoderReader(tokenizer, 64)
    control = {
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        tokenizer.mask_token_id,
        tokenizer.pad_token_id,
    }
    prompt, [(answer, _)] = reader.parts(
        [{"role": "user", "content": "a [CLS] good"}],
        [[{"role": "assistant", "content": "good [SEP] bad [MASK] [PAD]"}]],
    )
    assert not control & {*prompt, *answer}
    _, ids, _, _ = reader.wrap(prompt, answer, [1] * len(answer))
    assert [i for i in ids if i in control] == [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.sep_token_id]
    assert reader.plain("a good one") == tokenizer("a good one", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "name, positions", [("bert", 20), ("roberta", 18), ("mpnet", 18), ("xlm-roberta-xl", 18), ("data2vec-text", 18)]
)
def test_rows_are_cut_to_the_positions_that_an_encoder_has(encoder, name, positions):
    """RoBERTa's family counts positions from behind the padding token's, so a row as long as the table would end the
    run in the middle.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        name,
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=20,
        pad_token_id=1,
        num_labels=1,
    )
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.reads_both_ways = True
    reader = reader_for(encoder, model, None)
    assert reader.max_length == positions and reader_for(encoder, model, 12).max_length == 12
    ids = torch.full((1, positions + 1), 5)
    assert torch.isfinite(model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1])).logits).all()
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_an_encoder_without_special_tokens_says_what_to_give(encoder):
    """It ended in a bare StopIteration."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    from stages.models.modeling import ModelError
    from stages.reward_models.reward_heads import EncoderReader

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    assert EncoderReader(tokenizer, 64).middle == [tokenizer.sep_token_id]
    for template in ("$A", "[CLS] $A"):  # nothing at all, and nothing between the texts
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=template, pair=f"{template} $B:1", special_tokens=[("[CLS]", tokenizer.cls_token_id)]
        )
        with pytest.raises(ModelError, match="no special token between two texts.*post_processor"):
            EncoderReader(tokenizer, 64)


def loss_text(path, item):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path).decode(item.responses[0])


def test_a_decoder_can_average_its_tokens(tiny, rows):
    model, items, _, _ = setup(tiny["policy"], rows["pairs"], "bt", pooling="mean")
    batched = response_outputs(model, collate(items), "mean")[:, 0]
    alone = [score_head(model)(states(model, i, k)[0].mean(0))[0] for i in items for k in range(2)]
    assert torch.allclose(batched, torch.stack(alone), atol=1e-6) and all(not len(i.prompt) for i in items)


def test_the_language_model_term_is_the_nll_of_the_chosen_answer(tiny, rows):
    """rm.orm joint objective, rm.mentions: trained beside the head, dropped before saving."""
    model, items, loss, config = setup(tiny["policy"], rows["pairs"], "bt", lm_loss_weight=0.5)
    loss.lm_head = keep_lm_head(model, tiny["policy"])
    model.double()
    items[1].extra["weight"] = 2.5
    sums = loss(model, collate(items))
    total, by = sums.loss["language_model"]
    expected, tokens = 0.0, 0
    for item in items:
        h, start = states(model, item, 0)
        ids = [*item.prompt.tolist(), *item.responses[0].tolist()]
        logp = torch.log_softmax(h @ loss.lm_head(model).weight.T, -1)
        at = [start + j for j, m in enumerate(item.masks[0]) if m]
        nll = -sum(float(logp[j - 1, ids[j]]) for j in at)
        expected, tokens = expected + item.extra["weight"] * nll, tokens + len(at)
    assert float(total) == pytest.approx(0.5 * expected, rel=1e-6) and loss.counts(items)[by] == tokens
    drop_lm_head(model)
    assert not any("kept" in name for name in model.state_dict())


def test_gain_and_bias_fold_into_a_linear_head(tiny, rows):
    """rm.orm, Cobbe et al.: sigma(gain * logit + bias) after training equals the saved linear head plus its
    constant.
    """
    model, items, loss, config = setup(tiny["policy"], rows["labels"], "orm", outcome_head="gain_bias")
    lm_head = keep_lm_head(model, tiny["policy"])
    read = add_gain_bias(model, lm_head, 7)
    model.double()
    with torch.no_grad():
        model.reward_gain.fill_(1.7)
        model.reward_offset.fill_(-0.4)
    batch = collate(items)
    before = read(model, batch)
    h, start = states(model, items[0], 0)
    assert float(before[0, 0]) == pytest.approx(1.7 * float((h @ lm_head(model).weight.T)[start, 7]) - 0.4, rel=2e-6)
    offset = drop_lm_head(model, lm_head, 7)
    after = loss.read(model, batch) + offset
    assert torch.allclose(before, after, atol=1e-9)


def test_gain_and_bias_are_computed_in_float32_under_bfloat16(tiny, rows):
    """rm.head: head and score stay float32, whatever the backbone computes in."""
    model, items, loss, _ = setup(tiny["policy"], rows["labels"], "orm", outcome_head="gain_bias")
    lm_head = keep_lm_head(model, tiny["policy"])
    read = add_gain_bias(model.float(), lm_head, 7)
    batch = collate(items)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trained = read(model, batch)
        offset = drop_lm_head(model, lm_head, 7)
        scored = loss.read(model, batch) + offset
    assert trained.dtype == torch.float32 and torch.allclose(trained, scored, atol=1e-6), "as the folded head says"


# -- degenerate rows ---------------------------------------------------------------------------------------------------


class Characters:
    """A reader whose tokens are characters."""

    room, merged, both_ways = 40, False, False

    def parts(self, prompt, completions, ends=()):
        return [ord(c) for c in prompt[0]["content"]], [([ord(c) for c in m[0]["content"]],) * 2 for m in completions]

    def plain(self, text):
        return [ord(c) for c in text]

    def wrap(self, prompt, response, mask):
        return prompt, response, [1] * len(response), 0

    def ended(self, ids):
        return True


def ranking(ranks, texts=None, **settings):
    texts = texts or [f"answer {i}" for i in range(len(ranks))]
    row = {
        "row_id": "r",
        "prompt": [{"role": "user", "content": "q"}],
        "ranks": ranks,
        "completions": [[{"role": "assistant", "content": t}] for t in texts],
    }
    return ranking_items(row, Characters(), Config(**settings), Counter())


def test_rankings_without_signal_are_dropped_and_counted():
    for ranks, reason in (([1], "single_response"), ([1, 1, 1], "all_tied")):
        with pytest.raises(Drop, match=reason):
            ranking(ranks, objective="kwise_pairs")
    (item,) = ranking([2, 1, 2], objective="kwise_pairs")
    assert item.extra["pairs"] == [(0, 1), (0, 2)] and item.extra["pair_weight"] == 0.5, (
        "tied pairs are dropped from the divisor too"
    )
    with pytest.raises(Drop, match="identical_after_truncation"):
        ranking([1, 2], ["x" * 60 + "a", "x" * 60 + "b"], objective="kwise_pairs")


def controlled(chosen, rejected, **more):
    row = {
        "row_id": "r",
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        **more,
    }
    return control_items(row, Characters(), Config(objective="control_tokens"), Counter())


def test_pairs_behind_control_words_that_teach_nothing_are_dropped():
    """rm.pmp: an answer that is both sides of a pair would be good and bad at once; also after the cut."""
    for chosen, rejected, more, reason in (
        ("a", "b", {"label_prob": 0.5}, "tie"),
        ("a", "a", {}, "identical_after_tokenisation"),
        ("x" * 60 + "a", "x" * 60 + "b", {}, "identical_after_truncation"),
    ):
        with pytest.raises(Drop, match=reason):
            controlled(chosen, rejected, **more)
    (item,) = controlled("a", "b", weight=0.5)
    assert len(item.responses) == 4 and item.extra["counts"] == {"weight": 1.0, "pairs": 2.0}


def test_ties_under_plackett_luce():
    with pytest.raises(ValueError, match="tie_policy=drop_item"):
        ranking([1, 2, 2], objective="plackett_luce")
    (item,) = ranking([1, 2, 2], objective="plackett_luce", tie_policy="drop_item")
    assert len(item.responses) == 2 and item.extra["listwise"]
    (item,) = ranking([1, 2, 2], objective="plackett_luce", tie_policy="use_pairs")
    assert len(item.responses) == 3 and not item.extra["listwise"] and item.extra["pairs"] == [(0, 1), (0, 2)]


def test_ties_matter_where_the_ranking_is_certain():
    """rm.plackett_luce, partial rankings: below the top m nothing is known, so ties there are no ties; at the border of
    the top they are.
    """
    top = lambda ranks, m, **more: ranking(ranks, objective="plackett_luce", top_ranks=m, **more)[0]
    tail = top([1, 2, 3, 3, 3], 2)
    assert tail.extra["listwise"] and len(tail.responses) == 5, (
        "the three at the end are one crowd that lost to the first two"
    )
    for ranks, m in (([1, 1, 2, 3], 2), ([1, 2, 2, 3], 2), ([1, 1], 1)):
        with pytest.raises(ValueError, match="tie_policy=drop_item"):
            top(ranks, m)
    kept = top([1, 1, 2, 3, 3], 2, tie_policy="drop_item")
    assert kept.extra["listwise"] and kept.extra["ranks"] == [
        1,
        2,
        3,
        3,
    ], "of the tied in the top the first, of those below all"
    assert top([1, 2, 2, 2, 3], 2, tie_policy="drop_item").extra["ranks"] == [1, 2, 3]
    fallback = top([1, 2, 2, 3, 4], 2, tie_policy="use_pairs")
    assert not fallback.extra["listwise"] and fallback.extra["pairs"] == [
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 3),
        (1, 4),
        (2, 3),
        (2, 4),
    ], "nobody wins below the top"
    assert fallback.extra["pair_weight"] == 1 / 8
    # and none of its pairs counts in the accuracy
    certain = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    for item in (top([1, 2, 3, 4], 2), top([1, 2, 2, 3, 4], 2, tie_policy="drop_item")):
        assert item.extra["listwise"] and item.extra["pairs"] == certain and item.extra["counts"]["pairs"] == 5.0
    assert len(top([1, 2, 3, 4], 9).extra["pairs"]) == 6


def test_attributes_that_no_row_has_are_named_with_those_there_are(tiny, rows, train):
    """rm.regression: the mean of nothing would make every score NaN."""
    for attributes, said in (
        (
            ["help", "thruth"],
            r"\['thruth'\]: no row of split train is rated by it; the aspects of the data are help, overall, truth",
        ),
        (["x", "y"], "rated by them"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(
                "reward_model",
                {"objective": "regression", "attributes": attributes, "max_steps": 1, "max_length": 96},
                {"model": tiny["policy"], "data": rows["ratings"]},
                attributes[0],
            )


@pytest.mark.parametrize("objective", ("pairwise", "t2t_point", "t2t_pair"))
def test_comparisons_that_the_cut_makes_the_same_are_dropped_and_cuts_are_counted(tiny, objective):
    """Answers that differ behind the cut would teach that the same request is both right and wrong."""
    from stages.algorithms import resolve
    from stages.chat import renderer_for

    reader = ChatReader(renderer_for(tiny["policy"]), 200)
    make = resolve(REWARD_OBJECTIVES[objective].encode)
    dropped = Counter()
    config = Config(objective=objective)
    row = lambda chosen, rejected: {
        "row_id": "r",
        "prompt": [{"role": "user", "content": "q"}],
        **{
            side: [{"role": "assistant", "content": text}]
            for side, text in (("chosen", chosen), ("rejected", rejected))
        },
    }
    assert make(row("yes", "no"), reader, config, dropped) and not dropped
    assert make(row("no " + "yes " * 200, "yes " * 200), reader, config, dropped) and dropped == {"truncated": 1}
    with pytest.raises(Drop, match="identical_after_truncation"):
        make(row("yes " * 200 + "good", "yes " * 200 + "bad"), reader, config, dropped)
    with pytest.raises(Drop, match="identical"):
        make(row("same", "same"), reader, config, dropped)
    assert dropped == {"truncated": 1}


def test_two_responses_make_all_ranking_losses_equal():
    from stages.reward_models.reward_losses import kwise_pairs, plackett_luce

    (item,) = ranking([1, 2], objective="plackett_luce")
    batch = SimpleNamespace(items=[item])
    s = torch.tensor([[0.3], [-0.9]], dtype=torch.float64)
    expected = float(softplus(torch.tensor(-1.2, dtype=torch.float64)))
    for loss in (kwise_pairs, plackett_luce):
        assert float(loss(s, batch, Config(objective="plackett_luce")).loss["ranking"][0]) == pytest.approx(expected)


def test_ratings_are_standardised_per_attribute_and_annotators_centred():
    items = [
        SimpleNamespace(extra={"targets": [v], "annotator": a, "weight": 1.0})
        for v, a in ((1.0, "low"), (3.0, "low"), (3.0, "high"), (5.0, "high"))
    ]
    shifts = annotator_shifts(items)
    mean, std = standardise(items, None, shifts)
    assert mean == [3.0] and std == [1.0] and [i.extra["targets"] for i in items] == [[-1.0], [1.0], [-1.0], [1.0]]
    constant = [SimpleNamespace(extra={"targets": [2.0], "annotator": None, "weight": 1.0})] * 1
    held_out = [
        SimpleNamespace(extra={"targets": [v], "annotator": a, "weight": 1.0})
        for v, a in ((4.0, "low"), (4.0, "high"), (4.0, "new"))
    ]
    standardise(held_out, (mean, std), shifts)
    assert [i.extra["targets"] for i in held_out] == [
        [2.0],
        [0.0],
        [1.0],
    ], "held-out ratings move with their annotators, as far as these are known"
    assert standardise(constant, None) == ([2.0], [1.0]) and constant[0].extra["targets"] == [0.0]


def test_attributes_that_a_rating_lacks_count_nowhere():
    """In no row's mean error, in no shift of an annotator, and in no statistic; a column of which only weightless rows
    have a number has theirs.
    """
    from stages.reward_models.reward_data import moments
    from stages.reward_models.reward_losses import regression

    scores = torch.tensor([[0.5, 9.0], [0.25, 1.0]])
    batch = SimpleNamespace(
        items=[
            SimpleNamespace(responses=[0], extra={"targets": targets, "weight": weight, "ended": [True]})
            for targets, weight in (([1.0, np.nan], 2.0), ([0.0, 3.0], 1.0))
        ]
    )
    found = regression(scores, batch, SimpleNamespace(regression_loss="mse"))
    assert float(found.loss["mse"][0]) == pytest.approx(2 * 0.5**2 + (0.25**2 + 2.0**2) / 2)
    assert float(found.metrics["absolute_error"][0]) == pytest.approx(0.5 + (0.25 + 2.0) / 2)
    rated = [SimpleNamespace(extra={"targets": [1.0, 4.0], "annotator": "low", "weight": 1.0})]
    standardise(rated, ([0.0, 0.0], [1.0, 1.0]), {"low": np.array([0.5, np.nan])})
    assert rated[0].extra["targets"] == [1.5, 4.0]
    mean, std = moments(np.array([[1.0, 10.0], [3.0, 14.0], [5.0, np.nan]]), np.array([0.0, 0.0, 1.0]))
    assert mean.tolist() == [5.0, 12.0] and std.tolist() == [0.0, 2.0]


def test_a_margin_of_nothing_is_a_margin():
    pair = {
        "row_id": "r",
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": "better"}],
        "rejected": [{"role": "assistant", "content": "worse"}],
        "label_prob": None,
    }
    made = lambda margin, **config: pair_items(
        {**pair, "margin": margin}, Characters(), Config(objective="bt", **config), Counter()
    )
    assert [made(margin, use_margin=True)[0].extra["margin"] for margin in (None, 0.0, 0.5)] == [0.0, 0.0, 0.5]
    with pytest.raises(Drop, match="negative_margin"):
        made(-0.5, use_margin=True)
    assert made(-0.5)[0].extra["margin"] == -0.5  # which nothing reads


def test_a_request_keeps_the_end_of_the_context_and_the_beginning_of_answers(tiny):
    from stages.chat import renderer_for
    from stages.reward_models.reward_data import fill

    reader = ChatReader(renderer_for(tiny["policy"]), 96)
    ids, was_cut = fill(reader, "C {context} A {a}", context="0" + "1" * 200 + "23", a="45" + "6" * 200 + "7")
    text = reader.tokenizer.decode(ids)
    assert was_cut and len(ids) <= reader.room
    assert all(c in text for c in ("123", "456")) and not any(c in text for c in ("01", "67"))
    assert fill(reader, "C {context} A {a}", context="0123", a="4567") == (reader.instruction("C 0123 A 4567"), False)


def test_a_rating_sets_the_scale_by_its_weight():
    """A row of weight 2 is two rows, one of weight 0 none: an outlier that is weighted out squeezed all other targets
    together.
    """

    def made(*rows):
        return [
            SimpleNamespace(extra={"targets": [v, np.nan if v == 3.0 else -v], "annotator": a, "weight": w})
            for v, a, w in rows
        ]

    weighted, plain = (
        made((1.0, "low", 2.0), (3.0, "low", 1.0), (5.0, "high", 1.0), (1000.0, "high", 0.0)),
        made((1.0, "low", 1.0), (1.0, "low", 1.0), (3.0, "low", 1.0), (5.0, "high", 1.0)),
    )
    shifts, expected = annotator_shifts(weighted), annotator_shifts(plain)
    assert all(shifts[name] == pytest.approx(expected[name]) for name in expected)
    assert np.allclose(standardise(weighted, None, shifts), standardise(plain, None, expected), rtol=1e-12)
    unweighted = made((1.0, "low", 0.0), (3.0, "low", 0.0), (5.0, "high", 1.0))
    assert standardise(unweighted, None) == ([5.0, -5.0], [1.0, 1.0])


def test_outcomes_are_balanced_per_prompt():
    items = [
        SimpleNamespace(extra={"prompt_id": p, "target": y, "weight": 1.0})
        for p, y in (("a", 1.0), ("a", 1.0), ("a", 0.0), ("b", 1.0))
    ]
    dropped = Counter()
    assert balanced(items, dropped) == [items[0], items[2]] and dropped["unbalanced"] == 2
    items[0].extra["weight"] = 0.0  # does not stand in for one that counts
    assert balanced(items, Counter()) == [items[1], items[2]]


def test_steps_keep_their_borders(tiny):
    """A label sits on the last separator token of its step, and nothing of two steps is one token."""
    from stages.chat import renderer_for
    from stages.reward_models.reward_data import step_ids

    reader = ChatReader(renderer_for(tiny["policy"]), 96)
    ids, ends = step_ids(reader, ["two plus", "two"], "\n\n")
    tail = reader.plain("\n\n")
    assert ids[ends[0] - len(tail) + 1 : ends[0] + 1] == tail and ends[1] == len(ids) - 1


def test_labels_behind_the_first_error_are_not_used(tiny, rows):
    from stages.reward_models.reward_data import step_items

    data = [r for r in open_dataset(rows["steps"]).iter_rows(split="train") if -1 in r["labels"]][0]
    reader = reader_for(tiny["policy"], new_reward_model(tiny["policy"], outputs=2), 96)
    assert step_items(data, reader, Config(objective="prm"), Counter())[0].extra["n_steps"] == 2
    soft = {**data, "soft_labels": [0.75, 0.5, 0.125][: len(data["labels"])]}
    # (wrong, right)
    assert step_items(soft, reader, Config(objective="prm"), Counter())[0].extra["targets"] == [
        [0.25, 0.75],
        [0.5, 0.5],
    ]
    assert (
        step_items(data, reader, Config(objective="prm", after_first_error="keep"), Counter())[0].extra["n_steps"] == 3
    )


def test_steps_that_do_not_fit_divide_nothing(tiny, rows):
    """rm.prm: the mean over the labelled steps that the model reads; a cut solution is counted, and weights do not
    enter shares.
    """
    from stages.reward_models.reward_data import step_items

    data = {
        **next(r for r in open_dataset(rows["steps"]).iter_rows(split="train") if -1 not in r["labels"]),
        "weight": 3.0,
    }
    reader, dropped = reader_for(tiny["policy"], new_reward_model(tiny["policy"], outputs=2), 96), Counter()
    long = {**data, "completions": [*data["completions"][:2], "good end " * 40]}
    (whole,), (item,) = (step_items(row, reader, Config(objective="prm"), dropped) for row in (data, long))
    assert (whole.extra["n_steps"], item.extra["n_steps"], dropped["truncated"]) == (3, 2, 1)
    assert (
        item.extra["counts"] == {"steps": 6.0, "labelled": 2.0, "rows": 1.0}
        and len(item.extra["targets"]) == item.n_targets == 2
    )
    loss = RewardLoss(REWARD_OBJECTIVES["prm"], Config(objective="prm"), "last")
    sums = loss(new_reward_model(tiny["policy"], outputs=2), collate([item]))
    share, by = sums.metrics["base_rate"]
    assert float(share) / loss.counts([item])[by] == 1.0, "both steps that are read are right"


def test_an_empty_step_changes_nothing(tiny):
    """A step whose items carry no weight has loss 0 and leaves the weights alone."""
    from stages.training import Trainer

    model = new_reward_model(tiny["policy"])
    loss = RewardLoss(REWARD_OBJECTIVES["bt"], Config(), "last")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    found = Trainer(model, loss, Config(), 1).step([])
    assert found["loss"] == 0.0 and found["empty_step"] == 1.0
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


UNREAD = [
    ("kwise_pairs", {"label_smoothing": 0.3}),
    ("kwise_pairs", {"use_margin": True}),
    ("kwise_pairs", {"use_soft_labels": True}),
    ("kwise_pairs", {"normalise_by_k": True}),
    ("kwise_pairs", {"top_ranks": 1}),
    ("kwise_pairs", {"center_rewards_coefficient": 1.0}),
    ("plackett_luce", {"label_smoothing": 0.3}),
    ("plackett_luce", {"center_rewards_coefficient": 1.0}),
    ("plackett_luce", {"pair_weighting": "per_pair"}),
    ("pairwise", {"center_rewards_coefficient": 1.0}),
    ("pairwise", {"use_margin": True}),
    ("t2t_point", {"label_smoothing": 0.3}),
    ("t2t_point", {"use_soft_labels": True}),
    ("bt", {"top_ranks": 1}),
    ("bt", {"attributes": ["a"]}),
    ("control_tokens", {"use_margin": True}),
    ("t2t_pair", {"init_head": "keep"}),
    ("t2t_point", {"pooling": "mean"}),
    ("margin", {"hard_labels": True}),
    ("kwise_pairs", {"curriculum": "margin"}),
    ("kwise_pairs", {"lm_loss_weight": 0.5}),
]


@pytest.mark.parametrize("objective,setting", UNREAD)
def test_settings_that_an_objective_would_ignore_are_refused(objective, setting):
    """Other values than the defaults only: recipes give complete configurations."""
    (name,) = setting
    with pytest.raises(
        ValueError,
        match=f"{name}=.* is a setting of objective .*, which objective={objective} does not read; leave {name} out",
    ):
        Config(objective=objective, **setting)
    complete = Config(objective=objective).model_dump()
    assert Config(**complete).model_dump() == complete
    Config(objective=READ_BY[name][0], **setting)


@pytest.mark.parametrize(
    "given,says",
    [
        ({"last_layers": 1}, "train_layers=head_and_last"),
        ({"curriculum_stages": 2}, "curriculum=margin"),
        ({"curriculum": "stage_index", "curriculum_stages": 2}, "curriculum"),
        ({"objective": "orm", "outcome_token": "x"}, "outcome_head=gain_bias"),
        ({"objective": "prm", "neutral_as": "negative"}, "step_classes=3"),
    ],
)
def test_settings_that_others_would_have_to_be_set_for_are_refused(given, says):
    with pytest.raises(ValueError, match=f"would change nothing.*{says}"):
        Config(**given)
    for whole in (
        Config(train_layers="head_and_last", last_layers=1),
        Config(curriculum="margin", curriculum_stages=2),
        Config(objective="orm", outcome_head="gain_bias", outcome_token="x"),
        Config(objective="prm", step_classes=3, neutral_as="negative"),
    ):
        assert Config(**whole.model_dump()) == whole


def test_the_last_layers_are_those_that_read_text(tiny):
    """train_layers=head_and_last: neither a vision tower's nor a layer's experts, though these lists are longer."""
    import transformers
    from torch import nn

    from stages.reward_model import freeze_layers
    from stages.reward_models.reward_heads import new_reward_model

    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = small | {"vocab_size": 99, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8}
    vision = small | {"num_hidden_layers": 5, "image_size": 28, "patch_size": 14}
    seeing = transformers.AutoModelForSequenceClassification.from_config(
        transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, num_labels=1)
    )
    experts = new_reward_model(tiny["policy"])
    experts.model.layers[0].mlp.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
    for model, prefix in ((seeing, "model.language_model.layers.2."), (experts, "model.layers.1.")):
        freeze_layers(model, Config(train_layers="head_and_last", last_layers=1), "response")
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {n for n, _ in model.named_parameters() if n.startswith((prefix, "score."))}
        assert any(n.startswith(prefix) for n in trained)


def test_settings_of_inputs_that_are_not_given_are_refused(tiny, rows, train, tmp_path):
    from stages.reward_model import kept_head, reading
    from storage.datasets import write_dataset

    common = {"max_steps": 1, "max_length": 96}
    for given, says in (
        ({"replay_fraction": 0.3}, "give the input replay"),
        ({"drift_alarm": 0.2}, "give the input previous"),
    ):
        with pytest.raises(ConfigError, match=f"would change nothing.*{says}"):
            train("reward_model", {**common, **given}, {"model": tiny["policy"], "data": rows["pairs"]}, says[-6:])
    plain = [{**row, "stage_index": None} for row in open_dataset(rows["pairs"]).iter_rows()]
    write_dataset(str(tmp_path / "plain"), "plain", "pairs/1", plain)
    with pytest.raises(ConfigError, match="no pair has one; give the output of stage curriculum"):
        train(
            "reward_model",
            {**common, "curriculum": "stage_index"},
            {"model": tiny["policy"], "data": str(tmp_path / "plain")},
            "stages",
        )
    set_ = Config(replay_fraction=0.3, drift_alarm=0.2)
    assert [
        (c.replay_fraction, c.drift_alarm)
        for c in (
            reading(set_, replay=None, previous="m"),
            reading(set_, replay={"a": "b"}, previous=None),
            reading(set_, replay=True, previous=True),
        )
    ] == [(0.1, 0.2), (0.3, 0.05), (0.3, 0.2)]
    assert kept_head(Config()).init_head == "keep" and kept_head(Config(objective="t2t_pair")).init_head == "fresh"


@pytest.mark.parametrize("setting", ({"curriculum": "margin"}, {"lm_loss_weight": 0.5}, {"top_ranks": 1}))
def test_what_auto_stands_for_is_held_to_the_same(tiny, rows, train, setting):
    """Rankings are learned by kwise_pairs, which reads none of these."""
    with pytest.raises(ConfigError, match="which objective=kwise_pairs does not read"):
        train(
            "reward_model",
            {"max_steps": 1, "max_length": 96, **setting},
            {"model": tiny["policy"], "data": rows["rankings"]},
        )


def test_what_does_not_fit_says_what_to_write(tiny, encoder):
    with pytest.raises(ValueError, match="kind=rankings/1.*bt"):
        objective_for("plackett_luce", "pairs/1")
    assert objective_for("auto", "stepwise/1").name == "prm"
    with pytest.raises(ValueError, match="pooling=last or mean"):
        resolve_pooling("cls", new_reward_model(tiny["policy"]), "response")
    with pytest.raises(ValueError, match="pooling=mean or cls"):
        resolve_pooling("last", new_reward_model(encoder), "response")
    with pytest.raises(ValueError, match="margin_mode=score_diff"):
        pair_difficulty({"row_id": "x", "margin": None}, "margin")
    with pytest.raises(ValueError, match="lm_loss_weight=0"):
        keep_lm_head(new_reward_model(encoder), encoder)
    for bad in (
        {"attribute_weights": [1.0]},
        {"label_words": ["A"]},
        {"objective": "prm", "lm_loss_weight": 1.0},
        {"objective": "prm", "curriculum": "margin"},
    ):
        with pytest.raises(ValueError):
            Config(**bad)


SIZES = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=64,
    max_position_embeddings=64,
    pad_token_id=0,
)
ARCHITECTURES = {
    "LlamaConfig": (False, {**SIZES, "num_key_value_heads": 2}),
    "Qwen2Config": (False, {**SIZES, "num_key_value_heads": 2}),
    "Gemma2Config": (False, {**SIZES, "num_key_value_heads": 2, "head_dim": 16}),
    "GPT2Config": (False, dict(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64, pad_token_id=0)),
    "GPTNeoXConfig": (False, SIZES),
    "BertConfig": (True, SIZES),
    "RobertaConfig": (True, {**SIZES, "pad_token_id": 1}),
    "DistilBertConfig": (
        True,
        dict(dim=32, hidden_dim=64, n_layers=2, n_heads=2, vocab_size=64, max_position_embeddings=64, pad_token_id=0),
    ),
    "ElectraConfig": (True, {**SIZES, "embedding_size": 32}),
    "DebertaV2Config": (True, SIZES),
    "ModernBertConfig": (True, {**SIZES, "cls_token_id": 1, "sep_token_id": 2}),
}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_any_architecture_carries_a_head(name, tmp_path):
    """Head found, direction found out, rows padded together score as alone, saved and loaded the same."""
    import transformers

    from stages.batching import make_item
    from stages.reward_models.reward_heads import load_reward_model

    both, sizes = ARCHITECTURES[name]
    torch.manual_seed(0)
    transformers.AutoModel.from_config(getattr(transformers, name)(**sizes)).save_pretrained(tmp_path / "base")
    model = new_reward_model(str(tmp_path / "base"), seed=2, outputs=3).eval()
    assert model.reads_both_ways is both and score_head(model).weight.shape == (3, 32)
    rows = [torch.randint(3, 60, (n,)).tolist() for n in (5, 11, 8)]
    items = [make_item(str(i), [], [row], [[1] * len(row)], first=(2,)) for i, row in enumerate(rows)]
    for pooling in ("mean", "cls") if both else ("last", "mean"):
        together = response_outputs(model, collate(items), pooling)
        alone = torch.cat([response_outputs(model, collate([item]), pooling) for item in items])
        assert torch.allclose(together, alone, atol=1e-5), pooling
    model.save_pretrained(tmp_path / "saved")
    again = load_reward_model(str(tmp_path / "saved")).eval()
    assert torch.equal(response_outputs(again, collate(items), pooling), together)
