"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from engines.openai.foreign_request import Dialect
from engines.openai.messages import NO_IMAGES, ImageSupport
from engines.openai.requests import HELD_TO_NOTHING, Json, checked, validate_chat
from gateway.anthropic.request import CountRequest, MessagesRequest
from gateway.anthropic.translation import MessageFormat, prompt_fields, translated
from gateway.config import GatewayConfig
from gateway.errors import ANTHROPIC_PATH, Failure
from gateway.gateway import Gateway
from gateway.identity.outline import Compared, change_between
from gateway.keys import Tenant
from gateway.models import ServedModel
from gateway.relay.answer import AnswerFormat
from gateway.relay.question import count_question, prompt_tokens
from gateway.request.body import ParsedBody, body_for_engine
from gateway.request.callers import charged_caller, gateway_of, state_of
from gateway.request.fit import served_name
from gateway.request.routing import json_response, new_router, takes
from gateway.turns import Operation, Translate, accept

router = new_router()

# Values of ``anthropic-beta``, without their dates, whose features are always on here.
KNOWN_BETAS = (
    "cache-diagnosis-",
    "effort-",
    "extended-cache-ttl-",
    "fine-grained-tool-streaming-",
    "interleaved-thinking-",
    "mid-conversation-system-",
    "prompt-caching-",
    "structured-outputs-",
    "token-counting-",
)


def operation(request_id: str) -> Operation:
    """Return the operation that answers POST /v1/messages through the engine's chat."""
    return Operation(
        validate_chat,
        partial(_recall, request_id),
        partial(_check_early, request_id),
        Failure.anthropic_event,
        _compared,
        Dialect(MessagesRequest.__struct_fields__),
    )


async def _recall(request_id: str, gateway: Gateway, tenant: Tenant, body: ParsedBody) -> Translate:
    return partial(translated, image_support=body.model.image_support, request_id=request_id)


def _check_early(request_id: str, model: ServedModel, asked: Json) -> None:
    image_support = model.last_image_support
    made = translated(asked, image_support, request_id)
    validate_chat(made.raw, image_support)


def _compared(model: ServedModel, tenant: Tenant, answer: AnswerFormat, now: Compared) -> None:
    """Remember the request under its answer's id, and prepare the ``diagnostics`` it asks for."""
    assert isinstance(answer, MessageFormat)
    model.prefixes.name(tenant.name, answer.asked.message_id, now)
    if answer.asked.previous_id is not None:
        earlier = model.prefixes.answered_as(tenant.name, answer.asked.previous_id)
        answer.diagnose = partial(diagnosis, earlier, now)


def num_unknown(betas: str) -> int:
    """Count the values of an ``anthropic-beta`` header that are not in ``KNOWN_BETAS``."""
    names = [x.strip() for x in betas.split(",") if x.strip()]
    return sum(not name.startswith(KNOWN_BETAS) for name in names)


@router.post(ANTHROPIC_PATH, openapi_extra=takes(MessagesRequest))
async def messages(request: Request) -> Response:
    """Answer with a message, or the events of one."""
    unknown = num_unknown(request.headers.get("anthropic-beta", ""))
    gateway = gateway_of(request)
    gateway.metrics.left_out(["beta"] * unknown)
    return await accept(request, operation(state_of(request.scope).id))


def diagnosis(earlier: Compared | None, now: Compared) -> Json | None:
    """Return ``diagnostics``, the difference of two prompts; None if the earlier one still stands.

    Args:
        earlier: the request that ``previous_message_id`` names; None if it is not remembered.
    """
    if earlier is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    change = change_between(earlier.outline, now.outline)
    if change is None:
        return None
    missed = max(0, earlier.prompt_tokens - now.cached_tokens)
    reason = {"type": f"{change.part}_changed", "cache_missed_input_tokens": missed}
    return {"cache_miss_reason": reason}


def chat_of(asked: Json, image_support: ImageSupport = NO_IMAGES) -> Json:
    """Translate a body into the chat whose tokens the engine counts.

    Raises:
        InvalidRequest: ``asked`` is no valid body of /v1/messages/count_tokens.
    """
    request = checked(asked, CountRequest)
    fields, _ = prompt_fields(request, image_support)
    chat = {"model": request.model, **fields}
    validate_chat({**chat, **HELD_TO_NOTHING}, image_support)
    return chat


@router.post(f"{ANTHROPIC_PATH}/count_tokens", openapi_extra=takes(CountRequest))
async def count_tokens(request: Request) -> Response:
    """Answer with the number of tokens; nothing is computed or kept."""
    model, question = await _question(request)  # the parsed body is freed before the engine works
    counted = {"input_tokens": await prompt_tokens(request, model, question)}
    return json_response(counted)


async def _question(request: Request) -> tuple[ServedModel, bytes]:
    gateway = gateway_of(request)
    charged_caller(request)
    async with body_for_engine(request, check=_check_count_early) as body:
        made = await body.off_loop(partial(_for_engine, body.model, gateway.config, body.json))
        return body.model, made


def _check_count_early(model: ServedModel, asked: Json) -> None:
    chat_of(asked, model.last_image_support)


def _for_engine(model: ServedModel, config: GatewayConfig, asked: Json) -> bytes:
    chat = chat_of(asked, model.image_support)
    chat["model"] = served_name(model, config, chat["model"])
    return count_question(model.served.template, config.keep_reasoning, chat)
