# SPDX-License-Identifier: Apache-2.0
"""``logits_cache plan`` predicts what dumps of the real trainer have taken."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.cases import (
    DUMP_GLOBAL_BATCH,
    DUMPS,
    FLUSH_INTERVAL,
    SAMPLES,
    Workshop,
)
from tests.functional_tests.harness import PADDED_VOCAB
from tools import logits_cache
from tools.cache.cache_files import list_cache
from tools.cache.inventory import take_inventory

FLUSHED = re.compile(r"samples: (\d+) \| (\S+) MB .* held: (\S+) MB")


def plan(capsys: pytest.CaptureFixture[str], name: str, like: Path, length: int) -> dict[str, Any]:
    case = DUMPS[name]
    settings = case.settings
    flags = [
        *("--world-size", str(case.ranks), "--micro-batch-size", str(case.micro_batch)),
        *("--global-batch-size", str(DUMP_GLOBAL_BATCH), "--seq-length", str(length)),
        *("--train-samples", str(SAMPLES), "--save-interval", str(FLUSH_INTERVAL)),
        *("--vocab-size", str(PADDED_VOCAB), "--logits-save-top-k", str(settings.k)),
        *("--logits-save-dtype", settings.dtype, "--like", str(like)),
    ]
    assert logits_cache.main(["plan", *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", ["tp1", "dp2"])
def test_a_dump_has_taken_what_is_planned(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], name: str
):
    """Planned from the entries of its own cache, or one would test the teacher's text."""
    dump = workshop.dump(name)
    inventory = take_inventory(list_cache(str(dump.cache)))
    assert inventory.meta is not None
    assert inventory.meta.manifest is not None
    length = inventory.meta.manifest.sequence_length
    assert length is not None
    found = plan(capsys, name, dump.cache, length)
    assert found["tokens"] == SAMPLES * length
    assert found["shards"] == len(inventory.shards)
    format_plan = found["formats"][str(inventory.meta.saver.format_version)]
    disk = sum(shard.size for shard in inventory.shards)
    # Files of these few samples are filled up to multiples of 10240 bytes.
    assert abs(format_plan["disk"] - disk) <= 10240 * len(inventory.shards)
    flushes = FLUSHED.findall(dump.job.log)
    assert len(flushes) == SAMPLES // DUMP_GLOBAL_BATCH // FLUSH_INTERVAL
    for _, size, held in flushes:
        assert format_plan["flush_all"] / 1e6 == pytest.approx(float(size), rel=0.1)
        # All iterations may wait to be compressed, as these take less time than that.
        raw = found["raw_iteration_bytes"] * FLUSH_INTERVAL
        assert float(size) / found["writing_ranks"] <= float(held) * 1.1
        assert float(held) <= (format_plan["memory_behind"] + raw) / 1e6
