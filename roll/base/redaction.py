"""Secrets are replaced by `***` in what a run writes and prints: files, events, logs, and the configs of trackers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

PLAIN = r"passw|passphrase|secret(?!ar)|credential|(^|_)pwd$|(api|access|account|private)_?keys?$|auth_?token$"
SPECIAL = (
    "(pad|eos|bos|eot|eod|unk|unknown|mask|sep|cls|stop|start|begin|end|image|video|audio|vision|think|special|max|min"
    "|per|num|new|first|last|next|prev|previous|prompt|response|added|decoder|by|each|text|tool|extra)_token"
)
SECRET_KEY = (
    rf"{PLAIN}|cookie|authorization|(^|_)(pass|pat|jwt|bearer|otp|auth|session_?id)$|(^|_)webhook(_ur[il])?$"
    r"|(login|master|storage|hmac|write|service|subscription|client|private|access|api|account|ssh|signing|encryption"
    rf"|license|auth)_?key(s|_id)?$|^(?!(.*_)?{SPECIAL}$).*token$"
)
"""Names whose values are secret, in lower case, with `_` between words; `pad_token` and `max_tokens` are not.

Those of PLAIN are secret also in a sentence such as `password: x`.
"""

SECTIONS = {
    r"^(system_envs|envs?|env_?vars?|environ|environment(_?variables)?)$|headers?$": (
        rf"{PLAIN}|token(?!i)|key|pwd|auth(?!ors?(_|$))|cookie|session|private|header|webhook"
        r"|(^|_)(pass|pat|jwt|bearer|otp|pin|salt|signature)(_|$)"
    ),
    r"^(tracker_kwargs|wandb|swanlab|mlflow|comet|clearml|neptune|trackio)$": (
        rf"{SECRET_KEY}|(^|_)(keys?|login)$|^(?!(.*_)?{SPECIAL}s$).*tokens$"
    ),
}
"""Names of sections -> the names below them whose values are secret."""

_PARAMETER = r"[\w.-]{0,40}?(?i:token|key|secret|passw\w{0,9}|pwd|sig|signature|auth|credential|session)"
_IS = r"[\"']?\s{0,9}[=:]\s{0,9}[\"']?"
ASSIGNED = re.compile(rf"(?<![\w.-])(--?)?(?P<name>\w[\w.-]{{0,199}})(?P<is>{_IS}|(?(1)\s{{1,9}}[\"']?|(?!)))")
VALUE = re.compile(
    r"(?!\*|-|(?i:bearer|basic|digest)\s)([\[{][^\]}\n]+|(?<=\")[^\"\n]+|(?<=')[^'\n]+"
    r"|[^\s,;&\"']+?(?=\}{0,3}(?:[\s,;&\"']|$)))"
)
NUMBER = re.compile(r"[\d.,e+-]+(?![^\s;&\"')}\]])")
SECRET_TEXT = re.compile(
    r"((?<=://)[^/?#\s]*(?=@)|^[^/?#\s:@]+:[^/?#\s@]+(?=@[\w.-]+(:\d+)?/?$))"
    rf"|(?P<parameter>[?&]{_PARAMETER}=)[^&#\s\"']+"
    rf"|(?P<header>(?i:authorization){_IS}(?:(?i:bearer|basic|digest|token)\s+)?+|Bearer\s)(?!\*)[^\s,;\"']+"
    r"|(?P<login>(?<!\S)(?:-u|--user|--proxy-user)[\s=][\"']?[^\s:/]{1,80}:(?!\d+\s)|\bmachine\s\S{1,99}\slogin\s"
    r"\S{1,99}\spassword\s|\b(?:mysql\w{0,9}|sshpass)\s(?:[^\n]{0,99}\s)?-p\s?)(?!\*)[^\s\"']+"
    r"|(?P<webhook>hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)(?!\*)[^\s\"']+"
    r"|\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abps]-|AKIA|[rs]k_(?:live|test)_|whsec_)[\w-]{16,}"
    r"|\bAIza[\w-]{30,}|\bnpm_[A-Za-z0-9]{24,}|\bpypi-(?=[\w-]{0,40}[A-Z])[\w-]{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
"""Secrets within texts: users and passwords of URLs, parameters, headers, logins, and keys of known services."""


def redact(value: Any, secret: str = SECRET_KEY) -> Any:
    """A text, or nested mappings and lists, with `***` for secrets in texts and for the values of `secret` names."""
    if isinstance(value, Mapping):
        header = value.get("name", value.get("key"))
        names = {key: str(header) if key == "value" and header else str(key) for key in value}
        return {
            key: HIDDEN if _is_secret(names[key], item, secret) else redact(item, _below(str(key), secret))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        flags = [name if isinstance(name, str) and name.startswith("-") else "" for name in ("", *value)]
        return [HIDDEN if _is_secret(*at, secret) else redact(at[1], secret) for at in zip(flags, value, strict=False)]
    return _redact_text(value, secret) if isinstance(value, str) else value


def _below(path: str, secret: str) -> str:
    found = [keys for part in path.lower().split(".") for names, keys in SECTIONS.items() if re.search(names, part)]
    return found[-1] if found and secret != PLAIN else secret


def _is_secret(path: str, value: Any, secret: str) -> bool:
    section, _, name = path.rpartition(".")
    words = re.sub(r"(?<=[a-z\d])(?=[A-Z])|[^A-Za-z\d]+", "_", name).strip("_").lower()
    count = words.endswith(("token", "tokens", "pass")) and NUMBER.match(str(value))
    return bool(value and not isinstance(value, bool) and not count and re.search(_below(section, secret), words))


def _redact_text(text: str, secret: str) -> str:
    text, parts, end = SECRET_TEXT.sub(lambda found: "".join(filter(None, found.groups()[2:])) + HIDDEN, text), [], 0
    for found in ASSIGNED.finditer(text):
        secret = _below(found["name"], secret) if text[found.end() : found.end() + 1] == "{" else secret
        mapping = text[max(0, found.start() - 9) : found.start()].rstrip(" \"'").endswith(("{", ","))
        sentence = found["is"].rstrip().endswith(":") and not mapping and secret == SECRET_KEY
        names = PLAIN if sentence else secret
        if found.start() >= end and _is_secret(found["name"], text[found.end() : found.end() + 40], names):
            if value := VALUE.match(text, found.end()):
                parts += [text[end : value.start()], HIDDEN]
                end = value.end()
    return "".join(parts) + text[end:]
