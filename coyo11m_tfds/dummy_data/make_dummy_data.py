"""Makes the source in this folder, which `tfds.testing.DatasetBuilderTestCase` builds.

    python -m coyo11m_tfds.dummy_data.make_dummy_data

Four rows: two for the train split, one for validation, one without a caption. Each row of latents
is one number repeated, so that the files compress well.
"""

import itertools
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from coyo11m_tfds import schema
from coyo11m_tfds.convert import plan

FOLDER = pathlib.Path(__file__).parent


def main() -> None:
    """Writes one `.pt` file and the captions."""
    train = [key for key in range(4) if plan.unit_hash(np.array([key]))[0] >= 0.01][:3]
    validation = next(key for key in itertools.count() if plan.unit_hash(np.array([key]))[0] < 0.01)
    keys = [*train, validation]
    values = torch.arange(1.0, 5.0).reshape(4, 1, 1, 1, 1)
    latents = values.expand(4, *schema.LATENTS_SHAPE).to(torch.float16).contiguous()
    path = FOLDER / schema.LATENTS_FOLDER / '000000-000009.pt'
    path.parent.mkdir(exist_ok=True)
    torch.save({schema.PT_KEYS: torch.tensor(keys), schema.PT_LATENTS: latents}, path)
    captions = {
        schema.PARQUET_KEY: keys[::-1],
        schema.DEFAULT_CAPTION_COLUMN: ['A grey field.', None, 'A dark field.', 'A black field.'],
    }
    pq.write_table(pa.table(captions), FOLDER / schema.CAPTIONS_FILE)


if __name__ == '__main__':
    main()
