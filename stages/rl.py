"""rl: policy-gradient fine-tuning with rewards from verifiers, reward models or mixtures.

An algorithm is a row of ``stages.algorithms.RL_PRESETS`` (``ppo``, ``grpo``, ``dapo``, ``rloo``, ``topr``, ...):
advantage, scaling, ratio and surrogate, KL in reward or loss, aggregation, critic, epochs. Every field left empty below
takes the preset's value (:mod:`stages.policy.presets`, which also refuses what does not go together); the resolved row
is printed at the start.

One iteration: :mod:`stages.rollouts` chooses prompts, samples G completions each, scores, filters, credits
and records them; :mod:`stages.policy.credit` turns rewards into an advantage per token;
:mod:`stages.policy.policy_update` is the loss of the ``num_iterations`` x ``num_minibatches`` optimizer steps,
:mod:`stages.policy.critics` the value function beside it. Rollouts are a ``rollouts/1`` dataset with every token, mask,
log-prob, reward component, value and advantage, so each update can be computed again. Groups without signal are counted
but never forwarded. Killed at any instant, the next run computes the same bytes.

With ``environment`` a completion is a trajectory of several turns (:mod:`stages.acting.agents`): rewards by turn, loss
on the policy's own tokens, and every turn once more as a row of ``trajectories/1``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from pydantic import field_validator, model_validator

from stages.algorithms import rl_preset
from stages.policy.held_models import load_critic, load_old_policy, load_reference, load_start, roles
from stages.policy.presets import RL_AXES, not_read, resolve_preset, row_of
from stages.policy.settings import PolicyGradientConfig
from stages.reward.components import JUDGE_INPUTS, REWARD_INPUTS, WITHOUT_VERDICT
from stages.reward.rewards import check_inputs, inputs_read
from stages.settings import refuse_unread_in, refuse_unread_inputs
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec


class Config(PolicyGradientConfig):
    # names of other stages that are understood, and are no settings of their own
    ALSO: ClassVar[tuple[str, ...]] = ("batch_size", "max_length")

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _not_yes_or_no(cls, value):
        said = str(value).lower()
        if said in ("true", "false"):
            raise ValueError(
                f"scale_rewards={said} is another trainer's spelling; write scale_rewards="
                + ("group, by whose std it divides" if said == "true" else "none, which divides by nothing")
                + " (batch: by the std of the whole batch)"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _as_in_other_stages(cls, values):
        """batch_size and max_length (ALSO) are said in the settings of rl: prompts_per_step * num_generations =
        batch_size * num_minibatches; max_prompt_length = max_length - max_completion_length.
        """
        if not isinstance(values, dict):
            return values
        values = dict(values)
        number = lambda name: values[name] if isinstance(values.get(name), int) else cls.model_fields[name].default
        rows, length = (values.pop(name, None) for name in cls.ALSO)
        for name, value in zip(cls.ALSO, (rows, length)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name}={value!r} is no number of {'completions' if name == 'batch_size' else 'tokens'}; write a"
                    " whole number above 0"
                )
        if rows is not None:
            group, steps, sampled = (
                number("num_generations"),
                number("num_minibatches"),
                number("prompts_per_step") * number("num_generations"),
            )
            if "prompts_per_step" not in values:
                if rows * steps % group:
                    raise ValueError(
                        f"batch_size={rows}: prompts have num_generations={group} completions each, so write a multiple"
                        f" of {group}; or give prompts_per_step too"
                    )
                values["prompts_per_step"] = rows * steps // group
            elif sampled % rows or values.get("num_minibatches", sampled // rows) != sampled // rows:
                raise ValueError(
                    f"batch_size={rows}: a rollout batch has prompts_per_step * num_generations = {sampled}"
                    f" completions, in num_minibatches={steps} steps of {sampled / steps:g}; leave batch_size out, or"
                    " give it without num_minibatches as a divisor of the rollout batch"
                )
            else:
                values["num_minibatches"] = sampled // rows
                if rows % group:  # a step has less than whole groups
                    values.setdefault("minibatch_unit", "sequence")
        if length is not None:
            room = length - number("max_completion_length")
            if room < 1:
                raise ValueError(
                    f"max_length={length} leaves no room for a prompt beside"
                    f" max_completion_length={number('max_completion_length')}; write a smaller max_completion_length,"
                    " or leave max_length out"
                )
            values["max_prompt_length"] = min(number("max_prompt_length"), room)
        return values

    @model_validator(mode="after")
    def _teacher_follows(self):
        """A preset that distils has its reference follow the policy, as its paper does, unless told otherwise."""
        if rl_preset(self.preset).distillation_weight:
            if "ref_mode" not in self.model_fields_set:
                self.__dict__["ref_mode"] = "ema"
            if self.ref_mode == "ema" and "ref_decay" not in self.model_fields_set:
                self.__dict__["ref_decay"] = 0.95
        return self

    def effective(self) -> dict:
        row = row_of(self)
        return {
            "options": dict(row.options),
            **{name: getattr(row, axis) for name, axis in RL_AXES.items() if getattr(self, name) is None},
        }

    @property
    def longest_completion(self) -> int:
        """max_completion_length over the whole run: the constant of seq-mean-token-sum-norm must not move."""
        return max([self.max_completion_length, *(length for _, length in self.context_schedule)])

    def completion_limit(self, step: int) -> int:
        """max_completion_length of completions sampled at an optimizer step (context_schedule)."""
        from stages.policy.schedules import step_function

        return step_function(self.context_schedule, step, self.max_completion_length)


def check(config: Config, given: Collection[str]) -> None:
    """Refuse settings that do not fit together, rewards whose inputs are not there, and inputs that nothing reads.
    Raises ValueError or ConfigError.
    """
    from stages.policy.read_when import RL_INPUTS_READ_WHEN, reads_verdicts

    row, _ = resolve_preset(config)
    check_inputs(config.rewards, given)
    if "recorded" in given:
        from stages.rollouts.recorded import check_recorded

        check_recorded(config, row, given)
    refuse_unread_inputs(SPEC.name, given, RL_INPUTS_READ_WHEN, row, config, inputs_read(config.rewards, given))
    if row.ptx_coef and "ptx" not in given:
        raise ValueError(
            f"ptx_coef={row.ptx_coef} mixes in pretraining text, which is not there; give the input ptx=REF, or write"
            " ptx_coef=0"
        )
    if config.curriculum == "pass_at_k" and "prompt_stats" not in given and config.passk_k > config.passk_samples:
        raise ValueError(
            f"pass@{config.passk_k} needs as many samples of a prompt; write passk_k <= {config.passk_samples}, or raise"
            " passk_samples."
        )
    rates = reads_verdicts(config, given)
    if rates and all(c.kind in WITHOUT_VERDICT for c in config.rewards):
        raise ValueError(
            f"{rates[0]} goes by which completions are right, which no reward here says; add {{name: verdict, kind:"
            f" verifier, weight: 0}} to rewards, or leave {rates[0]} out"
        )


def reads_input(config: Config, name: str, given: Collection[str] = ()) -> bool:
    """Whether a run with these settings would read one of its optional inputs beside those that are ``given``."""
    from stages.policy.read_when import RL_INPUTS_READ_WHEN

    row, by_rewards = row_of(config), inputs_read(config.rewards, {name, *given})
    return all(condition(row, config, by_rewards) for names, condition, _ in RL_INPUTS_READ_WHEN if name in names)


SPEC = StageSpec(
    name="rl",
    config=Config,
    gpu=True,
    parallel=True,
    roles=roles,
    check=check,
    inputs={
        "model": InputSpec("model", use="words", doc="Policy to start from."),
        "data": InputSpec("dataset", kinds=("prompts/1",), doc="Prompts, with answers for verifiers."),
        "reward_model": InputSpec(
            "model", required=False, use="scores", doc="Scorer of components with kind=model; the critic's start."
        ),
        **JUDGE_INPUTS,
        **REWARD_INPUTS,
        "sft": InputSpec(
            "dataset", kinds=("demonstrations/1",), required=False, doc="Answers that join the groups (sft_member)."
        ),
        "reference": InputSpec("model", required=False, use="words", doc="KL reference; default: the starting policy."),
        "critic": InputSpec(
            "model",
            required=False,
            doc=(
                "Model to start the critic from, instead of the reward model: a value or reward model, or a language"
                " model (base, SFT), whose values begin at 0."
            ),
        ),
        "ptx": InputSpec(
            "dataset", kinds=("text/1", "demonstrations/1"), required=False, doc="Pretraining text mixed in (ptx_coef)."
        ),
        "baselines": InputSpec(
            "dataset",
            kinds=("baselines/1",),
            required=False,
            doc="Baseline per prompt (baseline=table, v_star); default: sampled first.",
        ),
        "prompt_stats": InputSpec(
            "dataset",
            kinds=("prompt_stats/1",),
            required=False,
            doc=(
                "Pass rates behind curriculum=pass_at_k, self_paced and difficulty_band, the last of each prompt;"
                " default: sampled first."
            ),
        ),
        "stored": InputSpec(
            "dataset",
            kinds=("rollouts/1",),
            required=False,
            doc="Train on these rollouts instead of sampling (off-policy presets).",
        ),
        "recorded": InputSpec(
            "dataset",
            kinds=("rollouts/1",),
            required=False,
            doc=(
                "The rollouts of a run with these very settings and inputs: it is computed again from them, sampling only"
                " what they do not hold, and everything in them held against what comes out now."
            ),
        ),
    },
    outputs={
        "model": OutputSpec("model", role="policy"),
        "rollouts": OutputSpec("dataset"),
        "trajectories": OutputSpec(
            "dataset",
            required=False,
            doc="trajectories/1: every turn in an environment, with observations, reward and events.",
        ),
        "validation": OutputSpec(
            "dataset", required=False, doc="eval_samples/1: every answer to a validation prompt, pass by pass."
        ),
        "prompt_stats": OutputSpec(
            "dataset", required=False, doc="prompt_stats/1: every group of every iteration, kept or dropped and why."
        ),
        "rubric_scores": OutputSpec(
            "dataset",
            required=False,
            doc="rubric_scores/1: every item of every completion, with critique and reasoning.",
        ),
        "rubric_confidence": OutputSpec(
            "dataset", required=False, doc="rubric_confidence/1: mean confidence per rubric item."
        ),
        "critic": OutputSpec("model", role="value", required=False, doc="The separate critic after training."),
        "baselines": OutputSpec("dataset", required=False, doc="baselines/1 as sampled before training."),
    },
)


def arm_of(values: dict, own: Collection[str]) -> Config:
    """One of several runs that share settings: the config of ``values``, without those that its preset does not read
    and that are not its ``own``.
    """
    config = Config.model_validate(values)
    dead = not_read(config).keys() - set(own)
    return (
        Config.model_validate({name: value for name, value in values.items() if name not in dead}) if dead else config
    )


def run(stage):
    from stages.policy.read_when import RL_READ_OF_INPUTS
    from stages.chat import stage_renderer
    from stages.models import sharding
    from stages.models.modeling import policy_to_train, publish
    from stages.policy.policy_update import PolicyGradient
    from stages.policy.rl_report import rl_report
    from stages.policy.trust_region import TrustRegionTrainer
    from stages.preflight import rl_preflight
    from stages.reward.rewards import build_rewards
    from stages.rollouts.recorded import leaves_validation_out
    from stages.rollouts.source import Rollouts
    from stages.training import Trainer, fit

    config = stage.config
    row, warnings = resolve_preset(config)
    if config.sharding == "full" and row.update == "trust_region":
        raise ConfigError(
            "update=trust_region takes derivatives along a direction, for which weights must be whole; write"
            " sharding=none (several devices share the micro-batches then too), lora_rank=16 where memory is short, or"
            " another preset."
        )
    check(config, stage.inputs)
    refuse_unread_in(stage, RL_READ_OF_INPUTS)
    stage.log(f"{row}")
    for text in warnings:
        stage.warn("rl_settings", text)
    renderer = stage_renderer(stage)
    prompts, held_out = _prompts(stage, renderer)
    rewards = build_rewards(
        config.rewards, stage.inputs, renderer=renderer, device=stage.device, frozen=config.frozen_dtype
    )
    rewards.check([prompt for prompt, _ in prompts + held_out])
    unseen = leaves_validation_out(config, stage.inputs)
    if held_out and unseen:
        stage.log("no validation passes: their answers are in no rollouts, and a service would be asked about new ones")
        held_out = []
    model = policy_to_train(stage)
    reference, apart = load_reference(stage, row, renderer, model)
    if row.update == "trust_region":
        _warn_of_learning_rate(stage, row)
    old = load_old_policy(stage, row)
    critic = load_critic(stage, row, renderer, model)
    sampled_here = config.engine == "builtin" or row.opponent == "mixture"  # other engines hold weights of their own
    acting = sharding.Acting(model, sampled_here and (sharding.asked(config) or config.async_rollouts))
    anchor = old if row.kl_target == "old" else reference
    if apart:
        sharding.shard(reference, stage.device)
    start = load_start(stage, model)
    source = Rollouts(
        stage, row, renderer, acting, rewards, prompts, reference=reference, old=old, critic=critic, start=start
    )
    objective = PolicyGradient(
        row,
        config,
        source.kl_loss_coef,
        anchor,
        critic.head if critic is not None and config.critic_mode == "shared" else None,
        reference if row.distillation_weight else None,
        source.entropy.paid,
    )
    trainer = (TrustRegionTrainer if row.update == "trust_region" else Trainer)(
        model, objective, config, source.total_steps, stage.device
    )
    if row.reset_optimizer:
        source.on_new_batch = trainer.optimizer.state.clear
    rl_preflight(stage, trainer, source)
    evaluate = (
        (lambda: source.evaluate(held_out, trainer.step_index) | source.beside_text(trainer)) if held_out else None
    )
    every = 0 if unseen else config.eval_every
    fit(stage, trainer, source, evaluate=evaluate, eval_every=every, again=False, falls=False)
    source.close()
    source.check_scored()
    if critic is not None:
        critic.save(stage, renderer)
    publish(stage, model, renderer.tokenizer)
    summary = {
        "updates_per_generation": source.steps_per_batch,
        "old_logps": "sampler" if source.policy.exact_logps else "trainer",
        "engine": source.policy.engine.name,
        "steps": trainer.step_index,
        "iterations": source.iteration + 1,
        "skipped_steps": trainer.skipped,
        **{f"last/{k}": v for k, v in source.metrics.items()},
        **(source.recorded.tell() if source.recorded is not None else {}),
    }
    stage.summary(summary)
    rl_report(stage, f"RL ({config.preset})", summary, renderer.tokenizer.decode)


def _prompts(stage, renderer) -> tuple[list, list]:
    """(prompts that are trained on, validation prompts that are only watched), each with its ids."""
    from stages.generation import prompt_rows
    from stages.training import HOLD_OUT

    config, data = stage.config, stage.dataset("data")

    def rows(split, most):
        return prompt_rows(stage, data, split, renderer, config.max_prompt_length, most, config.prompt_template)

    prompts = rows(config.split, config.max_prompts)
    if not config.eval_prompts:
        return prompts, []
    if "validation" not in data.manifest["splits"]:
        raise ConfigError(
            f"rl: eval_prompts={config.eval_prompts} asks validation prompts and there are none; {HOLD_OUT}, or leave"
            " eval_prompts out"
        )
    return prompts, rows("validation", config.eval_prompts)


def _warn_of_learning_rate(stage, row) -> None:
    """Say so where a learning rate is given, which TRPO's step does not read."""
    config = stage.config
    if config.learning_rate != type(config).model_fields["learning_rate"].default:
        stage.warn(
            "learning_rate_unused",
            f"learning_rate={config.learning_rate} moves nothing: the length of TRPO's step is max_kl={config.max_kl}"
            + (
                f", and its critic learns at critic_learning_rate={config.critic_learning_rate}."
                if row.needs_critic
                else "."
            )
            + " Leave learning_rate out, and write max_kl for longer or shorter steps.",
        )
