"""Which model computed the KV: vLLM's block hashes do not say.

Two engines may exchange KV only if everything but the tokens is equal: weights, dtype, the way
blocks are hashed, how the heads are spread over ranks. Weights count with every byte: see
``engines.weights``. A model of the hub is named by its commit, which stands for every byte, too; a
branch or a tag does not, since it moves when the model is updated.
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

from engines.vllm_plugin.groups import DENSE, Groups
from engines.weights import weight_digests

logger = logging.getLogger("thermocline.vllm")

LAYOUT_VERSION: Final = "vllm-blocks-2"
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_CODE: Final = ("config.json", "*.py")
# Ways of loading that read nothing but the files of the model's folder, or of the hub's commit.
_PLAIN_FORMATS: Final = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache"),
    *("mistral", "sharded_state", "runai_streamer", "gguf", "dummy"),
)
_PART: Final = re.compile(r"-\d+-of-")  # of a model in several files, of which one is named
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def fingerprint(
    vllm_config: Any, rank: int, remembered: Path | None, groups: Groups = DENSE
) -> str:
    """Hex digest; equal only for KV that may be exchanged.

    ``remembered``: the folder for what was found in large files, one for all ranks; None = nowhere.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    digest = blake2b(digest_size=32)
    states = [str(vllm_config.cache_config.mamba_ssm_cache_dtype), str(groups)]
    for part in (
        LAYOUT_VERSION,
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
    """Of vLLM's ``ModelConfig``: equal only for the same weights.

    Weights that nobody can name get another name at every start: what is stored then serves this
    engine alone, and is never offered to one that may have other weights.
    """
    if load_format in _PLAIN_FORMATS and not model.model_weights:
        if files := _files(Path(model.model)):
            return _content(files, remembered)
        if commit := _commit(model.revision):
            return f"{model.model}@{commit}"
    logger.warning(
        "nothing tells which weights %s has, so its cold sessions end with this engine; load it"
        " from a folder, or pass its commit as --revision",
        model.model,
    )
    return secrets.token_hex(32)


def _files(path: Path) -> list[Path]:
    """All that decides what the model computes; none if ``path`` holds no weights."""
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
    """ "" if it is not known. vLLM's revision reads as the name asked for, and carries the commit.

    See ``huggingface_hub.ResolvedRevision``.
    """
    found = str(getattr(revision, "resolved", revision))
    return found if _COMMIT.fullmatch(found) else ""
