"""The trial of optimizers on the demo's data: what its command line says, and what is trained."""

import pytest

from benchmarks import demo_optimizers
from tests import runs


def test_a_setting_is_a_name_and_fields_with_their_values():
    text = 'Muon, batch 32: optimizer.name="muon" optimizer.learning_rate=2e-3 batch_size=32'
    name, fields = demo_optimizers.read_setting(text)
    assert name == 'Muon, batch 32'
    assert fields == {'optimizer.name': 'muon', 'optimizer.learning_rate': 2e-3, 'batch_size': 32}
    assert demo_optimizers.read_setting('As it is') == ('As it is', {})


def test_a_setting_is_the_demo_but_for_its_fields():
    config = demo_optimizers.make_config('/data', {'batch_size': 32}, seed=7)
    assert (config.batch_size, config.seed, config.data.dir) == (32, 7, '/data')
    assert config.model.name == demo_optimizers.demo.get_config().model.name
    with pytest.raises(KeyError, match='optimiser'):
        demo_optimizers.make_config('/data', {'optimiser.name': 'muon'}, seed=0)


def test_samples_to_evaluate_on_are_whole_batches_with_captions():
    batches = demo_optimizers.eval_batches()
    assert {len(batch['mask']) for batch in batches} == {64}
    assert sum(batch['mask'].sum() for batch in batches) == 384
    assert all(batch['latents'].shape == (64, 4, 32, 32) for batch in batches)
    assert all(all(map(str.strip, batch['caption'])) for batch in batches)


@pytest.mark.slow
def test_a_trial_trains_and_judges(mini_dataset, tmp_path):
    small = ('batch_size', 'data.chunk', 'data.lanes', 'data.window', 'model.name')
    fields = {name: runs.SMALL[name] for name in small} | {'model.text': 'pooled'}
    row = demo_optimizers.run_one(
        str(mini_dataset), fields, 0, 2, demo_optimizers.eval_batches()[:1], tmp_path / 'grid.png'
    )
    assert (row['seed'], row['steps']) == (0, 2)
    assert row['loss'] > 0.5
    assert 0 <= row['all_three'] <= row['colours'] <= 1
    assert (tmp_path / 'grid.png').stat().st_size > 10_000
