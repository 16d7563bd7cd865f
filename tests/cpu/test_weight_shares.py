"""A rank's share of a weight: every family's weights, read in halves by rows and by columns, are the whole again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.files.gguf import open_gguf
from quire.files.source import resolve_model
from quire.layers.weights import Part, PartSource, Share, Weight, iter_weights
from quire.models.loading.loader import build_model, read_config
from quire.models.loading.shards import SafetensorsCheckpoint
from quire.models.loading.sources import CheckpointFill, GGUFCheckpoint
from quire.models.registry import FAMILIES
from quire.types import QuireError
from tests.cpu.families.harness import Family, all_families, model_type, save_checkpoint
from tests.cpu.tiny_gguf import write_gguf
from tests.cpu.tiny_models import make_tiny

CPU = torch.device("cpu")


def families() -> list[Family]:
    """One of each model type that has a file of its own."""
    found: dict[str, Family] = {}
    for family in all_families():
        if model_type(family) in FAMILIES and not family.slow:
            found.setdefault(model_type(family), family)
    return list(found.values())


def halves(shape: torch.Size) -> dict[str, tuple[Share, Share]]:
    """Two shares of a weight by rows, by rows in turn (as the heads of merged queries and keys), and by columns."""
    rows, middle = shape[0], shape[0] // 2
    found = {}
    if rows > 1:
        found["rows"] = (Share(((0, middle),)), Share(((middle, rows),)))
    if rows % 4 == 0:
        part = rows // 4
        found["in turn"] = (
            Share(((0, part), (2 * part, 3 * part))),
            Share(((part, 2 * part), (3 * part, rows))),
        )
    if len(shape) == 2 and shape[1] > 1:
        third = max(shape[1] // 3, 1)
        found["columns"] = (Share(columns=(0, third)), Share(columns=(third, shape[1])))
    return found


def join(kind: str, shares: tuple[Share, Share], read: list[Tensor], shape: torch.Size) -> Tensor:
    if kind == "columns":
        return torch.cat(read, dim=1)
    whole = torch.empty(shape)
    for share, tensor in zip(shares, read, strict=True):
        first = 0
        for start, stop in share.rows or ():
            whole[start:stop] = tensor[first : first + stop - start]
            first += stop - start
    return whole


@pytest.mark.parametrize("family", families(), ids=str)
def test_the_halves_of_every_weight_are_the_whole(family: Family, tmp_path: Path) -> None:
    save_checkpoint(family, tmp_path)
    files = resolve_model(str(tmp_path))
    model, _ = build_model(read_config(files), dtype="float32", device=CPU, page_tokens=4)
    fill = CheckpointFill(model, SafetensorsCheckpoint([tmp_path / "model.safetensors"], str(tmp_path)))
    kinds = set()
    for _, name, weight in iter_weights(model):
        whole = torch.full(weight.shape, torch.nan)
        fill(weight, whole)
        for kind, shares in halves(weight.shape).items():
            read = [torch.full(share.size(tuple(weight.shape)), torch.nan) for share in shares]
            for share, tensor in zip(shares, read, strict=True):
                fill(weight.cut(share), tensor)
            assert torch.equal(join(kind, shares, read, weight.shape), whole), (name, weight.parts[0].name, kind)
            kinds.add(kind)
    assert kinds == {"rows", "in turn", "columns"}


class CountedRows:
    """A checkpoint that counts the values that are read from it."""

    def __init__(self, inner: Any):
        self.inner, self.where, self.shapes, self.count = inner, inner.where, inner.shapes, 0

    def read(self, name: str, target: Tensor, index: int | None = None) -> None:
        self.inner.read(name, target, index)
        self.count += target.numel()

    def source(self, name: str, index: int | None = None) -> PartSource:
        found = self.inner.source(name, index)

        def read(first: int, count: int) -> Tensor:
            rows: Tensor = found.read(first, count)
            self.count += rows.numel()
            return rows

        return PartSource(found.shape, read, found.type_name, None)


def test_a_share_by_rows_reads_no_other_row(tmp_path: Path) -> None:
    save_checkpoint(next(family for family in families() if family.name == "llama"), tmp_path)
    model, _ = build_model(read_config(resolve_model(str(tmp_path))), dtype="float32", device=CPU, page_tokens=4)
    counted = CountedRows(SafetensorsCheckpoint([tmp_path / "model.safetensors"], str(tmp_path)))
    fill = CheckpointFill(model, counted)
    (weight,) = {
        id(w): w for _, _, w in iter_weights(model) if w.parts[0].name.endswith("0.mlp.gate_proj.weight")
    }.values()
    share = weight.cut(Share(((0, 24), (96, 120))))  # a quarter of gate, a quarter of up
    counted.count = 0
    fill(share, torch.empty(share.shape))
    assert counted.count == share.numel() == weight.numel() // 4


def quantized(folder: Path, kind: str) -> GGUFCheckpoint:
    model, _ = make_tiny("llama", folder / "from")
    types = {r"blk.*ffn_down.weight": kind, r"blk.*attn_q.weight": kind}
    write_gguf(model, "llama", folder / "model.gguf", types)
    return GGUFCheckpoint(open_gguf(folder / "model.gguf"), 16)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_are_cut_at_block_boundaries_or_not_at_all(kind: str, tmp_path: Path) -> None:
    checkpoint: Any = quantized(tmp_path, kind)
    name = next(name for name in checkpoint.shapes if name.endswith("0.mlp.down_proj.weight"))
    source = checkpoint.source(name)
    rows, columns = source.shape
    assert columns % 32 == 0 and columns >= 64
    want = source.read(0, rows)
    left, right = source.cut(name, (2, rows), (0, 32)), source.cut(name, (2, rows), (32, columns))
    assert torch.equal(torch.cat([left.read(0, rows), right.read(0, rows)], dim=1), want[2:])
    size = len(source.blocks) // (rows * columns // 32)
    whole = source.blocks.view(rows, -1)[2:]
    assert torch.equal(left.blocks.view(rows - 2, -1), whole[:, :size])
    assert torch.equal(right.blocks.view(rows - 2, -1), whole[:, size:])
    with pytest.raises(QuireError, match=r"down_proj.* at column 48: its Q\d_0 blocks have 32 columns") as error:
        source.cut(name, None, (0, 48))
    assert "\n" not in str(error.value)


def test_a_share_of_reordered_blocks_keeps_their_order(tmp_path: Path) -> None:
    """Queries of the llama architecture are permuted within each head; a rank reads the rows of its heads."""
    checkpoint: Any = quantized(tmp_path, "Q8_0")
    name = next(name for name in checkpoint.shapes if name.endswith("0.self_attn.q_proj.weight"))
    rows, columns = checkpoint.shapes[name]
    whole = torch.empty(rows, columns)
    checkpoint.read(name, whole)
    weight = Weight((rows, columns), torch.float32, (Part(name, (rows, columns), 0, rows),))
    part = weight.cut(Share(((32, rows),))).parts_in(checkpoint.shapes)[0]
    source = checkpoint.source(name).cut(name, part.rows, None)
    assert torch.equal(source.read(0, rows - 32), whole[32:])
    assert len(source.order) == rows - 32
