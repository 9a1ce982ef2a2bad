"""Rules that hold for every recipe, read from plans of all of their branches (no stage is run)."""

import contextlib
import json
import re
from itertools import combinations
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from flows.config import load_preset, merge, presets
from flows.deploy import refuse_what_forms_lose
from flows.recipe import RECIPES, Run, get_recipe, load_config, rehearse, unread
from stages.registry import get_stage
from stages.spec import ConfigError

GIVEN = {name: f"(given.{name})" for name in ("demonstrations", "prompts", "text")}
PAIRS = {"pairs": "(given.pairs)"}
MINE = {"model": "(given.model)"}
SCORED = {"rewards": [{"name": "scorer", "kind": "model"}]}
JUDGED = {"rewards": [{"name": "judge", "kind": "judge"}]}
SERVER = {"endpoint": "http://localhost:8000/v1", "endpoint_model": "name"}
#: Settings that take a recipe through each of its branches.
BRANCHES = {
    "post_training": [{}, {**MINE, "data": {**GIVEN, **PAIRS}, "rl": JUDGED}],
    "preference": [
        {},
        {**MINE, "data": {"path": "(pairs)"}, "sft_first": True},
        {**MINE, "data": {"path": "(pairs)", "demonstrations": "(d)", "prompts": "(p)"}, "sft_first": True},
        {**MINE, "data": {"path": "(pairs)"}, "sft_first": True, "watch_pairs": True},
    ],
    "verifiable": [
        {**MINE, "data": {"demonstrations": "(d)"}, "rl": JUDGED},
        {
            **MINE,
            "data": {"demonstrations": "(d)", "prompts": "(p)", "test": "(t)", "answers": {"theirs": "(a)"}},
        },
    ],
    "instruction_following": [
        {**MINE, "data": {"prompts": "(p)"}},
        {**MINE, "data": {"prompts": "(p)", "test": "(t)"}},
    ],
    "agent": [{}, {"data": {"text": "(text)"}, "rl": {"preset": "agent", **JUDGED}}, {**MINE, "data": GIVEN}],
    "r1": [
        {"zero_branch": True, "student_rl": True, "reason": JUDGED},
        {
            **MINE,
            "data": {**GIVEN, **PAIRS, "safety_pairs": "(sp)", "general": "(g)", "general_prompts": "(gp)"},
            "students": {"small": "(small)"},
        },
    ],
    "tulu3": [
        {"rl": JUDGED},
        {**MINE, "data": {**GIVEN, "preference_prompts": "(pp)", "test": "(t)"}, "others": {"other": "(other)"}},
    ],
    "llama3": [
        {"average": 2, "gold": JUDGED},
        {**MINE, "data": {**GIVEN, **PAIRS}},
        {"gold_memory": "replay", "discriminator": "continue"},
    ],
    "specialists": [{}, {**MINE, "data": {"prompts": "(p)"}, "specialists": {"maths": "(a)", "code": "(b)"}}],
    "iterated_rlhf": [
        {"offline": "first", "gold": JUDGED},
        {"refresh": "after", "gold_memory": "replay", **MINE, "data": {**GIVEN, **PAIRS}},
        {"offline": "after"},
        {"refresh": "never", "kl_to": "previous"},
    ],
    "online_dpo": [
        {"sample": {**JUDGED, "max_prompts": 5}},
        {"sample": {**SCORED, "mixture_coef": 0.2}, **MINE, "data": {**GIVEN, **PAIRS}},
        {"split_prompts": True},
        {"reference": "previous", "members": 2, "control": True},
    ],
    "d2po": [{"gold": JUDGED}, {"gold_memory": "replay", "discriminator": "restart", **MINE, "data": GIVEN}],
    "rlaif": [
        {"direct": True, "human": True, **MINE, "data": {**GIVEN, **PAIRS}},
        {"judge": "(judge)", "teacher_sft": True},
        {"objectives": {"kind": "(a)", "honest": "(b)"}},
    ],
    "rest": [
        {"thresholds": [0.5, 0.8], "sample": {"max_prompts": 5, **JUDGED}, "stop_when_flat": True},
        {"thresholds": [], "rl_after": True, "sample": SCORED, "rl": SCORED, **MINE, "data": {**GIVEN, **PAIRS}},
    ],
    "sdpo": [{"evaluate": JUDGED}, {**MINE, "data": {**GIVEN, **PAIRS}, "evaluate": SCORED}, {"evaluate": SCORED}],
    "constitutional": [
        {
            **MINE,
            "data": {"prompts": "(p)", "helpful": "(h)", "helpful_pairs": "(hp)", "rl_prompts": "(rp)"},
        }
    ],
    "clair": [
        {**MINE, "data": {"prompts": "(p)"}},
        {**MINE, "data": {"prompts": "(p)", "principles": "(pr)"}, "judge": "(j)", "baseline": True},
        {**MINE, "data": {"prompts": "(p)"}, "check": SERVER, "arms": {"kto": {"method": "kto"}}},
    ],
    "character": [{**MINE, "data": {"prompts": "(p)", "traits": "(t)", "pool": "(pool)"}}],
    "deliberative": [{**MINE, "data": {"prompts": "(p)", "specifications": "(s)", "general": "(g)", "ability": "(a)"}}],
    "reward": [{**MINE, "data": {"path": "(labels)"}, "members": 2}],
    "rl_benchmark": [{"arms": {"grpo": {}, "grpo_process": {}, "ppo_ptx": {}}, "evaluate": JUDGED}],
    "instructgpt": [
        {"rounds": 2, "plain_ppo": True, "rank": JUDGED},
        {"rounds": 2, **MINE, "data": {**GIVEN, **PAIRS, "rankings": "(r)", "benchmarks": {"quiz": "(quiz)"}}},
        {"rounds": 2, **MINE, "data": {**GIVEN, **PAIRS}},
        {"optimise": False, **MINE, "data": {**GIVEN, **PAIRS}},
    ],
    "checkpoint_selection": [
        {
            "candidates": ["(a)", "(b)"],
            "name": "best",
            "data": {"demonstrations": "(d)", "prompts": "(p)"},
            "reward_model": "(rm)",
            "judge": "(j)",
            "select": {"select_on": "win_rate"},
        },
    ],
    "llama2": [
        {"labels": "fresh", "gold": JUDGED, "data": {"benchmarks": {"quiz": "(quiz)"}}},
        {"labels": "fresh", **MINE, "data": {**GIVEN, **PAIRS, "safety_pairs": "(sp)"}},
        {"improve_from": "sft"},
    ],
    "hh": [
        {"rounds": 2, "labels": "fresh", "final_judge": "(j)", "gold": JUDGED},
        {**MINE, "data": {**GIVEN, **PAIRS, "pmp": "(votes)", "benchmarks": {"quiz": "(quiz)"}}, "win_rate": SERVER},
    ],
    "deepseekmath": [
        {"rounds": 2, "solutions": JUDGED, "data": {"benchmarks": {"quiz": "(quiz)"}}},
        {"rounds": 2, "supervision": "process"},
        {"rounds": 2, "supervision": "rule", **MINE, "data": GIVEN},
    ],
    "overoptimisation": [{"evaluate": JUDGED}, {**MINE, "data": {**GIVEN, **PAIRS}}],
    "objective_discovery": [{"evaluate": JUDGED}, {"evaluate": SCORED, **MINE, "data": {**GIVEN, **PAIRS}}],
    "human_feedback": [
        {**MINE, "data": {"prompts": "(p)"}},
        {**MINE, "data": {"prompts": "(p)"}, "answers": {"labeler": "stub"}},
    ],
}
#: What some branches above are given and have no use for: those with a model of their own train none.
IDLE = {"data.text", "data.demonstrations"}
CASES = [(recipe, values) for recipe, branches in BRANCHES.items() for values in branches]


class Trace(Run):
    """What a recipe would do, step by step: (label, stage, inputs, config, seed, name_as)."""

    def __init__(self, recipe, seed):
        super().__init__(recipe, seed, [])
        self.trace = []

    def execute(self, stage, label, inputs, config, name_as, seed):
        self.trace.append((label, stage, inputs, config, seed, name_as))
        outputs = {name: f"({label}.{name})" for name in get_stage(stage).SPEC.planned_outputs()}
        return {"outputs": outputs, "metrics": {}, "cached": False, "seconds": 0.0}

    def together(self, parts):
        return [part() for part in parts]

    def answered(self, label, task):
        return "(people)"

    def conclude(self, candidate, outputs, name, alias="champion"):
        self.trace.append(("conclude", "conclude", {"candidate": candidate}, None, self.seed, f"{name}@{alias}"))
        return {}


@pytest.fixture(autouse=True)
def no_champion(monkeypatch):
    monkeypatch.setattr("tasks.promotion.champion", lambda name: None)


def traced(recipe, config):
    run = Trace(recipe, config.seed)
    get_recipe(recipe).method(run, config)
    return run.trace


def test_the_table_has_every_recipe():
    assert set(BRANCHES) == set(RECIPES) - {"sweep"}


def prompts_of(config):
    """(first prompt, the one behind the last, part) of a step of rejection."""
    return config.prompt_offset, config.prompt_offset + (config.max_prompts or 10**9), config.prompt_part


@pytest.mark.parametrize("recipe,values", CASES)
def test_no_two_steps_draw_the_same_answers(recipe, values):
    """Answers follow from policy, prompt, temperature and seed. Where two steps had all in common, a second round would
    sample the first one's answers again, or a reward model would choose among the answers that it was trained on.
    """
    drawn = [
        (label, inputs, config, seed)
        for label, stage, inputs, config, seed, _ in traced(recipe, load_config(recipe, values))
        if stage == "rejection" and not any(name.startswith("candidates") for name in inputs)
    ]
    for (one, inputs, config, seed), (other, others, section, another) in combinations(drawn, 2):
        (low, high, part), (first, last, of) = prompts_of(config), prompts_of(section)
        overlap = low < last and first < high and part == of
        same = (inputs["model"], inputs["prompts"], config.system, seed) == (
            others["model"],
            others["prompts"],
            section.system,
            another,
        )
        assert not (overlap and same), f"{one} and {other} draw the same answers"


PRESETS = [(recipe, name) for recipe in BRANCHES for name in presets(recipe)]


@pytest.mark.parametrize("recipe,given", CASES + PRESETS)
def test_every_step_takes_the_inputs_and_settings_that_it_is_given(recipe, given, monkeypatch):
    """What the last step would refuse after days of the others is refused before the first one."""
    values = load_preset(recipe, given) if isinstance(given, str) else given
    monkeypatch.setattr("flows.recipe.look", lambda ref, kind: None)  # nothing of the table's is there
    method, config = get_recipe(recipe).method, load_config(recipe, values)
    if idle := unread(recipe, method, config).keys() & IDLE:
        left = {name: ref for name, ref in values["data"].items() if f"data.{name}" not in idle}
        config = load_config(recipe, {**values, "data": left})
    if "model" not in values:  # published lengths are for a model of one's own
        made = [name for name in type(config).model_fields if hasattr(getattr(config, name), "max_position_embeddings")]
        config = load_config(recipe, merge(values, {name: {"max_position_embeddings": 1 << 20} for name in made}))
    rehearse(recipe, method, config)


@pytest.mark.parametrize("recipe,given", CASES + PRESETS)
def test_a_configuration_that_says_everything_makes_the_same_plan(recipe, given):
    """The form of Prefect's UI and the record that a run is repeated from give every default."""
    config = load_config(recipe, load_preset(recipe, given) if isinstance(given, str) else given)
    again = load_config(recipe, json.loads(json.dumps(config.model_dump(mode="json"))))
    assert traced(recipe, again) == traced(recipe, config)


def test_an_agent_is_paid_by_its_environment_unless_something_else_is_written():
    for values, kind in (
        ({}, "environment"),
        ({"rl": {"rewards": [{"kind": "verifier"}]}}, "verifier"),
        ({"environment": {"environment": "debate"}, "rl": {"num_generations": 2}}, "debate"),
    ):
        (rl,) = (step[3] for step in traced("agent", load_config("agent", values)) if step[0] == "rl")
        assert [one.kind for one in rl.rewards] == [kind]


@pytest.mark.parametrize(
    "recipe,values,keys",
    [
        ("rest", {"rl": {"kl_coef": 0.1}}, {"rl.kl_coef"}),
        ("rest", {"rl": {"kl_coef": 0.1}, "rl_after": True}, set()),
        (
            "rest",
            {**MINE, "pretraining": {"max_steps": 9}, "data": {"text": "(t)"}},
            {"pretraining.max_steps", "data.text"},
        ),
        ("rest", {"sample": {"allow_empty": False}}, {"sample.allow_empty"}),
        ("rest", {"judge": "(j)"}, {"judge"}),
        ("rest", {"judge": "(j)", "sample": JUDGED}, set()),
        ("rest", {**MINE, "judge": MINE["model"], "rounds": 1, "sample": JUDGED}, set()),  # what self means, too
        ("r1", {"zero": {"max_steps": 9}}, {"zero.max_steps"}),
        ("r1", {"zero": {"max_steps": 9}, "zero_branch": True}, set()),
        ("hh", {"labels": "fresh", "preference": {"replay_fraction": 0.3}}, {"preference.replay_fraction"}),
        ("hh", {"scale": 0.01, "rl": {"max_steps": 2350}}, set()),  # rounded to what the default is
    ],
)
def test_settings_whose_branch_is_off_are_refused(recipe, values, keys):
    """What a preset sets for a branch that is off is nobody's choice: the test above has presets that do so."""
    method, config = get_recipe(recipe).method, load_config(recipe, values)
    assert unread(recipe, method, config).keys() == keys
    if keys and "model" not in values:
        with pytest.raises(ValueError, match=f"{min(keys)}: no step of this run reads it .*; leave it out"):
            rehearse(recipe, method, config)


def test_a_model_that_is_no_policy_or_no_reward_model_is_told_before_the_first_step(tmp_path, monkeypatch):
    """Its config says so, and not only the step that loads it."""
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    for name, kind in (("words", "LlamaForCausalLM"), ("scores", "LlamaForSequenceClassification")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [kind]}))
    words, scores = str(tmp_path / "words"), str(tmp_path / "scores")
    method = get_recipe("online_dpo").method
    rehearse(
        "online_dpo", method, load_config("online_dpo", {"model": words, "reward_model": scores, "sample": SCORED})
    )
    rehearse("online_dpo", method, load_config("online_dpo", {"model": words, "judge": words, "sample": JUDGED}))
    for values, said in (
        ({"model": scores}, f"model: {scores} is a LlamaForSequenceClassification, whose head gives scores"),
        ({"judge": scores, "sample": JUDGED}, f"judge: {scores} is a LlamaForSequenceClassification"),
        ({"reward_model": words, "sample": SCORED}, f"reward_model: {words} is a LlamaForCausalLM and no reward model"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            rehearse("online_dpo", method, load_config("online_dpo", values))
    (tmp_path / "words" / "reward_calibration.json").touch()  # a reward model that scores by its words
    rehearse("online_dpo", method, load_config("online_dpo", {"reward_model": words, "sample": SCORED}))


def test_a_model_without_room_for_what_is_sampled_is_told_before_the_first_step(tmp_path, monkeypatch):
    """The evaluation behind all of the training would be the first to say so."""
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, text in ((model, {"max_position_embeddings": 256}), (other, {"max_position_embeddings": 2048})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "text_config": text}))
    method = get_recipe("verifiable").method

    def values(model, length, **more):
        evaluate = {"max_completion_length": length, **more}
        rl, data = {"max_completion_length": 64}, {"demonstrations": str(tmp_path / "model/config.json")}
        return load_config("verifiable", {"model": str(model), "data": data, "rl": rl, "evaluate": evaluate})

    rehearse("verifiable", method, values(model, 255))
    rehearse("verifiable", method, values(other, 256))
    rehearse("verifiable", method, values(model, 256, multiple_choice=["letter"]))  # nothing may be sampled there
    with pytest.raises(ValueError) as refused:
        rehearse("verifiable", method, values(model, 256))
    first, others = str(refused.value).splitlines()
    said = "max_completion_length=256 leaves no room for a prompt in the 256 positions of"
    assert first == f"evaluate_start: {said} model ({model}); write a smaller one, or give a model with more"
    assert others.startswith(f"evaluate_sft, evaluate_rl: {said} the model; write")
    # of a model that a recipe makes from nothing
    config = {"rejection": {"max_completion_length": 600}}
    with pytest.raises(ValueError, match="rejection: max_completion_length=600 leaves no room .* 512 positions"):
        rehearse("post_training", get_recipe("post_training").method, load_config("post_training", config))


@pytest.mark.parametrize("recipe,values", [case for case in CASES if "model" in case[1]])
def test_data_are_checked_before_anything_is_trained(recipe, values):
    """A file that holds something else than was thought is told of at once, and not behind days of RL."""
    stages = [stage for _, stage, *_ in traced(recipe, load_config(recipe, values))]
    assert "ingest" not in stages[stages.count("ingest") :], stages


def others(annotation, value):
    """Values other than this one that a setting of the annotation may have."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return others(parts[0], value)
    if origin in (Union, UnionType):
        return [other for part in parts if part is not type(None) for other in others(part, value)]
    if origin is Literal:
        return [part for part in parts if part != value]
    if annotation is bool:
        return [not value]
    if annotation in (int, float):
        return [(value or 0) + annotation(1), annotation((value or 0) * 0.5 + 0.1), (value or 0) + annotation(10)]
    if annotation is str:
        return ["(other)"]
    if origin is list:
        return [[*(value or []), 99.0], (value or [])[:-1]]
    more = ("(more)", {"preset": "rloo"}, {}) if isinstance(value, dict) else ()
    return [{**value, "more": one} for one in more]


def changed(config, name):
    """The configuration with one setting, or one of a section's, at other values (not validated)."""
    value = getattr(config, name)
    if isinstance(value, BaseModel) and name != "data":
        for leaf, field in list(type(value).model_fields.items()):
            for other in others(field.annotation, getattr(value, leaf)):
                if isinstance(other, (int, float)) and f"{name}.{leaf}" not in config.NOT_READ:
                    yield config.model_copy(update={name: value.model_copy(update={leaf: other})})
        return
    for other in others(type(config).model_fields[name].annotation, value):
        yield config.model_copy(update={name: other})


def reaches(recipe, plan, different):
    """Whether another setting makes another plan."""
    for other in different:
        # one that the recipe would have refused: the next one
        with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):
            if traced(recipe, other) != plan:
                return True
    return False


#: What is asked for by kinds of reward components alone (flows.start.GIVEN_TO).
OF_REWARDS = {"group_preference", "context", "rubric"}


@pytest.mark.parametrize("recipe", BRANCHES)
def test_every_setting_reaches_a_step_or_is_refused(recipe):
    """No setting of a recipe is read by nobody in all of its branches, unless it is refused with what to write."""
    configs = [load_config(recipe, {**values, "seed": 7}) for values in BRANCHES[recipe]]
    kind, plans = type(configs[0]), [traced(recipe, config) for config in configs]
    for name in kind.model_fields.keys() - OF_REWARDS - kind.NOT_READ.keys() - {"data"}:
        assert any(reaches(recipe, plan, changed(config, name)) for config, plan in zip(configs, plans)), name
    if "data" in kind.model_fields:
        for name in type(configs[0].data).model_fields:
            for_data = (
                (
                    plan,
                    [
                        config.model_copy(update={"data": config.data.model_copy(update={name: other})})
                        for other in others(type(config.data).model_fields[name].annotation, getattr(config.data, name))
                    ],
                )
                for config, plan in zip(configs, plans)
            )
            unread = f"data.{name}" in kind.NOT_READ
            assert any(reaches(recipe, *one) for one in for_data) != unread, f"data.{name}"
    for key in kind.NOT_READ:
        section, _, leaf = key.partition(".")
        different = (
            [
                config.model_copy(update={section: part.model_copy(update={leaf: other})})
                for config in configs
                for part in [getattr(config, section)]
                for other in others(type(part).model_fields[leaf].annotation, getattr(part, leaf))
            ]
            if leaf
            else [other for config in configs for other in changed(config, section)]
        )
        assert different, key
        for other in different[:1]:
            with pytest.raises(ValueError, match=f"{key} is not read by this recipe"):
                other._all_are_read()


def from_form(recipe: str, values: dict):
    """The config of a run that Prefect starts with these values."""
    return get_recipe(recipe).validate_parameters({"config": values})["config"]


def test_a_recipe_s_form_that_sends_its_defaults_has_chosen_none_of_them():
    """An adapter's learning rate follows lora_rank in a form as it does on the command line."""
    form = load_config("preference", {}).model_dump(mode="json")
    form["sft"] |= {"lora_rank": 16}
    meant = load_config("preference", {"sft": {"lora_rank": 16}})
    assert from_form("preference", form) == meant and meant.sft.learning_rate != form["sft"]["learning_rate"]
    given = {"sft": {"lora_rank": 16, "learning_rate": form["sft"]["learning_rate"]}}
    assert from_form("preference", given) == load_config("preference", given) != meant  # no form leaves settings out
    with pytest.raises(ConfigError, match=r"sft.learning_rate=2e-05 is the usual value.*sft.learning_rate=0.0002"):
        refuse_what_forms_lose(
            load_config("preference", given), load_config("preference", given).model_dump(mode="json")
        )


@pytest.mark.parametrize("recipe, given", CASES + PRESETS)
def test_the_form_of_a_deployment_gives_what_it_shows(recipe, given):
    config = load_config(recipe, load_preset(recipe, given) if isinstance(given, str) else given)
    assert from_form(recipe, config.model_dump(mode="json")) == config
