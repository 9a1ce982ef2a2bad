"""evaluate: what a model can do on held-out prompts or pairs, with confidence intervals.

``target=policy``        samples k answers per prompt (and one greedy answer), grades them with verifiers and, if given, a reward
                         model; on prompts with constraints also reports the four IFEval accuracies (eval.ifeval);
                         estimates KL to a reference; judges preference pairs by the policy's own likelihood.
                         With ``environment`` it acts in one over turns: success, turns, tool errors and truncations
                             (eval.tool);
                         with ``environment=debate`` it argues for both answers before a judge: how often the judge is
                         right, with and without the debate, and how often the first side wins (eval.debate). Prompts
                         with ``choices`` are also read by the log-probability of their letters and of their texts
                         (``stages/evaluation/multiple_choice.py``); ``few_shot`` shows examples first
                         (``stages/evaluation/few_shot.py``); plain ``texts`` give perplexity and bits per byte
                         (``stages/evaluation/held_out_text.py``).
                         Prompts that bring perturbed forms: what the change costs (``evaluation/perturbed.py``).
                             ``token_shift``: how much alignment changed
                         (``evaluation/shift.py``). Several samples: what more samples and tokens buy
                         (``evaluation/compute.py``).
                         Answers that somebody else made (input ``answers``, in the place of a model) are graded in the same
                             way (``evaluation/given.py``).
                         Prompts with a label safe or unsafe, or with a mirror image: refusals
                             (``evaluation/refusals.py``); with ``mt_bench``
                         questions of several turns, rated by a judge (``evaluation/mt_bench.py``). Always signs of
                         style, reasoning, diversity.
``target=reward_model``  scores held-out pairs: accuracy, calibration, length bias, probes that should score low
(``rm.eval``); of pairs that name a
                         subset, accuracy per subset and section and in total (RewardBench,
                         ``evaluation/rewardbench.py``; RewardBench 2 and RM-Bench, ``evaluation/best_of.py``).
``target=judge``         the same of a language model that is asked which answer is better, in both orders; ties count half in RewardBench.

Every answer is kept (``eval_samples/1``), every number with its error (``eval_scores/1``). The seed of a sample depends
on the prompt row and the sample index only, so two models evaluated with the same settings are compared on paired
samples. A *protocol hash* (prompts, split, template, sampling, stop set, graders) is stored with all results;
``promote`` and ``compare`` refuse to compare different ones. Work is done in chunks; a killed run continues at the last
complete chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from stages.evaluation import given, pairs, protocol
from stages.evaluation.asked import AskedJudge, MTBench
from stages.evaluation.grading import constraint_verdicts, difficulty_of, parse_all, read_of
from stages.evaluation.report import conclude
from stages.evaluation.sampled import Sampled, not_of_the_policy
from stages.reward.components import REWARD_INPUTS, FixedComponent, RewardComponent
from stages.settings import (
    PROMPT_TEMPLATE,
    AgentConfig,
    BenchmarkConfig,
    ChatConfig,
    PromptTemplate,
    SamplingConfig,
    refuse_unread,
)
from stages.spec import InputSpec, OutputSpec, StageSpec


class Config(SamplingConfig, AgentConfig, BenchmarkConfig, ChatConfig, given.GivenConfig):
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
        description="Prompts (and pairs, and texts) used at most, the first ones of the split; empty = all.",
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


SPEC = StageSpec(
    name="evaluate",
    config=Config,
    gpu=True,
    judges="model",
    check=given.check,
    inputs={
        "model": InputSpec("model", required=False, doc="The model that is judged."),
        "answers": InputSpec(
            "file",
            required=False,
            doc=(
                "Answers that somebody else made, in the place of the model: a file of them (an API's, AlpacaEval's"
                " model_outputs, HumanEval's samples, MT-Bench's model_answer ...), or samples of an older evaluation."
            ),
        ),
        "prompts": InputSpec(
            "dataset",
            kinds=("prompts/1",),
            required=False,
            doc="Held-out prompts, with answers where they can be checked.",
        ),
        "pairs": InputSpec("dataset", kinds=("pairs/1",), required=False, doc="Held-out preference pairs."),
        "texts": InputSpec(
            "dataset", kinds=("text/1",), required=False, doc="Held-out plain text: loss, perplexity, bits per byte."
        ),
        "examples": InputSpec(
            "dataset",
            kinds=("prompts/1", "demonstrations/1"),
            required=False,
            doc="Examples for few_shot; default: another split of the prompts.",
        ),
        "reward_model": InputSpec("model", required=False, use="scores", doc="Scores the policy's answers."),
        "judge": InputSpec(
            "model",
            required=False,
            doc=(
                "Causal LM of reward components with kind=judge, of a rubric's judged items, of mt_bench and"
                " refusal_judge."
            ),
        ),
        "rubric": InputSpec(
            "dataset",
            kinds=("rubric_items/1",),
            required=False,
            doc="Rubric of the component with kind=rubric: a file or a dataset.",
        ),
        **REWARD_INPUTS,
        "reference": InputSpec(
            "model", required=False, doc="KL of the policy to this model is estimated on the samples."
        ),
    },
    outputs={
        "samples": OutputSpec("dataset", doc="eval_samples/1: every answer with its grade."),
        "scores": OutputSpec("dataset", doc="eval_scores/1: every metric with error, count and protocol."),
        "rubric_scores": OutputSpec(
            "dataset", required=False, doc="rubric_scores/1: every item of every answer, with critique and reasoning."
        ),
        "rubric_confidence": OutputSpec(
            "dataset", required=False, doc="rubric_confidence/1: mean confidence per rubric item."
        ),
    },
)


def run(stage):
    from stages.evaluation.scores import records_of
    from stages.reward.rubric_reward import score_rows, write_review
    from storage.datasets import open_dataset

    plan = Plan(stage)
    meta = {
        "target": stage.config.target,
        "protocol": plan.protocol,
        "protocol_hash": protocol.protocol_hash(plan.protocol),
        "scorers": plan.scorers,
        **{name: stage.inputs[name].digest for name in ("model", "answers") if stage.has(name)},
    }
    writer = stage.writer("samples", "eval_samples/1", meta=meta)
    rubric = bool(plan.prompts) and any(component.kind == "rubric" for component in stage.config.rewards)
    items = stage.writer("rubric_scores", "rubric_scores/1", meta=meta) if rubric else None
    checkpoint = stage.checkpoints.latest()
    units = plan.units()
    for index in range(checkpoint.step if checkpoint else 0, len(units)):
        kind, part = units[index]
        rows, scored = (
            plan.answers(part)
            if kind == "prompts"
            else (
                {"choices": plan.choice_scores, "pairs": partial(pairs.score, plan), "texts": plan.text_scores}[kind](
                    part
                ),
                [],
            )
        )
        writer.write(rows)
        if rubric:
            items.write([made for row, own in zip(rows, scored) for made in score_rows(row, own)])
        stage.save_checkpoint(index + 1, {"unit": index + 1})
        stage.progress(index + 1, len(units), f"{kind} in chunks of {stage.config.chunk}")
    plan.close()
    writer.close(
        {
            "prompts": plan.n_prompts,
            "pairs": len(plan.pairs),
            **({"texts": len(plan.plain)} if plan.plain else {}),
            **plan.dropped,
        }
    )
    if rubric:
        items.close({})
        write_review(stage)
        plan.violations = violations(stage)
    records = records_of(open_dataset(str(stage.workdir / "out" / "samples")).iter_rows())
    conclude(stage, plan, meta, records)


def violations(stage) -> dict:
    """How often answers violate each clause of the rubric: metrics, and the report ``violations``
    (eval.conformance).
    """
    from stages.evaluation import conformance
    from stages.reward.rubrics import from_rows
    from storage.datasets import open_dataset

    out, component = stage.workdir / "out", next(c for c in stage.config.rewards if c.kind == "rubric")
    scored_by_models = {
        (item.category, item.item_id)
        for items in from_rows(stage.dataset("rubric").iter_rows()).items.values()
        for item in items
        if item.kind == "rm"
    }
    found, table = conformance.rates(
        list(open_dataset(str(out / "rubric_scores")).iter_rows()),
        conformance.sampled_answers(open_dataset(str(out / "samples")).iter_rows()),
        component.violation_below,
        scored_by_models,
    )
    if table:
        stage.report("violations", table=table)
    return found


def check_inputs(stage) -> None:
    """Raise ConfigError where the inputs are not those that the settings are about."""
    from stages.evaluation import forcing
    from stages.spec import ConfigError

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


class Plan:
    """What will be evaluated, under which protocol, in which units; models are loaded when first needed."""

    violations: dict = {}  # metrics of the rubric's clauses, once all answers are scored

    def __init__(self, stage):
        from stages.chat import renderer_for, stage_renderer
        from stages.spec import ConfigError

        self.stage, self.config = stage, stage.config
        config = stage.config
        policy = config.target == "policy"
        check_inputs(stage)
        # a reward model reads text in its own way, and given answers are texts
        self.renderer = stage_renderer(stage) if policy and not stage.has("answers") else None
        self.given: given.Given | None = None
        self.prompts = []
        self.choices = []
        self.pairs = []
        self.texts = {}
        self.dropped = {}
        self.n_prompts = 0
        self.with_choices = False
        self.plain = self._read_texts() if policy and stage.has("texts") else []
        self.positions: int | None = None
        self.scorers = {
            name: stage.inputs[name].digest
            for name in ("reward_model", "reference", "rubric", "judge", *REWARD_INPUTS)
            if stage.has(name)
        }
        if policy and stage.has("prompts"):
            self._read_prompts()
        for name in ("mt_bench", "refusal_judge"):
            if settings := getattr(config, name):
                settings.check(name, stage.inputs)
        if config.mt_bench and (
            unread := [name for name in ("reward_model", "reference") if stage.has(name)]
            or ["prompts"] * (not self.prompts)
        ):
            raise ConfigError(
                "evaluate: mt_bench needs --input prompts=REF_OR_PATH, questions with a column turns"
                if unread == ["prompts"]
                else (
                    f"evaluate: mt_bench does not read the input {unread[0]}; leave it out, or evaluate with it in a"
                    " run without mt_bench"
                )
            )
        if stage.has("pairs"):
            self._read_pairs()
        self.verifier, self.constraints, self.code = (
            next((component for component in config.rewards if component.kind == kind), None)
            for kind in ("verifier", "constraints", "code")
        )
        if (
            not config.environment
            and not any(c.kind in ("code", "python", "remote") for c in config.rewards)
            and (tested := sum(bool(row.get("tests")) for row, _ in self.prompts))
        ):
            stage.warn(
                "tests_not_run",
                f"{tested} prompts bring tests of programs, and no reward runs them, so their answers have no accuracy."
                " Write rewards='[{kind: code}]'"
                + (" beside the others." if any(row.get("answer") is not None for row, _ in self.prompts) else "."),
            )
        if stage.has("reference") and self.prompts and not config.token_shift and (why := not_of_the_policy(config)):
            stage.warn(
                "kl_is_biased",
                "kl_reference is the mean log-ratio of the policy's answers, an estimate of its KL where these are"
                f" drawn from it as it is, and here {why}. Evaluate with temperature=1 and no filters or penalties for"
                " the KL itself.",
            )
        self.run_id = stage.key[:16]
        self.answerer = self.given or Sampled(self)
        self.protocol = protocol.of(self)
        self._loaded = {}
        self.debate = next((component.name for component in config.rewards if component.kind == "debate"), None)
        if (config.environment == "debate") != (self.debate is not None):
            raise ConfigError(
                "evaluate: environment=debate is decided by a judge; write rewards='[{kind: debate}]' with it and only"
                " with it, and give judge=MODEL or an endpoint"
            )
        if config.token_shift and not (stage.has("reference") and self.prompts):
            raise ConfigError(
                "evaluate: token_shift ranks answers to prompts under the base model; give --input prompts=REF_OR_PATH"
                " and --input reference=BASE_MODEL, or leave token_shift out"
            )
        if (
            config.token_shift
            and renderer_for(stage.path("reference")).vocabulary_hash != self.renderer.vocabulary_hash
        ):
            raise ConfigError(
                "evaluate: the input reference has another tokenizer, so its ranks would be those of other tokens;"
                " token_shift needs the base model with the policy's vocabulary"
            )
        if config.perturb_options and not self.with_choices:
            raise ConfigError(
                "evaluate: perturb_options reorders the options of prompts with choices, and there are none; leave"
                " it out"
            )
        if config.environment and config.target != "policy":
            raise ConfigError("evaluate: an environment takes the turns of a policy; write target=policy")

    def _read_prompts(self) -> None:
        from stages.evaluation import mt_bench, opinions, perturbed, refusals
        from stages.generation import prompt_rows
        from stages.ingestion import answers
        from stages.spec import ConfigError
        from stages.verification.choices import is_choice

        config, data = self.config, self.stage.dataset("prompts")
        read = (
            prompt_rows(self.stage, data, config.split, None, 0, config.limit, ids_of=lambda row: [])
            if self.stage.has("answers")
            else self._shown(data)
        )
        if not config.perturb_options:
            perturbed.check([row for row, _ in read])
        self.n_prompts = sum(perturbed.asked_of(row).get("perturbation", "") == "" for row, _ in read)
        self.readings = [reading for reading in config.multiple_choice if reading != "generation"]
        if config.few_shot_orders > 1:
            read = [(again, self._ids_of(again)) for row, _ in read for again in self._orders(row)]
        self.with_choices = any(is_choice(row) for row, _ in read)
        if self.with_choices and self.readings and self.stage.has("answers"):
            raise ConfigError(
                f"evaluate: multiple_choice reads the {' and the '.join(self.readings)} of choices by a model's"
                " probabilities, and answers are given; write multiple_choice=[generation], which reads the choice that"
                " they name"
            )
        self.choices = [row for row, _ in read if is_choice(row)] if self.readings else []
        self.prompts = [
            (row, ids)
            for row, ids in read
            if not is_choice(row) or ("generation" in config.multiple_choice and not opinions.of(row))
        ]
        if self.prompts and config.few_shot and config.prompt_template == "none" and not config.stop_strings:
            self.stage.warn(
                "few_shot_runs_on",
                "Behind plain-text examples a model without an end of turn goes on with questions of its own, and the"
                " last answer in the text counts. Write stop_strings='[\"Question:\"]'.",
            )
        refusals.check([row for row, _ in self.prompts])
        if config.mt_bench:
            mt_bench.check([row for row, _ in self.prompts])
        if self.stage.has("answers"):
            found = answers.read(self.stage, "answers", config.answer_column)
            self.given = given.Given(self.stage, [row for row, _ in self.prompts], found)

    def _ids_of(self, row: dict) -> list[int]:
        """What a completion starts from, or a reading of choices."""
        from stages.verification.choices import is_choice

        readings = self.config.multiple_choice
        return self.shots.ids(
            self.renderer, row, "generation" if "generation" in readings or not is_choice(row) else readings[0]
        )

    def _orders(self, row: dict) -> list[dict]:
        """A row under each choice and order of the examples."""
        count = self.config.few_shot_orders
        return [{**row, "order": order} for order in range(count)] if count > 1 else [row]

    def _shown(self, data) -> list[tuple[dict, list[int]]]:
        """(row, ids) of the evaluated prompts as the model is shown them, those that it has room for."""
        from transformers import AutoConfig

        from stages.evaluation import perturbed
        from stages.evaluation.few_shot import Shots
        from stages.generation import prompt_rows
        from stages.spec import ConfigError
        from stages.verification.choices import is_choice

        config = self.config
        room = getattr(
            AutoConfig.from_pretrained(self.stage.path("model")).get_text_config(decoder=True),
            "max_position_embeddings",
            None,
        )
        generates = "generation" in config.multiple_choice or any(
            not is_choice(row) for row in data.iter_rows(split=config.split)
        )
        longest = (
            config.max_prompt_length
            if room is None
            else min(config.max_prompt_length, room - (config.max_completion_length if generates else 1))
        )
        self.positions = room
        self.shots = Shots(self.stage, data)
        read = prompt_rows(
            self.stage,
            data,
            config.split,
            self.renderer,
            longest,
            config.limit,
            config.prompt_template,
            ids_of=lambda row: max(map(self._ids_of, self._orders(row)), key=len),
        )
        if config.perturb_options:
            perturbed.check([row for row, _ in read])
            if any(perturbed.asked_of(row) for row, _ in read):
                raise ConfigError(
                    "evaluate: these prompts bring their perturbed forms (columns pair_id and perturbation); leave"
                    " perturb_options out"
                )
            forms = [
                perturbed.with_reordered(row, self.stage.rng("options", row["row_id"])) if is_choice(row) else (row,)
                for row, _ in read
            ]
            read = [(form, self._ids_of(form)) for each in forms for form in each]
        return read

    def _read_texts(self) -> list[dict]:
        from stages.spec import ConfigError

        data, config = self.stage.dataset("texts"), self.config
        rows = [row for _, row in zip(range(config.limit or data.num_rows), data.iter_rows(split=config.split))]
        if not rows:
            splits = ", ".join(f"{name} ({n})" for name, n in (data.manifest.get("splits") or {}).items()) or "none"
            raise ConfigError(
                f"evaluate: the texts have no row in split {config.split!r} (splits: {splits}); write split=NAME"
            )
        return rows

    def _read_pairs(self) -> None:
        from stages.pairs import encode_pairs, is_tie
        from stages.spec import ConfigError

        config, data = self.config, self.stage.dataset("pairs")
        if config.target != "policy":
            from stages.reward_models.reward_eval import rows_of

            read, dropped = rows_of(data, config.split, config.limit), {}
        else:
            read, dropped = encode_pairs(data, config.split, self.renderer, config.max_length, config.limit)
        # nobody can be right about a tie
        self.pairs = [pair for pair in read if not is_tie(pair if isinstance(pair, dict) else pair.extra)]
        self.dropped = {
            f"pairs_{name}": count for name, count in {**dropped, "ties": len(read) - len(self.pairs)}.items()
        }
        if not self.pairs:
            splits = ", ".join(data.manifest.get("splits") or {}) or "none"
            ties = f"all {len(read)} rows are ties, which prefer neither side; " if read else ""
            raise ConfigError(
                f"evaluate: the pairs have no usable row in split {config.split!r} ({ties}splits: {splits}); write"
                " split=NAME"
            )
        if config.target != "policy":
            return
        wanted = {item.row_id for item in self.pairs}
        self.texts = {row["row_id"]: row for row in data.iter_rows(split=config.split) if row["row_id"] in wanted}

    def units(self) -> list[tuple[str, list]]:
        """Chunks of work in order; each one's rows depend on nothing but itself."""
        size = dict.fromkeys(("prompts", "choices", "pairs", "texts"), self.config.chunk)
        if any(
            c.kind == "rubric" and (c.rubric_normalizer != "plain" or c.rm_squash == "minmax")
            for c in self.config.rewards
        ):
            # the confidence of a rubric's items is a mean over all answers, whatever the chunk (GRAPE-REWARD)
            size["prompts"] = max(len(self.prompts), 1)
        return [
            (kind, rows[i : i + size[kind]])
            for kind, rows in (
                ("prompts", self.prompts),
                ("choices", self.choices),
                ("pairs", self.pairs),
                ("texts", self.plain),
            )
            for i in range(0, len(rows), size[kind])
        ]

    def _once(self, name: str, load):
        if name not in self._loaded:
            self._loaded[name] = load()
        return self._loaded[name]

    def policy(self, role: str = "model"):
        from stages.models.modeling import load_frozen

        return self._once(role, lambda: load_frozen(self.stage.path(role), self.stage.device))

    def scorer(self, role: str):
        from stages.reward.judge import Judge, LocalJudge
        from stages.reward_models.reward_heads import RewardCard
        from stages.reward_models.reward_scorers import load_scorer

        if role == "model" and self.config.target == "judge":
            return self._once(
                "scorer:model",
                lambda: Judge(
                    LocalJudge(self.stage.path("model"), RewardCard(), self.stage.device), self.config.judge_mode
                ),
            )
        return self._once(
            f"scorer:{role}",
            lambda: load_scorer(self.stage.path(role), self.stage.device, self.config.max_tokens_per_micro_batch),
        )

    @property
    def sampler(self):
        """The engine that the policy answers with."""
        from stages.decoding.engines import make_engine

        return self._once("sampler", lambda: make_engine(self.stage, self.renderer, self.policy))

    def close(self) -> None:
        """End the environment's processes."""
        if isinstance(self.answerer, Sampled):
            self.answerer.close()

    # -- answers to prompts --------------------------------------------------------------------------------------------

    def answers(self, rows) -> tuple[list[dict], list]:
        """Sample the answers of one chunk of prompts, or take those that are given, grade and score them: finished
        ``eval_samples/1`` rows, and what a rubric said of each.
        """
        from stages.evaluation import mt_bench, refusals
        from stages.generation import score
        from stages.reward.rewards import build_rewards

        stage, config = self.stage, self.config
        if config.mt_bench:
            return (mt_bench.given if self.given else mt_bench.answers)(self, rows), []
        rewards = self._once(
            "rewards", lambda: build_rewards(config.rewards, stage.inputs, renderer=self.renderer, device=stage.device)
        )
        rewards.check([row for row, _ in rows])
        rewards.check_company(
            self.answerer.fewest, "give several answers per prompt" if self.given else "write num_samples=4"
        )
        flat = self.answerer.drawn(rows)
        samples = [sample for _, sample, _ in flat]
        score(rewards, samples)
        model_scores = self._reward(samples) if stage.has("reward_model") else [None] * len(flat)
        ranks = iter(self._ranks([s for mode, s, _ in flat if mode == "greedy"])) if config.token_shift else iter(())
        divergences = self._kl(samples) if stage.has("reference") else [None] * len(flat)
        refused = refusals.answered(self, samples)
        refused = [
            more | (next(ranks) if config.token_shift and mode == "greedy" else {})
            for (mode, _, _), more in zip(flat, refused)
        ]
        readings = parse_all(
            [(s.prompt, read_of(s, self.verifier)) if not s.lost else None for s in samples], self.verifier
        )
        made = [
            self._answer_row(mode, sample, read, model_score, kl, more | beside)
            for (mode, sample, beside), read, model_score, kl, more in zip(
                flat, readings, model_scores, divergences, refused
            )
        ]
        return made, [sample.items for sample in samples]

    def _reward(self, samples) -> list[float | None]:
        from stages.reward.scorers import closed
        from stages.reward_models.reward_scorers import Response, same_prompt

        def whole(s) -> bool:  # a cut answer has no end, and its text would be given one
            return not s.terminated or closed(self.renderer, {"completion_ids": s.ids, "turns": s.turns})

        scorer = self.scorer("reward_model")
        everyone, samples = samples, [s for s in samples if not s.lost]
        as_ids = scorer.reads_ids_of(self.renderer)
        shown = [
            Response(
                s.prompt["prompt"],
                [{"role": "assistant", "content": s.text}],
                s.prompt_ids + s.ids if as_ids and whole(s) else None,
                s.prompt,
                start=len(s.prompt_ids),
            )
            for s in samples
        ]
        # nothing to compare with (rewards.ALONE)
        alone = {of[0] for of in same_prompt(shown) if len(of) == 1} if scorer.relative else set()
        found = iter(None if value != value or k in alone else value for k, value in enumerate(scorer.score(shown)))
        return [next(found) if not s.lost else None for s in everyone]

    def _kl(self, samples) -> list[float | None]:
        """KL of each answer over the tokens that the policy chose; None where there is no answer."""
        from stages.batching import make_item
        from stages.decoding.likelihood import response_logps, sampled_kl

        items = [make_item(s.prompt["row_id"], s.prompt_ids, [s.ids], [s.action_mask]) for s in samples if not s.lost]
        sums = [
            response_logps(self.policy(role), items, self.config.max_tokens_per_micro_batch, self.stage.device)
            for role in ("model", "reference")
        ]
        found = iter([sampled_kl(mine[0], theirs[0]) for mine, theirs in zip(*sums)])
        return [next(found) if not s.lost else None for s in samples]

    def _ranks(self, samples) -> list[dict]:
        """Fields of greedy answers' rows: their tokens, and the rank of each under the reference; {} of those without
        tokens.
        """
        from stages.batching import make_item
        from stages.decoding.likelihood import response_ranks

        items = [make_item(s.prompt["row_id"], s.prompt_ids, [s.ids], [[1] * len(s.ids)]) for s in samples if s.ids]
        found = iter(
            response_ranks(self.policy("reference"), items, self.config.max_tokens_per_micro_batch, self.stage.device)
        )
        return [{"token_ids": list(s.ids), "base_ranks": next(found)[0]} if s.ids else {} for s in samples]

    def _answer_row(self, mode: str, sample, read: tuple, model_score, kl, more: dict) -> dict:
        from stages.evaluation import bbq, perturbed
        from stages.reward.programs import program_of
        from stages.verification.responses import view

        source = sample.prompt
        strict, flexible, extracted = read
        tokens = more.pop("tokens", None)  # of an answer that was given, where somebody counted them
        no_program = (
            self.code is not None
            and bool(source.get("tests"))
            and sample.error is None
            and program_of(source, view(read_of(sample, self.code), self.code.view)) is None
        )
        extra = {
            "mode": mode,
            "finish": sample.finish_reason,
            "reward": model_score,
            "kl": kl,
            "parts": sample.parts,
            "unscorable": sample.reasons or None,
            "category": source.get("category") or source.get("domain"),
            "difficulty": difficulty_of(source),
            "prompt": source["prompt"][-1]["content"],
            "answer": source.get("answer"),
            "flexible_correct": flexible,
            "constraints": (
                constraint_verdicts(source, read_of(sample, self.constraints), self.constraints)
                if not sample.lost
                else None
            ),
            "reencoded": sample.reencoded or None,
            "opened": sample.opened or None,
            "forced": sample.forced,
            "error": sample.error,
            "order": source.get("order"),
            **perturbed.asked_of(source),
            **bbq.asked_of(source),
            **more,
            "nll": -sum(sample.logps) if mode == "sample" and sample.logps and sample.turns is None else None,
        }
        index = sample.index + source.get("order", 0) * (self.config.num_samples if mode == "sample" else 1)
        if sample.turns is not None:
            from stages.acting.agents import transcript, turn_counts

            extra |= {**turn_counts(sample), "transcript": transcript(sample), "failure": sample.failure}
            if sample.debate is not None:
                from stages.reward.debate import outcome

                extra, index, extracted = extra | outcome(sample, self.debate), 2 * index + sample.debate["seat"], None
            return self._row(
                source,
                mode,
                index,
                sample.text,
                sum(sample.action_mask),
                extra,
                extracted=extracted,
                correct=sample.correct,
            )
        return self._row(
            source,
            mode,
            index,
            sample.text,
            len(sample.ids) if tokens is None else tokens,
            extra,
            extracted=extracted,
            correct=strict if sample.correct is None else sample.correct,
            format_error=no_program or strict is not None and extracted is None,
        )

    def _row(
        self,
        source: dict,
        mode: str,
        index: int,
        text: str,
        tokens: int,
        extra: dict,
        *,
        correct=None,
        extracted=None,
        format_error=False,
    ) -> dict:
        from storage.files import canonical_json
        from storage.schema import complete_row

        run_id = self.run_id if mode == "sample" else f"{self.run_id}:{mode}"
        return complete_row(
            "eval_samples/1",
            {
                "prompt_id": source["prompt_id"],
                "group_id": source["group_id"],
                "run_id": run_id,
                "item_id": source["row_id"],
                "sample_idx": index,
                "output": text,
                "extracted": extracted,
                "correct": correct,
                "format_error": format_error,
                "tokens": tokens,
                "extra_json": canonical_json({name: value for name, value in extra.items() if value is not None}),
            },
            dataset=source["dataset"],
            source=source["source"],
            origin="ai",
            split=source["split"],
        )

    # -- choices and texts, by likelihood ------------------------------------------------------------------------------

    def logps_of(self, items) -> list:
        from stages.decoding.likelihood import prompted_logps

        return prompted_logps(self.policy(), items, self.config.max_tokens_per_micro_batch, self.stage.device)

    def choice_scores(self, rows) -> list[dict]:
        """Read one chunk of prompts with choices by likelihood: a row per reading, its output the choice that it
        takes.
        """
        from stages.verification.choices import LETTERS
        from stages.decoding.decoders import max_positions
        from stages.evaluation import bbq, perturbed
        from stages.evaluation.multiple_choice import read

        made = []
        for row, reading, result in read(
            rows, self.readings, self.shots, self.renderer, self.logps_of, max_positions(self.policy())
        ):
            known = {
                "mode": reading,
                "prompt": row["prompt"][-1]["content"],
                "answer": row.get("answer"),
                "category": row.get("category") or row.get("domain"),
                "difficulty": difficulty_of(row),
                "order": row.get("order"),
                **perturbed.asked_of(row),
                **bbq.asked_of(row),
            }
            choice, reason = result.pop("choice", None), result.pop("unscorable", None)
            correct, tokens = result.pop("correct", None), result.pop("tokens", 0)
            made.append(
                self._row(
                    row,
                    reading,
                    row.get("order", 0),
                    "" if choice is None else LETTERS[choice] if reading == "letter" else row["choices"][choice],
                    tokens,
                    {**known, **result, "unscorable": reason and {"choices": reason}},
                    correct=correct,
                    extracted=None if choice is None else LETTERS[choice],
                )
            )
        return made

    def text_scores(self, rows) -> list[dict]:
        """Likelihood of one chunk of texts: a row each, without the text."""
        from stages.evaluation.held_out_text import score

        return [
            self._row(
                row,
                "text_loss",
                0,
                "",
                found["tokens"],
                {"mode": "text_loss", "nll": found["nll"], "bytes": found["bytes"], "category": row.get("domain")},
            )
            for row, found in zip(rows, score(rows, self.renderer, self.logps_of, self.config.max_length))
        ]
