"""Whether the loss of an engine process says anything about the requests in its last steps.

The flight record names the requests whose step was running. That is evidence against one of them only if the process
ended by what it did itself: an error, an exit, a signal its own code causes, memory that ran out, a step that hangs. A
process that somebody killed or stopped implicates_requests nobody. The supervisor asks before it reads the record.
"""

from __future__ import annotations

import signal

# Causes that lie between the processes or in the books: no request in a step was the reason.
UNRELATED_CAUSES = frozenset({"frames_lost", "frames_damaged", "bad_message", "check_failed"})
# Signals that a process brings upon itself. Any other has a sender, and which one it was can't be known.
SELF_CAUSED_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)


def implicates_requests(code: str, exit_code: int | None, is_stopped: bool) -> bool:
    """`code`: of the cause, `out_of_memory` where the system ended it for that. `exit_code`: of a process that ended by
    itself, negative for a signal; None: the supervisor ended it. `is_stopped`: by SIGSTOP, when it hung."""
    if code in UNRELATED_CAUSES or is_stopped:
        return False
    killed = code == "engine_lost" and exit_code is not None and exit_code < 0
    return not killed or -(exit_code or 0) in SELF_CAUSED_SIGNALS
