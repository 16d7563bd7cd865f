"""All kernel checks by name: what `tests/gpu` runs on a GPU and `tests/cpu` under Triton's interpreter."""

from __future__ import annotations

from tests.gpu import attention_checks, expert_checks, kernel_checks, sampling_checks

CHECKS = {**kernel_checks.CHECKS, **attention_checks.CHECKS, **expert_checks.CHECKS, **sampling_checks.CHECKS}
