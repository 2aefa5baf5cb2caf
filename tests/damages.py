"""What may happen to a file, for tests of what is then read."""

import os
import pathlib
import random
from collections.abc import Callable

# Of random damages and kills, and how many of these a drill makes.
SEED = int(os.environ.get('COYO11M_DRILL_SEED', '0'))
SHARE = float(os.environ.get('COYO11M_DRILL_SHARE', '1'))


def flipped(data: bytes, at: int) -> bytes:
    """The bytes with one bit changed; `at` counts from the end if it is negative."""
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def flip(path: pathlib.Path, at: int) -> None:
    """Changes one bit of a file."""
    path.write_bytes(flipped(path.read_bytes(), at))


def replace(path: pathlib.Path, data: bytes) -> None:
    """Writes a new file, as whoever has the old one mapped may still read it."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def damages(data: bytes, choose: random.Random, others: bytes) -> dict[str, bytes]:
    """What may happen to a file, by name; `others` are the bytes of another file."""

    def put(at: int, new: bytes, old: bytes = data) -> bytes:
        return old[:at] + new + old[at + len(new) :]

    def flip(at: int) -> bytes:
        return put(at, bytes([data[at] ^ 1 << choose.randrange(8)]))

    size = len(data)
    at = choose.randrange(size)
    end = choose.randrange(min(4096, size))  # where directories and headers are
    block = choose.choice([512, 4096, 65536])
    begin = at // block * block
    moved = 1 + choose.randrange(4096)
    first, second = sorted(choose.randrange(max(1, size - moved)) for _ in range(2))
    swapped = put(first, data[second : second + moved])
    # A seed stands for the same damages as long as these are drawn in this order.
    one_bit = flip(at)
    bit_of_the_ends = flip(choose.choice([end, size - 1 - end]))
    noise_size = min(choose.randrange(1, 5000), size - at)
    noise = choose.randbytes(noise_size)
    zeros_size = min(block * choose.randrange(1, 5), size - begin)
    return {
        'a bit': one_bit,
        'a bit of the ends': bit_of_the_ends,
        'noise': put(at, noise),
        # As in a file that is still being downloaded into space taken beforehand.
        'zeros': put(begin, bytes(zeros_size)),
        'cut off': data[:at],
        'a byte more': data[:at] + b'x' + data[at:],
        'swapped blocks': put(second, data[first : first + moved], swapped),
        'another file': others,
    }


def record_damages(data: bytes) -> list[bytes]:
    """What a small JSON file may have become, by chance or by hand."""
    contents = [b'', b'{}', b'[]', b'null', b'7', b'"x"', b'NaN', b'\xff\xfe{']
    # Deeper than Python's parser goes.
    contents.append(b'[' * 100_000)
    middle = len(data) // 2
    contents += [data[:middle], data[:-1]]
    contents.append(data.replace(b'1', b'2'))
    for place in (1, len(data) // 3, middle, len(data) - 2):
        contents.append(flipped(data, place))
    return contents


def drill(
    count: int,
    damage: Callable[[random.Random], pathlib.Path],
    read: Callable[[pathlib.Path], bool],
    *,
    named: str = '',
) -> int:
    """Damages a file and reads, again and again; returns how often that was an error.

    `read` returns whether the contents are right. An error must be one line with the name of the
    file, or with the text `named`.
    """
    problems = []
    num_errors = 0
    for number in range(count):
        seed = f'{SEED}-{number}'
        path = damage(random.Random(seed))
        try:
            if not read(path):
                problems.append(f'seed {seed}: {path.name}: other contents were accepted')
        # Also those that must not come, so that one run finds all of them.
        except Exception as error:
            num_errors += 1
            message = str(error)
            is_expected = isinstance(error, (ValueError, OSError))
            is_named = (named or path.name) in message
            is_one_line = len(message.splitlines()) == 1
            if not (is_expected and is_named and is_one_line):
                problems.append(f'seed {seed}: {path.name}: {error!r}')
    assert not problems
    return num_errors
