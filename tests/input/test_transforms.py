"""What tf.data's everyday steps give: from_tensors, unbatch, cache, concatenate, padded_batch, window, sampling."""

import gc
import operator
import pickle
from collections import namedtuple
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.input import AUTOTUNE, ArraySpec, Dataset, DatasetSpec, Optional
from tests.input.policy_helpers import read, stream

pytestmark = pytest.mark.one_rank

INT64 = np.dtype(np.int64)


def lists_of(dataset):
    return [np.asarray(element).tolist() for element in dataset]


def test_from_tensors_is_one_element_as_it_is():
    dataset = Dataset.from_tensors({"x": [[1, 2], [3, 4]], "y": 5.0})
    (element,) = dataset
    assert (element["x"].tolist(), float(element["y"])) == ([[1, 2], [3, 4]], 5.0)
    assert dataset.element_spec == {"x": ArraySpec((2, 2), INT64), "y": ArraySpec((), np.dtype(float))}
    assert len(dataset) == 1
    element["x"][:] = 0
    assert next(iter(dataset))["x"].sum() == 10
    with pytest.raises(ValueError, match=r"from_tensors\(\) got \(\)"):
        Dataset.from_tensors(())


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
def test_unbatch_takes_batches_apart(source):
    dataset = source(7).map(lambda x: (x, [x, -x])).batch(3).unbatch()
    assert [(int(x), y.tolist()) for x, y in dataset] == [(x, [x, -x]) for x in range(7)]
    assert dataset.cardinality() == (7 if source is Dataset.range else -2)
    assert dataset.element_spec == (ArraySpec((), INT64), ArraySpec((2,), INT64))
    assert Dataset.range(7).batch(3, drop_remainder=True).unbatch().cardinality() == 6


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
def test_take_while(source):
    """TensorFlow's testTakeWhileDataset."""
    dataset = source(14).take_while(lambda x: x < 5)
    assert lists_of(dataset.batch(2)) == [[0, 1], [2, 3], [4]]
    assert lists_of(source(3).take_while(lambda x: True)) == [0, 1, 2]
    assert lists_of(dataset.repeat(2)) == [*range(5), *range(5)]
    assert dataset.cardinality() == -2
    assert lists_of(Dataset.range(3).repeat().take_while(lambda x: x < 2)) == [0, 1]
    with pytest.raises(TypeError, match="predicate is 3"):
        Dataset.range(3).take_while(3)


def test_apply():
    """TensorFlow's testApply."""
    assert lists_of(Dataset.range(4).apply(lambda dataset: dataset.map(lambda x: x + 1)).batch(2)) == [[1, 2], [3, 4]]
    for transformation in (lambda dataset: list(dataset), 3):
        with pytest.raises(TypeError, match="transformation_func"):
            Dataset.range(6).apply(transformation)


@pytest.mark.parametrize("output_type", ["int8", np.int32, np.int64, "float32", float])
def test_range_of_another_dtype(output_type):
    """TensorFlow's testStartStopStep with output_type."""
    dataset = Dataset.range(2, 10, 3, output_type=output_type)
    for elements in (dataset, dataset.shuffle(seed=1), dataset.batch(2), dataset.shuffle(seed=1).batch(2)):
        assert {element.dtype for element in elements} == {np.dtype(output_type)}
    assert lists_of(dataset) == [2, 5, 8]
    assert dataset.element_spec == ArraySpec((), np.dtype(output_type))


@pytest.mark.parametrize("output_type", ["U3", object, None, bool])
def test_range_of_no_dtype_of_numbers(output_type):
    with pytest.raises(TypeError, match=r"output_type is .*Pass a dtype of numbers"):
        Dataset.range(3, output_type=output_type)


@pytest.mark.parametrize(
    ("numbers", "output_type"),
    [((126, 130), "int8"), ((-2, 2), "uint8"), ((65519, 65521), "float16"), ((2**63 - 1, 2**63 + 3), "int64")],
)
def test_range_of_numbers_that_do_not_fit(numbers, output_type):
    with pytest.raises(ValueError, match="does not fit output_type"):
        Dataset.range(*numbers, output_type=output_type)


def test_range_of_numbers_beyond_int64():
    dataset = Dataset.range(2**63, 2**63 + 3, output_type="uint64")
    for elements in (dataset.batch(3), dataset.shuffle(3, seed=1).batch(3)):
        (batch,) = elements
        assert sorted(batch.tolist()) == [2**63, 2**63 + 1, 2**63 + 2]


def test_names_of_specs():
    spec = ArraySpec((None,), INT64, name="x")
    assert repr(spec) == "ArraySpec(shape=(None,), dtype=dtype('int64'), name='x')"
    assert spec != ArraySpec((None,), INT64)
    dataset = Dataset.from_generator(lambda: iter([[1], [2, 3]]), output_signature=spec)
    assert dataset.element_spec == spec
    batches = dataset.padded_batch(2)
    assert batches.element_spec == ArraySpec((None, None), INT64, "x")
    assert batches.unbatch().element_spec == spec


def test_element_spec_of_an_optional():
    """TensorFlow's testOptionalSpec, and OptionalIterator."""
    iterator = iter(Dataset.range(3).batch(2))
    optionals = [iterator.get_next_as_optional() for _ in range(3)]
    assert [optional.has_value() for optional in optionals] == [True, True, False]
    assert [optional.element_spec for optional in optionals] == [ArraySpec((None,), INT64)] * 3
    assert Optional(np.zeros(2)).element_spec == ArraySpec((2,), np.dtype(float))
    with pytest.raises(ValueError, match="no value"):
        _ = Optional().element_spec


@pytest.mark.parametrize("element", [1, (np.zeros(2), np.zeros(3))], ids=["no axis", "two sizes"])
def test_unbatch_of_what_is_no_batch(element):
    with pytest.raises(ValueError, match=r"unbatch\(\) got an element of arrays of the shapes.*same size"):
        list(Dataset.from_source([element]).unbatch())


@pytest.mark.parametrize("first", [Dataset.range, stream], ids=["rows", "stream"])
@pytest.mark.parametrize("second", [Dataset.range, stream], ids=["rows", "stream"])
@pytest.mark.parametrize("size", [None, 2])
def test_concatenate(first, second, size):
    one, other = first(3), second(2)
    if size:
        one, other = one.batch(size), other.batch(size)
    dataset = one.concatenate(other)
    assert lists_of(dataset) == lists_of(one) + lists_of(other)
    known = first is second is Dataset.range
    assert dataset.cardinality() == (len(list(one)) + len(list(other)) if known else -2)
    assert dataset.element_spec == one.element_spec
    assert Dataset.range(3).concatenate(Dataset.range(2).repeat()).cardinality() == -1


def test_a_dataset_is_opened_when_its_first_element_is_asked_for():
    opened = []

    def generator(number):
        opened.append(number)
        yield from range(2)

    one, other = (Dataset.from_generator(lambda number=number: generator(number)) for number in (1, 2))
    iterator = iter(one.cache().concatenate(other))
    assert [next(iterator), next(iterator), opened] == [0, 1, [1]]
    kept = one.cache()
    assert lists_of(kept.concatenate(kept)) == [0, 1, 0, 1]
    assert opened == [1, 1]


def test_rows_of_several_tables_are_read_together_in_any_order():
    tables = [np.arange(start, start + 20).reshape(-1, 2) for start in (0, 20, 40)]
    dataset = Dataset.from_tensor_slices(tables[0])
    for table in tables[1:]:
        dataset = dataset.concatenate(Dataset.from_tensor_slices(table))
    whole = np.concatenate(tables)
    assert np.array_equal(np.concatenate(list(dataset.batch(7))), whole)
    assert np.array_equal(np.stack(list(dataset)), whole)
    mixed = np.concatenate(list(dataset.shuffle(seed=3).batch(7)))
    assert np.array_equal(np.sort(mixed, axis=0), whole)
    assert not np.array_equal(mixed, whole)
    mapped = np.concatenate(list(dataset.shuffle(seed=3).map(lambda row: row).batch(7)))
    assert np.array_equal(mixed, mapped)
    assert lists_of(dataset.shard(3, 1).batch(4)) == [whole[1::3][i : i + 4].tolist() for i in (0, 4, 8)]


@pytest.mark.parametrize("source", [Dataset.from_tensor_slices, lambda x: Dataset.from_generator(lambda: iter(x))])
def test_elements_of_another_kind_are_refused(source):
    dataset = source(np.zeros(3)).concatenate(source(np.zeros(3, np.int8)))
    with pytest.raises(TypeError, match=r"concatenate\(\) got datasets of unlike elements.*float64.*int8"):
        list(dataset.batch(4))
    with pytest.raises(TypeError, match="unlike elements"):
        dataset.element_spec
    with pytest.raises(TypeError, match=r"concatenate\(\) got 5"):
        dataset.concatenate(5)


@given(
    n=st.integers(0, 12),
    size=st.integers(1, 5),
    shift=st.none() | st.integers(1, 7),
    stride=st.integers(1, 3),
    drop=st.booleans(),
)
def test_windows(n, size, shift, stride, drop):
    step = shift or size
    expected = [[i for i in range(start, start + size * stride, stride) if i < n] for start in range(0, n, step)]
    expected = [window for window in expected if not drop or len(window) == size]
    for source in (Dataset.range, stream):
        dataset = source(n).window(size, shift, stride, drop)
        assert [lists_of(window) for window in dataset] == expected
        assert dataset.cardinality() in (len(expected), -2)
        assert lists_of(dataset.flat_map(lambda window: window.batch(size))) == expected


def test_windows_of_structures_are_structures_of_windows():
    dataset = Dataset.range(4).map(lambda x: {"x": x, "y": (x + 1, [x, x])}).window(3)
    assert dataset.element_spec == {
        "x": DatasetSpec(ArraySpec((), INT64)),
        "y": (DatasetSpec(ArraySpec((), INT64)), DatasetSpec(ArraySpec((2,), INT64))),
    }
    first = next(iter(dataset))
    assert lists_of(first["y"][1]) == [[0, 0], [1, 1], [2, 2]]
    both = dataset.flat_map(lambda window: Dataset.zip((window["x"].batch(3), window["y"][0].batch(3))))
    assert [(x.tolist(), y.tolist()) for x, y in both] == [([0, 1, 2], [1, 2, 3]), ([3], [4])]
    for arrays in (lambda: list(dataset.batch(2)), lambda: np.asarray(first["x"]), lambda: list(dataset.batch(1))):
        with pytest.raises(TypeError, match="datasets, as those of window.*flat_map"):
            arrays()
    with pytest.raises(ValueError, match=r"window\(\) got size=0"):
        Dataset.range(3).window(0)


def ragged(lengths):
    return Dataset.from_generator(lambda: ([i] * i for i in lengths))


def test_padded_batch_pads_to_the_longest_or_to_what_is_given():
    dataset = ragged([1, 3, 2])
    assert lists_of(dataset.padded_batch(2)) == [[[1, 0, 0], [3, 3, 3]], [[2, 2]]]
    assert lists_of(dataset.padded_batch(3, [4], -1)) == [[[1, -1, -1, -1], [3, 3, 3, -1], [2, 2, -1, -1]]]
    assert lists_of(dataset.padded_batch(2, (None,), drop_remainder=True)) == [[[1, 0, 0], [3, 3, 3]]]
    assert dataset.padded_batch(2, [4], drop_remainder=True).element_spec == ArraySpec((2, 4), INT64)
    assert dataset.padded_batch(2).element_spec == ArraySpec((None, None), INT64)
    assert Dataset.range(5).padded_batch(2).cardinality() == 3
    assert lists_of(Dataset.range(3).padded_batch(2)) == [[0, 1], [2]]


def test_padded_batch_of_structures():
    dataset = Dataset.range(1, 3).map(lambda x: {"x": [int(x)] * x, "t": (["a", "bc"][:x], x)})
    shapes = {"x": [None], "t": ([3], [])}
    (batch,) = dataset.padded_batch(2, shapes, {"x": -1, "t": ("-", None)})
    assert batch["x"].tolist() == [[1, -1], [2, 2]]
    assert batch["t"][0].tolist() == [["a", "-", "-"], ["a", "bc", "-"]]
    assert batch["t"][1].tolist() == [1, 2]
    assert dataset.padded_batch(2, shapes).element_spec["t"][0].shape == (None, 3)
    assert Dataset.from_source([[1.0], []]).padded_batch(2, None, np.nan).element_spec.dtype == float


@pytest.mark.parametrize(
    ("shapes", "values", "error", "text"),
    [
        ([2], None, ValueError, r"sizes up to \[3\], and padded_shapes is \[2\]"),
        ([2, 2], None, ValueError, "number of axes"),
        (3, None, ValueError, "padded_shapes has 3 for an array"),
        (None, 0.5, TypeError, "padding_values has 0.5 for an array of int64"),
        (None, "x", TypeError, "padding_values has 'x' for an array of int64"),
    ],
)
def test_padding_that_does_not_fit(shapes, values, error, text):
    with pytest.raises(error, match=text):
        list(ragged([1, 3]).padded_batch(2, shapes, values))
    with pytest.raises(ValueError, match="same structure of tuples and dicts"):
        list(Dataset.zip(ragged([1]), ragged([1])).padded_batch(2, ([1],)))


def test_sampling_draws_by_weight_until_all_have_ended():
    sources = [Dataset.range(0, 3000), Dataset.range(3000, 6000), Dataset.range(6000, 6010)]
    for made in (lambda d: d, lambda d: d.filter(lambda x: True)):
        dataset = Dataset.sample_from_datasets(list(map(made, sources)), [3, 1, 0], seed=1)
        rows = [int(x) for x in dataset]
        assert sorted(rows) == list(range(6000))
        assert dataset.cardinality() in (6000, -2)
        assert [x for x in rows if x < 3000] == list(range(3000))
        # 1000 draws of probability 3/4: the standard deviation is below 14.
        assert abs(sum(x < 3000 for x in rows[:1000]) - 750) < 70
        assert [int(x) for x in dataset] == rows
        again = Dataset.sample_from_datasets(list(map(made, sources)), [3, 1, 0], 1, rerandomize_each_iteration=True)
        assert [int(x) for x in again] != [int(x) for x in again]


def test_sampling_stops_with_the_first_that_ends():
    sources = [Dataset.range(5), Dataset.range(100, 200).repeat()]
    dataset = Dataset.sample_from_datasets(sources, stop_on_empty_dataset=True)
    rows = [int(x) for x in dataset]
    assert [x for x in rows if x < 100] == list(range(5))
    assert dataset.cardinality() == -2
    assert Dataset.sample_from_datasets(sources).cardinality() == -1
    unseeded = Dataset.sample_from_datasets([Dataset.range(50), Dataset.range(50)])
    assert [int(x) for x in unseeded] != [int(x) for x in unseeded]


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")]])
def test_weights_that_are_none(weights):
    with pytest.raises(ValueError, match="weights is .*expected 2 numbers"):
        Dataset.sample_from_datasets([Dataset.range(1), Dataset.range(1)], weights)
    with pytest.raises(ValueError, match="no datasets"):
        Dataset.sample_from_datasets([])


class Counting:
    """Counts the calls of a function of an element."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * 2


STEPS = {
    "rows": lambda source: source,
    "batches of rows": lambda source: source.batch(2),
    "elements": lambda source: source.filter(lambda x: True),
    "batches": lambda source: source.batch(2).map(lambda x: x),
}


@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_what_is_cached_is_computed_once_and_keeps_its_order(steps, in_file, tmp_path):
    called = Counting()
    before = steps(Dataset.range(6).map(called).shuffle(6))
    dataset = before.cache(tmp_path / "kept") if in_file else before.cache()
    first = lists_of(dataset)
    assert called.calls == 6
    for _ in range(2):
        elements = list(dataset)
        assert lists_of(elements) == first
        for element in elements:
            if element.shape:
                element[:] = -1
    assert lists_of(dataset.repeat(2)) == first * 2
    assert called.calls == 6
    assert dataset.cardinality() == before.cardinality()
    assert dataset._node.batch_size() == before._node.batch_size()
    assert dataset._node.row_count() == before._node.row_count()
    called.calls = 0
    assert len(list(dataset.shuffle(6))) == len(first)
    assert called.calls == 0


@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_a_pass_that_ends_early_keeps_nothing(in_file, tmp_path):
    called = Counting()
    dataset = stream(6).map(called).cache(*[tmp_path / "kept"] * in_file)
    assert lists_of(dataset.take(3)) == [0, 2, 4]
    assert list(tmp_path.iterdir()) == []
    assert lists_of(dataset) == lists_of(dataset) == [0, 2, 4, 6, 8, 10]
    assert called.calls == 3 + 6 + 6 * 0


def test_rows_are_kept_one_by_one_as_they_are_read():
    called = Counting()
    dataset = Dataset.range(100).map(called).cache()
    assert lists_of(dataset.take(3)) == [0, 2, 4]
    assert lists_of(dataset.skip(2).take(2).batch(2)) == [[4, 6]]
    assert called.calls == 4


def test_a_cache_of_arrays_in_memory_is_no_second_copy():
    dataset = Dataset.from_tensor_slices(np.arange(6)).concatenate(Dataset.range(6).map(lambda x: x)).cache()
    assert [type(part).__name__ for part in dataset._node.table.inputs] == ["ArrayRows", "Cached"]


@pytest.mark.parametrize("make", [lambda: Dataset.range(5).map(operator.neg), lambda: Dataset.range(5).filter(abs)])
def test_a_cache_travels_without_what_it_keeps(make):
    dataset = make().cache()
    whole = lists_of(dataset)
    other = pickle.loads(pickle.dumps(dataset))
    assert (other._node.kept, other._node.kept_rows) == (None, {})
    assert lists_of(other) == whole


def test_an_endless_dataset_is_not_cached():
    with pytest.raises(ValueError, match=r"Call cache\(\) before repeat"):
        Dataset.range(3).repeat().cache()


def test_another_pipeline_has_another_file_and_another_program_the_same(tmp_path):
    name = tmp_path / "kept"
    called = Counting()
    for make in (
        lambda: stream(6).map(called).cache(name),
        lambda: stream(6).map(called).cache(name),
        lambda: stream(6).map(called).skip(1).cache(name),
        lambda: Dataset.from_tensor_slices(np.arange(6)).map(called).cache(name),
        lambda: Dataset.from_tensor_slices(np.arange(6) * 10).map(called).cache(name),
    ):
        fresh = make()
        assert lists_of(fresh) == lists_of(fresh)
    assert called.calls == 6 + 0 + 6 + 6 + 6
    assert len(list(tmp_path.iterdir())) == 4
    unseeded = [lists_of(Dataset.range(30).shuffle().cache(tmp_path / "order")) for _ in range(2)]
    (path,) = tmp_path.glob("order*")
    path.unlink()
    unseeded.append(lists_of(Dataset.range(30).shuffle().cache(tmp_path / "order")))
    assert unseeded[0] == unseeded[1] == unseeded[2] != list(range(30))


def test_a_file_keeps_elements_to_the_bit(tmp_path):
    elements = [
        {"a": np.float32([[1, np.nan]]), "b": (True, 3, 2.5), 7: "é\0", "c": b"\0x\0"},
        {
            "a": np.zeros((0, 2), np.float32),
            "b": (np.datetime64("2020-01-01"), np.complex64(1j), np.array(["ab", "c"])),
        },
    ]
    dataset = Dataset.from_generator(lambda: iter(elements)).cache(tmp_path / "kept")
    written, read = list(dataset), list(dataset)
    assert str(written) == str(read)
    assert str(read[0]) == str({**elements[0], "b": (np.True_, np.int64(3), np.float64(2.5))})
    assert str(read[1]) == str(elements[1])
    assert read[0]["a"].flags.writeable
    point = namedtuple("Point", "x y")
    for wrong in (point(1, 2), object(), {1.5: 2}, np.zeros(1, [("x", int)]), np.array([None])):
        with pytest.raises(TypeError):
            list(Dataset.from_generator(lambda wrong=wrong: iter([wrong])).cache(tmp_path / "wrong"))


def test_a_damaged_file_is_told(tmp_path):
    dataset = stream(5).cache(tmp_path / "kept")
    list(dataset)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for wrong in (b"", b"x" + whole, whole[: len(whole) // 2], whole + b"x", whole.replace(b'"<i8"', b'"O"')):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="no complete file of elements.*Remove it"):
            list(dataset)
    path.unlink()
    (tmp_path / "other").write_text("secret")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        list(dataset)


def test_as_numpy_iterator():
    class Other:
        def __array__(self, dtype=None, copy=None):
            return np.arange(2)

    dataset = Dataset.from_source([(1, [2.0], "a", Other()), (2, [3.0], "b", Other())])
    iterator = dataset.as_numpy_iterator()
    first = next(iterator)
    assert [type(leaf) for leaf in first] == [np.int64, np.ndarray, str, np.ndarray]
    assert len(list(iterator)) == 1
    with pytest.raises(TypeError):
        list(Dataset.range(4).window(2).as_numpy_iterator())


def test_what_tensorflow_leaves_to_itself_is_taken():
    double = operator.methodcaller("__mul__", 2)
    dataset = (
        Dataset.range(8)
        .shuffle(8, seed=1, reshuffle_each_iteration=None)
        .map(double, num_parallel_calls=AUTOTUNE, deterministic=False)
        .batch(2, num_parallel_calls=AUTOTUNE, deterministic=False)
        .prefetch(AUTOTUNE)
    )
    assert sorted(np.concatenate(list(dataset)).tolist()) == list(range(0, 16, 2))
    assert lists_of(dataset) != lists_of(dataset)
    files = Dataset.from_source(["0:2", "5:2"]).interleave(
        lambda path: Dataset.from_files([path], read), AUTOTUNE, num_parallel_calls=AUTOTUNE, deterministic=True
    )
    assert lists_of(files) == [0, 5, 1, 6]
    for wrong in (lambda d: d.prefetch(0), lambda d: d.batch(2, num_parallel_calls=0), lambda d: d.prefetch(-2)):
        with pytest.raises(ValueError, match="-1"):
            wrong(dataset)
    assert len(list(islice(dataset.as_numpy_iterator(), 2))) == 2


def test_a_cache_that_fails_writes_into_no_other_file(tmp_path):
    def fails_at_three(x):
        if x == 3:
            raise OSError("no such sample")
        return x

    errors = []
    try:
        list(Dataset.range(5).map(fails_at_three).cache(tmp_path / "kept"))
    except OSError as error:
        errors.append(error)  # its traceback holds all that was open
    with (tmp_path / "other").open("wb") as other:
        other.write(b"mine")
        other.flush()
        errors.clear()
        gc.collect()
    assert (tmp_path / "other").read_bytes() == b"mine"


@pytest.mark.parametrize("empty", [Dataset.range(0), Dataset.range(1).batch(6, drop_remainder=True)])
def test_a_cache_of_nothing(tmp_path, empty):
    dataset = empty.cache(tmp_path / "kept")
    assert [list(dataset) for _ in range(2)] == [[], []]
