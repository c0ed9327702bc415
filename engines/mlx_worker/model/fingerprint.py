"""Identifies a model by one hash: KV of one model must never be offered to another.

The same files give the same hash on every machine. Weights count with every byte: see
``engines.host.weights``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from engines.host.weights import weight_digests
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.model.loading import LoadedModel

# Raise when what is stored changes its meaning.
FORMAT = 2
_TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def fingerprint(loaded: LoadedModel, plan: CachePlan, folder: Path | None = None) -> str:
    """Hex digest of weights, tokenizer, dtype, cache classes and the libraries' versions.

    ``folder`` keeps the digests of large files between starts; see ``weight_digests``.
    """
    digest = hashlib.blake2b(digest_size=20)
    for field in (*_computed_by(loaded, plan), *_contents(loaded, folder)):
        digest.update(struct.pack("<Q", len(field)) + field)
    return digest.hexdigest()


def _computed_by(loaded: LoadedModel, plan: CachePlan) -> Iterator[bytes]:
    """Everything but the model's files that KV depends on."""
    yield f"format {FORMAT}".encode()
    # A new version may compute KV, or lay it out, in another way.
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
    """The weights themselves, of a model that was built in code."""
    for name, array in _arrays(model):
        yield name.encode()
        yield np.array(array.astype(mx.float32)).tobytes()


def _arrays(model: Any) -> list[tuple[str, mx.array]]:
    arrays: Any = tree_flatten(model.parameters())
    return list(arrays)
