"""GRAPE: rubric files, judged and ruled items, rewards of whole runs, improved and SFT members, scoring again, item
review.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from stages.harness import execute
from stages.reward import grape, rubrics
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from tests.chat_server import chat_server
from tests.common import silent, user, written
from tests.vector_adapters.grape import advantages

LETTERS = {
    "id": "vowel",
    "kind": "verifiable",
    "criterion": "Has a vowel.",
    "weight": 0.7,
    "scorer": {"kind": "regex", "pattern": "[aeiou]"},
}
RUBRIC = {
    "version": 1,
    "categories": {
        "add": {
            "improvement_prompt": "Fix it.",
            "items": [LETTERS, {"id": "liked", "kind": "rm", "criterion": "Liked.", "weight": 0.3}],
        },
        "double": {
            "improvement_prompt": "Fix it.",
            "items": [
                {
                    **LETTERS,
                    "id": "short",
                    "criterion": "Short.",
                    "weight": 1.0,
                    "scorer": {"kind": "regex", "pattern": "^.{0,12}$"},
                }
            ],
        },
    },
}


def rows_of(result, name):
    return list(open_dataset(result["outputs"][name]["path"]).iter_rows())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("grape") / "prompts")
    written(
        path,
        "asked",
        "prompts/1",
        [
            {
                "prompt": user(f"{i}+{i}?"),
                "answer": str(2 * i),
                "answer_type": "integer",
                "category": ("add", "double")[i % 2],
            }
            for i in range(4)
        ],
        source="made",
    )
    return path


@pytest.fixture()
def rubric(tmp_path, spec):
    """``rubric(document, name)`` -> path of the ingested dataset."""

    def build(document=RUBRIC, name="rubric"):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(document))
        return execute(spec("ingest", {"kind": "rubric_items/1"}, {"data": str(file)}, f"ingest-{name}"), silent)[
            "outputs"
        ]["data"]["path"]

    return build


@pytest.fixture()
def judge():
    """A chat server whose replies are made by ``judge.reply(text)``; ``judge.seen`` are the requests."""
    with chat_server() as server:
        server.choice = lambda body: {"message": {"content": server.reply(body["messages"][0]["content"])}}
        yield server


def asked(text, category="c", **more):
    return {
        "prompt_row": {"prompt": user("why?"), "prompt_id": "p", "category": category, **more},
        "completion_text": text,
        "completion_ids": [1],
        "finish_reason": "eos",
    }


def scorer_of(tmp_path, items, component=None, inputs=None):
    """Rewards with one rubric component over the category c."""
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"categories": {"c": {"items": items}}}))
    path = str(tmp_path / f"own-{len(list(tmp_path.iterdir()))}")
    written(path, "own", rubrics.KIND, [row for row in rubrics.read_rubric(str(file))])
    return build_rewards([RewardComponent(kind="rubric", **(component or {}))], {"rubric": path, **(inputs or {})})


# -- rubrics -----------------------------------------------------------------------------------------------------------


def test_a_rubric_file_is_refused_with_everything_that_is_wrong(tmp_path, spec):
    file = tmp_path / "bad.yaml"
    file.write_text(
        "categories:\n  a:\n    items:\n      - {id: x, kind: verifiable, criterion: good, weight: 0.5, scorer:"
        " verifer}\n      - {id: y, kind: maybe, criterion: good, weight: 0.5}\n  b:\n    items: []\n  c:\n    items:\n"
        "      - {id: x, kind: verifiable, criterion: good, weight: 0.5}\n      - {id: x, kind: verifiable, criterion:"
        " good, weight: 0.2}\n"
    )
    with pytest.raises(ConfigError) as error:
        execute(spec("ingest", {"kind": "rubric_items/1"}, {"data": str(file)}, "bad"), silent)
    text = str(error.value)
    for part in (
        "item 1 (x): scorer: kind",
        "kind 'maybe' is unknown; write verifiable",
        "category c: the item id 'x' is used twice",
        "category b has no items",
        "sum to 0.7 and must sum to 1; write 0.714286, 0.285714",
    ):
        assert part in text, text
    file.write_text("categories: {a: {items: [{id: x, kind: verifiable, criterion: good, weight: 0}]}}")
    with pytest.raises(ConfigError, match="write each of them > 0"):
        execute(spec("ingest", {"kind": "rubric_items/1"}, {"data": str(file)}, "zero"), silent)


def test_atomised_items_share_their_parents_weight_and_versions_follow_the_content(tmp_path):
    file = tmp_path / "r.json"

    def read(criterion):
        item = {
            "id": "edge",
            "kind": "non_verifiable",
            "criterion": criterion,
            "weight": 1.0,
            "sub_items": [
                {"id": "null", "criterion": "Survives null.", "scorer": "code"},
                {"id": "empty", "criterion": "Survives nothing.", "scorer": "code"},
            ],
        }
        file.write_text(json.dumps({"version": 3, "categories": {"coding": {"items": [item]}}}))
        return rubrics.read_rubric(str(file))

    first, second = read("Handles edge cases."), read("Handles all edge cases.")
    assert [r["item_id"] for r in first] == ["null", "empty", "edge.rest"] and [r["kind"] for r in first] == [
        "verifiable",
        "verifiable",
        "non_verifiable",
    ]
    assert [r["omega"] for r in first] == pytest.approx([1 / 3] * 3) and {r["parent_item_id"] for r in first} == {
        "edge"
    }
    assert (
        all(r["version"].startswith("3-") for r in first)
        and first[2]["scorer_id"] == "judge"
        and "Survives null." in first[2]["criterion"]
    )
    assert [a["version"] == b["version"] for a, b in zip(first, second)] == [
        True,
        True,
        False,
    ], "an edited item has another version, whatever the file says"
    lines = tmp_path / "r.jsonl"
    lines.write_text(
        "\n".join(
            json.dumps(
                {
                    "category": "coding",
                    "id": r["item_id"],
                    "kind": r["kind"],
                    "criterion": r["criterion"],
                    "omega": r["omega"],
                    "version": "3",
                    "scorer": json.loads(r["settings_json"])["scorer"],
                }
            )
            for r in first
        )
    )
    assert [r["version"] for r in rubrics.read_rubric(str(lines))] == [r["version"] for r in first], (
        "the same items from JSON Lines"
    )


def test_an_unknown_category_is_an_error(tmp_path):
    rewards = scorer_of(tmp_path, [{**LETTERS, "weight": 1}])
    rewards.check([{"prompt_id": "p", "category": "c"}])
    with pytest.raises(
        ConfigError, match="category 'poetry', for which there is no rubric; the rubric's categories are c"
    ):
        rewards.check([{"prompt_id": "p", "category": "poetry"}])
    named = scorer_of(tmp_path, [{**LETTERS, "weight": 1}], {"category": "c"})
    named.check([{"prompt_id": "p", "category": None}])


def test_a_code_critic_is_built_in(tmp_path, judge):
    item = {
        "id": "style",
        "kind": "non_verifiable",
        "criterion": "Follows PEP 8.",
        "weight": 1.0,
        "critique_prompt_id": "code_style",
    }
    judge.reply = lambda text: "fine" if text.endswith("Critique:") else "Reasoning: r\nScore: 1\nConfidence: 0.9"
    rewards = scorer_of(tmp_path, [item], {"endpoint": judge.url, "endpoint_model": "m"})
    assert rewards.score([asked("x = 1")])[0].total == pytest.approx(1.0)
    assert all(
        word in judge.seen[0]["messages"][0]["content"]
        for word in ("readability", "naming", "comments", "modularity", "robustness", "quoted line", "x = 1", "PEP 8")
    )
    with pytest.raises(
        grape.RubricError, match="no built-in critique prompt 'style'; write one of general, code_style"
    ):
        scorer_of(tmp_path, [{**item, "critique_prompt_id": "style"}])


def test_scorers_and_sub_items_are_read_as_written_or_refused(tmp_path):
    """A function's text is part of an item's version; sub-items may weigh differently; what an item cannot use is
    refused before anything is scored.
    """
    file, source = tmp_path / "r.json", tmp_path / "score.py"

    def read(*items):
        file.write_text(json.dumps({"categories": {"c": {"items": items}}}))
        return rubrics.read_rubric(str(file))

    own = {
        "id": "own",
        "kind": "verifiable",
        "criterion": "Own.",
        "weight": 1.0,
        "scorer": {"kind": "python", "source": str(source)},
    }
    versions = []
    for value in (1.0, 0.0):
        source.write_text(f"def score(prompt, completion, answer):\n    return {value}\n")
        (row,) = read(own)
        versions.append(row["version"])
        assert "return" in row["settings_json"] and str(source) not in row["settings_json"]
    assert versions[0] != versions[1]
    parts = [
        {"id": "a", "criterion": "A.", "weight": 0.5, "scorer": "code"},
        {"id": "b", "criterion": "B.", "weight": 0.2, "scorer": "code"},
    ]
    parent = {"id": "edge", "kind": "non_verifiable", "criterion": "Edges.", "weight": 1.0, "sub_items": parts}
    assert [(r["item_id"], r["omega"]) for r in read(parent)] == [
        ("a", 0.5),
        ("b", 0.2),
        ("edge.rest", pytest.approx(0.3)),
    ]
    for items, why in (
        (
            [{**parent, "sub_items": [parts[0], {**parts[1], "weight": 0.7}]}],
            "sum to 1.2 and share the item's 1; write at most that",
        ),
        ([{**parent, "residual": False}], "all of it with residual: false"),
        (
            [{**parent, "sub_items": [parts[0], {k: v for k, v in parts[1].items() if k != "weight"}]}],
            "write one for each, or none",
        ),
        ([{**own, "scorer": "majority"}], "kind majority cannot score an item"),
        ([{**own, "scorer": {"kind": "icdpo"}}], "kind icdpo cannot score an item"),
        ([{**own, "scorer": {"kind": "verifier", "weight": 3.0}}], "weight would not be read"),
        ([{**own, "scorer": {"kind": "judge", "judge_prompt": "{a}?"}}], "judge_prompt would not be read"),
    ):
        with pytest.raises(grape.RubricError, match=why):
            read(*items)


# -- scoring -----------------------------------------------------------------------------------------------------------


def test_judged_items_get_a_critique_and_unreadable_scores_are_asked_for_again(tmp_path, judge):
    items = [
        {"id": "right", "kind": "verifiable", "criterion": "Right.", "weight": 0.5, "scorer": "judge"},
        {
            "id": "kind",
            "kind": "non_verifiable",
            "criterion": "Kind.",
            "weight": 0.5,
            "scorer": "judge",
            "critique_prompt": "Be a critic.",
            "critic": {"kind": "judge", "endpoint_model": "critic"},
        },
    ]

    def reply(text):
        if text.endswith("Critique:"):
            return "critique of " + ("good" if "good" in text else "bad")
        if "[Reference answer]" in text:
            return (
                "Reasoning: compared\nScore: 1\nConfidence: 0.8"
                if "good" in text
                else '{"reasoning": "no", "score": 0, "confidence": 0.4}'
            )
        if "could not be read: score 2.0 is outside [0, 1]" in text:
            return "Reasoning: better\nScore: 0.25\nConfidence: 0.5"
        return (
            "Reasoning: hm\nScore: 2\nConfidence: 0.5"
            if "critique of bad" in text
            else "Reasoning: fine\nScore: 0.75\nConfidence: 0.7"
        )

    judge.reply = reply
    rewards = scorer_of(tmp_path, items, {"endpoint": judge.url, "endpoint_model": "scorer"})
    good, bad = rewards.score([asked("good", answer="42"), asked("bad", answer="42")])
    assert [i["score"] for i in good.items] == [1.0, 0.75] and [i["score"] for i in bad.items] == [0.0, 0.25]
    assert (
        [i["confidence"] for i in bad.items] == [0.4, 0.5]
        and bad.items[1]["attempt"] == 1
        and bad.items[1]["critique"] == "critique of bad"
    )
    phi = np.array([(0.8 + 0.4) / 2, (0.7 + 0.5) / 2])
    assert good.total == pytest.approx(2 * 0.5 * float(phi @ [1, 0.75]) / phi.sum()) and bad.total == pytest.approx(
        float(phi @ [0, 0.25]) / phi.sum()
    )
    assert {b["model"] for b in judge.seen if b["messages"][0]["content"].startswith("Be a critic.")} == {
        "critic"
    } and all(b["temperature"] == 0 for b in judge.seen)
    assert (
        "42" in judge.seen[0]["messages"][0]["content"]
        and len(judge.seen) == 2 + 2 + 2 + 1
        and {b["max_tokens"] for b in judge.seen} == {2048}
    )
    assert json.loads(bad.items[1]["raw"]) == [
        "Reasoning: hm\nScore: 2\nConfidence: 0.5",
        "Reasoning: better\nScore: 0.25\nConfidence: 0.5",
    ], "every reply is kept"
    rewards.score([asked("good", answer="42")])
    assert len(judge.seen) == 7, "what was asked is kept"
    missing = rewards.score([asked("good", answer=None)])[0]
    assert (
        missing.total is None and "reference answer" in missing.reasons["rubric"] and missing.items[1]["score"] == 0.75
    )


def test_what_cannot_be_scored_follows_the_policy(tmp_path, judge):
    items = [
        {**LETTERS, "weight": 0.75},
        {"id": "deep", "kind": "verifiable", "criterion": "Deep.", "weight": 0.25, "scorer": "judge"},
    ]
    judge.reply = lambda text: "no idea" if "[Response]\nxa\n" in text else "Reasoning: r\nScore: 1\nConfidence: 0.5"
    for policy, expected in (
        ("drop_sample", [None, 0.25 * 2 * 0.5 / 1.5]),
        ("drop_item", [1.0, 0.25 * 2 * 0.5 / 1.5]),
        ("zero_score", [0.75 * 2 * 1 / 1.5, 0.25 * 2 * 0.5 / 1.5]),
    ):
        judge.seen.clear()
        rewards = scorer_of(tmp_path, items, {"endpoint": judge.url, "endpoint_model": "m", "invalid_policy": policy})
        scored = rewards.score([asked("xa", answer="1"), asked("xyz", answer="1")])
        assert [s.total for s in scored] == [v if v is None else pytest.approx(v) for v in expected], policy
        assert len(judge.seen) == 1 + 3 + 1, "three more tries"
    with pytest.raises(grape.RubricError, match="write invalid_policy=drop_sample"):
        scorer_of(tmp_path, items, {"endpoint": judge.url, "endpoint_model": "m", "invalid_policy": "error"}).score(
            [asked("xa", answer="1")]
        )


def test_an_items_view_decides_what_its_judge_sees(tmp_path, judge):
    """The item's own view, else the reward component's; another view is another scorer, so that scores under the old
    one are not kept.
    """
    judge.reply = lambda text: "Reasoning: r\nScore: 1\nConfidence: 0.5"
    item = {
        "id": "safe",
        "kind": "verifiable",
        "criterion": "Safe.",
        "weight": 1.0,
        "scorer": {"kind": "judge", "view": "answer_only"},
    }
    server = {"endpoint": judge.url, "endpoint_model": "m"}
    names = []
    for scorer, view, hidden in (
        (item["scorer"], "full", True),
        ("judge", "answer_only", True),
        ("judge", "full", False),
    ):
        judge.seen.clear()
        (scored,) = scorer_of(tmp_path, [{**item, "scorer": scorer}], {**server, "view": view}).score(
            [asked("<think>secret</think>shown", answer="1")]
        )
        text = judge.seen[0]["messages"][0]["content"]
        assert "shown" in text and ("secret" not in text) == hidden
        names.append(scored.items[0]["scorer_id"])
    assert names == ["judge/m on answer_only", "judge/m on answer_only", "judge/m"]


def test_a_reward_model_is_no_judge(tiny, tmp_path):
    """transformers would give it a random head; its opinions would be noise."""
    from stages.models.modeling import ModelError

    item = {"id": "deep", "kind": "verifiable", "criterion": "Deep.", "weight": 1.0, "scorer": "judge"}
    with pytest.raises(
        ModelError,
        match=(
            "ForSequenceClassification, which writes nothing, so it cannot judge; give a language model"
            " .judge=MODEL_REF."
        ),
    ):
        scorer_of(tmp_path, [item], inputs={"reward_model": tiny["reward"]})
    with pytest.raises(ModelError, match="cannot judge"):
        build_rewards([RewardComponent(kind="judge")], {"reward_model": tiny["reward"]})


def test_a_local_judge_writes_as_much_as_it_has_positions_for(tiny, monkeypatch):
    from stages.reward import judge as module
    from stages.reward_models.reward_heads import RewardCard

    local = module.LocalJudge(tiny["policy"], RewardCard())
    room = local.reader.room - len(local.reader.instruction("Rate it."))
    assert room < 2048
    (said,) = local.answers(["Rate it."], 2048, 0)
    (short,) = local.answers(["Rate it."], 8, 0)
    assert said and said.startswith(short), "more tokens than the model has positions for are not asked for"
    monkeypatch.setattr(module, "SHORTEST_ANSWER", room + 1)
    assert local.answers(["Rate it."], 2048, 0) == [""], "no place for an answer"


def test_kept_scores_of_a_reward_model_are_squashed_anew():
    """An only item is raw; beside others, and by minmax over other answers, the same raw value is another score."""
    from types import SimpleNamespace

    from stages.reward.rubric_reward import RubricScorer

    item = rubrics.Item("c", "liked", "v-1", "rm", "Liked.", 0.5, {"kind": "model"})
    kept = {
        ("r0", "c", "liked", "1", "model"): {"score": 3.0, "confidence": 1.0, "raw": json.dumps({"value": 3.0})},
        ("r1", "c", "liked", "1", "model"): {"score": -1.0, "confidence": 1.0, "raw": json.dumps({"value": -1.0})},
    }
    scorer = RubricScorer.__new__(RubricScorer)
    scorer.known, scorer.scorer_ids, scorer._ruled = (
        kept,
        {"c/liked": "model", "c/rule": "regex"},
        lambda item, rows: [{"score": 1.0, "confidence": 1.0}] * len(rows),
    )
    rows = [{"row_id": f"r{k}", "prompt_row": {"category": "c"}} for k in range(2)]
    rule = rubrics.Item("c", "rule", "v-2", "verifiable", "Rule.", 0.5, {"kind": "regex"})
    for items, mode, expected in (
        ([item], "auto", [3.0, -1.0]),
        ([item, rule], "auto", [1 / (1 + np.exp(-3.0)), 1 / (1 + np.exp(1.0))]),
        ([item, rule], "minmax", [1.0, 0.0]),
    ):
        scorer.rubric, scorer.component = rubrics.Rubric({"c": items}), SimpleNamespace(category="", rm_squash=mode)
        assert [found[0]["score"] for found in scorer.items(rows)] == pytest.approx(expected), mode


def test_confidences_of_several_calls_are_averaged_over_all_their_samples(tmp_path, judge):
    """Batches of dynamic sampling: the rewards are those of one call with everything (GRAPE-REWARD)."""
    from stages.generation import Sample, regrade, score

    items = [
        {"id": k, "kind": "verifiable", "criterion": f"Is {k}.", "weight": w, "scorer": "judge"}
        for k, w in (("one", 0.7), ("two", 0.3))
    ]

    def reply(text):  # sure of the first answers' item one, and of the last ones' item two
        early, one = "[Response]\na" in text, "Is one." in text
        return f"Reasoning: r\nScore: {0.9 if one else 0.2}\nConfidence: {0.9 if early == one else 0.3}"

    judge.reply = reply
    rewards = scorer_of(tmp_path, items, {"endpoint": judge.url, "endpoint_model": "m"})
    rewards.components.append(RewardComponent(kind="regex", pattern="b", weight=0.5))
    prompt = {"row_id": "q", "prompt_id": "q", "prompt": user("why?"), "category": "c", "answer": "1"}

    def samples(texts):
        return [Sample(prompt, [1], k, [2], [0.0], "eos", text) for k, text in enumerate(texts)]

    together, apart = samples(["a1", "a2", "b1"]), samples(["a1", "a2", "b1"])
    score(rewards, together)
    score(rewards, apart[:2])
    score(rewards, apart[2:])
    before = [s.total for s in apart]
    regrade(rewards, apart)
    assert [s.total for s in apart] == pytest.approx([s.total for s in together]) and before != pytest.approx(
        [s.total for s in together]
    )
    assert [s.parts["rubric"] for s in apart] == pytest.approx([s.parts["rubric"] for s in together])


def test_rewards_of_several_calls_keep_why_another_component_said_nothing(tmp_path, judge):
    """A component that the prompt is not routed to invalidates nothing when rubric rewards are computed again, and one
    that failed where it is meant still does.
    """
    from stages.generation import Sample, regrade, score

    items = [{"id": "one", "kind": "verifiable", "criterion": "Is one.", "weight": 1.0, "scorer": "judge"}]
    judge.reply = lambda text: "Reasoning: r\nScore: 0.9\nConfidence: 0.9"
    rewards = scorer_of(tmp_path, items, {"endpoint": judge.url, "endpoint_model": "m"})
    none = "def score(prompt, completion):\n    return None"
    rewards.components += [
        RewardComponent(name="general", kind="python", source=none),
        RewardComponent(name="maths", kind="python", source=none, domains=["math"]),
    ]
    prompt = {"row_id": "q", "prompt_id": "q", "prompt": user("why?"), "category": "c", "answer": "1"}
    routed, failed = {**prompt, "reward_route": ["rubric"]}, {**prompt, "reward_route": ["rubric", "maths"]}
    samples = [Sample(row, [1], 0, [2], [0.0], "eos", "a") for row in (routed, {**failed, "domain": "math"})]
    score(rewards, samples)
    before = [(s.total, s.weights) for s in samples]
    assert before[0] == (pytest.approx(0.9), {"rubric": 1.0}) and np.isnan(before[1][0])
    regrade(rewards, samples)
    assert samples[0].total == before[0][0] and samples[0].weights == before[0][1] and np.isnan(samples[1].total)


def test_the_monitors_count_what_is_invalid_unsure_and_flagged():
    from stages.reward.rubric_reward import rubric_metrics

    def scored(name, score, confidence):
        return {"category": "c", "item_id": name, "score": score, "confidence": confidence}

    rows = [[scored("a", 1.0, 0.9), scored("b", None, None)], [scored("a", 0.0, 0.9), scored("b", 0.5, 0.5)]]
    found = rubric_metrics([*rows, [{**scored("z", 1.0, 0.0), "category": "d"}]], [None, 0.3, 1.0])
    assert (
        found["rubric/c/a/invalid_fraction"] == 0.0
        and found["rubric/c/b/invalid_fraction"] == 0.5
        and found["rubric/c/invalid_fraction"] == 0.5
    )
    assert (
        found["rubric/flagged_items"] == 2.0 and found["rubric/zero_confidence"] == 1.0 and found["rubric/c/max"] == 0.3
    )
    assert (
        rubric_metrics(rows, [None, 0.3], flag_below=0.4)["rubric/flagged_items"] == 0.0
        and rubric_metrics([], []) == {}
    )


def test_the_share_of_improved_answers_is_one_of_the_whole_group():
    """An SFT answer in a sample's place does not make it smaller; at most what is sampled is improved."""
    from types import SimpleNamespace

    from stages.policy.members import Members

    members = Members.__new__(Members)
    members.rubric, members.component, members.prior = (
        rubrics.Rubric({"c": []}),
        RewardComponent(kind="rubric", category="c"),
        {"r": {"text": "a", "feedback": "f"}},
    )
    members.renderer = SimpleNamespace(prompt_ids=lambda messages: [1])
    for share, count, expected in ((0.25, 8, 2), (0.25, 7, 2), (1.0, 7, 7)):
        members.config = SimpleNamespace(mode_mix="share", improve_share=share, num_generations=8, max_prompt_length=9)
        assert members._improve({"row_id": "r", "prompt": user("q"), "category": None}, count, 1, 0)[0] == expected


def test_an_evaluation_averages_confidences_over_all_its_answers_whatever_the_chunk():
    from types import SimpleNamespace

    from stages.evaluation.plan import Plan

    plan = Plan.__new__(Plan)
    plan.prompts, plan.choices, plan.pairs, plan.plain = [1, 2, 3, 4, 5], [], [1, 2, 3], []
    for settings, expected in (
        ({}, [5, 2, 1]),
        ({"rubric_normalizer": "plain"}, [2, 2, 1, 2, 1]),
        ({"rubric_normalizer": "plain", "rm_squash": "minmax"}, [5, 2, 1]),
    ):
        plan.config = SimpleNamespace(chunk=2, rewards=[RewardComponent(kind="rubric", **settings)])
        assert [len(part) for _, part in plan.units()] == expected


def test_rewards_of_different_rubrics_are_not_compared(monkeypatch):
    """By the stage compare, by `posttrain compare`, and among held-out scores of two runs; what does not come from the
    rubric is.
    """
    from flows import compare as command
    from stages.evaluation.protocol import require_same_scorers
    from stages.evaluation.run_comparison import HELD_OUT_SETTINGS, held_out

    graders = [{"name": "rubric", "kind": "rubric"}, {"name": "rule", "kind": "verifier"}]
    metas = {name: {"protocol": {"graders": graders}, "scorers": {"rubric": name}} for name in "ab"}
    with pytest.raises(ConfigError, match="reward/rubric was measured with different inputs rubric"):
        require_same_scorers("reward/rubric", metas)
    for metric, own in (
        ("reward/rule", metas),
        ("accuracy", metas),
        (None, metas),
        ("reward/rubric", {"a": metas["a"], "c": metas["a"]}),
    ):
        require_same_scorers(metric, own)
    config = dict.fromkeys(HELD_OUT_SETTINGS, 1)
    given = tuple({"rubric": {"digest": name}} for name in "ab")
    assert held_out([], [], (config, config), given)[1].endswith("with different input rubric")
    records = {
        name: {
            "rl": {
                "stage": "rl",
                "key": "k",
                "config": {},
                "inputs": own,
                "metrics": {"last/reward": 1.0, "last/rubric/c/mean": 1.0, "last/kl/sequence_sum": 2.0},
            }
        }
        for name, own in zip("ab", given)
    }
    monkeypatch.setattr(command, "load", records.get)
    found = command.compare("a", "b")
    assert [row["metric"] for row in found["metrics"]] == ["last/kl/sequence_sum"] and "stage rescore" in found[
        "notes"
    ][0]
    records["b"]["rl"]["inputs"] = given[0]
    assert len(command.compare("a", "b")["metrics"]) == 3


def test_degenerate_rewards():
    weights = {"c": [0.5, 0.5], "d": [1.0]}
    reward, phibar, zero = grape.rewards(
        [[None, None], [None, None], [1.0]], [[None, None], [None, None], [0.5]], ["c", "c", "d"], weights
    )
    assert reward == [None, None, 1.0] and phibar == {"c": [0.0, 0.0], "d": [0.5]} and zero == set(), (
        "every item of a category unscorable"
    )
    assert advantages(reward, ["q", "q", "r"]) == [0.0, 0.0, 0.0], "groups with fewer than two rewards teach nothing"
    assert grape.rewards([], [], [], weights) == ([], {}, set())
    assert grape.rewards([[None, 1.0]], [[None, 1.0]], ["c"], {"c": [1.0, 0.0]}, invalid_policy="drop_item")[0] == [
        None
    ], "what is left weighs nothing"
    assert grape.rewards([[None, None]], [[None, None]], ["c"], weights, invalid_policy="zero_score")[::2] == (
        [0.0],
        {"c"},
    )
    assert (
        grape.squash([2.0, 4.0], "auto", True) == [2.0, 4.0]
        and grape.squash([0.0], "auto", False) == [0.5]
        and grape.squash([3.0, 3.0], "minmax", False) == [0.5, 0.5]
    )
    assert (
        grape.num_improve(8, 0.25, 3, True, [0.1, 0.3, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9]) == 2
        and grape.num_improve(3, 0.25, 1, True) == 0
    )
    # a judge that goes on for ever costs no more than its tokens
    for text, why in (
        ("", "empty"),
        ('{"score": 1, "reasoning": "x", "confidence": 1}', "order"),
        ('{"reasoning": "x", "score": true, "confidence": 1}', "numbers"),
        ("Reasoning: Score: 1\nConfidence: 1", "own line"),
        ('{"reasoning"', "JSON"),
        ('{"reasoning": null, "score": 1, "confidence": 1}', "text"),
        ("Reasoning: a\nScore: 1\nConfidence: 1\nScore: 0\nConfidence: 1", "once"),
        ("Reasoning: a\nScore: 1\nConfidence: 0.5, I think", "nothing behind"),
        ("Reasoning: a" + "\n" * 20_000 + "x", "each once"),
    ):
        assert grape.parse_item(text)[0] is None and why in grape.parse_item(text)[1]
    assert grape.parse_item('```json\n{"reasoning": "x", "score": 1, "confidence": 0.5}\n```')[0] == {
        "reasoning": "x",
        "score": 1.0,
        "confidence": 0.5,
    }


def test_the_review_says_what_an_item_is_worth():
    table = {"good": [1, 0, 0.5, 0.5], "rest": [1, 0, 0.2, 0.4], "flat": [1, 1, 1, 1], "lost": [None, None, None, 0.5]}
    rows = [
        {
            "category": "c",
            "item_id": name,
            "item_version": "1",
            "sample": k,
            "question": k // 2,
            "omega": 0.25,
            "score": s,
            "confidence": None if s is None else 0.5 + 0.3 * (name != "flat"),
        }
        for name, scores in table.items()
        for k, s in enumerate(scores)
    ]
    found = {r["item_id"]: r for r in grape.review(rows)}
    assert (
        found["good"]["ties"] == 0.5
        and found["good"]["agreement"] == 1.0
        and found["good"]["variance"] == pytest.approx(np.var([1, 0, 0.5, 0.5]))
    )
    assert (
        not found["flat"]["discriminates"]
        and found["flat"]["ties"] == 1.0
        and found["flat"]["agreement"] is None
        and found["flat"]["flagged"]
    )
    assert found["lost"]["unscorable"] == 0.75 and found["lost"]["ties"] is None and not found["good"]["flagged"]
    assert found["rest"]["agreement"] == 0.5, (
        "0.2 < 0.4, but the rest of the rubric puts the second lower: 1 and 0.5 against 1, 0.5 and 0.5"
    )
    with pytest.raises(grape.RubricError, match="stage rescore"):
        grape.review(rows + [{**rows[0], "item_version": "2"}])


# -- whole runs --------------------------------------------------------------------------------------------------------

GRAPE = {
    "preset": "grape",
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_prompt_length": 240,
    "learning_rate": 1e-3,
    "max_steps": 3,
    "rewards": [{"kind": "rubric"}],
}


def test_rl_with_a_rubric_can_be_audited(tiny, prompts, rubric, spec):
    """The reward of every rollout follows from its item scores and the category's confidences, the advantage from the
    question's mean.
    """
    made = spec(
        "rl",
        GRAPE,
        {"model": tiny["policy"], "data": prompts, "rubric": rubric(), "reward_model": tiny["reward"]},
        "rl",
    )
    result = execute(made, silent)
    rollouts, scores = rows_of(result, "rollouts"), rows_of(result, "rubric_scores")
    assert len(rollouts) == 3 * 16 and len(scores) == 3 * (8 * 2 + 8)
    items = {}
    for s in scores:
        items.setdefault(s["sample_row_id"], []).append(s)
    for k in range(3):
        part = [r for r in rollouts if r["iteration"] == k]
        own = [items[r["row_id"]] for r in part]
        reward, phibar, _ = grape.rewards(
            [[i["score"] for i in o] for o in own],
            [[i["confidence"] for i in o] for o in own],
            [o[0]["category"] for o in own],
            {"add": [0.7, 0.3], "double": [1.0]},
        )
        assert [r["reward"] for r in part] == pytest.approx(reward) and phibar == {"add": [1.0, 1.0], "double": [1.0]}
        expected = advantages(reward, [r["prompt_id"] for r in part])
        assert [r["advantages"][0] for r in part if r["length"]] == pytest.approx(
            [a for a, r in zip(expected, part) if r["length"]], abs=1e-6
        )
    assert len({round(r["reward"], 6) for r in rollouts}) >= 3, "a reward that does not vary teaches nothing"
    assert {s["item_id"] for s in scores} == {"vowel", "liked", "short"} and all(
        s["score"] is not None and 0 <= s["score"] <= 1 for s in scores
    )
    metrics = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    assert any("rubric/add/vowel/confidence" in m for m in metrics)
    assert {r["item_id"]: r["n"] for r in rows_of(result, "rubric_confidence")} == {
        "vowel": 24,
        "liked": 24,
        "short": 24,
    }
    weights = Path(result["outputs"]["model"]["path"], "model.safetensors").read_bytes()
    assert weights != Path(tiny["policy"], "model.safetensors").read_bytes()


def test_items_of_replayed_completions_are_reviewed_once(tiny, prompts, rubric, spec):
    made = spec(
        "rl",
        {**GRAPE, "preset": "topr", "replay_fraction": 0.5, "max_steps": 2},
        {"model": tiny["policy"], "data": prompts, "rubric": rubric(), "reward_model": tiny["reward"]},
        "replayed",
    )
    result = execute(made, silent)
    rollouts, scores = rows_of(result, "rollouts"), rows_of(result, "rubric_scores")
    sampled = [r["row_id"] for r in rollouts if r["policy_version"] == r["iteration"]]
    assert len(rollouts) == 32 and len(sampled) == 24 and {s["sample_row_id"] for s in scores} == set(sampled)
    counts = {r["item_id"]: r["n"] for r in rows_of(result, "rubric_confidence")}
    assert counts["vowel"] + counts["short"] == 24


def test_improved_and_sft_answers_join_the_groups(tiny, prompts, rubric, spec, tmp_path):
    """Their old log-probs are those of the plain question under the policy that sampled; parents exist; without
    sft_in_loss they only count.
    """
    import torch

    from stages.models.modeling import load_policy

    answers = str(tmp_path / "answers")
    written(
        answers,
        "answers",
        "demonstrations/1",
        [
            {"messages": user(f"{i}+{i}?") + [{"role": "assistant", "content": f"{2 * i}"}], "train_turns": [1]}
            for i in (0, 1)
        ],
    )
    document = json.loads(json.dumps(RUBRIC))
    document["categories"]["double"]["generation_prompt"] = "Be brief."
    config = {**GRAPE, "mode_mix": "share", "improve_share": 0.5, "sft_member": "append", "sft_in_loss": False}
    made = spec(
        "rl",
        config,
        {
            "model": tiny["policy"],
            "data": prompts,
            "rubric": rubric(document),
            "reward_model": tiny["reward"],
            "sft": answers,
        },
        "members",
    )
    result = execute(made, silent)
    rollouts = [{**r, **json.loads(r["extra_json"])} for r in rows_of(result, "rollouts")]
    for k in range(3):
        part = [r for r in rollouts if r["iteration"] == k]
        assert sum(r["mode"] == "sft" for r in part) == 2 and len(part) == 18
        assert sum(r["mode"] == "improve" for r in part) == (0 if k == 0 else 8), (
            "two of four, from the second visit on"
        )
    ids = {r["row_id"] for r in rollouts}
    improved = [r for r in rollouts if r["mode"] == "improve"]
    assert improved and all(
        r["parent_sample_id"] in ids and r["sampling_prompt_id"] not in (None, r["prompt_id"]) for r in improved
    )
    assert all(not any(r["loss_mask"]) and r["logp_rollout"] is None for r in rollouts if r["mode"] == "sft")
    assert any(r["sampling_prompt_id"] for r in rollouts if r["mode"] == "fresh"), (
        "a generation prompt is part of what was sampled from"
    )
    lines = Path(made["workdir"], "metrics.jsonl").read_text().splitlines()
    category = {r["prompt_id"]: r["category"] for r in open_dataset(prompts).iter_rows()}
    for k, logged in enumerate(json.loads(line)["metrics"] for line in lines):  # of the policy is what it said
        part = [r for r in rollouts if r["iteration"] == k and r["reward_tier"] != "unscorable"]
        said, given = ([r for r in part if (r["mode"] == "sft") == sft] for sft in (False, True))
        mean = lambda name, rows: pytest.approx(np.mean([r[name] for r in rows]))
        assert logged["reward"] == mean("reward", said) and logged["members/sft_reward"] == mean("reward", given)
        assert logged["completions/mean_length"] == mean("length", said)
        assert logged["completions/generated_tokens"] == sum(r["length"] for r in said)
        by_group = [[r["reward"] for r in part if r["prompt_id"] == p] for p in {r["prompt_id"] for r in part}]
        assert logged["reward_std"] == pytest.approx(np.mean([np.std(r, ddof=1) for r in by_group]))
        assert logged["rubric/add/mean"] == mean("reward", [r for r in said if category[r["prompt_id"]] == "add"])
    model = load_policy(tiny["policy"], "cpu").eval().requires_grad_(False)
    for r in (r for r in rollouts if r["iteration"] == 0):
        tokens = torch.tensor([list(r["prompt_ids"]) + list(r["completion_ids"])])
        logp = torch.log_softmax(model(tokens).logits[0].float(), -1)
        start = len(r["prompt_ids"])
        plain = [float(logp[start + t - 1, token]) for t, token in enumerate(r["completion_ids"])]
        assert r["logp_old"] == pytest.approx(plain, abs=1e-4)
        if r["off_policy"]:
            assert list(r["logp_plain_prompt"]) == list(r["logp_old"])
            assert r["logp_rollout"] is None or list(r["logp_rollout"]) != pytest.approx(plain, abs=1e-4)
    for more, document_of, why in (
        ({}, "be brief and kind " * 60, "write a shorter generation_prompt, or max_prompt_length="),
        ({"prompt_template": "none"}, "Be brief.", "prompt_template=chat"),
        ({"environment": "tools"}, "Be brief.", "leave generation_prompt out of the rubric"),
    ):
        document["categories"]["double"]["generation_prompt"] = document_of
        with pytest.raises(ValueError, match=why):
            execute(
                spec(
                    "rl",
                    {**GRAPE, **more},
                    {
                        "model": tiny["policy"],
                        "data": prompts,
                        "rubric": rubric(document, f"gen-{len(more)}{len(document_of)}{len(why)}"),
                        "reward_model": tiny["reward"],
                    },
                    f"refused-{len(why)}",
                ),
                silent,
            )
    with pytest.raises(ValueError, match="mode_mix=fresh"):
        execute(
            spec(
                "rl",
                {**config, "rewards": [{"kind": "length"}]},
                {"model": tiny["policy"], "data": prompts, "sft": answers},
                "norubric",
            ),
            silent,
        )


def test_the_kl_to_the_reference_is_over_what_the_policy_said(tiny, prompts, rubric, spec, tmp_path):
    """KL-EST: samples from pi. SFT answers, which nobody sampled, moved the KL that is logged, watched and held at a
    target.
    """
    answers = str(tmp_path / "answers")
    written(
        answers,
        "answers",
        "demonstrations/1",
        [
            {
                "messages": user(f"{i}+{i}?") + [{"role": "assistant", "content": "even"}],
                "train_turns": [1],
                "kept": True,
            }
            for i in (0, 1)
        ],
    )
    inputs = {"data": prompts, "rubric": rubric(), "reward_model": tiny["reward"], "sft": answers}
    for unit in ("sequence_sum", "token_mean"):
        made = spec(
            "rl",
            {
                **GRAPE,
                "sft_member": "append",
                "monitor_kl": True,
                "max_steps": 1,
                "beta": 0.01,
                "kl_unit": unit,
                "target_kl": 1.0,
                "kl_controller": "adaptive_ppo",
            },
            {"model": tiny["policy"], "reference": tiny["other"], **inputs},
            f"kl-{unit}",
        )
        rows = rows_of(execute(made, silent), "rollouts")
        metrics = json.loads(Path(made["workdir"], "metrics.jsonl").read_text().splitlines()[0])["metrics"]
        said = [r for r in rows if json.loads(r["extra_json"])["mode"] != "sft"]
        assert len(said) == 16 and len(rows) == 18
        sums = [sum(np.subtract(r["logp_old"], r["logp_ref"])) for r in said]
        expected = np.mean(sums) if unit == "sequence_sum" else sum(sums) / sum(r["length"] for r in said)
        assert metrics[f"kl/{unit}"] == pytest.approx(expected, abs=1e-4)
        assert abs(np.mean([sum(np.subtract(r["logp_old"], r["logp_ref"])) for r in rows]) - np.mean(sums)) > 1e-3


def test_answers_can_be_trained_behind_what_they_were_sampled_from(tiny, prompts, rubric, spec):
    """conditioning=sampling: old log-probs are those behind the context, those behind the plain question are kept; the
    first ratios are 1 (the stage checks).
    """
    import torch

    from stages.models.modeling import load_policy

    document = json.loads(json.dumps(RUBRIC))
    document["categories"]["double"]["generation_prompt"] = "Be brief."
    config = {**GRAPE, "mode_mix": "share", "improve_share": 0.5, "conditioning": "sampling", "max_steps": 2}
    inputs = {"model": tiny["policy"], "data": prompts, "rubric": rubric(document), "reward_model": tiny["reward"]}
    made = spec("rl", config, inputs, "behind")
    rollouts = [{**r, **json.loads(r["extra_json"])} for r in rows_of(execute(made, silent), "rollouts")]
    plain = {r["prompt_id"]: list(r["prompt_ids"]) for r in rollouts if r["sampling_prompt_id"] is None}
    assert {r["mode"] for r in rollouts} == {"fresh", "improve"} and not any(r["off_policy"] for r in rollouts)
    assert all(
        (list(r["prompt_ids"]) == plain.get(r["prompt_id"])) == (r["sampling_prompt_id"] is None) for r in rollouts
    )
    model = load_policy(tiny["policy"], "cpu").eval().requires_grad_(False)

    def logps(prompt, ids):
        logp = torch.log_softmax(model(torch.tensor([prompt + ids])).logits[0].float(), -1)
        return [float(logp[len(prompt) + t - 1, token]) for t, token in enumerate(ids)]

    behind = [r for r in rollouts if r["iteration"] == 0 and r["sampling_prompt_id"]]
    assert behind and len({tuple(r["prompt_ids"]) for r in behind}) == 2, (
        "the two questions of the category with a generation prompt"
    )
    for r in behind:
        ids = list(r["completion_ids"])
        assert r["logp_old"] == pytest.approx(logps(list(r["prompt_ids"]), ids), abs=1e-4)
        assert list(r["logp_plain_prompt"]) != pytest.approx(list(r["logp_old"]), abs=1e-4)
    whole = [json.loads(line)["metrics"] for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]
    assert any(m.get("members/logp_difference", 0) > 0 for m in whole) and all(
        m["members/off_policy_share"] == 0 for m in whole if "members/off_policy_share" in m
    )
    with pytest.raises(ConfigError, match="write conditioning=plain"):
        execute(
            spec("rl", {**config, "token_norm_scope": "group", "loss_agg_mode": "token-mean"}, inputs, "by-group"),
            silent,
        )


def test_a_killed_run_with_improved_answers_ends_with_the_same_bytes(tiny, prompts, rubric, spec, forks):
    config = {**GRAPE, "mode_mix": "probability", "improve_share": 0.5, "max_steps": 10}
    inputs = {"model": tiny["policy"], "data": prompts, "rubric": rubric(), "reward_model": tiny["reward"]}
    whole, killed = spec("rl", config, inputs, "whole"), spec("rl", config, inputs, "killed")
    forks.run(spec.path("whole"), POSTTRAIN_CHECKPOINT_SECONDS="1000")
    metrics = Path(killed["workdir"], "metrics.jsonl")
    forks.start(spec.path("killed"), POSTTRAIN_CHECKPOINT_SECONDS="0").kill_when(
        lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3
    )
    assert not Path(killed["workdir"], "result.json").exists()
    forks.run(spec.path("killed"), POSTTRAIN_CHECKPOINT_SECONDS="0")
    assert json.loads(Path(killed["workdir"], "result.json").read_text())["resumed_from"]
    for name in ("rollouts", "rubric_scores", "rubric_confidence"):
        assert (
            open_dataset(str(Path(killed["workdir"], "out", name))).manifest["digest"]
            == open_dataset(str(Path(whole["workdir"], "out", name))).manifest["digest"]
        )
    assert (
        Path(killed["workdir"], "out", "model", "model.safetensors").read_bytes()
        == Path(whole["workdir"], "out", "model", "model.safetensors").read_bytes()
    )


def test_candidates_are_scored_again_without_sampling(tiny, prompts, rubric, spec):
    """The same rubric gives the same rewards without scoring anything; a changed item is the only one scored."""
    config = {"num_generations": 4, "max_completion_length": 8, "rewards": [{"kind": "rubric"}], "allow_empty": True}
    inputs = {"model": tiny["policy"], "prompts": prompts, "rubric": rubric(), "reward_model": tiny["reward"]}
    first = execute(spec("rejection", config, inputs, "rs"), silent)
    before = rows_of(first, "candidates")
    assert len(before) == 16 and all(r["reward"] is not None for r in before) and len({r["reward"] for r in before}) > 2
    given = {
        "data": first["outputs"]["candidates"]["path"],
        "prompts": prompts,
        "rubric": inputs["rubric"],
        "scores": first["outputs"]["rubric_scores"]["path"],
        "reward_model": tiny["reward"],
    }
    same = execute(spec("rescore", {}, given, "same"), silent)
    assert [r["reward"] for r in rows_of(same, "data")] == [r["reward"] for r in before]
    assert same["summary"]["items_reused"] == 8 * 2 + 8 and same["summary"]["reward/changed"] == 0
    rules = json.loads(json.dumps(RUBRIC))
    for category in rules["categories"].values():
        category["items"] = [{**category["items"][0], "weight": 1.0}]
    for more, told in (
        ({"judge": tiny["policy"]}, "the input judge would change nothing: no item .* write scorer: {kind: judge}"),
        ({"rubric": rubric(rules, "rules")}, "the input reward_model would .* write scorer: {kind: model}"),
    ):
        with pytest.raises(ConfigError, match=told):
            execute(spec("rescore", {}, {**given, **more}, "unread"), silent)
    changed = json.loads(json.dumps(RUBRIC))
    changed["version"] = 2
    changed["categories"]["double"]["items"][0]["scorer"]["pattern"] = "z"
    other = execute(spec("rescore", {"block": 5}, {**given, "rubric": rubric(changed, "two")}, "other"), silent)
    after = rows_of(other, "data")
    scores = rows_of(other, "rubric_scores")
    assert other["summary"]["items_reused"] == 8 * 2 and {s["item_version"][:2] for s in scores} == {"2-"}, (
        "of two categories, one kept its items"
    )
    pattern = {r["row_id"]: float("z" in r["completion"][0]["content"]) for r in before}
    versions = {r["prompt_id"]: r["category"] for r in open_dataset(prompts).iter_rows()}
    for old, new in zip(before, after):
        assert new["row_id"] == old["row_id"] and new["reward"] == pytest.approx(
            pattern[old["row_id"]] if versions[old["prompt_id"]] == "double" else old["reward"]
        )
    again = spec("rejection", {"rewards": config["rewards"], "allow_empty": True}, inputs, "again")
    again["inputs"]["candidates"] = {
        "kind": "dataset",
        "path": other["outputs"]["data"]["path"],
        "ref": "c",
        "digest": "c",
    }
    assert execute(again, silent)["summary"]["completions"] == 16


def test_an_evaluation_is_graded_by_a_rubric(tiny, prompts, rubric, spec):
    """Every answer has its items, its reward is their weighted sum, the items' review is there, and the rubric is part
    of what scores are compared by.
    """
    config = {
        "split": "train",
        "num_samples": 3,
        "greedy": True,
        "max_completion_length": 8,
        "chunk": 2,
        "rewards": [{"kind": "rubric", "rubric_normalizer": "weighted"}],
    }
    inputs = {"model": tiny["policy"], "prompts": prompts, "rubric": rubric(), "reward_model": tiny["reward"]}
    result = execute(spec("evaluate", config, inputs, "graded"), silent)
    answers, items = rows_of(result, "samples"), rows_of(result, "rubric_scores")
    assert (
        len(answers) == 4 * 4
        and {i["sample_row_id"] for i in items} == {a["row_id"] for a in answers}
        and len(items) == 8 * 2 + 8
    )
    for answer in answers:
        own = [i for i in items if i["sample_row_id"] == answer["row_id"]]
        assert json.loads(answer["extra_json"])["parts"]["rubric"] == pytest.approx(
            sum(i["omega"] * i["score"] for i in own)
        )
    assert {(r["category"], r["item_id"]) for r in rows_of(result, "rubric_confidence")} == {
        ("add", "vowel"),
        ("add", "liked"),
        ("double", "short"),
    }
    assert 0.0 <= result["summary"]["reward/rubric"] <= 1.0, sorted(result["summary"])
    drawn = {a["row_id"] for a in answers if json.loads(a["extra_json"])["mode"] == "sample"}
    # eval.conformance; what a reward model scores is no clause
    for category, item in (("add", "vowel"), ("double", "short")):
        own = [i["score"] < 0.5 for i in items if i["item_id"] == item and i["sample_row_id"] in drawn]
        assert len(own) == 6 and result["summary"][f"violation_rate/{category}/{item}"] == pytest.approx(np.mean(own))
    broken = {i["sample_row_id"] for i in items if i["item_id"] != "liked" and i["score"] < 0.5} & drawn
    assert result["summary"]["violation_rate"] == pytest.approx(len(broken) / 12) and not [
        name for name in result["summary"] if "violation" in name and "liked" in name
    ]
    assert [r["metric"] for r in rows_of(result, "scores") if r["metric"].startswith("violation_rate")]
    assert open_dataset(result["outputs"]["samples"]["path"]).manifest["meta"]["scorers"]["rubric"]


def test_clauses_that_are_violated_by_hand():
    """Rates over answers whose clause was scored, at most one violation per answer overall, intervals by prompt, the
    most violated clause first.
    """
    from stages.evaluation import conformance

    def said(sample, prompt, item, score):
        return {
            "sample_row_id": sample,
            "prompt_id": prompt,
            "group_id": None,
            "category": "c",
            "item_id": item,
            "score": score,
            "reasoning": f"{sample} {item}",
        }

    items = [
        said("a", "p", "honest", 0.4),
        said("a", "p", "kind", 0.0),
        said("b", "p", "honest", 0.5),
        said("b", "p", "kind", None),
        said("c", "q", "honest", 1.0),
        said("c", "q", "kind", 0.2),
        said("d", "q", "kind", 0.0),
        said("c", "q", "liked", -3.0),
    ]
    found, table = conformance.rates(items, {"a", "b", "c"}, 0.5, {("c", "liked")})
    assert {name: (m.value, m.n) for name, m in found.items()} == {
        "violation_rate": (pytest.approx(2 / 3), 3),
        "violation_rate/c/honest": (pytest.approx(1 / 3), 3),
        "violation_rate/c/kind": (1.0, 2),
    }
    assert [(r["clause"], r["why"]) for r in table] == [("kind", "a kind"), ("honest", "a honest")] and all(
        0.0 <= m.low <= m.value <= m.high <= 1.0 for m in found.values()
    )
    assert conformance.rates(items, {"a", "b", "c"}, 0.1, {("c", "liked")})[0]["violation_rate"].value == pytest.approx(
        1 / 3
    )
    assert conformance.rates(items, set(), 0.5) == ({}, [])
    rows = [
        {"row_id": k, "extra_json": json.dumps({"mode": mode})}
        for k, mode in (("a", "sample"), ("b", "greedy"), ("c", "sample"))
    ]
    assert (
        conformance.sampled_answers(rows) == {"a", "c"}
        and conformance.sampled_answers(rows[1:2]) == {"b"}
        and conformance.sampled_answers([]) == set()
    )


def test_rollouts_are_scored_again_and_trained_on(tiny, prompts, rubric, spec, tmp_path):
    inputs = {"model": tiny["policy"], "data": prompts, "rubric": rubric(), "reward_model": tiny["reward"]}
    first = execute(spec("rl", {**GRAPE, "max_steps": 1}, inputs, "rl"), silent)
    given = {
        "data": first["outputs"]["rollouts"]["path"],
        "prompts": prompts,
        "rubric": inputs["rubric"],
        "model": tiny["policy"],
        "reward_model": tiny["reward"],
    }
    again = execute(spec("rescore", {}, given, "again"), silent)
    assert again["summary"]["items_reused"] == 0
    assert [r["reward"] for r in rows_of(again, "data")] == pytest.approx(
        [r["reward"] for r in rows_of(first, "rollouts")]
    ), "decoded, scored and averaged as in the run"
    # nothing that was computed from the old rewards stays, VinePPO's values of the steps neither
    valued = [{**row, "step_values": [0.5], "step_rewards": [1.0]} for row in rows_of(first, "rollouts")]
    write_dataset(str(tmp_path / "valued"), "valued", "rollouts/1", valued)
    anew = execute(spec("rescore", {}, {**given, "data": str(tmp_path / "valued")}, "anew"), silent)
    assert rows_of(anew, "data") == rows_of(again, "data") and all(
        row[name] is None for row in rows_of(again, "data") for name in ("step_values", "step_rewards", "advantages")
    )
    with pytest.raises(ConfigError, match="model=MODEL_REF"):
        execute(spec("rescore", {}, {k: v for k, v in given.items() if k != "model"}, "nomodel"), silent)
    stored = spec("rl", {**GRAPE, "preset": "topr", "max_steps": 1}, inputs, "stored")
    stored["inputs"]["stored"] = {
        "kind": "dataset",
        "path": again["outputs"]["data"]["path"],
        "ref": "s",
        "digest": "s",
    }
    assert execute(stored, silent)["summary"]["steps"] == 1


@pytest.mark.parametrize("stage", ["rl", "rejection"])
def test_scoring_again_knows_why_a_component_has_no_value(tiny, rubric, spec, tmp_path, stage):
    """A prompt that is routed to the rubric alone (reward_route) lost its reward because the verifier had none, one
    that is routed to the verifier was shown to the rubric, and a stored reason was of the scoring before.
    """
    routes = (None, ["rubric"], ["verifier"])
    written(
        str(tmp_path / "asked"),
        "asked",
        "prompts/1",
        [
            {
                "prompt": user(f"{i}+{i}?"),
                "answer": str(2 * i),
                "answer_type": "integer",
                "category": "nobodys" if route == ["verifier"] else "double",
                "reward_route": route,
            }
            for i, route in enumerate(routes)
        ],
        source="made",
    )
    document = json.loads(json.dumps(RUBRIC))
    prompts, rewards = str(tmp_path / "asked"), [{"kind": "rubric"}, {"kind": "verifier", "weight": 0.5}]
    inputs = {
        "model": tiny["policy"],
        {"rl": "data", "rejection": "prompts"}[stage]: prompts,
        "rubric": rubric(document),
        "reward_model": tiny["reward"],
    }
    config, output = {
        "rl": ({**GRAPE, "prompts_per_step": 3, "max_steps": 1}, "rollouts"),
        "rejection": ({"num_generations": 4, "max_completion_length": 8, "allow_empty": True}, "candidates"),
    }[stage]
    first = execute(spec(stage, {**config, "rewards": rewards}, inputs, "first"), silent)
    before = rows_of(first, output)
    given = {
        "data": first["outputs"][output]["path"],
        "prompts": prompts,
        "rubric": inputs["rubric"],
        "model": tiny["policy"],
        "reward_model": tiny["reward"],
    }
    again = execute(spec("rescore", {"rewards": rewards}, given, "again"), silent)
    after = rows_of(again, "data")
    assert [r["reward"] for r in after] == [r["reward"] for r in before]
    assert again["summary"]["unscorable"] == 4 and len(rows_of(again, "rubric_scores")) == 8
    assert [json.loads(r["extra_json"] or "{}").get("unscorable") for r in after] == [
        json.loads(r["extra_json"] or "{}").get("unscorable") for r in before
    ]
    none = "def score(prompt, completion, answer):\n    return None"
    document["categories"]["double"]["items"][0]["scorer"] = {"kind": "python", "source": none}
    unread = execute(
        spec("rescore", {"rewards": rewards}, {**given, "rubric": rubric(document, "none")}, "unread"), silent
    )
    by_route = {r["prompt_id"]: r["reward_route"] for r in open_dataset(prompts).iter_rows()}
    for row in rows_of(unread, "data"):
        why = json.loads(row["extra_json"] or "{}").get("unscorable") or {}
        if by_route[row["prompt_id"]] == ["verifier"]:
            assert "no value" not in why.get("verifier", "") and row.get("reward_tier") != "unscorable"
        else:
            assert why["rubric"].startswith("rubric items without a score (short: ")
            assert row.get("reward_tier") == "unscorable" or row["reward"] is None


def test_the_sequence_level_variant_is_marked_as_an_experiment():
    from stages.rl import Config, resolve_preset

    assert any("grape_alt is experimental" in text for text in resolve_preset(Config(preset="grape_alt"))[1])
    assert not any("experimental" in text for text in resolve_preset(Config(preset="grape"))[1])


# -- REWARD-ROUTER -----------------------------------------------------------------------------------------------------


def test_a_later_tier_audits_prompts_that_an_earlier_one_decided_and_counts_for_nothing():
    """reward.cascade: all answers to the drawn prompts, the same ones whoever asks; totals and verdicts stay."""

    def judged(fraction, rows, tier="judge"):
        source = "def score(prompt, completion, answer):\n    return 9.0 * len(completion)"
        components = [
            RewardComponent(name="ask", kind="python", tier=tier, audit_fraction=fraction, source=source),
            RewardComponent(name="rule", kind="verifier", tier="rule", verifier="math"),
        ]
        return build_rewards(components, {}).score(rows)

    rows = []
    for k in range(40):
        for text in ("\\boxed{4}", "\\boxed{5}"):
            row = asked(text, answer="4", answer_type="integer")
            rows.append({**row, "prompt_row": {**row["prompt_row"], "prompt_id": f"p{k}"}})
    open_ended = asked("longer", answer=None)
    plain = judged(0.0, [*rows, open_ended])
    assert all(f.parts["ask"] is None and "earlier tier" in f.reasons["ask"] for f in plain[:-1])
    assert plain[-1].total == 54.0 and plain[-1].tier == "judge"
    found = judged(0.25, [*rows, open_ended])
    seen = [f.parts["ask"] is not None for f in found[:-1]]
    assert seen[::2] == seen[1::2] and 2 < sum(seen[::2]) < 25, "whole prompts, some of them"
    assert [f.parts["ask"] for f in found[:-1] if f.parts["ask"]] == [81.0] * sum(seen), "what it says of each"
    same = lambda f: (f.total, f.tier, f.correct, f.extracted, f.weights)
    assert [same(f) for f in found] == [same(f) for f in plain] and not any(
        "ask" in f.reasons for f, on in zip(found, seen) if on
    )
    alone = judged(0.25, rows[:10])
    assert [f.parts for f in alone] == [f.parts for f in found[:10]], "whoever else is asked about"
    again = build_rewards(
        [
            RewardComponent(
                name="ask", kind="python", tier="judge", source="def score(prompt, completion, answer):\n    return 1"
            ),
            RewardComponent(name="rule", kind="verifier", tier="rule", verifier="math"),
        ],
        {},
    ).total_of(next(f.parts for f in found if f.parts["ask"]))
    assert again.tier == "rule", "from what is stored"
    assert all(f.parts["ask"] is not None for f in judged(1.0, rows))
    for kind in ({"kind": "verifier", "tier": "rule"}, {"kind": "verifier"}):
        with pytest.raises(ValueError, match="write tier: judge"):
            RewardComponent(audit_fraction=0.1, **kind)
    of_first = [
        RewardComponent(
            name=tier, kind="python", tier=tier, audit_fraction=fraction, source="def score(*given): return 1"
        )
        for tier, fraction in (("judge", 0.0), ("learned", 0.5))
    ]
    with pytest.raises(ValueError, match="learned is the first; write it in a later one"):
        build_rewards(of_first, {})


def test_the_router_takes_the_rule_then_a_sure_reward_model_then_the_judge():
    sure = "def score(prompt, completion, answer):\n    return 3.0 if completion == 'sure' else 0.1"
    components = [
        RewardComponent(name="rule", kind="verifier", tier="rule", verifier="math"),
        RewardComponent(name="rm", kind="python", tier="learned", source=sure),
        RewardComponent(
            name="ask", kind="python", tier="judge", source="def score(prompt, completion, answer):\n    return 0.5"
        ),
        RewardComponent(name="tags", kind="regex", pattern="s", weight=0.25),
    ]
    rows = [
        asked("\\boxed{4}", answer="4", answer_type="integer"),
        asked("sure", answer=None),
        asked("unsure", answer=None),
    ]
    found = build_rewards(components, {}).score(rows)
    assert [f.tier for f in found] == ["rule", "learned", "judge"]
    assert [f.total for f in found] == pytest.approx([1.0, 3.25, 0.75])
    assert (
        [f.parts["rm"] for f in found] == [None, 3.0, 0.1]
        and [f.parts["ask"] for f in found] == [None, None, 0.5]
        and "earlier tier" in found[0].reasons["ask"]
    )
    assert [f.parts["rm/confidence"] for f in found] == [
        None,
        pytest.approx(1 / (1 + np.exp(-3.0))),
        pytest.approx(1 / (1 + np.exp(-0.1))),
    ], "how sure it was is kept"
    again = build_rewards(components, {}).total_of(found[2].parts)
    assert (again.total, again.tier) == (pytest.approx(0.75), "judge"), "from what is stored"
    from stages.generation import Sample
    from stages.rollouts.metrics import rollout_metrics

    samples = [
        Sample({}, [1], k, [2], [0.0], "eos", "x", total=f.total, parts=f.parts, tier=f.tier)
        for k, f in enumerate(found)
    ]
    logged = rollout_metrics(samples, np.array([s.total for s in samples]), np.zeros(3, int))
    assert [logged[f"reward/tier_{tier}_mean"] for tier in ("rule", "learned", "judge")] == pytest.approx(
        [1.0, 3.25, 0.75]
    ) and logged["reward/tier_judge"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="at least two of rule, learned and judge"):
        build_rewards([components[0]], {})
    # also where the missing rule alone would leave a total
    for rule in (components[0], components[0].model_copy(update={"on_missing": "skip"})):
        none = build_rewards([rule, components[1]], {}).score(rows[2:])
        assert none[0].total is None and none[0].tier is None, "nobody was sure"
