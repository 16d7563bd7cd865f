"""The clients of the other language everyone uses: OpenAI's and Anthropic's npm packages."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started
from tests.e2e.test_openai import CALL

SCRIPT = Path(__file__).with_name("node_clients.cjs")
HELLO, ARGUMENTS = "Hello there, parrot!", {"city": "Bern", "days": 2}


def run_clients(started: Started, call: str, *model: str) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    for package in ("openai", "@anthropic-ai/sdk"):
        found = subprocess.run([node, "-e", f"require({package!r})"], capture_output=True, cwd=SCRIPT.parent)
        if found.returncode:
            pytest.skip(f"the npm package {package} is not installed; NODE_PATH may say where it is")
    command = [node, str(SCRIPT), started.url, KEY, call, *model]
    done = subprocess.run(command, text=True, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_real_model(real: Started) -> None:
    said = run_clients(real, "What is the weather in Bern? Use the tool.", "smollm2")
    openai, anthropic = said["openai"], said["anthropic"]
    assert openai["whole"] and openai["whole"] == openai["streamed"] == openai["response"]
    assert anthropic["whole"] == anthropic["streamed"] == openai["whole"] and anthropic["stop"] == "max_tokens"
    assert json.loads(openai["called"]) == json.loads(openai["argumentsText"]) == anthropic["called"]
    assert isinstance(anthropic["called"], dict) and anthropic["reason"] == "tool_use"
    assert openai["refused"] == anthropic["refused"] == 404


def test_node_clients(stub: Started) -> None:
    said = run_clients(stub, CALL)
    openai, anthropic = said["openai"], said["anthropic"]
    assert openai["whole"] == openai["streamed"] == openai["response"] == HELLO
    assert json.loads(openai["called"]) == json.loads(openai["argumentsText"]) == ARGUMENTS
    assert anthropic["whole"] == anthropic["streamed"] == HELLO and anthropic["stop"] == "end_turn"
    assert anthropic["called"] == ARGUMENTS and anthropic["reason"] == "tool_use"
    assert openai["refused"] == anthropic["refused"] == 404
