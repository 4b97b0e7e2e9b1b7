"""The verbs `eval`, `report` and `audit`: what a run has done and learned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meristem.choices import OnError, OtherLabels, Quote
from meristem.cli.app import app, examples
from meristem.cli.messages import paced, show_log
from meristem.cli.options import AsJson, Average, Device, Step
from meristem.errors import InputError, Remedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meristem.evaluation.evaluate import Evaluation
    from meristem.evaluation.evaluate_classifier import ClassEvaluation


@app.command(
    "eval",
    epilog=examples(
        "meristem eval runs/first",
        "meristem eval runs/classifier --data more-reviews.tsv --json",
        "meristem eval runs/first --tasks piqa,blimp --data copies --limit 100",
    ),
)
def eval_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run; with --tasks also an exported one.")],
    step: Step = None,
    average: Average = False,
    tasks: Annotated[
        str | None, typer.Option(help="Zero-shot tasks of lm-evaluation-harness instead, with commas between.")
    ] = None,
    task_folder: Annotated[Path | None, typer.Option(help="With --tasks: folder of task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(help="With --tasks: only the first rows of each.")] = None,
    batch: Annotated[int | None, typer.Option(help="With --tasks: texts in the model at a time; 16.")] = None,
    windows: Annotated[int | None, typer.Option(help="Held-out windows for the loss; 256.")] = None,
    distance_windows: Annotated[int | None, typer.Option(help="Those for the attention distance; 64.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Other prepared data; for a classifier also a file; with --tasks a folder of their rows."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Only the rows of a file that its split column calls so.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column of a file, if not the run's own.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column of a file, if not the run's own.")] = None,
    split_column: Annotated[str | None, typer.Option(help="Column of a file, if not the run's own.")] = None,
    quote: Annotated[Quote | None, typer.Option(help="How a file is quoted, if not as the run's own.")] = None,
    label_field: Annotated[int | None, typer.Option(help="Field of FASTA headers with the label.")] = None,
    label_table: Annotated[Path | None, typer.Option(help="CSV or TSV with the labels of FASTA records.")] = None,
    other_labels: Annotated[
        OtherLabels | None, typer.Option(help="Labels new to the run; counted apart if not given.")
    ] = None,
    on_error: Annotated[OnError | None, typer.Option(help="What to do about a bad row of a file.")] = None,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for result and pictures; the run's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Held-out loss, perplexity and attention distance; of a classifier accuracy and F1. Draws pictures.

    With --tasks: accuracies and perplexities of zero-shot tasks, with standard errors.
    """
    show_log("stderr")
    from meristem.report.pictures import draw_growth, draw_loss, draw_structure
    from meristem.runs.run_folder import RunFolder

    table = None if label_table is None else str(label_table.resolve())
    columns = {
        "text": text_column, "label": label_column, "split": split_column, "quote": quote, "field": label_field,
        "table": table,
    }  # fmt: skip
    columns = {name: value for name, value in columns.items() if value is not None}
    of_windows: dict[str, Any] = {"windows": windows, "distance_windows": distance_windows}
    of_rows: dict[str, Any] = {
        "columns": columns or None, "split": split, "other_labels": other_labels, "on_error": on_error,
    }  # fmt: skip
    of_tasks: dict[str, Any] = {"task_folder": task_folder, "limit": limit, "batch": batch}
    of_windows, of_rows, of_tasks = (
        {k: v for k, v in given.items() if v is not None} for given in (of_windows, of_rows, of_tasks)
    )
    if tasks is not None:
        for name, value in {**of_windows, **of_rows}.items():
            raise InputError(name, value, "means nothing together with tasks")
        _evaluate_tasks(run, tasks, as_json, step=step, average=average, data=data, device=device, out=out, **of_tasks)
        return
    for name, value in of_tasks.items():
        raise InputError(name, value, "means nothing without tasks", Remedy(("tasks=NAMES",)))
    classifies = RunFolder.open(run).plan.classes is not None
    for name, value in (of_windows if classifies else of_rows).items():
        kind = "a classifier" if classifies else "a language model"
        raise InputError(name, value, f"means nothing here: {run} is the run of {kind}")
    distances: Sequence[float] | None = None
    result: Evaluation | ClassEvaluation
    if classifies:
        from meristem.evaluation.evaluate_classifier import evaluate_classifier
        from meristem.report.classification_text import classification_text

        result = evaluate_classifier(run, step=step, average=average, data=data, device=device, out=out, **of_rows)
        text = classification_text(result)
    else:
        from meristem.evaluation.evaluate import evaluate_run
        from meristem.report.pictures import evaluation_text

        result = evaluate_run(run, step=step, average=average, data=data, device=device, out=out, **of_windows)
        text, distances = evaluation_text(result), result.attention_distance
    pictures: list[Path | None] = []
    if data is None:  # those of the run are not about other data
        pictures = [draw_loss(run, out), draw_growth(run, out)]
        if not average:  # of which the run's own picture tells nothing
            pictures = [draw_structure(run, distances, result.plan, out), *pictures]
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
        return
    print(text)
    if result.file is not None:
        print(f"result: {result.file}")
    if data is None:
        _print_pictures(run, pictures)


def _evaluate_tasks(run: Path, tasks: str, as_json: bool, **options: Any) -> None:
    from meristem.evaluation.harness.evaluate import evaluate_tasks

    result = evaluate_tasks(run, [name.strip() for name in tasks.split(",")], **options)
    if as_json:
        print(json.dumps(result.to_dict(), indent=1, allow_nan=False))
        return
    print(result)
    if result.file is not None:
        print(f"result: {result.file}")


def _print_pictures(run: Path, pictures: Sequence[Path | None]) -> None:
    drawn = [str(path) for path in pictures if path is not None]
    print(f"pictures: {', '.join(drawn)}" if drawn else f"{run} cannot be written to: nothing was saved (see --out)")


@app.command(
    "report", epilog=examples("meristem report runs/first", "meristem report runs/first runs/second --out both.html")
)
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="The folder of a run, or of several.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option(help="The page, or a folder for it; the run's own, for several runs the present one.")
    ] = None,
) -> None:
    """What a run has done so far, from its files: what grew, when and why. Writes one page to look at, report.html.

    Of several runs the page shows curves over one another and what differs. Of one run loss.svg and growth.svg are
    drawn beside it, unless the page is given a name of its own.
    """
    from meristem.report.page.file import PAGE_FILE, report_page
    from meristem.report.pictures import draw_growth, draw_loss, run_text
    from meristem.report.run_names import distinct_names
    from meristem.runs.run_folder import RunFolder

    named = out is not None and out.suffix.lower() in (".html", ".htm")
    folder, name = (out.parent, out.name) if out is not None and named else (out, PAGE_FILE)
    if len(runs) > 1:
        folder = folder or Path()
    print("\n\n".join(map(run_text, runs, distinct_names(runs))))
    page = RunFolder.open(runs[0]).write(name, report_page(runs), folder)
    if len(runs) == 1 and not named:
        _print_pictures(runs[0], [draw_loss(runs[0], folder), draw_growth(runs[0], folder)])
    if page is not None:
        print(f"page: {page}")


@app.command("audit", epilog=examples("meristem audit runs/first", "meristem audit runs/first --sequences 1000 --json"))
def audit_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    sequences: Annotated[int, typer.Option(help="Held-out windows or rows to compare losses on, at most.")] = 256,
    steps: Annotated[int, typer.Option(help="Updates of a head that is added, to see what it gains.")] = 200,
    layers: Annotated[int, typer.Option(help="Layers that are given one, at most; those of largest demand.")] = 4,
    feeds: Annotated[int, typer.Option(help="Training batches on which the demand is measured.")] = 40,
    threshold: Annotated[float, typer.Option(help="Share of the loss below which a difference is none.")] = 0.001,
    data: Annotated[Path | None, typer.Option(help="Other prepared data, made alike.")] = None,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the result; the run's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Does every head of a trained model matter (minimal), and would another one help (sufficient)?"""
    show_log("stderr")
    from meristem.evaluation.audit import AuditSettings
    from meristem.evaluation.audit_run import audit_run

    settings = AuditSettings(threshold, feeds, steps, layers=layers)
    report = paced(lambda text: print(text, file=sys.stderr, flush=True))
    result = audit_run(run, settings, sequences=sequences, data=data, device=device, out=out, report=report)
    print(json.dumps(result.to_dict(), indent=1, allow_nan=False) if as_json else result)
