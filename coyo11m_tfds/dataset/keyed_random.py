"""Random numbers that depend only on their arguments: hashes and computed permutations.

They are the same on every machine and with every version of NumPy, whose `Generator` is not.
"""

import hashlib

import numpy as np


# splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014;
# constants of Vigna's splitmix64.c.
def splitmix64(x: np.ndarray | int) -> np.ndarray:
    """Returns mixed uint64 values, same shape, by a bijection: different ones stay different."""
    with np.errstate(over='ignore'):
        z = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def derive(seed: int, *numbers: int | np.ndarray) -> np.ndarray:
    """Returns the hash of a seed and, one after the other, of numbers; uint64, common shape."""
    key = splitmix64(seed & 0xFFFFFFFFFFFFFFFF)
    for number in numbers:
        # Hashed after each number, so that (1, 2) and (2, 1) give different keys.
        key = splitmix64(key ^ np.asarray(number).astype(np.uint64))
    return key


def name_hash(name: str) -> int:
    """Returns the 64-bit BLAKE2b digest of a name."""
    # `surrogateescape`: a name of a file may be no UTF-8, and still has a hash.
    data = name.encode('utf-8', 'surrogateescape')
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, 'little')


class Permutation:
    """A permutation of `range(size)` that is computed from a 64-bit key without a table."""

    # It is a Feistel network of splitmix64 rounds (Luby and Rackoff, "How to construct pseudorandom
    # permutations from pseudorandom functions", 1988) on the smallest domain of an even number of
    # bits; values outside the range pass it again ("cycle walking": Black and Rogaway, "Ciphers
    # with arbitrary finite domains", 2002).

    TABLE_SIZE = 2**16
    ROUNDS = 8

    def __init__(self, size: int, key: int):
        """Takes the number of values, and a key of 64 bits that chooses the permutation."""
        self.size = size
        self._round_keys = derive(key, np.arange(self.ROUNDS))
        # Rounded up: a number of an even number of bits is divided into halves.
        num_bits = (size - 1).bit_length()
        half = max(1, (num_bits + 1) // 2)
        self._half = np.uint64(half)
        self._low = np.uint64((1 << half) - 1)
        self._table = self._inverse = None
        # On a small domain the halves are too narrow to be random: a sorted table of hashes is.
        if size <= self.TABLE_SIZE:
            self._table = np.argsort(derive(key, np.arange(size)))
            self._inverse = np.argsort(self._table)

    def apply(self, index: np.ndarray) -> np.ndarray:
        """Returns the value at each index; int64, same shape."""
        if self._table is not None:
            return self._table[index]
        return self._walk(index, self._round_keys)

    def invert(self, value: np.ndarray) -> np.ndarray:
        """Returns the index of each value; int64, same shape."""
        if self._inverse is not None:
            return self._inverse[value]
        # Its inverse is a Feistel network with swapped halves and the rounds in reverse.
        return self._walk(value, self._round_keys[::-1], swap=True)

    def _walk(self, x: np.ndarray, round_keys: np.ndarray, swap: bool = False) -> np.ndarray:
        """Returns numbers that passed the rounds until they are in the range."""
        x = np.array(x, np.uint64)
        outside = np.ones(x.shape, bool)
        # The rounds permute a larger domain, so values outside come back into the range.
        while outside.any():
            x[outside] = self._rounds(x[outside], round_keys, swap)
            outside = x >= self.size
        return x.astype(np.int64)

    def _rounds(self, x: np.ndarray, round_keys: np.ndarray, swap: bool) -> np.ndarray:
        """Returns numbers that passed all rounds once, with swapped halves for the inverse."""
        left = x >> self._half
        right = x & self._low
        if swap:
            left, right = right, left
        for key in round_keys:
            left, right = right, left ^ (splitmix64(right ^ key) & self._low)
        if swap:
            left, right = right, left
        return (left << self._half) | right
