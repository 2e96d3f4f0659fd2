# SPDX-License-Identifier: Apache-2.0
"""``logits_cache diff`` on caches of the real trainer: one teacher, recorded in several ways."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.cases import SAMPLES, Workshop
from tools import logits_cache

ROOT = Path(__file__).parents[2]


def diff(a: Path, b: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    status = logits_cache.main(["diff", str(a), str(b), "--json", *flags])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["status"] == status
    return found


def test_a_converted_cache_is_the_same_to_a_user(workshop: Workshop, tmp_path: Path):
    dump = workshop.dump("dp2")
    other = 5 - workshop.format_of(2)
    for command in (
        ["convert", str(dump.cache), str(tmp_path / "copy"), "--format", str(other)],
        ["diff", str(dump.cache), str(tmp_path / "copy"), "--exact"],
    ):
        run = subprocess.run(
            [sys.executable, "-m", "tools.logits_cache", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
    assert f"{SAMPLES} of {SAMPLES} samples" in run.stdout
    assert f"the same tokens in {SAMPLES} samples" in run.stdout


def test_two_dumps_of_one_teacher_agree(workshop: Workshop, capsys: pytest.CaptureFixture[str]):
    """One keeps 12 entries on one rank, the other up to 60 under P 0.9 on two."""
    narrow, wide = workshop.dump("tp1"), workshop.dump("dp2")
    found = diff(narrow.cache, wide.cache, capsys)
    assert found["status"] == 0
    assert found["identity"]["fatal"] == []
    assert {"k", "p", "dp_size_save"} <= {each["name"] for each in found["identity"]["settings"]}
    assert found["labels"]["same"] == found["rows"]["samples"] == SAMPLES
    rows = found["rows"]
    assert rows["entries_a"] == 12
    assert rows["entries_b"] == pytest.approx(
        wide.oracle.mean_kept(sorted(wide.oracle.samples)), abs=0.01
    )
    assert rows["same_top"] > 0.99  # but for ranks that round a tie in another way
    # Both lead the same falling list, and every token of this teacher has more than 12 under P.
    assert rows["common_of_a"] == 1.0
    assert rows["common_of_b"] == pytest.approx(12 / rows["entries_b"])
    assert rows["mass_of_a_not_in_b"]["mean"] == 0
    assert rows["logprob_difference"]["max"]["value"] < 0.02
    assert rows["tails_are_stored"]
    assert rows["kl"]["mean"] < 1e-5
    assert rows["kl"]["max"]["value"] < 1e-3
    back = diff(wide.cache, narrow.cache, capsys)["rows"]
    assert back["common_of_b"] == 1.0
    assert 0.1 < back["mass_of_a_not_in_b"]["mean"] < 1
    assert back["kl"]["mean"] < 1e-5  # what the narrow one leaves open may be as in the wide one


def test_8_bit_values_of_the_same_teacher_cost_little(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
):
    coded = workshop.dump("cp2")
    found = diff(workshop.dump("dp2").cache, coded.cache, capsys, "--samples", "8")
    assert found["status"] == 0
    assert found["labels"]["same"] == found["rows"]["samples"] == 8
    assert found["rows"]["same_top"] > 0.95
    assert found["rows"]["kl"]["mean"] < 1e-3
