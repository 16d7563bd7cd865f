"""Markers of reasoning and of the answer after it: what templates are known to write, and how a prompt ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """A pair of markers around reasoning."""

    name: str
    open: str
    close: str


@dataclass(frozen=True, slots=True)
class AnswerMarkers:
    """Texts around the final answer. They are no part of it, and may be missing."""

    open: str = ""
    close: str = ""


NO_MARKERS = AnswerMarkers()
THINK = ReasoningStyle("think", "<think>", "</think>")
STYLES = (
    THINK,
    ReasoningStyle("mistral", "[THINK]", "[/THINK]"),
    ReasoningStyle("seed", "<seed:think>", "</seed:think>"),
    ReasoningStyle("minimax", "<mm:think>", "</mm:think>"),
    ReasoningStyle("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningStyle("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)


def choose_reasoning(template_source: str) -> ReasoningStyle | None:
    """The known markers in a chat template's source, or None if it has none."""
    for style in STYLES:
        if style.close in template_source:
            return style
    return None


def opens_reasoning(prompt: str, style: ReasoningStyle | None) -> bool:
    """Whether the prompt ends with the opening marker, so that the output starts inside reasoning."""
    return style is not None and prompt.rstrip().endswith(style.open.rstrip())


def closes_reasoning(prompt: str, style: ReasoningStyle | None) -> bool:
    """Whether the prompt ends with closed reasoning, so that the output has none."""
    return style is not None and prompt.rstrip().endswith(style.close.rstrip())
