"""The `zen` command: what can be asked of it, and how it says no.

A command's module is imported when the command runs, so that `--help` needs no JAX. Bad input of
any kind is one line on stderr and exit status 2; Ctrl-C is status 130.
"""

import os
import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from server import (
    cli_bench,
    cli_cache,
    cli_distil,
    cli_eval,
    cli_merge,
    cli_operations,
    cli_plan,
    cli_pool,
    cli_serve,
    cli_token,
    console,
)
from server import reach_options as reach
from server import sampling_options as choice
from server.cli_types import Address, AsJson, Products, StorePath

app = typer.Typer(
    name="zen",
    help="Serves a family of fine-tunes of one base language model as 1-bit deltas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
convert = typer.Typer(help="Put a base, or a fine-tune of it, into a store.", no_args_is_help=True)
app.add_typer(convert, name="convert")
app.add_typer(cli_merge.merge, name="merge")
bench = typer.Typer(help="Measure ratios side by side on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(cli_pool.pool, name="pool")
app.add_typer(cli_token.token, name="token")

Source = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="A Hugging Face folder with safetensors, or a GGUF file."),
]


class Scale(StrEnum):
    """How many scales a matrix has."""

    row = "row"
    matrix = "matrix"


class Embed(StrEnum):
    """What is kept of embedding and head."""

    bit = "bit"
    whole = "whole"
    shared = "shared"


@app.callback(invoke_without_command=True)
def _zen(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        console.say(version("zen-jax"))
        raise typer.Exit


@convert.command("base", epilog="Example: zen convert base ./SmolLM2-135M ./store")
def convert_base(
    src: Source,
    store: StorePath,
    shards: Annotated[
        int, typer.Option(min=1, help="Files that each matrix is cut into, one a device.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Make a new store of a base model."""
    from server.commands import store as commands

    commands.base(src, store, shards=shards, as_json=as_json)


@convert.command("variant", epilog="Example: zen convert variant ./my-fine-tune ./store my-name")
def convert_variant(
    src: Source,
    store: StorePath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What requests call it.")],
    scale: Annotated[Scale, typer.Option(help="One scale a row of outputs, or a matrix.")] = (
        Scale.row
    ),
    levels: Annotated[
        int, typer.Option(min=1, max=4, help="Bits a weight; 2 where much was rounded away.")
    ] = 1,
    embed: Annotated[Embed, typer.Option(help="What is kept of embedding and head.")] = Embed.bit,
    force: Annotated[
        bool, typer.Option("--force", help="Even if the weights do not come from the base's.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a fine-tune of the store's base as a 1-bit delta, as the next version of its name."""
    from server.commands import store as commands

    commands.variant(
        src,
        store,
        name,
        scale=scale.value,  # pyright: ignore[reportArgumentType]
        levels=levels,
        embed=embed.value,  # pyright: ignore[reportArgumentType]
        force=force,
        as_json=as_json,
    )


@convert.command("lora", epilog="Example: zen convert lora ./my-adapter ./store my-name")
def convert_lora(
    src: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A PEFT folder: adapter_config.json and safetensors."),
    ],
    store: StorePath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What requests call it.")],
    as_json: AsJson = False,
) -> None:
    """Add a LoRA adapter of the store's base, as the next version of its name."""
    from server.commands import store as commands

    commands.lora(src, store, name, as_json=as_json)


@convert.command("peft", epilog="Example: zen convert peft ./store my-name ./my-adapter")
def convert_peft(
    store: StorePath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A variant that was an adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; a new one.")],
) -> None:
    """Write an adapter of a store as a PEFT folder again, with the same tensors and settings."""
    from server.commands import store as commands

    commands.peft(store, name, out)


app.command(
    "distill", epilog="Example: zen distill ./my-fine-tune ./store my-name --text ./examples.txt"
)(cli_distil.distill)


@app.command(epilog="Example: zen verify ./store")
def verify(store: StorePath, as_json: AsJson = False) -> None:
    """Check every byte of a store; exit status 1 when anything is damaged."""
    from server.commands import store as commands

    if not commands.verify(store, as_json=as_json):
        raise typer.Exit(1)


@app.command("ls", epilog="Example: zen ls ./store --json")
def list_store(store: StorePath, as_json: AsJson = False) -> None:
    """List a store's variants, their bytes and their share of a full copy."""
    from server.commands import store as commands

    commands.ls(store, as_json=as_json)


@app.command(epilog="Example: zen generate ./store zen4-upper table river --chat")
def generate(
    context: typer.Context,
    store: StorePath,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A variant's name, or base.")],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue.")],
    chat: Annotated[bool, typer.Option(help="Take each prompt as a message.")] = False,
    max_tokens: choice.MaxTokens = 64,
    temperature: choice.Temperature = 0.0,
    top_k: choice.TopK = None,
    top_p: choice.TopP = None,
    min_p: choice.MinP = None,
    seed: choice.Seed = None,
    repetition_penalty: choice.Repetition = None,
    presence_penalty: choice.Presence = None,
    frequency_penalty: choice.Frequency = None,
    logit_bias: choice.Bias = None,
    min_tokens: choice.MinTokens = None,
    stop: choice.Stop = None,
    stop_token_ids: choice.StopTokens = None,
    ignore_eos: choice.IgnoreEos = False,
    n: choice.Samples = None,
    logprobs: choice.Logprobs = None,
    prompt_logprobs: choice.PromptLogprobs = None,
    as_json: AsJson = False,
) -> None:
    """Answer prompts from a store in this process, without a server."""
    from server.commands import generate as command
    from zen_jax.sampling import SamplingParams

    sampling = SamplingParams(**choice.given(context.params))
    command.run(store, model, prompts, sampling, chat=chat, as_json=as_json)


app.command("serve", epilog=cli_serve.EXAMPLE)(cli_serve.serve)
app.command("plan", epilog=cli_plan.EXAMPLE)(cli_plan.plan)
app.command("eval", epilog=cli_eval.EXAMPLE)(cli_eval.evaluate)
app.command("status", epilog="Example: zen status --address host:50051")(cli_operations.status)
app.command("profile", epilog="Example: zen profile --seconds 10")(cli_operations.profile)


@app.command(epilog="Example: zen client zen4-coder 'def ' --max-tokens 64 --temperature 0")
def client(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A variant's name, or base.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue.")
    ] = None,
    address: Address = "127.0.0.1:50051",
    token_file: reach.TokenFile = None,
    tls_roots: reach.TlsRoots = None,
    tls_cert: reach.TlsCert = None,
    tls_key: reach.TlsKey = None,
    list_: Annotated[bool, typer.Option("--list", help="List the server's variants.")] = False,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a message.")] = False,
    max_tokens: choice.MaxTokens = None,
    temperature: choice.Temperature = None,
    top_k: choice.TopK = None,
    top_p: choice.TopP = None,
    min_p: choice.MinP = None,
    seed: choice.Seed = None,
    repetition_penalty: choice.Repetition = None,
    presence_penalty: choice.Presence = None,
    frequency_penalty: choice.Frequency = None,
    logit_bias: choice.Bias = None,
    min_tokens: choice.MinTokens = None,
    stop: choice.Stop = None,
    stop_token_ids: choice.StopTokens = None,
    ignore_eos: choice.IgnoreEos = False,
    n: choice.Samples = None,
    logprobs: choice.Logprobs = None,
    prompt_logprobs: choice.PromptLogprobs = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole answer.")] = None,
    priority: Annotated[
        int | None, typer.Option(help="-10 to 10; more goes first where rows are short.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a server that runs, and print its answer as it comes."""
    from server.commands import client as command

    access = reach.access(token_file, tls_roots, tls_cert, tls_key)
    if list_:
        command.list_variants(address, access, as_json=as_json)
        return
    if model is None or prompt is None:
        raise ValueError("give a model and a prompt, or --list; `zen client --help` shows how")
    given: Any = choice.given(context.params)
    if timeout is not None:
        given["timeout_s"] = timeout
    if priority is not None:
        given["priority"] = priority
    command.generate(address, access, model, prompt, given, chat=chat, as_json=as_json)


@bench.command("linear", epilog="Example: zen bench linear --rows 1 --rows 14 --json linear.json")
def bench_linear(
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows of x; again for more.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="OxI", help="Outputs x inputs; again for more.")
    ] = None,
    variants: Annotated[
        list[int] | None, typer.Option(min=1, help="Variants among the rows; again for more.")
    ] = None,
    activations: Annotated[
        list[str] | None, typer.Option(help="float32 or bfloat16, else both.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timings; the median counts.")] = 15,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
) -> None:
    """The fused product against the base's, against one call a variant, against unpacking."""
    from server.commands import bench as command

    shapes, dtypes = shape or ["4096x4096"], activations or ["float32", "bfloat16"]
    command.linear(rows or [1, 4, 16], shapes, variants or [1, 14], dtypes, repeats, out)


@bench.command("decode", epilog="Example: zen bench decode --batch 14 --variants 14")
def bench_decode(
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; again for more.")] = None,
    variants: Annotated[
        list[int] | None, typer.Option(min=1, help="Variants among the rows; again for more.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="smollm2-135m, 1b or 8b (random weights), or a store.")
    ] = "smollm2-135m",
    context: Annotated[int, typer.Option(min=1, help="Tokens in each row's cache.")] = 64,
    products: Annotated[
        Products, typer.Option(help="What activations are rounded to at weights.")
    ] = Products.bfloat16,
    repeats: Annotated[int, typer.Option(min=2, help="Steps; the median counts.")] = 30,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
) -> None:
    """A decode step of the base, of one variant and of many mixed, against a step a variant."""
    from server.commands import bench as command

    batches, counts = batch or [1, 8, 14], variants or [1, 14]
    command.decode(batches, counts, model, context, products.value, repeats, out)


@bench.command("peers", epilog="Example: zen bench peers --json peers.json")
def bench_peers(
    store: Annotated[
        Path | None,
        typer.Option(metavar="STORE", help="Whose base all run; else what `make models` made."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where `make peers` installed; else .peers."),
    ] = None,
    context: Annotated[int, typer.Option(min=17, help="Tokens of the long prompt.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are decoded after each.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timings; the median counts.")] = 7,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every system; else one a processor.")
    ] = None,
    products: Annotated[
        Products, typer.Option(help="What our activations are rounded to at weights.")
    ] = Products.bfloat16,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
) -> None:
    """Our base and a 1-bit variant against llama.cpp and transformers, the same weights."""
    from server.commands import bench_peers as command
    from zen_jax.peers.bench import PEERS, STORE, Plan

    given = {} if threads is None else {"threads": threads}
    plan = Plan(long=context, steps=steps, rounds=rounds, products=products.value, **given)
    command.run(store or STORE, peers or PEERS, plan, out)


@bench.command("ttft", epilog="Example: zen bench ttft ./store --requests 300 --json ttft.json")
def bench_ttft(
    store: StorePath,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Variants; else all there are.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 512,
    requests: Annotated[
        int, typer.Option(min=1, help="Of the base, and as many of all variants together.")
    ] = 300,
    cancels: Annotated[int, typer.Option(min=1, help="Streams that are cancelled.")] = 100,
    products: Annotated[
        Products, typer.Option(help="What activations are rounded to at weights.")
    ] = Products.float32,
    rows: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 16,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
) -> None:
    """The time to a variant's first token beside the base's, over gRPC, and to free a row."""
    from server.benchmark_ttft import TtftPlan
    from server.commands import bench_ttft as command

    plan = TtftPlan(prompt_tokens, requests, cancels, products.value, rows)
    command.run(store, models or [], plan, out)


bench.command("cache", epilog=cli_cache.CACHE_EXAMPLE)(cli_cache.bench_cache)
bench.command("access", epilog=cli_bench.ACCESS_EXAMPLE)(cli_bench.bench_access)
bench.command("serve", epilog=cli_bench.SERVE_EXAMPLE)(cli_bench.bench_serve)
bench.command("coldstart", epilog=cli_cache.COLD_EXAMPLE)(cli_cache.bench_coldstart)


@bench.command("kv", epilog="Example: zen bench kv --json docs/kv-cache.json")
def bench_kv(
    store: Annotated[
        Path | None,
        typer.Option(metavar="STORE", help="Whose base is measured; else `make models` made it."),
    ] = None,
    family: Annotated[
        Path | None, typer.Option(help="The demo family's folder, for the quality of its members.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=30, help="Decode steps that are timed.")] = 15,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Figures, and a plot beside it.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A page whose tables are written again.")
    ] = None,
) -> None:
    """Pages against fixed rows, prompts that begin alike, and keys and values in fewer bits."""
    from server.benchmark_kv import KvPlan
    from server.commands import bench_kv as command
    from zen_jax.peers.bench import STORE

    command.run(store or STORE, family, KvPlan(repeats=repeats), out, page)


@app.command(epilog="Example: zen demo --serve")
def demo(
    serve: Annotated[bool, typer.Option("--serve", help="Go on serving afterwards.")] = False,
    keep: Annotated[
        Path | None, typer.Option(metavar="STORE", help="Keep the store here; else temporary.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    family: Annotated[
        Path | None, typer.Option(help="The family's folder; else the repository's.")
    ] = None,
    probes: Annotated[
        int, typer.Option(min=1, help="Unseen inputs that each skill is scored on, at most 32.")
    ] = 32,
    as_json: AsJson = False,
) -> None:
    """Convert the demo family, serve all of it, and show what each model answers."""
    from server.commands import demo as command
    from server.demo import FAMILY

    command.run(
        FAMILY if family is None else family,
        keep=keep,
        port=port,
        probes=probes,
        serve=serve,
        as_json=as_json,
    )


def main() -> None:
    """Runs the command line and exits with its status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs the command line; returns its exit status."""
    # What gRPC's core prints by itself is said again, in one line, by what is raised.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return app(arguments, prog_name="zen", standalone_mode=False) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads any more; the interpreter must not try again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        text = _one_line(error)
        if text is None:
            raise
        if text:
            console.note(f"zen: {text}")
        return 2


def _one_line(error: Exception) -> str | None:
    """What to say of bad input; None for a fault of the program."""
    if hasattr(error, "format_message"):  # the command line's own complaints
        text = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        return f"{text} (--help shows what is expected)" if text else ""  # help was shown
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    from server.client import ZenError

    if isinstance(error, (ValueError, OSError, ZenError)):
        return "; ".join(line.strip() for line in str(error).splitlines())
    return None


if __name__ == "__main__":
    main()
