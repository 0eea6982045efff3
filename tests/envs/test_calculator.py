from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.envs import make_env
from roll.envs.calculator import CalculatorError, calculate, evaluate
from tests.envs.playing import Step, no_deadline


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*(3+4)", "84"),
        (" 12 *\n( 3 + 4 ) ", "84"),
        ("2+3*4", "14"),
        ("-2**2", "-4"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("-2/3", "-0.666666666667"),
        ("-1/10**20", "0"),
        ("10/5", "2"),
        ("10**20/3", "33333333333333333333.333333333333"),
        ("7//2", "3"),
        ("-7%3", "2"),
        ("2**-3", "0.125"),
        ("(-1)**10**50", "1"),
        ("0**10**50", "0"),
        ("123456789*987654321", "121932631112635269"),
        ("2**332", str(2**332)),
    ],
)
def test_results_are_exact(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "not a complete expression"),
        ("1+", "not a complete expression"),
        ("(" * 150, "not a complete expression"),
        ("1.2.3", "not a complete expression"),
        ("2(3)", r"write \* between factors"),
        ("()", r"write \* between factors"),
        ("1/0", "division by zero"),
        ("5%(2-2)", "division by zero"),
        ("0**-1", "division by zero"),
        ("2**0.5", "exponents must be whole"),
        ("9**9**9**9", "more than 100 digits"),
        ("(1/7)**10**9", "more than 100 digits"),
        ("10**60*10**60", "more than 100 digits"),
        ("1/10**99/10**9", "more than 100 digits"),
        ("9" * 101, "more than 100 digits"),
        ("1+" * 100 + "1", "longer than 200 characters"),
        ("__import__('os').system('true')", "holds numbers"),
        ("lambda: 1", "holds numbers"),
        ("1,2", "holds numbers"),
        ("٣+٤", "holds numbers"),
        ("1\x00", "holds numbers"),
        ("1e9", "holds numbers"),
    ],
)
def test_invalid_or_unbounded_expressions_are_rejected_quickly(expression, message):
    started = time.process_time()
    with pytest.raises(CalculatorError, match=message):
        calculate(expression)
    assert time.process_time() - started < 1


@no_deadline
@given(st.text(alphabet="0123456789.+-*/%() \n", max_size=40))
def test_any_text_has_a_bounded_value_or_an_error(text):
    try:
        value = evaluate(text)
    except CalculatorError as error:
        assert str(error)
    else:
        assert max(abs(value.numerator), value.denominator) < 10**100
        shown = calculate(text)
        assert abs(Fraction(shown) - value) <= Fraction(1, 10**12)


@no_deadline
@given(seed=st.integers(0, 2**32), terms=st.integers(2, 8), digits=st.integers(1, 6))
def test_the_tool_solves_every_problem(seed, terms, digits):
    env = make_env("calculator", {"terms": terms, "digits": digits})
    problem = env.reset(seed=seed)[0].removeprefix("Compute ")
    numbers = "".join(cell if cell.isdigit() else " " for cell in problem).split()
    assert [len(number) for number in numbers] == [digits] * terms and "*" in problem
    called = Step(*env.step(f"<tool>{problem}</tool>"))
    result = called.observation.removeprefix("Result: ")
    assert called.reward == 0 and not called.terminated and int(result) == eval(problem)
    answered = Step(*env.step(f"It is <answer>{result}</answer>."))
    assert answered.reward == answered.info["metrics"]["success"] == 1 and answered.terminated


def started():
    env = make_env("calculator", {"format_penalty": -0.5})
    problem = env.reset(seed=0)[0].removeprefix("Compute ")
    return env, problem, eval(problem)


@pytest.mark.parametrize("form", ["{0}", " {0:,}\n", "{0}.0", "{0:+d}"])
def test_answers_are_accepted_in_common_formats(form):
    env, _, value = started()
    assert env.step(f"<ANSWER>{form.format(value)}</ANSWER>")[:3] == ("Right.", 1.0, True)


def test_a_wrong_answer_ends_the_episode_without_reward():
    env, _, value = started()
    step = Step(*env.step(f"<answer>{value + 1}</answer>"))
    assert step[:4] == ("Wrong.", 0.0, True, False) and step.info["metrics"]["success"] == 0


def test_the_problem_itself_is_not_accepted_as_an_answer():
    env, problem, _ = started()
    step = Step(*env.step(f"<answer>{problem}</answer>"))
    assert step.reward == -0.5 and not step.terminated and step.info["metrics"]["action_is_valid"] == 0


def test_only_the_first_action_of_a_turn_is_executed():
    env, _, value = started()
    step = Step(*env.step(f"<tool>2+3</tool><answer>{value}</answer>"))
    assert step.observation == "Result: 5" and not step.terminated


def test_a_failed_tool_call_returns_the_error_and_is_counted():
    env, _, _ = started()
    step = Step(*env.step("<tool>1/0</tool>"))
    assert step.observation == "Error: division by zero." and step.reward == 0
    assert step.info["metrics"] == {
        "action_is_valid": 1.0,
        "success": 0.0,
        "format_penalty": 0.0,
        "tool_calls": 1.0,
        "tool_errors": 1.0,
    }
