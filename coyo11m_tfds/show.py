"""Shows a data set as a page with pictures, or one of its records.

    python -m coyo11m_tfds.show gs://BUCKET/data/coyo11m_tfds/latents/1.0.0 \\
        --vae=madebyollin/taesdxl --out=page.html
    python -m coyo11m_tfds.show OUT/coyo11m_tfds/latents/1.0.0 --key=123

The pictures are of records from all over the train split. All else is as on the page
`report-<ID>.html` of the build, whose pictures have one pixel for each latent position. The VAE is
a folder or a name on the hub, with an AutoencoderTiny or AutoencoderKL of diffusers; it runs in
JAX. The data set does not change.

With `--key` the program prints the values of one record and writes a picture of its crops, with one
pixel for each latent position or, with `--vae`, decoded. It reads all records to find the key.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

import input_pipeline
from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import manifest, stored_dataset
from coyo11m_tfds.dataset.stored_dataset import Data, StoredDataset
from coyo11m_tfds.pictures import pixels, vae_decoder
from coyo11m_tfds.process import command_line, errors
from coyo11m_tfds.report import page, statistics
from coyo11m_tfds.storage import model_files

_NAME_WIDTH = 15  # of the names of values, in characters; longer ones move their value


def show(data_dir: Data, vae: str, num_pictures: int = page.NUM_PREVIEWS) -> str:
    """Returns the HTML page of a data set, local or on gs://, with at most `num_pictures` records.

    `vae` is the `model` of `vae_decoder.load_decoder`. Raises a ValueError for a wrong argument or
    a damaged report, and an OSError for files that are missing or cannot be read.
    """
    errors.at_least(1).check('num_pictures', num_pictures)
    data = input_pipeline.open_data(data_dir)
    path = f'{data.folder}/{schema.of_build(page.JSON_FILE, data.build)}'
    report = manifest.read_small_file(path)
    if report is None:
        raise FileNotFoundError(f'{path} is missing: copy it from where the data set was built')
    # The slow part comes after everything that may be refused.
    maker = data.metadata.get(schema.META_VAE, '')
    scale = data.metadata.get(schema.META_LATENT_SCALE)
    decode = vae_decoder.load_decoder(vae, data.channels, maker, scale)
    features = schema.KEY, schema.LATENTS, schema.CAPTION
    records = input_pipeline.records(data, schema.TRAIN, features, crop=0)
    count = min(num_pictures, len(records))
    # Evenly spaced over the split.
    numbers = [number * len(records) // count for number in range(count)]
    batch = records[numbers]
    # Behind the channels of the means may lie those of the deviations.
    means = batch[schema.LATENTS][:, : data.channels]
    pictures = decode(means)
    previews = []
    rows = zip(batch[schema.KEY], batch[schema.CAPTION], pictures, strict=True)
    for key, caption, picture in rows:
        previews.append(statistics.make_preview(key, caption, picture))
    # A report may be damaged, or be that of another version.
    try:
        return page.render_page(json.loads(report), previews, model_files.public_name(vae))
    except page.DAMAGE_ERRORS as error:
        raise manifest.DamagedError(
            f'{path}: is not the report of a build ({error!r}). Restore it.'
        ) from error


def show_record(data_dir: Data, key: int, vae: str = '') -> tuple[list[str], bytes]:
    """Returns a line for each value of the record with a key, and a PNG of its crops in a row.

    `vae` is the `model` of `vae_decoder.load_decoder`; '' for one pixel a position. Raises a
    ValueError if no record has the key, or for a VAE of other latents, and an OSError for files
    that are missing or cannot be read.
    """
    data = input_pipeline.open_data(data_dir)
    features = [name for name in stored_dataset.READABLE if name in data.features]
    for name in data.columns:
        # A column may take the place of a feature.
        if name not in features:
            features.append(name)
    maker = data.metadata.get(schema.META_VAE, '')
    scale = data.metadata.get(schema.META_LATENT_SCALE)
    decode = vae_decoder.make_painter(vae, data.channels, maker, scale)
    split_name, number, record = _find_record(data, key, features)
    lines = [f'record {number} of split {split_name}']
    for name, value in record.items():
        # With a space, also behind the long name of an added column.
        lines.append(f'{name:<{_NAME_WIDTH}} {_describe_value(value)}')
    # Without the deviations, if the record holds moments.
    means = record[schema.LATENTS][:, : data.channels]
    crops = decode(means)
    row = np.hstack(list(crops))
    return lines, pixels.encode_png(row)


def _find_record(
    data: StoredDataset, key: int, features: Sequence[str]
) -> tuple[str, int, dict[str, Any]]:
    """Returns the split of the record with a key, its number there, and its values by name.

    Raises a ValueError if no record has the key.
    """
    # The smallest split first, because each is read for its keys.
    for split in sorted(data.splits.values(), key=lambda split: split.num_records):
        records = input_pipeline.records(data, split.name, features)
        try:
            number = records.find(key)
        # No record of this split has it.
        except KeyError:
            continue
        return split.name, number, records[number]
    raise ValueError(f'{data.folder}: no record has key {key}; the build may have dropped it')


def _describe_value(value: Any) -> str:
    """Returns a text or a number as it is, and of an array its dtype, shape and range."""
    if isinstance(value, bytes):
        return value.decode(errors='replace')
    if np.ndim(value) == 0:
        return str(value)
    least = float(value.min())
    largest = float(value.max())
    return f'{value.dtype} {value.shape}, {least:.4g} to {largest:.4g}'


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    parser = command_line.Parser('coyo11m_tfds.show', __doc__)
    add = parser.add_argument
    add('data_dir', help=stored_dataset.FOLDER_HELP + '; also gs://')
    add('--vae', default='', help='folder or hub name of the VAE')
    add('--out', default='', help='file to write, local or gs://: HTML, or PNG of a record')
    add('--key', type=int, help='show the record with this key, in KEY.png by default')
    add('--num_pictures', type=int, default=page.NUM_PREVIEWS, help='records to show (%(default)s)')
    flags = parser.parse_args()
    # A page needs both; of a record, a picture of the latents can be made without a VAE.
    missing = [f'--{name}' for name in ('vae', 'out') if not getattr(flags, name)]
    if flags.key is None and missing:
        parser.error(f'the following arguments are required: {", ".join(missing)}')
    command_line.show_log()
    with command_line.ends_in_one_line('nothing was written'):
        out = flags.out or f'{flags.key}.png'
        # Before minutes of work whose result could not be written.
        storage.check_writable_file(out)
        if flags.key is not None:
            lines, png = show_record(flags.data_dir, flags.key, flags.vae)
            storage.write_file(out, png)
            command_line.print_lines(*lines, f'{"picture":<{_NAME_WIDTH}} {out}')
            return
        html = show(flags.data_dir, flags.vae, flags.num_pictures)
        storage.write_file(out, html.encode())
    command_line.print_lines(f'page: {flags.out}')


if __name__ == '__main__':
    main()
