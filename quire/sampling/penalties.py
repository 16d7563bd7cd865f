"""Repetition, presence and frequency penalties over a row's history, applied to the sampler's copy of the logits.

Only rows with penalties are read, and only the cells of tokens in their history are written: no [rows, vocab] tensor is
allocated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.sampling.batch import Penalties


def apply_penalties(
    logits: Tensor, params: Penalties, history: Tensor, lengths: Tensor, rows: Tensor, max_len: int
) -> None:
    """Applies the penalties in place. `max_len` is the host's upper bound of the penalised rows' lengths."""
    lengths = lengths[params.samples][:, None]  # [rows, 1]
    tokens = history[:, :max_len].index_select(0, rows[params.samples]).to(torch.int64)  # [rows, max_len]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    filled = places < lengths
    cells = tokens + params.samples[:, None] * logits.shape[1]
    if params.any_repetition:
        _repetition(logits, cells, filled, params)
    if params.any_output:
        _presence_and_frequency(logits, cells, filled & (places >= params.prompt_len[:, None]), lengths, params)


def _repetition(logits: Tensor, cells: Tensor, filled: Tensor, params: Penalties) -> None:
    """Penalises every token of prompt and output: positive logits are divided, negative ones multiplied."""
    # Positions past the end repeat position 0. A repeated cell is written repeatedly with the same value.
    cells = torch.where(filled, cells, cells[:, :1]).view(-1)
    values = logits.view(-1).gather(0, cells).view(filled.shape)
    factor = params.repetition[:, None]
    values = torch.where(values > 0, values / factor, values * factor)
    logits.view(-1).scatter_(0, cells, values.view(-1))


def _presence_and_frequency(
    logits: Tensor, cells: Tensor, is_output: Tensor, lengths: Tensor, params: Penalties
) -> None:
    """Penalises every token of the output, once if it occurs (presence) and once per occurrence (frequency)."""
    # Positions outside the output repeat the last token, which is output if there is any; otherwise they add nothing.
    last = cells.gather(1, lengths.to(torch.int64) - 1)
    any_output = lengths > params.prompt_len[:, None]
    cells = torch.where(is_output, cells, last).view(-1)
    values = logits.view(-1).gather(0, cells).view(is_output.shape)
    values = values - params.presence[:, None] * any_output
    logits.view(-1).scatter_(0, cells, values.view(-1))
    logits.view(-1).scatter_add_(0, cells, (params.frequency[:, None] * is_output).neg_().view(-1))
