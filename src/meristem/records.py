"""What is written down: JSON has no word for numbers that are not finite."""

from __future__ import annotations

import math


def finite(value: float) -> float | None:
    """The value, or None if it is infinite or not a number."""
    return value if math.isfinite(value) else None
