# SPDX-License-Identifier: Apache-2.0
"""What it costs to prove targets: time beside the tensor work, bytes beside the payload.

Prints one table for the teacher and one for the student, for one microbatch of one sample,
single-threaded on the CPU by default::

    python -m benchmarks.bench_trust

The proof of content is the fingerprint of the labels, which the student also compares; the seal of
a shard is a CRC-32 of every payload, made by the writer and checked by the reader. A step of either
side is longer than the work they are compared with, so the shares are upper bounds. Times are
medians of several repetitions. Fingerprints are counted as they are: random bits, which do not
compress.
"""

import argparse
import statistics
import time
import zlib
from collections.abc import Callable

import torch

from megatron.training.distillation.fingerprint import LabelFingerprinter, differing_chunks
from megatron.training.distillation.payload import encode_logprobs_payload
from megatron.training.distillation.shard_content import seal_meta
from megatron.training.distillation.sparse_kl import sparse_kl_and_cross_entropy
from megatron.training.distillation.teacher_topk import teacher_topk


def median_seconds(action: Callable[[], object], repetitions: int, device: torch.device) -> float:
    """Return the median time of *action*, after one that is not counted."""
    times = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    length, vocab, k = args.seq_length, args.vocab_size, args.top_k

    logits = torch.randn(length, 1, vocab, device=device, requires_grad=True)
    topk = teacher_topk(torch.randn(length, 1, vocab, device=device), k)
    assert topk is not None
    values, indices = topk.logprobs.half().cpu(), topk.indices.int().cpu()
    tail = topk.tail_logprob.cpu()
    labels = torch.randint(0, vocab, (1, length), device=device)
    fingerprint = LabelFingerprinter(torch.arange(length), length)
    teacher = fingerprint(labels)
    payload = encode_logprobs_payload(values, indices, tail)

    def hook() -> None:
        with torch.no_grad():
            teacher_topk(logits, k)

    def losses() -> None:
        logits.grad = None
        kl, lm = sparse_kl_and_cross_entropy(
            logits, topk.logprobs, topk.indices, labels.T, tail_logprob=topk.tail_logprob
        )
        (kl + lm).sum().backward()

    def proof() -> bool:
        return bool(differing_chunks(fingerprint(labels), teacher).any())

    assert not proof()

    def per_token(action: Callable[[], object], repetitions: int) -> float:
        return median_seconds(action, repetitions, device) / length * 1e9

    few, many = args.repetitions, 20 * args.repetitions
    seal = per_token(lambda: zlib.crc32(payload), many)
    print(f"S {length}, B 1, V {vocab}, K {k}, fp16 payload, {device}")
    print(f"{'ns per token':24}{'tensor work':>12}{'proof':>10}{'seal':>10}{'share':>10}")
    for side, work, proving in (
        ("teacher", per_token(hook, few), per_token(lambda: fingerprint(labels), many)),
        ("student", per_token(losses, few), per_token(proof, many)),
    ):
        print(f"{side:24}{work:12.1f}{proving:10.3f}{seal:10.3f}{(proving + seal) / work:10.4%}")

    # Names and checksums of a shard's members, per member.
    members = [(f"{start}-{start + 1}.pt.zst", payload) for start in range(64)]
    sealed = (len(seal_meta(b"{}", "dp0__0-64.tar", members)) - len(b"{}")) / len(members) / length
    plain, proven = len(payload) / length, teacher.nbytes / length
    print(f"{'bytes per token':24}{'payload':>12}{'proof':>10}{'seal':>10}{'share':>10}")
    print(f"{'':24}{plain:12.1f}{proven:10.3f}{sealed:10.3f}{(proven + sealed) / plain:10.4%}")


if __name__ == "__main__":
    main()
