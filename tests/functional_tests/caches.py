# SPDX-License-Identifier: Apache-2.0
"""Reads the payloads of a cache as bytes, for comparison with another cache."""

import tarfile
from pathlib import Path


def read_cache(cache: Path) -> dict[tuple[str, str], bytes]:
    """Return the content of every payload in live shards, by DP rank and member name."""
    payloads: dict[tuple[str, str], bytes] = {}
    for path in sorted(cache.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar.getmembers()[1:]:
                stream = tar.extractfile(member)
                assert stream is not None
                place = path.name.partition("__")[0], member.name
                assert place not in payloads
                payloads[place] = stream.read()
    return payloads
