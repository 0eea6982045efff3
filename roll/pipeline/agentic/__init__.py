"""Agents: trajectories of many turns, played between engines and environments."""
