"""tests/methods.yaml points at functions and tests that exist, and names every method of the catalogue that must be
there.
"""

import ast
import functools
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT.parent / "shared" / "methods"  # the specification, where it lies beside the project


@functools.cache
def functions(path: Path) -> set[str]:
    """Top-level names defined or assigned in a module, read without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return names


def test_every_entry_exists():
    text = (ROOT / "tests" / "methods.yaml").read_text(encoding="utf-8")
    table, wrong = yaml.safe_load(text), []
    names = re.findall(r"^([^\s#][^:]*):", text, re.M)
    assert sorted(names) == sorted(table)  # none twice, of which YAML would keep the last
    for method, row in table.items():
        for where in row["where"]:
            module, _, name = where.partition(":")
            path = ROOT / (module.replace(".", "/") + ".py")
            if not path.exists() or name not in functions(path):
                wrong.append(f"{method}: {where}")
        for test in row["tests"]:
            if test == "vectors":
                continue
            path, _, name = test.partition("::")
            if not (ROOT / path).exists() or (name and name.replace("::", ".") not in functions(ROOT / path)):
                wrong.append(f"{method}: {test}")
    assert wrong == []


def entries(text: str) -> dict[str, str]:
    """{ID: class} of a catalogue page: headings ``### `id` ... - class``, with several IDs where methods share an
    entry.
    """
    found = {}
    for line in text.splitlines():
        heading = re.match(r"### (`[\w.-]+`(?: / `[\w.-]+`)*) .*?(?:- (central|described|mentioned)\b.*)?$", line)
        for name in re.findall(r"`([\w.-]+)`", heading[1]) if heading else ():
            found[name] = heading[2] or "described"
    return found


def indexed(text: str) -> dict[str, str]:
    """{ID: class} of the index of a catalogue page: rows ``| `id` | name | class | ...``."""
    return {
        row[1]: row[2] for row in re.finditer(r"^\| `([\w.]+)` \| .*? \| (central|described|mentioned) \|", text, re.M)
    }


#: Central and described entries of the third page that have no row, and why: what there is instead, or what is missing.
#: A new row shortens this.
GAPS = {
    "data.vendor": (
        "a batch is an ingested directory with batch_id, and its report has agreement by batch; rows that supersede"
        " earlier ones by their annotation id, and drift of a reward model per batch, are missing"
    ),
    "data.fasttext_mining": "a web corpus and a text classifier: pretraining data, made outside",
    "synth.matrix": (
        "a model that plays all roles of a simulation: write_prompts and revise come near, the simulation is missing"
    ),
    "synth.ditto": "needs a knowledge base of characters; flows.character trains traits instead",
    "synth.saro": "preferences between steps of a safety thought: align has no pairs of single steps of one thought",
    "synth.urial_demos": (
        "the examples are the user's file (eval.urial shows them); nothing restyles demonstrations for it but revise"
        " with template=minimal"
    ),
    "reward.tampering": "environments that can be gamed are not built; an environment of one's own is module:Class",
    "eval.failure_modes": (
        "refusals, hedging and diversity are measured of every evaluation; invented facts and offence are a judge's or"
        " a reward model's to say"
    ),
    "eval.bias_before_after": (
        "a probe set is multiple choice or mirrored prompts, which evaluate reads and compare sets side by side; no"
        " probe set of social bias comes with it"
    ),
    "eval.safety_suite": (
        "attack success is what phrases or a judge call a non-refusal; a red-teaming agent of several turns is missing"
    ),
    "recipe.hhh_lab": (
        "each arm is a stage (system text, distill method=context, reward_model objective=pointwise_bce or bt, sft); no"
        " recipe runs them over sizes"
    ),
    "recipe.llama4": (
        "pruning by a judge's difficulty, and its hybrid loop in one recipe, are missing; the catalogue calls several"
        " details unverified"
    ),
    "recipe.matrix_ditto": "its data are missing: synth.matrix, synth.ditto",
    "recipe.fact_rlhf": "reward_model facts=true and rl are stages; no recipe runs them on rows with facts",
    "recipe.tampering": "its environments are missing: reward.tampering",
    "recipe.vendor_cycle": "its loop is data.vendor's; human_feedback asks people once",
    "recipe.budget_toggle": (
        "reward.length_target and system texts are there; data that switches thinking by a system text are not made"
    ),
}


def test_headings_are_read():
    page = (
        "### `a.b` Name (x) - central\n### `c.d` / `c.e` Two of them - described\n### `f.g` Relatives (optional"
        " `z`)\n## A. no entry\n### Shared parts\n### `h.i` Other - mentioned (in ORPO)"
    )
    assert indexed(
        "| `a.b` | name | central | x -> y | why |\n| `c.d` | other (1 \\| 2) | mentioned | - | - |\n| key | meaning |"
    ) == {"a.b": "central", "c.d": "mentioned"}
    assert entries(page) == {
        "a.b": "central",
        "c.d": "described",
        "c.e": "described",
        "f.g": "described",
        "h.i": "mentioned",
    }


@pytest.mark.skipif(not CATALOGUE.is_dir(), reason="the catalogue is not beside the project")
@pytest.mark.parametrize("part", ("supervised-reward-direct", "rl"))
def test_every_central_or_described_entry_has_a_row(part):
    table = yaml.safe_load((ROOT / "tests" / "methods.yaml").read_text(encoding="utf-8"))
    named = entries((CATALOGUE / f"{part}.md").read_text(encoding="utf-8"))
    assert len(named) > 80
    assert sorted(name for name, kind in named.items() if kind != "mentioned" and name not in table) == []


@pytest.mark.skipif(not CATALOGUE.is_dir(), reason="the catalogue is not beside the project")
def test_every_central_or_described_entry_of_data_rewards_evaluation_and_recipes_has_a_row_or_is_a_known_gap():
    table = yaml.safe_load((ROOT / "tests" / "methods.yaml").read_text(encoding="utf-8"))
    text = (CATALOGUE / "data-rewards-evaluation-recipes.md").read_text(encoding="utf-8")
    named = indexed(text)
    assert len(named) > 250 and {name: kind for name, kind in entries(text).items() if named.get(name) != kind} == {}
    missing = [name for name, kind in named.items() if kind != "mentioned" and name not in table]
    assert sorted(missing) == sorted(GAPS)  # a gap that got its row, or is no entry, leaves the list
