"""Reinforcement learning with verifiable rewards: groups of responses to prompts, scored by reward functions."""
