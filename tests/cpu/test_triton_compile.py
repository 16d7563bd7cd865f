"""The Triton kernels compile for Hopper, which needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_kernels_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.gpu.compiled"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    wanted = {"_qk_norm_rope_write_kernel", "_decode_kernel", "_prefill_kernel", "_prefill_hopper_kernel",
              "_choose_kernel",
              "_survey_kernel", "_narrow_kernel", "_verify_kernel", "_penalties_kernel", "_score_rows_kernel",
              "_one_row_kernel", "_few_rows_kernel", "_norm_router_kernel", "_route_kernel", "_count_kernel",
              "_place_kernel", "_grouped_kernel", "_combine_kernel", "_one_row_gate_up_kernel",
              "_one_row_down_kernel", "_latent_write_kernel", "_latent_kernel", "_latent_hopper_kernel",
              "_merge_latents_kernel", "_step_kernel", "_conv_kernel", "_gates_kernel", "_prepare_kernel",
              "_walk_kernel", "_ready_kernel", "_walk_hopper_kernel", "_token_walk_kernel", "_ring_kernel",
              "_fixed_linear_kernel", "_fixed_attention_kernel", "_join_spans_kernel", "_norm_tiles_kernel",
              "_norm_groups_kernel", "_gated_hopper_kernel"}  # fmt: skip
    assert wanted <= compiled.keys() and all(size > 0 for size in compiled.values())
