# SPDX-License-Identifier: Apache-2.0
"""What entries take in each format: by encoding some, of a model's kind or of a real cache."""

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import MAX_VOCAB_SIZE, encode_logprobs_payload
from megatron.training.distillation.payload_v3 import encode_framed_payload
from megatron.training.distillation.shard_meta import SaverSettings
from tools.cache.cache_comparison import spread
from tools.cache.cache_files import list_cache
from tools.cache.coverage import Span
from tools.cache.inventory import Inventory, take_inventory
from tools.cache.sample_rows import LiveParts, RowReader
from tools.cache.synthetic_rows import Recording, as_recorded, synthetic_rows

FORMATS = ("2", "3", "3, 8-bit")
_MAX_ENTRIES = 1 << 20
"""Of a member that is encoded to see what it takes: about a second's work."""
_PLACES = 4
"""Where a cache is looked at."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadSize:
    """What a token takes in one format.

    Attributes:
        bytes_per_token: Of a payload.
        encode_seconds_per_token: CPU time of one thread of this machine.
    """

    bytes_per_token: float
    encode_seconds_per_token: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What tokens take.

    Attributes:
        source: Where this is from, in words.
        mean_kept: Entries kept per token.
        formats: By the name in :data:`FORMATS`; without those that cannot hold the entries.
    """

    source: str
    mean_kept: float
    formats: dict[str, PayloadSize]


def synthetic_sizes(recording: Recording, positions: int, rows: int, *, bf16_logits: bool) -> Sizes:
    """Return the sizes of a model's entries, in members of that many positions and rows."""
    positions, rows = _fitting(recording.k, positions, rows)
    kind = "bf16" if bf16_logits else "fp32"
    return _sizes(
        f"a model's entries, {kind} logits, varied text",
        [synthetic_rows(recording, positions, rows, bf16_logits=bf16_logits)],
        recording,
    )


def sizes_like(directory: str, recording: Recording, rows: int) -> Sizes:
    """Return the sizes of a cache's entries, recorded again with fewer of them.

    Args:
        directory: The cache.
        recording: What would be kept.
        rows: Samples of a member.

    Raises:
        ValueError: The cache has not what would be kept, or cannot be read.
        OSError: It cannot be read.
    """
    inventory = take_inventory(list_cache(directory))
    found = _rows_of(inventory, recording.k, rows)
    if inventory.meta is not None and any(map(_is_ragged, found)):
        recording = _as_it_is(inventory.meta.saver, recording, directory)
    taken = []
    for part in found:
        _check(part, recording, directory)
        taken.append(as_recorded(part, recording))
    if not taken:
        raise ValueError(f"No sample of {directory} can be read: run its verb verify, or info.")
    return _sizes(f"entries of {directory}", taken, recording)


def _rows_of(inventory: Inventory, k: int, rows: int) -> list[TeacherRows]:
    """Return consecutive samples of some places of a cache, those of each together."""
    complete = inventory.coverage.complete
    if not complete:
        return []
    longest = max(complete, key=lambda span: span.end - span.start)
    reader = RowReader(
        LiveParts.of(shard.file for shard in inventory.sound if shard.meta is not None), whole=False
    )
    found = []
    with reader:
        first = reader.read([longest.start]).rows
        if not first:
            return []
        length = len(first[longest.start].values)
        count = min(_fitting(k * _PLACES, length, rows)[1], longest.end - longest.start)
        for start in spread([Span(longest.start, longest.end - count + 1)], _PLACES):
            samples = reader.read(range(start, start + count)).rows
            if len(samples) == count:
                found.append(_stacked([samples[sample] for sample in sorted(samples)]))
    return found


def _stacked(samples: Sequence[TeacherRows]) -> TeacherRows:
    """Return ``(S, n, K)`` rows, with tails."""
    k = max(sample.values.shape[-1] for sample in samples)

    def padded(part: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.nn.functional.pad(part, (0, k - part.shape[-1]), value=fill)

    values = torch.stack([padded(sample.values, -1000.0) for sample in samples], dim=1)
    tails = [sample.tail_logprob for sample in samples if sample.tail_logprob is not None]
    fingerprints = [s.label_fingerprints for s in samples if s.label_fingerprints is not None]
    if len(tails) == len(samples):
        tail = torch.stack(tails, dim=1)
    else:
        kept = values.double().masked_fill(values == -1000.0, -math.inf).exp().sum(-1)
        tail = (1 - kept).clamp(min=1e-30).log().float()
    return TeacherRows(
        values=values,
        indices=torch.stack([padded(sample.indices, -1) for sample in samples], dim=1),
        tail_logprob=tail,
        label_fingerprints=(
            torch.stack(fingerprints, dim=1) if len(fingerprints) == len(samples) else None
        ),
    )


def _is_ragged(rows: TeacherRows) -> bool:
    return bool((rows.values == -1000.0).any())


def _as_it_is(saver: SaverSettings, recording: Recording, directory: str) -> Recording:
    """Return what keeps all entries of a cache that was recorded with top-P."""
    if recording.p not in (None, saver.p) or recording.k != (saver.k or recording.k):
        raise ValueError(
            f"{directory} has a nucleus of each token (K {saver.k}, P {saver.p}), which does not "
            "tell what another K or P keeps: give its own, or a cache without P."
        )
    return dataclasses.replace(recording, p=None, mean_kept=None)


def _check(rows: TeacherRows, recording: Recording, directory: str) -> None:
    stored = rows.values.shape[-1]
    if stored < recording.k and not _is_ragged(rows):
        raise ValueError(
            f"{directory} keeps {stored} entries per token, fewer than --logits-save-top-k "
            f"{recording.k}: give a smaller one, or a cache that keeps more."
        )
    if (largest := int(rows.indices.max())) >= recording.vocab_size:
        raise ValueError(
            f"{directory} has id {largest}, and --vocab-size is {recording.vocab_size}: give the "
            "size of its vocabulary, or a cache of another teacher."
        )
    if recording.dtype.itemsize > rows.values.element_size():
        name = next(name for name, dtype in _DTYPES.items() if dtype == rows.values.dtype)
        raise ValueError(
            f"{directory} has {name} values, which do not tell what wider ones take: give "
            f"--logits-save-dtype {name}."
        )


def _fitting(k: int, positions: int, rows: int) -> tuple[int, int]:
    """Return positions and rows of a member that is not too large to be encoded for this."""
    positions = min(positions, max(1, _MAX_ENTRIES // k))
    return positions, max(1, min(rows, _MAX_ENTRIES // (k * positions)))


def _sizes(source: str, members: Sequence[TeacherRows], recording: Recording) -> Sizes:
    formats = {}
    for name in FORMATS:
        if name == "2" and recording.vocab_size > MAX_VOCAB_SIZE:
            continue
        if name == "3, 8-bit" and recording.dtype != torch.float16:
            continue
        formats[name] = _measure(name, members, recording.vocab_size)
    tokens = sum(_tokens(rows) for rows in members)
    kept = sum(int((rows.values != -1000.0).sum()) for rows in members)
    return Sizes(source=source, mean_kept=kept / tokens, formats=formats)


def _measure(name: str, members: Sequence[TeacherRows], vocab_size: int) -> PayloadSize:
    size = tokens = 0
    began = time.thread_time()
    for rows in members:
        parts = [getattr(rows, field.name) for field in dataclasses.fields(rows)]
        if name == "2":
            size += len(encode_logprobs_payload(*parts))
        else:
            eight_bit = name == "3, 8-bit"
            size += len(encode_framed_payload(*parts, vocab_size=vocab_size, eight_bit=eight_bit))
        tokens += _tokens(rows)
    seconds = time.thread_time() - began
    return PayloadSize(bytes_per_token=size / tokens, encode_seconds_per_token=seconds / tokens)


def _tokens(rows: TeacherRows) -> int:
    return rows.values.shape[0] * rows.values.shape[1]
