"""Lists the kernels that a start will launch, without a device, weights or compilation.

`compile_ahead` runs `python -m quire.startup.dry_run` beside a start that has kernels to compile. The kernel trials and
the model's first steps run on meta tensors, through the same code as on the device, and every launch is recorded
instead of executed, so there is no list of kernels to maintain. The settings come on stdin; each kernel is printed as a
line of JSON with Triton's specialization data. The workers (`compile_workers`) are forked before the dry run begins.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quire.config import Config
from quire.config_build import override_config
from quire.kernels.table import select_ops
from quire.kernels.triton import compile_worker
from quire.models.fallback.model import FallbackModel
from quire.models.loading.loader import build_tried_model, read_config
from quire.models.loading.sources import finish_module
from quire.models.registry import find_family, find_model_type
from quire.runtime.graphs import decode_rows, graph_sizes
from quire.runtime.rows import DeviceRows
from quire.runtime.runner import Runner, warm_up_sizes
from quire.runtime.store import CacheStore
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler
from quire.startup import light_meta
from quire.startup.assemble import try_row_ops, try_sampling_ops
from quire.startup.cache_plan import find_files, plan_cache
from quire.startup.compile_ahead import END, NEEDED
from quire.startup.compile_workers import NICE, end_with_parent, fork_workers
from quire.startup.defaults import resolve_limits, resolve_page_tokens
from quire.types import Plan, PlanRow, RowInit, SamplingParams, pack_tokens

META = torch.device("meta")
CUDA = torch.device("cuda")
# Short and long prompts use different matrix products, and most models sample with top-k and top-p.
PROMPTS = (
    (16, SamplingParams(temperature=0.0)),
    (40, SamplingParams(temperature=0.6, top_k=20, top_p=0.95)),
)

Report = Callable[[dict[str, Any]], None]


def main() -> None:
    """Runs the dry run. `argv`: the sockets of the workers."""
    settings = json.loads(sys.stdin.readline())
    config = override_config(Config(), settings)
    light_meta.install()
    select_ops("cuda", config.engine.kernels)  # workers share what is imported by now
    workers = fork_workers([int(fd) for fd in sys.argv[1:]], compile_worker.prepare, compile_worker.compile_kernel)
    ending = threading.Thread(target=end_with_parent, args=(workers,))
    ending.start()
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output of this process goes to stderr

    def report(line: str) -> None:
        output.write(line + "\n")

    try:
        record_launches(lambda kernel: report(json.dumps(kernel)))
        for _ in run_on_meta(config):
            report(NEEDED)
            os.nice(NICE)  # no request waits for the rest
    except Exception as error:  # it would repeat, so the list so far is complete
        print(f"dry run: {type(error).__name__}: {error}", file=sys.stderr)
    report(END)
    ending.join()


def record_launches(report: Report) -> None:
    """From now on, reports each kernel once to `report` and launches none in this process."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = torch.cuda.get_device_capability()  # queries the driver without creating a context
    target = ("cuda", 10 * major + minor, 32)
    driver.set_active(compile_worker.TargetOnlyDriver(GPUTarget(*target)))
    reported: set[tuple[str, str, str]] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = (fn.module, fn.name, compile["specialization_data"])
        if kernel not in reported:
            reported.add(kernel)
            report({"module": fn.module, "name": fn.name, "data": kernel[2], "target": target})
        return True  # True: neither compile nor launch it

    knobs.runtime.jit_cache_hook = note


@torch.inference_mode()
def run_on_meta(config: Config) -> Iterator[None]:
    """Runs the kernel trials, the work of every start, and the steps before a first token; then yields.

    After that it runs steps of all sizes, which the engine warms up when it is idle.
    """
    limits = resolve_limits(config, CUDA)
    hf_config = read_config(find_files(config, None))
    if find_family(find_model_type(hf_config)) is FallbackModel:  # its code may read tensor values
        return
    model, _ = build_tried_model(
        hf_config,
        dtype=config.model.dtype,
        device=CUDA,
        at=META,
        max_model_len=config.model.max_model_len,
        page_tokens=resolve_page_tokens(config, CUDA),
        quant=config.model.quant,
        kv_dtype=config.cache.kv_dtype,
        kv_skip=config.cache.kv_dtype_skip,
        kernels=config.engine.kernels,
        strict_kernels=False,
        deterministic=config.engine.deterministic,
    )
    max_len = config.model.max_model_len or model.max_positions
    free = torch.cuda.get_device_properties().total_memory
    memory = plan_cache(model, config, limits, CUDA, free, max_len)
    for module in model.modules():
        finish_module(module)  # as after loading weights
    specs = list(model.specs)
    store = CacheStore(specs, list(memory.num_units), None, META, checksums=False)
    rows = DeviceRows(limits.max_rows, max_len, specs, META)
    sampling = SamplingRows(limits.max_rows, model.vocab_size, META)
    sampler = Sampler(model.vocab_size, META, try_sampling_ops(model, config, CUDA, META))
    row_ops = try_row_ops(model, config, max_len, CUDA, META)
    runner = Runner(model, store, rows, sampling, sampler, max_batch_tokens=limits.max_batch_tokens)
    first, *others = warm_up_sizes(limits.max_rows, limits.max_batch_tokens)
    runner.warm_up(*first)
    for length, params in PROMPTS:
        added = RowInit("", 0, pack_tokens(range(length)), length, 0, params, (), 0, 0)
        plan = Plan(0, [PlanRow("", 0, 0, length, 0, True)], added=[added])
        runner.sample(runner.forward(plan))
    numbers = torch.zeros(limits.max_rows, dtype=torch.int64, device=META)
    if row_ops is not None:
        decode_rows(model, store.tensors, rows, row_ops, numbers[:1], choose=True)
    yield
    for num_decodes, num_tokens in others:
        runner.warm_up(num_decodes, num_tokens)
    if row_ops is not None:
        for size in graph_sizes(limits.max_rows):
            decode_rows(model, store.tensors, rows, row_ops, numbers[:size], choose=True)


if __name__ == "__main__":
    main()
