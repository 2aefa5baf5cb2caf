"""Numbers of bytes and of things as people read them."""

_UNITS = 'bytes', 'kB', 'MB', 'GB', 'TB'


def format_bytes(num_bytes: float) -> str:
    """Formats a number of bytes in its largest unit, as '8.7 MB'; 1 kB is 1,000 bytes."""
    power = 0
    while round(num_bytes) >= 1000 and power < len(_UNITS) - 1:
        num_bytes /= 1000
        power += 1
    decimals = 0 if power == 0 else 1
    return f'{num_bytes:,.{decimals}f} {_UNITS[power]}'


def exceeds_share(count: int, share: float, total: int) -> bool:
    """Returns whether a count is more than a share, from 0 to 1, of a total."""
    if not total:
        return count > 0
    # By a quotient, which is rounded as the share was: 0.29 * 100 is less than 29.
    return count / total > share


def format_count(number: int, noun: str, plural: str = '') -> str:
    """Formats a number of things, as '1 file' or '11,000 files'.

    `plural` is for nouns that take more than an s, and for nouns with a verb: 'files are'.
    """
    if number != 1:
        noun = plural or f'{noun}s'
    return f'{number:,} {noun}'
