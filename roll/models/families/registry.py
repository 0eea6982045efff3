"""The known families: the package's own and the ones that modules of the user register."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from roll.base.custom_modules import load_custom_modules
from roll.models.families import known as built_in
from roll.models.families.chat_template import CHATML, NATIVE, NONE, ChatTemplate
from roll.models.families.family import ModelFamily

_found: tuple[ModelFamily, ...] = tuple(
    import_module(f"{built_in.__name__}.{module.name}").FAMILY for module in iter_modules(built_in.__path__)
)
_families = {family.architecture: family for family in _found}


def register_family(family: ModelFamily) -> None:
    """Makes a family of the user known.

    Raises:
        ValueError: its name or architecture is that of another family.
    """
    for other in _families.values():
        if family.name == other.name or family.architecture == other.architecture:
            raise ValueError(f"model family {family.name} of {family.architecture}: is known; use other names")
    _families[family.architecture] = family


def families() -> tuple[ModelFamily, ...]:
    """All families, in the order of their registration."""
    load_custom_modules()
    return tuple(_families.values())


def architectures() -> tuple[str, ...]:
    """The models that can be trained, by `architectures` in config.json."""
    return tuple(family.architecture for family in families())


def value_architectures() -> tuple[str, ...]:
    """Models of the same families whose output is a value, such as reward models: a critic can start from one."""
    return tuple(name for family in families() for name in family.value_architectures)


def family_of(architecture: str) -> ModelFamily:
    """The family of a language model or a value model."""
    known = {name: family for family in families() for name in (family.architecture, *family.value_architectures)}
    return known[architecture]


def family_named(name: str) -> ModelFamily:
    """The family of this name, such as llama."""
    return {family.name: family for family in families()}[name]


def chat_templates() -> dict[str, ChatTemplate]:
    """All built-in chat templates by name."""
    named = {"chatml": CHATML}
    for family in families():
        named |= family.templates
    return named


def template_names() -> tuple[str, ...]:
    """Values of `data_args.template`: `native` is the tokenizer's own, `none` leaves a text unchanged."""
    return NATIVE, NONE, *chat_templates()
