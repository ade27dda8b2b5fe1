"""An image beside streams: gaps between the tokens of eight answers, alone and while an image is looked at.

    python tests/bench/bench_images.py [--tower small|base] [--tokens 160]

The demo model with a tower of random weights, in bfloat16, in this process: engine, decoder processes and encoder as
in the runtime. `small` is the digits demo's size, `base` SigLIP base's (86 million weights) at 256 pixels; the image is
cut into 16 squares and one more. Prints medians and p99 of the gaps, and how long the image took.
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

# Where this runs as a script there is nobody else who says where the helpers are.
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from image_corpus import photograph, saved
from tie.assets.build import create_bundle, read_source
from tie.assets.digits.bundle import IMAGES, TEMPLATE, TOKEN, VISION
from tie.assets.manifest import Images, Vision
from tie.assets.safetensors_reader import read_header
from tie.assets.tokenizer import Tokenizer
from tie.bones.executor import Executor
from tie.bones.vision.config import VisionConfig, vision_shapes
from tie.cli.assets import find_demo_weights
from tie.proto import runtime_pb2 as pb
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.images.factory import make_image_encoder
from tie.runtime.images.request_images import RequestImages
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits
from vision_runtime import Model

BASE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_layers": 12, "num_heads": 12, "image_size": 256,
    "patch_size": 16,
}  # fmt: skip
TOWERS = {"small": VISION, "base": {**VISION, **BASE, "scale_factor": 4}}


class Times:
    """When each token came."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.ended = threading.Event()

    def emit(self, event: pb.GenerateEvent, *, last: bool) -> None:
        if event.HasField("tokens"):
            self.at += [time.perf_counter()] * len(event.tokens.token_ids)
        assert not event.HasField("failed"), event
        if last:
            self.ended.set()


def model_with(tower: str, directory: Path) -> Model:
    source = read_source(find_demo_weights())
    fields = TOWERS[tower]
    dice = torch.Generator().manual_seed(1)
    shapes = vision_shapes(VisionConfig(**fields), source.architecture.hidden_size)
    weights = {name: torch.randn(shape, generator=dice).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    save_file(weights, directory / "vision.safetensors")
    side = fields["image_size"]
    token = Tokenizer.from_json(source.tokenizer_json).token_id(TOKEN)
    images = IMAGES | {"kind": "tiles", "side": side, "longest_edge": 4 * side, "split": True, "token_id": token}
    source.weights["vision.safetensors"] = directory / "vision.safetensors"
    whole = msgspec.structs.replace(source.architecture, vision=msgspec.convert(fields, Vision))
    changed = type(source)(
        name=source.name, architecture=whole, tokenizer=source.tokenizer, tokenizer_json=source.tokenizer_json,
        chat_template=TEMPLATE, weights=source.weights, weights_format="gguf",
        tensors=(*source.tensors, *read_header("vision.safetensors", directory / "vision.safetensors")),
        images=msgspec.convert(images, Images),
    )  # fmt: skip
    return Model(create_bundle(changed, directory / "bundle"))


def gaps(streams: list[Times], start: float, end: float) -> np.ndarray:
    found = [np.diff([at for at in stream.at if start <= at <= end]) for stream in streams]
    return np.concatenate(found) * 1000


def wait_for_tokens(streams: list[Times], count: int) -> None:
    while min(len(stream.at) for stream in streams) < count:
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=TOWERS, default="base")
    parser.add_argument("--tokens", type=int, default=160, help="of each stream before the image")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = model_with(arguments.tower, Path(name))
        tensors = {key: one.bfloat16() if one.dim() > 1 else one for key, one in model.tensors.items()}
        executor = Executor(model.config, tensors, num_blocks=2048, block_tokens=16, dtype="bf16", threads=2)
        image_encoder = make_image_encoder(model.bundle.manifest, executor)
        assert image_encoder is not None
        engine = Engine(
            executor, BlockPool(2048, 16), Limits(step_tokens=512, max_running=32, max_waiting=128),
            Bounds(model.config.vocab_size, 2048, model.placeholders), tokenizer=model.tokenizer,
            end_ids=frozenset(), grammars=model.grammars, on_failure=lambda: None, speculation=False,
        )  # fmt: skip
        engine.start()
        streams = [Times() for _ in range(8)]
        for number, sink in enumerate(streams):
            text = model.tokenizer.encode(f"Tell me a long story about river number {number}. Once upon a time")
            engine.submit(
                check(pb.GenerateRequest(token_ids=text, max_tokens=1500, ignore_eos=True), engine.bounds), sink
            )
        wait_for_tokens(streams, 30)
        start = time.perf_counter()
        wait_for_tokens(streams, 30 + arguments.tokens)
        asked = time.perf_counter()
        image = saved(photograph(1200, 1100), "JPEG", quality=90)
        message = pb.GenerateRequest(token_ids=[1, model.placeholders.token_id, 198], images=[image], max_tokens=1)
        request, sink = check(message, engine.bounds), Times()
        engine.submit(request, sink, images=RequestImages(request, model.placeholders, image_encoder.look))
        sink.ended.wait(280)
        seen = time.perf_counter()
        length = len(model.placeholders.expanded(request.prompt, [(4, 4)]).ids)
        text, sink = pb.GenerateRequest(token_ids=[198] * length, max_tokens=1), Times()
        engine.submit(check(text, engine.bounds), sink)
        sink.ended.wait(280)
        read = time.perf_counter()
        spans = {"alone": (start, asked), "beside the image": (asked, seen), "beside as long a text": (seen, read)}
        for label, (first, last) in spans.items():
            some = gaps(streams, first, last)
            p50, p99 = np.percentile(some, (50, 99))
            print(f"{label}: {len(some)} gaps, median {p50:.0f} ms, p99 {p99:.0f} ms, longest {some.max():.0f} ms")
        print(f"the image's first token, of {length} in its prompt, after {seen - asked:.1f} s")
        engine.stop(10)
        image_encoder.close()
        model.grammars.close()


if __name__ == "__main__":
    main()
