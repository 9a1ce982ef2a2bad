"""Scores of models in this process and in another one, which has computed nothing before."""

import json

import numpy as np
import torch

from stages.batching import collate
from stages.models.modeling import target_logps
from tests.training.test_invariance import text_items


def scores(model) -> list[float]:
    """Log-probs of the targets of the same rows."""
    with torch.inference_mode():
        return target_logps(model.eval(), collate(text_items(np.random.default_rng(0))))[0].tolist()


def scores_elsewhere(forks, *models: str) -> list[list[float]]:
    """:func:`scores` of what these expressions make in a process of its own; they may call PeftModel, load_frozen
    and load_policy.
    """
    group = forks.start(*models, target="tests.training.fresh:main")
    group.finish()
    return json.loads(group.processes[0].log.read_text().splitlines()[-1])


def main(*models: str) -> None:
    from peft import PeftModel

    from stages.models.modeling import load_frozen, load_policy

    known = {"PeftModel": PeftModel, "load_frozen": load_frozen, "load_policy": load_policy}
    print(json.dumps([scores(eval(model, known)) for model in models]), flush=True)
