"""The chat templates and tokenizers people have: what is trained is the assistant's text and its stop token, from where
generation starts (sft.mask, sft.template).

Templates are written here in few words and keep the traits of their families: no generation prompt (Llama 2, Mistral),
a default system prompt (Qwen 2.5), systems merged into the user's turn or refused (Gemma), strict alternation, stripped
thinking (Qwen 3, DeepSeek-R1), a stop token that is not eos and differs in earlier turns (gpt-oss), special tokens that
swallow spaces (Phi 3).
"""

import json
from collections import Counter

import pytest

from stages.chat import RenderError, Renderer

ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate"
    " user/assistant/user/assistant/...') }}{% endif %}"
)
SPLIT = (
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}{%"
    " else %}{% set turns = messages %}{% set system = '' %}{% endif %}"
)
GENERATE = "{% if add_generation_prompt %}{{ 'PROMPT' }}{% endif %}"
LLAMA2 = (
    SPLIT
    + "{% for m in turns %}"
    + ALTERNATE
    + "{% if loop.first and system %}{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}{% else"
    " %}{% set text = m['content'] %}{% endif %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() +"
    " ' [/INST]' }}{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}"
    + SPLIT
    + "{% for m in turns %}"
    + ALTERNATE
    + "{% if m['role'] == 'user' %}{% if loop.last and system %}{{ '[INST] ' + system + '\n\n' + m['content'] +"
    " '[/INST]' }}{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}{% else %}{{ ' ' + m['content'] |"
    " trim + eos_token }}{% endif %}{% endfor %}"
)
VICUNA = (
    SPLIT
    + "{{ bos_token + (system or 'A chat between a curious user and an assistant.') + ' ' }}{% for m in turns %}"
    + ALTERNATE
    + "{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'].strip() + ' ' }}{% else %}{{ 'ASSISTANT: ' +"
    " m['content'].strip() + eos_token }}{% endif %}{% endfor %}" + GENERATE.replace("PROMPT", "ASSISTANT:")
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    + GENERATE.replace("PROMPT", "<|assistant|>\n")
)
PHI3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    + GENERATE.replace("PROMPT", "<|assistant|>\n")
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif"
    " %}{% for m in messages %}"
    + ALTERNATE
    + "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim +"
    " '<end_of_turn>\n' }}{% endfor %}" + GENERATE.replace("PROMPT", "<start_of_turn>model\n")
)
GEMMA3 = (
    "{{ bos_token }}"
    + SPLIT
    + "{% for m in turns %}"
    + ALTERNATE
    + "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + (system + '\n\n' if"
    " loop.first and system else '') + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    + GENERATE.replace("PROMPT", "<start_of_turn>model\n")
)
LLAMA3 = (
    "{{ bos_token }}"
    + SPLIT
    + "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' + system +"
    " '<|eot_id|>' }}{% for m in turns %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' +"
    " m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    + GENERATE.replace("PROMPT", "<|start_header_id|>assistant<|end_header_id|>\n\n")
)
QWEN25 = (
    SPLIT
    + "{{ '<|im_start|>system\n' + (system or 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.') +"
    " '<|im_end|>\n' }}{% for m in turns %}{% if m['role'] == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' +"
    " m['content'] + '\n</tool_response><|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content']"
    " + '<|im_end|>\n' }}{% endif %}{% endfor %}" + GENERATE.replace("PROMPT", "<|im_start|>assistant\n")
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0"
    " %}{% endif %}{% endfor %}{% for m in messages %}{% if m['role'] == 'assistant' %}{% set text = m['content'] %}{%"
    " set thought = '' %}{% if '</think>' in text %}{% set thought ="
    " text.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% set text ="
    " text.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last"
    " and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text + '<|im_end|>\n'"
    " }}{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + GENERATE.replace("PROMPT", "<|im_start|>assistant\n")
)
R1 = (
    SPLIT + "{{ bos_token + system }}{% for m in turns %}{% if m['role'] == 'assistant' %}{{ '<|Assistant|>' +"
    " m['content'].split('</think>')[-1] + eos_token }}{% else %}{{ '<|User|>' + m['content'] }}{% endif %}{%"
    " endfor %}" + GENERATE.replace("PROMPT", "<|Assistant|><think>\n")
)
HARMONY = (
    "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{% for m in messages %}{% if m['role'] == 'assistant'"
    " %}{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] }}{% if loop.last and not"
    " add_generation_prompt %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}{% else %}{{ '<|start|>' +"
    " m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    + GENERATE.replace("PROMPT", "<|start|>assistant")
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' + {'user': '<|USER_TOKEN|>', 'assistant':"
    " '<|CHATBOT_TOKEN|>', 'system': '<|SYSTEM_TOKEN|>'}[m['role']] + m['content'].strip() + '<|END_OF_TURN_TOKEN|>'"
    " }}{% endfor %}" + GENERATE.replace("PROMPT", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
)
COMMAND_R7B = (
    "{{ bos_token }}"
    + SPLIT
    + "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Preamble\n' + (system or 'Answer.') + '<|END_OF_TURN_TOKEN|>' }}{%"
    " for m in turns %}{% if m['role'] == 'assistant' %}{{"
    " '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' + m['content'] +"
    " '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}{% else %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m['content'] +"
    " '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    + GENERATE.replace("PROMPT", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
)

#: family -> (template, tokenizer style, eos, how a trained span is written around the text, system prompts are
#: accepted)
FAMILIES = {
    "llama2": (LLAMA2, "legacy", "</s>", " {} </s>", True),
    "mistral": (MISTRAL, "first", "</s>", " {}</s>", False),
    "vicuna": (VICUNA, "legacy", "</s>", " {}</s>", True),
    # <|assistant|> swallows the newline, and SentencePiece begins a text behind it
    "zephyr": (ZEPHYR, "legacy", "</s>", "{}</s>", True),
    "tinyllama": (ZEPHYR, "first", "</s>", "{}</s>", True),
    "phi3": (PHI3, "legacy", "<|endoftext|>", " {}<|end|>", True),
    "gemma": (GEMMA, "spaces", "<eos>", "{}<end_of_turn>", False),
    "gemma3": (GEMMA3, "spaces", "<eos>", "{}<end_of_turn>", True),
    "llama3": (LLAMA3, "bytes", "<|end_of_text|>", "{}<|eot_id|>", True),
    "qwen2.5": (QWEN25, "bytes", "<|im_end|>", "{}<|im_end|>", True),
    "qwen2.5 base": (QWEN25, "bytes", "<|endoftext|>", "{}<|im_end|>", True),
    "command-r": (COMMAND_R, "bytes", "<|END_OF_TURN_TOKEN|>", "{}<|END_OF_TURN_TOKEN|>", True),
    "command-r7b": (
        COMMAND_R7B,
        "bytes",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_RESPONSE|>{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        True,
    ),
    "command-r7b opened": (
        COMMAND_R7B.replace("<|CHATBOT_TOKEN|>' }}", "<|CHATBOT_TOKEN|><|START_RESPONSE|>' }}"),
        "bytes",
        "<|END_OF_TURN_TOKEN|>",
        "{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        True,
    ),
    "qwen3": (QWEN3, "bytes", "<|im_end|>", "<think>\n\n</think>\n\n{}<|im_end|>", True),
    "gpt-oss": (HARMONY, "bytes", "<|return|>", "<|channel|>final<|message|>{}<|return|>", True),
}
REWRITING = ("qwen3", "gpt-oss")  # earlier turns look different from the last
SPECIALS = [
    "<s>",
    "</s>",
    "<eos>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|User|>",
    "<|Assistant|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|START_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
]
SHORT = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi same!"}]
LONG = [
    {"role": "user", "content": "a\n\nb"},
    {"role": "assistant", "content": "line one\nline  two"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "naïve 漢字 🙂"},
    {"role": "user", "content": "same"},
    {"role": "assistant", "content": "same"},
]
SYSTEM = [{"role": "system", "content": "Be kind."}, *LONG]


def tokenizer_of(style: str, eos: str, specials=SPECIALS, swallow=()):
    """A tokenizer of one of the kinds: GPT-2's bytes, or SentencePiece's with a space before every text (legacy), the
    first one, or none.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = ["Hello there Hi same! line one line two again kind final assistant user system"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=["<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if style == "bytes" else ["▁"],
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if style == "bytes"
        else pre_tokenizers.Metaspace(prepend_scheme="always")
    )
    tokenizer.train_from_iterator(text, trainer)
    said = json.loads(tokenizer.to_str())
    vocab = said["model"]["vocab"]
    if style != "bytes":
        for piece in [f"<0x{i:02X}>" for i in range(256)] + [chr(i) for i in range(33, 127)]:
            vocab.setdefault(piece, len(vocab))
        said["model"] |= {"byte_fallback": True, "fuse_unk": True}
    for special in specials:
        vocab.setdefault(special, len(vocab))
    said["added_tokens"] = [
        {
            "id": vocab[s],
            "content": s,
            "single_word": False,
            "lstrip": False,
            "rstrip": s in swallow,
            "normalized": False,
            "special": True,
        }
        for s in ["<unk>", *specials]
    ]
    tokenizer = Tokenizer.from_str(json.dumps(said))
    if style != "bytes":
        underscore = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = {
            "legacy": normalizers.Sequence([normalizers.Prepend("▁"), underscore]),
            "spaces": underscore,
        }.get(style)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False) if style == "first" else None
        )
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, unk_token="<unk>", pad_token=eos
    )


def renderer_of(family: str) -> Renderer:
    template, style, eos, _, _ = FAMILIES[family]
    roles = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
    tokenizer = (
        tokenizer_of(style, eos, swallow=roles)
        if family == "phi3"
        else tokenizer_of(style, eos, [s for s in SPECIALS if s not in roles or s == "<|end|>"])
    )
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def spans(row) -> list[list[int]]:
    out, open_ = [], False
    for token, trained in zip(row.ids, row.mask):
        if trained:
            out = [*out, [token]] if not open_ else [*out[:-1], [*out[-1], token]]
        open_ = bool(trained)
    return out


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request):
    return request.param, renderer_of(request.param), *FAMILIES[request.param][2:]


def test_trained_spans_are_the_assistants_texts_with_their_stop_token(family):
    name, renderer, eos, written, system = family
    for messages in (SHORT, LONG, *([SYSTEM] if system else [])):
        rewrites = name in REWRITING and len(messages) > 2
        row = renderer.conversation(messages, train="final_turn" if rewrites else "all_assistant")
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        found = [renderer.tokenizer.decode(ids, skip_special_tokens=False) for ids in spans(row)]
        assert found == [written.format(text) for text in (answers[-1:] if rewrites else answers)]
        assert all(ids[-1] in renderer.stop_ids and ids[-1] == renderer.turn_end_id for ids in spans(row))
        if rewrites:
            with pytest.raises(RenderError, match="train_on=final_turn"):
                renderer.conversation(messages)


def test_ids_are_the_tokenizers_own_and_generation_starts_where_training_does(family):
    """No re-tokenisation: the pieces of a conversation are the tokens of its whole text, with the template's own bos
    and no other.
    """
    name, renderer, _, _, system = family
    for messages in (SHORT, LONG, *([SYSTEM] if system else [])):
        text = renderer.tokenizer.apply_chat_template(messages, tokenize=False)
        row = renderer.conversation(messages, train="final_turn")
        whole = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert renderer.tokenizer.decode(row.ids) == renderer.tokenizer.decode(whole)
        assert row.ids == whole
        bos = renderer.tokenizer.bos_token_id
        assert row.ids.count(bos) == text.count("<s>") and (name == "llama2" or row.ids.count(bos) <= 1)
        prompt = renderer.prompt_ids(messages[:-1])
        assert (
            row.ids[: len(prompt)] == prompt
            and not any(row.mask[: len(prompt)])
            and all(row.mask[len(prompt) : len(prompt) + 2])
        )
        shared, completion, mask = renderer.completion_ids(messages[:-1], messages[-1:])
        assert shared == prompt and shared + completion == row.ids and mask == row.mask[len(prompt) :]


def test_thinking_is_trained_where_the_template_opens_it_and_strips_it():
    """DeepSeek-R1: the generation prompt ends with <think>, and no rendered turn keeps its thinking."""
    tokenizer = tokenizer_of("bytes", "<|im_end|>")
    tokenizer.chat_template = R1
    renderer = Renderer(tokenizer)
    messages = [
        *LONG[:2],
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "<think>\nline one\n</think>\n\nsame"},
    ]
    row = renderer.conversation(messages, train="final_turn")
    assert [tokenizer.decode(s, skip_special_tokens=False) for s in spans(row)] == [
        "line one\n</think>\n\nsame<|im_end|>"
    ]
    prompt = renderer.prompt_ids(messages[:-1])
    assert row.ids[: len(prompt)] == prompt and tokenizer.decode(prompt, skip_special_tokens=False).endswith(
        "<|Assistant|><think>\n"
    )
    with pytest.raises(RenderError, match="Write the thinking into"):
        renderer.conversation([*messages[:-1], {"role": "assistant", "content": "no thought"}], train="final_turn")
    tight = [*messages[:-1], {"role": "assistant", "content": "<think>line one</think>same"}]
    assert (
        tokenizer.decode(spans(renderer.conversation(tight, train="final_turn"))[0]) == "line one</think>same<|im_end|>"
    )
    closed = [*messages[:2], messages[2], {"role": "assistant", "content": "<think>\n\n</think>\n\nno thought"}]
    assert (
        tokenizer.decode(spans(renderer.conversation(closed, train="final_turn"))[0])
        == "</think>\n\nno thought<|im_end|>"
    )
    older = R1.replace("<|Assistant|><think>\n", "<|Assistant|>")  # the first release left the opening to the model
    tokenizer.chat_template = older
    row = Renderer(tokenizer).conversation(messages, train="final_turn")
    assert [tokenizer.decode(s, skip_special_tokens=False) for s in spans(row)] == [
        "<think>\nline one\n</think>\n\nsame<|im_end|>"
    ]


def test_qwen3_trains_the_thinking_of_its_last_turn():
    renderer = renderer_of("qwen3")
    thinking = [*LONG[:3], {"role": "assistant", "content": "<think>\nline one\n</think>\n\nsame"}]
    assert [renderer.decode(s, False) for s in spans(renderer.conversation(thinking, train="final_turn"))] == [
        "<think>\nline one\n</think>\n\nsame<|im_end|>"
    ]


def test_a_turn_that_closes_with_two_tokens_ends_at_the_second_one():
    """Command R7B: <|END_RESPONSE|> closes the text, the end token the turn; a transcript that was sampled to there
    continues as the template writes it.
    """
    renderer = renderer_of("command-r7b")
    assert renderer.decode([renderer.turn_end_id], False) == "<|END_OF_TURN_TOKEN|>" and renderer.stop_ids == {
        renderer.turn_end_id
    }
    prompt, sampled, mask = renderer.completion_ids(LONG[:1], LONG[1:2])
    assert all(mask)
    whole = renderer.conversation(LONG[:4], train="final_turn")
    assert prompt + sampled + renderer.observation_ids(LONG[2:3], closed=True) == whole.ids[: whole.mask.index(1)]
    cut = renderer.observation_ids(LONG[2:3], closed=False)
    assert renderer.decode(cut, False).startswith(
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>again"
    )


def test_a_generation_prompt_that_thinks_is_told_what_an_answer_lacks():
    """A generation prompt that opens the thinking, where answers are written without: they would be trained behind
    another prompt than they are sampled from.
    """
    tokenizer = tokenizer_of("bytes", "<|END_OF_TURN_TOKEN|>")
    tokenizer.chat_template = COMMAND_R7B.replace("<|CHATBOT_TOKEN|>' }}", "<|CHATBOT_TOKEN|><|START_THINKING|>' }}")
    with pytest.raises(
        RenderError,
        match=(
            r"generation prompt '.*<.START_THINKING.>' is not how it starts an answer, '.*<.START_RESPONSE.>'.*End the"
            r" generation prompt"
        ),
    ):
        Renderer(tokenizer).conversation(SHORT)


def test_what_a_template_does_not_take_is_said_with_what_to_write():
    """Gemma refuses systems and repeated roles; Mistral's drops the system prompt once an answer follows, so that
    training and sampling would differ.
    """
    with pytest.raises(RenderError, match=r"roles \[system, user.*System role not supported.*system_prompts=merge"):
        renderer_of("gemma").conversation(SYSTEM)
    with pytest.raises(RenderError, match="must alternate"):
        renderer_of("gemma").conversation([SHORT[0], SHORT[0], SHORT[1]])
    with pytest.raises(
        RenderError, match=r"system prompt into the first user message \(ingest: system_prompts=merge\)"
    ):
        renderer_of("mistral").conversation([SYSTEM[0], *SHORT])
    tools = [
        SHORT[0],
        {"role": "assistant", "content": '<tool_call>\n{"name": "find"}\n</tool_call>'},
        {"role": "tool", "content": "kind"},
        SHORT[1],
    ]
    row = renderer_of("qwen2.5").conversation(tools)
    assert [renderer_of("qwen2.5").decode(s, False) for s in spans(row)] == [
        tools[1]["content"] + "<|im_end|>",
        "Hi same!<|im_end|>",
    ]


def test_the_row_that_a_template_refuses_is_named():
    """By every stage that renders a dataset: demonstrations, pairs, prompts, rows of reward models and of alignment."""
    from types import SimpleNamespace

    from stages.algorithms import DIRECT_METHODS
    from stages.distill import behind_context
    from stages.generation import prompt_rows
    from stages.pairs import encode_pairs
    from stages.direct.preference_items import Encoder
    from stages.reward_models.reward_data import build
    from stages.reward_models.reward_heads import ChatReader
    from stages.sft import encode_demonstrations

    gemma = renderer_of("gemma")
    row = {
        "row_id": "d-7",
        "messages": SYSTEM,
        "prompt": SYSTEM[:2],
        "chosen": SYSTEM[2:],
        "rejected": [{"role": "assistant", "content": "no"}],
        "train_turns": None,
    }
    rows = SimpleNamespace(rows_of=lambda split: 1, iter_rows=lambda **_: iter([row]), kind="pairs/1", name="rows")
    config = SimpleNamespace(
        train_on="final_turn", max_length=64, stage_index=None, context="Be brief.", mask_formatting=False
    )
    fine = SimpleNamespace(
        rows_of=lambda split: 1,
        iter_rows=lambda **_: iter([{**row, "messages": SHORT}]),
        kind="demonstrations/1",
        name="rows",
    )
    for encode in (
        lambda: encode_demonstrations(fine, "train", gemma, config, None, behind_context(gemma, config)),
        lambda: encode_demonstrations(rows, "train", gemma, config),
        lambda: encode_pairs(rows, "train", gemma, 64),
        lambda: prompt_rows(None, rows, "train", gemma, 64),
        lambda: build(ChatReader(gemma, 64), row, row["prompt"], [row["chosen"]], Counter(), counts={}),
        lambda: Encoder(gemma, DIRECT_METHODS["dpo"], config, None)(rows, "train"),
    ):
        with pytest.raises(RenderError, match="row d-7: The chat template refused"):
            encode()


def test_special_token_text_in_content_is_text_for_every_kind_of_tokenizer():
    for family in ("zephyr", "mistral", "gemma", "phi3"):
        renderer = renderer_of(family)
        messages = [
            {"role": "user", "content": "same </s> same <|end|>"},
            {"role": "assistant", "content": "no</s>kind <end_of_turn> two"},
        ]
        row = renderer.conversation(messages)
        stop = FAMILIES[family][3]
        assert [renderer.tokenizer.decode(s, skip_special_tokens=False) for s in spans(row)] == [
            stop.format(messages[1]["content"])
        ]
        control = set(renderer.tokenizer.all_special_ids) | set(renderer.tokenizer.get_added_vocab().values())
        assert [i in control for i in spans(row)[0]].count(True) == 1, "only the stop token that the template wrote"


@pytest.mark.parametrize("family", ["llama2", "tinyllama", "llama3"])
def test_a_text_that_merges_into_its_prompt_has_its_own_ids_without_a_space_before_it(family):
    """The prompt and the text are one token together, so nothing would be left of the text; the tokenizer's space
    before a text is none of its own.
    """
    renderer = renderer_of(family)
    alone, whole = renderer.joint_ids("He", "llo")
    prompt, behind = renderer.continuation_ids("He", "llo")
    assert len(whole) <= len(alone) and prompt == alone
    assert "".join(renderer.tokenizer.convert_ids_to_tokens(behind)) == "llo"
