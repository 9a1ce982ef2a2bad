"""preference: from a file of preferences and a model to a reward model, a DPO-tuned policy and a report.

    posttrain run preference --set data.path=pairs.jsonl --set model=path/or/hub-id

`data.path` may hold preference pairs in any of the usual forms (chosen and rejected, HH dialogues, ratings, rankings,
judgements with soft labels). Optionally the chosen answers are learned first (`sft_first=true`), as DPO assumes.
"""

from __future__ import annotations

from typing import Optional

from pydantic import Field

from flows.recipe import Outputs, RecipeConfig, Run, recipe
from flows.steps import HELD_OUT, evaluate_all, ingest
from stages.align import Config as AlignConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.reward_model import Config as RewardModelConfig
from stages.sft import Config as SFTConfig
from stages.spec import StageConfig


class Data(StageConfig):
    path: str = Field(description="Preference data: a file, directory, dataset ref or hub id.")
    prompts: Optional[str] = Field(None, title="Prompts", description="Held-out prompts for the evaluation; empty: those of the test pairs.")


class Config(RecipeConfig):
    model: str = Field(description="The policy to improve: a ref, a model directory or a hub id.")
    data: Data = Field(description="The preference data.")
    reward_backbone: Optional[str] = Field(None, title="Reward backbone", description="Model the reward model starts from; empty: the policy.")
    sft_first: bool = Field(False, description="Fine-tune on the chosen answers before DPO.")
    ingest_pairs: IngestConfig = Field(IngestConfig(kind="pairs/1", **HELD_OUT), description="Checks and splits of the pairs.")
    ingest_chosen: IngestConfig = Field(IngestConfig(kind="demonstrations/1", **HELD_OUT), description="The chosen answers as demonstrations (sft_first).")
    ingest_prompts: IngestConfig = Field(IngestConfig(kind="prompts/1", **HELD_OUT), description="The prompts of the evaluation.")
    sft: SFTConfig = Field(SFTConfig(), description="Fine-tuning on the chosen answers (sft_first).")
    reward_model: RewardModelConfig = Field(RewardModelConfig(), description="Reward model from the pairs.")
    dpo: AlignConfig = Field(AlignConfig(), description="Direct preference optimisation.")
    evaluate_reward: EvaluateConfig = Field(EvaluateConfig(target="reward_model"), description="Judgement of the reward model on held-out pairs.")
    evaluate: EvaluateConfig = Field(EvaluateConfig(num_samples=1), description="Evaluation of the policies, before and after.")


@recipe(Config)
def preference(run: Run, config: Config) -> dict:
    """From preference data and a model to a reward model, a DPO-tuned policy and an evaluation report."""
    pairs = ingest(run, "pairs", config.data.path, config)
    prompts = ingest(run, "prompts", config.data.prompts or config.data.path, config)

    start = config.model
    if config.sft_first:
        chosen = ingest(run, "chosen", config.data.path, config)
        start = run("sft", model=config.model, data=chosen, config=config.sft, name_as="sft")["model"]

    def judge_model() -> tuple[str, Outputs]:
        judge = run("reward_model", model=config.reward_backbone or start, data=pairs, config=config.reward_model, name_as="reward")["model"]
        return judge, run("evaluate", "evaluate_reward", model=judge, pairs=pairs, config=config.evaluate_reward)

    def policy() -> str:
        return run("align", "dpo", model=start, data=pairs, config=config.dpo, name_as="dpo")["model"]

    (judge, judged), aligned = run.together([judge_model, policy])

    policies = {"start": config.model, **({"sft": start} if config.sft_first else {}), "dpo": aligned}
    evaluations = evaluate_all(run, policies, config.evaluate, prompts=prompts, pairs=pairs, reward_model=judge, reference=start)
    return {"models": {**policies, "reward": judge}, "scores": evaluations.table(),
            "reward_model": {key: judged.metrics[key] for key in ("accuracy", "accuracy_low", "accuracy_high", "ece") if key in judged.metrics}}
