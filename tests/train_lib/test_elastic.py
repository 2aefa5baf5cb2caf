"""One run on any number of hosts, and on another number after each stop: the same run.

Hosts are real processes that find each other over loopback, started by the command a user types;
there are four devices in all, however many processes hold them.
"""

import json
import pathlib
import re
import signal

import jax
import numpy as np
import pytest
from PIL import Image

from tests import children, runs, small_vae

# Lanes for eight processes, a batch that has a record of every lane.
SETTINGS = {'data.lanes': 8, 'batch_size': 8, 'eval_every': 3, 'checkpoint_every': 4}

# Sums over a batch are added up in another order where other processes hold its parts.
LOSS_TOLERANCE = 1e-5
EVAL_LOSS_TOLERANCE = 1e-6


def keys_of_steps(workdir: pathlib.Path, processes: int) -> dict[int, np.ndarray]:
    """The keys of every global batch, of which process p had the p-th part: `{step: (b,)}`."""
    by_process = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(workdir.glob(f'keys_*_of_{processes}.jsonl'))
    ]
    assert len(by_process) == processes
    steps = {}
    for parts in zip(*by_process, strict=True):
        assert len({part['step'] for part in parts}) == 1
        firsts = [part['first'] for part in parts]
        assert firsts == [index * len(parts[0]['keys']) for index in range(processes)]
        steps[parts[0]['step']] = np.concatenate([part['keys'] for part in parts])
    return steps


def run_to_the_end(data_dir, workdir, processes, devices, **changes):
    """Losses and keys of a run, or of its rest, that nothing disturbs."""
    share = {'processes': processes, 'devices': devices}
    with runs.hosts(data_dir, workdir, **share, **SETTINGS | changes) as started:
        codes = runs.wait(started)
        assert codes == [0] * processes, started[0].output.read_text()
    return runs.losses(workdir), keys_of_steps(workdir, processes)


@pytest.mark.slow
def test_a_run_that_moves_from_two_hosts_to_four_and_to_one(mini_dataset, tmp_path):
    """Weights are split over pairs of devices, on one host and then on two.

    One host gets Ctrl-C, and both stop at the same step; others go on, as if one had done it all.
    Each decodes its share of the pictures: of three, four hosts decode one twice.
    """
    together, changes = tmp_path / 'together', {'mesh.fsdp': 2, 'preview_every': 8}
    changes['preview.vae'] = str(small_vae.make(tmp_path))
    endless = SETTINGS | changes | {'num_steps': 10_000}
    with runs.hosts(mini_dataset, together, processes=2, devices=2, **endless) as started:
        children.wait_until(
            lambda: max(runs.saved_steps(together), default=0) >= 4, started[0].process
        )
        started[1].process.send_signal(signal.SIGINT)
        codes = runs.wait(started)
        outputs = [host.output.read_text() for host in started]
    assert codes == [75, 75], outputs
    stopped = {int(re.search(r'Stopped at step (\d+)', output)[1]) for output in outputs}
    assert stopped == {max(runs.saved_steps(together))}, 'hosts stopped at different steps'
    keys = keys_of_steps(together, 2)
    assert stopped == {max(keys)}
    for hosts in ((4, 1), (1, 4)):
        moved = max(keys)
        end = changes | {'num_steps': moved + 8}
        losses, later_keys = run_to_the_end(mini_dataset, together, *hosts, **end)
        assert min(later_keys) == moved + 1
        keys |= later_keys
    alone, alone_keys = run_to_the_end(mini_dataset, tmp_path / 'alone', 1, 4, **end)
    jax.tree.map(np.testing.assert_array_equal, keys, alone_keys)
    for tag, step in losses | alone:
        # The last step of a part has an evaluation that is not due elsewhere.
        if tag.startswith('train') or step != moved:
            tolerance = EVAL_LOSS_TOLERANCE if tag.startswith('eval') else LOSS_TOLERANCE
            pair = losses[tag, step], alone[tag, step]
            np.testing.assert_allclose(*pair, tolerance, err_msg=f'{tag} {step}')
    for path in (tmp_path / 'alone' / 'previews').iterdir():
        grids = path, together / 'previews' / path.name
        one, other = (np.asarray(Image.open(grid), int) for grid in grids)
        np.testing.assert_allclose(one, other, atol=2)
