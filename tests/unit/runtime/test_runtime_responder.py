"""What a stream is owed: its first tokens and its end at once, however many speak, and the FINAL flag once."""

import contextlib
import importlib
import queue
import sys
import types

import pytest

from tie.proto import runtime_pb2 as pb

WAIT_S = 20.0
STREAMS = 100
FINAL = 1


class Sender:
    """Triton's, of one stream: puts (stream, events, flags) into the queue of all."""

    def __init__(self, number, sent):
        self.number, self._sent = number, sent

    def send(self, response=None, flags=0):
        event = None if response is None else pb.GenerateEvent.FromString(response[0].tobytes())
        self._sent.put((self.number, event, flags))

    def is_cancelled(self):
        return False


@pytest.fixture
def responder(monkeypatch):
    """The module, beside a stand-in for what only Triton's process has, and on a clock that stands still."""
    stub = types.SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL, Tensor=lambda _name, array: array, InferenceResponse=list
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)
    monkeypatch.delitem(sys.modules, "tie.runtime.responder", raising=False)
    module = importlib.import_module("tie.runtime.responder")
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: 1000.0))
    yield module
    sys.modules.pop("tie.runtime.responder", None)


@contextlib.contextmanager
def watched(module):
    """The sinks of STREAMS watched streams, and what is sent."""
    sent, responder, sinks = queue.Queue(), module.Responder(), []
    for number in range(STREAMS):
        stream = module.Stream(Sender(number, sent))
        sinks.append(responder.sink(stream))
        responder.watch(stream, lambda: None)
    yield sinks, sent
    responder.close(WAIT_S)


def tokens(*ids):
    return pb.GenerateEvent(tokens=pb.Tokens(token_ids=ids))


def test_an_end_does_not_wait_for_the_turn_that_its_last_tokens_wait_for(responder):
    with watched(responder) as (sinks, sent):
        for sink in sinks:
            sink.emit(tokens(1), last=False)
        first = [sent.get(timeout=WAIT_S) for _ in sinks]
        assert sorted(number for number, _, _ in first) == list(range(STREAMS))
        for sink in sinks:
            sink.emit(tokens(2), last=False)  # its turn comes when the clock goes on
            sink.emit(tokens(3), last=False)
            sink.emit(pb.GenerateEvent(finished=pb.Finished(reason=pb.REASON_STOP_TOKEN)), last=True)
        rest = [sent.get(timeout=WAIT_S) for _ in range(2 * STREAMS)]
    for number in range(STREAMS):
        (before, flags), (end, final) = [(event, flags) for who, event, flags in rest if who == number]
        assert (list(before.tokens.token_ids), flags) == ([2, 3], 0)
        assert (end.WhichOneof("kind"), final) == ("finished", FINAL)
    assert sent.empty()  # and nothing after its end


def test_tokens_after_the_first_wait_for_their_turn(responder):
    with watched(responder) as (sinks, sent):
        for sink in sinks:
            sink.emit(tokens(1), last=False)
        for _ in sinks:
            sent.get(timeout=WAIT_S)
        sinks[0].emit(tokens(2), last=False)
        sinks[1].emit(pb.GenerateEvent(failed=pb.Failed(code=pb.CODE_REPLACED)), last=True)
        assert sent.get(timeout=WAIT_S)[0] == 1
        assert sent.empty()
    assert sent.get(timeout=WAIT_S)[0] == 0  # with the thread's end
