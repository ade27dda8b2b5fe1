"""The controller's own sleep."""

from controllerd.clock import Wakefulness


def test_a_process_that_stood_still_knows_it() -> None:
    now = [100.0]
    wake = Wakefulness(lambda: now[0])
    for _ in range(8):
        now[0] += 0.25
        assert not wake.excuses(5.0)
    assert wake.take() == 0.0
    now[0] += 10.0
    assert wake.excuses(5.0)
    assert (wake.take(), wake.take()) == (10.0, 0.0)
    for _ in range(20):
        now[0] += 0.25
        wake.look()
    assert not wake.excuses(5.0)
