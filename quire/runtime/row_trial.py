"""Trial of the ops of captured steps outside the model (`RowOps`), on a few rows of the engine's own shape, before any
CUDA graph is captured with them. The oracle is the eager path. `assemble` calls it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from quire.kernels.table import RowOps
from quire.kernels.upload import Arrays
from quire.kernels.validation.failures import reason, report_unusable
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import EXACT, compare, finish_writes, normal
from quire.layers.step import PagedInputs
from quire.runtime.graphs import PADDING, choose_tokens
from quire.runtime.rows import Decode, DeviceRows
from quire.sampling.noise import stream_key
from quire.sampling.trial import SCALES, compare_choice
from quire.types import CacheSpec, PageWrite, Plan, PlanRow, RowInit, SamplingParams, pack_tokens

ROWS = (1, 0)  # odd in number with the padding row, so that the flags behind the tokens are not 16-byte aligned


def settle_row_ops(
    ops: RowOps,
    specs: list[CacheSpec],
    max_len: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    strict: bool,
    findings: Findings | None = None,
) -> RowOps | None:
    """Returns the kernels if their trial succeeds; otherwise warns and returns None, or raises if `strict`."""
    trial = partial(_try_row_ops, ops, specs, max_len, vocab_size, dtype, device)
    error = (findings or Findings()).error_of(trial)
    if error is None:
        return ops
    hint = "Leave strict_kernels out, or see `quire doctor`."
    report_unusable(
        "rows", reason(error), refuse=strict, instead="steps run without CUDA graphs, more slowly", hint=hint
    )
    return None


def _try_row_ops(
    ops: RowOps, specs: list[CacheSpec], max_len: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Compares a decode step with one padding row with the eager path; raises if they disagree."""
    rows = _some_rows(specs, max_len, vocab_size, device)
    order = torch.tensor(ROWS, device=device)
    before = rows.computed.clone()
    expected = rows.gather(Plan(0, [PlanRow("", row, 0, 1, 0, True) for row in ROWS]))
    moved = rows.computed.clone()
    rows.computed.copy_(before)
    padded = torch.tensor([*ROWS, PADDING], device=device)
    logits = normal(device, dtype, len(padded), vocab_size)
    finish_writes(device)
    decode = rows.gather_decode(padded, ops)
    _compare_step(decode, expected.step.tokens, expected.step.positions, expected.step.seq_lens)
    compare(rows.computed, moved, torch.float32, EXACT)
    compare(decode.keys[:-1], rows.keys[order], torch.float32, EXACT)
    compare(decode.scales[:-1], rows.scales[order], torch.float32, EXACT)
    for group, inputs in expected.step.groups.items():
        gathered = decode.step.groups[group]
        if isinstance(inputs, PagedInputs) and isinstance(gathered, PagedInputs):
            compare(gathered.slots[:-1], inputs.slots, torch.float32, EXACT)
            compare(gathered.slots[-1:], torch.full_like(padded[-1:], -1), torch.float32, EXACT)

    tokens = rows.tokens.clone()
    append_to = (padded, rows.tokens, rows.computed)
    chosen = choose_tokens(ops, logits, decode.keys, decode.lengths, decode.scales, append_to)
    size = len(padded)
    ids, bad = chosen[: 8 * size].view(torch.int64)[:-1], chosen[8 * size :].view(torch.bool)[:-1]
    compare_choice(ids, bad, logits[:-1], decode.keys[:-1], decode.lengths[:-1], decode.scales[:-1])
    tokens[order, moved[order]] = ids.to(torch.int32)
    compare(rows.tokens, tokens, torch.float32, EXACT)


def _some_rows(specs: list[CacheSpec], max_len: int, vocab_size: int, device: torch.device) -> DeviceRows:
    """Returns rows as wide as the engine's own, because kernels are compiled for that width."""
    rows = DeviceRows(len(ROWS), max_len, specs, device)
    page_tokens = specs[0].page_tokens
    added, writes = [], []
    for row, length in enumerate((min(page_tokens + 3, max_len), 1)):  # one row in its second page, one in its first
        tokens = pack_tokens((7 * i + 3) % vocab_size for i in range(length))
        added.append(RowInit("", row, tokens, length, length - 1, SamplingParams(), (), 0, 0))
        for group, spec in enumerate(specs):
            count = 1 if spec.kind == "state" else -(-length // page_tokens)
            writes.append(PageWrite(group, row, 0, [5 + row + 4 * page for page in range(count)]))
    keys = np.array([stream_key(row, 0) for row in ROWS], np.int64)
    draws: Arrays = {"keys": keys, "scales": np.array(SCALES[: len(ROWS)], np.float32)}
    rows.apply(Plan(0, added=added, page_writes=writes), draws)
    return rows


def _compare_step(decode: Decode, tokens: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor) -> None:
    step = decode.step
    for got, expected in ((step.tokens, tokens), (step.positions, positions), (step.seq_lens, seq_lens)):
        compare(got[:-1], expected, torch.float32, EXACT)
    compare(decode.lengths[:-1], seq_lens, torch.float32, EXACT)
    compare(step.positions[-1:], torch.full_like(positions[-1:], -1), torch.float32, EXACT)
