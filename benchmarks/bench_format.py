# SPDX-License-Identifier: Apache-2.0
"""What the cache formats take: bytes per token, and CPU time to encode and to decode.

::

    python -m benchmarks.bench_format [--cache DIR] [--json FILE]

Every case is one member, top-K log-probabilities with tail and fingerprints, encoded as a teacher
does in format 2, format 3 and format 3 with 8-bit values. Logits are synthetic, peaked and
correlated in time (``loader_samples``), in the dtype that is named, as that decides how many
values are equal; with ``--cache`` a case is made of the payloads of a real dump in format 2.

CPU time is of one thread, medians of ``--runs``; the formats take turns. *One row* decodes one of
the member's rows, per token of that row: format 2 has to decode all of them. The KL divergence of
8-bit values is from the fp16 ones, over the kept entries and the tail, both normalised.
"""

import argparse
import functools
import json
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.loader_samples import correlated_logits
from megatron.training.distillation.fingerprint import chunk_count
from megatron.training.distillation.payload import (
    LOGPROB_SENTINEL,
    decode_packed_rows,
    encode_logprobs_payload,
)
from megatron.training.distillation.payload_v3 import (
    decode_framed_payload,
    decode_framed_rows,
    encode_framed_payload,
    read_header,
)
from megatron.training.distillation.teacher_topk import TeacherTopK, apply_top_p, teacher_topk

ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One member: synthetic sizes, or the rows of a dump."""

    title: str
    vocab: int
    k: int
    values: torch.Tensor
    ids: torch.Tensor
    tail: torch.Tensor | None
    proofs: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.values.shape[0] * self.values.shape[1]


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One format, both ways."""

    name: str
    encode: Callable[[], bytes]
    decode: Callable[[bytes], object]
    decode_row: Callable[[bytes], object]


def synthetic(
    vocab: int, k: int, dtype: torch.dtype, positions: int, p: float | None = None
) -> Case:
    """Return the top-K of peaked logits."""
    logits = correlated_logits(ROWS * positions, vocab, seed=13, dtype=dtype)
    parts = []
    for rows in logits.split(64):
        entries = teacher_topk(rows[:, None], k)
        assert entries is not None
        parts.append(entries if p is None else apply_top_p(entries, p, 1)[0])
    found = TeacherTopK(
        logprobs=torch.cat([part.logprobs for part in parts]),
        indices=torch.cat([part.indices for part in parts]),
        tail_logprob=torch.cat([part.tail_logprob for part in parts]),
    )

    def by_row(entries: torch.Tensor) -> torch.Tensor:
        """``(rows * S, 1, ...)`` to ``(S, rows, ...)``."""
        return entries.squeeze(1).unflatten(0, (ROWS, -1)).transpose(0, 1).contiguous()

    random = torch.Generator().manual_seed(1)
    name = str(dtype).removeprefix("torch.")
    return Case(
        title=f"V {vocab}, K {k}, {name} logits" + ("" if p is None else f", P {p}"),
        vocab=vocab,
        k=k,
        values=by_row(found.logprobs).half(),
        ids=by_row(found.indices).int(),
        tail=by_row(found.tail_logprob),
        proofs=torch.randint(-(2**62), 2**62, (chunk_count(positions), ROWS), generator=random),
    )


def recorded(cache: Path) -> Case:
    """Return rows of a dump in format 2, those of several members in one."""
    rows = []
    for path in sorted(cache.glob("dp0__*.tar"))[:1]:
        with tarfile.open(path) as tar:
            meta = json.load(tar.extractfile(tar.next()))  # type: ignore[arg-type]
            for member in tar.getmembers()[1:17]:
                stream = tar.extractfile(member)
                assert stream is not None
                rows.append(decode_packed_rows(stream.read()).unpack_all())
    tails = [part.tail_logprob for part in rows if part.tail_logprob is not None]
    proofs = [part.label_fingerprints for part in rows if part.label_fingerprints is not None]
    vocab = meta["manifest"]["padded_vocab_size"]
    values = torch.cat([part.values for part in rows], dim=1)
    return Case(
        title=f"{cache}: V {vocab}, K {values.shape[2]}",
        vocab=vocab,
        k=values.shape[2],
        values=values,
        ids=torch.cat([part.indices for part in rows], dim=1),
        tail=torch.cat(tails, dim=1) if tails else None,
        proofs=torch.cat(proofs, dim=1) if proofs else None,
    )


def codecs(case: Case) -> Iterator[Codec]:
    """Yield the formats that hold *case*."""
    parts = case.values, case.ids, case.tail, case.proofs
    if case.vocab <= 1 << 17:
        yield Codec(
            name="2",
            encode=lambda: encode_logprobs_payload(*parts),
            decode=decode_packed_rows,
            decode_row=lambda data: decode_packed_rows(data).unpack([0]),
        )
    for name, eight_bit in (("3", False), ("3, 8-bit", True)):
        yield Codec(
            name=name,
            encode=functools.partial(
                encode_framed_payload, *parts, vocab_size=case.vocab, eight_bit=eight_bit
            ),
            decode=decode_framed_payload,
            decode_row=lambda data: decode_framed_rows(read_header(data), data, [0]),
        )


def measure(case: Case, runs: int) -> dict[str, dict[str, float]]:
    """Return the numbers of each format."""
    formats = list(codecs(case))
    contents = {one.name: one.encode() for one in formats}
    row = case.values.shape[0]
    times: dict[str, dict[str, list[float]]] = {one.name: {} for one in formats}
    for _ in range(runs):
        for one in formats:
            content = contents[one.name]
            for action, tokens, call in (
                ("encode us", case.tokens, one.encode),
                ("decode us", case.tokens, functools.partial(one.decode, content)),
                ("one row us", row, functools.partial(one.decode_row, content)),
            ):
                began = time.thread_time()
                call()
                spent = (time.thread_time() - began) / tokens * 1e6
                times[one.name].setdefault(action, []).append(spent)
    results = {
        name: {"bytes": len(contents[name]) / case.tokens}
        | {action: statistics.median(numbers) for action, numbers in found.items()}
        for name, found in times.items()
    }
    mean, high = divergence(case, contents["3, 8-bit"])
    results["3, 8-bit"] |= {"KL mean": mean, "KL p99": high}
    return results


def divergence(case: Case, content: bytes) -> tuple[float, float]:
    """Return mean and 99th percentile of what 8-bit values cost per token, in nats."""
    exact_rows = decode_framed_payload(
        encode_framed_payload(case.values, case.ids, vocab_size=case.vocab)
    ).values
    coded_rows = decode_framed_payload(content).values
    tail = case.tail

    def normalised(values: torch.Tensor) -> torch.Tensor:
        logprobs = values.double().masked_fill(values == LOGPROB_SENTINEL, -torch.inf)
        if tail is not None:
            logprobs = torch.cat([logprobs, tail.double()[..., None]], dim=-1)
        return torch.log_softmax(logprobs, dim=-1)

    # Ties may come in another order, which leaves the falling values as they are.
    exact, coded = normalised(exact_rows), normalised(coded_rows)
    terms = torch.where(exact.isinf(), 0.0, exact.exp() * (exact - coded))
    found = terms.sum(-1).flatten()
    return found.mean().item(), found.quantile(0.99).item()


def _cell(column: str, number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.2e}" if column.startswith("KL") else f"{number:.2f}"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, help="directory of a dump in format 2")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)

    def cases() -> Iterator[Case]:
        if args.cache is not None:
            yield recorded(args.cache)
        for vocab, k, dtype, p in (
            (128256, 128, torch.bfloat16, None),
            (128256, 128, torch.float32, None),
            (128256, 128, torch.bfloat16, 0.9),
            (128256, 32, torch.bfloat16, None),
            (262144, 128, torch.bfloat16, None),
            (262144, 128, torch.float32, None),
        ):
            yield synthetic(vocab, k, dtype, args.seq_length, p)

    columns = ("bytes", "encode us", "decode us", "one row us", "KL mean", "KL p99")
    print(f"fp16 values, per token; {ROWS} rows of {args.seq_length}, medians of {args.runs}")
    print(f"{'':42}{'format':>10}" + "".join(f"{column:>12}" for column in columns))
    results = {}
    for case in cases():
        results[case.title] = measure(case, args.runs)
        for name, found in results[case.title].items():
            cells = [_cell(column, found.get(column)) for column in columns]
            print(f"{case.title:42}{name:>10}" + "".join(f"{cell:>12}" for cell in cells))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
