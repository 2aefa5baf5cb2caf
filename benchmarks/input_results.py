"""Results of the benchmark of the input: a table, ratios, and a picture.

result = Result('mds')
result.add_read(run, {'samples': 100_096, 'seconds': 5.0, 'cpu_seconds': 9.8})
result.add_resume(run, same=True)
make_table([result]), make_ratios([result]), draw([result])
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from benchmarks import measure, report
from benchmarks.readers import BARE, OURS, RANDOM_ACCESS, READERS, ROWS, STREAMING

_MB = 10**6


@dataclasses.dataclass
class Result:
    """The medians of all runs of one reader.

    Attributes:
        name: in `READERS`.
        state_bytes: of what has to be kept to resume in the middle of an epoch.
        rates: samples a second of each run, when steady.
        cpu_per_million: CPU seconds of all processes for a million samples, when steady.
        first_seconds: from when all is imported to the first batch.
        resume_seconds: the same in the middle of an epoch.
        memory, mapped: bytes at the peak, of all processes together.
        others: share of all cores' time that other programs took.
        same: whether the batches after a resume were those without an interruption.
    """

    name: str
    state_bytes: int = 0
    rates: list[float] = dataclasses.field(default_factory=list)
    cpu_per_million: list[float] = dataclasses.field(default_factory=list)
    first_seconds: list[float] = dataclasses.field(default_factory=list)
    resume_seconds: list[float] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    mapped: list[int] = dataclasses.field(default_factory=list)
    others: list[float] = dataclasses.field(default_factory=list)
    same: list[bool] = dataclasses.field(default_factory=list)

    def add_read(self, run: measure.Run, answer: dict) -> None:
        """A run from the start; `answer` has the fields of `streams.Rate`, and `samples`."""
        self.rates.append(answer['samples'] / answer['seconds'])
        self.cpu_per_million.append(answer['cpu_seconds'] / answer['samples'] * 1e6)
        self.first_seconds.append(run.between('imported', 'first'))
        self.memory.append(run.tree_memory.peak)
        self.mapped.append(run.tree_memory.peak_mapped)
        self.others.append(run.others_share)

    def add_resume(self, run: measure.Run, same: bool) -> None:
        """A run that resumed in the middle of an epoch."""
        self.resume_seconds.append(run.between('imported', 'first'))
        self.same.append(same)

    @property
    def rate(self) -> float:
        """Samples a second, the median of all runs."""
        return statistics.median(self.rates)

    @property
    def resume_ratio(self) -> float:
        """How much longer than a start a resume takes; of the medians."""
        return statistics.median(self.resume_seconds) / statistics.median(self.first_seconds)

    def row(self) -> list[str]:
        """A row of the table."""
        return [
            READERS[self.name].title,
            f'{self.rate:,.0f}',
            f'{min(self.rates):,.0f} to {max(self.rates):,.0f}',
            f'{statistics.median(self.cpu_per_million):,.1f}',
            f'{max(self.memory) / _MB:,.0f}',
            f'{max(self.mapped) / _MB:,.0f}',
            f'{statistics.median(self.first_seconds):.2f}',
            *self._resume_columns(),
            f'{max(self.others):.0%}',
        ]

    def _resume_columns(self) -> list[str]:
        if not self.resume_seconds:
            return ['', '', '']
        note = '' if READERS[self.name].keeps_place else ', reads from the start'
        seconds = f'{statistics.median(self.resume_seconds):.2f}{note}'
        return [seconds, f'{self.state_bytes:,}', 'yes' if all(self.same) else 'no']


# How many times as fast as others this pipeline shall be at least, by chunks and by rows.
_WANTED = {False: (4, 0.8, 0.75), True: (6, 3, 3)}

_COLUMNS = (
    'reader',
    'samples/s',
    'all runs',
    'CPU s per million',
    'peak MB',
    'mapped files, MB',
    'first batch, s',
    'resume, s',
    'bytes of state',
    'same batches',
    'others',
)


def make_table(results: Iterable[Result]) -> str:
    """Returns the results as Markdown."""
    return report.markdown_table(_COLUMNS, [result.row() for result in results])


def make_ratios(results: Iterable[Result]) -> list[str]:
    """Returns how fast this pipeline is beside those of the others that were measured."""
    by_name = {result.name: result for result in results}
    lines = []
    for ours in (by_name[name] for name in OURS if name in by_name):
        title = READERS[ours.name].title
        streaming, mapped, bare = _WANTED[ours.name in ROWS]
        for names, text in (
            (STREAMING, f'the best streaming peer ({streaming} is wanted)'),
            (RANDOM_ACCESS, f'the best reader of mapped files ({mapped} is wanted)'),
            ((BARE,), f'bare TFRecord reading ({bare} is wanted)'),
        ):
            others = [by_name[name] for name in names if name in by_name]
            if others:
                best = max(others, key=lambda result: result.rate)
                lines.append(
                    f'{title} to {text}: {ours.rate / best.rate:.2f} ({READERS[best.name].title})'
                )
        if ours.resume_seconds:
            lines.append(
                f'{title}, resume to cold start (1.5 at most): {ours.resume_ratio:.2f}; '
                f'{ours.state_bytes:,} bytes of state (1,000 at most)'
            )
    return lines


# --- The picture -------------------------------------------------------------------------------

_WIDTH, _LEFT, _RIGHT = 760, 270, 650  # the names end at _LEFT, the longest bar at _RIGHT
_TOP, _ROW, _BAR = 92, 32, 20


def draw(results: Sequence[Result]) -> str:
    """Returns an SVG file: samples a second of each reader, the fastest on top."""
    ranked = sorted(results, key=lambda result: result.rate, reverse=True)
    page = report.Page(_WIDTH, _TOP + _ROW * len(ranked) + 16, 'Samples per second of each reader')
    shapes = [
        page.title('Samples per second'),
        report.text('the same samples, shuffled, batches of 256, from the page cache', 24, 60),
    ]
    for i, result in enumerate(ranked):
        kind = 'ours' if result.name in OURS else ''
        width = (_RIGHT - _LEFT) * result.rate / ranked[0].rate
        y = _TOP + _ROW * i
        name = READERS[result.name].title.replace('`', '')
        shapes += [
            report.text(name, _LEFT - 12, y + 15, kind, 'end'),
            report.bar(_LEFT, y, width, _BAR, kind),
            report.text(f'{result.rate:,.0f}', _LEFT + width + 10, y + 15, kind),
        ]
    return page.svg(shapes)
