"""Win rates of answers against answers: the stage ``win_rate``, with scripted servers, a reward model, and recorded
judgements.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from stages import win_rate
from stages.harness import execute
from stages.reward.judging import Item
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row, prompt_id
from tests.chat_server import chat_server
from tests.common import assistant, silent, user, written
from tests.reward.test_judge_stage import asked, at, better_first, by_quality, said, shown, warned

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture()
def rate(tmp_path):
    """rate(config, {input: path}, name) -> (result, battles, {metric: row of scores})."""
    count = iter(range(100))

    def go(config, inputs, name=None):
        inputs = {
            key: {"path": str(path), "ref": key, "digest": f"digest of {str(path).rsplit('/', 1)[-1]}"}
            for key, path in inputs.items()
        }
        result = execute(
            {
                "stage": "win_rate",
                "key": "t",
                "config": {"bootstrap": 50, **config},
                "seed": 5,
                "device": "cpu",
                "inputs": inputs,
                "workdir": str(tmp_path / (name or f"run{next(count)}")),
            },
            silent,
        )
        read = lambda output: list(open_dataset(result["outputs"][output]["path"]).iter_rows())
        return result, read("battles"), {row["metric"]: row for row in read("scores")}

    return go


@pytest.fixture()
def file(tmp_path):
    """file(name, answers by prompt) -> an AlpacaEval file of answers."""

    def make(name, answers):
        path = tmp_path / f"{name}.json"
        path.write_text(
            json.dumps(
                [
                    {"instruction": prompt, "output": text, "generator": name, "dataset": "d"}
                    for prompt, text in answers.items()
                ]
            )
        )
        return path

    return make


def test_files_of_answers_against_a_baseline(rate, file):
    """Wins, ties and losses are those that were scripted; unmatched prompts and errors are counted and in no rate;
    identical and empty answers are judged as what they are.
    """
    ours = {
        "win": "quality 5",
        "lose": "quality 1",
        "same": "quality 3",
        "even": "quality 4 ",
        "mute": "quality 9",
        "empty": "",
        "only ours": "quality 9",
        **{f"more {i}": "quality 7 and more" for i in range(4)},
    }
    theirs = {
        "win": "quality 2",
        "lose": "quality 4",
        "same": "quality 3",
        "even": "quality 4",
        "mute": "quality 1",
        "empty": "quality 1",
        "only theirs": "x",
        **{f"more {i}": "quality 6" for i in range(4)},
    }

    def says(body):
        if "[Question]\nmute" in asked(body):
            return said("?")
        if "" in shown(body):
            return said("[[B]]" if not shown(body)[0] else "[[A]]")
        return said({1: "[[A]]", -1: "[[B]]", 0: "[[C]]"}[better_first(body)])

    with chat_server(says) as server:
        inputs = {"answers.ours": file("ours", ours), "answers.theirs": file("theirs", theirs)}
        result, battles, scores = rate(at(server, mode="verdict", judge_retries=0, baseline="theirs"), inputs)
        assert not any("ours" in asked(body) or "theirs" in asked(body) for body in server.seen), "names are masked"
    by_prompt = {row["item_id"].partition(":")[0]: row["outcome_a"] for row in battles}
    expected = {"win": 1.0, "lose": 0.0, "same": 0.5, "even": 0.5, "empty": 0.0, **{f"more {i}": 1.0 for i in range(4)}}
    assert by_prompt == {prompt_id(user(name)): outcome for name, outcome in expected.items()} and {
        row["model_a"] for row in battles
    } == {"ours"}
    values, summary = list(expected.values()), result["summary"]
    assert summary["win_rate"] == summary["ours/win_rate"] == pytest.approx(np.mean(values)) and scores[
        "ours:theirs/win_rate"
    ]["se"] == pytest.approx(np.std(values, ddof=1) / 3)
    assert (
        summary["tie_rate"] == pytest.approx(2 / 9)
        and summary["errors"] == summary["judge/errors"] == 1
        and summary["judged"] == 9
        and summary["identical"] == 1
    )
    assert summary["left_out/prompts that not all models answered"] == 2 and {
        "unmatched_prompts",
        "judge_errors",
    } <= warned(result)
    assert battles[0]["len_a"] == len("quality 5") and summary["judge/first_position_rate"] == pytest.approx(0.5)


def test_samples_of_evaluate_meet_by_prompt_and_index(rate, tmp_path):
    """The stage takes what ``evaluate`` writes; conversations need their prompts; errors are clustered by prompt."""
    talk = [*user("first"), *assistant("ok"), *user("then?")]
    prompts = [
        complete_row(
            "prompts/1", {"prompt": messages, "category": name}, dataset="p", source="s", origin="human", split="test"
        )
        for messages, name in ((user("one"), "a"), (user("two"), "a"), (user("three"), "b"), (talk, "b"))
    ]
    write_dataset(tmp_path / "prompts", "p", "prompts/1", prompts)

    def samples(name, quality, count):
        rows = [
            complete_row(
                "eval_samples/1",
                {
                    "prompt_id": row["prompt_id"],
                    "group_id": row["group_id"],
                    "run_id": name,
                    "item_id": row["row_id"],
                    "sample_idx": k,
                    "output": f"quality {quality(i, k)} {mode}",
                    "format_error": False,
                    "tokens": 3,
                    "extra_json": json.dumps(
                        {
                            "mode": mode,
                            "prompt": row["prompt"][-1]["content"],
                            "finish": "length" if name == "a" and k == 1 else "eos",
                        }
                    ),
                },
                dataset="p",
                source="s",
                origin="ai",
                split="test",
            )
            for i, row in enumerate(prompts)
            for mode, n in (("sample", count), ("greedy", 1))
            for k in range(n)
        ]
        write_dataset(tmp_path / name, name, "eval_samples/1", rows)
        return tmp_path / name

    inputs = {
        "answers.a": samples("a", lambda i, k: 5 if i < 3 else 1, 3),
        "answers.b": samples("b", lambda i, k: 3, 2),
    }
    with chat_server(by_quality) as server:
        with pytest.raises(ConfigError, match="only the last message.*give --input prompts="):
            rate(at(server, baseline="b"), inputs)
        inputs["prompts"] = tmp_path / "prompts"
        result, battles, scores = rate(at(server, baseline="b"), inputs)
        assert (
            len(battles) == 4
            and all("greedy" in text for body in server.seen for text in shown(body))
            and any("ok" in asked(body) and "then?" in asked(body) for body in server.seen)
        )
        assert (
            result["summary"]["win_rate"] == pytest.approx((3 * 0.8 + 0.2) / 4)
            and result["summary"]["discrete_win_rate"] == 0.75
        )
        groups = {(r["metric"].rpartition("/")[2]): r["value"] for r in scores.values() if "category" in r["metric"]}
        assert groups == {"category=a": pytest.approx(0.8), "category=b": pytest.approx(0.5)}
        result, battles, scores = rate(at(server, baseline="b", answers="sample", max_samples=9), inputs)
        values = [0.8, 0.8, 0.2, 0.2, 0.8, 0.8, 0.8, 0.8]
        assert len(battles) == 8 and {row["item_id"].rpartition(":")[2] for row in battles} == {"0", "1"}
        assert result["summary"]["left_out/answers beyond as many as the other model has"] == 4
        assert "unequal_samples" in warned(result)
        means = np.array([0.8, 0.8, 0.8, 0.2]) - np.mean(values)
        assert scores["a:b/win_rate"]["se"] == pytest.approx(math.sqrt((4 * means**2).sum()) / 8), (
            "two samples of a prompt are one cluster"
        )
        (summary,) = Path(result["outputs"]["scores"]["path"]).parents[1].rglob("summary.md")
        assert (
            "as they stand, also those that were cut at their limit: 4 of 8 of a, 0 of 8 of b." in summary.read_text()
        )


def test_an_answer_that_an_engine_failed_to_give_is_no_loss(rate, tmp_path):
    """Candidates of a server that failed on one request are left out and counted; one that was cut is judged as what it
    is.
    """

    def candidates(name, quality, lost=None):
        written(
            tmp_path / name,
            name,
            "candidates/1",
            [
                {
                    "prompt": user(f"q{i}"),
                    "prompt_idx": i,
                    "completion_idx": 0,
                    "completion": assistant("" if reason == "engine_error" else f"quality {quality}"),
                    "scores": [],
                    "kept": reason is None,
                    "drop_reason": reason,
                }
                for i in range(4)
                for reason in [(lost or {}).get(i)]
            ],
            origin="ai",
        )
        return tmp_path / name

    with chat_server(by_quality) as server:
        result, battles, _ = rate(
            at(server, baseline="b"),
            {"answers.a": candidates("a", 5, {1: "engine_error", 2: "truncated"}), "answers.b": candidates("b", 3)},
        )
    assert len(battles) == 3 and result["summary"]["discrete_win_rate"] == 1.0
    assert (
        result["summary"]["left_out/answers that an engine or server failed to give"] == 1
        and result["summary"]["left_out/prompts that not all models answered"] == 1
    )


def test_a_reward_model_judges_by_the_difference_of_its_scores(rate, file, tiny):
    from stages.reward_models.reward_scorers import Response, load_scorer

    ours, theirs = ({f"what is {i}?": f"{word} {i}" for i in range(9)} for word in ("it is", "maybe"))
    config = {"baseline": "theirs", "block": 4}
    result, battles, _ = rate(
        config,
        {"answers.ours": file("ours", ours), "answers.theirs": file("theirs", theirs), "reward_model": tiny["reward"]},
    )
    scorer = load_scorer(tiny["reward"])
    for row, prompt in zip(battles, ours):
        a, b = scorer.score([Response(user(prompt), assistant(texts[prompt])) for texts in (ours, theirs)])
        assert json.loads(row["extra_json"])["p_a"] == pytest.approx(1 / (1 + math.exp(b - a)), abs=1e-6)
    assert len(battles) == 9 and len(list(open_dataset(result["outputs"]["judgements"]["path"]).iter_rows())) == 18


def test_more_than_two_models_are_ranked(rate, file):
    """Every model meets every other; strengths and Elo are in the order of quality; one that never loses needs a ridge,
    and says so.
    """
    quality = {"good": lambda i: 9 if i % 4 else 1, "fair": lambda i: 5, "poor": lambda i: 1 if i % 3 else 7}
    inputs = {
        f"answers.{name}": file(name, {f"question {i}": f"quality {q(i)} {name[0]}" for i in range(24)})
        for name, q in quality.items()
    }
    with chat_server(by_quality) as server:
        result, battles, scores = rate(at(server, mode="preference"), inputs)
        summary = result["summary"]
        assert len(battles) == 72 and {(row["model_a"], row["model_b"]) for row in battles} == {
            ("fair", "good"),
            ("fair", "poor"),
            ("good", "poor"),
        }
        assert (
            summary["good/bt_elo"] > summary["fair/bt_elo"] > summary["poor/bt_elo"]
            and summary["good/elo_median"] > summary["fair/elo_median"] > summary["poor/elo_median"]
        )
        assert summary["good/bt_low"] < summary["good/bt_elo"] < summary[
            "good/bt_high"
        ] and "strengths_need_a_ridge" not in warned(result)
        inputs["answers.best"] = file("best", {f"question {i}": "quality 99" for i in range(24)})
        server.choice = lambda body: said({1: "[[A]]", -1: "[[B]]", 0: "[[C]]"}[better_first(body)])
        result, _, _ = rate(at(server, mode="verdict", baseline="fair"), inputs)
        assert (
            "strengths_need_a_ridge" in warned(result)
            and result["summary"]["best/win_rate"] == 1.0
            and math.isfinite(result["summary"]["best/bt_elo"])
        )
        assert result["summary"]["best/win_rate_low"] > 0.8 and "win_rate" not in result["summary"]


def test_arena_hards_five_verdicts_count_strong_wins_three_times(rate, file):
    """One much better and two slightly worse: 2 x 3 wins against 2 x 2; with two models the strength's win rate is the
    share of wins.
    """
    inputs = {
        "answers.new": file("new", {"big": "quality 9", "s1": "quality 3", "s2": "quality 3", "tie": "quality 5 "}),
        "answers.old": file("old", dict.fromkeys(("big", "s1", "s2"), "quality 4") | {"tie": "quality 5"}),
    }

    def says(body):
        side, strong = better_first(body), "quality 9" in asked(body)
        return said(
            {1: "[[A>>B]]" if strong else "[[A>B]]", -1: "[[B>>A]]" if strong else "[[B>A]]", 0: "[[A=B]]"}[side]
        )

    with chat_server(says) as server:
        result, battles, _ = rate(at(server, mode="five_way", baseline="old"), inputs)
    wins, losses = 2 * (3 + 0.5), 2 * (1 + 1 + 0.5)
    assert result["summary"]["new/bt_win_rate"] == pytest.approx(wins / (wins + losses), abs=1e-9) and result[
        "summary"
    ]["win_rate"] == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    assert result["summary"]["old/bt_win_rate"] == 0.5 and sorted(row["outcome_a"] for row in battles) == [
        0.0,
        0.0,
        0.5,
        1.0,
    ]


def test_length_is_controlled_or_said_to_separate(rate, file):
    """A judge that only counts words: the raw rate is far from one half, the controlled one is not; where length
    decides everything, there is none.
    """
    rng = np.random.default_rng(0)
    lengths = [(int(a), int(b)) for a, b in zip(rng.integers(20, 60, 80), rng.integers(10, 50, 80))]
    inputs = {
        f"answers.{name}": file(
            name, {f"question {i}": f"quality {pair[k]} " + "w" * pair[k] for i, pair in enumerate(lengths)}
        )
        for k, name in enumerate(("long", "short"))
    }

    def says(body):
        from tests.reward.test_judge_stage import letters

        first, second = map(len, shown(body))
        return letters(1 / (1 + math.exp(-0.05 * (first - second))))

    with chat_server(says) as server:
        result, _, _ = rate(at(server, baseline="short"), inputs)
        summary = result["summary"]
        assert (
            summary["win_rate"] > 0.58
            and abs(summary["lc_win_rate"] - 0.5) < 0.03
            and abs(summary["style_controlled_win_rate"] - 0.5) < 0.05
            and summary["judge/longer_wins"] == 1.0
            and "judge_length_bias" in warned(result)
        )
        server.choice = lambda body: said("[[A]]" if len(shown(body)[0]) > len(shown(body)[1]) else "[[B]]")
        result, _, scores = rate(at(server, baseline="short", mode="verdict"), inputs)
        assert "length_control_diverges" in warned(result) and "lc_win_rate" not in result["summary"]
        result, _, _ = rate(at(server, baseline="short", mode="verdict", length_l2=0.1), inputs)
        assert "lc_win_rate" in result["summary"]
        groups = [name for name in scores if "length=" in name]
        assert (
            len(groups) == 3
            and scores["long:short/win_rate/length=shorter"]["value"]
            < scores["long:short/win_rate/length=longer"]["value"]
            == 1.0
        )


def test_terciles_keep_equal_differences_together():
    def named(*gaps):
        items = [
            Item(str(i), user("q"), assistant("a" * (10 + gap)), assistant("b" * 10)) for i, gap in enumerate(gaps)
        ]
        return win_rate.terciles(items)

    assert named(-5, 0, 7) == named(9, 10, 11) == ["shorter", "similar", "longer"]
    assert named(-5, 0, 0, 0, 0, 7) == ["shorter", *["similar"] * 4, "longer"]
    assert named(-5, -5, 0, 3, 3, 3) == ["shorter"] * 2 + ["similar"] * 4
    assert named(0, 0, 0, 0, 5) == ["similar"] * 4 + ["longer"]
    assert named(0, 0, 0) == named(7, 7, 7) == ["similar"] * 3


def test_recorded_comparisons_need_no_judge(rate, tmp_path):
    """Swapped sides, votes of several annotators of one pair, other answers to the same prompt, rows without names."""
    rows = [
        {
            "prompt": f"q{i}",
            "response_a": "x" * (i + 1),
            "response_b": "y",
            "model_a": "m",
            "model_b": "base",
            "preference": "A" if i % 3 else "B",
        }
        for i in range(6)
    ]
    rows += [
        {
            "prompt": "swapped",
            "response_a": "y",
            "response_b": "x",
            "model_a": "base",
            "model_b": "m",
            "preference": "B",
        }
    ] * 2
    rows += [
        {
            "prompt": "swapped",
            "response_a": "y",
            "response_b": "x",
            "model_a": "base",
            "model_b": "m",
            "preference": "A",
        },
        {
            "prompt": "swapped",
            "response_a": "another",
            "response_b": "y",
            "model_a": "m",
            "model_b": "base",
            "preference": "A",
        },
        {"prompt": "no names", "response_a": "y", "response_b": "x", "preference": "A"},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result, battles, _ = rate({"baseline": "base"}, {"recorded": tmp_path / "r.jsonl"})
    values = [0, 1, 1, 0, 1, 1, 2 / 3, 1]
    assert result["summary"]["win_rate"] == pytest.approx(np.mean(values)) and [
        json.loads(row["extra_json"])["p_a"] for row in battles
    ] == pytest.approx(values)
    assert (
        result["summary"]["left_out/recorded judgements without the models' names"] == 1
        and result["summary"]["left_out/the same two answers again, averaged"] == 2
    )
    for config, message in (({"baseline": "nobody"}, "is none of the models; write one of base, m"),):
        with pytest.raises(ConfigError, match=message):
            rate(config, {"recorded": tmp_path / "r.jsonl"})


@pytest.mark.skipif(
    not (SHARED / "alpaca_eval_published.json").exists(),
    reason="the public AlpacaEval judgements are not beside the project",
)
def test_the_published_win_rates_of_alpaca_eval(rate):
    """805 judgements of each of twelve models: win rate, its error and the discrete rate are the published ones. The
    published length-controlled rate adds regularisation of another kind and difficulties of many more models
    (eval.alpacaeval_lc): ours is 0.7 points off on average with the settings that the page on stages names."""
    published = json.loads((SHARED / "alpaca_eval_published.json").read_text())
    result, battles, scores = rate(
        {"instruction_difficulty": True, "length_l2": 3.0},
        {"recorded": SHARED / "alpaca_eval_gpt4_preferences.jsonl.gz"},
    )
    summary = result["summary"]
    assert len(battles) == 12 * 805 and {row["model_b"] for row in battles} == {"gpt4_1106_preview"}
    for name, theirs in published.items():
        assert 100 * summary[f"{name}/win_rate"] == pytest.approx(theirs["win_rate"], abs=1e-4) and 100 * summary[
            f"{name}/win_rate_se"
        ] == pytest.approx(theirs["standard_error"], abs=1e-4)
        assert (
            100 * summary[f"{name}/discrete_win_rate"] == pytest.approx(theirs["discrete_win_rate"], abs=1e-6)
            and abs(summary[f"{name}/length/a"] - theirs["avg_length"]) < 1
        )
    ours, theirs = zip(
        *[(100 * summary[f"{name}/lc_win_rate"], row["length_controlled_winrate"]) for name, row in published.items()]
    )
    ranks = [np.argsort(np.argsort(values)) for values in (ours, theirs)]
    assert np.corrcoef(*ranks)[0, 1] > 0.9 and abs(ours[-1] - theirs[-1]) < 0.5, (ours, theirs)
    off = np.abs(np.subtract(ours, theirs))
    assert off.mean() < 0.8 and off.max() < 3.5, dict(zip(published, off))
    assert sorted(published, key=lambda n: summary[f"{n}/bt_elo"]) == sorted(
        published, key=lambda n: published[n]["win_rate"]
    )


def test_a_model_against_itself_is_half_and_nobody_is_asked(rate, file):
    """Nor is there a length to control for, or an error of the rate; one-sided answers are the other end."""
    same = {f"question {i}": f"quality {i}" for i in range(6)}
    with chat_server() as server:
        result, battles, scores = rate(
            at(server, baseline="b"), {"answers.a": file("a", same), "answers.b": file("b", same)}
        )
        assert server.seen == [] and len(battles) == 6 and result["summary"]["identical"] == 6
        assert (
            result["summary"]["win_rate"] == result["summary"]["lc_win_rate"] == 0.5
            and scores["a:b/win_rate"]["se"] == 0.0
        )
        server.choice = lambda body: said("[[A]]" if "good" in shown(body)[0] else "[[B]]")
        result, _, _ = rate(
            at(server, baseline="b", mode="verdict"),
            {"answers.a": file("good", {key: "good" for key in same}), "answers.b": file("b", same)},
        )
    assert (
        result["summary"]["win_rate"] == 1.0
        and result["summary"]["win_rate_low"] > 0.5
        and "lc_win_rate" not in result["summary"]
        and "length_control_diverges" in warned(result)
    )


def test_impossible_inputs_say_what_to_give(rate, file, tiny):
    a, b = file("a", {"q": "x"}), file("b", {"other": "y"})
    for config, inputs, message in (
        ({}, {}, "give answers.NAME"),
        ({}, {"answers.a": a, "answers.b": b}, "one judge"),
        ({}, {"answers.a": a, "judge": tiny["policy"]}, "two models or more"),
        ({}, {"answers.a": a, "answers.b": b, "judge": tiny["policy"], "reward_model": tiny["reward"]}, "one judge"),
        (
            {"baseline": "c"},
            {"answers.a": a, "answers.b": a, "judge": tiny["policy"]},
            "baseline='c' is none of the models; write one of a, b",
        ),
        (
            {},
            {"answers.a": a, "answers.b": b, "judge": tiny["policy"]},
            "no prompt has a sampled answer of each of a, b",
        ),
        ({}, {"answers.a": tiny["pairs"], "answers.b": b, "judge": tiny["policy"]}, "holds rows of kind pairs/1"),
    ):
        with pytest.raises(ConfigError, match=message):
            rate(config, inputs)


def test_what_evaluate_writes_is_compared_and_a_kill_changes_no_byte(tmp_path, tiny, forks):
    """Two models evaluated on the same prompts, then compared by a local judge that is killed between blocks."""
    from storage.files import tree_digest

    def spec(stage, name, config, inputs):
        given = {key: {"path": path, "digest": f"d{key}"} for key, path in inputs.items()}
        (tmp_path / f"{name}.json").write_text(
            json.dumps(
                {
                    "stage": stage,
                    "key": name[:1],
                    "config": config,
                    "seed": 5,
                    "device": "cpu",
                    "inputs": given,
                    "workdir": str(tmp_path / name),
                }
            )
        )
        return str(tmp_path / f"{name}.json")

    for name in ("policy", "other"):
        forks.run(
            spec(
                "evaluate",
                name,
                {"num_samples": 2, "max_completion_length": 6},
                {"model": tiny[name], "prompts": tiny["prompts"]},
            )
        )
    inputs = {
        "answers.one": str(tmp_path / "policy/out/samples"),
        "answers.two": str(tmp_path / "other/out/samples"),
        "judge": tiny["policy"],
    }
    config = {
        "template": "{context} A:{a} B:{b}",
        "request": "?",
        "baseline": "two",
        "answers": "sample",
        "max_samples": 2,
        "block": 4,
        "bootstrap": 20,
    }
    forks.run(spec("win_rate", "whole", config, inputs))
    killed = spec("win_rate", "wrecked", config, inputs)
    folder = tmp_path / "wrecked" / "out"
    for parts in (2, 6):
        forks.start(killed).kill_when(lambda: len(list((folder / "judgements").glob("part-*.parquet"))) >= parts)
    assert not (folder / "judgements" / "manifest.json").exists()
    forks.run(killed)
    for output in ("battles", "judgements"):
        assert tree_digest(folder / output) == tree_digest(tmp_path / "whole" / "out" / output)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "wrecked")]
    assert (
        results[1]["resumed_from"]
        and results[0]["summary"] == results[1]["summary"]
        and results[0]["summary"]["judged"] == 40
    )
    assert {row["group_id"] for row in open_dataset(str(folder / "battles")).iter_rows()} == {
        row["group_id"] for row in open_dataset(tiny["prompts"]).iter_rows()
    }


def test_lengths_and_style_are_of_what_the_judge_is_shown(rate, file):
    """A thought of a thousand characters before a short answer is no longer answer: under view=answer_only it is in no
    length, style or bias of the judge; under view=full it is.
    """
    thought = "<think>" + "**well** " * 120 + "</think>"
    ours = {f"q{i}": f"{thought}quality 5" for i in range(8)}
    theirs = {f"q{i}": "quality 1 and so on" for i in range(8)}
    with chat_server(by_quality) as server:
        for view, length in (("answer_only", 9), ("full", len(thought) + 9)):
            result, battles, scores = rate(
                at(server, mode="preference", baseline="theirs", view=view),
                {"answers.ours": file("ours", ours), "answers.theirs": file("theirs", theirs)},
            )
            assert (
                {row["len_a"] for row in battles} == {length}
                and scores["ours:theirs/length/a"]["value"] == length
                and result["summary"]["discrete_win_rate"] == 1.0
            )
            assert result["summary"]["judge/longer_wins"] == float(view == "full")
