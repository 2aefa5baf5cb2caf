"""What may happen to a file, for tests of what is then read."""

import random


def damages(data: bytes, choose: random.Random, others: bytes) -> dict[str, bytes]:
    """What may happen to a file, by name; `others` are the bytes of another file."""

    def put(at: int, new: bytes, old: bytes = data) -> bytes:
        return old[:at] + new + old[at + len(new) :]

    def flip(at: int) -> bytes:
        return put(at, bytes([data[at] ^ 1 << choose.randrange(8)]))

    size, at = len(data), choose.randrange(len(data))
    end = choose.randrange(min(4096, size))  # where directories and headers are
    block = choose.choice([512, 4096, 65536])
    begin = at // block * block
    moved = 1 + choose.randrange(4096)
    first, second = sorted(choose.randrange(max(1, size - moved)) for _ in range(2))
    swapped = put(first, data[second : second + moved])
    return {
        'a bit': flip(at),
        'a bit of the ends': flip(choose.choice([end, size - 1 - end])),
        'noise': put(at, choose.randbytes(min(choose.randrange(1, 5000), size - at))),
        # As in a file that is still being downloaded into space taken beforehand.
        'zeros': put(begin, bytes(min(block * choose.randrange(1, 5), size - begin))),
        'cut off': data[:at],
        'a byte more': data[:at] + b'x' + data[at:],
        'swapped blocks': put(second, data[first : first + moved], swapped),
        'another file': others,
    }


def record_damages(data: bytes) -> list[bytes]:
    """What a small JSON file may have become, by chance or by hand."""
    places = [1, len(data) // 3, len(data) // 2, len(data) - 2]
    flipped = [data[:x] + bytes([data[x] ^ 1]) + data[x + 1 :] for x in places]
    others = b'', b'{}', b'[]', b'null', b'7', b'"x"', b'NaN', b'\xff\xfe{', b'[' * 100_000
    return [*others, data[: len(data) // 2], data[:-1], data.replace(b'1', b'2'), *flipped]
