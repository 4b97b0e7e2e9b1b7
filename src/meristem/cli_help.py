"""What the help of commands has in common."""

from __future__ import annotations


def examples(*commands: str) -> str:
    """The last part of a command's help: commands to begin with."""
    lines = "\n".join(f"  {command}" for command in commands)
    return f"\b\nExamples:\n{lines}"
