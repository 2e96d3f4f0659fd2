# SPDX-License-Identifier: Apache-2.0
"""What ``pretrain_gpt.py`` and ``pretrain_hybrid.py`` share: data, forward step, loss, start-up.

The trainer is Megatron's; this module gives it what it expects from an entry script.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, set_startup_timestamps
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.distillation import LossFuncCallable
from megatron.training.distillation.argument_checks import check_flags, finalize_args
from megatron.training.distillation.arguments import add_distillation_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
    is_hybrid_model,
    print_rank_0,
)
from runtime import cpu_mode
from runtime.model_checks import check_spec

SPIKY_LOSS_FACTOR = 10
"""A loss this many times above the largest seen is reported under ``--check-for-spiky-loss``."""

BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)

Batch = dict[str, Any]
LossFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.nn.Module],
    tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]],
]

stimer = StragglerDetector()


# ----------------------------------------------------------------------------------------------
#  Data
# ----------------------------------------------------------------------------------------------


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return this rank's part of the next microbatch.

    TP rank 0 draws it and broadcasts it; the sequence is then sliced over CP. Collective over TP on
    the stages that need data.
    """
    args = get_args()
    has_mtp = _stage_has_mtp(vp_stage)
    packed = _packs_sequences(args)
    if not (is_first_or_last_pipeline_stage(vp_stage) or has_mtp or packed):
        return dict.fromkeys(BATCH_KEYS)

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        assert data_iterator is not None
        drawn = next(data_iterator)
        for key in BATCH_KEYS:
            value = drawn.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=getattr(args, "dataloader_inter_document_masking", False),
    )


def train_valid_test_datasets_provider(
    train_val_test_num_samples: list[int], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Build the train, validation and test datasets."""
    args = get_args()
    dataset_type: type = GPTDataset
    if args.sft:
        dataset_type = SFTDataset
    elif args.mock_data:
        dataset_type = MockGPTDataset
    elif args.fim_data:
        dataset_type = GPTFIMDataset
    print_rank_0("> building train, validation, and test datasets ...")
    datasets = BlendedMegatronDatasetBuilder(
        dataset_type,
        train_val_test_num_samples,
        partial(_is_dataset_built_on_rank, vp_stage),
        dataset_config_from_args(args),
    ).build()
    print_rank_0("> finished creating datasets ...")
    return datasets


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def dataset_config_from_args(args: argparse.Namespace) -> GPTDatasetConfig:
    """Return the dataset configuration that Megatron's flags describe."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as stream:
            sequences_per_dataset = json.load(stream)
    options: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": get_tokenizer(),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequences_per_dataset": sequences_per_dataset,
        "context_parallel_size": args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "hybrid_context_parallel": args.hybrid_context_parallel,
        "inter_document_masking": getattr(args, "dataloader_inter_document_masking", False),
    }
    if not args.fim_data:
        return GPTDatasetConfig(**options)
    return GPTFIMDatasetConfig(
        **options,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_extra_tokens={
            "prefix": args.fim_prefix_token,
            "middle": args.fim_middle_token,
            "suffix": args.fim_suffix_token,
            "pad": args.fim_pad_token,
            "eod": args.fim_eod_token,
        },
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


def _packs_sequences(args: argparse.Namespace) -> bool:
    """Return whether batches carry ``cu_seqlens``."""
    return args.sft or getattr(args, "dataloader_inter_document_masking", False)


def _stage_has_mtp(vp_stage: int | None) -> bool:
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _is_dataset_built_on_rank(vp_stage: int | None) -> bool:
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return (
        _packs_sequences(get_args())
        or is_first_or_last_pipeline_stage(vp_stage)
        or _stage_has_mtp(vp_stage)
    )


# ----------------------------------------------------------------------------------------------
#  Forward step and loss
# ----------------------------------------------------------------------------------------------


def forward_step(
    loss_function: LossFunction,
    data_iterator: Iterator[Batch] | None,
    model: Any,
    return_schedule_plan: bool = False,
) -> tuple[Any, Callable[[torch.Tensor], Any]]:
    """Run the model on the next microbatch and return its output and how to get the loss of it.

    Args:
        loss_function: Called as ``(loss_mask, output_tensor, model)``.
        data_iterator: The microbatches; None on ranks that get theirs by broadcast.
        model: The model, wrapped or not.
        return_schedule_plan: Return the plan that overlaps expert communication instead.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()

    with stimer:
        inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
        keywords = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
        if batch["cu_seqlens"] is not None:
            keywords["packed_seq_params"] = _packed_seq_params(batch)
        if return_schedule_plan:
            output = model.build_schedule_plan(*inputs, **keywords)
        else:
            output = model(*inputs, **keywords)
    return output, partial(_checked_loss, loss_function, batch["loss_mask"], model)


def lm_loss_function(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: torch.nn.Module
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed language model loss, the number of unmasked tokens, and the report."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output_tensor.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    entry = torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": entry}


def _checked_loss(
    loss_function: LossFunction,
    loss_mask: torch.Tensor,
    model: torch.nn.Module,
    output_tensor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss and let the rerun state machine look at it."""
    loss, num_tokens, report = loss_function(loss_mask, output_tensor, model)
    args = get_args()
    rerun_state_machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejection, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            rerun_state_machine.validate_result(
                result=loss,
                rejection_func=rejection,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun_state_machine.validate_result(
            result=loss,
            rejection_func=partial(
                rerun_state_machine.is_unexpectedly_large,
                threshold=SPIKY_LOSS_FACTOR,
                context="loss",
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return loss, num_tokens, report


def _packed_seq_params(batch: Batch) -> PackedSeqParams:
    """Describe the sequences packed into a microbatch (thd layout)."""
    cu_seqlens = batch["cu_seqlens"][0]
    padded = batch["cu_seqlens_padded"]
    padded = None if padded is None else padded[0]
    max_seqlen = int(batch["max_seqlen"].max().item())
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)
    total_tokens = None
    if is_hybrid_model(get_args()):
        # Mamba layers carry their state on into the next sequence unless every token has the
        # number of its sequence, which the parameters derive from the total.
        total_tokens = int((cu_seqlens if padded is None else padded)[-1].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        total_tokens=total_tokens,
    )


# ----------------------------------------------------------------------------------------------
#  Start-up
# ----------------------------------------------------------------------------------------------


@record
def run_pretraining(
    model_config_from_args: Callable[[argparse.Namespace], Any], *, program_start: float
) -> None:
    """Parse and check the command line, then run Megatron's trainer.

    Args:
        model_config_from_args: Builds the model's configuration from validated arguments.
        program_start: Wall-clock time at which the script was entered.

    Raises:
        ValueError: The flags ask for something logits distillation cannot do, or for a ``--spec``
            that cannot be imported.
    """
    main_entry = time.time()
    cpu_mode.patch_trainer()
    # Looked at before Megatron's own validation, whose assertions do not say what to change.
    check_flags(parse_args(add_extra_args))
    set_startup_timestamps(program_start=program_start, main_entry=main_entry)
    args = parse_and_validate_args(
        extra_args_provider=add_extra_args, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    finalize_args(args)
    check_spec(args.spec)
    model_config = model_config_from_args(args)
    if args.freeze_all_layers:
        model_config.pre_wrap_hooks.append(freeze_all_layers)
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        partial(forward_step, _loss_function(args)),
    )


def add_extra_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the distillation flags, and CPU mode's defaults where it is active."""
    parser = add_distillation_args(parser)
    cpu_mode.set_flag_defaults(parser)
    return parser


def freeze_all_layers(model_chunks: list[Any]) -> list[Any]:
    """Take every parameter out of training, as ``--freeze-all-layers`` says.

    Without gradients there is also no weight decay, which would let a teacher drift while it is
    recorded.
    """
    for chunk in model_chunks:
        chunk.requires_grad_(False)
        for module in chunk.modules():
            if hasattr(module, "frozen_expert_bias"):
                # Routers update their expert bias outside of the optimizer.
                module.frozen_expert_bias = True
    return model_chunks


def _loss_function(args: argparse.Namespace) -> LossFunction:
    if args.logits_load_dir is None:
        return lm_loss_function
    return LossFuncCallable(
        args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        ignore_hash=args.logits_load_ignore_hash,
        max_skipped_share=args.logits_load_max_skipped_share,
        max_ahead_bytes=args.logits_load_max_ahead_bytes,
    )
