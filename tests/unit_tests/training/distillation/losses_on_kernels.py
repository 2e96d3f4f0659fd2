# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that has the losses use the Triton kernels on the CPU.

For a process whose Triton interprets: ``TRITON_INTERPRET=1 python -m pytest -p`` and this module.
The interpreter is slow, so of the cases that the tests share some are taken.
"""

from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron.training.distillation import row_kernels, row_passes
from tests.unit_tests.training.distillation import loss_cases

# A step that is prime to the number of values of every property of a case.
_EVERY = 29

loss_cases.CASES[:] = [case for case in loss_cases.CASES if case.dtype != torch.float64][::_EVERY]


def _tile(x: Tensor) -> int | None:
    """So small that a row has several, where rows are short."""
    return 16 if x.shape[1] < 1024 else None


def _read_rows(x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return row_kernels.read_rows(x, slots, tile=_tile(x))


def _write_gradient(x: Tensor, out: Tensor, **given: Any) -> None:
    row_kernels.write_gradient(x, out, **given, tile=_tile(x))


def _kernels_for(x: Tensor) -> ModuleType | None:
    if x.dtype == torch.float64:
        return None
    kernels = SimpleNamespace(read_rows=_read_rows, write_gradient=_write_gradient)
    return cast(ModuleType, kernels)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_passes, "kernels_for", _kernels_for)
