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

from coyo11m_tfds.reading.order import Order, OrderSettings, RecordBlock

_SCALE = 2  # pixels for each unit of length below
_FOLDER = pathlib.Path(__file__).parent
_FONT = _FOLDER.parent / 'train_lib/fonts/DejaVuSans.ttf'
_INK, _FAINT, _LINE = '#1d2127', '#646d7a', '#d9dad8'
_COLOURS = '#4a6fd8', '#d0452b', '#3a9d6e', '#c9932a', '#8a5cc4', '#4f8f9e'


class Canvas:
    """A white picture to draw on, in units of two pixels."""

    def __init__(self, width: int, height: int):
        self._image = Image.new('RGB', (_SCALE * width, _SCALE * height), 'white')
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, y: float, text: str, colour=_INK, size=12, anchor='lm') -> None:
        font = ImageFont.truetype(_FONT, _SCALE * size)
        self._draw.text((_SCALE * x, _SCALE * y), text, colour, font, anchor=anchor)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        scaled = [(_SCALE * x, _SCALE * y) for x, y in points]
        self._draw.line(scaled, colour, round(_SCALE * width), joint='curve')

    def box(self, x: float, y: float, width: float, height: float, fill: Any) -> None:
        corners = [_SCALE * v for v in (x, y, x + width, y + height)]
        self._draw.rectangle(corners, fill, 'white', _SCALE)

    def stripe(self, x: float, y: float, width: float, height: float, *chunk: int) -> None:
        """Draws a record, in the colour of its shard and chunk."""
        corners = [round(_SCALE * v) for v in (x, y, x + width, y + height)]
        self._draw.rectangle([*corners[:2], corners[2] - 1, corners[3] - 1], _shade(*chunk))

    def save(self, path: str) -> None:
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
    canvas, left, top, width, height = Canvas(680, 330), 56, 16, 330, 268
    last = max(step for name in curves for step in scalars[name])
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
                if value.metadata.plugin_data.plugin_name == 'scalars':
                    number = float(tensor_util.make_ndarray(value.tensor))
                    scalars.setdefault(value.tag, {})[event.step] = number
    return scalars


def draw_order(path: str = f'{_FOLDER}/order.png') -> None:
    """Draws the planned order of three small shards: chunks, lanes, windows and batches."""
    lengths, lanes, chunk, window, per_lane = (256, 256, 256), 4, 32, 64, 16
    count = sum(lengths) // lanes
    canvas, left, width = Canvas(680, 352), 92, 576
    record_width = width / sum(lengths)
    canvas.text(8, 26, 'shards')
    for number in range(sum(lengths) // chunk):
        shard, record = divmod(number * chunk, lengths[0])
        x = left + number * chunk * record_width
        canvas.box(x, 16, chunk * record_width, 22, _shade(shard, record // chunk))
    canvas.text(left, 50, 'records in runs of at most C = 32, the chunks', _FAINT, 11)
    # Windows of one record leave the stretches of the stream as they are.
    stream, order = (
        Order(lengths, OrderSettings(0, chunk, lanes, w)).samples(range(lanes), 0, count)
        for w in (1, window)
    )
    canvas.text(8, 88, 'stream')
    for number, (shard, record) in enumerate(_places(stream)):
        canvas.stripe(left + number * record_width, 78, record_width, 22, shard, record // chunk)
    for lane in range(lanes + 1):
        x = left + lane * width / lanes
        canvas.line([(x, 72), (x, 106)], _INK, 1.5)
    text = 'chunks of an epoch in a random order, cut into L = 4 equal stretches, the lanes'
    canvas.text(left, 114, text, _FAINT, 11)
    record_width = width / count
    for batch in range(count // per_lane):
        x = left + record_width * per_lane * (batch + 0.5)
        canvas.text(x, 146, f'{batch}', _FAINT, 11, anchor='mm')
    canvas.text(8, 146, 'batches', _FAINT, 11)
    for number, (shard, record) in enumerate(_places(order)):
        lane, sample = divmod(number, count)
        x, y = left + record_width * sample, 158 + 34 * lane
        canvas.stripe(x, y, record_width, 24, shard, record // chunk)
    for lane in range(lanes):
        canvas.text(8, 170 + 34 * lane, f'lane {lane}')
    for batch in range(count // per_lane + 1):
        x = left + record_width * per_lane * batch
        is_window = batch % (window // per_lane) == 0
        canvas.line([(x, 154), (x, 288)], _INK, 2 if is_window else 0.5)
    for number, text in enumerate(
        (
            'windows of W = 64 records, between thick lines, are shuffled within a lane;',
            'a batch of B = 64 takes the next B/L = 16 samples of every lane',
        )
    ):
        canvas.text(left, 306 + 20 * number, text, _FAINT, 11)
    canvas.save(path)


def _places(block: RecordBlock) -> Iterator[tuple[int, int]]:
    """Yields shard and record of the samples of all lanes, lane by lane."""
    yield from zip(block.shard.ravel().tolist(), block.record.ravel().tolist(), strict=True)


def _shade(shard: int, chunk: int) -> tuple[int, ...]:
    """Returns the colour of a shard, lighter for every other chunk."""
    colour = np.array(ImageColor.getrgb(_COLOURS[shard]))
    lightness = (0, 0.22, 0.44)[chunk % 3]
    return tuple((colour + lightness * (255 - colour)).astype(int).tolist())


def draw_workers(path: str = f'{_FOLDER}/workers.png') -> None:
    """Draws how two workers of a loader share the batches of one order."""
    canvas, left, width, count = Canvas(680, 190), 130, 50, 10
    rows = {'train_batches': None, 'worker 0': 0, 'worker 1': 1, 'DataLoader': None}
    for row, (name, worker) in enumerate(rows.items()):
        y = 12 + 44 * row
        canvas.text(8, y + 14, name)
        for batch in range(count):
            if worker in (None, batch % 2):
                canvas.box(left + width * batch, y, width - 4, 28, _COLOURS[batch % 2])
                x = left + width * batch + width / 2 - 2
                canvas.text(x, y + 14, str(batch), 'white', anchor='mm')
    canvas.save(path)


_PICTURES: Mapping[str, Callable[..., None]] = {
    'curve': draw_curve,
    'order': draw_order,
    'workers': draw_workers,
}

if __name__ == '__main__':
    kind, *arguments = sys.argv[1:]
    _PICTURES[kind](*arguments)
