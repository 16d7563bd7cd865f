"""`quire bench agent`: its flags, and the engine that a session is replayed against. `quire.cli.bench` calls both."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_commands.flags import add_common_flags, add_count_flag
from quire.cli.run import OpenLLM
from quire.config_build import ENGINE_TABLES
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.agent.engines.seam import ChatEngine
    from quire.bench.stats import Report


def add_agent(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "agent",
        help="replay a session of the agent as load",
        description="Replay a session of `quire chat`: each request with its messages, after the time that its tools "
        "took. Without --trace a built-in coding session is replayed.",
        conflict_handler="resolve",  # --trace is the session here, not what the engine writes
    )
    parser.add_argument("--url", metavar="URL", help="use a server with OpenAI's API instead of loading a model")
    parser.add_argument("--api-key", metavar="KEY", help="key for --url (default: OPENAI_API_KEY)")
    add_count_flag(parser, "--sessions", 1, "sessions at once; more than one needs --url")
    parser.add_argument(
        "--delay-scale",
        type=_scale,
        default=1.0,
        metavar="X",
        help="tools take X times as long (default: 1; 0: no time)",
    )
    parser.add_argument("--max-output", type=int, metavar="N", help="most tokens of an answer (default: as recorded)")
    add_common_flags(parser, groups=ENGINE_TABLES)
    parser.add_argument(
        "--trace", dest="agent_trace", type=Path, metavar="FILE", help="the file of a session (default: built in)"
    )


def run_agent(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.agent.coding_session import NAME, coding_session
    from quire.bench.agent.run import AgentLoad, bench_agent
    from quire.bench.agent.trace import read_trace, trace_of
    from quire.cli.agent_chat.engine import open_engine

    if args.max_output is not None and args.max_output < 1:
        raise QuireError("usage", f"--max-output {args.max_output} must be at least 1.")
    if args.sessions > 1 and args.url is None:
        raise QuireError("usage", "A model in this process serves one session.", "Start `quire serve` and give --url.")
    trace = read_trace(args.agent_trace) if args.agent_trace is not None else trace_of(NAME, coding_session())
    load = AgentLoad(args.sessions, args.delay_scale, args.max_output)
    with ExitStack() as held:

        def open_one() -> ChatEngine:
            named = Namespace(**vars(args), positional_model=None)  # a benchmark's model is named by --model
            return held.enter_context(open_engine(named, open_llm))

        return bench_agent(open_one, trace, load)


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise ArgumentTypeError(f"{text!r} is not a number within 0 to 100")
    return value
