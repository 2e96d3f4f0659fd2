# SPDX-License-Identifier: Apache-2.0
"""The check for a machine with a GPU: as far as one without can follow it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed: torch's wheels for the CPU come without",
    ),
]


def gpu_check(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu_check.sh"), *options],
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_says_that_there_is_no_gpu() -> None:
    job = gpu_check()
    assert job.returncode == 2, job.stderr
    assert "no CUDA device" in job.stdout


SMALL = ("--device", "cpu", "--tokens", "3", "--vocab-size", "500", "--top-k", "8")


def test_runs_in_small_on_the_interpreter(tmp_path: Path) -> None:
    job = gpu_check(*SMALL, "--repetitions", "1", TRITON_INTERPRET="1", OUT=str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert result["failures"] == []
    (table,) = result["times"]
    assert table["rows"].keys() >= {"copy", "read_rows", "write_gradient", "KL + LM", "KL"}
    assert table["rows"].keys() >= {"installed topk_kl_div", "teacher_topk", "torch cross_entropy"}
    for name, numbers in table["rows"].items():
        assert numbers["ms"] > 0, name
        assert f"\n{name:32}" in job.stdout, name


def test_a_check_that_fails_is_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu_check as module

    def wrong() -> None:
        raise AssertionError("off by one")

    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--tokens", "3"])
    monkeypatch.setattr(module, "measure", lambda *args: {})
    for checks, status in (({"right": lambda: None, "wrong": wrong}, 1), ({}, 0)):
        monkeypatch.setattr(module, "checks", lambda device, found=checks: found)
        assert module.main() == status
    out = capsys.readouterr().out
    assert "FAILED  wrong: off by one" in out
    assert "1 checks failed" in out


def test_needs_no_trainer() -> None:
    """The modules that are checked can be imported where megatron-core is not installed."""
    program = (
        "import importlib.metadata as m\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        "from benchmarks import gpu_check\n"
        "import sys; assert 'megatron.core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
