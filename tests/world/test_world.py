"""The embedded world: answers are right, splits are disjoint, the same seed gives the same rows."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from stages.verification.verifiers import verify_world
from stages.worldgen import generate
from stages.worldgen.annotator import Annotator
from stages.worldgen.lexicon import draw_facts
from stages.worldgen.responses import STYLES, draw_response, write
from stages.worldgen.skills import SKILLS, draw_item

STYLE_WEIGHTS = {"short": 0.35, "worked": 0.35, "chatty": 0.15, "sloppy": 0.15}


def rng_of(*purpose):
    return np.random.Generator(
        np.random.Philox(key=int.from_bytes("/".join(map(str, purpose)).encode()[-8:].rjust(8), "big"))
    )


@pytest.fixture(scope="module")
def facts():
    return draw_facts(np.random.default_rng(3))


@pytest.mark.parametrize("skill", SKILLS)
def test_every_style_of_a_right_answer_verifies_and_every_wrong_one_does_not(skill, facts):
    rng = np.random.default_rng(1)
    for _ in range(60):
        item = draw_item(rng, facts, skill)
        row = {"answer": item.answer, "answer_type": item.answer_type, "extra_json": '{"verifier":"world"}'}
        for style in STYLES:
            text = write(item, style, True, rng).text
            # an answer without its marker is no answer, unless it stands alone
            if not text.startswith(("hm ", "It is ")):
                assert verify_world(row, text)[0], (item, text)
            wrong = write(item, style, False, rng).text
            assert not verify_world(row, wrong)[0], (item, wrong)


def test_skills_cover_three_difficulties_and_varied_wording(facts):
    rng = np.random.default_rng(0)
    items = [draw_item(rng, facts) for _ in range(3000)]
    assert {i.difficulty for i in items} == {1, 2, 3}
    assert {i.category for i in items} == set(SKILLS)
    assert len({i.answer for i in items}) > 200
    assert all(i.steps == "" or i.answer in i.steps or i.category in ("check", "older") for i in items)


def test_held_out_content_is_in_no_training_data(facts):
    made = {}
    for split, n in (("train", 300), ("test", 80), ("validation", 60)):
        rows = list(generate.prompt_rows(rng_of, facts, split=split, n=n))
        rows += list(
            generate.comparison_rows(
                rng_of, facts, Annotator(), split=split, n=n, wrong_share=0.4, style_weights=STYLE_WEIGHTS
            )
        )
        prompts = {row["prompt"][0]["content"] for row in rows}
        rows = list(
            generate.demonstration_rows(rng_of, facts, split=split, n=n, wrong_share=0.3, style_weights=STYLE_WEIGHTS)
        )
        made[split] = prompts | {row["messages"][0]["content"] for row in rows}
    assert (
        not made["train"] & made["test"]
        and not made["train"] & made["validation"]
        and not made["test"] & made["validation"]
    )
    text = "\n".join(
        row["text"]
        for row in generate.text_rows(rng_of, facts, split="train", n=400, statements=(6, 10), dialogue_share=0.5)
    )
    asked = set(re.findall(r" asks \w+: (.*?) (?:Ann|Ben|Ida|Leo) says: ", text))
    assert len(asked) > 500 and not asked & (made["test"] | made["validation"])


def test_demonstrations_are_of_mixed_quality_and_their_grades_are_true(facts):
    rows = list(
        generate.demonstration_rows(rng_of, facts, split="train", n=600, wrong_share=0.3, style_weights=STYLE_WEIGHTS)
    )
    extra = [row["extra"] for row in rows]
    wrong = np.mean([not e["correct"] for e in extra])
    assert 0.22 < wrong < 0.38
    assert {e["quality"] for e in extra} == {0, 1, 2, 3} and {e["style"] for e in extra} == set(STYLE_WEIGHTS)
    assert all((e["quality"] == 0) == (not e["correct"]) for e in extra)


def test_the_annotator_is_noisy_ties_and_likes_length(facts):
    rng = np.random.default_rng(5)
    annotator, item = Annotator(), draw_item(rng, facts, "lookup")
    good, bad = write(item, "worked", True, rng), write(item, "worked", False, rng)
    labels = [annotator.label(good, bad, rng) for _ in range(2000)]
    share = np.mean([label < 3 for label in labels])
    assert 0.85 < share < 0.99 and {1, 2, 3, 4} <= set(labels)
    short = write(item, "short", True, rng)
    longer = type(short)(short.text + " really" * 30, True, "short", 2)
    assert np.mean([annotator.label(longer, short, rng) < 3 for _ in range(2000)]) > 0.55
    assert annotator.utility(longer) > annotator.utility(short)


def test_the_same_seed_gives_the_same_rows(facts):
    make = lambda: json.dumps(
        list(
            generate.comparison_rows(
                rng_of, facts, Annotator(), split="train", n=50, wrong_share=0.4, style_weights=STYLE_WEIGHTS
            )
        ),
        sort_keys=True,
    )
    assert make() == make()


def test_asking_for_more_prompts_than_there_are_is_refused(facts, monkeypatch):
    monkeypatch.setattr(generate, "draw_item", lambda rng, facts: draw_item(rng, facts, "add"))
    with pytest.raises(ValueError, match="no more distinct"):
        list(generate.items_of("test", np.random.default_rng(0), facts))


def test_wrong_answers_share_follows_difficulty(facts):
    rng = np.random.default_rng(0)
    by = {1: [], 3: []}
    while min(map(len, by.values())) < 700:
        item = draw_item(rng, facts)
        if item.difficulty in by:
            by[item.difficulty].append(draw_response(item, rng, wrong_share=0.3, style_weights=STYLE_WEIGHTS).correct)
    assert np.mean(by[1]) > np.mean(by[3])
