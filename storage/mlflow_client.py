"""The connection to MLflow: a client for the present tracking address, its experiments, and whether the database is
still the one that was spoken to.
"""

from __future__ import annotations

import os
from typing import Any

from storage import home
from storage.files import atomic_write_json
from storage.mlflow_database import (
    hush,
    follow_home,
    identity,
    local_path,
    make_database,
    open_present,
    prepare_mlflow,
)
from storage.mlflow_text import experiment_note
from storage.outbox import document_lock, files_of, is_ours, tracking_uri, unit_lock


class Replaced(RuntimeError):
    """The database is another file than the one that was spoken to: nothing that this one said may be noted."""

    def __init__(self):
        super().__init__("MLflow's database was replaced by another file")


class Connection:
    """An MLflow store, and what is written down of it in this state directory."""

    def __init__(self) -> None:
        self._client: Any = None
        self._uri: str | None = None
        self._database: tuple[int, int] | None = None
        self._experiments: dict[str, str] = {}

    def client(self) -> Any:
        """An MlflowClient for the present tracking URI."""
        uri = tracking_uri()
        if self._client is None or uri != self._uri:
            prepare_mlflow()
            import mlflow
            from mlflow import MlflowClient

            given = {name: os.environ.get(name) for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")}
            mlflow.set_tracking_uri(uri)  # `models:/...` sources are looked up through the global address
            mlflow.set_registry_uri(uri)
            for name, value in given.items():  # mlflow exports what it is told; these variables stay what the user set
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            make_database(uri)
            follow_home(uri)
            with unit_lock("mlflow database", wait=True):  # two processes must not create the tables at once
                database = open_present(uri)
                client = MlflowClient(tracking_uri=uri, registry_uri=uri)
                client.search_experiments(max_results=1)
            hush()  # mlflow sets its own level when imported
            self._client, self._uri, self._database, self._experiments = client, uri, database, {}
        return self._client

    def connect(self) -> None:
        """Speak to the database that is there now: a damaged one is moved away while runs go on, and another process
        may have made the next.
        """
        if self.replaced():
            self._client = None
        self.client()

    def replaced(self) -> bool:
        return self._database is not None and identity(tracking_uri()) != self._database

    def check(self) -> None:
        """Called while what :func:`storage.outbox.forget` removes is locked."""
        if self.replaced():
            raise Replaced

    def keep(self, unit: str, cursor: dict[str, Any]) -> None:
        """Write down how far MLflow knows a unit."""
        with document_lock(unit):
            self.check()
            atomic_write_json(files_of(unit)[1], cursor)

    def experiment(self, recipe: str) -> str:
        """Id of the experiment of a recipe; made if missing."""
        name = f"posttrain/{recipe}"
        if name not in self._experiments:
            client = self.client()
            with unit_lock("experiment " + name, wait=True):
                found = client.get_experiment_by_name(name)
                if found is None:
                    # not behind the server, through which they are copied and without which they cannot be written
                    where = (home.subdir("mlartifacts") / recipe).as_uri() if is_ours(tracking_uri()) else None
                    self._experiments[name] = client.create_experiment(
                        name,
                        artifact_location=where,
                        tags={
                            "mlflow.experimentKind": "custom_model_development",
                            "mlflow.note.content": experiment_note(recipe),
                        },
                    )
                else:
                    if found.lifecycle_stage == "deleted":
                        client.restore_experiment(found.experiment_id)
                    place = local_path(found.artifact_location)
                    if place is not None and not is_ours(tracking_uri()) and not place.parent.is_dir():
                        raise RuntimeError(
                            f"the experiment {name} at {tracking_uri()} keeps its files at {place}, which is not on this"
                            " machine; share that POSTTRAIN_HOME, or give MLFLOW_TRACKING_URI a server that is not"
                            " another home's"
                        )
                    self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def logged_model(self, model_id: str) -> Any | None:
        """MLflow's logged model; None where it was deleted there."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client().get_logged_model(model_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
