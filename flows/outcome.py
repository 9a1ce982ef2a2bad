"""What a finished recipe prints: models, their scores, the decision, and where to look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.display import table
from flows.promotion import print_decision
from storage import records


def print_result(result: dict[str, Any], state: Path) -> None:
    """What a finished recipe run tells: models, their scores, the decision, and where to look."""
    from flows import services

    print()
    if result.get("scores"):
        table(result["scores"], "held-out prompts")
        print()
    for name, title in (
        ("ability", "what the models can do (data.ability)"),
        ("win_rates", "win rates, by a judge"),
        ("rounds", "rounds: the reward model of each, on its held-out rows"),
        ("alignment_tax", "what was lost against the first model (step alignment_tax)"),
    ):
        if result.get(name):
            table(result[name], title)
            print()
    if result.get("choice"):
        won = result["choice"]["won"]
        print(
            f"loss {result['choice']['method']}: {result['choice']['why']}"
            + (f" (revisions won {won:.0%})" if won is not None else "")
            + "\n"
        )
    if result.get("trials"):
        table(result["trials"], "trials, best first")
        for line in result["failures"]:
            print(f"failed  {line}")
        for seed, outputs in (result.get("best") or {}).get("outputs", {}).items():
            print("\n".join(f"best, seed {seed}: {name} {ref}" for name, ref in outputs.items()))
    for name, ref in (result.get("models") or {}).items():
        print(f"{name:<14} {ref}")
    if result.get("decision"):
        print_decision(result["decision"])
    print(f"\nrun {result['run']}")
    alive = services.running(state)
    if "prefect" in alive:
        print(
            "Prefect "
            f" {alive['prefect']['url']}/v2/runs/flow-run/{records.get_run(result['run']).data['prefect']['flow_run_id']}"
        )
        if "mlflow" in alive:
            print(f"MLflow   {mlflow_page(alive['mlflow']['url'], result['run'])}")
    else:
        print("see it in the browser: posttrain up      look closer: posttrain show " + result["run"][:8])


def mlflow_page(server: str, run_id: str) -> str:
    """The page of a flow's run on a server of ours; the server itself while MLflow has not been told of the run."""
    from storage import outbox

    cursor = outbox.cursor_of(outbox.flow_unit(run_id))
    if not cursor.get("run_id") or not cursor.get("ours"):
        return server
    return f"{server}/#/experiments/{cursor['experiment_id']}/runs/{cursor['run_id']}?workflowType=machine_learning"
