"""A picture of a distillation: what each layer's fit left, and the curve of training."""

from pathlib import Path

from zen_jax.distillation import Distilled


def draw(done: Distilled, path: Path) -> None:
    """Draws it.

    Args:
      done: what a distillation came to.
      path: of the PNG.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for when in ("before", "after"):
        for kind, style in (("fit", "-"), ("train", "--")):
            points = [layer[f"{kind}_{when}"] for layer in done.layers if f"{kind}_{when}" in layer]
            if points and any(points):
                left.plot(points, style, marker=".", label=f"{kind}, {when}")
    left.set(title="error of a layer", xlabel="layer", yscale="log")
    if left.lines:
        left.legend(fontsize=7, frameon=False)
    steps = [step for step, _, _ in done.curve]
    losses = [(step, loss) for step, loss, _ in done.curve if loss is not None]
    if losses:
        right.plot(*zip(*losses, strict=True), marker=".", label="loss on logits")
    if steps:
        right.plot(steps, [kl for _, _, kl in done.curve], marker=".", label="held-out KL")
    for value, label in ((done.before, "KL before"), (done.after, "KL at the end")):
        right.axhline(value, linewidth=0.8, linestyle=":", label=f"{label}: {value:.4g}")
    right.set(title="training", xlabel="step")
    right.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{done.name}, distilled from version {done.began}")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
