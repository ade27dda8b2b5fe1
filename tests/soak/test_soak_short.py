"""A short soak in the tests, so that the long one starts when it is wanted; and its own judgement."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the soak is a program with modules beside it

from soak_watch import LASTING, MIB, Moment, drift, growth, kept_open, restarted  # noqa: E402


def moments(sizes, name="tritonserver", **more):
    return [
        Moment(
            t=30.0 * index,
            rss={name: size},
            descriptors={name: 20},
            instances={lasting: [7] for lasting in LASTING},
            **more,
        )
        for index, size in enumerate(sizes)
    ]


def test_growth_is_seen_and_noise_is_not():
    steady = [100 * MIB + (index % 3) * MIB for index in range(40)]
    assert growth(moments(steady)) == []
    assert growth(moments([*steady[:20], 300 * MIB, *steady[21:]])) == []
    assert growth(moments([100 * MIB + index * MIB // 2 for index in range(40)])) == [
        "memory of tritonserver grew by 19.5 MiB"
    ]


def test_more_shared_memory_is_seen():
    growing = moments([100 * MIB] * 40)
    for index, moment in enumerate(growing):
        moment.shm = index * MIB
    assert [line.partition(" grew")[0] for line in growth(growing)] == ["/dev/shm"]


def test_descriptors_that_stay_open_are_seen():
    before, after = moments([MIB] * 2)
    assert kept_open(before, after) == []
    after.descriptors["tritonserver"] += 9
    assert kept_open(before, after) == ["tritonserver holds 9 descriptors more than at first"]


def test_drift_is_the_median_slope():
    assert drift([(0, 0), (10, 10), (20, 20)]) == 20
    assert drift([(0, 5), (10, 5), (20, 900), (30, 5)]) == 0
    assert drift([(0, 3)]) == drift([]) == 0


def test_a_restarted_daemon_is_seen():
    several = moments([MIB] * 3)
    assert restarted(several) == []
    several[2].instances["tie-kps"] = [8]
    assert restarted(several) == ["tie-kps was restarted"]


@pytest.mark.node
@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TIE_SLOW") != "1", reason="a minute of load; TIE_SLOW=1 runs it")
def test_a_minute_of_everything(tmp_path):
    minutes = "1" if os.environ.get("TIE_SLOW") == "1" else "0.3"
    command = [sys.executable, str(HERE / "soak.py"), "--minutes", minutes, "--every", "5"]
    command += ["--out", str(tmp_path / "soak.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "all was well" in done.stdout
