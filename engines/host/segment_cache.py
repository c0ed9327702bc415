"""Encodes long prompts at the cost of their new text.

A prompt is cut before control tokens (``safe_cuts``) into segments, about one a message. The ids of
a segment are kept by a keyed digest of its text: it needs no session, and what conversations,
branches and edits share is encoded once. No text is kept.

How long an encoding takes says whether a text was seen before, so every tenant has its own key.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from engines.host.control_tokens import UnreadableText, panics_refused
from engines.host.safe_cuts import Cuts, holds, safe_cuts, tokenizing

logger = logging.getLogger(__name__)
Encode: TypeAlias = Callable[[str], list[int]]
# Shorter segments are joined to the next: to look one up costs as much as to encode some 20 tokens.
MIN_CHARS: Final = 128
# Of ids and entries; a conversation of 145,000 tokens takes 0.6 MB.
MAX_BYTES: Final = 64 << 20
DIGEST_BYTES: Final = 16
ENTRY_BYTES: Final = 240  # beside the ids: digest, its object, the place in the dict


class SegmentCache:
    """The ids of segments for one tokenizer; the least used go first. Thread-safe.

    Attributes:
        cuts: where texts are cut. Without any, every text is encoded whole.
        num_chars: that were encoded so far.
        num_bytes: of the ids that are kept.
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
        """Find the cuts of a tokenizer, and try them.

        Args:
            backend: a ``tokenizers.Tokenizer``, which nothing else uses at the same time; None =
                the tokenizer is not of that library, and nothing is cut.
            whole: encodes a text that cannot be cut.
            template: the chat template, whose tokens suffice where there are thousands.
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
        cuts = safe_cuts(tokenizing(self._backend)).within(template)
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
        """Return the ids of a text, without those that a tokenizer adds around it.

        ``key``: the tenant's, at most 64 bytes.
        """
        ids: list[int] = self.ids(text, key).tolist()
        return ids

    def ids(self, text: str, key: bytes) -> np.ndarray:
        """Do as ``encode``; int32, (num_tokens,), and read-only."""
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
        """Cut a text; where a part begins depends only on the text before it."""
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
