"""Fetches the models that a run gives by name to the other nodes; the driver fetches its own before Ray starts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.base.errors import RunError
from roll.configs.run_options import ProcessOptions
from roll.distributed.processes import process_environment
from roll.distributed.resources import Node, ResourceManager
from roll.hub.find import fetch_model
from roll.hub.names import HubError, gguf_file, hub_name
from roll.models.gguf_files import convert_gguf

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 15.0
"""Interval between log lines about nodes that are still fetching."""


async def fetch_on_nodes(models: Iterable[str], config: ProcessOptions, resources: ResourceManager) -> None:
    """Fetches models to the cache of every other node of the run, one process per node, all nodes at once.

    Raises:
        RunError: a node cannot fetch a model, or takes longer than `rpc_timeout_s`; the message names it.
    """
    names = [text for text in models if hub_name(text, "model") is not None or gguf_file(text) is not None]
    others = [node for node in resources.nodes if node.node_id != resources.this_node]
    if not names or not others:
        return
    logger.info("fetching %s on %d other nodes", ", ".join(names), len(others))
    await asyncio.gather(*(_fetch_on(node, names, config) for node in others))


async def _fetch_on(node: Node, names: list[str], config: ProcessOptions) -> None:
    task: Any = ray.remote(_fetch)
    call = task.options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        runtime_env={"env_vars": process_environment(config, 1)},
    ).remote(names)
    reply = asyncio.ensure_future(_reply(call))
    start = time.monotonic()
    try:
        while not (await asyncio.wait([reply], timeout=PROGRESS_INTERVAL_S))[0]:
            waited = time.monotonic() - start
            logger.info("node %s has been fetching %s for %d s", node.address, ", ".join(names), waited)
            if waited >= config.rpc_timeout_s:
                limit = f"rpc_timeout_s {config.rpc_timeout_s:g}"
                raise RunError(f"node {node.address} has not fetched {', '.join(names)} within {limit}; raise it")
    finally:
        if not reply.done():
            reply.cancel()
            ray.cancel(call, force=True)
    problem = reply.result()
    if problem:
        raise RunError(f"node {node.address}: {problem}")


async def _reply(call: Any) -> str:
    try:
        problem: str = await call
    except ray.exceptions.RayError as error:
        return f"the process that fetches models ended: {error}"
    return problem


def _fetch(names: list[str]) -> str:
    try:
        for name in names:
            convert_gguf(fetch_model(name), weights=True)
    except HubError as error:
        return str(error)
    return ""
