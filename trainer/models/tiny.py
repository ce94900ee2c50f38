"""``builtin:tiny``: a small Llama with a tokenizer, made on first use. It learns short sums in a
minute or two.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD = "<|pad|>"
END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL = (PAD, END, SYSTEM, USER, ASSISTANT)
VOCABULARY = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""One token per role, so that short prompts stay short."""

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
SEED = 20240229


def recipe() -> str:
    """Everything that the model depends on; its digest names the folder in the cache."""
    return json.dumps([SHAPE, SEED, CHAT_TEMPLATE, list(_corpus())], sort_keys=True)


def build(folder: Path) -> None:
    """Write config, seeded weights (float32) and tokenizer into ``folder``."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(
            LlamaConfig(
                **SHAPE,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens, in which every digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


_WORDS = (
    "What is the sum of and ? Add to . Subtract from Compute: plus minus times divided by equals "
    "How many are "
    "left in all  Answer The answer is #### Let us think step by step. First, we add then carry so "
    "total "
    "therefore because each every  apples oranges books coins marbles pencils cookies dollars "
    "cents hours minutes "
    "days weeks has have had buys sells gives  takes eats finds loses makes more less than twice "
    "half as many "
    "much cost price per one two three four five six seven  eight nine ten eleven twelve twenty "
    "thirty forty "
    "fifty hundred Tom Anna Ben Clara Sam Lily he she they it his her their  if when now left over "
    "away remaining "
    "altogether number result solve problem question help please yes no true false"
)


def _corpus() -> Iterator[str]:
    rng = random.Random(SEED)
    words = _WORDS.split()
    for _ in range(400):
        a, b = rng.randrange(1000), rng.randrange(100)
        op, result = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
        yield f"What is {a} {op} {b}?"
        yield f"{a} {op} {b} = {result}\n#### {result}"
        yield " ".join(rng.choice(words) for _ in range(12)) + rng.choice((".", "?", ",", "!"))
