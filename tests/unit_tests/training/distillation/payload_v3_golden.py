# SPDX-License-Identifier: Apache-2.0
"""Payloads of format v3 that are kept as files: their truth, by integer arithmetic alone.

``python -m tests.unit_tests.training.distillation.payload_v3_golden`` writes the files again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.unit_tests.training.distillation.payload_v3_cases import SENTINEL, Member

DIRECTORY = Path(__file__).parent / "data"


def ragged() -> Member:
    """Return a member with everything: frames of 151 and 150 positions, 18 bits, ties, no entry."""
    positions, rows, k, vocab_size = 301, 2, 5, 200000
    p = torch.arange(positions).view(-1, 1, 1)
    r = torch.arange(rows).view(1, -1, 1)
    e = torch.arange(k)
    steps = (p * 37 + r * 11 + e * e * 5 + p * p // 7) % 9
    values = -(steps.cumsum(-1) / 64).half()  # exact
    frequent = (p * 7 + e * 13) % 11 + e * 16
    indices = torch.where((p + e) % 3 == 0, frequent, (p * 8191 + r * 131 + e * 40009) % vocab_size)
    indices[17, 1, 0] = vocab_size - 1
    masked = e >= k - (p * 5 + r * 3) % (k + 1)
    values[masked.expand(values.shape)] = SENTINEL
    indices[masked.expand(values.shape)] = -1
    tail = -((p * 3 + r) % 97 / 16).float().squeeze(-1)
    tail[::50] = -torch.inf
    chunks = torch.arange(1, 6).view(-1, 1)
    proofs = chunks * (r.view(1, -1) + 1) * (1 << 59) - 1234567 * chunks
    return Member(values=values, indices=indices, tail=tail, proofs=proofs, vocab_size=vocab_size)


def eight_bit() -> Member:
    """Return a member of codes and nothing else, whose values are those of some codes."""
    p, e = torch.arange(90).view(-1, 1, 1), torch.arange(4)
    codes = (p * p % 23 + e * 50) % 256
    values = (codes.double() ** 2 * -24 / 65025 + 0.0).half()  # code 0 is +0
    indices = (p * (e + 1)) % 40
    return Member(values=values, indices=indices, tail=None, proofs=None, vocab_size=40)


GOLDEN: Mapping[str, tuple[Member, Mapping[str, Any]]] = {
    "v3_ragged.payload": (ragged(), {}),
    "v3_eight_bit.payload": (eight_bit(), {"eight_bit": True, "sort_ties": False}),
}
"""By file name the truth and the encoder's options."""


def main() -> None:
    """Write all files again."""
    for name, (member, options) in GOLDEN.items():
        (DIRECTORY / name).write_bytes(member.encode(**options))


if __name__ == "__main__":
    main()
