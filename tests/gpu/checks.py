"""All kernel checks by name: what `tests/gpu` runs on a GPU and `tests/cpu` under Triton's interpreter."""

from __future__ import annotations

from tests.gpu import (
    attention_checks,
    expert_checks,
    fixed_checks,
    fixed_layer_checks,
    kernel_checks,
    latent_checks,
    linear_checks,
    packed_checks,
    paged_checks,
    recurrent_checks,
    sampling_checks,
    trial_checks,
)

CHECKS = {
    **kernel_checks.CHECKS,
    **paged_checks.CHECKS,
    **packed_checks.CHECKS,
    **linear_checks.CHECKS,
    **recurrent_checks.CHECKS,
    **attention_checks.CHECKS,
    **latent_checks.CHECKS,
    **expert_checks.CHECKS,
    **sampling_checks.CHECKS,
    **fixed_checks.CHECKS,
    **fixed_layer_checks.CHECKS,
    **trial_checks.CHECKS,
}
