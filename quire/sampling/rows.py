"""Sampling parameters of all rows, on the host.

The runtime calls `set` and `clear` when a request gets and frees a row, and `gather` once per step, which uploads the
parameters of the sampled rows in one copy and leaves out what no row uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.upload import Arrays, upload
from quire.sampling.batch import (
    EVERYTHING,
    GREEDY,
    UNFILTERED,
    BadWords,
    Batch,
    Bias,
    Cohort,
    Draws,
    Dry,
    EditedSamples,
    LogprobsRequest,
    MinTokens,
    Penalties,
)
from quire.sampling.noise import stream_key
from quire.types import RowInit, SamplingParams

MIN_TEMPERATURE = 1e-5  # below it rows are greedy, because float32 leaves only the argmax to draw
_NARROWEST = 64  # number of candidates for a small top_k
_COLUMNS = {
    "key": np.int64,
    "width": np.int64,
    "inv_temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float32,
    "top_n_sigma": np.float32,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "prompt_len": np.int64,
    "until": np.int64,
    "dry_multiplier": np.float32,
    "dry_base": np.float32,
    "dry_allowed_len": np.int64,
    "dry_search_len": np.int64,
    "num_top": np.int64,
}
_COHORT_COLUMNS = ("key", "inv_temperature", "top_k", "top_p", "min_p", "top_n_sigma")
_NO_LOGPROBS = -1
_NO_LIMIT = 1 << 62


@dataclass(slots=True)
class _RaggedParams:
    """The variable-length parameters of one row."""

    bias_ids: np.ndarray
    bias_values: np.ndarray
    stop_ids: np.ndarray  # empty without min_tokens
    bad_words: list[tuple[int, ...]]
    breaker_ids: np.ndarray  # empty without DRY


class SamplingRows:
    """The sampling parameters of all rows, which a step gathers from."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str):
        """Allocates `max_rows` rows and one permanently empty row, whose parameters padding is sampled with."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._columns: Arrays = {
            name: np.full(max_rows + 1, _EMPTY_ROW[name], dtype) for name, dtype in _COLUMNS.items()
        }
        self._lists: dict[int, _RaggedParams] = {}
        self._special: set[int] = set()  # rows with more than greedy or temperature sampling
        self._cached: tuple[list[int], Batch] | None = None  # last result; consecutive decode steps have the same rows

    def set(self, init: RowInit) -> None:
        """Stores the parameters of a request that gets a row. Token ids outside the vocabulary are dropped, since they
        can't be sampled."""
        params = init.params.resolve()
        values = _fixed_values(params, self.vocab_size)
        values |= {"key": stream_key(init.seed, init.sample_index), "prompt_len": init.prompt_len}
        values["until"] = init.prompt_len + params.min_tokens
        for name, value in values.items():
            self._columns[name][init.row] = value
        self._lists.pop(init.row, None)
        lists = self._ragged_values(params, init.stop_ids)
        if any(len(x) for x in (lists.bias_ids, lists.stop_ids, lists.bad_words, lists.breaker_ids)):
            self._lists[init.row] = lists
        if init.row in self._lists or not _is_plain(values):
            self._special.add(init.row)
        else:
            self._special.discard(init.row)
        self._cached = None

    def clear(self, row: int) -> None:
        for name, column in self._columns.items():
            column[row] = _EMPTY_ROW[name]
        self._lists.pop(row, None)
        self._special.discard(row)
        self._cached = None

    def is_plain(self, rows: list[int]) -> bool:
        """Whether these rows use only greedy or temperature sampling and no logprobs."""
        return not self._special or self._special.isdisjoint(rows)

    def draws(self, rows: list[int]) -> Arrays:
        """Returns the noise keys and inverse temperatures (0: greedy) of these rows, in their order."""
        scales = np.where(self._columns["width"] == GREEDY, np.float32(0), self._columns["inv_temperature"])
        return {"keys": self._columns["key"][rows], "scales": scales[rows]}

    def gather(self, rows: list[int]) -> Batch:
        """Returns the parameters of these rows, in their order; a row may occur more than once."""
        if self._cached is None or self._cached[0] != rows:
            index = np.asarray(rows, np.int64)
            columns = {name: column[index] for name, column in self._columns.items()}
            self._cached = (list(rows), _BatchBuilder(rows, columns, self._lists, self.vocab_size).batch(self.device))
        return self._cached[1]

    def _ragged_values(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> _RaggedParams:
        bias = [(i, v) for i, v in params.logit_bias if 0 <= i < self.vocab_size]
        words = [w for w in params.bad_token_ids if w and all(0 <= i < self.vocab_size for i in w)]
        return _RaggedParams(
            bias_ids=np.array([i for i, _ in bias], np.int64),
            bias_values=np.array([v for _, v in bias], np.float32),
            stop_ids=self._known_ids(stop_ids if params.min_tokens else ()),
            bad_words=words,
            breaker_ids=self._known_ids(params.dry_breaker_ids if params.dry_multiplier else ()),
        )

    def _known_ids(self, ids: tuple[int, ...]) -> np.ndarray:
        return np.array([i for i in ids if 0 <= i < self.vocab_size], np.int64)


def _fixed_values(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    temperature = params.temperature or 0.0
    top_k = min(params.top_k or 0, vocab_size)
    greedy = temperature < MIN_TEMPERATURE or top_k == 1 or params.top_p == 0
    return {
        "width": GREEDY if greedy else _width(params, top_k, vocab_size),
        "inv_temperature": 1.0 if greedy else 1.0 / temperature,
        "top_k": top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": params.top_n_sigma,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_len": params.dry_allowed_len,
        "dry_search_len": params.dry_range or _NO_LIMIT,
        "num_top": _NO_LOGPROBS if params.logprobs is None else params.logprobs,
    }


# Values of an empty row, which padding is sampled with: greedy only, so that padding needs no kernel that no request
# uses.
_EMPTY_ROW = {"key": 0, "prompt_len": 0, "until": 0} | _fixed_values(SamplingParams(temperature=0.0).resolve(), 1)


def _is_plain(values: dict[str, Any]) -> bool:
    if values["num_top"] != _NO_LOGPROBS or values["dry_multiplier"] > 0:
        return False
    if values["repetition"] != 1 or values["presence"] != 0 or values["frequency"] != 0:
        return False
    return values["width"] in (GREEDY, UNFILTERED)


def _width(params: SamplingParams, top_k: int, vocab_size: int) -> int:
    """Returns the cohort width: one of a few numbers of candidates, above top_k so that ties are kept."""
    if top_k == 0 or top_k == vocab_size:
        return EVERYTHING if params.top_p != 1 or params.min_p or params.top_n_sigma else UNFILTERED
    width = _NARROWEST
    while width <= top_k:
        width *= 4
    return min(width, vocab_size)


@dataclass(slots=True)
class _BatchBuilder:
    """Builds one `Batch`: each method collects the arrays of one part, `batch` uploads all of them in one copy."""

    rows: list[int]
    columns: Arrays  # parameter -> [samples]
    lists: dict[int, _RaggedParams]
    vocab_size: int
    parts: dict[str, Arrays] = field(default_factory=dict)

    def batch(self, device: torch.device) -> Batch:
        widths = sorted(set(self.columns["width"].tolist()))
        for width in widths:
            self._add_cohort(width)
        listed = [(sample, self.lists[row]) for sample, row in enumerate(self.rows) if row in self.lists]
        if listed:
            self._add_bias(listed)
            self._add_min_tokens(listed)
            self._add_bad_words(listed)
        self._add_penalties()
        self._add_dry()
        scored = np.flatnonzero(self.columns["num_top"] != _NO_LOGPROBS)
        if 0 < len(scored) < len(self.rows):
            self.parts["logprobs"] = {"samples": scored}

        any_filter = self._add_draws()
        self._add_edited()

        sent = upload(self.parts, device)
        batch = Batch(len(self.rows), [self._cohort(width, sent[f"cohort {width}"]) for width in widths])
        if "bias" in sent:
            batch.bias = Bias(**sent["bias"])
        if "min_tokens" in sent:
            batch.min_tokens = MinTokens(**sent["min_tokens"])
        if "bad_words" in sent:
            batch.bad_words = BadWords(**sent["bad_words"])
        if "penalties" in sent:
            batch.penalties = self._penalties(sent["penalties"])
        if "dry" in sent:
            batch.dry = Dry(**sent["dry"], host_samples=self.parts["dry"]["samples"].tolist())
        if "draws" in sent:
            batch.draws = Draws(**sent["draws"], any_filter=any_filter)
        if "edited" in sent:
            batch.edited = EditedSamples(**sent["edited"])
        if len(scored):
            samples = sent["logprobs"]["samples"] if "logprobs" in sent else None
            batch.logprobs = LogprobsRequest(samples, scored.tolist(), self.columns["num_top"][scored].tolist())
        return batch

    def _add_cohort(self, width: int) -> None:
        samples = np.flatnonzero(self.columns["width"] == width)
        self.parts[f"cohort {width}"] = self._pick(samples, _COHORT_COLUMNS) | {"samples": samples}

    def _cohort(self, width: int, sent: dict[str, Tensor]) -> Cohort:
        host = self.parts[f"cohort {width}"]
        samples = sent.pop("samples")
        return Cohort(
            **sent,
            width=width,
            samples=samples if len(samples) < len(self.rows) else None,
            any_top_p=bool((host["top_p"] < 1).any()),
            any_min_p=bool((host["min_p"] > 0).any()),
            any_sigma=bool((host["top_n_sigma"] > 0).any()),
        )

    def _add_draws(self) -> bool:
        """Collects the arrays of `Draws`; returns whether any sample has filters."""
        columns = self.columns
        if not len(self.rows):
            return False
        greedy = columns["width"] == GREEDY
        scale = np.where(greedy, np.float32(0), columns["inv_temperature"])
        top_k = np.where(columns["width"] < 0, 0, columns["top_k"])  # top_k is undefined without candidates
        self.parts["draws"] = {"key": columns["key"], "inv_temperature": scale, "top_k": top_k}
        self.parts["draws"] |= {name: columns[name] for name in ("top_p", "min_p", "top_n_sigma")}
        filtered = (top_k > 0) | (columns["top_p"] < 1) | (columns["min_p"] > 0) | (columns["top_n_sigma"] > 0)
        return bool((filtered & ~greedy).any())

    def _add_edited(self) -> None:
        owners = [self.parts[name]["owners"] for name in ("min_tokens", "bad_words") if name in self.parts]
        owners += [self.parts[name]["samples"] for name in ("penalties", "dry") if name in self.parts]
        if "bias" in self.parts:
            owners.append(self.parts["bias"]["cells"] // self.vocab_size)
        if owners:
            samples = np.unique(np.concatenate(owners))
            places = np.full(len(self.rows), -1, np.int32)
            places[samples] = np.arange(len(samples), dtype=np.int32)
            self.parts["edited"] = {"samples": samples, "places": places}

    def _add_bias(self, listed: list[tuple[int, _RaggedParams]]) -> None:
        cells = np.concatenate([sample * self.vocab_size + lists.bias_ids for sample, lists in listed])
        if len(cells):
            values = np.concatenate([lists.bias_values for _, lists in listed])
            self.parts["bias"] = {"cells": cells, "values": values}

    def _add_min_tokens(self, listed: list[tuple[int, _RaggedParams]]) -> None:
        cells = np.concatenate([sample * self.vocab_size + lists.stop_ids for sample, lists in listed])
        if len(cells):
            owners = cells // self.vocab_size
            self.parts["min_tokens"] = {"cells": cells, "owners": owners, "until": self.columns["until"][owners]}

    def _add_bad_words(self, listed: list[tuple[int, _RaggedParams]]) -> None:
        words = [(sample, word) for sample, lists in listed for word in lists.bad_words]
        if not words:
            return
        prefixes = np.full((len(words), max(len(word) for _, word in words) - 1), -1, np.int64)
        for place, (_, word) in enumerate(words):
            if len(word) > 1:
                prefixes[place, 1 - len(word) :] = word[:-1]
        cells = np.array([sample * self.vocab_size + word[-1] for sample, word in words], np.int64)
        self.parts["bad_words"] = {"cells": cells, "owners": cells // self.vocab_size, "prefixes": prefixes}

    def _add_penalties(self) -> None:
        columns = self.columns
        uses = (columns["repetition"] != 1) | (columns["presence"] != 0) | (columns["frequency"] != 0)
        samples = np.flatnonzero(uses)
        if len(samples):
            names = ("repetition", "presence", "frequency", "prompt_len")
            self.parts["penalties"] = self._pick(samples, names) | {"samples": samples}

    def _penalties(self, sent: dict[str, Tensor]) -> Penalties:
        host = self.parts["penalties"]
        return Penalties(
            **sent,
            host_samples=host["samples"].tolist(),
            any_repetition=bool((host["repetition"] != 1).any()),
            any_output=bool((host["presence"] != 0).any() or (host["frequency"] != 0).any()),
        )

    def _add_dry(self) -> None:
        samples = np.flatnonzero(self.columns["dry_multiplier"] > 0)
        if not len(samples):
            return
        names = ("dry_multiplier", "dry_base", "dry_allowed_len", "dry_search_len")
        part = {name.removeprefix("dry_"): array for name, array in self._pick(samples, names).items()}
        breakers = [
            place * self.vocab_size + self.lists[self.rows[sample]].breaker_ids
            for place, sample in enumerate(samples.tolist())
            if self.rows[sample] in self.lists
        ]
        part["breaker_cells"] = np.concatenate([np.zeros(0, np.int64), *breakers])
        self.parts["dry"] = part | {"samples": samples}

    def _pick(self, samples: np.ndarray, names: tuple[str, ...]) -> Arrays:
        return {name: self.columns[name][samples] for name in names}
