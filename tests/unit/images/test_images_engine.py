"""Requests with images through the engine: what the model says is what it says to the vectors themselves."""

import threading
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
from PIL import Image

from image_corpus import photograph, saved
from tie.assets.images import Expanded
from tie.assets.sample import make_sample_vision_bundle
from tie.bones.executor import Batch, SequenceSlice
from tie.proto import runtime_pb2 as pb
from tie.runtime.images.decoding import decode
from tie.runtime.images.embeddings import ImageEmbeddings, PromptEmbeddings
from tie.runtime.images.image_encoder import ImageEncoder
from tie.runtime.images.limits import Limits
from tie.runtime.images.orders import Preparation
from tie.runtime.images.preparing import prepare
from tie.runtime.images.request_images import RequestImages
from tie.runtime.request import Bounds, RequestRefusedError, check
from vision_runtime import MAX_LENGTH, Model
from waiting import wait_for

HOW = Preparation("tiles", 32, 96, True, 1)
PICTURES = [
    saved(photograph(90, 60), "PNG"),
    saved(photograph(20, 44, seed=1), "JPEG"),
    saved(photograph(32, 32, seed=2), "PNG"),
]
WAIT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model(make_sample_vision_bundle(tmp_path_factory.mktemp("vision") / "bundle"))
    yield model
    model.grammars.close()


def message(model, *parts, **fields):
    """Text and images, in order."""
    token = model.placeholders.token_id
    ids = [id_ for part in parts for id_ in ([token] if isinstance(part, bytes) and part in PICTURES_AND_BAD else part)]
    images = [part for part in parts if isinstance(part, bytes) and part in PICTURES_AND_BAD]
    return pb.GenerateRequest(
        token_ids=ids, images=images, **({"max_tokens": 12, "ignore_eos": True, "logprobs": 0} | fields)
    )


BAD = b"GIF89a no picture"
PICTURES_AND_BAD = [*PICTURES, BAD]


def done(value):
    future = Future()
    future.set_result(value)
    return future


def expected(model, asked, tokens):
    """Token by token, over the vectors of each image's squares."""
    executor = model.executor()
    seen = []
    for data in asked.images:
        prepared = prepare(decode(data, Limits()), HOW)
        vectors = executor.vision.encode(prepared.tiles)
        seen.append(ImageEmbeddings(prepared.rows, prepared.columns, vectors.reshape(-1, vectors.shape[-1])))
    bounds = Bounds(model.config.vocab_size, MAX_LENGTH, model.placeholders)
    request, embeddings = check(asked, bounds), None
    if seen:
        images = RequestImages(request, model.placeholders, lambda *_: done(tuple(seen)))
        images.begin(0)
        images.take()
        request, embeddings = images.place(request, bounds), images.embeddings
    known, table, said, scores = list(request.prompt), list(range(100)), [], []
    for _ in range(tokens):
        given = embeddings.within(0, len(known)) if embeddings else ()
        logits = executor.forward(Batch((SequenceSlice(known, 0, table, 1, given=given),)))
        said.append(int(logits.argmax()))
        scores.append(float(logits[0].log_softmax(-1).max()))
        known.append(said[-1])
    return said, scores, len(request.prompt)


WAYS = {
    "alone": {},
    "in chunks": {"step_tokens": 19},
    "preempted, in chunks": {"blocks": 38, "step_tokens": 40},
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_to_the_vectors(model, way):
    length = 80
    asked = [
        message(model, b"before ", PICTURES[0], b" after", max_tokens=length),
        message(model, PICTURES[1], b"between", PICTURES[2], b"!", max_tokens=length),
        message(model, b"no image at all", max_tokens=length),
        message(model, PICTURES[2], n=2, max_tokens=length),
    ]
    with model.served(**WAYS[way]) as served:
        sinks = served.ask_at_once(asked)
        for one, sink in zip(asked, sinks, strict=True):
            said, scores, prompt = expected(model, one, length)
            seen, end = sink.all(), sink.end
            assert end.finished.prompt_tokens == prompt
            for index in range(max(1, one.n)):
                parts = [event.tokens for event in seen if event.tokens.index == index]
                assert [token for part in parts for token in part.token_ids] == said
                assert [one.logprob for part in parts for one in part.logprobs] == pytest.approx(scores, abs=1e-3)
        assert served.image_encoder.counts.decoded == 4
        assert served.image_encoder.counts.squares == 7 + 7 + 10 + 10
        if "preempted" in way:
            assert "tie_runtime_preemptions_total 0.0" not in served.engine.metrics.text()


def test_it_is_the_image_that_is_seen(model):
    with model.served() as served:
        seen = [served.ask(message(model, b"a", picture, b"b")).all() for picture in PICTURES]
    firsts = [next(event.tokens for event in events if event.HasField("tokens")) for events in seen]
    assert len({round(first.logprobs[0].logprob, 3) for first in firsts}) == 3


def test_squares_of_several_requests_share_passes(model):
    with model.served() as served:
        for sink in [served.ask(message(model, PICTURES[1])) for _ in range(6)]:
            sink.said()
        assert served.image_encoder.counts.squares == 6 * 7
        assert served.image_encoder.counts.passes < 6 * 7


def test_a_refused_image_fails_its_request_alone_and_names_it(model):
    with model.served() as served:
        bad, good = served.ask(message(model, PICTURES[0], BAD)), served.ask(message(model, PICTURES[0]))
        end = bad.end
        assert end.failed.code == pb.CODE_IMAGE
        assert end.failed.detail.startswith("images[1]: format-gif: ")
        assert len(good.said()) == 12
        assert served.image_encoder.counts.refused == {"format-gif": 1}


def test_images_that_fill_the_context_are_refused(model):
    with model.served() as served:
        end = served.ask(message(model, *[PICTURES[0]] * 8)).end
        assert end.failed.code == pb.CODE_PROMPT_TOO_LONG


class Slow:
    """An encoder that waits to be let go."""

    def __init__(self):
        self.go, self.entered = threading.Event(), threading.Event()

    def encode(self, tiles):
        self.entered.set()
        assert self.go.wait(WAIT_S)
        return np.zeros((len(tiles), 4, 64), dtype=np.float32)


@pytest.fixture
def slow(model):
    with model.served() as served:
        encoder = Slow()
        image_encoder = ImageEncoder(served.image_encoder._decoders, encoder.encode, 1)
        mine, served.image_encoder = served.image_encoder, image_encoder
        yield served, encoder
        encoder.go.set()
        served.image_encoder = mine
        image_encoder.close()


def test_a_request_may_be_cancelled_while_its_image_is_looked_at(model, slow):
    served, encoder = slow
    sink = served.ask(message(model, PICTURES[0]))
    assert encoder.entered.wait(WAIT_S)
    served.engine.cancel(sink.job)
    end = sink.end
    assert end.finished.reason == pb.REASON_CANCELLED
    encoder.go.set()
    wait_for(lambda: served.image_encoder._reserved == 0)


def test_a_deadline_ends_the_looking(model, slow):
    served, encoder = slow
    end = served.ask(message(model, PICTURES[0], deadline_ms=200)).end
    assert end.failed.code == pb.CODE_DEADLINE
    assert not encoder.go.is_set()


def test_an_encoder_that_fails_costs_those_it_was_encoding_for(model, slow):
    served, encoder = slow
    encoder.go.set()
    good = served.image_encoder._encode
    served.image_encoder._encode = lambda _: 1 / 0
    end = served.ask(message(model, PICTURES[0])).end
    assert end.failed.code == pb.CODE_INTERNAL
    served.image_encoder._encode = good
    assert len(served.ask(message(model, PICTURES[0])).said()) == 12


def test_more_than_there_is_room_for_are_told_to_try_again(model, slow):
    served, encoder = slow
    served.image_encoder._image_bytes = 200 * 1024 * 1024
    first = served.ask(message(model, PICTURES[0]))
    end = served.ask(message(model, PICTURES[0])).end
    assert end.failed.code == pb.CODE_BUSY
    encoder.go.set()
    assert first.said()


def test_what_ends_drops_what_is_under_way(model):
    executor = model.executor()
    from tie.runtime.images.factory import make_image_encoder

    image_encoder = make_image_encoder(model.bundle.manifest, executor)
    large = saved(np.asarray(Image.new("RGB", (4000, 4000))), "JPEG", progressive=True)
    looks = [image_encoder.look([large]) for _ in range(6)]
    image_encoder.close()
    for look in looks:
        with pytest.raises((RequestRefusedError, CancelledError)):
            look.result(WAIT_S)


def test_vectors_and_places_must_agree():
    prompt = Expanded((1, 2, 7, 7), ((2, 4),))
    with pytest.raises(ValueError, match="differ"):
        PromptEmbeddings(prompt, 7, {0: ImageEmbeddings(0, 0, np.zeros((3, 4), dtype=np.float32))})


@pytest.mark.parametrize(
    ("ids", "images"), [([9, 9], [b"x"]), ([1], [b"x"]), ([9], []), ([9] * 9, [b"x"] * 9), ([9], [bytes(9 << 20)])]
)
def test_a_request_has_as_many_images_as_places(model, ids, images):
    bounds = Bounds(300, MAX_LENGTH, model.placeholders)
    ids = [model.placeholders.token_id if id_ == 9 else id_ for id_ in ids]
    with pytest.raises(RequestRefusedError, match="images"):
        check(pb.GenerateRequest(token_ids=ids, images=images, max_tokens=1), bounds)
