"""Stands in for `quire.startup.dry_run` where there is no torch: the settings say what it tells, how it ends, and what
its workers do. `python -m tests.pure.ahead_stand_in <sockets>`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from quire.startup.compile_ahead import END, NEEDED
from quire.startup.compile_workers import end_with_parent, fork_workers


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.stdin.readline())

    def work(job: dict[str, Any]) -> None:
        if settings.get("work") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif settings.get("work") == "hang" or job["name"] == settings.get("endless"):
            signal.pause()
        elif settings.get("work") == "raise":
            raise RuntimeError("no such kernel")
        Path(settings["folder"], job["name"]).touch()

    workers = fork_workers([int(fd) for fd in sys.argv[1:]], lambda index: None, work)
    threading.Thread(target=end_with_parent, args=(workers,)).start()
    seen = {"settings": settings, "variables": sorted(os.environ), "pids": [os.getpid(), *workers]}
    Path(settings["folder"], "seen.json").write_text(json.dumps(seen))
    for name in [*settings.get("tell", ()), *([NEEDED, *settings["later"]] if "later" in settings else [])]:
        kernel = json.dumps({"module": "m", "name": name, "data": "", "target": ["cuda", 90, 32]})
        print(NEEDED if name == NEEDED else kernel, flush=True)
    end = settings.get("end", "say")
    if end == "say":
        print(END, flush=True)
    elif end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "babble":
        print("Loading ...", flush=True)


if __name__ == "__main__":
    main()
