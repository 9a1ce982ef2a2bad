"""Rewards: a named, weighted list of components, each scored and stored separately.

    rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
    for scored in rewards.score(rows): scored.total, scored.parts, scored.reasons, scored.correct

A component gives every row a value or `Unscorable(reason)`, never a silent zero. The total is the weighted sum of what was
scored (reward.composite): a missing primary component (verifier, code, python, model) makes the whole row unscorable, a missing
shaping term (format, length, ...) is skipped, unless `on_missing` says otherwise. Code that others wrote runs in the sandbox.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from stages.acting.environments import GOAL
from stages.spec import InputSpec, StageConfig

PRIMARY = ("verifier", "code", "python", "model", "judge", "rubric", "group_preference", "icdpo", "majority", "environment", "debate", "remote")
ON_TURNS = ("environment", "milestones", "step_weighted")  # score trajectories, a number per turn
LENGTH_KINDS = ("length", "length_group", "length_target", "length_penalty", "truncation")
VERIFYING = ("verifier", "code", "constraints", "majority", "length_group", "length_target")  # judge the final answer: they do not see the thought before it
READ_OTHERS = ("majority", "length_group", "length_target")  # scored last: they read what the other components said
TIERS = ("rule", "learned", "judge")
_RIGHT = ("verifier", "length_group", "length_target")  # ask a verifier whether an answer is right
_SCORED = ("model", "judge", "group_preference")  # a model's number
_ASKED = ("judge", "debate", "rubric")  # a language model's words
#: Kinds that read a setting; others refuse it. What is not named here every kind reads.
OF_KINDS: dict[str, tuple[str, ...]] = {
    "view": (*_RIGHT, *_SCORED, "majority", "remote", "format", "regex", "constraints", "code", "python", "language", "rubric"),
    **dict.fromkeys(("correct_value", "incorrect_value"), ("verifier",)), **dict.fromkeys(("verifier", "rel_tol", "symbolic"), _RIGHT), "extraction": (*_RIGHT, "majority"),
    "input": (*_SCORED, "icdpo", "debate", "rubric"), "ranking": ("model", "judge"), "step_credit": ("model",), **dict.fromkeys(("judge_mode", "judge_prompt"), ("judge", "debate")),
    "endpoint": _ASKED, **dict.fromkeys(("endpoint_model", "key_variable", "concurrency"), (*_ASKED, "remote")), **dict.fromkeys(("judge_tokens", "judge_retries"), _ASKED),
    **dict.fromkeys(("url", "batch_size", "request_form", "score_key"), ("remote",)),
    **dict.fromkeys(("rubric_normalizer", "invalid_policy", "flag_below", "violation_below", "rm_squash", "category"), ("rubric",)),
    "empty_reward": _SCORED, **dict.fromkeys(("no_eos_reward", "clip", "squash", "normalise"), (*_SCORED, "remote")), "group": ("group_preference",), "votes_of": ("majority",),
    **dict.fromkeys(("num_demonstrations", "coarse_demonstrations", "demonstration_length"), ("icdpo",)), **dict.fromkeys(("preset", "prefilled"), ("format",)), "pattern": ("regex",),
    **dict.fromkeys(("max_length", "cache_length"), ("length",)), "length_alpha": ("length_target", "length_penalty"), **dict.fromkeys(("length_delta", "length_mode"), ("length_target",)),
    "language_unit": ("language",), "missing_eos_penalty": ("truncation",), **dict.fromkeys(("mode", "threshold"), ("code", "constraints")), "max_tests": ("code",),
    **dict.fromkeys(("milestones", "milestone_normalise"), ("milestones",)), **dict.fromkeys(("step_weights", "step_events"), ("step_weighted",)),
    **dict.fromkeys(("files", "scope", "source"), ("python",)), "timeout_s": (*_RIGHT, *_ASKED, "code", "python", "regex", "remote"), "memory_mib": (*_RIGHT, "code", "python", "regex")}
#: Names that are measured of every component, so that a function of one's own cannot call a metric so.
MEASURED = ("std", "unscorable_fraction", "length_correlation", "disagreement", "confidence", "without", "multiplier", "shortfall", "pair_accuracy")
#: Inputs of every stage that scores with reward components; each is needed by the kinds it names.
REWARD_INPUTS = {
    "gold": InputSpec("model", required=False, doc="A second reward model, for components with kind=model and input=gold: a held-out judge beside the one that is optimised."),
    "group_preference": InputSpec("model", required=False, doc="Model of components with kind=group_preference."),
    "context": InputSpec("dataset", kinds=("ratings/1", "pairs/1", "group_preferences/1"), required=False, doc="Rated responses of the group of "
                                                                                                               "kind=group_preference."),
    "demonstrations": InputSpec("dataset", kinds=("demonstrations/1",), required=False, doc="What components with kind=icdpo retrieve from."),
    "principles": InputSpec("dataset", kinds=("principles/1",), required=False, doc="Specifications: {principle} in a judge_prompt is the text of the one that the prompt's column "
                                                                                   "category names (synth.deliberative).")}


class RewardComponent(StageConfig):
    """One component of a reward: what it scores, its weight, and its options."""

    name: str = Field("reward", min_length=1, description="Name under which its values are stored and plotted.")
    kind: Literal["verifier", "model", "judge", "format", "length", "truncation", "regex", "constraints", "code", "python", "rubric", "group_preference",
                  "icdpo", "majority", "length_group", "length_target", "length_penalty", "language", "environment", "milestones", "step_weighted", "debate", "remote"] = Field(
        description="verifier: gold answer; model: a reward model; remote: one behind a URL; judge: a language model's opinion; format: tags; length: DAPO soft overlong; truncation: no end token; "
                    "regex: a pattern; constraints: IFEval checkers; code: unit tests; python: your own function; rubric: the items of the input rubric (GRAPE); "
                    "group_preference: the rating that a group would give, from its ratings in the input context (rm.gpo); "
                    "icdpo: how much retrieved demonstrations raise the answer's likelihood (rs.icdpo); "
                    "majority: 1 for the answer that most of the prompt's samples give, 0 for others, without a gold answer (rs.majority); "
                    "length_group: short right answers of a prompt earn more (Kimi k1.5); length_target: the length that the prompt row asks for (L1); "
                    "length_penalty: every token costs the same (INTELLECT-2); "
                    "language: share of words in the script of the prompt's language, code and formulas aside (DeepSeek-R1). "
                    "Of trajectories: environment: what it paid, right where it verified the goal; milestones: events that pay once; step_weighted: indicators per turn; "
                    "debate: a judge's verdict, zero-sum.")
    weight: float = Field(1.0, description="Factor in the total; unset: 0.1 for format and language (reward.composite), 1 for the others.")
    domains: list[str] = Field(default_factory=list, description="Only prompts whose column domain is one of these are scored, and the others do without it (reward.domain_route); empty: all. "
                                                                 "A prompt with reward_route is scored by the kinds and names listed there only.")
    at_least: float | None = Field(None, title="At least", description="rl: hold the mean of this component at or above so much, and raise the others under that constraint (reward.constrained): its "
                                   "factor is a Lagrange multiplier, max(0, multiplier + multiplier_step (at_least - mean)) after every batch, which starts at weight (unset: 0).")
    multiplier_step: float = Field(0.1, gt=0, description="at_least: how far the multiplier moves per batch and unit that the mean falls short by (0.1 is ours).")
    from_step: int = Field(0, ge=0, description="rl: optimizer step from which on the component counts; before, it is scored and stored only (Kimi k1.5 "
                                                "adds its length reward late).")
    on_missing: Literal["invalidate", "skip", "renormalise"] | None = Field(
        None, title="On missing", description="When unscorable: drop the row from training, drop the term, or rescale the other terms. "
        "Unset: invalidate for verifier, code, python, model, judge and rubric, skip for the others.")
    tier: Literal["", "rule", "learned", "judge"] = Field(
        "", description="Components with a tier are a cascade of which one counts (REWARD-ROUTER): the rule where it can "
        "score, else the reward model where it is sure enough, else the judge. A later tier is not asked.")
    min_confidence: float = Field(
        0.7, ge=0.5, le=1, description="tier=learned: probability of its own opinion, max(p, 1-p) with p = sigmoid(score), that counts (0.7 is ours).")
    view: Literal["full", "answer_only", "think_only"] = Field("full", description="Part of the response it sees (reward.view). Unset: answer_only, what follows the thought where there is one, for verifier, code, constraints, "
                                                                                 "majority, length_group and length_target; full for the others.")
    correct_value: float = Field(1.0, description="verifier: value of a right answer (DAPO 1, Tulu 3 10).")
    incorrect_value: float = Field(0.0, description="verifier: value of a wrong answer (DAPO -1).")
    verifier: Literal["auto", "world", "math", "text", "mc", "gsm8k", "string_f1", "ifeval"] = Field(
        "auto", description="verifier: which one; auto reads the prompt row. gsm8k: the last number; string_f1: F1 of the words (SQuAD), between incorrect_value and correct_value; ifeval: share "
                            "of the row's constraints, likewise (open-instruct).")
    extraction: Literal["strict", "flexible"] = Field("strict", description="verifier, majority: flexible also takes the last number or a bare letter; for "
                                                                            "evaluation.")
    rel_tol: float = Field(0.0, ge=0, description="verifier, numbers: relative difference from the gold answer that still counts as right, for measured quantities; 0: exact.")
    symbolic: bool = Field(False, description="verifier, length_group, length_target, of mathematics: an answer that is not equal as written is right where sympy proves it equal (\\sqrt{8} and "
                                              "2\\sqrt{2}); timeout_s and memory_mib limit a comparison, and one that exceeds them stays wrong and counts in NAME/undecided.")
    input: str = Field("reward_model", description="model, judge: the stage input that holds the model, for example gold for a second one (judge: `judge` where that is "
                                                   "given).")
    step_credit: Literal["none", "each", "mean", "difference", "min", "log"] = Field(
        "none", title="Step credit", description="model of objective=prm: its steps are paid one by one, at their last tokens (rl with advantage=gae, reward_to_go, turn_returns or leave_one_out): "
        "each step its score, or its share of the mean, its difference from the step before, the lowest score at its step and 0 elsewhere, or its log; the value is their sum. none: the "
        "solution's score at its end. clip bounds every credit; of a cut answer the finished steps are paid, and its end earns no_eos_reward.")
    ranking: Literal["round_robin", "tournament", "baseline"] = Field("round_robin", description="model, judge that compare: mean win probability against all other answers "
                                                          "of the prompt (rs.rank), a knock-out (rm.t2t_pair), or the logit of winning against one of them, drawn (rs.rso).")
    judge_mode: Literal["score", "reference", "preference", "verdict"] = Field(
        "score", description="judge: expected score 1..10 as [-1, 1], the same with the reference answer shown, letter probabilities, or written verdicts.")
    judge_prompt: str = Field("", description="judge: template with {context}, {a}, and {b} or {reference}; {principle} is the text of the principle that the prompt's category names "
                                              "(input principles); empty: the built-in one of the mode.")
    endpoint: str = Field("", description="judge: base URL of a server with the OpenAI chat interface; empty: the local model of `input`.")
    endpoint_model: str = Field("", description="judge, remote: name of the model on the server; of a remote one it, not the URL, says what scores: other scores need another name.")
    key_variable: str = Field("", description="judge, remote: environment variable with the server's key.")
    concurrency: int = Field(8, ge=1, description="judge, remote: requests to the server under way at once.", json_schema_extra={"identity": False})
    url: str = Field("", title="URL", description="remote: where batches of answers are posted, for example http://HOST:5000/get_reward.", json_schema_extra={"identity": False})
    batch_size: int = Field(32, ge=1, description="remote: answers in one request (32 is ours).", json_schema_extra={"identity": False})
    request_form: Literal["openrlhf", "messages"] = Field("openrlhf", description="remote: what is posted: OpenRLHF's query, prompts and labels, texts with the policy's template; or messages, answers and "
                                                                                  "rows (stages/reward/remote_rewards.py).")
    score_key: str = Field("rewards", min_length=1, description="remote: name of the list of numbers in the server's answer (OpenRLHF rewards).")
    judge_tokens: int = Field(2048, ge=1, description="judge, verdict and rubric: tokens of an answer (explanation and verdict, or critique) at most, and what a local "
                                                      "judge has positions for (MT-Bench 2048).")
    judge_retries: int = Field(3, ge=0, description="judge, verdict and rubric: times an unreadable answer is asked for again, with what is wrong with it (3 is ours).")
    rubric_normalizer: Literal["paper", "weighted", "plain"] = Field(
        "paper", description="rubric: rho sum(w tau phi)/sum(phi), which unequal weights can push above 1; "
        "sum(w tau phi)/sum(w phi); or sum(w tau), confidence ignored.")
    invalid_policy: Literal["drop_sample", "drop_item", "zero_score", "error"] = Field(
        "drop_sample", description="rubric, an item without a score: the answer gets no reward and is not trained on; its other items decide; the item counts 0; fail.")
    flag_below: float = Field(0.6, ge=0, le=1, description="rubric: items with a mean confidence below this are flagged for review; rewards do not change (0.6 is ours).")
    violation_below: float = Field(0.5, gt=0, le=1, description="rubric, evaluate: an answer violates an item (a clause of a specification) whose score is below this (eval.conformance; 0.5 is ours).")
    rm_squash: Literal["auto", "raw", "sigmoid", "minmax"] = Field(
        "auto", description="rubric: scores of reward-model items; auto is raw where the item is the category's only one, else sigmoid.")
    category: str = Field("", description="rubric: category of prompts that have none; an unknown category is always an error.")
    no_eos_reward: float | None = Field(None, title="Reward without end token", description="model, judge: score of a cut response, which the model never sees; unset: -1, "
                                        "below the average of calibrated scores (reward.truncation), or 0 where squash=sigmoid makes them probabilities. remote: unset shows it to the "
                                        "server, with its finish reason or without end token.")
    empty_reward: float = Field(-1.0, description="model, judge: score of an empty response (rm.score_rules).")
    clip: float | None = Field(None, gt=0, title="Clip", description="model, remote: scores are clipped to [-clip, clip].")
    squash: Literal["none", "sigmoid"] = Field("none", description="model, remote: squash scores to (0, 1).")
    normalise: Literal["none", "batch"] = Field("none", description="model, remote: whiten the scores of one batch of responses, before clip and squash (rm.calibrate); "
                                                "not for evaluation, where runs must stay comparable.")
    group: str = Field("", description="group_preference: the group whose rows of the input `context` are what is known of its preferences.")
    votes_of: str = Field("", description="majority: component whose values, 0 or more, are the weights of the votes (squash=sigmoid makes scores "
                                          "probabilities); empty: one each.")
    num_demonstrations: int = Field(4, ge=1, description="icdpo: demonstrations shown, of the input `demonstrations` (ours 4).")
    coarse_demonstrations: int = Field(32, ge=1, description="icdpo: candidates that TF-IDF cosine keeps before the model's own similarity orders them (ours "
                                                             "32).")
    demonstration_length: int = Field(1024, ge=8, description="icdpo: tokens of prompt and demonstrations at most; the least similar ones are left out until "
                                                              "it fits.")
    preset: Literal["think_answer", "think_only", "answer_mark"] = Field("think_answer", description="format: required structure (reward.format).")
    prefilled: str = Field("", description="format: text that the chat template already opened, prepended before the check.")
    pattern: str = Field("", description="regex: pattern that must be found; dots match line ends.")
    max_length: int = Field(64, ge=1, description="length: cap L_max in tokens, end token included.")
    cache_length: int = Field(16, ge=0, description="length: the last L_cache tokens before the cap are punished linearly.")
    length_alpha: float = Field(3e-4, ge=0, description="length_target: reward per token away from extra_json.target_length (L1 0.0003); length_penalty: cost of "
                                "a token (0.0003 is ours).")
    length_delta: float = Field(0.5, description="length_target, length_mode=max: reward of a right answer of exactly the target length (L1 0.5).")
    length_mode: Literal["exact", "max"] = Field("exact", description="length_target: the target is to be met, or not to be exceeded.")
    language_unit: Literal["word", "char"] = Field("word", description="language: share of words, an ideograph being one, or of letters.")
    missing_eos_penalty: float = Field(1.0, ge=0, description="truncation: a response without end token gets minus this, others 0.")
    mode: Literal["all", "fraction", "threshold"] = Field("all", description="code, constraints: all must pass, their share, or a share above the threshold.")
    threshold: float = Field(1.0, gt=0, le=1, description="code, constraints: share needed in mode threshold (inclusive).")
    max_tests: int | None = Field(None, ge=1, description="code: of a prompt with more tests only those with the longest inputs are run, the hardest ones, such as 15; empty = all, as benchmarks do.")
    milestones: dict[str, float] = Field(default_factory=dict, description="milestones: event (or a regular expression for the whole event) -> reward, paid once per "
                                                                            "episode; empty: the catalogue of computer use, web.0 to search.2 (MILESTONE).")
    milestone_normalise: Literal["none", "category_sum"] = Field("none", description="milestones: rewards as written, or divided by the sum of their category, the part "
                                                                                      "of the name before the first dot.")
    step_weights: dict[str, float] = Field(default_factory=dict, description="step_weighted: weight of each indicator, summing to 1; empty: nav .1, ui .2, form .2, file .3, goal .2.")
    step_events: dict[str, str] = Field(default_factory=dict, description="step_weighted: event behind an indicator; empty: nav url_changed, ui ui_match, form fields:done/expected, "
                                                                          "file file_created, goal goal_verified; an indicator without entry is its own event.")
    blend: bool = Field(False, description="The weights of the components with blend=true lie in [0, 1] and sum to 1; an absent one is renormalised away, or counts 0 "
                                           "with on_missing=skip (REWARD-BLEND).")
    source: str = Field("", description="python: text, or path ending in .py, that defines score(prompt, completion, answer) -> number, bool, None, or dict with `reward` (or `score`) and more "
                                        "numbers, its metrics. Its parameters may also be, by name: messages, row, completion_ids, finish_reason, columns of the row (TRL), "
                                        "data_source, solution_str, ground_truth, extra_info (verl).")
    scope: Literal["row", "group"] = Field("row", description="python: score() is called for one answer, or once for all answers to a prompt, with lists, and returns a list (TRL).")
    files: dict[str, str] = Field(default_factory=dict, description="python: files and folders that score() may read, beside Python's own; write a list of paths. Kept with the digests of "
                                                                    "what they hold, so that other contents are another stage.")
    timeout_s: float = Field(5.0, gt=0, le=600, description="code, python, regex, symbolic: wall seconds per row, group or test; a hang costs no more. remote: of a request, 60 unless given. A test with a timeout_s of its own gets that.")
    memory_mib: int = Field(1024, ge=128, description="code, python, regex, symbolic: memory of a worker.")

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, values):
        if isinstance(values, dict) and "name" not in values and "kind" in values:
            values = {**values, "name": values["kind"]}
        if isinstance(values, dict):
            values = ({"timeout_s": 60.0} if values.get("kind") == "remote" else {}) | ({"weight": 0.1} if values.get("kind") in ("format", "language") else {}) | ({"view": "answer_only"} if values.get("kind") in VERIFYING else {}) | ({"weight": 0.0} if values.get("at_least") is not None else {}) | values
        if isinstance(values, dict) and str(values.get("source", "")).endswith(".py") and "\n" not in values["source"]:
            try:  # the text itself becomes the setting: another function is another stage
                values = {**values, "source": Path(values["source"]).read_text("utf-8")}
            except OSError as error:
                raise ValueError(f"source {values['source']!r} cannot be read ({error.strerror}); write the path of a Python file, or its text") from None
        if isinstance(values, dict) and isinstance(values.get("files"), (list, str)):
            values = {**values, "files": _digests([values["files"]] if isinstance(values["files"], str) else values["files"])}
        return values

    @model_validator(mode="after")
    def _check(self):
        if self.kind == "length" and self.cache_length > self.max_length:
            raise ValueError(f"reward {self.name!r}: cache_length {self.cache_length} exceeds max_length {self.max_length}; write a smaller cache_length")
        if self.kind in ("judge", "rubric", "debate") and self.endpoint and not self.endpoint_model:
            raise ValueError(f"reward {self.name!r}: endpoint needs endpoint_model, the name of the model on that server")
        if self.ranking != "round_robin" and self.kind == "judge" and self.judge_mode != "preference":
            raise ValueError(f"reward {self.name!r}: ranking={self.ranking} is made of probabilities of winning, which judge_mode={self.judge_mode} does not give; write judge_mode=preference, or "
                             "leave ranking out")
        if self.judge_prompt:
            try:
                filled = self.judge_prompt.format(context="c", a="a", b="b", reference="r", principle="p")
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f"reward {self.name!r}: judge_prompt cannot be filled ({error!r}); its fields are {{context}}, {{a}}, {{b}}, {{reference}} and "
                                 "{{principle}}, and other braces are doubled") from None
            if filled == self.judge_prompt.replace("{{", "{").replace("}}", "}"):
                raise ValueError(f"reward {self.name!r}: judge_prompt shows the judge nothing; write at least {{a}} in it")
        if self.domains and (self.tier or self.kind in READ_OTHERS):
            raise ValueError(f"reward {self.name!r}: domains is not for {f'tier={self.tier}' if self.tier else f'kind {self.kind}'}, which reads what other components said of every "
                             "prompt; leave one of them out")
        if self.kind == "group_preference" and not self.group:
            raise ValueError(f"reward {self.name!r}: kind group_preference needs group=NAME, a group of the input `context`")
        if self.kind == "regex" and not self.pattern:
            raise ValueError(f"reward {self.name!r}: kind regex needs pattern: write the pattern that a good response contains")
        if self.kind == "python" and not re.search(r"\bdef (?:compute_)?score\b|^(?:compute_)?score *=", self.source, re.MULTILINE):
            named = re.findall(r"^(?:async +)?def +(\w+)", self.source, re.MULTILINE)
            raise ValueError(f"reward {self.name!r}: kind python needs source with a function score(prompt, completion, answer)" + (
                f"; this one defines {', '.join(named[:5])}. Call the function score; one of TRL's, of the lists completions and **kwargs, needs scope: group besides" if named else
                "; write the path of a file that ends in .py and defines one"))
        if self.kind == "python":
            try:
                compile(self.source, "<source>", "exec")
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"reward {self.name!r}: source is no Python: {getattr(error, 'msg', error)}, line {getattr(error, 'lineno', '?')}: {str(getattr(error, 'text', '') or '').strip()!r}; mend it") from None
        if self.kind == "remote":
            if not re.match(r"https?://[^/\s]", self.url):
                raise ValueError(f"reward {self.name!r}: kind remote needs the address that answers are posted to; write url=http://HOST:PORT/PATH, not {self.url!r}")
            if not self.endpoint_model:
                raise ValueError(f"reward {self.name!r}: kind remote needs endpoint_model, a name for what scores behind the URL; the name is part of what a result is known by, the URL is not")
            if self.endpoint or self.empty_reward != type(self).model_fields["empty_reward"].default:
                raise ValueError(f"reward {self.name!r}: kind remote reads no {'endpoint, write url' if self.endpoint else 'empty_reward, the server is shown empty answers too'}; leave it out")
        for name, kinds in OF_KINDS.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"reward {self.name!r}: {name} is for kind {' or '.join(kinds)}; {self.kind} does not read it, leave it out")
        if self.tier != "learned" and self.min_confidence != type(self).model_fields["min_confidence"].default:
            raise ValueError(f"reward {self.name!r}: min_confidence says when the model of a cascade decides; write tier: learned (with others of tier rule and judge), or leave it out")
        if self.step_credit != "none":
            for name, plain in (("view", "full"), ("squash", "none"), ("normalise", "none"), ("tier", ""), ("ranking", "round_robin")):
                if getattr(self, name) != plain:
                    raise ValueError(f"reward {self.name!r}: step_credit={self.step_credit} pays the steps of the whole text by the model's probabilities, which {name}={getattr(self, name)} does not "
                                     f"go with; leave {name} out, or write step_credit=none")
        if self.at_least is None and self.multiplier_step != type(self).model_fields["multiplier_step"].default:
            raise ValueError(f"reward {self.name!r}: multiplier_step moves the multiplier of a constraint; write at_least=NUMBER, or leave it out")
        if self.at_least is not None:
            refused = {f"weight={self.weight:g} is where its multiplier starts, which is never below 0; write weight: 0": self.weight < 0,
                       f"tier={self.tier} counts for some answers only; leave tier out": bool(self.tier), "blend=true fixes its weight; leave blend out": self.blend,
                       f"from_step={self.from_step} would let the multiplier grow before it counts; leave from_step out": self.from_step > 0,
                       "normalise=batch makes its mean 0 in every batch; leave normalise out": self.normalise != "none"}
            for text in (text for text, on in refused.items() if on):
                raise ValueError(f"reward {self.name!r}: at_least={self.at_least:g} holds its mean by a multiplier, and {text}")
        if self.symbolic and self.verifier not in ("auto", "math"):
            raise ValueError(f"reward {self.name!r}: symbolic is for the verifier math; verifier={self.verifier} compares no formulas, write verifier=math (or auto), or leave symbolic out")
        if self.scope == "group" and self.tier not in ("", "rule"):
            raise ValueError(f"reward {self.name!r}: scope=group sees all answers to a prompt, and tier={self.tier} only those that an earlier tier left; write scope=row, or tier=rule")
        for name in self.milestones:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"reward {self.name!r}: milestone {name!r} is no regular expression ({error}); write {re.escape(name)!r} for an event of "
                                 "that name") from None
        if self.step_weights:
            from stages.acting.agent_rewards import check_step_weights

            check_step_weights(self.step_weights)
        return self

    @property
    def missing_policy(self) -> str:
        if self.blend and self.on_missing is None:
            return "renormalise"
        return self.on_missing or ("invalidate" if self.kind in PRIMARY else "skip")

    @property
    def counts(self) -> bool:
        """Whether its value may enter the total; one of weight 0 is only watched, unless its weight is a multiplier (``at_least``)."""
        return bool(self.weight) or self.at_least is not None

    @property
    def learned(self) -> bool:
        """Whether a model scores whole answers, which can be right or wrong about which of two is better."""
        return self.kind in (*_SCORED, "remote") and self.step_credit == "none"

    @property
    def cut_reward(self) -> float:
        """What a model says of a cut response, which it never sees (reward.truncation)."""
        return self.no_eos_reward if self.no_eos_reward is not None else 0.0 if self.squash == "sigmoid" else -1.0


def _fixed(component: RewardComponent) -> RewardComponent:
    if component.at_least is not None:
        raise ValueError(f"reward {component.name!r}: at_least moves a multiplier from batch to batch of training, which the stage rl has alone; write a weight instead")
    return component


#: A component of stages that do not train on what it says.
FixedComponent = Annotated[RewardComponent, AfterValidator(_fixed)]


@dataclass(frozen=True)
class Unscorable:
    """No value, and why. Never 0. items: what a rubric did score of it."""

    reason: str
    items: tuple[dict, ...] = ()


@dataclass
class Scored:
    """Reward of one row. total: weighted sum, None if unscorable. parts: raw value of each component, None if unscorable.
    reasons: why, by component. correct: the verdict of the first verifier or code component, None without a verdict.
    extracted: the answer that verdict was about. items: the rubric's items, where there is one. tier: of the router, the one that decided.
    weights: the factor of each counted component in the total, what absent ones left to it included. turn_rewards: of a trajectory, what each
    turn earned of the total, and turn_parts the values that components give its turns. step_rewards: (last tokens, rewards) of what
    single steps of an answer earned of the total, where a component pays them (``step_credit``)."""

    total: float | None
    parts: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    correct: bool | None = None
    extracted: str | None = None
    items: list[dict] = field(default_factory=list)
    tier: str | None = None
    weights: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] | None = None
    turn_parts: dict[str, list[float]] = field(default_factory=dict)
    step_rewards: tuple[list[int], list[float]] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a component says about one row: its value, whether the answer is right where it knows, how much an ensemble's members differ,
    a rubric's items, the value's parts by turn, what it would have been without the debate, numbers beside the value, by name, and (last token, part of
    the value) of steps that are paid."""

    value: float
    correct: bool | None = None
    extracted: str | None = None
    spread: float | None = None
    items: tuple[dict, ...] = ()
    turns: tuple[float, ...] | None = None
    without: float | None = None
    metrics: dict[str, float] | None = None
    steps: tuple[tuple[int, float], ...] | None = None


#: Reasons of a component that is not asked about a row, because an earlier tier left nothing to say or the prompt is another's business: no failure.
NOT_ASKED = "an earlier tier decided"
ANOTHERS = "the prompt is routed to other components"
#: Reason of a component that compares, of an answer that is the only one of its group: 1/2, or the majority of one, would say nothing of it.
ALONE = "there is no other answer to the prompt to compare it with"


def failures(parts: dict[str, float | None], reasons: dict[str, str] | None) -> dict[str, str]:
    """Why components could not score a row, by component."""
    found = {name: why for name, why in (reasons or {}).items() if parts.get(name) is None and why not in (NOT_ASKED, ANOTHERS)}
    return found or ({} if any(value is not None for value in parts.values()) else {name: why for name, why in (reasons or {}).items() if why == ANOTHERS})


def commonest_failure(found: Iterable[dict[str, str]]) -> str:
    """``mine: NameError ... (12 of 16)`` of the :func:`failures` of many rows, or what stands for a row without any."""
    found = list(found)
    counts = Counter(f"{name}: {why}" for one in found for name, why in one.items())
    return "{} ({} of {})".format(*counts.most_common(1)[0], len(found)) if counts else "no component gave a reason"


def build_rewards(components: Sequence[RewardComponent], inputs: dict, *, renderer=None, device: str = "cpu", frozen: str = "auto") -> "Rewards":
    """Scorers for the configured components. Reward models are loaded here, once, and stay frozen.

    inputs: stage inputs by name (a component of kind model names one of them). renderer: renders a prompt row
    when the caller does not pass its token ids. frozen: how matrices of models are kept (``frozen_dtype``). Raises ValueError naming the setting to change.
    """
    if not components:
        raise ValueError("rewards is empty; write at least one component, for example rewards=[{name: verifier, kind: verifier}]")
    names = [c.name for c in components]
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise ValueError(f"two reward components are called {repeated[0]!r}; give every component its own name")
    for component in components:
        if component.votes_of and component.votes_of not in [c.name for c in components if c.kind != "majority"]:
            raise ValueError(f"reward {component.name!r}: votes_of={component.votes_of!r} is no other component; write the name of one of them, "
                             "or leave it out")
    scorers = {}
    for component in components:
        if component.kind in ("model", "judge", "group_preference", "debate"):
            scorers[component.name] = _scorer(component, inputs, device, frozen)
        elif component.kind == "icdpo":
            scorers[component.name] = _in_context_scorer(component, inputs, renderer, device, frozen)
        elif component.kind == "rubric":
            scorers[component.name] = _rubric_scorer(component, inputs, renderer, device)
    if any(c.blend for c in components):
        from stages.acting.agent_rewards import check_blend

        check_blend({c.name: c.weight for c in components if c.blend})
        if any(c.blend and c.from_step for c in components):
            raise ValueError("the weights of a blend sum to 1 at every step; leave from_step out of its components, or write blend=false")
    tiers = [c.tier for c in components if c.tier]
    if tiers and (len(tiers) < 2 or len(set(tiers)) < len(tiers)):
        raise ValueError(f"rewards has the tiers {', '.join(tiers)}; a router needs at least two of rule, learned and judge, each of them once, or leave tier out")
    if sum(c.kind == "rubric" for c in components) > 1:
        raise ValueError("rewards has two components of kind rubric; put all items into one rubric, by category")
    return Rewards(list(components), scorers, renderer)


def _rubric_scorer(component: RewardComponent, inputs: dict, renderer, device: str):
    from stages.reward.rubric_reward import RubricScorer
    from stages.reward.rubrics import from_rows

    if "rubric" not in inputs:
        raise ValueError(f"reward {component.name!r} needs the stage input 'rubric'; give rubric=FILE (YAML, JSON or JSON Lines) or a rubric_items/1 dataset")
    return RubricScorer(component, from_rows(_dataset(inputs, "rubric").iter_rows()), inputs, renderer, device)


def _dataset(inputs: dict, name: str):
    """A dataset among the stage inputs, each of which is a path or has one."""
    from storage.datasets import open_dataset

    return open_dataset(str(getattr(inputs[name], "path", inputs[name])))


def model_input(component: RewardComponent, inputs: dict) -> str:
    """Name of the stage input that holds a component's model."""
    name = "judge" if component.kind in ("judge", "debate") and component.input == "reward_model" and "judge" in inputs else component.input
    name = {"group_preference": "group_preference", "icdpo": "model"}.get(component.kind, name) if name == "reward_model" else name
    if name not in inputs:
        raise ValueError(f"reward {component.name!r} needs the stage input {name!r}; give {name}=MODEL_REF{', or an endpoint' * (component.kind in ('judge', 'debate'))}, "
                         "or remove the component")
    return name


def inputs_read(components: Sequence[RewardComponent], given: Iterable[str]) -> set[str]:
    """Names of the stage inputs that components read where ``given`` are there. A rubric's items may name any model, so it counts as a reader of all."""
    found: set[str] = set()
    for component in components:
        if component.kind in ("model", "group_preference", "icdpo") or component.kind in ("judge", "debate") and not component.endpoint:
            named = {**dict.fromkeys(given), component.input: None, "group_preference": None, "model": None}
            found.add(model_input(component, named))
        found |= {"group_preference": {"context"}, "icdpo": {"demonstrations"}, "rubric": {"rubric", "reward_model", "judge", "gold", "group_preference"}}.get(component.kind, set())
        found |= {"principles"} if "{principle}" in component.judge_prompt else set()
    return found


def _model_path(component: RewardComponent, inputs: dict) -> str:
    name = model_input(component, inputs)
    return str(getattr(inputs[name], "path", inputs[name]))


def load_model(component: RewardComponent, inputs: dict, device: str, frozen: str = "auto"):
    """The reward model of a component."""
    from stages.reward_models.reward_scorers import load_scorer

    scorer = load_scorer(_model_path(component, inputs), device, frozen=frozen)
    if scorer.needs_group != (component.kind == "group_preference"):
        raise ValueError(f"reward {component.name!r}: the input {model_input(component, inputs)!r} is " + (
            "a group preference model, which scores in the context of a group; write kind: group_preference, group: NAME, and give context=DATASET"
            if scorer.needs_group else
            "no group preference model; give one that the stage group_preference trained, or write kind: model"))
    if component.step_credit != "none" and not hasattr(scorer, "step_probabilities"):
        raise ValueError(f"reward {component.name!r}: step_credit={component.step_credit} pays what a process reward model says of each step, and the input {model_input(component, inputs)!r} is of "
                         f"objective={scorer.card.objective}; give one that reward_model objective=prm trained, or write step_credit=none")
    scorer.ranking = component.ranking
    return scorer


def load_asked(component: RewardComponent, inputs: dict, device: str, frozen: str = "auto"):
    """The language model that a judge component asks: a server, or a local model."""
    from stages.reward.judge import LocalJudge, ServerJudge
    from stages.reward_models.reward_heads import RewardCard

    if component.endpoint:
        return ServerJudge(component.endpoint, component.endpoint_model, component.key_variable, max(component.timeout_s, 60.0), component.concurrency)
    return LocalJudge(_model_path(component, inputs), RewardCard(), device, frozen=frozen)


def _scorer(component: RewardComponent, inputs: dict, device: str, frozen: str):
    from stages.reward.judge import Judge

    if component.kind == "model":
        return load_model(component, inputs, device, frozen)
    if component.kind == "group_preference":
        return _group_scorer(component, inputs, device, frozen)
    mode, prompt = component.judge_mode, component.judge_prompt
    if component.kind == "debate":
        from stages.reward.debate import JUDGE

        mode, prompt = "verdict" if mode == "verdict" else "preference", prompt or (JUDGE if mode != "verdict" else "")
    judge = Judge(load_asked(component, inputs, device, frozen), mode, prompt=prompt, max_tokens=component.judge_tokens, retries=component.judge_retries, principles=_principles(component, inputs))
    judge.ranking = component.ranking
    return judge


def _principles(component: RewardComponent, inputs: dict) -> dict[str, str]:
    """Texts of the active principles, by id, where the judge is shown that of the prompt."""
    if "{principle}" not in component.judge_prompt:
        return {}
    if "principles" not in inputs:
        raise ValueError(f"reward {component.name!r}: judge_prompt shows {{principle}}, which the stage input 'principles' holds; give principles=FILE (stages/reward/principles.py) or a principles/1 dataset")
    found = {row["principle_id"]: row["text"] for row in _dataset(inputs, "principles").iter_rows() if row["active"] and row["text"]}
    if not found:
        raise ValueError(f"reward {component.name!r}: no principle of the input 'principles' is active and has a text, so judge_prompt has nothing to show; write active: true and a `text`")
    return found


def _group_scorer(component: RewardComponent, inputs: dict, device: str, frozen: str):
    from stages.reward_models.preference_module import points_of

    scorer = load_model(component, inputs, device, frozen)
    if "context" not in inputs:
        raise ValueError(f"reward {component.name!r} needs the stage input 'context', rated responses of the group; give context=FILE or a ratings/1 dataset")
    dataset = _dataset(inputs, "context")
    points = points_of(dataset, component.group)
    if not points:
        raise ValueError(f"reward {component.name!r}: the input context has no row of group {component.group!r}; its groups are: "
                         f"{', '.join(sorted({p.group for p in points_of(dataset)})[:20])}")
    scorer.observe(points)
    return scorer


def _in_context_scorer(component: RewardComponent, inputs: dict, renderer, device: str, frozen: str):
    from stages.chat import renderer_for
    from stages.in_context import InContextScorer
    from stages.models.modeling import load_frozen

    if "demonstrations" not in inputs:
        raise ValueError(f"reward {component.name!r} needs the stage input 'demonstrations'; give demonstrations=FILE or a demonstrations/1 dataset")
    path = _model_path(component, inputs)
    renderer = renderer or renderer_for(path)
    if renderer_for(path).vocabulary_hash != renderer.vocabulary_hash:
        raise ValueError(f"reward {component.name!r}: the model of input {component.input!r} has another tokenizer than the policy, whose token ids it would "
                         f"score; leave input out")
    return InContextScorer(load_frozen(path, device, frozen), renderer, _dataset(inputs, "demonstrations"), device=device,
                           count=component.num_demonstrations, coarse=component.coarse_demonstrations, max_tokens=component.demonstration_length)


class Rewards:
    """Verdict rows: dicts with prompt_row (a `prompts/1` row), completion_text, completion_ids, finish_reason and, optionally,
    prompt_ids and group (what rewards that compare completions compare within)."""

    def __init__(self, components: list[RewardComponent], scorers: dict, renderer):
        self.components, self.scorers, self.renderer = components, scorers, renderer
        self.step: int | None = None  # optimizer step that ``from_step`` is compared with; None: every component counts
        self.multipliers: dict[str, float] = {}  # in the place of the weights of components with ``at_least``; empty: what they start at

    def score(self, rows: Sequence[dict]) -> list[Scored]:
        """One `Scored` per row, in order; an error inside a component becomes an unscorable part with the error's text."""
        results = {c.name: self._own(c, rows) for c in self.components if not c.tier and c.kind not in READ_OTHERS} | self._routed(rows)
        said = [results[c.name] for c in self.components if c.name in results]
        known = [next((column[i].correct for column in said if getattr(column[i], "correct", None) is not None), None) for i in range(len(rows))]
        results |= {c.name: vote(c, rows, results.get(c.votes_of)) if c.kind == "majority" else RULES[c.kind](self, c, rows, known)
                    for c in self.components if c.kind in READ_OTHERS and c.name not in results}
        for c in (c for c in self.components if c.kind == "majority" or self.relative(c)):
            at = [i for i, row in enumerate(rows) if concerns(c, row["prompt_row"])]
            for i in alone([rows[i] for i in at], by_row=c.kind == "majority"):
                if isinstance(results[c.name][at[i]], Verdict):
                    results[c.name][at[i]] = Unscorable(ALONE)
        scored = [self._combine({name: column[i] for name, column in results.items()}, rows[i].get("turns"), len(rows[i].get("completion_ids") or ())) for i in range(len(rows))]
        for name, column in results.items():  # every row of a batch has the same parts
            if any(isinstance(v, Verdict) and v.without is not None for v in column):
                for one, verdict in zip(scored, column):
                    one.parts[f"{name}/without"] = getattr(verdict, "without", None)
            if any(isinstance(v, Verdict) and v.spread is not None for v in column):
                for one, verdict in zip(scored, column):
                    one.parts[f"{name}/disagreement"] = getattr(verdict, "spread", None)
            for metric in dict.fromkeys(metric for v in column for metric in getattr(v, "metrics", None) or ()):
                for one, verdict in zip(scored, column):
                    one.parts[f"{name}/{metric}"] = (getattr(verdict, "metrics", None) or {}).get(metric)
        for component in (c for c in self.components if c.tier == "learned"):
            for one, verdict in zip(scored, results[component.name]):
                one.parts[f"{component.name}/confidence"] = confidence(component, verdict) if isinstance(verdict, Verdict) else None
        return scored

    def _own(self, component: RewardComponent, rows) -> list:
        """A component's column; rows of prompts that are routed to others are not shown to it."""
        at = [i for i, row in enumerate(rows) if concerns(component, row["prompt_row"])]
        column: list = [Unscorable(ANOTHERS)] * len(rows)
        for i, verdict in zip(at, RULES[component.kind](self, component, [rows[i] for i in at]) if at else []):
            column[i] = verdict
        return column

    def _routed(self, rows) -> dict[str, list]:
        """Columns of the components with a tier; a row that a tier settled is not shown to the later ones."""
        waiting, columns = list(range(len(rows))), {}
        for component in sorted((c for c in self.components if c.tier), key=lambda c: TIERS.index(c.tier)):
            column = columns[component.name] = [Unscorable(NOT_ASKED) for _ in rows]
            for i, verdict in zip(waiting, RULES[component.kind](self, component, [rows[i] for i in waiting]) if waiting else []):
                column[i] = verdict
            waiting = [i for i in waiting if not settles(component, column[i])]
        return columns

    def compares(self, component: RewardComponent) -> bool:
        """Whether a component's value says how an answer does beside the others of its group, and nothing where there are none."""
        return component.kind in ("majority", "length_group") or self.relative(component)

    def relative(self, component: RewardComponent) -> bool:
        """Whether a component's model says which of two answers is better."""
        return component.kind in ("model", "judge") and getattr(self.scorers.get(component.name), "relative", False)

    def preferences(self, name: str, pairs: Sequence[tuple[dict, dict]]) -> list[float]:
        """P(the first answer is better) of each pair of rows, by the component of this name, whose model compares: both orders averaged, NaN where it cannot
        be read. A cut or empty answer, which the model never sees, loses against one that it sees and is as good as another such."""
        component = next(c for c in self.components if c.name == name)
        shown = [tuple(_shown(self, component, row) for row in pair) for pair in pairs]
        seen = [tuple(not isinstance(one, Verdict) for one in pair) for pair in shown]
        out = [(1.0 + a - b) / 2 for a, b in seen]
        asked = [k for k, both in enumerate(seen) if all(both)]
        for k, p in zip(asked, self.scorers[name].preferences([shown[k] for k in asked]) if asked else []):
            out[k] = float(p)
        return out

    def check_company(self, answers: int, write: str) -> None:
        """Refuse paid components that compare, where prompts get fewer than two answers; ValueError says what to ``write``."""
        for component in self.components:
            if answers < 2 and component.counts and self.compares(component):
                raise ValueError(f"reward {component.name!r} ({component.kind}) compares an answer with the others to its prompt, and there are none; {write}, or take a reward that scores answers one by one.")

    def without(self, names: Collection[str]) -> "Rewards":
        """The same rewards less the components of these names."""
        return Rewards([c for c in self.components if c.name not in names], self.scorers, self.renderer)

    def total_of(self, parts: dict[str, float | None]) -> Scored:
        """total and tier of component values that are known already (None = unscorable)."""
        return self._combine({c.name: Unscorable(ANOTHERS if c.domains else "no value") if parts.get(c.name) is None else Verdict(parts[c.name]) for c in self.components})

    def check(self, prompt_rows: Sequence[dict]) -> None:
        """Refuse prompts that a component can never score, before anything is sampled. Raises ValueError."""
        from stages.reward.debate import answers_of

        for component in self.components:
            for row in (row for row in prompt_rows if component.kind in ("rubric", "debate") and concerns(component, row)):
                if component.kind == "rubric":
                    self.scorers[component.name].rubric.category_of(row, component.category)
                else:
                    answers_of(row)

    def _combine(self, verdicts: dict, turns: list | None = None, n_tokens: int = 0) -> Scored:
        scored = Scored(None)
        for component in self.components:
            verdict = verdicts[component.name]
            scored.items += verdict.items
            if isinstance(verdict, Unscorable):
                scored.parts[component.name] = None
                scored.reasons[component.name] = verdict.reason
                continue
            scored.parts[component.name] = verdict.value
            if scored.correct is None and verdict.correct is not None:
                scored.correct, scored.extracted = verdict.correct, verdict.extracted
        parts = dict(scored.parts)
        skipped = lambda c: scored.reasons.get(c.name) == ANOTHERS or (scored.reasons.get(c.name) == ALONE and not c.counts)
        policies = {c.name: "skip" if skipped(c) else c.missing_policy for c in self.components}
        router = sorted((c for c in self.components if c.tier), key=lambda c: TIERS.index(c.tier))
        decided = next((c for c in router if settles(c, verdicts[c.name])), None)
        for component in router if decided else ():
            if component is not decided:  # its value is stored, and does not count
                parts[component.name], policies[component.name] = None, "skip"
        scored.tier = decided.tier if decided else None
        weights = None if router and not decided else self._weights(parts, policies)
        if weights is None:
            return scored
        scored.weights, scored.total = weights, float(sum(w * parts[name] for name, w in weights.items()))
        if by_step := {name: verdicts[name].steps for name, weight in weights.items() if weight and verdicts[name].steps is not None}:
            from stages.reward.process_rewards import merged

            scored.step_rewards = merged(by_step, weights, n_tokens)
        if turns is not None:
            from stages.acting.agent_rewards import per_turn

            scored.turn_parts = {name: list(verdicts[name].turns) for name in weights if verdicts[name].turns is not None}
            scored.turn_rewards = per_turn(scored.total, scored.turn_parts, weights, len(turns))
        return scored

    def _weights(self, parts, policies) -> dict[str, float] | None:
        """The factor of each present component in the total; those of a blend are one term of it. None without a total."""
        weights = {c.name: self.multipliers.get(c.name, c.weight) if self.step is None or self.step >= c.from_step else 0.0 for c in self.components}
        blended = [c.name for c in self.components if c.blend]
        if not blended:
            return present_weights(parts, weights, policies)
        inside = present_weights({name: parts[name] for name in blended}, weights, policies)
        whole = present_weights({"": inside, **{name: value for name, value in parts.items() if name not in blended}}, {"": 1.0, **weights},
                                {"": "invalidate", **policies})  # no component has an empty name
        return None if whole is None else {**{name: w * whole[""] for name, w in inside.items()}, **{name: w for name, w in whole.items() if name}}


def concerns(component: RewardComponent, prompt_row: dict) -> bool:
    """Whether a component scores answers to a prompt: by the prompt's domain, and by its own list of kinds and names (reward.domain_route)."""
    route = prompt_row.get("reward_route")
    return (not component.domains or prompt_row.get("domain") in component.domains) and (not route or component.kind in route or component.name in route)


def settles(component: RewardComponent, verdict) -> bool:
    """Whether a tier's opinion is the last word: a score, and from a reward model one that is sure enough (REWARD-ROUTER)."""
    if isinstance(verdict, Unscorable):
        return False
    if component.tier != "learned":
        return True
    return confidence(component, verdict) >= component.min_confidence


def confidence(component: RewardComponent, verdict: Verdict) -> float:
    """How sure a reward model is: the probability of its own opinion, max(p, 1 - p) with p = sigmoid(score)."""
    p = verdict.value if component.squash == "sigmoid" else 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, verdict.value))))
    return max(p, 1.0 - p)


def present_weights(parts: dict, weights: dict[str, float], policies: dict[str, str] | str = "skip") -> dict[str, float] | None:
    """Weights of the parts that are present (not None); None when nothing is left, a missing part invalidates, or its weight has nothing to go to.

    policies: per part, or one for all: `skip`, `renormalise` (times sum of all weights / sum of present weights), `invalidate`.
    """
    policy = policies if isinstance(policies, dict) else {name: policies for name in parts}
    present = [name for name, value in parts.items() if value is not None]
    missing = [name for name in parts if name not in present]
    dropped, kept = sum(weights[name] for name in missing if policy[name] == "renormalise"), sum(weights[name] for name in present)
    if not present or any(policy[name] == "invalidate" for name in missing) or (dropped and not kept):
        return None
    scale = (kept + dropped) / kept if dropped else 1.0
    return {name: weights[name] * scale for name in present}


# -------------------------------------------------------------------------------------------------- components

def _text(component: RewardComponent, row: dict) -> str:
    from stages.generation import seen
    from stages.verification.verifiers import view

    return view(seen(row["completion_text"], True), component.view) if row.get("opened") and component.view != "full" else view(row["completion_text"], component.view)


def finite(value) -> bool:
    """Whether a value is a finite number; an int beyond the floats is none."""
    try:
        return isinstance(value, (bool, int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _value(value) -> Verdict | Unscorable:
    """A finite number as a verdict, anything else as unscorable."""
    if isinstance(value, bool):
        return Verdict(float(value), value)
    if finite(value):
        return Verdict(float(value))
    return Unscorable("no value (None)" if value is None else f"{value!r:.60} is no finite number")


def _verify(rewards: Rewards, component: RewardComponent, rows) -> list:
    from stages.verification.verifiers import SHARES, VERIFIERS, BadGold, verifier_of

    def one(row):
        try:
            name = verifier_of(row["prompt_row"]) if component.verifier == "auto" else component.verifier
            correct, extracted = VERIFIERS[name](row["prompt_row"], _text(component, row), component.extraction == "flexible", component.rel_tol)
            if name in SHARES:
                share = SHARES[name](row["prompt_row"], _text(component, row))
                return Verdict(component.incorrect_value + share * (component.correct_value - component.incorrect_value), correct, extracted)
        except BadGold as error:
            return Unscorable(str(error))
        return Verdict(component.correct_value if correct else component.incorrect_value, correct, extracted)

    out = [one(row) for row in rows]
    if not component.symbolic:
        return out
    proved = symbolically(component, [(row["prompt_row"], v.extracted if isinstance(v, Verdict) and not v.correct else None) for row, v in zip(rows, out)])
    out = [replace(v, value=component.correct_value, correct=True) if known else v for v, known in zip(out, proved)]
    return [replace(v, metrics={"undecided": float(known is None)}) if isinstance(v, Verdict) else v for v, known in zip(out, proved)]


def symbolically(component: RewardComponent, answers: Sequence[tuple[dict, str | None]]) -> list[bool | None]:
    """Whether each answer (None: not asked) to a prompt row of mathematics is provably its gold answer; None where the limits of the component ended the comparison."""
    from stages.verification.verifiers import equal_symbolically, math_gold, verifier_of

    of_maths = lambda row: (verifier_of(row) if component.verifier == "auto" else component.verifier) == "math"
    asked = {i: (answer, math_gold(row)) for i, (row, answer) in enumerate(answers) if answer is not None and of_maths(row)}
    found = dict(zip(asked, equal_symbolically(list(asked.values()), _limits(component))))
    return [found.get(i, False) for i in range(len(answers))]


def _shown(rewards: Rewards, component: RewardComponent, row: dict, as_ids: bool = False):
    """What a reward model is shown of a row (``stages.reward_models.reward_scorers.Response``), or the verdict on a row that it never sees."""
    from stages.reward_models.reward_scorers import Response

    if not ended(row):
        return Verdict(component.cut_reward)
    if not row["completion_text"].strip():
        return Verdict(component.empty_reward)
    if not _text(component, row).strip():  # a thought that never ends has no answer: scored as cut (reward.view)
        return Verdict(component.cut_reward)
    ids = list(_prompt_ids(rewards, row)) + list(row["completion_ids"]) if as_ids else None
    return Response(row["prompt_row"].get("prompt") or [], [{"role": "assistant", "content": _text(component, row)}], ids, row["prompt_row"], row.get("group"))


def _model(rewards: Rewards, component: RewardComponent, rows) -> list:
    """Verdict of a reward model. Its own template renders the text, unless it reads exactly the policy's token ids."""
    scorer = rewards.scorers[component.name]
    if component.step_credit != "none":
        return _steps(rewards, component, rows)
    as_ids = component.view == "full" and scorer.reads_ids_of(rewards.renderer)
    out = [_shown(rewards, component, row, as_ids) for row in rows]
    positions = [i for i, shown in enumerate(out) if not isinstance(shown, Verdict)]
    responses = [out[i] for i in positions]
    scores = scorer.score(responses) if responses else []
    spread = scorer.disagreement if responses else None
    for k, (i, score) in enumerate(zip(positions, _scaled(component, scores))):
        verdict = Unscorable(scorer.why_not) if math.isnan(score) else _value(float(score))
        out[i] = replace(verdict, spread=spread[k]) if spread and isinstance(verdict, Verdict) else verdict
    return out


def _steps(rewards: Rewards, component: RewardComponent, rows) -> list:
    """Verdicts of a process reward model whose steps are paid: the sum of their credits, and each at the last token of its step. Of a cut response its finished steps are scored."""
    from stages.reward.process_rewards import finished_steps, step_credits, step_ends, token_pieces
    from stages.reward_models.reward_scorers import Response, split_steps

    scorer, out, texts = rewards.scorers[component.name], [], {}
    separator = scorer.card.options["separator"]
    for i, row in enumerate(rows):
        text = row["completion_text"] if ended(row) else finished_steps(row["completion_text"], separator)
        out.append(Verdict(component.empty_reward if ended(row) else component.cut_reward, steps=(), metrics={"steps": 0.0}))
        if split_steps(text, separator):
            texts[i] = text
    asked = [Response(rows[i]["prompt_row"].get("prompt") or [], [{"role": "assistant", "content": text}], row=rows[i]["prompt_row"]) for i, text in texts.items()]
    for (i, text), scores in zip(texts.items(), scorer.step_probabilities(asked) if asked else []):
        row, whole, n = rows[i], ended(rows[i]), len(split_steps(text, separator))
        if len(scores) != n:
            out[i] = Unscorable(f"the process reward model has room for {len(scores)} of its {n} steps; train it with a longer max_length, or write a smaller max_completion_length")
            continue
        # tokens behind the text, of a stop string or an unfinished step, are no step of it
        ends = step_ends(token_pieces(rewards.renderer, row["completion_ids"]), separator)[:n] if rewards.renderer is not None else []
        if len(ends) != n:
            out[i] = Unscorable("its steps cannot be found among its tokens" if rewards.renderer is not None else "steps are paid at tokens of a policy, and there is none")
            continue
        if whole:  # what follows the last separator, an end token, ends its step
            ends[-1] = len(row["completion_ids"]) - 1
        credits = step_credits(scores, component.step_credit, component.clip)
        out[i] = Verdict(sum(credits) + (0.0 if whole else component.cut_reward), steps=tuple(zip(ends, credits)),
                         metrics={"steps": float(len(scores)), "step_mean": float(sum(scores) / len(scores)), "step_min": float(min(scores))})
    return out


def _scaled(component: RewardComponent, scores: Sequence[float]) -> list[float]:
    """A model's scores as the component counts them: whitened, clipped, squashed; NaN (no score) stays, and is in no statistic."""
    from stages.estimators import normalise_rewards

    scores = normalise_rewards(scores, "whiten").tolist() if component.normalise == "batch" else scores
    scores = [max(-component.clip, min(component.clip, score)) if component.clip and math.isfinite(score) else score for score in scores]
    return [1.0 / (1.0 + math.exp(-max(score, -700.0))) if component.squash == "sigmoid" and math.isfinite(score) else score for score in scores]


def _remote(rewards: Rewards, component: RewardComponent, rows) -> list:
    """Verdicts of a reward server; what it gives no number for is unscorable and says why."""
    from stages.reward.remote_rewards import Answer, RewardServer

    def answer(row):
        text, columns = _text(component, row), columns_of(row["prompt_row"])
        query = prompt = ""
        if component.request_form == "openrlhf":
            if rewards.renderer is None:
                raise ValueError(f"reward {component.name!r}: request_form=openrlhf shows texts with the policy's template, which needs a model; write request_form=messages")
            ids = list(_prompt_ids(rewards, row))
            prompt = rewards.renderer.decode(ids, skip_special_tokens=False)
            query = rewards.renderer.decode(ids + list(row["completion_ids"]), skip_special_tokens=False) if component.view == "full" else prompt + text
        return Answer([*(columns.get("prompt") or []), {"role": "assistant", "content": text}], columns, row.get("finish_reason"), query, prompt)

    server = RewardServer(component.url, component.endpoint_model, component.request_form, component.score_key, component.batch_size, component.concurrency, component.timeout_s,
                          component.key_variable)
    asked = [i for i, row in enumerate(rows) if component.no_eos_reward is None or ended(row)]
    found = dict(zip(asked, server.scores([answer(rows[i]) for i in asked])))
    scores = dict(zip(asked, _scaled(component, [math.nan if isinstance(found[i], str) else found[i] for i in asked]))) if asked else {}
    return [Verdict(component.no_eos_reward) if i not in found else Unscorable(found[i]) if isinstance(found[i], str) else _value(float(scores[i])) for i in range(len(rows))]


def alone(rows, by_row: bool = False) -> list[int]:
    """Positions of the rows that nothing can be compared with. ``by_row``: rows without a group are those of one prompt row, else of one prompt's messages."""
    of = (lambda row: row["prompt_row"]["row_id"]) if by_row else (lambda row: json.dumps(row["prompt_row"].get("prompt"), sort_keys=True, default=str))
    return [members[0] for members in in_groups(rows, of) if len(members) == 1]


def in_groups(rows, otherwise) -> list[list[int]]:
    """Positions of the rows that are compared with each other: of one ``group`` where rows have it (two draws of a prompt are two), else of one ``otherwise(row)``."""
    groups: dict = {}
    for i, row in enumerate(rows):
        groups.setdefault(otherwise(row) if row.get("group") is None else row["group"], []).append(i)
    return list(groups.values())


def vote(component: RewardComponent, rows, weights: list | None = None) -> list:
    """1 for rows whose extracted answer is the majority's among the rows of the same group, else 0; no answer, no vote (``rs.majority``, self-consistency).

    weights: verdicts of the component that ``votes_of`` names; a row that it cannot score does not vote.
    """
    from stages.selection import majority
    from stages.verification.verifiers import FLEXIBLE_ORDER, STRICT_ORDER, as_rational, extract, normalise_math

    def answer(row):
        found = extract(_text(component, row), FLEXIBLE_ORDER if component.extraction == "flexible" else STRICT_ORDER)
        plain = None if found is None else normalise_math(found)
        number = None if plain is None else as_rational(plain)
        return found, plain if number is None else str(number)

    answers = [answer(row) for row in rows]
    out: list = [None] * len(rows)
    for members in in_groups(rows, lambda row: row["prompt_row"]["row_id"]):
        counted = [1.0 if weights is None else getattr(weights[i], "value", None) for i in members]
        if any(w is not None and w < 0 for w in counted):
            raise ValueError(f"reward {component.name!r}: votes_of={component.votes_of} gives negative votes; write squash=sigmoid for that component, or "
                             f"leave votes_of out")
        winner, _ = majority([None if w is None else answers[i][1] for i, w in zip(members, counted)], [w or 0.0 for w in counted])
        for i in members:
            out[i] = Verdict(float(winner is not None and answers[i][1] == winner), None, answers[i][0])
    return out


def _icdpo(rewards: Rewards, component: RewardComponent, rows) -> list:
    """Verdict of the in-context scorer, on exactly the policy's token ids."""
    scores = rewards.scorers[component.name].score([{**row, "prompt_ids": _prompt_ids(rewards, row)} for row in rows])
    return [Unscorable("an empty answer, or no demonstration fits demonstration_length") if score is None else _value(score) for score in scores]


def _prompt_ids(rewards: Rewards, row: dict):
    if row.get("prompt_ids") is not None:
        return row["prompt_ids"]
    if rewards.renderer is None:
        raise ValueError("rows without prompt_ids need a renderer; pass renderer= to build_rewards")
    return rewards.renderer.prompt_ids(row["prompt_row"]["prompt"])


def ended(row: dict) -> bool:
    """Whether the response is finished: an end token, a stop string, or the goal of an environment; not cut."""
    return row.get("finish_reason") in ("eos", "stop", "goal")


def _format(rewards, component, rows) -> list:
    from stages.verification.verifiers import format_reward

    return [Verdict(format_reward(_text(component, row), component.preset, prefilled=component.prefilled)) for row in rows]


def _length(rewards, component, rows) -> list:
    from stages.verification.verifiers import soft_overlong

    # A response cut at the cap has no end token of its own, and counts as having reached the cap (reward.length_soft_overlong).
    return [Verdict(soft_overlong(len(row["completion_ids"]), component.max_length, component.cache_length)) for row in rows]


def _is_right(rewards, component, rows, known) -> list[bool]:
    """Whether each answer is right, for length rewards: what the other components say (``known``, None = nothing), else the environment, else a verifier of
    its own; an answer without any verdict counts as wrong."""
    verdicts = _verify(rewards, component, rows) if known is None or None in known else known
    return [k if k is not None else any(GOAL in t["events"] for t in row["turns"]) if row.get("turns") is not None else bool(getattr(v, "correct", False))
            for row, v, k in zip(rows, verdicts, known or [None] * len(rows))]


def _length_group(rewards, component, rows, known=None) -> list:
    """Kimi's length reward inside each prompt's group, before any normalisation (LENGTH-CTRL)."""
    from stages.verification.verifiers import kimi_length

    out, right = [None] * len(rows), _is_right(rewards, component, rows, known)
    for members in in_groups(rows, lambda row: (row["prompt_row"].get("prompt_id"), tuple(row.get("prompt_ids") or ()))):
        for i, value in zip(members, kimi_length([len(rows[i]["completion_ids"]) for i in members], [right[i] for i in members])):
            out[i] = Verdict(value)
    return out


def _length_target(rewards, component, rows, known=None) -> list:
    """L1's reward for the length that a prompt row asks for (LENGTH-CTRL)."""
    from stages.verification.verifiers import target_length

    def one(row, right):
        target = json.loads(row["prompt_row"].get("extra_json") or "{}").get("target_length")
        if not isinstance(target, (int, float)):
            return Unscorable('the prompt row asks for no length; write extra_json={"target_length": 200}')
        return Verdict(target_length(len(row["completion_ids"]), int(target), right, component.length_mode, component.length_alpha, component.length_delta))

    return [one(row, right) for row, right in zip(rows, _is_right(rewards, component, rows, known))]


def _length_penalty(rewards, component, rows) -> list:
    """A constant price of every token (LENGTH-CTRL)."""
    return [Verdict(-component.length_alpha * len(row["completion_ids"])) for row in rows]


def _language(rewards, component, rows) -> list:
    from stages.verification.verifiers import SCRIPTS, language_of, language_share

    def one(row):
        scripts = language_of(row["prompt_row"])
        if scripts is None:
            named = row["prompt_row"].get("language")
            return Unscorable(f"the language {named!r} is none of {', '.join(SCRIPTS)}" if named else "the prompt has no letters; write its language into the column language")
        return Verdict(language_share(_text(component, row), scripts, component.language_unit))

    return [one(row) for row in rows]


def _truncation(rewards, component, rows) -> list:
    return [Verdict(0.0 if ended(row) else -component.missing_eos_penalty) for row in rows]


def _constraints(rewards, component, rows) -> list:
    from stages.verification.verifiers import BadGold, check_constraint, constraint_reward

    def one(row):
        constraints = row["prompt_row"].get("constraints") or []
        try:
            satisfied = [check_constraint(c["id"], json.loads(c["kwargs_json"] or "{}"), _text(component, row)) for c in constraints]
        except (BadGold, ValueError) as error:
            return Unscorable(str(error))
        value = constraint_reward(satisfied, component.mode, component.threshold)
        return Unscorable("the prompt row has no constraints") if value is None else Verdict(value, all(satisfied))

    return [one(row) for row in rows]


def _digests(paths: list) -> dict[str, str]:
    """Absolute path -> digest of the file, or of all files of the folder."""
    from storage.files import sha256_file, tree_digest

    found = {}
    for path in paths:
        place = Path(path).resolve()
        try:
            found[str(place)] = tree_digest(place) if place.is_dir() else sha256_file(place)
        except OSError as error:
            raise ValueError(f"files: {str(path)!r} cannot be read ({error.strerror}); write paths of files or folders that are there") from None
    return found


def _limits(component: RewardComponent):
    from stages.running.sandbox import Limits

    return Limits(timeout_s=component.timeout_s, memory_mib=component.memory_mib, files=tuple(component.files))


def _regex(rewards, component, rows) -> list:
    from stages.running.sandbox import run_jobs

    jobs = [{"kind": "pattern", "pattern": component.pattern, "text": _text(component, row)} for row in rows]
    return [Unscorable(o.error) if o.error else Verdict(float(o.value)) for o in run_jobs(jobs, _limits(component))]


def columns_of(prompt_row: dict) -> dict:
    """A prompt row for people's own code, in plain JSON: its columns, and what extra_json holds as ``metadata``."""
    plain = json.loads(json.dumps({name: value for name, value in prompt_row.items() if name != "extra_json"}, default=str))
    return {**plain, "metadata": json.loads(prompt_row.get("extra_json") or "{}")}


def _given(component: RewardComponent, row: dict) -> tuple[dict, dict]:
    """(arguments by name, columns by name) that a function of one's own can ask for about one answer (:func:`stages.running.sandbox.arguments`)."""
    columns, text = columns_of(row["prompt_row"]), _text(component, row)
    prompt, answer, metadata = columns.get("prompt"), columns.get("answer"), columns["metadata"]
    own = metadata if isinstance(metadata, dict) else {}
    judged = own.get("reward_model") if isinstance(own.get("reward_model"), dict) else {}       # verl's: what no verifier reads, such as a table of numbers, stands only there
    truth = own.get("ground_truth", judged.get("ground_truth")) if answer is None else answer
    return ({"prompt": prompt, "completion": text, "answer": answer, "messages": prompt, "row": columns, "completion_ids": list(row["completion_ids"]), "finish_reason": row.get("finish_reason"),
             "data_source": own.get("data_source", columns.get("source")), "solution_str": text, "ground_truth": truth, "extra_info": own.get("extra_info", metadata)}, {**own, **columns})


def _returned(value) -> Verdict | Unscorable:
    """What a function of one's own says of one answer: a number, or a dict with ``reward`` (verl: ``score``), of which other numbers are metrics, and a bool called ``correct``
    or ``acc`` (verl) is the verdict; what is no number counts as nothing."""
    if not isinstance(value, dict):
        return _value(value)
    key = next((name for name in ("reward", "score") if name in value), None)
    if key is None:
        return Unscorable("the dict that score() returned has no reward; return {'reward': NUMBER, ...}")
    metrics = {name: float(one) for name, one in value.items() if name != key and finite(one)}
    if wrong := [name for name in metrics if name in MEASURED or not name.strip() or "/" in name]:
        return Unscorable(f"score() returned a metric called {wrong[0]!r}; call it otherwise, without a slash and not {', '.join(MEASURED)}")
    found = _value(value[key])
    right = next((value[name] for name in ("correct", "acc") if isinstance(value.get(name), bool)), None)
    return found if isinstance(found, Unscorable) else replace(found, correct=found.correct if right is None else right, metrics=metrics)


def _failed(component, error: str) -> Unscorable:
    return Unscorable(f"timeout: score() took more than {component.timeout_s:g} s; raise timeout_s where it needs longer" if error == "timeout" else error)


def _python(rewards, component, rows) -> list:
    """A function of one's own, for one answer at a time or for all answers to a prompt at once."""
    from stages.running.sandbox import run_jobs, scoring

    given = [_given(component, row) for row in rows]
    if component.scope == "row":
        return [_failed(component, o.error) if o.error else _returned(o.value) for o in run_jobs([scoring(component.source, *one) for one in given], _limits(component))]
    groups = in_groups(rows, lambda row: row["prompt_row"].get("row_id") or json.dumps(row["prompt_row"].get("prompt"), sort_keys=True))
    listed = lambda of: {name: [one.get(name) for one in of] for name in dict.fromkeys(name for one in of for name in one)}
    jobs = [scoring(component.source, *(listed([given[i][part] for i in members]) for part in (0, 1)), many=True) for members in groups]
    out: list = [None] * len(rows)
    for members, outcome in zip(groups, run_jobs(jobs, _limits(component))):
        values, why = outcome.value, outcome.error
        if not why and (not isinstance(values, list) or len(values) != len(members)):
            why = f"score() of a group returned {f'{len(values)} values' if isinstance(values, list) else f'{values!r:.60}'}; return a list with one for each of its {len(members)} answers"
        for k, i in enumerate(members):
            out[i] = _failed(component, why) if why else _returned(values[k])
    return out


_FENCE = re.compile(r"(?<![`~])(`{3,}|~{3,})[ \t]*([\w+#.-]*)$")


def extract_program(text: str) -> str | None:
    """Content of the last fenced block that is marked as Python, else of the last without a language; None without one (reward.code: badly formatted).

    A fence is closed by a line that begins with one at least as long, indented by at most three spaces more, or by one at the end of a line of code; a
    language behind it opens the next block. Lines lose the indentation of their fence.
    """
    found: dict[bool, str] = {}
    fence, language, indent, lines = "", "", 0, []
    for line in text.replace("\r\n", "\n").split("\n"):
        starts, ends = re.match(r"([ \t]*)(`{3,}|~{3,})", line), _FENCE.search(line.rstrip())
        if fence:
            closes = starts and starts[2].startswith(fence) and len(starts[1]) <= indent + 3
            if not closes and (starts or not ends or ends[2] or not ends[1].startswith(fence)):
                lines.append(line)
                continue
            lines += [] if closes else [line[: ends.start()]]
            if language in ("python", "python3", "py", ""):
                found[bool(language)] = "".join(re.sub(rf"^[ \t]{{0,{indent}}}", "", own) + "\n" for own in lines)
            fence = ""
            if not closes or not ends or not ends[2]:
                continue
        if ends and (ends[2] or ends[1] not in line[: ends.start()]):
            fence, language, indent, lines = ends[1], ends[2].lower(), len(line) - len(line.lstrip(" \t")), []
    return found.get(True, found.get(False))


#: Where a completion of a function ends: at the first line that belongs to something else (eval.humaneval).
_STOPS = re.compile(r"\n(?:class|def|#|if|print)")


def program_of(prompt_row: dict, text: str) -> str | None:
    """The program that an answer gives; None where there is none (reward.code).

    For a prompt that is the beginning of a function and tests that end in ``check(FUNCTION)`` (eval.humaneval), an answer without a fence is the program or
    its completion, and a program without the function's header is put behind the prompt.
    """
    from textwrap import indent

    program = extract_program(text)
    calls = [found[1] for test in prompt_row.get("tests") or [] if (found := re.search(r"^check\((\w+)\)\s*\Z", test.get("code") or "", re.MULTILINE))]
    start = (prompt_row.get("prompt") or [{}])[-1].get("content") or "" if calls else ""
    start = extract_program(start) or start
    header = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{calls[-1]}\b", re.MULTILINE) if calls else None
    if header is None or not header.search(start) or not text.strip():
        return program
    if program is None:
        body = text.replace("\r\n", "\n")
        if not body.lstrip("\n")[:1].isspace() and header.search(body):
            return body
        program = body[: stop.start()] if (stop := _STOPS.search(body)) else body
    elif header.search(program):
        return program
    body = re.sub(r"^ {1,3}(?! )", "    ", program.lstrip("\n"))  # some tokenizers drop the first space of a text
    return start.rstrip() + "\n" + (body if body[:1].isspace() else indent(body, "    "))


def _hardest(tests: list[dict], limit: int | None) -> list[dict]:
    """The tests with the longest inputs (of asserts: the longest ones), in their order; the first ones of equals."""
    if limit is None or len(tests) <= limit:
        return tests
    longest = sorted(range(len(tests)), key=lambda i: -len(tests[i].get("code") or tests[i].get("input") or ""))[:limit]
    return [tests[i] for i in sorted(longest)]


def _code(rewards, component, rows) -> list:
    """Unit tests: a test passes if its code runs to the end after the program, or if the program prints what is expected."""
    from stages.running.sandbox import run_jobs
    from stages.verification.verifiers import code_reward

    jobs, owners = [], []
    programs = [program_of(row["prompt_row"], _text(component, row)) for row in rows]
    asked = [_hardest(row["prompt_row"].get("tests") or [], component.max_tests) for row in rows]
    for i, (tests, program) in enumerate(zip(asked, programs)):
        for test in tests if program is not None else []:
            job = {"kind": "tested", "test": test["code"]} if test.get("code") else {"kind": "program", "stdin": test.get("input") or ""}
            jobs.append({**job, "source": program, "timeout_s": test.get("timeout_s")})
            owners.append((i, test))
    passed = [0] * len(rows)
    for (i, test), outcome in zip(owners, run_jobs(jobs, _limits(component), fresh=True)):
        if outcome.error is None:
            passed[i] += outcome.value is True if test.get("code") else (
                outcome.value["exit"] == 0 and _same_output(outcome.value["stdout"], test.get("expected") or ""))
    out = []
    for tests, program, count in zip(asked, programs, passed):
        total = len(tests)
        value = code_reward(count, total, component.mode, well_formatted=program is not None, threshold=component.threshold)
        out.append(Unscorable("the prompt row has no tests") if value is None else Verdict(value, program is not None and count == total))
    return out


def _same_output(got: str, expected: str) -> bool:
    """Equal line by line, trailing white space and trailing empty lines aside; lines of numbers as decimal numbers, so that 1.50 is 1.5 (LiveCodeBench)."""
    clean = lambda text: [line.rstrip() for line in text.rstrip().splitlines()]
    found, wanted = clean(got), clean(expected)
    return found == wanted or len(found) == len(wanted) and all(a == b or (x := _decimals(a)) is not None and x == _decimals(b) for a, b in zip(found, wanted))


def _decimals(line: str) -> list[Decimal] | None:
    """The finite numbers that a line consists of; None where it holds anything else."""
    words = line.split()
    return [Decimal(word) for word in words] if words and all(re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", word) for word in words) else None


def _rubric(rewards, component, rows) -> list:
    return rewards.scorers[component.name].score(rows)


def _on_turns(rewards, component, rows) -> list:
    """Components of trajectories: a number per turn from the environment's rewards or events."""
    from stages.acting import agent_rewards as of

    def one(row):
        turns = row.get("turns")
        if turns is None:
            return Unscorable(f"reward {component.name!r} scores trajectories in an environment; write environment=NAME, or take it out")
        if row.get("failure"):
            return Unscorable(f"environment failed: {row['failure']}")
        events = [t["events"] for t in turns]
        if component.kind == "environment":
            values, verdict = [t["reward"] for t in turns], any(GOAL in e for e in events)
        elif component.kind == "milestones":
            values, verdict = of.milestone_rewards(events, milestones), None
        else:
            values, verdict = of.step_rewards(events, component.step_weights or of.STEP_WEIGHTS, {**of.STEP_EVENTS, **component.step_events}), None
        return Verdict(float(sum(values)), verdict, turns=tuple(values))

    milestones = component.milestones or of.milestones_of()
    if component.milestone_normalise == "category_sum":
        sums: dict[str, float] = {}
        for name, value in milestones.items():
            sums[name.split(".")[0]] = sums.get(name.split(".")[0], 0.0) + value
        milestones = {name: value / (sums[name.split(".")[0]] or 1.0) for name, value in milestones.items()}
    return [one(row) for row in rows]


def _debate(rewards, component, rows) -> list:
    """Zero-sum: the judge's probability of a debater's own answer, less 1/2 (DEBATE)."""
    from stages.reward.debate import verdicts

    if any(row.get("debate") is None for row in rows):
        return [Unscorable(f"reward {component.name!r} judges debates; write environment=debate, or take it out")] * len(rows)
    judge = rewards.scorers[component.name]
    return [Unscorable(judge.why_not) if math.isnan(p) else Verdict(p - 0.5, without=None if math.isnan(q) else q - 0.5) for p, q in zip(*verdicts(judge, rows))]


RULES = {"length_group": _length_group, "length_target": _length_target, "length_penalty": _length_penalty, "language": _language,
         "verifier": _verify, "model": _model, "judge": _model, "remote": _remote, "format": _format, "length": _length, "truncation": _truncation, "regex": _regex,
         "constraints": _constraints, "code": _code, "python": _python, "rubric": _rubric,
         "group_preference": _model, "icdpo": _icdpo, **dict.fromkeys(ON_TURNS, _on_turns), "debate": _debate}
