"""Which model computed the KV: vLLM's block hashes do not say.

Two engines may exchange KV only if everything but the tokens is equal: weights, dtype, the way
blocks are hashed, how the heads are spread over ranks. Weights count with every byte: see
``engines.weights``. A folder whose files cannot be found is named by its hub id and revision.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from engines.vllm_plugin.groups import DENSE, Groups
from engines.weights import weight_digests

LAYOUT_VERSION: Final = "vllm-blocks-2"
_NAMES: Final = ("config.json", "*.safetensors", "*.bin", "*.pt", "*.gguf")


def fingerprint(vllm_config: Any, rank: int, remembered: Path, groups: Groups = DENSE) -> str:
    """Hex digest; equal only for KV that may be exchanged.

    ``remembered``: the folder for what was found in large files, one for all ranks.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    digest = blake2b(digest_size=32)
    states = [str(vllm_config.cache_config.mamba_ssm_cache_dtype), str(groups)]
    for part in (
        LAYOUT_VERSION,
        model_digest(str(model.model), str(model.revision), remembered),
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


def model_digest(path: str, revision: str, remembered: Path) -> str:
    folder = Path(path)
    if not folder.is_dir():
        return f"{path}@{revision}"
    digest = blake2b(digest_size=32)
    files = sorted({x for name in _NAMES for x in folder.glob(name)})
    for file, content in zip(files, weight_digests(files, remembered), strict=True):
        digest.update(f"{file.name};".encode() + content)
    return digest.hexdigest()
