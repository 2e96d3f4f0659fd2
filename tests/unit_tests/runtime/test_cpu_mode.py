# SPDX-License-Identifier: Apache-2.0
"""CPU mode: asked for, announced, refused beside a GPU, and the same in child processes."""

import argparse
from pathlib import Path

import pytest
import torch

from runtime import cpu_mode
from tests.unit_tests.runtime.subprocesses import passes

ANNOUNCEMENT = "> CPU mode: no GPU is visible, torch.cuda is redirected to the CPU"
GLOO = ("--distributed-backend", "gloo")


@pytest.mark.parametrize(
    ("command_line", "asked"),
    [
        ("--distributed-backend gloo", True),
        ("--distributed-backend=gloo", True),
        ("--seed 1 --distributed-backend gloo --bf16", True),
        ("", False),
        ("--distributed-backend nccl", False),
        ("--distributed-backend=nccl", False),
        ("--distributed-backend", False),
        ("gloo", False),
        ("--save gloo --distributed-backend nccl", False),
    ],
)
def test_only_the_gloo_backend_asks_for_it(command_line: str, asked: bool) -> None:
    assert cpu_mode.requested(command_line.split()) is asked


# ---- entering, or not -------------------------------------------------------------------------

NOT_ENTERED = """
import sys
from runtime import cpu_mode
import torch

watched = lambda: (
    torch.cuda.current_device, torch.cuda.device_count, torch.nn.Module.cuda,
    torch.distributed.init_process_group, torch.utils.data.DataLoader.__init__,
)
before = watched()

def untouched():
    assert watched() == before
    assert not cpu_mode.is_active()
    try:
        torch.zeros(1, device="cuda")
    except (AssertionError, RuntimeError):
        return True
    return False

assert cpu_mode.activate_if_requested(["--distributed-backend", "nccl"]) is False
cpu_mode.patch_trainer()
cpu_mode.set_flag_defaults(None)
print("unasked:", untouched())

torch.cuda.is_available = lambda: True
assert cpu_mode.activate_if_requested(["--distributed-backend", "gloo"]) is False
print("gloo beside a GPU:", untouched())
try:
    cpu_mode.activate()
except RuntimeError as error:
    print(error)
print("refused:", untouched())
"""


@pytest.mark.slow
def test_it_is_neither_entered_unasked_nor_beside_a_gpu() -> None:
    unasked, gloo, message, refused = passes(NOT_ENTERED).splitlines()
    assert unasked == "unasked: True"
    assert gloo == "gloo beside a GPU: True"
    assert "CPU mode was asked for, but a CUDA device is visible" in message
    assert 'CUDA_VISIBLE_DEVICES=""' in message
    assert refused == "refused: True"


# ---- child processes --------------------------------------------------------------------------

PARENT = """
import multiprocessing
import sys

from runtime import cpu_mode

cpu_mode.activate_if_requested(sys.argv)
cpu_mode.activate_if_requested(sys.argv)

def report(queue):
    import torch
    device = torch.ones(1, device="cuda").device
    queue.put((cpu_mode.is_active(), 0 % torch.cuda.device_count(), str(device)))

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    queue = context.Queue()
    child = context.Process(target=report, args=(queue,))
    child.start()
    print("child:", *queue.get(timeout=100))
    child.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_are_in_it_too_and_say_nothing(tmp_path: Path, method: str) -> None:
    printed = passes(PARENT.format(method=method), *GLOO, script=tmp_path / "entry.py")
    assert printed.splitlines() == [ANNOUNCEMENT, "child: True 0 cpu"]


# ---- what is redirected -----------------------------------------------------------------------

REDIRECTED = """
import os
from runtime import cpu_mode
assert cpu_mode.activate_if_requested(["--distributed-backend", "gloo"])
assert cpu_mode.activate_if_requested([])
cpu_mode.activate()
assert cpu_mode.is_active()
import torch
from torch.utils.data import DataLoader

# Devices land on the CPU.
cuda = torch.device("cuda", 1)
x = torch.arange(3.0)
placed = [
    torch.zeros(2, device="cuda"),
    torch.zeros(2, device="cuda:1"),
    torch.zeros(2, device=cuda),
    torch.zeros(2, device=0),
    torch.full((2,), 1.0, device=torch.cuda.current_device()),
    torch.empty(2, device="cuda", pin_memory=True),
    torch.tensor([1.0], device="cuda"),
    x.to("cuda"), x.to(cuda), x.to(0), x.to(device="cuda", dtype=torch.float64), x.cuda(),
    x.to("cuda", torch.float16), x.pin_memory(), torch.empty_like(x, device="cuda"),
    x.to(torch.zeros(1, dtype=torch.int32)),
]
assert all(t.device.type == "cpu" for t in placed), [t.device for t in placed]
assert x.to(device="cuda", dtype=torch.float64).dtype == torch.float64
assert x.to("cuda", torch.float16).dtype == torch.float16
assert x.to(torch.float16).dtype == torch.float16
assert x.to(torch.zeros(1, dtype=torch.int32)).dtype == torch.int32
assert x.to("cpu") is x
assert x.type() == "torch.cuda.FloatTensor"
assert x.type(torch.float64).dtype == torch.float64
layer = torch.nn.Linear(2, 2)
assert layer.cuda() is layer
assert layer.to("cuda").weight.device.type == "cpu"

# torch.cuda answers.
assert torch.cuda.is_available() and torch.cuda.current_device() == 0
assert torch.cuda.device_count() == 3
assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
assert torch.cuda.get_device_properties(0).major == 8
assert not torch.accelerator.is_available()
assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
first.record(); second.record()
assert first.elapsed_time(second) >= 0
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().synchronize()
assert len(list(DataLoader(torch.arange(4), batch_size=2, pin_memory=True))) == 2

torch.cuda.manual_seed(5)
state = torch.cuda.get_rng_state()
drawn = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(3), drawn)
torch.manual_seed(5)
assert torch.equal(torch.rand(3), drawn)
"""


@pytest.mark.slow
def test_torch_cuda_is_the_cpu() -> None:
    """One process for all of it; rank 1, which does not announce the mode."""
    printed = passes(REDIRECTED, environment={"LOCAL_WORLD_SIZE": "3", "RANK": "1"})
    assert printed == ""


def test_user_flags_win_over_its_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.training.arguments import add_megatron_arguments

    monkeypatch.setattr(cpu_mode, "_active", True)
    monkeypatch.setattr(cpu_mode, "_told_defaults", False)
    monkeypatch.delenv("RANK", raising=False)
    for _ in range(2):
        parser = add_megatron_arguments(argparse.ArgumentParser())
        cpu_mode.set_flag_defaults(parser)
    args = parser.parse_args([])
    for name, value in cpu_mode.FLAG_DEFAULTS.items():
        assert getattr(args, name) == value
    assert args.attention_backend.name == "unfused"

    args = parser.parse_args(
        ["--async-strategy", "nvrx", "--ckpt-format", "torch", "--no-rope-fusion"]
    )
    assert (args.async_strategy, args.ckpt_format) == ("nvrx", "torch")
    assert args.transformer_impl == "local"

    (told,) = capsys.readouterr().out.splitlines()
    assert "defaults of flags not given" in told
    assert "transformer_impl=local" in told
    assert "attention_backend=unfused" in told


def test_async_checkpoints_are_staged_by_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live weights would be written while training changes them."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import initialize

    monkeypatch.setattr(cpu_mode, "_active", True)
    monkeypatch.setattr(initialize, "_warmup_jit_function", None)
    monkeypatch.setattr(
        FileSystemWriterAsync, "preload_tensors", FileSystemWriterAsync.preload_tensors
    )
    cpu_mode.patch_trainer()
    weights = torch.ones(3)
    buckets = [("path", "key", (["bytes"], [("item", weights)]))]
    ((path, key, (data, ((item, staged),))),) = FileSystemWriterAsync.preload_tensors(buckets, True)
    weights.zero_()
    assert (path, key, data, item) == ("path", "key", ["bytes"], "item")
    assert staged.tolist() == [1.0, 1.0, 1.0]
