"""Secrets are replaced by `***` in what a run writes and prints: files, events, logs, and the configs of trackers.

Every module may import this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

SECRET_KEY = re.compile(
    r"passw|passphrase|secret|credential|cookie|authorization|((^|_)(pwd|auth|session_?id))$"
    r"|(api|access|account|signing|encryption|ssh|license|auth|private)_?key$"
    r"|(^|(access|api|auth|bearer|hf|hub|sdk|session|refresh|wandb|tracking|github)_?)token$",
    re.IGNORECASE,
)
"""Keys of a configuration whose values are secret; `prompt_key`, `pad_token` and `max_tokens` are not."""

SECRET_VARIABLE = re.compile(
    r"token|key|secret|passw|passphrase|pwd|credential|auth|cookie|session|private|header", re.IGNORECASE
)
"""Environment variables and headers whose values are secret."""

VARIABLES = re.compile(r"^system_envs$|headers$|^(env|environment)$", re.IGNORECASE)
"""Keys of environment variables and of headers."""

_NAME = (
    r"(?i:passw\w{0,9}|passphrase|pwd|secret\w{0,9}|credential|(?:api|access|account|private)[_-]?key|auth[_-]?token)"
)
_PARAMETER = r"[\w.-]{0,40}?(?i:token|key|secret|passw\w{0,9}|pwd|sig|signature|auth|credential|session)"
_IS = r"[\"']?\s{0,9}[=:]\s{0,9}[\"']?"

SECRET_TEXT = re.compile(
    r"(?P<user>(?<=://)[^/?#\s]*@|^[^/?#\s:@]+:[^/?#\s@]+@(?=[\w.-]+(:\d+)?/?$))"
    rf"|(?P<parameter>[?&]{_PARAMETER}=)[^&#\s\"']+"
    rf"|(?P<name>{_NAME}{_IS})(?!\*)[^\s,;&\"']+"
    rf"|(?P<header>(?i:authorization){_IS}(?:(?i:bearer|basic|digest|token)\s+)?+|Bearer\s)(?!\*)[^\s,;\"']+"
    r"|\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abps]-|AKIA)[\w-]{16,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
"""Secrets within texts: users and passwords of URLs, parameters, headers, and keys of known services."""


def redact(value: Any, secret: re.Pattern[str] = SECRET_KEY) -> Any:
    """A text, or nested mappings and lists, with `***` for secrets within texts and for the values of secret keys.

    Args:
        value: such as a line of a log, or a configuration.
        secret: keys whose values are secret; other ones apply below VARIABLES.
    """
    if isinstance(value, Mapping):
        return {
            name: HIDDEN
            if item and not isinstance(item, bool) and secret.search(str(name).replace("-", "_"))
            else redact(item, SECRET_VARIABLE if VARIABLES.search(str(name)) else secret)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item, secret) for item in value]
    return SECRET_TEXT.sub(_hidden, value) if isinstance(value, str) else value


def _hidden(found: re.Match[str]) -> str:
    if found["user"]:
        return f"{HIDDEN}@"
    return (found["parameter"] or found["name"] or found["header"] or "") + HIDDEN
