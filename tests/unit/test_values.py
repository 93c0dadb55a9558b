"""Values to JSON and back: every value round-trips, and hostile text raises ValueError."""

import contextlib
import dataclasses
import enum
import json
import math
import subprocess
import sys
from collections import OrderedDict, deque, namedtuple
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from statexchange.errors import UnsupportedError
from statexchange.values import decode, encode, register_config, types_of


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    kept: int = dataclasses.field(default=5, init=False)


@dataclasses.dataclass(slots=True)
class Slots:
    inner: Any
    things: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Loud:
    value: int = 0

    def __post_init__(self) -> None:
        raise AssertionError("a constructor ran")


def there_and_back(value: Any) -> Any:
    return decode(encode(value), types=types_of(value))


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in value, type and sign, NaN included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.sampled_from([Color.PAIR, Level.LOW, Point(1, 2)])
anything = st.recursive(
    plain | st.sampled_from([*Color, *Level, Access.READ | Access.WRITE, torch.bfloat16, (), [], {}]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "__name__", "type", "value", ""]), inner, max_size=3)
        | st.builds(Point, st.integers(), inner)
        | st.builds(Frozen, inner)
        | st.builds(Slots, inner, st.lists(inner, max_size=2))
    ),
    max_leaves=12,
)


@given(anything)
def test_every_value_round_trips(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        2**70,
        "\ud800",
        "\0",
        {1: "a", "1": "b", None: "c"},
        ((),),
        {"$": 1},
    ],
    ids=repr,
)
def test_a_value_at_an_edge_round_trips(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_deep_nesting_works_and_a_cycle_is_an_error_that_names_its_path() -> None:
    deep: Any = 1
    for _ in range(30):
        deep = [{"a": (deep,)}] if isinstance(deep, list) else [deep]
    assert same(there_and_back(deep), deep)
    assert decode("[" * 101 + "]" * 101) == json.loads("[" * 101 + "]" * 101)
    cycle: dict[str, Any] = {}
    cycle["again"] = [cycle]
    with pytest.raises(ValueError, match=r"\.again\[0\]\.again\[0\]"):
        encode(cycle)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": bytearray()}]}, ".a[1].b"),
        ({"a": object}, ".a"),
        ({7: print}, "[7]"),
        ({(1, object()): 1}, "<key"),
        (Frozen({"deep": object()}), ".value.deep"),
        (Point(1, bytearray()), ".y"),
        ([Frozen], "[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_type_is_a_type_error_that_names_its_path(value: Any, path: str) -> None:
    with pytest.raises(TypeError, match="cannot write a") as caught:
        encode(value)
    assert path in str(caught.value)


def test_an_unset_field_is_named() -> None:
    broken = object.__new__(Slots)
    broken.inner = 1
    with pytest.raises(TypeError, match=r"'things'.* at \.a"):
        encode({"a": broken})


def test_an_unknown_type_becomes_a_dict_of_its_fields() -> None:
    assert decode(encode(Frozen(3))) == {"__name__": "Frozen", "value": 3, "kept": 5}
    assert decode(encode(Point(1, 2))) == {"__name__": "Point", "x": 1, "y": 2}
    assert decode(encode(Color.PAIR)) == {"__name__": "Color", "value": (1, 2)}
    (key,) = decode(encode({Level.LOW: 1}))
    assert "Level" in key


def test_other_mappings_come_back_as_dicts_in_their_order() -> None:
    assert list(decode(encode(OrderedDict(b=1, a=2))).items()) == [("b", 1), ("a", 2)]


def test_a_registered_type_is_rebuilt_without_running_its_code() -> None:
    register_config(Loud)
    assert decode(f'{{"$":"dataclass","type":"{__name__}.Loud","value":{{"value":4}}}}').value == 4
    with pytest.raises(TypeError, match="no dataclass"):
        register_config(int)


def test_new_fields_of_a_type_take_their_defaults_and_absent_fields_are_refused() -> None:
    old = encode(Slots(1)).replace(',"things":[]', "")
    assert decode(old, types=types_of(Slots(1))) == Slots(1, [])
    for broken in (old.replace('"inner"', '"outer"'), old.replace('"inner":1', "")):
        with pytest.raises(ValueError, match=r"inner|outer"):
            decode(broken, types=types_of(Slots(1)))


def test_nothing_is_imported_by_name() -> None:
    text = encode(Frozen(torch.float32)).replace(__name__, "this")
    text = text.replace("this.Frozen", "antigravity.Frozen")
    program = (
        "import sys; from statexchange.values import decode; "
        "print(decode(sys.argv[1]), 'antigravity' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, text], capture_output=True, text=True, check=True)
    assert done.stdout == "{'__name__': 'Frozen', 'value': 'torch.float32', 'kept': 5} False False\n"


def test_leaves_are_kept_by_name_and_two_of_one_name_are_refused() -> None:
    box = [object(), object()]
    kept: dict[str, object] = {}

    def keep(value: object, path: str) -> str | None:
        return kept.setdefault(path, value) and path if type(value) is object else None

    value = {"a": {"b": box[0]}, "c": [box[1], box[1]]}
    back = decode(encode(value, keep), leaves=kept)
    assert back == value
    with pytest.raises(ValueError, match="two values"):
        encode({"a": {"b": box[0]}, "a.b": box[1]}, keep)
    with pytest.raises(ValueError, match="not here"):
        decode(encode(value, keep))
    with pytest.raises(ValueError, match="malformed"):
        decode(encode(value, keep), leaves={})


NUMBERS = [np.bool_, *np.typecodes["AllInteger"], "e", "f", "d", "F", "D"]
OTHERS = [
    "g",
    "G",
    *(kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and not kind.__name__.endswith("info")),
]


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_numpy_number_comes_back_with_its_dtype(kind: Any) -> None:
    number = np.dtype(kind).type(1)
    back = decode(encode(number))
    assert (back, back.dtype) == (number, number.dtype)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_number_that_files_cannot_hold_is_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedError, match="as JSON"):
        encode(np.dtype(kind).type(1))


@pytest.mark.parametrize(
    "dtype", ["int64,,", "(" * 1000 + ",i4", "99999999i4", "i4,i4", "O", "M8[s]", ["int64"], 5, None]
)
def test_a_numpy_number_of_another_dtype_is_malformed(dtype: object) -> None:
    text = json.dumps({"a": {"$": "number", "dtype": dtype, "value": 3}})
    with pytest.raises(ValueError, match="not the dtype"):
        decode(text)


@pytest.mark.parametrize("wrap", [deque, lambda items: set(items), frozenset, lambda items: {(1, items[0]): 2}])
def test_a_kept_object_in_a_set_a_deque_or_a_key_is_refused(wrap: Any) -> None:
    kept = object()

    def keep(value: object, path: str) -> str | None:
        return "x" if value is kept else None

    value = {"a": [wrap([kept])]}
    with pytest.raises(UnsupportedError, match=r"\.a\[0\]"):
        encode(value, keep)
    assert decode(encode({"a": [kept]}, keep), leaves={"x": kept}) == {"a": [kept]}


def test_types_are_found_in_a_value_that_is_deeper_than_python_recurses() -> None:
    deep: Any = Color.RED
    for _ in range(5000):
        deep = [deep]
    assert list(types_of(deep).values()) == [Color]


HOSTILE = [
    '{"$":[]}', '{"$":{}}', '{"$":null}', '{"$":"float"}', '{"$":"float","value":"x"}', '{"$":"float","value":[]}',
    '{"$":"tuple","value":5}', '{"$":"dict","value":[1]}', '{"$":"dict","value":[[1,2,3]]}', '{"$":"enum","type":[]}',
    '{"$":"nothing"}', '{"$":"leaf"}', '{"$":"dtype"}', '{"$":"dataclass","type":"x","value":[1]}', "[" * 100_000,
    '{"$":"tuple","value":[' * 5_000, "", "{", b"\xff\xfe", '{"a":' + "9" * 5000 + "}",
]  # fmt: skip
HOSTILE += [
    '{"$":"bytesio","value":"AA==","position":-1}', '{"$":"bytesio","value":"AA==","position":"x"}',
    "[" * 102 + "]" * 102, '{"$":"device","value":"nonsense"}',
    json.dumps({"$": "set", "value": [number * ((1 << 61) - 1) for number in range(1000)]}),
    json.dumps({"$": "dict", "value": [[number * ((1 << 61) - 1), 0] for number in range(1000)]}),
]  # fmt: skip
TYPES = types_of([Frozen(1), Point(1), Color.RED, Access.READ, Loud])


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:30]))
def test_hostile_text_is_a_value_error(text: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(text, types=TYPES)


@pytest.mark.parametrize("tag", ["enum", "namedtuple", "dataclass"])
@pytest.mark.parametrize("name", ["Frozen", "Point", "Color", "Access"])
@pytest.mark.parametrize("value", ["{}", "[]", '{"x":1,"y":2,"z":3}', '"red"', "12345"])
def test_a_tag_that_does_not_fit_the_type_builds_nothing(tag: str, name: str, value: str) -> None:
    try:
        built = decode(f'{{"$":"{tag}","type":"{__name__}.{name}","value":{value}}}', types=TYPES)
    except ValueError:
        return
    assert (tag, name, built) in [("enum", "Color", Color.RED)]


tags = st.sampled_from(["float", "tuple", "dict", "dtype", "leaf", "enum", "namedtuple", "dataclass", 1, None])
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.just("$"), inner, max_size=3)
        | st.fixed_dictionaries(
            {"$": tags}, optional={"value": inner, "name": inner, "type": st.sampled_from(list(TYPES)) | inner}
        )
    ),
    max_leaves=10,
)


@given(jsons)
def test_any_json_is_a_value_or_a_value_error(raw: Any) -> None:
    with contextlib.suppress(ValueError):
        decode(json.dumps(raw), types=TYPES)


def test_types_inside_sets_and_deques_are_rebuilt_and_unknown_ones_stay_readable() -> None:
    value = {"set": {Color.RED}, "frozen": frozenset([Point(1, 2)]), "deque": deque([Point(3, 4)], maxlen=5)}
    assert there_and_back(value) == value
    unknown = decode(encode({Color.RED}))
    assert [type(item) for item in unknown] == [str]
    assert "Color" in next(iter(unknown))


def test_types_are_found_beside_an_unset_field() -> None:
    @dataclasses.dataclass
    class Unset:
        value: int

    assert list(types_of(Unset.__new__(Unset)).values()) == [Unset]


def test_a_classic_namedtuple_is_rebuilt_by_its_fields() -> None:
    assert there_and_back(Pair(1, [2])) == Pair(1, [2])
    assert type(there_and_back(Pair(1, [2]))) is Pair


Pair = namedtuple("Pair", "one two")
