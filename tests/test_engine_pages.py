"""The engine's pages and its index of prefixes, without a model."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jmla.engine.pages import PagePool
from jmla.engine.prefixes import PrefixIndex

SIZE = 4  # tokens of a page


def test_a_page_is_free_when_its_last_owner_leaves():
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    assert {first, second} == {0, 1}
    assert pool.take() is None
    assert pool.free == 0
    pool.share(first)
    pool.release(first)
    assert pool.free == 0
    pool.release(first)
    assert pool.free == 1
    assert pool.take() == first
    pool.release(second)
    with pytest.raises(RuntimeError, match=f"page={second} to be held"):
        pool.release(second)
    with pytest.raises(RuntimeError, match=f"page={second} to be held"):
        pool.share(second)


def index(pages=8, windows=None, records=None):
    pools = [None if n is None else PagePool(n) for n in (pages, windows, records)]
    return PrefixIndex(*pools, SIZE), pools


def chain(found, pool, tokens, salt=""):
    """Notes all full pages of ``tokens``, as a request does that then ends."""
    node = found.root(salt)
    for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
        page = pool.take()
        node = found.add(node, tokens[start : start + SIZE], page)
        pool.release(page)
    return node


def test_longest_common_prefix_in_whole_pages_leaves_a_token_over():
    found, (pool, _, _) = index()
    tokens = np.arange(12)
    chain(found, pool, tokens)
    assert [len(found.match(tokens[:n], "")[0]) for n in (3, 4, 5, 8, 9, 12)] == [0, 0, 1, 1, 2, 2]
    assert len(found.match(np.append(tokens, 0), "")[0]) == 3
    other = tokens.copy()
    other[6] = 99
    assert len(found.match(other, "")[0]) == 1
    assert found.match(tokens, "another tenant")[0] == []


def test_salts_leave_nothing_behind():
    found, (pool, _, _) = index(pages=2)
    for salt in "abc":
        chain(found, pool, np.arange(8), salt)
        assert len(found.match(np.arange(9), salt)[0]) == 2
        while found.give_back_page():
            pass
    chain(found, pool, np.arange(3), "d")
    assert not found._roots


def test_the_order_of_use_takes_no_more_room_than_the_nodes():
    found, (pool, _, _) = index()
    chain(found, pool, np.arange(12))
    for _ in range(500):
        for node in found.match(np.arange(13), "")[0]:
            found.touch(node)
    assert len(found._leaves) < 100


def test_equal_pages_behind_different_ones_are_different():
    found, (pool, _, _) = index()
    chain(found, pool, np.array([0, 0, 0, 0, 7, 7, 7, 7]))
    assert found.match(np.array([1, 0, 0, 0, 7, 7, 7, 7, 5]), "")[0] == []
    chain(found, pool, np.array([1, 0, 0, 0, 7, 7, 7, 7]))
    assert pool.free == 4
    chain(found, pool, np.array([1, 0, 0, 0, 7, 7, 7, 7]))  # known already
    assert pool.free == 4


def test_what_was_unused_longest_is_given_back_leaves_first():
    found, (pool, _, _) = index(pages=4)
    a, b = np.arange(8), np.arange(100, 108)
    chain(found, pool, a)
    chain(found, pool, b)
    assert pool.free == 0
    assert found.unread == 4
    for node in found.match(np.append(a, 0), "")[0]:  # now b is older
        found.touch(node)
    assert found.give_back_page()
    assert len(found.match(np.append(b, 0), "")[0]) == 1
    held = found.match(np.append(a, 0), "")[0]
    for node in held:
        pool.share(node.page)
    assert found.give_back_page()
    assert pool.free == 2
    assert not found.give_back_page()
    assert found.unread == 0
    for node in held:
        pool.release(node.page)
    assert found.give_back_page()
    assert found.give_back_page()
    assert pool.free == 4
    assert found.count == 0


def test_v4_goes_on_from_resume_points_alone():
    found, (pool, windows, records) = index(windows=3, records=2)
    tokens = np.arange(13)
    last = chain(found, pool, tokens)
    assert found.match(tokens, "")[0] == []
    window, record = windows.take(), records.take()
    assert found.resume(last.parent, window, record)
    assert not found.resume(last.parent, window, record)  # is one already
    windows.release(window)
    assert len(found.match(tokens, "")[0]) == 2
    assert found.give_back_resume()
    assert not found.give_back_resume()
    assert found.match(tokens, "")[0] == []
    assert windows.free == 3
    assert records.free == 2
    assert found.count == 3


class Accounts(RuleBasedStateMachine):
    """Requests that match, grow, and end, in a pool too small for all: no page is lost or given out twice."""

    def __init__(self):
        super().__init__()
        self.found, (self.pages, self.windows, self.records) = index(pages=6, windows=5, records=2)
        self.held = []  # of each request: tokens, pages, node, window page of its last full page or None

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=17))
    def begin(self, tokens):
        tokens = np.array(tokens)
        path = self.found.match(tokens, "")[0]
        for node in path:
            self.pages.share(node.page)
            self.found.touch(node)
        self.held.append((tokens, [n.page for n in path], path[-1] if path else self.found.root("")))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data):
        at = data.draw(st.integers(0, len(self.held) - 1))
        tokens, pages, node = self.held[at]
        start = len(pages) * SIZE
        if start + SIZE > len(tokens):
            return
        page = self.pages.take()
        while page is None and self.found.give_back_page():
            page = self.pages.take()
        if page is None:
            return
        node = self.found.add(node, tokens[start : start + SIZE], page)
        if node.page != page:
            self.pages.release(page)
            self.pages.share(node.page)
        window, record = self.windows.take(), self.records.take()
        if window is not None:
            if (record is None or not self.found.resume(node, window, record)) and record is not None:
                self.records.release(record)
            self.windows.release(window)
        elif record is not None:
            self.records.release(record)
        self.held[at] = tokens, [*pages, node.page], node

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data):
        _, pages, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for page in pages:
            self.pages.release(page)

    @rule()
    def forget(self):
        self.found.give_back_resume()

    @invariant()
    def every_page_is_accounted_for(self):
        nodes = list(self.found.nodes())
        assert len(nodes) == self.found.count
        owners = np.zeros(self.pages.size, int)
        for node in nodes:
            owners[node.page] += 1
        for _, pages, _ in self.held:
            for page in pages:
                owners[page] += 1
        np.testing.assert_array_equal(owners, self.pages.owners)
        assert self.pages.free == np.count_nonzero(owners == 0)
        points = [node for node in nodes if node.record >= 0]
        assert len({node.record for node in points}) == len(points) == self.records.size - self.records.free
        assert self.windows.free == self.windows.size - len(points)

    def teardown(self):
        while self.held:
            _, pages, _ = self.held.pop()
            for page in pages:
                self.pages.release(page)
        self.every_page_is_accounted_for()
        while self.found.give_back_page():
            pass
        assert self.pages.free == 6
        assert self.windows.free == 5
        assert self.records.free == 2


TestAccounts = Accounts.TestCase
