# SPDX-License-Identifier: Apache-2.0
"""What the worker processes of ``worker_processes`` share: an implementation, memory, answers.

The implementation is the package ``megatron.training.distillation`` under a given root; everything
else is the installed megatron-core's.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = "megatron.training.distillation"


def load_implementation(
    root: str, seq_length: int, *, rank: int = 0, world_size: int = 1, store: str | None = None
) -> Any:
    """Load the package under *root* and give it the global state that it asks for.

    Collective over the *world_size* processes that meet at the file *store*; the parallel state is
    data parallel over them.
    """
    import megatron.core.num_microbatches_calculator as microbatches
    import megatron.training
    from megatron.core import parallel_state
    from megatron.training.arguments import add_megatron_arguments

    args = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
    vars(args).update(
        mock_data=True,
        train_samples=100000,
        consumed_train_samples=0,
        freeze_all_layers=True,
        curr_iteration=0,
        iteration=0,
        seq_length=seq_length,
        micro_batch_size=1,
        global_batch_size=64,
        data_parallel_size=1,
    )
    megatron.training.global_vars.set_args(args)
    store = store or tempfile.mkdtemp() + "/store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel()
    microbatches.init_num_microbatches_calculator(0, None, 64, 1, 1, False)
    folder = Path(root) / PACKAGE.replace(".", "/")
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    setattr(megatron.training, "distillation", package)  # noqa: B010
    spec.loader.exec_module(package)
    return package


class Memory:
    """Resident bytes since construction, now and at their highest."""

    def __init__(self) -> None:
        self._base = 0
        self._base = self.now()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark

    def now(self) -> int:
        """Return what is resident now, of what is in use."""
        return_freed()
        return _status("VmRSS") - self._base

    def peak(self) -> int:
        """Return what was resident at most."""
        return _status("VmHWM") - self._base


def return_freed() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def cpu_seconds(action: Callable[[], Any]) -> float:
    """Return the CPU seconds of all threads."""
    began = time.process_time()
    action()
    return time.process_time() - began


def scale_to_mass(logits: torch.Tensor, mass: float = 0.95) -> float:
    """Return the factor that gives the rows' top 128 a median mass near *mass*, as a model's."""
    scale = 1.0
    k = min(128, logits.shape[-1])
    for _ in range(20):
        found = (scale * logits).softmax(-1).topk(k, -1).values.sum(-1).median()
        scale *= 1.05 if found < mass else 0.97
    return scale


def answer_requests(make_bench: Callable[[], object]) -> None:
    """Answer requests ``[method, *arguments]`` until the input ends; other output goes to stderr.

    Args:
        make_bench: Makes the object whose methods are asked for.
    """
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr
    bench = make_bench()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(bench, name)(*arguments)), file=answers, flush=True)
