"""Datasets: transforms against plain lists, cardinality, specs, and what an element looks like."""

import itertools
import operator
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.input.dataset import Dataset
from mpidist.input.elements import ArraySpec
from mpidist.input.input_options import AutoShardPolicy, Options
from tests.input.policy_helpers import stream

pytestmark = pytest.mark.one_rank

INT = np.dtype(np.int64)
Point = namedtuple("Point", "x y")


def numbers(dataset):
    return [np.asarray(element).tolist() for element in dataset]


counts = st.integers(-1, 12)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), counts),
        st.tuples(st.just("skip"), counts),
        st.tuples(st.just("repeat"), st.integers(0, 3)),
        st.integers(1, 4).flatmap(lambda n: st.tuples(st.just("shard"), st.just(n), st.integers(0, n - 1))),
        st.tuples(st.just("map"), st.just(lambda x: x + 1)),
    ),
    max_size=4,
)


def on_list(values, name, *args):
    if name == "take":
        return values if args[0] < 0 else values[: args[0]]
    if name == "skip":
        return [] if args[0] < 0 else values[args[0] :]
    if name == "repeat":
        return values * args[0]
    if name == "shard":
        return values[args[1] :: args[0]]
    return [args[0](value) for value in values]


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
@settings(max_examples=150)
@given(length=st.integers(0, 20), operations=OPERATIONS, size=st.integers(0, 5), drop=st.booleans())
def test_transforms_agree_with_lists(source, length, operations, size, drop):
    dataset, expected = source(length), list(range(length))
    for name, *args in operations:
        dataset, expected = getattr(dataset, name)(*args), on_list(expected, name, *args)
    if size:
        dataset = dataset.batch(size, drop_remainder=drop)
        expected = [expected[i : i + size] for i in range(0, len(expected), size)]
        expected = [batch for batch in expected if len(batch) == size or not drop]
    assert numbers(dataset) == expected
    assert numbers(dataset) == expected
    assert dataset.cardinality() in (len(expected), -2)
    assert source is stream or dataset.cardinality() == len(expected)


@settings(max_examples=80)
@given(length=st.integers(0, 20), operations=OPERATIONS, size=st.integers(1, 5))
def test_transforms_of_batches_agree_with_lists(length, operations, size):
    dataset = Dataset.range(length).batch(size)
    expected = [list(range(length))[i : i + size] for i in range(0, length, size)]
    for name, *args in operations:
        dataset = getattr(dataset, name)(*args)
        args = [lambda batch: [x + 1 for x in batch]] if name == "map" else args
        expected = on_list(expected, name, *args)
    assert numbers(dataset) == expected
    assert len(dataset) == len(expected)


def test_endless_repeat():
    dataset = Dataset.range(3).repeat().batch(2)
    assert dataset.cardinality() == -1
    assert numbers(itertools.islice(dataset, 3)) == [[0, 1], [2, 0], [1, 2]]
    with pytest.raises(TypeError, match="endless"):
        len(dataset)
    assert dataset


def test_endless_repeat_of_nothing_ends_or_says_so():
    assert numbers(Dataset.range(0).repeat()) == []
    left = [2]
    with pytest.raises(ValueError, match="no element in pass 2"):
        list(Dataset.from_generator(lambda: [left.pop()] if left else []).repeat())


def test_zip_nests_and_ends_with_the_shortest():
    dataset = Dataset.zip({"a": Dataset.range(3), "b": (Dataset.range(5, 9), stream(9))})
    assert [(int(e["a"]), int(e["b"][0]), int(e["b"][1])) for e in dataset] == [
        (0, 5, 0),
        (1, 6, 1),
        (2, 7, 2),
    ]
    assert Dataset.zip(Dataset.range(3), Dataset.range(5).repeat()).cardinality() == 3
    rows = Dataset.zip(Dataset.range(3), Dataset.range(5, 9)).shuffle(seed=1).batch(2)
    assert sorted((int(a), int(b)) for x, y in rows for a, b in zip(x, y, strict=True)) == [
        (0, 5),
        (1, 6),
        (2, 7),
    ]


def test_zip_refuses_what_is_no_dataset_and_options_that_differ():
    with pytest.raises(TypeError, match="expected Dataset"):
        Dataset.zip((Dataset.range(2), [1, 2]))
    with pytest.raises(ValueError, match="no datasets"):
        Dataset.zip(())
    one = Dataset.range(2).with_options(assignment="block")
    with pytest.raises(ValueError, match="different options"):
        Dataset.zip(one, Dataset.range(2).with_options(assignment="tf"))
    assert Dataset.zip(one, Dataset.range(2))._options.assignment == "block"


def test_enumerate():
    assert [int(i) for i, _ in Dataset.range(5, 8).shuffle(seed=0).enumerate(10)] == [10, 11, 12]
    assert [int(i) for i, _ in stream(3).enumerate()] == [0, 1, 2]


def test_filter_unpacks_tuples():
    dataset = Dataset.zip(Dataset.range(6), Dataset.range(6)).filter(lambda a, b: a * b > 8)
    assert [int(a) for a, _ in dataset] == [3, 4, 5]
    assert dataset.cardinality() == -2
    with pytest.raises(TypeError, match="not known"):
        len(dataset)


def test_map_gets_tuples_as_arguments_and_named_tuples_whole():
    assert numbers(Dataset.zip(Dataset.range(3), Dataset.range(3)).map(operator.add)) == [0, 2, 4]
    points = Dataset.from_tensor_slices(Point(np.arange(3), np.arange(3)))
    assert numbers(points.map(lambda point: point.x + point.y)) == [0, 2, 4]
    assert isinstance(next(iter(points.batch(2))), Point)


def test_element_specs():
    images = np.zeros((5, 4, 3), np.float32)
    dataset = Dataset.from_tensor_slices({"x": images, "y": np.arange(5)})
    assert dataset.element_spec == {"x": ArraySpec((4, 3), np.dtype("float32")), "y": ArraySpec((), INT)}
    assert dataset.batch(2).element_spec["x"].shape == (None, 4, 3)
    assert dataset.batch(2, drop_remainder=True).element_spec["y"].shape == (2,)
    mapped = dataset.batch(2).map(lambda e: (e["x"].sum(axis=0), e["y"] * 1.0))
    assert mapped.element_spec == (
        ArraySpec((4, 3), np.dtype("float32")),
        ArraySpec((None,), np.dtype("float64")),
    )
    assert Dataset.range(3).map(lambda x: [x, x]).element_spec == ArraySpec((2,), INT)
    assert Dataset.zip(Dataset.range(3), stream(2)).element_spec == (ArraySpec((), INT),) * 2
    with pytest.raises(ValueError, match="output_signature"):
        stream(0).element_spec


def test_output_signature_converts_and_checks():
    signature = (ArraySpec((None,), np.float32), ArraySpec((), "int32"))
    dataset = Dataset.from_generator(lambda: iter([([1, 2], 3), ([1], 4)]), output_signature=signature)
    assert dataset.element_spec == (ArraySpec((None,), np.dtype("float32")), ArraySpec((), np.dtype("int32")))
    assert [(x.dtype.name, y.dtype.name) for x, y in dataset] == [("float32", "int32")] * 2
    wrong = Dataset.from_generator(lambda: iter([1]), output_signature=ArraySpec((2,), "int32"))
    with pytest.raises(ValueError, match=r"shape \(\).*\(2,\)"):
        list(wrong)
    with pytest.raises(TypeError, match="ArraySpec"):
        Dataset.from_generator(lambda: iter([1]), output_signature=np.int32)


def test_output_types_and_shapes_are_a_signature_too():
    def pairs(first, last):
        return iter([([first, first], {"y": first}), ([last], {"y": last})])

    types, shapes = (np.float32, {"y": "int32"}), ([None], {"y": []})
    dataset = Dataset.from_generator(pairs, types, shapes, (1, 2))
    assert dataset.element_spec == (ArraySpec((None,), np.dtype("float32")), {"y": ArraySpec((), np.dtype("int32"))})
    assert [(x.tolist(), int(y["y"])) for x, y in dataset] == [([1.0, 1.0], 1), ([2.0], 2)]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"output_types": "int32"}, TypeError),
        ({"output_shapes": [4]}, TypeError),
        ({"output_types": "int32", "output_shapes": [4], "output_signature": ArraySpec((4,), "int32")}, TypeError),
        ({"output_types": ("int32", "int32"), "output_shapes": [[4]]}, ValueError),
        ({"output_types": {"x": "int32"}, "output_shapes": {"y": [4]}}, ValueError),
        ({"output_types": "int32", "output_shapes": 4}, ValueError),
        ({"output_types": "no type", "output_shapes": [4]}, ValueError),
    ],
)
def test_half_a_signature(given, error):
    with pytest.raises(error, match=r"output_types.*output_shapes.*expected"):
        Dataset.from_generator(lambda: iter([1]), **given)


def test_batches_belong_to_the_caller():
    data = np.arange(6.0)
    for dataset in (
        Dataset.from_tensor_slices(data).batch(4),
        Dataset.from_tensor_slices(data.reshape(3, 2)),
    ):
        for batch in dataset:
            batch += 100
    assert data.tolist() == [0, 1, 2, 3, 4, 5]


def test_unlike_elements_cannot_be_stacked():
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(2,\).*np.pad"):
        list(Dataset.from_source([[0], [0, 0]]).batch(2))
    with pytest.raises(ValueError, match="structures differ"):
        list(Dataset.from_source([{"a": 1}, (1,)]).batch(2))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda d: d.batch(0), "batch_size is 0"),
        (lambda d: d.shard(2, 2), "num_shards is 2 and index 2"),
        (lambda d: d.shard(0, 0), "num_shards is 0"),
        (lambda d: d.shuffle(0), "buffer_size is 0"),
        (lambda d: d.shuffle(seed=-1), "seed is -1"),
        (lambda d: d.repeat().shuffle(), "before repeat"),
        (lambda d: d.filter(bool).shuffle(), "buffer_size=1000"),
        (lambda d: d.with_options(assignment="round"), "'round'"),
    ],
)
def test_bad_values(call, text):
    with pytest.raises(ValueError, match=text):
        call(Dataset.range(4))


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.map(3),
        lambda d: d.filter(None),
        lambda d: d.batch(2.5),
        lambda d: d.take("2"),
        lambda d: d.with_options(auto_shard_policy=2),
        lambda d: Dataset.from_generator(iter([1])),
    ],
)
def test_bad_types(call):
    with pytest.raises(TypeError):
        call(Dataset.range(4))


def test_options_stay_through_transforms():
    dataset = Dataset.range(4).with_options(auto_shard_policy=AutoShardPolicy.DATA, assignment="block")
    dataset = dataset.map(lambda x: x).shuffle().batch(2).enumerate().with_options()
    assert dataset._options == (
        Dataset.range(1).with_options(auto_shard_policy=AutoShardPolicy.DATA, assignment="block")._options
    )


def test_options_in_tensorflows_form():
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    block = Dataset.range(4).with_options(assignment="block")
    expected = block.with_options(auto_shard_policy=AutoShardPolicy.OFF)._options
    assert block.with_options(options)._options == expected
    assert block.with_options(options).with_options(Options())._options == expected
    with pytest.raises(TypeError, match=r"DATA.*Use Options, or with_options\(auto_shard_policy="):
        block.with_options(AutoShardPolicy.DATA)
    with pytest.raises(ValueError, match="Pass only one"):
        block.with_options(options, auto_shard_policy=AutoShardPolicy.DATA)
    options.experimental_distribute.auto_shard_policy = "DATA"
    with pytest.raises(TypeError, match="expected AutoShardPolicy"):
        block.with_options(options)
    # A name that means nothing here is not taken in silence.
    for holder in (options, options.experimental_distribute):
        with pytest.raises(AttributeError):
            holder.auto_shard = 1


def test_repr_shows_the_calls():
    assert repr(Dataset.range(4).shuffle(3, seed=1).batch(2)) == (
        "<Dataset range(0, 4).shuffle(3, seed=1, reshuffle_each_iteration=True).batch(2)>"
    )
