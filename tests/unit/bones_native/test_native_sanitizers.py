"""The native library under the compiler's sanitizers, driven with random models, batches and lies (driver.cpp)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import tie.bones.native
from tie.bones.native import library

SOURCES = Path(tie.bones.native.__file__).parent
DRIVER = Path(__file__).with_name("driver.cpp")
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [f"-m{name}" for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")]
FLAGS = {
    "avx512": [*AVX2, *AVX512, "-mavx512bf16"],
    "avx512vnni": [*AVX2, *AVX512],
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx2": AVX2,
    "portable": [],
}
COMPILER = shutil.which("g++") or shutil.which("clang++")
BUILD_S = 240
RUN_S = 240

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(not (SOURCES / "api.cpp").exists(), reason="the sources are not installed"),
    pytest.mark.timeout(BUILD_S + RUN_S + 20),
]


def _build(folder: Path, sanitizers: str, flags: list[str]) -> Path:
    program = folder / "driver"
    command = [
        str(COMPILER), "-std=c++20", "-O1", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *flags,
        f"-I{SOURCES}", str(DRIVER), str(SOURCES / "api.cpp"), str(SOURCES / "forward.cpp"), "-pthread", "-o",
        str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if built.returncode and ("sanitize" in built.stderr or "cannot find" in built.stderr):
        pytest.skip("the compiler has no such sanitizer")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("level", list(FLAGS))
def test_nothing_is_touched_that_should_not_be(tmp_path, level, sanitizers):
    if not library.LEVELS[level] <= library.processor_flags():
        pytest.skip("this processor has not its instructions")
    if sanitizers == "thread" and level != "portable":
        pytest.skip("threads work alike at every level")
    if level != "portable" and os.environ.get("TIE_SLOW") != "1":
        pytest.skip("compiles for minutes: TIE_SLOW=1")
    program = _build(tmp_path, sanitizers, FLAGS[level])
    models = "10" if sanitizers == "thread" else "40"
    ran = subprocess.run(
        [str(program), models],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel's address layout is beyond the sanitizer")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "refusals" in ran.stdout
