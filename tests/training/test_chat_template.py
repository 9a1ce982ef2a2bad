"""chat_template and chat_template_kwargs: which template conversations are shown by, what a model is saved with, and
what part of a run's identity it is; tool calls through the stages.
"""

import json
from pathlib import Path

import pytest

from stages import evaluate, rejection, rl, sft
from stages.chat import RenderError, load_tokenizer, renderer_for
from stages.harness import execute
from stages.registry import get_spec
from stages.settings import template_text
from stages.spec import ConfigError
from storage.datasets import open_dataset
from tests.common import silent, written
from tests.data.driver import ingest, write_lines

#: Shows tools and calls, and thinks unless it is told not to.
TEMPLATE = (
    "{% set quick = '(quick) ' if enable_thinking is defined and not enable_thinking else '' %}{% for t in tools or []"
    " %}{{ 'Tool ' + t.function.name + '\n' }}{% endfor %}{% for m in messages %}{{ m.role + ': ' + (quick if m.role =="
    " 'assistant' else '') + m.content }}{% for c in m.tool_calls or [] %}{{ '{' + c.function.name + ' ' }}{{"
    " c.function.arguments | tojson }}{{ '}' }}{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{"
    " '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' + quick }}{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sum.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]


def openai(i: int) -> dict:
    call = {"id": f"call{i:05}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": i})}}
    return {
        "messages": [
            {"role": "user", "content": f"sum of {i}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": f"= {2 * i}"},
            {"role": "assistant", "content": f"{2 * i}"},
        ],
        "tools": TOOLS,
    }


@pytest.fixture()
def template(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """{kind: dataset} of OpenAI-format files with tools, through ingest."""
    root = tmp_path_factory.mktemp("calls")
    rows = [openai(i) for i in range(24)]
    made = {
        "demonstrations/1": rows,
        "prompts/1": [
            {"prompt": r["messages"][:1], "answer": r["messages"][-1]["content"], "tools": TOOLS} for r in rows
        ],
        "pairs/1": [
            {
                "prompt": r["messages"][:1],
                "chosen": r["messages"][1:2],
                "rejected": [{"role": "assistant", "content": f"no {i}"}],
                "tools": TOOLS,
            }
            for i, r in enumerate(rows)
        ],
    }
    found = {}
    for kind, content in made.items():
        name = kind.split("/")[0]
        found[name] = str(
            ingest(
                write_lines(root / f"{name}.jsonl", content), root / name, kind=kind, validation_fraction=0.2
            ).workdir
            / "out"
            / "data"
        )
    return found


def test_sft_of_an_openai_file_trains_the_calls_and_saves_the_template(tiny, calls, spec, template):
    config = {"max_steps": 3, "batch_size": 4, "max_length": 256, "learning_rate": 1e-3}
    with pytest.raises(RenderError, match="row .*has tools .add.*Set chat_template"):
        execute(spec("sft", config, {"model": tiny["policy"], "data": calls["demonstrations"]}, "refused"), silent)
    made = execute(
        spec(
            "sft",
            {**config, "chat_template": template},
            {"model": tiny["policy"], "data": calls["demonstrations"]},
            "tools",
        ),
        silent,
    )
    path = made["outputs"]["model"]["path"]
    assert (
        load_tokenizer(path).chat_template == TEMPLATE
        and made["summary"]["validation/nll"] < made["summary"]["validation/nll_before"]
    )
    renderer = renderer_for(path)
    row = next(open_dataset(calls["demonstrations"]).iter_rows())
    encoded = renderer.conversation(row["messages"], train_turns=row["train_turns"])
    text = renderer.decode([i for i, m in zip(encoded.ids, encoded.mask) if m], skip_special_tokens=False)
    number = int(row["messages"][1]["content"].split()[-1].rstrip("?"))
    assert text == f'{{add {{"a": {number}}}}}{renderer.tokenizer.eos_token}{2 * number}{renderer.tokenizer.eos_token}'


@pytest.mark.parametrize(
    "stage, data, config",
    [
        ("align", "pairs", {"max_steps": 2, "batch_size": 4, "max_length": 256}),
        ("reward_model", "pairs", {"max_steps": 2, "batch_size": 4, "max_length": 256}),
        (
            "rl",
            "prompts",
            {
                "max_steps": 1,
                "prompts_per_step": 2,
                "num_generations": 2,
                "max_completion_length": 4,
                "eval_prompts": 0,
                "kl_coef": 0.0,
            },
        ),
    ],
)
def test_pairs_and_prompts_with_tools_train_and_save_the_template(stage, data, config, tiny, calls, spec, template):
    made = execute(
        spec(
            stage,
            {**config, "chat_template": template, "chat_template_kwargs": {"enable_thinking": False}},
            {"model": tiny["policy"], "data": calls[data]},
            stage,
        ),
        silent,
    )
    path = made["outputs"]["model"]["path"]
    assert load_tokenizer(path).chat_template == TEMPLATE
    if stage == "rl":
        rollout = next(open_dataset(made["outputs"]["rollouts"]["path"]).iter_rows())
        shown = load_tokenizer(path).decode(rollout["prompt_ids"])
        assert shown.startswith("Tool add\nuser: sum of") and shown.endswith("assistant: (quick) ")
    if stage == "reward_model":  # those who load it show conversations as it was trained on them
        from stages.reward_models.reward_scorers import Response, load_scorer

        scorer = load_scorer(path, "cpu")
        assert scorer.reader.renderer.template_kwargs == {"enable_thinking": False}
        assert scorer.score([Response([{"role": "user", "content": "x"}], [{"role": "assistant", "content": "y"}])])


def test_sampling_and_evaluation_show_the_tools(tiny, calls, spec, template):
    shown = {"chat_template": template, "max_completion_length": 4}
    with pytest.raises(RenderError, match="has tools"):
        execute(
            spec(
                "rejection",
                {"max_completion_length": 4, "num_generations": 2},
                {"model": tiny["policy"], "prompts": calls["prompts"]},
                "refused",
            ),
            silent,
        )
    made = execute(
        spec(
            "rejection",
            {**shown, "num_generations": 2, "allow_empty": True},
            {"model": tiny["policy"], "prompts": calls["prompts"]},
            "sampled",
        ),
        silent,
    )
    row = next(open_dataset(made["outputs"]["candidates"]["path"]).iter_rows())
    assert (
        row["gen"]["template_id"]
        == renderer_for(tiny["policy"], TEMPLATE).template_hash
        != renderer_for(tiny["policy"]).template_hash
    )
    inputs = {"model": tiny["policy"], "prompts": calls["prompts"]}
    plain, quick = (
        execute(
            spec(
                "evaluate",
                {**shown, "split": "train", "num_samples": 1, "limit": 3, "chat_template_kwargs": kwargs},
                inputs,
                f"evaluated{len(kwargs)}",
            ),
            silent,
        )
        for kwargs in ({}, {"enable_thinking": False})
    )
    hashes = [
        json.loads(next(open_dataset(e["outputs"]["scores"]["path"]).iter_rows())["config_json"])["template"]
        for e in (plain, quick)
    ]
    assert hashes[0] == renderer_for(tiny["policy"], TEMPLATE).template_hash and hashes[0] != hashes[1], (
        "other variables are another protocol"
    )


def test_the_template_is_part_of_the_identity_by_its_content(tmp_path, template):
    config = sft.Config(chat_template=template)
    elsewhere = tmp_path / "elsewhere" / "other.jinja"
    elsewhere.parent.mkdir()
    elsewhere.write_text(TEMPLATE)
    assert config.identity() == sft.Config(chat_template=str(elsewhere)).identity() != sft.Config().identity()
    assert sft.Config(**config.resolved()).identity() == config.identity(), "a run started from its resolved settings"
    assert (
        config.identity()
        != sft.Config(chat_template=template, chat_template_kwargs={"enable_thinking": False}).identity()
    )
    Path(template).write_text(TEMPLATE + " ")
    assert sft.Config(chat_template=template).identity() != config.identity()
    with pytest.raises(ValueError, match="is not the chat_template that this run was started with"):
        sft.Config(**config.resolved())


def test_a_template_is_read_from_a_file_or_a_model_directory(tmp_path, tiny, template):
    assert (
        template_text(template) == TEMPLATE
        and template_text(tiny["policy"]) == load_tokenizer(tiny["policy"]).chat_template
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert template_text(str(tmp_path / "old")) == "d"
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no chat template"):
        template_text(str(tmp_path / "bare"))
    with pytest.raises(ValueError, match="cannot be read.*posttrain export"):
        sft.Config(chat_template=str(tmp_path / "nowhere"))


def test_variables_and_templates_that_nothing_reads_are_refused(tiny, data, spec, template, tmp_path):

    given = {"chat_template": template}
    with pytest.raises(RenderError, match="reads no variable 'enable_thoughts'"):
        execute(
            spec(
                "sft",
                {"max_steps": 1, **given, "chat_template_kwargs": {"enable_thoughts": True}},
                {"model": tiny["policy"], "data": data["demonstrations"]},
                "a",
            ),
            silent,
        )
    with pytest.raises(ValueError, match="tools is the platform's own to give"):
        sft.Config(chat_template_kwargs={"tools": []})
    with pytest.raises(ValueError, match="chat_template_digest is filled in by itself"):
        sft.Config(chat_template_digest="x")
    for config in (rl.Config, rejection.Config, evaluate.Config):
        with pytest.raises(ValueError, match="prompt_template=none shows prompts without the chat template"):
            config(prompt_template="none", **given)
    text = str(tmp_path / "text")
    written(text, "text", "text/1", [{"text": "plain words", "n_chars": 11}], dataset="t")
    with pytest.raises(ConfigError, match="plain text, which no chat template shows"):
        execute(spec("sft", {"max_steps": 1, **given}, {"model": tiny["policy"], "data": text}, "b"), silent)
    with pytest.raises(ConfigError, match="show prompts and pairs to a policy"):
        execute(
            spec(
                "evaluate", {"target": "reward_model", **given}, {"model": tiny["policy"], "pairs": data["pairs"]}, "c"
            ),
            silent,
        )
    for stage in ("sft", "distill", "align", "reward_model", "rl", "rejection", "evaluate", "capture", "label_steps"):
        assert "chat_template" in get_spec(stage).config.model_fields
    assert (
        "chat_template" not in get_spec("merge").config.model_fields
        and "chat_template" not in get_spec("ingest").config.model_fields
    )


def test_a_prompt_with_tools_is_not_shown_as_plain_text(tiny, calls, spec):
    with pytest.raises(
        RenderError, match="row .*prompt_template=none shows the last message alone, and the prompt has tools"
    ):
        execute(
            spec(
                "rejection",
                {"prompt_template": "none", "num_generations": 2, "max_completion_length": 4},
                {"model": tiny["policy"], "prompts": calls["prompts"]},
                "plain",
            ),
            silent,
        )


def test_encoders_read_calls_as_they_are_stored():
    from stages.acting.tools import system_message
    from stages.reward_models.reward_heads import transcript

    call = {"role": "assistant", "content": "", "function_calls": "f(x=1)"}
    assert transcript([call]) == "f(x=1)" and transcript([{"role": "assistant", "content": "a"}]) == "a"
    assert (
        transcript(
            [
                {"role": "system", "content": "", "functions": "[]"},
                {"role": "user", "content": "u"},
                {**call, "content": "t"},
            ]
        )
        == "System: []\n\nHuman: u\n\nAssistant: t\nf(x=1)"
    )
    told = system_message(["search"])
    assert transcript([told]) == told["content"]


def test_stop_tokens_are_looked_for_where_training_ends(tiny):
    """What a template writes behind the last turn (two newlines, several tokens in a small vocabulary) is not trained
    and hides no stop token.
    """
    from types import SimpleNamespace

    from stages.batching import make_item
    from stages.chat import PLAIN_TEMPLATE, Renderer
    from stages.preflight import check_stop_tokens

    tokenizer = load_tokenizer(tiny["policy"])
    tokenizer.chat_template = PLAIN_TEMPLATE
    renderer, heard = Renderer(tokenizer), []
    row = renderer.conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}])
    assert row.ids[-1] not in renderer.stop_ids and not any(row.mask[-2:]), "the case in question"
    stage = SimpleNamespace(warn=lambda code, text: heard.append(code))
    check_stop_tokens(stage, [make_item("r", [], [row.ids], [row.mask])], renderer)
    assert not heard
    last = max(i for i, trained in enumerate(row.mask) if trained)
    check_stop_tokens(stage, [make_item("r", [], [row.ids[:last]], [row.mask[:last]])], renderer)
    assert heard == ["stop_token_not_trained"]


@pytest.mark.parametrize(
    "stage,config,max_length",
    [
        ("sft", {"max_steps": 1}, 30),
        ("align", {"method": "dpo", "max_steps": 1}, 16),
        ("reward_model", {"max_steps": 1, "probe_pairs": 0}, 16),
    ],
)
def test_rows_that_max_length_cuts_are_warned_of(tiny, data, spec, stage, config, max_length):
    """Counts alone are easily missed: half of the data may be cut or gone."""

    def warnings(length):
        heard = []
        execute(
            spec(
                stage,
                {"batch_size": 4, "max_length": length, **config},
                {"model": tiny["policy"], "data": data["demonstrations" if stage == "sft" else "pairs"]},
                f"{stage}{length}",
            ),
            heard.append,
        )
        return [event["text"] for event in heard if event["event"] == "warning" and event["code"] == "rows_cut"]

    told = warnings(max_length)
    assert (
        len(told) == 1
        and f"rows are longer than max_length={max_length} tokens and were cut" in told[0]
        and "Raise max_length" in told[0]
    )
    assert not warnings(200)


def test_a_base_model_without_a_chat_template_is_told_of(tiny, data, spec, tmp_path, template):
    import shutil

    shutil.copytree(tiny["policy"], tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(config))

    def warnings(name, **more):
        heard = []
        execute(
            spec(
                "sft",
                {"max_steps": 1, "batch_size": 4, **more},
                {"model": str(tmp_path / "base"), "data": data["demonstrations"]},
                name,
            ),
            heard.append,
        )
        return [event["code"] for event in heard if event["event"] == "warning"]

    told = warnings("plain")
    assert "no_chat_template" in told and "stop_token_not_trained" not in told
    assert "no_chat_template" not in warnings("given", chat_template=template)


def test_new_tokens_have_rows_of_their_own(tiny, data, spec, tmp_path):
    """sft.template, minted tokens: one id each behind all others, rows that begin as the mean of the rest and are
    trained, a turn that ends with one; what a user writes is never one.
    """
    import torch

    from stages.models.modeling import load_policy
    from stages.models.new_tokens import add_rows

    names, shown = ["<|turn|>", "<|done|>"], tmp_path / "turns.jinja"
    shown.write_text(
        "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content + '<|done|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    )
    before, old = load_policy(tiny["policy"]), load_tokenizer(tiny["policy"])
    first, renderer = len(old), renderer_for(tiny["policy"], template_text(str(shown)), new_tokens=tuple(names))
    own = load_policy(tiny["policy"])
    add_rows(own, renderer.tokenizer, names)
    for end in ("get_output_embeddings", "get_input_embeddings"):
        rows, were = getattr(own, end)().weight.detach(), getattr(before, end)().weight.detach()
        mean = were[:first].double().mean(0).float()
        assert len(rows) == own.config.vocab_size == max(first + 2, len(were))
        assert torch.equal(rows[:first], were[:first])
        assert torch.allclose(rows[first : first + 2], mean.expand(2, -1), rtol=0, atol=1e-7)

    settings = {"batch_size": 4, "max_steps": 3, "max_length": 96, "learning_rate": 1e-2, "new_tokens": names}
    made = spec(
        "sft",
        {**settings, "chat_template": str(shown)},
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "minted",
    )
    events = []
    path = execute(made, events.append)["outputs"]["model"]["path"]
    assert "unseen_new_tokens" not in json.dumps(events)
    trained, published = load_policy(path), renderer_for(path)
    assert published.tokenizer.convert_tokens_to_ids(names) == [first, first + 1]
    assert first + 1 in published.stop_ids
    assert (trained.get_input_embeddings().weight[[first, first + 1]] - mean).abs().amax(1).min() > 1e-3
    ids = published.prompt_ids([{"role": "user", "content": "a <|done|> b"}])
    assert ids.count(first + 1) == 1 and ids.count(first) == 2
    assert "a <|done|> b" in published.decode(ids)
    encoded = published.conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert [i for i, on in zip(encoded.ids, encoded.mask) if on][-1] == first + 1  # the stop token is trained

    unseen = spec("sft", settings, {"model": tiny["policy"], "data": data["demonstrations"]}, "unseen")
    events.clear()
    execute(unseen, events.append)
    assert "unseen_new_tokens" in json.dumps(events)


@pytest.mark.parametrize(
    "config, says",
    [
        ({"new_tokens": ["<|x|>"], "lora_rank": 4}, "lora_rank=0"),
        ({"new_tokens": ["<|x|>"], "sharding": "full"}, "sharding=none"),
        ({"new_tokens": ["<|x|>", "<|x|>"]}, "each token once"),
        ({"new_tokens": [" <|x|>"]}, "without white space"),
    ],
)
def test_new_tokens_that_could_not_be_learned_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        sft.Config(**config)


def test_a_new_token_that_is_one_already_is_refused(tiny):
    with pytest.raises(RenderError, match="already"):
        renderer_for(tiny["policy"], new_tokens=(load_tokenizer(tiny["policy"]).eos_token,))
