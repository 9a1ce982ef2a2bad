"""Sampling: the contract of engines and the three behind it, log-probabilities of given answers."""
