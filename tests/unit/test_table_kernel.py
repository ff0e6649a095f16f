"""Tables against a dict of numpy rows, to the bit, on every instruction set."""

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernel_values
from kernel_values import NUMBERS, assert_refused, decode_reference, encode_reference, lane_sum, wide_values
from pyps import _kernels
from pyps.core.rules import RULES
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32

F = np.float32
INT8 = _kernels.CODECS["int8"]
MASK = (1 << 64) - 1
SLOTS = {
    **{name: rule.slot_names for name, rule in RULES.items()},
    "rowwise_adagrad": ("accumulator",),
    "assign": (),
}
instruction_set = kernel_values.instruction_set


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def random_bits(key, dim):
    x = (np.arange(dim, dtype=np.uint64) * 0x9E3779B9 + (key & 0xFFFFFFFF)).astype(np.uint32)
    x = (x ^ x >> 16) * np.uint32(0x21F0AAAD) ^ np.uint32(key >> 32)
    x = (x ^ x >> 15) * np.uint32(0x735A2D97)
    return x ^ x >> 15


class Reference:
    """The same as a table, by rows in a dict, the least recently updated first."""

    def __init__(self, dim, rule, codec, slots, *, seed=0, scale=0.0, norm_max=0.0, min_count=1, ttl=0, capacity=0):
        self.dim, self.rule, self.codec, self.slots = dim, rule, codec, slots
        self.seed, self.scale, self.norm_max = seed, F(scale), norm_max
        self.min_count, self.ttl, self.capacity = min_count, ttl, capacity
        self.rows, self.candidates = {}, {}  # id -> (version, parameters, slots), id -> (version, count)
        self.counts = dict.fromkeys(["admitted", "dropped", "evicted", "expired"], 0)

    def key(self, row_id):
        return mix(mix(self.seed) ^ row_id & MASK)

    def initial(self, row_id):
        numbers = (random_bits(self.key(row_id), self.dim) >> 8).astype(np.int32) - (1 << 23)
        values = numbers.astype(F) * (self.scale * F(2**-23))
        return decode_reference(encode_reference(values, self.codec), self.codec)

    def lookup(self, row_id):
        return self.rows[row_id][1] if row_id in self.rows else self.initial(row_id)

    def update(self, parts, numbers, version):
        for kept in (self.rows, self.candidates):
            for row_id in [key for key, (last, *_) in kept.items() if self.ttl and version - last > self.ttl]:
                del kept[row_id]
                self.counts["expired"] += 1
        for row_id in sorted({int(key) for ids, *_ in parts for key in ids}):
            if row_id not in self.rows and not self.admit(row_id, version):
                continue
            p, slots = self.rows.pop(row_id)[1:] if row_id in self.rows else self.new_row(row_id)
            gradients = [(rows[list(ids).index(row_id)], c, f) for ids, rows, c, f in parts if row_id in ids]
            p, slots = p.copy(), [slot.copy() for slot in slots]
            self.apply(p, slots, gradients, numbers)
            if self.norm_max and (norm := np.sqrt(lane_sum(p.astype(float) ** 2))) > self.norm_max:
                p = (p.astype(float) * (self.norm_max / norm)).astype(F)
            if self.codec == BFLOAT16:
                bits = random_bits(mix(self.key(row_id) + mix(version) & MASK), self.dim) >> 16
                p = (p.view(np.uint32) + bits & 0xFFFF0000).view(F)
            self.rows[row_id] = version, p, slots

    def admit(self, row_id, version):
        count = self.candidates.pop(row_id, (0, 0))[1] + 1
        if count < self.min_count:
            self.candidates[row_id] = version, count
            self.counts["dropped"] += 1
            return False
        self.counts["admitted"] += 1
        return True

    def new_row(self, row_id):
        if self.capacity and len(self.rows) == self.capacity:
            del self.rows[next(iter(self.rows))]
            self.counts["evicted"] += 1
        width = 1 if self.rule == "rowwise_adagrad" else self.dim
        return self.initial(row_id), [np.full(width, self.slots[name], F) for name in SLOTS[self.rule]]

    def apply(self, p, slots, gradients, numbers):
        if self.rule not in ("rowwise_adagrad", "assign"):
            kernel_values.apply(self.rule, p, *slots, gradients, **numbers)
            return
        g = None
        for payload, codec, factor in gradients:
            decoded = np.zeros(self.dim, F)
            _kernels.decode(payload, codec, decoded)
            g = F(factor) * decoded if g is None else g + F(factor) * decoded
        if self.rule == "assign":
            p[:] = g
            return
        rate, eps, weight_decay = (F((NUMBERS | numbers)[name]) for name in ("rate", "eps", "weight_decay"))
        if weight_decay:
            g = g + weight_decay * p
        slots[0] += F(lane_sum(g.astype(float) ** 2) / self.dim)
        divisor = np.sqrt(slots[0]) + eps
        p -= rate * g / divisor if divisor else F(0)


def new_table(dim=4, rule="rowwise_adagrad", codec=FLOAT32, first=0.1, **options):
    return _kernels.Table(dim, rule, [first] * len(SLOTS[rule]), bfloat16=codec == BFLOAT16, **options)


def update(table, parts, version, **numbers):
    table.update(
        [(ids, b"".join(rows), codec, factor) for ids, rows, codec, factor in parts],
        tuple((NUMBERS | numbers)[name] for name in table.numbers),
        version,
    )


def part(ids, dim=4, codec=FLOAT32, factor=1.0, seed=1):
    values = wide_values(len(ids) * dim, seed).reshape(len(ids), dim)
    return np.array(ids, np.int64), [_kernels.encode(row, codec) for row in values], codec, factor


def lookup(table, ids, dim=4, codec=FLOAT32):
    """Returns how many are known, and the rows; they are written behind three other bytes."""
    size = len(_kernels.encode(np.zeros(dim, F), codec))
    out = bytearray(3 + size * len(ids))
    known = table.lookup(np.array(ids, np.int64), (out, 3, codec))
    rows = np.zeros((len(ids), dim), F)
    for index, row in enumerate(rows):
        _kernels.decode(memoryview(out)[3 + index * size :][:size], codec, row)
    return known, rows


def copy_of(table, source, after_version=0):
    """Loads into a table what is in another one."""
    version = source.stats()["version"]
    for candidates in (False, True):
        table.load(*source.dump(after_version, candidates), version, candidates)
    return table


def assert_same(table, other):
    for candidates in (False, True):
        for found, wanted in zip(table.dump(0, candidates), other.dump(0, candidates), strict=True):
            assert found.tobytes() == wanted.tobytes()


some_ids = st.lists(st.integers(-9, 9) | st.sampled_from([-(1 << 63), (1 << 63) - 1]), unique=True, max_size=8)
codecs = st.sampled_from([FLOAT32, FLOAT16, BFLOAT16, INT8])
part_shapes = st.tuples(some_ids.map(sorted), codecs, st.sampled_from([1.0, -0.3]), st.integers(0, 9))
histories = st.lists(st.tuples(st.integers(1, 3), st.lists(part_shapes, min_size=1, max_size=3)), max_size=12)
options = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, MASK),
        "scale": st.sampled_from([0.05, 3.0]),
        "norm_max": st.just(1.5),
        "min_count": st.integers(1, 3),
        "ttl": st.integers(1, 4),
        "capacity": st.integers(1, 12),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(SLOTS)), st.sampled_from([1, 4, 17, 33]), st.booleans(), options, histories, st.booleans()
)
def test_a_table_equals_a_dict_of_rows(rule, dim, narrow, chosen, history, decays):
    codec = BFLOAT16 if narrow else FLOAT32
    table = new_table(dim, rule, codec, **chosen)
    reference = Reference(dim, rule, codec, dict.fromkeys(SLOTS[rule], 0.1), **chosen)
    numbers = {"weight_decay": 0.01 * decays, "parameter_share": 1 - 0.01 * decays, "eps": 0.0}
    version = 0
    for step, shapes in history:
        version += step
        parts = [part(ids, dim, codec, factor, seed) for ids, codec, factor, seed in shapes]

        update(table, parts, version, **numbers)

        reference.update(parts, numbers, version)
        wanted = [*range(9, -10, -1), 3, -(1 << 63), 3]
        known, rows = lookup(table, wanted, dim)
        assert known == sum(row_id in reference.rows for row_id in wanted)
        assert rows.tobytes() == np.array([reference.lookup(row_id) for row_id in wanted]).tobytes()
        ids, versions, _, slots = table.dump(0)
        assert ids.tolist() == list(reference.rows)
        assert versions.tolist() == [row[0] for row in reference.rows.values()]
        assert slots.tobytes() == b"".join(slot.tobytes() for row in reference.rows.values() for slot in row[2])
        ids, versions, counts, _ = table.dump(0, candidates=True)
        assert list(zip(ids, versions, counts[:, 0], strict=True)) == [
            (row_id, *candidate) for row_id, candidate in reference.candidates.items()
        ]
        stats = table.stats()
        sizes = {"rows": len(reference.rows), "candidates": len(reference.candidates), "version": version}
        assert stats == {**reference.counts, **sizes, "bytes": stats["bytes"]}
    assert_same(copy_of(new_table(dim, rule, codec, **chosen), table), table)


def filled(num_rows, updates=3, **options):
    table = new_table(**options)
    for version in range(1, updates + 1):
        ids = np.arange(num_rows)
        update(table, [part(ids, seed=version)], version)
    return table


def test_many_rows_are_found_again():
    """Through growths of the index and of the slabs, and with erased rows used again."""
    random, table, reference = np.random.default_rng(1), new_table(capacity=3000), {}
    for version in range(1, 40):
        ids = np.unique(random.integers(-(1 << 62), 1 << 62, 500)) if version % 3 else np.arange(500) * version
        values = random.standard_normal((len(ids), 4)).astype(F)
        update(table, [(ids, [values.tobytes()], FLOAT32, 1.0)], version, rate=0.0)
        for row_id in ids.tolist():
            reference.pop(row_id, None)
            reference[row_id] = version
        for row_id in list(reference)[:-3000]:
            del reference[row_id]
    ids, versions, *_ = table.dump(0)
    assert dict(zip(ids.tolist(), versions.tolist(), strict=True)) == reference
    assert ids.tolist() == list(reference)
    assert lookup(table, ids)[0] == 3000
    assert lookup(table, np.arange(1, 500) * -7)[0] == 0


@pytest.mark.parametrize("codec", [FLOAT32, BFLOAT16])
def test_rows_are_written_in_any_codec(codec):
    table = new_table(codec=codec, scale=0.5, dim=40)
    update(table, [part([1, 2], 40)], 1)
    rows = lookup(table, [2, 5, 1], 40)[1]
    for name, number in _kernels.CODECS.items():
        expected = np.zeros((3, 40), F)
        for row, wanted in zip(rows, expected, strict=True):
            _kernels.decode(_kernels.encode(row, number), number, wanted)
        assert lookup(table, [2, 5, 1], 40, number)[1].tobytes() == expected.tobytes(), name


def test_initial_rows_are_uniform_and_differ_by_seed_id_and_column():
    rows = lookup(new_table(1024, scale=2.0), range(-100, 100), 1024)[1]
    assert rows.min() < -1.999 and 1.999 < rows.max() < 2.0
    assert abs(rows.mean()) < 0.02 and abs(rows.var() - 4 / 3) < 0.02
    assert np.abs(np.corrcoef(rows)[~np.eye(200, dtype=bool)]).max() < 0.2
    assert np.abs(np.corrcoef(rows.T[:200])[~np.eye(200, dtype=bool)]).max() < 0.4
    assert not np.isin(rows, lookup(new_table(1024, scale=2.0, seed=1), range(-100, 100), 1024)[1]).all(1).any()


def test_rounding_to_bfloat16_is_unbiased():
    """Steps of a fortieth of the distance between neighbours arrive in the mean of many rows."""
    step, num = 2**-12 / 5, 4000
    table = new_table(dim=8, rule="sgd", codec=BFLOAT16)
    ones = np.ones((num, 8), F)
    update(table, [(np.arange(num), [ones.tobytes()], FLOAT32, -1.0)], 1, rate=1.0)
    for version in range(2, 12):
        update(table, [(np.arange(num), [(ones * F(step)).tobytes()], FLOAT32, -1.0)], version, rate=1.0)
    rows = lookup(table, range(num), 8)[1]
    assert set(np.unique(rows)) > {1.0, 1.0078125}
    assert rows.mean() - 1 == pytest.approx(10 * step, rel=0.1)
    assert np.abs(np.corrcoef(rows.T)[~np.eye(8, dtype=bool)]).max() < 0.08


def test_the_number_of_tables_changes_no_row():
    whole, tables = new_table(scale=0.1, ttl=3), [new_table(scale=0.1, ttl=3) for _ in range(3)]
    for version in range(1, 9):
        ids = np.arange(version * 3, version * 9, dtype=np.int64)
        _, rows, codec, factor = part(ids, seed=version)
        update(whole, [(ids, rows, codec, factor)], version)
        for k, table in enumerate(tables):
            update(
                table, [(ids[ids % 3 == k], [rows[i] for i in np.flatnonzero(ids % 3 == k)], codec, factor)], version
            )
    for row_id in range(90):
        assert lookup(tables[row_id % 3], [row_id])[1].tobytes() == lookup(whole, [row_id])[1].tobytes(), row_id
    assert sum(table.stats()["rows"] for table in tables) == whole.stats()["rows"]


def test_the_bytes_of_an_update_are_known_before_it():
    table = filled(2000, min_count=2, capacity=6000, ttl=9)
    held = table.stats()["bytes"]
    assert table.bytes_with([np.arange(2000), np.arange(500)], 4) == held
    assert table.bytes_with([np.arange(2000, 4000)], 4) > held
    assert table.bytes_with([np.arange(2000)], 99) > held, "all have expired by then"
    random = np.random.default_rng(3)
    for version in range(4, 40):
        ids = [np.unique(random.integers(0, 9000, 1500)) for _ in range(2)]
        bound = table.bytes_with(ids, version)
        update(table, [part(each) for each in ids], version)
        assert table.stats()["bytes"] <= bound


def test_an_assigned_row_is_the_sum_of_its_gradients():
    """A rate or a weight decay is none of this rule's."""
    table = new_table(rule="assign", scale=0.5)
    assert table.numbers == ["rate"]
    parts = [part([1, 2], factor=0.5, seed=1), part([2, 3], factor=-2.0, seed=2)]
    update(table, parts, 1, rate=0.1)
    (_, (one, two), _, _), (_, (also_two, three), _, _) = parts
    one, two, also_two, three = (np.frombuffer(row, F) for row in (one, two, also_two, three))
    wanted = [F(0.5) * one, F(0.5) * two + F(-2) * also_two, F(-2) * three]
    assert lookup(table, [1, 2, 3])[1].tobytes() == np.array(wanted).tobytes()
    assert table.dump(0)[3].shape == (3, 0)


def test_memory_a_row_is_near_that_of_its_numbers():
    for num in (10_000, 90_000):
        ids, table = np.arange(num), new_table(dim=64)
        for start in range(0, num, 1000):
            update(table, [(ids[start : start + 1000], [bytes(256 * 1000)], FLOAT32, 1.0)], start + 1)
            rows = start + 1000
            assert rows < 10_000 or table.stats()["bytes"] <= 1.25 * 65 * 4 * rows, rows


def test_a_reader_beside_a_writer_sees_whole_rows():
    num, dim, table, torn, stop = 3000, 64, new_table(64, "sgd"), [], threading.Event()
    ids, began = np.arange(num), threading.Barrier(3)

    def read():
        out = np.empty((num, dim), F)
        began.wait()
        while not stop.is_set():
            table.lookup(ids[::-1].copy(), (out, 0, FLOAT32))
            if (out != out[:, :1]).any():
                torn.append(out.copy())

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    began.wait()
    for version in range(1, 60):
        # New rows too, so that index and slabs grow.
        more = np.arange(version * 300)
        ones = np.ones((len(more), dim), F).tobytes()
        update(table, [(more, [ones], FLOAT32, 1.0)], version, rate=1.0)
    stop.set()
    for reader in readers:
        reader.join()
    assert not torn
    assert (lookup(table, range(300), dim)[1] == -59).all()


def test_what_does_not_fit_is_refused():
    table, empty = filled(3), new_table()
    good, ids, p = part([1, 2]), np.array([1, 2]), bytes(32)
    numbers = (0.1, 0.0, 0.0)
    for parts, error, words in (
        ([(ids.astype(np.int32), [p], 1, 1.0)], TypeError, "ids has the buffer format 'i'; int64 takes"),
        ([(ids, [p, b"x"], 1, 1.0)], ValueError, "payload holds 33 bytes; expected 32, so many a row"),
        ([(ids, [p], 9, 1.0)], ValueError, "codec is 9; expected float32"),
    ):
        assert_refused(lambda parts=parts: update(table, parts, 9), error, f"^{words}")
    raw = ids.tobytes()
    for call, error, words in (
        (lambda: table.update([(ids, p, 1)], numbers, 9), TypeError, r"update\(\): incompatible function"),
        (lambda: table.update([(raw[1:], p, 1, 1.0)], numbers, 9), ValueError, "ids holds 15 bytes"),
        (lambda: table.update([(raw, p, 1, 1.0)], numbers[1:], 9), ValueError, "2 numbers; rowwise_adagrad takes rate"),
        (lambda: update(table, [good], 3), ValueError, "version is 3; the table is at 3$"),
        (
            lambda: table.lookup(ids, (bytearray(31), 0, 1)),
            ValueError,
            "reply holds 31 bytes; 8 values of float32 take",
        ),
        (lambda: table.lookup(ids, None), TypeError, r"lookup\(\): incompatible function"),
        (lambda: table.load(ids, np.uint64([4, 4]), p, p[:8], 9), ValueError, "the table has rows already$"),
        (lambda: empty.load(ids, np.uint64([4, 3]), p, p[:8], 9), ValueError, r"versions\[1\] is 3; expected 4 to 9$"),
        (lambda: empty.load(ids * 0, np.uint64([4, 4]), p, p[:8], 9), ValueError, "id 0 is there twice$"),
        (
            lambda: empty.load(ids, np.uint64([4, 3]), p, p, 9),
            ValueError,
            "slots holds 32 bytes; expected 8, so many a",
        ),
        (lambda: empty.load(ids, np.uint64([4, 4]), p[1:], p[:8], 9), ValueError, "parameters holds 31 bytes"),
        (lambda: new_table(0), ValueError, "dim is 0; expected 1 to 1024$"),
        (lambda: new_table(1025), ValueError, "dim is 1025; expected 1 to 1024$"),
        (lambda: _kernels.Table(4, "lamb", []), ValueError, "there is no rule 'lamb' of 0 slots$"),
        (lambda: _kernels.Table(4, "adam", [0.0]), ValueError, "there is no rule 'adam' of 1 slots$"),
        (lambda: _kernels.ShardKernel("rowwise_adagrad", np.ones(4, F), {}), ValueError, "rule is 'rowwise_adagrad'"),
    ):
        assert_refused(call, error, f"^{words}")
    assert table.stats()["version"] == 3
