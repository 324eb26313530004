"""Finds source files and functions that have grown too long to be read in one go.

    python tools/check_sizes.py [--root FOLDER]     status 1, and one line each, when there are any

A file has at most 500 lines. A function of the packages has at most 60, its docstring not counted:
the limit is on what has to be followed, not on what is explained. Generated code is left out.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 60
PACKAGES = ("pallas_kernels", "server", "zen_jax")
FOLDERS = (*PACKAGES, "notebooks", "tests", "tools")
SUFFIXES = (".cc", ".h", ".py")


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the last statement, without the docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def sources(root: Path) -> Iterator[Path]:
    """Hand-written sources under `root`, in a fixed order."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and "_pb2" not in path.name:
                yield path


def too_long(root: Path) -> list[str]:
    """One line for each file and function that is over its limit."""
    found: list[str] = []
    for path in sources(root):
        name = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > FILE_LINES:
            found.append(f"{name}: {lines} lines, at most {FILE_LINES}: which room is missing?")
        if path.suffix != ".py" or name.parts[0] not in PACKAGES:
            continue
        for node in ast.walk(ast.parse(text, filename=str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = function_lines(node)
                if lines > FUNCTION_LINES:
                    place = f"{name}:{node.lineno}: {node.name}"
                    found.append(f"{place} has {lines} lines, at most {FUNCTION_LINES}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    found = too_long(parser.parse_args(arguments).root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
