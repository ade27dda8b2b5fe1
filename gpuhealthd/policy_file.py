"""The operator's policy file: moves a condition to another verdict.

    [verdicts]
    ecc-off = "unavailable"     # on this fleet a GPU without ECC serves nobody
    power-brake = "healthy"     # known, and being mended
    xid-109 = "unavailable"

Named in node.toml as `gpuhealth.policy_file`. A name that no table knows is an error, so that a typo is not silently
nothing. What says that nothing is known (a hung probe, stale data, a driver that does not fit its library) cannot be
moved: a node must not be healthy by ignorance.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuhealthd.rules import FAULTS, RECOVERY, RULES, UNKNOWN_RECOVERY
from gpuhealthd.verdicts import Verdict
from tie.daemon.errors import ConfigError

_FIXED: Final = frozenset(
    {
        "binding-missing", "driver-mismatch", "driver-missing", "driver-not-loaded", "no-devices", "not-measured",
        "probe-garbled", "probe-gone", "probe-hung", "probe-starting", "stale",
    }
)  # fmt: skip
_XID = re.compile(r"xid-[0-9]{1,5}")


def movable() -> frozenset[str]:
    """Every condition that a policy may move; each `xid-NUMBER` besides."""
    names = {rule.code for rule in RULES} | {row[0] for row in (*RECOVERY.values(), UNKNOWN_RECOVERY)} | FAULTS.keys()
    return frozenset(names - _FIXED)


def load(path: Path) -> Mapping[str, Verdict]:
    """Reads a policy file: code → verdict.

    Raises:
        ConfigError: it cannot be read, is no TOML, or names a condition or a verdict that there is not.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    table = tree.pop("verdicts", {})
    if tree or not isinstance(table, dict):
        raise ConfigError(f"{path}: only a table [verdicts] is expected")
    known = movable()
    verdicts: dict[str, Verdict] = {}
    for code, word in table.items():
        if code not in known and not _XID.fullmatch(code):
            hint = "this condition cannot be moved" if code in _FIXED else "docs/gpu-health.md lists every condition"
            raise ConfigError(f"{path}: there is no movable condition {code!r}", hint=hint)
        if not isinstance(word, str) or word.upper() not in Verdict.__members__:
            raise ConfigError(f"{path}: {code}: healthy, degraded or unavailable is expected")
        verdicts[code] = Verdict[word.upper()]
    return verdicts
