"""Mistral: a window in every layer."""

from __future__ import annotations

from transformers import MistralConfig

from tests.cpu.families.harness import TINY, Family

FAMILIES = [Family("mistral", lambda: MistralConfig(**TINY, sliding_window=11))]
