"""``python -m jmla.bench kernels`` and ``python -m jmla.bench profile``; ``--help`` shows their options."""

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


if __name__ == "__main__":
    app()
