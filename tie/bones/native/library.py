"""The compiled forward step, as ctypes sees it: found, chosen for this machine's instruction set, and declared.

The same sources are built several times, each for an instruction set, and the best one that this processor has is
loaded. ctypes gives the interpreter lock up during each call.
"""

import ctypes
import functools
import importlib.machinery
import os
import platform
from pathlib import Path
from typing import Final

_AVX2: Final = frozenset(("avx2", "fma", "f16c", "bmi2"))
_AVX512: Final = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
LEVELS: Final[dict[str, frozenset[str]]] = {
    "avx512": _AVX512 | {"avx512_bf16"},
    "avx512vnni": _AVX512,
    "avxvnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
    "portable": frozenset(),
}
"""Instruction sets, best first, with the processor flags (Linux's names) that each needs."""

BLOCK_TOKENS: Final = 16
"""Tokens of a block of keys and values: `kBlockTokens` of model.h."""

LEVEL_VARIABLE: Final = "TIE_NATIVE_LEVEL"
"""Environment variable that chooses a level instead: for tests and measurements."""

_BORDER: Final = 4  # as api.cpp has it

_i32, _i64, _u64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


class Shape(ctypes.Structure):
    """`tie::Shape` of model.h, field by field."""

    _fields_ = (
        *((name, _i32) for name in (
            "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "context", "window",
        )),
        ("eps", ctypes.c_float),
    )  # fmt: skip


class Tensor(ctypes.Structure):
    """`tie::Tensor` of api.cpp, field by field."""

    _fields_ = (("data", _pointer), ("bytes", _u64), ("format", _i64))


class RawBatch(ctypes.Structure):
    """`tie::Batch` of model.h, field by field."""

    _fields_ = (
        *((name, _pointer) for name in (
            "counts", "starts", "table_sizes", "logit_counts", "tokens", "blocks", "copied", "logits",
        )),
        *((name, _i64) for name in ("slices", "rows", "table_blocks", "copies", "wanted", "threads")),
    )  # fmt: skip


_problem = ctypes.c_char_p  # what is wrong; None: nothing
_FUNCTIONS: Final = (
    ("block_bytes", _u64, (ctypes.POINTER(Shape), _u64)),
    ("new", _problem, (
        ctypes.POINTER(Shape), _u64, ctypes.POINTER(Tensor), _u64, _pointer, _u64, _i32, _i32,
        ctypes.POINTER(_pointer),
    )),
    ("free", None, (_pointer,)),
    ("step", _problem, (_pointer, ctypes.POINTER(RawBatch), _u64)),
)  # fmt: skip


def levels() -> tuple[str, ...]:
    """The levels that are built and that this processor has, best first."""
    return tuple(level for level, flags in LEVELS.items() if flags <= processor_flags() and _path(level) is not None)


def available() -> bool:
    """Whether there is a library for this machine. There is none where the package was built without a compiler."""
    return bool(levels())


def fast() -> bool:
    """Whether there is one with vector instructions that this processor has, or one that the environment names."""
    return any(level != "portable" for level in levels()) if LEVEL_VARIABLE not in os.environ else available()


def choose(level: str | None = None) -> str:
    """The level that is asked for, or that the environment asks for, or the best one."""
    return level or os.environ.get(LEVEL_VARIABLE) or next(iter(levels()), "portable")


@functools.cache
def load(level: str) -> ctypes.CDLL:
    """The library of a level.

    Raises:
        OSError: it is not built, or not from these sources, or this processor has not its instructions.
    """
    path = _path(level) if level in LEVELS else None
    if path is None or not LEVELS[level] <= processor_flags():
        raise OSError(f"there is no native library of level {level} for this machine")
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "tie_native_border") or library.tie_native_border() != _BORDER:
        raise OSError(f"the native library of level {level} is left over from another build: install the package again")
    for name, result, arguments in _FUNCTIONS:
        function = getattr(library, f"tie_native_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _path(level: str) -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_{level}{suffix}")
        if path.is_file():
            return path
    return None


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the processor has and the kernel lets programs use."""
    if platform.machine() != "x86_64":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
