"""Kernels of Joint relative position against dense weights in float64, and what the compiler says
of them.
"""

import pytest
import torch

from tests.helpers.kernel_checks import assert_within_budget, every_place, guarded, poisoned_memory
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import reference
from visionattn.ops.position.kinds import Joint

pytest.importorskip("triton", reason="GPU kernels need Triton")

poisoned_memory = pytest.fixture(autouse=True)(poisoned_memory)

CASES = {
    "two heads with tables of their own": dict(grid=(5, 9), heads=2),
    "one row shorter than the horizon": dict(grid=(1, 2)),
    "one column": dict(grid=(5, 1)),
    "one patch": dict(grid=(1, 1), prefix=0, heads=3, batch=2),
    "one patch beyond a tile": dict(grid=(1, 33), mean=False),
    "three tiles": dict(grid=(2, 66), horizons=(2, 1), mean=False, state=False, d=8, e=16),
    "one table for all heads": dict(
        grid=(3, 5), horizons=(1, 1), prefix=0, shared=True, heads=2, batch=2, e=32
    ),
    "horizons 4 x 3 and content as sums": dict(
        grid=(9, 5), horizons=(4, 3), state=False, d=24, e=8
    ),
    "horizon 10 along rows": dict(grid=(1, 65), horizons=(1, 10)),
    "horizon 8 along rows": dict(grid=(2, 37), horizons=(1, 8), prefix=1, d=8, e=24),
    "a block of tiles and a part of one": dict(grid=(3, 75), d=8, e=8),
    "more rows than a chunk, and far queries on both sides": dict(
        grid=(16, 26), horizons=(2, 1), mean=False, d=8, e=8
    ),
    "blocks of rows and a part of one": dict(grid=(131, 3), prefix=1, d=8, e=8),
    "rows of several tiles in blocks": dict(grid=(66, 33), prefix=0, d=8, e=16),
}


class Case:
    """Inputs in float64 that the dtype under test holds exactly, and what the definition makes of
    them.
    """

    def __init__(
        self,
        grid,
        horizons=(3, 3),
        prefix=2,
        mean=True,
        shared=False,
        state=True,
        heads=1,
        batch=1,
        d=16,
        e=24,
    ):
        from visionattn.ops.position.kernels.place import Place

        torch.manual_seed(7)
        self.place = Place(*grid, prefix, *horizons, mean)
        tokens, self.state = prefix + grid[0] * grid[1], state
        self.q, self.v = torch.randn(batch, heads, tokens, d), torch.randn(batch, heads, tokens, e)
        self.table = torch.rand(1 if shared else heads, 2 * horizons[0] + 1, 2 * horizons[1] + 1, d)
        self.content = torch.randn(batch, heads, tokens, e), torch.rand(batch, heads, tokens) + 0.5
        self.s, self.z = torch.randn(batch, heads, d, e), torch.rand(batch, heads, d)
        self.grad = torch.randn_like(self.v)
        self.dq = torch.randn_like(self.q)
        self.dv = torch.randn_like(self.v)

    def rounded(self, dtype):
        """The same case with everything that has the dtype of the inputs rounded to it."""
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
            values = (
                reference.elu1(self.q.double()) @ self.s.double()
            )  # what S gives dq is the content's part
            mass = (reference.elu1(q.double()) * self.z.double()[:, :, None]).sum(3)
        else:
            values, mass = (x.double() for x in self.content)
        mass = mass + weights.sum(3)
        return (values + weights @ v) / mass.unsqueeze(3), mass

    def on(self, device, dtype):
        """Inputs as kernels take them: q, v, grad between rows of NaN."""
        from visionattn.ops.position.kernels import joint

        q, v, grad = (guarded(x.to(device, dtype)) for x in (self.q, self.v, self.grad))
        if self.state:
            content = joint.FromState(self.s.to(device).float(), self.z.to(device).float(), "elu1")
        else:
            content = joint.FromSums(
                guarded(self.content[0].to(device).float()), self.content[1].to(device).float()
            )
        return q, self.table.to(device).float(), v, grad, content

    def forward(self, device, dtype):
        """Mean and mass of the patches."""
        from visionattn.ops.gpu import launch
        from visionattn.ops.position.kernels import joint

        q, table, v, _, content = self.on(device, dtype)
        out = launch.tokens_first(v, *v.shape)
        mass = v.new_empty(v.shape[:3], dtype=torch.float32)
        joint.joint_means(q, table, v, content, self.place, out, mass)
        return {"out": out[:, :, self.place.prefix :], "mass": mass[:, :, self.place.prefix :]}

    def of_content(self, device, mass):
        """dq, of a state that of features, in place of the content's part, and a state's part of
        ``<grad, out>``.
        """
        from visionattn.ops.position.kernels.queries_backward import OfContent

        if not self.state:
            return OfContent(guarded(self.dq.to(device).float()))
        dq = guarded((self.dq.double() / self.q.double().clamp(max=0).exp()).to(device).float())
        values = reference.elu1(self.q.double()) @ self.s.double()
        along = (values * self.grad.double()).sum(3) / mass.double().cpu()
        return OfContent(dq, along.to(device).float(), self.z.to(device).float(), "elu1")

    def gradients_by_definition(self):
        """The mean, its mass, and the gradients by name, with dq and dv in place of the content's
        part.
        """
        leaves = {
            name: getattr(self, name).double().clone().requires_grad_()
            for name in ("q", "table", "v")
        }
        out, mass = self.mean_by_definition(**leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), self.grad.double())
        grads = dict(zip(leaves, grads, strict=True))
        return (
            out.detach(),
            mass.detach(),
            grads | {"q": grads["q"] + self.dq, "v": grads["v"] + self.dv},
        )

    def backward(self, device, dtype, out, mass):
        """Gradients by name, for the mean and the mass that a forward pass would have kept."""
        from visionattn.ops.position.kernels.backward import joint_backward

        q, table, v, grad, _ = self.on(device, dtype)
        dv = guarded(self.dv.to(device, dtype))
        out, mass = guarded(out.to(device, dtype)), mass.to(device).float().contiguous()
        content = self.of_content(device, mass)
        dq, d_table = joint_backward(grad, out, mass, q, table, v, self.place, content, dv)
        return {"q": dq, "table": d_table, "v": dv}


def forward_agrees(case, device, dtype):
    case = case.rounded(dtype)
    out, mass = case.mean_by_definition(case.q.double(), case.table.double(), case.v.double())
    expected = {"out": out[:, :, case.place.prefix :], "mass": mass[:, :, case.place.prefix :]}
    assert_within_budget(case.forward(device, dtype), expected, dtype)


def backward_agrees(case, device, dtype):
    case = case.rounded(dtype)
    out, mass, expected = case.gradients_by_definition()
    assert_within_budget(case.backward(device, dtype, out, mass), expected, dtype)


@every_place
@pytest.mark.parametrize("name", CASES)
def test_means_agree_with_dense_weights(name, device, dtype):
    forward_agrees(Case(**CASES[name]), device, dtype)


@every_place
@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_dense_weights(name, device, dtype):
    backward_agrees(Case(**CASES[name]), device, dtype)


@every_place
def test_a_query_without_mass_gets_zero_and_zero_gradients(device, dtype):
    case = Case((3, 5), state=False).rounded(dtype)
    case.table.zero_()
    case.content[1].zero_()
    assert not case.forward(device, dtype)["out"].any()
    out, mass = torch.zeros_like(case.v), torch.zeros(case.v.shape[:3])
    gradients = case.backward(device, dtype, out, mass)
    assert torch.equal(gradients["q"].double().cpu(), case.dq)
    assert torch.equal(gradients["v"].double().cpu(), case.dv)
    assert not gradients["table"].any()


@every_place
def test_prefix_tokens_are_left_as_they_are(device, dtype):
    from visionattn.ops.position.kernels import joint

    case = Case((3, 5))
    q, table, v, _, content = case.on(device, dtype)
    out, mass = torch.full_like(v, 3), torch.full(v.shape[:3], 3.0, device=device)
    joint.joint_means(q, table, v, content, case.place, out, mass)
    assert (out[:, :, :2] == 3).all() and (mass[:, :, :2] == 3).all()
    assert not (out[:, :, 2:] == 3).any() and not (mass[:, :, 2:] == 3).any()


@every_place
def test_half_precision_holds_the_weights_of_classes_with_many_keys(device, dtype):
    # A single weight is about 3e-4 / 1000 here, of which float16 keeps one digit.
    case = Case((2, 3), prefix=1000, mean=False, d=8, e=8, state=False).rounded(dtype)
    case.table *= 1e-4
    for content in case.content:
        content.mul_(1e-7)
    forward_agrees(case, device, dtype)


def test_what_there_is_no_kernel_for_is_said():
    from visionattn.ops.position.gpu import why_not_sizes as why_not

    half, single = torch.float16, torch.float32
    assert why_not(64, 64, half, (5, 5)) is None and why_not(128, 128, half, (3, 3)) is None
    assert why_not(64, 64, single, (3, 3)) is None and why_not(8, 16, single, (1, 8)) is None
    assert why_not(64, 64, half, (1, 16)) is None
    assert "multiples of 8 up to 128 (float32: 64), not for 64 and 72" in why_not(
        64, 72, single, (3, 3)
    )
    assert "not for 20 and 16" in why_not(20, 16, half, (3, 3))
    assert "not for 16 and 16 in torch.float64" in why_not(16, 16, torch.float64, (3, 3))
    assert "up to 16 (float32: 8) along rows, not for (1, 17)" in why_not(16, 16, half, (1, 17))
    assert "along rows, not for (1, 9) in torch.float32" in why_not(16, 16, single, (1, 9))
    assert "not for (0, 3)" in why_not(16, 16, half, (0, 3))
    assert "up to 64 classes at this width, not for 81" in why_not(64, 64, single, (4, 4))
    assert "up to 64 classes at this width, not for 81" in why_not(72, 64, half, (4, 4))
    assert "up to 128 classes at this width, not for 143" in why_not(64, 64, half, (5, 6))
