"""Stage revise: chains of critique and revision by a scripted server and by tiny models, what is dropped, what is
trained on, kills.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from stages.harness import execute
from stages.revise import CRITIQUE_REQUEST, IMPROVE, Config, declines
from storage.datasets import open_dataset, write_dataset
from storage.files import tree_digest
from storage.schema import complete_row
from tests.chat_server import chat_server
from tests.common import BESIDE, assistant, beside, ingested, silent, user

PRINCIPLES = "# what an assistant owes\nDo no harm.\n\nSay what is uncertain.\nBe brief.\n"


def rows_of(result, name):
    return list(open_dataset(result["outputs"][name]["path"]).iter_rows())


@pytest.fixture(scope="session")
def roomy(tiny, tmp_path_factory):
    """The tiny policy with positions for whole requests, and the id that ends its turns."""
    from transformers import AutoModelForCausalLM

    from stages.chat import load_tokenizer
    from stages.models.modeling import save_policy

    path = str(tmp_path_factory.mktemp("roomy"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny["policy"]), load_tokenizer(tiny["policy"])
    model.config.max_position_embeddings = 2048
    save_policy(model, tokenizer, path)
    return path, tokenizer.eos_token_id


@pytest.fixture(scope="session")
def constitution(tmp_path_factory):
    """Three principles as a dataset, ingested from a text file."""
    root = tmp_path_factory.mktemp("principles")
    (root / "constitution.txt").write_text(PRINCIPLES)
    return ingested(root / "constitution.txt", "principles/1", root / "work")


@pytest.fixture()
def answers(tmp_path):
    """First answers, one of them in a conversation, one in another split, as demonstrations."""

    def make(texts):
        rows = [
            complete_row(
                "demonstrations/1",
                {
                    "messages": (
                        (user("hello") + assistant("hi") if i == 1 else []) + user(f"question {i}?") + assistant(text)
                    ),
                    "kept": True,
                    "train_turns": [3 if i == 1 else 1],
                    "group_id": f"group-{i}",
                },
                dataset="first",
                source="made",
                origin="human",
                split="test" if text == "held out" else "train",
            )
            for i, text in enumerate(texts)
        ]
        write_dataset(str(tmp_path / "answers"), "answers", "demonstrations/1", rows)
        return str(tmp_path / "answers")

    return make


def shown(body):
    """(answer, critique, whole request) that a request shows the reviser."""
    text = body["messages"][0]["content"]
    parts = [
        text.split(f"[{name}]\n")[1].split(f"\n[End of {name.lower()}]")[0] if f"[{name}]\n" in text else None
        for name in ("Answer", "Critique")
    ]
    return *parts, text


def said(text, reason="stop"):
    return {"message": {"content": text}, "finish_reason": reason}


def by_script(script):
    """A reviser that criticises with a mark, and revises what it is shown as ``script(answer)`` says: a text or (text,
    finish reason).
    """

    def choice(body):
        answer, _, text = shown(body)
        if text.endswith("Critique:"):
            return said(f"CRITIQUE of {answer}")
        made = script(answer)
        return said(*made) if isinstance(made, tuple) else said(made)

    return choice


def go(spec, config, inputs, name="revise", **more):
    return execute(spec("revise", {"block": 2, **config}, inputs, name, **more), silent)


def test_chains_are_critiqued_and_revised_under_drawn_principles(spec, constitution, answers):
    """Every round criticises and rewrites the text of the round before; the critique reaches neither demonstration nor
    pair; rows keep their identity.
    """
    data = answers(["first", "second", "held out", "fourth"])
    with chat_server(by_script(lambda answer: answer + "+")) as server:
        result = go(
            spec,
            {"endpoint": server.url, "endpoint_model": "big", "n_rounds": 3},
            {"data": data, "principles": constitution},
        )
        requests = [shown(body) for body in server.seen]
    chains, demonstrations, pairs = (rows_of(result, name) for name in ("revisions", "data", "pairs"))
    assert len(chains) == 9 and [(r["original"], r["revision"], r["round"]) for r in chains[:3]] == [
        ("first", "first+", 1),
        ("first+", "first++", 2),
        ("first++", "first+++", 3),
    ]
    assert all(r["critique"] == f"CRITIQUE of {r['original']}" for r in chains)
    texts = {r["principle_id"]: r["text"] for r in open_dataset(constitution).iter_rows()}
    for row in chains:
        asked = [
            text
            for answer, critique, text in requests
            if answer == row["original"]
            and (critique == row["critique"]) == (critique is not None)
            and texts[row["principle_id"]] in text
        ]
        assert len(asked) == 2, "the critique and the revision of a round were asked for under its principle"
    assert [r["messages"][-1]["content"] for r in demonstrations] == [
        "first+++",
        "second+++",
        "fourth+++",
    ] and "CRITIQUE" not in json.dumps([demonstrations, pairs], default=str)
    assert (
        demonstrations[1]["messages"][:3] == pairs[1]["prompt"]
        and pairs[1]["prompt"][0]["content"] == "hello"
        and demonstrations[1]["train_turns"] == [3]
    )
    assert "Human: hello\n\nAssistant: hi\n\nHuman: question 1?" in next(
        text for answer, _, text in requests if answer == "second"
    )
    assert [
        (r["chosen"][0]["content"], r["rejected"][0]["content"], r["group_id"], r["split"], r["origin"]) for r in pairs
    ][0] == ("first+++", "first", "group-0", "train", "revision")
    assert (
        pairs[0]["ann"]["principle_ids"] == [r["principle_id"] for r in chains[:3]]
        and pairs[0]["ann"]["annotator_id"] == pairs[0]["chosen_gen"]["model_id"] == "big"
    )
    assert {r["schema"] for r in pairs + demonstrations} == {"pairs/1", "demonstrations/1"} and result["summary"][
        "kept"
    ] == 3
    assert result["summary"]["length/revised"] - result["summary"]["length/original"] == pytest.approx(3)


def test_a_principle_is_drawn_by_row_and_round_only(spec, constitution, answers):
    """Uniformly with replacement; the other rows, the blocks and the other settings have no say."""
    draws = {}
    for name, texts, config in (
        ("all", [f"text {i}" for i in range(40)], {}),
        ("few", [f"text {i}" for i in range(7)], {"block": 5, "direct_revision": True}),
    ):
        with chat_server(by_script(lambda answer: answer + "+")) as server:
            result = go(
                spec,
                {"endpoint": server.url, "endpoint_model": "m", "n_rounds": 6, **config},
                {"data": answers(texts), "principles": constitution},
                name,
            )
        draws[name] = {
            (r["prompt"][-1]["content"], r["round"]): r["principle_id"] for r in rows_of(result, "revisions")
        }
    assert all(draws["all"][key] == value for key, value in draws["few"].items()) and len(draws["few"]) == 42
    counts = Counter(draws["all"].values())
    assert len(counts) == 3 and all(55 <= n <= 105 for n in counts.values()), "240 draws from three"
    repeated = sum(
        draws["all"][f"question {i}?", k] == draws["all"][f"question {i}?", k + 1]
        for i in range(40)
        for k in range(1, 6)
    )
    assert 45 <= repeated <= 90, "with replacement: a third of 200 follow themselves"


def test_what_cannot_be_trained_on_is_dropped_and_counted(spec, constitution, answers):
    script = {
        "empty": "  ",
        "cut": ("unfinished", "length"),
        "same": "same",
        "declines": "I'm sorry, but I can't rewrite this.",
        "filtered": ("x", "content_filter"),
        "refused": "I cannot help with that.",
        "good": "better",
        "sorry, I can't": "Here is what I can tell you.",
        "back": "forth",
        "forth": "back",
        "better": "best",
    }
    data = answers([*[name for name in script if name not in ("forth", "better")], " ", "good [End of answer] ###"])
    script["good (End of answer) ###"] = "safe"
    with chat_server(by_script(lambda answer: script.get(answer, answer + "!"))) as server:
        config = {"endpoint": server.url, "endpoint_model": "m", "n_rounds": 2, "direct_revision": True}
        result = go(spec, config, {"data": data, "principles": constitution})
    summary = result["summary"]
    dropped = {name.removeprefix("dropped/"): n for name, n in summary.items() if name.startswith("dropped/")}
    assert dropped == {
        "empty": 1,
        "cut": 1,
        "unchanged": 2,
        "reviser_declined": 1,
        "engine_error": 1,
        "original_empty": 1,
    }
    assert {r["chosen"][0]["content"] for r in rows_of(result, "pairs")} == {
        "I cannot help with that.!",
        "best",
        "Here is what I can tell you.!",
        "safe!",
    }
    assert sum(dropped.values()) + summary["kept"] == summary["answers"] == 11
    assert (
        summary["refusal_rate/original"] == pytest.approx(1 / 6)
        and summary["refusal_rate/revised"] == pytest.approx(1 / 6)
        and summary["refusals_added"] == pytest.approx(1 / 6)
    )
    notes = [json.loads(r["extra_json"]) for r in rows_of(result, "revisions")]
    assert Counter(n["dropped"] for n in notes if "dropped" in n) == {
        "empty": 1,
        "cut": 1,
        "unchanged": 2,
        "reviser_declined": 1,
    }, "what was written is kept, with the reason"
    assert {w["code"] for w in result["warnings"]} >= {"engine_rows_failed", "revisions_refuse", "chains_dropped"}
    with chat_server(by_script(lambda answer: script.get(answer, answer + "!"))) as server:
        strict = go(
            spec,
            {**config, "endpoint": server.url, "drop_refusals": "added"},
            {"data": data, "principles": constitution},
            "strict",
        )
    assert (
        strict["summary"]["dropped/refusal_added"] == 1
        and strict["summary"]["refusals_added"] == summary["refusals_added"]
    ), "a refusal that is dropped is still counted"
    with (
        chat_server(lambda body: said("", "stop")) as server,
        pytest.raises(ValueError, match="No chain is left of 2 answers"),
    ):
        go(spec, {**config, "endpoint": server.url}, {"data": answers(["a", "b"]), "principles": constitution}, "none")


def test_rows_keep_their_weight_and_what_is_thought_before_a_text_is_in_none(spec, constitution, answers, tmp_path):
    """A reviser that reasons speaks of its task; rows that a filter took out of training are not revised back into
    it."""
    rows = [
        row | {"weight": weight, "kept": kept, **BESIDE}
        for row, weight, kept in zip(
            open_dataset(answers(["<think>THOUGHT of its own</think>\n\none", "two", "three"])).iter_rows(),
            (3.0, 0.0, 1.0),
            (True, True, False),
        )
    ]
    write_dataset(str(tmp_path / "weighed"), "weighed", "demonstrations/1", rows)

    def choice(body):
        answer, critique, text = shown(body)
        assert "THOUGHT" not in text
        thought = "<think>THOUGHT: I'm sorry, but I can't rewrite this yet. Let me see.</think>\n\n"
        return said(thought + (f"CRITIQUE of {answer}" if text.endswith("Critique:") else answer + "+"))

    with chat_server(choice) as server:
        config = {"endpoint": server.url, "endpoint_model": "m", "n_rounds": 2}
        result = go(spec, config, {"data": str(tmp_path / "weighed"), "principles": constitution})
    assert [(r["original"], r["critique"], r["revision"], r["weight"]) for r in rows_of(result, "revisions")] == [
        ("one", "CRITIQUE of one", "one+", 3.0),
        ("one+", "CRITIQUE of one+", "one++", 3.0),
        ("two", "CRITIQUE of two", "two+", 0.0),
        ("two+", "CRITIQUE of two+", "two++", 0.0),
    ]
    for name, texts in (("data", "messages"), ("pairs", "chosen")):
        assert [(r[texts][-1]["content"], r["weight"]) for r in rows_of(result, name)] == [
            ("one++", 3.0),
            ("two++", 0.0),
        ]
    for name in ("revisions", "data", "pairs"):
        assert all(one == BESIDE for one in beside(rows_of(result, name)))
    assert [r["rejected"][-1]["content"] for r in rows_of(result, "pairs")] == ["one", "two"], "on neither side"
    assert result["summary"]["dropped/original_not_kept"] == result["summary"]["thoughts_left_out"] == 1
    assert "thoughts_left_out" in {warning["code"] for warning in result["warnings"]}

    with (
        chat_server(lambda body: said("<think>No answer follows", "length")) as server,
        pytest.raises(ValueError, match="1 original_not_kept, 2 critique_empty|2 critique_empty, 1 original_not_kept"),
    ):
        go(
            spec,
            {**config, "endpoint": server.url},
            {"data": str(tmp_path / "weighed"), "principles": constitution},
            "cut",
        )


def test_declining_to_revise_is_not_an_answer_that_refuses():
    assert declines("I\u2019m sorry, but I cannot revise this answer.") and declines("I can't critique that.")
    assert (
        not declines("I can't help you break into a house.")
        and not declines("Sure, here is the edited text.")
        and not declines("x" * 300 + "I cannot edit this")
    )


def test_the_least_change_needs_no_principles(spec, answers):
    """CLAIR: one round, no critique, pairs that differ little; contrastiveness is reported beside that of other
    pairs.
    """
    others = [
        complete_row(
            "pairs/1",
            {
                "prompt": user("q"),
                "chosen": assistant("entirely different"),
                "rejected": assistant("nothing alike here"),
            },
            dataset="o",
            source="o",
            origin="ai",
        )
    ]
    texts = ["The capital of France is Lyon, of course.", "Two and two are five."]
    path = str(Path(answers(texts)).parent / "others")
    write_dataset(path, "others", "pairs/1", others)
    with chat_server(by_script(lambda answer: answer.replace("Lyon", "Paris").replace("five", "four"))) as server:
        config = {
            "endpoint": server.url,
            "endpoint_model": "m",
            "n_rounds": 1,
            "direct_revision": True,
            "template": "minimal",
        }
        result = go(spec, config, {"data": answers(texts), "compare.judged": path})
        assert all(
            "Change as little as possible" in shown(b)[2]
            and IMPROVE["revision_request"] in shown(b)[2]
            and "of the critique" not in shown(b)[2]
            for b in server.seen
        )
        assert len(server.seen) == 2
    assert [r["chosen"][0]["content"] for r in rows_of(result, "pairs")] == [
        "The capital of France is Paris, of course.",
        "Two and two are four.",
    ]
    summary = result["summary"]
    assert (
        summary["jaccard"] == pytest.approx((6 / 8 + 4 / 6) / 2)
        and summary["jaccard/judged"] == 0
        and summary["levenshtein_normalised"] < 0.2 < summary["levenshtein_normalised/judged"]
    )
    assert {r["principle_id"] for r in rows_of(result, "revisions")} == {"improve"}


def test_all_revisions_and_a_pattern(spec, constitution, answers):
    """y_1..y_n as demonstrations, repeated texts once; the pattern finds the revision in what surrounds it, and where
    it does not the chain is dropped.
    """
    steps = {"a": "Sure! <r>b</r>", "b": "<r>b</r>", "x": "no marks"}
    with chat_server(by_script(lambda answer: steps[answer])) as server:
        config = {
            "endpoint": server.url,
            "endpoint_model": "m",
            "n_rounds": 3,
            "all_revisions": True,
            "revision_pattern": "(?s)<r>(.*)</r>",
        }
        result = go(spec, config, {"data": answers(["a", "x"]), "principles": constitution})
    assert [r["messages"][-1]["content"] for r in rows_of(result, "data")] == ["b"] and result["summary"][
        "dropped/unreadable"
    ] == 1
    with chat_server(by_script(lambda answer: answer + "+")) as server:
        every = go(
            spec,
            {**config, "endpoint": server.url, "revision_pattern": ""},
            {"data": answers(["a"]), "principles": constitution},
            "every",
        )
    assert [(r["messages"][-1]["content"], json.loads(r["extra_json"])["round"]) for r in rows_of(every, "data")] == [
        ("a+", 1),
        ("a++", 2),
        ("a+++", 3),
    ]
    assert [len(json.loads(r["extra_json"])["principle_ids"]) for r in rows_of(every, "data")] == [1, 2, 3] and len(
        rows_of(every, "pairs")
    ) == 1


NONSENSE = {"n_rounds": 2, "max_completion_length": 24, "max_critique_length": 12, "block": 4}


def test_a_model_that_writes_nonsense_revises_itself(roomy, tiny, spec, constitution, data):
    """A tiny policy answers, criticises and revises: rows do not depend on the blocks, sum up, and train the next
    stages.
    """
    path, end = roomy
    config = {**NONSENSE, "logit_bias": {end: 4}, "validation_fraction": 0.2}
    inputs = {"model": path, "prompts": data["prompts"], "principles": constitution}
    result = go(spec, config, inputs)
    revisions, pairs, summary = rows_of(result, "revisions"), rows_of(result, "pairs"), result["summary"]
    assert summary["answers"] == 42 and 5 < summary["kept"] == len(pairs) == len(rows_of(result, "data")) < 42
    assert (
        sum(n for name, n in summary.items() if name.startswith("dropped/")) + summary["kept"] == 42
        and summary["critiques_cut"] > 0
    )
    assert {r["split"] for r in pairs} == {"train", "validation"} and all(
        r["rejected_gen"]["rng_seed"] != r["chosen_gen"]["rng_seed"] for r in pairs
    )
    assert {r["prompt_id"] for r in pairs} <= {
        r["prompt_id"] for r in open_dataset(data["prompts"]).iter_rows(split="train")
    }
    other = go(spec, {**config, "block": 16}, inputs, "other-blocks")
    assert [r["row_id"] for r in rows_of(other, "revisions")] == [r["row_id"] for r in revisions] and other[
        "summary"
    ] == summary
    text = go(spec, {**config, "request_format": "text"}, inputs, "text")
    assert [r["original"] for r in rows_of(text, "revisions") if r["round"] == 1] and rows_of(text, "revisions")[0][
        "revision"
    ] != revisions[0]["revision"]
    tuned = execute(
        spec(
            "sft",
            {"learning_rate": 1e-3, "max_steps": 2, "batch_size": 4, "max_length": 128},
            {"model": path, "data": result["outputs"]["data"]["path"]},
            "sft",
        ),
        silent,
    )
    execute(
        spec(
            "align",
            {"method": "apo_zero", "learning_rate": 1e-3, "max_steps": 2, "batch_size": 4, "max_length": 128},
            {"model": tuned["outputs"]["model"]["path"], "data": result["outputs"]["pairs"]["path"]},
            "align",
        ),
        silent,
    )


def test_candidates_another_reviser_and_requests_that_do_not_fit(roomy, tiny, spec, constitution, tmp_path):
    """Kept candidates are revised, each by itself; a reviser without positions for a request is not asked, which is
    counted.
    """
    path, end = roomy
    rows = [
        complete_row(
            "candidates/1",
            {
                "prompt": user(f"q{i % 2}"),
                "prompt_idx": i % 2,
                "completion_idx": i,
                "completion": (
                    assistant(f"answer {i}")
                    if i < 6
                    else [{"role": "assistant", "content": None, "function_calls": "look(x='a')"}]
                ),
                "scores": [],
                "kept": i not in (3, 4),
                "drop_reason": {3: "truncated", 4: "unscorable"}.get(i),
                "gen": {"model_id": "someone"},
                "extra_json": json.dumps({"category": "letters"}),
            },
            dataset="c",
            source="s",
            origin="ai",
        )
        for i in range(7)
    ]
    write_dataset(str(tmp_path / "candidates"), "candidates", "candidates/1", rows)
    config = {**NONSENSE, "direct_revision": True, "logit_bias": {end: 6}, "n_rounds": 1}
    del config["max_critique_length"]
    result = go(spec, config, {"reviser": path, "data": str(tmp_path / "candidates"), "principles": constitution})
    assert result["summary"]["answers"] == 7 and result["summary"]["dropped/original_cut"] == 1
    assert result["summary"]["dropped/original_empty"] == 1, "a call of a tool has no text"
    assert "dropped/original_not_kept" not in result["summary"]
    assert {r["category"] for r in rows_of(result, "data")} == {"letters"}, "a mixture by category reads it"
    pairs = rows_of(result, "pairs")
    assert pairs and all(
        r["rejected_gen"]["model_id"] == "someone" and r["chosen_gen"]["model_id"] == "reviser" for r in pairs
    )
    with pytest.raises(ValueError, match="5 request_too_long.*max_request_length"):
        go(
            spec,
            config,
            {"reviser": tiny["other"], "data": str(tmp_path / "candidates"), "principles": constitution},
            "small",
        )


def test_kill9_equals_uninterrupted(roomy, spec, constitution, data, forks):
    path, end = roomy
    config, inputs = (
        {**NONSENSE, "logit_bias": {end: 4}, "block": 2},
        {
            "model": path,
            "prompts": data["prompts"],
            "principles": constitution,
        },
    )
    whole, killed = spec("revise", config, inputs, "whole"), spec("revise", config, inputs, "killed")
    forks.run(spec.path("whole"))
    for step in (3, 8):
        forks.start(spec.path("killed")).kill_when(
            lambda: any(Path(killed["workdir"], "checkpoints").glob(f"step-*{step:02d}"))
        )
    assert not Path(killed["workdir"], "result.json").exists()
    forks.run(spec.path("killed"))
    results = [json.loads(Path(one["workdir"], "result.json").read_text()) for one in (whole, killed)]
    assert results[1]["resumed_from"] and results[0]["summary"] == results[1]["summary"]
    for part in ("out/revisions", "out/data", "out/pairs", "reports"):
        assert tree_digest(Path(whole["workdir"], part)) == tree_digest(Path(killed["workdir"], part)), part


def test_worked_examples_stand_in_front_of_plain_text():
    """For base models: the request continues examples of the same form, each closed by the mark that also ends the
    model's text.
    """
    from stages.decoding.writers import STOP
    from stages.revise import EXAMPLES, Chain, critique_request, revision_request

    chain, principle = (
        Chain({}, user("why?"), ["because [Critique] ###"]),
        {
            **IMPROVE,
            "critique_request": "",
            "kind": "trait",
        },
    )
    config = Config(request_format="text")
    critique, revision = critique_request(config, chain, principle), revision_request(config, chain, principle, "weak")
    assert (
        critique.count(STOP) == revision.count(STOP) == len(EXAMPLES)
        and critique.endswith("Critique:")
        and revision.endswith("Revised answer:")
    )
    assert all(
        f"Critique: {e['critique']}{STOP}" in critique
        and f"Revised answer: {e['revision']}{STOP}" in revision
        and e["critique"] in revision
        for e in EXAMPLES
    )
    assert CRITIQUE_REQUEST["trait"].format(text=IMPROVE["text"]) in critique and "because (Critique) ###" in critique
    assert "[Critique]" not in revision_request(
        Config(request_format="text", direct_revision=True), chain, principle, ""
    )
    own = [{**EXAMPLES[0], "revision": "MINE"}]
    assert revision_request(Config(examples=own), chain, principle, "weak").startswith(
        revision_request(
            Config(),
            Chain({}, user(own[0]["question"]), [own[0]["answer"]]),
            {**IMPROVE, "revision_request": own[0]["revision_request"]},
            own[0]["critique"],
        )
        + " MINE"
        + STOP
    )


@pytest.mark.parametrize(
    "config,inputs,message",
    [
        ({}, {"prompts": "p"}, "give model=REF, which writes them"),
        ({}, {"model": "m"}, "either prompts=REF with model=REF"),
        ({}, {"model": "m", "prompts": "p"}, "Give principles=FILE"),
        (
            {"template": "minimal", "endpoint": "http://x/v1", "endpoint_model": "m"},
            {"model": "m", "data": "d"},
            "the model would not be read: data has the first answers, and endpoint revises them; leave model out",
        ),
        (
            {"template": "minimal"},
            {"model": "m", "data": "d", "reviser": "m"},
            "and reviser revises them; leave model out, or leave reviser out",
        ),
        (
            {"template": "minimal", "endpoint": "http://x/v1", "endpoint_model": "m"},
            {"data": "d", "reviser": "m"},
            "endpoint and reviser both say who writes",
        ),
        ({"endpoint": "http://x"}, {}, "endpoint and endpoint_model go together"),
        ({"critique_template": "{answer} {criterion}"}, {}, "critique_template cannot be filled"),
        ({"revision_template": "{answer} {request}"}, {}, "revision_template shows no {critique}"),
        ({"revision_pattern": "x+"}, {}, "has no group"),
        ({"direct_revision": True, "max_critique_length": 9}, {}, "max_critique_length=9 would change nothing"),
        (
            {"template": "minimal", "temperature": 0.5, "max_prompt_length": 99, "prompt_template": "none"},
            {"model": "m", "data": "d"},
            "prompt_template=none would .* give prompts=REF .*\n  max_prompt_length=99 .*\n  temperature=0.5 .*; write rev",
        ),
        ({"validation_fraction": 0.1, "split": "test"}, {}, "only training prompts are parted; write split=train"),
        ({"examples": [{"question": "q"}]}, {}, "write all of question, answer"),
        ({"endpoint": "http://x", "endpoint_model": "m", "request_format": "text"}, {}, "write request_format=chat"),
    ],
)
def test_refused_settings(config, inputs, message, spec, data, roomy):
    known = {"p": data["prompts"], "d": data["demonstrations"], "m": roomy[0]}
    with pytest.raises(Exception, match=message.replace("{", r"\{")):
        go(spec, config, {name: known[which] for name, which in inputs.items()})


def test_a_file_of_principles_says_all_that_is_wrong_with_it(tmp_path):
    from stages.reward.principles import read_principles

    (tmp_path / "p.yaml").write_text(
        "principles:\n- Be kind.\n- {id: frank, kind: trait, text: Frank.}\n- {text: Old., active: false}\n"
    )
    rows = read_principles(str(tmp_path / "p.yaml"))
    assert (
        [r["kind"] for r in rows] == ["principle", "trait", "principle"]
        and [r["active"] for r in rows] == [True, True, False]
        and rows[1]["principle_id"] == "frank"
    )
    (tmp_path / "bad.yaml").write_text(
        "- {id: a, text: x}\n- {id: a, text: y}\n- {kind: rule, text: z}\n- {colour: red}\n"
    )
    with pytest.raises(ValueError, match="(?s)used twice|unknown key"):
        read_principles(str(tmp_path / "bad.yaml"))
    (tmp_path / "latin.yaml").write_bytes("- {text: für}".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.yaml cannot be read: it is not in UTF-8"):
        read_principles(str(tmp_path / "latin.yaml"))


def test_a_server_that_fails_for_a_moment_is_asked_again_and_one_that_is_away_ends_the_stage(
    spec, constitution, answers
):
    from stages.decoding.engines import EngineError

    tries = Counter()

    def flaky(body):
        answer, _, _ = shown(body)
        tries[answer] += 1
        if tries[answer] == 1:
            raise ConnectionError("the test drops this connection")
        return said(answer + "!") if answer != "odd" else {"message": {"role": "assistant"}, "finish_reason": None}

    with chat_server(flaky) as server:
        config = {
            "endpoint": server.url,
            "endpoint_model": "m",
            "n_rounds": 1,
            "direct_revision": True,
            "engine_concurrency": 1,
        }
        result = go(spec, config, {"data": answers(["fine", "odd"]), "principles": constitution})
    assert (
        tries == {"fine": 2, "odd": 2}
        and [r["chosen"][0]["content"] for r in rows_of(result, "pairs")] == ["fine!"]
        and result["summary"]["dropped/engine_error"] == 1
    )
    # nobody listens there
    with pytest.raises(
        EngineError, match="gives no answers .*refused.*Check endpoint and endpoint_model.*the same command continues"
    ):
        go(
            spec,
            {**config, "endpoint": "http://127.0.0.1:9/v1"},
            {"data": answers(["fine"]), "principles": constitution},
            "away",
        )
