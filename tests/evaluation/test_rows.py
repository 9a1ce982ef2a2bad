"""Rows of a dataset on the command line: which ones, and what is shown of them."""

from __future__ import annotations

import pytest

from flows.rows import find, print_rows
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from storage.store import StoreError


def test_the_first_rows_that_are_asked_for_are_shown_with_their_messages(tiny, capsys):
    rows = list(open_dataset(tiny["prompts"]).iter_rows())
    asked = find(tiny["prompts"], [], 2)
    assert asked["rows"] == rows[:2] and asked["of"] == len(rows)
    row = rows[3]
    for where in ([f"row_id={row['row_id']}"], [f"row_id={row['row_id'][:10]}", f"split={row['split']}"]):
        assert find(tiny["prompts"], where, 5)["rows"] == [row]
    print_rows(find(tiny["prompts"], [f"row_id={row['row_id']}"], 1))
    said = capsys.readouterr().out
    assert said.startswith("1 of 1 rows of ") and row["row_id"] in said
    assert f"  prompt:\n    [user] {row['prompt'][0]['content']}" in said
    assert find(tiny["prompts"], ["split=nowhere"], 5)["rows"] == []


def test_what_there_is_none_of_is_told(tiny):
    with pytest.raises(ConfigError, match="no column 'spilt'; did you mean 'split'"):
        find(tiny["prompts"], ["spilt=train"], 1)
    with pytest.raises(ConfigError, match="write COLUMN=VALUE"):
        find(tiny["prompts"], ["split"], 1)
    with pytest.raises(ConfigError, match="is a model, which has no rows"):
        find(tiny["policy"], [], 1)
    with pytest.raises(StoreError):
        find("dataset:nothing@latest", [], 1)


def test_of_a_rollout_every_token_stands_beside_its_numbers(tiny, tmp_path, capsys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny["policy"])
    prompt, completion = (tokenizer.encode(text) for text in ("what is two?", "answer: 4<|im_end|>"))
    rows = [
        complete_row(
            "rollouts/1",
            {
                "row_id": f"rollout-{i}",
                "prompt_id": "p",
                "iteration": i,
                "policy_version": i,
                "sample_idx": 0,
                "prompt_ids": prompt,
                "completion_ids": completion,
                "loss_mask": [1] * len(completion),
                "logp_old": [-0.5 * k for k in range(len(completion))],
                "advantages": [0.25] * len(completion),
                "reward": 1.0,
                "reward_components": [],
                "truncated": False,
                "terminated": True,
                "length": len(completion),
                "gen": {"model_id": tiny["policy"]},
            },
            dataset="r",
            source="test",
            origin="ai",
        )
        for i in range(3)
    ]
    write_dataset(str(tmp_path / "r"), "r", "rollouts/1", rows)
    value = find(str(tmp_path / "r"), ["iteration=1"], 3)
    assert [row["iteration"] for row in value["rows"]] == [1] and value["of"] == 1
    print_rows(value)
    said = capsys.readouterr().out
    assert f"prompt ({len(prompt)} tokens):\n    what is two?" in said
    lines = [line.split() for line in said.splitlines()]
    head = next(i for i, line in enumerate(lines) if line[:1] == ["token"])
    assert lines[head] == ["token", "id", "loss_mask", "logp_old", "advantages"]
    shown = lines[head + 1 :]
    assert [int(line[-4]) for line in shown] == completion and shown[-1][0] == '"<|im_end|>"'
    assert [float(line[-2]) for line in shown] == [-0.5 * k for k in range(len(completion))]
    value["rows"][0]["gen"]["model_id"] = "model:gone"
    print_rows(value)
    assert f"    {' '.join(map(str, prompt))}\n" in capsys.readouterr().out
