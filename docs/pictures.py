"""Draws the pictures of these pages.

python docs/pictures.py curve demo/run docs/curve.png      # of the run in this folder
python docs/pictures.py order docs/order.png
python docs/pictures.py workers docs/workers.png
"""

import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from coyo11m_tfds.sampling.order import Order, OrderSettings

_SCALE = 2  # pixels for each unit of length below
_FOLDER = pathlib.Path(__file__).parent
_FONT = _FOLDER.parent / 'train_lib/fonts/DejaVuSans.ttf'
_INK = '#1d2127'
_FAINT = '#646d7a'
_LINE = '#d9dad8'
_COLOURS = ('#4a6fd8', '#d0452b', '#3a9d6e', '#c9932a', '#8a5cc4', '#4f8f9e')


class Canvas:
    """A white picture to draw on, in units of two pixels."""

    def __init__(self, width: int, height: int):
        self._image = Image.new('RGB', (_SCALE * width, _SCALE * height), 'white')
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, y: float, text: str, colour=_INK, size=12, anchor='lm') -> None:
        """Writes a line; `anchor` is Pillow's, by default the middle of its left end."""
        font = ImageFont.truetype(_FONT, _SCALE * size)
        self._draw.text((_SCALE * x, _SCALE * y), text, colour, font, anchor=anchor)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        """Draws a line through points."""
        scaled = [(_SCALE * x, _SCALE * y) for x, y in points]
        self._draw.line(scaled, colour, round(_SCALE * width), joint='curve')

    def box(self, x: float, y: float, width: float, height: float, fill: Any) -> None:
        """Draws a rectangle with a white edge."""
        corners = [_SCALE * length for length in (x, y, x + width, y + height)]
        self._draw.rectangle(corners, fill, 'white', _SCALE)

    def stripe(self, x: float, y: float, width: float, height: float, *chunk: int) -> None:
        """Draws a record, in the colour of its shard and chunk."""
        left, top, right, bottom = (
            round(_SCALE * length) for length in (x, y, x + width, y + height)
        )
        # Pillow draws the corner at the right and at the bottom, too.
        self._draw.rectangle([left, top, right - 1, bottom - 1], _shade(*chunk))

    def save(self, path: str) -> None:
        """Writes a PNG file."""
        self._image.quantize(128).save(path, optimize=True)


def draw_curve(workdir: str, path: str = f'{_FOLDER}/curve.png') -> None:
    """Draws the losses of a run over its steps, on a logarithmic axis."""
    scalars = _read_scalars(pathlib.Path(workdir))
    curves = {
        'train/loss': 'the steps, whose times are mostly noisy',
        'eval/loss_t0': 'evaluation: quarter next to the data',
        'eval/loss': 'evaluation: all times alike',
        'eval/loss_t3': 'evaluation: quarter next to the noise',
    }
    canvas = Canvas(680, 330)
    left, top, width, height = 56, 16, 330, 268
    last = max(max(scalars[name]) for name in curves)
    least, largest = -0.8, 1.75  # powers of ten

    def place(step: int, value: float) -> tuple[float, float]:
        share = (np.log10(value) - least) / (largest - least)
        return left + width * step / last, top + height * (1 - share)

    for value in (0.2, 0.5, 1, 2, 5, 10, 20, 50):
        _, y = place(0, value)
        canvas.line([(left, y), (left + width, y)], _LINE)
        canvas.text(left - 8, y, f'{value:g}', _FAINT, anchor='rm')
    for step in range(0, last + 1, last // 4):
        x, _ = place(step, 1)
        canvas.text(x, top + height + 14, f'{step:,}', _FAINT, anchor='mm')
    canvas.text(left + width / 2, top + height + 34, 'step', _FAINT, anchor='mm')
    canvas.text(left, top - 6, 'loss', _FAINT)
    for colour, (name, meaning) in zip(_COLOURS, curves.items(), strict=False):
        points = [place(step, value) for step, value in sorted(scalars[name].items())]
        canvas.line(points, colour, 2)
        x, y = points[-1]
        canvas.text(x + 10, y, meaning, colour)
    canvas.save(path)


def _read_scalars(workdir: pathlib.Path) -> dict[str, dict[int, float]]:
    """Returns the scalars of a run by name and step."""
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.util import tensor_util

    scalars: dict[str, dict[int, float]] = {}
    for file in sorted(workdir.glob('events.out.tfevents.*')):
        for event in event_file_loader.EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                # Others are pictures and texts.
                if value.metadata.plugin_data.plugin_name != 'scalars':
                    continue
                number = float(tensor_util.make_ndarray(value.tensor))
                scalars.setdefault(value.tag, {})[event.step] = number
    return scalars


# Of the picture of the order: three shards of equal length, and four lanes.
_SHARDS = (256, 256, 256)
_LANES = 4
_CHUNK = 32
_WINDOW = 64
_PER_LANE = 16  # of a batch
_LEFT = 92
_WIDTH = 576


def draw_order(path: str = f'{_FOLDER}/order.png') -> None:
    """Draws the planned order of three small shards: chunks, lanes, windows and batches."""
    canvas = Canvas(680, 352)
    _draw_chunks(canvas)
    _draw_stream(canvas)
    _draw_batches(canvas)
    canvas.save(path)


def _draw_chunks(canvas: Canvas) -> None:
    width = _CHUNK * _WIDTH / sum(_SHARDS)
    canvas.text(8, 26, 'shards')
    for number in range(sum(_SHARDS) // _CHUNK):
        shard, record = divmod(number * _CHUNK, _SHARDS[0])
        canvas.box(_LEFT + number * width, 16, width, 22, _shade(shard, record // _CHUNK))
    canvas.text(_LEFT, 50, 'records in runs of at most C = 32, the chunks', _FAINT, 11)


def _draw_stream(canvas: Canvas) -> None:
    width = _WIDTH / sum(_SHARDS)
    canvas.text(8, 88, 'stream')
    # Windows of one record leave the stretches of the stream as they are.
    for number, (shard, record) in enumerate(_list_samples(window=1)):
        canvas.stripe(_LEFT + number * width, 78, width, 22, shard, record // _CHUNK)
    for lane in range(_LANES + 1):
        x = _LEFT + lane * _WIDTH / _LANES
        canvas.line([(x, 72), (x, 106)], _INK, 1.5)
    text = 'chunks of an epoch in a random order, cut into L = 4 equal stretches, the lanes'
    canvas.text(_LEFT, 114, text, _FAINT, 11)


def _draw_batches(canvas: Canvas) -> None:
    samples_of_lane = sum(_SHARDS) // _LANES
    num_batches = samples_of_lane // _PER_LANE
    width = _WIDTH / samples_of_lane
    canvas.text(8, 146, 'batches', _FAINT, 11)
    for batch in range(num_batches):
        x = _LEFT + width * _PER_LANE * (batch + 0.5)
        canvas.text(x, 146, f'{batch}', _FAINT, 11, anchor='mm')
    for number, (shard, record) in enumerate(_list_samples(_WINDOW)):
        lane, sample = divmod(number, samples_of_lane)
        canvas.stripe(_LEFT + width * sample, 158 + 34 * lane, width, 24, shard, record // _CHUNK)
    for lane in range(_LANES):
        canvas.text(8, 170 + 34 * lane, f'lane {lane}')
    for batch in range(num_batches + 1):
        x = _LEFT + width * _PER_LANE * batch
        is_window = batch % (_WINDOW // _PER_LANE) == 0
        canvas.line([(x, 154), (x, 288)], _INK, 2 if is_window else 0.5)
    text = 'windows of W = 64 records, between thick lines, are shuffled within a lane;'
    canvas.text(_LEFT, 306, text, _FAINT, 11)
    text = 'a batch of B = 64 takes the next B/L = 16 samples of every lane'
    canvas.text(_LEFT, 326, text, _FAINT, 11)


def _list_samples(window: int) -> Iterator[tuple[int, int]]:
    """Yields shard and record of the samples of an epoch, lane by lane."""
    order = Order(_SHARDS, OrderSettings(0, _CHUNK, _LANES, window))
    samples = order.samples(range(_LANES), 0, sum(_SHARDS) // _LANES)
    yield from zip(samples.shard.ravel().tolist(), samples.record.ravel().tolist(), strict=True)


def _shade(shard: int, chunk: int) -> tuple[int, ...]:
    """Returns the colour of a shard, lighter for every other chunk."""
    colour = np.array(ImageColor.getrgb(_COLOURS[shard]))
    lightness = (0, 0.22, 0.44)[chunk % 3]
    return tuple((colour + lightness * (255 - colour)).astype(int).tolist())


def draw_workers(path: str = f'{_FOLDER}/workers.png') -> None:
    """Draws how two workers of a loader share the batches of one order."""
    canvas = Canvas(680, 190)
    left, width, num_batches = 130, 50, 10
    rows = {'train_batches': None, 'worker 0': 0, 'worker 1': 1, 'DataLoader': None}
    for row, (name, worker) in enumerate(rows.items()):
        y = 12 + 44 * row
        canvas.text(8, y + 14, name)
        for batch in range(num_batches):
            # Batches go to the workers in turn; None stands for those of both.
            if worker in (None, batch % 2):
                x = left + width * batch
                canvas.box(x, y, width - 4, 28, _COLOURS[batch % 2])
                canvas.text(x + width / 2 - 2, y + 14, str(batch), 'white', anchor='mm')
    canvas.save(path)


_PICTURES: Mapping[str, Callable[..., None]] = {
    'curve': draw_curve,
    'order': draw_order,
    'workers': draw_workers,
}

if __name__ == '__main__':
    kind, *arguments = sys.argv[1:]
    _PICTURES[kind](*arguments)
