"""Synthetic values for dry runs of code that reads values on the host. Used by `dry_run`.

Weights of a model that is being built are on meta, and so is all that is computed from them. Some code still reads such
tensors on the host, the number of tokens of each expert, for example. While `SyntheticValues` is active, tokens are
real tensors, and results that combine them with weights are random. No weight is needed, and shapes are those of a real
run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_META = torch.device("meta")
_HOST = torch.device("cpu")


class SyntheticValues(TorchDispatchMode):
    """While active, operations on real and meta tensors return real tensors: random floats, zero integers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        has_values = any(not x.is_meta for x in tensors) or torch.device(kwargs.get("device") or _META) != _META
        if not has_values or not any(x.is_meta for x in tensors):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]  # the in-place target stays as it is: a real tensor has values, and meta weights have none
        return tree_map(self._synthesize, func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs)))

    def _synthesize(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = torch.zeros(x.shape, dtype=x.dtype, device=_HOST)
        return made.normal_(generator=self._generator) if x.is_floating_point() else made


def _to_meta(x: Any) -> Any:
    return x.to(_META) if isinstance(x, Tensor) else _META if isinstance(x, torch.device) else x
