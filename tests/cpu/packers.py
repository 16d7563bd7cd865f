"""Checkpoints as tools publish them quantized: every product of a folder's layers rewritten in a format, and what each
then stands for. Written from the formats' descriptions, bit by bit, so that nothing is shared with what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PRODUCTS = tuple(f"{end}.weight" for end in ("proj", "mqa", "w1", "w2", "w3", "qkvz"))
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# What is lost where a float16 stands for a scale, for a scale times a zero, and where eight bits do for something else.
SCALE, OFFSET, EIGHT = 2.0**-11, 2.0**-11, 2.0**-11 + 1 / 254

Packed = tuple[dict[str, Tensor], Tensor]  # tensors behind a layer's name, and what its weight stands for


@dataclass(frozen=True)
class Format:
    """How a matrix is packed, and what config.json says of it."""

    name: str
    pack: Callable[[Tensor], Packed]
    config: dict[str, Any]
    kept: str  # as what a CPU keeps it
    loss: float = 0.0  # by keeping it so, relative to the largest of a block
    files: dict[str, Any] = field(default_factory=dict)  # beside config.json

    def __str__(self) -> str:
        return self.name


def pack_folder(folder: Path, form: Format) -> dict[str, Tensor]:
    """Rewrite a folder's checkpoint; returns it decoded."""
    tensors = load_file(folder / "model.safetensors")
    decoded = dict(tensors)
    for name, tensor in list(tensors.items()):
        if name.endswith(PRODUCTS) and tensor.dim() == 2:
            del tensors[name]
            parts, decoded[name] = form.pack(tensor)
            prefix = name.removesuffix(".weight")
            tensors |= {
                f"{prefix}.{end}": part.clone(memory_format=torch.contiguous_format) for end, part in parts.items()
            }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    say(folder, form.config or None)
    for name, content in form.files.items():
        (folder / name).write_text(json.dumps(content))
    return decoded


def say(folder: Path, quantized: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """[rows, n] whole numbers -> [rows, words] int32, the first in the lowest bits."""
    single = (numbers.numpy().astype(np.int64)[..., None] >> np.arange(bits)) & 1
    single = single.reshape(len(numbers), -1)
    single = np.pad(single, ((0, 0), (0, -single.shape[1] % 32)))
    return torch.from_numpy(np.packbits(single.astype(np.uint8), axis=1, bitorder="little").view(np.int32).copy())


def round_groups(weight: Tensor, bits: int, group: int, even: bool, scale_dtype: torch.dtype = torch.float16,
                 of_column: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Numbers from 0 on, scales and zeros [rows, groups], and what they stand for."""
    columns, top = weight.shape[1], (1 << bits) - 1
    of_column = torch.arange(columns) // group if of_column is None else of_column
    groups = int(of_column.max()) + 1
    low = torch.stack([weight[:, of_column == g].amin(1) for g in range(groups)], 1)
    high = torch.stack([weight[:, of_column == g].amax(1) for g in range(groups)], 1)
    if even:
        scales = (torch.maximum(-low, high) * 2 / top).to(scale_dtype)
        zeros = torch.full(scales.shape, 1 << (bits - 1))
    else:
        scales = ((high - low) / top).to(scale_dtype)
        zeros = (-low / scales.float()).round().clamp(1, top).long()
    scale, zero = scales.float()[:, of_column], zeros[:, of_column]
    numbers = (weight / scale + zero).round().clamp(0, top).long()
    return numbers, scales, zeros, (numbers - zero) * scale


def gptq(bits: int, group: int, *, even: bool, less: int = 1, shuffled: bool = False) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = torch.arange(columns) // size
        if shuffled:
            order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        numbers, scales, zeros, decoded = round_groups(weight, bits, size, even, of_column=order)
        parts = {"qweight": pack_bits(numbers, bits).t(), "scales": scales.t(),
                 "qzeros": pack_bits(zeros.t() - less, bits), "g_idx": order.int()}  # fmt: skip
        return parts, decoded

    return pack


def awq(group: int) -> Callable[[Tensor], Packed]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # which output of eight stands in a word's first four bits, its next, ...

    def in_words(numbers: Tensor) -> Tensor:
        """[n, outputs]"""
        return pack_bits(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    def pack(weight: Tensor) -> Packed:
        numbers, scales, zeros, decoded = round_groups(weight, 4, group, even=False)
        return {"qweight": in_words(numbers.t()), "scales": scales.t(), "qzeros": in_words(zeros.t())}, decoded

    return pack


def words(bits: int, group: int, *, even: bool) -> Callable[[Tensor], Packed]:
    """compressed-tensors' pack-quantized."""

    def pack(weight: Tensor) -> Packed:
        size = weight.shape[1] if group == -1 else group
        numbers, scales, zeros, decoded = round_groups(weight, bits, size, even, torch.bfloat16)
        parts = {"weight_packed": pack_bits(numbers, bits), "weight_scale": scales,
                 "weight_shape": torch.tensor(weight.shape)}  # fmt: skip
        if not even:
            parts["weight_zero_point"] = pack_bits(zeros.t(), bits).t()
        return parts, decoded

    return pack


def bytes_by_row(*, even: bool = True, whole: bool = False) -> Callable[[Tensor], Packed]:
    """compressed-tensors' int-quantized."""

    def pack(weight: Tensor) -> Packed:
        flat = weight.reshape(1, -1) if whole else weight
        numbers, scales, zeros, decoded = round_groups(flat, 8, flat.shape[1], even, torch.float32)
        parts = {"weight": (numbers - 128).to(torch.int8).view(weight.shape),
                 "weight_scale": scales.flatten() if whole else scales}  # fmt: skip
        if not even:
            parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return parts, decoded.view(weight.shape)

    return pack


def fp8(
    rows: int | None, columns: int | None, end: str = "weight_scale", powers: bool = False
) -> Callable[[Tensor], Packed]:
    """A scale for so many rows and columns; None: for all of them."""

    def pack(weight: Tensor) -> Packed:
        height, width = rows or weight.shape[0], columns or weight.shape[1]
        by_block = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [blocks, height, blocks, width]
        scales = by_block.abs().amax((1, 3)) / 448
        exponents = scales.log2().ceil()
        scales = exponents.exp2() if powers else scales
        values = (by_block / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        decoded = (values.float() * scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)
        written = (exponents + 127).to(torch.uint8) if powers else scales
        written = written.reshape(()) if rows is columns is None else written
        return {"weight": values.flatten(2, 3).flatten(0, 1), end: written, "input_scale": torch.tensor(0.5)}, decoded

    return pack


def fp4(group: int, weight_name: str, overall: str | None, divides: bool = False) -> Callable[[Tensor], Packed]:
    """NVFP4, with one scale for all in `overall`; MXFP4 without."""
    table = torch.tensor(FP4)

    def pack(weight: Tensor) -> Packed:
        by_group = weight.unflatten(1, (-1, group))
        largest = by_group.abs().amax(2)
        if overall is None:
            exponents = (largest / 6).log2().ceil()
            scales, of_all, written = exponents.exp2(), torch.tensor(1.0), (exponents + 127).to(torch.uint8)
        else:
            of_all = largest.max() / (6 * 448)
            written = (largest / 6 / of_all).to(torch.float8_e4m3fn)
            scales = written.float() * of_all
        places = (by_group.abs() / scales[..., None]).unsqueeze(-1).sub(table).abs().argmin(-1)
        values = table[places] * by_group.sign()
        numbers = (places + 8 * (by_group < 0)).flatten(1).to(torch.uint8)
        parts = {weight_name: numbers[:, 0::2] | numbers[:, 1::2] << 4, "weight_scale": written}
        if overall is not None:
            parts[overall] = (1 / of_all if divides else of_all).view(1)
        return parts, (values * scales[..., None]).flatten(1)

    return pack


def nf4(*, nested: bool, run: int = 64) -> Callable[[Tensor], Packed]:
    table = torch.sort(torch.randn(16, generator=torch.Generator().manual_seed(3)))[0]
    table = table / table.abs().max()

    def pack(weight: Tensor) -> Packed:
        flat = weight.flatten()
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % run)).view(-1, run)
        scales = flat.abs().amax(1)
        parts: dict[str, Tensor] = {"weight.quant_map": table}
        said: dict[str, Any] = {"quant_type": "nf4", "blocksize": run, "dtype": "float32", "shape": list(weight.shape)}
        if nested:
            fine = torch.linspace(-1, 1, 256)
            offset = float(scales.mean())
            share = torch.arange(len(scales)) // 16
            of_scales = torch.stack([(scales[share == s] - offset).abs().max() for s in range(int(share.max()) + 1)])
            places = ((scales - offset) / of_scales[share]).unsqueeze(1).sub(fine).abs().argmin(1)
            scales = fine[places] * of_scales[share] + offset
            said |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {"weight.nested_quant_map": fine, "weight.nested_absmax": of_scales}
            parts["weight.absmax"] = places.to(torch.uint8)
        else:
            parts["weight.absmax"] = scales
        places = (flat / scales[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1)
        numbers = places.flatten()[: weight.numel()].to(torch.uint8)
        parts["weight"] = (numbers[0::2] << 4 | numbers[1::2]).unsqueeze(1)
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        decoded = (table[places] * scales[:, None]).flatten()[: weight.numel()].view(weight.shape)
        return parts, decoded

    return pack


def int8_rows(weight: Tensor) -> Packed:
    """bitsandbytes' LLM.int8."""
    largest = weight.abs().amax(1)
    numbers = (weight * 127 / largest[:, None]).round()
    parts = {"weight": numbers.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, numbers * largest[:, None] / 127


def _gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False, **more}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head"]}  # fmt: skip


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FORMATS = [
    Format("gptq", gptq(4, 32, even=True), _gptq_config(4, 32), "Q4_0"),
    Format("gptq in 8 bits", gptq(8, -1, even=True), _gptq_config(8, -1), "Q8_0"),
    Format("gptq in 3 bits", gptq(3, 32, even=False), _gptq_config(3, 32, sym=False), "Q4_1", OFFSET),
    Format("gptq in 2 bits", gptq(2, 32, even=True), _gptq_config(2, 32), "Q4_1"),
    Format("gptq with zeros", gptq(4, 32, even=False), _gptq_config(4, 32, sym=False), "Q4_1", OFFSET),
    Format("gptq's second form", gptq(4, 32, even=False, less=0),
           _gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"), "Q4_1", OFFSET),
    Format("gptq out of order", gptq(4, 16, even=False, shuffled=True),
           _gptq_config(4, 16, sym=False, desc_act=True), "Q8_0", EIGHT),
    Format("gptq elsewhere", gptq(4, 32, even=True), {}, "Q4_0", files={"quantize_config.json": {
        "bits": 4, "group_size": 32, "sym": True, "desc_act": False}}),
    Format("auto-round", gptq(4, 32, even=False, less=0), {"quant_method": "auto-round", "bits": 4, "group_size": 32,
           "sym": False, "packing_format": "auto_round"}, "Q4_1", OFFSET),
    Format("awq", awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
           "Q4_1", OFFSET),
    Format("awq in small groups", awq(16), {"quant_method": "awq", "bits": 4, "group_size": 16}, "Q8_0", EIGHT),
    Format("words", words(4, 32, even=True), compressed("pack-quantized", num_bits=4, group_size=32), "Q4_0"),
    Format("words with zeros", words(4, 32, even=False),
           compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False), "Q4_1", OFFSET),
    Format("words of 8 bits", words(8, -1, even=True),
           compressed("pack-quantized", strategy="channel", group_size=None), "Q8_0"),
    Format("bytes", bytes_by_row(), compressed("int-quantized"), "Q8_0", SCALE),
    Format("bytes with zeros", bytes_by_row(even=False), compressed("int-quantized", symmetric=False), "Q8_0", EIGHT),
    Format("bytes with one scale", bytes_by_row(whole=True), compressed("int-quantized", strategy="tensor"), "Q8_0",
           SCALE),
    Format("fp8 by row", fp8(1, None), compressed("float-quantized", type="float", strategy="channel"), "Q8_0", EIGHT),
    Format("fp8 by block", fp8(16, 32),
           compressed("float-quantized", type="float", strategy="block", block_structure=[16, 32]), "Q8_0", EIGHT),
    Format("fp8 by group", fp8(1, 32), compressed("float-quantized", type="float", group_size=32), "Q8_0", EIGHT),
    Format("mxfp8", fp8(1, 32, powers=True), compressed("mxfp8-quantized", type="float", group_size=32), "Q8_0", EIGHT),
    Format("fp8", fp8(16, 32, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [16, 32]}, "Q8_0",
           EIGHT),
    Format("fbgemm", fp8(1, None), {"quant_method": "fbgemm_fp8"}, "Q8_0", EIGHT),
    Format("nvfp4", fp4(16, "weight_packed", "weight_global_scale", divides=True),
           compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16), "Q8_0", EIGHT),
    Format("mxfp4", fp4(32, "weight_packed", None),
           compressed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32), "MXFP4"),
    Format("modelopt in fp4", fp4(16, "weight", "weight_scale_2"), MODELOPT, "Q8_0", EIGHT),
    Format("modelopt in fp8", fp8(None, None), {}, "Q8_0", EIGHT,
           files={"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}}),
    Format("nf4", nf4(nested=True), BNB, "Q8_0", EIGHT),
    Format("nf4 with plain scales", nf4(nested=False, run=96), BNB, "Q8_0", EIGHT),
    Format("llm.int8", int8_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "Q8_0", SCALE),
]  # fmt: skip
