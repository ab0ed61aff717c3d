"""Plots of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recommender.files import write_whole

__all__ = ["plot_curves"]

SMOOTHING = 0.05  # the part of the run that one point of the smooth curve averages over


def plot_curves(
    path: Path,
    losses: list[float],
    validation: Mapping[int, Mapping[str, float]],
    baselines: Mapping[str, Mapping[str, float]],
    labels: Mapping[str, str],
    loss_label: str,
    metrics_title: str = "Validation",
) -> None:
    """Draws the loss of each step, and the validation metrics next to those of the baselines.

    Args:
        path: the path of the PNG, replaced as a whole.
        losses: the losses of each step, from the first.
        validation: metrics by step.
        baselines: validation metrics of each baseline, by its name.
        labels: the labels of the metrics to draw, by their names.
        loss_label: the label of the loss axis.
        metrics_title: the title of the metrics.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss_axes, metric_axes = figure.subplots(1, 2)
    steps = np.arange(1, len(losses) + 1)
    loss_axes.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8, label="each step")
    window = max(1, round(SMOOTHING * len(losses)))
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    loss_axes.plot(steps[window - 1 :], smooth, color="C0", label=f"mean of {window} steps")
    loss_axes.set(title="Training loss", xlabel="step", ylabel=loss_label)
    loss_axes.legend(frameon=False)

    for color, (name, label) in enumerate(labels.items()):
        values = [metrics[name] for metrics in validation.values()]
        metric_axes.plot(list(validation), values, f"C{color}.-", label=label)
        for style, (baseline, metrics) in zip(("--", ":"), baselines.items(), strict=False):
            metric_axes.axhline(
                metrics[name],
                color=f"C{color}",
                linestyle=style,
                linewidth=1,
                label=f"{label}, {baseline}",
            )
    metric_axes.set(title=metrics_title, xlabel="step")
    metric_axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (loss_axes, metric_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))
