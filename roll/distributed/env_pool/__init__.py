"""A pool of worker processes that run environments: `pool` is used by rollouts, `server` runs in each worker process.

Imports roll.envs and roll.distributed. torch is not imported, because every worker process loads this package.
"""
