"""Responses scored against the rubric of their prompt's category (GRAPE-SCORE, ``reward.rubric``): the reward component
``kind: rubric``.

Every item gives reasoning, a score in [0, 1] and a confidence in [0, 1]. Rules, verifiers and code are sure (confidence
1), so is a reward model; a judge says how sure it is, and for items that cannot be verified it reads a critique first,
which critic and scorer may write as different models. What cannot be read is asked for again with the reason, then it
is an item without a score, never 0.

:class:`RubricScorer` scores items and then aggregates over all rows of a call (:func:`stages.reward.grape.rewards`): a
category's confidence is a mean over the iteration's sample set. Item scores are ``rubric_scores/1`` rows;
:func:`write_review` turns them into the items' report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from stages.reward import grape
from stages.running.http_json import SERVER_SETTINGS
from stages.reward.grape import RubricError
from stages.reward.rubrics import CRITICS, Item, Rubric

FORM = (
    "Think first, then reply in exactly this form, with numbers between 0 and 1:\nReasoning: how the response meets or"
    " misses the criterion\nScore: 1 where the criterion is fully met, 0 where it is not met at all\nConfidence: how"
    " sure you are of the score"
)
SCORE_VERIFIABLE = (
    "Compare a response with the reference answer, on one criterion"
    " only.\n\n[Question]\n{context}\n\n[Response]\n{response}\n\n[Reference"
    " answer]\n{reference}\n\n[Criterion]\n{criterion}\n\n" + FORM
)
SCORE_WITH_CRITIQUE = (
    "Score a response on one criterion only. An expert's critique is given; weigh it, but judge for"
    " yourself.\n\n[Question]\n{context}\n\n"
    "[Response]\n{response}\n\n[Criterion]\n{criterion}\n\n[Critique]\n{critique}\n\n" + FORM
)
CRITIQUE = "{instruction}\n\n[Criterion]\n{criterion}\n\n[Question]\n{context}\n\n[Response]\n{response}\n\nCritique:"
AGAIN = "\n\nYour last reply could not be read: {error}. Reply again in exactly that form."
JUDGE_SETTINGS = ("input", *SERVER_SETTINGS, "judge_tokens", "judge_retries")


class RubricScorer:
    """Verdict rows (as ``stages.reward.rewards.Rewards`` takes them) against a rubric.

    Args:
        component: the reward component of kind rubric; items that are judged take what they leave open (endpoint,
            retries, ...) from it.
        known: items scored earlier, by (row["row_id"], category, item id, content of its version, scorer): they are not
            scored again.
    """

    def __init__(
        self, component, rubric: Rubric, inputs: dict, renderer=None, device: str = "cpu", known: dict | None = None
    ):
        from stages.reward.components import OF_KINDS, RewardComponent
        from stages.reward.rewards import Rewards

        self.component = component
        self.rubric = rubric
        self.inputs = inputs
        self.device = device
        self.known = known or {}
        self.answers: dict[tuple[str, str], str] = {}
        self._loaded: dict[str, object] = {}
        self.settings, self.scorer_ids, scorers = {}, {}, {}
        self.readers: list = []  # settings of all that scores or criticises
        for item in (item for items in rubric.items.values() for item in items):
            key = f"{item.category}/{item.item_id}"
            inherited = (
                {"view": component.view} if component.view != "full" and item.scorer["kind"] in OF_KINDS["view"] else {}
            ) | ({k: getattr(component, k) for k in JUDGE_SETTINGS} if item.scorer["kind"] == "judge" else {})
            own = RewardComponent.model_validate({**inherited, **item.scorer, "name": key})
            if own.squash != "none" and (
                component.rm_squash in ("sigmoid", "minmax")
                or (component.rm_squash == "auto" and len(rubric.items[item.category]) > 1)
            ):
                raise RubricError(
                    f"item {key}: squash={own.squash} in its scorer and rm_squash={component.rm_squash} in the reward"
                    " would squash its scores twice; leave squash out of the item, or write rm_squash: raw"
                )
            self.settings[key] = own
            criticised = own.kind == "judge" and item.kind != "verifiable"
            self.readers += [own, *([self._critic(item, own)] if criticised else [])]
            self.scorer_ids[key] = (
                self._name(own)
                + (f" after {self._name(self._critic(item, own))}" if criticised else "")
                + (f" on {own.view}" if own.view != "full" else "")
            )
            if own.kind == "model":
                scorers[key] = self._load(own)
            elif own.kind == "judge":
                self._load(own)
                if item.kind != "verifiable" and item.critic:
                    self._load(self._critic(item, own))
        self.rules = Rewards(list(self.settings.values()), scorers, renderer)

    def _critic(self, item: Item, scorer):
        """Settings of the model that writes an item's critiques; the scorer's own where none are given."""
        return (
            type(scorer).model_validate({**{k: getattr(self.component, k) for k in JUDGE_SETTINGS}, **item.critic})
            if item.critic
            else scorer
        )

    def _name(self, component) -> str:
        """Who scores: the kind of rule, or the model by its name on the server or its content."""
        from stages.reward.rewards import model_input

        if component.kind not in ("judge", "model", "remote"):
            return component.kind
        if component.endpoint or component.kind == "remote":
            return f"{component.kind}/{component.endpoint_model}"
        name = model_input(component, self.inputs)
        return f"{component.kind}/{(getattr(self.inputs[name], 'digest', '') or name)[:12]}"

    def _load(self, component):
        from stages.reward.rewards import load_asked, load_model

        key = json.dumps(
            [component.kind, component.endpoint, component.endpoint_model, component.input, component.ranking]
        )
        if key not in self._loaded:
            self._loaded[key] = (load_asked if component.kind == "judge" else load_model)(
                component, self.inputs, self.device
            )
        return self._loaded[key]

    def rows_at_once(self, total: int, block: int) -> int:
        """How many of ``total`` rows must be scored in one call: a block, or all of them where a score depends on the
        others (minmax).
        """
        return (
            max(total, 1)
            if self.component.rm_squash == "minmax" and any(c.kind == "model" for c in self.settings.values())
            else block
        )

    # -- items ---------------------------------------------------------------------------------------------------------
    def items(self, rows: Sequence[dict]) -> list[list[dict]]:
        """One record per item of each row's category: category, item_id, item_version, omega, scorer_id, critique,
        reasoning, score, confidence, attempt, error, raw, and correct: the verdict of a verifier."""
        categories = [self.rubric.category_of(row["prompt_row"], self.component.category) for row in rows]
        out: list[list[dict]] = [[] for _ in rows]
        for category, items in self.rubric.items.items():
            mine = [i for i, own in enumerate(categories) if own == category]
            for item in items if mine else ():
                scorer_id = self.scorer_ids[f"{category}/{item.item_id}"]
                start = {
                    "category": category,
                    "item_id": item.item_id,
                    "item_version": item.version,
                    "omega": item.omega,
                    "scorer_id": scorer_id,
                    "critique": None,
                    "reasoning": None,
                    "score": None,
                    "confidence": None,
                    "attempt": 0,
                    "error": None,
                    "raw": None,
                    "correct": None,
                }
                kept = {
                    i: self.known.get((rows[i].get("row_id"), category, item.item_id, item.content, scorer_id))
                    for i in mine
                }
                fresh = [i for i in mine if kept[i] is None]
                new = [rows[i] for i in fresh]
                found = self._judged(item, new) if item.scorer["kind"] == "judge" else self._ruled(item, new)
                kept |= dict(zip(fresh, found))
                if item.scorer["kind"] == "model":  # what is kept was squashed among other items and answers
                    scored = [i for i in mine if kept[i].get("score") is not None]
                    values = grape.squash(
                        [json.loads(kept[i]["raw"])["value"] for i in scored], self.component.rm_squash, len(items) == 1
                    )
                    kept |= {i: {**kept[i], "score": float(value)} for i, value in zip(scored, values)}
                for i in mine:
                    out[i].append(
                        {
                            **start,
                            **{
                                k: kept[i][k]
                                for k in kept[i]
                                if k in start and k not in ("category", "item_id", "item_version", "omega")
                            },
                        }
                    )
        return out

    def _ruled(self, item: Item, rows) -> list[dict]:
        """Items that a rule or a reward model scores: sure of what it says. Scores of a reward model are raw."""
        from stages.reward.scorers import RULES, alone
        from stages.reward.verdicts import ALONE, Unscorable

        if not rows:
            return []
        own = self.settings[f"{item.category}/{item.item_id}"]
        found = RULES[own.kind](self.rules, own, rows)
        for i in alone(rows) if self.rules.relative(own) else ():
            found[i] = Unscorable(ALONE)
        model, out = own.kind == "model", []
        for verdict in found:
            if isinstance(verdict, Unscorable):
                out.append({"error": verdict.reason})
                continue
            value = verdict.value
            raw = json.dumps({"value": verdict.value, "correct": verdict.correct, "extracted": verdict.extracted})
            if not model and not 0.0 <= value <= 1.0:
                out.append(
                    {
                        "error": (
                            f"{own.kind} gave {value}, an item's score lies in [0, 1]; use a component with values in"
                            " that range"
                        ),
                        "raw": raw,
                    }
                )
                continue
            said = (
                ""
                if model
                else f"{own.kind}: "
                + (f"answer {verdict.extracted!r}, " if verdict.extracted is not None else "")
                + ({True: "right", False: "wrong", None: f"value {value:g}"}[verdict.correct])
            )
            out.append(
                {"reasoning": said, "score": float(value), "confidence": 1.0, "raw": raw, "correct": verdict.correct}
            )
        return out

    def _judged(self, item: Item, rows) -> list[dict]:
        from stages.generation import seen
        from stages.reward_models.reward_heads import transcript
        from stages.verification.responses import view

        own = self.settings[f"{item.category}/{item.item_id}"]
        out: list[dict] = [{} for _ in rows]
        fields = [
            {
                "context": transcript(row["prompt_row"].get("prompt") or []),
                "response": view(
                    seen(row["completion_text"], bool(row.get("opened")) and own.view != "full"), own.view
                ),
                "criterion": item.criterion,
                "reference": row["prompt_row"].get("answer"),
            }
            for row in rows
        ]
        if item.kind == "verifiable":
            for record, values in zip(out, fields):
                if values["reference"] is None:
                    record["error"] = (
                        "the prompt has no reference answer; write it into the column `answer`, or make the item"
                        " non_verifiable"
                    )
            requests = [SCORE_VERIFIABLE.format(**values) for values in fields]
        else:
            critic = self._critic(item, own)
            instruction = item.critique_prompt or CRITICS["general"]
            critiques = self._ask(critic, [CRITIQUE.format(instruction=instruction, **values) for values in fields])
            for record, critique in zip(out, critiques):
                record["critique"] = critique
                if not critique.strip():
                    record["error"] = "the critic wrote nothing, or the request is longer than it can read"
            requests = [SCORE_WITH_CRITIQUE.format(critique=c, **values) for values, c in zip(fields, critiques)]
        waiting, replies = {i: requests[i] for i, record in enumerate(out) if "error" not in record}, [[] for _ in out]
        for attempt in range(own.judge_retries + 1):
            said = dict(zip(waiting, self._ask(own, list(waiting.values()))))
            for i, text in said.items():
                parsed, error = grape.parse_item(text)
                replies[i].append(text)
                out[i].update(
                    parsed or {}, raw=json.dumps(replies[i], ensure_ascii=False), attempt=attempt, error=error
                )
            waiting = {
                i: request + AGAIN.format(error=out[i]["error"]) for i, request in waiting.items() if out[i]["error"]
            }
            if not waiting:
                break
        return out

    def _ask(self, component, texts: Sequence[str]) -> list[str]:
        """What a judge replies at temperature 0; every different request is made once."""
        who = json.dumps([component.endpoint, component.endpoint_model, component.input, component.judge_tokens])
        if len(self.answers) > 50_000:  # a long run must not keep everything it ever asked
            self.answers.clear()
        fresh = [t for t in dict.fromkeys(texts) if (who, t) not in self.answers]
        if fresh:
            self.answers.update(
                zip(((who, t) for t in fresh), self._load(component).answers(fresh, component.judge_tokens, 0))
            )
        return [self.answers[who, t] for t in texts]

    # -- rewards -------------------------------------------------------------------------------------------------------
    def score(self, rows: Sequence[dict]) -> list:
        """A reward per row, with its items; confidences are averaged over all rows of a category in this call."""
        from stages.reward.verdicts import Unscorable, Verdict

        found = self.items(rows)
        values = self.aggregate(found)
        out = []
        for items, value in zip(found, values):
            if value is None:
                out.append(Unscorable(unscored(items), tuple(items)))
            else:
                right = [i["correct"] for i in items if i["correct"] is not None]
                out.append(Verdict(value, right[0] if right else None, items=tuple(items)))
        return out

    def aggregate(self, found: Sequence[Sequence[dict]]) -> list[float | None]:
        """GRAPE-REWARD of rows given by their item records."""
        values, _, _ = grape.rewards(
            [[i["score"] for i in items] for items in found],
            [[i["confidence"] for i in items] for items in found],
            [items[0]["category"] for items in found],
            self.rubric.weights(),
            self.component.rubric_normalizer,
            self.component.invalid_policy,
        )
        return values


def unscored(items: Sequence[dict]) -> str:
    """Why a row whose items are these has no reward."""
    why = "; ".join(f"{i['item_id']}: {i['error']}" for i in items if i["score"] is None)
    return f"rubric items without a score ({why})"


# -- what is kept and shown --------------------------------------------------------------------------------------------


def score_rows(sample_row: dict, items: Sequence[dict], batch: int | None = None) -> list[dict]:
    """``rubric_scores/1`` rows of one sample, given its finished dataset row. batch: the iteration it was scored in."""
    from storage.schema import complete_row

    common = {
        "sample_row_id": sample_row["row_id"],
        "prompt_id": sample_row["prompt_id"],
        "group_id": sample_row["group_id"],
        "batch_id": None if batch is None else str(batch),
    }
    return [
        complete_row(
            "rubric_scores/1",
            {k: v for k, v in item.items() if k != "correct"} | common,
            dataset="rubric_scores",
            source=sample_row["source"],
            origin="ai",
        )
        for item in items
    ]


def rubric_metrics(
    items_of: Sequence[Sequence[dict]],
    values: Sequence[float | None],
    flag_below: float = 0.6,
    said: Sequence[bool] | None = None,
) -> dict[str, float]:
    """Per category: mean, std and maximum of R, share of samples with an item that could not be scored, mean score,
    phibar and unscored share of every item; over all: categories without any confidence, items below ``flag_below``.
    ``said``: which samples are the policy's, of which R and scores are (None: all); the rest is of all samples, as
    phibar in the reward is."""
    out: dict[str, float] = {}
    flagged = []
    for category in dict.fromkeys(items[0]["category"] for items in items_of if items):
        own = [
            (items, v, by_policy)
            for items, v, by_policy in zip(items_of, values, [True] * len(values) if said is None else said)
            if items and items[0]["category"] == category
        ]
        got = [v for _, v, by_policy in own if by_policy and v is not None and math.isfinite(v)]
        head = f"rubric/{category}"
        out[f"{head}/invalid_fraction"] = sum(any(i["score"] is None for i in items) for items, *_ in own) / len(own)
        if got:
            mean = math.fsum(got) / len(got)
            out |= {
                f"{head}/mean": mean,
                f"{head}/std": math.sqrt(math.fsum((v - mean) ** 2 for v in got) / len(got)),
                f"{head}/max": max(got),
            }
        phi = 0.0
        for k, item in enumerate(own[0][0]):
            scored = [items[k] for items, *_ in own if items[k]["score"] is not None]
            scores = [items[k]["score"] for items, _, by_policy in own if by_policy and items[k]["score"] is not None]
            out[f"{head}/{item['item_id']}/invalid_fraction"] = 1.0 - len(scored) / len(own)
            flagged.append(not scored or math.fsum(i["confidence"] for i in scored) / len(scored) < flag_below)
            if scores:
                out[f"{head}/{item['item_id']}/score"] = math.fsum(scores) / len(scores)
            if scored:
                out[f"{head}/{item['item_id']}/confidence"] = math.fsum(i["confidence"] for i in scored) / len(scored)
                phi += out[f"{head}/{item['item_id']}/confidence"]
        out[f"{head}/zero_confidence"] = float(phi == 0.0)
    if flagged:
        out |= {
            "rubric/flagged_items": float(sum(flagged)),
            "rubric/zero_confidence": sum(v for name, v in out.items() if name.endswith("/zero_confidence")),
        }
    return out


def write_review(stage) -> list[dict]:
    """The item review of a finished ``rubric_scores/1`` output: dataset ``rubric_confidence``, report ``rubric items``
    and warnings.
    """
    from stages.reporting.reports import document, markdown_table, sample_table
    from storage.datasets import open_dataset
    from storage.schema import complete_row

    threshold = next(c.flag_below for c in stage.config.rewards if c.kind == "rubric")
    rows = list(open_dataset(str(stage.workdir / "out" / "rubric_scores")).iter_rows())
    found = grape.review(
        [{**row, "sample": row["sample_row_id"], "question": (row["prompt_id"], row["batch_id"])} for row in rows],
        threshold,
    )
    writer = stage.writer("rubric_confidence", "rubric_confidence/1")
    columns = ("category", "item_id", "item_version", "phi_bar", "n", "flagged")
    writer.write(
        [
            complete_row(
                "rubric_confidence/1",
                {k: r[k] for k in columns},
                dataset="rubric_confidence",
                source="rubric",
                origin="ai",
            )
            for r in found
        ]
    )
    writer.close({"items": len(found)})
    if not rows:
        return found
    name = lambda r: f"{r['category']}/{r['item_id']}"
    poor = [r for r in found if r["flagged"]]
    silent = [r for r in found if not r["discriminates"]]
    lost = [r for r in found if r["unscorable"] > 0]
    if poor:
        stage.warn(
            "rubric_low_confidence",
            f"The mean confidence of {', '.join(map(name, poor))} is below {threshold}: read the examples in the"
            " report, then make the criterion more precise, split it (sub_items), or take another judge. Rewards are"
            " not changed by this.",
        )
    if silent:
        stage.warn(
            "rubric_item_never_discriminates",
            f"{', '.join(map(name, silent))} never told two answers to a question apart, so it teaches nothing: "
            "drop it, or make it harder or finer.",
        )
    if lost:
        stage.warn(
            "rubric_unscorable",
            f"Not every answer could be scored on {', '.join(map(name, lost))}; the column `error` of rubric_scores"
            " says why. Give the judge more time or room, or take another one, and score again (stage rescore).",
        )
    wanted = {(r["category"], r["item_id"]) for r in poor + lost}
    examples, shown = [], {}
    for row in rows:
        key = row["category"], row["item_id"]
        if key in wanted and shown.get(key, 0) < 3:
            shown[key] = shown.get(key, 0) + 1
            examples.append(
                {
                    "item": "/".join(key),
                    **{k: row[k] for k in ("score", "confidence")},
                    **{k: row[k] or "" for k in ("reasoning", "error")},
                }
            )
    columns = (
        "category",
        "item_id",
        "item_version",
        "n",
        "mean",
        "variance",
        "phi_bar",
        "flagged",
        "agreement",
        "ties",
        "unscorable",
        "discriminates",
    )
    shown = ("Examples of items to look at", sample_table(examples)) if examples else None
    stage.report("rubric items", markdown=document("Rubric items", markdown_table(found, columns), shown), table=found)
    return found
