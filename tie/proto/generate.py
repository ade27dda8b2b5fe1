"""Regenerates the stubs beside the .proto files: `python -m tie.proto.generate`. Committed; a test compares them."""

import sys
from pathlib import Path


def generate(out: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` for every .proto of this package below `out`.

    Raises:
        RuntimeError: protoc refused a file; its own message is on standard error.
    """
    # Only developers have grpcio-tools: imported here so that the package imports without it.
    import grpc_tools
    from grpc_tools import protoc

    root = Path(__file__).parents[2]
    sources = sorted(str(path.relative_to(root)) for path in Path(__file__).parent.glob("*.proto"))
    with_services = [name for name in sources if "\nservice " in (root / name).read_text()]
    include = str(Path(grpc_tools.__file__).parent / "_proto")
    # The plug-ins of this environment, whether or not it is on PATH.
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin=protoc-gen-{name}={scripts}/protoc-gen-{name}" for name in ("mypy", "mypy_grpc")]
    base = ["protoc", f"-I{root}", f"-I{include}", *plugins]
    if protoc.main([*base, f"--python_out={out}", f"--mypy_out=quiet:{out}", *sources]):
        raise RuntimeError("protoc failed on the messages")
    if protoc.main([*base, f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}", *with_services]):
        raise RuntimeError("protoc failed on the services")


if __name__ == "__main__":
    generate(Path(__file__).parents[2])
    sys.stdout.write("tie/proto regenerated\n")
