"""The built-in trace: a coding session of three turns on a small project, with reads, edits, test runs and their times.

Its files are made from a list of operations, so that they are of a usual length and the same everywhere.
"""

from __future__ import annotations

import json
from typing import Any

from quire.agent.session.records import Record

NAME = "coding session (built in)"
TOOLS = ("shell", "read_file", "write_file", "edit_file", "list", "search")
_SYSTEM = """You are a careful assistant that works in a terminal, in the folder /home/user/ledger, on Linux.

- Use the tools to look, change and run things. Do not guess what a file holds: read it.
- Make the smallest change that does what was asked. Afterwards check it: run the tests, or run the program.
- If a call fails, read its message, and try another way instead of the same call again.
- Answer briefly, in Markdown. Say what you did and what you did not do.

The project says in AGENTS.md:

Run the tests with `python -m pytest -q`. Amounts are integers of cents. Public functions have docstrings."""
_OPERATIONS = (
    ("deposit", "amount", "adds an amount to the balance", "+="),
    ("withdraw", "amount", "takes an amount from the balance", "-="),
    ("add_fee", "cents", "takes a fee, whatever the balance is", "-="),
    ("add_interest", "cents", "adds interest that was computed elsewhere", "+="),
    ("refund", "amount", "gives an amount back to the customer", "+="),
    ("charge_back", "amount", "takes a disputed amount back", "-="),
)


def coding_session() -> list[Record]:
    """Returns the records of the session, in the form of a session's file."""
    session = _Session()
    session.user("The test of transfers fails. Find out why and fix it.")
    session.calls([("list", {"path": "."}), ("shell", {"command": "python -m pytest -q"})], 46)
    session.results([(_LISTING, 0.05), (_failure("test_transfer_keeps_the_sum", 61), 1.9)])
    session.calls([("read_file", {"path": "ledger.py"}), ("read_file", {"path": "tests/test_ledger.py"})], 58)
    session.results([(_numbered(_ledger()), 0.06), (_numbered(_tests()), 0.06)])
    old, new = "target.balance -= amount", "target.balance += amount"
    session.calls([("edit_file", {"path": "ledger.py", "old": old, "new": new})], 84)
    session.results([("ledger.py: 1 replaced", 0.05)])
    session.calls([("shell", {"command": "python -m pytest -q"})], 31)
    session.results([("........                                     [100%]\n8 passed in 0.21s", 1.4)])
    session.answer("`transfer` took the amount from both accounts. It now adds it to the target; all 8 tests pass.", 27)

    session.user("Refuse a withdrawal that would leave less than nothing, and test that.")
    session.calls([("search", {"pattern": "def withdraw|class .*Error", "path": "."})], 40)
    session.results(
        [("ledger.py:9:class LedgerError(Exception):\nledger.py:38:    def withdraw(self, amount: int)", 0.08)]
    )
    guard = "        if self.balance - amount < 0:\n            raise LedgerError('the balance is too low')\n"
    session.calls([("edit_file", {"path": "ledger.py", "old": "        self.balance -= amount", "new": guard})], 112)
    session.results([("`old` stands there 3 times. Give more of the lines around it.", 0.05)])
    session.calls([("edit_file", {"path": "ledger.py", "old": "takes an amount from", "new": guard})], 131)
    session.results([("ledger.py: 1 replaced", 0.05)])
    test = "def test_withdrawal_of_too_much():\n    with pytest.raises(LedgerError):\n        Account(5).withdraw(6)\n"
    session.calls([("write_file", {"path": "tests/test_withdraw.py", "content": test})], 96)
    session.results([("tests/test_withdraw.py: 3 lines written", 0.05)])
    session.calls([("shell", {"command": "python -m pytest -q"})], 30)
    session.results([(_failure("test_withdrawal_of_too_much", 12), 1.6)])
    session.calls([("edit_file", {"path": "tests/test_withdraw.py", "old": "def test", "new": "import pytest\n"})], 88)
    session.results([("tests/test_withdraw.py: 1 replaced", 0.05)])
    session.calls([("shell", {"command": "python -m pytest -q"})], 30)
    session.results([(".........                                    [100%]\n9 passed in 0.24s", 1.5)])
    session.answer("Withdrawals that leave less than nothing raise `LedgerError`; a test shows it. All 9 pass.", 32)

    session.user("Write a short section for the README about errors.")
    session.calls([("read_file", {"path": "README.md"})], 26)
    session.results([(_numbered(_readme()), 0.05)])
    session.calls([("edit_file", {"path": "README.md", "old": "## Files", "new": "## Errors\n\n## Files"})], 121)
    session.results([("README.md: 1 replaced", 0.05)])
    session.answer("The README has a section on errors, before the one on files.", 19)
    return session.records


class _Session:
    def __init__(self) -> None:
        self.records: list[Record] = [
            {
                "type": "session",
                "version": 1,
                "id": "coding",
                "folder": "/home/user/ledger",
                "model": "any",
                "system": _SYSTEM,
                "tools": list(TOOLS),
            },
        ]
        self._open: list[tuple[str, str]] = []  # ids and names of calls

    def user(self, text: str) -> None:
        self.records.append({"type": "message", "message": {"role": "user", "content": text}})

    def answer(self, text: str, tokens: int) -> None:
        message = {"role": "assistant", "content": text}
        self.records.append({"type": "message", "message": message, "usage": {"output_tokens": tokens}})

    def calls(self, calls: list[tuple[str, dict[str, Any]]], tokens: int) -> None:
        made: list[dict[str, Any]] = []
        for name, arguments in calls:
            call_id = f"call_{len(self.records)}_{len(made)}"
            self._open.append((call_id, name))
            function = {"name": name, "arguments": json.dumps(arguments)}
            made.append({"id": call_id, "type": "function", "function": function})
        message = {"role": "assistant", "content": "", "tool_calls": made}
        self.records.append({"type": "message", "message": message, "usage": {"output_tokens": tokens}})

    def results(self, results: list[tuple[str, float]]) -> None:
        for (call_id, name), (content, seconds) in zip(self._open, results, strict=True):
            self.records.append({"type": "result", "id": call_id, "name": name, "content": content, "seconds": seconds})
        self._open.clear()


_LISTING = "AGENTS.md\nREADME.md\nledger.py\npyproject.toml\ntests/\ntests/test_ledger.py"


def _numbered(text: str) -> str:
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(text.splitlines(), 1))


def _failure(test: str, line: int) -> str:
    return "\n".join(
        (
            f"=================== FAILURES ===================\n_______________ {test} _______________",
            f"tests/test_ledger.py:{line}: in {test}\n    assert first.balance + second.balance == 150",
            "E   assert 50 == 150\nE    +  where 50 = <ledger.Account object>.balance",
            f"FAILED tests/test_ledger.py::{test} - assert 50 == 150\n1 failed, 7 passed in 0.27s\n[exit code 1]",
        )
    )


def _ledger() -> str:
    parts = [
        '"""Accounts whose amounts are integers of cents."""',
        "",
        "import datetime",
        "",
        "",
        "class LedgerError(Exception):",
        '    """What the ledger refuses."""',
        "",
        "",
        "class Account:",
        "    def __init__(self, balance: int = 0) -> None:",
        "        self.balance = balance",
        "        self.entries: list[tuple[datetime.datetime, str, int]] = []",
        "",
    ]
    for name, argument, what, sign in _OPERATIONS:
        parts += [
            f"    def {name}(self, {argument}: int) -> None:",
            f'        """This {what}. Raises `LedgerError` for an amount that is not above zero."""',
            f"        if {argument} <= 0:",
            f"            raise LedgerError(f'{{{argument}}} is not above zero')",
            f"        self.balance {sign} {argument}",
            f"        self.entries.append((datetime.datetime.now(), {name!r}, {argument}))",
            "",
        ]
    parts += [
        "",
        "def transfer(source: Account, target: Account, amount: int) -> None:",
        '    """Moves an amount from one account to another; both have an entry of it afterwards."""',
        "    source.balance -= amount",
        "    target.balance -= amount",
    ]
    return "\n".join(parts)


def _tests() -> str:
    parts = ["from ledger import Account, transfer", ""]
    for name, _, what, sign in _OPERATIONS:
        parts += [
            "",
            f"def test_{name}() -> None:",
            f'    """It {what}."""',
            "    account = Account(100)",
            f"    account.{name}(30)",
            f"    assert account.balance == {130 if sign == '+=' else 70}",
            f"    assert account.entries[-1][1] == {name!r}",
            "",
        ]
    parts += [
        "",
        "def test_transfer_keeps_the_sum() -> None:",
        "    first, second = Account(100), Account(50)",
        "    transfer(first, second, 50)",
        "    assert first.balance + second.balance == 150",
    ]
    return "\n".join(parts)


def _readme() -> str:
    listed = "\n".join(f"- `{name}({argument})` {what}." for name, argument, what, _ in _OPERATIONS)
    return f"# Ledger\n\nA small ledger for tests and examples.\n\n## Operations\n\n{listed}\n\n## Files\n\n- ledger.py"
