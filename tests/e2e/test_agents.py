"""Programs people already have, pointed at `quire serve` the way docs/server.md says: LangChain, Claude Code, Codex.

They are large and not among our dependencies, so each test skips where its program is not here: `pip install
langchain-openai langchain-anthropic` for LangChain, `npm install @anthropic-ai/claude-code @openai/codex` and
AGENTS=node_modules/.bin for the others.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import KEY, TEMPLATE, Started, start, stub_command

pytestmark = pytest.mark.slow
QUESTION = "What is the capital of France?"
CITY = {"title": "City", "description": "A city.", "type": "object", "required": ["name"],
        "properties": {"name": {"enum": ["Paris", "Rome"]}}, "additionalProperties": False}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# LangChain, with the real small model


def need_package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"LangChain is not here: pip install {name.replace('_', '-')}")


@pytest.fixture(scope="module", params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest, real: Started) -> Any:
    """LangChain's chat model over each of the three APIs."""
    options: dict[str, Any] = {"model": "smollm2", "api_key": KEY, "max_retries": 0, "temperature": 0.0}
    if request.param == "messages":
        need_package("langchain_anthropic")
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(**options, base_url=real.url, max_tokens=48)
    need_package("langchain_openai")
    from langchain_openai import ChatOpenAI

    by_responses = request.param == "responses"
    return ChatOpenAI(**options, base_url=f"{real.url}/v1", max_completion_tokens=48, use_responses_api=by_responses)


def test_langchain_answers_and_streams(model: Any) -> None:
    messages = [("system", "You answer in one sentence."), ("human", QUESTION)]
    answer = model.invoke(messages)
    assert "Paris" in answer.text
    assert answer.usage_metadata["input_tokens"] > 10 and answer.usage_metadata["output_tokens"] > 1
    chunks = list(model.stream(messages))
    assert len(chunks) > 3 and "".join(chunk.text for chunk in chunks) == answer.text


def test_langchain_calls_tools(model: Any) -> None:
    """One that it is made to call; then the conversation goes on with what the tool said."""
    bound = model.bind_tools([CITY], tool_choice="any")
    answer = bound.invoke(QUESTION)
    call = answer.tool_calls[0]
    assert call["name"] == "City" and call["args"]["name"] in ("Paris", "Rome")
    result = {"role": "tool", "content": "Two million people.", "tool_call_id": call["id"]}
    after = model.invoke([("human", QUESTION), answer, result, ("human", "How many people live there?")])
    assert after.text


def test_langchain_structures_output(model: Any) -> None:
    assert model.with_structured_output(CITY).invoke(QUESTION)["name"] in ("Paris", "Rome")


def test_langchain_embeds(real: Started) -> None:
    need_package("langchain_openai")
    from langchain_openai import OpenAIEmbeddings

    # Otherwise it cuts texts into the tokens of OpenAI's own models.
    embeddings = OpenAIEmbeddings(model="smollm2", api_key=KEY, base_url=f"{real.url}/v1",
                                  check_embedding_ctx_length=False)  # fmt: skip
    one, other = embeddings.embed_documents(["The sky is blue.", "Bees make honey."])
    assert len(one) == len(other) == 576 and one != other


# ---------------------------------------------------------------------------------------------------------------------
# Agents for the terminal, with the stub that repeats: their prompts are too long for a model on a small machine


@pytest.fixture(scope="module")
def long_stub(model_here: None) -> Iterator[Started]:
    flags = ("--api-key", KEY, "--max-model-len", "200000", "--num-pages", "40000", "--chat-template", TEMPLATE,
             "--served-model-name", "*")  # fmt: skip
    started = start(stub_command(*flags))
    yield started
    started.stop()


def find_program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("AGENTS")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: install it, or name its folder in AGENTS")
    return found


def run_agent(command: list[str], home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """With a home of its own, so that it neither sees nor leaves anything in a person's."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "TMPDIR")}
    return subprocess.run(command, env={**kept, "HOME": str(home), **env}, cwd=home, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def run_claude(server: Started, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = run_agent([find_program("claude"), "-p", *arguments], home, ANTHROPIC_BASE_URL=server.url,
                     ANTHROPIC_AUTH_TOKEN=KEY, ANTHROPIC_MODEL="parrot",
                     CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")  # fmt: skip
    assert not [line for line in server.lines if "/v1/messages" in line and ("status=4" in line or "status=5" in line)]
    return done


def test_claude_code_answers(long_stub: Started, tmp_path: Path) -> None:
    done = run_claude(long_stub, tmp_path, "Say marmalade.")
    assert done.returncode == 0 and "marmalade" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_claude_code_uses_tools(long_stub: Started, tmp_path: Path) -> None:
    """The stub says what it hears: a call, which Claude Code carries out, and says again until it is out of turns."""
    made = tmp_path / "made.txt"
    call = {"name": "Write", "arguments": {"file_path": str(made), "content": "jam"}}
    said = f"<tool_call>{json.dumps(call)}</tool_call>"
    done = run_claude(long_stub, tmp_path, said, "--allowedTools", "Write", "--max-turns", "2")
    assert made.exists() and made.read_text() == "jam", done.stdout[-2000:] + done.stderr[-2000:]


def test_codex(long_stub: Started, tmp_path: Path) -> None:
    program = find_program("codex")
    folder = tmp_path / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "parrot"\nmodel_provider = "quire"\nweb_search = "disabled"\n'
        f'[model_providers.quire]\nname = "Quire"\nbase_url = "{long_stub.url}/v1"\n'
        'wire_api = "responses"\nenv_key = "QUIRE_API_KEY"\n'
    )
    command = [program, "exec", "--skip-git-repo-check", "Say marmalade."]
    done = run_agent(command, tmp_path, QUIRE_API_KEY=KEY)
    assert done.returncode == 0 and "marmalade" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert not [line for line in long_stub.lines if "POST /v1/responses" in line and "status=4" in line]
