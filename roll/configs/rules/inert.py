"""No key is ignored in silence: what was given and has no effect is said."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from roll.configs.effects import ELSEWHERE, INERT, MISLEADING, role_reads
from roll.configs.errors import Report
from roll.configs.pipeline import BaseConfig


def check_inert(config: BaseConfig, report: Report) -> None:
    """Reports every key that was given a value other than its default and has no effect in this configuration."""
    defaults = type(config)()
    for path in config.source.given:
        if _value(config, path) == _value(defaults, path):
            continue
        if not role_reads(path):
            reason = next(
                (why for pattern, why in ELSEWHERE.items() if fnmatchcase(path, pattern)), "this role does not read it"
            )
            _say(report, path, reason, any(fnmatchcase(path, pattern) for pattern in MISLEADING))
            continue
        for inert in INERT:
            if any(fnmatchcase(path, pattern) for pattern in inert.keys) and inert.when(config):
                _say(report, path, inert.reason, inert.misleads)
                break


def _say(report: Report, path: str, reason: str, misleads: bool) -> None:
    if misleads:
        report.error(path, f"has no effect: {reason}")
    else:
        report.warn(path, f"has no effect: {reason}")


def _value(config: Any, path: str) -> Any:
    value = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value
