"""`zen client`: asks a server that runs."""

from typing import Any

import stamina.instrumentation
from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from server.client import Generation, RequestOptions, ZenClient
from server.client_access import Access
from zen.v1 import generate_pb2, variants_pb2


def generate(
    address: str,
    access: Access,
    model: str,
    prompt: str,
    options: RequestOptions,
    *,
    chat: bool,
    as_json: bool,
) -> None:
    """Prints an answer as it comes, and below it how it ended; of several samples each when all
    have ended."""
    stamina.instrumentation.set_on_retry_hooks([])  # how often it asked is nothing to show
    text: str | None = prompt
    if chat:
        options["messages"] = [{"role": "user", "content": prompt}]
        text = None
    several = options.get("n", 1) > 1
    with (
        ZenClient(address, access=access) as client,
        client.stream(model, text, **options) as stream,
    ):
        for piece in stream:
            if not as_json and not several:
                console.show(piece, end="")
        answers = stream.samples
    if as_json:
        answer = _as_dict(answers[0])
        console.print_json([_as_dict(each) for each in answers] if several else answer)
        return
    for answer in answers:
        console.show(answer.text if several else "")
        console.note(_summary(answer.completion))


def list_variants(address: str, access: Access, *, as_json: bool) -> None:
    """Prints the server's variants and where they are."""
    with ZenClient(address, access=access) as client:
        answer = client.list_variants()
    if as_json:
        console.print_json(MessageToDict(answer, preserving_proto_field_name=True))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("name", "version", "state", "slot", "pinned", "in use", "waiting", "bytes"):
        table.add_column(title)
    for variant in answer.variants:
        state = variants_pb2.VariantState.Name(variant.state).removeprefix("VARIANT_STATE_")
        table.add_row(
            variant.name,
            str(variant.version),
            state.lower(),
            str(variant.slot) if variant.HasField("slot") else "",
            "yes" if variant.pinned else "",
            str(variant.leases),
            str(variant.waiting),
            f"{variant.bytes:,}",
        )
    console.stdout().print(table)
    console.say(
        f"{answer.slots} slots; {answer.rows_active} of {answer.rows} rows run; "
        "the base answers to the name base"
    )


def _summary(completion: generate_pb2.Completion) -> str:
    model, timings = completion.model, completion.timings
    name = f"{model.name} version {model.version}" if model.version else model.name
    if model.merged_of:
        others = ", ".join(n for n in model.merged_of if n != model.name)
        name = f"{model.name} by member {model.digest[:12]}" + (f" with {others}" if others else "")
    reason = generate_pb2.FinishReason.Name(completion.finish_reason)
    return (
        f"[{name}: {completion.usage.completion_tokens} tokens, "
        f"{reason.removeprefix('FINISH_REASON_').lower()}, seed {completion.seed}, "
        f"first token after {1000 * timings.first_token_seconds:.0f} ms]"
    )


def _as_dict(generation: Generation) -> dict[str, Any]:
    completion = MessageToDict(
        generation.completion,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    answer = {"text": generation.text, "token_ids": generation.token_ids, "completion": completion}
    for name in ("logprobs", "prompt_logprobs"):
        entries = getattr(generation, name)
        if entries:
            answer[name] = [MessageToDict(e, preserving_proto_field_name=True) for e in entries]
    return answer
