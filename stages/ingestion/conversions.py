"""The conversion matrix A.1: rows of one kind -> rows of another.

A row-wise converter takes one row and gives any number of rows. A grouped converter takes all rows
of one prompt (staged on disk by the stage) and gives rows. Both keep prompt_id and group_id, write
`origin=conversion`, list the input row ids in extra_json and count what they drop by reason.
"""
from __future__ import annotations

import hashlib
from typing import Any, Callable

from stages.ingestion import pairing
from stages.ingestion.rules import Bad, same_completion
from stages.ingestion.sources import canonical_bytes
from storage.schema import prompt_id, row_id

ROWWISE = {
    ("comparisons/1", "pairs/1"), ("rankings/1", "pairs/1"), ("pairs/1", "demonstrations/1"),
    ("rankings/1", "demonstrations/1"), ("ratings/1", "unpaired/1"), ("stepwise/1", "unpaired/1"),
    ("demonstrations/1", "demonstrations/1"), ("segments/1", "pairs/1"),
}
GROUPED = {
    ("ratings/1", "rankings/1"), ("ratings/1", "pairs/1"), ("unpaired/1", "pairs/1"), ("pairs/1", "unpaired/1"),
    ("pairs/1", "rankings/1"), ("ratings/1", "demonstrations/1"),
}
# Where the matrix has no direct rule but two rules follow each other.
CHAINS = {("comparisons/1", "demonstrations/1"): "pairs/1", ("comparisons/1", "unpaired/1"): "pairs/1",
          ("comparisons/1", "rankings/1"): "pairs/1", ("rankings/1", "unpaired/1"): "pairs/1"}
WITH_PROMPT = ("pairs/1", "comparisons/1", "rankings/1", "ratings/1", "unpaired/1", "stepwise/1", "demonstrations/1",
               "segments/1", "span_feedback/1", "candidates/1", "revisions/1")
_CARRIED = ("prompt_id", "group_id", "split", "source", "batch_id", "license", "weight")


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
    ids = [item.get("row_id") or row_id(k, item) for k, item in (sources or [(kind, row)])]
    extra = {"from": kind, "row_ids": ids}
    return {**carried, "origin": "conversion", "extra_json": canonical_bytes(extra).decode(), **new}


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
            p_a = pairing.likert_probability(row["label"], row["n_points"], row.get("orientation") or "low_is_a", options.soft_label_eps)
    elif kind in ("votes", "choice"):
        p_a = pairing.votes(row["votes"])["p_a"]
    else:
        p_a = row["p_a"]
    winner, probability, kept = pairing.binarise(p_a, options.tie_policy)
    if not kept:
        raise Bad("all_tied")
    a, b = ("response_b", "response_a") if winner == "B" else ("response_a", "response_b")
    out = {"prompt": row["prompt"], "chosen": row[a], "rejected": row[b], "strength": strength,
           "ann": row.get("ann"), "turn_index": row.get("turn_index"),
           "chosen_gen": row.get("gen_" + a[-1]), "rejected_gen": row.get("gen_" + b[-1]), "pairs_in_group": 1}
    soft = options.soft_label == "prob" or (options.soft_label == "auto" and kind == "prob") or \
        (options.soft_label == "linear" and kind == "likert") or winner == "tie"
    if soft:
        out["label_prob"] = probability
    if options.margin_mode.startswith("llama2"):
        out["margin"] = pairing.margin(options.margin_mode, strength=strength)
    return out


def _ranking_to_pairs(row: dict, options, draw) -> list[dict]:
    ranks, scores = row["ranks"], row.get("scores")
    gens = row.get("gens") or [None] * len(ranks)
    if options.pair_mode == "rank_gap":
        staged = [(i, j, stage, gap) for stage, (gap, pairs) in enumerate(pairing.rank_gap_stages(ranks)) for i, j in pairs]
    else:
        staged = [(i, j, None, ranks[j] - ranks[i]) for i, j in pairing.ranking_pairs(ranks, options.pair_mode, draw)]
    staged = [item for item in staged if not same_completion(row["completions"][item[0]], row["completions"][item[1]])]
    if not staged:
        raise Bad("all_tied" if len(set(ranks)) <= 1 and len(ranks) > 1 else "no_pair")
    out = []
    for i, j, stage, gap in staged:
        new = {"prompt": row["prompt"], "chosen": row["completions"][i], "rejected": row["completions"][j],
               "pairs_in_group": len(staged), "weight": row.get("weight", 1.0) / len(staged), "rank_gap": gap,
               "stage_index": stage, "ann": row.get("ann"), "chosen_gen": gens[i], "rejected_gen": gens[j]}
        if scores:
            new |= {"chosen_score": scores[i], "rejected_score": scores[j]}
            if options.margin_mode == "score_diff":
                new["margin"] = scores[i] - scores[j]
        out.append(new)
    return out


def finish_pair(row: dict, options) -> dict:
    """Margin of a pair that came as a pair (`data.margin`). score_diff drops non-positive gaps as ties."""
    grade = row.pop("_grade", None)
    if options.margin_mode == "none" or row.get("margin") is not None:
        return row
    gap = pairing.margin(options.margin_mode, strength=row.get("strength"), grade=grade,
                         chosen_score=row.get("chosen_score"), rejected_score=row.get("rejected_score"))
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
    roles = [message["role"] if message["role"] != "assistant" or index in trained else "context"
             for index, message in enumerate(row["messages"])]
    balance = "per_conversation" if options.balance == "per_conversation" else "none"
    samples = pairing.unroll(roles, options.multiturn, balance)
    return [{**row, "prompt_id": None, "messages": row["messages"][:target + 1], "train_turns": [target],
             "weight": row.get("weight", 1.0) * weight} for target, weight in samples]


def prompt_row(kind: str, row: dict) -> dict:
    """any -> prompts/1: the prompt alone, label columns dropped (`data.prompts`)."""
    if kind == "demonstrations/1":
        messages = row["messages"]
        end = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
        return {"prompt": messages[:end + 1]}
    out = {"prompt": row["prompt"]}
    if row.get("answer") is not None:
        out["answer"] = row["answer"]
    return out


def rowwise(have: str, want: str, row: dict, options, draw=None) -> list[dict]:
    """Rows of kind `want` made of one row of kind `have`. Raises Bad where nothing comes of it."""
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
        return [_derived(have, row, new) for new in _ranking_to_pairs(row, options, draw)]
    if (have, want) == ("pairs/1", "demonstrations/1"):
        return [_derived(have, row, _as_demonstration(row["prompt"], row["chosen"]))]
    if (have, want) == ("rankings/1", "demonstrations/1"):
        best = min(range(len(row["ranks"])), key=lambda index: (row["ranks"][index], index))
        return [_derived(have, row, _as_demonstration(row["prompt"], row["completions"][best]))]
    if (have, want) == ("ratings/1", "unpaired/1"):
        if options.threshold is None:
            raise ValueError("ratings become unpaired rows only with a threshold; set `threshold` (label = score >= threshold)")
        if options.dead_band and abs(row["score"] - options.threshold) < options.dead_band:
            raise Bad("all_tied")
        return [_derived(have, row, {"prompt": row["prompt"], "completion": row["completion"], "gen": row.get("gen"),
                                     "label": row["score"] >= options.threshold, "label_kind": "threshold"})]
    if (have, want) == ("stepwise/1", "unpaired/1"):
        label = -1 not in row["labels"] and row.get("solution_correct") is not False
        text = row.get("separator", "\n\n").join(row["completions"])
        return [_derived(have, row, {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": text}],
                                     "label": label, "label_kind": "correctness"})]
    raise ValueError(f"no conversion from {have} to {want}; {have} can become {', '.join(reachable(have))}")


def _as_demonstration(prompt: list[dict], completion: list[dict]) -> dict:
    turns = [len(prompt) + index for index, message in enumerate(completion) if message["role"] == "assistant"]
    return {"messages": prompt + completion, "train_turns": turns}


def _key(messages: list[dict]) -> str:
    """Identity of a completion for conflicts: exact after strip."""
    return prompt_id([{**message, "content": (message.get("content") or "").strip()} for message in messages])


def grouped(have: str, want: str, rows: list[dict], options, draw=None) -> tuple[list[dict], dict[str, int], list[int]]:
    """(rows out, dropped by reason, indices of input rows of which nothing came because of a tie).

    rows: all rows of kind `have` with one prompt, in input order.
    """
    return _GROUPED[have, want](have, rows, options, draw)


def _ratings_to_ranking(have, rows, options, draw):
    scores = [row["score"] for row in rows]
    new = {"prompt": rows[0]["prompt"], "completions": [row["completion"] for row in rows],
           "ranks": pairing.ranks_from_scores(scores), "scores": scores,
           "gens": [row.get("gen") for row in rows] if any(row.get("gen") for row in rows) else None,
           "ann": rows[0].get("ann")}
    return [_derived(have, rows[0], new, [(have, row) for row in rows])], {}, []


def _ratings_to_pairs(have, rows, options, draw):
    scores = [row["score"] for row in rows]
    if options.pair_mode == "all":
        pairs = [(i, j, gap) for i, j, gap in pairing.ratings_pairs(scores, options.min_margin)]
    else:
        pairs = [(i, j, scores[i] - scores[j]) for i, j in pairing.ranking_pairs(
            pairing.ranks_from_scores(scores), options.pair_mode, draw) if scores[i] - scores[j] >= options.min_margin]
    pairs = [item for item in pairs if not same_completion(rows[item[0]]["completion"], rows[item[1]]["completion"])]
    pairs = pairs[:options.max_pairs_per_prompt]
    out = [_derived(have, rows[i], {
        "prompt": rows[i]["prompt"], "chosen": rows[i]["completion"], "rejected": rows[j]["completion"],
        "chosen_score": scores[i], "rejected_score": scores[j], "margin": gap if options.margin_mode == "score_diff" else None,
        "pairs_in_group": len(pairs), "weight": 1.0 / len(pairs), "chosen_gen": rows[i].get("gen"),
        "rejected_gen": rows[j].get("gen")}, [(have, rows[i]), (have, rows[j])]) for i, j, gap in pairs]
    return out, ({} if out else {"no_pair": 1}), ([] if out else list(range(len(rows))))


def _ratings_to_demonstrations(have, rows, options, draw):
    best = max(range(len(rows)), key=lambda index: (rows[index]["score"], -index))
    if options.threshold is not None and rows[best]["score"] < options.threshold:
        return [], {"below_threshold": 1}, []
    return [_derived(have, rows[best], _as_demonstration(rows[best]["prompt"], rows[best]["completion"]))], {}, []


def _unpaired_to_pairs(have, rows, options, draw):
    labels: dict[str, set[bool]] = {}
    for row in rows:
        labels.setdefault(_key(row["completion"]), set()).add(row["label"])
    usable = [row for row in rows if len(labels[_key(row["completion"])]) == 1]
    good, bad = [row for row in usable if row["label"]], [row for row in usable if not row["label"]]
    pairs = pairing.unpaired_to_pairs(good, bad, options.max_pairs_per_prompt)
    out = [_derived(have, a, {"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"],
                              "pairs_in_group": len(pairs), "weight": 1.0 / len(pairs), "chosen_gen": a.get("gen"),
                              "rejected_gen": b.get("gen")}, [(have, a), (have, b)]) for a, b in pairs]
    dropped = {"conflict": len(rows) - len(usable)} if len(usable) < len(rows) else {}
    if not out:
        dropped["no_pair"] = 1
    return out, dropped, ([] if out else list(range(len(rows))))


def _pairs_to_unpaired(have, rows, options, draw):
    texts: dict[str, tuple[list[dict], dict]] = {}
    triples = []
    for row in rows:
        keys = []
        for side in ("chosen", "rejected"):
            key = _key(row[side])
            texts.setdefault(key, (row[side], row))
            keys.append(key)
        triples.append(("", keys[0], keys[1]))
    made, conflicts = pairing.pairs_to_unpaired(triples, options.on_conflict)
    out = [_derived(have, texts[key][1], {"prompt": rows[0]["prompt"], "completion": texts[key][0], "label": label,
                                          "label_kind": "converted"}) for _, key, label in made]
    return out, ({"conflict": len(conflicts)} if conflicts else {}), []


def _pairs_to_ranking(have, rows, options, draw):
    """Topological order if the wins are acyclic (one level per depth), else Bradley-Terry scores, l2 0.1."""
    from stages.ingestion.curation import bradley_terry

    items: list[list[dict]] = []
    index: dict[str, int] = {}
    wins = []
    for row in rows:
        for side in ("chosen", "rejected"):
            key = _key(row[side])
            if key not in index:
                index[key] = len(items)
                items.append(row[side])
        wins.append((index[_key(row["chosen"])], index[_key(row["rejected"])]))
    depth = _depths(len(items), wins)
    dropped, scores = {}, None
    if depth is None:
        scores = bradley_terry(len(items), wins, l2=0.1)
        depth, dropped = pairing.ranks_from_scores([round(score, 9) for score in scores]), {"cycle": 1}
    new = {"prompt": rows[0]["prompt"], "completions": items, "ranks": depth, "scores": scores}
    return [_derived(have, rows[0], new, [(have, row) for row in rows])], dropped, []


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


def contradiction_key(row: dict) -> bytes:
    """Key of a pair whatever the order of its answers."""
    sides = sorted((prompt_id(row["chosen"]), prompt_id(row["rejected"])))
    return hashlib.sha256("|".join([prompt_id(row["prompt"]), *sides]).encode()).digest()[:16]


def settle_votes(rows: list[dict]) -> tuple[list[dict], list[int]]:
    """Pairs with the same two answers as votes (`contradictions: keep_as_votes`).

    (rows out, indices of the input rows lost to an even vote). label_prob = share of the majority.
    """
    first = rows[0]
    forward = sum(same_completion(row["chosen"], first["chosen"]) for row in rows)
    if forward == len(rows):
        return [first], []
    if 2 * forward == len(rows):
        return [], list(range(len(rows)))
    keep = first if 2 * forward > len(rows) else next(row for row in rows if not same_completion(row["chosen"], first["chosen"]))
    return [{**keep, "label_prob": max(forward, len(rows) - forward) / len(rows)}], []


_GROUPED: dict[tuple[str, str], Callable[..., Any]] = {
    ("ratings/1", "rankings/1"): _ratings_to_ranking, ("ratings/1", "pairs/1"): _ratings_to_pairs,
    ("ratings/1", "demonstrations/1"): _ratings_to_demonstrations, ("unpaired/1", "pairs/1"): _unpaired_to_pairs,
    ("pairs/1", "unpaired/1"): _pairs_to_unpaired, ("pairs/1", "rankings/1"): _pairs_to_ranking,
}
