"""What a device can do wrong, injected: memory that runs out, errors for good, kernels that fail, a GPU that can't be
used. Each is a line and a way on, or a refusal when asked to be strict; never a dead engine without a reason."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quire.startup.assemble as assemble
import quire.startup.cache_plan as cache_plan
import quire.startup.defaults as defaults
from quire.cache.memory import plan_memory
from quire.config import CacheConfig, Config
from quire.config_build import override_config
from quire.engine.host.driver import EngineDriver, Message, failure_deltas
from quire.engine.workers import DeviceLost
from quire.kernels.table import REFERENCE, select_ops
from quire.kernels.validation.failures import reason
from quire.kernels.validation.trials import TrialShape, dense_trials, settle_ops
from quire.layers.step import Step
from quire.runtime.guard import GuardedWorkers, enter_device
from quire.types import CacheSpec, Delta, QuireError, SamplingParams, is_out_of_memory
from tests.cpu.rig import CPU, load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
POISON = 255


class Faulty:
    """A model whose forward raises what `fault` returns for a step."""

    def __init__(self, model: Any, fault: Callable[[Step], Exception | None]):
        self._model, self._fault = model, fault
        self.specs, self.vocab_size = model.specs, model.vocab_size
        self.max_positions, self.activation_elements = model.max_positions, model.activation_elements
        self.num_steps = 0

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        self.num_steps += 1
        error = self._fault(step)
        if error is not None:
            raise error
        return self._model.forward(step, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_tiny("llama", Path(tmp_path_factory.mktemp("llama")))[1])


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers imported a garbage collection takes a second, and there is no device here to free."""
    monkeypatch.setattr("quire.runtime.guard.release_memory", lambda device: None)
    monkeypatch.setattr(assemble, "release_memory", lambda device: None)
    monkeypatch.setattr(cache_plan, "release_memory", lambda device: None)


def no_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee the documentation …")


def outcome(engine: Any, prompts: list[list[int]]) -> tuple[dict[str, list[int]], dict[str, str]]:
    for index, prompt in enumerate(prompts):
        request = make_request(f"r{index}", prompt, GREEDY)
        request.arrival = float(index)
        engine.add(request)
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
    errors: dict[str, str] = {}
    while engine.has_work:
        for delta in engine.turn():
            tokens[delta.request_id] += delta.token_ids
            if delta.error_code:
                errors[delta.request_id] = delta.error_code
        engine.scheduler.check()
    return tokens, errors


PROMPTS = [[(7 * i + j) % 200 for j in range(12 + 3 * i)] for i in range(6)]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_shrink_until_they_fit(tiny: Any, depth: int) -> None:
    """Large steps find no memory: smaller ones do, nobody fails, and nobody's tokens change."""
    expected, _ = outcome(make_engine(tiny), PROMPTS)
    model = Faulty(tiny, lambda step: no_memory() if len(step.tokens) > 20 else None)
    engine = make_engine(model, depth=depth, late=depth == 2, max_rows=8, max_batch_tokens=64)
    tokens, errors = outcome(engine, PROMPTS)
    assert errors == {} and tokens == expected
    assert 8 <= engine.scheduler.step_cap <= 20


def test_a_request_no_step_has_memory_for_fails_alone(tiny: Any) -> None:
    prompts = [*PROMPTS[:3], [3, POISON, 5], *PROMPTS[3:]]
    expected, _ = outcome(make_engine(tiny), prompts)
    model = Faulty(tiny, lambda step: no_memory() if (step.tokens == POISON).any() else None)
    tokens, errors = outcome(make_engine(model), prompts)
    assert errors == {"r3": "out_of_memory"}
    assert {k: v for k, v in tokens.items() if k != "r3"} == {k: v for k, v in expected.items() if k != "r3"}


def test_memory_is_given_back_before_the_next_step_and_not_while_the_failed_one_holds_it(tiny: Any) -> None:
    released: list[int] = []
    model = Faulty(tiny, lambda step: no_memory() if model.num_steps == 1 else None)
    engine = make_engine(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.runtime.guard.release_memory", lambda device: released.append(model.num_steps))
        outcome(engine, PROMPTS[:2])
    assert released == [1], "once, after the first step"


class Mailbox:
    def __init__(self, messages: list[Message]):
        self.messages, self.deltas = messages, []

    def receive(self, block: bool) -> list[Message]:
        taken, self.messages = self.messages, []
        return taken

    def wait(self, seconds: float) -> None: ...

    def wake(self) -> None: ...

    def send(self, deltas: list[Delta]) -> None:
        self.deltas += deltas

    def report(self, fault: Any) -> None:
        pass

    def abandon(self, open_ids: Any, failure: QuireError) -> None:
        self.send(failure_deltas(open_ids, failure))


@pytest.mark.parametrize("where", ["forward", "wait"])
def test_an_error_for_good_ends_the_engine_with_its_own_code(tiny: Any, where: str) -> None:
    """The device answers nothing any more: everyone is told so at once, and no request is blamed for it."""
    engine = make_engine(tiny)
    runner = engine.workers.inner

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")

    class Broken:
        def forward(self, plan: Any) -> Any:
            return broken() if where == "forward" else runner.forward(plan)

        def sample(self, forward: Any, masks: Any = None) -> Any:
            runner.sample(forward, masks)
            return self

        def wait(self) -> Any:
            broken()

        def close(self) -> None: ...

    engine.workers = GuardedWorkers(Broken(), CPU, probe=broken)
    mailbox = Mailbox([make_request("a", [1, 2, 3], GREEDY), make_request("b", [4, 5], GREEDY)])
    driver = EngineDriver(engine, mailbox)
    driver.run()
    assert driver.failure is not None and driver.failure.code == "device_lost"
    assert "an illegal memory access was encountered." in str(driver.failure) and "\n" not in str(driver.failure)
    assert {(d.request_id, d.error_code) for d in mailbox.deltas} == {("a", "device_lost"), ("b", "device_lost")}


def test_an_error_the_device_survives_is_one_requests_own(tiny: Any) -> None:
    fault = RuntimeError("CUDA error: invalid configuration argument")
    model = Faulty(tiny, lambda step: fault if (step.tokens == POISON).any() else None)
    _, errors = outcome(make_engine(model), [[1, 2], [POISON, 4], [5]])
    assert errors == {"r1": "step_failed"}


def test_device_lost_is_an_error_with_a_code() -> None:
    error = DeviceLost("cuda:0 failed for good: CUDA error: uncorrectable ECC error encountered")
    assert isinstance(error, QuireError) and error.code == "device_lost" and error.hint


OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
def test_every_way_to_say_that_memory_ran_out(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text)) and not is_out_of_memory(ValueError(text))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_errors_that_mean_memory_ran_out_whatever_their_text() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError())
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))


# ---------------------------------------------------------------------------------------------------------------------
# At the start

SPEC = CacheSpec("full", "paged", (0,), (2, 4), "float32", page_tokens=4)


def planned(num_pages: int) -> Any:
    config = CacheConfig(num_pages=num_pages)
    return plan_memory([SPEC], config, device="cpu", available=1 << 30, host_available=0, weights=0, activations=0,
                       max_rows=4, max_model_len=100, max_batch_tokens=64)  # fmt: skip


def test_a_cache_that_can_not_be_allocated_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def store(specs: Any, units: list[int], host: Any, device: Any, **options: Any) -> str:
        asked.append(units[0])
        if units[0] > 70:
            raise no_memory()
        return "store"

    monkeypatch.setattr(cache_plan, "CacheStore", store)
    with pytest.warns(UserWarning, match=r"The cache was made smaller: 16\.0 KiB of the 25\.0 KiB planned") as said:
        made, memory = cache_plan.allocate_cache(planned(100), CPU)
    assert made == "store" and asked == [100, 90, 81, 72, 64] and memory.num_units == (64,)
    assert len(said) == 1 and memory.notes[-1] in str(said[0].message)
    monkeypatch.setattr(cache_plan, "CacheStore", lambda *args, **options: (_ for _ in ()).throw(no_memory()))
    with pytest.raises(QuireError, match="could not be allocated") as refused:
        cache_plan.allocate_cache(planned(100), CPU)
    assert refused.value.code == "out_of_memory"


def test_the_longest_sequence_follows_the_smaller_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cache_plan.CacheStore

    def store(specs: Any, units: list[int], host: Any, device: Any, **options: Any) -> Any:
        if units[0] > 20:
            raise no_memory()
        return real(specs, units, host, device, **options)

    monkeypatch.setattr(cache_plan, "CacheStore", store)
    with pytest.warns(UserWarning, match="made smaller"):
        _, memory = cache_plan.allocate_cache(planned(26), CPU)
    assert memory.num_units[0] <= 20 and memory.capacity_tokens == (memory.num_units[0] - 1) * 4


def test_other_errors_are_not_taken_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def store(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(cache_plan, "CacheStore", store)
    with pytest.raises(RuntimeError, match="no kernel image"):
        cache_plan.allocate_cache(planned(100), CPU)


def test_bytes_for_the_cache_are_kept_to(tiny: Any) -> None:
    engine = make_engine(tiny, num_pages=None, cache_memory=1 << 20)
    store = engine.workers.inner.store
    taken = sum(tensor.numel() * tensor.element_size() for tensor in store.tensors.values())
    assert 0.95 * (1 << 20) < taken <= 1 << 20


SHAPE = TrialShape(num_heads=4, num_kv_heads=2, head_dim=16, page_tokens=8,
                   window=None, qk_norm=True, dtype=torch.float32, cache_dtype=torch.float32, max_len=64)  # fmt: skip
ROWS = {
    "norm": ("rms_norm",),
    "gate_mul": ("gate_mul",),
    "rope": ("qk_norm_rope_write", "plan_angles"),
    "attention": ("paged_attention", "plan_attention"),
}


def fast_ops() -> Any:
    """The reference in other clothes: rows that can be told from the reference's."""
    fields = {name: (lambda row: lambda *args, **options: row(*args))(getattr(REFERENCE, name))
              for names in ROWS.values() for name in names}  # fmt: skip
    return replace(REFERENCE, captures=True, **fields)


def test_kernels_that_work_stay() -> None:
    ops = fast_ops()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settle_ops(ops, dense_trials(SHAPE, CPU), strict=False) is ops
        settle_ops(ops, dense_trials(replace(SHAPE, window=5, qk_norm=False), CPU), strict=True)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("how", ["raises", "lies"])
def test_a_kernel_that_fails_gives_way_to_the_reference(name: str, how: str) -> None:
    main = ROWS[name][0]
    real = getattr(REFERENCE, main)

    def bad(*args: Any) -> Any:
        if how == "raises":
            raise RuntimeError("PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr: …")
        return real(*args) * 1.5

    ops = replace(fast_ops(), **{main: bad})
    with pytest.warns(UserWarning, match=f"The {name} kernel can't be used here") as said:
        settled = settle_ops(ops, dense_trials(SHAPE, CPU), strict=False)
    assert len(said) == 1 and "\n" not in str(said[0].message)
    for other, fields in ROWS.items():
        for field in fields:
            assert (getattr(settled, field) is not getattr(ops, field)) == (other == name), field
    assert settled.captures == (name in ("norm", "gate_mul")), "the reference does not skip rows that pad a step"
    with pytest.raises(QuireError, match=name) as refused:
        settle_ops(ops, dense_trials(SHAPE, CPU), strict=True)
    assert refused.value.code == "kernel_failed"


@pytest.mark.parametrize(("said", "told"), [
    ("at 2:4:\ndef kernel(x_ptr):\n    tl.dot(a, b)\n    ^\nno such instruction\n", "no such instruction"),
    ("PTXAS error: Internal error\n`ptxas` stderr: …", "PTXAS error: Internal error"),
    ("", ""),
])  # fmt: skip
def test_the_line_says_what_is_wrong(said: str, told: str) -> None:
    assert reason(RuntimeError(said)) == f"RuntimeError: {told}"


def test_without_triton_strict_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.startswith("quire.kernels.triton.")]  # by other tests
    for name in ("quire.kernels.triton", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.warns(UserWarning, match="Triton can't be used"):
        assert select_ops("cuda") is REFERENCE
    for options in ({"strict": True}, {"kernels": "triton"}):
        with pytest.raises(QuireError) as refused:
            select_ops("cuda", **options)
        assert refused.value.code == "no_triton"
    assert select_ops("cuda", "torch", strict=True) is REFERENCE, "asked for, so nothing is done without"


OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update …"


@pytest.mark.parametrize("driver", [True, False])
def test_a_gpu_that_can_not_be_used(monkeypatch: pytest.MonkeyPatch, driver: bool) -> None:
    def unavailable() -> bool:
        warnings.warn(OLD, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(defaults, "has_nvidia_driver", lambda: driver)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert defaults.pick_device("auto").type == "cpu"
        assert defaults.pick_device("cpu", strict=True).type == "cpu"
    lines = [str(w.message) for w in said]
    assert len(lines) == driver and all("too old (found version 11040)); running on the CPU" in line for line in lines)
    with pytest.raises(QuireError, match="too old") as refused:
        defaults.pick_device("cuda")
    assert refused.value.code == "no_device"
    if driver:
        with pytest.raises(QuireError, match="too old"):
            defaults.pick_device("auto", strict=True)


def test_gpus_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    for name, index in (("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        device = defaults.pick_device(name)
        assert device == torch.device("cuda", index)
        enter_device(device)
    assert entered == [torch.device("cuda", 1)], "the first needs no call"
    with pytest.raises(
        QuireError, match=r"no device cuda:2: this machine has 2 usable GPUs, from cuda:0 on"
    ) as refused:
        defaults.pick_device("cuda:2")
    assert refused.value.code == "no_device"
    for name in ("cuda:", "cuda:x", "cuda:-1", "cuda:N", "mps:0", "gpu"):
        with pytest.raises(QuireError, match="must be one of auto, cpu, cuda, cuda:N, mps"):
            override_config(Config(), {"device": name})
    assert override_config(Config(), {"device": "cuda:7"}).engine.device == "cuda:7"


def test_mps_stands_between_cuda_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuireError, match="No MPS device is usable: ") as refused:
        defaults.pick_device("mps")
    assert refused.value.code == "no_device"
    results = {"mps": torch.ones(3), "cpu": torch.ones(3)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(defaults, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(defaults, "_mps_trial", lambda device: results[device])
    assert defaults.pick_device("mps").type == defaults.pick_device("auto").type == "mps"
    assert defaults.pick_device("cpu").type == "cpu"
    results["mps"] = torch.zeros(3)  # a GPU that computes wrong results is not used
    assert defaults.pick_device("auto").type == "cpu"
    with pytest.raises(QuireError, match="wrong results"):
        defaults.pick_device("mps")


def test_the_trial_of_an_apple_gpu_has_whole_numbers() -> None:
    result = defaults._mps_trial("cpu")
    assert torch.equal(result, result.round()) and result.abs().max() < 1 << 24, "so that any order of sums agrees"


def test_a_chore_that_fails_is_said_and_left(tiny: Any) -> None:
    """Preparing is optional: what fails ahead of time does not keep the engine from serving."""

    class Inner:
        def warm_ups(self) -> Any:
            yield
            raise no_memory()

    done = []
    with pytest.warns(UserWarning, match=r"Warm-up stopped \(Memory ran out on cpu"):
        for _ in GuardedWorkers(Inner(), CPU).warm_ups():
            done.append(1)
    assert done == [1]
    engine = make_engine(tiny)
    engine.prepare()
    assert not engine.has_warm_ups and outcome(engine, PROMPTS[:1])[1] == {}


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_a_kernel_that_never_gets_to_the_second_page_is_found(page_tokens: int) -> None:
    """64 is what a GPU has by default: the prompt that is tried has to be longer than that."""

    def forgetful(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float, *rest: Any) -> Tensor:
        kept = torch.arange(len(k_cache)).view(-1, 1, 1, 1) < 2  # pages 0, scratch, and 1
        return REFERENCE.paged_attention(q, k_cache * kept, v_cache * kept, plan, scale, *rest)

    ops = replace(fast_ops(), paged_attention=forgetful)
    with pytest.warns(UserWarning, match="attention kernel"):
        rows = dense_trials(replace(SHAPE, page_tokens=page_tokens), CPU)
        assert settle_ops(ops, rows, strict=False) is not ops


def test_explaining_which_kernel_each_op_gets() -> None:
    from quire.kernels.explain import explain_ops, try_all

    assert {entry["why"] for entry in explain_ops(CPU)} == {"default for a CPU"}
    assert {entry["why"] for entry in explain_ops(CPU, "torch")} == {"as configured"}
    assert {entry["why"] for entry in explain_ops(torch.device("cuda"), "torch")} == {"as configured"}

    def bad(*args: Any) -> Any:
        raise RuntimeError("no such\ninstruction")

    told = {entry["op"]: entry for entry in try_all(replace(fast_ops(), gate_mul=bad), SHAPE, CPU)}
    assert told["norm"]["implementation"] == "triton" and told["gate_mul"]["implementation"] == "torch"
    assert "no such instruction" in told["gate_mul"]["why"]


def test_an_engine_of_lower_precision_takes_less_memory(tmp_path: Path) -> None:
    """What the server gives the next engine after one ran out of memory, where it is asked to (--out-of-memory)."""
    folder = make_tiny("llama", tmp_path)[1]
    config = override_config(Config(), {"model": str(folder), "num_pages": 16, "threads": 1})
    parts = assemble.assemble(config)
    lower = assemble.lower_precision(config, parts)
    assert lower == {"dtype": "float16"}
    less = override_config(config, lower)
    smaller = assemble.assemble(less)
    assert smaller.memory.weights < parts.memory.weights and assemble.lower_precision(less, smaller) == {}
    fixed = override_config(config, {"deterministic": True})
    assert assemble.lower_precision(fixed, parts) == {}, "that mode knows float32 alone"
