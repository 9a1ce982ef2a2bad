"""A state directory of its own for every test; no MLflow unless a test asks for it."""

import pytest


@pytest.fixture(autouse=True)
def state_dir(tmp_path, monkeypatch):
    """POSTTRAIN_HOME in a fresh directory, projection off, no GPU slots."""
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POSTTRAIN_TRACKING", "off")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("POSTTRAIN_GPU_SLOTS", "MLFLOW_TRACKING_URI", "POSTTRAIN_DATASETS", "POSTTRAIN_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"
