# SPDX-License-Identifier: Apache-2.0
"""Tests of examples.offline_distillation.corpus."""

from pathlib import Path

import pytest

from examples.offline_distillation import corpus


def test_texts_are_source_in_a_fixed_order() -> None:
    texts = corpus.collect_texts(max_bytes=50_000)
    assert texts == corpus.collect_texts(max_bytes=50_000)
    assert texts != corpus.collect_texts(max_bytes=50_000, seed=1)
    assert 50_000 <= sum(len(text.encode()) for text in texts) <= 50_000 + 60_000
    assert all(text.strip() for text in texts)


def test_tests_and_installed_packages_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "a.py",
        "test/b.py",
        "site-packages/c.py",
        "email/d.py",
        "email/empty.py",
        "e.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if "empty" in name else f"# {name}\n")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    assert sorted(corpus.collect_texts()) == ["# a.py\n", "# email/d.py\n"]


def test_large_files_stand_before_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (tmp_path / f"small{number}.py").write_text("small")
    (tmp_path / "large.py").write_text("large" * 20_000)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    for seed in range(5):
        assert corpus.collect_texts(seed=seed)[0].startswith("large")


def test_a_python_without_its_library_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no \.py files under .*"):
        corpus.collect_texts()


def test_held_out_are_pieces_of_the_last_files() -> None:
    texts = [f"{i}\n" + f"line of file {i}\n" * 500 for i in range(1000)]
    train, valid = corpus.split_texts(texts)
    assert train == texts[:960]
    assert [piece.split()[3] for piece in valid] == [str(i) for i in range(960, 1000)]
    for piece in valid:
        assert piece.startswith("line of file ")
        assert piece.endswith("\n")
        assert 2_000 <= len(piece) <= 2_020


def test_held_out_of_few_short_texts() -> None:
    assert corpus.split_texts(["a\n", "b\n", "one line"]) == (["a\n", "b\n"], ["one line"])


def test_the_datasets_hold_the_texts_without_loss(tmp_path: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    transformers = pytest.importorskip("transformers")

    built = corpus.build_corpus(tmp_path, vocab_size=400, batch_tokens=256, max_bytes=100_000)
    assert built.vocab_size == 400
    tokenizer = transformers.AutoTokenizer.from_pretrained(built.tokenizer)
    assert len(tokenizer) == 400

    train, valid = corpus.split_texts(corpus.collect_texts(max_bytes=100_000))
    for prefix, texts, documents, tokens in (
        (built.train, train, built.train_documents, built.train_tokens),
        (built.valid, valid, built.valid_documents, built.valid_tokens),
    ):
        dataset = indexed_dataset.IndexedDataset(prefix)
        assert len(dataset) == documents <= len(texts)
        assert sum(dataset.sequence_lengths) == tokens
        for index in range(documents - 1):
            ids = dataset[index]
            assert ids[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(ids[:-1]) == texts[index]
    assert built.train_documents == len(train)
    assert built.valid_tokens % 256 == 1


def test_the_held_out_set_is_cut_to_whole_batches() -> None:
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert corpus._cut_to_batches(documents, 4) == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert corpus._cut_to_batches(documents, 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert corpus._cut_to_batches(documents, 5) == [[1, 2, 3], [4, 5], [6]]
    assert corpus._cut_to_batches([*documents, [10]], 4)[-1] == [6, 7, 8, 9]
    with pytest.raises(ValueError, match="has 9 tokens, less than one batch of 16"):
        corpus._cut_to_batches(documents, 16)
