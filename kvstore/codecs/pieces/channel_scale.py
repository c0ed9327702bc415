"""Every channel over a factor of its own, so that a quantiser sees channels of one size.

With fixed factors it is what SmoothQuant (arXiv 2211.10438) and VecInfer (arXiv 2510.06175) do.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.reader import Reader


class ChannelScale:
    """Implements ``Transform``."""

    def __init__(self, scales: np.ndarray) -> None:
        """``scales``: fp32 (units, width), positive."""
        self._scales = scales[:, None].astype(np.float32)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        return stack / self._scales, b""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        return stack * self._scales

    def note_nbytes(self, num_tokens: int) -> int:
        return 0
