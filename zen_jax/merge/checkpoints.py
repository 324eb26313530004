"""Whole checkpoints merged from disk to disk: one tensor of one checkpoint at a time, resumable.

Work lies in a folder of its own beside the result, under a name that is made from the inputs and
the options: a command that is run again goes on where it was, and another one never touches it.
The result gets its name by one rename, when all of it is on disk. Inputs are only ever read.
"""

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from zen_jax.checkpoint.journal import Journal
from zen_jax.checkpoint.manifest import BASE, check_name
from zen_jax.checkpoint.plan import Meter, work_key
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Progress, Store
from zen_jax.convert import convert_base, convert_variant
from zen_jax.merge.draft import SHARD_BYTES, Draft
from zen_jax.merge.pairing import Item, Pairing, Policies, pair
from zen_jax.merge.tensors import Job, TensorReport, Unusable, merge_tensor, values_of
from zen_jax.pairs import check_architecture

Form = Literal["safetensors", "store"]
REPORT = "merge.json"
# Counts up when work of an older version of this code must not be gone on with.
_WORK_VERSION = 1
_TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a merged model goes.

    Attributes:
      out: a folder that is not there yet, or is empty.
      form: a Hugging Face folder with "safetensors", or a new "store" with it as base.
      publish: (store, name) to make it a variant of, besides.
      shard_bytes: of a file of safetensors.
    """

    out: Path
    form: Form = "safetensors"
    publish: tuple[Path, str] | None = None
    shard_bytes: int = SHARD_BYTES

    @property
    def report(self) -> Path:
        """Where the report lies in the end: in a folder, beside a store."""
        if self.form == "store":
            return self.out.with_name(f"{self.out.name}.{REPORT}")
        return self.out / REPORT


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a merge made.

    Attributes:
      out: where it is.
      report: the contents of merge.json.
      path: of merge.json.
      resumed: tensors that an earlier run had done.
      already: whether all of it was there before.
    """

    out: Path
    report: Mapping[str, Any]
    path: Path
    resumed: int = 0
    already: bool = False


def merge_checkpoints(
    job: Job, policies: Policies, target: Target, progress: Progress | None = None
) -> Outcome:
    """Merges checkpoints into a new one.

    Args:
      job: what is merged, and how.
      policies: for what does not match.
      target: where it goes.
      progress: called after each tensor with its name, bytes read and bytes in all.

    Raises:
      ValueError: the checkpoints cannot be merged, or the target is taken; everything that is wrong
        is named. `SourceError`, `Corrupt`, `NameRefused` and `NotAStore` are of this kind.
      OSError: there is no room, or the disk failed. What was done is gone on with.
    """
    began = time.perf_counter()
    _check_models(job)
    pairing = pair(job.base, job.models, policies)
    key = _key(job, policies, target)
    found = _already(target, key)
    if found is not None:
        return found
    _check_publish(job, target)
    target.out.parent.mkdir(parents=True, exist_ok=True)
    work = target.out.with_name(f".{target.out.name}.merge-{key[:16]}")
    with _held(work):
        layout = {name: (job.code(i), i.shape) for name, i in pairing.items.items()}
        draft = Draft(work / target.out.name, layout, target.shard_bytes)
        journal = Journal(work / "done.jsonl")
        tensors, resumed = _merge_all(job, pairing, draft, journal, progress)
        report = {
            "key": key,
            **_about(job, policies, pairing),
            "seconds": round(time.perf_counter() - began, 2),
            "tensors": tensors,
        }
        report["notes"] += _unmoved(job, tensors)
        _put(report, job, pairing, draft, journal, target)
        shutil.rmtree(work)
    _sweep(target.out)
    return Outcome(target.out, report, target.report, resumed)


# ---- before anything is written


def _check_models(job: Job) -> None:
    if not job.models:
        raise ValueError("there is nothing to merge; give at least one checkpoint with --model")
    if job.method.single and len(job.models) > 1:
        raise ValueError(
            f"{job.method.name} cleans one checkpoint; {len(job.models)} were given. Merge them by "
            "another method first, or clean each by itself"
        )
    seen: dict[tuple[Path, ...], str] = {}
    for model in job.models:
        files = tuple(file.resolve() for file in model.files)
        if files in seen:
            raise ValueError(
                f"{model.name} is given twice, and would count twice; give it once"
                + (f" (the other time as {seen[files]})" if seen[files] != model.name else "")
            )
        seen[files] = model.name


def _key(job: Job, policies: Policies, target: Target) -> str:
    """What an interrupted merge is found again by: all that decides what is written."""
    options = {
        "version": _WORK_VERSION,
        "method": job.method.name,
        **_options(job),
        **dataclasses.asdict(policies),
        "dtype": job.dtype,
        "form": target.form,
        "shard_bytes": target.shard_bytes,
        "publish": [str(p) for p in target.publish or ()],
    }
    keys = [work_key(source, "", options) for source in (job.base, *job.models)]
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def _options(job: Job) -> dict[str, Any]:
    method = job.method
    return dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {}  # pyright: ignore


def _already(target: Target, key: str) -> Outcome | None:
    """The outcome of this very merge if it is there, None if the place is free.

    Raises:
      ValueError: something else is there.
    """
    out = target.out
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return None
    if target.form == "store" and out.is_dir() and not (out / BASE).exists():
        Store(out, create=True)  # raises if it holds other things
        return None
    report: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        report = json.loads(target.report.read_bytes())
    if isinstance(report, dict) and report.get("key") == key:
        return Outcome(out, report, target.report, already=True)
    work = out.with_name(f".{out.name}.merge-{key[:16]}")
    if target.form == "store" and _noted(Journal(work / "done.jsonl"), "storing"):
        return None
    raise ValueError(f"{out} exists and is not the result of this merge; choose another place")


def _check_publish(job: Job, target: Target) -> None:
    if target.publish is None:
        return
    path, name = target.publish
    check_name(name)
    store = Store(path)
    check_architecture(job.base, store.base())


@contextlib.contextmanager
def _held(work: Path) -> Iterator[None]:
    """Holds a folder of work for as long as this process merges.

    Raises:
      ValueError: another process has it.
    """
    work.mkdir(exist_ok=True)
    handle = os.open(work / "alive", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is at this very merge, in {work}") from None
        yield
    finally:
        os.close(handle)


def _sweep(out: Path) -> None:
    """Removes what other merges left that were to get this place, which is taken now."""
    for work in out.parent.glob(f".{glob.escape(out.name)}.merge-*"):
        with contextlib.suppress(ValueError, OSError), _held(work):
            shutil.rmtree(work)


# ---- the tensors


def _merge_all(
    job: Job, pairing: Pairing, draft: Draft, journal: Journal, progress: Progress | None
) -> tuple[dict[str, TensorReport], int]:
    """Merges what is not done yet; reports by tensor, and how many were done before.

    Raises:
      SourceError: values are not finite; all are named, and what was merged stays.
    """
    records = [record for record in journal.read() if "tensor" in record or "note" in record]
    journal.start(records)  # a torn line would hide those that come after it
    done = {record["tensor"]: record for record in records if "tensor" in record}
    reports: dict[str, TensorReport] = {}
    problems: list[str] = []
    resumed, shapes = 0, set[tuple[int, ...]]()
    meter = Meter(progress, sum(_bytes(job, item) for item in pairing.items.values()))
    for name, item in pairing.items.items():
        before = done.get(name)
        if problems:
            problems += values_of(job, item)
        elif before is not None and draft.checksum(name) == before["xxh3"]:
            reports[name] = before["report"]
            resumed += 1
        else:
            try:
                first = job.time_svd and len(item.shape) == 2 and item.shape not in shapes
                merged, reports[name] = merge_tensor(job, item, first)
                shapes.add(item.shape)
                record = {"tensor": name, "xxh3": draft.put(name, merged), "report": reports[name]}
                journal.append(record)
            except Unusable as error:
                # The sources' other tensors are still looked at, so that all is said at once.
                problems += values_of(job, item) or error.problems
        meter.advance(name, _bytes(job, item))
    if problems:
        raise SourceError("these checkpoints cannot be merged", problems)
    return reports, resumed


def _bytes(job: Job, item: Item) -> int:
    """Bytes that are read for a tensor."""
    sources = zip((job.base, *job.models), (item.base, *item.models), strict=True)
    return sum(source.tensors[name].size for source, name in sources if name is not None)


# ---- what is left to do once all are merged


def _put(
    report: dict[str, Any],
    job: Job,
    pairing: Pairing,
    draft: Draft,
    journal: Journal,
    target: Target,
) -> None:
    """Completes the folder, publishes it if that is asked for, and gives it its name."""
    draft.finish(_files(job, pairing))
    if target.publish is not None:
        report["published"] = _publish(draft.folder, journal, *target.publish)
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    if target.form == "safetensors":
        (draft.folder / REPORT).write_text(text, encoding="utf-8")
        os.rename(draft.folder, target.out)
        return
    if not _noted(journal, "storing"):
        journal.append({"note": "storing"})
    if not (target.out / BASE).exists():
        convert_base(draft.folder, target.out)
    target.report.write_text(text, encoding="utf-8")


def _noted(journal: Journal, note: str) -> dict[str, Any] | None:
    return next((record for record in journal.read() if record.get("note") == note), None)


def _publish(folder: Path, journal: Journal, path: Path, name: str) -> dict[str, Any]:
    """Makes a folder the next version of a variant, once, however often it is interrupted."""
    store = Store(path)
    before = _noted(journal, "publishing")
    if before is None:
        before = {"note": "publishing", "versions": store.versions(name)}
        journal.append(before)
    for version in store.versions(name):
        if version not in before["versions"]:
            manifest = store.manifest(store.variant(name, version))
            if manifest.made.get("source") == folder.name:
                return {"store": str(path), "name": name, "version": version}
    summary = convert_variant(folder, path, name)
    return {"store": str(path), "name": name, "version": summary.version}


def _files(job: Job, pairing: Pairing) -> dict[str, bytes]:
    """Configuration and tokenizer: of the one checkpoint there is, of the one with the largest
    vocabulary if that was taken over, else of the base."""
    owner = job.base
    if pairing.widest is not None:
        owner = job.models[pairing.widest]
    elif len(job.models) == 1 and job.models[0].config.vocab_size == pairing.config.vocab_size:
        owner = job.models[0]
    files = owner.tokenizer_files()
    if "tokenizer.json" not in files:
        files = job.base.tokenizer_files() | files
    settings = json.loads(files.get("config.json", b"{}"))
    codes = {job.code(item) for item in pairing.items.values()}
    dtype = _TORCH[codes.pop()] if len(codes) == 1 else "float32"
    settings |= pairing.config.to_hf()
    settings["dtype" if "dtype" in settings else "torch_dtype"] = dtype
    return files | {"config.json": json.dumps(settings, indent=2).encode() + b"\n"}


def _about(job: Job, policies: Policies, pairing: Pairing) -> dict[str, Any]:
    return {
        "method": job.method.name,
        "options": _options(job),
        "policies": dataclasses.asdict(policies),
        "base": job.base.name,
        "models": [model.name for model in job.models],
        "notes": [*pairing.notes, *_notes(job)],
    }


def _unmoved(job: Job, tensors: Mapping[str, TensorReport]) -> Sequence[str]:
    """A line for each checkpoint that is the base itself."""
    lines = []
    for i, model in enumerate(job.models):
        moved = [tensor["models"][i].get("delta_over_base", 1) for tensor in tensors.values()]
        if not any(moved):
            lines.append(f"{model.name} does not differ from the base anywhere")
    return lines


def _notes(job: Job) -> Sequence[str]:
    """What a user may not expect, one line each."""
    codings = {source.coding for source in job.models}
    if len(codings) > 1:
        return [f"checkpoints are coded differently: {', '.join(sorted(codings))}"]
    return []
