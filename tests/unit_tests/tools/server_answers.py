# SPDX-License-Identifier: Apache-2.0
"""What an inference server returns for a prompt, made from a model's log-probabilities.

Entry by entry from the whole distributions, so that nothing is shared with what reads it.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

Distribution = Sequence[float]
"""Log-probabilities of all ids."""


def model(tokens: Sequence[int], vocab_size: int, *, seed: int = 0) -> list[Distribution]:
    """Return what a made-up model predicts of each token but the first; no two are equal."""
    found = []
    for position in range(1, len(tokens)):
        rng = random.Random(f"{seed} {list(tokens[:position])}")
        logits = [rng.gauss(0, 3) for _ in range(vocab_size)]
        total = math.log(math.fsum(map(math.exp, logits)))
        found.append([logit - total for logit in logits])
    return found


def ranked(distribution: Distribution) -> list[int]:
    """Return all ids, the most likely first."""
    return sorted(range(len(distribution)), key=lambda number: -distribution[number])


def vllm_positions(
    tokens: Sequence[int], distributions: Sequence[Distribution], k: int
) -> list[dict[str, Any] | None]:
    """Return ``prompt_logprobs``: K entries, and one more where the token is not among them."""
    positions: list[dict[str, Any] | None] = [None]
    for token, distribution in zip(tokens[1:], distributions, strict=True):
        order = ranked(distribution)
        # The token itself comes first, as in the server's dictionaries.
        shown = [token, *(number for number in order[:k] if number != token)]
        positions.append(
            {
                str(number): {
                    "logprob": distribution[number],
                    "rank": order.index(number) + 1,
                    "decoded_token": f"<{number}>",
                }
                for number in shown
            }
        )
    return positions


def vllm_output(
    tokens: Sequence[int], distributions: Sequence[Distribution], k: int
) -> dict[str, Any]:
    """Return a ``RequestOutput``."""
    return {
        "request_id": "0",
        "prompt": None,
        "prompt_token_ids": list(tokens),
        "prompt_logprobs": vllm_positions(tokens, distributions, k),
        "outputs": [{"index": 0, "text": " x", "token_ids": [3], "logprobs": None}],
        "finished": True,
    }


def vllm_completion(
    tokens: Sequence[int], distributions: Sequence[Distribution], k: int
) -> dict[str, Any]:
    """Return what ``/v1/completions`` answers."""
    choice = {
        "index": 0,
        "text": " x",
        "logprobs": None,
        "finish_reason": "length",
        "prompt_logprobs": vllm_positions(tokens, distributions, k),
        "prompt_token_ids": list(tokens),
    }
    return {"id": "cmpl-0", "object": "text_completion", "choices": [choice], "usage": {}}


def sglang(tokens: Sequence[int], distributions: Sequence[Distribution], k: int) -> dict[str, Any]:
    """Return what ``/generate`` answers."""
    own: list[list[Any]] = [[None, tokens[0], None]]
    top: list[list[list[Any]] | None] = [None]
    for token, distribution in zip(tokens[1:], distributions, strict=True):
        own.append([distribution[token], token, None])
        top.append([[distribution[number], number, None] for number in ranked(distribution)[:k]])
    meta = {
        "id": "0",
        "prompt_tokens": len(tokens),
        "cached_tokens": 0,
        "input_token_logprobs": own,
        "input_top_logprobs": top,
        "output_token_logprobs": [[-0.5, 3, None]],
    }
    return {"text": " x", "output_ids": [3], "meta_info": meta}
