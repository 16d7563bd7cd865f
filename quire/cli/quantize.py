"""`quire quantize MODEL --to TYPE --out PATH`: write a checkpoint in fewer bits, and show what that costs.

Progress goes to stderr; the report goes to stdout as a table or one JSON object.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from quire.cli.output import write_json, write_text
from quire.config_build import config_from_args
from quire.types import QuireError

EXAMPLES = """examples:
  quire quantize smollm2 --requantize --to Q4_K_M --imatrix notes.txt --out smollm2-q4_k_m.gguf
  quire quantize ./Qwen3-0.6B --to W4A16 --method gptq --out ./Qwen3-0.6B-w4a16
  quire quantize ./Qwen3-0.6B --compare Q8_0,Q6_K,Q4_K_M,INT8,W4A16:gptq --html compare.html
"""


def add_parser(subparsers: Any) -> None:
    from argparse import RawDescriptionHelpFormatter

    parser = subparsers.add_parser(
        "quantize",
        usage="quire quantize MODEL --to TYPE --out PATH [options]",
        help="write a model in fewer bits",
        description="Write a checkpoint in fewer bits, as a GGUF file or a safetensors folder in compressed-tensors "
        "form, and compare the result with its source.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="built-in name, folder, GGUF file or hub id")
    parser.add_argument(
        "--to",
        metavar="TYPE",
        help="GGUF: Q8_0, Q6_K, Q5_K_M, Q4_K_M, Q4_0, IQ4_XS, BF16, F16; folder: FP8, INT8, W4A16, NVFP4, MXFP4",
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="the file or folder to write, which must not exist")
    parser.add_argument(
        "--method",
        choices=("rtn", "gptq", "awq"),
        default="rtn",
        help="how W4A16 is rounded (default: rtn, to nearest)",
    )
    parser.add_argument(
        "--imatrix",
        type=Path,
        metavar="FILE",
        help="a calibration text, or a GGUF file of llama-imatrix: weighs errors by what columns are multiplied with",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="REGEX=TYPE",
        help="another type for the tensors that match; may be repeated",
    )
    parser.add_argument("--target-bpw", type=float, metavar="N", help="GGUF: choose types for N bits a weight in all")
    parser.add_argument(
        "--compare",
        metavar="TYPES",
        help="write several types to a temporary folder and compare them; TYPE:METHOD names a method",
    )
    parser.add_argument(
        "--requantize", action="store_true", help="take a source that is quantized already, and lose twice"
    )
    parser.add_argument("--list", action="store_true", help="list the source's tensors and the type each would get")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the report's text (default: Python's documentation)")
    parser.add_argument("--stretches", type=int, default=4, metavar="N", help="of the report's text (default: 4)")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of a stretch (default: 512)")
    parser.add_argument("--by-layer", action="store_true", help="also report the loss of each layer alone")
    parser.add_argument("--no-report", action="store_true", help="only write the result")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page with a plot")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--revision", default=SUPPRESS, metavar="TEXT", help="hub revision (branch, tag or commit)")
    parser.add_argument("--hub-token", default=SUPPRESS, metavar="TEXT", help="hub access token (default: HF_TOKEN)")
    offline_help = "use no network; take only what is already here"
    parser.add_argument("--offline", action=BooleanOptionalAction, default=SUPPRESS, help=offline_help)
    parser.add_argument("--config", dest="config_file", type=Path, metavar="FILE", help="settings in TOML")


def run(args: Namespace) -> int:
    _check_flags(args)
    from quire.files.progress import QuietProgress, default_progress
    from quire.files.source import resolve_model
    from quire.quantize.run import Evaluation, Run

    progress = QuietProgress() if args.json else default_progress()
    model = config_from_args(args).model
    files = resolve_model(model.model, revision=model.revision, token=model.hub_token, offline=model.offline)
    work = Run(files, progress)
    how = Evaluation(args.text, args.stretches, args.length, args.by_layer)
    if args.list:
        _list(work, args)
        return 0
    results = _compare(work, args, how) if args.compare else _write(work, args, how)
    if args.html is not None and results:
        from quire.quantize.page import render

        args.html.write_text(render(files.name, results), encoding="utf-8")
    if args.json:
        write_json({"model": files.name, "results": [result.as_json() for result in results]})
    elif results:
        _show(results)
    return 0


def _check_flags(args: Namespace) -> None:
    if args.compare and (args.to or args.out):
        raise QuireError("usage", "--compare writes no result.", "Leave out --to and --out.", param="compare")
    if not args.compare and not args.to:
        raise QuireError("usage", "There is no type to quantize to.", "Add --to Q4_K_M, for example.", param="to")
    if not (args.compare or args.list) and args.out is None:
        raise QuireError("usage", "There is no path to write to.", "Add --out PATH.", param="out")
    for name in ("stretches", "length"):
        if getattr(args, name) < (2 if name == "length" else 1):
            raise QuireError("usage", f"--{name} {getattr(args, name)} is too small.", "Leave it out.", param=name)


def _options(args: Namespace, name: str, method: str, out: Path) -> Any:
    from quire.quantize.recipe import find_target
    from quire.quantize.run import QuantOptions

    target = find_target(name)
    keep = tuple(args.keep)
    how: Any = method
    return QuantOptions(target, out, how, args.imatrix, keep, args.target_bpw, args.requantize)


def _write(work: Any, args: Namespace, how: Any) -> list[Any]:
    options = _options(args, args.to, args.method, args.out)
    types = work.quantize(options)
    work.progress.note(f"Wrote {args.out}")
    return [] if args.no_report else [work.evaluate(_title(options), args.out, types, how)]


def _title(options: Any) -> str:
    method = "" if options.method == "rtn" else f" {options.method}"
    weighted = ", weighted" if options.imatrix is not None and options.method == "rtn" else ""
    bits = "" if options.target_bpw is None else f" at {options.target_bpw:g} bits"
    return f"{options.target.name}{method}{bits}{weighted}"


def _compare(work: Any, args: Namespace, how: Any) -> list[Any]:
    folder = Path(tempfile.mkdtemp(prefix="quire-quantize-"))
    results = []
    try:
        for word in args.compare.split(","):
            name, _, method = word.strip().partition(":")
            if method not in ("", "rtn", "gptq", "awq"):
                raise QuireError("usage", f"{word} names no method.", "Write W4A16:gptq, for example.", "compare")
            options = _options(args, name, method or "rtn", folder / "result")
            path = options.out.with_suffix(".gguf") if options.target.container == "gguf" else options.out
            options = _options(args, name, method or "rtn", path)
            types = work.quantize(options)
            results.append(work.evaluate(_title(options), path, types, how))
            path.unlink() if path.is_file() else shutil.rmtree(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


def _list(work: Any, args: Namespace) -> None:
    from quire.quantize.recipe import Recipe, find_target, read_keep

    target = find_target(args.to)
    recipe = Recipe(target, read_keep(args.keep, target.container))
    for tensor in work.source.tensors():
        kind = recipe.type_of(tensor)
        write_text(f"{tensor.name}  {' x '.join(map(str, tensor.shape))}  {kind}\n")


def _show(results: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from quire.quantize.report import table_rows

    head, *rows = table_rows(results)
    table = Table()
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for result in results:
        if result.by_layer:
            worst = sorted(range(len(result.by_layer)), key=lambda i: -result.by_layer[i])[:5]
            named = ", ".join(f"{layer} ({result.by_layer[layer]:.4f})" for layer in worst)
            console.print(f"{result.title}: layers that lose most by themselves: {named}")
    loss = results[0].loss
    console.print(f"The source's perplexity is {loss.source_perplexity:.3f}, on {loss.tokens:,} tokens.")
