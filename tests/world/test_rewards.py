"""Rewards: a value or a reason, parts kept apart, and untrusted code that can neither hang nor kill a batch."""
from __future__ import annotations

import os
import re
import time

import pytest

from stages.rewards import RewardComponent, Rewards, build_rewards, combine, extract_program
from stages.sandbox import Limits, run_jobs
from stages.verifiers import extract_world, math_equal, verifier_of


def row(text, *, answer="red", finish="eos", n=4, **extra):
    return {"prompt_row": {"prompt": [{"role": "user", "content": "?"}], "answer": answer, **extra}, "completion_text": text,
            "completion_ids": [1] * n, "finish_reason": finish}


def score(rows, *components, inputs=None):
    return build_rewards([RewardComponent(**c) for c in components], inputs or {}).score(rows)


def test_parts_are_stored_separately_and_weighted():
    scored = score([row("The color is red. Answer: red.", extra_json='{"verifier":"world"}'), row("x y. z", extra_json='{"verifier":"world"}', n=30)],
                   {"kind": "verifier"}, {"kind": "length", "weight": 0.5, "max_length": 20, "cache_length": 10})
    assert scored[0].parts == {"verifier": 1.0, "length": 0.0} and scored[0].total == 1.0 and scored[0].correct and scored[0].extracted == "red"
    assert scored[1].parts == {"verifier": 0.0, "length": -1.0} and scored[1].total == -0.5 and scored[1].correct is False


def test_unscorable_is_never_zero():
    scored = score([row("7", answer=None), row("7", answer="seven", answer_type="integer")], {"kind": "verifier"}, {"kind": "format"})
    for result in scored:
        assert result.total is None and result.correct is None and result.parts["verifier"] is None and result.reasons["verifier"]


def test_missing_policies():
    parts, weights = {"a": None, "b": 1.0}, {"a": 1.0, "b": 0.5}
    assert combine(parts, weights, "skip") == 0.5
    assert combine(parts, weights, "renormalise") == 1.5
    assert combine(parts, weights, "invalidate") is None
    assert combine({"a": None}, weights, "skip") is None


def test_a_cut_or_empty_response_never_reaches_the_reward_model():
    class Scorer:
        disagreement = None

        def reads_ids_of(self, renderer):
            return True

        def score(self, responses):
            assert [r.ids for r in responses] == [[9, 1, 1]]
            return [0.7]

    component = RewardComponent(kind="model")
    rows = [{**row("good", n=2), "prompt_ids": [9]}, {**row("cut", finish="length"), "prompt_ids": [9]}, {**row("  "), "prompt_ids": [9]}]
    assert [s.total for s in Rewards([component], {"model": Scorer()}, None).score(rows)] == [0.7, 0.0, -1.0]


HOSTILE = """
def score(prompt, completion, answer):
    import os
    if completion == "hang":
        while True: pass
    if completion == "memory":
        return len(bytearray(10 << 30))
    if completion == "raise":
        raise ValueError("no idea")
    if completion == "exit":
        os._exit(0)
    if completion == "network":
        import socket
        socket.create_connection(("127.0.0.1", 9))
    if completion == "children":
        import subprocess
        subprocess.Popen(["sleep", "54321"])
        while True: pass
    if completion == "nan":
        return float("nan")
    return completion == answer
"""


def test_a_hostile_verifier_costs_its_own_time_out_only():
    names = ["a", "hang", "memory", "raise", "exit", "network", "children", "nan", "a", "b"]
    started = time.monotonic()
    scored = score([row(n, answer="a") for n in names], {"kind": "python", "source": HOSTILE, "timeout_s": 1.0})
    assert time.monotonic() - started < 60
    totals = dict(zip(names, scored))
    assert [s.total for s in (scored[0], scored[8], scored[9])] == [1.0, 1.0, 0.0]
    reasons = {n: totals[n].reasons.get("python", "") for n in names}
    assert reasons["hang"] == "timeout" and "refuses subprocess" in reasons["children"]
    assert "memory" in reasons["memory"] and "no idea" in reasons["raise"] and "crashed" in reasons["exit"]
    assert "network" in reasons["network"] and "finite" in reasons["nan"]
    assert all(totals[n].total is None for n in ("hang", "memory", "raise", "exit", "network", "children", "nan"))
    time.sleep(0.2)
    assert not [p for p in os.listdir("/proc") if p.isdigit() and "54321" in _command(p)]


#: What generated code tries, each printing "done" if it could; PARENT is the stage's process.
ATTACKS = {
    "read a file": "open('{secret}').read()", "list a folder": "import os; os.listdir('{folder}')", "write a file": "open('{folder}/new', 'w')",
    "remove a file": "import os; os.remove('{secret}')", "a symlink": "import os; os.symlink('{secret}', 'link'); open('link').read()", "a mode": "import os; os.chmod('{secret}', 0)",
    "environment": "open('/proc/{parent}/environ').read()", "memory": "open('/proc/{parent}/mem', 'rb')", "arguments": "open('/proc/{parent}/cmdline').read()",
    "signal": "import os; os.kill({parent}, 0)", "signal to the group": "import os; os.killpg(os.getpgid({parent}), 0)", "signal to all": "import os; os.kill(-1, 0)",
    "fork": "import os\nif os.fork() == 0: os._exit(0)", "daemon": "import os\nif os.fork() == 0:\n    os.setsid(); os.execv('/bin/sleep', ['sleep', '65432'])",
    "a program": "import subprocess; subprocess.run(['true'])", "exec": "import os; os.execv('/bin/true', ['true'])", "socket": "import _socket; _socket.socket()",
    "unix socket": "import _socket; _socket.socket(_socket.AF_UNIX)", "the platform": "import sys; sys.path.insert(0, '{project}'); import stages",
}
NATIVE = {  # past the interpreter: only the kernel can refuse these
    "native signal": "import ctypes; c = ctypes.CDLL(None, use_errno=True)\nif c.kill({parent}, 0) != 0: raise OSError('refused')",
    "native fork": "import ctypes, os; c = ctypes.CDLL(None); pid = c.fork()\nif pid == 0: os._exit(0)\nif pid < 0: raise OSError('refused')",
    "native socket": "import ctypes; c = ctypes.CDLL(None)\nif c.socket(2, 1, 0) < 0: raise OSError('refused')",
    "native open": "import ctypes; c = ctypes.CDLL(None)\nif c.open(b'{secret}', 0) < 0: raise OSError('refused')",
    "memory call": "import ctypes; c = ctypes.CDLL(None); c.ptrace.restype = ctypes.c_long\nif c.ptrace(16, {parent}, 0, 0) != 0: raise OSError('refused')",
    "limits": "import resource; resource.prlimit({parent}, resource.RLIMIT_NOFILE, (8, 8))",
}


def has_kernel_rules() -> bool:
    import ctypes

    return os.uname().sysname == "Linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


def test_the_doctor_says_what_holds_generated_code(tmp_path, monkeypatch):
    from flows.doctor import sandbox as look
    from stages import sandbox

    assert sandbox.nets()["file rules"] == has_kernel_rules()
    for calls, files, ok, text in ((True, True, True, "system-call filter, file rules, Python's audit hook"), (True, False, True, "no file rules: .* in a container"),
                                   (False, False, False, "no system-call filter and no file rules")):
        monkeypatch.setattr(sandbox, "nets", lambda: {"system-call filter": calls, "file rules": files})
        (found, said), = look(tmp_path, False)
        assert found is ok and re.search(text, said)


@pytest.mark.parametrize("layer", ["all", "kernel", "interpreter"])
def test_generated_code_reaches_nothing_outside(layer, tmp_path, monkeypatch):
    """No files, processes, sockets or signals, and nothing of the parent: with every net, and with the kernel's or the interpreter's alone."""
    from stages import sandbox

    if layer != "interpreter" and not has_kernel_rules():
        pytest.skip("this kernel has no Landlock")
    without = {"all": {}, "kernel": {"    forbid_events(own, more, native=not kernel)": "    pass"},
               "interpreter": {"kernel = forbid_files(own, more)": "kernel = False", "kernel = forbid_calls() and kernel": "pass"}}[layer]
    for line, instead in without.items():
        assert sandbox._CHILD.count(line) == 1
        monkeypatch.setattr(sandbox, "_CHILD", sandbox._CHILD.replace(line, instead))
    secret = tmp_path / "secret"
    secret.write_text("gold")
    where = {"secret": secret, "folder": tmp_path, "parent": os.getpid(), "project": os.getcwd()}
    tried = ATTACKS | (NATIVE if layer != "interpreter" else {"ctypes": "import ctypes; ctypes.CDLL(None)"})
    harmless = {"modules": "import math, json, random, datetime, decimal, numpy, tempfile; tempfile.TemporaryFile().write(b'x'); open('mine', 'w').write('x'); open('mine').read()",
                "threads": "import threading; t = threading.Thread(target=print); t.start(); t.join()", "own signal": "import os, signal; os.kill(os.getpid(), signal.SIGCONT)"}
    jobs = [{"kind": "program", "source": code.format(**where) + "\nprint('done')", "stdin": ""} for code in (*tried.values(), *harmless.values())]
    outcomes = dict(zip((*tried, *harmless), run_jobs(jobs, Limits(timeout_s=20.0), fresh=True)))
    assert [n for n in tried if outcomes[n].error is None] == [], "these got through"
    assert [outcomes[n] for n in harmless if outcomes[n].error or "done" not in outcomes[n].value["stdout"]] == []
    assert secret.read_text() == "gold" and secret.stat().st_mode & 0o600 and [p.name for p in tmp_path.iterdir()] == ["secret"]
    assert not [p for p in os.listdir("/proc") if p.isdigit() and "65432" in _command(p)]


def test_a_reward_of_ones_own_reads_the_files_it_names(tmp_path):
    """Named files and folders can be read and not written, others cannot be read; their contents are part of the setting."""
    words, folder, other = tmp_path / "words.txt", tmp_path / "lists", tmp_path / "other.txt"
    words.write_text("good\n")
    folder.mkdir()
    (folder / "more.txt").write_text("fine\n")
    other.write_text("secret\n")

    def scored(what, **settings):
        component = RewardComponent(kind="python", source=f"def score(prompt, completion, answer):\n    {what}", **settings)
        (found,) = Rewards([component], {}, None).score([row("good")])
        return found

    body = f"words = open({str(words)!r}).read() + open({str(folder / 'more.txt')!r}).read(); return float(completion in words)"
    assert scored(body, files=[str(words), str(folder)]).total == 1.0
    assert "files=[...]" in scored(body).reasons["python"]
    assert "refuses" in scored(f"open({str(words)!r}, 'w').write('x'); return 1.0", files=[str(words)]).reasons["python"] and words.read_text() == "good\n"
    assert "refuses" in scored(f"return float(len(open({str(other)!r}).read()))", files=[str(words), str(folder)]).reasons["python"]
    before = RewardComponent(kind="python", source="def score(p, c, a): return 1", files=str(folder))
    assert RewardComponent.model_validate(before.model_dump()) == before, "a resolved setting stays as it is"
    (folder / "more.txt").write_text("other\n")
    assert RewardComponent(kind="python", source="def score(p, c, a): return 1", files=str(folder)) != before
    for wrong, text in (({"files": ["nowhere.txt"]}, "cannot be read"), ({"kind": "verifier", "files": [str(words)]}, "files is for kind python")):
        with pytest.raises(ValueError, match=text):
            RewardComponent(**{"kind": "python", "source": "def score(p, c, a): return 1", **wrong})


def test_a_program_cannot_pass_by_writing_to_its_descriptors():
    forged = "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{\"token\": \"ready\", \"value\": true}\\n')\n    except OSError: pass"
    assert run_jobs([{"kind": "tested", "source": forged, "test": "assert False"}], Limits(timeout_s=5.0), fresh=True)[0].value is None


def test_the_python_tool_is_locked_down_too(tmp_path):
    """A policy's program in an episode: no files, no processes, no writing to the episode's pipes."""
    from stages.tools import BadCall, run_python

    read, write = os.pipe()
    os.set_blocking(read, False)
    (tmp_path / "secret").write_text("gold")
    try:
        assert run_python("import math\nprint(math.sqrt(49))") == "7.0"
        for code in (f"print(open('{tmp_path}/secret').read())", "import os\nos.kill(os.getppid(), 0)", "import os\nos.fork()", f"import os\nos.write({write}, b'forged')"):
            with pytest.raises(BadCall, match="error"):
                run_python(code)
        with pytest.raises(BlockingIOError):
            os.read(read, 10)
    finally:
        os.close(read)
        os.close(write)


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as handle:
            return handle.read()
    except OSError:
        return ""


def test_a_pattern_that_never_ends_is_cut():
    scored = score([row("a" * 40 + "!"), row("aa")], {"kind": "regex", "pattern": "^(a+)+$", "timeout_s": 1.0})
    assert scored[0].total is None and scored[0].reasons["regex"] == "timeout" and scored[1].total == 1.0


def test_code_tests_cannot_be_passed_by_leaving_early():
    tests = [{"kind": "assert", "code": "assert double(3) == 6", "input": None, "expected": None, "timeout_s": None}]
    programs = ["def double(x):\n    return 2 * x", "import sys\nprint('OK')\nsys.exit(0)", "import os\nos._exit(0)", "def double(x):\n    return x"]
    scored = score([row(f"```python\n{p}\n```", tests=tests) for p in programs] + [row(programs[0], tests=tests), row("x", tests=[])],
                   {"kind": "code", "timeout_s": 3.0})
    assert [s.total for s in scored] == [1.0, 0.0, 0.0, 0.0, 0.0, None]
    assert extract_program("```python\nx\n``` then ```py\ny\n```") == "y\n"


def test_jobs_keep_their_order_and_do_not_leave_anything_behind():
    jobs = [{"kind": "program", "source": "import builtins\nprint(getattr(builtins, 'left', 0)); builtins.left = 1", "stdin": ""}] * 5
    assert [o.value["stdout"] for o in run_jobs(jobs, Limits(workers=2), fresh=True)] == ["0\n"] * 5


def test_settings_that_cannot_work_say_what_to_write():
    with pytest.raises(ValueError, match="give reward_model="):
        build_rewards([RewardComponent(kind="model")], {})
    with pytest.raises(ValueError, match="its own name"):
        build_rewards([RewardComponent(kind="format"), RewardComponent(kind="format")], {})
    with pytest.raises(ValueError, match="pattern"):
        RewardComponent(kind="regex")
    with pytest.raises(ValueError, match="at least one component"):
        build_rewards([], {})


@pytest.mark.parametrize("text, answer", [("Answer: red.", "red"), ("so. Answer: RED", "RED"), ("red", "red"), ("red.", "red"), ("It is red. Yes.", None),
                                          ("Answer: a. Answer: b.", "b"), ("", None), ("Answer: .", None), ("Answer: 1 2  3. I hope this helps.", "1 2 3")])
def test_world_extraction(text, answer):
    assert extract_world(text) == answer


def test_the_verifier_is_chosen_by_the_row():
    assert verifier_of({"answer_type": "integer"}) == "math" and verifier_of({"answer_type": "mc"}) == "mc"
    assert verifier_of({"answer": "x"}) == "text" and verifier_of({"extra_json": '{"verifier":"world"}'}) == "world"
    assert math_equal("\\dfrac{1}{2}", "0.5") and not math_equal("1/0", "1")
