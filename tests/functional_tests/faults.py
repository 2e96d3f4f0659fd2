# SPDX-License-Identifier: Apache-2.0
"""Failures inside the processes of a job, as its environment asks for them.

For jobs whose entry script is ``pretrain_gpt_faulty.py``. Failures of file systems that a test can
cause from outside (a full disk, a vanished directory) need only the shorter patience.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.file_faults import FileFaults

FAULTY_SCRIPT = Path(__file__).resolve().parent / "pretrain_gpt_faulty.py"
VARIABLE = "KD_TEST_FAULTS"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong in a job.

    Attributes:
        path: File operations count where their path contains this; empty for none.
        rank: The rank they count on.
        in_worker: Whether they count in the rank's checkpoint worker, and not in the rank itself
            and its loaders.
        record: See :class:`FileFaults`, as for the next three.
        first_failing: The operation from which on all fail; needs a record.
        only: Fail at that operation alone.
        each_once: Instead, every operation fails once.
        error: Name of the error number, or :data:`tests.file_faults.KILL`.
        patience: Seconds for which an operation is tried again; None as the product has it.
        unencodable: Iteration of this rank, counted from 0, that cannot be encoded.
    """

    path: str = ""
    rank: int = 0
    in_worker: bool = True
    record: str = os.devnull
    first_failing: int | None = None
    only: bool = False
    each_once: bool = False
    error: str = "EACCES"
    patience: float | None = None
    unencodable: int | None = None

    def options(self, **environment: str) -> dict[str, Any]:
        """Return the options of :meth:`JobRunner.run` for a job in which it happens.

        Args:
            **environment: Further environment variables of the job.
        """
        faults = {VARIABLE: json.dumps(asdict(self))}
        return {"script": FAULTY_SCRIPT, "env": environment | faults}


def install_faults(*, in_worker: bool) -> None:
    """Make this process fail as its environment asks.

    Args:
        in_worker: Whether it is a checkpoint worker.
    """
    if VARIABLE not in os.environ:
        return
    faults = Faults(**json.loads(os.environ[VARIABLE]))
    if faults.patience is not None:
        _shorten_retries(faults.patience)
    if int(os.environ["RANK"]) != faults.rank:
        return
    if faults.unencodable is not None and not in_worker:
        _fail_to_encode(faults.unencodable)
    if faults.path and in_worker == faults.in_worker:
        FileFaults(
            faults.path,
            faults.record,
            first_failing=faults.first_failing,
            only=faults.only,
            each_once=faults.each_once,
            error=faults.error,
        ).install()


def _shorten_retries(patience: float) -> None:
    from megatron.training.distillation import storage_retry

    storage_retry.PATIENCE_SECONDS = patience
    storage_retry.FIRST_DELAY_SECONDS = storage_retry.LONGEST_DELAY_SECONDS = patience / 20


def _fail_to_encode(iteration: int) -> None:
    from megatron.training.distillation.save_format import PayloadEncoder, SaveFormat

    original = SaveFormat.encoder
    calls: list[None] = []

    def faulty_encoder(self: SaveFormat) -> PayloadEncoder:
        encode = original(self)

        def faulty(*args: Any) -> bytes:
            calls.append(None)
            if len(calls) == iteration + 1:
                raise ValueError("an index does not fit")
            return encode(*args)

        return faulty

    SaveFormat.encoder = faulty_encoder
