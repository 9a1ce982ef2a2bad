"""Distillation: the chunked divergence against autograd, what the teacher reads, and the stage on a tiny model."""

import json
from pathlib import Path

import pytest
import torch

from stages.batching import collate
from stages.harness import execute
from stages.models import modeling
from stages.models.divergence import divergence
from stages.models.modeling import Head
from stages.spec import ConfigError
from tests.common import silent

BASE = {"learning_rate": 1e-2, "batch_size": 8, "num_train_epochs": 2, "max_length": 64}


@pytest.mark.parametrize("direction", ("forward", "reverse", "jsd"))
@pytest.mark.parametrize("temperature", (1.0, 1.7))
def test_divergence_equals_autograd(direction, temperature, monkeypatch):
    monkeypatch.setattr(modeling, "HEAD_CHUNK_ELEMENTS", 40)
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 6), (13, 6), (13,))
    )
    theirs, teacher = torch.randn(9, 4, dtype=torch.float64), Head(torch.randn(13, 4, dtype=torch.float64), None)
    upstream = torch.randn(9, dtype=torch.float64)
    for scale, softcap in ((1.0, None), (0.7, 4.0)):
        student = Head(weight, bias, scale, softcap)
        ours = divergence(student, hidden, teacher, theirs, direction, temperature, 0.3)
        q, p = (torch.softmax(h.logits(x) / temperature, -1) for h, x in ((student, hidden), (teacher, theirs)))
        kl = lambda a, b: (a * (a / b).log()).sum(-1)
        m = 0.3 * p + 0.7 * q
        plain = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": 0.3 * kl(p, m) + 0.7 * kl(q, m)}[
            direction
        ] * temperature**2
        assert torch.allclose(ours, plain, atol=1e-12)
        for a, b in zip(
            torch.autograd.grad((ours * upstream).sum(), (hidden, weight, bias)),
            torch.autograd.grad((plain * upstream).sum(), (hidden, weight, bias)),
        ):
            assert torch.allclose(a, b, atol=1e-11)


def test_a_distribution_equal_to_the_teachers_has_no_gradient():
    weight, hidden = torch.randn(7, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for direction in ("forward", "reverse", "jsd"):
        value = divergence(Head(weight, None), hidden, Head(weight, None), hidden.detach(), direction)
        assert torch.allclose(value, torch.zeros(5, dtype=torch.float64), atol=1e-14)
        assert torch.allclose(
            torch.autograd.grad(value.sum(), hidden)[0], torch.zeros(5, 3, dtype=torch.float64), atol=1e-14
        )


def test_other_vocabularies_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="sft on the teacher's answers"):
        divergence(Head(torch.randn(7, 3), None), torch.randn(2, 3), Head(torch.randn(8, 3), None), torch.randn(2, 3))


@pytest.fixture(scope="module")
def teacher(tiny, data, tmp_path_factory):
    """A tiny model that has learned the demonstrations."""
    workdir = tmp_path_factory.mktemp("teacher")
    result = execute(
        {
            "stage": "sft",
            "config": {**BASE, "num_train_epochs": 6},
            "device": "cpu",
            "workdir": str(workdir),
            "inputs": {"model": {"path": tiny["policy"]}, "data": {"path": data["demonstrations"]}},
        },
        silent,
    )
    return result["outputs"]["model"]["path"]


def distilled(spec, tiny, data, config, name, **inputs):
    made = spec(
        "distill", {**BASE, **config}, {"model": tiny["policy"], "data": data["demonstrations"], **inputs}, name
    )
    return execute(made, silent), made


@pytest.mark.parametrize("direction", ("forward", "jsd"))
def test_the_student_moves_to_its_teacher(spec, tiny, data, teacher, direction):
    result, _ = distilled(spec, tiny, data, {"direction": direction, "num_train_epochs": 6}, "logit", teacher=teacher)
    assert result["summary"]["validation/kl"] < 0.2 * result["summary"]["validation/kl_before"]


@pytest.mark.parametrize(
    "schedule,weights", (("linear", (1.0, 0.75, 0.5, 0.25, 0.0)), ("cosine", (1.0, 0.8535534, 0.5, 0.1464466, 0.0)))
)
def test_codistillation_mixes_both_losses_with_a_scheduled_weight(spec, tiny, data, teacher, schedule, weights):
    _, made = distilled(
        spec,
        tiny,
        data,
        {"soft_weight": 1.0, "soft_weight_end": 0.0, "soft_weight_schedule": schedule, "max_steps": 5},
        "co",
        teacher=teacher,
    )
    rows = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "loss" in r]
    assert len(steps) == len(weights)
    for soft, row in zip(weights, steps):
        assert row.get("divergence", row["loss"]) == pytest.approx(soft * row["kl"], rel=1e-4, abs=1e-6)
    assert steps[-1]["nll"] == pytest.approx(steps[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("soft,end", ((1.0, 0.0), (0.3, 0.8)))
def test_validation_passes_are_under_one_soft_weight(spec, tiny, data, teacher, soft, end):
    """Those of weights that hardly move are equal although the weight of the divergence goes from one end to the other:
    select_by=loss compares like with like.
    """
    config = {
        "soft_weight": soft,
        "soft_weight_end": end,
        "max_steps": 4,
        "learning_rate": 1e-9,
        "eval_every": 1,
        "select_by": "loss",
    }
    _, made = distilled(spec, tiny, data, config, "passes", teacher=teacher)
    rows = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    losses = [r["validation/loss"] for r in rows if "validation/loss" in r]
    assert len(losses) == 5 and losses == pytest.approx([losses[0]] * 5, rel=1e-5)


def test_a_teacher_whose_head_is_padded_further_is_as_good(spec, tiny, data, teacher, tmp_path):
    """Qwen2.5-7B has 152064 rows, 0.5B 151936, and both one tokenizer: no token has the ids behind the student's."""
    from stages.chat import load_tokenizer
    from stages.models.modeling import load_policy, save_policy

    padded = load_policy(teacher)
    padded.resize_token_embeddings(padded.config.vocab_size + 5, mean_resizing=False)
    with torch.no_grad():
        padded.get_output_embeddings().weight[-5:] = 3.0
    save_policy(padded, load_tokenizer(teacher), tmp_path / "padded")
    summaries = []
    for name, path in (("plain", teacher), ("padded", str(tmp_path / "padded"))):
        summaries.append(distilled(spec, tiny, data, {"max_steps": 2}, name, teacher=path)[0]["summary"])
    assert summaries[0]["validation/kl"] == pytest.approx(summaries[1]["validation/kl"], rel=1e-5)
    wide = {"policy": str(tmp_path / "padded")}
    rows = padded.config.vocab_size
    with pytest.raises(
        ConfigError, match=rf"{rows - 5} rows and the student's {rows}.*resize_token_embeddings\({rows - 5}"
    ):
        distilled(spec, wide, data, {"max_steps": 2}, "wide student", teacher=teacher)


def test_context_moves_into_the_weights(spec, tiny, data, teacher):
    """The teacher is the starting model with the context in front; its targets are the student's tokens."""
    result, _ = distilled(
        spec, tiny, data, {"method": "context", "context": "answer with the letter b", "num_train_epochs": 4}, "context"
    )
    assert 0 < result["summary"]["validation/kl"] < result["summary"]["validation/kl_before"]
    assert result["summary"]["rows"] == 42 and result["summary"]["dropped/context_does_not_fit"] == 0


def test_the_student_answers_its_share_of_the_rows(spec, tiny, data, teacher, monkeypatch):
    from stages.chat import renderer_for
    from stages.distill import Config, Distillation, answers, encode
    from stages.harness import Stage
    from stages.models.modeling import load_policy
    from stages.registry import get_stage

    made = spec(
        "distill",
        {**BASE, "method": "on_policy", "lmbda": 0.5, "max_completion_length": 6, "direction": "jsd"},
        {"model": tiny["policy"], "data": data["demonstrations"], "teacher": teacher},
        "gkd",
    )
    stage = Stage(get_stage("distill"), made, silent)
    renderer = renderer_for(tiny["policy"])
    train, _ = encode(stage, renderer, "train")
    source = answers(
        stage, train, Distillation(Config(method="on_policy"), None), renderer, load_policy(tiny["policy"])
    )
    known = {i.row_id: i for i in train}
    own = [item for step in range(6) for item in source.items(step) if item is not known[item.row_id]]
    assert 0 < len(own) < 48 and all(1 <= len(i.responses[0]) <= 6 and i.masks[0].all() and len(i.prompt) for i in own)
    # all of them, by a student that has learned to end its answers
    inputs = {name: given["path"] for name, given in made["inputs"].items()}
    whole = spec("distill", {**made["config"], "lmbda": 1.0, "max_completion_length": 24}, inputs, "all")
    every = answers(
        Stage(get_stage("distill"), whole, silent),
        train,
        Distillation(Config(method="on_policy"), None),
        renderer,
        load_policy(teacher),
    )
    said = every.items(0)
    assert all(item is not known[item.row_id] for item in said)
    ended = [i.responses[0].tolist() for i in said if len(i.responses[0]) < 24]
    assert ended and all(ids[-1] in renderer.stop_ids and not renderer.stop_ids & set(ids[:-1]) for ids in ended)
    first, later = ([i.responses[0].tolist() for i in every.sample(train[:8], step)] for step in (0, 1))
    assert first != later, "answered anew at every step"
    released = []
    monkeypatch.setattr("stages.decoding.sampler.Sampler.release", lambda sampler: released.append(1))
    for gib, times in ((1024, 0), (1e-3, 1)):  # where memory is tight the sampler keeps nothing while is trained
        config = {**whole["config"], "max_completion_length": 2, "device_memory_gib": gib}
        stage = Stage(get_stage("distill"), spec("distill", config, inputs, f"in {gib}"), silent)
        objective = Distillation(Config(method="on_policy"), None)
        answers(stage, train, objective, renderer, load_policy(teacher)).items(0)
        assert len(released) == times
    # what it wrote itself is no label: the share of the likelihood is that of the data's answers
    objective = Distillation(Config(method="on_policy", soft_weight=0.25), load_policy(teacher))
    student = load_policy(tiny["policy"])
    terms = [objective(student, collate(items)).loss for items in (own[:3] + train[:2], train[:2], own[:3])]
    assert float(terms[0]["nll"][0]) == pytest.approx(float(terms[1]["nll"][0]), rel=1e-5) and terms[2]["nll"][0] == 0.0
    assert float(terms[0]["divergence"][0]) > float(terms[1]["divergence"][0]) and float(terms[1]["nll"][0]) > 0.0
    again = [i.responses[0].tolist() for i in source.items(0)]
    assert again == [i.responses[0].tolist() for i in source.items(0)]
    result = execute({**made, "workdir": made["workdir"] + "-run"}, silent)
    assert result["summary"]["validation/kl"] < result["summary"]["validation/kl_before"]


def test_the_student_answers_in_the_room_it_has_and_the_last_trained_turn(spec, tiny, teacher, tmp_path):
    """A prompt that leaves less than max_completion_length of the model's positions ended the run at the step that drew
    it; a conversation that ends with the user was answered behind its own answer.
    """
    from stages.chat import renderer_for
    from stages.distill import Config, Distillation, answers, encode
    from stages.harness import Stage
    from stages.models.modeling import load_policy
    from stages.registry import get_stage
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    renderer, said = renderer_for(tiny["policy"]), lambda role, text: {"role": role, "content": text}
    long = next(m for n in range(1, 300) if len(renderer.prompt_ids(m := [said("user", "q" * n)])) >= 250)
    talks = {
        "long": [*long, said("assistant", "yes")],
        "open": [said("user", "a"), said("assistant", "b"), said("user", "c")],
        "chosen": [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")],
    }
    rows = [
        complete_row(
            "demonstrations/1",
            {"messages": m, "train_turns": [1], "kept": True},
            dataset=name,
            source="s",
            origin="human",
            split="train",
        )
        for name, m in talks.items()
    ]
    write_dataset(str(tmp_path / "talks"), "talks", "demonstrations/1", rows)
    made = spec(
        "distill",
        {**BASE, "method": "on_policy", "lmbda": 1.0, "max_completion_length": 40, "max_length": 256},
        {"model": tiny["policy"], "data": str(tmp_path / "talks"), "teacher": teacher},
        "room",
    )
    stage = Stage(get_stage("distill"), made, silent)
    train, _ = encode(stage, renderer, "train")
    source = answers(
        stage, train, Distillation(Config(method="on_policy"), None), renderer, load_policy(tiny["policy"])
    )
    asked = {r["row_id"]: renderer.prompt_ids(m[:1]) for r, m in zip(rows, talks.values())}
    found = {item.row_id: item for item in source.sample(train, 0)}
    assert len(found) == 3 and all(
        i.prompt.tolist() == asked[row_id] and i.masks[0].all() for row_id, i in found.items()
    )
    assert all(1 <= len(i.responses[0]) <= min(40, 256 - len(i.prompt)) for i in found.values())


@pytest.mark.parametrize("context", ("it is {answer}", "{prompt} {answer}", "a" * 8))
def test_a_context_that_leaves_the_teacher_no_room_drops_its_rows(spec, tiny, teacher, tmp_path, context):
    """Of 256 positions the long question takes all but some, the short one nearly none; where the teacher has room for
    some tokens the student stops there.
    """
    from stages.distill import Config, Distillation, answers, encode
    from stages.chat import renderer_for
    from stages.harness import Stage
    from stages.models.modeling import load_policy
    from stages.registry import get_stage
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    renderer, said = renderer_for(tiny["policy"]), lambda role, text: {"role": role, "content": text}
    room = lambda text: 256 - len(renderer.prompt_ids([said("user", text)]))
    long = next(text for n in range(1, 300) if room(text := "q" * n) <= 40)
    rows = [
        complete_row(
            "demonstrations/1",
            {"messages": [said("user", text), said("assistant", answer)], "train_turns": [1], "kept": True},
            dataset=name,
            source="s",
            origin="human",
            split="train",
        )
        for name, text, answer in (("much", long, "b" * 8), ("too much", long, "b" * 100), ("short", "q", "b"))
    ]
    write_dataset(str(tmp_path / "talks"), "talks", "demonstrations/1", rows)
    config = {**BASE, "method": "on_policy", "lmbda": 1.0, "max_completion_length": 40, "max_length": 256}
    made = spec(
        "distill", {**config, "context": context}, {"model": tiny["policy"], "data": str(tmp_path / "talks")}, "room"
    )
    stage = Stage(get_stage("distill"), made, silent)
    train, dropped = encode(stage, renderer, "train")
    shown = "{answer}" in context
    assert dropped["context_does_not_fit"] == int(shown) and len(train) == 3 - int(shown)
    objective = Distillation(Config(**stage.config.model_dump()), None)
    source = answers(stage, train, objective, renderer, load_policy(tiny["policy"]))
    for mine in source.sample(train, 0):
        theirs = mine.extra["teacher_item"]
        assert mine.extra["own"] and mine.responses[0].tolist() == theirs.responses[0].tolist()
        assert len(mine.prompt) < len(theirs.prompt) and len(theirs.prompt) + len(theirs.responses[0]) <= 256
        text = renderer.tokenizer.decode(theirs.prompt)
        assert ("b" in text) == shown and ("a" * 8 in text) != shown


def test_a_teacher_that_follows_is_the_average_of_the_student(spec, tiny, data):
    """Its first step is that of a teacher that stays, and the others are not."""
    config = {"method": "context", "context": "be brief", "teacher_update": "ema", "max_steps": 3}
    kept = {}
    for decay in (0.0, 0.9, None):
        more = {"teacher_update": "frozen"} if decay is None else {"teacher_decay": decay}
        _, made = distilled(spec, tiny, data, {**config, **more}, f"decay {decay}")
        kept[decay] = [
            json.loads(line)["metrics"]["kl"]
            for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()
            if "loss" in json.loads(line)["metrics"]
        ]
    assert len({kl[0] for kl in kept.values()}) == 1 and len({kl[2] for kl in kept.values()}) == 3


@pytest.mark.parametrize(
    "given,says",
    [
        ({"method": "context"}, "write context=TEXT"),
        ({"context": "c"}, "write method=context"),
        ({"method": "context", "context": "see {answer}"}, "write method=on_policy lmbda=1"),
        ({"method": "on_policy", "context": "see {answer}"}, "write method=on_policy lmbda=1"),
        (
            {"method": "context", "context": "c", "teacher_update": "ema", "select_by": "loss", "eval_every": 2},
            "teacher_update=frozen",
        ),
        (
            {"method": "on_policy", "lmbda": 1.0, "context": "{answer}", "select_by": "kl", "eval_every": 2},
            "context without",
        ),
    ],
)
def test_a_context_that_teaches_nothing_is_refused(given, says):
    from stages.distill import Config

    with pytest.raises(ValueError, match=says):
        Config(**given)


def test_a_teacher_is_asked_for(spec, tiny, data, teacher):
    with pytest.raises(ConfigError, match="teacher=REF, or write method=context context=TEXT"):
        distilled(spec, tiny, data, {}, "none")
    with pytest.raises(ConfigError, match="teacher=REF, or write context=TEXT"):
        distilled(spec, tiny, data, {"method": "on_policy"}, "no context")
    follows = {"method": "on_policy", "context": "c", "teacher_update": "ema"}
    with pytest.raises(ConfigError, match="leave the input teacher out"):
        distilled(spec, tiny, data, follows, "another", teacher=teacher)


@pytest.mark.parametrize(
    "given,says",
    [
        ({"jsd_beta": 0.3}, "direction=jsd"),
        ({"lmbda": 0.2}, "method=on_policy"),
        ({"sampling_temperature": 0.5}, "method=on_policy and lmbda=0.5"),
        ({"max_completion_length": 8, "method": "on_policy", "lmbda": 0.0}, "lmbda=0.5"),
        ({"soft_weight_schedule": "cosine"}, "soft_weight_end=0"),
        ({"jsd_beta": 0.3, "method": "on_policy", "direction": "reverse"}, "direction=jsd"),
        ({"teacher_update": "ema"}, "context=TEXT"),
        ({"method": "context", "context": "c", "teacher_decay": 0.5}, "teacher_update=ema"),
    ],
)
def test_settings_that_this_method_would_not_read_are_refused(given, says):
    from stages.distill import Config

    with pytest.raises(ValueError, match=f"would change nothing.*{says}"):
        Config(**given)
    whole = Config(
        method="on_policy",
        jsd_beta=0.3,
        lmbda=0.2,
        sampling_temperature=0.5,
        max_completion_length=8,
        soft_weight_end=0.0,
        soft_weight_schedule="cosine",
    )
    assert whole.direction == "jsd" and Config(**whole.model_dump()) == whole
    for teaches_nothing in ({"soft_weight": 0.0}, {"soft_weight": 0.0, "soft_weight_end": 0.0}):
        with pytest.raises(ValueError, match="lmbda=0.5 of the rows would train nothing.*write soft_weight=0.5"):
            Config(method="on_policy", **teaches_nothing)
    Config(method="on_policy", soft_weight=0.0, soft_weight_end=0.5)
