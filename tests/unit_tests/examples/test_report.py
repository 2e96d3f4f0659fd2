# SPDX-License-Identifier: Apache-2.0
"""Tests of examples.offline_distillation.report."""

import json
from pathlib import Path

import pytest

from examples.offline_distillation.report import Comparison, draw, format_table

BETTER = Comparison(
    plain={20: 6.0, 40: 5.0, 60: 4.5},
    distilled={20: 5.5, 40: 4.75, 60: 4.25},
    teacher=3.75,
)


def test_numbers() -> None:
    assert BETTER.iterations == 60
    assert BETTER.gain == 0.25
    # From 4.75 at 40 to 4.25 at 60; 4.5 lies halfway.
    assert BETTER.steps_to_match == 50
    assert json.loads(json.dumps(BETTER.to_json()))["curves"]["student_lm_only"]["40"] == 5.0


def test_table_says_what_was_won() -> None:
    table = format_table(BETTER)
    assert "after 60 steps" in table
    assert "4.500" in table
    assert "4.250" in table
    assert "0.250 nats per token better (perplexity -22 %)" in table
    assert "after 50 steps" in table


def test_table_admits_a_loss() -> None:
    worse = Comparison(plain={10: 4.0}, distilled={10: 4.5}, teacher=3.0)
    assert worse.steps_to_match is None
    assert "0.500 nats per token worse" in format_table(worse)


def test_match_at_the_first_evaluation() -> None:
    early = Comparison(plain={10: 6.0, 20: 5.0}, distilled={10: 5.0, 20: 4.0}, teacher=3.0)
    assert early.steps_to_match == 10


def test_curves_that_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="distilled student has no validation loss"):
        Comparison(plain={10: 4.0}, distilled={}, teacher=3.0)
    with pytest.raises(ValueError, match="20 without and 10 with"):
        Comparison(plain={20: 4.0}, distilled={10: 4.0}, teacher=3.0)


@pytest.mark.slow
def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for comparison in (BETTER, Comparison(plain={1: 4.0}, distilled={1: 4.0}, teacher=4.0)):
        draw(comparison, tmp_path / "comparison.png")
        assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
