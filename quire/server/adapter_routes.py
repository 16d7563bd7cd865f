"""Routes that load and unload LoRA adapters while the server runs, under the names that vLLM's clients know.

They take the admin key. An adapter's files must be below the folder that `--adapter-dir` names.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from quire.files.adapters import AdapterFiles, read_adapter
from quire.server.http.errors import ApiError, bad_request
from quire.server.http.route_parts import api_router
from quire.server.schemas import Body
from quire.server.state import Server

AdapterName = Annotated[str, Field(min_length=1, max_length=200)]


class LoadBody(Body):
    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False  # another adapter may have the name; its open requests go on with it


class UnloadBody(Body):
    lora_name: AdapterName
    lora_int_id: int | None = None  # of vLLM's clients; the name says which
    mode: Literal["drain", "refuse"] = "drain"  # what to do while requests use it


def adapters_router(server: Server) -> APIRouter:
    router = api_router(server, "Adapters", "openai")
    lock = asyncio.Lock()  # one change at a time

    @router.post("/v1/load_lora_adapter")
    async def load(body: LoadBody) -> dict[str, Any]:
        """Load an adapter; requests choose it as their `model`."""
        async with lock:
            names = server.edge.adapters
            names.check_free(body.lora_name, replaces=body.load_inplace)
            path = _allowed(server, body.lora_path)
            files = await asyncio.to_thread(read_adapter, path)
            for replica in server.fleet.replicas:
                await replica.supervisor.control("load_adapter", path=str(files.path), digest=files.digest)
            before = names.put(body.lora_name, files)
            if before is not None:
                await _drop(server, before)
            server.log.write("info", "adapter loaded", name=body.lora_name, digest=files.digest, path=str(files.path))
        return {"status": "success", "lora_name": body.lora_name, "digest": files.digest}

    @router.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadBody) -> dict[str, Any]:
        """Remove an adapter. Open requests go on with it to their end, unless `mode` is refuse."""
        async with lock:
            names = server.edge.adapters
            files = names[body.lora_name]
            users = sum(live.request.adapter == files.digest for _, live in server.fleet.live())
            if users and body.mode == "refuse":
                what = f"{users} open requests use the adapter {body.lora_name!r}."
                raise ApiError(409, "adapter_in_use", what + " Unload it later, or with mode=drain.", "lora_name")
            names.remove(body.lora_name)
            await _drop(server, files)
            server.log.write("info", "adapter unloaded", name=body.lora_name, digest=files.digest, open=users)
        return {"status": "success", "lora_name": body.lora_name, "open_requests": users}

    return router


async def _drop(server: Server, files: AdapterFiles) -> None:
    """Remove an adapter that has lost a name, if it has no other."""
    if not server.edge.adapters.has_digest(files.digest):
        for replica in server.fleet.replicas:
            if replica.client.is_attached:  # the next engine is started without it
                await replica.supervisor.control("unload_adapter", digest=files.digest)


def _allowed(server: Server, given: str) -> Path:
    """The path, which must be below the folder for adapters."""
    folder = server.config.adapters.adapter_dir
    if folder is None:
        what = "No folder is allowed for adapters. Start the server with --adapter-dir FOLDER."
        raise ApiError(403, "adapters_closed", what, "lora_path")
    root = Path(folder).expanduser().resolve()
    path = (root / given).resolve()
    if not path.is_relative_to(root):
        raise ApiError(403, "path_not_allowed", f"The adapter must be below {folder}.", "lora_path")
    if "," in str(path):
        raise bad_request("invalid_value", "The path must have no comma.", "lora_path")
    return path
