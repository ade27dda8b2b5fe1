"""`tie bench` apart from a node: the loop, what it counts, the figures, the prompts and the exit codes."""

import asyncio
import itertools
import json
import time
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner

from tie.cli import bench, bench_load
from tie.cli.bench_load import Load, Run, Sample, Usage
from tie.cli.bench_prompts import file_prompts, random_prompts
from tie.cli.bench_report import level, percentile
from tie.daemon.errors import ConfigError, PeerDiedError
from tie.device.errors import NodeBusyError, NodeFailedError, RequestRefusedError


class Answering:
    """A target that answers at once, or as it is told for the nth request."""

    def __init__(self, *outcomes, pieces=4, tokens=8):
        self.calls = []
        self.now = 0
        self.most = 0
        self._outcomes = outcomes
        self._pieces = pieces
        self._tokens = tokens

    async def ask(self, call, heard):
        number = len(self.calls)
        self.calls.append(call)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(self._pieces):
                heard(time.monotonic(), 0)
                await asyncio.sleep(0)
            outcome = self._outcomes[number] if number < len(self._outcomes) else None
            if outcome is not None:
                raise outcome
        finally:
            self.now -= 1
        return Usage(5, self._tokens)


async def ran(target, *, concurrency=2, stopping=None, **load):
    run = Run(concurrency, time.monotonic())
    load = Load(**{"requests": 6, "duration_s": None, "max_tokens": 8, **load})
    await bench_load.run(target, random_prompts(3, 0), load, run, stopping or asyncio.Event())
    return run


async def test_every_request_is_asked_once_and_so_many_at_a_time():
    target = Answering()
    run = await ran(target, concurrency=3, requests=10)
    assert len(target.calls) == len(run.samples) == 10
    assert target.most == 3
    assert len({call.seed for call in target.calls}) == 10
    figures = level(run)
    assert (figures.ok, figures.unanswered, figures.completion_tokens) == (10, 0, 80)
    assert figures.tokens_per_s == pytest.approx(80 / figures.elapsed_s)


async def test_no_request_begins_after_the_duration():
    target = Answering()
    run = await ran(target, requests=None, duration_s=0.05)
    begun = [sample.begun - run.begun for sample in run.samples]
    assert sum(at > 0.05 for at in begun) <= run.concurrency  # decided a moment before
    assert len(target.calls) > 2
    assert run.exhausted is not None


async def test_busy_refused_and_failed_are_counted_apart(monkeypatch):
    monkeypatch.setattr(bench_load, "_BUSY_PAUSE_S", 0)
    outcomes = [
        NodeBusyError("busy"),
        RequestRefusedError("no", status="STATUS_PROMPT_TOO_LONG"),
        NodeFailedError("lost", status="STATUS_INTERNAL"),
        PeerDiedError("gone"),
    ]
    figures = level(await ran(Answering(*outcomes)))
    assert (figures.ok, figures.busy, figures.refused, figures.failed) == (2, 1, 1, 2)
    assert figures.errors == {
        "NodeBusyError": 1,
        "RequestRefusedError STATUS_PROMPT_TOO_LONG": 1,
        "NodeFailedError STATUS_INTERNAL": 1,
        "PeerDiedError": 1,
    }


async def test_an_answer_without_an_end_fails_alone():
    class Silent(Answering):
        async def ask(self, call, heard):
            if not self.calls:
                self.calls.append(call)
                await asyncio.Event().wait()
            return await super().ask(call, heard)

    figures = level(await ran(Silent(), timeout_s=0.05))
    assert (figures.ok, figures.failed) == (5, 1)


async def test_stopping_ends_the_run_with_what_there_is():
    stopping = asyncio.Event()

    class Stopping(Answering):
        async def ask(self, call, heard):
            if len(self.calls) == 4:
                stopping.set()
                await asyncio.Event().wait()
            return await super().ask(call, heard)

    async with asyncio.timeout(10):
        run = await ran(Stopping(), requests=None, stopping=stopping)
    figures = level(run)
    assert run.interrupted
    assert (figures.ok, figures.unanswered) == (4, 0)
    assert figures.interrupted >= 1


async def test_a_bug_in_a_target_is_no_sample():
    with pytest.raises(ZeroDivisionError):
        await ran(Answering(ZeroDivisionError()))


async def test_tokens_of_pieces_without_a_count_are_shared_out():
    run = await ran(Answering(pieces=4, tokens=10), concurrency=1, requests=1)
    assert [tokens for _, tokens in run.samples[0].pieces] == [2.5] * 4


def test_figures_of_a_known_run():
    run = Run(1, begun=0.0, ended=10.0, exhausted=10.0)
    run.samples.append(Sample(0.0, "ok", 4.0, [(1.0, 2), (2.0, 2), (4.0, 4)], 5, 8))
    run.samples.append(Sample(4.0, "ok", 10.0, [(7.0, 4), (10.0, 4)], 5, 8))
    figures = level(run)
    assert figures.tokens_per_s == pytest.approx(1.6)
    assert figures.full_tokens_per_s == pytest.approx((2 + 4 + 4 + 4) / 9)
    assert figures.first_token_s is not None
    assert figures.first_token_s.p50 == pytest.approx(2.0)
    assert figures.gap_s is not None
    assert (figures.gap_s.p50, figures.gap_s.max) == (2.0, 3.0)
    assert figures.per_token_s is not None
    assert figures.per_token_s.p50 == pytest.approx(0.5)


def test_percentiles_interpolate():
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([0.0, 10.0], 0.5) == 5.0
    assert percentile(list(range(101)), 0.9) == 90


def test_random_prompts_are_the_same_for_the_same_seed_and_differ_otherwise():
    first, again, other = (list(itertools.islice(random_prompts(20, seed), 5)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({prompt.messages[0]["content"] for prompt in first}) == 5
    assert len(first[0].messages[0]["content"].split()) == 20


def test_a_file_gives_all_its_prompts_before_it_repeats_one(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "one"},
        {"messages": [{"role": "user", "content": "two"}], "max_tokens": 3},
        {"prompt": "three"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    taken = list(itertools.islice(file_prompts(file, 4), 6))
    assert len(set(map(str, taken[:3]))) == 3
    assert {prompt.max_tokens for prompt in taken} == {None, 3}


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        "nonsense",
        '{"prompt": 3}',
        '{"prompt": "x", "max_tokens": 0}',
        '{"messages": []}',
        '{"messages": ["hi"]}',
        '{"messages": [{"role": "user"}]}',
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=":2 is no prompt"):
        file_prompts(file, 0)


def test_a_missing_or_empty_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError):
        file_prompts(tmp_path / "none", 0)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError):
        file_prompts(tmp_path / "empty", 0)


def invoke(monkeypatch, target, *arguments):
    @asynccontextmanager
    async def opened():
        yield target

    monkeypatch.setattr(bench, "_target", lambda *_: opened())
    monkeypatch.setattr(bench_load, "_BUSY_PAUSE_S", 0)
    return CliRunner().invoke(
        bench.bench, ["--concurrency", "1,2", "--warm-up", "0", *arguments], standalone_mode=False
    )


def test_the_report_is_json_and_the_exit_code_zero(monkeypatch):
    result = invoke(monkeypatch, Answering(), "--json", "-")
    report = json.loads(result.stdout)
    assert result.return_value == 0
    assert [one["concurrency"] for one in report["levels"]] == [1, 2]
    assert [one["ok"] for one in report["levels"]] == [2, 4]
    assert report["options"]["max_tokens"] == 64


def test_a_request_that_is_not_answered_makes_the_exit_code_one(monkeypatch, tmp_path):
    report = tmp_path / "report.json"
    result = invoke(monkeypatch, Answering(NodeFailedError("lost", status="app")), "--json", str(report))
    assert result.return_value == 1
    assert "NodeFailedError app" in result.stdout
    assert json.loads(report.read_text())["levels"][0]["failed"] == 1


def test_there_must_be_something_to_measure(tmp_path):
    result = CliRunner().invoke(bench.bench, ["--run-dir", str(tmp_path)], standalone_mode=False)
    assert result.return_value == 78
    wrong = CliRunner().invoke(bench.bench, ["--concurrency", "1,none"])
    assert wrong.exit_code == 2
