"""FlashAttention and FlashInfer as rows of the ops table, without either: stand-ins that compute, from the arguments
the libraries are given, what those promise to compute. Which library is chosen, and why not, is tested here as well."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.libraries import choose
from quire.kernels.libraries.choose import Library, choose_library, judge, quickest
from quire.kernels.libraries.flash_attention import FlashAttention2, FlashAttention3
from quire.kernels.libraries.flashinfer import NUM_WRAPPERS, FlashInfer, ModuleKind, is_compiled
from quire.kernels.libraries.seam import LibraryPlan, PrefillKernel, with_library
from quire.kernels.table import INSTRUCTION_SETS, LIBRARY_NAMES, REFERENCE, Ops, deterministic_ops, select_ops
from quire.kernels.validation.trials import TrialShape
from quire.types import QuireError
from tests.gpu.library_checks import check_kernel
from tests.gpu.where import Where

CPU = torch.device("cpu")
SHAPE = TrialShape(num_heads=4, num_kv_heads=2, head_dim=64, page_tokens=16, window=None,
                   qk_norm=False, dtype=torch.float16, cache_dtype=torch.float16, max_len=64)  # fmt: skip


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> Tensor:
    """One row, its queries at the end of its keys; `left`: keys a query sees before its own, -1: all."""
    num_queries, num_keys = len(q), len(k)
    ends = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
    keys = torch.arange(num_keys)
    seen = (keys <= ends) & ((keys >= ends - left) if left >= 0 else True)
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).to(q.dtype)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
                            cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
                            window_size: tuple[int, int]) -> Tensor:  # fmt: skip
    assert causal and window_size[1] <= 0
    assert {t.dtype for t in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32} and page_table.stride(-1) == 1
    assert max_seqlen_q == (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max()
    assert page_table.shape[1] * k_cache.shape[1] >= cache_seqlens.max()
    out = torch.full_like(q, torch.nan)
    for row, length in enumerate(cache_seqlens.tolist()):
        span = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        k, v = (cache[page_table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[span] = dense_attention(q[span], k, v, softmax_scale, window_size[0])
    return out


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float, causal: bool,
                           window_size: tuple[int, int], block_table: Tensor) -> Tensor:  # fmt: skip
    assert k.shape[1] % 256 == 0, "version 2 wants large pages"
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    assert cu_seqlens_k[0] == 0 and cu_seqlens_k.dtype == torch.int32 and max_seqlen_k >= lengths.max()
    return flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=block_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size,
    )  # fmt: skip


class Wrapper:
    """What FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` does: remembers a plan, computes by it."""

    def plan(self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
             num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
             window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype, o_data_type: torch.dtype,
             pos_encoding_mode: str, logits_soft_cap: float, use_fp16_qk_reduction: bool) -> None:  # fmt: skip
        assert (pos_encoding_mode, logits_soft_cap, use_fp16_qk_reduction) == ("NONE", 0.0, False)
        assert o_data_type == q_data_type and causal
        assert all(t.dtype == torch.int32 for t in (qo_indptr, paged_kv_indptr, paged_kv_indices))
        assert ((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all()
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type)
        self.starts, self.indptr, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices.long()
        self.last, self.scale, self.left = paged_kv_last_page_len.tolist(), sm_scale, window_left

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        k_cache, v_cache = paged_kv_cache
        assert (q.shape[1], *k_cache.shape[2:], k_cache.shape[1], q.dtype, k_cache.dtype) == self.heads
        assert len(q) == self.starts[-1] and len(self.pages) == self.indptr[-1]
        out = torch.full_like(q, torch.nan)
        for row, last in enumerate(self.last):
            pages = self.pages[self.indptr[row] : self.indptr[row + 1]]
            length = (len(pages) - 1) * k_cache.shape[1] + last
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            span = slice(self.starts[row], self.starts[row + 1])
            out[span] = dense_attention(q[span], k, v, self.scale, self.left)
        return out


KERNELS: dict[str, Callable[[], PrefillKernel]] = {
    "flash-attention-3": lambda: FlashAttention3(flash_attn_with_kvcache, copied=False),
    "flash-attention-3-copied": lambda: FlashAttention3(flash_attn_with_kvcache, copied=True),
    "flash-attention-2": lambda: FlashAttention2(flash_attn_varlen_func),
    "flashinfer": lambda: FlashInfer(Wrapper, "fa3", lambda kind: True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_library_is_given_what_it_needs(name: str) -> None:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    check_kernel(REFERENCE, KERNELS[name](), Where("cpu", False, (torch.float16,), seed))


def small_step(dtype: torch.dtype = torch.float16, counts: Sequence[int] = (1, 5)) -> tuple[Any, ...]:
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)[-len(counts) :]
    positions = torch.cat([torch.arange(20 - count, 20) for count in counts])
    caches = torch.randn(2, 5, 16, 2, 64).to(dtype)
    return table, positions, list(counts), [20] * len(counts), torch.randn(sum(counts), 4, 64).to(dtype), caches


class Refuses(FlashAttention3):
    """Counts what it is asked for and says no."""

    def __init__(self) -> None:
        super().__init__(flash_attn_with_kvcache, copied=False)
        self.num_asked = self.num_attended = 0

    def fits(self, q: Tensor, k_cache: Tensor, rows: Any) -> bool:
        self.num_asked += 1
        return False

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: Any) -> Tensor:
        self.num_attended += 1
        raise AssertionError


@pytest.mark.parametrize("why", ["it refuses", "softcap", "sinks", "another type"])
def test_what_a_library_can_not_do_stays_with_our_own_kernels(why: str) -> None:
    table, positions, counts, bounds, q, caches = small_step(torch.float32)
    kernel = Refuses() if why == "it refuses" else FlashAttention3(_never, copied=False)
    ops = with_library(REFERENCE, kernel)
    extra: dict[str, Any] = {"softcap": {"softcap": 3.0}, "sinks": {"sinks": torch.zeros(4)}}.get(why, {})
    plans = [row.plan_attention(table, positions, counts, bounds, 16, None, torch.float32) for row in (ops, REFERENCE)]
    for _ in range(2):  # two layers
        got = ops.paged_attention(q, *caches, plans[0], 0.2, **extra)
        assert torch.equal(got, REFERENCE.paged_attention(q, *caches, plans[1], 0.2, **extra))
    if isinstance(kernel, Refuses):
        assert (kernel.num_asked, kernel.num_attended) == (1, 0), "asked once for all layers"


def test_decodes_and_captured_steps_never_see_a_library() -> None:
    table, positions, counts, bounds, *_ = small_step(counts=(1, 1))
    ops = with_library(REFERENCE, FlashAttention3(_never, copied=False))
    plan = ops.plan_attention(table, positions, counts, bounds, 16, None, torch.float16)
    assert not isinstance(plan, LibraryPlan)
    captured: list[Any] = []
    inner = replace(REFERENCE, plan_attention=lambda *args, **kwargs: captured.append(kwargs))
    with_library(inner, Refuses()).plan_attention(table, positions, [], [], 16, None, torch.float16, work="lists")
    assert captured == [{"work": "lists"}]


def test_copies_that_would_take_too_much_memory_are_not_made() -> None:
    table, positions, counts, _, q, caches = small_step()
    ops = with_library(REFERENCE, FlashAttention3(_never, copied=True))
    plan = ops.plan_attention(table, positions, counts, [20, 1 << 20], 16, None, torch.float16)
    assert not FlashAttention3(_never, copied=True).fits(q, caches[0], plan.prefills)
    assert FlashAttention3(_never, copied=False).fits(q, caches[0], plan.prefills)


def test_flashinfer_does_not_plan_over_a_plan_in_flight() -> None:
    """Its wrapper writes to memory the device reads later: steps take turns, and each waits for its own last copy."""
    made: list[Wrapper] = []

    def make() -> Wrapper:
        made.append(Wrapper())
        return made[-1]

    kernel = FlashInfer(make, "fa3", lambda kind: True)
    table, positions, counts, bounds, q, caches = small_step(counts=(5,))
    ops = with_library(REFERENCE, kernel)
    used = []
    for _ in range(NUM_WRAPPERS + 1):
        plan = ops.plan_attention(table, positions, counts, bounds, 16, None, torch.float16)
        ops.paged_attention(q, *caches, plan, 0.2)
        used.append(plan.planned)
    assert len(set(map(id, used[:NUM_WRAPPERS]))) == NUM_WRAPPERS and used[-1] is used[0]

    class Sent:
        def __init__(self) -> None:
            self.num_waits = 0

        def synchronize(self) -> None:
            self.num_waits += 1

    sent = Sent()
    kernel._slots[1].sent = sent  # type: ignore[assignment]
    plan = ops.plan_attention(table, positions, counts, bounds, 16, None, torch.float16)
    ops.paged_attention(q, *caches, plan, 0.2)
    assert sent.num_waits == 1


def test_flashinfer_compiles_nothing_while_requests_wait() -> None:
    """What is met first was decided on; the windowed layers of the same model join in only if theirs lies there."""
    table, positions, counts, bounds, q, caches = small_step(counts=(5,))

    def fitting(compiled: bool) -> tuple[list[bool], list[ModuleKind]]:
        asked: list[ModuleKind] = []

        def is_there(kind: ModuleKind) -> bool:
            asked.append(kind)
            return compiled

        ops, fits = with_library(REFERENCE, FlashInfer(Wrapper, "fa3", is_there)), []
        for window in (None, 11, None, 11):
            plan = ops.plan_attention(table, positions, counts, bounds, 16, window, torch.float16)
            ops.paged_attention(q, *caches, plan, 0.2)
            fits.append(plan.fits)
        return fits, asked

    windowed = ModuleKind("fa3", torch.float16, 64, windowed=True)
    assert fitting(True) == ([True] * 4, [windowed]), "asked once"
    assert fitting(False) == ([True, False, True, False], [windowed])


@pytest.mark.parametrize(("found", "ready"), [
    ({"is_aot": True, "is_compiled": True}, True),
    ({"is_aot": False, "is_compiled": False}, False),
    ({"is_aot": False, "is_compiled": True, "log": True}, True),
    ({"is_aot": False, "is_compiled": True, "log": False}, False),  # built by another ninja file: compiled anew
    ({}, False),  # a version that keeps its modules elsewhere
])  # fmt: skip
def test_flashinfer_is_compiled_when_nothing_is_left_to_build(
    found: dict[str, bool], ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text(
        '#!/bin/sh\n[ "$1 $2 $4" = "-n -C -f" ] && [ -f "$5" ] || exit 1\n'
        '[ -f "$3/.ninja_log" ] && echo "ninja: no work to do." || echo "[1/1] nvcc"\n'
    )
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", str(ninja.parent), prepend=":")
    asked: list[Any] = []

    def gen_batch_prefill_module(*args: Any) -> Any:
        asked.append(args)
        if found.get("log"):
            (tmp_path / ".ninja_log").touch()
        path = tmp_path / "build.ninja"
        here = {name: value for name, value in found.items() if name != "log"}
        return SimpleNamespace(build_dir=tmp_path, ninja_path=path, write_ninja=path.touch, **here)

    for name in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    fake = ModuleType("flashinfer.jit.attention")
    fake.__dict__["gen_batch_prefill_module"] = gen_batch_prefill_module
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    bf16 = torch.bfloat16
    assert is_compiled(ModuleKind("fa3", bf16, 128, windowed=True)) == ready
    assert asked == [("fa3", bf16, bf16, bf16, torch.int32, 128, 128, 0, True, False, False)]


# ---------------------------------------------------------------------------------------------------------------------
# Choosing


def _never(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("nobody should have asked the library")


def library(kernel: PrefillKernel | Exception | None, installed: str | None = "3.1", **kwargs: Any) -> Library:
    def open_it(device: torch.device) -> list[PrefillKernel]:
        if isinstance(kernel, Exception):
            raise kernel
        return [] if kernel is None else [kernel]

    class Known(Library):
        def installed(self) -> str | None:
            return installed

    return Known("A library", "flash-attn", "a-library", ((3, 0), (4,)), open_it, **kwargs)


def times(*seconds: float) -> Callable[[Callable[[], object]], float]:
    left: Iterator[float] = iter(seconds)

    def timer(launch: Callable[[], object]) -> float:
        launch()
        return next(left)

    return timer


def right() -> PrefillKernel:
    return FlashAttention3(flash_attn_with_kvcache, copied=False)


def test_a_library_is_used_where_it_is_quicker_and_only_there() -> None:
    def chosen(seconds: float) -> bool:
        found = choose_library(REFERENCE, SHAPE, CPU, "auto", timer=times(1.0, seconds), libraries=[library(right())])
        return found is not REFERENCE

    assert chosen(0.9) and not chosen(1.1)
    assert not chosen(0.99), "a gain that small is noise"
    two = [library(right()), library(FlashAttention3(flash_attn_with_kvcache, copied=True))]
    best = quickest(judge(REFERENCE, SHAPE, CPU, "auto", two, times(1.0, 0.9, 0.8)))
    assert best is not None and best.name == "FlashAttention-3 over copied pages"


def test_nothing_is_tried_where_nothing_is_installed_or_an_fp8_cache_is_read() -> None:
    absent = library(AssertionError("opened"), installed=None)
    assert choose_library(REFERENCE, SHAPE, CPU, "auto", timer=times(), libraries=[absent]) is REFERENCE
    fp8 = replace(SHAPE, cache_dtype=torch.float8_e4m3fn)
    assert choose_library(REFERENCE, fp8, CPU, "auto", timer=times(), libraries=[library(right())]) is REFERENCE
    assert choose_library(REFERENCE, SHAPE, CPU, "triton", timer=times(), libraries=[library(right())]) is REFERENCE


@pytest.mark.parametrize(("found", "why"), [
    (library(right(), installed=None), "not installed"),
    (library(right(), installed="2.9.1"), "use 3.0 or later, before 4"),
    (library(right(), installed="4.0.0b2"), "use 3.0 or later, before 4"),
    (library(ImportError("undefined symbol: aoti\nmore")), "ImportError: undefined symbol: aoti"),
    (library(None), "no kernel for this GPU"),
    (library(FlashAttention3(lambda q, *args, **kwargs: q * 0.1, copied=False)), "results differ from the reference"),
    (library(FlashAttention3(lambda q, *args, **kwargs: 1 / 0, copied=False)), "ZeroDivisionError"),
    (library(right(), is_ready=lambda shape, device: False), "--kernels flash-attn compiles it"),
])  # fmt: skip
def test_a_library_that_can_not_be_used_says_why_and_gives_way(found: Library, why: str) -> None:
    judged = judge(REFERENCE, SHAPE, CPU, "auto", [found], times(1.0, 0.1))
    assert why in judged[1].why and judged[1].kernel is None and quickest(judged) is None
    assert choose_library(REFERENCE, SHAPE, CPU, "auto", timer=times(1.0, 0.1), libraries=[found]) is REFERENCE


def test_a_library_asked_for_by_name_is_used_or_the_start_ends_in_one_line() -> None:
    slow = library(right(), is_ready=lambda shape, device: False)  # compiled because it was asked for
    used = choose_library(REFERENCE, SHAPE, CPU, "flash-attn", timer=times(1.0, 5.0), libraries=[slow])
    assert used is not REFERENCE
    with pytest.raises(QuireError, match=r"kernels=flash-attn can't be used .*not installed") as refused:
        gone = library(right(), installed=None)
        choose_library(REFERENCE, SHAPE, CPU, "flash-attn", timer=times(1.0), libraries=[gone])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("choose_ops", [select_ops, deterministic_ops])
def test_kernels_asked_for_on_another_device_are_refused(choose_ops: Callable[[str, str], Ops]) -> None:
    """Plain torch or Triton would have computed instead, and nobody would have been told."""
    for device, kernels in [*itertools.product(["cpu"], ["triton", *LIBRARY_NAMES]),
                            *itertools.product(["cuda"], INSTRUCTION_SETS)]:  # fmt: skip
        with pytest.raises(QuireError, match=rf"kernels={kernels} needs a C(UDA device|PU)\.") as refused:
            choose_ops(device, kernels)
        assert refused.value.param == "kernels"


def test_every_library_has_a_name_the_setting_knows() -> None:
    from quire.config import knobs

    assert {known.setting for known in choose.LIBRARIES} == set(LIBRARY_NAMES)
    assert {"auto", "torch", "triton", *LIBRARY_NAMES, *INSTRUCTION_SETS} == set(knobs()["kernels"].choices or ())
    assert choose._version_numbers("2.8.3.post1") == (2, 8, 3) and choose._version_numbers("0.6.12+cu13") == (0, 6, 12)
