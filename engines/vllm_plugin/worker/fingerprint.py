"""Identifies the model that computed the KV, because vLLM's block hashes do not.

Two engines may exchange KV only if everything but the tokens is equal: weights, dtype, the hash
algorithm of blocks, the distribution of heads over ranks, and vLLM's version, since another version
may compute KV, or lay it out, differently. Every byte of the weights counts: see
``engines.host.weights``. A commit identifies a model of the hub, and so every byte; a branch or a
tag does not, since it moves when the model is updated.
"""

from __future__ import annotations

import glob
import logging
import re
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import vllm

from engines.host.weights import weight_digests
from engines.vllm_plugin.groups import DENSE, Groups

logger = logging.getLogger("thermocline.vllm")

LAYOUT_VERSION: Final = "vllm-blocks-2"
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_CODE: Final = ("config.json", "*.py")
# Load formats that read only the files of the model's folder, or of the hub's commit.
_PLAIN_FORMATS: Final = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache"),
    *("mistral", "sharded_state", "runai_streamer", "gguf", "dummy"),
)
_PART: Final = re.compile(r"-\d+-of-")  # in the name of a file that holds a part of a model
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def fingerprint(
    vllm_config: Any, rank: int, remembered: Path | None, groups: Groups = DENSE
) -> str:
    """The hex digest of everything but the tokens that determines KV.

    ``remembered``: the folder for digests of large files, shared by all ranks; None = they are not
    kept.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    digest = blake2b(digest_size=32)
    states = [str(vllm_config.cache_config.mamba_ssm_cache_dtype), str(groups)]
    for part in (
        LAYOUT_VERSION,
        f"vllm {vllm.__version__}",
        model_digest(model, str(vllm_config.load_config.load_format), remembered),
        str(vllm_config.load_config.load_format),
        str(model.dtype),
        str(model.quantization),
        str(model.hf_config.to_json_string(use_diff=False)),
        str(vllm_config.cache_config.block_size),
        str(vllm_config.cache_config.prefix_caching_hash_algo),
        f"rank {rank} of {parallel.world_size}",
        *(states if groups.states else ()),
    ):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def model_digest(model: Any, load_format: str, remembered: Path | None) -> str:
    """A name for the weights of vLLM's ``ModelConfig``; equal only for the same weights.

    Weights that cannot be identified get a new name at every start: the sessions stored then serve
    only this engine, and are never offered to an engine that may have other weights.
    """
    if load_format in _PLAIN_FORMATS and not model.model_weights:
        if files := _files(Path(model.model)):
            return _content(files, remembered)
        if commit := _commit(model.revision):
            return f"{model.model}@{commit}"
    logger.warning(
        "the weights of %s cannot be identified, so its cold sessions end with this engine; load it"
        " from a folder, or pass its commit as --revision",
        model.model,
    )
    return secrets.token_hex(32)


def _files(path: Path) -> list[Path]:
    """The files that determine the model's computation; [] if ``path`` holds no weights."""
    if path.is_file():
        return sorted(path.parent.glob(_PART.sub("-*-of-", glob.escape(path.name))))
    weights = {x for name in _WEIGHTS for x in path.glob(name)}
    return sorted(weights.union(*map(path.glob, _CODE))) if weights else []


def _content(files: Sequence[Path], remembered: Path | None) -> str:
    digest = blake2b(digest_size=32)
    for file, content in zip(files, weight_digests(files, remembered), strict=True):
        digest.update(f"{file.name};".encode() + content)
    return digest.hexdigest()


def _commit(revision: str | None) -> str:
    """The commit of a revision; "" if it is not known.

    As a string, vLLM's revision is the requested name; an attribute holds the commit: see
    ``huggingface_hub.ResolvedRevision``.
    """
    found = str(getattr(revision, "resolved", revision))
    return found if _COMMIT.fullmatch(found) else ""
