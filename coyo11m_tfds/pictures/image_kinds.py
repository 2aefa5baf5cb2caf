"""Tells by names and first bytes which files are images, and which of them are decoded."""

import re

# Of the formats that `pixels` decodes.
USUAL_SUFFIXES = ('.jpg', '.jpeg', '.png', '.webp')
TAKEN_SUFFIXES = (*USUAL_SUFFIXES, '.jpe', '.jfif', '.jif', '.pjpeg', '.pjp', '.mpo')
ADVICE = (
    'ImageMagick converts other formats (magick mogrify -format png FILES); rename what has '
    'another suffix; unpack archives'
)

_OTHER_SUFFIXES = {
    *('.apng', '.avif', '.avifs', '.blp', '.bmp', '.bpg', '.bw', '.cur', '.dcx', '.dds', '.dib'),
    *('.djvu', '.emf', '.eps', '.exr', '.fit', '.fits', '.flc', '.fli', '.flif', '.fpx', '.ftc'),
    *('.ftu', '.gbr', '.gif', '.hdr', '.heic', '.heif', '.hif', '.icns', '.ico', '.iff', '.im'),
    *('.j2c', '.j2k', '.jng', '.jp2', '.jpc', '.jpf', '.jpm', '.jps', '.jpx', '.jxl', '.jxr'),
    *('.lbm', '.mic', '.mng', '.msp', '.pam', '.pbm', '.pcd', '.pcx', '.pfm', '.pgm', '.pnm'),
    *('.ppm', '.psb', '.psd', '.pxr', '.qoi', '.ras', '.rgb', '.sgi', '.svg', '.svgz', '.tga'),
    *('.tif', '.tiff', '.wbmp', '.wdp', '.wmf', '.xbm', '.xcf', '.xpm'),
    # What cameras call raw.
    *('.3fr', '.arw', '.cr2', '.cr3', '.crw', '.dcr', '.dng', '.erf', '.gpr', '.iiq', '.kdc'),
    *('.mef', '.mos', '.mrw', '.nef', '.nrw', '.orf', '.pef', '.raf', '.raw', '.rw2', '.rwl'),
    *('.sr2', '.srf', '.srw', '.x3f'),
}
_ARCHIVE = re.compile(r'\.(zip|7z|rar|cbz|cbr|tgz|tbz2?|txz|tzst|tar\.(gz|bz2|xz|zst|lz4|lzma|z))$')
_COMPRESSED = re.compile(r'\.(gz|bz2|xz|zst|lz4|br)$')
# Of files that nobody takes for images, although their first bytes are not looked at.
_NO_IMAGES = {
    *('.arrow', '.avi', '.caption', '.captions', '.cls', '.csv', '.db', '.htm', '.html', '.ini'),
    *('.jsn', '.json', '.jsonl', '.lock', '.log', '.md', '.mkv', '.mov', '.mp3', '.mp4', '.npy'),
    *('.npz', '.parquet', '.pdf', '.pt', '.py', '.safetensors', '.tar', '.text', '.tfrecord'),
    *('.transcript', '.tsv', '.txt', '.wav', '.xml', '.yaml', '.yml'),
}

HEAD_BYTES = 16
_HEADS = {
    'JPEG': rb'\xff\xd8\xff',
    'PNG': rb'\x89PNG\r\n\x1a\n',
    'WebP': rb'RIFF....WEBP',
    'GIF': rb'GIF8[79]a',
    'TIFF': rb'II\*\0|MM\0\*',
    'BMP': rb'BM....\0\0\0\0',
    'AVIF': rb'....ftypavi[fs]',
    'HEIC': rb'....ftyp(hei|hev|mif1|msf1)',
    'JPEG XL': rb'\xff\x0a|\0\0\0\x0cJXL ',
    'JPEG 2000': rb'\0\0\0\x0cjP  |\xff\x4f\xff\x51',
    'PSD': rb'8BPS',
}
_KINDS = {kind: re.compile(pattern, re.DOTALL) for kind, pattern in _HEADS.items()}


def judge_name(name: str) -> str | None:
    """Returns '' for an image that is taken, why another one is not, or None for other files."""
    lower = name.lower()
    if _ARCHIVE.search(lower):
        return 'archive'
    # `photo.svg.gz` is an image, `captions.json.gz` is none.
    compressed = _COMPRESSED.search(lower)
    if compressed:
        is_image = judge_name(lower[: compressed.start()]) is not None
        return 'compressed' if is_image else None
    suffix = get_suffix(lower)
    if suffix in TAKEN_SUFFIXES:
        return ''
    if suffix in _OTHER_SUFFIXES:
        return suffix[1:].upper()
    return None


def may_be_image(name: str) -> bool:
    """Whether only the first bytes of a file can tell if it is an image."""
    return judge_name(name) is None and get_suffix(name.lower()) not in _NO_IMAGES


def judge_head(head: bytes) -> str | None:
    """Returns why a file with these first bytes, but no suffix of an image, is not taken."""
    kind = find_kind(head)
    if not kind:
        return None
    return f'{kind} by its bytes, not by its name'


def find_kind(head: bytes) -> str:
    """Returns the format of an image by its first bytes; '' for other files."""
    for kind, pattern in _KINDS.items():
        if pattern.match(head):
            return kind
    return ''


def get_suffix(name: str) -> str:
    """Returns what follows the last dot of a name, with the dot; '' without one."""
    # A dot in the name of a folder begins no suffix.
    _, _, base = name.rpartition('/')
    _, dot, suffix = base.rpartition('.')
    return dot + suffix
