"""Pictures of prompts in the folders that judges read: each once, whatever interrupts."""

import gzip
import json
import pathlib
import re

import numpy as np
import pytest
from PIL import Image

from tests import children
from train_lib import draw
from train_lib.learning import flow
from train_lib.results import prompt_sets

PROMPTS = ['a red circle', 'a blue square', 'a green triangle']
GENEVAL = [{'tag': 'colors', 'include': [{'class': 'cup', 'count': 1}], 'prompt': PROMPTS[0]}]


@pytest.fixture
def pictures_of(small_run, tmp_path):
    """Draws prompts, four pictures at a time; the folder of the pictures."""

    def draw_all(path, count: int, **options):
        artist = draw.Artist(small_run[0], batch_size=4, **options)
        prompts = prompt_sets.read_prompts(path, count)
        place = tmp_path / 'evaluation'
        folder = pathlib.Path(prompt_sets.draw_prompts(artist, prompts, count, place, path.stem))
        return folder, {str(x.relative_to(folder)): x for x in folder.rglob('*') if x.is_file()}

    return draw_all


def test_lines_and_geneval_get_numbered_folders(pictures_of, small_run, tmp_path):
    path = tmp_path / f'lines{"_" * 240}.txt'
    path.write_text('\n'.join(PROMPTS))
    folder, files = pictures_of(path, 2)
    drawn = draw.draw_pictures(small_run[0], np.repeat(PROMPTS, 2).tolist(), batch_size=4)
    for number, prompt in enumerate(PROMPTS):
        metadata = files.pop(f'{number:05}/metadata.jsonl')
        assert json.loads(metadata.read_text()) == {'prompt': prompt}
        for picture in range(2):
            file = files.pop(f'{number:05}/samples/{picture:05}.png')
            with Image.open(file) as image:
                np.testing.assert_array_equal(image, drawn[2 * number + picture])
    assert not files
    assert folder.name.startswith('prompts_lines____')
    path = path.with_suffix('.jsonl')
    path.write_text('\n'.join(map(json.dumps, GENEVAL)))
    _, files = pictures_of(path, 1)
    assert files.keys() == {'00000/metadata.jsonl', '00000/samples/00000.png'}
    assert json.loads(files['00000/metadata.jsonl'].read_text()) == GENEVAL[0]


def test_a_prompt_that_no_model_takes_is_named_before_others_are_drawn(
    pictures_of, tmp_path, monkeypatch
):
    facts = flow.no_stats(0, text_encoder='labels', vocabulary=10, text_max_tokens=1)
    monkeypatch.setattr(draw.Artist, 'facts', property(lambda _: facts, lambda *_: None), False)
    path = tmp_path / 'classes.txt'
    path.write_text('7\n10\n')
    with pytest.raises(ValueError, match="'10' has token 10, expected one of the 10 tokens"):
        pictures_of(path, 4)
    assert not list((tmp_path / 'evaluation').rglob('*.png'))


@pytest.mark.parametrize(('count', 'size'), [(2, (64, 32)), (3, (64, 64))])
def test_a_folder_of_prompts_gets_a_grid_each(pictures_of, small_run, tmp_path, count, size):
    source = tmp_path / 'prompts'
    source.mkdir()
    for name, prompt in zip(('a', '10', '9'), PROMPTS, strict=True):
        (source / f'{name}.txt').write_text(prompt.replace(' ', '\n', 1))
    (source / 'README.md').write_text('no prompt')
    _, files = pictures_of(source, count)
    assert files.keys() == {'10.png', '9.png', 'a.png'}
    drawn = draw.draw_pictures(small_run[0], [PROMPTS[1]] * count, batch_size=4)
    with Image.open(files['10.png']) as grid:
        assert grid.size == size
        for number, picture in enumerate(drawn):
            y, x = (32 * part for part in divmod(number, 2))
            np.testing.assert_array_equal(grid.crop((x, y, x + 32, y + 32)), picture)


def test_only_what_is_missing_is_drawn_and_nothing_of_other_settings_is_kept(
    pictures_of, tmp_path, monkeypatch
):
    path = tmp_path / 'lines.txt'
    path.write_text('\n'.join(PROMPTS))
    numbers, draw_batch = [], draw.Artist.draw

    def stop_at_the_second(self, captions, encoder=None, first=0):
        numbers.append(first)
        if len(numbers) == 2:
            raise KeyboardInterrupt
        return draw_batch(self, captions, encoder, first)

    monkeypatch.setattr(draw.Artist, 'draw', stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        pictures_of(path, 2)
    folder, files = pictures_of(path, 2)
    assert numbers == [0, 4, 4] and len(files) == 9
    before = {name: (x.stat().st_mtime_ns, x.read_bytes()) for name, x in files.items()}
    files['00001/samples/00001.png'].unlink()
    again, files = pictures_of(path, 2)
    assert again == folder and numbers == [0, 4, 4, 0]
    after = {name: (x.stat().st_mtime_ns, x.read_bytes()) for name, x in files.items()}
    assert {name for name in before if before[name] != after[name]} == {'00001/samples/00001.png'}
    assert after['00001/samples/00001.png'][1] == before['00001/samples/00001.png'][1]
    assert pictures_of(path, 2, average=False)[0] != folder


# Ends of lines by Unicode, and of other systems: only a line feed ends a prompt.
@pytest.mark.parametrize('letter', [*'\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r'])
def test_a_line_ends_at_a_line_feed_alone(tmp_path, letter):
    prompts = [f'a red{letter}circle', 'a blue square']
    (tmp_path / 'x.txt').write_bytes('\r\n'.join(prompts).encode())
    assert [x.text for x in prompt_sets.read_prompts(tmp_path / 'x.txt', 1)] == prompts
    lines = [json.dumps({'prompt': text}, ensure_ascii=False) for text in prompts]
    (tmp_path / 'x.jsonl').write_bytes('\n'.join(lines).encode())
    assert [x.text for x in prompt_sets.read_prompts(tmp_path / 'x.jsonl', 1)] == prompts


BAD = {
    'JSON without a prompt': (
        'x.jsonl',
        '{"tag": "colors"}',
        4,
        r"x\.jsonl: '{\"tag\": \"colors\"}' is not JSON like",
    ),
    'a line that is no JSON': ('x.jsonl', 'a red circle', 4, r"'a red circle' is not JSON like"),
    'a blank prompt': ('x.jsonl', '{"prompt": " "}', 4, 'is not JSON like'),
    'half of a surrogate pair': ('x.jsonl', r'{"prompt": "a \ud83d"}', 4, 'is not JSON like'),
    'lists without end': ('x.jsonl', '[' * 100_000, 4, r"'\[{80}' is not JSON like"),
    'no caption': ('x.txt', ' \n', 4, r'x\.txt holds no caption'),
    'five pictures of a prompt': ('', '', 5, r'pictures_per_prompt=5: expected 1 to 4'),
    'no prompt': ('', '', 4, r'holds no prompt'),
}


@pytest.mark.parametrize(('name', 'content', 'count', 'message'), BAD.values(), ids=BAD)
def test_bad_prompts_are_refused(tmp_path, name, content, count, message):
    if name:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        prompt_sets.read_prompts(tmp_path / name, count)


UNREADABLE = {
    'compressed': (
        'bucket/packed.txt',
        'gs://bucket/packed.txt: has Content-Encoding: gzip, expected none.',
    ),
    'missing': (
        'bucket/missing.txt',
        'gs://bucket/missing.txt is missing or a folder; expected a file.',
    ),
    'in no bucket': (
        'no-such-bucket/x.txt',
        'gs://no-such-bucket: there is no such bucket.',
    ),
}


@pytest.mark.parametrize(('name', 'message'), UNREADABLE.values(), ids=UNREADABLE)
def test_prompts_of_a_bucket_that_cannot_be_read_are_named_with_a_cure(gcs, name, message):
    gcs.put('bucket', 'packed.txt', gzip.compress(b'a red circle'), encoding='gzip')
    with pytest.raises((OSError, ValueError), match=f'^{re.escape(message)}'):
        prompt_sets.read_prompts(f'gs://{name}', 1)


@pytest.mark.slow
def test_the_command_names_the_folder(small_run, tmp_path):
    (tmp_path / 'step.txt').write_text('\n'.join(PROMPTS))
    flags = f'--workdir={small_run[0]}@4', '--num_steps=1'
    done = children.program('train_lib.evaluate', *flags, f'--prompts={tmp_path / "step.txt"}')
    assert done.returncode == 0, done.stderr
    folder = done.stdout.removeprefix('pictures: ').strip()
    assert folder.startswith(f'{small_run[0]}/evaluation/prompts_step_000004_')
    for extra in ([], ['--truth='], ['--features=clip', '--prompts=x.txt']):
        done = children.program('train_lib.evaluate', *flags, *extra)
        assert done.returncode == 1
        assert 'expected one of --features, --truth' in done.stderr.splitlines()[-1]
