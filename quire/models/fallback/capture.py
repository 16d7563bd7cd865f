"""Whether a decode step of other people's code can be captured as a CUDA graph. For `fallback`.

Such code may look at numbers from the host (experts taken one by one, frequencies that follow a length): capturing it
then fails. What can be captured launches the same whatever the numbers are, and is replayed many times quicker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.kernels.capture import capture


def can_capture(compute: Callable[[], Tensor], caches: Mapping[str, Tensor], most: float) -> bool:
    """Whether what `compute` launches can be captured, and comes to the same, within `most` of the largest, when it is
    replayed. It works on `caches`, which are left as they were."""
    before = {name: cache.clone() for name, cache in caches.items()}

    def restore() -> None:
        for name, cache in caches.items():
            cache.copy_(before[name])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            compute()  # compiles and warms what a capture may not
            restore()
            with _no_waiting():
                wanted = compute().clone()
            graph, out = capture(compute)
            out.fill_(torch.nan)
            restore()
            graph.replay()
            return bool((out - wanted).abs().max() <= most * wanted.abs().max())  # NaN is not
    except Exception:  # anything can happen in other people's code
        return False
    finally:
        torch.cuda.current_stream().wait_stream(stream)
        restore()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whoever waits for the device in here fails. To find out by a capture that fails costs more: see `capture`."""
    usual = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # is a prototype, torch says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(usual)
