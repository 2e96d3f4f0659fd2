# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a cache, one named error per kind.

All of them survive pickling: they cross from loader processes to the trainer.
"""


class CacheFormatError(ValueError):
    """A file is not what the cache format says it is."""


class CacheIdentityError(ValueError):
    """A shard was recorded by a run over other data than the current one."""


class MixedCacheError(CacheIdentityError):
    """Two shards of one directory come from different dumps."""


class LogitsWriteError(RuntimeError):
    """A window of a dump could not be written."""


class TeacherDataError(RuntimeError):
    """The teacher's rows of a batch cannot be served."""


class TeacherDataMissingError(TeacherDataError):
    """The cache holds later samples than the ones needed, but not these: a hole, or data ahead."""


class TeacherDataExhaustedError(TeacherDataError):
    """The cache ends before the batch does."""


class TeacherContentError(TeacherDataError):
    """The labels of a batch are not those that the teacher saw for the same samples."""


class TeacherLayoutError(CacheFormatError):
    """The cache does not suit the student's layout; no other sample will be better."""


class TeacherSequenceError(TeacherLayoutError):
    """The teacher's sequence length does not suit the student."""
