"""Modules of the user that register a model family or another part, so that a run needs no change of this package.

`custom_modules` of a configuration names them; an installed package has an entry point of the group `roll_modules`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

GROUP = "roll_modules"
"""Group of entry points; the value of one is a module."""

CUSTOM_MODULES = "ROLL_CUSTOM_MODULES"
"""Environment variable by which every process of a run knows the modules of its configuration, separated by commas."""

_loaded: set[str] = set()


def use_custom_modules(names: Sequence[str]) -> None:
    """Imports these modules, here and in the processes that are started from here."""
    os.environ[CUSTOM_MODULES] = ",".join(names)
    load_custom_modules()


def load_custom_modules() -> None:
    """Imports the modules of the configuration and of installed packages, each once."""
    named = [name for name in os.environ.get(CUSTOM_MODULES, "").split(",") if name]
    for name in (*named, *_installed()):
        if name not in _loaded:
            _loaded.add(name)  # before the import, which may ask for what is registered
            try:
                importlib.import_module(name)
            except BaseException:
                _loaded.discard(name)
                raise


def named_object(name: str) -> Any:
    """The value that `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _installed() -> tuple[str, ...]:
    return tuple(point.value for point in entry_points(group=GROUP))
