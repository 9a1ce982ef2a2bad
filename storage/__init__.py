"""Ground floor: Parquet datasets, models, records, checkpoints, leases, the MLflow projection. Knows no other layer."""
