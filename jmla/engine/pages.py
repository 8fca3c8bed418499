"""Pages of a pool, each with the number of those who hold it."""

from collections import deque

import numpy as np


class PagePool:
    """Hands out the pages of one pool. A page is free, or held by one or several owners.

    Attributes:
        size: pages of the pool.
        owners: ``[size]`` int32, how many hold each page.
    """

    def __init__(self, size: int):
        self.size = size
        self.owners = np.zeros(size, np.int32)
        self._free = deque(range(size))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int | None:
        """A free page, now held once; None if there is none."""
        if not self._free:
            return None
        page = self._free.popleft()
        self.owners[page] = 1
        return page

    def share(self, page: int) -> int:
        """One more owner of a page that is held; returns the page."""
        if self.owners[page] < 1:
            raise RuntimeError(f"Expected {page=} to be held, it is free")
        self.owners[page] += 1
        return page

    def release(self, page: int) -> None:
        """One owner fewer; the last one's page is free again."""
        if self.owners[page] < 1:
            raise RuntimeError(f"Expected {page=} to be held, it is free already")
        self.owners[page] -= 1
        if not self.owners[page]:
            self._free.append(page)
