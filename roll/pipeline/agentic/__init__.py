"""Reinforcement learning of agents: a policy talks with environments over several turns."""
