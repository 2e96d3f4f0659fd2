# SPDX-License-Identifier: Apache-2.0
"""``verify`` finds caches of the real trainer sound, and what is damaged in them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional_tests.cases import Workshop
from tests.functional_tests.launcher import REPOSITORY_ROOT
from tools import logits_cache

pytestmark = pytest.mark.functional


@pytest.mark.parametrize("name", ["tp1", "dp2", "cp2", "tp2"])
def test_a_dump_is_sound(workshop: Workshop, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cache = workshop.dump(name).cache
    before = {path: path.read_bytes() for path in cache.iterdir()}
    arguments = ["verify", str(cache), "--full", "--json", "--jobs", "1", "--samples", "0-32"]
    assert logits_cache.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sound"]
    assert found["samples"] == [[0, 32]]
    assert found["verified_payloads"] == found["payloads"] == 8 * (2 if name == "dp2" else 1)
    assert found["unsealed_shards"] == 0
    assert {path: path.read_bytes() for path in cache.iterdir()} == before


def test_a_user_sees_what_is_damaged(workshop: Workshop, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(workshop.dump("dp2").cache, cache)
    (cache / "dp1__16-32.tar").unlink()
    broken = cache / "dp0__0-16.tar"
    content = bytearray(broken.read_bytes())
    content[-20_000 if len(content) > 40_000 else len(content) // 2] ^= 1
    broken.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "tools.logits_cache", "verify", str(cache), "--full"],
        cwd=REPOSITORY_ROOT,
        env={"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "NOT sound: 1 shard with damaged payloads, samples missing" in done.stdout
    assert "--override-ckpt-iteration 4 --exit-interval 8" in done.stdout
    assert not list((tmp_path / "state").rglob("*.jsonl"))
