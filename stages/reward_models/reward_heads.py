"""Reward models: any backbone that transformers can load, with a linear head, and the card that says how to read it.

Decoders (Llama-, Qwen-, GPT-2-class) read a response behind its prompt in their own chat template; encoders (BERT-,
RoBERTa-class) read ``[CLS] prompt [SEP] response [SEP]`` with attention in both directions. Which of the two a model
is, is found out by running it. Catalogue ``rm.head``.

Shapes: ``S`` responses of a batch, ``N`` trained tokens, ``C`` outputs of the head, ``B`` rows, ``T`` padded length,
``H`` hidden.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from stages.acting.tools import text_with_tools
from stages.batching import pad
from stages.models import adapters, dropout, pending
from stages.models.frozen import may_keep
from stages.models.modeling import ModelError, disable_dropout, freeze, hidden_states, precise, save_weights, settled
from stages.running import ranks

CALIBRATION_FILE = "reward_calibration.json"


@dataclass
class RewardCard:
    """What a reward-model directory says about itself, next to its weights.

    objective: row of ``REWARD_OBJECTIVES``, or ``combined`` / ``implicit``. bias: added to every raw score
    (``rm.calibrate``), anchor: whose mean score it makes 0. pooling: where the head reads. max_length: tokens a
    response and its prompt were cut to. options: what the objective's scorer needs (classes, label words, rating scale
    ...), and the variables that the chat template got in training.
    """

    objective: str = "bt"
    bias: float = 0.0
    anchor: str | None = None
    pooling: str = "last"
    max_length: int | None = None
    options: dict = field(default_factory=dict)

    def template(self) -> tuple[None, str]:
        """The ``template`` of :func:`reader_for` that the model was trained under: its own, with its variables."""
        return None, json.dumps(self.options.get("chat_template_kwargs", {}), sort_keys=True)


def read_card(path: str | Path) -> RewardCard:
    """The card of a model directory; a plain sequence classifier without one is a scalar reward model without
    calibration.
    """
    return RewardCard(**json.loads(Path(path, CALIBRATION_FILE).read_text())) if has_card(path) else RewardCard()


def has_card(path: str | Path) -> bool:
    """Whether a reward model says how it is read, as those of this project do."""
    return Path(path, CALIBRATION_FILE).exists()


def write_card(directory: str | Path, card: RewardCard) -> None:
    if ranks.rank() != 0:
        return
    Path(directory, CALIBRATION_FILE).write_text(json.dumps(asdict(card), sort_keys=True, indent=1) + "\n")


# -- models ------------------------------------------------------------------------------------------------------------


def new_reward_model(
    path: str,
    device: str = "cpu",
    seed: int = 0,
    outputs: int = 1,
    in_shards: bool = False,
):
    """Reward model on the backbone in ``path`` with a fresh head of C outputs ~ N(0, 1/(H+1)), bias 0 (``rm.head``)."""
    model = load_reward_model(path, device, outputs=outputs, in_shards=in_shards)
    head = score_head(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        fresh = (
            torch.randn(head.weight.shape, generator=generator, dtype=torch.float32) / (head.weight.shape[1] + 1) ** 0.5
        )
        head.weight.copy_(fresh.to(head.weight.dtype))
        if head.bias is not None:
            head.bias.zero_()
    return model


def load_reward_model(
    path: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    outputs: int | None = None,
    in_shards: bool = False,
):
    """``AutoModelForSequenceClassification``, dropout off, float32 head; ``outputs`` None keeps the head that is there.
    ``in_shards`` leaves all but the head in its files until the model is sharded (:mod:`stages.models.pending`).

    Raises:
        ModelError: the directory holds no decoder or encoder that can carry a linear head.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # "score.weight newly initialised" is what we want here
    try:
        config = AutoConfig.from_pretrained(path)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"{path} is an encoder-decoder; give a decoder (Llama-, Qwen-, GPT-2-class) or an encoder (BERT-,"
                " RoBERTa-class)."
            )
        labels = {} if outputs is None else {"num_labels": outputs}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # layers that the checkpoint lacks (a pooler) must not depend on who ran before
            model = pending.load(
                AutoModelForSequenceClassification,
                path,
                device,
                in_shards,
                labels,
                of_the_head,
                dtype=dtype,
                ignore_mismatched_sizes=outputs is not None,
            )
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        what = str(error).split("\n", 1)[0].rstrip(".")  # transformers goes on with a list of all its architectures
        if isinstance(error, OSError) or "other shapes" in what or "its files lack" in what:
            raise ModelError(f"{path} is no complete model: {what}. Copy or download it again.") from error
        raise ModelError(
            f"{path} cannot be loaded as a sequence classifier ({what}). Give a decoder (Llama-, Qwen-, GPT-2-class), "
            "an encoder (BERT-class), or a reward model trained by the reward_model stage."
        ) from error
    finally:
        hf_logging.set_verbosity(verbosity)
    disable_dropout(model)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    pending.fill(model, [score_head(model)])
    score_head(model).float().to(device)
    model.reads_both_ways = _reads_both_ways(model)
    return model


def check_head(path: str, outputs: int) -> None:
    """Refuse to go on from a head that is not there, or has another number of outputs: a random one would take its
    place.

    Raises:
        ModelError: says which head the directory has.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    classifier = any("SequenceClassification" in name for name in config.architectures or ())
    if not classifier or config.num_labels != outputs:
        there = f"one of {config.num_labels} outputs" if classifier else "none"
        raise ModelError(
            f"init_head=keep goes on from the head of a reward model, and {path} has {there} where this objective reads"
            f" {outputs}; give a reward model of the same objective, or write init_head=fresh."
        )


def load_frozen_reward(path: str, device: str = "cpu", how: str = "auto"):
    """:func:`load_reward_model` of a model that is never trained, the matrices of its backbone kept as ``how``
    (``frozen_dtype``) says.
    """
    return settled(
        freeze(load_reward_model(path, device, in_shards=may_keep(path, how))), path, device, how, in_shards=False
    )


def of_the_head(model, name: str) -> bool:
    """Whether a weight lies outside the backbone, or in its pooler, so that a language model brings none and it is made
    here.
    """
    return not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name


def _reads_both_ways(model) -> bool:
    """Whether a later token changes an earlier state: an encoder. Asked of the model itself, not of a list of names; of
    one made-up layer of it where its own weights are still in files."""
    if pending.is_pending(model):
        config = copy.deepcopy(model.base_model.config)
        config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 8, None
        with torch.random.fork_rng(devices=[]):
            layer = type(model.base_model)(config)
        layer.base_model_prefix = ""
        return _reads_both_ways(layer)
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]], device=device)
    with torch.no_grad():
        first = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[:, 0]
    model.train(was_training)
    return not torch.equal(first[0], first[1])


def score_head(model) -> nn.Linear:
    """The last linear layer with C outputs outside the backbone: ``score`` in decoders, ``classifier`` or its
    ``out_proj`` in encoders.
    """
    if adapters.is_adapted(model):
        model = model.get_base_model()
    inside = {id(m) for m in model.base_model.modules()} if model.base_model is not model else set()
    outputs = getattr(model.config, "num_labels", 1)
    found = [
        m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside and m.out_features == outputs
    ]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no linear head with {outputs} outputs; use a decoder- or encoder-only"
            " architecture that AutoModelForSequenceClassification knows."
        )
    return found[-1]


def with_another_pad(tokenizer):
    """The tokenizer, padding with no token that ends an answer: transformers' sequence classifiers read the last token
    that is not the pad token, which where the end token serves as both is the one before it. Pads are masked, so any
    other special token does; the same tokenizer where it has none.
    """
    from stages.chat import Renderer, RenderError

    stops = {tokenizer.eos_token_id}
    if tokenizer.chat_template is not None and tokenizer.eos_token_id is not None:
        with contextlib.suppress(RenderError):
            stops |= Renderer(tokenizer).stop_ids
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in stops:
        return tokenizer
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special} | {
        str(token): tokenizer.convert_tokens_to_ids(str(token)) for token in tokenizer.all_special_tokens
    }
    known = [str(token) for token in (tokenizer.unk_token, tokenizer.bos_token) if token]
    # the vocabulary's own for it (Llama 3: <|finetune_right_pad_id|>) first
    order = sorted(special, key=lambda token: ("pad" not in token.lower(), token not in known, special[token]))
    free = [token for token in order if special[token] not in stops]
    if not free:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = free[0]
    return tokenizer


def save_reward_model(
    model,
    tokenizer,
    directory: str | Path,
    card: RewardCard | None = None,
    dtype: torch.dtype | None = None,
    trains_on: bool = False,
) -> None:
    """Write weights (a LoRA adapter merged in), tokenizer and card;
    :func:`stages.reward_models.reward_scorers.load_scorer` reads all three. ``dtype``, ``trains_on``: see
    :func:`stages.models.modeling.save_weights`.
    """
    tokenizer = with_another_pad(tokenizer)
    pending.plain(model).config.pad_token_id = tokenizer.pad_token_id
    save_weights(model, directory, dtype, trains_on)
    if ranks.rank() == 0:
        tokenizer.save_pretrained(directory)
    write_card(directory, card or RewardCard())


# -- what the head reads -----------------------------------------------------------------------------------------------


def states_of(model, batch, at=None) -> torch.Tensor:
    """Last hidden states at the flat positions ``at`` (all of them without it), ``[N, H]``."""
    if not model.reads_both_ways:
        return hidden_states(model, batch, at)
    inputs, where = _encoder_inputs(model, batch)
    return model.base_model(**inputs).last_hidden_state.flatten(0, 1)[where if at is None else where[at]]


def _encoder_inputs(model, batch):
    """(an encoder's inputs, where each flat token stands in them): one row per response; items of encoders share no
    prompt.
    """
    rows = pad(batch, "rows")
    if (places := dropout.active(model)) is not None:
        places.in_rows(batch, rows)
    mask = torch.zeros(rows.ids_BT.numel(), dtype=torch.long, device=rows.ids_BT.device)
    mask[rows.where_U] = 1
    inputs = {"input_ids": rows.ids_BT, "attention_mask": mask.view_as(rows.ids_BT)}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        first = torch.tensor([n for i in batch.items for n in i.extra["first"]], device=mask.device)
        inputs["token_type_ids"] = (
            (torch.arange(rows.ids_BT.shape[1], device=mask.device)[None] >= first[:, None])
            & inputs["attention_mask"].bool()
        ).long()
    return inputs, rows.where_U


def response_outputs(model, batch, pooling: str = "last") -> torch.Tensor:
    """Head outputs of each response ``[S, C]``, float32 or better.

    ``last`` reads the response's last token, ``mean`` averages prompt and response tokens (merged into one), ``cls`` is
    the encoder's own pooled head (its pooler or dense layer before the last linear one), computed in float32
    throughout.
    """
    device = batch.ids_U.device.type
    if pooling == "cls":
        with torch.autocast(device, enabled=False):
            return precise(model(**_encoder_inputs(model, batch)[0]).logits)
    if pooling == "mean":
        pooled = mean_states(model, batch)
    else:
        pooled = precise(states_of(model, batch, batch.last_S))
    with torch.autocast(device, enabled=False):  # head and scores stay float32
        return score_head(model)(pooled)


def mean_states(model, batch) -> torch.Tensor:
    """Mean of the last hidden states of each response's tokens ``[S, H]``, float32 or better; prompts are merged into
    the responses.
    """
    states = precise(states_of(model, batch))
    lengths = torch.tensor([n for _, responses in batch.segments for n in responses], device=states.device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=states.device), lengths)
    return states.new_zeros(len(lengths), states.shape[1]).index_add(0, owner, states) / lengths[:, None]


def own_positions(batch) -> torch.Tensor:
    """Flat position ``[N]`` of each trained token itself (``batch.src_N`` is the position that predicts it)."""
    lengths = torch.tensor([len(r) for i in batch.items for r in i.responses], device=batch.last_S.device)
    return (batch.last_S - lengths + 1)[batch.seq_N] + batch.col_N


def token_outputs(model, batch, pooling: str = "last") -> torch.Tensor:
    """Head outputs at every trained token ``[N, C]``: outcome, value and process models read along the response."""
    states = precise(states_of(model, batch, own_positions(batch)))
    with torch.autocast(states.device.type, enabled=False):
        return score_head(model)(states)


def label_outputs(model, batch, pooling: str = "last") -> torch.Tensor:
    """Log-probability of every label token ``[N]`` under a causal LM, over the full vocabulary (``rm.t2t_point``)."""
    from stages.models.modeling import target_logps

    return target_logps(model, batch)[0]


#: What an objective reads: of each response, of each of its trained tokens, or of label tokens under the LM head.
READS = {"response": response_outputs, "tokens": token_outputs, "labels": label_outputs}


# -- how text becomes ids ----------------------------------------------------------------------------------------------


class ChatReader:
    """Decoders: the model's own chat template; the prompt is shared by the responses of an item."""

    def __init__(self, renderer, max_length: int, merged: bool = False):
        self.renderer, self.tokenizer, self.max_length, self.merged = renderer, renderer.tokenizer, max_length, merged
        self.room = max_length

    def parts(self, prompt, completions, ends=()):
        """(prompt ids, [(ids, mask)]) before any cut; trailing template text behind the last trained token is
        dropped. ``ends``: whether each completion came to its end; without them all did.
        """
        from stages.pairs import trim

        return self._made(prompt, completions, ends, trim)

    def _made(self, prompt, completions, ends, read):
        ends = ends or [True] * len(completions)
        made = [self.renderer.completion_ids(prompt, c, ended) for c, ended in zip(completions, ends, strict=True)]
        return made[0][0], [read(list(ids), list(mask)) for _, ids, mask in made]

    def instruction(self, text: str) -> list[int]:
        """Ids of a request to the model, up to where its answer starts."""
        return self.renderer.prompt_ids([{"role": "user", "content": text}])

    def plain(self, text: str) -> list[int]:
        return self.renderer._plain_ids(text)

    def prompt(self, prompt) -> list[int]:
        return self.renderer.prompt_ids(prompt)

    def ended(self, ids) -> bool:
        return ids[-1] in self.renderer.stop_ids

    def wrap(self, prompt, response, mask):
        """(prompt ids, ids, mask, length of the first segment) of one row."""
        if self.merged:
            return [], [*prompt, *response], [0] * len(prompt) + list(mask), len(prompt)
        return prompt, response, mask, len(prompt)


class PlainReader(ChatReader):
    """Decoders without a card, which somebody else trained: conversations as the template writes them to their end, and
    the score at the last token that is not the pad token, where transformers' own forward reads it, and TRL's trainers
    with it.
    """

    def __init__(self, renderer, max_length: int, pad: int | None):
        super().__init__(renderer, max_length)
        self.pad = pad

    def parts(self, prompt, completions, ends=()):
        return self._made(prompt, completions, ends, self._read)

    def _read(self, ids, mask):
        end = len(ids)
        while end > 1 and ids[end - 1] == self.pad:
            end -= 1
        return ids[:end], mask[:end]


class EncoderReader:
    """Encoders: both texts between the tokenizer's own special tokens, one row per response."""

    merged = True

    def __init__(self, tokenizer, max_length: int):
        self.tokenizer, self.max_length = tokenizer, max_length
        probe = tokenizer("a", "a", return_special_tokens_mask=True)
        special, ids = probe["special_tokens_mask"], probe["input_ids"]
        words = [i for i, s in enumerate(special) if not s]
        if not words or not any(special[words[0] : words[-1]]):
            raise ModelError(
                "the encoder's tokenizer writes no special token between two texts, so the model could not tell the"
                ' prompt from the response; give a model whose tokenizer does (tokenizer("a", "b") of BERT: [CLS] a'
                " [SEP] b [SEP]), or set tokenizer.backend_tokenizer.post_processor and save it."
            )
        gap = next(i for i in range(words[0], len(ids)) if special[i])
        second = next(i for i in range(gap, len(ids)) if not special[i])
        self.lead, self.middle, self.tail = ids[: words[0]], ids[gap:second], ids[words[-1] + 1 :]
        self.room = max_length - len(self.lead) - len(self.middle) - len(self.tail)

    def parts(self, prompt, completions, ends=()):
        return self.prompt(prompt), [(ids, [1] * len(ids)) for ids in (self.plain(transcript(c)) for c in completions)]

    def instruction(self, text: str) -> list[int]:
        return self.plain(text)

    def plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def prompt(self, prompt) -> list[int]:
        return self.plain(transcript(prompt))

    def ended(self, ids) -> bool:
        return True

    def wrap(self, prompt, response, mask):
        first = [*self.lead, *prompt, *self.middle]
        return [], [*first, *response, *self.tail], [0] * len(first) + list(mask) + [0] * len(self.tail), len(first)


def transcript(messages) -> str:
    """Messages as plain text for models without a chat template: one message is its content, several carry their roles;
    tools and calls follow the text as they are stored.
    """

    if len(messages) == 1:
        return text_with_tools(messages[0])
    names = {"user": "Human", "assistant": "Assistant"}
    return "\n\n".join(f"{names.get(m['role'], m['role'].capitalize())}: {text_with_tools(m)}" for m in messages)


def reader_for(
    path: str, model, max_length: int | None, pooling: str = "last", template: tuple[str | None, str] = (None, "{}")
):
    """The reader that fits a model: its positions bound ``max_length``.

    template: another chat template than the model's own and its variables, as ``ChatConfig.template`` gives them; an
    encoder has none.
    """
    limit = _positions(model)
    max_length = min(x for x in (max_length, limit, 1 << 30) if x is not None)
    if getattr(model, "reads_both_ways", False):
        from transformers import AutoTokenizer

        return EncoderReader(AutoTokenizer.from_pretrained(path), max_length)
    from stages.chat import renderer_for

    return ChatReader(renderer_for(path, *template), max_length, merged=pooling == "mean")


def _positions(model) -> int | None:
    """Positions the model has; RoBERTa-class encoders (MPNet, XLM-R, ESM ...) number them from behind their position
    table's padding index.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    offset = next((table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None), 0)
    return None if limit is None or limit <= 0 else limit - offset


def resolve_pooling(pooling: str, model, reads: str) -> str:
    """``auto`` is the last token for decoders and the mean for encoders. Where the class itself can average
    (``classifier_pooling``: ModernBERT), the mean is its own pooled head (``cls``) told to do so, and whoever loads the
    published model reads the same score.

    Raises:
        ModelError: a pooling that the architecture or the objective does not have.
    """
    both = getattr(model, "reads_both_ways", False)
    if pooling == "auto":
        pooling = "mean" if both and reads == "response" else "last"
    if pooling == "cls" and not both:
        raise ModelError(
            "pooling=cls reads the first token, which in a decoder has seen nothing yet; write pooling=last or mean."
        )
    if pooling == "last" and both and reads == "response":
        raise ModelError("pooling=last reads an encoder's closing separator; write pooling=mean or cls.")
    if reads != "response" and pooling != "last":
        raise ModelError(
            f"pooling={pooling} gives one state per response, but this objective reads every trained token; write"
            " pooling=auto."
        )
    if pooling == "mean" and hasattr(model.config, "classifier_pooling"):
        model.config.classifier_pooling = "mean"
        if hasattr(model, "classifier_pooling"):  # EuroBERT's class keeps a copy
            model.classifier_pooling = "mean"
        return "cls"
    return pooling


# -- the language-model head kept beside the reward head ---------------------------------------------------------------


def keep_lm_head(model, path: str):
    """Keep the LM head of ``path`` on a decoder reward model while it trains; returns ``model -> Head``.

    Tied heads are the embedding itself; an untied one becomes the submodule ``kept_lm_head``, dropped by
    :func:`drop_lm_head`.

    Raises:
        ModelError: ``path`` holds no language model of its own (an encoder, or a reward model).
    """
    from transformers import AutoConfig

    from stages.models.modeling import Head, head_of, load_policy

    architectures = AutoConfig.from_pretrained(path).architectures or []
    if model.reads_both_ways or any("SequenceClassification" in name for name in architectures):
        raise ModelError(
            f"{path} has no language-model head to keep; set lm_loss_weight=0 and outcome_head=linear, or start from a"
            " causal LM."
        )
    policy = load_policy(path, str(next(model.parameters()).device), next(model.parameters()).dtype)
    head = head_of(policy)
    scale, softcap = head.scale, head.softcap
    if policy.get_output_embeddings().weight is policy.get_input_embeddings().weight:
        return lambda m: Head(m.get_input_embeddings().weight, None, scale, softcap)
    model.kept_lm_head = policy.get_output_embeddings()
    return lambda m: Head(m.kept_lm_head.weight, m.kept_lm_head.bias, scale, softcap)


def add_gain_bias(model, lm_head, token_id: int):
    """Cobbe's outcome head: p = sigma(gain * logit of one reserved token + bias); returns how to read it
    (``rm.orm``).
    """
    dtype = next(model.parameters()).dtype
    device = next(model.parameters()).device
    model.reward_gain = nn.Parameter(torch.ones((), dtype=dtype, device=device))
    model.reward_offset = nn.Parameter(torch.zeros((), dtype=dtype, device=device))
    score_head(model).weight.requires_grad_(False)

    def read(m, batch, pooling="last"):
        states = precise(states_of(m, batch, own_positions(batch)))
        with torch.autocast(states.device.type, enabled=False):  # as every head
            weight, bias = _token_row(lm_head(m), token_id)
            return m.reward_gain * (states @ weight[:, None] + bias) + m.reward_offset

    return read


def _token_row(head, token_id: int):
    """(weight [H], bias) of one token's logit, scaling included."""
    bias = 0.0 if head.bias is None else head.bias[token_id]
    return precise(head.weight[token_id]) * head.scale, bias * head.scale


def drop_lm_head(model, lm_head=None, token_id: int | None = None) -> float:
    """Remove what was kept for training; a gain-bias head becomes the linear head it equals. Returns its constant
    term.
    """
    offset = 0.0
    if hasattr(model, "reward_gain"):
        with torch.no_grad():
            weight, bias = _token_row(lm_head(model), token_id)
            score_head(model).weight.copy_((model.reward_gain * weight)[None])
            offset = float(model.reward_gain * bias + model.reward_offset)
        del model.reward_gain, model.reward_offset
    if hasattr(model, "kept_lm_head"):
        del model.kept_lm_head
    return offset


@contextlib.contextmanager
def without_lm_head(model, lm_head=None, token_id: int | None = None) -> Iterator[float]:
    """Inside the block the model as :func:`drop_lm_head` leaves it, behind it what was trained, to be trained on;
    yields the constant term.
    """
    kept = {
        name: getattr(model, name) for name in ("reward_gain", "reward_offset", "kept_lm_head") if hasattr(model, name)
    }
    weight = score_head(model).weight.detach().clone() if "reward_gain" in kept else None
    try:
        yield drop_lm_head(model, lm_head, token_id)
    finally:
        for name, part in kept.items():
            setattr(model, name, part)
        if weight is not None:
            with torch.no_grad():
                score_head(model).weight.copy_(weight)
