"""Stage write_prompts: lists of new prompts for traits and from a pool, rewritten prompts, what is dropped, kills."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from stages.harness import execute
from stages.write_prompts import Config, Pool, items_in, unfit, words_of
from storage.datasets import open_dataset, write_dataset
from storage.files import tree_digest
from storage.schema import complete_row
from tests.chat_server import chat_server
from tests.common import BESIDE, beside, ingested, silent, user
from tests.training.test_revise import roomy, rows_of, said  # noqa: F401

TRAITS = {"patient": "Patient with people who are new to something.", "frank": "Frank about what is not known."}


@pytest.fixture(scope="session")
def traits(tmp_path_factory):
    root = tmp_path_factory.mktemp("traits")
    (root / "traits.yaml").write_text(
        json.dumps(
            [{"id": name, "kind": "trait", "text": text} for name, text in TRAITS.items()] + ["A principle, no trait."]
        )
    )
    return ingested(root / "traits.yaml", "principles/1", root / "work")


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    words = ["apple", "river", "engine", "poem", "budget", "violin", "garden", "planet", "market", "letter"]
    rows = [
        complete_row(
            "prompts/1",
            {
                "prompt": (
                    ([{"role": "system", "content": "be brief"}] if i == 3 else [])
                    + user(f"Tell me something about the {word} number {i}")
                ),
                "category": "about",
                "group_id": f"g{i}",
                "answer": "42",
                **BESIDE,
            },
            dataset="pool",
            source="people",
            origin="human",
            split="test" if i == 9 else "train",
        )
        for i, word in enumerate(words)
    ]
    path = str(tmp_path_factory.mktemp("pool") / "pool")
    write_dataset(path, "pool", "prompts/1", rows)
    return path


def go(spec, config, inputs, name="write"):
    return execute(spec("write_prompts", config, inputs, name), silent)


def fresh():
    """Tasks that have no two words in common, one after the other."""
    k = 0
    while True:
        k += 1
        yield " ".join(f"w{k}x{j}" for j in range(4))


def test_lists_are_read_and_filtered():
    assert items_in('Sure, here they are:\n1. "What is it?"\n2) Second one\n   goes on\n\nHope this helps!') == [
        "What is it?",
        "Second one\n   goes on",
    ]
    assert items_in("1. whole\n2. not who", cut=True) == ["whole"] and items_in("nothing numbered") == []
    config = Config()
    cases = {
        "Why is the sky blue": None,
        "Hi there": "too_short",
        "- what is this thing": "punctuation",
        "¿Qué hora es ahora?": None,
        "Describe the Image below please": "unsuited",
        "Imagery in poems, please explain": None,
        " ".join(["word"] * 151): "too_long",
        "你好吗朋友": None,
    }
    assert {text: unfit(text, config) for text in cases} == cases
    assert words_of("Ｆull-width, Straße 北京") == ["full", "width", "strasse", "北", "京"]


def test_similarity_is_that_of_the_whole_search():
    """The bound that spares the longest common subsequence loses nothing."""
    import numpy as np

    from stages.measures.text import rouge_l

    rng = np.random.default_rng(0)
    texts = [" ".join(f"t{w}" for w in rng.integers(0, 6, size=rng.integers(1, 9))) for _ in range(150)]
    for threshold in (0.5, 0.7, 1.0):
        pool, known = Pool(threshold), []
        for text in texts:
            near = any(rouge_l(text.split(), one.split())["f1"] >= threshold for one in known)
            assert (pool.nearest(text) is not None) == near
            if not near:
                pool.add(text)
                known.append(text)


def test_each_trait_gets_messages_of_its_own(spec, traits):
    """Requests go to traits that lack prompts until they have enough; every row names its trait; drops are counted."""
    made = fresh()

    def choice(body):
        text = body["messages"][0]["content"]
        first = next(made)
        written = re.findall(r"(?m)^- (.*)$", text)
        return said(
            f"Here you go:\n1. {first}\n2. {first} again\n3. Look at the picture please\n4. no\n5. {next(made)}\n6."
            f" {written[0] if written else next(made)}"
        )

    with chat_server(choice) as server:
        result = go(
            spec,
            {"endpoint": server.url, "endpoint_model": "m", "num_prompts": 5, "per_request": 6, "test_fraction": 0.3},
            {"principles": traits},
        )
        seen = [b["messages"][0]["content"] for b in server.seen]
    rows, summary = rows_of(result, "prompts"), result["summary"]
    assert Counter(r["category"] for r in rows) == {"patient": 5, "frank": 5} and summary["requests"] == len(seen) == 4
    assert all(sum(text in asked for text in TRAITS.values()) == 1 for asked in seen) and not any(
        "A principle, no trait" in asked for asked in seen
    )
    assert summary["dropped/unsuited"] == summary["dropped/too_short"] == 4 and summary["dropped/similar"] == 6, (
        "the echo of what is there already, and the near copies"
    )
    notes = [json.loads(r["extra_json"]) for r in rows]
    assert {n["trait"] for n in notes} == set(TRAITS) and all(
        n["gen"]["model_id"] == "m" and n["method"] == "traits" for n in notes
    )
    assert (
        {r["origin"] for r in rows} == {"ai"}
        and {r["split"] for r in rows} == {"train", "test"}
        and all(r["answer"] is None for r in rows)
    )
    assert "There are these already" in seen[2] and any(r["prompt"][0]["content"] in seen[2] for r in rows)


def test_tasks_like_those_of_a_pool(spec, pool):
    """Self-Instruct: six examples of the pool, two written ones once there are any, numbering goes on behind them; what
    is like the pool is dropped.
    """
    made = fresh()

    def choice(body):
        asked = body["messages"][0]["content"]
        assert "Number them from 9" in asked
        return said(
            f"9. {next(made)}\n10. {next(made)}\n11. Tell me something about the apple number 0\n12. {next(made)}",
            "length",
        )

    with chat_server(choice) as server:
        config = {
            "method": "self_instruct",
            "endpoint": server.url,
            "endpoint_model": "m",
            "num_prompts": 10,
            "per_request": 4,
            "block": 2,
        }
        result = go(spec, config, {"pool": pool})
        shown = [
            [line.split(". ", 1)[1] for line in b["messages"][0]["content"].split("\n") if re.match(r"\d+\. ", line)]
            for b in server.seen
        ]
    rows = rows_of(result, "prompts")
    assert (
        len(rows) == 10
        and result["summary"]["requests"] == 6
        and result["summary"]["dropped/similar"] == 6
        and result["summary"]["dropped/not_needed"] == 2
    ), "cut lists lose their last"
    old = [sum(text.startswith("Tell me") for text in one) for one in shown]
    assert (
        [len(one) for one in shown] == [8] * 6
        and old[:2] == [8, 8]
        and old[2:] == [6] * 4
        and len({tuple(one) for one in shown}) == 6
    )
    assert not any("letter" in text for one in shown for text in one), "held-out prompts of the pool are no examples"
    assert all(r["category"] is None for r in rows)


def test_prompts_are_rewritten_where_they_can_be_answered(spec, pool):
    made = fresh()

    def choice(body):
        text = body["messages"][0]["content"]
        if "Can this message be answered" in text:
            return said("No." if "w2x0" in text else "perhaps" if "w3x0" in text else "Yes, it can.")
        message = text.split("[Message]\n")[1].split("\n[End")[0]
        return said(message.upper() if "number 5" in message else next(made))

    with chat_server(choice) as server:
        config = {
            "method": "rewrite",
            "endpoint": server.url,
            "endpoint_model": "m",
            "num_prompts": 1,
            "block": 4,
            "operations": ["deepen", "constrain"],
            "engine_concurrency": 1,
        }
        result = go(spec, config, {"pool": pool})
    rows, summary = rows_of(result, "prompts"), result["summary"]
    assert len(rows) == 6 and (
        summary["dropped/unchanged"],
        summary["dropped/unanswerable"],
        summary["dropped/unreadable_verdicts"],
    ) == (1, 1, 1)
    assert all(one == BESIDE for one in beside(rows))
    old = {r["row_id"]: r for r in open_dataset(pool).iter_rows()}
    for row in rows:
        note = json.loads(row["extra_json"])
        assert (
            row["group_id"] == old[note["of"]]["group_id"]
            and row["category"] == "about"
            and row["answer"] is None
            and row["split"] == "train"
        )
    assert {json.loads(r["extra_json"])["operation"] for r in rows} == {"deepen", "constrain"}
    assert sum(r["prompt"][0]["role"] == "system" for r in rows) == 1, "only the last message is rewritten"


def test_a_follow_up_is_rewritten_in_its_conversation_and_what_is_thought_is_no_prompt(spec, traits, tmp_path):
    """A writer that reasons drafts lists before it writes one; the writer reads what a follow-up refers to."""
    prompt = user("Who wrote Faust?") + [{"role": "assistant", "content": "Goethe."}] + user("And when did he do that?")
    row = complete_row(
        "prompts/1", {"prompt": prompt, "weight": 3.0}, dataset="pool", source="people", origin="human", split="train"
    )
    write_dataset(str(tmp_path / "talk"), "talk", "prompts/1", [row])
    thought = "<think>Let me draft.\n1. a draft that is thought of\n2. another draft in there</think>\n\n"

    def choice(body):
        text = body["messages"][0]["content"]
        if "Number them" in text:
            return said(thought + "1. why does my bread not rise")
        assert "[Conversation so far]\nHuman: Who wrote Faust?\n\nAssistant: Goethe.\n[End of" in text
        if "Can this message be answered" in text:
            whole = thought + "Yes"
            return said(whole) if body["max_tokens"] >= 200 else said(whole[: body["max_tokens"]], "length")
        return said(thought + "In which years did he write it?")

    with chat_server(choice) as server:
        config = {"endpoint": server.url, "endpoint_model": "m", "num_prompts": 1}
        made = rows_of(go(spec, {**config, "method": "rewrite"}, {"pool": str(tmp_path / "talk")}, "re"), "prompts")
        listed = go(spec, {**config, "max_rounds": 1}, {"principles": traits}, "listed")
    assert [(r["prompt"][:2], r["prompt"][-1]["content"], r["weight"]) for r in made] == [
        (prompt[:2], "In which years did he write it?", 3.0)
    ]
    assert {r["prompt"][0]["content"] for r in rows_of(listed, "prompts")} == {"why does my bread not rise"}


TINY = {
    "num_prompts": 3,
    "per_request": 2,
    "min_words": 1,
    "max_similarity": 1.0,
    "request_format": "text",
    "max_completion_length": 30,
    "max_rounds": 5,
}


def test_a_tiny_model_writes_and_a_killed_run_ends_with_the_same_bytes(roomy, traits, pool, spec, forks):  # noqa: F811
    """Plain text goes on behind "1.", so the text itself is the first item."""
    inputs = {"model": roomy[0], "principles": traits}
    whole, killed = (
        spec("write_prompts", {**TINY, "logit_bias": {roomy[1]: 3}}, inputs, "whole"),
        spec("write_prompts", {**TINY, "logit_bias": {roomy[1]: 3}}, inputs, "killed"),
    )
    forks.run(spec.path("whole"))
    forks.start(spec.path("killed")).kill_when(lambda: any(Path(killed["workdir"], "checkpoints").glob("step-*2")))
    assert not Path(killed["workdir"], "result.json").exists()
    forks.run(spec.path("killed"))
    results = [json.loads(Path(one["workdir"], "result.json").read_text()) for one in (whole, killed)]
    assert (
        results[1]["resumed_from"]
        and results[0]["summary"] == results[1]["summary"]
        and results[0]["summary"]["prompts"] > 0
    )
    for part in ("out/prompts", "reports"):
        assert tree_digest(Path(whole["workdir"], part)) == tree_digest(Path(killed["workdir"], part)), part
    with pytest.raises(ValueError, match="No prompt was written"):
        go(spec, {**TINY, "request_format": "chat", "max_rounds": 1}, inputs, "chat")


@pytest.mark.parametrize(
    "config,inputs,message",
    [
        ({}, [], "write --input principles=FILE"),
        ({"method": "self_instruct"}, [], "give --input pool=FILE"),
        ({"method": "rewrite"}, ["traits"], "method=traits and the input principles"),
        ({"min_words": 9, "max_words": 8}, ["traits"], "smaller min_words"),
        ({}, ["traits"], "nobody writes"),
        ({"validation_fraction": 0.6, "test_fraction": 0.4}, ["traits"], "leave no prompt to train on"),
        ({"operations": ["deepen"]}, ["traits"], "operations=.*would change nothing.*write method=rewrite"),
        (
            {"method": "rewrite", "test_fraction": 0.5, "max_rounds": 2},
            ["pool"],
            "(?s)max_rounds=2 would change.*write num_prompts.*test_fraction=0.5 would.*stay in the split",
        ),
        ({"method": "rewrite", "split": "validation"}, ["pool"], "no prompts in split"),
    ],
)
def test_refused_settings(config, inputs, message, spec, traits, pool):
    known = {"traits": ("principles", traits), "pool": ("pool", pool)}
    with pytest.raises(Exception, match=message):
        go(spec, config, dict(known[name] for name in inputs))


def test_answers_are_sampled_behind_the_trait_and_kept_without_it(roomy, traits, spec, tmp_path):  # noqa: F811
    """Character training, step 3: the prompts' own trait in the system message of the sampler, the plain prompt in the
    rows.
    """
    from stages.chat import renderer_for
    from stages.generation import sampling_params
    from stages.policy.members import with_system
    from stages.candidates.contexts import CHARACTER
    from stages.rejection import Config as Rejection
    from stages.decoding.sampler import Sampler
    from stages.models.modeling import freeze, load_policy

    rows = [
        complete_row(
            "prompts/1",
            {"prompt": user(f"What about {i}?"), "category": list(TRAITS)[i % 2], **BESIDE},
            dataset="p",
            source="s",
            origin="ai",
        )
        for i in range(4)
    ]
    write_dataset(str(tmp_path / "prompts"), "p", "prompts/1", rows)
    config = {
        "num_generations": 2,
        "max_completion_length": 16,
        "rewards": [{"kind": "truncation"}],
        "allow_empty": True,
    }
    inputs = {"model": roomy[0], "prompts": str(tmp_path / "prompts"), "traits": traits}

    def run(name, config, inputs):
        made = spec("rejection", config, inputs, name)
        return made, execute(made, silent)

    _, result = run("traits", config, inputs)
    candidates = rows_of(result, "candidates")
    assert all(one == BESIDE for name in ("candidates", "selected") for one in beside(rows_of(result, name)))
    renderer, sampler = (
        renderer_for(roomy[0]),
        Sampler(freeze(load_policy(roomy[0], "cpu")), renderer_for(roomy[0]).tokenizer),
    )
    for row in rows:
        mine = [c for c in candidates if c["prompt_id"] == row["prompt_id"]]
        ids = renderer.prompt_ids(with_system(row["prompt"], CHARACTER.format(trait=TRAITS[row["category"]])))
        seeds = [c["gen"]["rng_seed"] for c in mine]
        assert [c["completion"][0]["content"] for c in mine] == [
            c.text for c in sampler.generate([ids], sampling_params(Rejection(**config), renderer), [seeds])[0]
        ]
        assert all(
            c["prompt"][0]["role"] == "user"
            and len(c["prompt"]) == 1
            and json.loads(c["extra_json"])["trait"] == row["category"]
            for c in mine
        )
    _, plain = run("plain", config, {k: v for k, v in inputs.items() if k != "traits"})
    assert [r["completion"] for r in rows_of(plain, "candidates")] != [r["completion"] for r in candidates]
    _, one = run("one", {**config, "system": "Be frank."}, {k: v for k, v in inputs.items() if k != "traits"})
    assert all(
        r["prompt"][0]["role"] == "user" and "trait" not in json.loads(r["extra_json"])
        for r in rows_of(one, "candidates")
    )
    for more, message in (
        ({"system": "no field"}, "write {trait} in it"),
        ({"mixture_coef": 0.5, "system": "x {trait}"}, "both say what"),
        ({"max_prompt_length": 60}, "behind their system message 4 of 4"),
    ):
        with pytest.raises(Exception, match=message.replace("{", r"\{")):
            run("refused", {**config, **more}, inputs)
    other = [complete_row("prompts/1", {"prompt": user("hm")}, dataset="p", source="s", origin="ai")]
    write_dataset(str(tmp_path / "other"), "p", "prompts/1", other)
    with pytest.raises(Exception, match="have no trait"):
        run("none", config, {**inputs, "prompts": str(tmp_path / "other")})


def test_a_principle_can_be_drawn_for_each_prompt(roomy, traits, spec, tmp_path):  # noqa: F811
    """UltraFeedback: prompts need no category; the candidate names the principle that it was sampled behind, the same
    one for all answers to a prompt, another with another seed.
    """
    from stages.chat import renderer_for
    from stages.policy.members import with_system
    from stages.models.modeling import freeze, load_policy
    from stages.generation import sampling_params
    from stages.candidates.contexts import CHARACTER
    from stages.rejection import Config as Rejection
    from stages.decoding.sampler import Sampler

    rows = [
        complete_row("prompts/1", {"prompt": user(f"What about {i}?")}, dataset="p", source="s", origin="ai")
        for i in range(8)
    ]
    write_dataset(str(tmp_path / "prompts"), "p", "prompts/1", rows)
    config = {
        "num_generations": 2,
        "max_completion_length": 4,
        "rewards": [{"kind": "truncation"}],
        "allow_empty": True,
        "trait_of": "drawn",
    }
    drawn = []
    for seed in (5, 6):
        made = {
            **spec(
                "rejection",
                config,
                {"model": roomy[0], "prompts": str(tmp_path / "prompts"), "traits": traits},
                f"drawn{seed}",
            ),
            "seed": seed,
        }
        candidates = rows_of(execute(made, silent), "candidates")
        drawn.append([json.loads(c["extra_json"])["trait"] for c in candidates])
    assert set(drawn[0]) == set(TRAITS) and drawn[0] != drawn[1] and drawn[0][::2] == drawn[0][1::2]
    renderer, sampler = (
        renderer_for(roomy[0]),
        Sampler(freeze(load_policy(roomy[0], "cpu")), renderer_for(roomy[0]).tokenizer),
    )
    ids = renderer.prompt_ids(with_system(candidates[0]["prompt"], CHARACTER.format(trait=TRAITS[drawn[1][0]])))
    assert (
        sampler.generate(
            [ids], sampling_params(Rejection(**config), renderer), [[c["gen"]["rng_seed"] for c in candidates[:2]]]
        )[0][0].text
        == candidates[0]["completion"][0]["content"]
    )
