"""Stage select_checkpoint: candidates by reward, win rate, a metric and validation loss (sft.ckpt_select)."""

import json
import math
from pathlib import Path

import pytest

from flows import promotion
from stages.harness import StageFailure, execute
from stages.select_checkpoint import Config, check, choose, in_order, shared_means
from stages.spec import ConfigError
from storage import lineage, records, registry, store
from storage.datasets import open_dataset, write_dataset
from storage.files import tree_digest
from storage.schema import complete_row
from tasks.run import run_stage
from tests.common import assistant, silent, user, written

#: A random model's answer ends at its first letter.
ENDS = {"max_completion_length": 8, "min_tokens": 1, "stop_strings": list("abcdefghijklmnopqrstuvwxyz")}


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    rows = [
        {"messages": user(f"what is {i} plus {i}?") + assistant(f"{2 * i}"), "train_turns": [1], "kept": True}
        for i in range(6)
    ]
    return written(tmp_path_factory.mktemp("data") / "d", "d", "demonstrations/1", rows, split="validation")


@pytest.fixture()
def run(tiny, demonstrations, tmp_path):
    def call(config, inputs, name="selected", stage="select_checkpoint", **more):
        given = {
            key: {
                "kind": "dataset" if key in ("data", "prompts") else "model",
                "path": path,
                "ref": key,
                "digest": tree_digest(path),
            }
            for key, path in inputs.items()
        }
        spec = {"stage": stage, "key": "0" * 64, "config": config, "seed": 3, "device": "cpu", "inputs": given}
        return execute({**spec, "workdir": str(tmp_path / name)}, more.get("emit", silent))

    return call


@pytest.fixture()
def two(tiny, demonstrations):
    return {"candidates.1": tiny["policy"], "candidates.2": tiny["other"], "data": demonstrations}


def rows_of(found, output):
    return list(open_dataset(found["outputs"][output]["path"]).iter_rows())


# -- the choice --------------------------------------------------------------------------------------------------------


TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}{{ '!' if loud else '' }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '!' if loud else '' }}\n{%- endif -%}"
)


def test_ties_go_to_the_earliest_and_what_is_not_finite_is_never_chosen():
    nan, inf = math.nan, math.inf
    assert choose({"1": 0.1, "2": 0.3, "3": 0.3}) == "2" and choose({"1": 0.3, "2": 0.3 * (1 + 1e-12)}) == "1"
    assert choose({"1": nan, "2": -5.0, "3": inf}) == "2" and choose({"1": nan}) is None and choose({}) is None
    assert choose({"1": 2.0, "2": 1.0, "3": nan}, less=True) == "2" and choose({"1": -inf, "2": 4.0}, less=True) == "2"
    assert in_order(["10", "2", "epoch.1", "1"]) == ["1", "2", "10", "epoch.1"]


def test_candidates_are_compared_on_the_prompts_that_all_have_a_value_of():
    class Told:
        said = []

        def warn(self, code, text):
            self.said.append(code)

    values = {"1": {"a": (1.0, "a"), "b": (9.0, "b")}, "2": {"a": (2.0, "a")}, "3": {}}
    found = shared_means(Told(), "rm_score", values)
    assert {label: (one.value, one.n) for label, one in found.items()} == {"1": (1.0, 1), "2": (2.0, 1)}
    assert Told.said == ["candidates_without_score", "prompts_left_out"]
    assert shared_means(Told(), "rm_score", {"1": {}, "2": {}}) == {}


@pytest.mark.parametrize(
    "config, names, told",
    [
        ({"select_on": "reward"}, "", "write rm_score, win_rate, val_loss, or metric:NAME"),
        ({"select_on": "metric:"}, "", "write rm_score"),
        ({"baseline": "2"}, "", "write select_on=win_rate, or leave baseline out"),
        ({"select_on": "win_rate"}, "", "give --input judge=MODEL"),
        ({"select_on": "rm_score"}, "", "give it, or write select_on=val_loss"),
        ({}, "judge", "write select_on=win_rate, or leave the input out"),
        ({"evaluate": {"limit": 3}}, "", "leave these settings out"),
        ({"evaluate": {"engine": "vllm"}}, "", "write evaluate.engine=builtin"),
        ({"evaluate": {"target": "judge", "num_samples": 4}}, "", "leave it out"),
        ({"win_rate": {"mode": "verdict"}}, "", "write select_on=win_rate"),
        ({"select_on": "win_rate", "win_rate": {"baseline": "1"}}, "", "write baseline"),
    ],
)
def test_what_cannot_be_or_would_not_be_read_is_refused_with_what_to_write(config, names, told):
    with pytest.raises(ValueError) as error:
        check(Config.model_validate(config), ["candidates.1", "candidates.2", "data", *names.split()])
    assert told in str(error.value)


def test_a_section_given_in_part_keeps_what_the_stage_sets_in_the_rest():
    config = Config.model_validate({"evaluate": {"limit": 3}})
    assert (config.evaluate.split, config.evaluate.num_samples, config.evaluate.limit) == ("validation", 0, 3)


# -- the stage ---------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_stage_evaluate_and_scores_those_of_rejection(run, tiny, two):
    """The same texts as an evaluation with this seed; the reward model is not shown cut or empty answers; val_loss is
    there, too. The default with a reward model is rm_score.
    """
    asked = {"split": "test", "num_samples": 2, "limit": 4, **ENDS}
    prompted = {**two, "prompts": tiny["prompts"], "reward_model": tiny["reward"]}
    found = run({"evaluate": asked}, prompted)
    alone = run(asked, {"model": tiny["other"], "prompts": tiny["prompts"]}, "alone", "evaluate")
    key = lambda row: (row["item_id"], row["sample_idx"], json.loads(row["extra_json"])["mode"])
    mine = {key(r): r for r in rows_of(found, "samples") if json.loads(r["extra_json"])["candidate"] == "2"}
    theirs = {key(r): r for r in rows_of(alone, "samples")}
    assert mine.keys() == theirs.keys() and len(mine) == 12
    assert all(mine[k]["output"] == theirs[k]["output"] for k in theirs)
    extras = [json.loads(row["extra_json"]) | {"output": row["output"]} for row in rows_of(found, "samples")]
    cut = [e["parts"]["reward_model"] for e in extras if e["finish"] == "length" or not e["output"].strip()]
    assert set(cut) <= {-1.0} and any(e["parts"]["reward_model"] != -1.0 for e in extras)
    summary = found["summary"]
    assert summary["select_on"] == "rm_score" and {"1/val_loss", "2/val_loss", "1/rm_score"} <= summary.keys()
    best = max("12", key=lambda label: summary[f"{label}/rm_score"])
    assert summary["selected"] == best
    assert tree_digest(found["outputs"]["model"]["path"]) == tree_digest(two[f"candidates.{best}"])
    decision = open_dataset(found["outputs"]["decision"]["path"]).manifest["meta"]["decision"]
    assert decision["promote"] and decision["candidate"] == f"model:m-{tree_digest(two[f'candidates.{best}'])[:12]}"
    assert "selection" in [report["name"] for report in found["reports"]]


def test_equal_candidates_one_candidate_and_validation_loss_alone(run, tiny, demonstrations):
    same = {"candidates.2": tiny["policy"], "candidates.10": tiny["policy"], "data": demonstrations}
    found = run({}, same)
    assert found["summary"]["selected"] == "2" and found["summary"]["select_on"] == "val_loss"
    assert found["summary"]["2/val_loss"] == found["summary"]["10/val_loss"] and "samples" not in found["outputs"]
    one = run({}, {"candidates.only": tiny["other"], "data": demonstrations}, "one")
    assert one["summary"]["selected"] == "only"
    # somebody's own directory, in which he may write again
    file = "model.safetensors"
    assert not Path(one["outputs"]["model"]["path"], file).samefile(Path(tiny["other"], file))


def test_a_candidate_without_a_finite_loss_is_not_chosen_and_ends_no_selection(
    run, tiny, demonstrations, tmp_path, monkeypatch
):
    from stages.select_checkpoint import Candidate

    measured = Candidate.loss
    monkeypatch.setattr(Candidate, "loss", lambda self: (math.nan, 5) if self.label == "1" else measured(self))
    names = {"candidates.1": tiny["policy"], "candidates.2": tiny["other"], "data": demonstrations}
    # of a template with variables of its own, by which the rows are read
    template = tmp_path / "loud.jinja"
    template.write_text(TEMPLATE)
    found = run({"evaluate": {"chat_template": str(template), "chat_template_kwargs": {"loud": True}}}, names)
    assert found["summary"]["selected"] == "2" == found["summary"]["lowest_val_loss"]
    decision = open_dataset(found["outputs"]["decision"]["path"]).manifest["meta"]["decision"]
    assert {row["candidate"] for row in decision["evidence"]} == {"2"}


def test_where_no_score_is_finite_nothing_is_chosen(run, tiny, two, monkeypatch):
    """A reward model that gives no number is no reason to take the first candidate."""
    from stages.reward_models.reward_scorers import ScalarScorer

    monkeypatch.setattr(ScalarScorer, "score", lambda self, responses: [math.nan] * len(responses))
    whole = {**ENDS, "max_completion_length": 40}  # cut and empty answers have a value that no reward model gives
    with pytest.raises(StageFailure, match="write another select_on, such as select_on=val_loss"):
        run(
            {"evaluate": {**whole, "split": "test", "limit": 3}},
            {**two, "prompts": tiny["prompts"], "reward_model": tiny["reward"]},
        )


@pytest.mark.parametrize("baseline, referee", [("references", "reward_model"), ("1", "judge")])
def test_win_rates_are_of_references_or_of_a_candidate(run, tiny, two, baseline, referee):
    """Without prompts those of data are answered, and its answers are what they are compared with."""
    given = {**two, referee: tiny["reward" if referee == "reward_model" else "other"]}
    short = {} if referee == "reward_model" else {"win_rate": {"template": "{context} {a} {b}"}}
    found = run({"select_on": "win_rate", "baseline": baseline, "evaluate": ENDS, **short}, given)
    summary = found["summary"]
    rates = {label: summary[f"{label}/win_rate"] for label in "12"}
    assert summary["selected"] == choose(rates) and all(0 <= rate <= 1 for rate in rates.values())
    if baseline == "1":
        assert rates["1"] == 0.5
    judged = rows_of(found, "judgements")
    assert len({row["item_id"] for row in judged}) == (12 if baseline == "references" else 6)
    if referee == "reward_model":
        of = {(row["item_id"], row["order"]): row["rating"] for row in judged}
        by_hand = [1 / (1 + math.exp(of[i, 1] - of[i, 0])) for i, order in of if i.startswith("2:") and not order]
        assert rates["2"] == pytest.approx(sum(by_hand) / len(by_hand))


def test_a_metric_of_evaluate_decides_and_one_that_is_none_is_refused_first(run, tiny, two):
    asked = {**two, "prompts": tiny["prompts"]}
    found = run({"select_on": "metric:length_mean", "evaluate": {**ENDS, "split": "test", "limit": 4}}, asked)
    assert found["summary"]["selected"] == min("12", key=lambda label: found["summary"][f"{label}/length_mean"])
    with pytest.raises(ConfigError, match="no per-item values for metric 'beauty': write one of"):
        run({"select_on": "metric:beauty"}, asked, "none")
    with pytest.raises(ConfigError, match="baseline=7 is no candidate; write references, or one of 1, 2"):
        run({"select_on": "win_rate", "baseline": "7"}, {**asked, "reward_model": tiny["reward"]}, "nobody")


def test_a_kill_behind_any_unit_changes_nothing(run, tiny, two, tmp_path):
    """Stopped behind every checkpoint in turn, among answers and among judgements, it ends with the same bytes."""
    config = {"select_on": "win_rate", "evaluate": {**ENDS, "chunk": 3}, "win_rate": {"block": 4}}
    given = {**two, "reward_model": tiny["reward"]}
    whole = run(config, given, "whole")

    class Killed(BaseException):
        pass

    def kill_at(count):
        def emit(event):
            if event["event"] == "progress":
                seen.append(event)
            if len(seen) > count:
                raise Killed

        seen = []
        return emit

    from stages.harness import Stage

    patched = Stage.progress  # progress is told at most twice a second, and a kill has to come behind each unit
    Stage.progress = lambda self, done, total, message="": self.emit("progress", done=done, total=total)
    ends = 0
    try:
        while ends < 30:
            try:
                killed = run(config, given, "killed", emit=kill_at(0))
                break
            except Killed:
                ends += 1
    finally:
        Stage.progress = patched
    assert ends >= 6 and killed["resumed_from"]
    for name, output in whole["outputs"].items():
        assert tree_digest(output["path"]) == tree_digest(killed["outputs"][name]["path"]), name
    assert whole["summary"] == killed["summary"]
    assert Path(tmp_path / "whole/metrics.jsonl").read_bytes() == Path(tmp_path / "killed/metrics.jsonl").read_bytes()


# -- an old run, and the registry --------------------------------------------------------------------------------------


@pytest.fixture()
def overfitted(tiny, tmp_path, monkeypatch):
    """(result of sft, ref of a reward model): every training row is answered yes, which the reward model likes, and the
    held-out ones are not.
    """
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POSTTRAIN_TRACKING", "off")
    rows = [
        complete_row(
            "demonstrations/1",
            {
                "messages": user(f"may I, {i}?") + assistant("yes" if i < 24 else "never"),
                "train_turns": [1],
                "kept": True,
            },
            dataset="made",
            source="s",
            origin="human",
            split="train" if i < 24 else "validation",
        )
        for i in range(32)
    ]
    write_dataset(tmp_path / "asked", "asked", "demonstrations/1", rows)
    pairs = [
        {
            "prompt": user(f"may I, {i}?"),
            "chosen": assistant("yes"),
            "rejected": assistant(("never", "no", "ask")[i % 3]),
        }
        for i in range(24)
    ]
    settings = {"learning_rate": 3e-3, "lr_schedule": "constant", "batch_size": 8, "num_train_epochs": 4}
    tuned = run_stage(
        "sft",
        {"model": tiny["policy"], "data": str(tmp_path / "asked")},
        {**settings, "max_length": 64, "publish_epochs": True},
        name_as="tuned",
    )
    reward = run_stage(
        "reward_model",
        {"model": tiny["policy"], "data": written(tmp_path / "pairs", "pairs", "pairs/1", pairs)},
        {"learning_rate": 1e-3, "batch_size": 8},
    )
    return tuned, reward.outputs["model"]


def test_reward_and_validation_loss_choose_different_epochs(overfitted):
    """Of a run that has ended: its epochs are models of the registry, and the chosen one gets an alias there; a second
    time nothing moves.
    """
    tuned, reward = overfitted
    epochs = {name: ref for name, ref in tuned.outputs.items() if name != "model"}
    assert list(epochs) == [f"epoch.{n}" for n in (1, 2, 3, 4)] and epochs["epoch.4"] == tuned.outputs["model"]
    assert {"tuned", *(f"tuned-epoch-{n}" for n in (1, 2, 3, 4))} <= registry.models().keys()
    assert store.resolve(f"{tuned.key[:12]}:epoch.2").ref == epochs["epoch.2"]
    assert store.resolve(tuned.key, "model").ref == tuned.outputs["model"]  # the one that is not of many
    with pytest.raises(store.StoreError, match="made no output epoch.9; write which of its outputs is meant"):
        store.resolve(f"{tuned.key[:12]}:epoch.9", "model")

    def select(*sets, alias="selected"):
        return promotion.select(
            [tuned.key[:12]],
            name=None,
            alias=alias,
            inputs=[f"reward_model={reward}"],
            sets=["evaluate.max_completion_length=8", *sets],
            seed=0,
        )

    by_reward, by_loss = select(), select("select_on=val_loss", alias="by-loss")
    scores = by_reward["scores"]
    assert scores["lowest_val_loss"] == by_loss["selected"] != by_reward["selected"]
    assert scores[f"{by_reward['selected']}/rm_score"] > scores[f"{by_loss['selected']}/rm_score"]
    assert by_reward["promoted"] and by_reward["name"] == "tuned"
    for value, alias in ((by_reward, "selected"), (by_loss, "by-loss")):
        assert store.resolve(f"model:tuned@{alias}").ref == epochs[f"epoch.{value['selected']}"] == value["model"]
    history = registry.models()["tuned"].history
    assert select() == by_reward and registry.models()["tuned"].history == history
    (decided,) = [e for e in history if e["event"] == "decision" and e["alias"] == "selected"]
    assert decided["evidence"]["metric"] == "rm_score" and len(decided["evidence"]["evidence"]) > 4
    assert (
        promotion.select(
            [epochs["epoch.1"]],
            name="other",
            alias="best",
            inputs=[f"reward_model={reward}"],
            sets=["evaluate.max_completion_length=8"],
            seed=0,
        )["model"]
        == by_reward["model"]
    )
    node = lineage.tree("model:tuned@selected")
    assert records.origin_of(node["digest"])["key"] == tuned.key, "who hands it on could not make it again"
    assert node["stage"] == "select_checkpoint" and node["inputs"]["candidates.1"]["stage"] == "sft"
    assert (
        records.read(by_reward["key"])["inputs"]["data"]["digest"]
        == records.read(tuned.key)["inputs"]["data"]["digest"]
    )


def test_what_has_no_epochs_is_told_how_to_get_them(overfitted, tiny):
    _, reward = overfitted
    with pytest.raises(ConfigError, match="published no epochs; train with publish_epochs=true"):
        promotion.select([reward], name=None, alias="selected", inputs=[], sets=[], seed=0)
    with pytest.raises(ConfigError, match="write --name NAME"):
        promotion.select([tiny["policy"], tiny["other"]], name=None, alias="selected", inputs=[], sets=[], seed=0)


# -- reward models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scorers(tiny, tmp_path_factory):
    """{"candidates.1" ... "data"}: two reward models of other heads, and pairs."""
    from stages.reward_models.reward_heads import RewardCard, new_reward_model, save_reward_model
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("scorers")
    tokenizer = AutoTokenizer.from_pretrained(tiny["policy"])
    for seed in (1, 2):
        save_reward_model(new_reward_model(tiny["policy"], seed=seed), tokenizer, root / str(seed), RewardCard())
    return {f"candidates.{seed}": str(root / str(seed)) for seed in (1, 2)} | {"data": tiny["pairs"]}


@pytest.mark.parametrize("metric", ["", "log_loss", "ece", "mean_margin", "accuracy_source_a", "probe/padded"])
def test_reward_models_are_chosen_by_held_out_rows(run, scorers, metric):
    """As stage reward_model judges its own; more accuracy and less loss is better."""
    from stages.reward_models.reward_eval import Unreported, judged, rows_of
    from stages.reward_models.reward_scorers import load_scorer

    config = {"split": "test", "eval_rows": 20} | ({"select_on": f"metric:{metric}"} if metric else {})
    found = run(config, scorers, metric.replace("/", "-") or "default")
    data = open_dataset(scorers["data"])

    class Stage:
        rank, seed_for = 0, staticmethod(lambda *_: 0)

        def rng(self, purpose, *counters):
            from stages.running import randomness

            return randomness.rng(0, "select_checkpoint", purpose, *counters)

    rows = rows_of(data, "test", 20)
    own = {
        label: judged(
            Unreported(Stage()), load_scorer(scorers[f"candidates.{label}"], "cpu"), data.kind, rows, "test", 64
        )
        for label in "12"
    }
    name, summary = metric or "accuracy", found["summary"]
    less = name in ("log_loss", "ece") or name.startswith("probe/")
    values = {label: own[label][name] * (-1 if less else 1) for label in "12"}
    best = max("12", key=lambda label: (values[label], -int(label)))
    assert summary["selected"] == best and summary["select_on"] == f"metric:{name}" and "lowest_val_loss" not in summary
    for label in "12":
        assert summary[f"{label}/{name}"] == pytest.approx(own[label][name], abs=1e-12)
    output = found["outputs"]["model"]
    assert output["role"] == "reward" and tree_digest(output["path"]) == tree_digest(scorers[f"candidates.{best}"])
    decision = open_dataset(found["outputs"]["decision"]["path"]).manifest["meta"]["decision"]
    assert decision["candidate"] == f"model:m-{tree_digest(output['path'])[:12]}"


@pytest.mark.parametrize(
    "config, inputs, told",
    [
        ({"select_on": "rm_score"}, {"reward_model": "reward"}, "the input reward_model would change nothing"),
        ({"select_on": "val_loss"}, {}, "write select_on=metric:accuracy"),
        ({"select_on": "metric:acuracy"}, {}, "did you mean 'accuracy'"),
        ({"select_on": "metric:auc"}, {}, "these rows give no auc .* with one of accuracy"),
        ({"max_length": 64}, {}, "max_length would change nothing"),
        ({"split": "validation"}, {}, r"no row in split 'validation'.*it has test \(24\)"),
        ({}, {"candidates.3": "policy"}, "candidate 1 is a reward model and 3 a policy"),
    ],
)
def test_what_is_of_policies_is_refused_of_reward_models(run, tiny, scorers, config, inputs, told):
    given = {**scorers, **{name: tiny[which] for name, which in inputs.items()}}
    with pytest.raises(ConfigError, match=told):
        run({"split": "test", **config}, given)


def test_rows_are_of_the_kind_that_candidates_learn_from(run, two, tiny, scorers, demonstrations):
    with pytest.raises(ConfigError, match="the candidates are reward models, and nobody judged .*one of pairs/1"):
        run({}, {**scorers, "data": demonstrations})
    with pytest.raises(ConfigError, match="the candidates are policies.*give --input data=DEMONSTRATIONS"):
        run({"split": "test"}, {**two, "data": tiny["pairs"]})


def test_a_kill_between_two_reward_models_changes_nothing(run, scorers, monkeypatch):
    from stages.reward_models import candidates

    whole = run({"split": "test"}, scorers, "whole")
    real, calls = candidates.load_scorer, []

    def killed_at_the_second(path, *more):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(path, *more)

    monkeypatch.setattr(candidates, "load_scorer", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run({"split": "test"}, scorers, "killed")
    again = run({"split": "test"}, scorers, "killed")
    assert calls == [scorers["candidates.1"], scorers["candidates.2"], scorers["candidates.2"]]
    assert again["resumed_from"] == 1 and again["summary"] == whole["summary"]
    for name in ("model", "decision"):
        assert tree_digest(again["outputs"][name]["path"]) == tree_digest(whole["outputs"][name]["path"])


def test_the_epochs_of_a_reward_model_are_selected_by_the_command(tiny, tmp_path, monkeypatch):
    """Its key alone says the candidates and the rows; the chosen one is a reward model with an alias, whose lineage,
    export, evaluation and removal are those of any other.
    """
    from flows.export import export
    from flows.remove import remove

    for name, value in {"POSTTRAIN_HOME": str(tmp_path / "home"), "POSTTRAIN_TRACKING": "off"}.items():
        monkeypatch.setenv(name, value)
    pairs = [
        {
            "prompt": user(f"what is {i}?"),
            "chosen": assistant("good " * (1 + i % 3)),
            "rejected": assistant("bad " * (1 + i % 2)),
            "split": "validation" if i % 5 == 0 else "train",
        }
        for i in range(25)
    ]
    data = written(tmp_path / "pairs", "pairs", "pairs/1", pairs)
    settings = {
        "batch_size": 10,
        "num_train_epochs": 3,
        "publish_epochs": True,
        "learning_rate": 2e-3,
        "max_length": 64,
    }
    made = run_stage("reward_model", {"model": tiny["policy"], "data": data}, settings, name_as="scorer")
    assert {name: model.aliases for name, model in registry.models().items()} == {
        "scorer": {"candidate": 1},
        **{f"scorer-epoch-{n}": {} for n in (1, 2, 3)},
    }
    sets = ["select_on=metric:log_loss"]
    told = promotion.select([made.key[:12]], name=None, alias="selected", inputs=[], sets=sets, seed=0)
    losses = {n: told["scores"][f"{n}/log_loss"] for n in "123"}
    assert told["selected"] == min(losses, key=losses.get) and told["promoted"]
    chosen = store.resolve("model:scorer@selected")
    assert chosen.digest == store.resolve(made.outputs[f"epoch.{told['selected']}"]).digest
    assert lineage.tree("model:scorer-epoch-1@latest")["stage"] == "reward_model"
    judged = run_stage(
        "evaluate",
        {"model": "model:scorer-epoch-1@latest", "pairs": data},
        {"target": "reward_model", "split": "validation"},
    )
    assert judged.metrics["log_loss"] == pytest.approx(losses["1"], abs=1e-6)
    export("model:scorer-epoch-1@latest", tmp_path / "exported")
    assert (tmp_path / "exported" / "reward_calibration.json").exists()
    other = next(n for n in "12" if n != told["selected"])
    remove([made.outputs[f"epoch.{other}"]], before=None, unalias=False, dry_run=False)
    assert not Path(made.paths[f"epoch.{other}"]).exists() and Path(chosen.path).exists()
