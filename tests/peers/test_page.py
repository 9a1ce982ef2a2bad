"""What stages/FROM_TRL.md, FROM_VERL.md and FROM_OPENRLHF.md say of this project, also where those are not installed:
its settings exist and go together, and its defaults are ours.
"""

import re

import pytest
import yaml

from stages.algorithms import RL_PRESETS
from stages.policy.presets import RL_AXES
from stages.direct.direct_alignment import DirectAlignment
from stages.registry import get_stage
from stages.rl import resolve_preset
from tests.peers.page import (
    DEFAULTS,
    LOGGED,
    OPENRLHF,
    PAGE,
    ROWS,
    VERL,
    logged_by_trl,
    names_of,
    not_logged_as,
    rows_of,
)


@pytest.mark.parametrize("row", [*ROWS, *rows_of(VERL), *rows_of(OPENRLHF)], ids=lambda row: f"{row.stage}: {row.ours}")
def test_the_settings_of_a_row_are_those_of_its_stage(row):
    config = get_stage(row.stage).SPEC.config(**row.settings("ours"))
    if row.stage == "rl":
        resolve_preset(config)
    elif row.stage == "align":
        DirectAlignment(config)


def test_no_row_of_the_page_is_passed_over():
    assert (
        len(ROWS)
        == len(
            [line for line in PAGE.splitlines() if line.startswith("| `") and re.search(r"\| (the same|differs)", line)]
        )
        > 70
    )
    assert all(row.settings("theirs") and row.settings("ours") for row in ROWS)
    assert len(DEFAULTS) == len(re.findall(r"^\| `\w+Config\.", PAGE, re.M)) > 10


@pytest.mark.parametrize("stage, setting, value", [one[3:] for one in DEFAULTS])
def test_a_default_of_ours_is_what_the_page_says(stage, setting, value):
    found = (
        getattr(RL_PRESETS[stage], RL_AXES[setting])
        if stage in RL_PRESETS
        else get_stage(stage).SPEC.config.model_fields[setting].default
    )
    assert found == yaml.safe_load(value)


@pytest.mark.parametrize("page, wanted", [(VERL, 40), (OPENRLHF, 30)], ids=["verl", "OpenRLHF"])
def test_no_row_of_another_page_is_passed_over(page, wanted):
    rows = rows_of(page)
    assert (
        len(rows)
        == len(
            [line for line in page.splitlines() if line.startswith("| `") and re.search(r"\| (the same|differs)", line)]
        )
        >= wanted
    )
    assert (
        len(names_of(page)) == len(re.findall(r"^\| `", page.partition("## Names")[2].partition("\n## ")[0], re.M)) > 35
    )


@pytest.mark.parametrize(
    "theirs, ours", [(name, ours) for page in (VERL, OPENRLHF) for names, ours, _ in names_of(page) for name in names]
)
def test_a_name_of_theirs_leads_to_ours(theirs, ours):
    """Written for a stage under its whole dotted name, as a mapping of mappings, or as its last part where that says
    enough: the refusal names what the page names.
    """
    from flows.config import build
    from stages.spec import ConfigError

    config = get_stage("rl").SPEC.config
    assert set(ours) <= set(config.model_fields)
    given = 1
    for part in reversed(theirs.split(".")):
        given = {part: given}
    if theirs in config.model_fields:
        assert theirs in ours
        return
    with pytest.raises(ConfigError) as told:
        build(config, given)
    assert any(f"here it is {name!r}" in str(told.value) for name in ours), str(told.value)


@pytest.mark.parametrize("trainer", ["sft", "reward", "dpo", "kto", "grpo", "rloo"])
def test_the_page_says_of_every_metric_of_trls_what_it_is_here(trainer):
    said = re.findall(r"`([\w/…]+)`", LOGGED)
    patterns = [re.escape(name).replace("…", ".+") for name in said]
    assert not [name for name in logged_by_trl(trainer) if not any(re.fullmatch(one, name) for one in patterns)]
    assert {"num_tokens", "eval_NAME"} <= not_logged_as("rl") < not_logged_as("align")
