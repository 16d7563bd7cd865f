"""What is fuzzed: each target takes bytes and returns, or raises `QuireError`. Anything else is a finding."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.engine.host import wire
from quire.engine.host.frames import FrameReader, FrameWriter, encode_payload
from quire.engine.host.step_messages import MARK, StepMasks, encoder, engine_reader, workers_reader
from quire.files.gguf import open_gguf
from quire.files.safetensors import check_safetensors
from quire.text.tokenizer import Tokenizer
from quire.types import (
    Copy,
    CopyKind,
    Delta,
    FinishReason,
    GrammarSpec,
    PageWrite,
    Plan,
    PlanRow,
    QuireError,
    Request,
    RowInit,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
    Usage,
    pack_tokens,
)
from quire.types.control import ControlCommand, ControlReply
from quire.types.sessions import SessionCommand, SessionInfo, SessionReply
from tests.fuzz.mutate import mutate_bytes, mutate_json

Target = Callable[[bytes], None]


class Fuzzed:
    """A target with seeds to start from. `make(rng)` is one case, `run(case)` one try."""

    name = ""

    def __init__(self, folder: Path):
        self.folder = folder

    def make(self, rng: random.Random) -> bytes:
        raise NotImplementedError

    def run(self, case: bytes) -> None:
        raise NotImplementedError


class Gguf(Fuzzed):
    name = "gguf"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._seed = _small_gguf()
        self._path = folder / "fuzz.gguf"

    def make(self, rng: random.Random) -> bytes:
        return mutate_bytes(rng, self._seed)

    def run(self, case: bytes) -> None:
        self._path.write_bytes(case)
        file = open_gguf(self._path)
        Tokenizer.from_gguf(file.metadata)


class Safetensors(Fuzzed):
    name = "safetensors"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._path = folder / "fuzz.safetensors"
        self._header: dict[str, Any] = {
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
            "__metadata__": {"format": "pt"},
        }

    def make(self, rng: random.Random) -> bytes:
        header = json.dumps(self._header if rng.random() < 0.5 else mutate_json(rng, self._header)).encode()
        data = struct.pack("<Q", len(header)) + header + bytes(32)
        return mutate_bytes(rng, data) if rng.random() < 0.7 else data

    def run(self, case: bytes) -> None:
        self._path.write_bytes(case)
        check_safetensors(self._path)


class TokenizerFile(Fuzzed):
    name = "tokenizer"

    def __init__(self, folder: Path):
        super().__init__(folder)
        from quire.files.tiny_model import make_tiny_model

        self._model = make_tiny_model(folder / "model")
        self._seed = json.loads((self._model / "tokenizer.json").read_text())
        vocab = self._seed["model"]["vocab"]
        self._seed["model"]["vocab"] = dict(list(vocab.items())[:40])  # smaller cases are tried faster
        self._config = json.loads((self._model / "tokenizer_config.json").read_text())

    def make(self, rng: random.Random) -> bytes:
        pair = [self._seed, self._config]
        if rng.random() < 0.6:
            return json.dumps(mutate_json(rng, pair)).encode("utf-8", "surrogatepass")
        return mutate_bytes(rng, json.dumps(pair).encode())

    def run(self, case: bytes) -> None:
        try:
            pair = json.loads(case)
            texts = [json.dumps(part) for part in (pair[:2] if isinstance(pair, list) and pair else [pair])]
        except (ValueError, RecursionError):
            texts = [case.decode("utf-8", "replace")]
        (self._model / "tokenizer.json").write_text(texts[0])
        (self._model / "tokenizer_config.json").write_text(texts[1] if len(texts) > 1 else "{}")
        tokenizer = Tokenizer.from_folder(self._model)
        tokenizer.decode(tokenizer.encode("Hello <|im_end|> \u00e9"))


class WireToEngine(Fuzzed):
    name = "wire-to-engine"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._seeds = [wire.encode(message) for message in self.messages()]

    @staticmethod
    def messages() -> list[Any]:
        """One of every kind in this direction."""
        params = SamplingParams(temperature=0.5, stop=("a",), logit_bias=((3, 1.0),), max_tokens=4).resolve()
        request = Request("r", [1, 2, 3], 3, params, 7, frozenset({2}), 5, grammar=GrammarSpec("regex", "a+"))
        return [
            wire.Start({"model": "x"}),
            wire.submit_message([request]),
            wire.CancelMany(["a", "b"]),
            wire.StopEngine(),
            wire.IntegrityCheck(4),
            SessionCommand(1, "save", "s", "o", [1, 2], b"s", 60.0, "[]"),
            ControlCommand(1, "load_adapter", {"name": "a", "pin": True}),
        ]

    def make(self, rng: random.Random) -> bytes:
        payload = rng.choice(self._seeds)
        if rng.random() < 0.5:
            return FrameWriter(wire.MARK).frame(mutate_bytes(rng, payload))
        return mutate_bytes(rng, FrameWriter(wire.MARK).frame(payload))

    def run(self, case: bytes) -> None:
        payload = FrameReader(wire.MARK).open(case)
        if payload is not None:
            message = wire.decode_to_engine(payload)
            if isinstance(message, wire.Submit):
                wire.submitted_requests(message)


class WireFromEngine(WireToEngine):
    name = "wire-from-engine"

    @staticmethod
    def messages() -> list[Any]:
        end = Delta("a", [1], finish_reason=FinishReason.STOP, usage=Usage(1, 0, 1))
        return [
            wire.EngineReady(9, 9, [2], {}, "m", "f", {}, {}),
            wire.Failed("c", "w"),
            wire.Beat(steps=3),
            wire.deltas_message([end]),
            wire.Fault("k", "w", ["a"]),
            wire.IntegrityReport(1, None, 0, 0),
            SessionReply(1, SessionInfo("s", 2, 1, 8, 0.0, 1.0)),
            ControlReply(1, {"name": "a"}),
        ]

    def run(self, case: bytes) -> None:
        payload = FrameReader(wire.MARK).open(case)
        if payload is not None:
            wire.decode_from_engine(payload)


class StepFrames(Fuzzed):
    """Plans and outputs on their way between an engine and its workers."""

    name = "step-frames"

    def __init__(self, folder: Path):
        super().__init__(folder)
        init = RowInit("r", 1, pack_tokens([1, 2, 3]), 3, 0, SamplingParams(max_tokens=4).resolve(), (2,), 5, 0)
        plan = Plan(1, [PlanRow("r", 1, 0, 3, 0, True)], [init], [2], [PageWrite(0, 1, 0, [4])])
        plan.copies = [Copy(CopyKind.OUT, 0, 1, 2)]
        scored = [TokenLogprobs(7, -0.5, 1, [7], [-0.5])]
        messages: list[Any] = [plan, StepMasks(1, {0: b"\xff"}), StepOutput(1, [[7]], {0: scored}, pooled={0: [0.5]})]
        self._seeds = [encode_payload(encoder, message) for message in messages]

    def make(self, rng: random.Random) -> bytes:
        payload = rng.choice(self._seeds)
        if rng.random() < 0.7:
            return FrameWriter(MARK).frame(mutate_bytes(rng, payload))
        return mutate_bytes(rng, FrameWriter(MARK).frame(payload))

    def run(self, case: bytes) -> None:
        refused = []
        for reader in (workers_reader(), engine_reader()):
            try:
                reader.read(case)
            except QuireError as error:
                refused.append(error)
        if len(refused) == 2:
            raise refused[0]


class HttpBodies(Fuzzed):
    """Bodies through the whole application, up to a stub in the engine's place. Only our own mistakes are 5xx."""

    name = "http"

    def __init__(self, folder: Path):
        super().__init__(folder)
        from tests.fuzz.fake_server import FakeServer

        async def make() -> FakeServer:  # the application starts tasks of its own
            return FakeServer(folder)

        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(make())
        self._seeds = self.seeds()

    @staticmethod
    def seeds() -> list[tuple[str, Any]]:
        """A body for every route that takes one."""
        message = {"role": "user", "content": "hello"}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        return [
            ("/v1/chat/completions", {"messages": [message], "max_tokens": 3, "temperature": 0.5, "stop": ["a"],
                                      "tools": [tool], "tool_choice": "auto", "seed": 3, "n": 2}),
            ("/v1/chat/completions", {"messages": [message, {"role": "assistant", "content": "x", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "y"}]}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
                "logprobs": True, "top_logprobs": 2, "stream": True}),
            ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1,
                                 "logit_bias": {"5": 1.5}}),
            ("/v1/messages", {"model": "tiny", "messages": [message], "max_tokens": 3, "system": "s",
                              "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}}),
            ("/v1/messages/count_tokens", {"model": "tiny", "messages": [message]}),
            ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 3, "store": True,
                               "text": {"format": {"type": "text"}}}),
            ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"}),
            ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
            ("/render", {"messages": [message]}),
            ("/detokenize", {"tokens": [1, 2]}),
            ("/api/chat", {"model": "tiny", "messages": [message], "tools": [tool], "options": {"num_predict": 3}}),
            ("/api/generate", {"model": "tiny", "prompt": "a", "stream": False, "format": "json"}),
            ("/api/embed", {"model": "tiny", "input": ["a"]}),
            ("/api/show", {"model": "tiny"}),
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
            ("/v1/chat/render", {"messages": [message]}),
            ("/v1/batches", {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "1h"}),
            ("/v1/sessions/s/save", {"messages": [message], "expires_in": 60}),
        ]  # fmt: skip

    def make(self, rng: random.Random) -> bytes:
        path, body = rng.choice(self._seeds)
        if rng.random() < 0.85:
            data = json.dumps(mutate_json(rng, body)).encode("utf-8", "surrogatepass")
        else:
            data = mutate_bytes(rng, json.dumps(body).encode())
        return path.encode() + b"\n" + data

    def run(self, case: bytes) -> None:
        path, _, body = case.partition(b"\n")
        status, answer = self._loop.run_until_complete(self._server.post(path.decode("latin-1"), body))
        if status >= 500 or status == 0:
            raise AssertionError(f"answered with {status}: {answer[:300]!r}")
        if status >= 400 and b'"error"' not in answer:
            raise AssertionError(f"{status} without an error body: {answer[:300]!r}")


TARGETS: tuple[type[Fuzzed], ...] = (
    Gguf,
    Safetensors,
    TokenizerFile,
    WireToEngine,
    WireFromEngine,
    StepFrames,
    HttpBodies,
)


def try_case(target: Fuzzed, case: bytes) -> str | None:
    """What is wrong with how the target took this case; None: nothing."""
    try:
        target.run(case)
    except QuireError:
        return None
    except (Exception, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="quire-fuzz-"))


def _small_gguf() -> bytes:
    """A header with a value of every kind, a tokenizer and two tensors."""

    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def entry(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", kind) + value

    def array(kind: int, values: list[bytes]) -> bytes:
        return struct.pack("<IQ", kind, len(values)) + b"".join(values)

    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u0120a"]
    entries = [
        entry("general.architecture", 8, text("llama")),
        entry("general.alignment", 4, struct.pack("<I", 32)),
        entry("llama.block_count", 4, struct.pack("<I", 2)),
        entry("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
        entry("tokenizer.ggml.model", 8, text("gpt2")),
        entry("tokenizer.ggml.pre", 8, text("smollm")),
        entry("tokenizer.ggml.tokens", 9, array(8, [text(token) for token in tokens])),
        entry("tokenizer.ggml.token_type", 9, array(5, [struct.pack("<i", 1)] * len(tokens))),
        entry("tokenizer.ggml.merges", 9, array(8, [text("a b")])),
        entry("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 2)),
        entry("some.flag", 7, b"\x01"),
        entry("some.double", 12, struct.pack("<d", 0.5)),
    ]
    tensors = [
        text("a.weight") + struct.pack("<IQQIQ", 2, 32, 2, 0, 0),
        text("b") + struct.pack("<IQIQ", 1, 32, 8, 256),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    head += bytes(-len(head) % 32)
    return head + bytes(256 + 64)
