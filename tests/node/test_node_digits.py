"""The demo that sees: handwritten digits that it was not trained on, from a device through a whole node to the answer.

The digits are the last 360 of those that `tests/bench/train_digits.py` names, in one picture. A sample of them; all
with TIE_SLOW=1.
"""

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tie.cli.assets import find_demo_weights
from tie.daemon.errors import BundleError
from tie.device.request import with_images

pytestmark = [pytest.mark.node, pytest.mark.slow]

DATA = Path(__file__).parents[1] / "data"
LABELS = json.loads((DATA / "digits.json").read_text())
SAMPLE = range(len(LABELS)) if os.environ.get("TIE_SLOW") == "1" else range(0, len(LABELS), 15)
QUESTION = "What digit is this?"


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    try:
        find_demo_weights()
    except BundleError:
        pytest.skip("needs the demo model: the extra `demo`")
    path = tmp_path_factory.mktemp("digits") / "bundle"
    command = [sys.executable, "-m", "tie.cli.main", "assets", "demo", "--digits", str(path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return path


def pictures() -> list[bytes]:
    """Each as somebody would send it."""
    whole = np.asarray(Image.open(DATA / "digits.png"))
    tiles = whole.reshape(-1, 8, 20, 8).swapaxes(1, 2).reshape(-1, 8, 8)
    files = []
    for tile in tiles:
        file = io.BytesIO()
        Image.fromarray(tile).resize((64, 64), Image.Resampling.BICUBIC).save(file, "PNG")
        files.append(file.getvalue())
    return files


async def test_digits_that_it_has_never_seen_are_read(client, model):
    files, at_once = pictures(), asyncio.Semaphore(6)
    assert len(files) == len(LABELS) == 360

    async def read(number: int) -> str:
        async with at_once:
            question = [with_images(QUESTION, [files[number]])]
            answer = await client.chat(question, model=model, temperature=0.0, max_tokens=4)
            return (await answer.result()).texts[0]

    said = await asyncio.gather(*map(read, SAMPLE))
    right = sum(text == str(LABELS[number]) for text, number in zip(said, SAMPLE, strict=True))
    print(f"{right} of {len(SAMPLE)} held-out digits: {right / len(SAMPLE):.1%}")
    # 345 of all 360; a sample of so few may hold several of the others.
    assert right / len(SAMPLE) >= (0.95 if len(SAMPLE) == len(LABELS) else 0.8)


def chat(node, *arguments) -> str:
    """What the command line prints of an answer."""
    where = ["--run-dir", str(node.run_dir), "--temperature", "0"]
    command = [sys.executable, "-m", "tie.cli.main", "chat", *where, *arguments]
    return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout


def test_the_command_line_asks_about_a_file(running_node, tmp_path):
    number = next(number for number in SAMPLE if LABELS[number] == 7)
    (tmp_path / "seven.png").write_bytes(pictures()[number])
    assert chat(running_node, "--image", str(tmp_path / "seven.png"), QUESTION).strip() == "7"


def test_it_still_talks(running_node):
    assert "Paris" in chat(running_node, "--max-tokens", "30", "What is the capital of France?")
