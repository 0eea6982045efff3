"""Environments in processes of their own: the pool that hands them out, its workers, and what travels between them.

Imports roll.envs and roll.distributed, and nothing else of the pipeline; torch stays out, for every worker loads this.
"""

from roll.pipeline.agentic.environments.hosted import Env
from roll.pipeline.agentic.environments.pool import EnvPool
from roll.pipeline.agentic.environments.types import EnvFailure, EnvSpec, EnvWorkerError, Opened, Stepped

__all__ = ["Env", "EnvFailure", "EnvPool", "EnvSpec", "EnvWorkerError", "Opened", "Stepped"]
