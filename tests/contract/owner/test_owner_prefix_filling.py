"""While a prefix pool is filled: whoever goes, fails or hangs, and pools that are done without."""

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefix_runtime import Runtime, manifest, restarted
from tie.daemon.errors import PeerDiedError, PeerError
from tie.runtime import prefixes
from tie.runtime.prefixes import State, WarmError


def test_an_owner_that_goes_while_the_pool_is_filled_costs_a_new_start(path, pool_owner):
    runtime = Runtime(path)
    runtime.prefixes.warm(0, runtime.compute)
    assert runtime.prefixes.state is State.FILLING
    pool_owner.close()
    with pytest.raises(PeerError):
        runtime.prefixes.warm(1, runtime.compute)
    assert runtime.prefixes.state is State.COLD
    with pytest.raises(PeerDiedError):
        runtime.prefixes.warm(0, runtime.compute)


def test_a_runtime_that_ends_while_it_fills_leaves_nothing(path, pool_owner):
    runtime = Runtime(path)
    runtime.prefixes.warm(0, runtime.compute)
    runtime.prefixes.close()
    later = restarted(path)
    assert later.prefixes.state is State.COLD
    assert later.warm().sound()


def test_a_prompt_that_cannot_be_computed_leaves_the_cache_cold(path):
    runtime = Runtime(path)

    def fails(prompt):
        raise WarmError("no")

    with pytest.raises(WarmError):
        runtime.prefixes.warm(0, fails)
    assert runtime.prefixes.state is State.COLD
    assert runtime.warm().sound()


def test_neither_another_prompt_nor_the_end_waits_for_ever_for_one_that_hangs(path, monkeypatch, capfd):
    monkeypatch.setattr(prefixes, "_TURN_S", 0.05)
    monkeypatch.setattr(prefixes, "_CLOSE_S", 0.05)
    runtime = restarted(path)
    inside, may_end = threading.Event(), threading.Event()

    def hangs(prompt):
        inside.set()
        assert may_end.wait(30)
        return runtime.compute(prompt)

    with ThreadPoolExecutor(1) as beside:
        hanging = beside.submit(runtime.prefixes.warm, 0, hangs)
        try:
            assert inside.wait(30)
            with pytest.raises(WarmError):
                runtime.prefixes.warm(1, runtime.compute)
            runtime.prefixes.close()
            assert "prefix.still-warming" in capfd.readouterr().err
            assert not hanging.done()
        finally:
            may_end.set()
        hanging.result(30)
    runtime.prefixes.close()
    assert runtime.prefixes.state is State.OFF


def test_too_large_a_pool_is_done_without(path, pool_owner):
    pool_owner.pools.max_bytes = mmap.PAGESIZE
    runtime = Runtime(path)
    runtime.prefixes.warm(0, runtime.compute)
    assert (runtime.prefixes.state, runtime.pool) == (State.OFF, None)
    runtime.warm()
    assert runtime.computed == []


def test_a_prompt_that_is_too_long_to_be_kept_is_done_without(path, pool_owner):
    runtime = restarted(path, most_blocks=1)
    assert runtime.prefixes.state is State.OFF
    runtime.warm()
    assert (runtime.computed, pool_owner.pools._pools) == ([], {})


def test_without_whole_blocks_there_is_no_pool(path, pool_owner):
    runtime = restarted(path, bundle=manifest({"short": (1, 2, 3)}))
    assert runtime.prefixes.state is State.NONE
    runtime.prefixes.warm(0, runtime.compute)
    assert (runtime.computed, pool_owner.pools._pools) == ([], {})


def test_warming_from_several_threads_fills_one_pool(path, pool_owner):
    runtime = Runtime(path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: runtime.prefixes.warm(index % 3, runtime.compute), range(12)))
    assert runtime.prefixes.state is State.SEALED
    assert (len(runtime.computed), pool_owner.pools.seals) == (2, 1)
    assert runtime.sound()
