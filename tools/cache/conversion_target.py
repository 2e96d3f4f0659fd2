# SPDX-License-Identifier: Apache-2.0
"""What a cache is converted to, and whether what it holds allows that. Pure."""

import dataclasses
from dataclasses import dataclass

from megatron.training.distillation.frame_layout import FORMAT_VERSION_V3
from megatron.training.distillation.payload import FORMAT_VERSION
from megatron.training.distillation.save_format import EIGHT_BIT
from megatron.training.distillation.utils import SaverSettings

_LEGACY = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a cache is converted to; what is None stays as it is.

    Attributes:
        format_version: 2 or 3.
        eight_bit: Whether values become 8-bit codes, of format 3.
        k: Entries per token, at most.
        p: Of these the nucleus of this mass is kept, as ``--logits-save-top-p`` does.
        min_k: Entries that are kept whatever *p* says.
        dtype: ``fp16``, ``bf16`` or ``fp32``.
        dp_size: Data parallel size of the layout.
        mbs: Its micro batch size.
        gbs: Its global batch size.
        samples_per_shard: Samples between the boundaries of shards.
    """

    format_version: int | None = None
    eight_bit: bool = False
    k: int | None = None
    p: float | None = None
    min_k: int | None = None
    dtype: str | None = None
    dp_size: int | None = None
    mbs: int | None = None
    gbs: int | None = None
    samples_per_shard: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no cache can be."""
        if self.format_version not in (None, FORMAT_VERSION, FORMAT_VERSION_V3):
            raise ValueError(f"The format is {self.format_version}, expected 2 or 3.")
        if self.eight_bit and self.format_version == FORMAT_VERSION:
            raise ValueError("8-bit values are of format 3: leave them out, or convert to 3.")
        if self.eight_bit and self.dtype not in (None, "fp16"):
            raise ValueError(
                f"8-bit values are codes that are read as fp16, not {self.dtype}: leave --8bit or "
                "--dtype out."
            )
        if self.p is not None and not 0 < self.p <= 1:
            raise ValueError(f"--top-p is {self.p}: give a probability mass in (0, 1].")

    @property
    def regroups(self) -> bool:
        """Whether shards hold other samples, or members other rows, than those of the source."""
        return not self.dp_size is self.mbs is self.gbs is self.samples_per_shard is None

    def settings_for(self, source: SaverSettings) -> SaverSettings:
        """Return what the metadata say that a teacher would have been given to write the target.

        Args:
            source: What the metadata of the source say; its ``format_version`` may be 1.

        Raises:
            ValueError: The source does not hold what is asked for; says what it holds.
        """
        k = self._k(source)
        p, min_k = self._nucleus(source, k)
        version = self._version(source)
        dp_size, mbs, gbs = (
            self.dp_size or source.dp_size_save,
            self.mbs or source.mbs_save,
            self.gbs or source.gbs_save,
        )
        if gbs % (mbs * dp_size):
            raise ValueError(
                f"A global batch of {gbs} samples cannot be dealt to {dp_size} data parallel ranks "
                f"in micro batches of {mbs}: give --global-batch-size, --data-parallel-size and "
                f"--micro-batch-size of the student, whose first is a multiple of {mbs * dp_size}."
            )
        if self.samples_per_shard is not None and self.samples_per_shard % gbs:
            raise ValueError(
                f"--samples-per-shard is {self.samples_per_shard}: give a multiple of the global "
                f"batch size ({gbs}), as an iteration lies in one shard."
            )
        return dataclasses.replace(
            source,
            k=k,
            p=p,
            min_k=min_k,
            save_dtype=self._dtype(source, version),
            format_version=version,
            mbs_save=mbs,
            dp_size_save=dp_size,
            gbs_save=gbs,
        )

    def _k(self, source: SaverSettings) -> int | None:
        if self.k is None:
            return source.k
        if source.k is not None and self.k > source.k:
            raise ValueError(
                f"--top-k is {self.k}, and the cache holds at most {source.k} entries per token: "
                "give no more, or dump again."
            )
        return self.k

    def _nucleus(self, source: SaverSettings, k: int | None) -> tuple[float | None, int | None]:
        """Return P and minimum K."""
        p, min_k = source.p if self.p is None else self.p, self.min_k
        if p is None:
            if min_k is not None:
                raise ValueError(
                    "--top-p-min-k says how many entries stay whatever P is, and there is no P: "
                    "give --top-p too."
                )
            known = None not in (source.min_k, k)
            return None, min(source.min_k, k) if known else source.min_k  # type: ignore[type-var]
        if source.p is not None:
            self._check_narrower(source, p)
        if min_k is None:
            min_k = source.min_k if source.p is not None else 1
        if k is not None and min_k is not None and min_k > k:
            raise ValueError(
                f"At least {min_k} entries of each token stay, but at most {k}: give "
                f"--top-p-min-k, from 1 to {k}."
            )
        return p, min_k

    def _check_narrower(self, source: SaverSettings, p: float) -> None:
        """Refuse a nucleus with entries that the source has dropped."""
        assert source.p is not None
        if p > source.p:
            raise ValueError(
                f"--top-p is {p}, and the cache was recorded with {source.p}, so that entries "
                "beyond that mass are not in it: give no more, or dump again."
            )
        if None not in (self.min_k, source.min_k) and self.min_k > source.min_k:  # type: ignore[operator]
            raise ValueError(
                f"--top-p-min-k is {self.min_k}, and the cache was recorded with P {source.p} and "
                f"at least {source.min_k} entries: give no more, or dump again."
            )

    def _version(self, source: SaverSettings) -> int:
        if self.format_version is not None:
            return self.format_version
        version = FORMAT_VERSION if source.format_version == _LEGACY else source.format_version
        if self.eight_bit and version != FORMAT_VERSION_V3:
            raise ValueError(
                f"The cache is of format {source.format_version}, and 8-bit values are of format "
                "3: give --format 3 too."
            )
        return version

    def _dtype(self, source: SaverSettings, version: int) -> str | None:
        if self.eight_bit:
            return EIGHT_BIT
        if self.dtype is not None:
            return self.dtype
        if source.save_dtype == EIGHT_BIT and version == FORMAT_VERSION:
            return "fp16"  # what the codes stand for
        return source.save_dtype
