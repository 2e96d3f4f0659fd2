# SPDX-License-Identifier: Apache-2.0
"""Prepare a process for the trainer: the first thing an entry script does.

The persistent checkpoint worker imports the entry script too (``multiprocessing`` runs the main
module as ``__mp_main__`` in spawned and forkserver children), so it gets the same preparation.
"""

import importlib.util
import sys
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]
MINIMUM_PYTHON = (3, 12)


class OverlayError(ImportError):
    """``megatron.training.distillation`` resolves to another package than this tree's."""


def prepare_process(argv: list[str] | None = None) -> None:
    """Check interpreter and overlay, and switch on CPU mode where it is asked for.

    Call it before anything imports torch or megatron. Idempotent.

    Args:
        argv: The command line to look for ``--distributed-backend`` in; ``sys.argv`` by default.

    Raises:
        RuntimeError: The interpreter is too old.
        OverlayError: Another package of the same name stands before this tree's.
        ImportError: megatron-core is absent or of an unsupported version.
    """
    if sys.version_info < MINIMUM_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        needed = ".".join(map(str, MINIMUM_PYTHON))
        raise RuntimeError(f"Python {found} is too old for megatron-core: use {needed} or newer.")
    from runtime import cpu_mode

    cpu_mode.activate_if_requested(sys.argv if argv is None else argv)
    check_overlay()
    use_prebuilt_dataset_helpers()


def check_overlay() -> None:
    """Raise OverlayError unless the distillation package is the one beside this file.

    megatron-core carries an older package under the very same name; running it by accident would
    write another format.
    """
    spec = importlib.util.find_spec("megatron.training.distillation")
    expected = REPOSITORY_ROOT / "megatron" / "training" / "distillation" / "__init__.py"
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if found != expected:
        raise OverlayError(
            f"megatron.training.distillation is {found}, expected {expected}. Put "
            f"{REPOSITORY_ROOT} before site-packages on sys.path: run the scripts from that "
            "directory, or set PYTHONPATH to it."
        )


def use_prebuilt_dataset_helpers() -> None:
    """Keep the trainer from running ``make`` for dataset helpers that ship prebuilt.

    The wheel has the compiled ``helpers_cpp`` but no Makefile, and the trainer exits when ``make``
    fails. A source tree without the compiled module keeps Megatron's own build step.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return
    from megatron.core.datasets import utils

    utils.compile_helpers = _compiled_helpers_ship_with_the_wheel


def _compiled_helpers_ship_with_the_wheel() -> None:
    """Stand in for ``compile_helpers``: there is nothing to build."""
