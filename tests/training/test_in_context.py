"""In-context scores (rs.icdpo), rationalisation (rs.star) and the other compositions of rejection sampling."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.chat import renderer_for
from stages.harness import execute
from stages.in_context import InContextScorer, TfIdf, nearest, with_demonstrations
from stages.models.modeling import freeze, load_policy
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import silent, written

RS = {"num_generations": 4, "max_completion_length": 10, "block": 16, "max_prompts": 12}


def sampled(spec, tiny, data, config, name, **inputs):
    sampling = RS if not any(key.startswith("candidates") for key in inputs) else {}
    made = spec("rejection", {**sampling, **config}, {"model": tiny["policy"], "prompts": data["prompts"]}, name)
    made["inputs"] |= {k: {"kind": "dataset", "path": v, "ref": k, "digest": k} for k, v in inputs.items()}
    return execute(made, silent), made


def rows_of(result, name="candidates"):
    return list(open_dataset(result["outputs"][name]["path"]).iter_rows())


@pytest.fixture(scope="module")
def shown(data):
    """Demonstrations near the prompts: sums with other numbers, and one of a prompt itself."""
    path = str(Path(data["prompts"]).parent / "shown")
    written(
        path,
        "shown",
        "demonstrations/1",
        [
            {
                "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}],
                "train_turns": [1],
                "kept": True,
            }
            for q, a in [
                ("what is 1 plus 1?", "2"),
                ("sing a song", "la la"),
                ("what is 70 plus 70?", "140"),
                ("what is 71 plus 71?", "142"),
                ("what is 72 minus 2?", "70"),
                ("tell me a joke", "no"),
            ]
        ],
    )
    return path


def test_coarse_similarity_is_the_cosine_of_weighted_words():
    texts = ["two plus two", "two minus one", "a song", ""]
    index = TfIdf(texts)

    def vector(text):
        n = {w: text.split().count(w) for w in text.split() if any(w in t.split() for t in texts)}
        v = {w: c * (np.log(5 / (1 + sum(w in t.split() for t in texts))) + 1) for w, c in n.items()}
        norm = np.sqrt(sum(x * x for x in v.values())) or 1.0
        return {w: x / norm for w, x in v.items()}

    query = vector("Two plus one?".lower().rstrip("?"))
    assert np.allclose(
        index.similarities("Two plus one?"), [sum(query.get(w, 0) * x for w, x in vector(t).items()) for t in texts]
    )
    assert not index.similarities("quack").any() and nearest([0.5, 0.7, 0.7, 0.1], 3) == [1, 2, 0]
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}
    assert with_demonstrations(
        [system, user], [([{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}])]
    ) == [system, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, user]


def test_the_score_is_the_gain_in_log_likelihood_of_the_answer(spec, tiny, data, shown):
    """Every stored score against the model's own logits, token sums, with the recorded demonstrations; the best one is
    selected.
    """
    rewards = [{"name": "icdpo", "kind": "icdpo", "num_demonstrations": 2, "coarse_demonstrations": 4}]
    result, _ = sampled(spec, tiny, data, {"rewards": rewards}, "icdpo", demonstrations=shown)
    renderer, model = renderer_for(tiny["policy"]), load_policy(tiny["policy"])
    texts = {r["row_id"]: r["messages"] for r in open_dataset(shown).iter_rows()}
    candidates = rows_of(result)
    assert len(candidates) == 48

    def total(prompt, ids):
        logp = torch.log_softmax(model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0].float(), -1)
        return float(sum(logp[len(prompt) - 1 + t, token] for t, token in enumerate(ids)).detach())

    for row in candidates[::7]:
        more = json.loads(row["extra_json"])
        names = more["demonstrations"]
        assert (
            len(names) == 2
            and not any(texts[n][0]["content"] == row["prompt"][-1]["content"] for n in names)
            and "in_context" not in more
        )
        behind = renderer.prompt_ids(with_demonstrations(row["prompt"], [(texts[n][:1], texts[n][1:]) for n in names]))
        ids = more["completion_ids"]
        if not ids:
            continue
        score = total(behind, ids) - total(renderer.prompt_ids(row["prompt"]), ids)
        found = {s["source"]: s["value"] for s in row["scores"]}["icdpo"]
        assert found == pytest.approx(score, abs=2e-3) and (row["kept"] is False or row["reward"] == found)
    best = {}
    for row in candidates:
        if row["kept"] and (row["prompt_idx"] not in best or row["reward"] > best[row["prompt_idx"]]["reward"]):
            best[row["prompt_idx"]] = row
    assert [s["messages"][-1]["content"] for s in rows_of(result, "selected")] == [
        best[i]["completion"][0]["content"] for i in sorted(best)
    ]


def test_retrieval_is_deterministic_and_fits(tiny, data, shown):
    renderer, model = renderer_for(tiny["policy"]), freeze(load_policy(tiny["policy"]))
    prompts = list(open_dataset(data["prompts"]).iter_rows())[:4]
    found = []
    for order in (prompts, prompts[::-1]):
        scorer = InContextScorer(model, renderer, open_dataset(shown), count=3, coarse=4)
        found.append({p["prompt_id"]: scorer.retrieve(p) for p in order})
    assert found[0] == found[1]
    texts = {r["row_id"]: r["messages"][0]["content"] for r in open_dataset(shown).iter_rows()}
    # coarse keeps the four sums
    assert all("song" not in texts[n] and "joke" not in texts[n] for names, _ in found[0].values() for n in names)
    plain = len(renderer.prompt_ids(prompts[2]["prompt"]))
    tight = InContextScorer(model, renderer, open_dataset(shown), count=3, coarse=4, max_tokens=plain + 40)
    names, ids = tight.retrieve(prompts[2])
    # the most similar one stays
    assert len(names) == 1 and len(ids) <= plain + 40 and names == found[0][prompts[2]["prompt_id"]][0][-1:]
    none = InContextScorer(model, renderer, open_dataset(shown), max_tokens=plain)
    assert none.retrieve(prompts[2]) == ([], None)
    assert none.score(
        [{"prompt_row": prompts[2], "prompt_ids": renderer.prompt_ids(prompts[2]["prompt"]), "completion_ids": [5]}]
    ) == [None]


def test_candidates_are_sampled_behind_the_demonstrations(spec, tiny, data, shown):
    rewards = [{"name": "icdpo", "kind": "icdpo", "num_demonstrations": 2}]
    plain, _ = sampled(spec, tiny, data, {"rewards": rewards}, "plain", demonstrations=shown)
    behind, made = sampled(spec, tiny, data, {"rewards": rewards, "in_context": True}, "behind", demonstrations=shown)
    from stages.decoding.sampler import Sampler
    from stages.decoding.sampling import SamplingParams
    from stages.harness import Stage
    from stages.registry import get_stage

    stage = Stage(get_stage("rejection"), {**made, "workdir": made["workdir"] + "-look"}, silent)
    renderer = renderer_for(tiny["policy"])
    texts = {r["row_id"]: r["messages"] for r in open_dataset(shown).iter_rows()}
    rows = rows_of(behind)
    assert all(json.loads(r["extra_json"])["in_context"] for r in rows)
    assert [r["completion"] for r in rows] != [r["completion"] for r in rows_of(plain)]
    first = json.loads(rows[0]["extra_json"])
    prompt = renderer.prompt_ids(
        with_demonstrations(rows[0]["prompt"], [(texts[n][:1], texts[n][1:]) for n in first["demonstrations"]])
    )
    source = next(iter(open_dataset(data["prompts"]).iter_rows(split="train")))
    again = Sampler(freeze(load_policy(tiny["policy"])), renderer.tokenizer).generate(
        [prompt],
        SamplingParams(max_new_tokens=10, stop_ids=frozenset(renderer.stop_ids)),
        [[stage.seed_for("rejection", source["row_id"], 0)]],
    )
    assert again[0][0].ids == first["completion_ids"]
    assert all(len(r["messages"]) == 2 for r in rows_of(behind, "selected"))  # trained without the demonstrations
    with pytest.raises(ValueError, match="kind icdpo"):
        from stages.rejection import Config

        Config(in_context=True)
    with pytest.raises(ValueError, match="two likelihoods would be of two forms; write prompt_template=chat"):
        Config(prompt_template="none", rewards=[{"kind": "icdpo"}])
    with pytest.raises(ValueError, match="'demonstrations'"):
        sampled(spec, tiny, data, {"rewards": rewards}, "none")


@pytest.fixture(scope="module")
def parrot(tiny, data, tmp_path_factory):
    """A model that repeats the hint's number, and says 0 without one: it solves nothing unless it is told."""
    path = str(Path(data["prompts"]).parent / "parroted")
    user, assistant = (lambda t: {"role": "user", "content": t}), (lambda t: {"role": "assistant", "content": t})
    rows = [
        complete_row(
            "demonstrations/1",
            {"messages": [user(f"{q}{h}"), assistant(a)], "train_turns": [1], "kept": True},
            dataset="p",
            source="s",
            origin="human",
        )
        for i in range(10)
        for q, h, a in ((f"what is {i} plus {i}?", "", "no" if i else "0"), (f"what is {i} plus {i}?", " 0", "0"))
    ]
    write_dataset(path, "p", "demonstrations/1", rows)
    config = {"learning_rate": 2e-2, "batch_size": 20, "num_train_epochs": 40, "max_length": 64}
    result = execute(
        {
            "stage": "sft",
            "config": config,
            "device": "cpu",
            "workdir": str(tmp_path_factory.mktemp("parrot")),
            "inputs": {"model": {"path": tiny["policy"]}, "data": {"path": path}},
        },
        silent,
    )
    return result["outputs"]["model"]["path"]


def test_a_hint_helps_where_nothing_was_right_and_is_not_trained(spec, data, parrot):
    zeros = str(Path(data["prompts"]).parent / "zeros")
    written(
        zeros,
        "zeros",
        "prompts/1",
        [
            {
                "prompt": [{"role": "user", "content": f"what is {i} plus {i}?"}],
                "answer": "0",
                "answer_type": "integer",
            }
            for i in range(6)
        ],
        dataset="z",
    )
    config = {
        "num_generations": 2,
        "temperature": 0.1,
        "max_completion_length": 6,
        "block": 4,
        "select": "all_correct",
        "rationalise": 3,
        "hint": "{question} {answer}",
        "rewards": [{"kind": "verifier", "verifier": "text"}],
    }
    made = spec("rejection", config, {"model": parrot, "prompts": zeros}, "star")
    result = execute(made, silent)
    rows = rows_of(result)
    hinted = [r for r in rows if json.loads(r["extra_json"]).get("mode") == "rationalised"]
    direct = [r for r in rows if r not in hinted]
    solved = {r["prompt_idx"] for r in direct if r["correct"] and r["kept"]}
    assert (
        len(direct) == 12
        and {r["prompt_idx"] for r in hinted} == set(range(6)) - solved
        and len(hinted) == 3 * (6 - len(solved))
    )
    assert solved and len(solved) < 6 and all(r["completion_idx"] >= 2 for r in hinted)
    assert all(
        r["kept"] == bool(r["correct"]) and (r["correct"] or r["drop_reason"] in ("hint_did_not_help", "truncated"))
        for r in hinted
    )
    selected = rows_of(result, "selected")
    told = {r["prompt_idx"] for r in hinted if r["kept"]}
    # no hint in any row
    assert told and {s["messages"][0]["content"] for s in selected} == {f"what is {i} plus {i}?" for i in solved | told}
    summary = result["summary"]
    assert (summary["prompts/direct"], summary["prompts/rationalised"], summary["prompts/unsolved"]) == (
        len(solved),
        len(told),
        6 - len(solved) - len(told),
    )
    assert summary["correct/mean"] == pytest.approx(sum(bool(r["correct"]) for r in direct) / 12)
    without = execute(
        spec(
            "rejection",
            {**{k: v for k, v in config.items() if k != "hint"}, "rationalise": 0},
            {"model": parrot, "prompts": zeros},
            "direct",
        ),
        silent,
    )
    assert [r["completion"] for r in rows_of(without)] == [r["completion"] for r in direct]
    for wrong, text in (
        ({"rationalise": 1, "rewards": [{"kind": "length"}]}, "kind verifier"),
        ({"rationalise": 1, "hint": "the answer is {answer}"}, "question"),
    ):
        with pytest.raises(ValueError, match=text):
            execute(spec("rejection", wrong, {"model": parrot, "prompts": zeros}, "no"), silent)


def verdict_rows(texts, prompt="p"):
    return [
        {
            "prompt_row": {"row_id": prompt, "prompt": [{"role": "user", "content": "q"}], "answer": None},
            "completion_text": t,
            "completion_ids": [1],
            "finish_reason": "eos",
        }
        for t in texts
    ]


def test_votes_need_no_gold_answer_and_can_be_weighted():
    """rs.majority: one vote each with ties to the first, or weighted by another component's values; equal numbers are
    one answer.
    """
    from stages.reward.components import RewardComponent
    from stages.reward.rewards import build_rewards

    texts = [r"so \boxed{a}", r"\boxed{b}", r"\boxed{b}", r"\boxed{a}", r"\boxed{c}", "no answer"]
    plain = build_rewards([RewardComponent(kind="majority")], {})
    assert [s.total for s in plain.score(verdict_rows(texts))] == [1, 0, 0, 1, 0, 0]
    scores = dict(zip(texts[:5], (0.1, 0.9, 0.8, 0.05, 0.95)))
    source = f"def score(prompt, completion, answer):\n    return {scores!r}.get(completion)"
    weighted = build_rewards(
        [
            RewardComponent(kind="python", name="rm", source=source, weight=0.0, on_missing="skip"),
            RewardComponent(kind="majority", votes_of="rm"),
        ],
        {},
    )
    assert [s.total for s in weighted.score(verdict_rows(texts))] == [0, 1, 1, 0, 0, 0]
    numbers = verdict_rows([r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", r"\boxed{3}", r"\boxed{3.}"]) + verdict_rows(
        [r"\boxed{3}", "x"], "other"
    )
    assert [s.total for s in plain.score(numbers)] == [1, 1, 0, 0, 1, 0]
    assert [s.extracted for s in plain.score(numbers)][:3] == [None] * 3 and all(
        s.correct is None for s in plain.score(numbers)
    )
    assert [s.total for s in plain.score(verdict_rows(["x", "y"]))] == [0, 0]
    pairs = verdict_rows([r"\boxed{(0.5, 1)}", r"\boxed{2}", r"\boxed{(\frac{1}{2}, 1)}", r"\boxed{(1, 0.5)}"])
    assert [s.total for s in plain.score(pairs)] == [1, 0, 1, 0], "equal as reward.math takes it"
    loose = build_rewards([RewardComponent(kind="majority", extraction="flexible")], {})
    said = verdict_rows(["It is 12 in all.", "That makes 12", "so 7"])
    assert [s.total for s in loose.score(said)] == [1, 1, 0] and [s.total for s in plain.score(said)] == [0, 0, 0]
    with pytest.raises(ValueError, match="votes_of='nobody'"):
        build_rewards([RewardComponent(kind="majority", votes_of="nobody")], {})
    # it is scored beside the votes, too late to weigh them
    with pytest.raises(ValueError, match="votes_of='short' is no component that scores answers one by one"):
        build_rewards(
            [RewardComponent(kind="length_group", name="short"), RewardComponent(kind="majority", votes_of="short")], {}
        )
    with pytest.raises(ValueError, match="tier is not for kind majority"):
        RewardComponent(kind="majority", tier="rule")


def test_self_consistent_answers_are_selected(spec, tiny, data):
    """The text before the first space is the answer to vote on; selected rows are those of each prompt's majority."""
    result, _ = sampled(
        spec,
        tiny,
        data,
        {
            "num_generations": 6,
            "rewards": [{"kind": "majority", "extraction": "flexible"}],
            "select": "threshold",
            "threshold": 0.5,
            "allow_empty": True,
            "max_prompts": 30,
            "max_completion_length": 6,
        },
        "votes",
    )
    from stages.verification.extraction import FLEXIBLE_ORDER, extract

    by_prompt = {}
    for row in rows_of(result):
        by_prompt.setdefault(row["prompt_idx"], []).append(row)
    seen = 0
    for group in by_prompt.values():
        answers = [extract(r["completion"][0]["content"], FLEXIBLE_ORDER) for r in group]
        voted = [a for a in answers if a is not None]
        for row, answer in zip(group, answers):
            if row["reward"]:
                assert voted.count(answer) == max(map(voted.count, voted))
                seen += 1
    assert seen


def test_prompts_of_medium_difficulty_are_written(spec, tiny, data):
    """rs.difficulty_band: pass rates from the stage's own verdicts, bounds included, counts stored; the prompts go on
    into rl.
    """
    source = "def score(prompt, completion, answer):\n    return len(completion) % 2 == 0"
    config = {
        "num_generations": 5,
        "rewards": [{"kind": "python", "source": source}],
        "difficulty_band": [0.2, 0.6],
        "select": "top_per_prompt",
        "allow_empty": True,
        "max_prompts": 20,
    }
    result, _ = sampled(spec, tiny, data, config, "band")
    rates = {}
    for row in rows_of(result):
        assert row["correct"] == (len(row["completion"][0]["content"]) % 2 == 0)
        rates.setdefault(row["prompt_id"], []).append(row["correct"])
    wanted = {name: sum(found) for name, found in rates.items() if 1 <= sum(found) <= 3}
    banded = rows_of(result, "banded")
    assert 0 < len(wanted) < 20 and {r["prompt_id"]: json.loads(r["extra_json"])["passed"] for r in banded} == wanted
    assert all(json.loads(r["extra_json"])["sampled"] == 5 and r["answer"] for r in banded) and result["summary"][
        "banded"
    ] == len(wanted)
    trained = execute(
        spec(
            "rl",
            {
                "max_steps": 1,
                "prompts_per_step": 1,
                "num_generations": 2,
                "max_completion_length": 4,
                "preset": "rloo",
                "rewards": [{"kind": "length", "max_length": 4, "cache_length": 4}],
            },
            {"model": tiny["policy"], "data": result["outputs"]["banded"]["path"]},
            "rl",
        ),
        silent,
    )
    assert trained["outputs"]["model"]


def test_candidates_of_two_models_are_joined_by_prompt(spec, tiny, data):
    """rs.mix: one selection over both sources, each row with its own model, and the share that each source wins."""
    paths = {}
    for name in ("policy", "other"):
        made = spec(
            "rejection",
            {**RS, "rewards": [{"kind": "length", "max_length": 10, "cache_length": 10}], "allow_empty": True},
            {"model": tiny[name], "prompts": data["prompts"]},
            name,
        )
        made["inputs"]["model"]["ref"] = name
        paths[name] = execute(made, silent)["outputs"]["candidates"]["path"]
    made = spec("rejection", {"allow_empty": True}, {"model": tiny["policy"], "prompts": data["prompts"]}, "joined")
    made["inputs"] |= {
        f"candidates.{name}": {"kind": "dataset", "path": path, "ref": name, "digest": name}
        for name, path in paths.items()
    }
    result = execute(made, silent)
    rows = rows_of(result)
    assert (
        len(rows) == 96
        and len({r["row_id"] for r in rows}) == 96
        and {r["completion_idx"] for r in rows} == set(range(8))
    )
    assert all(len({r["prompt_id"] for r in rows if r["prompt_idx"] == i}) == 1 for i in range(12))
    # labels in order
    assert {(r["completion_idx"] < 4, r["gen"]["model_id"]) for r in rows} == {(True, "other"), (False, "policy")}
    best = {}
    for r in rows:
        if (
            r["kept"]
            and r["reward"] is not None
            and (r["prompt_idx"] not in best or r["reward"] > best[r["prompt_idx"]]["reward"])
        ):
            best[r["prompt_idx"]] = r
    wins = [r["gen"]["model_id"] for r in best.values()]
    assert result["summary"]["win_share/policy"] == pytest.approx(wins.count("policy") / len(wins))
    assert [s["gen"]["model_id"] for s in rows_of(result, "selected")] == [
        best[i]["gen"]["model_id"] for i in sorted(best)
    ]


def test_prompts_are_mixed_and_say_where_they_are_from(spec, tmp_path):
    """mix of prompts/1: the source becomes the domain that rewards are routed by; a prompt that is held out anywhere is
    in no training row; kinds are not mixed.
    """

    def write(name, kind, rows):
        write_dataset(
            str(tmp_path / name),
            name,
            kind,
            [complete_row(kind, row, dataset=name, source=name, origin="human", split=split) for row, split in rows],
        )
        return {"kind": "dataset", "path": str(tmp_path / name), "ref": name, "digest": name}

    def question(text, **more):
        return {"prompt": [{"role": "user", "content": text}], "domain": "old", **more}

    sums = write(
        "sums",
        "prompts/1",
        [(question(f"sum {i}", answer=str(i), answer_type="integer"), "test" if i == 0 else "train") for i in range(6)],
    )
    chats = write(
        "chats", "prompts/1", [(question(f"chat {i}"), "train") for i in range(4)] + [(question("sum 0"), "train")]
    )
    demos = write(
        "demos",
        "demonstrations/1",
        [
            (
                {
                    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                    "train_turns": [1],
                    "kept": True,
                },
                "train",
            )
        ],
    )

    def mixed(name, given, **config):
        made = spec("mix", config, {}, name)
        made["inputs"] = {f"data.{k}": v for k, v in given.items()}
        return execute(made, silent)

    result = mixed("prompts", {"reasoning": sums, "general": chats}, label_domains=True)
    rows = rows_of(result, "data")
    assert {(r["prompt"][0]["content"].split()[0], r["domain"]) for r in rows} == {
        ("sum", "reasoning"),
        ("chat", "general"),
    } and all(r["answer"] is not None for r in rows if r["domain"] == "reasoning")
    assert (
        [r["split"] for r in rows].count("test") == 1
        and len(rows) == 10
        and result["summary"]["dropped/held_out_elsewhere"] == 1
    )
    assert {r["domain"] for r in rows_of(mixed("plain", {"a": sums, "b": chats}), "data")} == {"old"}
    for given, config, text in (
        ({"a": sums, "b": demos}, {}, "sources of one kind"),
        ({"a": sums}, {"drop_code_blocks": True}, "for demonstrations"),
        ({"a": demos}, {"label_domains": True}, "for prompts"),
    ):
        with pytest.raises(Exception, match=text):
            mixed("no", given, **config)


def test_sources_are_mixed_in_their_shares_and_tasks_held_out(spec, tmp_path):
    """rs.mix and the mixture of sft.instruct: largest remainder, no row twice, a held-out task is in no training row,
    unreadable answers are counted.
    """

    def write(name, n, category, text=lambda i: "fine answer"):
        written(
            str(tmp_path / name),
            name,
            "demonstrations/1",
            [
                {
                    "messages": [
                        {"role": "user", "content": f"{name} {i}"},
                        {"role": "assistant", "content": text(i)},
                    ],
                    "train_turns": [1],
                    "kept": True,
                    "category": category(i),
                    "split": "validation" if i == 0 else "train",
                }
                for i in range(n)
            ],
            source=name,
        )
        return str(tmp_path / name)

    paths = {
        "reasoning": write(
            "reasoning",
            31,
            lambda i: "math",
            lambda i: "```py\n1```" if i == 5 else "да это so" if i == 6 else "fine answer",
        ),
        "general": write("general", 21, lambda i: "translation" if i % 4 == 1 else "chat"),
    }

    def mixed(config, name):
        made = spec("mix", config, {}, name)
        made["inputs"] = {f"data.{k}": {"kind": "dataset", "path": v, "ref": k, "digest": k} for k, v in paths.items()}
        return execute(made, silent)

    config = {
        "weights": {"reasoning": 3, "general": 1},
        "held_out_categories": ["translation"],
        "drop_code_blocks": True,
        "drop_mixed_languages": True,
    }
    result = mixed(config, "all")
    rows = rows_of(result, "data")
    train = [r for r in rows if r["split"] == "train"]
    origin = [json.loads(r["extra_json"])["mixed_from"] for r in train]
    assert (origin.count("reasoning"), origin.count("general")) == (28, 9) and len({r["row_id"] for r in rows}) == len(
        rows
    )
    assert {r["split"] for r in rows if r["category"] == "translation"} == {"test"} and sum(
        r["split"] == "validation" for r in rows
    ) == 2
    assert result["summary"]["dropped/code_block"] == 1 and result["summary"]["dropped/mixed_languages"] == 1
    again = mixed({**config, "total": 10}, "ten")
    # 2.5 and 7.5: the tie goes to the first label
    assert (again["summary"]["rows/general"], again["summary"]["rows/reasoning"]) == (3, 7)
    for wrong, text in (
        ({"weights": {"reasoning": 1}}, "one weight per input"),
        ({**config, "total": 100}, "total=37 or less"),
        ({"held_out_categories": ["poetry"]}, "the categories are: chat, math"),
        (
            {"weights": {"reasoning": 3, "general": 1}, "max_paragraph_chars": 3},
            "data.general, data.reasoning have no training row.*left out: 52 long_paragraph",
        ),
        ({"max_paragraph_chars": 3}, "have no training row"),
        (
            {"held_out_categories": ["math"], "weights": {"reasoning": 1, "general": 1}},
            "data.reasoning has no training row",
        ),
    ):
        with pytest.raises(Exception, match=text):
            mixed(wrong, "no")


def test_plain_text_is_mixed_by_characters(spec, tmp_path):
    """Shares of characters to within one document of each source; a document that is held out anywhere is trained on
    nowhere; short and long sources alike.
    """

    def write(name, texts, held_out=()):
        written(
            str(tmp_path / name),
            name,
            "text/1",
            [{"text": text, "split": "validation" if i in held_out else "train"} for i, text in enumerate(texts)],
            source=name,
        )
        return str(tmp_path / name)

    paths = {
        "maths": write("maths", [f"sum {i} " + "1" * (i % 40) for i in range(200)]),
        "code": write("code", [f"x{i} = " + "y" * (400 + i) for i in range(20)], held_out=[0]),
        "web": write("web", ["sum 7 " + "1" * 7, f"x0 = {'y' * 400}", *(f"page {i}" for i in range(300))]),
    }

    def mixed(config, name, **more):
        made = spec("mix", config, {}, name)
        made["inputs"] = {
            f"data.{k}": {"kind": "dataset", "path": v, "ref": k, "digest": k} for k, v in {**paths, **more}.items()
        }
        return execute(made, silent)

    result = mixed({"weights": {"maths": 5, "code": 3, "web": 2}, "total": 4000}, "text")
    rows = rows_of(result, "data")
    train = [row for row in rows if row["split"] == "train"]
    sources = {name: [row for row in train if json.loads(row["extra_json"])["mixed_from"] == name] for name in paths}
    for name, quota in (("maths", 2000), ("code", 1200), ("web", 800)):
        filled = sum(len(row["text"]) for row in sources[name])
        assert (
            quota - 420 < filled <= quota
            and filled == result["summary"][f"characters/{name}"]
            and len(sources[name]) == result["summary"][f"rows/{name}"]
        ), name
    assert (
        result["summary"]["dropped/held_out_elsewhere"] == 1
        and result["summary"]["dropped/duplicate_row"] == 1
        and result["summary"]["held_out"] == 1
    )
    assert (
        len({row["text"] for row in rows}) == len(rows)
        and open_dataset(result["outputs"]["data"]["path"]).kind == "text/1"
    )
    whole = mixed({}, "sizes")["summary"]
    assert sum(whole[f"rows/{name}"] for name in paths) == 200 + 19 + 300
    # a document of code is longer than its 200 characters
    missed = mixed({"weights": {"maths": 1, "code": 1, "web": 1}, "total": 600}, "missed")
    assert missed["summary"]["characters/code"] == 0 and [
        w["text"]
        for w in missed["warnings"]
        if w["code"] == "shares_missed" and "code has 0 of 200 characters" in w["text"]
    ]
    with pytest.raises(Exception, match="no document fits into its share of total=3"):
        mixed({"total": 3}, "none")
    written(
        str(tmp_path / "talk"),
        "talk",
        "demonstrations/1",
        [
            {
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "train_turns": [1],
                "kept": True,
            }
        ],
        dataset="t",
    )
    for config, more, text in (
        ({}, {"talk": str(tmp_path / "talk")}, "sources of one kind"),
        ({"drop_code_blocks": True}, {}, "is for demonstrations"),
        ({"weights": {"maths": 1, "code": 1, "web": 1}, "total": 30_000}, {}, "characters would come from"),
    ):
        with pytest.raises(Exception, match=text):
            mixed(config, "no", **more)


# -- candidates scored again, and as many as are drawn -----------------------------------------------------------------

LENGTH = [{"name": "length", "kind": "length", "max_length": 12, "cache_length": 12}]
SHORT = [
    {
        "name": "short",
        "kind": "python",
        "source": (
            "def score(prompt, completion, answer):\n    return None if 'e' in completion else -len(completion)\n"
        ),
    }
]


def test_candidates_are_scored_again_by_other_rewards(spec, tiny, data):
    """What was sampled stays to the last token; scores, verdicts and what is kept are those of sampling under the new
    rewards; the selection goes by them.
    """
    first, _ = sampled(spec, tiny, data, {"rewards": LENGTH}, "first")
    direct, _ = sampled(spec, tiny, data, {"rewards": SHORT, "allow_empty": True}, "direct")
    again, _ = sampled(
        spec,
        tiny,
        data,
        {"rewards": SHORT, "rescore": True, "allow_empty": True},
        "again",
        candidates=first["outputs"]["candidates"]["path"],
    )
    same = (
        "prompt_id",
        "prompt_idx",
        "completion_idx",
        "completion",
        "scores",
        "reward",
        "correct",
        "kept",
        "drop_reason",
        "split",
        "extra_json",
    )
    assert [[row[name] for name in same] for row in rows_of(again)] == [
        [row[name] for name in same] for row in rows_of(direct)
    ]
    assert {row["drop_reason"] for row in rows_of(again)} >= {"unscorable", None} and [
        row["gen"] for row in rows_of(again)
    ] == [row["gen"] for row in rows_of(first)]
    assert (
        [row["messages"] for row in rows_of(again, "selected")]
        == [row["messages"] for row in rows_of(direct, "selected")]
        != [row["messages"] for row in rows_of(first, "selected")]
    )

    best, _ = sampled(
        spec,
        tiny,
        data,
        {"rewards": SHORT, "rescore": True, "rescore_best": 2, "allow_empty": True},
        "best",
        candidates=first["outputs"]["candidates"]["path"],
    )
    groups = {}
    for row in rows_of(first):
        groups.setdefault(row["prompt_id"], []).append(row)
    expected = [
        (row["prompt_id"], row["completion_idx"])
        for rows in groups.values()
        for row in sorted(
            sorted((r for r in rows if r["kept"]), key=lambda r: -r["reward"])[:2], key=lambda r: r["completion_idx"]
        )
    ]
    assert [(row["prompt_id"], row["completion_idx"]) for row in rows_of(best)] == expected and 0 < len(expected) < len(
        rows_of(first)
    )

    several, made = sampled(
        spec,
        tiny,
        data,
        {"rewards": SHORT, "rescore": True, "allow_empty": True},
        "several",
        **{f"candidates.{n}": one["outputs"]["candidates"]["path"] for n, one in (("a", first), ("b", best))},
    )
    assert len(rows_of(several)) == len(rows_of(first)) + len(rows_of(best)) and len(
        {(row["prompt_idx"], row["completion_idx"]) for row in rows_of(several)}
    ) == len(rows_of(several))


def test_candidates_without_token_ids_are_scored_by_their_text(spec, tiny, data):
    """Ingested candidates, those of stages that keep texts, and those of a model with another tokenizer: a reward model
    that reads token ids reads the text's, a length is that of the text; what was cut or never answered is not taken for
    a complete answer."""
    from stages.pairs import trim
    from stages.reward_models.reward_scorers import Response, load_scorer

    renderer = renderer_for(tiny["policy"])
    prompts = [row for row in open_dataset(data["prompts"]).iter_rows() if row["split"] == "train"][:2]
    answers = [
        ("one and two", {}, True, None),
        ("three", {}, True, None),
        ("four five six", {"completion_ids": [5, 9, 2, 7], "finish_reason": "eos"}, True, None),
        ("cut of", {}, False, "truncated"),
        ("", {}, False, "engine_error"),
        ("seven", {"completion_ids": [10**6], "finish_reason": "eos"}, True, None),
    ]
    path = str(Path(data["prompts"]).parent / "texts")
    written(
        path,
        "texts",
        "candidates/1",
        [
            {
                "prompt": row["prompt"],
                "prompt_idx": i,
                "completion_idx": k,
                "completion": [{"role": "assistant", "content": text}],
                "scores": [],
                "reward": 0.0,
                "kept": kept,
                "drop_reason": reason,
                "extra_json": json.dumps(extra),
            }
            for i, row in enumerate(prompts)
            for k, (text, extra, kept, reason) in enumerate(answers)
        ],
    )
    rewards = [
        {"name": "rm", "kind": "model"},
        {"name": "short", "kind": "length_penalty", "length_alpha": 1.0, "weight": 0.0},
    ]
    made = spec(
        "rejection",
        {"rewards": rewards, "rescore": True},
        {"model": tiny["policy"], "prompts": data["prompts"], "reward_model": tiny["reward"]},
        "texts",
    )
    made["inputs"]["candidates"] = {"kind": "dataset", "path": path, "ref": "c", "digest": "c"}
    found = rows_of(execute(made, silent))
    assert [row["drop_reason"] for row in found] == [None, None, None, "truncated", "engine_error", None] * 2
    kept = [row for row in found if row["kept"]]
    expected = load_scorer(tiny["reward"]).score([Response(row["prompt"], row["completion"]) for row in kept])
    assert [row["reward"] for row in kept] == pytest.approx(expected) and len(
        {round(value, 4) for value in expected[:4]}
    ) == 4, "the prompt alone would give all of them one score"
    tokens = [len(trim(*renderer.completion_ids(row["prompt"], row["completion"])[1:])[0]) for row in kept]
    assert [{one["source"]: one["value"] for one in row["scores"]}["short"] for row in kept] == [-n for n in tokens]


def test_candidates_of_two_runs_in_one_file_are_not_taken_for_one(spec, tiny, data, tmp_path):
    """Rows with one place in the matrix would replace each other; no verdict is no wrong answer in the share of right
    ones, and a task stays one that mix can hold out.
    """

    def candidates(name, rows):
        written(
            str(tmp_path / name),
            name,
            "candidates/1",
            [
                {
                    "prompt": [{"role": "user", "content": text}],
                    "prompt_idx": i,
                    "completion_idx": k,
                    "completion": [{"role": "assistant", "content": f"{text} {k}"}],
                    "scores": [],
                    "reward": 1.0 if kept else None,
                    "correct": correct,
                    "kept": kept,
                    "drop_reason": None if kept else "engine_error",
                    "extra_json": json.dumps({"category": "sums"}),
                }
                for text, i, k, correct, kept in rows
            ],
            origin="ai",
        )
        return str(tmp_path / name)

    for name, second, message in (
        ("two", ("b", 0, 1), "two prompts with prompt_idx=0"),
        ("same", ("a", 0, 0), "two rows for completion_idx=0 of prompt_idx=0"),
    ):
        path = candidates(name, [("a", 0, 0, True, True), (*second, True, True)])
        for config in ({}, {"rescore": True}):
            with pytest.raises(ConfigError, match=f"{message}.*candidates.A="):
                sampled(spec, tiny, data, {"rewards": LENGTH, **config}, name, candidates=path)
    result, _ = sampled(
        spec,
        tiny,
        data,
        {"rewards": LENGTH},
        "good",
        candidates=candidates(
            "good",
            [("a", 0, 0, True, True), ("a", 0, 1, None, False), ("b", 1, 0, False, True), ("b", 1, 1, None, False)],
        ),
    )
    assert result["summary"]["correct/mean"] == 0.5 and result["summary"]["failed"] == 2
    assert [row["category"] for row in rows_of(result, "selected")] == ["sums", "sums"]


def test_scoring_again_needs_candidates_and_their_prompts(spec, tiny, data):
    with pytest.raises(ValueError, match="candidates.LABEL=REF, or write rescore=false"):
        sampled(spec, tiny, data, {"rewards": LENGTH, "rescore": True}, "nothing")
    first, _ = sampled(spec, tiny, data, {"rewards": LENGTH}, "first")
    path = str(Path(data["prompts"]).parent / "others")
    written(path, "others", "prompts/1", [{"prompt": [{"role": "user", "content": "who?"}]}], dataset="o")
    with pytest.raises(ValueError, match="lacks 12 prompts of the candidates"):
        sampled(
            spec,
            tiny,
            {"prompts": path},
            {"rewards": LENGTH, "rescore": True},
            "others",
            candidates=first["outputs"]["candidates"]["path"],
        )
    with pytest.raises(ValueError, match="write rescore=true with it"):
        sampled(spec, tiny, data, {"rescore_best": 2}, "best")


def test_a_killed_scoring_ends_with_the_same_bytes(spec, tiny, data, forks):
    from storage.files import tree_digest

    first, _ = sampled(spec, tiny, data, {"rewards": LENGTH, "num_generations": 8}, "first")
    config = {"rewards": SHORT, "rescore": True, "block": 1, "allow_empty": True}

    def asked(name):
        made = spec("rejection", config, {"model": tiny["policy"], "prompts": data["prompts"]}, name)
        made["inputs"]["candidates"] = {
            "kind": "dataset",
            "path": first["outputs"]["candidates"]["path"],
            "ref": "c",
            "digest": "c",
        }
        Path(spec.path(name)).write_text(json.dumps(made))
        return made

    whole, killed = asked("whole"), asked("killed")
    execute(whole, silent)
    parts = Path(killed["workdir"], "checkpoints")
    forks.start(spec.path("killed")).kill_when(lambda: any(parts.glob("step-*3")))
    assert not Path(killed["workdir"], "result.json").exists()
    forks.run(spec.path("killed"))
    result = json.loads(Path(killed["workdir"], "result.json").read_text())
    assert result["resumed_from"] >= 3
    for name in ("candidates", "selected"):
        assert tree_digest(Path(killed["workdir"], "out", name)) == tree_digest(Path(whole["workdir"], "out", name)), (
            name
        )


def test_the_number_of_completions_is_drawn_prompt_by_prompt(spec, tiny, data):
    """Between min_generations and num_generations, every number; each completion is the one of that index where all are
    sampled.
    """
    drawn, _ = sampled(
        spec, tiny, data, {"rewards": LENGTH, "num_generations": 5, "min_generations": 2, "max_prompts": 40}, "drawn"
    )
    every, _ = sampled(spec, tiny, data, {"rewards": LENGTH, "num_generations": 5, "max_prompts": 40}, "every")
    counts, whole = {}, {(row["prompt_id"], row["completion_idx"]): row for row in rows_of(every)}
    for row in rows_of(drawn):
        assert (
            row["completion_idx"] == counts.get(row["prompt_id"], 0)
            and row["completion"] == whole[row["prompt_id"], row["completion_idx"]]["completion"]
        )
        counts[row["prompt_id"]] = row["completion_idx"] + 1
    assert (
        set(counts.values()) == {2, 3, 4, 5}
        and open_dataset(drawn["outputs"]["candidates"]["path"]).manifest["counts"]["completions"]
        == sum(counts.values())
        == drawn["summary"]["completions"]
    )
    with pytest.raises(ValueError, match="min_generations=9 is above num_generations=4"):
        sampled(spec, tiny, data, {"min_generations": 9}, "wrong")
