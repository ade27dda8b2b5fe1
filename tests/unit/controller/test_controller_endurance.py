"""Patience with a node that flaps, and with one that fails."""

from controllerd.endurance import LONGEST_HOLD_S, SOON_S, Endurance


def test_a_node_that_flaps_returns_later_each_time() -> None:
    endurance, now, waited = Endurance(4, 1e9), 0.0, []
    for _ in range(8):
        endurance.steady(now, ready=True)
        began = now
        while not endurance.steady(now, ready=True):
            now += 0.5
        waited.append(now - began)
        endurance.available(now)
        now += 1.0
        endurance.lost(now)
    assert waited == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, LONGEST_HOLD_S]


def test_a_loss_after_long_peace_is_forgiven_at_once() -> None:
    endurance = Endurance(4, 1e9)
    for now in (0.0, 1.0, 3.0):
        endurance.available(now)
        endurance.lost(now + 0.5)
    endurance.available(10.0)
    endurance.lost(10.0 + SOON_S)
    assert endurance.steady(75.0, ready=True)


def test_a_withdrawal_after_long_peace_is_not_paid_for_earlier_losses() -> None:
    endurance = Endurance(4, 1e9)
    for now in (0.0, 1.0, 3.0):
        endurance.available(now)
        endurance.lost(now + 0.5)
    endurance.available(10.0)
    assert not endurance.watch(10.0 + SOON_S, available=True, excused=False)
    endurance.withdrawn()
    assert not endurance.steady(1010.0, ready=False)
    assert endurance.steady(1020.0, ready=True)


def test_gates_that_hold_by_fits_and_starts_do_not_hold() -> None:
    endurance = Endurance(4, 1e9)
    for now in (0.0, 10.0):
        endurance.available(now)
        endurance.lost(now + 1)
    held = [endurance.steady(20.0 + 0.5 * look, ready=look % 2 == 0) for look in range(20)]
    assert not any(held)


def test_the_ladder() -> None:
    endurance = Endurance(2, 1e9)
    steps = []
    for _ in range(6):
        due = endurance.exhausted()
        if due:
            steps.append(endurance.climb())
        endurance.tried()
        if due and steps == ["owner", "owner"]:  # the first time it did not hear
            endurance.owner_asked()
    assert steps == ["owner", "owner", "give-up"]
    assert endurance.given_up
    endurance.begin_anew()
    assert not endurance.given_up
    assert not endurance.exhausted()


def test_a_node_that_stays_away_gives_up_once() -> None:
    endurance = Endurance(4, 100.0)
    said = [endurance.watch(float(now), available=False, excused=now < 50) for now in range(300)]
    assert [now for now, gave_up in enumerate(said) if gave_up] == [150]
    endurance.available(300.0)
    endurance.watch(300.0 + SOON_S, available=True, excused=False)
    assert not endurance.given_up
