"""What stages/FROM_TRL.md says of this project, also where TRL is not installed: its settings exist and go together, and its defaults are ours."""

import re

import pytest
import yaml

from stages.algorithms import RL_AXES, RL_PRESETS
from stages.direct_alignment import DirectAlignment
from stages.registry import get_stage
from stages.rl import resolve_preset
from tests.peers.page import DEFAULTS, PAGE, ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.stage}: {row.ours}")
def test_the_settings_of_a_row_are_those_of_its_stage(row):
    config = get_stage(row.stage).SPEC.config(**row.settings("ours"))
    if row.stage == "rl":
        resolve_preset(config)
    elif row.stage == "align":
        DirectAlignment(config)


def test_no_row_of_the_page_is_passed_over():
    assert len(ROWS) == len([line for line in PAGE.splitlines() if line.startswith("| `") and re.search(r"\| (the same|differs)", line)]) > 70
    assert all(row.settings("theirs") and row.settings("ours") for row in ROWS)
    assert len(DEFAULTS) == len(re.findall(r"^\| `\w+Config\.", PAGE, re.M)) > 10


@pytest.mark.parametrize("stage, setting, value", [one[3:] for one in DEFAULTS])
def test_a_default_of_ours_is_what_the_page_says(stage, setting, value):
    found = getattr(RL_PRESETS[stage], RL_AXES[setting]) if stage in RL_PRESETS else get_stage(stage).SPEC.config.model_fields[setting].default
    assert found == yaml.safe_load(value)
