"""Finds the added tokens before which a text may be cut, its parts keeping the ids of the whole.

A tokenizer of the ``tokenizers`` library looks for its added tokens first. The text between two of
them is normalised, split into words and encoded by itself. So the ids of a text are those of its
parts, one after the other, if it is cut *before* an added token that is found there with any
text around it. Cut after one, the next part would begin with plain text, and marks of a text's
beginning (SentencePiece's) would be added to it.

``docs/decisions/0090-prompts-encoded-where-they-are-new.md`` has a counterexample for each reason
against a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

Encode = Callable[[str], Sequence[int]]
KNOWN_MODELS: Final = frozenset({"BPE", "Unigram", "WordPiece", "WordLevel"})
MOST_TRIED: Final = 64  # tokens of the self-check; some tokenizers have thousands
# Neighbours of a token in the self-check: blanks and line ends that join or are stripped, digits,
# letters that compose with the next, or that a normaliser changes, and SentencePiece's mark.
_LEFT: Final = ("a", "a ", "a  ", "\n", "x\n\n", "1", "e", "É", "\U0001f600", "▁", ".", "\t", "")
_RIGHT: Final = (
    "b",
    " b",
    "  b",
    "\n",
    "\n\ny",
    "2",
    "\u0301",
    "ﬁ",
    "\U0001f3fd",
    "▁",
    "!",
    "'t",
    "",
)


class AddedToken(NamedTuple):
    """One of a tokenizer's added tokens, with the flags of the ``tokenizers`` library."""

    content: str
    special: bool
    normalized: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class Tokenizing(NamedTuple):
    """The parts of a tokenizer that decide where its texts may be cut.

    Attributes:
        normalises: it has a normaliser that does something.
        model: the name of the model's kind.
        drops_merges: the model has dropout.
        added: all added tokens.
        reads_special_as_text: the switch ``encode_special_tokens``.
    """

    normalises: bool
    model: str
    drops_merges: bool
    added: tuple[AddedToken, ...]
    reads_special_as_text: bool


class Cuts(NamedTuple):
    """The tokens before which a text may be cut, and the reasons against others.

    The reason of "" is against the whole tokenizer.
    """

    tokens: tuple[str, ...]
    refused: Mapping[str, str]

    def within(self, template: str) -> Cuts:
        """Return those that ``template`` writes, if it writes any.

        Gemma 3 has 6,323, which take a second to look for, and its template writes two.
        """
        written = tuple(x for x in self.tokens if x in template)
        return self._replace(tokens=written) if written else self

    def pattern(self) -> re.Pattern[str] | None:
        """Return a pattern of the tokens, the longest first; None if there are none."""
        longest = sorted(self.tokens, key=len, reverse=True)
        first = {x[0] for x in longest}
        if not longest:
            return None
        if len(first) > 1:
            return re.compile(_any(longest))
        # A literal first character makes the search five times faster.
        return re.compile(re.escape(first.pop()) + f"(?:{_any(x[1:] for x in longest)})")


def tokenizing(backend: Any) -> Tokenizing:
    """Read a ``tokenizers.Tokenizer``; its vocabulary is not looked at."""
    normalizer = backend.normalizer
    model = backend.model
    return Tokenizing(
        normalises=_does_something(normalizer and json.loads(normalizer.__getstate__())),
        model=type(model).__name__,
        drops_merges=bool(getattr(model, "dropout", None)),
        added=tuple(
            AddedToken(*(getattr(x, name) for name in AddedToken._fields))
            for x in backend.get_added_tokens_decoder().values()
            if x.content
        ),
        reads_special_as_text=bool(getattr(backend, "encode_special_tokens", False)),
    )


def safe_cuts(made: Tokenizing) -> Cuts:
    """Apply the rule to a tokenizer."""
    if made.drops_merges:
        return Cuts((), {"": "its model drops merges by chance, so no two encodings are equal"})
    if made.model not in KNOWN_MODELS:
        return Cuts((), {"": f"a model of the kind {made.model} is not known"})
    as_text = [x for x in made.added if made.reads_special_as_text and x.special]
    added = [x for x in made.added if x not in as_text]
    refused = {x.content: "it is read as text" for x in as_text}
    refused |= _overlapped(added)
    has_single_words = any(x.single_word for x in added)
    for token in added:
        if why := _against(token, has_single_words, made.normalises):
            refused[token.content] = why
    return Cuts(tuple(x.content for x in added if x.content not in refused), refused)


def holds(cuts: Cuts, encode: Encode, whole: Encode) -> bool:
    """Compare the ids of a text that is made to break the rule with those of its parts.

    Args:
        encode: encodes parts.
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


def _against(token: AddedToken, has_single_words: bool, normalises: bool) -> str:
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


def _overlapped(added: Sequence[AddedToken]) -> dict[str, str]:
    """Find tokens that another may overlap, so that they are not always found; with the reason.

    Some tokenizers have thousands, so they are not compared two by two.
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
    tail: str, by_text: Mapping[str, AddedToken], beginnings: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the tokens that may begin where ``tail`` does."""
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
