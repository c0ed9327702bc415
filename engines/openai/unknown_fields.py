"""Names the fields of a request that nobody here knows; refuses one that is a misspelt one of ours.

OpenAI refuses every unknown field. Here clients of other servers, and newer ones, go on working:
what is unknown is ignored, and named in the answer's head. Only where a field that changes the
answer was meant, and is not there under its right name, a request is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import Final

from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json

# OpenAI's and Anthropic's own fields that change no answer here, in whatever dialect.
CHANGE_NOTHING: Final = frozenset(
    {"audio", "betas", "context_management", "conversation", "inference_geo", "metadata"}
    | {"moderation", "options", "parallel_tool_calls", "prediction", "previous_response_id"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    | {"service_tier", "speed", "store", "stream_options", "truncation", "user"}
    | {"user_profile_id", "verbosity", "web_search_options", "workspace_id"}
)
_ALIKE: Final = 0.88  # of two names, as difflib counts: one letter in eight, or two in sixteen
_SHORTEST: Final = 8  # shorter names are too often near another by chance
_MOST: Final = 16  # of the fields that are named, and looked at
_LONGEST: Final = 40


def unknown_fields(asked: Json, known: Collection[str], ours: Collection[str]) -> list[str]:
    """List the fields that are unknown, as a header can name them.

    Args:
        known: all names that mean something, or are known to mean nothing.
        ours: those among them that change an answer.

    Raises:
        InvalidRequest: a field seems to be a misspelt one of ours.
    """
    unknown = [x for x in asked if x not in known and asked[x] is not None][:_MOST]
    for name in unknown:
        meant = _meant(name[:_LONGEST], ours)
        if meant and asked.get(meant) is None:
            raise InvalidRequest(f"{name}: it is unknown here; did you mean {meant}?", name)
    return [re.sub(r"[^\w.-]", "?", x[:_LONGEST], flags=re.ASCII) for x in unknown]


def _meant(name: str, ours: Collection[str]) -> str:
    plain = {_plain(x): x for x in ours}
    if found := plain.get(_plain(name)):
        return found
    if len(name) < _SHORTEST:
        return ""
    close = get_close_matches(name, [x for x in ours if len(x) >= _SHORTEST], 1, _ALIKE)
    return close[0] if close else ""


def _plain(name: str) -> str:
    return re.sub(r"[_-]", "", name).casefold()
