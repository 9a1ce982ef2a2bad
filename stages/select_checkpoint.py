"""select_checkpoint: which of several checkpoints is the best one, by what its answers are worth (``sft.ckpt_select``).

    posttrain stage select_checkpoint --input candidates.1=REF --input candidates.2=REF --input data=DEMONSTRATIONS
    --input prompts=PROMPTS --input reward_model=MODEL
    posttrain select KEY --input reward_model=MODEL --name sft --alias selected    # the epochs of a stage, and the registry

The validation loss of fine-tuning overfits after about one epoch while reward and human preference still rise
(InstructGPT), so candidates are not chosen by it where there is anything better: ``rm_score``, the mean score by the
input reward_model of their answers to held-out prompts (cut and empty ones by the rule of ``rl`` and ``rejection``);
``win_rate``, how often their answers are better than those in ``data`` or than a candidate's, by the input judge, an
endpoint or else the reward_model (stage ``win_rate``); ``metric:NAME``, any metric of stage ``evaluate`` with a value
per prompt; or ``val_loss``, the mean NLL of the validation rows of ``data``, which is in the table whatever decides.
Answers are those that stage ``evaluate`` gives with these settings and this seed. Of equal candidates the earliest is
chosen, in the order of their labels; candidates are compared on the prompts on which all of them have a value, and one
that has none anywhere, or one that is not finite, is never chosen. The chosen model is published byte for byte.

Candidates that are reward models answer nothing: they are judged by the rows of ``data`` in the split, as stage
``reward_model`` judges the one that it trained (``rm.eval``), and ``metric:NAME`` of these decides, by default accuracy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, Optional

from pydantic import Field, model_validator

from stages.evaluate import Config as EvaluateConfig
from stages.evaluation.given import GivenConfig
from stages.reward.components import CUT_REWARD, RewardComponent
from stages.reward.judging import JUDGE_INPUTS
from stages.reward_models.reward_objectives import KINDS
from stages.spec import ConfigError, InputSpec, OutputSpec, StageConfig, StageSpec
from stages.win_rate import Config as WinRateConfig

METRIC = "metric:"
REFERENCES = "references"
#: Share of answers that end by themselves below which their scores say little (as in stage sft).
ENDED = 0.9
#: Pairs on which reward models are probed where a probe decides (as in stage reward_model).
PROBED = 64


class Config(StageConfig):
    select_on: Optional[str] = Field(
        None,
        title="Select on",
        description=(
            "What decides: rm_score, win_rate, val_loss, or metric:NAME of stage evaluate, such as metric:accuracy or"
            " metric:reward/NAME. Empty: rm_score where a reward_model is given, else val_loss. Of reward models:"
            " metric:NAME of stage reward_model, such as metric:accuracy (the default), metric:log_loss or metric:ece."
        ),
    )
    baseline: str = Field(
        REFERENCES,
        description=(
            "win_rate: what answers are compared with: references, the answers in data to the same prompts, or the label"
            " of a candidate, whose own win rate is 0.5."
        ),
    )
    split: str = Field(
        "validation",
        description=(
            "Split of data whose loss is measured, whose answers are references, and prompts without prompts; whose rows"
            " judge reward models."
        ),
    )
    eval_rows: int = Field(512, ge=1, description="Rows of data for val_loss, or to judge reward models by, at most.")
    train_on: Literal["all_assistant", "final_turn", "final_message", "full"] = Field(
        "all_assistant", description="Tokens whose loss counts, as in the stage that trained the candidates (sft.mask)."
    )
    max_length: int = Field(1024, ge=8, description="Tokens per row of data, as in the stage that trained.")
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Tokens per forward of val_loss; bounds memory.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(split="validation", num_samples=0),
        description=(
            "How candidates answer and what grades the answers, as in stage evaluate; greedy by default. Without the"
            " input prompts, limit counts prompts of data."
        ),
    )
    win_rate: WinRateConfig = Field(WinRateConfig(), description="How the judge is asked, as in stage win_rate.")

    @model_validator(mode="before")
    @classmethod
    def _sections_keep_defaults(cls, values: Any) -> Any:
        given = values.get("evaluate") if isinstance(values, dict) else None
        if not isinstance(given, dict):
            return values
        return {**values, "evaluate": {**cls.model_fields["evaluate"].default.model_dump(exclude_unset=True), **given}}

    @model_validator(mode="after")
    def _possible(self):
        on = self.select_on
        if on not in (None, "rm_score", "win_rate", "val_loss") and not (on.startswith(METRIC) and on != METRIC):
            raise ValueError(
                f"select_on={on}: write rm_score, win_rate, val_loss, or metric:NAME with a metric of stage evaluate,"
                " for example metric:accuracy"
            )
        if on != "win_rate" and self.baseline != REFERENCES:
            raise ValueError(
                f"baseline={self.baseline} would change nothing: only win_rate compares answers; write"
                " select_on=win_rate, or leave baseline out"
            )
        if on != "win_rate" and self.win_rate != WinRateConfig():
            raise ValueError(
                "win_rate.* would change nothing: nobody is asked which answer is better; write select_on=win_rate, or"
                " leave these settings out"
            )
        ours = ("baseline", "answers", "max_samples", "split", "limit")
        if taken := [name for name in ours if getattr(self.win_rate, name) != WinRateConfig.model_fields[name].default]:
            raise ValueError(
                f"win_rate.{taken[0]} is not read here; write baseline and evaluate.* instead, and leave it out"
            )
        for name, why in (
            ("target", "candidates are policies"),
            ("mt_bench", "questions of several turns have no answer that a reward model could score"),
            ("token_shift", "there is no base model to rank tokens under"),
            ("refusal_judge", "nobody classifies refusals here"),
            *((name, "candidates answer by themselves") for name in GivenConfig.model_fields),
        ):
            if getattr(self.evaluate, name) != EvaluateConfig.model_fields[name].default:
                raise ValueError(f"evaluate.{name} is not read by a selection: {why}; leave it out")
        if self.evaluate.engine != "builtin":
            raise ValueError(
                f"evaluate.engine={self.evaluate.engine} keeps one model, and every candidate answers in turn; write"
                " evaluate.engine=builtin"
            )
        return self

    def decides(self, names) -> str:
        """What decides, with these inputs."""
        return self.select_on or ("rm_score" if "reward_model" in names else "val_loss")


def as_trained(config: Config, trained: Mapping[str, Any]) -> Config:
    """The settings with what the stage that trained the candidates had (``max_length``, ``train_on``,
    ``chat_template_kwargs``), where they are left at their defaults.
    """
    fields = Config.model_fields
    own = {
        name: trained[name]
        for name in ("max_length", "train_on")
        if name in trained and getattr(config, name) == fields[name].default
    }
    shown = trained.get("chat_template_kwargs")
    if shown and not config.evaluate.chat_template_kwargs:
        own["evaluate"] = config.evaluate.model_copy(update={"chat_template_kwargs": shown})
    return config.model_copy(update=own)


def answered(config: Config, names) -> bool:
    """Whether candidates answer prompts at all."""
    return config.decides(names) != "val_loss" or bool({"prompts", "reward_model"} & set(names))


def check(config: Config, names: list[str]) -> None:
    """Refuse a selection that lacks what decides, and what nothing would read."""
    labels, on = [name.partition(".")[2] for name in names if name.split(".")[0] == "candidates"], config.decides(names)
    if "" in labels:
        raise ConfigError(
            "select_checkpoint: every candidate has a label, by which they are ordered; write --input candidates.1=REF"
            " --input candidates.2=REF"
        )
    judged = "judge" in names or bool(config.win_rate.endpoint)
    if on == "rm_score" and "reward_model" not in names:
        raise ConfigError(
            "select_checkpoint: select_on=rm_score needs --input reward_model=MODEL; give it, or write"
            " select_on=val_loss"
        )
    if on == "win_rate" and not judged and "reward_model" not in names:
        raise ConfigError(
            "select_checkpoint: select_on=win_rate needs somebody who compares answers; give --input judge=MODEL,"
            " win_rate.endpoint=URL or --input reward_model=MODEL"
        )
    asks = any(one.kind in ("judge", "debate") and not one.endpoint for one in config.evaluate.rewards)
    for name, read in (
        ("judge", on == "win_rate" and not config.win_rate.endpoint or asks),
        ("principles", on == "win_rate" and judged),
        ("judgements", on == "win_rate" and judged),
    ):
        if name == "judge" and name in names and on == "win_rate" and not read:
            raise ConfigError(
                "select_checkpoint: the judge at win_rate.endpoint is asked, and the input judge is not; leave one of the"
                " two out"
            )
        if name in names and not read:
            raise ConfigError(
                f"select_checkpoint: the input {name} would change nothing with select_on={on}; write"
                " select_on=win_rate, or leave the input out"
            )
    usual = Config.model_fields["evaluate"].default
    # by which val_loss reads its rows, too
    shown = {name: getattr(usual, name) for name in ("chat_template", "chat_template_digest", "chat_template_kwargs")}
    if not answered(config, names) and config.evaluate.model_copy(update=shown) != usual:
        raise ConfigError(
            "select_checkpoint: evaluate.* would change nothing: with select_on=val_loss nobody answers; give --input"
            " prompts=PROMPTS or reward_model=MODEL, or leave these settings out"
        )


SPEC = StageSpec(
    name="select_checkpoint",
    config=Config,
    gpu=True,
    check=check,
    inputs={
        "candidates": InputSpec(
            "model",
            many=True,
            doc="The checkpoints, as candidates.EPOCH, policies or reward models; labels are their order.",
        ),
        "data": InputSpec(
            "dataset",
            kinds=("demonstrations/1", "text/1", *KINDS),
            held_out=True,
            doc=(
                "What they were fine-tuned on: its validation rows give val_loss, references, and prompts, or judge reward"
                " models."
            ),
        ),
        "prompts": InputSpec(
            "dataset",
            kinds=("prompts/1",),
            required=False,
            held_out=True,
            doc="Held-out prompts that candidates answer; default: those of the validation rows of data.",
        ),
        "reward_model": InputSpec("model", required=False, use="scores", doc="Scores the answers (rm_score)."),
        **JUDGE_INPUTS,
    },
    outputs={
        "model": OutputSpec("model", role="policy", doc="The chosen candidate, as it is."),
        "decision": OutputSpec("dataset", doc="eval_scores/1: every candidate's scores, and which one was chosen."),
        "samples": OutputSpec("dataset", required=False, doc="eval_samples/1: every candidate's answers."),
        "judgements": OutputSpec("dataset", required=False, doc="judgements/1: what decided win_rate."),
    },
)


def in_order(labels) -> list[str]:
    """Labels as epochs count: 2 before 10."""

    def key(label: str):
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in label.split(".")]

    return sorted(labels, key=key)


def choose(values: Mapping[str, float], less: bool = False) -> str | None:
    """The candidate with the best value: the earliest of equal ones, never one that is not finite; None where all are
    so.

    Args:
        values: candidate -> value, in order. less: whether less is better.
    """
    from stages.selection import is_better

    best = None
    for label, value in values.items():
        value = -value if less else value
        if is_better(value, -math.inf if best is None else best[1]):
            best = label, value
    return None if best is None else best[0]


class Seen:
    """A stage as another one's code sees it: that one's name and settings, and inputs of its own."""

    def __init__(self, stage, name: str, config, inputs: dict, done: int = 0, state: dict | None = None):
        self._stage, self.name, self.config, self.inputs = stage, name, config, inputs
        self._done, self._state = done, state or {}

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def has(self, name: str) -> bool:
        return name in self.inputs

    def path(self, name: str) -> str:
        return self.inputs[name].path if name in self.inputs else self._stage.path(name)

    def dataset(self, name: str):
        from storage.datasets import open_dataset

        return open_dataset(self.path(name))

    def rng(self, purpose: str, *counters):
        from stages.running import randomness

        return randomness.rng(self._stage.seed, self.name, purpose, *counters)

    def seed_for(self, purpose: str, *counters) -> int:
        from stages.running import randomness

        return randomness.seed_for(self._stage.seed, self.name, purpose, *counters)

    @property
    def units_done(self) -> int:
        """Units of its own behind those that the stage did before."""
        return max(0, self._stage.units_done - self._done)

    def save_checkpoint(self, step: int, state: dict, files=None) -> None:
        self._stage.save_checkpoint(self._done + step, {**self._state, **state}, files)


def run(stage):
    config, labels = stage.config, in_order(stage.many("candidates"))
    if are_reward_models(stage, labels):
        return select_reward_model(stage, labels)
    if stage.dataset("data").kind in KINDS:
        raise ConfigError(
            f"select_checkpoint: the candidates are policies, whose loss and answers are not those of"
            f" {stage.dataset('data').kind}; give --input data=DEMONSTRATIONS"
        )
    on = config.decides(stage.inputs)
    check_metric(config, on)
    if config.baseline not in (REFERENCES, *labels):
        raise ConfigError(
            f"select_checkpoint: baseline={config.baseline} is no candidate; write references, or one of"
            f" {', '.join(labels)}"
        )
    asked = answered(config, stage.inputs)
    questions = Questions(stage) if asked else None
    plans = {label: questions.plan(label) for label in labels} if asked else {}
    if asked:
        from stages.evaluation.protocol import require_same

        require_same({label: plan.protocol for label, plan in plans.items()})
    units = [
        (label, kind, part)
        for label in labels
        for kind, part in [("loss", None), *(plans[label].units() if asked else ())]
    ]
    checkpoint = stage.checkpoints.latest()
    done, losses = (checkpoint.step, dict(checkpoint.state["losses"])) if checkpoint else (0, {})
    # behind the last of these units the samples are closed, and are not opened again
    writer = stage.writer("samples", "eval_samples/1") if asked and done < len(units) else None
    loaded = None
    for index in range(done, len(units)):
        label, kind, part = units[index]
        if loaded is None or loaded.label != label:
            if loaded is not None:
                loaded.release()  # before the next one takes its memory
            loaded = Candidate(stage, label, plans.get(label), questions)
        if kind == "loss":
            losses[label] = loaded.loss()
        else:
            writer.write(loaded.answers(kind, part))
            writer.flush()
        if index + 1 == len(units):
            loaded.release()
            if writer is not None:
                writer.close({"candidates": len(labels), "prompts": questions.count})
        stage.save_checkpoint(index + 1, {"losses": losses})
        stage.progress(index + 1, len(units), f"candidate {label}")
    records = records_by_candidate(stage, labels) if asked else {}
    if questions is not None:
        questions.forget()
    opinions = compared(stage, labels, records, questions, len(units), {"losses": losses}) if on == "win_rate" else None
    conclude(stage, labels, on, losses, records, opinions, questions)


def are_reward_models(stage, labels) -> bool:
    """Whether the candidates are reward models. Raises ConfigError where some are, or something is given that reads
    answers.
    """
    from stages.reward_models.candidates import is_reward_model

    found = {label: is_reward_model(stage.path(f"candidates.{label}")) for label in labels}
    if not any(found.values()):
        return False
    if not all(found.values()):
        one, other = (next(label for label, is_one in found.items() if is_one is kind) for kind in (True, False))
        raise ConfigError(
            f"select_checkpoint: candidate {one} is a reward model and {other} a policy, which no number compares; give"
            " candidates of one kind"
        )
    why = "the candidates are reward models, which are judged by the rows of data"
    for name in ("prompts", *JUDGE_INPUTS, "reward_model"):
        if stage.has(name):
            raise ConfigError(f"select_checkpoint: the input {name} would change nothing: {why}; leave it out")
    for name in ("baseline", "train_on", "max_length", "evaluate", "win_rate"):
        if getattr(stage.config, name) != Config.model_fields[name].default:
            raise ConfigError(f"select_checkpoint: {name} would change nothing: {why}; leave it out")
    on = stage.config.select_on
    if on is not None and not on.startswith(METRIC):
        raise ConfigError(
            f"select_checkpoint: select_on={on} is of policies, and {why}; write select_on=metric:accuracy, or another"
            " metric of stage reward_model"
        )
    return True


def select_reward_model(stage, labels) -> None:
    """Choose among reward models by what held-out rows say of them."""
    from stages.evaluation.scores import Metric
    from stages.reward_models import candidates
    from stages.reward_models.reward_eval import count_of

    asked = (stage.config.select_on or "").removeprefix(METRIC)
    if asked:
        candidates.check_metric(asked)
    probes = PROBED if asked.startswith(candidates.LESS_OF) else 0
    scores: dict[str, dict] = {}
    for label, values in candidates.measured(stage, labels, probes).items():
        for name in sorted(filter(candidates.decides, values)):
            low, high = (values.get(f"{name}_ci_{end}") for end in ("low", "high"))
            scores.setdefault(name, {})[label] = Metric(values[name], count_of(values), low=low, high=high)
    by = asked or next((name for name in (*candidates.MORE, *candidates.LESS) if name in scores), "")
    if by not in scores:
        raise ConfigError(
            f"select_checkpoint: these rows give no {asked or 'metric'} of a reward model; write select_on=metric:NAME"
            f" with one of {', '.join(scores) or 'another dataset'}"
        )
    decide(stage, labels, f"{METRIC}{by}", scores, candidates.less_is_better(by), role="reward")


def check_metric(config: Config, on: str) -> None:
    """Refuse a ``metric:NAME`` that no answer will have."""
    name = on.removeprefix(METRIC)
    if not on.startswith(METRIC):
        return
    per_prompt([], name)
    components = [one.name for one in config.evaluate.rewards] + ["reward_model"]
    if name.startswith("reward/") and name.removeprefix("reward/") not in components:
        raise ConfigError(
            f"select_checkpoint: select_on={on} names no component of evaluate.rewards; write one of"
            f" {', '.join(f'{METRIC}reward/{one}' for one in components)}"
        )


class Questions:
    """What candidates are asked, and what grades their answers: the same for all of them."""

    def __init__(self, stage):
        from stages.harness import Input

        self.stage, config = stage, stage.config
        names = [name for name in ("prompts", "reward_model", "judge") if stage.has(name)]
        self.inputs = {name: stage.inputs[name] for name in names}
        self.evaluate, self.scorer, self.count, self._rewards = config.evaluate, None, 0, None
        if "prompts" not in self.inputs:
            path = prompts_of(stage)
            self.inputs["prompts"] = Input("prompts", "dataset", path, "", self._digest(path))
            self.evaluate = self.evaluate.model_copy(update={"split": config.split})
        # as the judge of win rates it may be one that compares answers, which scores none by itself
        if stage.has("reward_model") and (config.decides(stage.inputs) != "win_rate" or judged(stage)):
            known = next((one for one in self.evaluate.rewards if one.kind == "model"), None)
            added = known or RewardComponent(name="reward_model", kind="model")
            self.scorer = added.name
            self.evaluate = self.evaluate.model_copy(
                update={"rewards": [*self.evaluate.rewards, *([] if known else [added])]}
            )

    def _digest(self, path: str) -> str:
        from storage.datasets import open_dataset

        return open_dataset(path).digest

    def plan(self, label: str):
        """The evaluation of one candidate."""
        from stages.evaluation.plan import Plan

        stage = self.stage
        model = stage.inputs[f"candidates.{label}"]
        # the component scores the answers, so that evaluate is not given the reward model a second time
        inputs = {name: one for name, one in self.inputs.items() if name != "reward_model"}
        plan = Plan(Seen(stage, "evaluate", self.evaluate, {**inputs, "model": model}))
        plan.run_id, self.count = f"{stage.key[:16]}:{label}", plan.n_prompts
        return plan

    def rewards(self, renderer):
        """The graders, loaded once. Raises ConfigError for a reward model that cannot score one answer."""
        from stages.reward.rewards import build_rewards

        if self._rewards is None:
            found = build_rewards(self.evaluate.rewards, self.inputs, renderer=renderer, device=self.stage.device)
            if self.scorer and found.scorers[self.scorer].relative:
                raise ConfigError(
                    "select_checkpoint: this reward_model compares answers to one prompt with each other, and each"
                    " candidate gives one; give one that scores each answer by itself (objective=bt), or a judge with"
                    " select_on=win_rate"
                )
            self._rewards = found
        return self._rewards

    def forget(self) -> None:
        """Give the graders' memory back."""
        self._rewards = None


def prompts_of(stage) -> str:
    """The prompts of the split's conversations, each up to its first answer, as a dataset of this run; its path."""
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    config, data = stage.config, stage.dataset("data")
    if data.kind != "demonstrations/1":
        raise ConfigError(
            "select_checkpoint: candidates answer prompts, and plain text has none; give --input prompts=PROMPTS, or"
            " write select_on=val_loss and leave the reward_model out"
        )
    rows, most = [], config.evaluate.limit or math.inf
    for row in data.iter_rows(split=config.split):
        turns = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        if turns and turns[0] and len(rows) < most:
            made = {"prompt": row["messages"][: turns[0]], "group_id": row["group_id"]}
            common = {name: row[name] for name in ("dataset", "source", "origin", "split")}
            rows.append(complete_row("prompts/1", made, **common))
    rows = list({row["row_id"]: row for row in rows}.values())
    if not rows:
        raise ConfigError(
            f"select_checkpoint: data has no conversation in split {config.split!r} whose prompt could be answered; give"
            f" --input prompts=PROMPTS, or write split=NAME ({_splits(data)})"
        )
    path = stage.workdir / "prompts"
    if stage.rank == 0:
        write_dataset(str(path), "prompts", "prompts/1", rows)
    return str(path)


def _splits(data) -> str:
    splits = data.manifest.get("splits") or {}
    return "it has " + (", ".join(f"{name} ({n})" for name, n in splits.items()) or "no rows")


class Candidate:
    """One checkpoint while it is measured."""

    def __init__(self, stage, label: str, plan, questions: Questions | None):
        self.stage, self.label, self.plan, self.questions = stage, label, plan, questions

    def release(self) -> None:
        """Give the model's memory back, and end what it acted in."""
        if self.plan is not None:
            self.plan.close()
            self.plan._loaded.clear()

    def model(self):
        from stages.models.modeling import load_frozen

        if self.plan is not None:
            return self.plan.policy()
        return load_frozen(self.stage.path(f"candidates.{self.label}"), self.stage.device)

    def loss(self) -> list:
        """[sum of the NLL of the split's trained tokens, their number]."""
        from stages.chat import renderer_for
        from stages.decoding.likelihood import response_logps
        from stages.sft import encode_demonstrations, encode_text

        stage, config, data = self.stage, self.stage.config, self.stage.dataset("data")
        path = stage.path(f"candidates.{self.label}")
        renderer = renderer_for(path, *config.evaluate.template())
        encode = encode_text if data.kind == "text/1" else encode_demonstrations
        items, _ = encode(data, config.split, renderer, config, limit=config.eval_rows)
        if not items:
            raise ConfigError(
                f"select_checkpoint: data has no row in split {config.split!r} whose loss could be measured; write"
                f" split=NAME ({_splits(data)}), or hold some out: posttrain stage ingest --input data=FILE --set"
                " validation_fraction=0.05"
            )
        logps = response_logps(self.model(), items, config.max_tokens_per_micro_batch, stage.device)
        values = [value for item in logps for response in item for value in response]
        return [-math.fsum(values), len(values)]

    def answers(self, kind: str, part) -> list[dict]:
        """Rows of ``eval_samples/1`` of a chunk of prompts, with the candidate's label."""
        from stages.evaluation.units import finished
        from storage.files import canonical_json

        self.plan._loaded["rewards"] = self.questions.rewards(self.plan.renderer)
        rows, _ = finished(self.plan, kind, part)
        return [
            {**row, "extra_json": canonical_json({**json.loads(row["extra_json"]), "candidate": self.label})}
            for row in rows
        ]


def records_by_candidate(stage, labels) -> dict[str, list[dict]]:
    """The written answers, by candidate."""
    from stages.evaluation.scores import originals, records_of
    from storage.datasets import open_dataset

    found: dict[str, list[dict]] = {label: [] for label in labels}
    for record in originals(records_of(open_dataset(str(stage.workdir / "out" / "samples")).iter_rows())):
        found[record["candidate"]].append(record)
    return found


def judged(stage) -> bool:
    """Whether a language model compares answers, and not the reward model."""
    return stage.has("judge") or bool(stage.config.win_rate.endpoint)


# -- win rates ---------------------------------------------------------------------------------------------------------


def compared(stage, labels, records, questions: Questions, done: int, state: dict) -> dict[str, dict]:
    """{candidate: {prompt: (P(its answer is the better one), cluster)}} against the baseline; its own are 0.5."""
    from stages.reward.judging import PairJudge
    from stages.win_rate import RewardReferee

    config = stage.config
    asks = judged(stage)
    names = ("judge", "principles", "judgements") if asks else ("reward_model",)
    seen = Seen(
        stage,
        "win_rate",
        config.win_rate,
        {name: stage.inputs[name] for name in names if stage.has(name)},
        done,
        state,
    )
    if stage.has("judge") and config.win_rate.endpoint:
        seen.inputs.pop("judge")  # it grades answers alone
    items = meetings(stage, labels, records, questions)
    referee = PairJudge(seen) if asks else RewardReferee(seen)
    referee.run(items)
    found: dict[str, dict] = {label: {} for label in labels}
    for item, opinion in zip(items, referee.opinions(items)):
        if opinion.p_a is not None:
            found[item.row["model_a"]][item.row["item"]] = (opinion.p_a, item.row["group_id"])
    if config.baseline != REFERENCES:
        own = {key: (0.5, cluster) for one in found.values() for key, (_, cluster) in one.items()}
        found[config.baseline] = own
    return found


def meetings(stage, labels, records, questions: Questions) -> list:
    """An item for every candidate's answer to a prompt that the baseline answers, too."""
    from stages.reward.judging import Item
    from storage.datasets import open_dataset

    config = stage.config
    data = open_dataset(questions.inputs["prompts"].path)
    prompts = {row["row_id"]: row for row in data.iter_rows(split=questions.evaluate.split)}
    mode = "greedy" if config.evaluate.greedy else "sample"
    answers = {
        label: {
            (record["item_id"], record["sample_idx"]): record
            for record in records[label]
            if record["mode"] == mode and not record.get("error")
        }
        for label in labels
    }
    if config.baseline == REFERENCES:
        known = references_of(stage)
        others = {
            key: known[record["prompt_id"]]
            for own in answers.values()
            for key, record in own.items()
            if record["prompt_id"] in known
        }
    else:
        others = {
            key: [{"role": "assistant", "content": record["output"]}]
            for key, record in answers[config.baseline].items()
        }
    left = len({key for own in answers.values() for key in own} - others.keys())
    if not others:
        raise ConfigError(
            "select_checkpoint: none of the prompts is in data with an answer to compare with; leave the input prompts"
            " out, so that the prompts of data are answered, or write baseline=LABEL with a candidate's"
        )
    if left:
        stage.warn(
            "prompts_without_reference",
            f"{left} prompts have no answer of the baseline and are in no win rate. Give prompts of the validation rows"
            " of data, or write baseline=LABEL with a candidate's.",
        )
    return [
        Item(
            f"{label}:{key[0]}:{key[1]}",
            prompts[key[0]]["prompt"],
            [{"role": "assistant", "content": record["output"]}],
            others[key],
            {
                "model_a": label,
                "model_b": config.baseline,
                "item": key[0] if not key[1] else f"{key[0]}:{key[1]}",
                "prompt_id": record["prompt_id"],
                "group_id": record["group_id"],
                "split": record["split"],
                "source": record["source"],
                "category": record.get("category"),
            },
        )
        for label in labels
        if label != config.baseline
        for key, record in sorted(answers[label].items())
        if key in others
    ]


def references_of(stage) -> dict[str, list[dict]]:
    """{prompt id: the answer in the split of data}: of every turn of an assistant; the first of equal prompts."""
    from storage.schema import prompt_id

    data, found = stage.dataset("data"), {}
    for row in data.iter_rows(split=stage.config.split) if data.kind == "demonstrations/1" else ():
        for i, message in enumerate(row["messages"]):
            if i and message["role"] == "assistant" and (message.get("content") or "").strip():
                found.setdefault(prompt_id(row["messages"][:i]), [message])
    return found


# -- the decision ------------------------------------------------------------------------------------------------------


def conclude(stage, labels, on: str, losses, records, opinions, questions: Questions | None) -> None:
    """Every candidate's scores of its answers and losses, and the choice by them."""
    from stages.evaluation.scores import Metric, lower_is_better

    config = stage.config
    scores: dict[str, dict[str, Any]] = {"val_loss": {}}
    for label in labels:
        total, tokens = losses[label]
        scores["val_loss"][label] = Metric(total / tokens, tokens)
    if records:
        wanted = {"rm_score": f"reward/{questions.scorer}"} if questions.scorer else {}
        wanted |= {name: name for name in ("accuracy", "length_mean", "stop_rate")}
        if on.startswith(METRIC):
            wanted[on.removeprefix(METRIC)] = on.removeprefix(METRIC)
        for shown, metric in wanted.items():
            found = shared_means(stage, shown, {label: per_prompt(records[label], metric) for label in labels})
            if found:
                scores[shown] = found
    if opinions is not None:
        scores["win_rate"] = shared_means(stage, "win_rate", opinions)
    if cut := [label for label, one in scores.get("stop_rate", {}).items() if one.value < ENDED]:
        stage.warn(
            "answers_truncated",
            f"More than a tenth of the answers of {', '.join(cut)} hit"
            f" evaluate.max_completion_length={config.evaluate.max_completion_length}"
            + (f" and count {CUT_REWARD:g} in rm_score, whatever they say" if questions.scorer else "")
            + ". Raise evaluate.max_completion_length.",
        )
    less = on == "val_loss" or on.startswith(METRIC) and lower_is_better(on[len(METRIC) :])
    decide(stage, labels, on, scores, less, questions)


def decide(stage, labels, on: str, scores, less: bool, questions: Questions | None = None, role: str = "") -> None:
    """Choose, publish the chosen model, and report every candidate's scores.

    Args:
        scores: {name: {candidate: Metric}}. less: less is better. role: of the models, where they are no policies.

    Raises:
        StageFailure: no candidate has a finite value of what decides.
    """
    from stages.harness import StageFailure

    by = on.removeprefix(METRIC)
    values = {label: getattr(scores.get(by, {}).get(label), "value", math.nan) for label in labels}
    chosen = choose(values, less)
    if chosen is None:
        raise StageFailure(
            f"No candidate has a finite {on} on prompts that all of them answered, so none is the best. Look at the"
            " answers and at what scores them, or write another select_on, such as select_on=val_loss."
            if "val_loss" in scores
            else f"No candidate has a finite {on}, so none is the best. Write another select_on, such as"
            f" {METRIC}{next(iter(scores))}."
        )
    losses = scores.get("val_loss", {})
    by_loss = choose({label: one.value for label, one in losses.items()}, less=True)
    stage.link_model("model", stage.path(f"candidates.{chosen}"), role)
    table = [
        {
            "candidate": label,
            "chosen": "yes" if label == chosen else "",
            **{name: own[label].value for name, own in scores.items() if label in own},
            **(
                {f"{by} low": own.low, f"{by} high": own.high}
                if (own := scores.get(by, {}).get(label)) is not None and own.low is not None
                else {}
            ),
        }
        for label in labels
    ]
    for place, label in enumerate(labels, 1):
        stage.metric(place, {f"candidates/{name}": own[label].value for name, own in scores.items() if label in own})
    equal = [label for label in labels if label != chosen and math.isclose(values[label], values[chosen], rel_tol=1e-9)]
    reasons = [
        f"Candidate {chosen} has the {'lowest' if less else 'highest'} {on} of {len(labels)}: {values[chosen]:.6g}"
        + (f" (so have {', '.join(equal)}, which come later)." if equal else "."),
    ]
    if losses:
        reasons.append(
            "No validation loss is finite."
            if by_loss is None
            else f"By validation loss it would be candidate {by_loss}."
            if by_loss != chosen
            else "It has the lowest validation loss, too."
        )
    write_decision(stage, on, chosen, scores, labels, reasons, questions)
    stage.summary(
        {
            "selected": chosen,
            "select_on": on,
            "candidates": len(labels),
            **({"lowest_val_loss": by_loss} if losses else {}),
            **{f"{label}/{name}": own[label].value for name, own in scores.items() for label in labels if label in own},
        }
    )
    report(stage, by, labels, scores, table, reasons)
    stage.log(" ".join(reasons))


def per_prompt(records, metric: str) -> dict[str, tuple[float, str]]:
    """{prompt: (value, cluster)} of a metric of stage evaluate."""
    from stages.evaluation.scores import item_values

    try:
        return item_values(records, metric)
    except ValueError as error:
        raise ConfigError(f"select_checkpoint: {error}") from None


def shared_means(stage, name: str, values: Mapping[str, dict]) -> dict[str, Any]:
    """{candidate: mean with its interval} over the prompts on which all candidates that have any value have one; what is
    left out for that is told.
    """
    from stages.evaluation.scores import average

    known = {label: own for label, own in values.items() if own}
    keys = sorted(set.intersection(*(set(own) for own in known.values()))) if known else []
    if missing := sorted(set(values) - set(known)) if known else []:
        stage.warn(
            "candidates_without_score",
            f"{', '.join(missing)}: no answer has a value of {name}, so that these candidates cannot be chosen by it."
            " Look at their answers in the output samples.",
        )
    every = set().union(*known.values()) if known else set()
    if len(every) > len(keys):
        stage.warn(
            "prompts_left_out",
            f"{len(every) - len(keys)} of {len(every)} prompts have no {name} for some candidate and are in no mean of"
            " it. Look at unscorable in the output samples.",
        )
    if not keys:
        return {}
    return {label: average(*map(list, zip(*(own[key] for key in keys)))) for label, own in known.items()}


def write_decision(stage, on: str, chosen: str, scores, labels, reasons: list[str], questions) -> None:
    """Every score as a row, and the decision in the form of stage ``promote``, so that the registry can keep it."""
    from stages.evaluation.protocol import protocol_hash
    from stages.evaluation.scores import known, score_row
    from stages.promote import model_ref

    config, digests = stage.config, {label: stage.inputs[f"candidates.{label}"].digest for label in labels}
    evidence = [
        {
            "check": "selection",
            "metric": name,
            "candidate": label,
            "model": model_ref(digests[label]),
            "passed": label == chosen,
            **known({"value": own[label].value, "n": own[label].n, "low": own[label].low, "high": own[label].high}),
        }
        for name, own in scores.items()
        for label in labels
        if label in own and math.isfinite(own[label].value)
    ]
    measured = {
        "select_on": on,
        "split": config.split,
        "baseline": config.baseline if on == "win_rate" else None,
        "prompts": questions.inputs["prompts"].digest if questions else None,
    }
    decision = {
        "promote": True,
        "candidate": model_ref(digests[chosen]),
        "champion": None,
        "metric": on,
        "prompts": questions.evaluate.split if questions else config.split,
        "protocol_hash": protocol_hash(known(measured)),
        "reasons": reasons,
        "evidence": evidence,
    }
    writer = stage.writer("decision", "eval_scores/1", meta={"decision": decision})
    writer.write(
        score_row(
            stage.key[:16],
            "select_checkpoint",
            f"{row['candidate']}/{row['metric']}",
            row["value"],
            None,
            row["n"],
            config=known(measured),
            source=row["model"],
            detail=row,
        )
        for row in evidence
    )
    writer.close({"candidates": len(labels)})


def report(stage, by: str, labels, scores, table, reasons: list[str]) -> None:
    """The table, and what decides beside the validation loss over the candidates."""
    from stages.reporting.reports import document, line_chart, markdown_table

    places = list(range(1, len(labels) + 1))
    for name in dict.fromkeys((by, "val_loss")):
        if name in scores:
            stage.report(
                name,
                png=line_chart(
                    {name: (places, [getattr(scores[name].get(label), "value", None) for label in labels])},
                    title=f"{name} of {', '.join(labels)}",
                    xlabel="candidate",
                    ylabel=name,
                    markers=True,
                ),
            )
    stage.report(
        "selection",
        table=table,
        markdown=document(
            "Checkpoint selection",
            ("Means over the prompts on which all candidates have a value" if "val_loss" in scores else "Held-out rows")
            + "; low and high are a 95% interval over prompts.",
            ("Candidates", markdown_table(table)),
            ("Why", "\n".join(f"- {reason}" for reason in reasons)),
        ),
    )
