"""Prompts with images as a cached conversation sees them: good up to the first image that is another one."""

import pytest

from tie.app.placed import Prompt
from tie.assets.images import Placeholders
from tie.assets.sample import make_sample_vision_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.proto.runtime_pb2 import ImageSize
from tie.warden.keys import ConversationKey, Root
from tie.warden.manifest import Image

FILES = (b"one", b"two", b"three")
SIZES = [(2, 3), (0, 0), (1, 1)]


@pytest.fixture(scope="module")
def placeholders(tmp_path_factory):
    bundle = make_sample_vision_bundle(tmp_path_factory.mktemp("placed") / "bundle")
    return Placeholders.of(bundle.manifest, load_tokenizer(bundle))


@pytest.fixture
def prompt(placeholders):
    token = placeholders.token_id
    prompt = Prompt((1, token, 2, 3, token, token, 4), FILES, placeholders)
    with ConversationKey(Root.TURN, bytes(32)) as key:
        prompt.digests = key.digests(FILES)
    return prompt


def earlier(prompt, *, sizes=SIZES):
    return [Image(digest, *size) for digest, size in zip(prompt.digests, sizes, strict=True)]


def test_all_is_certain_where_all_images_are_known(prompt, placeholders):
    prompt.recognise(earlier(prompt))
    one, two, three = (placeholders.ids(*size) for size in SIZES)
    assert prompt.certain == (1, *one, 2, 3, *two, *three)
    assert [(size.known, size.rows, size.columns) for size in prompt.known_sizes()] == [(True, *s) for s in SIZES]


def test_another_image_ends_what_is_certain(prompt, placeholders):
    images = earlier(prompt)
    images[1] = Image(bytes(32), 0, 0)
    prompt.recognise(images)
    assert prompt.certain == (1, *placeholders.ids(2, 3), 2, 3)
    assert [size.known for size in prompt.known_sizes()] == [True, False, False]
    prompt.recognise(images[:1])
    assert prompt.certain == (1, *placeholders.ids(2, 3), 2, 3)
    prompt.recognise([images[1], *images])
    assert prompt.certain == (1,)
    assert prompt.known_sizes() == []


def test_an_image_that_cannot_be_is_not_known(prompt):
    prompt.recognise(earlier(prompt, sizes=[(2, 3), (0, 7), (1, 1)]))
    assert len(prompt.sizes) == 1


def test_the_whole_is_what_the_runtime_has_seen(prompt, placeholders):
    looked = [ImageSize(known=True, rows=rows, columns=columns) for rows, columns in SIZES]
    tokens, images = prompt.whole(looked)
    assert tokens == (1, *placeholders.ids(2, 3), 2, 3, *placeholders.ids(0, 0), *placeholders.ids(1, 1), 4)
    assert images == earlier(prompt)
    assert prompt.whole(looked[:2]) is None
    assert prompt.whole([*looked[:2], ImageSize(known=True, rows=99, columns=1)]) is None


def test_text_alone_is_certain_but_for_its_last_token(placeholders):
    for prompt in (Prompt((1, 2, 3)), Prompt((1, 2, 3), (), placeholders)):
        prompt.recognise([])
        assert prompt.certain == (1, 2)
        assert prompt.whole([]) == ((1, 2, 3), [])
        assert prompt.known_sizes() == []


def test_digests_are_the_conversation_s_own():
    keys = [ConversationKey(root, bytes([number]) * 32) for root in Root for number in range(2)]
    assert len({key.digests([b"the same"])[0] for key in keys}) == 4
