"""`zen convert`, `zen verify` and `zen ls`: a store is filled, checked and listed."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from zen_jax.checkpoint.manifest import Corrupt, Manifest
from zen_jax.checkpoint.store import Store
from zen_jax.convert import EmbedPolicy, Summary, convert_base, convert_variant
from zen_jax.convert_lora import convert_lora, export_lora


def base(src: Path, store: Path, *, shards: int, as_json: bool) -> None:
    """Makes a store of a base model."""
    with console.progress_bar("base") as report:
        summary = convert_base(src, store, shards=shards, progress=report)
    _print_summary(summary, as_json)


def variant(
    src: Path,
    store: Path,
    name: str,
    *,
    scale: Literal["row", "matrix"],
    levels: int,
    embed: EmbedPolicy,
    force: bool,
    as_json: bool,
) -> None:
    """Adds a fine-tune to a store."""
    with console.progress_bar(name) as report:
        summary = convert_variant(
            src,
            store,
            name,
            scale=scale,
            levels=levels,
            embed=embed,
            force=force,
            progress=report,
        )
    _print_summary(summary, as_json)


def lora(src: Path, store: Path, name: str, *, as_json: bool) -> None:
    """Adds a LoRA adapter to a store."""
    with console.progress_bar(name) as report:
        summary = convert_lora(src, store, name, progress=report)
    _print_summary(summary, as_json)


def peft(path: Path, name: str, out: Path) -> None:
    """Writes an adapter of a store as a PEFT folder."""
    store = Store(path)
    export_lora(store, store.variant(name), out)
    console.say(f"{name} is in {out}")


def verify(path: Path, *, as_json: bool) -> bool:
    """Checks every file of a store; returns whether all are whole."""
    store = Store(path)
    with console.progress_bar("verify") as report:
        findings = store.verify(progress=report)
    if as_json:
        found = [dataclasses.asdict(finding) for finding in findings]
        console.print_json({"damaged": bool(findings), "findings": found})
        return not findings
    for finding in findings:
        console.say(str(finding))
    if not findings:
        versions = sum(len(store.versions(name)) for name in store.names())
        console.say(f"whole: base; variants: {len(store.names())}; versions of them: {versions}")
    return not findings


def ls(path: Path, *, as_json: bool) -> None:
    """Lists a store: every version, its bytes, and its share of a full copy in bfloat16."""
    store = Store(path)
    rows = [_row(store.base())]
    for name in store.names():
        for version in store.versions(name):
            try:
                rows.append(_row(store.manifest(store.variant(name, version))))
            except Corrupt as error:
                rows.append({"name": name, "version": version, "damaged": str(error)})
    if as_json:
        console.print_json({"base": rows[0], "variants": rows[1:]})
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("name")
    for title in ("version", "bytes", "of a full copy"):
        table.add_column(title, justify="right")
    table.add_column("digest")
    for row in rows:
        if "damaged" in row:
            table.add_row(row["name"], str(row["version"]), "damaged", "", row["damaged"])
            continue
        version = str(row["version"] or "")
        bytes_, ratio = f"{row['bytes']:,}", f"{row['ratio']:.4f}"
        table.add_row(row["name"], version, bytes_, ratio, row["digest"][:12])
    console.stdout().print(table)


def _row(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "version": manifest.version,
        "bytes": manifest.bytes_on_disk,
        "full_copy_bytes": manifest.full_copy_bytes,
        "ratio": round(manifest.ratio, 6),
        "digest": manifest.digest,
    }


def _print_summary(summary: Summary, as_json: bool) -> None:
    if as_json:
        console.print_json(dataclasses.asdict(summary))
    else:
        console.say(str(summary))
