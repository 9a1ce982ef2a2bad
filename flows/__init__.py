"""Recipes, the command line, the deployments and the presets. Importing this package imports nothing heavy, and has
Prefect, MLflow and the hub's clients send nothing, also where a recipe is called from Python.
"""

from flows.env import send_nothing

send_nothing()
