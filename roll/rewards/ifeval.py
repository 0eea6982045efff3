"""Reward of instructions that a program can verify, with the names of IFEval (arXiv 2311.07911) or those of ROLL."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from roll.base.text import nearest
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import SelfTest, without_reasoning
from roll.rewards.instructions import IFEVAL, ROLL

ID_COLUMN, KWARGS_COLUMN = "instruction_id_list", "kwargs"
"""Columns of a row in IFEval's format: the names of instructions, and their arguments in the same order."""

INSTRUCTIONS: dict[str, Callable[..., bool]] = IFEVAL | ROLL

SELF_TEST: SelfTest = (
    ("No stops here", '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}', True),
    ("Well, no", '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}', False),
    ("all small", '{"func_name": "validate_lowercase", "N": null}', True),
    ("Not small", '{"func_name": "validate_lowercase", "N": null}', False),
)


def ifeval_reward(response: str, ground_truth: Any, row: Mapping[str, Any], config: RewardConfig) -> dict[str, float]:
    """Score between `wrong_score` and `correct_score`, and the metric `followed`, the share of instructions followed.

    With `reward_type: strict` a response is right if it follows every instruction; with `soft` the score is the share.
    An empty response follows nothing. What precedes `</think>` does not count.

    Args:
        response: the decoded response.
        ground_truth: JSON: `{"instruction_id_list": [...], "kwargs": [{...}, ...]}` as in IFEval, `{"func_name": ...}`
            with its arguments as in ROLL, or a list of either. Unused if the row has `instruction_id_list`.
        row: the columns `instruction_id_list` and `kwargs`, as lists or as JSON.
        config: `reward_type`, `correct_score` and `wrong_score` are used.

    Raises:
        ValueError: there are no instructions, or one is not known or lacks an argument.
    """
    text = without_reasoning(response).strip()
    followed = [bool(text) and _follows(text, name, arguments) for name, arguments in instructions(ground_truth, row)]
    share = sum(followed) / len(followed)
    counted = share if config.reward_type == "soft" else float(share == 1)
    return {"score": config.share_score(counted), "followed": share}


def instructions(ground_truth: Any, row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of every instruction of a prompt; see `ifeval_reward`.

    Raises:
        ValueError: there are none, or their format is another.
    """
    if row.get(ID_COLUMN) is not None:
        found = _of_ifeval(row)
    else:
        given = _from_json(ground_truth, "the ground truth")
        items = given if isinstance(given, list) else [given]
        if not all(isinstance(item, dict) for item in items):
            raise ValueError(f"the ground truth {str(ground_truth)[:100]!r} holds no instructions of IFEval or ROLL")
        found = [pair for item in items for pair in _of_item(item)]
    if not found:
        raise ValueError(f"there are no instructions in the column {ID_COLUMN} or the ground truth")
    return found


def _of_item(item: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if "func_name" in item:
        return [(str(item["func_name"]), _given({key: value for key, value in item.items() if key != "func_name"}))]
    return _of_ifeval(item)


def _of_ifeval(item: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Instructions of an object with a list of names, or one name, and a list of arguments."""
    names = next((item[key] for key in (ID_COLUMN, "instruction_id", "id") if item.get(key) is not None), None)
    if isinstance(names, str):
        names = _from_json(names, ID_COLUMN) if names.lstrip().startswith("[") else [names]
    arguments = item.get(KWARGS_COLUMN)
    if isinstance(arguments, str):
        arguments = _from_json(arguments, KWARGS_COLUMN)
    if isinstance(arguments, Mapping):
        arguments = [arguments]
    for given in (names, arguments):
        if given is not None and not isinstance(given, Iterable):
            raise ValueError(f"the instructions {dict(item)!r} need a list of names and one of arguments")
    names = list(names) if names is not None else []
    arguments = list(arguments) if arguments is not None else [{}] * len(names)
    if len(names) != len(arguments) or not all(isinstance(each, Mapping | None) for each in arguments):
        raise ValueError(f"{len(names)} instructions need as many objects in {KWARGS_COLUMN}, not {arguments!r}")
    return [(str(name), _given(each or {})) for name, each in zip(names, arguments, strict=True)]


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}


def _from_json(text: Any, where: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} {text[:100]!r} is not JSON with instructions of IFEval or ROLL") from None


def _checked(name: str, value: Any, check: Callable[..., bool]) -> Any:
    """An argument as its annotation says; JSON may write a whole number as 2.0.

    Raises:
        TypeError: it is of another kind, or an empty text.
    """
    kind = check.__annotations__[name]
    value = value.tolist() if hasattr(value, "tolist") else value
    if kind == "Sequence[str]":
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(x, str) for x in value)
        if not is_list:
            raise TypeError(f"{name} is {value!r}, and a list of texts is needed")
    elif kind == "str":
        if not isinstance(value, str) or not value:
            raise TypeError(f"{name} is {value!r}, and a text is needed")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{name} is {value!r}, and a number is needed")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _follows(text: str, name: str, arguments: dict[str, Any]) -> bool:
    check = INSTRUCTIONS.get(name)
    if check is None:
        like = nearest(name, INSTRUCTIONS)
        raise ValueError(f"the instruction {name!r} is not known" + (f"; did you mean {like}?" if like else ""))
    code = check.__code__
    wanted = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    try:
        given = {key: _checked(key, value, check) for key, value in arguments.items() if key in wanted}
        return bool(check(text, **given))
    except (TypeError, ValueError, re.error, AttributeError) as error:
        raise ValueError(f"the instruction {name} cannot be checked with {arguments}: {error}") from error
