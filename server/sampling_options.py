"""Options for the choice of tokens, of `zen generate` and `zen client`."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import typer

MaxTokens = Annotated[int | None, typer.Option(help="The most tokens of an answer.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the likeliest.")]
TopK = Annotated[int | None, typer.Option(help="Sample among so many tokens; 0 for all.")]
TopP = Annotated[float | None, typer.Option(help="Sample among this probability.")]
MinP = Annotated[float | None, typer.Option(help="Sample above this share of the likeliest's.")]
Seed = Annotated[int | None, typer.Option(help="The same seed, the same answer.")]
Repetition = Annotated[float | None, typer.Option(help="Above 1: less of what stands there.")]
Presence = Annotated[float | None, typer.Option(help="Above 0: less of what was answered.")]
Frequency = Annotated[float | None, typer.Option(help="The same for each time that it was.")]
Bias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Add to a token's logit; again for more."),
]
MinTokens = Annotated[int | None, typer.Option(help="No stop in the first so many tokens.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End in front of it; again for more.")
]
StopTokens = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", metavar="ID", help="End after it; again for more."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end.")]
Samples = Annotated[int | None, typer.Option("--n", help="Answers to each prompt.")]
Logprobs = Annotated[
    int | None, typer.Option(help="With --json: log-probabilities, and of so many likeliest.")
]
PromptLogprobs = Annotated[int | None, typer.Option(help="The same of the prompt's tokens.")]


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, by the names of the request's fields.

    Args:
      values: what the command line holds, by parameter; others may be among them.

    Raises:
      ValueError: a bias is not ID=BIAS, or log-probabilities would not be printed.
    """
    from zen_jax.sampling import SamplingParams

    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    chosen = {
        k: v for k, v in values.items() if k in fields and v is not None and v != [] and v != ()
    }
    for name in ("logprobs", "prompt_logprobs"):
        if name in chosen and not values["as_json"]:
            raise ValueError(f"--{name.replace('_', '-')} is printed with --json only; add it")
    if "logit_bias" in chosen:
        chosen["logit_bias"] = dict(map(_bias, chosen["logit_bias"]))
    return {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()}


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"--logit-bias is {text!r}; expected ID=BIAS, such as 42=-3.5") from None
