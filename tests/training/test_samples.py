"""report_samples: what the starting and the published policy answer, on the report, and nothing else changed by it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.chat import renderer_for
from stages.decoding.sampler import Sampler
from stages.decoding.sampling import SamplingParams
from stages.harness import execute
from stages.models import memory
from stages.models.modeling import load_frozen
from stages import samples
from stages.samples import Samples, asked_of
from storage.datasets import open_dataset, write_dataset
from storage.files import tree_digest
from storage.schema import complete_row
from tests.common import assistant, silent, user

TRAINED = {"batch_size": 8, "learning_rate": 5e-3, "max_length": 64}
CASES = {
    "sft": ("sft", {}, "demonstrations"),
    "sft of averages, rounded": (
        "sft",
        {"num_train_epochs": 2, "publish_epochs": True, "ema_decay": 0.6, "save_dtype": "bfloat16"},
        "demonstrations",
    ),
    "sft of the best pass with an adapter": (
        "sft",
        {"lora_rank": 3, "lora_dropout": 0.2, "eval_every": 2, "select_by": "loss"},
        "demonstrations",
    ),
    "align": ("align", {}, "pairs"),
    "distill": ("distill", {"method": "on_policy", "max_completion_length": 8, "max_steps": 3}, "demonstrations"),
}


def inputs_of(case, tiny, data):
    stage, _, rows = CASES[case]
    return {"model": tiny["policy"], "data": data[rows]} | ({"teacher": tiny["other"]} if stage == "distill" else {})


def table(result) -> list[dict]:
    found = next((r for r in result["reports"] if r["name"] == "samples"), None)
    return json.loads(Path(found["table"]).read_text()) if found else []


def page(result) -> str:
    return Path(next(r for r in result["reports"] if r["name"] == "summary")["markdown"]).read_text()


def greedy(path, prompts, tokens):
    """Answers of a model directory, read as anybody would read it."""
    renderer = renderer_for(path)
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, stop_ids=renderer.stop_ids)
    return [
        group[0]
        for group in Sampler(load_frozen(path), renderer.tokenizer).generate(prompts, params, [[0]] * len(prompts))
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_report_has_answers_of_both_models_and_the_run_is_the_same(tiny, data, spec, case):
    stage, config, rows = CASES[case]
    inputs = inputs_of(case, tiny, data)
    with_them = execute(spec(stage, {**TRAINED, **config}, inputs, "with"), silent)
    without = execute(spec(stage, {**TRAINED, **config, "report_samples": 0}, inputs, "without"), silent)
    assert table(without) == [] and "before and after" not in page(without)
    assert with_them["summary"] == without["summary"] and with_them["warnings"] == without["warnings"]
    works = [Path(one["outputs"]["model"]["path"]).parents[1] for one in (with_them, without)]
    assert (works[0] / "metrics.jsonl").read_bytes() == (works[1] / "metrics.jsonl").read_bytes()
    for name, output in with_them["outputs"].items():
        assert tree_digest(output["path"]) == tree_digest(without["outputs"][name]["path"]), name
    shown, dataset = table(with_them), open_dataset(data[rows])
    asked = [asked_of(dataset.kind, r, renderer_for(tiny["policy"])) for r in dataset.iter_rows(split="validation")][:4]
    assert [r["prompt"] for r in shown] == [one.prompt for one in asked] and {r["split"] for r in shown} == {
        "validation"
    }
    assert [r["given answer"] for r in shown] == [one.given for one in asked] and all(one.given for one in asked)
    tokens = max(r["tokens after"] for r in shown)
    for when, path in (("before", tiny["policy"]), ("after", with_them["outputs"]["model"]["path"])):
        answers = greedy(path, [list(one.ids) for one in asked], tokens)
        assert [r[f"answer {when}"] for r in shown] == [a.text for a in answers]
        assert [r[f"finish {when}"] for r in shown] == [a.finish_reason for a in answers]
    assert any(r["answer before"] != r["answer after"] for r in shown), "it learned something"
    assert "## Answers to 4 held-out prompts, before and after training" in page(with_them)


@pytest.mark.parametrize("step", (0, 3))
def test_a_killed_stage_reports_the_same(tiny, data, spec, monkeypatch, step):
    """Also what it used: the answers of the start are asked for once."""
    from stages import training

    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    inputs = inputs_of("sft", tiny, data)
    whole = execute(spec("sft", TRAINED, inputs, "whole"), silent)
    taken = training.Trainer.step

    def killed(self, items):
        if self.step_index == step:
            raise KeyboardInterrupt
        return taken(self, items)

    monkeypatch.setattr(training.Trainer, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        execute(spec("sft", TRAINED, inputs, "killed"), silent)
    monkeypatch.setattr(training.Trainer, "step", taken)
    resumed = execute(spec("sft", TRAINED, inputs, "killed"), silent)
    assert resumed["resumed_from"] == (step or None)
    assert table(resumed) == table(whole) and page(resumed) == page(whole) and resumed["usage"] == whole["usage"]


def test_rows_without_a_validation_split_and_plain_text(tiny, spec, tmp_path):
    """Training rows, said so; a text goes on from its start; a prompt of its own is shown once."""
    rows = [
        complete_row("pairs/1", values, dataset="made", source="s", origin="human", split="train")
        for values in (
            {"prompt": user("what?"), "chosen": assistant(f"yes {i}"), "rejected": assistant("no"), "pairs_in_group": 3}
            for i in range(3)
        )
    ]
    write_dataset(str(tmp_path / "pairs"), "made", "pairs/1", rows)
    found = execute(spec("align", TRAINED, {"model": tiny["policy"], "data": str(tmp_path / "pairs")}, "align"), silent)
    assert [(r["split"], r["prompt"], r["given answer"]) for r in table(found)] == [("train", "what?", "yes 0")]
    assert "Answers to 1 training prompts" in page(found) and "were trained on" in page(found)
    texts = [
        complete_row(
            "text/1", {"text": "abcdefgh " * (9 + i), "n_chars": 9}, dataset="t", source="s", origin="human", split=part
        )
        for i, part in enumerate(("train", "train", "validation"))
    ]
    write_dataset(str(tmp_path / "text"), "made", "text/1", texts)
    found = execute(
        spec("sft", {**TRAINED, "train_on": "full"}, {"model": tiny["policy"], "data": str(tmp_path / "text")}, "text"),
        silent,
    )
    (shown,) = table(found)
    assert texts[2]["text"].startswith(shown["prompt"]) and shown["prompt"]
    assert texts[2]["text"].removeprefix(shown["prompt"]).startswith(shown["given answer"]) and shown["given answer"]


def test_a_stage_without_room_to_sample_says_so(tiny, data, spec, monkeypatch):
    monkeypatch.setattr(memory, "limit_of", lambda *args: memory.GIB)
    monkeypatch.setattr(memory, "kv_of", lambda *args: memory.GIB)
    found = execute(spec("sft", TRAINED, inputs_of("sft", tiny, data), "small"), silent)
    assert table(found) == [] and "No answers of the model are shown: sampling takes 1." in page(found)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_trained_model_that_cannot_be_sampled_is_published(tiny, data, spec, monkeypatch, dtype):
    """With gradients and the optimizer's state beside it memory may not suffice for what it did at the start."""
    answers, asked = samples.Samples._answers, []

    def full(self, *given):
        asked.append(given)
        if len(asked) > 1:
            raise torch.OutOfMemoryError("no room")
        return answers(self, *given)

    monkeypatch.setattr(samples.Samples, "_answers", full)
    found = execute(spec("sft", {**TRAINED, "save_dtype": dtype}, inputs_of("sft", tiny, data), dtype), silent)
    assert len(asked) == 2 and Path(found["outputs"]["model"]["path"], "model.safetensors").exists()
    assert table(found) == [] and "the trained model could not be sampled (no room)" in page(found)


def test_a_reward_model_shows_the_pairs_that_it_is_wrong_sure_and_unsure_about(tiny, data, spec):
    """Of the split that judges it; an earlier model's figures and samples have a name of their own."""
    inputs = {"model": tiny["policy"], "data": data["pairs"], "previous": tiny["reward"]}
    found = execute(spec("reward_model", {"batch_size": 8, "max_length": 96}, inputs, "rm"), silent)
    named = {r["name"] for r in found["reports"]}
    assert {"samples-validation", "samples-previous", "margins-validation", "margins-previous"} <= named
    pairs = json.loads(
        Path(next(r for r in found["reports"] if r["name"] == "samples-validation")["table"]).read_text()
    )
    held_out = {r["chosen"][0]["content"] for r in open_dataset(data["pairs"]).iter_rows(split="validation")}
    assert len(pairs) == 6 and {r["chosen"] for r in pairs} <= held_out
    for row in pairs:
        assert row["margin"] == pytest.approx(row["chosen score"] - row["rejected score"])
        assert (row["which"] == "most confident mistake") <= (row["margin"] < 0)
    assert "Held-out rows that it is wrong about, sure of and unsure of (validation)" in page(found)


@pytest.mark.parametrize("prompts,before,after,told", [(16, 10, 14, True), (16, 10, 13, False), (15, 10, 99, False)])
def test_answers_that_grow_by_a_third_are_warned_of_where_there_are_enough(prompts, before, after, told):
    samples, said = object.__new__(Samples), []
    samples.stage = SimpleNamespace(warn=lambda code, text: said.append(text))
    samples.asked, samples.tokens = [None] * prompts, 128
    samples.before, samples.after = ([{"tokens": n}] * prompts for n in (before, after))
    samples.warn_of_length()
    assert bool(said) == told and (not told or "in 14 tokens and the starting one in 10 (128 at most)" in said[0])


def test_the_prompt_and_the_given_answer_of_every_kind_of_rows(tiny):
    renderer = renderer_for(tiny["policy"])
    both = user("one?") + assistant("1") + user("two?") + assistant("2") + user("three?")
    spoken = lambda kind, **row: asked_of(kind, row, renderer)
    talk = spoken("demonstrations/1", messages=[*both, *assistant("3")], train_turns=[1, 3], kept=True)
    assert (talk.prompt, talk.given) == ("two?", "2") and talk.ids == tuple(renderer.prompt_ids(both[:3]))
    assert spoken("demonstrations/1", messages=[*both, *assistant("3")], train_turns=None).given == "3"
    assert spoken("demonstrations/1", messages=both[:2], train_turns=[1], kept=False) is None
    assert spoken("demonstrations/1", messages=assistant("hello"), train_turns=[0]) is None, "nothing is asked"
    ranked = spoken("rankings/1", prompt=user("?"), completions=[assistant("b"), assistant("a")], ranks=[2, 1])
    assert (ranked.prompt, ranked.given) == ("?", "a")
    for label, given in ((True, "x"), (False, "")):
        assert spoken("unpaired/1", prompt=user("?"), completion=assistant("x"), label=label).given == given
    encoded = renderer.conversation(both[:4], train="all_assistant")
    captured = spoken("teacher_logps/1", ids=encoded.ids, mask=encoded.mask)
    assert captured.ids == tuple(renderer.prompt_ids(both[:3])) and captured.given == "2" and "two?" in captured.prompt
