r"""Answers as models write them against gold answers: a right one must not be refused, a wrong one must not pass
(reward.math, eval.mc_generation).
"""

from __future__ import annotations

import time

import pytest

from stages.verification.answer_format import ending_of, rewritten
from stages.verification.equality import math_equal
from stages.verification.extraction import extract_boxed, extract_mc_anywhere, last_box
from stages.verification.verifiers import verify_choice, verify_math, verify_text

RIGHT = [  # (gold, answer)
    ("-5", "#### −5"),
    ("-5", r"\boxed{–5}"),
    ("-5", "#### −5 dollars"),
    ("18", r"\boxed 18"),
    ("18", r"so \boxed {18}."),
    ("18", r"\boxed 18."),
    ("1.5", "#### 1 1/2"),
    ("5/2", r"\boxed{2\frac{1}{2}}"),
    ("-2.5", r"\boxed{-2\frac12}"),
    ("100/3", r"\boxed{33\frac{1}{3}\%}"),
    ("10", r"\boxed{10\degree}"),
    ("10", r"\boxed{\mathbf{10}}"),
    ("10", r"\boxed{\displaystyle 10}"),
    ("10", r"\boxed{10 \quad}"),
    ("3/4", r"\boxed{\cfrac{3}{4}}"),
    ("1000000", r"\boxed{1 000 000}"),
    ("27", r"\boxed{27\text{ cm}^3}"),
    ("18", r"\boxed{18 \text{ square inches}}"),
    (r"\text{(C)}", r"\boxed{C}"),
    (r"\text{(C)}", r"\boxed{\text{C}}"),
    ("C", r"\boxed{(C)}"),
    (r"\text{even}", r"\boxed{\text{Even}}"),
    (r"\text{Evelyn}", r"\boxed{evelyn}"),
    ("4210_{5}", r"\boxed{4210_5}"),
    ("x^{2}", r"\boxed{x^2}"),
    (
        r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
        r"\boxed{\begin{pmatrix} -\frac13 \\ \frac23 \\[1ex] \frac53 \end{pmatrix}}".replace("[1ex]", ""),
    ),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\begin{bmatrix}1&2\\3&4\\\end{bmatrix}}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\left(\begin{array}{cc}1&2\\3&4\end{array}\right)}"),
    ("18", "<answer>18 apples</answer>"),
    ("18", "<answer>**$18 per day**</answer>"),
    ("18", r"\boxed{18 km}"),
    ("18", r"\boxed{\text{18 apples}}"),
    ("1.5 million", r"\boxed{1{,}500{,}000}"),
    ("18000", r"\boxed{18\text{ thousand}}"),
    ("18000", "#### 18 thousand dollars"),
    ("18", "#### 18 boys and girls"),
    ("18", "<answer>18 boys and girls</answer>"),
    (r"18\text{ thousand}", r"\boxed{18\text{ thousand}}"),
    (r"11\text{ cm}", r"\boxed{11}"),
    (r"11\text{ cm}", r"\boxed{11\text{ centimeters}}"),
    (r"11\text{ cm}", "<answer>11 cm</answer>"),
    (r"11\text{ cm}^2", r"\boxed{11\text{ cm}}"),
    (r"11\text{ cm}", r"\boxed{11\text{ apples}}"),
    (r"60\text{ mph}", r"\boxed{60\text{ miles per hour}}"),
    (r"3\text{ pm}", r"\boxed{3\text{ p.m.}}"),
    (r"\$18", "#### 18 dollars"),
    (r"90^\circ", r"\boxed{90\text{ degrees}}"),
    (r"5\text{ feet}", r"\boxed{5\text{ in total}}"),
    ("10000", r"\boxed{10\,000}"),
    ("12345", r"\boxed{12,\! 345}"),
    ("18", r"\boxed{18\,\text{cm}}"),
    ("18", r"\boxed{18\,\mathrm{cm^2}}"),
    ("18", r"\boxed{18 \mathrm{~m/s^2}}"),
    ("18", r"\boxed{18\,\mathrm{m\,s^{-1}}}"),
    (r"18\pi", r"\boxed{18\pi\,\mathrm{cm^{2}}}"),
    ("18", r"\boxed{18\,\frac{\text{km}}{\text{h}}}"),
    ("18", r"\boxed{18\,\dfrac{\mathrm{m}}{\mathrm{s}^2}}"),
    ("18", "<answer>18 cm^2</answer>"),
    ("18", "<answer>18 cm²</answer>"),
    ("18", "<answer>18 m/s</answer>"),
    ("18", "<answer>18 km/h.</answer>"),
    ("18", r"\boxed{18\,kg}"),
    ("18", r"\boxed{18\ units}"),
    ("18", r"\boxed{x = 18 cm}"),
    ("18", r"\boxed{18^\circ C}"),
    ("18", r"\boxed{18^{\circ}\mathrm{C}}"),
    ("18", "<answer>18 °C</answer>"),
    ("18^\\circ C", "<answer>18</answer>"),
    ("18", "<answer>€18</answer>"),
    ("18", "<answer>18 €</answer>"),
    ("18", "<answer>£18.00</answer>"),
    ("18", "<answer>USD 18</answer>"),
    ("18000", r"\boxed{1.8 \times 10^4}"),
    ("18000", r"\boxed{1.8 \cdot 10^{4}\text{ km}}"),
    ("18000", "<answer>1.8 × 10^4</answer>"),
    ("0.00001", r"\boxed{10^{-5}}"),
    ("1e-05", r"\boxed{0.00001}"),
    ("1/3", r"\boxed{0.\overline{3}}"),
    ("1/6", r"\boxed{0.1\bar 6}"),
    ("7.5", "<answer>7½</answer>"),
    ("0.75", r"\boxed{¾}"),
    (r"x\geq 2", r"\boxed{x \ge 2}"),
    (r"x\ne 2", "<answer>x ≠ 2</answer>"),
    (r"1\le x\leqslant 2", r"\boxed{1 \leq x \leq 2}"),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{(-\infty, 1) \cup (2, +\infty)}"),
    (r"2\pi", "<answer>2π</answer>"),
    (r"\mathbb{R}", r"\boxed{\mathbb R}"),
]
WRONG = [
    ("5", "#### −5"),
    ("-5", "#### 5"),
    ("18", r"\boxed{18\text{ or 19}}"),
    ("18", r"\boxed{18\text{ and more, 19}}"),
    ("18", "#### 18 or 19"),
    ("34", r"\boxed{3 4}"),
    ("34", r"\boxed{3\quad 4}"),
    ("11/2", r"\boxed{1 1/2}"),
    ("-1/2", r"\boxed{-1 1/2}"),
    ("8", r"\boxed{2\frac{8}{2}}"),
    (r"\text{even}", r"\boxed{\text{Eve}}"),
    ("AB", r"\boxed{ab}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\34\end{pmatrix}}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1 & 2\end{pmatrix}}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\begin{vmatrix}1&2\\3&4\end{vmatrix}}"),
    ("x^{12}", r"\boxed{x^12}"),
    ("18", r"Use \boxed notation: 18"),
    ("18", r"\boxed{18"),
    ("18", r"\boxed{17=18}"),
    ("5", r"\boxed{2x=5}"),
    ("5", r"\boxed{-x=5}"),
    ("25", r"\boxed{x²=25}"),
    ("18", r"\boxed{18\text{ thousand}}"),
    ("18", "#### 18 million"),
    ("18", "#### 18 or nineteen"),
    ("18", "#### 18 and nineteen"),
    ("18", "#### 18 and a half"),
    ("18", "#### 18 is not the answer"),
    ("18", "<answer>18 or nineteen</answer>"),
    ("18", "<answer>18 apples and a half</answer>"),
    ("18", r"\boxed{18 x}"),
    ("18", r"\boxed{18 pi}"),
    ("18", r"\boxed{18 sqrt}"),
    ("18", r"\boxed{18 hours 30}"),
    ("18", "<answer>18 hundred</answer>"),
    ("2", r"\boxed{2\mathrm{e}}"),
    ("3", r"\boxed{3\mathrm{i}}"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\boxed{|\begin{array}{cc}1&2\end{array}|}"),
    (r"11\text{ cm}", r"\boxed{11\text{ km}}"),
    (r"11\text{ cm}", r"\boxed{11 km}"),
    (r"11\text{ cm}", "<answer>11 inches</answer>"),
    (r"11\text{ cm}^2", r"\boxed{11\text{ square meters}}"),
    (r"3\text{ pm}", r"\boxed{3\text{ a.m.}}"),
    (r"10:30\text{ am}", r"\boxed{10:30\text{ pm}}"),
    (r"\$18", "#### 18 cents"),
    (r"18\text{ dollars}", r"\boxed{18\text{ cents}}"),
    (r"60\text{ mph}", r"\boxed{60\text{ km/h}}"),
    (r"90^\circ", r"\boxed{90\text{ radians}}"),
    (r"2\sqrt{3}\text{ cm}", r"\boxed{2\sqrt{3}\text{ m}}"),
    ("18", r"\boxed{1\;8}"),
    ("18", r"\boxed{1\,8}"),
    ("1000", r"\boxed{10\ 00}"),
    ("12", r"\boxed{12 thirteen}"),
    ("12", r"\boxed{12\text{ point five}}"),
    ("12", r"\boxed{12 thousands}"),
    ("12", r"\boxed{12\text{ base eight}}"),
    ("12", r"\boxed{12\text{ unless thirteen}}"),
    ("12", r"\boxed{12\text{ lakh}}"),
    ("12", "<answer>12 versus fourteen</answer>"),
    ("18", "<answer>18 m</answer>"),
    ("18", "<answer>18m^2</answer>"),
    ("18", "<answer>18 m s</answer>"),
    ("18", "<answer>18 cm 5 mm</answer>"),
    ("18", "<answer>18 ft 6 in</answer>"),
    ("18", r"\boxed{18\frac{m}{s}}"),
    ("18", r"\boxed{18\mathrm{cm^{12}}}"),
    ("18", r"\boxed{18\text{ cm^2 or 19}}"),
    ("18", r"\boxed{18\,\frac{\text{or}}{\text{19}}}"),
    ("18 km/h", "<answer>18 m/s</answer>"),
    (r"18^\circ\text{F}", "<answer>18 °C</answer>"),
    ("18", r"\boxed{18 \times 10^2}"),
    ("1.8", r"\boxed{1.8 \times 10^{4}}"),
    ("0.3", r"\boxed{0.\overline{3}}"),
    ("123/999", r"\boxed{0.\dot{123}}"),
    ("35.5", "<answer>7½</answer>"),
    (r"x\ge 2", r"\boxed{x \le 2}"),
    (r"(1,\infty)", r"\boxed{(1, -\infty)}"),
    (r"x+\infty", r"\boxed{x\infty}"),
]


@pytest.mark.parametrize("gold, answer", RIGHT)
def test_right_answers(gold, answer):
    assert verify_math({"answer": gold, "answer_type": "latex"}, answer)[0]


@pytest.mark.parametrize("gold, answer", WRONG)
def test_wrong_answers(gold, answer):
    assert not verify_math({"answer": gold, "answer_type": "latex"}, answer)[0]


def test_the_flexible_reading_knows_signs_and_how_minerva_ends():
    read = lambda gold, text: verify_math({"answer": gold, "answer_type": "number"}, text, True)[0]
    assert (
        read("-5", "So it is −5.")
        and not read("5", "So it is −5.")
        and read("5", "It lies in 3–5.")
        and read("-7", "this leaves –7")
    )
    assert read("18", "Final Answer: The final answer is $18$. I hope it is correct. Problem 7") and not read(
        "7", "Final Answer: The final answer is $18$. I hope it is correct. Problem 7"
    )


def test_a_box_with_a_space_is_found_and_rewritten():
    r"""``\boxed {12}`` ends a text as ``\boxed{12}`` does: the place where it starts and ends is the box's."""
    text = r"Half of 24 is \boxed {12}."
    start, inside, end = last_box(text)
    assert (
        (text[start:end], inside) == (r"\boxed {12}", "12")
        and extract_boxed(r"\boxed{1} and \fbox{2}") == "2"
        and last_box(r"\boxed{1") is None
        and last_box("none") is None
    )
    assert ending_of(text).style == "boxed" and rewritten(text, "hash") == "Half of 24 is 12.\n#### 12"


LETTERS = [  # (what is said, the letter that is read, the letter by the sentence that the prompt asks for)
    ("Therefore, the answer is (B).", "B", "B"),
    ("Therefore, the answer is (A). Therefore, the answer is (B).", "B", "B"),
    ("therefore, the answer is B", "B", None),
    ("**Answer: B**", "B", None),
    ("Answer: B", "B", None),
    ("ANSWER:B", "B", None),
    (r"\boxed{B}", "B", None),
    (r"\boxed{\text{(B)}}", "B", None),
    (r"The answer is $\boxed{B}$.", "B", None),
    ("The correct answer is B.", "B", None),
    ("The best answer is B) honey", "B", None),
    ("The answer is (B). (A) is wrong.", "B", None),
    ("B", "B", None),
    ("B.", "B", None),
    ("**B**", "B", None),
    ("B. honey", "B", None),
    ("(B) honey", "B", None),
    ("<answer>B</answer>", "B", None),
    ("<answer>B. honey</answer>", "B", None),
    ("The answer is **B**", "B", None),
    ("the answer is option B", "B", None),
    ("Final answer: (B)", "B", None),
    ("The answer is B, because A is wrong.", "B", None),
    ("The answer is A because bees make it", "A", None),
    ("The answer is (A) or (B)", None, None),
    ("Answer: A or C", None, None),
    ("Answer: A, B", None, None),
    ("The answer is I don't know", None, None),
    ("The answer is a bee", None, None),
    ("The answer is A bee", None, None),
    (r"\boxed{A, B}", None, None),
    (r"\boxed{A B}", None, None),
    (r"\boxed{B, honey}", "B", None),
    ("<answer>B; A</answer>", None, None),
    ("Answer: (A) (B)", None, None),
    ("Answer: B; A", None, None),
    ("Answer: B (or A)", None, None),
    ("(A)(B)", None, None),
    ("The answer is A. No: the answer is B.", "B", None),
    ("(A) or (B)", None, None),
    ("not (B)", None, None),
    ("The answer isn't (B)", None, None),
    ("Answer: B, but maybe A", None, None),
    ("The answer is B) A bee makes it", "B", None),
    ("Answer: B A is wrong", "B", None),
    ("(A) is wrong, so (B)", "B", None),
    ("Therefore, the answer is (A) or (B)", None, "A"),
    ("Therefore, the answer is (B)/(C).", None, "B"),
    ("Therefore, the answer is (B), and also (C)", None, "B"),
    ("Therefore, the answer is (B). (A) is wrong.", "B", "B"),
    ("Therefore, the answer is (B) - I am sure", "B", "B"),
    ("The answer is A, or B", None, None),
    ("The answer is A - B", None, None),
    ("The answer is A+B", None, None),
    ("The answer is A as well as B", None, None),
    ("Answer: A (or, alternatively, B)", None, None),
    ("The answer is B - a bee", "B", None),
    ("I think A is wrong", None, None),
    ("The answer is Banana", None, None),
    ("", None, None),
]


@pytest.mark.parametrize("said, letter, strict", LETTERS)
def test_letters(said, letter, strict):
    assert extract_mc_anywhere(said) == letter
    assert verify_choice({"answer": "B"}, said)[1] == strict and verify_choice({"answer": "B"}, said, True) == (
        letter == "B",
        letter,
    )


def test_no_reading_takes_long():
    started = time.process_time()
    for text in (
        "answer is" + " " * 100_000,
        "answer:" + "(" * 100_000,
        "answer is the " * 20_000,
        r"\boxed " * 20_000,
        r"\boxed{" * 20_000,
        "–" * 100_000,
        "1 " * 50_000,
        r"\begin{pmatrix}" * 5_000,
        "answer is " + "*(" * 50_000 + "B",
        "answer is B " * 20_000,
        "(B)" * 30_000,
        "cm^9999999999",
        "km" + "/" * 50_000,
        "cm^2 " * 10_000,
        "square " * 10_000,
    ):
        (
            extract_mc_anywhere(text),
            extract_boxed(text),
            math_equal(text[:20_000], "1"),
            math_equal("1 " + text[:20_000], r"11\text{ cm}"),
            verify_text({"answer": "B"}, text),
        )
    assert time.process_time() - started < 20


def test_a_number_with_a_power_of_ten_is_one_also_for_the_tolerance():
    row = {"answer": r"3.00 \times 10^8", "answer_type": "number"}
    read = lambda text, tolerance: verify_math(row, text, False, tolerance)[0]
    assert read(r"\boxed{2.998 \times 10^8 \text{ m/s}}", 0.01) and read(r"\boxed{3 \times 10^{8}}", 0.0)
    assert not read(r"\boxed{2.998 \times 10^8}", 0.0) and not read(r"\boxed{2.998 \times 10^7}", 0.01)
