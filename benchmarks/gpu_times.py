# SPDX-License-Identifier: Apache-2.0
"""Time and memory of losses and hook on one device, beside what the device can do.

Times are medians, with the shortest and the longest beside them.  GB/s counts the passes over the
logits that a function cannot do without: one to read them, two to read them and write a gradient;
beside a copy's it tells how near to the device's limit a function is.  `held` is what lives between
forward and backward, `peak` what is added at the worst moment, the gradient included; both in sizes
of the logits.
"""

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.installed_loss import installed_topk_kl_div
from megatron.training.distillation import row_passes
from megatron.training.distillation.sparse_kl import sparse_kl, sparse_kl_and_cross_entropy
from megatron.training.distillation.teacher_topk import teacher_topk

Numbers = dict[str, Any]


def inputs(tokens: int, vocab: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Logits, a teacher's entries, their ids, and labels; no fp32 copy of the logits is made."""
    logits = torch.empty(tokens, 1, vocab, dtype=dtype, device=device)
    values = torch.empty(tokens, 1, k, device=device)
    ids = torch.empty(tokens, 1, k, dtype=torch.int64, device=device)
    for first in range(0, tokens, 256):
        rows = slice(first, first + 256)
        wide = 2.5 * torch.randn(logits[rows].shape, device=device)
        values[rows], ids[rows] = wide.log_softmax(-1).topk(k, -1)
        logits[rows] = wide + torch.randn_like(wide)
    return logits, values, ids, torch.randint(vocab, (tokens, 1), device=device)


def measure(tokens: int, vocab: int, k: int, device: str, repetitions: int) -> Numbers:
    """Time and memory of everything at one number of tokens; prints a table."""
    given = inputs(tokens, vocab, k, torch.bfloat16, device)
    logits = given[0]
    size = logits.nbytes
    print(f"\n{tokens} tokens, V {vocab}, K {k}, bf16: {size / 1e6:.0f} MB of logits")
    print(f"{'':32}{'ms':>9}{'least':>9}{'most':>9}{'GB/s':>8}{'held':>8}{'peak':>8}")
    rows: dict[str, Numbers] = {}

    def add(name: str, passes: int, action: Callable[[], object], memory: Numbers) -> None:
        rows[name] = timed(action, passes * size, repetitions, device) | memory
        print_row(name, rows[name])

    x = logits.view(tokens, vocab)
    add("copy", 2, x.clone, {})
    for name, passes, action in single_passes(given, vocab):
        add(name, passes, action, {})
    for name, loss_of in losses(given).items():
        if name == "KL + LM, torch passes":
            os.environ["LOGITS_KD_TRITON"] = "0"
        try:
            add(name, 3, functools.partial(step, loss_of, logits), memory_of(loss_of, logits))
        except torch.OutOfMemoryError:
            rows[name] = {"error": "out of memory"}
            print_row(name, rows[name])
        os.environ.pop("LOGITS_KD_TRITON", None)
    with torch.no_grad():
        add("teacher_topk", 1, lambda: teacher_topk(logits, k), {})
        add("torch.topk + logsumexp", 1, lambda: (x.topk(k, -1), x.logsumexp(-1)), {})
    return {"tokens": tokens, "logits_bytes": size, "rows": rows}


def single_passes(
    given: tuple[Tensor, ...], vocab: int
) -> list[tuple[str, int, Callable[[], object]]]:
    """The two passes of the loss by themselves, each with the passes over memory it makes."""
    x, ids = given[0].view(-1, vocab), given[2].flatten(0, 1)
    elsewhere = torch.zeros_like(ids, dtype=torch.bool)
    read = row_passes.read_rows(x, ids, elsewhere, torch.float32)
    out = torch.empty_like(x)

    def write() -> None:
        row_passes.write_gradient(
            x,
            out,
            reference=read.reference,
            scale=read.outside.reciprocal(),
            slots=ids,
            at_slots=read.picked,
            label_slots=ids[:, 0],
            at_label=read.outside,
        )

    return [
        ("read_rows", 1, lambda: row_passes.read_rows(x, ids, elsewhere, torch.float32)),
        ("write_gradient", 2, write),
    ]


def losses(given: tuple[Tensor, ...]) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is compared, each from logits to a scalar."""
    _, values, ids, labels = given
    tail = torch.log1p(-values.exp().sum(-1).clamp(max=1 - 1e-6))

    def both(x: Tensor) -> Tensor:
        kl, lm = sparse_kl_and_cross_entropy(x, values, ids, labels, tail_logprob=tail)
        return kl.sum() + lm.sum()

    found: dict[str, Callable[[Tensor], Tensor]] = {
        "KL + LM": both,
        "KL": lambda x: sparse_kl(x, values, ids, tail_logprob=tail).sum(),
        "KL + LM, torch passes": both,
        "torch cross_entropy": lambda x: torch.nn.functional.cross_entropy(
            x.flatten(0, 1), labels.flatten(), reduction="sum"
        ),
    }
    theirs, reason = installed_topk_kl_div()
    if theirs is None:
        print(f"installed topk_kl_div: skipped, {reason}")
    else:
        found["installed topk_kl_div"] = lambda x: theirs(x, values, ids, 1, 0, None, True).sum()
    return found


def step(loss_of: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Forward and backward, from logits that are no leaf, like an output layer's."""
    x = logits.detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(x), x)
    return grad


def timed(action: Callable[[], object], moved: int, repetitions: int, device: str) -> Numbers:
    """Milliseconds of *action*, and GB/s if it moves *moved* bytes; the first two do not count."""
    times = []
    for _ in range(repetitions + 2):
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    times = times[2:]
    median = statistics.median(times)
    numbers = {"ms": median, "least": min(times), "most": max(times)}
    return numbers | {"GB/s": moved / median / 1e6, "all_ms": times}


def memory_of(loss_of: Callable[[Tensor], Tensor], logits: Tensor) -> Numbers:
    """What forward leaves and what both need, in sizes of the logits; nothing on a CPU."""
    if not logits.is_cuda:
        return {}
    step(loss_of, logits)  # loads and compiles what is needed once
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = logits.detach().requires_grad_()
    loss = loss_of(x)
    held = torch.cuda.memory_allocated() - before
    (grad,) = torch.autograd.grad(loss, x)
    del grad
    peak = torch.cuda.max_memory_allocated() - before
    return {"held": held / logits.nbytes, "peak": peak / logits.nbytes}


def synchronize(device: str) -> None:
    """Wait for what is queued."""
    if device == "cuda":
        torch.cuda.synchronize()


def print_row(name: str, numbers: Numbers) -> None:
    """One line of the table."""
    if "error" in numbers:
        print(f"{name:32} {numbers['error']}", flush=True)
        return
    text = "".join(f"{numbers[key]:9.3f}" for key in ("ms", "least", "most"))
    text += f"{numbers['GB/s']:8.0f}"
    text += "".join(f"{numbers[key]:8.3f}" for key in ("held", "peak") if key in numbers)
    print(f"{name:32}{text}", flush=True)
