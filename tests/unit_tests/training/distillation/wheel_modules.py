# SPDX-License-Identifier: Apache-2.0
"""The distillation package inside the megatron-core wheel, to compare with."""

import importlib.metadata
import importlib.util
import sys
from typing import Any


def wheel_module(name: str, file: str) -> Any:
    """Load a file of the wheel's own distillation package, which the tree's package shadows.

    Call it in a process of a test's own: the module stays in ``sys.modules`` as *name*.
    """
    wheel = importlib.metadata.distribution("megatron-core")
    path = wheel.locate_file(f"megatron/training/distillation/{file}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
