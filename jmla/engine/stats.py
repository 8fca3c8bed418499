"""What an engine has done, in numbers."""

import dataclasses


@dataclasses.dataclass
class Stats:
    """What an engine has done.

    Attributes:
        submitted: requests; of a prompt for which several completions are drawn, each is one.
        finished: requests that came to their own end.
        cancelled: requests that were cancelled or ran out of time.
        failed: requests whose logits were not numbers, or whose callback failed.
        preempted: times that a request gave its pages back to be computed again.
        steps: calls of ``step`` that computed something.
        prompt_tokens: of the requests that have started.
        cached_tokens: of those, read from the pages of other requests.
        made_tokens: given out.
        drafted_tokens: guesses of the draft block that were looked at.
        accepted_tokens: of those, the ones that were right.
        step_seconds: time in steps.
        host_seconds: time in steps in which the device may have had no work for want of the host: from when it was last
            seen to work, or got some, until it got more. An upper bound, for its own work may be part of it.
        wait_seconds: time that the host waited for the device.
        late_steps: steps in which the device had ended all its work before the host came.
    """

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preempted: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    made_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    wait_seconds: float = 0.0
    late_steps: int = 0
