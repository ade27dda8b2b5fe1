"""bones' exception tree.

    BonesError
    ├── ConfigError     the model's configuration is malformed, impossible or not supported
    ├── ArenaError      a tensor table does not fit its arena
    ├── WeightsError    a tensor that the model needs is missing, or has the wrong shape or dtype
    ├── DeviceError     the GPU that is asked for is not there, or has no memory left
    ├── RankError       another rank of the model is gone, or does not answer in time
    ├── InputError      a batch or a sampling parameter that cannot be carried out; nothing was computed or changed
    └── SamplingError   rows that leave no token to choose

No message contains what a request carried: neither token ids, nor parameters, nor logits.
"""

from collections.abc import Sequence


class BonesError(Exception):
    """Base of every error of this library."""


class ConfigError(BonesError):
    """The model's configuration is malformed, impossible or not supported."""


class ArenaError(BonesError):
    """A tensor table does not fit its arena."""


class WeightsError(BonesError):
    """A tensor that the model needs is missing, or has the wrong shape or dtype."""


class DeviceError(BonesError):
    """The GPU that is asked for is not there, cannot compute, or has no memory left."""


class RankError(BonesError):
    """Another rank of the model is gone, or does not answer in time: nothing that was computed can be trusted."""


class InputError(BonesError):
    """A batch or a sampling parameter that cannot be carried out; nothing was computed or changed."""


class SamplingError(BonesError):
    """Some rows leave no token to choose: everything is masked, or the logits are not finite.

    `tie.bones.sampler.sample` is a pure function, so the caller may fail these rows and call again with the others.

    Attributes:
        rows: indices of the rows in the call.
    """

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.rows = tuple(rows)
