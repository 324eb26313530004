"""`zen eval`: what it prints and writes, and one line and status 2 for whatever it cannot do."""

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from server import cli

SECRET = "a-secret-word"


@pytest.fixture
def zen(capsys: pytest.CaptureFixture[str]):
    """Runs `zen eval`: (status, stdout, what it says on stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = cli.run(["eval", *(str(argument) for argument in arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "kind.txt"
    path.write_text(f"{SECRET} and more of it. " * 8)
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"prompt": "{SECRET}", "answer": "{SECRET}"}}\n' * 2)
    return path


def test_help_has_an_example(zen) -> None:
    status, out, _ = zen("--help")
    assert status == 0 and "Example: zen eval --base" in re.sub(r"\s+", " ", out)


def test_it_compares_and_writes(zen, tiny_folders, tiny_store, text, tasks, tmp_path) -> None:
    page, plot = tmp_path / "page.md", tmp_path / "plot.png"
    given = (
        *("--base", tiny_store, "--tuned", tiny_folders["tiny-a"]),
        *("--model", f"{tiny_store}:tiny-a", "--option", "row-2-together"),
        *("--edge-text", text, "--tasks", tasks, "--skill", "add"),
        *("--windows", 2, "--length", 32, "--examples", 4, "--draws", 100),
    )
    status, out, err = zen(*given, "--markdown", page, "--png", plot)
    assert status == 0, err
    assert "kind (edge of the distribution; 2 windows, 64 tokens)" in out
    assert "add-edge (edge of the distribution; 4 tasks" in out and "recovered" in out
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert "| row-2-together |" in page.read_text()
    status, out, err = zen(*given, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert [one["name"] for one in found["sets"]] == ["tasks", "add", "kind", "add-edge"]
    assert [m["kind"] for m in found["models"]] == ["base", "tuned", "delta", "option"]
    delta = found["sets"][0]["results"][2]
    assert delta["model"] == "tiny-a" and delta["kl"]["value"] > 0
    assert delta["recovered"] == {"value": None, "low": None, "high": None, "why": "no gain"}
    assert SECRET not in out + err + page.read_text()


def _other_shape(folder: Path, like: Path) -> Path:
    folder.mkdir()
    for path in like.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((like / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 32}))
    tensors = load_file(like / "model.safetensors")
    for name, tensor in tensors.items():
        if "gate" in name or "up" in name:
            tensors[name] = tensor[:32].copy()
        if "down" in name:
            tensors[name] = tensor[:, :32].copy()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "missing.txt"), "missing.txt: No such file"),
        (("--tasks", "missing.jsonl"), "missing.jsonl: No such file"),
        (("--text", "EMPTY"), "is empty; expected text"),
        (("--tasks", "EMPTY"), "is empty; expected lines"),
        (("--tasks", "TEXT"), "line 1 is no JSON"),
        ((), "nothing to ask; give --text, --tasks, --skill, --gym or --human-eval"),
        (("--skill", "nope"), "no skill is called 'nope'"),
        (("--text", "TEXT", "--model", "STORE:nobody"), "nobody"),
        (("--text", "TEXT", "--option", "nope"), "no option is called nope; there are base"),
        (("--text", "TEXT", "--tuned", "OTHER"), "is no fine-tune of this base"),
        (("--text", "TEXT", "--tuned", "missing"), "missing: does not exist"),
        (("--text", "TEXT", "--base", "missing"), "missing: does not exist"),
        (("--text", "TEXT", "--scratch", "missing"), "missing is no folder"),
        (("--text", "TEXT", "--markdown", "no/where.md"), "no/where.md: No such file"),
        (("--text", "TEXT", "--windows", "0"), "Invalid value for '--windows'"),
        (("--text", "TEXT", "--length", "1"), "Invalid value for '--length'"),
        (("--text", "TEXT", "--text", "TEXT"), "two sets are called kind"),
    ],
)
def test_bad_input_is_one_line(
    zen, tiny_folders, tiny_store, text, tmp_path, arguments, message
) -> None:
    places = {"STORE": str(tiny_store), "TEXT": str(text), "EMPTY": str(tmp_path / "empty")}
    (tmp_path / "empty").touch()
    if "OTHER" in arguments:
        places["OTHER"] = str(_other_shape(tmp_path / "other", tiny_folders["tiny-a"]))
    given = [re.sub("STORE|TEXT|EMPTY|OTHER", lambda m: places[m[0]], a) for a in arguments]
    base = [] if "--base" in given else ["--base", tiny_store]
    tuned = [] if "--tuned" in given else ["--tuned", tiny_folders["tiny-a"]]
    status, out, err = zen(*base, *tuned, *given)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and message in err, err
    assert SECRET not in err
