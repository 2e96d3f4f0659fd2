# SPDX-License-Identifier: Apache-2.0
"""Lines are found however files are cut, and matched to samples by their tokens alone."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from megatron.training.distillation.utils import ShardName, row_runs
from tests.unit_tests.tools import server_answers
from tests.unit_tests.tools.server_answers import model
from tools.cache.imports.json_lines import lines, pieces, read_line
from tools.cache.imports.line_index import LineIndex, LineProblem, index_lines
from tools.cache.imports.matching import match_lines, sample_keys
from tools.cache.imports.shard_plan import ShardLayout, check_target, covered_samples
from tools.cache.imports.top_entries import Expected

VOCAB, LENGTH, K = 11, 3, 2
EXPECTED = Expected(positions=LENGTH, k=K, vocab_size=VOCAB)


# ---- lines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"\n", b"", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_every_cut_gives_the_same_lines(tmp_path, size, end):
    content = [b"abc", b"", b"d", b"ef" * 9, b"", b"g"]
    path = tmp_path / "x"
    path.write_bytes((end or b"\n").join(content) + end)
    found = [line for piece in pieces([str(path)], size) for line in lines(piece)]
    assert [line.content for line in found] == content
    for line in found:
        assert read_line(str(path), line.offset, len(line.content)) == line.content


def test_an_empty_file_has_no_lines(tmp_path):
    (tmp_path / "x").write_bytes(b"")
    assert pieces([str(tmp_path / "x")]) == []


def test_lines_longer_than_what_is_read_at_once(tmp_path):
    content = [b"x" * (5 << 20), b"y" * (9 << 20)]
    (tmp_path / "x").write_bytes(b"\n".join(content))
    found = [
        line.content for piece in pieces([str(tmp_path / "x")], 1 << 20) for line in lines(piece)
    ]
    assert found == content


# ---- index -------------------------------------------------------------------------------------


def answer(tokens: list[int], *, seed: int = 0) -> str:
    server = server_answers.sglang if tokens[0] % 2 else server_answers.vllm_output
    return json.dumps(server(tokens, model(tokens, VOCAB, seed=seed), K))


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(VOCAB) for _ in range(LENGTH + 1)] for _ in range(count)]


def write(path: Path, content: list[str]) -> str:
    path.write_text("\n".join(content) + "\n")
    return str(path)


def test_lines_are_indexed_with_their_places(tmp_path):
    samples = prompts(12)
    one = write(tmp_path / "a", [answer(tokens) for tokens in samples[:5]])
    two = write(tmp_path / "b", ["", *(answer(tokens) for tokens in samples[5:])])
    for size in (50, 700, 1 << 20):
        index = index_lines([one, two], EXPECTED, cut=pieces([one, two], size))
        assert index.lines["number"].tolist() == [*range(1, 6), *range(2, 9)]
        assert index.lines["file"].tolist() == [0] * 5 + [1] * 7
        for line, tokens in zip(index.lines, samples, strict=True):
            path = [one, two][line["file"]]
            text = read_line(path, int(line["offset"]), int(line["size"]))
            assert text.decode() == answer(tokens)
        assert index.place(6) == f"{two} line 3"


def test_wrong_lines_are_named_with_file_and_number(tmp_path):
    good = [answer(tokens) for tokens in prompts(40)]
    bad = [*good[:3], good[3][:-9], *good[4:20], '{"x": 1}', *good[21:], *["[]"] * 12]
    one, two = write(tmp_path / "a", good), write(tmp_path / "b", bad)
    with pytest.raises(LineProblem) as error:
        index_lines([one, two], EXPECTED, cut=pieces([one, two], 3000))
    message = str(error.value).splitlines()
    assert message[0] == "14 lines cannot be imported:"
    assert message[1].startswith(f"  {two} line 4: it is not JSON")
    assert message[2].startswith(f"  {two} line 21: it has x, expected")
    assert message[3].startswith(f"  {two} line 41: it is a list")
    assert message[-1] == "  and 4 more"
    assert len(message) == 12


# ---- matching ----------------------------------------------------------------------------------


def index_of(tmp_path: Path, content: list[str]) -> LineIndex:
    return index_lines([write(tmp_path / "a", content)], EXPECTED)


@pytest.mark.parametrize("seed", range(4))
def test_shuffled_lines_find_their_samples(tmp_path, seed):
    samples = prompts(50)
    samples += samples[7:9]  # the same tokens twice
    order = list(range(50))
    random.Random(seed).shuffle(order)
    index = index_of(tmp_path, [answer(samples[number]) for number in order])
    numbers = range(20, 72)
    keys = sample_keys(lambda number: np.array(samples[number - 20]), numbers)
    found = match_lines(index, keys, numbers)
    expected = [order.index(place if place < 50 else place - 43) for place in range(52)]
    assert found.tolist() == expected


def test_keys_that_end_in_zeros_are_told_apart(tmp_path):
    """numpy compares S16 without the zeros at the end; all keys have 16 bytes."""
    samples = prompts(3000)
    keys = sample_keys(lambda number: np.array(samples[number]), range(3000))
    assert len(np.unique(keys)) == len({tuple(tokens) for tokens in samples})


def test_what_has_no_counterpart_is_named(tmp_path):
    samples = prompts(30)
    content = [answer(tokens) for tokens in samples[:10] + samples[13:]]
    index = index_of(tmp_path, [*content, answer([3, 3, 3, 3]), answer(samples[0], seed=1)])
    keys = sample_keys(lambda number: np.array(samples[number]), range(29))
    with pytest.raises(LineProblem) as error:
        match_lines(index, keys, range(29))
    message = str(error.value)
    assert "3 of 29 samples have no line with their tokens: 10 to 12." in message
    assert "2 of 29 lines have the tokens of none of samples 0 to 28" in message
    assert f"{tmp_path / 'a'} line 27\n" in message
    assert f"{tmp_path / 'a'} line 28\n" in message
    assert "1 pairs of lines have the same prompt and other log-probabilities" in message
    assert f"{tmp_path / 'a'} line 1 and {tmp_path / 'a'} line 29" in message


def test_lines_that_say_the_same_may_be_there_twice(tmp_path):
    samples = prompts(5)
    content = [answer(tokens) for tokens in samples]
    index = index_of(tmp_path, [*content, *content[::-1]])
    keys = sample_keys(lambda number: np.array(samples[number]), range(5))
    assert match_lines(index, keys, range(5)).tolist() == [0, 1, 2, 3, 4]


def test_other_lines_may_be_passed_over_but_not_missing_ones(tmp_path):
    samples = prompts(6)
    index = index_of(tmp_path, [answer(tokens) for tokens in samples[1:]])
    keys = sample_keys(lambda number: np.array(samples[number]), range(6))
    assert match_lines(index, keys[2:4], range(2, 4), skips_others=True).tolist() == [1, 2]
    with pytest.raises(LineProblem, match="1 of 2 samples have no line"):
        match_lines(index, keys[:2], range(2), skips_others=True)


# ---- plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mbs", "dp", "gbs"), [(1, 1, 4), (2, 2, 8), (1, 4, 4), (3, 2, 12)])
def test_rows_are_dealt_as_a_student_looks_for_them(mbs, dp, gbs):
    layout = ShardLayout(micro_batch_size=mbs, dp_size=dp, global_batch_size=gbs, save_interval=3)
    start = 5 * gbs
    rows = {rank: layout.samples_of(rank, start) for rank in range(dp)}
    assert sorted(itertools.chain(*rows.values())) == list(range(start, start + gbs))
    for run in row_runs(start, start, start + gbs, mbs_save=mbs, dp_save=dp):
        found = rows[run.d_save][run.row_start : run.row_end]
        assert found == list(range(found[0], found[0] + len(found)))


def test_shards_end_where_those_of_a_dump_do():
    layout = ShardLayout(micro_batch_size=1, dp_size=2, global_batch_size=4, save_interval=3)
    assert list(map(str, layout.shards(range(8, 32)))) == [
        *("dp0__8-12.tar", "dp1__8-12.tar"),
        *("dp0__12-24.tar", "dp1__12-24.tar"),
        *("dp0__24-32.tar", "dp1__24-32.tar"),
    ]
    assert layout.members(ShardName(0, 8, 16)) == [(8, 12), (12, 16)]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(None, range(40)), ((4, None), range(4, 40)), ((8, 12), range(8, 12))],
)
def test_a_last_iteration_that_is_not_whole_is_left_out(wanted, found):
    assert covered_samples(wanted, 43, 4) == found


@pytest.mark.parametrize("wanted", [(2, 8), (0, 7), (8, 8), (40, 44), (-4, 4)])
def test_samples_that_are_no_iterations(wanted):
    with pytest.raises(
        ValueError, match="expected multiples of --global-batch-size 4 from 0 to 40"
    ):
        covered_samples(wanted, 43, 4)


def test_a_directory_with_some_of_the_same_samples():
    planned = [ShardName(rank, 0, 8) for rank in range(2)]
    check_target(planned, [ShardName(0, 0, 8), ShardName(1, 8, 16), ShardName(2, 0, 4)], "x")
    with pytest.raises(ValueError, match=r"x has dp1__4-12\.tar, which holds samples"):
        check_target(planned, [ShardName(1, 4, 12)], "x")
