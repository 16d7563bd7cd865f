"""Embeddings: the vectors are the model's own hidden states, however the prompt was cut into steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, Started, need


@pytest.fixture(scope="module")
def client(stub: Started):  # type: ignore[no-untyped-def]
    need("openai")
    from openai import OpenAI

    return OpenAI(base_url=f"{stub.url}/v1", api_key=KEY, max_retries=0, timeout=30)


def test_forms_of_input_and_output(client) -> None:
    one = client.embeddings.create(model="parrot", input="one two three", encoding_format="float")
    assert len(one.data) == 1 and one.usage.prompt_tokens == one.usage.total_tokens == 3
    assert math.isclose(math.fsum(value * value for value in one.data[0].embedding), 1.0, rel_tol=1e-6)
    packed = client.embeddings.create(model="parrot", input="one two three")  # the client asks for base64 by itself
    assert packed.data[0].embedding == pytest.approx(one.data[0].embedding, rel=1e-5)
    many = client.embeddings.create(model="parrot", input=["one two three", "red"], encoding_format="float")
    assert [item.index for item in many.data] == [0, 1] and many.data[0].embedding == one.data[0].embedding
    raw = client.embeddings.create(
        model="parrot", input=[7, 9], encoding_format="float", extra_body={"normalize": False}
    )
    assert raw.data[0].embedding == [9.0, 8.0, 2.0]
    told = {"type": "last", "normalize": False, "source": "assumed"}
    assert raw.model_extra["pooling"] == told, "nothing in the model's files says how"
    named = client.embeddings.create(model="parrot", input="red", extra_body={"pooling": "mean"})
    assert named.model_extra["pooling"] == {"type": "mean", "normalize": True, "source": "request"}
    short = client.embeddings.create(model="parrot", input="red", dimensions=2, encoding_format="float")
    assert len(short.data[0].embedding) == 2


def test_bad_input(client) -> None:
    import openai

    for fields, param in (({"dimensions": 5}, "dimensions"), ({"input": ""}, "input"), ({"input": []}, "input")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(**{"model": "parrot", "input": "x", **fields})
        assert caught.value.body["param"] == param


def test_the_real_model_tells_near_from_far(real: Started) -> None:
    need("openai")
    from openai import OpenAI

    client = OpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0, timeout=60)
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose by two percent."]
    reply = client.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": "mean"})
    cat, also_cat, money = (item.embedding for item in reply.data)
    assert len(cat) == 576
    assert sum(a * b for a, b in zip(cat, also_cat, strict=True)) > sum(a * b for a, b in zip(cat, money, strict=True))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_preemption_and_company_change_nothing(pooling: str, tmp_path: Path) -> None:
    need("torch", "transformers")
    import random

    import torch

    from quire.types import SamplingParams
    from tests.cpu.rig import load, make_engine, run_deltas
    from tests.cpu.tiny_models import make_tiny

    reference, folder = make_tiny("llama", tmp_path)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 200) for _ in range(length)] for length in (1, 2, 7, 40, 40, 33)]
    prompts[4] = prompts[3]  # the same once more: it must not be taken from the cache
    model = load(folder)
    for knobs in ({}, {"chunk_tokens": 5}, {"num_pages": 24, "preemption": "recompute", "chunk_tokens": 9}):
        params = SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling)
        for prompt, deltas in zip(prompts, run_deltas(make_engine(model, **knobs), prompts, params), strict=True):
            vectors = [delta.embedding for delta in deltas if delta.embedding is not None]
            with torch.no_grad():
                hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
            expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
            assert len(vectors) == 1 and torch.allclose(torch.tensor(vectors[0]), expected, atol=1e-4)
