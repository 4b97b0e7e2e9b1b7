"""The verb `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meristem.cli.app import app, examples


@app.command(
    "import",
    epilog=examples(
        "meristem import SmolLM2-135M --out runs/imported --context 1024",
        "meristem train configs/demo.toml --out runs/on --data.path data --model.start_from runs/imported",
    ),
)
def import_command(
    folder: Annotated[Path, typer.Argument(help="A folder with config.json, safetensors and tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="Folder for the run.")],
    context: Annotated[int | None, typer.Option(help="A shorter context; that of the model if not given.")] = None,
    own_keys: Annotated[
        bool, typer.Option("--own-keys", help="Copy keys and values that heads share, so that heads can come and go.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, or a tokenizer.json, instead of the one in the folder.")
    ] = None,
    end_of_text: Annotated[str | None, typer.Option(help="End-of-text token, if not one of the usual.")] = None,
) -> None:
    """Make a run of a pretrained model: Llama, Mistral, SmolLM, Qwen2, Qwen3 or OLMo. Its logits are the same."""
    from meristem.pretrained import import_model

    run = import_model(folder, out, context=context, own_keys=own_keys, tokenizer=tokenizer, end_of_text=end_of_text)
    print(run.plan)
    print(f"imported: {run.path}")
