# SPDX-License-Identifier: Apache-2.0
"""Records, inside a job, what a model is trained with; changes nothing of it.

Both recorders sit on ``compute_language_model_loss``, which the model calls with its labels and the
logits of its loss: that is the distribution the model trains with, whatever hooks saw elsewhere.
Each rank writes one file of records at exit; see :func:`load_records`.
"""

import atexit
import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.training import get_args
from megatron.training.distillation import cached_kd_loss
from megatron.training.distillation.cached_logits_loss import StudentLogitsCapture
from megatron.training.distillation.logits_saver import LogitsSaverHooks
from tests.functional_tests.harness import CROSSCHECK_VARIABLE, RECORD_DIR_VARIABLE

Record = dict[str, Any]
COLLECTIVES = ("all_reduce", "gather", "all_gather_object", "broadcast_object_list")
"""Those that the distillation package calls; the trainer calls some of them too."""


def install_recorders() -> None:
    """Wrap what attaches to the model, so that the recorders come outermost."""
    records: list[Record] = []
    targets: Record = {}
    for owner in (LogitsSaverHooks, StudentLogitsCapture):
        after(owner, "attach_hooks", lambda model: _record_model(model, records, targets))
    _record_targets(targets)
    calls = Calls()
    calls.count()
    atexit.register(_write, records, calls)


def load_records(directory: Path) -> list[Record]:
    """Return the records of all ranks of a job.

    Each is one microbatch of one rank: ``start`` (first sample of the batch), ``microbatch``,
    ``seq_length``, ``dp_rank``, ``cp_rank``, ``tp_rank``, ``labels`` ``(B, S / cp)``, ``logits``
    ``(S / cp, B, V / tp)``, ``loss_mask`` ``(B, S / cp)`` if the model was given one and, if the
    step had targets, ``values`` and ``indices`` ``(S / cp, B, K)``, ``tail`` ``(S / cp, B)`` or
    None. Samples packed into one sequence come in the same shapes.
    """
    files = sorted(directory.glob("rank*.pt"))
    assert files, f"no rank wrote records to {directory}"
    records = [record for file in files for record in torch.load(file, weights_only=True)]
    for record in records:
        _part_packed_samples(record, record["seq_length"])
    return records


def _part_packed_samples(record: Record, length: int) -> None:
    """Put samples that the trainer joined to one sequence ``(1, B * S)`` side by side again."""
    for name in ("labels", "loss_mask"):
        if name in record:
            record[name] = torch.cat(record[name].split(length, dim=1))
    for name in ("logits", "values", "indices", "tail"):
        if record.get(name) is not None:
            record[name] = torch.cat(record[name].split(length), dim=1)


@dataclass(kw_only=True)
class Calls:
    """What one rank of a job called, for comparison with the other ranks.

    Attributes:
        async_requests: Requests given to the asynchronous checkpoint queue.
        collectives: Calls by name and global ranks of the group, such as ``all_reduce 0,1``.
    """

    async_requests: int = 0
    collectives: dict[str, int] = field(default_factory=dict)

    def count(self) -> None:
        """Count from now on."""
        after(AsyncCallsQueue, "schedule_async_request", lambda request: self._add_request())
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _add_request(self) -> None:
        self.async_requests += 1

    def _counted(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def counted(*args: Any, **kwargs: Any) -> Any:
            groups = [
                item for item in (*args, *kwargs.values()) if isinstance(item, dist.ProcessGroup)
            ]
            ranks = ",".join(map(str, dist.get_process_group_ranks(*groups or [None])))
            key = f"{name} {ranks}"
            self.collectives[key] = self.collectives.get(key, 0) + 1
            return collective(*args, **kwargs)

        return counted


def load_calls(directory: Path) -> dict[int, Calls]:
    """Return what every rank of a job called."""
    files = directory.glob("rank*.json")
    return {int(file.stem[4:]): Calls(**json.loads(file.read_text())) for file in files}


def after(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Have *action* called after the method *name* of *owner*, with the same arguments."""
    original = getattr(owner, name)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        action(*args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def _record_model(model: torch.nn.Module, records: list[Record], targets: Record) -> None:
    """Record the labels, logits and *targets* of the last loss of every training forward pass.

    Multi-token prediction heads compute their losses first; the last one is the model's own.
    """
    if getattr(model, "output_layer", None) is None:
        return
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    inner_loss = model.compute_language_model_loss
    forward = model.forward

    def compute_language_model_loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # The loss may overwrite the logits.
        calls.append((labels.clone(), logits.detach().clone()))
        return inner_loss(labels, logits)

    def recording_forward(*args: Any, **kwargs: Any) -> Any:
        calls.clear()
        targets.clear()
        output = forward(*args, **kwargs)
        if model.training and calls:
            labels, logits = calls[-1]
            record = _new_record(records)
            record.update(labels=labels, logits=logits, **targets)
            if kwargs.get("loss_mask") is not None:
                record["loss_mask"] = kwargs["loss_mask"].clone()
            if os.environ.get(CROSSCHECK_VARIABLE):
                record["returned_logits"] = _returned_logits(model, forward, args, kwargs)
        return output

    model.compute_language_model_loss = compute_language_model_loss
    model.forward = recording_forward


def _new_record(records: list[Record]) -> Record:
    start = get_args().consumed_train_samples
    same_batch = records and records[-1]["start"] == start
    record = {
        "start": start,
        "seq_length": get_args().seq_length,
        "microbatch": records[-1]["microbatch"] + 1 if same_batch else 0,
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
    }
    records.append(record)
    return record


def _returned_logits(
    model: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the logits ``(S, B, V / tp)`` that the model gives when it is not asked for a loss."""
    model.eval()
    try:
        with torch.no_grad():
            logits = forward(*args, **{**kwargs, "labels": None})
    finally:
        model.train()
    return logits.transpose(0, 1).contiguous()


def _record_targets(targets: Record) -> None:
    """Have the targets that a loss is computed on in *targets* until the forward pass is over."""
    loss = cached_kd_loss.sparse_kl_and_cross_entropy

    def recording_loss(
        logits: torch.Tensor,
        values: torch.Tensor,
        indices: torch.Tensor,
        labels: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not targets, "two losses in one forward pass"
        tail = options.get("tail_logprob")
        targets.update(
            values=values.clone(),
            indices=indices.clone(),
            tail=None if tail is None else tail.clone(),
        )
        return loss(logits, values, indices, labels, **options)

    cached_kd_loss.sparse_kl_and_cross_entropy = recording_loss


def _write(records: list[Record], calls: Calls) -> None:
    rank = int(os.environ.get("RANK", "0"))
    directory = Path(os.environ[RECORD_DIR_VARIABLE])
    torch.save(records, directory / f"rank{rank}.pt")
    (directory / f"rank{rank}.json").write_text(json.dumps(asdict(calls)))
