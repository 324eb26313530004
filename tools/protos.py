"""Generates the code beside protos/zen/v1/*.proto, or checks that it is what they give.

    python tools/protos.py write     generate the code again
    python tools/protos.py check     status 1, and the files by name, when one is stale or missing

The output depends on the .proto files and on the version of grpcio-tools in constraints.txt, and on
nothing else. The .proto files are read from the root `protos`, so that generated imports read
`from zen.v1 import ...`.
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "protos"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(source: Path, target: Path) -> None:
    """Writes the code for every .proto file under `source` into the same folders under `target`.

    Raises RuntimeError when protoc refuses a file; protoc itself prints what is wrong with it.
    """
    from grpc_tools import protoc

    protos = sorted(str(path) for path in source.rglob("*.proto"))
    if not protos:
        raise RuntimeError(f"no .proto file lies under {source}")
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={source}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *protos,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


def generated(folder: Path) -> dict[str, bytes]:
    """The generated files under `folder`, by their path relative to it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for pattern in GENERATED
        for path in sorted(folder.rglob(pattern))
    }


def stale(root: Path) -> list[str]:
    """One line for each file under `root` that is not what its .proto files give."""
    with tempfile.TemporaryDirectory() as folder:
        generate(root, Path(folder))
        expected = generated(Path(folder))
    found = generated(root)
    lines = [f"{name}: missing" for name in expected.keys() - found.keys()]
    lines += [f"{name}: generated from no .proto file" for name in found.keys() - expected.keys()]
    lines += [
        f"{name}: not what its .proto file gives"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    return sorted(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that holds zen/")
    options = parser.parse_args(arguments)
    if options.action == "write":
        for name in generated(options.root):
            (options.root / name).unlink()
        generate(options.root, options.root)
        return 0
    lines = stale(options.root)
    for line in lines:
        print(line)
    if lines:
        print("run `make protos` and commit what it writes")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
