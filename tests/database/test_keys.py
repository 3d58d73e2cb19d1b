import pytest
from msgspec import structs
from spec_samples import SGEMM

from autotile.core.device import device_profile
from autotile.core.documents import convert
from autotile.database.keys import TuningKey, key_differences, library_key, space_hash
from autotile.kernel.operation import load_operation
from autotile.kernel.parser import parse_spec

SPACE = SGEMM.replace("(A @ B) + C", "(A @ B)")


def hash_of(text: str) -> str:
    return space_hash(parse_spec(text, "sgemm.toml"))


KEEPING = [  # what only says which configurations are tried
    ("BM = [32, 64, 128]", "BM = [32, 64, 128, 256]"),
    ("BM = 64", "BM = 32"),
    ("<= 2 * min(BM, BN)", "<= 4 * min(BM, BN)"),
    ("[launch]", '[heuristics]\nfew = "BM <= 64"\n\n[launch]'),
    ("[launch]", '[pruning]\nfew = "BM <= 64"\n\n[launch]'),
    ("C = alpha A B + beta C", "a product of matrices"),
    ("M = 4096", "M = 1024"),
    ("TM * TM + 2 * TM", "TM * TM + 3 * TM"),
    ("static_smem_bytes = 1024", "static_smem_bytes = 2048"),
    ("ceil_div(N, BN)", "ceil_div(N,(BN))"),
    ("BM = [32, 64, 128]\nBN = [32, 64, 128]", "BN = [32, 64, 128]\nBM = [32, 64, 128]"),
]
CHANGING = [  # what changes the meaning of a configuration
    ('entry = "sgemm"', 'entry = "sgemm2"'),
    ('["--use_fast_math"]', '["--use_fast_math", "-lineinfo"]'),
    ('"BM // TM"]', '"BM // TM", "1"]'),
    ("ceil_div(N, BN)", "ceil_div(N, BM)"),
    ("if STAGED else 0", "if STAGED else 4"),
    ('access = "inout"', 'access = "out"'),
    ("value = 1.0", "value = 3.0"),
    ("(A @ B)", "(A @ B) + C"),
    ("tolerance = 1e-5", "tolerance = 1e-3"),
    ("[default]", "EXTRA = [0]\n[default]\nEXTRA = 0"),
]


@pytest.mark.parametrize(
    ("old", "new", "kept"), [*((*one, True) for one in KEEPING), *((*one, False) for one in CHANGING)]
)
def test_the_hash_changes_with_the_meaning_of_configurations_alone(old, new, kept):
    assert SPACE.count(old) == 1
    assert (hash_of(SPACE.replace(old, new)) == hash_of(SPACE)) == kept


OTHER_VALUES = {
    "options": (),
    "sizes": {"M": 4096, "N": 2048, "K": 1025},
    "sm_count": 1,
    "smem_per_block_optin_bytes": 1,
    "l2_mode": "hot",
    "source": "replayed",
}


@pytest.mark.parametrize("name", TuningKey.__struct_fields__)
def test_every_field_tells_keys_apart(key, name):
    other = structs.replace(key, **{name: OTHER_VALUES.get(name, "other")})
    assert other.digest != key.digest
    (difference,) = key_differences(key, other)
    assert difference[0] == name
    assert difference[1] != difference[2]


def test_a_key_survives_json_and_neither_the_driver_nor_the_order_of_sizes_is_part_of_it(key):
    assert convert(key.to_json(), TuningKey) == key
    turned = structs.replace(key, sizes=dict(reversed(key.sizes.items())))
    assert list(turned.sizes) != list(key.sizes)
    assert turned.digest == key.digest
    assert key_differences(key, key) == ()
    assert not any("driver" in name for name in TuningKey.__struct_fields__)


def test_a_librarys_key_names_operation_library_and_version_but_no_conditions():
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
