"""Compiles Python loops to numba functions: for given types, cached, run without the GIL.

A function is compiled when it is first called. numba's cache checks only the file that contains a
cached function. So a function that emits code from other files has, as a constant, a digest of its
file and of all files of the product that it imports. A change in one of them compiles it again.

numba compiles a function for a fixed number of arrays, and a call takes a microsecond for each. So
compiled code gets many arrays as the addresses of their Python objects (``places_of``), and reads
their fields as numpy's public C struct lays them out.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from kvstore.codecs.loops.compiled import COMPILATIONS

logger = logging.getLogger(__name__)

ROOT: Final = Path(__file__).parents[3]
PACKAGE: Final = "kvstore"
COUNTING: Final = "kvstore.codecs.loops.compiled"
PROCESSOR: Final = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
LINE = 64  # bytes of a cache line; vectors that cross two lines take twice as long
NBYTES = 4  # of a float or a word


def sources_of(path: str | Path, root: Path = ROOT) -> int:
    """Return a 48-bit digest of a file of ``kvstore`` and of all such files that it imports.

    It also covers the variables that make numba compile for another processor. Kernels depend on
    them, since they are emitted for that processor's vectors, but numba's cache key does not.

    ``root``: the folder that has the package. Files are read, never imported. Imports under
    ``TYPE_CHECKING`` are left out, and so is the module that counts compilations.
    """
    digest = hashlib.blake2b(digest_size=6)
    digest.update(repr([os.environ.get(x) for x in PROCESSOR]).encode())
    found, waiting = set[Path](), [Path(path)]
    while waiting:
        if (file := waiting.pop()) not in found:
            found.add(file)
            waiting.extend(_imports(file, root))
    for file in sorted(found):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return int.from_bytes(digest.digest(), "big")


@functools.cache
def _imports(file: Path, root: Path) -> tuple[Path, ...]:
    """Return the files of the package that a file itself imports, also inside functions."""
    names = (x for node in _statements(ast.parse(file.read_bytes())) for x in _modules(node))
    paths = (root.joinpath(*x.split(".")) for x in names if x.startswith(PACKAGE) and x != COUNTING)
    places = (at for path in paths for at in (path.with_suffix(".py"), path / "__init__.py"))
    return tuple(at for at in places if at.is_file())


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from _statements(child)


def _modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (x.name for x in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{x.name}" for x in node.names)


class CompiledFunction:
    """Compiles a function for given numba types at its first call, or reads it from the cache."""

    def __init__(self, signature: Any, function: Callable[..., Any]) -> None:
        self._signature, self._function = signature, function
        self._lock = threading.Lock()
        self._found: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._found or self.prepare())(*arguments)

    def prepare(self) -> Any:
        """Compile the function if it is not compiled yet; return numba's function."""
        with self._lock:
            if self._found is None:
                self._found = self._compile()
            return self._found

    def _compile(self) -> Any:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        try:
            lazy = njit(cache=True, **options)(self._function)
            folder = str(lazy.stats.cache_path)
        except RuntimeError:  # numba found no folder in which it may write its cache
            lazy, folder = njit(**options)(self._function), ""
        # The first refresh in a process takes half a second and is not counted as a compilation. No
        # other thread may compile before it is done.
        with COMPILATIONS.wait(), global_compiler_lock:
            for context in (lazy.typingctx, lazy.targetctx):
                context.refresh()
        with COMPILATIONS.look(self._function.__name__.strip("_"), folder) as cached:
            try:
                lazy.compile(self._signature)
            except (OSError, EOFError, pickle.UnpicklingError) as error:  # full disk, damaged file
                logger.warning("compiled code cannot be kept in %s: %r", folder, error)
                with suppress(OSError):  # otherwise the next start may load older code
                    lazy._cache.flush()
                lazy = njit(**options)(self._function)
                lazy.compile(self._signature)
            cached.append(bool(lazy.stats.cache_hits))
        lazy.disable_compile()
        return lazy


def compiled(result: str, function: Callable[..., Any], *arguments: Any) -> CompiledFunction:
    """Return ``function`` for these types; it is compiled when it is first called.

    Types are numba's, or names in a string such as ``"f4 u1:2 i8:1r"``: a number, a contiguous
    array of two axes, and a read-only array of one axis.
    """
    (returned,) = _kinds((result,))
    return CompiledFunction(returned(*_kinds(arguments)), function)


def tuple_of(*kinds: Any, names: type[tuple[Any, ...]] | None = None) -> Any:
    """Return the numba type of a tuple of these types, which are named as for ``compiled``.

    ``names``: the class of a named tuple.
    """
    if names is None:
        plain: Any = types.Tuple
        return plain(_kinds(kinds))
    named: Any = types.NamedTuple
    return named(_kinds(kinds), names)


def _kinds(given: Iterable[Any]) -> list[Any]:
    words = (x.split() if isinstance(x, str) else [x] for x in given)
    return [_kind(x) if isinstance(x, str) else x for several in words for x in several]


def _kind(word: str) -> Any:
    name, _, axes = word.partition(":")
    kind = types.void if name == "void" else from_dtype(np.dtype(name))
    return types.Array(kind, int(axes[0]), "C", readonly="r" in axes) if axes else kind


def emitted(emit: Callable[[Any, tuple[Any, ...]], None], *kinds: Any) -> tuple[Any, Any]:
    """Return the signature and the code generator of an intrinsic that returns nothing.

    ``emit`` emits the code; it takes a builder, and the LLVM values in the last argument, which is
    a tuple. ``kinds``: the numba types of all arguments.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit(builder, tuple(builder.extract_value(args[-1], k) for k in range(len(kinds[-1]))))
        return context.get_dummy_value()

    return types.void(*kinds), generate


@njit
def copy(source: Any, target: Any) -> None:
    """Copy an array of two axes to one of the same shape.

    A loop, since numba takes two seconds to compile the assignment of one array to another: it also
    compiles the error message for other shapes.
    """
    for row in range(target.shape[0]):
        for i in range(target.shape[1]):
            target[row, i] = source[row, i]


def _typed_address(context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(found.data, ir.IntType(64))

    return types.int64(array), generate


address_of: Any = intrinsic(_typed_address)  # the address of an array's first element, int64


@njit
def first_line_of(array: Any) -> Any:
    """Return the address of the first whole cache line inside an array, int64."""
    return (address_of(array) + LINE - 1) // LINE * LINE


ADDRESS, STRIDES, LENGTHS, IS_WRITABLE = 0, 1, 4, 7  # columns
COLUMNS: Final = 8
NDIM: Final = 3
# numpy's PyArrayObject on 64 bits: a head of two words, data, nd, dimensions, strides, base, descr,
# flags.
_DATA, _NDIM, _LENGTHS, _STRIDES, _FLAGS = 16, 24, 32, 40, 64
_WRITEABLE: Final = 0x400
_INT: Final = 0xFFFFFFFF


def _typed_word(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=8)

    return types.int64(types.int64), generate


word_at: Any = intrinsic(_typed_word)  # the int64 at an address


def _read_objects(objects: Any, places: Any) -> bool:
    """Fill ``places`` from the array objects at these addresses; False if one lacks three axes."""
    for number in range(len(objects)):
        at = objects[number]
        if word_at(at + _NDIM) & _INT != NDIM:
            return False
        lengths, strides = word_at(at + _LENGTHS), word_at(at + _STRIDES)
        places[number, ADDRESS] = word_at(at + _DATA)
        for axis in range(NDIM):
            places[number, STRIDES + axis] = word_at(strides + 8 * axis)
            places[number, LENGTHS + axis] = word_at(lengths + 8 * axis)
        places[number, IS_WRITABLE] = word_at(at + _FLAGS) & _WRITEABLE
    return True


_read = compiled("b1", _read_objects, "i8:1 i8:2")


def places_of(arrays: Sequence[np.ndarray], *, written: bool = False) -> np.ndarray:
    """Return the addresses and shapes of arrays of three axes, int64 (arrays, 8).

    The columns are the address, three strides in bytes, three lengths, and whether the array is
    writeable. The caller keeps the arrays alive for as long as the result is used.

    Raises:
        ValueError: an array does not have three axes, or is to be ``written`` and is read-only.
    """
    places = np.empty((len(arrays), COLUMNS), np.int64)
    if _objects_are_known() and set(map(type, arrays)) <= {np.ndarray}:
        fit = _read(np.fromiter(map(id, arrays), np.int64, len(arrays)), places)
    else:
        fit = all(array.ndim == NDIM for array in arrays)
        for place, array in zip(places if fit else (), arrays, strict=False):
            place[:] = _place(array)
    if not fit:
        raise ValueError("arrays of other than three axes")
    if written and not places[:, IS_WRITABLE].all():
        raise ValueError("an array that is to be written is read only")
    return places


def _place(array: np.ndarray) -> tuple[int, ...]:
    return (array.ctypes.data, *array.strides, *array.shape, array.flags.writeable)


@functools.cache
def _objects_are_known() -> bool:
    """Return whether array objects have the layout that ``_read_objects`` expects."""
    sample = np.empty((7, 5, 3), np.uint16)[1:, ::2]
    sample.flags.writeable = False
    fields = np.frombuffer(ctypes.string_at(id(sample), _FLAGS + 8), np.int64)
    known = {_DATA: sample.ctypes.data, _NDIM: NDIM, _FLAGS: 0}
    masks = {_DATA: -1, _NDIM: _INT, _FLAGS: _WRITEABLE}
    return all(int(fields[at // 8]) & masks[at] == known[at] for at in known)
