"""`quire run [MODEL] PROMPT`: answer one prompt and stream the text to stdout. Uses only the public API.

`quire chat` shares the sampling flags, `open_llm` and `stream_answer`.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.model_argument import add_positional_model, looks_like_model, take_positional_model
from quire.cli.output import AnswerLines, LoadingProgress, format_seconds, print_dim, waiting, write_json
from quire.config import Config
from quire.config_build import ENGINE_TABLES, add_config_flags, config_from_args
from quire.types import QuireError, SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM, Output

MAX_PROMPT_BYTES = 64 << 20

OpenLLM = Callable[[Config], "LLM"]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        usage="quire run [MODEL] PROMPT [options]",
        help="answer one prompt",
        description="Answer one prompt and stream the text to stdout.",
    )
    add_positional_model(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to answer")
    parser.add_argument("--stdin", action="store_true", help="read the prompt from stdin (after PROMPT, if both)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object when done, instead of text")
    add_sampling_flags(parser)
    add_config_flags(parser, groups=ENGINE_TABLES)


def run(args: Namespace) -> int:
    return run_command(args, open_llm)


def run_command(args: Namespace, open_llm: OpenLLM) -> int:
    config = config_from_args(_take_words(args))
    params = sampling_params(args)
    prompt = _prompt(args)
    output = None
    with open_llm(config) as llm, AnswerLines() as answer:
        for text, finished in stream_answer(llm, prompt, params):
            output = finished or output
            if not args.json:
                answer.write(text)
    if output is None:
        raise QuireError("no_answer", "The engine ended the request without a result.")
    if args.json:
        write_json(output_to_json(output))
    print_dim(summary(output))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The prompt


def _take_words(args: Namespace) -> Namespace:
    """Assign positional words: one is the prompt, two are the model and the prompt. argparse stores the first word as
    MODEL in both cases."""
    first, second = args.positional_model, args.prompt
    if second is None:
        args.positional_model, args.prompt = None, first
        if first is not None and not args.stdin and _names_model_alone(first):
            hint = f'Give one after it: quire run {first} "…", or quire chat {first} for a conversation.'
            raise QuireError("empty_prompt", f"{first} is a model, and there is no prompt.", hint)
    elif not looks_like_model(first):
        what = f"{first!r} is not a model: neither built in, nor on this disk, nor a hub id such as owner/name."
        hint = f'A prompt of several words needs quotes: quire run "{first} {second}".'
        raise QuireError("usage", what, hint, param="model")
    return take_positional_model(args)


def _names_model_alone(word: str) -> bool:
    """Return whether a word is certainly a model. A prompt can look like a hub id (and/or) or be a file's name."""
    return looks_like_model(word) and "/" not in word and (word.endswith(".gguf") or not os.path.lexists(word))


def _prompt(args: Namespace) -> str | list[dict[str, str]]:
    """Return the prompt: plain text for --raw, otherwise chat messages."""
    if args.raw and args.system is not None:
        raise QuireError("usage", "--system needs the chat template that --raw skips.", "Leave one of them out.")
    parts = [] if args.prompt is None else [args.prompt]
    if args.stdin:
        text = _read_stdin()
        parts.append(text if args.raw else text.rstrip("\r\n"))
    elif not parts:
        raise QuireError("empty_prompt", "There is no prompt.", 'Give one, quire run "…", or --stdin to read it.')
    prompt = check_text("\n\n".join(part for part in parts if part), "the prompt")
    if not (prompt if args.raw else prompt.strip()):
        raise QuireError("empty_prompt", "The prompt is empty.", "Give the model something to answer.")
    if args.raw:
        return prompt
    system = [] if args.system is None else [{"role": "system", "content": check_text(args.system, "--system")}]
    return [*system, {"role": "user", "content": prompt}]


def _read_stdin() -> str:
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise QuireError("invalid_prompt", f"stdin holds more than {MAX_PROMPT_BYTES >> 20} MiB.", "Send less text.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8("stdin", error.start) from None


def check_text(text: str, name: str) -> str:
    """Return `text` if it is valid Unicode. Python decodes bad bytes of the command line to lone surrogates, which no
    tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise not_utf8(name, error.start) from None
    return text


def not_utf8(name: str, place: int) -> QuireError:
    what = f"{name[:1].upper()}{name[1:]} is not UTF-8 text (at position {place})."
    return QuireError("invalid_prompt", what, "Convert it first, for example with iconv.")


# ---------------------------------------------------------------------------------------------------------------------
# Shared with chat


def add_sampling_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Parameters that are not given have the model's own defaults.")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of the answer (default: the rest of the context)"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0: always the most likely token (greedy)")
    group.add_argument(
        "--top-p", type=float, metavar="X", help="sample from the fewest tokens with this total probability"
    )
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens (0: all)")
    group.add_argument(
        "--min-p", type=float, metavar="X", help="sample from tokens with this share of the highest probability"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (may be repeated)")


def sampling_params(args: Namespace) -> SamplingParams:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return SamplingParams(stop=tuple(check_text(text, "--stop") for text in args.stop or ()), **given)


def open_llm(config: Config) -> LLM:
    """Fetch the model's files, then load it. The files come first, since fetching shows a progress bar of its own and a
    mistyped name should fail before torch is imported."""
    from quire.files.source import resolve_model

    model = config.model
    resolve_model(
        model.model,
        revision=model.revision,
        token=model.hub_token,
        offline=model.offline,
        random_weights=model.random_weights,
    )
    with waiting(f"Loading {short_name(config)} …") as say:
        try:
            from quire.llm import LLM
        except ModuleNotFoundError as error:
            what = f"The Python package {error.name} is not installed."
            raise QuireError("missing_package", what, "`quire doctor` shows how to install it.") from error
        return LLM(config=config, progress=LoadingProgress(say))


def short_name(config: Config) -> str:
    """Return the model's name for messages: the last component of a path."""
    name = config.model.model
    return Path(name).resolve().name if Path(name).exists() else name


def stream_answer(llm: LLM, prompt: Any, params: SamplingParams) -> Generator[tuple[str, Output | None], None, None]:
    """Yield new text as it arrives; the last item also holds the output. Closing the generator cancels the request."""
    with closing(llm.stream(prompt, params)) as chunks:
        for chunk in chunks:
            output = chunk.output
            if output is not None and output.finish_reason == "error":
                raise QuireError(output.error_code or "request_failed", output.error or "The request failed.")
            yield chunk.text, output


def output_to_json(output: Output) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "usage": asdict(output.usage),
        "timing": asdict(output.timing),
    }


def summary(output: Output) -> str:
    """Return one line with token counts, speed, and whether the answer was cut at the token limit."""
    usage, timing = output.usage, output.timing
    parts = [f"{usage.completion_tokens} tokens"]
    if usage.completion_tokens > 1 and timing.total > timing.first_token:
        parts.append(f"{(usage.completion_tokens - 1) / (timing.total - timing.first_token):.1f} tok/s")
    parts.append(f"first token {format_seconds(timing.first_token)}")
    parts.append(f"prompt {usage.prompt_tokens}" + (f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""))
    if output.finish_reason == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)
