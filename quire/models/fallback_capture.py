"""Whether a decode step of other people's code can be captured as a CUDA graph. For `fallback`.

Such code may look at numbers from the host (experts taken one by one, frequencies that follow a length): capturing it
then fails. What can be captured launches the same whatever the numbers are, and is replayed many times quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


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
            wanted = compute()  # compiles and warms what a capture may not, too
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                out = compute()
            finally:
                graph.capture_end()
            out.fill_(torch.nan)
            restore()
            graph.replay()
            return bool((out - wanted).abs().max() <= most * wanted.abs().max())  # NaN is not
    except Exception:  # anything can happen in other people's code
        return False
    finally:
        torch.cuda.current_stream().wait_stream(stream)
        restore()
