"""The error type that reaches users. All packages raise it; front ends map its code to an HTTP status."""

from __future__ import annotations

# How torch's CPU allocator, cuBLAS, Triton's launcher and the system say it, in lower case.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
)


class QuireError(Exception):
    """An error with what happened, why, and what to do, in one line. `code` is stable and meant for programs."""

    def __init__(self, code: str, what: str, hint: str = "", param: str | None = None):
        super().__init__(what)
        self.code = code
        self.what = what
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.what} {self.hint}".strip()


class PromptTooLong(QuireError):
    """A prompt that exceeds the context. The counts let each API phrase the error as its clients expect it."""

    def __init__(self, count: int, limit: int, *, at_least: bool = False):
        self.count = count  # tokens of the prompt
        self.limit = limit  # maximum tokens of a prompt: one less than the context, which also holds the output
        self.at_least = at_least  # `count` is a lower bound, because encoding stopped early
        self.num_output = 1  # output tokens that the client requests
        shown = f"at least {count}" if at_least else f"{count}"
        super().__init__(
            "prompt_too_long",
            f"The prompt has {shown} tokens, the model's limit is {limit + 1} for prompt and output.",
            "Shorten the prompt, or raise max_model_len if the model allows it.",
            "prompt",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, of Python, the system, torch or a library below it, means that memory of the host or of the
    device ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(sign in text for sign in _OUT_OF_MEMORY)
