"""Where a checkpoint lies: a local directory, the bundled model's name, or a Hugging Face hub id."""

import os
import re
from pathlib import Path

from jmla import bundled
from jmla.models.config.common import shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.json", "*.safetensors", "*.jinja"]
_OTHERS = ["*/*"]  # a pattern's * goes through slashes: without this, the weights of subfolders would come too


def resolve(source: str | os.PathLike[str]) -> Path:
    """Turns what a caller names into a checkpoint directory.

    Args:
        source: a directory with a config.json; ``"jmla-tiny-v4"``; or a hub id ``owner/name``, downloaded (or found in
            the hub's cache) by huggingface-hub, which is an optional dependency.

    Raises:
        TypeError: if ``source`` is no path.
        FileNotFoundError: if nothing is found there.
        NotADirectoryError: if it is a file.
        ImportError: for a hub id when huggingface-hub is not installed.
    """
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise TypeError(f"Expected source={shown(source)} to be a checkpoint directory or a hub id")
    try:
        path = Path(source).expanduser()
        found = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, or ~ of a user whom the system does not know
        reason = getattr(error, "strerror", None) or error
        raise FileNotFoundError(f"No checkpoint directory {shown(os.fspath(source))}: {reason}") from error
    if found:
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"Expected {path} to be a checkpoint directory: it has no config.json")
        return path
    if path.exists():
        raise NotADirectoryError(f"Expected {path} to be a checkpoint directory, found a file; pass its directory")
    name = os.fspath(source)
    if name == bundled.NAME:
        return bundled.path()
    if not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"No checkpoint directory {name!r}, and it is not a hub id of the form owner/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"No local directory {name!r}; to load it from the hub, install huggingface-hub (pip install 'jmla[hub]')"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_OTHERS))
    except Exception as error:  # network, authorisation and unknown ids all have classes of their own
        raise FileNotFoundError(f"No local directory {name!r}, and the hub did not give it: {error}") from error
