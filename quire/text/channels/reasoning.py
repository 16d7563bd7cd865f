"""Markers of reasoning: the known pairs, and the choice of one by a model's chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """A pair of markers around reasoning."""

    name: str
    open: str
    close: str


THINK = ReasoningStyle("think", "<think>", "</think>")
STYLES = (
    THINK,
    ReasoningStyle("mistral", "[THINK]", "[/THINK]"),
    ReasoningStyle("seed", "<seed:think>", "</seed:think>"),
    ReasoningStyle("minimax", "<mm:think>", "</mm:think>"),
    ReasoningStyle("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)


def choose_reasoning(template_source: str) -> ReasoningStyle | None:
    """The markers in a chat template's source, or None if it has none."""
    for style in STYLES:
        if style.close in template_source:
            return style
    return None


def opens_reasoning(prompt: str, style: ReasoningStyle | None) -> bool:
    """Whether the prompt ends with the opening marker, so that the output starts inside reasoning."""
    return style is not None and prompt.rstrip().endswith(style.open)


def closes_reasoning(prompt: str, style: ReasoningStyle | None) -> bool:
    """Whether the prompt ends with closed reasoning, so that the output has none."""
    return style is not None and prompt.rstrip().endswith(style.close)
