"""manifest.json of a bundle: its files by name, size and hash, and what a node must know without opening the weights.

Strictly typed and versioned: an unknown field, a file name that leaves the directory or a wrong type is an error.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"
TOKENIZER_FILE: Final = "tokenizer.json"
CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
TENSORS_FILE: Final = "tensors.json"

# One path component that no shell, log line or archive tool reads as anything else. \Z: `$` would allow a newline.
SAFE_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"
FileName = Annotated[str, msgspec.Meta(pattern=SAFE_NAME)]
IDENTIFIER: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}\Z"
Identifier = Annotated[str, msgspec.Meta(pattern=IDENTIFIER)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file of the bundle.

    Attributes:
        sha256: lower-case hexadecimal.
        bytes: its exact size.
    """

    sha256: Digest
    bytes: Annotated[int, msgspec.Meta(ge=0)]


class Vision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model's vision tower; the same JSON as `tie.bones.vision.config.VisionConfig`, which says what each is."""

    connector: Literal["pixel-shuffle", "mlp"]
    hidden_size: Positive
    intermediate_size: Positive
    num_layers: Positive
    num_heads: Positive
    image_size: Positive
    patch_size: Positive
    layer_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    final_norm: bool
    scale_factor: Positive
    connector_bias: bool
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def tokens(self) -> int:
        """Positions that a square of an image takes in a prompt."""
        return (self.image_size // self.patch_size // self.scale_factor) ** 2


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model's shape; the same JSON as `tie.bones.config.ModelConfig`.

    Attributes:
        context_tokens: the longest sequence that the model was made for.
        rope_scaling: Hugging Face's object of that name, or None.
        attention_bias: the attention projections have biases (Qwen2: q, k and v; otherwise the output's as well).
        qk_norm: queries and keys are normalized per head (Qwen3).
        sliding_window: tokens that a position sees at most, or None for all.
        vision: of a model that takes images.
    """

    kind: Literal["llama", "qwen2", "qwen3", "mistral"]
    hidden_size: Positive
    intermediate_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    vocab_size: Positive
    context_tokens: Positive
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)]
    rope_theta: Annotated[float, msgspec.Meta(gt=0)]
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    sliding_window: Positive | None = None
    vision: Vision | None = None


class Images(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model wants its pictures; as `tie.runtime.images.preparing.Preparation`, and what stands for one.

    Attributes:
        token_id: of the token in whose places the vectors of images stand.
    """

    kind: Literal["tiles", "square"]
    side: Positive
    longest_edge: Positive
    split: bool
    resample: Annotated[int, msgspec.Meta(ge=0, le=5)]
    token_id: TokenId


class TokenizerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What tokenizer.json does not say.

    Attributes:
        bos_id: beginning of sequence, where the model has one.
        add_bos: a raw prompt (no chat template) starts with `bos_id`.
        end_of_turn_ids: any of these ends an answer.
        special_tokens: what a chat template may name, for example {"bos_token": "<s>"}.
    """

    bos_id: TokenId | None = None
    add_bos: bool = False
    end_of_turn_ids: tuple[TokenId, ...]
    special_tokens: dict[str, str] = {}


class SystemPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A registered system prompt: the only text whose KV cache requests may share.

    Attributes:
        token_ids: the system message as the chat template renders it, alone.
    """

    name: Identifier
    text: str
    token_ids: tuple[TokenId, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole of manifest.json.

    Attributes:
        model: the id that requests name.
        release: changes whenever the content does.
        files: every file of the bundle but the manifest itself.
        weights: the files that hold weights; where each tensor lies in them is in tensors.json.
        images: how the model wants them, where it takes any.
    """

    version: Literal[1] = VERSION
    model: Identifier
    release: Identifier
    architecture: Architecture
    files: dict[FileName, FileEntry]
    weights: tuple[FileName, ...]
    weights_format: Literal["gguf", "safetensors"]
    tokenizer: TokenizerInfo
    system_prompts: tuple[SystemPrompt, ...] = ()
    images: Images | None = None

    def __post_init__(self) -> None:
        """Checks what types cannot.

        Raises:
            ValueError: a named file is not listed, or names repeat (msgspec turns it into its ValidationError).
        """
        missing = {TOKENIZER_FILE, TENSORS_FILE, *self.weights} - self.files.keys()
        if missing:
            raise ValueError(f"not listed under files: {sorted(missing)}")
        if MANIFEST_FILE in self.files:
            raise ValueError("the manifest cannot list itself")
        if not self.weights or len(set(self.weights)) != len(self.weights):
            raise ValueError("weights must name at least one file, each once")
        names = [prompt.name for prompt in self.system_prompts]
        if len(set(names)) != len(names):
            raise ValueError("system prompt names must differ")
        if self.architecture.num_heads % self.architecture.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        if self.architecture.head_dim % 2:
            raise ValueError("head_dim must be even: rotary embedding pairs its halves")
        if (self.images is None) != (self.architecture.vision is None):
            raise ValueError("images and architecture.vision go together")
        if self.images and self.images.token_id >= self.architecture.vocab_size:
            raise ValueError("images.token_id is outside the vocabulary")


def decode(data: bytes) -> Manifest:
    """Reads a manifest.

    Raises:
        msgspec.MsgspecError: not a manifest of this version.
    """
    return msgspec.json.decode(data, type=Manifest)


def encode(manifest: Manifest) -> bytes:
    """The one spelling of a manifest: equal manifests give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"
