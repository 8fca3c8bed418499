"""The small model that ships with the package."""

from pathlib import Path

NAME = "jmla-tiny-v4"


def path() -> Path:
    """Directory of the bundled DeepSeek-V4 model.

    Raises:
        FileNotFoundError: if this installation lacks it.
    """
    directory = Path(__file__).parent / "data" / NAME
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"The bundled model is missing: expected {directory} to hold its config.json")
    return directory
