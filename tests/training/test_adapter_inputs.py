"""A directory with a LoRA adapter alone, as peft and TRL write it, given where a model is wanted."""

import json

import pytest
import torch

from stages.harness import execute
from stages.spec import ConfigError
from storage import store
from tasks.run import prepare
from tests.common import silent
from tests.platform.test_costs import command

IDS = torch.tensor([[1, 40, 50, 60, 70, 80]])


def adapter_of(base, folder, seed=1, load="AutoModelForCausalLM", named=None, rows=None, **settings):
    """An adapter with weights that are not 0 on a model directory, written by peft; the logits of peft's own forward.
    ``rows``: of the embedding, where tokens were added to it first."""
    import transformers
    from peft import LoraConfig, get_peft_model

    kind = {"num_labels": 1} if load == "AutoModelForSequenceClassification" else {}
    model = getattr(transformers, load).from_pretrained(base, dtype=torch.float32, **kind)
    torch.manual_seed(seed)
    if rows:
        model.resize_token_embeddings(rows)
    task = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSequenceClassification": "SEQ_CLS"}[load]
    model = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": task} | settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name or "modules_to_save" in name:
                weight.normal_(std=0.2)
        logits = model.eval()(input_ids=IDS).logits
    model.peft_config["default"].base_model_name_or_path = str(base) if named is None else named
    model.save_pretrained(folder)
    return logits


def logits_of(path, load="AutoModelForCausalLM"):
    import transformers

    with torch.no_grad():
        return getattr(transformers, load).from_pretrained(path).eval()(input_ids=IDS).logits


def of_adapter(spec, folder, base):
    made = spec("merge", {"method": "adapter"}, {}, f"merge-{folder.name}")
    given = {"adapter": ("file", folder), "base": ("model", base)}
    made["inputs"] = {n: {"kind": k, "path": str(p), "ref": str(p), "digest": n} for n, (k, p) in given.items()}
    return made


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "lora_alpha": 3, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 9}},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"init_lora_weights": "pissa"},
        {"rows": 303, "target_modules": ["v_proj"]},
    ],
    ids=["plain", "dora", "patterns", "whole-modules", "embedding", "pissa", "more-tokens"],
)
def test_what_comes_out_computes_what_peft_does(tiny, spec, tmp_path, settings):
    """To float32's rounding, with every form that peft writes; the base alone computes something else."""
    under = adapter_of(tiny["policy"], tmp_path / "lora", **settings)
    result = execute(of_adapter(spec, tmp_path / "lora", tiny["policy"]), silent)
    merged = logits_of(result["outputs"]["model"]["path"])
    assert torch.allclose(under, merged, rtol=0, atol=1e-5 * float(under.abs().max()))
    base = logits_of(tiny["policy"])
    assert not torch.allclose(under[..., : base.shape[-1]], base, atol=1e-2)
    assert result["summary"]["logits_largest_difference"] <= 1e-5 * result["summary"]["logits_largest"]


def test_a_stage_takes_an_adapter_for_a_model(tiny, data, home, tmp_path):
    """Evaluated as the merged model is, with the lineage of both; trained on as a whole. The second stage reuses it."""
    from storage import records

    adapter_of(tiny["policy"], tmp_path / "lora")
    asked = ["--input", f"prompts={tiny['prompts']}", "--set", "num_samples=0", "--set", "max_completion_length=8"]
    evaluate = ["stage", "evaluate", *asked, "--input", f"model={tmp_path / 'lora'}"]
    plan = command(*evaluate, "--dry-run")
    assert plan["key"] is None and f"put into {tiny['policy']} first" in plan["inputs"][0]["kind"] + str(plan)
    assert not list(records.all_records())
    made = command(*evaluate)
    (merge,) = [record for record in records.all_records() if record["stage"] == "merge"]
    whole = merge["outputs"]["model"]["ref"]
    assert set(merge["inputs"]) == {"adapter", "base"} and command("show", "model:lora@latest")["ref"] == whole
    again = command("stage", "evaluate", *asked, "--input", f"model={whole}")
    assert again["cached"] and again["key"] == made["key"]
    trained = command(
        "stage", "sft", "--input", f"model={tmp_path / 'lora'}", "--input", f"data={data['demonstrations']}", "--set",
        "max_steps=1", "--set", "max_length=64", "--set", "lora_rank=2", "--seed", "5",
    )  # fmt: skip
    assert records.find(trained["key"])["inputs"]["model"]["ref"] == whole
    assert len([record for record in records.all_records() if record["stage"] == "merge"]) == 1
    command(
        "export", trained["outputs"]["model"], tmp_path / "mine", "--adapter"
    )  # of ours: it names a ref as its base
    assert command(*evaluate[:-1], f"model={tmp_path / 'mine'}", "--set", "limit=2")["metrics"]
    assert json.loads((tmp_path / "mine" / "adapter_config.json").read_text())["base_model_name_or_path"] == whole
    assert store.resolve(whole, "model").path


def test_an_adapter_of_the_hub_is_recorded_by_its_id_and_commit(tiny, data, home, tmp_path, monkeypatch):
    """Its cache is one machine's: a record that named it could not be repeated on another."""
    from huggingface_hub import constants

    from storage import records
    from tasks.run import run_stage

    commit, cache = "a" * 40, tmp_path / "cache"
    snapshot = cache / "models--me--lora" / "snapshots" / commit
    adapter_of(tiny["policy"], snapshot)
    (cache / "models--me--lora/refs").mkdir()
    (cache / "models--me--lora/refs/main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = prepare("sft", {"model": "me/lora", "data": data["demonstrations"]}, {"max_steps": 1}).inputs["model"]
    (record,) = (one for one in records.all_records() if one["stage"] == "merge")
    assert record["outputs"]["model"]["ref"] == found.ref
    assert {record["inputs"]["adapter"][what] for what in ("ref", "given")} == {f"me/lora@{commit}"}
    # and that is what the stage by itself takes
    again = run_stage("merge", {"adapter": "me/lora", "base": tiny["policy"]}, {"method": "adapter"})
    assert again.cached and again.key == record["key"]
    with pytest.raises(store.OnlyAdapter, match=f"--input adapter=me/lora@{commit}"):
        store.resolve("me/lora", "model")


def test_an_adapter_of_a_reward_model_scores_as_peft_does(tiny, home, tmp_path):
    under = adapter_of(
        tiny["policy"], tmp_path / "rm", load="AutoModelForSequenceClassification", target_modules=["q_proj", "v_proj"],
        modules_to_save=["score"],
    )  # fmt: skip
    made = command(
        "stage", "evaluate", "--input", f"model={tmp_path / 'rm'}", "--input", f"pairs={tiny['pairs']}", "--set",
        "target=reward_model", "--set", "probe_pairs=0",
    )  # fmt: skip
    whole = store.resolve("model:rm@latest").path
    merged = logits_of(whole, "AutoModelForSequenceClassification")
    assert made["metrics"] and torch.allclose(under, merged, rtol=0, atol=1e-5 * float(under.abs().max()))


def test_what_cannot_be_put_in_is_refused_with_what_to_write(tiny, spec, home, tmp_path):
    from peft import IA3Config, get_peft_model
    from transformers import AutoModelForCausalLM

    from tests.evaluation.conftest import tiny_policy

    def refused(folder, base, said):
        with pytest.raises(ConfigError, match=said):
            execute(of_adapter(spec, tmp_path / folder, base), silent)

    adapter_of(tiny["policy"], tmp_path / "lost", named=str(tmp_path / "gone"))
    with pytest.raises(
        store.StoreError, match=rf"posttrain stage merge --set method=adapter --input adapter={tmp_path}"
    ):
        prepare("evaluate", {"model": tmp_path / "lost", "prompts": tiny["prompts"]})
    tiny_policy(str(tmp_path / "wide"), 0, head_dim=8)
    refused("lost", tmp_path / "wide", "size mismatch.*give the model that it was trained on as base")
    adapter_of(tiny["policy"], tmp_path / "partial", target_modules=["q_proj"], layers_to_transform=[0])
    told = json.loads((tmp_path / "partial" / "adapter_config.json").read_text())
    (tmp_path / "partial" / "adapter_config.json").write_text(json.dumps({**told, "layers_to_transform": [1]}))
    refused("partial", tiny["policy"], r"is of another model than LlamaForCausalLM: .*layers.1.*\(4 tensors in all\)")
    tiny_policy(str(tmp_path / "tied"), 0, tie_word_embeddings=True)
    adapter_of(tmp_path / "tied", tmp_path / "one", target_modules=["embed_tokens"])
    refused("one", tmp_path / "tied", "merge_and_unload, after untying")
    ia3 = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny["policy"]),
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    )
    ia3.save_pretrained(tmp_path / "ia3")
    refused("ia3", tiny["policy"], "peft_type=IA3")
    adapter_of(tiny["policy"], tmp_path / "empty")
    (tmp_path / "empty" / "adapter_model.safetensors").unlink()
    refused("empty", tiny["policy"], "holds no adapter that peft can read")
    for given, settings, said in (
        ({"adapter": tmp_path / "lost"}, {}, "method=linear reads no adapter"),
        ({"base": tiny["policy"]}, {"method": "adapter"}, "give --input adapter=DIR"),
        ({"models.a": tiny["policy"]}, {}, "give --input models.a=REF --input models.b=REF"),
        ({"models.a": tiny["policy"]}, {"method": "ties"}, "give base=REF"),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare("merge", given, settings)
