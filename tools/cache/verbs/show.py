# SPDX-License-Identifier: Apache-2.0
"""``show``: the entries of one sample."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from tools.cache.cache_files import list_cache
from tools.cache.command_line import Verbs, add_verb, positive
from tools.cache.one_sample import SampleRow, TokenEntries, find_sample, token_entries

_POSITIONS = "0:4"

Decode = Callable[[int], str]
"""Returns the text of a token."""


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "show",
        summary="one sample's entries",
        description="Show where a sample lies in the cache DIR, of any format, and the entries "
        "that were kept of\nits tokens. The entries of a position tell of the token after it. Kept "
        "and tail mass are\nprobabilities; the entropy, in nats, is what the kept entries "
        "contribute to it. With --json,\nsample, shard, member, row, format_version, k, dtype and "
        "tokens: position, kept, kept_mass,\ntail_mass, tail_is_stored, entropy and entries: id, "
        "logprob, probability, and text with a\ntokenizer.",
        example="python -m tools.logits_cache show dump/logits --sample 16 --positions 0:2 --top 3",
    )
    parser.add_argument("directory", metavar="DIR", help="directory of the cache")
    parser.add_argument("--sample", type=_natural, required=True, metavar="N", help="its number")
    parser.add_argument(
        "--positions",
        type=_positions,
        default=_POSITIONS,
        metavar="A:B",
        help=f"the positions from A to before B, or one; : for all (default: {_POSITIONS})",
    )
    parser.add_argument(
        "--top", type=positive, metavar="N", help="only the N first entries (default: all)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="directory or name of the Hugging Face tokenizer, as --tokenizer-model of "
        "HuggingFaceTokenizer: show texts",
    )
    parser.add_argument("--json", action="store_true", help="one object of JSON instead of a table")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    decode = None if options.tokenizer is None else _decoder(options.tokenizer)
    found = find_sample(list_cache(options.directory), options.sample)
    length = found.entries.values.size(0)
    positions = range(*options.positions.indices(length))
    if not positions:
        raise ValueError(
            f"--positions selects none: sample {options.sample} has positions 0 to {length - 1}."
        )
    tokens = [token_entries(found, position) for position in positions]
    if options.json:
        print(json.dumps(_to_json(found, tokens, options.top, decode)))
    else:
        _print_table(found, tokens, options.top, decode)
    return 0


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def _positions(text: str) -> slice:
    """Return the slice that ``A:B``, ``A:``, ``:B``, ``:`` or ``A`` stands for."""
    first, colon, last = text.partition(":")
    start = _natural(first) if first else 0
    if not colon:
        return slice(start, start + 1)
    return slice(start, _natural(last) if last else None)


def _decoder(name: str) -> Decode:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"--tokenizer needs the package transformers, which cannot be imported ({error}): "
            "pip install transformers, or leave the flag out to see ids."
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--tokenizer {name} cannot be loaded: {error}. Give the directory or the name that "
            "the dump had as --tokenizer-model."
        ) from error
    return lambda number: str(tokenizer.decode([number]))


def _print_table(
    found: SampleRow, tokens: list[TokenEntries], top: int | None, decode: Decode | None
) -> None:
    saver, values = found.meta.saver, found.entries.values
    print(
        f"sample {found.sample}: row {found.row} of member {found.member} of {found.file.path}\n"
        f"format {saver.format_version}, {values.size(0)} positions, {values.size(2)} entries at "
        f"most, stored as {saver.save_dtype or str(values.dtype).removeprefix('torch.')}"
    )
    for token in tokens:
        complement = "" if token.tail_logprob is not None else " (none stored: 1 - kept)"
        print(
            f"\nposition {token.position}: {len(token.ids)} kept, mass {token.kept_mass:.6f}, "
            f"tail {token.tail_mass:.3g}{complement}, entropy {token.entropy:.4f}"
        )
        print(f"{'id':>10} {'log-prob':>10} {'probability':>12}{'  token' if decode else ''}")
        for number, logprob, probability in _entries(token, top):
            text = f"  {decode(number)!r}" if decode else ""
            print(f"{number:>10} {logprob:>10.4f} {probability:>12.6f}{text}")
        if top is not None and len(token.ids) > top:
            print(f"{'...':>10} {len(token.ids) - top} more")


def _to_json(
    found: SampleRow, tokens: list[TokenEntries], top: int | None, decode: Decode | None
) -> dict[str, Any]:
    saver, values = found.meta.saver, found.entries.values
    return {
        "sample": found.sample,
        "shard": found.file.path,
        "member": found.member,
        "row": found.row,
        "format_version": saver.format_version,
        "k": values.size(2),
        "dtype": saver.save_dtype or str(values.dtype).removeprefix("torch."),
        "tokens": [
            {
                "position": token.position,
                "kept": len(token.ids),
                "kept_mass": token.kept_mass,
                "tail_mass": token.tail_mass,
                "tail_is_stored": token.tail_logprob is not None,
                "entropy": token.entropy,
                "entries": [
                    {"id": number, "logprob": logprob, "probability": probability}
                    | ({"text": decode(number)} if decode else {})
                    for number, logprob, probability in _entries(token, top)
                ],
            }
            for token in tokens
        ],
    }


def _entries(token: TokenEntries, top: int | None) -> list[tuple[int, float, float]]:
    return list(zip(token.ids, token.logprobs, token.probabilities, strict=True))[:top]
