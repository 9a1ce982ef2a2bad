"""Rewards: a value or a reason, parts kept apart, and untrusted code that can neither hang nor kill a batch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import psutil
import pytest

from stages.reward.components import RewardComponent
from stages.reward.programs import extract_program, program_of
from stages.reward.rewards import Rewards, build_rewards
from stages.reward.verdicts import failures
from stages.running import sandbox
from stages.running.sandbox import Limits, run_jobs
from stages.verification.constraints import check_constraint
from stages.verification.equality import math_equal
from stages.verification.extraction import extract_world
from stages.verification.golds import BadGold
from stages.verification.ifeval import CHECKERS
from stages.verification.languages import guess_language
from stages.verification.verifiers import verifier_of, verify_math, verify_text


def row(text, *, answer="red", finish="eos", n=4, **extra):
    return {
        "prompt_row": {"prompt": [{"role": "user", "content": "?"}], **{"answer": answer, **extra}},
        "completion_text": text,
        "completion_ids": [1] * n,
        "finish_reason": finish,
    }


def score(rows, *components, inputs=None):
    return build_rewards([RewardComponent(**c) for c in components], inputs or {}).score(rows)


def test_parts_are_stored_separately_and_weighted():
    scored = score(
        [
            row("The color is red. Answer: red.", extra_json='{"verifier":"world"}'),
            row("x y. z", extra_json='{"verifier":"world"}', n=30),
        ],
        {"kind": "verifier"},
        {"kind": "length", "weight": 0.5, "max_length": 20, "cache_length": 10},
    )
    assert (
        scored[0].parts == {"verifier": 1.0, "length": 0.0}
        and scored[0].total == 1.0
        and scored[0].correct
        and scored[0].extracted == "red"
    )
    assert (
        scored[1].parts == {"verifier": 0.0, "length": -1.0} and scored[1].total == -0.5 and scored[1].correct is False
    )


def test_unscorable_is_never_zero():
    scored = score(
        [row("7", answer=None), row("7", answer="seven", answer_type="integer")],
        {"kind": "verifier"},
        {"kind": "format"},
    )
    for result in scored:
        assert (
            result.total is None
            and result.correct is None
            and result.parts["verifier"] is None
            and result.reasons["verifier"]
        )


def test_a_prompt_is_scored_by_the_components_of_its_domain():
    """reward.domain_route: chat goes to two components with views of their own, maths to the verifier, which would be
    unscorable elsewhere; nobody's prompt has no reward.
    """
    seen = "def score(prompt, completion, answer):\n    return float(len(completion))"
    components = (
        {"kind": "verifier", "domains": ["math"]},
        {"name": "helpful", "kind": "python", "source": seen, "domains": ["chat"], "view": "answer_only"},
        {"name": "harmless", "kind": "python", "source": seen, "weight": 10.0, "domains": ["chat", "safety"]},
    )
    text = "<think>123</think>ab"
    chat, safety, maths, nobody = score(
        [
            row(text, answer=None, domain="chat"),
            row(text, answer=None, domain="safety"),
            row("\\boxed{7}", answer="7", answer_type="integer", domain="math"),
            row(text, answer=None, domain="other"),
        ],
        *components,
    )
    assert (chat.total, safety.total, maths.total, nobody.total) == (2.0 + 10 * len(text), 10.0 * len(text), 1.0, None)
    assert (
        chat.parts["verifier"] is None
        and maths.parts["helpful"] is None
        and maths.correct
        and not failures(chat.parts, chat.reasons)
    )
    assert failures(nobody.parts, nobody.reasons).keys() == {"verifier", "helpful", "harmless"}
    (routed,) = score(
        [row("\\boxed{7}", answer="7", answer_type="integer", reward_route=["verifier"])],
        {"kind": "verifier"},
        {"kind": "format"},
    )
    assert routed.total == 1.0 and routed.parts["format"] is None  # the prompt's own list of kinds
    (failed,) = score([row("7", answer="seven", answer_type="integer", domain="math")], *components)
    assert failed.total is None  # unscorable where it is meant is no other domain
    with pytest.raises(ValueError, match="domains is not for kind majority"):
        RewardComponent(kind="majority", domains=["math"])


def test_a_prompts_own_list_holds_for_rewards_that_read_others_and_for_tiers():
    """reward.domain_route: what is not on the list is paid nothing, also where it is scored last or in a cascade, and a
    cascade that the prompt is not routed to leaves the other rewards as they are.
    """
    here = {"answer": "7", "answer_type": "integer", "completion_ids": [1]}
    routed = {**here, "row_id": "q", "prompt_id": "q", "reward_route": ["verifier"]}
    other = {**here, "row_id": "p", "prompt_id": "p"}
    rows = [row("\\boxed{7}", **prompt) for prompt in (routed, routed, other, other)]
    reads = ({"kind": "verifier"}, {"kind": "majority"}, {"kind": "length_group"})
    alone = score(rows[2:], *reads)
    found = score(rows, *reads)
    assert [s.total for s in found[:2]] == [1.0, 1.0] and [s.total for s in found[2:]] == [s.total for s in alone]
    assert found[0].parts == {"verifier": 1.0, "majority": None, "length_group": None}
    assert not failures(found[0].parts, found[0].reasons) and found[2].parts["majority"] == 1.0
    tiers = (
        {"kind": "verifier", "tier": "rule"},
        {"name": "judged", "kind": "python", "tier": "judge", "source": "def score(prompt, completion):\n    return 5"},
        {"name": "plain", "kind": "python", "source": "def score(prompt, completion):\n    return 2"},
    )
    both = {**routed, "reward_route": ["plain"]}, {**routed, "reward_route": ["judged", "plain"]}
    without, second, whole = score([row("\\boxed{7}", **prompt) for prompt in (*both, other)], *tiers)
    assert (without.total, without.tier, without.parts["verifier"]) == (2.0, None, None)
    assert (second.total, second.tier, second.parts["verifier"]) == (7.0, "judge", None)
    assert (whole.total, whole.tier, whole.parts["judged"]) == (3.0, "rule", None)


@pytest.mark.parametrize(
    "text,prompt,value",
    [
        ("We know it.", {"language": "en"}, 1.0),
        ("Мы know", {"language": "ru-RU"}, 0.5),
        ("因此 x = `code` \n```\nEnglish words\n```", {"language": "zh"}, 2 / 3),
        ("12 + 3 = $x$", {"language": "fr"}, 1.0),
        ("これは漢字", {"language": "ja"}, 1.0),
        ("да yes", {"prompt": [{"role": "user", "content": "Сколько будет 2 + 2?"}]}, 0.5),
        ("ja", {"prompt": [{"role": "user", "content": "2 + 2"}]}, None),
        ("qapla", {"language": "tlh"}, None),
    ],
)
def test_an_answer_is_in_the_language_of_its_prompt(text, prompt, value):
    """reward.language: shares of words by script; without a language, or with one that no script tells, there is no
    value.
    """
    (scored,) = score([row(text, **prompt)], {"kind": "language", "view": "full"})
    assert scored.parts["language"] == (None if value is None else pytest.approx(value)) and (
        value is not None or scored.reasons["language"]
    )
    if value is not None:
        assert scored.total == pytest.approx(0.1 * value)  # beside an accuracy of 1


def test_vowel_signs_and_accents_do_not_end_a_word():
    """A word of Hindi, Thai or pointed Hebrew is one word, as is one whose accents are characters of their own or that
    a zero-width joiner holds together.
    """
    from stages.verification.languages import SCRIPTS, language_of, language_share

    assert language_of({"prompt": [{"role": "user", "content": "東京都港区虎ノ門の人口は？"}]}) == SCRIPTS[
        "ja"
    ] and language_of({"prompt": [{"role": "user", "content": "因此"}]}) == ("CJK",)
    for text, script, share in (
        ("हिन्दी में three more words", "DEVANAGARI", 2 / 5),
        ("ที่นี่ two words", "THAI", 1 / 3),
        ("שָׁלוֹם peace be", "HEBREW", 1 / 3),
        ("cafe\u0301s мир", "LATIN", 1 / 2),
        ("می\u200cخواهم this and that", "ARABIC", 1 / 4),
    ):
        assert language_share(text, (script,)) == pytest.approx(share), text
    for text in ("データベースを使う人々", "らーめん", "ﾃﾞｰﾀ"):
        assert language_share(text, SCRIPTS["ja"]) == 1.0, text
    assert (
        language_share("らーめん two", SCRIPTS["ja"]) == 1 / 2
        and language_share("ＡＢＣ 東", ("LATIN",)) == 1 / 2
        and language_share("5 \u2126, 3 \u212a да", ("CYRILLIC",)) == 1.0
    )
    # letters, of which signs are none
    assert language_share("हिन्दी ab", ("DEVANAGARI",), "char") == pytest.approx(3 / 5)


def test_japanese_that_is_answered_in_japanese_is_no_switch():
    from stages.measures.text import mixed_scripts, scripts

    # mix drop_mixed_languages
    assert mixed_scripts("東京のデータベースを使う人々") == 0.0 and mixed_scripts("因此 two") == pytest.approx(
        0.4
    ) == mixed_scripts("これ two")
    assert (
        not scripts("データは人口です") - scripts("これは？")
        and not scripts("因此") - scripts("是什么")
        and scripts("これ") - scripts("是什么")
        and scripts("two") - scripts("これは？") == {"LATIN"}
    )


def test_letters_of_formulas_are_no_other_language():
    """mix drop_mixed_languages took the Greek of a solution for a second language, which reward.language does not."""
    from stages.measures.text import mixed_scripts

    assert mixed_scripts("sin α = cos β, so α + β = 90°") == mixed_scripts("5 Ω, 3 𝑥 and ＡＢ of \u2126") == 0.0
    assert mixed_scripts("and да") == pytest.approx(0.4) and mixed_scripts("α") == mixed_scripts("42") == 0.0


def test_missing_policies():
    def total(policy, parts):
        return (
            build_rewards(
                [
                    RewardComponent(name=name, kind="length", weight=weight, on_missing=policy)
                    for name, weight in (("a", 1.0), ("b", 0.5))
                ],
                {},
            )
            .total_of(parts)
            .total
        )

    assert [total(policy, {"a": None, "b": 1.0}) for policy in ("skip", "renormalise", "invalidate")] == [
        0.5,
        1.5,
        None,
    ]
    assert total("skip", {"a": None, "b": None}) is None


def test_a_missing_part_leaves_its_weight_to_parts_that_have_one():
    from stages.reward.rewards import present_weights

    weights, policy = {"a": 3.0, "b": 1.0, "c": 2.0}, {"a": "renormalise", "b": "skip", "c": "skip"}
    assert present_weights({"a": None, "b": 5.0, "c": 7.0}, weights, policy) == {"b": 2.0, "c": 4.0}
    assert present_weights({"a": 1.0, "b": None, "c": 7.0}, weights, policy) == {"a": 3.0, "c": 2.0}
    # one that is only watched takes nothing over
    assert present_weights({"a": None, "b": 5.0}, {"a": 1.0, "b": 0.0}, policy) is None


def test_a_reward_counts_from_its_step_on():
    rewards = build_rewards(
        [RewardComponent(name="a", kind="length", max_length=9, cache_length=1, from_step=2, weight=3.0)], {}
    )
    counts = []
    for rewards.step in (1, 2, 3, None):
        counts.append(rewards.total_of({"a": 1.0}).total)
    assert counts == [0.0, 3.0, 3.0, 3.0]


def test_the_first_verdict_is_the_one_that_others_read():
    """Also where it is no: a later component that reads more freely finds the answer right, and that changes neither
    the verdict nor what length is worth.
    """
    here = {"answer": "7", "answer_type": "integer", "row_id": "p", "prompt_id": "p"}
    rows = [row("It is 7.", n=n, **here) for n in (2, 9)]
    components = (
        {"name": "boxed", "kind": "verifier", "extraction": "strict"},
        {"name": "anywhere", "kind": "verifier", "extraction": "flexible"},
        {"kind": "length_group"},
    )
    short, _ = score(rows, *components)
    assert (short.parts["boxed"], short.parts["anywhere"], short.correct) == (0.0, 1.0, False)
    # min(0, 1/2): a wrong answer earns nothing by being short
    assert short.parts["length_group"] == 0.0
    assert score(rows, components[1], components[0], components[2])[0].parts["length_group"] == 0.5


def test_rewards_that_read_others_read_those_of_the_same_answer():
    """Answers before them that are routed elsewhere shift nothing."""
    here = {"answer": "7", "answer_type": "integer", "row_id": "p", "prompt_id": "p"}
    routed = {**here, "row_id": "q", "prompt_id": "q", "reward_route": ["v", "worth"]}
    worth = "def score(prompt, completion):\n    return {'1': 9, '2': 1, '3': 3}[completion[7]]"
    rows = [
        row("\\boxed{1}", **{**routed, "answer": "1"}),
        row("\\boxed{2}", n=2, **here),
        row("\\boxed{3}", n=9, **here),
    ]
    found = score(
        rows,
        {"name": "v", "kind": "verifier"},
        {"name": "worth", "kind": "python", "source": worth, "weight": 0.0},
        {"kind": "majority", "votes_of": "worth"},
        {"kind": "length_group"},
    )
    assert [s.parts["majority"] for s in found] == [None, 0.0, 1.0]
    assert [s.parts["length_group"] for s in found] == [None, 0.0, -0.5] and found[0].total == 1.0
    # a list names kinds or components
    (by_kind,) = score(
        [row("\\boxed{1}", **{**routed, "answer": "1", "reward_route": ["verifier"]})],
        {"name": "v", "kind": "verifier"},
    )
    assert by_kind.total == 1.0


@pytest.mark.parametrize("weight, total", [(1.0, None), (0.0, 1.0)])
def test_an_answer_without_another_to_its_prompt_has_no_majority(weight, total):
    """Rows of one prompt row are compared, not those of other rows with the same question; a reward that is only
    watched takes nothing with it.
    """
    rows = [row("\\boxed{7}", answer="7", answer_type="integer", row_id=p, prompt_id="same") for p in ("p", "p", "q")]
    found = score(rows, {"kind": "verifier"}, {"kind": "majority", "weight": weight, "on_missing": "invalidate"})
    assert [s.parts["majority"] for s in found] == [1.0, 1.0, None] and "no other answer" in found[2].reasons[
        "majority"
    ]
    assert [s.total for s in found] == [1.0 + weight, 1.0 + weight, total]


def test_a_reward_model_is_as_sure_as_its_opinion_is_probable():
    """REWARD-ROUTER: max(p, 1 - p), p the sigmoid of a score, or the value where it is one already; min_confidence
    itself is enough.
    """
    from stages.reward.rewards import confidence, settles
    from stages.reward.verdicts import Verdict

    logit, share = (
        RewardComponent(name="rm", kind="model", tier="learned", squash=squash, min_confidence=0.75)
        for squash in ("none", "sigmoid")
    )
    assert confidence(logit, Verdict(-3.0)) == pytest.approx(0.9525741) == confidence(logit, Verdict(3.0))
    assert confidence(share, Verdict(0.125)) == 0.875 == confidence(share, Verdict(0.875))
    assert [settles(share, Verdict(value)) for value in (0.25, 0.3, 0.7, 0.75)] == [True, False, False, True]


def test_a_cut_or_empty_response_never_reaches_the_reward_model():
    class Scorer:
        disagreement, beside = None, {}

        def reads_ids_of(self, renderer):
            return True

        def score(self, responses):
            assert [r.ids for r in responses] == [[9, 1, 1]]
            return [0.7]

    component = RewardComponent(kind="model")
    rows = [
        {**row("good", n=2), "prompt_ids": [9]},
        {**row("cut", finish="length"), "prompt_ids": [9]},
        {**row("  "), "prompt_ids": [9]},
    ]
    assert [s.total for s in Rewards([component], {"model": Scorer()}, None).score(rows)] == [0.7, -1.0, -1.0]


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
    assert reasons["hang"].startswith("timeout: score() took more than") and "refuses subprocess" in reasons["children"]
    assert "memory" in reasons["memory"] and "no idea" in reasons["raise"] and "crashed" in reasons["exit"]
    assert "network" in reasons["network"] and "finite" in reasons["nan"]
    assert all(totals[n].total is None for n in ("hang", "memory", "raise", "exit", "network", "children", "nan"))
    time.sleep(0.2)
    assert not [p for p in os.listdir("/proc") if p.isdigit() and "54321" in _command(p)]


#: What generated code tries, each printing "done" if it could; PARENT is the stage's process.
ATTACKS = {
    "read a file": "open('{secret}').read()",
    "list a folder": "import os; os.listdir('{folder}')",
    "write a file": "open('{folder}/new', 'w')",
    "remove a file": "import os; os.remove('{secret}')",
    "a symlink": "import os; os.symlink('{secret}', 'link'); open('link').read()",
    "a mode": "import os; os.chmod('{secret}', 0)",
    "environment": "open('/proc/{parent}/environ').read()",
    "memory": "open('/proc/{parent}/mem', 'rb')",
    "arguments": "open('/proc/{parent}/cmdline').read()",
    "signal": "import os; os.kill({parent}, 0)",
    "signal to the group": "import os; os.killpg(os.getpgid({parent}), 0)",
    "signal to all": "import os; os.kill(-1, 0)",
    "fork": "import os\nif os.fork() == 0: os._exit(0)",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid(); os.execv('/bin/sleep', ['sleep', '65432'])",
    "a program": "import subprocess; subprocess.run(['true'])",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "socket": "import _socket; _socket.socket()",
    "unix socket": "import _socket; _socket.socket(_socket.AF_UNIX)",
    "the platform": "import sys; sys.path.insert(0, '{project}'); import stages",
}
NATIVE = {  # past the interpreter: only the kernel can refuse these
    "native signal": (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True)\nif c.kill({parent}, 0) != 0: raise OSError('refused')"
    ),
    "native fork": (
        "import ctypes, os; c = ctypes.CDLL(None); pid = c.fork()\nif pid == 0: os._exit(0)\nif pid < 0: raise"
        " OSError('refused')"
    ),
    "native socket": "import ctypes; c = ctypes.CDLL(None)\nif c.socket(2, 1, 0) < 0: raise OSError('refused')",
    "native open": "import ctypes; c = ctypes.CDLL(None)\nif c.open(b'{secret}', 0) < 0: raise OSError('refused')",
    "memory call": (
        "import ctypes; c = ctypes.CDLL(None); c.ptrace.restype = ctypes.c_long\nif c.ptrace(16, {parent}, 0, 0) != 0:"
        " raise OSError('refused')"
    ),
    "limits": "import resource; resource.prlimit({parent}, resource.RLIMIT_NOFILE, (8, 8))",
}


def has_kernel_rules() -> bool:
    import ctypes

    return os.uname().sysname == "Linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


def test_the_doctor_says_what_holds_generated_code(tmp_path, monkeypatch):
    from flows.doctor import sandbox as look
    from stages.running import sandbox

    assert sandbox.nets()["file rules"] == has_kernel_rules()
    for calls, files, ok, text in (
        (True, True, True, "system-call filter, file rules, Python's audit hook"),
        (True, False, True, "no file rules: .* in a container"),
        (False, False, False, "no system-call filter and no file rules"),
    ):
        monkeypatch.setattr(sandbox, "nets", lambda: {"system-call filter": calls, "file rules": files})
        ((found, said),) = look(tmp_path, False)
        assert found is ok and re.search(text, said)


@pytest.mark.parametrize("layer", ["all", "kernel", "interpreter"])
def test_generated_code_reaches_nothing_outside(layer, tmp_path, monkeypatch):
    """No files, processes, sockets or signals, and nothing of the parent: with every net, and with the kernel's or the
    interpreter's alone.
    """
    from stages.running import sandbox

    if layer != "interpreter" and not has_kernel_rules():
        pytest.skip("this kernel has no Landlock")
    without = {
        "all": {},
        "kernel": {"    forbid_events(own, more, native=not kernel)": "    pass"},
        "interpreter": {
            "kernel = forbid_files(own, more)": "kernel = False",
            "kernel = forbid_calls() and kernel": "pass",
        },
    }[layer]
    for line, instead in without.items():
        assert sandbox._CHILD.count(line) == 1
        monkeypatch.setattr(sandbox, "_CHILD", sandbox._CHILD.replace(line, instead))
    secret = tmp_path / "secret"
    secret.write_text("gold")
    where = {"secret": secret, "folder": tmp_path, "parent": os.getpid(), "project": os.getcwd()}
    tried = ATTACKS | (NATIVE if layer != "interpreter" else {"ctypes": "import ctypes; ctypes.CDLL(None)"})
    harmless = {
        "modules": (
            "import math, json, random, datetime, decimal, numpy, tempfile; tempfile.TemporaryFile().write(b'x');"
            " open('mine', 'w').write('x'); open('mine').read()"
        ),
        "threads": "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "own signal": "import os, signal; os.kill(os.getpid(), signal.SIGCONT)",
    }
    jobs = [
        {"kind": "program", "source": code.format(**where) + "\nprint('done')", "stdin": ""}
        for code in (*tried.values(), *harmless.values())
    ]
    outcomes = dict(zip((*tried, *harmless), run_jobs(jobs, Limits(timeout_s=20.0), fresh=True)))
    assert [n for n in tried if outcomes[n].error is None] == [], "these got through"
    assert [outcomes[n] for n in harmless if outcomes[n].error or "done" not in outcomes[n].value["stdout"]] == []
    assert (
        secret.read_text() == "gold"
        and secret.stat().st_mode & 0o600
        and [p.name for p in tmp_path.iterdir()] == ["secret"]
    )
    assert not [p for p in os.listdir("/proc") if p.isdigit() and "65432" in _command(p)]


def test_a_reward_of_ones_own_reads_the_files_it_names(tmp_path):
    """Named files and folders can be read and not written, others cannot be read; their contents are part of the
    setting.
    """
    words, folder, other = tmp_path / "words.txt", tmp_path / "lists", tmp_path / "other.txt"
    words.write_text("good\n")
    folder.mkdir()
    (folder / "more.txt").write_text("fine\n")
    other.write_text("secret\n")

    def scored(what, **settings):
        component = RewardComponent(
            kind="python", source=f"def score(prompt, completion, answer):\n    {what}", **settings
        )
        (found,) = Rewards([component], {}, None).score([row("good")])
        return found

    body = (
        f"words = open({str(words)!r}).read() + open({str(folder / 'more.txt')!r}).read(); return float(completion in"
        " words)"
    )
    assert scored(body, files=[str(words), str(folder)]).total == 1.0
    assert "files=[...]" in scored(body).reasons["python"]
    assert (
        "refuses" in scored(f"open({str(words)!r}, 'w').write('x'); return 1.0", files=[str(words)]).reasons["python"]
        and words.read_text() == "good\n"
    )
    assert (
        "refuses"
        in scored(f"return float(len(open({str(other)!r}).read()))", files=[str(words), str(folder)]).reasons["python"]
    )
    before = RewardComponent(kind="python", source="def score(p, c, a): return 1", files=str(folder))
    assert RewardComponent.model_validate(before.model_dump()) == before, "a resolved setting stays as it is"
    (folder / "more.txt").write_text("other\n")
    assert RewardComponent(kind="python", source="def score(p, c, a): return 1", files=str(folder)) != before
    for wrong, text in (
        ({"files": ["nowhere.txt"]}, "cannot be read"),
        ({"kind": "verifier", "files": [str(words)]}, "files is for kind python"),
    ):
        with pytest.raises(ValueError, match=text):
            RewardComponent(**{"kind": "python", "source": "def score(p, c, a): return 1", **wrong})


def test_a_program_cannot_pass_by_writing_to_its_descriptors():
    forged = (
        'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"token": "ready", "value": true}\\n\')\n   '
        " except OSError: pass"
    )
    assert (
        run_jobs([{"kind": "tested", "source": forged, "test": "assert False"}], Limits(timeout_s=5.0), fresh=True)[
            0
        ].value
        is None
    )


@pytest.mark.parametrize(
    "source,says",
    [
        (
            "import nopackage_x.part\ndef score(prompt, completion, answer):\n    return 1.0",
            "install nopackage_x in the environment",
        ),
        (
            "from .util import f\ndef score(prompt, completion, answer):\n    return f(1)",
            "write what it imports into the same file",
        ),
        ("def score(prompt, completion, answer):\n    return '0.5'", "return a number"),
        ("def score(prompt, completion, answer):\n    return [1.0]", "scope: group"),
    ],
)
def test_what_a_function_of_ones_own_does_wrong_is_answered_with_what_to_write(source, says):
    (scored,) = score([row("x")], {"kind": "python", "source": source})
    assert scored.total is None and says in scored.reasons["python"]


def test_a_third_parameter_that_is_called_as_a_column_gets_that_column():
    (scored,) = score(
        [row("x", answer="5", difficulty=7)],
        {"kind": "python", "source": "def score(prompt, completion, difficulty):\n    return float(difficulty)"},
    )
    assert scored.total == 7.0
    # by place, as before
    (scored,) = score([row("x", answer="5")], {"kind": "python", "source": "def score(p, c, a):\n    return float(a)"})
    assert scored.total == 5.0


def test_the_python_tool_is_locked_down_too(tmp_path):
    """A policy's program in an episode: no files, no processes, no writing to the episode's pipes."""
    from stages.acting.tools import BadCall, run_python

    read, write = os.pipe()
    os.set_blocking(read, False)
    (tmp_path / "secret").write_text("gold")
    try:
        assert run_python("import math\nprint(math.sqrt(49))") == "7.0"
        for code in (
            f"print(open('{tmp_path}/secret').read())",
            "import os\nos.kill(os.getppid(), 0)",
            "import os\nos.fork()",
            f"import os\nos.write({write}, b'forged')",
        ):
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
    programs = [
        "def double(x):\n    return 2 * x",
        "import sys\nprint('OK')\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def double(x):\n    return x",
    ]
    scored = score(
        [row(f"```python\n{p}\n```", tests=tests) for p in programs]
        + [row(programs[0], tests=tests), row("x", tests=[])],
        {"kind": "code", "timeout_s": 3.0},
    )
    assert [s.total for s in scored] == [1.0, 0.0, 0.0, 0.0, 0.0, None]
    assert extract_program("```python\nx\n``` then ```py\ny\n```") == "y\n"


AGREES = (
    "class Same:\n    def __eq__(self, other): return True\n    __ne__ = lambda self, other: False\n    __sub__ ="
    " __rsub__ = __abs__ = lambda self, *other: self\n    __lt__ = __le__ = __gt__ = __ge__ = __eq__\n    __len__ ="
    " lambda self: 2\n"
)
CHEATS = {
    "an object that equals everything": AGREES + "def f(x): return Same()",
    "one in a list": AGREES + "def f(x): return [Same()]",
    "a number that equals everything": (
        "class N(int):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = int.__hash__\n "
        "   __sub__ = __rsub__ = lambda s, o: 0\ndef f(x): return N(0)"
    ),
    "a list that equals everything": "class L(list):\n    __eq__ = lambda s, o: True\ndef f(x): return L()",
    "patched builtins": (
        "import builtins\nfor name in ('abs', 'len', 'sorted', 'all', 'isinstance', 'list', 'max'):\n   "
        " setattr(builtins, name, lambda *a, **k: True)\nbuiltins.AssertionError = type('E', (Exception,), {'__new__':"
        " lambda c, *a: 1 / 0})\ndef f(x): return 0"
    ),
    "names of builtins": "def abs(x): return 0\ndef len(x): return 1\ndef list(x): return x\ndef f(x): return 0",
    "patched modules": "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
    "the test in the frames": (
        "import sys, re\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for v in"
        " list(frame.f_locals.values()):\n            if isinstance(v, dict) and 'test' in v:\n                return"
        " eval(re.search(r'==\\s*(.+)', v['test'])[1])\n        frame = frame.f_back"
    ),
    "a reply with the token of the frames": (
        "import sys, os, json\nframe = sys._getframe()\nwhile frame.f_back: frame ="
        " frame.f_back\nos.write(frame.f_globals['write_fd'], (json.dumps({'token': frame.f_globals['token'], 'value':"
        " True}) + '\\n').encode())\ndef f(x): return 0"
    ),
    "a reply from a call": (
        "import sys, os, json\ndef f(x):\n    g = sys._getframe()\n    while g.f_back: g = g.f_back\n    for v in"
        " (True, {'value': True}):\n        os.write(g.f_globals['write_fd'], (json.dumps({'token':"
        " g.f_globals['token'], 'value': v}) + '\\n').encode())\n    return 0"
    ),
    "leaving": "def f(x): raise SystemExit(0)",
    "leaving at once": "import os\ndef f(x): os._exit(0)",
    "raising nothing to stop the test": "def f(x): raise AssertionError",
}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize(
    "test",
    [
        "assert f(3) == 6",
        "def check(c):\n    assert c(3) == 6\ncheck(f)",
        "assert abs(f(3) - 6) < 1e-6",
        "import math\nassert math.isclose(f(3), 6)",
        "assert f(3) in [6, 7]",
        "assert not f(3) != 6",
        "assert list(f(3)) == [6]",
        "assert len(f(3)) == 2 and sorted(f(3)) == [1, 2]",
    ],
)
def test_a_program_cannot_pass_by_what_it_does_to_its_test(name, test):
    """It shares no interpreter with the test, and what it returns is a plain value there."""
    (found,) = run_jobs([{"kind": "tested", "source": CHEATS[name], "test": test}], Limits(timeout_s=10.0), fresh=True)
    assert found.value is not True and found.error


FIRST = "import os\ndef again():\n    try: open('seen', 'x')\n    except FileExistsError: return True\n" + AGREES
UNSENDABLE = "class Unsendable(Exception): pass\nclass E(Exception):\n    def __str__(self): raise Unsendable('x')\n"


@pytest.mark.parametrize(
    "source",
    [
        FIRST + UNSENDABLE + "if not again(): raise Unsendable('x')\ndef f(x): return Same()",
        FIRST + UNSENDABLE + "def f(x):\n    if not again(): raise E\n    return Same()",
    ],
)
def test_a_program_cannot_have_its_test_come_into_its_interpreter(source):
    """Only the test's own process says that it needs it, and not an error of that name from the program's."""
    (found,) = run_jobs([{"kind": "tested", "source": source, "test": "assert f(3) == 6"}], Limits(timeout_s=10.0))
    assert found.value is not True and found.error


def test_a_test_shares_the_interpreter_for_what_it_does_and_not_for_its_words():
    from stages.running.tested import names_asked

    for test in (
        "assert f('input') == 6  # eval the seed",
        'def check(c):\n    "patch stdin"\n    assert c(3) == 6\ncheck(f)',
    ):
        assert "f" in names_asked(test)
        job = {"kind": "tested", "source": AGREES + "def f(x): return Same()", "test": test}
        assert run_jobs([job], Limits(timeout_s=10.0), fresh=True)[0].error
    for test in (
        "import sys\nassert sys.stdout",
        "from unittest import mock\nf()",
        "from unittest.mock import patch as p\nf()",
        "def test(capsys): f()",
        "if __name__ == '__main__': f()",
        "assert eval('f(3)') == 6",
        "async def g(): f()",
    ):
        assert names_asked(test) is None, test


@pytest.mark.parametrize(
    "test",
    [
        "assert all(map(lambda case: f(case[0]) == case[1], [(3, 6), (4, 8)]))",
        "for got, wanted in zip(map(f, [3, 4]), [6, 8]):\n    assert got == wanted",
        "for got in map(f, [3]):\n    assert got == 6",
    ],
)
def test_a_program_cannot_end_the_loop_that_tests_it(test):
    source = "def f(x): raise StopIteration"
    (found,) = run_jobs([{"kind": "tested", "source": source, "test": test}], Limits(timeout_s=10.0), fresh=True)
    assert found.value is not True and "StopIteration" in found.error
    right = [
        {"kind": "tested", "source": "def f(x): return 2 * x", "test": test},
        {
            "kind": "tested",
            "source": "def f(): yield 1",
            "test": "g = f()\nassert next(g) == 1\ntry:\n    next(g)\n    assert False\nexcept StopIteration:\n    pass",
        },
    ]
    assert [one.value for one in run_jobs(right, Limits(timeout_s=10.0), fresh=True)] == [True, True]


def test_a_program_leaves_no_file_for_the_next_one():
    source = (
        "import os\nprint(sorted(os.listdir('.')))\nopen('left', 'w').close()\nos.mkdir('more')\n"
        "open('more/left', 'w').close()"
    )
    jobs = [{"kind": "program", "source": source, "stdin": ""}] * 3
    found = run_jobs(jobs, Limits(timeout_s=10.0, workers=1), fresh=True)
    assert [one.value for one in found] == [{"stdout": "[]\n", "exit": 0}] * 3


@pytest.mark.parametrize(
    "program, test",
    [
        ("def f(x):\n    x.append(1); x.sort()", "a = [3]\nassert f(a) is None and a == [1, 3]"),
        ("def f(d): d['k'] = {1, 2}", "d = {}\nf(d)\nassert d == {'k': {1, 2}}"),
        (
            "def f(): return (1, [2, {3: (4,)}], 1.5, None, True, 'é', b'x', 2j)",
            "assert f() == (1, [2, {3: (4,)}], 1.5, None, True, 'é', b'x', 2j) and type(f()) is tuple",
        ),
        ("def f(n): return 3 ** n", "assert f(5000) == 3 ** 5000"),
        ("def f(): yield from range(3)", "assert list(f()) == [0, 1, 2] and next(f()) == 0"),
        ("def f(): return float('nan'), float('inf')", "a, b = f()\nassert a != a and b == float('inf')"),
        (
            "def f(x): raise ValueError('no')",
            "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'",
        ),
        (
            (
                "class P:\n    def __init__(s, x): s.x = x\n    def twice(s): return P(2 * s.x)\n    def __eq__(s, o):"
                " return s.x == o.x\n    def __add__(s, o): return P(s.x + o.x)\n    def __len__(s): return s.x"
            ),
            (
                "p = P(2)\np.x = 3\nassert p.twice().x == 6 and p.twice() == P(6) and p != P(4) and p + P(1) == P(4)"
                " and len(p) == 3 and p != 3"
            ),
        ),
        (
            (
                "from collections import Counter, deque\nfrom fractions import Fraction\ndef f(): return"
                " Counter('aab'), deque([1]), Fraction(1, 3)"
            ),
            (
                "from collections import deque\nfrom fractions import Fraction\nassert f() == ({'a': 2, 'b': 1},"
                " deque([1]), Fraction(1, 3))"
            ),
        ),
        (
            "import numpy as np\ndef f(x): return np.cumsum(x), np.float64(1.5)",
            "import numpy as np\na, b = f([1, 2])\nassert np.allclose(a, [1, 3]) and b == 1.5",
        ),
        ("def f(g, x): return [g(i) for i in x]", "assert f(lambda i: i + 1, [1]) == [2]"),
        ("class Stop(Exception): pass\ndef f(): raise Stop", "try:\n    f()\n    assert False\nexcept Stop:\n    pass"),
        (
            "def f(): print('hi')",
            (
                "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f()\nassert"
                " out.getvalue() == 'hi\\n'"
            ),
        ),
        ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
        (
            "def enc(s): return s[::-1]\ndef dec(s): return s[::-1]",
            "def check(c):\n    assert c(enc('ab')) == 'ab'\ncheck(dec)",
        ),
        ("LIMIT = 3", "assert LIMIT == 3"),
        ("x = 1", "assert True"),
    ],
)
def test_what_a_test_may_ask_of_a_program(program, test):
    (found,) = run_jobs([{"kind": "tested", "source": program, "test": test}], Limits(timeout_s=20.0), fresh=True)
    assert found.value is True, found.error


def test_a_hang_between_questions_ends():
    """Questions add to the time limit, and not without end: an endless generator and a slow function are timeouts."""
    endless, slow = "def f():\n    while True: yield 1", "import time\ndef f(): time.sleep(60)"
    for source, test in (
        (endless, "for x in f(): pass"),
        (slow, "f()"),
        ("def f(): pass", "while True: f()"),
        ("while True: pass", "f()"),
    ):
        started = time.monotonic()
        (found,) = run_jobs([{"kind": "tested", "source": source, "test": test}], Limits(timeout_s=1.0), fresh=True)
        assert found.error == "timeout" and time.monotonic() - started < 30


def test_only_the_hardest_tests_are_run_where_a_prompt_has_more():
    tests = [{"input": given, "expected": "1"} for given in ("1", "1 1 1", "1 1", "1 1 2", "")]
    program = "```python\nprint(int('2' not in input()))\n```"  # wrong for the fourth, and ends early for the last
    run = lambda **more: score(
        [row(program, tests=tests), row(program, tests=tests[:1])], {"kind": "code", "mode": "fraction", **more}
    )
    assert (
        [one.total for one in run()] == [3 / 5, 1.0]
        and [one.total for one in run(max_tests=2)] == [1 / 2, 1.0]
        and [one.total for one in run(max_tests=3)] == [2 / 3, 1.0]
    )
    assert score([row("I do not know.", tests=tests)], {"kind": "code", "max_tests": 2})[0].total == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "```python\nGOOD\n```\nOutput:\n```\n6\n```",
        "First:\n```bash\npip install x\n```\nThen:\n```python\nGOOD\n```",
        "```python3\nGOOD\n```",
        "```Python\nGOOD\n```",
        "```py\r\nGOOD\r\n```\r\n",
        "1. So:\n   ```python\n   GOOD\n   ```",
        "```\nGOOD\n```",
        "````python\nGOOD\n````",
        "~~~python\nGOOD\n~~~",
        "Here: ```python\nGOOD```",
        '```python\n"""\n    ```\n    double(3)\n    ```\n"""\nGOOD\n```',
        "``` then ```py\nGOOD\n```",
        "<think>```python\nBAD\n```</think>```python\nGOOD\n```",
    ],
)
def test_the_program_of_an_answer_is_its_last_python_block(text):
    good, tests = "def double(x):\n    return 2 * x", [{"code": "assert double(3) == 6"}]
    indent = "   " if "\n   GOOD" in text else ""
    filled = text.replace("GOOD", good.replace("\n", "\n" + indent)).replace("BAD", "def double(x):\n    return x")
    assert score([row(filled, tests=tests)], {"kind": "code"})[0].total == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nGOOD\n```",
        "```python\nGOOD",
        "GOOD",
        "<think>```python\nGOOD\n```</think> I am not sure.",
        "<think>```python\nGOOD\n```",
    ],
)
def test_an_answer_without_a_finished_python_block_has_no_program(text):
    (scored,) = score([row(text.replace("GOOD", "x = 1"), tests=[{"code": "assert x == 1"}])], {"kind": "code"})
    assert scored.total == 0.0 and scored.correct is False


START = 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """ Sum.\n    """\n'


@pytest.mark.parametrize(
    "text, right",
    [
        ("    return sum(numbers)\n", True),
        ("    return sum(numbers)\n\n\ndef other():\n    oops(", True),
        ("   return sum(numbers)", True),
        ("return sum(numbers)", True),
        (START + "    return sum(numbers)\n", True),
        ("```python\n    return sum(numbers)\n```", True),
        ("```python\nreturn sum(numbers)\n```", True),
        ("```python\n" + START + "    return sum(numbers)\n```", True),
        ("    return 0", False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_a_completion_of_a_function_runs_behind_its_prompt(text, right):
    """eval.humaneval: prompt + completion up to what no longer belongs to the function; the prompt is left out where
    the answer has the header.
    """
    asked = {
        "prompt": [{"role": "user", "content": START}],
        "tests": [{"code": "def check(f):\n    assert f([1, 2]) == 3\n\ncheck(total)\n"}],
    }
    assert score([row(text, **asked)], {"kind": "code"})[0].total == float(right)
    assert (
        program_of(
            {**asked, "prompt": [{"role": "user", "content": "Write total(numbers)."}]}, "    return sum(numbers)"
        )
        is None
    )


@pytest.mark.parametrize(
    "program",
    [
        "print(sum(map(int, input().split())))",
        "import sys; print(sum(map(int, sys.stdin.buffer.read().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "import sys\ninput = sys.stdin.buffer.readline\nprint(sum(map(int, input().split())))",
        "import sys; sys.stdout.buffer.write(b'5')",
        "import os; os.write(1, b'5')",
        "import os; os.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())",
        "import sys; print(5); sys.stdout.close()",
        "print(5); exit()",
    ],
)
def test_a_program_reads_and_writes_its_standard_streams_in_every_way(program):
    tests = [{"input": "2 3\n", "expected": "5\n", "code": None}]
    assert score([row(f"```python\n{program}\n```", tests=tests)], {"kind": "code"})[0].total == 1.0


def test_a_test_has_its_own_time_limit_and_output_is_bounded():
    sleeps = {"input": "", "expected": "5", "code": None}
    rows = [
        row("```python\nimport time; time.sleep(1.5); print(5)\n```", tests=[{**sleeps, "timeout_s": own}])
        for own in (0.5, 20.0, None)
    ]
    assert [s.total for s in score(rows, {"kind": "code", "timeout_s": 1.0})] == [0.0, 1.0, 0.0]
    (much,) = run_jobs([{"kind": "program", "source": "print('x' * 2_000_000)", "stdin": ""}], fresh=True)
    assert "1,000,000 bytes of output" in much.error


def test_jobs_keep_their_order_and_do_not_leave_anything_behind():
    jobs = [
        {
            "kind": "program",
            "source": "import builtins\nprint(getattr(builtins, 'left', 0)); builtins.left = 1",
            "stdin": "",
        }
    ] * 5
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


THOUGHT = [
    (r"<think>it is \boxed{18}</think> I am not sure.", 0.0),
    (r"<think>\boxed{18}, wait", 0.0),
    ("<think>guess <answer>18</answer> no</think> <answer>", 0.0),
    (r"<think>guess <answer>18</answer> no</think> final: \boxed{20}", 0.0),
    (r"<think>\boxed{7}?</think> so \boxed{18}", 1.0),
    (r"so \boxed{18}", 1.0),
]


@pytest.mark.parametrize("text, value", THOUGHT)
@pytest.mark.parametrize("kind", ["text", "number"])
def test_an_answer_in_the_thought_is_no_answer(kind, text, value):
    """Unless `view` says that the whole response is read; a stored configuration reads as it was written."""
    component = RewardComponent(kind="verifier")
    assert score([row(text, answer="18", answer_type=kind)], component.model_dump())[0].total == value
    if text.startswith(r"<think>\boxed{18}"):
        assert (
            score([row(text, answer="18", answer_type="number")], {"kind": "verifier", "view": "full"})[0].total == 1.0
        )
    assert (
        RewardComponent.model_validate(component.model_dump()) == component
        and RewardComponent(kind="model").view == "full"
    )


def test_a_choice_and_a_vote_are_what_follows_the_thought():
    text = "<think>Therefore, the answer is (A)</think> Therefore, the answer is (B)"
    unfinished = "<think>Therefore, the answer is (B)"
    assert [
        s.total
        for s in score(
            [row(text, answer="B", answer_type="mc"), row(unfinished, answer="B", answer_type="mc")],
            {"kind": "verifier"},
        )
    ] == [1.0, 0.0]
    rows = [
        row(t, row_id="p")
        for t in (r"<think>\boxed{1}</think>\boxed{2}", r"<think>\boxed{1}", r"<think>\boxed{1}", r"\boxed{2}")
    ]
    assert [s.total for s in score(rows, {"kind": "majority"})] == [1.0, 0.0, 0.0, 1.0]


#: (answer, right in a strict reading); all right in a flexible one
ENDINGS = [
    ("So the answer is 18 dollars.", False),
    ("The answer is that he has 18 apples.", False),
    (r"The answer is \( 18 \).", False),
    ("<answer>She earns 18 dollars</answer>", False),
    (r"<answer>\boxed{18}</answer>", True),
    ("<answer>#### 18</answer>", True),
    ("#### 18 dollars", True),
    ("#### **18**", True),
    ("#### $18.", True),
    ("#### 18", True),
]


@pytest.mark.parametrize("text, strict", ENDINGS)
def test_usual_endings_of_an_answer(text, strict):
    gold = {"answer": "3 * 6 = 18\n#### 18", "answer_type": "integer"}
    assert (verify_math(gold, text)[0], verify_math(gold, text, True)[0]) == (strict, True)
    assert not verify_math({**gold, "answer": "17"}, text, True)[0]


@pytest.mark.parametrize(
    "text, gold",
    [
        ("#### 3, 4", "34"),
        ("#### 18 or 20", "18"),
        ("#### 3. Last step", "3"),
        (r"\boxed{1 1/2}", "11/2"),
        (r"\boxed{\{1,1\}}", r"\{1\}"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{10,00}", "1000"),
        (r"\boxed{1,2}", "2,1"),
    ],
)
def test_not_the_same_value(text, gold):
    assert not verify_math({"answer": gold}, text)[0]


@pytest.mark.parametrize(
    "answer, gold",
    [
        (r"\{2,1\}", r"\{1, 2\}"),
        ("{1,2}", "{2,1}"),
        (r"\{\frac12,2\}", r"\{2, 0.5\}"),
        (r"$5\text{ cm}$", "5"),
        (r"5\text{ inches}.", "5"),
        (r"5\text{ cm}^2", "5"),
        (r"5~\text{cm}", "5"),
        (r"5 \mathrm{~cm}", "5"),
        (r"5\ \text{m}/\text{s}^{2}", "5"),
        (r"90^ \circ", "90"),
        (r"1{,}000", "1000"),
        (r"\frac{1}2", "1/2"),
        (r"\text{even}", "even"),
        (r"50\%", "50"),
        ("$5", "5"),
        (r"\(18\)", "18"),
    ],
)
def test_the_same_value(answer, gold):
    assert math_equal(answer, gold) and math_equal(gold, answer)


def test_no_answer_takes_long_to_read():
    """Policies find texts on which a pattern takes forever; reading is near linear."""
    from stages.verification.normalisation import normalise_math

    for piece in (" ", "*", "`", "~", "\\text{", r"\text{a}", "^", "Mr. ", "1. ", "```\n", "``` ", "1,", "{"):
        text, started = piece * (40_000 // len(piece)) + "x", time.process_time()
        (
            verify_math({"answer": "1"}, "#### *" + text, True),
            normalise_math("5" + text),
            math_equal("5" + text, "6"),
            extract_program(text),
            extract_program("```" + text),
        )
        check_constraint("length_constraints:number_sentences", {"num_sentences": 3}, text), guess_language(text)
        assert time.process_time() - started < 5.0, repr(piece)


def test_a_tolerance_is_a_setting():
    rows = [row(r"\boxed{9.81}", answer="9.8", answer_type="number")]
    assert [score(rows, {"kind": "verifier", "rel_tol": tol})[0].total for tol in (0.0, 0.01)] == [0.0, 1.0]


@pytest.mark.parametrize(
    "text, gold",
    [
        ("#### Washington, D.C.", "Washington, D.C."),
        (r"\boxed{\text{Paris}}", "Paris"),
        ("<answer>paris.</answer>", r"\text{Paris}"),
        ("#### 1,000 men", "1,000 men"),
    ],
)
def test_text_answers(text, gold):
    assert verify_text({"answer": gold}, text)[0] and not verify_text({"answer": "Rome"}, text)[0]


@pytest.mark.parametrize("stop", ["。", "।", "۔", "｡"])
def test_a_full_stop_of_another_script_is_no_part_of_an_answer(stop):
    """As the dot of a sentence is none: Chinese and Japanese, Hindi, Urdu."""
    assert (
        verify_math({"answer": "18", "answer_type": "integer"}, f"#### 18{stop}")[0]
        and verify_math({"answer": f"x^2{stop}"}, r"\boxed{x^2}")[0]
    )
    assert (
        verify_text({"answer": "北京"}, f"<answer>北京{stop}</answer>")[0]
        and not verify_text({"answer": "北"}, f"<answer>北京{stop}</answer>")[0]
    )


@pytest.mark.parametrize(
    "answer, kind, texts",
    [
        (r"\frac{1}{2}", "latex", [r"\boxed{\frac12}", r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{\dfrac{1}{2}}"]),
        (r"50\%", "latex", [r"\boxed{50}"]),
        ("$5", "latex", [r"\boxed{5}"]),
        ("x^2", "latex", [r"\boxed{x^2}"]),
        ("3/4", "number", [r"\boxed{0.75}"]),
        ("Paris", "text", ["paris"]),
        ("1,000", "number", ["#### 1000"]),
    ],
)
def test_ingested_answers_are_read_by_their_own_verifier(answer, kind, texts):
    from types import SimpleNamespace

    from stages.ingestion.adapters import _prompts

    _, made, _ = _prompts({"prompt": "q", "answer": answer}, SimpleNamespace(answer_type=None))
    assert made["answer_type"] == kind
    assert [s.total for s in score([row(text, **made) for text in texts], {"kind": "verifier"})] == [1.0] * len(texts)


# -- constraints -------------------------------------------------------------------------------------------------------


def test_an_empty_answer_satisfies_no_constraint():
    kwargs = {
        "keywords:forbidden_words": {"forbidden_words": ["x"]},
        "length_constraints:number_words": {"num_words": 9, "relation": "less than"},
        "keywords:letter_frequency": {"letter": "a", "let_frequency": 3, "let_relation": "less than"},
        "punctuation:no_comma": {},
    }
    assert not any(
        check_constraint(name, given, text) for name, given in kwargs.items() for text in ("", " \n")
    ) and check_constraint("punctuation:no_comma", {}, "x")
    constraints = [{"id": "punctuation:no_comma", "kwargs_json": "{}"}]
    assert [
        s.total
        for s in score([row("", constraints=constraints), row("yes", constraints=constraints)], {"kind": "constraints"})
    ] == [0.0, 1.0]


SAID = {
    "en": "I would love to see it with you.",
    "de": "Guten Tag, wie geht es Ihnen heute?",
    "it": "Ciao, mi piace molto il cibo di questo posto.",
    "pt": "Olá, eu gosto muito da comida e não vou embora.",
    "fi": "Hyvää päivää, minä olen iloinen että tämä on totta.",
    "sw": "Mimi ni mwalimu katika shule hii na watu wangu.",
    "vi": "Tôi là một người yêu thích âm nhạc và thể thao.",
    "ru": "Меня зовут Иван, и я живу в Москве.",
    "bg": "Аз съм от България и това е много хубаво.",
    "ar": "أنا سعيد في هذا اليوم مع أصدقائي",
    "fa": "من در این شهر زندگی می‌کنم و آن را دوست دارم",
    "ur": "میں پاکستان میں رہتا ہوں اور یہ بہت اچھا ہے",
    "hi": "मैं भारत में रहता हूँ और यह बहुत अच्छा है।",
    "mr": "मी महाराष्ट्रात राहतो आणि हे खूप छान आहे.",
    "ne": "म नेपालमा बस्छु र यो धेरै राम्रो छ।",
    "kn": "ನಾನು ಬೆಂಗಳೂರಿನಲ್ಲಿ ವಾಸಿಸುತ್ತೇನೆ",
    "ko": "안녕하세요 저는 학생입니다",
    "pa": "ਮੈਂ ਪੰਜਾਬ ਵਿੱਚ ਰਹਿੰਦਾ ਹਾਂ",
    "gu": "હું ગુજરાતમાં રહું છું",
    "te": "నేను హైదరాబాద్ లో ఉంటాను",
    "ta": "நான் சென்னையில் வசிக்கிறேன்",
    "th": "ฉันอยู่ที่กรุงเทพ",
    "bn": "আমি ঢাকায় থাকি",
}


@pytest.mark.parametrize(
    "text",
    [
        "A man eats 5 sandwiches a day, his wife eats 4, a kid eats a bun.",
        "Suggest a recipe for a vegan dessert.",
        "is a banana a fruit or a herb",
        "Help me find a good rated electric saw.",
        "once upon a time a fox met a hen and a duck at a pond",
    ],
)
def test_english_with_many_articles_is_english(text):
    """ "a" is a word of Portuguese, Spanish and Italian too: it must not outvote the rest."""
    assert (
        guess_language(text) == "en"
        and check_constraint("change_case:english_lowercase", {}, text.lower())
        and check_constraint("change_case:english_capital", {}, text.upper())
    )


def test_languages_of_ifeval_are_recognised():
    assert {name: guess_language(text) for name, text in SAID.items()} == {
        name: name for name in SAID
    } and guess_language("12!") is None
    assert check_constraint("language:response_language", {"language": "de"}, SAID["de"]) and not check_constraint(
        "language:response_language", {"language": "de"}, SAID["en"]
    )
    with pytest.raises(BadGold, match="write one of"):
        check_constraint("language:response_language", {"language": "xx"}, "x")
    assert check_constraint("change_case:english_capital", {}, SAID["en"].upper()) and not check_constraint(
        "change_case:english_capital", {}, "ПРИВЕТ МИР"
    )
    assert not check_constraint("change_case:english_lowercase", {}, SAID["it"].lower())


@pytest.mark.parametrize(
    "text, count",
    [
        ("Dr. Smith met Mr. Lee. They talked.", 2),
        ("Dr. Smith of the U.S. Army met J. Lee at 5 p.m. on Monday. They talked.", 2),
        ("1. First item\n2. Second item", 2),
        ("See fig. 3, e.g. this. It is good!", 2),
        ('He said "Stop." Then he left.', 2),
        ("hello. how are you? fine.", 3),
        ("It was 1990. Then it ended.", 2),
        ("He lives in the U.S. The end.", 2),
        ("one", 1),
    ],
)
def test_sentences_are_counted_past_abbreviations(text, count):
    for bound in (count, count + 1):
        assert check_constraint(
            "length_constraints:number_sentences", {"num_sentences": bound, "relation": "at least"}, text
        ) == (bound == count)


def test_counts_may_be_floats_and_a_threshold_is_a_share():
    assert check_constraint(
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3.0, "nth_paragraph": 2.0, "first_word": "b"},
        "a\n\nb x\n\nc",
    )
    asked = {
        "constraints": [
            {"id": name, "kwargs_json": "{}"}
            for name in ("punctuation:no_comma", "startend:quotation", "detectable_format:title")
        ]
    }
    assert [
        score([row("<<a>>", **asked)], {"kind": "constraints", "mode": mode, "threshold": t})[0].total
        for mode, t in (("all", 1), ("fraction", 1), ("threshold", 0.5), ("threshold", 0.7))
    ] == [0.0, 2 / 3, 1.0, 0.0]


def _data(name):
    """A public file that a user put beside the project, or a skip."""
    from pathlib import Path

    found = next(
        (p for root in (Path.cwd(), *Path(__file__).resolve().parents) for p in root.glob(f"shared/data/**/{name}")),
        None,
    )
    return found or pytest.skip(f"needs shared/data/{name}")


def test_every_ifeval_prompt_can_be_scored():
    import json

    for prompt in map(json.loads, _data("ifeval_input_data.jsonl").read_text("utf-8").splitlines()):
        for name, given in zip(prompt["instruction_id_list"], prompt["kwargs"]):
            assert check_constraint(name, given, "A text, in English.") in (True, False) and name in CHECKERS


def test_canonical_humaneval_completions_are_right():
    import gzip
    import json

    problems = list(map(json.loads, gzip.open(_data("HumanEval.jsonl.gz"), "rt", encoding="utf-8")))
    rows = [
        row(
            p["canonical_solution"],
            prompt=[{"role": "user", "content": p["prompt"]}],
            tests=[{"code": f"{p['test']}\ncheck({p['entry_point']})\n"}],
        )
        for p in problems
    ]
    assert sum(s.total for s in score(rows, {"kind": "code", "timeout_s": 30.0})) == len(problems) == 164


@pytest.mark.parametrize(
    "text, answer",
    [
        ("Answer: red.", "red"),
        ("so. Answer: RED", "RED"),
        ("red", "red"),
        ("red.", "red"),
        ("It is red. Yes.", None),
        ("Answer: a. Answer: b.", "b"),
        ("", None),
        ("Answer: .", None),
        ("Answer: 1 2  3. I hope this helps.", "1 2 3"),
    ],
)
def test_world_extraction(text, answer):
    assert extract_world(text) == answer


def test_the_verifier_is_chosen_by_the_row():
    assert verifier_of({"answer_type": "integer"}) == "math" and verifier_of({"answer_type": "mc"}) == "mc"
    assert verifier_of({"answer": "x"}) == "text" and verifier_of({"extra_json": '{"verifier":"world"}'}) == "world"
    assert math_equal("\\dfrac{1}{2}", "0.5") and not math_equal("1/0", "1")


def test_a_setting_that_a_kind_does_not_read_is_refused():
    """Every setting of a component is read by every kind or names those that read it; elsewhere it is an error that
    says which.
    """
    from typing import get_args

    from stages.reward.components import OF_KINDS, RewardComponent

    everyone = {
        "name",
        "kind",
        "weight",
        "domains",
        "at_least",
        "multiplier_step",
        "from_step",
        "on_missing",
        "tier",
        "min_confidence",
        "audit_fraction",
        "blend",
    }
    assert set(RewardComponent.model_fields) == everyone | set(OF_KINDS) and not everyone & set(OF_KINDS)
    kinds = set(get_args(RewardComponent.model_fields["kind"].annotation))
    assert all(set(of) <= kinds for of in OF_KINDS.values())
    for given, says in (
        (
            {"kind": "verifier", "squash": "sigmoid"},
            "squash is for kind model or judge or group_preference or remote; verifier does not read it",
        ),
        ({"kind": "length", "view": "answer_only"}, "view is for kind"),
        ({"kind": "model", "judge_mode": "verdict"}, "judge_mode is for kind judge or debate"),
        ({"kind": "format", "milestones": {"a": 1.0}}, "milestones is for kind milestones"),
        ({"kind": "model", "missing_eos_penalty": 2.0}, "missing_eos_penalty is for kind truncation"),
        ({"kind": "model", "min_confidence": 0.9}, "tier: learned"),
        ({"kind": "regex", "pattern": "a", "preset": "think_only"}, "preset is for kind format"),
    ):
        with pytest.raises(ValueError, match=says):
            RewardComponent(**given)
    for kind, required in (
        ("regex", {"pattern": "a"}),
        ("group_preference", {"group": "g"}),
        ("python", {"source": "def score(prompt, completion, answer):\n    return 1"}),
        ("remote", {"url": "http://h/r", "endpoint_model": "m"}),
        *((k, {}) for k in kinds - {"regex", "group_preference", "python", "remote"}),
    ):
        once = RewardComponent(kind=kind, **required)
        assert RewardComponent.model_validate(once.model_dump()) == once  # defaults, written out, are refused by none


def test_verls_ground_truth_is_the_answer_or_what_no_verifier_reads():
    import json

    function = {
        "name": "own",
        "kind": "python",
        "source": (
            "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(ground_truth =="
            " '7') if data_source == 'math' else float(ground_truth['target'] == 98) + extra_info['index']\nscore ="
            " compute_score\n"
        ),
    }
    judged = {
        "data_source": "countdown",
        "reward_model": {"style": "rule", "ground_truth": {"target": 98, "numbers": [44, 54]}},
        "extra_info": {"index": 1},
    }
    rows = [
        row("x", answer="7", extra_json=json.dumps({"data_source": "math", "reward_model": {"ground_truth": "7"}})),
        row("x", answer=None, extra_json=json.dumps(judged)),
    ]
    assert [one.total for one in score(rows, function)] == [1.0, 2.0]


OWN = "import os, time\ndef pid():\n    return os.getpid()\ndef rest(s):\n    time.sleep(s)\n"


def pids(n=1, limits=Limits(timeout_s=30.0), setup=OWN):
    found = run_jobs([{"kind": "call", "function": "pid", "args": []}] * n, limits, setup=setup)
    assert not any(one.error for one in found)
    return {one.value for one in found}


def test_workers_of_our_own_functions_wait_for_the_next_call():
    """An interpreter that has imported SymPy for each step of a run would be a second of each."""
    one = Limits(timeout_s=30.0, workers=1)
    (first,) = pids(3, one)
    assert pids(2, one) == {first}
    assert pids(1, Limits(timeout_s=31.0, workers=1)) != {first}, "of other limits"
    assert pids(1, one, OWN + "\n") != {first}, "of other functions"
    (late,) = run_jobs([{"kind": "call", "function": "rest", "args": [60], "timeout_s": 0.1}], one, setup=OWN)
    assert late.error == "timeout"
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    (second,) = pids(1, one)
    sandbox.close_idle()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_workers_that_wait_are_bounded(monkeypatch):
    sandbox.close_idle()
    monkeypatch.setattr(sandbox, "KEPT", 2)
    for seconds in (30.0, 31.0, 32.0):
        pids(1, Limits(timeout_s=seconds, workers=1))
    assert [limits.timeout_s for (limits, _), waiting in sandbox._idle.items() if waiting] == [31.0, 32.0]
    sandbox.close_idle()


def test_a_forked_process_has_workers_of_its_own():
    (mine,) = pids(1, Limits(timeout_s=30.0, workers=1))
    child = os.fork()
    if not child:
        try:
            os._exit(0 if pids(1, Limits(timeout_s=30.0, workers=1)) != {mine} else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0 and pids(1, Limits(timeout_s=30.0, workers=1)) == {mine}


@pytest.mark.parametrize("end", ["", "import os; os.kill(os.getpid(), 9)"])
def test_workers_that_wait_end_with_their_process(end, tmp_path):
    source = (
        "from stages.running.sandbox import run_jobs, Limits\n"
        f"(one,) = run_jobs([{{'kind': 'call', 'function': 'pid', 'args': []}}], Limits(30.0), setup={OWN!r})\n"
        f"print(one.value, flush=True)\n{end}"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    for _ in range(600):
        try:
            if psutil.Process(int(done.stdout)).status() == psutil.STATUS_ZOMBIE:
                break
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the worker has outlived who asked it")
    assert end or not list(tmp_path.iterdir())
