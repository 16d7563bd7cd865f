"""Plans and outputs as bytes: equal after the trip, refused if anything about a frame is wrong, and small."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("msgspec")

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.host import wire
from quire.engine.host.frames import VERSION, FrameWriter
from quire.engine.host.step_messages import MARK, StepMasks, StepWriter, engine_reader, workers_reader
from quire.types import (
    Copy,
    CopyKind,
    GrammarSpec,
    PageWrite,
    Plan,
    PlanRow,
    QuireError,
    RowInit,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
    pack_tokens,
)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
counts = st.integers(0, (1 << 31) - 1)
token_ids = st.integers(0, (1 << 32) - 1)
indices = st.integers(0, 300)
steps = st.integers(0, 1 << 62)
values = st.floats(allow_nan=False)
params = st.builds(
    SamplingParams,
    temperature=st.none() | st.floats(0, 100),
    top_k=st.integers(0, 1000),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), max_size=3),
    logit_bias=st.lists(st.tuples(token_ids, st.just(-math.inf) | st.floats(-100, 100)), max_size=3).map(tuple),
    bad_token_ids=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    logprobs=st.none() | st.integers(0, 64),
    grammar=st.none() | st.builds(GrammarSpec, st.just("regex"), names, st.lists(token_ids, max_size=2).map(tuple)),
)
rows = st.builds(PlanRow, names, counts, counts, counts, counts, st.booleans())
inits = st.builds(
    RowInit, names, counts, st.lists(token_ids, max_size=50).map(pack_tokens), counts, counts, params,
    st.lists(token_ids, max_size=4).map(tuple), st.integers(-(1 << 63), (1 << 63) - 1), counts,
)  # fmt: skip
writes = st.builds(PageWrite, counts, counts, counts, st.lists(counts, max_size=20))
copies = st.builds(Copy, st.sampled_from(CopyKind), counts, counts, counts)
plans = st.builds(
    Plan, steps, st.lists(rows, max_size=5), st.lists(inits, max_size=2), st.lists(counts, max_size=5),
    st.lists(writes, max_size=3), st.lists(copies, max_size=3), st.lists(copies, max_size=3), st.booleans(),
    proposals=st.dictionaries(indices, st.integers(1, 64), max_size=3),
)  # fmt: skip
scores = st.builds(
    TokenLogprobs, token_ids, values, counts, st.lists(token_ids, max_size=3), st.lists(values, max_size=3)
)
outputs = st.builds(
    StepOutput, steps, st.lists(st.lists(token_ids, max_size=4), max_size=5),
    logprobs=st.dictionaries(indices, st.lists(scores, max_size=2), max_size=3),
    prompt_logprobs=st.dictionaries(indices, st.lists(scores, max_size=2), max_size=2),
    drafts=st.dictionaries(indices, st.lists(token_ids, max_size=4), max_size=2),
    draft_chances=st.dictionaries(indices, st.lists(values, max_size=4), max_size=2), draft_seconds=values,
    pooled=st.dictionaries(indices, st.lists(values, max_size=4), max_size=2),
    bad_rows=st.lists(indices, max_size=3),
)  # fmt: skip
masks = st.builds(StepMasks, steps, st.dictionaries(indices, st.binary(max_size=20), max_size=3))


@settings(deadline=None)
@given(st.lists(plans | masks, min_size=1, max_size=3))
def test_plans_and_masks_are_equal_after_the_trip(messages: list[Plan | StepMasks]) -> None:
    writer, reader = StepWriter(), workers_reader()
    for message in messages:
        came = reader.read(writer.write(message))
        assert came == message and came is not message
        if isinstance(came, Plan) and isinstance(message, Plan):
            assert [type(init.tokens) for init in came.added] == [type(init.tokens) for init in message.added]


@settings(deadline=None)
@given(st.lists(outputs, min_size=1, max_size=3))
def test_outputs_are_equal_after_the_trip(messages: list[StepOutput]) -> None:
    writer, reader = StepWriter(), engine_reader()
    for message in messages:
        assert reader.read(writer.write(message)) == message


@settings(deadline=None)
@given(plans, st.data())
def test_a_changed_or_cut_frame_is_refused_and_the_right_one_taken_after_it(plan: Plan, data: st.DataObject) -> None:
    frame, reader = StepWriter().write(plan), workers_reader()
    place = data.draw(st.integers(0, len(frame) - 1))
    flipped = bytearray(frame)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(flipped), frame[:place]):
        with pytest.raises(QuireError) as caught:
            reader.read(bad)
        assert caught.value.code in {"frames_foreign", "frames_damaged", "version_mismatch"}
        assert "\n" not in str(caught.value)
    assert reader.read(frame) == plan


def test_a_gap_and_a_repeat_in_the_numbers_are_refused() -> None:
    writer, reader = StepWriter(), workers_reader()
    frames = [writer.write(Plan(step)) for step in range(4)]
    assert reader.read(frames[0]) == Plan(0)
    with pytest.raises(QuireError, match="Message 1 between the processes arrived again") as caught:
        reader.read(frames[0])
    assert caught.value.code == "frames_repeated"
    with pytest.raises(QuireError, match="Message 2 between the processes is missing; message 4") as caught:
        reader.read(frames[3])
    assert caught.value.code == "frames_lost"
    assert reader.read(frames[1]) == Plan(1)


def test_frames_of_another_version_or_another_stream_are_refused() -> None:
    frame = bytearray(StepWriter().write(Plan(1)))
    frame[2] = VERSION + 1
    with pytest.raises(QuireError, match=f"version {VERSION + 1}.*this one version {VERSION}") as caught:
        workers_reader().read(bytes(frame))
    assert caught.value.code == "version_mismatch"
    with pytest.raises(QuireError, match="bytes arrived that are no message between these processes"):
        workers_reader().read(FrameWriter(wire.MARK).frame(wire.encode(wire.StopEngine())))


@pytest.mark.parametrize(
    "message",
    [
        StepOutput(1, [[2]]),  # of the other direction
        Plan(-1),
        Plan(1, freed=[-1]),
        Plan(1, page_writes=[PageWrite(0, 0, 0, [-1])]),
        Plan(1, copies=[Copy(CopyKind.IN, 0, -1, 2)]),
        Plan(1, [PlanRow("r" * 257, 0, 0, 1, 0, True)]),
        Plan(1, [PlanRow("r", 0, 1 << 31, 1, 0, True)]),
        Plan(1, freed=[0] * ((1 << 16) + 1)),
        StepMasks(1, {0: bytes((1 << 19) + 1)}),
    ],
)
def test_values_out_of_bounds_are_refused(message: Plan | StepMasks | StepOutput) -> None:
    with pytest.raises(QuireError) as caught:
        workers_reader().read(StepWriter().write(message))
    assert caught.value.code == "bad_message"


@pytest.mark.parametrize("tokens", [b"abc", "text", [1, 2], 7, None])
def test_tokens_that_are_no_whole_numbers_are_refused(tokens: object) -> None:
    import msgspec

    init = ["r", 0, tokens, 1, 0, SamplingParams(), [], 0, 0]
    payload = msgspec.msgpack.encode(["plan", 1, [], [init]])
    with pytest.raises(QuireError) as caught:
        workers_reader().read(FrameWriter(MARK).frame(payload))
    assert caught.value.code == "bad_message"


def typical_step(num_decodes: int, prompt: int = 0) -> tuple[Plan, StepOutput]:
    """Rows in their thousands of tokens with ids of the server's length; one row in sixteen gets a page. `prompt`
    tokens of a request that enters are computed, too."""
    name = "chatcmpl-0123456789abcdef01234567.0"
    plan = Plan(123_456, [PlanRow(name, row, 3000 + row, 1, 0, True) for row in range(num_decodes)])
    plan.page_writes = [PageWrite(0, row, 187, [20_000 + row]) for row in range(0, num_decodes, 16)]
    if prompt:
        ids = pack_tokens((7919 * place) % 150_000 for place in range(prompt))
        request = SamplingParams(max_tokens=1000).resolve()
        plan.added = [RowInit(name, 300, ids, prompt, 0, request, (2, 151_645), 1 << 40, 0)]
        plan.page_writes.append(PageWrite(0, 300, 0, list(range(5000, 5000 + prompt // 16))))
        plan.rows.append(PlanRow(name, 300, 0, prompt, 0, True))
    return plan, StepOutput(plan.step, [[100_000 + row] for row in range(len(plan.rows))])


@pytest.mark.parametrize(
    ("num_decodes", "prompt", "plan_limit", "output_limit", "told"),
    [
        (1, 0, 100, 40, "1 decode row"),
        (16, 0, 850, 150, "16 decode rows"),
        (256, 0, 14_000, 1_850, "256 decode rows"),
        (0, 2048, 9_700, 40, "a new prompt of 2,048 tokens"),
    ],
)
def test_a_step_is_small(num_decodes: int, prompt: int, plan_limit: int, output_limit: int, told: str) -> None:
    plan, output = typical_step(num_decodes, prompt)
    lengths = len(StepWriter().write(plan)), len(StepWriter().write(output))
    print(f"| {told} | {lengths[0]:,} | {lengths[1]:,} |")
    assert lengths[0] <= plan_limit and lengths[1] <= output_limit
    page = (Path(__file__).parents[2] / "docs/engine.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {told} |"))
    for length, cell in zip(lengths, row.split("|")[2:4], strict=True):
        assert abs(length - int(cell.replace(",", ""))) <= 12 + length // 10, f"docs/engine.md has {row}"
