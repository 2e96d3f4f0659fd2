# SPDX-License-Identifier: Apache-2.0
"""Overlay of the ``megatron.training`` package that ships with megatron-core.

``megatron`` is a namespace package. This directory stands before site-packages on ``sys.path``,
so ``megatron.training`` is this file, and its ``__path__`` goes on to the installed package:
``megatron.training.distillation`` is the tree's, all else in ``megatron.training`` the wheel's.

What the installed ``__init__`` exports is served here on first use, and so are its submodules.
Doing it lazily keeps ``megatron.training.distillation.shard_writer`` importable in the checkpoint
worker without loading the whole trainer into it.
"""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from typing import Any

SUPPORTED_MEGATRON_CORE = ">=0.19.2,<0.20"
"""The megatron-core releases whose trainer this overlay has been tested with."""

_EXPORTS = {
    "get_args": "global_vars",
    "get_signal_handler": "global_vars",
    "get_tokenizer": "global_vars",
    "get_tensorboard_writer": "global_vars",
    "get_wandb_writer": "global_vars",
    "get_one_logger": "global_vars",
    "get_adlr_autoresume": "global_vars",
    "get_timers": "global_vars",
    "initialize_megatron": "initialize",
    "pretrain": "training",
    "get_model": "training",
    "get_train_valid_test_num_samples": "training",
    "set_startup_timestamps": "training",
    "print_rank_0": "utils",
    "is_last_rank": "utils",
    "print_rank_last": "utils",
}


def _check_installed_megatron_core() -> None:
    """Raise ImportError unless a supported megatron-core is installed."""
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "megatron-core is not installed in this environment, and megatron.training is an "
            f"overlay of it. Install megatron-core{SUPPORTED_MEGATRON_CORE}."
        ) from None
    # A dependency of megatron-core, so not to be had before it.
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(SUPPORTED_MEGATRON_CORE).contains(found, prereleases=True):
        raise ImportError(
            f"megatron-core {found} is installed, but the overlay of megatron.training supports "
            f"{SUPPORTED_MEGATRON_CORE}. Install a release in that range."
        )


_check_installed_megatron_core()
__path__ = pkgutil.extend_path(__path__, __name__)


def __getattr__(name: str) -> Any:
    """Serve an export of the installed package, or one of its submodules."""
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the module's own names and the lazy exports."""
    return sorted({*globals(), *_EXPORTS})
