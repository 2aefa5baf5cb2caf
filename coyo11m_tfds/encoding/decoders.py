"""Worker processes that read and decode images, while others are encoded."""

import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Generator, Iterable
from concurrent.futures.process import BrokenProcessPool

from coyo11m_tfds.images.source_image import SourceImage
from coyo11m_tfds.pictures import pixels
from coyo11m_tfds.pictures.pixels import BadImageError, Pixels, Target
from coyo11m_tfds.process import machine, workers

DecodedImage = tuple[SourceImage, Pixels | BadImageError]

# Reading waits for the storage, so there are more threads than workers.
_MORE_READS = 4
# Read and decoded while others are encoded.
_IMAGES_AHEAD = 256
_BYTES_AHEAD = 256 << 20


class Decoders(contextlib.ExitStack):
    """Worker processes that decode images, until the end of the context.

    An image that ends its worker, as damage may do to a decoder, is dropped like another bad one.
    """

    def __init__(self, target: Target, num_workers: int):
        """Starts `num_workers` processes; 0 for one on each core."""
        super().__init__()
        self._target = target
        self._num_workers = workers.requested_workers(num_workers) or machine.usable_cpus()
        self._num_threads = self._num_workers + _MORE_READS
        # Of the largest shape: any image may get it.
        num_pixels = max(map(math.prod, target.shapes))
        decoded_bytes = 3 * target.crops * num_pixels
        images_ahead = min(_IMAGES_AHEAD, _BYTES_AHEAD // decoded_bytes)
        # However large they are, each thread reads one.
        self._ahead = max(self._num_threads, images_ahead)
        self._processes = self._open_pool()
        self._lock = threading.Lock()

    def decode_all(self, images: Iterable[SourceImage]) -> Generator[DecodedImage, None, None]:
        """Reads and decodes images; yields them in order, with their pixels or what is wrong.

        Raises a MemoryError that names the image, and an OSError for a storage out of reach.
        """
        return workers.map_ahead(
            self._decode,
            images,
            self._num_threads,
            self._ahead,
            bytes_ahead=lambda image: image.size,
            max_bytes_ahead=_BYTES_AHEAD,
        )

    def _open_pool(self) -> concurrent.futures.ProcessPoolExecutor:
        """Starts the workers, which end with this context."""
        return self.enter_context(workers.open_pool(self._num_workers))

    def _decode(self, image: SourceImage) -> Pixels | BadImageError:
        """Reads an image in this thread, and has a worker decode it."""
        try:
            data = image.read()
            # Another thread may replace them meanwhile.
            processes = self._processes
            try:
                return processes.submit(pixels.read_pixels, data, self._target).result()
            except BrokenProcessPool:
                return self._decode_alone(data, processes)
        except BadImageError as error:
            return error
        except MemoryError:
            raise MemoryError(
                f'{image.name}: not enough memory to decode it. Lower num_workers or max_pixels.'
            ) from None

    def _decode_alone(self, data: bytes, broken: concurrent.futures.ProcessPoolExecutor) -> Pixels:
        """Decodes an image that was lost with the pool `broken`; BadImageError if it ends it."""
        # Of the images that were lost with the pool, one has ended its worker; which one shows
        # only when each has a worker to itself.
        with self._lock:
            # The first thread opens the new pool, for all images that come after.
            if self._processes is broken:
                self._processes = self._open_pool()
            with workers.open_pool(1) as process:
                try:
                    return process.submit(pixels.read_pixels, data, self._target).result()
                except BrokenProcessPool:
                    raise BadImageError('ends its decoder') from None
