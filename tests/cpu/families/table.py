"""Writes docs/models.md from the registry and from what the harness proves: `python -m tests.cpu.families.table`.

`test_table` fails when the file is not what this would write, or when a model type in the registry is proved by no one.
"""

from __future__ import annotations

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
    "prefix reuse": ("warm prefix",),
    "preemption": ("swap", "recompute", "depth 2, swap", "depth 2, recompute"),
    "overlap": ("depth 2",),
    "memory plan": ("memory",),
    "float16 weights": ("float16",),
    "FP8 weights": ("fp8",),
}
TOLD_APART = {  # architecture of a GGUF -> model types that its metadata tells from the registry's
    "deepseek2": ("deepseek_v3", "glm4_moe_lite", "kimi_k2"),
    "llama": ("mixtral",),
}
QUANTIZED = "q8_0, q4_0"  # of every family in the registry: the check is not one that a family can leave out
HEAD = """\
# Models

What runs, by the `model_type` of a config.json. Made by `python -m tests.cpu.families.table` from the registry
(`quire/models/registry.py`) and the families in `tests/cpu/families`; a test fails when it is out of date.

Each family is proved against `transformers` on a tiny random checkpoint in float32: one of each
kind in full in the default test run, of the others the checks that see most, the rest with `make slow`:
logits of every position to 1e-4 relative; 48 greedy tokens of a ragged batch, identical with prompts in chunks of
7, over a warm prefix cache, pushed out by swap and by recompute, at depth 1 and at depth 2 on a device that finishes
late; and `quire doctor`'s memory plan against what is allocated. A tick means that the check named passes.

Quantization: float16 weights on a CPU (`--dtype float16`); blocks of 8 or 4 bits there (`--quant q8_0`, `--quant q4_0`:
linear layers and experts, embedding and head always in 8 bits); FP8 weights of any size on CUDA (`--quant fp8`; linear
layers and experts, not embeddings and convolutions), FP8 keys and values there (`--kv-dtype fp8`). Shown: logits to
1e-4 of those that the float16 weights stand for; every product of blocks to 1e-4 of plain torch over the same blocks,
and all of them together as near as rounding activations lets any kernel come; logits to 1e-4 through the FP8 scheme
with kernels in CUDA's place that keep all bits. LoRA comes later.

Refused by name: Gemmas whose attention looks ahead (`use_bidirectional_attention`, unless said of images alone), and
checkpoints quantized in other ways than those below.

Otherwise than in transformers: rope of type longrope (Phi-3, Phi-4 mini, MiniCPM 3) has one set of factors for all
sequences, or what is cached would be of no use to longer ones: the long one, unless `--max-model-len` keeps within the
positions the model was first trained with. Nemotron-H's time steps are bounded by `time_step_limit`, as in NVIDIA's
own code, and not by `time_step_min`.
"""
PUBLISHED = """
## Checkpoints that are quantized already

GGUF files, and what a config.json calls by these names of `quant_method`, for every family and through transformers.
On a GPU, and where a type is asked for (`--dtype`), numbers are decoded while they are read, and `--quant fp8` may
follow; on a CPU that is left to choose they stay in blocks of as few bits: the very same numbers, where a type of block
has such (Q4_0; Q8_0 for eight bits; Q4_1, whose offset is a float16), else rounded to Q8_0. Activations are not rounded
as a file would have it. Each form is proved against what its numbers stand for, those of compressed-tensors also
against its own library; what a tool leaves in a file of its own (`hf_quant_config.json`, `quantize_config.json`) counts
where config.json says nothing.

"""
OWN = "\n## Families with a file of their own\n\n"
OTHER = """
## Through transformers

A model type not in this list, if an installed `transformers` (5.17 or later) knows it as a causal model, runs with its
attention swapped for the paged one: slower, with everything else as above, without quantization. Layers that keep a
state (convolutions, Mamba, delta nets) keep it in the same slots, with the same snapshots, as families of our own; rows
with as many tokens as each other are a batch to them. So do models that return a state in a form of their own and take
it again, or leave it in their modules (RWKV, xLSTM, RecurrentGemma). Where attention can't be swapped (ALiBi, chunks,
classes of their own, more than once in a layer) the model's own attends to keys gathered from pages, row by row, slower
still. On a GPU decode steps of the others are captured, if their code allows it (experts in float32 are often taken one
by one, and then it does not) and states are in no form of their own. `quire` says so at start, and compares the model
with itself once it is loaded; what would be wrong is refused. Refused by name are models with caches of their own that
grow (DeepSeek V4), and rope that changes with the length of what it is given (longrope). Checkpoints may have the names
they were published with, experts or convolutions one by one, and matrices in turn or below each other. Of a model with
images or sound the language model runs alone, if `transformers` knows its type (Llama 4, MiniMax M3, Aria). Shown on:

"""
MORE = """
All other causal types of transformers are made small and run in the slow suite (`families/test_more_types.py`): they
give its logits, and its tokens with prompts in chunks and over a warm prefix, or are refused in one line. Of those
above and others these were right: {}.
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
    count = f"\n{len(own)} model types with a file of their own, {len(others)} shown through transformers.\n"
    parts = [HEAD, count, PUBLISHED, _published(), OWN, _table(head, rows), OTHER, _table(head, fallback_rows)]
    return "".join(parts) + MORE.format(", ".join(RIGHT))


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
