# SPDX-License-Identifier: Apache-2.0
"""A damaged cache is repaired, and the real trainer dumps again what ``repair`` says."""

import json
import shutil
from pathlib import Path

import pytest

from tests.functional_tests.caches import read_cache
from tests.functional_tests.cases import DUMPS, Workshop
from tools import logits_cache

pytestmark = pytest.mark.functional


def test_what_repair_says_makes_a_cache_whole(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A payload, a shard of one rank and the last shards of both are lost, and dumped again."""
    dump, case = workshop.dump("dp2"), DUMPS["dp2"]
    cache, load = tmp_path / "cache", tmp_path / "save"
    shutil.copytree(dump.cache, cache)
    shutil.copytree(dump.save, load)
    content = bytearray((cache / "dp0__0-16.tar").read_bytes())
    # In the middle of the first member.
    content[content.index(b"0-4.pt.zst") + 1500] ^= 1
    (cache / "dp0__0-16.tar").write_bytes(content)
    for rank in range(2):
        whole = cache / f"dp{rank}__16-32.tar"
        whole.write_bytes(whole.read_bytes()[:-5000])
    (cache / "dp0__0-16.tar.tmp").write_bytes(b"left by a writer")
    known = tmp_path / "found.json"
    assert logits_cache.main(["verify", str(cache), "--full", "--json", "--jobs", "1"]) == 1
    known.write_text(capsys.readouterr().out)

    repair = ["repair", str(cache), "--from", str(known), "--jobs", "1", "--apply"]
    assert logits_cache.main(repair) == 1
    assert "--no-writer" in capsys.readouterr().err
    assert logits_cache.main([*repair, "--no-writer"]) == 1
    assert {path.name for path in cache.iterdir()} == {
        "dp0__0-16.tar.stale",
        "dp0__0-16.tar.tmp.stale",
        "dp0__4-16.tar",
        "dp0__16-32.tar.stale",
        "dp1__0-16.tar",
        "dp1__16-32.tar.stale",
    }
    capsys.readouterr()
    assert logits_cache.main(["verify", str(cache), "--json"]) == 1
    ranges = json.loads(capsys.readouterr().out)["regenerate"]
    assert [one["samples"] for one in ranges] == [[0, 4], [16, 32]]
    assert [one["dp_ranks"] for one in ranges] == [[0], [0, 1]]
    for one in ranges:
        arguments = workshop.dump_arguments(case, cache, load)
        at = one["flags"].index("--save") + 1
        save = tmp_path / one["flags"][at]
        again = [*one["flags"][:at], str(save), *one["flags"][at + 1 :]]
        workshop.jobs.run(save.name, [*arguments, *again], ranks=case.ranks)
    assert logits_cache.main(["verify", str(cache), "--full", "--jobs", "1"]) == 0
    assert logits_cache.main(["repair", str(cache)]) == 0
    assert read_cache(cache) == read_cache(dump.cache)
    assert (load / "latest_checkpointed_iteration.txt").read_text() == "8"
