"""Writes docs/models.md from the registry and from what the harness proves: `python -m tests.cpu.families.table`.

`test_table` fails when the file is not what this would write, or when a model type in the registry is proved by no one.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from quire.files.source import QUANTIZED_ELSEWHERE
from quire.models.packed.config import METHODS
from quire.models.registry import FAMILIES, GGUF_ARCHITECTURES
from tests.cpu.families.harness import Family, all_families, model_type
from tests.cpu.families.more_types import RIGHT
from tests.cpu.packers import FORMATS

PATH = Path(__file__).parents[3] / "docs" / "models.md"
COLUMNS = {  # what a reader asks for -> the checks that prove it
    "logits": ("logits",),
    "chunked prompts": ("chunks",),
    "prefix reuse": ("warm prefix", "host memory"),
    "preemption": ("swap", "recompute", "depth 2, swap", "depth 2, recompute"),
    "overlap": ("depth 2",),
    "speculation": ("speculation", "proposers"),
    "memory plan": ("memory",),
    "float16 weights": ("float16",),
    "FP8 weights": ("fp8",),
}
TOLD_APART = {  # architecture of a GGUF file -> further model types, which its metadata distinguishes
    "deepseek2": ("deepseek_v3", "glm4_moe_lite", "kimi_k2"),
    "llama": ("mixtral",),
}
QUANTIZED = "q8_0, q4_0"  # of every family in the registry: the check is not one that a family can leave out
HEAD = """\
# Models

Supported models, by the `model_type` of a config.json. `python -m tests.cpu.families.table` writes this page from the
registry (`quire/models/registry.py`) and the families in `tests/cpu/families`; a test fails when it is out of date.

## How they are tested

Each family is compared with `transformers` on a tiny random checkpoint in float32. The default test run has one model
of each kind in full and the most sensitive checks of the others; `make slow` runs the rest. A tick means that the check
of that column passes.

- Logits of every position agree to 1e-4 relative.
- 48 greedy tokens of a ragged batch are identical with prompts in chunks of 7, over a warm prefix cache, over
  prefixes that were evicted to host memory, and after preemption by swap and by recompute, at depth 1 and at depth 2
  on a device that finishes late.
- `quire doctor`'s memory plan agrees with what is allocated.

## Quantization

| option | where | what it applies to |
| --- | --- | --- |
| `--dtype float16` | CPU | all weights |
| `--quant q8_0`, `q4_0`, `int8` | CPU | linear layers and experts; embedding and head always in 8 bits |
| `--quant fp8` | CUDA | linear layers and experts, not embeddings and convolutions |
| `--quant keep` | CUDA | linear layers of 4-bit checkpoints, not experts |
| `--kv-dtype fp8` | CUDA | keys and values |
| `--kv-dtype int8`, `k8v4`, `q4` | CPU, CUDA | keys and values, not of latent attention ([cache.md](cache.md)) |

Tests show logits to 1e-4 of those of the rounded float16 weights, every product of blocks to 1e-4 of plain torch over
the same blocks, and all products together as close as the rounding of activations allows. FP8 is tested to 1e-4 with
exact kernels in place of CUDA's. LoRA has [a page of its own](adapters.md).

## Refused, and different from transformers

- Gemma models with bidirectional attention (`use_bidirectional_attention`, unless it is "vision") are refused, and so
  are checkpoints quantized with other methods than those below.
- Rope of type longrope (Phi-3, Phi-4 mini, MiniCPM 3) has one set of factors for all sequences, since cached keys would
  be useless to longer ones otherwise: the long factors, unless `--max-model-len` is within the first training length.
- Nemotron-H's time steps are bounded by `time_step_limit`, as in NVIDIA's code, and not by `time_step_min`.
"""
PUBLISHED = """
## Quantized checkpoints

GGUF files, and checkpoints with these values of `quant_method` in config.json, run with every family and through
transformers. The forms are tested against the values that they encode, those of compressed-tensors also against its
own library. Files such as `hf_quant_config.json` and `quantize_config.json` count where config.json has no method.

- On a GPU, or with `--dtype`, weights are decoded while loading, and `--quant fp8` may be added.
- On a CPU without `--dtype` they stay in blocks of few bits: with exactly the same values if a block type has them
  (Q4_0; Q8_0 for eight bits; Q4_1, whose offset is a float16), and rounded to Q8_0 otherwise.
- Activations are not quantized by a file's scales.

"""
OWN = "\n## Families\n\n"
OTHER = """
## Through transformers

A model type outside this list runs with its code in an installed `transformers` (5.17 or later), if that has it as a
causal model: with paged attention in place of its own, slower than a family and without quantization. Everything else
works as above. A note at start says so. Once loaded, the model is compared with itself, and refused if results differ.

- **States** (convolutions, Mamba, delta nets) are kept in the same slots as those of families, with snapshots. Rows
  with equally many tokens are a batch. Models that return their state or keep it in their modules work, too (RWKV,
  xLSTM, RecurrentGemma).
- **Attention that can't be replaced** (ALiBi, chunks, classes of their own, several times in a layer) runs over keys
  gathered from pages, one row at a time, which is slower still.
- **Decode steps** of the others are captured on a GPU if their code allows it and no state has a form of its own. Loops
  over experts, frequent in float32, do not allow it.
- **Refused** are models with growing caches of their own (DeepSeek V4), and rope that depends on the sequence length
  (longrope).
- **Checkpoints** may use the names they were published with, and may hold experts or convolutions one by one, and
  matrices interleaved or concatenated.
- **Multimodal models** run as their language model alone, if `transformers` knows its type (Llama 4, MiniMax M3, Aria).

Tested:

"""
MORE = """
All other causal types of transformers run in the slow suite with small configs
(`tests/cpu/families/test_more_types.py`). They give the logits of transformers, and the same tokens with prompts in
chunks and over a warm prefix, or are refused in one line. Of those above and others these were right: {}.
"""


def render() -> str:
    proved: dict[str, list[Family]] = {}
    for family in all_families():
        proved.setdefault(model_type(family), []).append(family)
    own = sorted(kind for kind in proved if kind in FAMILIES)
    others = sorted(kind for kind in proved if kind not in FAMILIES)
    gguf = {
        kind: sorted(a for a, t in GGUF_ARCHITECTURES.items() if kind in (t, *TOLD_APART.get(a, ()))) for kind in own
    }
    head = ["model_type", "proved as", *COLUMNS, "8, 4 bits (CPU)", "LoRA", "GGUF"]
    rows = [
        [kind, _names(proved[kind]), *_ticks(proved[kind]), QUANTIZED, "no", ", ".join(gguf[kind]) or "no"]
        for kind in own
    ]
    fallback_rows = [[kind, _names(proved[kind]), *_ticks(proved[kind]), "no", "no", "no"] for kind in others]
    count = f"\n{len(own)} model types with a family of their own, {len(others)} tested through transformers.\n"
    parts = [HEAD, count, PUBLISHED, _published(), OWN, _table(head, rows), OTHER, _table(head, fallback_rows)]
    more = textwrap.fill(MORE.format(", ".join(RIGHT)).strip(), 118, break_on_hyphens=False)
    return "".join(parts) + f"\n{more}\n"


def _published() -> str:
    forms: dict[str, list[str]] = {"mxfp4": ["gpt-oss's experts (Q8_0)"]}
    for form in FORMATS:
        method = form.config.get("quant_method") or QUANTIZED_ELSEWHERE[next(iter(form.files))]
        forms.setdefault(method, []).append(f"{form.name} ({form.kept})")
    rows = [
        [method, called, ", ".join(forms.get(method, [])) or "as auto-round"] for method, (called, _) in METHODS.items()
    ]
    return _table(["quant_method", "written by", "proved as (on a CPU kept in)"], rows)


def _ticks(families: list[Family]) -> list[str]:
    """A check that some variant of a type leaves out is not ticked."""
    left_out = {check for family in families for check in family.without}
    return ["no" if left_out & set(checks) else "✓" for checks in COLUMNS.values()]


def _names(families: list[Family]) -> str:
    return ", ".join(family.name for family in families)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    PATH.write_text(render())
    print(f"wrote {PATH}")
