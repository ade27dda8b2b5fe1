"""Who serves a request, and who listens."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from tie.cli.evidence import identity
from tie.daemon import rpc
from tie.daemon.triton import service_pb2, service_pb2_grpc
from tie.device.async_client import AsyncClient

pytestmark = pytest.mark.node
ALL_S = 200.0
TOKENS = 48


async def test_twenty_at_once_are_served_by_twenty_processes_in_common_batches(node, model):
    standby = node.config.cloudboard.standby
    seen = set()
    begin = len(node.log_text())

    async def watch():
        while True:
            seen.update(map(identity, node.find("tie-cloud-app")))
            await asyncio.sleep(0.05)

    async def one(number):
        key = node.config.sockets.statement_key.with_suffix(".pub")
        async with AsyncClient(node.url, key) as client:
            question = [{"role": "user", "content": f"Count from {number}."}]
            answer = await client.chat(question, model=model, max_tokens=TOKENS, ignore_eos=True)
            return await answer.result()

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(ALL_S):
        results = await asyncio.gather(*(one(number) for number in range(20)))
    watching.cancel()
    assert [result.completion_tokens for result in results] == [TOKENS] * 20

    served = {}
    async with asyncio.timeout(20):
        while len(served) < 20:
            await asyncio.sleep(0.1)
            served = {line["request_id"]: line["pid"] for line in records(node, begin) if line["event"] == "app.done"}
    assert len(set(served.values())) == 20
    processes = {pid: born for pid, born in seen if pid in set(served.values())}
    assert len(processes) == 20
    async with asyncio.timeout(20):
        while {identity(process) for process in node.find("tie-cloud-app")} & set(processes.items()):
            await asyncio.sleep(0.1)
        while len(node.find("tie-cloud-app")) > standby:
            await asyncio.sleep(0.1)
    assert (await node.status()).runtime.max_batch_seen >= 4


def records(node, begin=0):
    """The structured log lines since a place in the log."""
    for line in node.log_text()[begin:].splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            if "event" in record:
                yield record


def test_only_the_ingress_listens_on_tcp_and_only_on_loopback(node):
    pids = {process.pid for process in node.processes()}
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True, timeout=20).stdout
    mine = [line for line in listening.splitlines() if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}]
    assert [line.split()[3] for line in mine] == [f"127.0.0.1:{node.port}"]
    udp = subprocess.run(["ss", "-Hlunp"], capture_output=True, text=True, check=True, timeout=20).stdout
    assert not [line for line in udp.splitlines() if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}]


@pytest.mark.parametrize(
    ("call", "request_type"),
    [
        ("RepositoryIndex", "RepositoryIndexRequest"),
        ("RepositoryModelLoad", "RepositoryModelLoadRequest"),
        ("RepositoryModelUnload", "RepositoryModelUnloadRequest"),
        ("SystemSharedMemoryRegister", "SystemSharedMemoryRegisterRequest"),
        ("SystemSharedMemoryStatus", "SystemSharedMemoryStatusRequest"),
        ("CudaSharedMemoryRegister", "CudaSharedMemoryRegisterRequest"),
        ("LogSettings", "LogSettingsRequest"),
        ("TraceSetting", "TraceSettingRequest"),
        ("ModelStatistics", "ModelStatisticsRequest"),
    ],
)
async def test_triton_lets_an_app_infer_and_nothing_else(node, call, request_type):
    import grpc

    async with rpc.connect(node.config.sockets.triton) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await getattr(stub, call)(getattr(service_pb2, request_type)(), timeout=5)
    assert refusal.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED)
    assert "restricted" in refusal.value.details() or "disabled" in refusal.value.details()


def test_no_log_line_holds_what_was_said(node, bundle):
    del bundle
    text = node.log_text()
    assert "Count from" not in text
    assert Path(node.run_dir).stat().st_mode & 0o007 == 0
