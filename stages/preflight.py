"""Before a training stage starts: what will run, what is trained in five real rows, and the dearest micro-batch, first.

Supervised stages have their rows (:func:`preflight`); RL samples a few completions and makes up the longest ones
(:func:`rl_preflight`).

What would fail after an hour (memory on the longest rows, a mask that trains nothing or never trains the stop token)
fails or warns in the first seconds. Nothing here changes a result: the trial micro-batch's gradients are thrown away.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from stages.batching import Item, make_item, size, together

SAMPLES = 5
LONGEST_SHOWN = 1200


def preflight(
    stage,
    trainer,
    items: Sequence[Item],
    batch_size: int,
    renderer,
    *,
    completions_end: bool = True,
    prepare: Callable[[list[Item]], object] | None = None,
) -> None:
    """Report the plan and marked samples of these training items and try the dearest micro-batch. Skipped on a resume.

    Args:
        batch_size: items per optimizer step.
        prepare: gives the trial's items what their loss needs beyond themselves.
        completions_end: trained responses are expected to train a stop token (False for plain text, reward models and
            masked formatting).

    Raises:
        TrainingError: a single row does not fit into memory.
    """
    from stages.training import kept_budget, or_keep, tell_budget

    if stage.checkpoints.latest() is not None or not items:
        return
    check_ids(trainer.model, items, renderer)
    check_weights(items)
    check_precision(stage, trainer)
    tell_forward(stage, trainer.model)
    facts = plan_facts(items, batch_size, trainer)
    samples = [marked(item, renderer) for item in items[:SAMPLES]]
    stage.report(
        "preflight",
        markdown=page(facts, samples),
        table=[{"row": s["row"], "segments": s["segments"]} for s in samples],
    )
    stage.log("plan: " + ", ".join(f"{v:,} {k}" if isinstance(v, int) else f"{k} {v}" for k, v in facts.items()))
    if completions_end:
        check_stop_tokens(stage, items, renderer)
    kept_budget(stage, trainer)
    seconds, tokens, peak = or_keep(stage, lambda: try_dearest(trainer, items, batch_size, prepare))
    tell_budget(stage, trainer)
    whole = facts["tokens per step"] * trainer.total_steps * seconds / max(1, tokens)
    stage.log(
        f"the dearest micro-batch ({tokens:,} tokens) ran in {seconds:.2f} s; memory so far {peak:,.0f} MiB; "
        f"{trainer.total_steps} steps will take about {duration(whole)}"
    )


def check_precision(stage, trainer) -> None:
    """Warn where a GPU multiplies in float32 that is many times as fast in bfloat16."""
    from stages.running import cuda

    if trainer.config.compute_dtype == "float32" and cuda.knows_bfloat16(trainer.device):
        stage.warn(
            "slow_precision",
            "Matrix products run in float32, for which this GPU has no tensor cores (an H100 does 67 TFLOPS in float32"
            " and 989 in bfloat16). Write compute_dtype=bfloat16: weights, norms, residuals and optimizer stay"
            " float32.",
        )


def tell_forward(stage, model) -> None:
    """Say in the log where a model's own code computes its layers, and why, and what a mixture of experts is trained
    on.
    """
    from stages.models import balance, lean
    from stages.models.modeling import is_lean

    config = model.config.get_text_config()
    experts = next(
        (n for name in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, name, None))),
        0,
    )
    if not getattr(model, "reads_both_ways", False) and not is_lean(model):
        told = lean.why_not(model) or f"forward={stage.config.forward}, sharding={stage.config.sharding}"
        stage.log(
            f"the model's own code computes its layers ({told}), over rows whose padding counts in"
            " max_tokens_per_micro_batch"
            + (
                "; an adapter on attention alone (lora_targets=q_proj,k_proj,v_proj,o_proj) may leave them to the"
                " faster forward without padding"
                if experts and stage.config.lora_rank
                else ""
            )
        )
    if experts:
        share = balance.coefficient(model, stage.config)
        stage.log(
            f"{experts} experts: "
            + (
                f"a load-balancing loss over each optimizer step is added, router_aux_loss_coef={share:g}"
                if share
                else "routers are trained by this stage's loss alone (router_aux_loss_coef adds a load-balancing loss)"
            )
            + "; lora_targets=q_proj,k_proj,v_proj,o_proj leaves routers and experts as they are"
        )


def tell_sampler(stage, source) -> None:
    """Warn where the built-in sampler can only compute whole rows for every token."""
    from stages.decoding.decoders import make_decoder
    from stages.decoding.model_decoders import WholeDecoder

    decoder = make_decoder(source.policy.model) if stage.config.engine == "builtin" and source.stored is None else None
    if isinstance(decoder, WholeDecoder):
        stage.warn(
            "slow_sampling",
            f"The built-in sampler computes whole rows again for every token of this model ({decoder.reason}), so an"
            " answer costs the square of its length. Write engine=vllm or engine=server where these serve it.",
        )


def check_ids(model, items: Sequence[Item], renderer) -> None:
    """Refuse tokens that the model has no embedding for: they were added to its tokenizer only.

    Raises:
        TrainingError: names the first such row and token.
    """
    from stages.training import TrainingError

    rows = model.get_input_embeddings().weight.shape[0]
    for item in items:
        for ids in (item.prompt, *item.responses):
            if len(ids) and ids.max() >= rows:
                raise TrainingError(
                    f"Row {item.row_id} has the token {renderer.tokenizer.convert_ids_to_tokens(int(ids.max()))!r}, id"
                    f" {ids.max()}, and the model's embedding has {rows} rows: it was added to the tokenizer only. Give"
                    f" the model as many rows with model.resize_token_embeddings({len(renderer.tokenizer)}) and"
                    " save_pretrained, or take the token out of the tokenizer and the chat template."
                )


def check_weights(items: Sequence[Item]) -> None:
    """Refuse rows that all have weight 0: every step would do nothing.

    Raises:
        TrainingError: says so.
    """
    from stages.training import TrainingError

    if not any(item.extra.get("weight", 1.0) for item in items):
        raise TrainingError(
            f"All {len(items)} training rows have the weight 0, so nothing would be trained. Leave the column weight"
            " out, or give the rows that are to count a weight over 0."
        )


#: Prompts sampled, and completions of each, before RL starts.
TRIED = (SAMPLES, 4)


def rl_preflight(stage, trainer, source) -> None:
    """The same for RL: plan, completions of a few prompts with what is trained of them, stop tokens, and the dearest
    micro-batches of policy and critic on completions of the greatest length. Skipped on a resume; moves no state of the
    run.

    Args:
        source: the :class:`stages.rollouts.source.Rollouts` that will run.

    Raises:
        TrainingError: a prompt with one of the longest completions does not fit into memory, or none of the
            completions tried can be scored.
        ConfigError: the model has no positions for the longest prompt and completion.
    """
    from stages.training import kept_budget, or_keep, tell_budget

    if stage.checkpoints.latest() is not None:
        return
    config, renderer = stage.config, source.policy.renderer
    made = longest_rollouts(source)
    check_ids(source.policy.model, made, renderer)
    check_precision(stage, trainer)
    tell_forward(stage, trainer.model)
    facts = rl_plan_facts(source, made, trainer)
    started = time.monotonic()
    tell_sampler(stage, source)
    samples = tried_samples(stage, source)
    sampling = time.monotonic() - started
    shown = [marked(_rollout_item(source.row, group), renderer) for group in samples]
    stage.report(
        "preflight", markdown=page(facts, shown), table=[{"row": s["row"], "segments": s["segments"]} for s in shown]
    )
    stage.log("plan: " + ", ".join(f"{v:,} {k}" if isinstance(v, int) else f"{k} {v}" for k, v in facts.items()))
    check_completions_end(stage, [s for group in samples for s in group], renderer)
    check_rewards(stage, source, [s for group in samples for s in group])
    check_clip_range(stage, source, [s for group in samples for s in group])
    source.policy.rest()  # as in training: the first iteration's update wakes it
    per_step = max(1, -(-len(made) // config.num_minibatches))
    warn_of_repeated_prompts(stage, made[:per_step], facts["tokens per step at most"])
    times = []
    kept_budget(stage, trainer)  # the critic has its own since it was made
    for name, one in (("policy", trainer), ("critic", getattr(source.critic, "trainer", None))):
        if one is not None:
            seconds, tokens, peak = or_keep(stage, lambda: try_dearest(one, made, per_step, made_up=True))
            tell_budget(stage, one)
            stage.log(
                f"the {name}'s dearest micro-batch ({tokens:,} tokens) ran in {seconds:.2f} s; memory so far"
                f" {peak:,.0f} MiB"
            )
            times.append(seconds / max(1, tokens))
    drawn = sum(len(s.ids) for group in samples for s in group)
    batches = -(-config.max_steps // source.steps_per_batch)
    sampled = (
        0
        if source.stored is not None
        else batches * facts["tokens to sample per batch at most"] * sampling / max(1, drawn)
    )
    whole = sampled + sum(times) * config.max_steps * facts["tokens per step at most"]
    stage.log(
        f"{config.max_steps} steps with {batches} batches of completions will take at most about {duration(whole)} if"
        " all of them are as long as they may be (small batches sample slower than large ones)"
    )


def longest_rollouts(source) -> list[Item]:
    """Items of one rollout batch as dear as any can be: the longest prompts, every completion as long as allowed, every
    term of the loss.
    """
    from stages.decoding.decoders import max_positions
    from stages.spec import ConfigError

    config, count = source.config, source.config.num_generations
    rng = source.stage.rng("preflight", "tokens")
    vocabulary, length = source.policy.model.get_input_embeddings().weight.shape[0], config.longest_completion
    prompts = sorted(source.order.prompts, key=lambda p: len(p[1]), reverse=True)
    limit = max_positions(source.policy.model)
    if source.stored is None and limit is not None and len(prompts[0][1]) + length > limit:
        raise ConfigError(
            f"the longest prompt has {len(prompts[0][1])} tokens and completions may have {length}, together over the"
            f" model's {limit} positions; write max_prompt_length <= {max(limit - length, 0)}, or a smaller"
            " max_completion_length."
        )
    items = []
    for k in range(config.prompts_per_step):
        prompt, ids = prompts[k % len(prompts)]
        extra = {
            "advantages": [1.0 if g % 2 else -1.0 for g in range(count)],
            "rewards": [float(g % 2) for g in range(count)],
            "correct": [bool(g % 2) for g in range(count)],
        }
        zeros = [[0.0] * length for _ in range(count)]
        extra |= {name: zeros for name in ("old_logps", "ref_logps", "values", "returns")}
        if config.importance_correction != "none" or (config.rejection != "none" and config.rejection_scope == "zero"):
            extra["weights"] = [[1.0] * length for _ in range(count)]
        responses = rng.integers(0, vocabulary, (count, length)).tolist()
        if source.row.distillation_weight:  # the teacher reads the question and another answer
            read = min([config.max_reprompt_len, len(ids) + length] + [limit - length] * (limit is not None))
            extra["teacher_prompts"] = rng.integers(0, vocabulary, (count, max(1, read))).tolist()
        items.append(
            make_item(
                f"{prompt['row_id']}-longest", ids, responses, [[1] * length] * count, by_response=tuple(extra), **extra
            )
        )
    return items


def rl_plan_facts(source, made: list[Item], trainer) -> dict[str, int | str]:
    """Counts of prompts, completions, steps and tokens, and the memory that weights, training and the KV cache take."""
    config = source.config
    planned = trainer.planned(made[: max(1, -(-len(made) // config.num_minibatches))])
    prompts = [len(ids) for _, ids in source.order.prompts]
    trainers = [t for t in (trainer, getattr(source.critic, "trainer", None)) if t is not None]
    weights, training = held_bytes(
        [
            m
            for m in (
                trainer.model,
                source.policy.model,
                source.reference,
                source.old,
                getattr(source.critic, "model", None),
                getattr(source.opponent, "model", None),
            )
            if m is not None
        ],
        trainers,
    )
    return {
        "prompts": len(prompts),
        "optimizer steps": config.max_steps,
        "optimizer steps per batch of completions": source.steps_per_batch,
        "prompts per batch": config.prompts_per_step,
        "completions per prompt": config.num_generations,
        "tokens in a prompt": f"{round(statistics.median(prompts)):,} (median), {max(prompts):,} (longest)",
        "new tokens in a completion at most": config.longest_completion,
        "tokens to sample per batch at most": (
            config.prompts_per_step * config.num_generations * config.longest_completion
        ),
        "tokens per step at most": sum(size(i) for group in planned for i in group),
        "micro-batches per step at most": len(planned),
        "weights held": f"{weights / 2**20:,.1f} MiB",
        "gradients and optimizer": f"{training / 2**20:,.1f} MiB",
        "KV cache at most": f"{kv_bytes(source, max(prompts)) / 2**20:,.1f} MiB",
    }


def held_bytes(models, trainers) -> tuple[int, int]:
    """(bytes of all parameters of these models on this rank, each storage once; bytes that training adds to them:
    gradients, the optimizer's state, averages)."""
    from stages.models.optimizers import state_shapes
    from stages.models.quantised import is_quantised
    from stages.models.sharding import local

    held = {}
    for model in models:
        for _, parameter in model.named_parameters():
            here = local(parameter.detach())
            if is_quantised(here):
                held |= {
                    part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in here.parts.values()
                }
                continue
            held[here.untyped_storage().data_ptr()] = here.untyped_storage().nbytes()
    gradients = [local(p.detach()).nbytes for t in trainers for p in t.parameters.values()]
    states = [
        local(p.detach()).numel() * math.prod(shape) * dtype.itemsize // max(1, p.numel())
        for t in trainers
        for p, shape, dtype in state_shapes(t.optimizer)
    ]
    averages = [
        local(a).nbytes
        for t in trainers
        for a in (*t.averages.values(), *(() if t.bema is None else t.bema.tensors().values()))
    ]
    return sum(held.values()), sum(gradients) + sum(states) + sum(averages)


def kv_bytes(source, longest_prompt: int) -> int:
    """Keys and values of the sequences that are decoded together, all at their greatest length."""
    from stages.models import memory

    config, model = source.config, source.policy.model.config.get_text_config()
    rows = min(config.generation_batch, config.prompts_per_step * config.num_generations)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return memory.kv_bytes(
        model.num_hidden_layers,
        heads,
        width,
        rows * (longest_prompt + config.longest_completion),
        next(iter(source.policy.model.parameters())).element_size(),
    )


def tried_samples(stage, source) -> list[list]:
    """A few completions of the first prompts under seeds of their own, or the first stored groups."""
    prompts, count = TRIED
    if source.stored is not None:
        return [group.samples[:count] for group in source.stored.groups[:prompts]]
    source.policy.update()
    chosen, count = source.order.prompts[:prompts], min(count, source.config.num_generations)
    seeds = [[stage.seed_for("preflight", row["row_id"], g) for g in range(count)] for row, _ in chosen]
    groups = [[s for s in group if s.error is None] for group in source.policy.draw(chosen, seeds)]
    return [group for group in groups if group]


def _rollout_item(row, group) -> Item:
    """Completions of one prompt as an item: what would be trained of them."""
    masks = [[int(s.terminated or row.truncation_policy != "mask")] * len(s.ids) for s in group]
    return make_item(group[0].prompt["row_id"], group[0].prompt_ids, [s.ids for s in group], masks)


def check_completions_end(stage, samples, renderer) -> None:
    """Warn when no completion can end, or hardly any does: rewards would judge cut answers, and the policy cannot learn
    to stop.
    """
    if not renderer.stop_ids:
        stage.warn(
            "no_stop_token",
            "The tokenizer and chat template name no end token, so every completion runs to max_completion_length. Give"
            " a model whose template closes assistant turns with an end token.",
        )
    ended = sum(s.terminated for s in samples)
    stage.log(f"{ended} of {len(samples)} completions tried end with a stop token")
    if samples and ended == 0:
        stage.warn(
            "completions_do_not_end",
            f"None of the {len(samples)} completions tried ends within"
            f" max_completion_length={stage.config.max_completion_length} tokens, so rewards will judge cut answers."
            " Raise max_completion_length, or start from a model that was fine-tuned to end its turns.",
        )


#: Share of the completions tried that rewards may leave without a score before a run warns of it.
UNSCORED = 0.1


def check_rewards(stage, source, samples) -> None:
    """Score the completions tried: a reward that fails on all of them would train nothing, for hours."""
    from stages.generation import score
    from stages.reward.verdicts import commonest_failure, failures
    from stages.training import TrainingError

    samples = [s for s in samples if not s.failure]  # those that the environment lost have its reason
    known = source.stored is not None or source.recorded is not None  # scored already, maybe by services
    if known or stage.config.reward_override == "random" or not samples:
        return
    if source.steps is not None:  # of each step, by the reward model: the rewards are only watched
        if not any(source.steps(s)[1] for s in samples):
            raise TrainingError(
                f"None of the {len(samples)} completions tried before training has a step that the input reward_model"
                " can score, so nothing could be learned. Write the step_separator that completions have between"
                " steps, and a max_prompt_length and max_completion_length that the model has positions for."
            )
        return
    score(source.rewards, samples)
    lost = [failures(s.parts, s.reasons) for s in samples if s.total != s.total]
    stage.log(f"{len(samples) - len(lost)} of {len(samples)} completions tried could be scored")
    if len(lost) == len(samples):
        raise TrainingError(
            f"None of the {len(samples)} completions tried before training could be scored, so nothing could be"
            f" learned. Most often: {commonest_failure(lost)}. Mend the reward component, or give it more time."
        )
    if len(lost) > UNSCORED * len(samples):
        stage.warn(
            "completions_unscored",
            f"{len(lost)} of the {len(samples)} completions tried before training could not be scored, so they would"
            f" teach nothing. Most often: {commonest_failure(lost)}. Mend the reward component, or have it return a"
            " number for these too.",
        )
    check_verdicts(stage, samples)


def check_verdicts(stage, samples) -> None:
    """Refuse settings that go by which completions are right where only functions could say it and, of the completions
    tried that have an end, they say of none: before ``passk_samples`` of every prompt are drawn for it.
    """
    from stages.reward.components import WITHOUT_VERDICT
    from stages.policy.read_when import reads_verdicts
    from stages.spec import ConfigError

    rates = reads_verdicts(stage.config, stage.inputs)
    asked = [c for c in stage.config.rewards if c.kind not in WITHOUT_VERDICT]
    ended = [s for s in samples if s.terminated]
    if (
        rates
        and all(c.kind in ("python", "remote") and any(s.parts.get(c.name) is not None for s in ended) for c in asked)
        and all(s.correct is None for s in samples)
    ):
        raise ConfigError(
            f"rl: {rates[0]} goes by which completions are right, and reward {asked[0].name!r} gave numbers alone for"
            " the completions tried before training; return True or False, or"
            ' {"reward": NUMBER, "correct": True or False}, or add {name: verdict, kind: verifier, weight: 0} to'
            f" rewards, or leave {rates[0]} out"
        )


def check_clip_range(stage, source, samples) -> None:
    """Warn where bfloat16 rounds the ratios of a clip by more than its range, measured on the completions tried against
    float32: rounding, and no step, then decides what is clipped.
    """
    config, row = source.config, source.row
    # ratios that are 1 in whatever precision
    stays = source.steps_per_batch == 1 and not row.behaviour_ratio and not config.async_rollouts
    samples = [s for s in samples if any(s.action_mask)]
    if config.compute_dtype == "float32" or row.objective or row.surrogate != "clip" or stays or not samples:
        return
    items = [
        make_item(
            s.prompt["row_id"], s.context_ids if s.context_ids is not None else s.prompt_ids, [s.ids], [s.action_mask]
        )
        for s in samples
    ]
    low, full = (
        source.crediting.logprobs.of(source.policy.model, items, compute_dtype)
        for compute_dtype in (config.compute_dtype, "float32")
    )
    rounding = ratio_rounding(low, full, [s.action_mask for s in samples], row.ratio_level)
    high = row.epsilon if row.epsilon_high is None else row.epsilon_high
    if rounding > min(row.epsilon, high):
        of = {
            "token": "of a token",
            "sequence": "of a completion",
            "sequence_mean": "per token of a completion, in the mean over its tokens,",
        }[row.ratio_level]
        wide = float(f"{3 * rounding:.1g}")
        stage.warn(
            "clip_below_rounding",
            f"compute_dtype={config.compute_dtype} rounds the log-ratio {of} by {rounding:.1g} (root mean square over"
            f" the {len(samples)} completions tried), more than the clip range of preset={config.preset} allows"
            f" (epsilon={row.epsilon:g}, epsilon_high={high:g}), so that rounding decides what is clipped. Write"
            f" compute_dtype=float32, or a clip range above it (epsilon={wide:g} and epsilon_high={wide:g}), or take"
            " one step per batch from ratios of 1 (num_iterations=1 and num_minibatches=1).",
        )


def ratio_rounding(low, full, masks, level: str) -> float:
    """Root mean square of the error of log-ratios at a ratio level (``losses.RATIO_LEVELS``), nats: log-probs of the
    completions' tokens ``low`` in the precision of training, ``full`` in float32, over the tokens of ``masks``; lists
    of B completions' token lists. Rounding moves with the weights, so this is what a ratio is off by."""
    errors = [(np.subtract(a, b))[np.array(m, bool)] for a, b, m in zip(low, full, masks) if any(m)]
    of = {
        "token": np.concatenate(errors or [np.zeros(0)]),
        "sequence_mean": [e.mean() for e in errors],
        "sequence": [e.sum() for e in errors],
    }[level]
    return float(np.sqrt(np.mean(np.square(of)))) if len(of) else 0.0


def plan_facts(items: Sequence[Item], batch_size: int, trainer) -> dict[str, int | str]:
    """What a person checks before waiting: counts of rows, steps, tokens, micro-batches."""
    sizes = [size(i) for i in items]
    per_step = [items[i : i + batch_size] for i in range(0, len(items), batch_size)]
    micro = [len(trainer.planned(step)) for step in per_step[:50]]
    return {
        "rows": len(items),
        "optimizer steps": trainer.total_steps,
        "rows per step": min(batch_size, len(items)),
        "tokens per step": round(statistics.mean(sizes) * min(batch_size, len(items))),
        "micro-batches per step at most": max(micro),
        "tokens in the longest row": max(sizes),
        "trained": f"{sum(i.n_targets for i in items) / max(1, sum(i.n_tokens for i in items)):.0%} of the tokens",
    }


def marked(item: Item, renderer) -> dict:
    """One item as text in segments ``[text, trained]``: the prompt, then each response."""
    segments: list[list] = [[_text(renderer, item.prompt.tolist()), False]] if len(item.prompt) else []
    for k, (ids, mask) in enumerate(zip(item.responses, item.masks)):
        if len(item.responses) > 1:
            segments.append([f"\n— response {k + 1} —\n", None])
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or mask[end] != mask[start]:
                segments.append([_text(renderer, ids[start:end].tolist()), bool(mask[start])])
                start = end
    return {"row": item.row_id, "segments": segments}


def _text(renderer, ids: list[int]) -> str:
    return renderer.tokenizer.decode(ids, skip_special_tokens=False)


def page(facts, samples) -> str:
    """The report: the plan as a table, the samples with what is trained in bold between brackets."""
    lines = [
        "# Before training",
        "",
        "| | |",
        "|---|---|",
        *(f"| {k} | {v:,} |" if isinstance(v, int) else f"| {k} | {v} |" for k, v in facts.items()),
        "",
        "Rows as the model sees them; what is trained stands in 【brackets】.",
        "",
    ]
    for sample in samples:
        text = "".join(f"【{t}】" if trained else t for t, trained in sample["segments"])
        if len(text) > LONGEST_SHOWN:
            text = text[: LONGEST_SHOWN // 2] + " … " + text[-LONGEST_SHOWN // 2 :]
        lines += [f"### {sample['row']}", "", "```text", text.replace("```", "ˋˋˋ"), "```", ""]
    return "\n".join(lines)


def check_stop_tokens(stage, items: Sequence[Item], renderer) -> None:
    """Warn when trained responses hardly ever train a stop token: the model would not learn to stop. What a template
    writes behind the last turn is not trained and does not count.
    """
    responses = [(ids, mask) for item in items[:512] for ids, mask in zip(item.responses, item.masks) if mask.any()]
    ending = sum(any(int(t) in renderer.stop_ids for t in ids[mask > 0][-2:]) for ids, mask in responses)
    if responses and ending < 0.5 * len(responses):
        stage.warn(
            "stop_token_not_trained",
            f"Only {ending} of {len(responses)} trained responses train a stop token, so the model may never stop."
            " Raise max_length where it cuts them, or set chat_template to one that closes assistant turns with an end"
            " token.",
        )


#: Tokens of a step by those of its groups in one piece from which on a plan is warned of.
REPEATED = 1.5


def warn_of_repeated_prompts(stage, step: Sequence[Item], tokens: int) -> None:
    """Warn where groups go through the model in so many parts that computing their prompts again is what a step is made
    of.
    """
    once = sum(map(size, step))
    if tokens > REPEATED * once:
        stage.warn(
            "prompts_repeated",
            "Groups of the longest prompts and completions exceed"
            f" max_tokens_per_micro_batch={stage.config.micro_batch_tokens:,}, so they go through the model in"
            f" parts, each with its prompt: {tokens:,} tokens per step instead of {once:,}. Where memory allows, write"
            f" max_tokens_per_micro_batch={max(map(size, step))}.",
        )


def filled(group: list[Item], others: Sequence[Item], budget: int) -> list[Item]:
    """A micro-batch of made-up rollouts with one more, as long as there is room: the rollouts of a run have all
    lengths, and fill it.
    """
    room = budget - sum(map(size, group)) - (len(others[0].prompt) if others else 0)
    if not others or room <= 0:
        return group
    more = others[0].part([0])
    return [
        *group,
        replace(
            more,
            responses=(more.responses[0][:room],),
            masks=(more.masks[0][:room],),
            extra={
                name: [value[0][:room] if isinstance(value[0], list) else value[0]]
                for name, value in more.extra.items()
            },
        ),
    ]


def try_dearest(
    trainer, items: Sequence[Item], batch_size: int, prepare=None, made_up: bool = False
) -> tuple[float, int, float]:
    """Forward and backward of the largest micro-batch that a step could hold, with the optimizer's memory: (seconds,
    its tokens, peak MiB so far). One that does not fit into memory halves the trainer's micro-batches.

    ``made_up``: the items are rollouts of the greatest length, see :func:`filled`.

    Raises:
        TrainingError: not even a single row fits, or the optimizer's state.
    """
    import torch

    from stages.harness import peak_memory_mib
    from stages.models.modeling import tokens_together
    from stages.running import cuda
    from stages.training import TrainingError

    step = sorted(items, key=size, reverse=True)[:batch_size]
    cost = tokens_together(trainer.model)
    try:
        moments = optimizer_state(trainer)
    except (MemoryError, RuntimeError) as error:
        if not cuda.out_of_memory(error):
            raise
        smaller = ["lora_rank=16", "optimizer=adamw_8bit", "optimizer=adafactor"]
        write = [trainer.instead] if trainer.instead else ["a lower lora_rank"] if trainer.config.lora_rank else smaller
        raise TrainingError(
            f"What optimizer={trainer.config.optimizer} holds of every trained weight does not fit into memory. Write"
            f" {' or '.join(write)}."
        ) from error
    try:
        if prepare is not None:
            prepare(step)
    except (MemoryError, RuntimeError) as error:
        if not cuda.out_of_memory(error):
            raise
        raise TrainingError(
            "What the loss reads beside the rows of a step (such as a reference's log-probs) does not fit into memory."
            f" Write max_tokens_per_micro_batch={max(1, trainer.budget // 2)}, or a lower max_length or batch_size."
        ) from error
    counts = trainer.objective.counts(step)

    def attempt() -> tuple[float, int]:
        planned = trainer.planned(step)
        group = max(planned, key=cost)
        if made_up and cost is together:
            group = filled(group, [item for other in planned if other is not group for item in other], trainer.budget)
        cuda.finish(trainer.device)
        started = time.monotonic()
        trainer.through([(group, True)], lambda group, counted: trainer.backward(group, counts))
        cuda.finish(trainer.device)
        return time.monotonic() - started, sum(map(size, group))

    try:
        seconds, tokens = trainer.within_memory(attempt)
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
        del moments
    peak = torch.cuda.max_memory_allocated() / 2**20 if trainer.device.startswith("cuda") else peak_memory_mib()
    return seconds, tokens, peak


def optimizer_state(trainer) -> list:
    """As much as the optimizer will hold of every trained weight from the first step on, so that a trial before it
    needs the memory of one after it.
    """
    import torch

    from stages.models.optimizers import state_shapes
    from stages.models.sharding import local

    if trainer.optimizer.state:  # of a run that goes on: it is there
        return []
    return [
        torch.full_like(p, 0, dtype=dtype, requires_grad=False)
        if shape == p.shape
        else local(p.detach()).new_zeros(shape, dtype=dtype)
        for p, shape, dtype in state_shapes(trainer.optimizer)
        if p.requires_grad
    ]


def duration(seconds: float) -> str:
    """A rough length of time for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
