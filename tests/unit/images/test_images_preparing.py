"""Squares for the encoder, against the image processors of `transformers`."""

import numpy as np
import pytest
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from image_corpus import photograph
from tie.runtime.images.orders import Preparation
from tie.runtime.images.preparing import prepare

SIZES = [(1, 1), (64, 64), (65, 64), (40, 300), (301, 97), (1000, 3), (2, 1000), (513, 700)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(
    ("side", "longest", "split"), [(64, 256, True), (64, 256, False), (60, 64, True), (128, 128, True)]
)
def test_tiles_are_those_of_idefics3(width, height, side, longest, split):
    picture = photograph(width, height)
    prepared = prepare(picture, Preparation("tiles", side, longest, split, 1))
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": side}, do_image_splitting=split
    )
    wanted = processor([[picture]], return_tensors="np", return_row_col_info=True, input_data_format="channels_last")
    ours = prepared.tiles.transpose(0, 3, 1, 2) / np.float32(255) * 2 - 1
    assert ours.shape == wanted["pixel_values"][0].shape
    assert np.abs(ours - wanted["pixel_values"][0]).max() <= 2 / 255
    assert ([[prepared.rows]], [[prepared.columns]]) == (wanted["rows"], wanted["cols"])


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_square_is_that_of_siglip(width, height):
    picture = photograph(width, height)
    prepared = prepare(picture, Preparation("square", 48, 1, False, 3))
    wanted = SiglipImageProcessorPil(size={"height": 48, "width": 48})(
        picture, return_tensors="np", input_data_format="channels_last"
    )["pixel_values"]
    assert np.abs(prepared.tiles.transpose(0, 3, 1, 2) / np.float32(255) * 2 - 1 - wanted).max() <= 2 / 255


@pytest.mark.parametrize(
    "impossible",
    [("tiles", 0, 64, True, 1), ("tiles", 8, 4096, True, 1), ("square", 64, 1, False, 9), ("tiles", 8, 0, True, 1)],
)
def test_an_impossible_preparation_is_none(impossible):
    with pytest.raises(ValueError):
        Preparation(*impossible)
