"""The machine learning, one module per stage; runs without Prefect and without MLflow (``python -m stages
SPEC.json``).
"""
