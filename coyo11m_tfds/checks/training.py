"""The configuration of a training run, checked by the trainer itself in a process of its own.

training.check_config('configs/demo.py', 'OUT/coyo11m_tfds/hash/1.0.0', seconds=60)
"""

from coyo11m_tfds.checks import child, finding
from coyo11m_tfds.checks.finding import Finding

# By name: nothing in this package imports the trainer.
_PROGRAM = 'train_lib.tools.check'


def check_config(config: str, data_set: str, seconds: float) -> list[Finding]:
    """Checks that settings, devices, data set and memory fit each other.

    Args:
        config: file or name of a configuration.
        data_set: folder of a data set, in the place of the one that the configuration names; ''
            leaves that.
        seconds: that it may take.
    """
    options = [f'--config={config}', *([f'--config.data.dir={data_set}'] if data_set else [])]
    try:
        answer = child.ask(['-m', _PROGRAM, *options], seconds)
    except (ValueError, OSError) as error:
        return [finding.failed('config', f'{config}: {error}')]
    text = f'{config} fits {answer["devices"]}'
    if answer['data']:
        text += f' and {answer["data"]}'
    if unchecked := answer['unchecked']:
        text += f'; not checked: {", ".join(unchecked)}'
        return [finding.warned('config', text, '; '.join(unchecked.values()), **answer)]
    return [finding.passed('config', text, **answer)]
