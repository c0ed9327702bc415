"""Requests for embeddings, in OpenAI's schema."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from engines.openai.errors import FieldError
from engines.openai.requests import Json, ModelName, checked, listed

EMBEDDINGS_PATH: Final = "/v1/embeddings"
MAX_INPUTS: Final = 2048  # OpenAI's
MAX_TOKENS: Final = 300_000  # of all inputs together; OpenAI's, too
_MAX_TOKEN_ID = 2**31 - 1

Inputs = Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)]


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings."""

    model: ModelName
    input: str | Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.input, list) and len({type(x) for x in self.input}) > 1:
            raise FieldError("input", "an input is a string, token ids, or a list of either")
        inputs = self.inputs
        if len(inputs) > MAX_INPUTS:
            raise FieldError("input", f"{len(inputs)} inputs, more than {MAX_INPUTS}")
        for text in inputs:
            if not text:
                raise FieldError("input", "an input is empty")
            if isinstance(text, list) and not all(0 <= x <= _MAX_TOKEN_ID for x in text):
                raise FieldError("input", "a token id is negative or too large")

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs, each a text or token ids; the list is made at every call."""
        return listed(self.input)


def validate_embeddings(raw: Json) -> EmbeddingsRequest:
    """Check a request for embeddings that was parsed already. Raises ``InvalidRequest``."""
    return checked(raw, EmbeddingsRequest)
