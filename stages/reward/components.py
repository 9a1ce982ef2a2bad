"""What a reward component is: its kind, its settings, and which of them a kind reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from stages.spec import InputSpec, KeyVariable, ServerAddress, ServerBase, StageConfig
from storage.files import read_text

PRIMARY = (
    "verifier",
    "code",
    "python",
    "model",
    "judge",
    "rubric",
    "group_preference",
    "icdpo",
    "majority",
    "environment",
    "debate",
    "remote",
)

ON_TURNS = ("environment", "milestones", "step_weighted")  # score trajectories, a number per turn

LENGTH_KINDS = ("length", "length_group", "length_target", "length_penalty", "truncation")

# judge the final answer: they do not see the thought before it
VERIFYING = ("verifier", "code", "constraints", "majority", "length_group", "length_target")

READ_OTHERS = ("majority", "length_group", "length_target")  # scored last: they read what the other components said

#: Kinds of reward components that never say whether an answer is right.
WITHOUT_VERDICT = (
    "model",
    "judge",
    "format",
    "length",
    "truncation",
    "group_preference",
    "icdpo",
    "majority",
    "length_group",
    "length_target",
    "length_penalty",
    "language",
)
# of a response without its end token, in the place of a reward model's score, unless a component says otherwise
# (reward.truncation)
CUT_REWARD = -1.0
TIERS = ("rule", "learned", "judge")

RIGHT = ("verifier", "length_group", "length_target")  # ask a verifier whether an answer is right

_SCORED = ("model", "judge", "group_preference")  # a model's number

_ASKED = ("judge", "debate", "rubric")  # a language model's words

#: Kinds that read a setting; others refuse it. What is not named here every kind reads.
OF_KINDS: dict[str, tuple[str, ...]] = {
    "view": (
        *RIGHT,
        *_SCORED,
        "majority",
        "remote",
        "format",
        "regex",
        "constraints",
        "code",
        "python",
        "language",
        "rubric",
    ),
    **dict.fromkeys(("correct_value", "incorrect_value"), ("verifier",)),
    **dict.fromkeys(("verifier", "rel_tol", "symbolic"), RIGHT),
    "extraction": (*RIGHT, "majority"),
    "input": (*_SCORED, "icdpo", "debate", "rubric"),
    "ranking": ("model", "judge"),
    "step_credit": ("model",),
    **dict.fromkeys(("judge_mode", "judge_prompt"), ("judge", "debate")),
    "judge_samples": ("judge",),
    "endpoint": _ASKED,
    **dict.fromkeys(("endpoint_model", "key_variable", "concurrency"), (*_ASKED, "remote")),
    **dict.fromkeys(("judge_tokens", "judge_retries"), _ASKED),
    **dict.fromkeys(("url", "batch_size", "request_form", "score_key"), ("remote",)),
    **dict.fromkeys(
        ("rubric_normalizer", "invalid_policy", "flag_below", "violation_below", "rm_squash", "category"), ("rubric",)
    ),
    "empty_reward": _SCORED,
    **dict.fromkeys(("no_eos_reward", "clip", "squash", "normalise"), (*_SCORED, "remote")),
    "group": ("group_preference",),
    "votes_of": ("majority",),
    **dict.fromkeys(("num_demonstrations", "coarse_demonstrations", "demonstration_length"), ("icdpo",)),
    **dict.fromkeys(("preset", "prefilled"), ("format",)),
    "pattern": ("regex",),
    **dict.fromkeys(("max_length", "cache_length"), ("length",)),
    "length_alpha": ("length_target", "length_penalty"),
    **dict.fromkeys(("length_delta", "length_mode"), ("length_target",)),
    "language_unit": ("language",),
    "missing_eos_penalty": ("truncation",),
    **dict.fromkeys(("mode", "threshold"), ("code", "constraints")),
    "max_tests": ("code",),
    **dict.fromkeys(("milestones", "milestone_normalise"), ("milestones",)),
    **dict.fromkeys(("step_weights", "step_events"), ("step_weighted",)),
    **dict.fromkeys(("as_messages", "files", "function", "scope", "source"), ("python",)),
    "timeout_s": (*RIGHT, *_ASKED, "code", "python", "regex", "remote"),
    "memory_mib": (*RIGHT, "code", "python", "regex"),
}

#: Names that are measured of every component, so that a function of one's own cannot call a metric so.
MEASURED = (
    "std",
    "unscorable_fraction",
    "length_correlation",
    "disagreement",
    "confidence",
    "without",
    "multiplier",
    "shortfall",
    "pair_accuracy",
)

#: Inputs of the stages that score what they sample, for components that ask a judge.
JUDGE_INPUTS = {
    "judge": InputSpec(
        "model",
        required=False,
        use="words",
        doc="Causal LM of components with kind=judge, and of a rubric's judged items.",
    ),
    "rubric": InputSpec(
        "dataset",
        kinds=("rubric_items/1",),
        required=False,
        doc="Rubric of the component with kind=rubric: a file or a dataset.",
    ),
}

#: Inputs of every stage that scores with reward components; each is needed by the kinds it names.
REWARD_INPUTS = {
    "gold": InputSpec(
        "model",
        required=False,
        doc=(
            "A second reward model, for components with kind=model and input=gold: a held-out judge beside the one that"
            " is optimised."
        ),
    ),
    "group_preference": InputSpec("model", required=False, doc="Model of components with kind=group_preference."),
    "context": InputSpec(
        "dataset",
        kinds=("ratings/1", "pairs/1", "group_preferences/1"),
        required=False,
        doc="Rated responses of the group of kind=group_preference.",
    ),
    "demonstrations": InputSpec(
        "dataset", kinds=("demonstrations/1",), required=False, doc="What components with kind=icdpo retrieve from."
    ),
    "principles": InputSpec(
        "dataset",
        kinds=("principles/1",),
        required=False,
        doc=(
            "Specifications: {principle} in a judge_prompt is the text of the one that the prompt's column "
            "category names (synth.deliberative)."
        ),
    ),
}


class RewardComponent(StageConfig):
    """One component of a reward: what it scores, its weight, and its options."""

    name: str = Field("reward", min_length=1, description="Name under which its values are stored and plotted.")
    kind: Literal[
        "verifier",
        "model",
        "judge",
        "format",
        "length",
        "truncation",
        "regex",
        "constraints",
        "code",
        "python",
        "rubric",
        "group_preference",
        "icdpo",
        "majority",
        "length_group",
        "length_target",
        "length_penalty",
        "language",
        "environment",
        "milestones",
        "step_weighted",
        "debate",
        "remote",
    ] = Field(
        description=(
            "verifier: gold answer; model: a reward model; remote: one behind a URL; judge: a language model's opinion;"
            " format: tags; length: DAPO soft overlong; truncation: no end token; regex: a pattern; constraints: IFEval"
            " checkers; code: unit tests; python: your own function; rubric: the items of the input rubric (GRAPE);"
            " group_preference: the rating that a group would give, from its ratings in the input context (rm.gpo);"
            " icdpo: how much retrieved demonstrations raise the answer's likelihood (rs.icdpo); majority: 1 for the"
            " answer that most of the prompt's samples give, 0 for others, without a gold answer (rs.majority);"
            " length_group: short right answers of a prompt earn more (Kimi k1.5); length_target: the length that the"
            " prompt row asks for (L1); length_penalty: every token costs the same (INTELLECT-2); language: share of"
            " words in the script of the prompt's language, code and formulas aside (DeepSeek-R1). Of trajectories:"
            " environment: what it paid, right where it verified the goal; milestones: events that pay once;"
            " step_weighted: indicators per turn; debate: a judge's verdict, zero-sum."
        )
    )
    weight: float = Field(
        1.0, description="Factor in the total; unset: 0.1 for format and language (reward.composite), 1 for the others."
    )
    domains: list[str] = Field(
        default_factory=list,
        description=(
            "Only prompts whose column domain is one of these are scored, and the others do without it"
            " (reward.domain_route); empty: all. A prompt with reward_route is scored by the kinds and names listed"
            " there only."
        ),
    )
    at_least: float | None = Field(
        None,
        title="At least",
        description=(
            "rl: hold the mean of this component at or above so much, and raise the others under that constraint"
            " (reward.constrained): its factor is a Lagrange multiplier, max(0, multiplier + multiplier_step (at_least"
            " - mean)) after every batch, which starts at weight (unset: 0)."
        ),
    )
    multiplier_step: float = Field(
        0.1,
        gt=0,
        description=(
            "at_least: how far the multiplier moves per batch and unit that the mean falls short by (0.1 is ours)."
        ),
    )
    from_step: int = Field(
        0,
        ge=0,
        description=(
            "rl: optimizer step from which on the component counts; before, it is scored and stored only (Kimi k1.5 "
            "adds its length reward late)."
        ),
    )
    on_missing: Literal["invalidate", "skip", "renormalise"] | None = Field(
        None,
        title="On missing",
        description=(
            "When unscorable: drop the row from training, drop the term, or rescale the other terms. "
            "Unset: invalidate for verifier, code, python, model, judge and rubric, skip for the others."
        ),
    )
    tier: Literal["", "rule", "learned", "judge"] = Field(
        "",
        description=(
            "Components with a tier are a cascade of which one counts (REWARD-ROUTER): the rule where it can "
            "score, else the reward model where it is sure enough, else the judge. A later tier is not asked."
        ),
    )
    min_confidence: float = Field(
        0.7,
        ge=0.5,
        le=1,
        description=(
            "tier=learned: probability of its own opinion, max(p, 1-p) with p = sigmoid(score), that counts (0.7 is"
            " ours)."
        ),
    )
    audit_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "tier=learned or judge: share of the prompts whose answers it scores although an earlier tier decided, to log"
            " how far the two agree (reward/tier_agreement); these scores are stored and do not count. 0 = none."
        ),
    )
    view: Literal["full", "answer_only", "think_only"] = Field(
        "full",
        description=(
            "Part of the response it sees (reward.view). Unset: answer_only, what follows the thought where there is"
            " one, for verifier, code, constraints, majority, length_group and length_target; full for the others."
        ),
    )
    correct_value: float = Field(1.0, description="verifier: value of a right answer (DAPO 1, Tulu 3 10).")
    incorrect_value: float = Field(0.0, description="verifier: value of a wrong answer (DAPO -1).")
    verifier: Literal["auto", "world", "math", "text", "mc", "gsm8k", "string_f1", "ifeval"] = Field(
        "auto",
        description=(
            "verifier: which one; auto reads the prompt row. gsm8k: the last number; string_f1: F1 of the words"
            " (SQuAD), between incorrect_value and correct_value; ifeval: share of the row's constraints, likewise"
            " (open-instruct)."
        ),
    )
    extraction: Literal["strict", "flexible"] = Field(
        "strict",
        description="verifier, majority: flexible also takes the last number or a bare letter; for evaluation.",
    )
    rel_tol: float = Field(
        0.0,
        ge=0,
        description=(
            "verifier, numbers: relative difference from the gold answer that still counts as right, for measured"
            " quantities; 0: exact."
        ),
    )
    symbolic: bool = Field(
        False,
        description=(
            "verifier, length_group, length_target, of mathematics: an answer that is not equal as written is right"
            " where sympy proves it equal (\\sqrt{8} and 2\\sqrt{2}); timeout_s and memory_mib limit a comparison, and"
            " one that exceeds them stays wrong and counts in NAME/undecided."
        ),
    )
    input: str = Field(
        "reward_model",
        description=(
            "model, judge: the stage input that holds the model, for example gold for a second one (judge: `judge`"
            " where that is given)."
        ),
    )
    step_credit: Literal["none", "each", "mean", "difference", "min", "log"] = Field(
        "none",
        title="Step credit",
        description=(
            "model of objective=prm: its steps are paid one by one, at their last tokens (rl with advantage=gae,"
            " reward_to_go, turn_returns or leave_one_out): each step its score, or its share of the mean, its"
            " difference from the step before, the lowest score at its step and 0 elsewhere, or its log; the value is"
            " their sum. none: the solution's score at its end. clip bounds every credit; of a cut answer the finished"
            " steps are paid, and its end earns no_eos_reward."
        ),
    )
    ranking: Literal["round_robin", "tournament", "baseline"] = Field(
        "round_robin",
        description=(
            "model, judge that compare: mean win probability against all other answers of the prompt (rs.rank), a"
            " knock-out (rm.t2t_pair), or the logit of winning against one of them, drawn (rs.rso)."
        ),
    )
    judge_mode: Literal["score", "reference", "additive", "preference", "verdict"] = Field(
        "score",
        description=(
            "judge: expected score 1..10 as [-1, 1], the same with the reference answer shown, points 0..5 of written"
            " reviews (self-rewarding), letter probabilities, or written verdicts."
        ),
    )
    judge_samples: int = Field(
        3,
        ge=1,
        title="Judge samples",
        description="judge_mode=additive: reviews of each answer, at temperature 0.7; their mean counts.",
    )
    judge_prompt: str = Field(
        "",
        description=(
            "judge: template with {context}, {a}, and {b} or {reference}; {principle} is the text of the principle that"
            " the prompt's category names (input principles); empty: the built-in one of the mode."
        ),
    )
    endpoint: ServerBase = Field(
        "",
        description=(
            "judge: base URL of a server with the OpenAI chat interface; empty: the local model of `input`. A result is"
            " known by endpoint_model and not by this."
        ),
        json_schema_extra={"identity": "given", "address": True},
    )
    endpoint_model: str = Field(
        "",
        description=(
            "judge, remote: name of the model on the server; of a remote one it, not the URL, says what scores: other"
            " scores need another name."
        ),
    )
    key_variable: KeyVariable = Field(
        "",
        description="judge, remote: environment variable with the server's key.",
        json_schema_extra={"identity": ""},
    )
    concurrency: int = Field(
        8,
        ge=1,
        description="judge, remote: requests to the server under way at once.",
        json_schema_extra={"identity": False},
    )
    url: ServerAddress = Field(
        "",
        title="URL",
        description="remote: where batches of answers are posted, for example http://HOST:5000/get_reward.",
        json_schema_extra={"identity": False, "address": True},
    )
    batch_size: int = Field(
        32, ge=1, description="remote: answers in one request (32 is ours).", json_schema_extra={"identity": False}
    )
    request_form: Literal["openrlhf", "messages"] = Field(
        "openrlhf",
        description=(
            "remote: what is posted: OpenRLHF's query, prompts and labels, texts with the policy's template; or"
            " messages, answers and rows (stages/reward/remote_rewards.py)."
        ),
    )
    score_key: str = Field(
        "rewards",
        min_length=1,
        description="remote: name of the list of numbers in the server's answer (OpenRLHF rewards).",
    )
    judge_tokens: int = Field(
        2048,
        ge=1,
        description=(
            "judge, verdict, additive and rubric: tokens of an answer (explanation and verdict, or critique) at most, and what a"
            " local judge has positions for (MT-Bench 2048)."
        ),
    )
    judge_retries: int = Field(
        3,
        ge=0,
        description=(
            "judge, verdict, additive and rubric: times an unreadable answer is asked for again, with what is wrong with it (3 is"
            " ours)."
        ),
    )
    rubric_normalizer: Literal["paper", "weighted", "plain"] = Field(
        "paper",
        description=(
            "rubric: rho sum(w tau phi)/sum(phi), which unequal weights can push above 1; "
            "sum(w tau phi)/sum(w phi); or sum(w tau), confidence ignored."
        ),
    )
    invalid_policy: Literal["drop_sample", "drop_item", "zero_score", "error"] = Field(
        "drop_sample",
        description=(
            "rubric, an item without a score: the answer gets no reward and is not trained on; its other items decide;"
            " the item counts 0; fail."
        ),
    )
    flag_below: float = Field(
        0.6,
        ge=0,
        le=1,
        description=(
            "rubric: items with a mean confidence below this are flagged for review; rewards do not change (0.6 is"
            " ours)."
        ),
    )
    violation_below: float = Field(
        0.5,
        gt=0,
        le=1,
        description=(
            "rubric, evaluate: an answer violates an item (a clause of a specification) whose score is below this"
            " (eval.conformance; 0.5 is ours)."
        ),
    )
    rm_squash: Literal["auto", "raw", "sigmoid", "minmax"] = Field(
        "auto",
        description=(
            "rubric: scores of reward-model items; auto is raw where the item is the category's only one, else sigmoid."
        ),
    )
    category: str = Field(
        "", description="rubric: category of prompts that have none; an unknown category is always an error."
    )
    no_eos_reward: float | None = Field(
        None,
        title="Reward without end token",
        description=(
            "model, judge: score of a cut response, which the model never sees; unset: -1, below the average of"
            " calibrated scores (reward.truncation), or 0 where squash=sigmoid makes them probabilities. remote: unset"
            " shows it to the server, with its finish reason or without end token."
        ),
    )
    empty_reward: float = Field(-1.0, description="model, judge: score of an empty response (rm.score_rules).")
    clip: float | None = Field(
        None, gt=0, title="Clip", description="model, remote: scores are clipped to [-clip, clip]."
    )
    squash: Literal["none", "sigmoid"] = Field("none", description="model, remote: squash scores to (0, 1).")
    normalise: Literal["none", "batch"] = Field(
        "none",
        description=(
            "model, remote: whiten the scores of one batch of responses, before clip and squash (rm.calibrate); "
            "not for evaluation, where runs must stay comparable."
        ),
    )
    group: str = Field(
        "",
        description=(
            "group_preference: the group whose rows of the input `context` are what is known of its preferences."
        ),
    )
    votes_of: str = Field(
        "",
        description=(
            "majority: component whose values, 0 or more, are the weights of the votes (squash=sigmoid makes scores "
            "probabilities); empty: one each."
        ),
    )
    num_demonstrations: int = Field(
        4, ge=1, description="icdpo: demonstrations shown, of the input `demonstrations` (ours 4)."
    )
    coarse_demonstrations: int = Field(
        32,
        ge=1,
        description=(
            "icdpo: candidates that TF-IDF cosine keeps before the model's own similarity orders them (ours 32)."
        ),
    )
    demonstration_length: int = Field(
        1024,
        ge=8,
        description=(
            "icdpo: tokens of prompt and demonstrations at most; the least similar ones are left out until it fits."
        ),
    )
    preset: Literal["think_answer", "think_only", "answer_mark"] = Field(
        "think_answer", description="format: required structure (reward.format)."
    )
    prefilled: str = Field(
        "", description="format: text that the chat template already opened, prepended before the check."
    )
    pattern: str = Field("", description="regex: pattern that must be found; dots match line ends.")
    max_length: int = Field(64, ge=1, description="length: cap L_max in tokens, end token included.")
    cache_length: int = Field(
        16, ge=0, description="length: the last L_cache tokens before the cap are punished linearly."
    )
    length_alpha: float = Field(
        3e-4,
        ge=0,
        description=(
            "length_target: reward per token away from extra_json.target_length (L1 0.0003); length_penalty: cost of "
            "a token (0.0003 is ours)."
        ),
    )
    length_delta: float = Field(
        0.5,
        description="length_target, length_mode=max: reward of a right answer of exactly the target length (L1 0.5).",
    )
    length_mode: Literal["exact", "max"] = Field(
        "exact", description="length_target: the target is to be met, or not to be exceeded."
    )
    language_unit: Literal["word", "char"] = Field(
        "word", description="language: share of words, an ideograph being one, or of letters."
    )
    missing_eos_penalty: float = Field(
        1.0, ge=0, description="truncation: a response without end token gets minus this, others 0."
    )
    mode: Literal["all", "fraction", "threshold"] = Field(
        "all", description="code, constraints: all must pass, their share, or a share above the threshold."
    )
    threshold: float = Field(
        1.0, gt=0, le=1, description="code, constraints: share needed in mode threshold (inclusive)."
    )
    max_tests: int | None = Field(
        None,
        ge=1,
        description=(
            "code: of a prompt with more tests only those with the longest inputs are run, the hardest ones, such as"
            " 15; empty = all, as benchmarks do."
        ),
    )
    milestones: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "milestones: event (or a regular expression for the whole event) -> reward, paid once per "
            "episode; empty: the catalogue of computer use, web.0 to search.2 (MILESTONE)."
        ),
    )
    milestone_normalise: Literal["none", "category_sum"] = Field(
        "none",
        description=(
            "milestones: rewards as written, or divided by the sum of their category, the part "
            "of the name before the first dot."
        ),
    )
    step_weights: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "step_weighted: weight of each indicator, summing to 1; empty: nav .1, ui .2, form .2, file .3, goal .2."
        ),
    )
    step_events: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "step_weighted: event behind an indicator; empty: nav url_changed, ui ui_match, form fields:done/expected, "
            "file file_created, goal goal_verified; an indicator without entry is its own event."
        ),
    )
    blend: bool = Field(
        False,
        description=(
            "The weights of the components with blend=true lie in [0, 1] and sum to 1; an absent one is renormalised"
            " away, or counts 0 with on_missing=skip (REWARD-BLEND)."
        ),
    )
    source: str = Field(
        "",
        description=(
            "python: text, or path ending in .py, that defines score(prompt, completion, answer) -> number, bool, None,"
            " or dict with `reward` (or `score`), more numbers, its metrics, and `feedback`, a text. Its parameters may"
            " also be, by name: messages, row, completion_ids, finish_reason, columns of the row (TRL), data_source,"
            " solution_str, ground_truth, extra_info (verl)."
        ),
    )
    function: str = Field(
        "",
        description=(
            "python: which function of source scores, where it is not called score or compute_score; the component has"
            " its name unless it is given one."
        ),
    )
    scope: Literal["row", "group"] = Field(
        "row",
        description=(
            "python: score() is called for one answer, or once for all answers to a prompt, with lists, and returns a"
            " list (TRL)."
        ),
    )
    as_messages: bool = Field(
        False,
        description=(
            "python: completion and completions are lists of one message, [{role: assistant, content: TEXT}], as TRL's"
            " trainers give them where prompts are conversational; otherwise a completion is its text."
        ),
    )
    files: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "python: files and folders that score() may read, beside Python's own; write a list of paths. Kept with the"
            " digests of what they hold, so that other contents are another stage."
        ),
    )
    timeout_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description=(
            "code, python, regex, symbolic: wall seconds per row, group or test; a hang costs no more. remote: of a"
            " request, 60 unless given. A test with a timeout_s of its own gets that."
        ),
    )
    memory_mib: int = Field(1024, ge=128, description="code, python, regex, symbolic: memory of a worker.")

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, values):
        if isinstance(values, dict) and "name" not in values and "kind" in values:
            values = {**values, "name": values.get("function") or values["kind"]}
        if isinstance(values, dict):
            values = (
                ({"timeout_s": 60.0} if values.get("kind") == "remote" else {})
                | ({"weight": 0.1} if values.get("kind") in ("format", "language") else {})
                | ({"view": "answer_only"} if values.get("kind") in VERIFYING else {})
                | ({"weight": 0.0} if values.get("at_least") is not None else {})
                | values
            )
        if isinstance(values, dict) and str(values.get("source", "")).endswith(".py") and "\n" not in values["source"]:
            try:  # the text itself becomes the setting: another function is another stage
                values = {**values, "source": read_text(values["source"])}
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"source {values['source']!r} cannot be read ({getattr(error, 'strerror', None) or error}); write the path of a Python file,"
                    " or its text"
                ) from None
        if isinstance(values, dict) and isinstance(values.get("files"), (list, str)):
            values = {
                **values,
                "files": digests_of([values["files"]] if isinstance(values["files"], str) else values["files"]),
            }
        return values

    @model_validator(mode="after")
    def _check(self):
        for text in _refusals(self):
            raise ValueError(f"reward {self.name!r}: {text}")
        if self.step_weights:
            from stages.acting.agent_rewards import check_step_weights

            check_step_weights(self.step_weights)
        return self

    @property
    def called(self) -> str:
        """``source`` with the function that scores under the name by which the sandbox calls it."""
        return f"{self.source}\nscore = {self.function}\n" if self.function else self.source

    @property
    def missing_policy(self) -> str:
        if self.blend and self.on_missing is None:
            return "renormalise"
        return self.on_missing or ("invalidate" if self.kind in PRIMARY else "skip")

    @property
    def counts(self) -> bool:
        """Whether its value may enter the total; one of weight 0 is only watched, unless its weight is a multiplier
        (``at_least``).
        """
        return bool(self.weight) or self.at_least is not None

    @property
    def learned(self) -> bool:
        """Whether a model scores whole answers, which can be right or wrong about which of two is better."""
        return self.kind in (*_SCORED, "remote") and self.step_credit == "none"

    @property
    def cut_reward(self) -> float:
        """What a model says of a cut response, which it never sees (reward.truncation)."""
        return self.no_eos_reward if self.no_eos_reward is not None else 0.0 if self.squash == "sigmoid" else CUT_REWARD


# -- what is refused: why, and what to write instead ---------------------------------------------------------------


def _refusals(c: RewardComponent) -> Iterator[str]:
    """Why a component cannot be, in the order in which users are told."""
    if c.kind == "length" and c.cache_length > c.max_length:
        yield f"cache_length {c.cache_length} exceeds max_length {c.max_length}; write a smaller cache_length"
    yield from _judge_refusals(c)
    yield from _company_refusals(c)
    if c.kind == "regex" and not c.pattern:
        yield "kind regex needs pattern: write the pattern that a good response contains"
    if c.kind == "python":
        yield from _python_refusals(c)
    if c.kind == "remote":
        yield from _remote_refusals(c)
    for name, kinds in OF_KINDS.items():
        if c.kind not in kinds and getattr(c, name) != _default(c, name):
            yield f"{name} is for kind {' or '.join(kinds)}; {c.kind} does not read it, leave it out"
    if c.tier != "learned" and c.min_confidence != _default(c, "min_confidence"):
        yield (
            "min_confidence says when the model of a cascade decides; write tier: learned (with others of tier rule and"
            " judge), or leave it out"
        )
    if c.tier not in ("learned", "judge") and c.audit_fraction:
        yield (
            "audit_fraction asks a later tier of a cascade about what an earlier one decided; write tier: judge (or"
            " learned, with others of earlier tiers), or leave it out"
        )
    yield from _step_refusals(c)
    yield from _constraint_refusals(c)
    if c.symbolic and c.verifier not in ("auto", "math"):
        yield (
            f"symbolic is for the verifier math; verifier={c.verifier} compares no formulas, write verifier=math (or"
            " auto), or leave symbolic out"
        )
    if c.scope == "group" and c.tier not in ("", "rule"):
        yield (
            f"scope=group sees all answers to a prompt, and tier={c.tier} only those that an earlier tier left; write"
            " scope=row, or tier=rule"
        )
    for name in c.milestones:
        if error := _no_pattern(name):
            yield (
                f"milestone {name!r} is no regular expression ({error}); write {re.escape(name)!r} for an event of that"
                " name"
            )


def _default(c: RewardComponent, name: str):
    return type(c).model_fields[name].get_default(call_default_factory=True)


def _no_pattern(text: str) -> re.error | None:
    try:
        re.compile(text)
    except re.error as error:
        return error
    return None


def _judge_refusals(c: RewardComponent) -> Iterator[str]:
    """Of what is asked of a judge."""
    if c.kind in ("judge", "rubric", "debate") and c.endpoint and not c.endpoint_model:
        yield "endpoint needs endpoint_model, the name of the model on that server"
    if c.ranking != "round_robin" and c.kind == "judge" and c.judge_mode != "preference":
        yield (
            f"ranking={c.ranking} is made of probabilities of winning, which judge_mode={c.judge_mode} does not give;"
            " write judge_mode=preference, or leave ranking out"
        )
    if c.kind == "debate" and c.judge_mode == "additive":
        yield "a debate's judge compares two cases, and judge_mode=additive reviews one; write preference or verdict"
    if c.kind == "judge" and c.judge_samples != 3 and c.judge_mode != "additive":
        yield (
            f"judge_samples={c.judge_samples} is of written reviews, which judge_mode={c.judge_mode} does not ask for;"
            " write judge_mode=additive, or leave judge_samples out"
        )
    if not c.judge_prompt:
        return
    try:
        filled, failed = c.judge_prompt.format(context="c", a="a", b="b", reference="r", principle="p"), None
    except (KeyError, IndexError, ValueError) as error:
        filled, failed = "", error
    if failed is not None:
        yield (
            f"judge_prompt cannot be filled ({failed!r}); its fields are {{context}}, {{a}}, {{b}}, {{reference}} and"
            " {principle}, and other braces are doubled"
        )
    if filled == c.judge_prompt.replace("{{", "{").replace("}}", "}"):
        yield "judge_prompt shows the judge nothing; write at least {a} in it"


def _company_refusals(c: RewardComponent) -> Iterator[str]:
    """Of what a component reads beside an answer: domains, other components, a group of people."""
    if c.domains and (c.tier or c.kind in READ_OTHERS):
        yield (
            f"domains is not for {f'tier={c.tier}' if c.tier else f'kind {c.kind}'}, which reads what other components"
            " said of every prompt; leave one of them out"
        )
    if c.kind == "majority" and c.tier:
        yield (
            "tier is not for kind majority, which compares all answers to a prompt after the other components have said"
            " theirs; leave tier out"
        )
    if c.kind == "group_preference" and not c.group:
        yield "kind group_preference needs group=NAME, a group of the input `context`"


def _python_refusals(c: RewardComponent) -> Iterator[str]:
    """Of a user's own function."""
    called = re.escape(c.function) or "(?:compute_)?score"
    if not re.search(rf"\bdef (?:{called})\b|^{called} *=", c.source, re.MULTILINE):
        named = re.findall(r"^(?:async +)?def +(\w+)", c.source, re.MULTILINE)
        yield (
            f"kind python needs source with a function {c.function or 'score'}(prompt, completion, answer)"
            + (
                f"; this one defines {', '.join(named[:9])}. Write function: {named[0] if len(named) == 1 else 'NAME'};"
                " one of TRL's, of the lists completions and **kwargs, needs scope: group besides, and"
                " as_messages: true where it reads completion[0]['content']"
                if named
                else "; write the path of a file that ends in .py and defines one"
            )
        )
    try:
        compile(c.source, "<source>", "exec")
    except (SyntaxError, ValueError) as error:
        yield (
            f"source is no Python: {getattr(error, 'msg', error)}, line {getattr(error, 'lineno', '?')}:"
            f" {str(getattr(error, 'text', '') or '').strip()!r}; mend it"
        )


def _remote_refusals(c: RewardComponent) -> Iterator[str]:
    """Of a server that scores."""
    if not re.match(r"https?://[^/\s]", c.url):
        yield (
            f"kind remote needs the address that answers are posted to; write url=http://HOST:PORT/PATH, not {c.url!r}"
        )
    if not c.endpoint_model:
        yield (
            "kind remote needs endpoint_model, a name for what scores behind the URL; the name is part of what a result"
            " is known by, the URL is not"
        )
    if c.endpoint or c.empty_reward != _default(c, "empty_reward"):
        yield (
            "kind remote reads no"
            f" {'endpoint, write url' if c.endpoint else 'empty_reward, the server is shown empty answers too'};"
            " leave it out"
        )


def _step_refusals(c: RewardComponent) -> Iterator[str]:
    """Of paying the steps of an answer one by one."""
    if c.step_credit == "none":
        return
    for name, plain in (
        ("view", "full"),
        ("squash", "none"),
        ("normalise", "none"),
        ("tier", ""),
        ("ranking", "round_robin"),
    ):
        if getattr(c, name) != plain:
            yield (
                f"step_credit={c.step_credit} pays the steps of the whole text by the model's probabilities, which"
                f" {name}={getattr(c, name)} does not go with; leave {name} out, or write step_credit=none"
            )


def _constraint_refusals(c: RewardComponent) -> Iterator[str]:
    """Of a mean that is held by a multiplier."""
    if c.at_least is None:
        if c.multiplier_step != _default(c, "multiplier_step"):
            yield "multiplier_step moves the multiplier of a constraint; write at_least=NUMBER, or leave it out"
        return
    refused = {
        f"weight={c.weight:g} is where its multiplier starts, which is never below 0; write weight: 0": c.weight < 0,
        f"tier={c.tier} counts for some answers only; leave tier out": bool(c.tier),
        "blend=true fixes its weight; leave blend out": c.blend,
        f"from_step={c.from_step} would let the multiplier grow before it counts; leave from_step out": c.from_step > 0,
        "normalise=batch makes its mean 0 in every batch; leave normalise out": c.normalise != "none",
    }
    for text in (text for text, on in refused.items() if on):
        yield f"at_least={c.at_least:g} holds its mean by a multiplier, and {text}"


def _fixed(component: RewardComponent) -> RewardComponent:
    if component.at_least is not None:
        raise ValueError(
            f"reward {component.name!r}: at_least moves a multiplier from batch to batch of training, which the stage"
            " rl has alone; write a weight instead"
        )
    return component


#: A component of stages that do not train on what it says.
FixedComponent = Annotated[RewardComponent, AfterValidator(_fixed)]


def digests_of(paths: list) -> dict[str, str]:
    """Absolute path -> digest of the file, or of all files of the folder."""
    from storage.files import sha256_file, tree_digest

    found = {}
    for path in paths:
        place = Path(path).resolve()
        try:
            found[str(place)] = tree_digest(place) if place.is_dir() else sha256_file(place)
        except OSError as error:
            raise ValueError(
                f"files: {str(path)!r} cannot be read ({error.strerror}); write paths of files or folders that are"
                " there"
            ) from None
    return found
