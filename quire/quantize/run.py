"""One run of `quire quantize`: checks the options, calibrates, writes the result, and measures what it lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quire.bench.quality import cut_stretches
from quire.files.progress import Progress, QuietProgress
from quire.files.source import ModelFiles, resolve_model
from quire.files.weights_digest import weights_digest
from quire.kernels.formats.gguf_blocks import dequantize
from quire.kernels.formats.gguf_encode import quantize
from quire.models.gguf.tensor_names import hf_name, style_of
from quire.quantize import awq, gptq, texts
from quire.quantize.calibration import LENGTH, MIN_TOKENS, STRETCHES, FloatModel, Inputs, collect, read_imatrix
from quire.quantize.compressed_output import write_folder
from quire.quantize.gguf_output import list_tensors, need_gguf, write_gguf
from quire.quantize.parts import Parts
from quire.quantize.recipe import QuantTarget, Recipe, choose_types, read_keep, type_bits
from quire.quantize.report import Result, Scores, by_layer, load_float, load_served
from quire.quantize.source import SourceModel, TensorFacts
from quire.text.loading import load_tokenizer
from quire.types import QuireError

Method = Literal["rtn", "gptq", "awq"]
VERSION = 1  # of what is written: parts of another version are not taken up
SAMPLE_ROWS = 64  # of a matrix, that --target-bpw measures a type's error on


@dataclass(frozen=True, slots=True)
class QuantOptions:
    """What a run is to do."""

    target: QuantTarget
    out: Path
    method: Method = "rtn"
    imatrix: Path | None = None
    keep: tuple[str, ...] = ()
    target_bpw: float | None = None
    requantize: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the report measures."""

    text: Path | None = None
    stretches: int = 4
    length: int = 512
    by_layer: bool = False


class Run:
    """Quantizes one source, possibly several times. What takes long is computed once."""

    def __init__(self, files: ModelFiles, progress: Progress | None = None):
        self.source = SourceModel(files)
        self.progress = progress or QuietProgress()
        self.calibration_text: str | None = None

    # -- results -----------------------------------------------------------------------------------------------------

    def quantize(self, options: QuantOptions) -> dict[str, str]:
        """Writes the result and returns the type of each of its tensors."""
        self.check(options)
        importance = self._importance(options)
        recipe = Recipe(options.target, read_keep(list(options.keep), options.target.container))
        if options.target_bpw is not None:
            recipe = replace(recipe, chosen=self._choose(options, importance))
        parts = Parts(options.out, self._description(options))
        total = 4 * sum(torch.Size(tensor.shape).numel() for tensor in self.source.tensors())
        if options.target.container == "gguf":
            self.progress.start(f"Writing {options.out}", total)
            types = write_gguf(self.source, recipe, importance, parts, options.out, self.progress.update)
        else:
            rounded, floats = self._rounded(options, recipe)
            self.progress.start(f"Writing {options.out}", total)
            types = write_folder(
                self.source,
                recipe,
                importance,
                parts,
                options.out,
                self.progress.update,
                rounded=lambda name, matrix: rounded.get(name),
                floats=floats,
            )
        self.progress.finish()
        parts.remove()
        return types

    def evaluate(self, title: str, out: Path, types: Mapping[str, str], how: Evaluation) -> Result:
        """Compares a result with the source."""
        scores = self._scores(how)
        files = resolve_model(str(out))
        self.progress.note(f"Comparing {title} with {self.source.files.name} on {how.stretches} x {how.length} tokens")
        result = Result(title, _size(out), _bits(types, self._shapes(types)), scores.compare(load_served(files)))
        if how.by_layer:
            result.by_layer = by_layer(self._float_again(), load_float(files), scores)
        return result

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self, options: QuantOptions) -> None:
        """Refuses what can't work, before anything is computed."""
        if options.out.exists():
            hint = "Give another --out, or remove it."
            raise QuireError("invalid_parameter", f"{options.out} exists already.", hint, param="out")
        if not options.out.parent.is_dir():
            what = f"{options.out.parent} is not a folder."
            raise QuireError("invalid_parameter", what, "Make it, or give another --out.", param="out")
        if options.method != "rtn" and options.target.name != "W4A16":
            what = f"--method {options.method} rounds four-bit integers only, and {options.target.name} is not W4A16."
            raise QuireError("invalid_parameter", what, "Use --to W4A16, or leave out --method.", param="method")
        if options.target_bpw is not None and options.target.container != "gguf":
            what = "--target-bpw chooses among GGUF types."
            raise QuireError("invalid_parameter", what, "Use --to Q4_K_M, for example.", param="target_bpw")
        if options.target.container == "gguf":
            need_gguf()
        if not options.requantize:
            self.source.check_is_float()
        for pattern, _ in read_keep(list(options.keep), options.target.container):
            if not any(re.search(pattern, tensor.name) for tensor in self.source.tensors()):
                what = f"--keep {pattern} matches none of the checkpoint's tensors."
                raise QuireError("invalid_parameter", what, "See their names with --list.", param="keep")

    # -- calibration -------------------------------------------------------------------------------------------------

    @cached_property
    def float_model(self) -> FloatModel:
        return FloatModel.load(self.source.files)

    def _float_again(self) -> Any:
        """Returns the source in float32, as it is on disk: GPTQ changes the model that it works on."""
        return load_float(self.source.files)

    def _stretches(self, path: Path | None) -> list[list[int]]:
        tokenizer = load_tokenizer(self.source.files)
        if path is None:
            return cut_stretches(tokenizer, texts.for_calibration(), STRETCHES, LENGTH)
        text = texts.read_text(path, "imatrix")
        if tokenizer is None:
            raise QuireError("usage", "This model has no tokenizer.", "Give one that has.")
        tokens = tokenizer.encode(text)[: STRETCHES * LENGTH]
        if len(tokens) < MIN_TOKENS:
            what = f"{path} has {len(tokens)} tokens, and a calibration text needs {MIN_TOKENS} or more."
            raise QuireError("invalid_parameter", what, "Give a longer text.", param="imatrix")
        return [tokens[start : start + LENGTH] for start in range(0, len(tokens), LENGTH)]

    def _importance(self, options: QuantOptions) -> dict[str, Tensor]:
        """Returns the importance of each matrix's columns by tensor name; nothing without a calibration text."""
        if options.imatrix is None:
            return {}
        with open_or_refuse(options.imatrix) as file:
            is_gguf = file.read(4) == b"GGUF"
        if is_gguf:
            return self._named(read_imatrix(options.imatrix))
        return {name: found.mean_squares for name, found in self._inputs(options, products=False).items()}

    def _named(self, importance: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns importance weights by GGUF name under the checkpoint's names."""
        if self.source.file is not None:
            style = style_of(self.source.file.metadata["general.architecture"])
            return {hf_name(name, style): found for name, found in importance.items()}
        named = {tensor.name.removesuffix(".weight"): tensor.facts.name for tensor in list_tensors(self.source)}
        found = {name.removesuffix(".weight"): weights for name, weights in importance.items()}
        return {named[name]: weights for name, weights in found.items() if name in named}

    def _inputs(self, options: QuantOptions, *, products: bool) -> dict[str, Inputs]:
        stretches = self._stretches(options.imatrix)
        self.progress.start("Reading the calibration text", len(stretches))
        try:
            return collect(self.float_model, stretches, products=products, on_stretch=self.progress.update)
        finally:
            self.progress.finish()

    def _rounded(self, options: QuantOptions, recipe: Recipe) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """Returns what a method has rounded itself, and the tensors that it has changed, by name."""
        facts = {tensor.name: tensor for tensor in self.source.tensors()}
        names = {name for name, tensor in facts.items() if recipe.type_of(tensor) == "W4A16"}
        if options.method == "rtn":
            return {}, {}
        if options.method == "awq":
            inputs = self._inputs(options, products=True)
            return {}, awq.scale_model(self.source, inputs, names.__contains__)
        stretches = self._stretches(options.imatrix)
        self.progress.start("Rounding with GPTQ", len(names))
        done: set[str] = set()

        def on_matrix(name: str) -> None:
            done.add(name)
            self.progress.update(len(done))

        try:
            return gptq.round_model(self.float_model, stretches, names.__contains__, on_matrix), {}
        finally:
            self.progress.finish()
            del self.float_model  # its weights are rounded now

    def _choose(self, options: QuantOptions, importance: Mapping[str, Tensor]) -> dict[str, str]:
        """Returns types that together have the bits asked for."""
        by_name = {tensor.facts.name: tensor for tensor in list_tensors(self.source)}

        def error_of(facts: TensorFacts, kind: str) -> float:
            tensor = by_name[facts.name]
            rows = tensor.read(0, min(SAMPLE_ROWS, facts.shape[0])).reshape(-1, facts.columns)[:SAMPLE_ROWS]
            weights = importance.get(facts.name)
            off = dequantize(quantize(rows, kind, weights), kind).view_as(rows) - rows
            weights = torch.ones(facts.columns) if weights is None else weights
            return float((weights * off.square()).sum() / (weights * rows.square()).sum().clamp_min(1e-20))

        assert options.target_bpw is not None
        tensors = [tensor.facts for tensor in by_name.values()]
        return choose_types(tensors, options.target_bpw, error_of, options.target.tables)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _scores(self, how: Evaluation) -> Scores:
        known = getattr(self, "_known_scores", None)
        if known is None or known[0] != how:
            text = texts.for_report() if how.text is None else texts.read_text(how.text, "text")
            stretches = cut_stretches(load_tokenizer(self.source.files), text, how.stretches, how.length)
            known = how, Scores(self._float_again(), stretches)
            self._known_scores = known
        return known[1]

    def _shapes(self, types: Mapping[str, str]) -> dict[str, TensorFacts]:
        if self.source.file is not None and not set(types) <= set(self.source.checkpoint.shapes):
            return {tensor.name: tensor.facts for tensor in list_tensors(self.source)}
        if set(types) <= set(self.source.checkpoint.shapes):
            return {tensor.name: tensor for tensor in self.source.tensors()}
        return {tensor.name: tensor.facts for tensor in list_tensors(self.source)}

    def _description(self, options: QuantOptions) -> dict[str, Any]:
        """Describes the run: an interrupted one goes on only if all of this is the same."""
        given = options.imatrix
        return {
            "version": VERSION,
            "source": weights_digest(self.source.files, "quantize").hex(),
            "target": options.target.name,
            "method": options.method,
            "keep": list(options.keep),
            "target_bpw": options.target_bpw,
            "imatrix": None
            if given is None
            else [str(given.resolve()), given.stat().st_size, given.stat().st_mtime_ns],
        }


def open_or_refuse(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        what = f"{path} can't be read ({error.strerror})."
        raise QuireError("invalid_parameter", what, "Check the path.", param="imatrix") from None


def _size(path: Path) -> int:
    files = [path] if path.is_file() else list(path.rglob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


_COMPRESSED_BITS: dict[str, Callable[[TensorFacts], float]] = {
    "INT8": lambda tensor: 8 + 32 / tensor.columns,
    "FP8": lambda tensor: 8 + 32 / tensor.columns,
    "W4A16": lambda tensor: 4 + 16 / 128,
    "NVFP4": lambda tensor: 4.5,
    "MXFP4": lambda tensor: 4.25,
}


def _bits(types: Mapping[str, str], facts: Mapping[str, TensorFacts]) -> float:
    """Returns the bits of a weight, on average over the matrices that may be quantized."""
    total = bits = 0.0
    for name, kind in types.items():
        tensor = facts[name]
        if not tensor.is_quantizable:
            continue
        size = torch.Size(tensor.shape).numel()
        total += size
        bits += size * (_COMPRESSED_BITS[kind](tensor) if kind in _COMPRESSED_BITS else type_bits(kind))
    return bits / max(1.0, total)
