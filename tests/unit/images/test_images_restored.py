"""Second turns: what comes back with a cached conversation is not looked at, unless its blocks are lost."""

from concurrent.futures import Future

import pytest

from collecting import Collect
from image_corpus import photograph, saved
from tie.assets.sample import make_sample_vision_bundle
from tie.proto import runtime_pb2 as pb
from tie.runtime.images.request_images import RequestImages
from tie.runtime.request import RequestRefusedError, check
from vision_runtime import BLOCK_TOKENS, Model

PICTURES = [saved(photograph(90, 60), "PNG"), saved(photograph(20, 44, seed=1), "JPEG")]
WAIT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model(make_sample_vision_bundle(tmp_path_factory.mktemp("restored") / "bundle"))
    yield model
    model.grammars.close()


class Copied:
    """Blocks of an earlier turn, as the runtime has received and checked them."""

    def __init__(self, blocks):
        self.blocks, self.first_block, self.block_count, self.closed = blocks, 0, len(blocks), 0

    def copy_into(self, memory, target, _may_go_on):
        for number, block in enumerate(self.blocks):
            memory.write_block(target.blocks[number], memoryview(block))
        target.computed = len(self.blocks) * BLOCK_TOKENS
        return True

    def close(self):
        self.closed += 1


def done(value):
    future = Future()
    future.set_result(value)
    return future


class Turn:
    """One request, its images counted as they are looked at."""

    def __init__(self, served, message, *, blocks=None, keep=False):
        self.looked, self.kept, self.sink = [], Future(), Collect(WAIT_S)
        request = check(message, served.engine.bounds)

        def look(files, numbers):
            self.looked += numbers
            return served.image_encoder.look(files, numbers)

        self.sink.job = served.engine.submit(
            request,
            self.sink,
            images=RequestImages(request, served.engine.bounds.placeholders, look) if request.images else None,
            restoring=done(Copied(blocks)) if blocks else None,
            keep=self.kept.set_result if keep else None,
        )

    def answer(self):
        events, end = self.sink.all(), self.sink.end
        assert end.HasField("finished"), end
        parts = [event.tokens for event in events if event.HasField("tokens")]
        self.sizes = [event.looked for event in events if event.HasField("looked")]
        self.finished = end.finished
        return [token for part in parts for token in part.token_ids], [
            one.logprob for part in parts for one in part.logprobs
        ]


def asked(model, pictures, *, sizes=(), more=b"", **fields):
    token = model.placeholders.token_id
    ids = [*b"look: ", *[id_ for _ in pictures for id_ in (token, *b" and then ")], *b"say ", *more]
    pairs = [(size is not None, *(size or (0, 0))) for size in sizes]
    known = [pb.ImageSize(known=one, rows=rows, columns=columns) for one, rows, columns in pairs]
    options = {"max_tokens": 10, "ignore_eos": True, "logprobs": 0} | fields
    return pb.GenerateRequest(token_ids=ids, images=pictures, image_sizes=known, **options)


def first_turn(served, model, pictures):
    """Blocks and sizes."""
    turn = Turn(served, asked(model, pictures), keep=True)
    turn.answer()
    kept = turn.kept.result(WAIT_S)
    executor, blocks = served.engine._executor, []
    for number in kept.blocks:
        blocks.append(bytearray(executor.block_bytes))
        executor.read_block(number, memoryview(blocks[-1]))
    kept.release()
    return blocks, [(size.rows, size.columns) for size in turn.sizes[0].sizes]


def whole_blocks(model, pictures, sizes):
    """Those of the prompt alone: an answer is another one in the next turn."""
    return len(model.placeholders.expanded(asked(model, pictures).token_ids, sizes).ids) // BLOCK_TOKENS


def test_known_images_whose_blocks_come_back_are_not_looked_at(model):
    with model.served() as served:
        blocks, sizes = first_turn(served, model, PICTURES)
        assert sizes == [(2, 3), (3, 2)]
        blocks = blocks[: whole_blocks(model, PICTURES, sizes)]
        before = (served.image_encoder.counts.decoded, served.image_encoder.counts.squares)
        second = Turn(served, asked(model, PICTURES, sizes=sizes, more=b"more"), blocks=blocks)
        tokens, scores = second.answer()
        assert second.looked == []
        assert (served.image_encoder.counts.decoded, served.image_encoder.counts.squares) == before
        assert second.finished.cached_tokens == len(blocks) * BLOCK_TOKENS
        plain_tokens, plain_scores = Turn(served, asked(model, PICTURES, more=b"more")).answer()
        assert tokens == plain_tokens
        assert scores == pytest.approx(plain_scores, abs=1e-3)


@pytest.mark.parametrize(
    ("share", "known", "looked"),
    [(0.4, [True, True], [0, 1]), (0.6, [True, True], [1]), (1.0, [True, False], [1]), (1.0, [False, False], [0, 1])],
)
def test_what_does_not_come_back_whole_is_looked_at(model, share, known, looked):
    """0.4 of the blocks end within the first image, 0.6 within the second."""
    with model.served() as served:
        blocks, sizes = first_turn(served, model, PICTURES)
        blocks = blocks[: int(share * whole_blocks(model, PICTURES, sizes))]
        sizes = [size if one else None for size, one in zip(sizes, known, strict=True)]
        if None in sizes:  # nothing after an image that is not known can come back
            blocks = [] if sizes[0] is None else blocks[:7]
        second = Turn(served, asked(model, PICTURES, sizes=sizes, more=b"more"), blocks=blocks)
        answer = second.answer()
        assert second.looked == looked
        plain = Turn(served, asked(model, PICTURES, more=b"more")).answer()
        assert answer[0] == plain[0]
        assert answer[1] == pytest.approx(plain[1], abs=1e-3)


def test_several_choices_look_at_all(model):
    with model.served() as served:
        blocks, sizes = first_turn(served, model, PICTURES)
        second = Turn(served, asked(model, PICTURES, sizes=sizes, n=2), blocks=blocks[:3])
        second.sink.all()
        assert second.looked == [0, 1]


def test_blocks_that_are_lost_make_it_look_and_answer_the_same(model):
    with model.served(blocks=200) as served:
        blocks, sizes = first_turn(served, model, PICTURES)
        plain = Turn(served, asked(model, PICTURES, more=b"more", max_tokens=60)).answer()
    blocks = blocks[: whole_blocks(model, PICTURES, sizes)]
    with model.served(blocks=40) as served:  # for one of them and a little
        old = [Turn(served, asked(model, [], max_tokens=150)) for _ in range(2)]
        second = Turn(served, asked(model, PICTURES, sizes=sizes, more=b"more", max_tokens=60), blocks=blocks)
        answer = second.answer()
        for turn in old:
            turn.answer()
        assert "tie_runtime_preemptions_total 0.0" not in served.engine.metrics.text()
    assert second.looked == [0, 1]
    assert answer[0] == plain[0]
    assert answer[1] == pytest.approx(plain[1], abs=1e-3)


@pytest.mark.parametrize("sizes", [[(2, 3)], [(2, 3), (0, 9)], [(9, 9), (1, 1)], [(0, 1), None]])
def test_sizes_that_cannot_be_are_refused(model, sizes):
    with model.served() as served, pytest.raises(RequestRefusedError, match="image_sizes"):
        check(asked(model, PICTURES, sizes=sizes), served.engine.bounds)
