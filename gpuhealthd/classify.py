"""From a snapshot and what came before to verdicts. Pure: no clock, no I/O.

Order of evidence: the driver's own verdict (recovery-action field), return codes that are faults, XIDs, counters, soft
signals. The worst wins. Values that no table knows fail closed. A device is withdrawn at the first bad look and
returns only after `recover_after_polls` looks in a row were better; XIDs that make a device unavailable never clear
by time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpuhealthd import xid
from gpuhealthd.rules import (
    FAULTS,
    LEAST,
    MOST,
    RECOVERY,
    RULES,
    UNKNOWN_FAULT,
    UNKNOWN_RECOVERY,
    Looks,
    Policy,
)
from gpuhealthd.snapshot import Device, Reading, Snapshot
from gpuhealthd.verdicts import Action, Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """One piece of evidence: a stable code with what it means."""

    code: str
    verdict: Verdict
    action: Action


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one device or on the node, with the codes that led to it."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    action: Action = Action.NONE


@dataclass(frozen=True, slots=True)
class DeviceJudgement:
    """A device with its judgement; `readings` are the newest, empty for a device that has vanished."""

    id: str
    name: str
    judgement: Judgement
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class Assessment:
    """The node's judgement, the worst of all devices and of the provider itself, and each device's."""

    node: Judgement
    devices: tuple[DeviceJudgement, ...] = ()


@dataclass(frozen=True, slots=True)
class Track:
    """What is remembered of one device.

    Attributes:
        shown: the judgement in force.
        better: looks in a row that were better than `shown`.
        values: measured values of the look before, for rates.
        streaks: for each soft signal, looks in a row that showed it.
        xids: occurrences of each XID number among the driver's events.
        log_xids: and in the kernel's log.
        fatal: XIDs that the log called fatal.
        most: the largest value in this boot of what `rules.MOST` names.
        least: the smallest of what `rules.LEAST` names.
    """

    name: str = "unknown"
    shown: Judgement | None = None
    better: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    streaks: Mapping[str, int] = field(default_factory=dict)
    xids: Mapping[int, int] = field(default_factory=dict)
    log_xids: Mapping[int, int] = field(default_factory=dict)
    fatal: frozenset[int] = frozenset()
    most: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)

    def occurrences(self) -> dict[int, int]:
        """How often each XID came. Most come both ways, some only one: the larger count is the true one."""
        numbers = self.xids.keys() | self.log_xids.keys()
        return {number: max(self.xids.get(number, 0), self.log_xids.get(number, 0)) for number in sorted(numbers)}


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered between two looks. The empty history is that of a daemon that has just started."""

    devices: Mapping[str, Track] = field(default_factory=dict)
    provider: Track = field(default_factory=Track)
    taken_s: float | None = None


HEALTHY: Final = Judgement(Verdict.HEALTHY)


def classify(snapshot: Snapshot, history: History, policy: Policy) -> tuple[Assessment, History]:
    """Judges one look.

    Returns:
        The assessment and the history to pass in with the next look.
    """
    elapsed = 0.0 if history.taken_s is None else max(0.0, snapshot.taken_s - history.taken_s)
    tracks: dict[str, Track] = {}
    judged: list[DeviceJudgement] = []
    for device in snapshot.devices:
        track = history.devices.get(device.id, Track())
        if device.formerly is not None and device.formerly in history.devices:
            track = _joined(track, history.devices[device.formerly])
        track = _look(device, track, snapshot.provider, elapsed, policy)
        tracks[device.id] = track
        judged.append(DeviceJudgement(device.id, device.name, track.shown or HEALTHY, device.readings))
    # Without the provider nothing can be said about devices: they have not vanished, they were not seen.
    seen = tracks.keys() | {device.formerly for device in snapshot.devices}
    vanished = () if snapshot.faults else tuple(key for key in history.devices if key not in seen)
    for key, track in history.devices.items():
        if key in seen:
            continue
        if key in vanished:
            missing = _judge(_moved([_fault("device-missing")], policy))
            track = replace(track, shown=missing, better=0)  # noqa: PLW2901 (the same device's next track)
            judged.append(DeviceJudgement(key, track.name, missing))
        tracks[key] = track
    provider = _hold(history.provider, _judge(_provider_findings(snapshot, policy)), policy)
    node = _worst([provider.shown or HEALTHY, *(entry.judgement for entry in judged)])
    return Assessment(node, tuple(judged)), History(tracks, provider, snapshot.taken_s)


def blind(code: str, history: History) -> tuple[Assessment, History]:
    """The assessment when no look came back: unavailable, and the way back is as slow as from any other fault."""
    finding = _fault(code)
    judgement = Judgement(finding.verdict, (finding.code,), finding.action)
    return Assessment(judgement), replace(history, provider=replace(history.provider, shown=judgement, better=0))


def _joined(track: Track, former: Track) -> Track:
    """One track of a device that was known under two ids; the way back is as slow as from the worse of both."""
    shown = (entry for entry in (track.shown, former.shown) if entry is not None)
    return replace(
        track,
        shown=max(shown, key=lambda judgement: judgement.verdict, default=None),
        better=0,
        xids=_sum(track.xids, former.xids),
        log_xids=_sum(track.log_xids, former.log_xids),
        fatal=track.fatal | former.fatal,
    )


def _look(device: Device, track: Track, provider: str, elapsed: float, policy: Policy) -> Track:
    values = {reading.name: reading.value for reading in device.readings if reading.value is not None}
    findings = [_fault(code) for code in device.faults]
    if not values and not findings:
        findings.append(_fault("not-measured"))
    if "recovery_action" in values:
        findings.extend(_recovery(values["recovery_action"]))
    before = track.occurrences()
    track = replace(
        track,
        xids=_count(track.xids, device.xids),
        log_xids=_count(track.log_xids, device.log_xids),
        fatal=track.fatal | frozenset(device.fatal_xids),
        most=_marks(track.most, values, MOST, max),
        least=_marks(track.least, values, LEAST, min),
    )
    counts = track.occurrences()
    new = frozenset(number for number, count in counts.items() if count > before.get(number, 0))
    findings.extend(_xid_findings(new, counts, track.fatal, policy))
    looks = Looks(values, track.values, elapsed, policy, track.most, track.least)
    streaks: dict[str, int] = {}
    for rule in RULES:
        if provider not in rule.providers or not rule.holds(looks):
            continue
        streaks[rule.code] = streak = track.streaks.get(rule.code, 0) + 1
        if rule.unavailable_after and streak >= rule.unavailable_after:
            findings.append(Finding(rule.code, Verdict.UNAVAILABLE, rule.action))
        elif streak >= rule.after:
            findings.append(Finding(rule.code, rule.verdict, rule.action))
    held = _hold(track, _judge(_moved(findings, policy)), policy)
    return replace(held, name=device.name, values=values, streaks=streaks)


def _marks(
    marks: Mapping[str, float],
    values: Mapping[str, float],
    names: frozenset[str],
    better: Callable[[float, float], float],
) -> Mapping[str, float]:
    return {**marks, **{name: better(values[name], marks.get(name, values[name])) for name in names & values.keys()}}


def _count(counts: Mapping[int, int], numbers: Iterable[int]) -> Mapping[int, int]:
    counted = dict(counts)
    for number in numbers:
        counted[number] = counted.get(number, 0) + 1
    return counted


def _sum(counts: Mapping[int, int], others: Mapping[int, int]) -> Mapping[int, int]:
    return {number: counts.get(number, 0) + others.get(number, 0) for number in counts.keys() | others.keys()}


def _moved(findings: Iterable[Finding], policy: Policy) -> Iterable[Finding]:
    """The findings with the operator's verdicts in place of ours."""
    for finding in findings:
        verdict = policy.verdicts.get(finding.code, finding.verdict)
        if verdict is not Verdict.HEALTHY:
            yield replace(finding, verdict=verdict)


def _recovery(value: float) -> Iterable[Finding]:
    code, verdict, action = RECOVERY.get(int(value), UNKNOWN_RECOVERY) if value == int(value) else UNKNOWN_RECOVERY
    if verdict is not Verdict.HEALTHY:
        yield Finding(code, verdict, action)


def _xid_findings(
    new: frozenset[int], counts: Mapping[int, int], fatal: frozenset[int], policy: Policy
) -> Iterable[Finding]:
    for number, count in counts.items():
        rule = xid.FATAL if number in fatal & xid.NVLINK_5 else xid.rule(number)
        moved = policy.verdicts.get(f"xid-{number}")
        if moved is not None:
            rule = replace(rule, verdict=moved, repeat=0)
        lasting = rule.verdict is Verdict.UNAVAILABLE or (rule.repeat and count >= rule.repeat)
        if lasting:
            action = rule.action if rule.verdict is Verdict.UNAVAILABLE else max(rule.action, Action.RESET_GPU)
            yield Finding(f"xid-{number}", Verdict.UNAVAILABLE, action)
        elif number in new and rule.verdict is Verdict.DEGRADED and not xid.explained(number, new):
            yield Finding(f"xid-{number}", Verdict.DEGRADED, rule.action)


def _provider_findings(snapshot: Snapshot, policy: Policy) -> Iterable[Finding]:
    # Whatever the code means for one device: as a fault of the provider it means that no device was seen.
    yield from (replace(_fault(code), verdict=Verdict.UNAVAILABLE) for code in snapshot.faults)
    if not snapshot.faults:
        if not snapshot.devices:
            yield _fault("no-devices")
        elif len(snapshot.devices) < policy.expected_devices:
            yield from _moved([_fault("device-missing")], policy)


def _fault(code: str) -> Finding:
    verdict, action = FAULTS.get(code, UNKNOWN_FAULT)
    return Finding(code, verdict, action)


def _judge(findings: Iterable[Finding]) -> Judgement:
    ordered = sorted(set(findings), key=lambda finding: (-finding.verdict, finding.code))
    if not ordered:
        return HEALTHY
    worst = ordered[0].verdict
    # A degraded finding's cheap action must not hide behind, nor speak for, an unavailable one.
    action = max(finding.action for finding in ordered if finding.verdict is worst)
    return Judgement(worst, tuple(dict.fromkeys(finding.code for finding in ordered)), action)


def _hold(track: Track, seen: Judgement, policy: Policy) -> Track:
    """Quick to withdraw, slow to return: a better judgement counts only after several looks in a row."""
    shown = track.shown
    if shown is None or seen.verdict >= shown.verdict:
        return replace(track, shown=seen, better=0)
    if track.better + 1 >= policy.recover_after_polls:
        return replace(track, shown=seen, better=0)
    return replace(track, shown=replace(shown, reasons=_recovering(shown.reasons)), better=track.better + 1)


def _recovering(reasons: tuple[str, ...]) -> tuple[str, ...]:
    return reasons if "recovering" in reasons else (*reasons, "recovering")


def _worst(judgements: Iterable[Judgement]) -> Judgement:
    listed = list(judgements)
    worst = max(entry.verdict for entry in listed)
    if worst is Verdict.HEALTHY:
        return HEALTHY
    named = [entry for entry in listed if entry.verdict is worst]
    codes = (code for entry in sorted(listed, key=lambda entry: -entry.verdict) for code in entry.reasons)
    return Judgement(worst, tuple(dict.fromkeys(codes)), max(entry.action for entry in named))
