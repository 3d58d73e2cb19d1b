"""Each kind of argument: its table, its value in a launch, its part of the hash, and what is refused."""

from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest
from feature_kernels import CLUSTER_SPACE, SPLIT_SPACE
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from spec_samples import SGEMM, copy_spec, refused

from autotile.core.device import device_profile
from autotile.core.dtypes import DTYPES
from autotile.cuda import packing
from autotile.cuda.compiler import CompileJob, compile_cubin
from autotile.cuda.driver import variable_symbol
from autotile.cuda.packing import by_value, pack_arguments, texture_object
from autotile.database.keys import space_hash
from autotile.errors import ArgumentError, CompileError, ConfigError, InputError, SpecError
from autotile.kernel import arguments
from autotile.kernel.arguments import ArgumentKind, ArgumentScope, TensorMap, Workspace, strides_bytes
from autotile.kernel.inputs import make_input
from autotile.kernel.launch import LaunchData, problem_scalars
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.sources import check_source
from autotile.kernel.spec import KernelSpec, reference_spec
from autotile.kernel.table import Table
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")


def data_of(spec: KernelSpec) -> LaunchData:
    return LaunchData.of(spec, spec.default, spec.at(), H200)


def compiled(source: str) -> bytes:
    return compile_cubin(CompileJob(source, source, str(Path(__file__)), "k", "sm_90", ())).cubin


class TestKinds:
    @pytest.mark.parametrize(("check", "expected"), [(False, {"M": 7, "alpha": 1.0}), (True, {"M": 7, "alpha": 0.75})])
    def test_values_of_scalars(self, check, expected):
        scalars = parse_spec(SGEMM, "sgemm.toml").scalars
        assert {s.name: s.operand({"M": 7, "N": 8, "K": 9}, check=check) for s in scalars} == expected

    def test_another_kind_needs_no_more_than_its_class_and_the_two_matches(self, monkeypatch):
        plain = parse_spec(SGEMM, "sgemm.toml")
        monkeypatch.setattr(arguments, "_KINDS", {**arguments._KINDS, "seed": SeedArgument})
        first, second = (
            parse_spec(SGEMM.replace("alpha = {", f"seed = {{ seed = {seed} }}\nalpha = {{"), "sgemm.toml")
            for seed in (3, 4)
        )
        assert len({space_hash(spec) for spec in (plain, first, second)}) == 3
        assert len(feasible_space(first, first.at(), H200)) == len(feasible_space(plain, plain.at(), H200))
        assert data_of(first) == LaunchData((), ())
        scalars = {"M": 1, "alpha": 1}
        with pytest.raises(AssertionError, match=r"SeedArgument\(name='seed', seed=3\)"):
            pack_arguments(first, data_of(first), addresses=dict.fromkeys("ABC", 0), scalars=scalars)


class SeedArgument(ArgumentKind, frozen=True):
    """``{ seed = 3 }``: a kind defined by a test."""

    seed: int

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        table.allow(("seed",))
        return cls(name, table.whole_number("seed", minimum=0))

    def meaning(self) -> dict[str, Any]:
        return {"seed": self.name, "value": self.seed}


class TestElementTypes:
    @pytest.mark.parametrize("name", DTYPES)
    def test_inputs_of_every_type(self, name):
        spec = copy_spec(dtype=name)
        buffer, dtype = spec.buffer("x"), DTYPES[name]
        shape = buffer.array_shape(spec.sizes)
        assert shape == dtype.array_shape((4096,))
        stored = make_input(buffer, shape, name)
        assert (stored.shape, stored.dtype) == (shape, np.dtype(dtype.storage))
        values = dtype.decode(stored)
        assert np.isfinite(values).all()
        assert len(np.unique(values)) > 1
        np.testing.assert_array_equal(dtype.encode(values), stored)
        assert (make_input(buffer, shape, name, seed=1) != stored).any()

    def test_another_name_is_the_same_type_and_the_components_of_vectors_are_an_axis_in_references(self):
        one, other = (copy_spec(dtype=name).buffer("x").meaning() for name in ("float8_e4m3", "float8_e4m3fn"))
        assert one == other
        text = copy_spec(dtype="float4").text
        parse_spec(text.replace('y = "x"', 'y = "shift(x, 1, 0)"'), "k.toml")
        refused(text, 'y = "x"', 'y = "sum(x, 1)"', "", "shape (4096,), but the buffer y has (4096, 4)")
        refused(text, "4096 }", '4096 }\ndtypes = ["float4"]', "problem.dtypes", "'float4' is a vector")

    def test_vectors_and_complex_numbers_by_value(self):
        spec = copy_spec(
            'origin = { scalar = "float3", value = [1, 2.5, -3] }',
            'factor = { scalar = "complex64", value = [0.5, -1] }',
            'bright = { scalar = "bool", value = true }',
            f'odd = {{ scalar = "int64", value = {2**53 + 1} }}',
        )
        origin, factor, bright, odd = problem_scalars(spec, spec.at(), check=False).values()
        np.testing.assert_array_equal(origin, np.array([1, 2.5, -3], np.float32))
        assert (by_value(origin).dtype.itemsize, by_value(origin).shape) == (12, (1,))
        assert (factor, bright, odd) == (np.complex64(0.5 - 1j), np.bool_(True), 2**53 + 1)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ('v = { scalar = "float3", value = [1, 2] }', "a list of 3 numbers"),
        ('v = { scalar = "float3", value = 1 }', "a list of 3 numbers"),
        ('v = { scalar = "int2", value = [1, 2.5] }', "a whole number"),
        ('v = { scalar = "float2", value = "N" }', "a list of 2 numbers"),
        ('v = { scalar = "int8", value = 1, check = 300 }', "the number 300 does not fit in int8"),
        ('v = { scalar = "uint2", value = [1, -1] }', "the number -1 does not fit in uint32"),
        ('v = { scalar = "float16", value = 1e5 }', "the number 100000.0 does not fit in float16"),
        ('v = { scalar = "complex64", value = [0, 1e39] }', "more than 30 digits does not fit in complex64"),
        ('v = { scalar = "float5", value = 1 }', "is not accepted; did you mean"),
        ('m = { tensor_map = "x", box = [8] }', "a tensor map cannot describe x of type float4"),
        ("p = { struct = {} }", "has no members"),
        ('p = { struct = { a = { pointer = "z" } } }', "names no buffer or workspace"),
        ("p = { struct = { a = { value = 1 } } }", "exactly one of the keys scalar, pointer, struct"),
        ('p = { struct = { a = { scalar = "float2", value = [1, 2, 3] } } }', "expected 2 numbers for each float2"),
        ('p = { struct = { a = { scalar = "int32", value = 1.5 } } }', "expected a whole number"),
        ('p = { struct = { a = { scalar = "int32", value = "M" } } }', "unknown name"),
        ('p = { struct = { "a b" = { scalar = "int32", value = 1 } } }', "is not a C identifier"),
        (f'p = {{ struct = {{ a = {{ scalar = "double4", value = {[1] * 516} }} }} }}', "has 4128 bytes"),
        ('f = { buffer = "float32", shape = [9], access = "in", constant = "d f" }', "is not the name of a variable"),
        ('f = { buffer = "float32", shape = [9], access = "in", constant = "" }', "is not the name of a variable"),
        ('f = { buffer = "float32", shape = [9], access = "out", constant = "d" }', "constant memory is read only"),
        ('f = { buffer = "float32", shape = [9], access = "in", constant = "d", pass = false }', "remove pass"),
    ],
)
def test_malformed_values(argument, said):
    with pytest.raises(SpecError, match=said):
        copy_spec(argument, dtype="float4")


class TestStructs:
    """Their layout is the compiler's, and their content is what the file declares."""

    SOURCES = Path(__file__).with_name("sources")

    def test_the_layout_is_that_of_the_compiler(self):
        struct = copy_spec((self.SOURCES / "structs.toml").read_text().replace("\n", " ")).arguments[-1]
        layout = struct.layout("float32")
        offsets = [offset for offset, _, _ in layout.scalars] + [offset for offset, _ in layout.pointers]
        members = ["flag", "n", "tag", "origin", "color", "corners[0]", "corners[1]", "box", "inner.small"]
        members += ["weights[0]", "weights[1]", "weights[2]", "factor", "last", "x", "inner.y"]
        pairs = zip(members, offsets, strict=True)
        checks = [f'static_assert(__builtin_offsetof(P, {m}) == {o}, "");' for m, o in pairs]
        checks.append(f'static_assert(sizeof(P) == {layout.size_bytes}, "");')
        compiled("\n".join([(self.SOURCES / "structs.cu").read_text(), *checks]))

    def test_values_and_addresses_are_packed_and_the_members_are_part_of_the_hash(self):
        spec = copy_spec(
            'w = { workspace = "float32", shape = ["BLOCK"], pass = false }',
            'p = { struct = { n = { scalar = "int32", value = "N" }, x = { pointer = "x" }, w = { pointer = "w" } } }',
        )
        scalars = problem_scalars(spec, spec.at(), check=False)
        addresses = {"x": 0x1000, "y": 0x2000, "w": 0x3000}
        packed = pack_arguments(spec, data_of(spec), addresses=addresses, scalars=scalars)
        assert (len(packed), packed[-1].tobytes()) == (3, np.array([4096, 0x1000, 0x3000], np.uint64).tobytes())
        one, two = (f'p = {{ struct = {{ n = {{ scalar = "int32", value = {n} }} }} }}' for n in (1, 2))
        assert space_hash(copy_spec(one)) != space_hash(copy_spec(two))

    @pytest.mark.parametrize(("value", "said"), [("N * N", "p.n is 16777216"), ("512 * BLOCK", "p.n is 32768")])
    def test_a_member_that_does_not_fit_in_its_type_is_refused_before_compiling(self, value, said):
        member = f'{{ scalar = "short2", value = [1, "{value}"] }}'
        spec = copy_spec(f"p = {{ struct = {{ inner = {{ struct = {{ n = {member} }} }} }} }}")
        assert check_config(spec, spec.default, spec.at(), H200).endswith(f"scalar {said}, which does not fit in int16")


class TestTextures:
    IMAGE = 'image = { buffer = "uchar4", shape = [16, "N"], access = "in", pass = false }'
    TEXTURE = 't = { texture = "image", filter = "linear", address = "wrap", normalized = true, read = "@" }'
    BOTH = (IMAGE, TEXTURE.replace("@", "normalized_float"))

    @staticmethod
    def spec_of(image: str, texture: str) -> KernelSpec:
        return copy_spec(image, texture, sizes="N = 4096 }\nragged = { N = 96")

    def test_a_texture_is_passed_instead_of_its_buffer_and_cannot_have_any_address_and_rows(self):
        spec = self.spec_of(*self.BOTH)
        assert spec.steps[0].arguments == ("x", "y", "t")
        (texture,) = data_of(spec).textures
        assert (texture.shape, texture.dtype, texture.pitch_bytes) == ((16, 4096), "uchar4", 16384)
        assert (texture.filter, texture.address, texture.is_normalized) == ("linear", "wrap", True)
        image, other = self.BOTH
        assert space_hash(spec) != space_hash(self.spec_of(image, other.replace("wrap", "mirror")))
        with pytest.raises(ArgumentError, match="16 bytes past a multiple of 512"):
            texture_object(texture, 0x1000 + 16)
        with pytest.raises(ArgumentError, match="rows of image are 12 bytes apart"):
            texture_object(texture._replace(shape=(4, 3)), 0x1000)

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('"image", f', '"imag", f', "names no buffer; did you mean 'image'"),
            ('"linear"', '"cubic"', "is not accepted"),
            (", normalized = true", "", "needs normalized = true"),
            ('"uchar4"', '"float3"', "textures do not hold"),
            ('"uchar4"', '"float64"', "textures do not hold"),
            ('"uchar4"', '"float4"', "only integers of 8 and 16 bits"),
            (', read = "normalized_float"', "", "is filtered only with read"),
            ('[16, "N"]', '["N"]', "a texture of one axis is read with tex1Dfetch"),
            ('[16, "N"]', '[2, 16, "N"]', "has 3 axes"),
            ('access = "in"', 'access = "inout"', "textures are read only"),
            ('"N"]', '"N + 1"]', "rows of image are 16388 bytes apart"),
            ('"N"]', '"max(N, 100)"]', "at the ragged sizes, rows of image are 400 bytes apart"),
        ],
    )
    def test_refusals(self, old, new, said):
        assert old in "".join(self.BOTH)
        with pytest.raises(SpecError, match=said):
            self.spec_of(*(part.replace(old, new) for part in self.BOTH))

    def test_texture_references_have_a_cure(self):
        with pytest.raises(CompileError, match="texture references were removed in CUDA 12"):
            compiled("texture<float, 2> tex; __global__ void k(float* y) { y[0] = tex2D(tex, 0, 0); }")


class TestConstantMemory:
    FILTER = 'f = { buffer = "float32", shape = [9], access = "in", constant = "d_filter" }'

    def test_a_constant_is_given_but_not_passed_and_the_template_must_have_the_variable(self):
        spec = copy_spec(self.FILTER)
        buffer = spec.buffer("f")
        assert (buffer.is_passed, buffer.is_given, buffer.constant) == (False, True, "d_filter")
        assert spec.steps[0].arguments == ("x", "y")
        assert space_hash(spec) != space_hash(copy_spec(self.FILTER.replace("d_filter", "e_filter")))
        check_source(spec, "__constant__ float d_filter[9];")
        check_source(copy_spec(self.FILTER.replace("d_f", "ns::d_f")), "namespace ns { int d_filter[1]; }")
        with pytest.raises(InputError, match="no variable d_filter; declare it as in __constant__ float d_filter"):
            check_source(spec, "__constant__ float d_filters[9];")

    def test_a_reference_kernel_takes_a_listed_buffer_as_a_pointer(self):
        reference = '[reference]\nkernel = "naive"\nblock = [32]\ngrid = [1]\n'
        text = copy_spec(self.FILTER).text.partition("[reference]")[0] + reference
        spec = parse_spec(text + 'arguments = ["f", "x", "y"]\n', "k.toml")
        assert reference_spec(spec, spec.at()).steps[0].arguments == ("f", "x", "y")
        assert spec.steps[0].arguments == ("x", "y")
        naive = reference_spec(parse_spec(text, "k.toml"), spec.at())
        assert (naive.steps[0].arguments, naive.buffer("f").constant) == (("x", "y"), "d_filter")

    def test_symbols_are_mangled_as_the_compiler_does(self):
        cubin = compiled(
            "__constant__ float one[4];\n"
            "namespace a { namespace bc { __constant__ float two[4]; } }\n"
            "__global__ void k(float* y) { y[0] = one[threadIdx.x] + a::bc::two[threadIdx.x]; }\n"
        )
        for name in ("one", "a::bc::two"):
            assert variable_symbol(name).encode() + b"\0" in cubin


class TestWorkspaces:
    SPEC = parse_spec(SPLIT_SPACE, "split.toml")
    SIZES: ClassVar = {**SPEC.sizes, "M": 100, "N": 200, "K": 320, "BATCH": 2}

    def data(self, split_k: int, tile: int = 16, spec: KernelSpec = SPEC) -> LaunchData:
        config = {"TILE": tile, "SPLIT_K": split_k, "FAULT": 0}
        return LaunchData.of(spec, config, spec.at(self.SIZES, "float16"), H200)

    def test_shapes_follow_the_configuration(self):
        partials, counters = self.data(5).workspaces
        assert partials == Workspace("partials", "float32", (5, 2, 100, 200), zeroed=False)
        assert counters == Workspace("counters", "uint32", (2, 7, 13), zeroed=True)
        assert (partials.size_bytes, counters.size_bytes) == (4 * 5 * 2 * 100 * 200, 4 * 2 * 7 * 13)
        assert [workspace.size_bytes for workspace in self.data(1).workspaces] == [0, 0]
        assert self.data(5) != self.data(2)
        assert self.data(1, tile=16) != self.data(1, tile=32)  # extents differ, though all are empty

    def test_a_negative_extent_is_refused_where_it_cannot_be_left_out(self):
        spec = parse_spec(SPLIT_SPACE.replace('"SPLIT_K if SPLIT_K > 1 else 0"', '"SPLIT_K - 2"'), "split.toml")
        said = r"memory: the workspace partials would have the shape -1 x 2 x 100 x 200"
        assert check_config(spec, {"TILE": 16, "SPLIT_K": 1, "FAULT": 0}, spec.at(self.SIZES), H200) == said
        configs = feasible_space(spec, spec.at(self.SIZES), H200).configs
        assert {config["SPLIT_K"] for config in configs} == {2, 5}
        with pytest.raises(ConfigError, match="add a rule that excludes it"):
            self.data(1, spec=spec)

    def test_buffers_and_workspaces_fit_in_the_devices_memory(self):
        elements = 2 * (100 * 320 + 320 * 200 + 100 * 200)
        for split_k, workspace_bytes in ((1, 0), (2, 4 * 2 * 2 * 20_000 + 4 * 2 * 7 * 13)):
            config = {"TILE": 16, "SPLIT_K": split_k, "FAULT": 0}
            needed = 2 * elements + workspace_bytes
            devices = [replace(H200, memory_bytes=given) for given in (needed, needed - 1)]
            problem = self.SPEC.at(self.SIZES, "float16")
            enough, little = (check_config(self.SPEC, config, problem, one) for one in devices)
            assert enough == ""
            assert "memory: its arrays and workspaces take 0.0 GiB" in little
        absurd = {**self.SIZES, **dict.fromkeys("MNK", 2**31 - 1)}
        said = r"the limit memory of NVIDIA H200 leaves none of the 27 .* choose smaller sizes"
        with pytest.raises(SpecError, match=said):
            feasible_space(self.SPEC, self.SPEC.at(absurd), H200)


@pytest.mark.parametrize("n", [1, 1000, 4096, 100_000])
def test_a_cluster_divides_the_grid_and_has_at_most_eight_blocks(n):
    spec = parse_spec(CLUSTER_SPACE, "swap.toml")
    found = feasible_space(spec, spec.at({"n": n}), H200)
    assert found.configs == [
        {"THREADS": threads, "CLUSTER": cluster, "WHOLE": whole}
        for threads in (64, 256)
        for cluster in (1, 2, 3, 8)
        for whole in (False, True)
        if whole or int(np.ceil(n / threads)) % cluster == 0
    ]
    reason = check_config(spec, {"THREADS": 64, "CLUSTER": 8, "WHOLE": False}, spec.at({"n": 65}), H200)
    assert reason.startswith("cluster: clusters of 8 blocks in a grid of 2 blocks, expected 1 to 8 that divide")


TRANSPOSE = Path(__file__).parents[2] / "examples" / "transpose_tma" / "transpose_tma.toml"
SPEC = load_kernel(str(TRANSPOSE)).spec
TEXT = TRANSPOSE.read_text()
SIZES = {"M": 1000, "N": 520}
DEFAULT = {"ROWS": 64, "COLUMNS": 32, "SWIZZLE": 128, "THREADS": 256}


def test_it_is_evaluated_for_a_configuration():
    data = LaunchData.of(SPEC, DEFAULT, SPEC.at(SIZES), H200)
    (found,) = data.tensor_maps
    assert found == TensorMap("A_map", "A", "float32", (1000, 520), (64, 32), (1, 1), 128, 128)
    assert found.strides_bytes == (4 * 520,)
    assert hash(data) == hash(LaunchData.of(SPEC, dict(DEFAULT), SPEC.at(SIZES), H200))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_strides_are_numpys(shape, element_bytes):
    expected = np.empty(shape, f"V{element_bytes}").strides[:-1]
    assert strides_bytes(tuple(shape), element_bytes) == expected


@pytest.mark.parametrize(
    ("box", "steps", "in_bytes", "shape", "said"),
    [
        ((64, 32), (1, 1), (128, 128), (1000, 520), ""),
        ((256, 256), (8, 1), (0, 0), (7, 4), ""),
        ((-1, 32), (1, 1), (0, 0), (8, 8), "has a box of -1 x 32 elements, expected 1 to 256 along each axis"),
        ((257, 32), (1, 1), (0, 0), (8, 8), "has a box of 257 x 32 elements"),
        ((1, 3), (1, 1), (0, 0), (8, 8), "a box of 12 bytes along the innermost axis, expected a multiple of 16"),
        ((1, 4), (1, 1), (16, 0), (8, 8), "has swizzle_bytes = 16, expected one of 0, 32, 64 or 128"),
        ((1, 64), (1, 1), (128, 0), (8, 8), "256 bytes along the innermost axis, more than its swizzle_bytes = 128"),
        ((1, 4), (9, 1), (0, 0), (8, 8), "has element strides of 9 x 1, expected 1 to 8, and 1 along"),
        ((1, 4), (1, 2), (0, 0), (8, 8), "has element strides of 1 x 2"),
        ((1, 4), (1, 1), (0, 32), (8, 8), "has l2_promotion_bytes = 32, expected one of 0, 64, 128 or 256"),
        ((1, 4), (1, 1), (0, 0), (8, 99), "has rows 396 bytes apart in the shape 8 x 99, expected a multiple of 16"),
        ((1, 1, 4), (1, 1, 1), (0, 0), (2, 2**30, 2**9), "beyond what a map can address"),
    ],
)  # fmt: skip
def test_what_the_hardware_takes(box, steps, in_bytes, shape, said):
    one = TensorMap("m", "A", "float32", shape, box, steps, *in_bytes)
    parts = [tuple(np.array([value, value]) for value in values) for values in (shape, box, steps, in_bytes)]
    table = TensorMap("m", "A", "float32", *parts[:3], *parts[3])
    assert [one.fits(), *table.fits()] == [not said] * 3
    assert said in one.explain()
    assert bool(one.explain()) == bool(said)


def test_a_table_and_one_row_agree():
    spec = parse_spec(TEXT.replace("SWIZZLE == 0 or COLUMNS * 4 == SWIZZLE", "ROWS > 0"), str(TRANSPOSE))
    configs = feasible_space(spec, spec.at(SIZES), H200).configs
    for rows, columns, swizzle in product((32, 256), (8, 16, 32, 64), (0, 32, 64, 128)):
        config = {"ROWS": rows, "COLUMNS": columns, "SWIZZLE": swizzle, "THREADS": 128}
        fits = swizzle == 0 or columns * 4 <= swizzle
        assert ("tensor_maps" in check_config(spec, config, spec.at(SIZES), H200)) == (not fits)
        assert (config in configs) == (fits and rows * columns * 4 + 8 <= 48 * 1024)


def test_a_box_without_extent_is_no_map():
    """As for an output that a configuration stores without the map; then the row pitch is not restricted."""
    text = TEXT.replace('box = ["ROWS", ', 'box = ["0 if THREADS == 512 else ROWS", ')
    spec = parse_spec(text, str(TRANSPOSE))
    found = feasible_space(spec, spec.at({"M": 8, "N": 9}), H200)
    assert {config["THREADS"] for config in found.configs} == {512}
    (absent,) = LaunchData.of(spec, found.config(0), spec.at(SIZES), H200).tensor_maps
    assert absent.is_absent
    parse_spec(text.replace("N = 276", "N = 277").replace("THREADS = 256\n", "THREADS = 512\n"), str(TRANSPOSE))
    with pytest.raises(SpecError, match="the limit tensor_maps of NVIDIA H200 leaves none of the 84"):
        feasible_space(SPEC, SPEC.at({"M": 8, "N": 9}), H200)


OF_A_WORKSPACE = TEXT.replace('tensor_map = "A"', 'tensor_map = "W"').replace(", pass = false }", " }") + (
    '\n[arguments.W]\nworkspace = "float32"\nshape = ["0 if ROWS == 256 else M", "THREADS // 2 - 63"]\npass = false\n'
)


class TestOfAWorkspace:
    def text(self, columns: str) -> str:
        return OF_A_WORKSPACE.replace("THREADS // 2 - 63", columns)

    def test_its_shape_is_that_of_the_configuration(self):
        spec = parse_spec(self.text("THREADS + N - N"), str(TRANSPOSE))
        (found,) = LaunchData.of(spec, DEFAULT, spec.at(SIZES), H200).tensor_maps
        assert (found.buffer, found.shape, found.is_absent) == ("W", (1000, 256), False)
        config = {**DEFAULT, "ROWS": 256}
        (found,) = LaunchData.of(spec, config, spec.at(SIZES), H200).tensor_maps
        assert (found.shape, found.is_absent) == ((0, 256), True)

    def test_the_limits_follow_the_configuration(self):
        """Rows of 508 bytes with 128 threads, of whole 16 bytes with others; an empty workspace has no map."""
        spec = parse_spec(self.text("127 if THREADS == 128 else THREADS"), str(TRANSPOSE))
        configs = feasible_space(spec, spec.at(SIZES), H200).configs
        assert {config["ROWS"] for config in configs if config["THREADS"] == 128} == {256}
        assert {config["ROWS"] for config in configs if config["THREADS"] == 512} == {32, 64, 128, 256}
        said = check_config(spec, {**DEFAULT, "THREADS": 128}, spec.at(SIZES), H200)
        assert "tensor_maps: the tensor map A_map of W has rows 508 bytes apart in the shape 1,000 x 127" in said

    def test_its_rows_at_the_ragged_sizes_and_where_no_map_and_no_struct_leads_to_it(self):
        with pytest.raises(SpecError, match="at the ragged sizes, rows of W are 260 bytes apart"):
            parse_spec(self.text("THREADS // 2 - 63"), str(TRANSPOSE))
        with pytest.raises(SpecError, match="'W' is not passed, has no tensor map"):
            parse_spec(OF_A_WORKSPACE.replace('tensor_map = "W"', 'tensor_map = "A"'), str(TRANSPOSE))

    def test_its_address_is_encoded(self, monkeypatch):
        spec = parse_spec(self.text("THREADS"), str(TRANSPOSE))
        data = LaunchData.of(spec, DEFAULT, spec.at(SIZES), H200)
        monkeypatch.setattr(packing, "encode_tensor_map", lambda tensor_map, pointer: (tensor_map.name, pointer))
        addresses = {"A": 16, "B": 32, "W": 256}
        packed = pack_arguments(spec, data, addresses=addresses, scalars={"M": 1000, "N": 520})
        assert packed == (16, 32, ("A_map", 256), 1000, 520)
