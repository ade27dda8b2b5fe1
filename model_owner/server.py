"""owner.sock: the runtime attaches here and gets descriptors (owner.proto). A SOCK_SEQPACKET socket, many clients.

Whatever a client sends, it gets a reply or loses its connection; nothing it sends costs another client more than a turn
of the event loop.
"""

import asyncio
import contextlib
import os
import pwd
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from kvxfer import channel
from model_owner.loader import PackedWeights
from model_owner.pool_memory import PoolRefusedError
from model_owner.prefix_pool import PrefixPools
from model_owner.weights import Failure, Progress, Weights
from tie.daemon import frames, log, socket_path
from tie.daemon.config import MAX_RANKS
from tie.daemon.errors import ConfigError, ProtocolError
from tie.proto import owner_pb2

MAX_CLIENTS: Final = 64
MAX_REQUEST: Final = 4096
RANKED: Final = "torch-cpu-"  # layouts of which every rank takes its part where it lies, out of the one arena
UNWELCOME_S: Final = 1.0  # for the question of a client that is to be refused whatever it asks
IDLE_S: Final = 60.0  # a client that says nothing for so long is disconnected; what it attached stays its own
FILL_S: Final = 900.0  # one that fills a prefix pool computes system prompts meanwhile


class AttachServer:
    """Hands out weights and prefix pools.

    Attributes:
        refusals: code → how often.
    """

    def __init__(self, weights: Weights, pools: PrefixPools, allowed_uids: Iterable[int]) -> None:
        self.refusals: dict[str, int] = {}
        self._weights = weights
        self._pools = pools
        self._allowed = frozenset(allowed_uids)
        self._clients: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serve(self, path: Path) -> AsyncIterator[None]:
        """Listens on `path` for the length of the block.

        Raises:
            SocketInUseError: a live server holds the path.
        """
        lock = socket_path.claim(path)
        try:
            with _listening(path) as listener:
                accepting = asyncio.create_task(self._accept(listener))
                try:
                    yield
                finally:
                    tasks = {accepting, *self._clients}
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            os.close(lock)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, or a client that left before it was accepted.
                log.failure("owner.accept-failed", error)
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            task = asyncio.create_task(self._converse(connection))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)
            await asyncio.sleep(0)  # nor does sock_accept yield while somebody waits

    async def _converse(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, TimeoutError):
                await self._answer_all(connection)
        finally:
            self._pools.abandon(connection)

    async def _answer_all(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        unwelcome = self._unwelcome(connection)
        while True:
            patience = FILL_S if self._pools.fills(connection) else IDLE_S
            async with asyncio.timeout(UNWELCOME_S if unwelcome else patience):
                # Plain recv: the kernel closes descriptors that a client sends along.
                data = await loop.sock_recv(connection, MAX_REQUEST + 1)
            if not data:
                return
            if unwelcome:
                # After its question, for a close with that unread would reset the connection under the answer.
                self._refuse(connection, unwelcome)
                return
            if not await self._answer(connection, data):
                return
            await asyncio.sleep(0)  # sock_recv does not yield while there is data: a flood must not keep the loop

    def _unwelcome(self, connection: socket.socket) -> str:
        """Why this client gets nothing, or nothing."""
        _, uid, _ = channel.Channel(connection).peer()
        if uid not in self._allowed:
            log.event("owner.refused", code="not-allowed", peer_uid=uid)
            return "not-allowed"
        return "too-many-clients" if len(self._clients) > MAX_CLIENTS else ""

    async def _answer(self, connection: socket.socket, data: bytes) -> bool:
        """Answers one message; false when the client does not speak the protocol and is to be dropped."""
        try:
            request = frames.parse(data, owner_pb2.OwnerRequest) if len(data) <= MAX_REQUEST else None
        except ProtocolError:
            request = None
        kind = request.WhichOneof("kind") if request is not None else None
        if request is None or kind is None:
            self._refuse(connection, "malformed")
            return False
        if kind == "attach":
            self._attach(connection, request.attach)
        else:
            try:
                await self._answer_pool(connection, request, kind)
            except PoolRefusedError as error:
                self._refuse(connection, error.code)
        return True

    async def _answer_pool(self, connection: socket.socket, request: owner_pb2.OwnerRequest, kind: str) -> None:
        descriptors: tuple[int, ...] = ()
        match kind:
            case "pool_allocate":
                pool = await self._pools.allocate(request.pool_allocate, connection)
                descriptors = pool.descriptors
                reply = owner_pb2.OwnerReply(pool_allocated=owner_pb2.PoolAllocated())
            case "pool_seal":
                await self._pools.seal(request.pool_seal, connection)
                reply = owner_pb2.OwnerReply(pool_sealed=owner_pb2.PoolSealed())
            case "pool_restore":
                states, own = self._pools.restore(request.pool_restore)
                descriptors = own.descriptors if own else ()
                reply = owner_pb2.OwnerReply(pool_states=owner_pb2.PoolStates(ranks=states))
            case _:
                self._pools.reset()
                reply = owner_pb2.OwnerReply(pool_was_reset=owner_pb2.PoolWasReset())
        _send(connection, reply, descriptors)
        log.event("owner.pool", code=kind)

    def _attach(self, connection: socket.socket, attach: owner_pb2.Attach) -> None:
        if not attach.rank < attach.world_size <= MAX_RANKS:
            self._refuse(connection, "impossible-rank")
            return
        if attach.world_size > 1 and not attach.layout_id.startswith(RANKED):
            self._refuse(connection, "unsupported-split")
            return
        if self._weights.follow():
            self._pools.reset()  # of another release: its prompts are computed again
        match self._weights.get(attach.layout_id):
            case PackedWeights() as packed:
                self._hand_out(connection, packed)
            case Progress(done, total):
                loading = owner_pb2.Loading(bytes_done=done, bytes_total=total)
                _send(connection, owner_pb2.OwnerReply(loading=loading))
            case Failure(code):
                self._refuse(connection, code)

    def _hand_out(self, connection: socket.socket, packed: PackedWeights) -> None:
        manifest = self._weights.opened().manifest
        attached = owner_pb2.Attached(
            owner_instance=self._weights.instance,
            generation=self._weights.generation(),
            model=manifest.model,
            release=manifest.release,
            layout_id=packed.layout_id,
            arena_bytes=packed.arena.size,
            table_bytes=len(packed.table),
            table_sha256=packed.table_sha256,
            cuda_ipc_handle=packed.arena.ipc_handle,
            config_json=msgspec.json.encode(manifest.architecture).decode(),
        )
        descriptors = (*packed.arena.descriptors(), packed.table_descriptor)
        _send(connection, owner_pb2.OwnerReply(attached=attached), descriptors)
        self._weights.count_attach()
        log.event("owner.attached", layout=packed.layout_id)

    def _refuse(self, connection: socket.socket, code: str) -> None:
        self.refusals[code] = self.refusals.get(code, 0) + 1
        _send(connection, owner_pb2.OwnerReply(refused=owner_pb2.Refused(reason=code)))


def allowed_uids(users: Iterable[str]) -> frozenset[int]:
    """Ids of root, of this process's user, and of `users` (names or numbers).

    Raises:
        ConfigError: a name that the system does not know.
    """
    uids = {0, os.geteuid()}
    for user in users:
        try:
            uids.add(int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise ConfigError(f"owner.allowed_users: no user {user}") from None
    return frozenset(uids)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with channel.listen(path) as listener:
        listener.setblocking(False)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _send(connection: socket.socket, reply: owner_pb2.OwnerReply, descriptors: Iterable[int] = ()) -> None:
    """Sends without waiting: a client that leaves its queue full is dropped (BlockingIOError ends its conversation)."""
    socket.send_fds(connection, [reply.SerializeToString()], list(descriptors), socket.MSG_NOSIGNAL)
