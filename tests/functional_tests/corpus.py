# SPDX-License-Identifier: Apache-2.0
"""A small data set whose samples all differ, so that a sample's labels tell which sample it is."""

from pathlib import Path

import numpy as np
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.functional_tests.harness import REAL_VOCAB

_DOCUMENTS = 80
_DOCUMENT_LENGTH = 100


def write_corpus(prefix: Path, seed: int = 0, shift: int = 0) -> Path:
    """Write ``prefix.bin`` and ``prefix.idx`` and return *prefix*.

    With a *shift* each document begins with its token of that number, and what is before it comes
    last.

    Each token is the one before plus one of a few steps: easy to learn, so a short training gives a
    teacher whose distributions are peaked, and random enough that no two samples are alike.
    """
    generator = np.random.default_rng(seed)
    # The last id is NullTokenizer's end of document.
    modulus = REAL_VOCAB - 1
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(_DOCUMENTS):
        steps = generator.choice([1, 7, 7, 7, 19], size=_DOCUMENT_LENGTH)
        tokens = (generator.integers(modulus) + np.cumsum(steps)) % modulus
        tokens = np.roll(tokens, -shift)
        builder.add_document(torch.from_numpy(tokens), [_DOCUMENT_LENGTH])
    builder.finalize(f"{prefix}.idx")
    return prefix
