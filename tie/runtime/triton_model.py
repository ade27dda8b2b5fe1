"""Triton's Python backend of model `afm`: BYTES `request` in, a stream of UINT8 `event` out (runtime.proto).

Triton calls `initialize`, `execute` and `finalize` on one thread; events leave on a thread of their own (`responder`).
The process is Triton's stub: it embeds Python, and nobody notices when it dies, except through kv.sock.
"""

import functools
import os
import select
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils  # provided by the stub
from google.protobuf.message import DecodeError

from tie.daemon import config as node_config
from tie.daemon import log
from tie.daemon.errors import TieError
from tie.daemon.hardening import protect_process
from tie.proto import runtime_pb2
from tie.runtime import environment
from tie.runtime.request import Request, RequestRefusedError, check
from tie.runtime.responder import Responder, Stream
from tie.runtime.service import RuntimeService

_EXIT_FAILED: Final = 70  # sysexits.h EX_SOFTWARE
_FLUSH_S: Final = 1.0


class TritonPythonModel:
    """What Triton loads; see its Python backend's interface."""

    def initialize(self, args: dict[str, str]) -> None:
        """Brings the engine up; an exception here makes Triton fail to start, which ends the container.

        Raises:
            TieError: what `RuntimeService` raises.
            RuntimeError: NumPy arrays do not survive this server.
        """
        del args
        protect_process()
        _follow_container()
        _require_sound_numpy()
        # Requests and answers pass through a region that Triton makes readable by all. Both sides have mapped it by
        # now: without a name nobody else can open it, and nothing is left however they end.
        environment.remove_regions(os.environ[environment.SHM_PREFIX])
        self._responder = Responder()
        try:
            config = node_config.load(Path(os.environ[environment.CONFIG]))
            self._service = RuntimeService(config, os.environ[environment.INSTANCE], on_failure=self._die)
        except TieError as error:
            # Its message names files, sizes and codes: the operator needs it, and no request has been seen yet.
            log.failure("runtime.start-failed", error)
            raise
        self._drain_s = config.controller.drain_deadline_s

    def execute(self, requests: list[Any]) -> None:
        """Hands requests to the engine; answers come later, through each request's response sender."""
        for request in requests:
            stream = Stream(request.get_response_sender())
            try:
                tensor = pb_utils.get_input_tensor_by_name(request, "request").as_numpy()
                job = self._service.submit(self._parse(tensor), self._responder.sink(stream))
                self._responder.watch(stream, functools.partial(self._service.engine.cancel, job))
            except RequestRefusedError as error:
                self._responder.refuse(stream, error.code, error.detail)
            except Exception as error:  # noqa: BLE001 (an exception would fail the whole list)
                log.failure("runtime.request-failed", error)
                self._responder.refuse(stream, runtime_pb2.CODE_INTERNAL, "the runtime could not take the request")

    def finalize(self) -> None:
        """Ends the engine; Triton calls it when no request is in flight any more."""
        log.event("runtime.stopping")
        self._service.close(drain_s=self._drain_s)
        self._responder.close(_FLUSH_S)
        log.event("runtime.stopped")

    def _parse(self, tensor: Any) -> Request:
        message = runtime_pb2.GenerateRequest()
        if tensor.size != 1:
            raise RequestRefusedError(runtime_pb2.CODE_INVALID, "request: one element of bytes is expected")
        try:
            message.ParseFromString(tensor.reshape(-1)[0])
        except (DecodeError, TypeError):
            raise RequestRefusedError(runtime_pb2.CODE_INVALID, "request: not a GenerateRequest") from None
        return check(message, self._service.engine.bounds)

    def _die(self) -> None:
        # The engine is broken: let the clients have their errors, then be gone, so that kv.sock tells everybody.
        self._responder.close(_FLUSH_S)
        os._exit(_EXIT_FAILED)


def _require_sound_numpy() -> None:
    """Sends known arrays through the server's tensor type.

    Triton 2.51 was built against NumPy 1: with NumPy 2 it silently reads and writes garbage.
    """
    text, numbers = np.array([b"echo", b""], dtype=np.object_), np.frombuffer(b"\x07echo", dtype=np.uint8)
    sound = int(np.__version__.split(".")[0]) < 2 and all(
        np.array_equal(pb_utils.Tensor("echo", array).as_numpy(), array) for array in (text, numbers)
    )
    if not sound:
        raise RuntimeError(f"NumPy {np.__version__} does not work with this Triton: install numpy<2")


def _follow_container() -> None:
    """Ends this process when tritonserver or supervisord ends, even by SIGKILL, and at once when one has already.

    Not PR_SET_PDEATHSIG: that follows the thread that forked, and Triton's loader threads come and go. And not the
    parent alone: one that ended before this was called has been replaced by whoever takes orphans.
    """
    parent = os.getppid()
    try:
        ended = [os.pidfd_open(parent), os.pidfd_open(int(os.environ[environment.SUPERVISOR]))]
    except ProcessLookupError:
        os._exit(_EXIT_FAILED)

    def wait() -> None:
        if os.getppid() == parent:  # else it ended a moment ago, and the descriptor is somebody else's
            select.select(ended, [], [])
        os._exit(_EXIT_FAILED)

    threading.Thread(target=wait, name="follow-container", daemon=True).start()
