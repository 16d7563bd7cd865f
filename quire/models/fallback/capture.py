"""Tests whether a decode step of a transformers model can be captured as a CUDA graph. Used by `model`.

Some models read tensors on the host while they compute (loops over experts, frequencies that follow a length), and then
capture fails. What can be captured launches the same kernels whatever the values are, and replays many times faster.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.kernels.capture import capture


def can_capture(compute: Callable[[], Tensor], caches: Mapping[str, Tensor], most: float) -> bool:
    """Returns whether `compute` can be captured and its replay gives the same result, within `most` of the largest
    value. `compute` works on `caches`, which are restored.
    """
    before = {name: cache.clone() for name, cache in caches.items()}

    def restore() -> None:
        for name, cache in caches.items():
            cache.copy_(before[name])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            compute()  # compiles kernels and warms up, which capture does not allow
            restore()
            with _forbid_synchronization():
                wanted = compute().clone()
            graph, out = capture(compute)
            out.fill_(torch.nan)
            restore()
            graph.replay()
            return bool((out - wanted).abs().max() <= most * wanted.abs().max())  # false for NaN
    except Exception:  # model code of transformers can raise anything
        return False
    finally:
        torch.cuda.current_stream().wait_stream(stream)
        restore()


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """Makes each synchronization with the device raise. That is cheaper than to let a capture fail: see `capture`."""
    usual = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(usual)
