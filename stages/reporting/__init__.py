"""Figures and tables of reports. What is measured comes from ``stages.measures`` and the stages.

``reports``       figures, tables and Markdown as pure functions
``curves``        the report that every training stage ends with
``former_names``  what metrics were called before they had TRL's names
"""
