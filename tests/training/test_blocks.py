"""Work before the first checkpoint: what is finished when a stage is killed is not done again, and the result has the
same bytes.
"""

import contextlib
import json
from pathlib import Path

import pytest

from stages.running import journal, usage
from stages.running.blocks import in_blocks
from stages.running.servers import Served
from stages.harness import execute
from storage.datasets import open_dataset
from storage.files import tree_digest
from tests.common import silent, written


class Killed(BaseException):
    pass


class Told:
    """What ``in_blocks`` reads of a stage, in a work directory."""

    rank, world_size, units_done, seed = 0, 1, 0, 0

    def __init__(self, workdir):
        self.workdir, self.warnings, self.said = workdir, [], []
        usage.begin()

    def warn(self, code, text):
        self.warnings.append({"code": code, "text": text})

    def log(self, text):
        self.said.append(text)

    def progress(self, *_):
        pass


def squares(stage, calls, stop=None):
    def compute(part):
        if stop is not None and part[0] >= stop:
            raise Killed
        calls.append(list(part))
        usage.count(judge_calls=len(part))
        if 4 in part:
            stage.warn("four", "a four")
        return [[n * n / 3, float("nan") if n == 5 else str(n)] for n in part]

    return compute


def test_answers_of_servers_are_kept_as_long_as_their_block_is_not(tmp_path):
    """Those of the unfinished block are read by the next start, those of finished ones are dropped."""
    stage, asked = Told(tmp_path), []
    server = Served("the server", "answers", RuntimeError, 1.0)

    def compute(part):
        def said(n):
            if n == stop:
                raise Killed
            return journal.once("http://there/v1", [n], lambda: asked.append(n) or n * n, server, n)

        return [said(n) for n in part]

    try:
        for stop, known in ((5, [9, 16]), (8, [36, 49]), (None, [])):
            journal.end()
            journal.begin(tmp_path / "answers", 0, 0, {})
            with contextlib.suppress(Killed):
                values = in_blocks(stage, "n", range(10), compute, 3)
            (file,) = (tmp_path / "answers").iterdir()
            kept = [entry["answer"] for entry in journal.entries(file)]
            assert kept[-2:] == known or not known
    finally:
        journal.end()
    assert values == [n * n for n in range(10)] and asked == list(range(10))


@pytest.mark.parametrize("damage", ["none", "torn", "flipped", "other settings"])
def test_finished_blocks_are_read_back_and_damaged_ones_computed_again(tmp_path, damage):
    whole = in_blocks(Told(tmp_path / "whole"), "n", range(10), squares(Told(tmp_path / "x"), []), 3)
    stage, calls = Told(tmp_path / "work"), []
    with pytest.raises(Killed):
        in_blocks(stage, "n", range(10), squares(stage, calls, 6), 3)
    file = tmp_path / "work" / "blocks" / "n.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(
        {
            "none": b"".join(lines),
            "torn": lines[0] + lines[1][:-9],
            "flipped": lines[0] + lines[1].replace(b'"4"', b'"7"'),
            "other settings": b"".join(lines),
        }[damage]
    )
    stage, again = Told(tmp_path / "work"), []
    size = 4 if damage == "other settings" else 3
    assert repr(in_blocks(stage, "n", range(10), squares(stage, again), size)) == repr(whole) and calls == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert again[0][0] == {"none": 6, "torn": 3, "flipped": 3, "other settings": 0}[damage]
    # as if it had never been killed
    assert usage.so_far() == {"judge_calls": 10} and stage.warnings == [{"code": "four", "text": "a four"}]
    third = []
    assert (
        repr(in_blocks(Told(tmp_path / "work"), "n", range(10), squares(stage, third), size)) == repr(whole)
        and not third
    )


def demonstrations(path, n=40):
    written(
        path,
        "many",
        "demonstrations/1",
        [
            {
                "messages": [
                    {"role": "user", "content": f"say {i} " * (1 + i % 5)},
                    {"role": "assistant", "content": f"well, {i} it is " * (1 + i % 7)},
                ],
                "train_turns": [1],
                "split": "validation" if i % 10 == 0 else "train",
            }
            for i in range(n)
        ],
    )
    return str(path)


def kill_twice(forks, spec, stage, config, inputs, output, reached):
    """A stage undisturbed and one that is killed twice; asserts that both leave the same bytes."""
    whole, killed = spec(stage, config, inputs, "whole"), spec(stage, config, inputs, "killed")
    forks.run(spec.path("whole"))
    for n in (1, 3):
        forks.start(spec.path("killed")).kill_when(lambda: reached(Path(killed["workdir"])) >= n)
    assert not Path(killed["workdir"], "result.json").exists()
    forks.run(spec.path("killed"))
    results = [json.loads(Path(made["workdir"], "result.json").read_text()) for made in (whole, killed)]
    for part in ("summary", "warnings", "usage"):
        assert results[0][part] == results[1][part]
    assert tree_digest(Path(killed["workdir"], "out", output)) == tree_digest(Path(whole["workdir"], "out", output))
    return whole, killed


def lines_of(name):
    def count(work):
        file = work / "blocks" / f"{name}.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    return count


def test_kill9_judges_every_demonstration_once(spec, tiny, tmp_path, forks):
    rows = demonstrations(tmp_path / "rows")
    whole, killed = kill_twice(
        forks,
        spec,
        "superfilter",
        {"keep_fraction": 0.3, "block": 4},
        {"model": tiny["policy"], "data": rows},
        "data",
        lines_of("nll"),
    )
    files = [Path(made["workdir"], "blocks", "nll.jsonl").read_bytes() for made in (whole, killed)]
    assert files[0] == files[1] and len(files[0].splitlines()) == 9
    assert (
        sum(row["kept"] for row in open_dataset(str(Path(killed["workdir"], "out", "data"))).iter_rows(split="train"))
        == 10
    )


@pytest.mark.parametrize("min_gain", [None, 0.0])
def test_kill9_makes_every_call_once(spec, tiny, tmp_path, forks, min_gain):
    path = str(tmp_path / "texts")
    texts = [f"{i} and {i} is <API>calculator({i} + {i})</API>, is it not? <API>clock({i})</API>" for i in range(30)]
    written(path, "texts", "text/1", [{"text": t, "n_chars": len(t)} for t in texts])
    config, inputs = {"block": 3}, {"data": path}
    if min_gain is not None:
        config, inputs = {**config, "min_gain": min_gain, "mode": "append"}, {**inputs, "model": tiny["policy"]}
    _, killed = kill_twice(
        forks,
        spec,
        "inline_tools",
        config,
        inputs,
        "data",
        lambda work: len(list((work / "out" / "data").glob("part-*.parquet"))),
    )
    result = json.loads(Path(killed["workdir"], "result.json").read_text())
    assert (
        result["resumed_from"]
        and result["summary"]["calls"] == 60
        and result["summary"]["failed"] == 30
        and result["summary"]["rows"] == 30
    )
    assert (result["summary"]["kept"] == 30) if min_gain is None else ("gain_mean" in result["summary"])


def interrupted(monkeypatch, owner, name, after):
    """Let ``owner.name`` be called ``after`` times, and have whoever calls it once more killed; gives the list of the
    calls that were let through.
    """
    calls, real = [], getattr(owner, name)

    def counted(*args, **more):
        if len(calls) == after:
            raise Killed
        calls.append(args)
        return real(*args, **more)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_reference_log_probs_are_computed_once(spec, tiny, data, monkeypatch):
    from stages import align
    from stages.direct.direct_alignment import DirectAlignment

    monkeypatch.setattr(align, "BLOCK", 8)
    config = {"max_steps": 2, "batch_size": 24, "max_length": 64}
    inputs = {
        "model": tiny["policy"],
        "data": data["pairs"],
    }
    with monkeypatch.context() as patch:
        every = interrupted(patch, DirectAlignment, "log_probs", 99)
        whole = execute(spec("align", config, inputs, "whole"), silent)
    made = spec("align", config, inputs, "killed")
    with monkeypatch.context() as patch:
        interrupted(patch, DirectAlignment, "log_probs", 3)
        with pytest.raises(Killed):
            execute(made, silent)
    calls = interrupted(monkeypatch, DirectAlignment, "log_probs", 99)
    again = execute(made, silent)
    # of six blocks; the first call looks at a cache, of which there is none
    assert len(calls) == len(every) - 2 and again["summary"] == whole["summary"]
    assert [again["outputs"]["ref_logps"]["digest"], tree_digest(Path(again["outputs"]["model"]["path"]))] == [
        whole["outputs"]["ref_logps"]["digest"],
        tree_digest(Path(whole["outputs"]["model"]["path"])),
    ]


@pytest.mark.parametrize(
    "config, purpose",
    [
        ({"preset": "reinforce", "baseline": "table", "baseline_samples": 2}, "baseline"),
        ({"preset": "grpo", "curriculum": "self_paced", "passk_samples": 2, "num_generations": 2}, "pass-at-k"),
    ],
)
def test_completions_before_rl_are_sampled_once(spec, tiny, data, monkeypatch, config, purpose):
    from stages.rollouts.groups import GroupSampler

    config = {
        "max_steps": 1,
        "prompts_per_step": 4,
        "max_completion_length": 4,
        "generation_batch": 2,
        "learning_rate": 1e-5,
        **config,
    }
    inputs = {"model": tiny["policy"], "data": data["prompts"]}
    whole = execute(spec("rl", config, inputs, "whole"), silent)
    made = spec("rl", config, inputs, "killed")
    with monkeypatch.context() as patch:
        interrupted(patch, GroupSampler, "of_every_prompt", 2)
        with pytest.raises(Killed):
            execute(made, silent)
    calls = interrupted(monkeypatch, GroupSampler, "of_every_prompt", 99)
    again = execute(made, silent)
    # 42 prompts, eight a block
    assert sum(len(args[1]) for args in calls) == 42 - 16 and {args[2] for args in calls} == {purpose}
    assert again["summary"] == whole["summary"] and {n: v for n, v in again["usage"].items()} == whole["usage"]
    assert tree_digest(Path(again["outputs"]["model"]["path"])) == tree_digest(Path(whole["outputs"]["model"]["path"]))


def test_scores_and_embeddings_are_computed_once(spec, tiny, tmp_path, monkeypatch):
    from stages.reward_models.preference_module import Embedder
    from stages import group_preference

    monkeypatch.setattr(group_preference, "BLOCK", 16)
    path = str(tmp_path / "ratings")
    written(
        path,
        "ratings",
        "ratings/1",
        [
            {
                "prompt": [{"role": "user", "content": f"question {i % 6}"}],
                "completion": [{"role": "assistant", "content": f"answer {i}"}],
                "score": float(i % 5),
                "scale_min": 0.0,
                "scale_max": 4.0,
                "extra_json": json.dumps({"group": f"g{i % 4}"}),
            }
            for i in range(48)
        ],
    )
    config = {"max_steps": 2, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "eval_context_sizes": [1]}
    inputs = {
        "model": tiny["policy"],
        "data": path,
    }
    whole = execute(spec("group_preference", config, inputs, "whole"), silent)
    made = spec("group_preference", config, inputs, "killed")
    with monkeypatch.context() as patch:
        interrupted(patch, Embedder, "__call__", 2)
        with pytest.raises(Killed):
            execute(made, silent)
    calls = interrupted(monkeypatch, Embedder, "__call__", 99)
    again = execute(made, silent)
    assert len(calls) == 1 and again["summary"] == whole["summary"]
    assert tree_digest(Path(again["outputs"]["model"]["path"])) == tree_digest(Path(whole["outputs"]["model"]["path"]))


@pytest.mark.parametrize("relative", [False, True])
def test_scores_are_computed_once_and_compared_ones_together(tmp_path, relative):
    from stages.reward_models.reward_scorers import Response, score_in_blocks

    class Scorer:
        def __init__(self, stop=None):
            self.relative, self.stop, self.calls = relative, stop, []

        def score(self, responses):
            if len(self.calls) == self.stop:
                raise Killed
            self.calls.append(len(responses))
            prompts = [r.prompt[0]["content"] for r in responses]
            return [len(r.text) / (prompts.count(p) if relative else 1) for r, p in zip(responses, prompts)]

    responses = [
        Response([{"role": "user", "content": f"p{i % 200}"}], [{"role": "assistant", "content": "a" * (i % 9)}])
        for i in range(1400)
    ]
    with pytest.raises(Killed):
        score_in_blocks(Told(tmp_path), "s", Scorer(2), responses)
    scorer = Scorer()
    assert score_in_blocks(Told(tmp_path), "s", scorer, responses) == [
        (i % 9) / (7 if relative else 1) for i in range(1400)
    ]
    assert scorer.calls == ([448, 56] if relative else [376])


def test_what_a_block_has_learned_is_told_by_its_values():
    """Judges' tables put what they are asked again at their end, and drop what is oldest."""
    from stages.running import remembered

    remembered.begin()
    try:
        table = remembered.table("answers")
        table |= {"a": [1.0], "b": [2.0], "c": None}
        before = remembered.mark()
        table["d"] = [4.0]
        table["a"] = table.pop("a")
        table["c"] = [3.0]
        del table["b"]
        assert remembered.since(before) == {"answers 1": [["c", [3.0]], ["d", [4.0]]]}
        assert remembered.since(remembered.mark()) == {}
    finally:
        remembered.begin()
