"""The one error people see. Every room raises it; front ends map its code to a status."""

from __future__ import annotations


class QuireError(Exception):
    """What happened, why, and what to do, in one line. `code` is for machines: a front end maps it to a status."""

    def __init__(self, code: str, what: str, hint: str = "", param: str | None = None):
        super().__init__(what)
        self.code = code
        self.what = what
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.what} {self.hint}".strip()
