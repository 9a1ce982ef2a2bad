"""evaluate: what a model can do on held-out prompts or pairs, with confidence intervals.

``target=policy``        samples k answers per prompt (and one greedy answer), grades them with verifiers and, if given, a reward
                         model; on prompts with constraints also reports the four IFEval accuracies (eval.ifeval);
                         estimates KL to a reference; judges preference pairs by the policy's own likelihood.
                         With ``environment`` it acts in one over turns: success, turns, tool errors and truncations
                             (eval.tool);
                         with ``environment=debate`` it argues for both answers before a judge: how often the judge is
                         right, with and without the debate, and how often the first side wins (eval.debate). Prompts
                         with ``choices`` are also read by the log-probability of their letters and of their texts
                         (``stages/evaluation/multiple_choice.py``); ``few_shot`` shows examples first
                         (``stages/evaluation/few_shot.py``); plain ``texts`` give perplexity and bits per byte
                         (``stages/evaluation/held_out_text.py``).
                         Prompts that bring perturbed forms: what the change costs (``evaluation/perturbed.py``).
                             ``token_shift``: how much alignment changed
                         (``evaluation/shift.py``). Several samples: what more samples and tokens buy
                         (``evaluation/compute.py``).
                         Answers that somebody else made (input ``answers``, in the place of a model) are graded in the same
                             way (``evaluation/given.py``).
                         Prompts with a label safe or unsafe, or with a mirror image: refusals
                             (``evaluation/refusals.py``); with ``mt_bench``
                         questions of several turns, rated by a judge (``evaluation/mt_bench.py``). Always signs of
                         style, reasoning, diversity.
``target=reward_model``  scores held-out pairs: accuracy, calibration, length bias, probes that should score low
(``rm.eval``); of pairs that name a
                         subset, accuracy per subset and section and in total (RewardBench,
                         ``evaluation/rewardbench.py``; RewardBench 2 and RM-Bench, ``evaluation/best_of.py``).
``target=judge``         the same of a language model that is asked which answer is better, in both orders; ties count half in RewardBench.

Every answer is kept (``eval_samples/1``), every number with its error (``eval_scores/1``). The seed of a sample depends
on the prompt row and the sample index only, so two models evaluated with the same settings are compared on paired
samples. A *protocol hash* (prompts, split, template, sampling, stop set, graders) is stored with all results;
``promote`` and ``compare`` refuse to compare different ones. Work is done in chunks; a killed run continues at the last
complete chunk.
"""

from __future__ import annotations

from stages.evaluation import given, protocol, units
from stages.evaluation.plan import Plan
from stages.evaluation.report import conclude
from stages.evaluation.settings import EvaluationConfig
from stages.reward.components import REWARD_INPUTS
from stages.spec import InputSpec, OutputSpec, StageSpec


# of this module, by which errors and forms name settings
class Config(EvaluationConfig):
    pass


SPEC = StageSpec(
    name="evaluate",
    config=Config,
    gpu="models",
    judges="model",
    check=given.check,
    unread=given.unread,
    inputs={
        "model": InputSpec("model", required=False, doc="The model that is judged."),
        "answers": InputSpec(
            "file",
            required=False,
            doc=(
                "Answers that somebody else made, in the place of the model: a file of them (an API's, AlpacaEval's"
                " model_outputs, HumanEval's samples, MT-Bench's model_answer ...), or samples of an older evaluation."
            ),
        ),
        "prompts": InputSpec(
            "dataset",
            kinds=("prompts/1",),
            required=False,
            doc="Held-out prompts, with answers where they can be checked.",
        ),
        "pairs": InputSpec("dataset", kinds=("pairs/1",), required=False, doc="Held-out preference pairs."),
        "texts": InputSpec(
            "dataset", kinds=("text/1",), required=False, doc="Held-out plain text: loss, perplexity, bits per byte."
        ),
        "examples": InputSpec(
            "dataset",
            kinds=("prompts/1", "demonstrations/1"),
            required=False,
            doc="Examples for few_shot; default: another split of the prompts.",
        ),
        "reward_model": InputSpec("model", required=False, use="scores", doc="Scores the policy's answers."),
        "judge": InputSpec(
            "model",
            required=False,
            doc=(
                "Causal LM of reward components with kind=judge, of a rubric's judged items, of mt_bench and"
                " refusal_judge."
            ),
        ),
        "rubric": InputSpec(
            "dataset",
            kinds=("rubric_items/1",),
            required=False,
            doc="Rubric of the component with kind=rubric: a file or a dataset.",
        ),
        **REWARD_INPUTS,
        "reference": InputSpec(
            "model", required=False, doc="KL of the policy to this model is estimated on the samples."
        ),
    },
    outputs={
        "samples": OutputSpec("dataset", doc="eval_samples/1: every answer with its grade."),
        "scores": OutputSpec("dataset", doc="eval_scores/1: every metric with error, count and protocol."),
        "rubric_scores": OutputSpec(
            "dataset", required=False, doc="rubric_scores/1: every item of every answer, with critique and reasoning."
        ),
        "rubric_confidence": OutputSpec(
            "dataset", required=False, doc="rubric_confidence/1: mean confidence per rubric item."
        ),
    },
)


def run(stage):
    from stages.evaluation.scores import records_of
    from stages.ingestion import answers
    from stages.reward.rubric_reward import score_rows, write_review
    from storage.datasets import open_dataset

    plan = Plan(stage, answers.read(stage, "answers", stage.config.answer_column) if stage.has("answers") else ())
    meta = {
        "target": stage.config.target,
        "protocol": plan.protocol,
        "protocol_hash": protocol.protocol_hash(plan.protocol),
        "scorers": plan.scorers,
        **{name: stage.inputs[name].digest for name in ("model", "answers") if stage.has(name)},
    }
    writer = stage.writer("samples", "eval_samples/1", meta=meta)
    rubric = bool(plan.prompts) and any(component.kind == "rubric" for component in stage.config.rewards)
    items = stage.writer("rubric_scores", "rubric_scores/1", meta=meta) if rubric else None
    checkpoint = stage.checkpoints.latest()
    work = plan.units()
    for index in range(checkpoint.step if checkpoint else 0, len(work)):
        kind, part = work[index]
        rows, scored = units.finished(plan, kind, part)
        writer.write(rows)
        if rubric:
            items.write([made for row, own in zip(rows, scored) for made in score_rows(row, own)])
        stage.save_checkpoint(index + 1, {"unit": index + 1})
        stage.progress(index + 1, len(work), f"{kind} in chunks of {stage.config.chunk}")
    plan.close()
    writer.close(
        {
            "prompts": plan.n_prompts,
            "pairs": len(plan.pairs),
            **({"texts": len(plan.plain)} if plan.plain else {}),
            **plan.dropped,
        }
    )
    if rubric:
        items.close({})
        write_review(stage)
        plan.violations = violations(stage)
    records = records_of(open_dataset(str(stage.workdir / "out" / "samples")).iter_rows())
    conclude(stage, plan, meta, records)


def violations(stage) -> dict:
    """How often answers violate each clause of the rubric: metrics, and the report ``violations``
    (eval.conformance).
    """
    from stages.evaluation import conformance
    from stages.reward.rubrics import from_rows
    from storage.datasets import open_dataset

    out, component = stage.workdir / "out", next(c for c in stage.config.rewards if c.kind == "rubric")
    scored_by_models = {
        (item.category, item.item_id)
        for items in from_rows(stage.dataset("rubric").iter_rows()).items.values()
        for item in items
        if item.kind == "rm"
    }
    found, table = conformance.rates(
        list(open_dataset(str(out / "rubric_scores")).iter_rows()),
        conformance.sampled_answers(open_dataset(str(out / "samples")).iter_rows()),
        component.violation_below,
        scored_by_models,
    )
    if table:
        stage.report("violations", table=table)
    return found
