# SPDX-License-Identifier: Apache-2.0
"""``report`` on dumps of the real trainer: its numbers are those of the model's own logits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.browser import MISSING, browser_page, find_browser
from tests.functional_tests.cases import DUMP_GLOBAL_BATCH, DUMPS, SAMPLES, Workshop
from tests.functional_tests.oracle import labels_key, whole_logits
from tests.functional_tests.recorders import load_records
from tools import logits_cache

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

STEP = {"fp16": 2**-11, "bf16": 2**-8, "fp32": 2**-24}
"""Half of the relative distance of neighbouring values."""


def exact_entries(record: Path, vocab_size: int, k: int, p: float | None) -> torch.Tensor:
    """Return the probabilities ``(T, K)`` that each token keeps, in float64, 0 for none."""
    seen: dict[bytes, torch.Tensor] = {}
    for labels, logits in whole_logits(load_records(record)):
        for column, sample in enumerate(labels):
            real = logits[:, column, :vocab_size].double()
            seen[labels_key(sample)] = real.softmax(dim=-1).sort(dim=-1, descending=True).values
    falling = torch.cat(list(seen.values()))[:, :k]
    if p is None:
        return falling
    return torch.where(falling.cumsum(dim=-1) - falling < p, falling, 0.0)


def numbers_of(page: Path) -> dict[str, Any]:
    match = re.search(r'id="numbers">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


# Top-K and top-P; one and two DP ranks, tensor and context parallel; fp16, fp32 and 8 bits.
@pytest.mark.parametrize("name", ["tp1", "dp2", "pp2", "cp2"])
def test_numbers_are_those_of_the_models_logits(
    workshop: Workshop, tmp_path: Path, name: str
) -> None:
    dump = workshop.dump(name)
    out = tmp_path / "report.html"
    assert logits_cache.main(["report", str(dump.cache), "--out", str(out), "--jobs", "1"]) == 0
    numbers, settings = numbers_of(out), dump.oracle.settings
    exact = exact_entries(dump.record, settings.vocab_size, settings.k, settings.p)
    assert numbers["samples"] == SAMPLES
    assert numbers["gaps"] == numbers["damaged"] == numbers["foreign"] == []
    assert numbers["tokens_seen"] == len(exact)
    assert numbers["payloads"] == SAMPLES // DUMP_GLOBAL_BATCH * _dp_size(name)
    # A stored log-probability of size v is off by v times the step of its type, or by half a code.
    step = 24 / 255 / 2 if settings.eight_bit else 12 * STEP[settings.dtype] + 1e-6
    assert numbers["kept_mass"] == pytest.approx(exact.sum(dim=1).mean().item(), rel=step)
    assert numbers["tail_mass"] == pytest.approx(1 - exact.sum(dim=1).mean().item(), abs=1e-5)
    entries = (exact > 0).sum(dim=1).double().mean().item()
    assert numbers["entries"] == pytest.approx(entries, abs=0.01)
    with_tail = torch.cat([exact, (1 - exact.sum(dim=1, keepdim=True)).clamp(min=0)], dim=1)
    entropy = torch.special.entr(with_tail).sum(dim=1).mean().item()
    assert numbers["entropy_with_tail"] == pytest.approx(entropy, rel=step, abs=1e-5)
    assert numbers["top1"] == pytest.approx(exact[:, 0].mean().item(), rel=step)
    for at in numbers["by_k"]:
        kept = exact[:, : at["k"]].sum(dim=1)
        assert at["kept_mass"] == pytest.approx(kept.mean().item(), rel=step)
        middle = kept.sort().values[(len(kept) - 1) // 2].item()
        assert at["kept_mass_p50"] == pytest.approx(middle, rel=step, abs=4e-3)


def _dp_size(name: str) -> int:
    return 2 if name == "dp2" else 1


@pytest.mark.skipif(find_browser() is None, reason=MISSING)
def test_a_browser_shows_the_page_of_a_dump(workshop: Workshop, tmp_path: Path) -> None:
    cache, out = workshop.dump("dp2").cache, tmp_path / "report.html"
    assert logits_cache.main(["report", str(cache), "--out", str(out), "--jobs", "1"]) == 0
    with browser_page(tmp_path / "profile") as page:
        assert page.open(out.as_uri()) == []
        assert page.requests() == [out.as_uri()]
        facts = page.evaluate("document.querySelector('main').innerText")
    assert f"DP {DUMPS['dp2'].ranks}, micro batch 1, global batch {DUMP_GLOBAL_BATCH}" in facts
    assert "recorded with P = 0.9" in facts
