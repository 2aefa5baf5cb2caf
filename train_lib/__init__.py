"""The trainer; `python -m train_lib.main` starts it."""

import time

STARTED = time.monotonic()  # about when the program did: nothing of the package comes earlier

from coyo11m_tfds.process import programs  # noqa: E402

programs.announce_on_terminal()
