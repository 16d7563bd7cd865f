"""A server with LoRA adapters: chosen by `model`, listed with their parent, loaded and unloaded, back after a crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ADMIN_KEY, Started, need, start

PROMPT = [5, 9, 17, 33, 65, 8, 7, 6]
ASK = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


class Served:
    def __init__(self, folder: Path):
        import torch
        import transformers

        from tests.cpu.lora_folders import linear_names, save_adapter
        from tests.cpu.tiny_llm import make_tiny_llm

        self.model = make_tiny_llm(folder / "model", max_position_embeddings=1024)
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        names = linear_names(reference)
        self.loras = {
            name: save_adapter(reference, folder / "loras" / name, names, rank=rank, seed=rank, spread=0.2)
            for name, rank in (("one", 4), ("two", 6), ("other", 3))
        }
        command = [
            sys.executable,
            "-m",
            "quire",
            "serve",
            str(self.model),
            "--port",
            "0",
            "--api-key",
            "key",
            "--admin-key",
            ADMIN_KEY,
            "--threads",
            "1",
            "--dtype",
            "float32",
            "--num-pages",
            "400",
            "--host-memory",
            "0",
            "--served-model-name",
            "tiny",
            "--adapter",
            f"one={self.loras['one']}",
            "--adapter-dir",
            str(folder / "loras"),
        ]
        self.started: Started = start(command)

    def client(self, key: str = "key") -> Any:
        import httpx

        return httpx.Client(base_url=self.started.url, headers={"x-api-key": key}, timeout=120)


@pytest.fixture(scope="module")
def served(model_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need("torch", "transformers", "httpx", "peft")
    found = Served(tmp_path_factory.mktemp("adapters"))
    yield found
    found.started.stop()


def say(client: Any, model: str | None, **more: Any) -> Any:
    reply = client.post("/v1/completions", json={**ASK, **({} if model is None else {"model": model}), **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def admin(served: Served, path: str, **body: Any) -> Any:
    with served.client(ADMIN_KEY) as client:
        return client.post(path, json=body)


def test_a_model_name_chooses_an_adapter(served: Served) -> None:
    with served.client() as client:
        texts = {name: say(client, name)["choices"][0]["text"] for name in ("tiny", "one")}
        assert texts["tiny"] != texts["one"]
        assert say(client, "one")["model"] == "one"
        assert say(client, None)["choices"][0]["text"] == texts["tiny"]
        chat = {"model": "one", "messages": [{"role": "user", "content": "why"}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=chat).json()["model"] == "one"
        models = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        assert models["one"]["parent"] == "tiny" and set(models) == {"tiny", "one"}
        assert client.get("/v1/models/one").json()["root"] == str(served.loras["one"])
        wrong = client.post("/v1/completions", json={**ASK, "model": "two"})
        assert wrong.status_code == 404 and "'one'" in wrong.json()["error"]["message"]


def test_adapters_come_and_go_while_it_runs(served: Served) -> None:
    with served.client() as client:
        base, one = say(client, "tiny"), say(client, "one")
        assert admin(served, "/v1/load_lora_adapter", lora_name="two", lora_path="two").status_code == 200
        two = say(client, "two")
        assert len({reply["choices"][0]["text"] for reply in (base, one, two)}) == 3
        taken = admin(served, "/v1/load_lora_adapter", lora_name="two", lora_path="other")
        assert taken.status_code == 400 and "already" in taken.json()["error"]["message"]
        again = admin(served, "/v1/load_lora_adapter", lora_name="two", lora_path="other", load_inplace=True)
        assert again.status_code == 200
        other = say(client, "two")
        assert other["choices"][0]["text"] != two["choices"][0]["text"]
        assert admin(served, "/v1/unload_lora_adapter", lora_name="two").status_code == 200
        assert client.post("/v1/completions", json={**ASK, "model": "two"}).status_code == 404
        assert say(client, "one")["choices"] == one["choices"]


@pytest.mark.parametrize(
    ("body", "status", "what"),
    [
        ({"lora_name": "bad", "lora_path": "../model"}, 403, "below"),
        ({"lora_name": "bad", "lora_path": "/etc"}, 403, "below"),
        ({"lora_name": "bad", "lora_path": "none"}, 400, "neither a folder"),
        ({"lora_name": "tiny", "lora_path": "two"}, 400, "base model"),
        ({"lora_name": "a,b", "lora_path": "two"}, 400, "not a usable adapter name"),
        ({"lora_name": "bad", "lora_path": "wrong"}, 400, "does not fit this model"),
    ],
)
def test_what_can_not_be_loaded_is_refused(served: Served, body: dict[str, str], status: int, what: str) -> None:
    wrong = served.loras["one"].parent / "wrong"
    if not wrong.exists():
        import torch
        from safetensors.torch import save_file

        shutil.copytree(served.loras["one"], wrong)
        name = "base_model.model.model.layers.77.self_attn.q_proj.lora_{}.weight"
        save_file({name.format(m): torch.zeros(4, 4) for m in "AB"}, wrong / "adapter_model.safetensors")
    refused = admin(served, "/v1/load_lora_adapter", **body)
    assert refused.status_code == status and what in refused.json()["error"]["message"], refused.text
    with served.client() as client:  # a key that is no admin key
        assert client.post("/v1/load_lora_adapter", json=body).status_code in (401, 403)
        assert {one["id"] for one in client.get("/v1/models").json()["data"]} == {"tiny", "one"}


def test_a_request_goes_on_with_its_adapter_after_a_crash(served: Served) -> None:
    with served.client() as client, served.client(ADMIN_KEY) as operator:
        assert admin(served, "/v1/load_lora_adapter", lora_name="two", lora_path="two").status_code == 200
        long = {**ASK, "max_tokens": 600, "model": "two"}
        whole = say(client, "two", max_tokens=600)["choices"][0]["text"]
        pid = operator.get("/admin/engine").json()["pid"]
        text, killed = "", False
        with client.stream("POST", "/v1/completions", json={**long, "stream": True}) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                if len(text) > 20 and not killed:
                    os.kill(pid, signal.SIGKILL)
                    killed = True
        assert killed and text == whole
        assert operator.get("/admin/engine").json()["pid"] != pid
        assert admin(served, "/v1/unload_lora_adapter", lora_name="two").status_code == 200
