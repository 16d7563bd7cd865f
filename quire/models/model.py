"""The `Model` protocol: what the loader, the runtime and `startup` require of a model, and what a model may be asked.

Families inherit from it. An optional ability has a default here, so callers never test whether a family has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quire.kernels.table import Ops
from quire.layers.adapters import Adapter
from quire.layers.build import Build
from quire.layers.step import Step
from quire.models.stages import Stage
from quire.types import CacheSpec, QuireError

if TYPE_CHECKING:
    from quire.models.mtp_head import HeadForm


class Model(Protocol):
    """A decoder with its weights. The methods with a body are abilities, which most families leave as they are."""

    specs: list[CacheSpec]
    vocab_size: int
    max_positions: int
    activation_elements: int  # peak elements per token that are alive at once in `forward`, for the memory plan
    ops: Ops

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        """Computes the step and leaves its state in `caches`; returns the hidden states `step.wanted`, [n, width]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden [n, width] to logits [n, vocab], in the dtype it computes in; the sampler works in float32."""
        ...

    @classmethod
    def fits_native(cls, config: Any) -> bool:
        """Whether the native CPU library runs all layers in one call, whatever the scheme of the weights."""
        return False

    def is_eager_only(self) -> bool:
        """Whether no step may be captured as a CUDA graph."""
        return False

    def captures_decodes_only(self) -> bool:
        """Whether only decode steps are captured and warmed up; others would delay requests for seconds."""
        return False

    def num_tapped_layers(self) -> int:
        """Returns how many layers `Step.taps` may name the hidden states of; 0: the model gives none."""
        return 0

    def pack_adapter(self, adapter: Adapter) -> Any:
        """Returns an adapter in the form of the model's one native call; None: the model has none."""
        return None

    def head_form(self) -> HeadForm | None:
        """Returns how the family publishes a head for multi-token prediction; None: it does not. A checkpoint need not
        have the head."""
        return None

    def start_notes(self) -> Sequence[str]:
        """Returns lines to show when the model starts, about what it does slower or otherwise than expected."""
        return ()

    def take_stage(self, stage: Stage) -> None:
        """Keeps the layers of one pipeline stage, before weights are real. The first stage keeps the embedding, the
        last one the head; the others' `forward` takes `step.stream`, and those before the last return the stream."""
        name = type(self).__name__.removesuffix("Model")
        what = f"{name} models can't be divided into pipeline stages."
        raise QuireError("unsupported_split", what, "Use tensor parallelism instead, or another model.", param="pp")

    def ignored_prefixes(self) -> tuple[str, ...]:
        """Returns prefixes of checkpoint tensors that the model does not need."""
        return ()

    def ignored_patterns(self) -> tuple[str, ...]:
        """Returns regular expressions, searched in the names of checkpoint tensors that the model does not need."""
        return ()


class Family(Protocol):
    """A model class: reads its own config and builds itself on meta."""

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> Any:
        """Returns the family's own frozen config, from the fields of a config.json."""
        ...

    @staticmethod
    def fits_native(config: Any) -> bool:
        """See `Model.fits_native`."""
        ...

    def __call__(self, config: Any, *, build: Build) -> Model: ...
