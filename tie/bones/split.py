"""Which part of a model a rank computes: some of its layers (pipeline), and of each some heads and columns (tensor).

    rank = stage · tensor + shard              e.g. 4 ranks, tensor = 2, pipeline = 2

             shard 0    shard 1
    stage 0  rank 0     rank 1       the first layers
    stage 1  rank 2     rank 3       the last layers, the output matrix

Within a stage matrices are cut as in Shoeybi et al. 2019 (arXiv 1909.08053): queries, keys, values, gate and up by
rows, so that a shard has whole heads of its own; what follows them, output and down projection, by columns, so that
the shards' products are summed. The output matrix is cut by rows, and the logits are put side by side. All of it is
views of the whole tensors: a rank has no copy of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tie.bones.config import ModelConfig
from tie.bones.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANKS: Final = 64

_BY_ROWS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS: Final = ("o_proj", "down_proj")
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's place.

    Attributes:
        tensor: shards of each layer.
        pipeline: stages of layers.
        rank: which of them.

    Raises:
        ConfigError: there is no such place.
    """

    tensor: int = 1
    pipeline: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.tensor < 1 or self.pipeline < 1 or self.world_size > MAX_RANKS or not 0 <= self.rank < self.world_size:
            raise ConfigError("there is no such rank")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        """Which of the pipeline's."""
        return self.rank // self.tensor

    @property
    def shard(self) -> int:
        """Which of its stage's."""
        return self.rank % self.tensor

    @property
    def is_last(self) -> bool:
        """Whether logits come from here."""
        return self.stage == self.pipeline - 1

    @property
    def suffix(self) -> str:
        """What a layout id ends with: it names the split."""
        tensor = f"-tp{self.tensor}" if self.tensor > 1 else ""
        return tensor + (f"-pp{self.pipeline}" if self.pipeline > 1 else "")

    def of(self, rank: int) -> "Split":
        """Another rank's place."""
        return replace(self, rank=rank)

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The shape of this rank's part: its layers, heads and columns; all else is the model's.

        Raises:
            ConfigError: the model cannot be split so.
        """
        if self.world_size == 1:
            return whole
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            if getattr(whole, name) % self.tensor:
                raise ConfigError(f"the model's {name} cannot be split into {self.tensor} parts")
        if whole.num_layers < self.pipeline or whole.vocab_size < self.tensor:
            raise ConfigError("the model is too small for so many ranks")
        return replace(
            whole,
            num_layers=len(self._layers(whole)),
            num_heads=whole.num_heads // self.tensor,
            num_kv_heads=whole.num_kv_heads // self.tensor,
            intermediate_size=whole.intermediate_size // self.tensor,
        )

    def columns(self, whole: ModelConfig, shard: int | None = None) -> slice:
        """Which tokens' logits come from a shard of the last stage, from this one unless another is named."""
        number = self.shard if shard is None else shard
        return slice(number * whole.vocab_size // self.tensor, (number + 1) * whole.vocab_size // self.tensor)

    def tensors(self, whole: ModelConfig, tensors: "Mapping[str, Tensor]") -> "Mapping[str, Tensor]":
        """This rank's views, layers numbered from 0. With several shards there is always an output matrix.

        Args:
            whole: the model's configuration.
            tensors: of all of it, checked.
        """
        if self.world_size == 1:
            return tensors
        head = tensors.get(_HEAD, tensors[_EMBEDDING])
        views = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.")}
        views[_HEAD] = head[self.columns(whole)]
        for local, number in enumerate(self._layers(whole)):
            prefix = f"model.layers.{number}."
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    view = self._view(name.removeprefix(prefix), tensor)
                    if view is not None:
                        views[f"model.layers.{local}.{name.removeprefix(prefix)}"] = view
        return views

    def _layers(self, whole: ModelConfig) -> range:
        layers, stage = whole.num_layers, self.stage
        return range(stage * layers // self.pipeline, (stage + 1) * layers // self.pipeline)

    def _view(self, name: str, tensor: "Tensor") -> "Tensor | None":
        """This shard's part of a tensor; None: it has none."""
        kind = name.split(".")[-2]
        if kind in _BY_ROWS:
            return tensor.chunk(self.tensor)[self.shard]
        if kind not in _BY_COLUMNS:
            return tensor
        if tensor.dim() == 1:
            return tensor if self.shard == 0 else None  # a bias of what is summed counts once
        return tensor.chunk(self.tensor, 1)[self.shard]


ALONE: Final = Split()
"""The only rank."""
