"""Useful tokens per second of the built-in sampler against transformers, in one process on the same model and sampling.

    python -m tests.bench.bench_sampler [--prompts 128] [--batch 32] [--max-new 256] [--shared 0] [--turns 1] [--repeats
    3] [--threads 2] [--profile]
    python -m tests.bench.bench_sampler --device cuda --dtype bfloat16 --hidden 2048 --layers 16 --heads 32 --kv-heads 8
    --vocabulary 128256 --batch 64 --prompts 256 [--alone]

Three ways to complete the same prompts (temperature 1, no filters, each of `--stop-rate` of the vocabulary ends a row,
so lengths are mixed): `Sampler.generate` of one sampler; `model.generate` over static left-padded batches of the same
size, prompts sorted by length; `model.generate_batch` (transformers' continuous batching). `--alone` leaves the peers
out. After a warm-up of each with all prompts (on a GPU steps are captured then, which the sampler keeps), repeats are
interleaved and medians reported. "useful" counts tokens up to and with the stop token. Whole calls are timed: weight
fusion, prefill and result building included. So is the end of a call, where fewer rows than `--batch` are left, which
is the greater part of it the fewer prompts there are. `--shared N`: all prompts begin with the same N tokens, as with the
examples of a few-shot evaluation. `--turns K`: every row goes on for K turns, each with 60 tokens of an environment
between them, and the built-in sampler is compared with itself where nothing is kept between turns (the peers are left
out). Ratios are given of wall time and of process CPU time; on a machine that other work shares, only the CPU ratio
with --threads 1 means anything.

The time per decoding step is that of whole calls, prefill and all else included, over the steps of the sampler.
`--profile` shows the operations of one more call, on a GPU by the time of their kernels, and for how much of the call
the GPU was busy.

The last lines set the tokens per second against the memory-bandwidth roofline of decoding: a step of `--batch` rows
reads the weights of layers and head once and the rows' keys and values as they are long on average, at the rate at
which this device copies a GiB. On a GPU the steps are CUDA graphs (``stages.decoding.replay``), one of which with all
rows is timed by itself, too: what the sampler gives while it has rows enough.

Notes (what was measured):
    3.9M-parameter Llama (4 layers, hidden 256, 8 heads, 4 KV heads, vocabulary 4096), 128 prompts of 8-63 tokens, batch
    32, max_new 256, stop rate 1%, float32, two threads on 2 cores with nothing else running, two interleaved repeats;
    useful tokens per second of wall time:

                       repeat 0    repeat 1    built-in is
    built-in             5020        4794
    static generate       939         869        5.4x
    generate_batch        987        1121        4.7x

    On an AMD EPYC, whose products go through oneDNN (``stages.models.products``); on a machine of a slower product
    before that 3705, 865 and 946 (4.2x, 3.8x).

    The same with `--shared 1100 --prompts 64 --repeats 1`: 2112 beside 203 (10.4x) and 172 (12.3x).

    Of a decoding step (32 rows of a 6M model, 117 columns) 45% are matrix products, 31% attention, 6% writing keys and
    values.

    One NVIDIA H200 (a copy moves 4.0 TB/s), bfloat16, 256 prompts of 8-63 tokens, batch 64, max_new 160, stop rate
    0.5%, whole calls after the first, the peers not run:

                                            tokens/s    ms per 64 tokens    of the roofline
    6.2B (hidden 4096, 32 layers, 32/8 heads)   10615    6.03                55%
    1.0B (hidden 2048, 16 layers, 32/8 heads)   41793    1.53                34%

    At 1.0B a step of all 64 rows (1.06 ms) is at 50% of the roofline; with 1024 prompts, a smaller part of which is
    prefill and the end with few rows, whole calls reach 38% (47394 and 48104 tokens/s).

    At 1.0B kernels took 0.60 s of a call of 0.69 s. A step of 64 rows spends 0.76 ms in matrix products (at 16 layers of
    2048 they reach half of the memory's rate), 0.13 in attention, 0.13 in the kernels between products, 0.01 in drawing;
    few rows are left at a call's end (527 steps for 449 full ones' tokens). Tried there and left out: reading the next
    products' weights into the L2 cache ahead (cp.async.bulk.prefetch.L2) while attention and norms leave the memory
    idle, 8 to 50 MB per layer in 11 ways, on the same stream or beside it: 2 to 15% slower. With operations of torch and graphs for one
    call alone a step of 64 prompts, of which 45 were left on average, took 3.0 ms.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import numpy as np
import torch

HEARD = 60  # tokens of the environment between two turns


def build_model(hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    ).eval()


@functools.cache
def sampler_of(model, batch):
    from stages.decoding.sampler import Sampler

    return Sampler(model, None, max_batch=batch)


def built_in(model, prompts, stops, batch, max_new, repeat):
    from stages.decoding.sampling import SamplingParams

    out = sampler_of(model, batch).generate(
        prompts,
        SamplingParams(max_new_tokens=max_new, stop_ids=stops),
        [[1000 * repeat + i] for i in range(len(prompts))],
    )
    return sum(len(c.ids) for group in out for c in group)


def in_turns(model, prompts, stops, batch, max_new, turns, repeat, keeps):
    """Rows that are continued for so many turns; the sampled tokens of all."""
    from contextlib import nullcontext

    from stages.decoding.sampler import Sampler, SamplingParams

    rng, rows, useful = np.random.default_rng(repeat), [list(p) for p in prompts], 0
    sampler, params = Sampler(model, None, max_batch=batch), SamplingParams(max_new_tokens=max_new, stop_ids=stops)
    with sampler.remembering() if keeps else nullcontext():
        for turn in range(turns):
            out = sampler.generate(rows, params, [[1000 * (repeat * turns + turn) + i] for i in range(len(rows))])
            useful += sum(len(c.ids) for (c,) in out)
            rows = [
                row + c.ids + rng.integers(0, model.config.vocab_size, HEARD).tolist() for row, (c,) in zip(rows, out)
            ]
    return useful


def static_batches(model, prompts, stops, batch, max_new, repeat):
    torch.manual_seed(repeat)
    useful, rows = 0, sorted(prompts, key=len)
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        width = max(map(len, part))
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for j, row in enumerate(part):
            ids[j, width - len(row) :] = torch.tensor(row)
            mask[j, width - len(row) :] = 1
        with torch.inference_mode():
            ids, mask = ids.to(model.device), mask.to(model.device)
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new,
                eos_token_id=sorted(stops),
                pad_token_id=0,
            )
        for row in out[:, width:].tolist():
            useful += next((t + 1 for t, token in enumerate(row) if token in stops), len(row))
    return useful


def continuous(model, prompts, stops, batch, max_new, repeat):
    from transformers import ContinuousBatchingConfig, GenerationConfig

    torch.manual_seed(repeat)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new,
        eos_token_id=sorted(stops),
        pad_token_id=0,
    )
    room = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=batch * (max(map(len, prompts)) + max_new + 64) // 32,
        max_batch_tokens=max(256, batch),
        max_requests_per_batch=batch,
        use_cuda_graph=False,
    )
    out = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=room)
    return sum(len(result.generated_tokens) for result in out.values())


def bandwidth(device: str) -> float:
    """Bytes per second that the device reads and writes when it copies a GiB, the best of ten."""
    source, best = torch.empty(1 << 28, device=device), 0.0
    target = torch.empty_like(source)
    for _ in range(10):
        begin = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        best = max(best, 2 * source.nbytes / (time.perf_counter() - begin))
    return best


def full_step(sampler, rows: int) -> float | None:
    """Seconds of one captured step of so many rows, the least of five times twenty; None: none was captured."""
    replayed = sampler.held.replayed if sampler.held is not None else None
    captured = [kept for key, kept in replayed.steps.items() if key[1] == rows] if replayed is not None else []
    if not captured or replayed.device.type != "cuda":
        return None
    _, step = max(captured, key=lambda kept: kept[0])
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 20)
    return min(times)


def roofline(model, batch: int, length: float) -> float:
    """Tokens per second that decoding ``batch`` rows of ``length`` tokens could give where nothing but memory took
    time.
    """
    config, size = model.config, model.lm_head.weight.element_size()
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name) + (
        model.lm_head.weight.numel() if config.tie_word_embeddings else 0
    )
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length * batch
    return batch / ((weights + kept) * size / bandwidth(model.device.type))


def profiled(device: str, call) -> None:
    """Print where the time of a call goes."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    away = device != "cpu"
    with profile(activities=[ProfilerActivity.CUDA] if away else [ProfilerActivity.CPU]) as seen:
        begin = time.perf_counter()
        call()
        wall = time.perf_counter() - begin
    by = f"self_{'device' if away else 'cpu'}_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=40 if away else 16, max_name_column_width=90 if away else 40))
    if away:
        spans = sorted(
            (e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type == DeviceType.CUDA
        )
        busy = until = 0.0
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        print(
            f"the GPU was busy for {busy / 1e6:.3f} s of {wall:.3f} s ({busy / 1e6 / wall:.0%}), {len(spans)} kernels"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("prompts", 128),
        ("batch", 32),
        ("max-new", 256),
        ("repeats", 3),
        ("threads", 2),
        ("shared", 0),
        ("turns", 1),
        ("hidden", 256),
        ("layers", 4),
        ("heads", 8),
        ("kv-heads", 4),
        ("vocabulary", 4096),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stop-rate", type=float, default=0.01)
    parser.add_argument("--alone", action="store_true", help="measure the built-in sampler only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--profile", action="store_true", help="also print where the built-in sampler's time goes, by operation"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build_model(args.hidden, args.layers, args.heads, args.kv_heads, args.vocabulary).to(
        args.device, getattr(torch, args.dtype)
    )
    rng = np.random.default_rng(0)
    start = rng.integers(0, args.vocabulary, args.shared).tolist()
    prompts = [start + rng.integers(0, args.vocabulary, rng.integers(8, 64)).tolist() for _ in range(args.prompts)]
    stops = frozenset(range(max(1, int(args.vocabulary * args.stop_rate))))
    ways = {"built-in": built_in, "static generate": static_batches, "continuous generate_batch": continuous}
    if args.alone:
        ways = {"built-in": built_in}
    if args.turns > 1:
        ways = {
            "built-in": lambda *given: in_turns(*given[:5], args.turns, given[5], True),
            "built-in, nothing kept": lambda *given: in_turns(*given[:5], args.turns, given[5], False),
        }
    for name in list(ways):
        try:
            begin = time.perf_counter()
            if not ways[name](model, prompts, stops, args.batch, args.max_new, 0):
                raise RuntimeError("it returned no tokens")
            print(f"warm-up of {name}: {time.perf_counter() - begin:.2f} s", flush=True)
        except Exception as error:  # an optional peer: say why it is left out
            print(f"{name}: left out, it does not run here ({type(error).__name__}: {str(error)[:160]})", flush=True)
            del ways[name]
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {args.prompts} prompts, batch"
        f" {args.batch}, max_new {args.max_new}, {args.threads} threads, {args.device}, {args.dtype}",
        flush=True,
    )
    wall, cpu, per_step = {name: [] for name in ways}, {name: [] for name in ways}, []
    for repeat in range(args.repeats):
        for name, way in ways.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            steps = sampler_of(model, args.batch).steps
            useful = way(model, prompts, stops, args.batch, args.max_new, repeat + 1)
            wall[name].append(useful / (time.perf_counter() - begin))
            cpu[name].append(useful / (time.process_time() - begin_cpu))
            if steps := sampler_of(model, args.batch).steps - steps:
                per_step.append(useful / wall[name][-1] / steps)
            print(
                f"  {repeat} {name:26s} {useful} tokens  {wall[name][-1]:.0f}/s wall  {cpu[name][-1]:.0f}/s cpu",
                flush=True,
            )
    if args.profile:
        profiled(args.device, lambda: built_in(model, prompts, stops, args.batch, args.max_new, 1))
    if per_step:
        print(f"built-in: {1000 * statistics.median(per_step):.2f} ms per decoding step of {args.batch} rows at most")
    drawn = useful / len(prompts)  # tokens per row of the last way's last repeat: all ways draw from one distribution
    most = roofline(model, args.batch, sum(map(len, prompts)) / len(prompts) + drawn / 2)
    print(
        f"built-in: {statistics.median(wall['built-in']) / most:.0%} of {most:.0f} tokens/s, the memory-bandwidth"
        f" roofline of {args.batch} rows"
    )
    alone = full_step(sampler_of(model, args.batch), args.batch)
    if alone is not None:
        print(
            f"built-in: {1000 * alone:.3f} ms of a step of all {args.batch} rows, {args.batch / alone / most:.0%} of it"
        )
    for name in ways:
        ratios = [statistics.median(x["built-in"]) / statistics.median(x[name]) for x in (wall, cpu)]
        print(f"{name:26s} built-in is {ratios[0]:.2f}x by wall time, {ratios[1]:.2f}x by CPU time")


if __name__ == "__main__":
    main()
