"""The card of an exported model: README.md, as the Hugging Face hub shows it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.process.shown_text import (
    escape_for_markdown,
    quote_for_yaml,
    quote_in_markdown,
)
from coyo11m_tfds.storage import model_files
from train_lib.learning import models
from train_lib.lifecycle import checkpoint, config_rules, versions
from train_lib.results import evaluation, previews

CARD_FILE = 'README.md'
PREVIEWS_FILE = 'previews.png'
FILES = CARD_FILE, PREVIEWS_FILE

# Fields of the configuration; those that are empty or 0 are left out.
_RECIPE = (
    'model.name',
    'model.text',
    'num_steps',
    'batch_size',
    'ema_decay',
    'optimizer.name',
    'optimizer.learning_rate',
    'optimizer.muon_learning_rate',
    'optimizer.schedule',
    'optimizer.warmup_steps',
    'optimizer.weight_decay',
    'seed',
    'flow.logit_mean',
    'flow.logit_std',
    'data.caption_dropout',
    'data.text',
    'preview.guidance',
    'preview.num_steps',
    'preview.sampler',
    'preview.time_shift',
)
_METRICS = 'cmmd', 'frechet_distance', 'clip_score', 'clip_score_of_data', 'num_pictures'
_DRAWING = """## Drawing

```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
pipe('a caption').images[0]
```

`trust_remote_code` runs `pipeline_*.py` and `transformer/reference_*.py` of this repository.
`python transformer/reference_*.py transformer` draws an example in PyTorch alone."""
_NO_LICENSE = 'not recorded: find out what the data allow, and name it above'


def make_card(
    saved: checkpoint.SavedRun,
    facts: DatasetStats,
    *,
    name: str,
    average: bool,
    num_weights: int,
    vae: str = '',
    datasets: Sequence[str] = (),
) -> dict[str, bytes]:
    """Returns the files of the card of a model: README.md and, if the run drew any, previews.

    Args:
        saved: Checkpoint of the weights.
        facts: Those of the training data.
        name: Name of the model.
        average: Whether the weights are the moving average.
        num_weights: Number of the weights.
        vae: Name of the decoder of its pictures; '' for none.
        datasets: Names of the training data on the hub.
    """
    files = {}
    weights = 'the moving average of the weights' if average else 'the last weights'
    sections = [
        _front_matter(facts.license, datasets),
        f'# {escape_for_markdown(name)}',
        f'A text-to-image model with {num_weights:,} weights: a rectified-flow transformer on '
        f'latents, {weights} at step {saved.step:,}.',
    ]
    # A run may draw previews at other steps than it saves checkpoints.
    nearest = previews.find_nearest(saved.workdir, saved.step)
    if nearest:
        step, picture = nearest
        files[PREVIEWS_FILE] = picture
        legend = f'Left: data, right: model at step {step:,}.'
        sections.append(f'![Previews]({PREVIEWS_FILE})\n\n{legend}')
    sections.append(_DRAWING.replace('FOLDER', repr(name)))
    data_rows = _describe_data(saved, facts, vae)
    sections.append(f'## Data\n\n{_table(data_rows)}')
    if facts.citation:
        sections.append(quote_in_markdown(facts.citation.strip(), 'bibtex'))
    recipe_rows = _list_recipe(saved, facts)
    sections.append(f'## Recipe\n\n{_table(recipe_rows)}')
    sections += _evaluations(saved.workdir, saved.step, average)
    files[CARD_FILE] = ('\n\n'.join(sections) + '\n').encode()
    return files


def _describe_data(saved: checkpoint.SavedRun, facts: DatasetStats, vae: str) -> dict[str, str]:
    """Returns the rows of the table about the training data."""
    # The first field of an identity is the name.
    names = [name for name, *_ in saved.description.position['data_sets'].values()]
    _, *sizes = facts.latents_shape
    shape = ' x '.join(map(str, sizes))
    rows = {
        'data set': ', '.join(names),
        'license': facts.license or _NO_LICENSE,
        'latents': f'{shape} of {facts.vae or "a VAE"}',
        'texts': f'{facts.text_encoder} {facts.text_revision}',
    }
    # Folders of this machine, and buckets, say nothing to others.
    data_versions = versions.list_versions(saved.description.config)
    rows['version'] = ', '.join(data_versions)
    if vae:
        rows['pictures'] = f'decoded by {vae}'
    return rows


def _list_recipe(saved: checkpoint.SavedRun, facts: DatasetStats) -> dict[str, Any]:
    """Returns the rows of the table about the training."""
    config = config_rules.flatten_fields(saved.description.config)
    rows = {field: config.get(field) for field in _RECIPE}
    # What the field left open, the data set has decided.
    if config['model.kind'] == 'dit':
        rows['model.text'] = models.choose_text(config['model.text'], facts.vocabulary)
    # By their names: folders of this machine say nothing to others.
    runner, colon, model = config['encoder'].partition(':')
    rows['encoder'] = f'{runner}{colon}{model_files.public_name(model)}'
    rows['init_from'] = epath.Path(config['init_from']).name
    return rows


def _front_matter(license_name: str, datasets: Sequence[str]) -> str:
    """Returns what the hub reads of a card."""
    fields = {'library_name': 'diffusers', 'pipeline_tag': 'text-to-image'}
    # The hub knows licenses by names like this, and refuses others.
    if re.fullmatch('[a-z0-9.-]+', license_name):
        fields['license'] = license_name
    elif license_name:
        fields |= {'license': 'other', 'license_name': license_name}
    lines = ['---']
    for name, value in fields.items():
        lines.append(f'{name}: {quote_for_yaml(value)}')
    if datasets:
        names = ', '.join(map(quote_for_yaml, datasets))
        lines.append(f'datasets: [{names}]')
    lines.append('---')
    return '\n'.join(lines)


def _evaluations(workdir: epath.Path, step: int, average: bool) -> Iterator[str]:
    """Yields a section for each result of `train_lib.evaluate` with these weights."""
    for result in evaluation.read_results(workdir, step):
        settings = result['settings']
        # Those of the other weights say nothing of this model.
        if settings['average'] != average:
            continue
        rows = {}
        for name in _METRICS:
            # Only an encoder of texts gives scores of captions.
            if name in result:
                rows[name] = f'{result[name]:,.6g}'
        for name in evaluation.NAMED_SETTINGS:
            rows[name] = settings[name]
        rows |= settings['preview']
        yield f'## Evaluation\n\n{_table(rows)}'


def _table(rows: Mapping[str, Any]) -> str:
    """Returns a table of names and values; those that are empty or 0 are left out."""
    lines = ['| | |', '|---|---|']
    for name, value in rows.items():
        if value:
            lines.append(f'| {escape_for_markdown(name)} | {escape_for_markdown(value)} |')
    return '\n'.join(lines)
