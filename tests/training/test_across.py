"""Distillation from a teacher with another tokenizer (ULD, GOLD), and by sampled tokens (IW-OPD): the losses against
plain ones in float64, what the teacher reads, and the stage on tiny models.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from stages.batching import collate, plan
from stages.chat import renderer_for
from stages.distill import Config, Distillation, across_of, answers, encode
from stages.harness import Stage, execute
from stages.models import modeling
from stages.models.divergence import iw_opd_advantages
from stages.models.modeling import Head, freeze, load_policy
from stages.models.span_losses import Gold, span_distances, uld
from stages.registry import get_stage
from stages.spec import ConfigError
from storage.datasets import write_dataset
from storage.schema import complete_row
from tests.common import silent
from tests.training.other_tokenizers import other_policy

BASE = {"learning_rate": 1e-2, "batch_size": 8, "num_train_epochs": 2, "max_length": 96}
DIRECTIONS = ("forward", "reverse", "jsd")


# -- the distance of one span ------------------------------------------------------------------------------------------


def plain_distance(q, p, pairs, how, direction, beta, weights):
    """Of two measures on vocabularies (vectors of probabilities), written out."""

    def ranked(a, b):
        a, b = (sorted(part.unbind(), key=lambda x: -float(x.detach())) for part in (a, b))
        zero = torch.zeros((), dtype=torch.float64)
        a, b = a + [zero] * (len(b) - len(a)), b + [zero] * (len(a) - len(b))
        return sum((abs(x - y) for x, y in zip(a, b)), zero)

    if how == "uld":
        return ranked(q, p)
    mine, theirs = [i for i, _ in pairs], [j for _, j in pairs]
    a, b = q[mine], p[theirs]
    m = beta * b + (1 - beta) * a
    kl = lambda x, y: (x * (x / y).log()).sum()  # noqa: E731
    matched = {"forward": kl(b, a), "reverse": kl(a, b), "jsd": beta * kl(b, m) + (1 - beta) * kl(a, m)}[direction]
    rest = [[i for i in range(len(x)) if i not in ids] for x, ids in ((q, mine), (p, theirs))]
    w = (len(pairs) / len(p), 1 - len(pairs) / len(p)) if weights is None else weights
    return w[0] * matched + w[1] * ranked(q[rest[0]], p[rest[1]])


@pytest.mark.parametrize(
    "how, direction, weights", [("uld", "forward", None), *(("gold", d, None) for d in DIRECTIONS)]
)
@pytest.mark.parametrize("temperature", (1.0, 1.7))
def test_the_distance_of_spans_equals_autograd(how, direction, weights, temperature, monkeypatch):
    monkeypatch.setattr(modeling, "HEAD_CHUNK_ELEMENTS", 40)
    torch.manual_seed(0)
    tensor = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    hidden, weight, bias = (tensor(*shape).requires_grad_() for shape in ((9, 6), (13, 6), (13,)))
    others = (-tensor(9).abs()).requires_grad_()
    theirs, teacher, their_others = tensor(9, 4), Head(tensor(17, 4), None), -tensor(9).abs()
    pairs = [(3, 0), (1, 4), (12, 5), (0, 16), (7, 8)]
    upstream = tensor(9)
    for scale, softcap in ((1.0, None), (0.7, 4.0)):
        for given in (None, (0.25, 2.0)) if how == "gold" else (None,):
            student = Head(weight, bias, scale, softcap)
            distance = uld
            if how == "gold":
                distance = Gold(torch.tensor(pairs), direction, 0.3, *(given or (None, None))).of(13, 17, "cpu")
            ours = span_distances(student, hidden, others, teacher, theirs, their_others, distance, temperature)
            q = torch.softmax(student.logits(hidden) / temperature, -1) * others.exp()[:, None]
            p = torch.softmax(teacher.logits(theirs) / temperature, -1) * their_others.exp()[:, None]
            plain = temperature**2 * torch.stack(
                [plain_distance(a, b, pairs, how, direction, 0.3, given) for a, b in zip(q, p)]
            )
            assert torch.allclose(ours, plain, atol=1e-12)
            wanted = (hidden, others, weight, bias)
            for a, b in zip(
                torch.autograd.grad((ours * upstream).sum(), wanted),
                torch.autograd.grad((plain * upstream).sum(), wanted),
            ):
                assert torch.allclose(a, b, atol=1e-11)


def test_sorted_probabilities_of_a_permuted_vocabulary_are_the_same():
    """What ULD cannot tell apart, and GOLD can where the entries are shared."""
    logq = torch.log_softmax(torch.randn(4, 11, dtype=torch.float64), -1)
    logp = logq[:, torch.randperm(11)]
    assert torch.allclose(uld(logq, logp), torch.zeros(4, dtype=torch.float64), atol=1e-15)
    every = Gold(torch.arange(11)[:, None].expand(11, 2)).of(11, 11, "cpu")
    assert (every(logq, logp) > 1e-3).all() and every.matched == 1.0


# -- what the teacher reads --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """{form: path} of models with tokenizers of their own."""
    root = tmp_path_factory.mktemp("other")
    return {form: other_policy(str(root / form), form) for form in ("bytes", "lower", "spaces", "words")}


TALKS = [
    ("what is 2 plus 2?", "The answer is four, OK"),
    ("say it", "東京 🙂 naïve"),
    ("again", ""),
    ("special", "<end> and <|im_end|> are words"),
    ("long", "yes " * 30),
]


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("talks") / "talks")
    rows = [
        complete_row(
            "demonstrations/1",
            {
                "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}],
                "train_turns": [1],
                "kept": True,
                "weight": 1.0 + n % 3,
            },
            dataset="talks",
            source="s",
            origin="human",
            split="train",
        )
        for n, (asked, said) in enumerate(TALKS)
    ]
    write_dataset(path, "talks", "demonstrations/1", rows)
    return path


def stage_of(spec, tiny, data, config, name, **inputs):
    made = spec("distill", {**BASE, **config}, {"model": tiny["policy"], "data": data, **inputs}, name)
    return Stage(get_stage("distill"), made, silent)


@pytest.mark.parametrize("form", ("bytes", "spaces", "lower"))
def test_the_teacher_reads_its_own_template_and_spans_say_the_same(spec, tiny, teachers, talks, form):
    stage = stage_of(spec, tiny, talks, {"objective": "uld"}, form, teacher=teachers[form])
    renderer, theirs = renderer_for(tiny["policy"]), renderer_for(teachers[form])
    items, dropped = encode(stage, renderer, "train")
    assert len(items) == 5 and dropped["truncated"] == 1 and not dropped["no_span"] + dropped["turns_differ"]
    reader = across_of(stage, renderer)
    for item, (asked, said) in zip(items, TALKS):
        read = item.extra["teacher_item"]
        whole = theirs.conversation([{"role": "user", "content": asked}, {"role": "assistant", "content": said}])
        ids = read.responses[0].tolist()
        assert ids == whole.ids[: len(ids)] and ids[0] == theirs.tokenizer.bos_token_id
        targets = [[i for i, m in zip(one.responses[0].tolist(), one.masks[0]) if m] for one in (item, read)]
        cut = said.startswith("yes")
        spans, texts = item.extra["spans"], []
        assert (spans[1:, [0, 2]] == spans[:-1, [1, 3]]).all()
        for a, b, c, d in spans:
            mine = b"".join(reader.mine_said.bytes[i] for i in targets[0][a:b])
            other = b"".join(reader.theirs_said.bytes[i] for i in targets[1][c:d])
            ends = (mine, other) == (b"<|im_end|>", b"<end>") and d == spans[-1, 3]
            assert ends or (mine.decode(errors="replace").lower() if form == "lower" else mine) == (
                other.decode(errors="replace") if form == "lower" else other
            )
            texts.append(b"" if ends else mine)
        if cut:
            assert (
                not said.encode() == b"".join(texts)
                and said.encode().startswith(b"".join(texts))
                and len(ids) < len(whole.ids)
            )
        else:
            assert b"".join(texts) == said.encode() and texts[-1] == b"", "all of it, and where it ends"
    assert not encode(stage, renderer, "validation")[0]


def test_the_teacher_reads_another_template(spec, tiny, teachers, talks, tmp_path):
    """As a copy of it that has this template; a file that was changed is another run."""
    own = Path(teachers["spaces"], "chat_template.jinja").read_text()
    other = own.replace("{{", "{{ 'so: ' }}{{", 1)
    assert other != own
    copied, file = tmp_path / "copied", tmp_path / "other.jinja"
    shutil.copytree(teachers["spaces"], copied)
    (copied / "chat_template.jinja").write_text(other)
    file.write_text(other)
    read = []
    for name, teacher, more in (
        ("own", teachers["spaces"], {}),
        ("copied", str(copied), {}),
        ("told", teachers["spaces"], {"teacher_chat_template": str(file)}),
        ("told-2", teachers["spaces"], {"teacher_chat_template": str(copied)}),
    ):
        stage = stage_of(spec, tiny, talks, {"objective": "gold", **more}, name, teacher=teacher)
        items, _ = encode(stage, renderer_for(tiny["policy"]), "train")
        read.append([(i.extra["teacher_item"].responses[0].tolist(), i.extra["spans"].tolist()) for i in items])
    assert read[0] != read[1] == read[2] == read[3]
    config = Config(objective="gold", teacher_chat_template=str(file))
    assert Config(**config.model_dump()) == config
    file.write_text(own)
    with pytest.raises(ValueError, match="not the teacher_chat_template that this run was started with; leave"):
        Config(**config.model_dump())
    with pytest.raises(ValueError, match="write objective=gold"):
        Config(teacher_chat_template=str(file))
    with pytest.raises(ConfigError, match="give the input teacher"):
        execute(
            spec(
                "distill",
                {**BASE, "objective": "uld", "context": "x", "method": "context", "teacher_chat_template": str(file)},
                {"model": tiny["policy"], "data": talks},
                "refused-template",
            ),
            silent,
        )


def plain_loss(model, teacher, items, config, pairs):
    """The step's loss by transformers' own forward, row by row and span by span."""
    temperature, total, count = config.distillation_temperature, 0.0, 0.0

    def logs(one, item):
        ids = torch.tensor([[*item.prompt.tolist(), *item.responses[0].tolist()]])
        at = [len(item.prompt) + i for i, m in enumerate(item.masks[0]) if m]
        every = torch.log_softmax(one(input_ids=ids, use_cache=False).logits[0].double() / temperature, -1)
        return every[[i - 1 for i in at]], ids[0, at]

    for item in items:
        (logq, said), (logp, read) = logs(model, item), logs(teacher, item.extra["teacher_item"])
        for a, b, c, d in item.extra["spans"]:
            measures = []
            for log, ids, start, end in ((logq, said, a, b), (logp.detach(), read, c, d)):
                base = end - 1 if config.span_merge == "last" else start
                rest = [k for k in range(start, end) if k != base]
                measures.append(
                    log[base].exp() * torch.stack([log[k, ids[k]].exp() for k in rest] or [log.new_ones(())]).prod()
                )
            weights = None if config.matched_weight is None else (config.matched_weight, config.unmatched_weight)
            value = plain_distance(*measures, pairs, config.objective, config.direction, config.jsd_beta, weights)
            total = total + item.extra["weight"] * value * temperature**2
            count += item.extra["weight"]
    return total / count


def in_float64(stage, tiny, teacher):
    objective = Distillation(stage.config, freeze(load_policy(teacher).double()))
    if (reader := across_of(stage, renderer_for(tiny["policy"]))) is not None:
        objective.shared = reader.shared
    return load_policy(tiny["policy"]).double(), objective


def gradient(model, objective, groups):
    """(loss, gradients by name) of a step in these micro-batches."""
    counts = objective.counts([item for group in groups for item in group])
    model.zero_grad()
    total = 0.0
    for group in groups:
        loss = objective(model, collate(group)).divided(counts)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "config, form",
    [
        ({"objective": "uld"}, "bytes"),
        ({"objective": "uld", "span_merge": "first", "distillation_temperature": 2.0}, "spaces"),
        ({"objective": "gold", "direction": "jsd", "jsd_beta": 0.3}, "bytes"),
        ({"objective": "gold", "matched_weight": 2.0, "unmatched_weight": 0.5, "direction": "reverse"}, "spaces"),
        ({"objective": "gold"}, "lower"),
    ],
)
def test_a_step_equals_plain_transformers_and_is_the_same_in_any_micro_batches(
    spec, tiny, teachers, talks, config, form
):
    stage = stage_of(spec, tiny, talks, config, "step", teacher=teachers[form])
    items, _ = encode(stage, renderer_for(tiny["policy"]), "train")
    model, objective = in_float64(stage, tiny, teachers[form])
    pairs = [] if objective.shared is None else objective.shared.tolist()
    assert sum(int((item.extra["spans"][:, 1] - item.extra["spans"][:, 0] > 1).sum()) for item in items) > 3
    loss, grads = gradient(model, objective, [items])
    model.zero_grad()
    plain = plain_loss(model, objective.teacher, items, stage.config, pairs)
    plain.backward()
    # transformers' norms and rotary embeddings round to float32
    assert loss == pytest.approx(float(plain.detach()), rel=2e-6)
    for name, p in model.named_parameters():
        assert torch.allclose(grads[name], p.grad, rtol=1e-4, atol=2e-6), name
    for groups in ([[i] for i in items], plan(items, 90), [items[::-1]], [items[:2], items[2:]]):
        other, again = gradient(model, objective, groups)
        assert other == pytest.approx(loss, rel=1e-12)
        assert max(float((again[n] - grads[n]).abs().max()) for n in grads) < 1e-12


def test_with_one_tokenizer_gold_is_the_ordinary_divergence(spec, tiny, talks):
    """All entries are shared, every token is a span."""
    for direction in DIRECTIONS:
        found = []
        for name in ("divergence", "gold"):
            config = {"objective": name, "direction": direction, "distillation_temperature": 1.5, "soft_weight": 0.7}
            stage = stage_of(spec, tiny, talks, config, name, teacher=tiny["other"])
            items, _ = encode(stage, renderer_for(tiny["policy"]), "train")
            found.append(gradient(*in_float64(stage, tiny, tiny["other"]), [items]))
        (loss, grads), (other, again) = found
        assert other == pytest.approx(loss, rel=1e-12)
        assert all(torch.allclose(again[n], grads[n], rtol=1e-9, atol=1e-12) for n in grads)
    stage = stage_of(spec, tiny, talks, {"objective": "uld"}, "itself", teacher=tiny["policy"])
    items, _ = encode(stage, renderer_for(tiny["policy"]), "train")
    assert gradient(*in_float64(stage, tiny, tiny["policy"]), [items])[0] == pytest.approx(0.0, abs=1e-12)


def test_rows_without_a_span_and_with_other_turns_are_left_out(spec, tiny, tmp_path):
    """A cut inside of the first token of the teacher's, and a template that has nothing between two answers."""
    joined = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Q ' + m['content'] + ' A ' }}{% else %}"
        "{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    )
    teacher = other_policy(str(tmp_path / "teacher"), "bytes", template=joined)
    said = lambda role, text: {"role": role, "content": text}  # noqa: E731
    mine, theirs = (renderer_for(path).tokenizer for path in (tiny["policy"], teacher))
    pieces = lambda one, word: len(one(word, add_special_tokens=False)["input_ids"])  # noqa: E731
    word = next(
        w for w in sorted(theirs.get_vocab()) if w.isalpha() and w.isascii() and pieces(theirs, w) < pieces(mine, w)
    )
    talk = [said("user", "q"), said("assistant", word), said("assistant", "more")]
    for name, messages, length in (("no_span", talk[:2], None), ("turns_differ", talk, 96)):
        path = str(tmp_path / name)
        row = {"messages": messages, "train_turns": list(range(1, len(messages))), "kept": True}
        rows = [complete_row("demonstrations/1", row, dataset=name, source="s", origin="human", split="train")]
        write_dataset(path, name, "demonstrations/1", rows)
        if length is None:  # the first token of the answer
            length = len(renderer_for(tiny["policy"]).prompt_ids(messages[:1])) + 1
        stage = stage_of(spec, tiny, path, {"objective": "uld", "max_length": length}, name, teacher=teacher)
        items, dropped = encode(stage, renderer_for(tiny["policy"]), "train")
        assert not items and dropped[name] == 1
        with pytest.raises(ConfigError, match=f"1 of 1 are {name}: .*(raise max_length|objective=divergence)"):
            get_stage("distill").run(stage)


# -- answers of the student's own --------------------------------------------------------------------------------------


def test_answers_of_the_student_are_read_by_the_teacher(spec, tiny, teachers, talks):
    """A student that knows nothing writes bytes that are no text, control tokens, and answers that are cut."""
    config = {"objective": "gold", "method": "on_policy", "lmbda": 1.0, "max_completion_length": 12}
    stage = stage_of(spec, tiny, talks, config, "own", teacher=teachers["spaces"])
    renderer, theirs = renderer_for(tiny["policy"]), renderer_for(teachers["spaces"])
    train, _ = encode(stage, renderer, "train")
    model, objective = in_float64(stage, tiny, teachers["spaces"])
    source = answers(stage, train, objective, renderer, model)
    reader = across_of(stage, renderer)
    seen = []
    for step in range(6):
        for item in source.sample(train, step):
            ids, read = item.responses[0].tolist(), item.extra["teacher_item"]
            text, ended = reader.mine_said.text(ids)
            assert read.prompt.tolist() == theirs.prompt_ids(item.extra["asked"]) and read.masks[0].all()
            assert (read.responses[0][-1:].tolist() == [theirs.turn_end_id]) == ended
            spans = item.extra["spans"]
            assert len(spans) and spans[0, 0] == spans[0, 2] == 0
            if ended:
                assert (spans[-1, 1], spans[-1, 3]) == (len(ids), len(read.responses[0]))
            seen.append((text, ended))
        loss, grads = gradient(model, objective, [source.sample(train, step)])
        assert loss > 0 and all(g.isfinite().all() for g in grads.values())
    assert any("\ufffd" in text for text, _ in seen) and {ended for _, ended in seen} >= {False}


def test_an_answer_that_says_nothing_trains_nothing(spec, tiny, teachers, talks):
    """The first byte of a character, cut: the teacher reads nothing, and there is no span; behind it others are."""
    from stages.batching import make_item

    config = {"objective": "gold", "method": "on_policy", "lmbda": 1.0}
    stage = stage_of(spec, tiny, talks, config, "nothing", teacher=teachers["bytes"])
    renderer = renderer_for(tiny["policy"])
    train, _ = encode(stage, renderer, "train")
    model, objective = in_float64(stage, tiny, teachers["bytes"])
    source, reader = answers(stage, train, objective, renderer, model), across_of(stage, renderer)
    start = next(i for i, said in reader.mine_said.bytes.items() if said == b"\xe6")
    items = []
    for ids in ([start], [start, renderer.turn_end_id], [renderer.turn_end_id]):
        prompt = renderer.prompt_ids(train[0].extra["asked"])
        extra = {**train[0].extra, "own": True, **source.said_across(train[0], ids)}
        items.append(make_item("own", prompt, [ids], [[1] * len(ids)], **extra))
    assert [len(item.extra["spans"]) for item in items] == [0, 2, 1]
    assert [len(item.extra["teacher_item"].responses[0]) for item in items][::2] == [0, 1]
    loss, grads = gradient(model, objective, [items[:1]])
    assert loss == 0.0 and all((g == 0).all() for g in grads.values())
    loss, grads = gradient(model, objective, [items[1:]])
    other, again = gradient(model, objective, [[item] for item in items])
    assert other == pytest.approx(loss, rel=1e-12) and loss > 0
    assert max(float((again[n] - grads[n]).abs().max()) for n in grads) < 1e-12


def test_an_answer_longer_than_the_teachers_positions_keeps_the_spans_before(spec, tiny, teachers, talks, monkeypatch):
    config = {"objective": "uld", "method": "on_policy", "lmbda": 1.0, "max_completion_length": 12}
    stage = stage_of(spec, tiny, talks, config, "short", teacher=teachers["bytes"])
    renderer = renderer_for(tiny["policy"])
    train, _ = encode(stage, renderer, "train")
    long = len(renderer_for(teachers["bytes"]).prompt_ids(train[0].extra["asked"])) + 5
    monkeypatch.setattr("stages.distill.teacher_positions", lambda stage: long)
    source = answers(stage, train, Distillation(stage.config, None), renderer, load_policy(tiny["policy"]))
    for item in source.sample(train[:1], 0):
        read = item.extra["teacher_item"]
        assert read.n_tokens <= long and (item.extra["spans"][:, 3] <= len(read.responses[0])).all()
    monkeypatch.setattr("stages.distill.teacher_positions", lambda stage: long - 5)
    assert encode(stage, renderer, "train")[1]["teacher_has_no_positions"]


# -- the stage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"objective": "uld", "num_train_epochs": 6},
        {"objective": "gold", "num_train_epochs": 6, "soft_weight": 0.8},
        {"objective": "gold", "method": "on_policy", "max_completion_length": 6},
        {"objective": "gold", "method": "context", "context": "be brief"},
    ],
)
def test_the_student_moves_to_a_teacher_with_another_tokenizer(spec, tiny, data, teachers, config):
    made = spec(
        "distill",
        {**BASE, **config},
        {"model": tiny["policy"], "data": data["demonstrations"], "teacher": teachers["bytes"]},
        "moves",
    )
    result = execute(made, silent)
    summary = result["summary"]
    assert (
        summary["validation/distance"]
        < (0.95 if config.get("num_train_epochs") else 1.0) * summary["validation/distance_before"]
    )
    assert summary["rows"] == 42 and summary["dropped/no_span"] == 0
    rows = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["merged_spans"] <= 1 for row in rows if "loss" in row)


def test_a_teacher_with_another_tokenizer_is_refused_where_it_cannot_be_used(spec, tiny, data, teachers):
    def run(config, **inputs):
        given = {"model": tiny["policy"], "data": data["demonstrations"], **inputs}
        return execute(spec("distill", {**BASE, **config}, given, "refused"), silent)

    with pytest.raises(ConfigError, match="different tokenizers.*write objective=gold"):
        run({}, teacher=teachers["bytes"])
    with pytest.raises(ConfigError, match="different tokenizers.*write objective=gold"):
        run({"objective": "iw_opd", "method": "on_policy"}, teacher=teachers["bytes"])
    with pytest.raises(ConfigError, match="tokens of the teacher's tokenizer are neither"):
        run({"objective": "gold"}, teacher=teachers["words"])


@pytest.mark.parametrize(
    "given, says",
    [
        ({"direction": "jsd", "objective": "uld"}, "would change nothing.*objective=divergence or gold"),
        ({"span_merge": "first"}, "would change nothing.*write objective=gold"),
        ({"matched_weight": 1.0, "unmatched_weight": 1.0, "objective": "uld"}, "would change nothing.*objective=gold"),
        ({"iw_opd_gamma": 0.2}, "would change nothing.*objective=iw_opd"),
        ({"matched_weight": 1.0, "objective": "gold"}, "write both, or leave both out"),
        ({"matched_weight": 0.0, "unmatched_weight": 0.0, "objective": "gold"}, "write matched_weight=1"),
        ({"train_on": "full", "objective": "gold"}, "write train_on=all_assistant"),
        (
            {
                "objective": "gold",
                "method": "on_policy",
                "lmbda": 1.0,
                "context": "{prompt} For example: {answer}",
                "select_by": "distance",
                "eval_every": 2,
            },
            "select_by=distance compares validation passes whose teacher has read the answers of their rows; leave",
        ),
        ({"objective": "iw_opd"}, "write method=on_policy lmbda=1"),
        ({"objective": "iw_opd", "method": "on_policy", "lmbda": 0.5}, "write method=on_policy lmbda=1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        Config(**given)


def test_a_teacher_that_is_nearer_is_better():
    from stages.training import less_is_better

    assert less_is_better("distance") and less_is_better("kl") and not less_is_better("accuracy")


def test_settings_come_back_as_they_are():
    for given in (
        {"objective": "gold", "method": "on_policy", "jsd_beta": 0.2},
        {"objective": "uld", "method": "on_policy", "span_merge": "first"},
        {"objective": "iw_opd", "method": "on_policy", "distillation_temperature": 1.5},
    ):
        made = Config(**given)
        assert Config(**made.model_dump()) == made
    assert Config(objective="iw_opd", method="on_policy").lmbda == 1.0
    assert Config(objective="iw_opd", method="on_policy", distillation_temperature=1.5).sampling_temperature == 1.5
    assert Config(objective="gold", method="on_policy").direction == "jsd"
    assert Config(objective="uld", method="on_policy").direction == "forward"


def test_captured_distributions_know_too_little(spec, tiny, data):
    given = {"model": tiny["policy"], "data": data["demonstrations"]}
    captured = execute(spec("capture", {"top_k": 6}, given, "captured"), silent)["outputs"]["captured"]["path"]
    made = spec("distill", {**BASE, "objective": "uld"}, {"model": tiny["policy"], "data": captured}, "no")
    with pytest.raises(ConfigError, match="write objective=divergence, or give demonstrations"):
        execute(made, silent)


# -- sampled tokens ----------------------------------------------------------------------------------------------------


def test_advantages_equal_a_loop():
    torch.manual_seed(3)
    logp, logq = (-torch.rand(4, 6, dtype=torch.float64) for _ in range(2))
    logp[1, 3:] = logq[1, 3:] = 0.0
    logp[2] = logq[2]
    for gamma in (0.0, 0.5, 2.0):
        found = iw_opd_advantages(logp, logq, gamma)
        for s in range(4):
            gained = [float(p - q) for p, q in zip(logp[s], logq[s])]
            whole = max(sum(map(abs, gained)), 1e-8)
            for t in range(6):
                before = sum(map(abs, gained[:t]))
                assert float(found[s, t]) == pytest.approx(gained[t] * (1 + gamma * (1 - before / whole)), abs=1e-14)


def test_without_gamma_the_expected_gradient_is_that_of_the_reverse_kl(spec, tiny, talks):
    """Over all answers of one token, each as likely as the student finds it."""
    from stages.batching import make_item
    from stages.models.divergence import divergence
    from stages.models.modeling import head_of, hidden_states

    config = {"objective": "iw_opd", "method": "on_policy", "iw_opd_gamma": 0.0, "distillation_temperature": 1.3}
    stage = stage_of(spec, tiny, talks, config, "expected", teacher=tiny["other"])
    model, objective = in_float64(stage, tiny, tiny["other"])
    prompt = renderer_for(tiny["policy"]).prompt_ids([{"role": "user", "content": "what?"}])
    rows = model.config.vocab_size
    one = collate([make_item("p", prompt, [[0]], [[1]], weight=1.0)])
    with torch.no_grad():
        states = hidden_states(model, one, one.src_N)
        shares = torch.softmax(head_of(model).logits(states)[0] / 1.3, -1).tolist()
    drawn = [make_item(str(i), prompt, [[i]], [[1]], weight=shares[i], own=True) for i in range(rows)]
    loss = objective(model, collate(drawn)).loss["divergence"][0]
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    theirs = hidden_states(objective.teacher, one, one.src_N)
    exact = divergence(
        head_of(model), hidden_states(model, one, one.src_N), head_of(objective.teacher), theirs, "reverse", 1.3
    ).sum()
    exact.backward()
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad, atol=1e-7), name  # row weights are float32
    # a head that is padded further has no say in it
    with torch.no_grad():
        before = objective(model, collate(drawn)).loss["divergence"][0]
        objective.teacher.resize_token_embeddings(rows + 7)
        assert head_of(objective.teacher).weight.shape[0] == rows + 7
        assert torch.equal(objective(model, collate(drawn)).loss["divergence"][0], before)
    # of given answers it is the divergence itself
    given = collate([make_item("p", prompt, [[5]], [[1]], weight=1.0)])
    assert float(objective(model, given).loss["divergence"][0].detach()) == pytest.approx(
        float(exact.detach()), rel=1e-12
    )


def test_early_tokens_weigh_more(spec, tiny, data):
    config = {"objective": "iw_opd", "method": "on_policy", "max_completion_length": 6, "num_train_epochs": 4}
    found = {}
    for gamma in (0.0, 0.5):
        made = spec(
            "distill",
            {**BASE, **config, "iw_opd_gamma": gamma},
            {"model": tiny["policy"], "data": data["demonstrations"], "teacher": tiny["other"]},
            f"gamma {gamma}",
        )
        result = execute(made, silent)
        rows = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
        found[gamma] = [row for row in rows if "loss" in row]
        assert result["summary"]["validation/kl"] < result["summary"]["validation/kl_before"]
    assert found[0.0][0]["kl"] == found[0.5][0]["kl"] and found[0.0][0]["loss"] != found[0.5][0]["loss"]
