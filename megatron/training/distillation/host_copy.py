# SPDX-License-Identifier: Apache-2.0
"""Brings tensors to the host without making the training thread wait for the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors on their way to the host."""

    tensors: tuple[torch.Tensor | None, ...]
    """Where they arrive, in page-locked memory; not to be read before :meth:`wait` returns."""
    arrived: torch.cuda.Event | None
    """Comes after the last of them; None if they have been there from the start."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that they take."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def wait(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors once they are complete; from any thread."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensors


class HostCopier:
    """Starts copies to the host on a stream of its own. Tensors on the CPU are left as they are."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def start(self, *tensors: torch.Tensor | None) -> HostCopy:
        """Start copying *tensors*, all of one device, behind what the current stream has queued.

        They may be dropped at once, but not be written to. None stays None.
        """
        device = next(tensor.device for tensor in tensors if tensor is not None)
        if device.type != "cuda":
            return HostCopy(tensors, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copies = tuple(None if tensor is None else self._copy(tensor) for tensor in tensors)
            # Whoever waits sleeps instead of taking a core from the training thread.
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._stream)
        return HostCopy(copies, arrived)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        # Its memory is not given to others of its own stream before the copy is done.
        assert self._stream is not None
        tensor.record_stream(self._stream)
        return copy
