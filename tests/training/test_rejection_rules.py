"""Rules of rejection sampling on hand-made answers: what is kept and why not, who is asked again with a hint, what
selectors take.
"""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from stages import rejection
from stages.candidates import rows as candidate_rows, sampling, selecting
from stages.decoding.sampler import Completion
from stages.generation import Sample
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.running.randomness import rng, seed_for
from stages.spec import ConfigError
from tests.common import user

NAN = math.nan
PROMPT = {
    "row_id": "r",
    "prompt_id": "p",
    "group_id": "g",
    "prompt": user("q"),
    "answer": "7",
    "split": "train",
    "weight": 0.5,
}


def stage(**config):
    warned = []
    return SimpleNamespace(
        config=rejection.Config(**config),
        seed_for=lambda *a: seed_for(1, *a),
        rng=lambda *a: rng(1, "rejection", *a),
        warn=lambda *told: warned.append(told),
        warned=warned,
    )


def answer(text="\\boxed{7}", finish="eos", total=1.0, correct=True, **more):
    return Sample(PROMPT, [1], 0, [5, 6], [-1.0, -2.0], finish, text, total, {}, {}, correct, **more)


@pytest.mark.parametrize(
    "sample, note, reason",
    [
        (answer(), {}, None),
        (answer(correct=False, total=0.0), {}, None),
        (answer(finish="stop"), {}, None),
        (answer(finish="length"), {}, "truncated"),
        (answer(finish="error", error="timeout"), {}, "engine_error"),
        (answer("  \n"), {}, "empty"),
        (answer("", finish="length"), {}, "truncated"),
        (answer(total=NAN), {}, "unscorable"),
        (answer(), {"mode": "rationalised"}, None),
        (answer(correct=False), {"mode": "rationalised"}, "hint_did_not_help"),
        (answer(correct=None), {"mode": "rationalised"}, "hint_did_not_help"),
    ],
)
def test_what_is_kept_and_why_not(sample, note, reason):
    found = candidate_rows.candidate(sample, 3, {}, note)
    assert (found["kept"], found["drop_reason"]) == (reason is None, reason)
    assert found["reward"] == (None if math.isnan(sample.total) else sample.total) and found["prompt_idx"] == 3
    assert found["weight"] == PROMPT["weight"]


class Engine:
    """Says the same to every prompt, and notes what it was asked."""

    tokenizer = None

    def __init__(self, text):
        self.text, self.asked = text, []

    def generate(self, prompts, params, seeds, progress=None):
        self.asked += list(zip(prompts, seeds))
        return [[Completion([9], [-0.5], "eos", self.text) for _ in own] for own in seeds]


class Renderer:
    def prompt_ids(self, messages):
        return [ord(c) for m in messages for c in m["content"]]


def test_prompts_without_a_right_and_whole_answer_are_asked_again_with_the_hint():
    """rs.star: not those without an answer, nor where the hint makes the prompt too long; what is sampled belongs to the
    prompt as it was, counted behind the direct ones.
    """
    rows = [
        ({**PROMPT, "row_id": name, "prompt_id": name, "prompt": user("q" * n), "answer": known}, [100 + i])
        for i, (name, n, known) in enumerate(
            (("solved", 1, "7"), ("wrong", 2, "7"), ("cut", 3, "7"), ("nobody knows", 4, None), ("unread", 5, "7"))
        )
    ]
    groups = [
        [answer(correct=False), answer()],
        [answer(correct=False), answer(correct=False)],
        [answer(finish="length"), answer(correct=False)],
        [answer(correct=None), answer(correct=None)],
        [answer(correct=None), answer(correct=None)],
    ]
    rewards = build_rewards([RewardComponent(kind="verifier")], {})
    for longest, again in (
        (5, [("wrong", "qq"), ("cut", "qqq")]),
        (7, [("wrong", "qq"), ("cut", "qqq"), ("unread", "qqqqq")]),
    ):
        asked = stage(rationalise=3, num_generations=2, hint="{question}|{answer}", max_prompt_length=longest)
        sampling.warn_of_long_hints(asked, Renderer(), rows)
        told = "1 of 4 prompts with an answer are longer than max_prompt_length=5 .*first is unread.*raise max_prompt"
        assert [bool(re.match(told, text)) for _, text in asked.warned] == [True] * (longest == 5)
        engine = Engine("\\boxed{7}")
        found = sampling.rationalised(asked, Renderer(), rewards, engine, rows, None, groups)
        assert engine.asked == [
            ([*map(ord, f"{question}|7")], [asked.seed_for("rationalise", name, k) for k in range(3)])
            for name, question in again
        ]
        assert [rows[i][0]["row_id"] for i in found] == [name for name, _ in again]
        for i, group in found.items():
            assert [s.index for s in group] == [2, 3, 4] and {tuple(s.prompt_ids) for s in group} == {(100 + i,)}
            assert all(s.correct and s.prompt["row_id"] == rows[i][0]["row_id"] for s in group)


@pytest.mark.parametrize("in_context", [True, False])
def test_answers_sampled_behind_demonstrations_belong_to_the_plain_prompt(in_context):
    """rs.icdpo: where nothing could be retrieved the prompt is shown as it is, and says so."""
    asked = SimpleNamespace(config=SimpleNamespace(in_context=in_context))
    behind = {"a": (["d1", "d2"], [7, 7, 1]), "b": ([], None)}
    rewards = SimpleNamespace(
        components=[SimpleNamespace(kind="icdpo", name="near")],
        scorers={"near": SimpleNamespace(retrieve=lambda row: behind[row["row_id"]])},
    )
    block, engine = [({**PROMPT, "row_id": name}, [n]) for n, name in enumerate("ab", 1)], Engine("x")
    groups, notes = sampling.sample_block(
        asked, rewards, engine, block, None, [[11], [12, 13]], SimpleNamespace(system="")
    )
    assert engine.asked == [([7, 7, 1] if in_context else [1], [11]), ([2], [12, 13])]
    assert [[s.prompt_ids for s in group] for group in groups] == [[[1]], [[2], [2]]]
    told = [{"in_context": True}, {"in_context": False}] if in_context else [{}, {}]
    assert notes == [{"demonstrations": ["d1", "d2"], **told[0]}, {"demonstrations": [], **told[1]}]


def test_a_copy_of_a_text_that_cannot_be_selected_is_no_copy():
    """A cut answer, or one without a score, in front of one that ends with the same text."""
    matrix = np.array([[NAN, 1.0, 2.0], [3.0, 4.0, NAN]])
    texts = ["aaa", "aba"]
    where = {(i, j): {"completion": [{"content": texts[i][j]}]} for i in range(2) for j in range(3)}
    assert selecting.drop_duplicates(matrix, where) == 1
    np.testing.assert_array_equal(matrix, [[NAN, 1.0, NAN], [3.0, 4.0, NAN]])


def test_selectors_by_hand():
    """A floor is exceeded, caps are by prompt, and what has no score is taken by nobody, right or not."""
    matrix = np.array([[0.5, 0.9, 0.7, NAN], [0.6, 0.6, 0.8, 0.7], [0.1, 0.2, NAN, 0.5]])
    correct = np.array([[1, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0]], bool)

    def taken(**config):
        given = stage(**config)
        return [divmod(i, 4) for i in selecting.select(matrix.copy(), correct, given.config, given)]

    assert taken() == [(0, 1), (1, 2), (2, 3)]
    assert taken(threshold=0.5) == [(0, 1), (1, 2)]
    assert taken(select="top_k_per_prompt", k=2, threshold=0.2) == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    assert taken(select="top_k_overall", k=4, max_per_prompt=1) == [(0, 1), (1, 2), (2, 3)]
    assert taken(select="threshold", threshold=0.5) == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert taken(select="threshold", threshold=0.5, max_per_prompt=3) == [
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert taken(select="all_correct") == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2), (2, 1)]
    assert taken(select="all_correct", max_per_prompt=1) == [(0, 0), (1, 0), (2, 1)]
    # half of the ten scores are at or below the median
    assert taken(select="threshold", threshold=0.5, threshold_mode="quantile") == [(0, 1), (0, 2), (1, 2), (1, 3)]
    drawn = taken(select="random_per_prompt", threshold=0.65)
    assert [i for i, _ in drawn] == [0, 1] and all(matrix[cell] > 0.65 for cell in drawn)


JUDGED = [RewardComponent(kind="judge", endpoint="http://localhost:9/v1", endpoint_model="m")]


@pytest.mark.parametrize(
    "config, said",
    [
        ({"select": "threshold"}, "write for example threshold=0.5"),
        ({"select": "threshold", "threshold": 1.5, "threshold_mode": "quantile"}, "no share"),
        ({"select": "all_correct", "rewards": JUDGED}, "leave select=all_correct out"),
        ({"difficulty_band": [0.2, 0.8], "rewards": JUDGED}, "leave difficulty_band out"),
        ({"temperature": 0}, "write num_generations=1"),
        ({"temperature": 0, "num_generations": 1}, None),
        ({"mixture_coef": 0.25, "engine": "vllm"}, "write engine=builtin"),
        ({"mixture_coef": 0.25, "stop_strings": ["."]}, "leave stop_strings out"),
        ({"mixture_coef": 0.25, "repetition_penalty": 1.2}, "leave repetition_penalty out"),
        ({"select": "all_correct", "rewards": [*JUDGED, RewardComponent(kind="constraints")]}, None),
        ({"select": "all_correct"}, None),
    ],
)
def test_what_cannot_end_well_is_refused_before_anything_is_sampled(config, said):
    settings, given = rejection.Config(**config), ("model", "prompts", "reference")
    if said is None:
        return rejection.check(settings, given)
    with pytest.raises(ConfigError, match=said):
        rejection.check(settings, given)
    if "rewards" in config:  # stored candidates bring their verdicts
        rejection.check(rejection.Config(**{n: v for n, v in config.items() if n != "rewards"}), (*given, "candidates"))
