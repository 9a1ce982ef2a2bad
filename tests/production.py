"""Production code driven with the plain numbers of vectors: tables of logits in place of a network's, letters in place
of a tokenizer's pieces.
"""

from __future__ import annotations

import pytest
import torch

from stages import align, distill, losses
from stages.algorithms import rl_preset
from stages.batching import collate, make_item
from stages.chat import Renderer
from stages.direct import direct_alignment
from stages.ingestion import pairing
from stages.models import divergence, modeling
from stages.models.modeling import Head, move_towards, token_logps
from stages.policy import critics, policy_update
from stages.policy.policy_update import PolicyGradient
from stages.reward_models import reward_heads, reward_losses
from stages.rl import Config
from stages.training import Sums, Trainer

#: ChatML as it is published with models: contents stripped, roles that do not alternate refused.
CHATML = (
    "{{ bos_token or '' }}{% set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}{% for m in"
    " turns %}{% if m['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}{{ raise_exception('Conversation"
    " roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% endfor %}{% for m in messages %}{{"
    " '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# --- conversations -----------------------------------------------------------------------------------------


def renderer(template: str, bos: str | None, eos: str, *others: str) -> Renderer:
    """Renderer whose tokenizer has one token per byte, and the given control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.BPE(vocab={letter: k for k, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        pad_token=eos,
        additional_special_tokens=list(others),
        **({"bos_token": bos} if bos else {}),
    )
    fast.chat_template = template
    return Renderer(fast)


def rendered_mask(roles, turns, policy: str) -> list[int]:
    """0/1 of each token of a conversation given as roles per token and the message that each belongs to (-1: none),
    rendered by :class:`Renderer`.

    A message is a letter per token of its role; "header" tokens stand before it and "eot" tokens behind it, as its
    template writes them.
    """
    last = max(turns)
    of = [[role for role, turn in zip(roles, turns) if turn == k] for k in range(last + 1)]
    heads, ends = ([row.count(name) for row in of] + [0] * 3 for name in ("header", "eot"))
    said = [[role for role in row if role not in ("header", "eot")] for row in of]
    messages = [{"role": row[0], "content": chr(ord("a") + k % 26) * len(row)} for k, row in enumerate(said)]
    template = (
        "{{- '<s>' * %d -}}{%%- set heads = %s -%%}{%%- set ends = %s -%%}{%%- for m in messages -%%}{{- '<h>' *"
        " heads[loop.index0] + m['content'] + '</s>' * ends[loop.index0] -}}{%%- endfor -%%}{%%- if"
        " add_generation_prompt -%%}{{- '<h>' * heads[messages | length] -}}{%%- endif -%%}"
        % (roles.count("bos"), heads, ends)
    )
    users = [k for k, m in enumerate(messages) if m["role"] == "user"]
    row = renderer(template, "<s>", "</s>", "<h>").conversation(
        messages, policy, n_prompt=users[-1] + 1 if users else 0
    )
    assert len(row.ids) == len(roles)
    return row.mask


# --- references and averages -----------------------------------------------------------------------------------


class Weights(torch.nn.Module):
    """A model that is one vector."""

    def __init__(self, values):
        super().__init__()
        self.vector = torch.nn.Parameter(torch.as_tensor(values, dtype=torch.float64).detach().clone())

    def numbers(self) -> torch.Tensor:
        return self.vector.detach().clone()


def followed(reference, policy, keep: float, times: int = 1) -> list[torch.Tensor]:
    """The reference after each of ``times`` moves towards a policy that stands still
    (:func:`stages.models.modeling.move_towards`).
    """
    moving, still, after = Weights(reference), Weights(policy), []
    for _ in range(times):
        with torch.no_grad():
            move_towards(moving, still, keep)
        after.append(moving.numbers())
    return after


def reference_after_steps(reference, policy, steps: int, **settings) -> list[torch.Tensor]:
    """align's moving reference after each optimizer step, the policy standing still
    (:class:`stages.direct.direct_alignment.MovingReference`).
    """
    moving = object.__new__(direct_alignment.MovingReference)  # it else reads its model from a directory
    moving.config, moving.model = align.Config(**settings), Weights(reference)
    still, after = Weights(policy), []
    for step in range(1, steps + 1):
        with torch.no_grad():
            moving.after_step(step, still)
        after.append(moving.model.numbers())
    return after


def averaged(average, policy, decay: float) -> torch.Tensor:
    """The published average of the weights after one step (``ema_decay``, :class:`stages.training.Trainer`)."""
    trainer = object.__new__(Trainer)
    trainer.averages, trainer.parameters = {"vector": Weights(average).numbers()}, {"vector": Weights(policy).vector}
    trainer.config, trainer.bema = align.Config(ema_decay=decay), None
    trainer._average()
    return trainer.averages["vector"]


# --- distributions: a table of logits is the hidden states under a head that changes nothing -----------------------


def head(logits) -> Head:
    return Head(torch.eye(logits.shape[-1], dtype=logits.dtype), None)


def logps_at(logits, targets, temperature: float = 1.0):
    """log softmax(logits / temperature) at ``targets``: logits [..., V], targets [...]."""
    return token_logps(head(logits), logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), temperature)[0].reshape(
        targets.shape
    )


def entropy(logits):
    """Entropy of each distribution, nats: logits [..., V] -> [...]."""
    flat = logits.reshape(-1, logits.shape[-1])
    return token_logps(head(logits), flat, torch.zeros(len(flat), dtype=torch.long), entropy=True)[1].reshape(
        logits.shape[:-1]
    )


def _each(measure, logits, others, mask, *how):
    keep = torch.ones(logits.shape[:-1], dtype=torch.bool) if mask is None else mask.bool()
    return logits.new_zeros(keep.shape).masked_scatter(
        keep, measure(head(logits), logits[keep], head(others), others[keep], *how)
    )


def full_kl(logits, others, mask=None, direction: str = "reverse"):
    """Exact KL of each distribution, 0 where masked: ``reverse`` KL(pi||other), ``forward`` KL(other||pi)."""
    return _each(divergence.exact_kl, logits, others, mask, 1.0, direction)


def distillation(student, teacher, temperature: float = 1.0, direction: str = "forward", jsd_beta: float = 0.5):
    """Divergence of each student from its teacher; JSD at the ends of beta is the KL that it is there."""
    direction = {0.0: "forward", 1.0: "reverse"}.get(jsd_beta, direction) if direction == "jsd" else direction
    return _each(divergence.divergence, student, teacher, None, direction, temperature, jsd_beta)


# --- one optimizer step ---------------------------------------------------------------------------------------


def rows_of(mask, prompts=None, **columns):
    """(items of an RL step, order of the rows in them): a prompt's responses are one item, all others of one prompt
    each.
    """
    prompts = list(range(len(mask)) if prompts is None else prompts)
    names = list(dict.fromkeys(prompts))
    groups = [[k for k, of in enumerate(prompts) if of == name] for name in names]
    items = [
        make_item(
            str(name),
            [0],
            [[0] * mask.shape[1]] * len(of),
            [mask[k].int().tolist() for k in of],
            **{column: [values[k] for k in of] for column, values in columns.items()},
        )
        for name, of in zip(names, groups)
    ]
    return items, [k for of in groups for k in of]


def logged(sums: Sums, counts: dict[str, float]) -> dict[str, float]:
    """What a step of this one micro-batch logs: every term of its loss, where there are several, and every metric
    (:class:`stages.training.Trainer`).
    """
    totals: dict[str, float] = {}
    Trainer._add(totals, [sums], counts)
    return totals


def step_mean(
    loss,
    mask,
    mode: str,
    loss_scale_factor: float | None = None,
    seq_denominator: str = "nonempty",
    scope: str = "batch",
    prompts=None,
):
    """The mean of a token loss [B, T] that an RL step with these rows takes (AGG)."""
    objective = PolicyGradient(
        rl_preset("grpo", aggregation=mode),
        Config(
            preset="grpo", loss_scale_factor=loss_scale_factor, seq_denominator=seq_denominator, token_norm_scope=scope
        ),
    )
    items, order = rows_of(mask, prompts)
    return Sums({"policy": (objective.aggregate(loss[order], mask[order], items), objective.count)}).divided(
        objective.counts(items)
    )


def sequence_sums(values, mask) -> list:
    """Of a token quantity [B, T], what the loss of each row alone sums it to (``seq-mean-token-sum``)."""
    return [step_mean(values[[k]], mask[[k]], "seq-mean-token-sum") for k in range(len(mask))]


def rl_logged(row, config: dict, items, logps_N, **more) -> dict[str, float]:
    """What a step of :func:`rl_update` logs."""
    sums, _, counts = _rl_update(row, config, items, logps_N, **more)
    return logged(sums, counts)


def rl_update(row, config: dict, items, logps_N, entropy_N=None, values_N=None, kl_N=None):
    """(sums, loss) of an RL update; log-probs, entropies, values and exact KLs of the trained tokens are given in place
    of a network's.
    """
    return _rl_update(row, config, items, logps_N, entropy_N, values_N, kl_N)[:2]


def _rl_update(row, config, items, logps_N, entropy_N=None, values_N=None, kl_N=None):
    hidden = torch.zeros_like(logps_N) if values_N is None else values_N
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_update, "hidden_states", lambda model, batch, at: hidden[:, None])
        patch.setattr(policy_update, "head_of", lambda model: None)
        patch.setattr(policy_update, "token_logps", lambda *given: (logps_N, entropy_N))
        if kl_N is not None:
            patch.setattr(policy_update, "exact_kl", lambda *given: kl_N)
        objective = PolicyGradient(
            row,
            Config(preset=row.name, log_entropy=entropy_N is not None, **config),
            value_head=None if values_N is None else torch.nn.Identity(),
        )
        sums = objective(None, collate(items))
    counts = objective.counts(items)
    return sums, sums.divided(counts), counts


def updated(row, logps, old, mask, prompts=None, config=(), kl=None, **columns):
    """(sums, loss) of :func:`rl_update` on rows of token log-probs [B, T] with the columns of rollouts, numbers or
    lists by row.
    """
    listed = {name: values.tolist() if hasattr(values, "tolist") else values for name, values in columns.items()}
    items, order = rows_of(mask, prompts, old_logps=old.tolist(), **listed)
    trained = mask[order].bool()
    return rl_update(row, dict(config), items, logps[order][trained], kl_N=None if kl is None else kl[order][trained])


def update_at(row, logits, anchor, action: int, advantage: float, config=()):
    """Loss of an RL update on one token whose distribution is known: ``anchor`` [V], the logits of the policy that
    sampled it, are those of the exact KL too.
    """
    old = float(logps_at(anchor, torch.tensor(action)))
    items = [make_item("one", [0], [[action]], [[1]], old_logps=[[old]], advantages=[advantage])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            policy_update, "hidden_states", lambda model, batch, at: (logits if model is None else model)[None]
        )
        patch.setattr(policy_update, "head_of", lambda model: head(logits))
        objective = PolicyGradient(row, Config(preset=row.name, **dict(config)), anchor=anchor)
        sums = objective(None, collate(items))
    return sums.divided(objective.counts(items))


def critic_update(row, values, returns, old, mask, config=()):
    """(each token's error where the mean is over tokens, loss) of a step of the separate critic on values [B, T]."""
    items, _ = rows_of(mask, returns=returns.tolist(), values=old.tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critics, "hidden_states", lambda model, batch, at: values[mask.bool()][:, None])
        patch.setattr(critics, "score_head", lambda model: torch.nn.Identity())
        objective = critics.ValueRegression(row, Config(preset=row.name, **dict(config)), 0.0)
        sums = objective(None, collate(items))
    return sums, sums.divided(objective.counts(items))


def sampled_gradients(logits, advantages):
    """[actions, V]: what an update on that action alone would have as gradient of its objective by the logits [V], for
    the policy that drew it (surrogate ``logp``)."""
    leaf = logits.detach().clone().requires_grad_()
    n = len(leaf)
    logp = logps_at(leaf.expand(n, n), torch.arange(n))[:, None]
    one = torch.ones(n, 1, dtype=torch.int)
    loss, _ = losses.policy_loss(logp, logp, torch.as_tensor(advantages, dtype=leaf.dtype), one, surrogate="logp")
    return -torch.stack([torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in loss[:, 0]])


def expected_gradient(logits, advantages):
    """Expectation of :func:`sampled_gradients` under the policy [V]."""
    return torch.softmax(logits.detach(), -1) @ sampled_gradients(logits, advantages)


def aligned(config, responses, of_the_step=(), **extra):
    """(sums, loss) of a step of direct alignment on items of responses, each given as its token log-probs; ``extra`` by
    item, ``of_the_step`` the numbers that its preparation finds (KTO's ``z0``).
    """
    return _aligned(config, responses, of_the_step, **extra)[:2]


def aligned_step(config, responses, **extra) -> dict[str, float]:
    """What such a step logs."""
    sums, _, counts = _aligned(config, responses, **extra)
    return logged(sums, counts)


def _aligned(config, responses, of_the_step=(), **extra):
    items = [
        make_item(
            str(k),
            [0],
            [[0] * len(r) for r in of],
            [[1] * len(r) for r in of],
            weight=1.0,
            **{name: values[k] for name, values in extra.items()},
        )
        for k, of in enumerate(responses)
    ]
    logps = torch.cat([r for of in responses for r in of])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_alignment, "hidden_states", lambda model, batch, at: logps)
        patch.setattr(direct_alignment, "head_of", lambda model: None)
        patch.setattr(direct_alignment, "token_logps", lambda *given: (logps, None))
        objective = direct_alignment.DirectAlignment(config)
        vars(objective).update(of_the_step)
        sums = objective(None, collate(items))
    counts = objective.counts(items)
    return sums, sums.divided(counts), counts


def distilled(student, teacher, config: dict, targets=None):
    """Sums of a step of distillation on logits [N, V] of both, of one response whose tokens are ``targets``."""
    n = len(student)
    item = make_item("one", [0], [[0] * n if targets is None else targets], [[1] * n], weight=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "hidden_states", lambda model, batch, at: student if model is None else teacher)
        patch.setattr(modeling, "head_of", lambda model: head(student))
        return distill.Distillation(distill.Config(**config), teacher)(None, collate([item]))


def response_values(objective, logps, masks=None, **extra):
    """What each response, given as its token log-probs, is to a method of direct alignment; ``extra`` by response."""
    masks = [[1] * len(row) for row in logps] if masks is None else masks
    more = [{name: [values[k]] for name, values in extra.items()} for k in range(len(logps))]
    items = [make_item(str(k), [0], [[0] * len(m)], [m], **more[k]) for k, m in enumerate(masks)]
    flat = torch.cat([row[torch.tensor(m).bool()] for row, m in zip(logps, masks)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_alignment, "target_logps", lambda model, batch: (flat, None))
        return objective.values(None, collate(items))


def response_logps(objective, logps, mask):
    """The summed target log-probs [B] of each response to a method of direct alignment, and how many they are [B]."""
    masks = mask.int().tolist()
    items = [make_item(str(k), [0], [[0] * mask.shape[1]], [row]) for k, row in enumerate(masks)]
    return torch.stack(response_values(objective, logps, masks)), direct_alignment.target_lengths(
        collate(items), logps
    )[:, 0]


# --- reward models ---------------------------------------------------------------------------------------------


def ranked(groups, weigh):
    """The step's loss over rankings, each given as its scores, best first; ``weigh(pairs)`` is what each pair of a
    ranking weighs (rm.kwise_pairs).
    """
    pairs = [pairing.ranking_pairs(list(range(len(scores)))) for scores in groups]
    items = [
        make_item(
            "row",
            [0],
            [[1]] * len(scores),
            [[1]] * len(scores),
            pairs=of,
            pair_weight=weigh(of),
            ended=[True] * len(scores),
        )
        for scores, of in zip(groups, pairs)
    ]
    scores_SC = torch.tensor([[score] for scores in groups for score in scores], dtype=torch.float64)
    return reward_losses.kwise_pairs(scores_SC, collate(items), None).divided(
        {"weight": sum(weigh(of) * len(of) for of in pairs)}
    )


def targets_of(items) -> list:
    """What the items of a reward model are trained towards."""
    return [item.extra["targets"] for item in items]


# --- reward heads -----------------------------------------------------------------------------------------------


def response_scores(hidden, attention, weight, bias: float = 0.0, pooling: str = "last"):
    """(scores [B], position of the token that is read [B]) under a linear head, for rows of hidden states padded on
    either side.

    Production has no padding: a row is its attended tokens.
    """
    keep = attention.bool()
    batch = collate(
        [make_item(str(k), [], [[0] * int(row.sum())], [[0] * int(row.sum())]) for k, row in enumerate(keep)]
    )
    linear = torch.nn.Linear(len(weight), 1).double()
    linear.weight.data, linear.bias.data = weight[None], torch.tensor([bias], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reward_heads, "states_of", lambda model, batch, at=None: hidden[keep] if at is None else hidden[keep][at]
        )
        patch.setattr(reward_heads, "score_head", lambda model: linear)
        scores = reward_heads.response_outputs(None, batch, pooling)[:, 0]
    return scores, keep.nonzero()[batch.last_S, 1]
