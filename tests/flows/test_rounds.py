"""Recipes in rounds and in stages, run to their end on a tiny model: which model answered, which one was the reference,
which rows were learned, and that what is logged follows from what is published.
"""

import functools
import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from flows.recipe import get_recipe, load_config
from stages.models.adapters import ADAPTER_FOLDER
from storage.files import tree_digest
from tests.common import assistant, not_drawn, user, written
from tests.evaluation.conftest import tiny_policy
from tests.flows.test_published_reasoning import Direct

#: What a random model writes ends at its first letter; its length in characters is its reward, one of five.
ENDS = {"max_completion_length": 24, "min_tokens": 2, "stop_strings": list("abcdefghijklmnopqrstuvwxyz")}
LEVELS = [
    {
        "name": "signs",
        "kind": "python",
        "source": "def score(prompt, completion, answer):\n    return len(completion) % 5 / 4\n",
    }
]
SAMPLE = {**ENDS, "num_generations": 4, "rewards": LEVELS}
PAIRS = {"validation_fraction": 0.3}
ALIGN = {"learning_rate": 1e-2, "batch_size": 8, "max_length": 128}


class Digested(Direct):
    """What is given to a stage has the digest of its content, as in the store."""

    digest = staticmethod(functools.cache(tree_digest))

    def out(self, label: str, output: str = "model") -> str:
        return self.found[label]["outputs"][output]

    def of(self, label: str, output: str = "model") -> str:
        """Digest of what a step made."""
        return self.digest(self.out(label, output))

    def logged(self, label: str) -> list[dict]:
        """Logged metrics of a training step's optimizer steps."""
        rows = [json.loads(line)["metrics"] for line in (self.root / label / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """{"policy", "prompts", "pairs", "rankings"}: paths. Pairs have a margin each (11 to train on, 2 to validate, 3 to
    test), rankings four answers.
    """
    root = tmp_path_factory.mktemp("given")
    tiny_policy(str(root / "policy"), 0)
    split = lambda i, n: "train" if i < n else "validation" if i < n + 2 else "test"
    prompts = [{"prompt": user(f"say {i}"), "answer": str(i), "split": split(i, 12)} for i in range(15)]
    pairs = [
        {
            "prompt": user(f"say {i}"),
            "chosen": assistant(f"it is {i}"),
            "rejected": assistant(f"{i * 7}"),
            "margin": float((5 * i) % 11),
            "split": split(i, 11),
        }
        for i in range(16)
    ]
    rankings = [
        {
            "prompt": user(f"say {i}"),
            "completions": [assistant(f"{'very ' * k}{i}") for k in range(4)],
            "ranks": [0, 1, 2, 3] if i % 2 else [2, 0, 1, 1],
            "split": split(i, 8),
        }
        for i in range(10)
    ]
    return {
        "policy": str(root / "policy"),
        "prompts": written(root / "prompts", "prompts", "prompts/1", prompts),
        "pairs": written(root / "pairs", "pairs", "pairs/1", pairs),
        "rankings": written(root / "rankings", "rankings", "rankings/1", rankings),
    }


def ran(recipe: str, root, given: dict, of_pairs: str | None = None, **values) -> Digested:
    """The recipe's rounds, without the evaluation behind them (test_published.py runs that); ``of_pairs``: which of the
    given data are data.pairs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            f"flows.{recipe}.conclusion", lambda run, source, config, models, *_: {"models": models}, raising=False
        )
        run = Digested(recipe, 3, root)
        data = {"prompts": given["prompts"], **({"pairs": given[of_pairs]} if of_pairs else {})}
        config = load_config(recipe, {"model": given["policy"], "seed": 3, "data": data, **values})
        run.result = get_recipe(recipe).method(run, config)
    return run


def token_ids(model: str, prompt: list[dict], answer: list[dict]) -> tuple[list[int], list[int]]:
    """(ids of a prompt, ids of its answer and end of turn)."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tuple(
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, answer[-1]["content"] + "<|im_end|>")
    )


def next_logits(model: str, before: list[int], said: list[int]) -> torch.Tensor:
    """Logits ``[len(said), vocabulary]`` of every token of an answer, by transformers alone."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return policy(torch.tensor([before + said])).logits[0, len(before) - 1 : -1].double()


def answer_log_prob(model: str, prompt: list[dict], answer: list[dict]) -> float:
    """Sum of log-probabilities of an answer and its end of turn."""
    before, said = token_ids(model, prompt, answer)
    return torch.log_softmax(next_logits(model, before, said), -1)[range(len(said)), said].sum().item()


def reward(model: str, row: dict, side: str = "completion") -> float:
    """Calibrated score of a row's answer by a reward model, by transformers alone; of a candidate as it was sampled."""
    scorer = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    card = json.loads((Path(model) / "reward_calibration.json").read_text())
    before, said = token_ids(model, row["prompt"], row[side])
    if side == "completion":
        ids = json.loads(row["extra_json"])["completion_ids"]
        said = ids if ids[-1] == said[-1] else said  # another stop token is no end of a turn
    with torch.no_grad():
        return scorer(torch.tensor([before + said])).logits.item() + card["bias"]


def margin(row: dict, policy: str, reference: str) -> float:
    """h_w - h_l of a pair."""
    chosen, rejected = (
        answer_log_prob(policy, row["prompt"], row[side]) - answer_log_prob(reference, row["prompt"], row[side])
        for side in ("chosen", "rejected")
    )
    return chosen - rejected


def dpo_loss(rows: list[dict], policy: str, reference: str, beta: float = 0.1) -> float:
    return float(np.mean([math.log1p(math.exp(-beta * margin(row, policy, reference))) for row in rows]))


def held_out(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["split"] == "validation"]


def references(run: Digested, label: str) -> set[str]:
    """Digests of the models whose log-probabilities were the reference's."""
    return {row["ref_model_hash"] for row in run.rows(label, "ref_logps")}


def answered_by(run: Digested, label: str) -> set[str]:
    """Digests of the models that sampled the candidates."""
    return {row["gen"]["checkpoint_id"] for row in run.rows(label, "candidates")}


# ---------------------------------------------------------------- online DPO, BPO, RS-DPO, RSO


@pytest.fixture(scope="module")
def online(given, tmp_path_factory):
    return ran(
        "online_dpo", tmp_path_factory.mktemp("online"), given, rounds=2, sample=SAMPLE, pairs=PAIRS, align=ALIGN
    )


def test_online_rounds_learn_from_answers_of_the_policy_before_under_the_first_one(online, given):
    start = tree_digest(given["policy"])
    assert [answered_by(online, f"sample_{k}") for k in (1, 2)] == [{start}, {online.of("align_1")}]
    assert [online.given[f"align_{k}"]["model"] for k in (1, 2)] == [start, online.of("align_1")]
    assert references(online, "align_1") == references(online, "align_2") == {start}
    for k in (1, 2):  # the pairs are of this round's answers, the best against the worst of each prompt
        by_id = {row["row_id"]: row for row in online.rows(f"sample_{k}", "candidates")}
        for row in online.rows(f"pairs_{k}", "data"):
            group = [r["reward"] for r in by_id.values() if r["prompt_id"] == row["prompt_id"] and r["kept"]]
            chosen, rejected = (by_id[name] for name in json.loads(row["extra_json"])["row_ids"])
            assert (chosen["reward"], rejected["reward"]) == (max(group), min(group))
            assert chosen["completion"] == row["chosen"] and rejected["completion"] == row["rejected"]
    first = [online.logged(f"align_{k}")[0]["loss"] for k in (1, 2)]
    assert first[0] == pytest.approx(math.log(2), abs=1e-4) and abs(first[1] - math.log(2)) > 1e-3
    rows = held_out(online.rows("pairs_2", "data"))
    assert rows and online.found["align_2"]["metrics"]["validation/loss"] == pytest.approx(
        dpo_loss(rows, online.out("align_2"), given["policy"]), rel=1e-3
    )


@pytest.fixture(scope="module")
def bpo(given, tmp_path_factory):
    return ran(
        "online_dpo",
        tmp_path_factory.mktemp("bpo"),
        given,
        rounds=2,
        reference="previous",
        total_steps=5,
        members=2,
        control=True,
        sample=SAMPLE,
        pairs=PAIRS,
        align={**ALIGN, "lora_rank": 4, "lora_alpha": 12},
    )


def test_bpos_policy_is_the_average_of_its_adapters_products(bpo, given):
    from safetensors.torch import load_file

    for k, base in ((1, given["policy"]), (2, bpo.out("average_align_1"))):
        assert [len(bpo.logged(f"align_{k}_{i}")) for i in (1, 2)] == [k + 1] * 2  # 5 steps: 2 and 3
        before, merged = (
            AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (base, bpo.out(f"average_align_{k}"))
        )
        adapters = [
            load_file(f"{bpo.out(f'align_{k}_{i}')}/{ADAPTER_FOLDER}/adapter_model.safetensors") for i in (1, 2)
        ]
        names = [name for name in adapters[0] if name.endswith("lora_A.weight")]
        assert names and not torch.equal(adapters[0][names[0]], adapters[1][names[0]])  # other seeds, other adapters
        wrong = 0.0
        for name in names:
            a, b = ([one[name.replace("lora_A", half)] for one in adapters] for half in ("lora_A", "lora_B"))
            mean = sum(3.0 * (y @ x) for x, y in zip(a, b)) / 2  # alpha / r = 3
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            torch.testing.assert_close(merged[weight], before[weight] + mean, atol=2e-5, rtol=1e-4)
            wrong = max(wrong, float((mean - 3.0 * (sum(b) / 2) @ (sum(a) / 2)).abs().max()))
        assert wrong > 1e-3  # mean(B) mean(A) is another model


def test_bpos_reference_is_the_policy_that_sampled_and_the_controls_is_the_last_one(bpo, given):
    start, first, last = tree_digest(given["policy"]), bpo.of("average_align_1"), bpo.of("average_align_2")
    assert answered_by(bpo, "sample_2") == references(bpo, "align_2_1") == references(bpo, "align_2_2") == {first}
    for k, i in ((1, 1), (1, 2), (2, 1), (2, 2)):  # the trust region is around the model that it starts from
        assert bpo.logged(f"align_{k}_{i}")[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert "control_sample_1" not in bpo.found and (
        bpo.given["control_align_1_1"] == {**bpo.given["align_1_1"], "reference": last}
    )
    assert bpo.given["control_align_1_1"]["model"] == start and answered_by(bpo, "control_sample_2") == {
        bpo.of("average_control_align_1")
    }
    assert {last} == references(bpo, "control_align_1_2") == references(bpo, "control_align_2_1")
    assert list(bpo.result["models"]) == ["start", "round_1", "round_2", "control_1", "control_2"]
    rows = held_out(bpo.rows("pairs_2", "data"))
    assert bpo.found["align_2_1"]["metrics"]["validation/loss"] == pytest.approx(
        dpo_loss(rows, bpo.out("align_2_1"), bpo.out("average_align_1")), rel=1e-3
    )


def test_a_control_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="control=true compares references, and align.method=simpo has none; write"):
        load_config("online_dpo", {"control": True, "align": {"method": "simpo"}})


def test_rs_dpo_takes_every_pair_above_the_gap_and_rso_pairs_of_what_was_accepted(given, tmp_path):
    rs = ran(
        "online_dpo",
        tmp_path / "rs",
        given,
        rounds=1,
        sample=SAMPLE,
        pairs={**PAIRS, "select": "gap", "tau": 0.2, "eta": 0.9},
        align=ALIGN,
    )
    groups: dict[str, list[dict]] = {}
    for row in rs.rows("sample_1", "candidates"):
        known = groups.setdefault(row["prompt_id"], [])
        if row["kept"] and row["completion"] not in [one["completion"] for one in known]:
            known.append(row)
    wanted = {
        (a["row_id"], b["row_id"])
        for group in groups.values()
        for x, y in combinations(group, 2)
        for a, b in ((x, y), (y, x))
        if 1 / (1 + math.exp(-(a["reward"] - b["reward"]) / 0.2)) > 0.9
    }
    rows = rs.rows("pairs_1", "data")
    assert {tuple(json.loads(row["extra_json"])["row_ids"]) for row in rows} == wanted and len(rows) == len(wanted)
    assert rs.found["pairs_1"]["metrics"]["rows_per_prompt"] == pytest.approx(len(wanted) / len(groups))
    assert max(row["pairs_in_group"] for row in rows) > 1  # and a prompt weighs the same, however many it has
    assert {round(row["weight"] * row["pairs_in_group"], 6) for row in rows} == {1.0}

    rso = ran(
        "online_dpo",
        tmp_path / "rso",
        given,
        rounds=1,
        sample={**SAMPLE, "num_generations": 10},
        pairs={**PAIRS, "select": "rso", "rso_accept": 4, "rso_beta": 0.2, "dedupe": False},
        align={**ALIGN, "beta": 0.05},
    )
    found, made = rso.found["pairs_1"]["metrics"], rso.rows("pairs_1", "data")
    assert found["accepted"] == 4 * (found["prompts"] - found["too_few"]) and found["acceptance_rate"] == pytest.approx(
        found["accepted"] / found["draws"]
    )
    used = [row[f"{side}_score"] for row in made for side in ("chosen", "rejected")]
    assert found["reward/used"] == pytest.approx(np.mean(used)) and found["reward/used"] > found["reward"]
    assert all(row["pairs_in_group"] <= 2 for row in made)


def test_ipo_md_answers_from_the_mixture_with_the_first_policy(given, tmp_path):
    """What is stored of an answer is its log-probability under softmax((1 - c) log pi + c log ref)."""
    coef, temperature = 0.25, 0.9
    run = ran(
        "online_dpo",
        tmp_path,
        given,
        rounds=2,
        sample={
            "mixture_coef": coef,
            "temperature": temperature,
            "num_generations": 8,
            "max_completion_length": 60,
            "max_prompts": 6,
            "rewards": LEVELS,
        },
        pairs={**PAIRS, "dedupe": False},
        align={**ALIGN, "method": "ipo"},
    )
    assert run.given["sample_2"]["model"] == run.of("align_1") and run.given["sample_2"]["reference"] == tree_digest(
        given["policy"]
    )
    whole = [row for row in run.rows("sample_2", "candidates") if row["kept"]]
    assert len(whole) > 3
    for row in whole[:4]:
        extra = json.loads(row["extra_json"])
        before, said = token_ids(given["policy"], row["prompt"], row["completion"])[0], extra["completion_ids"]
        policy, first = (
            torch.log_softmax(next_logits(path, before, said), -1) for path in (run.out("align_1"), given["policy"])
        )
        mixed = torch.log_softmax(((1 - coef) * policy + coef * first) / temperature, -1)
        assert extra["logp_sum"] == pytest.approx(mixed[range(len(said)), said].sum().item(), abs=1e-2)
        alone = torch.log_softmax(policy / temperature, -1)[range(len(said)), said].sum().item()
        assert abs(extra["logp_sum"] - alone) > 0.1


# ---------------------------------------------------------------- ensembles of reward models, D2PO


def test_what_an_ensemble_of_reward_models_says_follows_from_its_members(given, tmp_path):
    """The reward of best of n is the mean less the members' variance; their disagreement and what another judge thinks
    of what is selected are logged beside it.
    """
    learn = {"learning_rate": 1e-2, "batch_size": 8, "max_length": 128, "num_train_epochs": 3.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.reporting.reports._png", not_drawn)
        trained = Digested("reward", 3, tmp_path / "reward")
        config = load_config(
            "reward",
            {
                "model": given["policy"],
                "data": {"path": given["pairs"]},
                "members": 2,
                "reward_model": learn,
                "combine": {"combine": "uwo", "uncertainty_coef": 0.5, "probe_pairs": 0},
                "seed": 3,
            },
        )
        result = get_recipe("reward").method(trained, config)
        members = [trained.out(f"reward_{k}") for k in (0, 1)]
        assert trained.of("reward_0") != trained.of("reward_1")
        rows = [row for row in trained.rows("ingest", "data") if row["split"] == "test"]
        table = np.array(
            [[reward(path, row, side) for row in rows for side in ("chosen", "rejected")] for path in members]
        )
        scores = (table.mean(0) - 0.5 * table.var(0)).reshape(-1, 2)
        found = trained.found["reward_combine"]["metrics"]
        assert len(rows) == 3 and found["accuracy"] == pytest.approx((scores[:, 0] > scores[:, 1]).mean())
        assert found["disagreement"] == pytest.approx(table.std(0).mean(), rel=1e-3)
        assert result["reward_model"]["disagreement"] == found["disagreement"]

        run = ran(
            "rest",
            tmp_path / "rest",
            given,
            rounds=1,
            thresholds=[],
            reward_model=trained.out("reward_combine"),
            sample={**SAMPLE, "rewards": [{"name": "ensemble", "kind": "model"}, {**LEVELS[0], "weight": 0.0}]},
            improve={"max_steps": 1, "batch_size": 4, "max_length": 128},
        )
    known, best, spreads, levels = [], {}, [], {}
    for row in run.rows("grow_1", "candidates"):
        if row["kept"]:
            parts = {part["source"]: part["value"] for part in row["scores"]}
            one = np.array([reward(path, row) for path in members])
            assert row["reward"] == pytest.approx(one.mean() - 0.5 * one.var(), abs=1e-3)
            assert [parts["ensemble/member_m0"], parts["ensemble/member_m1"]] == pytest.approx(one, abs=1e-3)
            known.append(row["reward"])
            spreads.append(one.std())
            if row["reward"] > best.get(row["prompt_id"], -math.inf):
                best[row["prompt_id"]], levels[row["prompt_id"]] = row["reward"], parts["signs"]
    found = run.found["grow_1"]["metrics"]
    assert found["duplicates"] == 0 and found["reward"] == pytest.approx(np.mean(known))
    assert found["reward/ensemble/disagreement"] == pytest.approx(np.mean(spreads), rel=1e-2)
    assert found["reward/selected"] == pytest.approx(np.mean(list(best.values())))
    assert found["reward/signs/selected"] == pytest.approx(np.mean(list(levels.values())))


def test_d2po_buys_few_labels_a_round_and_the_reward_model_gives_the_others(given, tmp_path):
    run = ran(
        "d2po",
        tmp_path,
        given,
        rounds=2,
        gold={**SAMPLE, "max_prompts": 5},
        gold_pairs={"select": "all", "validation_fraction": 0.4},
        train_reward_model={"learning_rate": 1e-2, "batch_size": 8, "max_length": 128},
        sample={**ENDS, "num_generations": 4, "max_prompts": 6},
        pairs=PAIRS,
        align=ALIGN,
    )
    start = tree_digest(given["policy"])
    for k, policy in ((1, start), (2, run.of("align_1"))):
        assert answered_by(run, f"gold_{k}") == answered_by(run, f"sample_{k}") == {policy}
        for row in [row for row in run.rows(f"sample_{k}", "candidates") if row["kept"]][:4]:
            assert row["reward"] == pytest.approx(reward(run.out(f"discriminator_{k}"), row), abs=1e-3)
        assert references(run, f"align_{k}") == {start}
    assert [row["gold_labels"] for row in run.result["rounds"]] == [20, 20] and [
        row["silver_labels"] for row in run.result["rounds"]
    ] == [24, 24]
    asked = [{row["prompt_id"] for row in run.rows(f"gold_{k}", "candidates")} for k in (1, 2)]
    assert not asked[0] & asked[1]
    before = run.out("discriminator_1")  # what the model of round 1 is worth on the fresh labels of round 2
    rows = held_out(run.rows("gold_pairs_2", "data"))
    right = [reward(before, row, "chosen") > reward(before, row, "rejected") for row in rows]
    assert rows and run.result["rounds"][1]["accuracy_before"] == pytest.approx(np.mean(right), abs=1e-4)


# ---------------------------------------------------------------- sDPO, Curry-DPO


def test_every_stage_of_sdpo_starts_from_and_is_held_to_the_one_before(given, tmp_path):
    run = ran("sdpo", tmp_path, given, "pairs", curriculum={"order": "margin", "stages": 3}, align=ALIGN)
    rows = run.rows("curriculum", "data")
    stages = [[row for row in rows if row["stage_index"] == k] for k in range(3)]
    assert [len(stage) for stage in stages] == [4, 4, 3]  # 11 pairs, the remainder to the first
    for easy, hard in zip(stages, stages[1:]):
        assert min(row["margin"] for row in easy) >= max(row["margin"] for row in hard)
    before, path = tree_digest(given["policy"]), given["policy"]
    for k in range(3):
        assert run.given[f"align_{k}"] == {"model": before, "data": run.of("curriculum", "data")}
        assert references(run, f"align_{k}") == {before}
        assert {row["group_id"] for row in run.rows(f"align_{k}", "ref_logps")} == {
            row["row_id"] for row in [*stages[k], *held_out(rows)]
        }
        assert run.logged(f"align_{k}")[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert run.found[f"align_{k}"]["metrics"]["validation/loss"] == pytest.approx(
            dpo_loss(held_out(rows), run.out(f"align_{k}"), path), rel=1e-3
        )
        before, path = run.of(f"align_{k}"), run.out(f"align_{k}")


def test_curry_goes_from_the_widest_rank_gap_to_the_narrowest(given, tmp_path):
    run = ran(
        "sdpo",
        tmp_path,
        given,
        "rankings",
        curriculum={"order": "rank_gap", "stages": 3},
        ingest_pairs={"kind": "rankings/1"},
        align=ALIGN,
    )
    rows = [row for row in run.rows("curriculum", "data") if row["split"] == "train"]
    assert {k: {row["rank_gap"] for row in rows if row["stage_index"] == k} for k in range(3)} == {
        0: {3},
        1: {2},
        2: {1},
    }
    source = {row["row_id"]: row for row in run.rows("ingest_pairs", "data")}
    for row in rows:  # the best answer against another one, and no pair of tied ones
        ranking = source[json.loads(row["extra_json"])["row_ids"][0]]
        rank = lambda side: ranking["ranks"][ranking["completions"].index(row[side])]
        assert rank("chosen") == 0 and rank("rejected") == row["rank_gap"]
    assert len(rows) == 4 * 3 + 4 * 3
    assert [references(run, f"align_{k}") for k in (1, 2)] == [{run.of("align_0")}, {run.of("align_1")}]


# ---------------------------------------------------------------- ReST, ReST-EM, expert iteration, RAFT


def texts(rows) -> set[tuple[str, str]]:
    """(prompt, answer) of demonstrations or candidates."""
    return {
        (row["messages"][0]["content"], row["messages"][-1]["content"])
        if "messages" in row
        else (row["prompt"][0]["content"], row["completion"][-1]["content"])
        for row in rows
    }


def valid(rows) -> list[dict]:
    return [row for row in rows if row["kept"]]


def test_rest_keeps_less_at_every_threshold_and_learns_slower(given, tmp_path):
    run = ran(
        "rest",
        tmp_path,
        given,
        rounds=2,
        thresholds=[0.2, 0.6, 1.5],
        sample=SAMPLE,
        improve={
            "learning_rate": 1e-2,
            "batch_size": 8,
            "max_length": 128,
            "lr_schedule": "constant",
            "warmup_ratio": 0.0,
        },
    )
    policy = tree_digest(given["policy"])
    for k in (1, 2):
        assert answered_by(run, f"grow_{k}") == {policy}
        candidates = valid(run.rows(f"grow_{k}", "candidates"))
        for step, threshold in ((1, 0.2), (2, 0.6)):
            kept = run.rows(f"filter_{k}_{step}", "selected")
            above = [row for row in candidates if row["reward"] > threshold]
            assert texts(kept) == texts(above) and run.given[f"improve_{k}_{step}"] == {
                "model": policy,
                "data": run.of(f"filter_{k}_{step}", "selected"),
            }
            distinct = {pair: row["reward"] for row in above for pair in texts([row])}
            found = run.found[f"filter_{k}_{step}"]["metrics"]
            assert found["selected"] == len(distinct) and found["reward/selected"] == pytest.approx(
                np.mean(list(distinct.values()))
            )
            rates = {row["learning_rate"] for row in run.logged(f"improve_{k}_{step}")}
            assert list(rates) == pytest.approx([1e-2 / 2 ** (step - 1)])
            policy = run.of(f"improve_{k}_{step}")
        # nothing lies above 1.5: the round ends there, and says so
        assert run.found[f"filter_{k}_3"]["metrics"]["selected"] == 0 and f"improve_{k}_3" not in run.found
    sizes = [run.found[f"filter_1_{step}"]["metrics"]["selected"] for step in (1, 2, 3)]
    assert sizes[0] > sizes[1] > sizes[2] == 0
    assert list(run.result["models"]) == ["start", "round_1_1", "round_1_2", "round_2_1", "round_2_2"]


def test_rest_em_starts_anew_and_expert_iteration_goes_on(given, tmp_path):
    even = [{**LEVELS[0], "name": "even", "source": LEVELS[0]["source"].replace("% 5 / 4", "% 2 == 0")}]
    improve = {"learning_rate": 1e-2, "batch_size": 8, "max_length": 128}
    em = ran(
        "rest",
        tmp_path / "em",
        given,
        rounds=2,
        thresholds=[],
        improve_from="start",
        sample={**SAMPLE, "rewards": even, "select": "all_correct", "max_per_prompt": 1},
        improve=improve,
    )
    start = tree_digest(given["policy"])
    assert [em.given[f"improve_{k}_1"]["model"] for k in (1, 2)] == [start, start]
    assert [answered_by(em, f"grow_{k}") for k in (1, 2)] == [{start}, {em.of("improve_1_1")}]
    for k in (1, 2):
        right = texts([row for row in valid(em.rows(f"grow_{k}", "candidates")) if row["correct"]])
        kept = texts(em.rows(f"grow_{k}", "selected"))
        assert kept <= right and len(kept) == len({prompt for prompt, _ in right})  # one of each that was solved

    expert = ran(
        "rest",
        tmp_path / "expert",
        given,
        rounds=2,
        thresholds=[],
        sample={**SAMPLE, "max_prompts": 6},
        improve=improve,
    )
    assert [expert.given[f"improve_{k}_1"]["model"] for k in (1, 2)] == [start, expert.of("improve_1_1")]
    seen = []
    for k in (1, 2):
        candidates = valid(expert.rows(f"grow_{k}", "candidates"))
        best = {}
        for row in candidates:
            best[row["prompt_id"]] = max(best.get(row["prompt_id"], -1.0), row["reward"])
        kept = texts(expert.rows(f"grow_{k}", "selected"))
        assert len(kept) == len(best) and all(
            any(row["reward"] == best[row["prompt_id"]] and texts([row]) == {one} for row in candidates) for one in kept
        )
        seen.append(set(best))
    assert len(seen[0]) == len(seen[1]) == 6 and not seen[0] & seen[1]  # RAFT: every round a batch of its own


def test_rounds_that_gain_nothing_are_the_last(given, tmp_path):
    """Nothing that the model writes is right, before or after."""
    run = ran(
        "rest",
        tmp_path,
        given,
        rounds=3,
        stop_when_flat=True,
        thresholds=[],
        sample={**SAMPLE, "max_prompts": 4},
        improve={"max_steps": 1, "batch_size": 4, "max_length": 128},
        evaluate={**ENDS, "num_samples": 1, "greedy": False},
    )
    assert run.given["validate_1"]["model"] == run.of("improve_1_1") and "grow_2" not in run.found
    assert run.result["validation"] == [{"round": k, "accuracy": 0.0} for k in (0, 1)]
    held = {row["prompt_id"] for row in held_out(run.rows("ingest_prompts", "data"))}
    assert len(held) == 2 and {row["prompt_id"] for row in run.rows("validate_1", "samples")} == held
