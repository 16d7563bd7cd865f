"""Results of a start's kernel trials, or of an earlier identical start in which no trial failed.

`assemble` makes a `Findings`, from a stored note if there is one (`startup.trial_notes`), and passes it to all trials.
With a note no trial is run and the ops tables are built from the noted decisions. Without one, the start writes a note
only if every trial succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.types import is_out_of_memory


class Findings:
    def __init__(self, noted: Mapping[str, bool] | None = None):
        """`noted`: the measured decisions of the earlier start; None: there is no note."""
        self._noted = noted
        self._decided: dict[str, bool] = {}
        self._is_sure = True  # no trial has failed or been left unfinished

    @property
    def worth_noting(self) -> dict[str, bool] | None:
        """Decisions that the next start may reuse; None if a trial failed or was left unfinished, or if a note exists
        already."""
        return self._decided if self._is_sure and self._noted is None else None

    def attempt(self, trial: Callable[[], None]) -> None:
        """Runs the trial unless its result is noted; raises its error."""
        if self._noted is not None:
            return
        try:
            trial()
        except Exception:
            self.forbid_note()
            raise

    def error_of(self, trial: Callable[[], None]) -> Exception | None:
        """Runs the trial and returns its error; None if it succeeded or ran out of memory."""
        try:
            self.attempt(trial)
        except Exception as error:  # compilers, drivers and kernels raise errors of any type
            # Out of memory is not the kernel's fault; the next allocation of the start reports it.
            return None if is_out_of_memory(error) else error
        return None

    def decide(self, name: str, measure: Callable[[], bool | None]) -> bool:
        """Returns the noted decision, or else that of `measure`. If `measure` returns None because it could not
        measure, the decision is False and nothing is noted."""
        if self._noted is not None and name in self._noted:
            return self._noted[name]
        answer = measure()
        if answer is None:
            self.forbid_note()
        else:
            self._decided[name] = answer
        return bool(answer)

    def forbid_note(self) -> None:
        """Prevents a note, so that the next start runs its trials again."""
        self._is_sure = False
