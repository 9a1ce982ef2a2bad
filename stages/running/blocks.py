"""Work in blocks, each done once however often the stage is killed.

:func:`remaining_blocks`: rows that are written as they are made, a checkpoint behind each block.

:func:`in_blocks`: values that take long to compute and are needed all together before a stage can write or train. What
is finished lies in ``blocks/NAME.jsonl`` of the work directory, a line per block, durable before the next block
begins, and counts as read only where its checksum is right. The values must be a function of the stage's key (code,
settings, inputs, seed), so they need no checkpoint; a stage computes them before its first one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stages.running import journal, remembered, usage


def in_blocks(
    stage,
    name: str,
    items: Sequence,
    compute: Callable[[Sequence], Sequence],
    block: int,
    unit: str = "rows",
    together: bool = False,
) -> list:
    """``compute(items[a:b])`` gives a value per item, plain numbers, texts and lists (JSON; arrays become lists);
    returns the values of all items.

    What a block used (tokens, questions to judges), warned of and remembers (:mod:`stages.running.remembered`) is told
    again where it is read back.

    Args:
        name: of the values within the stage.
        block: items of a block; it must not depend on the clock.
        unit: of the items, for the progress.
        together: every rank calls and computes; else only one rank does both.
    """
    path = stage.workdir / "blocks" / f"{name}.jsonl"
    writes = not together or stage.rank == 0
    lines = _finished(path, len(items), block) if writes else []
    if together:
        from stages.running import ranks

        lines = ranks.gather(lines)[0]
    values = [value for line in lines for value in line["values"]]
    if lines and stage.units_done == 0:
        if writes:  # a checkpoint would hold both
            usage.count(**usage.total([line["usage"] for line in lines]))
            for line in lines:
                for warning in line["warnings"]:
                    stage.warn(**warning)
        for line in lines:
            remembered.learn(line["remembered"][stage.rank] if stage.rank < len(line["remembered"]) else {})
        stage.log(f"{len(values)} of {len(items)} {unit} were done before ({name})")
    for start in range(len(values), len(items), block):
        before, known, answered, held = usage.so_far(), len(stage.warnings), journal.mark(), remembered.mark()
        found = list(compute(items[start : start + block]))
        used = {k: n - before.get(k, 0) for k, n in usage.so_far().items()}
        learned = [remembered.since(held)]
        if together:
            used, learned = usage.total(ranks.gather(used)), ranks.gather(learned[0])
        text = json.dumps(
            {
                "start": start,
                "items": len(items),
                "block": block,
                "values": found,
                "usage": {k: n for k, n in used.items() if n},
                "warnings": stage.warnings[known:],
                "remembered": learned,
            },
            default=lambda array: array.tolist(),
        )
        if writes:
            _append(path, text)
        if stage.world_size == 1:  # another rank may end before this one has written
            journal.forget(answered)
        values += json.loads(text)["values"]
        stage.progress(min(start + block, len(items)), len(items), unit)
    return values


def remaining_blocks(
    stage, items: Sequence, block: int, unit: str = "rows", state: Callable[[], dict[str, Any]] = dict
) -> Iterator[tuple[int, Sequence]]:
    """(place of its first item, items) of every block that the checkpoint of this start does not hold. Behind each, what
    was written of it is made permanent: a killed stage repeats only the block it was in.

    Args:
        block: items of a block; it must not depend on the clock.
        unit: of the items, for the progress.
        state: what the checkpoint holds besides, once a block is done.
    """
    for start in range(stage.units_done * block, len(items), block):
        yield start, items[start : start + block]
        stage.save_checkpoint(start // block + 1, state(), {})
        stage.progress(min(start + block, len(items)), len(items), unit)


def _append(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n")
        file.flush()
        os.fsync(file.fileno())


def _finished(path, items: int, block: int) -> list[dict[str, Any]]:
    """The complete blocks of a file in order, those of exactly these items and blocks; what follows a torn or damaged
    line is cut off.
    """
    if not path.exists():
        return []
    found, good = [], 0
    with open(path, "rb") as file:
        for line in file:
            digest, _, text = line.removesuffix(b"\n").partition(b" ")
            if not line.endswith(b"\n") or hashlib.sha256(text).hexdigest().encode() != digest:
                break
            entry = json.loads(text)
            if (entry["start"], entry["items"], entry["block"]) != (len(found) * block, items, block):
                break
            found.append(entry)
            good += len(line)
    os.truncate(path, good)
    return found
