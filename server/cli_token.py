"""`zen token`: who is let in to a server."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from server import console
from server.auth import Right, new_token, read_raw, revoke_token
from server.cli_types import AsJson
from server.router import can_be_name

token = typer.Typer(help="Make, list and revoke the tokens of a server.", no_args_is_help=True)

# A hundred years.
# A minute.
_LEAST_DAYS = 1 / 1440
_MOST_DAYS = 36_500.0

TokenFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The file that `zen serve --tokens` reads.")
]


@token.command("new", epilog="Example: zen token new tokens.json --tenant acme --model zen4-math")
def new(
    file: TokenFile,
    tenant: Annotated[str, typer.Option(help="Whose it is: tenants share no pages and no quota.")],
    model: Annotated[
        list[str] | None, typer.Option(help="What it may ask for, or base; else all. Repeatable.")
    ] = None,
    right: Annotated[
        list[Right] | None, typer.Option(help="What it may do; else generate and list.")
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(min=_LEAST_DAYS, max=_MOST_DAYS, help="Until it expires; else never."),
    ] = None,
    most_requests: Annotated[int | None, typer.Option(min=1, help="At a time.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Of prompts and answers.")
    ] = None,
) -> None:
    """Add a token and print it: it is shown this once, the file holds its hash alone."""
    if not tenant:
        raise ValueError("--tenant is empty; give the name of whoever has the token")
    wrong = [name for name in model or () if not can_be_name(name)]
    if wrong:
        raise ValueError(f"--model is {wrong[0]!r}; no model can be called so")
    rights = right or [Right.generate, Right.list]
    made = new_token(
        file,
        tenant=tenant,
        models=model or None,
        rights=rights,
        days=days,
        most_requests=most_requests,
        tokens_per_minute=tokens_per_minute,
    )
    console.say(made)


@token.command("ls", epilog="Example: zen token ls tokens.json")
def list_tokens(file: TokenFile, as_json: AsJson = False) -> None:
    """List a file's tokens by their ids."""
    shown = [{k: v for k, v in item.items() if k != "sha256"} for item in read_raw(file)]
    if as_json:
        console.print_json(shown)
        return
    for item in shown:
        console.say(_line(item))


@token.command("revoke", epilog="Example: zen token revoke tokens.json 1f0c2a9be417")
def revoke(
    file: TokenFile,
    key: Annotated[str, typer.Argument(metavar="ID", help="The 12 digits after zen_.")],
) -> None:
    """Take a token out; a server that runs refuses it within a second."""
    revoke_token(file, key)


def _line(item: dict[str, Any]) -> str:
    models = "all models" if item.get("models", "*") == "*" else ", ".join(item["models"])
    parts = [item["id"], item.get("tenant") or "no tenant", models]
    parts.append(" ".join(item.get("rights", [])))
    if "expires" in item:
        over = datetime.fromisoformat(item["expires"]) <= datetime.now(UTC)
        parts.append(f"expired {item['expires']}" if over else f"until {item['expires']}")
    for name, text in (("most_requests", "requests"), ("tokens_per_minute", "tokens a minute")):
        if name in item:
            parts.append(f"{item[name]} {text}")
    return "  ".join(parts)
