"""Files and modules that the documentation and the docstrings name exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    ROOT / "Makefile",
    ROOT / "pyproject.toml",
]
CODE = [path for folder in ("roll", "benchmarks", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")]

FILE = re.compile(
    r"(?<![\w./-])(?:roll|tests|benchmarks|examples|scripts|docs|requirements)(?:/[\w.-]+)*/(?!\w+-v\d)[\w.-]*\w"
)
"""A path from the root of the repository; not an id of gymnasium such as roll/Sokoban-v0."""

PYTHON_FILE = re.compile(r"(?<![\w./>-])\w+\.py\b")
"""A Python file without its folder."""

MODULE = re.compile(r"(?<![\w./-])(?<!worker_cls: )roll(?!\.egg)(?:\.[A-Za-z_]\w*)+")
"""A module of this package; `worker_cls` names classes of Alibaba's ROLL."""


def prose(path: Path) -> str:
    """The text of a page; of Python code, its docstrings and comments."""
    source = path.read_text()
    if path.suffix != ".py":
        return source
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    statements = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    docstrings = [node.value for node in statements if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*docstrings, *comments])


@cache
def python_files() -> set[str]:
    return {path.name for path in [*ROOT.glob("*.py"), *(ROOT / "tests").rglob("*.py"), *CODE]}


def names_of(module: Path) -> set[str]:
    """Names that a module defines or imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.alias):
            names.add(node.id if isinstance(node, ast.Name) else node.asname or node.name)
    return names


def module_exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name in a module."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file():
            return length == len(parts) or parts[length] in names_of(module)
    return False


def missing(path: Path) -> Iterator[str]:
    """Files and modules that a page or a module names and that do not exist."""
    text = prose(path)
    yield from (name for name in FILE.findall(text) if not (ROOT / name).exists())
    yield from (name for name in MODULE.findall(text) if not module_exists(name))
    if path.suffix == ".py":
        yield from (name for name in PYTHON_FILE.findall(text) if name not in python_files())


def test_named_files_and_modules_exist() -> None:
    found = {str(path.relative_to(ROOT)): list(missing(path)) for path in [*PAGES, *CODE]}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_module_without_the_name_does_not_exist() -> None:
    assert module_exists("roll.envs.TextEnv") and module_exists("roll.algorithms.options.policy_options")
    assert not module_exists("roll.envs.TextEnvironment") and not module_exists("roll.configs.names")
