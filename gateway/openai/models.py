"""/v1/models, embeddings, tokenize and detokenize.

None of these is a turn: they have no session, and nothing of them is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import HasReplicas
from engines.openai.errors import context_too_long
from engines.openai.foreign_request import unknown_fields
from engines.openai.messages import ImageSupport, with_known_parts
from engines.openai.requests import (
    DETOKENIZE_PATH,
    EMBEDDINGS_PATH,
    MAX_CONTEXTS,
    TOKENIZE_PATH,
    ChatRequest,
    Detokenize,
    EmbeddingsRequest,
    Json,
    TokenizeText,
    validate_detokenize,
    validate_embeddings,
    validate_tokenize,
)
from engines.openai.schemas.held import with_well_formed_tools
from gateway.config import ANY_MODEL, GatewayConfig
from gateway.gateway import Gateway
from gateway.models import ServedModel
from gateway.openai.chat_fields import with_results
from gateway.relay.answer import parse_usage
from gateway.relay.question import answer_to
from gateway.relay.turn_response import IGNORED_HEADER
from gateway.request.body import body_for_engine
from gateway.request.callers import charged_caller, gateway_of, sees_all, state_of
from gateway.request.fit import served_name
from gateway.request.routing import json_response, new_router, takes

router = new_router()
_OPERATION = "embeddings"  # OpenTelemetry's name
_EMBEDDINGS_TAKE = ("input", "encoding_format", "dimensions")
# Fields of /tokenize that the engine gets; a client's ``chat_template`` would be code that we run.
_TAKEN = frozenset(
    {"messages", "tools", "chat_template_kwargs", "reasoning_effort", "prompt", "tokens"}
    | {"add_special_tokens", "return_token_strs"}
)


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    with_replicas = sees_all(request, charged_caller(request))
    gateway = gateway_of(request)
    aliases = [x for x in gateway.config.model_aliases if x != ANY_MODEL]
    named = [(x, name) for x in gateway.models for name in (x.name, *x.aliases)]
    named += [(gateway.models.default, name) for name in aliases]
    models = [_model(gateway, *x, with_replicas) for x in named]
    # Codex expects a catalogue of its own in ``models``, too; an empty one does no harm.
    return json_response({"object": "list", "data": models, "models": []})


@router.get("/v1/models/{name:path}")  # hub ids have slashes
async def show_model(request: Request) -> Response:
    with_replicas = sees_all(request, charged_caller(request))
    gateway = gateway_of(request)
    name = request.path_params["name"]
    model = gateway.models.named(name, gateway.config)
    return json_response(_model(gateway, model, name, with_replicas))


def _model(gateway: Gateway, model: ServedModel, name: str, with_replicas: bool) -> dict[str, Any]:
    """Return a model's entry; with replicas, their addresses and troubles, for admins only."""
    welcome = model.engine.welcome or model.seen
    max_context = welcome.max_context if welcome else None  # None until the first load
    created = datetime.fromtimestamp(gateway.started_at, UTC)
    engine = model.engine
    replicas = {}
    if with_replicas and isinstance(engine, HasReplicas):
        replicas = {"replicas": engine.replicas}
    return {
        "id": name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "thermocline",
        "max_model_len": max_context,
        "root": model.name,
        "state": model.state,
        "engine": welcome.engine if welcome else None,
        **replicas,
        # Anthropic's names for the same, for its clients.
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_context,
    }


@router.post(EMBEDDINGS_PATH, openapi_extra=takes(EmbeddingsRequest))
async def embeddings(request: Request) -> Response:
    """Embed texts, or token ids, with the served model."""
    model, answer, ignored = await _answer(request)
    state_of(request.scope).body.give_back()  # the request's body has been freed
    if usage := parse_usage(answer):
        welcome = model.engine.welcome  # None if the engine has died meanwhile
        gateway_of(request).metrics.used(_OPERATION, welcome.model if welcome else "", usage)
        state_of(request.scope).used_tokens(usage.prompt_tokens)
    response = json_response(answer)
    if ignored:
        response.headers[IGNORED_HEADER] = ", ".join(ignored)
    return response


async def _answer(request: Request) -> tuple[ServedModel, bytes, list[str]]:
    """Ask the engine; return the model, its answer, and the unknown fields of the request.

    The request's body is held, and counted, until the answer is here.
    """
    model, question, ignored = await _embeddings_question(request)
    limit_s = gateway_of(request).config.request_timeout_s
    return model, await answer_to(request, model, EMBEDDINGS_PATH, question, limit_s), ignored


async def _embeddings_question(request: Request) -> tuple[ServedModel, bytes, list[str]]:
    charged_caller(request)
    config = gateway_of(request).config
    async with body_for_engine(request, check=_check_embeddings) as body:
        made = await body.off_loop(partial(_embeddings_for_engine, body.model, config, body.json))
        return body.model, *made


def _check_embeddings(model: ServedModel, raw: Json) -> None:
    validate_embeddings(raw)


def _embeddings_for_engine(
    model: ServedModel, config: GatewayConfig, raw: Json
) -> tuple[bytes, list[str]]:
    """Return the body for the engine, and the unknown fields of the client's body."""
    name = served_name(model, config, validate_embeddings(raw).model)
    question = {name: raw[name] for name in _EMBEDDINGS_TAKE if raw.get(name) is not None}
    ignored = unknown_fields(raw, EmbeddingsRequest.__struct_fields__, ())
    return msgspec.json.encode({**question, "model": name}), ignored


@router.post(TOKENIZE_PATH)
async def tokenize(request: Request) -> Response:
    return await _ask(request, TOKENIZE_PATH, _validate_tokenize)


def _validate_tokenize(raw: Json, image_support: ImageSupport) -> ChatRequest | TokenizeText:
    if isinstance(raw.get("messages"), list):
        raw["messages"] = with_results(raw["messages"], image_support, [])
    return validate_tokenize(raw, image_support)


@router.post(DETOKENIZE_PATH, openapi_extra=takes(Detokenize))
async def detokenize(request: Request) -> Response:
    return await _ask(request, DETOKENIZE_PATH, validate_detokenize)


async def _ask(
    request: Request, path: str, validate: Callable[[Json, ImageSupport], Any]
) -> Response:
    # ``_question`` parses the body, so that it is freed while the engine works.
    model, question = await _question(request, validate)
    answer = await answer_to(request, model, path, question)
    return json_response(answer)


async def _question(
    request: Request, validate: Callable[[Json, ImageSupport], Any]
) -> tuple[ServedModel, bytes]:
    charged_caller(request)
    config = gateway_of(request).config
    check = partial(_check_early, validate)
    async with body_for_engine(request, check=check) as body:
        made = await body.off_loop(partial(_for_engine, body.model, config, validate, body.json))
        return body.model, made


def _check_early(
    validate: Callable[[Json, ImageSupport], Any], model: ServedModel, raw: Json
) -> None:
    raw.setdefault("model", model.label)
    validate(raw, model.last_image_support)


def _for_engine(
    model: ServedModel,
    config: GatewayConfig,
    validate: Callable[[Json, ImageSupport], Any],
    raw: Json,
) -> bytes:
    raw.setdefault("model", model.served.model)  # optional, as in vLLM
    asked = validate(raw, model.image_support)
    if isinstance(asked, Detokenize) and len(asked.tokens) > (
        MAX_CONTEXTS * model.served.max_context
    ):
        raise context_too_long(model.served.max_context, len(asked.tokens), "tokens")
    question = {name: raw[name] for name in _TAKEN & raw.keys()}
    if isinstance(asked, ChatRequest):
        question["messages"] = with_known_parts(raw["messages"], asked.messages)
        question |= with_well_formed_tools(question)[0]
    return msgspec.json.encode({**question, "model": served_name(model, config, asked.model)})
