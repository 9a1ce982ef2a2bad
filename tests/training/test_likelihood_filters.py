"""Demonstrations by instruction-following difficulty (data.ifd), and inline tool calls by what their results help
(synth.tool_data, synth.toolformer).
"""

import json
from pathlib import Path

import pytest
import torch

from stages.chat import renderer_for
from stages.harness import execute
from stages.models.modeling import load_policy
from stages.sft import Config as SftConfig
from stages.sft import encode_demonstrations
from stages.spec import ConfigError
from stages.superfilter import items_of, mean_nlls
from storage.datasets import open_dataset
from storage.schema import row_id
from tests.common import silent, written


def nll(model, ids, targets):
    """-log p of the tokens of ids at the positions ``targets``, through the model's own logits."""
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
    return [-float(logp[t - 1, ids[t]]) for t in targets]


def out(made):
    return list(open_dataset(str(Path(made["workdir"]) / "out" / "data")).iter_rows())


# -- superfilter -------------------------------------------------------------------------------------------------------


def test_ifd_equals_an_independent_computation(tiny, data):
    model, renderer = load_policy(tiny["policy"]), renderer_for(tiny["policy"])
    rows = [row for row in open_dataset(data["demonstrations"]).iter_rows() if len(row["messages"][1]["content"]) > 2][
        :6
    ]
    pairs = [items_of(row, renderer, 256)[0] for row in rows]
    given, alone = (mean_nlls(model, items, 200, "cpu") for items in zip(*pairs))
    for row, a, b in zip(rows, given, alone):
        encoded = renderer.conversation(row["messages"], train="final_turn", max_length=256)
        at = [t for t, trained in enumerate(encoded.mask) if trained]
        answer, bos = [encoded.ids[t] for t in at], renderer.tokenizer.bos_token_id
        want = nll(model, encoded.ids, at)
        assert a == pytest.approx(sum(want) / len(want), abs=1e-5)
        ids = ([] if bos is None else [bos]) + answer
        want = nll(model, ids, range(1, len(ids)))
        assert b == pytest.approx(sum(want) / len(want), abs=1e-5)


def test_the_hardest_rows_below_one_are_kept_and_all_are_written(tiny, data, spec):
    made = spec(
        "superfilter", {"keep_fraction": 0.25}, {"model": tiny["policy"], "data": data["demonstrations"]}, "filter"
    )
    found = execute(made, silent)["summary"]
    before, rows = list(open_dataset(data["demonstrations"]).iter_rows()), out(made)
    assert [row["row_id"] for row in rows] == [row["row_id"] for row in before] and [row["split"] for row in rows] == [
        row["split"] for row in before
    ]
    judged = [row for row in rows if row["split"] == "train"]
    below = sorted((row["difficulty"] for row in judged if row["difficulty"] < 1), reverse=True)
    kept = [row["difficulty"] for row in judged if row["kept"]]
    assert len(judged) == found["judged"] == 42 and found["ifd_1_or_more"] == 42 - len(below)
    assert (
        sorted(kept, reverse=True) == below[: int(0.25 * 42)]
        and len(kept) == found["kept"]
        and all(row["difficulty_judge"] == "ifd" for row in judged)
    )
    assert all(row["kept"] and row["difficulty"] is None for row in rows if row["split"] != "train")
    trained = spec(
        "sft",
        {"max_steps": 1, "batch_size": 4, "max_length": 64},
        {"model": tiny["policy"], "data": made["workdir"] + "/out/data"},
        "sft",
    )
    assert execute(trained, silent)["summary"]["dropped/not_kept"] == 42 - len(kept)
    # a curriculum goes by the difficulty that was judged here
    rows, config = [{**row, "extra_json": '{"difficulty": 7}'} for row in judged if row["kept"]], SftConfig()
    path = write_dataset_of(str(Path(made["workdir"], "two")), "demonstrations/1", rows)
    items, _ = encode_demonstrations(open_dataset(path), "train", renderer_for(tiny["policy"]), config)
    assert sorted((i.extra["difficulty"] for i in items), reverse=True) == sorted(kept, reverse=True)


def test_rows_without_an_answer_to_judge_are_refused(tiny, spec):
    path = write_dataset_of(
        spec.path("none") + ".data",
        "demonstrations/1",
        [
            {
                "messages": [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "a"}],
                "train_turns": [1],
            }
        ],
    )
    with pytest.raises(ValueError, match="no training row has an answer to judge .* raise max_length"):
        execute(spec("superfilter", {"max_length": 64}, {"model": tiny["policy"], "data": path}, "none"), silent)


# -- inline tools ------------------------------------------------------------------------------------------------------


def write_dataset_of(path, kind, rows):
    written(path, "made", kind, [row for row in rows])
    return path


TEXTS = [
    {"text": "Half of 7 is <API>calculator (7 / 2)</API> and no more.", "n_chars": 1},
    {"text": "Rome: <API>search(Rome)</API>", "n_chars": 1, "extra_json": json.dumps({"table": {"Rome": "3 PM"}})},
    {"text": "It is <API>python(print(2 ** 10))</API>.", "n_chars": 1},
    {"text": "Lost <API>clock(Rome)</API>, <API>calculator(1 / 0)</API>.", "n_chars": 1},
    {"text": "Plain.", "n_chars": 6},
]


def test_calls_are_made_and_replaced_or_followed_by_their_results(spec):
    path = write_dataset_of(spec.path("texts") + ".data", "text/1", TEXTS)
    made = {mode: spec("inline_tools", {"mode": mode}, {"data": path}, mode) for mode in ("replace", "append")}
    found = {mode: execute(made[mode], silent)["summary"] for mode in made}
    assert [row["text"] for row in out(made["replace"])] == [
        "Half of 7 is 3.5 and no more.",
        "Rome: Rome: 3 PM",
        "It is 1024.",
        "Lost , .",
        "Plain.",
    ]
    assert [row["text"] for row in out(made["append"])][
        0
    ] == "Half of 7 is <API>calculator (7 / 2)</API> 3.5 and no more."
    assert found["replace"] | {"rows": 5, "calls": 5, "kept": 3, "failed": 2, "rows_with_calls": 4} == found["replace"]
    for row in out(made["replace"]):
        assert row["row_id"] == row_id("text/1", row) and row["n_chars"] == len(row["text"])


def test_trained_turns_hold_calls_too(spec):
    messages = [
        {"role": "user", "content": "<API>calculator(1)</API>?"},
        {"role": "assistant", "content": "It is <API>calculator(2 * 3)</API>"},
    ]
    path = write_dataset_of(
        spec.path("talk") + ".data", "demonstrations/1", [{"messages": messages, "train_turns": [1]}]
    )
    made = spec("inline_tools", {}, {"data": path}, "talk")
    execute(made, silent)
    # a prompt is nobody's to change
    assert [message["content"] for message in out(made)[0]["messages"]] == ["<API>calculator(1)</API>?", "It is 6"]


@pytest.mark.parametrize("min_gain", (-1e9, 1e9))
def test_a_call_is_kept_where_its_result_helps(tiny, spec, min_gain):
    text, call = "Half of 7 is <API>calculator(7 / 2)</API> and no more.", "<API>calculator(7 / 2)</API>"
    path = write_dataset_of(spec.path("gain") + ".data", "text/1", [{"text": text, "n_chars": len(text)}])
    made = spec(
        "inline_tools", {"min_gain": min_gain, "mode": "append"}, {"data": path, "model": tiny["policy"]}, "gain"
    )
    found = execute(made, silent)["summary"]
    assert [row["text"] for row in out(made)] == [
        text.replace(call, f"{call} 3.5") if min_gain < 0 else text.replace(call, "")
    ]
    model, tokenizer = load_policy(tiny["policy"]), renderer_for(tiny["policy"]).tokenizer
    ids = lambda part: tokenizer(part, add_special_tokens=False)["input_ids"] if part else []
    start, follows, losses = (
        [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id],
        ids(" and no more.")[:5],
        [],
    )
    for inserted in ("", call, f"{call} 3.5"):
        seen = start + ids("Half of 7 is " + inserted)
        weights = [1 - t / 5 for t in range(len(follows))]
        losses.append(
            sum(
                w * loss
                for w, loss in zip(weights, nll(model, seen + follows, range(len(seen), len(seen) + len(follows))))
            )
            / sum(weights)
        )
    assert found["gain_mean"] == pytest.approx(min(losses[:2]) - losses[2], abs=1e-5)


def test_a_later_turn_is_judged_behind_earlier_ones_as_they_are_kept(tiny, spec):
    """A row whose first answer holds a call, and the row that this one becomes, are the same to the second answer."""
    ask = lambda first: [
        {"role": "user", "content": "Half of 7?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And half of 9?"},
        {"role": "assistant", "content": "It is <API>calculator(9 / 2)</API> and no more."},
    ]
    means = []
    for name, first in (("called", "It is <API>calculator(7 / 2)</API>"), ("said", "It is 3.5")):
        rows = [{"messages": ask(first), "train_turns": [1, 3]}]
        path = write_dataset_of(spec.path(name) + ".data", "demonstrations/1", rows)
        made = spec("inline_tools", {"min_gain": -1e9}, {"data": path, "model": tiny["policy"]}, name)
        means.append(execute(made, silent)["summary"]["gain_mean"])
        # nothing follows the call of the first turn, so it has no gain and is taken out
        assert out(made)[0]["messages"][3]["content"] == "It is 4.5 and no more."
    before = out(spec("inline_tools", {}, {}, "called"))[0]["messages"][1]["content"]
    path = write_dataset_of(
        spec.path("kept") + ".data", "demonstrations/1", [{"messages": ask(before), "train_turns": [1, 3]}]
    )
    made = spec("inline_tools", {"min_gain": -1e9}, {"data": path, "model": tiny["policy"]}, "kept")
    assert means[0] == execute(made, silent)["summary"]["gain_mean"] != means[1]


def test_what_cannot_be_is_refused(tiny, spec):
    path = write_dataset_of(spec.path("refused") + ".data", "text/1", [{"text": "Plain.", "n_chars": 6}])
    with pytest.raises(ConfigError, match="give --input model=MODEL and min_gain=0.5 together"):
        execute(spec("inline_tools", {"min_gain": 0.5}, {"data": path}, "a"), silent)
    with pytest.raises(ConfigError, match="give --input model=MODEL and min_gain=0.5 together"):
        execute(spec("inline_tools", {}, {"data": path, "model": tiny["policy"]}, "b"), silent)
    with pytest.raises(ValueError, match="no text holds a call"):
        execute(spec("inline_tools", {}, {"data": path}, "c"), silent)
