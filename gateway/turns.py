"""One walk from a request to the engine and back, for every dialect that asks for an answer.

charge the key -> wait for the model -> read the body -> recall, translate, validate it -> find the
session -> wait for a slot, open the engine, relay its answer (gateway.relay.turn_response)

A dialect is an ``Operation``: how its body becomes a body that engines know, and how the engine's
answer becomes one of its own. Where the translation needs what is stored, the operation recalls it
first; where the answer is to be stored, the translation says how it is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import Engine, SessionRef
from engines.openai.errors import InvalidRequest, unknown_model
from engines.openai.foreign_request import Dialect, ignored_fields, renamed, take_foreign
from engines.openai.messages import ImageSupport, with_known_parts
from engines.openai.requests import NO_LIMIT, ChatRequest, CompletionRequest, Json
from engines.openai.schemas.keywords import with_known_keywords
from engines.pool.on_demand import OnDemand
from engines.wire import Welcome
from gateway.config import GatewayConfig
from gateway.errors import Failure
from gateway.gateway import Gateway
from gateway.identity.known_chats import Link, message_chain
from gateway.identity.names import (
    MAX_ID_BYTES,
    SUFFIX,
    TASK_SUFFIX,
    TASK_TOKENS,
    NamedSession,
    asked_seconds,
    choose_session,
    client_name,
    group_of,
    named_by_agent,
    named_session,
    shared_task_session,
)
from gateway.identity.outline import Compared, Outline, hashed
from gateway.keys import Tenant
from gateway.models import ServedModel
from gateway.relay.answer import AnswerFormat, StoreAnswer
from gateway.relay.turn_response import AwaitingModel, TurnRequest, TurnResponse
from gateway.request.body import ParsedBody, body_for_engine, fitted, keep_reasoning
from gateway.request.callers import (
    charge_session,
    charged_caller,
    gateway_of,
    has_room_for,
    state_of,
)
from gateway.watch.live import title_of
from scheduler.session import TurnHints

LIMITS: Final = ("max_tokens", "max_completion_tokens")
# Names of sessions, which the gateway has read, and hints that only it may give to an engine. Of
# vLLM's own fields ``take_foreign`` has left none but those that a client may set.
_PRIVATE_FIELDS = frozenset(
    {"conversation", "kv_hints", "previous_response_id", "prompt_cache_key"}
    | {"prompt_cache_options", "prompt_cache_retention"}
)


class Translated(NamedTuple):
    """A request of some dialect, as engines know it."""

    raw: Json  # the body for the engine; its ``model`` is the name that the client gave
    answer: AnswerFormat
    keep: StoreAnswer | None = None  # None: nothing of the answer is stored
    dropped: Sequence[str] = ()  # kinds of parts that engines cannot use, for metrics
    retain_s: float = 0.0  # how long the client asks its session to be kept


# Makes a body that engines know of the client's; raises ``InvalidRequest``.
Translate: TypeAlias = Callable[[Json], Translated]


def as_it_is(raw: Json) -> Translated:
    """Take a body that engines know as it stands."""
    return Translated(raw, AnswerFormat(), retain_s=asked_seconds(raw))


class Operation(msgspec.Struct, frozen=True):
    """One kind of request for an answer."""

    validate: Callable[[Json, ImageSupport], ChatRequest | CompletionRequest]
    # Looks up what a body refers to, and makes the translation of this one request. It may change
    # the body, so the session's id is read from the changed body. Raises ``InvalidRequest``.
    recall: Callable[[Gateway, Tenant, ParsedBody], Awaitable[Translate]]
    # Looks at a body before its model is loaded, as far as can be done then; it may change it.
    # Raises ``InvalidRequest``.
    check_early: Callable[[ServedModel, Json], object] | None = None
    # Makes the event of a stream that failed before it could be asked for.
    failed: Callable[[Failure], bytes] = Failure.event
    # Called, ahead of the answer, with the comparison of the prompt and the one before it.
    compared: Callable[[ServedModel, Tenant, AnswerFormat, Compared], None] = lambda *_: None
    # None: fields of other servers mean nothing in it.
    dialect: Dialect | None = None
    name: str = "chat"  # OpenTelemetry's
    path: str = "/v1/chat/completions"  # the engine's


class CheckedRequest(NamedTuple):
    """A request whose body was parsed, translated and validated, each once."""

    translated: Translated
    model: str
    session: NamedSession | None  # None: the client gave none
    chain: Sequence[Link]  # then its chat is recognised by these
    outline: Outline | None  # None: it is no chat
    task_session: str | None  # None: it is no task
    foreign: Mapping[str, str]  # the client's names of the engine's fields, if they are others
    ignored: Sequence[str]  # fields that this server does not know
    left_out: Sequence[str]  # keywords of JSON schemas that no grammar enforces
    num_answers: int


async def accept(request: Request, operation: Operation) -> Response:
    """Make the response that will serve a request; a stream may begin before its model is loaded.

    Raises as ``_prepared`` does.
    """
    gateway = gateway_of(request)
    loading = gateway.loading
    if loading is None:
        return await _prepared(request, operation, lambda body: None)
    waiting: asyncio.Future[OnDemand] = asyncio.get_running_loop().create_future()

    def on_wait(body: ParsedBody) -> None:
        if body.json.get("stream") is True and body.model.on_demand is not None:
            waiting.set_result(body.model.on_demand)

    preparing = asyncio.create_task(_prepared(request, operation, on_wait), name="turn")
    try:
        await asyncio.wait((preparing, waiting), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        preparing.cancel()
        raise
    if preparing.done():
        return preparing.result()
    progress = partial(loading.progress, waiting.result())
    return AwaitingModel(preparing, progress, operation.failed, gateway.config.sign_of_life_s)


async def _prepared(
    request: Request, operation: Operation, on_wait: Callable[[ParsedBody], None]
) -> TurnResponse:
    """Check a request, find its session, and make the response that will serve it.

    Args:
        on_wait: called if it waits for its model.

    Raises:
        InvalidRequest: the request cannot be served as it stands.
        RequestRefused: the caller's key, or all bodies together, have what they may have.
        EngineUnavailable: there is no engine, or none again in time.
    """
    gateway, tenant, state = gateway_of(request), charged_caller(request), state_of(request.scope)
    early = partial(_check_early, operation)
    async with body_for_engine(request, check=early, on_wait=on_wait) as body:
        model = body.model
        translate = await operation.recall(gateway, tenant, body)
        check = partial(_check, operation, translate, tenant, state.headers)
        served, images = model.served, model.image_support  # it may go away meanwhile
        asked = await body.off_loop(partial(check, served, images, body.json))
        raw, answer = asked.translated.raw, asked.translated.answer
        gateway.metrics.left_out(asked.translated.dropped)
        is_ahead = any(x.get(name) == 0 for x in (raw, body.json) for name in LIMITS)
        is_silent = _fit(raw, model, gateway.config, asked)
        answer.hides_usage = _have_usage_sent(raw)
        named = await _session_for(request, gateway, model, asked)
        session = tenant.session(named.id)
        compared = None
        if asked.outline is not None:
            compared = model.prefixes.compare(tenant.name, named.id, asked.outline)
            compared.is_ahead = is_ahead
            operation.compared(model, tenant, answer, compared)
        title = title_of(raw.get("messages", ())) if gateway.config.session_titles else ""
        for_engine = await body.off_loop(partial(_encode, model.engine, raw, session))
    turn = TurnRequest(
        operation=operation.name,
        path=operation.path,
        session=session,
        body=for_engine,
        hints=TurnHints(
            parent=named.parent,
            is_child=named.is_child,
            retain_s=asked.translated.retain_s,
            is_task=asked.task_session is not None,
        ),
        compared=compared,
        client=client_name(state.headers),
        weight=tenant.weight,
        num_answers=asked.num_answers,
        title=title,
        foreign=asked.foreign,
        ignored=asked.ignored,
        left_out=asked.left_out,
        is_silent=is_silent,
        on_words=model.chats.on_words(tenant, named.id, asked.chain),
    )
    return TurnResponse(gateway, model, turn, state.id, answer, asked.translated.keep)


def _fit(raw: Json, model: ServedModel, config: GatewayConfig, asked: CheckedRequest) -> bool:
    """Write a checked body as its engine understands it; True if the answer's text is to be hidden.

    vLLM refuses ``max_tokens: 0``, which asks for none, so it is asked for one token.
    """
    raw["model"] = served_name(model, config, asked.model)
    if config.keep_reasoning and "messages" in raw:
        keep_reasoning(raw, model.served.template)
    _normalize(raw, model.served.max_context, _usual_length(config, asked.task_session))
    return model.served.engine == "vllm" and _have_one_token_made(raw)


async def _session_for(
    request: Request, gateway: Gateway, model: ServedModel, asked: CheckedRequest
) -> NamedSession:
    """Find the session of a turn; all but a task's is charged, raising as ``charge_session``."""
    tenant, state = charged_caller(request), state_of(request.scope)
    if asked.task_session is not None:
        named = _task_session(model, tenant, asked.session, asked.task_session)
    else:
        named = asked.session or NamedSession(
            model.chats.identify(tenant, asked.chain, model.sessions_of(tenant))
        )
        if asked.outline is not None and named_by_agent(state.headers):
            named = _session_of(gateway, model, tenant, named, asked.outline)
        await charge_session(request, model, named.id)
    if gateway.shared_sessions is not None and asked.session is not None:
        await gateway.shared_sessions.before_first_turn(model, tenant.session(named.id))
    state.session = named.id
    return named


def _check(
    operation: Operation,
    translate: Translate,
    tenant: Tenant,
    headers: Mapping[str, str],
    served: Welcome,
    images: ImageSupport,
    asked: Json,
) -> CheckedRequest:
    translated, engine = translate(asked), served.engine
    raw = dict(translated.raw)  # it may be the client's body, which is still read
    foreign: dict[str, str] = {}
    ignored: list[str] = []
    if operation.dialect is not None:
        ignored = ignored_fields(asked, operation.dialect)
        foreign = take_foreign(asked, raw, operation.dialect, engine)
    try:
        request = operation.validate(raw, images)
    except InvalidRequest as error:
        message, param = renamed(error.message, error.param, foreign)
        raise InvalidRequest(message, param, error.code, error.status) from error
    keywords: Sequence[str] = ()
    if request.has_schemas:
        made, keywords = with_known_keywords(raw, request.held_schemas, engine)
        raw |= made
        if engine == "vllm":
            request.count_schemas().check_lengths()
    if isinstance(request, ChatRequest):
        messages = raw["messages"] = with_known_parts(raw["messages"], request.messages)
    else:
        raw.pop("messages", None)  # a text has none
        messages = [raw["prompt"]]
    task_session = shared_task_session(raw) if "messages" in raw else None
    named = named_session(headers, asked, messages)
    chain: Sequence[Link] = ()
    outline: Outline | None = None
    if "messages" in raw or named is None:
        parts = hashed(request.model, messages, raw.get("tools"), tenant.salt)
        if named is None and task_session is None:
            chain = message_chain(parts, group_of(asked))
        if "messages" in raw:
            raw["messages"] = fitted(messages, served.template)
            outline = parts.outline
    for name in _PRIVATE_FIELDS & raw.keys():
        del raw[name]
    return CheckedRequest(
        translated=translated._replace(raw=raw),
        model=request.model,
        session=named,
        chain=chain,
        outline=outline,
        task_session=task_session,
        foreign=foreign,
        ignored=ignored,
        left_out=keywords,
        num_answers=request.num_answers,
    )


def _check_early(operation: Operation, model: ServedModel, asked: Json) -> None:
    """Check a copy of a body, as far as that is possible before its model is loaded."""
    if operation.dialect is not None:
        ignored_fields(asked, operation.dialect)
        take_foreign(asked, asked, operation.dialect, "")
    if operation.check_early is not None:
        operation.check_early(model, asked)


def _encode(engine: Engine, raw: Json, session: SessionRef) -> bytes:
    return msgspec.json.encode(engine.prepare_body(raw, session))


def _normalize(raw: Json, max_context: int, default_max_tokens: int) -> None:
    """Give fields that engines interpret differently the meaning that they have at OpenAI.

    ``stream_options`` go where nothing is streamed. A chat's limit of the whole context is left
    out, so that its answer may fill the room that the prompt leaves; a chat without a limit gets
    the default, if there is one. A text completion without a limit has 16 tokens, so its limit is
    lowered and not left out. A limit or seed of -1 is none, and a bias of zero is none.
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


def _have_usage_sent(raw: Json) -> bool:
    """Have the engine send a stream's token counts; True if its client did not ask for them."""
    options = raw.get("stream_options") or {}
    if not raw.get("stream") or options.get("include_usage"):
        return False
    raw["stream_options"] = {**options, "include_usage": True}
    return True


def _have_one_token_made(raw: Json) -> bool:
    """Have a chat take one token if it asks for none; True if it did."""
    if "messages" not in raw or not any(raw.get(name) == 0 for name in LIMITS):
        return False
    for name in LIMITS:
        if name in raw:
            raw[name] = 1
    return True


def served_name(model: ServedModel, config: GatewayConfig, asked: str) -> str:
    """Return the name of a served model, which may be asked for by its aliases.

    Raises:
        InvalidRequest: 404, it does not go by that name.
    """
    served = model.served.model
    if not (model.is_named(asked) or config.means_served(asked, served)):
        raise unknown_model(asked[:100], served)
    return served


def _session_of(
    gateway: Gateway, model: ServedModel, tenant: Tenant, named: NamedSession, outline: Outline
) -> NamedSession:
    """Find the row of an agent's request; one that there is no room for is not opened."""
    latest = partial(model.prefixes.latest, tenant.name)
    row = choose_session(named.id, outline, latest, model.sessions_of(tenant).is_quiet)
    if not has_room_for(gateway, tenant, model, row.id) or len(row.id.encode()) > MAX_ID_BYTES:
        return named
    parent = named.parent or (named.id if row.is_lesser and row.id.endswith(SUFFIX) else None)
    return NamedSession(row.id, parent, named.is_child or row.is_lesser)


def _task_session(
    model: ServedModel, tenant: Tenant, named: NamedSession | None, shared_row: str
) -> NamedSession:
    """Find the row of a task: that of its conversation, if this is known."""
    if named is None or not model.knows(tenant, named.id):
        return NamedSession(shared_row)
    id = named.id + TASK_SUFFIX
    fits = len(id.encode()) <= MAX_ID_BYTES
    return NamedSession(id, named.id) if fits else NamedSession(shared_row, named.id)


def _usual_length(config: GatewayConfig, task_session: str | None) -> int:
    """Return the length of an answer whose request names none; 0 = as the context has room."""
    usual = config.default_max_tokens
    return usual if task_session is None else min(usual or TASK_TOKENS, TASK_TOKENS)
