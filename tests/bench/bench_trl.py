"""Whole-step training speed and peak memory next to TRL 1.16: same model, rows, effective batch, precision, steps, one
run.

    python -m tests.bench.bench_trl --sft gsm8k_train.jsonl --pairs hh.jsonl.gz [--work sft reward_model align rl
    rl_trained] [--size 6 28] [--repeats 3]

Both sides are processes of their own, interleaved; ours goes through ``posttrain stage``. Tokens are the real
(unpadded) tokens of the rows, prompt and completion (a pair counts its prompt twice, as TRL's rows do); time is whole
steps after the first. GRPO is counted in prompts per second: ``rl`` starts from an untrained model, whose completions
all run to 64 tokens and all groups of which are trained on; ``rl_trained`` from one after 200 steps of sft on GSM8K,
whose completions end by themselves before 256 tokens and whose reward is the answer's format, so that some groups
agree. Needs the extra ``bench``.

Notes, 2 CPU cores of an AMD EPYC with nothing else running (a 2048 x 2048 product at 218 GFLOP/s at best), torch 2.13
float32, everything in one go: 6M with two interleaved repeats (medians), 28M with one. Memory is the process's peak
resident set. A pair's prompt counts twice in tokens, as in TRL's rows, and in the useful FLOP of the last column,
though it is computed once, which is how that column can pass 100%:

| work | ours | TRL | ratio | ours MiB | TRL MiB | ratio | of the matrix product's rate |
|---|---|---|---|---|---|---|---|
| sft, 6M | 5400 tokens/s | 1355 | 3.99 | 852 | 2369 | 0.36 | 77% |
| reward_model, 6M | 9830 tokens/s | 1891 | 5.20 | 772 | 2969 | 0.26 | 114% |
| align, 6M | 7687 tokens/s | 600 | 12.8 | 871 | 3854 | 0.23 | |
| rl, 6M | 4.89 prompts/s | 1.41 | 3.46 | 862 | 2394 | 0.36 | |
| sft, 28M | 1119 tokens/s | 436 | 2.56 | 1593 | 4008 | 0.40 | 81% |
| align, 28M | 1795 tokens/s | 204 | 8.80 | 1647 | 8757 | 0.19 | |
| rl, 28M | 1.32 prompts/s | 0.391 | 3.39 | 1734 | 4243 | 0.41 | |
| rl_trained, 28M | 1.03 prompts/s | 0.160 | 6.41 | 2586 | 6731 | 0.38 | |

Measured earlier, on machines of 191 to 288 GFLOP/s and in part beside other work: reward_model at 28M 1677 tokens/s
next to 369 (4.54, 0.21 of the memory, 87%); rl_trained at 6M 2.15 and 3.16 prompts/s next to 0.250 and 0.322 (8.6 and
9.8), at 28M 3.6 to 4.75 times TRL's speed; rl at 28M 2.51 and 2.57. What a step of rl at 28M must compute (each prompt
once, each token sampled once and trained on once) takes 2.7 s at the rate of the matrix product alone, where TRL takes
9.7 to 10.2: 3.6 to 3.8 times is the most that can be had there in float32.

Tried for sft at 28M, two processes taking turns step by step (14 to 16 pairs, medians of the ratio), and left out: huge
pages for tensors (0.998) and for all of malloc (1.02, quartiles 0.98 and 1.06), a head of twice as many rows at a time
(0.98). Attention of one item through batched products instead of the flash kernel: forward 0.5 to 1.2 times as fast,
backward 0.45 to 0.66. Attention is 10% of the step at 3% of its useful FLOP; joined products for q, k and v, and for
gate and up, are 0 to 6% faster by themselves, before the copy that joins their weights; not built.

Of an rl step at 6M (85 tokens of prompt, 32 completions of 64 tokens) about half is generation and half the update;
scoring and records are 4%.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, BATCH, LENGTH = 8, 16, 512
PROMPTS, GROUP = 4, 8  # of a GRPO step
#: Millions of parameters -> shape of the Llama.
SIZES = {
    6: {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5},
    28: {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 8},
}


#: GRPO: steps of sft before it, longest completion, and the reward on both sides: whether the completion matches. About
#: half of an untrained model's hold an x, so every group has a signal; with answers to check all groups would be dead,
#: which one side leaves out and the other does not.
GRPO = {"rl": (0, 64, "x"), "rl_trained": (200, 256, r"#### -?[\d,]+$")}


def read(path: str, n: int) -> list[dict]:
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for _, line in zip(range(n), handle)]


def matmul_peak() -> float:
    """Highest float32 rate of a 2048 x 2048 matrix product seen in 20, FLOP/s, on the threads that a training process
    gets.
    """
    code = (
        "import time, torch; a = torch.randn(2048, 2048); a @ a; best = 0.0\nfor _ in range(20):\n t ="
        " time.perf_counter(); a @ a; best = max(best, 2 * 2048**3 / (time.perf_counter() - t))\nprint(best)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def prepare(folder: Path, sft: str, pairs: str, size: int) -> dict[str, float]:
    """A Llama of ``size`` million parameters with a tokenizer trained on the rows, and three files of STEPS * BATCH
    rows.

    Returns the useful FLOP of training on one counted token, by work: 6 per weight of the layers, 6 per weight of the
    head on the trained tokens of sft, causal attention over the row's own tokens. A pair's prompt counts twice, as its
    tokens do.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from stages.base_model import CHAT_TEMPLATE

    n = STEPS * BATCH
    start = read(sft, 2048)
    questions = start[:n]
    dialogues = [r for r in read(pairs, 4 * n) if r["chosen"] != r["rejected"]]

    def split(text):
        at = text.rindex("\n\nAssistant:")
        return text[:at].replace("\n\nHuman:", "").strip(), text[at + len("\n\nAssistant:") :].strip()

    preference = []
    for row in dialogues:
        (p, c), (q, r) = split(row["chosen"]), split(row["rejected"])
        if p == q and p and c and r and c != r and len(p) + len(c) + len(r) < 2500 and len(preference) < n:
            preference.append({"prompt": p, "chosen": c, "rejected": r})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [r["question"] + r["answer"] for r in questions] + [r["prompt"] + r["chosen"] for r in preference]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=8192,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        **SIZES[size],
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")

    def chat(*turns):
        return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]

    rows = {
        "sft": [{"messages": chat(r["question"], r["answer"])} for r in questions],
        "pairs": [
            {"prompt": chat(r["prompt"]), "chosen": chat("", r["chosen"])[1:], "rejected": chat("", r["rejected"])[1:]}
            for r in preference
        ],
        "start": [{"messages": chat(r["question"], r["answer"])} for r in start],
        "prompts": [
            {"prompt": chat(r["question"]), "answer": r["answer"].split("####")[-1].strip()} for r in questions
        ],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))

    def tokens(messages, **kwargs):
        return min(LENGTH, len(fast.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)))

    per_token = 6 * sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.dim() == 2)
    pair = 6 * config.num_hidden_layers * config.hidden_size  # causal: half of forward and backward over T x T
    sft_rows = [(tokens(r["messages"]), tokens(r["messages"][:1], add_generation_prompt=True)) for r in rows["sft"]]
    texts = [tokens(r["prompt"] + r[side]) for r in rows["pairs"] for side in ("chosen", "rejected")]
    total = sum(t for t, _ in sft_rows)
    return {
        "sft": (
            per_token
            + (
                pair * sum(t * t for t, _ in sft_rows)
                + 6 * config.hidden_size * len(fast) * sum(t - p for t, p in sft_rows)
            )
            / total
        ),
        "reward_model": per_token + pair * sum(t * t for t in texts) / sum(texts),
    }


FILES = {"sft": "sft", "reward_model": "pairs", "align": "pairs", "rl": "prompts", "rl_trained": "prompts"}


def stage(name: str, folder: Path, model: Path | str, data: str, settings: dict) -> dict:
    """One run of a stage through the command line: what its last line says."""
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "stage",
        name,
        "--input",
        f"model={model}",
        "--input",
        f"data={folder / data}.jsonl",
        "--seed",
        str(time.time_ns() % 10**6),
        "--json",
    ]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    environment = {
        **os.environ,
        "POSTTRAIN_HOME": str(folder / "home"),
        "POSTTRAIN_TRACKING": "off",
        "POSTTRAIN_CHECKPOINT_SECONDS": "1000",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def started(work: str, folder: Path) -> str:
    """The model that a work starts from."""
    steps = GRPO.get(work, (0,))[0]
    if not steps:
        return str(folder / "model")
    done = stage(
        "sft",
        folder,
        folder / "model",
        "start",
        {
            "max_steps": steps,
            "batch_size": BATCH,
            "learning_rate": 2e-3,
            "warmup_ratio": 0.05,
            "min_lr_ratio": 0.05,
            "num_train_epochs": 4,
        },
    )
    return done["paths"]["model"]


def ours(work: str, folder: Path, model: str) -> dict:
    settings = {"max_steps": STEPS, "learning_rate": 1e-4, "max_grad_norm": 1.0}
    if work in GRPO:
        _, longest, pattern = GRPO[work]
        settings |= {
            "preset": "grpo",
            "prompts_per_step": PROMPTS,
            "num_generations": GROUP,
            "max_completion_length": longest,
            "temperature": 1.0,
            "beta": 0.0,
            "rewards": json.dumps([{"name": "match", "kind": "regex", "pattern": pattern}]),
        }
    else:
        settings |= {"batch_size": BATCH, "max_length": LENGTH}
    metrics = stage("rl" if work in GRPO else work, folder, model, FILES[work], settings)["metrics"]
    rate = metrics["steps_per_second"] * PROMPTS if work in GRPO else metrics["tokens_per_second"]
    return {"rate": rate, "peak_memory_mib": metrics["peak_memory_mib"]}


def trl(work: str, folder: Path, model: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_trl", "--peer", work, "--folder", str(folder), "--model", model],
        capture_output=True,
        text=True,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def peer(work: str, folder: Path, model: str) -> dict:
    """The TRL side, in this process."""
    import re
    import resource

    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = load_dataset(
        "json", data_files=str(folder / f"{FILES[work]}.jsonl"), split="train", cache_dir=str(folder / "cache")
    )

    class Clock(TrainerCallback):
        marks: list[float] = []

        def on_step_end(self, args, state, control, **kwargs):
            self.marks.append(time.perf_counter())

    def length(messages):
        return min(LENGTH, len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)))

    common = dict(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-4,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    if work == "sft":
        from trl import SFTConfig, SFTTrainer

        trainer = SFTTrainer(
            model,
            args=SFTConfig(**common, max_length=LENGTH, assistant_only_loss=True),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        per_step = sum(length(r["messages"]) for r in data) / len(data) * BATCH
    elif work == "reward_model":
        from trl import RewardConfig, RewardTrainer

        trainer = RewardTrainer(
            model,
            args=RewardConfig(**common, max_length=LENGTH),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
    elif work == "align":
        from trl import DPOConfig, DPOTrainer

        trainer = DPOTrainer(
            model,
            args=DPOConfig(**common, max_length=LENGTH),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
    else:
        from trl import GRPOConfig, GRPOTrainer

        _, longest, pattern = GRPO[work]

        def reward(completions, **kwargs):
            return [float(re.search(pattern, c[0]["content"]) is not None) for c in completions]

        grpo = {**common, "per_device_train_batch_size": PROMPTS * GROUP}
        trainer = GRPOTrainer(
            model,
            reward_funcs=reward,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
            args=GRPOConfig(
                **grpo,
                num_generations=GROUP,
                max_completion_length=longest,
                temperature=1.0,
                beta=0.0,
                loss_type="grpo",
            ),
        )
    if work in ("reward_model", "align"):
        per_step = (
            sum(length(r["prompt"] + r["chosen"]) + length(r["prompt"] + r["rejected"]) for r in data)
            / len(data)
            * BATCH
        )
    if work in GRPO:
        per_step = PROMPTS
    trainer.train()
    seconds = Clock.marks[-1] - Clock.marks[0]
    return {
        "rate": per_step * (STEPS - 1) / seconds,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sft", default="../shared/data/gsm8k_train.jsonl")
    parser.add_argument("--pairs", default="../shared/data/hh_harmless_base_test.jsonl.gz")
    parser.add_argument("--work", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--size", nargs="+", type=int, default=[6], choices=list(SIZES), help="millions of parameters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer")
    parser.add_argument("--folder")
    parser.add_argument("--model")
    given = parser.parse_args()
    if given.peer:
        print(json.dumps(peer(given.peer, Path(given.folder), given.model)))
        return
    peak = matmul_peak()
    print(f"float32 matrix product: {peak / 1e9:.0f} GFLOP/s\n")
    print(
        "| work | ours | TRL | ratio | ours MiB | TRL MiB | ratio | of the matrix product's rate"
        " |\n|---|---|---|---|---|---|---|---|"
    )
    for size in given.size:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            flops = prepare(folder, given.sft, given.pairs, size)
            for work in given.work:
                model = started(work, folder)
                runs = [(ours(work, folder, model), trl(work, folder, model)) for _ in range(given.repeats)]
                a, b = ({k: statistics.median(r[side][k] for r in runs) for k in runs[0][0]} for side in (0, 1))
                speed = statistics.median(r[0]["rate"] / r[1]["rate"] for r in runs)
                memory = statistics.median(r[0]["peak_memory_mib"] / r[1]["peak_memory_mib"] for r in runs)
                unit = "prompts/s" if work in GRPO else "tokens/s"
                share = f"{flops[work] * a['rate'] / peak:.0%}" if work in flops else ""
                print(
                    f"| {work}, {size}M | {a['rate']:.4g} {unit} | {b['rate']:.4g} | {speed:.2f} |"
                    f" {a['peak_memory_mib']:.0f} | {b['peak_memory_mib']:.0f} | {memory:.2f} | {share} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
