"""Looks at hardware, one after the other, and what is judged of them."""

from gpuhealthd.classify import Assessment, History, classify
from gpuhealthd.rules import Policy
from gpuhealthd.snapshot import Device, Reading, Snapshot

POLICY = Policy(recover_after_polls=3)
GOOD_GPU = {"temperature_c": 40.0, "temperature_limit_c": 90.0, "recovery_action": 0.0, "ecc_uncorrected_volatile": 0.0}
GOOD_CPU = {"available_bytes": 8e9, "load1_per_core": 0.5}


def device(
    values: dict[str, float | None], *, faults: tuple[str, ...] = (), xids: tuple[int, ...] = (), name: str = "GPU-1"
) -> Device:
    """A device as it was read."""
    return Device(name, "GPU", tuple(Reading(key, value) for key, value in values.items()), faults, xids)


class Daemon:
    """Looks one after the other, a second apart."""

    def __init__(self, provider: str = "nvml", policy: Policy = POLICY) -> None:
        self.provider = provider
        self.policy = policy
        self.history = History()
        self.now = 0.0

    def see(self, *devices: Device, faults: tuple[str, ...] = ()) -> Assessment:
        self.now += 1.0
        snapshot = Snapshot(self.provider, self.now, devices, faults)  # type: ignore[arg-type]
        assessment, self.history = classify(snapshot, self.history, self.policy)
        return assessment

    def gpu(self, **values: float | None) -> Assessment:
        return self.see(device({**GOOD_GPU, **values}))

    def cpu(self, **values: float | None) -> Assessment:
        return self.see(device({**GOOD_CPU, **values}, name="cpu0"))
