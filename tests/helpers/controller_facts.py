"""Facts of a node that is well, for tests to change."""

from controllerd.facts import Facts, Gpu, Owner, Runtime

GPU = Gpu(fit=True, fresh=True, advises_recycle=False)
OWNER = Owner("o", 1, "ready")


def runtime(name: str, state: str = "ready", *, warmed: bool = True) -> Runtime:
    return Runtime(name, state == "ready", state, True, warmed, "m", "r", 0, 1.0, 1)


def facts(
    present: Runtime | None = None, *, cloudboard: bool = True, busy: bool = False, in_flight: int = 0, gpu: Gpu = GPU
) -> Facts:
    return Facts(present, gpu, OWNER, cloudboard, busy_acknowledged=busy, in_flight=in_flight)
