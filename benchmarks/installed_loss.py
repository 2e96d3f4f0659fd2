# SPDX-License-Identifier: Apache-2.0
"""The divergence of the megatron-core that is installed, whose package has the name of ours."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.trainerless import ROOT


def installed_topk_kl_div() -> tuple[Callable[..., Any] | None, str]:
    """``topk_kl_div`` of the installed wheel, or None and why it is not to be had.

    Its modules are imported where ours are out of sight, and ours are back when this returns.
    """
    ours = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.split(".")[0] == "megatron"
    }
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if Path(entry or ".").resolve() != ROOT]
    try:
        module = importlib.import_module("megatron.training.distillation.cached_logits_loss")
        found: Callable[..., Any] = module.topk_kl_div
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return None, f"megatron-core's package cannot be imported ({error})"
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]
        sys.modules.update(ours)
    return found, ""
