"""Converts a GGUF file of the llama family into a model folder that mlx_lm and vLLM load.

Weights are stored as bfloat16, the dtype the model was trained in. float16 would represent Q4_1's
``d * q + m`` (float16 ``d`` and ``m``, 4-bit ``q``) a little more exactly: measured on
SmolLM2-135M against the unrounded weights, bfloat16 costs 6e-5 nats of KL divergence and float16
4e-6, both far below what Q4_1 itself cost. But float16 weights make engines compute in float16,
whose range ends at 65504, and the residual stream of this model already reaches 25000.

Needs ``gguf`` and ``tokenizers``; no tensor library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvstore.codecs.floats import round_to_bf16

# Called with the bytes written so far, and the bytes to write in all.
Progress = Callable[[int, int], None]

_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_WEIGHTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(source: Path, folder: Path, progress: Progress = lambda done, total: None) -> None:
    """Write config, generation config, weights and tokenizer of ``source`` into ``folder``.

    ``source`` has to be of the llama family, with a byte-level BPE tokenizer. That is not checked,
    since only files with a known hash are converted.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(t.name != "output.weight" for t in reader.tensors)
    config = model_config(fields, tied)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_weights(folder / "model.safetensors", reader, config, progress)


def model_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Return the content of ``config.json``, as the model's authors would have written it."""
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores 1e-5 as a float32; rounding to seven digits restores it.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``tokenizer_config.json``.

    It names the generic class: in recent transformers ``GPT2Tokenizer`` replaces the pre-tokenizer
    by one that does not split digits.
    """
    tokens = fields["tokenizer.ggml.tokens"]

    def token(name: str) -> str | None:
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if number is None else tokens[number]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(fields.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits digits first (llama.cpp's ``smollm``)."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _write_weights(
    path: Path, reader: GGUFReader, config: dict[str, Any], progress: Progress
) -> None:
    """Write the safetensors file one tensor at a time, so that only one is in memory.

    The format: eight bytes of header length, a JSON header padded to eight bytes, the data. (The
    library ``safetensors`` cannot write bfloat16 from numpy arrays.)
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = done = 0
    for tensor in reader.tensors:
        end = total + 2 * int(tensor.n_elements)
        place = {"dtype": "BF16", "shape": _shape(tensor), "data_offsets": [total, end]}
        entries[weight_name(tensor.name)] = place
        total = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in reader.tensors:
            file.write(round_to_bf16(_weight(tensor, config)).astype("<u2").tobytes())
            done += 2 * int(tensor.n_elements)
            progress(done, total)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Return a tensor's shape with the slowest dimension first; gguf has the fastest first."""
    return tuple(int(n) for n in reversed(tensor.shape))


def weight_name(name: str) -> str:
    """Return a tensor's name in the Hugging Face layout.

    ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``.
    """
    if name in _OUTER_WEIGHTS:
        return _OUTER_WEIGHTS[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_WEIGHTS[part]}.weight"


def _weight(tensor: ReaderTensor, config: dict[str, Any]) -> np.ndarray:
    """Return a weight as float32, in the shape and row order of the Hugging Face model."""
    weight = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
    for part, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
        if tensor.name.endswith(f"{part}.weight"):
            return unpermute(weight, config[heads])
    return weight


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return a weight of Q or K with llama.cpp's row order undone.

    llama.cpp applies RoPE to neighbouring rows (2i, 2i + 1) of a head, Hugging Face models to the
    rows (i, i + head_dim / 2). So llama.cpp's converter interleaves the two halves of each head.

    Args:
        weight: (num_heads * head_dim, hidden_size).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
