"""OpenRLHF's own formulas (``models/loss.py``, ``models/utils.py`` and the advantages of ``experience_maker.py``) in
the loop of :mod:`tests.peers.loop`.

Only these files run: nothing of Ray, DeepSpeed or vLLM is needed (``pip install --no-deps openrlhf``). Settings have
the names and defaults of its command line.
"""

from __future__ import annotations

import ast
import importlib
import sys
from types import SimpleNamespace

import torch

from tests.peers import loop
from tests.peers.trl_side import ROWS, STEPS, Run

FOLDER = loop.folder_of("openrlhf")


def shipped(command: str = "train_ppo_ray") -> dict:
    """Every option of a command with its default (None where that is computed), by its name without dashes."""
    found = {}
    for node in ast.walk(ast.parse((FOLDER / "cli" / f"{command}.py").read_text())):
        # options of actor and critic, written as f-strings
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            prefixes = [ast.literal_eval(one) for one in node.iter.elts]
        if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and node.args):
            continue
        default = next((k.value for k in node.keywords if k.arg == "default"), None)
        try:
            value = None if default is None else ast.literal_eval(default)
        except ValueError:
            value = None
        name = node.args[0]
        names = (
            [name.value]
            if isinstance(name, ast.Constant)
            else [f"{prefix}{name.values[-1].value}" for prefix in prefixes]
        )
        found |= {one.lstrip("-"): value for one in names}
    return found


def modules():
    """(models.loss, models.utils, trainer.ppo_utils.experience_maker)."""
    packages = {
        name: FOLDER.joinpath(*name.split(".")[1:])
        for name in (
            "openrlhf",
            "openrlhf.models",
            "openrlhf.trainer",
            "openrlhf.trainer.ppo_utils",
            "openrlhf.trainer.ray",
            "openrlhf.utils",
        )
    }
    nothing = type("Nothing", (), {})
    log = SimpleNamespace(info=lambda *a: None, warning=lambda *a: None)
    stubs = {
        "deepspeed": {},
        "ray": {},
        "openrlhf.trainer.ppo_utils.experience": {"Experience": nothing},
        "openrlhf.trainer.ray.launcher": {"RayActorGroup": nothing},
        "openrlhf.utils.logging_utils": {"init_logger": lambda name: log},
        "openrlhf.utils.seqlen_balancing": {
            "get_minimum_num_micro_batch_size": None,
            "get_seqlen_balanced_partitions": None,
        },
    }
    compiled, torch.compile = torch.compile, lambda function: function  # a decorator of what is not used here
    try:
        with loop.bare(packages, stubs):
            for name in (
                "openrlhf.models.loss",
                "openrlhf.models.utils",
                "openrlhf.trainer.ppo_utils.experience_maker",
            ):
                importlib.import_module(name)
            return tuple(
                sys.modules[name]
                for name in (
                    "openrlhf.models.loss",
                    "openrlhf.models.utils",
                    "openrlhf.trainer.ppo_utils.experience_maker",
                )
            )
    finally:
        torch.compile = compiled


def arguments(given: dict) -> SimpleNamespace:
    """Parsed options with those ``given`` (dicts by the first parts of their names, as of
    :meth:`tests.peers.page.Row.settings`); KeyError for an option that OpenRLHF does not have.
    """
    known = shipped()
    flat = {f"{prefix}.{name}": value for prefix, part in given.items() for name, value in part.items()}
    for name in flat:
        if name not in known:
            raise KeyError(f"--{name} is no option of OpenRLHF")
    root = SimpleNamespace()
    for name, value in (known | flat).items():
        at = root
        *path, last = name.replace("-", "_").split(".")
        for part in path:
            if not hasattr(at, part):
                setattr(at, part, SimpleNamespace())
            at = getattr(at, part)
        setattr(at, last, value)
    if root.actor.eps_clip_low_high is None:
        root.actor.eps_clip_low_high = (root.actor.eps_clip, root.actor.eps_clip)
    if len(root.algo.advantage.is_correction_threshold) == 1:
        root.algo.advantage.is_correction_threshold = [0.0, *root.algo.advantage.is_correction_threshold]
    return root


def on_policy(path, reference, iterations, num_generations: int, learning_rate: float, limit: int, **given) -> Run:
    """OpenRLHF's advantages and policy loss on given completions of at most ``limit`` tokens."""
    losses, utils, maker = modules()
    args = arguments(given)
    args.rollout.n_samples_per_prompt, args.rollout.max_new_tokens = num_generations, limit
    coef = args.algo.kl.init_coef
    Maker = maker.RemoteExperienceMaker
    own = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        args=args,
        advantage_estimator=args.algo.advantage.estimator,
        kl_ctl=SimpleNamespace(value=coef),
    )
    own.get_cumulative_returns = lambda *a: Maker.get_cumulative_returns(own, *a)
    policy = losses.PolicyLoss(
        *args.actor.eps_clip_low_high,
        args.actor.dual_clip,
        args.actor.loss_agg_mode == "token-mean",
        args.actor.policy_loss_type,
        args.algo.advantage.is_correction_level,
        args.algo.advantage.is_correction_mode,
        args.algo.advantage.is_correction_gating,
        args.algo.advantage.is_correction_threshold,
    )

    def credit(b):
        kl = (
            torch.zeros_like(b.old)
            if args.algo.kl.use_loss
            else utils.compute_approx_kl(b.old, b.ref, kl_estimator=args.algo.kl.estimator).double()
        )
        experience = SimpleNamespace(
            index=list(range(len(b.scores))),
            rewards=b.scores.clone(),
            kl=kl,
            action_mask=b.mask.bool(),
            info={},
            response_length=b.mask.sum(-1),
            truncated=b.cut,
        )
        Maker.compute_advantages_and_returns(own, [experience])
        return {"advantages": experience.advantages, "mask": b.mask, "old": b.old, "ref": b.ref, "sampler": b.sampler}

    def loss(logps, entropies, part, whole):
        info = {
            "dp_size": 1,
            "batch_num_tokens": whole["mask"].sum(),
            "global_batch_size": (whole["mask"].sum(-1) > 0).sum(),
        }
        value = policy(
            logps, part["old"], part["advantages"], action_mask=part["mask"], rollout_log_probs=part["sampler"], **info
        )[0]
        if args.algo.kl.use_loss:
            kl = utils.compute_approx_kl(
                logps, part["ref"], part["old"], args.algo.kl.estimator, args.algo.kl.unbiased_gradient
            )
            value = value + coef * losses.aggregate_loss(kl, part["mask"], **info)
        if args.actor.entropy_coef:
            value = value - args.actor.entropy_coef * losses.aggregate_loss(entropies, part["mask"], **info)
        return value

    return loop.train(
        path,
        reference,
        iterations,
        num_generations,
        credit,
        loss,
        learning_rate=learning_rate,
        epochs=args.train.max_epochs,
        temperature=args.rollout.temperature,
    )


def dpo(path, reference, items, learning_rate: float, max_grad_norm: float = 0.5, **given) -> Run:
    """OpenRLHF's DPO loss on given pairs, items with ``prompt`` and two ``responses``, the better one first."""
    from tests.peers.our_side import policy_of

    known = shipped("train_dpo")
    for name in given.get("model", {}):
        if f"model.{name}" not in known:
            raise KeyError(f"--model.{name} is no option of OpenRLHF")
    option = {name.partition(".")[2]: value for name, value in known.items() if name.startswith("model.")} | given.get(
        "model", {}
    )
    loss_of = modules()[0].DPOLoss(option["beta"], option["label_smoothing"], option["ipo_enable"])
    model, other, run = policy_of(path), policy_of(reference), Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)

    def sums(which, part):
        return [
            loop.log_probs(which, [i.prompt.tolist() for i in part], [i.responses[k].tolist() for i in part], 1.0)[
                0
            ].sum(-1)
            for k in (0, 1)
        ]

    for step in range(STEPS):
        part = items[step * ROWS : (step + 1) * ROWS]
        optimizer.zero_grad()
        with torch.no_grad():
            fixed = sums(other, part)
        value = loss_of(*sums(model, part), *fixed)[0]
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        run.step(value, norm, learning_rate, model)
    return run
