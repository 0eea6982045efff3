"""A role written for vLLM, and the same role for SGLang."""

from __future__ import annotations

from typing import Any

import yaml

from roll.configs.aliases import Tree
from roll.configs.errors import Problem

OPTIONS = {
    "gpu_memory_utilization": "mem_fraction_static",
    "block_size": "page_size",
    "load_format": "load_format",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "chunked_prefill_size",
    "enforce_eager": "disable_cuda_graph",
    "kv_cache_dtype": "kv_cache_dtype",
}
"""vLLM option -> SGLang option with the same meaning."""

ROLE_OPTIONS = {"tensor_parallel_size": "num_gpus_per_worker", "max_num_seqs": "max_running_requests"}
"""vLLM option -> key of the role."""


def vllm_problems(tree: Tree) -> list[Problem]:
    """One problem for each role whose engine is vLLM, with its block rewritten for SGLang."""
    problems = []
    for role, section in tree.items():
        strategy = section.get("strategy_args") if isinstance(section, dict) else None
        if isinstance(strategy, dict) and strategy.get("strategy_name") == "vllm":
            block, dropped = sglang_block(section)
            text = yaml.safe_dump({role: block}, sort_keys=False).rstrip()
            left = f"\nwithout equivalent, left out: {', '.join(dropped)}" if dropped else ""
            where = f"{role}.strategy_args.strategy_name"
            problems.append(Problem(where, f"vllm is not an engine here; use sglang. The same block:\n{text}{left}"))
    return problems


def sglang_block(section: Tree) -> tuple[Tree, list[str]]:
    """The keys of a role that change from vLLM to SGLang, and the options that have no equivalent."""
    given = section["strategy_args"].get("strategy_config")
    options: dict[str, Any] = given if isinstance(given, dict) else {}
    role: Tree = {}
    engine: Tree = {}
    dropped: list[str] = []
    for name, value in options.items():
        if name in ROLE_OPTIONS:
            role[ROLE_OPTIONS[name]] = value
        elif name in OPTIONS:
            engine[OPTIONS[name]] = value
        elif name == "enable_prefix_caching":
            engine["disable_radix_cache"] = not value
        else:
            dropped.append(name)
    strategy: Tree = {"strategy_name": "sglang", "strategy_config": engine}
    return {**role, "strategy_args": strategy}, dropped
