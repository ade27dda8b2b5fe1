"""kv.sock: says who this runtime is, and is its death notice.

Every app and the probe hold a connection for as long as they depend on this runtime. The kernel closes all of them
when the process ends, however it ends, and they know at once; Triton alone would never tell them. Transfers of KV
blocks will travel here too; until then a client that sends anything breaks the protocol.
"""

import contextlib
import os
import selectors
import socket
import threading
from pathlib import Path
from typing import Final

from kvxfer.channel import listen
from tie.daemon import log, rpc
from tie.proto import runtime_pb2

MAX_CONNECTIONS: Final = 1024


class KvServer:
    """Serves kv.sock on a thread of its own until `close` or the process's end.

    Args:
        path: the socket.
        hello: what every client is told.
    """

    def __init__(self, path: Path, hello: runtime_pb2.KvHello) -> None:
        self._path = path
        self._hello = hello.SerializeToString()
        self._lock = rpc.claim(path)
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
                    elif isinstance(key.fileobj, socket.socket):
                        # Whether it left or spoke: either way the conversation is over.
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

    def _drop(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if connection.recv(1):
                log.event("kv.unexpected-message")
        selector.unregister(connection)
        self._clients.discard(connection)
        connection.close()
