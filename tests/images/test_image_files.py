"""Every file, member and row that looks like an image is taken, or has a reason why not."""

import io
import json
import os
import pathlib
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds import captioned_images
from coyo11m_tfds.foreign import tar_members
from coyo11m_tfds.images import image_files, source_image
from coyo11m_tfds.pictures.pixels import OtherImageError
from coyo11m_tfds.source.encoding_file import Encoding
from coyo11m_tfds.storage.scratch import Scratch
from tests import hostile_images

JPEG, PNG, GIF = (hostile_images.encode(hostile_images.photo(), x) for x in ('JPEG', 'PNG', 'GIF'))


def find(root: object, **options: bool) -> image_files.FoundImages:
    return image_files.find_images(root, '', lambda sizes: [slice(len(sizes))], **options)


def look(root: object, scratch: object) -> tuple[list[source_image.SourceImage], dict[str, str]]:
    """Returns the images that are taken, and the reasons of the others."""
    parts, left = find(root)
    taken, reasons = [], dict(left)
    for part in parts:
        with part.open(Scratch(scratch)) as images:
            for image in images:
                try:
                    image.read()
                except OtherImageError as error:
                    reasons[image.name] = error.reason
                else:
                    taken.append(image)
    assert len({image.key for image in taken}) == len(taken)
    return taken, reasons


def names_and_reasons(root: object, scratch: object) -> tuple[set[str], dict[str, str]]:
    taken, reasons = look(root, scratch)
    return {image.name for image in taken}, reasons


def write(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_tar(path: pathlib.Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.TarFile(path, 'w') as tar:
        for name, data in members:
            tar_members.add_member(tar, name, data)


def write_parquet(path: pathlib.Path, **columns: list) -> None:
    pq.write_table(pa.table(columns), path)


def tar_bytes(*names: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.TarFile(fileobj=stream, mode='w') as tar:
        for name in names:
            tar_members.add_member(tar, name, JPEG)
    return stream.getvalue()


TAKEN = {
    *('a.jpg', 'B.JPG', 'c.jfif', 'd.jpe', 'e.Jpeg', 'f.png', 'g.webp', 'photo.v2.jpg'),
    *('below/x.jpg/a.png', 'c d/ü.jpg', 'empty.jpg'),
}
LEFT = {
    **{f'x.{x}': x.upper() for x in ('avif', 'heic', 'heif', 'gif', 'tif', 'tiff', 'bmp', 'jxl')},
    **{f'{x}/y.{x}': x.upper() for x in ('jp2', 'psd', 'ico', 'svg', 'dng', 'cr2', 'nef')},
    'Z.HEIC': 'HEIC',
    '._a.jpg': 'hidden',
    '__MACOSX/._a.jpg': 'hidden',
    '.thumbnails/a.png': 'hidden',
    'a.zip': 'archive',
    'a.7z': 'archive',
    'a.tar.gz': 'archive',
    'below/a.tgz': 'archive',
    'a.tar.zst': 'archive',
    'b.jpg.gz': 'compressed',
    'no_suffix': 'JPEG by its bytes, not by its name',
    'photo.jpg?w=300': 'PNG by its bytes, not by its name',
    'photo.v2': 'GIF by its bytes, not by its name',
    # Beside one without blanks.
    ' a.jpg ': 'JPEG by its bytes, not by its name',
}
HEADS = {'no_suffix': JPEG, 'photo.jpg?w=300': PNG, 'photo.v2': GIF, 'empty.jpg': b''}
FILES = {name: HEADS.get(name, JPEG) for name in (*TAKEN, *LEFT)} | {
    'LICENSE': b'All rights are mine, and these are more than 16 bytes.',
    'short': b'x',
    'nothing': b'',
    'notes.txt': b'',
    'captions.json.gz': b'',
}


def test_every_file_of_a_folder_is_taken_or_has_a_reason(tmp_path):
    folder = write(tmp_path / 'photos', FILES)
    assert names_and_reasons(folder, tmp_path) == (TAKEN, LEFT)


def test_every_object_is_taken_or_has_a_reason(bucket, tmp_path):
    bucket.upload_folder(write(tmp_path / 'photos', FILES), 'gs://images/photos')
    assert names_and_reasons('gs://images/photos', tmp_path) == (TAKEN, LEFT)


def test_every_member_of_a_tar_is_taken_or_has_a_reason(tmp_path):
    """With names that only a tar can have."""
    members = [*FILES.items(), ('./dot.jpg', JPEG), ('twice.jpg', JPEG), ('twice.jpg', PNG)]
    members += [('twice.txt', b'Old.'), ('twice.txt', b'New.'), ('in.tar', b'')]
    (tmp_path / 'photos').mkdir()
    write_tar(tmp_path / 'photos' / 'a.tar', members)
    taken, reasons = look(tmp_path / 'photos', tmp_path)
    names = TAKEN | {'./dot.jpg', 'twice.jpg'}
    assert {image.name for image in taken} == {f'a.tar/{name}' for name in names}
    assert reasons.pop('a.tar/twice.jpg') == 'replaced by a later of its name'
    assert reasons == {f'a.tar/{name}': reason for name, reason in LEFT.items()}
    [twice] = [image for image in taken if image.name == 'a.tar/twice.jpg']
    assert (twice.caption, twice.size) == ('New.', len(PNG))


def test_texts_of_a_tar_that_no_image_has_are_named(tmp_path):
    """Images have those up to their first dot, as a sample of WebDataset."""
    used = ['a.jpg', 'a.txt', 'b.image.jpg', 'b.txt', 'c.heic', 'c.json', 'd.v2.png', 'd.v2.json']
    unused = {
        'e.txt': ".txt of no image's name",
        'a.TXT': '.txt beside another of its name',
        'a.caption.txt': ".txt of no image's name",
        'sub/a.JSON': ".json of no image's name",
        'a.cls': '.cls, expected .txt or .json',
        'b.text': '.text, expected .txt or .json',
    }
    members = [(name, JPEG) for name in (*used, *unused, '._a.txt', 'a.npy')]
    (tmp_path / 'photos').mkdir()
    write_tar(tmp_path / 'photos' / 'x.tar', members)
    [part] = find(tmp_path / 'photos').parts
    with part.open(Scratch(tmp_path)) as images:
        assert len(list(images)) == 4
    assert part.unused_texts == {f'x.tar/{name}': reason for name, reason in unused.items()}


def test_what_is_not_taken_of_a_tar_is_no_end_of_its_pictures(tmp_path, caplog):
    write_tar(tmp_path / 'a.tar', [('._a.jpg', JPEG), ('a.jpg', JPEG), ('b.gif', GIF)])
    [batch] = captioned_images.read_images(tmp_path, (8, 8), batch_size=2)
    assert (batch.names, batch.pictures.shape) == (['a.tar/a.jpg'], (1, 8, 8, 3))
    assert 'Not taken: 2 files such as a.tar/._a.jpg (hidden)' in caplog.text
    write_tar(tmp_path / 'a.tar', [('b.gif', GIF)])
    with pytest.raises(ValueError, match='has no images that are taken'):
        list(captioned_images.read_images(tmp_path, (8, 8), batch_size=2))


@pytest.mark.parametrize('kind', [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE])
def test_links_in_a_tar_are_refused_by_name(tmp_path, kind):
    member = tarfile.TarInfo('again.jpg')
    member.type, member.linkname = kind, 'a.jpg'
    with tarfile.TarFile(tmp_path / 'a.tar', 'w') as tar:
        tar_members.add_member(tar, 'a.jpg', JPEG)
        tar.addfile(member)
    with pytest.raises(ValueError, match=r"a\.tar: 'again\.jpg' is a link, .*--hard-dereference"):
        look(tmp_path, tmp_path)


@pytest.mark.parametrize('kind', ['folder', 'tar'])
def test_images_that_share_their_data_have_keys_of_their_own(tmp_path, kind):
    data = {'c': 7, 'photo': 8, 'one.v2': 9, 'one': 10}
    files = {f'{x}.json': json.dumps({'key': key, 'caption': x}) for x, key in data.items()}
    members = {name: text.encode() for name, text in files.items()}
    images = ['c.jpg', 'c.JPG', 'photo.png', 'photo.small.jpg', 'one.v2.jpg']
    members |= dict.fromkeys(images, JPEG)
    (tmp_path / 'photos').mkdir()
    if kind == 'tar':
        write_tar(tmp_path / 'photos' / 'a.tar', list(members.items()))
    else:
        write(tmp_path / 'photos', members)
    taken, _ = look(tmp_path / 'photos', tmp_path)
    captions = {image.name.removeprefix('a.tar/'): image.caption for image in taken}
    keys = {
        image.caption: image.key for image in taken if image.key_rule == source_image.KEY_OF_DATA
    }
    assert keys == {'photo': 8, 'one.v2': 9}
    # Only in tars do names end at the first dot.
    small = 'photo' if kind == 'tar' else ''
    assert captions == dict(zip(images, ['c', 'c', 'photo', small, 'one.v2'], strict=True))


def test_a_row_of_a_table_is_of_one_image_and_its_key_too(tmp_path):
    """Whether an image shares its name without the suffix, and with it a `.json`, or not."""
    rows = [{'file_name': 'a.jpg', 'key': 1}, {'file_name': 'a.png', 'key': 2}]
    files = {'a.jpg': JPEG, 'a.png': PNG, 'a.json': b'{"key": 3, "caption": "Of both."}'}
    files['metadata.jsonl'] = b'\n'.join(json.dumps(row).encode() for row in rows)
    taken, _ = look(write(tmp_path / 'photos', files), tmp_path)
    keys = {image.name: image.key for image in taken}
    assert keys == {'a.jpg': 1, 'a.png': 2}
    assert {image.caption for image in taken} == {'Of both.'}


def test_images_of_all_kinds_in_one_folder_are_taken(tmp_path):
    files = {'assets/teaser.png': PNG, 'latents/encoding.json': Encoding({}).to_bytes()}
    # Which is of another program.
    files['videos/encoding.json'] = b'{}'
    folder = write(tmp_path / 'photos', files)
    write_tar(folder / 'videos' / '0.tar', [('a.jpg', JPEG)])
    write_tar(folder / '0.tar', [('a.jpg', JPEG)])
    write_tar(folder / 'latents' / '0.tar', [('a.npy', b'')])
    write_tar(folder / 'empty.tar', [('a.txt', b'')])
    write_parquet(folder / '0.parquet', key=[1], caption=['Of a tar.'])
    write_parquet(folder / 'x.parquet', image=[{'bytes': JPEG, 'path': 'x'}])
    write_parquet(folder / 'y.parquet', image=pa.array([], pa.binary()))
    taken, left = {'assets/teaser.png', '0.tar/a.jpg', 'videos/0.tar/a.jpg', 'x.parquet/0'}, {}
    left['empty.tar'], left['y.parquet'] = 'tar without images', 'Parquet file without rows'
    assert names_and_reasons(folder, tmp_path) == (taken, left)
    write_parquet(folder / 'z.parquet', jpg=[JPEG], key=[1])
    with pytest.raises(ValueError, match=r"z\.parquet: has images in its columns \['jpg'\]"):
        look(folder, tmp_path)


def test_linked_folders_and_files(tmp_path):
    """Each once, under the name that it has without links, if it has one."""
    elsewhere = write(tmp_path / 'elsewhere', {'b.jpg': JPEG, 'deep/c.jpg': JPEG})
    folder = write(tmp_path / 'photos', {'real/a.jpg': JPEG, 'z/z.jpg': JPEG})
    for name, target in {
        'album': elsewhere,
        'again': elsewhere,
        'a_link_of_real': folder / 'real',
        'real/up': '..',
        'real/out': '../..',
        'z/self': '.',
        'file.jpg': elsewhere / 'b.jpg',
        'gone.jpg': 'nowhere.jpg',
        'gone': 'nowhere',
        'loop.jpg': 'loop.jpg',
        'gone.txt': 'nowhere',
    }.items():
        (folder / name).symlink_to(target)
    (elsewhere / 'back').symlink_to(folder)
    os.mkfifo(folder / 'pipe.jpg')
    expected = {'again/b.jpg', 'again/deep/c.jpg', 'real/a.jpg', 'z/z.jpg', 'file.jpg'}
    broken_names = ['gone.jpg', 'gone', 'gone.txt', 'loop.jpg', 'pipe.jpg']
    left = dict.fromkeys(broken_names, 'link to no file')
    assert names_and_reasons(folder, tmp_path) == (expected, left)


def test_what_has_only_other_images_is_named(tmp_path):
    folder = write(tmp_path / 'photos', {'a.heic': b'', 'b.zip': b''})
    message = r'has no images, expected \.jpg.* 2 .*a\.heic \(HEIC\)\. ImageMagick '
    with pytest.raises(ValueError, match=message):
        find(folder)


SAMPLES = {'000000000': 7, '000000001': 8, '000000005': 9}


def write_run(folder: pathlib.Path, kind: str, keys: dict[str, int], image: bytes = JPEG) -> None:
    """Writes what one run of img2dataset makes, whose keys begin at the same numbers."""
    folder.mkdir(parents=True)
    data = {stem: json.dumps({'key': f'{key:09}'}).encode() for stem, key in keys.items()}
    files = {f'{stem}.json': text for stem, text in data.items()}
    files |= {f'{stem}.jpg': image for stem in data}
    if kind == 'files':
        write(folder / '00000', files)
    elif kind == 'tars':
        write_tar(folder / '00000.tar', sorted(files.items()))
    else:
        texts = [f'{key:09}' for key in keys.values()]
        write_parquet(folder / '00000.parquet', key=texts, image=[image] * len(keys))


@pytest.mark.parametrize('kind', ['files', 'tars', 'tables'])
@pytest.mark.parametrize('place', ['disk', 'bucket'])
def test_keys_that_repeat_are_found_at_once(request, tmp_path, monkeypatch, kind, place):
    monkeypatch.setattr(image_files, '_MANY_KEYS', 0)
    monkeypatch.setattr(image_files, '_LEAST_KEYS', 2)
    monkeypatch.setattr('coyo11m_tfds.images.image_tar._HEAD', 30_000)
    write_run(tmp_path / 'runs' / '1', kind, SAMPLES)
    # Images that are not read.
    large = JPEG + bytes(20_000)
    write_run(tmp_path / 'runs' / '2', kind, {'000000002': 11, '000000001': 8}, large)
    root = str(tmp_path / 'runs')
    if place == 'bucket':
        request.getfixturevalue('bucket').upload_folder(root, 'gs://images/runs')
        root = 'gs://images/runs'
    parts, _ = find(root)
    with pytest.raises(ValueError, match=r'^1/0.* and 2/0.* have the same key, 8, .*--keys=path'):
        image_files.check_first_images(parts)
    parts, _ = find(root, has_keys_of_paths=True)
    image_files.check_first_images(parts)
    for part in parts:
        with part.open(Scratch(tmp_path)) as images:
            assert {image.key_rule for image in images} == {source_image.KEY_OF_HASH}
    parts, _ = find(f'{root}/1')
    image_files.check_first_images(parts)
