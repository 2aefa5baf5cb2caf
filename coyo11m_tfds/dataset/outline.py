"""A digest of a file of latents that reads none of the latents, to detect another version fast.

outline.digest('000000-000009.pt')      # of the names, sizes and CRC-32s of its members
outline.digest('shard.00000.mds')       # of its size, its beginning and its end

The directory of a `.pt` file has checksums of all contents. The middle of other files may change
without a change of the digest; each row in place has its own checksum, which reveals that.
"""

import hashlib
import os

from coyo11m_tfds.dataset import pt_archive

END_BYTES = 64 << 10  # at each end


def digest(path: str | os.PathLike[str]) -> str:
    """Returns the digest as hex digits; raises a ValueError for a damaged `.pt` file."""
    if os.fspath(path).endswith('.pt'):
        return pt_archive.open_archive(path).digest
    with open(path, 'rb', buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        ends = [os.pread(file.fileno(), END_BYTES, at) for at in (0, max(0, size - END_BYTES))]
    return hashlib.sha256(b'%d ' % size + b''.join(ends)).hexdigest()
