"""The texts that calibration and the report read: a user's own, or the documentation that every Python has."""

from __future__ import annotations

from pathlib import Path

from quire.types import QuireError

MAX_BYTES = 256 << 20


def read_text(path: Path, param: str) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            what = f"{path} has more than {MAX_BYTES >> 20} MB."
            raise QuireError("invalid_parameter", what, "Give a shorter text.", param=param)
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        what = f"{path} is not UTF-8 text."
        raise QuireError("invalid_parameter", what, "Give a text, or a GGUF file of llama-imatrix.", param) from None
    except OSError as error:
        what = f"{path} can't be read ({error.strerror})."
        raise QuireError("invalid_parameter", what, "Check the path.", param=param) from None


def builtin_text() -> str:
    """Returns Python's own documentation of its language: some 600,000 characters of English and code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def for_calibration() -> str:
    """Returns the first half of the built-in text; `for_report` has the other half."""
    text = builtin_text()
    return text[: len(text) // 2]


def for_report() -> str:
    text = builtin_text()
    return text[len(text) // 2 :]
