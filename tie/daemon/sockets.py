"""Where the sockets of a node are: names in its run directory, one folder for each edge of the process picture."""

from pathlib import Path

import msgspec


class Sockets(msgspec.Struct, frozen=True):
    """Socket paths: one directory per edge of the process picture, so that one group can guard it."""

    run_dir: Path

    @property
    def node(self) -> Path:
        """CloudBoard's gRPC, for the controller."""
        return self.run_dir / "cloudboard" / "node.sock"

    @property
    def jobhelper(self) -> Path:
        """Accept=yes: one cb_jobhelper per connection, for CloudBoard's ingress."""
        return self.run_dir / "jobhelper" / "jobhelper.sock"

    @property
    def kps(self) -> Path:
        """The key protection service's gRPC, for jobhelpers."""
        return self.run_dir / "kps" / "kps.sock"

    @property
    def app(self) -> Path:
        """Accept=yes: one tie-cloud-app per connection, for jobhelpers."""
        return self.run_dir / "app" / "app.sock"

    @property
    def triton(self) -> Path:
        """Triton's gRPC, for apps and the probe. The server appends `:PORT` to the path that it is given."""
        return self.run_dir / "runtime" / "triton.sock:1"

    @property
    def kv(self) -> Path:
        """Kvxfer channel and death notice of the runtime, for apps and the probe."""
        return self.run_dir / "runtime" / "kv.sock"

    @property
    def engine(self) -> Path:
        """Private to the runtime container: probe to engine."""
        return self.run_dir / "engine" / "engine.sock"

    @property
    def probe(self) -> Path:
        """The status probe's gRPC, for the controller."""
        return self.run_dir / "probe" / "probe.sock"

    @property
    def owner(self) -> Path:
        """The model owner's attach channel, for the runtime."""
        return self.run_dir / "owner" / "owner.sock"

    @property
    def owner_control(self) -> Path:
        """The model owner's gRPC, for the controller."""
        return self.run_dir / "owner-control" / "control.sock"

    @property
    def gpuhealth(self) -> Path:
        """Gpuhealthd's gRPC, for the controller."""
        return self.run_dir / "gpuhealth" / "gpuhealth.sock"

    @property
    def store(self) -> Path:
        """The cache store's channel, for apps."""
        return self.run_dir / "store" / "store.sock"

    @property
    def store_control(self) -> Path:
        """The cache store's gRPC (its metrics), for the controller and operators."""
        return self.run_dir / "store-control" / "control.sock"

    @property
    def control(self) -> Path:
        """The controller's gRPC, for operators."""
        return self.run_dir / "control" / "control.sock"

    @property
    def binding_key(self) -> Path:
        """The node's binding key (raw private key), read by jobhelpers; its public half beside it as `.pub`."""
        return self.run_dir / "keys" / "binding.key"

    @property
    def statement_key(self) -> Path:
        """The fleet's statement key (Ed25519 seed), read by the key protection service; public half as `.pub`."""
        return self.run_dir / "keys" / "statement.key"
