"""Whole-step training speed and peak memory next to TRL 1.16: same model, rows, effective batch, precision, steps, one
run.

    python -m tests.bench.bench_trl --sft gsm8k_train.jsonl --pairs hh.jsonl.gz [--work sft reward_model align rl
    rl_trained] [--size 6 28] [--repeats 3]

and on one GPU, with mixed precision (float32 weights, bfloat16 products), a Llama of the shape of Llama 3.2 1B:

    python -m tests.bench.bench_trl --sft gsm8k_train.jsonl --pairs hh.jsonl.gz --device cuda --dtype bfloat16
    --size 1000 --repeats 1 --batch 32 --prompts 16 --peer-batch sft=16 reward_model=8 align=4 rl=32 rl_trained=16

Both sides are processes of their own, interleaved; ours goes through ``posttrain stage``. Tokens are the real
(unpadded) tokens of the rows, prompt and completion (a pair counts its prompt twice, as TRL's rows do); time is whole
steps after the first. GRPO is counted in prompts per second: ``rl`` starts from an untrained model, whose completions
all run to 64 tokens and all groups of which are trained on; ``rl_trained`` from one after 200 steps of sft on GSM8K
(``--pretrain-steps``), whose completions end by themselves before 256 tokens and whose reward is the answer's format,
so that some groups agree. DPO's reference log-probs are in TRL's steps and before the first of ours. Rows are printed
as they come, a side that failed with its error's last lines; stderr tells of each run, of completions' lengths and
rewards too. Needs the extra ``bench``.

On a GPU memory is what torch allocated there at most. The weights lie in bfloat16 on disk under ``--dtype bfloat16``,
both sides train float32 ones (ours keeps a frozen reference as it is stored, TRL in float32), and ours publishes
bfloat16. TRL attends with sdpa, its default (flash-attn is another package), generates with transformers' ``generate``
under bfloat16 autocast, where ours has ``sampling_dtype=bfloat16``, and recomputes no activations; where its whole
batch does not fit, ``--peer-batch`` takes parts of it. The rate of the matrix product is then the median of 20 of 8192
x 8192 in ``--dtype``.

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

On another machine of 2 AMD cores (194 GFLOP/s), 6 steps, one repeat: sft at 28M 1013 tokens/s next to 502 (2.02, 0.40 of
the memory, 83%), align 1572 next to 238 (6.59, 0.19).

Measured earlier, on machines of 191 to 288 GFLOP/s and in part beside other work: reward_model at 28M 1677 tokens/s
next to 369 (4.54, 0.21 of the memory, 87%); rl_trained at 6M 2.15 and 3.16 prompts/s next to 0.250 and 0.322 (8.6 and
9.8), at 28M 3.6 to 4.75 times TRL's speed; rl at 28M 2.51 and 2.57. What a step of rl at 28M must compute (each prompt
once, each token sampled once and trained on once) takes 2.7 s at the rate of the matrix product alone, where TRL takes
9.7 to 10.2: 3.6 to 3.8 times is the most that can be had there in float32.

On 2 cores of an Intel Xeon with AVX-512 (a 2048 x 2048 product at 434 GFLOP/s in the first row, 355 to 365 in the
others: other tenants), 28M, one repeat each, nothing else running. MKL, which TRL multiplies with, has its best code
there, so that the ratios are smaller:

| work | ours | TRL | ratio | ours MiB | TRL MiB | ratio | of the matrix product's rate |
|---|---|---|---|---|---|---|---|
| sft, 28M | 1694 tokens/s | 794 | 2.13 | 1624 | 4236 | 0.38 | 63% |
| sft, 28M | 1293 tokens/s | 660 | 1.96 | 1606 | 4290 | 0.37 | 57% |
| reward_model, 28M | 2219 tokens/s | 539 | 4.12 | 1560 | 7740 | 0.20 | 91% |
| align, 28M | 1955 tokens/s | 282 | 6.93 | 1680 | 8537 | 0.20 | |
| rl, 28M | 0.862 and 1.064 prompts/s | 0.477 and 0.491 | 1.81 and 2.17 | 1655 | 4245 | 0.39 | |

Of such an sft step 68% of the time are matrix products, at 93% of the rate of the large one; attention takes 11% for 3%
of the FLOP, the rest is products of elements, norms, activations, copies and the optimizer, each bound by memory.
Attention of one conversation as batched products is 0.71 of the flash kernel's time there forward and backward (12.7 ms
in the place of 17.8 for 14 conversations of 186 tokens): 3% of a step, not built. A profile says what fused kernels in C
could give at most: operations on elements and their calls are 17% of a step, so 2.06 times TRL's speed would become
2.5 only if they cost nothing. Tried there and left out: chunks of 256, 512 and 2048 tokens (0.91, 1.0, 1.01), oneDNN's
products while sampling (1.0), memory that is never given back to the system (1.0), two processes of one thread each in
the place of two threads (1.06).

Tried for sft at 28M, two processes taking turns step by step (14 to 16 pairs, medians of the ratio), and left out: huge
pages for tensors (0.998) and for all of malloc (1.02, quartiles 0.98 and 1.06), a head of twice as many rows at a time
(0.98). Attention of one item through batched products instead of the flash kernel: forward 0.5 to 1.2 times as fast,
backward 0.45 to 0.66. Attention is 10% of the step at 3% of its useful FLOP; joined products for q, k and v, and for
gate and up, are 0 to 6% faster by themselves, before the copy that joins their weights; not built.

Of an rl step at 6M (85 tokens of prompt, 32 completions of 64 tokens) about half is generation and half the update;
scoring and records are 4%.

Notes, one NVIDIA H200 (bfloat16 product of 8192 x 8192 at 734 to 783 TFLOP/s), torch 2.11, transformers 5.17, one
repeat of 6 steps, ``--size 1000 --batch 64 --micro-batch-tokens 16384 --peer-batch sft=64 align=16 reward_model=16``;
``rl`` 5 steps of 16 prompts, 8 completions each, ``--prompts 16 --peer-batch rl=64``:

| work | ours | TRL | ratio | ours MiB | TRL MiB | ratio | of the matrix product's rate |
|---|---|---|---|---|---|---|---|
| sft, 1000M | 62192 tokens/s | 9401 | 6.62 | 32477 | 66111 | 0.49 | 57% |
| reward_model, 1000M | 103162 tokens/s | 14585 | 7.07 | 30254 | 53934 | 0.56 | 83% |
| align, 1000M | 91883 tokens/s | 8730 | 10.5 | 32190 | 62956 | 0.51 | |
| rl, 1000M | 26.7 prompts/s | 5.39 | 4.96 | 30048 | 46449 | 0.65 | |

Of such a step of sft of 187 ms (10,600 tokens, before micro-batches were filled up to few lengths) kernels took 152:
matrix products 91, AdamW and the clip 14, attention 9, norms, rotations, gates and sums 15, the LM head's own kernels
2, changes of type 9, additions of gradients 7. Before attention was one call and the operations between products one
kernel each the step took 750 to 800 ms, of which 484 were backward of attention behind masks; looking for cuBLAS
products of new shapes took 50 ms of the processor in each micro-batch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTH = 512
SMALL = {"num_attention_heads": 8, "num_key_value_heads": 8}
#: Millions of parameters -> shape of the Llama.
SIZES = {
    6: {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5, **SMALL},
    28: {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 8, **SMALL},
    1000: {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
#: Tokens of the vocabulary where it is not just what the rows give (at most 8192), and learning rate of the sft before
#: ``rl_trained``.
VOCABULARY, PRETRAIN_RATE = {1000: 128256}, {6: 2e-3, 28: 2e-3, 1000: 5e-4}


#: GRPO: longest completion, and the reward on both sides: whether the completion matches. About half of an untrained
#: model's hold an x, so every group has a signal; with answers to check all groups would be dead, which one side leaves
#: out and the other does not.
GRPO = {"rl": (64, "x"), "rl_trained": (256, r"#### -?[\d,]+$")}


class Failed(Exception):
    """A process ended with an error; says its last lines."""

    def __init__(self, done: subprocess.CompletedProcess):
        lines = [line.strip() for line in done.stderr.strip().splitlines() if line.strip()]
        super().__init__(" / ".join(lines[-3:])[-500:] or f"exit status {done.returncode}")
        print(done.stderr[-3000:], file=sys.stderr, flush=True)


def read(path: str, n: int) -> list[dict]:
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for _, line in zip(range(n), handle)]


def environment(device: str) -> dict[str, str]:
    """Of both sides' processes: one GPU, or none."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if device == "cuda" else ""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": card, "HF_HUB_OFFLINE": "1"}


def matmul_peak(device: str, dtype: str) -> tuple[float, str]:
    """Rate of a product of two matrices of random numbers, FLOP/s, on what a training process gets, and the GPU's name.

    On the CPU the highest of 20 of 2048 x 2048; on a GPU, which slows down under load, the median of 20 of 8192 x 8192
    after as many that are not counted.
    """
    code = f"""
import statistics, time, torch
n = {8192 if device == "cuda" else 2048}
a, b = (torch.randn(n, n, device="{device}", dtype=torch.{dtype}) for _ in range(2))
wait = torch.cuda.synchronize if {device == "cuda"} else lambda: None
rates = []
for _ in range(40):
    wait()
    start = time.perf_counter()
    a @ b
    wait()
    rates.append(2 * n**3 / (time.perf_counter() - start))
print({"statistics.median" if device == "cuda" else "max"}(rates[20:]))
print({'torch.cuda.get_device_name() + ", "' if device == "cuda" else '""'} + "torch " + torch.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(device))
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    rate, name = done.stdout.strip().splitlines()
    return float(rate), name


def filled(tokenizer, size: int):
    """The tokenizer with so many tokens more that its vocabulary has ``size``. No text is encoded to them; where they
    are sampled, as many of them as of the others hold an x (:data:`GRPO`).
    """
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    every = len(vocabulary) // sum("x" in token for token in vocabulary)
    for i in range(tokenizer.get_vocab_size(), size):
        vocabulary[f"~{i}" + "x" * (i % every == 0)] = i
    return Tokenizer.from_str(json.dumps(content))


def prepare(folder: Path, given: argparse.Namespace, size: int) -> dict[str, float]:
    """A Llama of ``size`` million parameters with a tokenizer trained on the rows, and files of as many rows as the
    steps take.

    Returns the useful FLOP of training on one counted token, by work: 6 per weight of the layers, 6 per weight of the
    head on the trained tokens of sft, causal attention over the row's own tokens. A pair's prompt counts twice, as its
    tokens do.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from stages.base_model import CHAT_TEMPLATE

    n = given.steps * given.batch
    start = read(given.sft, max(2048, n, given.steps * given.prompts))
    questions = start[: max(n, given.steps * given.prompts)]
    dialogues = [r for r in read(given.pairs, 4 * n) if r["chosen"] != r["rejected"]]

    def split(text):
        at = text.rindex("\n\nAssistant:")
        return text[:at].replace("\n\nHuman:", "").strip(), text[at + len("\n\nAssistant:") :].strip()

    preference = []
    for row in dialogues:
        (p, c), (q, r) = split(row["chosen"]), split(row["rejected"])
        if p == q and p and c and r and c != r and len(p) + len(c) + len(r) < 2500 and len(preference) < n:
            preference.append({"prompt": p, "chosen": c, "rejected": r})
    if len(preference) < n or len(questions) < max(n, given.steps * given.prompts):
        raise SystemExit(
            f"{given.sft} gives {len(questions)} rows and {given.pairs} {len(preference)}, fewer than the steps take;"
            " write a smaller --batch, --prompts or --steps"
        )
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
            show_progress=False,
        ),
    )
    vocabulary = given.vocabulary or VOCABULARY.get(size)
    tokenizer = filled(tokenizer, vocabulary) if vocabulary else tokenizer
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        **SIZES[size],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    with torch.device(given.device):
        model = LlamaForCausalLM(config)
    per_token = 6 * sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.dim() == 2)
    model.to(getattr(torch, given.dtype)).save_pretrained(folder / "model")
    del model
    if given.device == "cuda":
        torch.cuda.empty_cache()
    fast.save_pretrained(folder / "model")

    def chat(*turns):
        return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]

    rows = {
        "sft": [{"messages": chat(r["question"], r["answer"])} for r in questions[:n]],
        "pairs": [
            {"prompt": chat(r["prompt"]), "chosen": chat("", r["chosen"])[1:], "rejected": chat("", r["rejected"])[1:]}
            for r in preference
        ],
        "start": [{"messages": chat(r["question"], r["answer"])} for r in start[:2048]],
        "prompts": [
            {"prompt": chat(r["question"]), "answer": r["answer"].split("####")[-1].strip()} for r in questions
        ],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))

    def tokens(messages, **kwargs):
        return min(LENGTH, len(fast.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)))

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


def stage(name: str, folder: Path, device: str, model: Path | str, data: str, settings: dict) -> dict:
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
    variables = {
        **environment(device),
        "POSTTRAIN_HOME": str(folder / "home"),
        "POSTTRAIN_TRACKING": "off",
        "POSTTRAIN_CHECKPOINT_SECONDS": "1000",
        "POSTTRAIN_DEVICE": "cuda:0" if device == "cuda" else "cpu",
    }
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise Failed(done)
    return json.loads(done.stdout.strip().splitlines()[-1])


def common(given: argparse.Namespace) -> dict:
    """Settings of all our runs."""
    settings = {"max_grad_norm": 1.0}
    if given.dtype != "float32":
        settings |= {"compute_dtype": given.dtype, "save_dtype": given.dtype}
    if given.micro_batch_tokens:
        settings["max_tokens_per_micro_batch"] = given.micro_batch_tokens
    return settings


def started(work: str, folder: Path, given: argparse.Namespace, size: int) -> str:
    """The model that a work starts from."""
    if work != "rl_trained":
        return str(folder / "model")
    settings = common(given) | {
        "max_steps": given.pretrain_steps,
        "batch_size": given.batch,
        "learning_rate": PRETRAIN_RATE[size],
        "warmup_ratio": 0.05,
        "min_lr_ratio": 0.05,
        "num_train_epochs": max(4, math.ceil(given.pretrain_steps * given.batch / 2048)),
    }
    return stage("sft", folder, given.device, folder / "model", "start", settings)["paths"]["model"]


def ours(work: str, folder: Path, model: str, given: argparse.Namespace) -> dict:
    settings = common(given) | {"max_steps": given.steps, "learning_rate": 1e-4}
    if work in GRPO:
        longest, pattern = GRPO[work]
        settings |= {
            "preset": "grpo",
            "prompts_per_step": given.prompts,
            "num_generations": given.group,
            "max_completion_length": longest,
            "generation_batch": max(64, given.prompts * given.group),
            "sampling_dtype": given.dtype,
            "temperature": 1.0,
            "beta": 0.0,
            "rewards": json.dumps([{"name": "match", "kind": "regex", "pattern": pattern}]),
        }
    else:
        settings |= {"batch_size": given.batch, "max_length": LENGTH}
    done = stage("rl" if work in GRPO else work, folder, given.device, model, FILES[work], settings)
    metrics = done["metrics"]
    for path in done["paths"].values():  # a disk holds few models; where no group had a signal, it is that of the start
        if path != model:
            shutil.rmtree(path)
    rate = metrics["steps_per_second"] * given.prompts if work in GRPO else metrics["tokens_per_second"]
    memory = metrics["peak_gpu_memory_mib" if given.device == "cuda" else "peak_memory_mib"]
    return {"rate": rate, "peak_memory_mib": memory, "told": told(metrics)}


def trl(work: str, folder: Path, model: str, given: argparse.Namespace) -> dict:
    module = [sys.executable, "-m", "tests.bench.bench_trl"]
    done = subprocess.run(
        [*module, *sys.argv[1:], "--peer", work, "--folder", str(folder), "--model", model],
        capture_output=True,
        text=True,
        env={**environment(given.device), "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    if done.returncode:
        raise Failed(done)
    return json.loads(done.stdout.strip().splitlines()[-1])


def told(metrics: dict) -> dict:
    """What says whether both sides did the same work in GRPO: completions' mean length in tokens, mean reward, and share
    of groups that agree, whose advantages are 0.
    """
    names = {"reward": "reward", "completions/mean_length": "length"}
    names |= {"frac_reward_zero_std": "agree"}
    found = {names.get(name.removeprefix("last/")): value for name, value in metrics.items()}
    return {name: value for name, value in found.items() if name}


def peer(work: str, folder: Path, model: str, given: argparse.Namespace) -> dict:
    """The TRL side, in this process."""
    import re
    import resource

    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = load_dataset(
        "json", data_files=str(folder / f"{FILES[work]}.jsonl"), split="train", cache_dir=str(folder / "cache")
    )

    class Clock(TrainerCallback):
        marks: list[float] = []

        def on_step_end(self, args, state, control, **kwargs):
            if given.device == "cuda":
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    def length(messages):
        return min(LENGTH, len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)))

    whole = given.prompts * given.group if work in GRPO else given.batch
    part = peer_batch(given, work)
    settings = dict(
        output_dir=str(folder / "out"),
        max_steps=given.steps,
        per_device_train_batch_size=part,
        gradient_accumulation_steps=whole // part,
        learning_rate=1e-4,
        report_to="none",
        save_strategy="no",
        logging_steps=given.steps,
        use_cpu=given.device == "cpu",
        bf16=given.dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    others = dict(train_dataset=data, processing_class=tokenizer, callbacks=[Clock()])
    if work == "sft":
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(**settings, max_length=LENGTH, assistant_only_loss=True)
        trainer = SFTTrainer(model, args=config, **others)
        per_step = sum(length(r["messages"]) for r in data) / len(data) * given.batch
    elif work == "reward_model":
        from trl import RewardConfig, RewardTrainer

        trainer = RewardTrainer(model, args=RewardConfig(**settings, max_length=LENGTH), **others)
    elif work == "align":
        from trl import DPOConfig, DPOTrainer

        trainer = DPOTrainer(model, args=DPOConfig(**settings, max_length=LENGTH), **others)
    else:
        from trl import GRPOConfig, GRPOTrainer

        longest, pattern = GRPO[work]

        def reward(completions, **kwargs):
            return [float(re.search(pattern, c[0]["content"]) is not None) for c in completions]

        config = GRPOConfig(
            **settings,
            num_generations=given.group,
            max_completion_length=longest,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
        )
        trainer = GRPOTrainer(model, reward_funcs=reward, args=config, **others)
        per_step = given.prompts
    if work in ("reward_model", "align"):
        per_step = (
            sum(length(r["prompt"] + r["chosen"]) + length(r["prompt"] + r["rejected"]) for r in data)
            / len(data)
            * given.batch
        )
    trainer.train()
    seconds = Clock.marks[-1] - Clock.marks[0]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if given.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    return {
        "rate": per_step * (given.steps - 1) / seconds,
        "peak_memory_mib": memory / 2**20,
        "told": told({k: v for entry in trainer.state.log_history for k, v in entry.items()}),
    }


def peer_batch(given: argparse.Namespace, work: str) -> int:
    """Rows (completions) that TRL computes at a time."""
    size = given.prompts * given.group if work in GRPO else given.batch
    for entry in given.peer_batch:
        name, _, count = entry.rpartition("=")
        size = int(count) if name in ("", work) else size
    return size


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sft", default="../shared/data/gsm8k_train.jsonl")
    parser.add_argument("--pairs", default="../shared/data/hh_harmless_base_test.jsonl.gz")
    parser.add_argument("--work", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--size", nargs="+", type=int, default=[6], choices=list(SIZES), help="millions of parameters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the products; weights are float32"
    )
    parser.add_argument("--vocabulary", type=int, help="tokens; more than the rows give are never encoded to")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, the first of which is not timed")
    parser.add_argument("--batch", type=int, default=16, help="rows (pairs) of a step")
    parser.add_argument("--prompts", type=int, default=4, help="of a GRPO step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--pretrain-steps", type=int, default=200, help="of sft before rl_trained")
    parser.add_argument("--micro-batch-tokens", type=int, help="ours: max_tokens_per_micro_batch")
    parser.add_argument(
        "--peer-batch",
        nargs="+",
        default=[],
        metavar="[WORK=]ROWS",
        help="TRL: rows (of GRPO: completions) at a time where not the whole batch, with gradient accumulation",
    )
    parser.add_argument("--peer")
    parser.add_argument("--folder")
    parser.add_argument("--model")
    given = parser.parse_args()
    for work in given.work:
        whole = given.prompts * given.group if work in GRPO else given.batch
        if whole % peer_batch(given, work):
            parser.error(
                f"--peer-batch: {peer_batch(given, work)} does not divide the {whole} rows of a step of {work}"
            )
    if given.steps < 2:
        parser.error("--steps: the first is not timed; write 2 or more")
    return given


def compare(work: str, folder: Path, given: argparse.Namespace, size: int, flops: float | None, peak: float) -> str:
    """Both sides' runs of a work: cells of its row, a failed side's error in the place of its rate."""
    sides, runs, errors = {"ours": ours, "TRL": trl}, {"ours": [], "TRL": []}, {}
    try:
        model = started(work, folder, given, size)
    except Failed as error:
        return f"failed: its start: {str(error).replace('|', '/')} | | | | | | |"
    for _ in range(given.repeats):
        for side, run in sides.items():
            if side in errors:
                continue
            began = time.monotonic()
            try:
                runs[side].append(run(work, folder, model, given))
            except Exception as error:  # the next work's figures are worth having
                kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
                errors[side] = "failed: " + " ".join(f"{kind}{error}".replace("|", "/").split())
            found = errors.get(side) or json.dumps(runs[side][-1])
            print(f"{work}, {side}, {time.monotonic() - began:.0f} s: {found}", file=sys.stderr, flush=True)

    def median(side, key):
        return None if side in errors else statistics.median(r[key] for r in runs[side])

    def ratio(key):
        return "" if errors else f"{statistics.median(a[key] / b[key] for a, b in zip(*runs.values())):.2f}"

    a, b = median("ours", "rate"), median("TRL", "rate")
    unit = "prompts/s" if work in GRPO else "tokens/s"
    memory = ["" if side in errors else f"{median(side, 'peak_memory_mib'):.0f}" for side in sides]
    return " | ".join(
        [
            errors.get("ours") or f"{a:.4g} {unit}",
            errors.get("TRL") or f"{b:.4g}",
            ratio("rate"),
            *memory,
            ratio("peak_memory_mib"),
            f"{flops * a / peak:.0%} |" if flops and a else " |",
        ]
    )


def main() -> None:
    given = options()
    if given.peer:
        print(json.dumps(peer(given.peer, Path(given.folder), given.model, given)))
        return
    peak, name = matmul_peak(given.device, given.dtype)
    print(
        f"{given.dtype} matrix product: {peak / 1e9:.0f} GFLOP/s ({name})\n\n| work | ours | TRL | ratio | ours MiB | TRL"
        " MiB | ratio | of the matrix product's rate |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    failed = False
    for size in given.size:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            flops = prepare(folder, given, size)
            for work in given.work:
                row = compare(work, folder, given, size, flops.get(work), peak)
                failed |= "failed: " in row
                print(f"| {work}, {size}M | {row}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
