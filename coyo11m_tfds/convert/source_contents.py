"""What the files of a source hold, by their heads and schemas.

Nothing of the rows is read, but for their keys where these lie with the latents.
"""

import dataclasses
from collections.abc import Sequence

from coyo11m_tfds import schema
from coyo11m_tfds.convert.build_settings import EMBEDDINGS_IN_PT, BuildSettings
from coyo11m_tfds.process.errors import Faults
from coyo11m_tfds.source import captions, sidecar, source_folder
from coyo11m_tfds.source.sidecar import SidecarHeader
from coyo11m_tfds.source.source_latents import SourceLatents, SourceOptions
from coyo11m_tfds.storage.stored_file import StoredFile


@dataclasses.dataclass(frozen=True)
class SourceContents:
    """The files of a source, and what their heads and schemas say."""

    folder: source_folder.SourceFolder
    captions: captions.CaptionFiles  # without files if the captions lie with the latents
    sidecar_files: list[StoredFile]
    latents: SourceLatents

    @property
    def caption_column(self) -> str:
        """The column of the captions, in their Parquet files or in the files of latents."""
        return self.latents.texts.caption_column or self.captions.caption_column


def examine_source(
    source: source_folder.SourceFolder,
    settings: BuildSettings,
    folder: str,
    files: Sequence[StoredFile] | None = None,
) -> SourceContents:
    """Checks the schemas of captions and the heads of latents; returns what they say.

    Args:
        source: The folder of the source.
        settings: Settings of the build.
        folder: An empty local folder for what is read of the heads, such as keys and labels.
        files: The files of latents to open; None for all of the source.

    Raises:
        ValueError: For all faults of the files together.
    """
    # Each of the three steps goes on after the faults of those before it.
    faults = Faults()
    sidecar_files = list[StoredFile]()
    with faults.collect():
        sidecar_files = _find_sidecar_files(settings)
    with faults.collect():
        source = source.with_captions(settings.captions)
        tables = captions.CaptionFiles.choose(
            source.caption_files, settings.key_column, settings.caption_column
        )
        # Captions in files of latents may have another column than the settings name.
        if tables.files and sidecar_files and sidecar_files[0].local_path:
            values = sidecar.describe_values(sidecar_files[0].path)
            header = SidecarHeader(**values['header'])
            check_sidecar(settings, header, tables.caption_column, source.captions_path, None)
    with faults.collect():
        # A source has its captions in one place: in Parquet files, or with the latents.
        caption_column = None
        if not settings.captions and not source.caption_files:
            caption_column = settings.caption_column
        options = SourceOptions(
            latents=schema.parse_latents_from(settings.latents_from, settings.key_column),
            captions=caption_column,
            no_captions=source.no_captions,
            labels=settings.text_embeddings == schema.LABELS,
            drop_bad=settings.drop_bad,
            check_crc=settings.check_crc,
        )
        latents = SourceLatents.read(files or source.latent_files, folder, options)
    faults.check()
    return SourceContents(source, tables, sidecar_files, latents)


def check_sidecar(
    settings: BuildSettings,
    header: SidecarHeader,
    column: str,
    captions_path: str,
    digest: str | None,
) -> None:
    """Raises a ValueError if a sidecar is of other captions; None stands for an unknown digest."""
    if header.caption_column != column:
        raise ValueError(
            f'{settings.text_embeddings}: its embeddings are those of column '
            f"'{header.caption_column}', but caption_column is '{column}'. Change caption_column, "
            'or name embeddings of that column.'
        )
    if digest is not None and header.captions_digest != digest:
        raise ValueError(
            f'{settings.text_embeddings}: its embeddings come from other captions than '
            f"those in column '{column}' of {captions_path}. Make them again with "
            'coyo11m_tfds.embed_captions, or name the source that they were made from.'
        )


def _find_sidecar_files(settings: BuildSettings) -> list[StoredFile]:
    """Returns the files of the sidecar that the settings name; none if they name no sidecar."""
    place = settings.text_embeddings
    if place in ('', schema.LABELS, EMBEDDINGS_IN_PT):
        return []
    try:
        return sidecar.find_sidecar_files(place)
    except ValueError as error:
        raise ValueError(
            f'text_embeddings: {error} Expected a folder that coyo11m_tfds.embed_captions made, '
            "'pt', 'labels' or ''."
        ) from None
