# SPDX-License-Identifier: Apache-2.0
"""``show`` says of a dump's samples what the model that dumped them said."""

import json
import math

import pytest
import torch

from tests.functional_tests.cases import DUMPS, SAMPLES, Workshop
from tests.functional_tests.harness import SEQ_LENGTH
from tests.functional_tests.recorders import load_records
from tools import logits_cache

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["tp1", "dp2"])
def test_entries_are_the_models(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    dump, case = workshop.dump(name), DUMPS[name]
    records = load_records(dump.record)
    seen = set()
    for record in records[:: len(records) // 4]:
        # Microbatches of one sample are dealt to the ranks in turn.
        assert record["labels"].size(0) == 1
        ranks = case.ranks if name == "dp2" else 1
        sample = record["start"] + record["microbatch"] * ranks + record["dp_rank"]
        seen.add(sample)
        arguments = ["show", str(dump.cache), "--sample", str(sample), "--positions", ":", "--json"]
        assert logits_cache.main(arguments) == 0
        shown = json.loads(capsys.readouterr().out)
        exact = dump.oracle.logprobs(record["labels"][0])
        assert len(shown["tokens"]) == SEQ_LENGTH
        for token in shown["tokens"]:
            truth = exact[token["position"]]
            ids = [entry["id"] for entry in token["entries"]]
            logprobs = [entry["logprob"] for entry in token["entries"]]
            assert logprobs == pytest.approx(truth[ids].tolist(), rel=2**-10, abs=1e-5)
            outside = torch.ones_like(truth, dtype=torch.bool)
            outside[ids] = False
            assert token["tail_mass"] == pytest.approx(
                float(truth[outside].exp().sum()), rel=1e-5, abs=1e-7
            )
            entropy = -math.fsum(p * math.log(p) for p in truth[ids].exp().tolist())
            assert token["entropy"] == pytest.approx(entropy, rel=2e-3)
    assert len(seen) >= 4
    assert max(seen) < SAMPLES
