"""Requests of OpenAI's completions and embeddings and vLLM's /tokenize.

The gateway checks them once, with the functions ``validate_*``, which take parsed JSON. Known
fields have types and bounds; the struct's ``check`` has the rules that bounds cannot express.
Unknown fields are ignored, so newer clients keep working; fields that ask for something that is not
supported are refused.

Our engines decode the checked requests with the functions ``read_*``, which take a body; they check
the types of fields, but not the rules again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from engines.openai.errors import FieldError
from engines.openai.errors import InvalidRequest as InvalidRequest
from engines.openai.errors import error_body as error_body
from engines.openai.errors import error_type as error_type
from engines.openai.json_bodies import checked as checked
from engines.openai.json_bodies import decoded
from engines.openai.json_bodies import parse_json as parse_json
from engines.openai.messages import (
    NO_IMAGES,
    ImageSupport,
    Message,
    NamedTool,
    ResponseFormat,
    Tool,
)
from engines.openai.messages import Json as Json
from engines.openai.schemas.held import HeldSchema, held_formats, held_tools
from engines.openai.schemas.schema_count import SchemaCount

Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=10)]
# -1 and 0 both mean "off", as in vLLM.
TopK = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
NumTokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
NO_LIMIT: Final = -1  # the value in LM Studio and llama.cpp
TokenLimit = Annotated[int, msgspec.Meta(ge=NO_LIMIT, le=2**31 - 1)]
NumChoices = Annotated[int, msgspec.Meta(ge=1, le=16)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
StopList = Annotated[list[StopString], msgspec.Meta(max_length=16)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
BiasMap = Annotated[dict[str, Bias], msgspec.Meta(max_length=1024)]
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

_MAX_TOKEN_ID = 2**31 - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
MAX_ANSWERS = 128
MAX_PARTS = 8192  # of all messages together
# Arguments that only the engine sets; a client's own template would be code that we run.
_TEMPLATE_KEYS_OF_OURS = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "tokenize", "return_dict"}
    | {"add_generation_prompt", "continue_final_message", "return_tensors", "tokenizer_kwargs"}
    | {"padding", "truncation", "max_length", "return_assistant_tokens_mask", "processor_kwargs"}
)
TOKENIZE_PATH: Final = "/tokenize"
DETOKENIZE_PATH: Final = "/detokenize"
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# The most tokens that /tokenize counts, in contexts of the model: it should show a client by how
# much its prompt is too long, but the work must be bounded.
MAX_CONTEXTS: Final = 4
# The fields of a chat that its prompt depends on.
PROMPT_FIELDS: Final = frozenset(
    {"model", "messages", "tools", "chat_template_kwargs", "reasoning_effort"}
)
# Fields for a chat that is only tokenized: its tools enter the prompt, but constrain no answer.
HELD_TO_NOTHING: Final[Json] = {"tool_choice": "none", "response_format": None}
EMBEDDINGS_PATH: Final = "/v1/embeddings"
MAX_INPUTS: Final = 2048  # OpenAI's limit
MAX_EMBEDDED_TOKENS: Final = 300_000  # of all inputs together; OpenAI's limit
Inputs = Annotated[
    list[str | int | list[int]], msgspec.Meta(min_length=1, max_length=MAX_EMBEDDED_TOKENS)
]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and text completions have in common."""

    model: ModelName
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: BiasMap | None = None
    seed: Seed | None = None
    n: NumChoices | None = None
    stop: StopString | StopList | None = None
    # Zero is allowed: the prompt is only computed and kept for the next turn.
    max_tokens: TokenLimit | None = None
    # vLLM's fields; an engine that does not support one refuses it by name.
    min_tokens: NumTokens | None = None
    structured_outputs: Json | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        """Check the rules between fields. Raises ``FieldError``."""
        for key in self.bias_by_text:
            if not _TOKEN_ID.fullmatch(key) or int(key) > _MAX_TOKEN_ID:
                raise FieldError("logit_bias", f"{key[:40]!r} is no token id: keys are token ids")
        if self.has_schemas:
            self.count_schemas()
            for held in self.held_schemas:
                held.check()

    @property
    def has_schemas(self) -> bool:
        """True if a compiler or the model's template will get JSON schemas of the client."""
        return any((self.offered_tools, self.response_format, self.structured_outputs is not None))

    @property
    def held_schemas(self) -> Sequence[HeldSchema]:
        """The JSON schemas that the answer must obey."""
        return held_formats(self.response_format, self.structured_outputs)

    def count_schemas(self) -> SchemaCount:
        """Return the counts of all JSON schemas. Raises ``FieldError`` if they exceed a limit."""
        counted = SchemaCount()
        for i, tool in enumerate(self.offered_tools):
            if tool.function.parameters:
                field = f"tools[{i}].function.parameters"
                counted.add(field, tool.function.parameters, of_call=True)
        if self.response_format is not None and self.response_format.json_schema is not None:
            counted.add("response_format", self.response_format.json_schema.schema)
        counted.add_structured_outputs(self.structured_outputs)
        return counted

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The functions in the prompt, whether or not the model may call them."""
        return ()

    @property
    def bias_by_text(self) -> dict[str, float]:
        """``logit_bias`` without its zeros, which have no effect and may have any key."""
        return {key: bias for key, bias in (self.logit_bias or {}).items() if bias}

    @property
    def bias(self) -> dict[int, float]:
        """``logit_bias`` by token id."""
        return {int(key): bias for key, bias in self.bias_by_text.items()}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_answers(self) -> int:
        """The number of answers to all prompts together."""
        return self.num_choices

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ChatRequest(Body, frozen=True, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Json] | None = None
    function_call: str | Json | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: Json | None = None
    modalities: list[str] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.functions and self.function_call != "none":
            raise FieldError("functions", "send functions as tools: [{type, function}]")
        if self.modalities and self.modalities != ["text"]:
            raise FieldError("modalities", 'this engine is text only: send ["text"]')
        for key in _TEMPLATE_KEYS_OF_OURS.intersection(self.chat_template_kwargs or ()):
            raise FieldError("chat_template_kwargs", f"{key!r} cannot be set")
        self._check_parts()
        self._check_tools()

    def _check_parts(self) -> None:
        num_parts = sum(len(x.content) for x in self.messages if isinstance(x.content, list))
        if num_parts > MAX_PARTS:
            raise FieldError(
                "messages", f"{num_parts} content parts, more than {MAX_PARTS}: join them"
            )

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise FieldError("tools", "two tools have the same name")
        if self.tool_choice in ("required",) and not names:
            raise FieldError("tool_choice", "tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name[:128]
            raise FieldError("tool_choice", f"tool_choice names {name!r}, which is not in tools")

    @property
    def offered_tools(self) -> Sequence[Tool]:
        return self.tools or ()

    @property
    def held_schemas(self) -> Sequence[HeldSchema]:
        form = self.response_format
        beside = form is not None and form.type != "text" or bool(self.structured_outputs)
        return [*super().held_schemas, *held_tools(self.tools or (), self.tool_choice, beside)]

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens that the answer may have; None = as many as the context allows."""
        newer = self.max_completion_tokens
        limit = self.max_tokens if newer is None else newer
        return None if limit == NO_LIMIT else limit


class CompletionRequest(Body, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1)]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise FieldError("suffix", "this model did not learn to insert text before a suffix")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise FieldError("best_of", "best_of must be left out, or be equal to n")
        self._check_prompt()

    def _check_prompt(self) -> None:
        if isinstance(self.prompt, list) and len({type(x) for x in self.prompt}) > 1:
            raise FieldError("prompt", "a prompt is a string, token ids, or a list of either")
        if self.num_answers > MAX_ANSWERS:
            raise FieldError("prompt", f"prompts times n must be at most {MAX_ANSWERS}")
        for prompt in self.prompts:
            if isinstance(prompt, list) and not all(0 <= x <= _MAX_TOKEN_ID for x in prompt):
                raise FieldError("prompt", "a token id is negative or too large")

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_choices

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids; the list is made at every call."""
        return listed(self.prompt)


def listed(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the inputs, each a text or token ids, of a field that holds one or several."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [[x for x in given if isinstance(x, int)]]
    return [x for x in given if not isinstance(x, int)]


def validate_chat(raw: Json, image_support: ImageSupport = NO_IMAGES) -> ChatRequest:
    """Return a parsed chat request, checked. Raises ``InvalidRequest``."""
    request = _with_rules(checked(raw, ChatRequest))
    image_support.check_messages(request.messages)
    return request


def validate_completion(raw: Json, image_support: ImageSupport = NO_IMAGES) -> CompletionRequest:
    """Return a parsed text completion, checked; ``image_support`` is ignored.

    Raises ``InvalidRequest``.
    """
    return _with_rules(checked(raw, CompletionRequest))


class TokenizeText(msgspec.Struct, frozen=True):
    """A request to tokenize a plain text."""

    model: ModelName
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class Detokenize(msgspec.Struct, frozen=True):
    """A request for the text of tokens."""

    model: ModelName
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=1 << 20)]


def validate_tokenize(
    raw: Json, image_support: ImageSupport = NO_IMAGES
) -> ChatRequest | TokenizeText:
    """Return a parsed request to tokenize ``messages`` or a ``prompt``, checked.

    Raises:
        InvalidRequest: it has neither, or is malformed.
    """
    if "messages" in raw:
        prompt = {name: raw[name] for name in PROMPT_FIELDS & raw.keys()}
        return validate_chat(prompt | HELD_TO_NOTHING, image_support)
    return checked(raw, TokenizeText)


def validate_detokenize(raw: Json, image_support: ImageSupport = NO_IMAGES) -> Detokenize:
    """Return a parsed request for the text of tokens, checked. Raises ``InvalidRequest``."""
    return checked(raw, Detokenize)


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings."""

    model: ModelName
    input: str | Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    user: str | None = None

    def check(self) -> None:
        """Check the rules between fields. Raises ``FieldError``."""
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
    """Return a parsed request for embeddings, checked. Raises ``InvalidRequest``."""
    return _with_rules(checked(raw, EmbeddingsRequest))


R = TypeVar("R", ChatRequest, CompletionRequest, EmbeddingsRequest)


def _with_rules(request: R) -> R:
    """Check the rules between fields and return the request. Raises ``InvalidRequest``."""
    try:
        request.check()
    except FieldError as error:
        raise InvalidRequest(f"{error.field}: {error}", error.field) from error
    return request


_read_chat = msgspec.json.Decoder(ChatRequest)
_read_completion = msgspec.json.Decoder(CompletionRequest)
_read_embeddings = msgspec.json.Decoder(EmbeddingsRequest)


def read_chat(body: bytes) -> ChatRequest:
    """Decode a chat that the gateway has checked. Raises ``InvalidRequest``."""
    return decoded(body, _read_chat)


def read_completion(body: bytes) -> CompletionRequest:
    """Decode a text completion that the gateway has checked. Raises ``InvalidRequest``."""
    return decoded(body, _read_completion)


def read_embeddings(body: bytes) -> EmbeddingsRequest:
    """Decode a request for embeddings that the gateway has checked. Raises ``InvalidRequest``."""
    return decoded(body, _read_embeddings)
