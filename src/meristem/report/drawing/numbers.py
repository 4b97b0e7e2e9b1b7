"""Numbers as the pictures write them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def compact(value: float) -> str:
    """A count in few letters: 950, 1.5k, 20M, 2.88B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def rounded(count: int) -> str:
    """A count to four digits, in few letters; it may take the next unit: 999,999 is 1M."""
    return compact(float(f"{count:.4g}"))


def loss_text(loss: float) -> str:
    """A loss to three decimals; small ones to two digits, huge ones in few letters."""
    if abs(loss) < 0.01:
        return f"{loss:.2g}"
    return f"{loss:.3f}" if loss < 1e4 else compact(loss)


def same_decimals(values: Sequence[float]) -> list[str]:
    """Evenly spaced values, all with the decimals that their spacing needs; large ones in few letters."""
    if values and max(map(abs, values)) >= 1e4:
        return [compact(value) for value in values]
    spacing = values[1] - values[0] if len(values) > 1 else 0.01
    decimals = max(0, -math.floor(math.log10(spacing) + 1e-9))
    return [f"{value:.{decimals}f}" for value in values]
