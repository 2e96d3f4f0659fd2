# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels: through Triton's interpreter, and compiled for GPUs that are not here."""

import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.training.distillation import row_passes

Check = Callable[..., None]

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent.relative_to(ROOT)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: torch's wheels for the CPU come without",
)


def _check(name: str, *args: Any) -> None:
    # Imported where Triton interprets, and only there.
    from tests.unit_tests.training.distillation import kernel_checks

    getattr(kernel_checks, name)(*args)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    """Run a function of ``kernel_checks`` by name, in a process whose Triton interprets."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        patch.setenv("TRITON_INTERPRET", "1")
        pool.submit(torch.set_num_threads, 1).result()
        patch.undo()
        yield lambda name, *args: pool.submit(_check, name, *args).result()


@needs_triton
@pytest.mark.parametrize(
    ("k", "real", "width", "offset"),
    [
        (0, 300, 300, 0.0),
        (1, 1, 1, 0.0),
        (1, 41, 48, 300.0),
        (7, 15, 20, 0.0),
        (7, 333, 336, -300.0),
        (48, 41, 48, 0.0),
        (48, 304, 304, 300.0),
        (300, 333, 333, 0.0),  # more than are looked at together
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_passes_match_dense_float64_and_torch(
    interpreted: Check, dtype: torch.dtype, k: int, real: int, width: int, offset: float
) -> None:
    interpreted("check_passes", dtype, k, real, width, offset)


@needs_triton
@pytest.mark.parametrize("real", [64, 141])
def test_wild_rows(interpreted: Check, real: int) -> None:
    interpreted("check_wild_rows", real)


@needs_triton
def test_empty_shapes(interpreted: Check) -> None:
    interpreted("check_empty_shapes")


@needs_triton
def test_tail_that_a_difference_would_lose(interpreted: Check) -> None:
    interpreted("check_tail_that_cancels")


@needs_triton
def test_offsets_beyond_32_bits(interpreted: Check, tmp_path: Path) -> None:
    interpreted("check_offsets_beyond_32_bits", str(tmp_path))


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_losses_on_the_kernels() -> None:
    """The tests of the losses pass with the kernels in place of torch, at TP 1 and TP 2."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", f"{'.'.join(HERE.parts)}.losses_on_kernels"]
    command += ["-k", "not gradcheck and not accelerator", f"{HERE}/test_joint_losses.py"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    job = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(r"\b1\d passed", job.stdout), job.stdout


def _stand_in(**changes: Any) -> Any:
    on_gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "stride": lambda axis: 1}
    return SimpleNamespace(**(on_gpu | changes))


@needs_triton
def test_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = row_passes.kernels_for(_stand_in())
    assert kernels is not None
    assert kernels.__name__.endswith(".row_kernels")
    for change in (
        {"device": torch.device("cpu")},
        {"dtype": torch.float64},
        {"stride": lambda axis: 2},
    ):
        assert row_passes.kernels_for(_stand_in(**change)) is None, change
    monkeypatch.setenv("LOGITS_KD_TRITON", "0")
    assert row_passes.kernels_for(_stand_in()) is None


def test_torch_does_it_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_passes, "_HAS_TRITON", False)
    assert row_passes.kernels_for(_stand_in()) is None


def _compiled(name: str, dtype: str, capability: int, tile: int, with_label: bool) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.training.distillation import row_kernels

    kernel = getattr(row_kernels, name)
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "out"), f"*{dtype}")
    types |= dict.fromkeys(("reference", "outside", "picked", "scale", "at_slots"), "*fp32")
    types |= {"slots": "*i64", "label_slots": "*i64", "at_label": "*fp32"}
    types |= {"mark_words": "*i32", "mark_bytes": "*u8"}
    constants: dict[str, Any] = {"TILE": tile, "BLOCK": 4 * tile, "SLOT_TILE": 256}
    if not with_label:
        constants |= {"label_slots": None, "at_label": None}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}
    # What Triton finds out about aligned pointers and strides when it is called.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, key in enumerate(kernel.arg_names)
        if types[key].startswith("*") or key.endswith("_stride")
    }
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 8})


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "capability", "tile", "with_label"),
    [("bf16", 80, 2048, True), ("bf16", 90, 2048, False), ("fp32", 90, 1024, True)],
)
@pytest.mark.parametrize("name", ["_read_kernel", "_write_kernel"])
def test_compiles_to_wide_accesses_within_64_registers(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    dtype: str,
    capability: int,
    tile: int,
    with_label: bool,
) -> None:
    """By Triton's own ptxas, which needs no GPU.

    Four programs per multiprocessor have 64 registers per thread; a few constants may be spilled.
    """
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asm = _compiled(name, dtype, capability, tile, with_label).asm
    wide = re.findall(r"(?:ld|st)\.global[.:\w]*\.v4\.b32", asm["ptx"])
    assert len(wide) >= 8, wide
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.check_output([tool, "-res-usage", binary], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) ", usage)
    assert found is not None, usage
    assert int(found[1]) <= 64, usage
    assert int(found[2]) <= 16, usage
