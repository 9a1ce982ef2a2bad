r"""Mathematical answers against gold answers, many at a time (reward.math): of each gold answer what says the same, what
does not, and what says the same by proof alone (option symbolic). Every line is ``gold :: answer | answer``.
"""

from __future__ import annotations

import time

import pytest

from stages.verification import symbolic
from stages.verification.equality import equal_symbolically, math_equal
from stages.verification.golds import math_gold
from stages.verification.normalisation import unmarked, without_estimate, without_name
from stages.verification.units import contradicts
from stages.verification.verifiers import verify_math

RIGHT = r"""
1200 :: 1,200 | 1{,}200 | 1{,}\,200 | 1,\!200 | 1 200 | 1\,200 | 1'200 | 1’200
1200000 :: 1'200'000
100, 200 :: 100,200
1,2 :: 1, 2
0.5, 3 :: 1/2, 3
216 :: 18 dozen
18 :: 18 pairs | 18 quarters | 18 percent | 18 per cent | 18 degrees | 18 people | 18 ways | 18 less | \approx 18
18 :: ≈ 18 | x \approx 18 | ~18 | \sim 18 | 18.2 \approx 18 | 18\text{ N} | 18\,\mathrm{N} | 18\,\Omega | 18 Ω
18 :: 18\text{ }\Omega | 18 Hz | 18 kW | 18 kJ | 18 mol | 18 Pa | 18 \text{ J/kg} | 18\ \text{N}\cdot\text{m}
18 :: 18 ohms | 18^\circ | 18^{\circ}C | 18° | 18\% | \$18 | $18 | \$18.00 | USD 18 | Rs. 18 | 18 dollars
18 :: 18\text{ sq. units} | 18\text{ units}^2 | 18\ cm^{2} | \textcolor{red}{18} | \color{red}18 | {\color{red}18}
18 :: \color{red}{18} | \textbf{18} | \boldsymbol{18} | \bm{18} | \underline{18} | \mathbf{18} | {18} | {{18}}
18 :: \large 18 | \Large{18} | \mathit{18} | \boxed{18} | **18** | 18. | \mbox{18} | \displaystyle{18}
18 :: \text{Total} = 18 | Total = 18 | \text{Area}=18\text{ cm}^2 | S_{10} = 18 | a_5=18 | f(2)=18 | x = 18 | AB = 18
18 :: 18 USD | 18€ | US$18 | \textdollar 18 | 18 bucks | Total cost = $18 | \text{Total cost} = \$18
18 :: \text{Total distance}=18\text{ km} | f(2) = 18 | \mathbf{\textcolor{blue}{18}} | 18 k\Omega | 18 kΩ
55/3 :: \frac{55}{3} \approx 18.33
18.33 :: \frac{55}{3} \approx 18.33
\sqrt{2} :: \sqrt{2}\approx 1.414 | \sqrt2 | √2
18.5 :: $18.50
-18 :: -$18 | $-18
18\text{ dollars} :: \$18
30 :: \theta = 30^\circ
3 :: \lambda=3
1/2 :: P(A)=\frac12 | \frac12 | 0.5 | .5 | 2/4 | \dfrac{1}{2} | \frac{1}2 | \frac1{2} | \frac{-1}{-2} | 1 / 2 | ½
1/2 :: {1 \over 2} | \frac{1}{2}. | \sfrac{1}{2} | \nicefrac{1}{2}
x=18 :: 18
60 :: \angle ABC = 60^\circ
No solution :: no solution | \text{no solution}
no solution :: No Solution
\text{No solution} :: no solution
Yes :: yes
yes :: \text{Yes}
True :: true
Tuesday :: tuesday
\text{Tuesday} :: Tuesday.
infinitely many :: Infinitely many
\infty :: ∞ | +\infty
B :: \text{B} | (B) | \mathbf{(B)}
-1/2 :: -\frac{1}{2} | \frac{-1}{2} | \frac{1}{-2}
1/3 :: 0.\overline{3}
3/4 :: \frac{3}{4}\text{ cups} | \tfrac 34
2 :: 2/1 | \frac{4}{2}
5/2 :: 2\frac12 | 2 1/2 | 2\,\frac{1}{2} | 2 \tfrac{1}{2} | 2½ | 2+1/2
-5/2 :: -2 1/2 | -2\tfrac{1}{2}
50\% :: 50
50 :: 50%
12.5 :: 12.5\% | 12\frac12\%
1234.50 :: \$1,234.50
1234.5 :: \$1,234.50
1500000 :: $1.5 million
[0,1] :: [0, 1] | \left[0,1\right] | x \in [0,1] | \lbrack 0,1\rbrack
[0,1/2] :: [0,\frac12]
(-\infty,1) :: (-∞, 1)
(-\infty, 1]\cup[2,\infty) :: (-\infty,1] \cup [2, \infty)
\{1,2\} :: \{2,1\} | {1,2} | \left\{1,2\right\} | \lbrace 1,2\rbrace
\{1/2,1\} :: \{1,0.5\}
(1,2) :: (1, 2) | x=1, y=2 | y=2, x=1 | x=1 \text{ and } y=2 | (x,y)=(1,2) | (1.0,2.0)
x=1, y=2 :: (1,2)
x=1,y=2 :: y=2,x=1
(1,2,3) :: (1,2,3.0)
(0.5,1) :: \left(\frac12,1\right)
(1,2),(3,4) :: (1,2), (3,4)
(1, 200) :: (1,200)
\begin{pmatrix}1&2\\3&4\end{pmatrix} :: \begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}
\begin{pmatrix}1/2\\2\end{pmatrix} :: \begin{pmatrix}\frac12\\2\end{pmatrix}
2\sqrt{3} :: 2 \sqrt{3}
x^2 :: x^{2} | x²
10^{6} :: 1000000
1010_2 :: 1010_{2}
\pm 2 :: ±2
1\pm\sqrt{2} :: 1 \pm \sqrt2
x>2 :: x \gt 2
x\le 2 :: x <= 2
-1<x<2 :: -1 < x < 2
3:30 :: 3:30 pm | 3\!:\!30
3:2 :: 3 : 2 | 3\colon 2
0.00012 :: 1.2\times 10^{-4}
12000 :: 1.2 \times 10^4 | 1.2e4 | 1.2E+4 | 12 \cdot 10^3 | 1.2*10^4 | 1.2x10^4 | 1.2 × 10⁴
1.2\times10^4 :: 12,000
0 :: -0 | 0.0 | +0 | 00
7 :: 007 | +7 | 7.0000
-7 :: - 7
0.1 :: 0.1000
9^{9^9} :: 9^{9^{9}}
\pi :: π
2\pi :: 2 π
1+2i :: 1 + 2 i
0.5 :: \frac{1}{2} \approx 0.5
36 :: 3 dozen | 3 dozen eggs
1.5e16 :: 15 quadrillion
3:30 pm :: 3:30
6 :: \gcd(12,18)=6
12 :: \text{LCM} = 12
(1,200) :: x=1, y=200
x=1,y=200 :: (1,200)
\frac{1}{2} :: \color{blue}{\frac{1}{2}}
(3,4) :: (a,b) = (3,4)
18\,k\Omega :: 18\text{ k}\Omega
18\,\Omega :: 18\text{ ohms}
Paris, London :: paris, london
2, 3 :: x = 2 \text{ or } x = 3 | x = 2, 3
12 and 13 :: 12, 13
1/2, 3 :: 0.5 and 3
x+y=5 :: x + y = 5
\theta=5 :: 5
1200 dollars :: \$1200 | 1200 | 1200\text{ dollars} | 1,200 dollars
18 km/h :: 18\text{ km/h} | 18 km/hr | 18
18 :: ≈ 18 km | \approx 18\text{ km} | 18 double rooms | 18 third graders
18 cm :: 18 centimeters | 18.0\text{ cm}
7, 8 :: 7 and 8 | 7\text{ and }8 | 7,8
1,234,567 :: 1'234'567
"""
WRONG = r"""
1200 dollars :: 1200 cents | 1200\text{ cents} | 120 dollars
18 km/h :: 18 m/s | 18 cm 5 mm | 18 m
7, 8 :: 7 | 8, 7 | 7, 8, 9 | 7 8 | 78
7 :: 7 and 8 | 7 or 8 | a = 7, b = 8
1200 :: 1, 200 | 1'20'0 | (1,200) | \{1,200\} | 1.200 | 12,00 | 1, 200 km | 1,\,200 | 1,~200 | 1 , 200 | #1, 200
1200 :: $1, 200 | 1, 2, 0, 0
1,200,300 :: 1,200, 300
12 :: 1,2 | \textbf{(B) } 12 | \frac12 | x=1, y=2
1,2 :: 12
3, 0.5 :: 1/2, 3
18 :: 18 dozen | 18 dozen eggs | 18\text{ dozen} | 18 tenths | 18 hundredths | 18 thirds | 18k | 18 K | 18M
18 :: 18 trillion | 18 quadrillion | 18 bn | 18 gross | 18 score | 18 tens | 17 \approx 18 | about 18 | 18 N
18 :: 18.50 dollars | \cancel{18} | `18` | 18! | ABC = 18 | x=y=18 | 17+2=18 | \text{Twice the answer}=18
18 :: \sin x = 18 | x^2=18 | |x|=18 | x:=18 | x>18 | x\ne 18 | x = 18, y = 2 | \text{not }=18 | n! = 18 | -x=18
18 :: 1/x=18 | x/2=18 | \sqrt{x}=18 | \log x=18 | {18 | \frac{18}{ | ((18 | 18 or 19 | 18, 19 | 18/19 | 18; 19 | 18-19
18 :: 18–19 | 18 (or 19) | 18 (approximately) | 18 or 18 | not 18 | 18? | <18 | at least 18 | \ge 18 | 18+ | 18\pm 1
18 :: 18 \text{ to } 20 | 18\text{ times } 2 | 18 twice | 18\text{ plus tax} | 18\text{ nineteen}
18 :: 18\text{ hours and } 30 \text{ minutes} | 18\text{ hours }30\text{ minutes} | 18\text{ ft }6\text{ in}
18 :: \text{none} | 18\text{ (mod 20)} | 18 \pmod{20} | 18\mod 20 | 18^2 | 18_{10} | sqrt(x)=18
18 :: \text{Square of x} = 18 | \text{Number of dozens}=18 \text{ dozen} | 18, 18 | 17 = 18 | 19 ~ 18 | 19 \sim 18
18 :: \color{red}{19}18 | \textcolor{18}{19} | \textcolor{red}{18} 19 | \textcolor{red}{1}{8}9 | 18√2 | 18\,k\Omega 5
18 :: \Omega | x(18) = 2 | f(18)=17 | 18 dozens of eggs | 1'8
18.33 :: \frac{55}{3} \approx 18.34
18\text{ cm} :: 180\text{ mm}
18 \text{ minutes} :: 18\text{ hours}
no solution :: no solutions | one solution
yes :: no
even :: odd
AB :: ab
ABCD :: abcd
a :: A
x :: X
\infty :: -\infty
B :: \textbf{(B) } 12
-1/2 :: \frac{-1}{-2} | -\frac{-1}{2}
1/2 :: {}^1/_2 | \frac{2}{1} | 1:2
1/3 :: 0.333 | 0.33333333
2/3 :: \frac{2}{3
5/2 :: 2-1/2
1 :: 2\frac12 | 10^{9999999} | \frac{1}{2} \approx 1
21/2 :: 2 1/2
50% :: 0.5
0.5 :: 50% | \frac{1}{2} \approx 0.6
5 :: 500\text{ cents} | \text{half of x} = 5 | 0x5
0.05 :: 5 \text{ cents}
[0,1] :: (0,1) | [0;1]
(0,1) :: ]0,1[
\{1,2\} :: 1,2 | \{1,2,3\} | x=1, y=2
\{1\} :: 1
(1,2) :: (2,1) | 1,2 | x=2, y=1 | (x,y)=(2,1) | [1,2] | (1,2,) | (12) | x=1, x=2 | y=1, x=2 | x=1, y=2, z=3
(1,2),(3,4) :: (3,4),(1,2)
(1,200) :: (1200)
\begin{pmatrix}1\\2\end{pmatrix} :: \begin{pmatrix}2\\1\end{pmatrix} | \begin{pmatrix}1\\2\end{vmatrix}
\begin{pmatrix}1&2\end{pmatrix} :: (1,2)
\sqrt{2} :: 1.414
3\sqrt{2} :: \sqrt[3]{2}
23 :: 2\sqrt{3}
\sqrt{23} :: \sqrt2 3 | \sqrt23
10^6 :: 106
1010_2 :: 1010 | 1010_{\text{two}}
10 :: 1010_2
A_{16} :: 10
\pm 2 :: 2
2 :: \pm 2 | >2 | \pi = 2 | 2²
x>2 :: x\geq 2 | x<2
3:30 pm :: 3:30 am
3:30 :: 3:03 | 3:30 hours 2
3:2 :: 2:3 | 3/2 | 6:4 | 3 to 2
10:05 :: 10:5
330 :: 3:30
1.2 :: 1.2\times10^4
-7 :: 7-
7 :: 7.00001 | 7,0
0 :: \text{zero}
0.1 :: 0,1
1e1000000000 :: 1
\pi :: 3.14 | 3.14159265358979
e :: 2.718
1+2i :: 1-2i
3 :: \pi \approx 3 | 3 dozen
x=1, y=2 :: a=1, b=2
[1,2] :: x=1, y=2
1, 2 :: 1 or 2, 3 | 2, 1
19 :: \textcolor{red}{1}9 0
324 :: √18
8 :: 2³³ | x = 2, y = 8
108 :: 10⁸
No solution :: no
Even :: Eve
18\,\Omega :: 18\,k\Omega
18\text{ kJ} :: 18\text{ J}
-3/2 :: -2 1/2
f(x)=x+1 :: f(x)=x-1
180 :: 18'0
18000 :: 18'00'0
x<1 or x>2 :: x<1 and x>2
1 \text{ or } 2 :: 1
18 and 19 :: 18
0.6 :: \frac{1}{2} \approx 0.6
"""
SYMBOLIC = r"""
1,2,3 :: 1, 2 and 3
18 :: \sqrt{324}\approx 18 | 2+16=18 | 18=x | 18x^0 | 18 + 0 | 18i^4
\emptyset :: \varnothing
1/2 :: 1÷2 | \frac{1/2}{1}
-2/3 :: \left(-\frac23\right)
3/2 :: 2-1/2
[0,1] :: 0\le x\le 1
[2,\infty)\cup(-\infty, 1] :: (-\infty,1] \cup [2, \infty)
(1,2) :: \langle 1,2\rangle
\sqrt{2} :: sqrt(2)
2\sqrt{2} :: \sqrt{8}
\frac{\sqrt{2}}{2} :: \frac{1}{\sqrt{2}}
2\sqrt{3} :: 2\cdot\sqrt{3}
\sqrt[3]{2} :: \sqrt[3]2
4 :: \sqrt{16}
8 :: 2^3
2^3 :: 8
2^{10} :: 1024
16 :: 2^{2^2}
\pm 2 :: -2, 2 | \mp 2
x>2 :: 2<x
2\pi :: 2pi
\frac{\pi}{2} :: \frac{1}{2}\pi
2e :: 2*e
1+2i :: 2i+1
"""


def lines(table: str) -> list[tuple[str, str]]:
    return [
        (gold, answer)
        for line in table.strip().splitlines()
        for gold, _, answers in [line.partition(" :: ")]
        for answer in answers.split(" | ")
    ]


def read(gold: str, answer: str) -> tuple[bool, bool]:
    """Whether an answer in a box is right, and whether the proof says so (in this process)."""
    row = {"answer": gold, "answer_type": "latex"}
    right, said = verify_math(row, f"So it is \\boxed{{{answer}}}.")
    plain = lambda text: without_name(unmarked(text))
    return right, said is not None and not contradicts(said, gold) and symbolic.equal(
        without_estimate(plain(said)), plain(math_gold(row))
    )


@pytest.mark.parametrize("gold, answer", lines(RIGHT))
def test_right(gold, answer):
    assert read(gold, answer)[0]


@pytest.mark.parametrize("gold, answer", lines(WRONG))
def test_wrong(gold, answer):
    assert read(gold, answer) == (False, False)


@pytest.mark.parametrize("gold, answer", lines(SYMBOLIC))
def test_right_by_proof(gold, answer):
    assert read(gold, answer)[1]


def test_the_table_is_no_small_one():
    assert len(lines(RIGHT)) > 200 and len(lines(WRONG)) > 200


def test_the_last_box_counts_and_an_empty_one_is_no_answer():
    row = {"answer": "18", "answer_type": "number"}
    assert verify_math(row, r"\boxed{17}, no: \boxed{18}")[0] and not verify_math(row, r"\boxed{18}, no: \boxed{17}")[0]
    assert not any(verify_math(row, rf"\boxed{{18}} and \boxed{{{empty}}}")[0] for empty in ("", " ", r"\text{}", "$$"))


def test_the_proof_reads_colours_names_and_estimates():
    pairs = [
        (r"\textcolor{red}{\sqrt{8}}", r"2\sqrt{2}"),
        (r"\text{Area} = \sqrt{8}", r"2\sqrt{2}"),
        (r"\sqrt{8} \approx 2.83", r"2\sqrt{2}"),
        (r"\sqrt{8} \approx 2.83", "2.83"),
        ("1, 200", "1200"),
    ]
    assert equal_symbolically(pairs) == [True, True, True, False, False]


def test_no_text_takes_long():
    started = time.process_time()
    for text in (
        r"\bm{" * 950,
        r"\color{red}" * 350,
        r"{\over " * 500,
        "{" + r"\over " * 600,
        "~" * 3900,
        "~" * 3900 + "or",
        "," * 3900,
        "1," * 50_000,
        "√(" * 1900,
        r"\approx " * 400,
        "1'000" * 700,
        "abcd " * 700 + "=1",
        "x=" * 1900,
        "1, 200" * 600,
    ):
        for gold in ("1", "1, 2", "(1,2)", "No solution"):
            (
                math_equal(text, gold),
                math_equal(gold, text),
                verify_math({"answer": gold}, f"<answer>{text}</answer>", True),
            )
    assert time.process_time() - started < 20
