"""Meristem: Transformers whose heads and depth are planned, grown and pruned instead of guessed."""

__version__ = "0.1.0"
