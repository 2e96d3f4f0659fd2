# SPDX-License-Identifier: Apache-2.0
"""What the entry scripts tell a model of the sequences packed into a microbatch."""

import json

import pytest

from tests.unit_tests.runtime.subprocesses import passes

CASES = [
    # pattern of the model, padded boundaries, the sequence of every token
    ("M*-", None, [[0, 0, 0, 1, 1]]),
    ("M*-", [0, 4, 8], [[0, 0, 0, 0, 1, 1, 1, 1]]),
    (None, [0, 4, 8], None),
]
# In a process of its own, as the module puts the trainer into this one.
PROGRAM = """
import json, sys
from types import SimpleNamespace
import torch
import pretrain_common

pretrain_common.update_seqlen_stats_from_cu_seqlens = lambda lengths: None
found = []
for pattern, padded, _ in json.loads(sys.argv[1]):
    pretrain_common.get_args = lambda: SimpleNamespace(hybrid_layer_pattern=pattern)
    params = pretrain_common._packed_seq_params({
        "cu_seqlens": torch.tensor([[0, 3, 5]]),
        "cu_seqlens_padded": None if padded is None else torch.tensor([padded]),
        "max_seqlen": torch.tensor([4]),
    })
    assert params.cu_seqlens_q.tolist() == [0, 3, 5]
    assert params.max_seqlen_q == 4
    found.append(None if params.seq_idx is None else params.seq_idx.tolist())
print(json.dumps(found))
"""


@pytest.mark.slow
def test_packed_sequences_are_numbered_for_mamba_layers() -> None:
    printed = passes(PROGRAM, json.dumps(CASES))
    assert json.loads(printed.splitlines()[-1]) == [numbers for _, _, numbers in CASES]
