# SPDX-License-Identifier: Apache-2.0
"""Answers of both servers become the top K of the model's distributions, or a named error."""

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit_tests.tools import server_answers
from tests.unit_tests.tools.server_answers import model, ranked
from tools.cache.imports.server_formats import LineError, Prompt, read_prompt
from tools.cache.imports.top_entries import Expected, TopEntries, top_entries

VOCAB, LENGTH = 23, 6
TOKENS = [4, 19, 4, 0, 22, 11, 7]
DISTRIBUTIONS = model(TOKENS, VOCAB)
SERVERS = {
    "vllm output": server_answers.vllm_output,
    "vllm completion": server_answers.vllm_completion,
    "sglang": server_answers.sglang,
}

Answer = dict[str, Any]


def expected(k: int, positions: int = LENGTH, vocab_size: int = VOCAB) -> Expected:
    return Expected(positions=positions, k=k, vocab_size=vocab_size)


def entries(answer: Answer, k: int, **others: int) -> TopEntries:
    return top_entries(read_prompt(json.dumps(answer).encode()), expected(k, **others))


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("asked", [0, 3])
@pytest.mark.parametrize("k", [1, 2, 5, VOCAB - 3])
def test_entries_are_the_top_of_the_distribution(server, k, asked):
    """Also where the server was asked for more than is kept."""
    found = entries(SERVERS[server](TOKENS, DISTRIBUTIONS, k + asked), k)
    assert found.tokens.tolist() == TOKENS
    for position, distribution in enumerate(DISTRIBUTIONS):
        top = ranked(distribution)[:k]
        assert found.ids[position].tolist() == top
        assert found.logprobs[position].tolist() == [distribution[number] for number in top]
        left = 1 - math.fsum(math.exp(distribution[number]) for number in top)
        assert found.tail_logprob[position] == pytest.approx(math.log(left), rel=1e-9)
    assert found.clamped == 0


@pytest.mark.parametrize("server", SERVERS)
def test_the_whole_vocabulary_has_no_tail(server):
    found = entries(SERVERS[server](TOKENS, DISTRIBUTIONS, VOCAB), VOCAB)
    assert (found.tail_logprob == -np.inf).all()
    assert found.clamped == 0
    assert np.sort(found.ids, -1).tolist() == [list(range(VOCAB))] * LENGTH


def test_the_order_in_an_answer_does_not_matter():
    answer = server_answers.vllm_output(TOKENS, DISTRIBUTIONS, 5)
    shuffled = copy.deepcopy(answer)
    for number, position in enumerate(answer["prompt_logprobs"][1:], 1):
        items = list(position.items())
        random.Random(number).shuffle(items)
        shuffled["prompt_logprobs"][number] = dict(items)
    assert entries(shuffled, 5).digest() == entries(answer, 5).digest()


def one_position(logprobs: list[float], *, own: float | None = None) -> Prompt:
    """Return a prompt of two tokens, the second of which is the last of these entries."""
    return Prompt(
        tokens=np.array([0, len(logprobs) - 1]),
        counts=np.array([len(logprobs)]),
        ids=np.arange(len(logprobs)),
        logprobs=np.array(logprobs),
        own=None if own is None else np.array([own]),
    )


def test_equal_entries_by_id_where_no_rank_tells():
    found = top_entries(one_position([-3.0, -2.0, -1.5, -2.0, -2.0]), expected(3, 1))
    assert found.ids.tolist() == [[2, 1, 3]]


def test_equal_entries_by_rank():
    answer = server_answers.vllm_output([0, 1], [[-1.0, -1.5, -1.5, -1.5]], 2)
    position = answer["prompt_logprobs"][1]
    position["1"]["rank"] = 4
    position["3"] = {"logprob": -1.5, "rank": 2, "decoded_token": None}
    assert entries(answer, 2, positions=1, vocab_size=4).ids.tolist() == [[0, 3]]


def test_a_prompts_own_token_may_be_as_likely_as_the_last_entry():
    """Versions of vLLM that count what is more likely give it a rank that another entry has."""
    answer = server_answers.vllm_output([0, 1], [[-1.0, -1.5, -1.5, -1.5]], 2)
    position = answer["prompt_logprobs"][1]
    position["1"]["rank"] = 2
    position["3"] = {"logprob": -1.5, "rank": 2, "decoded_token": None}
    assert entries(answer, 2, positions=1, vocab_size=4).ids.tolist() == [[0, 1]]
    position["3"]["logprob"] = -1.4  # the own token is then not among the top 2
    assert entries(answer, 2, positions=1, vocab_size=4).ids.tolist() == [[0, 3]]
    position["3"]["rank"] = 1
    with pytest.raises(LineError, match=r"ranks \[1, 1\] by falling"):
        entries(answer, 2, positions=1, vocab_size=4)


def test_a_small_tail_keeps_its_digits():
    """1 - p loses what expm1 keeps: here 2.5e-13, with an entry that is all but 1."""
    found = top_entries(one_position([-5e-13, math.log(2.5e-13)]), expected(2, 1))
    assert math.exp(found.tail_logprob[0]) == pytest.approx(2.5e-13, rel=1e-9)


def test_mass_beyond_one_by_rounding_leaves_no_tail():
    found = top_entries(one_position([math.log(0.6) + 1e-4, math.log(0.4)]), expected(2, 1))
    assert found.tail_logprob.tolist() == [-math.inf]
    assert found.clamped == 1
    above = top_entries(one_position([1e-6, -20.0]), expected(2, 1))
    assert above.logprobs.tolist() == [[0.0, -20.0]]


def vllm(change: Callable[[Answer], object], k: int = 4) -> Answer:
    answer = server_answers.vllm_output(TOKENS, DISTRIBUTIONS, k)
    change(answer)
    return answer


def completion(change: Callable[[Answer], object]) -> Answer:
    answer = server_answers.vllm_completion(TOKENS, DISTRIBUTIONS, 4)
    change(answer)
    return answer


def sglang(change: Callable[[Answer], object]) -> Answer:
    answer = server_answers.sglang(TOKENS, DISTRIBUTIONS, 4)
    change(answer)
    return answer


def first(answer: Answer, number: int = 3) -> Answer:
    """Return the most likely entry of a token of vLLM's."""
    position = answer["prompt_logprobs"][number]
    return min(position.values(), key=lambda entry: entry["rank"])


def rename(answer: Answer, number: int, new: str) -> None:
    """Give the most likely entry of a token another id, unless it is the token itself."""
    position = answer["prompt_logprobs"][number]
    own = str(TOKENS[number])
    old = min((n for n in position if n != own), key=lambda n: position[n]["rank"])
    position[new] = position.pop(old)


WRONG = {
    "nothing": (lambda: {}, "it has nothing, expected prompt_logprobs or choices, as vLLM"),
    "another service": (lambda: {"object": "x", "data": []}, "it has object, data, expected"),
    "a list": (lambda: [1], "it is a list, expected one JSON object per prompt"),
    "two choices": (lambda: completion(lambda a: a["choices"].append({})), "it has 2 choices"),
    "choices of text": (lambda: {"choices": "x"}, "it has no choices"),
    "not asked": (
        lambda: completion(lambda a: a["choices"][0].pop("prompt_logprobs")),
        'it has no prompt_logprobs: ask the server for "prompt_logprobs": K, "return_token_ids"',
    ),
    "no ids": (lambda: vllm(lambda a: a.pop("prompt_token_ids")), "it has no prompt_token_ids"),
    "two prompts": (
        lambda: completion(lambda a: a.update(prompt_token_ids=[1])),
        "it has prompt_token_ids twice, and not the same",
    ),
    "ids of text": (
        lambda: vllm(lambda a: a.update(prompt_token_ids=["a"] * 7)),
        "its prompt_token_ids are not a list of ids",
    ),
    "a first position": (
        lambda: vllm(lambda a: a["prompt_logprobs"].__setitem__(0, {"1": {}})),
        "its prompt_logprobs begin with",
    ),
    "without the first": (
        lambda: vllm(lambda a: a["prompt_logprobs"].pop(0)),
        "its prompt_logprobs are of 6 tokens, its prompt has 7",
    ),
    "a hole": (
        lambda: vllm(lambda a: a["prompt_logprobs"].__setitem__(2, None)),
        "prompt_logprobs[2] is null, expected ids with logprob and rank",
    ),
    "no rank": (lambda: vllm(lambda a: first(a).update(rank=None)), "prompt_logprobs[3] is {"),
    "text": (lambda: vllm(lambda a: first(a).update(logprob="-1")), "both numbers"),
    "null": (lambda: vllm(lambda a: first(a).update(logprob=None)), "both numbers"),
    "NaN": (lambda: vllm(lambda a: first(a).update(logprob=math.nan)), "not a number"),
    "infinity": (
        lambda: vllm(lambda a: [e.update(logprob=-math.inf) for e in [first(a)]]),
        "expected 1 to 4",
    ),
    "no probability": (
        lambda: vllm(lambda a: _set_last(a, -9999.0)),
        "token 3 has the log-probability -9999 among its top 4, which stands for none",
    ),
    "one entry less": (
        lambda: vllm(lambda a: None, k=3),
        "entries, expected 4 or more: ask the server for as many, or lower --logits-save-top-k",
    ),
    "not the top": (
        lambda: vllm(lambda a: first(a).update(rank=9)),
        "expected 1 to 4: they are not its top 4",
    ),
    "a large id": (
        lambda: vllm(lambda a: rename(a, 3, "23")),
        "token 3 has an entry of id 23, the vocabulary has 23: the server's tokenizer is another",
    ),
    "a negative id": (lambda: vllm(lambda a: rename(a, 3, "-1")), "an entry of id -1"),
    "an id of text": (lambda: vllm(lambda a: rename(a, 3, "the")), "prompt_logprobs[3] is"),
    "an id twice": (
        lambda: vllm(double),
        "token 3 has two entries of one id",
    ),
    "another prompt": (
        lambda: vllm(lambda a: a["prompt_token_ids"].__setitem__(2, 21)),
        "token 2 has the id 21, which is not among its entries",
    ),
    "shifted": (
        lambda: vllm(lambda a: a.update(prompt_token_ids=[0, *TOKENS[:-1]])),
        "which is not among its entries: they are not of this prompt, or of other positions",
    ),
    "logits": (
        lambda: vllm(lambda a: first(a).update(logprob=2.5)),
        "expected at most 1: they are not log-probabilities",
    ),
    "SGLang, not asked": (
        lambda: sglang(lambda a: a["meta_info"].pop("input_top_logprobs")),
        '"return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": K',
    ),
    "SGLang, no meta": (lambda: {"meta_info": None}, "its meta_info has no input_top_logprobs"),
    "SGLang, a part": (
        lambda: sglang(
            lambda a: [
                a["meta_info"][k].pop(0) for k in ("input_top_logprobs", "input_token_logprobs")
            ]
        ),
        "its prompt has 7 tokens, 6 of them in input_token_logprobs",
    ),
    "SGLang, a hole": (
        lambda: sglang(lambda a: a["meta_info"]["input_top_logprobs"].__setitem__(2, None)),
        "input_top_logprobs[2] is null, expected lists",
    ),
    "SGLang, own null": (
        lambda: sglang(lambda a: a["meta_info"]["input_token_logprobs"][2].__setitem__(0, None)),
        "its input_token_logprobs are not lists",
    ),
    "SGLang, shifted": (
        lambda: sglang(
            lambda a: a["meta_info"]["input_top_logprobs"].insert(
                1, a["meta_info"]["input_top_logprobs"].pop()
            )
        ),
        "which input_top_logprobs contradict",
    ),
    "SGLang, other ids": (
        lambda: sglang(lambda a: a.update(input_ids=[5, *TOKENS[1:]])),
        "its input_ids are not those of its input_token_logprobs",
    ),
}


def _set_last(answer: Answer, logprob: float) -> None:
    """Change all but the three most likely entries of token 3."""
    for entry in answer["prompt_logprobs"][3].values():
        if entry["rank"] > 3:
            entry["logprob"] = logprob


def double(answer: Answer) -> None:
    """Give the most likely entry of token 3 the id of the next one."""
    second = next(n for n, e in answer["prompt_logprobs"][3].items() if e["rank"] == 2)
    rename(answer, 3, f"0{second}")


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name):
    make, message = WRONG[name]
    with pytest.raises(LineError) as error:
        entries(make(), 4)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            TOKENS[:-1],
            "its prompt has 6 tokens, expected 7: --seq-length and the label of the last",
        ),
        ([*TOKENS, 3], "its prompt has 8 tokens, expected 7: --seq-length and one more"),
        (TOKENS[:2], "its prompt has 2 tokens"),
    ],
)
@pytest.mark.parametrize("server", SERVERS)
def test_a_prompt_of_another_length(server, tokens, message):
    with pytest.raises(LineError, match=message):
        entries(SERVERS[server](tokens, model(tokens, VOCAB), 4), 4)


@pytest.mark.parametrize(
    "line", [b"", b"{", b'{"prompt_logprobs": [nul', b"\xff\xfe", b"[" * 10**5]
)
def test_what_is_not_json(line):
    with pytest.raises(LineError, match="it is not JSON"):
        read_prompt(line)


@pytest.mark.parametrize("server", SERVERS)
def test_every_cut_of_a_line_is_an_error(server):
    line = json.dumps(SERVERS[server](TOKENS, DISTRIBUTIONS, 2)).encode()
    for end in range(0, len(line), 7):
        with pytest.raises(LineError, match="it is not JSON"):
            read_prompt(line[:end])


def test_sglang_reports_the_last_id_as_0_and_a_line_may_say_the_true_one():
    answer = server_answers.sglang(TOKENS, DISTRIBUTIONS, 4)
    assert TOKENS[4] == VOCAB - 1
    answer["meta_info"]["input_token_logprobs"][4][1] = 0
    answer["input_ids"] = TOKENS
    assert entries(answer, 4).tokens.tolist() == TOKENS


def test_a_chat_completion_has_its_prompt_at_the_top():
    answer = server_answers.vllm_completion(TOKENS, DISTRIBUTIONS, 4)
    choice = answer["choices"][0]
    for key in ("prompt_logprobs", "prompt_token_ids"):
        answer[key] = choice.pop(key)
    assert entries(answer, 4).tokens.tolist() == TOKENS
