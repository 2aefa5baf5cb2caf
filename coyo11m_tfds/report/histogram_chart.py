"""A histogram as HTML: SVG bars that stretch to any width, between labels that keep their size.

    axis = Axis(start=0, end=64, step=16)
    chart = render([5, 9, 2, 1], axis, line=21, band=(4, 47), unit='bytes', things='captions')

How the classes `chart` and `ticks` look is up to the page's style sheet.
"""

import dataclasses
import html
from collections.abc import Sequence

_HEIGHT = 100  # of the drawing, which is stretched to that of the element
_GAP = 0.1  # between bars, of their width
_MOST_TICKS = 7  # fit on a phone


@dataclasses.dataclass(frozen=True)
class Axis:
    """The horizontal axis, cut into bins of equal width.

    Attributes:
        start: where the first bin begins.
        end: where the last bin ends.
        step: width of a bin.
    """

    start: int
    end: int
    step: int

    def place(self, value: float) -> float:
        """Where a value lies, in bins from the start; what is outside goes to the nearest end."""
        return (min(max(value, self.start), self.end) - self.start) / self.step

    def percent(self, value: float) -> float:
        """Where a value lies, in percent of the width."""
        return 100 * self.place(value) / self.place(self.end)

    def ticks(self) -> list[int]:
        """A few round values between start and end."""
        length = self.end - self.start
        steps = (factor * 10**power for power in range(18) for factor in (1, 2, 5))
        step = next(step for step in steps if length / step < _MOST_TICKS)
        return list(range(-(-self.start // step) * step, self.end + 1, step))


def render(
    counts: Sequence[int],
    axis: Axis,
    *,
    line: float,
    band: tuple[float, float],
    unit: str,
    things: str,
) -> str:
    """Draws a histogram.

    Args:
        counts: one a bin of the axis.
        axis: the axis.
        line: value at which a line is drawn.
        band: values between which the background is shaded.
        unit: of the values; '' for none.
        things: what is counted, in the plural.

    Returns:
        HTML.
    """
    low, high = (axis.place(value) for value in band)
    shapes = [
        f'<rect class="band" x="{low:.3f}" y="0" width="{high - low:.3f}" height="{_HEIGHT}"/>',
        *_bars(counts, axis, unit, things),
        f'<line x1="{axis.place(line):.3f}" x2="{axis.place(line):.3f}" y1="0" y2="{_HEIGHT}"/>',
    ]
    ticks = ''.join(_tick(axis, value) for value in axis.ticks())
    return (
        f'<div class="chart"><p>{max(counts):,} {html.escape(things)}</p>'
        f'<svg viewBox="0 0 {len(counts)} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Histogram of {html.escape(things)}">{"".join(shapes)}</svg>'
        f'<div class="ticks">{ticks}</div></div>'
    )


def _bars(counts: Sequence[int], axis: Axis, unit: str, things: str) -> list[str]:
    scale = _HEIGHT / max(*counts, 1)
    bars = []
    for number, count in enumerate(counts):
        if count:
            start = axis.start + number * axis.step
            range_ = f'{_minus(start)} to {_minus(start + axis.step)} {unit}'.strip()
            height = count * scale
            bars.append(
                f'<rect x="{number + _GAP / 2:.2f}" y="{_HEIGHT - height:.2f}" '
                f'width="{1 - _GAP:.2f}" height="{height:.2f}">'
                f'<title>{html.escape(f"{range_}: {count:,} {things}")}</title></rect>'
            )
    return bars


def _tick(axis: Axis, value: int) -> str:
    """A label centred below its value, but not beyond the ends of the axis."""
    percent = axis.percent(value)
    shift = 0 if percent < 2 else 100 if percent > 98 else 50
    style = f'left:{percent:.2f}%;transform:translateX(-{shift}%)'
    return f'<span style="{style}">{_minus(value)}</span>'


def _minus(value: int) -> str:
    return f'{value:,}'.replace('-', '\u2212')
