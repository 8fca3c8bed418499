"""``python -m jmla.bench kernels``, ``profile``, ``serve`` and ``ladder``; ``--help`` shows their options."""

import enum
import os
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Kind(enum.StrEnum):
    """Kinds of layers by their attention."""

    WINDOW = "window"
    CSA = "csa"
    HCA = "hca"


@app.callback()
def main() -> None:
    """Measurements of jmla."""


@app.command()
def kernels(
    only: Annotated[str | None, typer.Option(help="Cases whose operation and name hold this text.")] = None,
    json: Annotated[str | None, typer.Option(help="File for the results, with hardware, versions and flags.")] = None,
    implementation: Annotated[list[str] | None, typer.Option(help="Only these implementations; repeatable.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that prepare programs; one at a time is timed.")] = 1,
) -> None:
    """Time every operation at every named shape."""
    from jmla.bench.kernels import run

    run(only, json, tuple(implementation) if implementation else None, jobs)


@app.command()
def profile(
    kind: Annotated[list[Kind] | None, typer.Option(help="Repeatable. Default: csa, hca.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Sequences; repeatable. Default: 64, 1.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 32768,
    json: Annotated[str | None, typer.Option(help="File for the results, with hardware, versions and flags.")] = None,
    picture: Annotated[str | None, typer.Option(help="File for a picture (.png or .svg; needs matplotlib).")] = None,
) -> None:
    """Show where the time of one decode layer of V4-Flash goes."""
    from jmla.bench.profile import FLASH, XLA_FLAGS, run

    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
    import jax

    if jax.default_backend() != "gpu":
        raise SystemExit("jmla.bench profile needs an NVIDIA GPU; for the CPU path see benchmarks/cpu.py")
    run(FLASH, kind or ("csa", "hca"), rows or (64, 1), context, json, picture)


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint directory or hub id.", show_default="the bundled model")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help='File of requests, JSON lines: {"arrival": seconds from the start, "prompt": text | "prompt_ids": '
            '[...] | "prompt_tokens": number of random ids, "max_new_tokens": N, "salt": text, "priority": N}; the '
            "last two are optional. Without it the next seven options make the requests."
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests, or chats of --turns requests. Default: 16.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Arrivals a second, a Poisson process; 0: all at once. Default: 0.")
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(metavar="A:B", help="Random ids of a turn's own. Default: 64:256.")
    ] = None,
    turn_tokens: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Likewise of the turns after a chat's first. Default: --prompt-tokens."),
    ] = None,
    new_tokens: Annotated[str | None, typer.Option(metavar="A:B", help="Tokens to make. Default: 16:64.")] = None,
    shared_prefix: Annotated[
        int | None, typer.Option(help="Ids before those that all prompts begin with. Default: 0.")
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option(help="Of a chat; the next one's prompt holds the last one's prompt and answer. Default: 1."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    max_requests: Annotated[int, typer.Option(help="Requests that run at a time.")] = 8,
    pages: Annotated[int | None, typer.Option(help="Of 256 tokens. Default: the engine's.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Prompt tokens of a pass. Default: the model's.")] = None,
    decode_steps: Annotated[int, typer.Option(help="Tokens of each request in a launch of the decode loop.")] = 8,
    drafts: Annotated[int, typer.Option(help="Tokens that the draft (MTP) block guesses ahead.")] = 0,
    no_prefix_reuse: Annotated[bool, typer.Option("--no-prefix-reuse", help="Keep no pages for later.")] = False,
    end_tokens: Annotated[
        bool, typer.Option("--end-tokens", help="Let end tokens end requests, which else make all of their tokens.")
    ] = False,
    json: Annotated[str | None, typer.Option(help="File for the figures, settings, hardware and versions.")] = None,
) -> None:
    """Serve a trace of requests: throughput, latencies, prefix hits.

    Before the clock starts everything that the engine can run is compiled.
    """
    from jmla.bench.serve import run

    given = {
        "requests": requests,
        "rate": rate,
        "prompt_tokens": prompt_tokens,
        "turn_tokens": turn_tokens,
        "new_tokens": new_tokens,
        "shared_prefix": shared_prefix,
        "turns": turns,
    }
    options = {
        "max_requests": max_requests,
        "pages": pages,
        "prefill_chunk": prefill_chunk,
        "decode_steps": decode_steps,
        "drafts": drafts,
        "prefix_reuse": not no_prefix_reuse,
    }
    run(model, trace, given, seed, options, end_tokens, json)


@app.command()
def ladder(
    model: Annotated[
        str | None,
        typer.Argument(help="Checkpoint directory or hub id of a DeepSeek-V4.", show_default="the bundled model"),
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="A,B,...", help="Tokens of the rungs, less what the steps behind them need at most.")
    ] = "4096,32768,131072,524288,1048576",
    corpus: Annotated[
        str | None,
        typer.Option(
            help="Text file, or .bin of uint16 ids; read from its start, and over again. Default: random ids."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of facts and of random ids.")] = 0,
    json: Annotated[str | None, typer.Option(help="File for the figures, settings, hardware and versions.")] = None,
) -> None:
    """Climb to long contexts: memory, speed, exactness against float32, planted facts."""
    from jmla.bench.ladder import run

    run(model, lengths, corpus, seed, json)


if __name__ == "__main__":
    app()
