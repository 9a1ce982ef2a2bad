"""Alarms of the catalogue (F.2, section H) that stages give at their end: what sets each off, and what must not.

Those of RL runs are in test_rl_report.py, those of direct alignment in test_align_stage.py.
"""

import json
from types import SimpleNamespace

import pytest

from stages.evaluation import perturbed
from stages.evaluation.report import warnings as of_an_evaluation
from stages.evaluation.scores import Metric
from stages.reward.judging import warn_about_judge
from stages.reward.rubric_reward import write_review
from stages.reward_models.reward_eval import warn_about
from stages.win_rate import warn_about_length
from storage.schema import complete_row
from tests.data.driver import ingest


class Told:
    """Stands for a stage: keeps what it is told."""

    inputs: dict = {}

    def __init__(self, **config):
        self.config, self.said = SimpleNamespace(**config), {}

    def has(self, name):
        return False

    def warn(self, code, text):
        self.said[code] = text


def says_what_to_do(text: str) -> bool:
    words = (
        "look",
        "raise",
        "take",
        "train",
        "add",
        "check",
        "write",
        "balance",
        "read",
        "drop",
        "mix",
        "compare",
        "decide",
    )
    return any(word in text.lower() for word in words)


FINE = {
    "accuracy": 0.72,
    "pairs": 200.0,
    "accuracy_ci_low": 0.66,
    "accuracy_ci_high": 0.78,
    "chosen_longer_share": 0.5,
    "ece": 0.03,
}
OF_REWARD_MODELS = {  # held-out metrics that set a warning off, and such that must not
    "few_held_out_rows": ({"pairs": 19.0}, {"pairs": 20.0}),
    "reward_model_near_chance": ({"accuracy": 0.55}, {"accuracy": 0.56}),
    "reward_model_accuracy_low": (
        {"accuracy": 0.58, "accuracy_ci_low": 0.52, "accuracy_ci_high": 0.64},
        {"accuracy": 0.58, "accuracy_ci_low": 0.49, "accuracy_ci_high": 0.66},
    ),
    "reward_model_accuracy_high": (
        {"accuracy": 0.88, "accuracy_ci_low": 0.82, "accuracy_ci_high": 0.93},
        {"accuracy": 0.83, "accuracy_ci_low": 0.78, "accuracy_ci_high": 0.89},
    ),
    "reward_model_too_good": ({"accuracy": 0.99}, {"accuracy": 0.98}),
    "reward_follows_length": (
        {"score_length_correlation_within_prompt": -0.51},
        {"score_length_correlation_within_prompt": 0.5},
    ),
    "length_does_as_well": ({"chosen_longer_share": 0.28}, {"chosen_longer_share": 0.3}),
    "reward_model_miscalibrated": ({"ece": 0.16}, {"ece": 0.15}),
    "reward_model_fooled": ({"probe/padded": 0.11}, {"probe/padded": 0.1, "flips/typo": 0.4}),
    "labels_name_the_model": ({"chosen_from_stronger_model": 0.91}, {"chosen_from_stronger_model": 0.9}),
}


@pytest.mark.parametrize("code", OF_REWARD_MODELS)
def test_a_held_out_reward_model(code):
    loud, quiet = Told(), Told()
    for stage, found in zip((loud, quiet), OF_REWARD_MODELS[code]):
        warn_about(stage, FINE | found, train_accuracy=0.8)
    assert set(loud.said) == {code} and not quiet.said
    assert says_what_to_do(loud.said[code]) or "Hold out more" in loud.said[code]


def test_a_reward_model_that_knows_its_training_rows_by_heart():
    for train, held_out, codes in ((0.995, 0.75, {"reward_model_overfits"}), (0.99, 0.75, set()), (0.995, 0.9, set())):
        stage = Told()
        warn_about(stage, FINE | {"accuracy": held_out}, train_accuracy=train)
        assert set(stage.said) == codes


JUDGE = {
    "pairs": 100.0,
    "identical": 0.0,
    "judge/errors": 2.0,
    "judge/error_rate": 0.02,
    "judge/consistency": 0.7,
    "judge/first_position_rate": 0.6,
    "judge/longer_wins": 0.6,
    "judge/longer_wins_of": 40,
}


@pytest.mark.parametrize(
    "code, changed",
    (
        ("judge_errors", {"judge/errors": 3.0, "judge/error_rate": 0.03}),
        ("judge_inconsistent", {"judge/consistency": 0.69}),
        ("judge_position_bias", {"judge/first_position_rate": 0.39}),
        ("judge_length_bias", {"judge/longer_wins": 0.61}),
    ),
)
def test_a_judge(code, changed):
    fine, odd = (Told(endpoint=None, endpoint_model="") for _ in range(2))
    warn_about_judge(fine, JUDGE)
    warn_about_judge(odd, JUDGE | changed)
    assert not fine.said and set(odd.said) == {code}
    few = Told(endpoint=None, endpoint_model="")
    warn_about_judge(few, JUDGE | {"judge/longer_wins": 1.0, "judge/longer_wins_of": 19})
    assert not few.said


def test_a_judge_of_the_family_of_what_it_judges():
    for makers, codes in ((["openai/gpt-4.1"], {"judge_family"}), (["meta/Llama-3"], set()), (["0af3"], set())):
        stage = Told(endpoint="http://127.0.0.1:1/v1", endpoint_model="gpt-4o")
        warn_about_judge(stage, JUDGE, makers)
        assert set(stage.said) == codes, makers


def test_an_evaluation_of_a_reward_model():
    def said(**changed):
        values = {"accuracy": 0.7, "chosen_longer_share": 0.6, "fooled_rate/repeated": 0.1} | changed
        stage = Told(target="reward_model", rewards=[], max_completion_length=8)
        of_an_evaluation(stage, {name: Metric(value, 100) for name, value in values.items()}, [])
        return set(stage.said)

    assert not said()
    assert said(accuracy=0.99) == {"reward_model_too_good"}
    assert said(chosen_longer_share=0.61) == said(chosen_longer_share=0.39) == {"pairs_length_bias"}
    assert said(**{"fooled_rate/repeated": 0.11}) == {"reward_model_fooled"}


def test_what_was_learned_by_heart():
    for low, codes in ((0.01, {"memorised"}), (-0.01, set())):
        stage = Told()
        perturbed.warn(stage, [], {"perturbed/accuracy/gap": Metric(0.1, 40, None, low, 0.2)})
        assert set(stage.said) == codes


def test_a_win_rate_that_length_control_turns_around():
    rates = {"win_rate": Metric(0.5, 40), "lc_win_rate": Metric(0.7, 40)}
    for far, converged, codes in (
        (1.0, 1.0, {"length_control_moves_far"}),
        (0.0, 1.0, set()),
        (1.0, 0.0, {"length_control_diverges"}),
    ):
        stage, more = Told(), {"lc/suspicious": Metric(far, 40), "lc/converged": Metric(converged, 40)}
        warn_about_length(stage, "a", "b", rates | more)
        assert set(stage.said) == codes


class Reviewed(Told):
    """A stage whose ``rubric_scores`` are written; what it writes and reports is not kept."""

    def __init__(self, workdir):
        super().__init__(rewards=[SimpleNamespace(kind="rubric", flag_below=0.6)])
        self.workdir = workdir

    def writer(self, name, kind):
        return SimpleNamespace(write=lambda rows: None, close=lambda counts: None)

    def report(self, name, **kinds):
        pass


def test_items_of_a_rubric(tmp_path):
    """rubric item mean confidence below 0.6 (F.2), items that never tell answers apart, answers without a score."""
    from storage.datasets import write_dataset

    def reviewed(name, confidence, score):
        rows = [
            complete_row(
                "rubric_scores/1",
                {
                    "sample_row_id": f"{k}",
                    "prompt_id": f"q{k // 2}",
                    "item_id": "clear",
                    "item_version": "1",
                    "scorer_id": "judge",
                    "attempt": 0,
                    "category": "style",
                    "omega": 1.0,
                    "score": score(k),
                    "confidence": None if score(k) is None else confidence,
                },
                dataset="rubric_scores",
                source="rubric",
                origin="ai",
            )
            for k in range(4)
        ]
        write_dataset(str(tmp_path / name / "out" / "rubric_scores"), "rubric_scores", "rubric_scores/1", rows)
        stage = Reviewed(tmp_path / name)
        write_review(stage)
        assert all(map(says_what_to_do, stage.said.values()))
        return set(stage.said)

    assert reviewed("fine", 0.6, lambda k: k % 2) == set()
    assert reviewed("unsure", 0.59, lambda k: k % 2) == {"rubric_low_confidence"}
    assert reviewed("flat", 0.9, lambda k: 1.0) == {"rubric_item_never_discriminates"}
    assert reviewed("lost", 0.9, lambda k: None if k == 3 else k % 2) == {"rubric_unscorable"}


def test_rows_that_are_ingested(tmp_path):
    """Labels of one kind, labels out of balance (lambda outside [1, 1.5]), very long prompts."""

    def said(name, rows):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = {w["code"]: w["text"] for w in ingest(file, tmp_path / name).result["warnings"]}
        return {code for code in ("one_class", "class_balance", "very_long_prompt") if code in found}, found

    def rated(good, bad):
        return [{"prompt": f"question {i}", "completion": f"answer {i}", "label": i < good} for i in range(good + bad)]

    assert said("alike", rated(6, 0))[0] == {"one_class"}
    codes, texts = said("rare", rated(8, 2))
    assert codes == {"class_balance"} and "options.desirable_weight=0.25" in texts["class_balance"]
    assert said("balanced", rated(6, 5))[0] == set()
    pair = {"chosen": "yes", "rejected": "no"}
    codes, texts = said("long", [{"prompt": "w" * 50_001, **pair}, {"prompt": "short", **pair}])
    assert codes == {"very_long_prompt"} and "max_chars=50000" in texts["very_long_prompt"]
    assert said("short", [{"prompt": "w" * 50_000, **pair}])[0] == set()


def test_every_warning_of_a_code_is_on_the_report_and_in_mlflow(tiny, data, spec):
    from stages.harness import Stage
    from stages.registry import get_stage
    from stages.reporting.curves import training_report
    from storage.mlflow_text import by_code
    from tests.common import silent

    made = spec("align", {}, {"model": tiny["policy"], "data": data["pairs"]}, "told")
    stage = Stage(get_stage("align"), made, silent)
    for code, text in (("align_settings", "the first"), ("diverged", "another"), ("align_settings", "the second")):
        stage.warn(code, text)
    training_report(stage, "Direct alignment", {"steps": 3})
    page = (stage.workdir / "reports" / "summary.md").read_text()
    assert all(f"**{w['code']}**: {w['text']}" in page for w in stage.warnings)
    assert by_code(stage.warnings) == {"align_settings": "the first\nthe second", "diverged": "another"}


def test_a_reward_model_that_was_fooled_is_said_to_be_where_it_rewards(tiny, data, spec, tmp_path):
    """reward.hack_probes: what did not pass is used by an explicit choice, which the record of the run keeps."""
    import shutil

    from stages.harness import execute
    from stages.reward_models.reward_eval import fooled_by
    from stages.reward_models.reward_heads import read_card, write_card
    from tests.common import silent

    assert fooled_by({"probe/boxes": 0.2, "probe/padded": 0.1, "flips/typo": 0.9}) == {"boxes": 0.2}
    fooled = tmp_path / "fooled"
    shutil.copytree(tiny["reward"], fooled)
    card = read_card(fooled)
    card.options["held_out"] = {"accuracy": 0.7, "rows": 64, "fooled_by": {"boxes": 0.2, "repeated": 0.5}}
    write_card(fooled, card)
    config = {
        "preset": "dr_grpo",
        "max_steps": 1,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 4,
    }
    for model, weight, told in ((tiny["reward"], 1.0, False), (str(fooled), 1.0, True), (str(fooled), 0.0, False)):
        rewards = [{"kind": "model", "name": "rm", "weight": weight}, {"kind": "length_penalty"}]
        inputs = {"model": tiny["policy"], "data": data["prompts"], "reward_model": model}
        name = f"{told} {weight}"
        warned = {
            w["code"]: w["text"]
            for w in execute(spec("rl", {**config, "rewards": rewards}, inputs, name), silent)["warnings"]
        }
        assert ("reward_model_fooled" in warned) is told
        assert not told or "repeated 50%, boxes 20%" in warned["reward_model_fooled"]


def test_pairs_that_give_themselves_away(tmp_path):
    """data.bias_audit: chosen longer in more than 60%, a model's share more than 0.3 apart; data.decontam: more than 2%
    of a benchmark.
    """

    def said(name, rows, code, inputs=None, **config):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = ingest(file, tmp_path / name, inputs=inputs, **config).result["warnings"]
        return [w["text"] for w in found if w["code"] == code]

    def pairs(longer, own):
        """Of twenty pairs so many whose chosen answer is the longer one, and so many whose chosen one model wrote."""
        return [
            {
                "prompt": f"question {i}",
                "chosen": f"{i} is {'right, as one sees' if i < longer else 'so'}",
                "rejected": f"{i} was {'no' if i < longer else 'right, as nobody sees'}",
                "chosen_model": "m" if i < own else "n",
                "rejected_model": "n" if i < own else "m",
            }
            for i in range(20)
        ]

    assert not said("even", pairs(12, 13), "bias")
    (text,) = said("longer", pairs(13, 10), "bias")
    assert "longer in 65.0% of the pairs" in text and says_what_to_do(text)
    (text,) = said("one model", pairs(10, 14), "bias")
    assert "differs by 0.40" in text and says_what_to_do(text)

    words = lambda k: " ".join(f"w{k}x{j}" for j in range(12))
    bench = tmp_path / "bench.jsonl"
    bench.write_text("".join(json.dumps({"question": words(k), "answer": "#### 1"}) + "\n" for k in range(50)))
    for seen, told in ((2, True), (1, False)):
        rows = [{"prompt": words(k)} for k in range(seen)] + [{"prompt": f"clean {k}"} for k in range(20)]
        found = said(f"seen {seen}", rows, "contamination", {"benchmarks.b": bench}, decontaminate="coverage")
        assert bool(found) is told and all(map(says_what_to_do, found))
