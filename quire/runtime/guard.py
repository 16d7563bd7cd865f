"""Translates errors of torch and CUDA to errors that the engine's loop handles; wraps the `Workers` of a device.

Out of memory becomes a `QuireError` with code out_of_memory, and the allocator's cached memory is released before the
next step. An error after which the device no longer responds becomes `DeviceLost`. All other errors pass unchanged:
one request may cause them, and the loop finds out which by bisection.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from quire.engine.workers import DeviceLost, Ticket, Workers
from quire.kernels.validation.failures import probe_device
from quire.types import Plan, QuireError, StepOutput, is_out_of_memory


class GuardedWorkers:
    """Implements `Workers` by delegation to inner workers, with errors translated."""

    def __init__(
        self,
        inner: Workers,
        device: torch.device,
        probe: Callable[[], None] | None = None,
        on_failure: Callable[[], None] | None = None,
    ):
        """`probe` raises if the device is lost; by default a CUDA synchronization. `on_failure` is called after any
        failure other than out of memory, which may come from a kernel whose trial is noted as passed."""
        self.inner = inner
        self._device = device
        self._probe = probe or (lambda: probe_device(device))
        self._on_failure = on_failure or (lambda: None)
        self._release_first = False  # before the next step, when the failed one is unreferenced

    def forward(self, plan: Plan) -> Any:
        if self._release_first:
            self._release_first = False
            release_memory(self._device)
        with self._translated():
            return self.inner.forward(plan)

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Ticket:
        with self._translated():
            return _GuardedTicket(self, self.inner.sample(forward, masks))

    def wait(self, ticket: Ticket) -> StepOutput:
        with self._translated():
            return ticket.wait()

    def warm_ups(self) -> Iterator[None]:
        """Yields the inner warm-ups. One that fails ends them with a warning: what it prepares is done on demand."""
        warm_ups = self.inner.warm_ups()
        while True:
            try:
                with self._translated():
                    next(warm_ups)
            except StopIteration:
                return
            except DeviceLost:
                raise
            except Exception as error:
                line = f"Warm-up stopped ({first_line(error)}); kernels and graphs are prepared on demand."
                warnings.warn(line, stacklevel=2)
                return
            yield

    def close(self) -> None:
        self.inner.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except StopIteration:  # ends `warm_ups`
            raise
        except Exception as error:
            if is_out_of_memory(error):
                self._release_first = True
                what = f"Memory ran out on {self._device} during a step ({first_line(error)})."
                hint = "Lower max_batch_tokens, max_rows or cache_memory."
                raise QuireError("out_of_memory", what, hint) from None
            self._on_failure()
            if isinstance(error, RuntimeError):
                self._check_alive(error)
            raise

    def _check_alive(self, error: BaseException) -> None:
        try:
            self._probe()
        except Exception:
            raise DeviceLost(f"{self._device} failed for good: {first_line(error)}") from error


class _GuardedTicket:
    def __init__(self, guard: GuardedWorkers, inner: Ticket):
        self._guard, self._inner = guard, inner

    def wait(self) -> StepOutput:
        return self._guard.wait(self._inner)


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's text, without the advice that CUDA errors append."""
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__


def enter_device(device: torch.device) -> None:
    """Makes a GPU other than the first the one on which this thread launches kernels, as Triton needs it."""
    if device.type == "cuda" and device.index:
        torch.cuda.set_device(device)


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
