# SPDX-License-Identifier: Apache-2.0
"""Runs Python code in a process of its own: what these tests change cannot be undone in one."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[3]


def run_python(
    code: str,
    *arguments: str,
    python_path: Sequence[Path | str] | None = None,
    environment: dict[str, str] | None = None,
    script: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run *code* with *arguments* and return what it printed and how it ended.

    Args:
        code: The program; written to *script* first, if that is given.
        arguments: Its command line.
        python_path: Directories before site-packages; the repository by default.
        environment: Variables to set; no GPU is visible unless they say otherwise.
        script: Run the code from this file, as multiprocessing needs it.
    """
    paths = [REPOSITORY_ROOT] if python_path is None else python_path
    variables = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    program = ["-c", code]
    if script is not None:
        script.write_text(code)
        program = [str(script)]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env=variables,
        cwd="/",
        check=False,
    )


def passes(code: str, *arguments: str, **options: object) -> str:
    """Run *code*, which must succeed, and return its standard output."""
    result = run_python(code, *arguments, **options)  # type: ignore[arg-type]
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
