"""Rows encoded by several processes are those of one."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from stages.running import parallel
from stages.chat import RenderError, renderer_for, rendering
from storage.datasets import open_dataset


@pytest.fixture(params=(1, 3))
def workers(request, monkeypatch):
    monkeypatch.setattr(parallel, "processes", lambda: request.param)
    monkeypatch.setattr(parallel, "PART", 7)
    monkeypatch.setattr(parallel, "WORTH", 2)
    return request.param


def of(rows):
    return [(n, n * n) for n in rows if n % 3], {"third": sum(n % 3 == 0 for n in rows)}


def test_order_and_counts(workers):
    items, dropped = parallel.items_of(range(1000), of, expected=1000)
    assert items == [(n, n * n) for n in range(1000) if n % 3] and dropped == {"third": 334}
    items, dropped = parallel.items_of(iter(range(1000)), of, expected=1000, limit=10)
    assert [n for n, _ in items] == [1, 2, 4, 5, 7, 8, 10, 11, 13, 14] and dropped == {"third": 5}
    assert parallel.items_of([], of, expected=0) == ([], {})
    assert parallel.items_of(iter(range(1000)), of, expected=1000, limit=0) == ([], {}), "no validation rows means none"


def test_a_stage_tells_how_far_it_has_read_many_rows(tiny, data, spec, workers, monkeypatch):
    """Minutes may pass before the first step; of few rows nothing is told."""
    from stages import harness

    told = {}
    for few in (False, True):
        if few:
            monkeypatch.setattr(parallel, "WORTH", 10**6)
        monkeypatch.setattr(harness, "PROGRESS_SECONDS", 0.0)
        events = []
        inputs = {"model": tiny["policy"], "data": data["demonstrations"]}
        harness.execute(spec("sft", {"max_steps": 1, "batch_size": 2}, inputs, f"few {few}"), events.append)
        told[few] = [(e["done"], e["total"]) for e in events if e.get("message") == "rows read"]
    rows = open_dataset(data["demonstrations"]).rows_of("train")
    assert told == {False: [(min(at, rows), rows) for at in range(7, rows + 7, 7)], True: []}


def test_an_error_is_raised_where_it_arises(workers):
    def refusing(rows):
        for n in rows:
            with rendering({"row_id": f"r{n}"}):
                if n == 95:
                    raise RenderError("no such role")
        return rows, {}

    with pytest.raises(RenderError, match="row r95: no such role") as caught:
        parallel.items_of(range(200), refusing, expected=200)
    assert caught.traceback[-1].path.name == "chat.py"  # as without processes: what the harness tells refusals by


def test_a_process_that_is_killed_costs_time_only(workers):
    mine = os.getpid()

    def dying(rows):
        if 50 in rows and os.getpid() != mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return of(rows)

    assert parallel.items_of(range(300), dying, expected=300)[0] == of(range(300))[0]


def items(tiny, data, what):
    """Items of each kind of row as their stage reads them."""
    from stages.align import Config as AlignConfig
    from stages.algorithms import DIRECT_METHODS
    from stages.direct.preference_items import Encoder
    from stages.reward_models.reward_data import encode
    from stages.reward_models.reward_heads import new_reward_model, reader_for
    from stages.reward_model import Config as RewardConfig
    from stages.reward_models.reward_objectives import REWARD_OBJECTIVES
    from stages.sft import encode_demonstrations

    renderer = renderer_for(tiny["policy"])
    if what == "sft":
        return encode_demonstrations(
            open_dataset(data["demonstrations"]),
            "train",
            renderer,
            SimpleNamespace(train_on="all_assistant", max_length=32),
        )
    if what == "align":
        encoder = Encoder(
            renderer,
            DIRECT_METHODS["kto"],
            AlignConfig(method="kto", max_length=32),
            lambda *_: np.random.default_rng(0),
        )
        return encoder(open_dataset(data["pairs"]), "train"), encoder.dropped
    from collections import Counter

    dropped = Counter()
    reader = reader_for(tiny["policy"], new_reward_model(tiny["policy"]), 32)
    return (
        encode(
            REWARD_OBJECTIVES["bt"], open_dataset(data["pairs"]), "train", reader, RewardConfig(max_length=32), dropped
        ),
        dropped,
    )


@pytest.mark.parametrize("what", ("sft", "align", "reward_model"))
def test_every_stage_reads_the_same_items(tiny, data, what, monkeypatch):
    found = []
    for count in (1, 3):
        monkeypatch.setattr(parallel, "processes", lambda: count)
        monkeypatch.setattr(parallel, "PART", 5)
        monkeypatch.setattr(parallel, "WORTH", 2)
        made, dropped = items(tiny, data, what)
        found.append(
            (
                [
                    (
                        i.row_id,
                        i.prompt.tolist(),
                        [r.tolist() for r in i.responses],
                        [m.tolist() for m in i.masks],
                        repr(i.extra),
                    )
                    for i in made
                ],
                dict(dropped),
            )
        )
    assert found[0] == found[1] and len(found[0][0]) > 5 and sum(found[0][1].values())
