"""docs/gpu-health.md lists every condition and every XID."""

import re
from pathlib import Path

from gpuhealthd import policy_file
from gpuhealthd.rules import FAULTS, RECOVERY, RULES, UNKNOWN_RECOVERY
from gpuhealthd.xid import XIDS

TEXT = (Path(__file__).parents[3] / "docs" / "gpu-health.md").read_text()


def test_every_condition_is_listed_with_its_verdict() -> None:
    rows = dict(re.findall(r"(?m)^\| `([a-z0-9-]+)`(?: \*)? \| [^|]* \| ([a-z]+)", TEXT))
    expected = {rule.code: rule.verdict for rule in RULES}
    expected |= {code: verdict for code, (verdict, _) in FAULTS.items()}
    expected |= {code: verdict for code, verdict, _ in (*RECOVERY.values(), UNKNOWN_RECOVERY)}
    expected.pop("recovery-none")
    assert rows == {code: verdict.name.lower() for code, verdict in expected.items()}


def test_what_cannot_be_moved_is_marked() -> None:
    marked = re.findall(r"(?m)^\| `([a-z0-9-]+)` \* \|", TEXT)
    assert set(marked) == FAULTS.keys() - policy_file.movable()


def test_every_xid_is_listed() -> None:
    rows = re.findall(r"(?m)^\| (\d[^|]*) \|", TEXT[TEXT.index("## XIDs") :])
    numbers = {int(number) for row in rows for number in re.findall(r"\d+", row)}
    assert numbers | set(range(144, 151)) == set(XIDS)
