"""Import order of the folders, and docstrings of modules, classes and longer public functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.code_table import Code, imported_modules

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "roll"

ORDER = [
    "base",
    "hub",
    "models.families",
    "algorithms",
    "configs",
    "compat",
    "loading",
    "datasets",
    "sandbox",
    "rewards",
    "envs",
    "agents",
    "usercode",
    "trackers",
    "rollout",
    "gateway",
    "platforms",
    "models",
    "distributed",
    "plan",
    "pipeline",
    "tools",
    "report",
    "lab",
    "api",
    "serve",
]
"""A folder imports from those above it and from its own."""

LOADER = tuple(PACKAGE / "loading" / name for name in ("load.py", "reference.py", "yaml_files.py"))
"""The only files that import `roll.compat`, which knows the keys of this project."""

ENGINE_FREE = ORDER[: ORDER.index("platforms")]
"""Tested in milliseconds: no engine and no cluster is imported there."""

ENGINES = {"ray", "sglang", "megatron"}

COMMANDS = ("tools", "report", "lab", "serve")
"""Folders that only the command line imports."""

MARK = "pytest.mark.integration"

SELF_EXPLANATORY_LINES = 3
"""A public function with a body of at most this many lines may go without a docstring when its name explains it."""


CEILINGS = {
    "files at one level": 13,
    "files that take the whole configuration": 10,
    "functions over 50 lines": 7,
    "functions that only forward": 15,
    "names of several functions or classes": 0,
    "circles of folders": 0,
}
"""Largest values of rows of `scripts/code_table.py`; they are only ever lowered."""


@cache
def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imported_modules(list(ast.walk(tree_of(path)))))


def folder_of(path: Path) -> str:
    """The folder of ORDER that a file is in; modules outside of the folders (cli.py) may import everything."""
    return place_of(".".join(path.relative_to(ROOT).parent.parts))


def place_of(module: str) -> str:
    """The folder of ORDER that has a module or a package; empty if none has."""
    inside = [folder for folder in ORDER if f"{module}.".startswith(f"roll.{folder}.")]
    return max(inside, key=len, default="")


def type_checking_blocks(tree: ast.Module) -> set[ast.stmt]:
    """Statements under `if TYPE_CHECKING:`; nothing there runs."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {inner for block in blocks for each in block.body for inner in ast.walk(each) if isinstance(inner, ast.stmt)}


def imported(path: Path, at_run_time: bool = False) -> Iterator[tuple[int, str]]:
    """Line and module of every import in a file; those for type checking only are left out with `at_run_time`."""
    ignored = {node.lineno for node in type_checking_blocks(tree_of(path))} if at_run_time else set()
    yield from ((line, module) for line, module in imports_of(path) if line not in ignored)


def test_every_folder_is_in_the_import_order() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= set(ORDER)


def test_folders_import_only_from_above() -> None:
    wrong = []
    for path in files():
        folder = folder_of(path)
        for line, module in imported(path):
            place = place_of(module)
            if folder and place and ORDER.index(place) > ORDER.index(folder):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_imports_tools_and_lab() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files()
        if folder_of(path) not in COMMANDS and path != PACKAGE / "cli.py"
        for line, module in imported(path)
        if module.startswith(tuple(f"roll.{name}" for name in COMMANDS))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_loader_imports_the_translation_of_other_systems_keys() -> None:
    importers = {path for path in files() for _, module in imported(path) if module.startswith("roll.compat")}
    assert {path for path in importers if folder_of(path) != "compat"} == set(LOADER)


def test_folders_before_platforms_import_no_engine() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files()
        if folder_of(path) in ENGINE_FREE
        for line, module in imported(path)
        if module.split(".")[0] in ENGINES
    ]
    assert not wrong, "\n".join(wrong)


def test_hub_and_configs_do_without_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files()
        if folder_of(path) in {"hub", "configs"}
        for line, module in imported(path, at_run_time=True)
        if module.split(".")[0] in {"torch", "transformers", "tensordict", "numpy"}
    ]
    assert not wrong, "\n".join(wrong)


def public_items(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public functions and classes of a module, and the public methods of those classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (
                    method
                    for method in node.body
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not method.name.startswith("_")
                    and not any("overload" in ast.unparse(mark) for mark in method.decorator_list)
                )


def needs_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Classes always; functions and methods when their body is too long for the name to explain it."""
    if isinstance(node, ast.ClassDef):
        return True
    return (node.end_lineno or 0) - node.body[0].lineno + 1 > SELF_EXPLANATORY_LINES


def test_modules_classes_and_longer_public_functions_have_docstrings() -> None:
    missing = []
    for path in files():
        tree = tree_of(path)
        where = path.relative_to(ROOT)
        if not ast.get_docstring(tree):
            missing.append(f"{where}: the module")
        missing += [
            f"{where}:{node.lineno} {node.name}"
            for node in public_items(tree)
            if needs_docstring(node) and not ast.get_docstring(node)
        ]
    assert not missing, "\n".join(missing)


def test_every_folder_has_an_init_with_a_docstring() -> None:
    folders = {path.parent for path in files()}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_every_integration_test_file_is_marked() -> None:
    """A file without the mark is in neither `make test-fast`, which leaves the folder out, nor the other tests."""
    tests = sorted((ROOT / "tests/integration").glob("test_*.py"))
    assert [file.name for file in tests if MARK not in file.read_text()] == []


def test_what_the_table_of_the_code_counts_does_not_grow() -> None:
    code = Code(ROOT)
    found = {
        "files at one level": code.widest()[0],
        "files that take the whole configuration": len(code.whole_configuration()),
        "functions over 50 lines": len(code.long_functions()),
        "functions that only forward": len(code.forwarding()),
        "names of several functions or classes": len(code.repeated_names()),
        "circles of folders": len(code.circles()),
    }
    assert {name: count for name, count in found.items() if count > CEILINGS[name]} == {}
