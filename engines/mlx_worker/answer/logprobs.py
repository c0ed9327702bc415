"""Writes log-probabilities as OpenAI shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.mlx_worker.generation import Token
from engines.mlx_worker.model.vocabulary import Vocabulary

# JSON has no -inf; OpenAI writes this for a token that cannot occur.
_NEVER = -9999.0


@dataclass(frozen=True)
class ScoredToken:
    """One token of an answer, with the likeliest tokens at its place."""

    token: Token
    offset: int  # characters of the answer before it


def chat_logprobs(scores: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    return {"content": [_chat_entry(x.token, vocabulary) for x in scores], "refusal": None}


def _chat_entry(token: Token, vocabulary: Vocabulary) -> dict[str, Any]:
    entry = _spelled(token.id, token.logprob, vocabulary)
    entry["top_logprobs"] = [_spelled(x, logprob, vocabulary) for x, logprob in token.top]
    return entry


def _spelled(token: int, logprob: float | None, vocabulary: Vocabulary) -> dict[str, Any]:
    spelling = vocabulary.spelling(token)
    text = spelling.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(spelling)}


def text_logprobs(scores: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """The ``logprobs`` of a text completion; offsets count from the start of the answer."""
    return {
        "tokens": [_text(x.token.id, vocabulary) for x in scores],
        "token_logprobs": [_finite(x.token.logprob) for x in scores],
        "top_logprobs": [_alternatives(x.token, vocabulary) for x in scores],
        "text_offset": [x.offset for x in scores],
    }


def _alternatives(token: Token, vocabulary: Vocabulary) -> dict[str, float]:
    """The likeliest tokens, and the chosen one even if it is none of them."""
    ranked = (*token.top, (token.id, token.logprob))
    return {_text(x, vocabulary): _finite(logprob) for x, logprob in ranked}


def _text(token: int, vocabulary: Vocabulary) -> str:
    return vocabulary.spelling(token).decode("utf-8", "replace")


def _finite(logprob: float | None) -> float:
    return _NEVER if logprob is None else max(logprob, _NEVER)
