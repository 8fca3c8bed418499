"""A long run of the engine's state machine, of which the usual tests have a short one.

``python -m tests.machine_run v4 --drafts 3 --steps 10000`` prints a line of JSON after each thousand steps, which says
what was done so far, and ends with an error and the shortest failing example if there is one. ``benchmarks/README.md``
records such runs.
"""

import argparse
import collections
import json
import time

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.test_engine_machine import EngineMachine

LENGTH = 40  # steps of an example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=("v32", "v4", "glm"))
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done: collections.Counter[str] = collections.Counter()

    class Machine(EngineMachine):
        family, drafts = options.family, options.drafts

        def teardown(self) -> None:
            super().teardown()
            stats = self.engine.stats
            done.update(examples=1, requests=stats.submitted, cancelled=stats.cancelled, preempted=stats.preempted)
            done.update(tokens=stats.made_tokens, cached_tokens=stats.cached_tokens, engine_steps=stats.steps)
            done.update(drafted=stats.drafted_tokens, accepted=stats.accepted_tokens)

        def check_invariants(self, *args: object, **kwargs: object) -> None:  # once after each step
            done.update(steps=1)
            super().check_invariants(*args, **kwargs)

    start, number = time.monotonic(), options.seed
    chosen = settings(
        max_examples=25,
        stateful_step_count=LENGTH,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    while done["steps"] < options.steps:
        run_state_machine_as_test(seed(number)(Machine), settings=chosen)
        number += 1
        print(json.dumps({**vars(options), **done, "seconds": round(time.monotonic() - start)}), flush=True)


if __name__ == "__main__":
    main()
