# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: Python's own standard library, as a Megatron dataset.

The source files and the language reference (``pydoc_data.topics``) are about 10 MB of code and
English prose. A byte-pair vocabulary is trained on them on the spot, so nothing is downloaded.
"""

import argparse
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
TRAIN_NAME, VALID_NAME = "train", "valid"

# Not the library itself: its tests, generated tables, and whatever else was installed beside it.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
    }
)
# Held out for validation: a piece from the middle of each of these many files, which makes a small
# set of many kinds of text. It is evaluated whole every time, so curves are free of sampling noise.
_VALIDATION_FILES = 40
_VALIDATION_PIECE_BYTES = 2_000
# A file above this size is never held out: too much text would be lost to training.
_LARGE_FILE_BYTES = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Where a tokenized corpus lies and how large it is.

    ``train`` and ``valid`` are paths without ``.bin`` and ``.idx``, as ``--train-data-path`` and
    ``--valid-data-path`` take them; ``tokenizer`` is a folder for ``--tokenizer-type
    HuggingFaceTokenizer --tokenizer-model``.
    """

    train: str
    valid: str
    tokenizer: str
    vocab_size: int
    train_documents: int
    train_tokens: int
    valid_documents: int
    valid_tokens: int


def collect_texts(max_bytes: int | None = None, seed: int = 0) -> list[str]:
    """Read the standard library's source files in a fixed, shuffled order.

    Args:
        max_bytes: Stop after this many bytes of text; None reads everything.
        seed: Of the shuffle.

    Returns:
        One text per file. The order depends only on the seed and the Python version.

    Raises:
        FileNotFoundError: This Python has no source files of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_source_files(root))
    random.Random(seed).shuffle(files)
    files.sort(key=lambda file: file.stat().st_size <= _LARGE_FILE_BYTES)
    if max_bytes is not None:
        files = [file for file in files if file.stat().st_size <= _LARGE_FILE_BYTES]

    texts = []
    total = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        if not text.strip():
            continue
        texts.append(text)
        total += len(text.encode())
        if max_bytes is not None and total >= max_bytes:
            break
    if not texts:
        raise FileNotFoundError(
            f"found no .py files under {root}, where Python's standard library should be; the "
            "quickstart needs a Python that ships its library as source (all usual builds do)"
        )
    return texts


def build_corpus(
    folder: Path, *, vocab_size: int, batch_tokens: int, max_bytes: int | None = None
) -> Corpus:
    """Train the vocabulary, tokenize the texts and write the dataset, over any earlier one.

    Args:
        folder: Receives ``tokenizer/``, ``train.bin`` and ``valid.bin`` with their ``.idx``.
        vocab_size: Entries of the byte-pair vocabulary, the end-of-text token included.
        batch_tokens: Tokens of a batch; the held-out set is cut to whole batches, so that it can
            be shared out evenly among ranks.
        max_bytes: Use only about this many bytes of text.

    Returns:
        What was written.

    Raises:
        ValueError: The text is too short to hold a batch out.
    """
    # Imported here: these take seconds, which collecting the texts alone should not.
    import torch
    from transformers import PreTrainedTokenizerFast

    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    folder.mkdir(parents=True, exist_ok=True)
    train_texts, valid_texts = split_texts(collect_texts(max_bytes))
    tokenizer = _train_tokenizer(train_texts, vocab_size)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT
    ).save_pretrained(str(folder / "tokenizer"))

    def encode(texts: list[str]) -> list[list[int]]:
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [[*encoding.ids, end_of_text] for encoding in encodings]

    def write(prefix: Path, documents: list[list[int]]) -> int:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
        for ids in documents:
            builder.add_document(torch.tensor(ids), [len(ids)])
        builder.finalize(f"{prefix}.idx")
        return sum(map(len, documents))

    train, valid = folder / TRAIN_NAME, folder / VALID_NAME
    train_documents = encode(train_texts)
    valid_documents = _cut_to_batches(encode(valid_texts), batch_tokens)
    return Corpus(
        train=str(train),
        valid=str(valid),
        tokenizer=str(folder / "tokenizer"),
        vocab_size=tokenizer.get_vocab_size(),
        train_documents=len(train_documents),
        train_tokens=write(train, train_documents),
        valid_documents=len(valid_documents),
        valid_tokens=write(valid, valid_documents),
    )


def split_texts(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts to train on, and pieces of the last files, which are not among them."""
    held_out = min(_VALIDATION_FILES, max(1, len(texts) // 10))
    return texts[:-held_out], [_middle_piece(text) for text in texts[-held_out:]]


def _cut_to_batches(documents: list[list[int]], batch_tokens: int) -> list[list[int]]:
    """Return the documents up to the last whole batch, and one token: a label is the next token."""
    left = (sum(map(len, documents)) - 1) // batch_tokens * batch_tokens + 1
    if left <= 1:
        raise ValueError(
            f"the held-out text has {sum(map(len, documents))} tokens, less than one batch of "
            f"{batch_tokens}; use more text"
        )
    cut = []
    for ids in documents:
        if left > 0:
            cut.append(ids[:left])
            left -= len(ids)
    return cut


def _middle_piece(text: str) -> str:
    """Return about ``_VALIDATION_PIECE_BYTES`` of text from the middle, in whole lines."""
    # Files begin alike, with a docstring and imports.
    lines = text[max(0, len(text) - _VALIDATION_PIECE_BYTES) // 2 :].splitlines(keepends=True)
    piece, size = [], 0
    for line in lines[1:] or lines:
        piece.append(line)
        size += len(line.encode())
        if size >= _VALIDATION_PIECE_BYTES:
            break
    return "".join(piece)


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in root.walk():
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        yield from (folder / name for name in names if name.endswith(".py"))


def _train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            # All 256 bytes, so that any text can be encoded without loss.
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def main() -> None:
    """Build a corpus from the command line, as the quickstart's first stage does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--batch-tokens", type=int, required=True)
    parser.add_argument("--max-bytes", type=int)
    options = parser.parse_args()
    corpus = build_corpus(
        options.out,
        vocab_size=options.vocab_size,
        batch_tokens=options.batch_tokens,
        max_bytes=options.max_bytes,
    )
    print(json.dumps(asdict(corpus), indent=2))


if __name__ == "__main__":
    main()
