"""Plans requests on one thread: one piece of work at a time, and tenants take turns.

Templates hold the GIL, and tokenizers are not fully thread-safe, so one thread is all that helps.
A piece of work is short (``PIECE_CHARS`` of text, or one prompt that fits the context), so that a
request of another tenant waits for one piece, not for a line of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from engines.host.tenant_line import Payer, TenantLine, to_its_end
from engines.mlx_worker.generation import ModelFacts
from engines.mlx_worker.model.vocabulary import Vocabulary
from engines.openai.embeddings import MAX_TOKENS, EmbeddingsRequest
from engines.openai.errors import InvalidRequest, context_too_long

T = TypeVar("T")

MAX_WAITING: Final = 1024  # requests
PIECE_CHARS: Final = 1 << 16  # of texts that are tokenized together, some 50 ms


class Planning:
    """The thread, and the line of requests that wait for it. Belongs to the event loop."""

    def __init__(self, first: Callable[[], object]) -> None:
        """``first`` is done ahead of all requests."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt")
        self._line = TenantLine(MAX_WAITING)
        self._thread.submit(first)

    def close(self) -> None:
        """Drop what waits; what runs goes on to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def do(self, payer: Payer, work: Callable[[], T], cost: int = 1) -> T:
        """Do ``work`` on the thread when it is the tenant's turn; ``cost`` counts in its share.

        A caller that is cancelled before its turn leaves the line.

        Raises:
            QueueFull: too many requests wait.
            InvalidRequest: what ``work`` raises, or the body is nested too deeply for it.
        """
        with self._line.place(payer):
            async with self._line.turn(payer, cost):
                work_done = asyncio.get_running_loop().run_in_executor(self._thread, work)
                try:
                    return await to_its_end(work_done)
                except RecursionError as error:  # a schema just shallow enough to have been parsed
                    raise InvalidRequest("The JSON body is nested too deeply.") from error

    async def tokens_of(
        self, payer: Payer, asked: EmbeddingsRequest, vocabulary: Vocabulary, facts: ModelFacts
    ) -> list[list[int]]:
        """Tokenize what is to be embedded, with the tokens that the tokenizer adds by itself.

        It ends with the piece that exceeds a bound.

        Raises:
            InvalidRequest: more than ``MAX_TOKENS`` in all, a text that the context cannot hold or
                that has no tokens, or an id outside the vocabulary.
        """
        check_size(asked, vocabulary.max_token_chars, facts.max_context)
        encode = partial(_encoded, vocabulary.tokenizer)
        texts: list[list[int]] = []
        num_tokens = 0
        for piece in pieces(asked.inputs):
            found = await self.do(payer, partial(encode, piece), sum(map(len, piece)))
            num_tokens += sum(map(len, found))
            if num_tokens > MAX_TOKENS:
                raise _too_many_tokens()
            for text in found:
                _check_text(text, facts)
            texts += found
        return texts


def _encoded(tokenizer: Any, piece: Sequence[str | list[int]]) -> list[list[int]]:
    return [x if isinstance(x, list) else list(tokenizer.encode(x)) for x in piece]


def check_size(asked: EmbeddingsRequest, max_token_chars: int, max_context: int) -> None:
    """Refuse what cannot fit, before anything is tokenized. Raises ``InvalidRequest``."""
    least = [len(x) if isinstance(x, list) else len(x) // max_token_chars for x in asked.inputs]
    if sum(least) > MAX_TOKENS:
        raise _too_many_tokens()
    if max(least) >= max_context:
        raise context_too_long(max_context, max(least), "input", at_least=True)


def pieces(inputs: Sequence[str | list[int]]) -> Iterator[list[str | list[int]]]:
    """Cut a list of inputs into pieces of about ``PIECE_CHARS``; no input is cut."""
    piece: list[str | list[int]] = []
    size = 0
    for one in inputs:
        if piece and size + len(one) > PIECE_CHARS:
            yield piece
            piece, size = [], 0
        piece.append(one)
        size += len(one)
    yield piece


def _check_text(text: Sequence[int], facts: ModelFacts) -> None:
    if not text:  # some texts are none to some tokenizers
        raise InvalidRequest("input: a text has no tokens", "input")
    if len(text) >= facts.max_context:
        raise context_too_long(facts.max_context, len(text), "input")
    if max(text) >= facts.vocab_size:
        raise InvalidRequest("input: a token id is none of this model's", "input")


def _too_many_tokens() -> InvalidRequest:
    return InvalidRequest(f"input: more than {MAX_TOKENS} tokens in all", "input")
