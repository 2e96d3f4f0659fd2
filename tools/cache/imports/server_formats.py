# SPDX-License-Identifier: Apache-2.0
"""Reads what vLLM and SGLang return of a prompt's log-probabilities, one JSON object, pure.

vLLM (https://docs.vllm.ai/en/v0.10.2/api/vllm/logprobs.html and
https://docs.vllm.ai/en/v0.9.2/api/vllm/v1/engine/logprobs.html): ``prompt_logprobs`` has an element
for each token of the prompt. The first is null; each other maps token ids, strings in JSON, to
``{"logprob", "rank", "decoded_token"}``: the K that were asked for, with the ranks 1 to K, and the
prompt's own token where it is not among them. It stands beside ``prompt_token_ids`` in a
``RequestOutput``; ``/v1/completions`` has both inside of ``choices`` (with ``"return_token_ids":
true``), chat completions at the top. The server writes -9999 for minus infinity
(``clamp_prompt_logprobs`` in its ``entrypoints/openai``).

SGLang (``python/sglang/srt/managers/tokenizer_manager.py``, ``detokenize_top_logprobs_tokens``, and
``scheduler_output_processor_mixin.py`` beside it, with ``"return_logprob": true,
"logprob_start_len": 0, "top_logprobs_num": K``): ``meta_info.input_token_logprobs`` has ``[logprob,
id, text or null]`` for each token of the prompt, ``meta_info.input_top_logprobs`` a list of K of
these; the first log-probability is null, and so is the first list. It reports the last id of the
vocabulary, and those above, as 0: lines may say the true ids beside as ``input_ids``.

Both give with token ``i`` what the model predicted of it from the tokens before.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_SHOWN_KEYS = 8
VLLM_REQUEST = '"prompt_logprobs": K, "return_token_ids": true'
SGLANG_REQUEST = '"return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": K'


class LineError(ValueError):
    """A line is not what a server returns; says what was found and expected, not where."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """The tokens of a prompt, and what a model predicted of all but the first.

    Attributes:
        tokens: ``(T,)`` int64 ids.
        counts: ``(T - 1,)`` entries of each token from the second on.
        ids: Of all entries, token by token, int64.
        logprobs: Of the same, float64, as the server has them.
        ranks: Of the same; None where the server does not tell them.
        own: ``(T - 1,)`` log-probability of each of these tokens itself; None where it is among its
            entries.
    """

    tokens: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray | None = None
    own: np.ndarray | None = None


def read_prompt(line: bytes) -> Prompt:
    """Return what a line says.

    Raises:
        LineError: It is not what vLLM or SGLang return of one prompt.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"it is not JSON ({error}): it was cut off, or damaged") from error
    if not isinstance(content, dict):
        raise LineError(f"it is a {type(content).__name__}, expected one JSON object per prompt")
    if "meta_info" in content:
        return _sglang(content)
    if "prompt_logprobs" in content or "choices" in content:
        return _vllm(content)
    raise LineError(
        f"it has {', '.join(list(content)[:_SHOWN_KEYS]) or 'nothing'}, expected prompt_logprobs "
        "or choices, as vLLM returns them, or meta_info, as SGLang does"
    )


def _vllm(content: dict[str, Any]) -> Prompt:
    holder = content
    if content.get("prompt_logprobs") is None:
        choices = content.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            found = len(choices) if isinstance(choices, list) else "no"
            raise LineError(f"it has {found} choices, expected the one of one prompt")
        holder = choices[0]
    positions = holder.get("prompt_logprobs")
    if not isinstance(positions, list):
        raise LineError(f"it has no prompt_logprobs: ask the server for {VLLM_REQUEST}")
    tokens = _tokens(
        [holder.get("prompt_token_ids"), content.get("prompt_token_ids")],
        "prompt_token_ids",
        VLLM_REQUEST,
    )
    _check_length(positions, tokens, "prompt_logprobs")
    ids, logprobs, ranks, counts = array("q"), array("d"), array("q"), array("q")
    for number, entries in enumerate(positions[1:], 1):
        try:
            ids.extend(map(int, entries))
            for entry in entries.values():
                logprobs.append(entry["logprob"])
                ranks.append(entry["rank"])
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise LineError(
                f"prompt_logprobs[{number}] is {_short(entries)}, expected ids with logprob and "
                f"rank, both numbers ({error})"
            ) from error
        counts.append(len(entries))
    return Prompt(
        tokens=tokens,
        counts=np.asarray(counts),
        ids=np.asarray(ids),
        logprobs=np.asarray(logprobs),
        ranks=np.asarray(ranks),
    )


def _sglang(content: dict[str, Any]) -> Prompt:
    meta = content["meta_info"]
    meta = meta if isinstance(meta, dict) else {}
    positions, reported = meta.get("input_top_logprobs"), meta.get("input_token_logprobs")
    if not isinstance(positions, list) or not isinstance(reported, list):
        raise LineError(
            "its meta_info has no input_top_logprobs and input_token_logprobs: ask the server for "
            f"{SGLANG_REQUEST}"
        )
    try:
        tokens = np.asarray(array("q", (entry[1] for entry in reported)))
        own = array("d", (entry[0] for entry in reported[1:]))
    except (LookupError, OverflowError, TypeError) as error:
        raise LineError(
            f"its input_token_logprobs are not lists of log-probability, id and text ({error})"
        ) from error
    length = meta.get("prompt_tokens", len(reported))
    if length != len(reported):
        raise LineError(
            f"its prompt has {length} tokens, {len(reported)} of them in input_token_logprobs: "
            f"ask the server for {SGLANG_REQUEST}"
        )
    _check_length(positions, tokens, "input_top_logprobs")
    ids, logprobs, counts = array("q"), array("d"), array("q")
    for number, entries in enumerate(positions[1:], 1):
        try:
            logprobs.extend(entry[0] for entry in entries)
            ids.extend(entry[1] for entry in entries)
        except (LookupError, OverflowError, TypeError) as error:
            raise LineError(
                f"input_top_logprobs[{number}] is {_short(entries)}, expected lists of "
                f"log-probability, id and text ({error})"
            ) from error
        counts.append(len(entries))
    return Prompt(
        tokens=_true_ids(content, tokens),
        counts=np.asarray(counts),
        ids=np.asarray(ids),
        logprobs=np.asarray(logprobs),
        own=np.asarray(own),
    )


def _true_ids(content: dict[str, Any], reported: np.ndarray) -> np.ndarray:
    """Return the prompt's ids, which a line may say where the server reports 0 for some."""
    given = [content.get("input_ids"), content.get("prompt_token_ids")]
    if all(ids is None for ids in given):
        return reported
    tokens = _tokens(given, "input_ids", "")
    same = tokens.shape == reported.shape
    if not same or ((tokens != reported) & (reported != 0)).any():
        raise LineError("its input_ids are not those of its input_token_logprobs")
    return tokens


def _tokens(given: Sequence[Any], name: str, request: str) -> np.ndarray:
    """Return the ids in the first of *given* that is there; all that are must be the same."""
    there = [ids for ids in given if ids is not None]
    if not there:
        raise LineError(f"it has no {name}: ask the server for {request}, or add them")
    if any(ids != there[0] for ids in there):
        raise LineError(f"it has {name} twice, and not the same")
    try:
        return np.asarray(array("q", there[0]))
    except (OverflowError, TypeError) as error:
        raise LineError(f"its {name} are not a list of ids ({error})") from error


def _check_length(positions: list[Any], tokens: np.ndarray, name: str) -> None:
    if len(positions) != len(tokens) or not positions:
        raise LineError(
            f"its {name} are of {len(positions)} tokens, its prompt has {len(tokens)}: expected "
            "as many"
        )
    if positions[0] is not None:
        raise LineError(
            f"its {name} begin with {_short(positions[0])}, expected null: nothing predicts the "
            "first token"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
