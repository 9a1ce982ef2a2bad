"""Recipes, the command line, the deployments and the presets. Importing this package imports nothing heavy."""
