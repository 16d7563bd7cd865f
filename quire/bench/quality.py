"""`quire bench quality`: the quality that quantized weights and KV cache cost, against float32 ones.

Reports the perplexity of a text, the KL divergence of next-token distributions from those of the float32 model, and how
often both models agree on the most likely token. Both models read the same stretches of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.bench.stats import Report
from quire.types import QuireError

if TYPE_CHECKING:
    from torch import Tensor

    from quire.config import Config

PAGE = 16
CHUNK = 256  # tokens per step
FLOAT_CACHE = {"kv_dtype": "auto", "kv_dtype_skip": None}


def bench_quality(config: Config, text: str, *, stretches: int = 8, length: int = 1024) -> Report:
    """Compare the model of `config` with the same checkpoint in float32."""
    from quire.config_build import override_config
    from quire.startup.cache_plan import find_files
    from quire.text.loading import load_tokenizer

    tokenizer = load_tokenizer(find_files(config, None))
    if tokenizer is None:
        raise QuireError("usage", "This model has no tokenizer.", "Give one that has.")
    tokens = tokenizer.encode(text[: 12 * stretches * length])
    pieces = [tokens[i * length : (i + 1) * length] for i in range(stretches)]
    if len(pieces[-1]) < length:
        what = f"The text has {len(tokens)} tokens, fewer than the {stretches * length} needed."
        raise QuireError("usage", what, "Give a longer text, or take fewer or shorter stretches.")
    exact = _load(override_config(config, {"dtype": "float32", "quant": "none", **FLOAT_CACHE}))
    judged = _load(config)
    sums = {"theirs": 0.0, "ours": 0.0, "kl": 0.0, "same": 0.0}
    count = 0
    for piece in pieces:
        for (want, targets), (got, _) in zip(_scores(exact, piece), _scores(judged, piece), strict=True):
            rows = range(len(targets))
            sums["theirs"] -= want[rows, targets].sum().item()
            sums["ours"] -= got[rows, targets].sum().item()
            sums["kl"] += (want.exp() * (want - got)).sum().item()
            sums["same"] += (want.argmax(1) == got.argmax(1)).sum().item()
            count += len(targets)
    return {
        "benchmark": "quality",
        "tokens": count,
        "bars": [],
        "pass": True,
        "perplexity": math.exp(sums["ours"] / count),
        "float32_perplexity": math.exp(sums["theirs"] / count),
        "kl": sums["kl"] / count,
        "same_top": sums["same"] / count,
    }


def _load(config: Config) -> Any:
    import torch

    from quire.models.loading.loader import load_model
    from quire.startup.cache_plan import find_files

    return load_model(
        find_files(config, None),
        dtype=config.model.dtype,
        device=torch.device("cpu"),
        max_model_len=None,
        page_tokens=PAGE,
        quant=config.model.quant,
        kv_dtype=config.cache.kv_dtype,
        kv_skip=config.cache.kv_dtype_skip,
        kernels=config.engine.kernels,
    ).model


def _scores(model: Any, tokens: Sequence[int]) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield log-probabilities of the next tokens, [n, vocab], and the actual next tokens, one chunk at a time."""
    import torch

    from quire.layers.step import PagedInputs, Step
    from quire.runtime.store import unit_shape

    num_pages = -(-len(tokens) // PAGE)
    table = torch.arange(num_pages, dtype=torch.int32).view(1, -1)
    caches = {
        spec.group: torch.zeros(unit_shape(spec, num_pages), dtype=getattr(torch, spec.dtype)) for spec in model.specs
    }
    for first in range(0, len(tokens) - 1, CHUNK):
        part = list(tokens[first : first + CHUNK])
        positions = torch.arange(first, first + len(part))
        step = Step(
            tokens=torch.tensor(part),
            positions=positions,
            query_starts=torch.tensor([0, len(part)], dtype=torch.int32),
            seq_lens=torch.tensor([first + len(part)], dtype=torch.int32),
            logits_index=torch.arange(len(part)),
            groups={spec.group: PagedInputs(table, positions) for spec in model.specs},
            counts=[len(part)],
            len_bounds=[first + len(part)],
        )
        targets = list(tokens[first + 1 : first + len(part) + 1])
        with torch.inference_mode():
            hidden = model.forward(step, caches)[: len(targets)]
            scores = model.logits(hidden).float().log_softmax(-1)
        yield scores, targets  # outside inference_mode, since two generators alternate and would end each other's mode
