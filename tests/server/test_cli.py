"""The `zen` command: what it prints, and one line and status 2 for whatever it cannot do."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from server import benchmark_ttft, cli, console, demo, kv_options
from server.app import running
from server.serve_options import ServeOptions
from zen_jax import benchmark
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base

COMMANDS = [
    ("convert", "base"),
    ("convert", "variant"),
    ("convert", "lora"),
    ("convert", "peft"),
    ("pool", "add"),
    ("pool", "ls"),
    ("pool", "show"),
    ("pool", "simulate"),
    ("verify",),
    ("ls",),
    ("generate",),
    ("bench", "linear"),
    ("serve",),
    ("client",),
]


@pytest.fixture
def zen(capsys: pytest.CaptureFixture[str]):
    """Runs a command line: (status, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(zen, command):
    status, out, _ = zen(*command, "--help")
    assert status == 0
    assert f"Example: zen {' '.join(command)}" in re.sub(r"\s+", " ", out)


def test_help_needs_no_jax():
    code = "import sys; from server.cli import run; run(['--help']); print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "False"


def test_weights_of_another_origin_need_force(zen, tiny_folders, tmp_path):
    shutil.copytree(tiny_folders["tiny-a"], tmp_path / "stranger")
    tensors = load_file(tmp_path / "stranger" / "model.safetensors")
    turned = {name: np.flip(w).copy() for name, w in tensors.items()}
    save_file(turned, tmp_path / "stranger" / "model.safetensors")
    store = tmp_path / "store"
    zen("convert", "base", tiny_folders["base"], store)
    command = ("convert", "variant", tmp_path / "stranger", store, "v")
    status, out, err = zen(*command)
    assert (status, out) == (2, "")
    told = [line for line in err.splitlines() if line.startswith("zen: ")]
    assert len(told) == 1 and "signs kept" in told[0] and "--force" in told[0]
    status, out, _ = zen(*command, "--force")
    assert status == 0
    assert "warning: forced" in out


def test_a_store_is_made_listed_and_verified(zen, tiny_folders, tmp_path):
    store = tmp_path / "store"
    status, out, _ = zen("convert", "base", tiny_folders["base"], store, "--json")
    assert status == 0
    base = json.loads(out)
    status, out, _ = zen("convert", "variant", tiny_folders["tiny-a"], store, "mine", "--json")
    assert (status, json.loads(out)["version"]) == (0, 1)
    status, out, _ = zen(
        *("convert", "variant", tiny_folders["tiny-a"], store, "mine"),
        *("--scale", "matrix", "--levels", 2, "--embed", "whole"),
    )
    assert status == 0
    assert "mine version 2" in out

    status, out, _ = zen("ls", store, "--json")
    listed = json.loads(out)
    assert status == 0
    assert listed["base"]["digest"] == base["digest"]
    assert [(v["name"], v["version"]) for v in listed["variants"]] == [("mine", 1), ("mine", 2)]
    first, second = listed["variants"]
    assert first["bytes"] < second["bytes"]
    assert first["ratio"] == pytest.approx(first["bytes"] / first["full_copy_bytes"], abs=1e-6)
    status, out, _ = zen("ls", store)
    assert status == 0
    assert f"{first['bytes']:,}" in out

    status, out, _ = zen("verify", store)
    assert (status, out) == (0, "whole: base; variants: 1; versions of them: 2\n")
    manifest = Store(store).manifest(Store(store).variant("mine", 1))
    file = next(name for name, entry in manifest.files.items() if entry.size > 100)
    damaged = store / "variants" / "mine" / "1" / file
    data = bytearray(damaged.read_bytes())
    data[50] ^= 1
    damaged.write_bytes(data)
    status, out, _ = zen("verify", store)
    assert status == 1
    assert out.startswith(f"mine/1: {file}")
    status, out, _ = zen("verify", store, "--json")
    assert status == 1
    assert json.loads(out)["findings"][0]["file"] == file


def test_a_damaged_manifest_is_listed(zen, tiny_store, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(tiny_store, store)
    (store / "variants" / "tiny-b" / "1" / "manifest.json").write_text("{}")
    status, out, _ = zen("ls", store)
    assert status == 0
    assert "damaged" in out
    assert "tiny-c" in out
    listed = json.loads(zen("ls", store, "--json")[1])["variants"]
    assert [("damaged" in row) for row in listed] == [False, True, False]
    assert zen("verify", store)[0] == 1


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """A folder whose config.json is a folder."""
    folder = tmp_path / "unreadable"
    (folder / "config.json").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("bogus",),
        ("convert",),
        ("convert", "base"),
        ("convert", "base", "{missing}", "{new}"),
        ("convert", "base", "{file}", "{new}"),
        ("convert", "base", "{unreadable}", "{new}"),
        ("convert", "base", "{base}", "{store}"),
        ("convert", "base", "{base}", "{file}"),
        ("convert", "base", "{base}", "{new}", "--shards", "0"),
        ("convert", "variant", "{base}", "{new}", "name"),
        ("convert", "variant", "{missing}", "{store}", "name"),
        ("convert", "variant", "{base}", "{store}", "../name"),
        ("convert", "variant", "{base}", "{store}", "base"),
        ("convert", "variant", "{base}", "{store}", "name", "--scale", "column"),
        ("convert", "variant", "{base}", "{store}", "name", "--levels", "5"),
        ("verify", "{new}"),
        ("verify", "{file}"),
        ("ls", "{new}"),
        ("ls",),
        ("serve", "{new}"),
        ("serve", "{store}", "--port", "70000"),
        ("serve", "{store}", "--rows", "none"),
        ("serve", "{store}", "--port", "0", "--kv-bytes", "much"),
        ("serve", "{store}", "--port", "0", "--kv-bytes", "1KiB"),
        ("serve", "{store}", "--port", "0", "--page-size", "24"),
        ("serve", "{store}", "--port", "0", "--kv-dtype", "int4"),
        ("serve", "{store}", "--port", "0", "--max-length", "100000"),
        ("serve", "{store}", "--host", "256.0.0.1", "--port", "0"),
        ("client",),
        ("client", "base"),
        ("client", "base", "Hi", "--address", "127.0.0.1:1"),
        ("client", "--list", "--address", "127.0.0.1:1"),
        ("client", "base", "Hi", "--seed", "-1"),
        ("client", "base", "Hi", "--address", "127.0.0.1:99999"),
        ("client", "--list", "--address", ""),
        ("client", "base", "a\udcff"),
        ("generate", "{store}", "base", "a\udcff"),
        ("generate", "{store}", "base", "Hi", "--seed", "-1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    zen, tiny_folders, tiny_store, tmp_path, unreadable, arguments
):
    (tmp_path / "file").write_text("text")
    before = sorted(tiny_store.rglob("*"))
    places = {
        "missing": tmp_path / "missing",
        "new": tmp_path / "new",
        "file": tmp_path / "file",
        "unreadable": unreadable,
        "base": tiny_folders["base"],
        "store": tiny_store,
    }
    status, out, err = zen(*(argument.format(**places) for argument in arguments))
    assert status == 2
    if arguments == ("convert",):  # help was shown
        assert "Usage" in out + err
        return
    assert out == ""
    assert len(err.splitlines()) == 1
    assert re.match(r"zen: .{10,}", err)
    assert sorted(tiny_store.rglob("*")) == before
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    "option, value",
    [
        ("max-tokens", "99999999999"),
        ("seed", "-1"),
        ("timeout", "nan"),
        ("timeout", "-1"),
        ("timeout", "0"),
    ],
)
def test_an_option_with_a_value_that_cannot_be_is_named(zen, option, value):
    status, _, err = zen("client", "base", "Hi", f"--{option}", value)
    assert status == 2
    assert err.startswith(f"zen: {option.replace('-', '_')}") and value in err


@pytest.mark.parametrize(
    "host, why",
    [
        ("999.1.1.1", "the host '999.1.1.1' cannot be resolved"),
        ("192.0.2.1", "this machine has no such address"),
    ],
)
def test_a_host_that_cannot_be_listened_on_is_told(zen, tiny_store, host, why):
    status, out, err = zen("serve", tiny_store, "--host", host, "--port", 0)
    assert (status, out) == (2, "")
    assert err.startswith(f"zen: cannot listen on {host}:0; {why}")


def test_a_demonstration_looks_at_its_port_before_it_converts(zen, monkeypatch):
    def convert(*_: object) -> None:
        raise AssertionError("it converted")

    monkeypatch.setattr(demo, "convert_family", convert)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = zen("demo", "--port", port)
    assert (status, out) == (2, "")
    assert err.startswith(f"zen: cannot listen on 127.0.0.1:{port}; is another server there?")


def test_a_fault_of_the_program_is_not_called_bad_input(zen, tiny_store, monkeypatch):
    def fail(self):
        raise KeyError("fault")

    monkeypatch.setattr(Store, "names", fail)
    with pytest.raises(KeyError):
        zen("ls", tiny_store)


def test_nobody_reads_the_output(tiny_store):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "server.cli", "ls", str(tiny_store)]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")


def test_a_port_that_is_taken_is_one_line_too(tiny_store):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "server.cli", "serve", str(tiny_store), "--port", port]
        process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(rf"zen: cannot listen on 127.0.0.1:{port};.*\n", process.stderr)


@pytest.mark.usefixtures("compiled")
def test_the_client_asks_and_lists(zen, tiny_store):
    options = ServeOptions(port=0, rows=2, max_length=64)
    with running(Store(tiny_store), options) as server:
        at = ("--address", server.address)
        few = ("--max-tokens", 3, "--seed", 5, "--temperature", "0.5", "--top-k", 4, "--top-p", 1)
        status, out, _ = zen("client", "tiny-a", "Hi", *at, *few, "--json")
        answer = json.loads(out)
        assert status == 0
        assert len(answer["token_ids"]) == 3
        assert answer["completion"]["seed"] == "5"
        assert answer["completion"]["model"]["name"] == "tiny-a"
        status, out, err = zen("client", "tiny-a", "Hi", *at, *few)
        assert (status, out) == (0, answer["text"] + "\n")
        assert re.search(r"tiny-a version 1: 3 tokens, length, seed 5, first token .* ms", err)
        likeliest = ("--logprobs", 2, "--prompt-logprobs", 0, "--n", 2, "--ignore-eos")
        first, second = json.loads(zen("client", "base", "Hi", *at, *few, *likeliest, "--json")[1])
        assert [len(entry["top_ids"]) for entry in first["logprobs"]] == [2, 2, 2]
        assert len(first["prompt_logprobs"]) == 3 and "prompt_logprobs" not in second
        text = zen("client", "base", "Hi", *at, *few, "--n", 2, "--ignore-eos")[1]
        assert text == f"{first['text']}\n{second['text']}\n"
        forced = ("--logit-bias", "65=100", "--stop", "no", "--stop", "AAA", "--max-tokens", 9)
        answer = json.loads(zen("client", "base", "Hi", *at, *forced, "--json")[1])
        assert (answer["text"], answer["token_ids"]) == ("", [65, 65, 65])
        assert answer["completion"]["matched_stop"] == "AAA"
        asked = json.loads(zen("client", "base", "Hi", *at, "--chat", "--json", *few)[1])
        assert asked["completion"]["usage"]["prompt_tokens"] == 4  # <|bos|>, H, i, end of line

        status, out, _ = zen("client", "--list", *at)
        assert status == 0
        assert re.search(r"tiny-a +1 +resident +0", out)
        listed = json.loads(zen("client", "--list", *at, "--json")[1])
        assert [variant["name"] for variant in listed["variants"]][-1] == "tiny-c"

        for bad in (("nobody", "Hi"), ("base", ""), ("base", "Hi", "--max-tokens", 0)):
            status, out, err = zen("client", *bad, *at)
            assert (status, out.strip()) == (2, "")
            assert len(err.splitlines()) == 1


def test_a_benchmark_prints_a_table_and_writes_its_figures(zen, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "_WORKING_SET", 1 << 16)
    file = tmp_path / "linear.json"
    small = ("--shape", "32x16", "--rows", 2, "--variants", 1, "--variants", 2, "--repeats", 1)
    status, out, _ = zen("bench", "linear", *small, "--json", file)
    assert status == 0
    cases = json.loads(file.read_text())["cases"]
    assert [(case["variants"], case["activations"]) for case in cases] == [
        (variants, dtype) for variants in (1, 2) for dtype in ("float32", "bfloat16")
    ]
    assert out.count("32x16") == 4 and "GB/s" in out
    for bad in (("--shape", "32"), ("--rows", 1, "--variants", 5), ("--json", tmp_path / "no/f")):
        status, _, err = zen("bench", "linear", *bad)
        assert (status, err.count("\n")) == (2, 1)


def test_decode_steps_are_measured(zen, tmp_path, tiny_store):
    file = tmp_path / "decode.json"
    small = ("--batch", 2, "--variants", 1, "--variants", 2, "--context", 3, "--repeats", 2)
    status, out, _ = zen("bench", "decode", "--model", tiny_store, *small, "--json", file)
    assert status == 0
    figures = json.loads(file.read_text())
    assert [case["variants"] for case in figures["cases"]] == [1, 2]
    assert all(case["compiles"] == 0 for case in figures["cases"])
    assert out.count("%") >= 4 and str(tiny_store) in out
    for bad in (("--model", "nothing"), ("--batch", 3, "--variants", 2), ("--products", "int8")):
        status, _, err = zen("bench", "decode", *bad)
        assert (status, err.count("\n")) == (2, 1), err


@pytest.mark.usefixtures("compiled")
def test_times_to_first_tokens_are_measured(zen, tmp_path, tiny_store, tiny_folders):
    file = tmp_path / "ttft.json"
    small = ("--prompt-tokens", 5, "--requests", 4, "--cancels", 3, "--rows", 2, "--json", file)
    status, out, err = zen("bench", "ttft", tiny_store, "tiny-b", *small)
    assert status == 0, err
    figures = json.loads(file.read_text())
    assert [row["model"] for row in figures["models"]] == ["base", "all variants", "tiny-b"]
    assert figures["compiles"] == 0 and figures["cancel"]["streams"] <= 4
    assert "all variants" in out and "is cancelled" in out

    # A store without variants gets one elsewhere.
    alone = tmp_path / "alone"
    convert_base(tiny_folders["base"], alone)
    assert zen("bench", "ttft", alone, *small)[0] == 0
    assert json.loads(file.read_text())["models"][2]["model"] == "noise"
    assert Store(alone).names() == []
    for bad in (("nobody",), ("--prompt-tokens", 256), ("--cancels", 0)):
        status, _, err = zen("bench", "ttft", tiny_store, *bad)
        assert (status, err.count("\n")) == (2, 1), err


def test_times_to_first_tokens_of_all_variants_count_together():
    times = {"base": [1.0, 2.0, 3.0], "a": [2.0, 4.0], "b": [6.0]}
    rows = benchmark_ttft.by_model(times)
    counts = [(row["model"], row["requests"], row["p50_over_base"]) for row in rows]
    assert counts == [("base", 3, 1.0), ("all variants", 3, 2.0), ("a", 2, 1.5), ("b", 1, 3.0)]
    assert rows[1]["p99_ms"] == pytest.approx(5.96)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_model_wrote_cannot_steer_a_terminal(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    console.show("a\tb\x1b[2Jc\n", end="")
    assert capsys.readouterr().out == (
        "a\tb\N{REPLACEMENT CHARACTER}[2Jc\n" if terminal else "a\tb\x1b[2Jc\n"
    )


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("512MiB", 2**29), ("2 GB", 2 * 10**9), ("1.5k", 1500), ("17", 17), ("3tib", 3 * 2**40)],
)
def test_sizes_are_read_as_people_write_them(text: str, bytes_: int):
    assert kv_options.byte_count(text) == bytes_
    for wrong in ("", "-1", "1 ZB", "MiB", "1,5GB", "nan"):
        with pytest.raises(ValueError, match="is no size; expected one as 512MiB"):
            kv_options.byte_count(wrong)
    for huge in ("9" * 400, "8 EiB"):
        with pytest.raises(ValueError, match="more than any machine has"):
            kv_options.byte_count(huge)


def test_prompts_are_answered_without_a_server(zen, tiny_store):
    options = ("--max-tokens", 5, "--temperature", 1, "--seed", 3)
    status, out, _ = zen("generate", tiny_store, "tiny-a", "ab", "b", *options, "--json")
    answers = json.loads(out)
    assert status == 0
    assert [answer["prompt"] for answer in answers] == ["ab", "b"]
    assert all(1 <= len(a["token_ids"]) <= 5 and a["seed"] == 3 for a in answers)
    status, out, _ = zen("generate", tiny_store, "tiny-a", "b", *options)
    assert (status, out) == (0, answers[1]["text"] + "\n")
    more = ("--n", 2, "--logprobs", 1, "--stop-token-id", 65, "--logit-bias", "65=99")
    answers = json.loads(zen("generate", tiny_store, "tiny-a", "b", *more, "--json")[1])
    assert [(a["sample"], a["token_ids"], a["matched"]) for a in answers] == [
        (0, [65], 65),
        (1, [65], 65),
    ]
    assert all(len(a["logprobs"][0]["top_ids"]) == 1 for a in answers)
    for bad in (
        ("tiny-none", "b"),
        ("tiny-a", "b" * 5000),
        ("tiny-a", "b", "--top-p", 0),
        ("tiny-a", "b", "--logprobs", 1),
        ("tiny-a", "b", "--logit-bias", "65"),
        ("tiny-a", "b", "--stop", ""),
    ):
        status, out, err = zen("generate", tiny_store, *bad)
        assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("option", ["half-life", "idle-after"])
def test_a_setting_is_called_by_its_option(zen, tiny_store, option):
    status, out, err = zen("serve", tiny_store, f"--{option}", "nan")
    assert (status, out) == (2, "")
    assert err.startswith(f"zen: --{option} is nan")
