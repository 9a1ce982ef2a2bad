"""What every sampling engine promises (``stages.decoding.engines.Engine``), as checks that take an engine and know
nothing of its kind.

``tests/sampler/test_engines.py`` runs all of them over the built-in engine, vLLM's adapter (against a stand-in of the
package), a server with vLLM's interface and a real `transformers serve`. A new engine is one more fixture there.
``tests/sampler/test_real_vllm.py`` runs them over vLLM itself and `vllm serve` where the package is installed. What
holds for all of them is tested by :class:`Promises` in both.
"""

import pytest
import torch

from stages.decoding.sampler import SamplerError, SamplingParams
from stages.decoding.sampling import keep_threshold, processed_logits, scaled_logits

STOPS = frozenset({2, 7, 9, 40, 41})  # 2 is the tiny tokenizer's <|im_end|>
PROMPTS = [[1, 40, 50, 60], [1, 70, 71, 72, 73, 74], [1, 90]]
SEEDS = [[11, 12, 13], [21], [31, 32]]


def rows(groups):
    return [c for group in groups for c in group]


def facts(groups):
    return [[(c.ids, c.finish_reason, c.text) for c in group] for group in groups]


def filtered_log_softmax(logits, params):
    """Log-probs of the sampled distribution over the whole vocabulary, [n, V] float32; -inf off its support."""
    z = scaled_logits(logits, params)
    threshold = keep_threshold(z, params)
    return torch.log_softmax(z if threshold is None else z.masked_fill(z < threshold, -float("inf")), -1)


def model_logps(model, prompt, ids, params):
    """Log-probs of ids under the distribution that params describe, by one plain forward per position."""
    found = []
    for t, token in enumerate(ids):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids[:t]])).logits[:, -1]
        if params.processed:
            logits = processed_logits(
                logits,
                params,
                torch.tensor([ids[:t]], dtype=torch.long),
                torch.tensor([t]),
                torch.tensor([prompt]),
                torch.tensor([len(prompt)]),
            )
        found.append(float(filtered_log_softmax(logits, params)[0, token]))
    return found


def check_shape_and_reasons(engine, tokenizer):
    params = SamplingParams(max_new_tokens=12, stop_ids=STOPS)
    groups = engine.generate(PROMPTS, params, SEEDS)
    assert [len(g) for g in groups] == [len(s) for s in SEEDS]
    reasons = set()
    for c in rows(groups):
        reasons.add(c.finish_reason)
        assert c.finish_reason in ("eos", "length") and c.error is None and c.reencoded == engine.reencodes
        assert c.logps is None or len(c.logps) == len(c.ids)
        if not engine.reencodes:
            assert (c.ids[-1] in STOPS) == (c.finish_reason == "eos") and not STOPS & set(c.ids[:-1])
            assert c.finish_reason == "eos" or len(c.ids) == 12
            assert c.text == tokenizer.decode(
                c.ids[:-1] if c.finish_reason == "eos" else c.ids, skip_special_tokens=True
            )
    assert reasons == {"eos", "length"}
    assert engine.generate(PROMPTS[:1], params, [[]]) == [[]] and engine.generate([], params, []) == []


def check_seeds_decide(engine):
    params = SamplingParams(max_new_tokens=10, stop_ids=STOPS, temperature=1.1)
    first = engine.generate(PROMPTS, params, SEEDS)
    assert facts(engine.generate(PROMPTS, params, SEEDS)) == facts(first)
    turned = engine.generate(PROMPTS[::-1], params, [s[::-1] for s in SEEDS[::-1]])
    assert facts([g[::-1] for g in turned[::-1]]) == facts(first)
    apart = [engine.generate([p], params, [s])[0] for p, s in zip(PROMPTS, SEEDS)]
    assert facts(apart) == facts(first)
    assert len({tuple(c.ids) for c in first[0]}) == 3  # other seeds, other rows
    greedy = engine.generate(
        PROMPTS[:2], SamplingParams(temperature=0, max_new_tokens=6, stop_ids=STOPS), [[1, 2], [3, 4]]
    )
    assert all(g[0].ids == g[1].ids for g in greedy)


def check_greedy_is_the_models(engine, model):
    groups = engine.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=8, stop_ids=STOPS), [[0]] * 3)
    for prompt, (c,) in zip(PROMPTS, groups):
        ids = torch.tensor([prompt])
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=sorted(STOPS),
            pad_token_id=3,
        )[0, len(prompt) :].tolist()
        if engine.reencodes:
            assert c.text == engine.tokenizer.decode([t for t in want if t not in STOPS], skip_special_tokens=True)
        else:
            assert c.ids == want


def check_logps_are_of_the_sampled_distribution(engine, model):
    settings = [dict(), dict(temperature=0.7, top_k=20), dict(temperature=0), dict(top_p=0.8)]
    settings += (
        [
            dict(
                repetition_penalty=1.3,
                presence_penalty=0.4,
                frequency_penalty=0.2,
                min_tokens=3,
                logit_bias={50: 3.0, 60: -100.0},
            )
        ]
        if not engine.reencodes
        else []
    )
    for setting in settings:
        params = SamplingParams(max_new_tokens=7, stop_ids=STOPS, **setting)
        for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, params, SEEDS)):
            for c in group:
                assert c.finish_reason != "error", c.error
                if c.logps is not None:
                    assert c.logps == pytest.approx(model_logps(model, prompt, c.ids, params), abs=2e-5)


def check_stop_strings(engine, tokenizer):
    plain = SamplingParams(max_new_tokens=16, stop_ids=STOPS)
    free = rows(engine.generate(PROMPTS, plain, SEEDS))
    pieces = [c.text[k : k + 2] for c in free for k in range(1, len(c.text) - 2)]
    # across a token border
    stop = next(
        p for p in pieces if p.isascii() and p.isprintable() and len(tokenizer.encode(p, add_special_tokens=False)) == 2
    )
    params = SamplingParams(max_new_tokens=16, stop_ids=STOPS, stop_strings=(stop,))
    stopped = 0
    for a, b in zip(free, rows(engine.generate(PROMPTS, params, SEEDS))):
        if stop not in a.text:
            assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
            continue
        stopped += 1
        assert b.finish_reason == "stop" and b.text == a.text[: a.text.index(stop)]
        if not engine.reencodes:
            assert b.ids == a.ids[: len(b.ids)] and stop in tokenizer.decode(b.ids, skip_special_tokens=True)
            assert stop not in tokenizer.decode(b.ids[:-1], skip_special_tokens=True)
    assert stopped


def check_bans_and_penalties(engine, tokenizer):
    def sample(**setting):
        return rows(
            engine.generate(
                PROMPTS,
                SamplingParams(max_new_tokens=12, stop_ids=STOPS, **setting),
                [[100 * i + g for g in range(4)] for i in range(3)],
            )
        )

    assert {c.text for c in sample(logit_bias={50: 50.0, 2: 90.0})} == {""}
    assert {c.text for c in sample(logit_bias={50: 50.0, 2: 90.0}, min_tokens=5)} == {tokenizer.decode([50] * 5)}
    only = sample(logit_bias={token: 60.0 for token in (50, 51)})
    assert set("".join(c.text for c in only)) <= set(tokenizer.decode([50, 51]))
    said = "".join(c.text for c in sample())
    words = [tokenizer.decode([t]) for t in range(len(tokenizer))]
    letter = max(
        (c for c in said if c.isascii() and c.isprintable() and c.strip() and sum(c in w for w in words) == 1),
        key=said.count,
    )  # in no longer token, which would not be banned
    assert not any(letter in c.text for c in sample(bad_words=[letter]))


def check_greedy_settings_do_what_the_built_in_engine_does(engine, sampler):
    """Every setting that changes logits or ends rows, greedily: the same ids, ends, texts and log-probs as ``sampler``
    of the same weights.
    """
    said = [
        c.text for c in rows(sampler.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=16), [[0]] * 3))
    ]
    stops = sorted(
        {
            text[k : k + n]
            for text in said
            for n in (1, 2, 3)
            for k in range(1, 8)
            if text[k : k + n].isascii() and text[k : k + n].isprintable()
        }
    )[:4]
    words = {
        word: sampler.tokenizer.encode(word, add_special_tokens=False)
        for word in ("two", " two", "answer", " answer", "4", "is")
    }
    settings = [
        dict(repetition_penalty=1.5),
        dict(repetition_penalty=0.5),
        dict(frequency_penalty=1.5, presence_penalty=-1.0),
        dict(min_tokens=6),
        dict(min_tokens=12),
        dict(logit_bias={50: 5.0, 60: -100.0}),
        dict(stop_ids=frozenset({2, 50}), logit_bias={50: 4.0}, min_tokens=3),
    ]
    settings += [dict(stop_strings=(stop,), min_tokens=least) for stop in stops for least in (0, 4)]
    settings += [
        dict(bad_words=(word,), logit_bias={token: 20.0 + k for k, token in enumerate(reversed(ids))})
        for word, ids in words.items()
    ]
    assert len(stops) == 4 and {len(ids) for ids in words.values()} == {1, 2}
    for setting in settings:
        params = SamplingParams(**{"temperature": 0, "max_new_tokens": 12, "stop_ids": STOPS, **setting})
        found, wanted = (one.generate(PROMPTS, params, [[0]] * 3) for one in (engine, sampler))
        assert facts(found) == facts(wanted), setting
        for a, b in zip(rows(found), rows(wanted)):
            assert a.logps is None or a.logps == pytest.approx(b.logps, abs=2e-5), setting


def check_min_p_and_filters_together(engine, model):
    """Log-probs under filters, one at a time and together; the row's tokens decide, so a token that the model's filters
    drop fails too.
    """
    for setting in (
        dict(min_p=0.05),
        dict(temperature=0.5, min_p=0.2),
        dict(top_k=5, top_p=0.9),
        dict(temperature=1.7, top_p=0.9, repetition_penalty=1.2),
    ):
        params = SamplingParams(max_new_tokens=8, stop_ids=STOPS, **setting)
        for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, params, SEEDS)):
            for c in group:
                found = model_logps(model, prompt, c.ids, params)
                assert all(v > -float("inf") for v in found) and (
                    c.logps is None or c.logps == pytest.approx(found, abs=2e-5)
                ), setting


def check_draws_follow_the_distribution(engine, model, n=400):
    """First tokens of n rows against the model's own probabilities: a chi-square over the k best tokens and the
    rest.
    """
    prompt, params = PROMPTS[0], SamplingParams(max_new_tokens=1, temperature=0.8, top_k=12)
    (group,) = engine.generate([prompt], params, [list(range(1000, 1000 + n))])
    with torch.inference_mode():
        p = filtered_log_softmax(model(torch.tensor([prompt])).logits[:, -1], params)[0].exp()
    counts = torch.bincount(torch.tensor([c.ids[0] for c in group]), minlength=len(p)).double()
    kept = p > 0
    assert int(kept.sum()) == 12 and counts[~kept].sum() == 0
    assert float(((counts - n * p)[kept] ** 2 / (n * p[kept])).sum()) < 31.3  # 11 degrees of freedom, 0.1%


def check_vllm_refusals(engine):
    """Settings that vLLM refuses, or would change in silence."""
    for setting, advice in (
        (dict(temperature=0.005), "write 0 for greedy"),
        (dict(min_tokens=2, stop_ids={7}), r"end tokens \[2\]"),
        (dict(bad_words=("what is", " is two")), "cannot ban ' is two'"),
    ):
        with pytest.raises(SamplerError, match=advice):
            engine.generate(PROMPTS, SamplingParams(**setting), [[0]] * 3)


def check_refusals(engine):
    one = SamplingParams(max_new_tokens=1)
    for prompts, params, seeds, advice in (
        ([[]], one, [[0]], "is empty"),
        ([[1] * 255], SamplingParams(max_new_tokens=10), [[0]], "shorten the prompt to 246 tokens"),
        ([[99999]], one, [[0]], "outside the model's vocabulary"),
        ([[1]], one, [[0], [1]], "one list of seeds per prompt"),
    ):
        with pytest.raises(SamplerError, match=advice):
            engine.generate(prompts, params, seeds)


def check_new_weights(engine, directory, other_model):
    """``directory`` holds the weights of ``other_model``; the engine has those of another model before."""
    params = SamplingParams(temperature=0, max_new_tokens=8, stop_ids=STOPS)
    long = [5 + (7 * i) % 250 for i in range(200)]  # over a block of every engine's prefix cache
    before = engine.generate(PROMPTS, params, [[0]] * 3)
    if not engine.reencodes:
        engine.generate([long, long], SamplingParams(temperature=0, max_new_tokens=4), [[0], [1]])
    assert engine.weights == "input"
    engine.sleep(keep_weights=True)
    assert facts(engine.generate(PROMPTS, params, [[0]] * 3)) == facts(before)
    engine.sleep(keep_weights=False)
    engine.update(directory, "step-1")
    assert engine.weights == "step-1"
    after = engine.generate(PROMPTS, params, [[0]] * 3)
    assert facts(after) != facts(before)
    longer = SamplingParams(temperature=0, max_new_tokens=4)
    for c in rows(engine.generate([long], longer, [[0]])) if not engine.reencodes else ():
        # nothing of the old weights is left in a cache
        assert c.logps == pytest.approx(model_logps(other_model, long, c.ids, longer), abs=2e-5)
    check_greedy_is_the_models(engine, other_model)
    check_logps_are_of_the_sampled_distribution(engine, other_model)


def loaded(paths):
    """{name: (path, frozen model)} of policies by their paths, and the "tokenizer" of "policy"."""
    from stages.chat import load_tokenizer
    from stages.models.modeling import freeze, load_policy

    return {name: (path, freeze(load_policy(path, "cpu"))) for name, path in paths.items()} | {
        "tokenizer": load_tokenizer(paths["policy"])
    }


class Promises:
    """Tests of what holds for every engine, over the fixtures ``engine`` and ``made`` (:func:`loaded`) of a file that
    inherits them.
    """

    def test_shape_and_reasons(self, engine, made):
        check_shape_and_reasons(engine, made["tokenizer"])

    def test_seeds_decide(self, engine):
        check_seeds_decide(engine)

    def test_greedy_is_the_models(self, engine, made):
        check_greedy_is_the_models(engine, made["policy"][1])

    def test_logps_are_of_the_sampled_distribution(self, engine, made):
        check_logps_are_of_the_sampled_distribution(engine, made["policy"][1])

    def test_stop_strings(self, engine, made):
        check_stop_strings(engine, made["tokenizer"])

    def test_bans_and_penalties(self, engine, made):
        check_bans_and_penalties(engine, made["tokenizer"])

    def test_refusals(self, engine):
        check_refusals(engine)
