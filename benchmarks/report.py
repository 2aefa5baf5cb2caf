"""Output of the benchmarks: Markdown tables, and pictures in one style.

    report.markdown_table(['reader', 'samples/s'], [['ours', '90,000']])
    page = report.Page(760, 440, label='Samples per second')
    page.svg([page.title('How fast'), report.text('ours', 24, 60, 'ours')])

A picture is an SVG file of a few kilobytes whose colours follow the reader's choice of light or
dark; it needs no font and no program but a browser.
"""

import dataclasses
import html
from collections.abc import Iterable, Sequence

# Colours follow the reader's choice of light or dark; the page around the picture may not.
_STYLE = """
svg { --page: #ffffff; --text: #1d2127; --faint: #646d7a; --line: #e2e3e1; --ours: #4a6fd8;
  --best: #d0452b; font: 14px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --page: #14161a; --text: #e6e8eb; --faint: #98a0ae; --line: #31353d; --ours: #7b9cf4;
    --best: #ff8b6b; }
}
.page { fill: var(--page); } text { fill: var(--faint); }
.title { fill: var(--text); font-size: 19px; font-weight: 600; }
line { stroke: var(--line); } .mark { stroke: var(--faint); stroke-dasharray: 3 4; }
path { fill: none; stroke-width: 3; stroke-linejoin: round; }
.ours { stroke: var(--ours); } text.ours { fill: var(--ours); stroke: none; font-weight: 600; }
.best { stroke: var(--best); } text.best { fill: var(--best); stroke: none; font-weight: 600; }
rect.bar { fill: var(--faint); opacity: 0.55; } rect.ours { fill: var(--ours); stroke: none; }
rect.best { fill: var(--best); stroke: none; }
"""


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns rows as Markdown; the first column holds names, the others figures."""
    lines = [columns, ['---', *['---:'] * (len(columns) - 1)], *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


@dataclasses.dataclass(frozen=True)
class Page:
    """A picture of this size, in pixels; `label` says in words what it shows."""

    width: int
    height: int
    label: str

    def title(self, words: str) -> str:
        """The heading."""
        return text(words, 24, 36, 'title')

    def svg(self, shapes: Iterable[str]) -> str:
        """Returns the file: shapes on a page."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{html.escape(self.label)}"><style>{_STYLE}</style>'
            f'<rect class="page" width="{self.width}" height="{self.height}" rx="12"/>'
            f'{"".join(shapes)}</svg>\n'
        )


def text(words: str, x: float, y: float, kind: str = '', anchor: str = 'start') -> str:
    """Words whose baseline is at y; `kind` is '', 'title', 'ours' or 'best'."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f'{html.escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str = '') -> str:
    """A thin line; dashed if `kind` is 'mark'."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def bar(x: float, y: float, width: float, height: float, kind: str = '') -> str:
    """A filled bar; `kind` is '', 'ours' or 'best'."""
    return (
        f'<rect class="bar {kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="3"/>'
    )
