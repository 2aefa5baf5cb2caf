"""Captions of images: found beside them in every form that others give them, or told to be lost."""

import base64
import csv
import json
import pathlib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds.images import image_files, image_texts, source_image
from coyo11m_tfds.pictures.pixels import BadImageError
from coyo11m_tfds.storage.scratch import Scratch
from tests import made_images
from tests.fakes import latent_files

IMAGE = made_images.make_images(1)[0].data


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / 'images'
    path.mkdir()
    return path


class Found(NamedTuple):
    image: source_image.SourceImage
    data: bytes
    reason: str  # of a bad image


def find(folder: pathlib.Path, caption_column: str = '') -> list[Found]:
    """All images of a folder, in order."""

    def divide(sizes: Sequence[int]) -> list[slice]:
        return [slice(k, k + 4) for k in range(0, len(sizes), 4)]

    found = []
    for part in image_files.find_images(folder, caption_column, divide).parts:
        with part.open(Scratch(folder.parent / 'scratch')) as images:
            for image in images:
                try:
                    found.append(Found(image, image.read(), ''))
                except BadImageError as error:
                    found.append(Found(image, b'', error.reason))
    return found


def captions_of(folder: pathlib.Path, caption_column: str = '') -> dict[str, str]:
    """The captions of good images, by name."""
    return {x.image.name: x.image.caption for x in find(folder, caption_column) if x.data}


def bad_of(folder: pathlib.Path) -> dict[str, str]:
    """The reasons of bad images, by name."""
    return {x.image.name: x.reason for x in find(folder) if x.reason}


def write_images(folder: pathlib.Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(IMAGE)


def write_table(folder: pathlib.Path, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if kind == 'jsonl':
        lines = [json.dumps(row) for row in rows]
        (folder / 'metadata.jsonl').write_text('\n'.join(lines))
        return
    with (folder / 'metadata.csv').open('w') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(folder: pathlib.Path, **columns: Any) -> None:
    count = len(next(iter(columns.values())))
    pq.write_table(pa.table({'image': [IMAGE] * count} | columns), folder / 'x.parquet')


BAD_ROWS = {
    'a comma in a text': (
        '1.jpg,a dog, running\n2.jpg,b\n',
        r'row 1 \(line 2\) has 3 cells, expected 2 as in its',
    ),
    'a text less': ('1.jpg,a\n2.jpg\n', r'row 2 \(line 3\) has 1 cell, expected 2'),
    'a quote that does not end': (
        '1.jpg,"a big dog\n2.jpg,b\n',
        r'row 1 \(up to line 3\) is no row of CSV',
    ),
    'a quote that ends in the next row': (
        '1.jpg,"a big dog\n2.jpg,"b"\n',
        r'row 1 \(up to line 3\) is no row of CSV',
    ),
    'a quote that ends early': (
        '1.jpg,"a" dog\n2.jpg,b\n',
        r'row 1 \(up to line 2\) is no row of CSV',
    ),
    'a quote after a space': ('1.jpg, "a, dog"\n', r'row 1 \(line 2\) has 3 cells'),
    'zeros at the end': ('1.jpg,a\n\0\0\0', r'row 2 \(line 3\) has 1 cell'),
}


@pytest.mark.parametrize(('rows', 'message'), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_of_csv_of_which_a_text_would_be_cut_or_swallowed_is_refused(folder, rows, message):
    write_images(folder, '1.jpg', '2.jpg')
    (folder / 'metadata.csv').write_text(f'file_name,text\n{rows}')
    with pytest.raises(ValueError, match=rf'images/metadata\.csv: {message}'):
        find(folder)


@pytest.mark.parametrize(
    'header', ['file_name\ttext', 'file_name;text', 'name,text', 'file_name,text,text']
)
def test_a_header_of_csv_that_names_no_files_is_refused(folder, header):
    write_images(folder, '1.jpg')
    (folder / 'metadata.csv').write_text(f'{header}\n1.jpg,a\n')
    with pytest.raises(ValueError, match=r'metadata\.csv: its header is \[.*, expected different'):
        find(folder)


def test_texts_of_csv_may_be_long_and_hold_anything(folder):
    texts = ['a' * 140_000, 'b, "c"\r\nd', '\0', 'a 12" pipe', '', ' e ']
    names = [f'{n}.jpg' for n in range(len(texts))]
    write_images(folder, *names)
    rows = [
        {'file_name': n, 'text': x, 'more': 'm' * 200_000}
        for n, x in zip(names, texts, strict=True)
    ]
    write_table(folder, 'csv', rows)
    assert captions_of(folder) == dict(zip(names[1:], texts[1:], strict=True))
    assert bad_of(folder) == {'0.jpg': 'too long caption'}


WORDS = ['1984', 'nan', 'null', 'true', '1e5', '-inf', '007', '1_000', 'None']


@pytest.mark.parametrize('column', ['text', 'title'])
@pytest.mark.parametrize('kind', ['csv', 'jsonl', 'json', 'txt', 'tar', 'parquet'])
def test_a_caption_that_reads_as_a_number_stays_a_text(folder, kind, column):
    caption_column = '' if column == 'text' else column
    names = [f'{n}.jpg' for n in range(len(WORDS))]
    if kind == 'parquet':
        write_parquet(folder, **{column: WORDS})
    elif kind == 'tar':
        parts = [{'jpg': IMAGE, 'json': {column: word}} for word in WORDS]
        latent_files.write_tar(folder / 'x.tar', {f'{n}': x for n, x in enumerate(parts)})
    else:
        write_images(folder, *names)
        rows = [{'file_name': n, column: x} for n, x in zip(names, WORDS, strict=True)]
        if kind in ('csv', 'jsonl'):
            write_table(folder, kind, rows)
        for name, word in zip(names, WORDS, strict=True):
            text = word if kind == 'txt' else json.dumps({column: word})
            if kind in ('txt', 'json'):
                (folder / name).with_suffix(f'.{kind}').write_text(text)
        if kind == 'txt':
            caption_column = caption_column and 'txt'
    assert list(captions_of(folder, caption_column).values()) == WORDS


def test_other_cells_of_csv_are_numbers(folder):
    write_images(folder, 'a.jpg')
    (folder / 'metadata.csv').write_text('file_name,text,key,score,id,no\na.jpg,x,7,0.5,1_000,٣\n')
    [(image, _, _)] = find(folder)
    assert (image.key, image.numbers, image.caption) == (7, {'score': 0.5}, 'x')


@pytest.mark.parametrize(
    ('value', 'caption'),
    [
        (1984, '1984'),
        (True, 'true'),
        (2.5, '2.5'),
        (None, ''),
        (['', 'a', 'b'], 'a'),
        ([], ''),
        ({'en': 'a'}, ''),
    ],
)
@pytest.mark.parametrize('kind', ['json', 'jsonl'])
def test_values_of_json_in_place_of_a_caption(folder, kind, value, caption):
    write_images(folder, 'a.jpg', 'b.jpg')
    rows = [{'file_name': 'a.jpg', 'alt': value}, {'file_name': 'b.jpg', 'alt': 'b'}]
    if kind == 'jsonl':
        write_table(folder, kind, rows)
    for row in rows:
        if kind == 'json':
            (folder / row['file_name']).with_suffix('.json').write_text(json.dumps(row))
    assert captions_of(folder, 'alt') == {'a.jpg': caption, 'b.jpg': 'b'}


@pytest.mark.parametrize(
    'kind',
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.binary()),
        pa.dictionary(pa.uint32(), pa.large_string()),
    ],
    ids=str,
)
@pytest.mark.parametrize('column', ['text', 'title'])
def test_texts_of_parquet_may_have_any_of_arrows_types(folder, kind, column):
    texts = pa.array(['b', None, '', 'ä'], pa.string()).cast(kind)
    lists = pa.array([['', 'b'], None, [], ['ä', 'c']], pa.list_(pa.string()))
    caption_column = '' if column == 'text' else column
    expected = ['b', '', '', 'ä']
    for values in (texts, lists, lists.cast(pa.large_list(pa.binary()))):
        write_parquet(folder, **{column: values})
        assert list(captions_of(folder, caption_column).values()) == expected


def test_a_column_that_is_no_text_is_refused_as_captions(folder):
    for values in ([1, 2], [{'en': 'a'}, {'en': 'b'}]):
        write_parquet(folder, title=values)
        assert list(captions_of(folder).values()) == ['', '']
        with pytest.raises(ValueError, match=r"x\.parquet: column 'title' is .*, expected texts"):
            find(folder, 'title')
    # Nor is a number of the usual name, such as that of captions, where there are texts.
    write_parquet(folder, captions=[5, 5], text=['a', 'b'])
    assert list(captions_of(folder).values()) == ['a', 'b']


@pytest.mark.parametrize('value', [None, []])
def test_images_whose_column_of_captions_is_empty_have_none(folder, value):
    write_images(folder, 'a.jpg')
    (folder / 'a.json').write_text(json.dumps({'alt': value, 'url': 'x'}))
    assert captions_of(folder, 'alt') == {'a.jpg': ''}
    with pytest.raises(ValueError, match="has 'title', expected one of their texts"):
        find(folder, 'title')


CP1252 = 'Das Café.'.encode('cp1252')


@pytest.mark.parametrize('kind', ['txt', 'json', 'csv', 'jsonl', 'tar', 'parquet'])
def test_a_text_that_cannot_be_read_is_a_bad_image(folder, kind):
    write_images(folder, *(['a.jpg', 'b.jpg'] if kind not in ('tar', 'parquet') else []))
    first = 'a.jpg'
    if kind == 'txt':
        (folder / 'a.txt').write_bytes(CP1252)
        (folder / 'b.txt').write_text('b')
    elif kind == 'json':
        (folder / 'a.json').write_text('{"text": "\\ud800"}')
        (folder / 'b.json').write_text('{"text": "b"}')
    elif kind == 'csv':
        lines = [b'file_name,text', b'a.jpg,' + CP1252, b'b.jpg,b']
        (folder / 'metadata.csv').write_bytes(b'\n'.join(lines))
    elif kind == 'jsonl':
        lines = [b'{"file_name": "a.jpg", "text": "' + CP1252 + b'"}']
        lines.append(b'{"file_name": "b.jpg", "text": "b"}')
        (folder / 'metadata.jsonl').write_bytes(b'\n'.join(lines))
    elif kind == 'tar':
        samples = {'a': {'jpg': IMAGE, 'txt': CP1252}, 'b': {'jpg': IMAGE, 'txt': 'b'}}
        latent_files.write_tar(folder / 'x.tar', samples)
        first = 'x.tar/a.jpg'
    else:
        raw = pa.array([CP1252, b'b'], pa.binary())
        text = pa.StringArray.from_buffers(2, *raw.buffers()[1:])
        write_parquet(folder, text=text)
        first = 'x.parquet/0'
    assert bad_of(folder) == {first: 'caption that is no UTF-8'}
    assert list(captions_of(folder).values()) == ['b']


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('["a", "b"]', '.json without names of fields'),
        ('3', '.json without names of fields'),
        ('{"caption": "a', 'damaged .json'),
        (json.dumps({f'{n}': n for n in range(300)}), 'too many fields'),
        (json.dumps({'caption': 'a' * 70_000}), 'too long caption'),
        (' ' * (2 << 20), 'too large .json'),
    ],
)
def test_a_json_that_is_not_taken_is_told_as_it_is(folder, text, reason):
    write_images(folder, 'a.jpg')
    (folder / 'a.json').write_text(text)
    assert bad_of(folder) == {'a.jpg': reason}


@pytest.mark.parametrize(
    ('data', 'caption'),
    [
        (b'\xef\xbb\xbfA cat.\r\n', 'A cat.'),
        (b'\nA cat.\n\n', 'A cat.'),
        (b'A cat\r\nand a dog.', 'A cat\nand a dog.'),
        ('\ufeffA cat: ä.\r\n'.encode('utf-16-le'), 'A cat: ä.'),
        ('\ufeffA cat.'.encode('utf-16-be'), 'A cat.'),
        ('A cat\u2028\x0c and a dog. '.encode(), 'A cat\u2028\x0c and a dog. '),
    ],
)
def test_a_text_file_loses_its_mark_and_its_line_ends(folder, data, caption):
    write_images(folder, 'a.jpg')
    (folder / 'a.txt').write_bytes(data)
    assert captions_of(folder) == {'a.jpg': caption}


@pytest.mark.parametrize('mark', ['', '\ufeff'])
@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
@pytest.mark.parametrize(
    ('image', 'name'),
    [
        ('cats/1.jpg', 'cats\\1.jpg'),
        ('cats/1.jpg', './cats//1.jpg'),
        ('cats/1.jpg', '/cats/1.jpg'),
        ('cats/1.jpg', 'Cats/1.JPG'),
        ('1.JPG', '1.jpg'),
        (unicodedata.normalize('NFD', 'café.jpg'), unicodedata.normalize('NFC', 'café.jpg')),
        (
            unicodedata.normalize('NFC', 'Ångström.jpg'),
            unicodedata.normalize('NFD', 'Ångström.jpg'),
        ),
        ('a b.jpg', 'a%20b.jpg'),
        ('a%20b.jpg', 'a b.jpg'),
        ('a.jpg', ' a.jpg '),
    ],
)
def test_names_in_tables_are_those_of_images_however_they_are_written(
    folder, kind, image, name, mark
):
    write_images(folder, image, 'other.jpg')
    write_table(folder, kind, [{'file_name': name, 'text': 'x'}])
    path = folder / f'metadata.{kind}'
    path.write_text(mark + path.read_text())
    assert captions_of(folder) == {image: 'x', 'other.jpg': ''}


@pytest.mark.parametrize(
    ('image', 'text'),
    [
        ('IMG_1.JPG', 'IMG_1.TXT'),
        ('IMG_1.JPG', 'img_1.Json'),
        (unicodedata.normalize('NFD', 'é.jpg'), unicodedata.normalize('NFC', 'é.txt')),
        ('a b.jpg', 'a%20b.txt'),
    ],
)
def test_files_of_texts_have_the_names_of_images_however_they_are_written(folder, image, text):
    write_images(folder, image, 'other.jpg')
    content = 'x' if text.lower().endswith('.txt') else '{"text": "x"}'
    (folder / text).write_text(content)
    assert captions_of(folder) == {image: 'x', 'other.jpg': ''}


@pytest.mark.parametrize('kind', ['files', 'tars', 'tables'])
def test_a_part_without_captions_is_no_error_where_others_have_some(folder, kind):
    for name, fields in {'a': {'url': 'x'}, 'b': {'url': 'y', 'alt': 'b'}}.items():
        if kind == 'files':
            write_images(folder, f'{name}.jpg')
            (folder / f'{name}.json').write_text(json.dumps(fields))
        elif kind == 'tars':
            sample = {'jpg': IMAGE, 'json': fields}
            latent_files.write_tar(folder / f'{name}.tar', {name: sample})
        else:
            columns = {column: [text] for column, text in fields.items()}
            pq.write_table(pa.table({'image': [IMAGE]} | columns), folder / f'{name}.parquet')
    for column, expected in (('alt', ['', 'b']), ('title', None)):
        parts, _ = image_files.find_images(folder, column, lambda sizes: [slice(1), slice(1, 2)])
        image_files.check_first_images(parts)
        captions = []
        for part in parts:
            with part.open(Scratch(folder)) as images:
                if not expected:
                    with pytest.raises(ValueError, match="has 'title', expected one of their"):
                        next(images)
                else:
                    captions += [image.caption for image in images]
        assert captions == (expected or [])


def test_files_of_texts_with_similar_names_lead_to_no_other_image(folder):
    write_images(folder, 'a.jpg', 'A.png', 'b.jpg', 'B.jpg', 'Cc.jpg', 'cC.jpg')
    (folder / 'A.txt').write_text('A')
    (folder / 'b.TXT').write_text('b')
    (folder / 'CC.txt').write_text('c')
    expected = {'A.png': 'A', 'B.jpg': '', 'Cc.jpg': '', 'a.jpg': '', 'b.jpg': 'b', 'cC.jpg': ''}
    assert captions_of(folder) == expected


@pytest.mark.parametrize('names', [('a.txt', 'a.TXT'), ('a.TXT', 'a.txt')])
def test_of_two_texts_of_an_image_one_in_small_letters_counts(tmp_path, names):
    assert image_texts.TextFiles(dict.fromkeys(names), {'a'}).find('a') == {'.txt': 'a.txt'}


def test_a_text_that_changes_while_it_is_read_is_no_part_of_a_caption(folder, tmp_path):
    write_images(folder, 'a.jpg')
    (folder / 'a.txt').write_text('a cat')
    [part] = image_files.find_images(folder, '', lambda sizes: [slice(None)]).parts
    with part.open(Scratch(tmp_path)) as images:
        assert next(images).caption == 'a cat'
        (folder / 'a.txt').write_text('a dog')
    # What was read was another text: the next run reads it again.
    [again] = image_files.find_images(folder, '', lambda sizes: [slice(None)]).parts
    (folder / 'a.txt').write_text('a dog and a cat')
    assert again.texts_digest != part.texts_digest
    with pytest.raises(OSError, match=r'a\.txt has changed'), again.open(Scratch(tmp_path)):
        pass


def test_the_name_of_a_table_may_have_large_letters_and_its_header_blanks(folder):
    write_images(folder, 'a.jpg')
    (folder / 'Metadata.CSV').write_text('file_name, text \na.jpg,x\n')
    assert captions_of(folder) == {'a.jpg': 'x'}


def test_files_that_may_be_those_of_images_without_captions_are_named(folder, caplog):
    write_images(folder, 'a.jpg', 'b.jpg')
    for name in ('a.txt', 'c.txt', 'README.md'):
        (folder / name).write_text('x')
    assert captions_of(folder) == {'a.jpg': 'x', 'b.jpg': ''}
    [message] = [record.getMessage() for record in caplog.records]
    assert message == (
        '1 image has neither a .json or .txt nor a table: b.jpg. 1 file is not used: '
        f'{folder}/c.txt. Captions are in files with the name of their image, metadata.jsonl or '
        'metadata.csv.'
    )
    (folder / 'b.txt').write_text('x')
    caplog.clear()
    find(folder)
    assert not caplog.records


def test_similar_names_lead_to_no_other_image(folder):
    write_images(folder, 'a.jpg', 'A.jpg', 'b.jpg', 'B.jpg', 'c.jpg')
    rows = {
        'A.JPG': '?',
        'a.jpg': 'a',
        'A.jpg': 'A',
        'B.jpg': 'B',
        'C.jpg': 'similar',
        'c.jpg': 'c',
    }
    write_table(folder, 'jsonl', [{'file_name': n, 'text': x} for n, x in rows.items()])
    expected = {'A.jpg': 'A', 'B.jpg': 'B', 'a.jpg': 'a', 'b.jpg': '', 'c.jpg': 'c'}
    assert captions_of(folder) == expected


@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
def test_rows_and_images_without_a_partner_are_named_once(folder, kind, caplog):
    images = [f'{n}.jpg' for n in range(12)]
    write_images(folder, *images)
    names = ['none.jpg', *images[:8], '3.jpg', '../outside.jpg']
    write_table(folder, kind, [{'file_name': x, 'text': x} for x in names])
    assert captions_of(folder)['3.jpg'] == '3.jpg'
    [message] = [record.getMessage() for record in caplog.records]
    place = 'line' if kind == 'jsonl' else 'row'
    assert message == (
        f'{folder}/metadata.{kind}: 2 rows name no image: {place} 1 (none.jpg), {place} 11 '
        '(../outside.jpg); 4 images have no row: 10.jpg, 11.jpg, 8.jpg, ...; 1 row repeats an '
        f'image, of which the first row counts: {place} 10 (3.jpg).'
    )


@pytest.mark.parametrize(
    ('tables', 'unread'),
    [
        (('metadata.csv', 'captions.csv', 'x.TSV'), ['captions.csv', 'x.TSV']),
        (('dogs/metadata.csv', 'dogs/metadata.jsonl'), ['dogs/metadata.csv']),
        (('metadata.csv', 'Metadata.csv', 'METADATA.CSV'), ['METADATA.CSV', 'Metadata.csv']),
        (('cats/metadata.csv', 'metadata.csv', 'dogs/metadata.jsonl'), ['metadata.csv']),
        (('metadata.csv', 'birds/metadata.csv'), ['birds/metadata.csv']),
        (('metadata.csv',), []),
    ],
)
def test_tables_that_are_not_read_are_named(folder, caplog, tables, unread):
    images = ['cats/1.jpg', 'dogs/1.jpg']
    write_images(folder, *images)
    for table in tables:
        path = folder / table
        path.parent.mkdir(exist_ok=True)
        rows = [f'{name},{table}' for name in images]
        if path.parent != folder:
            rows = [f'1.jpg,{table}']
        if table.endswith('.jsonl'):
            path.write_text(json.dumps({'file_name': '1.jpg', 'text': table}))
        else:
            path.write_text('\n'.join(['file_name,text', *rows]))
    captions = captions_of(folder)
    assert sorted({*tables} - {*captions.values()}) == unread
    messages = [x.getMessage() for x in caplog.records if 'not read' in x.getMessage()]
    if not unread:
        assert not messages
        return
    paths = ', '.join(f'{folder}/{name}' for name in unread)
    tables_are = '1 table is' if len(unread) == 1 else f'{len(unread)} tables are'
    assert messages == [
        f'{tables_are} not read: {paths}. An image that is a file has the closest table in its '
        'folder or above, metadata.jsonl before metadata.csv.'
    ]


@pytest.mark.parametrize('kind', ['files', 'tars', 'tables'])
@pytest.mark.parametrize('image', [None, 'photos/a.jpg', 'https://example.com/a.jpg'])
def test_a_parquet_file_of_captions_beside_images_is_named(folder, caplog, kind, image):
    write_images(folder, 'a.jpg')
    if kind == 'tars':
        latent_files.write_tar(folder / 'a.tar', {'a': {'jpg': IMAGE}})
    if kind == 'tables':
        write_parquet(folder, text=['x'])
    if kind != 'files':
        (folder / 'a.jpg').unlink()
    columns = {'key': [1, 2], 'caption': ['x', 'y']}
    # Of where the images are, or were.
    if image:
        columns['image'] = ['', image]
    pq.write_table(pa.table(columns), folder / 'captions.parquet')
    assert len(find(folder)) == 1
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f'1 table is not read: {folder}/captions.parquet. ')
    assert message.endswith('A build takes captions by key from a Parquet file (build --captions).')


@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
def test_rows_of_images_with_a_closer_table_are_named(folder, kind, caplog):
    write_images(folder, '1.jpg', 'cats/2.jpg')
    write_table(folder, kind, [{'file_name': x, 'text': 'far'} for x in ('1.jpg', 'CATS/2.jpg')])
    write_table(folder / 'cats', kind, [{'file_name': '2.jpg', 'text': ''}])
    assert captions_of(folder) == {'1.jpg': 'far', 'cats/2.jpg': ''}
    [message] = [record.getMessage() for record in caplog.records]
    place = 'line' if kind == 'jsonl' else 'row'
    assert message == (
        f'{folder}/metadata.{kind}: 1 row names an image with a closer table: {place} 2 '
        '(CATS/2.jpg).'
    )


@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
def test_rows_in_another_encoding_are_named_with_their_table(folder, kind, caplog):
    write_images(folder, '1.jpg', '2.jpg', '3.jpg')
    write_table(folder, kind, [{'file_name': f'{n}.jpg', 'text': f'Caf{n}'} for n in (1, 2, 3)])
    path = folder / f'metadata.{kind}'
    path.write_bytes(path.read_bytes().replace(b'Caf1', CP1252).replace(b'Caf3', CP1252))
    assert {*bad_of(folder)} == {'1.jpg', '3.jpg'}
    [message] = [record.getMessage() for record in caplog.records]
    place = 'line' if kind == 'jsonl' else 'row'
    assert message == (
        f'{path}: 2 rows are not in UTF-8, in which the table has to be saved: {place} 1 (1.jpg), '
        f'{place} 3 (3.jpg).'
    )


@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
def test_a_table_that_names_no_image_at_all_is_refused(folder, kind):
    write_images(folder, 'cats/1.jpg', 'cats/2.jpg')
    write_table(folder, kind, [{'file_name': 'dogs/1.jpg', 'text': 'x'}])
    message = r'no row names an image, but \w+ 1 \(dogs/1\.jpg\); .* cats/1\.jpg, '
    with pytest.raises(ValueError, match=message):
        find(folder)
    # Those of another table are images, too.
    write_images(folder, 'birds/1.jpg')
    write_table(folder / 'birds', kind, [{'file_name': '1.jpg', 'text': 'close'}])
    write_table(folder, kind, [{'file_name': f'{x}/1.jpg', 'text': 'x'} for x in ('dogs', 'birds')])
    assert captions_of(folder) == {'birds/1.jpg': 'close', 'cats/1.jpg': '', 'cats/2.jpg': ''}


@pytest.mark.parametrize('text', ['', '\n', 'file_name,text\n'])
@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
def test_a_table_without_rows_is_a_count(folder, kind, text):
    if kind == 'jsonl' and text.strip():
        return
    write_images(folder, 'a.jpg')
    (folder / f'metadata.{kind}').write_text(text)
    assert captions_of(folder) == {'a.jpg': ''}


@pytest.mark.parametrize('line', ['[1]', '{"name": "a"}', '{"file_name": 1}', '{"a', 'null'])
def test_a_line_of_json_that_names_no_file_is_refused(folder, line):
    write_images(folder, 'a.jpg')
    (folder / 'metadata.jsonl').write_text('{"file_name": "a.jpg"}\n\n' + line)
    with pytest.raises(ValueError, match=r'metadata\.jsonl: line 3 is '):
        find(folder)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


JPEG, PNG, WEBP = (image.data for image in made_images.make_images(3))


@pytest.mark.parametrize(
    ('images', 'kind'),
    [
        ([JPEG, PNG, WEBP], pa.large_binary()),
        ([JPEG, PNG, WEBP], pa.binary_view()),
        ([encoded(JPEG), encoded(PNG).rstrip('='), encoded(WEBP) + '\n'], pa.string()),
        ([encoded(x).encode() for x in (JPEG, PNG, WEBP)], pa.binary()),
        (
            [
                f'data:image/jpeg;base64,{encoded(JPEG)}',
                base64.urlsafe_b64encode(PNG).decode(),
                base64.encodebytes(WEBP).decode(),
            ],
            pa.large_string(),
        ),
        ([list(x) for x in (JPEG, PNG, WEBP)], pa.list_(pa.uint8())),
        (
            [{'bytes': encoded(JPEG), 'path': 'a'}, {'bytes': PNG, 'path': None}, {'bytes': WEBP}],
            pa.struct([('bytes', pa.binary()), ('path', pa.string())]),
        ),
    ],
    ids=[0, 1, 2, 3, 4, 5, 6],
)
def test_images_of_parquet_may_be_bytes_in_many_forms(folder, images, kind):
    if pa.types.is_struct(kind):
        images[0]['bytes'] = images[0]['bytes'].encode()
    pq.write_table(pa.table({'image': pa.array(images, kind)}), folder / 'x.parquet')
    assert [x.data for x in find(folder)] == [JPEG, PNG, WEBP]


def test_texts_of_parquet_that_are_no_utf_8_are_no_end_of_the_file(folder):
    raw = pa.array([CP1252, JPEG], pa.binary())
    texts = pa.StringArray.from_buffers(2, *raw.buffers()[1:])
    image = pa.StructArray.from_arrays([pa.array([None, JPEG]), texts], ['bytes', 'path'])
    for images, first in ((texts, CP1252), (image, CP1252)):
        pq.write_table(pa.table({'image': images, 'key': texts}), folder / 'x.parquet')
        parts, _ = image_files.find_images(folder, '', lambda sizes: [])
        image_files.check_first_images(parts)
        assert [x.data for x in find(folder)] == [first, JPEG]


@pytest.mark.parametrize(
    ('image', 'reason'),
    [
        ('https://example.com/a.jpg', 'URL in place of an image'),
        ('gs://bucket/a.jpg', 'URL in place of an image'),
        ('photos/a.jpg', 'path or other text in place of an image'),
        ({'bytes': b'', 'path': 'a.jpg'}, 'path or other text in place of an image'),
        ({'bytes': [1, 2], 'path': None}, 'no bytes of an image'),
        ('/9j/4AAQ!', 'damaged base64'),
    ],
)
def test_what_is_no_image_of_parquet_is_told_as_it_is(folder, image, reason):
    pq.write_table(pa.table({'image': [image, None]}), folder / 'x.parquet')
    assert bad_of(folder) == {'x.parquet/0': reason}


@pytest.mark.parametrize('images', [[1], [[[0.5]]], [{'url': 'a'}], [[b'a', b'b']]])
def test_a_column_of_no_images_is_refused(folder, images):
    pq.write_table(pa.table({'image': images}), folder / 'x.parquet')
    message = r"x\.parquet: column 'image' is .*, expected the bytes"
    with pytest.raises(ValueError, match=message):
        find(folder)
    # Also before the files in front of it are encoded.
    parts, _ = image_files.find_images(folder, '', lambda sizes: [])
    with pytest.raises(ValueError, match=message):
        image_files.check_first_images(parts)


def test_a_parquet_file_without_rows_is_a_count(folder):
    write_parquet(folder, text=['a'])
    pq.write_table(pa.table({'image': pa.nulls(0)}), folder / '0.parquet')
    pq.write_table(pa.table({'image': pa.nulls(2), 'text': pa.nulls(2)}), folder / 'y.parquet')
    assert captions_of(folder)['x.parquet/0'] == 'a'


def test_numbers_keep_their_names_in_all_rows(folder):
    values = pa.array([0.5, None], pa.float16())
    write_parquet(folder, score=values, key=['0000012', '13'], width=[1, 2])
    first, second = (x.image for x in find(folder))
    assert (first.key, second.key) == (12, 13)
    assert first.numbers == {'score': 0.5}
    assert list(second.numbers) == ['score'] and np.isnan(second.numbers['score'])
