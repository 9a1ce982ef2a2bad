"""Settings of the training stages in combination: axes read off the schemas, covering arrays over them, tiny runs in
float64, and what a run must agree with.

A setting enters by itself: every Literal with all its values, every flag with both, every number with its default and
another that its bounds allow. :data:`VALUES` says more where the schema cannot (texts, lists, numbers that mean
something at a tiny size), :data:`LEFT_OUT` why a setting has one value only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from stages.algorithms import DIRECT_METHODS
from stages.harness import execute
from stages.registry import get_stage
from stages.spec import ConfigError
from tests.architectures import BASE, MODELS, build
from tests.common import assistant, silent, user

LOW = (
    "rounds, so that no two computations agree to the last digits (tests/training/test_frozen.py, test_quantised.py,"
    " test_options.py)"
)
#: Settings that keep their default here, and why.
LEFT_OUT = {
    "device_memory_gib": "cannot change a result",
    "memory_check": "cannot change a result",
    "max_nonfinite_steps": "read after a non-finite step only",
    "sharding": "of several devices (tests/training/test_distributed.py)",
    "compute_dtype": LOW,
    "frozen_dtype": LOW,
    "save_dtype": LOW,
    "chat_template": "names a file (tests/training/test_chat_template.py)",
    "chat_template_digest": "filled in by itself",
    "chat_template_kwargs": "variables of a template",
    "teacher_chat_template": "names a file (tests/training/test_across.py)",
    "teacher_chat_template_digest": "filled in by itself",
    "new_tokens": "of a template (tests/training/test_chat_template.py)",
    "also": "losses in sum (tests/training/test_align_terms.py)",
    "split": "names other rows",
    "outcome_token": "names a token",
    "step_separator": "a text of the rows",
    "label_words": "words of a tokenizer",
    "eval_prompts": "of the input reward_model",
    "eval_completion_length": "of the input reward_model",
    "replay_fraction": "of the input replay",
    "drift_alarm": "of the input previous",
    "stage_index": "picks rows",
    "init_head": "of a reward model that goes on",
    "spoiled_by": "names probes",
    "probe_pairs": "a measurement after training",
}
#: Values of settings by stage (or of all, ``""``), the first the one that most runs have.
VALUES: dict[tuple[str, str], list] = {
    ("", "learning_rate"): [1e-3, 1e-2],
    ("", "batch_size"): [5, 3, 64],
    ("", "num_train_epochs"): [1.0, 1.5],
    ("", "max_steps"): [4, None, 1],
    ("", "max_length"): [512, 72],
    ("", "max_tokens_per_micro_batch"): [4096, 90],
    ("", "lora_rank"): [0, 3],
    ("", "lora_targets"): ["all-linear", "q_proj,v_proj"],
    ("", "lora_exclude"): ["", "o_proj"],
    ("", "lora_modules_to_save"): ["", "lm_head"],
    ("", "eval_every"): [0, 2],
    ("", "report_samples"): [0, 2],
    ("", "eval_rows"): [512, 3, 0],
    ("", "select_by"): [None, "loss"],
    ("", "early_stopping_patience"): [0, 1],
    ("", "optimizer"): ["adamw", "adamw_8bit", "sgd", "adafactor", "muon"],
    ("", "momentum"): [None, 0.9],
    ("", "forward"): ["auto", "own", "model"],
    ("", "max_grad_norm"): [1.0, 0.01],
    ("", "warmup_steps"): [None, 0, 2],
    ("", "router_aux_loss_coef"): [None, 0.02, 0.0],
    ("", "lora_dropout"): [0.0, 0.2],
    ("", "weight_decay"): [0.0, 0.1],
    ("", "ema_decay"): [0.0, 0.7],
    ("", "bema"): [None, {"update_freq": 1, "lag": 2.0, "ema_power": 0.7}],
    ("sft", "eval_every"): [0, 2, "epoch"],
    ("sft", "neftune_noise_alpha"): [None, 5.0],
    ("sft", "self_paced_threshold"): [None, 5.7],
    ("sft", "self_paced_threshold_end"): [None, 8.0],
    ("sft", "unlikelihood_window"): [32, 2],
    ("sft", "loss_scale_factor"): [None, 20.0],
    ("align", "beta"): [None, 0.3],
    ("align", "options"): [
        {},
        {"nll_on_prompt": True},
        {"aligned": True},
        {"label_smoothing": 0.2},
        {"desirable_weight": 1.4},
        {"momentum": 0.5},
        {"average": True},
    ],
    ("align", "aspect_weights"): [{}, {"a": 0.75, "b": 0.25}],
    ("align", "reference_interval"): [512, 2],
    ("align", "reference_bema"): [{}, {"update_freq": 1, "lag": 3.0, "bias_power": 0.5}],
    ("align", "ld_alpha"): [None, 0.4],
    ("align", "nll_coef"): [None, 0.5],
    ("align", "logp_reduction"): [None, "mean", "sum"],
    ("align", "nll_reduction"): [None, "seq-mean", "seq-sum", "token-mean"],
    ("distill", "eval_every"): [0, 2, "epoch"],
    ("distill", "context"): [None, "be brief", "a good answer is: {answer}", "{prompt} as {answer}"],
    ("distill", "teacher_decay"): [0.95, 0.5],
    ("distill", "distillation_temperature"): [1.0, 2.0],
    ("distill", "lmbda"): [0.5, 1.0],
    ("distill", "sampling_temperature"): [0.9, 1e-6],
    ("distill", "max_completion_length"): [128, 6],
    ("reward_model", "attributes"): [[], ["help", "truth"]],
    ("reward_model", "attribute_weights"): [[], [0.7, 0.3]],
    ("reward_model", "top_ranks"): [None, 2],
    ("reward_model", "last_layers"): [2, 1],
}
#: What a run also differs in; the model first. ``data`` names a variant of the rows.
MODELS_HERE = ("llama", "llama tied", "qwen3", "gemma2", "olmoe", "gpt-neox", "gpt2")
ADDED: dict[str, dict[str, list]] = {
    "sft": {"model": list(MODELS_HERE), "data": ["demonstrations/1", "text/1"]},
    "align": {"model": list(MODELS_HERE), "given": ["nothing", "reference"]},
    "distill": {
        "model": list(MODELS_HERE),
        "given": ["teacher", "nothing"],
        "data": ["demonstrations/1", "teacher_logps/1"],
    },
    "reward_model": {"model": [*MODELS_HERE, "bert"]},
}
TOP_K = 6
#: Kind of rows by objective of a reward model, and by what a direct method reads.
REWARD_ROWS = {
    "kwise_pairs": "rankings/1",
    "plackett_luce": "rankings/1",
    "pointwise_bce": "unpaired/1",
    "orm": "unpaired/1",
    "regression": "ratings/1",
    "value": "ratings/1",
    "prm": "stepwise/1",
}
DIRECT_ROWS = {
    "pairs": "pairs/1",
    "conditions": "pairs/1",
    "unpaired": "unpaired/1",
    "rankings": "rankings/1",
    "segments": "segments/1",
}


# -- axes --------------------------------------------------------------------------------------------------------------


def values_of(stage: str, name: str, field) -> list:
    """The values of a setting in the sweep; one value: it is not swept."""
    for key in ((stage, name), ("", name)):
        if key in VALUES:
            return VALUES[key]
    default = field.get_default(call_default_factory=True)
    if name in LEFT_OUT:
        return [default]
    choices = list(_choices(field.annotation))
    if choices:
        return [default, *(c for c in choices if c != default)]
    kind = next((t for t in _types(field.annotation) if t in (int, float)), None)
    if kind is None:
        raise LookupError(
            f"{stage}.{name}: {field.annotation} says no values; name some in VALUES, or say in LEFT_OUT why it has one"
        )
    return [default, _another(kind, default, field.metadata)]


def _types(annotation) -> Iterator[type]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from _types(part)


def _choices(annotation) -> Iterator:
    if annotation is bool:
        yield from (False, True)
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    elif typing.get_origin(annotation) is not list:
        for part in typing.get_args(annotation):
            yield from _choices(part)


def _another(kind: type, default, bounds):
    """A number other than the default that the bounds allow."""
    low = max((b.ge if isinstance(b, Ge) else b.gt for b in bounds if isinstance(b, (Ge, Gt))), default=0)
    high = min((b.le if isinstance(b, Le) else b.lt for b in bounds if isinstance(b, (Le, Lt))), default=math.inf)
    for value in (2, 1, 3) if kind is int else (0.3, 0.5, 2.0, 0.05):
        if value != default and low <= value <= high and (value not in (low, high)):
            return kind(value)
    return kind(low if default != low else low + 1)


def axes(stage: str) -> dict[str, list]:
    """Setting -> values, for all of a stage that have several."""
    fields = get_stage(stage).SPEC.config.model_fields
    found = {**ADDED[stage], **{name: values_of(stage, name, field) for name, field in fields.items()}}
    return {name: values for name, values in found.items() if len(values) > 1}


# -- covering arrays ---------------------------------------------------------------------------------------------------


def settings_of(stage: str, combination: dict) -> dict:
    """The configuration of a combination: what is not the schema's default."""
    fields = get_stage(stage).SPEC.config.model_fields
    return {
        name: value
        for name, value in combination.items()
        if name in fields and value != fields[name].get_default(call_default_factory=True)
    }


def refused(stage: str, combination: dict) -> str | None:
    """Why the schema and the method's own rules refuse a combination; None where they take it."""
    config = get_stage(stage).SPEC.config
    try:
        made = config(**settings_of(stage, combination))
        if stage == "align":
            from stages.direct.direct_alignment import DirectAlignment

            DirectAlignment(made, combination["given"] == "reference")
        if stage == "distill":
            captured = combination["data"] == "teacher_logps/1"
            if captured and (
                combination["given"] == "teacher" or made.method != "logit" or made.train_on != "all_assistant"
            ):
                raise ValueError("data, given, train_on: the teacher was asked already; write method=logit")
            if captured and made.objective != "divergence":
                raise ValueError("data: only the likeliest tokens are known; write objective=divergence")
            if made.tail != "bucket" and (not captured or made.direction != "forward"):
                raise ValueError("data, direction: the whole vocabulary has no tail; write tail=bucket")
            if not captured and combination["given"] == "nothing" and made.context is None:
                raise ValueError("given: no teacher; write method=context")
            if combination["given"] == "teacher" and made.teacher_update != "frozen":
                raise ValueError("given, teacher_update: it does not follow; leave teacher out")
        if stage == "reward_model":
            if combination["model"] == "olmoe":
                raise ValueError("model: no class of transformers")
            if combination["anchor"] in ("demonstrations", "generations") or combination["lora_modules_to_save"]:
                raise ValueError("anchor: no such input, lora_modules_to_save: no such module")
            if combination["model"] != "bert" and combination["pooling"] == "cls":
                raise ValueError("pooling, model: a decoder")
            from stages.reward_models.reward_objectives import refuse_unread

            refuse_unread("bt" if made.objective == "auto" else made.objective, made)
        if (
            stage == "sft"
            and combination["data"] == "text/1"
            and (combination["train_on"] != "full" or combination["curriculum"] == "difficulty")
        ):
            raise ValueError("plain text: write train_on=full, curriculum=none")
        if combination["forward"] == "own" and combination["model"] in ("gpt2", "gpt-neox", "bert"):
            raise ValueError("forward, model: unknown to our forward")
        if combination["model"] != "olmoe" and combination["router_aux_loss_coef"]:
            raise ValueError("router_aux_loss_coef, model: no experts")
        if combination["model"] in ("llama tied", "gemma2", "gpt2") and combination["lora_modules_to_save"]:
            raise ValueError("lora_modules_to_save, model: tied")
    except (ValidationError, ConfigError, ValueError) as error:
        return str(error)
    return None


def repaired(stage: str, combination: dict, pinned: set[str], all_axes: dict, rng, tries: int = 25) -> dict | str:
    """A combination with the pinned values that is taken, settings named in refusals put back one by one or changed;
    else the last refusal.
    """
    combination, said = dict(combination), ""
    for _ in range(tries):
        said = refused(stage, combination)
        if said is None:
            return combination
        named = [n for n in all_axes if n not in pinned and re.search(rf"\b{re.escape(n)}\b", said)]
        changed = [n for n in named if combination[n] != all_axes[n][0]]
        written = {n: v for n, v in re.findall(r"write (\w+)=([\w.-]+)", said) if n in named}
        if changed and (not written or rng.random() < 0.7):
            name = changed[rng.integers(len(changed))]
            combination[name] = (
                all_axes[name][0] if rng.random() < 0.7 else all_axes[name][rng.integers(len(all_axes[name]))]
            )
        elif named:
            name = named[rng.integers(len(named))]
            combination[name] = all_axes[name][rng.integers(len(all_axes[name]))]
        elif stage == "align" and "method" not in pinned:
            combination["method"] = all_axes["method"][rng.integers(len(all_axes["method"]))]
        else:
            return said
    return said


def covering(stage: str, rng, limit: int, busy: float = 0.25) -> tuple[list[dict], dict]:
    """(combinations that together hold as many pairs of values as ``limit`` of them can, {pair: refusal} of those that
    no combination was found for).

    busy: share of the settings that are drawn, the others keep their first value.
    """
    all_axes = axes(stage)
    names = list(all_axes)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(all_axes[a]))
        for j in range(len(all_axes[b]))
    }
    found, impossible = [], {}

    def of(combination):
        at = [
            (n, next(i for i, v in enumerate(all_axes[n]) if v == combination[n] and type(v) is type(combination[n])))
            for n in names
        ]
        return {(x, y) for x, y in itertools.combinations(at, 2)}

    while open_pairs and len(found) < limit:
        candidates = []
        listed = sorted(open_pairs, key=repr)
        for _ in range(4):
            pair = listed[rng.integers(len(listed))]
            pinned = {n: all_axes[n][i] for n, i in pair}
            drawn = {
                n: values[rng.integers(len(values))] if rng.random() < busy else values[0]
                for n, values in all_axes.items()
            } | pinned
            made = repaired(stage, drawn, set(pinned), all_axes, rng)
            if isinstance(made, str):
                made = repaired(
                    stage, {n: values[0] for n, values in all_axes.items()} | pinned, set(pinned), all_axes, rng
                )
            if isinstance(made, str):
                impossible[pair] = made
                open_pairs.discard(pair)
            else:
                candidates.append((made, of(made) & open_pairs))
        if candidates:
            made, covered = max(candidates, key=lambda one: len(one[1]))
            open_pairs -= covered
            found.append(made)
    return found, impossible


# -- rows and models ---------------------------------------------------------------------------------------------------


def rows_of(kind: str, n: int = 18) -> list[dict]:
    """Rows of uneven length, several turns, system messages, weights, ties, equal texts and probabilities; every third
    is for validation.
    """
    from storage.schema import complete_row

    words = "two plus what is answer four or so the fine hm".split()

    def said(i, k, most=9):
        rng = np.random.default_rng((i, k, len(kind)))
        return " ".join(rng.choice(words, 1 + rng.integers(most))) + f" {i}"

    def prompt(i):
        turns = user(said(i, 0))
        if i % 4 == 1:
            turns = [{"role": "system", "content": "be short"}, *turns]
        if i % 4 == 2:
            turns = [*turns, *assistant(said(i, 1, 4)), *user(said(i, 2, 4))]
        return turns

    def weight(i):
        return {1: 2.0, 2: 0.5, 3: 0.0 if i == 13 else 1.0}.get(i % 5, 1.0)

    def aspects(i):
        return [
            {"aspect": "help", "score": 1.0 + i % 5},
            *([{"aspect": "truth", "score": 2.0 + i % 3}] if i % 4 else []),
        ]

    def segments(text, i):
        middle = text.index(" ") + 1
        return [
            {"start": 0, "end": middle, "scores": [{"aspect": "a", "score": 0.1 + 0.1 * (i % 5)}]},
            {
                "start": middle,
                "end": len(text),
                "scores": [{"aspect": "a", "score": 0.9}, {"aspect": "b", "score": 0.4}],
            },
        ]

    def demonstration(i):
        messages = [*prompt(i), *assistant(said(i, 3))] + (
            [*user("go on"), *assistant(said(i, 4, 5))] if i % 3 == 0 else []
        )
        return {
            "messages": messages,
            "train_turns": [k for k, m in enumerate(messages) if m["role"] == "assistant"][-1 if i % 6 == 0 else 0 :],
            "extra_json": json.dumps({"difficulty": 1.0 + i % 4}),
        }

    make = {
        "demonstrations/1": demonstration,
        "text/1": lambda i: {"text": " ".join(said(i, k) for k in range(4)), "n_chars": 1},
        "pairs/1": lambda i: {
            "prompt": prompt(i),
            "chosen": assistant(said(i, 3)),
            "rejected": assistant(said(i, 3 if i == 7 else 4, 16)),
            "margin": 0.2 * (i % 3),
            "label_prob": {4: 0.5, 5: None}.get(i, 0.6 + 0.02 * i),
            "chosen_score": 2.0 + 0.1 * i,
            "rejected_score": 2.4 if i % 6 == 4 else 1.0,
            "rank_gap": 1 + i % 3,
            "stage_index": i % 2,
            "extra_json": json.dumps({"reference": said(i, 5)}),
        },
        "unpaired/1": lambda i: {
            "prompt": prompt(i // 2),
            "completion": assistant(said(i, 3)),
            "label": i % 2 == 0,
            "label_kind": "thumbs",
        },
        "rankings/1": lambda i: {
            "prompt": prompt(i),
            "completions": [assistant(said(i, k)) for k in range(3, 6 + i % 2)],
            "ranks": [2, 1, 3, 3][: 3 + i % 2],
            "scores": [0.6, 0.9, 0.2, 0.2][: 3 + i % 2],
        },
        "ratings/1": lambda i: {
            "prompt": prompt(i),
            "completion": assistant(said(i, 3)),
            "score": 1.0 + i % 5,
            "scale_min": 1.0,
            "scale_max": 5.0,
            "aspects": aspects(i),
            "ann": {"annotator_id": "ab"[i % 2]},
        },
        "stepwise/1": lambda i: {
            "prompt": prompt(i),
            "completions": [said(i, k, 4) for k in range(3, 6)],
            "labels": [[1, 1, 0], [1, -1, 1], [0, 1, 1]][i % 3],
        },
        "segments/1": lambda i: {
            "prompt": prompt(i),
            "chosen": assistant("well " + said(i, 3)),
            "rejected": assistant("no " + said(i, 4)),
            "offset_unit": "char",
            "chosen_segments": segments("well " + said(i, 3), i),
            "rejected_segments": segments("no " + said(i, 4), i + 1),
        },
    }[kind]
    return [
        complete_row(
            kind,
            {**make(i), "weight": weight(i)},
            dataset="made",
            source="s",
            origin="human",
            split="validation" if i % 3 == 2 else "train",
        )
        for i in range(n)
    ]


class World:
    """Models with one tokenizer and rows of every kind under ``root``."""

    def __init__(self, root: Path):
        from tests.evaluation.conftest import tiny_policy

        self.root = root
        self.tokenizer = tiny_policy(str(root / "tokenizer"), 0)
        self._made: dict[str, str] = {}

    def model(self, name: str, seed: int = 0) -> str:
        key = f"{name}-{seed}".replace(" ", "-")
        if key not in self._made:
            self._made[key] = str(self.root / key)
            made = bert(self.tokenizer) if name == "bert" else architecture(name, self.tokenizer)
            if seed:
                with torch.no_grad():
                    for i, parameter in enumerate(made.parameters()):
                        parameter.add_(
                            0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + i))
                        )
            made.save_pretrained(self._made[key])
            self.tokenizer.save_pretrained(self._made[key])
            if name == "bert":
                end = self.tokenizer.eos_token
                tokenizer = transformers.AutoTokenizer.from_pretrained(self._made[key])
                tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                    single=f"<|endoftext|> $A {end}",
                    pair=f"<|endoftext|> $A {end} $B:1 {end}:1",
                    special_tokens=[("<|endoftext|>", 0), (end, self.tokenizer.eos_token_id)],
                )
                tokenizer.save_pretrained(self._made[key])
        return self._made[key]

    def data(self, kind: str, rows=None, name: str = "") -> str:
        from storage.datasets import write_dataset

        key = (name or "rows") + "-" + kind.replace("/", "-")
        if key not in self._made:
            self._made[key] = str(self.root / key)
            write_dataset(self._made[key], "made", kind, rows_of(kind) if rows is None else rows)
        return self._made[key]

    def captured(self, teacher: str, temperature: float) -> str:
        """What the stage ``capture`` makes of the demonstrations, :data:`TOP_K` tokens of every position."""
        workdir = self.root / f"captured-{Path(teacher).name}-{temperature:g}"
        if not workdir.exists():
            with float64():
                run(
                    "capture",
                    {"top_k": TOP_K, "distillation_temperature": temperature},
                    {"model": teacher, "data": self.data("demonstrations/1")},
                    workdir,
                )
        return str(workdir / "out/captured")

    def inputs(self, stage: str, combination: dict) -> dict[str, str]:
        """Paths of a combination's inputs."""
        if stage == "distill":
            teacher = self.model(combination["model"], 1)
            found = {"model": self.model(combination["model"]), "data": self.data("demonstrations/1")}
            if combination["data"] == "teacher_logps/1":
                found["data"] = self.captured(teacher, combination["distillation_temperature"])
            return found | ({"teacher": teacher} if combination["given"] == "teacher" else {})
        if stage == "sft":
            kind = combination["data"]
        elif stage == "align":
            kind = DIRECT_ROWS[DIRECT_METHODS[combination["method"]].data]
        else:
            kind = REWARD_ROWS.get(combination["objective"], "pairs/1")
        found = {"model": self.model(combination["model"]), "data": self.data(kind)}
        return found | (
            {"reference": self.model(combination["model"], 1)} if combination.get("given") == "reference" else {}
        )


def architecture(name: str, tokenizer):
    family, more = MODELS[name]
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    if family == "GPT2":
        torch.manual_seed(3)
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=1024, resid_pdrop=0.1, **ids
            )
        )
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(4.0) if parameter.ndim >= 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    else:
        made = build((family, more), vocab_size=len(tokenizer), num_hidden_layers=BASE["num_hidden_layers"], **ids)
    made.generation_config.eos_token_id = tokenizer.eos_token_id
    return made


def bert(tokenizer):
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    return transformers.BertModel(config)


# -- runs --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def float64():
    """Stages load their models in float64; experts through code that takes it."""
    from stages.models import pending, products

    load, prefers = pending.load, products.prefers_onednn

    def wide(*args, **options):
        model = load(*args, **{**options, "dtype": torch.float64})
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "_experts_implementation"):
                module.config._experts_implementation = "eager"
        return model

    linear = torch.nn.Linear.float
    pending.load, products.prefers_onednn, torch.nn.Linear.float = wide, lambda: False, lambda module: module.double()
    try:
        yield
    finally:
        pending.load, products.prefers_onednn, torch.nn.Linear.float = load, prefers, linear


class Killed(BaseException):
    """The process ends here."""


def run(stage: str, settings: dict, inputs: dict, workdir: Path, kill_after: int | None = None, seed: int = 5) -> dict:
    """A stage run in this process; ``kill_after``: it ends as soon as that many checkpoints are written."""
    from stages.harness import Stage

    given = {
        k: {
            "kind": "model" if k in ("model", "reference", "reward_model", "teacher") else "dataset",
            "path": v,
            "ref": k,
            "digest": f"digest-{Path(v).name}",
        }
        for k, v in inputs.items()
    }
    spec = {
        "stage": stage,
        "key": "sweep",
        "config": settings,
        "seed": seed,
        "device": "cpu",
        "inputs": given,
        "workdir": str(workdir),
    }
    save, done = Stage.save_checkpoint, []

    def counted(self, *args, **more):
        save(self, *args, **more)
        done.append(1)
        if kill_after is not None and len(done) >= kill_after:
            raise Killed

    Stage.save_checkpoint = counted
    try:
        return execute(spec, silent)
    finally:
        Stage.save_checkpoint = save


def weights(workdir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        key: value
        for file in sorted((workdir / "out/model").glob("*.safetensors"))
        for key, value in load_file(file).items()
    }


def metrics(workdir: Path) -> list[dict]:
    """Logged rows: {"step": number, **metrics}, texts ("nan") as numbers."""
    file = workdir / "metrics.jsonl"
    return (
        [
            {"step": row["step"], **{k: float(v) for k, v in row["metrics"].items()}}
            for row in map(json.loads, file.read_text().splitlines())
        ]
        if file.exists()
        else []
    )


def ranked(stage: str, settings: str, inputs: str, workdir: str) -> None:
    """One process of a run on ranks (tests/processes.py); settings and inputs as JSON."""
    torch.set_num_threads(1)
    with float64():
        run(stage, json.loads(settings), json.loads(inputs), Path(workdir))
