"""Bodies made up from the OpenAPI document, right ones and wrong ones: whatever comes, the server does not break."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip(
    "schemathesis", reason="the package schemathesis is not installed; `pip install '.[test]'` brings it"
)

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.e2e.conftest import ADMIN_KEY, KEY, Started, start, stub_command

# The same bodies every time, so that a failure is the change's; who asks for a number of them gets new ones.
NUM_EXAMPLES, SAME = int(os.environ.get("SCHEMA_EXAMPLES", "8")), "SCHEMA_EXAMPLES" not in os.environ
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def short(model_here: None) -> Iterator[Started]:
    """Sequences of at most 64 tokens, so that no made-up request takes long."""
    started = start(stub_command("--max-model-len", "64", "--api-key", KEY, "--admin-key", ADMIN_KEY))
    yield started
    started.stop()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_breaks_the_server(short: Started, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json", headers=HEADERS)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 15
    with requests.Session() as session:
        session.headers.update(HEADERS)
        for operation in operations:
            if mode is GenerationMode.NEGATIVE and not _has_input(operation):
                continue  # nothing in it can be wrong
            check_operation(operation, mode, session)


def check_operation(operation: Any, mode: GenerationMode, session: requests.Session) -> None:
    @settings(max_examples=NUM_EXAMPLES, derandomize=SAME, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        reply = case.call(session=session, timeout=30)
        shown = (operation.label, reply.status_code, reply.text[:500])
        assert reply.status_code < 500 or reply.status_code == 504, shown  # 504: a deadline the body asked for
        assert reply.headers["x-request-id"], shown
        assert reply.content, "never an empty reply"
        if reply.status_code >= 400:
            body = reply.json()
            error = body["error"]
            if isinstance(error, str):  # Ollama's shape
                error = {"message": error, "code": body["code"]}
            assert error["message"] and error["code"] and "Traceback" not in reply.text, shown

    with suppress(Unsatisfiable):  # of some operations every input is valid
        check()


def _has_input(operation: Any) -> bool:
    return any(len(list(part)) for part in (operation.body, operation.query, operation.path_parameters))
