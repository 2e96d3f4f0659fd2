# SPDX-License-Identifier: Apache-2.0
"""A few decoded sequences: the first entries of each position, as tokens where they are known."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.training.distillation.payload import LOGPROB_SENTINEL
from tools.cache.report.survey import READ_ERRORS, Point, Survey, read_rows, sample_of

type Detokenize = Callable[[int], str]
"""Returns the text of a token id."""

_SEQUENCES = 3
_POSITIONS = 256
_ENTRIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of a position."""

    token: int
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """The leading positions of a sample.

    Attributes:
        sample: Its number.
        positions: The first entries of each position.
        kept: The mass of all kept entries of each position.
    """

    sample: int
    positions: list[list[Entry]]
    kept: list[float]


def read_sequences(found: Survey) -> list[Sequence]:
    """Return sequences from payloads at the beginning, in the middle and at the end of the cache.

    What cannot be read any more is left out.
    """
    count = min(_SEQUENCES, len(found.points))
    places = [(2 * part + 1) * len(found.points) // (2 * count) for part in range(count)]
    sequences = []
    for place in places:
        try:
            sequences.append(_read(found.points[place]))
        except READ_ERRORS:
            continue
    return sequences


def _read(point: Point) -> Sequence:
    with point.payload.shard.open(whole=False) as shard:
        member = shard.members[point.payload.member]
        rows = read_rows(shard, member, [0])
        sample = sample_of(shard, member, 0)
    values, ids = rows.values[:_POSITIONS, 0].double(), rows.indices[:_POSITIONS, 0]
    probabilities = torch.where(values == LOGPROB_SENTINEL, 0.0, values.exp())
    first, order = probabilities.topk(min(_ENTRIES, values.shape[1]), dim=-1)
    tokens = ids.gather(1, order)
    positions = [
        [Entry(token=token, probability=p) for token, p in zip(*pair, strict=True) if p > 0]
        for pair in zip(tokens.tolist(), first.tolist(), strict=True)
    ]
    return Sequence(sample=sample, positions=positions, kept=probabilities.sum(dim=-1).tolist())


def load_tokenizer(directory: str) -> Detokenize:
    """Return what tells the text of ids, by the files that Megatron's HuggingFaceTokenizer loads.

    Raises:
        ValueError: ``transformers`` is not installed, or *directory* holds no tokenizer.
    """
    if not os.path.isdir(directory):
        raise ValueError(
            f"There is no directory {directory}, expected the files of a Hugging Face tokenizer, "
            "as --tokenizer-model of the teacher names them."
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            "--tokenizer needs the package transformers, which is not installed: `pip install "
            "transformers`, or leave it out; then the page shows ids."
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{directory} holds no tokenizer that transformers can load, expected the directory "
            f"that --tokenizer-model of the teacher names: {error}"
        ) from error

    def text_of(token: int) -> str:
        if not 0 <= token < len(tokenizer):
            return f"<{token}>"
        text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" in text:  # a part of a character
            pieces: list[str] = tokenizer.convert_ids_to_tokens([token])
            return pieces[0]
        return text

    return text_of


def id_text(token: int) -> str:
    """Return an id as its number, where there is no tokenizer."""
    return str(token)
