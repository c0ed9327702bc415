"""Embeddings of the served model: its hidden states, pooled; one text at a time, step by step.

The model runs without its head, on the owner thread. Requests take turns with their texts. A step
stands between two rounds of the batches, so answers go on meanwhile, and takes no longer than a
chunk of a prefill may beside them. After a step the engine is theirs for as long as it took. A text
of several steps holds KV, which counts in no budget: one that is longer than the longest step
begins only when no request lacks memory or waits.
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

MAX_VALUES: Final = 4 << 20  # of one answer; as JSON a value has some 20 bytes
Vector: TypeAlias = npt.NDArray[np.float32]
Pooling: TypeAlias = Literal["last", "mean", "first"]
_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
Piece: TypeAlias = list[str | list[int]]  # of the inputs
PIECE_CHARS: Final = 1 << 16  # of texts that are tokenized together, some 50 ms
T = TypeVar("T")
MAX_WAITING: Final = 64  # requests
LOOK_AGAIN_S: Final = 0.05


async def tokens_of(
    asked: EmbeddingsRequest, planning: Planning, vocabulary: Vocabulary, facts: ModelFacts
) -> list[list[int]]:
    """Tokenize what is to be embedded, with the tokens that the tokenizer adds by itself.

    It ends with the piece that exceeds a bound.

    Raises:
        InvalidRequest: more tokens than may be embedded at once, a text that the context cannot
            hold or that has no tokens, or an id outside the vocabulary.
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
    """Refuse what cannot fit, before anything is tokenized. Raises ``InvalidRequest``."""
    least = [len(x) if isinstance(x, list) else len(x) // max_token_chars for x in asked.inputs]
    if sum(least) > MAX_EMBEDDED_TOKENS:
        raise _too_many_tokens()
    if max(least) >= max_context:
        raise context_too_long(max_context, max(least), "input", at_least=True)


def pieces(inputs: Sequence[str | list[int]]) -> Iterator[Piece]:
    """Cut a list of inputs into pieces of about ``PIECE_CHARS``; no input is cut."""
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
    if not text:  # some texts are none to some tokenizers
        raise InvalidRequest("input: a text has no tokens", "input")
    if len(text) >= facts.max_context:
        raise context_too_long(facts.max_context, len(text), "input")
    if max(text) >= facts.vocab_size:
        raise InvalidRequest("input: a token id is none of this model's", "input")


def _too_many_tokens() -> InvalidRequest:
    return InvalidRequest(f"input: more than {MAX_EMBEDDED_TOKENS} tokens in all", "input")


def cut(vector: Vector, dimensions: int | None) -> Vector:
    """Return the first ``dimensions`` values, all if that is None, as a vector of length 1.

    Raises:
        InvalidRequest: there are not so many.
    """
    if dimensions is not None and dimensions > vector.size:
        message = f"dimensions: this model's vectors have {vector.size}"
        raise InvalidRequest(message, "dimensions")
    kept = vector[:dimensions]
    length = float(np.linalg.norm(kept))
    return kept / length if length > 0 else kept


def check_size(vector: Vector, num_inputs: int) -> None:
    """Raise ``InvalidRequest`` if an answer of so many such vectors would be far too large."""
    if vector.size * num_inputs > MAX_VALUES:
        most = MAX_VALUES // vector.size
        raise InvalidRequest(f"input: at most {most} inputs of this size at once", "input")


def shown(asked: EmbeddingsRequest, vectors: Sequence[Vector], num_tokens: int) -> bytes:
    """Write the answer: ``vectors`` are those of the inputs, of ``num_tokens`` tokens together."""
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
    """Return how a model's states become one vector.

    What its files say, as sentence-transformers writes them, goes first. Qwen's embedding models
    are known by name, since copies of them often lack that file. Of a model that was made for
    something else, all states say more than its last.
    """
    if folder is None:
        return "mean"
    try:
        modes = json.loads((folder / "1_Pooling" / "config.json").read_bytes())
        for name, pooling in _MODES.items():
            if modes.get(name) is True:
                return pooling
    except (OSError, ValueError, AttributeError):
        pass  # no such file, or none that can be read
    return "last" if "qwen3-embedding" in str(folder).lower() else "mean"


def inner_of(model: Any) -> Any | None:
    """Return the part of a model that gives hidden states; None if it has none of the usual kind.

    mlx_lm's classes of decoders have it as ``model``, under a head; some have another such class
    as their ``language_model``.
    """
    for outer in (model, getattr(model, "language_model", None)):
        inner = getattr(outer, "model", None)
        if callable(inner) and (hasattr(inner, "embed_tokens") or hasattr(inner, "wte")):
            return inner
    return None


class HiddenStates:
    """The states of one text, as far as it has been read."""

    def __init__(self, model: Any, inner: Any, pooling: Pooling) -> None:
        self._model = model
        self._inner = inner
        self._pooling = pooling
        self._caches: Any = None
        self._pooled: mx.array | None = None
        self._num_tokens = 0

    def feed(self, tokens: Sequence[int], *, last: bool) -> None:
        """Read ``tokens``; ``last`` says that no more follow, so that no KV need be kept."""
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
        """Return the vector of all that was read; its length is not normalised."""
        assert self._pooled is not None
        vector: Vector = np.array(self._pooled, dtype=np.float32)
        if self._pooling == "mean":
            vector /= np.float32(self._num_tokens)
        return vector


class Embedder:
    """Embeds texts with the model of a started owner. Belongs to the event loop.

    Args:
        wait_s: for how long a text waits until no request lacks memory.
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
        """Raise ``InvalidRequest`` (404) if this model makes no embeddings."""
        if self._inner is None:
            message = "This model makes no embeddings: its class keeps its hidden states to itself."
            raise InvalidRequest(message, "model", "not_supported", 404)

    async def embed(self, asked: EmbeddingsRequest, texts: Sequence[Sequence[int]]) -> list[Vector]:
        """Embed texts; each vector has the length 1.

        Raises:
            InvalidRequest: more dimensions than the model has, or far too many values.
            QueueFull: too many wait already, or there is no room for a long text.
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
        """Do a step; return for how many seconds the engine is the answers' now."""
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
