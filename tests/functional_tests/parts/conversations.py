# SPDX-License-Identifier: Apache-2.0
"""A tiny SFT data set and its tokenizer, made offline."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.functional_tests.harness import REAL_VOCAB

PROMPT_FORMAT = "nemotron-nano-v2"
"""Its prompts and the three tokens before an answer are masked; it pads with ``<unk>``."""

_PROMPT_TOKENS = ["System", "User", "Assistant", "\n"]
_SPECIAL_TOKENS = ["<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"]


def write_tokenizer(directory: Path) -> Path:
    """Save a Hugging Face tokenizer of whole words with REAL_VOCAB entries; return *directory*."""
    tokens = [*_SPECIAL_TOKENS, *_PROMPT_TOKENS, *_words()]
    tokenizer = Tokenizer(
        models.WordLevel({token: number for number, token in enumerate(tokens)}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Split(Regex(" +"), "removed"),
        ]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<SPECIAL_12>",
        additional_special_tokens=["<SPECIAL_10>", "<SPECIAL_11>"],
    )
    assert len(wrapped) == REAL_VOCAB
    wrapped.save_pretrained(directory)
    return directory


def write_conversations(path: Path, lines: int, seed: int = 0) -> Path:
    """Write *lines* packs of one to three conversations, no two alike; return *path*.

    An answer counts up from the words of its question: easy to learn, so a short training gives a
    teacher whose distributions are peaked.
    """
    generator = np.random.default_rng(seed)
    with path.open("w") as stream:
        for _ in range(lines):
            messages: list[dict[str, str]] = []
            for _ in range(generator.integers(1, 4)):
                messages += _conversation(generator)
            stream.write(json.dumps({"messages": messages}) + "\n")
    return path


def word_id(word: str) -> int:
    """Return the token id of a word of the conversations."""
    return len(_SPECIAL_TOKENS) + len(_PROMPT_TOKENS) + _words().index(word)


def _conversation(generator: np.random.Generator) -> list[dict[str, str]]:
    words = _words()
    messages = [{"role": "system", "content": words[generator.integers(len(words))]}]
    for _ in range(generator.integers(1, 3)):
        question = generator.integers(len(words), size=2)
        steps = generator.choice([1, 1, 1, 5], size=generator.integers(2, 9))
        answer = (question[-1] + np.cumsum(steps)) % len(words)
        for role, numbers in (("user", question), ("assistant", answer)):
            content = " ".join(words[number] for number in numbers)
            messages.append({"role": role, "content": content})
    return messages


def _words() -> list[str]:
    count = REAL_VOCAB - len(_SPECIAL_TOKENS) - len(_PROMPT_TOKENS)
    return [f"w{number}" for number in range(count)]
