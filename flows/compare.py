"""`posttrain compare`: two runs, or two evaluations, side by side. Numbers of different protocols are refused.

Differences of evaluations, and of training stages on their validation prompts, have paired intervals; training stages
also give their curves in one figure. Answers to the same prompts stand beside each other.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from storage import home, records, store, work
from stages.reporting.former_names import under_current_names
from stages.spec import ConfigError

UNFINISHED = "unfinished"  # key under which what stands for the record of a stage without one says how it stands


def compare(a: str, b: str, out: Path | None = None) -> dict[str, Any]:
    """{"metrics": rows {step, metric, a, b, difference}, "config": differing settings, "held_out": rows with intervals,
    "answers": rows, "figures": files, "notes": what could not be compared and why}. ``out``: where figures go; default
    ``POSTTRAIN_HOME/compare/KEY_A-KEY_B``.

    Raises ConfigError for things that cannot be compared (a run with an evaluation; evaluations of different protocols,
    which are left out with a note where runs have other steps in common).
    """
    left, right = (
        {label: {**r, "metrics": under_current_names(r["metrics"], r["stage"])} for label, r in load(one).items()}
        for one in (a, b)
    )
    notes: list[str] = []
    if alike := evaluated_alike(left, right):
        left, right = ({"evaluate": record} for record in alike)
        notes.append(
            f"{a} and {b} are results of different stages, so their newest evaluations under one protocol are compared:"
            f" {alike[0]['key'][:12]} and {alike[1]['key'][:12]}"
        )
    shared = [label for label in left if label in right]
    if len(left) == len(right) == 1:
        (label_a, one), (_, two) = next(iter(left.items())), next(iter(right.items()))
        if one["stage"] != two["stage"]:
            raise ConfigError(
                f"{a} is the result of stage {one['stage']} and {b} of stage {two['stage']}; compare two of the same"
                " stage, or evaluate both models with the same prompts and settings first: posttrain stage evaluate --input"
                " model=model:NAME@latest --input prompts=dataset:NAME@latest"
            )
        shared, right = [label_a], {label_a: two}
    if not shared:
        names = [", ".join(steps) or "none that has logged numbers yet" for steps in (left, right)]
        raise ConfigError(
            f"{a} and {b} have no step in common: {' against '.join(names)}; what a run does: posttrain show RUN"
        )
    rows, settings, refused = [], [], []
    more: dict[str, list] = {"held_out": [], "answers": [], "figures": [], "notes": notes}
    for label in shared:
        one, two = left[label], right[label]
        if UNFINISHED in one or UNFINISHED in two:
            found = underway(label, one, two, out)
            rows += found.pop("metrics")
            settings += found.pop("config")
            for name, values in found.items():
                more[name] += values
            continue
        if reason := other_protocol(label, one, two):
            refused.append(reason)
            continue
        told = given_answers(one, two)
        if told:
            more["notes"].append(f"{label}: {told}")
        rubrics = (
            len(
                {
                    record["inputs"]["rubric"]["digest"]
                    for record in (one, two)
                    if "rubric" in (record.get("inputs") or {})
                }
            )
            > 1
        )
        if rubrics:
            more["notes"].append(
                f"{label}: rewards are left out, because different rubrics gave them; score the answers of one with the"
                " other's rubric (stage rescore)"
            )
        apart = scored_apart(one, two)
        if apart:
            more["notes"].append(
                f"{label}: {', '.join(apart)} left out, because different"
                f" {', '.join(sorted(set().union(*apart.values())))} measured them; evaluate both models with the same"
                " inputs"
            )
        for metric in dict.fromkeys([*one["metrics"], *two["metrics"]]):
            if re.sub("_(low|high|se)$", "", metric) in apart:
                continue
            if rubrics and metric.removeprefix("last/").startswith(("reward", "frac_reward", "rubric/")):
                continue
            x, y = one["metrics"].get(metric), two["metrics"].get(metric)
            if not any(isinstance(value, (int, float)) for value in (x, y)):
                continue
            both = all(isinstance(value, (int, float)) for value in (x, y))
            rows.append({"step": label, "metric": metric, "a": x, "b": y, "difference": y - x if both else None})
        settings += [f"{label}.{line}" for line in differences(*(read_settings(record, told) for record in (one, two)))]
        if one["key"] != two["key"] and one["stage"] == "evaluate":
            for name, found in evaluations(label, one, two, apart).items():
                more[name] += found
        elif one["key"] != two["key"]:
            for name, found in training(label, one, two, place(one, two, out)).items():
                more[name] += found
    if refused and len(refused) == len(shared):
        raise ConfigError(refused[0])
    notes += refused
    changed = [label for label in shared if left[label].get("code") != right[label].get("code")]
    if changed:
        commits = {tuple((side[label].get("git") or "unknown")[:12] for side in (left, right)) for label in changed}
        notes.append(
            f"the code of {', '.join(changed)} is not the same in both: "
            + "; ".join(f"commit {one} of a, {two} of b" for one, two in sorted(commits))
        )
    return {"a": a, "b": b, "metrics": rows, "config": settings, **more}


def evaluated_alike(left: dict[str, Any], right: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The newest evaluations under one protocol of two models that different stages made; None where there are none."""
    makers = [*left.values(), *right.values()]
    if len(left) != 1 or len(right) != 1 or makers[0]["stage"] == makers[1]["stage"]:
        return None
    if any("model" not in one["outputs"] for one in makers):
        return None
    digests = [one["outputs"]["model"]["digest"] for one in makers]
    first, second = (
        [(record["metrics"].get("protocol_hash"), record) for record in records.evaluations_of(digest)]
        for digest in digests
    )
    return next(((one, two) for p, one in first for q, two in second if p and p == q), None)


def scored_apart(one: dict[str, Any], two: dict[str, Any]) -> dict[str, list[str]]:
    """{metric: inputs} of two evaluations' metrics that different reward models, judges or references measured; empty
    for other stages.
    """
    from stages.evaluation.protocol import differing_inputs

    if one["stage"] != "evaluate":
        return {}
    metas = {
        side: {
            "protocol": {
                "target": record["config"].get("target"),
                "graders": record["config"].get("rewards"),
                **{name: record["config"].get(name) for name in ("mt_bench", "refusal_judge")},
                **({"prompts": 1} if "prompts" in record["inputs"] else {}),
            },
            "model": (record["inputs"].get("model") or {}).get("digest"),
            "scorers": {name: given["digest"] for name, given in record["inputs"].items()},
        }
        for side, record in (("a", one), ("b", two))
    }
    names = dict.fromkeys(re.sub("_(low|high|se)$", "", metric) for metric in [*one["metrics"], *two["metrics"]])
    return {name: found for name in names if (found := differing_inputs(name, metas))}


def evaluations(label: str, one: dict[str, Any], two: dict[str, Any], apart: dict[str, list[str]]) -> dict[str, list]:
    """Differences of two evaluations with paired intervals, and greedy answers to the same prompts; ``apart``: metrics
    that do not compare.
    """
    from stages.evaluation import run_comparison
    from stages.compare import side_by_side
    from stages.evaluation.scores import originals, records_of
    from storage.datasets import DatasetError, open_dataset

    try:
        records = {
            which: originals(records_of(open_dataset(record["outputs"]["samples"]["path"]).iter_rows()))
            for which, record in (("a", one), ("b", two))
        }
    except (DatasetError, KeyError) as error:
        return {
            "notes": [f"{label}: differences have no intervals, because samples are gone ({error}); evaluate again"]
        }
    rows, note = run_comparison.evaluated(records["a"], records["b"], apart)
    return {
        "held_out": [{"step": label, **row} for row in rows],
        "notes": [f"{label}: {note}"] if note else [],
        "answers": [{"step": label, **row} for row in side_by_side(["a", "b"], records, 8, changes_first=True)],
    }


def training(label: str, one: dict[str, Any], two: dict[str, Any], out: Path) -> dict[str, list]:
    """Curves, held-out scores and answers of two training stages; empty for stages that log no curve."""
    from stages.evaluation import run_comparison

    found: dict[str, list] = {"held_out": [], "answers": [], "figures": curves(label, one, two, out), "notes": []}
    records = [samples_of(record) for record in (one, two)]
    if all(held for held, _ in records):
        scores, note = run_comparison.held_out(
            records[0][0],
            records[1][0],
            (one["config"], two["config"]),
            (one.get("inputs") or {}, two.get("inputs") or {}),
        )
        found["held_out"] = [{"step": label, **row} for row in scores]
        found["notes"] += [f"{label}: {note}"] if note else []
    elif any(held or sampled for held, sampled in records):
        found["notes"].append(
            f"{label}: no held-out scores, because not both runs had validation prompts; write eval_prompts=N"
        )
    pairs = [held or sampled for held, sampled in records]
    if all(pairs):
        found["answers"] = [{"step": label, **row} for row in run_comparison.answers(*pairs)]
    return found


def place(one: dict[str, Any], two: dict[str, Any], out: Path | None) -> Path:
    """Directory of the figures."""
    return out or home.subdir("compare") / f"{one['key'][:12]}-{two['key'][:12]}"


def curves(label: str, one: dict[str, Any], two: dict[str, Any], out: Path) -> list[str]:
    """The figure of what two stages logged in common, in a list; empty where there is nothing."""
    from stages.evaluation import run_comparison
    from storage.files import atomic_write_bytes

    runs = {
        f"{which} {record['key'][:6]}": [{"step": row["step"], **row["metrics"]} for row in logged(record)]
        for which, record in (("a", one), ("b", two))
    }
    png = run_comparison.curves(runs) if all(runs.values()) else None
    if png is None:
        return []
    with home.outside(out):
        atomic_write_bytes(out / f"{label}-curves.png", png)
    return [str(out / f"{label}-curves.png")]


def logged(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows {step, metrics} of what a stage logged, under the names that metrics have now."""
    return [
        {**row, "metrics": under_current_names(row["metrics"], record["stage"])}
        for row in work.metric_rows(Path(record["metrics_file"]))
    ]


def underway(label: str, one: dict[str, Any], two: dict[str, Any], out: Path | None) -> dict[str, list]:
    """Two stages of which one at least has not finished: what they logged until the last step that both have come to,
    and their curves.
    """
    rows_of = [logged(record) for record in (one, two)]
    last = min((rows[-1]["step"] for rows in rows_of if rows), default=0) if all(rows_of) else None
    found: dict[str, list] = {"metrics": [], "config": [], "figures": [], "notes": []}
    for which, record in (("a", one), ("b", two)):
        if standing := record.get(UNFINISHED):
            at = "has logged nothing yet" if standing["step"] is None else f"is at step {standing['step']}"
            found["notes"].append(f"{label} of {which} has not finished ({standing['status']}) and {at}")
    if last is not None:
        x, y = ({n: v for row in rows if row["step"] <= last for n, v in row["metrics"].items()} for rows in rows_of)
        found["metrics"] = [
            {"step": label, "metric": metric, "a": x[metric], "b": y[metric], "difference": y[metric] - x[metric]}
            for metric in x
            if all(isinstance(value.get(metric), (int, float)) for value in (x, y))
        ]
        found["notes"].append(f"{label}: its numbers are those until step {last}, the last that both have come to")
        found["figures"] = curves(label, one, two, place(one, two, out))
    given = any("answers" in (record.get("inputs") or {}) for record in (one, two))
    settings = (read_settings(record, "answers" if given else "") for record in (one, two))
    found["config"] = [f"{label}.{line}" for line in differences(*settings)]
    return found


def samples_of(record: dict[str, Any]) -> tuple[list[dict], list[dict]]:
    """(answers to validation prompts, or else the last answers to training prompts) that a stage stored."""
    from stages.chat import renderer_for
    from stages.evaluation.scores import records_of
    from stages.evaluation.run_comparison import records_of_rollouts
    from storage.datasets import open_dataset

    outputs = record["outputs"]
    if "validation" in outputs:
        return records_of(open_dataset(outputs["validation"]["path"]).iter_rows()), []
    if "rollouts" in outputs and "model" in outputs:
        return [], records_of_rollouts(
            open_dataset(outputs["rollouts"]["path"]).iter_rows(), renderer_for(outputs["model"]["path"]).decode
        )
    return [], []


def load(text: str) -> dict[str, dict[str, Any]]:
    """label -> stage record, of a run (all its steps) or of one stage result (a ref, a path or a stage key)."""
    text = store.pinned(text)
    if store.is_ref(text):
        maker = records.origin_of(records.digest_of(text))
        if maker is None:
            raise ConfigError(
                f"{text} was not made by a stage of this store, so it has no numbers; give a run id or the ref of an"
                " evaluation"
            )
        return {maker["stage"]: maker}
    try:
        run = records.get_run(text)
    except store.StoreError as error:
        found = records.match(text) if len(text) >= 8 else None
        if found is None and len(text) >= 8 and (standing := work.match(text)):
            found = unfinished(standing)
        if found is None:
            raise ConfigError(
                f"{error}. Instead of a run, two results of one stage can be given: model:NAME, dataset:NAME@latest or"
                " a stage key"
            ) from None
        return {found["stage"]: found}
    found = {label: record for label, entry in run.stages().items() if (record := records.read(entry["key"]))}
    begun = work.unfinished(run).items()
    return found | {label: unfinished(one) for label, one in begun if one.get("step") is not None}


def unfinished(standing: dict[str, Any]) -> dict[str, Any]:
    """What a record says, of a stage that has none yet."""
    named = {name: standing[name] for name in ("stage", "key", "config", "inputs")}
    metrics_file = str(Path(standing["workdir"]) / "metrics.jsonl")
    return {**named, "metrics": {}, "outputs": {}, "metrics_file": metrics_file, UNFINISHED: standing}


def other_protocol(label: str, one: dict[str, Any], two: dict[str, Any]) -> str:
    """Why the numbers of two steps, which were measured in different ways, are not set side by side; empty where they
    were not.
    """
    hashes = [record["metrics"].get("protocol_hash") or record["metrics"].get("protocol") for record in (one, two)]
    if hashes[0] == hashes[1]:
        return ""
    told = given_answers(one, two)
    if told and not apart(one, two):
        return ""
    what = differences(*(read_settings(record, told) for record in (one, two)))
    commits = [one.get("git"), two.get("git")]
    if commits[0] != commits[1]:
        what.append(f"code: {' -> '.join((commit or 'unknown')[:12] for commit in commits)}")
    return (
        f"step {label} was evaluated under different protocols ({hashes[0]} against {hashes[1]}), so its numbers "
        f"cannot be compared. They differ in: {'; '.join(what) or 'their held-out data'}. Evaluate both models with the"
        " same settings and prompts, in one version of the code."
    )


def given_answers(one: dict[str, Any], two: dict[str, Any]) -> str:
    """What must be known of a comparison with answers that were given; empty where two models answered."""
    from stages.evaluation.protocol import told_of_given

    if one["stage"] != "evaluate" or not any("answers" in (record.get("inputs") or {}) for record in (one, two)):
        return ""
    return told_of_given(protocols_of(one, two))


def read_settings(record: dict[str, Any], given: str) -> dict[str, Any]:
    """The settings of a result; where answers were ``given``, without those of how a model is asked."""
    from stages.evaluation.given import OF_A_MODEL

    config = record.get("config") or {}
    return {name: value for name, value in config.items() if name not in OF_A_MODEL} if given else config


def apart(one: dict[str, Any], two: dict[str, Any]) -> dict[str, tuple]:
    """What was asked and graded otherwise in two evaluations, of which one at least is of given answers."""
    from stages.evaluation.protocol import comparable, differences as differing

    return differing(*comparable(protocols_of(one, two)).values())


def protocols_of(one: dict[str, Any], two: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The protocols of two evaluations; empty ones where their samples are gone."""
    from storage.datasets import DatasetError, open_dataset

    found = {}
    for which, record in (("a", one), ("b", two)):
        try:
            found[which] = open_dataset(record["outputs"]["samples"]["path"]).manifest["meta"]["protocol"]
        except (DatasetError, KeyError):
            found[which] = {}
    return found


ABSENT = "(not there)"


def differences(one: dict[str, Any], two: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: a -> b` of every setting that differs; of a list of components, `rewards[0].weight: a -> b`."""
    lines = []
    for key in dict.fromkeys([*one, *two]):
        lines += _difference(f"{prefix}{key}", one.get(key, ABSENT), two.get(key, ABSENT))
    return lines


def _difference(name: str, x: Any, y: Any) -> list[str]:
    if isinstance(x, dict) and isinstance(y, dict):
        return differences(x, y, f"{name}.")
    if isinstance(x, list) and isinstance(y, list) and any(isinstance(one, (dict, list)) for one in x + y):
        pairs = enumerate(zip_longest(x, y, fillvalue=ABSENT))
        return [line for at, pair in pairs for line in _difference(f"{name}[{at}]", *pair)]
    return [f"{name}: {x} -> {y}"] if x != y else []
