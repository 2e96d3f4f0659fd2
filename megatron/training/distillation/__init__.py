# SPDX-License-Identifier: Apache-2.0
"""Offline logits knowledge distillation.

A teacher run records the top-K token log-probabilities of every training token; student runs
stream them back and train with ``alpha * kd_loss + (1 - alpha) * lm_loss``.

Map of the package, from the ground up:

* ``errors``: one named error per way in which a cache can be wrong.
* ``utils``, ``payload``, ``packed_rows``: the shared contract, pure. Tar format and resharding
  arithmetic; index bit packing and the codec; rows as stored and as sent. ``shard_meta`` is a
  shard's metadata with its seal (``shard_content``) and the ``manifest`` of its run, which
  ``run_manifest`` and ``tokenizer_fingerprint`` fill in.
* ``payload_v3``: the codec of format v3, whose frames are decoded alone. ``frame_layout`` is its
  header, ``framed_entries`` what frames are made of and become, ``frame_codec`` their differences,
  ``id_ranks`` and ``eight_bit`` smaller ids and values, and ``entropy_coder`` the bits.
* ``storage``: local and ``msc://`` file verbs; ``object_store`` has those of the multi-storage
  client, and ``store_errors`` and ``storage_retry`` decide what is tried again.
* ``parallel``: ranks, sizes and groups as one value, and the collectives over them.
* ``arguments``: the command-line flags, and frozen views of the global arguments;
  ``argument_checks`` refuses what cannot work, with ``packed_sequence_checks`` for ``--sft``, and
  ``save_format`` chooses the format of a dump and its encoder.
* ``teacher_topk``, ``sparse_kl``: the tensor work of teacher and student; ``vocab_shard`` and
  ``teacher_entries`` are their inputs, ``row_passes`` reads the logits and writes the gradient,
  on CUDA by the Triton kernels of ``row_kernels``.
* ``iteration_buffer``: compresses what has been recorded and appends it to a window's ``spool``;
  ``host_copy`` brings it from the device, and ``member_content`` is what a shard is written from,
  in a spool or in memory.
* ``shard_writer``: what goes to storage; ``publication`` plans its file operations,
  ``shard_extraction`` keeps a part of an older shard, and ``continuation`` keeps two dumps out of
  one directory.
* ``shard_reader``: what comes back, as the values in ``targets``; ``shard_directory`` finds a
  sample's shard, ``open_shard`` verifies and decodes it, in format v3 row by row with
  ``framed_member``, ``shard_company`` finds those of another dump, ``row_assembly`` puts rows
  together, ``legacy`` translates format v1.
* ``write_watch``: ends the job when the checkpoint worker cannot write a window; ``backlog``
  bounds the windows that wait for it.
* ``fingerprint``: what both sides compute of the labels; ``content_proof`` compares it.
* ``model_hooks``: how both sides get hold of a model's logits; ``packed_layout``: how samples lie
  in them.
* ``logits_saver``: the teacher side, attached to a model by the trainer.
* ``cached_logits_loss``: the student side, called as the model's loss; ``student_capture`` is
  attached to the model, ``cached_kd_loss`` gives every microbatch its targets and its loss,
  ``target_stream`` reads in a loader process (``background_iterator``), ``target_feed`` gives
  every rank of a replica its part of it (``replica_message``), and ``agreed_targets`` lets the
  ranks decide together on what was read.

The public names are resolved on first use, so that the checkpoint worker can import
``write_watch`` and ``shard_writer`` alone.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.distillation.cached_logits_loss import (
        LossFuncCallable,
        StudentLogitsCapture,
    )
    from megatron.training.distillation.logits_saver import LogitsSaverHooks, get_logits_saver

__all__ = ["LogitsSaverHooks", "LossFuncCallable", "StudentLogitsCapture", "get_logits_saver"]

_HOME = {
    "LogitsSaverHooks": "logits_saver",
    "get_logits_saver": "logits_saver",
    "LossFuncCallable": "cached_logits_loss",
    "StudentLogitsCapture": "cached_logits_loss",
}


def __getattr__(name: str) -> object:
    """Import the module that defines a public name when the name is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
