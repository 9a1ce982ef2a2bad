"""Candidates to preferences, curricula, and the selections of ReST: stages on made-up candidates."""

import json
import math

import numpy as np
import pytest

from stages import rejection
from stages.candidates import sampling, selecting
from stages.harness import execute
from stages.preferences import Config
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import BESIDE, assistant, beside, silent, user


@pytest.fixture()
def candidates(tmp_path):
    """candidates(rewards per prompt, correct=..., kept=..., texts=..., splits=..., other columns) -> path."""

    def make(rewards, correct=None, kept=None, texts=None, name="candidates", splits=None, **columns):
        rows = [
            complete_row(
                "candidates/1",
                {
                    "prompt": user(f"prompt {i}"),
                    "prompt_idx": i,
                    "completion_idx": j,
                    "completion": assistant(texts[i][j] if texts else f"answer {j}"),
                    "scores": [],
                    "reward": r,
                    "correct": None if correct is None else correct[i][j],
                    "kept": True if kept is None else kept[i][j],
                    "extra_json": "{}",
                    **columns,
                    "split": splits[i] if splits else "train",
                },
                dataset="made",
                source="s",
                origin="ai",
            )
            for i, row in enumerate(rewards)
            for j, r in enumerate(row)
        ]
        path = str(tmp_path / name)
        write_dataset(path, name, "candidates/1", rows)
        return path

    return make


@pytest.fixture()
def build(tmp_path):
    """build(config, path or {label: path}, stage="preferences") -> (result, rows)."""
    count = iter(range(100))

    def run(config, given, stage="preferences"):
        given = given if isinstance(given, dict) else {"": given}
        key = "candidates" if stage == "preferences" else "data"
        inputs = {
            f"{key}.{k}" if k else key: {"kind": "dataset", "path": v, "ref": k, "digest": f"d{k}"}
            for k, v in given.items()
        }
        if stage == "preferences":
            config = {"validation_fraction": 0.0, **config}
        result = execute(
            {
                "stage": stage,
                "key": "t",
                "config": config,
                "seed": 3,
                "device": "cpu",
                "inputs": inputs,
                "workdir": str(tmp_path / f"w{next(count)}"),
            },
            silent,
        )
        return result, list(open_dataset(result["outputs"]["data"]["path"]).iter_rows())

    return run


def answers(row, *columns):
    return tuple(row[c][0]["content"] for c in columns)


def test_best_vs_worst_and_what_gives_no_pair(candidates, build):
    """The catalogue's matrix (da.online_dpo/best_vs_worst), a cut answer that would have been the best, and equal
    texts.
    """
    path = candidates(
        [[0.2, 0.9, 0.9, 0.1], [0.5, 0.5, 0.5, 0.5], [None, 0.3, 0.7, None], [9.0, 0.1, 0.2, 0.3]],
        kept=[[True] * 4, [True] * 4, [True] * 4, [False, True, True, True]],
        texts=[list("abcd"), list("abcd"), list("abcd"), ["x", "same", "b", "same"]],
    )
    result, rows = build({}, path)
    assert [answers(r, "chosen", "rejected") for r in rows] == [("b", "d"), ("c", "b"), ("b", "same")]
    assert [r["margin"] for r in rows] == pytest.approx([0.8, 0.4, 0.1])
    assert result["summary"]["prompts_without"] == 1 and result["summary"]["unusable"] == 4
    assert "label_prob" in rows[0] and rows[0]["label_prob"] is None


@pytest.fixture()
def cut(candidates):
    """Three prompts of four answers whose second was cut: it has the worst, the best and a middle reward. One more was
    cut before its first word."""
    path = candidates(
        [[0.5, 0.1, 0.9, 0.3], [0.5, 0.9, 0.2, 0.3], [0.6, 0.4, 0.6, 0.2, 0.0]],
        correct=[[True, False, True, False], [True, True, False, False], [True, None, True, False, False]],
        kept=[[True, False, True, True], [True, False, True, True], [True, False, True, True, False]],
        texts=[["answer 0", "answer 1", "answer 2", "answer 3", ""]] * 3,
    )
    rows = [{**r, "drop_reason": None if r["kept"] else "truncated"} for r in open_dataset(path).iter_rows()]
    write_dataset(path + "-cut", "cut", "candidates/1", rows)
    return path + "-cut"


@pytest.mark.parametrize(
    "config,pairs",
    [
        ({}, "21 02 03"),
        ({"select": "all"}, "01 03 20 21 23 31 02 03 32 01 03 21 23"),
        ({"select": "gap", "eta": 0.6}, "21 23"),
        ({"select": "correct_vs_incorrect"}, "01 03 21 23 02 03 03 23"),
        ({"select": "correct_vs_incorrect", "max_pairs_per_prompt": 1}, "01 02 03"),
    ],
)
def test_a_cut_answer_may_be_rejected_and_is_never_chosen(cut, build, config, pairs):
    """Only where it is asked for; the row says so, and the counts how often."""
    result, rows = build({**config, "allow_truncated_rejected": True}, cut)
    assert " ".join("".join(a[-1] for a in answers(r, "chosen", "rejected")) for r in rows) == pairs
    said = [json.loads(r["extra_json"]).get("cut_answers") for r in rows]
    assert said == [["rejected"] if pair[1] == "1" else None for pair in pairs.split()]
    summary = result["summary"]
    assert (summary["truncated"], summary["truncated_rejected"]) == (3, said.count(["rejected"]))
    without, plain = build(config, cut)
    assert all("1" not in a for r in plain for a in answers(r, "chosen", "rejected"))
    assert not any("truncated" in name for name in without["summary"]) and without["summary"]["unusable"] == 4


def test_a_cut_answer_may_be_labelled_bad_and_is_never_good(cut, build):
    for config, labels in (
        ({"threshold": 0.45}, "0T 1F 2T 3F 0T 2F 3F 0T 1F 2T 3F"),
        ({}, "0T 1F 2T 3F 0T 2F 3F 0T 2T 3F"),
    ):
        _, rows = build({"kind": "unpaired/1", "allow_truncated_rejected": True, **config}, cut)
        assert " ".join(answers(r, "completion")[0][-1] + "FT"[r["label"]] for r in rows) == labels
        said = [json.loads(r["extra_json"]).get("cut_answers") for r in rows]
        assert said == [["completion"] if label[0] == "1" else None for label in labels.split()]
    with pytest.raises(ValueError, match="a ranking has no rejected side.*write kind=pairs/1"):
        Config(kind="rankings/1", allow_truncated_rejected=True)


def test_nothing_but_cut_answers_gives_no_pair_and_says_so(cut, build):
    rows = [row for row in open_dataset(cut).iter_rows() if row["drop_reason"]]
    write_dataset(cut + "-only", "cut", "candidates/1", rows)
    with pytest.raises(ValueError, match="all of them were cut, and a cut one is never chosen.*max_completion_length"):
        build({"select": "all", "allow_truncated_rejected": True}, cut + "-only")


def test_rso_never_prefers_a_cut_answer(candidates, build):
    path = candidates([[0.1, 0.2, 0.3, 0.4]] * 20, kept=[[True, False, True, False]] * 20)
    rows = [{**r, "drop_reason": None if r["kept"] else "truncated"} for r in open_dataset(path).iter_rows()]
    write_dataset(path + "-cut", "cut", "candidates/1", rows)
    config = {"select": "rso", "rso_accept": 3, "rso_pairs": "tournament", "rso_beta": 10.0}
    _, rows = build({**config, "allow_truncated_rejected": True}, path + "-cut")
    assert {answers(r, "chosen")[0] for r in rows} == {"answer 2"}
    assert {answers(r, "rejected")[0] for r in rows} == {"answer 0", "answer 1"}


def test_a_cut_answer_is_trained_without_an_end_token(tiny, cut, build, spec):
    """By every stage that reads pairs or labels, and where rows are converted on the way; the other rows are the same to
    the bit, and both stages train."""
    from collections import Counter

    from stages.align import Config as AlignConfig
    from stages.algorithms import DIRECT_METHODS
    from stages.chat import renderer_for
    from stages.direct.preference_items import Encoder, rows_as
    from stages.pairs import encode_pairs, ended_of
    from stages.reward_model import Config as RewardConfig
    from stages.reward_models.reward_data import encode
    from stages.reward_models.reward_eval import answers_of
    from stages.reward_models.reward_heads import ChatReader
    from stages.reward_models.reward_objectives import REWARD_OBJECTIVES
    from stages.reward_models.reward_scorers import load_scorer

    renderer, lost, found = renderer_for(tiny["policy"]), Counter(), {}
    for kind, methods, objective in (("pairs/1", ("dpo", "kto"), "bt"), ("unpaired/1", ("kto",), "pointwise_bce")):
        more = {"threshold": 0.45} if kind == "unpaired/1" else {"select": "all"}
        result, rows = build({"kind": kind, "allow_truncated_rejected": True, **more}, cut)
        path = result["outputs"]["data"]["path"]
        # the same rows as if no answer had been cut
        whole = path + "-whole"
        write_dataset(whole, "whole", kind, [{**r, "extra_json": "{}"} for r in rows])
        ends = {r["row_id"]: r["extra_json"].count("cut_answers") == 0 for r in rows}
        assert 0 < sum(ends.values()) < len(ends)
        for method in methods:
            config = AlignConfig(method=method, max_length=96)
            found[kind, method] = [
                Encoder(renderer, DIRECT_METHODS[method], config, lambda *_: np.random.default_rng(0))(data, "train")
                for data in map(open_dataset, (path, whole))
            ]
        reader = ChatReader(renderer, 96)
        found[kind, objective] = [
            encode(REWARD_OBJECTIVES[objective], data, "train", reader, RewardConfig(objective=objective), lost)
            for data in map(open_dataset, (path, whole))
        ]
        if kind == "pairs/1":
            found[kind, "read"] = [encode_pairs(open_dataset(p), "train", renderer, 96)[0] for p in (path, whole)]
            ranked = list(rows_as(open_dataset(path), "train", "rankings/1", lost))
            assert lost["cut_answer"] == len(ends) - sum(ends.values())
            assert ranked and not any(assistant("answer 1") in r["completions"] for r in ranked)
        else:
            paired = list(rows_as(open_dataset(path), "train", "pairs/1"))
            assert [ended_of(r, "chosen", "rejected") for r in paired] == [
                [True, answers(r, "rejected") != ("answer 1",)] for r in paired
            ]
            assert not all(all(ended_of(r, "rejected")) for r in paired)
        for stage, config in (("align", {"method": methods[-1]}), ("reward_model", {"objective": objective})):
            given = {"model": tiny["policy"], "data": path}
            made = execute(
                spec(stage, {"max_steps": 1, "max_length": 96, **config}, given, f"{stage}-{kind[:4]}"), silent
            )
            assert made["summary"]["skipped_steps"] == 0
        if kind == "pairs/1":
            read = load_scorer(made["outputs"]["model"]["path"])._item
            both = [answers_of(row) for row in rows]
            assert [[read(a).responses[0][-1] in renderer.stop_ids for a in pair] for pair in both] == [
                [True, ends[row["row_id"]]] for row in rows
            ]
    for items, before in found.values():
        assert len(items) == len(before)
        cut_short = 0
        for item, other in zip(items, before):
            for ids, mask, own, own_mask in zip(item.responses, item.masks, other.responses, other.masks):
                assert own[-1] in renderer.stop_ids
                if len(ids) == len(own):
                    assert list(ids) == list(own) and list(mask) == list(own_mask)
                    continue
                assert renderer.decode(ids) == "answer 1" and list(ids) == list(own[:-1]) and all(mask)
                cut_short += 1
        assert cut_short and len(items) > 1


def test_best_against_a_random_lower_one(candidates, build):
    """synth.onpolicy_pairs: chosen is the best; rejected is drawn among the lower ones, the same in every run; equal
    rewards give no pair.
    """
    path = candidates([[0.1, 0.9, 0.5, 0.9, 0.3]] * 40 + [[0.5, 0.5]])
    _, rows = build({"select": "best_vs_random"}, path)
    assert len(rows) == 40 and {answers(r, "chosen")[0] for r in rows} == {"answer 1"}
    assert {answers(r, "rejected")[0] for r in rows} == {"answer 0", "answer 2", "answer 4"}
    assert [answers(r, "rejected") for r in build({"select": "best_vs_random"}, path)[1]] == [
        answers(r, "rejected") for r in rows
    ]


def test_rankings_of_the_best_and_the_worst_keep_their_scores(candidates, build):
    """SPPO trains on two of K answers with the win probabilities that they have among all (vector
    sppo_pair_selection).
    """
    path = candidates([[0.9, 0.9, 0.1], [0.2, 0.2, 0.2], [0.4, 0.7, 0.5]])
    _, rows = build({"kind": "rankings/1", "members": "best_and_worst"}, path)
    assert [[c[0]["content"] for c in r["completions"]] for r in rows] == [
        ["answer 0", "answer 2"],
        ["answer 1", "answer 0"],
    ]
    assert [(r["scores"], r["ranks"]) for r in rows] == [([0.9, 0.1], [0, 1]), ([0.7, 0.4], [0, 1])]
    assert len(build({"kind": "rankings/1"}, path)[1][0]["completions"]) == 3
    with pytest.raises(ValueError, match="write kind=rankings/1"):
        Config(members="best_and_worst")


def test_gap_pairs_cap_and_soft_labels(candidates, build):
    path = candidates([[0.0, 1.0, 3.0, 5.0]])
    _, rows = build({"select": "gap", "eta": 0.85, "soft_labels": True}, path)
    expected = [
        (i, j)
        for i in range(4)
        for j in range(4)
        if 1 / (1 + math.exp([0.0, 1.0, 3.0, 5.0][j] - [0.0, 1.0, 3.0, 5.0][i])) > 0.85
    ]
    assert [answers(r, "chosen", "rejected") for r in rows] == [(f"answer {i}", f"answer {j}") for i, j in expected]
    assert all(
        r["label_prob"] == pytest.approx(1 / (1 + math.exp(-r["margin"]))) and r["label_prob"] > 0.85 for r in rows
    )
    assert len(build({"select": "gap", "max_pairs_per_prompt": 2}, path)[1]) == 2


def test_rso_pairs_come_from_accepted_candidates(candidates, build):
    rewards = [[float(j % 16) / 4 for j in range(32)]] * 3 + [[1.0] * 4]
    result, rows = build({"select": "rso", "rso_accept": 8, "rso_beta": 1e-6}, candidates(rewards))
    used = {s for r in rows for s in (r["chosen_score"], r["rejected_score"])}
    assert used <= {3.75, 3.5, 3.25, 3.0} and all(r["margin"] > 0 for r in rows)  # beta -> 0 takes the 8 best
    summary = result["summary"]
    assert (
        summary["accepted"] == 24
        and summary["too_few"] == 1
        and "too_few_to_accept" in [w["code"] for w in result["warnings"]]
    )
    assert summary["passes_per_prompt"] == 4, "two candidates share each of the four best rewards"
    assert summary["acceptance_rate"] == pytest.approx(8 / (32 + 30 + 28 + 26)), (
        "of the draws: each pass over those that are left, two fewer each time"
    )
    loose, _ = build({"select": "rso", "rso_accept": 8, "rso_beta": 1e6}, candidates(rewards, name="loose"))
    assert loose["summary"]["acceptance_rate"] > 0.99 and loose["summary"]["passes_per_prompt"] == 1
    again, _ = build({"select": "rso", "rso_accept": 8, "rso_beta": 1e-6}, candidates(rewards, name="again"))
    assert again["outputs"]["data"]["digest"] == result["outputs"]["data"]["digest"]
    _, knocked = build(
        {"select": "rso", "rso_accept": 8, "rso_beta": 1e6, "rso_pairs": "tournament"},
        candidates([[0.1 * j for j in range(8)]], name="eight"),
    )
    assert len(knocked) == 7 and sum(answers(r, "chosen") == ("answer 7",) for r in knocked) == 3


def test_correct_against_incorrect_rankings_labels_and_joined_sets(candidates, build):
    path = candidates([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]], correct=[[False, True, True], [True, True, True]])
    _, rows = build({"select": "correct_vs_incorrect"}, path)
    assert [answers(r, "chosen", "rejected") for r in rows] == [("answer 1", "answer 0"), ("answer 2", "answer 0")]
    made = {row["row_id"]: row["completion"] for row in open_dataset(path).iter_rows()}
    for row in rows:
        assert [made[one] for one in json.loads(row["extra_json"])["row_ids"]] == [row["chosen"], row["rejected"]]
    _, rows = build({"kind": "rankings/1"}, path)
    assert rows[0]["ranks"] == [1, 0, 0] and rows[0]["scores"] == [0.0, 1.0, 1.0] and len(rows) == 1
    ids = [row["row_id"] for row in open_dataset(path).iter_rows()]
    assert json.loads(rows[0]["extra_json"]) == {"from": "candidates/1", "row_ids": ids[:3]}
    _, rows = build({"kind": "unpaired/1"}, path)
    assert [r["label"] for r in rows] == [False, True, True, True, True, True]
    assert [json.loads(r["extra_json"])["row_ids"] for r in rows] == [[one] for one in ids]
    assert {r["origin"] for r in rows} == {"verifier"}
    assert {r["origin"] for r in build({"kind": "unpaired/1", "threshold": 0.5}, path)[1]} == {"ai"}
    teacher = candidates(
        [[5.0], [0.5]], correct=[[True], [False]], texts=[["teacher a"], ["teacher b"]], name="teacher"
    )
    _, rows = build({}, {"policy": path, "teacher": teacher})
    assert [answers(r, "chosen", "rejected") for r in rows] == [("teacher a", "answer 0"), ("answer 0", "teacher b")]


def test_generated_rows_stay_in_the_split_of_their_prompt(tiny, data, spec, candidates, build):
    """A validation part comes out of the training prompts, those that ingest left in train too; rows of held-out
    prompts never become training rows.
    """
    from stages.ingestion.curation import split_of
    from storage.schema import prompt_id

    fractions = {"train": 0.85, "validation": 0.05, "test": 0.1}
    given = [split_of(prompt_id(user(f"prompt {i}")), "split-v1", fractions) for i in range(300)]

    def selected(path, **config):
        made = spec("rejection", config, {"model": tiny["policy"], "prompts": data["prompts"]}, f"r{len(config)}")
        made["inputs"]["candidates"] = {"kind": "dataset", "path": path, "ref": "c", "digest": "c"}
        return list(open_dataset(execute(made, silent)["outputs"]["selected"]["path"]).iter_rows())

    split = lambda rows: [r["split"] for r in rows]
    mixed = candidates([[0.0, 1.0]] * 300, splits=given)
    assert (
        split(build({"validation_fraction": 0.05}, mixed)[1])
        == split(selected(mixed))
        == split(selected(mixed, validation_fraction=0.05))
        == given
    )
    only = candidates(
        [[0.0, 1.0] if s == "train" else [0.0] for s in given],
        kept=[[True, s == "train"][: 1 + (s == "train")] for s in given],
        name="train",
    )
    pairs, chosen = (
        split(build({"validation_fraction": 0.05}, only)[1]),
        split(selected(only, validation_fraction=0.05, select="top_k_per_prompt")),
    )
    assert (
        len(pairs) == given.count("train")
        and 3 <= pairs.count("validation") <= 30
        and set(pairs) == {"train", "validation"}
        and "validation" in chosen
    )
    tests = candidates([[0.0, 1.0]] * 40, splits=["test"] * 40, name="test")
    assert set(split(build({"validation_fraction": 0.05}, tests)[1])) == set(split(selected(tests))) == {"test"}
    joined = build(
        {}, {"a": candidates([[0.0]], name="a"), "b": candidates([[1.0]], texts=[["other"]], splits=["test"], name="b")}
    )[1]
    assert split(joined) == ["test"]


def test_a_prompt_weighs_the_same_whatever_its_pairs_and_verdicts_have_no_margin(candidates, build):
    path = candidates(
        [[0.0, 1.0, 3.0], [0.0, 1.0, 1.0]], correct=[[True, False, False], [False, True, True]], weight=0.5
    )
    _, rows = build({"select": "all"}, path)
    assert [r["weight"] for r in rows] == pytest.approx([0.5 / 3] * 3 + [0.25] * 2)
    result, rows = build({"select": "correct_vs_incorrect"}, path)
    assert [(r["chosen_score"] - r["rejected_score"], r["margin"], r["label_prob"], r["weight"]) for r in rows] == [
        (-1.0, None, None, 0.25),
        (-3.0, None, None, 0.25),
        (1.0, None, None, 0.25),
        (1.0, None, None, 0.25),
    ]
    assert result["summary"]["reward_gap/mean"] == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="write soft_labels=false"):
        Config(select="correct_vs_incorrect", soft_labels=True)
    for kind, count in (("rankings/1", 2), ("unpaired/1", 6)):
        _, rows = build({"kind": kind}, path)
        assert [r["weight"] for r in rows] == [0.5] * count


@pytest.mark.parametrize(
    "config", [{"kind": "pairs/1"}, {"kind": "rankings/1"}, {"kind": "unpaired/1", "threshold": 0.5}]
)
def test_rows_say_what_their_candidates_agree_on_about_where_they_are_from(candidates, build, config):
    _, rows = build(config, candidates([[0.0, 1.0]], **BESIDE))
    assert beside(rows) == [BESIDE] * len(rows) and rows
    two = {
        name: candidates([[reward]], texts=[[name]], name=name, **BESIDE | {"license": name})
        for name, reward in (("mit", 0.0), ("cc0", 1.0))
    }
    _, rows = build(config, two)
    assert {row["license"] for row in rows} == ({"mit", "cc0"} if "threshold" in config else {None})
    assert {row["batch_id"] for row in rows} == {"week 3"}


def test_answers_of_several_messages_are_the_same_where_all_of_them_are(candidates, build, tmp_path):
    """Trajectories begin alike: with the same call, or with nothing but one."""
    rows = list(open_dataset(candidates([[0.0, 1.0, 2.0]])).iter_rows())
    for row, last in zip(rows, ("three", "four", "four")):
        row["completion"] = [*assistant("I look."), *user("a result"), *assistant(last)]
    path = str(tmp_path / "trajectories")
    write_dataset(path, "trajectories", "candidates/1", rows)
    result, (pair,) = build({}, path)
    assert (pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) == ("four", "three")
    assert result["summary"]["unusable"] == 1 and pair["chosen_score"] == 1.0


def test_a_mixture_trains_on_nothing_that_a_source_holds_out(tmp_path, build):
    rows = {
        "a": [("p", "x", "train"), ("p", "x", "train"), ("q", "x", "train"), ("r", "x", "test")],
        "b": [("p", "x", "train"), ("q", "y", "validation"), ("r", "y", "train"), ("s", "x", "train")],
    }
    for name, made in rows.items():
        write_dataset(
            str(tmp_path / name),
            name,
            "demonstrations/1",
            [
                complete_row(
                    "demonstrations/1",
                    {"messages": user(p) + assistant(x), "train_turns": [1]},
                    dataset=name,
                    source=name,
                    origin="human",
                    split=split,
                )
                for p, x, split in made
            ],
        )
    result, mixed = build({}, {name: str(tmp_path / name) for name in rows}, "mix")
    assert [(r["messages"][0]["content"], r["messages"][1]["content"], r["split"]) for r in mixed] == [
        ("p", "x", "train"),
        ("s", "x", "train"),
        ("r", "x", "test"),
        ("q", "y", "validation"),
    ]
    assert (result["summary"]["dropped/held_out_elsewhere"], result["summary"]["dropped/duplicate_row"]) == (2, 2)
    # a source that is left out neither takes a row from another one nor judges the mixture
    paths = {name: str(tmp_path / name) for name in rows}
    result, mixed = build({"weights": {"a": 0, "b": 1}}, paths, "mix")
    assert [(r["messages"][0]["content"], r["messages"][1]["content"], r["split"]) for r in mixed] == [
        ("p", "x", "train"),
        ("s", "x", "train"),
        ("q", "y", "validation"),
    ]
    assert {json.loads(r["extra_json"])["mixed_from"] for r in mixed} == {"b"}
    assert result["summary"]["dropped/weight_0"] == 1


def test_what_no_conversion_can_use_is_counted(tmp_path):
    from stages.direct.preference_items import rows_as

    def dropped(kind, want, rows):
        write_dataset(
            str(tmp_path / kind[:-2]),
            "d",
            kind,
            [complete_row(kind, row, dataset="d", source="s", origin="human") for row in rows],
        )
        counts = {"truncated": 0}
        return len(list(rows_as(open_dataset(str(tmp_path / kind[:-2])), "train", want, counts))), counts

    pair = {"prompt": user("p"), "chosen": assistant("x"), "rejected": assistant("y")}
    assert dropped("pairs/1", "unpaired/1", [{**pair, "label_prob": 0.5}, {**pair, "rejected": assistant("z")}]) == (
        2,
        {"truncated": 0, "all_tied": 1},
    )
    rated = [
        {"prompt": user(p), "completion": assistant(text), "score": score, "scale_min": 0.0, "scale_max": 1.0}
        for p, text, score in (("p", "x", 0.95), ("p", "y", 0.05), ("q", "x", 0.5), ("q", "y", 0.5))
    ]
    assert dropped("ratings/1", "pairs/1", rated) == (1, {"truncated": 0, "no_pair": 2})
    ranked = [
        {"prompt": user(p), "completions": [assistant("x"), assistant("y")], "ranks": ranks}
        for p, ranks in (("p", [0, 0]), ("q", [0, 1]))
    ]
    assert dropped("rankings/1", "pairs/1", ranked) == (1, {"truncated": 0, "all_tied": 1})


def test_a_token_belongs_to_the_segment_of_its_first_character():
    from types import SimpleNamespace

    from stages.direct.preference_items import token_spans

    renderer = SimpleNamespace(decode=lambda ids: "".join(["one", ". t", "wo", "."][i] for i in ids))
    assert token_spans(renderer, [0, 1, 2, 3], [{"start": 0, "end": 4}, {"start": 4, "end": 9}]) == [(0, 2), (2, 4)]


def test_nothing_to_learn_from_says_what_to_change(candidates, build):
    with pytest.raises(
        ValueError, match=r"\(none left aside\).*raise num_generations or temperature of the sampling\.$"
    ):
        build({}, candidates([[1.0, 1.0]]))
    with pytest.raises(
        ValueError,
        match=r"with 1 usable candidates \(1 not kept left aside\).*or take select=best_vs_worst, or a lower eta",
    ):
        build({"select": "gap"}, candidates([[1.0, 9.0]], kept=[[True, False]], name="cut"))
    with pytest.raises(
        ValueError,
        match=(
            r"0 usable candidates \(2 not kept left aside\) none is left; raise num_generations or temperature of the"
            r" sampling\.$"
        ),
    ):
        build({"kind": "unpaired/1"}, candidates([[1.0, 9.0]], kept=[[False, False]], name="left"))
    few = candidates([[0.0, 1.0, 2.0, 3.0], [0.5, 1.0]], name="few")
    with pytest.raises(
        ValueError,
        match=r"2 prompts have fewer than rso_accept=8 of them; write rso_accept=4 or less.*num_generations=64",
    ):
        build({"select": "rso"}, few)
    assert build({"select": "rso", "rso_accept": 4}, few)[0]["summary"]["too_few"] == 1
    with pytest.raises(ValueError, match="threshold=VALUE"):
        build({"kind": "unpaired/1"}, candidates([[1.0, 2.0]], name="plain"))
    assert Config().select == "best_vs_worst"


@pytest.mark.parametrize(
    "given,says",
    [
        ({"eta": 0.9}, "select=gap"),
        ({"tau": 2.0}, "soft_labels=true"),
        ({"rso_beta": 0.1, "select": "all"}, "select=rso"),
        ({"rso_accept": 4}, "select=rso"),
        ({"rso_pairs": "tournament"}, "select=rso"),
        ({"kind": "rankings/1", "select": "all"}, "kind=pairs/1"),
        ({"kind": "unpaired/1", "soft_labels": True}, "kind=pairs/1"),
        ({"max_pairs_per_prompt": 3}, "this select gives one pair"),
        ({"kind": "rankings/1", "max_pairs_per_prompt": 3}, "kind=pairs/1"),
        ({"threshold": 0.5}, "kind=unpaired/1"),
    ],
)
def test_settings_that_another_selection_reads_are_refused(given, says):
    with pytest.raises(ValueError, match=f"would change nothing.*{says}"):
        Config(**given)
    for whole in (
        Config(select="gap", eta=0.9, tau=2.0, max_pairs_per_prompt=3),
        Config(select="rso", rso_beta=0.1, rso_accept=4, rso_pairs="tournament", soft_labels=True, tau=2.0),
        Config(kind="unpaired/1", threshold=0.5),
        Config(kind="rankings/1", members="best_and_worst"),
    ):
        assert Config(**whole.model_dump()) == whole


# -- curricula ------------------------------------------------------------------------------------------------------


def pairs_file(path, n, held_out=0, **columns):
    rows = [
        complete_row(
            "pairs/1",
            {
                "prompt": user(f"p{i}"),
                "chosen": assistant("yes"),
                "rejected": assistant("no"),
                **{k: v[i] for k, v in columns.items()},
            },
            dataset="d",
            source="s",
            origin="human",
            split="validation" if i >= n - held_out else "train",
        )
        for i in range(n)
    ]
    write_dataset(str(path), "d", "pairs/1", rows)
    return str(path)


def test_sdpo_chunks_keep_the_order_and_curry_goes_from_easy_to_hard(tmp_path, build):
    result, rows = build({"order": "given", "stages": 3}, pairs_file(tmp_path / "a", 12, held_out=2), "curriculum")
    assert [r["stage_index"] for r in rows] == [0] * 4 + [1] * 3 + [2] * 3 + [None] * 2
    assert [r["prompt"][0]["content"] for r in rows] == [f"p{i}" for i in range(12)] and result["summary"][
        "stages"
    ] == 3
    _, rows = build(
        {"order": "margin", "stages": 2}, pairs_file(tmp_path / "b", 5, margin=[0.1, 2.0, None, 1.0, 0.5]), "curriculum"
    )
    assert [(r["margin"], r["stage_index"]) for r in rows] == [(2.0, 0), (1.0, 0), (0.5, 1), (0.1, 1)]
    judged = pairs_file(tmp_path / "j", 5, label_prob=[0.6, 0.9, None, 0.5, 0.2])
    result, rows = build({"order": "confidence", "stages": 2}, judged, "curriculum")
    assert [(r["label_prob"], r["stage_index"]) for r in rows] == [(0.9, 0), (0.2, 0), (0.6, 1), (0.5, 1)]
    assert result["summary"]["dropped"] == 1 and not result["warnings"]
    with pytest.raises(ValueError, match="write order=confidence where labels are probabilities"):
        build({"order": "margin"}, judged, "curriculum")
    with pytest.raises(ValueError, match="needs pairs with label_prob"):
        build({"order": "confidence"}, str(tmp_path / "b"), "curriculum")
    mixed = {"margin": [0.1, None, None], "strength": [None, 3, None], "chosen_score": [None, None, 9.0]}
    mixed["rejected_score"] = mixed["chosen_score"]
    result, _ = build({"order": "margin"}, pairs_file(tmp_path / "m", 3, **mixed), "curriculum")
    (warning,) = result["warnings"]
    assert warning["code"] == "measures_mixed" and warning["text"].startswith(
        "1 pairs are ordered by a margin, 1 pairs are ordered by a strength, 1 pairs are ordered by scores:"
    )
    rankings = [
        complete_row(
            "rankings/1",
            {"prompt": user(f"r{i}"), "completions": [assistant(t) for t in "abcd"], "ranks": [2, 1, 4, 3]},
            dataset="d",
            source="s",
            origin="human",
        )
        for i in range(2)
    ]
    write_dataset(str(tmp_path / "c"), "d", "rankings/1", rankings)
    _, rows = build({"order": "rank_gap", "stages": 9}, str(tmp_path / "c"), "curriculum")
    assert [(*answers(r, "chosen", "rejected"), r["stage_index"], r["rank_gap"]) for r in rows[:3]] == [
        ("b", "c", 0, 3),
        ("b", "d", 1, 2),
        ("b", "a", 2, 1),
    ]
    _, rows = build(
        {"order": "rank_gap", "stages": 2, "pairing": "all_pairs_by_gap"}, str(tmp_path / "c"), "curriculum"
    )
    assert {r["stage_index"]: sum(q["stage_index"] == r["stage_index"] for q in rows) for r in rows} == {0: 2, 1: 10}
    with pytest.raises(ValueError, match="order=rank_gap does not fit"):
        build({"order": "rank_gap"}, str(tmp_path / "a"), "curriculum")
    with pytest.raises(ValueError, match="order=given"):
        build({"order": "margin"}, str(tmp_path / "a"), "curriculum")


@pytest.mark.parametrize(
    "pairing, stages",
    [
        ("best_vs_k", {("a", "d"): 0, ("a", "c"): 1, ("a", "b"): 2, ("x", "y"): 2, ("e", "h"): 1}),
        (
            "all_pairs_by_gap",
            {
                **{("a", "d"): 0, ("a", "c"): 1, ("b", "d"): 1, ("a", "b"): 2, ("b", "c"): 2, ("c", "d"): 2},
                **{("x", "y"): 2, ("e", "h"): 1, ("f", "h"): 2, ("g", "h"): 2},
            },
        ),
    ],
)
def test_a_rank_gap_is_one_stage_however_many_answers_a_ranking_has(tmp_path, build, pairing, stages):
    """data.curriculum: also where it is the largest of its own ranking; what a ranking says of its answers stays."""
    rankings = [
        complete_row(
            "rankings/1",
            {
                "prompt": user(texts),
                "completions": [assistant(t) for t in texts],
                "ranks": ranks,
                "gens": [{"model_id": t} for t in texts],
                "ann": {"annotator_id": "w"},
                "license": "mit",
            },
            dataset="d",
            source="s",
            origin="human",
        )
        for texts, ranks in (("xy", [1, 2]), ("abcd", [1, 2, 3, 4]), ("efgh", [1, 2, 2, 3]))
    ]
    write_dataset(str(tmp_path / "c"), "d", "rankings/1", rankings)
    _, rows = build({"order": "rank_gap", "stages": 9, "pairing": pairing}, str(tmp_path / "c"), "curriculum")
    found = {answers(r, "chosen", "rejected"): r["stage_index"] for r in rows}
    tied = {("e", "f"): 2, ("e", "g"): 2}
    assert found == stages | tied
    assert all(
        (r["chosen_gen"]["model_id"], r["rejected_gen"]["model_id"]) == answers(r, "chosen", "rejected") for r in rows
    )
    assert {(r["ann"]["annotator_id"], r["license"]) for r in rows} == {("w", "mit")}
    ids = {texts: row["row_id"] for texts, row in zip(("xy", "abcd", "efgh"), rankings)}
    assert all(
        json.loads(r["extra_json"]) == {"from": "rankings/1", "row_ids": [ids[r["prompt"][0]["content"]]]} for r in rows
    )


def test_an_answer_that_only_calls_a_tool_is_one_without_text(tmp_path, build):
    calls = [{"role": "assistant", "content": None, "function_calls": "look(x='a')"}]
    rows = [
        complete_row(
            "candidates/1",
            {
                "prompt": user("p"),
                "prompt_idx": 0,
                "completion_idx": i,
                "completion": completion,
                "scores": [],
                "reward": 1.0 - i,
                "kept": True,
            },
            dataset="made",
            source="s",
            origin="ai",
        )
        for i, completion in enumerate((calls, assistant("four")))
    ]
    write_dataset(str(tmp_path / "calls"), "calls", "candidates/1", rows)
    result, (pair,) = build({"select": "best_vs_worst"}, str(tmp_path / "calls"))
    assert pair["chosen"][0]["function_calls"] and pair["rejected"] == assistant("four")
    assert result["summary"]["length_difference/mean"] == -4
    called = [{"completion": [{"role": "assistant", "function_calls": f"look(x={x!r})"}]} for x in "aba"]
    matrix = np.array([[1.0, 0.5, 0.2]])
    assert selecting.drop_duplicates(matrix, {(0, j): row for j, row in enumerate(called)}) == 1
    assert np.isnan(matrix).tolist() == [[False, False, True]]


@pytest.mark.parametrize("order", ("given", "margin", "confidence", "rank_gap"))
def test_a_curriculum_of_nothing_is_refused(tmp_path, build, order):
    if order == "rank_gap":
        row = {"prompt": user("r"), "completions": [assistant("a"), assistant("b")], "ranks": [1, 1]}
        tied = complete_row("rankings/1", row, dataset="d", source="s", origin="human")
        write_dataset(str(tmp_path / "d"), "d", "rankings/1", [tied])
        told = "all 1 rankings are ties"
    else:
        pairs_file(tmp_path / "d", 2, held_out=2, margin=[1.0, 2.0], label_prob=[0.9, 0.8])
        told = r"no row is \(splits: validation \(2\)\)"
    with pytest.raises(ValueError, match=f"No pair is in any stage.*{told}"):
        build({"order": order}, str(tmp_path / "d"), "curriculum")


def test_the_pairs_of_a_ranking_weigh_as_it_does(tmp_path, build):
    from stages.curriculum import Config as Curriculum

    rankings = [
        complete_row(
            "rankings/1",
            {"prompt": user(f"r{i}"), "completions": [assistant(t) for t in "abc"], "ranks": [2, 1, 3], "weight": w},
            dataset="d",
            source="s",
            origin="human",
        )
        for i, w in enumerate((1.0, 0.25))
    ]
    write_dataset(str(tmp_path / "c"), "d", "rankings/1", rankings)
    _, rows = build({"order": "rank_gap"}, str(tmp_path / "c"), "curriculum")
    assert [r["weight"] for r in rows] == [1.0, 1.0, 0.25, 0.25]
    with pytest.raises(ValueError, match="pairing=all_pairs_by_gap would change nothing.*order=rank_gap"):
        Curriculum(pairing="all_pairs_by_gap")


def test_align_trains_on_one_stage_only(tiny, tmp_path, spec, build):
    result, _ = build({"order": "given", "stages": 2}, pairs_file(tmp_path / "a", 11, held_out=2), "curriculum")
    made = execute(
        spec(
            "align",
            {"stage_index": 1, "max_steps": 1, "max_length": 64},
            {"model": tiny["policy"], "data": result["outputs"]["data"]["path"]},
            "one",
        ),
        silent,
    )
    assert made["summary"]["pairs"] == 4


def test_a_stage_of_a_curriculum_is_taken_before_its_pairs_are_converted(tiny, tmp_path, spec, build):
    """sDPO with a loss on single responses: the pairs of the stage, as labelled rows; rows of other kinds have no
    stages.
    """
    result, rows = build({"order": "given", "stages": 2}, pairs_file(tmp_path / "a", 11, held_out=2), "curriculum")
    config = {"method": "kto", "stage_index": 1, "max_steps": 1, "max_length": 64, "batch_size": 4}
    made = execute(
        spec("align", config, {"model": tiny["policy"], "data": result["outputs"]["data"]["path"]}, "kto"), silent
    )
    assert made["summary"]["rows"] == 2 * sum(r["stage_index"] == 1 for r in rows) == 8
    with pytest.raises(ConfigError, match="stage_index=2: no pair of split train.*the stages 0, 1, so write one of"):
        execute(
            spec(
                "align",
                {**config, "stage_index": 2},
                {"model": tiny["policy"], "data": result["outputs"]["data"]["path"]},
                "none",
            ),
            silent,
        )
    write_dataset(
        str(tmp_path / "labels"),
        "d",
        "unpaired/1",
        [
            complete_row(
                "unpaired/1",
                {"prompt": user(f"p{i}"), "completion": assistant("x"), "label": bool(i % 2), "label_kind": "thumbs"},
                dataset="d",
                source="s",
                origin="human",
            )
            for i in range(6)
        ],
    )
    with pytest.raises(ConfigError, match="unpaired/1 has no column stage_index; give the output of stage curriculum"):
        execute(spec("align", config, {"model": tiny["policy"], "data": str(tmp_path / "labels")}, "labels"), silent)


# -- ReST's selections -------------------------------------------------------------------------------------------------


def test_thresholds_by_quantile_caps_and_empty_selections(tiny, data, spec, candidates):
    path = candidates(
        [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]],
        correct=[[True] * 4, [False, True, True, True]],
        weight=0.25,
    )

    def select(name, **config):
        made = spec("rejection", config, {"model": tiny["policy"], "prompts": data["prompts"]}, name)
        made["inputs"]["candidates"] = {"kind": "dataset", "path": path, "ref": "c", "digest": "c"}
        result = execute(made, silent)
        return result, [
            (r["messages"][0]["content"], r["messages"][1]["content"])
            for r in open_dataset(result["outputs"]["selected"]["path"]).iter_rows()
        ]

    half, rows = select("half", select="threshold", threshold=0.5, threshold_mode="quantile")
    selected = open_dataset(half["outputs"]["selected"]["path"])
    assert len(rows) == 4 and {row["weight"] for row in selected.iter_rows()} == {0.25}
    assert select("cap", select="all_correct", max_per_prompt=2)[1] == [
        ("prompt 0", "answer 0"),
        ("prompt 0", "answer 1"),
        ("prompt 1", "answer 1"),
        ("prompt 1", "answer 2"),
    ]
    result, rows = select("none", select="threshold", threshold=5.0, allow_empty=True)
    assert rows == [] and result["summary"]["selected"] == 0
    with pytest.raises(ValueError, match="Nothing was selected"):
        select("error", select="threshold", threshold=5.0)
    with pytest.raises(ValueError, match="no share"):
        select("share", select="threshold", threshold=1.5, threshold_mode="quantile")


def test_random_controls_are_drawn_among_what_may_be_kept(tiny, data, spec, candidates):
    """A floor holds before the draw: as many rows as a selector of the best, not as many as the draw happened to
    leave.
    """
    path = candidates([[0.1, 0.2, 0.3, 0.9], [0.0, 0.8, 0.1, 0.2]] * 20)

    def rewards(name, **config):
        made = spec("rejection", config, {"model": tiny["policy"], "prompts": data["prompts"]}, name)
        made["inputs"]["candidates"] = {"kind": "dataset", "path": path, "ref": "c", "digest": "c"}
        return execute(made, silent)["summary"]

    each = rewards("each", select="random_per_prompt", threshold=0.5)
    assert each["selected"] == 40 and each["reward/selected"] == pytest.approx(0.85)
    assert rewards("overall", select="random_k_overall", k=15, threshold=0.5)["selected"] == 15
    share = rewards("share", select="random_k_overall", k=15, threshold=0.75, threshold_mode="quantile")
    assert share["selected"] == 15 and share["reward/selected"] > 0.7, "the quantile is of all rewards"


@pytest.mark.parametrize(
    "given,says",
    [
        ({"k": 4}, "select=top_k_per_prompt"),
        ({"k": 4, "select": "threshold", "threshold": 0.5}, "top_k_overall"),
        ({"select": "top_k_per_prompt", "max_per_prompt": 2}, "write k"),
        ({"select": "random_per_prompt", "max_per_prompt": 2}, "no such cap"),
        ({"select": "random_k_overall", "max_per_prompt": 2}, "no such cap"),
        ({"hint": "{question} {answer}"}, "rationalise=4"),
        ({"validation_fraction": 0.1, "split": "test"}, "only training prompts are parted; write split=train"),
    ],
)
def test_settings_of_another_selector_are_refused(given, says):
    with pytest.raises(ValueError, match=f"would change nothing.*{says}"):
        rejection.Config(**given)
    for whole in (
        rejection.Config(select="top_k_overall", k=9, max_per_prompt=2),
        rejection.Config(select="all_correct", max_per_prompt=2),
        rejection.Config(rationalise=2, hint="{question} {answer}"),
    ):
        assert rejection.Config(**whole.model_dump()) == whole


def test_settings_of_sampling_are_refused_for_answers_that_are_there(tiny, data, spec, candidates):
    """And those that need an input or a threshold; a recipe that selects again from what it sampled resets them."""
    path = candidates([[0.1, 0.9], [0.4, 0.2]])

    def select(given, with_candidates=True):
        made = spec(
            "rejection",
            given,
            {"model": tiny["policy"], "prompts": data["prompts"]},
            f"s{len(given)}-{next(iter(given))}-{with_candidates}",
        )
        if with_candidates:
            made["inputs"]["candidates"] = {"kind": "dataset", "path": path, "ref": "c", "digest": "c"}
        return execute(made, silent)

    for given, says in (
        ({"num_generations": 4}, "taken as they are"),
        ({"temperature": 0.5}, "leave candidates out to sample"),
        ({"max_prompts": 3}, "taken as they are"),
        ({"block": 8}, "write rescore=true"),
        ({"threshold_mode": "quantile"}, "write threshold=0.9"),
        ({"max_per_prompt": 2}, "keeps one"),
    ):
        with pytest.raises(ConfigError, match=f"would change nothing.*{says}"):
            select(given)
    for given, says in (({"trait_of": "drawn"}, "input traits"), ({"threshold_mode": "quantile"}, "threshold=0.9")):
        with pytest.raises(ConfigError, match=says):
            select(given, with_candidates=False)
    full = rejection.Config(
        num_generations=4,
        temperature=0.5,
        max_prompts=3,
        engine="server",
        engine_url="http://localhost:1/v1",
        min_tokens=2,
        select="top_k_per_prompt",
        k=2,
    )
    again = rejection.selecting(full, threshold=0.15)
    assert (again.num_generations, again.temperature, again.engine, again.engine_url) == (
        16,
        1.0,
        "builtin",
        None,
    ) and (again.select, again.k, again.threshold) == ("top_k_per_prompt", 2, 0.15)
    assert select(again.model_dump(mode="json"))["summary"]["selected"] == 3
    other = select({"rewards": [{"name": "other", "kind": "length"}]})
    assert [w["code"] for w in other["warnings"]].count("rewards_not_read") == 1


def test_rounds_pass_over_prompts_in_a_circle(tiny, data, spec):
    seen = []
    for offset in (0, 30, 60):
        config = {
            "num_generations": 1,
            "max_completion_length": 2,
            "rewards": [{"name": "length", "kind": "length"}],
            "max_prompts": 30,
            "prompt_offset": offset,
            "allow_empty": True,
        }
        result = execute(
            spec("rejection", config, {"model": tiny["policy"], "prompts": data["prompts"]}, f"r{offset}"), silent
        )
        seen.append([r["prompt_id"] for r in open_dataset(result["outputs"]["candidates"]["path"]).iter_rows()])
    whole = seen[0] + seen[1][:12]
    assert len(set(whole)) == 42 and seen[1][12:] == seen[0][:18] and seen[2] == whole[18:] + whole[:6]


@pytest.mark.parametrize("rows_per_part", (3, 50_000))
def test_a_sampling_stage_goes_on_behind_its_last_block_however_many_parts_blocks_made(
    tiny, data, spec, monkeypatch, rows_per_part
):
    """A block of many rows closes several parts of the output by itself; a part is no block."""
    from storage import datasets

    monkeypatch.setitem(datasets.DatasetWriter.__init__.__kwdefaults__, "rows_per_part", rows_per_part)
    config = {
        "num_generations": 4,
        "max_prompts": 6,
        "block": 2,
        "max_completion_length": 5,
        "select": "threshold",
        "threshold": -10.0,
        "allow_empty": True,
        "rewards": [{"name": "length", "kind": "length", "max_length": 5, "cache_length": 4}],
    }

    def run(name):
        return execute(
            spec("rejection", config, {"model": tiny["policy"], "prompts": data["prompts"]}, name), lambda event: None
        )

    def ids(result):
        return [row["row_id"] for row in open_dataset(result["outputs"]["candidates"]["path"]).iter_rows()]

    whole, real, calls = run("whole"), sampling.sample_block, []

    def stops(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(sampling, "sample_block", stops)
    with pytest.raises(KeyboardInterrupt):
        run("stopped")
    monkeypatch.setattr(sampling, "sample_block", real)
    again = run("stopped")
    assert again["resumed_from"] == 2
    assert ids(again) == ids(whole) and len(ids(again)) == 24
