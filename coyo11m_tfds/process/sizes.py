"""Numbers of bytes as people read them."""

_UNITS = 'bytes', 'kB', 'MB', 'GB', 'TB'


def format_bytes(num_bytes: float) -> str:
    """Formats a number of bytes in its largest unit, as '8.7 MB'; 1 kB is 1,000 bytes."""
    power = 0
    while round(num_bytes) >= 1000 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f'{num_bytes:,.{min(power, 1)}f} {_UNITS[power]}'
