"""The one error of loading, which lists everything that is wrong."""

from collections.abc import Sequence

SHOWN = 20  # problems that the message spells out


class CheckpointError(ValueError):
    """A checkpoint that does not fit its configuration, or is damaged.

    Attributes:
        problems: every problem found; the message shows the first ones and counts the rest.
    """

    def __init__(self, where: object, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = [f"  - {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  ... and {len(self.problems) - SHOWN} more")
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([f"Cannot load {where}: {count}", *lines]))


class CheckpointWarning(UserWarning):
    """Something in a checkpoint that is unusual but was understood."""
