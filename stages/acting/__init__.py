"""A policy over several turns: trajectories, environments, tools."""
