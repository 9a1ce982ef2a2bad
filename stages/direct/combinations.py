"""Which settings of align go with which direct-alignment method, and which losses add up to one."""

from __future__ import annotations

from stages.algorithms import DirectMethod

#: Where options of direct methods make sense (of one method alone: METHOD.OPTION): numbers in [low, high), or the words
#: to choose from; all others take any number.
OPTION_RANGES: dict[str, tuple] = {
    "label_smoothing": (0.0, 0.5),
    "exo_pair.label_smoothing": (1e-12, 0.5),  # its KL to labels without smoothing is infinite
    "discopop_tau": (1e-6, float("inf")),
    "eta": (1e-12, float("inf")),
    "momentum": (0.0, 1.0),
    "offset_fn": ("log", "identity"),
    **{
        name: (0.0, float("inf"))
        for name in (
            "desirable_weight",
            "undesirable_weight",
            "reg_coef",
            "cal_weight",
            "conditional_weight",
            "anchor_weight",
            "simpo_gamma",
        )
    },
}


#: Settings of align that are read under a condition only, as ``stages.policy.read_when.RL_READ_WHEN``: the method's row ``m`` and the config
#: ``c``.
DIRECT_READ_WHEN = (
    (
        ("reference_alpha",),
        lambda m, c: c.reference_update == "tr_soft",
        "it is a share of the mixed reference; write reference_update=tr_soft",
    ),
    (
        ("reference_decay",),
        lambda m, c: c.reference_update == "ema",
        "it is the decay of the averaged reference; write reference_update=ema",
    ),
    (
        ("reference_interval",),
        lambda m, c: c.reference_update in ("tr_soft", "per_interval", "bema"),
        "the reference does not move every so many steps; write reference_update=tr_soft, per_interval or bema",
    ),
    (
        ("reference_bema",),
        lambda m, c: c.reference_update == "bema",
        "it is the average that stands as the reference; write reference_update=bema",
    ),
    (("z_ref_mode",), lambda m, c: m.statistic == "z0", "only kto has a reference point; write method=kto"),
    (
        ("win_probability",),
        lambda m, c: "win_prob" in m.columns,
        "only sppo reads win probabilities; write method=sppo",
    ),
    (
        ("segment_pairing", "aspect_weights"),
        lambda m, c: m.data == "segments",
        "only 2d_dpo pairs segments; write method=2d_dpo",
    ),
    (
        ("corruption", "corruption_share"),
        lambda m, c: m.data == "conditions",
        "only mdpo corrupts prompts; write method=mdpo",
    ),
    (
        ("corruption_share",),
        lambda m, c: c.corruption != "shuffle",
        "shuffling keeps every part; write corruption=drop or truncate",
    ),
    (
        ("loss_weight",),
        lambda m, c: bool(c.also) or (m.nll_coef if c.nll_coef is None else c.nll_coef) > 0,
        (
            "there is no other loss beside it, so it would only scale the gradient; "
            "write also='[{method: bco_pair, weight: 0.2}]', or nll_coef=1"
        ),
    ),
    (
        ("f_divergence_type",),
        lambda m, c: m.divergence,
        (
            "its implicit rewards come from another f-divergence only where a loss reads nothing but their difference;"
            " write method=dpo, ipo, length_norm, hinge_norm, exo_pair, robust_dpo or discopop"
        ),
    ),
    (
        ("f_alpha_divergence_coef",),
        lambda m, c: c.f_divergence_type == "alpha_divergence",
        "only the alpha-divergence has a coefficient; write f_divergence_type=alpha_divergence",
    ),
    (
        ("ld_alpha",),
        lambda m, c: m.data == "pairs" and m.needs_reference and (c.logp_reduction or m.logp_reduction) == "sum",
        (
            "it weighs what a response of a pair has beyond the length of the other in sums of log-probs that are"
            " compared with a reference; write method=dpo (without logp_reduction=mean)"
        ),
    ),
    (
        ("nll_reduction",),
        lambda m, c: (m.nll_coef if c.nll_coef is None else c.nll_coef) > 0,
        "there is no NLL term; write nll_coef=1",
    ),
)


def refuse_addend(row: DirectMethod, added: DirectMethod, config) -> None:
    """Refuse a loss that cannot be added to that of ``row`` on the same pairs (``align also=``), with what to write
    instead.
    """

    def refuse(why: str):
        raise ValueError(f"also: {added.name} cannot be added to {row.name}: {why}")

    if row.data != "pairs" or added.data != "pairs":
        refuse(
            "losses are added on pairs only, with one chosen and one rejected response; write two methods on pairs,"
            " such as method=dpo with bco_pair"
        )
    if row.needs_reference != added.needs_reference:
        refuse(
            "one compares with a reference policy and the other has none; write two methods of one kind, such as dpo"
            " with bco_pair, or simpo with reference_free"
        )
    if row.statistic or added.statistic:
        refuse("aot and aql read all rows of a step at once and are trained alone; leave one of them out")
    if added.nll_coef:
        refuse(
            "it has an NLL term of its own, and a run has one; write it as method and add the other, or nll_coef=1"
            " with " + {"dpo_nll": "dpo", "cpo": "reference_free"}.get(added.name, "another loss")
        )
    if added.reads_target or added.name == "written":
        refuse(f"write method={added.name} and add the other to it")
    if ("label_prob" in row.columns) != ("label_prob" in added.columns):
        refuse(
            "one reads the probability that a pair is labelled right and the other takes every label as certain; write"
            " soft_dpo with soft_ipo, or dpo with ipo"
        )
    if config.f_divergence_type != "reverse_kl" and not added.divergence:
        refuse(f"it has no form with f_divergence_type={config.f_divergence_type}; leave that out")
    if config.ld_alpha is not None and added.logp_reduction != "sum":
        refuse("it compares means of log-probs, which ld_alpha does not weigh; leave ld_alpha out")
    if (
        (config.logp_reduction or row.logp_reduction) != added.logp_reduction
        and added.default_beta is not None
        and next(o for o in config.also if o.method == added.name).beta is None
    ):
        refuse(
            "one compares sums and the other means of log-probs, so they cannot share a beta; write its own, for"
            f" example beta: {added.default_beta:g}"
        )


def validate_direct(row: DirectMethod, beta: float | None, has_reference: bool) -> list[str]:
    """Refuse impossible direct-alignment settings and return warnings."""
    if row.default_beta is None and beta is not None:
        raise ValueError(f"{row.name} has no beta; leave it out (its options are {', '.join(row.options)})")
    if row.default_beta is not None and not beta > 0:
        raise ValueError(f"beta={beta} must be > 0; write {row.default_beta} for {row.name}")
    if row.needs_reference and not has_reference:
        raise ValueError(
            f"{row.name} compares with a reference policy; give one (normally the model you start from), or use"
            " method=simpo or orpo"
        )
    if not row.needs_reference and has_reference:
        raise ValueError(f"{row.name} has no reference policy; leave the reference input and reference_update out")
    return (
        [f"beta={beta} is below the usual range for simpo; write beta=2 to 2.5"]
        if row.name == "simpo" and beta < 1
        else []
    )
