"""`quire bench quality`: the quality that quantized weights and KV cache cost, against float32 ones.

Reports the perplexity of a text, the KL divergence of next-token distributions from those of the float32 model, and how
often both models agree on the most likely token. Both models read the same stretches of tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from quire.bench.stats import Report
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.config import Config
    from quire.text.tokenizer import Tokenizer

PAGE = 16
CHARACTERS_PER_TOKEN = 12  # at most, on average: more of a text need not be tokenized
FLOAT_CACHE = {"kv_dtype": "auto", "kv_dtype_skip": None}


def bench_quality(config: Config, text: str, *, stretches: int = 8, length: int = 1024) -> Report:
    """Compare the model of `config` with the same checkpoint in float32."""
    from quire.config_build import override_config
    from quire.runtime.reading import next_token_scores
    from quire.startup.cache_plan import find_files
    from quire.text.loading import load_tokenizer

    pieces = cut_stretches(load_tokenizer(find_files(config, None)), text, stretches, length)
    exact = _load(override_config(config, {"dtype": "float32", "quant": "none", **FLOAT_CACHE}))
    judged = _load(config)
    sums = {"theirs": 0.0, "ours": 0.0, "kl": 0.0, "same": 0.0}
    count = 0
    for piece in pieces:
        for (want, targets), (got, _) in zip(
            next_token_scores(exact, piece), next_token_scores(judged, piece), strict=True
        ):
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


def cut_stretches(tokenizer: Tokenizer | None, text: str, count: int, length: int) -> list[list[int]]:
    """Returns the first `count` stretches of `length` tokens of a text."""
    if tokenizer is None:
        raise QuireError("usage", "This model has no tokenizer.", "Give one that has.")
    tokens = tokenizer.encode(text[: CHARACTERS_PER_TOKEN * count * length])
    if len(tokens) < count * length:
        what = f"The text has {len(tokens)} tokens, fewer than the {count * length} needed."
        raise QuireError("usage", what, "Give a longer text, or take fewer or shorter stretches.")
    return [tokens[start : start + length] for start in range(0, count * length, length)]
