"""What the three READMEs say exists, and what exists is in them."""

import re
import typing
from pathlib import Path

import pytest

from flows.config import keys, presets
from flows.recipe import RECIPES, get_recipe
from stages.registry import STAGES, get_stage
from stages.reward.components import RewardComponent

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "flows/README.md", "stages/README.md")
}


def test_every_recipe_and_preset_is_described():
    words = set(re.findall(r"[\w-]+", TEXTS["flows/README.md"]))
    assert [name for name in RECIPES if name not in words] == []
    assert [f"{name}.{preset}" for name in RECIPES for preset in presets(name) if preset not in words] == []


#: Stages that only recipes and demos call.
INNER = {"world", "base_model", "curriculum", "objective", "overoptimisation_arms", "learning"}


def test_every_stage_and_kind_of_reward_is_described():
    code = set(
        re.findall(
            r"\w+", " ".join(re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", TEXTS["stages/README.md"], flags=re.S)))
        )
    )
    assert [name for name in STAGES if name not in code | INNER] == []
    kinds = typing.get_args(RewardComponent.model_fields["kind"].annotation)
    assert [kind for kind in kinds if kind not in code] == []


def commands():
    """(file, words of a command) for every posttrain command of a code block or of a table's or line's code."""
    for file, text in TEXTS.items():
        for found in re.findall(r"posttrain (?:run|stage) [^\n`]*(?:\\\n[^\n`]*)*", text):
            yield file, found.partition("  #")[0].replace("\\\n", " ").split()
        if file == "flows/README.md":  # a row of a table: the recipe, what it does, what it is called with
            for name, preset, given in re.findall(r"^\| `(\w+)(?: --preset (\w+))?` \|[^|]*\| (.*) \|$", text, re.M):
                yield file, ["posttrain", "run", name, *re.findall(r"--set \S+", given)]


@pytest.mark.parametrize(
    "file,words", [pytest.param(*one, id=f"{one[0]}-{' '.join(one[1][1:4])}-{i}") for i, one in enumerate(commands())]
)
def test_commands_name_settings_and_inputs_that_exist(file, words):
    _, what, name, *rest = words
    if name.isupper():
        return
    assert name in (RECIPES if what == "run" else STAGES), f"{file}: {' '.join(words)}"
    config = get_recipe(name).config_type if what == "run" else get_stage(name).Config
    known = set(keys(config))
    line = " ".join(rest)
    for key in re.findall(r"--set '?([a-z_.0-9]+)=", line):
        free = [
            one
            for n in range(1, key.count(".") + 1)
            if (one := ".".join(key.split(".")[:n])) in known
            and not any(other.startswith(one + ".") for other in known)
        ]
        assert key in known or free, f"{file}: {key} of {name}"  # free: a mapping whose keys are the user's
    if what == "stage":
        for key in re.findall(r"--input ([\w]+)[./\w]*=", line):
            assert key in get_stage(name).SPEC.inputs, f"{file}: input {key} of {name}"


def test_recipes_without_a_demo_are_named():
    text = TEXTS["flows/README.md"]
    demo, all_, without = re.search(
        r"(\d+) of (\d+) recipes run without any.*?`zephyr_demo`\)\.(.*?) ask for", text, re.S
    ).groups()
    lacking = set(RECIPES) - {path.name.split(".")[0] for path in (ROOT / "flows/presets").glob("*demo.yaml")}
    assert set(re.findall(r"`(\w+)`", without)) == lacking
    assert (int(demo), int(all_)) == (len(RECIPES) - len(lacking), len(RECIPES))


def test_modules_that_are_named_exist():
    """Where the READMEs say that something is (NAME stands for any)."""
    places = {
        (file, place)
        for file, text in TEXTS.items()
        for place in re.findall(r"\b(?:flows|tasks|stages|storage|tests|infra)/[\w/.-]*\w", text)
        if "NAME" not in place
    }
    assert len(places) > 30
    assert sorted((file, place) for file, place in places if not (ROOT / place).exists()) == []
