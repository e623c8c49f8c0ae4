"""Shows the result of a tuning as a table for a terminal and as a picture."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxembed.errors import ConfigError, counted
from jaxembed.platform.files import check_output
from jaxembed.tools.tune.tuning import GridResult, Tuning

# By label: the figure that a row of the table shows. Trailing spaces make equal labels differ.
ROWS: dict[str, Callable[[GridResult], float]] = {
    "buckets": lambda side: len(side.grid.buckets),
    "tokens of the largest": lambda side: side.describe()["max_batch_tokens"],
    "ms of the slowest": lambda side: side.describe()["slowest_ms"],
    "compile s, cold": lambda side: side.describe()["compile_s"],
    "compile s to be ready": lambda side: side.describe()["covering_compile_s"],
    "temporary MB": lambda side: side.describe()["temporary_mb"],
    "full load: tokens/s": lambda side: side.measured.full_tokens_per_s,
    "  predicted": lambda side: side.predicted.full_tokens_per_s,
    "full load: fill": lambda side: side.measured.full_fill,
    "4, 16, 64 texts: ms": lambda side: side.measured.request_ms,
    "  predicted ": lambda side: side.predicted.request_ms,
    "lone text: p50 ms": lambda side: side.measured.lone_p50_ms,
    "lone text: p95 ms": lambda side: side.measured.lone_p95_ms,
    "  predicted  ": lambda side: side.predicted.lone_p95_ms,
}
PICTURES = (".png", ".svg")
LOADS = ("full load", "requests of 4, 16, 64 texts", "lone texts")


def table(tuning: Tuning) -> str:
    """Return the result of a tuning as text.

    The text has the model and the input lengths; a table of the figures of both grids; for each
    load the time with the new grid divided by the time with the old one, as median and range of the
    rounds; a warning if the machine was busy; and the buckets of both grids.
    """
    about = tuning.lengths.describe()
    plan = tuning.model.plan
    lines = [
        f"{tuning.model.name}, {plan.dtype}, {plan.device_name}, "
        f"inputs up to {plan.max_input_tokens} tokens",
        f"{counted(about['inputs'], 'input')} of {about['source']}: mean {about['mean']} tokens, "
        f"p50 {about['p50']}, p95 {about['p95']}, longest {about['longest']}",
        "",
        f"{'':24}{'before':>10}{'after':>10}",
    ]
    for name, figure in ROWS.items():
        cells = (_cell(figure(side)) for side in (tuning.before, tuning.after))
        lines.append(f"{name:24}" + "".join(f"{cell:>10}" for cell in cells))
    lines += ["", "Time after / before, median and range of the rounds:"]
    for load, ratios in zip(LOADS, tuning.comparison.by_round.T, strict=True):
        figures = f"{np.median(ratios):.3f}  ({ratios.min():.3f} to {ratios.max():.3f})"
        lines.append(f"  {load:28} {figures}")
    if tuning.is_noisy:
        lines.append(
            "The speed of the current grid varied between rounds: tune again on an idle machine."
        )
    lines.append("")
    for name, side in (("before", tuning.before), ("after", tuning.after)):
        ordered = sorted(side.grid.buckets, key=lambda bucket: (bucket.length, bucket.rows))
        lines.append(f"{name}: {' '.join(map(str, ordered))}")
    return "\n".join(lines)


def _cell(value: int | float) -> str:
    """Format a figure: integers in full, floats below 1000 with three significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def check_picture(path: Path) -> None:
    """Raise ConfigError if `draw` cannot write a picture to this path.

    The suffix must be one of PICTURES, the folder must exist, and matplotlib must be installed.
    """
    check_output(path, "--picture", PICTURES)
    try:
        import matplotlib  # noqa: F401  only pictures need it
    except ImportError as error:
        raise ConfigError("--picture needs matplotlib: pip install matplotlib") from error


def draw(tuning: Tuning, path: Path) -> None:
    """Plot the input lengths, and the buckets of both grids with their time per token.

    The suffix of `path` chooses the format. Needs matplotlib. Raises ConfigError if the file cannot
    be written.
    """
    from matplotlib.figure import Figure as Canvas  # only pictures need it

    figure = Canvas(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=[1, 2])
    lengths = tuning.lengths
    top.bar(lengths.present, lengths.counts[lengths.present] / lengths.total, width=1.0)
    top.set_ylabel("share of inputs")
    top.set_title(f"{tuning.model.name}, {lengths.source}, {tuning.model.plan.device_name}")
    sides = (tuning.before, tuning.after)
    costs = [side.costs[b].ms / b.tokens for side in sides for b in side.grid.buckets]
    cheapest = float(np.log10(1000 * min(costs)))
    for name, side, mark, size in (
        ("before", tuning.before, "o", 110),
        ("after", tuning.after, "D", 45),
    ):
        buckets = side.grid.buckets
        costs = [1000 * side.costs[b].ms / b.tokens for b in buckets]
        points = bottom.scatter(
            [b.length for b in buckets],
            [b.tokens for b in buckets],
            c=np.log10(costs),
            vmin=cheapest,
            vmax=cheapest + 1,
            marker=mark,
            s=size,
            cmap="viridis_r",
            edgecolors="black" if name == "after" else "none",
            alpha=1.0 if name == "after" else 0.45,
            label=f"{name}: {counted(len(buckets), 'bucket')}",
        )
    bottom.set_xscale("log", base=2)
    bottom.set_yscale("log", base=2)
    bottom.set_xlabel("tokens of a row")
    bottom.set_ylabel("tokens of a bucket")
    bottom.legend()
    figure.colorbar(points, ax=bottom, label="log10 of microseconds a token")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write --picture {path}: {error.strerror}") from error
