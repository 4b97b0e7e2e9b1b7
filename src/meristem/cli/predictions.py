"""The verb `predict`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from meristem.choices import OnError, Quote
from meristem.cli.app import app, examples
from meristem.cli.messages import show_log
from meristem.cli.options import Average, Device, Step
from meristem.wording import counted, listed


@app.command(
    "predict",
    epilog=examples(
        "meristem predict runs/classifier new-reviews.csv --out predictions.csv",
        'echo "a quiet, lovely film" | meristem predict runs/classifier',
    ),
)
def predict_command(
    run: Annotated[Path, typer.Argument(help="The folder of a classifier's run.")],
    file: Annotated[
        Path | None, typer.Argument(help="CSV, TSV, JSONL, FASTA, or a text a line (.txt); stdin if not given, or -.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a .csv, .tsv or .jsonl; printed as CSV if not given.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column of the texts, if not the run's own.")] = None,
    quote: Annotated[Quote | None, typer.Option(help="How the file is quoted, if not as the run's own.")] = None,
    on_error: Annotated[OnError, typer.Option(help="What to do about a bad row.")] = "refuse",
    temperature: Annotated[
        float | None,
        typer.Option(help="Divides logits: above 1 is less certain, 1 is as trained. Fitted on held-out rows."),
    ] = None,
    step: Step = None,
    average: Average = False,
    device: Device = "auto",
) -> None:
    """Label rows that have no label, with the probability of each class."""
    show_log("stderr")
    from dataclasses import replace

    from meristem.data import read_texts
    from meristem.data.labelled.rows import stream_texts, text_file
    from meristem.data.labelled.sound import SoundRows
    from meristem.evaluation.calibration import calibrate_run
    from meristem.evaluation.predict import check_table, prediction_table
    from meristem.files import write_atomically
    from meristem.runs.run_folder import load_run

    source = None if file is None or str(file) == "-" else text_file(file)
    kind = ".csv" if out is None else check_table(out, source)
    loaded = load_run(run, step=step, average=average, device=device)
    recipe = loaded.recipe
    own = recipe.columns
    columns = replace(own, text=text_column or own.text, quote=quote or own.quote)
    read = stream_texts(sys.stdin.buffer) if source is None else read_texts(source, columns)
    sound = SoundRows(read, on_error, lambda text: print(text, file=sys.stderr))
    rows = list(sound)
    if temperature is None:
        calibration = calibrate_run(loaded)
        temperature = 1.0 if isinstance(calibration, str) else calibration.temperature
        print(f"not calibrated: {calibration}" if isinstance(calibration, str) else calibration, file=sys.stderr)
    found = loaded.predict([row.text for row in rows], temperature=temperature)
    table = prediction_table(rows, found, recipe.classes, kind)
    if out is None:
        print(table, end="")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, table)
    labels = Counter(one.label for one in found).most_common()
    said = listed([f"{label} ({count:,})" for label, count in labels], most=20)
    skipped = f", {counted(sound.bad, 'bad place')} skipped" if sound.bad else ""
    said = f"{counted(len(found), 'row')}{f': {said}' if said else ''}{skipped}{f'; {out}' if out else ''}"
    print(said, file=sys.stderr)
