r"""Symbolic equality of answers (reward.math, option symbolic): what is equal, what is not, and what must not hang."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.running.sandbox import Limits
from stages.verification.symbolic import Unread, equal, read
from stages.verification.equality import equal_symbolically, math_equal

SAME = [
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt8", r"2\sqrt2"),
    ("x+1", "1+x"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"\frac{\pi}{2}", "pi/2"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\frac\pi2", r"0.5\pi"),
    (r"2\frac{1}{3}", r"\frac{7}{3}"),
    ("1 1/2", "1.5"),
    (r"(x+1)(x-1)", "x^2-1"),
    ("2(x+y)", "2x+2y"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\sin 30^\circ", r"\frac12"),
    (r"\cos(60^{\circ})", "0.5"),
    ("45^\\circ", "45"),
    (r"\log_2 8", "3"),
    (r"\ln e^2", "2"),
    (r"\log_{10}1000", "3"),
    (r"3!", "6"),
    (r"\binom{5}{2}", "10"),
    (r"|{-3}|", "3"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\sqrt[3]{54}", r"3\sqrt[3]{2}"),
    ("2^{-1}", "0.5"),
    ("x^{2}x^{3}", "x^5"),
    (r"e^{i\pi}", "-1"),
    ("(2i)^2", "-4"),
    (r"\left(\frac{\sqrt{8}}{2}, 0\right)", r"(\sqrt{2},0)"),
    (r"[0,\frac{\pi}{2})", r"[0, \pi/2)"),
    (r"\{1,\sqrt{4}\}", r"\{2,1\}"),
    (r"(1,2)\cup[2,3)", "(1,3)"),
    (r"(-\infty,0)\cup(0,\infty)", r"(0, \infty) \cup (-\infty, 0)"),
    (r"1\pm\sqrt{2}", r"\{1-\sqrt2, 1+\sqrt2\}"),
    (r"\pm 2", "-2, 2"),
    (r"\begin{pmatrix}1&2\\ 3&\sqrt{16}\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\begin{array}{cc}1&2\end{array}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("y=1+2x", "y = 2x+1"),
    ("2x+2y=4", "x+y=2"),
    ("y=2x+1", "2x - y + 1 = 0"),
    ("x=5", "5"),
    (r"x \le 2", r"2 \geq x"),
    ("x<3", "2x<6"),
    ("5 cm", "5"),
    ("5 cm", r"5\text{ cm}"),
    ("12 square units", "12"),
    (r"\$\sqrt{4}", "2"),
    ("1,000", "1000"),
    ("3x^2y", r"3 y \cdot x^2"),
    (r"x_1+x_2", "x_{2}+x_{1}"),
    ("√12", r"2\sqrt{3}"),
    ("sqrt(12)", r"2\sqrt{3}"),
    ("2**3", "8"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"2^{2024}", r"4^{1012}"),
    ("x \\in [1,2]", "[1, \\sqrt{4}]"),
    (r"\lfloor 3.7 \rfloor", "3"),
    (r"f(x)=x+1", "f(x)=1+x"),
    (r"\frac{1}{2}\theta", r"\frac{\theta}{2}"),
    (r"\tan^{-1}(1)", r"\frac{\pi}{4}"),
    (r"(1, (2, \sqrt{9}))", "(1,(2,3))"),
    (r"\dfrac{3}{4}\%", "0.75"),
    (r"(x,y)=(1,\sqrt4)", "(1,2)"),
    (r"x\in[0,1)", "[0,1)"),
    (r"5=x", "5"),
    ("pi", r"\pi"),
    (r"2+3\mathrm{i}", "2+3i"),
    (r"\left(\begin{array}{cc}1&\sqrt4\end{array}\right)", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"\binom{n+1}{2}", r"\frac{n(n+1)}{2}"),
    (r"9+9=18", "18"),
    (r"2^4=4^2=16", "16"),
    (r"1\le x<\sqrt4", r"[1,2)"),
    ("3 > x > 1", "1<x<3"),
    ("-1 < x <= 3", "(-1,3]"),
    (r"2(x-1) \ge 2", r"[2,\infty)"),
    (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)"),
    ("x>1 and x<3", "1<x<3"),
    (r"x=1 \text{ or } x=2", "1,2"),
    (r"1 \quad\text{and}\quad 2", "1, 2"),
    (r"x = 2 \text{ or } x = -2", r"\pm 2"),
    (r"(1,2) \text{ and } (3,\sqrt{16})", "(1,2),(3,4)"),
    (r"{5 \choose 2}", "10"),
    (r"\dbinom{5}{2}", "10"),
    (r"\operatorname{arctan}(1)", r"\pi/4"),
    (r"\left\langle 1, \sqrt4\right\rangle", "(1,2)"),
    (r"25\pi\,\mathrm{cm^2}", r"\frac{50\pi}{2}"),
]
DIFFERENT = [
    (r"\sqrt{8}", r"2\sqrt{3}"),
    ("x+1", "x-1"),
    ("x+1", "y+1"),
    (r"\sqrt{x^2}", "x"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(1,2]"),
    (r"\{1,2\}", r"\{1,3\}"),
    (r"\{1,2\}", r"\{1,2,2\}"),
    ("1,2", "2,1"),
    (r"\{1,2\}", "(1,2)"),
    (r"(1,2)\cup(2,3)", "(1,3)"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("y=2x", "y=3x"),
    ("x<3", "x>3"),
    ("x<3", r"x\le 3"),
    ("-2x<6", "x<-3"),
    ("5 cm", "5 km"),
    ("no", "on"),
    ("cat", "act"),
    ("even", r"\text{even}"),
    ("1011_2", "11"),
    ("3%", "0.03"),
    ("5m", "5"),
    ("1/0", "2/0"),
    (r"\infty", r"-\infty"),
    (r"\pm 2", "2"),
    ("0=0", "1=1"),
    (r"1+10^{-200}", "1"),
    (r"\sqrt{1+10^{-200}}", "1"),
    (r"\sqrt{10^{40}+1}", "10^{20}"),
    ("", "1"),
    ("2 3", "6"),
    (r"\frac{1}{2", "0.5"),
    (")(", "1"),
    ("x = 1 or x = 2", "1"),
    ("[1,2", "[1,2]"),
    ("__import__('os')", "1"),
    (r"18\text{ or 19}", "18"),
    (r"18\text{ or nineteen}", "18"),
    (r"18\text{, 19}", "18"),
    (r"18\text{ (not 19)}", "18"),
    (r"18\text{ thousand}", "18"),
    (r"2+3\mathrm{i}", "5"),
    (r"2\mathrm{e}", "2"),
    ("17=18", "18"),
    ("17=18", "17"),
    ("(x,y)=(1,2)", "(2,1)"),
    ("9+9=19", "19"),
    (r"\binom{5}{2}", "{5}{2}"),
    ("10", "2{5}"),
    (r"\log 6", r"\log 2 3"),
    (r"\log 6", r"\log 2{3}"),
    (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{pmatrix}1\\ \pm 2\end{pmatrix}"),
    ("12", r"12\text{ thirteen}"),
    ("(1,2)=(3,4)", "(3,4)"),
    (r"|\begin{array}{cc}1&2\end{array}|", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("1<x<2", "[1,2]"),
    ("1<x<2", "1<y<2"),
    ("1<x>2", "(1,2)"),
    ("1<x<2<3", "(1,2)"),
    (r"x<1 \text{ or } x>2", "(1,2)"),
    (r"x<1 \text{ and } x>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"1 \text{ or } 2", "1"),
    (r"1 \text{ or } 2", "2,1"),
    (r"1\text{ and }", "1"),
    (r"\text{or } 1", "1"),
    ("x>2", "(2,3)"),
    ("x>2", r"[2,\infty)"),
    ("x^2<4", "(-4,4)"),
]
MONSTERS = [
    "9^{9^9}",
    "9^{9^{9^9}}",
    "(2^{1/2})^{10^{12}}",
    "10^{10^{10}}!",
    "((x+1)^{40})^{40}",
    "((((9^9)^9)^9)^9)^9",
    "999999999!",
    r"\binom{10^9}{10^8}",
    "(" * 300 + "1" + ")" * 300,
    "[" * 390,
    "-" * 390 + "1",
    "|" * 390,
    r"\frac" * 78,
    r"\sqrt" * 78 + "2",
    "1" * 400,
    r"\{" * 150 + r"\}" * 150,
    r"e^{e^{e^{99}}}",
    r"(0.5)^{-10^9}",
    "x^{10^{30}}",
    r"\pm" * 100 + "1",
]


@pytest.mark.parametrize("a, b", SAME)
def test_the_same_value_written_otherwise(a, b):
    assert equal(a, b) and equal(b, a)


@pytest.mark.parametrize("a, b", DIFFERENT)
def test_another_value(a, b):
    assert not equal(a, b) and not equal(b, a)


def test_a_unit_that_contradicts_is_another_value():
    """Both units stated, of one dimension, and not the same: never equal, however the numbers are written. Any unit, or
    none, is fine where the other states none.
    """
    pairs = [
        (r"\sqrt{4}\text{ km}", r"2\text{ cm}"),
        (r"\sqrt{4}\text{ cm}", r"2\text{ cm}"),
        (r"\sqrt{4}", r"2\text{ cm}"),
        (r"\sqrt{4}\text{ km}", "2"),
    ]
    assert equal_symbolically(pairs) == [False, True, True, True]


def test_what_would_grow_is_refused_before_it_does():
    """Refused by sizes, not by the clock: these run in this process."""
    for text in MONSTERS:
        assert not equal(text, "7"), text
    for text in MONSTERS[:7]:
        with pytest.raises(Unread):
            read(text)
    assert equal("2^{1000}", "4^{500}") and equal("x^{2023}", "x^{2022}x")


def test_what_takes_too_long_ends_and_costs_nothing_else():
    """A product that is refused by nothing, but too large to expand, ends at the time limit: undecided, and its
    neighbours are decided.
    """
    slow = "*".join(f"(x+y+z+{i})^{{40}}" for i in range(1, 9))
    other = slow.replace("(x+y+z+1)^{40}", "((x+y+1)^2+2z(x+y+1)+z^2)^{20}")
    pairs = [(slow, other), (r"\sqrt{8}", r"2\sqrt{2}"), ("x", "y"), (r"\sqrt{8}", r"2\sqrt{2}")]
    assert equal_symbolically(pairs, Limits(timeout_s=3.0, workers=2)) == [None, True, False, True]


def test_random_expressions_agree_with_numbers():
    """Against numpy: expressions made of the same tree are equal, and those that numpy tells apart are not."""
    rng = random.Random(5)

    def tree(depth):
        if depth == 0:
            return rng.choice(
                [("2", 2.0), ("x", None), (r"\sqrt{3}", 3**0.5), (r"\frac{1}{3}", 1 / 3), (r"\pi", np.pi)]
            )[0]
        a, b = tree(depth - 1), tree(depth - 1)
        return rng.choice([f"({a}+{b})", f"({a}-{b})", f"{a} \\cdot {b}", f"\\frac{{{a}}}{{2+{b}^2}}"])

    def value(text, x):
        text = (
            text.replace(r"\cdot", "*")
            .replace(r"\sqrt{3}", "(3**0.5)")
            .replace(r"\frac{1}{3}", "(1/3)")
            .replace(r"\pi", "np.pi")
            .replace("^", "**")
        )
        while (at := text.rfind(r"\frac{")) >= 0:
            depth, i = 0, at + 5
            cuts = []
            while len(cuts) < 2:
                depth += (text[i] == "{") - (text[i] == "}")
                if depth == 0:
                    cuts.append(i)
                i += 1
            text = text[:at] + f"(({text[at + 6 : cuts[0]]})/({text[cuts[0] + 2 : cuts[1]]}))" + text[cuts[1] + 1 :]
        return eval(text, {"np": np, "x": x})  # of the test's own expressions

    seen = 0
    for _ in range(12):
        a, b = tree(2), tree(2)
        same = all(abs(value(a, x) - value(b, x)) < 1e-9 for x in (0.3, -1.7, 2.9))
        assert equal(a, b) == same, (a, b)
        assert equal(a, f"{b} + ({a}) - ({b})"), (a, b)
        seen += same
    assert seen < 12


def prompt(answer, kind="latex"):
    return {"row_id": answer, "prompt": [{"role": "user", "content": "?"}], "answer": answer, "answer_type": kind}


def rows(*pairs, kind="latex"):
    return [
        {"prompt_row": prompt(gold, kind), "completion_text": text, "completion_ids": [1], "finish_reason": "eos"}
        for text, gold in pairs
    ]


def test_the_setting_of_the_verifier():
    """Off, numbers stay; on, an answer that is proved equal is right, what cannot be decided is wrong and counted,
    other verifiers are as they were.
    """
    asked = rows(
        (r"so \boxed{\sqrt{8}}", r"2\sqrt{2}"),
        (r"\boxed{\sqrt{7}}", r"2\sqrt{2}"),
        ("none", r"2\sqrt{2}"),
        (r"\boxed{9^{9^9}}", "x"),
        (r"\boxed{2\sqrt{4}}", "4"),
        (r"\boxed{x}", ""),
    )
    off = build_rewards([RewardComponent(kind="verifier", verifier="math", incorrect_value=-1.0)], {}).score(asked)
    on = build_rewards(
        [RewardComponent(kind="verifier", verifier="math", symbolic=True, incorrect_value=-1.0)], {}
    ).score(asked)
    assert [one.total for one in off] == [-1.0, -1.0, -1.0, -1.0, -1.0, None] and off[0].parts == {"verifier": -1.0}
    assert (
        [one.total for one in on] == [1.0, -1.0, -1.0, -1.0, 1.0, None]
        and on[0].correct is True
        and on[0].extracted == r"\sqrt{8}"
    )
    assert [one.parts["verifier/undecided"] for one in on] == [0.0] * 5 + [None]
    text = build_rewards([RewardComponent(kind="verifier", symbolic=True)], {}).score(
        rows((r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), kind="text")
    )
    assert text[0].total == 0.0, "a text is compared as text"
    for wrong, why in (
        ({"kind": "format"}, "symbolic is for kind verifier or length_group"),
        ({"kind": "verifier", "verifier": "mc"}, "write verifier=math"),
    ):
        with pytest.raises(ValueError, match=why):
            RewardComponent(**{"symbolic": True, **wrong})


def test_a_hang_is_undecided_and_wrong(monkeypatch):
    """A comparison that does not end costs its own time limit; the answer stays wrong, and the share of such answers is
    measured.
    """
    import inspect

    from stages.verification import symbolic

    source = inspect.getsource(symbolic)
    monkeypatch.setattr(
        inspect,
        "getsource",
        lambda of: (
            source.replace("    try:\n        (x, unit)", '    while "hang" in a: pass\n    try:\n        (x, unit)')
            if of is symbolic
            else source
        ),
    )
    asked = rows((r"\boxed{hang}", r"2\sqrt{2}"), (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"))
    found = build_rewards([RewardComponent(kind="verifier", verifier="math", symbolic=True, timeout_s=3.0)], {}).score(
        asked
    )
    assert [(one.total, one.parts["verifier/undecided"]) for one in found] == [(0.0, 1.0), (1.0, 0.0)]


def test_evaluation_reads_with_it_too():
    """Strict and flexible reading, and the graders of the protocol."""
    from stages.evaluation.grading import parse_all

    answers = [
        (prompt(r"2\sqrt{2}"), r"\boxed{\sqrt{8}}"),
        (prompt(r"2\sqrt{2}"), r"the answer is $\sqrt{8}$."),
        (prompt(r"2\sqrt{2}"), r"\boxed{3}"),
        None,
        (prompt("x+1"), r"\boxed{x+1}"),
    ]
    off, on = (parse_all(answers, RewardComponent(kind="verifier", symbolic=symbolic)) for symbolic in (False, True))
    assert [read[:2] for read in off] == [(False, False), (False, False), (False, False), (None, None), (True, True)]
    assert [read[:2] for read in on] == [(True, True), (False, True), (False, False), (None, None), (True, True)]
    assert RewardComponent(kind="verifier", symbolic=True).identity() != RewardComponent(kind="verifier").identity()


def test_the_strict_test_is_as_it_was():
    assert not any(math_equal(a, b) for a, b in SAME if (a, b) not in STRICT) and all(
        math_equal(a, b) for a, b in STRICT
    )


STRICT = [
    pair
    for pair in SAME
    if pair
    in {
        (r"2+3\mathrm{i}", "2+3i"),
        ("45^\\circ", "45"),
        ("1,000", "1000"),
        ("x=5", "5"),
        (r"\dfrac{3}{4}\%", "0.75"),
        (r"2\frac{1}{3}", r"\frac{7}{3}"),
        ("1 1/2", "1.5"),
        (r"\begin{array}{cc}1&2\end{array}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        (r"x\in[0,1)", "[0,1)"),
        ("5 cm", "5"),
        ("5 cm", r"5\text{ cm}"),
        (r"x=1 \text{ or } x=2", "1,2"),
        (r"1 \quad\text{and}\quad 2", "1, 2"),
    }
]
