"""Trains the eye of the digits demo: a small vision tower in front of the frozen SmolLM2-135M-Instruct.

    python tests/bench/train_digits.py DIGITS_CSV_GZ [--out tie/assets/digits] [--seconds 420]

DIGITS_CSV_GZ is `sklearn/datasets/data/digits.csv.gz` of any scikit-learn: 1,797 handwritten digits of 8 by 8 pixels
(E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, CC BY 4.0).
The last 360 are held out, for `tests/node/test_node_digits.py`.

Two steps, so that a CPU does it in minutes. First the language model says what it wants to see: for each digit a few
vectors are sought, in the place of the image, that make it answer with that digit whatever it is asked about it
(prompt tuning: Lester et al. 2021, arXiv 2104.08691). Then the tower and its connector learn to give these for
pictures, which takes no language model.
"""

import argparse
import gzip
import io
import json
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, DynamicCache, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tie.assets.digits.bundle import IMAGES, TEMPLATE, VISION
from tie.assets.gguf_reader import read_gguf
from tie.assets.tokenizer import Tokenizer
from tie.cli.assets import find_demo_weights
from tie.runtime.images.decoding import decode
from tie.runtime.images.limits import Limits
from tie.runtime.images.orders import Preparation
from tie.runtime.images.preparing import prepare

HELD_OUT: Final = 360
QUESTIONS: Final = (
    "What digit is this?",
    "Which digit is this?",
    "What number is this?",
    "What number do you see?",
    "Which number is in the picture?",
    "What is the digit in this image?",
    "Read the digit.",
    "What is this?",
)
_PREPARATION: Final = Preparation("square", IMAGES["side"], 1, split=False, resample=IMAGES["resample"])
_TEXT_SIZE: Final = 576
_TOKENS: Final = (VISION["image_size"] // VISION["patch_size"] // VISION["scale_factor"]) ** 2


def as_png(pixels: np.ndarray, *, inverted: bool = False, scale: int = 8) -> bytes:
    """One digit, 8 by 8 values from 0 to 16, as somebody would send it: a larger grey picture."""
    grey = (pixels * 255 / 16).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(255 - grey if inverted else grey).resize((8 * scale, 8 * scale), Image.Resampling.BICUBIC).save(
        file, "PNG"
    )
    return file.getvalue()


def squares(pictures: np.ndarray, *, inverted: bool) -> Tensor:
    """As the runtime prepares them, `[n, 3, side, side]` between -1 and 1."""
    tiles = [
        prepare(decode(as_png(picture, inverted=inverted), Limits()), _PREPARATION).tiles[0] for picture in pictures
    ]
    return torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).float() / 127.5 - 1


class Language:
    """The frozen model, with everything before the image computed once."""

    def __init__(self) -> None:
        path = find_demo_weights()
        self.model = LlamaForCausalLM(AutoConfig.from_pretrained(path.parent, gguf_file=path.name)).eval()
        checkpoint = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=self.model)
        self.model.load_state_dict(checkpoint["tensors"], strict=False)  # the output matrix is the embedding
        self.model.requires_grad_(requires_grad=False)
        self.tokens = Tokenizer.from_json(read_gguf(path).tokenizer_json)
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        self.before = self.encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
        self.digits = torch.tensor([self.tokens.encode(str(digit))[0] for digit in range(10)])
        self.end = self.encode("<|im_end|>")[0]

    def encode(self, text: str) -> list[int]:
        """Token ids, control tokens among them."""
        return self.tokens.encode(text, special=True)

    def loss(self, vectors: Tensor, labels: Tensor, question: str) -> tuple[Tensor, Tensor]:
        """Of answering with the digit and nothing more; and which digits it would have said.

        Args:
            vectors: `[n, tokens, 576]` in the place of the image.
            labels: `[n]`.
            question: what follows it.
        """
        count = len(vectors)
        embed = self.model.get_input_embeddings()
        cache = DynamicCache()
        with torch.no_grad():
            self.model.model(input_ids=torch.tensor([self.before]), past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(count)
        after = embed(torch.tensor(self.encode(f"{question}<|im_end|>\n<|im_start|>assistant\n")))
        said = embed(self.digits[labels])[:, None]
        whole = torch.cat((vectors, after.expand(count, -1, -1), said), 1)
        logits = self.model(inputs_embeds=whole, past_key_values=cache, use_cache=True, logits_to_keep=2).logits
        first, second = logits[:, 0], logits[:, 1]
        loss = cross_entropy(first, self.digits[labels]) + cross_entropy(second, torch.full((count,), self.end))
        return loss, first.argmax(-1)


def wanted_vectors(language: Language, seconds: float) -> Tensor:
    """For each digit what stands in its image's place, `[10, tokens, 576]`."""
    embed = language.model.get_input_embeddings().weight
    spread = embed.std()
    vectors = nn.Parameter(embed[language.digits][:, None].repeat(1, _TOKENS, 1).clone())
    optimizer = torch.optim.Adam([vectors], lr=0.02 * float(spread) * 5)
    labels, began, step = torch.arange(10), time.monotonic(), 0
    torch.manual_seed(0)
    while time.monotonic() - began < seconds:
        # What the tower gives will never be exact: the model must not mind.
        noisy = vectors + 0.3 * spread * torch.randn_like(vectors)
        loss, said = language.loss(noisy, labels, QUESTIONS[step % len(QUESTIONS)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        right = int((said == language.digits).sum())
        print(f"vectors: step {step}, loss {loss.item():.4f}, {right} of 10", flush=True)
        if loss.item() < 0.01 and step > 3 * len(QUESTIONS):
            break
    return vectors.detach()


class Eye(nn.Module):
    """Tower and connector, to be trained."""

    def __init__(self) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=VISION["hidden_size"], intermediate_size=VISION["intermediate_size"],
            num_hidden_layers=VISION["num_layers"], num_attention_heads=VISION["num_heads"],
            image_size=VISION["image_size"], patch_size=VISION["patch_size"], vision_use_head=False,
        )  # fmt: skip
        self.tower = SiglipVisionModel(config)
        factor = VISION["scale_factor"]
        self.proj = nn.Linear(VISION["hidden_size"] * factor**2, _TEXT_SIZE, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """`[n, tokens, 576]`."""
        h = self.tower(pixel_values=pixels).last_hidden_state
        factor = VISION["scale_factor"]
        grid = VISION["image_size"] // VISION["patch_size"] // factor
        parts = h.view(len(h), grid, factor, grid, factor, -1).permute(0, 1, 3, 2, 4, 5)
        vectors: Tensor = self.proj(parts.reshape(len(h), grid * grid, -1))
        return vectors

    def tensors(self) -> dict[str, Tensor]:
        """As a bundle has them."""
        tower = self.tower.state_dict()
        named = {f"vision_model.{name.removeprefix('vision_model.')}": one.detach() for name, one in tower.items()}
        named["connector.modality_projection.proj.weight"] = self.proj.weight.detach()
        return {name: one.flatten(1).contiguous() if one.dim() > 2 else one for name, one in named.items()}


def shifted(pixels: Tensor) -> Tensor:
    """Moved by up to an eighth of the side, as hands do, and a little noisier."""
    x, y = (int(step) for step in torch.randint(-3, 4, (2,)))
    return torch.roll(pixels, (y, x), (2, 3)) + 0.05 * torch.randn_like(pixels)


def trained(eye: Eye, pixels: Tensor, labels: Tensor, wanted: Tensor, seconds: float) -> None:
    """Teaches the eye the wanted vectors."""
    scale = wanted.std()
    goal = wanted.flatten(1) / scale
    optimizer = torch.optim.AdamW(eye.parameters(), lr=1e-3, weight_decay=0.05)
    began, step, batch = time.monotonic(), 0, 128
    while (passed := (time.monotonic() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, step / 100) * (1 - passed)
        chosen = torch.randint(len(pixels), (batch,))
        got = eye(shifted(pixels[chosen])).flatten(1) / scale
        # Near its own digit's vectors, and nearer than to any other's.
        distances = torch.cdist(got, goal) ** 2 / got.shape[1]
        loss = cross_entropy(-10 * distances, labels[chosen]) + distances.gather(1, labels[chosen, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"eye: step {step}, loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("digits", type=Path)
    parser.add_argument("--out", type=Path, default=Path("tie/assets/digits"))
    parser.add_argument("--seconds", type=float, default=420, help="for both steps")
    parser.add_argument("--held-out", type=Path, help="where to put those, as one picture with their labels")
    arguments = parser.parse_args()
    with gzip.open(arguments.digits) as file:
        table = np.loadtxt(file, delimiter=",")
    pictures, labels = table[:, :64].reshape(-1, 8, 8), torch.from_numpy(table[:, 64].astype(np.int64))
    if arguments.held_out:
        write_held_out(pictures[-HELD_OUT:], labels[-HELD_OUT:], arguments.held_out)
    both = torch.stack([squares(pictures, inverted=inverted) for inverted in (False, True)])
    learned, held = both[:, :-HELD_OUT].flatten(0, 1), both[:, -HELD_OUT:]
    language = Language()
    wanted = wanted_vectors(language, arguments.seconds / 2)
    torch.manual_seed(1)
    eye = Eye().train()
    trained(eye, learned, labels[:-HELD_OUT].repeat(2), wanted, arguments.seconds / 2)
    eye.eval()
    for inverted in (0, 1):
        with torch.no_grad():
            vectors = eye(held[inverted])
            nearest = torch.cdist(vectors.flatten(1), wanted.flatten(1)).argmin(1)
            heard = [
                language.loss(vectors[at : at + 30], labels[-HELD_OUT:][at : at + 30], QUESTIONS[0])[1]
                for at in range(0, HELD_OUT, 30)
            ]
        right = (torch.cat(heard) == language.digits[labels[-HELD_OUT:]]).float().mean()
        seen = (nearest == labels[-HELD_OUT:]).float().mean()
        print(f"held out, inverted {inverted}: seen {seen:.3f}, said by the model {right:.3f}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    halves = {name: one.to(torch.bfloat16) for name, one in eye.tensors().items()}
    save_file(halves, arguments.out / "vision.safetensors", metadata={"format": "pt"})
    print(f"{sum(one.numel() for one in halves.values())} numbers; template {len(TEMPLATE)} characters")


def write_held_out(pictures: np.ndarray, labels: Tensor, path: Path) -> None:
    """All of them in one grey picture, 20 in a row, and their labels beside it."""
    rows = pictures.reshape(-1, 20, 8, 8).swapaxes(1, 2).reshape(-1, 160)
    Image.fromarray((rows * 255 / 16).astype(np.uint8)).save(path)
    path.with_suffix(".json").write_text(json.dumps(labels.tolist()) + "\n")


if __name__ == "__main__":
    main()
