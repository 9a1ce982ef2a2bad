"""Recipes that learn from written AI feedback: which steps they run on what, read from a plan."""

import json
from collections import Counter

import pytest

from flows.config import CONSTITUTION
from flows.recipe import load_config
from stages.harness import execute
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.chat_server import chat_server
from tests.common import assistant, ingested, silent, user
from tests.flows.test_iterated import planned


def test_constitutional_ai_goes_from_revisions_to_rl(monkeypatch):
    """Revisions and helpful demonstrations to SFT of the pretrained model, two answers of that judged under the
    constitution, soft labels to the reward model, RL.
    """
    data = {"prompts": "(red.team)", "helpful": "(help.demos)", "helpful_pairs": "(help.pairs)"}
    steps = planned(
        "constitutional", monkeypatch, data=data, pretrained="(base.model)", judge="(my.judge)", revise={"n_rounds": 2}
    )
    assert (
        steps["ingest_principles"][1]["data"] == str(CONSTITUTION)
        and steps["ingest_principles"][2].kind == "principles/1"
    )
    assert (
        steps["revise"][1]
        == {
            "model": "(given.model)",
            "prompts": "(ingest_prompts.data)",
            "principles": "(ingest_principles.data)",
        }
        and steps["revise"][2].n_rounds == 2
    )
    assert steps["revise"][2].validation_fraction == 0.05, "a section given in part keeps the recipe's settings"
    assert steps["mix"][1] == {"data.revised": "(revise.data)", "data.helpful": "(ingest_helpful.data)"}
    assert (
        steps["sft"][1] == {"model": "(base.model)", "data": "(mix.data)"}
        and steps["answers"][1]["model"] == "(sft.model)"
        and steps["answers"][2].num_generations == 2
    )
    assert (
        steps["feedback"][1]
        == {
            "data": "(answers.candidates)",
            "principles": "(ingest_principles.data)",
            "judge": "(my.judge)",
        }
        and steps["feedback"][2].labels == "soft"
    )
    reward = steps["reward_model"]
    assert (
        reward[1]
        == {
            "model": "(sft.model)",
            "data": "(feedback.data)",
            "replay.helpful": "(ingest_helpful_pairs.data)",
        }
        and reward[2].objective == "soft_label"
    )
    assert reward[2].replay_fraction == pytest.approx(135296 / (135296 + 182831), abs=1e-3)
    assert (
        steps["rl"][1]
        == {
            "model": "(sft.model)",
            "data": "(ingest_prompts.data)",
            "reward_model": "(reward_model.model)",
        }
        and steps["rl"][2].preset == "ppo"
    )
    assert [steps[f"evaluate_{name}"][1]["model"] for name in ("start", "sl", "rl")] == [
        "(given.model)",
        "(sft.model)",
        "(rl.model)",
    ]
    assert steps["win_rate"][1] == {
        **{f"answers.{name}": f"(evaluate_{name}.samples)" for name in ("start", "sl", "rl")},
        "prompts": "(ingest_prompts.data)",
        "principles": "(ingest_principles.data)",
        "judge": "(my.judge)",
    }
    least = planned(
        "constitutional",
        monkeypatch,
        data={"prompts": "(p)", "principles": "(mine)"},
        feedback={"endpoint": "http://x", "endpoint_model": "m"},
        reviser="(big)",
    )
    assert "judge" not in least["win_rate"][1] and least["win_rate"][2].endpoint_model == "m", (
        "the server that judges answers judges models, too"
    )
    assert (
        "mix" not in least
        and least["sft"][1] == {"model": "(given.model)", "data": "(revise.data)"}
        and not any(n.startswith("replay") for n in least["reward_model"][1])
    )
    assert (
        least["ingest_principles"][1]["data"] == "(mine)"
        and "judge" not in least["feedback"][1]
        and least["revise"][1]["reviser"] == "(big)"
    )
    alone = planned("constitutional", monkeypatch, data={"prompts": "(p)", "rl_prompts": "(more)"})
    assert alone["feedback"][1]["judge"] == "(given.model)" and alone["rl"][1]["data"] == "(ingest_rl_prompts.data)"


def test_our_constitution_is_sixteen_principles():
    from stages.reward.principles import read_principles

    rows = read_principles(str(CONSTITUTION))
    assert (
        len(rows) == 16
        and {r["kind"] for r in rows} == {"principle"}
        and all(r["active"] and r["axis"] and r["text"] for r in rows)
    )


@pytest.mark.parametrize(
    "values,won,method,why",
    [
        ({}, None, "apo_zero", "nobody compared"),
        ({"judge": "(j)"}, 0.3, "apo_zero", "whose revision won"),
        ({"judge": "(j)", "keep": "all"}, 0.7, "apo_zero", "more often than they lose"),
        ({"judge": "(j)", "keep": "all"}, 0.3, "apo_down", "own answers win"),
        ({"judge": "(j)", "keep": "all"}, 0.5, "apo_down", "as often as"),
        ({"judge": "(j)", "keep": "all", "method": "dpo"}, 0.3, "dpo", "given"),
    ],
)
def test_clair_takes_the_loss_that_fits(values, won, method, why, monkeypatch):
    from flows.recipe import get_recipe

    found = {}
    flow = get_recipe("clair").method
    monkeypatch.setattr(get_recipe("clair"), "method", lambda run, config: found.update(flow(run, config)))
    metrics = {"judge": {"agreement_no_ties": won}} if won is not None else {}
    steps = planned(
        "clair",
        monkeypatch,
        metrics,
        data={"prompts": "(p)"},
        align={"learning_rate": 1e-6},
        arms={"kto": {"method": "kto"}, "strong": {"beta": 0.5}},
        **values,
    )
    assert (
        steps["revise"][2].template == "minimal"
        and steps["revise"][2].n_rounds == 1
        and steps["revise"][2].direct_revision
        and "principles" not in steps["revise"][1]
    )
    assert (
        found["choice"] == {"method": method, "won": won, "why": found["choice"]["why"]}
        and why in found["choice"]["why"]
    )
    assert [steps[f"align{arm}"][2].method for arm in ("", "_kto", "_strong")] == [method, "kto", method] and steps[
        "align_strong"
    ][2].beta == 0.5
    assert steps["align"][1] == {
        "model": "(given.model)",
        "data": "(check.data)" if values.get("keep", "won") == "won" and values else "(revise.pairs)",
    }
    assert ("check" in steps) == ("win_rate" in steps) == bool(values) and (
        not values
        or steps["check"][1] == {"data": "(revise.pairs)", "judge": "(j)"}
        and steps["check"][2].disagreement == "drop"
    )


def test_clair_beside_judged_pairs(monkeypatch):
    steps = planned(
        "clair",
        monkeypatch,
        data={"prompts": "(p)"},
        baseline=True,
        check={"endpoint": "http://x", "endpoint_model": "m", "mode": "verdict"},
        reviser="(big)",
    )
    assert steps["judged"][1] == {"data": "(answers.candidates)"} and (
        steps["judged"][2].endpoint_model,
        steps["judged"][2].labels,
    ) == ("m", "hard")
    assert steps["revise"][1] == {
        "model": "(given.model)",
        "prompts": "(ingest_prompts.data)",
        "reviser": "(big)",
        "compare.judged": "(judged.data)",
    }
    assert steps["win_rate"][2].endpoint == "http://x" and set(steps["win_rate"][1]) == {
        "answers.start",
        "answers.clair",
        "answers.judged",
        "prompts",
    }
    assert steps["align_judged"][1]["data"] == "(judged.data)" and steps["align"][1]["data"] == "(check.data)"
    for values, message in (
        ({"baseline": True}, "write judge=MODEL"),
        ({"align": {"method": "ipo"}}, "is not read"),
        ({"arms": {"clair": {}}}, "another one"),
        ({"arms": {"x": {"methud": "dpo"}}}, "method"),
    ):
        with pytest.raises(Exception, match=message):
            load_config("clair", {"model": "m", "data": {"prompts": "p"}, **values})


def test_character_training_samples_behind_traits_and_trains_without(monkeypatch):
    steps = planned(
        "character",
        monkeypatch,
        data={"traits": "(my.traits)", "prompts": "(tasks)", "pool": "(people)"},
        judge="(my.judge)",
        answers={"num_generations": 3},
    )
    assert (
        steps["write_prompts"][1]
        == {
            "model": "(given.model)",
            "principles": "(ingest_traits.data)",
            "pool": "(ingest_pool.data)",
        }
        and steps["write_prompts"][2].test_fraction == 0.2
    )
    assert steps["answers"][1] == {
        "model": "(given.model)",
        "prompts": "(write_prompts.prompts)",
        "traits": "(ingest_traits.data)",
    }
    assert steps["rank"][1] == {
        "data": "(answers.candidates)",
        "principles": "(ingest_traits.data)",
        "judge": "(my.judge)",
    }
    assert (steps["rank"][2].principle_of, steps["rank"][2].pairs_per_prompt, steps["rank"][2].labels) == (
        "row",
        3,
        "hard",
    )
    assert steps["align"][1] == {"model": "(given.model)", "data": "(rank.data)"}
    assert {name: steps[f"evaluate_{name}"][1]["prompts"] for name in ("start", "character")} == dict.fromkeys(
        ("start", "character"), "(write_prompts.prompts)"
    )
    win_rate = steps["win_rate"]
    assert win_rate[1] == {
        "answers.start": "(evaluate_start.samples)",
        "answers.character": "(evaluate_character.samples)",
        "prompts": "(write_prompts.prompts)",
        "principles": "(ingest_traits.data)",
        "judge": "(my.judge)",
    } and (win_rate[2].baseline, win_rate[2].principle_of) == ("start", "row")
    assert (
        steps["evaluate_ability_character"][1]["prompts"] == "(ingest_prompts.data)"
        and steps["evaluate_ability_character"][1]["model"] == "(align.model)"
    )
    endpoints = {section: {"endpoint": "http://x", "endpoint_model": "m"} for section in ("write", "rank")}
    steps = planned(
        "character",
        monkeypatch,
        data={"traits": "(t)"},
        **{**endpoints, "rank": {**endpoints["rank"], "pairs_per_prompt": 2}},
    )
    assert (
        not any("judge" in steps[name][1] for name in ("rank", "win_rate"))
        and "model" not in steps["write_prompts"][1]
        and steps["rank"][2].pairs_per_prompt == 2
    )
    assert not any(name.startswith("evaluate_ability") for name in steps)


def test_win_rates_of_traits_are_rows_of_their_own():
    from flows.steps import win_rates

    rates = {"win_rate": 0.6, "win_rate_low": 0.5, "win_rate_high": 0.7}
    rows = win_rates(
        {f"c/{part}{name}": value for part in ("", "trait/frank/") for name, value in rates.items()}, ["c"], "start"
    )
    assert rows == [
        {"model": "c", "against": "start", **trait, "win rate": 0.6, "win rate 95%": "[0.500, 0.700]"}
        for trait in ({}, {"trait": "frank"})
    ]


# -- what the recipes ask of the stage judge ---------------------------------------------------------------------------


def by_word(body):
    """A judge that prefers the answer with more of the trait's word, without a trait the longer one."""
    text = body["messages"][0]["content"]
    a, b = (text.split(f"[Answer {x}]\n")[1].split(f"\n[End of answer {x}]")[0] for x in "AB")
    word = text.split("author: ")[1].split("\n")[0] if "author: " in text else None
    left, right = (a.count(word), b.count(word)) if word else (len(a), len(b))
    return {
        "message": {"content": f"[[{'A' if left > right else 'B' if left < right else 'C'}]]"},
        "finish_reason": "stop",
    }


def principles_of(tmp_path, name, principles):
    file = tmp_path / f"{name}.yaml"
    file.write_text(json.dumps(principles))
    return ingested(file, "principles/1", tmp_path / f"{name}-principles")


def judged(tmp_path, name, config, rows, kind, principles=None):
    """(rows, summary, requests) of the stage judge."""
    write_dataset(str(tmp_path / f"{name}-rows"), name, kind, rows)
    inputs = {"data": str(tmp_path / f"{name}-rows")}
    if principles is not None:
        inputs["principles"] = principles_of(tmp_path, name, principles)
    with chat_server(by_word) as server:
        result = execute(
            {
                "stage": "judge",
                "key": name,
                "config": {"mode": "verdict", "endpoint": server.url, "endpoint_model": "m", **config},
                "seed": 0,
                "device": "cpu",
                "inputs": inputs,
                "workdir": str(tmp_path / name),
            },
            silent,
        )
        return (
            list(open_dataset(result["outputs"]["data"]["path"]).iter_rows()),
            result["summary"],
            [b["messages"][0]["content"] for b in server.seen],
        )


def test_pairs_that_the_judge_contradicts_can_be_left_out(tmp_path):
    rows = [
        complete_row(
            "pairs/1",
            {
                "prompt": user(f"q{i}"),
                "chosen": assistant(a),
                "rejected": assistant(b),
                "stage_index": i,
                "constraint_ids": [f"c{i}"],
                "pairs_in_group": 2,
                "weight": 0.5,
            },
            dataset="p",
            source="s",
            origin="revision",
        )
        for i, (a, b) in enumerate((("long answer", "short"), ("short", "long answer"), ("same!", "equal")))
    ]
    kept, summary, _ = judged(tmp_path, "check", {"labels": "hard", "disagreement": "drop"}, rows, "pairs/1")
    assert (
        [r["chosen"][0]["content"] for r in kept] == ["long answer"]
        and summary["without_label/disagrees with the given label"] == 1
        and summary["agreement_no_ties"] == 0.5
    )
    turned, _, _ = judged(tmp_path, "relabel", {"labels": "hard"}, rows, "pairs/1")
    assert [r["chosen"][0]["content"] for r in turned] == ["long answer"] * 2
    assert [(r["stage_index"], r["constraint_ids"], r["pairs_in_group"], r["weight"]) for r in turned] == [
        (i, [f"c{i}"], 2, 0.5) for i in range(2)
    ], "pairs that came as such keep what they are"
    with pytest.raises(Exception, match="write fallback=drop"):
        judged(tmp_path, "both", {"disagreement": "drop", "fallback": "given"}, rows, "pairs/1")


def test_answers_are_ranked_by_the_trait_that_they_were_sampled_for(tmp_path):
    traits = [{"id": "x", "kind": "trait", "text": "XX"}, {"id": "y", "kind": "trait", "text": "YY"}]
    rows = [
        complete_row(
            "candidates/1",
            {
                "prompt": user(f"q{i}"),
                "prompt_idx": i,
                "completion_idx": k,
                "completion": assistant(text),
                "scores": [],
                "kept": True,
                "weight": 2.0,
                "extra_json": json.dumps({"trait": trait}),
            },
            dataset="c",
            source="s",
            origin="ai",
        )
        for i, trait in enumerate(("x", "y"))
        for k, text in enumerate(("XX XX", "YY", "XX", "neither"))
    ]
    pairs, _, asked = judged(
        tmp_path, "traits", {"principle_of": "row", "pairs_per_prompt": 6}, rows, "candidates/1", traits
    )
    assert len(pairs) == 5 + 3, "no pair of two answers that show the trait equally"
    sizes = Counter(row["prompt_id"] for row in pairs)
    assert all(
        (row["pairs_in_group"], row["weight"]) == (sizes[row["prompt_id"]], 2.0 / sizes[row["prompt_id"]])
        for row in pairs
    ), "the pairs that are left of a prompt weigh as much as its answers"
    for row in pairs:
        word = {"q0": "XX", "q1": "YY"}[row["prompt"][0]["content"]]
        assert row["chosen"][0]["content"].count(word) > row["rejected"][0]["content"].count(word) and row["ann"][
            "principle_ids"
        ] == [word[0].lower()]
    assert len(asked) == 24 and all(
        (f"author: {word}" in text) == (f"[Question]\n{name}\n" in text)
        for text in asked
        for name, word in (("q0", "XX"), ("q1", "YY"))
    )
    mixed = [one | {"extra_json": row["extra_json"]} for row, one in zip(rows, rows[:4] * 2)]
    settings = {"principle_of": "row", "pairs_per_prompt": 20}
    both, _, _ = judged(tmp_path, "mixed", settings, mixed, "candidates/1", traits)
    assert len(both) == 5 + 3, "answers that were sampled for two traits are not compared by one of them"
    with pytest.raises(Exception, match="'y', which is none of the principles"):
        judged(tmp_path, "lost", {"principle_of": "row"}, rows, "candidates/1", traits[:1])
    with pytest.raises(Exception, match="give --input principles"):
        judged(tmp_path, "none", {"principle_of": "row"}, rows, "candidates/1")


def test_models_are_compared_by_the_trait_of_each_prompt(tmp_path):
    """The win rate of each trait: the new model shows x better and y worse than the old one (eval.personality)."""
    prompts = [
        complete_row(
            "prompts/1", {"prompt": user(f"q{i}"), "category": "xy"[i % 2]}, dataset="p", source="s", origin="ai"
        )
        for i in range(6)
    ]
    write_dataset(str(tmp_path / "prompts"), "prompts", "prompts/1", prompts)
    inputs = {
        "prompts": str(tmp_path / "prompts"),
        "principles": principles_of(
            tmp_path, "traits", [{"id": "x", "kind": "trait", "text": "XX"}, {"id": "y", "kind": "trait", "text": "YY"}]
        ),
    }
    for model, text in (("new", "XX XX"), ("old", "YY")):
        rows = [
            complete_row(
                "candidates/1",
                {
                    "prompt": p["prompt"],
                    "prompt_idx": i,
                    "completion_idx": 0,
                    "completion": assistant(f"{text} {i}"),
                    "scores": [],
                    "kept": True,
                },
                dataset="c",
                source="s",
                origin="ai",
            )
            for i, p in enumerate(prompts)
        ]
        write_dataset(str(tmp_path / model), model, "candidates/1", rows)
        inputs[f"answers.{model}"] = str(tmp_path / model)
    with chat_server(by_word) as server:
        result = execute(
            {
                "stage": "win_rate",
                "key": "w",
                "seed": 0,
                "device": "cpu",
                "inputs": inputs,
                "workdir": str(tmp_path / "work"),
                "config": {
                    "mode": "verdict",
                    "endpoint": server.url,
                    "endpoint_model": "m",
                    "baseline": "old",
                    "principle_of": "row",
                },
            },
            silent,
        )["summary"]
    assert (
        result["new/trait/x/win_rate"],
        result["new/trait/y/win_rate"],
        result["new/win_rate"],
        result["new/trait/x/items"],
    ) == (1.0, 0.0, 0.5, 3)
