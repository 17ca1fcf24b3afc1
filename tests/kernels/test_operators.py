"""The attentions with ``impl="triton"``: what the definition says, and one node for a compiler.

The kernels themselves are tested in the files beside this one, the reasons against them in
``test_why_not.py``. Without a GPU Triton interprets them.
"""

from functools import partial

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import timm
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import visionattn  # noqa: F401  registers the models
from tests.helpers.kernel_checks import (
    BUDGET,
    INTERPRETED,
    assert_within_budget,
    every_dtype_of_every_place,
    poisoned_memory,
    relative_error,
)
from tests.helpers.operations import OPERATIONS, TOKENS, layout_of
from tests.helpers.oracles import draw, draw_mask, draw_qkv, draw_table, run
from visionattn.lab.measure import attention_backends, bytes_kept
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, kernelized_attention, taylorshift_attention

poisoned = pytest.fixture(autouse=True)(poisoned_memory)
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="on a GPU the tests marked gpu run instead"
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

WITH_KERNELS = [
    "taylorshift direct",
    "taylorshift efficient",
    "taylorshift direct, plain",
    "taylorshift efficient, plain",
    "taylorshift, joint sum",
    "taylorshift, joint mean",
    "kernelized efficient, elu1",
    "kernelized efficient, relu",
    "kernelized causal efficient, elu1",
    "kernelized causal efficient, relu",
    "kernelized, joint sum",
    "kernelized, joint mean",
]


def sizes_of(name: str) -> dict[str, int]:
    """Causal kernels in float32 take values of 16 columns at most; the others have 24 here. One
    image is enough with Joint: its kernels are asked for several in ``test_joint.py``.
    """
    if "causal" in name:
        return {"e": 16}
    return {"batch": 1} if "joint" in name else {}


def of_dtype(name: str, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of an operation, queries, keys and values of the dtype, rounded once."""
    tensors = OPERATIONS[name].tensors(dtype, **sizes_of(name))
    return {name: x.to(device) for name, x in tensors.items()}


@every_dtype_of_every_place
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernels_give_the_mean_and_every_gradient_of_the_definition(device, dtype, name):
    if device == "cpu" and dtype == torch.float16 and "joint sum" in name:
        pytest.skip(
            "the interpreter takes its time; the sums differ in weights alone, and float32 runs"
        )
    operation, tensors = OPERATIONS[name], of_dtype(name, device, dtype)
    expected = run(operation.slow, {key: x.double().cpu() for key, x in tensors.items()})
    actual = run(partial(operation.fast, impl="triton"), tensors)
    for key, x in actual.items():
        assert x.dtype == (tensors["v"].dtype if key == "out" else tensors[key].dtype)
    assert_within_budget(actual, expected, dtype)


@every_dtype_of_every_place
@pytest.mark.parametrize("name", [name for name in WITH_KERNELS if "joint" not in name])
def test_kernels_leave_masked_keys_out(device, dtype, name):
    operation, tensors = OPERATIONS[name], of_dtype(name, device, dtype)
    mask = draw_mask(2, TOKENS)
    expected = run(
        partial(operation.slow, key_mask=mask),
        {key: x.double().cpu() for key, x in tensors.items()},
    )
    actual = run(partial(operation.fast, impl="triton", key_mask=mask.to(device)), tensors)
    assert_within_budget(actual, expected, dtype)


@interpreted
@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_options_of_taylorshift_mean_what_they_mean_in_eager(form):
    q, k, v = (x.float() for x in draw_qkv(queries=40, keys=33, d=8, e=16).values())
    options = dict(
        form=form,
        coefficients=(0.7, -0.4, 0.9),
        output_scale=True,
        key_mask=draw_mask(2, 33),
        value_drop=0.4,
    )
    results = []
    for impl in ("triton", "eager"):
        torch.manual_seed(5)
        results.append(
            run(partial(taylorshift_attention, impl=impl, **options), {"q": q, "k": k, "v": v})
        )
    assert_within_budget(*results, torch.float32)


@interpreted
def test_a_table_of_all_heads_is_one_of_each_head():
    q, k, v = (x.float() for x in draw_qkv(queries=TOKENS).values())
    table, layout = draw_table(1, 3, 5, 16, seed=4).float(), layout_of(TOKENS)
    shared = kernelized_attention(q, k, v, relative=Joint(table, layout, "mean"), impl="triton")
    each = kernelized_attention(
        q, k, v, relative=Joint(table.expand(3, -1, -1, -1), layout, "mean"), impl="triton"
    )
    assert torch.equal(shared, each)


def joint(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, function=kernelized_attention, **options
) -> Tensor:
    return function(
        q, k, v, relative=Joint(table, layout_of(q.shape[2]), "mean"), impl="triton", **options
    )


def few_tokens() -> list[Tensor]:
    """q, k, v of one head, of 2 prefix tokens and a grid of 2 x 3."""
    return [
        x.float().requires_grad_()
        for x in draw_qkv(batch=1, heads=1, queries=8, d=8, e=16).values()
    ]


# opcheck itself looks at gradients of tensors that are no leaves:
looks_at_gradients = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor"
)


@interpreted
@looks_at_gradients
@pytest.mark.parametrize("position", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_of_kernelized_attention_is_sound(causal, position):
    if causal and position:
        pytest.skip("causal attention has no joint position")
    q, k, v = few_tokens()
    table = draw_table(1, 3, 3, 8, seed=2).float().requires_grad_() if position else None
    place = [2, 3, 2, 1, 1, 1] if position else []
    opcheck(torch.ops.visionattn.kernel_mean.default, (q, k, v, None, table, "elu1", causal, place))


@interpreted
@looks_at_gradients
@pytest.mark.parametrize("form", ["auto", "direct", "efficient"])
def test_the_operator_of_taylorshift_is_sound(form):
    q, k, v = few_tokens()
    table = draw_table(1, 3, 3, 8, seed=2).float().requires_grad_()
    tau = torch.tensor([2.0]).requires_grad_()
    opcheck(
        torch.ops.visionattn.taylor_mean.default,
        (q, k, v, tau, None, table, 0.5, 1.0, 1.0, form, [2, 3, 2, 1, 1, 1]),
    )


LENGTHS = [98, 147, 196, 245, 294, 49, 343, *range(392, 1000, 49)][:20]


@interpreted
@pytest.mark.parametrize("function", [kernelized_attention, taylorshift_attention])
def test_twenty_sizes_make_one_graph_of_one_node(function):
    """Nothing is computed: the graph that serves them all is what counts, and that it holds one
    operator of ours.
    """
    graphs = []

    def note(graph, inputs):
        graphs.append(
            [str(node.target) for node in graph.graph.nodes if "visionattn" in str(node.target)]
        )
        return lambda *args: graph(*args)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: joint(*args, function=function), fullgraph=True, backend=note
    )
    table = torch.empty(3, 3, 3, 8, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("visionattn.ops.gpu.machine.why_not_here", lambda device, dtype: None)
        for n in LENGTHS:
            shapes = ((1, 3, n, 8), (1, 3, n, 8), (1, 3, n, 16))
            compiled(*(torch.empty(shape, device="meta") for shape in shapes), table)
    assert 1 <= len(graphs) <= 2
    operator = "kernel_mean" if function is kernelized_attention else "taylor_mean"
    assert all(len(nodes) == 1 and operator in nodes[0] for nodes in graphs), graphs


@interpreted
@pytest.mark.parametrize("function", [kernelized_attention, taylorshift_attention])
def test_a_compiled_graph_gives_what_the_operator_gives(function):
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return function(
            q, k, v, relative=Joint(table, TokenLayout(2, Grid(2, 3)), "mean"), impl="triton"
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    tensors = dict(zip("qkv", few_tokens(), strict=True)) | {
        "table": draw_table(1, 3, 3, 8, seed=2).float()
    }
    assert_within_budget(run(compiled, tensors), run(attend, tensors), torch.float32)


class Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return taylorshift_attention(q, k, v, impl="triton")


@interpreted
def test_an_exported_program_holds_one_node_for_every_length():
    q, k, v = (x.float() for x in draw_qkv(batch=1, queries=50, keys=50, d=8, e=8).values())
    length = torch.export.Dim("length", min=2, max=10_000)
    program = torch.export.export(Attend(), (q, k, v), dynamic_shapes=[{2: length}] * 3)
    assert [str(n.target) for n in program.graph.nodes if "visionattn" in str(n.target)] == [
        "visionattn.taylor_mean.default"
    ]
    longer = [x.float() for x in draw_qkv(batch=1, queries=70, keys=70, d=8, e=8).values()]
    assert (
        relative_error(program.module()(*longer), taylorshift_attention(*longer))
        < BUDGET[torch.float32][0]
    )


@interpreted
@pytest.mark.parametrize("function", [kernelized_attention, taylorshift_attention])
def test_checkpointing_gives_the_same_gradients(function):
    attend = partial(function, impl="triton")
    tensors = dict(zip("qkv", few_tokens(), strict=True))
    again = run(lambda **inputs: checkpoint(attend, *inputs.values(), use_reentrant=False), tensors)
    assert_within_budget(again, run(attend, tensors), torch.float32)


@interpreted
@pytest.mark.parametrize("function", [kernelized_attention, taylorshift_attention])
@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)], ids=str)
def test_nothing_to_do_is_done_as_in_eager(function, sizes):
    batch, heads, n, m = sizes
    tensors = (
        {name: x.float() for name, x in draw_qkv(batch, heads, n, m, 16, 16).items()} if m else {}
    )
    tensors = tensors or {
        "q": torch.ones(batch, heads, n, 16),
        "k": torch.ones(batch, heads, 0, 16),
    }
    tensors.setdefault("v", tensors["k"])
    for name, want in run(partial(function, impl="eager"), tensors).items():
        assert torch.equal(run(partial(function, impl="triton"), tensors)[name], want), name


@interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_of_small_weights_passes_large_gradients_on_in_half_precision(causal):
    tensors = {name: x.half() for name, x in draw_qkv(1, 2, 130, 130, 16, 16).items()}
    tensors["q"][:, :, 70] = -12  # its weights are some 1e-4

    def attend(**inputs: Tensor) -> Tensor:
        impl = "eager" if inputs["q"].dtype == torch.float64 else "triton"
        return 64 * kernelized_attention(**inputs, causal=causal, impl=impl)

    assert_within_budget(
        run(attend, tensors),
        run(attend, {name: x.double() for name, x in tensors.items()}),
        torch.float16,
    )


@interpreted
@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_scores_of_hundreds_stay_within_half_precision(form):
    tensors = {
        name: (6 * x if name in "qk" else x).half()
        for name, x in draw_qkv(1, 1, 32, 40, 64, 16).items()
    }
    actual = run(partial(taylorshift_attention, form=form, impl="triton"), tensors)
    expected = run(
        partial(taylorshift_attention, form=form, impl="eager"),
        {name: x.double() for name, x in tensors.items()},
    )
    assert_within_budget(actual, expected, torch.float16)


@interpreted
def test_a_second_derivative_is_refused_plainly():
    q, k, v = (x.float().requires_grad_() for x in draw_qkv(batch=1, queries=20, d=8, e=8).values())
    for function in (kernelized_attention, taylorshift_attention):
        grad = torch.autograd.grad(
            function(q, k, v, impl="triton").square().sum(), q, create_graph=True
        )[0]
        with pytest.raises(NotImplementedError, match="second derivative"):
            grad.sum().backward()


@interpreted
@pytest.mark.parametrize(
    "name",
    ["kernelized, joint mean", "taylorshift, joint mean", "kernelized causal efficient, elu1"],
)
def test_autograd_keeps_memory_that_grows_with_the_tokens_alone(name, monkeypatch):
    monkeypatch.setattr(
        "visionattn.ops.gpu.launch.run", lambda *args, **meta: None
    )  # what is kept, whatever it holds

    def kept(n: int) -> int:
        sizes = dict(batch=1, queries=n, keys=n) | sizes_of(name)
        tensors = {
            x: t.float().requires_grad_()
            for x, t in OPERATIONS[name].tensors(torch.float32, **sizes).items()
        }
        learned = [tensors[x] for x in tensors if x not in "qkv"]
        return bytes_kept(lambda: OPERATIONS[name].fast(**tensors, impl="triton"), without=learned)

    e = sizes_of(name).get("e", 24)
    per_token = 4 * 3 * (16 + 16 + e + e + 1)  # q, k, v, the mean and the mass of three heads
    first, second = kept(98), kept(196)
    assert second - first == 98 * per_token


# 6 heads of images, 47 queries and keys, d = 16, e = 24; 45 patches and 25 classes. A multiply-add
# is two operations.
CONTENT = 12 * 94 * 16 * (24 + 1)
PAIRS, CLASSES = 12 * 47 * 47, 12 * 45 * 25
OPERATIONS_COUNTED = {
    "kernelized efficient, elu1": (CONTENT, 2 * CONTENT),
    "kernelized, joint mean": (
        CONTENT + CLASSES * (16 + 24),
        2 * CONTENT + CLASSES * (3 * 16 + 2 * 24),
    ),
    "taylorshift direct": (PAIRS * (16 + 24), PAIRS * (3 * 16 + 2 * 24)),
}


@interpreted
@pytest.mark.parametrize("name", OPERATIONS_COUNTED)
def test_a_counter_sees_the_multiply_adds_of_both_passes(name, monkeypatch):
    monkeypatch.setattr(
        "visionattn.ops.gpu.launch.run", lambda *args, **meta: None
    )  # counted from shapes alone
    inputs = {
        key: x.detach().clone().requires_grad_()
        for key, x in OPERATIONS[name].tensors(torch.float32).items()
    }
    with FlopCounterMode(display=False) as forward:
        out = OPERATIONS[name].fast(**inputs, impl="triton")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == OPERATIONS_COUNTED[name]


@interpreted
@pytest.mark.parametrize("name", ["scaleformer_vit_t", "taylorshift_vit_t"])
def test_a_model_gives_with_kernels_what_it_gives_without(name, monkeypatch):
    torch.manual_seed(3)
    model = timm.create_model(name, depth=1, embed_dim=48, num_heads=2, num_classes=5, img_size=48)
    image = draw(2, 3, 48, 80, seed=1).float()

    def outputs() -> dict[str, Tensor]:
        out = model(image)
        gradients = torch.autograd.grad(
            out.square().sum(), list(model.parameters()), allow_unused=True
        )
        names = dict(model.named_parameters())
        return {"out": out.detach()} | {
            n: g for n, g in zip(names, gradients, strict=True) if g is not None
        }

    expected = outputs()
    monkeypatch.setattr("visionattn.ops.gpu.machine._on_gpu", lambda x: True)
    assert any("triton" in name for name in attention_backends(lambda: model(image)))
    assert_within_budget(outputs(), expected, torch.float32)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["scaleformer_vit_t", "taylorshift_vit_t"])
def test_on_a_gpu_models_take_the_kernels_compiled_or_not(name):
    torch._dynamo.reset()
    model = timm.create_model(name, depth=2, num_classes=5).cuda().eval()
    image = torch.randn(2, 3, 224, 320, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        backends = attention_backends(lambda: model(image))
        assert backends and all("triton" in backend for backend in backends)
        plain = model(image)
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        assert relative_error(compiled(image), plain) < 3e-2
