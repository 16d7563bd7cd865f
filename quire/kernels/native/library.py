"""Loads the compiled library with ctypes and declares its structs and functions.

`kernels.table` calls `open_native`; the rest of this folder works on the `Native` that it returns. The library is
loaded on the first call; without a usable library `NotBuilt` says why.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from quire.kernels.native.building import LIBRARY, SOURCES, source_digest
from quire.kernels.native.hook_structs import AdaptersDesc, HookFailed, ReductionDesc

ISAS = ("avx512", "avx2", "i8mm", "dotprod", "portable")  # best first
FORMS = {  # GGUF types with kernels
    "F32": 0,
    "F16": 1,
    "Q8_0": 2,
    "Q4_0": 3,
    "Q4_1": 4,
    "BF16": 5,
    "Q5_0": 6,
    "Q5_1": 7,
    "IQ4_NL": 8,
    "MXFP4": 9,
    "Q4_K": 10,
    "Q5_K": 11,
    "Q6_K": 12,
    "Q3_K": 13,
    "Q2_K": 14,
    "IQ4_XS": 15,
    "W8A8": 16,  # no type of GGUF: 8-bit weights with a scale per row, times 8-bit activations in blocks
}
FLOAT_FORMS = ("F32", "F16", "BF16")  # without blocks
BYTE_FORMS = ("W8A8",)  # whose products round activations to 8 bits, not to 16
K_BLOCK = 256  # columns of a block of a K type
ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu_fast": 1,
    "gelu_new": 1,
    "gelu_pytorch_tanh": 1,
    "gelu": 2,
    "relu": 3,
    "relu2": 4,
}
BLOCK = 32  # columns of a block
MAX_GROUP = 64  # maximum query heads per KV head in the attention kernel
MAX_MEMBERS = 16  # maximum of `Routing.group_members`
HOOK_FAILED = 2  # the error code of a call that a hook ended
HOW_TO_BUILD = "install a C++ compiler (Debian: apt-get install g++), then reinstall quire"


def unit_columns(form: str) -> int:
    """Returns the number of columns that a matrix of this form needs a multiple of."""
    if form in FLOAT_FORMS:
        return 1
    return K_BLOCK if form.endswith(("_K", "_XS")) else BLOCK


class NotBuilt(Exception):
    """The library can't be used; the message is one line."""


class Matrix(Structure):
    _fields_ = (("form", c_int32), ("lanes", c_int32), ("rows", c_int64), ("columns", c_int64), ("data", c_void_p))


class LinearDesc(Structure):
    _fields_ = (("parts", POINTER(Matrix)), ("num_parts", c_int64), ("bias", c_void_p))


class NormDesc(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class ExpertsDesc(Structure):
    _fields_ = (
        ("gate_up", POINTER(LinearDesc)),
        ("down", POINTER(LinearDesc)),
        ("num_experts", c_int64),
        ("width", c_int64),
        ("inner_width", c_int64),
        ("activation", c_int32),
        ("alpha", c_float),
        ("shift", c_float),
        ("limit", c_float),
    )


class MixtureDesc(Structure):
    _fields_ = (
        ("experts", ExpertsDesc),
        ("router", LinearDesc),
        ("choice_bias", c_void_p),
        ("shared_up", LinearDesc),
        ("shared_down", LinearDesc),
        ("shared_gate", LinearDesc),
        ("top_k", c_int64),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("group_members", c_int64),
        ("is_sigmoid", c_int32),
        ("normalises", c_int32),
        ("scale", c_float),
    )


class LayerDesc(Structure):
    _fields_ = (
        ("before_attention", NormDesc),
        ("after_attention", NormDesc),
        ("before_mlp", NormDesc),
        ("after_mlp", NormDesc),
        ("qkv", LinearDesc),
        ("out", LinearDesc),
        ("up", LinearDesc),
        ("down", LinearDesc),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
        ("mixture", POINTER(MixtureDesc)),
        ("group", c_int64),
        ("cache_index", c_int64),
        ("rope", c_int64),
    )


class StackDesc(Structure):
    _fields_ = (
        ("embedding", Matrix),
        ("layers", POINTER(LayerDesc)),
        ("num_layers", c_int64),
        ("norm", NormDesc),
        ("frequencies", c_void_p),
        ("rope_scales", c_void_p),
        ("num_ropes", c_int64),
        ("width", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("inner_width", c_int64),
        ("activation", c_int32),
        ("has_gate", c_int32),
        ("takes_mean", c_int32),
        ("is_parallel", c_int32),
        ("is_wide", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("softcap", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("reduction", POINTER(ReductionDesc)),
    )


class GroupDesc(Structure):
    _fields_ = (
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("slots", c_void_p),
        ("cache", c_void_p),
        ("plane", c_int64),
        ("page_tokens", c_int64),
        ("window", c_int64),
        ("form", c_int32),
    )


class StepDesc(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("groups", POINTER(GroupDesc)),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
        ("adapters", POINTER(AdaptersDesc)),
        ("vectors", c_void_p),
    )


class RecurrentDesc(Structure):
    _fields_ = (
        ("conv", c_void_p),
        ("conv_bias", c_void_p),
        ("a_log", c_void_p),
        ("dt_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
        ("num_groups", c_int64),
        ("num_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("conv_len", c_int64),
        ("norm_groups", c_int64),
        ("eps", c_float),
        ("dt_low", c_float),
        ("dt_high", c_float),
        ("beta_top", c_float),
        ("gate_first", c_int32),
        ("by_channel", c_int32),
    )


class ProjectionColumns(Structure):
    _fields_ = (("x", c_void_p), ("stride", c_int64))


class RowsDesc(Structure):
    _fields_ = (
        ("state", c_void_p),
        ("slot_stride", c_int64),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("firsts", c_void_p),
        ("counts", c_void_p),
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
    )


_ADDRESS = c_void_p
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "quire_sources": (c_char_p, ()),
    "quire_open": (c_void_p, (c_char_p, c_int32)),
    "quire_close": (None, (c_void_p,)),
    "quire_lanes": (c_int32, (c_void_p,)),
    "quire_matrix_bytes": (c_int64, (POINTER(Matrix),)),
    "quire_pack": (None, (c_void_p, POINTER(Matrix), _ADDRESS, _ADDRESS, c_int32, _ADDRESS)),
    "quire_rows": (None, (c_void_p, POINTER(Matrix), _ADDRESS, c_int64, _ADDRESS)),
    "quire_norm": (None, (c_void_p, _ADDRESS, _ADDRESS, c_float, c_int64, c_int64, _ADDRESS)),
    "quire_silu_mul": (None, (c_void_p, _ADDRESS, c_int64, c_int64, _ADDRESS)),
    "quire_linear": (
        c_int32,
        (
            c_void_p,
            POINTER(LinearDesc),
            _ADDRESS,
            c_int64,
            _ADDRESS,
            c_float,
            c_int32,
            _ADDRESS,
            _ADDRESS,
            POINTER(AdaptersDesc),
        ),
    ),
    "quire_rope_write": (
        c_int32,
        (
            c_void_p,
            POINTER(StepDesc),
            _ADDRESS,
            _ADDRESS,
            _ADDRESS,
            c_float,
            _ADDRESS,
            c_float,
            c_int64,
            c_int64,
            c_int64,
            _ADDRESS,
            _ADDRESS,
        ),
    ),
    "quire_attend": (
        c_int32,
        (
            c_void_p,
            POINTER(StepDesc),
            _ADDRESS,
            c_int64,
            c_int64,
            c_int64,
            _ADDRESS,
            _ADDRESS,
            c_float,
            c_float,
            _ADDRESS,
            _ADDRESS,
        ),
    ),
    "quire_lora": (c_int32, (_ADDRESS, _ADDRESS)),
    "quire_stack": (c_int32, (c_void_p, POINTER(StackDesc), POINTER(StepDesc), _ADDRESS)),
    "quire_experts": (
        c_int32,
        (c_void_p, POINTER(ExpertsDesc), _ADDRESS, c_int64, _ADDRESS, _ADDRESS, c_int64, _ADDRESS, _ADDRESS),
    ),
    "quire_mixture": (c_int32, (c_void_p, POINTER(MixtureDesc), _ADDRESS, c_int64, _ADDRESS)),
    "quire_recurrent": (
        c_int32,
        (
            c_void_p,
            POINTER(RecurrentDesc),
            POINTER(RowsDesc),
            POINTER(ProjectionColumns),
            POINTER(ProjectionColumns),
            POINTER(ProjectionColumns),
            POINTER(ProjectionColumns),
            _ADDRESS,
        ),
    ),
    "quire_short_conv": (
        c_int32,
        (c_void_p, _ADDRESS, _ADDRESS, c_int64, c_int64, POINTER(RowsDesc), POINTER(ProjectionColumns), _ADDRESS),
    ),
    "quire_group_bytes": (c_int64, (c_int64, c_int64)),
    "quire_group_join": (c_void_p, (_ADDRESS, c_int64, c_int64, c_int64, c_double)),
    "quire_group_leave": (None, (c_void_p,)),
    "quire_group_rejoin": (None, (c_void_p, _ADDRESS)),
    "quire_group_end": (None, (_ADDRESS, c_int64)),
    "quire_group_has_ended": (c_int32, (_ADDRESS, c_int64)),
    "quire_group_reduce": (c_int32, (c_void_p, _ADDRESS, c_int64)),
    "quire_group_gather": (c_int32, (c_void_p, _ADDRESS, POINTER(c_int64), _ADDRESS)),
    "quire_group_missing": (c_int64, (c_void_p,)),
    "quire_group_step": (None, (c_void_p, c_int64)),
    "quire_group_read": (None, (_ADDRESS, c_int64, POINTER(c_int64), POINTER(c_int64))),
    "quire_choose": (
        c_int32,
        (
            c_void_p,
            _ADDRESS,
            c_int64,
            c_int64,
            c_int64,
            _ADDRESS,
            _ADDRESS,
            _ADDRESS,
            _ADDRESS,
            c_int64,
            _ADDRESS,
            _ADDRESS,
        ),
    ),
}
# Functions that return an error code if memory runs out or a hook fails.
_MAY_FAIL = (
    "quire_linear",
    "quire_rope_write",
    "quire_attend",
    "quire_stack",
    "quire_experts",
    "quire_mixture",
    "quire_recurrent",
    "quire_short_conv",
    "quire_choose",
)


def _check(code: int, function: object, arguments: object) -> None:
    if code == HOOK_FAILED:
        raise HookFailed("a hook of the native kernels ended the step")
    if code:
        raise MemoryError("the native kernels could not allocate memory")


class Native:
    """The kernels of one instruction set with a thread pool. `context` is the first argument of calls to `library`."""

    def __init__(self, library: ctypes.CDLL, isa: str, num_threads: int):
        self.library = library
        self.isa = isa
        self.num_threads = num_threads
        self.context: int | None = library.quire_open(isa.encode(), num_threads)
        if self.context is None:
            raise NotBuilt(f"this machine or this build has no {isa} kernels")
        self.lanes: int = library.quire_lanes(self.context)


@cache
def open_native(isa: str | None, num_threads: int) -> Native:
    """Opens the kernels of `isa`, or of the best instruction set of this machine if None; raises NotBuilt if there are
    none.

    Calls with equal arguments share a thread pool, so that several models in a process do not oversubscribe the cores.
    """
    library = load_library()
    if isa is not None:
        return Native(library, isa, num_threads)
    for name in ISAS:
        try:
            return Native(library, name, num_threads)
        except NotBuilt:
            continue
    raise NotBuilt("the library has no kernels for this machine")


@cache
def load_library() -> ctypes.CDLL:
    problems = []
    for path in _library_paths():
        try:
            library = ctypes.CDLL(str(path))
            library.quire_sources.restype = c_char_p
            found = library.quire_sources().decode()
        except (OSError, AttributeError) as error:
            problems.append(f"{path} can't be loaded: {error}")
            continue
        if SOURCES.is_dir() and found != source_digest():
            problems.append(f"{path} was built from other sources")
            continue
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            if name in _MAY_FAIL:
                function.errcheck = _check
        return library
    raise NotBuilt("; ".join(problems) or "the native kernels were not built when quire was installed")


def _library_paths() -> list[Path]:
    """Returns where the library may be: beside this file, or in an installed package if this is a source tree."""
    beside = Path(__file__).with_name(LIBRARY)
    if beside.exists():
        return [beside]
    from importlib.metadata import distributions

    # A source tree may have distribution metadata of its own, which is found first and has no library.
    installed = (
        Path(str(found.locate_file(f"quire/kernels/native/{LIBRARY}"))) for found in distributions(name="quire")
    )
    return [path for path in installed if path.exists()]
