"""Labelled rows: tables of texts or sequences with classes, cut into pieces and stored row by row."""
