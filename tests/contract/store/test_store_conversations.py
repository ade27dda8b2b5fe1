"""What a conversation's key finds in the store, and what every other key does: a miss, at the price of a miss."""

import secrets

import grpc
import pytest

from tie.app.conversation import Conversation
from tie.app.entries import sealing
from tie.app.placed import Prompt
from tie.assets.prefix import NO_PREFIX
from tie.proto import metrics_pb2, metrics_pb2_grpc
from tie.store.client import random_index
from tie.warden.entry import Kind
from tie.warden.keys import ConversationKey, Root
from tie.warden.manifest import CacheFormat, Manifest, Segment

FORMAT = CacheFormat("model", "release", "layout", 4, 32)
TOKENS = tuple(range(100, 112))


def save(store, key: ConversationKey) -> None:
    """A conversation of three blocks, as an app files one."""
    with store.client() as client:
        with sealing(client, key, Kind.SEGMENT, Manifest(FORMAT, 0, TOKENS)) as sealer:
            for block in range(3):
                sealer.seal(memoryview(bytes([block]) * FORMAT.block_bytes))
        segment = Segment(random_index(), 3, sealer.header_sha256)
        client.put(segment.index)
        with sealing(client, key, Kind.HEAD, Manifest(FORMAT, 0, TOKENS, (segment,))):
            pass
        client.put(key.index())


def asked(store) -> dict[str, float]:
    """How often the store was asked for what, and with which outcome."""
    with grpc.insecure_channel(f"unix:{store.config.sockets.store_control}") as channel:
        text = metrics_pb2_grpc.MetricsStub(channel).Scrape(metrics_pb2.ScrapeRequest(), timeout=10).text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tie_store_requests_total"))
    return {name: float(value) for name, value in pairs}


def look_up(store, key: ConversationKey, cache_format=FORMAT) -> tuple[int, dict[str, float]]:
    """Blocks found, and what the store was asked for it."""
    before = asked(store)
    conversation = Conversation(key, cache_format, store.path, prefix=NO_PREFIX, timeout=10, ttl_s=60)
    conversation.look_up(Prompt((*TOKENS, 1)))
    blocks = conversation.blocks
    conversation.close()
    after = asked(store)
    return blocks, {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


def key_of(secret: bytes, root: Root = Root.TURN) -> ConversationKey:
    return ConversationKey(root, secret)


GET_DONE, GET_MISS = (f'tie_store_requests_total{{kind="get",outcome="{outcome}"}}' for outcome in ("done", "miss"))


def test_another_key_is_a_miss_like_any_other_in_as_many_round_trips(store):
    secret = secrets.token_bytes(32)
    nothing_there = look_up(store, key_of(secret))
    save(store, key_of(secret))
    assert look_up(store, key_of(secret)) == (3, {GET_DONE: 2})
    one_bit = bytes([secret[0] ^ 1]) + secret[1:]
    for other in (key_of(secrets.token_bytes(32)), key_of(one_bit)):
        assert look_up(store, other) == nothing_there == (0, {GET_MISS: 1})
    # A key as new as the request has nothing filed under it, and nobody is asked.
    assert look_up(store, key_of(secret, Root.REQUEST)) == (0, {})
    assert look_up(store, key_of(secret)) == (3, {GET_DONE: 2})


@pytest.mark.parametrize("change", [{"model": "other"}, {"release": "other"}, {"layout": "other"}, {"block_bytes": 64}])
def test_another_model_finds_nothing_that_it_could_use(store, change):
    secret = secrets.token_bytes(32)
    save(store, key_of(secret))
    fields = {name: getattr(FORMAT, name) for name in CacheFormat.__slots__}
    blocks, _ = look_up(store, key_of(secret), CacheFormat(**(fields | change)))
    assert blocks == 0


def test_a_head_under_a_foreign_index_opens_for_nobody(store):
    """Whoever controls the store can give one user's entry to another: it does not open, and that is a miss."""
    mine, other = secrets.token_bytes(32), secrets.token_bytes(32)
    save(store, key_of(mine))
    with store.client() as client:
        with sealing(
            client, key_of(mine), Kind.HEAD, Manifest(FORMAT, 0, TOKENS, (Segment(random_index(), 3, bytes(32)),))
        ):
            pass
        client.put(key_of(other).index())
    assert look_up(store, key_of(other)) == (0, {GET_DONE: 1})
