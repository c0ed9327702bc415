"""Embeddings of the served model: its pooled hidden states, one text at a time, step by step.

The model runs without its head, on the owner thread. Requests take turns, text by text. A step runs
between two rounds of the batches, so answers continue, and takes no longer than a prefill's chunk
beside them may. After a step, the answers get as much time as the step took. A text of several
steps holds KV outside of the memory budget, so it begins only when no request waits or lacks
memory.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from engines.host.work_line import QueueFull, WorkLine
from engines.mlx_worker.batch.prefill import ChunkSizer
from engines.mlx_worker.generation import ModelFacts
from engines.mlx_worker.model.loading import Vocabulary
from engines.mlx_worker.owner import Owner
from engines.mlx_worker.prompt.request_planner import Planning
from engines.openai.errors import InvalidRequest, context_too_long
from engines.openai.requests import MAX_EMBEDDED_TOKENS, EmbeddingsRequest

MAX_VALUES: Final = 4 << 20  # numbers in one answer; each takes some 20 bytes as JSON
Vector: TypeAlias = npt.NDArray[np.float32]
Pooling: TypeAlias = Literal["last", "mean", "first"]
_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
Piece: TypeAlias = list[str | list[int]]  # some of a request's inputs
PIECE_CHARS: Final = 1 << 16  # characters that are tokenized together, in some 50 ms
T = TypeVar("T")
MAX_WAITING: Final = 64  # requests
LOOK_AGAIN_S: Final = 0.05


async def tokens_of(
    asked: EmbeddingsRequest, planning: Planning, vocabulary: Vocabulary, facts: ModelFacts
) -> list[list[int]]:
    """Return the token ids of each input, with the tokens that the tokenizer adds by itself.

    It stops at the first piece that exceeds a limit.

    Raises:
        InvalidRequest: there are more tokens than may be embedded at once, a text is empty or
            longer than the context, or an id is outside the vocabulary.
    """
    check_texts(asked, vocabulary.max_token_chars, facts.max_context)
    encode = vocabulary.tokenizer.encode
    texts: list[list[int]] = []
    num_tokens = 0
    for piece in pieces(asked.inputs):
        work = partial(_encoded, encode, piece)
        for text in await planning.do(work, sum(map(len, piece))):
            num_tokens += len(text)
            if num_tokens > MAX_EMBEDDED_TOKENS:
                raise _too_many_tokens()
            _check_input(text, facts)
            texts.append(text)
    return texts


def _encoded(encode: Callable[[str], Any], piece: Piece) -> list[list[int]]:
    return [x if isinstance(x, list) else list(encode(x)) for x in piece]


def check_texts(asked: EmbeddingsRequest, max_token_chars: int, max_context: int) -> None:
    """Raise ``InvalidRequest`` for inputs that are surely too long, before any is tokenized."""
    least = [len(x) if isinstance(x, list) else len(x) // max_token_chars for x in asked.inputs]
    if sum(least) > MAX_EMBEDDED_TOKENS:
        raise _too_many_tokens()
    if max(least) >= max_context:
        raise context_too_long(max_context, max(least), "input", at_least=True)


def pieces(inputs: Sequence[str | list[int]]) -> Iterator[Piece]:
    """Yield the inputs in pieces of about ``PIECE_CHARS``; no input is cut."""
    piece: Piece = []
    size = 0
    for one in inputs:
        if piece and size + len(one) > PIECE_CHARS:
            yield piece
            piece, size = [], 0
        piece.append(one)
        size += len(one)
    yield piece


def _check_input(text: Sequence[int], facts: ModelFacts) -> None:
    if not text:  # some tokenizers make no tokens of some texts
        raise InvalidRequest("input: a text has no tokens", "input")
    if len(text) >= facts.max_context:
        raise context_too_long(facts.max_context, len(text), "input")
    if max(text) >= facts.vocab_size:
        raise InvalidRequest("input: a token id is outside this model's vocabulary", "input")


def _too_many_tokens() -> InvalidRequest:
    return InvalidRequest(f"input: more than {MAX_EMBEDDED_TOKENS} tokens in all", "input")


def cut(vector: Vector, dimensions: int | None) -> Vector:
    """Return the first ``dimensions`` values (None = all), scaled to a vector of length 1.

    Raises:
        InvalidRequest: the vector has fewer values.
    """
    if dimensions is not None and dimensions > vector.size:
        message = f"dimensions: this model's vectors have {vector.size}"
        raise InvalidRequest(message, "dimensions")
    kept = vector[:dimensions]
    length = float(np.linalg.norm(kept))
    return kept / length if length > 0 else kept


def check_size(vector: Vector, num_inputs: int) -> None:
    """Raise ``InvalidRequest`` if an answer with ``num_inputs`` such vectors is too large."""
    if vector.size * num_inputs > MAX_VALUES:
        most = MAX_VALUES // vector.size
        raise InvalidRequest(f"input: at most {most} inputs of this size at once", "input")


def shown(asked: EmbeddingsRequest, vectors: Sequence[Vector], num_tokens: int) -> bytes:
    """Return the JSON answer with the inputs' vectors; ``num_tokens`` counts all inputs."""
    packed = asked.encoding_format == "base64"
    rows = [
        {
            "object": "embedding",
            "index": i,
            "embedding": b64encode(x.astype("<f4").tobytes()).decode() if packed else x.tolist(),
        }
        for i, x in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer = {"object": "list", "model": asked.model, "data": rows, "usage": usage}
    return msgspec.json.encode(answer)


def pooling_of(folder: Path | None) -> Pooling:
    """Return how a model's hidden states are pooled into one vector.

    The model's sentence-transformers files decide, if there are any. Qwen's embedding models are
    recognised by name, since copies of them often lack these files. For a model that was not made
    for embeddings, the mean over all tokens works better than the last token.
    """
    if folder is None:
        return "mean"
    try:
        modes = json.loads((folder / "1_Pooling" / "config.json").read_bytes())
        for name, pooling in _MODES.items():
            if modes.get(name) is True:
                return pooling
    except (OSError, ValueError, AttributeError):
        pass  # there is no such file, or it cannot be read
    return "last" if "qwen3-embedding" in str(folder).lower() else "mean"


def inner_of(model: Any) -> Any | None:
    """Return the part of a model that gives hidden states; None if there is none of a usual kind.

    In mlx_lm's decoder classes it is the attribute ``model``; some wrap such a class in
    ``language_model``.
    """
    for outer in (model, getattr(model, "language_model", None)):
        inner = getattr(outer, "model", None)
        if callable(inner) and (hasattr(inner, "embed_tokens") or hasattr(inner, "wte")):
            return inner
    return None


class HiddenStates:
    """The pooled hidden states of one text, as far as it has been fed."""

    def __init__(self, model: Any, inner: Any, pooling: Pooling) -> None:
        self._model = model
        self._inner = inner
        self._pooling = pooling
        self._caches: Any = None
        self._pooled: mx.array | None = None
        self._num_tokens = 0

    def feed(self, tokens: Sequence[int], *, last: bool) -> None:
        """Feed ``tokens``; ``last`` means that none follow, so that no KV need be kept."""
        if self._caches is None and not last:
            self._caches = make_prompt_cache(self._model)
        states = self._inner(mx.array(list(tokens))[None], cache=self._caches)
        states = states[0].astype(mx.float32)
        before = self._pooled
        if self._pooling == "last":
            self._pooled = states[-1]
        elif self._pooling == "first":
            self._pooled = states[0] if before is None else before
        else:
            total = states.sum(axis=0)
            self._pooled = total if before is None else before + total
        self._num_tokens += len(tokens)
        mx.eval(self._pooled, [x.state for x in self._caches or ()])
        if last:
            self._caches = None
            mx.clear_cache()

    def pooled(self) -> Vector:
        """Return the pooled vector of all tokens fed; its length is not normalised."""
        assert self._pooled is not None
        vector: Vector = np.array(self._pooled, dtype=np.float32)
        if self._pooling == "mean":
            vector /= np.float32(self._num_tokens)
        return vector


class Embedder:
    """Embeds texts with the model of a started owner; belongs to the event loop.

    Args:
        step: most tokens of a step.
        wait_s: longest wait of a long text until no request lacks memory, in seconds.
    """

    def __init__(
        self,
        owner: Owner,
        step: int,
        wait_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owner = owner
        self._step = step
        self._sizes = ChunkSizer(step)
        self._wait_s = wait_s
        self._clock = clock
        self._inner = inner_of(owner.loaded.model)
        self._pooling = pooling_of(owner.loaded.path)
        self._line = WorkLine(MAX_WAITING)

    def check(self) -> None:
        """Raise ``InvalidRequest`` (status 404) if this model cannot make embeddings."""
        if self._inner is None:
            message = "This model makes no embeddings: its class gives no access to hidden states."
            raise InvalidRequest(message, "model", "not_supported", 404)

    async def embed(self, asked: EmbeddingsRequest, texts: Sequence[Sequence[int]]) -> list[Vector]:
        """Return one vector of length 1 for each text, fp32 (dimensions,).

        Raises:
            InvalidRequest: the request asks for more dimensions than the model has, or the answer
                would be too large.
            QueueFull: too many requests wait already, or there is no memory for a long text.
        """
        vectors = []
        for text in texts:
            async with self._line.turn():
                vectors.append(cut(await self._of(text), asked.dimensions))
            check_size(vectors[0], len(texts))
        return vectors

    async def _of(self, text: Sequence[int]) -> Vector:
        if len(text) > self._step:
            await self._room_for(len(text))
        states = HiddenStates(self._owner.loaded.model, self._inner, self._pooling)
        first = 0
        while first < len(text):
            part = text[first : first + self._sizes.chunk(busy=True)]
            first += len(part)
            feed = partial(self._feed, states, part, first == len(text))
            await asyncio.sleep(await self._on_owner(feed))
        return states.pooled()

    def _feed(self, states: HiddenStates, part: Sequence[int], last: bool) -> float:
        """Run a step; return the seconds to leave to the answers before the next one."""
        begin = self._clock()
        states.feed(part, last=last)
        took_s = self._clock() - begin
        self._sizes.took(len(part), took_s)
        return took_s if self._owner.batching.is_working else 0.0

    async def _room_for(self, num_tokens: int) -> None:
        nbytes = self._owner.plan.cost.row_bytes(num_tokens)
        try:
            async with asyncio.timeout(self._wait_s):
                while await self._on_owner(lambda: self._owner.batching.lacks(nbytes)):
                    await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            raise QueueFull("no memory was free for a long text; try again later") from None

    async def _on_owner(self, work: Callable[[], T]) -> T:
        if self._owner.is_closing:
            raise QueueFull("the engine is shutting down")
        return await self._owner.call(work)
