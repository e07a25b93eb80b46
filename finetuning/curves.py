"""The loss of a training as a picture. matplotlib is imported here only: not for the flow's process."""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = (("loss", "training", "-"), ("eval_loss", "held out", "o-"))
LEVEL_STYLES = ("--", ":", "-.")


def draw(log_history: list[dict[str, Any]], path: Path) -> None:
    path.write_bytes(png(log_history))


def png(log_history: list[dict[str, Any]], levels: dict[str, float] | None = None) -> bytes:
    """Losses by optimizer step as the Trainer logged them, and `levels` of other models as horizontal lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for metric, label, style in LOSSES:
        points = [(entry["step"], entry[metric]) for entry in log_history if metric in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    for (label, level), style in zip((levels or {}).items(), LEVEL_STYLES, strict=False):
        axes.axhline(level, color="0.4", linestyle=style, linewidth=1.2, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return _small(figure)


def _small(figure: "Figure") -> bytes:
    """As a PNG of 64 colours, which take a third of the room that those of smooth lines do."""
    from PIL import Image

    file, small = io.BytesIO(), io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    Image.open(file).convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()


def data_uri(picture: bytes) -> str:
    """The picture itself as an address, for a page or an artifact that has no file beside it."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
