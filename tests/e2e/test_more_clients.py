"""Clients that bring packages of their own versions, unchanged: Ollama's, LiteLLM, instructor, pydantic-ai, LlamaIndex,
Cohere's. `CLIENTS_PYTHON` names the Python of an environment that has them; a client that is missing there is skipped.

    python -m venv v
    v/bin/pip install ollama litellm instructor 'pydantic-ai-slim[openai]' llama-index-llms-openai-like cohere
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, Started

PYTHON = os.environ.get("CLIENTS_PYTHON")
CALL = '<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>'
OLLAMA = f"""
import ollama
client = ollama.Client(host=URL, headers={{"authorization": "Bearer " + KEY}})
said = [{{"role": "user", "content": "one two"}}]
assert client.chat("parrot", said).message.content == "one two"
parts = [part.message.content for part in client.chat("parrot", said, stream=True)]
assert "".join(parts) == "one two" and len(parts) > 1
def f(a: int) -> int:
    "Adds."
    return a
call = client.chat("parrot", [{{"role": "user", "content": '''{CALL}'''}}], tools=[f]).message.tool_calls[0]
assert (call.function.name, call.function.arguments) == ("f", {{"a": 1}})
assert client.generate("parrot", "one two", options={{"num_predict": 1}}).response == "one"
assert len(client.embed("parrot", ["a", "b"]).embeddings) == 2
assert client.list().models[0].model == "parrot" and "tools" in client.show("parrot").capabilities
assert client.ps().models[0].context_length == 2048
try:
    client.chat("other", said)
    raise AssertionError
except ollama.ResponseError as error:
    assert error.status_code == 404 and "not served here" in error.error
"""
LITELLM = """
import litellm
more = dict(api_base=URL + "/v1", api_key=KEY)
said = [{"role": "user", "content": "one two"}]
reply = litellm.completion("openai/parrot", said, **more)
assert reply.choices[0].message.content == "one two"
parts = [part.choices[0].delta.content or "" for part in litellm.completion("openai/parrot", said, stream=True, **more)]
assert "".join(parts) == "one two"
vllm = litellm.completion("hosted_vllm/parrot", said, extra_body={"top_k": -1}, **more)
assert vllm.choices[0].message.content == "one two"
try:
    litellm.completion("openai/parrot", [{"role": "user", "content": "word " * 3000}], **more)
    raise AssertionError
except litellm.ContextWindowExceededError:
    pass
"""
# The stub engine has no grammars, which instructor's other modes ask for.
INSTRUCTOR = """
import instructor, openai, pydantic
class Person(pydantic.BaseModel):
    name: str
    age: int
client = instructor.from_openai(openai.OpenAI(base_url=URL + "/v1", api_key=KEY), mode=instructor.Mode.MD_JSON)
said = '```json\\n{"name": "Ann", "age": 3}\\n```'
person = client.chat.completions.create(model="parrot", response_model=Person, max_retries=0,
                                        messages=[{"role": "user", "content": said}])
assert (person.name, person.age) == ("Ann", 3)
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("parrot", provider=OpenAIProvider(base_url=URL + "/v1", api_key=KEY))
assert Agent(model).run_sync("one two").output == "one two"
"""
LLAMA_INDEX = """
from llama_index.llms.openai_like import OpenAILike
from llama_index.core.llms import ChatMessage
llm = OpenAILike(model="parrot", api_base=URL + "/v1", api_key=KEY, is_chat_model=True, context_window=2048)
assert llm.chat([ChatMessage(role="user", content="one two")]).message.content == "one two"
assert "".join(part.delta or "" for part in llm.stream_chat([ChatMessage(role="user", content="one two")])) == "one two"
"""
CLIENTS = {
    "ollama": OLLAMA,
    "litellm": LITELLM,
    "instructor": INSTRUCTOR,
    "pydantic_ai": PYDANTIC_AI,
    "llama_index.llms.openai_like": LLAMA_INDEX,
}


@pytest.mark.slow
@pytest.mark.parametrize("package", list(CLIENTS))
def test_a_client_unchanged(stub: Started, package: str, tmp_path: Path) -> None:
    if PYTHON is None:
        pytest.skip("CLIENTS_PYTHON names no Python with the clients; this file's first lines say how to make one")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYTHON, "-c", script], env=env, cwd=tmp_path, text=True, capture_output=True, timeout=300
        )

    if run(f"import {package}").returncode:
        pytest.skip(f"{package} is not in that environment")
    done = run(f"URL, KEY = {stub.url!r}, {KEY!r}\n{CLIENTS[package]}")
    assert done.returncode == 0, done.stderr[-3000:]
