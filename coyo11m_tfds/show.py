"""Shows a data set: its report, as a page with pictures that a VAE decodes.

    python -m coyo11m_tfds.show gs://BUCKET/data/coyo11m_tfds/latents/1.0.0 \\
        --vae=madebyollin/taesdxl --out=page.html

The pictures are of the first records of the train split. All else is as on the page
`report-<ID>.html` of the build, whose pictures have one pixel for each latent position. The VAE is
a folder or a name on the hub, with an AutoencoderTiny or AutoencoderKL of diffusers; it runs in
JAX. The data set does not change.
"""

import contextlib
import json

from etils import epath

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import manifest, stored_dataset
from coyo11m_tfds.dataset.stored_dataset import Data
from coyo11m_tfds.pictures import vae_decoder
from coyo11m_tfds.process import command_line
from coyo11m_tfds.report import page, statistics
from coyo11m_tfds.storage import model_files


def show(data_dir: Data, vae: str, num_pictures: int = page.NUM_PREVIEWS) -> str:
    """Returns the HTML page of a data set, local or on gs://, with at most `num_pictures` records.

    `vae` is the `model` of `vae_decoder.load_decoder`.
    """
    if num_pictures < 1:
        raise ValueError(f'num_pictures={num_pictures}: expected at least 1')
    data = input_pipeline.open_data(data_dir)
    path = f'{data.folder}/{schema.of_build(page.JSON_FILE, data.build)}'
    report = manifest.read_small_file(path)
    if report is None:
        raise FileNotFoundError(f'{path} is missing: copy it from where the data set was built')
    # The slow part comes after everything that may be refused.
    maker = data.metadata.get(schema.META_VAE, '')
    decode = vae_decoder.load_decoder(vae, data.channels, maker)
    features = schema.KEY, schema.LATENTS, schema.CAPTION
    with contextlib.closing(
        input_pipeline.eval_batches(
            data, batch_size=num_pictures, features=features, split=schema.TRAIN, prefetch=1
        )
    ) as batches:
        batch = next(batches)
    # The last batch of a small data set is padded with rows that are no records.
    keys, latents, captions = (batch[name][batch[input_pipeline.MASK]] for name in features)
    samples = zip(keys, captions, decode(latents[:, : data.channels]), strict=True)
    previews = [statistics.make_preview(*sample) for sample in samples]
    try:
        return page.render_page(json.loads(report), previews, model_files.public_name(vae))
    except page.DAMAGE_ERRORS as error:
        raise manifest.DamagedError(
            f'{path}: is not the report of a build ({error!r}). Restore it.'
        ) from error


def main() -> None:
    parser = command_line.Parser('coyo11m_tfds.show', __doc__)
    add = parser.add_argument
    add('data_dir', help=stored_dataset.FOLDER_HELP + '; also gs://')
    add('--vae', required=True, help='folder or hub name of the VAE')
    add('--out', required=True, help='HTML file to write, local or gs://')
    add('--num_pictures', type=int, default=page.NUM_PREVIEWS, help='records to show (24)')
    flags = parser.parse_args()
    command_line.show_log()
    with command_line.ends_in_one_line('nothing was written'):
        html = show(flags.data_dir, flags.vae, flags.num_pictures)
        epath.Path(flags.out).write_bytes(html.encode())
    print(f'page: {flags.out}')


if __name__ == '__main__':
    main()
