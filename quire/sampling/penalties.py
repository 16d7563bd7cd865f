"""Repetition, presence and frequency penalties over a row's history. Called by the sampler, on its copy of the logits.

Only the rows that ask are read, and only the cells of tokens in their history are touched: nothing of size
[rows, vocab] is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.sampling.batch import Penalties


def apply_penalties(
    logits: Tensor, ask: Penalties, history: Tensor, lengths: Tensor, rows: Tensor, max_len: int
) -> None:
    """`max_len` is the host's upper bound for the lengths of the rows that ask."""
    lengths = lengths[ask.samples][:, None]  # [rows, 1]
    tokens = history[:, :max_len].index_select(0, rows[ask.samples]).to(torch.int64)  # [rows, max_len]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    filled = places < lengths
    cells = tokens + ask.samples[:, None] * logits.shape[1]
    if ask.any_repetition:
        _repetition(logits, cells, filled, ask)
    if ask.any_output:
        _presence_and_frequency(logits, cells, filled & (places >= ask.prompt_len[:, None]), lengths, ask)


def _repetition(logits: Tensor, cells: Tensor, filled: Tensor, ask: Penalties) -> None:
    """Every token of prompt and output: positive logits are divided, negative ones multiplied."""
    # Places past the end stand for place 0 again. A cell named twice is written twice with the same value.
    cells = torch.where(filled, cells, cells[:, :1]).view(-1)
    values = logits.view(-1).gather(0, cells).view(filled.shape)
    factor = ask.repetition[:, None]
    values = torch.where(values > 0, values / factor, values * factor)
    logits.view(-1).scatter_(0, cells, values.view(-1))


def _presence_and_frequency(logits: Tensor, cells: Tensor, is_output: Tensor, lengths: Tensor, ask: Penalties) -> None:
    """Every token of the output: once if it is there at all (presence), and once for each time (frequency)."""
    # Places outside the output stand for the last token, which is output if there is any; if not, they add nothing.
    last = cells.gather(1, lengths.to(torch.int64) - 1)
    any_output = lengths > ask.prompt_len[:, None]
    cells = torch.where(is_output, cells, last).view(-1)
    values = logits.view(-1).gather(0, cells).view(is_output.shape)
    values = values - ask.presence[:, None] * any_output
    logits.view(-1).scatter_(0, cells, values.view(-1))
    logits.view(-1).scatter_add_(0, cells, (ask.frequency[:, None] * is_output).neg_().view(-1))
