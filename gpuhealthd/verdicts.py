"""The two vocabularies of the daemon; numbers equal those of gpuhealth.proto."""

from enum import IntEnum


class Verdict(IntEnum):
    """How fit a device is. Ordered: larger is worse, so `max` is the worst."""

    HEALTHY = 1
    DEGRADED = 2  # serves, but somebody should look
    UNAVAILABLE = 3


class Action(IntEnum):
    """What would mend it. Ordered as a ladder: larger costs more."""

    NONE = 1
    RECYCLE_RUNTIME = 2
    RESET_GPU = 3  # every holder lets go first, the model owner included
    REBOOT = 4
    SERVICE = 5
