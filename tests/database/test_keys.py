import pytest
from msgspec import structs

from autotile.core.device import device_profile
from autotile.core.documents import convert
from autotile.database.keys import TuningKey, key_differences, library_key, space_hash
from autotile.kernel.operation import load_operation
from autotile.kernel.parser import parse_spec

SPACE = """
[kernel]
name = "scale"
template = "scale.cu"
entry = "scale"
summary = "y = a x"
[problem]
sizes = { N = 65536 }
[parameters]
BLOCK = [64, 128, 256]
ITEMS = [1, 2, 4]
[default]
BLOCK = 128
ITEMS = 1
[rules]
enough = "BLOCK * ITEMS <= 512"
[launch]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK * ITEMS)"]
min_registers = "ITEMS + 8"
[arguments]
x = { buffer = "dtype", shape = ["N"], access = "in" }
y = { buffer = "dtype", shape = ["N"], access = "out" }
N = { scalar = "int32", value = "N" }
a = { scalar = "float32", value = 2.0, check = 0.5 }
[reference]
outputs = { y = "a * x" }
"""


def hash_of(text: str) -> str:
    return space_hash(parse_spec(text, "scale.toml"))


KEEPING = [  # what only says which configurations are tried
    ("[64, 128, 256]", "[64, 128, 256, 512]"),
    ("BLOCK = 128", "BLOCK = 64"),
    ('enough = "BLOCK * ITEMS <= 512"', 'enough = "BLOCK * ITEMS <= 1024"'),
    ("[launch]", '[heuristics]\nfew = "ITEMS < 4"\n\n[launch]'),
    ("[launch]", '[pruning]\nfew = "ITEMS < 4"\n\n[launch]'),
    ("y = a x", "scale a vector"),
    ("N = 65536", "N = 1024"),
    ("ITEMS + 8", "ITEMS + 9"),
    ("ceil_div(N, BLOCK * ITEMS)", "ceil_div(N,(BLOCK*ITEMS))"),
    ("BLOCK = [64, 128, 256]\nITEMS = [1, 2, 4]", "ITEMS = [1, 2, 4]\nBLOCK = [64, 128, 256]"),
]
CHANGING = [  # what changes the meaning of a configuration
    ('entry = "scale"', 'entry = "scale2"'),
    ('summary = "y = a x"', 'options = ["--use_fast_math"]'),
    ('block = ["BLOCK"]', 'block = ["BLOCK", "1"]'),
    ("ceil_div(N, BLOCK * ITEMS)", "ceil_div(N, BLOCK)"),
    ("min_registers", 'dynamic_smem_bytes = "4 * BLOCK"\nmin_registers'),
    (
        'y = { buffer = "dtype", shape = ["N"], access = "out" }',
        'y = { buffer = "dtype", shape = ["N"], access = "inout" }',
    ),
    ("value = 2.0", "value = 3.0"),
    ('y = "a * x"', 'y = "a * x + 1"'),
    ('outputs = { y = "a * x" }', 'outputs = { y = "a * x" }\ntolerance = 1e-3'),
    ("[default]", "EXTRA = [0]\n[default]\nEXTRA = 0"),
]


@pytest.mark.parametrize(
    ("old", "new", "kept"), [*((*one, True) for one in KEEPING), *((*one, False) for one in CHANGING)]
)
def test_the_hash_changes_with_the_meaning_of_configurations_alone(old: str, new: str, kept: bool) -> None:
    assert SPACE.count(old) == 1
    assert (hash_of(SPACE.replace(old, new)) == hash_of(SPACE)) == kept


def test_digest_does_not_depend_on_the_order_of_sizes(key: TuningKey) -> None:
    turned = structs.replace(key, sizes=dict(reversed(key.sizes.items())))
    assert list(turned.sizes) != list(key.sizes)
    assert turned.digest == key.digest


OTHER_VALUES = {
    "options": (),
    "sizes": {"M": 4096, "N": 2048, "K": 1025},
    "sm_count": 1,
    "smem_per_block_optin_bytes": 1,
    "l2_mode": "hot",
    "source": "replayed",
}


@pytest.mark.parametrize("name", TuningKey.__struct_fields__)
def test_every_field_tells_keys_apart(key: TuningKey, name: str) -> None:
    other = structs.replace(key, **{name: OTHER_VALUES.get(name, "other")})
    assert other.digest != key.digest
    (difference,) = key_differences(key, other)
    assert difference[0] == name
    assert difference[1] != difference[2]


def test_a_key_survives_json_and_the_driver_is_no_part_of_it(key: TuningKey) -> None:
    assert convert(key.to_json(), TuningKey) == key
    assert key_differences(key, key) == ()
    assert not any("driver" in name for name in TuningKey.__struct_fields__)


def test_a_librarys_key_names_operation_library_and_version_but_no_conditions() -> None:
    operation, device = load_operation("matmul"), device_profile("h200")

    def key(library: str = "cublas", version: str = "13.1", **sizes: int) -> TuningKey:
        problem = operation.resolve({"M": 64, "N": 32, "K": 16, **sizes}, "bfloat16")
        return library_key(operation, problem, device, library, version, nvrtc_version="13.0")

    found = key()
    assert (found.kernel, found.dtype, found.template_hash) == ("matmul:cublas", "bfloat16", operation.digest)
    assert found.sizes == {"M": 64, "N": 32, "K": 16, "BATCH": 1, "TRANS_A": 0, "TRANS_B": 0, "OUT_FP32": 0}
    assert key(ALIGNED=0, EMULATE=0, NONDETERMINISTIC=1) == found
    others = [key("mine"), key(version="13.2"), key(TRANS_A=1)]
    assert len({one.digest for one in [found, *others]}) == 4
