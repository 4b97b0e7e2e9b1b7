"""The verb `watch`: runs while they go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from meristem.cli.app import app, examples
from meristem.errors import InputError


@app.command("watch", epilog=examples("meristem watch runs/first", "meristem watch runs/first --text"))
def watch_command(
    runs: Annotated[
        list[Path],
        typer.Argument(help="The folder of a run, which need not be there yet, or of several.", metavar="RUN"),
    ],
    port: Annotated[
        int | None, typer.Option(help="Where the page is, on this machine alone: 8642 if not given, 0 for any.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="In the terminal, until the run has finished; no page.")] = False,
) -> None:
    """Follow a run while it goes on: the page of `report`, on 127.0.0.1, that shows what is new by itself.

    Only the files of the run are read, and nothing is changed. It may not have begun yet, stop and go on.
    """
    from meristem.watch.runs import Watch

    if text and port is not None:
        raise InputError("port", port, "is of the page, and --text shows none; give one of the two")
    watch = Watch(runs)
    try:
        if text:
            from meristem.watch.text import follow

            follow(watch)
        else:
            from meristem.watch.server import PORT, serve

            serve(watch, PORT if port is None else port)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
