"""The value function of actor-critic presets: a scalar head on every token (rows ACTOR-CRITIC and CRITIC-LOSS of
``tests/methods.yaml``).

``separate``: its own network and optimizer, started as a copy of the reward model (backbone, head and calibration) or
from the backbone of the policy, or of another language model, with a head of zeros; it takes one step on the items of
every policy step. ``shared``: a head on the policy's trunk, trained by the policy's step. The values that advantages
are made of are fixed when a rollout is scored.

``values[t]`` is read at the token BEFORE completion token t (the prompt's last for t = 0), ``bootstrap`` after the last
one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from stages.batching import per_response
from stages.losses import aggregate, denominator_of, masked, value_clips, value_loss
from stages.models.modeling import hidden_states, precise
from stages.models.sharding import asked
from stages.policy.policy_update import counted_sequences, group_means, over_groups
from stages.reward_models.reward_heads import (
    RewardCard,
    has_card,
    load_reward_model,
    new_reward_model,
    read_card,
    save_reward_model,
    score_head,
)
from stages.training import Sums, Trainer, kept_budget, or_keep, tell_budget


class ValueRegression:
    """(V - target)^2 of the separate critic, aggregated as the policy's loss is (of one value per prompt, over all of
    them); targets and old values come with the items.
    """

    def __init__(self, row, config, bias: float):
        self.config, self.bias = config, bias
        # one value per prompt has no length that the constant of a sum could stand for
        self.mode = row.aggregation.removesuffix("-norm") if row.critic_target == "bandit" else row.aggregation
        self.scale = config.loss_scale_factor or config.longest_completion
        self.by_group = over_groups(row, config) and row.critic_target != "bandit"
        self.count = "groups" if self.by_group else denominator_of(self.mode)

    def counts(self, items):
        return {
            "tokens": float(sum(i.n_targets for i in items)),
            "sequences": counted_sequences(items, self.config.seq_denominator),
            "groups": float(sum(i.n_targets > 0 for i in items)),
        }

    def __call__(self, model, batch):
        values_SL = batch.padded(values_of(score_head(model), hidden_states(model, batch, batch.src_N), self.bias))
        targets, old = (
            batch.pad_lists([v for i in batch.items for v in i.extra[name]]) for name in ("returns", "values")
        )
        error = value_loss(
            values_SL, targets, batch.mask_SL, old, self.config.cliprange_value, self.config.value_loss_half
        )
        metrics = {
            "value_mean": (masked(values_SL.detach(), batch.mask_SL).sum(), "tokens"),
            "return_mean": (masked(targets, batch.mask_SL).sum(), "tokens"),
        }
        if self.config.cliprange_value is not None:
            clips = value_clips(values_SL, targets, batch.mask_SL, old, self.config.cliprange_value)
            metrics["clip_fraction"] = (clips.float().sum(), "tokens")
        total = (
            group_means(error, batch.mask_SL, batch.items)
            if self.by_group
            else aggregate(error, batch.mask_SL, self.mode, self.scale, counted=False)[0]
        )
        return Sums({"value": (total, self.count)}, metrics)


def values_of(head: nn.Linear, states: torch.Tensor, bias: float) -> torch.Tensor:
    """Scalar head on hidden states, float32 or better even under autocast."""
    with torch.autocast(states.device.type, enabled=False):
        return head(precise(states))[:, 0] + bias


def new_value_head(hidden_size: int) -> nn.Linear:
    """A head of zeros on the policy's trunk: V = 0 until something is learned, so that the first advantages are returns
    and not the noise of a random head, whose values have a spread of 1 (Huang et al. 2023, "The N implementation
    details of RLHF with PPO")."""
    head = nn.Linear(hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    return head


def is_language_model(path: str) -> bool:
    """Whether the model in ``path`` has no head for values, so that a critic takes its backbone alone."""
    from transformers import AutoConfig

    return not has_card(path) and any("CausalLM" in n for n in AutoConfig.from_pretrained(path).architectures or [])


def why_no_start(path: str, renderer) -> str | None:
    """None when a critic can start from the reward (or value) model in ``path``, else the reason it cannot."""
    from transformers import AutoConfig

    from stages.chat import load_tokenizer

    card = read_card(path)
    if (
        card.objective in ("combined", "implicit", "pairwise", "t2t_point", "t2t_pair", "control_tokens")
        or card.pooling != "last"
    ):
        return f"objective {card.objective} with pooling {card.pooling} gives no value per token"
    config = AutoConfig.from_pretrained(path)
    if (
        not any("CausalLM" in n or "SequenceClassification" in n for n in config.architectures or [])
        or getattr(config, "num_labels", 1) != 1
    ):
        return "it is no decoder with one output"
    if load_tokenizer(path).get_vocab() != renderer.tokenizer.get_vocab():
        return "it has another tokenizer than the policy"
    return None


class Critic:
    """The critic of a run: values of rollouts, one training step per policy step, its own checkpoint state.

    Args:
        start: model directory the separate critic is a copy of; ``is_reward_model`` says whether its head is kept.
        policy: the policy, for ``critic_mode=shared`` (it gets a ``value_head``).
    """

    def __init__(self, stage, row, start: str, is_reward_model: bool, policy):
        self.stage = stage
        config = self.config = stage.config
        self.device, self.row, self.bias = stage.device, row, 0.0
        self.only_first = row.critic_target == "bandit"
        if config.critic_mode == "shared":
            self.trainer, self.model = None, policy
            policy.value_head = new_value_head(policy.get_input_embeddings().weight.shape[1]).to(stage.device)
            self.head = policy.value_head
            return
        if is_reward_model:
            self.model = load_reward_model(start, stage.device, in_shards=asked(config))
            self.bias = read_card(start).bias
        else:
            self.model = new_reward_model(start, stage.device, in_shards=asked(config))
            nn.init.zeros_(score_head(self.model).weight)
        self.head = score_head(self.model)
        own = config.model_copy(
            update={
                "learning_rate": config.critic_learning_rate,
                "lora_rank": 0,
                "ema_decay": 0.0,
                "bema": None,
                "select_by": None,
                "optimizer": "adamw",
                "router_aux_loss_coef": 0.0,
            }
        )
        self.trainer = Trainer(
            self.model,
            ValueRegression(row, config, self.bias),
            own,
            config.max_steps + row.critic_warmup_steps,
            stage.device,
        )
        self.trainer.instead = "critic_mode=shared"
        kept_budget(stage, self.trainer)

    def values(self, items) -> tuple[list[list[float]], list[float]]:
        """(values of every response token, value after the last one), per response in the items' order; all of them
        the value before its first trained token, the prompt's, with critic_target=bandit.
        """
        was_training = self.model.training
        self.model.eval()

        def compute(batch):
            n = len(batch.src_N)
            flat = values_of(
                self.head, hidden_states(self.model, batch, torch.cat([batch.src_N, batch.last_S])), self.bias
            )
            rows = batch.padded(flat[:n]).cpu().numpy()
            lengths = [len(r) for i in batch.items for r in i.responses]
            return [(row[:length].tolist(), after) for row, length, after in zip(rows, lengths, flat[n:].tolist())]

        found = [
            pair
            for rows in per_response(items, self.config.micro_batch_tokens, self.device, compute, self.model)
            for pair in rows
        ]
        self.model.train(was_training)
        if self.only_first:  # the only place where the head is trained
            firsts = [int(m.argmax()) if len(m) else 0 for i in items for m in i.masks]
            found = [([row[t]] * len(row), row[t]) if row else (row, after) for t, (row, after) in zip(firsts, found)]
        return [row for row, _ in found], [after for _, after in found]

    def train(self, items) -> dict[str, float]:
        """One step of the separate critic on the items of a policy step; a shared one learns with the policy."""
        if self.trainer is None:
            return {}
        if self.only_first:
            items = [replace(i, masks=tuple(m * (m.cumsum() == 1) for m in i.masks)) for i in items]
        items = [replace(i, extra={**i.extra, "skip_forward": not i.n_targets}) for i in items]
        metrics = or_keep(self.stage, lambda: self.trainer.step(items)) | tell_budget(self.stage, self.trainer)
        return {f"critic/{k}": v for k, v in metrics.items() if k not in ("skipped_steps", "learning_rate")}

    def state(self) -> tuple[dict, dict[str, bytes]]:
        if self.trainer is None:
            return {}, {}
        state, files = self.trainer.state()
        return state, {f"critic-{name}": data for name, data in files.items()}

    def restore(self, state: dict, read) -> None:
        if self.trainer is not None:
            self.trainer.restore(state, read.under("critic-"))

    def save(self, stage, renderer) -> None:
        """The critic as a model output of role value (never promoted); a shared head leaves the policy before that is
        exported.
        """
        if self.trainer is None:
            del self.model.value_head
            return
        with stage.output_model("critic", role="value") as directory:
            save_reward_model(self.model, renderer.tokenizer, directory, RewardCard("value", self.bias))
