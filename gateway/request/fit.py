"""Fits a checked request to its engine: the model's name, limits, and the chat template's rules.

A template may refuse system messages in the middle of a chat. They are rewritten where they stand,
and not moved to the top as some servers do: that would change the prompt from its first tokens on,
so that the conversation's KV could not be reused after any such message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engines.openai.errors import unknown_model
from engines.openai.requests import NO_LIMIT, Json
from engines.wire import TemplateRules
from gateway.config import GatewayConfig
from gateway.identity.names import TASK_TOKENS
from gateway.models import ServedModel

LIMITS: Final = ("max_tokens", "max_completion_tokens")
_SYSTEM = ("system", "developer")


def fit_to_engine(
    raw: Json, model: ServedModel, config: GatewayConfig, asked: str, *, is_task: bool
) -> bool:
    """Adapt a checked body, in place, to its engine; return whether to hide the answer's text.

    Args:
        asked: the model's name or alias in the request.
        is_task: whether an agent or a page asks on its own behalf, as for a title.

    Raises:
        InvalidRequest: 404, ``asked`` is neither the model's name nor an alias.
    """
    raw["model"] = served_name(model, config, asked)
    if config.keep_reasoning and "messages" in raw:
        keep_reasoning(raw, model.served.template)
    _normalize(raw, model.served.max_context, _usual_length(config, is_task))
    return model.served.engine == "vllm" and _fit_vllm(raw)


def served_name(model: ServedModel, config: GatewayConfig, asked: str) -> str:
    """Return the engine's own name of a model that a client asked for by name or alias.

    Raises:
        InvalidRequest: 404, ``asked`` is neither its name nor an alias.
    """
    served = model.served.model
    if not (model.is_named(asked) or config.means_served(asked, served)):
        raise unknown_model(asked[:100], served)
    return served


def _normalize(raw: Json, max_context: int, default_max_tokens: int) -> None:
    """Change fields that engines interpret differently, so that they mean what OpenAI's API says.

    ``stream_options`` are removed if nothing is streamed. A chat's limit of the whole context or
    more is removed, so that the answer may fill the room that the prompt leaves; a chat without a
    limit gets the default, if there is one. A text completion's limit is lowered instead, since
    without one it has 16 tokens. A limit or seed of -1, and a bias of zero, count as absent.
    """
    raw |= {"seed": None} if raw.get("seed") == NO_LIMIT else {}
    raw |= {name: max_context for name in LIMITS if raw.get(name) == NO_LIMIT}
    if biases := raw.pop("logit_bias", None):
        raw["logit_bias"] = {key: bias for key, bias in biases.items() if bias}
    if not raw.get("stream"):
        raw.pop("stream_options", None)
    if "messages" not in raw:
        if (raw.get("max_tokens") or 0) > max_context:
            raw["max_tokens"] = max_context
        return
    if default_max_tokens and all(raw.get(name) is None for name in LIMITS):
        raw["max_tokens"] = default_max_tokens
    for name in LIMITS:
        if (raw.get(name) or 0) >= max_context:
            del raw[name]


def _usual_length(config: GatewayConfig, is_task: bool) -> int:
    """Return the longest answer, in tokens, of a request without a limit; 0 = no limit."""
    usual = config.default_max_tokens
    return min(usual or TASK_TOKENS, TASK_TOKENS) if is_task else usual


def have_usage_sent(raw: Json) -> bool:
    """Ask the engine for a stream's token counts; return True if the client did not ask."""
    options = raw.get("stream_options") or {}
    if not raw.get("stream") or options.get("include_usage"):
        return False
    raw["stream_options"] = {**options, "include_usage": True}
    return True


def _fit_vllm(raw: Json) -> bool:
    """Rewrite, in place, what vLLM refuses; return whether to hide the answer's text.

    A chat's limit of 0 tokens becomes 1, and the text is hidden. Several greedy answers are drawn
    from the most likely token only.
    """
    if raw.get("temperature") == 0 and (raw.get("n") or 1) > 1:
        raw |= {"temperature": 1, "top_k": 1}
    is_silent = "messages" in raw and any(raw.get(name) == 0 for name in LIMITS)
    raw |= {name: 1 for name in LIMITS if is_silent and name in raw}
    return is_silent


def fitted(messages: Sequence[Json], rules: TemplateRules) -> list[Json]:
    """Return the messages in a form that the model's template accepts, in the same order.

    If the template refuses a system message after the first, it becomes a user's message with a
    mark. If user and assistant have to alternate, it is added to the message before it, and
    consecutive user messages are joined.
    """
    made = list(messages)
    if not rules.inline_system and any(_is_inline(messages, i) for i in range(len(messages))):
        made = _with_notes(messages, rules)
    return made if rules.repeated_users else _alternating(made)


def _with_notes(messages: Sequence[Json], rules: TemplateRules) -> list[Json]:
    made: list[Json] = []
    for i, message in enumerate(messages):
        if not _is_inline(messages, i):
            made.append(message)
            continue
        note = f"<system-reminder>\n{_text_of(message)}\n</system-reminder>"
        _add_note(made, note, rules)
    return made


def _is_inline(messages: Sequence[Json], i: int) -> bool:
    return i > 0 and messages[i].get("role") in _SYSTEM


def _text_of(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]  # images were refused earlier
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
    return str(content or "")


def _add_note(made: list[Json], note: str, rules: TemplateRules) -> None:
    before = made[-1]
    if not rules.repeated_users and before["role"] in ("user", "tool"):
        made[-1] = _joined(before, {"content": note})
    else:
        made.append({"role": "user", "content": note})


def _alternating(messages: Sequence[Json]) -> list[Json]:
    """Join consecutive user messages."""
    made: list[Json] = []
    for message in messages:
        if made and made[-1]["role"] == message["role"] == "user":
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
    return made


def _joined(before: Json, after: Json) -> Json:
    """Return ``before`` with the content of both: as text, or as parts if one has an image."""
    parts = [*_parts(before), *_parts(after)]
    if all(part.get("type") == "text" for part in parts):
        return {**before, "content": f"{_text_of(before)}\n\n{_text_of(after)}"}
    return {**before, "content": parts}


def _parts(message: Json) -> list[Json]:
    content = message.get("content")
    if isinstance(content, list):
        return [part for part in content if isinstance(part, dict)]
    return [{"type": "text", "text": str(content or "")}]


def keep_reasoning(raw: Json, rules: TemplateRules) -> None:
    """Have the template keep the reasoning of earlier turns, unless the body sets its switch."""
    if rules.reasoning_switch:
        said = raw.get("chat_template_kwargs") or {}
        raw["chat_template_kwargs"] = {**rules.reasoning_switch, **said}
