"""node.toml: one file, one table per daemon, strictly checked.

Every field has a default that runs a node on this machine; an unknown key is an error, so that a typo is not silently a
default. Times are seconds, sizes bytes.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tie.daemon.errors import ConfigError
from tie.daemon.sockets import Sockets

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
MAX_RANKS = 64  # of a model, and pools of registered prompts
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
# Every size that a frame on the app's socket may have. The smallest holds what a tick gathers of a fast answer, or else
# sizes would tell long tokens from short ones; and the fewer there are, the less the larger ones tell.
DEFAULT_BUCKETS = (256, 1024, 4096, 16384)
SMALLEST_TOP_BUCKET = 1024  # below, a `done` with all its choices would not fit
LARGEST_BUCKET = 1024 * 1024


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of node.toml."""


class ModelConfig(_Table, frozen=True):
    """Which bundle the node serves."""

    bundle: str = ""


class OwnerConfig(_Table, frozen=True):
    """tie-model-owner."""

    allowed_users: tuple[str, ...] = ()  # names or numbers, beside root and the owner's own, that may attach
    pool_bytes: Count = 1024 * 1024 * 1024  # what the prefix pools of registered system prompts may take, in all


class RuntimeConfig(_Table, frozen=True):
    """The AFM Runtime: executor and scheduler."""

    # native: the compiled CPU step; auto: it, where it can run; cuda: a choice, never a fallback from or to it
    executor: Literal["auto", "torch", "native", "cuda"] = "auto"
    dtype: Literal["f32", "bf16"] = "bf16"  # of torch's weights; f32 is torch's alone
    weights: Literal["auto", "q4", "q8", "bf16"] = "auto"  # how native keeps them; auto: as the bundle stores them
    tensor_parallel: Ranks = 1  # ranks that share each layer; with several ranks of either kind torch computes
    pipeline_parallel: Ranks = 1  # stages of layers, one behind the other
    rank_deadline_s: Seconds = 30.0  # a rank that others wait for so long hangs
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0: one per core, and native takes fewer while others use them
    block_tokens: Count = 16
    kv_tokens: Count = 32768  # capacity of the paged KV pool, in tokens
    max_running: Count = 32  # sequences in one batch
    max_waiting: Count = 128  # queued requests beyond that answer "busy"
    step_tokens: Count = 512  # token budget of one step
    speculation: Literal["auto", "off"] = "auto"  # guess tokens ahead and verify them, where that pays
    context_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0: the model's own
    transfer_bytes: Count = 1024 * 1024 * 1024  # buffers of KV blocks on their way in and out, at once
    transfer_spares: Annotated[int, msgspec.Meta(ge=0, le=64)] = 2  # buffers made ahead of need
    transfer_spare_tokens: Annotated[int, msgspec.Meta(ge=0)] = 2048  # what each of them holds
    import_deadline_s: Seconds = 5.0  # a prompt whose blocks are not there by then is computed in full
    export_request_s: Seconds = 3.0  # how long a finished answer's blocks wait for the app to ask for them
    export_deadline_s: Seconds = 10.0  # and for it to take them

    @property
    def ranks(self) -> int:
        """Processes that the model is split over."""
        return self.tensor_parallel * self.pipeline_parallel


class ProbeConfig(_Table, frozen=True):
    """tie-status-probe."""

    canary_interval_s: Seconds = 10.0
    canary_deadline_s: Seconds = 5.0
    start_deadline_s: Seconds = 120.0


class GpuHealthConfig(_Table, frozen=True):
    """gpuhealthd. `cpu` is a choice, never a fallback: a node that should have GPUs and has none is unavailable."""

    provider: Literal["cpu", "nvml"] = "cpu"
    poll_interval_s: Seconds = 2.0
    stale_after_s: Seconds = 4.0
    recover_after_polls: Count = 3
    min_available_bytes: int = 256 * 1024 * 1024
    max_load_per_core: float = 64.0
    max_temperature_c: float = 100.0
    expected_devices: Annotated[int, msgspec.Meta(ge=0)] = 0  # fewer GPUs than this is a fault; 0: whatever is there
    expected_nvlinks: Annotated[int, msgspec.Meta(ge=0)] = 0  # of each GPU; fewer active ones are a fault
    confidential: bool = False  # whether GPUs must be in confidential-computing mode
    kernel_log: str = "/dev/kmsg"  # where the kernel's XIDs are read; not readable: only the driver's events are
    policy_file: str = ""  # moves conditions between verdicts


class ControllerConfig(_Table, frozen=True):
    """tie-controllerd."""

    recycle_interval_s: Seconds = 3600.0
    recycle_jitter: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.2  # each node draws its own within ± this share
    drain_deadline_s: Seconds = 30.0
    busy_ack_deadline_s: Seconds = 5.0
    fresh_runtime_deadline_s: Seconds = 180.0
    error_grace_s: Seconds = 5.0  # an error that mends itself within this time costs no recycle
    error_backoff_s: Seconds = 10.0  # between two out-of-cycle recycles; doubles up to ten times this
    error_attempts: Count = 4  # such recycles without lasting peace: then the owner is ended, then the node gives up
    give_up_s: Seconds = 1800.0  # a node that has been away for so long gives up and calls somebody
    heartbeat_s: Seconds = 2.0


class AppConfig(_Table, frozen=True):
    """tie-cloud-app, one request."""

    buckets: tuple[int, ...] = DEFAULT_BUCKETS
    tick_s: Annotated[float, msgspec.Meta(ge=0)] = 0.03  # deltas are gathered this long: frame timing hides tokens
    max_request_bytes: Count = 16 * 1024 * 1024
    max_message_bytes: Count = 256 * 1024
    max_output_tokens: Count = 4096
    idle_timeout_s: Seconds = 30.0  # between two frames of a request
    start_deadline_s: Seconds = 5.0  # until kv.sock and Triton have answered
    time_limit_s: Seconds = 600.0
    cache_timeout_s: Seconds = 2.0  # what a conversation's cache may take of a request; then the prompt is computed
    cache_ttl_s: Seconds = 3600.0  # of what is saved after a turn; the store may allow less
    save_deadline_s: Seconds = 10.0  # for saving it, after the answer
    cache_without_turn_key: bool = True  # under a key of the request's own; nobody can open it once that has ended


class CloudBoardConfig(_Table, frozen=True):
    """The reference CloudBoard: ingress and registry."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8443
    standby: Annotated[int, msgspec.Meta(ge=0, le=64)] = 2  # jobhelpers connected ahead of time, each to a ready app
    max_in_flight: Count = 256
    request_deadline_s: Seconds = 660.0  # from a request's last byte to its answer's
    max_connections: Count = 12_000
    max_connections_per_peer: Annotated[int, msgspec.Meta(ge=0)] = 0  # from one address; 0: no limit of its own
    upload_deadline_s: Seconds = 120.0  # for a request to come in
    upload_bytes: Annotated[int, msgspec.Meta(ge=32 * 1024 * 1024)] = 256 * 1024 * 1024  # not yet accepted, in all


class KpsConfig(_Table, frozen=True):
    """The reference key protection service."""

    key_lifetime_s: Seconds = 86400.0
    max_opens_per_s: Count = 1000


class StoreConfig(_Table, frozen=True):
    """tie-cache-stored."""

    capacity_bytes: Count = 1024 * 1024 * 1024
    max_entry_bytes: Count = 512 * 1024 * 1024
    max_entries: Count = 8192
    ttl_s: Seconds = 3600.0
    turnover_s: Seconds = 60.0  # pushing out everything takes at least this long, however much is written
    max_connections: Count = 1024
    connection_bytes: Count = 1024 * 1024 * 1024  # what one connection may write, in all
    connection_entries: Count = 64
    spare_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 * 1024 * 1024  # one memfd made ahead of need; 0: none
    write_deadline_s: Seconds = 60.0  # from `new` to `put`


class NodeConfig(_Table, frozen=True):
    """The whole of node.toml."""

    node_id: str = "node-0"
    run_dir: str = "/run/tie"
    model: ModelConfig = ModelConfig()
    owner: OwnerConfig = OwnerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    probe: ProbeConfig = ProbeConfig()
    gpuhealth: GpuHealthConfig = GpuHealthConfig()
    controller: ControllerConfig = ControllerConfig()
    app: AppConfig = AppConfig()
    cloudboard: CloudBoardConfig = CloudBoardConfig()
    kps: KpsConfig = KpsConfig()
    store: StoreConfig = StoreConfig()

    @property
    def sockets(self) -> Sockets:
        """Where every socket of this node is."""
        return Sockets(Path(self.run_dir))


def load(path: Path, *, run_dir: str | None = None) -> NodeConfig:
    """Reads and checks node.toml.

    Args:
        path: of the file.
        run_dir: for a file that names none; that of an installed node unless given.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or a value has the wrong type, range or name.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="give the file with --config") from error
    try:
        tree = msgspec.toml.decode(text)
        config = msgspec.convert(tree if run_dir is None else {"run_dir": run_dir, **tree}, NodeConfig, str_keys=True)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}", hint="docs/configuration.md lists every key") from error
    if problem := contradiction(config):
        raise ConfigError(f"{path}: {problem}", hint="docs/configuration.md says what goes together")
    return config


def contradiction(config: NodeConfig) -> str:
    """What does not go together in a configuration, though each value alone may be; empty when nothing is amiss."""
    app, runtime, store = config.app, config.runtime, config.store
    if not app.buckets or list(app.buckets) != sorted(set(app.buckets)) or app.buckets[0] < 32:
        return "app.buckets must be ascending sizes of at least 32 bytes"
    if not SMALLEST_TOP_BUCKET <= app.buckets[-1] <= LARGEST_BUCKET:
        return f"the last of app.buckets must be {SMALLEST_TOP_BUCKET} to {LARGEST_BUCKET} bytes"
    if store.max_entry_bytes > store.capacity_bytes:
        return "store.max_entry_bytes must not exceed store.capacity_bytes"
    if runtime.ranks > 1 and runtime.executor not in {"auto", "torch"}:
        return "several ranks (runtime.tensor_parallel, runtime.pipeline_parallel) need the executor torch"
    if runtime.ranks > MAX_RANKS:
        return f"there can be {MAX_RANKS} ranks (runtime.tensor_parallel times runtime.pipeline_parallel) at most"
    if runtime.executor == "cuda" and runtime.dtype != "bf16":
        return 'runtime.executor cuda computes in bf16: set runtime.dtype = "bf16"'
    return ""


def dump(config: NodeConfig) -> bytes:
    """The TOML text that `load` reads back as the same configuration.

    Raises:
        ConfigError: a name in it is no UTF-8 (as a directory's may be), which is all that TOML and gRPC know.
    """
    try:
        return _to_toml(msgspec.to_builtins(config)).encode()
    except UnicodeEncodeError as error:
        raise ConfigError("a name in node.toml is not UTF-8", hint="give the run directory another name") from error


def _to_toml(tables: dict[str, object]) -> str:
    # The standard library reads TOML and does not write it; ours has scalars, flat lists and one level of tables.
    # JSON scalars and lists are valid TOML.
    def line(key: str, value: object) -> str:
        return f"{key} = {msgspec.json.encode(value).decode()}\n"

    top = "".join(line(key, value) for key, value in tables.items() if not isinstance(value, dict))
    rest = (
        f"\n[{name}]\n" + "".join(line(key, value) for key, value in table.items())
        for name, table in tables.items()
        if isinstance(table, dict)
    )
    return top + "".join(rest)
