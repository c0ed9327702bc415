"""Images in chats: which ones are taken, and how a chat holds one."""

from __future__ import annotations

from typing import Final, NamedTuple

from engines.openai.errors import InvalidRequest
from engines.openai.messages import DETAILS, Json, Message

# What a tool's result says if it is an image: that stands in a message of the user after it.
SHOWN_BELOW: Final = "(The result is the image in the next message.)"
_SHOWN_BY: Final = ("user", "tool")  # templates have no place for others' images, or drop them
_HERE: Final = "data:image/"
_ELSEWHERE: Final = ("http://", "https://")


class Sight(NamedTuple):
    """The images that are taken: none, those in the request itself, or also those of other servers.

    An engine that fetches images reaches every host that its machine does, for any client.
    """

    sees: bool = False
    fetches: bool = False

    def check(self, url: object, where: str, kind: str) -> str:
        """Return the address of an image that is taken.

        Args:
            where: the client's field, for errors; ``kind`` is its word for an image.

        Raises:
            InvalidRequest: images are not seen here, or not this one.
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

    def part(self, url: object, where: str, kind: str, detail: object = None) -> Json:
        """Make the part of a chat's message that holds an image. See ``check``."""
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


BLIND: Final = Sight()


def _wrong(where: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {message}", where)
