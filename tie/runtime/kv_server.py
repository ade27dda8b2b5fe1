"""kv.sock: says who this runtime is, prepares transfers of KV blocks, and is the runtime's death notice.

Every app and the probe hold a connection for as long as they depend on this runtime. The kernel closes all of them
when the process ends, however it ends, and they know at once; Triton alone would never tell them. A client that breaks
the protocol loses its connection, and with every connection its tickets end.
"""

import array
import contextlib
import os
import selectors
import socket
import threading
from pathlib import Path
from typing import Final

from kvxfer.channel import listen
from tie.daemon import frames, log, socket_path
from tie.daemon.errors import ProtocolError
from tie.proto import runtime_pb2
from tie.runtime.kv_transfer import OverloadedError, Transfers

MAX_CONNECTIONS: Final = 1024
MAX_REQUEST: Final = 256


class KvServer:
    """Serves kv.sock on a thread of its own until `close` or the process's end.

    Args:
        path: the socket.
        hello: what every client is told.
        transfers: prepares what clients ask for.
    """

    def __init__(self, path: Path, hello: runtime_pb2.KvHello, transfers: Transfers) -> None:
        self._path = path
        self._hello = hello.SerializeToString()
        self._transfers = transfers
        self._lock = socket_path.claim(path)
        self._listener = listen(path, backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._clients: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._run, name="kv-server", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._clients)

    def close(self) -> None:
        """Ends every connection and gives the path up."""
        os.write(self._waker, b"x")
        self._thread.join(timeout=5)
        for connection in (*self._clients, self._listener):
            connection.close()
        self._path.unlink(missing_ok=True)
        for descriptor in (self._woken, self._waker, self._lock):
            os.close(descriptor)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj == self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket) and not self._serve(key.fileobj):
                        self._drop(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.failure("kv.accept-failed", error)
            return
        if len(self._clients) >= MAX_CONNECTIONS:
            log.event("kv.refused", reason="too-many-connections", count=len(self._clients))
            connection.close()
            return
        connection.setblocking(False)
        try:
            connection.send(self._hello, socket.MSG_NOSIGNAL)
        except OSError as error:
            log.failure("kv.hello-failed", error)
            connection.close()
            return
        self._clients.add(connection)
        selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> bool:
        """Answers one message; false when the client has left, or is to go."""
        with contextlib.suppress(BlockingIOError):
            try:
                # Plain recv: the kernel closes descriptors that a client sends along.
                data = connection.recv(MAX_REQUEST + 1)
                if not data:
                    return False
                return self._answer(connection, data)
            except (OSError, ProtocolError) as error:
                if isinstance(error, BlockingIOError):
                    raise
                log.failure("kv.client-failed", error)
                return False
        return True

    def _answer(self, connection: socket.socket, data: bytes) -> bool:
        if len(data) > MAX_REQUEST:
            raise ProtocolError("a request over the limit")
        request = frames.parse(data, runtime_pb2.KvRequest)
        try:
            match request.WhichOneof("kind"):
                case "prepare_import":
                    grant = self._transfers.prepare_import(connection, request.prepare_import.block_count)
                case "prepare_export":
                    grant = self._transfers.prepare_export(connection)
                case _:
                    raise ProtocolError("an empty request")
        except OverloadedError:
            reply = runtime_pb2.KvReply(refusal=runtime_pb2.KV_REFUSAL_OVERLOADED)
            connection.send(reply.SerializeToString(), socket.MSG_NOSIGNAL)
            return True
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", grant.descriptors))]
            reply = runtime_pb2.KvReply(ticket=grant.ticket)
            connection.sendmsg([reply.SerializeToString()], rights, socket.MSG_NOSIGNAL)
        finally:
            grant.close()
        return True

    def _drop(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        self._clients.discard(connection)
        self._transfers.end(connection)
        connection.close()
