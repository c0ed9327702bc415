"""Requests for a prompt's tokens, in vLLM's schema of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from engines.openai.images import BLIND, Sight
from engines.openai.requests import ChatRequest, Json, ModelName, checked, validate_chat

TOKENIZE_PATH: Final = "/tokenize"
DETOKENIZE_PATH: Final = "/detokenize"
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# The most that is tokenized, in contexts of the model: a client that counts wants to know by how
# much its prompt is too long, but not of any prompt.
MAX_CONTEXTS: Final = 4
# The fields of a chat that make its prompt.
PROMPT_FIELDS: Final = frozenset(
    {"model", "messages", "tools", "chat_template_kwargs", "reasoning_effort"}
)


class TokenizeText(msgspec.Struct, frozen=True):
    """A plain text whose tokens are asked for."""

    model: ModelName
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class Detokenize(msgspec.Struct, frozen=True):
    """Tokens whose text is asked for."""

    model: ModelName
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=1 << 20)]


def validate_tokenize(raw: Json, sight: Sight = BLIND) -> ChatRequest | TokenizeText:
    """Check a request for the tokens of ``messages`` or of a ``prompt``.

    Raises:
        InvalidRequest: it is neither, or not of the right form.
    """
    if "messages" in raw:
        return validate_chat({name: raw[name] for name in PROMPT_FIELDS & raw.keys()}, sight)
    return checked(raw, TokenizeText)


def validate_detokenize(raw: Json, sight: Sight = BLIND) -> Detokenize:
    """Check a request for the text of tokens. Raises ``InvalidRequest``."""
    return checked(raw, Detokenize)
