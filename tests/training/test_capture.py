"""A teacher's distributions as a dataset: captured once per row whatever is killed, and trained on without the
teacher.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.chat import renderer_for
from stages.distill import Config, Distillation, encode, encode_captured, within
from stages.harness import Stage, execute
from stages.models import modeling
from stages.models.divergence import divergence, topk_divergence
from stages.models.modeling import Head, column_logps, freeze, load_policy, top_logps
from stages.registry import get_stage
from stages.spec import ConfigError
from storage.datasets import open_dataset
from storage.files import tree_digest
from tests.common import silent
from tests.training.test_distill import BASE, teacher  # noqa: F401
from tests.training.test_invariance import gradient


def captured(spec, model, rows, name="capture", **config):
    made = spec("capture", {"max_length": 64, **config}, {"model": model, "data": rows}, name)
    return execute(made, silent), made


def heads(vocabulary=13):
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((9, 6), (vocabulary, 6), (vocabulary,))
    )
    return (
        hidden,
        Head(weight, bias),
        torch.randn(9, 4, dtype=torch.float64),
        Head(torch.randn(vocabulary, 4, dtype=torch.float64), None),
    )


@pytest.mark.parametrize("direction", ("forward", "reverse", "jsd"))
@pytest.mark.parametrize("temperature", (1.0, 1.7))
def test_the_whole_vocabulary_is_the_teacher_in_memory(direction, temperature, monkeypatch):
    monkeypatch.setattr(modeling, "HEAD_CHUNK_ELEMENTS", 40)
    hidden, student, theirs, teacher = heads()
    upstream = torch.randn(9, dtype=torch.float64)
    ids, logp, rest = top_logps(teacher, theirs, 50, temperature)
    assert ids.shape == (9, 13) and rest.isneginf().all() and (logp.diff(dim=1) <= 0).all()
    logq, rest_q = column_logps(student, hidden, ids, temperature, rest=True)
    mine = topk_divergence(logq, rest_q, logp, rest, direction, temperature, 0.3)
    whole = divergence(student, hidden, teacher, theirs, direction, temperature, 0.3)
    assert torch.allclose(mine, whole, atol=1e-12)
    leaves = (hidden, student.weight, student.bias)
    for a, b in zip(
        torch.autograd.grad((mine * upstream).sum(), leaves), torch.autograd.grad((whole * upstream).sum(), leaves)
    ):
        assert torch.allclose(a, b, atol=1e-11)


def test_fewer_tokens_are_bounded_by_the_whole_and_tails_say_what_they_leave_out():
    hidden, student, theirs, teacher = heads()
    q, p = torch.log_softmax(student.logits(hidden), -1), torch.log_softmax(teacher.logits(theirs), -1)
    for k in (1, 3, 12):
        ids, logp, rest = top_logps(teacher, theirs, k)
        logq, rest_q = column_logps(student, hidden, ids, rest=True)
        inside = torch.zeros(9, 13, dtype=torch.bool).scatter_(1, ids, True)
        mass = lambda x: torch.where(inside, 0.0, x.exp()).sum(-1)
        plain = torch.where(inside, p.exp() * (p - q), 0.0).sum(-1)
        bucket = plain + mass(p) * (mass(p) / mass(q)).log()
        kept = 1 - mass(p)
        wanted = {"bucket": bucket, "drop": plain, "renormalise": plain / kept - kept.log()}
        for direction in ("forward", "reverse", "jsd"):
            found = topk_divergence(logq, rest_q, logp, rest, direction, jsd_beta=0.3)
            assert (found <= divergence(student, hidden, teacher, theirs, direction, jsd_beta=0.3) + 1e-12).all()
        for tail, value in wanted.items():
            mine = topk_divergence(logq, rest_q, logp, rest, tail=tail)
            assert torch.allclose(mine, value, atol=1e-12)
            for a, b in zip(
                *(torch.autograd.grad(x.sum(), (hidden, student.weight), retain_graph=True) for x in (mine, value))
            ):
                assert torch.allclose(a, b, atol=1e-11)
    with pytest.raises(ValueError, match="tail=bucket"):
        topk_divergence(logq, rest_q, logp, rest, "reverse", tail="drop")


@pytest.mark.parametrize("config", ({}, {"method": "context", "context": "answer with the letter b"}))
def test_capturing_everything_trains_like_the_teacher_in_memory(spec, tiny, data, teacher, config):  # noqa: F811
    """The same gradient, with the rows' weights, at every split into micro-batches."""
    weighted = str(Path(data["demonstrations"]).parent / "weighted")
    if not Path(weighted).exists():
        from storage.datasets import write_dataset

        write_dataset(
            weighted,
            "weighted",
            "demonstrations/1",
            [{**row, "weight": 0.5 + i % 3} for i, row in enumerate(open_dataset(data["demonstrations"]).iter_rows())],
        )
    result, _ = captured(spec, teacher, weighted, top_k=1000, context=config.get("context"))
    assert result["summary"]["mass_outside"] == 0 and result["summary"]["rows"] == 48
    inputs = {"model": tiny["policy"], "data": weighted, "teacher": teacher}
    renderer = renderer_for(tiny["policy"])
    stage = Stage(get_stage("distill"), spec("distill", {**BASE, **config}, inputs, "memory"), silent)
    items, _ = encode(stage, renderer, "train")
    memory = Distillation(stage.config, freeze(load_policy(teacher)).double())
    stage = Stage(
        get_stage("distill"),
        spec("distill", BASE, {**inputs, "data": result["outputs"]["captured"]["path"]}, "stored"),
        silent,
    )
    stored, dropped = encode_captured(stage, renderer, "train")
    assert dropped == {"truncated": 0, "no_target": 0}
    assert [i.responses[0].tolist() for i in stored] == [i.responses[0].tolist() for i in items] and {
        i.extra["weight"] for i in stored
    } == {0.5, 1.5, 2.5}
    model = load_policy(tiny["policy"]).double()
    model._posttrain_lean = memory.teacher._posttrain_lean = False
    value, whole = gradient(model, memory, items, 10**6)
    for max_tokens in (30, 10**6):
        other, ours = gradient(model, Distillation(stage.config, None), stored, max_tokens)
        assert other == pytest.approx(value, rel=1e-6) and torch.allclose(
            ours, whole, rtol=0, atol=1e-6 * float(whole.abs().max())
        )
    even = [type(i)(i.row_id, i.prompt, i.responses, i.masks, {**i.extra, "weight": 1.0}) for i in stored]
    assert not torch.allclose(
        gradient(model, Distillation(stage.config, None), even, 10**6)[1],
        whole,
        rtol=0,
        atol=1e-3 * float(whole.abs().max()),
    )


def test_the_teacher_reads_the_context_before_the_same_tokens(spec, tiny, data):
    """Position shift: what is stored at a target is the teacher's distribution there behind the context, not at the
    student's position.
    """
    context = "answer with the letter b"
    result, _ = captured(spec, tiny["policy"], data["demonstrations"], top_k=5, context=context)
    rows = list(open_dataset(result["outputs"]["captured"]["path"]).iter_rows())
    sources = {tuple(m["content"] for m in r["messages"]): r for r in open_dataset(data["demonstrations"]).iter_rows()}
    renderer, model = renderer_for(tiny["policy"]), load_policy(tiny["policy"])
    for row in rows[:6]:
        assert context not in renderer.decode(row["ids"])
        source = next(r for r in sources.values() if renderer.conversation(r["messages"]).ids == row["ids"])
        theirs = renderer.conversation([{"role": "system", "content": context}, *source["messages"]])
        shift = len(theirs.ids) - len(row["ids"])
        assert shift > 5 and theirs.ids[-len(row["ids"]) + 5 :] == row["ids"][5:]
        logp = torch.log_softmax(
            model(input_ids=torch.tensor([theirs.ids]), use_cache=False).logits[0].float(), -1
        ).detach()
        at = [j for j, m in enumerate(row["mask"]) if m]
        for n, j in enumerate(at):
            ids, kept = row["teacher_ids"][5 * n : 5 * n + 5], row["teacher_logps"][5 * n : 5 * n + 5]
            assert np.allclose(logp[j + shift - 1][ids].numpy(), kept, atol=1e-4)
            assert np.log1p(-np.exp(kept).sum()) == pytest.approx(row["rest_logps"][n], abs=1e-3)
        alone = torch.log_softmax(
            model(input_ids=torch.tensor([row["ids"]]), use_cache=False).logits[0].float(), -1
        ).detach()
        assert not np.allclose(alone[at[0] - 1][row["teacher_ids"][:5]].numpy(), row["teacher_logps"][:5], atol=1e-2)


def test_a_student_learns_from_the_dataset_alone(spec, tiny, data, teacher):  # noqa: F811
    result, _ = captured(spec, teacher, data["demonstrations"], top_k=20)
    path = result["outputs"]["captured"]["path"]
    made = spec(
        "distill",
        {**BASE, "num_train_epochs": 6, "soft_weight": 0.8},
        {"model": tiny["policy"], "data": path},
        "from-data",
    )
    learned = execute(made, silent)
    assert learned["summary"]["validation/kl"] < 0.3 * learned["summary"]["validation/kl_before"]
    assert "teacher" not in made["inputs"] and learned["summary"]["rows"] == 42
    short = execute(
        spec("distill", {**BASE, "max_length": 36, "max_steps": 1}, {"model": tiny["policy"], "data": path}, "short"),
        silent,
    )
    assert short["summary"]["dropped/truncated"] + short["summary"]["dropped/no_target"] > 0
    for config, more, text in (
        ({"distillation_temperature": 2.0}, {}, "distillation_temperature=1"),
        ({}, {"teacher": teacher}, "leave teacher out"),
        ({"method": "on_policy"}, {}, "method=logit"),
        ({"tail": "drop", "direction": "reverse"}, {}, "direction=forward"),
    ):
        with pytest.raises(ConfigError, match=text):
            execute(spec("distill", {**BASE, **config}, {"model": tiny["policy"], "data": path, **more}, "no"), silent)


@pytest.mark.parametrize("direction", ("forward", "reverse", "jsd"))
@pytest.mark.parametrize("top_k", (4, 16))
def test_a_teacher_whose_head_is_padded_further_counts_its_tokens_alone(direction, top_k):
    """One tokenizer, heads of different size, as in the Qwen family: as if the ids behind the student's were none."""
    torch.manual_seed(1)
    hidden, student, theirs, cut = heads()
    wide = Head(torch.cat([cut.weight, 2 * torch.randn(3, 4, dtype=torch.float64)]), None)
    top = top_logps(wide, theirs, top_k)
    beyond = top[0] >= 13
    assert beyond.any() and not beyond.all(1).any()
    config = Config(direction=direction, **({"jsd_beta": 0.3} if direction == "jsd" else {}))
    kept = within(13, *(part.numpy() for part in top))
    assert all(len(set(ids)) == len(ids) and max(ids) < 13 for ids in kept[0].tolist())
    batch = SimpleNamespace(items=[SimpleNamespace(extra={"captured": kept})])
    ours = Distillation(config, None).captured(student, hidden, batch)
    by_hand = []
    for q, p, ids in zip(student.logits(hidden).softmax(-1), wide.logits(theirs).softmax(-1), top[0]):
        ids = ids[ids < 13]
        others = 1 - p[top[0][len(by_hand)]].sum()  # of ids behind the student's, what capture did not see stays there
        p = torch.cat([p[ids], others[None]]) / (p[ids].sum() + others)
        q = torch.cat([q[ids], 1 - q[ids].sum()[None]])
        if len(ids) == 13:
            p, q = p[:13], q[:13]
        kl = lambda a, b: (a * (a / b).log()).sum()
        m = 0.3 * p + 0.7 * q
        by_hand.append({"forward": kl(p, q), "reverse": kl(q, p), "jsd": 0.3 * kl(p, m) + 0.7 * kl(q, m)}[direction])
    by_hand = torch.stack(by_hand)
    assert torch.allclose(ours, by_hand, atol=1e-6)
    leaves, upstream = (hidden, student.weight, student.bias), torch.randn(9, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((v * upstream).sum(), leaves) for v in (ours, by_hand))):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_captured_teacher_whose_head_is_padded_further_trains_like_the_one_in_memory(
    spec,
    tiny,
    data,
    teacher,  # noqa: F811
    tmp_path,
):
    from stages.chat import load_tokenizer

    wide = load_policy(teacher)
    rows = wide.config.vocab_size
    wide.resize_token_embeddings(rows + 9)
    wide.save_pretrained(tmp_path / "wide")
    load_tokenizer(teacher).save_pretrained(tmp_path / "wide")
    result, _ = captured(spec, str(tmp_path / "wide"), data["demonstrations"], top_k=rows + 9)
    stored, memory = (
        execute(spec("distill", {**BASE, "max_steps": 1}, {"model": tiny["policy"], **inputs}, name), silent)["summary"]
        for name, inputs in (
            ("stored", {"data": result["outputs"]["captured"]["path"]}),
            ("memory", {"data": data["demonstrations"], "teacher": str(tmp_path / "wide")}),
        )
    )
    for name in ("validation/kl_before", "validation/kl"):
        assert stored[name] == pytest.approx(memory[name], rel=1e-4), name


def test_kill9_captures_every_row_once(spec, tiny, data, forks):
    config = {"max_length": 64, "top_k": 3, "block": 5}
    inputs = {
        "model": tiny["policy"],
        "data": data["demonstrations"],
    }
    whole = spec("capture", config, inputs, "whole")
    forks.run(spec.path("whole"))
    killed = spec("capture", config, inputs, "killed")
    folder = Path(killed["workdir"], "out", "captured")
    for parts in (2, 5):
        forks.start(spec.path("killed")).kill_when(lambda: len(list(folder.glob("part-*.parquet"))) >= parts)
    assert not (folder / "manifest.json").exists()
    forks.run(spec.path("killed"))
    assert json.loads(Path(killed["workdir"], "result.json").read_text())["resumed_from"]
    assert tree_digest(folder) == tree_digest(Path(whole["workdir"], "out", "captured"))
    rows = list(open_dataset(str(folder)).iter_rows())
    assert len(rows) == 48 == len({r["row_id"] for r in rows}) and sum(r["split"] == "validation" for r in rows) == 6


def test_a_teacher_that_reads_the_answer_is_refused_and_one_without_room_has_its_row_dropped(spec, tiny, data):
    from stages import capture

    with pytest.raises(ValueError, match="write a context without {answer}, or distill with method=on_policy lmbda=1"):
        capture.Config(context="It is {answer}")
    inputs, renderer = {"model": tiny["policy"], "data": data["demonstrations"]}, renderer_for(tiny["policy"])

    def captured(words):
        made = spec("capture", {"context": "a b" * words}, inputs, f"{words} words")
        return capture.encode(Stage(get_stage("capture"), made, silent), renderer)

    every, dropped = captured(1)
    assert "context_does_not_fit" not in dropped
    lengths = sorted(item.extra["teacher_item"].n_tokens for item in every)
    assert lengths[0] < lengths[-1]
    more = len(renderer.tokenizer("a b" * 11)["input_ids"]) - len(renderer.tokenizer("a b")["input_ids"])
    some, dropped = captured(1 + (256 - lengths[len(lengths) // 2]) * 10 // more)
    assert 0 < len(some) < len(every) == len(some) + dropped["context_does_not_fit"]
    assert all(item.extra["teacher_item"].n_tokens <= 256 for item in some)
