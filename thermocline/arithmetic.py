"""A digest of all that a function computes with: its code, and the values that the code names.

The same digest in every process means the same arithmetic. What cannot be told apart so is refused.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import sys
import types
from typing import Any, Final

import numpy as np

# Their modules, functions and classes are told apart by name, others' by their contents.
LIBRARIES: Final = sys.stdlib_module_names | {"builtins", "ml_dtypes", "numpy", "scipy", "torch"}
_PLAIN: Final = (type(None), type(...), bool, int, float, complex, str, bytes, range, np.dtype)
_GLOBALS: Final = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES: Final = ("STORE_GLOBAL", "DELETE_GLOBAL")


class Unnamed(ValueError):
    """A value has no digest that is the same in every process; the message says which."""


def digest_of(*values: object) -> str:
    """Returns 40 hexadecimal digits for functions and values. Raises ``Unnamed``."""
    try:
        return _Digest().of("value", "values", values).hex()
    except RecursionError:
        raise Unnamed("the functions use values within values without an end") from None


def _joined(*parts: bytes | str) -> bytes:
    seen = hashlib.blake2b(digest_size=20)
    for part in parts:
        part = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        seen.update(len(part).to_bytes(8, "little") + part)
    return seen.digest()


class _Digest:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}  # functions that are looked at, by number

    def of(self, name: str, kind: str, value: Any) -> bytes:
        """Return the digest of a value; ``name`` and ``kind`` say in errors where it was found."""
        if type(value) in _PLAIN or isinstance(value, np.dtype):
            return _joined(type(value).__name__, repr(value))
        if isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap):
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise Unnamed(f"{kind} {name!r} is an array of objects, which have no name")
            is_scalar = isinstance(value, np.generic)
            form = repr((array.dtype.str, array.shape, array.strides, is_scalar))
            return _joined("array", form, array.tobytes())
        if type(value) in (tuple, list):
            return _joined(type(value).__name__, *(self.of(name, kind, x) for x in value))
        if type(value) in (set, frozenset):
            return _joined("set", *sorted(self.of(name, kind, x) for x in value))
        if type(value) is dict:
            pairs = (self.of(name, kind, x) for pair in value.items() for x in pair)
            return _joined("dict", *pairs)
        if type(value).__module__ == "torch":
            return self._of_torch(name, kind, value)
        if library := _name_in_library(value):
            return _joined("library", library)
        if isinstance(value, types.FunctionType):
            if (number := self._seen.get(id(value))) is not None:
                return _joined("again", str(number))
            self._seen[id(value)] = len(self._seen)
            return self._of_function(value)
        raise Unnamed(f"{kind} {name!r} is {type(value).__name__!r}, which has no name")

    def _of_torch(self, name: str, kind: str, value: Any) -> bytes:
        import torch

        if isinstance(value, torch.Tensor):
            values = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _joined("tensor", str(value.dtype), repr(tuple(value.shape)), values.tobytes())
        if isinstance(value, torch.dtype | torch.device):
            return _joined("torch", repr(value))
        raise Unnamed(f"{kind} {name!r} is {type(value).__name__!r}, which has no name")

    def _of_function(self, function: types.FunctionType) -> bytes:
        parts = [self._of_code(function.__code__, function.__globals__)]
        parts.append(self.of(function.__name__, "a default of", function.__defaults__))
        parts.append(self.of(function.__name__, "a default of", function.__kwdefaults__))
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                held = cell.cell_contents
            except ValueError:
                raise Unnamed(f"the variable {name!r} has no value yet") from None
            parts.append(self.of(name, "the variable", held))
        parts.append(self.of(function.__name__, "an attribute of", function.__dict__))
        return _joined("function", *parts)

    def _of_code(self, code: types.CodeType, known: dict[str, Any]) -> bytes:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        parts = [code.co_code, repr(counts), repr(names), getattr(code, "co_exceptiontable", b"")]
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                parts.append(self._of_code(constant, known))
            else:
                parts.append(self.of(code.co_name, "a constant of", constant))
        steps = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
        for i, step in enumerate(steps):
            if step.opname in _WRITES:
                raise Unnamed(f"{code.co_name!r} changes the global {step.argval!r}")
            if step.opname == "IMPORT_NAME" and not _is_library(step.argval):
                raise Unnamed(f"{code.co_name!r} imports {step.argval!r} itself")
            if step.opname in _GLOBALS and step.argval in known:
                parts.append(self.of(*_read(step.argval, known[step.argval], steps[i + 1 :])))
            elif step.opname == "LOAD_GLOBAL" and not hasattr(builtins, step.argval):
                raise Unnamed(f"there is no global {step.argval!r} yet")
        return _joined("code", *parts)


def _read(name: str, value: Any, steps: list[dis.Instruction]) -> tuple[str, str, Any]:
    """Return a global, or, of a module that is no library's, the value that is read from it."""
    for step in steps:
        is_own = isinstance(value, types.ModuleType) and not _is_library(value.__name__)
        if not is_own or step.opname not in _ATTRIBUTES or not hasattr(value, step.argval):
            break
        name, value = f"{name}.{step.argval}", getattr(value, step.argval)
    return name, "the global", value


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


def _name_in_library(value: Any) -> str:
    """Return the name by which a library has this very object; "" if there is none."""
    if isinstance(value, types.ModuleType):
        return value.__name__ if _is_library(value.__name__) else ""
    if not callable(value):
        return ""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    modules = (module,) if module else ("numpy", "scipy.special", "torch")
    for found in (x for x in modules if isinstance(name, str) and _is_library(x)):
        held: Any = sys.modules.get(found)
        for part in str(name).split("."):
            held = getattr(held, part, None)
        if held is value:
            return f"{found}.{name}"
    return ""
