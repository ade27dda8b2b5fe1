"""tie-kps, the reference key protection service: holds the node's long-lived private key and opens DEKs with it.

The key lives in this process's memory only. A restart, the end of the key's lifetime, and a full replay set each make a
new one, so that the set of envelopes seen never has to outlive the key that could open them. But for a restart, the key
before it still opens for a while what was sealed to it and is on its way.
"""

import hashlib
import math
import time
from collections.abc import Callable
from typing import Any, Final

import grpc.aio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tie.cloudboard import keys
from tie.daemon import log, rpc, service
from tie.daemon.config import NodeConfig
from tie.envelope import sealing, statement
from tie.envelope.errors import EnvelopeError
from tie.proto import kps_pb2, kps_pb2_grpc

MAX_REPLAY_ENTRIES: Final = 1_000_000  # about 100 MB; then the key is replaced
ON_ITS_WAY_S: Final = 30.0  # what a request may take, once it has come in, until its envelope is here
# A key replaced because its set was full opens what is on its way, which is to be remembered as well: as many envelopes
# again. Two sets at their largest stay within the unit's memory.
_WITH_OVERLAP: Final = 2
_DIGEST_BYTES: Final = 16


class RateLimit:
    """A token bucket: `per_second` permits a second, saved up for one second."""

    def __init__(self, per_second: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._permits = float(per_second)
        self._at = clock()

    def admit(self) -> bool:
        """Takes a permit; False when there is none."""
        now = self._clock()
        self._permits = min(self._per_second, self._permits + (now - self._at) * self._per_second)
        self._at = now
        if self._permits < 1:
            return False
        self._permits -= 1
        return True


class _Epoch:
    """One key, and the envelopes that it has opened.

    Attributes:
        until: when it opens nothing any more; set when the next one begins.
    """

    def __init__(self) -> None:
        self.key = sealing.PrivateKey.generate()
        self.seen: set[bytes] = set()
        self.until = math.inf


class KeyProtection:
    """The service without its transport: the current key, its statement, and the key before it for a while."""

    def __init__(
        self,
        config: NodeConfig,
        signer: Ed25519PrivateKey,
        binding: sealing.PublicKey,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_replay_entries: int = MAX_REPLAY_ENTRIES,
    ) -> None:
        self._node_id = config.node_id
        self._lifetime_s = min(config.kps.key_lifetime_s, statement.MAX_LIFETIME_S)
        # What was sealed to a key just before it was replaced may take so long to come.
        self._overlap_s = config.cloudboard.upload_deadline_s + ON_ITS_WAY_S
        self._signer = signer
        self._binding = binding
        self._clock = clock
        self._max_replay_entries = max_replay_entries
        self._limit = RateLimit(config.kps.max_opens_per_s, clock)
        self._metrics = CollectorRegistry()
        self._opens = Counter("tie_kps_opens", "DEKs asked for, by outcome", ["outcome"], registry=self._metrics)
        self._keys = Counter("tie_kps_keys", "Keys made since start", registry=self._metrics)
        self._entries = Gauge("tie_kps_replay_entries", "Envelopes the current key has opened", registry=self._metrics)
        self._epochs: list[_Epoch] = []  # at most two; the current one is the last
        self._rotate("start")

    def statement(self) -> kps_pb2.KeyStatement:
        """What devices seal to now."""
        self._rotate_if_due()
        return self._statement

    def open_dek(self, request: kps_pb2.OpenDekRequest) -> kps_pb2.OpenDekReply:
        """Opens one sealed DEK, once, and seals it to the binding key."""
        reply = self._open(request)
        name = kps_pb2.Outcome.Name(reply.outcome).removeprefix("OUTCOME_").lower()
        self._opens.labels(outcome=name).inc()
        return reply

    def metrics(self) -> str:
        """Audit counters as Prometheus text."""
        self._entries.set(len(self._epochs[-1].seen))
        return generate_latest(self._metrics).decode()

    def _open(self, request: kps_pb2.OpenDekRequest) -> kps_pb2.OpenDekReply:
        if not self._limit.admit():
            return kps_pb2.OpenDekReply(outcome=kps_pb2.OUTCOME_RATE_LIMITED)
        self._rotate_if_due()
        if request.version != sealing.VERSION or request.node_id != self._node_id:
            return kps_pb2.OpenDekReply(outcome=kps_pb2.OUTCOME_REFUSED)
        epoch = next((one for one in self._epochs if request.key_id == one.key.public.key_id), None)
        if epoch is None or len(epoch.seen) >= _WITH_OVERLAP * self._max_replay_entries:
            return kps_pb2.OpenDekReply(outcome=kps_pb2.OUTCOME_UNKNOWN_KEY)
        digest = hashlib.sha256(request.sealed_dek).digest()[:_DIGEST_BYTES]
        if digest in epoch.seen:
            return kps_pb2.OpenDekReply(outcome=kps_pb2.OUTCOME_REPLAYED)
        try:
            dek = sealing.open_dek(request.sealed_dek, self._node_id, epoch.key)
        except EnvelopeError:
            return kps_pb2.OpenDekReply(outcome=kps_pb2.OUTCOME_REFUSED)
        # Only what opens is remembered: garbage cannot fill the set. No await lies between the look-up and here.
        epoch.seen.add(digest)
        with dek:
            bound = sealing.bind_dek(dek, request.sealed_dek, self._node_id, self._binding)
        return kps_pb2.OpenDekReply(outcome=kps_pb2.OUTCOME_OK, bound_dek=bound)

    def _rotate_if_due(self) -> None:
        self._epochs = [epoch for epoch in self._epochs if self._clock() < epoch.until]
        if self._clock() >= self._expires:
            self._rotate("lifetime")
        elif len(self._epochs[-1].seen) >= self._max_replay_entries:
            self._rotate("replay-set-full")

    def _rotate(self, reason: str) -> None:
        for epoch in self._epochs[-1:]:
            epoch.until = self._clock() + self._overlap_s
        current = _Epoch()
        self._epochs = [*self._epochs[-1:], current]
        self._expires = self._clock() + self._lifetime_s
        now = int(time.time())
        self._statement = statement.sign(
            self._signer,
            self._node_id,
            current.key.public,
            not_before=now,
            not_after=now + max(1, int(self._lifetime_s)),
        )
        self._keys.inc()
        log.event("kps.key-made", reason=reason, key_id=current.key.public.key_id.hex())


class Servicer(kps_pb2_grpc.KeyProtectionServicer):
    """KeyProtection over gRPC."""

    def __init__(self, protection: KeyProtection) -> None:
        self._protection = protection

    async def GetStatement(  # noqa: N802 (generated name)
        self, request: kps_pb2.GetStatementRequest, context: Any
    ) -> kps_pb2.KeyStatement:
        """The current key statement."""
        del request, context
        return self._protection.statement()

    async def OpenDek(  # noqa: N802 (generated name)
        self, request: kps_pb2.OpenDekRequest, context: Any
    ) -> kps_pb2.OpenDekReply:
        """Opens one sealed DEK."""
        del context
        return self._protection.open_dek(request)


async def serve(config: NodeConfig, lifetime: service.Lifetime) -> None:
    """Serves until the daemon is asked to end.

    Raises:
        ConfigError: a key file is missing or damaged.
        SocketInUseError: another service is live on kps.sock.
    """
    protection = KeyProtection(config, keys.read_statement_key(config), keys.read_binding_public(config))

    def register(server: grpc.aio.Server) -> None:
        kps_pb2_grpc.add_KeyProtectionServicer_to_server(Servicer(protection), server)

    async with rpc.serve(config.sockets.kps, register, metrics=protection.metrics):
        lifetime.ready(config.sockets.kps)
        await lifetime.stopping.wait()


def main() -> None:
    """Entry point of tie-kps."""
    service.run("tie-kps", "Reference key protection service: opens request keys for this node's jobhelpers.", serve)


if __name__ == "__main__":
    main()
