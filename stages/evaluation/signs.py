"""Signs of what training did to the answers of a policy, in every evaluation: style (eval.style_signs), reasoning
(eval.reasoning_signs), diversity (eval.diversity). No sign is good or bad by itself; a change from one model to the
next is what to look at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from stages.evaluation import refusals
from stages.evaluation.scores import Metric, average, cluster_of, counted, cut, share
from stages.measures import text
from stages.verification.responses import view

#: Whole words and phrases, any case (the lists are ours).
HEDGES = (
    "perhaps",
    "maybe",
    "possibly",
    "might",
    "may be",
    "could be",
    "it seems",
    "i think",
    "i believe",
    "it depends",
    "arguably",
    "not entirely sure",
)
APOLOGIES = ("sorry", "i apologize", "i apologise", "apologies", "my mistake")
DOUBTS = (
    "i'm not sure",
    "i am not sure",
    "i may be wrong",
    "i might be wrong",
    "i could be wrong",
    "i don't know",
    "i do not know",
    "i am not certain",
    "i'm not certain",
)
FLATTERY = (
    "great question",
    "good question",
    "excellent question",
    "wonderful question",
    "you're absolutely right",
    "you are absolutely right",
    "what a great",
    "what a wonderful",
    "i completely agree",
)
#: Samples of a prompt whose likeness is measured at most, the first ones.
COMPARED = 16

MEANINGS = {
    "style/refusal_rate": "answers that refuse, in full or in part, by a list of phrases",
    "style/hedging_rate": "answers with perhaps, might, it depends ...",
    "style/apology_rate": "answers that apologise",
    "style/self_doubt_rate": "answers with I'm not sure, I may be wrong ...",
    "style/flattery_rate": "answers that praise the question or just agree",
    "style/list_rate": "answers with a list",
    "style/heading_rate": "answers with a Markdown heading",
    "style/bold_rate": "answers with bold text",
    "style/special_characters": "characters that no keyboard writes, pictures included, / characters",
    "style/language_switch_rate": "answers in a script that the prompt does not have",
    "reasoning/reflection_rate": "answers with wait, re-evaluate, let me check, aha",
    "reasoning/reflection_words": "such words per answer",
    "reasoning/thought_rate": "answers with a <think> part",
    "reasoning/thought_unclosed_rate": "answers whose thought does not end",
    "reasoning/thought_words": "words of the thought, where there is one",
    "reasoning/thought_words_right": "the same of right answers",
    "reasoning/thought_words_wrong": "the same of wrong ones",
    "reasoning/length_right": "tokens of right answers",
    "reasoning/length_wrong": "tokens of wrong answers",
    "diversity/different_answers": "different texts / samples of a prompt",
    "diversity/self_similarity": "words that two samples of a prompt share (Jaccard)",
    "diversity/token_entropy": "entropy of what is sampled from, nats per token",
}
#: Metrics of other modules that belong in the same table.
WITH = ("stock_phrase_rate", "length_mean", "truncation_rate", "distinct_1", "distinct_2", "repetition_3")


def metrics(records: Sequence[dict]) -> dict[str, Metric]:
    """Every sign that the sampled answers support (greedy ones where nothing was sampled; the turns of MT-Bench)."""
    answered = [r for r in records if r["mode"] in ("sample", "greedy", "turn") and not r.get("error")]
    answered = (
        [r for r in answered if r["mode"] == "sample"] or [r for r in answered if r["mode"] == "turn"] or answered
    )
    if not answered:
        return {}
    found: dict[str, Metric] = {}

    def add(name: str, value: Callable[[dict], float | None], of: Callable = average) -> None:
        grouped: dict[str, tuple[list[float], str]] = {}
        for r in answered:
            if (one := value(r)) is not None:
                grouped.setdefault(r["item_id"], ([], cluster_of(r)))[0].append(float(one))
        if grouped:
            found[name] = of(
                [float(np.mean(values)) for values, _ in grouped.values()], [cluster for _, cluster in grouped.values()]
            )

    said = lambda r: view(_seen(r), "answer_only")  # style is that of the answer, not of the thought before it
    says = lambda words: lambda r: text.reflection_counts([said(r).replace("’", "'")], words)["count"][0] > 0
    add("style/refusal_rate", lambda r: refusals.classify(said(r)) in ("full", "partial"), share)
    for name, words in (("hedging", HEDGES), ("apology", APOLOGIES), ("self_doubt", DOUBTS), ("flattery", FLATTERY)):
        add(f"style/{name}_rate", says(words), share)
    for name, column in (("list", "lists"), ("heading", "headers"), ("bold", "bold")):
        add(f"style/{name}_rate", lambda r, column=column: text.style_counts(said(r))[column] > 0, share)
    add("style/special_characters", lambda r: text.special_character_rate(said(r)))
    add(
        "style/language_switch_rate", lambda r: bool(text.scripts(said(r)) - text.scripts(r.get("prompt") or "")), share
    )
    add("reasoning/reflection_rate", lambda r: text.reflection_counts([r["output"]])["count"][0] > 0, share)
    add("reasoning/reflection_words", lambda r: text.reflection_counts([r["output"]])["count"][0])
    if any(map(thought_words, answered)):
        add("reasoning/thought_rate", lambda r: thought_words(r) is not None, share)
        add("reasoning/thought_unclosed_rate", unclosed, share)
        add("reasoning/thought_words", thought_words)
        for name, right in (("right", True), ("wrong", False)):
            add(
                f"reasoning/thought_words_{name}",
                lambda r, right=right: thought_words(r) if r["correct"] is right else None,
            )
    for name, right in (("right", True), ("wrong", False)):
        add(
            f"reasoning/length_{name}",
            lambda r, right=right: r["tokens"] if r["correct"] is right and counted(r) else None,
        )
    return found | diversity(answered)


def unclosed(record: dict) -> bool:
    return "<think>" in _seen(record) and "</think>" not in record["output"]


def _seen(record: dict) -> str:
    from stages.generation import seen

    return seen(record["output"], bool(record.get("opened")))


def thought_words(record: dict) -> int | None:
    """Words of the thought; None for an answer without one."""
    text = _seen(record)
    return len(view(text, "think_only").split()) if "<think>" in text or "</think>" in text else None


def diversity(answered: Sequence[dict]) -> dict[str, Metric]:
    """How much the samples of a prompt differ, and how sure the policy is of its tokens; of several samples per prompt
    only.
    """
    sampled = [r for r in answered if r["mode"] == "sample"]
    groups: dict[str, list[dict]] = defaultdict(list)
    for r in sampled:
        groups[r["item_id"]].append(r)
    several = [group for group in groups.values() if len(group) > 1]
    found: dict[str, Metric] = {}
    if several:
        clusters = [cluster_of(group[0]) for group in several]
        found["diversity/different_answers"] = average(
            [len({r["output"] for r in group}) / len(group) for group in several], clusters
        )
        found["diversity/self_similarity"] = average(
            [self_similarity([r["output"] for r in group[:COMPARED]]) for group in several], clusters
        )
    known = [(r["nll"], r["tokens"]) for r in sampled if r.get("nll") is not None and r["tokens"]]
    if known:
        found["diversity/token_entropy"] = Metric(sum(nll for nll, _ in known) / sum(n for _, n in known), len(known))
    return found


def self_similarity(texts: Sequence[str]) -> float:
    """Mean Jaccard similarity of the word sets of every two texts; two empty ones are alike."""
    words = [set(text.words_of(one)) for one in texts]
    pairs = [(a, b) for i, a in enumerate(words) for b in words[i + 1 :]]
    return float(np.mean([len(a & b) / len(a | b) if a | b else 1.0 for a, b in pairs]))


def table(metrics: dict[str, Metric]) -> list[dict]:
    """Rows of the report's section."""
    return [
        {"sign": name, "value": m.value, "low": m.low, "high": m.high, "n": m.n, "meaning": MEANINGS.get(name, "")}
        for name, m in metrics.items()
        if name in MEANINGS or name in WITH
    ]


def side_by_side(metrics: dict[str, dict[str, Metric]]) -> list[dict]:
    """A row per sign, a column per model ``{name: metrics}``; a sign that no model shows is left out."""
    names = [name for name in (*WITH, *MEANINGS) if any(name in m and m[name].value for m in metrics.values())]
    return [
        {"sign": name, **{model or "model": m[name].value if name in m else None for model, m in metrics.items()}}
        for name in names
    ]


def odd_but_right(records: Sequence[dict], count: int) -> list[dict]:
    """Right answers to look at: cut, repeating themselves, in a script the prompt does not have, full of odd
    characters, or with a thought that does not end.
    """
    rows = []
    for r in records:
        if r["mode"] not in ("sample", "greedy") or not r["correct"] or len(rows) >= count:
            continue
        why = [
            name
            for name, found in (
                ("cut", cut(r)),
                ("repeats itself", (text.repetition_n(text.words_of(r["output"]), 3) or 0.0) > 0.5),
                ("another script", bool(text.scripts(r["output"]) - text.scripts(r.get("prompt") or ""))),
                ("odd characters", text.special_character_rate(r["output"]) > 0.05),
                ("thought does not end", unclosed(r)),
            )
            if found
        ]
        if why:
            tokens = r["tokens"] if counted(r) else None
            rows.append({"prompt": r["prompt"], "output": r["output"], "why": ", ".join(why), "tokens": tokens})
    return rows
