"""The Triton kernels compile for Hopper, which needs no GPU, with whichever Triton is installed; those in Gluon if they
are known to run with it. They use what all of these Tritons have."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KERNELS = Path(__file__).parents[2] / "quire/kernels/triton"
GLUON = {"_prefill_hopper_kernel", "_latent_hopper_kernel", "_merge_latents_kernel", "_ready_kernel",
         "_walk_hopper_kernel", "_gated_hopper_kernel", "_mamba_hopper_kernel", "_mamba_gates_kernel"}  # fmt: skip
# What Triton 3.6 and 3.7 both have, by the names that the kernels have for Gluon's modules.
IN_ALL_TRITONS = {
    "gluon": {"jit"},
    "gl": {"BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout",
           "NVMMASharedLayout", "SliceLayout", "SwizzledSharedLayout", "allocate_shared_memory", "arange",
           "associative_scan", "atomic_xchg", "bfloat16", "cdiv", "constexpr", "convert_layout", "exp", "exp2",
           "float16", "float32", "fma", "full", "inline_asm_elementwise", "int32", "int64", "join", "load", "log",
           "max", "maximum", "minimum", "num_programs", "program_id", "rsqrt", "split", "static_range", "store", "sum",
           "warp_specialize", "where"},
    "mbarrier": {"MBarrierLayout", "arrive", "expect", "init", "wait"},
    "tma": {"async_copy_global_to_shared", "async_copy_shared_to_global", "store_wait"},
    "async_copy": {"async_copy_global_to_shared", "commit_group", "wait_group"},
}  # fmt: skip


def test_kernels_compile_for_hopper() -> None:
    import triton

    from quire.kernels.triton.launch import KNOWN_GLUON

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.gpu.compiled"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    wanted = {
        "_qk_norm_rope_write_kernel",
        "_decode_kernel",
        "_prefill_kernel",
        "_choose_kernel",
        "_survey_kernel",
        "_narrow_kernel",
        "_verify_kernel",
        "_penalties_kernel",
        "_score_rows_kernel",
        "_one_row_kernel",
        "_few_rows_kernel",
        "_norm_router_kernel",
        "_route_kernel",
        "_count_kernel",
        "_place_kernel",
        "_grouped_kernel",
        "_combine_kernel",
        "_few_gate_up_kernel",
        "_few_down_kernel",
        "_head_product_kernel",
        "_latent_write_kernel",
        "_latent_kernel",
        "_step_kernel",
        "_conv_kernel",
        "_gates_kernel",
        "_prepare_kernel",
        "_walk_kernel",
        "_token_walk_kernel",
        "_ring_kernel",
        "_fixed_linear_kernel",
        "_fixed_attention_kernel",
        "_join_spans_kernel",
        "_norm_tiles_kernel",
        "_norm_groups_kernel",
        "_norm_add_kernel",
        "_gate_mul_kernel",
        "_quantize_rows_kernel",
        "_channel_step_kernel",
        "_channel_gates_kernel",
        "_channel_prepare_kernel",
        "_channel_walk_kernel",
        "_pack_entries_kernel",
        "_packed_attention_kernel",
        "_four_bits_kernel",
    }
    if triton.__version__.startswith(KNOWN_GLUON):
        wanted |= GLUON
    assert wanted <= compiled.keys() and all(size > 0 for size in compiled.values())


def gluon_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in IN_ALL_TRITONS:
            yield node.value.id, node.attr


def test_gluon_is_used_by_names_that_all_its_tritons_have() -> None:
    """Else only those would see it who have another one than we."""
    sources = [(path, path.read_text()) for path in sorted(KERNELS.rglob("*.py"))]
    found = {(path.name, *name) for path, text in sources if "gluon" in text for name in gluon_names(ast.parse(text))}
    assert len(found) > 100
    moved = [use for use in sorted(found) if use[2] not in IN_ALL_TRITONS[use[1]]]
    assert not moved, f"are they in every Triton of KNOWN_GLUON? Then list them here, else see gluon_names.py: {moved}"


def test_the_gpu_tests_name_kernels_that_exist() -> None:
    """They run on no machine of CI, so a moved kernel would be noticed much later."""
    from tests.gpu.test_trials import CASES, SAMPLED

    names = {(module, kernel) for _, module, kernel, *_ in (*CASES, *SAMPLED)}
    for module, kernel in names:
        assert hasattr(importlib.import_module(f"quire.kernels.triton.{module}"), kernel), (module, kernel)
