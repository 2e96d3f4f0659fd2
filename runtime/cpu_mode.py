# SPDX-License-Identifier: Apache-2.0
"""CPU mode: run Megatron's own trainer on a machine without a GPU.

The trainer speaks to ``torch.cuda`` directly. In CPU mode those calls land on the CPU: a
:class:`torch.overrides.TorchFunctionMode` maps every CUDA device to the CPU, and the functions of
``torch.cuda`` are replaced by stand-ins. It is what CI, the quickstart and the tests run on.

CPU mode is explicit (``--distributed-backend gloo``), announced in one line, and refuses to start
where a CUDA device is visible, so a GPU run can never end up on the CPU by accident.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

BACKEND_FLAG = "--distributed-backend"

FLAG_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
    "ckpt_format": "torch_dist",
    "async_strategy": "mcore",
}
"""Defaults (by argparse destination) of flags whose usual values need a GPU."""

_active = False
_told_defaults = False


def is_active() -> bool:
    """Return whether this process runs in CPU mode."""
    return _active


def requested(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for the gloo backend, the sign of a CPU run."""
    for position, word in enumerate(argv):
        if word == f"{BACKEND_FLAG}=gloo":
            return True
        if word == BACKEND_FLAG and argv[position + 1 : position + 2] == ["gloo"]:
            return True
    return False


def activate_if_requested(argv: Sequence[str]) -> bool:
    """Enter CPU mode if the command line asks for gloo and no CUDA device is visible.

    With a visible CUDA device this does nothing: gloo on GPUs is Megatron's business.

    Returns:
        Whether CPU mode is active now.
    """
    if _active:
        return True
    if not requested(argv):
        return False
    # The fused kernels are torch.compile'd; the switch is read when torch is imported.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch

    if torch.cuda.is_available():
        return False
    activate()
    return True


def activate() -> None:
    """Redirect ``torch.cuda`` to the CPU for the rest of this process's life.

    Raises:
        RuntimeError: A CUDA device is visible.
    """
    global _active
    if _active:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch

    if torch.cuda.is_available():
        raise RuntimeError(
            "CPU mode was asked for, but a CUDA device is visible. Hide it with "
            'CUDA_VISIBLE_DEVICES="" or run without CPU mode.'
        )
    # Megatron wants this variable with tensor and context parallelism, also where no GPU is.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _redirect_torch_cuda()
    _redirect_torch_distributed()
    _cpu_function_mode().__enter__()
    _active = True
    if os.environ.get("RANK", "0") == "0" and _is_main_process():
        print("> CPU mode: no GPU is visible, torch.cuda is redirected to the CPU", flush=True)


def _is_main_process() -> bool:
    # While a spawned or forkserver child imports the entry script, that is its __mp_main__;
    # elsewhere __mp_main__ is another name of __main__, or missing.
    return sys.modules.get("__mp_main__") in (None, sys.modules["__main__"])


def set_flag_defaults(parser: Any) -> None:
    """Give flags that need a GPU a CPU default, and say so; a user's own choice stays."""
    global _told_defaults
    if not _active:
        return
    from megatron.core.transformer.enums import AttnBackend

    defaults = {**FLAG_DEFAULTS, "attention_backend": AttnBackend.unfused}
    known = {action.dest for action in parser._actions}
    missing = sorted(set(defaults) - known)
    assert not missing, f"flags unknown to this megatron-core: {missing}"
    parser.set_defaults(**defaults)
    # The entry scripts parse twice.
    if os.environ.get("RANK", "0") == "0" and not _told_defaults:
        _told_defaults = True
        shown = ", ".join(f"{name}={getattr(v, 'name', v)}" for name, v in defaults.items())
        print(f"> CPU mode: defaults of flags not given: {shown}", flush=True)


def patch_trainer() -> None:
    """Change what the trainer does only because it counts on a GPU; its modules get imported.

    The JIT warm-up is skipped: it draws random numbers whose count depends on the parallel layout.
    On a GPU they come from the device's generator; here there is only one, and initial weights
    would differ between layouts.

    An asynchronous checkpoint is staged by a copy: moving tensors from a GPU to the host makes one,
    here the live weights would be written while training changes them.
    """
    if not _active:
        return
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import initialize

    initialize._warmup_jit_function = _no_warmup
    FileSystemWriterAsync.preload_tensors = staticmethod(stage_checkpoint_tensors)


def stage_checkpoint_tensors(
    write_buckets: list[tuple[str, str, tuple[list[Any], list[tuple[Any, Any]]]]],
    non_blocking: bool = True,
) -> list[tuple[str, str, tuple[list[Any], list[tuple[Any, Any]]]]]:
    """Stand in for ``FileSystemWriterAsync.preload_tensors``; the checkpoint worker runs it."""
    return [
        (path, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (data, tensors) in write_buckets
    ]


def _no_warmup(*args: object, **kwargs: object) -> None:
    """Stand in for ``_warmup_jit_function``."""


def _cpu_function_mode() -> Any:
    """Build the mode that maps CUDA devices to the CPU in every torch function call."""
    import torch
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")
    identity = {torch.Tensor.cuda, torch.Tensor.pin_memory}
    cuda_type_name = {torch.Tensor.type}

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.device):
            return cpu if value.type == "cuda" else value
        if isinstance(value, str):
            return "cpu" if value.startswith("cuda") else value
        return value

    class RedirectCudaToCpu(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if func in identity:
                return args[0]
            if func in cuda_type_name and len(args) == 1 and not kwargs:
                # Optimizer code asserts on names such as "torch.cuda.FloatTensor".
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if func is torch.Tensor.to and len(args) > 1:
                device = cpu if type(args[1]) is int else to_cpu(args[1])
                args = (args[0], device, *args[2:])
            if kwargs:
                device = kwargs.get("device")
                if device is not None:
                    kwargs = {**kwargs, "device": cpu if type(device) is int else to_cpu(device)}
                if kwargs.get("pin_memory"):
                    kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **(kwargs or {}))

    return RedirectCudaToCpu()


def _redirect_torch_cuda() -> None:
    """Replace the functions of ``torch.cuda`` the trainer calls."""
    import torch

    cuda = torch.cuda
    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "get_device_name": "cpu",
        "get_device_capability": (8, 0),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (0, 0),
        "memory_summary": "",
        "utilization": 0,
    }
    nothing = (
        "init _lazy_init set_device synchronize empty_cache ipc_collect reset_peak_memory_stats "
        "reset_max_memory_allocated check_error"
    )
    for name, value in values.items():
        setattr(cuda, name, _constant(value))
    for name in nothing.split():
        setattr(cuda, name, _constant(None))
    setattr(cuda, "memory_stats", lambda *args, **kwargs: _ZeroStatistics())  # noqa: B010
    properties = SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=1 << 40, multi_processor_count=1
    )
    for name, replacement in {
        "get_device_properties": _constant(properties),
        "Stream": _Stream,
        "Event": _Event,
        "device_count": lambda: max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        "current_stream": lambda *args, **kwargs: _Stream(),
        "default_stream": lambda *args, **kwargs: _Stream(),
        "set_stream": _constant(None),
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        "device": lambda *args, **kwargs: contextlib.nullcontext(),
        "_lazy_call": lambda callback, **kwargs: callback(),
        "default_generators": _Generators(torch.default_generator),
        "manual_seed": torch.default_generator.manual_seed,
        # torch.manual_seed seeds the CPU first and every GPU next, which is the CPU again.
        "manual_seed_all": _constant(None),
    }.items():
        setattr(cuda, name, replacement)
    modules: tuple[Any, ...] = (cuda, cuda.random)
    for module in modules:
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.accelerator.is_available = _constant(False)


def _redirect_torch_distributed() -> None:
    """Drop GPU-only arguments of process groups and data loaders."""
    import functools

    import torch

    init_process_group = torch.distributed.init_process_group
    loader_init = torch.utils.data.DataLoader.__init__

    @functools.wraps(init_process_group)
    def without_device_id(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init_process_group(*args, **kwargs)

    @functools.wraps(loader_init)
    def without_pin_memory(self: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> None:
        loader_init(self, *args, **kwargs)

    torch.distributed.init_process_group = without_device_id
    torch.utils.data.DataLoader.__init__ = without_pin_memory  # type: ignore[method-assign]


def _constant(value: Any) -> Callable[..., Any]:
    """Return a function that ignores its arguments and returns *value*."""
    return lambda *args, **kwargs: value


class _ZeroStatistics(dict[str, int]):
    """Memory statistics of a device that has none."""

    def __missing__(self, key: str) -> int:
        return 0


class _Generators:
    """``torch.cuda.default_generators``: every device's generator is the CPU's."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __getitem__(self, index: int) -> Any:
        return self._generator

    def __iter__(self) -> Iterator[Any]:
        return iter((self._generator,))

    def __len__(self) -> int:
        return 1


class _Stream:
    """A stream on which all work has been done already."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cuda_stream = 0
        self.device_index = 0

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""


class _Event:
    """An event that records the wall clock."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._time = 0.0

    def record(self, stream: object = None) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return (end._time - self._time) * 1e3

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self, stream: object = None) -> None:
        """Return at once."""
