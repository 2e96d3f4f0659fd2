# SPDX-License-Identifier: Apache-2.0
"""Batches of Megatron's own data sets, dumped by one run and trained on by another.

Whatever makes the student see other tokens than the teacher stops it, with the sample; whatever
only deals the same samples otherwise does not. The run's identity is ignored throughout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.training.distillation import logits_saver
from megatron.training.distillation.arguments import TrainingPosition
from megatron.training.distillation.cached_logits_loss import CachedLogitsKDLoss
from megatron.training.distillation.errors import TeacherContentError
from megatron.training.distillation.logits_saver import LogitsSaverHooks
from megatron.training.distillation.targets import IterationFailure, IterationTargets
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.training.distillation.cache_files import CACHE_FORMAT, in_format
from tests.unit_tests.training.distillation.run_stubs import (
    SETTINGS,
    GivenLogitsModel,
    PlainPatch,
    StubRun,
    group_layout,
    placed,
)

pytestmark = pytest.mark.usefixtures("cache_format")

SEQ, SAMPLES, PADDED, VOCAB = 160, 16, 16, 95
Samples = list[torch.Tensor]
"""The labels ``(S,)`` of each global sample."""


# ---- data -------------------------------------------------------------------------------------


def write_corpus(prefix: Path, seed: int, offset: int = 0) -> str:
    """Write documents of random tokens; *offset* renames the tokens, as another tokenizer does."""
    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in generator.integers(150, 400, 60):
        tokens = (generator.integers(VOCAB - 1, size=length) + offset) % (VOCAB - 1)
        builder.add_document(torch.from_numpy(tokens), [int(length)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("corpora")
    for name in ("other", "retokenized"):
        (place / name).mkdir()
    return {
        "first": write_corpus(place / "first", 0),
        "second": write_corpus(place / "second", 1),
        "other": write_corpus(place / "other" / "first", 2),
        "retokenized": write_corpus(place / "retokenized" / "first", 0, offset=1),
    }


@pytest.fixture(scope="module")
def samples_of(corpora: dict[str, str]) -> Callable[..., Samples]:
    """Build Megatron's training set and return its samples' labels; changes by keyword."""

    def build(
        *,
        blend: tuple[tuple[str, float], ...] = (("first", 0.7), ("second", 0.3)),
        seed: int = 1234,
        split: str = "80,20,0",
        length: int = SEQ,
        train_samples: int = SAMPLES,
    ) -> Samples:
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=length,
            blend=([corpora[name] for name, _ in blend], [weight for _, weight in blend]),
            split=split,
            path_to_cache=None,
            tokenizer=NullTokenizer(VOCAB),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        builder = BlendedMegatronDatasetBuilder(
            GPTDataset, [train_samples, 0, 0], lambda: True, config
        )
        train = builder.build()[0]
        return [train[index]["labels"] for index in range(min(train_samples, SAMPLES))]

    return build


@pytest.fixture(scope="module")
def seen(samples_of: Callable[..., Samples]) -> Samples:
    """What the teacher sees."""
    return samples_of()


# ---- dumping and training ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A batch schedule and the sequence length."""

    dp: int = 1
    mbs: int = 1
    gbs: int = 4
    length: int = SEQ

    def microbatches(self, rank: int, start: int) -> Iterator[list[int]]:
        """The samples of each microbatch of a rank, as Megatron's sequential sampler deals them."""
        for first in range(start + rank * self.mbs, start + self.gbs, self.mbs * self.dp):
            yield list(range(first, first + self.mbs))

    def settle(self, run: StubRun, start: int = 0) -> None:
        run.settings = replace(
            SETTINGS,
            micro_batch_size=self.mbs,
            global_batch_size=self.gbs,
            seq_length=self.length,
            vocab_size=PADDED,
            save_format=str(CACHE_FORMAT.get()),
        )
        run.position = TrainingPosition(
            iteration=start // self.gbs,
            start_sample=start,
            num_microbatches=self.gbs // (self.mbs * self.dp),
        )


def local(labels: torch.Tensor, run: StubRun) -> torch.Tensor:
    """Slice ``(B, S)`` over CP as Megatron does."""
    rank, size = run.layout.cp_rank, run.layout.cp_size
    if size == 1:
        return labels
    pieces = labels.chunk(2 * size, dim=1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim=1)


def dump_rank(run: StubRun, cache: Path, samples: Samples, batches: Batches) -> None:
    """Record all samples on the rank that *run* is."""
    batches.settle(run)
    saver = LogitsSaverHooks(str(cache), 2)
    model = GivenLogitsModel(frozen=True)
    saver.attach_hooks(model)
    for start in range(0, len(samples), batches.gbs):
        batches.settle(run, start)
        for numbers in batches.microbatches(run.layout.dp_rank, start):
            labels = local(torch.stack([samples[number] for number in numbers]), run)
            width = PADDED // run.layout.tp_size
            model(torch.randn(labels.size(1), len(numbers), width), labels)
    saver._write_batched_tar(*saver.take_pending_data())


def dump(run: StubRun, cache: Path, samples: Samples, batches: Batches) -> None:
    """Record all samples on every DP rank, one after the other."""
    for rank in range(batches.dp):
        run.layout = placed(dp_rank=rank, dp_size=batches.dp)
        dump_rank(run, cache, samples, batches)


class DirectStream:
    """Reads in this process what ``TargetStream`` reads in a loader process."""

    def __init__(self, kd_loss: CachedLogitsKDLoss) -> None:
        stream = kd_loss._feed.stream
        self._options, self._layout = stream._options, stream._layout

    def use_listing(self, names: Any) -> None:
        pass

    def take_wait(self) -> float:
        return 0.0

    def iteration(self, start_sample: int) -> IterationTargets | IterationFailure:
        return next(self._options.reader(self._layout).iterations(start_sample))


def train_rank(
    run: StubRun, cache: Path, samples: Samples, batches: Batches, begin: int = 0
) -> None:
    """Train on all samples from *begin* on, on the rank that *run* is."""
    batches.settle(run, begin)
    kd_loss = CachedLogitsKDLoss(str(cache), ignore_hash=True, ignore_errors=True)
    kd_loss._feed.stream = DirectStream(kd_loss)  # type: ignore[assignment]
    for start in range(begin, len(samples), batches.gbs):
        batches.settle(run, start)
        for numbers in batches.microbatches(run.layout.dp_rank, start):
            labels = local(torch.stack([samples[number] for number in numbers]), run)
            width = PADDED // run.layout.tp_size
            loss = kd_loss(torch.randn(labels.size(1), len(numbers), width), labels=labels)
            assert loss is not None


def train(run: StubRun, cache: Path, samples: Samples, batches: Batches, begin: int = 0) -> None:
    """Train on every DP rank, one after the other."""
    for rank in range(batches.dp):
        run.layout = placed(dp_rank=rank, dp_size=batches.dp)
        train_rank(run, cache, samples, batches, begin)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> StubRun:
    monkeypatch.setattr(logits_saver, "_active_saver", None)
    return StubRun().install(monkeypatch)


TEACHER = Batches(dp=2, mbs=2, gbs=8)


# ---- legal ------------------------------------------------------------------------------------


@pytest.mark.parametrize("teacher", [Batches(), TEACHER, Batches(dp=4, mbs=1, gbs=16)])
@pytest.mark.parametrize(
    "student", [Batches(), Batches(dp=2, mbs=1), Batches(dp=1, mbs=4, gbs=16), Batches(dp=4, gbs=8)]
)
def test_same_samples_dealt_otherwise_are_accepted(
    run: StubRun,
    tmp_path: Path,
    seen: Samples,
    caplog: pytest.LogCaptureFixture,
    teacher: Batches,
    student: Batches,
) -> None:
    dump(run, tmp_path, seen, teacher)
    train(run, tmp_path, seen, student)
    train(run, tmp_path, seen, student, begin=student.gbs if student.gbs < SAMPLES else 0)
    assert caplog.messages == []


def test_first_tokens_of_longer_samples_are_accepted(
    run: StubRun, tmp_path: Path, seen: Samples, caplog: pytest.LogCaptureFixture
) -> None:
    """Where samples begin alike; the last label may be padding, as SFT makes it."""
    dump(run, tmp_path, seen, TEACHER)
    cut = [torch.cat([labels[:127], torch.zeros(1, dtype=torch.long)]) for labels in seen]
    train(run, tmp_path, cut, Batches(length=128))
    assert all("labels of the first 64 tokens are compared" in text for text in caplog.messages)
    cut[5][63] += 1
    with pytest.raises(TeacherContentError, match=r"sample 5: .* chunk 0.*1 of its 1 compared"):
        train(run, tmp_path, cut, Batches(length=128))


def _on_rank(
    rank: int, world_size: int, axis: str, cache: str, samples: Samples, dumps: bool
) -> str:
    run = StubRun(layout=group_layout(**{f"{axis}_rank": rank, f"{axis}_size": world_size}))
    run.install(PlainPatch)
    batches = Batches(mbs=2)
    if dumps:
        dump_rank(run, Path(cache), samples, batches)
        return ""
    try:
        train_rank(run, Path(cache), samples, batches)
    except TeacherContentError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_replicas_of_other_shapes_are_accepted(tmp_path: Path, seen: Samples, axis: str) -> None:
    """Two ranks dump and one trains, and the other way round; all find a shifted sample."""
    by_two, by_one = tmp_path / "by-two", tmp_path / "by-one"
    run_ranks(2, _on_rank, axis, str(by_two), seen, True)
    # Ranks are forked, so nothing may be patched while they start.
    with pytest.MonkeyPatch.context() as patch:
        run = StubRun().install(patch)
        train(run, by_two, seen, Batches())
        dump(run, by_one, seen, TEACHER)
    assert run_ranks(2, _on_rank, axis, str(by_one), seen, False) == ["", ""]
    shifted = [*seen[:9], seen[9].roll(1), *seen[10:]]
    told, other = run_ranks(2, _on_rank, axis, str(by_one), shifted, False)
    assert told == other
    assert "rank 0, 1: sample 9: " in told


# ---- misaligned -------------------------------------------------------------------------------

OTHER_DATA: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1235},
    "order of the blend": {"blend": (("second", 0.7), ("first", 0.3))},
    "weights of the blend": {"blend": (("first", 0.3), ("second", 0.7))},
    "one data set of the blend": {"blend": (("first", 1.0),)},
    "another corpus of that name": {"blend": (("other", 0.7), ("second", 0.3))},
    "tokenizer": {"blend": (("retokenized", 0.7), ("second", 0.3))},
    "split": {"split": "50,50,0"},
    "number of samples": {"train_samples": 400},
}


@pytest.fixture(scope="module")
def dumps(seen: Samples, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A cache in each format."""
    caches = {}
    for save_format in (2, 3):
        caches[save_format] = tmp_path_factory.mktemp("dumped") / "cache"
        with pytest.MonkeyPatch.context() as patch, in_format(save_format):
            patch.setattr(logits_saver, "_active_saver", None)
            dump(StubRun().install(patch), caches[save_format], seen, TEACHER)
    return caches


@pytest.fixture
def dumped(dumps: dict[int, Path], cache_format: int) -> Path:
    return dumps[cache_format]


@pytest.mark.parametrize("change", OTHER_DATA)
def test_other_data_is_stopped(
    run: StubRun, dumped: Path, seen: Samples, samples_of: Callable[..., Samples], change: str
) -> None:
    samples = samples_of(**OTHER_DATA[change])
    differing = [n for n in range(SAMPLES) if not torch.equal(samples[n], seen[n])]
    # Every DP rank of the student by itself, at the first of its samples that differs.
    with pytest.raises(TeacherContentError, match=f"sample {differing[0]}: its labels differ"):
        train(run, dumped, samples, Batches())


def test_other_sequence_length_is_stopped(
    run: StubRun, dumped: Path, samples_of: Callable[..., Samples]
) -> None:
    """``GPTDataset`` cuts its documents into other samples."""
    with pytest.raises(TeacherContentError, match=r"starts at sample 0 .*\n?.*sample \d+: "):
        train(run, dumped, samples_of(length=80), Batches(length=80))


SHIFTED: dict[str, Callable[[Samples], Samples]] = {
    "labels by one token": lambda samples: [labels.roll(-1) for labels in samples],
    "data by one sample": lambda samples: [*samples[1:], samples[0]],
    "data by one iteration": lambda samples: [*samples[4:], *samples[:4]],
    "two samples of one microbatch": lambda samples: [samples[1], samples[0], *samples[2:]],
    "DP ranks": lambda samples: [samples[n ^ 2] for n in range(SAMPLES)],
}


@pytest.mark.parametrize("change", SHIFTED)
@pytest.mark.parametrize("batches", [Batches(mbs=2), Batches(dp=2, mbs=2, gbs=8)])
def test_shifted_data_is_stopped(
    run: StubRun, dumped: Path, seen: Samples, change: str, batches: Batches
) -> None:
    with pytest.raises(TeacherContentError, match="sample 0: its labels differ"):
        train(run, dumped, SHIFTED[change](seen), batches)


def test_last_token_of_the_last_sample_is_compared(
    run: StubRun, dumped: Path, seen: Samples
) -> None:
    samples = [labels.clone() for labels in seen]
    samples[-1][-1] += 1
    with pytest.raises(TeacherContentError, match=r"sample 15: .*chunk 2, tokens 128 to 159; 1 of"):
        train(run, dumped, samples, Batches(mbs=2))


def test_shards_of_two_runs_are_told_apart(
    run: StubRun, tmp_path: Path, seen: Samples, samples_of: Callable[..., Samples]
) -> None:
    """DP rank 1's shard comes from a run with another seed."""
    dump(run, tmp_path / "mixed", seen, TEACHER)
    dump(run, tmp_path / "other", samples_of(seed=1), TEACHER)
    (tmp_path / "other" / "dp1__0-16.tar").replace(tmp_path / "mixed" / "dp1__0-16.tar")
    with pytest.raises(TeacherContentError, match="sample 2: its labels differ"):
        train(run, tmp_path / "mixed", seen, Batches())
    with pytest.raises(TeacherContentError, match=r"sample 2: .*2 of the 2 samples"):
        train(run, tmp_path / "mixed", seen, TEACHER)
