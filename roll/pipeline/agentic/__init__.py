"""Reinforcement learning of agents: trajectories of several turns in text environments."""
