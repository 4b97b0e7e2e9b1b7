"""Attacks on the software: what is killed, damaged, fuzzed or starved must survive or be refused clearly.

Run with `make chaos`, or `python -m chaos --help` with `tests` on the path.
"""
