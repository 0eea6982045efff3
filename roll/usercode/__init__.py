"""Processes that run the code of users and can be killed: reward functions and environments.

Imports roll.base, roll.configs, roll.datasets, roll.envs, roll.rewards and roll.sandbox; no torch and no engine.
"""
