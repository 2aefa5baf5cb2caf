"""The figures of the shuffle against counting by hand."""

import collections
import itertools
import math
import statistics

import pytest

from benchmarks import shuffle_quality
from coyo11m_tfds.reading.order import Order, OrderSettings

LENGTHS = (901, 640, 0, 33, 777, 1, 850)


@pytest.mark.parametrize('epoch', [0, 2])
def test_an_epoch_is_measured_as_counted_batch_by_batch(epoch, monkeypatch):
    monkeypatch.setattr(shuffle_quality, '_FAR', 500)
    order = Order(LENGTHS, OrderSettings(seed=1, chunk=64, lanes=4, window=200))
    first = epoch * order.lane_length
    batches = [
        list(zip(found.shard.ravel().tolist(), found.record.ravel().tolist(), strict=True))
        for begin in range(first, first + order.lane_length - 11, 12)
        for found in [order.samples(range(4), begin, begin + 12)]
    ]
    chunks = [
        collections.Counter((shard, record // 64) for shard, record in batch) for batch in batches
    ]
    source = [(shard, record) for shard in range(len(LENGTHS)) for record in range(LENGTHS[shard])]
    place = {record: i for i, record in enumerate(itertools.chain.from_iterable(batches))}
    neighbours = [
        (place[one], place[next_])
        for one, next_ in itertools.pairwise(source)
        if one in place and next_ in place
    ]
    distances = [abs(one - next_) for one, next_ in neighbours]

    quality = shuffle_quality.measure(order, 48, epoch)

    pairs = [sum(math.comb(count, 2) for count in counter.values()) for counter in chunks]
    assert quality.pairs == pytest.approx(statistics.mean(pairs))
    assert quality.chunks == pytest.approx(statistics.mean(map(len, chunks)))
    together = [one // 48 == next_ // 48 for one, next_ in neighbours]
    assert quality.same_batch == pytest.approx(statistics.mean(together))
    assert quality.median == statistics.median(distances)
    assert quality.within == statistics.mean(d <= 500 for d in distances)


def test_the_command_prints_a_table(capsys):
    shuffle_quality.main(['--records=100000', '--window=512'])

    header, _, *rows = [
        [cell.strip() for cell in line.split('|')[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert {len(row) for row in rows} == {len(header)}
    settings = [tuple(int(cell.replace(',', '')) for cell in row[:3]) for row in rows[:-1]]
    assert settings == [
        *((64, 512, 16), (32, 512, 16), (128, 512, 16), (256, 512, 16)),
        *((64, 256, 16), (64, 1024, 16), (64, 4096, 16), (64, 128, 64), (64, 32, 256)),
    ]
    by_name = [dict(zip(header, row, strict=True)) for row in rows]
    assert by_name[0]['MB a request'] == '1.7' and by_name[3]['MB a request'] == '6.7'
    assert by_name[0]['MB in windows'] == by_name[-2]['MB in windows'] == '78'
    pairs = [float(row['pairs of a batch from one chunk'].replace(',', '')) for row in by_name]
    assert pairs[1] < pairs[0] < pairs[2] < pairs[3] and pairs[-1] < pairs[6] < pairs[5] < pairs[4]
    assert pairs[-2] == 0
