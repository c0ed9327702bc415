"""Keeps text of users from being read as control tokens of the model.

A chat template writes control tokens around messages (``<|im_start|>``), and the tokenizer finds
them by their spelling, also in the messages. So before the template is rendered, every such
spelling in a request is replaced by a mark, a word that does not occur in texts. When the prompt is
encoded, a mark becomes the tokens of the same letters as plain text. A text without such a spelling
is not changed: its tokens stay the same, and so do those of an answer in the next prompt.

Tokens that are only ``added`` to a tokenizer, such as Qwen's ``<tool_call>``, are left as they are:
they change no role, and occur in answers that come back. Some tokenizers mark the tokens of their
roles as only added, too (DeepSeek's ``<｜User｜>``), so every token with bars in the chat template
is treated as a control token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias

Encode: TypeAlias = Callable[[str], list[int]]
_DIGITS: Final = 6
_BARS: Final = frozenset("|｜")
# Stands between the letters of a control token that cannot be encoded as plain text in another way.
# It is not seen.
_JOINER: Final = "\u2060"


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, tokenizer: Any, markers: Collection[str] = (), template: str = "") -> None:
        """Look at a tokenizer of ``transformers``.

        Args:
            markers: control tokens that the model's own words have when they come back, around
                reasoning and calls; messages of the assistant keep them.
            template: of the prompt, if it is not the tokenizer's own.
        """
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        template = template or str(getattr(tokenizer, "chat_template", None) or "")
        unsaid = {str(x) for x in added.values() if not x.special and _is_role(str(x), template)}
        self._ids = {
            str(x): id_ for id_, x in added.items() if str(x) and (x.special or str(x) in unsaid)
        }
        self._texts = list(self._ids)
        self._numbers = {text: i for i, text in enumerate(self._texts)}
        # Those that take nothing of the text beside them can stand for others.
        self._clean = [
            str(x)
            for x in added.values()
            if x.special and str(x) and not (x.lstrip or x.rstrip or x.single_word or x.normalized)
        ]
        self._word = "zq" + secrets.token_hex(8)
        self._mark = re.compile(self._word + f"([0-9]{{{_DIGITS}}})")
        self._any = _pattern(self._texts)
        # Calls that were not parsed come back as they were written, and are to have the same
        # tokens.
        kept = {*markers, *(x for x in unsaid if "tool" in x)}
        self._assistants = _pattern([x for x in self._texts if x not in kept])

    def marked(self, messages: Iterable[Any]) -> list[Any]:
        """Return messages in which every spelling of a control token is a mark."""
        return [self._of_message(x) for x in messages]

    def marked_value(self, value: Any) -> Any:
        """Return JSON, such as that of tools, in which every spelling is a mark."""
        return self._in(value, self._any)

    def has_marks(self, text: str) -> bool:
        return self._word in text

    def unmarked(self, value: Any) -> Any:
        """Return JSON with the spellings again."""
        return _replaced(value, self._mark, self._spelled_one)

    def encode(self, text: str, encode: Encode) -> list[int]:
        """Encode a prompt; its marks become plain text.

        Args:
            encode: makes tokens of a text, control tokens by their spelling.
        """
        if not self.has_marks(text):
            return encode(text)
        between, numbers = self._split(text)
        if self._clean:
            # A control token that the prompt hardly has stands where a mark was, so that what is
            # beside it is encoded as it would be beside any other.
            stand_in = min(self._clean, key=lambda x: sum(map(_count(x), between)))
            ids = encode(stand_in.join(between))
            own = list(map(_count(stand_in), between))
            if ids.count(self._ids[stand_in]) == sum(own) + len(numbers):
                return self._exchanged(ids, self._ids[stand_in], own, numbers)
        spelled = [_JOINER.join(self._texts[x]) for x in numbers] + [""]
        return encode("".join(x + y for x, y in zip(between, spelled, strict=True)))

    def _split(self, text: str) -> tuple[list[str], list[int]]:
        """Return the numbers of the marks, and the text before, between and after them.

        What has another number is no mark of ours: a template has cut one, and digits follow.
        """
        first, *rest = self._mark.split(text)  # number, text, number, ..., text
        between, numbers = [first], list[int]()
        for digits, letters in zip(rest[::2], rest[1::2], strict=True):
            if int(digits) < len(self._texts):
                numbers.append(int(digits))
                between.append(letters)
            else:
                between[-1] += self._word + digits + letters
        return between, numbers

    def _exchanged(
        self, ids: list[int], stand_in: int, own: list[int], numbers: list[int]
    ) -> list[int]:
        """Put plain text where a token stands in; ``own``: how often it does not before each."""
        written: list[int] = []
        passed = mark = 0
        for token in ids:
            if token == stand_in and mark < len(numbers) and passed == own[mark]:
                written += self._plain(numbers[mark])
                passed, mark = 0, mark + 1
                continue
            passed += token == stand_in
            written.append(token)
        return written

    def _of_message(self, message: Any) -> Any:
        is_own = isinstance(message, Mapping) and message.get("role") == "assistant"
        return self._in(message, self._assistants if is_own else self._any)

    def _in(self, value: Any, spellings: re.Pattern[str] | None) -> Any:
        if spellings is None:
            return value
        return _replaced(value, spellings, self._marked_one)

    def _marked_one(self, found: re.Match[str]) -> str:
        return f"{self._word}{self._numbers[found[0]]:0{_DIGITS}d}"

    def _spelled_one(self, found: re.Match[str]) -> str:
        number = int(found[1])
        return self._texts[number] if number < len(self._texts) else found[0]

    def _plain(self, number: int) -> list[int]:
        """Return the tokens of a control token's spelling as plain text."""
        text = self._texts[number]
        controls = set(self._ids.values())
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            ids = _plain_ids(backend, text)
            if not controls.intersection(ids):
                return ids
        letters = (self._tokenizer.encode(x, add_special_tokens=False) for x in text)
        return [x for ids in letters for x in ids if x not in controls]


def _is_role(text: str, template: str) -> bool:
    """Say whether a chat template writes this token, and its spelling is one of control tokens."""
    return not _BARS.isdisjoint(text) and text in template


def _plain_ids(backend: Any, text: str) -> list[int]:
    """Encode by the parts of a tokenizer that know no added tokens."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    if words[0].startswith("▁"):  # put in front of a text, and this is the middle of one
        words[0] = words[0][1:]
    return [token.id for word in words if word for token in backend.model.tokenize(word)]


def _count(text: str) -> Callable[[str], int]:
    return lambda piece: piece.count(text)


def _replaced(value: Any, what: re.Pattern[str], by: Callable[[re.Match[str]], str]) -> Any:
    if isinstance(value, str):
        return what.sub(by, value)
    if isinstance(value, Mapping):
        return {_replaced(k, what, by): _replaced(x, what, by) for k, x in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):  # pydantic's are no lists
        return [_replaced(x, what, by) for x in value]
    return value


def _pattern(texts: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern of the longest of these texts, by their common beginnings.

    Some tokenizers have thousands, and an alternation tries one after the other.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branches(tree)) if tree else None


def _branches(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _branches(rest) for char, rest in node.items() if char]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")
