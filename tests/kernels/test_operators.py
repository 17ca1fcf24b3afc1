"""The attentions with ``impl="triton"``: one node for a compiler, options as in eager, and what
autograd keeps.
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
    assert_within_budget,
    interpreted,
    on_gpu,
    poisoned_memory,  # noqa: F401
    relative_error,
)
from tests.helpers.oracles import draw, draw_mask, draw_qkv, draw_table, run
from visionattn.lab.measure import attention_backends, bytes_kept
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, kernelized_attention, taylorshift_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BOTH = pytest.mark.parametrize("function", [kernelized_attention, taylorshift_attention])
FEW = TokenLayout(2, Grid(2, 3))


def few_tokens() -> dict[str, Tensor]:
    """q, k, v of one head, of 2 prefix tokens and a grid of 2 x 3."""
    drawn = draw_qkv(batch=1, heads=1, queries=8, d=8, e=16)
    return {name: x.float().requires_grad_() for name, x in drawn.items()}


@pytest.fixture
def nothing_launched(monkeypatch):
    """Only shapes are followed."""
    monkeypatch.setattr("visionattn.ops.gpu.launch.run", lambda *args, **meta: None)


@interpreted
def test_options_of_taylorshift_mean_what_they_mean_in_eager():
    q, k, v = (x.float() for x in draw_qkv(queries=40, keys=33, d=8, e=16).values())
    options = dict(form="direct", output_scale=True, key_mask=draw_mask(2, 33), value_drop=0.4)
    results = []
    for impl in ("triton", "eager"):
        torch.manual_seed(5)
        function = partial(taylorshift_attention, impl=impl, **options)
        results.append(run(function, {"q": q, "k": k, "v": v}))
    assert_within_budget(*results, torch.float32)


@interpreted
def test_a_table_of_all_heads_is_one_of_each_head():
    q, k, v = (x.float() for x in draw_qkv(queries=8, d=8, e=8).values())
    table = draw_table(1, 3, 3, 8, seed=4).float()
    shared, each = (
        kernelized_attention(q, k, v, relative=Joint(x, FEW, "mean"), impl="triton")
        for x in (table, table.expand(3, -1, -1, -1))
    )
    assert torch.equal(shared, each)


@interpreted
# opcheck itself looks at gradients of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.parametrize("name", ["kernelized", "auto"])
def test_the_operators_are_sound(name):
    q, k, v = few_tokens().values()
    table = draw_table(1, 3, 3, 8, seed=2).float().requires_grad_()
    place, operators = [2, 3, 2, 1, 1, 1], torch.ops.visionattn
    if name == "kernelized":
        opcheck(operators.kernel_mean.default, (q, k, v, None, table, "elu1", place))
        return
    tau = torch.tensor([2.0]).requires_grad_()
    options = (0.5, 1.0, 1.0, name, place)
    opcheck(operators.taylor_mean.default, (q, k, v, tau, None, table, *options))


@interpreted
@BOTH
def test_many_sizes_make_one_graph_of_one_node(function, monkeypatch):
    """Nothing is computed: the graph that serves them all is what counts."""
    graphs = []

    def note(graph, inputs):
        nodes = (str(node.target) for node in graph.graph.nodes)
        graphs.append([name for name in nodes if "visionattn" in name])
        return lambda *args: graph(*args)

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        layout = TokenLayout(0, Grid(q.shape[2] // 49, 49))
        return function(q, k, v, relative=Joint(table, layout, "mean"), impl="triton")

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=note)
    table = torch.empty(3, 3, 3, 8, device="meta")
    monkeypatch.setattr(
        "visionattn.ops.gpu.gpu_requirements.why_not_here", lambda device, dtype: None
    )
    for rows in (2, 3, 1, 7, 4):
        shapes = ((1, 3, 49 * rows, width) for width in (8, 8, 16))
        compiled(*(torch.empty(shape, device="meta") for shape in shapes), table)
    assert 1 <= len(graphs) <= 2
    operator = "kernel_mean" if function is kernelized_attention else "taylor_mean"
    assert all(len(nodes) == 1 and operator in nodes[0] for nodes in graphs), graphs


@interpreted
@BOTH
def test_compiled_and_checkpointed_they_give_what_they_give(function):
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return function(q, k, v, relative=Joint(table, FEW, "mean"), impl="triton")

    torch._dynamo.reset()
    tensors = few_tokens() | {"table": draw_table(1, 3, 3, 8, seed=2).float()}
    wanted = run(attend, tensors)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_within_budget(run(compiled, tensors), wanted, torch.float32)
    again = run(lambda **given: checkpoint(attend, *given.values(), use_reentrant=False), tensors)
    assert_within_budget(again, wanted, torch.float32)


@interpreted
@BOTH
def test_nothing_to_do_is_done_as_in_eager(function):
    for batch, heads, n, m in ((0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)):
        shapes = {"q": (n, 16), "k": (m, 16), "v": (m, 16)}
        tensors = {name: torch.ones(batch, heads, *shape) for name, shape in shapes.items()}
        found = run(partial(function, impl="triton"), tensors)
        for name, want in run(partial(function, impl="eager"), tensors).items():
            assert torch.equal(found[name], want), name


@interpreted
@BOTH
def test_autograd_keeps_memory_that_grows_with_the_tokens_alone(function, nothing_launched):
    table = draw_table(3, 3, 3, 16, seed=1).float().requires_grad_()

    def kept(rows: int) -> int:
        drawn = draw_qkv(batch=1, queries=49 * rows)
        q, k, v = (x.float().requires_grad_() for x in drawn.values())
        position = Joint(table, TokenLayout(0, Grid(rows, 49)), "mean")
        attend = partial(function, q, k, v, relative=position, impl="triton")
        return bytes_kept(attend, without=[table])

    per_token = 4 * 3 * (16 + 16 + 24 + 24 + 1)  # q, k, v, the mean and the mass of three heads
    assert kept(4) - kept(2) == 98 * per_token


# 3 heads of 2 images, 47 queries and keys, d = 16, e = 24; a multiply-add is two operations.
CONTENT, PAIRS = 12 * 94 * 16 * (24 + 1), 12 * 47 * 47
COUNTED = {
    "kernelized": (kernelized_attention, {}, CONTENT, 2 * CONTENT),
    "direct": (
        taylorshift_attention,
        {"form": "direct"},
        PAIRS * (16 + 24),
        PAIRS * (3 * 16 + 2 * 24),
    ),
}


@interpreted
@pytest.mark.parametrize("name", COUNTED)
def test_a_counter_sees_the_multiply_adds_of_both_passes(name, nothing_launched):
    function, options, *wanted = COUNTED[name]
    inputs = {x: t.float().requires_grad_() for x, t in draw_qkv(queries=47).items()}
    with FlopCounterMode(display=False) as forward:
        out = function(**inputs, impl="triton", **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert [forward.get_total_flops(), backward.get_total_flops()] == wanted


@interpreted
@pytest.mark.parametrize("name", ["scaleformer_vit_t", "taylorshift_vit_t"])
def test_a_model_gives_with_kernels_what_it_gives_without(name, monkeypatch):
    torch.manual_seed(3)
    model = timm.create_model(name, depth=1, embed_dim=48, num_heads=2, num_classes=5, img_size=48)
    image = draw(1, 3, 32, 48, seed=1).float()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def outputs() -> dict[str, Tensor]:
        out = model(image)
        found = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
        named = {str(i): grad for i, grad in enumerate(found) if grad is not None}
        return {"out": out.detach()} | named

    expected = outputs()
    monkeypatch.setattr("visionattn.ops.gpu.gpu_requirements._on_gpu", lambda x: True)
    assert any("triton" in name for name in attention_backends(lambda: model(image)))
    assert_within_budget(outputs(), expected, torch.float32)


@on_gpu[0]
@on_gpu[1]
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
