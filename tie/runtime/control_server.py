"""engine.sock: the status probe's way to the engine. Mode 0600: inside the container, its own user only."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvxfer.channel import Channel, listen
from kvxfer.errors import KvxferError
from tie.daemon import log, socket_path
from tie.proto import engine_pb2

MAX_CONNECTIONS: Final = 4
_SEND_S: Final = 5.0
_IDLE_S: Final = 3600.0

Handler = Callable[[engine_pb2.EngineRequest], engine_pb2.EngineReply]


class ControlServer:
    """Answers requests in turn, one thread per connection, until the process ends or `close`.

    Args:
        path: the socket.
        handle: answers one request; called from several threads; may take its time.
    """

    def __init__(self, path: Path, handle: Handler) -> None:
        self._path = path
        self._handle = handle
        self._lock = socket_path.claim(path)
        self._listener = listen(path, backlog=MAX_CONNECTIONS, mode=0o600)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        threading.Thread(target=self._run, name="control-server", daemon=True).start()

    def close(self) -> None:
        """Takes no more connections and gives the path up."""
        # close() alone leaves accept() waiting.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="control", daemon=True).start()
            else:
                log.event("control.refused", reason="too-many-connections")
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with Channel(connection) as channel:
                while True:
                    message, descriptors = channel.receive(timeout=_IDLE_S)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    request = engine_pb2.EngineRequest()
                    request.ParseFromString(message)
                    channel.send(self._handle(request).SerializeToString(), timeout=_SEND_S)
        except KvxferError:
            return  # the probe left
        except DecodeError as error:
            log.failure("control.protocol-error", error)
        finally:
            self._slots.release()
