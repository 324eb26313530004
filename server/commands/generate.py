"""`zen generate`: answers prompts from a store in this process, without a server."""

import dataclasses
from pathlib import Path

import zen_jax
from server import console
from zen_jax.sampling import SamplingParams


def run(
    store: Path,
    model: str,
    prompts: list[str],
    sampling: SamplingParams,
    *,
    chat: bool,
    as_json: bool,
) -> None:
    """Prints every prompt's answer, in order, all of them decoded in one batch.

    Raises:
      ValueError: the store, the model, a prompt or a setting will not do.
    """
    sampling.validate()
    with console.progress_bar("generate") as report:
        report("reading the base", 0, 2)
        family = zen_jax.load(store)
        member = family[model]
        report("compiling and answering", 1, 2)
        answers = member.samples(prompts, sampling, chat=chat)
    if as_json:
        console.print_json(
            [
                {"model": model, "prompt": prompt, "sample": i, **dataclasses.asdict(answer)}
                for prompt, samples in zip(prompts, answers, strict=True)
                for i, answer in enumerate(samples)
            ]
        )
        return
    for samples in answers:
        for answer in samples:
            console.show(answer.text)
