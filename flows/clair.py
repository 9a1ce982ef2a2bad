"""clair: minimally contrasting pairs from revisions, and direct alignment on them (CLAIR and APO, ``recipe.clair_apo``;
D'Oosterlinck et al. 2024).

    posttrain run clair --set model=path/or/ref --set data.prompts=prompts.jsonl --set
    revise.endpoint=http://localhost:8000/v1 --set revise.endpoint_model=NAME posttrain run clair ... --set
    judge=path/or/ref --set baseline=true --set arms='{dpo: {method: dpo}, kto: {method: kto}}'

The model answers the prompts, a stronger one makes the smallest changes that improve each answer, and the policy is
aligned on (revision over answer). With a `judge` (or check.endpoint) only pairs whose revision wins are trained on
(`keep=all`: all of them), and how often it wins says which loss fits: apo_zero where the revisions are better than what
the model writes, apo_down where they are not (`method=` sets it). `baseline` aligns on pairs of the model's own answers
that the judge labelled, on the same prompts. Steps: `revise`, `check`, `align`, `align_ARM`; `answers`, `judged`,
`align_judged`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Optional

from pydantic import Field, model_validator

from flows.config import build, merge
from flows.recipe import Outputs, RecipeConfig, Run, recipe
from flows.steps import HELD_OUT, compared, evaluate_all, ingest, judge_of
from stages.ai_labels import Config as JudgeConfig
from stages.align import Config as AlignConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.rejection import Config as RejectionConfig
from stages.revise import Config as ReviseConfig
from stages.reward.components import RewardComponent
from stages.spec import StageConfig
from stages.win_rate import Config as WinRateConfig


class Data(StageConfig):
    prompts: str = Field(description="Prompts that the model answers: ref, file, directory or hub id.")
    principles: Optional[str] = Field(
        None,
        title="Principles",
        description="Improve by these instead of on no one aspect: a file with one per line, or a ref.",
    )


class Config(RecipeConfig):
    NOT_READ: ClassVar = {"align.method": "the loss is chosen by how often revisions win; write method"}
    model: str = Field(
        description="The policy to improve, normally an instruction-tuned model: a ref, a model directory or a hub id."
    )
    data: Data = Field(description="The prompts.")
    reviser: Optional[str] = Field(
        None,
        title="Reviser",
        description="A stronger model that revises (or revise.endpoint); empty: the policy itself.",
    )
    judge: Optional[str] = Field(
        None,
        title="Judge",
        description="Model that checks whether revisions win (or check.endpoint); empty: nobody does.",
    )
    keep: Literal["won", "all"] = Field("won", description="With a judge: pairs whose revision wins, or all.")
    method: Literal["auto", "apo_zero", "apo_down", "dpo", "kto"] = Field(
        "auto",
        description=(
            "Loss: auto = apo_zero where revisions are better than the model's answers, else apo_down; "
            "without a judge they are taken to be."
        ),
    )
    arms: dict[str, dict[str, Any]] = Field(
        {}, description="Further alignments on the same pairs: name -> settings in which one differs from `align`."
    )
    baseline: bool = Field(
        False, description="Also align on judged pairs of the model's own answers (needs the judge)."
    )
    ingest_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **HELD_OUT), description="Checks and splits of the prompts."
    )
    revise: ReviseConfig = Field(
        ReviseConfig(template="minimal", n_rounds=1, direct_revision=True, validation_fraction=0.05),
        description="Answers and their minimal revisions.",
    )
    check: JudgeConfig = Field(
        JudgeConfig(labels="hard", disagreement="drop"),
        description="The judge's comparison of revision and answer, in both orders.",
    )
    answers: RejectionConfig = Field(
        RejectionConfig(
            num_generations=2,
            max_completion_length=512,
            select="random_per_prompt",
            allow_empty=True,
            rewards=[RewardComponent(name="complete", kind="truncation")],
        ),
        description="baseline: two answers of the model to each prompt.",
    )
    judged: JudgeConfig = Field(
        JudgeConfig(labels="hard", validation_fraction=0.05), description="baseline: the judge's choice between them."
    )
    align: AlignConfig = Field(AlignConfig(), description="Direct alignment of every arm.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(num_samples=1, rewards=[RewardComponent(name="verifier", kind="verifier", on_missing="skip")]),
        description="Evaluation of the start and every arm.",
    )
    win_rate: WinRateConfig = Field(
        WinRateConfig(baseline="start"), description="With a judge: win rate of every arm against the start."
    )

    @model_validator(mode="after")
    def _arms(self):
        if self.baseline and not self.judged_by:
            raise ValueError(
                "baseline labels pairs of the model's own answers, which needs somebody who judges; write judge=MODEL,"
                " or check.endpoint and check.endpoint_model"
            )
        for name, settings in self.arms.items():
            if name in ("start", "clair", "judged"):
                raise ValueError(f"arms: {name!r} is the name of a model of every run; give the arm another one")
            arm_of(self, settings)
        return self

    @property
    def judged_by(self) -> bool:
        return self.judge is not None or bool(self.check.endpoint)


def arm_of(config: Config, settings: dict[str, Any]) -> AlignConfig:
    """The alignment settings of an arm."""
    return build(AlignConfig, merge(config.align.model_dump(mode="json", exclude_unset=True), settings))


def chosen_method(config: Config, checked: Outputs | None) -> dict[str, Any]:
    """{method, won, why}: the loss, how often the revision won (None where nobody compared), and why it fits."""
    won = checked.metrics.get("agreement_no_ties") if checked is not None else None
    if config.method != "auto":
        return {"method": config.method, "won": won, "why": "given"}
    if checked is None:
        return {
            "method": "apo_zero",
            "won": None,
            "why": (
                "nobody compared revisions and answers, so the reviser's are taken to be better; give a judge to"
                " measure it"
            ),
        }
    if config.keep == "won":
        return {"method": "apo_zero", "won": won, "why": "only pairs whose revision won are trained on"}
    if won is None or won > 0.5:
        return {"method": "apo_zero", "won": won, "why": "revisions win more often than they lose"}
    return {
        "method": "apo_down",
        "won": won,
        "why": (
            "revisions win as often as they lose"
            if won == 0.5
            else "the model's own answers win more often than their revisions"
        ),
    }


@recipe(Config)
def clair(run: Run, config: Config) -> dict:
    """CLAIR and APO: on-policy answers, minimal revisions by a stronger model, direct alignment with the loss that
    fits.
    """
    prompts = ingest(run, "prompts", config.data.prompts, config)
    principles = (
        run(
            "ingest",
            "ingest_principles",
            data=config.data.principles,
            config=IngestConfig(kind="principles/1"),
            name_as="principles",
        )["data"]
        if config.data.principles
        else None
    )
    asked, _ = judge_of(config.judge, config.check)
    own = None
    if config.baseline:
        answers = run("rejection", "answers", model=config.model, prompts=prompts, config=config.answers)["candidates"]
        judge, section = judge_of(config.judge, config.judged, config.check)
        own = run("judge", "judged", data=answers, judge=judge, config=section, name_as="judged-pairs")["data"]

    revised = run(
        "revise",
        model=config.model,
        prompts=prompts,
        reviser=config.reviser,
        principles=principles,
        compare={"judged": own} if own else None,
        config=config.revise,
    )
    checked = (
        run("judge", "check", data=revised["pairs"], judge=asked, config=config.check, name_as="clair-pairs")
        if config.judged_by
        else None
    )
    pairs = checked["data"] if checked is not None and config.keep == "won" else revised["pairs"]
    choice = chosen_method(config, checked)

    def align(label: str, data: str, settings: dict[str, Any]) -> str:
        name = "clair" if label == "align" else f"clair-{label.removeprefix('align_')}"
        return run("align", label, model=config.model, data=data, config=arm_of(config, settings), name_as=name)[
            "model"
        ]

    loss = {"method": choice["method"]}
    trained = {
        "clair": lambda: align("align", pairs, loss),
        **{
            name: lambda name=name, settings=settings: align(f"align_{name}", pairs, loss | settings)
            for name, settings in config.arms.items()
        },
    }
    if own:
        trained["judged"] = lambda: align("align_judged", own, loss)
    models = {"start": config.model, **dict(zip(trained, run.together(list(trained.values()))))}
    evaluations = evaluate_all(run, models, config.evaluate, prompts=prompts, reference=config.model)
    result = {"models": models, "scores": evaluations.table(), "choice": choice}
    if config.judged_by:
        judge, section = judge_of(config.judge, config.win_rate, config.check)
        result["win_rates"] = compared(
            run, {name: outputs["samples"] for name, outputs in evaluations.items()}, judge, section, prompts=prompts
        )
    shown = ("answers", "kept", "jaccard", "levenshtein_normalised", "jaccard/judged", "levenshtein_normalised/judged")
    return {**result, "revisions": {name: revised.metrics[name] for name in shown if name in revised.metrics}}
