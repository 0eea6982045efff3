"""Reinforcement learning with verifiable rewards: prompts, groups of responses, scores, advantages."""
