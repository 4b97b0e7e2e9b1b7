"""The verbs of `data`: text and labelled rows are prepared, and checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meristem.choices import OnError, Quote
from meristem.cli.app import examples, group
from meristem.cli.messages import notice_text
from meristem.errors import InputError

data_app = group("data", "Prepare and check data.")


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
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a Hugging Face tokenizer.json, its folder, or the name of a downloaded model.")
    ] = "bytes",
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
        f"{index.tokenizer.vocabulary:,} token ids"
        + (f"; {counted(index.skipped, 'bad place')} skipped" if index.skipped else "")
    )
    if held_out != 0 and (warning := held_out_warning(index)) is not None:
        print(f"warning: {notice_text(warning)}", file=sys.stderr)


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
        typer.Option(help="words, chars, kmers, or a tokenizer as for prepare; kmers for FASTA, otherwise words."),
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
    print(f"{out}: " + "\n".join(map(notice_text, findings_notes(index))))
    wanted = bool(held_out or validation or split_column)
    for warning in findings_warnings(index, held_out=wanted):
        print(f"warning: {notice_text(warning)}", file=sys.stderr)


@data_app.command("verify", epilog=examples("meristem data verify data"))
def data_verify(folder: Annotated[Path, typer.Argument(help="A prepared folder.")]) -> None:
    """Check every file of a prepared folder against its sha256."""
    from meristem.data import verify

    index = verify(folder)
    print(f"{folder}: whole ({index.train.tokens + index.held_out.tokens:,} tokens)")
