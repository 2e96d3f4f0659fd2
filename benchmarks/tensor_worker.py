# SPDX-License-Identifier: Apache-2.0
"""One implementation's tensor work in a process of its own, for ``bench_tensor_work``."""

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.implementation_worker import (
    PACKAGE,
    Memory,
    answer_requests,
    cpu_seconds,
    load_implementation,
    scale_to_mass,
)

CHECKED_ROWS = 12


def peaked_logits(tokens: int, vocab: int, seed: int) -> torch.Tensor:
    """Return bf16 logits ``(T, 1, V)`` whose median top-128 mass is near 0.95, as a model's."""
    generator = torch.Generator().manual_seed(seed)
    falling = -3.0 * torch.log(torch.arange(vocab) + 3.0)
    rows = [
        falling[torch.randperm(vocab, generator=generator)]
        + 0.9 * torch.randn(vocab, generator=generator)
        for _ in range(tokens)
    ]
    logits = torch.stack(rows)
    return (scale_to_mass(logits[:16]) * logits).bfloat16()[:, None]


class Bench:
    """The measurements, on inputs that are made once."""

    def __init__(self, root: str, tokens: int, vocab: int, k: int) -> None:
        self._package = load_implementation(root, tokens)
        self._losses = importlib.import_module(PACKAGE + ".cached_logits_loss")
        joint = importlib.util.find_spec(PACKAGE + ".sparse_kl")
        self._joint = None if joint is None else importlib.import_module(PACKAGE + ".sparse_kl")
        self._tokens, self._vocab, self._k = tokens, vocab, k
        self._logits = peaked_logits(tokens, vocab, seed=1)
        teacher = (peaked_logits(tokens, vocab, seed=1).float() * 1.1)[:, 0]
        falling = teacher.topk(k, -1)
        self._ids = falling.indices[:, None]
        self._values = (falling.values - teacher.logsumexp(-1, True)).half()[:, None]
        self._labels = torch.randint(vocab, (tokens, 1), generator=torch.Generator().manual_seed(2))
        self._hook_layer = self._attach_saver()

    def _attach_saver(self) -> torch.nn.Module:
        model = torch.nn.Module()
        model.output_layer = torch.nn.Identity()
        setattr(model, "compute_language_model_loss", lambda labels, logits: logits)  # noqa: B010
        saver = self._package.LogitsSaverHooks(tempfile.mkdtemp(), self._k)
        saver.attach_hooks(model.train())
        layer: torch.nn.Module = model.output_layer
        return layer

    # ---- what is measured -------------------------------------------------------------------

    def kd(self, x: torch.Tensor) -> torch.Tensor:
        """Return the divergence of every token, ``(1, T)``."""
        tokens = len(x)
        loss: torch.Tensor = self._losses.topk_kl_div(
            x, self._values[:tokens], self._ids[:tokens], 1, 0, None, add_ghost_token=True
        )
        return loss

    def lm(self, x: torch.Tensor) -> torch.Tensor:
        """Return the trainer's own LM loss, ``(T, 1)``."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        loss: torch.Tensor = vocab_parallel_cross_entropy(
            x, self._labels[: len(x)], tp_group=dist.group.WORLD
        )
        return loss

    def both(self, x: torch.Tensor) -> torch.Tensor:
        """Return LM loss and divergence, as a student of this implementation computes them."""
        if self._joint is None:
            return 0.5 * self.lm(x).sum() + 0.5 * self.kd(x).sum()
        kd, lm = self._joint.sparse_kl_and_cross_entropy(
            x, self._values[: len(x)], self._ids[: len(x)], self._labels[: len(x)]
        )
        return 0.5 * (kd + lm).sum()

    def torch_cross_entropy(self, x: torch.Tensor) -> torch.Tensor:
        """Return torch's cross entropy."""
        return torch.nn.functional.cross_entropy(x[:, 0], self._labels[:, 0], reduction="sum")

    # ---- how --------------------------------------------------------------------------------

    def time_loss(self, name: str) -> dict[str, float]:
        """Return the CPU us per token of a loss, forward and backward."""
        loss = getattr(self, name)
        x = self._logits.clone().requires_grad_()

        def step() -> None:
            torch.autograd.grad(loss(x * 1).sum(), x)

        def passing() -> None:
            torch.autograd.grad((x * 1).sum(), x)

        step()
        seconds = cpu_seconds(step) - cpu_seconds(passing)
        return {"us/token": seconds / self._tokens * 1e6}

    def memory_of_loss(self, name: str) -> dict[str, float]:
        """Return bytes held for backward and at most, over the logits'."""
        loss, size = getattr(self, name), self._logits.nbytes
        x = self._logits.clone().requires_grad_()
        logits = x * 1
        memory = Memory()
        value = loss(logits)
        held = memory.now()
        value = value.sum()
        torch.autograd.grad(value, logits)
        same = torch.equal(logits.detach(), self._logits)
        return {
            "held / logits": held / size,
            "peak / logits": memory.peak() / size,
            "logits intact": float(same),
        }

    def gradient_error(self) -> dict[str, float]:
        """Return the relative L2 error of the divergence's gradient on fp32 logits."""
        x = self._logits[:CHECKED_ROWS].float().requires_grad_()
        # A non-leaf: an implementation may write to it.
        (found,) = torch.autograd.grad(self.kd(x * 1).sum(), x)
        z = x.detach().double().requires_grad_()
        logq = z.log_softmax(-1)
        p, ids = self._values[:CHECKED_ROWS].double(), self._ids[:CHECKED_ROWS]
        mass = (1 - p.exp().sum(-1)).clamp(min=1e-8)
        tail = logq.scatter(-1, ids, -torch.inf).logsumexp(-1)
        loss = (p.exp() * (p - logq.gather(-1, ids))).sum() + (mass * (mass.log() - tail)).sum()
        (want,) = torch.autograd.grad(loss, z)
        return {"relative L2": ((found.double() - want).norm() / want.norm()).item()}

    def time_hook(self) -> dict[str, float]:
        """Return the CPU us per token of the teacher's hook."""
        self._feed()
        return {"us/token": cpu_seconds(self._feed) / self._tokens * 1e6}

    def memory_of_hook(self) -> dict[str, float]:
        """Return the hook's peak over the logits' bytes."""
        self._feed()
        memory = Memory()
        self._feed()
        return {"peak / logits": memory.peak() / self._logits.nbytes}

    def _feed(self) -> None:
        with torch.no_grad():
            self._hook_layer(self._logits)

    def floors(self) -> dict[str, float]:
        """Return this machine's limits for the same shapes, in CPU us per token."""
        x = self._logits[:, 0]
        source = torch.zeros(128 << 20, dtype=torch.uint8)
        target = torch.zeros_like(source)
        copying = min(cpu_seconds(lambda: target.copy_(source)) for _ in range(5))
        bandwidth = 2 * source.numel() / copying

        def per_token(action: Callable[[], Any]) -> float:
            return min(cpu_seconds(action) for _ in range(3)) / self._tokens * 1e6

        return {
            "copy GB/s": bandwidth / 1e9,
            "three passes over the logits": 6 * self._vocab / bandwidth * 1e6,
            "chunked fp32 softmax": per_token(
                lambda: [row.float().softmax(-1) for row in x.split(2)]
            ),
            "torch.topk": per_token(lambda: x.topk(self._k, -1)),
            "logsumexp": per_token(lambda: [row.float().logsumexp(-1) for row in x.split(2)]),
        }


def main() -> None:
    """Answer requests until the input ends."""
    root, tokens, vocab, k = sys.argv[1], *map(int, sys.argv[2:5])
    answer_requests(lambda: Bench(root, tokens, vocab, k))


if __name__ == "__main__":
    main()
