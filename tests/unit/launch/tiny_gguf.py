"""A GGUF file of the llama family, small enough to convert in a moment, and as a Python package."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from launch.model.find import Packaged

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 96, 4, 2, 2, 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
MERGES = ["Ġ a", "a b", "Ġ Ġ", "1 2"]


def byte_letters() -> list[str]:
    """GPT-2's printable letter for each of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [x for x in range(256) if x not in plain]
    letters = {x: chr(x) for x in plain} | {x: chr(256 + i) for i, x in enumerate(rest)}
    return [letters[x] for x in range(256)]


TOKENS = [*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """By GGUF name, float32, before any permutation."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            f"blk.{i}.attn_v.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INNER),
        }
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    kinds = [TokenType.CONTROL if x in SPECIAL else TokenType.NORMAL for x in TOKENS]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights().items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = permute(weight, HEADS if "attn_q" in name else KV_HEADS)
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def install_package(site: Path) -> Packaged:
    """An installed package that carries the file, importable or not; ``site`` goes on sys.path."""
    (site / "tiny_sample").mkdir()
    file = write_gguf(site / "tiny_sample" / "tiny.gguf")
    info = site / "tiny_sample-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-sample\nVersion: 1.0\n")
    return Packaged(
        name="Tiny",
        package="tiny-sample",
        file="tiny_sample/tiny.gguf",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        install="install it",
        needed_bytes=1 << 20,
    )
