"""The vectors of an answer: cut to the requested dimensions, and written in OpenAI's schema."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from engines.openai.embeddings import EmbeddingsRequest
from engines.openai.errors import InvalidRequest

MAX_VALUES: Final = 4 << 20  # of one answer; as JSON a value has some 20 bytes
Vector: TypeAlias = npt.NDArray[np.float32]


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
