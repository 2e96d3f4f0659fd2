# SPDX-License-Identifier: Apache-2.0
"""Answers for a data set's samples become a cache: the verbs ``prompts`` and ``import``."""

import json
import math
import random
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training import global_vars
from megatron.training.distillation.fingerprint import mix64
from megatron.training.distillation.packed_rows import TeacherRows
from tests.unit_tests.tools import server_answers
from tests.unit_tests.tools.server_answers import model, ranked
from tools import logits_cache
from tools.cache.cache_files import list_cache
from tools.cache.one_sample import find_sample

VOCAB, LENGTH, K, SAMPLES = 31, 8, 4, 24
RUN = (
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --split 90,10,0 --seq-length {LENGTH} "
    f"--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --save-interval 2 "
    f"--logits-save-top-k {K}"
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def forget_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put Megatron's global arguments and tokenizer back afterwards."""
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    monkeypatch.setattr(global_vars, "_GLOBAL_TOKENIZER", None)


@pytest.fixture(autouse=True)
def own_globals(monkeypatch):
    forget_run(monkeypatch)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents whose first samples repeat: the data set goes through them twice."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(10):
        builder.add_document(torch.from_numpy(rng.integers(VOCAB - 1, size=16)), [16])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def samples(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of each sample, as Megatron's data set gives them."""
    from tools.cache.imports.training_samples import open_samples, parse_run

    flags = f"--data-path {corpus} {RUN}".split()
    with pytest.MonkeyPatch.context() as patch:
        forget_run(patch)
        tokens_of = open_samples(parse_run(flags, prog="test", dp_size=1))
    return [tokens_of(number).tolist() for number in range(SAMPLES)]


def run(verb: str, place: Path | str, corpus: Path, *options: str, flags: str = "") -> int:
    megatron = ["--data-path", str(corpus), *RUN.split(), *flags.split()]
    jobs = [] if verb == "prompts" else ["--jobs", "1"]
    return logits_cache.main([verb, str(place), *options, *jobs, "--", *megatron])


def answer_all(
    path: Path,
    samples: list[list[int]],
    server: Callable[..., Any] = server_answers.vllm_completion,
    k: int = K,
) -> str:
    """Write an answer for each of the samples, shuffled, once for those of equal tokens."""
    prompts = sorted(set(map(tuple, samples)))
    random.Random(1).shuffle(prompts)
    path.write_text(
        "".join(json.dumps(server(tokens, model(tokens, VOCAB), k)) + "\n" for tokens in prompts)
    )
    return str(path)


def entries_of(cache: Path | str, sample: int) -> TeacherRows:
    return find_sample(list_cache(str(cache)), sample).entries


def check_sample(
    cache: Path | str, sample: int, tokens: list[int], *, k: int = K, dtype: str = "float16"
) -> None:
    """Compare a sample of a cache with the model, entry by entry."""
    found = entries_of(cache, sample)
    distributions = model(tokens, VOCAB)
    assert found.values.shape == (LENGTH, 1, k)
    assert found.tail_logprob is not None
    assert found.label_fingerprints is not None
    for position, distribution in enumerate(distributions):
        top = ranked(distribution)[:k]
        exact = torch.tensor([distribution[number] for number in top]).to(getattr(torch, dtype))
        values, ids = found.values[position, 0], found.indices[position, 0]
        assert torch.equal(values, exact)
        # Format 3 does not keep the order of values that rounding makes equal.
        pairs = sorted(zip(values.tolist(), ids.tolist(), strict=True))
        assert pairs == sorted(zip(exact.tolist(), top, strict=True))
        tail = math.log(1 - math.fsum(math.exp(distribution[number]) for number in top))
        assert float(found.tail_logprob[position, 0]) == pytest.approx(tail, rel=1e-6)
    mixed = [
        int(mix64(torch.tensor(label))) * (int(mix64(torch.tensor(position))) | 1)
        for position, label in enumerate(tokens[1:])
    ]
    assert int(found.label_fingerprints[0, 0]) % (1 << 64) == sum(mixed) % (1 << 64)


def metas(cache: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(cache.glob("*.tar")):
        with tarfile.open(path) as tar:
            found.append(json.load(tar.extractfile("_meta.json")))
    return found


def contents(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir())}


# ---- prompts -----------------------------------------------------------------------------------


def test_prompts_are_the_samples_once_each(corpus, samples, tmp_path, capsys):
    assert run("prompts", tmp_path / "p", corpus) == 0
    lines = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
    distinct = {tuple(tokens) for tokens in samples}
    assert len(distinct) < SAMPLES, "no two samples of this corpus are alike"
    assert {tuple(line["prompt_token_ids"]) for line in lines} == distinct
    assert len(lines) == len(distinct)
    assert all(samples[line["sample"]] == line["prompt_token_ids"] for line in lines)
    assert f"{len(distinct)} prompts of 9 tokens for 24 samples" in capsys.readouterr().out
    assert run("prompts", tmp_path / "p", corpus) == 1
    assert "is there already" in capsys.readouterr().err


def test_samples_are_what_megatron_feeds(corpus, samples):
    """Each sample is a stretch of the text, the documents one after another."""
    text = np.fromfile(f"{corpus}.bin", np.uint16).reshape(-1, 16)
    parts = {tuple(row[first : first + 3]) for row in text for first in range(14)}
    for tokens in samples:
        # Documents are shuffled, so a sample of nine tokens has at most one seam, of two triples.
        triples = [tuple(tokens[first : first + 3]) for first in range(7)]
        assert sum(triple not in parts for triple in triples) <= 2


# ---- import ------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["vllm_output", "vllm_completion", "sglang"])
def test_every_sample_has_the_models_entries(corpus, samples, tmp_path, capsys, server):
    answers = answer_all(tmp_path / "a", samples, getattr(server_answers, server))
    assert run("import", tmp_path / "cache", corpus, "--jsonl", answers) == 0
    out = capsys.readouterr().out
    assert "3 shards with samples 0 to 23" in out
    assert "0 of them were there already" in out
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert names == ["dp0__0-8.tar", "dp0__16-24.tar", "dp0__8-16.tar"]
    for number, tokens in enumerate(samples):
        check_sample(tmp_path / "cache", number, tokens)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("--logits-save-dtype fp32", "float32"),
        ("--logits-save-dtype bf16 --logits-save-format 3", "bfloat16"),
        ("--micro-batch-size 1 --logits-save-dtype fp32", "float32"),
    ],
)
@pytest.mark.parametrize("dp", ["1", "2"])
def test_other_formats_and_layouts(corpus, samples, tmp_path, flags, dtype, dp):
    answers = answer_all(tmp_path / "a", samples, k=K + 3)
    options = ["--jsonl", answers, "--data-parallel-size", dp, "--teacher", "llama"]
    assert run("import", tmp_path / "cache", corpus, *options, flags=flags) == 0
    for number, tokens in enumerate(samples):
        check_sample(tmp_path / "cache", number, tokens, dtype=dtype)
    meta = metas(tmp_path / "cache")[-1]
    assert meta["saver"]["dp_size_save"] == int(dp)
    assert meta["manifest"]["teacher"] == {"checkpoint": "llama", "step": None}


def test_top_p_keeps_the_nucleus(corpus, samples, tmp_path):
    answers = answer_all(tmp_path / "a", samples)
    flags = "--logits-save-top-p 0.5 --logits-save-dtype fp32"
    assert run("import", tmp_path / "cache", corpus, "--jsonl", answers, flags=flags) == 0
    found = entries_of(tmp_path / "cache", 5)
    for position, distribution in enumerate(model(samples[5], VOCAB)):
        before, kept = 0.0, []
        for number in ranked(distribution)[:K]:
            if before < 0.5:
                kept.append(number)
            before += math.exp(distribution[number])
        values = found.values[position, 0]
        assert found.indices[position, 0][values != -1000].tolist() == kept
        left = 1 - math.fsum(math.exp(distribution[number]) for number in kept)
        assert math.exp(found.tail_logprob[position, 0]) == pytest.approx(left, rel=1e-5)


def test_eight_bit_codes(corpus, samples, tmp_path):
    answers = answer_all(tmp_path / "a", samples)
    cache = tmp_path / "cache"
    assert run("import", cache, corpus, "--jsonl", answers, flags="--logits-save-8bit") == 0
    assert metas(cache)[0]["saver"]["save_dtype"] == "uint8"
    for position, distribution in enumerate(model(samples[3], VOCAB)):
        values = entries_of(cache, 3).values[position, 0].tolist()
        for number, value in zip(ranked(distribution)[:K], values, strict=True):
            # A code c stands for -24 (c / 255)^2; neighbours are this far apart.
            step = 24 * (2 * math.sqrt(-distribution[number] / 24) * 255 + 1) / 255**2
            assert abs(value - distribution[number]) <= 0.51 * step + 1e-3


def test_some_files_and_some_samples(corpus, samples, tmp_path, capsys):
    """The rest is imported later, by shards that end where those of the whole do."""
    prompts = [samples[:12], samples]
    answers = [answer_all(tmp_path / f"a{n}", some) for n, some in enumerate(prompts)]
    cache = tmp_path / "cache"
    assert run("import", cache, corpus, "--jsonl", answers[0], "--samples", "0:12") == 0
    options = ["--jsonl", *answers, "--samples", "12:24"]
    assert run("import", cache, corpus, *options) == 1
    assert "have the tokens of none of samples 12 to 23" in capsys.readouterr().err
    assert run("import", cache, corpus, *options, "--skip-other-lines") == 0
    assert len(contents(cache)) == 4  # samples 8 to 15 in two
    for number, tokens in enumerate(samples):
        check_sample(cache, number, tokens)


def test_a_stopped_import_goes_on(corpus, samples, tmp_path, capsys):
    answers = answer_all(tmp_path / "a", samples)
    cache = tmp_path / "cache"
    assert run("import", cache, corpus, "--jsonl", answers) == 0
    whole = contents(cache)
    (cache / "dp0__8-16.tar").unlink()
    (cache / "dp0__8-16.tar.tmp").write_bytes(b"half")
    kept = cache / "dp0__0-8.tar"
    before = kept.stat().st_mtime_ns
    capsys.readouterr()
    assert run("import", cache, corpus, "--jsonl", answers) == 0
    assert "2 of them were there already" in capsys.readouterr().out
    assert contents(cache) == whole
    assert kept.stat().st_mtime_ns == before


@pytest.mark.slow
def test_processes_side_by_side_write_the_same(corpus, samples, tmp_path):
    answers = answer_all(tmp_path / "a", samples)
    assert run("import", tmp_path / "one", corpus, "--jsonl", answers) == 0
    flags = ["--data-path", str(corpus), *RUN.split()]
    place = [str(tmp_path / "two"), "--jsonl", answers, "--spool-dir", str(tmp_path)]
    assert logits_cache.main(["import", *place, "--jobs", "2", "--", *flags]) == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_mass_beyond_one_is_said(corpus, samples, tmp_path, capsys):
    answers = Path(answer_all(tmp_path / "a", samples))
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    for entry in lines[0]["choices"][0]["prompt_logprobs"][3].values():
        entry["logprob"] = math.log(1.001 / K) if entry["rank"] <= K else -20.0
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run("import", tmp_path / "cache", corpus, "--jsonl", str(answers)) == 0
    assert "The kept mass of 1 tokens was 1 or more" in capsys.readouterr().out


# ---- what is refused ---------------------------------------------------------------------------


@pytest.fixture
def failure(corpus, samples, tmp_path, capsys) -> Callable[..., str]:
    """Import what must fail, leaving nothing behind; return the message."""

    def fail(*options: str, flags: str = "", files: list[str] | None = None) -> str:
        files = files or [answer_all(tmp_path / "a", samples)]
        assert run("import", tmp_path / "no", corpus, "--jsonl", *files, *options, flags=flags) == 1
        assert not any(path.suffix == ".tar" for path in tmp_path.glob("no/*"))
        return capsys.readouterr().err

    return fail


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seed 7", "of 24 samples have no line with their tokens"),
        ("--seq-length 9", "its prompt has 9 tokens, expected 10: --seq-length and the label of"),
        ("--logits-save-top-k 6", "entries, expected 6 or more"),
        ("--vocab-size 12", "the vocabulary has 12: the server's tokenizer is another one"),
        ("--logits-save-top-p 1.5", "--logits-save-top-p is 1.5"),
        ("--rampup-batch-size 2 2 8", "--rampup-batch-size is not supported"),
        ("--sft", "--sft is not supported"),
        ("--data-path /no/text", "/no/text.idx is not there: give the data of the training"),
        ("--split 0,100,0", "--split 0,100,0 leaves no documents to train on"),
        ("--tokenizer-type GPT2BPETokenizer", "--tokenizer-type is missing"),
        ("--mock-data", "--mock-data is not supported"),
        ("--train-iters 0", "--train-iters or --train-samples is missing"),
        ("--save-interval 0", "--save-interval is missing"),
        (
            "--global-batch-size 3",
            "--global-batch-size 3 is not a multiple of --micro-batch-size 2",
        ),
        ("--logits-save-8bit --logits-save-format 2", "--logits-save-format 2 does not have"),
    ],
)
def test_other_flags_than_the_trainings(failure, flags, message):
    assert message in failure(flags=flags)


def test_lines_that_lack_or_exceed(failure, samples, tmp_path):
    text = Path(answer_all(tmp_path / "b", samples)).read_text().splitlines(keepends=True)
    (tmp_path / "c").write_text("".join(text[1:]))
    assert "no line with their tokens" in failure(files=[str(tmp_path / "c")])
    (tmp_path / "c").write_text("".join(text)[:-20])
    message = failure(files=[str(tmp_path / "c")])
    assert f"{tmp_path / 'c'} line {len(text)}: it is not JSON" in message
    assert "it was cut off, or damaged" in message
    assert "No such file" in failure(files=[str(tmp_path / "none")])


def test_a_directory_of_another_run(corpus, samples, tmp_path, capsys):
    answers = answer_all(tmp_path / "a", samples)
    cache = tmp_path / "cache"
    assert run("import", cache, corpus, "--jsonl", answers) == 0
    before = contents(cache)
    for options, flags, message in (
        ([], "--logits-save-top-k 3", "--logits-save-top-k is 4 there, 3 here"),
        (["--teacher", "other"], "", "was written with other settings"),
        ([], "--save-interval 3", "which holds samples that are to be imported"),
        (["--data-parallel-size", "2"], "", "data parallel size is 1 there, 2 here"),
    ):
        assert run("import", cache, corpus, "--jsonl", answers, *options, flags=flags) == 1
        assert message in capsys.readouterr().err
        assert contents(cache) == before


def test_a_damaged_shard_of_an_earlier_import_is_named(corpus, samples, tmp_path, capsys):
    answers = answer_all(tmp_path / "a", samples)
    cache = tmp_path / "cache"
    assert run("import", cache, corpus, "--jsonl", answers) == 0
    path = cache / "dp0__0-8.tar"
    path.write_bytes(path.read_bytes()[:-5000])
    assert run("import", cache, corpus, "--jsonl", answers) == 1
    assert f"{path} is there already: Teacher shard {path} is damaged" in capsys.readouterr().err


def test_a_file_that_changes_meanwhile(corpus, samples, tmp_path, capsys, monkeypatch):
    answers = Path(answer_all(tmp_path / "a", samples))
    import tools.cache.verbs.import_logprobs as verb

    original = verb.match_lines

    def change(*arguments: Any, **options: Any) -> Any:
        answers.write_bytes(answers.read_bytes().replace(b'"logprob": -0', b'"logprob": -1'))
        return original(*arguments, **options)

    monkeypatch.setattr(verb, "match_lines", change)
    assert run("import", tmp_path / "cache", corpus, "--jsonl", str(answers)) == 1
    assert "is no longer what it was" in capsys.readouterr().err


# ---- elsewhere ---------------------------------------------------------------------------------


def test_files_and_cache_on_s3(corpus, samples, tmp_path, s3_server, monkeypatch):
    pytest.importorskip("multistorageclient")
    monkeypatch.setenv("MSC_CONFIG", str(s3_server.config))
    folder = s3_server.objects / "import"
    folder.mkdir()
    shutil.copy(answer_all(tmp_path / "a", samples), folder / "a.jsonl")
    url = s3_server.url("import")
    for _ in range(2):
        assert run("import", f"{url}/cache", corpus, "--jsonl", f"{url}/a.jsonl") == 0
    for number in (0, 11, 23):
        check_sample(f"{url}/cache", number, samples[number])
    assert run("prompts", f"{url}/p.jsonl", corpus) == 0
    assert (folder / "p.jsonl").read_text().count("\n") == len(set(map(tuple, samples)))


@pytest.mark.parametrize("verb", ["prompts", "import"])
def test_the_examples_work(verb, corpus, samples, tmp_path, capsys, monkeypatch):
    """Their words, with the tokenizer and sizes of this corpus after them."""
    with pytest.raises(SystemExit):
        logits_cache.main([verb, "--help"])
    text = capsys.readouterr().out.rpartition("example:\n")[2]
    example = shlex.split(text.replace("\\\n", " "))
    assert example[:4] == ["python", "-m", "tools.logits_cache", verb]
    (tmp_path / "corpus").mkdir()
    for suffix in ("bin", "idx"):
        shutil.copy(f"{corpus}.{suffix}", tmp_path / "corpus" / f"train.{suffix}")
    monkeypatch.chdir(tmp_path)
    own = shlex.split(f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --seq-length {LENGTH} ")
    if verb == "import":
        own += ["--logits-save-top-k", str(K)]
        example[4:4] = ["--jobs", "1"]
        assert logits_cache.main(["prompts", "p", *example[example.index("--") :], *own]) == 0
        lines = [json.loads(line) for line in Path("p").read_text().splitlines()]
        answer_all(Path("answers.jsonl"), [line["prompt_token_ids"] for line in lines])
    capsys.readouterr()
    assert logits_cache.main([*example[3:], *own]) == 0
    assert "samples" in capsys.readouterr().out
