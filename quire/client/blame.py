"""Decides whether the loss of an engine process implicates the requests in its last steps.

The flight record names the requests whose step was running. It is evidence against them only if the process itself
caused its end: an error, an exit, a signal that its own code raises, a lack of memory, a step that hangs. A process
that was killed or stopped from outside implicates no request. The supervisor calls this before it uses the record.
"""

from __future__ import annotations

import signal

# Causes between the processes or in the accounting, for which no request in a step is the reason.
UNRELATED_CAUSES = frozenset({"frames_lost", "frames_damaged", "bad_message", "check_failed"})
# Signals that a process raises by its own fault. Any other signal has a sender, which is unknown. By name, because not
# every system has all of them.
_SELF_CAUSED = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS"}
SELF_CAUSED_SIGNALS = frozenset(number for number in signal.Signals if number.name in _SELF_CAUSED)


def implicates_requests(code: str, exit_code: int | None, is_stopped: bool) -> bool:
    """Whether the requests in the last steps may be the reason for the loss.

    `code`: error code of the cause, `out_of_memory` if the system killed the process for that. `exit_code`: of the
    process, negative for a signal; None: the supervisor ended it. `is_stopped`: SIGSTOP had stopped the process.
    """
    if code in UNRELATED_CAUSES or is_stopped:
        return False
    killed = code == "engine_lost" and exit_code is not None and exit_code < 0
    return not killed or -(exit_code or 0) in SELF_CAUSED_SIGNALS
