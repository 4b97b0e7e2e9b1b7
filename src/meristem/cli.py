"""The command line: one verb per job. Nothing heavy is imported before the verb is known."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from meristem import __version__
from meristem.arguments import integers
from meristem.choices import DemoCriterion, KnownTaskKind, OnError, OtherLabels, Pooling, Quote, Schedule
from meristem.cli_bench import bench_app
from meristem.cli_help import examples
from meristem.errors import InputError, MachineError, Remedy, RunError, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meristem.evaluation.evaluate import Evaluation
    from meristem.evaluation.evaluate_classifier import ClassEvaluation
    from meristem.plan import Plan
    from meristem.training.loop import Outcome
    from meristem.wording import Notice

app = typer.Typer(
    name="meristem",
    help="Train Transformers whose heads and depth are planned, grown and pruned instead of guessed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Prepare and check data.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
demo_app = typer.Typer(help="See a method at work on a small task.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")
app.add_typer(demo_app, name="demo")

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

# What the library names otherwise than the command line does; other names differ by their hyphens only.
FLAGS = {
    "columns.text": "--text-column", "columns.label": "--label-column", "columns.split": "--split-column",
    "columns.quote": "--quote", "columns.field": "--label-field", "columns.table": "--label-table",
    "end_of_text": "--end-of-text",
}  # fmt: skip


# What the machine, not the input, is the reason of: a full or broken disk, too many open files, no memory.
MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
)  # fmt: skip


def main() -> None:
    """Run the command line; what went wrong is one clear line, not a traceback.

    The exit status is 2 where the input is at fault, 1 where the machine is.
    """
    _mend_streams()
    _show_log()
    try:
        try:
            code = app(standalone_mode=False)
        finally:
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + 13)
    except InputError as error:
        named = InputError(FLAGS.get(error.field, error.field), error.value, error.expected)
        _fail(2, f"{named}{_remedy_text(error.remedy)}")
    except RunError as error:
        _fail(2, f"{error}{_remedy_text(error.remedy)}")
    except MachineError as error:
        _fail(1, str(error))
    except MemoryError as error:
        _fail(1, f"out of memory; take a smaller model, batch or input ({shortened(str(error)) or 'no more is known'})")
    except OSError as error:  # a full disk, a folder that cannot be written
        where = "" if error.filename is None else f"{shortened(str(error.filename))}: "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "; make room, then run it again (a run: meristem resume)" if full else ""
        _fail(1 if error.errno in MACHINE else 2, f"{where}{error.strerror or error}{remedy}")
    except Exception as error:
        if hasattr(error, "format_message"):  # the command line was not understood
            _refuse_usage(error)
        if not _is_out_of_memory(error):
            raise
        _fail(1, f"out of memory; take a smaller model or train.micro_batch ({shortened(str(error))})")


def _mend_streams() -> None:
    """Let closed streams lead nowhere, so that no file takes their place, and show what an encoding does not have."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  (it stays open)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _PlainLines(logging.Handler):
    """Shows what the library logs as plain lines."""

    stream = "stdout"

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=getattr(sys, self.stream), flush=True)


LINES = _PlainLines(logging.INFO)


def _show_log(stream: str = "stdout") -> None:
    """Show what is logged on the standard output, or on the standard error where the output is for results."""
    LINES.stream = stream
    logger = logging.getLogger("meristem")
    logger.setLevel(logging.INFO)
    logger.addHandler(LINES)  # the same one is not added twice


def _remedy_text(remedy: Remedy | None) -> str:
    """How a remedy is asked for on the command line, in brackets."""
    if remedy is None:
        return ""
    names = (argument.partition("=") for argument in remedy.arguments)
    flags = ", ".join(f"{FLAGS.get(name, _flag(name))} {value}".strip() for name, _, value in names)
    command = ["meristem", remedy.call, remedy.target] if remedy.call else []
    return f" ({' '.join(part for part in (*command, flags) if part)})"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _notice_text(notice: Notice) -> str:
    return f"{notice.text}{_remedy_text(notice.remedy)}"


def _fail(code: int, text: str) -> NoReturn:
    words = " ".join(shortened(word) for word in text.split())  # names of files can be long, too
    with suppress(OSError):  # nobody may be there to read it
        print(f"error: {words}", file=sys.stderr, flush=True)
    sys.exit(code)


def _refuse_usage(error: Any) -> NoReturn:
    """A line for arguments that mean nothing; the help itself where there are none."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    help = "" if context is None else f" (see {context.command_path} --help)"
    _fail(error.exit_code, f"{shortened(error.format_message())}{help}")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch found no memory; on a CPU it says so in words only."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# --- plan ------------------------------------------------------------------------------------------------------------


@app.command(
    "plan",
    epilog=examples(
        "meristem plan --layers 12 --width 768 --heads 12 --against uniform",
        "meristem plan --heads 3,3,6,6,12,12 --out my-plan.json",
    ),
)
def plan_command(
    layers: Annotated[int | None, typer.Option(help="Number of layers; 12.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the residual stream; 768.")] = None,
    heads: Annotated[str | None, typer.Option(help="Base head count; 12. Or a list: 3,3,6,6,12,12.")] = None,
    schedule: Annotated[
        Schedule | None, typer.Option(help="Head counts over depth; prism unless --heads is a list.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--plan", help="A plan file, or a run for its present plan.")] = None,
    dims: Annotated[str, typer.Option(help="Allowed head dims.")] = "256,128,96,64",
    ramp: Annotated[int | None, typer.Option(help="Layers before the base count is reached.")] = None,
    seed: Annotated[int, typer.Option(help="Which shuffle.")] = 0,
    kv_group: Annotated[int, typer.Option(help="Query heads per key/value head, in every layer.")] = 1,
    mqa: Annotated[bool, typer.Option("--mqa", help="One key/value head in every layer; needs --force.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept falling head counts, and --mqa.")] = False,
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size.")] = 50304,
    context: Annotated[int, typer.Option(help="Context length.")] = 1024,
    feed_forward: Annotated[int | None, typer.Option(help="Feed-forward size; 8/3 of the width.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head dim; width / heads. For uniform and lists.")] = None,
    classes: Annotated[int | None, typer.Option(help="Plan a classifier that tells so many classes apart.")] = None,
    pooling: Annotated[Pooling, typer.Option(help="What a classifier's answer is read from.")] = "mean",
    tensor_parallel: Annotated[int, typer.Option(help="Warn unless this size divides all head counts.")] = 1,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per forward pass, for the memory estimate.")] = 32768,
    against: Annotated[Schedule | None, typer.Option(help="Schedule to set beside this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan to a file.")] = None,
) -> None:
    """Print a plan: its structure, what it costs, and what will be slow."""
    from meristem.files import write_atomically
    from meristem.plan import Plan
    from meristem.plan.view import plan_facts, plan_text, side_by_side
    from meristem.schedules import check_rising

    shape: dict[str, Any] = {
        "vocabulary": vocabulary, "context": context, "feed_forward": feed_forward, "kv_group": kv_group,
        "force_multi_query": mqa, "head_dim": head_dim, "classes": classes, "pooling": pooling,
    }  # fmt: skip
    solver: dict[str, Any] = {"dims": integers("dims", dims), "ramp": ramp, "seed": seed}
    if file is not None:
        given = {
            "layers": layers, "width": width, "heads": heads, "schedule": schedule, "mqa": mqa or None,
            "head_dim": head_dim, "classes": classes,
        }  # fmt: skip
        for field, value in given.items():
            if value is not None:
                raise InputError(field, value, f"cannot be given together with --plan {file}")
        name, plan = file.name, _load_plan(file)
    elif heads is not None and "," in heads:
        counts = integers("heads", heads)
        if layers not in (None, len(counts)):
            raise InputError("layers", layers, f"must equal the {len(counts)} head counts given, or be left out")
        if schedule is not None:
            raise InputError("schedule", schedule, "cannot be given together with a list of head counts")
        if not force:
            check_rising(counts)
        name, plan = "list", Plan.from_heads(counts, width=768 if width is None else width, **shape)
    else:
        name, base = schedule or "prism", integers("heads", "12" if heads is None else heads)[0]
        size: dict[str, Any] = {"layers": 12 if layers is None else layers, "width": 768 if width is None else width}
        plan = Plan.scheduled(name, heads=base, **size, **solver, **shape)
    if mqa and not force:
        _refuse_mqa(plan)
    if out is not None:
        write_atomically(out, plan.to_json())
    other = None
    if against is not None:
        ratios = {layer.heads // layer.kv_heads for layer in plan.layers}
        other = Plan.scheduled(
            against, layers=len(plan.layers), width=plan.width, heads=max(plan.heads), **solver,
            vocabulary=plan.vocabulary, context=plan.context, feed_forward=plan.feed_forward,
            kv_group=ratios.pop() if len(ratios) == 1 else 1, classes=plan.classes, pooling=plan.pooling,
        )  # fmt: skip
    if as_json:
        facts = plan_facts(plan, tensor_parallel)
        print(
            json.dumps(facts if other is None else {**facts, "against": plan_facts(other, tensor_parallel)}, indent=1)
        )
    elif other is not None:
        print(side_by_side(plan, other, name, against or ""))
    else:
        print(plan_text(plan, batch_tokens, tensor_parallel))


def _load_plan(path: Path) -> Plan:
    from meristem.plan import Plan

    if not path.is_dir():
        return Plan.load(path)
    from meristem.runs.run_folder import RunFolder

    return RunFolder.open(path).newest_plan


def _refuse_mqa(plan: Plan) -> None:
    from meristem.plan import Plan

    twin = Plan.from_heads(
        plan.heads, width=plan.width, vocabulary=plan.vocabulary, context=plan.context, feed_forward=plan.feed_forward
    )
    cost, other = plan.cost, twin.cost
    raise InputError(
        "mqa", True,
        f"is not neutral: parameters {cost.parameters:,} against {other.parameters:,}, KV cache "
        f"{cost.kv_bytes_per_token:,} against {other.kv_bytes_per_token:,} bytes/token, and the widths of keys and "
        "values differ between layers; use --kv-group, or add --force",
    )  # fmt: skip


# --- data ------------------------------------------------------------------------------------------------------------


@data_app.command(
    "prepare",
    epilog=examples(
        "meristem data prepare my-texts/ --out data",
        "meristem data prepare corpus.jsonl.zst --tokenizer tokenizer.json --out data",
    ),
)
def data_prepare(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files or folders: txt, md, py, jsonl, parquet; .gz and .zst too.")
    ] = None,
    builtin: Annotated[bool, typer.Option("--builtin", help="Use the Python standard library's own sources.")] = False,
    tokenizer: Annotated[str, typer.Option(help="bytes, or a Hugging Face tokenizer.json.")] = "bytes",
    end_of_text: Annotated[str | None, typer.Option(help="End-of-text token, if not one of the usual.")] = None,
    held_out: Annotated[float | None, typer.Option(help="Share of documents held out; 0.005, built-in 0.05.")] = None,
    on_error: Annotated[OnError, typer.Option(help="What to do about a bad line or file.")] = "refuse",
    text_field: Annotated[str, typer.Option(help="Field of jsonl and parquet that holds the text.")] = "text",
    workers: Annotated[int | None, typer.Option(help="Processes; one per core if it pays.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace data made from other inputs.")] = False,
) -> None:
    """Turn text into token shards."""
    from meristem.data import held_out_warning, load_tokenizer, prepare, shown_progress, stdlib_files
    from meristem.wording import counted

    if builtin == bool(paths):
        raise InputError("paths", [str(p) for p in paths or []], "give either files and folders, or --builtin")
    with shown_progress() as report:
        index = prepare(
            stdlib_files() if builtin else paths or [], out,
            tokenizer=load_tokenizer(tokenizer, end_of_text),
            held_out=held_out if held_out is not None else (0.05 if builtin else 0.005),
            on_error=on_error, text_field=text_field, workers=workers, overwrite=overwrite, report=report,
            source="Python standard library" if builtin else None,
        )  # fmt: skip
    print(
        f"{out}: {index.train.tokens:,} training tokens in {counted(index.train.documents, 'document')}, "
        f"{index.held_out.tokens:,} held-out tokens in {index.held_out.documents:,}; "
        f"{index.tokenizer.vocabulary:,} token ids" + (f"; {index.skipped} bad places skipped" if index.skipped else "")
    )
    if held_out != 0 and (warning := held_out_warning(index)) is not None:
        print(f"warning: {_notice_text(warning)}", file=sys.stderr)


@data_app.command(
    "prepare-labelled",
    epilog=examples(
        "meristem data prepare-labelled reviews.tsv --out data",
        "meristem data prepare-labelled spikes.fasta --label-field 2 --k 3 --out data",
    ),
)
def data_prepare_labelled(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    paths: Annotated[list[Path], typer.Argument(help="Files: csv, tsv, jsonl, fasta; .gz and .zst too.")],
    validation: Annotated[list[Path] | None, typer.Option(help="File of held-out rows; repeat for more.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column of the text; sentence, text or sequence.")] = None,
    label_column: Annotated[str, typer.Option(help="Column of the label.")] = "label",
    split_column: Annotated[str | None, typer.Option(help="Column that says train or validation.")] = None,
    quote: Annotated[Quote, typer.Option(help="How csv and tsv are quoted; auto: none for tsv.")] = "auto",
    label_field: Annotated[int, typer.Option(help="Field of FASTA headers between bars; -1 is the last.")] = -1,
    label_table: Annotated[Path | None, typer.Option(help="CSV or TSV with the labels of FASTA records.")] = None,
    table_id: Annotated[str, typer.Option(help="Its column of ids.")] = "id",
    tokens: Annotated[
        str | None,
        typer.Option(help="words, chars, kmers, or a Hugging Face tokenizer.json; kmers for FASTA, otherwise words."),
    ] = None,
    k: Annotated[int, typer.Option(help="Letters of a k-mer; 3 makes 64 of DNA, and of proteins up to 8,000.")] = 3,
    stride: Annotated[int, typer.Option(help="Letters from one k-mer to the next.")] = 1,
    length: Annotated[int | None, typer.Option(help="Tokens of a row; the longest, up to 512.")] = None,
    min_count: Annotated[int, typer.Option(help="Rarer pieces are unknown.")] = 2,
    max_vocabulary: Annotated[int, typer.Option(help="Pieces at most.")] = 50_000,
    min_rows: Annotated[int, typer.Option(help="Leave out classes with fewer training rows.")] = 1,
    held_out: Annotated[float, typer.Option(help="Share of texts held out, if neither file nor column says.")] = 0.1,
    drop_duplicates: Annotated[bool, typer.Option("--drop-duplicates", help="Train on every text once.")] = False,
    on_error: Annotated[OnError, typer.Option(help="What to do about a bad row.")] = "refuse",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace data made from other inputs.")] = False,
) -> None:
    """Turn labelled rows into data for a classifier."""
    from meristem.data import Columns, Cut, default_cut, findings_notes, findings_warnings, prepare_labelled

    files = [*paths, *(validation or [])]
    cut = default_cut(files, k, stride) if tokens is None else Cut.named(tokens, k, stride)
    table = None if label_table is None else str(label_table.resolve())
    index = prepare_labelled(
        paths, out, validation=validation or (),
        columns=Columns(text_column, label_column, split_column, quote, label_field, table, table_id),
        cut=cut, length=length, held_out=held_out, drop_duplicates=drop_duplicates,
        min_rows=min_rows, min_count=min_count, max_vocabulary=max_vocabulary, on_error=on_error, overwrite=overwrite,
        report=print,
    )  # fmt: skip
    print(f"texts are cut into {cut}" + (" (--tokens for other pieces)" if tokens is None else ""))
    print(f"{out}: " + "\n".join(map(_notice_text, findings_notes(index))))
    wanted = bool(held_out or validation or split_column)
    for warning in findings_warnings(index, held_out=wanted):
        print(f"warning: {_notice_text(warning)}", file=sys.stderr)


@data_app.command("verify", epilog=examples("meristem data verify data"))
def data_verify(folder: Annotated[Path, typer.Argument(help="A prepared folder.")]) -> None:
    """Check every file of a prepared folder against its sha256."""
    from meristem.data import verify

    index = verify(folder)
    print(f"{folder}: whole ({index.train.tokens + index.held_out.tokens:,} tokens)")


# --- train, resume, eval, generate -----------------------------------------------------------------------------------


class _WithSettings(TyperCommand):
    """A command that takes the settings of a configuration, which its help lists."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from meristem.config import all_settings  # the policies' own defaults come with torch: only now

        super().format_epilog(ctx, formatter)
        with formatter.section("Settings, each with what it takes and what it is if not given"):
            formatter.write_dl([(f"--{s.key}", f"{s.takes}  [default: {s.default}]") for s in all_settings()])


@app.command(
    "train",
    cls=_WithSettings,
    context_settings=OVERRIDES,
    epilog=examples(
        "meristem train configs/demo.toml --out runs/first --data.path data",
        "meristem train configs/demo.toml --out runs/depth --growth.policies sgt --train.steps 2000",
    ),
)
def train_command(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A TOML file; see configs/.")],
    out: Annotated[Path, typer.Option(help="Folder for the run.")],
    go_on: Annotated[bool, typer.Option("--continue", help="If the run is there already, resume it.")] = False,
) -> None:
    """Train a model. Any value of the configuration can be given here: --train.steps 100."""
    from meristem.config import load_config
    from meristem.training.loop import resume, train

    resolved = load_config(config, context.args, _note)
    exists = go_on and (out / "config.toml").is_file()
    _finish(lambda: resume(out, resolved) if exists else train(resolved, out))


@app.command(
    "resume",
    context_settings=OVERRIDES,
    epilog=examples("meristem resume runs/first", "meristem resume runs/first --train.device cpu"),
)
def resume_command(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin anew on purpose; logs and checkpoints are kept aside.")
    ] = False,
) -> None:
    """Go on with a run from its newest whole checkpoint."""
    from meristem.config import override
    from meristem.runs.run_folder import RunFolder
    from meristem.training.loop import resume

    _finish(lambda: resume(run, override(RunFolder.open(run).config, context.args), from_start=from_start))


def _note(text: str) -> None:
    """Tell what should be known about a configuration, once however many processes there are."""
    from meristem.training.distributed import own_rank

    if own_rank() == 0:
        print(text, file=sys.stderr)


def _finish(train: Callable[[], Outcome]) -> None:
    """Train, and draw what was learned; leave with the signal's exit status if one ended the run."""
    from meristem.training.display import silence_output
    from meristem.training.distributed import own_rank

    try:
        outcome = train()
    except KeyboardInterrupt:  # at once: not even a save that is under way is waited for
        os._exit(128 + signal.SIGINT)
    if own_rank() == 0:
        from meristem.report.pictures import draw_growth, draw_loss

        draw_loss(outcome.folder)
        draw_growth(outcome.folder)
        if outcome.signal is None:
            held_out = "" if outcome.held_out is None else f", held-out loss {outcome.held_out:.4f}"
            print(f"finished at step {outcome.step}{held_out}: {outcome.folder}")
        else:
            try:
                print(f"go on with: meristem resume {outcome.folder}", flush=True)
            except OSError:  # nobody reads any more
                silence_output()
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


@app.command(
    "eval",
    epilog=examples("meristem eval runs/first", "meristem eval runs/classifier --data more-reviews.tsv --json"),
)
def eval_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint to take; the newest if not given.")] = None,
    windows: Annotated[int | None, typer.Option(help="Held-out windows for the loss; 256.")] = None,
    distance_windows: Annotated[int | None, typer.Option(help="Those for the attention distance; 64.")] = None,
    data: Annotated[Path | None, typer.Option(help="Other prepared data; for a classifier also a file.")] = None,
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for result and pictures; the run's own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Held-out loss, perplexity and attention distance; of a classifier accuracy and F1. Draws pictures."""
    _show_log("stderr")
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
    of_windows, of_rows = ({k: v for k, v in given.items() if v is not None} for given in (of_windows, of_rows))
    classifies = RunFolder.open(run).plan.classes is not None
    for name, value in (of_windows if classifies else of_rows).items():
        kind = "a classifier" if classifies else "a language model"
        raise InputError(name, value, f"means nothing here: {run} is the run of {kind}")
    distances: Sequence[float] | None = None
    result: Evaluation | ClassEvaluation
    if classifies:
        from meristem.evaluation.evaluate_classifier import evaluate_classifier
        from meristem.report.classification_text import classification_text

        result = evaluate_classifier(run, step=step, data=data, device=device, out=out, **of_rows)
        text = classification_text(result)
    else:
        from meristem.evaluation.evaluate import evaluate_run
        from meristem.report.pictures import evaluation_text

        result = evaluate_run(run, step=step, data=data, device=device, out=out, **of_windows)
        text, distances = evaluation_text(result), result.attention_distance
    pictures: list[Path | None] = []
    if data is None:  # those of the run are not about other data
        pictures = [draw_structure(run, distances, result.plan, out), draw_loss(run, out), draw_growth(run, out)]
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
        return
    print(text)
    if result.file is not None:
        print(f"result: {result.file}")
    if data is None:
        _print_pictures(run, pictures)


def _print_pictures(run: Path, pictures: Sequence[Path | None]) -> None:
    drawn = [str(path) for path in pictures if path is not None]
    print(f"pictures: {', '.join(drawn)}" if drawn else f"{run} cannot be written to: nothing was saved (see --out)")


@app.command("report", epilog=examples("meristem report runs/first", "meristem report runs/first --out pictures"))
def report_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the pictures; the run's own.")] = None,
) -> None:
    """What a run has done so far, from its files: what grew, when and why; draws loss.svg and growth.svg."""
    from meristem.report.pictures import draw_growth, draw_loss, run_text

    print(run_text(run))
    _print_pictures(run, [draw_loss(run, out), draw_growth(run, out)])


@app.command("audit", epilog=examples("meristem audit runs/first", "meristem audit runs/first --sequences 1000 --json"))
def audit_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    sequences: Annotated[int, typer.Option(help="Held-out windows or rows to compare losses on, at most.")] = 256,
    steps: Annotated[int, typer.Option(help="Updates of a head that is added, to see what it gains.")] = 200,
    layers: Annotated[int, typer.Option(help="Layers that are given one, at most; those of largest demand.")] = 4,
    feeds: Annotated[int, typer.Option(help="Training batches on which the demand is measured.")] = 40,
    threshold: Annotated[float, typer.Option(help="Share of the loss below which a difference is none.")] = 0.001,
    data: Annotated[Path | None, typer.Option(help="Other prepared data, made alike.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the result; the run's own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Does every head of a trained model matter (minimal), and would another one help (sufficient)?"""
    _show_log("stderr")
    from meristem.evaluation.audit import AuditSettings
    from meristem.evaluation.audit_run import audit_run, paced

    settings = AuditSettings(threshold, feeds, steps, layers=layers)
    report = paced(lambda text: print(text, file=sys.stderr, flush=True))
    result = audit_run(run, settings, sequences=sequences, data=data, device=device, out=out, report=report)
    print(json.dumps(result.to_dict(), indent=1, allow_nan=False) if as_json else result)


@app.command(
    "generate",
    epilog=examples(
        'meristem generate runs/first --prompt "Once upon a time"',
        'meristem generate runs/first --prompt "One" --prompt "Two" --temperature 0',
    ),
)
def generate_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; repeat for several.")],
    tokens: Annotated[int | None, typer.Option(help="Tokens to add at most; as many as fit, up to 200.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that make up this share.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    step: Annotated[int | None, typer.Option(help="Checkpoint to take; the newest if not given.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Continue a prompt with a trained model; a single prompt is streamed."""
    from meristem.data import StreamDecoder
    from meristem.devices import autocast
    from meristem.model import Sampling, generate, stream
    from meristem.model.generate import room
    from meristem.runs.run_folder import load_run

    sampling = Sampling(temperature, top_k, top_p, seed)
    for text in prompt:
        if any("\ud800" <= character <= "\udfff" for character in text):  # how Python marks bytes it cannot read
            raise InputError("prompt", text, "must be valid UTF-8 text")
    loaded = load_run(run, step=step, device=device, report=lambda text: print(text, file=sys.stderr))
    model, tokenizer = loaded.decoder, loaded.tokenizer
    ids = [[int(t) for t in tokenizer.encode(text)] or [tokenizer.end_of_text] for text in prompt]
    most = room(model, ids)
    if tokens is not None and not 1 <= tokens <= most:
        raise InputError("tokens", tokens, f"must be from 1 to {most}, what the context of {model.plan.context} leaves")
    options: dict[str, Any] = {
        "max_tokens": min(200, most) if tokens is None else tokens, "end_of_text": tokenizer.end_of_text,
        "vocabulary": tokenizer.vocabulary, "sampling": sampling,
    }  # fmt: skip
    with autocast(loaded.device):
        if len(prompt) > 1:
            for text, continuation in zip(prompt, generate(model, ids, **options), strict=True):
                print(text + tokenizer.decode(continuation), end="\n\n")
            return
        decoder = StreamDecoder(tokenizer)
        print(prompt[0], end="", flush=True)
        for (token,) in stream(model, ids, **options):
            if token is not None:
                print(decoder.feed(token), end="", flush=True)
        print(decoder.flush())


# --- demo ------------------------------------------------------------------------------------------------------------


@demo_app.command(
    "incrt", epilog=examples("meristem demo incrt", "meristem demo incrt --task bag", "meristem demo incrt --heads 6")
)
def demo_incrt(
    heads: Annotated[int, typer.Option(help="Heads of the teacher, which the model should find: 1 to 8.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the task and of the model.")] = 0,
    task: Annotated[
        KnownTaskKind, typer.Option(help="A teacher's heads; a bag, where 1 is enough; noise, with nothing to learn.")
    ] = "teacher",
    criterion: Annotated[DemoCriterion, typer.Option(help="What heads are born by.")] = "demand",
    steps: Annotated[int, typer.Option(help="Updates; 0 for 3000, or 4000 for more than 6 heads.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for picture and events.")] = Path("runs/demo-incrt"),
) -> None:
    """A model finds its number of heads on a task whose answer is known; about half a minute."""
    from meristem.synthetic.demo import Demo, show

    show(Demo(task, heads, criterion, seed, steps), out, say=print)
