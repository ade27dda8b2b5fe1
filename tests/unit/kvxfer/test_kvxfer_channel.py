"""Channels: whole messages, descriptors, deadlines, and end-of-file as the death notice."""

import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors import open_descriptors
from kvxfer import channel as channels
from kvxfer.channel import Channel
from kvxfer.errors import ChannelError, PeerDiedError, PeerTimeoutError


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), Channel(theirs)


def fill(channel: Channel) -> None:
    for _ in range(1000):
        channel.send(bytes(channels.MAX_MESSAGE), timeout=0.01)


@pytest.fixture
def socket_path():
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory) / "kv.sock"


@settings(max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=channels.MAX_MESSAGE), max_size=3))
def test_messages_keep_their_borders(messages):
    ours, theirs = pair()
    with ours, theirs:
        for message in messages:
            ours.send(message, timeout=1)
            assert theirs.receive(timeout=1) == (message, [])


def test_descriptors_travel_and_belong_to_the_receiver():
    ours, theirs = pair()
    with ours, theirs:
        read, write = os.pipe()
        ours.send(b"pipe", [write], timeout=1)
        os.close(write)
        message, [received] = theirs.receive(timeout=1)
        assert message == b"pipe"
        assert not os.get_inheritable(received)
        os.write(received, b"x")
        assert os.read(read, 1) == b"x"
        os.close(received)
        os.close(read)


@pytest.mark.parametrize("message", [b"", bytes(channels.MAX_MESSAGE + 1)])
def test_messages_that_cannot_be_are_refused_before_sending(message):
    ours, theirs = pair()
    with ours, theirs, pytest.raises(ChannelError):
        ours.send(message, timeout=1)


def test_too_many_descriptors_are_refused_by_both_ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    many = [read] * (channels.MAX_DESCRIPTORS + 5)
    with Channel(ours) as sender, Channel(theirs) as receiver:
        with pytest.raises(ChannelError):
            sender.send(b"x", many, timeout=1)
        before = open_descriptors()
        socket.send_fds(ours, [b"x"], many)
        with pytest.raises(ChannelError):
            receiver.receive(timeout=1)
        assert open_descriptors() == before
    os.close(read)
    os.close(write)


def test_a_message_over_the_limit_is_refused_by_the_receiver_with_its_descriptors_closed():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    with ours, Channel(theirs) as receiver:
        before = open_descriptors()
        socket.send_fds(ours, [bytes(channels.MAX_MESSAGE + 1)], [read])
        with pytest.raises(ChannelError):
            receiver.receive(timeout=1)
        assert open_descriptors() == before
    os.close(read)
    os.close(write)


def test_end_of_file_is_the_death_notice_also_for_one_that_waits():
    ours, theirs = pair()
    threading.Timer(0.05, theirs.close).start()
    with ours, pytest.raises(PeerDiedError):
        ours.receive(timeout=10)


def test_sending_to_the_dead_is_an_error_and_no_signal():
    ours, theirs = pair()
    theirs.close()
    with ours, pytest.raises(PeerDiedError):
        ours.send(b"x", timeout=1)


def test_silence_and_a_peer_that_does_not_read_run_into_deadlines():
    ours, theirs = pair()
    with ours, theirs:
        with pytest.raises(PeerTimeoutError):
            ours.receive(timeout=0.01)
        with pytest.raises(PeerTimeoutError):
            fill(ours)


def test_a_channel_is_a_seqpacket_socket_and_nothing_else():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ChannelError):
        Channel(ours)


def test_listening_connecting_and_the_peer_s_identity(socket_path):
    with channels.listen(socket_path) as listener:
        assert socket_path.stat().st_mode & 0o777 == 0o660
        with Channel.connect(socket_path, timeout=1) as client:
            accepted, _ = listener.accept()
            with Channel(accepted) as server:
                assert server.peer() == (os.getpid(), os.getuid(), os.getgid())
                client.send(b"hello", timeout=1)
                assert server.receive(timeout=1) == (b"hello", [])


def test_nobody_listens(socket_path):
    with pytest.raises(PeerDiedError):
        Channel.connect(socket_path, timeout=1)
    channels.listen(socket_path).close()
    with pytest.raises(PeerDiedError):
        Channel.connect(socket_path, timeout=1)


def test_a_full_queue_is_waited_for_and_then_a_timeout(socket_path):
    with channels.listen(socket_path, backlog=0) as listener:
        waiting = [Channel.connect(socket_path, timeout=1)]
        with pytest.raises(PeerTimeoutError):
            Channel.connect(socket_path, timeout=0.05)
        threading.Timer(0.05, lambda: waiting.append(Channel(listener.accept()[0]))).start()
        with Channel.connect(socket_path, timeout=10) as client, pytest.raises(PeerTimeoutError):
            client.receive(timeout=0.01)  # the deadline of connecting does not stay on the socket
        for end in waiting:
            end.close()
