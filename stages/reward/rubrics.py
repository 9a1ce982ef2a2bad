"""Rubrics: categories of prompts, each with weighted items (GRAPE-RUBRIC), as files that people write and as
``rubric_items/1``.

A rubric file is YAML or JSON::

    categories:
      maths:
        generation_prompt: You are a careful mathematician ...     # optional: system prompt of fresh responses
        improvement_prompt: You revise solutions ...               # optional: system prompt of improved ones
        items:
          - {id: right, kind: verifiable, criterion: The final answer is right., weight: 0.6, scorer: verifier}
          - {id: clear, kind: non_verifiable, criterion: The steps can be followed., weight: 0.4, scorer: {kind: judge, endpoint: ...}}

or JSON Lines with one item (and its category) per line. A scorer is a reward component (``stages.reward.components``)
that scores one answer by itself: a rule or verifier, a reward model, or a judge. ``sub_items`` split an item
(atomisation): they and the rest of the item share its weight, equally or by weights of their own. An item's version
ends in a digest of all that its scores depend on, so an edited item never passes for the old one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from stages.reward.grape import RubricError, atomise_weights, check_weights
from storage.files import canonical_json, read_text, sha256_text

KIND = "rubric_items/1"
SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".ndjson")
ITEM_KINDS = {"verifiable": "verifiable", "non_verifiable": "non_verifiable", "rm": "rm", "reward_model": "rm"}
CRITICS = {
    "general": (
        "You are an experienced and fair reviewer of the subject at hand. Criticise the response below on one"
        " criterion, arguing from what it says and not from taste. First a summary in one or two sentences; then every"
        " strength and every problem, each with the words quoted that show it and a concrete correction; then one"
        " recommendation. Be constructive, never condescending; praise what is exemplary and say why."
    ),
    "code_style": (
        "You are an experienced code reviewer who knows the conventions of the language at hand, argues from named"
        " principles rather than taste, and is constructive and encouraging. Review the submitted code on: 1."
        " readability and formatting (indentation, spacing, long lines broken down); 2. naming (descriptive, one casing"
        " style, acronyms); 3. comments and documentation (why rather than what, docstrings); 4. modularity (single"
        " purpose, length, separation); 5. robustness and practice (no bare exception handlers, no magic numbers,"
        " resources closed). Write a short overall summary; then for each of the five the quoted line, the problem and"
        " a corrected example in code; then a closing recommendation. No condescension; where code is exemplary, praise"
        " it and name the conventions it follows."
    ),
}
# compare answers, or need more than the answer and its prompt
NO_SCORERS = ("rubric", "majority", "debate", "group_preference", "icdpo")
NOT_OF_ITEMS = (
    "weight",
    "tier",
    "blend",
    "on_missing",
    "judge_mode",
    "judge_prompt",
    "judge_samples",
)  # settings of whole rewards
_KEYS = (
    "id",
    "item_id",
    "kind",
    "criterion",
    "weight",
    "omega",
    "scorer",
    "critic",
    "critique_prompt",
    "critique_prompt_id",
    "version",
    "sub_items",
    "residual",
    "category",
    "generation_prompt",
    "improvement_prompt",
    "parent_item_id",
)


@dataclass(frozen=True)
class Item:
    """One rubric item. ``scorer``, ``critic``: settings of the reward components that score and criticise."""

    category: str
    item_id: str
    version: str
    kind: str
    criterion: str
    omega: float
    scorer: dict
    critic: dict | None = None
    critique_prompt: str = ""

    @property
    def content(self) -> str:
        """The part of the version that changes with all that scores depend on."""
        return self.version.rpartition("-")[2]


@dataclass
class Rubric:
    """Items and prompts by category."""

    items: dict[str, list[Item]] = field(default_factory=dict)
    generation_prompt: dict[str, str] = field(default_factory=dict)
    improvement_prompt: dict[str, str] = field(default_factory=dict)

    def category_of(self, prompt_row: dict, default: str = "") -> str:
        """The category of a prompt. Raises RubricError: an unknown category never gets a default rubric."""
        found = prompt_row.get("category") or default
        if found not in self.items:
            raise RubricError(
                f"prompt {str(prompt_row.get('prompt_id'))[:12]} has the category {found or None!r}, for which there is"
                f" no rubric; the rubric's categories are {', '.join(self.items)}. Write one of them into the prompts'"
                " column `category`, add the category to the rubric, or write category=NAME in the reward component"
                " for prompts without one."
            )
        return found

    def weights(self) -> dict[str, list[float]]:
        return {name: [item.omega for item in items] for name, items in self.items.items()}


def from_rows(rows) -> Rubric:
    """A checked Rubric from ``rubric_items/1`` rows."""
    rubric = Rubric()
    for row in rows:
        settings = json.loads(row["settings_json"] or "{}")
        scorer = settings.get("scorer") or {"kind": "model" if row["kind"] == "rm" else row["scorer_id"].split("/")[0]}
        own = rubric.items.setdefault(row["category"], [])
        if any(item.item_id == row["item_id"] for item in own):
            raise RubricError(
                f"category {row['category']!r} has the item {row['item_id']!r} twice; keep one version of every item in"
                " a rubric"
            )
        own.append(
            Item(
                row["category"],
                row["item_id"],
                row["version"],
                row["kind"],
                row["criterion"],
                row["omega"],
                scorer,
                settings.get("critic"),
                row["critique_prompt"] or CRITICS.get(row["critique_prompt_id"], ""),
            )
        )
        for name in ("generation_prompt", "improvement_prompt"):
            if row[name]:
                getattr(rubric, name)[row["category"]] = row[name]
    if not rubric.items:
        raise RubricError("the rubric has no items; write at least one category with one item")
    for name, items in rubric.items.items():
        wrong = check_weights([item.omega for item in items])
        if wrong:
            raise RubricError(f"category {name!r}: {wrong}")
    return rubric


# -- files -------------------------------------------------------------------------------------------------------------


def read_rubric(path: str) -> list[dict]:
    """Rows of ``rubric_items/1`` (own columns only) from a rubric file. Raises RubricError that lists everything that
    is wrong with it.
    """
    import yaml

    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise RubricError(
            f"{file.name} is no rubric file; write YAML or JSON with `categories`, or JSON Lines with one item per line"
            f" ({', '.join(SUFFIXES)})"
        )
    try:
        text = read_text(file)
        if file.suffix.lower() in (".jsonl", ".ndjson"):
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            found = json.loads(text) if file.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise RubricError(f"{file.name} cannot be read: {error}") from None
    problems: list[str] = []
    rows = _rows(found, problems)
    if not rows and not problems:
        problems.append(
            "it has no items; write `categories: {NAME: {items: [...]}}`, or one item per line with its category"
        )
    for category in dict.fromkeys(row["category"] for row in rows):
        own = [row for row in rows if row["category"] == category]
        names = [row["item_id"] for row in own]
        problems += [
            f"category {category}: the item id {name!r} is used twice; give every item its own"
            for name in sorted({n for n in names if names.count(n) > 1})
        ]
        wrong = check_weights([row["omega"] for row in own])
        if wrong and not any(p.startswith(f"category {category}, item") for p in problems):
            problems.append(f"category {category}: {wrong}")
    if problems:
        raise RubricError(
            f"the rubric {file.name} has {len(problems)} problem{'s' * (len(problems) > 1)}:\n- "
            + "\n- ".join(problems)
        )
    return rows


def _rows(found, problems: list[str]) -> list[dict]:
    """Finished rows of a parsed file; what is wrong is appended to ``problems``."""
    categories: dict[str, dict] = {}
    version = ""
    if isinstance(found, dict):
        version = str(found.get("version") or "")
        problems += [
            f"unknown key {key!r}; write version, categories" for key in found if key not in ("version", "categories")
        ]
        given = found.get("categories")
        if not isinstance(given, dict):
            problems.append("`categories` is missing; write categories: {NAME: {items: [...]}}")
            return []
        for name, category in given.items():
            if not isinstance(category, dict) or not isinstance(category.get("items"), list):
                problems.append(
                    f"category {name}: `items` is missing; write items: [{{id: ..., kind: verifiable, criterion: ...,"
                    " weight: 1.0}]"
                )
                continue
            problems += [
                f"category {name}: unknown key {key!r}; write items, generation_prompt, improvement_prompt"
                for key in category
                if key not in ("items", "generation_prompt", "improvement_prompt")
            ]
            categories[str(name)] = category
    elif isinstance(found, list):
        for number, item in enumerate(found, 1):
            if not isinstance(item, dict) or not item.get("category"):
                problems.append(f"item {number}: `category` is missing; write the category that the item belongs to")
                continue
            category = categories.setdefault(str(item["category"]), {"items": []})
            category["items"].append(item)
            category.update({k: item[k] for k in ("generation_prompt", "improvement_prompt") if item.get(k)})
    else:
        problems.append(
            "it holds neither `categories` nor a list of items; see stages/reward/rubrics.py for an example"
        )
    rows = []
    for name, category in categories.items():
        if not category["items"]:
            problems.append(f"category {name} has no items; write at least one, or leave the category out")
        for number, item in enumerate(category["items"], 1):
            where = f"category {name}, item {number}" + (
                f" ({item.get('id', item.get('item_id'))})" if isinstance(item, dict) else ""
            )
            for row in _item_rows(item, where, version, problems):
                rows.append(
                    {
                        "category": name,
                        **row,
                        **{k: category.get(k) for k in ("generation_prompt", "improvement_prompt")},
                    }
                )
    return rows


def _item_rows(
    item, where: str, version: str, problems: list[str], weight: float | None = None, parent: dict | None = None
) -> list[dict]:
    """The row of an item, or the rows of its sub-items and residual."""
    if not isinstance(item, dict):
        problems.append(f"{where}: it is no mapping; write {{id: ..., kind: verifiable, criterion: ..., weight: 1.0}}")
        return []
    before = len(problems)
    problems += [f"{where}: unknown key {key!r}; write some of {', '.join(_KEYS)}" for key in item if key not in _KEYS]
    item = {
        **item,
        "id": item.get("id", item.get("item_id")),
        "weight": item.get("weight", item.get("omega")) if weight is None else weight,
    }
    for key in ("id", "criterion"):
        if not isinstance(item.get(key), str) or not item[key].strip():
            problems.append(
                f"{where}: `{key}` is missing; write {'a short name' if key == 'id' else 'what a good response does'}"
            )
    if isinstance(item["weight"], bool) or not isinstance(item["weight"], (int, float)):
        problems.append(f"{where}: `weight` is missing or no number; write its share of the category, between 0 and 1")
    kind = item.get("kind", "verifiable" if parent else None)
    if kind not in ITEM_KINDS:
        problems.append(f"{where}: kind {kind!r} is unknown; write verifiable, non_verifiable or rm")
    if len(problems) > before:
        return []
    if item.get("sub_items"):
        return _atomised(item, where, version, problems)
    kind = ITEM_KINDS[kind]
    settings = {
        "scorer": _component(item.get("scorer") or ("model" if kind == "rm" else "judge"), f"{where}: scorer", problems)
    }
    if item.get("critic"):
        settings["critic"] = _component(item["critic"], f"{where}: critic", problems)
        if settings["critic"] and settings["critic"]["kind"] != "judge":
            problems.append(
                f"{where}: critic is a {settings['critic']['kind']}; only a judge writes critiques, so write critic:"
                " {kind: judge, ...}"
            )
    if settings["scorer"] and kind == "rm" and settings["scorer"]["kind"] != "model":
        problems.append(f"{where}: kind rm is scored by a reward model; write scorer: model, or kind: verifiable")
    if item.get("critique_prompt_id") and not item.get("critique_prompt") and item["critique_prompt_id"] not in CRITICS:
        problems.append(
            f"{where}: there is no built-in critique prompt {item['critique_prompt_id']!r}; write one of"
            f" {', '.join(CRITICS)}, or your own text as critique_prompt"
        )
    content = {
        "kind": kind,
        "criterion": item["criterion"],
        "critique": item.get("critique_prompt") or item.get("critique_prompt_id"),
        **settings,
    }
    digest = sha256_text(canonical_json(content))[:8]
    scorer = settings["scorer"] or {"kind": "judge"}
    scorer_id = "/".join(str(v) for v in (scorer["kind"], scorer.get("endpoint_model") or scorer.get("input")) if v)
    return [
        {
            "item_id": item["id"],
            "version": "-".join(v for v in (str(item.get("version") or version), digest) if v),
            "kind": kind,
            "criterion": item["criterion"],
            "omega": float(item["weight"]),
            "scorer_id": scorer_id,
            "settings_json": canonical_json(settings),
            "critique_prompt_id": item.get("critique_prompt_id"),
            "critique_prompt": item.get("critique_prompt"),
            "parent_item_id": parent["id"] if parent else item.get("parent_item_id"),
        }
    ]


def _atomised(item: dict, where: str, version: str, problems: list[str]) -> list[dict]:
    """Sub-items and what is left of the item, which share its weight equally."""
    if not isinstance(item["sub_items"], list):
        problems.append(f"{where}: sub_items is no list; write sub_items: [{{id: ..., criterion: ..., scorer: ...}}]")
        return []
    shares, rest = atomise_weights(float(item["weight"]), len(item["sub_items"]), item.get("residual", True))
    own = [sub.get("weight", sub.get("omega")) if isinstance(sub, dict) else None for sub in item["sub_items"]]
    if any(w is not None for w in own):
        if any(isinstance(w, bool) or not isinstance(w, (int, float)) or not w >= 0 for w in own):
            problems.append(
                f"{where}: some sub_items have a weight >= 0 and some have not; write one for each, or none and they"
                f" share {item['weight']:g} equally"
            )
            return []
        shares, rest = own, item["weight"] - sum(own)
        if rest < -1e-9 or (rest > 1e-9 and not item.get("residual", True)):
            problems.append(
                f"{where}: the weights of sub_items sum to {sum(own):g} and share the item's {item['weight']:g}; write"
                " at most that, and all of it with residual: false"
            )
            return []
        rest = rest if rest > 1e-9 else 0.0
    rows = []
    for number, (sub, share) in enumerate(zip(item["sub_items"], shares), 1):
        rows += _item_rows(sub, f"{where}, sub-item {number}", version, problems, share, item)
    if rest:
        residual = {k: v for k, v in item.items() if k not in ("sub_items", "residual", "omega", "item_id")}
        apart = "; ".join(
            sub["criterion"]
            for sub in item["sub_items"]
            if isinstance(sub, dict) and isinstance(sub.get("criterion"), str)
        )
        residual["criterion"] = f"{item['criterion']} (Judge apart from this, which is scored on its own: {apart})"
        rows += _item_rows(
            {**residual, "id": f"{item['id']}.rest"}, f"{where}, residual", version, problems, rest, item
        )
    return rows


def _component(given, where: str, problems: list[str]) -> dict:
    """Checked settings of a reward component, as they were given (what is not given stays open for the component
    `rubric`).
    """
    from pydantic import ValidationError

    from stages.reward.components import RewardComponent

    given = {"kind": given} if isinstance(given, str) else given
    if not isinstance(given, dict):
        problems.append(f"{where}: write the kind of a reward component, such as verifier, or its settings")
        return {}
    if given.get("kind") in NO_SCORERS:
        problems.append(
            f"{where}: kind {given['kind']} cannot score an item of a rubric; write verifier, judge, model, regex,"
            " constraints, code or python"
        )
        return {}
    unread = [name for name in NOT_OF_ITEMS if name in given]
    if unread:
        problems.append(
            f"{where}: {', '.join(unread)} would not be read; the item has the weight, its criterion is what a judge is"
            " asked about, and the reward component of kind rubric has tier, blend and on_missing"
        )
        return {}
    try:
        checked = RewardComponent.model_validate(given)
    except ValidationError as error:
        problems += [f"{where}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        return {}
    kept = {name: value for name in ("source", "files") if (value := getattr(checked, name))}
    # the text of a function and the digests of what it reads, not where they lie: other contents are another version
    return {**given, **kept}


# -- ingestion ---------------------------------------------------------------------------------------------------------


def ingest(stage) -> None:
    """The ingest stage for rubrics: all of a file, or an error that lists all its problems; weights are checked per
    category, so no item can be left out by itself."""
    from stages.reward.whole import ingest_whole

    ingest_whole(
        stage, KIND, read_rubric, RubricError, lambda rows: {"categories": len({row["category"] for row in rows})}
    )


def load(stage, name: str = "rubric") -> Rubric:
    """The rubric of a stage input."""
    return from_rows(stage.dataset(name).iter_rows())
