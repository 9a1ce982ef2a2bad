"""One real Prefect server, one real MLflow server and one worker for all tests of this directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.serving import free_port

ROOT = Path(__file__).resolve().parents[2]
#: The nightly demo runs while these tests do once a year.
NIGHTLY = "0 3 1 1 *"
DEPLOY = ("deploy", "--nightly", NIGHTLY)
#: Of every line the code in it, as JSON: what it printed, and the traceback where it failed.
SESSION = """
import contextlib, io, json, os, sys, traceback
os.environ["POSTTRAIN_HOME"] = sys.argv[1]
from flows import env, services
services.connect(env.prepare(quiet=True))
for line in sys.stdin:
    said, error = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        try:
            exec(json.loads(line), {})
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([said.getvalue(), error]), flush=True)
"""


class Servers:
    """The servers of one state directory, spoken to over HTTP and through the command line only."""

    def __init__(self, home: Path):
        self.home = home
        self.env = {
            key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "POSTTRAIN_"))
        }
        self.calls_home = home.with_name("calls_home.txt")
        self.env |= {
            "POSTTRAIN_HOME": str(home),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "offline")]),
            "POSTTRAIN_GRACE_SECONDS": "2",
            "OFFLINE_LOG": str(self.calls_home),
        }
        self.ports = {name: free_port() for name in ("prefect", "mlflow")}
        self.urls: dict[str, str] = {}
        self.session: subprocess.Popen | None = None  # in which code is run
        self.urls_beside: dict[str, str] = {}  # of a second `up` at the same moment

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            capture_output=True,
            text=True,
            env=self.env,
            cwd=ROOT,
            timeout=900,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def json(self, *arguments: str) -> dict:
        return json.loads(self.cli(*arguments, "--json").stdout.splitlines()[-1])

    def python(self, code: str) -> str:
        """Run code in a process whose environment points at the servers, one for all code, since the client of Prefect
        takes a process seconds to load; returns its stdout.
        """
        if self.session is None or self.session.poll() is not None:
            # not among the processes of this home by its environment: a test kills those
            environment = {name: value for name, value in self.env.items() if name != "POSTTRAIN_HOME"}
            self.session = subprocess.Popen(
                [sys.executable, "-c", SESSION, str(self.home)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                cwd=ROOT,
                text=True,
            )
        self.session.stdin.write(json.dumps(code) + "\n")
        self.session.stdin.flush()
        answer = self.session.stdout.readline()
        assert answer, f"ended with status {self.session.wait()}: {code}"
        said, error = json.loads(answer)
        assert error is None, said + error
        return said

    def close(self) -> None:
        self.cli("down", check=False)
        if self.session is not None:
            self.session.stdin.close()
            self.session.wait()

    def api(self, path: str, body: dict | None = None, method: str | None = None):
        """A call of Prefect's REST API; the decoded answer."""
        request = urllib.request.Request(
            self.urls["prefect"] + "/api" + path,
            method=method or ("GET" if body is None else "POST"),
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        for attempt in range(5):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code != 503 or attempt == 4:  # 503: SQLite was locked for a moment; clients retry it too
                    raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from None
                time.sleep(1)
            except TimeoutError:  # a machine so busy that the server did not get to it; reading may be repeated
                if not (request.method == "GET" or path.endswith("/filter")) or attempt == 4:
                    raise

    def deployment(self, name: str) -> dict:
        return self.api(f"/deployments/name/{name}")

    def start(self, name: str, parameters: dict) -> str:
        """Create a run of a deployment as the UI's form does; returns the flow run's id."""
        return self.api(f"/deployments/{self.deployment(name)['id']}/create_flow_run", {"parameters": parameters})["id"]

    def state(self, run: str) -> str:
        return self.api(f"/flow_runs/{run}")["state_name"]

    def wait(self, what, limit: float = 120):
        """Poll until `what()` is true and return its value."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            value = what()
            if value:
                return value
            time.sleep(0.5)
        logs = "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            for log in sorted((self.home / "logs").glob("*.log"))
        )
        raise AssertionError(f"waited {limit:.0f} s in vain\n{logs}")

    def finished(self, run: str) -> str:
        return self.wait(
            lambda: (state := self.state(run)) in ("Completed", "Failed", "Crashed", "Cancelled") and state
        )

    def tasks(self, run: str) -> dict[str, str]:
        rows = self.api("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return {row["name"]: row["state_name"] for row in rows}


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    one = Servers(tmp_path_factory.mktemp("servers"))
    # not the usual ones: a worker that was left over by another checkout would take this one's runs
    up = ("up", *(f"--{name}-port={port}" for name, port in one.ports.items()))
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *up, "--json"],
            stdout=subprocess.PIPE,
            env=one.env,
            cwd=ROOT,
            text=True,
        ) as beside:
            one.urls = one.json(*up)
            one.urls_beside = json.loads(beside.stdout.read().splitlines()[-1])
        one.deployed = one.json(*DEPLOY)
        yield one
    finally:
        one.close()


@pytest.fixture(scope="session")
def slow_recipe(servers):
    """The name of a deployment that runs one stage for as many seconds as it is told, on the queue of the GPU."""
    servers.python(
        "from flows.deploy import apply; from tests.flows.slow_recipe import slow_recipe\napply(slow_recipe, 'test',"
        " {'queue': 'gpu'})"
    )
    return "slow_recipe/test"
