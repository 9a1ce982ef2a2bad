"""flows.keep: a service that dies is started again, one that cannot start is given up, and stopping it is the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from flows import services
from flows.keep import last_end
from stages.spec import ConfigError
from storage.files import atomic_write_json
from tests.serving import with_prefects_tables

ROOT = Path(__file__).resolve().parents[2]
COUNT = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(float(sys.argv[2]))"


def kept(folder: Path, seconds: float, soon: float = 60.0, program: str = COUNT) -> subprocess.Popen:
    code = (
        f"import sys; from flows.keep import keep; sys.exit(keep('it', [sys.executable, '-c', {program!r},"
        f" {str(folder / 'starts')!r}, '{seconds}'], soon={soon}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=(folder / "log").open("w"),
    )


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text()) if (folder / "starts").exists() else 0


def wait(what, limit: float = 30) -> None:
    deadline = time.monotonic() + limit
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def child(process: subprocess.Popen) -> psutil.Process:
    wait(lambda: psutil.Process(process.pid).children())
    return psutil.Process(process.pid).children()[0]


def test_what_dies_is_started_again_until_it_is_stopped(tmp_path):
    process = kept(tmp_path, 600, soon=0)
    wait(lambda: starts(tmp_path) == 1)
    child(process).kill()
    wait(lambda: starts(tmp_path) == 2)
    last = child(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0
    assert not last.is_running() and starts(tmp_path) == 2
    assert "it ended with status -9" in last_end(str(tmp_path / "log"))


def test_what_cannot_start_is_given_up_with_its_status(tmp_path):
    process = kept(tmp_path, 0, program=COUNT + "; sys.exit(3)")
    assert process.wait(60) == 3 and starts(tmp_path) == 3
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("was given up")


def test_command_dies_with_its_killed_keeper(tmp_path):
    process = kept(tmp_path, 600)
    wait(lambda: starts(tmp_path) == 1)
    command = child(process)
    process.kill()
    process.wait()
    if sys.platform.startswith("linux"):
        wait(lambda: not command.is_running())
    else:
        command.kill()
        pytest.skip("the parent's death is not announced here")


def test_stop_ends_the_keeper_and_starts_nothing(tmp_path):
    process = kept(tmp_path, 600)
    wait(lambda: starts(tmp_path) == 1)
    command = child(process)
    services._stop([process.pid], grace=20, kept=True)
    assert process.wait(5) is not None and not command.is_running() and starts(tmp_path) == 1


def test_what_a_dead_server_left_behind_is_ended_before_it_starts_again(tmp_path):
    """A server's children hold its port when it is killed alone."""
    program = COUNT.replace(
        "time.sleep",
        "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep",
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "flows.keep",
            "--whole",
            "it",
            sys.executable,
            "-c",
            program,
            str(tmp_path / "starts"),
            "600",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        command = child(process)
        wait(lambda: command.children())
        (left,) = command.children()
        command.kill()
        wait(lambda: starts(tmp_path) == 2)
        assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    finally:
        services._stop([process.pid], grace=20, kept=True)


def test_the_doctor_names_a_service_that_has_died(tmp_path):
    from flows.doctor import services as look

    assert list(look(tmp_path, False)) == [
        (True, "no servers are running (runs bring their own; `posttrain up` starts them)")
    ]
    (tmp_path / "services.json").write_text(
        json.dumps(
            {
                "mlflow": {
                    "url": "http://127.0.0.1:1",
                    "pid": os.getpid(),
                    "started": 1.0,
                    "log": "mlflow.log",
                    "kept": True,
                }
            }
        )
    )
    assert list(look(tmp_path, False)) == [(False, "mlflow has died; see mlflow.log; `posttrain up` starts it again")]


@pytest.fixture
def server(tmp_path):
    """A service of a state directory, recorded as `posttrain up` does."""
    process = kept(tmp_path, 600)
    wait(lambda: starts(tmp_path) == 1)
    services._note(tmp_path, {}, "mlflow", process, "http://127.0.0.1:1", tmp_path / "log")
    yield process
    services._stop([process.pid], grace=20, kept=True)


def test_a_server_is_ours_also_after_the_clock_was_set(tmp_path, server, monkeypatch):
    """The system's clock tells when a process began only as long as nobody sets it: two hours later the servers would
    be unknown, `up` start others beside them and `down` stop none.
    """
    began = psutil.Process.create_time
    for jump in (7200.0, -7200.0):
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: began(self) + jump)
        assert list(services.running(tmp_path)) == ["mlflow"]
    entry = json.loads((tmp_path / "services.json").read_text())["mlflow"]
    for other in ({"boot": "another"}, {"start": entry["start"] + 1}):  # the same pid, another process
        (tmp_path / "services.json").write_text(json.dumps({"mlflow": entry | other}))
        assert services.running(tmp_path) == {}


def test_servers_of_another_user_are_not_forgotten_by_who_cannot_stop_them(tmp_path, server, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(
        services.ServiceError, match="mlflow was started by .*only who started a server, or root, can stop it"
    ):
        services.down(tmp_path)
    monkeypatch.undo()
    assert list(services.running(tmp_path)) == ["mlflow"] and server.poll() is None
    assert services.down(tmp_path) == ["mlflow"] and server.wait(5) is not None


def test_a_run_whose_own_prefect_server_is_killed_goes_on(tmp_path):
    """The kernel ends it where memory runs out: the run crawled for minutes, each event waiting for retries, and then
    failed.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "POSTTRAIN_"))} | {
        "POSTTRAIN_HOME": str(with_prefects_tables(tmp_path / "home")),
        "PYTHONPATH": str(ROOT),
        "POSTTRAIN_TRACKING": "off",
        "POSTTRAIN_FORK": "0",
    }
    program = (
        "import json, sys; from flows import env, services; state = env.prepare(quiet=True)\n"
        "with services.embedded(state) as ready:\n"
        "    from tests.flows.slow_recipe import SideBySideConfig, side_by_side\n    ready()\n"
        "    print(json.dumps(side_by_side(SideBySideConfig(seconds=[8.0]))), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            wait(lambda: list((tmp_path / "home").glob("work/*/SPEC.json")), 240)
            (server,) = [one for one in psutil.Process(run.pid).children() if "uvicorn" in " ".join(one.cmdline())]
            (port,) = {one.laddr.port for one in server.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
            server.kill()
            psutil.wait_procs([server])
            with (
                socket.socket() as other,
                pytest.raises(OSError, match="in use"),
            ):  # else it could not start again there
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port))
            out, errors = run.communicate(timeout=300)
        finally:
            run.kill()
    assert run.returncode == 0 and "ended with status -9 and is started again" in errors, errors
    assert [step["step"] for step in json.loads(out.splitlines()[-1])["steps"]] == ["first_0", "then_0"]


def test_a_server_whose_port_another_process_took_is_started_at_another_one(tmp_path, monkeypatch):
    """Two homes that start at once both see a port free; the one that comes second must not take the other's server for
    its own."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "health").write_text("well")

    def server(base: str, port: int) -> tuple[list[str], dict[str, str]]:
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
        return command, {**os.environ, "PYTHONPATH": str(ROOT)}

    first, second = {}, {}
    try:
        port = services._free("127.0.0.1")
        services._serve(
            tmp_path, first, {"mlflow": services.Server("MLflow", server, "/health", port)}, "127.0.0.1", print
        )
        assert first["mlflow"]["url"] == f"http://127.0.0.1:{port}"
        monkeypatch.setattr(services, "_is_free", lambda host, port: True)  # as before the other listened
        monkeypatch.setattr(services, "_last_port", lambda state, name: port)
        with pytest.raises(services.ServiceError, match=f"port {port} was taken by another process meanwhile"):
            services._serve(
                tmp_path, {}, {"mlflow": services.Server("MLflow", server, "/health", port)}, "127.0.0.1", print
            )
        services._serve(
            tmp_path, second, {"mlflow": services.Server("MLflow", server, "/health", None)}, "127.0.0.1", print
        )
        assert second["mlflow"]["url"] != first["mlflow"]["url"]
        assert services.answers(second["mlflow"]["url"] + "/health")
    finally:
        services._stop([entry["pid"] for one in (first, second) for entry in one.values()], grace=20, kept=True)


def test_state_directories_choose_their_ports_one_after_the_other(monkeypatch, tmp_path):
    """Of two that start at once both would find the usual ports free."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    waits, chosen = threading.Event(), threading.Event()

    def other():
        with services._choosing_ports(lambda text: waits.set()):
            chosen.set()

    with services._choosing_ports(lambda text: None):
        thread = threading.Thread(target=other)
        thread.start()
        assert waits.wait(60) and not chosen.is_set()
    thread.join(60)
    assert chosen.is_set()


def test_up_says_where_servers_are_that_run_already_and_how_other_machines_reach_them(tmp_path, capsys, monkeypatch):
    """Asked for all networks it printed addresses that only this machine reaches, and kept to itself that servers that
    ran already stay where they are."""
    from flows.commands.servers import up

    process = psutil.Process()
    entry = lambda port, host: services._entry(process, f"http://127.0.0.1:{port}", tmp_path / "log", host)
    alive = {"prefect": entry(4300, "127.0.0.1"), "mlflow": entry(5100, "127.0.0.1"), "worker": entry(1, None)}
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")
    atomic_write_json(tmp_path / "services.json", alive)
    up(prefect_port=4300, worker=True)
    said = capsys.readouterr()
    assert "runs already" not in said.err and "other machines" not in said.out
    up(host="0.0.0.0", worker=True)
    said = capsys.readouterr()
    assert "prefect runs already, at http://127.0.0.1:4300" in said.err and "`posttrain down`" in said.err
    assert "mlflow runs already" in said.err and "other machines" not in said.out
    atomic_write_json(tmp_path / "services.json", alive | {"prefect": entry(4300, "0.0.0.0")})
    up(prefect_port=4301, worker=True)
    said = capsys.readouterr()
    assert (
        f"http://{socket.gethostname().lower()}:4300" in said.out and "5100" not in said.out.split("other machines")[1]
    )
    assert "prefect runs already" in said.err and "mlflow" not in said.err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"prefect_port": 99999}, "port 99999 is none; write one from 1 to 65535, or none"),
        ({"mlflow_port": 0}, "port 0 is none; write one from 1 to 65535, or none"),
        (
            {"prefect_port": 4300, "mlflow_port": 4300},
            "port 4300 is given for Prefect and for MLflow; give another one",
        ),
        ({"host": "192.0.2.1"}, "host '192.0.2.1' is no address of this machine .*; write 127.0.0.1"),
        ({"host": "no such name"}, "host 'no such name' is no address of this machine .*; write 127.0.0.1"),
    ],
)
def test_an_address_at_which_no_server_can_listen_is_refused_before_one_starts(tmp_path, given, told):
    with pytest.raises(ConfigError, match=told):
        services.up(tmp_path, **given)
    assert not list(tmp_path.iterdir())
