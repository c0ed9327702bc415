"""The path of a turn's request to the engine and back, the same for every dialect.

charge the key -> wait for the model -> read the body -> recall, translate, validate it -> find the
session -> wait for a slot, open the engine, relay its answer (gateway.relay.turn_response)

An ``Operation`` describes a dialect: how a body becomes the engine's, and an answer the client's.
If the translation needs stored objects, the operation reads them first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import Engine, SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.foreign_request import Dialect, ignored_fields, renamed, take_foreign
from engines.openai.messages import ImageSupport, with_known_parts
from engines.openai.requests import ChatRequest, CompletionRequest, Json
from engines.openai.schemas.held import with_known_keywords
from engines.pool.on_demand import OnDemand
from engines.wire import Welcome
from gateway.errors import Failure
from gateway.gateway import Gateway
from gateway.identity.known_chats import Link, message_chain
from gateway.identity.names import (
    MAX_ID_BYTES,
    SUFFIX,
    TASK_SUFFIX,
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
from gateway.request.body import ParsedBody, body_for_engine
from gateway.request.callers import (
    charge_session,
    charged_caller,
    gateway_of,
    has_room_for,
    state_of,
)
from gateway.request.fit import LIMITS, fit_to_engine, fitted, have_usage_sent
from gateway.watch.live import title_of
from scheduler.session import TurnHints

# Names of sessions, which only the gateway reads, and hints that only it may give to an engine.
# ``take_foreign`` has already removed those of vLLM's own fields that a client may not set.
_PRIVATE_FIELDS = frozenset(
    {"conversation", "kv_hints", "previous_response_id", "prompt_cache_key"}
    | {"prompt_cache_options", "prompt_cache_retention"}
)


class Translated(NamedTuple):
    """A request of any dialect, translated into the body for the engine."""

    raw: Json  # the body for the engine; its ``model`` is the name that the client gave
    answer: AnswerFormat
    keep: StoreAnswer | None = None  # None: nothing of the answer is stored
    dropped: Sequence[str] = ()  # kinds of parts that were left out, for metrics
    retain_s: float = 0.0  # for how long the client asks to keep its session


# Translates the client's body into the engine's; raises ``InvalidRequest``.
Translate: TypeAlias = Callable[[Json], Translated]


def as_it_is(raw: Json) -> Translated:
    """Return a body unchanged, since engines know its dialect."""
    return Translated(raw, AnswerFormat(), retain_s=asked_seconds(raw))


class Operation(msgspec.Struct, frozen=True):
    """One kind of turn, such as a chat completion or a message."""

    validate: Callable[[Json, ImageSupport], ChatRequest | CompletionRequest]
    # Reads the stored objects that a body refers to, and returns the translation for this request.
    # It may change the body; the session's id is read afterwards. Raises ``InvalidRequest``.
    recall: Callable[[Gateway, Tenant, ParsedBody], Awaitable[Translate]]
    # Checks a copy of the body, which it may change, before its model is loaded. Raises likewise.
    check_early: Callable[[ServedModel, Json], object] | None = None
    # Writes the last event of a stream that failed before the engine was asked.
    failed: Callable[[Failure], bytes] = Failure.event
    # Called before the answer, with the comparison of this prompt and the session's previous one.
    compared: Callable[[ServedModel, Tenant, AnswerFormat, Compared], None] = lambda *_: None
    # None: fields that other servers define are not accepted.
    dialect: Dialect | None = None
    name: str = "chat"  # OpenTelemetry's
    path: str = "/v1/chat/completions"  # the engine's


class Identity(NamedTuple):
    """The session that a request names, or the hashes by which it may be recognised."""

    session: NamedSession | None  # None: the client named none
    task_session: str | None  # None: it is no task
    chain: Sequence[Link]  # the messages' hashes, by which a chat without a name is recognised
    outline: Outline | None  # None: it is no chat


class CheckedRequest(NamedTuple):
    """A request whose body has been parsed, translated and validated."""

    translated: Translated
    model: str
    identity: Identity
    foreign: Mapping[str, str]  # engine's field -> the client's name of it, where they differ
    ignored: Sequence[str]  # fields that this server does not know
    left_out: Sequence[str]  # keywords of JSON schemas that no grammar enforces
    num_answers: int


async def accept(request: Request, operation: Operation) -> Response:
    """Return the response that will serve a turn; a stream may begin before its model is loaded.

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
    """Check a request, find its session, and return the response that will serve it.

    Args:
        on_wait: called with the body if the request has to wait for its model.

    Raises:
        InvalidRequest: the request cannot be served as it stands.
        RequestRefused: a limit of the caller's key, or of all bodies together, is reached.
        EngineUnavailable: the engine is not ready, or not again in time.
    """
    gateway, tenant, state = gateway_of(request), charged_caller(request), state_of(request.scope)
    early = partial(_check_early, operation)
    async with body_for_engine(request, check=early, on_wait=on_wait) as body:
        model = body.model
        translate = await operation.recall(gateway, tenant, body)
        check = partial(_check, operation, translate, tenant, state.headers)
        served, images = model.served, model.image_support  # the engine may die meanwhile
        asked = await body.off_loop(partial(check, served, images, body.json))
        raw, answer = asked.translated.raw, asked.translated.answer
        identity = asked.identity
        gateway.metrics.left_out(asked.translated.dropped)
        is_ahead = any(x.get(name) == 0 for x in (raw, body.json) for name in LIMITS)
        is_task = identity.task_session is not None
        is_silent = fit_to_engine(raw, model, gateway.config, asked.model, is_task=is_task)
        answer.hides_usage = have_usage_sent(raw)
        named = await _session_for(request, gateway, model, identity)
        session = tenant.session(named.id)
        compared = None
        if identity.outline is not None:
            compared = model.prefixes.compare(tenant.name, named.id, identity.outline)
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
            is_task=is_task,
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
        on_words=model.chats.on_words(tenant, named.id, identity.chain),
    )
    return TurnResponse(gateway, model, turn, state.id, answer, asked.translated.keep)


async def _session_for(
    request: Request, gateway: Gateway, model: ServedModel, identity: Identity
) -> NamedSession:
    """Find a turn's session; charge it, unless it is a task's. Raises as ``charge_session``."""
    tenant, state = charged_caller(request), state_of(request.scope)
    if identity.task_session is not None:
        named = _task_session(model, tenant, identity.session, identity.task_session)
    else:
        named = identity.session or NamedSession(
            model.chats.identify(tenant, identity.chain, model.sessions_of(tenant))
        )
        if identity.outline is not None and named_by_agent(state.headers):
            named = _session_of(gateway, model, tenant, named, identity.outline)
        await charge_session(request, model, named.id)
    if gateway.shared_sessions is not None and identity.session is not None:
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
    """Translate and validate a body. Raises ``InvalidRequest``."""
    translated, engine = translate(asked), served.engine
    raw = dict(translated.raw)  # a copy: it may be the client's body, which is read below
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
        raw.pop("messages", None)  # a text completion has none
        messages = [raw["prompt"]]
    identity = _identity(request.model, tenant, headers, asked, raw, messages)
    if "messages" in raw:
        raw["messages"] = fitted(messages, served.template)
    for name in _PRIVATE_FIELDS & raw.keys():
        del raw[name]
    return CheckedRequest(
        translated=translated._replace(raw=raw),
        model=request.model,
        identity=identity,
        foreign=foreign,
        ignored=ignored,
        left_out=keywords,
        num_answers=request.num_answers,
    )


def _identity(
    model: str,
    tenant: Tenant,
    headers: Mapping[str, str],
    asked: Json,
    raw: Json,
    messages: Sequence[Any],
) -> Identity:
    """Find what names a request's session; hash its messages if that may be needed.

    Args:
        asked: the client's body.
        raw: its translation for the engine.
        messages: those of ``raw``, checked; of a text completion, its prompt.
    """
    is_chat = "messages" in raw
    session = named_session(headers, asked, messages)
    task_session = shared_task_session(raw) if is_chat else None
    if not is_chat and session is not None:
        return Identity(session, task_session, (), None)
    parts = hashed(model, messages, raw.get("tools"), tenant.salt)
    is_unnamed = session is None and task_session is None
    chain = message_chain(parts, group_of(asked)) if is_unnamed else ()
    return Identity(session, task_session, chain, parts.outline if is_chat else None)


def _check_early(operation: Operation, model: ServedModel, asked: Json) -> None:
    """Check a copy of a body, as far as that is possible before its model is loaded."""
    if operation.dialect is not None:
        ignored_fields(asked, operation.dialect)
        take_foreign(asked, asked, operation.dialect, "")
    if operation.check_early is not None:
        operation.check_early(model, asked)


def _encode(engine: Engine, raw: Json, session: SessionRef) -> bytes:
    return msgspec.json.encode(engine.prepare_body(raw, session))


def _session_of(
    gateway: Gateway, model: ServedModel, tenant: Tenant, named: NamedSession, outline: Outline
) -> NamedSession:
    """Choose an agent's session: ``named``, or one beside it if there is room for another."""
    latest = partial(model.prefixes.latest, tenant.name)
    row = choose_session(named.id, outline, latest, model.sessions_of(tenant).is_quiet)
    if not has_room_for(gateway, tenant, model, row.id) or len(row.id.encode()) > MAX_ID_BYTES:
        return named
    parent = named.parent or (named.id if row.is_lesser and row.id.endswith(SUFFIX) else None)
    return NamedSession(row.id, parent, named.is_child or row.is_lesser)


def _task_session(
    model: ServedModel, tenant: Tenant, named: NamedSession | None, shared_row: str
) -> NamedSession:
    """Return a task's session: that of its conversation if known here, else ``shared_row``."""
    if named is None or not model.knows(tenant, named.id):
        return NamedSession(shared_row)
    id = named.id + TASK_SUFFIX
    fits = len(id.encode()) <= MAX_ID_BYTES
    return NamedSession(id, named.id) if fits else NamedSession(shared_row, named.id)
