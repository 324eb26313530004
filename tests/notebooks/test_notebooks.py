"""Every notebook runs from top to bottom, in a process of its own, as a reader would run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code and all(not cell.get("outputs") for cell in cells), "kept without outputs"
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(code))
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(script)],
        cwd=NOTEBOOKS,
        env={**os.environ, "TMPDIR": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
