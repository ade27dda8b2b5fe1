"""Sends events to Triton from one thread, so that neither a slow server nor a slow client holds up a step.

Each response costs the processor as much as some layers of a small model, here, in the server and at the client. So
there are only so many a second: each stream that speaks has its share of `_RESPONSES_PER_S`, and the tokens of a choice
that gather meanwhile go out together. A stream's first tokens and its end never wait.

The last response of every stream carries the FINAL flag, whatever happened before: without it Triton keeps the request
for ever. Whether a client has gone is a question to Triton, which the step thread should not pay for: it is asked here,
of one stream after the other, `_QUESTIONS_PER_S` times a second in all.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils  # provided by the stub

from tie.daemon import log
from tie.proto import runtime_pb2
from tie.runtime.merge import merge
from tie.runtime.shares import Shares

_RESPONSES_PER_S: Final = 200
_QUESTIONS_PER_S: Final = 200
_ASKED_AGAIN_S: Final = 0.02  # a lone stream needs no more
_IDLE_S: Final = 1.0
_FINAL: Final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Stream:
    """One request's way out.

    Args:
        sender: Triton's response sender.
    """

    def __init__(self, sender: Any) -> None:
        self.sender = sender
        self.cancel: Callable[[], None] | None = None
        self.cancelled = False
        self.closed = False
        self._lock = threading.Lock()
        self._events: deque[runtime_pb2.GenerateEvent] = deque()
        self._last = False
        self._queued = False

    @property
    def ended(self) -> bool:
        """Whether its last event has come."""
        return self._last

    def put(self, event: runtime_pb2.GenerateEvent, *, last: bool) -> bool:
        """Adds an event; true when the stream has to be queued: it was empty, or this is its end, which never waits."""
        with self._lock:
            self._events.append(event)
            self._last = self._last or last
            queued, self._queued = self._queued, True
            return last or not queued

    def take(self) -> tuple[list[runtime_pb2.GenerateEvent], bool]:
        """Everything that has gathered, tokens merged, and whether that is all there will be."""
        with self._lock:
            events, self._events, self._queued = self._events, deque(), False
            return merge(events), self._last


class _Sink:
    def __init__(self, stream: Stream, ready: "queue.SimpleQueue[Stream | None]") -> None:
        self._stream = stream
        self._ready = ready

    def emit(self, event: runtime_pb2.GenerateEvent, *, last: bool) -> None:
        if self._stream.put(event, last=last):
            self._ready.put(self._stream)


class Responder:
    """The sending thread."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._shares: Shares[Stream] = Shares(_RESPONSES_PER_S)
        self._lock = threading.Lock()
        self._streams: deque[Stream] = deque()  # the one that was asked last is at the end
        self._question = 0.0  # when the next one is due
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        self._thread.start()

    def sink(self, stream: Stream) -> _Sink:
        """Where the engine puts the stream's events."""
        return _Sink(stream, self._ready)

    def watch(self, stream: Stream, cancel: Callable[[], None]) -> None:
        """Looks after a stream until its end: `cancel` is called once, when its client has gone."""
        with self._lock:
            stream.cancel = cancel
            if not stream.closed:
                self._streams.append(stream)

    def refuse(self, stream: Stream, code: "runtime_pb2.Code.ValueType", detail: str) -> None:
        """Ends a stream that never reached the engine."""
        failed = runtime_pb2.Failed(code=code, detail=detail)
        self.sink(stream).emit(runtime_pb2.GenerateEvent(failed=failed), last=True)

    def close(self, timeout: float) -> None:
        """Sends what is queued and ends the thread."""
        self._ready.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._collect()
            for stream in self._shares.take_all() if ending else self._shares.due(time.monotonic()):
                self._send(stream)
            self._look_for_cancellation()

    def _collect(self) -> bool:
        """Waits for something to do, takes what has come and sends what has ended; true when this is the end."""
        with contextlib.suppress(queue.Empty):
            stream = self._ready.get(timeout=self._idle_s())
            while stream is not None:
                if stream.ended:
                    self._send(stream)  # the turn that it may wait for finds it closed
                else:
                    self._shares.add(stream, time.monotonic())
                stream = self._ready.get_nowait()
            return True
        return False

    def _idle_s(self) -> float:
        now = time.monotonic()
        question = self._question - now if self._streams else _IDLE_S
        return max(0.0, min(question, self._shares.pause(now, _IDLE_S)))

    def _send(self, stream: Stream) -> None:
        events, last = stream.take()
        if stream.closed:
            return  # given up; the engine has been told
        try:
            for index, event in enumerate(events):
                tensor = pb_utils.Tensor("event", np.frombuffer(event.SerializeToString(), dtype=np.uint8))
                final = last and index == len(events) - 1
                stream.closed = stream.closed or final
                stream.sender.send(pb_utils.InferenceResponse([tensor]), flags=_FINAL if final else 0)
        except Exception as error:  # noqa: BLE001 (Triton raises its own type, and this thread serves all streams)
            log.failure("runtime.send-failed", error)
            self._give_up(stream)
        if stream.closed:
            with self._lock, contextlib.suppress(ValueError):  # refused, it was never watched
                self._streams.remove(stream)

    def _give_up(self, stream: Stream) -> None:
        """Ends a stream that Triton does not take responses for, and what it costs the engine."""
        if not stream.closed:
            stream.closed = True
            try:
                stream.sender.send(flags=_FINAL)
            except Exception as error:  # noqa: BLE001 (see _send)
                log.failure("runtime.final-failed", error)
        self._cancel(stream)

    def _look_for_cancellation(self) -> None:
        now = time.monotonic()
        with self._lock:
            if not self._streams or now < self._question:
                return
            stream = self._streams[0]
            self._streams.rotate(-1)
            self._question = now + max(1 / _QUESTIONS_PER_S, _ASKED_AGAIN_S / len(self._streams))
        if not stream.closed and not stream.cancelled and stream.sender.is_cancelled():
            self._cancel(stream)

    def _cancel(self, stream: Stream) -> None:
        if stream.cancel and not stream.cancelled:
            stream.cancelled = True
            stream.cancel()
