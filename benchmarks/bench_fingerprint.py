# SPDX-License-Identifier: Apache-2.0
"""What the proof of content costs: time beside the loss, bytes beside the payload.

Prints one table, for one microbatch of one sample, single-threaded on the CPU by default::

    python -m benchmarks.bench_fingerprint

The loss is the package's own, forward and backward. Times are medians of several repetitions. The
fingerprints are counted as they are: random bits, which do not compress.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatron.training.distillation.fingerprint import LabelFingerprinter, differing_chunks
from megatron.training.distillation.payload import encode_logprobs_payload
from megatron.training.distillation.sparse_kl import sparse_kl


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
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
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
    falling = torch.log_softmax(torch.randn(length, 1, vocab), -1).topk(k)
    values, indices = falling.values.half(), falling.indices.int()
    tail = torch.log1p(-values.float().exp().sum(-1))
    on_device = values.to(device), indices.to(device), tail.to(device)
    labels = torch.randint(0, vocab, (1, length), device=device)
    fingerprint = LabelFingerprinter(torch.arange(length), length)
    teacher = fingerprint(labels)

    def loss_step() -> None:
        logits.grad = None
        sparse_kl(
            logits, *on_device[:2], tail_logprob=on_device[2], vocab_size=vocab
        ).sum().backward()

    def proof() -> bool:
        return bool(differing_chunks(fingerprint(labels), teacher).any())

    assert not proof()
    loss_seconds = median_seconds(loss_step, args.repetitions, device)
    proof_seconds = median_seconds(proof, 20 * args.repetitions, device)
    plain = len(encode_logprobs_payload(values, indices, tail))

    print(f"S {length}, B 1, V {vocab}, K {k}, fp16 payload, {device}")
    print(f"{'':24}{'loss / payload':>16}{'proof':>12}{'share':>10}")
    for name, whole, part in (
        ("time per token, ns", loss_seconds / length * 1e9, proof_seconds / length * 1e9),
        ("bytes per token", plain / length, teacher.nbytes / length),
    ):
        print(f"{name:24}{whole:16.1f}{part:12.3f}{part / whole:10.4%}")


if __name__ == "__main__":
    main()
