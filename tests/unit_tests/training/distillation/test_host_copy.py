# SPDX-License-Identifier: Apache-2.0
"""Tensors reach the host as they were, and nobody waits for the device but who asks for them."""

import pytest
import torch

from megatron.training.distillation.host_copy import HostCopier
from megatron.training.distillation.teacher_topk import apply_top_p, teacher_topk


def test_tensors_on_the_cpu_are_not_copied() -> None:
    tensors = (torch.arange(6).view(2, 3), None, torch.ones(3, dtype=torch.float16)[::2])
    copy = HostCopier().start(*tensors)
    assert copy.nbytes == 6 * 8 + 2 * 2
    found = copy.wait()
    assert all(one is other for one, other in zip(found, tensors, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_arrive_and_nothing_synchronises() -> None:
    copier = HostCopier()
    # Pinned memory is allocated once, which may wait for the device.
    copier.start(torch.zeros(1 << 22, device="cuda")).wait()
    logits = torch.randn(512, 2, 4096, device="cuda")
    copies = []
    for scale in range(8):
        torch.cuda.set_sync_debug_mode("error")
        try:
            entries = teacher_topk(logits * scale, 16)
            assert entries is not None
            nucleus, kept = apply_top_p(entries, 0.9, 1)
            copies.append(
                copier.start(nucleus.logprobs, None, nucleus.indices.transpose(0, 1), kept)
            )
            # Its memory is wanted again at once.
            del entries, nucleus, kept
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for scale, copy in enumerate(copies):
        values, nothing, indices, kept = copy.wait()
        entries = teacher_topk(logits * scale, 16)
        expected = apply_top_p(entries, 0.9, 1)
        assert nothing is None
        assert values.is_pinned()
        assert torch.equal(values, expected[0].logprobs.cpu())
        assert torch.equal(indices, expected[0].indices.transpose(0, 1).cpu())
        assert torch.equal(kept, expected[1].cpu())
