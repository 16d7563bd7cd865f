"""An odd vocabulary: the head's product is with rows of zeros behind the weight, which a tied embedding shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.families.harness import relative_error
from tests.cpu.rig import load
from tests.cpu.tiny_models import make_tiny
from tests.gpu.script import DEVICE, ON_GPU, marks

pytestmark = marks()


@pytest.mark.skipif(not ON_GPU, reason="on a CPU weights are as they are")
@pytest.mark.parametrize("family", ["llama", "smollm2"])
def test_logits_are_those_of_a_cpu(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path, vocab_size=1027)
    here: Any = load(tmp_path, kernels="torch")
    there: Any = load(tmp_path, 16, DEVICE)
    assert here.head.linear.whole is None and there.head.linear.whole.shape[0] == 1032
    if family == "smollm2":
        assert there.head.linear.weight.data_ptr() == there.embedding.weight.data_ptr()
    hidden = torch.randn(40, here.embedding.weight.shape[1], generator=torch.Generator().manual_seed(1))
    for rows in (1, 2, 40):  # one, few, and as many as go to cuBLAS
        got = there.logits(hidden[:rows].to(DEVICE)).cpu()
        assert got.is_contiguous() and relative_error(got, here.logits(hidden[:rows])) <= 1e-2
