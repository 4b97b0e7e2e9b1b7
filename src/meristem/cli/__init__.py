"""The command line: one verb per job. Nothing heavy is imported before the verb is known."""

# The order of these is that of the help.
from meristem.cli import (  # noqa: I001
    plans, configs, train, importing, results, pruning, watch, compare, generation, predictions,  # noqa: F401
    export, data, bench, demos, doctor,  # noqa: F401
)  # fmt: skip
from meristem.cli.app import app
from meristem.cli.entry import main

__all__ = ["app", "main"]
