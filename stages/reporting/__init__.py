"""Figures and tables of reports."""
