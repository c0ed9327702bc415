"""Encodes long prompts at the cost of their new text.

A prompt is cut before control tokens into segments, about one per message. The ids of a segment are
cached under a keyed digest of its text. So the cache needs no session, and text that conversations,
branches and edits share is encoded once. No text is kept.

The time of an encoding reveals whether a text was seen before, so every tenant has its own key.

A text may be cut where the ids of its parts equal those of the whole: before an added token that
the tokenizer finds there whatever the text around it. A tokenizer of the ``tokenizers`` library
first looks for its added tokens, then normalises, splits and encodes each text between two of them
separately. If a text were cut after a token, the next part would begin with plain text, to which
SentencePiece would add its mark of a text's beginning.
``docs/decisions/0090-prompts-encoded-where-they-are-new.md`` has a counterexample for each reason
against a token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from engines.host.control_tokens import UnreadableText, panics_refused

logger = logging.getLogger(__name__)
Encode: TypeAlias = Callable[[str], list[int]]
# Shorter segments are joined to the next: a lookup costs as much as encoding some 20 tokens.
MIN_CHARS: Final = 128
# Limit on the cached ids and their entries; a conversation of 145,000 tokens takes 0.6 MB.
MAX_BYTES: Final = 64 << 20
DIGEST_BYTES: Final = 16
ENTRY_BYTES: Final = 240  # of an entry without its ids: digest, objects, place in the dict
KNOWN_MODELS: Final = frozenset({"BPE", "Unigram", "WordPiece", "WordLevel"})
MOST_TRIED: Final = 64  # tokens in the self-check; some tokenizers have thousands
# Neighbours of a token in the self-check: blanks and line ends that merge or are stripped, digits,
# letters that compose with the next or that a normaliser changes, and SentencePiece's mark.
_LEFT: Final = ("a", "a ", "a  ", "\n", "x\n\n", "1", "e", "É", "\U0001f600", "▁", ".", "\t", "")
_RIGHT: Final = (
    *("b", " b", "  b", "\n", "\n\ny", "2", "\u0301", "ﬁ", "\U0001f3fd", "▁", "!", "'t", ""),
)


class SegmentCache:
    """A thread-safe LRU cache of the ids of segments, for one tokenizer.

    Attributes:
        cuts: the tokens before which texts are cut; if there are none, texts are encoded whole.
        num_chars: characters encoded so far.
        num_bytes: size of the cache.
    """

    def __init__(
        self,
        backend: Any,
        whole: Encode,
        template: str = "",
        *,
        max_bytes: int = MAX_BYTES,
        min_chars: int = MIN_CHARS,
    ) -> None:
        """Find the tokenizer's cuts, and check them with a sample text.

        Args:
            backend: a ``tokenizers.Tokenizer`` that is not used elsewhere at the same time; None =
                the tokenizer is not of that library, and nothing is cut.
            whole: encodes a text that cannot be cut.
            template: the chat template; cuts are limited to tokens that it contains, if any.
        """
        self._backend = backend
        self._whole = whole
        self._max_bytes = max_bytes
        self._min_chars = min_chars
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = self.num_chars = 0
        self.cuts = self._tried(template)
        self._pattern = self.cuts.pattern()

    def _tried(self, template: str) -> Cuts:
        if self._backend is None:
            return Cuts((), {"": "it is not a tokenizer of the library tokenizers"})
        cuts = safe_cuts(self._backend).within(template)
        try:
            with panics_refused():
                is_right = holds(cuts, lambda x: self._encoded([x])[0], self._whole)
        except UnreadableText:
            is_right = False
        if not is_right:
            cuts = Cuts((), {"": "the ids of a text's parts were not those of the whole"})
        if "" in cuts.refused:
            logger.info("prompts are encoded whole each time: %s", cuts.refused[""])
        return cuts

    def encode(self, text: str, key: bytes) -> list[int]:
        """Return the ids of a text, without tokens that a tokenizer adds around it.

        Args:
            key: the tenant's key, at most 64 bytes.
        """
        ids: list[int] = self.ids(text, key).tolist()
        return ids

    def ids(self, text: str, key: bytes) -> np.ndarray:
        """Return the ids as ``encode`` does, in an int32 array (num_tokens,), maybe read-only."""
        backend, pattern = self._backend, self._pattern
        if pattern is None or backend.padding is not None or backend.truncation is not None:
            self.num_chars += len(text)
            return np.array(self._whole(text), np.int32)
        parts = self._parts(text)
        names = [_name(x, key) for x in parts]
        with self._lock:
            known = {x: self._ids[x] for x in names if x in self._ids}
            new = {n: p for n, p in zip(names, parts, strict=True) if n not in known}
            encoded = self._encoded(list(new.values()))
            known |= {n: np.array(x, np.int32).tobytes() for n, x in zip(new, encoded, strict=True)}
            self.num_chars += sum(map(len, new.values()))
            for name in names:
                self._keep(name, known[name])
        return np.frombuffer(b"".join(known[x] for x in names), np.int32)

    def _parts(self, text: str) -> list[str]:
        """Return a text's parts; where a part begins depends only on the text before it."""
        assert self._pattern is not None
        starts = [0]
        for found in self._pattern.finditer(text):
            if found.start() - starts[-1] >= self._min_chars:
                starts.append(found.start())
        return [text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]

    def _encoded(self, parts: Sequence[str]) -> list[list[int]]:
        made = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        return [x.ids for x in made]

    def _keep(self, name: bytes, ids: bytes) -> None:
        if name in self._ids:
            self._ids.move_to_end(name)
            return
        self._ids[name] = ids
        self.num_bytes += len(ids) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            _, old = self._ids.popitem(last=False)
            self.num_bytes -= len(old) + ENTRY_BYTES


def _name(part: str, key: bytes) -> bytes:
    data = part.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()


# ---- where a text may be cut


class Cuts(NamedTuple):
    """The tokens before which a text may be cut, and for other tokens the reason why not.

    The reason under the key "" applies to the whole tokenizer.
    """

    tokens: tuple[str, ...]
    refused: Mapping[str, str]

    def within(self, template: str) -> Cuts:
        """Return the cuts limited to the tokens in ``template``, or all if it contains none.

        Gemma 3 has 6,323 such tokens, and a search for all takes a second; its template has two.
        """
        written = tuple(x for x in self.tokens if x in template)
        return self._replace(tokens=written) if written else self

    def pattern(self) -> re.Pattern[str] | None:
        """Return a pattern that finds the tokens, the longest first; None if there are none."""
        longest = sorted(self.tokens, key=len, reverse=True)
        first = {x[0] for x in longest}
        if not longest:
            return None
        if len(first) > 1:
            return re.compile(_any(longest))
        # A literal first character makes the search five times faster.
        return re.compile(re.escape(first.pop()) + f"(?:{_any(x[1:] for x in longest)})")


def safe_cuts(backend: Any) -> Cuts:
    """Return the cuts that a ``tokenizers.Tokenizer`` allows, judged by its added tokens alone."""
    model, normalizer = type(backend.model).__name__, backend.normalizer
    if getattr(backend.model, "dropout", None):
        return Cuts((), {"": "its model drops merges by chance, so no two encodings are equal"})
    if model not in KNOWN_MODELS:
        return Cuts((), {"": f"a model of the kind {model} is not known"})
    normalises = _does_something(normalizer and json.loads(normalizer.__getstate__()))
    reads_as_text = bool(getattr(backend, "encode_special_tokens", False))
    found = [x for x in backend.get_added_tokens_decoder().values() if x.content]
    added = [x for x in found if not (reads_as_text and x.special)]
    refused = {x.content: "it is read as text" for x in found if x not in added}
    refused |= _overlapped(added)
    has_single_words = any(x.single_word for x in added)
    for token in added:
        if why := _against(token, has_single_words, normalises):
            refused[token.content] = why
    return Cuts(tuple(x.content for x in added if x.content not in refused), refused)


def holds(cuts: Cuts, encode: Encode, whole: Encode) -> bool:
    """Return whether cutting keeps the ids of a sample text that is built to provoke differences.

    Args:
        encode: encodes a part.
        whole: encodes the text as prompts are encoded without cuts.
    """
    few = cuts._replace(tokens=cuts.tokens[:MOST_TRIED])
    pattern = few.pattern()
    if pattern is None:
        return True
    text = "".join(_beside(few.tokens))
    starts = [0, *(x.start() for x in pattern.finditer(text) if x.start())]
    parts = (text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True))
    return [x for part in parts for x in encode(part)] == list(whole(text))


def _beside(tokens: Iterable[str]) -> Iterator[str]:
    for number, token in enumerate(tokens):
        for i, left in enumerate(_LEFT):
            yield f"{left}{token}{_RIGHT[(i + number) % len(_RIGHT)]}"
        yield f"{token}{token} {token} w{token}w{token[:-1]}w{token[1:]}"


def _against(token: Any, has_single_words: bool, normalises: bool) -> str:
    text = token.content
    if token.normalized and normalises:
        return "it is searched in normalised text, and a normaliser sees the text before it, too"
    if token.single_word:
        return "the next character decides whether it is found"
    if token.lstrip:
        return "it takes blanks of the part before it"
    if text != text.strip():
        return "it begins or ends with a blank, which another token may take"
    if has_single_words and re.match(r"\w", text):
        return "it begins with a letter, beside which another token is not found"
    return ""


def _overlapped(added: Sequence[Any]) -> dict[str, str]:
    """Return the tokens that another may overlap, so that they are not always found, with reasons.

    The tokens are not compared pairwise, since some tokenizers have thousands.
    """
    by_text = {x.content: x for x in added}
    beginnings: dict[str, list[str]] = {}
    for text in by_text:
        for size in range(1, len(text) + 1):
            beginnings.setdefault(text[:size], []).append(text)
    why: dict[str, str] = {}
    for rival, flags in by_text.items():
        for first in range(1, len(rival)):
            for text in _agreeing(rival[first:], by_text, beginnings):
                why[text] = f"another token may begin before it and reach into it: {rival!r}"
                # Tokens that are not normalised are searched first.
                if flags.normalized and not by_text[text].normalized:
                    why[rival] = f"another token is searched first, and may begin in it: {text!r}"
        if flags.single_word or flags.lstrip:
            for shorter in (rival[:size] for size in range(1, len(rival))):
                if shorter in by_text:
                    why[shorter] = f"a longer token, not always found, begins so: {rival!r}"
    return why


def _agreeing(
    tail: str, by_text: Mapping[str, Any], beginnings: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the tokens that start with ``tail`` or that ``tail`` starts with."""
    if tail[0] not in beginnings:
        return
    yield from beginnings.get(tail, ())
    yield from (tail[:size] for size in range(1, len(tail)) if tail[:size] in by_text)


def _does_something(normalizer: Any) -> bool:
    if not normalizer:
        return False
    if normalizer.get("type") == "Sequence":
        return any(map(_does_something, normalizer.get("normalizers") or []))
    return True


def _any(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts))
