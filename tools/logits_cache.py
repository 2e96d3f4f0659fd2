# SPDX-License-Identifier: Apache-2.0
"""Look after a cache of teacher log-probabilities, local or ``msc://``, without trainer or GPU.

``python -m tools.logits_cache VERB --help`` tells what a verb does, with an example.

Exit status: 0 if a verb has done its work; 1 if it could not, or if verify, repair, convert or diff
found what is wrong, which is named; 2 if the command line is wrong.
"""

import argparse
import signal
import sys
from collections.abc import Sequence

from megatron.training.distillation import storage
from megatron.training.distillation.errors import TeacherDataError
from tools.cache.processes import ProcessEndedError
from tools.cache.verbs import (
    convert,
    diff,
    import_logprobs,
    info,
    plan,
    prompts,
    repair,
    report,
    show,
    verify,
)

_VERBS = (
    info,
    show,
    report,
    verify,
    repair,
    plan,
    convert,
    diff,
    prompts,
    import_logprobs,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ValueError, ProcessEndedError, TeacherDataError, *storage.ERRORS) as error:
        print(f"logits_cache: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("logits_cache: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.logits_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in _VERBS:
        verb.add_parser(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
