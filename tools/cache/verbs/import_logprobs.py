# SPDX-License-Identifier: Apache-2.0
"""``import``: a cache from what an inference server returned for prompts."""

import argparse
from typing import TYPE_CHECKING

from megatron.training.distillation.utils import ShardName
from tools.cache.command_line import Verbs, add_jobs, add_verb
from tools.cache.imports.cache_import import import_shards, open_target
from tools.cache.imports.flags import add_run_flags, training_run
from tools.cache.imports.json_lines import pieces
from tools.cache.imports.line_index import index_lines
from tools.cache.imports.matching import match_lines, sample_keys
from tools.cache.imports.shard_import import Recipe, Written
from tools.cache.imports.shard_plan import ShardLayout, covered_samples
from tools.cache.imports.top_entries import Expected
from tools.cache.progress import Progress

if TYPE_CHECKING:
    from tools.cache.imports.training_samples import TrainingRun


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "import",
        summary="a cache from vLLM's or SGLang's log-probabilities of prompts",
        description="Write a cache in DIR from the log-probabilities that vLLM or SGLang returned "
        "for a training's\nsamples, one JSON object a line, in any order; the verb prompts writes "
        "what to ask for. Lines\nare matched to samples by their tokens. A sample without a line, "
        "a line without a sample, and\nwhatever does not fit is an error, and nothing is guessed. "
        "An import that was stopped goes on\nwhen it is started again; nothing is overwritten.",
        example="python -m tools.logits_cache import imported --jsonl answers.jsonl -- \\\n"
        "      --train-data-path corpus/train --tokenizer-type HuggingFaceTokenizer \\\n"
        "      --tokenizer-model corpus/tokenizer --seq-length 128 \\\n"
        "      --micro-batch-size 8 --global-batch-size 16 --train-iters 2 \\\n"
        "      --save-interval 1 --logits-save-top-k 20",
    )
    parser.add_argument("target", metavar="DIR", help="directory of the cache; it is made")
    parser.add_argument(
        "--jsonl", nargs="+", required=True, metavar="FILE", help="the answers, local or msc://"
    )
    parser.add_argument(
        "--skip-other-lines",
        action="store_true",
        help="pass over lines that are of none of the samples, which else are an error",
    )
    parser.add_argument(
        "--teacher",
        metavar="NAME",
        help="what the metadata say of the model, for people (default: nothing)",
    )
    add_run_flags(parser)
    add_jobs(parser)
    parser.add_argument(
        "--spool-dir",
        help="where payloads wait until their shard is complete (default: memory, up to a shard "
        "per process)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    run = training_run(options)
    from tools.cache.imports.training_samples import open_samples

    if not run.args.save_interval:
        raise ValueError(
            "--save-interval is missing: give the iterations of a shard, with Megatron's flags."
        )
    samples = covered_samples(options.samples, run.train_samples, run.settings.global_batch_size)
    layout = ShardLayout(
        micro_batch_size=run.settings.micro_batch_size,
        dp_size=options.data_parallel_size,
        global_batch_size=run.settings.global_batch_size,
        save_interval=run.args.save_interval,
    )
    planned = list(layout.shards(samples))
    recipe = _recipe(options, run, planned)
    cut = pieces(options.jsonl)
    with Progress("pieces of the files", len(cut)) as progress:
        index = index_lines(
            options.jsonl, recipe.expected, jobs=options.jobs, advance=progress.advance, cut=cut
        )
    with Progress("samples", len(samples)) as progress:
        keys = sample_keys(open_samples(run), samples, progress.advance)
    line_of = match_lines(index, keys, samples, skips_others=options.skip_other_lines)
    done: list[Written] = []
    with Progress("shards", len(planned)) as progress:
        for written in import_shards(
            planned, layout, samples, index, line_of, recipe, jobs=options.jobs
        ):
            done.append(written)
            progress.advance(written.size)
        seconds = progress.seconds
    for note in run.notes:
        print(f"NOTE: {note}")
    _print_sum(samples, recipe, done, index.clamped, seconds)
    return 0


def _recipe(
    options: argparse.Namespace,
    run: "TrainingRun",
    planned: list[ShardName],
) -> Recipe:
    """Open the target, and return what all shards share."""
    args, settings = run.args, run.settings
    save_format = settings.format_of(args.logits_save_dtype)
    meta = settings.shard_meta(
        save_format,
        k=args.logits_save_top_k,
        p=args.logits_save_top_p,
        min_k=args.logits_save_top_p_min_k,
        dp_size=options.data_parallel_size,
        teacher=None if options.teacher is None else {"checkpoint": options.teacher, "step": None},
    )
    open_target(options.target, meta, planned)
    assert settings.vocab_size is not None  # a tokenizer has been built
    return Recipe(
        target=options.target,
        meta=meta.to_bytes(),
        save_format=save_format,
        expected=Expected(
            positions=run.seq_length, k=args.logits_save_top_k, vocab_size=settings.vocab_size
        ),
        p=args.logits_save_top_p,
        min_k=args.logits_save_top_p_min_k,
        paths=tuple(options.jsonl),
        spool_dir=options.spool_dir,
    )


def _print_sum(
    samples: range, recipe: Recipe, done: list[Written], clamped: int, seconds: float
) -> None:
    if clamped:
        print(
            f"The kept mass of {clamped} tokens was 1 or more, by the rounding of the server's "
            "numbers: they have no tail."
        )
    there, size = sum(one.was_there for one in done), sum(one.size for one in done)
    tokens = len(samples) * recipe.expected.positions
    print(
        f"{len(done)} shards with samples {samples.start} to {samples.stop - 1} in {seconds:.0f} "
        f"s, {there} of them were there already; {size} bytes, {size / tokens:.1f} per token"
    )
