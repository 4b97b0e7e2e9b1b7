"""The tree of verbs, which the modules beside this one put their commands into, and what their help has in common."""

from __future__ import annotations

from typing import Annotated

import typer

from meristem import __version__

app = typer.Typer(
    name="meristem",
    help="Train Transformers whose heads and depth are planned, grown and pruned instead of guessed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def group(name: str, help: str) -> typer.Typer:
    """A verb with verbs of its own."""
    own = typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(own, name=name)
    return own


def examples(*commands: str) -> str:
    """The last part of a command's help: commands to begin with."""
    lines = "\n".join(f"  {command}" for command in commands)
    return f"\b\nExamples:\n{lines}"


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit
