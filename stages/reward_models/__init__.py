"""Reward models: data, heads, objectives, scoring, evaluation."""
