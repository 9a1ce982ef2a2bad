"""objective: a new preference loss, proposed from the ones tried so far and unit-tested before anything is trained with
it.

The proposer is a language model (``flow.objective_discovery``; Lu et al. 2024, DiscoPOP): it reads the losses tried so
far with their scores and writes another one; losses that fail the unit tests go back to it with the reason,
``attempts`` times. ``proposer=mutation`` writes losses without a language model, by recombining known shapes and the
better half of those tried. ``code`` checks a loss of your own:

    posttrain stage objective --set code='softplus(-beta * ((pc - pr) - (rc - rr)))'

The outcome is one row of ``objectives/1``, valid or not, with what was wrong; ``align method=written`` trains with it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stages.spec import InputSpec, KeyVariable, OutputSpec, ServerBase, StageConfig, StageSpec


class Config(StageConfig):
    proposer: Literal["mutation", "model", "server"] = Field(
        "mutation",
        description=(
            "Who writes the loss: recombination of known shapes, the language model of the input `model`, or a server"
            " with the OpenAI chat interface."
        ),
    )
    code: str = Field(
        "",
        description=(
            "A loss of your own instead of a proposal: an expression of pc, pr, rc, rr and beta, or a function"
            " (stages.direct.objective_code)."
        ),
    )
    beta: float = Field(0.05, gt=0, description="beta of the unit tests (the discovered losses' 0.05).")
    min_decreasing: float = Field(
        0.5, ge=0, lt=1, description="Share of pairs for which the loss must fall when the margin grows."
    )
    attempts: int = Field(
        4, ge=1, description="Proposals until one passes the unit tests; failures are fed back as text."
    )
    metric: str = Field("accuracy", description="Metric of the `scores` that says how good a tried loss was.")
    max_tokens: int = Field(512, ge=16, description="proposer=model, server: tokens of an answer at most.")
    endpoint: ServerBase = Field(
        "",
        description="proposer=server: base URL, for example http://localhost:8000/v1.",
        json_schema_extra={"identity": "given", "address": True},
    )
    endpoint_model: str = Field("", description="proposer=server: model name the server knows.")
    key_variable: KeyVariable = Field(
        "",
        description="proposer=server: environment variable that holds the key, if one is needed.",
        json_schema_extra={"identity": ""},
    )
    timeout_s: float = Field(120.0, gt=0, description="proposer=server: seconds to wait for an answer.")

    @model_validator(mode="after")
    def _reachable(self):
        if self.proposer == "server" and not self.code and not (self.endpoint and self.endpoint_model):
            raise ValueError(
                "proposer=server needs endpoint and endpoint_model; write for example endpoint=http://localhost:8000/v1"
                " endpoint_model=NAME"
            )
        return self


SPEC = StageSpec(
    name="objective",
    config=Config,
    inputs={
        "objectives": InputSpec(
            "dataset",
            kinds=("objectives/1",),
            required=False,
            many=True,
            doc="Losses tried so far, as objectives.NAME.",
        ),
        "scores": InputSpec(
            "dataset",
            kinds=("eval_scores/1",),
            required=False,
            many=True,
            doc="Evaluations of the models trained with them, by the same names.",
        ),
        "model": InputSpec("model", required=False, doc="Language model of proposer=model."),
    },
    outputs={
        "objective": OutputSpec(
            "dataset", doc="objectives/1: the loss, whether it may be trained with, and what was wrong."
        )
    },
)

REQUEST = """You design losses for preference optimisation of language models. A loss is a Python function of sequence log-probabilities:

{start}    ...
    return loss_per_pair

Each argument but beta (a small number, {beta}) is a tensor [B]. Write assignments and one return; no loops, no if, no averaging over pairs. Element-wise functions you may call: {functions}.
The loss must be finite with finite gradients for log-probabilities from -1000 to 0, and must fall when the chosen response becomes more likely than the rejected one.

Losses tried so far, best last ({metric} of the trained model on validation prompts, higher is better):
{archive}
{feedback}
Propose one loss that differs from all of these and that you expect to be better. Answer with one JSON object and nothing else: {{"thought": "why", "name": "snake_case_name", "code": "def loss(...): ..."}}"""


def run(stage):
    from stages.direct.objective_code import ObjectiveError, Program, failures
    from storage.schema import complete_row

    config = stage.config
    tried = archive(stage)
    seen = {Program(t["code"]).normal_form for t in tried if t["valid"]}
    write = given if config.code else proposer(stage)
    problems: list[str] = []
    for attempt in range(1 if config.code else config.attempts):
        proposal = {"name": "given", "thought": "", "code": ""}
        try:
            proposal |= write(stage, tried, problems, attempt)
            program = Program(proposal["code"])
            wrong = failures(program, config.beta, config.min_decreasing)
            if not wrong and program.normal_form in seen:
                wrong = ["This loss was tried already; propose another one."]
        except ObjectiveError as error:
            wrong = [str(error)]
        if not wrong:
            break
        problems.append(f"{proposal['code'] or '(no code)'}\n-> " + " ".join(wrong))
        stage.log(f"attempt {attempt + 1}: " + " ".join(wrong))
    writer = stage.writer("objective", "objectives/1")
    writer.write(
        [
            complete_row(
                "objectives/1",
                {
                    "name": proposal["name"],
                    "code": proposal["code"],
                    "thought": proposal["thought"] or None,
                    "valid": not wrong,
                    "failure": " ".join(wrong) or None,
                    "proposer": "given" if config.code else config.proposer,
                    "attempts": attempt + 1,
                },
                dataset="objectives",
                source="objective",
                origin="ai",
            )
        ]
    )
    writer.close({"objectives": 1})
    if wrong and config.code:
        raise ObjectiveError(" ".join(wrong))
    if wrong:
        stage.warn(
            "no_valid_objective",
            f"None of {config.attempts} proposals passed the unit tests. Raise attempts, or take a stronger proposer; the last"
            f" one failed because: {' '.join(wrong)}",
        )
    stage.summary({"valid": float(not wrong), "attempts": attempt + 1, "tried": len(tried)})
    text = (
        f"**{proposal['name']}** ({'valid' if not wrong else 'refused'}, attempt"
        f" {attempt + 1})\n\n{proposal['thought']}\n\n```python\n{proposal['code']}\n```"
    )
    stage.report(
        "objective",
        markdown="\n\n".join(
            [text, *(["## Refused attempts", *(f"```\n{p}\n```" for p in problems)] if problems else [])]
        ),
    )


def archive(stage) -> list[dict]:
    """Losses tried so far, the best last: {label, name, code, valid, failure, score (None where nothing was
    trained)}.
    """
    scores = {}
    for label in stage.many("scores"):
        rows = stage.dataset(f"scores.{label}").iter_rows()
        scores[label] = next((row["value"] for row in rows if row["metric"] == stage.config.metric), None)
    found = []
    for label in stage.many("objectives"):
        row = next(iter(stage.dataset(f"objectives.{label}").iter_rows()))
        found.append(
            {"label": label, **{k: row[k] for k in ("name", "code", "valid", "failure")}, "score": scores.get(label)}
        )
    return sorted(
        found, key=lambda t: (t["score"] is not None, t["score"] if t["score"] is not None else 0.0, t["label"])
    )


def given(stage, tried, problems, attempt) -> dict:
    return {"code": stage.config.code}


def proposer(stage):
    """``write(stage, tried, problems, attempt) -> {name, thought, code}``."""
    from stages.spec import ConfigError

    config = stage.config
    if config.proposer == "mutation":
        return mutation
    if config.proposer == "server":
        from stages.reward.judge import ServerJudge

        return ask(ServerJudge(config.endpoint, config.endpoint_model, config.key_variable, config.timeout_s))
    if not stage.has("model"):
        raise ConfigError(
            "objective: proposer=model asks a language model; give it with --input model=REF_OR_PATH, or take"
            " proposer=server or mutation"
        )
    from stages.reward.judge import LocalJudge
    from stages.reward_models.reward_heads import RewardCard

    return ask(LocalJudge(stage.path("model"), RewardCard(), stage.device))


def ask(asked):
    """A language model as proposer."""

    def write(stage, tried, problems, attempt):
        from stages.direct.objective_code import FUNCTIONS, START

        config = stage.config
        lines = [
            f"# {t['name']}: "
            + (
                f"{config.metric} {t['score']:.4f}"
                if t["score"] is not None
                else f"refused: {t['failure']}"
                if not t["valid"]
                else "not trained yet"
            )
            + f"\n{t['code']}"
            for t in tried
        ]
        feedback = (
            "\nYour earlier answers to this request were refused:\n" + "\n".join(problems) + "\n" if problems else ""
        )
        text = REQUEST.format(
            start=START,
            beta=config.beta,
            functions=", ".join(FUNCTIONS),
            metric=config.metric,
            archive="\n\n".join(lines) or "(none)",
            feedback=feedback,
        )
        return parse(asked.answers([text], config.max_tokens, attempt)[0])

    return write


def parse(answer: str) -> dict:
    """{name, thought, code} of a language model's answer: the JSON object asked for, else the first fenced block as
    code.
    """
    import json
    import re

    from stages.direct.objective_code import ObjectiveError

    start, end = answer.find("{"), answer.rfind("}")
    if 0 <= start < end:
        try:
            found = json.loads(answer[start : end + 1], strict=False)
            if isinstance(found, dict) and isinstance(found.get("code"), str):
                return {
                    "name": str(found.get("name") or "proposal")[:80],
                    "thought": str(found.get("thought") or "")[:4000],
                    "code": found["code"],
                }
        except ValueError:
            pass
    block = re.search(r"```(?:python)?\s*\n(.*?)```", answer, re.S)
    if block:
        return {"name": "proposal", "code": block.group(1)}
    raise ObjectiveError('The answer holds no JSON object {"thought", "name", "code"}: ' + repr(answer[:200]))


SHAPES = {
    "logistic": "softplus(-u)",
    "hinge": "relu(1 - u)",
    "exponential": "exp(clamp(-u, -20, 20))",
    "squared": "square(u - 1)",
    "sigmoid": "1 - sigmoid(u)",
    "anchored": "softplus(-beta * h_w) + softplus(beta * h_l)",
}
BEGIN = """    h_w = policy_chosen_logps - reference_chosen_logps
    h_l = policy_rejected_logps - reference_rejected_logps
    u = beta * (h_w - h_l)
"""


def mutation(stage, tried, problems, attempt) -> dict:
    """A loss without a language model: two shapes, or a shape and one of the better losses tried, mixed, gated or
    bent.
    """
    import ast

    from stages.direct.objective_code import START, Program

    rng = stage.rng("mutation", attempt)
    shapes, names, other = dict(SHAPES), list(SHAPES), []
    ours = Program(f"{START}{BEGIN}    return u")
    good = [t for t in tried if t["valid"] and t["score"] is not None]
    for t in good[len(good) // 2 :]:  # the better half, where it begins as ours do and is short enough to grow
        program = Program(t["code"])
        result = ast.unparse(program.result)
        # the same lines before the end, and no argument of its own
        if program.normal_form.removesuffix(result) != ours.normal_form.removesuffix("u"):
            other.append(t["name"])
        elif len(result) < 400:
            shapes[t["name"]] = result
            names += [t["name"]] * 3
    if other:
        stage.warn(
            "not_recombined",
            f"Of the better half of the losses tried, {', '.join(other)} cannot be built upon by proposer=mutation, which"
            " reads what a loss returns as an expression of h_w, h_l, u and beta. Write them as a function without"
            f" arguments of its own whose lines before the return are exactly\n{BEGIN.rstrip()}\nor take"
            " proposer=model or server, which read any.",
        )
    first, second = (names[i] for i in rng.integers(len(names), size=2))
    w, tau = round(float(rng.uniform(0.1, 0.9)), 2), float(rng.choice([0.05, 0.2, 0.5, 1.0]))
    how = ["mix", "gate", "bend", "floor"][int(rng.integers(4))]
    a, b = shapes[first], shapes[second]
    result = {
        "mix": f"{w} * ({a}) + {round(1 - w, 2)} * ({b})",
        "gate": f"sigmoid(u / {tau}) * ({a}) + (1 - sigmoid(u / {tau})) * ({b})",
        "bend": f"where(u < 0, {w}, 1.0) * ({a})",
        "floor": f"({a}) + {w} * relu(-beta * h_w)",
    }[how]
    what = [first, second] if how in ("mix", "gate") else [first]
    return {
        "name": "_".join([how, *what])[:80],
        "thought": f"{how} of {' and '.join(what)}",
        "code": f"{START}{BEGIN}    return {result}\n",
    }
