"""What an engine says of a request, told to the account of it."""

from __future__ import annotations

from engines.http import CACHE_HEADER, PROMPT_HEADER, CacheOutcome
from gateway.relay.answer import AnswerStream
from gateway.watch.requests import LiveRequest

WORD = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'


def answered(request: LiveRequest, cache: CacheOutcome, prompt_tokens: int) -> None:
    """The head of the engine's answer comes."""
    headers = {CACHE_HEADER: cache.header(), PROMPT_HEADER: str(prompt_tokens)}
    request.engine_answered(headers)


def said(request: LiveRequest, chunk: bytes = WORD) -> None:
    """Some of its stream comes."""
    if request.stream is None:
        request.stream = AnswerStream()
    request.stream.feed(chunk)
    request.look()
