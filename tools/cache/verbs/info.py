# SPDX-License-Identifier: Apache-2.0
"""``info``: what a cache is."""

import argparse
import json
from collections.abc import Iterable, Sequence

from tools.cache.cache_files import list_cache
from tools.cache.command_line import Verbs, add_verb
from tools.cache.coverage import Span
from tools.cache.description import Description, describe, manifest_of, missing_ranges
from tools.cache.inventory import Inventory, take_inventory
from tools.cache.progress import Progress
from tools.cache.strips import LEGEND, draw_strips, drawn_samples, ranges
from tools.units import bytes_text, count_text

_STRIP_WIDTH = 64
_LISTED = 8


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "info",
        summary="what a cache is: run, layout, samples, bytes",
        description="Tell what the cache in DIR is: the run that recorded it, how, which samples "
        "each DP rank has, and what is\nmissing, damaged, foreign or set aside. Reads the metadata "
        "of every shard and one payload.",
        example="python -m tools.logits_cache info dump/logits",
    )
    parser.add_argument("directory", metavar="DIR", help="directory of the cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    files = list_cache(options.directory)
    with Progress("shards", len(files.shards)) as progress:
        inventory = take_inventory(files, advance=progress.advance)
    description = describe(inventory)
    if options.json:
        print(json.dumps(description.to_dict()))
        return 0
    print(description.directory)
    for label, text in _facts(description):
        print(f"  {label:<11}{text}")
    for line in (*_coverage(inventory, description), *_troubles(description)):
        print(line)
    return 0


def _facts(cache: Description) -> Iterable[tuple[str, str]]:
    formats = ", ".join(f"{number} of format {v}" for v, number in cache.formats.items())
    yield "shards", f"{formats or 'none that can be read'}; {bytes_text(cache.size)}"
    if cache.meta is not None:
        yield from _run_facts(cache)
    if cache.tokens is not None:
        per_token = f"{cache.bytes_per_token:.1f}" if cache.bytes_per_token else "?"
        yield "tokens", f"{count_text(cache.tokens)} with targets, {per_token} bytes per token"
    others = {
        "set aside (.stale)": cache.stale,
        "unfinished (.tmp)": cache.unfinished,
        "foreign": cache.foreign_files,
    }
    texts = [f"{len(names)} {kind}: {_some(names)}" for kind, names in others.items() if names]
    yield from zip(["others", *[""] * len(texts)], texts, strict=False)


def _run_facts(cache: Description) -> Iterable[tuple[str, str]]:
    assert cache.meta is not None
    manifest, saver = manifest_of(cache), cache.meta.saver
    identifiers = cache.meta.identifiers or {}
    yield "run", f"hash {cache.meta.hash}"
    for name, value in identifiers.items():
        yield "", f"{name} {json.dumps(value)}"
    if manifest.teacher:
        known = manifest.teacher
        yield "teacher", f"checkpoint {known.get('checkpoint')}, step {known.get('step')}"
    if manifest.tokenizer:
        kind, digest = (manifest.tokenizer.get(key) for key in ("type", "fingerprint"))
        yield "tokenizer", f"{kind}, fingerprint {digest}"
    if manifest.vocab_size:
        padded = manifest.padded_vocab_size
        yield "vocabulary", f"{manifest.vocab_size} tokens, padded to {padded}"
    top_p = "no top-P" if saver.p is None else f"top-P {saver.p} with at least {saver.min_k}"
    yield "saved", f"K {saver.k}, {top_p}, {saver.save_dtype}{_extras(cache)}"
    yield (
        "layout",
        f"DP {saver.dp_size_save}, micro batch {saver.mbs_save}, global batch {saver.gbs_save}",
    )
    if cache.sequence_length:
        yield "sequence", f"{cache.sequence_length} tokens"
    if manifest.megatron_core_version:
        yield (
            "versions",
            f"megatron-core {manifest.megatron_core_version}, package {manifest.package_version}",
        )


def _extras(cache: Description) -> str:
    if cache.shape is None:
        return ""
    tails = "tail mass" if cache.shape.has_tails else "no tail mass"
    return f", {tails}, {'' if cache.shape.has_fingerprints else 'no '}label fingerprints"


def _coverage(inventory: Inventory, cache: Description) -> Iterable[str]:
    damaged: dict[int, list[Span]] = {}
    for shard in inventory.damaged:
        name = shard.file.name
        damaged.setdefault(name.dp_rank, []).append(Span(name.start, name.end))
    whole = drawn_samples(cache.coverage.by_rank, damaged)
    if whole is None:
        return
    strips = draw_strips(whole, cache.coverage.by_rank, damaged, _STRIP_WIDTH)
    samples, train_samples = cache.coverage.samples, cache.train_samples
    share = f", {samples / train_samples:.1%} of train_samples" if train_samples else ""
    yield ""
    yield f"{samples} samples are complete{share}"
    yield f"samples {whole}, {LEGEND}:"
    width = max(len(label) for label, _ in strips)
    for label, strip in strips:
        yield f"  {label:<{width}} |{strip}|"


def _troubles(cache: Description) -> Iterable[str]:
    missing = missing_ranges(cache.coverage)
    texts = [f"samples {span} of dp{ranges(ranks)}" for span, ranks in missing.items()]
    yield from _listed("missing", texts)
    yield from _listed("damaged", [f"{n}: {why}" for n, why in cache.damaged.items()])
    yield from _listed("of another dump", [f"{n}: {why}" for n, why in cache.foreign.items()])
    yield from _listed(
        "overlapping (samples that both hold are read from the one that starts later)",
        [f"{first} and {second}" for first, second in cache.overlapping],
    )


def _listed(what: str, texts: Sequence[str]) -> Iterable[str]:
    if texts:
        yield f"{len(texts)} {what}:"
        yield from (f"  {text}" for text in texts[:_LISTED])
        if len(texts) > _LISTED:
            yield f"  and {len(texts) - _LISTED} more (--json has all)"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
