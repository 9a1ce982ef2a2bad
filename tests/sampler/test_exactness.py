"""What must hold at the edges: sampled frequencies against exact probabilities, transformers' generate with every
setting that both have, logits that leave nothing to draw, completions that are continued or cut, stop strings that are
special tokens."""

import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stages.decoding.sampler import (
    Completion,
    DerivedText,
    Sampler,
    SamplerError,
    SamplingParams,
    check_request,
    text_of,
)
from stages.decoding.sampling import processed_logits
from stages.generation import Sample, continuations, sample_with_room, sampling_params
from tests.sampler.conftest import SHAPE
from tests.sampler.contract import filtered_log_softmax

BOTH = [("llama", True), ("gpt2", False)]


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(
            temperature=1.4,
            top_k=7,
            top_p=0.95,
            min_p=0.02,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            logit_bias={3: 1.5},
            min_tokens=1,
        ),
    ],
    ids=["plain", "everything"],
)
def test_two_tokens_come_as_often_as_their_exact_probability(lean, settings):
    """Chi-square of 20,000 completions of two tokens against the product of the exact conditional probabilities of all
    of them.
    """
    import transformers as t

    torch.manual_seed(5)
    model = t.LlamaForCausalLM(t.LlamaConfig(**{**SHAPE, "vocab_size": 9})).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
    prompt, stop, n = [4, 1, 7], 2, 20_000
    params = SamplingParams(max_new_tokens=2, stop_ids={stop}, **settings)
    given = torch.tensor([prompt])

    def logps(begun):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + begun])).logits[:, -1]
        generated, counts = torch.tensor([begun + [0] * (2 - len(begun))]), torch.tensor([len(begun)])
        return (
            filtered_log_softmax(processed_logits(logits, params, generated, counts, given, torch.tensor([3])), params)[
                0
            ]
            .double()
            .exp()
            .tolist()
        )

    first = logps([])
    expected = {(a,): first[a] for a in range(9) if a == stop}
    for a in (a for a in range(9) if a != stop):
        expected |= {(a, b): first[a] * p for b, p in enumerate(logps([a]))}
    assert sum(expected.values()) == pytest.approx(1.0)
    found: dict[tuple, int] = {}
    for c in Sampler(model, None, max_batch=512, lean=lean).generate([prompt], params, [range(n)])[0]:
        found[tuple(c.ids)] = found.get(tuple(c.ids), 0) + 1
    assert set(found) <= {ids for ids, p in expected.items() if p > 0}
    likely = [ids for ids, p in expected.items() if p * n >= 5]
    rest = 1.0 - sum(expected[ids] for ids in likely)
    pairs = [(found.get(ids, 0), expected[ids] * n) for ids in likely] + (
        [(n - sum(found.get(ids, 0) for ids in likely), rest * n)] if rest * n >= 5 else []
    )
    chi2 = sum((seen - want) ** 2 / want for seen, want in pairs)
    from scipy.stats import chi2 as distribution

    assert len(pairs) > 10 and distribution.sf(chi2, len(pairs) - 1) > 1e-4


@pytest.mark.parametrize("name, lean", BOTH)
def test_greedy_with_settings_is_transformers_generate(models, prompts, tokenizer, name, lean):
    """Repetition penalty, a least length, bad words, biases and several end tokens, as a generation config has them."""
    model, bad, ends = models(name), ["e", "th", "?"], [10, 47, 80]
    params = SamplingParams(
        temperature=0,
        max_new_tokens=20,
        stop_ids=ends,
        min_tokens=6,
        repetition_penalty=1.3,
        bad_words=bad,
        logit_bias={7: 2.0, 20: -1.5},
    )
    # so that some do end
    ends += [
        row[0].ids[9]
        for row in Sampler(model, tokenizer, lean=lean).generate(prompts, params, [[0]] * len(prompts))[:2]
    ]
    params = replace(params, stop_ids=ends)
    reasons = set()
    for prompt, (got,) in zip(
        prompts, Sampler(model, tokenizer, max_batch=3, lean=lean).generate(prompts, params, [[0]] * len(prompts))
    ):
        ids = torch.tensor([prompt])
        words = [tokenizer.encode(space + word, add_special_tokens=False) for word in bad for space in ("", " ")]
        # there transformers also bans what completes a word of the prompt
        assert not any(prompt[-1:] == word[:1] for word in words if len(word) > 1)
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
            eos_token_id=ends,
            min_new_tokens=6,
            repetition_penalty=1.3,
            bad_words_ids=words,
            sequence_bias=[[[7], 2.0], [[20], -1.5]],
        )[0, len(prompt) :].tolist()
        assert got.ids == want and got.finish_reason == ("eos" if want[-1] in ends else "length")
        reasons.add(got.finish_reason)
    assert "eos" in reasons


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("settings", [dict(), dict(temperature=0), dict(top_p=0.9), dict(top_k=4), dict(min_p=0.1)])
def test_a_model_without_probabilities_is_refused(lean, settings):
    """One NaN among the weights made every completion the first token of the vocabulary, with log-probs of NaN."""
    import transformers as t

    model = t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)).eval()
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(
        SamplerError, match="no probabilities for token 1 after prompt 0: its logits are not finite. Look for weights"
    ):
        Sampler(model, None, lean=lean).generate([[1, 2, 3]], SamplingParams(max_new_tokens=3, **settings), [[0]])


@pytest.mark.parametrize("lean", [True, False])
def test_one_row_without_probabilities_is_refused_and_named(lean):
    """A token whose embedding is no number, in one prompt among others."""
    import transformers as t

    model = t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.nan
    prompts, params = [[1, 2], [3, 5], [4, 6], [7, 8]], SamplingParams(max_new_tokens=1)
    with pytest.raises(SamplerError, match="no probabilities for token 1 after prompt 1: its logits are not finite"):
        Sampler(model, None, lean=lean).generate(prompts, params, [[0]] * 4)
    assert [len(group) for group in Sampler(model, None, lean=lean).generate(prompts[2:], params, [[0]] * 2)] == [1, 1]


@pytest.mark.parametrize("name, lean", BOTH)
def test_all_tokens_banned_is_refused_and_one_left_is_drawn(models, tokenizer, name, lean):
    sampler = Sampler(models(name), tokenizer, lean=lean)
    every = tuple(chr(33 + i) for i in range(94))  # all but the space and <end>
    one = sampler.generate(
        [[1, 2]], SamplingParams(max_new_tokens=4, stop_ids={95}, min_tokens=4, bad_words=every), [[0, 1]]
    )[0]
    assert [c.ids for c in one] == [[0] * 4] * 2 and [c.logps for c in one] == [[0.0] * 4] * 2
    with pytest.raises(SamplerError, match="no probabilities .* ban every token: leave some out"):
        sampler.generate(
            [[1, 2]], SamplingParams(max_new_tokens=4, stop_ids={0, 95}, min_tokens=4, bad_words=every), [[0]]
        )


def test_a_stop_string_that_is_a_special_token_is_a_stop_token(models, tokenizer):
    """Texts are without special tokens, so such a string was looked for in vain and every row ran to its limit."""
    with pytest.raises(SamplerError, match="'<end>' alone in a stage's stop_strings"):
        Sampler(models("llama"), tokenizer).generate([[1]], SamplingParams(stop_strings=("x<end>",)), [[0]])
    from stages.settings import SamplingConfig

    config = SamplingConfig(stop_strings=["<end>", "ab"], max_completion_length=60)
    params = sampling_params(config, SimpleNamespace(tokenizer=tokenizer, stop_ids=frozenset({3})))
    assert params.stop_ids == {3, 95} and params.stop_strings == ("ab",)
    found = Sampler(models("llama"), tokenizer).generate([[1, 2]], params, [range(30)])[0]
    assert any(c.ids[-1] == 95 and c.finish_reason == "eos" for c in found) and not any(95 in c.ids[:-1] for c in found)


def with_tokens(tokenizer, *texts, special):
    from tokenizers import AddedToken

    more = copy.deepcopy(tokenizer)
    more.add_tokens([AddedToken(text, special=special) for text in texts])
    return more


def test_a_request_may_hold_every_token_and_stop_at_those_that_texts_show(tokenizer):
    """Of the tokens that a tokenizer was given later only special ones are left out of texts."""
    called = with_tokens(tokenizer, "<call>", special=False)
    asked = SamplingParams(stop_strings=("<call>x",), max_new_tokens=2)
    check_request([[0, 96]], asked, [[0]], vocabulary=97, positions=4, tokenizer=called)
    assert DerivedText(called, asked).of([*called.encode("ab<call>x"), 1]) == "ab"


def test_the_text_is_what_the_tokens_say_up_to_the_first_stop_string(tokenizer):
    ids = tokenizer.encode("a , b;c", add_special_tokens=False)
    for stops in ((",", ";"), (";", ",")):
        assert DerivedText(tokenizer, SamplingParams(stop_strings=stops)).of(ids) == "a "
    tidying = copy.deepcopy(tokenizer)
    tidying.clean_up_tokenization_spaces = True
    assert tidying.decode(ids) == "a, b;c" and text_of(tidying, ids) == "a , b;c"
    thinking = with_tokens(tidying, "<think>", "</think>", special=True)
    ids = thinking.encode("<think>a , b</think> , c")
    assert text_of(thinking, ids) == "<think>a , b</think> , c"
    for stop, shows in (("</think>", True), ("<think>", True), ("think", False)):
        assert DerivedText(thinking, SamplingParams(stop_strings=(stop,))).shows_tags() == shows


@pytest.mark.parametrize(
    "drawn, reason, kept, ended",
    [
        ("abQ:cd", "length", "abQ:", "stop"),
        ("abQ:", "length", "abQ:", "stop"),
        ("abQ:", "stop", "abQ:", "stop"),
        ("abcd", "length", "abcd", "length"),
        ("abQ:", "eos", "abQ:", "eos"),  # the last one ended it by itself
        ("abQ:~", "eos", "abQ:", "stop"),
    ],
)
def test_an_engines_own_text_ends_where_ours_does(tokenizer, drawn, reason, kept, ended):
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    derived = DerivedText(tokenizer, SamplingParams(stop_strings=("Q:",)))
    assert derived.trimmed(encode(drawn), reason) == (encode(kept), ended)


# --- completions that are cut or continued ----------------------------------------------------------------------------


class Told:
    """An engine that draws what it is told and has no log-probs; it keeps what it was asked for."""

    def __init__(self, tokenizer, text):
        self.tokenizer, self.text, self.asked = tokenizer, text, []

    def generate(self, prompts, params, seeds):
        self.asked.append((len(prompts), params.max_new_tokens, params.min_tokens))
        ids = self.tokenizer.encode(self.text, add_special_tokens=False)[: params.max_new_tokens]
        return [[Completion(ids, None, "length", text_of(self.tokenizer, ids)) for _ in own] for own in seeds]


def test_rows_of_engines_without_log_probs_are_cut_to_their_room(tokenizer):
    """A row that was cut asked for the log-probs that there are not, which ended a stage with several turns."""
    engine = Told(tokenizer, "abcdefgh")
    found = sample_with_room(engine, [[1], [2]], SamplingParams(), [[0], [1]], [8, 3])
    assert [(c.text, c.finish_reason, c.logps) for (c,) in found] == [
        ("abcdefgh", "length", None),
        ("abc", "length", None),
    ]


def test_min_tokens_over_the_room_is_the_room(models, tokenizer):
    """The last turns of a trajectory have less room than min_tokens, which was an error."""
    found = sample_with_room(
        Sampler(models("llama"), tokenizer),
        [[1], [2]],
        SamplingParams(max_new_tokens=40, min_tokens=8, stop_ids=range(0, 90)),
        [[0], [1]],
        [5, 3],
    )
    assert [(len(c.ids), c.finish_reason) for (c,) in found] == [(5, "length"), (3, "length")] and not any(
        set(c.ids) & set(range(90)) for (c,) in found
    )


def begun(tokenizer, text):
    return Sample({}, [1, 2], 0, tokenizer.encode(text, add_special_tokens=False), None, "length", text)


def test_continued_completions_count_the_tokens_they_begin_with(tokenizer):
    engine = Told(tokenizer, "wxyz")
    start = begun(tokenizer, "abcdef")
    continuations(engine, [(start, 6), (start, 2)], SamplingParams(max_new_tokens=10, min_tokens=4), [[0], [1]])
    assert sorted(engine.asked) == [(1, 8, 0), (1, 8, 2)]  # six tokens are over min_tokens=4 already, two are not
    with pytest.raises(SamplerError, match="presence_penalty=0.5 counts the tokens of a completion"):
        continuations(engine, [(start, 6)], SamplingParams(presence_penalty=0.5), [[0]])


@pytest.mark.parametrize(
    "said, new, ids, text, reason",
    [
        ("abcdef", "wxyz", "abcdefwxyz", "abcdefwxyz", "length"),
        ("abcQ:", "wxyz", "abcQ:wxyz", "abcQ:wxyz", "length"),  # what a completion begins with does not end it
        ("abcQ", ":xyz", "abcQ:", "abc", "stop"),  # nor is one found by the engine that begins before the new tokens
        ("abcd", "eQ:z", "abcdeQ:", "abcde", "stop"),
    ],
)
def test_stop_strings_of_continued_completions(tokenizer, said, new, ids, text, reason):
    """The text of a continued completion held the stop string that ended it, and a reward judged that text."""
    ((found,),) = continuations(
        Told(tokenizer, new),
        [(begun(tokenizer, said), len(said))],
        SamplingParams(max_new_tokens=20, stop_strings=("Q:",)),
        [[0]],
    )
    assert (text_of(tokenizer, found.ids), found.text, found.finish_reason) == (ids, text, reason)


def words_of_sentencepiece():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"\u2581we": 0, "\u2581so": 1, "\u2581it": 2, "?": 3}, unk_token="?"))
    words.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def test_a_stop_string_that_ends_in_the_space_before_the_next_word():
    """Of sentencepiece's words the space is the next one's, and such a word alone is decoded without it."""
    import numpy as np

    text = DerivedText(words_of_sentencepiece(), SamplingParams(max_new_tokens=4, stop_strings=("so ", "zz")))
    assert text.decode([2]) == "it" and text.decode([0, 1, 2]) == "we so it"
    ids, slot = np.array([[0, 1, 2, 0]]), np.array([0])
    found = [text.watch(ids[0, n - 1 : n], slot, ids, np.array([n])) for n in (1, 2, 3)]
    assert found == [[], [], [0]] and text.of([0, 1, 2]) == "we "


def test_the_unknown_token_is_no_tag_of_a_thought():
    """It is the id that a tokenizer without <think> gives for it, and texts are without special tokens."""
    assert text_of(words_of_sentencepiece(), [0, 3, 2]) == "we it"


def test_a_stop_string_across_tokens_and_characters_of_several_bytes():
    """Byte-level tokens: é and the emoji take two and four; any split of the text into a beginning and new tokens ends
    at the same place.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    text, stop = "Zoé sagt 🙂é! ja", "🙂é!"
    ids, end = tokenizer.encode(text), len(tokenizer.encode("Zoé sagt 🙂é!"))
    derived = DerivedText(tokenizer, SamplingParams(stop_strings=(stop,)))
    for split in range(end):
        assert derived.ended(ids[:split], ids[split:], "length") == (ids[:end], "stop")
    import numpy as np

    hits = [
        n
        for n in range(1, len(ids) + 1)
        if derived.watch(np.array(ids[n - 1 : n]), np.array([0]), np.array([ids]), np.array([n]))
    ]
    assert hits[0] == end and derived.of(ids[:end]) == "Zoé sagt "


@pytest.mark.parametrize(
    "stop, text, least, ends, said",
    [
        ("ab", "a" + "<r>" * 9 + "b!", 0, 11, ""),
        ("ab", "<r>" * 9 + "ab!", 0, 11, ""),
        ("🙂", "a🙂!", 0, 5, "a"),
        ("🙂", "a🙂!", 2, 5, "a"),
        ("🙂", "a🙂!", 4, 5, "a"),
        ("🙂", "a🙂!", 5, None, "a🙂!"),
        ("🙂!", "a🙂!", 5, 6, "a"),
        ("é", "éé!", 1, 2, ""),
        ("é", "éé!", 2, 4, "é"),
        ("é", "éé!", 3, 4, "é"),
        ("é", "éé!", 4, None, "éé!"),
    ],
)
def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it(stop, text, least, ends, said):
    """Reserved special tokens between its characters hid it from the sampler, as did least tokens that end inside of a
    character: the row ran on to its limit, its text cut all the same.
    """
    import numpy as np
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<r>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    ids = tokenizer.encode(text)
    assert tokenizer.convert_tokens_to_ids("<r>") not in tokenizer.all_special_ids
    derived = DerivedText(tokenizer, SamplingParams(stop_strings=(stop,), min_tokens=least, max_new_tokens=64))
    hits = [
        n
        for n in range(1, len(ids) + 1)
        if derived.watch(np.array(ids[n - 1 : n]), np.array([0]), np.array([ids]), np.array([n]))
    ]
    assert hits[:1] == ([ends] if ends else [])
    assert derived.ended([], ids, "length") == ((ids[:ends], "stop") if ends else (ids, "length"))
    assert derived.of(ids[:ends]) == said


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finish", ["content_filter", None, "abort"])
def test_a_text_that_a_server_broke_off_is_no_completion(tokenizer, finish):
    """It was taken for one that the model had ended, an end token behind it."""
    from stages.decoding.engines import EngineError
    from stages.decoding.server_engine import ServerEngine
    from stages.running.servers import Served

    engine = ServerEngine.__new__(ServerEngine)
    engine.api, engine.tokenizer, engine.model, engine.url = "openai", tokenizer, "m", "http://127.0.0.1:9/v1"
    engine.key_variable, engine.weights = "", "input"
    engine.served = Served("the server", "completions", EngineError, 60.0)
    engine._call = lambda *_, **__: {"choices": [{"text": "abc", "finish_reason": finish}]}
    got = engine._row([1, 2], 0, SamplingParams(stop_ids={95}), {}, DerivedText(tokenizer, SamplingParams()))
    assert got.finish_reason == "error" and repr(finish) in got.error and not got.ids


def test_prompts_as_long_as_the_context_say_what_fits(models):
    sampler, length = Sampler(models("llama"), None), SHAPE["max_position_embeddings"]
    for tokens, wanted in itertools.product((length - 1, length, length + 1), (1, 2)):
        if tokens + wanted <= length:
            assert (
                len(sampler.generate([[1] * tokens], SamplingParams(max_new_tokens=wanted), [[0]])[0][0].ids) == wanted
            )
        else:
            with pytest.raises(SamplerError, match=f"{length} positions"):
                sampler.generate([[1] * tokens], SamplingParams(max_new_tokens=wanted), [[0]])
