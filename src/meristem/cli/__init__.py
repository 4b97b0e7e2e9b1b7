"""The command line: one verb per job. Nothing heavy is imported before the verb is known."""

# The order of these is that of the help.
from meristem.cli import plans, train, importing, results, compare, generation, export, data, bench, demos  # noqa: F401, I001
from meristem.cli.app import app
from meristem.cli.entry import main

__all__ = ["app", "main"]
