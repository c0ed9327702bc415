"""Compiled inner loops give the results of numpy, to the last bit."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np

from kvstore.codecs.entropy.class_coder import ClassCoder
from kvstore.codecs.entropy.tables import classes_of
from kvstore.codecs.literature.stages.levels import LloydMax
from kvstore.codecs.literature.stages.vectors import nearest_of_each
from kvstore.codecs.reader import Reader
from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.model_transforms import UnRope
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.shapes import Rope
from tests.unit.kvstore.codecs.entropy.test_rans import RATIOS, TABLES, codes_of
from tests.unit.kvstore.codecs.samples import layout_of, uneven


def digest():
    """Digests the results of every stage with a compiled loop for the same numbers."""
    parts = []
    bits = np.array([[0, 1, 3, 8], [2, 5, 7, 4]])
    for num_tokens in (1, 7, 8, 61):
        stack = uneven((2, num_tokens, 4), seed=num_tokens)
        lloyd, planes = LloydMax(1 << bits, np.exp2(bits / 3)), BitPlanes(bits)
        codes = lloyd.quantise(stack)
        packed = planes.write(codes)
        again = planes.read(Reader(memoryview(packed)), num_tokens)
        assert np.array_equal(again, codes)
        parts += [codes, np.frombuffer(packed, np.uint8), lloyd.restore(codes)]
    vectors = uneven((3, 50, 5), seed=1)
    parts.append(nearest_of_each(uneven((3, 99, 5)), vectors))
    rows = uneven((1, 30, 96))[0]
    parts += [rotation.rotate(rows), rotation.rotate_back(rows)]
    for num_bits in (1, 5, 8):
        parts += RotatedRows(num_bits).pack(rows)
    layout = layout_of(16)
    (shape,) = stack_shapes(Scope("layer"), layout)
    stack = uneven((1, 9, 64))
    stack[0, 3, :4] = np.inf, -np.inf, np.nan, 3e38
    out = layout.empty(9)
    shape.scatter(stack, out, 0, "bfloat16")
    parts += list(out[0])
    for interleaved in (False, True):
        turn = UnRope(shape, (Rope((1.0, 0.3, 0.1), interleaved),))
        parts.append(turn.backward(uneven((1, 9, 64)), 77, None))
    coder = ClassCoder(classes_of(RATIOS)[None], TABLES)
    parts.append(np.frombuffer(coder.write(codes_of(RATIOS, 40).T[None]), np.uint8))
    return hashlib.blake2b(b"".join(x.tobytes() for x in parts), digest_size=8).hexdigest()


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from tests.unit.kvstore.codecs.stages.test_compiled_stages import digest
print(digest())
"""


def test_numpy_gives_the_same():
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMBA]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()
