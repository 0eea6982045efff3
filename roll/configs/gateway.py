"""The gateway, an OpenAI endpoint through which agents call the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.base.schema import Condition, option

FOR_AGENTS = Condition(
    lambda config, _: any(entry.is_agent for entry in config.custom_envs.values()),
    "no entry of custom_envs has agent or command",
    ("custom_envs",),
)


@dataclass
class GatewayOptions:
    """How requests of agents are read and answered."""

    tool_parser: str = option(
        "auto",
        "How tool calls are read from answers: auto, which follows the chat template; hermes (Qwen), llama3_json, or a "
        "parser of SGLang by name.",
    )
    reasoning_parser: str | None = option(
        None, "How thoughts are read from answers: a parser of SGLang by name, such as qwen3; null: they stay content."
    )
    request_sampling: Literal["run", "strict"] = option(
        "run",
        "What happens when a request asks for another temperature, top_p, top_k or penalty than the run's: run: it is "
        "sampled as the run samples; strict: it is an error.",
    )
    processes: int = option(1, "Processes that serve; each has a share of the sessions.", ge=1, usual=(1, 64))
