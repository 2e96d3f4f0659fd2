# SPDX-License-Identifier: Apache-2.0
"""A digest of what decides which id a token has, the same in every process and on every machine."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# What the libraries read from a directory that holds a tokenizer.
_FILES_OF_A_DIRECTORY = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
)
_DIGITS = 32
_WRAPPERS = 4


def tokenizer_fingerprint(
    kind: str, tokenizer: Any, files: Sequence[str] = (), options: Sequence[str] = ()
) -> str:
    """Return hexadecimal digits that differ where two tokenizers give other ids.

    They cover the type, the size, and the vocabulary; where the tokenizer does not tell its
    vocabulary, the content of its files. Where the files lie does not matter.

    Args:
        kind: Megatron's ``--tokenizer-type``.
        tokenizer: What Megatron built.
        files: Files or directories it was read from.
        options: Further settings that decide the ids, such as a prompt format.
    """
    digest = hashlib.sha256()

    def add(part: str | bytes) -> None:
        content = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(content))  # so that no two lists of parts look alike
        digest.update(content)

    for part in (kind, str(tokenizer.vocab_size), *options):
        add(part)
    vocabulary = _vocabulary(tokenizer)
    if vocabulary:
        for number, token in sorted(vocabulary):
            add(str(number))
            add(token)
    else:
        for path in _existing(files):
            add(path.name)
            add(path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _vocabulary(tokenizer: Any) -> list[tuple[int, bytes]]:
    """Return ids and tokens; nothing if the tokenizer does not tell them."""
    layers = list(_layers(tokenizer))
    readers: list[Callable[[], Any]] = [
        layer.get_vocab for layer in layers if callable(getattr(layer, "get_vocab", None))
    ]
    readers += [partial(getattr, layer, "vocab") for layer in layers]
    for read in readers:
        try:
            vocabulary = read()
        except (AttributeError, LookupError, NotImplementedError):
            continue
        if isinstance(vocabulary, dict):
            pairs = list(vocabulary.items())
            if pairs and isinstance(pairs[0][1], int):
                pairs = [(number, token) for token, number in pairs]
        elif isinstance(vocabulary, list | tuple):
            pairs = list(enumerate(vocabulary))
        else:  # some libraries return the error that they mean to raise
            continue
        return [(int(number), _bytes(token)) for number, token in pairs]
    return []


def _layers(tokenizer: Any) -> Iterator[Any]:
    """Yield the tokenizer and what Megatron's wrappers hold inside, from the outside in."""
    for _ in range(_WRAPPERS):
        yield tokenizer
        inner = (vars(tokenizer) if hasattr(tokenizer, "__dict__") else {}).get
        tokenizer = inner("_tokenizer") or inner("tokenizer")
        if tokenizer is None:
            return


def _bytes(token: Any) -> bytes:
    return token if isinstance(token, bytes) else str(token).encode("utf-8", "surrogatepass")


def _existing(files: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, files):
        if path.is_file():
            yield path
        elif path.is_dir():
            inside = (path / name for name in _FILES_OF_A_DIRECTORY)
            yield from (entry for entry in inside if entry.is_file())
