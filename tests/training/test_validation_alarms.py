"""Warnings that come while a stage trains, at its validation passes."""

import json
from pathlib import Path

import pytest

from stages.harness import execute
from stages.validation_alarms import RISING, rises
from storage.datasets import write_dataset
from storage.schema import complete_row
from tests.common import assistant, user


def rows(passes, losses):
    """Metric rows: a pass, then one training step, in turn; a pass is the last one."""
    found = [{"step": 0, "validation/loss": passes[0]}]
    for step, (value, loss) in enumerate(zip(passes[1:], losses), 1):
        found += [{"step": step, "loss": loss}, {"validation/loss": value}]
    return found


def test_three_rises_in_a_row_while_the_training_loss_falls():
    down = [3.0, 2.0, 1.5, 1.0, 0.5]
    assert rises(rows([2.0, 2.1, 2.2, 2.3], down)) and rises(rows([3.0, 2.0, 2.1, 2.2, 2.3], down))
    each = [{"step": k, "loss": down[k], "validation/loss": 2.0 + k / 10} for k in range(1, 4)]
    begun = {"step": 0, "validation/loss": 2.0}
    assert rises([begun, *each]) and rises([begun, *each[:2], {"validation/loss": 2.3}]), "eval_every=1, in its midst"
    assert not rises(rows([2.0, 2.1, 2.2], down)), "two"
    assert not rises(rows([2.0, 2.1, 2.1, 2.3], down)), "what stays does not rise"
    assert not rises(rows([2.0, 2.1, 2.2, 2.3, 2.0], down)), "it fell again"
    assert not rises(rows([2.0, 2.1, 2.2, 2.3], down[::-1])), "training diverges, which is told as that"
    assert not rises(rows([2.0, "nan", 2.2, 2.3], down)) and not rises([])


@pytest.mark.parametrize("stage", ("sft", "reward_model", "align"))
def test_a_run_that_learns_its_rows_by_heart_is_told_so_while_it_trains(tiny, spec, tmp_path, stage):
    """Held-out rows say the opposite; where a pass is chosen by its loss there is nothing to be done."""
    yes, no = "yes good", "no bad"
    made = []
    for i in range(12):
        held_out = i % 3 == 2
        good, bad = (no, yes) if held_out else (yes, no)
        made.append(
            {"prompt": user(f"which {i}?"), "chosen": assistant(good), "rejected": assistant(bad)}
            if stage != "sft"
            else {"messages": user(f"which {i}?") + assistant(good), "train_turns": [1]}
        )
    kind = "demonstrations/1" if stage == "sft" else "pairs/1"
    made = [
        complete_row(kind, r, dataset="m", source="s", origin="human", split="validation" if i % 3 == 2 else "train")
        for i, r in enumerate(made)
    ]
    write_dataset(str(tmp_path / "data"), "m", kind, made)
    config = {"batch_size": 8, "max_length": 64, "max_steps": 60, "learning_rate": 2e-3, "eval_every": 5}
    inputs = {"model": tiny["policy"], "data": str(tmp_path / "data")}
    events: list = []
    execute(spec(stage, config, inputs, "long"), events.append)
    told = [i for i, e in enumerate(events) if e.get("code") == RISING[0]]
    assert len(told) == 1 and events[told[0]]["text"] == RISING[1]
    steps = [e["step"] for e in events[: told[0]] if e["event"] == "metric"]
    assert 0 < steps[-1] < 60, "not at the end"
    page = next(e for e in events if e["event"] == "report" and e["name"] == "summary")
    assert RISING[0] in Path(page["markdown"]).read_text()
    chosen: list = []
    execute(spec(stage, {**config, "select_by": "loss"}, inputs, "chosen"), chosen.append)
    assert RISING[0] not in json.dumps(chosen)
