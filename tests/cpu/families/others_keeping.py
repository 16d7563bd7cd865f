"""Model types without a family of their own whose layers keep a state, in a cache or in a form of their own, or whose
own attention runs over gathered keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from transformers import FalconConfig

from tests.cpu.families.harness import TINY, Family
from tests.cpu.families.more_types import CAUSAL, small_config
from tests.cpu.families.others import draw_ln

KINDS = {
    "jamba": "Mamba, which can't take up several tokens behind others, attention and experts",
    "bailing_hybrid": "delta nets and latent attention; checkpoints hold a convolution in three parts",
    "zamba2": "Mamba2, and attention that layers share",
    "bloom": "ALiBi",
    "gptj": "rope of neighbours, in attention classes of its own",
    "llama4_text": "attention to chunks",
    "deepseek_v32": "attention to what another key has chosen",
    "diffllama": "two sums of values in a layer",
    "hrm_text": "layers that are run several times, with other keys each time; checkpoints hold four matrices as one",
    "recurrent_gemma": "states that are left in modules, and attention to a window",
    "rwkv": "states that are returned, and begin with something other than zeros; one row at a time",
}
BY_DEFAULT = ("bailing_hybrid", "jamba", "bloom", "deepseek_v32")


def with_alibi() -> Any:
    sizes = {key: size for key, size in TINY.items() if key != "num_key_value_heads"}
    return FalconConfig(**sizes, alibi=True, multi_query=False, new_decoder_architecture=False, bias=True)


FAMILIES = [
    replace(family, without=frozenset({"float16", "fp8"}))
    for family in (
        *(
            Family(kind, partial(small_config, kind), draw_ln, slow=kind not in BY_DEFAULT)
            for kind in KINDS
            if kind in CAUSAL  # of the installed transformers
        ),
        Family("falcon alibi", with_alibi, draw_ln, slow=True),
    )
]
