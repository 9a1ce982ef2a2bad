"""The tables of stages/FROM_TRL.md, FROM_VERL.md and FROM_OPENRLHF.md, as settings of both sides."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import yaml

PAGE, VERL, OPENRLHF = (
    (Path(__file__).parents[2] / "stages" / f"FROM_{name}.md").read_text(encoding="utf-8")
    for name in ("TRL", "VERL", "OPENRLHF")
)


@dataclasses.dataclass
class Row:
    """``section``: the heading, and behind a slash the first word of the paragraph above the table; ``stage``: the one
    that the heading names (of the optimizer's settings sft).
    """

    section: str
    stage: str
    theirs: str
    ours: str
    says: str

    def settings(self, side: str) -> dict:
        """The settings of a cell, as keyword arguments; ``options.x`` become a dict."""
        found: dict = {}
        for name, value in re.findall(r"([\w.]+)=(\[.*?\](?= \w+=|$)|\S+)", getattr(self, side)):
            part, _, inner = name.rpartition(".")
            (found.setdefault(part, {}) if part else found)[inner] = yaml.safe_load(value)
        return found


def rows_of(page: str) -> list[Row]:
    found, section, stage, above = [], "", "", ""
    for line in page.splitlines():
        if line.startswith("## "):
            section, _, named = line[3:].partition(":")
            stage, above = named.strip(" `") or "sft", ""
        elif line and not line.startswith("|"):
            above = line.split()[0].strip("`(,:")
        elif match := re.match(r"\| `([^`]*)`([^|]*)\| `([^`]*)` \| (the same|differs)(.*) \|$", line):
            found.append(
                Row(
                    f"{section}/{above}",
                    stage,
                    match[1] + match[2].rstrip().replace("`", ""),
                    match[3],
                    match[4] + match[5],
                )
            )
    return found


def names_of(page: str) -> list[tuple[list[str], list[str], str]]:
    """(their settings, ours, remark) of the tables that have names and no values, under headings that end in a colon
    and a stage.
    """
    found = []
    for line in page.splitlines():
        if match := re.match(r"\| ((?:`[\w.]+`(?:, )?)+) \| ((?:`[\w.]+`(?:, )?)+|) ?\| ?(.*?) ?\|$", line):
            found.append((re.findall(r"`([\w.]+)`", match[1]), re.findall(r"`([\w.]+)`", match[2]), match[3]))
    return found


ROWS = rows_of(PAGE)
#: (TRL's trainer, setting, default, stage or preset here, setting, default) of the table of defaults.
DEFAULTS = re.findall(r"^\| `(\w+)Config\.(\w+)=(\S+)` \| `(?:preset )?(\w+)[.:] ?(\w+)=(\S+)` \|$", PAGE, re.M)

LOGGED = PAGE.partition("## What is logged")[2].partition("\n## ")[0]


def not_logged_as(stage: str) -> set[str]:
    """What TRL logs and this stage does not under that name, by the first table of the page's section on logs."""
    table = LOGGED.partition("| logged by TRL |")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    found = set()
    for cell in cells:
        everywhere, _, rest = cell.partition(";")
        found |= set(re.findall(r"`([\w/]+)`", everywhere if stage == "rl" else cell))
    return found


def logged_by_trl(trainer: str) -> list[str]:
    """The names in the metrics of TRL's trainer (``grpo``); none where TRL is not installed."""
    import importlib.util

    if not (found := importlib.util.find_spec("trl")):
        return []
    source = Path(found.origin).with_name("trainer").joinpath(f"{trainer}_trainer.py").read_text(encoding="utf-8")
    names = re.findall(r"""self\._metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]""", source)
    assert len(names) > 3
    return sorted({name.replace("{reward_func_name}", "NAME") for name in names})
