# SPDX-License-Identifier: Apache-2.0
"""A damaged cache gives the original targets or a named error, whatever the damage.

``LOGITS_FUZZ_CASES=10000`` tries that many caches instead of the few of a normal run, half of them
in each format, and ``LOGITS_FUZZ_SEED`` others.
"""

import os
import resource
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron.training.distillation.errors import (
    CacheFormatError,
    CacheIdentityError,
    TeacherDataError,
    TeacherDataExhaustedError,
)
from megatron.training.distillation.manifest import ExpectedRun, RunManifest
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    LoadLayout,
    TeacherRowReader,
)
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    SEQ,
    in_format,
    rows_of,
    write_shard,
)
from tests.unit_tests.training.distillation.cache_mutations import Mutator, read_files, write_files

FORMATS = (2, 3)
CASES = int(os.environ.get("LOGITS_FUZZ_CASES", "300")) // len(FORMATS)
"""Caches of each format."""
SEED = os.environ.get("LOGITS_FUZZ_SEED", "1")
MANIFEST = RunManifest(
    sequence_length=SEQ,
    vocab_size=128,
    padded_vocab_size=128,
    tokenizer={"type": "NullTokenizer", "fingerprint": "0123456789abcdef"},
    split="80,20,0",
    dataloader_type="single",
    sft=False,
    blend_weighted=None,
    package_version="1",
    megatron_core_version="2",
    teacher={"checkpoint": "teacher", "step": 3},
)
GBS, SAMPLES = 4, 16
LAYOUTS = [
    LoadLayout(dp_rank=0, dp_size=1, mbs=2, gbs=GBS, seq_length=SEQ),
    LoadLayout(dp_rank=1, dp_size=2, mbs=1, gbs=GBS, seq_length=SEQ),
]
NAMED_ERRORS = (CacheFormatError, CacheIdentityError, TeacherDataError)
AT_THE_END = TeacherDataExhaustedError.__name__
MAX_SECONDS = 5.0
MAX_GROWTH_KIB = 300 * 1024


@pytest.fixture(scope="module", params=FORMATS, ids=("v2", "v3"))
def mutator(request, tmp_path_factory) -> Mutator:
    """Damages a cache of two DP ranks with two shards each, in both formats."""

    def cache(**changes) -> dict[str, bytes]:
        directory = tmp_path_factory.mktemp("cache")
        options = {"gbs": GBS, "dp": 2, "manifest": MANIFEST} | changes
        for start in range(0, SAMPLES, 8):
            write_shard(directory, start, start + 8, **options)
        return read_files(directory)

    other_tokenizer = {"type": "NullTokenizer", "fingerprint": "f" * 16}
    foreign = [
        {"identifiers": IDENTIFIERS | {"seed": 2}},
        {"identifiers": IDENTIFIERS | {"blend": {"kind": "blend", "blend": [[1.0, "x"]]}}},
        {"manifest": replace(MANIFEST, tokenizer=other_tokenizer)},
        {"manifest": replace(MANIFEST, split="70,30,0")},
        {"k": 4},
        {"save_dtype": "bf16"},
        {"dp": 1},
        {"mbs": 2},
        {"dp": 4},
    ]
    with in_format(request.param):
        return Mutator(cache(), [cache(teacher=500, **changes) for changes in foreign])


def read_all(directory, layout: LoadLayout) -> str:
    """Compare what a student gets with the truth; return the first failure in short."""
    run = ExpectedRun(identifiers=IDENTIFIERS, manifest=MANIFEST)
    reader = TeacherRowReader(
        str(directory), layout, expected_identifiers=run, decode_threads=1 + layout.dp_rank
    )
    first_error = ""
    # A renamed shard may promise samples without end; a student stops at its first error.
    for item, start in zip(reader.iterations(0), range(0, SAMPLES + 2 * GBS, GBS), strict=False):
        assert item.start == start
        if isinstance(item, IterationFailure):
            assert isinstance(item.error, NAMED_ERRORS), repr(item.error)
            first_error = first_error or type(item.error).__name__
            continue
        for number, rows in enumerate(item.microbatches):
            begin = start + (number * layout.dp_size + layout.dp_rank) * layout.mbs
            values, indices, tail = rows_of(list(range(begin, begin + layout.mbs)))
            assert torch.equal(rows.values, values)
            assert torch.equal(rows.indices, indices.int())
            assert rows.tail_logprob is not None
            assert torch.equal(rows.tail_logprob, tail)
    return first_error


@pytest.mark.slow
@pytest.mark.timeout(60 + CASES)
def test_damage_gives_the_targets_or_a_named_error(mutator, tmp_path, record_property):
    directory = tmp_path / "cache"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[tuple[str, str]] = Counter()
    slowest = 0.0
    for case in range(CASES):
        seed = f"{SEED}-{case}"
        kind, files = mutator.mutate(seed)
        write_files(directory, files)
        begin = time.monotonic()
        try:
            outcome = read_all(directory, LAYOUTS[case % len(LAYOUTS)])
        except Exception as error:
            raise AssertionError(f"case {seed}, {kind}: {error!r}") from error
        outcomes[kind, outcome] += 1
        slowest = max(slowest, time.monotonic() - begin)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    record_property("outcomes", {" ".join(key): count for key, count in sorted(outcomes.items())})
    print(f"{CASES} cases, slowest {slowest:.2f} s, {growth} KiB more memory, {dict(outcomes)}")
    assert slowest < MAX_SECONDS
    assert growth < MAX_GROWTH_KIB
    # The damage is real: what reaches this rank's rows is noticed.
    unnoticed = sum(count for (_, error), count in outcomes.items() if error == AT_THE_END)
    assert unnoticed < CASES / 2


def test_the_undamaged_cache_is_read(mutator, tmp_path):
    write_files(tmp_path / "cache", mutator._files)
    for layout in LAYOUTS:
        assert read_all(tmp_path / "cache", layout) == AT_THE_END
