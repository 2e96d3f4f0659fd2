# SPDX-License-Identifier: Apache-2.0
"""How the samples of a microbatch lie in a model's logits: side by side, or one after the other.

A microbatch of ``B`` samples of ``S`` tokens gives logits ``(S, B, V)``, one column per sample.
With packed sequences (``--sft``, thd layout) the trainer first joins the samples to one sequence,
which gives ``(B * S, 1, V)``: sample ``b`` holds the positions from ``b * S`` on. The cache always
has one row per sample, ``(S, B, K)``.

Pure: tensors and sizes, nothing of the trainer.
"""

import torch


def is_packed(
    logits: torch.Tensor, *, positions: int, micro_batch_size: int, cp_size: int = 1
) -> bool:
    """Tell whether *logits* hold several samples as one sequence.

    With one sample per microbatch both layouts are the same, which counts as not packed.

    Args:
        logits: ``(S / cp, B, V / tp)`` or ``(B * S, 1, V / tp)``.
        positions: Positions of a sample on this context-parallel rank, ``S / cp``.
        micro_batch_size: Samples per microbatch, ``B``.
        cp_size: Size of the context parallel group.

    Raises:
        ValueError: The logits are in neither layout; or in the packed one with context parallelism,
            which slices the joined sequence instead of every sample.
    """
    found = tuple(logits.shape[:2])
    if found == (positions, micro_batch_size):
        return False
    joined = (positions * micro_batch_size, 1)
    if found != joined:
        raise ValueError(
            f"The logits of a microbatch have (positions, samples) = {found}; expected "
            f"{(positions, micro_batch_size)}, or {joined} where its samples are packed into one "
            "sequence. Every batch must have --micro-batch-size samples of --seq-length tokens."
        )
    if cp_size > 1:
        raise ValueError(
            f"The logits of a microbatch have (positions, samples) = {found}: {micro_batch_size} "
            f"samples were joined before their sequence was sliced over {cp_size} "
            "context-parallel ranks, so a rank's part cannot be told by sample. Use "
            "--micro-batch-size 1 or --context-parallel-size 1."
        )
    return True


def pack_samples(rows: torch.Tensor) -> torch.Tensor:
    """Join the samples of ``(S, B, ...)`` one after the other: ``(B * S, 1, ...)``."""
    # (S, B, ...) -> (B, S, ...) -> (B * S, ...) -> (B * S, 1, ...)
    return rows.transpose(0, 1).flatten(0, 1).unsqueeze(1)


def unpack_samples(joined: torch.Tensor, micro_batch_size: int) -> torch.Tensor:
    """Put the samples of ``(B * S, 1, ...)`` side by side: ``(S, B, ...)``, a view."""
    # (B * S, 1, ...) -> (B * S, ...) -> (B, S, ...) -> (S, B, ...)
    return joined.squeeze(1).unflatten(0, (micro_batch_size, -1)).transpose(0, 1)
