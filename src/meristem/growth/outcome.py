"""What growth has to say after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Growth:
    """What a step brought: decisions with their reasons, whether the structure changed, and an observation if due."""

    events: list[dict[str, Any]] = field(default_factory=list)
    changed: bool = False
    observation: dict[str, Any] | None = None
