"""align: direct alignment of a policy on preference data (DPO and its relatives).

A method is a row of ``stages.algorithms.DIRECT_METHODS``; it says which data it reads: pairs, single responses with a
label (KTO, BCO), rankings of K responses (Plackett-Luce DPO, SPPO, RRHF) or paired segments (2D-DPO). Data of another
kind is converted where ingestion has a rule for it.

Log-probabilities of a frozen reference are computed once, before training, into a dataset (catalogue ``da.ref_cache``);
a cache from an earlier run can be given as input and is used only if its fingerprints match. A moving reference
(``reference_update``) is kept in memory instead. At step 0 policy equals reference, so DPO's loss must be ln 2: that is
checked (``da.dpo``). Chosen and rejected log-probabilities are logged separately, with the displacement metrics of
``da.displacement``; for methods without a reference these are relative to the starting policy, on the held-out rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stages.models.memory import Role
from stages.settings import EPOCHS, BemaConfig, ChatConfig, PolicyRowsConfig
from stages.spec import (
    ConfigError,
    InputSpec,
    OutputSpec,
    StageConfig,
    StageSpec,
    left_out,
    refuse_no_rows,
    summing_to_1,
    warn_of_cut_rows,
)

Method = Literal[
    "dpo",
    "cdpo",
    "robust_dpo",
    "soft_dpo",
    "ipo",
    "soft_ipo",
    "hinge_norm",
    "length_norm",
    "apo_zero",
    "apo_down",
    "discopop",
    "discovered",
    "pfl",
    "aql",
    "written",
    "cal_dpo",
    "nca_pair",
    "exo_pair",
    "r_dpo",
    "wpo",
    "aot_unpaired",
    "aot_paired",
    "dpo_nll",
    "mdpo",
    "2d_dpo",
    "odpo",
    "rpo",
    "rebel",
    "pl_dpo",
    "sppo",
    "sppo_hard",
    "rrhf",
    "kto",
    "bco",
    "bco_pair",
    "apo_zero_unpaired",
    "reference_free",
    "simpo",
    "alphapo",
    "cpo",
    "tpo",
    "tpo_l",
    "orpo",
    "slic",
]


class Addend(StageConfig):
    """One more loss on the same pairs, for losses that are sums of several (MPO, Wang et al. 2024)."""

    method: Method = Field(
        description=(
            "A row of stages.algorithms.DIRECT_METHODS on pairs, with a reference where the stage's method has one."
        )
    )
    weight: float = Field(1.0, gt=0, description="Factor in the sum (TRL loss_weights; MPO 0.2 for bco_pair).")
    beta: float | None = Field(
        None, gt=0, title="Beta", description="As of the stage's method, whose value it has where this is empty."
    )
    options: dict[str, bool | float | str] = Field(
        default_factory=dict, description="The loss's own options, as of the stage's method."
    )


class Config(PolicyRowsConfig, ChatConfig):
    LORA_RATE: ClassVar[float] = 10.0

    method: Method = Field("dpo", description="Direct-alignment loss (stages.algorithms.DIRECT_METHODS).")
    beta: float | None = Field(
        None,
        gt=0,
        title="Beta",
        description="Strength of the tie to the reference: higher stays closer; default the method's (dpo 0.1).",
    )
    learning_rate: float = Field(
        5e-7, gt=0, description="Peak learning rate (ours 5e-7, with LoRA 5e-6; TRL 1e-6; texts: very low)."
    )
    batch_size: int = Field(32, ge=1, description="Pairs (rows, prompts) per optimizer step (texts 32-64).")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the data.")
    max_steps: int | None = Field(
        None, ge=1, title="Max steps", description="Optimizer steps; overrides num_train_epochs."
    )
    max_length: int = Field(1024, ge=8, description="Tokens of prompt and longest response.")
    options: dict[str, bool | float | str] = Field(
        default_factory=dict, description="The method's own options, e.g. label_smoothing for cdpo."
    )
    also: list[Addend] = Field(
        default_factory=list,
        description=(
            "Losses that are added to the method's (TRL's list of loss_type); MPO is loss_weight=0.8 "
            "also='[{method: bco_pair, weight: 0.2}]' nll_coef=1 nll_reduction=token-mean."
        ),
    )
    loss_weight: float = Field(
        1.0, gt=0, description="Weight of the method's own loss beside those of `also` and the NLL term (MPO 0.8)."
    )
    mask_formatting: bool = Field(
        False,
        description=(
            "Leave formatting tokens out of the log-probs of all responses: turn headers and end of turn, which chosen"
            " and rejected share and whose likelihood the loss would push both ways (Llama 3)."
        ),
    )
    logp_reduction: Literal["sum", "mean"] | None = Field(
        None,
        title="Log-prob reduction",
        description="Token log-probs of a pair's responses summed or averaged; default the method's (TRL's ipo: mean).",
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = Field(
        "reverse_kl",
        description=(
            "f-DPO: the divergence whose derivative at policy/reference is the implicit reward, for methods that"
            " compare such rewards (dpo, ipo, length_norm ...)."
        ),
    )
    f_alpha_divergence_coef: float = Field(
        0.5,
        ge=0,
        le=1,
        description="f_divergence_type=alpha_divergence: its alpha; 0 is forward_kl, 1 reverse_kl (TRL 0.5).",
    )
    ld_alpha: float | None = Field(
        None,
        ge=0,
        le=1,
        title="LD alpha",
        description=(
            "LD-DPO: weight of the log-probs that a response has beyond the length of the pair's shorter one, in policy"
            " and reference; empty or 1: all tokens count alike."
        ),
    )
    nll_coef: float | None = Field(
        None,
        ge=0,
        title="NLL coefficient",
        description=(
            "Coefficient of an NLL term on the chosen response (tpo, tpo_l: on the gold answer); default the method's "
            "(cpo, dpo_nll, orpo, tpo, tpo_l 1; else 0). simpo with nll_coef is CPO-SimPO."
        ),
    )
    nll_reduction: Literal["seq-mean", "seq-sum", "token-mean"] | None = Field(
        None,
        title="NLL reduction",
        description=(
            "Of the NLL term: per response (mean or sum of its tokens), or the mean over all chosen tokens of the step"
            " (TRL's loss_type sft); default the method's (cpo: seq-sum)."
        ),
    )
    reference_update: Literal["frozen", "tr_soft", "ema", "per_interval", "bema"] = Field(
        "frozen",
        description=(
            "Moving reference (da.reference): tr_soft = mixed in every reference_interval steps (TR-DPO), ema = every"
            " step, per_interval = copied every reference_interval steps (BPO), bema = every reference_interval steps the"
            " bias-corrected moving average of the policy (reference_bema; TRL bema_for_ref_model)."
        ),
    )
    reference_alpha: float = Field(
        0.6, gt=0, le=1, description="tr_soft: share of the policy, ref <- a*pi + (1-a)*ref (TRL 0.6)."
    )
    reference_decay: float = Field(
        0.995, ge=0, lt=1, description="ema: share of the old reference, ref <- d*ref + (1-d)*pi."
    )
    reference_interval: int = Field(
        512,
        ge=1,
        description=(
            "tr_soft, per_interval, bema: optimizer steps between updates (TRL 512; of bema unless given its"
            " update_freq)."
        ),
    )
    reference_bema: BemaConfig = Field(
        default_factory=BemaConfig,
        title="Reference BEMA",
        description="bema: how the average moves, such as {update_freq: 10}.",
    )
    z_ref_mode: Literal["batch_mismatched", "heldout", "zero"] = Field(
        "batch_mismatched",
        description=(
            "kto: reference point z0 from mismatched pairs of each step, of the validation rows at each validation"
            " pass, or 0."
        ),
    )
    win_probability: Literal["ranks", "bradley_terry", "scores"] = Field(
        "ranks",
        description=(
            "sppo: P(y beats the prompt's other responses) from ranks, from sigma of score differences, or the scores"
            " themselves."
        ),
    )
    segment_pairing: Literal["by_index", "top_chosen_vs_bottom_rejected"] = Field(
        "by_index", description="2d_dpo: which segments are compared."
    )
    aspect_weights: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "2d_dpo: a segment's score as the weighted sum of its aspects, such as {accuracy: 0.7, tone: 0.3}; weights sum"
            " to 1, and a segment without one of these aspects is left out. Default: the mean of those it has."
        ),
    )
    corruption: Literal["drop", "shuffle", "truncate"] = Field(
        "drop", description="mdpo: what is done to the parts of the prompt's last message."
    )
    corruption_share: float = Field(0.5, gt=0, lt=1, description="mdpo: share of the parts dropped or cut off.")
    stage_index: int | None = Field(
        None, ge=0, title="Stage index", description="Train only on rows of this curriculum stage (column stage_index)."
    )
    eval_every: int = Field(
        0, ge=0, description="Optimizer steps between validation passes; 0 = only at start and end."
    )
    eval_rows: int = Field(1000, ge=0, description="Held-out rows used at most.")

    @field_validator("method", mode="before")
    @classmethod
    def _which_aot(cls, value):
        if value == "aot":
            raise ValueError(
                "aot has two meanings: it sorted chosen and rejected responses each by themselves here, which is"
                " aot_unpaired, and in TRL it sorts the differences of pairs, which is aot_paired; write the one that"
                " is meant"
            )
        return value

    @field_validator("aspect_weights")
    @classmethod
    def _sum(cls, weights: dict[str, float]):
        return summing_to_1("aspect_weights", weights, "{accuracy: 0.7, tone: 0.3}")

    @model_validator(mode="after")
    def _averaged_reference(self):
        if self.reference_update == "bema":
            every = self.reference_bema.update_freq
            if "reference_interval" not in self.model_fields_set:
                self.__dict__["reference_interval"] = every
            if self.reference_interval % every:
                raise ValueError(
                    f"reference_interval={self.reference_interval}: the average moves every update_freq={every} steps,"
                    f" and the reference with it; write reference_interval={-(-self.reference_interval // every) * every},"
                    f" or reference_bema='{{update_freq: {self.reference_interval}}}'"
                )
        return self

    @model_validator(mode="after")
    def _heldout_z0(self):
        if self.method == "kto" and self.z_ref_mode == "heldout" and not self.eval_every:
            raise ValueError(
                "z_ref_mode=heldout estimates z0 at every validation pass, and eval_every=0 makes none while it trains,"
                " so that z0 stays that of the start, 0; write eval_every=STEPS, or z_ref_mode=batch_mismatched"
            )
        return self

    def effective(self) -> dict:
        from stages.algorithms import DIRECT_METHODS

        row = DIRECT_METHODS[self.method]
        of_method = {
            "beta": row.default_beta,
            "logp_reduction": row.logp_reduction,
            "nll_coef": row.nll_coef,
            "nll_reduction": row.nll_reduction,
        }
        added = (
            {
                "also": [
                    {
                        **one.model_dump(),
                        "beta": one.beta or self.beta or row.default_beta or DIRECT_METHODS[one.method].default_beta,
                        "options": {**DIRECT_METHODS[one.method].options, **one.options},
                    }
                    for one in self.also
                ]
            }
            if self.also
            else {}
        )
        return {
            **added,
            "options": {**row.options, **row.settings, **self.options},
            **{name: value for name, value in of_method.items() if getattr(self, name) is None},
        }


def roles(config, given) -> list[Role]:
    """The policy; a frozen reference of its own until its log-probabilities are known, a moving one all along."""
    from stages.algorithms import DIRECT_METHODS

    found = [Role("policy", "model", trained=True, sharded=True)]
    source = "reference" if "reference" in given else "model"
    if not DIRECT_METHODS[config.method].needs_reference:
        return found
    if config.reference_update != "frozen":
        kept = ("start of the reference's average", "mean of the reference's average")
        averaged = [Role(name, "model", moves=True) for name in kept] if config.reference_update == "bema" else []
        return [*found, Role("reference", source, moves=True), *averaged]
    return found + [Role("reference", source, before=True, sharded=True)] * ("reference" in given)


SPEC = StageSpec(
    name="align",
    config=Config,
    gpu=True,
    parallel=True,
    roles=roles,
    inputs={
        "model": InputSpec("model", use="words", doc="Policy to start from (normally the SFT model)."),
        "data": InputSpec(
            "dataset",
            kinds=("pairs/1", "unpaired/1", "rankings/1", "segments/1"),
            doc="Preference data of the method's kind, or convertible to it.",
        ),
        "reference": InputSpec(
            "model", required=False, use="words", doc="Reference policy; default: the starting policy."
        ),
        "ref_logps": InputSpec(
            "dataset",
            kinds=("ref_logps/1", "ref_values/1"),
            required=False,
            doc="Reference log-probs of an earlier run.",
        ),
        "targets": InputSpec(
            "dataset",
            kinds=("demonstrations/1",),
            required=False,
            doc=(
                "slic: target answers, by prompt; default: the chosen answers. tpo, tpo_l: gold answers, by prompt;"
                " default: the column `reference` of the data."
            ),
        ),
        "objective": InputSpec(
            "dataset",
            kinds=("objectives/1",),
            required=False,
            doc="written: the loss, from the `objective` stage; default: options.code.",
        ),
    },
    outputs={
        "model": OutputSpec("model", role="policy"),
        "epoch": EPOCHS,
        "ref_logps": OutputSpec(
            "dataset",
            required=False,
            doc="Log-probs under the frozen reference; methods without one, and moving ones, have none.",
        ),
    },
)


def run(stage):
    import math

    from stages.chat import renderer_for, stage_renderer
    from stages.reporting.curves import training_report
    from stages.direct.direct_alignment import UNIT, AlignmentRows, DirectAlignment, MovingReference
    from stages.models.epochs import epochs_of
    from stages.models.modeling import follower, policy_to_train
    from stages.direct.preference_items import Encoder
    from stages.preflight import check_ids, preflight
    from stages.samples import Samples
    from stages.training import Trainer, TrainingError, check_selection, fit, kept_budget, or_keep
    from stages.validation_alarms import telling

    config, data = with_written_loss(stage), stage.dataset("data")
    try:
        objective = DirectAlignment(config, stage.has("reference"))
    except ValueError as error:  # settings that do not fit together are the user's to change: no traceback, exit code 2
        raise ConfigError(str(error)) from None
    method, unit = objective.reads, UNIT[objective.method.data]
    renderer = stage_renderer(stage)
    if stage.has("reference") and renderer_for(stage.path("reference")).vocabulary_hash != renderer.vocabulary_hash:
        raise ConfigError(
            "the input `reference` has another tokenizer than the policy, so the same ids are other words to it; give a"
            " model with the policy's vocabulary, normally the one that training starts from."
        )
    encode = Encoder(renderer, method, config, stage.rng, target_answers(stage, method))
    train = encode(data, "train")
    dropped = dict(encode.dropped)
    validation = encode(data, "validation", config.eval_rows)
    stage.log(f"{len(train)} training {unit}, {len(validation)} validation{left_out(dropped)}")
    warn_of_cut_rows(stage, dropped, len(train))
    refuse_no_rows(dropped, len(train))
    check_selection(config, bool(validation))
    for text in [*objective.warnings, *data_warnings(config, objective, train, validation)]:
        stage.warn("align_settings", text)
    frozen = method.needs_reference and config.reference_update == "frozen"
    seen = rows_seen(stage, train, config)
    if not frozen and stage.has("ref_logps"):
        raise ConfigError(
            f"method {config.method} with reference_update={config.reference_update} has no frozen reference; leave the"
            " ref_logps input out."
        )
    model, moving = policy_to_train(stage), None
    check_ids(model, train + validation, renderer)
    if method.needs_reference and not frozen:
        given = stage.has("reference")
        start = follower(stage.path("reference" if given else "model"), stage.device, model, config, not given)
        apart = given and config.reference_update == "bema"  # the average begins at the policy all the same
        moving = MovingReference(
            config,
            start,
            stage.device,
            follower(stage.path("model"), stage.device, model, config, True) if apart else None,
        )
    source = AlignmentRows(stage, model, objective, train, validation, moving)
    trainer = Trainer(model, objective, config, source.total_steps, stage.device)
    waits = config.reference_bema.update_after if config.reference_update == "bema" else 0
    if (
        config.reference_update in ("tr_soft", "per_interval", "bema")
        and waits + config.reference_interval >= source.total_steps
    ):
        stage.warn(
            "reference_never_moves",
            f"reference_update={config.reference_update} moves the reference every"
            f" reference_interval={config.reference_interval} steps"
            + (f" after update_after={waits}" if waits else "")
            + f", and this run has {source.total_steps} optimizer"
            " steps, so that it stays where it was. Write a smaller reference_interval, or reference_update=frozen.",
        )
    kept_budget(stage, trainer)
    if config.select_by and stage.checkpoints.latest() is None:
        or_keep(stage, lambda: source.rehearse_selection(trainer))
    if frozen:
        add_reference(stage, renderer, objective, seen + validation, model)
    elif not method.needs_reference:  # held-out displacement is measured from the start instead
        for item, values in zip(validation, objective.log_probs(model, validation, stage.device)):
            item.extra["ref"] = values
    if config.method == "dpo" and not config.also and not stage.has("reference") and stage.checkpoints.latest() is None:
        first = seen[: config.batch_size]
        source.prepare(first)
        loss = or_keep(stage, lambda: trainer.evaluate(first))["loss"]
        rounding = 1e-4 if config.compute_dtype == "float32" else 2e-2  # of bfloat16, which depends on the micro-batch
        if (
            not objective.nll_coef
            and any(i.extra["weight"] for i in first)
            and abs(loss - math.log(2)) > rounding * max(1.0, objective.scale * 10)
        ):
            raise TrainingError(
                f"Policy equals reference at step 0, so the DPO loss must be ln 2 = 0.6931, but it is {loss:.6f}. The "
                "cached reference does not belong to this model and data; drop the ref_logps input."
            )
    preflight(
        stage,
        trainer,
        seen,
        config.batch_size,
        renderer,
        prepare=source.prepare,
        completions_end=not config.mask_formatting,
    )

    def alarms(rows):
        # in the midst of a run one pass may be chance
        if both_fell(rows, 1 if trainer.step_index == trainer.total_steps else 2) or displaced(source.history):
            yield DISPLACED
        if overfits(rows, config.batch_size):
            yield OVERFIT

    samples = Samples(stage, model, renderer, data)
    epochs = epochs_of(stage, model, renderer.tokenizer, source)
    _, final = fit(
        stage,
        trainer,
        source,
        epochs=epochs,
        evaluate=telling(stage, lambda: source.evaluate(trainer), alarms) if validation else None,
        eval_every=config.eval_every,
    )
    samples.publish(model, renderer.tokenizer, epochs)
    summary = {
        "steps": trainer.step_index,
        unit: len(train),
        "skipped_steps": trainer.skipped,
        **{f"dropped/{k}": v for k, v in dropped.items()},
        **{f"validation/{k}": v for k, v in final.items()},
    }
    samples.warn_of_length()
    stage.summary(summary)
    training_report(stage, "Direct alignment", summary, samples.block())


def with_written_loss(stage):
    """The settings; for method=written with the loss of the input `objective` among the options, unit-tested again with
    the beta that is used.
    """
    from stages.algorithms import DIRECT_METHODS
    from stages.direct.objective_code import failures, program_of

    config = stage.config
    if config.method != "written":
        if stage.has("objective"):
            raise ConfigError(
                f"the input `objective` is a loss given as text, which method={config.method} does not read; write"
                " method=written, or leave it out."
            )
        return config
    code = config.options.get("code", "")
    if stage.has("objective"):
        row = next(iter(stage.dataset("objective").iter_rows()))
        if not row["valid"]:
            raise ValueError(f"the objective {row['name']!r} did not pass its unit tests: {row['failure']}")
        code = row["code"]
    if not code:
        raise ConfigError(
            "method=written needs a loss: write options.code='softplus(-beta * ((pc - pr) - (rc - rr)))' or give the"
            " input `objective`."
        )
    wrong = failures(program_of(code), config.beta or DIRECT_METHODS["written"].default_beta)
    if wrong:
        raise ConfigError(" ".join(wrong))
    return config.model_copy(update={"options": {**config.options, "code": code}})


def rows_seen(stage, train, config) -> list:
    """The training rows that ``max_steps`` steps will read, all of them from a whole epoch on; only these need a
    reference.
    """
    from stages.training import ShuffledRows

    if config.max_steps is None or config.max_steps * config.batch_size >= len(train):
        return train
    order = ShuffledRows(stage, train, config.batch_size, config.num_train_epochs, config.max_steps)
    return [item for step in range(order.total_steps) for item in order.items(step)]


DISPLACED = (
    "likelihood_displacement",
    "On held-out rows the log-probability of the chosen responses fell although the margin grew. Raise beta, lower"
    " learning_rate, train fewer steps, or take method=dpo_nll, cal_dpo or apo_zero.",
)
OVERFIT = (
    "preferences_overfit",
    "The policy orders more than 99% of the training rows right, and the share of held-out ones does not rise any more"
    " (validation/rewards/accuracies). Train fewer steps, lower learning_rate, raise beta, or take more prompts;"
    " eval_every with select_by=rewards/accuracies publishes the best pass.",
)


def both_fell(rows: Sequence[dict], passes: int) -> bool:
    """Whether at each of the last ``passes`` validation passes both log-probabilities fell on more than half of the
    held-out rows (section H, alarms).
    """
    shares = [row.get("validation/displacement/both_fell_fraction") for row in rows]
    last = [share for share in shares if isinstance(share, (int, float))][-passes:]
    return len(last) == passes and min(last) > 0.5


def displaced(history: list[list[float]], falls: int = 3) -> bool:
    """Whether chosen_shift fell and the margin grew at each of the last ``falls`` validation passes (section H,
    alarms).
    """
    last = history[-falls - 1 :]
    return len(last) == falls + 1 and all(b[0] < a[0] and b[1] > a[1] for a, b in zip(last, last[1:]))


#: Training rows that an accuracy is of at least, before it is said to be above 0.99 (ours).
SURE = 100


def overfits(rows: Sequence[dict], batch_size: int) -> bool:
    """Whether, in the metric rows of a run, the accuracy over the last tenth of the steps (and at least ``SURE`` rows)
    is above 0.99 on training rows, while that on held-out ones is no better than in an earlier pass (section H, alarms).
    """

    def values(name: str) -> list[float]:
        return [row[name] for row in rows if isinstance(row.get(name), (int, float))]

    train, held_out = values("rewards/accuracies"), values("validation/rewards/accuracies")
    late = train[-max(len(train) // 10, -(-SURE // batch_size)) :]
    return (
        len(late) * batch_size >= SURE
        and len(held_out) > 1
        and sum(late) > 0.99 * len(late)
        and held_out[-1] <= max(held_out[:-1]) + 0.01
    )


def target_answers(stage, method) -> dict[str, list[dict]] | None:
    """prompt_id -> the demonstration's answer, from the ``targets`` input (``da.slic``, TPO)."""
    from storage.schema import prompt_id

    if not stage.has("targets"):
        return None
    if not method.reads_target:
        raise ConfigError(
            f"the input `targets` is read by methods slic, tpo and tpo_l only; leave it out for {method.name}."
        )
    found = {}
    for row in stage.dataset("targets").iter_rows():
        first = min(row["train_turns"])
        found.setdefault(prompt_id(row["messages"][:first]), row["messages"][first:])
    return found


def data_warnings(config: Config, objective, train, validation) -> list[str]:
    """What the rows say about the settings (``da.kto``: weights and mismatched pairs)."""
    from stages.direct.direct_losses import kto_weight_range

    texts = []
    if ignored := sum(i.extra.get("unread_weight", 1.0) != 1.0 for i in train):
        texts.append(
            f"{ignored} rows have a weight other than 1, and {objective.method.name} matches the sorted responses of a"
            " step, in which all rows count alike; their weights change nothing. Write method=dpo to weigh rows."
        )
    if objective.method.data != "unpaired":
        return texts
    good, bad = (sum(i.extra["weight"] for i in train if i.extra["label"] is side) for side in (True, False))
    if not (good and bad):
        texts.append(
            f"all rows are {'desirable' if good else 'undesirable'}; {objective.method.name} learns from the contrast;"
            " add rows of the other label."
        )
    if objective.method.name != "kto":
        return texts
    weights = {k: float(objective.arguments[k]) for k in ("desirable_weight", "undesirable_weight")}
    if good and bad:
        low, high = kto_weight_range(good, bad, weights["undesirable_weight"])
        if not low <= weights["desirable_weight"] <= high:
            texts.append(
                f"{good:g} desirable and {bad:g} undesirable rows (each by its weight) with weights"
                f" {weights['desirable_weight']:g} and {weights['undesirable_weight']:g}: desirable_weight times rows"
                f" should be 1 to 1.5 times the other side's; write options.desirable_weight between {low:.4g} and"
                f" {high:.4g}."
            )
    size = min(config.batch_size, len(train))
    steps = -(-len(train) // max(1, size))
    if config.z_ref_mode == "batch_mismatched" and (size < 2 or not any("mismatched" in i.extra for i in train)):
        texts.append(
            "z0 needs at least two rows with different prompts in a step and is 0 here; raise batch_size, or set"
            " z_ref_mode=heldout and eval_every=STEPS."
        )
    elif (
        config.z_ref_mode == "batch_mismatched"
        and len(train) % size == 1
        and (config.max_steps or round(config.num_train_epochs * steps)) >= steps
    ):
        fitting = next(b for b in range(size + 1, len(train) + 1) if len(train) % b != 1)
        texts.append(
            f"{len(train)} rows in steps of {size} leave one row for the last step of an epoch, and z0, which needs"
            f" two, is 0 there; write batch_size={fitting}, or set z_ref_mode=heldout and eval_every=STEPS."
        )
    if config.z_ref_mode == "heldout" and not validation:
        raise ConfigError(
            "z_ref_mode=heldout estimates z0 on validation rows and there are none; give data with a validation split,"
            " or z_ref_mode=batch_mismatched."
        )
    total = config.max_steps or max(1, round(config.num_train_epochs * steps))
    if config.z_ref_mode == "heldout" and config.eval_every >= total:
        raise ConfigError(
            f"z_ref_mode=heldout estimates z0 at every validation pass, and with eval_every={config.eval_every} the run"
            f" of {total} optimizer steps has none while it trains, so that z0 stays that of the start, 0; write a"
            " smaller eval_every, or z_ref_mode=batch_mismatched."
        )
    return texts


def add_reference(stage, renderer, objective, items, policy) -> None:
    """Fill ``ref`` of every item (and of its mismatched row) from the given cache, or compute and publish the values.

    ``policy`` has not been trained yet, so it is the reference itself where no other is given (its adapter switched
    off). Where it is sharded all ranks compute together, a given reference in shards too, else the first one does.
    """
    from stages.running.ranks import connect, first_rank_only, gather
    from stages.models.sharding import root_of
    from storage.datasets import is_dataset, open_dataset

    connect(stage.device)
    role = "reference" if stage.has("reference") else "model"
    items = items + [i.extra["mismatched"] for i in items if "mismatched" in i.extra]
    prints = fingerprints(stage, role, renderer)
    path = stage.workdir / "out" / "ref_logps"
    known = gather(is_dataset(str(path)))[0]  # a resumed run finds it complete
    with first_rank_only() as here:
        if not known and (here or root_of(policy) is not None):
            write_reference(stage, role, objective, items, prints, matching_cache(stage, items, prints), policy)
    stored = {r["group_id"]: values_of(r) for r in open_dataset(str(path)).iter_rows()}
    for item in items:
        item.extra["ref"] = stored[item.row_id]


def values_of(row: dict) -> list:
    """Values of each response from a row of ``ref_logps/1`` or ``ref_values/1`` (a response with several segments or
    parts has a list).
    """
    if row["schema"] == "ref_logps/1":
        return [row["ref_chosen_logp"], row["ref_rejected_logp"]]
    values, parts = row["ref_values"], row["parts"]
    if parts is None:
        return list(values)
    ends = [sum(parts[: k + 1]) for k in range(len(parts))]
    return [values[end - n : end] for end, n in zip(ends, parts)]


#: Rows whose reference log-probs are computed as one resumable unit.
BLOCK = 512


def write_reference(stage, role: str, objective, items, prints, cached, policy) -> None:
    """Compute what the cache lacks, block by block, and publish all of it: pairs as ``ref_logps/1``, else (and in two
    parts, for ``ld_alpha``) ``ref_values/1``."""
    from stages.models.adapters import AdapterOff, is_adapted
    from stages.running.blocks import in_blocks
    from stages.models.modeling import load_frozen
    from stages.models.sharding import asked, root_of, shard
    from storage.schema import complete_row

    split = objective.method.data == "segments" or stage.config.ld_alpha is not None
    kind = "ref_logps/1" if objective.method.data == "pairs" and not split else "ref_values/1"
    writer = stage.writer("ref_logps", kind)
    # methods on rankings leave out other responses of a row
    cached = {i.row_id: cached[i.row_id] for i in items if len(cached.get(i.row_id, ())) == len(i.responses)}
    by_row, model = dict(cached), None
    known = [i for i in items if i.row_id in cached][:4]

    def live(part):
        nonlocal model
        if model is None and role == "model":
            model = AdapterOff(policy) if is_adapted(policy) else policy
        if model is None:
            model = load_frozen(
                stage.path(role), stage.device, stage.config.frozen_dtype, in_shards=asked(stage.config)
            )
            if asked(stage.config):
                shard(model, stage.device)
        return zip((i.row_id for i in part), objective.log_probs(model, part, stage.device))

    if not all(agrees(by_row[name], values, stage.config) for name, values in live(known)):
        stage.warn(
            "wrong_reference_cache",
            "Reference log-probs in ref_logps are not those of this reference on the same rows, although their"
            " fingerprints agree; all are recomputed. Leave the input ref_logps out.",
        )
        by_row, cached = {}, {}

    def values(part):
        missing = [i for i in part if i.row_id not in by_row]
        by_row.update(live(missing) if missing else ())
        return [by_row[i.row_id] for i in part]

    once = list({i.row_id: i for i in items}.values())
    found = dict(
        zip(
            (i.row_id for i in once),
            in_blocks(
                stage,
                "reference",
                once,
                values,
                BLOCK,
                "reference log-probabilities",
                together=root_of(policy) is not None,
            ),
        )
    )
    for start in range(0, len(items), BLOCK):
        rows = []
        for item in items[start : start + BLOCK]:
            of_item, lengths = found[item.row_id], [int(m.sum()) for m in item.masks]
            if kind == "ref_logps/1":
                own = {
                    "ref_chosen_logp": of_item[0],
                    "ref_rejected_logp": of_item[1],
                    "n_chosen": lengths[0],
                    "n_rejected": lengths[1],
                }
            else:
                own = {
                    "ref_values": [v for one in of_item for v in one] if split else of_item,
                    "parts": [len(v) for v in of_item] if split else None,
                    "n_tokens": lengths,
                }
            rows.append(
                complete_row(
                    kind,
                    {
                        "group_id": item.row_id,
                        "prompt_id": item.extra["prompt_id"],
                        **own,
                        **prints_of_row(item, prints),
                    },
                    dataset="ref_logps",
                    source="align",
                    origin="conversion",
                )
            )
        writer.write(rows)
        writer.flush()
    writer.close({"rows": len(items), "from_cache": len(cached)})


def agrees(cached: list, live: list, config) -> bool:
    """Whether cached values of one row are the live ones, to 1e-3 relative; bfloat16 rounds by more
    (``da.ref_cache``).
    """
    import numpy as np

    flat = [np.concatenate([np.ravel(v) for v in values]) for values in (cached, live)]
    return flat[0].shape == flat[1].shape and bool(
        np.allclose(*flat, rtol=1e-3 if config.compute_dtype == "float32" else 2e-2, atol=1e-2)
    )


def fingerprints(stage, role: str, renderer) -> dict[str, str]:
    """What a cached log-prob depends on besides the row: weights, tokenizer, template, truncation
    (``da.ref_cache``).
    """
    config = stage.config
    template = (
        f"{renderer.template_hash}:{config.max_length}:{config.compute_dtype}{':unformatted' * config.mask_formatting}"
    )
    # under auto the numbers are those of float32
    if config.frozen_dtype not in ("auto", "float32") and (config.lora_rank or role == "reference"):
        template += f":frozen_{config.frozen_dtype}"
    if config.method == "mdpo":
        template += f":{config.corruption}:{config.corruption_share}:{stage.seed}"
    if config.method == "2d_dpo":
        template += f":{config.segment_pairing}"
        if config.aspect_weights:  # which decide what is compared with what, and what is left out
            template += f":{sorted(config.aspect_weights.items())}"
    if config.ld_alpha is not None:  # two values per response, whatever the weight of the second
        template += ":common"
    return {
        "ref_model_hash": stage.inputs[role].digest,
        "tokenizer_hash": renderer.vocabulary_hash,
        "template_id": template,
    }


def prints_of_row(item, prints: dict[str, str]) -> dict[str, str]:
    """The fingerprints of one row: the sums over its segments are those of these spans of tokens alone, however they
    were found.
    """
    if "segments" not in item.extra:
        return prints
    from storage.files import canonical_json, sha256_text

    spans = sha256_text(canonical_json(item.extra["segments"]))[:16]
    return {**prints, "template_id": f"{prints['template_id']}:{spans}"}


def matching_cache(stage, items, prints: dict[str, str]) -> dict[str, list]:
    """{row id: values} of the rows of the input ``ref_logps`` that are of these items under these fingerprints."""
    if not stage.has("ref_logps"):
        return {}
    wanted = {item.row_id: prints_of_row(item, prints) for item in items}
    cached, stale = {}, 0
    for row in stage.dataset("ref_logps").iter_rows():
        if row["group_id"] not in wanted:
            continue
        if all(row[k] == v for k, v in wanted[row["group_id"]].items()):
            cached[row["group_id"]] = values_of(row)
        else:
            stale += 1
    if stale:
        stage.warn(
            "stale_reference_cache",
            f"{stale} cached reference rows belong to another model, tokenizer, template, max_length or other segments"
            " and are recomputed. Give the ref_logps of a run with this reference and these settings, or leave the input out.",
        )
    return cached
