"""What stage evaluate can be told, and what of it does not go together, by itself or with the inputs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stages.evaluation.asked import AskedJudge, MTBench
from stages.evaluation.given import GivenConfig
from stages.reward.components import FixedComponent, RewardComponent
from stages.settings import (
    PROMPT_TEMPLATE,
    AgentConfig,
    BenchmarkConfig,
    ChatConfig,
    PromptTemplate,
    SamplingConfig,
    refuse_unread,
)
from stages.spec import ConfigError


class EvaluationConfig(SamplingConfig, AgentConfig, BenchmarkConfig, ChatConfig, GivenConfig):
    target: Literal["policy", "reward_model", "judge"] = Field(
        "policy",
        description=(
            "What `model` is: a policy that answers prompts, a reward model that scores pairs, or a language "
            "model that is asked which answer of a pair is better, in both orders."
        ),
    )
    judge_mode: Literal["preference", "verdict"] = Field(
        "preference",
        description="target=judge: the probability of the letters A and B, or a written verdict at temperature 0.",
    )
    split: str = Field("test", description="Split of the prompts, pairs and texts that is evaluated.")
    prompt_template: PromptTemplate = Field("chat", description=PROMPT_TEMPLATE)
    limit: int | None = Field(
        None,
        ge=1,
        title="Limit",
        description=(
            "Prompts (and pairs, and texts) used at most, the first ones of the split; empty = all. Prompts that are too"
            " long for the model are among them."
        ),
    )
    num_samples: int = Field(
        4, ge=0, description="Sampled answers per prompt, k of avg@k and pass@k (section D.0); 0 = greedy only."
    )
    greedy: bool = Field(True, description="Also one greedy answer per prompt (temperature 0).")
    rewards: list[FixedComponent] = Field(
        default_factory=lambda: [RewardComponent(name="verifier", kind="verifier")],
        description=(
            "Graders of answers; the verifier's verdict is `accuracy`. Prompts without a checkable answer stay"
            " ungraded."
        ),
    )
    max_prompt_length: int = Field(
        1024, ge=1, description="Prompt tokens at most; longer prompts are left out and counted."
    )
    max_length: int = Field(
        1024, ge=8, description="Tokens of prompt and longer response of a pair; of one window of a text."
    )
    beta: float = Field(
        0.1,
        gt=0,
        description="Scale of a policy's implicit reward beta (log pi - log ref) on pairs (da.dpo default 0.1).",
    )
    probe_pairs: int = Field(
        64, ge=0, description="Pairs on which a reward model is probed (repetition, flattery, typos ...); 0 = none."
    )
    mt_bench: MTBench | None = Field(
        None,
        title="MT-Bench",
        description=(
            "Ask questions of several turns (column turns) and have a judge rate each answer, 1 to 10: {} with --input"
            " judge=MODEL, or {endpoint: URL, endpoint_model: NAME}; empty: prompts are answered once (eval.mt_bench)."
        ),
    )
    think_max: int | None = Field(
        None,
        ge=0,
        title="Thought at most",
        description=(
            "Tokens of a thought at most: then </think> is put in and the answer follows; 0: no thinking (budget"
            " forcing)."
        ),
    )
    think_min: int = Field(
        0, ge=0, description="Tokens of a thought at least: a </think> that comes before is replaced by Wait; 0 = off."
    )
    think_waits: int = Field(1, ge=1, description="Times that Wait is put in at most (think_min).")
    token_shift: bool = Field(
        False,
        description=(
            "Rank every token of the greedy answers under the input reference, the base model: unshifted, marginal and"
            " shifted shares (eval.token_shift)."
        ),
    )
    perturb_options: bool = Field(
        False,
        description=(
            "Also ask prompts with choices with their options in another order, and report what that changes"
            " (eval.perturbed)."
        ),
    )
    refusal_judge: AskedJudge | None = Field(
        None,
        title="Refusal judge",
        description=(
            "Judge that says whether an answer to a prompt with a label safe or unsafe, or with a mirror image, "
            "refuses in full, in part or not; empty: a list of phrases decides (eval.over_refusal)."
        ),
    )
    chunk: int = Field(64, ge=1, description="Prompts, pairs or texts per resumable unit.")
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Padded tokens per scoring forward; bounds memory.")
    examples: int = Field(
        6, ge=0, description="Best and worst samples shown in the report, each.", json_schema_extra={"identity": False}
    )

    @model_validator(mode="after")
    def _answers_something(self):
        if self.target == "policy" and self.num_samples == 0 and not self.greedy:
            raise ValueError(
                "num_samples=0 and greedy=false leave nothing to generate; write greedy=true or num_samples=1"
            )
        if self.num_samples and self.temperature == 0:
            raise ValueError(
                "temperature=0 makes all samples equal; write num_samples=0 (greedy only) or a temperature such as 1.0"
            )
        refuse_unread(
            self,
            [
                (
                    ("token_shift",),
                    lambda c: c.target == "policy" and c.greedy and not c.environment and not c.mt_bench,
                    "it ranks a policy's greedy answers to prompts; write greedy=true",
                ),
                (
                    ("think_max", "think_min"),
                    lambda c: c.target == "policy" and not c.environment and not c.mt_bench and c.engine != "server",
                    (
                        "thoughts are forced in a policy's answers to prompts, whose exact tokens engine=builtin or"
                        " vllm give; write target=policy and no environment"
                    ),
                ),
                (("think_waits",), lambda c: c.think_min > 0, "no thought has a least length; write think_min=TOKENS"),
                (
                    ("system",),
                    lambda c: c.target == "policy" and not c.mt_bench,
                    "it stands before the prompts of a policy; write target=policy",
                ),
                (
                    ("perturb_options",),
                    lambda c: c.target == "policy" and not c.mt_bench,
                    "only a policy is asked prompts with choices; write target=policy",
                ),
                (
                    ("temperature", "top_p", "top_k", "min_p"),
                    lambda c: c.num_samples > 0 or c.temperature == 0 or c.target != "policy" or c.mt_bench,
                    "every answer is greedy (num_samples=0); write num_samples=1",
                ),
                (("judge_mode",), lambda c: c.target == "judge", "only target=judge asks for one; write target=judge"),
                (
                    (
                        *SamplingConfig.model_fields,
                        "num_samples",
                        "greedy",
                        "rewards",
                        "prompt_template",
                        "max_prompt_length",
                        "max_length",
                        "multiple_choice",
                        "refusal_judge",
                        "beta",
                    ),
                    lambda c: c.target == "policy",
                    "a scorer of pairs is asked no prompts and samples nothing; write target=policy",
                ),
            ],
        )
        if self.mt_bench:
            refuse_unread(
                self,
                [
                    (
                        (
                            "target",
                            "num_samples",
                            "greedy",
                            "temperature",
                            "rewards",
                            "prompt_template",
                            "environment",
                            "stop_strings",
                            "refusal_judge",
                        ),
                        lambda c: False,
                        (
                            "mt_bench asks a policy every turn once, under its chat template and at the temperatures of"
                            " its categories, and a judge rates the answers; leave mt_bench out"
                        ),
                    )
                ],
            )
        return self


def check_inputs(stage) -> None:
    """Raise ConfigError where the inputs are not those that the settings are about."""
    from stages.evaluation import forcing

    config, policy = stage.config, stage.config.target == "policy"
    if policy and not any(stage.has(name) for name in ("prompts", "pairs", "texts")):
        raise ConfigError(
            "evaluate: target=policy needs --input prompts=REF_OR_PATH (prompts/1), --input pairs=REF_OR_PATH"
            " (pairs/1) or --input texts=REF_OR_PATH (text/1)"
        )
    if not policy and not stage.has("pairs"):
        raise ConfigError(
            f"evaluate: target={config.target} needs --input pairs=REF_OR_PATH (pairs/1), the held-out preference pairs"
        )
    for name, needs, why in (
        ("texts", policy, f"target={config.target} scores pairs; write target=policy, or leave the texts out"),
        ("examples", config.few_shot > 0, "no examples are shown; write few_shot=5, or leave them out"),
    ):
        if stage.has(name) and not needs:
            raise ConfigError(f"evaluate: the input {name} would change nothing: {why}")
    if forcing.asked(config) and (stage.has("reference") or config.token_shift):
        raise ConfigError(
            "evaluate: behind forced thoughts there are tokens that the policy did not sample, so their KL to the"
            " reference and their ranks say nothing; leave the input reference out, or think_max and think_min"
        )
    if config.think_max is not None and config.think_max < config.think_min:
        raise ConfigError(
            f"evaluate: think_max={config.think_max} is below think_min={config.think_min}; write a larger"
            " think_max, or a smaller think_min"
        )
    if config.system and not stage.has("prompts"):
        raise ConfigError(
            "evaluate: system stands before prompts, and none are evaluated; give --input prompts=REF_OR_PATH, or"
            " leave system out"
        )
    if config.few_shot and not (policy and stage.has("prompts")):
        raise ConfigError(
            "evaluate: few_shot shows examples before prompts, and none are evaluated; give --input"
            " prompts=REF_OR_PATH, or write few_shot=0"
        )
    if config.chat_template_given and not (policy and (stage.has("prompts") or stage.has("pairs"))):
        raise ConfigError(
            "evaluate: chat templates show prompts and pairs to a policy, and here none are; leave chat_template"
            " and chat_template_kwargs out"
        )
