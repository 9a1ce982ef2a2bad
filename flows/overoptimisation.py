"""overoptimisation: one policy optimised against a proxy reward model, judged by one that it never saw
(recipe.overopt_study; Gao et al. 2023).

    posttrain run overoptimisation --preset demo                                                   # the embedded world, minutes on two CPU cores
    posttrain run overoptimisation --set model=path/or/ref --set data.pairs=pairs.jsonl --set data.prompts=prompts.jsonl
    posttrain run overoptimisation ... --set arms='{no_kl: {kl_coef: 0}, short: {kl_coef: 0, max_steps: 20}, ppo:
    {preset: ppo}}'

The preference pairs are cut in halves by prompt: the proxy learns from one, the gold model from the other. RL runs
against the proxy once per arm, an arm being a name with the settings in which it differs from the section `rl`;
best-of-n selects by the proxy among samples of the same policy on held-out prompts. Gold scores, and the verifier's
verdicts where prompts have answers, are read along every run and never trained on. Steps: `proxy`, `gold`,
`judge_proxy`, `judge_gold`, `rl_ARM`, `curve_ARM`, `evaluate_ARM`, `best_of_n`, `curve_best_of_n` and `arms`, with the
report.
"""

from __future__ import annotations

from typing import Any, ClassVar, Optional

from pydantic import Field

from flows.config import merge
from flows.recipe import Run, recipe
from flows.start import IteratedConfig, reward_inputs, rl_inputs, starting_policy
from flows.steps import Source, evaluate, ingest
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.overoptimisation import Config as CurveConfig
from stages.rejection import Config as RejectionConfig
from stages.reward.components import RewardComponent
from stages.reward_model import Config as RewardModelConfig
from stages.rl import Config as RLConfig
from stages.rl import arm_of


def rewards() -> list[RewardComponent]:
    """The proxy is the reward; the verifier's verdicts are stored beside it and weigh nothing."""
    return [
        RewardComponent(name="proxy", kind="model"),
        RewardComponent(name="verifier", kind="verifier", weight=0.0, on_missing="skip"),
    ]


class Config(IteratedConfig):
    NOT_READ: ClassVar = dict.fromkeys(("promote", "promote_as"), "a study puts no model into office")
    reward_model: Optional[str] = Field(
        None, title="Reward model", description="The proxy; empty: trained on one half of the pairs."
    )
    gold_model: Optional[str] = Field(
        None,
        title="Gold model",
        description=(
            "The held-out judge, for example a larger reward model; empty: trained on the other half of the pairs."
        ),
    )
    backbone: Optional[str] = Field(
        None,
        title="Backbone",
        description="Where the proxy starts; empty: the policy. A smaller one is over-optimised sooner.",
    )
    ingest_pairs: IngestConfig = Field(
        IngestConfig(kind="pairs/1", halves=True),
        description="Checks of the preference pairs, cut in halves by prompt.",
    )
    train_reward_model: RewardModelConfig = Field(
        RewardModelConfig(split="rm_a"), description="The proxy, on half rm_a."
    )
    train_gold_model: RewardModelConfig = Field(
        RewardModelConfig(split="rm_b"), description="The gold model, on half rm_b."
    )
    rl: RLConfig = Field(
        RLConfig(preset="rloo", monitor_kl=True, rewards=rewards()),
        description="What all arms share: RL against the proxy.",
    )
    arms: dict[str, dict[str, Any]] = Field(
        {"no_kl": {"kl_coef": 0.0}, "weak_kl": {"kl_coef": 0.02}, "strong_kl": {"kl_coef": 0.2}},
        description="Name -> settings in which the arm differs from `rl`.",
    )
    best_of_n: RejectionConfig = Field(
        RejectionConfig(num_generations=16, split="test", dedupe=False, rewards=rewards()),
        description="Samples of the starting policy, selected by the proxy.",
    )
    curve: CurveConfig = Field(CurveConfig(), description="Points of the curves, and when they part.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(
            rewards=[
                RewardComponent(name="verifier", kind="verifier", on_missing="skip"),
                RewardComponent(name="proxy", kind="model"),
                RewardComponent(name="gold", kind="model", input="gold"),
            ]
        ),
        description="Held-out prompts, answered by the start and every arm.",
    )


@recipe(Config)
def overoptimisation(run: Run, config: Config) -> dict:
    """Over-optimisation study: RL against a proxy reward model with several KL coefficients and best-of-n, judged by a
    held-out reward model.
    """
    source = Source(run, config)
    arms = {
        name: arm_of(merge(config.rl.model_dump(mode="json", exclude_unset=True), settings), settings)
        for name, settings in config.arms.items()
    }
    prompts = ingest(run, "prompts", source("prompts"), config)
    start = starting_policy(run, source, config)
    proxy, gold = config.reward_model, config.gold_model
    if proxy is None or gold is None:
        pairs = ingest(run, "pairs", source("pairs"), config)
        # the models differ in data and in seed, so that neither inherits the other's accidents; each is judged on what
        # the other learned from
        if proxy is None:
            proxy = run(
                "reward_model",
                "proxy",
                model=config.backbone or start,
                data=pairs,
                config=config.train_reward_model,
                name_as="proxy",
            )["model"]
            run(
                "evaluate",
                "judge_proxy",
                model=proxy,
                pairs=pairs,
                config=EvaluateConfig(target="reward_model", split=config.train_gold_model.split, limit=500),
            )
        if gold is None:
            gold = run(
                "reward_model",
                "gold",
                model=start,
                data=pairs,
                config=config.train_gold_model,
                seed=run.seed + 1,
                name_as="gold",
            )["model"]
            run(
                "evaluate",
                "judge_gold",
                model=gold,
                pairs=pairs,
                config=EvaluateConfig(target="reward_model", split=config.train_reward_model.split, limit=500),
            )

    def judged(name: str, model: str) -> str:
        return evaluate(
            run,
            name,
            model,
            config.evaluate,
            prompts=prompts,
            reward_model=proxy,
            gold=gold,
            reference=start,
            **reward_inputs(source, config, config.evaluate.rewards, start),
        )["samples"]

    def trained(name: str, arm: RLConfig) -> tuple[str, str, str]:
        done = run(
            "rl",
            f"rl_{name}",
            model=start,
            data=prompts,
            config=arm,
            name_as=f"overoptimised-{name.replace('_', '-')}",
            **rl_inputs(source, config, arm, start, proxy),
        )
        curve = run(
            "overoptimisation",
            f"curve_{name}",
            rollouts=done["rollouts"],
            model=start,
            reward_model=proxy,
            gold=gold,
            config=config.curve,
        )
        return curve["curve"], judged(name, done["model"]), done["model"]

    def best_of_n() -> str:
        sampled = run(
            "rejection",
            "best_of_n",
            model=start,
            prompts=prompts,
            reward_model=proxy,
            config=config.best_of_n,
            **reward_inputs(source, config, config.best_of_n.rewards, start),
        )
        return run(
            "overoptimisation",
            "curve_best_of_n",
            candidates=sampled["candidates"],
            reward_model=proxy,
            gold=gold,
            config=config.curve,
        )["curve"]

    before, *found, selected = run.together(
        [
            lambda: judged("start", start),
            *(lambda name=name, arm=arm: trained(name, arm) for name, arm in arms.items()),
            best_of_n,
        ]
    )
    curves, evaluations, ends = ({name: one[i] for name, one in zip(arms, found)} for i in range(3))
    curves["best_of_n"] = selected
    outcome = run("overoptimisation_arms", "arms", curves=curves, evaluations=evaluations, start=before)
    scores = [
        {
            "arm": name,
            **{
                what: round(outcome.metrics[key], 4)
                for what in ("proxy", "gold", "accuracy", "kl", "length")
                if (key := f"{name}/held_out/{what}") in outcome.metrics
            },
        }
        for name in ("start", *arms)
    ]
    return {
        "scores": scores if outcome.metrics else [],
        "models": {"start": start, "proxy": proxy, "gold": gold, **ends},
        "results": outcome["results"],
        "diverged": [name for name in arms if outcome.metrics.get(f"{name}/diverged")],
    }
