"""Stage constrain: what is drawn can be met together, is asked for in words, checked by the reward's own verifier;
pairs by the catalogue's rule; kills.
"""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stages.harness import execute
from stages.verification.constraint_pool import (
    KINDS,
    LANGUAGE_NAMES,
    Choice,
    apart,
    compatible,
    draw_constraints,
    rendered,
    with_constraints,
)
from stages.verification.constraints import check_constraint
from stages.verification.ifeval import CHECKERS
from stages.verification.languages import LANGUAGES
from storage.datasets import open_dataset, write_dataset
from storage.files import tree_digest
from storage.schema import complete_row
from tests.chat_server import chat_server
from tests.common import BESIDE, beside, silent, user
from tests.training.test_revise import roomy, rows_of, said  # noqa: F401
from tests.world.test_rewards import SAID, _data

PROMPTS = [
    "Write a short story about a boat.",
    "Is it wise to learn to swim late in life?",
    "What should I cook on Sunday, and why?",
    "Explain how a kite stays in the air. Use plain words.",
]
MORE = {
    "es": "Hola, soy de la ciudad y me gusta mucho el cine.",
    "fr": "Bonjour, je suis dans la ville avec mes amis.",
    "nl": "Ik ben niet in de stad en dat is maar goed ook.",
    "sv": "Jag är inte här och det är en bra dag.",
    "pl": "To jest dom i nie wiem czy on już był.",
    "tr": "Bu bir ev ve ben çok mutlu değilim.",
    "id": "Saya tidak akan pergi ke sana dan ini adalah rumah.",
    "uk": "Я живу в Києві і це є дуже добре для нас.",
    "el": "Γεια σας",
    "he": "שלום לכולם",
    "ja": "これはとてもいいです",
    "zh": "我住在北京",
    "ml": "ഞാൻ ഇവിടെ താമസിക്കുന്നു",
}


def witness(drawn, prompt):
    """A text that meets constraints which were drawn together: built from their arguments, without a look at how they
    are checked.
    """
    asked = {one.id: one.kwargs for one in drawn}
    given = lambda name: asked.get(name, {})
    lower = lambda name, key: given(name)[key] if "at least" in given(name).values() else 0
    if "detectable_format:constrained_response" in asked:
        return "My answer is no."
    said = (
        (SAID | MORE)[given("language:response_language")["language"]].rstrip(".").replace(",", "")
        if "language:response_language" in asked
        else None
    )
    shouted = " ".join(["UTMOST"] * lower("change_case:capital_word_frequency", "capital_frequency"))
    words = [
        *given("keywords:existence").get("keywords", []),
        *[given("keywords:frequency").get("keyword", "")] * lower("keywords:frequency", "frequency"),
        *(
            [given("keywords:letter_frequency")["letter"] * lower("keywords:letter_frequency", "let_frequency")]
            if lower("keywords:letter_frequency", "let_frequency")
            else []
        ),
        *([shouted] if shouted else []),
        *[f"[{said or 'slot'}]"] * given("detectable_content:number_placeholders").get("num_placeholders", 0),
        *[f"*{said or 'stress'}*"] * given("detectable_format:number_highlighted_sections").get("num_highlights", 0),
    ]
    filler = said or "it was of a sun"
    base = " ".join([filler, *words])
    sentences = [base + "."] + ["It is on." if said is None else said + "."] * max(
        0, lower("length_constraints:number_sentences", "num_sentences") - 1
    )
    lacking = lower("length_constraints:number_words", "num_words") - len(re.findall(r"\w+", " ".join(sentences)))
    sentences[0] = " ".join([sentences[0].rstrip("."), *["of"] * max(0, lacking)]) + "."
    body = " ".join(sentences)
    if "detectable_format:json_format" in asked:
        return json.dumps({"a": body})
    if "length_constraints:nth_paragraph_first_word" in asked:
        one = given("length_constraints:nth_paragraph_first_word")
        parts = ["on" for _ in range(one["num_paragraphs"])]
        parts[one["nth_paragraph"] - 1] = one["first_word"]
        body = "\n\n".join([f"{part} {body if i == 0 else 'on'}" for i, part in enumerate(parts)])
    elif "length_constraints:number_paragraphs" in asked:
        body = "\n***\n".join(
            [body, *[said or "on"] * (given("length_constraints:number_paragraphs")["num_paragraphs"] - 1)]
        )
    if "combination:two_responses" in asked:
        body = f"{body}\n******\n{body} {said or 'on'}"
    if "detectable_format:multiple_sections" in asked:
        one = given("detectable_format:multiple_sections")
        body += "".join(f"\n{one['section_spliter']} {n + 1}\non" for n in range(one["num_sections"]))
    if "detectable_format:number_bullet_lists" in asked:
        body += "\n" + "\n".join([f"- {said or 'on'}"] * given("detectable_format:number_bullet_lists")["num_bullets"])
    if "detectable_format:title" in asked:
        body = f"<<{said or 'on'}>>\n{body}"
    if "combination:repeat_prompt" in asked:
        body = given("combination:repeat_prompt")["prompt_to_repeat"] + "\n" + body
    if "detectable_content:postscript" in asked:
        body += f"\n{given('detectable_content:postscript')['postscript_marker']} on"
    if "startend:end_checker" in asked:
        body += "\n" + given("startend:end_checker")["end_phrase"]
    body = (
        body.upper()
        if "change_case:english_capital" in asked
        else body.lower()
        if "change_case:english_lowercase" in asked
        else body
    )
    return f'"{body}"' if "startend:quotation" in asked else body


def test_whatever_is_drawn_together_can_be_met_together():
    """Every kind of IFEval, and every two kinds that are not apart, are drawn and met in one text, no two that are; the
    arguments are in the words.
    """
    together, kinds = Counter(), Counter()
    for i in range(2000):
        prompt = PROMPTS[i % len(PROMPTS)]
        drawn = draw_constraints(np.random.default_rng(i), prompt, 1 + i % 4)
        text = witness(drawn, prompt)
        missed = [one for one in drawn if not check_constraint(one.id, one.kwargs, text)]
        assert not missed, (missed, drawn, text)
        together.update(frozenset(pair) for pair in itertools.combinations([one.id for one in drawn], 2))
        kinds.update(one.id for one in drawn)
        for one in drawn:
            named = [
                LANGUAGE_NAMES[value] if name == "language" else value
                for name, value in one.kwargs.items()
                if name not in ("relation", "let_relation", "capital_relation", "prompt_to_repeat")
            ]
            assert all(
                str(word) in one.text for value in named for word in (value if isinstance(value, list) else [value])
            ), one
            assert ("at least" in one.text) >= ("at least" in one.kwargs.values()) and ("fewer than" in one.text) == (
                "less than" in one.kwargs.values()
            )
    assert set(kinds) == set(CHECKERS) == set(KINDS) and set(LANGUAGE_NAMES) == LANGUAGES - {"en"}
    allowed = {frozenset(pair) for pair in itertools.combinations(CHECKERS, 2) if not apart(*pair)}
    assert set(together) <= allowed
    for a, b in map(sorted, allowed - set(together)):  # the rare ones, drawn from these two kinds alone
        both = next(
            found
            for i in itertools.count()
            if len(found := draw_constraints(np.random.default_rng(i), PROMPTS[1], 2, Choice(kinds=(a, b)))) == 2
        )
        assert all(check_constraint(one.id, one.kwargs, witness(both, PROMPTS[1])) for one in both), both


def test_the_same_seed_draws_the_same():
    draw = lambda seed: draw_constraints(np.random.default_rng(seed), PROMPTS[0], 3)
    assert draw(7) == draw(7) and draw(7) != draw(8)
    assert {
        one.id
        for i in range(50)
        for one in draw_constraints(np.random.default_rng(i), PROMPTS[0], 3, Choice(kinds=("punctuation:no_comma",)))
    } == {"punctuation:no_comma"}
    assert not any(
        one.id == "detectable_format:constrained_response"
        for i in range(300)
        for one in draw_constraints(np.random.default_rng(i), PROMPTS[0], 3)
    ), "no yes-or-no question"
    text = with_constraints("Say hello. ", draw(7))
    assert text.startswith("Say hello.\n\n") and all(one.text in text for one in draw(7))


@pytest.mark.parametrize(
    "first,second",
    [
        (("punctuation:no_comma", {}), ("combination:repeat_prompt", {"prompt_to_repeat": "One, two"})),
        (("keywords:existence", {"keywords": ["way"]}), ("keywords:forbidden_words", {"forbidden_words": ["way"]})),
        (
            ("change_case:english_lowercase", {}),
            ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": "at least"}),
        ),
        (("change_case:english_capital", {}), ("change_case:english_lowercase", {})),
        (
            ("length_constraints:number_words", {"num_words": 40, "relation": "less than"}),
            ("length_constraints:number_sentences", {"num_sentences": 12, "relation": "at least"}),
        ),
        (
            ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}),
            ("length_constraints:number_words", {"num_words": 300, "relation": "at least"}),
        ),
        (
            ("startend:end_checker", {"end_phrase": "That is it."}),
            ("keywords:letter_frequency", {"letter": "t", "let_frequency": 3, "let_relation": "less than"}),
        ),
        (
            ("keywords:frequency", {"keyword": "boat", "frequency": 2, "relation": "less than"}),
            ("combination:repeat_prompt", {"prompt_to_repeat": "boat or boat"}),
        ),
        (
            ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
            ("combination:repeat_prompt", {"prompt_to_repeat": "a\n- b\n- c\n- d"}),
        ),
        (("language:response_language", {"language": "de"}), ("keywords:existence", {"keywords": ["way"]})),
        (("detectable_format:json_format", {}), ("detectable_format:title", {})),
        (("length_constraints:number_paragraphs", {"num_paragraphs": 3}), ("combination:two_responses", {})),
        (("startend:quotation", {}), ("combination:repeat_prompt", {"prompt_to_repeat": "a"})),
        (
            ("detectable_format:constrained_response", {}),
            ("length_constraints:number_words", {"num_words": 100, "relation": "at least"}),
        ),
    ],
)
def test_contradictions_are_never_drawn_together(first, second):
    assert (
        not compatible([first, second])
        and not compatible([second, first])
        and compatible([first])
        and compatible([second])
    )


def test_every_kind_of_ifevals_file_is_produced():
    """What IFEval asks for, by kind and arguments, has the same ids and the same names of arguments here, and its own
    constraints can be put in words.
    """
    asked = [
        (name, {k: v for k, v in given.items() if v is not None})
        for row in map(json.loads, _data("ifeval_input_data.jsonl").read_text("utf-8").splitlines())
        for name, given in zip(row["instruction_id_list"], row["kwargs"])
    ]
    drawn = [one for i in range(1000) for one in draw_constraints(np.random.default_rng(i), PROMPTS[i % 4], 2)]
    assert {name for name, _ in asked} == {one.id for one in drawn}
    names = {one.id: set(one.kwargs) for one in drawn}
    assert all(set(given) == names[name] for name, given in asked)
    assert all(rendered(name, given, k) for name, given in asked for k in range(len(KINDS[name].renderings)))


@pytest.fixture()
def prompts(tmp_path):
    """Six prompts to answer, one held out, and four that get no constraint."""
    ready = [
        user("hello") + [{"role": "assistant", "content": "hi"}] + user("Tell me about the river of this town.")
    ] + [user(f"Tell me about the {word} of this town.") for word in ("bridge", "market", "castle", "park", "school")]
    odd = [user("Was ist das für ein Haus und wie ist es?"), user("a") + [{"role": "assistant", "content": "b"}]]
    rows = [
        {
            "prompt": prompt,
            "group_id": f"g{i}",
            "answer": "42" if i == 2 else None,
            "weight": 3.0 if i == 0 else 1.0,
            "split": "test" if i == 3 else "train",
            **BESIDE,
        }
        for i, prompt in enumerate(ready)
    ]
    rows += [{"prompt": prompt} for prompt in odd] + [
        {"prompt": user("Do this."), "constraints": [{"id": "punctuation:no_comma", "kwargs_json": "{}"}]}
    ]
    path = str(tmp_path / "prompts")
    write_dataset(
        path,
        "prompts",
        "prompts/1",
        [complete_row("prompts/1", row, dataset="p", source="people", origin="human") for row in rows],
    )
    return path


def go(spec, config, inputs, name="constrain", **more):
    return execute(spec("constrain", {"block": 4, **config}, inputs, name, **more), silent)


def test_pairs_follow_the_catalogues_rule(spec, prompts):
    """A server that heeds commas where it is asked to: chosen met, rejected did not, the stored prompt has the
    constraint; the reward scores the prompts alike.
    """
    from stages.reward.components import RewardComponent
    from stages.reward.rewards import build_rewards

    def choice(body):
        text, place = (
            body["messages"][-1]["content"],
            re.search(r"the (\w+) of this town", body["messages"][-1]["content"])[1],
        )
        asked = "comma" in text
        heeds = asked and place != "bridge"  # asked to, it does it wrong
        if place == "school" and asked:
            return said("it stops with", "length")
        return said(f"plain words about the {place}" if heeds or place == "market" else f"words, about the {place}")

    with chat_server(choice) as server:
        result = go(
            spec,
            {
                "endpoint": server.url,
                "endpoint_model": "m",
                "kinds": ["punctuation"],
                "num_generations": 2,
                "validation_fraction": 0,
            },
            {"prompts": prompts},
        )
        seen = server.seen
    made, pairs, demos, candidates = (rows_of(result, name) for name in ("prompts", "pairs", "data", "candidates"))
    summary = result["summary"]
    assert all(one == BESIDE for rows in (made, pairs, demos, candidates) for one in beside(rows))
    assert (
        len(made) == 6
        and {r["split"] for r in made} == {"train", "test"}
        and summary["left_out/not_english"]
        == summary["left_out/last_not_user"]
        == summary["left_out/constrained_already"]
        == 1
    )
    assert all(
        r["constraints"] == [{"id": "punctuation:no_comma", "kwargs_json": "{}"}]
        and "comma" in r["prompt"][-1]["content"]
        for r in made
    )
    assert [r["answer"] for r in made] == [None, None, "42", None, None, None] and [r["group_id"] for r in made] == [
        f"g{i}" for i in range(6)
    ]
    assert (
        made[0]["prompt"][:2] == user("hello") + [{"role": "assistant", "content": "hi"}]
        and len({r["prompt_id"] for r in made}) == 6
    )
    assert (
        summary["answered"],
        summary["pairs"],
        summary["dropped/chosen_fails"],
        summary["dropped/rejected_also_passes"],
        summary["dropped/no_complete_answer"],
    ) == (5, 2, 1, 1, 1)
    assert [(r["prompt"], r["chosen"][0]["content"], r["rejected"][0]["content"]) for r in pairs] == [
        (made[i]["prompt"], f"plain words about the {place}", f"words, about the {place}")
        for i, place in ((0, "river"), (4, "park"))
    ]
    assert {
        (r["origin"], tuple(r["constraint_ids"]), r["pairs_in_group"], r["weight"], r["ann"]["annotator_type"])
        for r in pairs
    } == {("constraint", ("punctuation:no_comma",), 1, weight, "rule") for weight in (3.0, 1.0)}
    assert [r["messages"][-1]["content"] for r in demos] == [
        f"plain words about the {place}" for place in ("river", "market", "park")
    ] and demos[0]["train_turns"] == [3]
    assert [r["weight"] for r in demos] == [3.0, 1.0, 1.0] and {(c["group_id"], c["weight"]) for c in candidates} == {
        (f"g{i}", 3.0 if i == 0 else 1.0) for i in (0, 1, 2, 4, 5)
    }, "a prompt's weight is that of all that is made of it"
    assert len(seen) == 5 * 3 and not any("castle" in b["messages"][-1]["content"] for b in seen), (
        "a held-out prompt is not answered"
    )
    plain = [c for c in candidates if json.loads(c["extra_json"]).get("mode") == "plain"]
    assert len(candidates) == 15 and len(plain) == 5 and [c["drop_reason"] for c in candidates].count("truncated") == 2
    rewards = build_rewards([RewardComponent(kind="constraints")], {})
    scored = rewards.score(
        [
            {
                "prompt_row": next(r for r in made if r["prompt_id"] == c["prompt_id"]),
                "completion_text": c["completion"][0]["content"],
            }
            for c in candidates
        ]
    )
    assert [s.total for s in scored] == [c["reward"] for c in candidates]
    assert summary["pass_rate/asked"] == 6 / 8 and summary["pass_rate/plain"] == 1 / 5


def test_more_draws_and_two_models(roomy, tiny, prompts, spec):  # noqa: F811
    """Several draws per prompt are prompts of their own; answers without constraints may be another model's, and say
    so.
    """
    inputs = {"model": roomy[0], "plain_model": tiny["policy"], "prompts": prompts}
    result = go(spec, {"per_prompt": 3, "max_completion_length": 8, "max_prompts": 6, "num_plain": 2}, inputs)
    made, candidates = rows_of(result, "prompts"), rows_of(result, "candidates")
    assert (
        len(made) == 18
        and Counter(r["group_id"] for r in made) == {f"g{i}": 3 for i in range(6)}
        and len({r["prompt_id"] for r in made}) == 18
    )
    assert len({c["prompt_id"] for c in candidates}) == 6 and Counter(c["gen"]["model_id"] for c in candidates) == {
        "model": 12,
        "plain_model": 12,
    }
    few = go(spec, {"per_prompt": 9, "kinds": ["punctuation"]}, {"prompts": prompts}, "few")
    different = [r["prompt_id"] for r in rows_of(few, "prompts")]
    assert len(set(different)) == len(different) == 9 * 6 - few["summary"]["left_out/drawn_before"] < 9 * 6
    alone = go(spec, {"per_prompt": 3}, {"prompts": prompts}, "alone")
    assert [r["row_id"] for r in rows_of(alone, "prompts")] == [r["row_id"] for r in made] and set(
        alone["outputs"]
    ) == {"prompts"}, "prompts do not depend on who answers"


def test_a_killed_run_ends_with_the_same_bytes(roomy, prompts, spec, forks):  # noqa: F811
    config = {
        "block": 2,
        "per_prompt": 3,
        "max_completion_length": 24,
        "num_generations": 3,
        "logit_bias": {roomy[1]: 3},
        "kinds": ["punctuation", "keywords", "length_constraints"],
    }
    inputs = {"model": roomy[0], "prompts": prompts}
    whole, killed = spec("constrain", config, inputs, "whole"), spec("constrain", config, inputs, "killed")
    forks.run(spec.path("whole"))
    forks.start(spec.path("killed")).kill_when(lambda: any(Path(killed["workdir"], "checkpoints").glob("step-*3")))
    assert not Path(killed["workdir"], "result.json").exists()
    forks.run(spec.path("killed"))
    results = [json.loads(Path(one["workdir"], "result.json").read_text()) for one in (whole, killed)]
    assert (
        results[1]["resumed_from"]
        and results[0]["summary"] == results[1]["summary"]
        and results[0]["summary"]["answered"] == 15
        and results[0]["summary"]["pass_rate/asked"] > 0
    )
    for part in ("out/prompts", "out/pairs", "out/data", "out/candidates", "reports"):
        assert tree_digest(Path(whole["workdir"], part)) == tree_digest(Path(killed["workdir"], part)), part
    rows = list(open_dataset(results[0]["outputs"]["candidates"]["path"]).iter_rows())
    by_prompt = {r["prompt_id"]: r for r in rows_of(results[0], "prompts")}
    assert all(
        r["correct"]
        == all(
            check_constraint(c["id"], json.loads(c["kwargs_json"]), r["completion"][0]["content"])
            for c in by_prompt[r["prompt_id"]]["constraints"]
        )
        for r in rows
    )


@pytest.mark.parametrize(
    "config,inputs,message",
    [
        ({"kinds": ["keyword"]}, [], "did you mean 'keywords'"),
        ({"languages": ["xx"]}, [], "no language that can be asked for"),
        ({"counts": [0]}, [], "counts="),
        ({"keywords": ["a", "b", "C", "d"]}, [], "small letters"),
        ({"endpoint": "http://x", "endpoint_model": "m"}, ["model"], "leave one of them out"),
        ({}, ["plain_model"], "give model=REF too"),
        ({"max_prompts": 5}, [], "max_prompts=5 would change nothing: nobody answers.*give model=REF"),
        ({"split": "validation"}, ["model"], "Write split=train"),
        ({"kinds": ["detectable_format:constrained_response"]}, [], "8 none_fits|6 none_fits"),
        ({"request_format": "text"}, [], "leave it out"),
    ],
)
def test_refused_settings(config, inputs, message, spec, prompts, tiny):
    with pytest.raises(Exception, match=message):
        go(spec, config, {"prompts": prompts, **{name: tiny["policy"] for name in inputs}})


def test_the_recipe_goes_from_constraints_to_rl(monkeypatch):
    """Each step from the model before, on its own output of constrain; one for which nothing was found is passed over;
    test prompts of their own are kept out.
    """
    from tests.flows.test_iterated import planned

    monkeypatch.setattr("flows.instruction_following.promote", lambda *args, **more: {})
    steps = planned("instruction_following", monkeypatch, data={"prompts": "(p)", "test": "(ifeval)"}, writer="(big)")
    assert steps["ingest_prompts"][1] == {"data": "(p)", "benchmarks.test": "(ifeval)"} and steps["constrain"][1] == {
        "prompts": "(ingest_prompts.data)",
        "model": "(big)",
    }
    assert [steps[name][1] for name in ("sft", "dpo", "rl")] == [
        {"model": model, "data": f"(constrain.{data})"}
        for model, data in (("(given.model)", "data"), ("(sft.model)", "pairs"), ("(dpo.model)", "prompts"))
    ]
    assert [c.kind for c in steps["rl"][2].rewards] == [c.kind for c in steps["evaluate_rl"][2].rewards] == [
        "constraints"
    ] and steps["evaluate_start"][1]["prompts"] == "(ingest_test.data)"
    few = planned(
        "instruction_following",
        monkeypatch,
        {"constrain": {"demonstrations": 3, "pairs": 0}},
        data={"prompts": "(p)"},
        steps=["sft", "dpo"],
        constrain={"endpoint": "http://x", "endpoint_model": "m"},
    )
    assert (
        "model" not in few["constrain"][1]
        and "dpo" not in few
        and "rl" not in few
        and few["evaluate_sft"][1]["prompts"] == "(constrain.prompts)"
    )
