"""A tiny random policy, a tiny reward model, prompts with answers and preference pairs, made once per session."""

import pytest


def tiny_policy(path: str, seed: int, **shape):
    """Saves a Llama of hidden size 32 (``shape``: further arguments of its configuration) with a tokenizer of its own,
    which is returned.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from stages.base_model import CHAT_TEMPLATE
    from stages.models.modeling import save_policy

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    tokenizer.train_from_iterator(
        ["what is two plus two? answer: 4"],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
            **shape,
        )
    )
    save_policy(model, fast, path)
    return fast


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """{"policy", "other", "reward", "prompts", "pairs"}: paths. The models have hidden size 32 and know nothing."""
    from stages.reward_models.reward_heads import RewardCard, new_reward_model, save_reward_model
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    root = tmp_path_factory.mktemp("tiny")
    paths = {name: str(root / name) for name in ("policy", "other")}
    for seed, path in enumerate(paths.values()):
        fast = tiny_policy(path, seed)
    paths["reward"] = str(root / "reward")
    save_reward_model(
        new_reward_model(paths["policy"], seed=3), fast, paths["reward"], RewardCard(bias=0.5, anchor="chosen")
    )

    def user(text):
        return [{"role": "user", "content": text}]

    def assistant(text):
        return [{"role": "assistant", "content": text}]

    prompts = [
        complete_row(
            "prompts/1",
            {
                "prompt": user(f"what is {i} plus {i}?"),
                "answer": None if i % 5 == 4 else str(2 * i),
                "answer_type": "integer",
                "category": ("add", "double")[i % 2],
                "extra_json": f'{{"difficulty":{1 + i % 3}}}',
            },
            dataset="sums",
            source="made",
            origin="human",
            split="test",
        )
        for i in range(20)
    ]
    paths["prompts"] = str(root / "prompts")
    write_dataset(paths["prompts"], "sums", "prompts/1", prompts)
    pairs = [
        complete_row(
            "pairs/1",
            {
                "prompt": user(f"what is {i} plus {i}?"),
                "chosen": assistant(f"The answer is {2 * i}."),
                "rejected": assistant(f"I think {2 * i + 1}" + " or so" * (i % 4)),
                "strength": 1 + i % 2,
            },
            dataset="opinions",
            source=("a", "b")[i % 2],
            origin="human",
            split="test",
        )
        for i in range(24)
    ]
    paths["pairs"] = str(root / "pairs")
    write_dataset(paths["pairs"], "opinions", "pairs/1", pairs)
    return paths
