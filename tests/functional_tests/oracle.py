# SPDX-License-Identifier: Apache-2.0
"""What a dump must have recorded, by brute force in float64 from the logits the model trained with.

A sample is recognised by its labels, not by its position in a batch, so a row that went to the
wrong sample is found whatever both sides believe about positions.
"""

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.functional_tests.harness import REAL_VOCAB
from tests.functional_tests.recorders import Record, load_records

MASKED = -1000.0
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Rounding of the fp32 arithmetic behind a log-probability of ordinary size.
ARITHMETIC = 2e-6
# A probability mass this close to P may be on either side of it in fp32.
NUCLEUS_DOUBT = 1e-6
CODED = (-24 * (torch.arange(256) / 255).double() ** 2).half().double()
"""What the 256 codes of ``--logits-save-8bit`` stand for, by the formula of the format."""


@dataclass(frozen=True, kw_only=True)
class DumpSettings:
    """What a dump was asked to keep of every token."""

    k: int
    dtype: str = "fp16"
    p: float | None = None
    min_k: int = 1
    save_format: int = 2
    eight_bit: bool = False
    """Whether values are stored as codes, of which the nearest is expected."""
    vocab_size: int = REAL_VOCAB


@dataclass(kw_only=True)
class Comparison:
    """What a comparison has found equal so far."""

    rows: int = 0
    tokens: int = 0
    entries: int = 0
    tied: int = 0
    value_error: float = 0.0
    tail_error: float = 0.0
    samples: set[bytes] = field(default_factory=set)


def labels_key(labels: torch.Tensor) -> bytes:
    """Return what tells one sample from the others."""
    return labels.contiguous().numpy().tobytes()


SEQUENCE_DIMENSION = {
    "labels": 1,
    "loss_mask": 1,
    "logits": 0,
    "values": 0,
    "indices": 0,
    "tail": 0,
}


def whole_sequences(records: Iterable[Record]) -> list[Record]:
    """Join the context parallel parts of every microbatch, which leaves one record per TP rank."""
    parts: dict[tuple[int, int, int, int], list[Record]] = {}
    for record in records:
        place = (record["start"], record["microbatch"], record["dp_rank"], record["tp_rank"])
        parts.setdefault(place, []).append(record)
    whole = []
    for _, group in sorted(parts.items()):
        group = sorted(group, key=lambda record: record["cp_rank"])
        assert [record["cp_rank"] for record in group] == list(range(len(group)))
        joined = {
            key: _natural([record[key] for record in group], SEQUENCE_DIMENSION[key])
            for key in SEQUENCE_DIMENSION
            if isinstance(group[0].get(key), torch.Tensor)
        }
        whole.append({**group[0], **joined})
    return whole


def _natural(parts: Sequence[torch.Tensor], dimension: int) -> torch.Tensor:
    """Put the two chunks that each CP rank holds, ``r`` and ``2 cp - 1 - r``, in their places."""
    chunks: dict[int, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        chunks[rank], chunks[2 * len(parts) - 1 - rank] = part.chunk(2, dimension)
    return torch.cat([chunks[number] for number in sorted(chunks)], dimension)


def whole_logits(records: Iterable[Record]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Join all parts: ``labels (B, S)`` and ``logits (S, B, V)`` per microbatch."""
    shards: dict[tuple[int, int, int], list[Record]] = {}
    for record in whole_sequences(records):
        place = (record["start"], record["microbatch"], record["dp_rank"])
        shards.setdefault(place, []).append(record)
    whole = []
    for _, group in sorted(shards.items()):
        group = sorted(group, key=lambda record: record["tp_rank"])
        assert [record["tp_rank"] for record in group] == list(range(len(group)))
        assert all(torch.equal(record["labels"], group[0]["labels"]) for record in group)
        logits = torch.cat([record["logits"] for record in group], dim=-1)
        whole.append((group[0]["labels"], logits))
    return whole


class DumpOracle:
    """The log-probabilities of every sample of a dump.

    Args:
        record_dir: Where the dump's recorder wrote.
        settings: What the dump was asked to keep.
    """

    def __init__(self, record_dir: Path, settings: DumpSettings) -> None:
        self.settings = settings
        self._logprobs: dict[bytes, torch.Tensor] = {}
        self._logits: dict[bytes, torch.Tensor] = {}
        for labels, logits in whole_logits(load_records(record_dir)):
            assert logits.size(-1) > settings.vocab_size, "the vocabulary was meant to be padded"
            real = logits[..., : settings.vocab_size].double()
            for column, sample in enumerate(labels):
                key = labels_key(sample)
                assert key not in self._logits, "two samples of the data set are alike"
                self._logits[key] = real[:, column]
                self._logprobs[key] = torch.log_softmax(real[:, column], dim=-1)

    @property
    def samples(self) -> set[bytes]:
        """Return the keys of all recorded samples."""
        return set(self._logits)

    def logprobs(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities ``(S, V)`` of the sample with these labels, float64."""
        return self._logprobs[labels_key(labels)]

    def in_format(self, save_format: int) -> "DumpOracle":
        """Return what tells of the same dump in a format; 3 also accepts the order of 2."""
        other = copy.copy(self)
        other.settings = replace(self.settings, save_format=save_format)
        return other

    def mean_kept(self, keys: Sequence[bytes]) -> float:
        """Return the average number of entries that top-P keeps per token of these samples."""
        counts = [
            self._kept_count(falling, 0.0)
            for key in keys
            for falling in self._logprobs[key].sort(descending=True).values
        ]
        return sum(counts) / len(counts)

    def check_row(
        self,
        labels: torch.Tensor,
        values: torch.Tensor,
        indices: torch.Tensor,
        tail: torch.Tensor | None,
        found: Comparison,
    ) -> None:
        """Compare the targets ``(S, K)``, ``(S, K)``, ``(S,)`` of the sample with these labels.

        Raises:
            AssertionError: Something differs by more than its rounding.
        """
        key = labels_key(labels)
        assert key in self._logits, "a sample that the dump never saw"
        assert values.dtype == DTYPES[self.settings.dtype]
        assert tail is not None
        assert tail.dtype == torch.float32
        logits, logprobs = self._logits[key], self._logprobs[key]
        assert values.size(0) == logits.size(0)
        if self.settings.eight_bit:
            assert torch.isin(values[values != MASKED].double(), CODED).all()
        found.samples.add(key)
        found.rows += 1
        for token in range(logits.size(0)):
            self._check_token(
                logits[token], logprobs[token], values[token], indices[token], tail[token], found
            )

    def _check_token(
        self,
        logits: torch.Tensor,
        logprobs: torch.Tensor,
        values: torch.Tensor,
        indices: torch.Tensor,
        tail: torch.Tensor,
        found: Comparison,
    ) -> None:
        order = logits.argsort(descending=True, stable=True).tolist()
        kept = values != MASKED
        count = int(kept.sum())
        assert kept[:count].all(), f"masked entries in between: {values}"
        doubts = (-NUCLEUS_DOUBT, 0.0, NUCLEUS_DOUBT)
        allowed = {self._kept_count(logprobs[order], doubt) for doubt in doubts}
        assert count in allowed, f"{count} entries kept, expected {allowed}"

        ids = indices[:count].tolist()
        assert len(set(ids)) == count, f"an id twice in {ids}"
        assert all(0 <= number < len(logits) for number in ids), f"an id of the padding in {ids}"
        assert values.diff()[: count - 1].le(0).all(), f"{values} do not fall"
        in_order = ids if self.settings.save_format == 2 else _by_logits(ids, values, logits)
        for place, number in enumerate(in_order):
            if number != order[place]:
                # Which of several equal logits comes first is not defined.
                assert logits[number] == logits[order[place]], (
                    f"id {number} at place {place}, expected {order[place]}"
                )
                found.tied += 1

        stored, exact = values[:count].double(), logprobs[ids]
        error = (stored - exact).abs() - self._rounding(exact)
        found.value_error = max(found.value_error, float(error.max()))
        assert (error <= ARITHMETIC).all(), f"{stored} differs from {exact} by more than rounding"

        is_outside = torch.ones_like(logprobs, dtype=torch.bool)
        is_outside[ids] = False
        outside = logprobs[is_outside]
        expected_tail = float(torch.logsumexp(outside, 0)) if len(outside) else -math.inf
        if expected_tail == -math.inf:
            assert tail.item() == -math.inf
        else:
            tail_error = abs(tail.item() - expected_tail)
            found.tail_error = max(found.tail_error, tail_error)
            assert tail_error <= ARITHMETIC * max(1.0, -expected_tail)
        found.tokens += 1
        found.entries += count

    def _rounding(self, exact: torch.Tensor) -> torch.Tensor:
        """Return by how much each stored value may differ from the exact one."""
        rounding = torch.finfo(DTYPES[self.settings.dtype])
        allowed = exact.abs() * rounding.eps / 2 + rounding.smallest_normal * rounding.eps
        if self.settings.eight_bit:
            # Rounded to fp16 before the nearest code is looked for.
            allowed = 2 * allowed + (exact[:, None] - CODED).abs().amin(-1)
        return allowed

    def _kept_count(self, falling: torch.Tensor, doubt: float) -> int:
        """Return how many of one token's falling log-probabilities are kept, at ``p + doubt``."""
        settings = self.settings
        if settings.p is None:
            return settings.k
        before = falling[: settings.k].exp().cumsum(0) - falling[: settings.k].exp()
        return max(int((before < settings.p + doubt).sum()), settings.min_k)


def _by_logits(ids: list[int], values: torch.Tensor, logits: torch.Tensor) -> list[int]:
    """Return *ids* with those of equal stored values in the exact order of their logits.

    Format 3 gives them an order of its own, which says nothing about the teacher.
    """
    runs = itertools.groupby(zip(values.tolist(), ids, strict=False), key=lambda entry: entry[0])
    return [
        number
        for _, run in runs
        for number in sorted((number for _, number in run), key=lambda one: -logits[one].item())
    ]


def check_targets(oracle: DumpOracle, records: Iterable[Record]) -> Comparison:
    """Compare every row of targets that every rank of a student used."""
    found = Comparison()
    for record in whole_sequences(records):
        assert "values" in record, f"a step without targets at sample {record['start']}"
        for row, labels in enumerate(record["labels"]):
            oracle.check_row(
                labels,
                record["values"][:, row],
                record["indices"][:, row],
                record["tail"][:, row],
                found,
            )
    return found


def distillation_losses(records: Sequence[Record]) -> list[float]:
    """Return the mean loss of every iteration, in float64 from a student's logits and targets.

    Tokens whose recorded loss mask is 0 do not count.
    """
    targets = {
        (record["start"], record["microbatch"], record["dp_rank"]): record
        for record in whole_sequences(records)
        if record["tp_rank"] == 0
    }
    losses: dict[int, list[torch.Tensor]] = {}
    for place, (_, logits) in zip(sorted(targets), whole_logits(records), strict=True):
        record = targets[place]
        student = torch.log_softmax(logits[..., :REAL_VOCAB].double(), dim=-1)
        teacher = record["values"].double()
        masked = teacher == MASKED
        ids = record["indices"].long().masked_fill(masked, 0)
        chosen = student.gather(-1, ids)
        inside = (teacher.exp() * (teacher - chosen)).masked_fill(masked, 0.0).sum(-1)
        outside = torch.ones_like(student)
        outside.scatter_reduce_(-1, ids, masked.double(), "amin")
        student_tail = student.masked_fill(outside == 0, -math.inf).logsumexp(-1)
        teacher_tail = record["tail"].double()
        rest = teacher_tail.exp() * (teacher_tail - student_tail)
        rest = torch.where(teacher_tail == -math.inf, 0.0, rest)
        mask = record.get("loss_mask", torch.ones_like(record["labels"]))
        losses.setdefault(place[0], []).append((inside + rest)[mask.T != 0])
    return [float(torch.cat(parts).mean()) for _, parts in sorted(losses.items())]
