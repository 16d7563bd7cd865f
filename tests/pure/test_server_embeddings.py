"""`/v1/embeddings` pools as the model's own files say, and tells how it did."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")

from tests.fuzz.fake_server import FakeServer


def embed(tmp_path: Path, config: dict[str, Any] | None, knobs: dict[str, Any], **fields: Any) -> tuple[int, Any]:
    async def run() -> tuple[int, bytes]:
        server = FakeServer(tmp_path, **knobs)
        if config is not None:
            (tmp_path / "served" / "1_Pooling").mkdir()
            (tmp_path / "served" / "1_Pooling" / "config.json").write_text(json.dumps(config))
            modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
            (tmp_path / "served" / "modules.json").write_text(json.dumps(modules))
        body = {"input": "hello", "encoding_format": "float", **fields}
        return await server.post("/v1/embeddings", json.dumps(body).encode())

    status, body = asyncio.run(run())
    return status, json.loads(body)


@pytest.mark.parametrize(
    "config,knobs,fields,told",
    [
        (None, {}, {}, ("last", True, "assumed")),
        ({"pooling_mode_mean_tokens": True}, {}, {}, ("mean", False, "model")),
        ({"pooling_mode_lasttoken": True}, {}, {"normalize": True}, ("last", True, "model")),
        ({"pooling_mode_lasttoken": True}, {"pooling": "mean"}, {}, ("mean", False, "server")),
        ({"pooling_mode_cls_token": True}, {}, {"pooling": "mean"}, ("mean", False, "request")),
    ],
)
def test_the_reply_says_how(
    tmp_path: Path, config: Any, knobs: dict[str, Any], fields: dict[str, Any], told: tuple[str, bool, str]
) -> None:
    status, body = embed(tmp_path, config, knobs, **fields)
    assert status == 200, body
    assert tuple(body["pooling"].values()) == told
    assert (body["data"][0]["embedding"] == [1.0, 2.0]) == (not told[1])


def test_a_pooling_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    status, body = embed(tmp_path, {"pooling_mode_cls_token": True}, {})
    assert status == 400 and (body["error"]["code"], body["error"]["param"]) == ("unsupported_pooling", "pooling")
