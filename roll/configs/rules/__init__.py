"""Checks of losses and advantages, which a report collects."""
