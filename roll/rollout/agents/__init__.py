"""Rollouts of agents: episodes of many turns between engines and environments."""
