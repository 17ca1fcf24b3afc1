"""Kernels of Joint relative position against dense weights in float64, and what the compiler says of them."""

import pytest
import torch
from kernel_checks import assert_within_budget, every_place, guarded, poisoned_memory

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import reference
from visionattn.ops.relative import Joint

pytest.importorskip("triton", reason="GPU kernels need Triton")

poisoned_memory = pytest.fixture(autouse=True)(poisoned_memory)

GRIDS = [(5, 9, 2), (1, 7, 1), (13, 3, 1), (2, 70, 1), (1, 1, 1)]
OPTIONS = [
    dict(horizons=(1, 1), prefix=0, shared=True),
    dict(horizons=(1, 3), state=False),
    dict(horizons=(2, 1), prefix=1, heads=1, d=8, e=16),
    dict(horizons=(4, 4), d=24, e=8, state=False, prefix=0),
]


class Case:
    """Inputs in float64 that the dtype under test holds exactly, and what the definition makes of them."""

    def __init__(self, grid, horizons=(3, 3), prefix=2, mean=True, shared=False, state=True, heads=2, batch=1, d=16, e=24):
        from visionattn.ops.triton.joint import Place

        torch.manual_seed(7)
        self.place = Place(*grid, prefix, *horizons, mean)
        tokens, self.state = prefix + grid[0] * grid[1], state
        self.q, self.v = torch.randn(batch, heads, tokens, d), torch.randn(batch, heads, tokens, e)
        self.table = torch.rand(1 if shared else heads, 2 * horizons[0] + 1, 2 * horizons[1] + 1, d)
        self.content = torch.randn(batch, heads, tokens, e), torch.rand(batch, heads, tokens) + 0.5
        self.s, self.z = torch.randn(batch, heads, d, e), torch.rand(batch, heads, d)
        self.grad, self.dq, self.dv = torch.randn_like(self.v), torch.randn_like(self.q), torch.randn_like(self.v)

    def rounded(self, dtype):
        """The same case with everything that has the dtype of the inputs rounded to it, and the state, as products see it."""
        for name in ("q", "v", "grad", "dq", "dv"):
            setattr(self, name, getattr(self, name).to(dtype).double())
        return self

    def mean_by_definition(self, q, table, v):
        """The mean of all tokens, and its mass in units of sums divided by M."""
        place, tokens = self.place, self.q.shape[2]
        layout = TokenLayout(place.prefix, Grid(place.height, place.width))
        relative = Joint(table, layout, "mean" if place.mean else "sum")
        present = torch.ones(q.shape[0], tokens, dtype=torch.bool)
        weights = reference.relative_weights(relative, q, present) / (1 if place.mean else tokens)
        if self.state:
            phi = reference.elu1(self.q.double())
            values, mass = phi @ self.s.double(), (phi * self.z.double()[:, :, None]).sum(3)
        else:
            values, mass = (x.double() for x in self.content)
        mass = mass + weights.sum(3)
        return (values + weights @ v) / mass.unsqueeze(3), mass

    def on(self, device, dtype):
        """Inputs as kernels take them: q, v, grad between rows of NaN."""
        from visionattn.ops.triton import joint

        q, v, grad = (guarded(x.to(device, dtype)) for x in (self.q, self.v, self.grad))
        if self.state:
            content = joint.FromState(q, self.s.to(device).float(), self.z.to(device).float(), "elu1")
        else:
            content = joint.FromSums(guarded(self.content[0].to(device).float()), self.content[1].to(device).float())
        return q, self.table.to(device).float(), v, grad, content

    def forward(self, device, dtype):
        """Mean and mass of the patches."""
        from visionattn.ops.triton import joint, launch

        q, table, v, _, content = self.on(device, dtype)
        out = launch.tokens_first(v, *v.shape)
        mass = v.new_empty(v.shape[:3], dtype=torch.float32)
        joint.joint_means(*joint.class_weights(q, table, self.place), v, content, self.place, out, mass)
        return {"out": out[:, :, self.place.prefix :], "mass": mass[:, :, self.place.prefix :]}


    def gradients_by_definition(self):
        """The mean, its mass, and by name what gradients are, the content's part replaced by the numbers in dq and dv."""
        leaves = {name: getattr(self, name).double().clone().requires_grad_() for name in ("q", "table", "v")}
        out, mass = self.mean_by_definition(**leaves)
        grads = torch.autograd.grad(out[:, :, self.place.prefix :], list(leaves.values()), self.grad[:, :, self.place.prefix :])
        grads = dict(zip(leaves, grads, strict=True))
        return out.detach(), mass.detach(), grads | {"q": grads["q"] + self.dq, "v": grads["v"] + self.dv}

    def backward(self, device, dtype, out, mass, again):
        """Gradients by name, for the mean and the mass that a forward pass would have kept; ``again`` makes weights anew."""
        from visionattn.ops.triton import joint
        from visionattn.ops.triton.joint_backward import joint_backward

        q, table, v, grad, _ = self.on(device, dtype)
        dq, dv = guarded(self.dq.to(device, dtype)), guarded(self.dv.to(device, dtype))
        weights = None if again else joint.class_weights(q, table, self.place)[0]
        out, mass = guarded(out.to(device, dtype)), mass.to(device).float().contiguous()
        d_table = joint_backward(grad, out, mass, q, table, v, weights, self.place, dq, dv)
        return {"q": dq, "table": d_table, "v": dv}


def forward_agrees(case, device, dtype):
    case = case.rounded(dtype)
    out, mass = case.mean_by_definition(case.q.double(), case.table.double(), case.v.double())
    expected = {"out": out[:, :, case.place.prefix :], "mass": mass[:, :, case.place.prefix :]}
    assert_within_budget(case.forward(device, dtype), expected, dtype)


@every_place
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_means_agree_with_dense_weights_on_any_grid(grid, device, dtype):
    forward_agrees(Case(grid[:2], heads=grid[2]), device, dtype)


@every_place
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_means_agree_for_any_horizons_content_and_prefix(options, mean, device, dtype):
    forward_agrees(Case((3, 35), mean=mean, **options), device, dtype)


def backward_agrees(case, device, dtype, again=False):
    case = case.rounded(dtype)
    out, mass, expected = case.gradients_by_definition()
    assert_within_budget(case.backward(device, dtype, out, mass, again), expected, dtype)


@every_place
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gradients_agree_with_dense_weights_on_any_grid(grid, device, dtype):
    backward_agrees(Case(grid[:2], heads=grid[2]), device, dtype)


@every_place
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_agree_for_any_horizons_and_prefix(options, mean, device, dtype):
    backward_agrees(Case((3, 35), mean=mean, **options), device, dtype, again=True)
