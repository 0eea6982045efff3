"""Prints a table about the structure of the code: sizes, imports, and in how many places one thing is written.

    python scripts/code_table.py            (this checkout)
    python scripts/code_table.py FOLDER     (adds a column for another checkout)

Everything is read from the source with `ast`; nothing of the project is imported.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

DOORS = ("compat", "sandbox", "platforms", "lab")
"""Folders that only a part of the users need; the rest of the package does not import past their `__init__`."""

ASSEMBLY = ("configs", "compat", "loading", "plan", "lab", "tools")
"""Folders whose subject is a configuration as a whole."""

FIXED_NAMES = ("main", "run", "add_options", "SELF_TEST", "warm_up")
"""What every command has, and what a module of rewards may have: they are looked up by these names."""

MODULE = re.compile(r"roll(\.\w+)+(:\w+)?")
"""A module of the package, or an object in one."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Code:
    """The source of `roll/` in one checkout."""

    def __init__(self, root: Path) -> None:
        self.root, self.package = root, root / "roll"
        self.trees = {path: ast.parse(path.read_text()) for path in sorted(self.package.rglob("*.py"))}
        self.nodes = {path: list(ast.walk(tree)) for path, tree in self.trees.items()}
        self.functions = [(path, n) for path, nodes in self.nodes.items() for n in nodes if isinstance(n, Function)]

    def folder(self, path: Path) -> str:
        """First folder of a file inside `roll/`; empty for files outside of the folders."""
        parts = path.relative_to(self.package).parts
        return parts[0] if len(parts) > 1 else ""

    def lines(self, without: tuple[str, ...] = ()) -> int:
        """Lines of all files that are in none of these folders."""
        return sum(len(path.read_text().splitlines()) for path in self.trees if self.folder(path) not in without)

    def widest(self) -> tuple[int, str]:
        """Largest number of files in one folder, and the folder."""
        count = Counter(path.parent for path in self.trees)
        folder, number = count.most_common(1)[0]
        return number, str(folder.relative_to(self.root))

    def whole_configuration(self) -> list[Path]:
        """Files with a function that takes a whole configuration, outside of `ASSEMBLY`."""
        wholes = {"BaseConfig"}
        classes = [node for nodes in self.nodes.values() for node in nodes if isinstance(node, ast.ClassDef)]
        while more := {c.name for c in classes if {ast.unparse(base) for base in c.bases} & wholes} - wholes:
            wholes |= more
        taking = {
            path
            for path, node in self.functions
            for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if argument.annotation is not None
            and wholes & set(ast.unparse(argument.annotation).strip("'\"").replace(" ", "").split("|"))
        }
        return sorted(path for path in taking if self.folder(path) not in ASSEMBLY)

    def circles(self) -> list[set[str]]:
        """Groups of folders that import each other, at any distance; imports for type checking count too."""
        edges: dict[str, set[str]] = defaultdict(set)
        for path, nodes in self.nodes.items():
            for _, module in imported_modules(nodes):
                parts = module.split(".")
                if parts[0] == "roll" and len(parts) > 1 and (self.package / parts[1]).is_dir():
                    edges[self.folder(path)].add(parts[1])
        reached = {folder: _reachable(folder, edges) for folder in edges}
        groups = {frozenset(o for o in seen if f in reached.get(o, ())) | {f} for f, seen in reached.items() if f}
        return [set(group) for group in groups if len(group) > 1]

    def long_functions(self) -> list[Function]:
        """Functions of more than 50 lines."""
        return [node for _, node in self.functions if (node.end_lineno or 0) - node.lineno >= 50]

    def repeated_names(self) -> list[str]:
        """Public functions and classes that several modules have; `FIXED_NAMES` aside."""
        kinds = (ast.ClassDef, *Function.__args__)
        found = Counter(node.name for tree in self.trees.values() for node in tree.body if isinstance(node, kinds))
        return sorted(name for name, count in found.items() if count > 1 and name[0] != "_" and name not in FIXED_NAMES)

    def naming(self, name: str) -> list[Path]:
        """Files with the string `name` in their code."""
        return [
            path
            for path, nodes in self.nodes.items()
            if any(isinstance(node, ast.Constant) and node.value == name for node in nodes)
        ]

    def forwarding(self) -> list[str]:
        """Functions that only pass their own parameters, in their order, to another function."""
        return [
            f"{path.relative_to(self.root)}:{node.lineno} {node.name}"
            for path, node in self.functions
            if _forwards(node)
        ]

    def walk(self, name: str, parameter: str) -> list[tuple[Path, str]]:
        """Functions through which a parameter of the method `name` is passed on, found by the names of the callees."""
        by_name: dict[str, list[tuple[Path, Function]]] = defaultdict(list)
        for path, node in self.functions:
            by_name[node.name].append((path, node))
        visited: dict[tuple[Path, str, str], None] = {}
        todo = [(path, node, parameter) for path, node in by_name[name] if parameter in _names(node)]
        while todo:
            path, node, held = todo.pop()
            if (path, node.name, held) in visited:
                continue
            visited[path, node.name, held] = None
            same = _same(node, held)
            foreign = _foreign_names(self.trees[path])
            for call in (
                each for each in ast.walk(node) if isinstance(each, ast.Call) and _root(each.func) not in foreign
            ):
                callee = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                own = isinstance(call.func, ast.Name) and callee.startswith("_")  # a private function of this file
                targets = [target for target in by_name[callee] if target[0] == path or not own]
                for target_path, target in targets if len(targets) < 3 else []:
                    todo += [(target_path, target, each) for each in _received(call, target, same)]
        return list(dict.fromkeys((path, function) for path, function, _ in visited))


def imported_modules(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and module of every import of a file; with a call of `import_module` also the modules in its strings."""
    dynamic = any("import_module" in (getattr(node, "attr", ""), getattr(node, "id", "")) for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module
        elif dynamic and isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            yield node.lineno, str(node.value).partition(":")[0]


def _foreign_names(tree: ast.Module) -> set[str]:
    """Names that a file imports from other packages."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [
        node for node in imports if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("roll"))
    ]
    return {(alias.asname or alias.name).partition(".")[0] for node in others for alias in node.names}


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [*edges[start]]
    while todo:
        if (folder := todo.pop()) not in seen:
            seen.add(folder)
            todo += edges.get(folder, ())
    return seen


def _names(node: Function) -> list[str]:
    return [each.arg for each in [*node.args.posonlyargs, *node.args.args] if each.arg not in ("self", "cls")]


def _root(value: ast.expr) -> str:
    """The variable of an expression such as `batch`, `batch.data` or `batch.data["x"]`; empty for any other."""
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _same(node: Function, held: str) -> set[str]:
    """Variables of a function that are `held` or a part of it."""
    same = {held}
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and _root(each.value) in same:
            same |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    return same


def _received(call: ast.Call, target: Function, same: set[str]) -> Iterator[str]:
    """Parameters of `target` that get one of these variables in this call."""
    for name, value in zip(_names(target), call.args, strict=False):
        if _root(value) in same:
            yield name
    yield from (keyword.arg for keyword in call.keywords if keyword.arg and _root(keyword.value) in same)


def _forwards(node: Function) -> bool:
    body = [each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or not _names(node):
        return False
    value = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(value, ast.Call):
        return False
    passed = [ast.unparse(each) for each in [*value.args, *(keyword.value for keyword in value.keywords)]]
    return passed == _names(node) and node.name != "__init__"


@cache
def table(root: Path) -> dict[str, str]:
    """The rows: what is counted, and its value."""
    code = Code(root)
    lengths = [node.end_lineno - node.lineno + 1 for _, node in code.functions if node.end_lineno]
    width, folder = code.widest()
    batch = code.walk("learn", "batch")
    keys = code.walk("build_config", "tree")
    tests = sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py"))
    return {
        "lines of roll/": f"{code.lines():,}",
        "lines without " + ", ".join(DOORS): f"{code.lines(DOORS):,}",
        "files": str(len(code.trees)),
        "most files at one level": f"{width} ({folder})",
        "files that take the whole configuration": str(len(code.whole_configuration())),
        "median and longest function": f"{statistics.median(lengths):.0f}, {max(lengths)}",
        "functions over 50 lines": str(len(code.long_functions())),
        "names of several functions or classes": str(len(code.repeated_names())),
        "circles of folders": str(len(code.circles())),
        "files that name one policy loss (cispo)": str(len(code.naming("cispo"))),
        "files that name one model family (qwen3)": str(len(code.naming("qwen3"))),
        "functions and files that a batch is passed through": f"{len(batch)}, {len({path for path, _ in batch})}",
        "functions and files that keys are passed through": f"{len(keys)}, {len({path for path, _ in keys})}",
        "functions that only forward": str(len(code.forwarding())),
        "lines of tests": f"{tests:,}",
    }


def main() -> None:
    """Prints the table of this checkout, beside the one that the command names."""
    roots = [Path(folder) for folder in sys.argv[1:]] + [Path(__file__).parents[1]]
    print("| |" + " |" * len(roots) + "\n|---" + "|---" * len(roots) + "|")
    for name in table(roots[-1]):
        print(f"| {name} | " + " | ".join(table(root)[name] for root in roots) + " |")


if __name__ == "__main__":
    main()
