"""Which answers are equal to a ground truth, and that no answer takes long to compare."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import RewardFunction
from roll.rewards.math_answers import same_answer
from roll.rewards.math_rule import math_reward
from roll.rewards.math_values import TooLongError

ANSWERS: dict[str, tuple[list[str], list[str]]] = {
    # integers
    "46": (
        ["46", "046", "+46", "46.0", "46.", "٤٦", "$46$", "{46}", "(46)"],
        ["47", "-46", "4 6", "x", "", "46x", "word"],
    ),
    "68": (["68", "= 68", "23+45=68"], ["23+45", "68+0", "68=23+45"]),
    "391": (["391", r"x = 391"], [r"17 \times 23", r"17 \cdot 23", "17*23", "17(23)"]),
    "1000": (
        ["1,000", "1{,}000", r"1\,000", r"1{,}000.00", "10^3", r"1 \times 10^{3}", "1e3", "1,\\!000"],
        ["1,0000", "1,00"],
    ),
    "25": (["25", "25.0"], ["100/4", r"\frac{100}{4}", "5^2", r"\sqrt{625}"]),
    "120": (["120"], ["5!", r"\binom{10}{3}", r"\binom{16}{2}", "121"]),
    "-3": (["-3", "−3", "-3.0", "(-3)"], ["3", "-(-3)", "- -3"]),
    "300000000": ([r"3 \times 10^8", r"3\cdot 10^{8}", "3e8", "300,000,000", "10^8 × 3"][:4], ["3×10^9", "3^8"]),
    "2": (["2", r"\text{2}"], [r"\frac{3}{2}", r"\sqrt{2}", "2xy", "2 pi", r"2\pi", "1+1", r"\sqrt{4}", r"\log_2 4"]),
    "123456789012345678901234567890": (["123456789012345678901234567890"], ["123456789012345678901234567891"]),
    # fractions and decimals
    r"\frac{3}{2}": (
        ["3/2", "1.5", r"\dfrac32", r"1\frac{1}{2}", "1 1/2", r"\frac{6}{4}", r"\frac{-3}{-2}"],
        ["2", "3", "2/3", "-3/2", "1.5000001"],
    ),
    "0.5": ([r"\frac12", r"\frac{1}{2}", ".5", "1/2", "0.50", r"50\%"], ["0.49", "5", "0.500000001"]),
    "1/3": ([r"\frac{1}{3}", r"0.\overline{3}", "2/6"], ["0.333333", "0.3333333333333333", "3"]),
    r"\frac{1}{6}": ([r"0.1\overline{6}", "1/6"], ["0.1666667", "0.16"]),
    r"-\frac{3}{4}": ([r"\frac{3}{-4}", r"\frac{-3}{4}", "-0.75", "-3/4"], ["0.75", r"\frac{3}{4}"]),
    "0.03": ([r"3\cdot 10^{-2}", "3e-2", r"3\%"], ["0.3", r"3 \cdot 10^{2}"]),
    # units
    "5": (
        [r"5 \text{ cm}", "5 cm", "5cm", r"\$5", "$5", "5 dollars", r"5\%", "x=5", r"5^\circ", "5°", r"5\mathrm{m}"],
        ["5x", "0.05", "5!"],
    ),
    r"5 \text{ cm}": (["5", "5 cm", r"5\text{cm}"], [r"5 \text{ m}", "6 cm"]),
    r"50\%": (["50", "0.5", "50%"], ["5", "500", "0.05"]),
    r"90^\circ": (["90", r"90^{\circ}", "90 degrees"], [r"89^\circ"]),
    "7": (
        ["7 months", "7 glasses of water", r"7 \pmod{10}", "7 (mod 10)", "{{7}}", "7 eggs per day", "7 more"],
        [
            "7 million",
            r"7 \text{ hundred}",
            "7 dozen",
            "7 squared",
            "7 factorial",
            "7 halves",
            "7 plus x",
            "7 to x",
            ">7",
            r"\ge 7",
            r"\neq 7",
        ],
    ),
    r"\$5": (["5", "$5", "5 dollars"], ["5 cents", "5¢", "€5"]),
    "5 cents": (["5", "5¢"], ["$5", r"\$5"]),
    "5 ft": (["5 feet", r"5 \text{ foot}", "5"], ["5 meters", "5 square feet"]),
    r"5 \text{ ft}^2": (["5 square feet"], ["5 feet"]),
    "5 hours": (["5 hrs", "5 hr"], ["5 min"]),
    "5 kg": (["5 kilograms"], ["5 grams"]),
    # roots, powers and other closed forms
    r"2\sqrt{3}": ([r"\sqrt{12}", r"2 \cdot \sqrt3", r"\frac{6}{\sqrt{3}}"], ["3.4641016", "3", r"\sqrt{3}", "2*3"]),
    r"\frac{\sqrt{2}}{2}": ([r"\frac{1}{\sqrt{2}}", r"\sqrt{2}/2", r"\sqrt{0.5}"], ["0.70710678", r"\sqrt{2}"]),
    r"\frac{1+\sqrt5}{2}": (
        [r"\frac{\sqrt{5}+1}{2}", r"\frac12+\frac{\sqrt5}{2}"],
        ["1.618034", r"\frac{1-\sqrt5}{2}"],
    ),
    r"\frac{\pi}{4}": ([r"\pi/4", r"\frac14\pi", "π/4", r"0.25\pi"], ["0.785398", r"\pi"]),
    "2^{10}": (["1024", "2^10", "4^5"], ["1025", "2^{9}"]),
    "5!": (["120", "5!"], ["5"]),
    "3+4i": (["4i+3", "3 + 4i"], ["3-4i", "5"]),
    "e^{2x}": (["e^{x}e^{x}", "(e^x)^2"], ["e^{x}", "2e^x"]),
    # numbers that differ by little, or are small
    "2^{2024}-1": (["4^{1012}-1", r"(2^{1012}-1)(2^{1012}+1)"], ["2^{2024}", "2^{2024}+1"]),
    "100!": (["100 × 99!"], ["100!+1", "100!-1"]),
    r"\binom{300}{150}": ([r"\frac{300!}{150!150!}"], [r"\binom{300}{150}-1"]),
    r"\frac{1}{2^{1009}}": (["2^{-1009}", r"\frac{2}{2^{1010}}"], ["2^{-1010}", "-2^{-1009}", "2^{-1009}+2^{-2000}"]),
    r"1-(\frac12)^{300}": (["1-0.5^{300}"], [r"1-(\frac13)^{300}", "1.0^{2}"]),
    "e^{-500}": ([r"\frac{1}{e^{500}}", r"\exp(-500)"], ["e^{-600}", "-e^{-500}", r"\sqrt{2}-\sqrt{2}"]),
    r"1-\sqrt{2}^{-2001}": ([r"1-\frac{\sqrt2}{2^{1001}}"], [r"1-\sqrt{3}^{-2001}", r"1-\frac{\sqrt2}{2^{1002}}"]),
    r"\sqrt{10^{80}+1}-10^{40}": (
        [r"\frac{1}{\sqrt{10^{80}+1}+10^{40}}"],
        [r"\sqrt{10^{80}+2}-10^{40}", r"\sqrt2-\sqrt2"],
    ),
    "x^{1000}+x": (["x(1+x^{999})"], ["x^{1000}", "x^{1000}+1"]),
    "x > 10^{100}": (["2x > 2 × 10^{100}"], ["x > 10^{100}-1"]),
    # letters
    "x^2-1": (["(x+1)(x-1)", "-1+x^2", "y = x^2-1", "x² − 1"], ["x^2+1", "y^2-1", "X^2-1"]),
    r"\frac{x}{2}": ([r"\frac{1}{2}x", "x/2", "0.5x"], ["2x", "2/x"]),
    r"\sqrt{x}": (["x^{1/2}", "x^{0.5}"], ["x", r"\sqrt{y}"]),
    r"\sqrt{x^2}": (["|x|", r"\lvert x \rvert"], ["x"]),
    r"2\sin x\cos x": ([r"\sin 2x", r"\sin(2x)"], [r"\sin x", r"2\sin x"]),
    r"2000\ln 2": ([r"\ln 2^{2000}"], [r"\ln 2^{2001}"]),
    r"\arctan 2": ([r"\tan^{-1}(2)", r"\arctan(2)"], ["1.107", r"\tan 2"]),
    r"\log_2 3": ([r"\frac{\ln 3}{\ln 2}", r"\log_{2}{3}"], [r"\log_3 2"]),
    "xy": (["xy", r"x \cdot y", r"y \times x"], ["yx", "x+y"]),
    "ab-ac": (["a(b-c)", "-(ac-ab)"], ["ab-bc", "acab"]),
    r"\frac{\sqrt2}{2}": ([r"\sin 45^\circ", r"\cos(45)^{\circ}", r"\sin{(30+15)^\circ}"], [r"\sin 45"]),
    r"\sin 30^\circ": ([r"\cos 60°"], [r"\sin 30"]),
    # relations
    "y = 2x + 3": (["2x - y + 3 = 0", "2x+3", "y=3+2x"], ["y=2x-3", "x=2y+3"]),
    "x = 5": (["5", "5 = x"], ["y=5", "x=6", "x>5"]),
    r"x \le 5": ([r"5 \ge x", "x ≤ 5", r"2x \leq 10"], ["x<5", r"x \ge 5", "5"]),
    r"1 \le x < 3": ([r"1 \leq x < 3", r"3 > x \ge 1"], [r"1 \le x \le 3", r"1 < x < 3"]),
    r"(x-2)^2+(y+3)^2=16": (["(y+3)^2 + (x-2)^2 = 16"], ["(x-2)^2+(y+3)^2=4"]),
    "[-2,7]": ([r"-2 \le x \le 7", r"7 \ge t \ge -2"], [r"-2 < x \le 7", "x < 7"]),
    r"x > 3": ([r"(3, \infty)", r"x \in (3,\infty)"], [r"[3,\infty)", r"(-\infty,3)"]),
    "1,1,2": (["1,2,1"], ["1,2", "1,2,2"]),
    # intervals, tuples, lists, sets and matrices
    "[0,1)": (["[0, 1)", r"\left[0,1\right)", r"x \in [0,1)"], ["(0,1]", "[0,1]", "(0,1)", "0,1", "[0,2)"]),
    r"(-\infty, 3] \cup [5, \infty)": (
        [r"[5,\infty)\cup(-\infty,3]"],
        [r"(-\infty,3)\cup[5,\infty)", r"(-\infty,3]", r"(-\infty,3]\cap[5,\infty)"],
    ),
    r"\infty": ([r"+\infty", "∞"], [r"-\infty", "0"]),
    "(1,2)": (["(1, 2)", r"\left( 1.0, 2 \right)", "(x,y)=(1,2)"], ["(2,1)", "1,2", r"\{1,2\}", "[1,2]", "(1,2,3)"]),
    "1,2": (
        ["2,1", "1 and 2", r"1 \text{ or } 2", r"\{1,2\}", r"x=1 \text{ or } x=2"],
        ["(1,2)", "1,3", "1", "12", "1,2,3"],
    ),
    r"\{1,2\}": ([r"\{2, 1\}", r"\left\{1,2\right\}", r"\{1,2,2\}"], [r"\{1\}", "(1,2)", r"\{1,3\}", r"\{1,1+1\}"]),
    r"\{100,200\}": ([r"\{200,100\}"], ["100,200", "100200"]),
    r"1 \pm \sqrt{2}": ([r"1+\sqrt{2}, 1-\sqrt{2}", r"1 \pm \sqrt2"], [r"1+\sqrt{2}", r"-1 \pm \sqrt{2}"]),
    r"\emptyset": ([r"\varnothing", r"\{\}", "∅"], ["0", r"\{0\}"]),
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": (
        [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)"],
        [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", "1,2,3,4"],
    ),
    # texts
    "ABCD": (["ABCD", r"\text{ABCD}", "abcd"], ["DCBA", "ABC", "ABCDE"]),
    r"\text{Tuesday}": (["Tuesday", "tuesday", r"\mathrm{Tuesday}."], ["Monday", "T"]),
    r"\text{(A)}": (["A", "(A)", r"\textbf{(A)}"], ["B", "AB", r"(A),(B)"]),
    "no solution": (["No solution.", r"\text{no solution}"], ["solution", "0"]),
    "January 5": ([r"\text{January 5}"], ["January 6", "5"]),
    "1011_2": (["1011_{2}"], ["1011", "1011_3", "11"]),
    r"\int_0^1 x\,dx": ([r"\int_{0}^{1} x dx"], ["0.5"]),
}
"""Ground truth -> answers that are right, and answers that are wrong."""

PAIRS = [
    (answer, truth, is_right)
    for truth, (right, wrong) in ANSWERS.items()
    for answers, is_right in ((right, True), (wrong, False))
    for answer in answers
]


def equal(answer: str, truth: str) -> bool:
    try:
        return same_answer(answer, truth)
    except TooLongError:
        return False


@pytest.mark.parametrize(("answer", "truth", "right"), PAIRS)
def test_answers_in_closed_form(answer, truth, right):
    assert equal(answer, truth) is right


@pytest.mark.parametrize("truth", ANSWERS)
def test_every_ground_truth_is_its_own_answer(truth):
    assert math_reward(r"So \boxed{" + truth + "}.", truth, RewardConfig()) == 1


LARGE = [
    *("9^{9^{9^{9}}}", "99999999!", "10^{10^9}", r"\binom{10^7}{5\cdot10^6}", r"\Gamma(10^9)", "1e99999999", "9!!!!!!"),
    *(r"\sum_{i=1}^{10^9} i", r"\prod_{i=1}^{10^9} i", r"\int\int\int x", r"\sqrt" * 400 + "2", r"\sin" * 400 + " 2"),
    *(
        "x^{100000000}",
        "(x+1)^{99999}",
        "e^{e^{e^{e^{9}}}}",
        r"\exp(\exp(\exp(\exp 9)))",
        r"\sin(10^{9999})",
        "2^3^4^5^6",
    ),
    *("(" * 900 + "1" + ")" * 900, r"\frac{" * 300 + "1" + "}{2}" * 300, "1+" * 900 + "1", "1^1" * 600, "|" * 1999),
    *(r"\{" + ",".join(map(str, range(3000))) + r"\}", r"\{" + ",".join(f"{i}/7+1" for i in range(200)) + r"\}"),
    *(r"\{1,2," * 300, "1," * 999, r"\pm 1" * 300, "1" * 1999, r"0.\overline{" + "3" * 1900 + "}", "2^{-9^{9^9}}"),
]


@pytest.mark.parametrize("answer", LARGE, ids=lambda answer: answer[:20])
@pytest.mark.parametrize("truth", ["7", r"\sqrt{2}", "x^2", r"\{1,2\}", "(1,2)", "y=x", r"\{" + "1/5+1," * 199 + r"\}"])
def test_the_size_of_a_number_and_the_form_of_an_answer_cost_no_time(answer, truth):
    start = time.process_time()
    assert math_reward(r"\boxed{" + answer + "}", truth, RewardConfig()) == 0
    assert time.process_time() - start < 2


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "1+" * 2000 + "1", "(" * 500 + "1" + ")" * 500])
def test_what_is_too_long_to_compare_is_wrong_and_counted(answer):
    config = RewardConfig(wrong_score=-1.0)
    reward = RewardFunction(math_reward, config)
    (counted,) = reward.outcomes(math_reward(r"\boxed{" + answer + "}", r"\sqrt{2}", config), None)
    (other,) = reward.outcomes(math_reward(r"\boxed{2}", r"\sqrt{2}", config), None)
    assert (counted.score, counted.metrics) == (-1, {"too_long_to_compare": 1})
    assert (other.score, other.metrics) == (-1, {"too_long_to_compare": 0})


LATEX = st.lists(
    st.sampled_from([*r"0123456789.,+-*/^_!()[]{}|=<>%$ xyEi\&±∪", r"\frac", r"\sqrt", r"\pi", r"\text{", r"\{", r"\}"])
    | st.text(max_size=3)
).map("".join)


@given(LATEX, LATEX)
@example("1.0.0", ".0x")
@example(r"\log 0+x", r"\frac{x}{0}")
def test_any_two_texts_can_be_compared(answer, truth):
    assert equal(answer, truth) in (True, False)
    assert equal(answer, rf"{truth}+\sqrt{{2}}") in (True, False)
    assert equal(f"x+{answer}", r"2\sqrt{2}") in (True, False)
    assert equal(truth, truth)


@pytest.mark.parametrize(
    ("answer", "truth"), [("23+45", "68"), ("0.333333", "1/3"), ("DCBA", "ABCD"), ("(1,2)", "1,2"), ("2^3", "8")]
)
def test_answers_that_only_math_verify_accepts(answer, truth):
    from math_verify import parse, verify

    theirs, ours = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
    assert verify(theirs, ours, timeout_seconds=None)
    assert not equal(answer, truth)
