"""What `cost` says: the ledger of a run, of what a model or dataset was made by, or of everybody, as plain JSON values and
as text.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from flows.display import number, table
from stages.spec import ConfigError
from storage import costs, records, store, work


def cost(what: str, prices_file: Path | None, against: str | None = None, metric: str = "accuracy") -> dict[str, Any]:
    """The ledger of a run (its own steps; those it found done had been paid for) or of a model or dataset (every stage
    behind it).
    """
    prices, run, unfinished, what = costs.prices_from(prices_file), None, [], store.pinned(what)
    if store.is_ref(what) or Path(what).exists():
        steps = [(record.get("label") or record["stage"], record, False) for record in costs.behind(what).values()]
        if not steps:
            raise ConfigError(f"{what} was brought from outside, so nothing here was paid for it")
    else:
        run = records.get_run(what)
        steps = costs.of_run(run)
        unfinished = [label for label, one in work.unfinished(run).items() if costs.so_far(one)]
    rows = (
        cost_rows(run, prices)
        if run
        else costs.ledger(costs.counted((label, record) for label, record, _ in steps), prices)
    )
    value = {
        "what": what,
        "ledger": rows,
        **costs.totals(rows),
        "reused": [label for label, _, reused in steps if reused],
        "unfinished": unfinished,
        "without_counts": [label for label, record, reused in steps if not reused and "usage" not in record],
    }
    if against is not None:
        if not what.startswith("model:"):
            raise ConfigError(
                f"--against compares two models by their evaluations, and {what} is none; write a model, such as"
                " model:policy@champion"
            )
        value["gain"] = costs.gain(what, against, metric, prices)
    return value


def cost_of_all(
    prices_file: Path | None, since: datetime | None, until: datetime | None, by: str = "user"
) -> dict[str, Any]:
    """The ledger of every stage that finished from ``since`` until before ``until`` (None: open), each once, whoever
    used it again: a row per item of what ``by`` says, user, recipe, stage or month.
    """
    of_runs, made = {run.run_id: run for run in records.all_runs()}, list(records.all_records())

    def group(record: dict[str, Any]) -> str:
        run = of_runs.get(record.get("flow_run") or "")
        return {
            "user": lambda: records.user_of(record, of_runs) or "unknown",
            "recipe": lambda: run.data["recipe"] if run else "single stages",
            "stage": lambda: record["stage"],
            "month": lambda: datetime.fromtimestamp(record["finished"]).strftime("%Y-%m"),
        }[by]()

    summed: dict[str, dict[str, float]] = {}
    # over all of them, so that a file's labels are paid for when they came
    for record, (name, counts) in zip(made, costs.counted((group(record), record) for record in made)):
        finished = datetime.fromtimestamp(record["finished"])
        if (since is None or finished >= since) and (until is None or finished < until):
            items = summed.setdefault(name, {})
            for item, n in counts.items():
                items[item] = items.get(item, 0.0) + n
    rows = costs.ledger(sorted(summed.items()), costs.prices_from(prices_file))
    return {"by": by, "ledger": rows, **costs.totals(rows), "reused": [], "unfinished": [], "without_counts": []}


def cost_rows(run: records.RunRecord, prices: dict[str, float]) -> list[dict[str, Any]]:
    """The ledger of a run: of the steps that it paid for, and of those that it has not finished until now."""
    counts = costs.counted((label, record) for label, record, reused in costs.of_run(run) if not reused)
    return costs.ledger(counts + [(label, costs.so_far(one)) for label, one in work.unfinished(run).items()], prices)


def totals_by(value: dict[str, Any]) -> dict[str, float]:
    """{user, recipe, stage or month: USD}; empty for the ledger of one run, model or dataset, and without prices."""
    found: dict[str, float] = {}
    for row in value["ledger"] if "by" in value else ():
        if row["total"] is not None:
            found[row["stage"]] = found.get(row["stage"], 0.0) + row["total"]
    return found


def print_cost(value: dict[str, Any]) -> None:
    if value["ledger"]:
        table(
            [
                {
                    value.get("by", "step"): row["stage"],
                    "item": row["item"],
                    "count": row["count"],
                    "unit": costs.ITEMS[row["item"]][0],
                    "USD per unit": "" if row["unit_cost"] is None else row["unit_cost"],
                    "USD": "" if row["total"] is None else row["total"],
                }
                for row in value["ledger"]
            ]
        )
        print(
            "total   "
            + ", ".join(f"{number(n)} {item}" for item, n in value["items"].items())
            + ("" if value["total"] is None else f"; {number(value['total'])} USD")
        )
    else:
        print("nothing was paid for here" + (" yet" if value["unfinished"] else ""))
    for name, total in totals_by(value).items():
        print(f"{name}: {number(total)} USD")
    if value["unfinished"]:
        print(
            f"not finished, the hours of the last attempt until now: {', '.join(value['unfinished'])}; generated tokens"
            " and questions to judges are counted when a stage ends"
        )
    if value["unpriced"]:
        print(
            f"no price for {', '.join(value['unpriced'])}; give them with --prices FILE or in prices.yaml of the state"
            " directory"
        )
    if value["reused"]:
        print(f"found done, paid for by earlier runs: {', '.join(value['reused'])}")
    if value["without_counts"]:
        print(f"made by an older version, tokens and judge calls not counted: {', '.join(value['without_counts'])}")
    if "gain" in value:
        gain = value["gain"]
        print(
            f"{gain['metric']} {number(gain['model'])} against {number(gain['against'])}: gain {gain['gain']:+.4g}; per"
            " unit spent beyond the other model:"
        )
        table([{"item": item, "gain per unit": n} for item, n in gain["gain_per"].items()])
