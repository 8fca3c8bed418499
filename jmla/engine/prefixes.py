"""Pages of earlier requests by the tokens that they hold, to be read again by requests that begin alike.

A node stands for a page behind all the pages before it: its place in the tree says what came before, so two prompts
share a page only if all their tokens up to its end are equal, and their salt. Pages are found by their tokens
themselves, not by a hash of them alone.

To go on behind a page, V4 also needs what stands outside the pages of its growing streams: the window page that holds
the last tokens, and the running windows of the compressors. The two are a node's resume point; nodes can lose it and
stay.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from jmla.engine.pages import PagePool


@dataclasses.dataclass(eq=False)
class Node:
    """A full page of tokens behind its parent's.

    Attributes:
        parent: the page before; None for the root of a salt.
        tokens: bytes of the page's token ids, int32.
        page: of the growing streams.
        children: nodes behind this one by their tokens.
        window: page of the window stream, -1 without a resume point.
        record: of the compressors' running windows, -1 without a resume point.
        used: when a request last read or wrote it; counts up.
        salt: of a root.
    """

    parent: "Node | None"
    tokens: bytes = b""
    page: int = -1
    children: "dict[bytes, Node]" = dataclasses.field(default_factory=dict)
    window: int = -1
    record: int = -1
    used: int = 0
    salt: str = ""


class PrefixIndex:
    """What can be read again. Holds each of its pages once; those that nobody else holds can be given back.

    Args:
        pages: pool of the growing streams.
        windows: pool of the window stream, None for families without one.
        records: pool of the compressors' records, likewise.
        page_tokens: tokens of a page.
    """

    def __init__(self, pages: PagePool, windows: PagePool | None, records: PagePool | None, page_tokens: int):
        self.pages, self.windows, self.records, self.page_tokens = pages, windows, records, page_tokens
        self._roots: dict[str, Node] = {}
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # heaps of what could be given back, oldest first, checked late
        self._resumes: list[tuple[int, int, Node]] = []
        self._number = itertools.count()
        self._held = np.zeros(pages.size, bool)  # pages of nodes
        self.count = 0

    @property
    def unread(self) -> int:
        """Pages held here and by nobody else: all of them can be given back, one after the other."""
        return int(np.count_nonzero(self._held & (self.pages.owners == 1)))

    def match(self, tokens: np.ndarray, salt: str) -> tuple[list[Node], int]:
        """The nodes of the longest prefix behind which a request can go on, and how many pages of it have nodes at all.

        At least one token is left over.
        """
        path = []
        node = self._roots.get(salt)
        for start in range(0, len(tokens) - self.page_tokens, self.page_tokens):
            if node is None:
                break
            node = node.children.get(self._bytes(tokens[start : start + self.page_tokens]))
            if node is not None:
                path.append(node)
        known = len(path)
        while path and self.windows is not None and path[-1].record < 0:
            path.pop()
        return path, known

    def root(self, salt: str) -> Node:
        """Where the first pages of prompts with this salt hang; known here as soon as one does."""
        return self._roots.get(salt) or Node(None, salt=salt)

    def only_kept(self, page: int) -> bool:
        """Whether a page is held here and by nobody else."""
        return bool(self._held[page]) and self.pages.owners[page] == 1

    def only_reader(self, page: int) -> bool:
        """Whether a page, held by a request, is held by no other."""
        return self.pages.owners[page] == 1 + self._held[page]

    def add(self, parent: Node, tokens: np.ndarray, page: int) -> Node:
        """The node of a full page behind ``parent``: the one that is there, or a new one, which holds ``page``."""
        key = self._bytes(tokens)
        if parent.parent is None:
            parent = self._roots.setdefault(parent.salt, parent)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, self.pages.share(page))
            self._held[page] = True
            self.count += 1
        self.touch(node)
        return node

    def resume(self, node: Node, window: int, record: int) -> bool:
        """Makes a node a resume point, unless it is one: holds the window page, and takes the record over."""
        if self.windows is None or node.record >= 0:
            return False
        node.window, node.record = self.windows.share(window), record
        self._push(self._resumes, node)
        return True

    def touch(self, node: Node) -> None:
        """A request uses the node now."""
        node.used = next(self._clock)
        if node.record >= 0:
            self._push(self._resumes, node)
        self._push(self._leaves, node)

    def _push(self, heap: list[tuple[int, int, Node]], node: Node) -> None:
        heapq.heappush(heap, (node.used, next(self._number), node))
        if len(heap) > 2 * self.count + 64:  # most are out of date
            heap[:] = [(n.used, next(self._number), n) for n in self.nodes() if heap is self._leaves or n.record >= 0]
            heapq.heapify(heap)

    def give_back_page(self) -> bool:
        """Forgets the page that was unused longest, of those that nobody reads and nothing hangs on."""
        node = self._oldest(self._leaves, lambda n: bool(n.children) or self.pages.owners[n.page] > 1)
        if node is not None:
            self._drop(node)
        return node is not None

    def give_back_resume(self) -> bool:
        """Forgets the resume point that was unused longest; its page stays."""
        windows = self.windows
        node = self._oldest(self._resumes, lambda n: windows is not None and windows.owners[n.window] > 1)
        if node is not None:
            self._forget_resume(node)
        return node is not None

    def _oldest(self, heap: list[tuple[int, int, Node]], busy: Callable[[Node], bool]) -> Node | None:
        """Takes the node unused longest that is not ``busy`` from a heap, and what is out of date before it."""
        kept = []
        found = None
        while heap and found is None:
            entry = heapq.heappop(heap)
            used, _, node = entry
            if used != node.used or (node.page if heap is self._leaves else node.record) < 0:
                continue
            if busy(node):
                kept.append(entry)
            else:
                found = node
        for entry in kept:
            heapq.heappush(heap, entry)
        return found

    def clear(self) -> None:
        """Forgets everything; pages that requests hold stay theirs."""
        for node in list(self.nodes()):
            self._forget_resume(node)
            self.pages.release(node.page)
            node.page = -1
        self._held[:] = False
        self._roots.clear()
        self._leaves.clear()
        self._resumes.clear()
        self.count = 0

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents first."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _drop(self, node: Node) -> None:
        self._forget_resume(node)
        self.pages.release(node.page)
        self._held[node.page] = False
        node.page = -1
        if node.parent is not None:
            del node.parent.children[node.tokens]
            if node.parent.parent is None and not node.parent.children:
                del self._roots[node.parent.salt]
        self.count -= 1

    def _forget_resume(self, node: Node) -> None:
        if node.record >= 0 and self.windows is not None and self.records is not None:
            self.windows.release(node.window)
            self.records.release(node.record)
            node.window = node.record = -1

    @staticmethod
    def _bytes(tokens: np.ndarray) -> bytes:
        return np.ascontiguousarray(tokens, np.int32).tobytes()
