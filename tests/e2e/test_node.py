"""The clients of the other language everyone uses: OpenAI's and Anthropic's npm packages."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, Started
from tests.e2e.test_openai import CALL

SCRIPT = Path(__file__).with_name("node_clients.cjs")
HELLO, ARGUMENTS = "Hello there, parrot!", {"city": "Bern", "days": 2}


def test_node_clients(stub: Started) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    for package in ("openai", "@anthropic-ai/sdk"):
        found = subprocess.run([node, "-e", f"require({package!r})"], capture_output=True, cwd=SCRIPT.parent)
        if found.returncode:
            pytest.skip(f"the npm package {package} is not installed; NODE_PATH may say where it is")
    done = subprocess.run([node, str(SCRIPT), stub.url, KEY, CALL], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    openai, anthropic = said["openai"], said["anthropic"]
    assert openai["whole"] == openai["streamed"] == openai["response"] == HELLO
    assert json.loads(openai["called"]) == json.loads(openai["argumentsText"]) == ARGUMENTS
    assert anthropic["whole"] == anthropic["streamed"] == HELLO and anthropic["stop"] == "end_turn"
    assert anthropic["called"] == ARGUMENTS and anthropic["reason"] == "tool_use"
    assert openai["refused"] == anthropic["refused"] == 404
