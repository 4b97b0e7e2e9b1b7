"""The colours of all pictures."""

from __future__ import annotations

INK, MUTED, GRID, BACKGROUND = "#1f2328", "#59636e", "#e4e8ec", "#ffffff"
GUIDE = "#c3cad2"  # faint lines at the changes

# Okabe and Ito: told apart with any kind of colour vision.
BLUE, GREEN, ORANGE, PURPLE = "#0072b2", "#009e73", "#d55e00", "#aa3377"

LIGHT, MIDDLE, DARK = "#eef5fb", "#5b9dcc", "#0b2f57"  # told apart in grey too


def shade(share: float) -> str:
    """From light at 0 to dark at 1."""
    return blend(LIGHT, MIDDLE, 2 * share) if share < 0.5 else blend(MIDDLE, DARK, 2 * share - 1)


def blend(light: str, dark: str, share: float) -> str:
    """The colour between two others, `share` of the way from the first to the second."""
    pairs = [(int(light[i : i + 2], 16), int(dark[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
