"""Rules of rubrics, step scores and replayed episodes where a number would be wrong without a word: scores given twice
or squashed twice, answers alone, other vocabularies, other worlds.
"""

import pytest

from stages.harness import execute
from stages.reward import grape
from stages.reward.verdicts import ALONE
from stages.reward_models.reward_heads import RewardCard, load_reward_model, save_reward_model
from tests.training.test_agents import SMALL
from tests.training.test_comparisons import Cycle, pairwise  # noqa: F401
from tests.training.test_grape import asked, judge, scorer_of  # noqa: F401
from tests.training.test_rl_parts import rl  # noqa: F401


def test_a_second_score_contradicts_the_first_in_an_object_too():
    """GRAPE-SCORE, strict parser: a JSON object that names a key twice would count its last value."""
    once = '{"reasoning": "r", "score": 0.2, "confidence": 0.9}'
    assert grape.parse_item(once)[0]["score"] == 0.2
    for text in (
        '{"reasoning": "r", "score": 0.2, "confidence": 0.9, "score": 1.0}',
        '{"reasoning": "r", "score": 0.2, "score": 1.0, "confidence": 0.9}',
    ):
        found, why = grape.parse_item(text)
        assert found is None and "each once" in why
    # an inner object's keys are its own
    assert (
        grape.parse_item('{"notes": {"score": 1}, "reasoning": "r", "score": 0.2, "confidence": 0.9}')[0]["score"]
        == 0.2
    )


def test_scores_of_a_reward_model_are_squashed_once(tiny, tmp_path):
    liked = {
        "id": "liked",
        "kind": "rm",
        "criterion": "Liked.",
        "weight": 0.5,
        "scorer": {"kind": "model", "squash": "sigmoid"},
    }
    other = {
        "id": "short",
        "kind": "verifiable",
        "criterion": "Short.",
        "weight": 0.5,
        "scorer": {"kind": "regex", "pattern": "."},
    }
    with pytest.raises(
        grape.RubricError, match="squash its scores twice; leave squash out of the item, or write rm_squash: raw"
    ):
        scorer_of(tmp_path, [liked, other], inputs={"reward_model": tiny["reward"]})
    scorer_of(tmp_path, [liked, other], {"rm_squash": "raw"}, {"reward_model": tiny["reward"]})
    scorer_of(tmp_path, [{**liked, "weight": 1.0}], inputs={"reward_model": tiny["reward"]})


def test_an_item_that_compares_needs_two_answers(tmp_path, pairwise):  # noqa: F811
    rewards = scorer_of(
        tmp_path,
        [{"id": "liked", "kind": "rm", "criterion": "Liked.", "weight": 1.0}],
        inputs={"reward_model": pairwise},
    )
    rewards.scorers["rubric"].rules.scorers["c/liked"] = Cycle()
    rows = [{**asked(text), "group": group} for text, group in (("rock", 0), ("paper", 0), ("rock", 1))]
    found = rewards.scorers["rubric"].items(rows)
    assert [items[0]["score"] for items in found] == pytest.approx([0.1, 0.9, None]) and found[2][0]["error"] == ALONE


def test_step_scores_read_the_policys_ids_only_where_they_are_the_models(tiny, rl, tmp_path):  # noqa: F811
    """GRPO-PROCESS with a scalar reward model: token ids under another template or vocabulary would be scored as other
    text.
    """
    from stages.chat import load_tokenizer

    tokenizer = load_tokenizer(tiny["policy"])
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{- m['role'] + '> ' + m['content'] + eos_token -}}{%- endfor -%}{%- if"
        " add_generation_prompt -%}{{- 'assistant> ' -}}{%- endif -%}"
    )
    save_reward_model(load_reward_model(tiny["reward"]), tokenizer, str(tmp_path / "other"), RewardCard())
    with pytest.raises(ValueError, match="another tokenizer or chat template"):
        rl(
            "process",
            {"preset": "grpo_process", "reward_override": "none", "max_steps": 1},
            reward_model=str(tmp_path / "other"),
        )


def test_an_episode_that_cannot_be_played_again_is_told(tiny, data, spec):
    """VINEPPO continues from states by repeating actions: an environment that answers otherwise gave values of other
    states.
    """
    config = {
        **SMALL,
        "preset": "vineppo",
        "vine_samples": 2,
        "max_steps": 1,
        "environment": "tests.training.environments:Forgetful",
        "environment_options": {},
    }
    with pytest.raises(
        ValueError, match=r"does not repeat what it did: turn 1 .* make it a function of \(task, seed, actions\)"
    ):
        execute(spec("rl", config, {"model": tiny["policy"], "data": data["prompts"]}, "forgetful"), lambda event: None)


def refilled(rl, judge, tmp_path, name, **settings):  # noqa: F811
    """A source of rollouts that refills batches and is paid by the rubric that :func:`scorer_of` wrote."""
    path = next(str(p) for p in tmp_path.iterdir() if p.is_dir() and p.name.startswith("own-"))
    return rl.source(
        name,
        {
            "dynamic_sampling": True,
            "filter_groups_metric": "reward_std",
            "gen_batch_size": 1,
            "prompts_per_step": 2,
            "reward_override": "none",
            "rewards": [{"kind": "rubric", "endpoint": judge.url, "endpoint_model": "m", "category": "c"}],
            **settings,
        },
        rubric=path,
    )


def test_a_greedy_answer_is_regraded_with_its_group(rl, judge, tmp_path):  # noqa: F811
    """Refill rounds of dynamic sampling: the baseline is a reward by the same mean confidences as the rewards that it
    is taken off (GRAPE-REWARD, REMAX).
    """
    items = [
        {"id": k, "kind": "verifiable", "criterion": f"Is {k}.", "weight": w, "scorer": "judge"}
        for k, w in (("one", 0.7), ("two", 0.3))
    ]
    scorer_of(tmp_path, items, {"endpoint": judge.url, "endpoint_model": "m"})

    def reply(text):  # scores by the answer, and another confidence for every question
        body, one = text.split("[Response]\n")[1].split("\n\n[Reference")[0], "Is one." in text
        number = text.split("what is ")[1].split(" ")[0]
        return (
            f"Reasoning: r\nScore: {(len(body) * (3 if one else 7)) % 10 / 10}\nConfidence:"
            f" {0.9 if (int(number) % 2 == 0) == one else 0.2}"
        )

    judge.reply = reply
    source = refilled(rl, judge, tmp_path, "regrade", preset="remax", num_generations=3)
    kept, dropped, metrics = source.groups.fill(lambda n: source.order.take(n, 0), 2, 0, 0)
    groups = [*kept, *(g for g, _ in dropped)]
    assert metrics["groups/generation_batches"] > 1
    everyone = [s for g in groups for s in (*g.samples, g.greedy_sample)]
    expected = source.rewards.scorers["rubric"].aggregate([s.items for s in everyone])
    assert [s.total for s in everyone] == pytest.approx(expected)


def test_a_group_is_dropped_by_the_rewards_that_it_would_be_trained_on(rl, judge, tmp_path):  # noqa: F811
    """Refill rounds of dynamic sampling: with the confidences of its own round a group earned the same throughout, and
    was dropped although by those of all rounds it does not (GRAPE-REWARD, DYN-SAMPLING).
    """
    items = [
        {"id": k, "kind": "verifiable", "criterion": f"Is {k}.", "weight": 0.5, "scorer": "judge"}
        for k in ("one", "two")
    ]
    scorer_of(tmp_path, items, {"endpoint": judge.url, "endpoint_model": "m"})

    def reply(text):  # an answer meets one of the two items; of odd questions the judge is surer of the first item
        body, one = text.split("[Response]\n")[1].split("\n\n[Reference")[0], "Is one." in text
        odd = int(text.split("what is ")[1].split(" ")[0]) % 2
        return f"Reasoning: r\nScore: {float((len(body) % 2 == 0) == one)}\nConfidence: {(0.9 if one else 0.2) if odd else 0.5}"

    judge.reply = reply
    source = refilled(rl, judge, tmp_path, "dropped", preset="grape", num_generations=8)
    asked = {int(row["answer"]) // 2 % 2: (row, ids) for row, ids in source.order.prompts}
    turn = iter((asked[0], asked[1]))
    kept, dropped, metrics = source.groups.fill(lambda n: [next(turn)], 2, 0, 0)
    assert metrics["groups/generation_batches"] == 2 and not dropped and metrics["groups/filter_rate"] == 0.0
    assert [g.prompt["row_id"] for g in kept] == [asked[k][0]["row_id"] for k in (0, 1)]
    assert all(len({s.total for s in g.samples}) == 2 for g in kept)
