"""The native library's implementations of the ops in float32 on a CPU, and of sampling. `kernels.table` uses them.

A call costs a few microseconds. Inputs that the kernels do not support (another dtype, a non-contiguous view) go to the
reference, which changes only the speed.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.angles import Angles, angle_tables
from quire.kernels.cache_forms import PackedPlane
from quire.kernels.expert_types import ExpertWeights
from quire.kernels.native.experts import PackedExperts, run_packed_experts
from quire.kernels.native.library import MAX_GROUP, GroupDesc, Native, StepDesc
from quire.kernels.reference import attention as reference_attention
from quire.kernels.reference import experts as reference_experts
from quire.kernels.reference import latent as reference_latent
from quire.kernels.reference import small_ops as reference

MAX_VOCAB = 1 << 24  # the kernel holds token ids in float lanes, exact up to this


@dataclass(frozen=True, slots=True)
class NativePlan:
    """The plan that a cache group's layers share in one step; keeps the tensors alive that descriptors point to."""

    page_table: Tensor  # [rows, max_pages] int32
    positions: Tensor  # [tokens] int64
    query_starts: Tensor  # [rows + 1] int32
    group: GroupDesc
    step: StepDesc
    counts: list[int]
    len_bounds: list[int]


class NativeOps:
    def __init__(self, native: Native):
        self.native = native
        self._library = native.library
        self._context = native.context

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _is_plain(x, weight):
            return reference.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._library.quire_norm(
            self._context, x.data_ptr(), weight.data_ptr(), eps, x.numel() // width, width, out.data_ptr()
        )
        return out

    def gate_mul(self, gate_up: Tensor, curve: Curve = "silu") -> Tensor:
        if curve != "silu" or not _is_plain(gate_up):
            return reference.gate_mul(gate_up, curve)
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        self._library.quire_silu_mul(
            self._context, gate_up.data_ptr(), out.numel() // max(width, 1), width, out.data_ptr()
        )
        return out

    @staticmethod
    def plan_angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Angles:
        return Angles(positions, frequencies, scale)

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        angles: Angles,
        k_cache: Tensor | PackedPlane,
        v_cache: Tensor | PackedPlane,
        slots: Tensor,
        num_heads: int,
    ) -> Tensor:
        """The reference's op; overwrites `qkv` unless that is a view of a wider tensor."""
        qkv = qkv.contiguous()
        assert angles.positions is not None and angles.frequencies is not None
        kv_heads, head_dim = k_cache.shape[2:]
        norms = [w for w in (q_weight, k_weight) if w is not None]
        if not _is_plain(qkv, *norms) or not _are_native(k_cache, v_cache):
            tables = angle_tables(angles.positions, angles.frequencies, angles.scale, qkv.dtype)
            return reference.qk_norm_rope_write(
                qkv, q_weight, k_weight, eps, tables, k_cache, v_cache, slots, num_heads
            )
        positions, slots = angles.positions.contiguous(), slots.contiguous()
        group = GroupDesc(slots=slots.data_ptr(), form=_form(k_cache))
        step = StepDesc(None, positions.data_ptr(), None, len(qkv), 0, _pointer(group))
        self._library.quire_rope_write(
            self._context,
            byref(step),
            qkv.data_ptr(),
            _address(q_weight),
            _address(k_weight),
            eps,
            angles.frequencies.data_ptr(),
            angles.scale,
            num_heads,
            kv_heads,
            head_dim,
            _data(k_cache),
            _data(v_cache),
        )
        return qkv.view(len(qkv), -1, head_dim)[:, :num_heads]

    @staticmethod
    def plan_attention(
        page_table: Tensor,
        positions: Tensor,
        counts: list[int],
        len_bounds: list[int],
        page_tokens: int,
        window: int | None,
        dtype: torch.dtype,
        *,
        row_index: Tensor | None = None,
        early: bool = False,
    ) -> NativePlan:
        if row_index is not None:
            page_table = page_table.index_select(0, row_index)
        page_table, positions = page_table.contiguous(), positions.contiguous()
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        query_starts = torch.tensor(starts, dtype=torch.int32)
        group = GroupDesc(page_table.data_ptr(), page_table.shape[1], None, None, 0, page_tokens, window or 0)
        step = StepDesc(
            None, positions.data_ptr(), query_starts.data_ptr(), len(positions), len(counts), _pointer(group)
        )
        return NativePlan(page_table, positions, query_starts, group, step, counts, len_bounds)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor | PackedPlane,
        v_cache: Tensor | PackedPlane,
        plan: NativePlan,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _, num_heads, head_dim = q.shape
        kv_heads = k_cache.shape[2]
        is_plain = _are_native(k_cache, v_cache) and (sinks is None or _is_plain(sinks))
        if not is_plain or q.dtype != torch.float32 or num_heads // kv_heads > MAX_GROUP:
            slow = _reference_plan(plan, q.dtype if isinstance(k_cache, PackedPlane) else k_cache.dtype)
            return reference_attention.paged_attention(q, k_cache, v_cache, slow, scale, softcap, sinks)
        q = q.contiguous()
        out = torch.empty(len(q), num_heads * head_dim)
        plan.step.groups[0].form = _form(k_cache)
        self._library.quire_attend(
            self._context,
            byref(plan.step),
            q.data_ptr(),
            num_heads,
            kv_heads,
            head_dim,
            _data(k_cache),
            _data(v_cache),
            scale,
            softcap or 0.0,
            _address(sinks),
            out.data_ptr(),
        )
        return out

    @staticmethod
    def latent_write(
        q: Tensor,
        entry: Tensor,
        norm_weight: Tensor,
        eps: float,
        angles: Angles,
        cache: Tensor,
        slots: Tensor,
        interleaved: bool,
    ) -> Tensor:
        """Calls the reference, with cos and sin tables."""
        assert angles.positions is not None and angles.frequencies is not None
        tables = angle_tables(angles.positions, angles.frequencies, angles.scale, q.dtype)
        return reference_latent.latent_write(q, entry, norm_weight, eps, tables, cache, slots, interleaved)

    @staticmethod
    def latent_attention(q_latent: Tensor, q_rope: Tensor, cache: Tensor, plan: NativePlan, scale: float) -> Tensor:
        """Calls the reference, with a plan of its own."""
        slow = _reference_plan(plan, cache.dtype)
        return reference_latent.latent_attention(q_latent, q_rope, cache, slow, scale)

    @staticmethod
    def run_experts(
        x: Tensor,
        experts: ExpertWeights | PackedExperts,
        chosen: Tensor,
        weights: Tensor,
        residual: Tensor | None = None,
    ) -> Tensor:
        if isinstance(experts, PackedExperts):
            return run_packed_experts(x, experts, chosen, weights, residual)
        return reference_experts.run_experts(x, experts, chosen, weights, residual)

    def choose(
        self, logits: Tensor, key: Tensor, positions: Tensor, inv_temperature: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Samples a token for each row of `logits` [samples, vocab]: the argmax of logit * inv_temperature + noise of
        (key, position), or of the logits where `inv_temperature` [samples] is 0. `mask`: packed bits of the allowed
        tokens, int32 [samples, ceil(vocab / 32)]. Returns ids [samples] int64, and flags of rows that can't be sampled
        from, [samples] bool."""
        logits = logits.float().contiguous()
        num_samples, vocab_size = logits.shape
        assert vocab_size <= MAX_VOCAB
        tokens = torch.empty(num_samples, dtype=torch.int64)
        bad = torch.empty(num_samples, dtype=torch.bool)
        self._library.quire_choose(
            self._context,
            logits.data_ptr(),
            vocab_size,
            num_samples,
            vocab_size,
            key.data_ptr(),
            positions.data_ptr(),
            inv_temperature.data_ptr(),
            _address(mask),
            0 if mask is None else mask.shape[1],
            tokens.data_ptr(),
            bad.data_ptr(),
        )
        return tokens, bad


def _reference_plan(plan: NativePlan, dtype: torch.dtype) -> reference_attention.ReferencePlan:
    return reference_attention.plan_attention(
        plan.page_table,
        plan.positions,
        plan.counts,
        plan.len_bounds,
        plan.group.page_tokens,
        plan.group.window or None,
        dtype,
    )


def _is_plain(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _are_native(*planes: Tensor | PackedPlane) -> bool:
    """Whether the attention kernels support these planes of a cache."""
    return all(
        plane.entries.is_contiguous() if isinstance(plane, PackedPlane) else _is_plain(plane) for plane in planes
    )


def _data(plane: Tensor | PackedPlane) -> int:
    return (plane.entries if isinstance(plane, PackedPlane) else plane).data_ptr()


def _form(plane: Tensor | PackedPlane) -> int:
    return plane.form.number if isinstance(plane, PackedPlane) else 0


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointer(group: GroupDesc) -> object:
    return (GroupDesc * 1)(group)
