"""``python -m jmla.bench kernels [--only TEXT] [--json FILE] [--implementation NAME]``."""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Measurements of jmla."""


@app.command()
def kernels(
    only: Annotated[str | None, typer.Option(help="Cases whose operation and name hold this text.")] = None,
    json: Annotated[str | None, typer.Option(help="File for the results, with hardware, versions and flags.")] = None,
    implementation: Annotated[list[str] | None, typer.Option(help="Only these implementations; repeatable.")] = None,
) -> None:
    """Time every operation at every named shape."""
    from jmla.bench.kernels import run

    run(only, json, tuple(implementation) if implementation else None)


if __name__ == "__main__":
    app()
