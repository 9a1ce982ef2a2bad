"""The sampler against plain forwards and transformers' own generate, on tiny random models."""

import pytest
import torch

from stages.decoding.decoders import make_decoder
from stages.decoding.kv_cache import SlotKV
from stages.decoding.lean_decoder import LeanDecoder, why_not_lean
from stages.decoding.model_decoders import GenericDecoder
from stages.decoding.sampler import Sampler, SamplerError, SamplingParams
from tests.sampler.contract import filtered_log_softmax

ENGINES = [
    ("llama", True),
    ("llama", False),
    ("llama3-rope", True),
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", True),
    ("qwen3", False),
    ("gpt2", False),
    ("mistral-window", True),
    ("mistral-window", False),
]
#: All-off, temperature, each filter, and all together.
SETTINGS = [
    dict(),
    dict(temperature=0.7),
    dict(top_p=0.8),
    dict(top_k=7),
    dict(min_p=0.05),
    dict(temperature=1.3, top_p=0.9, top_k=20, min_p=0.01),
]


def trainer_logps(model, prompt, ids, params):
    """Log-probs of `ids` by one plain forward over the whole sequence."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return filtered_log_softmax(logits, params)[torch.arange(len(ids)), torch.tensor(ids)]


@pytest.mark.parametrize("name, lean", ENGINES)
def test_greedy_equals_transformers_generate(models, prompts, name, lean):
    model = models(name)
    out = Sampler(model, None, max_batch=3, lean=lean).generate(
        prompts, SamplingParams(temperature=0, max_new_tokens=14), [[0]] * len(prompts)
    )
    for prompt, (completion,) in zip(prompts, out):
        ids = torch.tensor([prompt])
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=14, pad_token_id=0
        )
        assert completion.ids == want[0, len(prompt) :].tolist()
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("name, lean", ENGINES)
def test_logps_equal_the_trainers(models, prompts, name, lean):
    model = models(name)
    for settings in SETTINGS if (name, lean) == ("llama", True) else SETTINGS[-1:]:
        params = SamplingParams(max_new_tokens=12, stop_ids={1, 2, 3}, **settings)
        out = Sampler(model, None, max_batch=4, lean=lean).generate(
            prompts, params, [[i, 100 + i] for i in range(len(prompts))]
        )
        for prompt, group in zip(prompts, out):
            for c in group:
                torch.testing.assert_close(
                    torch.tensor(c.logps), trainer_logps(model, prompt, c.ids, params), atol=2e-5, rtol=0
                )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens_do_not_depend_on_batch_or_order(models, prompts, name):
    params = SamplingParams(max_new_tokens=20, stop_ids={1, 2, 3, 4, 5})
    seeds = [[10 * i + g for g in range(3)] for i in range(len(prompts))]
    base = Sampler(models(name), None, max_batch=1).generate(prompts, params, seeds)
    for batch in (2, 5, 64):
        assert ids_of(Sampler(models(name), None, max_batch=batch).generate(prompts, params, seeds)) == ids_of(base)
    sampler = Sampler(models(name), None, max_batch=4)
    turned = sampler.generate(prompts[::-1], params, seeds[::-1])
    assert ids_of(turned[::-1]) == ids_of(base)
    chunks = sampler.generate(prompts[:3], params, seeds[:3]) + sampler.generate(prompts[3:], params, seeds[3:])
    assert ids_of(chunks) == ids_of(base)
    assert len({tuple(c.ids) for group in base for c in group}) > len(prompts)


def ids_of(groups):
    return [[(c.ids, c.finish_reason) for c in group] for group in groups]


def test_lean_and_generic_engines_agree(models, prompts):
    params = SamplingParams(max_new_tokens=25, top_p=0.95)
    seeds = [[i] for i in range(len(prompts))]
    for name in ("llama", "llama3-rope", "qwen2", "qwen3"):
        lean, generic = (
            Sampler(models(name), None, max_batch=3, lean=flag).generate(prompts, params, seeds)
            for flag in (True, False)
        )
        assert ids_of(lean) == ids_of(generic)


@pytest.mark.parametrize("name, lean", [("llama", True), ("qwen3", False), ("mistral-window", True)])
def test_storage_that_grows_while_rows_are_in_it_changes_nothing(models, prompts, monkeypatch, name, lean):
    """In a run whose completions are longer than the storage that it began with, and whose rows end and move."""
    params, seeds = SamplingParams(max_new_tokens=60, stop_ids={1, 2}), [[i, 50 + i] for i in range(len(prompts))]
    sampler = Sampler(models(name), None, max_batch=4, lean=lean)
    at_once, grown, grow = sampler.generate(prompts, params, seeds), [], SlotKV.grow
    monkeypatch.setattr("stages.decoding.sampler.COLUMN_STEP", 1)
    monkeypatch.setattr(SlotKV, "grow", lambda kv, columns: (grown.append((kv.columns, columns)), grow(kv, columns)))
    found = sampler.generate(prompts, params, seeds)
    assert ids_of(found) == ids_of(at_once) and len({len(c.ids) for group in found for c in group}) > 2
    assert len(grown) > 1 and all(before < after <= 17 + 60 for before, after in grown)
    for prompt, group in zip(prompts, found):
        for c in group:
            torch.testing.assert_close(
                torch.tensor(c.logps), trainer_logps(models(name), prompt, c.ids, params), atol=2e-5, rtol=0
            )


def test_first_token_distribution_is_the_softmax(models):
    prompt, draws = [4, 8, 15], 3000
    out = Sampler(models("llama"), None, max_batch=500).generate(
        [prompt], SamplingParams(max_new_tokens=1, top_k=6), [list(range(draws))]
    )
    seen = torch.bincount(torch.tensor([c.ids[0] for c in out[0]]), minlength=96).double()
    with torch.inference_mode():
        logits = models("llama")(torch.tensor([prompt])).logits[:, -1]
    expected = filtered_log_softmax(logits, SamplingParams(top_k=6))[0].exp().double() * draws
    live = expected > 0
    assert seen[~live].sum() == 0
    assert float(((seen - expected)[live] ** 2 / expected[live]).sum()) < 20.5  # 99.9% point of 5 degrees of freedom


def test_blocks_of_slots_read_as_many_columns_as_their_longest_row_needs():
    """Also where the rows of a later block are longer than those of the one before, whose long rows have ended."""
    from types import SimpleNamespace

    import numpy as np

    from stages.decoding.sampler import BLOCK, _Run

    rng = np.random.default_rng(0)
    runs = set()
    for live in (1, BLOCK, BLOCK + 1, 3 * BLOCK - 5, 4 * BLOCK):
        for spread in (1, 10, 1000):
            length = 100 + rng.integers(0, spread, 4 * BLOCK)  # of dead slots, too
            for blocks in (True, False):
                run = SimpleNamespace(decoder=SimpleNamespace(wants_blocks=blocks), length=length, live=live)
                found = _Run._bounds(run)
                starts, ends = [start for start, _, _ in found], [end for _, end, _ in found]
                assert starts == [0, *ends[:-1]] and ends[-1] == live and all(end % BLOCK == 0 for end in ends[:-1])
                assert all(columns == length[start:end].max() + 1 for start, end, columns in found)
                assert blocks or len(found) == 1
                runs.add(len(found))
    assert {1, 2} <= runs


def test_weights_are_read_at_every_call(models, prompts):
    import copy

    model = copy.deepcopy(models("llama"))
    sampler, params, seeds = (
        Sampler(model, None, max_batch=4),
        SamplingParams(max_new_tokens=10),
        [[i] for i in range(len(prompts))],
    )
    before = sampler.generate(prompts, params, seeds)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    model.train()
    after = sampler.generate(prompts, params, seeds)
    assert model.training and ids_of(after) != ids_of(before)
    model.eval()
    for prompt, (c,) in zip(prompts, after):
        torch.testing.assert_close(
            torch.tensor(c.logps), trainer_logps(model, prompt, c.ids, params), atol=5e-5, rtol=1e-5
        )


def test_prompts_are_prefilled_once_per_group(models, prompts, monkeypatch):
    rows = []
    original = LeanDecoder.prefill
    monkeypatch.setattr(
        LeanDecoder,
        "prefill",
        lambda self, ids, lengths, past=None: rows.extend(lengths.tolist()) or original(self, ids, lengths, past),
    )
    Sampler(models("llama"), None, max_batch=2).generate(
        prompts, SamplingParams(max_new_tokens=3), [list(range(5))] * len(prompts)
    )
    assert sorted(rows) == sorted(len(p) for p in prompts)


def test_stop_ids_and_reasons(models, prompts):
    params = SamplingParams(max_new_tokens=30, stop_ids=set(range(3)))
    groups = Sampler(models("llama"), None, max_batch=4).generate(
        prompts, params, [[i, i + 50] for i in range(len(prompts))]
    )
    reasons = set()
    for c in (c for group in groups for c in group):
        reasons.add(c.finish_reason)
        assert not params.stop_ids & set(c.ids[:-1]) and len(c.ids) == len(c.logps) <= 30
        assert (c.ids[-1] in params.stop_ids) == (c.finish_reason == "eos")
        assert c.finish_reason == "eos" or len(c.ids) == 30
        assert c.text == ""
    assert reasons == {"eos", "length"}


def test_stop_strings_end_the_row_and_cut_the_text(models, prompts, tokenizer):
    seeds = [[i, i + 9] for i in range(len(prompts))]
    sampler = Sampler(models("gpt2"), tokenizer, max_batch=3)
    free = sampler.generate(prompts, SamplingParams(max_new_tokens=40), seeds)
    chars = [c.text for group in free for c in group]
    stops = (chars[0][10:12], chars[3][5:8], "nowhere to be found")
    got = sampler.generate(prompts, SamplingParams(max_new_tokens=40, stop_strings=stops), seeds)
    stopped = 0
    for a, b in zip((c for g in free for c in g), (c for g in got for c in g)):
        ends = [min(a.text.find(s) + len(s) for s in stops if s in a.text)] if any(s in a.text for s in stops) else []
        if not ends:
            assert (a.ids, a.text) == (b.ids, b.text) and b.finish_reason == "length"
            continue
        stopped += 1
        assert b.finish_reason == "stop" and a.ids[: len(b.ids)] == b.ids
        whole = tokenizer.decode(b.ids, skip_special_tokens=True)
        assert (
            any(whole.endswith(s) for s in stops) and not any(s in b.text for s in stops) and whole.startswith(b.text)
        )
        assert not any(s in tokenizer.decode(b.ids[:-1], skip_special_tokens=True) for s in stops)
    assert stopped >= 2


def test_text_leaves_out_the_stop_token(models, tokenizer):
    sampler = Sampler(models("llama"), tokenizer)
    only_end = lambda logits, generated, counts: torch.where(
        torch.arange(96) == torch.where(counts < 2, 33, 95)[:, None], 0.0, -1e9
    )
    ((c,),) = sampler.generate([[1, 2]], SamplingParams(stop_ids={95}, logit_processors=(only_end,)), [[0]])
    assert (c.ids, c.text, c.finish_reason) == ([33, 33, 95], "AA", "eos")
    assert max(abs(x) for x in c.logps) < 1e-6


def test_limits_and_refusals_say_what_to_do(models):
    sampler = Sampler(models("llama"), None)
    one = SamplingParams(max_new_tokens=1)
    for prompts, params, seeds, advice in (
        ([[]], one, [[0]], "is empty.*write at least one token id"),
        (
            [[1] * 90],
            SamplingParams(max_new_tokens=10),
            [[0]],
            "shorten the prompt to 86 tokens or write max_new_tokens <= 6",
        ),
        ([[96]], one, [[0]], "outside the model's vocabulary"),
        ([[1]], one, [[0], [1]], "one list of seeds per prompt"),
        ([[1]], SamplingParams(stop_ids={500}), [[0]], "model's own tokenizer"),
        ([[1]], SamplingParams(stop_strings=("x",)), [[0]], "give the Sampler a tokenizer"),
    ):
        with pytest.raises(SamplerError, match=advice):
            sampler.generate(prompts, params, seeds)
    ((full,),) = sampler.generate([[1] * 86], SamplingParams(max_new_tokens=10), [[0]])
    assert len(full.ids) == 10
    assert sampler.generate([[1], [2]], one, [[], []]) == [[], []] and sampler.generate([], one, []) == []


def test_progress_counts_completions(models):
    calls = []
    Sampler(models("llama"), None, max_batch=2).generate(
        [[1], [2, 3]],
        SamplingParams(max_new_tokens=4),
        [[0, 1], [2]],
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_the_lean_engine_takes_only_what_it_computes_exactly(models):
    import copy

    from transformers import LlamaConfig, LlamaForCausalLM

    assert type(make_decoder(models("qwen3"))) is LeanDecoder and type(make_decoder(models("gpt2"))) is GenericDecoder
    shape = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    assert "activation" in why_not_lean(LlamaForCausalLM(LlamaConfig(hidden_act="gelu", **shape)))
    hooked = copy.deepcopy(models("llama"))
    hooked.model.layers[0].register_forward_hook(lambda *a: None)
    assert "hooks" in why_not_lean(hooked)


def test_lora_adapters_are_used(models, prompts):
    import copy

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        copy.deepcopy(models("llama")),
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    ).eval()
    assert why_not_lean(model) is None
    params, seeds = SamplingParams(max_new_tokens=12), [[i] for i in range(len(prompts))]
    lean, generic = (
        Sampler(model, None, max_batch=3, lean=flag).generate(prompts, params, seeds) for flag in (True, False)
    )
    assert ids_of(lean) == ids_of(generic) != ids_of(Sampler(models("llama"), None).generate(prompts, params, seeds))
    for prompt, (c,) in zip(prompts, lean):
        torch.testing.assert_close(
            torch.tensor(c.logps), trainer_logps(model, prompt, c.ids, params), atol=3e-5, rtol=0
        )


PROCESSORS = dict(
    repetition_penalty=1.5,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    min_tokens=4,
    logit_bias={8: 2.0, 9: -100.0},
    bad_words=("!", "AB"),
)


@pytest.mark.parametrize("name, lean", [("llama", True), ("gpt2", False)])
def test_penalties_are_in_the_log_probs_and_rows_do_not_see_each_other(models, prompts, tokenizer, name, lean):
    from stages.decoding.sampling import bad_word_ids, processed_logits

    model = models(name)
    params = SamplingParams(max_new_tokens=14, stop_ids=set(range(20, 40)), temperature=0.9, top_p=0.95, **PROCESSORS)
    seeds = [[i, 60 + i] for i in range(len(prompts))]
    out = Sampler(model, tokenizer, max_batch=3, lean=lean).generate(prompts, params, seeds)
    assert ids_of(Sampler(model, tokenizer, max_batch=1, lean=lean).generate(prompts, params, seeds)) == ids_of(out)
    assert ids_of(Sampler(model, tokenizer, max_batch=64, lean=lean).generate(prompts, params, seeds)) == ids_of(out)
    bad = bad_word_ids(tokenizer, params.bad_words)
    for prompt, group in zip(prompts, out):
        for c in group:
            assert len(c.ids) >= 4 and 9 not in c.ids and "!" not in c.text and "AB" not in c.text
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + c.ids])).logits[0, len(prompt) - 1 : -1]
            n = len(c.ids)
            z = processed_logits(
                logits,
                params,
                torch.tensor([c.ids] * n),
                torch.arange(n),
                torch.tensor([prompt] * n),
                torch.full((n,), len(prompt)),
                bad,
            )
            want = filtered_log_softmax(z, params)[torch.arange(n), torch.tensor(c.ids)]
            torch.testing.assert_close(torch.tensor(c.logps), want, atol=3e-5, rtol=0)


def test_stop_strings_wait_for_min_tokens(models, prompts, tokenizer):
    seeds = [[i, i + 9] for i in range(len(prompts))]
    sampler = Sampler(models("gpt2"), tokenizer, max_batch=3)
    free = [c for group in sampler.generate(prompts, SamplingParams(max_new_tokens=30), seeds) for c in group]
    stop = free[0].text[3:5]
    got = [
        c
        for g in sampler.generate(
            prompts, SamplingParams(max_new_tokens=30, min_tokens=12, stop_strings=(stop,)), seeds
        )
        for c in g
    ]
    stopped = 0
    for a, b in zip(free, got):
        # one character per token: the first occurrence that ends after the twelfth token
        at = a.text.find(stop, 12 - 1)
        assert b.text == (a.text if at < 0 else a.text[:at]) and b.finish_reason == ("length" if at < 0 else "stop")
        assert len(b.ids) >= 12 and a.ids[: len(b.ids)] == b.ids
        stopped += at >= 0
    assert stopped < len(got) and got[0].text[:5] == free[0].text[:5]


@pytest.mark.parametrize(
    "processors, advice",
    [(dict(bad_words=("x",)), "give the Sampler a tokenizer"), (dict(logit_bias={500: 1.0}), "logit_bias .500.")],
)
def test_processors_that_do_not_fit_the_model(models, processors, advice):
    with pytest.raises(SamplerError, match=advice):
        Sampler(models("llama"), None).generate([[1]], SamplingParams(**processors), [[0]])
