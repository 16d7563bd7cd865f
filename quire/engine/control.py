"""Carries out commands to a running engine: adapters now; weights, precision and sleep between steps.

Each command is a generator that the engine's thread advances between turns, until it returns its reply. Files are read
by a thread of its own, so no step waits for them. A command that changes what steps compute holds the engine first: no
step is planned until the command has ended, and requests wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.engine.adapters.registry import EngineAdapters
from quire.files.adapters import read_adapter
from quire.types import QuireError
from quire.types.control import ControlCommand, ControlReply

T = TypeVar("T")
Steps = Generator[None, None, T]
Fields = Mapping[str, Any]


class Controls:
    """The commands of one engine. Only the engine's thread calls it, but for `on_done`."""

    def __init__(self, adapters: EngineAdapters):
        self._adapters = adapters
        self._open: dict[int, Steps[dict[str, Any]]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.on_done: Callable[[], None] = lambda: None  # called by the thread when it has done its part
        self._actions: dict[str, Callable[[Fields], Steps[dict[str, Any]]]] = {
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }

    @property
    def is_open(self) -> bool:
        """Whether a command is under way."""
        return bool(self._open)

    def start(self, command: ControlCommand) -> None:
        self._open[command.number] = self._run(command)

    def add(self, action: str, run: Callable[[Fields], Steps[dict[str, Any]]]) -> None:
        """Add an action that another part of the engine carries out."""
        self._actions[action] = run

    def _run(self, command: ControlCommand) -> Steps[dict[str, Any]]:
        action = self._actions.get(command.action)
        if action is None:
            raise QuireError("unsupported_command", f"This engine can't do {command.action!r}.")
        return (yield from action(command.fields))

    def poll(self) -> list[ControlReply]:
        """Go on with all commands, and return the replies of those that have ended."""
        replies: list[ControlReply] = []
        for number, steps in list(self._open.items()):
            try:
                next(steps)
                continue
            except StopIteration as end:
                replies.append(ControlReply(number, end.value))
            except QuireError as error:
                replies.append(ControlReply(number, {}, error.code, error.what, error.hint))
            except Exception as error:  # our own mistake, in a command that has changed nothing yet
                what = f"The command failed ({type(error).__name__}: {error})."
                replies.append(ControlReply(number, {}, "command_failed", what, "The engine goes on as before."))
            del self._open[number]
        return replies

    def run_now(self, command: ControlCommand, step: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Carry out a command to its end, with `step` between its parts, and return its fields."""
        steps = self._run(command)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return dict(end.value)
            step()

    def close(self) -> None:
        self._open.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def aside(self, work: Callable[[], T]) -> Steps[T]:
        """Run `work` on the thread for slow parts."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="quire-control")
        result = self._thread.submit(work)
        result.add_done_callback(lambda _: self.on_done())
        while not result.done():
            yield
        return result.result()

    def _load_adapter(self, fields: Fields) -> Steps[dict[str, Any]]:
        digest = str(fields["digest"])

        def read() -> None:
            files = read_adapter(str(fields["path"]))
            if files.digest != digest:
                what = f"{files.path} has changed while it was loaded."
                raise QuireError("bad_adapter", what, "Load it again.", "adapter")
            self._adapters.read(files)

        yield from self.aside(read)
        self._adapters.register(digest)
        return {"digest": digest}

    def _unload_adapter(self, fields: Fields) -> Steps[dict[str, Any]]:
        yield from ()
        digest, num_users = str(fields["digest"]), self._adapters.num_users(str(fields["digest"]))
        if num_users and not fields.get("drains", True):
            what = f"{num_users} open requests use the adapter."
            raise QuireError("adapter_in_use", what, "Unload it later, or let them end (mode=drain).", "lora_name")
        return {"open": self._adapters.remove(digest)}
