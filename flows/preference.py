"""preference: from a file of preferences and a model to a reward model, a DPO-tuned policy and a report.

    posttrain run preference --set data.path=pairs.jsonl --set model=path/or/hub-id
    posttrain run preference --preset zephyr --set model=BASE --set data.demonstrations=ultrachat.jsonl --set data.path=ultrafeedback.jsonl     # SFT, then DPO

`data.path` may hold preference pairs in any of the usual forms (chosen and rejected, HH dialogues, ratings, rankings,
judgements with soft labels). Optionally demonstrations, or the chosen answers, are learned first (`sft_first=true`), as
DPO assumes; `watch_pairs=true` logs what that does to held-out pairs. Without a model, a small one is trained on the embedded world's text and demonstrations.
"""

from __future__ import annotations

from typing import Optional

from pydantic import Field, model_validator

from flows.recipe import Outputs, Run, recipe
from flows.start import WorldRecipeConfig, small_base_model
from flows.steps import HELD_OUT, Source, evaluate_all, ingest
from stages.align import Config as AlignConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.reward_model import Config as RewardModelConfig
from stages.sft import Config as SFTConfig
from stages.spec import StageConfig


class Data(StageConfig):
    path: Optional[str] = Field(
        None,
        title="Path",
        description=(
            "Preference data: a file, directory, dataset ref or hub id; empty: the embedded world's comparisons."
        ),
    )
    demonstrations: Optional[str] = Field(
        None,
        title="Demonstrations",
        description=(
            "What is learned first (sft_first): a file, directory, dataset ref or hub id; empty: the chosen answers."
        ),
    )
    prompts: Optional[str] = Field(
        None, title="Prompts", description="Held-out prompts for the evaluation; empty: those of the test pairs."
    )
    text: Optional[str] = Field(
        None, title="Text", description="Plain text to pre-train a small model on, where no model is given."
    )

    @property
    def pairs(self) -> Optional[str]:
        return self.path


class Config(WorldRecipeConfig):
    model: Optional[str] = Field(
        None,
        title="Model",
        description="The policy to improve: a ref, a model directory or a hub id; empty: a small one is trained here.",
    )
    data: Data = Field(Data(), description="The preference data.")
    reward_backbone: Optional[str] = Field(
        None, title="Reward backbone", description="Model the reward model starts from; empty: the policy."
    )
    sft_first: bool = Field(
        False,
        description=(
            "Fine-tune on data.demonstrations, else on the chosen answers, before DPO; a small model that is trained"
            " here always is."
        ),
    )
    watch_pairs: bool = Field(
        False,
        description=(
            "Validation passes of that fine-tuning also log the likelihood of held-out chosen and rejected answers: what"
            " is learned of chosen answers raises that of rejected ones, too (eval.displacement). The pairs need a"
            " validation split."
        ),
    )
    with_reward_model: bool = Field(
        True,
        description="Also train a reward model on the pairs, which judges the policies; false: DPO alone (Zephyr).",
    )
    ingest_chosen: IngestConfig = Field(
        IngestConfig(kind="demonstrations/1", **HELD_OUT),
        description="The chosen answers as demonstrations (sft_first).",
    )
    sft: SFTConfig = Field(SFTConfig(), description="Fine-tuning on demonstrations or the chosen answers (sft_first).")
    reward_model: RewardModelConfig = Field(RewardModelConfig(), description="Reward model from the pairs.")
    dpo: AlignConfig = Field(AlignConfig(), description="Direct preference optimisation.")
    evaluate_reward: EvaluateConfig = Field(
        EvaluateConfig(target="reward_model"), description="Judgement of the reward model on held-out pairs."
    )
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(num_samples=1), description="Evaluation of the policies, before and after."
    )

    @model_validator(mode="after")
    def _belongs_together(self):
        if self.data.path and self.model is None:
            raise ValueError(
                "data.path holds pairs of your own, so the policy is yours, too; write model=path/or/hub-id, or leave"
                " both out for the embedded world"
            )
        if self.watch_pairs and self.model is not None and not self.sft_first:
            raise ValueError(
                "watch_pairs is about the fine-tuning before DPO, and there is none; write sft_first=true, or leave it out"
            )
        if self.data.demonstrations and self.model is not None and not self.sft_first:
            raise ValueError(
                "data.demonstrations would not be read; write sft_first=true to fine-tune on them before DPO, or leave"
                " them out"
            )
        return self


@recipe(Config)
def preference(run: Run, config: Config) -> dict:
    """From preference data and a model to a reward model, a DPO-tuned policy and an evaluation report."""
    source = Source(run, config)
    pairs = ingest(run, "pairs", source("pairs"), config)
    prompts = ingest(run, "prompts", config.data.prompts or config.data.path or source("prompts"), config)

    base = start = config.model
    if config.sft_first or base is None:
        if base is None or config.data.demonstrations or config.data.path is None:
            chosen = ingest(run, "demonstrations", source("demonstrations"), config)
        else:
            chosen = ingest(run, "chosen", config.data.path, config)
        base = small_base_model(run, source, config, chosen) if base is None else base
        watched = pairs if config.watch_pairs else None
        start = run("sft", model=base, data=chosen, pairs=watched, config=config.sft, name_as="sft")["model"]

    def judge_model() -> tuple[str, Outputs]:
        judge = run(
            "reward_model",
            model=config.reward_backbone or start,
            data=pairs,
            config=config.reward_model,
            name_as="reward",
        )["model"]
        return judge, run("evaluate", "evaluate_reward", model=judge, pairs=pairs, config=config.evaluate_reward)

    def policy() -> str:
        return run("align", "dpo", model=start, data=pairs, config=config.dpo, name_as="dpo")["model"]

    if config.with_reward_model:
        (judge, judged), aligned = run.together([judge_model, policy])
    else:
        judge, judged, aligned = None, None, policy()

    policies = {"start": base, **({"sft": start} if start != base else {}), "dpo": aligned}
    evaluations = evaluate_all(
        run, policies, config.evaluate, prompts=prompts, pairs=pairs, reward_model=judge, reference=start
    )
    if judged is None:
        return {"models": policies, "scores": evaluations.table()}
    return {
        "models": {**policies, "reward": judge},
        "scores": evaluations.table(),
        "reward_model": {
            key: judged.metrics[key]
            for key in ("accuracy", "accuracy_low", "accuracy_high", "ece")
            if key in judged.metrics
        },
    }
