"""Every objective trains through the stage, and its model, loaded in a fresh process, gives the same scores bit for
bit.
"""

import json
import subprocess
import sys

import pytest

from stages.reward_models.reward_scorers import Response, load_scorer
from stages.spec import PROJECT_ROOT, ConfigError
from tests.common import assistant, user
from tests.reward.conftest import better, worse

COMMON = {"learning_rate": 3e-3, "batch_size": 8, "max_length": 96, "probe_pairs": 2, "num_train_epochs": 2}
CASES = {
    "bt": ("pairs", {}),
    "margin": ("pairs", {}),
    "soft_label": ("pairs", {}),
    "pairwise": ("pairs", {}),
    "t2t_pair": ("pairs", {}),
    "t2t_point": ("pairs", {"normalise_over_labels": True}),
    "kwise_pairs": ("rankings", {}),
    "plackett_luce": ("rankings", {}),
    "regression": ("ratings", {"attributes": ["help", "truth"], "attribute_weights": [0.75, 0.25]}),
    "pointwise_bce": ("labels", {}),
    "control_tokens": ("pairs", {}),
    "orm": ("labels", {}),
    "value": ("labels", {}),
    "prm": ("steps", {"step_classes": 3}),
}
SCORE = """
import json, sys
from stages.reward_models.reward_scorers import Response, load_scorer
rows = [Response(p, c) for p, c in json.load(open(sys.argv[1]))]
print(json.dumps([load_scorer(path).score(rows) for path in sys.argv[2:]]))
"""
WORDS = ("Good:", "Bad:")
#: Two answers each to two prompts.
ASKED = [(user(f"which, number {i}?"), assistant(text)) for i in (3, 50) for text in (better(i), worse(i))]
ENCODER = [
    ("bt", {}),
    ("bt", {"pooling": "cls"}),
    ("kwise_pairs", {}),
    ("orm", {}),
    ("prm", {}),
    ("pairwise", {"num_train_epochs": 5}),
]
TRAINED: dict[str, list[float]] = {}  # path -> scores in this process


def check(result, objective):
    """The model separates what differs by a word; its directory scores as it did in memory."""
    path, summary = result["outputs"]["model"]["path"], result["summary"]
    TRAINED[path] = load_scorer(path).score([Response(p, c) for p, c in ASKED])
    if objective == "regression":
        assert summary["test/pearson"] > 0.5 and summary["test/mse"] < summary["test/baseline_mse"]
    elif objective == "value":
        assert summary["test/auc"] > 0.5
    else:
        assert summary["test/accuracy"] >= 0.75
    return path, summary


@pytest.mark.parametrize("objective", list(CASES))
def test_trains_and_judges(tiny, rows, train, objective):
    data, more = CASES[objective]
    _, summary = check(
        train(
            "reward_model", {**COMMON, "objective": objective, **more}, {"model": tiny["policy"], "data": rows[data]}
        ),
        objective,
    )
    if objective in ("bt", "margin", "soft_label", "kwise_pairs", "plackett_luce"):
        assert summary["calibration_bias"] != 0


def test_a_guard_classifier_is_a_reward_beside_accuracy(tiny, rows, train):
    """reward.safety: a classifier of labelled answers, read as a probability of the whole answer, weighted beside the
    verifier.
    """
    import math

    from stages.reward.components import RewardComponent
    from stages.reward.rewards import build_rewards

    path = train(
        "reward_model", {**COMMON, "objective": "pointwise_bce"}, {"model": tiny["policy"], "data": rows["labels"]}
    )["outputs"]["model"]["path"]
    scorer = load_scorer(path)
    rewards = build_rewards(
        [RewardComponent(kind="verifier"), RewardComponent(name="safe", kind="model", weight=0.5, squash="sigmoid")],
        {"reward_model": scorer},
    )
    asked, answers = user("what is 2 + 2?"), ("\\boxed{4} " + better(3), "\\boxed{5} " + worse(3))
    found = rewards.score(
        [
            {
                "prompt_row": {"prompt": asked, "answer": "4", "answer_type": "integer"},
                "completion_text": text,
                "completion_ids": [1],
                "finish_reason": "eos",
            }
            for text in answers
        ]
    )
    safe = [
        1 / (1 + math.exp(-score)) for score in scorer.score([Response(asked, assistant(text)) for text in answers])
    ]
    assert [one.parts["safe"] for one in found] == pytest.approx(safe) and [
        one.total for one in found
    ] == pytest.approx([1 + 0.5 * safe[0], 0.5 * safe[1]])
    assert safe[0] > safe[1]


def test_a_kept_head_keeps_the_constant_of_gain_and_bias(tiny, rows, train):
    """rm.orm: it stands on the card and not in the linear head, and is part of the score and of what is trained on."""
    config = {**COMMON, "objective": "orm", "anchor": "none", "max_steps": 6, "learning_rate": 0.1}
    inputs = {"model": tiny["policy"], "data": rows["labels"]}
    first = train("reward_model", {**config, "outcome_head": "gain_bias"}, inputs, "gain")
    path = first["outputs"]["model"]["path"]
    still = {**config, "init_head": "keep", "learning_rate": 1e-12, "max_steps": 1}
    again = train("reward_model", still, {**inputs, "model": path}, "kept")
    responses = [Response(p, c) for p, c in ASKED]
    one, two = (load_scorer(result["outputs"]["model"]["path"]) for result in (first, again))
    assert abs(one.card.options["offset"]) > 0.05
    assert two.card.options["offset"] == one.card.options["offset"]
    assert two.score(responses) == pytest.approx(one.score(responses), abs=1e-6)
    assert again["summary"]["train/final_loss"] == pytest.approx(first["summary"]["train/final_loss"], rel=1e-4)


def test_a_preference_model_of_control_words_is_asked_with_both_and_fine_tuned_without(tiny, rows, train):
    """rm.pmp: from good and bad answers; the score of an answer x is r(GOOD:x) - r(BAD:x), by transformers' own
    forward. A ranked preference model goes on from its head.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    from stages.policy.critics import why_no_start

    config = {**COMMON, "objective": "control_tokens", "label_words": ["Good", "Bad"], "batch_size": 4}
    path, summary = check(
        train("reward_model", config, {"model": tiny["policy"], "data": rows["labels"]}), "control_tokens"
    )
    assert summary["calibration_bias"] == 0.0 and summary["test/auc"] > 0.9
    scorer, model = load_scorer(path), AutoModelForSequenceClassification.from_pretrained(path).eval()
    assert not scorer.reads_ids_of(scorer.reader.renderer) and "control_tokens" in why_no_start(path, None)
    for (prompt, answer), score in zip(ASKED, TRAINED[path]):
        start, [(ids, _)] = scorer.reader.parts(prompt, [answer])
        sides = [[*start, *scorer.reader.tokenizer.encode(word, add_special_tokens=False), *ids] for word in WORDS]
        with torch.no_grad():
            good, bad = (float(model(input_ids=torch.tensor([side])).logits[0, 0]) for side in sides)
        assert score == pytest.approx(good - bad, abs=1e-4) and abs(score) > 0.01
    tuned = {**COMMON, "objective": "bt", "init_head": "keep", "max_steps": 2}
    again = train("reward_model", tuned, {"model": path, "data": rows["pairs"]}, "tuned")
    assert load_scorer(again["outputs"]["model"]["path"]).card.objective == "bt"


@pytest.mark.parametrize("objective", ("t2t_point", "t2t_pair"))
def test_label_models_score_in_the_form_that_they_were_trained_in(tiny, rows, train, objective):
    path, _ = check(
        train(
            "reward_model",
            {**COMMON, "objective": objective, "label_request": "slic"},
            {"model": tiny["policy"], "data": rows["pairs"]},
        ),
        objective,
    )
    scorer, seen = load_scorer(path), []
    instruction = scorer.reader.instruction
    scorer.reader.instruction = lambda text: seen.append(text) or instruction(text)
    scorer.score([Response(prompt, completion) for prompt, completion in ASKED[:2]])
    (asked, first), (_, second) = ((prompt[0]["content"], completion[0]["content"]) for prompt, completion in ASKED[:2])
    assert seen[0] == (
        f"[Context] {asked} [Summary] {first}"
        if objective == "t2t_point"
        else f"[Context] {asked} [Summary A] {first} [Summary B] {second}"
    )


@pytest.mark.parametrize("objective,more", ENCODER)
def test_an_encoder_is_a_reward_model_too(encoder, rows, train, objective, more):
    path, _ = check(
        train(
            "reward_model",
            {**COMMON, "objective": objective, **more},
            {"model": encoder, "data": rows[CASES[objective][0]]},
        ),
        objective,
    )
    assert load_scorer(path).reads_ids_of(None) is False


def modern(encoder, path):
    """A random ModernBERT beside the encoder's tokenizer."""
    import shutil

    import torch
    from transformers import ModernBertConfig, ModernBertModel

    shutil.copytree(encoder, path, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    torch.manual_seed(6)
    ModernBertModel(
        ModernBertConfig(
            vocab_size=200,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            cls_token_id=2,
            sep_token_id=3,
            bos_token_id=2,
            eos_token_id=3,
            initializer_range=0.2,
            classifier_pooling="cls",
        )
    ).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    "backbone,pooling,advice",
    (
        ("bert", "auto", "pooling=cls"),
        ("bert", "cls", None),
        ("modernbert", "auto", None),
        ("modernbert", "mean", None),
        ("decoder", "mean", "pooling=last"),
        ("decoder", "auto", None),
    ),
)
def test_other_tools_read_the_published_model_alike_or_the_stage_warns(
    tiny, encoder, rows, tmp_path, backbone, pooling, advice
):
    """AutoModelForSequenceClassification on the tokenizer's own pair (or chat) encoding against our scorer."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from stages.harness import execute

    path = {
        "bert": lambda: encoder,
        "modernbert": lambda: modern(encoder, tmp_path / "modern"),
        "decoder": lambda: tiny["policy"],
    }[backbone]()
    events = []
    result = execute(
        {
            "stage": "reward_model",
            "config": {**COMMON, "pooling": pooling, "max_steps": 3, "probe_pairs": 0},
            "device": "cpu",
            "workdir": str(tmp_path / "work"),
            "inputs": {"model": {"path": path}, "data": {"path": rows["pairs"]}},
        },
        events.append,
    )
    warnings = [e["text"] for e in events if e.get("code") == "pooling_of_our_own"]
    assert len(warnings) == bool(advice) and all(advice in text for text in warnings)
    out = result["outputs"]["model"]["path"]
    scorer, model, tokenizer = (
        load_scorer(out),
        AutoModelForSequenceClassification.from_pretrained(out).eval(),
        AutoTokenizer.from_pretrained(out),
    )
    theirs = []
    for prompt, answer in ASKED:
        if backbone == "decoder":
            ids = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False).rstrip("\n")
            inputs = tokenizer(ids, return_tensors="pt", add_special_tokens=False)
        else:
            inputs = tokenizer(prompt[0]["content"], answer[0]["content"], return_tensors="pt")
        if backbone != "bert":
            inputs.pop("token_type_ids", None)
        with torch.no_grad():
            theirs.append(float(model(**inputs).logits[0, 0]) + scorer.card.bias)
    ours = scorer.score([Response(p, c) for p, c in ASKED])
    assert (max(abs(a - b) for a, b in zip(ours, theirs)) < 1e-4) is (advice is None)


def test_scores_are_the_same_bits_in_a_fresh_process(tmp_path):
    """All models that the tests above left behind, every kind of head among them."""
    if not TRAINED:
        pytest.skip("needs the models of the tests above; run the whole file")
    (tmp_path / "rows.json").write_text(json.dumps(ASKED))
    out = subprocess.run(
        [sys.executable, "-c", SCORE, str(tmp_path / "rows.json"), *TRAINED],
        cwd=PROJECT_ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(out.stdout.splitlines()[-1]) == list(TRAINED.values())


def test_an_anchor_that_is_given_is_used(tiny, rows, data, train):
    """rm.calibrate: demonstrations have mean 0 after calibration; one that the setting does not read is refused."""
    import numpy as np

    from storage.datasets import open_dataset

    config = {**COMMON, "max_steps": 1}
    path = train(
        "reward_model", config, {"model": tiny["policy"], "data": rows["pairs"], "anchor": data["demonstrations"]}
    )["outputs"]["model"]["path"]
    scorer = load_scorer(path)
    scores = scorer.score(
        [Response(r["messages"][:1], r["messages"][1:]) for r in open_dataset(data["demonstrations"]).iter_rows()]
    )
    assert scorer.card.anchor == "demonstrations" and np.mean(scores) == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match="anchor=auto"):
        train(
            "reward_model",
            {**config, "anchor": "chosen"},
            {"model": tiny["policy"], "data": rows["pairs"], "anchor": data["demonstrations"]},
            "refused",
        )


def test_probabilities_of_single_answers_are_calibrated_by_their_odds(tiny, rows, train):
    """rm.eval of rm.t2t_point: the difference of two probabilities is no logit, in the evaluate stage too."""
    import numpy as np

    from storage.datasets import open_dataset

    config = {"objective": "t2t_point", "max_steps": 4, "batch_size": 8, "max_length": 96, "learning_rate": 1e-2}
    made = train("reward_model", config, {"model": tiny["policy"], "data": rows["pairs"]})
    path, there = made["outputs"]["model"]["path"], open_dataset(rows["pairs"]).rows_of("train")
    assert (made["summary"]["pairs"], made["summary"]["rows"]) == (there, 2 * there)
    given = {"model": path, "pairs": rows["pairs"]}
    found = train("evaluate", {"target": "reward_model", "split": "test", "probe_pairs": 0}, given, "judged")["summary"]
    pairs = list(open_dataset(rows["pairs"]).iter_rows(split="test"))
    p = np.array(
        load_scorer(path).score(
            [Response(r["prompt"], r[side], row=r) for r in pairs for side in ("chosen", "rejected")]
        )
    ).reshape(-1, 2)
    odds = np.diff(np.log(p / (1 - p)), axis=1)[:, 0]  # of the rejected one
    assert found["log_loss"] == pytest.approx(np.logaddexp(0.0, odds).mean(), rel=1e-4)
    assert found["log_loss"] != pytest.approx(np.logaddexp(0.0, -(p[:, 0] - p[:, 1])).mean(), rel=1e-3)
    assert found["mean_margin"] == pytest.approx((p[:, 0] - p[:, 1]).mean(), rel=1e-4)


def test_anchors_count_by_the_weight_of_their_rows(tiny, rows, train, tmp_path):
    """rm.calibrate: the zero point is the weighted mean score of the chosen answers; one of weight 0 counts nothing."""
    import numpy as np

    from stages.batching import row_weight
    from storage.datasets import open_dataset, write_dataset

    read = list(open_dataset(rows["pairs"]).iter_rows())
    weights = [(0.0, 1.0, 5.0)[i % 3] for i in range(len(read))]
    path = str(tmp_path / "weighted")
    write_dataset(path, "weighted", "pairs/1", [{**row, "weight": w} for row, w in zip(read, weights)])
    config = {"max_steps": 1, "batch_size": 8, "max_length": 96, "anchor": "chosen"}
    result = train("reward_model", config, {"model": tiny["policy"], "data": path}, "weighted")
    scorer = load_scorer(result["outputs"]["model"]["path"])
    held = list(open_dataset(path).iter_rows(split="train"))
    scores = scorer.score([Response(r["prompt"], r["chosen"], row=r) for r in held])
    weighted = np.average(scores, weights=[row_weight(r) for r in held])
    assert weighted == pytest.approx(0, abs=1e-5) and abs(np.mean(scores)) > 1e-4


def test_an_anchor_that_cannot_be_had_is_refused_before_training(tiny, rows, data, train, monkeypatch):
    """Steps and ratings prefer no answer, and a model that compares has no zero point: said at the start, not after
    hours.
    """
    from stages import training

    monkeypatch.setattr(training, "fit", lambda *a, **k: pytest.fail("it began to train"))
    for name, config, more, said in (
        ("steps", {"anchor": "chosen"}, {}, "stepwise/1 has none; write anchor=none"),
        ("ratings", {"anchor": "chosen"}, {}, "ratings/1 has none"),
        ("pairs", {"anchor": "demonstrations"}, {}, "needs the input `anchor`"),
        ("pairs", {"objective": "pairwise", "anchor": "chosen"}, {}, "leave anchor=chosen out"),
        ("pairs", {"objective": "t2t_pair"}, {"anchor": data["demonstrations"]}, "leave the input `anchor` out"),
    ):
        with pytest.raises(ConfigError, match=said):
            train("reward_model", {**COMMON, **config}, {"model": tiny["policy"], "data": rows[name], **more}, said[:6])


def test_inputs_that_could_not_be_scored_at_the_end_are_refused_before_training(
    tiny, rows, data, train, tmp_path, monkeypatch
):
    """Anchors without an answer that counts, and an earlier model that knows no steps, failed when all was trained."""
    from stages import training
    from storage.datasets import open_dataset, write_dataset

    monkeypatch.setattr(training, "fit", lambda *a, **k: pytest.fail("it began to train"))

    def changed(name, path, **values):
        opened = open_dataset(path)
        write_dataset(str(tmp_path / name), name, opened.kind, [{**row, **values} for row in opened.iter_rows()])
        return str(tmp_path / name)

    for data_path, config, more, said in (
        (
            changed("bad", rows["labels"], label=False),
            {"anchor": "chosen"},
            {},
            "anchor=chosen has no .* split train.*anchor=none",
        ),
        (
            rows["pairs"],
            {},
            {"anchor": changed("light", data["demonstrations"], weight=0.0)},
            "anchor=demonstrations has no .*give such",
        ),
        (
            rows["pairs"],
            {},
            {"anchor": changed("out", data["demonstrations"], kept=False)},
            "anchor=demonstrations has no",
        ),
        (rows["steps"], {}, {"previous": tiny["reward"]}, "objective=bt, which scores whole answers.*objective=prm"),
    ):
        with pytest.raises(ConfigError, match=said):
            train("reward_model", {**COMMON, **config}, {"model": tiny["policy"], "data": data_path, **more}, said[:9])


def test_a_split_without_rows_is_named(tiny, rows, train):
    with pytest.raises(ConfigError, match="No row is left.*a rm_b split"):
        train("reward_model", {**COMMON, "split": "rm_b"}, {"model": tiny["policy"], "data": rows["pairs"]})


def test_probes_are_of_the_split_that_judges(tiny, rows, train, tmp_path):
    from storage.datasets import open_dataset, write_dataset

    write_dataset(
        str(tmp_path / "two"),
        "two",
        "pairs/1",
        [row for row in open_dataset(rows["pairs"]).iter_rows() if row["split"] != "test"],
    )
    config = {**COMMON, "max_steps": 2, "probe_pairs": 4}
    both = train("reward_model", config, {"model": tiny["policy"], "data": rows["pairs"]}, "both")["summary"]
    two = train("reward_model", config, {"model": tiny["policy"], "data": str(tmp_path / "two")}, "two")["summary"]
    assert (
        "test/probe/repeated" in both and "validation/probe/repeated" not in both and "validation/probe/repeated" in two
    )


def test_no_held_out_rows_means_none_and_the_zero_point_is_of_all_answers(tiny, rows, train):
    """eval_rows=0: nothing is judged, and the bias is that of the anchor's answers and not of the first one."""
    import numpy as np

    from storage.datasets import open_dataset

    result = train(
        "reward_model", {**COMMON, "max_steps": 2, "eval_rows": 0}, {"model": tiny["policy"], "data": rows["pairs"]}
    )
    assert not any(name.startswith(("validation/", "test/")) for name in result["summary"])
    chosen = [Response(r["prompt"], r["chosen"]) for r in open_dataset(rows["pairs"]).iter_rows(split="train")]
    assert np.mean(load_scorer(result["outputs"]["model"]["path"]).score(chosen)) == pytest.approx(0, abs=1e-5)


def test_spoiled_copies_of_answers_are_learned_to_be_worse(tiny, rows, train):
    """spoiled_fraction: so many of the rows trained on are an answer over a spoiled copy of it, by the probes named;
    these fool the model no more.
    """
    import numpy as np

    from stages.measures.reward_model import PROBES, probes

    assert set(PROBES) == set(probes("Three words and 7.", np.random.default_rng(0), "What?"))
    inputs = {"model": tiny["policy"], "data": rows["pairs"]}
    config = {**COMMON, "num_train_epochs": 4, "probe_pairs": 20}
    plain, hardened = (
        train("reward_model", {**config, **more}, inputs, name)["summary"]
        for name, more in (("plain", {}), ("hardened", {"spoiled_fraction": 0.5, "spoiled_by": ["repeated", "padded"]}))
    )
    assert "spoiled" not in plain and hardened["spoiled"] == plain["rows"] and hardened["rows"] == 2 * plain["rows"]
    names = ("test/probe/repeated", "test/probe/padded")
    assert max(hardened[name] for name in names) < 0.2 < max(plain[name] for name in names)
    assert hardened["test/accuracy"] >= 0.9
    for wrong, message in (
        ({"spoiled_fraction": 0.1, "spoiled_by": ["empty"]}, "no such probe"),
        ({"spoiled_by": ["padded"]}, "spoiled_fraction=0 adds none"),
        ({"spoiled_fraction": 0.1, "objective": "pairwise"}, "does not read"),
    ):
        with pytest.raises(ValueError, match=message):
            train("reward_model", {**COMMON, **wrong}, inputs, "refused")
