"""The page at `/`: its files, its feed, and the whole of it in a real Chromium against a server with the stub engine.

Chromium is driven over its own debugging pipe, so nothing but the browser has to be installed; without it that part
skips.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.page.history import KEPT, History, RememberingLog
from quire.server.page.routes import STATIC
from tests.e2e.conftest import ADMIN_KEY, KEY, TEMPLATE, Started, need, start, stub_command

CHAT = "/v1/chat/completions"
OTHER_KEY = "sk-other"
NAMESPACE = "http://www.w3.org/2000/svg"  # a name: nothing is loaded from there


@pytest.fixture(scope="module")
def server(model_here: None) -> Iterator[Started]:
    """Steps that take a while, so that there is something to see and to stop."""
    keys = ("--api-key", f"{KEY},{OTHER_KEY}", "--admin-key", ADMIN_KEY)
    started = start(stub_command(*keys, "--chat-template", TEMPLATE), {"STUB_STEP_SECONDS": "0.01"})
    yield started
    started.stop()


def client_of(started: Started, key: str | None = KEY) -> Any:
    need("httpx")
    import httpx

    return httpx.Client(base_url=started.url, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=30)


def events_of(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Strict: an event is its name, one line of JSON and an empty line."""
    while True:
        name = next(lines)
        data = next(lines)
        assert name.startswith("event: ") and data.startswith("data: ") and next(lines) == "", (name, data[:80])
        yield name[7:], json.loads(data[6:])


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_files_need_no_key_and_load_nothing_from_elsewhere(server: Started) -> None:
    types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    names = sorted(path.name for path in STATIC.iterdir())
    assert "index.html" in names and all(Path(name).suffix in types for name in names)
    with client_of(server, key=None) as client:
        for path, suffix in [
            ("/", ".html"),
            ("/favicon.ico", ".svg"),
            *((f"/page/{n}", Path(n).suffix) for n in names),
        ]:
            reply = client.get(path)
            assert reply.status_code == 200 and reply.headers["content-type"].startswith(types[suffix]), path
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", reply.text.replace(NAMESPACE, ""))
            assert not addresses, (path, addresses)
            again = client.get(path, headers={"if-none-match": reply.headers["etag"]})
            assert again.status_code == 304 and not again.content
            assert client.head(path).headers["content-length"] == str(len(reply.content))
        for name in ("nothing.js", "..%2froutes.py", "routes.py", "__init__.py"):
            assert client.get(f"/page/{name}").status_code == 404
        refused = client.post("/", json={})
        assert refused.status_code == 405 and refused.headers["allow"] == "GET, HEAD"


def test_every_file_that_is_asked_for_is_there() -> None:
    for path in STATIC.iterdir():
        text = path.read_text()
        asked = re.findall(r'(?:href|src)="page/([\w.]+)"', text) + re.findall(r'from "\./([\w.]+)"', text)
        assert all((STATIC / name).is_file() for name in asked), (path.name, asked)
        assert "innerHTML" not in text and "eval(" not in text, "text becomes elements in one way only: dom.js"


# ---------------------------------------------------------------------------------------------------------------------
# The feed


def test_the_feed_needs_the_key(server: Started) -> None:
    for key in (None, "wrong"):
        with client_of(server, key) as client:
            reply = client.get("/live")
            assert reply.status_code == 401 and reply.json()["error"]["code"].endswith("_api_key")


def test_the_feed_tells_samples_and_requests(server: Started) -> None:
    with client_of(server, ADMIN_KEY) as client, client_of(server) as other:
        with client.stream("GET", "/live") as reply:
            assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
            feed = events_of(reply.iter_lines())
            name, hello = next(feed)
            assert name == "hello" and hello["model"]["names"] and hello["limits"]["max_rows"] > 0 and hello["whole"]
            name, samples = next(feed)
            first = samples[-1]
            assert name == "samples" and first["problem"] is None
            assert len(first["ttft"]) == len(hello["ttft_bounds"]) + 1
            assert len(first["tpot"]) == len(hello["tpot_bounds"]) + 1
            body = {"messages": [{"role": "user", "content": "one two three"}]}
            assert other.post(CHAT, json=body, headers={"x-request-id": "seen-me"}).status_code == 200
            assert other.post(CHAT, json={**body, "temperature": -1}, headers={"x-request-id": "bad-me"}).is_error
            seen: dict[str, Any] = {}
            last, steps = first, []
            while "bad-me" not in seen or last["sampled_tokens"] == first["sampled_tokens"]:
                name, data = next(feed)
                assert name in ("samples", "steps", "open", "requests")
                if name == "steps":
                    steps += data
                if name == "samples":
                    assert data[0]["t"] > last["t"], "each sample comes once"
                    last = data[-1]
                elif name == "requests":
                    seen |= {record["id"]: record for record in data}
            assert [step[0] for step in steps] == list(range(1, last["steps"] + 1)), "every step, each once"
            assert steps[0][1:] == [1, 1, last["prompt_tokens"], last["prompt_tokens"]], "first the prompt"
            assert all(step[1:] == [1, 0, 1, 0] for step in steps[1:]), "then one token after the other"
            good = seen["seen-me"]
            assert (good["path"], good["status"], good["completion_tokens"]) == (
                CHAT,
                200,
                4,
            )  # three words and the end
            assert good["seconds"] > 0 and seen["bad-me"]["status"] == 400
            assert (
                last["ttft"][-1] > first["ttft"][-1]
                and last["refused"] > first["refused"]
                and last["failures"] == first["failures"]
            )
        end = time.monotonic() + 20
        while other.get("/v1/stats").json()["http"]["open"] > 1:  # the reply itself is the one
            assert time.monotonic() < end, "the feed went on after its reader left"


def _own_view(server: Started, key: str) -> list[tuple[str, Any]]:
    """The feed's first events, up to the second time it tells open requests."""
    seen: list[tuple[str, Any]] = []
    with client_of(server, key) as viewer, viewer.stream("GET", "/live") as reply:
        for event in events_of(reply.iter_lines()):
            seen.append(event)
            if [name for name, _ in seen].count("open") == 2:
                break
    return seen


def test_a_key_sees_its_own_requests_and_nothing_of_others(server: Started) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 1500}], "stream": True}
    short = {"messages": [{"role": "user", "content": "one"}]}
    with client_of(server) as client, client_of(server, OTHER_KEY) as other:
        assert other.post(CHAT, json=short, headers={"x-request-id": "secret-done"}).status_code == 200
        assert client.post(CHAT, json=short, headers={"x-request-id": "mine"}).status_code == 200
        with other.stream("POST", CHAT, json=long, headers={"x-request-id": "secret-open"}) as reply:
            lines = reply.iter_lines()  # held: a reader that is gone has hung up
            next(lines)
            seen, theirs = (_own_view(server, key) for key in (KEY, OTHER_KEY))
    assert {name for name, _ in seen} == {"hello", "requests", "state", "open"}, "no counters, no steps"
    assert "secret" not in json.dumps(seen) and seen[0][1]["whole"] is False
    assert all(data == [] for name, data in seen if name == "open")
    (mine,) = [record for name, data in seen if name == "requests" for record in data if record["id"] == "mine"]
    assert mine["path"] == CHAT and "caller" not in mine
    opened = [data for name, data in theirs if name == "open"]
    assert opened[0][0]["id"].startswith("secret-open") and len(opened[0]) == 1, "of one's own all is there"
    done = [record for name, data in theirs if name == "requests" for record in data]
    assert [record["id"] for record in done] == ["secret-done"] and done[0]["seq"] == 1, "counted for itself"


def test_without_any_keys_all_is_visible(model_here: None) -> None:
    started = start(stub_command())
    try:
        with client_of(started, None) as client, client.stream("GET", "/live") as reply:
            feed = events_of(reply.iter_lines())
            assert next(feed)[1]["whole"] is True and next(feed)[0] == "samples"
    finally:
        started.stop()


def test_a_server_that_shuts_down_does_not_wait_for_pages(model_here: None) -> None:
    started = start(stub_command())
    with client_of(started) as client, client.stream("GET", "/live") as reply:
        feed = events_of(reply.iter_lines())
        next(feed)
        started.process.send_signal(signal.SIGTERM)
        assert [name for name, _ in _until_the_end(feed)][-1] == "bye"
    assert started.process.wait(20) == 0


def _until_the_end(feed: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, data in feed:
        yield name, data
        if name == "bye":
            return


class _Lines:
    """A log that keeps its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def write(self, level: str, event: str, **fields: Any) -> None:
        self.events.append(event)


def test_the_history_keeps_the_last_calls_of_the_api() -> None:
    history, lines = History(clock=lambda: 5.0), _Lines()
    log = RememberingLog(lines, history)  # type: ignore[arg-type]
    log.write("info", "reply", id="probe", method="GET", path="/metrics", status=200, seconds=0.1)
    log.write("info", "draining", open=1)
    for place in range(KEPT + 5):
        log.write("debug", "reply", id=f"r{place}", method="POST", path=CHAT, status=200, seconds=0.1, prompt_tokens=3)
    records = history.since(0)
    assert len(records) == KEPT and records[0]["id"] == "r5" and records[-1]["id"] == f"r{KEPT + 4}"
    assert records[-1]["prompt_tokens"] == 3 and records[-1]["queue_seconds"] is None and records[-1]["at"] == 5.0
    assert [record["id"] for record in history.since(records[-2]["seq"])] == [records[-1]["id"]]
    assert history.since(records[-1]["seq"]) == []
    assert len(lines.events) == KEPT + 7, "every line is passed on"


def test_the_history_tells_callers_apart() -> None:
    history, lines = History(clock=lambda: 5.0), _Lines()
    log = RememberingLog(lines, history)  # type: ignore[arg-type]
    for place, caller in enumerate((b"one", b"two", None, b"one")):
        log.write("info", "reply", id=f"r{place}", method="POST", path=CHAT, status=200, seconds=0.1, caller=caller)
    assert [(record["id"], record["seq"]) for record in history.since_of(b"one", 0)] == [("r0", 1), ("r3", 2)]
    assert [record["id"] for record in history.since_of(b"one", 1)] == ["r3"]
    assert history.since_of(None, 0) == [], "what has no key has no owner"
    assert len(history.since(0)) == 4 and all("caller" not in record for record in history.since(0))


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


class Browser:
    """One page of a headless Chromium, spoken to over the debugging pipe: JSON, each message ended by a zero byte."""

    FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
             "--window-size=1300,900", "--remote-debugging-pipe")  # fmt: skip
    # The browser reads from 3 and writes to 4.
    LAUNCHER = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"

    def __init__(self, program: str, profile: Path):
        ends = [*os.pipe(), *os.pipe()]
        their_in, self._out, self._in, their_out = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
        for end in ends:
            os.close(end)
        flags = [*self.FLAGS, f"--user-data-dir={profile}", "about:blank"]
        command = [sys.executable, "-c", self.LAUNCHER, str(their_in), str(their_out), program, *flags]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(their_in, their_out), **quiet)  # type: ignore[call-overload]
        os.close(their_in)
        os.close(their_out)
        self._rest = b""
        self._next_id = 0
        self.complaints: list[str] = []  # of the page's scripts and of the policy
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next_id:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._in, 1 << 16)
            assert chunk, "Chromium ended"
            self._rest += chunk
        frame, _, self._rest = self._rest.partition(b"\0")
        return json.loads(frame)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    def evaluate(self, script: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> Any:
        """Wait until it is true of the page; only a hang makes this fail."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, (script, self.evaluate("document.body.innerText"), self.complaints)
            time.sleep(0.02)
        return value

    def type(self, selector: str, text: str) -> None:
        focus = f"const field = document.querySelector({selector!r}); field.focus(); document.activeElement === field"
        assert self.evaluate(f"{{ {focus} }}"), f"{selector} can't be typed into"
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": (13, "\r"), "Escape": (27, "")}
        code, text = codes[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def close(self) -> None:
        os.close(self._out)  # without its pipe it ends by itself
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed; Debian's package is called chromium")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def open_page(browser: Browser, url: str, key: str | None = KEY) -> None:
    """A fresh tab's state: nothing remembered but the key."""
    browser.send("Page.navigate", url=f"{url}/healthz")
    browser.until("location.pathname === '/healthz' && document.readyState === 'complete'")
    keep = f"sessionStorage.setItem('quire.key', {key!r});" if key else ""
    browser.evaluate(f"sessionStorage.clear(); localStorage.clear(); {keep}")
    browser.complaints.clear()
    browser.send("Page.navigate", url=f"{url}/")
    browser.until("document.readyState === 'complete' && document.title.includes('Quire')")


def ask(browser: Browser, text: str) -> None:
    browser.type("#question", text)
    browser.press("Enter")


DONE = "document.querySelector('.assistant:last-child')?.dataset.state === 'done'"


def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(server: Started, browser: Browser) -> None:
    open_page(browser, server.url, key=None)
    browser.until("document.querySelector('#key-dialog').open")
    browser.type("#key-field", "wrong")
    browser.press("Enter")
    browser.until("document.querySelector('#key-why').textContent === 'The API key is not valid.'")
    browser.type("#key-field", KEY)
    browser.press("Enter")
    browser.until("document.querySelector('#status').dataset.state === 'ok'")
    assert browser.evaluate("sessionStorage.getItem('quire.key')") == KEY
    assert KEY not in browser.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")


def test_a_question_gets_a_streamed_answer(server: Started, browser: Browser) -> None:
    open_page(browser, server.url)
    browser.evaluate(
        "window.seen = new Set(); new MutationObserver(() => seen.add(document.querySelector('.assistant .markdown')"
        "?.textContent.length)).observe(document.querySelector('#log'), {subtree: true, childList: true})"
    )
    words = " ".join(["one two three four five six seven eight nine ten"] * 12)  # enough that a slow browser sees parts
    ask(browser, f"Hello **bold parrot** and `code`, <img src=x onerror=alert(1)> [bad](javascript:alert(1)) {words}")
    browser.until(DONE)
    answer = "document.querySelector('.assistant .markdown')"
    assert browser.evaluate(f"{answer}.querySelector('strong').textContent") == "bold parrot"
    assert browser.evaluate(f"{answer}.querySelector('code').textContent") == "code"
    assert browser.evaluate(f"{answer}.querySelectorAll('img, a, script').length") == 0, "markup stays text"
    assert words in browser.evaluate(f"{answer}.textContent")
    assert browser.evaluate("seen.size") > 3, "it came piece by piece"
    figures = browser.evaluate("document.querySelector('.turn-figures').textContent")
    assert "tok/s" in figures and "first token" in figures
    browser.send("Page.reload")
    browser.until("document.querySelector('.assistant strong')?.textContent === 'bold parrot'")  # kept over a reload
    assert browser.complaints == []


def test_stop_retry_and_errors_in_the_servers_words(server: Started, browser: Browser) -> None:
    open_page(browser, server.url)
    ask(browser, "word " * 1500)
    browser.until("document.querySelector('.assistant .markdown')?.textContent.length > 10")
    browser.press("Escape")
    browser.until("document.querySelector('.assistant').dataset.state === 'stopped'")
    with client_of(server) as client:
        end = time.monotonic() + 20
        while client.get("/v1/stats").json()["engine"]["running"]:
            assert time.monotonic() < end, "the engine still works for a reader that left"
    browser.type("#set-temperature", "-1")
    browser.evaluate("document.querySelector('.turn-buttons').lastChild.click()")  # retry
    browser.until("document.querySelector('.assistant').dataset.state === 'failed'")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 2
    assert "temperature" in browser.evaluate("document.querySelector('.assistant .problem').textContent")


def test_reasoning_is_folded_and_tool_calls_are_shown(server: Started, browser: Browser) -> None:
    open_page(browser, server.url)
    tools = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
    browser.evaluate("document.querySelector('.settings details').open = true")
    browser.type("#set-tools", json.dumps(tools))
    call = {"name": "weather", "arguments": {"city": "Bern"}}
    ask(browser, f"<think>Let me see.</think>I ask.<tool_call>{json.dumps(call)}</tool_call>")
    browser.until(DONE)
    assert browser.evaluate("document.querySelector('.reasoning').open") is False
    assert browser.evaluate("document.querySelector('.reasoning-text').textContent") == "Let me see."
    assert browser.evaluate("document.querySelector('.call b').textContent") == "weather"
    assert json.loads(browser.evaluate("document.querySelector('.call code').textContent")) == call["arguments"]
    browser.type(".call textarea", "sunny")
    browser.evaluate("document.querySelector('.calls .primary').click()")
    browser.until("document.querySelectorAll('.assistant').length === 2 && " + DONE)
    assert browser.evaluate("document.querySelector('.call-result pre').textContent") == "sunny"


def test_the_engine_view_asks_for_the_admin_key(server: Started, browser: Browser) -> None:
    open_page(browser, server.url)
    ask(browser, "hello")
    browser.until(DONE)
    browser.evaluate("document.querySelector('nav [data-view=requests]').click()")
    browser.until("document.querySelector('.requests a .ending')?.textContent === 'done'")
    browser.evaluate("document.querySelector('nav [data-view=engine]').click()")
    browser.until("!document.querySelector('#view-engine .locked').hidden")
    assert browser.evaluate("document.querySelector('#view-engine .figures').offsetHeight") == 0
    browser.evaluate("document.querySelector('#view-engine .locked button').click()")
    browser.until("document.querySelector('#key-dialog').open")
    browser.type("#key-field", ADMIN_KEY)
    browser.press("Enter")
    browser.until("document.querySelectorAll('#view-engine .plot svg text').length > 10")
    assert browser.evaluate("document.querySelector('#view-engine .locked').hidden")
    assert browser.complaints == []


def test_the_engine_and_request_views(server: Started, browser: Browser) -> None:
    open_page(browser, server.url, ADMIN_KEY)
    ask(browser, "some words to count")
    browser.until(DONE)
    browser.evaluate("document.querySelector('nav [data-view=engine]').click()")
    browser.until("document.querySelectorAll('#view-engine .plot svg text').length > 10")
    assert browser.evaluate("document.title") == "Engine · Quire"
    assert "of 64 rows" in browser.evaluate("document.querySelector('.figures').textContent")
    assert browser.evaluate("document.querySelector('.cache .stack').getAttribute('aria-label')").startswith("In use ")
    browser.evaluate("document.querySelector('nav [data-view=requests]').click()")
    browser.until("document.querySelector('.requests a .ending')?.textContent === 'done'")
    chosen = browser.evaluate("document.querySelector('.requests a').href.split('/').at(-1)")
    assert browser.evaluate("document.querySelector('.detail-head code').textContent") == chosen
    assert browser.evaluate("document.querySelector('.timeline .stack').children.length") >= 1
    assert browser.complaints == []


def test_rates_are_over_the_engines_own_time(server: Started, browser: Browser) -> None:
    """Signs of life that waited for a busy HTTP process arrive all at once; that is no burst of tokens."""
    open_page(browser, server.url)
    before = {"t": 100.0, "at": 80.0, "beat_age": 0.1, "steps": 10, "sampled_tokens": 40, "prompt_tokens": 0,
              "computed_tokens": 40, "busy_seconds": 1.0}  # fmt: skip
    now = {**before, "t": 100.5, "at": 100.0, "steps": 60, "sampled_tokens": 240, "computed_tokens": 240}
    script = f"import('/page/feed.js').then(({{ rates }}) => rates({json.dumps(before)}, {json.dumps(now)}, {{}}))"
    found = browser.evaluate(script)
    assert found == {"rate": 10, "prompt": 0, "decode": 4, "busy": 0, "verified": 0, "accepted": 0}


def test_it_fits_a_phone_and_follows_the_theme(server: Started, browser: Browser) -> None:
    browser.send("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    try:
        open_page(browser, server.url)
        for view in ("chat", "engine", "requests"):
            browser.evaluate(f"location.hash = {view!r}")
            browser.until(f"!document.querySelector('#view-{view}').hidden")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is too wide"
        browser.evaluate("location.hash = 'chat'")
        browser.until("!document.querySelector('#view-chat').hidden")
        assert browser.evaluate("document.querySelector('.composer').offsetHeight") < 120, "one line and its buttons"
        paper = "getComputedStyle(document.body).backgroundColor"
        colours = []
        for _ in range(3):
            colours.append(browser.evaluate(paper))
            browser.evaluate("document.querySelector('#theme').click()")
        assert colours[1] != colours[2] and colours[0] in colours[1:], "automatic, light, dark"
    finally:
        browser.send("Emulation.clearDeviceMetricsOverride")


def test_conversations_are_kept_named_and_brought_back(server: Started, browser: Browser) -> None:
    open_page(browser, server.url)
    ask(browser, "first question")
    browser.until(DONE)
    browser.evaluate("document.querySelector('#new').click()")
    browser.until("document.querySelectorAll('.turn').length === 0")
    ask(browser, "second question")
    browser.until(DONE)
    browser.evaluate("document.querySelector('#show-chats').click()")
    names = "[...document.querySelectorAll('.chat-name')].map((one) => one.textContent)"
    assert browser.evaluate(names) == ["second question", "first question"]
    browser.evaluate("document.querySelectorAll('.chat-name')[1].click()")
    browser.until("document.querySelector('.said')?.textContent === 'first question'")
    browser.evaluate("document.querySelectorAll('.chats li')[1].querySelectorAll('.chat-buttons button')[0].click()")
    browser.evaluate("document.querySelector('.chats input').value = ''")
    browser.type(".chats input", "my name")
    browser.press("Enter")
    browser.until(f"{names}.includes('my name')")
    browser.evaluate("document.querySelectorAll('.chats li')[1].querySelectorAll('.chat-buttons button')[2].click()")
    browser.until(f"{names}.length === 1")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 0
    browser.evaluate("document.querySelector('.undo button').click()")
    browser.until(f"{names}.includes('my name')")
    browser.send("Page.reload")
    browser.until("document.readyState === 'complete' && document.querySelector('#show-chats') !== null")
    browser.evaluate("document.querySelector('#show-chats').click()")
    browser.until(f"{names}.length === 2 && {names}.includes('my name')")
    assert browser.complaints == []


def test_edit_and_retry_keep_the_versions(server: Started, browser: Browser) -> None:
    open_page(browser, server.url)
    ask(browser, "one way")
    browser.until(DONE)
    browser.evaluate("document.querySelector('.turn.user footer button:last-child').click()")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 2, "nothing is lost by editing"
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('#question').value") == ""
    browser.evaluate("document.querySelector('.turn.user footer button:last-child').click()")
    browser.type("#question", " or another")
    browser.press("Enter")
    browser.until(f"document.querySelector('.said')?.textContent === 'one way or another' && {DONE}")
    assert browser.evaluate("document.querySelector('.user .versions').textContent") == "‹2 of 2›"
    browser.evaluate("document.querySelector('.user .versions button').click()")
    browser.until("document.querySelector('.said').textContent === 'one way'")
    assert browser.evaluate("document.querySelector('.assistant .markdown').textContent") == "one way"
    browser.evaluate("document.querySelector('.turn-buttons').lastChild.click()")  # retry
    browser.until(f"document.querySelector('.assistant .versions')?.textContent === '‹2 of 2›' && {DONE}")
    browser.evaluate("document.querySelector('.user .versions button:last-child').click()")
    browser.until("document.querySelector('.said').textContent === 'one way or another'")
    browser.send("Page.reload")
    browser.until("document.querySelector('.user .versions')?.textContent === '‹2 of 2›'")
    assert browser.complaints == []


def test_files_continuing_and_the_caret(server: Started, browser: Browser) -> None:
    open_page(browser, server.url)
    browser.evaluate(
        "const bag = new DataTransfer(); bag.items.add(new File(['x = 1 # one'], 'a.py'));"
        "document.querySelector('#files').files = bag.files;"
        "document.querySelector('#files').dispatchEvent(new Event('change'))"
    )
    browser.until("document.querySelector('#attached .chip')?.textContent === 'a.py ×'")
    browser.type("#set-max_tokens", "40")
    ask(browser, "```python\nreturn 'a' # b\n```\n" + "word " * 300)
    browser.until("document.querySelector('.assistant .markdown .caret') !== null")
    assert browser.evaluate("document.querySelector('.caret').parentElement.tagName") in ("P", "CODE", "DIV")
    browser.until(DONE)
    said = browser.evaluate("document.querySelector('.assistant .markdown').textContent")
    assert "x = 1" in said and browser.evaluate("document.querySelector('.said .chip').textContent") == "a.py"
    assert "cut at the token limit" in browser.evaluate("document.querySelector('.turn-figures').textContent")
    browser.evaluate(
        "[...document.querySelectorAll('.turn-buttons button')].find((b) => b.textContent === 'Continue').click()"
    )
    browser.until(f"document.querySelector('.assistant .markdown').textContent.length > {len(said)} && {DONE}")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 2
    assert browser.evaluate("document.querySelector('.code-word, .code-comment, .code-string, .code-number') !== null")
    assert browser.complaints == []


def test_a_full_context_says_what_it_left_out(model_here: None, browser: Browser) -> None:
    started = start(stub_command("--max-model-len", "400", "--chat-template", TEMPLATE, "--served-model-name", "a,b"))
    open_page(browser, started.url, key=None)
    for number in range(4):
        ask(browser, f"{number} " + "word " * 60)
        browser.until(f"document.querySelectorAll('.assistant').length === {number + 1} && {DONE}")
    shown = "document.querySelector('.assistant:last-child .dropped')"
    assert "oldest" in browser.evaluate(f"{shown}.textContent") and not browser.evaluate(f"{shown}.hidden")
    assert browser.evaluate("document.querySelectorAll('#set-model option').length") == 2
    browser.evaluate(
        "const f = document.querySelector('#set-model'); f.value = 'b'; f.dispatchEvent(new Event('change'))"
    )
    browser.evaluate(
        "const p = document.querySelector('#set-preset'); p.value = 'Precise'; p.dispatchEvent(new Event('change'))"
    )
    assert browser.evaluate("document.querySelector('#set-temperature').value") == "0"
    assert browser.evaluate("JSON.parse(sessionStorage.getItem('quire.settings')).model") == "b"
    assert browser.complaints == []
    started.stop()


@pytest.mark.parametrize("width", [360, 820, 1400])
def test_it_fits_three_widths(server: Started, browser: Browser, width: int, tmp_path: Path) -> None:
    """`SCREENSHOTS=folder` keeps pictures of every view."""
    browser.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
    try:
        open_page(browser, server.url, ADMIN_KEY)
        ask(browser, "Some **words**\n\n```python\ndef f(x):\n    return x + 1  # one\n```")
        browser.until(DONE)
        for view, script in (
            ("chat", "0"),
            ("chats", "document.querySelector('#show-chats').click()"),
            ("engine", "location.hash = 'engine'"),
            ("requests", "location.hash = 'requests'"),
        ):
            browser.evaluate(script)
            browser.until("document.querySelector('.view:not([hidden])') !== null")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is too wide"
            folder = os.environ.get("SCREENSHOTS")
            if folder:
                time.sleep(1)  # for the eye only: plots have drawn themselves
                picture = browser.send("Page.captureScreenshot", format="png")["data"]
                (Path(folder) / f"{view}-{width}.png").write_bytes(base64.b64decode(picture))
    finally:
        browser.send("Emulation.clearDeviceMetricsOverride")
