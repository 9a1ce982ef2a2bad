"""The conversion matrix A.1: rows of one kind -> rows of another.

A row-wise converter takes one row and gives any number of rows. A grouped converter takes all rows
of one prompt (staged on disk by the stage) and gives rows. Both keep prompt_id and group_id, write
`origin=conversion`, list the input row ids in extra_json and count what they drop by reason.
"""

from __future__ import annotations

import json
import math
from statistics import fmean
from typing import Any, Callable

from stages.ingestion import pairing
from stages.ingestion.rules import Bad, same_completion
from stages.ingestion.sources import canonical_bytes
from stages.pairs import CUT_ANSWERS, ended_of, is_tie
from storage.schema import prompt_id, row_id

ROWWISE = {
    ("comparisons/1", "pairs/1"),
    ("rankings/1", "pairs/1"),
    ("pairs/1", "demonstrations/1"),
    ("rankings/1", "demonstrations/1"),
    ("ratings/1", "unpaired/1"),
    ("stepwise/1", "unpaired/1"),
    ("demonstrations/1", "demonstrations/1"),
    ("segments/1", "pairs/1"),
}
GROUPED = {
    ("ratings/1", "rankings/1"),
    ("ratings/1", "pairs/1"),
    ("unpaired/1", "pairs/1"),
    ("pairs/1", "unpaired/1"),
    ("pairs/1", "rankings/1"),
    ("ratings/1", "demonstrations/1"),
}
# Where the matrix has no direct rule but two rules follow each other.
CHAINS = {
    ("comparisons/1", "demonstrations/1"): "pairs/1",
    ("comparisons/1", "unpaired/1"): "pairs/1",
    ("comparisons/1", "rankings/1"): "pairs/1",
    ("rankings/1", "unpaired/1"): "pairs/1",
}
WITH_PROMPT = (
    "pairs/1",
    "comparisons/1",
    "rankings/1",
    "ratings/1",
    "unpaired/1",
    "stepwise/1",
    "demonstrations/1",
    "segments/1",
    "span_feedback/1",
    "candidates/1",
    "revisions/1",
)
# the smallest difference of two scores: whatever the scale, one of its steps is not below it
ANY_GAP = math.ulp(0.0)
# what a gap of decimal scores may lack: 4.1 - 3.1 is a gap of 1
ROUNDING = 1e-9
_CARRIED = ("prompt_id", "group_id", "split", "source", "batch_id", "license", "weight", "collected_at")


def route(have: str, want: str) -> list[str] | None:
    """Kinds to pass through from `have` to `want`, both included; None where no rule exists."""
    if have == want:
        return [have]
    if (have, want) in ROWWISE or (have, want) in GROUPED or (want == "prompts/1" and have in WITH_PROMPT):
        return [have, want]
    if (have, want) in CHAINS:
        return [have, CHAINS[have, want], want]
    return None


def reachable(have: str) -> list[str]:
    """Kinds that rows of kind `have` can become."""
    from storage.schema import SCHEMAS

    return [kind for kind in SCHEMAS if route(have, kind)]


def _derived(kind: str, row: dict, new: dict, sources: list[tuple[str, dict]] | None = None) -> dict:
    """`new` with provenance: carried common columns, origin and the ids of its input rows."""
    carried = {name: row[name] for name in _CARRIED if row.get(name) is not None}
    ids = [item.get("row_id") or row_id(k, item) for k, item in sources or [(kind, row)]]
    extra = {"from": kind, "row_ids": ids, **new.pop("_kept", {})}
    return {**carried, "origin": "conversion", "extra_json": canonical_bytes(extra).decode(), **new}


def _cut(column: str, ended: list[bool]) -> dict:
    """What says that the answer which goes to ``column`` was cut."""
    return {} if all(ended) else {"_kept": {CUT_ANSWERS: [column]}}


def comparison_to_pair(row: dict, options) -> dict:
    """comparisons/1 -> pairs/1 (`data.binarise`): winner, strength, margin, label_prob.

    A tie raises Bad(all_tied) under tie_policy drop. soft_label: prob takes P(A) from the source
    (judge or vote share), linear from the Likert label; none leaves label_prob null.
    """
    kind, strength = row["label_kind"], None
    if kind == "likert":
        winner, strength, _ = pairing.likert(row["label"], row["n_points"], row.get("orientation") or "low_is_a")
        p_a = {"A": 1.0, "B": 0.0, "tie": 0.5}[winner]
        if options.soft_label == "linear":
            p_a = pairing.likert_probability(
                row["label"], row["n_points"], row.get("orientation") or "low_is_a", options.soft_label_eps
            )
    elif kind in ("votes", "choice"):
        p_a = pairing.votes(row["votes"])["p_a"]
    else:
        p_a = row["p_a"]
    winner, probability, kept = pairing.binarise(p_a, options.tie_policy)
    if not kept:
        raise Bad("all_tied")
    a, b = ("response_b", "response_a") if winner == "B" else ("response_a", "response_b")
    out = {
        "prompt": row["prompt"],
        "chosen": row[a],
        "rejected": row[b],
        "strength": strength,
        "ann": row.get("ann"),
        "turn_index": row.get("turn_index"),
        "chosen_gen": row.get("gen_" + a[-1]),
        "rejected_gen": row.get("gen_" + b[-1]),
        "pairs_in_group": 1,
        "_first_won": None if winner == "tie" else winner == "A",
    }
    soft = (
        options.soft_label == "prob"
        or (options.soft_label == "auto" and kind == "prob")
        or (options.soft_label == "linear" and kind == "likert")
        or winner == "tie"
    )
    if soft:
        out["label_prob"] = probability
    if options.margin_mode.startswith("llama2"):
        out["margin"] = pairing.margin(options.margin_mode, strength=strength)
    return out


def _ranking_to_pairs(row: dict, options, draw, gaps) -> list[dict]:
    from stages.ingestion.best_of import of_pair

    ranks, scores = row["ranks"], row.get("scores")
    gens = row.get("gens") or [None] * len(ranks)
    by_score = scores and options.margin_mode == "score_diff"
    if options.pair_mode == "rank_gap":
        stages = {gap: stage for stage, gap in enumerate(sorted(gaps or rank_gaps(ranks), reverse=True))}
        staged = [(i, j, stages[gap], gap) for gap, pairs in pairing.rank_gap_stages(ranks) for i, j in pairs]
    else:
        staged = [(i, j, None, ranks[j] - ranks[i]) for i, j in pairing.ranking_pairs(ranks, options.pair_mode, draw)]
    staged = [item for item in staged if not same_completion(row["completions"][item[0]], row["completions"][item[1]])]
    if by_score:
        if any(scores[i] < scores[j] for i, j, _, _ in staged):
            raise Bad("score_inconsistent")
        staged = [(i, j, stage, gap) for i, j, stage, gap in staged if scores[i] > scores[j]]
    if not staged:
        raise Bad("all_tied" if len(set(ranks)) <= 1 and len(ranks) > 1 else "no_pair")
    out = []
    for i, j, stage, gap in staged:
        new = {
            "prompt": row["prompt"],
            "chosen": row["completions"][i],
            "rejected": row["completions"][j],
            "pairs_in_group": len(staged),
            "weight": row.get("weight", 1.0) / len(staged),
            "rank_gap": gap,
            "stage_index": stage,
            "ann": row.get("ann"),
            "chosen_gen": gens[i],
            "rejected_gen": gens[j],
        }
        if scores:
            new |= {"chosen_score": scores[i], "rejected_score": scores[j]}
            if by_score:
                new["margin"] = scores[i] - scores[j]
        if '"best_of"' in (row.get("extra_json") or "") and (kept := of_pair(json.loads(row["extra_json"]), i, j)):
            new["_kept"] = kept
        out.append(new)
    return out


def rank_gaps(ranks: list[int]) -> set[int]:
    """Rank gaps between the items of a ranking. Those of all rankings give the stages of pair_mode rank_gap
    (`data.curriculum`).
    """
    return {gap for gap, _ in pairing.rank_gap_stages(ranks)}


def finish_pair(row: dict, options) -> dict:
    """Margin of a pair that came as a pair (`data.margin`). score_diff drops non-positive gaps as ties."""
    grade = row.pop("_grade", None)
    if options.margin_mode == "none" or row.get("margin") is not None:
        return row
    gap = pairing.margin(
        options.margin_mode,
        strength=row.get("strength"),
        grade=grade,
        chosen_score=row.get("chosen_score"),
        rejected_score=row.get("rejected_score"),
    )
    if gap is not None:
        if options.margin_mode == "score_diff" and not gap > 0:
            raise Bad("all_tied" if gap == 0 else "score_inconsistent")
        row["margin"] = gap
    return row


def unroll_demonstration(row: dict, options) -> list[dict]:
    """One conversation under the multi-turn policy (`data.multiturn`).

    keep: one row, every assistant turn of the completion trained. final_turn: one row up to the last
    assistant turn. all_turns: one row per trained turn, later turns dropped.
    """
    if options.multiturn == "keep":
        return [row]
    trained = set(row["train_turns"])
    roles = [
        message["role"] if message["role"] != "assistant" or index in trained else "context"
        for index, message in enumerate(row["messages"])
    ]
    balance = "per_conversation" if options.balance == "per_conversation" else "none"
    samples = pairing.unroll(roles, options.multiturn, balance)
    # these are of the whole conversation
    kept = {name: value for name, value in row.items() if name not in ("row_id", "prompt_id")}
    return [
        {
            **kept,
            "messages": row["messages"][: target + 1],
            "train_turns": [target],
            "weight": row.get("weight", 1.0) * weight,
        }
        for target, weight in samples
    ]


def prompt_row(kind: str, row: dict) -> dict:
    """any -> prompts/1: the prompt alone, label columns dropped (`data.prompts`)."""
    if kind == "demonstrations/1":
        messages = row["messages"]
        end = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
        return {"prompt": messages[: end + 1]}
    out = {"prompt": row["prompt"]}
    if row.get("answer") is not None:
        out["answer"] = row["answer"]
    return out


def rowwise(have: str, want: str, row: dict, options, draw=None, gaps: set[int] | None = None) -> list[dict]:
    """Rows of kind `want` made of one row of kind `have`. Raises Bad where nothing comes of it.

    gaps: rank gaps of all rankings, which number the stages of pair_mode rank_gap; default those of this row.
    """
    if want == "prompts/1" and have != "prompts/1":
        return [_derived(have, {**row, "prompt_id": None}, prompt_row(have, row))]
    if have == want == "demonstrations/1":
        return unroll_demonstration(row, options)
    if have == want:
        return [finish_pair(row, options) if have == "pairs/1" else row]
    if have == "comparisons/1":
        return [_derived(have, row, comparison_to_pair(row, options))]
    if (have, want) == ("segments/1", "pairs/1"):
        return [_derived(have, row, {name: row[name] for name in ("prompt", "chosen", "rejected")})]
    if (have, want) == ("rankings/1", "pairs/1"):
        return [_derived(have, row, new) for new in _ranking_to_pairs(row, options, draw, gaps)]
    if (have, want) == ("pairs/1", "demonstrations/1"):
        if is_tie(row):
            raise Bad("all_tied")
        return [_derived(have, row, _as_demonstration(row["prompt"], row["chosen"]))]
    if (have, want) == ("rankings/1", "demonstrations/1"):
        best = min(range(len(row["ranks"])), key=lambda index: (row["ranks"][index], index))
        return [_derived(have, row, _as_demonstration(row["prompt"], row["completions"][best]))]
    if (have, want) == ("ratings/1", "unpaired/1"):
        if options.threshold is None:
            raise ValueError(
                "ratings become unpaired rows only with a threshold; set `threshold` (label = score >= threshold)"
            )
        if options.dead_band and abs(row["score"] - options.threshold) < options.dead_band - ROUNDING:
            raise Bad("all_tied")
        return [
            _derived(
                have,
                row,
                {
                    "prompt": row["prompt"],
                    "completion": row["completion"],
                    "gen": row.get("gen"),
                    "label": row["score"] >= options.threshold,
                    "label_kind": "threshold",
                },
            )
        ]
    if (have, want) == ("stepwise/1", "unpaired/1"):
        label = -1 not in row["labels"] and row.get("solution_correct") is not False
        text = row.get("separator", "\n\n").join(row["completions"])
        return [
            _derived(
                have,
                row,
                {
                    "prompt": row["prompt"],
                    "completion": [{"role": "assistant", "content": text}],
                    "label": label,
                    "label_kind": "correctness",
                },
            )
        ]
    raise ValueError(f"no conversion from {have} to {want}; {have} can become {', '.join(reachable(have))}")


def _as_demonstration(prompt: list[dict], completion: list[dict]) -> dict:
    turns = [len(prompt) + index for index, message in enumerate(completion) if message["role"] == "assistant"]
    return {"messages": prompt + completion, "train_turns": turns}


def _key(messages: list[dict]) -> str:
    """Identity of a completion for conflicts: exact after strip."""
    return prompt_id([{**message, "content": (message.get("content") or "").strip()} for message in messages])


def grouped(
    have: str, want: str, rows: list[dict], options, draw=None
) -> tuple[list[dict], dict[str, int], dict[int, str]]:
    """(rows out, dropped by reason, code of each input row, by index, of which nothing came because of a tie).

    rows: all rows of kind `have` with one prompt, in input order.
    """
    return _GROUPED[have, want](have, rows, options, draw)


def _weight(rows: list[dict]) -> float:
    """Mean weight of the rows behind a new one."""
    return fmean(row.get("weight", 1.0) for row in rows)


def _by_rater(rows: list[dict]) -> list[dict[str, tuple[float, list[int]]]]:
    """{completion: (score, indices of its rows)} of each rater, criterion and scale: scores of different ones are not
    comparable (`data.margin`).

    A completion that one rater scored twice has the mean score.
    """
    raters: dict[tuple, dict[str, list[int]]] = {}
    for index, row in enumerate(rows):
        ann = row.get("ann") or {}
        rater = (
            *(ann.get(name) for name in ("annotator_id", "judge_id", "criteria")),
            row.get("scale_min"),
            row.get("scale_max"),
        )
        raters.setdefault(rater, {}).setdefault(_key(row["completion"]), []).append(index)
    return [
        {key: (fmean(rows[index]["score"] for index in found), found) for key, found in rated.items()}
        for rated in raters.values()
    ]


def _votes(raters: list[dict], a: str, b: str, least: float) -> tuple[float, list[tuple[float, dict]]]:
    """(share that prefers completion a to b, [(how much, rater)] of who scored both): one vote per rater, a smaller gap
    than `least` is a tie.
    """
    gaps = [(rated[a][0] - rated[b][0], rated) for rated in raters if a in rated and b in rated]
    labels = ["A" if gap >= least else "B" if -gap >= least else "tie" for gap, _ in gaps]
    return pairing.votes(labels)["p_a"] if gaps else 0.5, gaps


def _ratings_to_ranking(have, rows, options, draw):
    """One ranking per rater; where that has no order, its rows are refused."""
    out, lost = [], {}
    for rated in _by_rater(rows):
        scores = [score for score, _ in rated.values()]
        indices = [index for _, found in rated.values() for index in found]
        if len(set(scores)) < 2:
            lost |= dict.fromkeys(indices, "no_pair" if len(scores) < 2 else "all_tied")
            continue
        kept = [rows[found[0]] for _, found in rated.values()]
        new = {
            "prompt": rows[0]["prompt"],
            "completions": [row["completion"] for row in kept],
            "ranks": pairing.ranks_from_scores(scores),
            "scores": scores,
            "gens": [row.get("gen") for row in kept] if any(row.get("gen") for row in kept) else None,
            "weight": _weight([rows[index] for index in indices]),
            "ann": kept[0].get("ann"),
        }
        out.append(_derived(have, kept[0], new, [(have, rows[index]) for index in indices]))
    return out, {}, lost


def _ratings_to_pairs(have, rows, options, draw):
    """Pairs inside the scores of one rater. Where several scored the same two completions, the majority decides
    (`data.aggregate`).

    The scores are then those of one of the majority, the one with the median gap: scores of several people are never
    averaged.
    """
    least = max((options.min_margin or 0.0) - ROUNDING, ANY_GAP)
    raters, asked = _by_rater(rows), {}
    for rated in raters:
        keys, scores = list(rated), [score for score, _ in rated.values()]
        if options.pair_mode == "all":
            made = [(i, j) for i, j, _ in pairing.ratings_pairs(scores, least)]
        else:
            made = [
                (i, j)
                for i, j in pairing.ranking_pairs(pairing.ranks_from_scores(scores), options.pair_mode, draw)
                if scores[i] - scores[j] >= least
            ]
        for i, j in made:
            asked.setdefault(frozenset((keys[i], keys[j])), (keys[i], keys[j]))
    pairs, tied = [], 0
    for a, b in asked.values():
        p_a, gaps = _votes(raters, a, b, least)
        if p_a == 0.5:
            tied += 1
            continue
        if p_a < 0.5:
            a, b, p_a, gaps = b, a, 1.0 - p_a, [(-gap, rated) for gap, rated in gaps]
        agreeing = sorted(gap for gap, _ in gaps if gap >= least)
        middle = agreeing[(len(agreeing) - 1) // 2]
        pairs.append((a, b, p_a, next(rated for gap, rated in gaps if gap == middle), [rated for _, rated in gaps]))
    pairs = pairs[: options.max_pairs_per_prompt]
    out = []
    for a, b, p_a, rated, voters in pairs:
        chosen, rejected = rows[rated[a][1][0]], rows[rated[b][1][0]]
        behind = [rows[index] for voter in voters for key in (a, b) for index in voter[key][1]]
        out.append(
            _derived(
                have,
                chosen,
                {
                    "prompt": chosen["prompt"],
                    "chosen": chosen["completion"],
                    "rejected": rejected["completion"],
                    "chosen_score": rated[a][0],
                    "rejected_score": rated[b][0],
                    "margin": rated[a][0] - rated[b][0] if options.margin_mode == "score_diff" else None,
                    "label_prob": p_a if options.soft_label == "prob" and len(voters) > 1 else None,
                    "pairs_in_group": len(pairs),
                    "weight": _weight(behind) / len(pairs),
                    "chosen_gen": chosen.get("gen"),
                    "rejected_gen": rejected.get("gen"),
                    "ann": chosen.get("ann") if len(voters) == 1 else None,
                },
                [(have, row) for row in behind],
            )
        )
    dropped = {"tied_votes": tied} if tied else {}
    return out, dropped if out else {**dropped, "no_pair": 1}, {} if out else dict.fromkeys(range(len(rows)), "no_pair")


def _ratings_to_demonstrations(have, rows, options, draw):
    """The completion that wins most often against the others under the raters who scored both, then the one with the
    highest mean score.
    """
    raters, scores, first = _by_rater(rows), {}, {}
    for row in rows:
        key = _key(row["completion"])
        scores.setdefault(key, []).append(row["score"])
        first.setdefault(key, row)
    wins = dict.fromkeys(first, 0)
    for a in first:
        for b in first:
            share, _ = _votes(raters, a, b, ANY_GAP)
            wins[a] += (share > 0.5) - (share < 0.5)
    best = max(first, key=lambda key: (wins[key], fmean(scores[key])))
    if options.threshold is not None and fmean(scores[best]) < options.threshold:
        return [], {"below_threshold": 1}, {}
    others = sum(_key(row["completion"]) != best for row in rows)
    return (
        [_derived(have, first[best], _as_demonstration(first[best]["prompt"], first[best]["completion"]))],
        {"not_best": others} if others else {},
        {},
    )


def _unpaired_to_pairs(have, rows, options, draw):
    labels: dict[str, set[bool]] = {}
    for row in rows:
        labels.setdefault(_key(row["completion"]), set()).add(row["label"])
    usable = [row for row in rows if len(labels[_key(row["completion"])]) == 1]
    good, bad = [row for row in usable if row["label"]], [row for row in usable if not row["label"]]
    pairs = pairing.unpaired_to_pairs(good, bad, options.max_pairs_per_prompt)
    out = [
        _derived(
            have,
            a,
            {
                "prompt": a["prompt"],
                "chosen": a["completion"],
                "rejected": b["completion"],
                "pairs_in_group": len(pairs),
                "weight": _weight([a, b]) / len(pairs),
                "chosen_gen": a.get("gen"),
                "rejected_gen": b.get("gen"),
                **_cut("rejected", ended_of(b, "completion")),
            },
            [(have, a), (have, b)],
        )
        for a, b in pairs
    ]
    dropped = {"conflict": len(rows) - len(usable)} if len(usable) < len(rows) else {}
    if not out:
        dropped["no_pair"] = 1
    return out, dropped, {} if out else dict.fromkeys(range(len(rows)), "no_pair")


def _pairs_to_unpaired(have, rows, options, draw):
    texts: dict[str, tuple[list[dict], str, list[dict]]] = {}
    triples = []
    lost = {index: "all_tied" for index, row in enumerate(rows) if is_tie(row)}
    for row in (row for row in rows if not is_tie(row)):
        keys = []
        for side in ("chosen", "rejected"):
            key = _key(row[side])
            texts.setdefault(key, (row[side], side, []))[2].append(row)
            keys.append(key)
        triples.append(("", keys[0], keys[1]))
    made, conflicts = pairing.pairs_to_unpaired(triples, options.on_conflict)
    out = [
        _derived(
            have,
            behind[0],
            {
                "prompt": rows[0]["prompt"],
                "completion": completion,
                "label": label,
                "label_kind": "converted",
                "gen": behind[0].get(f"{side}_gen"),
                "weight": _weight(behind),
                **_cut("completion", ended_of(behind[0], side)),
            },
            [(have, row) for row in behind],
        )
        for _, key, label in made
        for completion, side, behind in [texts[key]]
    ]
    return out, ({"conflict": len(conflicts)} if conflicts else {}), lost


def _pairs_to_ranking(have, rows, options, draw):
    """Topological order if the wins are acyclic (one level per depth), else Bradley-Terry scores, l2 0.1. Tied answers
    have one rank. Pairs with a cut answer stay out: a ranking would prefer it to those below it.
    """
    from stages.ingestion.curation import bradley_terry

    cut = {i: "cut_answer" for i, row in enumerate(rows) if not all(ended_of(row, "chosen", "rejected"))}
    rows = [row for i, row in enumerate(rows) if i not in cut]
    if not rows:
        return [], {}, cut
    items: list[list[dict]] = []
    index: dict[str, int] = {}
    wins, ties = [], []
    for row in rows:
        for side in ("chosen", "rejected"):
            key = _key(row[side])
            if key not in index:
                index[key] = len(items)
                items.append(row[side])
        (ties if is_tie(row) else wins).append((index[_key(row["chosen"])], index[_key(row["rejected"])]))
    if not wins:
        return [], {"all_tied": 1}, dict.fromkeys(range(len(rows) + len(cut)), "all_tied") | cut
    same = list(range(len(items)))  # the first of the answers that are tied with each
    for a, b in ties:
        same = [same[a] if other == same[b] else other for other in same]
    depth = _depths(len(items), [(same[winner], same[loser]) for winner, loser in wins])
    dropped, scores = {}, None
    if depth is not None:
        depth = [depth[item] for item in same]
    else:
        scores = bradley_terry(len(items), wins + ties + [(b, a) for a, b in ties], l2=0.1)
        depth, dropped = pairing.ranks_from_scores([round(score, 9) for score in scores]), {"cycle": 1}
    new = {"prompt": rows[0]["prompt"], "completions": items, "ranks": depth, "scores": scores}
    new["weight"] = _weight(rows)
    return [_derived(have, rows[0], new, [(have, row) for row in rows])], dropped, cut


def _depths(n: int, wins: list[tuple[int, int]]) -> list[int] | None:
    """Longest chain of wins above each item (0 = nobody beat it); None if the wins have a cycle."""
    depth, beaten_by = [0] * n, [set() for _ in range(n)]
    for winner, loser in wins:
        beaten_by[loser].add(winner)
    done: set[int] = set()
    while len(done) < n:
        ready = [item for item in range(n) if item not in done and beaten_by[item] <= done]
        if not ready:
            return None
        for item in ready:
            depth[item] = max((depth[winner] + 1 for winner in beaten_by[item]), default=0)
        done.update(ready)
    return depth


_GROUPED: dict[tuple[str, str], Callable[..., Any]] = {
    ("ratings/1", "rankings/1"): _ratings_to_ranking,
    ("ratings/1", "pairs/1"): _ratings_to_pairs,
    ("ratings/1", "demonstrations/1"): _ratings_to_demonstrations,
    ("unpaired/1", "pairs/1"): _unpaired_to_pairs,
    ("pairs/1", "unpaired/1"): _pairs_to_unpaired,
    ("pairs/1", "rankings/1"): _pairs_to_ranking,
}
