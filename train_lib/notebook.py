"""Shows runs in a notebook: a live bar with the loss and the time left, previews, pictures.

    config = run.load_config('small')
    config.data.dir = 'OUT/coyo11m_tfds/hash/1.0.0'
    state = train.train_and_evaluate(config, 'W', hooks=notebook.live_hooks())

Interrupting the kernel saves a checkpoint and ends the cell. The same cell resumes the run.
"""

import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from IPython import display
from PIL import Image

from train_lib import previews, train
from train_lib.state import TrainState


def join_pictures(
    pictures: Sequence[np.ndarray] | Sequence[Image.Image], captions: Sequence[str]
) -> Image.Image:
    """Returns one picture of all, uint8 `(n, H, W, 3)` or PIL's, with captions below them."""
    return Image.fromarray(previews.make_grid([np.stack([*map(np.asarray, pictures)])], captions))


class _Output:
    """One place in the output of a cell, whose content is replaced."""

    def __init__(self):
        self._handle: display.DisplayHandle | None = None

    def show(self, content: Any, **options: Any) -> None:
        # Made at the first use, so that it is in the output of the cell that trains.
        if self._handle is None:
            self._handle = display.display(content, display_id=True, **options)
        else:
            self._handle.update(content, **options)


def live_hooks() -> tuple[train.Hook, ...]:
    """Returns `train.DEFAULT_HOOKS` with those that show the run below the cell that trains."""
    bar, picture = _Output(), _Output()

    def show_bar(run: train.Run, step: int, state: TrainState) -> None:
        text = run.log.summary or f'step {step} of {run.config.num_steps}'
        progress = f'<progress max="{run.config.num_steps}" value="{step}"></progress>'
        page = f'<div>{progress} {html.escape(text)}</div>'
        bar.show({'text/html': page, 'text/plain': text}, raw=True)

    def show_previews(run: train.Run, step: int, state: TrainState) -> None:
        path = previews.path_of_step(run.workdir, step)
        picture.show(Image.open(io.BytesIO(path.read_bytes())))

    is_window_complete = train.every(lambda config: config.log_every)

    def is_bar_due(run: train.Run, step: int) -> bool:
        return step == run.beginning.step + 1 or is_window_complete(run, step)

    return (
        train.Hook('bar', is_bar_due, show_bar),
        *train.DEFAULT_HOOKS,
        train.Hook('picture', train.every(lambda config: config.preview_every), show_previews),
    )
