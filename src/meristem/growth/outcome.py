"""What growth has to say after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Growth:
    """What a step brought: decisions with their reasons, whether the structure changed, and an observation if due.

    Where parameters were `exchanged`, the model has others now: an optimizer that the grower knows has them already,
    but whoever else holds on to them, such as a wrapper for several processes, must be made anew.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    changed: bool = False
    exchanged: bool = False
    observation: dict[str, Any] | None = None
