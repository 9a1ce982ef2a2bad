"""TRL's trainers on given rows, step by step: what :mod:`tests.peers.our_side` is compared with.

Both sides have the same weights in float64, the same rows in the same order, AdamW and gradient clipping. A run gives
one :class:`Run`: loss, gradient norm, clipped gradient and weights of every optimizer step. RL gets its completions and
rewards given.
"""

from __future__ import annotations

import json
import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

STEPS, ROWS = 3, 4


@dataclass
class Run:
    """Of each optimizer step; ``batches``: the token ids, labels and masks of every micro-batch; here the items of
    every step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    batches: list[dict] = field(default_factory=list)

    def step(self, loss, norm, rate, model) -> None:
        self.losses.append(float(loss))
        self.norms.append(float(norm))
        self.rates.append(float(rate))
        self.gradients.append(flat(model, "grad"))
        self.weights.append(flat(model))


def flat(model, what: str = "data") -> torch.Tensor:
    """All parameters (or their gradients) as one vector, by name, so that both sides have one order."""

    def part(p):
        found = p.grad if what == "grad" else p.data
        return torch.zeros(p.numel(), dtype=p.dtype) if found is None else found.detach().clone().flatten()

    return torch.cat([part(p) for name, p in sorted(model.named_parameters()) if p.requires_grad])


def arguments(folder, **more) -> dict:
    """Arguments of a TRL config that make its run the same as ours: one process, float32 kept, no dropout, no
    shuffling, a constant learning rate, clipping that is felt.
    """
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "disable_tqdm": True,
        "seed": 0,
        **more,
    }


def in_order(kind):
    """A trainer class that takes its rows as they come."""
    from torch.utils.data import SequentialSampler

    class InOrder(kind):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    return InOrder


def train(trainer, by_step: bool = False, published=None) -> Run:
    """Run a constructed trainer and take down its steps; the loss is the sum over its micro-batches, as it goes into
    the backward. ``by_step``: the trainer has no compute_loss. ``published``: gives the model whose weights are taken
    down, where that is not the trained one.
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    run, seen = Run(), SimpleNamespace(loss=0.0, norm=0.0, gradients=None)
    compute, clip = trainer.compute_loss, torch.nn.utils.clip_grad_norm_

    def compute_loss(model, inputs, *args, **kwargs):
        run.batches.append(
            {k: inputs[k].tolist() for k in ("input_ids", "labels", "completion_mask", "completion_ids") if k in inputs}
        )
        loss = compute(model, inputs, *args, **kwargs)
        seen.loss += float(loss.detach())
        return loss

    def clipped(parameters, max_norm, *args, **kwargs):
        found = clip(parameters, max_norm, *args, **kwargs)
        seen.norm = float(found)
        return found

    class Steps(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
            seen.rate = trainer.optimizer.param_groups[0]["lr"]
            seen.gradients = flat(trainer.accelerator.unwrap_model(trainer.model), "grad")

        def on_step_end(self, args, state, control, model=None, **kwargs):
            run.losses.append(seen.loss)
            run.norms.append(seen.norm)
            run.rates.append(seen.rate)
            run.gradients.append(seen.gradients)
            run.weights.append(
                flat(trainer.accelerator.unwrap_model(trainer.model) if published is None else published())
            )
            seen.loss = 0.0

    whole = trainer.training_step

    def training_step(*args, **kwargs):
        loss = whole(*args, **kwargs)
        seen.loss += float(loss)
        return loss

    if by_step:
        trainer.training_step = training_step
    else:
        trainer.compute_loss = compute_loss
    trainer.add_callback(Steps())
    trainer.remove_callback(PrinterCallback)
    with patched(torch.nn.utils, "clip_grad_norm_", clipped):
        trainer.train()
    return run


@contextlib.contextmanager
def patched(where, name, value):
    kept = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, kept)


def model_of(path: str, every_token: bool = True):
    """``every_token``: the pad token's embedding learns too, where a text or a sample holds it; transformers' models
    leave it out of every gradient.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    if every_token:
        model.get_input_embeddings().padding_idx = None
    return model


def tokenizer_of(path: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def dataset_of(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


def sft(path, rows, folder, **settings) -> Run:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**arguments(folder, **{"max_length": 256, "shuffle_dataset": False, **settings}))
    return train(
        in_order(SFTTrainer)(
            model_of(path), args=config, train_dataset=dataset_of(rows), processing_class=tokenizer_of(path)
        )
    )


def averaged_sft(path, rows, folder, **constants) -> Run:
    """SFT with BEMACallback; the weights are those that it saves. Its copy of the model is made as float32."""
    from trl import BEMACallback, SFTConfig, SFTTrainer

    average = BEMACallback(**constants)
    config = SFTConfig(**arguments(folder, max_length=256, shuffle_dataset=False, assistant_only_loss=True))
    return train(
        in_order(SFTTrainer)(
            model_of(path),
            args=config,
            train_dataset=dataset_of(rows),
            processing_class=tokenizer_of(path),
            callbacks=[average],
        ),
        published=lambda: average.running_model,
    )


def averaged_reference(path, reference, rows, folder, **constants) -> Run:
    """DPO whose reference becomes what the callback of ``trl.experimental.bema_for_ref_model`` averages."""
    from trl import DPOConfig
    from trl.experimental.bema_for_ref_model import BEMACallback, DPOTrainer

    return train(
        in_order(DPOTrainer)(
            model_of(path),
            ref_model=model_of(reference),
            args=DPOConfig(**arguments(folder, max_length=256)),
            train_dataset=dataset_of(rows),
            processing_class=tokenizer_of(path),
            callbacks=[BEMACallback(**constants)],
        )
    )


def tpo(path, rows, folder, **settings) -> Run:
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    config = TPOConfig(**arguments(folder, **{"max_length": 256, **settings}))
    return train(
        in_order(TPOTrainer)(
            model_of(path), args=config, train_dataset=dataset_of(rows), processing_class=tokenizer_of(path)
        )
    )


def a2po(path, reference, iterations, folder, limit: int, **settings) -> Run:
    """A*-PO on given completions, one of each prompt, and given rewards behind V*, which the trainer computes itself.

    Args:
        iterations: as for :func:`on_policy`, with ``behind``: the rewards of the reference's completions of the prompt.
    """
    from trl.experimental.a2po import A2POConfig, A2POTrainer

    rows = [
        {
            "prompt": f"prompt {'-'.join(map(str, given['prompt_ids'][i]))}",
            **{name: given[name][i] for name in ("prompt_ids", "completion_ids", "rewards", "behind")},
        }
        for given in iterations
        for i in range(len(given["prompt_ids"]))
    ]
    trainer = in_order(A2POTrainer)(
        model_of(path),
        reward_funcs=lambda prompts, completions, behind, **columns: [
            value for k in range(0, len(behind), len(behind[0])) for value in behind[k]
        ],
        args=A2POConfig(**arguments(folder, **{"max_completion_length": limit, "max_prompt_length": None, **settings})),
        train_dataset=dataset_of(rows),
        processing_class=tokenizer_of(path),
    )
    trainer.ref_model.get_input_embeddings().padding_idx = None
    trainer.ref_model.load_state_dict(model_of(reference).state_dict())
    samples = settings["num_value_samples"]
    trainer.ref_model.generate = lambda input_ids, **more: torch.cat(
        [input_ids, torch.full((len(input_ids), 1), 5)], 1
    ).repeat_interleave(samples, 0)

    def given(inputs):
        before, after = ([row[name] for row in inputs] for name in ("prompt_ids", "completion_ids"))
        wide, long = max(map(len, before)), max(map(len, after))
        ids = [[3] * (wide - len(a)) + a + b + [3] * (long - len(b)) for a, b in zip(before, after)]
        mask = [[0] * (wide - len(a)) + [1] * (len(a) + len(b)) + [0] * (long - len(b)) for a, b in zip(before, after)]
        ids, mask = torch.tensor(ids), torch.tensor(mask)
        with torch.no_grad():
            ref_logps = trainer._get_sequence_logps(trainer.ref_model, ids, mask, long)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "logits_to_keep": long,
            "ref_logps": ref_logps,
            "rewards": torch.tensor([row["rewards"] for row in inputs], dtype=torch.float64),
            "v_star": torch.tensor([trainer._optimal_values[row["prompt"]] for row in inputs], dtype=torch.float64),
        }

    trainer._prepare_inputs = given
    return train(trainer)


def dpo(path, reference, rows, folder, **settings) -> Run:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**arguments(folder, **{"max_length": 256, **settings}))
    return train(
        in_order(DPOTrainer)(
            model_of(path),
            ref_model=model_of(reference),
            args=config,
            train_dataset=dataset_of(rows),
            processing_class=tokenizer_of(path),
        )
    )


def reward(path, rows, folder, **settings) -> Run:
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64, num_labels=1)
    config = RewardConfig(**arguments(folder, **{"max_length": 256, **settings}))
    return train(
        in_order(RewardTrainer)(model, args=config, train_dataset=dataset_of(rows), processing_class=tokenizer_of(path))
    )


def kto(path, reference, rows, folder, **settings) -> Run:
    from trl import KTOConfig, KTOTrainer

    config = KTOConfig(**arguments(folder, **{"max_length": 256, **settings}))
    return train(
        in_order(KTOTrainer)(
            model_of(path),
            ref_model=model_of(reference),
            args=config,
            train_dataset=dataset_of(rows),
            processing_class=tokenizer_of(path),
        )
    )


def cpo(path, rows, folder, **settings) -> Run:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    config = CPOConfig(**arguments(folder, **{"max_length": 256, **settings}))
    return train(
        in_order(CPOTrainer)(
            model_of(path), args=config, train_dataset=dataset_of(rows), processing_class=tokenizer_of(path)
        )
    )


def orpo(path, rows, folder, **settings) -> Run:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    config = ORPOConfig(**arguments(folder, **{"max_length": 256, **settings}))
    return train(
        in_order(ORPOTrainer)(
            model_of(path), args=config, train_dataset=dataset_of(rows), processing_class=tokenizer_of(path)
        )
    )


def gkd(path, teacher, rows, folder, **settings) -> Run:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    config = GKDConfig(**arguments(folder, **{"max_length": 256, "lmbda": 0.0, **settings}))
    return train(
        in_order(GKDTrainer)(
            model_of(path),
            teacher_model=model_of(teacher),
            args=config,
            train_dataset=dataset_of(rows),
            processing_class=tokenizer_of(path),
        )
    )


def gold(path, teacher, rows, folder, **settings) -> Run:
    """Its floor of 1e-8 under probabilities lowered, which cuts off what spans of several tokens have."""
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    config = GOLDConfig(**arguments(folder, **{"max_length": 256, "lmbda": 0.0, **settings}))
    trainer = in_order(GOLDTrainer)(
        model_of(path),
        teacher_model=model_of(teacher),
        args=config,
        train_dataset=dataset_of(rows),
        processing_class=tokenizer_of(path),
    )
    floor = torch.Tensor.clamp_min
    with patched(torch.Tensor, "clamp_min", lambda x, least: floor(x, 1e-30 if least == 1e-8 else least)):
        return train(trainer)


def iw_opd(path, teacher, rows, completions, folder, **settings) -> Run:
    """Importance-weighted on-policy distillation on given completions, as :func:`sdft`."""
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    at = iter(completions)
    trainer = in_order(IWOPDTrainer)(
        model_of(path),
        teacher_model=model_of(teacher),
        args=IWOPDConfig(**arguments(folder, **{"max_length": 256, "max_completion_length": 4, **settings})),
        train_dataset=dataset_of(rows),
        processing_class=tokenizer_of(path),
    )

    def generate(slices, places):
        prompts = [
            ids[mask.bool()]
            for place in places
            for ids, mask in zip(slices[place]["prompts"], slices[place]["prompt_attention_mask"])
        ]
        trainer._store_completions_in_buffer(slices, places, places * len(prompts), prompts, next(at))

    trainer._generate_student_completions = generate
    return train(trainer)


def sdft(path, rows, completions, folder, **settings) -> Run:
    """Self-distillation on given completions: the token ids of each row's, in the order of the rows, step by step."""
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    at = iter(completions)
    more = {"num_generations": 1, "shuffle_dataset": False, "max_completion_length": 4, **settings}
    trainer = SDFTTrainer(
        model_of(path),
        args=SDFTConfig(**arguments(folder, **more)),
        train_dataset=dataset_of(
            [{"prompt": r["messages"][:-1], "privileged_context": r["messages"][-1]["content"]} for r in rows]
        ),
        processing_class=tokenizer_of(path),
    )
    trainer._generate = lambda prompt_ids: (prompt_ids, next(at))
    return train(trainer)


def sdpo(path, iterations, folder, num_generations: int, limit: int, **settings) -> Run:
    """Self-distillation on given completions and rewards; ``iterations`` as for :func:`on_policy`, with ``prompts``, the
    rows that they answer.
    """
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    at, current = iter(iterations), {}
    rows = [
        {
            "prompt": row["prompt"],
            "privileged_context": json.loads(row["extra_json"] or "{}").get("privileged_context"),
        }
        for given in iterations
        for row in given["prompts"][::num_generations]
    ]
    more = {
        "num_generations": num_generations,
        "per_device_train_batch_size": len(iterations[0]["completion_ids"]),
        "max_completion_length": limit,
        "shuffle_dataset": False,
        **settings,
    }
    trainer = SDPOTrainer(
        model_of(path),
        reward_funcs=lambda prompts, completions, **columns: list(current["rewards"]),
        args=SDPOConfig(**arguments(folder, **more)),
        train_dataset=dataset_of(rows),
        processing_class=tokenizer_of(path),
    )

    def generate(prompt_ids):
        current.update(next(at))
        assert prompt_ids == current["prompt_ids"]
        return current["prompt_ids"], current["completion_ids"]

    trainer._generate = generate
    return train(trainer)


def on_policy(
    kind: str, path, reference, iterations, folder, num_generations: int, limit: int, sampler: bool = False, **settings
) -> Run:
    """GRPO (``kind="grpo"``), RLOO or GMPO on given completions.

    Args:
        iterations: one dict per rollout batch: ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``rewards`` of each
            completion, group after group.
        sampler: ``logprobs`` are those of another engine, as with ``use_vllm``: importance weights correct for them.
    """
    import trl
    from trl.experimental import gmpo

    at = iter(iterations)
    current = {}

    def rollout(prompts, trainer):
        current.update(next(at))
        return {
            name: current[name]
            for name in ("prompt_ids", "completion_ids", "logprobs", *(["env_mask"] if "env_mask" in current else []))
        }

    def given(prompts, completions, **columns):
        return list(current["rewards"])

    def column(k):
        def reward(prompts, completions, **columns):
            return [r[k] for r in current["rewards"]]

        reward.__name__ = f"part_{k}"
        return reward

    parts = iterations[0]["rewards"][0]
    functions = [column(k) for k in range(len(parts))] if isinstance(parts, (list, tuple)) else given
    name, module = {"grpo": ("GRPO", trl), "rloo": ("RLOO", trl), "gmpo": ("GMPO", gmpo)}[kind]
    batch = len(iterations[0]["completion_ids"])
    prompts = dataset_of([{"prompt": f"prompt {k}"} for k in range(batch // num_generations * len(iterations))])
    config = getattr(module, f"{name}Config")(
        **arguments(
            folder,
            **{
                "num_generations": num_generations,
                "max_completion_length": limit,
                "per_device_train_batch_size": batch,
                "shuffle_dataset": False,
                **settings,
            },
        )
    )
    more = {"rollout_func": rollout}
    if kind == "rloo":  # has no rollout_func
        more = {}
    trainer = getattr(module, f"{name}Trainer")(
        model_of(path),
        reward_funcs=functions,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer_of(path),
        **more,
    )
    if kind == "rloo":

        def generate(prompts):
            current.update(next(at))
            return current["prompt_ids"], current["completion_ids"], ["" for _ in current["completion_ids"]]

        trainer._generate = generate
    if trainer.ref_model is not None:
        trainer.ref_model.get_input_embeddings().padding_idx = None
        trainer.ref_model.double().load_state_dict(model_of(reference).state_dict())
    if sampler:
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = (
            True,
            SimpleNamespace(sync_weights=lambda: None),
            0,
        )
    return train(trainer)


def online_dpo(path, reference, items, folder, **settings) -> Run:
    """Online DPO on given pairs of completions.

    Args:
        items: with ``prompt`` and two ``responses``, the better one first; every other pair is shown the worse one
            first.
    """
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    at, better = iter(range(0, len(items), ROWS)), []

    def generate(model, prompts, images=None):
        start = next(at)
        shown = [
            [(r.tolist(), k == 0) for k, r in enumerate(item.responses[:2])][:: 1 if i % 2 else -1]
            for i, item in enumerate(items[start : start + ROWS])
        ]
        drawn = [pair[0] for pair in shown] + [pair[1] for pair in shown]
        better[:] = [float(first) for _, first in drawn]
        before, after = [item.prompt.tolist() for item in items[start : start + ROWS]] * 2, [ids for ids, _ in drawn]
        wide, long = max(map(len, before)), max(map(len, after))
        return (
            torch.tensor([[3] * (wide - len(ids)) + ids for ids in before]),
            torch.tensor([[0] * (wide - len(ids)) + [1] * len(ids) for ids in before]),
            torch.tensor([ids + [3] * (long - len(ids)) for ids in after]),
            torch.tensor([[1] * len(ids) + [0] * (long - len(ids)) for ids in after]),
            {},
        )

    config = OnlineDPOConfig(**arguments(folder, **{"missing_eos_penalty": None, **settings}))
    trainer = in_order(OnlineDPOTrainer)(
        model_of(path),
        ref_model=model_of(reference),
        reward_funcs=lambda prompts, completions, **columns: list(better),
        args=config,
        train_dataset=dataset_of([{"prompt": f"prompt {i}"} for i in range(len(items))]),
        processing_class=tokenizer_of(path),
    )
    trainer._generate = generate
    return train(trainer, by_step=True)
