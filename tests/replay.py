"""The same training by plain means: rows through ``apply_chat_template`` and character offsets, one conversation at a time through transformers' own forward in float64, torch's optimizers.

:func:`replayed` does what a stage is asked to do for the combinations of tests/sweep.py that :func:`why_not` lets through; :func:`differences` holds a run of the stage against it.
"""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from stages.algorithms import DIRECT_METHODS, resolve
from stages.registry import get_stage
from stages.running.randomness import rng as counted_rng, seed_for
from tests import sweep
from tests.architectures import in_float64

SEED = 5
#: What no plain loop here knows, each with tests of its own.
UNKNOWN = {"sft": {"neftune_noise_alpha": None, "curriculum": "none", "data": "demonstrations/1"}, "align": {},
           "reward_model": {"curriculum": "none", "facts": False, "init_head": "fresh", "spoiled_fraction": 0.0, "outcome_head": "linear", "top_ranks": None, "centre_annotators": False, "lm_loss_weight": 0.0}}
METHODS_APART = ("kto", "bco", "aot_unpaired", "aot_paired", "aql", "2d_dpo", "mdpo", "discovered", "written")
REWARDS = ("auto", "bt", "margin", "soft_label", "kwise_pairs", "pointwise_bce", "regression", "value", "orm")


def why_not(stage: str, c: dict) -> str | None:
    """Why a combination is not replayed; None where it is."""
    if c.get("lora_dropout") or c["optimizer"] == "muon":
        return "masks drawn elsewhere, or products in bfloat16"
    if c["lora_rank"] and c["model"] == "olmoe":
        return "adapters on experts"
    other = [n for n, value in UNKNOWN[stage].items() if c.get(n, value) != value]
    if other:
        return ", ".join(other)
    if stage == "align" and (c["method"] in METHODS_APART or DIRECT_METHODS[c["method"]].data != "pairs" or c["options"].get("nll_on_prompt") or c["options"].get("aligned")):
        return "a method of its own"
    if stage == "reward_model" and (c["objective"] not in REWARDS or c["model"] == "bert" or c["train_layers"] != "all"):
        return "an objective of its own"
    return None


@dataclass
class Row:
    """Token ids and targets (0/1) of every conversation that the loss of a row reads, and what it weighs."""

    sequences: list[tuple[list[int], list[int]]]
    weight: float
    more: dict = field(default_factory=dict)


# -- rows --------------------------------------------------------------------------------------------------------------------

class Rendered:
    """Conversations as ids with the character span of each assistant turn."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids)

    def text(self, messages, prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    def ids(self, messages, turns, full: bool = False) -> tuple[list[int], list[int]]:
        text = self.text(messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [(len(self.text(messages[:t], True)), len(self.text(messages[:t + 1]).rstrip("\n"))) for t in turns]
        mask = [int(full or any(a <= start and end <= b for a, b in spans)) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], [0, *mask[1:]]

    def answers(self, prompt, completions, max_length: int):
        """(prompt ids, [(ids, mask)]): responses up to their end token, cut at their end to half of the room at least, then the prompt at its beginning."""
        start = self.tokenizer(self.text(prompt, True), add_special_tokens=False)["input_ids"]
        found = []
        for completion in completions:
            ids, mask = self.ids([*prompt, *completion], range(len(prompt), len(prompt) + len(completion)))
            assert ids[:len(start)] == start
            ids, mask = ids[len(start):], mask[len(start):]
            end = max(i for i, m in enumerate(mask) if m) + 1
            found.append((ids, mask, end))
        longest = max(len(ids) for ids, _, _ in found)
        return start, found, longest


def clean(messages) -> list[dict]:
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


def demonstrations(rendered: Rendered, rows, config) -> list[Row]:
    made = []
    for row in rows:
        messages = clean(row["messages"])
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
        turns = {"all_assistant": row["train_turns"] or assistants, "final_turn": [i for i in assistants if i > last_user], "final_message": assistants[-1:], "full": []}[config.train_on]
        ids, mask = rendered.ids(messages, turns, config.train_on == "full")
        ids, mask = ids[:config.max_length], mask[:config.max_length]
        if sum(mask):
            made.append(Row([(ids, mask)], row["weight"]))
    return made


def cut(start, found, longest, max_length: int, trimmed: bool):
    """Whole conversations within ``max_length``; ``trimmed``: lengths are those without what stands behind the end token."""
    if trimmed:
        found = [(ids[:end], mask[:end], end) for ids, mask, end in found]
        longest = max(len(ids) for ids, _, _ in found)
    if len(start) + longest > max_length:
        room = max(max_length // 2, max_length - len(start))
        found = [(ids[:room], mask[:room], end) for ids, mask, end in found]
        start = start[len(start) - (max_length - min(longest, room)):]
    return [(start + ids[:end], [0] * len(start) + mask[:end]) for ids, mask, end in found], [tuple(ids) for ids, _, _ in found]


def pairs(rendered: Rendered, rows, config, soft: bool, trimmed: bool = False, positive: bool = False, formatting: bool = False) -> list[Row]:
    made = []
    for row in rows:
        if row["label_prob"] == 0.5 and not soft or positive and row["chosen_score"] <= row["rejected_score"]:
            continue
        start, found, longest = rendered.answers(clean(row["prompt"]), [clean(row["chosen"]), clean(row["rejected"])], config.max_length)
        sequences, texts = cut(start, found, longest, config.max_length, trimmed)
        if texts[0] == texts[1]:
            continue
        if formatting:
            sequences = [(ids, [m * (i not in rendered.special) for i, m in zip(ids, mask)]) for ids, mask in sequences]
        if all(sum(mask) for _, mask in sequences):
            made.append(Row(sequences, row["weight"], {"label_prob": 1.0 if row["label_prob"] is None else row["label_prob"], "margin": row["margin"] or 0.0,
                                                       "score_gap": row["chosen_score"] - row["rejected_score"]}))
    return made


def answers(rendered: Rendered, rows, config) -> list[Row]:
    """Rows of single responses and rankings, best first, for reward models."""
    made = []
    for row in rows:
        ranking = row.get("completions")
        order = sorted(range(len(ranking)), key=lambda i: row["ranks"][i]) if ranking else [0]
        start, found, longest = rendered.answers(clean(row["prompt"]), [clean(ranking[i]) for i in order] if ranking else [clean(row["completion"])], config.max_length)
        sequences, texts = cut(start, found, longest, config.max_length, True)
        if len(set(texts)) < len(texts):
            continue
        more = {"ranks": [row["ranks"][i] for i in order]} if ranking else {"target": float(row["label"]) if row.get("label") is not None else row["score"], "prompt": str(row["prompt"])}
        if row.get("aspects"):
            given = {a["aspect"]: a["score"] for a in row["aspects"]}
            more["targets"] = [given.get(a, math.nan) for a in config.attributes] if config.attributes else [row["score"]]
            if all(map(math.isnan, more["targets"])):
                continue
        made.append(Row(sequences, row["weight"], more))
    return made


# -- the loss of a step ------------------------------------------------------------------------------------------------------

def logps_of(model, ids, mask, router=None):
    """(log-probs of the targets, mean log-prob over the vocabulary there, log-probs of all tokens there)."""
    out = model(input_ids=torch.tensor([ids]), use_cache=False, **({"output_router_logits": True} if router is not None else {}))
    if router is not None:
        router.append(out.router_logits)
    at = [i for i, m in enumerate(mask) if m]
    every = torch.log_softmax(out.logits[0].double(), -1)[[i - 1 for i in at]]
    return every.gather(1, torch.tensor(ids)[at][:, None])[:, 0], every.mean(-1), every, [ids[i] for i in at]


class Sft:
    def __init__(self, c, config):
        self.config = config
        self.router = config.router_aux_loss_coef

    def rows(self, rendered, rows):
        return demonstrations(rendered, rows, self.config)

    def __call__(self, model, rows, share=None):
        """share: of the run that is done, None in validation."""
        config, router = self.config, None
        coefficient = (getattr(model.config, "router_aux_loss_coef", None) if self.router is None else self.router) if share is not None and getattr(model.config, "num_experts", None) else None
        router = [] if coefficient else None
        total, tokens, sequences = 0.0, 0.0, 0.0
        for row in rows:
            ids, mask = row.sequences[0]
            logps, means, every, targets = logps_of(model, ids, mask, router)
            loss = -logps
            if config.loss_type == "dft":
                loss = -logps.detach().exp() * logps
            if config.label_smoothing_factor:
                loss = -(1 - config.label_smoothing_factor) * logps - config.label_smoothing_factor * means
            if config.unlikelihood_coef:
                more = []
                for t, target in enumerate(targets):
                    wrong = sorted(set(targets[max(0, t - config.unlikelihood_window):t]) - {target})
                    more.append(-torch.log1p(-every[t, wrong].exp()).sum() if wrong else every.new_zeros(()))
                loss = loss + config.unlikelihood_coef * torch.stack(more)
            tokens, sequences = tokens + row.weight * len(loss), sequences + row.weight
            loss = {"token-mean": loss.sum(), "seq-mean-token-sum": loss.sum(), "seq-mean-token-mean": loss.mean(),
                    "seq-mean-token-sum-norm": loss.sum() / (config.loss_scale_factor or config.max_length)}[config.loss_agg_mode]
            if share is not None and config.self_paced_threshold:
                threshold = config.self_paced_threshold * ((config.self_paced_threshold_end or config.self_paced_threshold) / config.self_paced_threshold) ** share
                loss = loss * float(-logps.mean() < threshold)
            total = total + row.weight * loss
        total = total / max(tokens if config.loss_agg_mode == "token-mean" else sequences, 1e-12)
        if coefficient:
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            layers = tuple(torch.cat(parts) for parts in zip(*router))
            total = total + coefficient * load_balancing_loss_func(layers, model.config.num_experts, model.config.num_experts_per_tok)
        return total, {}


class Align:
    def __init__(self, c, config):
        self.config, self.method = config, DIRECT_METHODS[c["method"]]
        method = self.method
        self.beta = config.beta if config.beta is not None else method.default_beta
        self.reduction = config.logp_reduction or method.logp_reduction
        self.nll = method.nll_coef if config.nll_coef is None else config.nll_coef
        self.nll_reduction = config.nll_reduction or method.nll_reduction
        self.options = {name: config.options.get(name, value) for name, value in method.options.items()}
        self.reference = None

    def rows(self, rendered, rows):
        return pairs(rendered, rows, self.config, "label_prob" in self.method.columns, positive=self.method.positive_gap, formatting=self.config.mask_formatting)

    def score(self, h):
        kind, a = self.config.f_divergence_type, self.config.f_alpha_divergence_coef
        if kind == "forward_kl" or kind == "alpha_divergence" and a == 0:
            return 1 - torch.exp(-h)
        if kind == "js_divergence":
            return h - F.softplus(h) + math.log(2)
        return (1 - torch.exp(-(1 - a) * h)) / (1 - a) if kind == "alpha_divergence" and a < 1 else h

    def __call__(self, model, rows, share=None):
        config, router = self.config, [] if self.config.router_aux_loss_coef and share is not None else None
        columns = {name: [] for name in ("pc", "pr", "rc", "rr", "lc", "lr", "xc", "xr", "yc", "yr")}
        for row in rows:
            tokens = [logps_of(model, ids, mask, router)[0] for ids, mask in row.sequences]
            with torch.no_grad():
                held = [logps_of(self.reference, ids, mask)[0] for ids, mask in row.sequences]
            common = min(map(len, tokens))
            for k, side in enumerate("cr"):
                columns["l" + side].append(torch.tensor(float(len(tokens[k])), dtype=torch.float64))
                for name, values, compared in (("p", tokens[k], "x"), ("r", held[k], "y")):
                    columns[name + side].append(values.sum())
                    columns[compared + side].append(values.sum() if config.ld_alpha is None else values[:common].sum() + config.ld_alpha * values[common:].sum())
        v = {name: torch.stack(values) for name, values in columns.items()}
        weight = torch.tensor([row.weight for row in rows], dtype=torch.float64)
        x, y = [v["xc"], v["xr"]], [v["yc"], v["yr"]]
        if config.f_divergence_type != "reverse_kl":
            x, y = [self.score(a - b) for a, b in zip(x, y)], [torch.zeros_like(a) for a in x]
        if self.reduction == "mean":
            x, y = ([a / n for a, n in zip(side, (v["lc"], v["lr"]))] for side in (x, y))
        known = {"length_chosen": v["lc"], "length_rejected": v["lr"], "target": v["pc"], "mean_chosen": v["pc"] / v["lc"], "mean_rejected": v["pr"] / v["lr"],
                 **{name: torch.tensor([row.more[name] for row in rows], dtype=torch.float64) for name in ("label_prob", "score_gap")}}
        y = y if self.method.needs_reference else [None, None]
        each = resolve(self.method.loss)(*x, *y, **({} if self.beta is None else {"beta": self.beta}), **self.options, **{name: known[name] for name in self.method.columns})
        scale = max(float(weight.sum()), 1e-12)
        total = config.loss_weight * (each * weight).sum() / scale
        if self.nll:
            of = {"seq-mean": -(v["pc"] / v["lc"] * weight).sum() / scale, "seq-sum": -(v["pc"] * weight).sum() / scale, "token-mean": -(v["pc"] * weight).sum() / max(float((v["lc"] * weight).sum()), 1e-12)}
            total = total + self.nll * of[self.nll_reduction]
        if router:
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            layers = tuple(torch.cat(parts) for parts in zip(*router))
            total = total + config.router_aux_loss_coef * load_balancing_loss_func(layers, model.config.num_experts, model.config.num_experts_per_tok)
        margins = (x[0] - x[1] - (0 if y[0] is None else y[0] - y[1])) * (1.0 if self.beta is None else self.beta)
        return total, {"logps/chosen": v["pc"].mean(), "logps/rejected": v["pr"].mean(), "rewards/margins": margins.mean(), "length/chosen": v["lc"].mean(), "length/rejected": v["lr"].mean(),
                       "displacement/chosen_shift": (v["pc"] - v["rc"]).mean()}


class Reward:
    def __init__(self, c, config):
        self.config, self.objective = config, {"auto": "bt"}.get(c["objective"], c["objective"])
        self.scale = None

    def rows(self, rendered, rows):
        kind = self.objective
        if kind in ("bt", "margin", "soft_label"):
            return pairs(rendered, rows, self.config, kind == "soft_label" or self.config.use_soft_labels, trimmed=True)
        made = answers(rendered, rows, self.config)
        training = self.scale is None
        if kind == "regression":
            values = np.array([row.more["targets"] for row in made])
            self.scale = self.scale or (np.nanmean(values, 0), np.nanstd(values, 0))
            for row, target in zip(made, (values - self.scale[0]) / self.scale[1]):
                row.more["targets"] = target
        if kind == "orm" and training and self.config.balance:
            self.scale, kept = (), []
            for prompt in {row.more["prompt"] for row in made}:
                sides = [[row for row in made if row.more["prompt"] == prompt and row.more["target"] == side] for side in (0.0, 1.0)]
                kept += [id(row) for side in sides for row in side[:min(map(len, sides))]]
            made = [row for row in made if id(row) in kept]
        return made

    def __call__(self, model, rows, share=None):
        config, kind = self.config, self.objective
        per_token = kind in ("value", "orm")
        router = [] if config.router_aux_loss_coef and share is not None else None
        total, count, scores_seen = 0.0, 0.0, []
        for row in rows:
            outputs = []
            for ids, mask in row.sequences:
                core = getattr(model, model.base_model_prefix) if not hasattr(model, "peft_config") else getattr(model.get_base_model(), model.get_base_model().base_model_prefix)
                out = core(input_ids=torch.tensor([ids]), use_cache=False, **({"output_router_logits": True} if router is not None else {}))
                if router is not None:
                    router.append(out.router_logits)
                states = out.last_hidden_state[0]
                head = getattr(model.get_base_model() if hasattr(model, "peft_config") else model, "score")
                outputs.append(head(states[[i for i, m in enumerate(mask) if m]] if per_token else states.mean(0) if config.pooling == "mean" else states[-1]))
            s = [o[..., 0] for o in outputs]
            scores_seen += [] if per_token else [v.detach() for v in s]
            if kind in ("bt", "margin", "soft_label"):
                z = s[0] - s[1] - (row.more["margin"] if kind == "margin" or config.use_margin else 0.0)
                p = row.more["label_prob"] if kind == "soft_label" or config.use_soft_labels else 1.0
                p = p * (1 - config.label_smoothing) + (1 - p) * config.label_smoothing
                loss, by = p * F.softplus(-z) + (1 - p) * F.softplus(z) + config.center_rewards_coefficient * (s[0] + s[1]) ** 2, 1.0
            elif kind == "kwise_pairs":
                each = [F.softplus(s[j] - s[i]) for i in range(len(s)) for j in range(len(s)) if row.more["ranks"][i] < row.more["ranks"][j]]
                loss, by = sum(each) / (len(each) if config.pair_weighting == "per_prompt" else 1), 1.0 if config.pair_weighting == "per_prompt" else float(len(each))
            elif kind == "regression":
                target = torch.tensor(row.more["targets"])
                error = (outputs[0] - target)[~target.isnan()]
                loss, by = (error ** 2 if config.regression_loss == "mse" else torch.where(error.abs() <= 1, error ** 2, 2 * error.abs() - 1)).mean(), 1.0
            else:
                target = row.more["target"]
                each = (s[0] - target) ** 2 if kind == "value" else F.softplus(s[0]) - target * s[0]
                loss, by = each.sum(), float(each.numel())
            total, count = total + row.weight * loss, count + row.weight * by
        total = total / max(count, 1e-12)
        if router:
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            layers = tuple(torch.cat(parts) for parts in zip(*router))
            total = total + config.router_aux_loss_coef * load_balancing_loss_func(layers, model.config.num_experts, model.config.num_experts_per_tok)
        return total, {"score_mean": torch.stack(scores_seen).mean()} if scores_seen else {}


# -- the run -----------------------------------------------------------------------------------------------------------------

def rate(step: int, total: int, config) -> float:
    """Learning rate of a 0-based step, written out once more."""
    warm = min(config.warmup_steps, total) if config.warmup_steps is not None else int(config.warmup_ratio * total)
    peak, low = config.learning_rate, config.min_lr_ratio
    if step < warm:
        return peak * (step + 1) / warm
    kind, left = config.lr_schedule, total - warm
    if kind == "constant":
        return peak
    if kind == "inverse_sqrt":
        return peak * max(low, (max(1, warm) / (step + 1)) ** 0.5)
    if kind == "wsd":
        decay = round(config.decay_ratio * total)
        start = max(warm, total - decay)
        x, kind = max(0, step - start) / max(1, total - start), config.decay_type
    else:
        x = (step - warm) / max(1, left)
    if kind == "cosine_with_restarts":
        x = (x * config.lr_cycles) % 1.0
    share = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "cosine_with_restarts": (1 + math.cos(math.pi * x)) / 2, "polynomial": (1 - x) ** config.lr_power, "1-sqrt": 1 - x ** 0.5}[kind]
    return peak * (low + (1 - low) * share)


def loaded(path: str, stage: str, c: dict, config):
    """The model in float64 as the stage starts from it."""
    if stage == "reward_model":
        from stages.reward_models.reward_heads import new_reward_model

        with sweep.float64():
            outputs = max(1, len(config.attributes)) if c["objective"] == "regression" else 1
            model = new_reward_model(path, "cpu", seed_for(SEED, stage, "head"), outputs=outputs).double()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager" if c["model"] == "gemma2" else "sdpa")
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def with_adapter(model, stage: str, config):
    from peft import LoraConfig, get_peft_model

    targets = config.lora_targets if config.lora_targets == "all-linear" else config.lora_targets.split(",")
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(SEED, stage, "lora") % 2**63)
        return get_peft_model(model, LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha or 2 * config.lora_rank, use_rslora=config.lora_rslora, use_dora=config.lora_dora, target_modules=targets,
                                                exclude_modules=[n for n in config.lora_exclude.split(",") if n] or None, modules_to_save=[n for n in config.lora_modules_to_save.split(",") if n] or None,
                                                task_type="SEQ_CLS" if stage == "reward_model" else "CAUSAL_LM")).eval()


def replayed(stage: str, c: dict, world: sweep.World) -> dict:
    """{"steps": [{"loss", "grad_norm", "learning_rate", "epoch"}], "validation": [(step, loss, metrics)], "weights", "selected"}."""
    config = get_stage(stage).SPEC.config(**sweep.settings_of(stage, c))
    inputs = world.inputs(stage, c)
    model = loaded(inputs["model"], stage, c, config)
    objective = {"sft": Sft, "align": Align, "reward_model": Reward}[stage](c, config)
    if stage == "align":
        objective.reference = loaded(inputs.get("reference", inputs["model"]), stage, c, config)
        if not objective.method.needs_reference:
            objective.reference = copy.deepcopy(model)
    if config.lora_rank:
        model = with_adapter(model, stage, config)
        if stage == "reward_model":
            for parameter in model.get_base_model().score.parameters():
                parameter.requires_grad_(True)
    with in_float64():
        return _trained(stage, c, config, model, objective, inputs["data"], world)


def _trained(stage: str, c: dict, config, model, objective, data: str, world: sweep.World) -> dict:
    rendered = Rendered(world.tokenizer)
    kind = data.rsplit("rows-", 1)[1].replace("-", "/")
    rows = sweep.rows_of(kind)
    train = objective.rows(rendered, [r for r in rows if r["split"] == "train"])
    held = objective.rows(rendered, [r for r in rows if r["split"] == "validation"])[:config.eval_rows]
    batch = min(config.batch_size, len(train))
    per_epoch = -(-len(train) // batch)
    total = config.max_steps or max(1, round(config.num_train_epochs * per_epoch))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [{"params": [p for p in trained.values() if p.ndim >= 2], "weight_decay": config.weight_decay}, {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    optimizer = {"adamw": lambda: torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon), "sgd": lambda: torch.optim.SGD(groups, lr=1.0, momentum=config.momentum or 0.0),
                 "adafactor": lambda: torch.optim.Adafactor(groups)}[config.optimizer]()
    average = {n: p.detach().clone() for n, p in trained.items()} if config.ema_decay else None
    every = {"epoch": max(1, -(-len(train) // config.batch_size))}.get(config.eval_every, config.eval_every)
    found, best, patience = {"steps": [], "validation": [], "rows": len(train)}, None, 0

    def put(values):
        with torch.no_grad():
            for n, p in trained.items():
                p.copy_(values[n])

    def validate(step):
        nonlocal best, patience
        if not held:
            return False
        kept = {n: p.detach().clone() for n, p in trained.items()}
        if average is not None:
            put(average)
        with torch.no_grad():
            loss, metrics = objective(model, held)
        found["validation"].append((step, float(loss), {k: float(v) for k, v in metrics.items()}))
        if config.select_by:
            if best is None or float(loss) < best[0]:
                best, patience = (float(loss), step, {n: p.detach().clone() for n, p in trained.items()}), 0
            else:
                patience += 1
        put(kept)
        return bool(config.select_by) and 0 < config.early_stopping_patience <= patience

    validate(0)
    stopped = False
    for step in range(total):
        epoch, index = divmod(step, per_epoch)
        order = counted_rng(SEED, stage, "order", epoch).permutation(len(train))
        chosen = [train[i] for i in order[index * batch:(index + 1) * batch]]
        optimizer.zero_grad()
        loss, metrics = objective(model, chosen, share=step / max(1, total - 1))
        if loss.requires_grad:
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), config.max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = rate(step, total, config)
        optimizer.step()
        if average is not None:
            for n, a in average.items():
                a.mul_(config.ema_decay).add_(trained[n].detach(), alpha=1 - config.ema_decay)
        found["steps"].append({"loss": float(loss), "grad_norm": norm, "learning_rate": rate(step, total, config), "epoch": (step + 1) / per_epoch, **{k: float(v) for k, v in metrics.items()}})
        if stage == "align" and config.reference_update != "frozen" and (config.reference_update == "ema" or (step + 1) % config.reference_interval == 0):
            keep = {"ema": config.reference_decay, "tr_soft": 1 - config.reference_alpha, "per_interval": 0.0}[config.reference_update]
            plain = copy.deepcopy(model).merge_and_unload() if config.lora_rank else model
            with torch.no_grad():
                for a, b in zip(objective.reference.parameters(), plain.parameters()):
                    a.mul_(keep).add_(b, alpha=1 - keep)
        if every and (step + 1) % every == 0 and step + 1 < total and validate(step + 1):
            stopped = True
            break
    if not stopped:
        validate(len(found["steps"]))
    put(best[2] if best else average if average is not None else {n: p.detach().clone() for n, p in trained.items()})
    plain = model.merge_and_unload() if config.lora_rank else model
    with tempfile.TemporaryDirectory() as folder:  # names and shapes as files have them
        plain.save_pretrained(Path(folder, "out/model"))
        return {**found, "weights": sweep.weights(Path(folder)), "selected": best and best[1]}


def differences(stage: str, c: dict, run: Path, plain: dict, tolerance: float = 1e-6) -> list[str]:
    """What a run of the stage says or publishes otherwise."""
    said = []

    def differ(what, ours, theirs, within=tolerance):
        if not abs(ours - theirs) <= within * max(1.0, abs(theirs)):
            said.append(f"{what}: {ours} for {theirs}")

    if c["forward"] == "model" and c["model"] not in ("gpt2", "gpt-neox"):  # whose norms round to float32
        tolerance = 1e-3
    rows = sweep.metrics(run)
    steps = [r for r in rows if "train/loss" in r]
    if len(steps) != len(plain["steps"]):
        return [f"{len(steps)} steps for {len(plain['steps'])}"]
    for ours, theirs in zip(steps, plain["steps"]):
        for name, value in theirs.items():
            key = name if "/" in name else f"train/{name}"
            if key in ours:
                differ(f"step {ours['step']} {name}", ours[key], value)
    judged = [(r["step"], r) for r in rows if "validation/loss" in r]
    if [s for s, _ in judged] != [s for s, *_ in plain["validation"]]:
        said.append(f"validated at {[s for s, _ in judged]} for {[s for s, *_ in plain['validation']]}")
    for (step, ours), (_, loss, metrics) in zip(judged, plain["validation"]):
        differ(f"validation loss at {step}", ours["validation/loss"], loss)
        for name, value in metrics.items():
            if f"validation/{name}" in ours:
                differ(f"validation {name} at {step}", ours[f"validation/{name}"], value)
    published = sweep.weights(run)
    for name, value in published.items():
        if name not in plain["weights"]:
            said.append(f"no weight {name}")
        elif not torch.allclose(value.double(), plain["weights"][name], rtol=0, atol=10 * tolerance):
            said.append(f"weight {name}: off by {float((value - plain['weights'][name]).abs().max()):.2e}")
    return said
