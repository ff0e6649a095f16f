"""dynamicemb's outer storage on real servers, against a class of the same methods: dynamicemb itself needs a GPU."""

import abc
import enum
import inspect
import json
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch

from client_support import addresses
from pyps_client import Launch
from pyps_client.torch.dynamicemb import TableStorage
from pyps_wire.errors import InvalidArgument

DIMS = 4, 8


class CopyMode(enum.Enum):
    EMBEDDING = "embedding"
    VALUE = "value"


class Storage(abc.ABC):
    """What dynamicemb asks of a storage, by name and parameters."""

    @abc.abstractmethod
    def find(self, unique_keys, table_ids, copy_mode, lfu_accumulated_frequency=None): ...

    @abc.abstractmethod
    def insert(self, keys, table_ids, values, scores=None, preserve_existing=False): ...

    @abc.abstractmethod
    def dump(
        self, table_id, meta_file_path, emb_key_path, embedding_file_path, score_file_path, opt_file_path, timestamp
    ): ...

    @abc.abstractmethod
    def load(
        self,
        table_id,
        meta_file_path,
        emb_file_path,
        embedding_file_path,
        score_file_path,
        opt_file_path,
        include_optim,
        timestamp,
    ): ...

    @abc.abstractmethod
    def embedding_dtype(self): ...

    @abc.abstractmethod
    def embedding_dim(self, table_id): ...

    @abc.abstractmethod
    def value_dim(self, table_id): ...

    @abc.abstractmethod
    def max_embedding_dim(self): ...

    @abc.abstractmethod
    def max_value_dim(self): ...

    @abc.abstractmethod
    def init_optimizer_state(self): ...

    @abc.abstractmethod
    def export_keys_values(self, device, batch_size=65536, table_id=0): ...


@dataclass
class Options:
    dim: int
    embedding_dtype: torch.dtype = torch.float32


class Adagrad:
    """An optimizer with as many numbers of state as the embedding has."""

    def get_state_dim(self, dim):
        return dim

    def get_initial_optim_states(self):
        return 0.25


@pytest.fixture
def storage_on(monkeypatch):
    """Make storages on servers, as dynamicemb makes them of the class it was given."""
    types = ModuleType("dynamicemb.types")
    types.Storage, types.CopyMode = Storage, CopyMode
    monkeypatch.setitem(sys.modules, "dynamicemb", ModuleType("dynamicemb"))
    monkeypatch.setitem(sys.modules, "dynamicemb.types", types)
    made = []

    def make(servers, dtype=torch.float32, **launch):
        external = partial(TableStorage, launch=Launch(servers, **launch))
        made.append(external([Options(dim, dtype) for dim in DIMS], Adagrad()))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def rows(seed, count=50):
    """Return keys of two tables, the tables, values in dynamicemb's columns, and scores."""
    random = np.random.default_rng(seed)
    keys = torch.from_numpy(random.choice(np.iinfo(np.int64).max, count) * random.choice([-1, 1], count))
    tables = torch.from_numpy(random.integers(0, 2, count))
    values = torch.from_numpy(random.normal(size=(count, 16)).astype(np.float32))
    narrow = tables == 0
    values[narrow, DIMS[0] : DIMS[1]] = values[narrow, DIMS[1] + DIMS[0] :] = 0.0
    scores = torch.from_numpy(random.integers(np.iinfo(np.int64).min, np.iinfo(np.int64).max, count))
    return keys, tables, values, scores


def assert_holds(storage, keys, tables, values, scores):
    count, *_, founds, found_scores, found = storage.find(keys, tables, CopyMode.VALUE)
    assert count == 0 and founds.all()
    assert torch.equal(found.view(torch.int32), values.view(torch.int32)) and torch.equal(found_scores, scores)


def test_it_has_the_methods_of_the_abstract_class_with_their_parameters(start_server, storage_on):
    assert isinstance(storage_on(start_server().data), Storage)
    assert all(callable(getattr(TableStorage, name)) for name in Storage.__abstractmethods__)
    for name in Storage.__abstractmethods__ - {"dump", "export_keys_values"}:
        asked, given = (inspect.signature(getattr(each, name)).parameters for each in (Storage, TableStorage))
        assert [(each.name, each.default) for each in asked.values()] == [
            (each.name, each.default) for each in given.values()
        ]


def test_what_is_inserted_is_found_and_what_is_not_is_missing_in_several_tables_at_once(start_server, storage_on):
    storage = storage_on(addresses([start_server(), start_server()]))
    keys, tables, values, scores = rows(1)
    values[0, 0] = -0.0
    there = torch.arange(50) % 3 > 0
    storage.insert(keys[there], tables[there], values[there], scores[there])
    count, missing, places, of_tables, missing_scores, founds, found_scores, found = storage.find(
        keys, tables, CopyMode.VALUE
    )
    assert torch.equal(founds, there) and missing_scores is None
    assert count == 17 and torch.equal(places, torch.nonzero(~there).reshape(-1))
    assert torch.equal(missing, keys[~there]) and torch.equal(of_tables, tables[~there])
    assert torch.equal(found.view(torch.int32)[there], values.view(torch.int32)[there])
    assert torch.equal(found_scores, torch.where(there, scores, 0)) and not found[~there].any()
    # The same keys in the other table are others; a find makes none.
    assert storage.find(keys, 1 - tables, CopyMode.VALUE)[0] == 50
    assert storage.find(keys[:0], tables[:0], CopyMode.VALUE)[0] == 0
    embeddings = storage.find(keys, tables, CopyMode.EMBEDDING)[-1]
    assert torch.equal(embeddings, found[:, : DIMS[1]])
    assert [storage.embedding_dim(1), storage.value_dim(0), storage.max_value_dim()] == [8, 8, 16]
    assert storage.embedding_dtype() == torch.float32 and storage.init_optimizer_state() == 0.25


def test_an_insert_replaces_rows_and_leaves_scores_where_it_is_told_to(start_server, storage_on):
    storage = storage_on(start_server().data)
    keys, tables, values, scores = rows(2)
    storage.insert(keys[:30], tables[:30], values[:30], scores[:30])
    _, _, newer, others = rows(3)
    newer[tables == 0] = torch.where(values[tables == 0] == 0, 0, newer[tables == 0])
    newer[tables == 1] = newer[tables == 1] + (newer[tables == 1] == 0)
    storage.insert(keys, tables, newer, others, preserve_existing=True)
    assert_holds(storage, keys, tables, newer, torch.cat([scores[:30], others[30:]]))
    storage.insert(keys, tables, values, others)
    assert_holds(storage, keys, tables, values, others)


def test_frequencies_are_added_to_scores(start_server, storage_on):
    storage = storage_on(start_server().data)
    keys, tables, values, _ = rows(4)
    storage.insert(keys[:30], tables[:30], values[:30], torch.arange(30))
    *_, missing_scores, founds, scores, _ = storage.find(keys, tables, CopyMode.VALUE, torch.full((50,), 7))
    assert torch.equal(scores[:30], torch.arange(30) + 7) and not scores[30:].any() and founds.sum() == 30
    assert torch.equal(missing_scores, torch.full((20,), 7))


def test_rows_of_few_bits_come_back_as_they_were(start_server, storage_on):
    storage = storage_on(start_server().data, dtype=torch.bfloat16)
    keys, tables, values, scores = rows(5)
    values = values.bfloat16()
    storage.insert(keys, tables, values, scores)
    found = storage.find(keys, tables, CopyMode.VALUE)[-1]
    assert found.dtype == torch.bfloat16 and torch.equal(found, values)


def test_the_bits_outlive_crashes_and_another_process_finds_them(crashing, storage_on):
    doomed = crashing()
    storage = storage_on(doomed.server.data, run_id="rows", worker_id="first")
    inserted = [rows(seed) for seed in range(6)]
    for number, (keys, tables, values, scores) in enumerate(inserted):
        storage.insert(keys, tables, values, scores)
        if number == 2:
            doomed.save()
        if number in (3, 5):
            doomed.crash()
    other = storage_on(doomed.server.data, run_id="rows", worker_id="second")
    for each in inserted:
        assert_holds(storage, *each)
        assert_holds(other, *each)
    # The other has newer versions than the first by now, whose rows are written all the same.
    keys, tables, values, scores = rows(7)
    for _ in range(4):
        other.insert(*rows(8))
    storage.insert(keys, tables, values, scores)
    assert_holds(other, keys, tables, values, scores)


@pytest.mark.parametrize("with_states", [True, False])
def test_files_of_dynamicemb_are_loaded(start_server, storage_on, monkeypatch, tmp_path, with_states):
    storage = storage_on(start_server().data)
    monkeypatch.setattr("pyps_client.torch.dynamicemb.LOADED_ROWS", 7)
    random = np.random.default_rng(6)
    keys, scores = random.choice(10**6, 20, replace=False), np.arange(20)
    embeddings, states = (random.normal(size=(20, DIMS[0])).astype(np.float32) for _ in range(2))
    for name, array in (("keys", keys), ("embeddings", embeddings), ("scores", scores), ("states", states)):
        array.tofile(tmp_path / name)
    (tmp_path / "meta").write_text(json.dumps({"opt_type": "adagrad"}))
    paths = [str(tmp_path / name) for name in ("meta", "keys", "embeddings", "scores", "states")]
    storage.load(0, *paths, with_states, 0)
    values = np.zeros((20, 16), np.float32)
    values[:, : DIMS[0]], values[:, DIMS[1] : DIMS[1] + DIMS[0]] = embeddings, states if with_states else 0.25
    tables = torch.zeros(20, dtype=torch.int64)
    assert_holds(storage, torch.from_numpy(keys), tables, torch.from_numpy(values), torch.from_numpy(scores))


def test_what_it_cannot_do_is_refused_in_words(start_server, storage_on):
    server = start_server()
    storage = storage_on(server.data)
    with pytest.raises(InvalidArgument, match="pyps export FILE --checkpoint FOLDER"):
        storage.dump(0, "meta", "keys", "embeddings", None, None, 0)
    with pytest.raises(InvalidArgument, match="cannot list the ids"):
        storage.export_keys_values(torch.device("cpu"))
    with pytest.raises(InvalidArgument, match="bit for bit"):
        storage_on(server.data, gradient_codec="bfloat16")
    keys, tables, values, scores = rows(1)
    with pytest.raises(InvalidArgument, match="--protocol async"):
        storage_on(start_server("--protocol", "hardsync").data).insert(keys, tables, values, scores)
