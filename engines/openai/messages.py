"""The parts of a chat request: messages, images, tools, the requested format of the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from engines.openai.errors import FieldError, InvalidRequest

Json: TypeAlias = dict[str, Any]
DETAILS: Final = ("auto", "low", "high")  # OpenAI's values for an image's ``detail``
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
# The text of a tool's result that is an image; the image follows in a message of the user.
SHOWN_BELOW: Final = "(The result is the image in the next message.)"
# These replace an image or a file that is not accepted in a tool's result, or in a message of the
# assistant, which another model has written. A client sends both again at every turn, so refusing
# them would end the conversation for good.
IMAGE_LEFT_OUT: Final = "(An image was left out here: it cannot be shown to this model.)"
FILE_LEFT_OUT: Final = "(A file was left out here: it cannot be shown to this model.)"
# Types of parts that are not text, in all dialects.
MEDIA: Final = frozenset(
    {"image", "document", "image_url", "input_image", "output_image", "image_file"}
    | {"file", "input_file", "audio", "input_audio", "output_audio", "video_url"}
)


def in_place_of(kind: str, said_by: Literal["result", "answer"] = "result") -> tuple[str, str]:
    """Return the sentence that replaces a part that is not accepted, and a word for the part."""
    if "image" in kind or "screenshot" in kind:
        return IMAGE_LEFT_OUT, f"{said_by}_image"
    return FILE_LEFT_OUT, f"{said_by}_file"


# Lone surrogates, as JSON inside a text escapes them; ``_ESCAPE`` skips escaped backslashes.
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # both halves
    r"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
_SHOWN_BY: Final = ("user", "tool")  # templates refuse or drop images in messages of other roles
_HERE: Final = "data:image/"
_ELSEWHERE: Final = ("http://", "https://")


class ImageUrl(msgspec.Struct, frozen=True):
    """An image: its address, or a data URL with the image itself."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content: text, a refusal, or an image (see ``images.ImageSupport``)."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None

    def __post_init__(self) -> None:
        if self.type not in ("text", "refusal", "image_url"):
            raise FieldError("type", f"this engine is text only; {self.type[:40]!r} is not taken")
        if getattr(self, self.type) is None:
            raise FieldError(self.type, f"a {self.type} part needs {self.type!r}")
        if self.image_url is not None and self.type != "image_url":
            raise FieldError("image_url", "a part holds an image or text, not both")

    @property
    def body(self) -> str | None:
        """The part's text or refusal; None for an image."""
        return self.text if self.type == "text" else self.refusal

    @property
    def plain(self) -> Json:
        """The part as JSON, with only the fields that are known here."""
        if self.image_url is None:
            return {"type": self.type, self.type: self.body}
        image = {"url": self.image_url.url}
        if self.image_url.detail in DETAILS:
            image["detail"] = self.image_url.detail
        return {"type": self.type, "image_url": image}


# Bounded, as a body of megabytes could otherwise become a million objects.
ContentParts = Annotated[list[ContentPart], msgspec.Meta(max_length=1024)]


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str = ""


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the assistant made in an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ContentParts | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the name in newer releases of vLLM, and at OpenRouter
    thinking: Any = None  # the name at Ollama
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None

    def __post_init__(self) -> None:
        if self.content is None and self.role not in ("assistant", "function"):
            raise FieldError("content", f"a {self.role} message needs content")
        if self.role == "tool" and not self.tool_call_id:
            raise FieldError("tool_call_id", "a tool message names the call that it answers")
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", "only assistant messages have tool_calls")

    @property
    def text(self) -> str:
        """All text of the message, as one string."""
        if isinstance(self.content, list):
            return "".join(part.body or "" for part in self.content)
        return self.content or self.refusal or ""

    @property
    def thought(self) -> str | None:
        """The model's reasoning before the message, under any of its three names."""
        given = (self.reasoning_content, self.reasoning, self.thinking)
        return next((x for x in given if isinstance(x, str) and x), self.reasoning_content)


def with_known_parts(messages: Sequence[Json], read: Sequence[Message]) -> list[Json]:
    """Return messages whose contents have only the parts, and fields of parts, that were checked.

    An engine may use others: vLLM fetches the address in a part of any type, and takes a part's
    ``uuid`` for the hash of its image, by which it caches images across tenants. Lone surrogates in
    arguments of calls are replaced, since templates would write them into the prompt.

    Args:
        messages: the messages as the client sent them.
        read: the same messages, decoded and checked.
    """
    return [_as_checked(*x) for x in zip(messages, read, strict=True)]


def _as_checked(message: Json, known: Message) -> Json:
    if isinstance(known.content, list):
        message = {**message, "content": [part.plain for part in known.content]}
    if any(_HALF.search(call.function.arguments) for call in known.tool_calls or ()):
        message = {**message, "tool_calls": [_with_whole_text(x) for x in message["tool_calls"]]}
    return message


def _with_whole_text(call: Json) -> Json:
    function = call["function"]
    text, _ = without_halves(function.get("arguments", ""))
    return {**call, "function": {**function, "arguments": text}}


def without_halves(text: str) -> tuple[str, int]:
    """Return a text with escaped lone surrogates replaced by U+FFFD, and their number."""
    if not _HALF.search(text):
        return text, 0
    made = _ESCAPE.sub(lambda x: r"\ufffd" if x["half"] else x[0], text)
    return made, made.count(r"\ufffd") - text.count(r"\ufffd")


class Function(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchema(msgspec.Struct, frozen=True):
    name: str = "response"
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise FieldError("json_schema", "type json_schema needs json_schema")


class ImageSupport(NamedTuple):
    """States which images are accepted: none, those in the request itself, or fetched ones, too.

    An engine that fetches images lets any client reach every host that its machine can reach.
    """

    sees: bool = False
    fetches: bool = False

    def check(self, url: object, where: str, kind: str) -> str:
        """Return the address of an image that is accepted.

        Args:
            where: the client's field, for errors.
            kind: the client's word for an image.

        Raises:
            InvalidRequest: no images are accepted here, or not this one.
        """
        if not self.sees:
            raise _wrong(f"{where}.type", f"this engine is text only; {kind!r} is not taken")
        if not isinstance(url, str):
            raise _wrong(where, f"{kind}: the address of an image is needed, as a string")
        if url[: len(_HERE)].lower() == _HERE:
            return url
        if not url[:8].lower().startswith(_ELSEWHERE):
            raise _wrong(where, f"{kind}: send the image itself, as data:image/...;base64,...")
        if not self.fetches:
            message = (
                "images are not fetched from other servers here (gateway.remote_images): send the"
                " image itself, as data:image/...;base64,..."
            )
            raise _wrong(where, f"{kind}: {message}")
        return url

    def takes(self, url: object) -> bool:
        """Return whether an image is accepted; see ``check``."""
        try:
            self.check(url, "", "")
        except InvalidRequest:
            return False
        return True

    def part(self, url: object, where: str, kind: str, detail: object = None) -> Json:
        """Return the part of a chat's message for an image. Raises as ``check`` does."""
        image: Json = {"url": self.check(url, where, kind)}
        if isinstance(detail, str) and detail in DETAILS:
            image["detail"] = detail
        return {"type": "image_url", "image_url": image}

    def check_messages(self, messages: list[Message]) -> None:
        """Check all images of a chat's messages. Raises ``InvalidRequest``."""
        for i, message in enumerate(messages):
            if not isinstance(message.content, list):
                continue
            for j, part in enumerate(message.content):
                if part.image_url is None:
                    continue
                where = f"messages[{i}].content[{j}]"
                if message.role not in _SHOWN_BY:
                    raise _wrong(
                        f"{where}.type",
                        f"only text is taken from the {message.role}; show images as the user",
                    )
                self.check(part.image_url.url, where, part.type)


NO_IMAGES: Final = ImageSupport()


def _wrong(where: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {message}", where)
