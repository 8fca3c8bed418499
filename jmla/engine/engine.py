"""The engine: admits requests to the rows of a cache, and decides for each step who computes what on which pages."""

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jmla.batching import SMALLEST_CHUNK, bucket
from jmla.completion import Completion, Output, Reason
from jmla.decoding import BLOCK, Rows
from jmla.engine import device
from jmla.engine.flight import Flight, Passenger
from jmla.engine.line import Launch, Line
from jmla.engine.pages import PagePool
from jmla.engine.prefixes import Node, PrefixIndex
from jmla.engine.programs import Job, Programs
from jmla.engine.request import Handle, Request
from jmla.engine.shapes import doubling, padded, rectangles, shapes, width_of
from jmla.engine.stats import Stats
from jmla.kernels import dispatch
from jmla.models import Model, PagedCache, select
from jmla.models.cache import first_window_page, open_cache, window_pages
from jmla.models.config import V4Config
from jmla.models.config.common import shown
from jmla.models.inputs import on_device
from jmla.models.options import check_flag
from jmla.models.spec import PAGE_TOKENS, check_model, pages_of
from jmla.requests import complete_params, encode, end_token_array, end_token_ids, split_prompts, tokenizer_of
from jmla.sampling import DEFAULTS, RowParams, SamplingParams
from jmla.values import check_integer, check_number, check_text

ROOM = 8192  # tokens that a row has pages for by default, where max_seq_len is more
BUSY_STEPS = 4  # tokens of a decode launch while prompts wait for their turn


class Engine:
    """Serves many requests over one model and one paged cache.

    Each request's tokens are those that it would get alone: bit for bit with a model loaded as ``deterministic``, else
    up to rounding, which may tip a close choice. Nothing runs by itself: ``step`` computes, and so do a handle's
    ``result`` and iteration. Methods may be called from several threads; one step runs at a time.

    Prefixes are reused in whole pages of 256 tokens. For V4 a request can go on where a chunk or the decoding of an
    earlier one ended a page, as long as a resume point holds what the window and the compressors need there.

    Args:
        model: the loaded model.
        max_requests: rows of the cache: requests that run at a time.
        max_seq_len: tokens of a prompt and its completion; at most and by default what the model takes and ``pages``
            hold.
        pages: of 256 tokens, shared by all requests and by the prefixes kept; default: enough for all rows at 8192
            tokens or ``max_seq_len``.
        resume_points: V4's prefix ends that can be gone on from; default: one for each of ``pages`` up to 64.
        prefill_chunk: tokens of a prompt that one pass takes; default: the model's.
        token_budget: tokens of all prompts and of decoding in one step; default: ``prefill_chunk + max_requests``.
        decode_steps: tokens of each request in one launch of the decode loop, 1 to 16; with drafts at most, and at
            least one pass of them.
        drafts: tokens that the model's draft (MTP) block guesses ahead, 0 to 7: in each pass as many of them are given
            out as are what would have come without them, and one more. The text does not depend on it (exactly with a
            model loaded as ``deterministic``, else up to rounding). V4's compressors keep that many tokens more a row.
        prefix_reuse: whether finished pages are kept for later requests.
        clock: seconds, for deadlines.

    Raises:
        TypeError: no model, or a flag that is no bool.
        ValueError: a number out of range, or drafts of a model without a draft block.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_requests: int = 8,
        max_seq_len: int | None = None,
        pages: int | None = None,
        resume_points: int | None = None,
        prefill_chunk: int | None = None,
        token_budget: int | None = None,
        decode_steps: int = 8,
        drafts: int = 0,
        prefix_reuse: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        spec = check_model(model).spec
        rows = check_integer("max_requests", max_requests, 1)
        length = spec.max_seq_len
        if max_seq_len is not None:
            length = check_integer("max_seq_len", max_seq_len, 2, spec.max_seq_len)
        chunk = min(spec.prefill_chunk, length)
        if prefill_chunk is not None:
            chunk = check_integer("prefill_chunk", prefill_chunk, 1, spec.prefill_chunk)
        each = pages_of(min(length, ROOM))
        count = rows * each if pages is None else check_integer("pages", pages, 1)
        length = min(length, count * PAGE_TOKENS)
        self._budget = chunk + rows if token_budget is None else check_integer("token_budget", token_budget, 1)
        self._steps = check_integer("decode_steps", decode_steps, 1, BLOCK)
        self._drafts = check_integer("drafts", drafts, 0, BLOCK // 2 - 1)
        if self._drafts and not spec.drafting:
            raise ValueError(f"Expected {drafts=} to be 0: the model was loaded without a draft (MTP) block")
        if not callable(clock):
            raise TypeError(f"Expected clock={shown(clock)} to be a function that gives seconds")
        self._chunk, self._clock = chunk, clock
        self._reuse = check_flag("prefix_reuse", prefix_reuse)
        self._window = spec.config.sliding_window if isinstance(spec.config, V4Config) else 0
        served = dataclasses.replace(
            spec,
            max_seq_len=length,
            prefill_chunk=max(chunk, SMALLEST_CHUNK, 2 * BLOCK),  # two decode launches may be in the air
            drafting=self._drafts > 0,
        )
        self._model = dataclasses.replace(model, spec=served)
        self._served = dataclasses.replace(self._model, text=None)  # what programs get: they do not depend on text
        points = min(count, 64) if resume_points is None else check_integer("resume_points", resume_points, 0)
        self._reuse = self._reuse and self._window - 1 <= PAGE_TOKENS  # a resume point holds one window page
        points = points if self._window and self._reuse else 0
        windows = rows * window_pages(served) + points if self._window else 0
        self._sizes = {"pages": count, "window_pages": windows, "records": points}
        cache, empty = self._empty(rows)
        self._line = Line(cache, empty)
        self._keeps_states = bool(cache.boundaries)
        self._open_pools()
        self._table = np.full(cache.table.shape, -1, np.int32)
        self._window_table = self._table.copy() if self._window else None
        self._submitted = 0
        self._running: list[Request | None] = [None] * rows
        self._waiting: list[Request] = []
        self._params = RowParams.pack([DEFAULTS] * rows)
        self._params_there: RowParams | None = None  # on the device
        self._ends = end_token_ids(model)
        self._end_ids = jax.device_put(end_token_array(self._ends))
        self._tokenizer = tokenizer_of(model)
        self._sent: list[np.ndarray] = []  # tables that the device has
        self._flights: list[Flight] = []  # of decoding: one between steps, two within
        self._unsaid: list[Request] = []
        self._programs = Programs()
        self._lock = threading.RLock()
        self._stepping = self._broken = False  # broken: what changed the accounts has not come to its end
        self._began = 0.0
        self._cancelled: list[Request] = []
        self.stats = Stats()

    def _empty(self, rows: int) -> tuple[PagedCache, Rows]:
        """What the device holds before the first request."""
        spec = self._model.spec
        cache = open_cache(self._model, rows, spec.max_seq_len, **self._sizes, rollback=self._drafts)
        return cache, Rows.empty(spec, rows, self._drafts)

    @property
    def _cache(self) -> PagedCache:
        """As it is behind all launches."""
        return self._line.held()[0]

    def _open_pools(self) -> None:
        """Accounts of pages that nobody holds, and no prefixes."""
        self._pages = PagePool(self._sizes["pages"])
        self._windows = PagePool(self._sizes["window_pages"]) if self._window else None
        self._records = PagePool(self._sizes["records"]) if self._window else None
        self._index = PrefixIndex(self._pages, self._windows, self._records, PAGE_TOKENS)

    # ---- what callers do

    def submit(
        self,
        prompt: Any,
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        stop: Any = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: str = "",
        callback: Callable[[str | int], None] | None = None,
    ) -> Handle:
        """Queues a prompt.

        Args:
            prompt: a string or token ids.
            sampling: how to choose tokens; what is unset comes from the checkpoint.
            max_new_tokens: overrides ``sampling``.
            stop: overrides ``sampling``.
            priority: higher runs first, and may take the place of lower.
            deadline: seconds from now after which the request ends with what it has ("deadline").
            salt: prefixes are shared only among requests of one salt, for instance a tenant's.
            callback: called with each piece of text (token id without a tokenizer) from within ``step``. Not with
                several completions.

        Raises:
            TypeError, ValueError: a bad prompt or option.
        """
        if callback is not None and not callable(callback):
            raise TypeError(f"Expected callback={shown(callback)} to be a function of a piece")
        if not isinstance(salt, str):
            raise TypeError(f"Expected salt={shown(salt)} to be a string")
        check_text("salt", salt)
        ids = encode(self._model, 0, prompt)
        (params,) = complete_params(self._model, sampling, 1, [len(ids)], max_new_tokens, stop)
        if callback is not None and params.draws > 1:
            raise ValueError(f"Expected no callback where several completions are drawn, got {params.draws} of them")
        level = check_integer("priority", priority, -(2**31), 2**31 - 1)
        seconds = None if deadline is None else check_number("deadline", deadline, 0, np.inf)
        return self._queue(ids, params, level, seconds, salt, callback)

    def _queue(
        self,
        ids: np.ndarray,
        params: SamplingParams,
        priority: int = 0,
        seconds: float | None = None,
        salt: str = "",
        callback: Callable[[str | int], None] | None = None,
    ) -> Handle:
        with self._lock:
            limit = None if seconds is None else self._clock() + seconds
            requests = []
            for index in range(params.draws):
                pieces: list[str | int] = []
                one = params.choice(index)
                output = Output(self._submitted, one, frozenset(self._ends), self._tokenizer, _taker(pieces, callback))
                requests.append(Request(self._submitted, ids, one, output, priority, limit, salt, pieces=pieces))
                self._submitted += 1
            first, *branches = requests
            for branch in branches:
                branch.source = first
            first.branches = branches
            self.stats.submitted += len(requests)
            self._waiting += requests
            return Handle(self, requests, params)

    def cancel(self, handle: Handle) -> None:
        """Ends a prompt's completions where they stand.

        Their pages are back when this returns, or from a callback when the step does. No effect on what has ended.
        """
        if not isinstance(handle, Handle) or handle._engine is not self:
            raise TypeError(f"Expected handle={shown(handle)} to be a Handle that this engine gave out")
        self._cancelled += handle._requests
        if self._line.is_launching():  # a finaliser, on a thread that a step waits for; the next step ends them
            return
        with self._lock:
            self._put_right()
            if not self._stepping:  # else called from a callback: the step's work is done first
                with self._accounting():
                    self._end_cancelled()
                    self._come_to_rest()

    def _end_cancelled(self) -> None:
        before, self._stepping = self._stepping, True  # callbacks run here too
        try:
            while self._cancelled:
                self._end(self._cancelled[0], "cancelled")
                self._cancelled.pop(0)  # after an interrupt it is ended in the next step
        finally:
            self._stepping = before

    def step(self) -> bool:
        """Computes a chunk of each prompt that the budget has room for, and some tokens of every request that decodes.

        Returns:
            Whether requests are left.
        """
        with self._lock:
            if self._stepping:
                raise RuntimeError("Expected no step within a step: a callback must not step the engine")
            self._put_right()
            try:
                self._stepping, self._began = True, time.perf_counter()
                with self._accounting():
                    self._step()
                    self._end_cancelled()
                    self._come_to_rest()
            finally:
                self._stepping = False
                self.stats.step_seconds += time.perf_counter() - self._began
                self.stats.host_seconds += self._line.take_idle_seconds()
            return self.busy

    @contextlib.contextmanager
    def _accounting(self) -> Iterator[None]:
        """For what changes the accounts of requests and pages: what an error or interrupt in it leaves is put right.

        If another interrupt comes to that, it is done before the accounts are used again.
        """
        before, self._broken = self._broken, True
        try:
            yield
        except BaseException:  # the device may be ahead of what is known here
            self._recover()
            raise
        self._broken = before

    def _put_right(self) -> None:
        """Recovers, unless someone is at work on the accounts."""
        if self._broken and not self._stepping:
            self._recover()

    def _recover(self) -> None:
        """Lets all running requests be computed again from their tokens, which are right, and forgets prefixes.

        Can be interrupted anywhere, and then be done again.
        """
        self._line.take_back()
        self._flights = []
        self._open_pools()  # where nobody holds a page, whatever was taken or given back when it was interrupted
        for request in [r for r in self._running if r is not None and not r.ended]:
            self._wait_again(request)
        for request in [*self._waiting, *(r for r in self._running if r is not None)]:
            request.leave_row()
        self._running = [None] * len(self._running)
        self._table[:] = -1
        if self._window_table is not None:
            self._window_table[:] = -1
        self._sent = []
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._line.held())):
            self._line.hold(*self._empty(len(self._running)))
        self._broken = False

    def _step(self) -> None:
        """Gives the device new work before what it made is looked at, wherever that does not decide about the work.

        While the device decodes, chunks of prompts are put behind that, and the next decoding behind those. Then what
        the first made is settled, which says who goes on and who has ended, and callers get their text.
        """
        flights, found = self._flights, bool(self._flights)
        self.stats.late_steps += found and self._line.is_done()
        self._expire([*self._waiting, *([] if found else self._running)])
        for request in [r for r in self._running if r is not None and r.branches]:
            self._branch(request)
        self._admit()
        prompts = self._next_chunks()
        first = self._prefill(prompts)
        earlier = flights.pop(0) if found else None
        ahead = (earlier is None or self._can_go_ahead()) and self._decode(self._decoding())
        if earlier is not None:
            self._settle(earlier)
            self._expire(self._running)
            if not flights:
                ahead = self._decode(self._decoding()) or ahead
            self._say_all()
        for beginning in first:
            self._settle(beginning)
        self._say_all()
        self.stats.steps += bool(found or ahead or prompts)

    def _come_to_rest(self) -> None:
        """Settles launches in which nobody has anything left to make, once nobody runs."""
        try:
            while self._flights and not any(self._running):
                self._settle(self._flights.pop(0))
            if not self.busy:
                self._line.finish()
        except Exception:  # of a launch that nobody needs
            self._recover()

    def _decoding(self) -> list[Request]:
        return [r for r in self._running if r is not None and r.active]

    def _can_go_ahead(self) -> bool:
        """Whether the launch behind the one in the air can be made before that is settled.

        Someone must have tokens left to make, nobody wait who has a row to begin in, and pages be free for all: no
        launch takes pages from others before it is known who has ended.
        """
        if self._waiting and None in self._running:
            return False
        requests = self._decoding()
        steps = self._launch_steps()
        need = sum(max(pages_of(r.length + r.ahead(steps)) - len(r.pages), 0) for r in requests)
        return any(r.left > 0 for r in requests) and need <= self.free_pages

    def run(self) -> None:
        """Steps until no request is left."""
        while self.step():
            pass

    def generate(
        self,
        prompts: Any,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int | None = None,
        stop: Any = None,
    ) -> list[Completion]:
        """Completes several prompts together, in their order.

        Raises:
            TypeError, ValueError: a bad prompt or option; then none is queued.
        """
        items, _ = split_prompts(prompts)
        ids = [encode(self._model, index, prompt) for index, prompt in enumerate(items)]
        rows = complete_params(self._model, sampling, len(ids), [len(p) for p in ids], max_new_tokens, stop)
        handles = [self._queue(prompt, row) for prompt, row in zip(ids, rows, strict=True)]
        try:
            return [handle.result() for handle in handles]
        finally:  # after an error the others have no one to wait for them
            for handle in handles:
                handle.cancel()

    def warmup(self, *, workers: int | None = None, progress: bool | None = None) -> None:
        """Compiles everything that this engine can run, before the first request waits for it.

        Where JAX's persistent compilation cache is set up (``JAX_COMPILATION_CACHE_DIR``), a second process finds all
        of it there, whole programs beside what JAX keeps, and neither traces nor compiles. On a GPU an engine without
        requests also runs everything once, since Triton's kernels are assembled at their first launch.

        Args:
            workers: threads that compile at a time, and processes for CuTe DSL kernels; default: one thread for each
                processor, at most 16, and as many processes as ``docs/cute.md`` says.
            progress: whether a bar is drawn; default: where the error output is a terminal.

        Raises:
            TypeError, ValueError: a bad option.
        """
        count = None if workers is None else check_integer("workers", workers, 1)
        bar = sys.stderr.isatty() if progress is None else check_flag("progress", progress)
        with self._lock:
            if self._stepping:
                raise RuntimeError("Expected no warm-up within a step: a callback must not warm up the engine")
            self._put_right()
            with self._accounting():
                self._line.held()  # raises what a launch has raised
            self._warm_up(count, bar)

    def _warm_up(self, workers: int | None, progress: bool) -> None:
        with dispatch.following(self._model.params, self._cache):
            self._programs.compile(list(self._jobs()), workers, progress)
            on_cpu = all(d.platform == "cpu" for d in self._cache.lengths.devices())
            if not on_cpu and not self.busy:
                self._run_once()

    def _run_once(self) -> None:
        """Runs each program on a token of every row, behind texts of each length for which other kernels serve.

        A GPU's Triton kernels are assembled at their first launch. The texts are nowhere: no row has pages, so that
        nothing is written; what the rows have become is put right where they are given to requests.
        """
        try:
            for pages in select.widths(self._table.shape[1] * self._cache.kernel_pages):
                self._run_behind(min(pages * PAGE_TOKENS // self._cache.kernel_pages, self.max_seq_len) - 2 * BLOCK)
            self._pretend(0, active=False)
            jax.block_until_ready(self._cache.lengths)
        except BaseException:  # an interrupt, or no memory: rows may be anything, and arrays gone
            self._recover()
            self._line.hold(*self._empty(len(self._running)))
            raise
        finally:
            self._line.finish()

    def _run_behind(self, length: int) -> None:
        """Runs each program on a token of every row behind texts of ``length`` tokens."""
        rows = len(self._running)
        records = np.full(rows, -1, np.int32)
        for function, key, _ in self._jobs():
            if function is device.place:
                continue
            self._pretend(max(length, 0), active=True)
            if function is device.decode_rows:
                args = self._decode_args(np.ones(rows, bool), 1, records, False)
            else:
                size, width = key
                index, one = np.arange(size, dtype=np.int32), np.ones(size, np.int32)
                part = index, np.zeros((size, width), np.int32), one, one, np.zeros(size, bool)
                args = self._prefill_args(*part, records, False)
            self._send(function, key, args)

    def _pretend(self, length: int, active: bool) -> None:
        """Says that every row holds ``length`` tokens, and whether it has one to make."""
        cache, held = self._line.held()
        rows = len(self._running)
        # Arrays of their own, for all are given away; from the host, since nothing is to be compiled here.
        lengths, drafted = (jax.device_put(np.full(rows, n, np.int32)) for n in (length, length * (self._drafts > 0)))
        made, limit = (jax.device_put(np.full(rows, n, np.int32)) for n in (0, 2))
        held = dataclasses.replace(held, active=jax.device_put(np.full(rows, active)), made=made, limit=limit)
        self._line.hold(cache.replace(lengths=lengths, draft_lengths=drafted), held)

    @property
    def max_seq_len(self) -> int:
        """Tokens of a prompt and its completion, at most."""
        return self._model.spec.max_seq_len

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return bool(self._waiting or self._unsaid) or any(request is not None for request in self._running)

    @property
    def free_pages(self) -> int:
        """Pages that no request holds; some of them may hold prefixes until they are needed."""
        return self._pages.free + self._index.unread

    def forget_prefixes(self) -> None:
        """Drops all kept prefixes, so that every page that no request holds is free."""
        with self._lock:
            self._put_right()
            if any(request is not None for request in self._running):
                raise RuntimeError("Expected no running requests, their pages are part of prefixes")
            with self._accounting():
                self._index.clear()

    # ---- who runs

    def _expire(self, requests: Sequence[Request | None]) -> None:
        now = self._clock()
        for request in list(requests):
            if request is not None and request.deadline is not None and now >= request.deadline:
                self._end(request, "deadline")

    def _admit(self) -> None:
        while waiting := [r for r in self._waiting if r.source is None]:
            request = min(waiting, key=lambda r: r.rank)
            if all(r is not None and r.priority >= request.priority for r in self._running):
                return  # no row, whatever its prefix
            path, known = self._index.match(request.tokens, request.salt) if self._reuse else ([], 0)
            running = [r for r in self._running if r is not None]
            lower = [r for r in running if r.priority < request.priority]
            pages = [node.page for node in path]
            if self._fits(request, pages, running):
                self._place(request, path, known)
            elif lower and self._fits(request, pages, [r for r in running if r not in lower], lower):
                self._preempt(max(lower, key=lambda r: r.rank))
            else:
                return

    def _fits(self, request: Request, pages: list[int], beside: list[Request], instead: Sequence[Request] = ()) -> bool:
        """Whether a row and pages are left for a request that reads ``pages`` of others, ``instead`` of some.

        Those ``beside`` it still have to take pages for tokens that they know, and soon one each for what they make.
        """
        if len(beside) == len(self._running):
            return False
        if not beside:
            return True  # every request fits alone
        room = self.free_pages + sum(self._index.only_reader(page) for r in instead for page in r.pages)
        room -= sum(self._index.only_kept(page) for page in pages)  # would be read, and not be free
        promised = sum(max(pages_of(r.known + 1) - len(r.pages), 0) for r in beside)
        need = pages_of(request.known + 1) - len(pages)
        return need + promised + len(beside) <= room

    def _place(self, request: Request, path: list[Node], known: int) -> None:
        """Gives a request a row and the pages of its prefix; ``known`` more or as many have nodes."""
        for node in path:
            self._index.touch(node)
        request.node = path[-1] if path else self._index.root(request.salt)
        request.known_pages = known  # those without a resume point end a chunk, and get one
        record, windows = -1, {}
        if self._windows is not None and path:
            record = path[-1].record
            windows[len(path) - 1] = self._windows.share(path[-1].window)
        pages = [self._pages.share(node.page) for node in path]
        self._seat(request, len(path) * PAGE_TOKENS, pages, windows, record=record)

    def _branch(self, source: Request) -> None:
        """Once a request has read its prompt but for the last token: lets those that wait for its pages read them.

        Those for which there is no room now are on their own.
        """
        if source.length < source.known - 1:
            return
        branches = source.branches
        source.let_branches_go()
        full, open_ = divmod(source.length, PAGE_TOKENS)
        for branch in branches if source.length else []:
            running = [r for r in self._running if r is not None]
            ahead = any(r.source is None and r.rank < branch.rank for r in self._waiting)
            if branch.ended or ahead or not self._fits(branch, source.pages[:full], running):
                continue
            copy = self._take(self._pages, self._index.give_back_page) if open_ else None
            if open_ and copy is None:
                continue
            pages = [self._pages.share(page) for page in source.pages[:full]]
            windows, pairs = {}, [(-1, -1), (-1, -1)]
            if copy is not None:
                pages.append(copy)
                pairs[0] = source.pages[full], copy
            for ordinal, page in source.windows.items():
                if self._windows is None:
                    break
                if ordinal < full:
                    windows[ordinal] = self._windows.share(page)
                else:
                    windows[ordinal] = self._take_window()
                    pairs[1] = page, windows[ordinal]
            branch.node, branch.known_pages = source.node, source.known_pages
            self._seat(branch, source.length, pages, windows, source=source.row, noted=source.noted, pairs=pairs)

    def _seat(
        self,
        request: Request,
        length: int,
        pages: list[int],
        windows: dict[int, int],
        *,
        record: int = -1,
        source: int = -1,
        noted: int | None = None,
        pairs: Sequence[tuple[int, int]] = ((-1, -1), (-1, -1)),
    ) -> None:
        """Gives a request a row whose pages hold ``length`` tokens.

        Args:
            request: that waits.
            length: tokens.
            pages: which the request holds now.
            windows: likewise, by ordinal.
            record: of the states behind the tokens, or -1.
            source: the row that has those states, or -1.
            noted: full pages that are known to the index; default: all.
            pairs: a page and a window page to be copied first, from and to, or -1.
        """
        row = self._running.index(None)
        self._running[row], request.seat = request, object()
        self._waiting.remove(request)
        request.row, request.active, request.length, request.pages = row, False, length, pages
        request.noted = length // PAGE_TOKENS if noted is None else noted
        self._table[row, : len(pages)] = pages
        for ordinal, page in windows.items():
            self._hold_window(request, ordinal, page)
        if request.cached is None:
            request.cached = length
            self.stats.prompt_tokens += len(request.prompt)
            self.stats.cached_tokens += length
        self._params, self._params_there = self._params.with_row(row, request.params), None
        tokens = padded(request.tokens)
        numbers = [np.int32(x) for x in (row, length, record, source)]
        pages_to_copy = [np.array([pair], np.int32) for pair in pairs]
        limit, prompt, made = request.params.max_new_tokens or 0, len(request.prompt), len(request.made)
        counts = [np.int32(x) for x in (prompt, made)]
        self._send(device.place, tokens.shape, (*numbers, *pages_to_copy, np.int32(limit), tokens, *counts))

    def _preempt(self, request: Request) -> None:
        """Takes a request's row and pages; it waits to be computed again from its tokens."""
        self._wait_again(request)
        self._release(request)

    def _wait_again(self, request: Request) -> None:
        """Puts a request that loses its row among those that wait."""
        request.let_branches_go()
        if request not in self._waiting:
            self._waiting.append(request)
        request.preempted += 1
        self.stats.preempted += 1

    def _end(self, request: Request, reason: Reason) -> None:
        self._say(request)
        if request.ended:
            return
        try:
            request.output.end(reason)
        except Exception as error:  # of the caller's callback
            request.error = error
        self._count(request, reason)
        self._leave(request)

    def _count(self, request: Request, reason: Reason | None = None) -> None:
        """Counts a request that has ended, once; ``reason``: why from outside, if what was held back did not end it."""
        if request.counted:
            return
        request.counted = True
        self.stats.failed += request.error is not None
        self.stats.cancelled += request.error is None and request.output.reason == reason
        self.stats.finished += request.error is None and request.output.reason != reason

    def _leave(self, request: Request) -> None:
        """Takes an ended request out."""
        request.let_branches_go()
        if request in self._waiting:
            self._waiting.remove(request)
        if request.row >= 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        node = request.node
        while node is not None and node.parent is not None:  # in use until now, the last pages least
            self._index.touch(node)
            node = node.parent
        for page in request.pages:
            self._pages.release(page)
        if self._windows is not None:
            for page in request.windows.values():
                self._windows.release(page)
        self._forget_row(request)

    def _forget_row(self, request: Request) -> None:
        """Leaves a request without a row, as if it had no pages."""
        row = self._running.index(request)
        self._running[row] = None
        self._table[row] = -1
        if self._window_table is not None:
            self._window_table[row] = -1
        request.leave_row()

    # ---- pages

    @staticmethod
    def _take(pool: PagePool, give_back: Callable[[], bool]) -> int | None:
        """A page, at worst one that ``give_back`` frees; None if there is none."""
        page = pool.take()
        while page is None and give_back():
            page = pool.take()
        return page

    def _hold_window(self, request: Request, ordinal: int, page: int) -> None:
        request.windows[ordinal] = page
        if self._window_table is not None:
            self._window_table[request.row, ordinal] = page

    def _make_room(self, request: Request, count: int) -> bool:
        """Pages for ``count`` more tokens, at worst from requests that rank behind; False if this one had to go."""
        while len(request.pages) < pages_of(request.length + count):
            page = self._take(self._pages, self._index.give_back_page)
            if page is None:
                others = [r for r in self._running if r is not None and r is not request]
                worst = max([request, *others], key=lambda r: r.rank)
                if worst is request and not others:
                    raise RuntimeError(
                        f"Expected {self._pages.size} pages to hold one request, {self.free_pages} are free"
                    )
                self._preempt(worst)
                if worst is request:
                    return False
                continue
            self._table[request.row, len(request.pages)] = page
            request.pages.append(page)
        if self._windows is not None:
            for ordinal in range(first_window_page(self._window, request.length), pages_of(request.length + count)):
                if ordinal not in request.windows:
                    self._hold_window(request, ordinal, self._take_window())
        return True

    def _take_window(self) -> int:
        """A free page of the window stream."""
        page = None if self._windows is None else self._take(self._windows, self._index.give_back_resume)
        if page is None or self._windows is None:
            raise RuntimeError(f"Expected {self._sizes['window_pages']} window pages to be enough for all rows")
        return page

    def _take_record(self) -> int:
        """Where states at the end of a page can go; -1 if there is no place."""
        if self._records is None:
            return -1
        record = self._take(self._records, self._index.give_back_resume)
        return -1 if record is None else record

    def _advance(self, request: Request, length: int, record: int) -> None:
        """A request's pages hold ``length`` tokens now; ``record``: of the last full page's end, or -1."""
        request.length = length
        if self._reuse and request.node is not None and (request.noted + 1) * PAGE_TOKENS <= length:
            tokens = request.tokens
            while (request.noted + 1) * PAGE_TOKENS <= length:
                k = request.noted
                node = self._index.add(request.node, tokens[k * PAGE_TOKENS : (k + 1) * PAGE_TOKENS], request.pages[k])
                if node.page != request.pages[k]:  # the same page is known already: read that one
                    self._pages.release(request.pages[k])
                    request.pages[k] = self._table[request.row, k] = self._pages.share(node.page)
                request.node, request.noted = node, k + 1
                last = (k + 2) * PAGE_TOKENS > length
                if record >= 0 and last and self._index.resume(node, request.windows[k], record):
                    record = -1
        if record >= 0 and self._records is not None:
            self._records.release(record)
        if self._windows is not None and self._window_table is not None:
            for ordinal in [o for o in request.windows if o < first_window_page(self._window, length)]:
                self._windows.release(request.windows.pop(ordinal))
                self._window_table[request.row, ordinal] = -1

    # ---- what runs

    def _next_chunks(self) -> list[tuple[Request, int]]:
        """Requests with tokens to read, best first, and how many each reads in this step."""
        left = self._budget - sum(r is not None and r.active for r in self._running)
        chosen: list[tuple[Request, int]] = []
        for request in sorted((r for r in self._running if r is not None and not r.active), key=lambda r: r.rank):
            if request.row < 0:  # gave its pages to one before it
                continue
            count = min(self._chunk, request.known - request.length, max(left, 1 if not chosen else 0))
            if request.branches:  # which read the last token for themselves, and choose the next
                count = min(count, request.known - 1 - request.length)
                if not count:  # nothing is left to read before them
                    continue
            end = request.length + count
            known = request.known_pages * PAGE_TOKENS
            whole = known if request.length < known < end else end // PAGE_TOKENS * PAGE_TOKENS
            if whole > request.length:  # chunks end with pages, where they can be gone on from
                count = whole - request.length
            if count < 1:
                break
            if not self._make_room(request, count):
                break
            left -= count
            chosen.append((request, count))
        return [(request, count) for request, count in chosen if request.row >= 0]

    def _prefill(self, chunks: list[tuple[Request, int]]) -> list["Flight"]:
        """Reads chunks of prompts; what comes of those whose prompt ends."""
        flights = []
        for group in rectangles(chunks, self._width):
            size, width = bucket(len(group)), self._width(max(count for _, count in group))
            index = np.full(size, len(self._running), np.int32)
            tokens, counts = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
            following = np.zeros(size, np.int32)
            ending, records = np.zeros(size, bool), np.full(len(self._running), -1, np.int32)
            for i, (request, count) in enumerate(group):
                end = request.length + count
                index[i], counts[i], ending[i] = request.row, count, end == request.known
                known = request.tokens
                tokens[i, :count] = known[request.length : end]
                following[i] = 0 if ending[i] else known[end]
                if self._reuse and end % PAGE_TOKENS == 0:
                    records[request.row] = self._take_record()
            tops = self._wants_tops()
            args = self._prefill_args(index, tokens, counts, following, ending, records, tops)
            launch = self._send(device.prefill_rows, tokens.shape, args, tops)
            for request, count in group:
                self._advance(request, request.length + count, int(records[request.row]))
            ended = [(i, request) for i, (request, _) in enumerate(group) if ending[i]]
            for _, request in ended:
                request.active = True
                request.coming += 1
            if ended:
                passengers = [Passenger(i, request, request.seat, 1) for i, request in ended]
                flights.append(Flight(passengers, launch, decoding=False))
        return flights

    def _launch_steps(self) -> int:
        """Tokens of a row that the next decode launch makes at most."""
        busy = bool(self._waiting) or any(r is not None and not r.active for r in self._running)
        steps = min(self._steps, BUSY_STEPS) if busy else self._steps
        return max(steps // (self._drafts + 1), 1) * (self._drafts + 1)

    def _decode(self, requests: list[Request]) -> bool:
        """Lets requests make some tokens, which a later step settles; whether there was anything to launch."""
        steps = self._launch_steps()
        if not any(r.left > 0 for r in requests):
            return False
        for request in sorted(requests, key=lambda r: r.rank):
            if request.row >= 0:
                self._make_room(request, request.ahead(steps))
        requests = [request for request in requests if request.row >= 0]
        if not any(r.left > 0 for r in requests):
            return False
        alive = np.zeros(len(self._running), bool)
        records = np.full(len(self._running), -1, np.int32)
        passengers = []
        for request in requests:  # those too that may have ended meanwhile: the device knows
            alive[request.row] = True
            start = request.length + (0 if self._drafts else request.coming_decoded)
            if self._reuse and start // PAGE_TOKENS < (request.length + request.ahead(steps)) // PAGE_TOKENS:
                records[request.row] = self._take_record()
            most = min(steps, max(request.left, 0)) if not self._drafts else steps
            passengers.append(Passenger(request.row, request, request.seat, most, int(records[request.row])))
        tops = self._wants_tops()
        args = self._decode_args(alive, steps // (self._drafts + 1), records, tops)
        for passenger in passengers:
            passenger.request.coming += passenger.most
        self._flights.append(Flight(passengers, self._send(device.decode_rows, (), args, tops), decoding=True))
        return True

    # ---- what comes of it

    def _settle(self, flight: "Flight") -> None:
        """Takes in what requests have made: how long they are, and whether they go on. Their text comes later."""
        waits, began = not flight.ready, time.perf_counter()
        made, counted = flight.fetch()
        there = time.perf_counter()
        self.stats.wait_seconds += there - began
        if waits:
            self._line.seen_working(there)
        for passenger in flight.passengers:
            at, request = passenger.at, passenger.request
            if request.seat is not passenger.seat:  # gave its row back meanwhile
                self._give_back_record(passenger.record)
                continue
            count, drafted, accepted, goes_on = (int(x) for x in counted[:, at])
            request.drafted, request.accepted = request.drafted + drafted, request.accepted + accepted
            self.stats.drafted_tokens += drafted
            self.stats.accepted_tokens += accepted
            request.coming -= passenger.most
            if count:
                self._unsaid.append(request)
                request.unsaid.append((len(request.made), [column[at][:count] for column in made]))
                request.made += made[0][at][:count].tolist()
            if flight.decoding:
                self._note_decoded(request, passenger.record)
            if not goes_on:
                self._release(request)

    def _give_back_record(self, record: int) -> None:
        if record >= 0 and self._records is not None:
            self._records.release(record)

    def _note_decoded(self, request: Request, record: int) -> None:
        """Notes what a request's pages hold after it has decoded; ``record`` as a passenger's."""
        length = request.known - 1  # the last token is not in the pages
        if length // PAGE_TOKENS == request.length // PAGE_TOKENS:  # the page's end was not reached
            self._give_back_record(record)
            record = -1
        self._advance(request, length, record)

    def _say_all(self) -> None:
        """Gives requests, and by them callers, what they have made."""
        while self._unsaid:
            self._say(self._unsaid[0])
            self._unsaid.pop(0)  # after an interrupt the rest of it is said in the next step

    def _say(self, request: Request) -> None:
        """Gives a request what it has made, until it ends; then it leaves."""
        if request.counted:
            return
        output = request.output
        before = len(output.ids)
        try:
            output.tell()  # what an interrupt has left
            for start, (tokens, logprobs, *tops) in request.unsaid:
                for i in range(len(output.ids) - start, len(tokens)):
                    if request.ended:
                        break
                    output.push(int(tokens[i]), float(logprobs[i]), *(top[i] for top in tops))
        except Exception as error:  # not numbers, or the caller's callback: this request alone ends
            request.error = error
        finally:
            self.stats.made_tokens += len(output.ids) - before
        request.unsaid = []
        if request.ended:
            self._count(request)
            self._leave(request)

    def _width(self, count: int) -> int:
        return width_of(count, self._chunk)

    def _wants_tops(self) -> bool:
        return any(r is not None and bool(r.params.logprobs) for r in self._running)

    def _prefill_args(
        self,
        index: np.ndarray,
        tokens: np.ndarray,
        counts: np.ndarray,
        following: np.ndarray,
        ending: np.ndarray,
        records: np.ndarray,
        tops: bool,
    ) -> tuple[Any, ...]:
        where = records if self._keeps_states else None
        return self._host_params(), index, tokens, counts, following, ending, self._end_ids, np.array(tops), where

    def _decode_args(self, alive: np.ndarray, passes: int, records: np.ndarray, tops: bool) -> tuple[Any, ...]:
        where = records if self._keeps_states else None
        return self._host_params(), self._end_ids, alive, np.array(tops), np.int32(passes), where

    def _send(self, function: Any, key: tuple[Any, ...], args: tuple[Any, ...], tops: bool = False) -> Launch:
        """Has the device run a step behind all others.

        ``args`` are those behind model, cache and rows; ``tops``: whether the likeliest ids are to come to the host.

        Another thread makes the launch where the program is there: a launch takes as long as the host has to follow the
        device through a program, and other work can be done meanwhile. What would be traced is not left to it, for it
        would not see this thread's contexts.
        """
        places = function is device.place
        new_tables = () if places else self._new_tables()

        def call(cache: PagedCache, rows: Rows) -> tuple[PagedCache, Rows, tuple[jax.Array, ...]]:
            if new_tables:
                cache = cache.replace(table=new_tables[0], window_table=new_tables[1])
            before = (cache, rows) if places else (self._served, cache, rows)
            cache, rows, *rest = self._programs.run(function, key, *before, *args)
            if not rest:
                return cache, rows, ()
            made, counted = rest
            return cache, rows, (*(made if tops else made[:2]), counted)

        if self._programs.has(function, key):
            return self._line.send(call, work=not places, since=self._began if self._stepping else None)
        with dispatch.following(self._model.params, self._cache):
            return self._line.make(call, work=not places, since=self._began if self._stepping else None)

    def _jobs(self) -> Iterator[Job]:
        """Everything that can run, with arguments like those that it will have."""
        rows = len(self._running)
        records, alive = np.full(rows, -1, np.int32), np.zeros(rows, bool)
        cache, held = self._line.held()
        yield device.decode_rows, (), (self._served, cache, held, *self._decode_args(alive, 0, records, False))
        for size, width in shapes(rows, self._width(self._chunk), self._budget):
            zeros = np.zeros(size, np.int32)
            none = np.full(size, rows, np.int32), np.zeros((size, width), np.int32), zeros, zeros
            args = self._prefill_args(*none, np.zeros(size, bool), records, False)
            yield device.prefill_rows, (size, width), (self._served, cache, held, *args)
        number, pair = np.int32(0), np.full((1, 2), -1, np.int32)
        longest = len(padded(np.zeros(self._model.spec.max_seq_len, np.int32)))
        for length in doubling(PAGE_TOKENS, longest):
            numbers = (*[number] * 4, pair, pair, number, np.zeros(length, np.int32), number, number)
            yield device.place, (length,), (cache, held, *numbers)

    def _host_params(self) -> RowParams:
        """The sampler's options on the device, sent if they are not there as they are now."""
        if self._params_there is None:
            self._params_there = jax.device_put(self._params)
        return self._params_there

    def _new_tables(self) -> tuple[jax.Array, jax.Array | None] | tuple[()]:
        """Copies of the tables for the device, if it has not got them as they are now."""
        tables = [table for table in (self._table, self._window_table) if table is not None]
        if len(self._sent) == len(tables) and all(map(np.array_equal, self._sent, tables)):
            return ()
        self._sent = [table.copy() for table in tables]
        there = [on_device(table, np.int32) for table in tables]
        return there[0], there[1] if len(there) > 1 else None


def _taker(pieces: list[str | int], callback: Callable[[str | int], None] | None) -> Callable[[int, str | int], None]:
    """Keeps pieces for a handle, and gives them to the caller."""

    def take(_: int, piece: str | int) -> None:
        pieces.append(piece)
        if callback is not None:
            callback(piece)

    return take
