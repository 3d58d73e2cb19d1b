"""Tests for layers and models of PyTorch: on the CPU, where all is left to PyTorch, and on a GPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from child_python import python
from made_models import close

import autotile
from autotile.errors import InputError
from autotile.serving.arrays import torch_library
from autotile.serving.aside import wait_for_compilations
from autotile.serving.dispatcher import default_dispatcher

torch = pytest.importorskip("torch")
products = pytest.importorskip("autotile.torch.products")
nn = torch.nn
TEXTS = (
    ".*torch.jit",
    "TypedStorage",
    "TensorFloat32",
    "dynamo_pgo",
    "The CUDA Graph is empty",
    "Attempting to run cuBLAS",
)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in TEXTS]
"""Warnings of PyTorch's own compiler."""


class Mlp(nn.Module):  # type: ignore[misc]
    """Two layers that gain at some number of rows, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 32, bias=False)
        self.head = nn.Linear(32, 8).double()

    def forward(self, x: Any) -> Any:
        return self.head(self.second(torch.relu(self.first(x))).double())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp()


@pytest.fixture
def apart():
    """Inductor as it is before autotile joins, and after."""
    inductor = pytest.importorskip("autotile.torch.inductor")
    before = list(inductor._asked)
    torch._dynamo.reset()
    yield
    autotile.torch.join_inductor(False)
    inductor._asked[:] = before
    torch._dynamo.reset()


EAGER = """
import sys, torch, autotile
layer = torch.nn.Linear(2048, 4096)
assert autotile.torch.accelerate(layer, device="h200").replaced
layer(torch.ones(2, 2048, requires_grad=True)).sum().backward()
assert "torch._dynamo" not in sys.modules
"""


def test_an_eager_program_does_not_import_the_compiler():
    done = python("-c", EAGER)
    assert done.returncode == 0, done.stderr
    assert vars(products._join_traced) == vars(torch.compiler.assume_constant_result(lambda: True))


STACKED = [
    ((3, 5, 64), (64, 8)), ((2, 1, 5, 64), (3, 64, 8)), ((2, 3, 5, 64), (2, 3, 64, 8)), ((5, 64), (3, 64, 8)),
    ((1, 5, 64), (3, 64, 8)), ((64,), (64, 8)), ((5, 64), (64,)), ((64,), (64,)), ((64,), (3, 64, 8)),
    ((2, 3, 5, 64), (64,)),
]  # fmt: skip
"""Shapes of factors that are neither two matrices nor two stacks of as many."""


@pytest.mark.parametrize("shapes", STACKED)
def test_a_traced_product_has_the_shape_that_pytorch_gives_it(shapes):
    with torch._subclasses.FakeTensorMode():
        a, b = (torch.empty(shape, device="cuda") for shape in shapes)
        assert autotile.torch.matmul(a, b).shape == torch.matmul(a, b).shape


def of_dual_numbers(multiply: Any, a: Any, b: Any) -> Any:
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        return forward.unpack_dual(multiply(forward.make_dual(a, -a), b)).tangent


TRANSFORMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "dual": of_dual_numbers,
    "jvp": lambda multiply, a, b: torch.func.jvp(multiply, (a, b), (b.sum() * a, a.sum() * b)),
    "grad": lambda multiply, a, b: torch.func.grad(lambda *both: multiply(*both).square().sum(), (0, 1))(a, b),
    "vmap": lambda multiply, a, b: torch.func.vmap(multiply, (0, None))(torch.stack([a, -a]), b),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(shared=True))])
@pytest.mark.parametrize("shapes", [((5, 6), (6, 4)), ((2, 5, 6), (6, 4)), ((6,), (2, 6, 4))])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transformed_products_are_pytorchs(transform, shapes, device):
    a, b = (torch.randn(shape, device=device) for shape in shapes)
    # Of symbolic sizes, which it takes after others, PyTorch 2.11 transforms no product, its own neither.
    compiled = torch.compile(partial(transform, autotile.torch.matmul), backend="eager", dynamic=False)
    for transformed in (partial(transform, autotile.torch.matmul), compiled):
        torch.testing.assert_close(transformed(a, b), transform(torch.matmul, a, b))


@pytest.mark.parametrize("values", [{"allow_tf32": (True, False)}, {"fp32_precision": ("tf32", "ieee")}])
def test_tf32_is_allowed_by_either_setting(values):
    """PyTorch raises where one is asked for after the other was set."""
    ((name, (allow, forbid)),) = values.items()
    for value in (allow, forbid) if hasattr(torch.backends.cuda.matmul, name) else ():
        setattr(torch.backends.cuda.matmul, name, value)
        assert torch_library(torch).allows_tf32() == (value == allow)
        assert products._is_plain(torch.ones(2, 2)) == (value == forbid)


def test_products_on_the_cpu_are_pytorchs():
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 2, dtype=torch.float32)
    compiled = torch.compile(autotile.torch.matmul, backend="eager", fullgraph=True)
    for multiply in (autotile.torch.matmul, compiled, torch.fx.symbolic_trace(autotile.torch.matmul)):
        torch.testing.assert_close(multiply(a, b), a @ b)
        torch.testing.assert_close(torch.autograd.grad(multiply(a, b).sum(), a), torch.autograd.grad((a @ b).sum(), a))
    for factors in (([[1.0]], b), (a, "b")):
        with pytest.raises(TypeError, match="must be Tensor"):
            autotile.torch.matmul(*factors)


def test_factors_that_cannot_be_multiplied_are_an_error_of_pytorch():
    for shapes in (((), (64,)), ((2, 5, 64), (3, 64, 8)), ((64,), ())):
        with pytest.raises(RuntimeError):
            autotile.torch.matmul(*map(torch.empty, shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", STACKED)
def test_stacks_and_vectors_with_their_gradients(shapes):
    factors = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    expected = torch.matmul(*(one.double() for one in factors))
    gradient = torch.randn(expected.shape, device="cuda")
    compiled = [torch.compile(autotile.torch.matmul, fullgraph=True)] if shapes == STACKED[1] else []
    for compute in (autotile.torch.matmul, *compiled):
        with torch.no_grad():
            assert close(compute(*factors), expected)
        found = torch.autograd.grad(compute(*factors), factors, gradient)
        want = torch.autograd.grad(expected, factors, gradient.double(), retain_graph=True)
        assert all(close(own, one) for own, one in zip(found, want, strict=True))


class TestAccelerate:
    def test_the_layers_that_may_gain_change_their_class_alone(self, model):
        x, before = torch.randn(4, 64), {name: id(one) for name, one in model.named_parameters()}
        expected, state = model(x), copy.deepcopy(model.state_dict())
        calls: list[Any] = []
        model.first.register_forward_hook(lambda *given: calls.append(given))
        made = autotile.torch.accelerate(model, device="h200")
        assert [one.names for one in made.replaced] == [("first",), ("second",)]
        assert made.left == {"head": "its dtype is float64"}
        assert type(model.first) is type(model.second) is autotile.torch.Linear
        assert type(model.head) is nn.Linear
        assert {name: id(one) for name, one in model.named_parameters()} == before
        assert torch.equal(model(x), expected)
        assert len(calls) == 1
        assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
        assert list(model.state_dict()) == list(state)
        model.load_state_dict(state)

    def test_it_is_undone_exactly_by_the_one_that_did_it(self, model):
        before = [(type(one), dict(vars(one))) for one in model.modules()]
        with autotile.torch.accelerate(model, device="h200") as made:
            again = autotile.torch.accelerate(model, device="h200")
            assert (again.replaced, again.left["first"]) == ((), "it is autotile's already")
            again.undo()
            assert type(model.first) is autotile.torch.Linear
        assert [(type(one), dict(vars(one))) for one in model.modules()] == before
        made.undo()
        assert type(model.first) is nn.Linear

    def test_a_copy_stays_accelerated_and_shared_layers_are_replaced_once(self, model):
        both = nn.Sequential(model.first, model.second, model.first)
        made = autotile.torch.accelerate(both, device="h200")
        assert sum(len(one.names) for one in made.replaced) == 2
        copied = copy.deepcopy(model)
        made.undo()
        assert (type(copied.first), type(model.first)) == (autotile.torch.Linear, nn.Linear)
        x = torch.randn(4, 64)
        assert torch.equal(copied(x), model(x))

    def test_what_is_left_has_a_reason(self):
        class Own(nn.Linear):  # type: ignore[misc]
            pass

        class Packed(torch.Tensor):  # type: ignore[misc]
            pass

        patched = nn.Linear(64, 256, bias=False)
        patched.forward = lambda x: x
        mixed = nn.Linear(64, 256)
        mixed.bias.data = mixed.bias.data.double()
        model = nn.ModuleDict(
            {
                "own": Own(64, 256),
                "patched": patched,
                "mixed": mixed,
                "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(64, 256)),
                "small": nn.Linear(3, 5, dtype=torch.bfloat16, device="meta"),
                "subclass": nn.Linear(64, 256, bias=False),
            }
        )
        model.subclass.weight = nn.Parameter(torch.ones(256, 64).as_subclass(Packed))
        left = autotile.torch.accelerate(model, device="h200").left
        said = ["computes in its own way", "forward was replaced", "another dtype"]
        said += ["ParametrizedLinear", "as fast", "Packed"]
        assert [name for name, text in zip(model, said, strict=True) if text not in left[name]] == []
        assert type(model.own) is Own

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_where_there_is_no_gpu_nothing_is_replaced(self, device):
        made = autotile.torch.accelerate(nn.Linear(64, 256, bias=False, device=device))
        assert made.left == {"": f"it is on the device {device}"}

    def test_what_is_expected_is_shown(self, model):
        made = autotile.torch.accelerate(model, device="h200", rows=[777])
        gains = {gain.rows: gain for gain in made.replaced[0].gains}
        assert {1, 16, 128, 777, 1024, 4096} <= gains.keys()
        gaining = [gain for gain in gains.values() if gain.launched]
        assert all(gain.time_us < gain.library_us for gain in gaining)
        assert repr(made) == "<Acceleration: 2 linear layers of autotile, 1 left to PyTorch>"
        for text in (str(made), made._repr_html_()):
            assert "its dtype is float64" in text
            assert gaining[0].kernel in text
        assert made.to_json()["left"] == made.left

    def test_wrong_arguments(self, model):
        for asked, said in (({"model": "mine"}, "model"), ({"rows": [0]}, "positive"), ({"device": "h2000"}, "h2000")):
            with pytest.raises(InputError, match=said):
                autotile.torch.accelerate(**{"model": model, **asked})


class TestLeftToPytorch:
    """On the CPU, and wherever calls are traced, `linear` is PyTorch's own function."""

    @pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (64,), (0, 64), (2, 0, 64)])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_any_shape(self, shape, has_bias):
        x, w, b = torch.randn(shape), torch.randn(48, 64), torch.randn(48)
        given = (x, w, b) if has_bias else (x, w)
        products._notes.clear()
        assert torch.equal(autotile.torch.linear(*given), nn.functional.linear(*given))
        noted = [note[2] for key, note in products._notes.items() if isinstance(key, tuple) and key[0] == shape]
        assert noted == [nn.functional.linear] * (0 in shape)  # the next such call does not ask
        assert torch.equal(autotile.torch.linear(*given), nn.functional.linear(*given))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested_tensors_which_have_no_shape(self):
        rows, weight = [torch.randn(count, 64) for count in (2, 3)], torch.randn(48, 64)
        made = autotile.torch.linear(torch.nested.nested_tensor(rows), weight)
        assert all(torch.allclose(one, row @ weight.T, atol=1e-4) for one, row in zip(made.unbind(), rows, strict=True))

    def test_errors_are_pytorchs(self):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            autotile.torch.linear(torch.randn(3, 5), torch.randn(4, 6))
        with pytest.raises(TypeError, match="linear"):
            autotile.torch.linear(1, 2)  # type: ignore[arg-type]

    def test_transforms_autocast_checkpoints_and_tracers(self, model):
        autotile.torch.accelerate(model, device="h200")
        plain = copy.deepcopy(model)
        autotile.torch.accelerate(plain, device="h200").undo()
        for module in plain.modules():
            if type(module) is autotile.torch.Linear:
                module.__class__ = nn.Linear
        x = torch.randn(4, 64)
        assert torch.allclose(torch.func.vmap(model)(x), plain(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert model.first(x).dtype == torch.bfloat16
        gradients = []
        for one, reentrant in ((plain, False), (model, False), (model, True)):
            given = x.clone().requires_grad_()
            torch.utils.checkpoint.checkpoint(one, given, use_reentrant=reentrant).sum().backward()
            gradients.append(given.grad)
        assert all(torch.equal(one, gradients[0]) for one in gradients)
        make_fx = torch.fx.experimental.proxy_tensor.make_fx
        traced = make_fx(partial(autotile.torch.linear, emulate=False), tracing_mode="symbolic")
        graph = traced(x, torch.randn(8, 64)).graph
        assert [str(node.target) for node in graph.nodes if node.op == "call_function"][-1] == "aten.mm.default"
        with torch._subclasses.FakeTensorMode():
            assert autotile.torch.linear(torch.empty(3, 64), torch.empty(8, 64)).shape == (3, 8)

    @pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
    def test_graphs_and_a_script_are_pytorchs_which_has_the_same_parameters(self, model):
        layers = nn.Sequential(model.first, nn.ReLU(), model.second)
        autotile.torch.accelerate(layers, device="h200")
        assert type(layers[0]) is autotile.torch.Linear
        x = torch.randn(4, 64)
        expected = layers(x)
        graphs = torch.fx.symbolic_trace(layers), torch.jit.trace(layers, x)
        scripted = torch.jit.script(layers)
        for traced in (scripted, *graphs):
            assert torch.equal(traced(x), expected)
        assert torch.equal(layers(x), expected)
        assert scripted[0].weight.data_ptr() == model.first.weight.data_ptr()

    @pytest.mark.parametrize("strict", [False, True])
    def test_an_exported_graph_is_pytorchs(self, model, strict):
        autotile.torch.accelerate(model, device="h200")
        exported = torch.export.export(model, (torch.randn(4, 64),), strict=strict)
        assert "autotile" not in str(exported.graph)
        assert str(exported.graph).count("aten.linear.default") == 3

    def test_a_call_that_is_left_is_counted_until_the_choice_changes(self):
        x, w = torch.randn(4, 64), torch.randn(48, 64)
        served = autotile.get_best_kernel("matmul", M=4, N=48, K=64, dtype="float32", device="h200")
        calls, key = served.calls, (x.shape, w.shape, x.dtype, True, True, torch.is_grad_enabled())
        products._products.note(key, (served, served.choice, nn.functional.linear))
        autotile.torch.linear(x, w)
        assert served.calls == calls + 1
        served.choice = copy.copy(served.choice)
        autotile.torch.linear(x, w)
        assert served.calls == calls + 1
        default_dispatcher.clear()
        assert key not in products._notes

    def test_each_layout_of_a_product_is_chosen(self):
        a = torch.ones(512, 512, dtype=torch.bfloat16)
        asked = {
            "m": 4096,
            "n": 4096,
            "k": 4096,
            "dtype": "bfloat16",
            "trans_b": True,
            "emulate": True,
            "device": "h200",
        }
        for b in (a, a.t()):
            assert products._products.find(a, b, "options") is None
            assert products._chosen((a, b), "options", (a.shape, b.shape), asked, (512, 512)) is None
            assert wait_for_compilations(60)
            assert products._products.find(a, b, "options").kernel.is_library

    def test_a_layer_notes_what_computes_as_long_as_all_choices_stay(self, monkeypatch):
        asked: list[Any] = []
        monkeypatch.setattr(
            products, "_decided_linear", lambda x, w, b, *_: asked.append(x) or nn.functional.linear(x, w, b)
        )
        layer, x = autotile.torch.Linear(64, 48, bias=False), torch.randn(4, 64)
        served, fresh = (
            autotile.get_best_kernel("matmul", M=4, N=n, K=64, dtype="float32", device="h200") for n in (48, 32)
        )
        key = (x.shape, layer.weight.shape, x.dtype, True, True, False)

        def calls_of(module: Any) -> tuple[int, int]:
            """Numbers of calls that were counted, and of those that asked for a choice."""
            before = served.calls
            asked.clear()
            with torch.no_grad():
                assert torch.equal(module(x), nn.functional.linear(x, module.weight))
            return served.calls - before, len(asked)

        assert calls_of(layer) == (0, 1)
        products._products.note(key, (served, served.choice, nn.functional.linear))
        assert calls_of(layer) == calls_of(layer) == (1, 0)
        products._notes.clear()
        assert calls_of(layer) == (1, 0)
        assert calls_of(copy.deepcopy(layer)) == (0, 1)
        assert "_noted" not in pickle.loads(pickle.dumps(layer)).__dict__
        fresh.adopt(autotile.get_best_kernel("matmul", M=4, N=32, K=64, dtype="float32", device="h200", library=False))
        assert calls_of(layer) == (0, 1)
        known = products.EPOCH.now, (x.numel(), False), (served, nn.functional.linear)
        layer.note(*known)
        assert calls_of(layer) == (1, 0)
        assert calls_of(layer.to(torch.float32)) == (0, 1)
        layer.note(*known)
        default_dispatcher.note_requests()  # as `autotile.tuning` does
        default_dispatcher.asked = None
        assert calls_of(layer) == (0, 1)
        launched: list[Any] = [x.new_ones(4, 48), None]
        layer.note(products.EPOCH.now, (x.numel(), False), (served, lambda *given: launched.pop(0)))
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))  # what autograd records is another kind
        with torch.no_grad():
            assert torch.equal(layer(x), torch.ones(4, 48))
            options = {"tracing_mode": "symbolic", "_allow_non_fake_inputs": True}
            traced = torch.fx.experimental.proxy_tensor.make_fx(layer, **options)(x)
            assert torch.equal(traced(x), nn.functional.linear(x, layer.weight))
        assert calls_of(layer) == (0, 1)  # the function has refused the tensors

    def test_only_plain_tensors_like_the_first_are_launched_at_once(self, monkeypatch):
        """In place of a launch, PyTorch's product on the CPU."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        served = copy.copy(autotile.get_best_kernel("matmul", M=512, N=4096, K=4096, dtype="float32", device="h200"))
        asked, (x, w, bias) = list[Any](), (torch.randn(size) for size in ((4, 64), (48, 64), (48,)))
        known = SimpleNamespace(
            kernel=served, launch=lambda a, b, bias=None: asked.append((bias, served.is_library)) or a @ b.t()
        )
        products._guard("a kind", known, (x, w, bias))
        kernel, choice, launch = products._notes["a kind"]
        assert (kernel, choice) == (served, served.choice)
        assert torch.allclose(launch(x, w, bias), nn.functional.linear(x, w, bias), atol=1e-5)
        assert asked == [(None, False)]
        others = [x.double(), torch.randn(5, 64), x[:, :32], torch.randn(64, 4).t(), x.to("meta")]
        others += [x.as_subclass(type("Own", (torch.Tensor,), {})), x.clone().requires_grad_()]  # or a gradient is lost
        assert [launch(one, w, bias) for one in others] == [None] * 7
        assert launch(x, w.clone().requires_grad_(), bias) is None
        assert launch(x, w) is None, "a bias that was taken away"
        assert launch(x.flatten().repeat(2)[1:257].view(4, 64), w, bias) is None, "not aligned"
        torch.vmap(lambda one: asked.append(launch(one, w, bias)) or one)(x.expand(2, 4, 64))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            asked.append(launch(x, w, bias))
        with torch.autograd.forward_ad.dual_level():
            asked.append(launch(x, w, bias))
        with pytest.importorskip("torch.utils.flop_counter").FlopCounterMode(display=False):
            asked.append(launch(x, w, bias))
        with torch.device("cpu"):  # a mode of functions
            asked.append(launch(x, w, bias))
        torch.fx.experimental.proxy_tensor.make_fx(lambda one: asked.append(launch(one, w, bias)) or one)(x)
        monkeypatch.setattr(products, "allows_tf32", lambda: True)
        assert [launch(x, w, bias), *asked[1:]] == [None] * 7
        monkeypatch.setattr(products, "allows_tf32", lambda: False)
        with torch.inference_mode():
            inferred = x.clone()
        for again in (False, True):  # the second time, PyTorch's guards know such tensors, too
            assert [launch(one, w, bias) is not None for one in (inferred, x, inferred.double())] == [
                again,
                True,
                False,
            ]
            products._guard("a kind", known, (inferred, w, bias))
        assert products._notes["a kind"][2] is launch
        assert len(products._notes["guards", "a kind"]) == 2
        served.choice = copy.copy(served.choice)
        products._guard("a kind", known, (x, w, bias))
        assert products._notes["a kind"][2] is not launch
        products._guard("no bias", known, (x, w))
        assert products._notes["no bias"][2](x, w, bias) is None, "a bias that was added"
        products._guard("one tensor twice", known, (x, x))
        assert "one tensor twice" not in products._notes

    def test_each_layout_of_a_product_is_left_to_pytorch_by_itself(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        sizes = {"M": 4096, "N": 4096, "K": 4096, "TRANS_B": 1}
        known = SimpleNamespace(kernel=autotile.get_best_kernel("matmul", **sizes, dtype="bfloat16", device="h200"))
        monkeypatch.setattr(type(products._products), "find", lambda *_: known)
        products._notes.clear()
        a = torch.randn(8, 8, dtype=torch.bfloat16)
        for b in (a, a.t()):
            assert torch.equal(products._launched(a, b, True), a @ b)
        assert [note[2] for note in products._notes.values() if isinstance(note, tuple)] == [torch.mm] * 2

    def test_what_autograd_records_is_chosen_for_each_size(self, monkeypatch):
        chosen: list[tuple[Any, ...]] = []
        monkeypatch.setattr(type(products._products), "choose_aside", lambda _, key, *rest: chosen.append(key))
        for rows in (64, 128):
            x, w = torch.randn(rows, 512), torch.randn(512, 512)
            assert torch.equal(products._launched_linear(x, w, None, True, None), nn.functional.linear(x, w))
        assert len(set(chosen)) == 2


class TestRecorded:
    def test_what_is_decided_changes_with_the_choice_but_not_within_a_checkpoint(self):
        problem = {"m": 4, "n": 48, "k": 64, "dtype": "float32", "trans_b": True, "device": "h200"}
        served, decided = products.find_product(**problem), []
        decision = partial(products._decision, "a kind", lambda: problem, lambda kernel: not decided.append(kernel))
        default_dispatcher.products.notes.clear()
        assert decision()
        assert decision()
        assert decided == [served]
        served.choice = copy.copy(served.choice)
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            assert decision()
        assert decided == [served]
        assert decision()
        assert decided == [served, served]
        assert not products._decision("another", lambda: None, lambda kernel: True)

    @pytest.mark.parametrize("shape", [(4, 64), (2, 3, 64), (64,)])
    def test_gradients_are_those_of_pytorch(self, shape, monkeypatch):
        """By PyTorch's products, in place of launches."""
        monkeypatch.setattr(products, "_launched_linear", lambda x, w, b, *_: nn.functional.linear(x, w, b))
        monkeypatch.setattr(products, "matmul", lambda a, b, emulate: a @ b)
        given = [torch.randn(size, requires_grad=True) for size in (shape, (48, 64), (48,))]
        expected = nn.functional.linear(*given)
        weights = torch.randn_like(expected)
        want = torch.autograd.grad((expected * weights).sum(), given)
        found = torch.autograd.grad((products._RecordedLinear.apply(*given, True, ()) * weights).sum(), given)
        assert all(torch.allclose(own, one, atol=1e-4) for own, one in zip(found, want, strict=True))


@pytest.mark.usefixtures("apart")
class TestCompiled:
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_a_layer_is_one_graph_of_pytorchs_operators(self, model, dynamic):
        autotile.torch.accelerate(model, device="h200")
        graphs, x = list[Any](), torch.randn(4, 64)
        keep = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731 - of two expressions
        compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=dynamic)
        assert torch.equal(compiled(x), model(x))
        assert len(graphs) == 1
        assert "autotile" not in graphs[0].code
        assert "linear" in graphs[0].code

    @pytest.mark.parametrize(
        ("shape", "dtype", "dynamic", "is_padded"),
        [
            ((3, 200, 513, 520), torch.bfloat16, False, True),
            ((512, 512, 513), torch.float16, False, True),
            ((512, 512, 513), torch.float16, True, False),
            ((511, 513, 513), torch.bfloat16, False, False),
            ((600, 511, 520), torch.bfloat16, False, False),
            ((600, 513, 33), torch.bfloat16, False, False),
            ((512, 520, 512), torch.bfloat16, False, False),
            ((600, 513, 513), torch.float32, False, False),
        ],
    )
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_rows_of_odd_lengths_are_padded_in_a_graph(self, shape, dtype, dynamic, is_padded, has_bias):
        """If their number is known and large; the result is laid out as PyTorch's, also without a GPU."""
        graphs, x = list[Any](), torch.randn(shape[:-1], dtype=dtype)
        layer = nn.Linear(*shape[-2:], has_bias, dtype=dtype)

        def compute(x: Any) -> Any:
            gains = products._gains_by_padding(x, layer.weight, layer.bias)
            return (products._padded_linear if gains else nn.functional.linear)(x, layer.weight, layer.bias)

        keep = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731 - of two expressions
        with torch.no_grad():
            made = torch.compile(compute, backend=keep, fullgraph=True, dynamic=dynamic)(x)
        expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if has_bias else None)
        assert ("pad" in graphs[0].code) is is_padded
        assert made.stride() == expected.stride()
        assert torch.allclose(made.double(), expected, rtol=0.02, atol=0.02)
        for sizes in ((), (1,), (shape[1] + 7,)):  # broadcast or refused by PyTorch
            assert not products._gains_by_padding(x, layer.weight, torch.ones(sizes, dtype=dtype))
        assert not products._gains_by_padding(x[..., 1:], layer.weight, None)

    def test_a_graph_with_a_layer_joins_inductor_unless_that_is_refused(self, model):
        inductor = autotile.torch.inductor
        config = pytest.importorskip("torch._inductor.config")
        config.inductor_choices_class = None
        inductor._asked.clear()
        autotile.torch.accelerate(model, device="h200")
        torch.compile(model, backend="eager")(torch.randn(4, 64))
        assert config.inductor_choices_class is inductor.choices_of_inductor
        autotile.torch.join_inductor(False)
        torch._dynamo.reset()
        torch.compile(model, backend="eager")(torch.randn(4, 64))
        assert config.inductor_choices_class is None

    def test_anothers_choices_stay(self):
        config = pytest.importorskip("torch._inductor.config")
        config.inductor_choices_class = other = lambda: None
        try:
            with pytest.raises(InputError, match="inductor_choices_class"):
                autotile.torch.join_inductor()
            assert config.inductor_choices_class is other
        finally:
            config.inductor_choices_class = None

    @pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
    def test_inductors_cache_is_used(self, model, mode):
        counters = torch._dynamo.utils.counters
        autotile.torch.join_inductor()
        x = torch.randn(4, 64)
        expected = model(x)
        autotile.torch.accelerate(model, device="h200")
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            assert torch.allclose(torch.compile(model, mode=mode, fullgraph=True)(x), expected)
        assert counters["inductor"]["fxgraph_cache_hit"] == 1
        assert not counters["inductor"]["fxgraph_cache_bypass"]


@pytest.mark.gpu
class TestOnGpu:
    """float32 layers whose products are expected to be faster by far."""

    SIZES = (2048, 4096, 1024)

    @pytest.fixture
    def layer(self, monkeypatch):
        monkeypatch.setenv("AUTOTILE_WAIT", "on")
        default_dispatcher.clear()
        _, n, k = self.SIZES
        layer = nn.Linear(k, n, device="cuda")
        made = autotile.torch.accelerate(layer)
        assert type(layer) is autotile.torch.Linear, made.left
        return layer

    def test_calls_gradients_and_checkpoints(self, layer):
        m, n, k = self.SIZES
        expected_of = copy.deepcopy(layer).double()
        expected_of.__class__ = nn.Linear
        for call in range(4):
            x = torch.randn(m, k, device="cuda", requires_grad=True)
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if call % 2 else layer(x)
            wide = x.detach().double().requires_grad_()
            true = expected_of(wide)
            weights = torch.randn(m, n, device="cuda")
            found = torch.autograd.grad((y * weights).sum(), (x, *layer.parameters()))
            want = torch.autograd.grad((true * weights).sum(), (wide, *expected_of.parameters()))
            assert close(y, true)
            assert all(close(own, one) for own, one in zip(found, want, strict=True))

    def test_a_kernel_is_launched(self, layer):
        m, _, k = self.SIZES
        x = torch.randn(m, k, device="cuda")
        with torch.no_grad():
            for _ in range(3):
                y = layer(x)
        assert close(y, nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double()))
        known = [one.kernel for one in default_dispatcher.products.values()]
        assert [one for one in known if not one.is_library and one.calls]

    def test_tf32_is_left_to_pytorch(self, layer):
        x = torch.randn(self.SIZES[0], self.SIZES[2], device="cuda")
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            with torch.no_grad():
                assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    @pytest.mark.usefixtures("apart")
    @pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_inductor_calls_the_kernel(self, layer, mode, has_bias):
        if not has_bias:
            layer.bias = None
        code = pytest.importorskip("torch._inductor.utils").run_and_get_code
        autotile.torch.join_inductor()
        x = torch.randn(self.SIZES[0], self.SIZES[2], device="cuda")
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.compile(layer, mode=mode, fullgraph=True)
            y, sources = code(compiled, x)
            y = y.clone()
            for _ in range(3):
                assert torch.equal(compiled(x), y)
        bias = layer.bias.double() if has_bias else None
        assert close(y, nn.functional.linear(x.double(), layer.weight.double(), bias))
        assert "extern_kernels.autotile_" in "".join(sources)

    @pytest.mark.usefixtures("apart")
    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("records", [False, True])
    def test_compiled_layers_of_odd_sizes(self, dynamic, records):
        """Their rows are padded in the graph where autograd records nothing and their number is known."""
        layers = [
            autotile.torch.Linear(*sizes, device="cuda", dtype=torch.bfloat16) for sizes in ((1025, 519), (519, 777))
        ]
        model = nn.Sequential(layers[0], nn.SiLU(), layers[1])
        graphs, x = list[Any](), torch.randn(2, 777, 1025, device="cuda", dtype=torch.bfloat16)
        keep = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731 - of two expressions
        wide = copy.deepcopy(model).double()
        for layer in (wide[0], wide[2]):
            layer.__class__ = nn.Linear
        for backend in (keep, "inductor"):
            torch._dynamo.reset()
            with torch.set_grad_enabled(records):
                made = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(x)
            assert torch.allclose(made.double(), wide(x.double()), rtol=0.02, atol=0.02)
            assert made.is_contiguous()
        assert ("pad" in graphs[0].code) is not (dynamic or records)
        with torch.no_grad():
            assert "pad" not in str(torch.export.export(model, (x,)).graph)

    @pytest.mark.usefixtures("apart")
    def test_stacks_gradients_and_dynamic_sizes_of_a_compiled_graph(self):
        autotile.torch.join_inductor()
        a, b = (torch.randn(4, 512, 512, device="cuda", requires_grad=True) for _ in range(2))
        weights = torch.randn(4, 512, 512, device="cuda")
        found = torch.autograd.grad((torch.compile(torch.bmm)(a, b) * weights).sum(), (a, b))
        want = torch.autograd.grad((torch.bmm(a.double(), b.double()) * weights).sum(), (a, b))
        assert all(close(own, one) for own, one in zip(found, want, strict=True))
        compiled = torch.compile(torch.mm, dynamic=True)
        for m in (65, 130, 777):
            x, y = torch.randn(m, 512, device="cuda"), torch.randn(512, 300, device="cuda")
            assert close(compiled(x, y), x.double() @ y.double())

    def test_a_captured_layer(self, layer):
        x = torch.randn(self.SIZES[0], self.SIZES[2], device="cuda")
        with torch.no_grad():
            expected = layer(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            x.mul_(2.0)
            graph.replay()
            torch.cuda.synchronize()
            assert close(y - layer.bias, 2.0 * (expected - layer.bias))

    @pytest.mark.parametrize("records", [False, True])
    def test_a_short_kernel_is_launched_at_once_by_what_the_layer_noted(self, records, monkeypatch):
        monkeypatch.setenv("AUTOTILE_WAIT", "on")
        default_dispatcher.clear()
        layer, x = autotile.torch.Linear(512, 512, device="cuda"), torch.randn(64, 512, device="cuda")
        exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        layer.requires_grad_(records)
        with torch.no_grad():
            for _ in range(3):
                assert close(layer(x), exact)
        kernel, function = layer._noted[1][x.numel(), False]
        calls = kernel.calls
        with torch.set_grad_enabled(not records):
            assert close(layer(x), exact)
        assert (kernel.is_library, function is nn.functional.linear, kernel.calls) == (False, False, calls + 1)
        y = layer(x)
        assert (y.requires_grad, close(y, exact)) == (records, True)

    @pytest.mark.parametrize("waits", ["off", "on"])
    @pytest.mark.parametrize("function", ["matmul", "linear", "linear with a bias"])
    def test_a_short_product_of_cublas_is_launched_without_its_host_part(self, function, waits, monkeypatch):
        monkeypatch.setenv("AUTOTILE_WAIT", waits)
        default_dispatcher.clear()
        products, name, graph = autotile.torch.products, function.split()[0], torch.cuda.CUDAGraph()
        a, b = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (16, 256))
        bias = torch.randn(256, device="cuda", dtype=torch.bfloat16) if function.endswith("bias") else None
        options = products._OPTIONS[True] if name == "matmul" else ("linear", True)
        factor = b.double() if name == "matmul" else b.double().t()
        added = 0.0 if bias is None else bias.double()

        def compute(x, y):
            return getattr(autotile.torch, name)(x, y, *(() if bias is None else (bias,)))

        compute(a, b)
        assert wait_for_compilations(60)
        served = products._products.find(a, b, options).kernel
        assert all(close(compute(a, b), a.double() @ factor + added) for _ in range(4))
        calls = served.calls
        for one in torch.randn(200, 16, 256, device="cuda", dtype=torch.bfloat16):
            made = compute(one, b)
        assert close(made, one.double() @ factor + added)
        by_torch = {torch.mm, nn.functional.linear}
        noted = {note[2] for note in products._notes.values() if isinstance(note, tuple) and len(note) == 3}
        assert (served.is_library, served.is_direct, served.calls) == (True, True, calls + 200)
        assert len(served._launcher._relocated) == 1
        assert noted
        assert not noted & by_torch
        with torch.cuda.graph(graph):
            captured = compute(a, b)
        graph.replay()
        assert close(captured, a.double() @ factor + added)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            made = [compute(a, b) for _ in range(3)][-1]
        torch.cuda.synchronize()
        assert close(made, a.double() @ factor + added)
        with ThreadPoolExecutor(1) as pool:  # a thread without a context
            assert close(pool.submit(compute, a, b).result(), a.double() @ factor + added)
        assert served.is_direct
        apart = torch.empty(257, device="cuda", dtype=torch.bfloat16)[1:]  # a bias that is not aligned
        if bias is not None:
            assert close(autotile.torch.linear(a, b, apart.copy_(bias)), a.double() @ factor + added)
