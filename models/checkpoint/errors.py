"""The one error of loading, which lists everything that is wrong."""

from collections.abc import Sequence

SHOWN = 20  # problems that the message spells out
NAMES_SHOWN = 3  # tensors that a problem of many names
LINE = 500  # characters of a problem that the message shows


def listed(names: Sequence[str]) -> str:
    """Tensors for a message: their number, and the first few."""
    count = f"{len(names)} tensor{'s' if len(names) != 1 else ''}"
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return f"{count} ({', '.join(names[:NAMES_SHOWN])}{more})"


def _line(problem: str) -> str:
    """A problem on one line of a terminal: names come from files, and may hold anything."""
    text = " ".join(problem.splitlines()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LINE else f"{text[:LINE]}..."


class CheckpointError(ValueError):
    """A checkpoint that does not fit its configuration, or is damaged.

    Attributes:
        problems: every problem found; the message shows the first ones and counts the rest.
    """

    def __init__(self, where: object, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = [f"  - {_line(problem)}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  ... and {len(self.problems) - SHOWN} more")
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([f"Cannot load {where}: {count}", *lines]))


class CheckpointWarning(UserWarning):
    """Something in a checkpoint that is unusual but was understood."""
