"""The public API on a tiny model: outputs, streams, errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import shutil
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quire import LLM, AsyncLLM, GrammarSpec, QuireError, SamplingParams
from tests.cpu.rig import LateDevice
from tests.cpu.tiny_llm import make_tiny_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KNOBS = {"dtype": "float32", "max_model_len": 200, "num_pages": 100, "max_rows": 8, "max_batch_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **KNOBS)


def idle(llm: LLM) -> bool:
    llm.engine.run_until_idle()
    llm.engine.scheduler.check()
    cache = llm.engine.scheduler.cache
    return not llm.engine.scheduler.requests and cache.available(0) == cache.pools[0].num_units - 1


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["why is the sky blue", "light", "the sky is", "because"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.text for o in outputs] == [llm.generate(p, GREEDY)[0].text for p in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.finish_reason == "length" and len(output.token_ids) == 12
        assert output.usage.prompt_tokens == len(output.prompt_token_ids) and output.usage.completion_tokens == 12
        assert 0 <= output.timing.queue <= output.timing.first_token <= output.timing.total
    assert idle(llm)


def test_token_ids_strings_and_messages_are_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("why is the sky")
    assert llm.generate(ids, GREEDY)[0].token_ids == llm.generate("why is the sky", GREEDY)[0].token_ids
    messages = [{"role": "user", "content": "why"}]
    chat = llm.chat(messages, GREEDY)
    assert chat[0].prompt_token_ids == llm.tokenizer.encode("<|user|>why<|end|><|assistant|>", add_special=False)
    assert llm.generate([messages], GREEDY)[0].token_ids == chat[0].token_ids
    assert [o.token_ids for o in llm.chat([messages, messages], GREEDY)] == [chat[0].token_ids] * 2


def test_stream_is_the_output_in_pieces(llm: LLM) -> None:
    whole = llm.generate("why is the sky blue", GREEDY)[0]
    # Without drafts: how many tokens a step accepts depends on measured times, and so would the number of chunks.
    chunks = list(llm.stream("why is the sky blue", replace(GREEDY, speculate=False)))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1) and len(chunks) > 3
    assert chunks[-1].output is not None and chunks[-1].output.text == whole.text


def test_closing_a_stream_cancels_its_request(llm: LLM) -> None:
    stream = llm.stream("why", SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))
    next(stream)
    assert len(llm.engine.scheduler.requests) == 1
    stream.close()
    assert idle(llm)


def test_streams_and_batches_share_the_engine(llm: LLM) -> None:
    stream = llm.stream("why is", GREEDY)
    first = next(stream)
    between = llm.generate(["light", "sky"], GREEDY)
    rest = list(stream)
    assert first.text + "".join(c.text for c in rest) == llm.generate("why is", GREEDY)[0].text
    assert between[0].text == llm.generate("light", GREEDY)[0].text


def test_threads_may_share_an_llm(llm: LLM) -> None:
    expected = [o.text for o in llm.generate([f"sky {i}" for i in range(6)], GREEDY)]
    found: dict[int, str] = {}

    def work(index: int) -> None:
        found[index] = llm.generate(f"sky {index}", GREEDY)[0].text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == expected and idle(llm)


def test_n_samples_share_the_prompt(llm: LLM) -> None:
    before = llm.engine.scheduler.stats.computed_tokens
    prompt = llm.tokenizer.encode("a prompt nobody has sent before, long enough to matter")
    output = llm.generate(prompt, SamplingParams(temperature=1.0, max_tokens=4, n=4, seed=7, ignore_eos=True))[0]
    assert len(output.samples) == 4 and output.samples[0].token_ids == output.token_ids
    assert len({tuple(s.token_ids) for s in output.samples}) > 1
    computed = llm.engine.scheduler.stats.computed_tokens - before
    assert computed == len(prompt) + 3 + 4 * 3, "the prompt once, its last token again for each other sample"


def test_stop_strings_cut_the_text_and_free_the_request(llm: LLM) -> None:
    whole = llm.generate("why is the sky blue", GREEDY)[0]
    stop = whole.text[3:6]
    expected = whole.text[: whole.text.index(stop)]
    cut = llm.generate(
        "why is the sky blue", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop)
    )
    assert cut[0].text == expected and cut[0].finish_reason == "stop"
    assert cut[0].usage.completion_tokens == len(cut[0].token_ids) <= 12
    assert idle(llm)


def test_a_stop_string_discards_the_token_of_the_step_in_flight(folder: Path, llm: LLM) -> None:
    """Depth 2 on a device that finishes late: when the text stops at step N, step N+1 is already under way."""
    whole = llm.generate("why is the sky blue", GREEDY)[0]
    stop = whole.text[3:6]
    late = LLM(str(folder), **KNOBS, depth=2)
    late._engine.workers = LateDevice(late._engine.workers)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop)
    cut = late.generate("why is the sky blue", params)[0]
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    steps = late.engine.scheduler.stats.steps
    assert steps == len(cut.token_ids) + 1, "one more step was under way when the text stopped"
    assert idle(late) and late._engine.workers.submitted_ahead > 0


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for _ in range(2):  # cold and warm
        output = llm.generate("why is the sky blue", params)[0]
        assert output.logprobs is not None and [r.token_id for r in output.logprobs] == output.token_ids
        assert all(r.rank == 1 and len(r.top_ids) == 2 for r in output.logprobs)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert [r.token_id for r in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]


def test_usage_tells_what_came_from_the_cache(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("the sky is blue because light is scattered, " * 3)
    llm.generate(prompt, GREEDY)
    again = llm.generate(prompt, GREEDY)[0]
    assert again.usage.cached_tokens == (len(prompt) - 1) // 16 * 16 > 0


def test_the_cache_can_be_asked(llm: LLM) -> None:
    """Where a prompt leaves what is cached, and to keep what it shares."""
    prompt = [(5 * i) % 90 + 10 for i in range(70)]
    assert llm.explain(prompt).cached_len == 0
    llm.generate([prompt], GREEDY)
    other = [*prompt[:40], *([9] * 20)]
    why = llm.explain(other)
    assert (why.cached_len, why.diverged_at, why.reason) == (32, 40, "diverged at token 40")
    assert llm.pin(other) == 32 and llm.pin(other, pinned=False) == 32
    llm.engine.scheduler.cache.check()


def test_the_models_own_defaults_are_used(folder: Path, llm: LLM) -> None:
    assert llm.edge.eos_ids[:2] == (0, 3)
    request = llm.edge.requests([5, 6], SamplingParams())[0]
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.7, 20, 1.0)
    assert request.max_len == 200, "max_tokens defaults to what is left of the context"
    assert request.stop_ids == {0, 3}


@pytest.mark.parametrize(
    ("prompt", "code"),
    [("", "empty_prompt"), ([], "empty_prompt"), ([1, 2, 10**6], "invalid_prompt"), ([-1], "invalid_prompt"),
     (["x"], None), ([1] * 200, "prompt_too_long")],
)  # fmt: skip
def test_bad_prompts(llm: LLM, prompt: object, code: str | None) -> None:
    if code is None:
        assert llm.generate(prompt, GREEDY)  # a list of strings is a batch
        return
    with pytest.raises(QuireError) as caught:
        llm.generate([prompt] if isinstance(prompt, list) else prompt, GREEDY)
    assert caught.value.code == code and "\n" not in str(caught.value)
    if code == "prompt_too_long":
        assert "200 tokens" in str(caught.value) and "limit is 200" in str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [{"max_tokens": 0}, {"max_tokens": -3}, {"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": 1.5},
     {"n": 0}, {"stop": [""]}, {"top_k": -1}, {"min_tokens": 5, "max_tokens": 3}, {"logprobs": 1000},
     {"repetition_penalty": 0.0}, {"logit_bias": {1: float("nan")}}],
)  # fmt: skip
def test_bad_parameters_are_refused_where_they_are_made(bad: dict) -> None:
    with pytest.raises(QuireError) as caught:
        SamplingParams(**bad)
    assert caught.value.param in bad


def test_parameters_that_need_the_model_are_checked_at_the_edge(llm: LLM) -> None:
    for bad in ({"stop_token_ids": (10**6,)}, {"logit_bias": {10**6: 1.0}}):
        with pytest.raises(QuireError, match="outside the vocabulary"):
            llm.generate("why", SamplingParams(**bad))
    with pytest.raises(QuireError, match="2 sampling parameters were given for 1"):
        llm.generate(["why"], [GREEDY, GREEDY])
    with pytest.raises(QuireError, match="timeout"):
        llm.generate("why", GREEDY, timeout=-1)
    assert idle(llm)


def test_unknown_knob_names_the_nearest(folder: Path) -> None:
    with pytest.raises(QuireError, match="max_model_len"):
        LLM(str(folder), max_modellen=5)


def test_more_prompts_than_the_queue_takes(folder: Path) -> None:
    small = LLM(str(folder), **{**KNOBS, "max_waiting": 3})
    outputs = small.generate([f"sky {i}" for i in range(30)], GREEDY)
    assert len(outputs) == 30 and all(len(o.token_ids) == 12 for o in outputs)


def test_a_trace_that_viewers_can_read(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(str(folder), **KNOBS, trace=str(path), depth=2) as traced:
        traced.generate(["why", "sky"], GREEDY)
    events = json.loads(path.read_text())
    names = {e["name"] for e in events}
    assert {"plan", "forward", "sample", "wait", "commit", "requests"} <= names
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events) == 2


def test_async_generate_stream_and_cancel(folder: Path, llm: LLM) -> None:
    expected = llm.generate("why is the sky blue", GREEDY)[0]

    async def main() -> None:
        async with AsyncLLM(str(folder), **KNOBS) as engine:
            outputs = await asyncio.gather(*(engine.generate("why is the sky blue", GREEDY) for _ in range(5)))
            assert all(o.text == expected.text for o in outputs)
            pieces = [c.text async for c in engine.stream("why is the sky blue", GREEDY)]
            assert "".join(pieces) == expected.text
            chat = await engine.chat([{"role": "user", "content": "why"}], GREEDY)
            assert chat.token_ids == llm.chat([{"role": "user", "content": "why"}], GREEDY)[0].token_ids
            many = await engine.generate("why", SamplingParams(temperature=1.0, n=3, max_tokens=4, ignore_eos=True))
            assert len(many.samples) == 3

            long = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
            task = asyncio.create_task(engine.generate("why", long))
            other = asyncio.create_task(engine.generate("sky", GREEDY))
            async for _ in engine.stream("light", long):
                break  # leaving the stream cancels it
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other).finish_reason == "length"
            with pytest.raises(QuireError):
                await engine.generate("", GREEDY)
            late = await engine.generate("why", long, timeout=0.000001)
            assert late.finish_reason == "deadline"

    asyncio.run(main())


def test_async_closing_ends_what_is_open(folder: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(str(folder), **KNOBS)
        long = SamplingParams(temperature=0.0, max_tokens=190, ignore_eos=True)
        stream = engine.stream("why", long)
        await anext(stream)
        await engine.close()
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason in ("cancelled", "length")
        with pytest.raises(QuireError, match="closed"):
            await engine.generate("why", GREEDY)

    asyncio.run(main())


def test_output_bound_by_a_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=80, seed=3, n=2)
    schema = {"type": "object", "properties": {"blue": {"type": "boolean"}}, "required": ["blue"],
              "additionalProperties": False}  # fmt: skip
    specs = [GrammarSpec.json(schema), GrammarSpec.regex("[a-c]{4}"), GrammarSpec.choice("sky", "light"), None]
    outputs = llm.generate(["why"] * 4, [replace(params, grammar=spec) for spec in specs])
    assert all(isinstance(json.loads(sample.text)["blue"], bool) for sample in outputs[0].samples)
    assert all(re.fullmatch("[a-c]{4}", sample.text) for sample in outputs[1].samples)
    assert all(sample.text in ("sky", "light") for sample in outputs[2].samples)
    ebnf = GrammarSpec.ebnf('start: "(" start ")" | "x"')
    bias = {llm.tokenizer.encode("x")[0]: 9}  # so that it ends
    streamed = llm.stream("why", SamplingParams(max_tokens=24, grammar=ebnf, logit_bias=bias))
    text = "".join(chunk.text for chunk in streamed)
    assert text.count("(") == text.count(")") and text.strip("()") == "x"
    assert idle(llm)


def test_a_tokenizer_may_know_more_than_its_model(folder: Path, llm: LLM, tmp_path: Path) -> None:
    """Gemma 3's has a token for images, for which models of text alone have no row."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([f"*extra{i}*" for i in range(70)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    more = LLM(str(tmp_path), **KNOBS)
    asked = [
        GREEDY,
        replace(GREEDY, dry_multiplier=1.0),  # "*" breaks repetitions
        replace(GREEDY, bad_words=("*extra3*", "sky")),
        replace(GREEDY, ignore_eos=False, grammar=GrammarSpec.choice("sky", "light")),
    ]
    outputs = more.generate(["why is the sky"] * len(asked), asked)
    wanted = llm.generate(["why is the sky"] * len(asked), asked)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    assert all(output.error is None for output in outputs) and outputs[-1].text in ("sky", "light")
    with pytest.raises(QuireError, match=r"The prompt has the token '\*extra69\*' \(id \d+\), which the tokenizer has"):
        more.generate(["why *extra69*"], GREEDY)
    assert idle(more)


def test_a_wrong_grammar_is_an_error_before_anything_runs(llm: LLM) -> None:
    for spec in (GrammarSpec.regex("("), GrammarSpec("json_schema", "{"), GrammarSpec.choice()):
        with pytest.raises(QuireError) as caught:
            llm.generate("why", SamplingParams(grammar=spec))
        assert caught.value.code == "invalid_schema"
    with pytest.raises(QuireError, match="GrammarSpec"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]
    assert idle(llm)


def test_grammars_in_an_event_loop(folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(folder), **KNOBS) as llm:
            asked = [SamplingParams(max_tokens=8, grammar=GrammarSpec.choice(word)) for word in ("sky", "light")]
            outputs = await asyncio.gather(*(llm.generate("why", params) for params in asked))
            assert [output.text for output in outputs] == ["sky", "light"]
            refused = await llm.generate("why", SamplingParams(grammar=GrammarSpec.regex("(")))
            assert refused.error_code == "invalid_schema" and refused.finish_reason == "error"

    asyncio.run(main())


def test_a_closed_model_leaves_no_memory_behind(folder: Path) -> None:
    """Also one that was prepared: what is frozen then, so that no collection walks over it, must be free to go."""
    llm = LLM(str(folder), **KNOBS)
    llm.prepare()
    engine = weakref.ref(llm.engine)
    llm.close()
    frozen = gc.get_freeze_count()
    del llm
    gc.collect()
    assert frozen == 0 and engine() is None


def test_embed_gives_the_models_own_vector(folder: Path, tmp_path: Path) -> None:
    """`generate` with `pooling` shows the hidden state as it is; `embed` pools and scales as the model's files say."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    prompts = ["why is the sky", "light"]
    with LLM(str(tmp_path / "model"), **KNOBS) as llm:
        raw = {kind: [o.embedding for o in llm.generate(prompts, replace(GREEDY, pooling=kind))]
               for kind in ("mean", "last")}  # fmt: skip
        own, named = llm.embed(prompts), llm.embed(prompts, pooling="last", normalize=False)
        assert [output.embedding for output in named] == raw["last"] != raw["mean"]
        for output, vector in zip(own, raw["mean"], strict=True):
            length = math.sqrt(sum(value * value for value in vector))
            assert output.embedding == pytest.approx([value / length for value in vector])
            assert (output.text, output.token_ids, output.usage.completion_tokens) == ("", [], 0)
        assert llm.generate("light", GREEDY)[0].embedding is None
    with LLM(str(folder), **KNOBS, pooling="mean") as llm:
        assert llm.embed("light")[0].embedding == own[1].embedding
