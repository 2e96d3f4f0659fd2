# SPDX-License-Identifier: Apache-2.0
"""Checks of a model's flags where the trainer would go on with another model, or fail obscurely."""

import argparse
import importlib
import importlib.util
from typing import Any

from runtime import cpu_mode


def checked_hybrid_config(args: argparse.Namespace) -> Any:
    """Return the hybrid model's configuration, once it is known that it can be built.

    Args:
        args: The arguments, validated by Megatron, which may take the pattern from a checkpoint.

    Raises:
        ValueError: There is no layer pattern, or the model has no CPU version.
        ImportError: A package that the model is made of is missing.
    """
    from megatron.training.argument_utils import hybrid_config_from_args

    check_hybrid_model(args)
    return hybrid_config_from_args(args)


def check_hybrid_model(args: argparse.Namespace) -> None:
    """Refuse a hybrid model that would have no layers, or whose parts are not here.

    Imports none of the parts.

    Raises:
        ValueError: There is no layer pattern, or the model has no CPU version.
        ImportError: A package that the model is made of is missing.
    """
    pattern = args.hybrid_layer_pattern
    if pattern is None:
        raise ValueError(
            "pretrain_hybrid.py needs --hybrid-layer-pattern: without it the model has no layers, "
            "whatever --num-layers says. Give a pattern such as 'M*-M' (M: Mamba, *: attention, "
            "-: MLP), or run pretrain_gpt.py."
        )
    # Package by name on the registry. A --spec may bring a stack without Transformer Engine.
    needed = {} if args.spec else {"transformer_engine": "'transformer-engine[pytorch]'"}
    if "M" in pattern:
        needed |= {"mamba_ssm": "'mamba-ssm[causal-conv1d]'", "einops": "einops"}
    modules = ", ".join(needed)
    if needed and cpu_mode.is_active():
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} needs {modules}, which run on GPUs, and this is CPU "
            f"mode. Run it where a GPU is visible and without {cpu_mode.BACKEND_FLAG} gloo; on the "
            "CPU, run pretrain_gpt.py."
        )
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(needed[name] for name in missing)
        raise ImportError(
            f"--hybrid-layer-pattern {pattern} needs {modules}; not installed: "
            f"{', '.join(missing)}. Install what is missing: pip install --no-build-isolation "
            f"{packages}"
        )


def check_spec(spec: list[str] | None) -> None:
    """Refuse a ``--spec`` that cannot be imported; the module gets imported.

    Megatron only logs such a failure, and builds its default model.

    Args:
        spec: Module and name; other forms are left to Megatron.

    Raises:
        ValueError: The module cannot be imported, or has no such name.
    """
    if spec is None or len(spec) != 2:
        return
    module_name, name = spec
    advice = "Correct --spec, or put the module's directory on PYTHONPATH."
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"--spec {module_name} {name}: {module_name} cannot be imported ({error}). {advice}"
        ) from error
    if not hasattr(module, name):
        raise ValueError(
            f"--spec {module_name} {name}: {module.__file__} has no name {name}. {advice}"
        )
