"""Random work for an engine: submissions, forks, drafts, steps, cancellations, deadlines, priorities; each as alone."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jmla import SamplingParams
from tests.test_engine import alone, make, prompt

PROMPTS = [(5, None), (254, None), (254, 200), (256, 100), (300, None), (300, 270), (490, 256), (490, 300)]
SAMPLING = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=12, temperature=1.0, seed=5),
    SamplingParams(max_new_tokens=1, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=6, temperature=1.0, seed=2, n=3),
]


class EngineMachine(RuleBasedStateMachine):
    """An engine of two rows with few pages, against requests that ran alone."""

    family = "v32"
    drafts = 0
    programs: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.engine = make(self.family, clock=lambda: self.now, drafts=self.drafts)
        warm = self.programs.get((self.family, self.drafts))
        if warm is None:  # compiled once for all examples, and launched ahead from another thread as after a warm-up
            self.engine.warmup(workers=2, progress=False)
            self.programs[self.family, self.drafts] = self.engine._programs
        else:
            self.engine._programs = warm
        self.away = [self.engine._pages.take() for _ in range(4)]
        self.asked = []

    @precondition(lambda self: sum(not handle.done for handle, _ in self.asked) < 5)
    @rule(
        kind=st.sampled_from(PROMPTS),
        sampling=st.sampled_from(SAMPLING),
        priority=st.integers(0, 1),
        deadline=st.none() | st.just(2.0),
        salt=st.sampled_from(["", "b"]),
    )
    def submit(self, kind, sampling, priority, deadline, salt):
        tokens = prompt(*kind)
        handle = self.engine.submit(tokens, sampling=sampling, priority=priority, deadline=deadline, salt=salt)
        self.asked.append((handle, (tokens, sampling)))

    @rule(chunk=st.sampled_from([16, 100, 256]), budget=st.sampled_from([1, 40, 300]), steps=st.sampled_from([1, 5, 8]))
    def step(self, chunk, budget, steps):
        self.engine._chunk, self.engine._budget, self.engine._steps = chunk, budget, steps
        self.engine.step()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        self.asked[data.draw(st.integers(0, len(self.asked) - 1))][0].cancel()

    @rule()
    def time_passes(self):
        self.now += 1.0

    @rule(page=st.booleans())
    def forget(self, page):
        self.engine._index.give_back_page() if page else self.engine._index.give_back_resume()

    @invariant()
    def every_page_is_accounted_for(self):
        engine = self.engine
        running = [r for r in engine._running if r is not None]
        nodes = list(engine._index.nodes())
        kinds = [(engine._pages, [r.pages for r in running], [n.page for n in nodes] + self.away)]
        if engine._windows is not None:
            points = [n for n in nodes if n.record >= 0]
            kinds.append((engine._windows, [list(r.windows.values()) for r in running], [n.window for n in points]))
            flying = [[p.record] for f in engine._flights for p in f.passengers if p.record >= 0]
            kinds.append((engine._records, flying, [n.record for n in points]))
        for pool, held, kept in kinds:
            owners = np.zeros(pool.size, int)
            for page in [page for pages in held for page in pages] + kept:
                owners[page] += 1
            np.testing.assert_array_equal(owners, pool.owners)
        assert all(r.row < 0 and not r.pages for r in engine._waiting)
        assert engine.busy or (not engine._flights and engine._line.is_finished())

    def teardown(self):
        self.engine.run()
        for handle, (tokens, sampling) in self.asked:
            assert handle.done
            for i, request in enumerate(handle._requests):
                got, want = request.output.completion(), alone(self.family, tokens, sampling.choice(i))
                if got.finish_reason in ("cancelled", "deadline"):
                    assert got.token_ids == want.token_ids[: len(got.token_ids)]
                else:
                    assert got == want
        self.every_page_is_accounted_for()


def _machine(family, examples, steps, drafts=0):
    kept = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case = type(f"Machine_{family}_{drafts}", (EngineMachine,), {"family": family, "drafts": drafts}).TestCase
    case.settings = kept
    return case


TestDraftsOfV32 = _machine("v32", 50, 40, drafts=2)
TestEngineOfV32 = pytest.mark.slow(_machine("v32", 50, 40))
TestEngineOfV4 = pytest.mark.slow(_machine("v4", 50, 40))
TestEngineOfGlm = pytest.mark.slow(_machine("glm", 50, 40))
TestDraftsOfV4 = pytest.mark.slow(_machine("v4", 50, 40, drafts=3))
TestDraftsOfGlm = pytest.mark.slow(_machine("glm", 50, 40, drafts=2))
