# SPDX-License-Identifier: Apache-2.0
"""Stands in for the module ``wandb`` in a job, and keeps what is logged as W&B would.

A step is complete when a later one begins. W&B drops what comes for an earlier one, with a warning;
here that ends the job.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VARIABLE = "KD_TEST_WANDB"
HISTORY = "history.jsonl"

config: dict[str, Any] = {}
run = SimpleNamespace(entity="entity", project="project", log_artifact=lambda *_, **__: None)
_row: dict[str, Any] = {}


def flags(directory: Path) -> list[str]:
    """Return the flags of a job that logs to W&B, which keeps it in *directory*."""
    return ["--wandb-project", "kd", "--wandb-exp-name", "test", "--wandb-save-dir", str(directory)]


def history(directory: Path) -> dict[str, dict[int, float]]:
    """Return what a job has logged: by name, the values by step."""
    found: dict[str, dict[int, float]] = {}
    for line in (directory / HISTORY).read_text().splitlines():
        row = json.loads(line)
        step = row.pop("_step")
        for name, value in row.items():
            found.setdefault(name, {})[step] = value
    return found


def install_where_asked() -> None:
    """Be ``wandb`` in this process if the job's environment has :data:`VARIABLE`."""
    if VARIABLE in os.environ:
        sys.modules["wandb"] = sys.modules[__name__]


# ---- what the trainer calls of W&B -------------------------------------------------------------


def init(*, dir: str, **options: Any) -> None:
    config["history"] = Path(dir) / HISTORY


def log(data: Mapping[str, float], step: int) -> None:
    current = _row.get("_step", step)
    assert step >= current, f"W&B drops {dict(data)} of step {step}: it is at step {current}"
    if step > current:
        finish()
    _row.update(data, _step=step)


def finish() -> None:
    if _row:
        with config["history"].open("a") as stream:
            # Losses come as tensors.
            stream.write(json.dumps(_row, default=float) + "\n")
    _row.clear()


class Artifact:
    """A checkpoint, of which nothing is kept."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.add_reference = self.add_file = lambda *_, **__: None
