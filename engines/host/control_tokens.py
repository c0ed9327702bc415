"""Keeps the text of users from being tokenized as control tokens of the model.

A chat template writes control tokens around messages (``<|im_start|>``), and the tokenizer finds
them by their spelling, also inside the messages. So before the template is rendered, every such
spelling in a request is replaced by a mark, a random word that does not occur in texts. When the
prompt is encoded, a mark becomes the tokens of the original spelling as plain text. A text without
such a spelling is not changed, so neither are its tokens.

Some tokenizers make control tokens of other spellings, too: they normalise a text first (a
full-width ``＜ｓ＞`` becomes ``<s>``), or their model has control tokens among its pieces. With
these, the encoded prompt is checked: a control token where the prompt does not spell one comes from
a message, and the text there becomes a mark as well.

Added tokens that are not ``special``, such as Qwen's ``<tool_call>``, are left as they are: they
start no role, and occur in answers that clients send back. Some tokenizers do not mark even the
tokens of their roles as special (DeepSeek's ``<｜User｜>``), so every added token with bars that
the chat template contains is treated as a control token.

The tokenizers library panics on some texts ("AddedVocabulary bad split"), where added tokens
overlap and strip the blanks beside them. Its ``PanicException`` does not derive from ``Exception``,
so it would end a thread or a task; here it becomes an error that refuses the request.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, Final, TypeAlias

Encode: TypeAlias = Callable[[str], list[int]]
_DIGITS: Final = 6
_OF_CHAT: Final = 10**_DIGITS - 1  # the number of the mark that ends a chat and has no text
_ROUNDS: Final = 4  # attempts to encode a prompt and mark control tokens made of other spellings
_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
_NOT_A_LETTER: Final = "\U0010fffd"
_BARS: Final = frozenset("|｜")
_OF_TEXT: Final = ("text", "refusal")  # fields of a content part that hold text
# An invisible character that is written between the letters of a control token that cannot be
# encoded as plain text in another way.
_JOINER: Final = "\u2060"


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, tokenizer: Any, markers: Collection[str] = (), template: str = "") -> None:
        """Find the control tokens of a ``transformers`` tokenizer.

        Args:
            markers: control tokens that the model itself writes around reasoning and calls;
                messages of the assistant keep them.
            template: the chat template; "" = the tokenizer's own.
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
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        # Tokens for unknown letters or single bytes occur in prompts that do not spell them.
        unknown = _unknown_ids(self._backend)
        self._roles = {
            id_
            for text, id_ in self._ids.items()
            if id_ not in unknown and not _BYTE.fullmatch(text)
        }
        # Tokens that leave the text beside them alone can stand in for a mark.
        self._clean = [
            str(x)
            for id_, x in added.items()
            if id_ in self._roles
            and x.special
            and not (x.lstrip or x.rstrip or x.single_word or x.normalized)
        ]
        controls = [x for id_, x in added.items() if id_ in self._roles]
        normalizer = getattr(self._backend, "normalizer", None)
        is_kept = normalizer is None or normalizer.normalize_str(_JOINER) == _JOINER
        self._joiner = _JOINER if is_kept else " "
        self._is_loose = self._backend is not None and self._makes_of_others(controls)
        self._word = "zq" + secrets.token_hex(8)
        self._chat = self._mark_of(_OF_CHAT)
        self._mark = re.compile(self._word + f"([0-9]{{{_DIGITS}}})")
        self._any = _pattern(self._texts)
        # Clients send unparsed calls back as the model wrote them; they keep the same tokens.
        kept = {*markers, *(x for x in unsaid if "tool" in x)}
        self._assistants = _pattern([x for x in self._texts if x not in kept])

    def marked(self, messages: Iterable[Any]) -> list[Any]:
        """Return the messages with a mark in place of every spelling of a control token."""
        return [self._of_message(x) for x in messages]

    def marked_value(self, value: Any) -> Any:
        """Return JSON, such as that of tools, with a mark in place of every spelling."""
        return self._in(value, self._any)

    def has_marks(self, text: str) -> bool:
        return self._word in text

    def is_plain(self, text: str) -> bool:
        """Return whether the tokenizer can encode the text directly, as ``encode`` would."""
        return not self._is_loose and not self.has_marks(text)

    def unmarked(self, value: Any) -> Any:
        """Return JSON with the original spellings in place of the marks."""
        return _replaced(value, self._mark, self._spelled_one)

    def as_chat(self, text: str) -> str:
        """Return a chat's rendered prompt, marked if ``encode`` must check the tokens it gives."""
        return text + self._chat if self._is_loose else text

    def encode(self, text: str, encode: Encode) -> list[int]:
        """Return the token ids of a chat's prompt; its marks become plain text.

        Args:
            encode: the tokenizer's own encoding, which finds control tokens by their spelling.

        Raises:
            UnreadableText: text of a message still becomes control tokens.
        """
        text, texts = text.replace(self._chat, ""), self._texts
        for _ in range(_ROUNDS):
            between, numbers = self._split(text, len(texts))
            ids = self._encoded(between, [texts[x] for x in numbers], encode)
            if not self._is_loose or not self._has_others(ids, between, encode):
                return ids
            made: dict[str, str] = {}  # the marks added in this round, by their texts
            marks = [*map(self._mark_of, numbers), ""]
            pieces = [self._marked_where_made(x, len(texts), made) for x in between]
            text = "".join(x + y for x, y in zip(pieces, marks, strict=True))
            texts = [*texts, *made]
        raise UnreadableText

    def _encoded(self, between: list[str], spelled: list[str], encode: Encode) -> list[int]:
        """Return the ids of a prompt's pieces, with a text of ``spelled`` between each two."""
        if not spelled:
            return encode(between[0])
        if self._clean:
            # A control token that is rare in the prompt stands in for the marks, so that the text
            # beside a mark is encoded as it would be beside any control token.
            stand_in = min(self._clean, key=lambda x: sum(map(_count(x), between)))
            ids = encode(stand_in.join(between))
            own = list(map(_count(stand_in), between))
            if ids.count(self._ids[stand_in]) == sum(own) + len(spelled):
                return self._exchanged(ids, self._ids[stand_in], own, spelled)
        joined = [*map(self._joiner.join, spelled), ""]
        return encode("".join(x + y for x, y in zip(between, joined, strict=True)))

    def _has_others(self, ids: Sequence[int], between: list[str], encode: Encode) -> bool:
        """Return whether ``ids`` has more control tokens than the pieces of a prompt spell."""
        found = Counter(x for x in ids if x in self._roles)
        if not found:
            return False
        found.subtract(x for x in encode("") if x in self._roles)  # added to every text
        if self._any is not None:
            for piece in between:
                found.subtract(self._ids[x] for x in self._any.findall(piece))
        return any(x > 0 for x in found.values())

    def _marked_where_made(self, piece: str, first: int, made: dict[str, str]) -> str:
        """Return a piece with marks where the tokenizer made control tokens of other spellings.

        Args:
            first: the number of the first mark in ``made``.
            made: marks by their texts; new ones are added.
        """
        encoded = self._backend.encode(piece, add_special_tokens=False)
        out, end = list[str](), 0
        for id_, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            text = piece[start:stop]
            if id_ not in self._roles or id_ == self._ids.get(text.strip()):
                continue
            if not text or start < end:
                continue
            if text not in made:
                made[text] = self._mark_of(first + len(made))
            out += [piece[end:start], made[text]]
            end = stop
        return "".join(out) + piece[end:]

    def _mark_of(self, number: int) -> str:
        return f"{self._word}{number:0{_DIGITS}d}"

    def _makes_of_others(self, controls: Collection[Any]) -> bool:
        """Return whether the tokenizer can make a control token of another spelling."""
        if self._backend.normalizer is not None and any(x.normalized for x in controls):
            return True
        with suppress(UnreadableText):
            return any(self._roles & {*_plain_ids(self._backend, str(x))} for x in controls)
        return False

    def _split(self, text: str, num_texts: int) -> tuple[list[str], list[int]]:
        """Return the text before, between and after the marks, and the numbers of the marks.

        A mark with any other number is text: a template has cut a mark, and digits followed.
        """
        first, *rest = self._mark.split(text)  # number, text, number, ..., text
        between, numbers = [first], list[int]()
        for digits, letters in zip(rest[::2], rest[1::2], strict=True):
            if int(digits) < num_texts:
                numbers.append(int(digits))
                between.append(letters)
            else:
                between[-1] += self._word + digits + letters
        return between, numbers

    def _exchanged(
        self, ids: list[int], stand_in: int, own: list[int], spelled: list[str]
    ) -> list[int]:
        """Replace the tokens that stand in for marks by the ids of ``spelled`` as plain text.

        ``own`` counts, before each mark, the tokens ``stand_in`` that the prompt itself spells.
        """
        plain = {x: self._plain(x) for x in set(spelled)}
        written: list[int] = []
        passed = mark = 0
        for token in ids:
            if token == stand_in and mark < len(spelled) and passed == own[mark]:
                written += plain[spelled[mark]]
                passed, mark = 0, mark + 1
                continue
            passed += token == stand_in
            written.append(token)
        return written

    def _of_message(self, message: Any) -> Any:
        is_own = isinstance(message, Mapping) and message.get("role") == "assistant"
        spellings = self._assistants if is_own else self._any
        if isinstance(message, Mapping) and spellings is not None:
            parts = message.get("content")
            if isinstance(parts, Iterable) and not isinstance(parts, str | bytes | Mapping):
                message = {**message, "content": _in_one_part([*parts], spellings)}
        return self._in(message, spellings)

    def _in(self, value: Any, spellings: re.Pattern[str] | None) -> Any:
        if spellings is None:
            return value
        return _replaced(value, spellings, self._marked_one)

    def _marked_one(self, found: re.Match[str]) -> str:
        return self._mark_of(self._numbers[found[0]])

    def _spelled_one(self, found: re.Match[str]) -> str:
        number = int(found[1])
        if number == _OF_CHAT:
            return ""
        return self._texts[number] if number < len(self._texts) else found[0]

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a control token's spelling as plain text."""
        if self._backend is None:
            letters = [self._tokenizer.encode(x, add_special_tokens=False) for x in text]
        else:
            ids = _plain_ids(self._backend, text)
            if set(self._ids.values()).isdisjoint(ids):
                return ids
            letters = [_plain_ids(self._backend, x) for x in text]
        return [x for ids in letters for x in ids if x not in self._roles]


def _is_role(text: str, template: str) -> bool:
    """Return whether a token has bars in its spelling and occurs in the chat template."""
    return not _BARS.isdisjoint(text) and text in template


def _plain_ids(backend: Any, text: str) -> list[int]:
    """Return the ids of a text from the parts of a tokenizer that do not look for added tokens."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    if words and words[0].startswith("▁"):  # marks a text's beginning, but this is a middle
        words[0] = words[0][1:]
    return [x for word in words if word for x in _pieces(backend, word)]


def _pieces(backend: Any, word: str) -> list[int]:
    try:
        return [x.id for x in backend.model.tokenize(word)]
    except Exception as error:  # the library has no class for a letter that the model cannot take
        raise UnreadableText from error


def _unknown_ids(backend: Any) -> set[int]:
    """Return the ids that stand for letters which the tokenizer does not know."""
    with suppress(UnreadableText):
        return set() if backend is None else set(_pieces(backend, _NOT_A_LETTER))
    return set()


def _in_one_part(parts: Sequence[Any], spellings: re.Pattern[str]) -> list[Any]:
    """Return the parts of a content, with each spelling that spans several moved into the first.

    Some templates write the parts' texts one after the other with nothing in between.
    """
    places = [
        (i, name)
        for i, part in enumerate(parts)
        for name in (_OF_TEXT if isinstance(part, Mapping) else ())
        if isinstance(part.get(name), str)
    ]
    ends = [*accumulate(len(parts[i][name]) for i, name in places)]
    whole = "".join(parts[i][name] for i, name in places)
    for found in spellings.finditer(whole):
        first = bisect_right(ends, found.start())
        for i in range(first, bisect_left(ends, found.end(), first)):
            ends[i] = found.end()
    made = [*parts]
    for (i, name), begin, end in zip(places, [0, *ends], ends, strict=False):
        made[i] = {**made[i], name: whole[begin:end]}
    return made


def _count(text: str) -> Callable[[str], int]:
    return lambda piece: piece.count(text)


def _replaced(value: Any, what: re.Pattern[str], by: Callable[[re.Match[str]], str]) -> Any:
    if isinstance(value, str):
        return what.sub(by, value)
    if isinstance(value, Mapping):
        return {_replaced(k, what, by): _replaced(x, what, by) for k, x in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):  # pydantic's are not lists
        return [_replaced(x, what, by) for x in value]
    return value


def _pattern(texts: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the longest of these texts; None if there are none.

    The pattern is a prefix tree: some tokenizers have thousands of texts, and a plain alternation
    would try them one after the other.
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


_PANIC: Final = "PanicException"  # of pyo3; each library has a class of its own


class UnreadableText(ValueError):
    """The model's tokenizer cannot encode a text."""

    def __init__(self) -> None:
        super().__init__("the model's tokenizer cannot read this text: leave out odd characters")


@contextmanager
def panics_refused() -> Iterator[None]:
    """Raise ``UnreadableText`` in place of a panic of the tokenizers library."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise UnreadableText from error
