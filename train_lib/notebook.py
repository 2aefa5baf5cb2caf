"""Shows runs in a notebook: a live bar with the loss and the time left, previews, pictures.

    config = run.load_config('small')
    config.data.dir = 'OUT/coyo11m_tfds/hash/1.0.0'
    state = train.train_and_evaluate(config, 'W', hooks=notebook.live_hooks())

Interrupting the kernel saves a checkpoint and ends the cell. The same cell resumes the run.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from IPython import display
from PIL import Image

import input_pipeline
from coyo11m_tfds.process.shown_text import escape_for_html
from train_lib.results import previews

if TYPE_CHECKING:
    from train_lib import train
    from train_lib.learning.state import TrainState

# Before `train` imports TensorFlow, whose messages would be in the output of a cell.
input_pipeline.quiet_tensorflow()


def join_pictures(
    pictures: Sequence[np.ndarray] | Sequence[Image.Image], captions: Sequence[str]
) -> Image.Image:
    """Returns one picture of all, uint8 `(n, H, W, 3)` or PIL's, with captions below them."""
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    return Image.fromarray(previews.make_grid([arrays], captions))


def live_hooks() -> 'tuple[train.Hook, ...]':
    """Returns `train.DEFAULT_HOOKS` with those that show the run below this cell."""
    from train_lib import train

    # Empty until the first report and the first previews, which then replace it.
    bar = display.display(display.HTML(''), display_id=True)
    picture = display.display(display.HTML(''), display_id=True)

    def show_bar(run: 'train.Run', step: int, state: 'TrainState') -> None:
        """Shows how far the run is, with the last line of its log."""
        progress = f'<progress max="{run.config.num_steps}" value="{step}"></progress>'
        page = f'<div>{progress} {escape_for_html(run.log.summary)}</div>'
        bar.update({'text/html': page, 'text/plain': run.log.summary}, raw=True)

    def show_previews(run: 'train.Run', step: int, state: 'TrainState') -> None:
        """Shows the pictures that the run has just drawn."""
        content = previews.path_of_step(run.workdir, step).read_bytes()
        picture.update(Image.open(io.BytesIO(content)))

    bar_hook = train.Hook('bar', train.every(lambda config: config.log_every), show_bar)
    # Behind the hook that draws the previews.
    picture_hook = train.Hook(
        'picture', train.every(lambda config: config.preview_every), show_previews
    )
    hooks = [bar_hook]
    hooks += train.DEFAULT_HOOKS
    hooks.append(picture_hook)
    return tuple(hooks)
