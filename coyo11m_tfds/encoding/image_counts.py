"""Counts what becomes of the images of an encoding, and says in lines how many, which and why."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from coyo11m_tfds.foreign.file_names import MAX_NAMES, list_names
from coyo11m_tfds.images.source_image import SourceImage
from coyo11m_tfds.pictures import image_kinds, pixels
from coyo11m_tfds.pictures.pixels import BadImageError, OtherImageError, SmallImageError
from coyo11m_tfds.process.shown_text import escape_for_terminal
from coyo11m_tfds.process.sizes import exceeds_share, format_count

# Stands for the size, of those that would take a small image, where none with buckets does.
NO_SIZE = '0'

_NO_CAPTION = 'without a caption'


@dataclasses.dataclass
class ImageCounts:
    """Counts of the images of a part, or of several; receipts of parts hold its fields."""

    # Of encoded images: 'HEIGHTxWIDTH' of their pixels, and where their keys come from.
    shapes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    key_rules: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_without_caption: int = 0
    # Reasons of images that cannot be used, and of good ones that are too small or too narrow.
    bad: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    small: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # Reasons of images that are not taken, such as their formats; archives are among them.
    other: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # Reasons of texts in tars that belong to no image.
    texts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # the first by reason
    # Of those that are too small: the largest `size`, in decimal, that would take the image, or
    # `NO_SIZE`.
    smaller_sizes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @classmethod
    def parse(cls, facts: Mapping[str, Any]) -> 'ImageCounts':
        """Returns the counts that `vars` gave; a KeyError for a missing one."""
        counts = cls()
        counts.add(facts)
        return counts

    def count(self, image: SourceImage, shape: str) -> None:
        """Counts an encoded image."""
        self.shapes[shape] += 1
        self.key_rules[image.key_rule] += 1
        if not image.caption:
            self.num_without_caption += 1
            self._keep_name(_NO_CAPTION, image.name)

    def drop(self, name: str, error: BadImageError) -> None:
        """Counts an image that is left out."""
        counts = self.bad
        if isinstance(error, SmallImageError):
            counts = self.small
        elif isinstance(error, OtherImageError):
            counts = self.other
        counts[error.reason] += 1
        self._keep_name(error.reason, name)

    def leave_texts(self, reasons: Mapping[str, str]) -> None:
        """Counts texts that are not used, of which the reasons are given by their names."""
        for name, reason in reasons.items():
            self.texts[reason] += 1
            self._keep_name(reason, name)

    def _keep_name(self, reason: str, name: str) -> None:
        """Keeps the name of an image as an example of a reason, if there are few yet."""
        names = self.names.setdefault(reason, [])
        if len(names) < MAX_NAMES:
            names.append(name)

    def add(self, part: Mapping[str, Any]) -> None:
        """Adds the counts of a part, as `vars` gives them; a KeyError for a missing one."""
        for name in ('shapes', 'key_rules', 'bad', 'small', 'other', 'texts', 'smaller_sizes'):
            getattr(self, name).update(part[name])
        self.num_without_caption += part['num_without_caption']
        for reason, names in part['names'].items():
            for name in names:
                self._keep_name(reason, name)

    def check_bad(self, max_bad: float, least: int = 0) -> None:
        """Raises a ValueError if more than `max_bad` of all images, at least `least`, are bad."""
        num_bad = self.bad.total()
        total = self.shapes.total() + num_bad + self.small.total()
        # Of the first few images, one that is bad says little yet.
        if not exceeds_share(num_bad, max_bad, max(total, least)):
            return
        are = 'is' if num_bad == 1 else 'are'
        raise ValueError(
            f'{num_bad:,} of {format_count(total, "image")} {are} bad, more than '
            f'max_bad={max_bad}: '
            f'{self._describe(self.bad)}. What is encoded is kept; raise max_bad to go on, or '
            'repair the images and choose another folder.'
        )

    def __str__(self) -> str:
        """Returns lines for people: what was encoded, what was not and why, and advice."""
        lines = [self._describe_encoded()]
        dropped = {'left out': self.small, 'bad': self.bad, 'not taken': self.other}
        for kind, counts in dropped.items():
            if counts:
                lines.append(f'{counts.total():,} {kind}: {self._describe(counts)}')
        lines += self._advise_on_small()
        if self.other:
            lines.append(f'What is not taken: {image_kinds.ADVICE}.')
        if self.texts:
            texts = format_count(self.texts.total(), 'text')
            lines.append(f'{texts} not used: {self._describe(self.texts)}')
        # Nothing is lost without a word: the numbers have a sum that a user can compare.
        totals = {'encoded': self.shapes} | dropped
        num_images = 0
        summands = []
        for kind, counts in totals.items():
            num_images += counts.total()
            summands.append(f'{counts.total():,} {kind}')
        lines.append(f'{num_images:,} found = {" + ".join(summands)}')
        return '\n'.join(lines)

    def _describe_encoded(self) -> str:
        """Returns a line about the encoded images: their shapes, keys and captions."""
        facts = [format_count(self.shapes.total(), 'image')]
        for shape, count in sorted(self.shapes.items()):
            facts.append(f'{count:,} of {shape}')
        for rule, count in self.key_rules.most_common():
            facts.append(f'{format_count(count, "key")} from {rule}')
        if self.num_without_caption:
            count = self.num_without_caption
            examples = self._list_names(_NO_CAPTION, count)
            facts.append(f'{count:,} {_NO_CAPTION} ({examples})')
        return ', '.join(facts)

    def _describe(self, counts: collections.Counter[str]) -> str:
        """Returns the reasons of some images, each with its count and examples."""
        facts = []
        for reason, count in counts.most_common():
            examples = self._list_names(reason, count)
            # Reasons are words of any form, which a number cannot stand before.
            facts.append(f'{count:,} x {reason} ({examples})')
        return '; '.join(facts)

    def _list_names(self, reason: str, count: int) -> str:
        """Returns examples of the `count` images of a reason."""
        names = [escape_for_terminal(name) for name in self.names[reason]]
        return list_names(names, count)

    def _advise_on_small(self) -> list[str]:
        """Says by which options images that are left out would be taken."""
        lines = []
        ways = self._list_smaller_sizes()
        if ways:
            lines.append(f'Of those that are too small, {" and ".join(ways)}.')
        count = self.smaller_sizes[NO_SIZE]
        if count:
            too_small = format_count(count, 'is too small', 'are too small')
            lines.append(f'{too_small} for any buckets, but not without --buckets.')
        if self.small[pixels.TOO_NARROW]:
            lines.append('Without --buckets, those that are too narrow would be cropped.')
        return lines

    def _list_smaller_sizes(self) -> list[str]:
        """Returns one or two sizes that would take images which are too small, and how many."""
        sizes = sorted(self.smaller_sizes.keys() - {NO_SIZE}, key=int, reverse=True)
        # A smaller size takes what the larger ones take, too.
        num_taken = list(itertools.accumulate(self.smaller_sizes[size] for size in sizes))
        ways = list[str]()
        for size, count in zip(sizes, num_taken, strict=True):
            # The largest size that takes at least half of them, and the smallest: one tiny image
            # must not make the only advice a tiny size.
            takes_half = not ways and 2 * count >= num_taken[-1]
            if takes_half or size == sizes[-1]:
                ways.append(f'--size={size} would take {count:,}')
        return ways
