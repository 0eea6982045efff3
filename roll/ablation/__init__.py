"""Grids of runs that differ in policy loss, staleness and seed, and the tables and pictures made of them.

Uses `configs` and `trackers`, and asks `pipeline` what a run would refuse; the runs are processes of their own.
"""
