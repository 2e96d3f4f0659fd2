# SPDX-License-Identifier: Apache-2.0
"""``info`` of caches that the trainer wrote, run as a user runs it."""

import json
import subprocess
import sys

import pytest

from tests.functional_tests.cases import DUMP_GLOBAL_BATCH, DUMPS, SAMPLES, Workshop
from tests.functional_tests.harness import PADDED_VOCAB, SEQ_LENGTH

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["tp1", "dp2", "cp2"])
def test_info_of_a_dump(workshop: Workshop, name: str) -> None:
    dump, case = workshop.dump(name), DUMPS[name]
    command = [sys.executable, "-m", "tools.logits_cache", "info", str(dump.cache)]
    found = json.loads(subprocess.check_output([*command, "--json"], timeout=120))
    settings = dump.oracle.settings
    ranks = 2 if name == "dp2" else 1
    assert found["samples"] == found["identifiers"]["train_samples"] == SAMPLES
    assert found["complete"] == [[0, SAMPLES]]
    assert found["tokens"] == SAMPLES * SEQ_LENGTH
    assert found["shards"] == len(list(dump.cache.glob("*.tar")))
    assert found["formats"] == {str(settings.save_format): found["shards"]}
    assert found["by_dp_rank"] == {str(rank): [[0, SAMPLES]] for rank in range(ranks)}
    assert found["manifest"]["padded_vocab_size"] == PADDED_VOCAB
    assert found["manifest"]["teacher"]["checkpoint"] == "teacher"
    saver = found["saver"]
    assert (saver["k"], saver["p"]) == (settings.k, settings.p)
    assert (saver["mbs_save"], saver["gbs_save"]) == (case.micro_batch, DUMP_GLOBAL_BATCH)
    assert found["payload"]["has_tails"]
    assert found["payload"]["has_fingerprints"]
    assert not (found["damaged"])
    assert not (found["foreign_shards"])
    assert not (found["overlapping"])
    text = subprocess.check_output(command, timeout=120, text=True)
    assert f"{SAMPLES} samples are complete, 100.0% of train_samples" in text
