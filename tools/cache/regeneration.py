# SPDX-License-Identifier: Apache-2.0
"""How iterations of a dump are dumped again: the flags for the trainer, pure."""

from collections.abc import Iterable, Iterator

from tools.cache.verification import Missing


def flags(missing: Missing) -> list[str]:
    """Return what is added to the dump's command line for these iterations."""
    return [
        *("--override-ckpt-iteration", str(missing.first)),
        *("--exit-interval", str(missing.end)),
        *("--save", f"regenerate-{missing.first}-{missing.end}"),
    ]


def recipe(missing: Iterable[Missing]) -> Iterator[str]:
    """Yield lines that tell the owner of a cache how to dump iterations again."""
    yield "To dump them again, run the dump's own command once for each range, with all its"
    yield "flags, as --train-iters, --global-batch-size and the data decide which sample is which."
    yield "--load stays the directory of the dump's checkpoints. These join its flags; --save"
    yield "replaces its own by a new directory, so that the dump's checkpoints stay as they are:"
    for one in missing:
        yield f"  {' '.join(flags(one))}"
