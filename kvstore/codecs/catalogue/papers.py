"""Methods of papers, and of the projects from which this one grew.

They are for comparison and are measured by the same tests. A server uses one only if it is named.
"""

from __future__ import annotations

from typing import Final

from kvstore.codecs.catalogue.entries import CodecEntry, Parameter

_PAPERS: Final = "kvstore.codecs.literature"

LITERATURE: Final[dict[str, CodecEntry]] = {
    "spectral": CodecEntry(
        2.5,
        "SpectralQuant: many bits for principal components with variance, few for the others.",
        learn=f"{_PAPERS}.spectral_quant:SPECTRAL",
        paper="SpectralQuant (Dynamis-Labs)",
    ),
    "ratequant": CodecEntry(
        2.6,
        "RateQuant: TurboQuant-MSE with the bits dealt out to heads by what errors cost.",
        learn=f"{_PAPERS}.rate_quant:RATEQUANT",
        parameters=(
            Parameter("bits", 2.5, 1, 8, is_whole=False),
            Parameter("least", 2, 0, 8),
            Parameter("by_layer", 0, 0, 1),
        ),
        paper="RateQuant, arXiv 2605.06675",
    ),
    "kvquant": CodecEntry(
        3.375,
        "KVQuant: keys before RoPE in groups by channel, values in groups by token.",
        learn=f"{_PAPERS}.kv_quant:KVQUANT",
        paper="KVQuant, arXiv 2401.18079",
    ),
    "commvq": CodecEntry(
        2.125,
        "CommVQ: eight neighbours as a sum of two learned vectors.",
        learn=f"{_PAPERS}.comm_vq:COMMVQ",
        parameters=(Parameter("dim", 8, 2, 64), Parameter("stages", 2, 1, 8)),
        paper="CommVQ, arXiv 2506.18879",
    ),
    "manthan": CodecEntry(
        3.25,
        "ManthanQuant: eight Lloyd-Max levels and an fp32 norm; the arithmetic of lm3.",
        make=f"{_PAPERS}.manthan_quant:manthan",
        paper="ManthanQuant",
    ),
    **{
        f"tq{num_bits}": CodecEntry(
            num_bits + 0.125,
            f"TurboQuant-MSE with {num_bits} bit{'s' if num_bits > 1 else ''} a value.",
            make=f"{_PAPERS}.turbo_quant:tq{num_bits}",
            paper="TurboQuant, arXiv 2504.19874",
        )
        for num_bits in (1, 2, 5, 6, 7, 8)
    },
    "tqprod": CodecEntry(
        3.25,
        "TurboQuant-prod: two bits of levels and one sign of a sketch of what they missed.",
        make=f"{_PAPERS}.turbo_quant:tqprod",
        parameters=(Parameter("bits", 3, 2, 4),),
        paper="TurboQuant, arXiv 2504.19874",
    ),
    "base11": CodecEntry(
        3.625,
        "turboquant-mlx: eleven levels after a rotation, as digits of large numbers.",
        make=f"{_PAPERS}.turboquant_mlx:base11",
        paper="turboquant-mlx, after TurboQuant (arXiv 2504.19874)",
    ),
    "rvq": CodecEntry(
        2.125,
        "VeloxQuant's residual quantiser: a sign, then the sign of what it missed.",
        make=f"{_PAPERS}.rvq:rvq",
        paper="VeloxQuant",
    ),
    "vecinfer": CodecEntry(
        2.1875,
        "VecInfer: smoothed keys, rotated, and four neighbours by one of 256 vectors.",
        make=f"{_PAPERS}.vecinfer:vecinfer",
        parameters=(Parameter("bits", 2, 1, 2),),
        paper="VecInfer, arXiv 2510.06175",
    ),
    "polar": CodecEntry(
        3.875,
        "PolarQuant: angles of recursive polar coordinates, and one radius of sixteen values.",
        make=f"{_PAPERS}.polar_quant:polar",
        paper="PolarQuant, arXiv 2502.02617",
    ),
    "qjl": CodecEntry(
        2.0625,
        "QJL: a sketch of signs for keys, groups of two bits for values.",
        make=f"{_PAPERS}.qjl:qjl",
        parameters=(Parameter("signs", 0, 0, 4096),),
        paper="QJL, arXiv 2406.03482",
    ),
    "rabitq": CodecEntry(
        2.6875,
        "RaBitQ: one bit a value of rotated keys without centroids, TurboQuant's four of values.",
        make=f"{_PAPERS}.rabitq:rabitq",
        learn=f"{_PAPERS}.rabitq:RABITQ",
        parameters=(
            Parameter("bits", 1, 1, 8),
            Parameter("clusters", 1, 1, 256),
            Parameter("unbiased", 1, 0, 1),
        ),
        paper="RaBitQ, SIGMOD 2024, arXiv 2405.12497, and arXiv 2409.09913",
    ),
    "playground": CodecEntry(
        3.0625,
        "turboQuantPlayground: rotated keys of three bits, values in groups of two bits.",
        make=f"{_PAPERS}.turboquant_playground:playground",
        parameters=(
            Parameter("key_bits", 3, 1, 8),
            Parameter("value_bits", 2, 1, 8),
            Parameter("group", 32, 2, 1024),
        ),
        paper="turboQuantPlayground, after arXiv 2504.19874 and arXiv 2402.02750",
    ),
    "kivi": CodecEntry(
        3.0,
        "KIVI: groups of 32 values of two bits, keys by channel and values by token.",
        make=f"{_PAPERS}.kivi:kivi",
        parameters=(Parameter("bits", 2, 1, 8), Parameter("group", 32, 2, 1024)),
        paper="KIVI, arXiv 2402.02750",
    ),
    "gear": CodecEntry(
        4.75,
        "GEAR: KIVI's groups, a low-rank part of what they missed, and outliers apart.",
        make=f"{_PAPERS}.gear:gear",
        parameters=(
            Parameter("bits", 2, 1, 8),
            Parameter("rank", 4, 0, 32),
            Parameter("outliers", 2, 0, 20, is_whole=False),
            Parameter("group", 32, 2, 1024),
        ),
        paper="GEAR, arXiv 2403.05527",
    ),
    "fp8": CodecEntry(
        8,
        "Floats of 8 bits, e4m3, with a scale for each tensor: an engine's own fp8 KV cache.",
        make=f"{_PAPERS}.fp8:fp8",
        paper="FP8 Formats for Deep Learning, arXiv 2209.05433",
    ),
    "q8": CodecEntry(
        8.5,
        "Integers of 8 bits in blocks of 32 with a scale: q8_0 of llama.cpp.",
        make=f"{_PAPERS}.q8:q8",
        paper="llama.cpp, q8_0",
    ),
}
