"""`posttrain compare`: two runs, or two evaluations, side by side. Numbers of different protocols are refused."""

from __future__ import annotations

from typing import Any

from storage import records, store
from stages.spec import ConfigError


def compare(a: str, b: str) -> dict[str, Any]:
    """{"metrics": rows {step, metric, a, b, difference}, "config": differing settings}.

    Raises ConfigError for things that cannot be compared (a run with an evaluation, different protocols).
    """
    left, right = load(a), load(b)
    shared = [label for label in left if label in right]
    if len(left) == len(right) == 1:
        (label_a, one), (label_b, two) = next(iter(left.items())), next(iter(right.items()))
        if one["stage"] != two["stage"]:
            raise ConfigError(f"{a} is the result of stage {one['stage']} and {b} of stage {two['stage']}; compare two of the same stage")
        shared, right = [label_a], {label_a: two}
    if not shared:
        raise ConfigError(f"{a} and {b} have no step in common: {', '.join(left)} against {', '.join(right)}")
    rows, settings = [], []
    for label in shared:
        one, two = left[label], right[label]
        same_protocol(label, one, two)
        for metric in dict.fromkeys([*one["metrics"], *two["metrics"]]):
            x, y = one["metrics"].get(metric), two["metrics"].get(metric)
            if not any(isinstance(value, (int, float)) for value in (x, y)):
                continue
            both = all(isinstance(value, (int, float)) for value in (x, y))
            rows.append({"step": label, "metric": metric, "a": x, "b": y, "difference": y - x if both else None})
        settings += [f"{label}.{line}" for line in differences(one.get("config") or {}, two.get("config") or {})]
    return {"a": a, "b": b, "metrics": rows, "config": settings}


def load(text: str) -> dict[str, dict[str, Any]]:
    """label -> stage record, of a run (all its steps) or of one stage result (a ref, a path or a stage key)."""
    if store.is_ref(text):
        makers = records.makers_of(store.resolve(text).digest)
        if not makers:
            raise ConfigError(f"{text} was not made by a stage of this store, so it has no numbers; give a run id or the ref of an evaluation")
        return {makers[0]["stage"]: makers[0]}
    try:
        run = records.get_run(text)
    except store.StoreError as error:
        found = records.match(text) if len(text) >= 8 else None
        if found is None:
            raise ConfigError(str(error)) from None
        return {found["stage"]: found}
    return {label: found for label, entry in run.stages().items() if (found := records.read(entry["key"]))}


def same_protocol(label: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    """Refuse to set numbers side by side that were measured in different ways."""
    hashes = [record["metrics"].get("protocol_hash") or record["metrics"].get("protocol") for record in (one, two)]
    if hashes[0] != hashes[1]:
        what = "; ".join(differences(one.get("config") or {}, two.get("config") or {})) or "their held-out data or code"
        raise ConfigError(f"step {label} was evaluated under different protocols ({hashes[0]} against {hashes[1]}), so its numbers "
                          f"cannot be compared. They differ in: {what}. Evaluate both models with the same settings and prompts.")


def differences(one: dict[str, Any], two: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: a -> b` of every setting that differs."""
    lines = []
    for key in dict.fromkeys([*one, *two]):
        x, y = one.get(key), two.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            lines += differences(x, y, f"{prefix}{key}.")
        elif x != y:
            lines.append(f"{prefix}{key}: {x} -> {y}")
    return lines
