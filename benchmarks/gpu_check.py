# SPDX-License-Identifier: Apache-2.0
"""Checks the Triton kernels on a GPU and times the losses there; ``gpu_check.sh`` starts it.

Prints one line per check, then tables of times and memory, and writes the same as JSON into the
directory ``$OUT``.  ``--device cpu`` under ``TRITON_INTERPRET=1`` runs all of it in small: that
tests this script, and its times mean nothing.

What the tables say is in ``gpu_times``.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import trainerless  # noqa: F401  makes the next ones importable
from benchmarks.gpu_times import inputs, measure
from megatron.training.distillation import row_kernels, row_passes
from megatron.training.distillation.sparse_kl import sparse_kl_and_cross_entropy
from tests.unit_tests.training.distillation import kernel_checks

Check = Callable[[], None]

# (K, columns, columns with those that pad): odd ones, and those of GPT-2, Llama 2 and Llama 3
SHAPES = [
    *[(0, 1, 1), (7, 15, 20), (48, 1000, 1024), (300, 5003, 5008)],
    *[(64, 50257, 50304), (128, 32000, 32000), (128, 128256, 128256)],
]
SMALL_SHAPES = [(7, 15, 20), (48, 141, 144)]


def main() -> int:
    """Run the checks and the measurements; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here, so there is nothing to check.")
        return 2
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "interpreter on the CPU"
    print(f"{name}, torch {torch.__version__}, triton {row_kernels.triton.__version__}")
    with ExitStack() as stack:
        if args.device == "cpu":  # where the losses would use torch
            everywhere = mock.patch.object(row_passes, "kernels_for", return_value=row_kernels)
            stack.enter_context(everywhere)
        failures = run(checks(args.device))
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "failures": failures}
    result |= {"vocab_size": args.vocab_size, "top_k": args.top_k, "times": []}
    for tokens in args.tokens:
        result["times"].append(
            measure(tokens, args.vocab_size, args.top_k, args.device, args.repetitions)
        )
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "gpu_check.json").write_text(json.dumps(result, indent=1))
    print(f"{len(failures)} checks failed" if failures else "all checks passed")
    return 1 if failures else 0


def run(named: dict[str, Check]) -> list[str]:
    """Run the checks; the names of those that failed."""
    failures = []
    for name, check in named.items():
        began = time.perf_counter()
        try:
            check()
            print(f"ok      {name} ({time.perf_counter() - began:.1f} s)", flush=True)
        except AssertionError as error:
            failures.append(name)
            print(f"FAILED  {name}: {error}", flush=True)
    return failures


def checks(device: str) -> dict[str, Check]:
    """All checks by name."""
    small = device == "cpu"
    tile = kernel_checks.TILE if small else None
    found: dict[str, Check] = {}
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, (k, real, width) in itertools.product(dtypes, SMALL_SHAPES if small else SHAPES):
        # More rows than programs run at once, so that bitmaps are used again.
        tokens = 4 if small else 1500 if real < 10000 else 24
        for offset in (0.0,) if small or dtype == torch.float16 else (0.0, 300.0, -300.0):
            found[f"passes {dtype} K {k} columns {real}/{width} offset {offset:g}"] = (
                functools.partial(
                    kernel_checks.check_passes,
                    *(dtype, k, real, width, offset),
                    tokens=tokens,
                    tile=tile,
                    device=device,
                )
            )
    for real in (141,) if small else (64, 141, 50257):
        found[f"wild rows of {real}"] = functools.partial(
            kernel_checks.check_wild_rows, real, tile=tile, device=device
        )
    for dtype in dtypes:
        sizes = (3, 500, 8) if small else (40, 128256, 128)
        found[f"both losses {dtype}"] = functools.partial(check_losses, dtype, sizes, device)
    return found


def check_losses(dtype: torch.dtype, sizes: tuple[int, int, int], device: str) -> None:
    """Losses and gradient against dense float64; logits intact; the same bits every time."""
    tokens, vocab, k = sizes
    logits, values, ids, labels = inputs(tokens, vocab, k, dtype, device)
    assert row_passes.kernels_for(logits.view(-1, vocab)) is row_kernels, "the kernels are off"
    before = logits.clone()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        kl, lm = sparse_kl_and_cross_entropy(x, values, ids, labels)
        return torch.stack([kl, lm]), torch.autograd.grad(0.7 * kl.sum() + 0.3 * lm.sum(), x)[0]

    x = logits.requires_grad_()
    losses, grad = both(x)
    assert torch.equal(logits.detach(), before), "the logits were written to"
    for _ in range(5):
        again = both(x)
        assert torch.equal(again[0], losses), "the losses are not the same every time"
        assert torch.equal(again[1], grad), "the gradient is not the same every time"

    z = before.double().requires_grad_()
    logq, p = z.log_softmax(-1), values.double().exp()
    mass = 1 - p.sum(-1)
    tail = logq.scatter(-1, ids, -torch.inf).logsumexp(-1)
    kl = (p * (values - logq.gather(-1, ids))).sum(-1) + mass * (mass.log() - tail)
    lm = -logq.gather(-1, labels[..., None])[..., 0]
    (want,) = torch.autograd.grad(0.7 * kl.sum() + 0.3 * lm.sum(), z)
    for name, found, wanted in (("KL", losses[0], kl), ("LM", losses[1], lm)):
        error = kernel_checks.relative(found, wanted)
        assert error <= 2e-6, f"{name} loss differs by {error:.1e}"
    limit = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    error = kernel_checks.relative(grad, want)
    assert error <= limit, f"the gradient differs by {error:.1e}, more than {limit:.1e}"


if __name__ == "__main__":
    sys.exit(main())
