"""A policy that learns from itself having read more (SDPO), what rewards say of an answer, and the entropy that is held.

That a run's loss, gradients and rollouts follow from its settings, in other micro-batches, killed and from its record:
tests/training/test_rl_combinations.py. That TRL's trainer does the same: tests/peers.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from stages.batching import collate, make_item
from stages.chat import renderer_for
from stages.estimators import EntropyController
from stages.generation import Sample
from stages.harness import execute
from stages.models.modeling import load_policy
from stages.policy.policy_update import PolicyGradient
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.rl import Config, resolve_preset
from stages.rollouts.groups import Group
from stages.rollouts.reprompts import Reprompts
from storage.datasets import open_dataset
from tests.common import assistant, user, written

# --- the entropy that is held -----------------------------------------------------------------------------------------


def test_the_entropy_controller_by_hand():
    """Up by delta where the entropy is at most the target, down where it is above, within bounds; paid by the step
    behind one that was at most the target."""
    one = EntropyController(0.01, target=0.2, delta=0.005, low=0.0, high=0.02)
    assert one.paid() == 0.0  # nothing is known of the entropy yet
    seen = []
    for entropy in (0.3, 0.2, 0.1, 0.1, 0.1, 0.25):
        one.update(entropy)
        seen.append((round(one.coef, 6), round(one.paid(), 6)))
    assert seen == [(0.005, 0.0), (0.01, 0.01), (0.015, 0.015), (0.02, 0.02), (0.02, 0.02), (0.015, 0.0)]
    other = EntropyController(0.01, target=0.2)
    other.restore(json.loads(json.dumps(one.state())))
    assert (other.coef, other.paid(), other.entropy) == (one.coef, 0.0, 0.25)
    assert EntropyController(0.3).update(5.0) == 0.3 == EntropyController(0.3).paid()  # without a target


@pytest.mark.parametrize(
    "settings, says",
    (
        ({"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_max": 0.05}, "a number between them"),
        ({"entropy_target": 0.5}, "write use_adaptive_entropy=true"),
        ({"preset": "sdpo", "ref_mode": "previous"}, "write ref_mode=refresh"),
        (
            {"preset": "sdpo", "use_successful_as_teacher": False, "include_environment_feedback": False},
            "teaches nothing",
        ),
        ({"preset": "sdpo", "num_generations": 1, "include_environment_feedback": False}, "write num_generations=8"),
        ({"preset": "sdpo", "distillation_alpha": 0.5}, "write distillation_mode=full_logits"),
        ({"preset": "sdpo", "epsilon": 0.1}, "write distillation_weight=0.5"),
        ({"preset": "sdpo", "kl_coef": 0.1}, "write kl_coef=0"),
        ({"preset": "sdpo", "reprompt_template": "{prompt}{feedback}"}, "no place for {solution}; write it"),
        ({"preset": "sdpo", "environment": "tools"}, "write environment=''"),
        ({"preset": "topr", "distillation_weight": 0.5}, "write preset=sdpo"),
        ({"preset": "grpo", "distillation_weight": 0.5, "zero_advantage": "mask"}, "zero_advantage=keep"),
        ({"preset": "grpo", "max_reprompt_len": 9}, "write distillation_weight=0.5, or preset=sdpo"),
    ),
)
def test_what_does_not_go_together_says_what_to_write(settings, says):
    with pytest.raises(ValueError) as told:
        resolve_preset(Config(**settings))
    assert says in str(told.value)


def test_the_teacher_follows_the_policy_unless_told_otherwise():
    told = lambda **more: (c := Config(preset="sdpo", **more)) and (c.ref_mode, c.ref_decay)
    assert (told(), told(ref_mode="frozen"), told(ref_decay=0.9)) == (("ema", 0.95), ("frozen", 0.995), ("ema", 0.9))
    assert Config(preset="grpo").ref_mode == "frozen"
    plain = Config(preset="sdpo", ref_mode="frozen")
    assert Config(**plain.model_dump()) == plain


# --- what the teacher reads -------------------------------------------------------------------------------------------

NOBODY = SimpleNamespace(component=None)


def group(*answers, question="what is {x}?", extra=None):
    """A group of (text, reward, verdict, feedback)."""
    row = {"prompt": user("before") + assistant("yes") + user(question), "extra_json": json.dumps(extra or {})}
    samples = [
        Sample(row, [1, 2], k, [5, 6], [0.0, 0.0], "eos", text, total=total, correct=right, feedback=said, items=[])
        for k, (text, total, right, said) in enumerate(answers)
    ]
    return Group(row, [1, 2], samples, 0)


@pytest.fixture(scope="module")
def reads(tiny):
    renderer = renderer_for(tiny["policy"])

    def read(of, positions=None, members=NOBODY, **settings):
        made = Reprompts(Config(preset="sdpo", **settings), renderer, positions, members)
        found, metrics = made([of])
        ids = lambda content: renderer.prompt_ids(user("before") + assistant("yes") + user(content))
        return found, metrics, ids

    return read


def test_the_teacher_reads_the_first_other_success_and_what_was_said(reads):
    of = group(
        ("<think>no</think>one {prompt}", 0.0, False, "not one"), ("two", 0.0, True, None), ("three", 2.0, None, None)
    )
    found, metrics, ids = reads(of)
    tail = "\n\nCorrectly solve the original question.\n"
    said = "\nThe following is feedback from your unsuccessful earlier attempt:\n\nnot one\n\n"
    shown = lambda text: f"what is {{x}}?\nCorrect solution:\n\n{text}\n\n"
    assert [(one.solution, one.feedback) for one in found] == [(1, "not one"), (2, None), (1, None)]
    assert [one.ids for one in found] == [
        ids(shown("two") + said + tail),
        ids(shown("three") + tail),
        ids(shown("two") + tail),
    ]
    name = lambda end: metrics[f"self_distillation/{end}"]
    assert (name("success_group_fraction"), name("success_sample_fraction")) == (1.0, 1.0)
    assert (name("feedback_used_fraction"), name("reprompt_sample_fraction")) == (pytest.approx(1 / 3), 1.0)
    of.samples[1].index = 4  # requests before it have failed
    assert [one.solution for one in reads(of)[0]] == [1, 2, 1], "its place, by which it is found among what is stored"
    # itself too, where that is allowed; by a threshold whatever the verdict; of a text with braces nothing is filled in
    assert [one.solution for one in reads(of, dont_reprompt_on_self_success=False)[0]] == [1, 1, 1]
    assert [one.solution for one in reads(of, success_reward_threshold=1.5)[0]] == [2, 2, None]
    low = reads(of, success_reward_threshold=-1.0)[0]
    assert low[1].ids == ids(shown("<think>no</think>one {prompt}") + tail)
    plain = reads(of, success_reward_threshold=-1.0, remove_thinking_from_demonstration=True)[0]
    assert plain[1].ids == ids(shown("one {prompt}") + tail)


def test_feedback_beside_or_instead_of_an_answer(reads):
    of = group(("one", 0.0, False, "not one"), ("two", 1.0, True, None))
    tail = "\n\nCorrectly solve the original question.\n"
    assert [one.feedback for one in reads(of, environment_feedback_only_without_solution=True)[0]] == [None, None]
    alone, _, ids = reads(of, use_successful_as_teacher=False)
    assert alone[1].ids is None and alone[0].ids == ids(
        "what is {x}?\nThe following is feedback from your unsuccessful earlier attempt:\n\nnot one\n\n" + tail
    )
    assert [one.ids is None for one in reads(of, include_environment_feedback=False)[0]] == [False, True]
    wrong = group(("one", 0.0, False, None), ("two", 0.0, False, None))
    assert [one.ids for one in reads(wrong)[0]] == [None, None]
    told = group(("one", 0.0, False, None), ("two", 0.0, False, "two is odd"), extra={"privileged_context": "odd"})
    assert [one.feedback for one in reads(told)[0]] == ["odd", "two is odd"]
    rubric = SimpleNamespace(component=object(), feedback=lambda items: "- be brief")
    assert [one.feedback for one in reads(wrong, members=rubric)[0]] == ["- be brief"] * 2
    lost = group(("one", float("nan"), None, None), ("two", float("nan"), None, None))
    assert [one.ids for one in reads(lost)[0]] == [None, None]


def test_a_prompt_without_room_is_not_distilled_and_counted(reads):
    of = group(("one", 0.0, False, None), ("two", 1.0, True, None))
    n = len(reads(of)[0][0].ids)
    for settings, fits in (
        ({"positions": n + 2}, True),
        ({"positions": n + 1}, False),
        ({"max_reprompt_len": n}, True),
        ({"max_reprompt_len": n - 1}, False),
    ):
        found, metrics, _ = reads(of, **settings)
        assert (found[0].ids is not None) == fits and found[0].solution == 1
        assert metrics["self_distillation/too_long_fraction"] == (0.0 if fits else 0.5)


def test_rewards_say_what_is_wrong():
    """A program's first failed test, without the places of objects in memory; the text that a function returns."""
    tests = [{"code": "assert f(1) == 2"}, {"code": "assert f(2) == 4, f(2)"}, {"code": "assert f(3) == 6"}]
    row = {"prompt": user("write f"), "tests": tests}
    said = lambda program: f"```python\n{program}\n```"
    component = RewardComponent(name="tests", kind="code")
    rewards = build_rewards([component], {})
    texts = (said("def f(x): return x + 1"), said("def f(x): return 2 * x"), "f", said("def f(x): return object"))
    scored = rewards.score(
        [{"prompt_row": row, "completion_text": text, "completion_ids": [1], "finish_reason": "eos"} for text in texts]
    )
    assert scored[0].feedback.splitlines()[:3] == ["A test failed.", "Test:", "assert f(2) == 4, f(2)"]
    assert "AssertionError: 3" in scored[0].feedback and scored[0].correct is False
    assert scored[1].feedback is None and scored[1].correct is True
    assert scored[2].feedback == "The answer has no program in a fenced block."
    assert "assert f(1) == 2" in scored[3].feedback
    source = (
        "def score(completion):\n"
        "    return {'reward': 0.0, 'feedback': ' ' if completion == 'b' else f'not {completion} <at 0x7f00aa11bb22>'}"
    )
    mine = build_rewards([component.model_validate({"name": "mine", "kind": "python", "source": source})], {})
    found = mine.score(
        [
            {
                "prompt_row": {"prompt": user("x")},
                "completion_text": text,
                "completion_ids": [1],
                "finish_reason": "eos",
            }
            for text in "ab"
        ]
    )
    assert [one.feedback for one in found] == ["not a <at 0x...>", None]


def test_output_of_a_program_is_shown_beside_what_was_expected():
    row = {"prompt": user("double"), "tests": [{"input": "3\n", "expected": "6\n"}]}
    rewards = build_rewards([RewardComponent(name="tests", kind="code")], {})
    (scored,) = rewards.score(
        [
            {
                "prompt_row": row,
                "completion_text": "```python\nprint(int(input()) + 1)\n```",
                "completion_ids": [1],
                "finish_reason": "eos",
            }
        ]
    )
    assert scored.feedback == "A test failed.\nInput:\n3\nExpected output:\n6\nOutput:\n4"


# --- the loss ---------------------------------------------------------------------------------------------------------


def gradient(model, objective, item):
    model.zero_grad(set_to_none=True)
    sums = objective(model, collate([item]))
    sum(total for total, _ in sums.loss.values()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_sampled_tokens_have_the_reverse_kls_gradient_in_expectation(tiny):
    """Over every token that the policy could say, weighted by how likely it is: float64, by enumeration."""
    model, teacher = load_policy(tiny["policy"]).double(), load_policy(tiny["other"]).double()
    size, prompt, read = model.config.vocab_size, [20, 30, 40], [20, 30, 50, 60]
    with torch.no_grad():
        q = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1] / 1.3, -1)

    def of(mode, tokens, weights):
        config = Config(preset="sdpo", distillation_mode=mode, temperature=1.3, loss_agg_mode="seq-mean-token-sum")
        objective = PolicyGradient(resolve_preset(config)[0], config, teacher=teacher)
        objective.aggregate = lambda values, mask, items: (values * mask * weights[:, None]).sum()
        n = len(tokens)
        item = make_item(
            "row",
            prompt,
            [[t] for t in tokens],
            [[1]] * n,
            by_response=("advantages", "old_logps", "teacher_prompts"),
            advantages=[0.0] * n,
            old_logps=[[float(q[t])] for t in tokens],
            teacher_prompts=[read] * n,
        )
        return gradient(model, objective, item)

    exact = of("full_logits", [0], torch.ones(1, dtype=torch.float64))
    expected = of("sampled_token", range(size), q.exp())
    # the library's forward, which gives the weights, rounds norms to float32
    assert exact.abs().max() > 1e-3 and torch.allclose(expected, exact, rtol=0, atol=2e-6 * float(exact.abs().max()))


def test_what_nobody_reads_behind_another_prompt_is_not_forwarded_and_moves_nothing(tiny, data, spec):
    """All answers wrong and nothing said: the steps are empty, and the alarm says why."""
    config = {
        "preset": "sdpo",
        "max_steps": 4,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "rewards": [{"name": "never", "kind": "python", "source": "def score(completion):\n    return 0.0"}],
    }
    made = spec("rl", config, {"model": tiny["policy"], "data": data["prompts"]}, "nothing")
    result = execute(made, lambda event: None)
    before, after = (load_policy(p) for p in (tiny["policy"], result["outputs"]["model"]["path"]))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters()))
    assert result["summary"]["last/self_distillation/reprompt_sample_fraction"] == 0.0
    assert "nothing_distilled" in [one["code"] for one in result["warnings"]]


# --- learning ---------------------------------------------------------------------------------------------------------

LETTERS = "abcd"


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """A model that answers ``pick N`` with any of four letters, and copies a letter that it is shown."""
    root = tmp_path_factory.mktemp("letters")
    rows = [
        {"messages": user(f"pick {i}{shown}") + assistant(answer), "train_turns": [1], "kept": True}
        for i in range(8)
        for letter in LETTERS
        for shown, answer in (("", letter), (f" ={letter}", letter), (f" ={letter}", letter))
    ]
    written(str(root / "rows"), "rows", "demonstrations/1", rows)
    asked = [
        {"prompt": user(f"pick {i}"), "answer": LETTERS[(3 * i + i // 4) % 4], "answer_type": "string"}
        for i in range(8)
    ]
    written(str(root / "asked"), "asked", "prompts/1", asked)
    config = {"max_steps": 250, "num_train_epochs": 1000, "batch_size": 48, "learning_rate": 5e-3, "eval_rows": 0}
    given = {
        "model": {"kind": "model", "path": tiny["policy"]},
        "data": {"kind": "dataset", "path": str(root / "rows")},
    }
    made = {
        "stage": "sft",
        "key": "letters",
        "config": config,
        "seed": 5,
        "device": "cpu",
        "workdir": str(root / "sft"),
        "inputs": {name: {**one, "ref": name, "digest": name} for name, one in given.items()},
    }
    return execute(made, lambda event: None)["outputs"]["model"]["path"], str(root / "asked")


def test_a_policy_learns_what_one_of_its_own_answers_got_right(world, spec):
    """From a quarter of right answers, by distillation alone: advantages are in no loss."""
    model, asked = world
    config = {
        "preset": "sdpo",
        "max_steps": 40,
        "prompts_per_step": 8,
        "num_generations": 8,
        "max_completion_length": 3,
        "learning_rate": 3e-3,
        "reprompt_template": "{prompt}{solution}",
        "solution_template": " ={successful_previous_attempt}",
        "include_environment_feedback": False,
        "rewards": [
            {
                "name": "same",
                "kind": "python",
                "source": "def score(completion, answer):\n    return completion == answer",
            }
        ],
    }
    made = spec("rl", config, {"model": model, "data": asked}, "letters")
    result = execute(made, lambda event: None)
    by_step: dict[int, list] = {}
    for row in open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows():
        by_step.setdefault(row["iteration"], []).append(row["reward"])
    means = [sum(v) / len(v) for v in by_step.values()]
    first, last = sum(means[:3]) / 3, sum(means[-3:]) / 3
    assert first < 0.45 and last > first + 0.35, (first, last)
