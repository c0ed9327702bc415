"""Make this thread treat denormal floats as zero, as fast-math libraries do (x86 only)."""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

if platform.machine() not in ("x86_64", "AMD64"):
    raise ImportError("only x86 has this control register")

FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO = 0x1F80 | 0x8000 | 0x0040


@intrinsic
def _load_control_register(context):
    def generate(context, builder, signature, args):
        word = ir.IntType(32)
        pointer = builder.alloca(word)
        builder.store(ir.Constant(word, FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO), pointer)
        byte_pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        function = ir.FunctionType(ir.VoidType(), [byte_pointer.type])
        load = ir.Function(builder.module, function, "llvm.x86.sse.ldmxcsr")
        builder.call(load, [byte_pointer])
        return context.get_dummy_value()

    return types.void(), generate


@njit
def set_flushing():
    _load_control_register()
