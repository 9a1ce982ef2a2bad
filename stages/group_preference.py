"""group_preference: learn to predict a group's preferences from a few of its ratings (``rm.gpo``, Zhao et al. 2023).

Rows say which group gave which rating to which response: ratings or pairs with a column ``group`` (or an annotator), or
rows with embeddings of their own. Pairs that several groups judged contradict each other by design: ingest them with
``deduplicate=off contradictions=off``. A frozen model embeds question and response; a small transformer learns, group
by group, to predict ratings of some questions from those of others (:mod:`stages.reward_models.preference_module`).
Groups that it never saw say how well it does for a context of 1, 2, 5 ... questions.

    posttrain stage group_preference --input model=LLM --input data=ratings.jsonl --name-as judge
    posttrain stage rejection --input model=POLICY --input prompts=FILE --input group_preference=model:judge@candidate
    --input context=ratings.jsonl \\
        --set rewards='[{kind: group_preference, group: NAME}]'
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec, left_out


class Config(StageConfig):
    learning_rate: float = Field(3e-4, gt=0, description="Peak AdamW learning rate (Zhao et al. 3e-4, unverified).")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="After warm-up: constant, or decay to 0."
    )
    warmup_ratio: float = Field(0.1, ge=0, le=1, description="Share of the steps spent in linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, on matrices only.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient-norm clip.")
    max_steps: int = Field(500, ge=1, description="Optimizer steps.")
    batch_size: int = Field(
        32,
        ge=1,
        description=(
            "Episodes per optimizer step: a random group, its questions cut at random into context and targets."
        ),
    )
    max_questions: int = Field(64, ge=2, description="Questions of an episode at most.")
    hidden_size: int = Field(128, ge=8, description="Width of the module.")
    num_layers: int = Field(4, ge=1, description="Blocks of the module.")
    num_heads: int = Field(4, ge=1, description="Attention heads.")
    likelihood: Literal["unit_variance", "learned_variance"] = Field(
        "unit_variance",
        description="Gaussian of a rating: variance 1 in standardised units (squared error), or predicted too.",
    )
    max_length: int = Field(1024, ge=8, description="Tokens of question and response that are embedded at most.")
    held_out_share: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Share of the groups that are not trained on and judge the module (rounded up); 0 = none.",
    )
    eval_context_sizes: list[int] = Field(
        [1, 2, 5, 10], description="Questions of the context at which held-out groups are predicted."
    )
    eval_repeats: int = Field(8, ge=1, description="Random contexts of every held-out group and size.")
    eval_every: int = Field(
        0, ge=0, description="Optimizer steps between validation passes; 0 = only at start and end."
    )
    max_tokens_per_micro_batch: int = Field(
        8192,
        ge=1,
        description=(
            "Tokens per embedding forward, and points per training forward; bounds memory, cannot change the result."
        ),
    )

    @model_validator(mode="after")
    def _whole_heads(self):
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}; write for example "
                f"hidden_size={32 * self.num_heads}"
            )
        if min(self.eval_context_sizes, default=1) < 1:
            raise ValueError(
                "eval_context_sizes are numbers of questions, 1 or more; what no context gives is reported anyway"
            )
        return self

    def optimizer(self):
        """The settings of the training loop that apply to a small module."""
        from stages.settings import OptimizerConfig

        return OptimizerConfig(
            **{
                name: getattr(self, name)
                for name in (
                    "learning_rate",
                    "lr_schedule",
                    "warmup_ratio",
                    "weight_decay",
                    "max_grad_norm",
                    "max_tokens_per_micro_batch",
                )
            }
        )


SPEC = StageSpec(
    name="group_preference",
    config=Config,
    gpu=True,
    inputs={
        "model": InputSpec("model", doc="Frozen decoder or encoder whose mean hidden state is a point's embedding."),
        "data": InputSpec(
            "dataset",
            kinds=("ratings/1", "pairs/1", "group_preferences/1"),
            doc="Ratings or pairs of groups, two questions each or more, in the split train; those of others are not read.",
        ),
    },
    outputs={"model": OutputSpec("model", role="reward")},
)


#: Points that are embedded as one resumable unit.
BLOCK = 512


class Group:
    """One group's points, question by question."""

    def __init__(self, points):
        import numpy as np

        questions: dict[str, list] = {}
        for point in points:
            questions.setdefault(point.question, []).append(point)
        self.name = points[0].group
        self.questions = [
            (
                np.stack([p.embedding for p in rated]),
                np.array([p.y for p in rated], np.float32),
                np.array([p.weight for p in rated]),
            )
            for rated in questions.values()
        ]

    def episode(self, order, context: int):
        """An item of the questions in ``order``, the first ``context`` of them with their ratings."""
        import numpy as np

        from stages.batching import make_item

        chosen = [self.questions[i] for i in order]
        y = np.concatenate([q[1] for q in chosen])
        return make_item(
            self.name,
            [],
            [[0] * len(y)],
            [[1] * len(y)],
            x=np.concatenate([q[0] for q in chosen]),
            y=y,
            weights=np.concatenate([q[2] for q in chosen]),
            m=sum(len(q[1]) for q in chosen[:context]),
            borders=np.cumsum([0, *(len(q[1]) for q in chosen[context:])]),
        )


class Episodes:
    """Source: random episodes of random groups; context sizes are uniform over the questions that leave one to
    predict.
    """

    def __init__(self, stage, groups):
        self._stage, self._groups, self.total_steps = stage, groups, stage.config.max_steps

    def items(self, step: int):
        config, rng = self._stage.config, self._stage.rng("episodes", step)
        made = []
        for _ in range(config.batch_size):
            group = self._groups[int(rng.integers(len(self._groups)))]
            order = rng.permutation(len(group.questions))[: config.max_questions]
            made.append(group.episode(order, int(rng.integers(1, len(order)))))
        return made

    def state(self):
        return {}, {}

    def restore(self, state, read):
        pass

    def after_step(self, step, metrics):
        return {}


def run(stage):
    import torch

    from stages.reporting.reports import document, facts, line_chart, sample_table
    from stages.reward_models.preference_module import ContextLikelihood, Embedder, PreferenceModule, points_of, save
    from stages.reward_models.reward_heads import RewardCard
    from stages.training import Trainer, fit

    config = stage.config
    embedder = Embedder(stage.path("model"), stage.device, config.max_length, config.max_tokens_per_micro_batch)
    train, held_out, dropped = grouped(stage, points_of(stage.dataset("data"), split="train"), embedder)
    stage.log(f"{len(train)} groups to learn from, {len(held_out)} held out{left_out(dropped)}")
    size = train[0].questions[0][0].shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stage.seed_for("module") % 2**63)
        module = PreferenceModule(
            size, config.hidden_size, config.num_layers, config.num_heads, config.likelihood == "learned_variance"
        ).to(stage.device)
    every = [q for group in train for q in group.questions]
    module.standardise(*(torch.cat([torch.as_tensor(q[k]) for q in every]).to(stage.device) for k in (0, 1, 2)))
    trainer = Trainer(module, ContextLikelihood(), config.optimizer(), config.max_steps, stage.device)
    checks = [episode for _, _, episode in judged_episodes(stage, held_out)]
    fit(
        stage,
        trainer,
        Episodes(stage, train),
        evaluate=(lambda: trainer.evaluate(checks)) if checks else None,
        eval_every=config.eval_every,
    )
    module.eval()
    card = RewardCard(
        "group_preference", pooling="mean", max_length=config.max_length, options={"module": module.settings}
    )
    with stage.output_model("model", role="reward") as directory:
        save(directory, embedder, module, card)
    table = judge(stage, module, held_out)
    summary = {
        "steps": trainer.step_index,
        "groups": len(train),
        "held_out_groups": len(held_out),
        "points": sum(len(q[1]) for q in every),
        **{f"dropped/{k}": v for k, v in dropped.items()},
        **{
            f"held_out/{name}_at_{row['context']}": row[name]
            for row in table
            for name in ("mse", "nll", "accuracy")
            if row[name] is not None
        },
    }
    stage.summary(summary)
    if len(table) > 1:
        if table[-1]["mse"] >= table[-1]["mse_of_mean"]:
            stage.warn(
                "context_does_not_help",
                f"On held-out groups the error with {table[-1]['context']} questions of context"
                f" ({table[-1]['mse']:.3g}) is not below that of the mean rating for the same questions"
                f" ({table[-1]['mse_of_mean']:.3g}): groups are"
                " too few or too alike, or the embeddings do not tell the responses apart. Give more groups, raise"
                " max_steps, or use another model.",
            )
        stage.report(
            "context",
            png=line_chart(
                {"module": ([r["context"] for r in table], [r["mse"] for r in table])},
                title="Held-out groups",
                xlabel="questions of context",
                ylabel="squared error",
            ),
        )
    shown = ("Held-out groups by context", sample_table(table)) if table else None
    stage.report("summary", markdown=document("Group preference module", facts(summary), shown))


def grouped(stage, points, embedder):
    """(training groups, held-out groups, counts of what was dropped): points embedded, groups with two questions or
    more, in order of first appearance.
    """
    from base64 import b64decode, b64encode

    import numpy as np

    from stages.running.blocks import in_blocks
    from stages.settings import whole_part

    def embedded(part):
        return [
            None if x is None else b64encode(x.tobytes()).decode()
            for x in embedder((p.prompt, p.completion) for p in part)
        ]

    found = iter(
        in_blocks(stage, "embeddings", [p for p in points if p.embedding is None], embedded, BLOCK, "embeddings")
    )
    by_group: dict[str, list] = {}
    dropped = {"unreadable": 0, "one_question": 0}
    for point in points:
        if point.embedding is None and (text := next(found)) is not None:
            point.embedding = np.frombuffer(b64decode(text), np.float32)
        if point.embedding is None:
            dropped["unreadable"] += 1
        else:
            by_group.setdefault(point.group, []).append(point)
    if len({len(p.embedding) for rated in by_group.values() for p in rated}) > 1:
        raise ValueError("the rows' embeddings differ in length; give embeddings of one model in every row, or in none")
    groups = [Group(rated) for rated in by_group.values()]
    dropped["one_question"] = sum(len(g.questions) < 2 for g in groups)
    groups = [g for g in groups if len(g.questions) >= 2]
    out = -whole_part(-stage.config.held_out_share, len(groups))  # rounded up
    order = stage.rng("held out").permutation(len(groups))
    if len(groups) - out < 1:
        raise ValueError(
            f"{len(groups)} groups have two rated questions or more, and {out} of them would be held out; give more"
            " groups, or write held_out_share=0"
        )
    aside = set(order[:out].tolist())
    return [g for i, g in enumerate(groups) if i not in aside], [g for i, g in enumerate(groups) if i in aside], dropped


def judged_episodes(stage, groups):
    """[(context size, group, episode)] of held-out groups: random contexts of every size that leaves a question to
    predict.
    """
    config = stage.config
    return [
        (
            size,
            group,
            group.episode(stage.rng("judged", group.name, size, repeat).permutation(len(group.questions)), size),
        )
        for size in sorted(set(config.eval_context_sizes))
        for group in groups
        if size < len(group.questions)
        for repeat in range(config.eval_repeats)
    ]


def judge(stage, module, groups) -> list[dict]:
    """Rows {context, groups, mse, mse_of_mean, nll, accuracy}: errors of predicted ratings and of the mean rating of
    the training groups for the same questions (groups with few of them are in small contexts only), and the share of
    response pairs of one question that are ordered as the group orders them (ties of the prediction half). Context 0 is
    that mean for everything."""
    import numpy as np
    import torch

    from stages.reward_models.preference_module import gaussian_nll, padded

    found: dict[int, list] = {}
    for size, group, item in judged_episodes(stage, groups):
        with torch.no_grad():
            x, y, context, target = padded([item], stage.device)
            mean, log_variance = module(x, y, context)
            # a density of the ratings themselves
            nll = gaussian_nll(mean, (y - module.y_mean) / module.y_std, log_variance)[target] + module.y_std.log()
        wanted = y[target].double().cpu().numpy()
        predicted = (mean * module.y_std + module.y_mean)[target].double().cpu().numpy()
        found.setdefault(size, []).append(
            (
                group.name,
                wanted,
                predicted,
                nll.double().cpu().numpy(),
                ordered(wanted, predicted, item.extra["borders"]),
            )
        )
    table = []
    for size, rows in sorted(found.items()):
        pairs = [v for *_, verdicts in rows for v in verdicts]
        errors = np.concatenate([(wanted - predicted) ** 2 for _, wanted, predicted, *_ in rows])
        of_mean = np.concatenate([(wanted - float(module.y_mean)) ** 2 for _, wanted, *_ in rows])
        table.append(
            {
                "context": size,
                "groups": len({name for name, *_ in rows}),
                "mse": float(np.mean(errors)),
                "mse_of_mean": float(np.mean(of_mean)),
                "nll": float(np.mean(np.concatenate([n for *_, n, _ in rows]))),
                "accuracy": float(np.mean(pairs)) if pairs else None,
            }
        )
    if table:
        y = np.concatenate([q[1] for group in groups for q in group.questions]).astype(float)
        of_mean = float(np.mean((y - float(module.y_mean)) ** 2))
        table.insert(
            0,
            {
                "context": 0,
                "groups": len(groups),
                "mse": of_mean,
                "mse_of_mean": of_mean,
                "nll": None,
                "accuracy": None,
            },
        )
    return table


def ordered(wanted, predicted, borders) -> list[float]:
    """1, 0 or 1/2 for every pair of responses to one question with different ratings."""
    out = []
    for start, stop in zip(borders[:-1], borders[1:]):
        for i in range(start, stop):
            for j in range(start, i):
                if wanted[i] != wanted[j]:
                    out.append(
                        0.5
                        if predicted[i] == predicted[j]
                        else float((predicted[i] > predicted[j]) == (wanted[i] > wanted[j]))
                    )
    return out
