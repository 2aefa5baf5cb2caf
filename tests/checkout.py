"""Where the files of the project and the real sample lie."""

import pathlib

CHECKOUT = pathlib.Path(__file__).parents[1]
COCO_SAMPLE = CHECKOUT.parent / 'shared' / 'data' / 'coco_sample'  # absent in most places
