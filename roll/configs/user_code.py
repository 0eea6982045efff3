"""Code that a configuration names as `module:name`: where it is searched, how it is imported, and where it failed."""

from __future__ import annotations

import ast
import importlib
import inspect
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from roll.base.text import nearest

MAX_MESSAGE_LENGTH = 500
"""Characters of an exception's message that are shown."""

NOTICE_S = 10.0
"""A trial of the user's code that takes longer is announced: some code takes long, other code hangs."""

PLACE = re.compile(r"\S+\.py:\d+: ")
"""How an error begins that names the place in the user's code itself."""

OWN_FOLDER = str(Path(__file__).resolve().parents[1]) + os.sep
"""Folder of this package; its frames are not the user's."""

INSTALLED = ("stdlib", "purelib", "platlib", "scripts")
LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in INSTALLED})
"""Folders of Python and of installed packages; their frames are the user's only where nothing else is."""


class UserCodeError(ValueError):
    """Named code does not exist, cannot be imported or fails; the message begins with the user's file and line.

    Attributes:
        missing: the module, or one that it imports, is not on this machine; another machine may have it.
    """

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


def search_modules_beside(config_file: str | Path) -> None:
    """Lets a configuration name modules of the current folder and of its own folder.

    Both come last on the import path, so that a file of the user replaces no installed module. The processes of a run
    search where this one does, and none of them the current folder first.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    for folder in (os.getcwd(), os.path.dirname(os.path.abspath(config_file))):
        if folder not in sys.path:
            sys.path.append(folder)


def names_code(name: str) -> bool:
    """Whether a name has the form `module:attribute`."""
    module, colon, attribute = name.partition(":")
    parts = module.split(".")
    return bool(colon and attribute.isidentifier() and all(map(str.isidentifier, parts)) and parts[-1] != "py")


def import_named(name: str, fits: Callable[[Any], bool]) -> tuple[ModuleType, Any]:
    """The module and the value that `module:name` names.

    Args:
        name: of the form `module:name`.
        fits: whether a value can be what is wanted; such values are offered where the name does not exist.

    Raises:
        UserCodeError: the form is wrong, the import fails, or the module has no such value.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserCodeError(f"{name!r}: write module:name")
    if module_name.endswith(".py"):
        module_name = module_name.removesuffix(".py").rpartition("/")[2]
        raise UserCodeError(f"{name!r}: write module:name, here {module_name}:{attribute}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserCodeError(failure_text(error), missing=True) from error
        raise UserCodeError(_not_found(name, error.name), missing=True) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also sys.exit, and panics of extensions in Rust
        raise UserCodeError(failure_text(error), missing=isinstance(error, ImportError)) from error
    found = getattr(module, attribute, None)
    if not fits(found):
        raise UserCodeError(_does_not_fit(name, module, attribute, found, fits))
    return module, found


def names_in(module: str) -> list[str] | None:
    """Names that the source of a module binds anywhere, without importing it; None if they are not all known."""
    try:
        found = find_spec(module) if "." not in module else None
        tree = ast.parse(Path(found.origin or "").read_bytes()) if found is not None else None
    except (ImportError, OSError, ValueError, SyntaxError):
        return None
    names: list[str] = []
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.alias):
            names.append(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return None if tree is None or {"*", "__getattr__"}.intersection(names) else names


def failure_text(error: BaseException, called: Any = None) -> str:
    """`file:line: class: message` with the line of code below it, of the innermost frame in the user's own code.

    Args:
        error: as raised.
        called: function or class of the user. Its definition is the location of an error outside the user's code, such
            as that of a call with other arguments; without it, such an error has no location.
    """
    message = f"{type(error).__name__}: {_text_of(error)}".rstrip(": ")
    if len(message) > MAX_MESSAGE_LENGTH:
        message = f"{message[:MAX_MESSAGE_LENGTH]}..."
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return _at(error.filename, error.lineno, f"{type(error).__name__}: {error.msg}")
    frame = users_frame(error)
    if frame is not None:
        return _at(frame.filename, frame.lineno or 1, message)
    text = message.removeprefix(f"{type(error).__name__}: ")
    if PLACE.match(text):
        return text
    return f"{definition_of(called)}: {message}".removeprefix(": ")


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"its text cannot be made: {type(failure).__name__}"


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of an error in the user's own code, if it passed through any."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if is_users_file(frame.filename)), None)


@contextmanager
def report_if_slow(what: str) -> Iterator[None]:
    """Prints what the user's code does and where it is, once, if the block takes longer than NOTICE_S seconds."""
    timer = threading.Timer(NOTICE_S, _print_location, (what, threading.get_ident()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_location(what: str, thread: int) -> None:
    current = sys._current_frames().get(thread)
    if current is None:
        return  # the block has just ended
    frames = traceback.extract_stack(current)
    frame = next((frame for frame in reversed(frames) if is_users_file(frame.filename)), None)
    text = f"{what} has taken {NOTICE_S:g} s so far"
    print(text if frame is None else _at(frame.filename, frame.lineno or 1, text), file=sys.stderr, flush=True)


def definition_of(code: Any) -> str:
    """`file:line` where a function or class is defined; empty if Python does not know it."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(code))
        line = inspect.getsourcelines(inspect.unwrap(code))[1]
    except (TypeError, OSError, ValueError):
        return ""
    return f"{shown_path(file)}:{max(line, 1)}" if file else ""


def shown_path(file: str) -> str:
    """The path as a user would write it: relative to the current folder if it is below it."""
    inside = os.path.relpath(file)
    return file if inside.startswith(os.pardir) else inside


def user_folders() -> list[str]:
    """Folders of the import path that are neither Python's nor those of installed packages.

    That of this project, from a clone, is one only where it is the current folder: files of the user may be there.
    """
    folders = [os.path.abspath(entry) for entry in sys.path if os.path.isdir(entry or os.curdir)]
    others = [folder for folder in dict.fromkeys(folders) if not f"{os.path.realpath(folder)}/".startswith(LIBRARIES)]
    return [folder for folder in others if f"{folder}/roll/" != OWN_FOLDER or folder == os.getcwd()]


def is_users_file(file: str) -> bool:
    """Whether a source file belongs neither to this package nor to Python and what is installed in it."""
    if file.startswith("<"):
        return False
    real = os.path.realpath(file)
    return not real.startswith((OWN_FOLDER, *LIBRARIES))


def _at(file: str, line: int, message: str) -> str:
    code = linecache.getline(file, line).strip()
    return f"{shown_path(file)}:{line}: {message}" + (f"\n    {code}" if code else "")


def _not_found(name: str, missing: str) -> str:
    folders = user_folders()
    files = [Path(folder, entry) for folder in folders for entry in sorted(os.listdir(folder)) if entry.endswith(".py")]
    package, _, last = missing.rpartition(".")
    like = nearest(last, [file.stem for file in files])
    hint = f"; did you mean {like}?" if like else ""
    hiding = next((file for file in files if file.stem == package and file.with_suffix("").is_dir()), None)
    if hiding is not None:
        hint = f"; {shown_path(str(hiding))} hides the folder of the same name"
    return f"{name!r}: there is no module {missing}{hint} (searched {', '.join(folders)}, and installed packages)"


def _does_not_fit(name: str, module: ModuleType, attribute: str, found: Any, fits: Callable[[Any], bool]) -> str:
    file = getattr(module, "__file__", None)
    where = shown_path(file) if file else module.__name__
    own = [key for key, value in vars(module).items() if not key.startswith("_") and fits(value)]
    own = [key for key in own if getattr(getattr(module, key), "__module__", module.__name__) == module.__name__]
    like = nearest(attribute, own)
    kind = "class" if isinstance(found, type) else type(found).__name__
    problem = f"has no {attribute}" if found is None else f"has {attribute}, which is a {kind}"
    hint = f"; did you mean {like}?" if like else ""
    offered = f"; it has {', '.join(own)}" if own else ""
    relative = Path(*module.__name__.split("."))
    twins = [str(twin) for folder in user_folders() if (twin := Path(folder, relative.with_suffix(".py"))).is_file()]
    hidden = [shown_path(twin) for twin in twins if file is None or not os.path.samefile(twin, file)]
    other = f"; {hidden[0]} has the same name and is not used, rename it" if hidden else ""
    return f"{where}: {name!r}: the module {problem}{hint}{offered}{other}"
