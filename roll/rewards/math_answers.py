r"""Compares answers in closed form exactly, such as `\frac{3}{2}`, `2\sqrt{3}`, `[0, 1)` and `x = 5`.

Every step is linear in the length of an answer, and no number is evaluated whose size is not bounded first.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from mpmath import mp

from roll.rewards.math_values import DEEPEST_ANSWER, TooLongError, apply, equal, evaluated, real

LONGEST_ANSWER = 2_000
"""Characters of an answer that is compared; more where the ground truth is as long."""

MOST_PAIRS = 2_500
"""Pairs of items of two sets that are compared; items that are written alike are not counted."""


def same_answer(answer: str, expected: str) -> bool:
    r"""Whether an answer is the expected number, expression, relation, interval, tuple, set, matrix or text.

    Numbers are compared as rationals. Where a number is expected, the answer must be a number too, not an expression
    such as `23+45` that needs evaluating; a division is one where an integer is expected. Other expressions are equal
    if their values are at a few rational values of each letter: rational values exactly, others up to errors of
    rounding. Texts are compared without regard to case and spaces. Items of sets and lists have no order; those of
    tuples, intervals and matrices have one.

    Raises:
        TooLongError: see LONGEST_ANSWER, DEEPEST_ANSWER, MOST_PAIRS and MOST_BITS.
    """
    if answer == expected:
        return True
    if len(answer) > max(LONGEST_ANSWER, len(expected)):
        raise TooLongError(f"{len(answer)} characters")
    return _same(_normalized(answer), _normalized(expected))


# From LaTeX to a smaller alphabet

CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00b7": "×", "\u22c5": "×", "*": "×", "÷": "/", "\u2044": "/", "π": r"\pi "}
    | {"√": r"\sqrt ", "∞": r"\infty ", "∅": r"\emptyset ", "²": "^2", "³": "^3", "~": " ", "\u00a0": " ", "‡": ""}
)
CURRENCIES = {"¤": "dollar", "€": "euro", "£": "lb", "¥": "yen"}  # ¤ stands for a $ that is no mark of a formula
CURRENCY = re.compile("[¤€£¥]")
COMMANDS = {
    **dict.fromkeys(("left", "right", "middle", "displaystyle", "quad", "qquad", "limits", "degree"), " "),
    **dict.fromkeys(("big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr"), " "),
    **dict.fromkeys(("times", "cdot", "ast"), "×"),
    **dict.fromkeys(("le", "leq", "leqslant"), "≤"),
    **dict.fromkeys(("ge", "geq", "geqslant"), "≥"),
    **dict.fromkeys(("ne", "neq"), "≠"),
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("emptyset", "varnothing"), "⦃⦄"),
    **dict.fromkeys(("lvert", "rvert", "vert"), "|"),
    **{"lt": "<", "gt": ">", "approx": "=", "in": "∈", "cup": "∪", "pm": "±", "mp": "∓", "div": "/"},
    **{"lbrace": "⦃", "rbrace": "⦄", "lbrack": "[", "rbrack": "]", "langle": "(", "rangle": ")"},
}
MATRIX = re.compile(r"\\(begin|end)\s*\{(?:[pbBvV]?matrix|array)\}(?:\{[lcr|\s]*\})?")
ESCAPED = {"\\": ";", "{": "⦃", "}": "⦄", "%": "%", ",": " ", ";": " ", ":": " ", " ": " "}
COMMAND = re.compile(r"\\(?:([A-Za-z]+)|.)", re.DOTALL)
TEXT = re.compile(r"\\(?:text[a-z]*|math[a-z]+|mbox|operatorname|boldsymbol)\s*\{([^{}]*)\}")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
SHORT_ARGUMENT = re.compile(r"(\\frac(?:\s*\{[^{}]*\})?)\s*([0-9A-Za-z])(?![A-Za-z])")


def _normalized(text: str) -> str:
    """An answer without formatting: sets in ⦃⦄, matrices in ⟦⟧, and ‡ in front of text."""
    text = text.replace(r"\$", "¤")
    text = text.replace("$", "¤") if text.count("$") == 1 else text
    text = TEXT.sub(r"‡\1 ", text.translate(CHARACTERS)).replace("{,}", ",").replace(r"\!", "")
    text = re.sub(r"(?<=\d)\\,(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\^\s*(?:\\circ\b|\{\s*\\circ\s*\})", "°", text)
    text = re.sub(r"\\pmod\s*\{([^{}]*)\}|\(mod (\w+)\)", r"‡modulus \1\2", text)
    text = MATRIX.sub(lambda match: "⟦" if match[1] == "begin" else "⟧", text).replace("&", ",")
    text = COMMAND.sub(
        lambda match: COMMANDS.get(match[1], match[0]) if match[1] else ESCAPED.get(match[0][1], ""), text
    )
    text = text.replace("$", "")
    for _ in range(2):
        text = SHORT_ARGUMENT.sub(r"\1{\2}", text)
    if not re.search(r"[(\[⦃⟦]", text):
        text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if re.search(r"\d", text):
        text = re.sub(r"‡?\s*\b(?:and|or)\b", ",", text)
    return text.strip().rstrip(".,;: \n").removeprefix("=").strip()


# Structure

OPENING, CLOSING = "([{⦃⟦", ")]}⦄⟧"
RELATIONS = "=<>≤≥≠∈"
VARIABLE = re.compile(r"[A-Za-z]|\\[a-z]+\s*")


def _split(text: str, separators: str) -> tuple[list[str], str]:
    """The parts of a text between separators outside of brackets, and these separators."""
    parts, found, depth, start = [], "", 0, 0
    for position, character in enumerate(text):
        if character in OPENING:
            depth += 1
            if depth > DEEPEST_ANSWER:
                raise TooLongError("brackets inside of each other")
        elif character in CLOSING:
            depth -= 1
        elif character in separators and depth == 0:
            parts.append(text[start:position].strip())
            found += character
            start = position + 1
    return [*parts, text[start:].strip()], found


def _same(answer: str, expected: str) -> bool:
    if answer == expected:
        return True
    (ours, is_set), (theirs, is_expected_set) = _items(answer), _items(expected)
    if is_set or is_expected_set:
        is_list = not any(each.startswith("⦃") for each in (answer, expected))
        return is_set and is_expected_set and _same_items(ours, theirs, is_list)
    return _same_relation(*_split(answer, RELATIONS), *_split(expected, RELATIONS))


def _items(text: str) -> tuple[list[str], bool]:
    """The items of a set or of a list without brackets, and whether the text is one."""
    if "±" in text:
        both = (text.replace("±", one).replace("∓", other) for one, other in ("+-", "-+"))
        return [item for each in both for item in _items(each)[0]], True
    content = _inside(text, "⦃", "⦄")
    if content is not None:
        return (_split(content, ",")[0] if content else []), True
    items = _split(text, ",")[0]
    return items, len(items) > 1


def _inside(text: str, opening: str, closing: str) -> str | None:
    """The content of a text that is one bracket from its start to its end."""
    if len(text) < 2 or text[0] not in opening or text[-1] not in closing:
        return None
    inner = text[1:-1].strip()
    depth = lowest = 0
    for character in inner:
        depth += (character in OPENING) - (character in CLOSING)
        lowest = min(lowest, depth)
    return inner if lowest == 0 == depth else None


def _same_items(ours: list[str], theirs: list[str], is_list: bool) -> bool:
    """Whether each item of either has an equal item in the other; of a list, as many."""
    sides = [[(_number(item) or item, item) for item in items] for items in (ours, theirs)]
    known, wanted = map(dict, sides)
    counts, wanted_counts = (Counter(key for key, _ in (side if is_list else dict(side).items())) for side in sides)
    extra = [known[key] for key in (counts - wanted_counts).elements()]
    missing = [wanted[key] for key in (wanted_counts - counts).elements()]
    if len(extra) * len(wanted) + len(missing) * len(known) > MOST_PAIRS:
        raise TooLongError(f"sets of {len(ours)} and {len(theirs)} items")
    if not is_list:
        return all(any(_same(item, other) for other in wanted.values()) for item in extra) and all(
            any(_same(other, item) for other in known.values()) for item in missing
        )
    for item in extra:
        match = next((other for other in missing if _same(item, other)), None)
        if match is None:
            return False
        missing.remove(match)
    return not missing


def _same_relation(ours: list[str], by: str, theirs: list[str], expected_by: str) -> bool:
    """Whether two chains of relations are the same; `x = 5` is the same as `5`."""
    plain = [each in ("", "∈") for each in (by, expected_by)]
    if plain[0] != plain[1] and not set(by + expected_by) <= {"=", "∈"}:
        interval = _interval(theirs, expected_by) if plain[0] else _interval(ours, by)
        return interval is not None and _same_union(interval, ours[-1] if plain[0] else theirs[-1])
    if not by or not expected_by:
        return set(by + expected_by) <= {"=", "∈"} and _same_union(ours[-1], theirs[-1])
    if set(by + expected_by) <= {"=", "∈"}:
        if _text(ours[0]) == _text(theirs[0]):
            return _same(ours[-1], theirs[-1])
        ours, theirs, by, expected_by = [ours[0], ours[-1]], [theirs[0], theirs[-1]], by[0], expected_by[0]
    chain, expected_chain = _ascending(ours, by), _ascending(theirs, expected_by)
    if len(chain) * len(expected_chain) > MOST_PAIRS:
        raise TooLongError(f"chains of {len(chain)} and {len(expected_chain)} relations")
    return all(any(_proportional(each, wanted) for wanted in expected_chain) for each in chain) and all(
        any(_proportional(each, wanted) for each in chain) for wanted in expected_chain
    )


def _interval(sides: list[str], by: str) -> str | None:
    """The interval of a chain such as `-2 ≤ x < 7` or `x > 3`; None of another chain."""
    if by and set(by) <= {">", "≥"}:
        sides, by = sides[::-1], by[::-1].replace(">", "<").replace("≥", "≤")
    if len(by) == 1 and VARIABLE.fullmatch(sides[0]):
        sides, by = [r"-\infty ", *sides], f"<{by}"
    elif len(by) == 1:
        sides, by = [*sides, r"\infty "], f"{by}<"
    if len(by) != 2 or not set(by) <= {"<", "≤"} or not VARIABLE.fullmatch(sides[1]):
        return None
    return f"{'(' if by[0] == '<' else '['}{sides[0]},{sides[2]}{')' if by[1] == '<' else ']'}"


def _ascending(sides: list[str], by: str) -> list[tuple[str, str]]:
    """Each relation of a chain with the equation of its sides, the smaller side first."""
    turned = {">": "<", "≥": "≤"}
    return [
        (turned[relation], f"{right}={left}") if relation in turned else (relation, f"{left}={right}")
        for left, right, relation in zip(sides, sides[1:], by, strict=False)
    ]


def _proportional(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two relations are the same up to a factor, which is positive for inequalities."""
    if one[0] != other[0] or "∈" in one[0] or (found := evaluated(one[1], other[1])) is None:
        return False
    (values, wanted), tolerance, bits = found
    with mp.workprec(bits):
        if None in (values[0], wanted[0]) or equal(values[0], Fraction(0), tolerance) or not wanted[0]:
            return False
        factor = apply(operator.truediv, values[0], wanted[0])
        factor = abs(factor) if one[0] in "<≤" else factor
        scaled = [None if each is None else apply(operator.mul, each, factor) for each in wanted]
        tolerance *= (1 + real(abs(factor))) * 2**60
        return all(equal(ours, theirs, tolerance) for ours, theirs in zip(values, scaled, strict=True))


def _same_union(answer: str, expected: str) -> bool:
    ours, theirs = _split(answer, "∪")[0], _split(expected, "∪")[0]
    if len(ours) > 1 or len(theirs) > 1:
        return len(ours) > 1 and len(theirs) > 1 and _same_items(ours, theirs, False)
    (brackets, rows), (wanted_brackets, wanted) = _group(answer), _group(expected)
    if not rows and not wanted:
        return _same_scalar(answer, expected)
    if brackets != wanted_brackets or [len(row) for row in rows] != [len(row) for row in wanted]:
        return False
    return all(_same(*pair) for row, other in zip(rows, wanted, strict=True) for pair in zip(row, other, strict=True))


def _group(text: str) -> tuple[str, list[list[str]]]:
    """The brackets and rows of an interval, a tuple or a matrix; no rows where the text is none."""
    inner = _inside(text, "([", ")]") or ""
    text = inner if _inside(inner, "⟦", "⟧") else text  # a matrix in brackets of its own
    is_matrix = text.startswith("⟦")
    inner = (_inside(text, "⟦", "⟧") if is_matrix else _inside(text, "([", ")]")) or ""
    rows = [_split(row, ",")[0] for row in _split(inner, ";")[0] if row] if inner else []
    return (text[0] + text[-1], rows) if rows and (is_matrix or len(rows[0]) > 1) else ("", [])


# Numbers and texts

PLAIN = r"(?:\d+(?:\.\d*)?|\.\d+)"
POWER = r"\^(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d{1,4}))"
WORDS = "pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp"
UNITS = "mm|cm|dm|km|ft|mi|mg|kg|lb|lbs|oz|ml|mph|kmh|hrs?|min|sec|[ap]m"
NO_UNITS = (
    "hundred|thousand|(?:m|b|tr)illion|dozen|squared|cubed|factorial|half|halves|thirds?|fourths?|fifths?|sixths?|"
    "sevenths?|eighths?|ninths?|tenths?|(?:hundred|thousand|million)ths?|plus|minus|over|mod|modulo|choose|to|than|not|"
    "times [a-z]|(?:divided|multiplied) by"
)
"""Words after a number that make another number or an expression of it; other words are units."""

UNIT_NAMES = {
    **{"meter": "m", "metre": "m", "hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s", "foot": "ft"},
    **{"feet": "ft", "inche": "in", "inch": "in", "mile": "mi", "gram": "g", "kilogram": "kg", "pound": "lb"},
    **{"ounce": "oz", "kilometer": "km", "centimeter": "cm", "millimeter": "mm", "percent": "%", "¢": "cent"},
    **{"square": "sq", "liter": "l"},
}
"""Spellings of units without their final s."""

NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*
    (?:
        (?:(?P<whole>\d+)\s*)?\\frac\s*\{{\s*(?P<over>[-+]?{PLAIN})\s*\}}\s*\{{\s*(?P<under>[-+]?{PLAIN})\s*\}}
      | (?:(?P<whole_2>\d+)\s+)?(?P<over_2>{PLAIN})\s*/\s*(?P<under_2>[-+]?{PLAIN})
      | (?P<start>\d*\.\d*)\\overline\s*\{{\s*(?P<repeated>\d+)\s*\}}
      | (?:(?P<factor>{PLAIN})\s*×\s*)?10\s*(?P<power>{POWER})
      | (?P<plain>{PLAIN}(?:[eE][-+]?\d{{1,4}})?)
    )
    (?P<unit>\s*(?:[%¢]|°\s*[CF]?|(?:{UNITS})\b|\s(?!(?:{WORDS})\b)[A-Za-z][A-Za-z ./]+)(?:\^\{{?\d\}}?)?)?""",
    re.VERBOSE,
)
NO_EXPRESSION = re.compile(r"(?:[^\d\\^_+×/|(-]|(?<![A-Za-z])\()*")


@dataclass(frozen=True)
class _Number:
    """A number that is written as one; `divided` if it is a quotient of others."""

    value: Fraction
    divided: bool
    unit: str


@lru_cache(maxsize=4 * LONGEST_ANSWER)
def _number(text: str) -> _Number | None:
    r"""The number that a text is: with decimals, a fraction, a mixed number, a power of ten; None if it is another."""
    currency = CURRENCY.search(text)
    text, _, unit = CURRENCY.sub("", text).removeprefix("‡").partition("‡")
    for opening, closing in ("()", "{}") * 3:
        text = _inside(text.strip(), opening, closing) or text.strip()
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    if len(text) > 2 * LONGEST_ANSWER:
        raise TooLongError(f"a number of {len(text)} characters")
    part = match.groupdict()
    over, under = part["over"] or part["over_2"], Fraction(part["under"] or part["under_2"] or 1)
    if under == 0:
        return None
    value = Fraction(over or part["plain"] or part["factor"] or 1) / under + int(part["whole"] or part["whole_2"] or 0)
    if part["power"]:
        value *= Fraction(10) ** int(part["power"].strip("^{} "))
    elif part["repeated"]:
        decimals, period = len(part["start"].partition(".")[2]), part["repeated"]
        value = Fraction(f"0{part['start']}0") + Fraction(int(period), (10 ** len(period) - 1) * 10**decimals)
    unit = (part["unit"] or unit).lower()
    if re.search(rf"\b(?:{NO_UNITS})\b", unit):
        return None
    unit = "".join(_unit_word(word) for word in re.findall(r"[a-z\d%¢¤]+", unit)) or (
        CURRENCIES[currency[0]] if currency else ""
    )
    unit = re.sub(r"^sq(.+)", r"\g<1>2", unit)
    return _Number(-value if part["sign"] == "-" else value, over is not None, unit)


def _unit_word(word: str) -> str:
    word = word.removesuffix("s") if len(word) > 1 else word
    return UNIT_NAMES.get(word, word)


def _same_scalar(answer: str, expected: str) -> bool:
    number, wanted = _number(answer), _number(expected)
    if wanted is not None:
        return number is not None and _same_number(number, wanted)
    texts = _text(answer), _text(expected)
    if all(NO_EXPRESSION.fullmatch(each) for each in (answer, expected)):
        return texts[0] == texts[1]
    (answer, _, unit), (expected, _, wanted_unit) = (
        CURRENCY.sub("", each).partition("‡") for each in (answer, expected)
    )
    if unit and wanted_unit and _text(unit) != _text(wanted_unit):
        return False
    if (found := evaluated(answer, expected)) is None:
        return texts[0] == texts[1] != "" or _text(answer) == _text(expected) != ""
    values, tolerance, bits = found
    with mp.workprec(bits):
        return all(equal(ours, theirs, tolerance) for ours, theirs in zip(*values, strict=True))


def _same_number(number: _Number, wanted: _Number) -> bool:
    """Whether numbers and units are equal, if both have one; 50% is the same as 50 and as 0.5."""
    if number.unit and wanted.unit and number.unit != wanted.unit:
        return False
    if number.divided and not wanted.divided and wanted.value.denominator == 1:
        return False
    percent = (number.unit == "%") - (wanted.unit == "%")
    return number.value in (wanted.value, wanted.value * Fraction(100) ** percent)


def _text(text: str) -> str:
    text = re.sub(r"[\s{}‡¤€£¥°]", "", text)
    text = _inside(text, "(", ")") or text
    return text.casefold() if len(text) > 1 else text
