"""Adapters from catalogue vectors to the functions of this project; see tests/vectors.py."""
