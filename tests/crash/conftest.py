"""A state directory of its own for every test; no MLflow unless a test asks for it."""

from tests.platform.conftest import state_dir  # noqa: F401
