"""Four-bit weights that stay in their bits (`--quant keep`), with the torch op in place of Triton's kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.files.source import resolve_model
from quire.kernels.formats.gguf_blocks import dequantize
from quire.kernels.formats.gguf_encode import quantize as encode
from quire.kernels.four_bits import FourBits, four_bit_linear, join_rows, read_blocks
from quire.layers.weights import weights_bytes
from quire.models.loading.loader import build_model, load_model, read_config
from quire.quantize.recipe import find_target
from quire.quantize.run import QuantOptions, Run
from quire.runtime.reading import CPU, PAGE, read_stretch
from quire.types import QuireError
from tests.cpu.test_quantize import TOKENS, folders  # noqa: F401


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_are_taken_apart(kind: str) -> None:
    rows = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    blocks = encode(rows, kind)
    weight = read_blocks(kind, blocks, 6)
    torch.testing.assert_close(weight.decode(), dequantize(blocks, kind).view(6, 128), rtol=1e-6, atol=1e-7)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(four_bit_linear(x, weight, None), x @ weight.decode().T)


def test_scales_that_repeat_are_stored_once() -> None:
    numbers = torch.randint(0, 256, (4, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    scales = torch.rand(4, 2, generator=torch.Generator().manual_seed(4)).half().repeat_interleave(4, 1)
    one, other = FourBits(numbers, scales, None), FourBits(numbers, scales, scales)
    assert join_rows([one, one]).group == 128
    both = join_rows([one, other])
    torch.testing.assert_close(both.decode(), torch.cat((one.decode(), other.decode())))


def load(folder: Path, quant: str) -> Any:
    how: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "quant": quant}
    return load_model(resolve_model(str(folder)), device=CPU, max_model_len=None, page_tokens=PAGE, **how).model


def test_a_checkpoint_stays_in_its_bits(folders: dict[str, Path], tmp_path: Path) -> None:  # noqa: F811
    Run(resolve_model(str(folders["llama"]))).quantize(QuantOptions(find_target("W4A16"), tmp_path / "four"))
    kept, decoded = load(tmp_path / "four", "keep"), load(tmp_path / "four", "none")
    weight = kept.layers[0].mlp.gate_up.weight
    assert isinstance(weight, FourBits) and weight.group == 128 and weight.least is None
    with torch.inference_mode():
        want, got = (model.logits(read_stretch(model, TOKENS)) for model in (decoded, kept))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    config = read_config(resolve_model(str(tmp_path / "four")))
    how: dict[str, Any] = {"dtype": "float32", "device": CPU, "page_tokens": PAGE}
    from quire.kernels.table import REFERENCE

    sizes = [weights_bytes(build_model(config, quant=q, ops=REFERENCE, **how)[0]) for q in ("keep", "none")]
    assert sizes[0] < 0.5 * sizes[1]


def test_where_it_makes_no_sense_it_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:  # noqa: F811
    Run(resolve_model(str(folders["llama"]))).quantize(QuantOptions(find_target("Q4_0"), tmp_path / "four.gguf"))
    files = resolve_model(str(tmp_path / "four.gguf"))
    with pytest.raises(QuireError, match="no matrices in four bits"):
        load(folders["llama"], "keep")
    with pytest.raises(QuireError, match="is for CUDA"):
        load_model(files, dtype="auto", device=CPU, max_model_len=None, page_tokens=PAGE, quant="keep")
