"""Beginnings that prompts share are computed once, and nothing else changes."""

import random

import numpy as np
import pytest
import torch

from stages.decoding import prefixes
from stages.decoding import sampler as sampler_module
from stages.decoding.decoders import make_decoder
from stages.decoding.kv_cache import Past, Prefilled, SlotKV, Trunks, WholeKV
from stages.decoding.lean_decoder import LeanDecoder
from stages.decoding.model_decoders import GenericDecoder
from stages.decoding.prefixes import shared_beginnings
from stages.decoding.sampler import Sampler, SamplingParams
from tests.sampler.test_sampler import ENGINES, ids_of, trainer_logps


def prompts_of(seed=0, vocabulary=96):
    """Two long beginnings with tails of 1 to 12 tokens, one of them cut (the whole beginning and less), and prompts
    that begin like nobody.
    """
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(vocabulary) for _ in range(n)]
    first, second = draw(70), draw(66)
    prompts = (
        [first + draw(n) for n in (1, 12, 5, 5, 9)]
        + [second + draw(n) for n in (3, 1, 11, 4, 6)]
        + [draw(n) for n in (9, 2, 80)]
        + [list(first), list(first)]
    )
    rng.shuffle(prompts)
    return prompts


@pytest.mark.parametrize("name, lean", ENGINES)
def test_a_shared_beginning_changes_nothing_but_the_work(models, monkeypatch, name, lean):
    model, prompts = models(name), prompts_of()
    params = SamplingParams(max_new_tokens=10, stop_ids={1, 2, 3}, temperature=0.8, top_p=0.95)
    seeds = [[i, 100 + i] for i in range(len(prompts))]
    seen = []
    decoder = LeanDecoder if lean else GenericDecoder
    make_decoder(model, lean)  # what a model's own code does is tried once, at its first use
    original = decoder.prefill

    def counted(self, ids, lengths, past=None):
        seen.append((int(lengths.sum()), past is not None))
        return original(self, ids, lengths, past)

    monkeypatch.setattr(decoder, "prefill", counted)
    out = Sampler(model, None, max_batch=4, lean=lean).generate(prompts, params, seeds)
    shared, seen[:] = list(seen), []
    monkeypatch.setattr(prefixes, "MIN_SAVED", 10**9)
    apart = Sampler(model, None, max_batch=4, lean=lean).generate(prompts, params, seeds)
    everything = sum(map(len, prompts))
    assert sum(n for n, _ in seen) == everything and not any(past for _, past in seen)
    assert sum(n for n, _ in shared) == everything - 6 * 69 - 4 * 66 and any(past for _, past in shared)
    assert ids_of(out) == ids_of(apart)
    for prompt, group, other in zip(prompts, out, apart):
        for c, d in zip(group, other):
            torch.testing.assert_close(
                torch.tensor(c.logps), trainer_logps(model, prompt, c.ids, params), atol=2e-5, rtol=0
            )
            torch.testing.assert_close(torch.tensor(c.logps), torch.tensor(d.logps), atol=2e-5, rtol=0)


def test_penalties_read_the_whole_prompt(models):
    """repetition_penalty counts the tokens of a shared beginning too."""
    prompts, seeds = prompts_of(3), [[i] for i in range(15)]
    params = SamplingParams(max_new_tokens=10, repetition_penalty=1.7)
    sampler = Sampler(models("llama"), None, max_batch=5)
    assert ids_of(sampler.generate(prompts, params, seeds)) == ids_of(
        [sampler.generate([p], params, [s])[0] for p, s in zip(prompts, seeds)]
    )


def test_groups_share_what_they_say():
    for seed in range(200):
        rng = random.Random(seed)
        trunk = [rng.randrange(3) for _ in range(300)]
        prompts = [
            [
                *trunk[: rng.choice((60, 64, 65, 130, 200, 300))],
                *(rng.randrange(3) for _ in range(rng.randrange(1, 40))),
            ]
            for _ in range(rng.randrange(1, 30))
        ]
        prompts += [list(rng.choice(prompts)) for _ in range(rng.randrange(4))]
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
        groups = shared_beginnings(prompts, order)
        assert sorted(i for members, _ in groups for i in members) == sorted(order)
        assert [members[0] for members, _ in groups] == sorted((members[0] for members, _ in groups), key=order.index)
        for members, shared in groups:
            assert members == sorted(members, key=order.index)
            assert len({tuple(prompts[i][:shared]) for i in members}) == 1 and all(
                len(prompts[i]) > shared for i in members
            )
            assert shared == 0 or (shared >= prefixes.MIN_SHARED and (len(members) - 1) * shared >= prefixes.MIN_SAVED)
        assert sum(shared == 0 for _, shared in groups) <= 1


def test_the_groups_that_save_most_of_what_one_level_can():
    """Few-shot: one beginning per category. An agent: the tools once for all tasks, or each task's own start, whichever
    saves more.
    """
    base = np.random.default_rng(0)
    draw = lambda n: base.integers(0, 1000, n).tolist()
    categories = [draw(400) for _ in range(3)]
    prompts = [start + draw(20) for start in categories for _ in range(10)]
    assert sorted((len(m), s) for m, s in shared_beginnings(prompts, range(30))) == [(10, 400)] * 3
    tools = draw(300)
    short, long = (
        [tools + task + draw(9) for task in [draw(length) for _ in range(8)] for _ in range(4)] for length in (10, 400)
    )
    assert [(len(m), s) for m, s in shared_beginnings(short, range(32))] == [(32, 300)]
    assert [(len(m), s) for m, s in shared_beginnings(long, range(32))] == [(4, 700)] * 8
    assert shared_beginnings([draw(40) for _ in range(5)], [3, 1, 0, 2, 4]) == [([3, 1, 0, 2, 4], 0)]
    assert shared_beginnings([], []) == []


@pytest.mark.parametrize("name, lean", ENGINES)
@pytest.mark.parametrize("limit", [None, 60_000, 0])
def test_turns_go_on_from_what_is_kept(models, monkeypatch, name, lean, limit):
    """Three turns of rows that share a start, part, and are cut: the same tokens as from nothing, and no token is
    computed twice that is still kept.
    """
    if limit is not None:
        monkeypatch.setattr(prefixes, "KEPT_BYTES", limit)
    decoder, computed = (LeanDecoder if lean else GenericDecoder), []
    original = decoder.prefill
    monkeypatch.setattr(
        decoder,
        "prefill",
        lambda self, ids, lengths, past=None: computed.append(int(lengths.sum())) or original(self, ids, lengths, past),
    )
    make_decoder(models(name), lean)  # what a model's own code does is tried once, at its first use
    computed.clear()
    sampler = Sampler(models(name), None, max_batch=4, lean=lean)
    params = SamplingParams(max_new_tokens=6, stop_ids={1, 2, 3}, top_p=0.95)

    def play():
        rng = random.Random(5)
        starts = [[rng.randrange(96) for _ in range(n)] for n in (64, 66, 65)]
        rows, found, asked = [list(start) for start in starts for _ in range(3)], [], 0
        for turn in range(3):
            distinct = sorted({tuple(row) for row in rows})
            asked += sum(map(len, distinct))
            groups = dict(
                zip(
                    distinct,
                    sampler.generate(
                        [list(row) for row in distinct],
                        params,
                        [[turn * 100 + i for i, row in enumerate(rows) if tuple(row) == own] for own in distinct],
                    ),
                )
            )
            if sampler.kept is not None and limit is None:
                assert len(sampler.kept.rows) == len(rows), "what is continued is kept no longer"
            for i, row in enumerate(rows):
                own = groups[tuple(row)].pop(0)
                found.append((row[:], own))
                # what row 4 said is cut
                rows[i] = row + own.ids[: 4 if i == 4 else None] + [rng.randrange(96) for _ in range(1 + i % 3)]
        return found, asked

    found, asked = play()
    assert sum(computed) == asked
    computed.clear()
    with sampler.remembering():
        again, _ = play()
    assert sampler.kept is None
    assert [(prompt, c.ids) for prompt, c in again] == [(prompt, c.ids) for prompt, c in found]
    for prompt, c in again:
        torch.testing.assert_close(
            torch.tensor(c.logps), trainer_logps(models(name), prompt, c.ids, params), atol=2e-5, rtol=0
        )
    # the starts, and of every later turn the token that was sampled last, the rest of what was cut, and what was heard
    if limit is None:
        assert sum(computed) <= 64 + 66 + 65 + 2 * sum(1 + 1 + i % 3 for i in range(9))
    else:
        assert sum(computed) == asked if limit == 0 else sum(computed) < asked


def test_kept_rows_are_found_by_what_they_begin_with():
    """The longest common beginning over all rows, as by comparing with each; the oldest are dropped first."""

    def row(ids):
        return prefixes.Kept(ids, [torch.zeros(1, len(ids), 1)], [torch.zeros(1, len(ids), 1)])

    for seed in range(50):
        rng = random.Random(seed)
        trunk = [rng.randrange(2) for _ in range(200)]
        draw = lambda: trunk[: rng.randrange(40, 200)] + [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        kept, rows = prefixes.KeptRows(), [row(draw()) for _ in range(20)]
        rows += [row(list(rows[0].ids))]
        for one in rows:
            kept.add(one)
        for one in rng.sample(rows, 8):
            kept.drop(one)
            kept.drop(one)
            rows.remove(one)
        assert kept.rows == sorted(rows, key=lambda one: one.ids) and kept.bytes == sum(
            8 * len(one.ids) for one in rows
        )
        for prompt in [draw() for _ in range(20)] + [list(rows[0].ids), rows[1].ids[:70]]:
            most = max(prefixes.alike(np.array(prompt[:-1]), np.array(one.ids)) for one in rows)
            found = kept.longest(prompt)
            assert (
                found is None
                if most < prefixes.MIN_SHARED
                else (found[1] == most and found[0].ids[:most] == prompt[:most])
            )
    kept = prefixes.KeptRows(limit=8 * 150)
    first, second, third = row([1] * 70), row([2] * 70), row([3] * 70)
    for one in (first, second, third):
        kept.add(one)
    assert kept.rows == [second, third] and kept.bytes == 8 * 140
    kept.add(row([4] * 500))
    assert kept.rows == [] and kept.bytes == 0 and kept.longest([2] * 80) is None


@pytest.fixture
def made(monkeypatch):
    """The KV of slots and the trunks that samplers make, in turn."""
    found = {SlotKV: [], Trunks: []}
    for kind, ones in found.items():
        init = kind.__init__
        monkeypatch.setattr(
            kind, "__init__", lambda self, *given, init=init, ones=ones: init(self, *given) or ones.append(self)
        )
    return found


def doubled(model):
    import copy

    return copy.deepcopy(model).double()


@pytest.mark.parametrize("batch", [36, 5])
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama3-rope"])
def test_a_beginning_that_all_prompts_share_is_attended_in_common(models, monkeypatch, made, name, batch):
    """40 rows over several attention blocks, in float64: the log-probs of a plain forward; the shared tokens are no
    slot's columns.
    """
    model = doubled(models(name))
    rng = random.Random(2)
    start = [rng.randrange(96) for _ in range(66)]
    prompts = [start + [rng.randrange(96) for _ in range(1 + i % 9)] for i in range(20)]
    params = SamplingParams(max_new_tokens=20, stop_ids=set(range(9)), temperature=0.7)
    seeds = [[i, 50 + i] for i in range(20)]
    out = Sampler(model, None, max_batch=batch).generate(prompts, params, seeds)
    assert [t.length.tolist() for t in made[Trunks]] == [[66]] and made[SlotKV][-1].columns <= 9 + 20
    assert len({len(c.ids) for group in out for c in group}) > 5
    for prompt, group in zip(prompts, out):
        for c in group:  # the logits are float32
            torch.testing.assert_close(
                torch.tensor(c.logps), trainer_logps(model, prompt, c.ids, params).float(), atol=3e-6, rtol=0
            )
    monkeypatch.setattr(prefixes, "MIN_SAVED", 10**9)
    monkeypatch.setattr(sampler_module, "MIN_TRUNK", 10**9)
    assert ids_of(Sampler(model, None, max_batch=batch).generate(prompts, params, seeds)) == ids_of(out)
    assert len(made[Trunks]) == 1 and made[SlotKV][-1].columns > 66


@pytest.mark.parametrize("batch", [36, 5, 1])
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama3-rope"])
def test_a_prompt_of_several_completions_is_attended_once(models, monkeypatch, made, name, batch):
    """Groups that are split over admissions, prompts of different lengths, of one completion and of none, two that
    share a beginning; in float64.
    """
    model = doubled(models(name))
    rng = random.Random(6)
    draw = lambda n: [rng.randrange(96) for _ in range(n)]
    start = draw(65)
    prompts = [draw(n) for n in (75, 71, 66, 3)] + [start + draw(3) for _ in range(6)] + [draw(50)]
    seeds = [[100 * i + g for g in range(n)] for i, n in enumerate((7, 8, 5, 4, 4, 4, 4, 4, 4, 1, 0))]
    params = SamplingParams(max_new_tokens=20, stop_ids=set(range(9)), temperature=0.7, repetition_penalty=1.1)
    out = Sampler(model, None, max_batch=batch).generate(prompts, params, seeds)
    (trunks,), (kv,) = made[Trunks], made[SlotKV]
    assert kv.columns <= 20 and trunks.keys[0].shape[2] == 75 and len(trunks.length) == min(batch, 10)
    monkeypatch.setattr(sampler_module, "MIN_TRUNK", 10**9)
    plain = Sampler(model, None, max_batch=batch).generate(prompts, params, seeds)
    assert (
        len(made[Trunks]) == 1
        and ids_of(plain) == ids_of(out)
        and len({len(c.ids) for group in out for c in group}) > 5
    )
    for group, other in zip(out, plain):
        for c, d in zip(group, other):
            torch.testing.assert_close(torch.tensor(c.logps), torch.tensor(d.logps), atol=3e-6, rtol=0)


def test_short_prompts_keep_columns_of_their_own(models, made):
    """Below the threshold nothing changes: numbers of runs with short prompts stay what they were."""
    Sampler(models("llama"), None).generate(
        [[5] * 40, [6] * 50], SamplingParams(max_new_tokens=3), [[1, 2, 3, 4], [5, 6, 7, 8]]
    )
    assert made[Trunks] == []


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral-window"])
def test_letters_behind_shared_examples_have_the_same_log_probs(models, monkeypatch, name):
    """multiple_choice=letter with few_shot: one pass over the examples, and over each question without them."""
    from stages.batching import make_item
    from stages.decoding import likelihood

    model, rng = models(name), random.Random(4)
    draw = lambda n: [rng.randrange(96) for _ in range(n)]
    examples = [draw(70), draw(65)]
    prompts = [examples[i % 2] + draw(1 + i) for i in range(12)] + [draw(7), draw(80)]
    letters = [[[5], [6], [7]]] * 14
    letters[3] = [[5], [6, 7]]  # a letter of two tokens
    items = [
        make_item(str(i), prompt, said, [[1] * len(one) for one in said])
        for i, (prompt, said) in enumerate(zip(prompts, letters))
    ]
    want = likelihood.response_logps(model, items, 300, "cpu")
    plain, asked = likelihood.response_logps, []
    monkeypatch.setattr(
        likelihood,
        "response_logps",
        lambda model, items, *more: asked.extend(item.row_id for item in items) or plain(model, items, *more),
    )
    got = likelihood.prompted_logps(model, items, 300, "cpu")
    assert asked == ["3", "12", "13"]
    for one, other in zip(got, want):
        assert [len(each) for each in one] == [len(each) for each in other]
        for each, wanted in zip(one, other):
            assert each == pytest.approx(wanted, abs=2e-5)
    assert likelihood.prompted_logps(model, items[12:], 300, "cpu") == plain(model, items[12:], 300, "cpu")


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [(1, 0), (0, 0), (1, 1), (0, 1)],  # every lane, in another order: rows have moved
        [(0, 0), (1, 0), (0, 1), (1, 1)],
        [(1, 1), (0, 0), (1, 0)],
        [(1, 1)],
        [(0, 1), (0, 0)],
    ],
)
def test_rows_attend_to_their_own_trunks_in_any_order(rows):
    """(seat, lane) of each row, against each by itself; storage behind the end of a trunk may hold anything."""
    heads, group, d, lengths = 2, 3, 4, (5, 3)
    drawn = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(*shape, generator=drawn, dtype=torch.float64)
    kept = Prefilled([made(2, heads, 5, d)], [made(2, heads, 5, d)], made(2, 7))
    trunks = Trunks(kept, 2, 5)
    trunks.keys[0].fill_(7.0), trunks.values[0].fill_(7.0)
    for seat, length in enumerate(lengths):
        trunks.load(seat, kept, 1 - seat, length)
    trunks.arrange(*(torch.tensor(column) for column in zip(*rows)))
    q, weights = made(len(rows), heads, group, d), made(len(rows), heads, group, trunks.columns)
    scores = trunks.scores(0, q)
    for row, (seat, _) in enumerate(rows):
        n, keys = lengths[seat], kept.keys[0][1 - seat]
        torch.testing.assert_close(scores[row, :, :, :n], q[row] @ keys[:, :n].mT)
        assert (scores[row, :, :, n:] < -1e300).all()
        weights[row, :, :, n:] = 0.0
    found = trunks.mix(0, weights)
    for row, (seat, _) in enumerate(rows):
        n = lengths[seat]
        torch.testing.assert_close(found[row], weights[row, :, :, :n] @ kept.values[0][1 - seat][:, :n])


@pytest.mark.parametrize("kind", [SlotKV, WholeKV])
def test_what_is_kept_of_rows(kind):
    """Keys and values of every row are its own, its mask is open over them and closed behind, whatever was there before
    and however much the storage has grown; a row may begin with what is kept once, and without its first tokens.
    """
    drawn = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(*shape, generator=drawn)
    layers = lambda *shape: [made(*shape) for _ in range(2)]
    own = Prefilled(layers(3, 2, 4, 3), layers(3, 2, 4, 3), made(3, 7))
    of_each = Past.of([([x[j] for x in layers(3, 2, 6, 3)], [x[j] for x in layers(3, 2, 6, 3)], n) for j, n in TWO])
    behind_each = Prefilled(layers(2, 2, 4, 3), layers(2, 2, 4, 3), made(2, 7), of_each)
    of_all = Past.of([([made(2, 5, 3) for _ in range(2)], [made(2, 5, 3) for _ in range(2)], 3)])
    behind_all = Prefilled(layers(2, 2, 4, 3), layers(2, 2, 4, 3), made(2, 7), of_all)
    assert of_each.lengths == [5, 2] and of_each.keys[0].shape == (2, 2, 5, 3)

    def whole(which, prefilled, row, past, at, skip, length):
        found = [] if past is None else [getattr(past, which)[1][at, :, : past.lengths[at]]]
        return torch.cat([*found, getattr(prefilled, which)[1][row]], 1)[:, skip : skip + length]

    kv, slots = kind(own, 5, 4), {}

    def check():
        for slot, wanted in slots.items():
            length = wanted[0].shape[1]
            for found, one in zip((kv.keys[1], kv.values[1]), wanted):
                assert torch.equal(found[slot, :, :length], one)
            assert not kv.mask[slot, :length].any() and (kv.mask[slot, length:] < -1e38).all()
            assert [torch.equal(part[1], one) for part, one in zip(kv.copy(slot, length), wanted)] == [True, True]

    def load(slot, prefilled, row, length, past=None, at=0, skip=0):
        slots[slot] = [whole(which, prefilled, row, past, at, skip, length) for which in ("keys", "values")]
        kv.load(slot, prefilled, row, length, skip)
        check()

    load(0, own, 2, 4)
    load(1, own, 1, 3)
    kv.grow(9)
    assert kv.columns == 9 and kv.mask.shape == (5, 9) and kv.keys[0].shape == (5, 2, 9, 3)
    check()
    load(2, behind_each, 0, 8, of_each, 0)
    load(3, behind_each, 1, 3, of_each, 1)
    load(4, behind_all, 1, 7, of_all, 0)
    load(2, behind_all, 0, 4, of_all, 0, skip=2)  # a part of what it begins with is elsewhere
    load(0, behind_all, 1, 2, of_all, 0, skip=3)
    load(1, behind_all, 0, 2, of_all, 0, skip=5)
    kv.move(4, 0, 7)
    slots[0] = slots[4]
    kept = kv.copy(2, 4)
    load(2, own, 0, 2)
    assert not any(torch.equal(one[1][:, :2], x[1][2, :, :2]) for one, x in zip(kept, (kv.keys, kv.values))), "copies"
    assert len(kv.keys) == len(kv.values) == 2


TWO = [(0, 5), (2, 2)]


def test_whether_storage_that_was_kept_serves_another_call():
    like = Prefilled([torch.zeros(1, 2, 1, 3)] * 2, [torch.zeros(1, 2, 1, 3)] * 2, torch.zeros(1, 5))
    kv = WholeKV(like, 4, 6)
    assert kv.fits(like, 4, 6) and kv.fits(like, 1, 1) and not kv.fits(like, 5, 6) and not kv.fits(like, 4, 7)
    for shape, layers, kind in (
        ((1, 1, 1, 3), 2, torch.float32),
        ((1, 2, 1, 4), 2, torch.float32),
        ((1, 2, 1, 3), 3, torch.float32),
        ((1, 2, 1, 3), 2, torch.bfloat16),
    ):
        other = Prefilled([torch.zeros(shape, dtype=kind)] * layers, [torch.zeros(shape, dtype=kind)] * layers, None)
        assert not kv.fits(other, 4, 6)
    assert not kv.fits(Prefilled([x.to("meta") for x in like.keys], like.values, None), 4, 6)
