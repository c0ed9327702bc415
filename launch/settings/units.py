"""Sizes and times as people write them: ``4GiB``, ``10m``. Strict: ``4G`` is refused."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_BINARY = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Read a size (``512MiB``, ``1.5 GB``, ``1073741824``) in bytes. Raises ``ValueError``."""
    found = _SIZE.fullmatch(text.strip())
    unit = (_BINARY | _DECIMAL).get(found[2]) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with MiB, GiB, MB, GB")
    # Whole numbers are not converted to float, which would change those above 2**53.
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def parse_duration(text: str) -> float:
    """Read a duration (``90``, ``1.5h``, ``10m``, ``250ms``) in seconds. Raises ``ValueError``."""
    found = _SIZE.fullmatch(text.strip())
    unit = _SECONDS.get(found[2]) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a duration; write seconds, or a number with ms, s, m, h")
    return float(found[1]) * unit


def show_bytes(nbytes: float) -> str:
    """Return a size with its unit: 1536 -> ``1.5 KiB``; whole numbers have no fraction."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return _show(nbytes, unit)
        nbytes /= 1024
    return _show(nbytes, "TiB")


def show_duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has two: 5400 -> ``90 m``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * length or seconds == length:
            return _show(seconds / length, unit)
    return _show(seconds, "s")


def shown(name: str, value: object) -> str:
    """Return a setting's value as text; sizes and times have a unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_bytes"):
            return show_bytes(value)
        if name.endswith("_s"):
            return show_duration(value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return ", ".join(f"{x['name']} ({x['load']})" for x in value)
    if isinstance(value, list | tuple):
        return ", ".join(str(x) for x in value)
    return str(value)


def _show(number: float, unit: str) -> str:
    return f"{number:.0f} {unit}" if float(number).is_integer() else f"{number:.1f} {unit}"
