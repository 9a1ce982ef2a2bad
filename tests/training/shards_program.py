"""Run on one process or on ranks: load models, shard them where there are several ranks, publish them untrained. Not a
test module.

``everything DIR OUT``: one of each kind in DIR. ``peak MODEL OUT``: how much a process grows at most, in MiB.
``saved STATE GROWN``: by how much, where it saves 128 MiB.
"""

import gc
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stages.chat import load_tokenizer
from stages.models import pending, sharding
from stages.models.adapters import add_lora
from stages.models.modeling import load_policy, save_policy
from stages.models.tensor_files import TensorFiles, writer_of
from stages.reward_models.reward_heads import (
    RewardCard,
    load_reward_model,
    new_reward_model,
    save_reward_model,
    score_head,
)
from stages.running import ranks
from stages.settings import OptimizerConfig
from stages.training import Trainer

#: name: (directory, how it is loaded, LoRA settings)
CASES = {
    "policy": ("policy", "policy", {}),
    "tied": ("tied", "policy", {}),
    "gpt2": ("gpt2", "policy", {}),
    "bfloat16 in several files": ("half", "policy", {}),
    "adapter": ("policy", "policy", {"lora_rank": 2}),
    "adapter on a tied model": ("tied", "policy", {"lora_rank": 2}),
    "adapter on the output layer": ("policy", "policy", {"lora_rank": 2, "lora_targets": "v_proj,lm_head"}),
    "new reward head": ("policy", "new", {}),
    "reward head of three outputs on a reward model": ("reward", "three", {}),
    "reward model": ("reward", "reward", {}),
    "adapter under a reward head": ("reward", "reward", {"lora_rank": 2}),
    "encoder": ("encoder", "new", {}),
}


def load(path, how, config):
    shards = sharding.asked(config)
    if how == "policy":
        return load_policy(path, in_shards=shards)
    if how == "reward":
        return load_reward_model(path, in_shards=shards)
    return new_reward_model(path, seed=3, outputs=3 if how == "three" else 1, in_shards=shards)


def ready(path, how, lora):
    config = OptimizerConfig(sharding="full", **lora)
    model = load(path, how, config)
    assert pending.is_pending(model) == (ranks.world_size() > 1)
    model = add_lora(model, config, seed=5, task="CAUSAL_LM" if how == "policy" else "SEQ_CLS")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if how != "policy" and lora:
            score_head(model).weight.mul_(2.0)
    trainer = Trainer(model, None, config, 1)
    assert (trainer.root is not None) == (ranks.world_size() > 1) and not pending.is_pending(model)
    assert sorted(trainer.parameters) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    return model


def everything(root: str, out: str) -> None:
    for name, (folder, how, lora) in CASES.items():
        path = f"{root}/{folder}"
        model, target = ready(path, how, lora), Path(out, name)
        both = getattr(model, "reads_both_ways", None)
        assert both is None or both == ("encoder" in name)
        if how == "policy":
            save_policy(model, load_tokenizer(path), target, base="model:base")
        else:
            save_reward_model(model, AutoTokenizer.from_pretrained(path), target, RewardCard("bt"))
    model, target = ready(f"{root}/policy", "policy", {}), Path(out, "into several files")
    if ranks.world_size() > 1:
        target.mkdir(exist_ok=True)
        ranks.barrier()
        assert pending.write(model, target, "40KB")
    else:
        model.save_pretrained(target, max_shard_size="40KB")


def highest() -> float:
    """The most that this process has held, MiB (getrusage would count the process that this one was forked from)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def saved(state: str, out: str) -> None:
    tensors = {f"t{i}": torch.full((1 << 20,), float(i)) for i in range(32)}
    tensors |= {"step": torch.tensor(7.0), "half": torch.ones(3, 5, dtype=torch.bfloat16)}
    before = highest()
    writer_of(tensors)(Path(state))
    Path(out).write_text(str(highest() - before))
    stored = TensorFiles([Path(state)])
    assert all(torch.equal(stored.into(n, torch.empty_like(t)), t) for n, t in tensors.items())


def peak(path: str, out: str) -> None:
    tokenizer = load_tokenizer(path)
    small = AutoConfig.from_pretrained(path)
    small.num_hidden_layers = 1
    warm = f"{out}/warm"
    if ranks.rank() == 0:
        AutoModelForCausalLM.from_config(small).save_pretrained(warm)
    ranks.connect()
    ranks.barrier()
    save_policy(ready(warm, "policy", {}), tokenizer, f"{out}/small")  # imports, the process group, one unit's buffers
    gc.collect()
    # the highest so far is what is held now: that of the small model, which varies, would hide as much of the large
    # one's
    Path("/proc/self/clear_refs").write_text("5")
    before = highest()
    model = ready(path, "policy", {})
    loaded = highest() - before
    save_policy(model, tokenizer, f"{out}/model")
    grown = ranks.gather((loaded, highest() - before))
    if ranks.rank() == 0:
        Path(out, "grown.json").write_text(json.dumps(grown))


def main(what: str, *paths: str) -> None:
    torch.set_num_threads(1)
    {"everything": everything, "peak": peak, "saved": saved}[what](*paths)
