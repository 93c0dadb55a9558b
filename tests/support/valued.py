"""Files whose values are checked."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def noise(*shape: int, dtype: Any = np.float32) -> Array:
    """Return values of which none is zero."""
    return (np.random.default_rng(0).random(shape) + 1).astype(dtype)
