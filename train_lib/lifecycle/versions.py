"""The versions of data sets that a run reads, where a storage keeps several, as the hub does.

A run reads one version from its first step to its last, in all processes, whatever is pushed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from absl import logging

from coyo11m_tfds import storage
from train_lib.lifecycle import hosts


def pin_data_sets(
    config: ml_collections.ConfigDict, saved_config: Mapping[str, Any] | None
) -> ml_collections.ConfigDict:
    """Returns a configuration whose data sets on the hub are named at a commit.

    A data set without a commit is read at that of the last checkpoint, or else at its present one.
    All processes call this together, and agree.

    Args:
        config: Configuration of a run.
        saved_config: That in its last checkpoint; None for a new run.

    Raises an OSError if the hub does not answer.
    """
    places = list_places(config)
    if not any(map(_has_versions, places)):
        return config
    saved_places = list_places(saved_config) if saved_config else []
    pinned = json.loads(hosts.take_from_first(lambda: _pin_all(places, saved_places)))
    # A copy: the caller's configuration names the data sets as the user does.
    pinned_config = config.copy_and_resolve_references()
    if config.data.mix:
        sources = []
        for source, place in zip(config.data.mix, pinned, strict=True):
            if place:
                source = {**source, 'dir': place}
            sources.append(source)
        pinned_config.data.mix = tuple(sources)
    else:
        [pinned_config.data.dir] = pinned
    return pinned_config


def list_places(config: Mapping[str, Any]) -> list[str]:
    """Returns the folders of the data sets of a configuration, in its order; '' for none."""
    data = config['data']
    if not data['mix']:
        return [data['dir']]
    places = []
    for source in data['mix']:
        # What is no source of a mixture is refused when it is opened.
        is_source = isinstance(source, Mapping) and 'dir' in source
        places.append(str(source['dir']) if is_source else '')
    return places


def list_versions(config: Mapping[str, Any]) -> list[str]:
    """Returns the folders that name a version which anybody can read."""
    return [place for place in list_places(config) if _has_versions(place)]


def _has_versions(place: str) -> bool:
    """Whether the storage of a place keeps former versions of what it holds."""
    return storage.class_of(place).keeps_versions


def _pin_all(places: Sequence[str], saved_places: Sequence[str]) -> str:
    """Returns the versions of all places as JSON."""
    return json.dumps([_pin(place, saved_places) for place in places])


def _pin(place: str, saved_places: Sequence[str]) -> str:
    """Returns the version of a data set to read; `place` where there is none, which is found later.

    Logs it if there is a newer version than that of the checkpoint.
    """
    if not _has_versions(place):
        return place
    folder = storage.open_folder(place)
    saved = ''
    for saved_place in saved_places:
        if _has_versions(saved_place) and storage.open_folder(saved_place).is_version_of(folder):
            saved = saved_place
    try:
        present = folder.pin().folder
    except FileNotFoundError:
        # What has been removed since may still be read at its commit.
        return saved or place
    if saved and saved != present:
        logging.info(
            f'{place} has changed since this run began: the run goes on with {saved}. To read the '
            f'new version, name it: {present}.'
        )
    return saved or present
