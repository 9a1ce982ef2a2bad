"""base_model: a small language model from nothing, with a tokenizer trained on the spot.

Trains a byte-level BPE tokenizer on the given text and conversations, adds a chat template with generation markers, and
initialises a Llama- or Qwen-class Hugging Face configuration with seeded weights. The result knows nothing yet:
pre-train it with the `sft` stage on `text/1` data. Same inputs and seed, same bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec

END_OF_TEXT, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PAD)

#: ChatML (`sft.template`), with the markers that Transformers uses to mask everything but the assistant's own tokens.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- (message['content'] or '') + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    "{%- else -%}{{- (message['content'] or '') + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


class Config(StageConfig):
    architecture: Literal["llama", "qwen2", "qwen3"] = Field(
        "qwen3", description="Hugging Face model class; qwen3 normalises queries and keys."
    )
    vocab_size: int = Field(
        768, ge=320, le=65536, description="Tokenizer entries at most: 4 special tokens, 256 bytes, merges."
    )
    hidden_size: int = Field(256, ge=16, description="Width; a multiple of num_attention_heads.")
    num_hidden_layers: int = Field(2, ge=1, description="Transformer blocks.")
    num_attention_heads: int = Field(8, ge=1, description="Attention heads.")
    num_key_value_heads: int = Field(8, ge=1, description="Key/value heads; divides num_attention_heads.")
    intermediate_size: int = Field(704, ge=16, description="Width of the gated MLP.")
    max_position_embeddings: int = Field(512, ge=64, description="Longest sequence in tokens.")
    rope_theta: float = Field(10000.0, gt=0, description="Rotary base frequency.")
    initializer_range: float = Field(0.05, gt=0, description="Standard deviation of the initial weights.")
    tokenizer_rows: int = Field(6000, ge=1, description="Rows per data set read to train the tokenizer.")

    @model_validator(mode="after")
    def _heads(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}; "
                f"write hidden_size {self.num_attention_heads * round(self.hidden_size / self.num_attention_heads)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads "
                f"{self.num_attention_heads}; write {self.num_attention_heads} or 1"
            )
        if (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads is {self.hidden_size // self.num_attention_heads}; rotary positions"
                " need an even head width, so change one of the two"
            )
        return self


SPEC = StageSpec(
    name="base_model",
    config=Config,
    inputs={
        "text": InputSpec("dataset", kinds=("text/1",), doc="Plain text the tokenizer is trained on."),
        "conversations": InputSpec(
            "dataset",
            kinds=("demonstrations/1",),
            required=False,
            doc="Demonstrations whose words the tokenizer should know too.",
        ),
    },
    outputs={"model": OutputSpec("model", role="policy")},
    doc="Trains a tokenizer and initialises a small causal language model.",
)


def run(stage) -> None:
    config = stage.config
    tokenizer = train_tokenizer(_texts(stage), config.vocab_size, config.max_position_embeddings, config.architecture)
    stage.progress(1, 2, "tokenizer trained")
    model = new_model(config, len(tokenizer), tokenizer, stage.seed_for("weights"))
    with stage.output_model("model", role="policy") as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    parameters = sum(p.numel() for p in model.parameters())
    stage.progress(2, 2, "weights initialised")
    stage.log(f"{type(model).__name__} with {parameters:,} parameters, {len(tokenizer)} tokens")
    stage.summary({"parameters": parameters, "vocab_size": len(tokenizer)})


def _texts(stage):
    """Training strings of the tokenizer, in a fixed order; never a held-out row."""
    limit = stage.config.tokenizer_rows
    for index, row in enumerate(stage.dataset("text").iter_rows(columns=["text"], split="train")):
        if index >= limit:
            break
        yield row["text"]
    if stage.has("conversations"):
        for index, row in enumerate(stage.dataset("conversations").iter_rows(columns=["messages"], split="train")):
            if index >= limit:
                break
            for message in row["messages"]:
                yield f"{message['role']}\n{message['content'] or ''}"


def train_tokenizer(texts, vocab_size: int, max_length: int, architecture: str = "qwen3"):
    """Byte-level BPE over `texts` as a Transformers tokenizer: lossless on any UTF-8, pad distinct from eos.

    The chat turn is closed by `<|im_end|>`, plain text by the eos `<|endoftext|>`. Transformers loads any tokenizer
    beside a Qwen2 model as Qwen2's, which composes accents (NFC) and takes digits one by one, so for that architecture
    these rules are trained with.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if architecture == "qwen2":
        from transformers import Qwen2Tokenizer

        own = Qwen2Tokenizer().backend_tokenizer
        core.normalizer, core.pre_tokenizer, core.decoder = own.normalizer, own.pre_tokenizer, own.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        padding_side="right",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(config: Config, vocab_size: int, tokenizer, seed: int):
    """A causal language model of the configured class with seeded float32 weights and tied embeddings."""
    import torch
    import transformers

    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.architecture]
    config_class, model_class = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
    eos, turn_end, pad = (tokenizer.convert_tokens_to_ids(t) for t in (END_OF_TEXT, TURN_END, PAD))
    extra = {} if config.architecture == "qwen2" else {"head_dim": config.hidden_size // config.num_attention_heads}
    settings = config_class(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model = model_class(settings).float()
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=None, eos_token_id=[turn_end, eos], pad_token_id=pad
    )
    return model
