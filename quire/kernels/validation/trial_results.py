"""The results of a start's kernel trials, or those of an earlier identical start that noted no failure.

`assemble` makes a `Findings`, from a note if there is one (`startup.trial_notes`), and hands it to everything that
tries kernels. With a note nothing is launched and the ops tables are put together as they were then. Without one, only
a start in which every trial agreed leaves a note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.kernels.validation.failures import is_out_of_memory


class Findings:
    def __init__(self, noted: Mapping[str, bool] | None = None):
        """`noted`: what the earlier start decided by measuring; None: there was none."""
        self._noted = noted
        self._decided: dict[str, bool] = {}
        self._is_sure = True  # all that was tried so far agreed

    @property
    def worth_noting(self) -> dict[str, bool] | None:
        """What the next start need not find out again; None: something failed, or was not tried to its end, or it is
        noted already."""
        return self._decided if self._is_sure and self._noted is None else None

    def attempt(self, trial: Callable[[], None]) -> None:
        """Raises what the trial does."""
        if self._noted is not None:
            return
        try:
            trial()
        except Exception:
            self.doubt()
            raise

    def error_of(self, trial: Callable[[], None]) -> Exception | None:
        """What a trial fails with, if it does."""
        try:
            self.attempt(trial)
        except Exception as error:  # whatever a compiler, a driver or a kernel may say
            # Memory is no fault of the kernel's, and whoever needs it next will say so.
            return None if is_out_of_memory(error) else error
        return None

    def decide(self, name: str, measure: Callable[[], bool | None]) -> bool:
        """`measure` may come back with None, where it could not: that counts as no, and is not noted."""
        if self._noted is not None and name in self._noted:
            return self._noted[name]
        answer = measure()
        if answer is None:
            self.doubt()
        else:
            self._decided[name] = answer
        return bool(answer)

    def doubt(self) -> None:
        """Let the next start look for itself."""
        self._is_sure = False
