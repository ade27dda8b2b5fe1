"""Text of a choice: released in whole characters, held and dropped by the byte, whatever the tokens were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.app.text import ChoiceText
from tie.daemon.errors import ProtocolError
from tie.proto import app_pb2


@pytest.fixture(scope="module")
def tokenizer(sample):
    return sample.tokenizer


def entry(number: int) -> app_pb2.TokenLogprob:
    return app_pb2.TokenLogprob(token=bytes([number]))


def feed(choice: ChoiceText, ids: list[int]) -> None:
    for token_id in ids:
        choice.add(token_id)


@given(data=st.data(), text=st.text(max_size=40))
def test_released_and_finished_text_together_are_the_answer_minus_what_is_dropped(tokenizer, data, text):
    ids = tokenizer.encode(text)
    whole = text.encode()
    drop = data.draw(st.integers(0, len(whole)))
    while drop and drop < len(whole) and whole[len(whole) - drop] & 0xC0 == 0x80:
        drop -= 1
    choice = ChoiceText(tokenizer.stream_decoder())
    said = []
    sent = 0
    for count, token_id in enumerate(ids, start=1):
        choice.add(token_id)
        decoded = len(whole[:count].decode(errors="ignore").encode())
        # The runtime never holds back less than the dropped end, nor more than is not yet out.
        least = max(0, decoded - (len(whole) - drop))
        hold = data.draw(st.integers(least, decoded - sent))
        piece, _ = choice.release(hold)
        sent += len(piece.encode())
        said.append(piece)
    said.append(choice.finish(drop, stopped=bool(drop))[0])
    assert "".join(said) == whole[: len(whole) - drop].decode()


@given(ids=st.lists(st.integers(0, 258), max_size=30))
def test_any_tokens_at_all_give_what_the_whole_decode_gives(tokenizer, ids):
    choice = ChoiceText(tokenizer.stream_decoder())
    said = []
    for token_id in ids:
        choice.add(token_id)
        said.append(choice.release(0)[0])
    said.append(choice.finish(0, stopped=False)[0])
    assert "".join(said) == tokenizer.decode(ids)


def test_a_hold_inside_a_character_holds_all_of_it(tokenizer):
    choice = ChoiceText(tokenizer.stream_decoder())
    feed(choice, tokenizer.encode("aé"))
    assert choice.release(1)[0] == "a"
    assert choice.finish(0, stopped=False)[0] == "é"


def test_an_unfinished_character_after_a_stop_string_is_no_answer(tokenizer):
    choice = ChoiceText(tokenizer.stream_decoder())
    feed(choice, [*tokenizer.encode("aEND"), tokenizer.encode("é")[0]])
    assert choice.release(3)[0] == "a"
    assert choice.finish(3, stopped=True)[0] == ""


def test_an_unfinished_character_at_the_end_shows(tokenizer):
    choice = ChoiceText(tokenizer.stream_decoder())
    feed(choice, [*tokenizer.encode("a"), tokenizer.encode("é")[0]])
    assert choice.release(0)[0] == "a"
    assert choice.finish(0, stopped=False)[0] == "\ufffd"


def test_what_is_out_can_be_neither_held_nor_dropped(tokenizer):
    choice = ChoiceText(tokenizer.stream_decoder())
    feed(choice, tokenizer.encode("abc"))
    choice.release(1)
    with pytest.raises(ProtocolError):
        choice.release(2)
    with pytest.raises(ProtocolError):
        choice.finish(2, stopped=True)


def test_logprobs_leave_with_their_text_and_not_before(tokenizer):
    choice = ChoiceText(tokenizer.stream_decoder())
    for number, token_id in enumerate(tokenizer.encode("aéEN")):
        choice.add(token_id, entry(number))
        if number == 1:  # half of a character
            assert choice.release(0) == ("a", [entry(0)])
    assert choice.release(2) == ("é", [entry(1), entry(2)])
    assert choice.finish(2, stopped=True) == ("", [])


def test_a_silent_token_s_logprob_comes_at_the_end(tokenizer):
    choice = ChoiceText(tokenizer.stream_decoder())
    choice.add(tokenizer.encode("a")[0], entry(0))
    choice.add(2, entry(1))
    assert choice.release(0) == ("a", [entry(0)])
    assert choice.finish(0, stopped=False) == ("", [entry(1)])
