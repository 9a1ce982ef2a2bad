"""Scores of models in this process and in a new interpreter."""

import json
import subprocess
import sys

import numpy as np
import torch

from stages.batching import collate
from stages.models.modeling import target_logps
from tests.training.test_invariance import text_items


def scores(model) -> list[float]:
    """Log-probs of the targets of the same rows."""
    with torch.inference_mode():
        return target_logps(model.eval(), collate(text_items(np.random.default_rng(0))))[0].tolist()


def scores_elsewhere(*models: str) -> list[list[float]]:
    """:func:`scores` of what these expressions make in an interpreter of its own; they may call PeftModel, load_frozen
    and load_policy.
    """
    program = (
        "import json\nfrom peft import PeftModel\nfrom stages.models.modeling import load_frozen, load_policy\nfrom"
        f" tests.training.fresh import scores\nprint(json.dumps([scores(m) for m in ({', '.join(models)},)]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
