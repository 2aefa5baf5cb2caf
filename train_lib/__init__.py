"""The trainer; `python -m train_lib.main` starts it."""

import time

STARTED = time.monotonic()  # about when the program did: nothing of the package comes earlier
