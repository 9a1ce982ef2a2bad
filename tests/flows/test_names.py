"""Names that a reader of Prefect's UI tells apart: of runs and of deployments."""

from __future__ import annotations

import pytest

from flows.deploy import recipe_deployments, stage_deployments
from flows.recipe import made_up


@pytest.mark.parametrize("name", ["lr-sweep", "baseline-large", "Baseline-Large", "dpo-run", "big-run", "new-data", "beta", "nightly", "first try", "Small-batch", "gold-standard-2"])
def test_a_name_that_a_person_typed_is_kept(name):
    assert not made_up(name)


def test_names_that_prefect_makes_up_are_known():
    from prefect.utilities.names import generate_slug

    assert all(made_up(generate_slug(2)) for _ in range(2000))
    assert made_up("Intelligent-Kudu") and made_up("Licensed-Uakari") and made_up("Small-Ape")  # of the UI's form


def test_every_deployment_has_a_name_of_its_own():
    names = [name for _, name, _ in [*recipe_deployments(), *stage_deployments()]]
    assert len(set(names)) == len(names) > 90
    assert {"post_training", "post_training-demo", "post_training-nightly", "tulu3-70b", "stage-sft"} <= set(names)
