"""merge: one model from several of the same architecture, by arithmetic on their weights, without training.

``linear``           sum_i c_i w_i with coefficients that sum to 1 (``ops.merge``: Llama 3's averaging, model soups)
``slerp``            of two models, along the arc between their weights, tensor by tensor (Shoemake 1985)
``task_arithmetic``  base + sum_i c_i (w_i - base) (Ilharco et al. 2023)
``ties``             as task_arithmetic after trimming each difference to its largest entries and keeping, per weight, those
                     that agree with the majority sign (Yadav et al. 2023)
``adapter``          base with the LoRA adapter of a directory that peft or TRL wrote, W + (alpha / r) B A (``peft.lora``);
                     of a sequence classifier, a reward model. What comes out computes what peft's own forward of the two
                     does, to float32's rounding; the stage tries it out.

Everything is computed in float32; integer buffers come from the first model, tokenizer and template too.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.settings import ReadWhen, refuse_unread
from stages.spec import ConfigError, InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    READ_WHEN: ClassVar[ReadWhen] = (
        (("density",), lambda c: c.method == "ties", "only ties trims differences; write method=ties"),
        (
            ("coefficients",),
            lambda c: c.method != "adapter",
            "an adapter brings its own scale, alpha / r; leave coefficients out",
        ),
    )

    method: Literal["linear", "slerp", "task_arithmetic", "ties", "adapter"] = Field(
        "linear", description="How weights are combined; see the stage's description."
    )
    coefficients: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "Label of each model -> coefficient; empty: equal shares (linear, slerp) or 1 each (task_arithmetic, ties)."
            " slerp: the share of the second model decides."
        ),
    )
    density: float = Field(
        0.2, gt=0, le=1, description="Share of each difference's entries that ties keeps (paper 0.2)."
    )

    @model_validator(mode="after")
    def _read(self):
        refuse_unread(self, self.READ_WHEN)
        return self


#: Settings in a config.json that change nothing of what the weights compute; max_window_layers is spelled out in
#: layer_types.
COSMETIC = {
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "bos_token_id",
    "dropout",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_window_layers",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
#: Largest difference of logits, as a share of the largest one, that float32 products in another order make.
ROUNDING = 1e-3
BASE = "(base)"  # what the input base is called beside the models' labels


def check(config: Config, names: list[str]) -> None:
    """Raise ConfigError where the inputs are not those of the method."""
    models = sum(name.split(".", 1)[0] == "models" for name in names)
    one, differences = config.method == "adapter", config.method in ("task_arithmetic", "ties")
    if one and (models or not {"adapter", "base"} <= set(names)):
        raise ConfigError(
            "merge: method=adapter puts one adapter into one model; give --input adapter=DIR --input base=MODEL and no"
            " models"
        )
    if not one and "adapter" in names:
        raise ConfigError(f"merge: method={config.method} reads no adapter; write method=adapter, or leave it out")
    if not one and (models < (1 if differences else 2) or (config.method == "slerp" and models != 2)):
        raise ConfigError(
            f"merge: method={config.method} takes {'exactly two' if config.method == 'slerp' else 'several'} models;"
            " give --input models.a=REF --input models.b=REF"
        )
    if (one or differences) != ("base" in names):
        raise ConfigError(
            "merge: "
            + (
                f"method={config.method} needs what the models were trained from; give base=REF"
                if differences
                else f"method={config.method} has no base; drop it, or write method=task_arithmetic"
            )
        )


SPEC = StageSpec(
    name="merge",
    config=Config,
    inputs={
        "models": InputSpec("model", required=False, many=True, doc="The models, each with a label."),
        "base": InputSpec(
            "model",
            required=False,
            doc="What they were trained from (task_arithmetic, ties); what the adapter belongs on (adapter).",
        ),
        "adapter": InputSpec(
            "file",
            required=False,
            hub="model",
            doc="Directory, or repository of the hub, with adapter_config.json and adapter_model.safetensors (adapter).",
        ),
    },
    outputs={"model": OutputSpec("model", role="policy", doc="A reward model where the adapter is one.")},
    check=check,
)


def run(stage):
    if stage.config.method == "adapter":
        put_in(stage)
    else:
        combined(stage)


def put_in(stage) -> None:
    """Publish the base with the adapter in it; refuse what does not compute what peft's forward of the two does."""
    import torch

    from stages.chat import TOKENIZER_FILES, load_tokenizer
    from stages.models import adapters
    from stages.models.modeling import load_policy, note_types, save_policy, save_weights
    from stages.reward_models.reward_heads import has_card, load_reward_model, read_card, write_card

    base, folder = stage.path("base"), Path(stage.path("adapter"))
    told = adapters.Adapter(folder)
    model = load_reward_model(base, outputs=told.outputs) if told.scores else load_policy(base)
    note_types(stage, base)
    model = told.put_on(model)
    own = any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern))
    tokenizer = load_tokenizer(str(folder) if own else base)
    stage.log(
        f"the adapter {folder} is put into {stage.inputs['base'].ref}, with the tokenizer and chat template of the"
        f" {'adapter' if own else 'base'}. What trains on goes on from the whole: lora_rank puts a new adapter on top"
    )
    ids = torch.arange(min(64, len(tokenizer), told.positions(model)))[None]
    with torch.no_grad():
        before = model.eval()(input_ids=ids).logits
    with stage.output_model("model", role="reward" if told.scores else "policy") as directory:
        if told.scores:
            save_weights(model, directory)
            tokenizer.save_pretrained(directory)
            if has_card(base):
                write_card(directory, read_card(base))
        else:
            save_policy(model, tokenizer, directory, base=stage.inputs["base"].ref)
        del model
        again = (load_reward_model if told.scores else load_policy)(str(directory))
        with torch.no_grad():
            off, scale = float((again.eval()(input_ids=ids).logits - before).abs().max()), float(before.abs().max())
        if not off <= ROUNDING * scale:
            raise ConfigError(
                f"merge: with the adapter in it the model computes other logits than under it (up to {off:.3g} apart,"
                f" of {scale:.3g}), as where it is on one of two layers that share a weight, or left with values that"
                " are no numbers; merge it with peft (merge_and_unload, after untying the weights), and give what that"
                " saves"
            )
    stage.summary({"logits_largest": scale, "logits_largest_difference": off})


def combined(stage) -> None:
    """Publish the arithmetic of several models' weights."""
    from stages.models.modeling import load_policy, note_types, save_policy
    from stages.chat import renderer_for

    config, given = stage.config, stage.many("models")
    labels, differences = list(given), stage.has("base")
    coefficients = coefficients_of(config, labels)
    stage.log(
        "merging "
        + ", ".join(f"{c:g} x {label} ({given[label].ref or given[label].path})" for label, c in coefficients.items())
    )
    model = load_policy(given[labels[0]].path)
    note_types(stage, given[labels[0]].path)
    paths = {**{label: given[label].path for label in labels}, **({BASE: stage.path("base")} if differences else {})}
    models = {label: load_policy(path) for label, path in paths.items()}
    states = {label: m.state_dict() for label, m in models.items()}
    renderers = {label: renderer_for(path) for label, path in paths.items()}
    check_alike(
        states,
        {label: settings_of(m.config) for label, m in models.items()},
        {label: renderer.vocabulary_hash for label, renderer in renderers.items()},
    )
    odd = [label for label in labels if renderers[label].template_hash != renderers[labels[0]].template_hash]
    if odd:
        stage.warn(
            "chat_templates_differ",
            f"{', '.join(odd)} show{'s' * (len(odd) == 1)} conversations by another chat template than {labels[0]}, whose"
            " template the merged model gets: what they learned behind theirs may not come out behind it. Merge models"
            " that were trained under one template, or name the one that most were trained under first.",
        )
    base = states.pop(BASE, None)
    merged = {
        name: combine(
            config,
            name,
            [states[label][name] for label in labels],
            list(coefficients.values()),
            base[name] if base else None,
        )
        for name in states[labels[0]]
    }
    model.load_state_dict(merged)
    with stage.output_model("model", role="policy") as directory:
        save_policy(model, renderers[labels[0]].tokenizer, directory)
    first = states[labels[0]]
    stage.summary(
        {
            "models": len(labels),
            **{f"coefficient/{label}": c for label, c in coefficients.items()},
            "distance_to_first": float(
                sum(
                    (merged[n].double() - first[n].double()).square().sum()
                    for n in merged
                    if merged[n].is_floating_point()
                )
                ** 0.5
            ),
        }
    )


def coefficients_of(config: Config, labels: list[str]) -> dict[str, float]:
    """Coefficient per label, in the models' order.

    Raises:
        ConfigError: unknown or missing labels, or shares that do not sum to 1 where they must.
    """
    share = config.method in ("linear", "slerp")
    if not config.coefficients:
        return {label: 1.0 / len(labels) if share else 1.0 for label in labels}
    if set(config.coefficients) != set(labels):
        raise ConfigError(
            f"merge: coefficients name {sorted(config.coefficients)}, the models are {sorted(labels)}; name each model"
            " once"
        )
    found = {label: config.coefficients[label] for label in labels}
    if share and abs(sum(found.values()) - 1.0) > 1e-9:
        raise ConfigError(
            f"merge: the coefficients sum to {sum(found.values()):g}; for method={config.method} they must sum to 1"
            " (write method=task_arithmetic to add differences)"
        )
    return found


def settings_of(config) -> dict:
    """The settings of an architecture that decide what its weights compute, those of its parts among them."""

    def kept(settings: dict) -> dict:
        return {
            name: kept(value) if isinstance(value, dict) else value
            for name, value in settings.items()
            if name not in COSMETIC and not name.startswith("_")
        }

    return kept(config.to_dict())


def check_alike(states: dict, settings: dict, vocabularies: dict) -> None:
    """Refuse models whose weights do not mean the same: tensors that differ in name, shape or kind, settings or
    vocabularies that differ.

    Args:
        states, settings, vocabularies: by model; tensors by name, :func:`settings_of`, ``Renderer.vocabulary_hash``.
    """
    first, reference = next(iter(states.items()))
    for label, state in states.items():
        odd = sorted(set(state) ^ set(reference)) or [
            n for n in reference if state[n].shape != reference[n].shape or state[n].dtype != reference[n].dtype
        ]
        if odd:
            raise ConfigError(
                f"merge: models {first} and {label} differ in {odd[0]} ({len(odd)} tensors in all); merge models of one"
                " architecture and vocabulary"
            )
        mine, theirs = settings[first], settings[label]
        odd = [
            f"{n} ({mine.get(n)} and {theirs.get(n)})"
            for n in sorted(set(mine) | set(theirs))
            if mine.get(n) != theirs.get(n)
        ]
        if odd:
            raise ConfigError(
                f"merge: models {first} and {label} differ in {', '.join(odd[:4])} of their config.json, so the same"
                " weights compute something else in each; merge models that were trained from one base, or make the"
                " settings equal where the difference is known to mean nothing"
            )
        if vocabularies[label] != vocabularies[first]:
            raise ConfigError(
                f"merge: the tokenizers of {first} and {label} give the same ids to different words, so a mean of their"
                " embeddings is no word's; merge models of one vocabulary, or give both directories the same tokenizer"
                " where one only names tokens that the other never uses"
            )


def combine(config: Config, name: str, tensors: list, coefficients: list[float], base=None):
    """One merged tensor, in the type of the first."""
    import torch

    first = tensors[0]
    if not first.is_floating_point():
        return first
    wide = [t.to(torch.float64 if t.dtype == torch.float64 else torch.float32) for t in tensors]
    if config.method == "slerp":
        merged = slerp(wide[0], wide[1], coefficients[1])
    elif config.method == "linear":
        merged = sum(c * w for c, w in zip(coefficients, wide))
    else:
        origin = base.to(wide[0].dtype)
        changes = [w - origin for w in wide]
        if config.method == "ties":
            merged = origin + ties(changes, coefficients, config.density)
        else:
            merged = origin + sum(c * d for c, d in zip(coefficients, changes))
    return merged.to(first.dtype)


def slerp(a, b, share: float):
    """Point at ``share`` of the way along the arc from a to b; along the line where they are (nearly) parallel."""
    import torch

    cosine = (torch.dot(a.flatten(), b.flatten()) / (a.norm() * b.norm()).clamp_min(1e-30)).clamp(-1.0, 1.0)
    angle = torch.arccos(cosine)
    if float(angle) < 1e-4 or float(angle) > 3.14149:
        return (1 - share) * a + share * b
    return (torch.sin((1 - share) * angle) * a + torch.sin(share * angle) * b) / torch.sin(angle)


def ties(changes: list, coefficients: list[float], density: float):
    """Trim, elect sign, merge: per entry the mean of the trimmed changes that have the elected sign."""
    import torch

    trimmed = []
    for change, c in zip(changes, coefficients):
        keep = max(1, round(density * change.numel()))
        threshold = change.abs().flatten().kthvalue(change.numel() - keep + 1).values
        trimmed.append(torch.where(change.abs() >= threshold, c * change, 0.0))
    stacked = torch.stack(trimmed)
    sign = torch.sign(stacked.sum(0))
    agrees = (torch.sign(stacked) == sign) & (stacked != 0)
    return torch.where(agrees, stacked, 0.0).sum(0) / agrees.sum(0).clamp_min(1)
