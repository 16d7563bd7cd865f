"""The agent's sandbox: every escape fails, and succeeds once the rules that stop it are taken away.

Run in all three ways: with bubblewrap, with namespaces of our own, and with Landlock and seccomp alone. A protection
that this kernel lacks is a failure with the kernel's words, not a skip.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.agent.sandbox import choose
from quire.agent.sandbox.bubblewrap import find_bubblewrap
from quire.agent.sandbox.choose import WAYS, choose_sandbox, make_scratch, plan_for
from quire.agent.sandbox.plan import SandboxPlan, check_folder, make_plan
from quire.agent.sandbox.run import FinishedCommand, run_command
from quire.types import QuireError
from tests.e2e.agent_escapes import ALL_WAYS, ESCAPES, Escape, Place, same_processes, vars_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
BUBBLEWRAP = find_bubblewrap()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A project beside a home folder with secrets, and listeners that an escape could reach."""
    folder = tmp_path_factory.mktemp("place")
    project, home = folder / "project", folder / "home"
    (project / ".git" / "hooks").mkdir(parents=True)
    (project / ".mcp.json").write_text("{}")
    (home / ".ssh").mkdir(parents=True)
    abstract = f"quire-test-{os.getpid()}"
    victim = subprocess.Popen(["sleep", "1000"])
    tcp, tcp6 = socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    hidden, service = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    hidden.bind(f"\0{abstract}")
    before = os.getcwd()
    os.chdir(home)
    try:
        service.bind("service.sock")  # a long path is no address
    finally:
        os.chdir(before)
    for one in (hidden, service):
        one.listen()

    def answer() -> None:
        while True:
            try:
                _, sender = udp.recvfrom(100)
            except OSError:
                return
            udp.sendto(b"answer", sender)

    threading.Thread(target=answer, daemon=True).start()
    ports = tcp.getsockname()[1], tcp6.getsockname()[1], udp.getsockname()[1]
    yield Place(project, home, *ports, abstract, victim.pid)
    victim.kill()
    victim.wait()
    for one in (tcp, tcp6, udp, hidden, service):
        one.close()


@pytest.fixture(autouse=True)
def fresh(place: Place) -> None:
    """What an escape may have changed in the trial without its rules is put back."""
    for path in place.home.iterdir():
        if path.name not in (".ssh", "service.sock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (place.home / ".ssh" / "id_test").write_text("SECRET\n")
    for name in ("notes", "spare"):
        (place.home / name).write_text("notes\n")
    for path in place.project.iterdir():
        if path.name not in (".git", ".mcp.json"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (place.project / ".git" / "hooks").mkdir(parents=True, exist_ok=True)
    (place.project / ".mcp.json").write_text("{}")


def attempt(escape: Escape, place: Place, way: str, *, with_rules: bool) -> FinishedCommand:
    with make_scratch() as scratch:
        plan = escape.prepare(plan_for(way, place.project, Path(scratch)), place)
        if not with_rules:
            plan = escape.without(plan, place)
        return run_shell(plan, way, filled(escape.command, place))


def filled(command: str, place: Place) -> str:
    for name, value in vars_of(place).items():
        command = command.replace("{" + name + "}", str(value))
    return command


def run_shell(plan: SandboxPlan, way: str, command: str) -> FinishedCommand:
    program = BUBBLEWRAP if way == "bubblewrap" else None
    return run_command(plan, ["/bin/bash", "-c", command], program, seconds=60)


def need(way: str) -> None:
    if way == "bubblewrap" and BUBBLEWRAP is None:
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")


def escaped(done: FinishedCommand) -> bool:
    return "ESCAPED" in done.output


TRIALS = [
    pytest.param(escape, way, id=f"{way}: {escape.name}", marks=[pytest.mark.slow] if way == "bubblewrap" else [])
    for way in ALL_WAYS
    for escape in ESCAPES
    if way in escape.ways
]


@pytest.mark.parametrize(("escape", "way"), TRIALS)
def test_an_escape_fails_and_its_rule_is_why(escape: Escape, way: str, place: Place) -> None:
    need(way)
    done = attempt(escape, place, way, with_rules=True)
    assert not escaped(done), done.output
    if way in escape.removable:
        done = attempt(escape, place, way, with_rules=False)
        assert escaped(done), f"without its rules it does not succeed either: {done.output!r} {done.note}"


def test_there_are_enough() -> None:
    assert len(ESCAPES) >= 40 and len({escape.name for escape in ESCAPES}) == len(ESCAPES)


# -- the rest of the promises


@pytest.fixture(params=ALL_WAYS)
def way(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return str(request.param)


@pytest.fixture
def plan(way: str, place: Place) -> Iterator[SandboxPlan]:
    with make_scratch() as scratch:
        yield plan_for(way, place.project, Path(scratch))


def lives(marker: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                return True
        except OSError:
            continue
    return False


def end(marker: str) -> None:
    subprocess.run(["pkill", "-9", "-f", marker], check=False)


def test_the_project_is_writable_and_programs_run(plan: SandboxPlan, way: str, place: Place) -> None:
    done = run_shell(plan, way, "echo hello > new && cat new && python3 -c 'print(6 * 7)' && ls /usr | head -1")
    assert done.exit_code == 0 and done.output.startswith("hello\n42\n") and (place.project / "new").exists()


def test_a_server_of_its_own_can_be_tested(plan: SandboxPlan, way: str) -> None:
    if way == "landlock":
        pytest.skip("without a network of its own all sockets are denied")
    command = "python3 -m http.server 8123 >/dev/null 2>&1 & for i in $(seq 50); do exec 3<>/dev/tcp/127.0.0.1/8123 " \
              "&& echo reached && break; sleep 0.1; done 2>/dev/null"  # fmt: skip
    assert "reached" in run_shell(plan, way, command).output


def test_what_runs_in_the_background_ends_with_the_call(plan: SandboxPlan, way: str, place: Place) -> None:
    marker = f"quire-left-{way}-{os.getpid()}"
    command = f"(setsid nohup bash -c 'exec -a {marker} sleep 300' >/dev/null 2>&1 &) ; sleep 0.3"
    run_shell(plan, way, command)
    assert not lives(marker)
    loose = same_processes(plan, place)
    if way != "bubblewrap":  # whose own first process ends everything
        run_shell(loose, way, command)
        try:
            assert lives(marker)  # or the test above shows nothing
        finally:
            end(marker)


def test_a_call_does_not_wait_for_what_it_left_running(plan: SandboxPlan, way: str) -> None:
    began = time.monotonic()
    done = run_shell(plan, way, "sleep 300 & echo done")
    assert done.output == "done\n" and done.exit_code == 0 and time.monotonic() - began < 60


def test_the_supervisor_can_not_be_ended(plan: SandboxPlan, way: str) -> None:
    done = run_shell(plan, way, "kill -9 $PPID; sleep 0.2; echo still here")
    assert "still here" in done.output and done.exit_code == 0


def test_everything_ends_with_quire(plan: SandboxPlan, way: str, tmp_path: Path) -> None:
    marker = f"quire-orphan-{way}-{os.getpid()}"
    code = (
        "import sys, json, threading; from pathlib import Path\n"
        "from quire.agent.sandbox.choose import plan_for; from quire.agent.sandbox.run import run_command\n"
        f"plan = plan_for({way!r}, Path({plan.folder!r}), Path({str(tmp_path)!r}))\n"
        "print('ready', flush=True)\n"
        f"run_command(plan, ['/bin/bash', '-c', 'exec -a {marker} sleep 300'], "
        f"{BUBBLEWRAP if way == 'bubblewrap' else None!r})\n"
    )
    (tmp_path / "home").mkdir()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    try:
        _until(lambda: lives(f"{marker}\0"))
        process.kill()
        process.wait()
        _until(lambda: not lives(f"{marker}\0"))
    finally:
        process.kill()
        process.wait()
        end(marker)


def test_escape_sequences_do_not_reach_a_terminal(plan: SandboxPlan, way: str) -> None:
    command = r"printf 'a\033[31mred\033[0m \033]52;c;aGk=\007\033]0;title\033\\ end\nold\rover\b\b \x9b31m \u202etxt'"
    done = run_shell(plan, way, command)
    raw = run_command(plan, ["/bin/bash", "-c", command], BUBBLEWRAP if way == "bubblewrap" else None, raw=True)
    assert "\x1b" in raw.output  # it was there
    assert done.output.startswith("ared  end\nover")
    assert not any(ord(char) < 32 and char not in "\n\t" for char in done.output)
    assert "\u202e" not in done.output and "52;c" not in done.output and "title" not in done.output


def test_binary_output_and_a_gigabyte_are_one_line_or_bounded(plan: SandboxPlan, way: str) -> None:
    assert run_shell(plan, way, "head -c 100000 /dev/urandom; head -c 90000 /dev/zero").exit_code == 0
    assert "binary output" in run_shell(plan, way, "head -c 100000 /dev/zero").output
    done = run_shell(plan, way, "yes | head -c 1000000000")
    assert done.reason == "output" and len(done.output) < 300_000 and "bytes left out" in done.output


def test_no_descriptor_of_quires_is_inherited(plan: SandboxPlan, way: str, place: Place) -> None:
    descriptor = os.open(place.home / ".ssh" / "id_test", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        done = run_shell(
            plan, way, f"ls -l /proc/$$/fd /proc/self/fd; test -e /proc/self/fd/{descriptor} && echo there"
        )
        assert "pipe" in done.output and "id_test" not in done.output and "there" not in done.output
    finally:
        os.close(descriptor)


def test_a_link_in_the_way_of_a_mount_is_refused(place: Place, tmp_path: Path) -> None:
    """A tool could leave one in the session's temporary files to lead the next call's mounts out."""
    from quire.agent.sandbox.plan import SandboxMount

    (tmp_path / "home").mkdir()
    (tmp_path / "trap").symlink_to("/old" + str(place.home))
    plan = plan_for("namespaces", place.project, tmp_path)
    inside = next(one.target for one in plan.mounts if one.source == str(tmp_path))
    trapped = replace(plan, mounts=(*plan.mounts, SandboxMount("bind", f"{inside}/trap/made", "/usr")))
    with pytest.raises(QuireError, match="is a link"):
        run_shell(trapped, "namespaces", "true")
    assert not (place.home / "made").exists()


def test_a_step_that_fails_runs_nothing(place: Place, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    plan = plan_for("namespaces", place.project, tmp_path)
    broken = replace(plan, seccomp=("no such rule",))
    with pytest.raises(QuireError, match="sandbox could not be set up"):
        run_shell(broken, "namespaces", "echo x > ran")
    assert not (place.project / "ran").exists()


def test_what_the_kernel_lacks_is_said(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    whole = choose_sandbox(place.project, tmp_path, ways=("namespaces",))
    assert whole.is_whole and "no network" in whole.describe()
    weak = choose_sandbox(place.project, tmp_path, ways=("landlock",))
    assert not weak.is_whole and "NOT protected: .git" in weak.describe()
    monkeypatch.setattr(choose, "find_bubblewrap", lambda: None)
    with pytest.raises(QuireError, match="not installed"):
        choose_sandbox(place.project, tmp_path, ways=("bubblewrap",))
    assert choose_sandbox(place.project, tmp_path, ways=WAYS).way == "namespaces"


def test_what_landlock_alone_does_not_stop_is_what_is_said(place: Place, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    sandbox = choose_sandbox(place.project, tmp_path, ways=("landlock",))
    tried = {
        ".git": "echo x > .git/hooks/made && echo ESCAPED",
        "names and sizes": "stat -c %s {home}/.ssh/id_test && echo ESCAPED",
        "modes and times": "touch -d @0 {home}/spare && chmod 600 {home}/spare && echo ESCAPED",
        "processes outside can be listed": "test -d /proc/{victim} && echo ESCAPED",
    }
    for gap, command in tried.items():
        assert escaped(run_shell(sandbox.plan, "landlock", filled(command, place))), gap
        assert any(gap in said for said in sandbox.gaps)
    assert len(sandbox.gaps) == len(tried), "this kernel's Landlock is older than version 6"


@pytest.mark.parametrize("folder", ["/", "/usr", "/etc", "/tmp", str(Path.home()), str(Path.home().parent)])
def test_a_folder_that_holds_more_than_a_project_is_refused(folder: str) -> None:
    with pytest.raises(QuireError):
        check_folder(Path(folder))


def test_the_environment_has_no_secrets_and_a_visible_path(place: Place, tmp_path: Path) -> None:
    given = {"PATH": f".:{place.home}/bin:/usr/bin", "OPENAI_API_KEY": "sk", "AWS_SECRET": "x", "HOME": "/r"}
    plan = make_plan(place.project, tmp_path, environment=given)
    assert plan.environment["PATH"].split(":") == ["/usr/bin", "/usr/local/bin", "/bin"]
    assert "sk" not in plan.environment.values() and "AWS_SECRET" not in plan.environment
    assert plan.environment["HOME"] != "/r"


def _until(holds: object) -> None:
    deadline = time.monotonic() + 30
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)
