"""The error of a checkpoint whose tensors do not fit its config, for all readers of weights."""

from __future__ import annotations

import re

from quire.types import QuireError

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\..*")


def bad_weights(what: str) -> QuireError:
    return QuireError("bad_weights", f"{what}.", "The weights do not belong to this config; fetch both again.")


def missing_weights(where: str, names: list[str]) -> QuireError:
    return bad_weights(f"{where} lacks {_name_experts(names) or name_some(names)}")


def name_some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"


def _name_experts(names: list[str]) -> str:
    """Names the missing experts by layer; empty if other tensors are missing, too."""
    found = [_EXPERT.fullmatch(name) for name in names]
    layers: dict[str, list[int]] = {}
    for match in found:
        if match is None:
            return ""
        layers.setdefault(match[1], []).append(int(match[2]))
    spelled = [f"{_name_numbers(sorted(set(experts)))} of {layer}" for layer, experts in layers.items()]
    return "; ".join(spelled[:3]) + (f" and experts of {len(spelled) - 3} more layers" if len(spelled) > 3 else "")


def _name_numbers(experts: list[int]) -> str:
    more = f" and {len(experts) - 8} more" if len(experts) > 8 else ""
    return f"expert{'s' if len(experts) > 1 else ''} {', '.join(map(str, experts[:8]))}{more}"
