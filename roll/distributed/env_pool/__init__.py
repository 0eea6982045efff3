"""A pool of worker processes that run environments: `pool` is used by rollouts, `server` runs in each worker process.

Imports roll.envs, roll.distributed and roll.usercode.containment. torch is not imported, because every worker process
loads this package.
"""
