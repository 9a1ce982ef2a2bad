"""Prompts in, scored completions out: what rejection sampling and RL share.

A unit of work is a list of prompt rows with the seeds of their completions; its result depends on nothing else, so a
killed stage repeats only the unit it was in.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice


@dataclass
class Sample:
    """One completion of one prompt row, with its reward.

    ``total`` is the weighted sum of the scored components (NaN when unscorable), ``parts`` their raw values (None =
    unscorable), ``reasons`` why; ``correct`` is the verifier's verdict where there is one; ``items`` are a rubric's
    item scores. ``weights``: the factor of each counted part in ``total``. ``mode``: ``fresh``, ``improve`` (of the
    response ``parent``) or ``sft`` (not sampled). ``context``: prompt id of the messages it was sampled from, where
    these are not ``prompt``; its log-probs are then not those of the text after ``prompt``. ``tier``: the router's.

    Of a trajectory (``stages.acting.agents``), ``tool_mask`` is 1 on tokens that the policy did not choose, ``turns``
    are its turns (token span, text, environment's reward, events), ``text`` is the last one, ``failure`` says why the
    environment ended it, ``turn_rewards`` are what each turn earned of ``total`` and ``turn_parts`` the values that
    components give single turns. ``finish_reason`` is then goal, stop, turn_limit, length, failure or error. ``opened``: the
    prompt ends with a thought that the template has begun, so that text without its end is all thought (``seen``).
    ``logps`` is None where the engine gives none; ``reencoded``: ids are the encoding of a text that a server returned;
    ``error``: why the engine has no completion (finish reason "error", no ids).
    """

    prompt: dict
    prompt_ids: list[int]
    index: int
    ids: list[int]
    logps: list[float] | None
    finish_reason: str
    text: str
    total: float = float("nan")
    parts: dict[str, float | None] = None
    reasons: dict[str, str] = None
    correct: bool | None = None
    items: list[dict] = field(default_factory=list)
    mode: str = "fresh"
    parent: str | None = None
    context: str | None = None
    context_ids: list[int] | None = None  # of the context, where it is trained behind that (conditioning=sampling)
    tier: str | None = None
    tool_mask: list[int] | None = None
    turns: list[dict] | None = None
    failure: str | None = None
    turn_rewards: list[float] | None = None
    environment_seed: int | None = None
    reencoded: bool = False
    error: str | None = None
    debate: dict | None = None  # of a debater: answers, its seat, what both sides said
    weights: dict[str, float] | None = None
    forced: dict | None = None  # what budget forcing did to its thought (stages.evaluation.forcing)
    turn_parts: dict[str, list[float]] | None = None
    # (last tokens, rewards) of what its steps earned of ``total``, where a component pays them (step_credit)
    step_rewards: tuple[list[int], list[float]] | None = None
    seed: int | None = None  # that it was drawn with; None where nobody sampled it here
    opened: bool = False  # whether the template opened its thought
    # (last token, reward) of its reasoning steps, once they were scored (advantage=process)
    steps: tuple[list[int], list[float]] | None = None
    preferred: float | None = None  # P(it beats the other of its pair), where a record says it
    feedback: str | None = None  # what rewards said of it in words

    @property
    def seen(self) -> str:
        """The text as verifiers and judges take it apart: with the mark that begins its thought, where the template
        wrote it and the thought does not end.
        """
        return seen(self.text, self.opened)

    @property
    def action_mask(self) -> list[int]:
        """1 on tokens that the policy chose, 0 on those of tools and environment (MASK-TOOL)."""
        return [1] * len(self.ids) if self.tool_mask is None else [1 - t for t in self.tool_mask]

    @property
    def off_policy(self) -> bool:
        """Whether ``logps`` are not log-probs of this completion behind what it is trained behind."""
        return self.mode == "sft" or (self.context is not None and self.context_ids is None)

    @property
    def lost(self) -> bool:
        """Whether there is no answer to judge: its engine gave none, or its environment failed."""
        return self.error is not None or bool(self.failure)

    @property
    def terminated(self) -> bool:
        return self.finish_reason in ("eos", "stop", "goal")


#: Plain-text prompts for models without chat training, filled with the last message (RL-ZERO). think_answer is
#: DeepSeek-R1-Zero's, zero_shot_cot that of Kojima et al. 2022.
PROMPT_TEMPLATES = {
    "none": "{question}",
    "zero_shot_cot": "Question: {question}\nAnswer: Let's think step by step.",
    "think_answer": (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The"
        " assistant first thinks about the reasoning process in the mind and then provides the user with the answer."
        " The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags,"
        " respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: {question}."
        " Assistant:"
    ),
}


def prompt_ids(renderer, messages, template: str = "chat") -> list[int]:
    """Ids of a prompt under the model's chat template, or as plain text under one of ``PROMPT_TEMPLATES``."""
    if template == "chat":
        return renderer.prompt_ids(messages)
    if any(message.get("functions") or message.get("function_calls") for message in messages):
        from stages.chat import RenderError

        raise RenderError(
            f"prompt_template={template} shows the last message alone, and the prompt has tools; write"
            " prompt_template=chat."
        )
    return renderer.text_ids(
        PROMPT_TEMPLATES[template].replace("{question}", messages[-1].get("content") or ""), end=False
    )


def prompt_rows(
    stage,
    dataset,
    split: str | None,
    renderer,
    max_prompt_length: int,
    limit: int | None = None,
    template: str = "chat",
    ids_of=None,
    first: bool = False,
):
    """``[(row, prompt ids)]`` of a ``prompts/1`` split; prompts over the length limit are left out, counted and named.
    ``ids_of``: row -> its ids, where its prompt alone is not what is shown. ``first``: ``limit`` counts those that are
    left out, too, so that whoever answers is asked among the same prompts.
    """
    from stages.chat import rendering

    rows, too_long = [], 0
    for row in islice(dataset.iter_rows(split=split), limit if first else None):
        with rendering(row):
            ids = prompt_ids(renderer, row["prompt"], template) if ids_of is None else ids_of(row)
        if len(ids) > max_prompt_length:
            too_long += 1
            continue
        rows.append((row, ids))
        if limit is not None and len(rows) >= limit:
            break
    if too_long:
        stage.warn(
            "prompts_too_long",
            f"{too_long} prompts have more than max_prompt_length={max_prompt_length} tokens and are left out. Raise"
            " max_prompt_length to use them, or lower max_completion_length where the model has no more positions.",
        )
    if not rows and not too_long:
        raise ValueError(
            f"{dataset.name} has no prompts in split {split!r}; it has"
            f" {', '.join(f'{name} ({n})' for name, n in dataset.manifest['splits'].items())}. Write"
            f" split={next(iter(dataset.manifest['splits']), 'train')}, or give a dataset with that split."
        )
    if not rows:
        among = " among its first " + str(limit) if first and limit is not None else ""
        raise ValueError(
            f"No prompt with at most max_prompt_length={max_prompt_length} tokens in split {split!r} of {dataset.name}{among}."
            f" Raise max_prompt_length{' or limit' if among else ''}, lower max_completion_length where the model has no more positions, or give"
            " shorter prompts."
        )
    return rows


def by_prompt_id(stage, rows, wanted) -> dict[str, dict]:
    """{prompt_id: prompt row} for scoring stored completions, which know their prompt by its text. Raises ConfigError
    where one of the ``wanted`` ids has rows with different answers, tests or constraints: by which of them a completion
    was to be judged is not stored."""
    from stages.spec import ConfigError

    found, apart = {}, {}
    for row in rows:
        first = found.setdefault(row["prompt_id"], row)
        if (
            first is not row
            and row["prompt_id"] in wanted
            and any((first.get(name) or None) != (row.get(name) or None) for name in ("answer", "tests", "constraints"))
        ):
            apart[row["prompt_id"]] = row
    if apart:
        row = next(iter(apart.values()))
        raise ConfigError(
            f"{stage.name}: {len(apart)} prompts come twice with different answers, tests or constraints, for example"
            f" {(row['prompt'][-1].get('content') or '')[:80]!r}, and stored completions do not say which of them they"
            " answer; ingest the prompts with deduplicate=auto, which keeps the first, and sample again"
        )
    return found


def sampling_params(config, renderer):
    """What a stage's settings ask of an engine. A stop string that is a special token is a stop token: texts are
    without special tokens.
    """
    from stages.decoding.sampler import unseen_tokens
    from stages.decoding.sampling import SamplingParams

    special = unseen_tokens(renderer.tokenizer) if config.stop_strings else {}
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_new_tokens=config.max_completion_length,
        stop_ids=frozenset(renderer.stop_ids) | {special[s] for s in config.stop_strings if s in special},
        stop_strings=tuple(s for s in config.stop_strings if s not in special),
        min_tokens=config.min_tokens,
        logit_bias=config.logit_bias,
        bad_words=tuple(config.bad_words),
        repetition_penalty=config.repetition_penalty,
        frequency_penalty=config.frequency_penalty,
        presence_penalty=config.presence_penalty,
    )


def sample_groups(sampler, rows, params, seeds) -> list[list[Sample]]:
    """G completions of each ``(row, prompt ids)``; ``seeds[i]`` lists the seeds of prompt i.

    Several ranks share the prompts; a completion depends on its own seed alone, so all of them get what one would have
    drawn.
    """
    from stages.running import ranks

    mine = range(ranks.rank(), len(rows), ranks.world_size())
    found = sampler.generate([rows[i][1] for i in mine], params, [seeds[i] for i in mine]) if len(mine) else []
    completions = {i: group for part in ranks.gather(dict(zip(mine, found))) for i, group in part.items()}
    opens = opens_thought(getattr(sampler, "tokenizer", None))
    return [
        [
            Sample(
                row,
                ids,
                k,
                c.ids,
                c.logps,
                c.finish_reason,
                c.text,
                reencoded=c.reencoded,
                error=c.error,
                seed=seeds[i][k],
                opened=opened,
            )
            for k, c in enumerate(completions[i])
        ]
        for i, (row, ids) in enumerate(rows)
        for opened in (opens(ids),)
    ]


def opens_thought(tokenizer):
    """ids -> whether a prompt ends with ``<think>``, which templates of models that always reason write themselves;
    never without a tokenizer.
    """
    from stages.verification.responses import TAGS

    return lambda ids: (
        tokenizer is not None
        and tokenizer.decode(list(ids[-16:]), skip_special_tokens=False).rstrip().endswith(TAGS[0])
    )


def seen(text: str, opened: bool) -> str:
    """A completion behind the mark of the thought that its prompt opened, where it does not close it: without that, a
    thought that was cut would be read as the answer.
    """
    from stages.verification.responses import TAGS

    return TAGS[0] + text if opened and TAGS[1] not in text else text


def room_after(sampler, prompt, tokens: int) -> int:
    """How many of so many tokens the sampler's model has positions for behind a prompt's ids."""
    from stages.decoding.decoders import max_positions

    model = getattr(sampler, "model", None)
    positions = max_positions(model) if model is not None else None
    return tokens if positions is None else min(tokens, positions - len(prompt))


def remembering(sampler):
    """A context for turns: the built-in sampler keeps the KV of its rows for prompts that continue them; other engines
    look after that themselves.
    """
    return getattr(sampler, "remembering", nullcontext)()


def sample_with_room(sampler, prompts, params, seeds, rooms, begun=None) -> list[list]:
    """Completions of every prompt with at most ``rooms[i]`` new tokens, together where the model has positions for the
    widest room. begun: how many last tokens of each prompt are its completion's first ones, which count for
    ``min_tokens`` and ``bad_words``.

    A completion is a function of (weights, prompt, seed), so one that is cut afterwards is the one that a lower limit
    gives.
    """
    from stages.decoding.sampler import text_of
    from stages.decoding.sampling import bad_word_ids

    widest = max(rooms, default=0)
    words = bad_word_ids(sampler.tokenizer, params.bad_words) if begun and params.bad_words else []
    calls: dict[tuple[int, int, tuple], list[int]] = {}
    for i, (prompt, room) in enumerate(zip(prompts, rooms)):
        limit, count = widest if room_after(sampler, prompt, widest) == widest else room, begun[i] if begun else 0
        ends = ends_of(words, prompt[len(prompt) - count :])
        calls.setdefault((limit, min(limit, max(0, params.min_tokens - count)), ends), []).append(i)
    out: list = [None] * len(prompts)
    for (limit, least, ends), rows in sorted(calls.items(), reverse=True):
        more = {"logit_processors": (*params.logit_processors, banned_at_start(ends))} if ends else {}
        for i, found in zip(
            rows,
            sampler.generate(
                [prompts[i] for i in rows],
                replace(params, max_new_tokens=limit, min_tokens=least, **more),
                [seeds[i] for i in rows],
            ),
        ):
            out[i] = [
                (
                    c
                    if len(c.ids) <= rooms[i]
                    else replace(
                        c,
                        ids=c.ids[: rooms[i]],
                        logps=c.logps[: rooms[i]] if c.logps is not None else None,
                        finish_reason="length",
                        text=text_of(sampler.tokenizer, c.ids[: rooms[i]]),
                    )
                )
                for c in found
            ]
    return out


def ends_of(words, ids: list[int]) -> tuple[tuple[int, ...], ...]:
    """What would end one of the ``words`` (token sequences) that the last of these ids begin."""
    return tuple(
        sorted(
            {tuple(word[k:]) for word in words for k in range(1, min(len(word), len(ids) + 1)) if ids[-k:] == word[:k]}
        )
    )


def banned_at_start(sequences):
    """A logit processor: the last token of each sequence is impossible where a completion began with the others."""
    import torch

    def ban(z, generated, counts):
        for *head, last in sequences:
            if len(head) <= generated.shape[1]:
                same = (generated[:, : len(head)] == torch.tensor(head, dtype=torch.int64, device=z.device)).all(1)
                z[(counts == len(head)) & same, last] = float("-inf")
        return z

    return ban


def check_continued(sampler, params) -> None:
    """Refuse settings that would not see the tokens that a continued completion begins with.

    Raises:
        SamplerError: a frequency or presence penalty, which engines count over new tokens only; banned words of several
            tokens on an engine that takes no logit processors, which could not ban their ends alone.
    """
    from stages.decoding.sampler import SamplerError
    from stages.decoding.sampling import bad_word_ids

    for name in (name for name in ("frequency_penalty", "presence_penalty") if getattr(params, name)):
        raise SamplerError(
            f"{name}={getattr(params, name)} counts the tokens of a completion, and here completions are continued,"
            " whose first tokens it would not see; leave it out, or write repetition_penalty, which counts prompt and"
            " completion"
        )
    if getattr(sampler, "takes_processors", True):
        return
    single = {ids[0] for ids in bad_word_ids(sampler.tokenizer, params.bad_words) if len(ids) == 1}
    for word in params.bad_words:
        if any(len(ids) > 1 and ids[-1] not in single for ids in bad_word_ids(sampler.tokenizer, (word,))):
            raise SamplerError(
                f"bad_words: {word!r} is several tokens, and here completions are continued; {sampler.name} would not"
                " see that their first tokens begin the word, so that it could be completed. Write engine=builtin, or"
                " leave this word out"
            )


def continuations(sampler, starts, params, seeds) -> list[list[Sample]]:
    """Completions that begin as ``(sample, tokens)`` says: with so many tokens of that sample; as whole completions of
    its prompt. Ranks share the work.

    What counts a completion's tokens counts those that it begins with: min_tokens, stop strings and banned words (also
    ones that begin among them).

    Raises:
        SamplerError: :func:`check_continued`.
    """
    from stages.decoding.sampler import DerivedText
    from stages.running import ranks

    check_continued(sampler, params)
    mine = list(range(ranks.rank(), len(starts), ranks.world_size()))
    given = {i: (starts[i][0].prompt_ids, starts[i][0].ids[: starts[i][1]]) for i in mine}
    made = (
        sample_with_room(
            sampler,
            [given[i][0] + given[i][1] for i in mine],
            params,
            [seeds[i] for i in mine],
            [params.max_new_tokens - len(given[i][1]) for i in mine],
            [len(given[i][1]) for i in mine],
        )
        if mine
        else []
    )
    derived = DerivedText(sampler.tokenizer, params)
    found = {
        i: [(*derived.ended(given[i][1], list(c.ids), c.finish_reason), c.error) for c in group]
        for i, group in zip(mine, made)
    }
    everyone = {i: group for part in ranks.gather(found) for i, group in part.items()}

    def spoken(ids):
        return [t for t in ids if t not in params.stop_ids]

    return [
        [
            Sample(
                sample.prompt,
                sample.prompt_ids,
                j,
                ids,
                [],
                reason,
                derived.of(spoken(ids), len(spoken(sample.ids[:count]))),
                error=error,
                opened=sample.opened,
            )
            for j, (ids, reason, error) in enumerate(everyone[i])
        ]
        for i, (sample, count) in enumerate(starts)
    ]


def warn_of_failures(stage, engine, samples: list[Sample]) -> None:
    """Name the rows that the engine has no completion for: they are stored with the reason and count nowhere."""
    failed = [s for s in samples if s.error is not None]
    if failed:
        stage.warn(
            "engine_rows_failed",
            f"{engine.name} has no completion for {len(failed)} of {len(samples)} rows asked for at once; they are left"
            " out. Look at why, and run the stage again where the server was at fault. The first reason:"
            f" {failed[0].error}",
        )


def _verdict_row(s: Sample, group=None) -> dict:
    """A sample as ``stages.reward.rewards.Rewards`` reads it."""
    return {
        "prompt_row": s.prompt,
        "prompt_ids": s.prompt_ids,
        "completion_text": s.text,
        "completion_ids": s.ids,
        "finish_reason": s.finish_reason,
        "turns": s.turns,
        "failure": s.failure,
        "debate": s.debate,
        "group": group,
        "opened": s.opened,
    }


def preferences(rewards, name: str, pairs: list[tuple[Sample, Sample]]) -> list[float]:
    """P(the first sample is better) of each pair by the reward component ``name``, whose model compares; NaN where it
    cannot be read. Of several ranks the first one asks."""
    from stages.running import ranks

    found = (
        rewards.preferences(name, [(_verdict_row(a), _verdict_row(b)) for a, b in pairs]) if ranks.rank() == 0 else None
    )
    return ranks.gather(found)[0]


def score(rewards, samples: list[Sample], group_of: list | None = None) -> None:
    """Fill the reward fields of every sample, in place. Of several ranks the first one asks (a judge is asked once) and
    tells the others. ``group_of`` names what each sample is compared within by rewards that compare (majority,
    length_group); default: its prompt."""
    from stages.running import ranks

    for sample in (s for s in samples if s.error is not None):
        sample.parts, sample.reasons = {}, {"engine": sample.error}
    pairs = [(s, g) for s, g in zip(samples, group_of or [None] * len(samples)) if s.error is None]
    samples, scored = [s for s, _ in pairs], None
    if ranks.rank() == 0:
        scored = rewards.score([_verdict_row(s, g) for s, g in pairs])
    for sample, result in zip(samples, ranks.gather(scored)[0]):
        sample.total = float("nan") if result.total is None or sample.failure else float(result.total)
        sample.parts, sample.reasons, sample.correct, sample.items = (
            result.parts,
            result.reasons,
            result.correct,
            result.items,
        )
        sample.tier, sample.weights, sample.turn_rewards, sample.turn_parts = (
            result.tier,
            result.weights,
            result.turn_rewards,
            result.turn_parts,
        )
        sample.step_rewards, sample.feedback = result.step_rewards, result.feedback


def regrade(rewards, samples: list[Sample]) -> None:
    """Rubric rewards anew, in place, for samples that were scored in several calls: a category's confidence is a mean
    over all of them (GRAPE-REWARD).
    """
    component = next((c for c in rewards.components if c.kind == "rubric"), None)
    graded = [s for s in samples if s.items] if component else []
    for sample, value in zip(
        graded, rewards.scorers[component.name].aggregate([s.items for s in graded]) if graded else []
    ):
        sample.parts[component.name] = value
        found = rewards.total_of(sample.parts, sample.reasons)
        if sample.turn_rewards and found.total is not None:
            sample.turn_rewards[-1] += found.total - sample.total
        sample.total = float("nan") if found.total is None or sample.failure else found.total


def gen_record(
    stage, config, renderer, seed: int, version: int = 0, engine: str = "built-in", role: str = "model"
) -> dict:
    """The ``gen`` struct of a row that the model input ``role`` generated."""
    return {
        "model_id": stage.inputs[role].ref,
        "checkpoint_id": stage.inputs[role].digest,
        "policy_version": version,
        "template_id": renderer.template_hash,
        "engine": engine,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_tokens": config.max_completion_length,
        "rng_seed": seed,
    }


#: Why a candidate has no answer at all: its engine or server never gave one, which says nothing about the model.
UNANSWERED = ("engine_error", "request_too_long")
#: Why a candidate is no whole answer: whoever learned from it would learn to be cut, or to say nothing.
NO_ANSWER = (*UNANSWERED, "truncated", "empty")


def stored_completion(renderer, row: dict) -> tuple[list[int], str, str | None]:
    """(token ids, finish reason, error) of a ``candidates/1`` row, for scoring it again. The stored ids are taken where
    they spell its text in the renderer's vocabulary; a row without ids (ingested, or of stages that keep texts), or of
    a model with another tokenizer, has the ids of its text, and its end of turn where it ended by itself."""
    from stages.decoding.sampler import text_of
    from stages.pairs import trim

    extra, text = json.loads(row["extra_json"] or "{}"), row["completion"][-1].get("content") or ""
    lost = row["drop_reason"] if row["kept"] is False and row["drop_reason"] in UNANSWERED else None
    finish = extra.get("finish_reason") or (
        "error" if lost else "length" if row["kept"] is False and row["drop_reason"] == "truncated" else "eos"
    )
    ids = extra.get("completion_ids") or []
    if (
        text
        and renderer is not None
        and not (ids and max(ids) < len(renderer.tokenizer) and text_of(renderer.tokenizer, ids).startswith(text))
    ):
        _, ids, mask = renderer.completion_ids(row["prompt"], row["completion"])
        ids, _ = trim(ids, mask)
        while finish == "length" and ids and ids[-1] in renderer.stop_ids:
            ids = ids[:-1]
    return ids, finish, extra.get("error") or lost


def geometric_mixture(logits, other_logits, coef: float):
    """(1 - coef) log pi + coef log other ``[..., V]``, float32: logits of pi^(1-c) other^c, whose softmax renormalises
    it (NASH, IPO-MD). ``coef`` weighs the other policy.
    """
    import torch

    return (1.0 - coef) * torch.log_softmax(logits.float(), -1) + coef * torch.log_softmax(other_logits.float(), -1)


class MixtureSampler:
    """Samples from the token-level geometric mixture pi^(1-c) ref^c, renormalised (NASH, IPO-MD); same interface as
    ``Sampler``.

    Both models keep a KV cache per prompt group; a completion is a function of (weights, prompt, seed, params) as in
    ``Sampler``.
    """

    name = "built-in"

    def __init__(self, policy, reference, tokenizer, coef: float):
        self.policy, self.reference, self.tokenizer, self.coef = policy, reference, tokenizer, coef

    def generate(self, prompts, params, seeds):
        import torch

        if params.processed or params.stop_strings:
            raise ValueError(
                "opponent=mixture samples without penalties, bans and stop strings; leave those settings out, or write"
                " opponent=ema"
            )
        was_training = self.policy.training
        self.policy.eval()
        try:
            with torch.inference_mode():
                return [self._group(prompt, params, of_prompt) for prompt, of_prompt in zip(prompts, seeds)]
        finally:
            self.policy.train(was_training)

    def _group(self, prompt, params, seeds):
        import torch

        from stages.decoding.sampler import Completion, text_of
        from stages.decoding.sampling import sample_step, uniforms

        device = next(self.policy.parameters()).device
        models, caches = (self.policy, self.reference), [None, None]
        tokens = torch.tensor([list(prompt)] * len(seeds), device=device)
        u = torch.as_tensor(uniforms(seeds, params.max_new_tokens)).to(device)
        ids, logps, done = [[] for _ in seeds], [[] for _ in seeds], [None] * len(seeds)
        for t in range(params.max_new_tokens):
            last = []
            for k, model in enumerate(models):
                out = model(input_ids=tokens, past_key_values=caches[k], use_cache=True)
                caches[k] = out.past_key_values
                last.append(out.logits[:, -1])
            token, logp = sample_step(geometric_mixture(*last, self.coef), u[:, t], params)
            for i, (drawn, its_logp) in enumerate(zip(token.tolist(), logp.tolist())):
                if done[i] is None:
                    ids[i].append(drawn)
                    logps[i].append(its_logp)
                    done[i] = (
                        "eos" if ids[i][-1] in params.stop_ids else "length" if t + 1 == params.max_new_tokens else None
                    )
            if all(done):
                break
            tokens = token[:, None]
        texts = [text_of(self.tokenizer, [x for x in row if x not in params.stop_ids]) for row in ids]
        return [Completion(i, p, reason, text) for i, p, reason, text in zip(ids, logps, done, texts)]
