"""`quire bench compare-llama-cpp`: the engine and llama.cpp on the same GGUF files, alternating in one run.

Measures one stream, one long prompt and many streams, as token ids and with the same number of threads on both sides;
then how many greedy tokens of each side agree with the float32 reference. The Q4_0 file is made from the given file.
With `--shape` the files have random weights in the sizes of larger models (`random_gguf`), and nothing to agree on.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench.questions import QUESTIONS
from quire.bench.stats import Bar, Report
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.llm import LLM

STREAMS, PROMPT_LEN, OUTPUT_LEN, MANY_OUTPUT_LEN, LONG_PROMPT = 16, 128, 128, 64, 512
AGREEMENT_TOKENS = 64
DIVERGENCE_TEXTS = 8  # questions with their answers whose distributions are compared
NOISE = 1e-5  # nats a token: less is rounding, on both sides
GATES = {"one stream": 1.0, "prefill": {"Q4_1": 2.0, "Q4_0": 1.0}, "16 streams": 1.5}
# Of random weights: ratios to llama.cpp. One stream also passes at this share of the byte floor.
SHAPE_GATES = {"one stream": 1.2, "prefill": 1.3, "16 streams": 1.5}
FLOOR_SHARE = 0.9
READ_BYTES = 1 << 28  # of memory, to measure how fast it is read


@dataclass(frozen=True, slots=True)
class RunTiming:
    """Time to first token and decode throughput of one run."""

    first_token_s: float  # seconds until every stream had its first token
    decode_tps: float  # tokens per second from then on

    def prompt_rate(self, num_tokens: int) -> float:
        return num_tokens / self.first_token_s


def bench_llama_cpp(
    open_llm: Callable[..., LLM],
    path: Path,
    folder: Path,
    *,
    threads: int,
    rounds: int = 5,
    say: Callable[[str], None] = print,
) -> Report:
    """Compare both engines on `path` and its Q4_0 version, which is written to `folder`. `open_llm(path, **knobs)`
    opens Quire's side."""
    _need_llama_cpp()
    files = {file_form(path): path}
    if "Q4_0" not in files:
        files["Q4_0"] = folder / f"{path.stem}.to-Q4_0.gguf"
        if not files["Q4_0"].exists():
            say("Making the Q4_0 file …")
            requantize(path, files["Q4_0"], "Q4_0")
    results = {form: _one_file(open_llm, file, threads, rounds, say) for form, file in files.items()}
    bars = []
    for form, result in results.items():
        bars.append(Bar(f"{form}: one stream", result["one stream"]["ratio"], GATES["one stream"], "at least"))  # type: ignore[arg-type]
        bars.append(Bar(f"{form}: prefill", result["prefill"]["ratio"], GATES["prefill"].get(form, 1.0), "at least"))  # type: ignore[attr-defined]
        ours, theirs = (result["agreement"][side]["tokens"] for side in ("ours", "theirs"))
        bars.append(
            Bar(f"{form}: greedy tokens as the reference, ours over theirs", ours / max(theirs, 1), 1.0, "at least")
        )
        kl = result["agreement"]["kl"]
        share = (kl["ours"] + NOISE) / (kl["theirs"] + NOISE)
        bars.append(Bar(f"{form}: divergence from float32, ours over theirs", share, 1.0, "at most"))
    best = max(result["16 streams"]["theirs"] for result in results.values())
    ours_best = max(result["16 streams"]["ours"] for result in results.values())
    bars.append(Bar("16 streams, best of each", ours_best / best, GATES["16 streams"], "at least"))  # type: ignore[arg-type]
    return {
        "benchmark": "compare-llama-cpp",
        "threads": threads,
        "rounds": rounds,
        "files": results,
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


def bench_shapes(
    open_llm: Callable[..., LLM],
    names: Sequence[str],
    mixtures: Sequence[str],
    tokenizer: Path,
    folder: Path,
    *,
    threads: int,
    rounds: int = 5,
    say: Callable[[str], None] = print,
) -> Report:
    """Compare both engines on files with random weights, which are written to `folder` and kept there. `tokenizer`: a
    GGUF file whose tokenizer they get."""
    from quire.bench.random_gguf import make_random_gguf

    _need_llama_cpp()
    results, bars = {}, []
    for name in names:
        for mixture in mixtures:
            path = folder / f"random-{name}-{mixture}.gguf"
            if not path.exists():
                say(f"Making {path.name} …")
                make_random_gguf(name, mixture, tokenizer, path)
            label = f"{name} {mixture}"
            results[label] = found = _one_file(open_llm, path, threads, rounds, say, agrees=False)
            found |= _byte_floor(path, threads, say)
            for work, gate in SHAPE_GATES.items():
                ratio: Any = found[work]["ratio"]
                if work == "one stream" and found["one stream"]["ours"] >= FLOOR_SHARE * found["floor_tps"]:
                    gate = min(gate, ratio)  # as fast as memory allows
                bars.append(Bar(f"{label}: {work}", ratio, gate, "at least"))
    return {
        "benchmark": "compare-llama-cpp",
        "threads": threads,
        "rounds": rounds,
        "files": results,
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


def _need_llama_cpp() -> None:
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        what = "llama.cpp is not installed, so there is nothing to compare with."
        hint = "Build it with `pip install --no-binary llama-cpp-python llama-cpp-python`."
        raise QuireError("missing_package", what, hint) from None


def _byte_floor(path: Path, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the bytes of weights that a token reads, how fast all threads read memory now, and the rate of tokens that
    this allows."""
    import torch

    from quire.files.gguf import open_gguf

    file = open_gguf(path)
    arch = file.metadata["general.architecture"]
    share = file.metadata.get(f"{arch}.expert_used_count", 1) / file.metadata.get(f"{arch}.expert_count", 1)
    skipped = "token_embd.weight" if "output.weight" in file.tensors else ""
    parts = {name: tensor.data.nbytes for name, tensor in file.tensors.items() if name != skipped}
    token_bytes = sum(size * (share if "_exps" in name else 1) for name, size in parts.items())
    torch.set_num_threads(threads)  # an engine with native kernels leaves torch one
    data, times = torch.zeros(READ_BYTES // 4), []
    for _ in range(4):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    rate = READ_BYTES / min(times)
    say(f"  byte floor: {rate / token_bytes:.1f} tok/s ({token_bytes / 1e9:.2f} GB a token at {rate / 1e9:.1f} GB/s)")
    return {"token_bytes": round(token_bytes), "read_rate": rate, "floor_tps": rate / token_bytes}


def _one_file(
    open_llm: Callable[..., LLM],
    path: Path,
    threads: int,
    rounds: int,
    say: Callable[[str], None],
    agrees: bool = True,
) -> Report:
    """`agrees`: whether to compare greedy tokens with those of float32, too."""
    say(f"{path.name}: loading both")
    begin = time.perf_counter()
    with open_llm(path, threads=threads, prefix_cache=False, max_model_len=2048) as llm:
        ready_s = time.perf_counter() - begin
        sides: dict[str, Any] = {"ours": QuireSide(llm), "theirs": LlamaCppSide(path, threads)}
        measured: dict[str, dict[str, list[float]]] = {}
        works = {
            "one stream": (1, PROMPT_LEN, OUTPUT_LEN),
            "prefill": (1, LONG_PROMPT, 1),
            "16 streams": (STREAMS, PROMPT_LEN, MANY_OUTPUT_LEN),
        }
        for index in range(rounds + 1):  # the first is a warm-up
            for work, (count, prompt_len, output_len) in works.items():
                prompts = draw_prompts(count, prompt_len, llm.edge.vocab_size, seed=index)
                for side in sorted(sides, reverse=index % 2 == 0):
                    timing = sides[side].run(prompts, output_len)[1]
                    rate = timing.prompt_rate(count * prompt_len) if output_len == 1 else timing.decode_tps
                    if index:
                        measured.setdefault(work, {}).setdefault(side, []).append(rate)
                        say(f"  {work}, {side}: {rate:.1f} tok/s")
        found: Report = {"ready_s": ready_s}
        for work, rates in measured.items():
            middle = {side: median(values) for side, values in rates.items()}
            # The ratio of two measurements that are close in time varies less with the machine's load.
            ratio = median(a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True))
            found[work] = {**middle, "ratio": ratio, "every": rates}
        if agrees:
            found["agreement"] = _agreement(open_llm, path, llm, sides, say)
    return found


def draw_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def file_form(path: Path) -> str:
    """Return the most common tensor type among the matrices of a GGUF file."""
    from collections import Counter

    from quire.files.gguf import open_gguf

    tensors = open_gguf(path).tensors.values()
    return Counter(t.type.name for t in tensors if len(t.shape) > 1).most_common(1)[0][0]


# ---------------------------------------------------------------------------------------------------------------------
# Both sides


class QuireSide:
    def __init__(self, llm: LLM):
        self._llm = llm

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> tuple[list[list[int]], RunTiming]:
        from quire.types import SamplingParams

        engine = self._llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        tokens: dict[str, list[int]] = {}
        begin = time.perf_counter()
        for prompt in prompts:
            for request in self._llm.edge.requests(list(prompt), params):
                tokens[request.id] = []
                engine.add(request)
        waiting, first, counted = len(prompts), begin, 0
        while engine.has_work:
            for delta in engine.turn():
                if delta.token_ids and not tokens[delta.request_id]:
                    waiting -= 1
                tokens[delta.request_id] += delta.token_ids
            if waiting == 0 and first == begin:
                first, counted = time.perf_counter(), sum(map(len, tokens.values()))
        end = time.perf_counter()
        left = sum(map(len, tokens.values())) - counted
        return list(tokens.values()), RunTiming(first - begin, left / (end - first) if left else 0.0)


class LlamaCppSide:
    """llama.cpp through its C API: one batch for all streams, greedy sampling by numpy."""

    def __init__(self, path: Path, threads: int):
        import llama_cpp

        self._api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *args: None)  # kept, since the library holds no reference
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 4096, 2048, 512, STREAMS
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> list[np.ndarray]:
        """Run a batch of (token, position, stream, wants_logits) and return the wanted logits in order."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, stream, wants) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = stream
        if self._api.llama_decode(self._context, batch):
            raise QuireError("failed", "llama.cpp could not compute a batch.")
        wanted = [i for i, entry in enumerate(entries) if entry[3]]
        shape = (self._vocab_size,)
        return [np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, i), shape) for i in wanted]

    def scores(self, tokens: Sequence[int]) -> Any:
        """Return the log-probabilities of the tokens after the first, [n, vocab] float32 in torch."""
        import torch

        self.clear()
        logits = self._decode([(token, place, 0, True) for place, token in enumerate(tokens)])
        return torch.from_numpy(np.stack(logits[:-1])).log_softmax(-1)

    def clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> tuple[list[list[int]], RunTiming]:
        self.clear()
        begin = time.perf_counter()
        tokens: list[list[int]] = [[] for _ in prompts]
        per_batch = max(1, 512 // len(prompts[0]))
        for start in range(0, len(prompts), per_batch):
            group = range(start, min(start + per_batch, len(prompts)))
            entries = [(t, i, s, i == len(prompts[s]) - 1) for s in group for i, t in enumerate(prompts[s])]
            for stream, logits in zip(group, self._decode(entries), strict=True):
                tokens[stream].append(int(logits.argmax()))
        first = time.perf_counter()
        for step in range(output_len - 1):
            entries = [(tokens[s][-1], len(prompts[s]) + step, s, True) for s in range(len(prompts))]
            for stream, logits in enumerate(self._decode(entries)):
                tokens[stream].append(int(logits.argmax()))
        end = time.perf_counter()
        left = len(prompts) * (output_len - 1)
        return tokens, RunTiming(first - begin, left / (end - first) if left else 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Agreement and files


def _agreement(
    open_llm: Callable[..., LLM], path: Path, llm: LLM, sides: dict[str, Any], say: Callable[[str], None]
) -> Report:
    """Count the leading tokens of each side's greedy answers that equal those of plain torch in float32."""
    say("  agreement with float32")
    prompts = [llm.edge.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    with open_llm(path, dtype="float32", kernels="torch", max_model_len=2048, prefix_cache=False) as exact:
        wanted = QuireSide(exact).run(prompts, AGREEMENT_TOKENS)[0]
    report: Report = {"prompts": len(prompts), "tokens_each": AGREEMENT_TOKENS}
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, wanted, strict=True)][:DIVERGENCE_TEXTS]
    report["kl"] = _divergence(path, sides["theirs"], texts)
    kl = report["kl"]
    say(f"  divergence from float32: ours {kl['ours']:.5f}, theirs {kl['theirs']:.5f} nats a token")
    for name, side in sides.items():
        got = [side.run([prompt], AGREEMENT_TOKENS)[0][0] for prompt in prompts]
        common = [_common_len(a, b) for a, b in zip(got, wanted, strict=True)]
        report[name] = {"tokens": sum(common), "whole": sum(n == AGREEMENT_TOKENS for n in common)}
        say(f"  {name}: {report[name]['tokens']} tokens, {report[name]['whole']} whole answers")
    return report


def _divergence(path: Path, theirs: LlamaCppSide, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return each side's mean KL divergence of next-token distributions from those of plain torch in float32."""
    import torch

    from quire.files.source import resolve_model
    from quire.models.loading.loader import load_model
    from quire.runtime.reading import CPU, PAGE, next_token_scores

    def read(dtype: str, kernels: str) -> list[Any]:
        model = load_model(
            resolve_model(path), dtype=dtype, kernels=kernels, device=CPU, max_model_len=None, page_tokens=PAGE
        ).model
        return [torch.cat([scores.clone() for scores, _ in next_token_scores(model, tokens)]) for tokens in texts]

    exact = read("float32", "torch")
    found = {"ours": read("auto", "auto"), "theirs": [theirs.scores(tokens) for tokens in texts]}
    return {
        name: torch.cat([(want.exp() * (want - got)).sum(-1) for want, got in zip(exact, scores, strict=True)])
        .mean()
        .item()
        for name, scores in found.items()
    }


def _common_len(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def requantize(source: Path, target: Path, form: str) -> None:
    """Write a copy of a GGUF file with its quantized matrices in another type, except for embedding and output head."""
    try:
        import gguf
    except ImportError:
        raise QuireError(
            "missing_package", "Making a file needs the Python package gguf.", "pip install gguf"
        ) from None
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target.with_suffix(".part"), str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
    plain = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
    for tensor in reader.tensors:
        data, form_now = tensor.data, tensor.tensor_type
        if form_now not in plain and tensor.name not in ("token_embd.weight", "output.weight"):
            data = gguf.quants.quantize(gguf.quants.dequantize(data, form_now), gguf.GGMLQuantizationType[form])
            form_now = gguf.GGMLQuantizationType[form]
        writer.add_tensor(tensor.name, data, raw_dtype=form_now)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").replace(target)
