# SPDX-License-Identifier: Apache-2.0
"""Reads the weights in a checkpoint, whatever parallel layout wrote it."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def load_weights(save: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Return the model's tensors by their global names, in their global shapes."""
    directory = save / f"iter_{iteration:07d}"
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    weights = {
        name: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and name.split(".")[0] in ("decoder", "embedding", "output_layer")
    }
    dcp.load(weights, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return weights


def latest_iteration(save: Path) -> int:
    """Return the iteration of the last checkpoint that was confirmed."""
    return int((save / "latest_checkpointed_iteration.txt").read_text())
