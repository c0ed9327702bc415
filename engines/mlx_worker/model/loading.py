"""Reads a model and its vocabulary from disk, in the dtype that this machine computes fastest.

On a Mac the weights keep their own dtype. Linux CPU builds of mlx multiply float32 a hundred times
faster than bf16 (the BLAS they call has no bf16), so there everything runs in float32.

A fingerprint identifies a model, so that its KV is never offered to another. The same files give
the same fingerprint on every machine; every byte of the weights counts (``engines.host.weights``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

import llguidance
import llguidance.hf
import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import hf_repo_to_path

from engines.config import EngineConfig
from engines.host.weights import weight_digests
from engines.kv_budget import UNSTATED_CONTEXT, stated_context
from engines.mlx_worker.cache.layout import CachePlan
from engines.openai.requests import Body, RepetitionPenalty, Share, Temperature, TopK, TopP

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Increase it when stored KV changes its meaning.
FORMAT = 2
_TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
SAMPLING_FILE: Final = "generation_config.json"
MOST_SAMPLING_BYTES: Final = 1 << 20
AnyBody = TypeVar("AnyBody", bound=Body)
logger = logging.getLogger(__name__)

# Enough of a prompt's last tokens for the detokenizer to continue a word or a character.
_CONTEXT_TOKENS = 4


class UsualSampling(msgspec.Struct, frozen=True):
    """The model's default sampling, from ``generation_config.json``, which vLLM uses as well.

    A value of None means that the model states no default.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None

    @classmethod
    def of(cls, folder: Path) -> UsualSampling:
        """Read the defaults from a model's folder; values missing or out of bounds become None."""
        file = folder / SAMPLING_FILE
        try:
            with file.open("rb") as opened:
                content = opened.read(MOST_SAMPLING_BYTES + 1)
            if len(content) > MOST_SAMPLING_BYTES:
                raise ValueError(f"it has more than {MOST_SAMPLING_BYTES} bytes")
            said = json.loads(content)
            if not isinstance(said, dict):
                raise ValueError("it is not a JSON object")
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is ignored: %s", file, error)
            return cls()
        good = {}
        for known in msgspec.structs.fields(cls):
            value = said.get(known.name)
            if known.name == "top_k" and isinstance(value, float) and value.is_integer():
                value = int(value)
            try:
                good[known.name] = msgspec.convert(value, known.type)
            except msgspec.ValidationError as error:
                logger.warning("%s of %s is ignored: %s", known.name, file, error)
        return cls(**good)

    def filled_in(self, request: AnyBody) -> AnyBody:
        """Return a request with these defaults for the values that it does not state."""
        said = {x: y for x, y in msgspec.structs.asdict(self).items() if y is not None}
        left_open = {x: y for x, y in said.items() if getattr(request, x) is None}
        return msgspec.structs.replace(request, **left_open) if left_open else request


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer and its config; ``model`` belongs to the thread that loaded it."""

    model: Any
    tokenizer: Any
    config: Mapping[str, Any] = field(repr=False)
    path: Path | None = None  # None = built in code, without files

    @property
    def max_context(self) -> int:
        """The longest context of the model, prompt and answer together, in tokens."""
        return stated_context(self.config) or UNSTATED_CONTEXT

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        text = self.config.get("text_config") or self.config
        return int(text["vocab_size"])

    @property
    def usual_sampling(self) -> UsualSampling:
        """The default sampling that the model's files state."""
        return UsualSampling.of(self.path) if self.path else UsualSampling()


def load_model(model_path: str, dtype: str = "auto") -> LoadedModel:
    """Load a model from a local folder or the hub. Call it on the thread that will run the model.

    Raises:
        OSError, ValueError: there is no such model, or mlx_lm does not support its architecture.
    """
    loaded: Any = load(model_path, lazy=True, return_config=True)
    model, tokenizer, config = loaded
    # Cast before the first evaluation, so that two copies of the weights never coexist.
    if (wanted := chosen_dtype(dtype)) is not None:
        model.set_dtype(_DTYPES[wanted])
    mx.eval(model.parameters())
    return LoadedModel(model, tokenizer, config, model_folder(model_path))


def model_folder(model_path: str) -> Path:
    """Return the folder of a model's files; a model of the hub must have been downloaded."""
    path = Path(model_path)
    return path if path.exists() else Path(hf_repo_to_path(model_path))  # type: ignore[no-untyped-call]


def chosen_dtype(setting: str) -> str | None:
    """Return the dtype to cast the model to; None = its own."""
    if setting != "auto":
        return setting
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return "float32" if on_cpu else None


def describe_device(engine: EngineConfig) -> str:
    """Return the device and the dtype that the model runs in, for the log."""
    return f"mlx on {mx.default_device()}, dtype {chosen_dtype(engine.dtype) or 'of the model'}"


def fingerprint(loaded: LoadedModel, plan: CachePlan, folder: Path | None = None) -> str:
    """Return the hex digest of weights, tokenizer, dtype, cache classes and library versions.

    ``folder`` keeps the digests of large files between starts; see ``weight_digests``.
    """
    digest = hashlib.blake2b(digest_size=20)
    for part in (*_computed_by(loaded, plan), *_contents(loaded, folder)):
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.hexdigest()


def _computed_by(loaded: LoadedModel, plan: CachePlan) -> Iterator[bytes]:
    """Yield everything that KV depends on, except the model's files."""
    yield f"format {FORMAT}".encode()
    # Another version may compute KV, or lay it out, differently.
    yield from (f"{name} {version(name)}".encode() for name in ("mlx", "mlx-lm"))
    yield json.dumps(plan.class_names).encode()
    yield repr(plan.layout).encode()
    yield json.dumps(sorted({str(x.dtype) for _, x in _arrays(loaded.model)})).encode()


def _contents(loaded: LoadedModel, folder: Path | None) -> Iterator[bytes]:
    if loaded.path is None:
        yield json.dumps(loaded.config, sort_keys=True, default=str).encode()
        yield from _parameters(loaded.model)
        return
    for name in _TEXTS:
        file = loaded.path / name
        yield file.read_bytes() if file.exists() else b""
    files = sorted(loaded.path.glob("*.safetensors"))
    for file, digest in zip(files, weight_digests(files, folder), strict=True):
        yield file.name.encode()
        yield digest


def _parameters(model: Any) -> Iterator[bytes]:
    """Yield the weights themselves, for a model that was built in code."""
    for name, array in _arrays(model):
        yield name.encode()
        yield np.array(array.astype(mx.float32)).tobytes()


def _arrays(model: Any) -> list[tuple[str, mx.array]]:
    arrays: Any = tree_flatten(model.parameters())
    return list(arrays)


class Vocabulary:
    """The vocabulary of one model; read-only.

    ``grammar`` is built on first use, which takes about a second for large vocabularies.
    """

    def __init__(self, tokenizer: TokenizerWrapper, size: int) -> None:
        """``size`` is the width of the model's logits, which may exceed the tokenizer's."""
        self.tokenizer = tokenizer
        self.size = size
        self.width = max(size, len(tokenizer))  # width of a grammar's masks
        self.eos: frozenset[int] = frozenset(tokenizer.eos_token_ids)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {x for x, token in added if token.special} - self._marker_ids()

    def hides(self, token: int, in_call: bool) -> bool:
        """Return whether an id is not text: padding of the vocabulary, or a special token.

        In a tool call, special tokens are shown, since its parser may need them.
        """
        return token >= len(self.tokenizer) or (token in self._special and not in_call)

    def spelling(self, token: int) -> bytes:
        """Return the exact bytes of one token, which may be a part of a character."""
        if self.grammar is None:
            return str(self.tokenizer.decode([token])).encode()
        return bytes(self.grammar.decode_bytes([token]))

    @cached_property
    def grammar(self) -> llguidance.LLTokenizer | None:
        """The vocabulary in llguidance's form; None for tokenizers without a fast version."""
        try:
            # mlx_lm has no public name for the tokenizer that it wraps.
            return llguidance.hf.from_tokenizer(
                self.tokenizer._tokenizer, n_vocab=self.width, eos_token=sorted(self.eos)
            )
        except ValueError:
            return None

    def serialized(self) -> str:
        """Return the tokenizer as JSON, for another process; requires ``grammar``."""
        backend = copy(self.tokenizer._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    @cached_property
    def max_token_chars(self) -> int:
        """The length of the longest token, in characters."""
        return max(len(text) for text in self.tokenizer.get_vocab())

    def continuing(self, prompt: Sequence[int] | np.ndarray) -> tuple[Any, int]:
        """Return mlx_lm's detokenizer after a prompt, and the number of characters to skip.

        A new detokenizer would strip the space before the first word. The next turn's prompt would
        then differ from the generated text, and could not reuse the cache from there on. The
        characters to skip belong to the prompt: the detokenizer holds back a final space until the
        next token.
        """
        end = [int(x) for x in prompt[-_CONTEXT_TOKENS:] if x < len(self.tokenizer)]
        whole, live = (self.tokenizer.detokenizer for _ in range(2))
        for token in end:
            whole.add_token(token)
            live.add_token(token)
        whole.finalize()
        owed = whole.text[len(live.text) :]
        live.offset = len(live.text)
        return live, 0 if "\ufffd" in owed else len(owed)

    @property
    def markers(self) -> frozenset[str]:
        """The texts that a model itself writes around reasoning and tool calls."""
        tokenizer = self.tokenizer
        markers = [tokenizer.think_start, tokenizer.think_end]
        markers += [tokenizer.tool_call_start, tokenizer.tool_call_end]
        return frozenset(text for text in markers if text)

    def _marker_ids(self) -> set[int]:
        """Return the ids of the special tokens that mark reasoning and tool calls."""
        tokenizer = self.tokenizer
        markers = [*self.markers, *tokenizer.structural_markers]
        for edges in tokenizer.response_transitions.values():
            markers += [text for text, _ in edges]
        encode = tokenizer.encode
        return {x for text in markers if text for x in encode(text, add_special_tokens=False)}
