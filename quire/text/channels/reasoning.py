"""How models mark their reasoning: the pairs of markers we know, and which one a chat template teaches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
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
    """The markers a chat template teaches its model, read off the template's source; None: it teaches none."""
    for style in STYLES:
        if style.close in template_source:
            return style
    return None


def opens_reasoning(prompt: str, style: ReasoningStyle | None) -> bool:
    """Did the prompt already open the reasoning, so that the model starts inside it?"""
    return style is not None and prompt.rstrip().endswith(style.open)


def closes_reasoning(prompt: str, style: ReasoningStyle | None) -> bool:
    """Did the prompt already open and close the reasoning, so that the model answers without any?"""
    return style is not None and prompt.rstrip().endswith(style.close)
