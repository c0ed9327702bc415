r"""Decides which regular expressions a grammar can enforce.

JSON schemas have JavaScript's patterns, and programs also write those of other languages.
llguidance reads Rust's: no lookahead, lookbehind, backreferences or word boundaries, and anchors
only at the ends of a pattern. A pattern that it cannot read would fail the whole request.
"""

from __future__ import annotations

import re
from typing import Final

_HEX: Final = r"\\(?:x|u)\{[0-9A-Fa-f]{1,8}\}|\\x[0-9A-Fa-f]{2}|\\u(?![dD][89a-fA-F])[0-9A-Fa-f]{4}"
_KINDS: Final = r"\\[dDwWsS]|\\[pP](?:\{[^}]*\}|[A-Za-z])"
_ESCAPE: Final = rf"{_HEX}|{_KINDS}|\\[nrtfva]|\\[ -/:;=?@\[-`{{-~]"
_FLAGS: Final = r"[imsuxU]*(?:-[imsuxU]+)?"
_TOKEN: Final = re.compile(
    rf"(?P<atom>{_ESCAPE}|\[\^?+(?!\])(?P<class>(?:{_ESCAPE}|[^\]\\])+)\])"
    rf"|(?P<flags>\(\?{_FLAGS}\))|(?P<open>\((?:\?(?:P?<[A-Za-z_]\w*>|{_FLAGS}:)|(?!\?)))"
    r"|(?P<close>\))|(?P<other>\|)|(?P<start>\^|\\A)|(?P<end>\$|\\z)"
    r"|(?P<repeat>[*+?]|\{(?P<least>[0-9]+)(?P<comma>,(?P<most>[0-9]*))?\})"
    r"|(?P<char>[^\\\[({])",
    re.DOTALL,
)
_IN_CLASS: Final = re.compile(rf"(?P<kind>{_KINDS})|(?P<hex>{_HEX})|\\?(?P<char>.)", re.DOTALL)
_CONTROLS: Final = dict(zip("nrtfva", "\n\r\t\f\v\a", strict=True))
# Unicode classes, named classes, flags and long escapes, which xgrammar cannot read or reads as
# letters.
_NOT_OF_XGRAMMAR: Final = re.compile(
    r"(\\[pP]|\\[xu]\{|\[:|\(\?(?!:|P?<[A-Za-z_]))|\\.|.", re.DOTALL
)
# Beside such a character, xgrammar lets ``_ANY`` match quotes and line ends, too.
_FOREIGN: Final = re.compile(r"[^\x00-\x7f]")
_ANY: Final = r"[\s\S]*"
# Operators in Rust's classes, which are plain characters in JavaScript's.
_OPERATORS: Final = re.compile(r"(\\.)|\[|&&|~~|--", re.DOTALL)


def is_plain(pattern: str) -> bool:
    """Return whether a pattern has only elements that can be matched from left to right."""
    walk, at = _PatternWalk(), 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or not walk.takes(token):
            return False
        at = token.end()
    return not walk.groups


def in_rust(pattern: str) -> str:
    """Return a plain pattern in the form for llguidance.

    Operators in classes are escaped, and repeated anchors are removed.
    """
    written, last = "", ""
    for token in _TOKEN.finditer(pattern):
        end = "start" if token["start"] else "end" if token["end"] else ""
        if content := token["class"]:
            before = token[0][: -len(content) - 1]
            written += f"{before}{_OPERATORS.sub(_escaped, content)}]"
        elif not end or end != last:
            written += token[0]
        last = end
    return written


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found[1] else f"{found[0][:-1]}\\{found[0][-1]}"


def is_plain_in_calls(pattern: str) -> bool:
    """Return whether xgrammar can enforce a pattern in a call's arguments on vLLM."""
    return is_plain(pattern) and in_calls(pattern) is not None


def in_calls(pattern: str) -> str | None:
    """Return a plain pattern in the form for xgrammar, which enforces calls on vLLM.

    A text obeys a schema's pattern if any part of it matches. xgrammar matches the whole text, so
    the pattern is extended to match the rest. xgrammar's classes exclude characters that JSON
    escapes, but it copies literal characters into the arguments unescaped.

    Returns:
        None if there is no such pattern.
    """
    if any(x[1] for x in _NOT_OF_XGRAMMAR.finditer(pattern)) or max(pattern, default="") > "\uffff":
        return None
    pattern = _FOREIGN.sub(lambda x: f"\\u{ord(x[0]):04x}", pattern)
    depth, branches, ends = 0, [""], [False]
    before, is_after_group = _ANY, False
    for token in _TOKEN.finditer(pattern):
        if token["start"] or token["end"]:
            if depth:
                return None
            before, ends[-1] = ("", ends[-1]) if token["start"] else (before, True)
            continue
        if _is_escaped_in_json(token):
            return None
        depth += bool(token["open"]) - bool(token["close"])
        if token["other"] and not depth:
            branches[-1] = before + branches[-1]
            branches, ends, before = [*branches, ""], [*ends, False], _ANY
        elif token["repeat"] == "?" and is_after_group:
            branches[-1] += "{0,1}"  # xgrammar lets (ab+)? match b alone
        else:
            branches[-1] += token[0] if token["char"] != "]" else r"\]"
        is_after_group = bool(token["close"])
    branches[-1] = before + branches[-1]
    whole = [x if ended or x == _ANY else x + _ANY for x, ended in zip(branches, ends, strict=True)]
    return f"^{whole[0]}$" if len(whole) == 1 else f"^(?:{'|'.join(whole)})$"


def _is_escaped_in_json(token: re.Match[str]) -> bool:
    """Return whether a token is a character that JSON escapes, or a class of only such."""
    if content := token["class"]:
        return not re.sub(r'\\\\|\\?"', "", content)
    if not (token["char"] or token["atom"]):
        return False
    item = _IN_CLASS.fullmatch(token[0])
    code = _code(item) if item is not None else -1
    return code in (ord('"'), ord("\\")) or 0 <= code < ord(" ")


class _PatternWalk:
    """A position in a pattern, which decides the tokens that may come next."""

    def __init__(self) -> None:
        self.groups: list[_PatternGroup] = []
        self._in = _PatternGroup(begun=False)
        self._begun = False  # characters may have been matched before
        self._ended = False  # the text may have ended
        self._repeats = False  # the last token may be repeated
        self._names: set[str] = set()  # of groups

    def takes(self, token: re.Match[str]) -> bool:
        """Advance over a token; return False if it is not allowed there."""
        match token.lastgroup if token["repeat"] is None else "repeat":
            case "atom" | "class" | "char":
                fits = not self._ended and _is_class(token["class"] or "")
                self._begun = self._repeats = True
                return fits
            case "open":
                fits = not self._ended and self._is_new(token["open"])
                self.groups.append(self._in)
                self._in, self._repeats = _PatternGroup(self._begun), False
                return fits
            case "close" if self.groups:
                self._close()
                return True
            case "other":
                self._in.note(self._begun, self._ended)
                self._begun, self._ended, self._repeats = self._in.begun, False, False
                return True
            case "start":
                fits = not (self._begun or self._ended)
                self._in.has_ends, self._repeats = True, False
                return fits
            case "end":
                self._in.has_ends = self._ended = True
                self._repeats = False
                return True
            case "repeat":
                least, most = int(token["least"] or 0), token["most"]
                return self._repeats and (not most or least <= int(most))
            case kind:
                self._repeats = False
                return kind == "flags"

    def _is_new(self, opened: str) -> bool:
        """Record a group's name, if it has one; return False if the name is taken."""
        name = opened.partition("<")[2]
        fits = name not in self._names
        self._names |= {name} - {""}
        return fits

    def _close(self) -> None:
        inner, self._in = self._in, self.groups.pop()
        inner.note(self._begun, self._ended)
        self._begun, self._ended = inner.may_begin, inner.may_end
        self._in.has_ends |= inner.has_ends
        self._repeats = not inner.has_ends


class _PatternGroup:
    """The branches of a group so far, which all begin at the same position."""

    def __init__(self, begun: bool) -> None:
        self.begun = begun
        self.may_begin = self.may_end = False  # in some branch
        self.has_ends = False  # it contains an anchor

    def note(self, begun: bool, ended: bool) -> None:
        """Record the end of a branch."""
        self.may_begin |= begun
        self.may_end |= ended


def _is_class(content: str) -> bool:
    """Return whether all ranges in a class are between characters, in ascending order."""
    items = list(_IN_CLASS.finditer(content))
    i = 0
    while i + 2 < len(items):
        low, dash, high = items[i : i + 3]
        if dash[0] != "-":
            i += 1
            continue
        if low[0] not in (r"\d", r"\w") and not 0 <= _code(low) <= _code(high):
            return False
        i += 3
    return True


def _code(item: re.Match[str]) -> int:
    """Return a character's code point; -1 for a class such as ``\\d``."""
    if item["kind"]:
        return -1
    if item["hex"]:
        return int(item["hex"].strip("\\xu{}"), 16)
    char = item["char"]
    return ord(_CONTROLS.get(char, char) if item[0] != char else char)
