"""The verb `generate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from meristem.cli.app import app, examples
from meristem.cli.options import Average, Device, Step
from meristem.errors import InputError
from meristem.wording import counted


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
    step: Step = None,
    average: Average = False,
    device: Device = "auto",
) -> None:
    """Continue a prompt with a trained model; a single prompt is streamed. Tokens per second go to stderr."""
    from meristem.data import StreamDecoder
    from meristem.decoding import Sampling, generate, stream
    from meristem.decoding.generate import room
    from meristem.devices import autocast
    from meristem.runs.run_folder import load_run

    sampling = Sampling(temperature, top_k, top_p, seed)
    for text in prompt:
        if any("\ud800" <= character <= "\udfff" for character in text):  # how Python marks bytes it cannot read
            raise InputError("prompt", text, "must be valid UTF-8 text")
    loaded = load_run(run, step=step, average=average, device=device, report=lambda text: print(text, file=sys.stderr))
    model, tokenizer = loaded.decoder, loaded.tokenizer
    ids = [[int(t) for t in tokenizer.encode(text)] or [tokenizer.end_of_text] for text in prompt]
    most = room(model, ids)
    if tokens is not None and not 1 <= tokens <= most:
        raise InputError("tokens", tokens, f"must be from 1 to {most}, what the context of {model.plan.context} leaves")
    options: dict[str, Any] = {
        "max_tokens": min(200, most) if tokens is None else tokens, "end_of_text": tokenizer.end_of_text,
        "vocabulary": tokenizer.vocabulary, "sampling": sampling,
    }  # fmt: skip
    begin, count = time.perf_counter(), 0
    with autocast(loaded.device):
        if len(prompt) > 1:
            continuations = generate(model, ids, **options)
            count, seconds = sum(map(len, continuations)), time.perf_counter() - begin
            for text, continuation in zip(prompt, continuations, strict=True):
                print(text + tokenizer.decode(continuation), end="\n\n")
        else:
            decoder = StreamDecoder(tokenizer)
            print(prompt[0], end="", flush=True)
            for (token,) in stream(model, ids, **options):
                if token is not None:
                    count += 1
                    print(decoder.feed(token), end="", flush=True)
            seconds = time.perf_counter() - begin
            print(decoder.flush())
    rate = f", {count / seconds:,.0f} tokens/s" if count else ""
    print(f"{counted(count, 'token')} in {seconds:.2f} s{rate}", file=sys.stderr)
