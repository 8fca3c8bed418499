"""Command line: ``jmla generate`` and ``jmla info``."""

import sys
from typing import Annotated

import typer

from jmla import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # errors on lines of their own, not in a box that wraps them
    help="DeepSeek-V4, DeepSeek-V3.2 and GLM-5 in JAX.",
)

Path = Annotated[str | None, typer.Argument(help="Checkpoint directory or hub id.", show_default="the bundled model")]
KvLayout = Annotated[str, typer.Option(help="Cache format: auto, inline656, footer584, bfloat16 or float32.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jmla {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def generate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PATH] PROMPT",
            help="Checkpoint directory or hub id (default: the bundled model), and the text to continue; - reads it "
            "from standard input.",
            show_default=False,
        ),
    ],
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", "-n", help="Most tokens to make.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this times the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random draws.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages tokens seen before.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted once from tokens made before.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Subtracted for each time a token was made.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the completion; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    kv_layout: KvLayout = "auto",
    max_seq_len: Annotated[int | None, typer.Option(help="Most tokens of a sequence.")] = None,
) -> None:
    """Continue PROMPT, printing text as it is made. What is not set comes from the checkpoint."""
    if len(words) > 2:
        raise typer.BadParameter(f"expected [PATH] PROMPT, got {len(words)} arguments; quote the prompt")
    from jmla import bundled
    from jmla.generation import generate as complete
    from jmla.loading import load
    from jmla.sampling import SamplingParams

    prompt = words[-1] if words[-1] != "-" else sys.stdin.read()
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_new_tokens=max_new_tokens,
        stop=stop or None,
    )
    path = words[0] if len(words) == 2 else bundled.path()
    model = load(path, dtype=dtype, kv_layout=kv_layout, max_seq_len=max_seq_len)

    unsaid = [prompt]  # until the first piece comes: then nothing is wrong with it

    def show(_: int, piece: str | int) -> None:
        sys.stdout.write("".join([*unsaid, str(piece)]))
        sys.stdout.flush()
        unsaid.clear()

    complete(model, prompt, sampling=params, stream=show)
    show(0, "\n")


@app.command()
def info(path: Path = None, kv_layout: KvLayout = "auto") -> None:
    """Say what a checkpoint is, and what its cache costs; reads no weights."""
    from jmla import bundled
    from jmla.describe import describe

    typer.echo(describe(bundled.path() if path is None else path, kv_layout))


def main() -> None:
    """Runs the command line; an error of the user's making is one line on standard error and exit code 1."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(1)
