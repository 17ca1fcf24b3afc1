"""What masked keys hold, NaN and inf too, changes nothing in kernels, and their gradients are 0."""

import numpy as np
import pytest
import torch

from tests.helpers.kernel_checks import every_place, poisoned_memory
from visionattn.ops import kernelized_attention, taylorshift_attention

pytest.importorskip("triton", reason="GPU kernels need Triton")
poisoned = pytest.fixture(autouse=True)(poisoned_memory)
ATTENTIONS = {
    "kernelized elu1": (kernelized_attention, {}),
    "kernelized relu": (kernelized_attention, {"feature_map": "relu"}),
    "kernelized causal": (kernelized_attention, {"causal": True}),
    "taylorshift direct": (taylorshift_attention, {"form": "direct"}),
    "taylorshift efficient": (taylorshift_attention, {"form": "efficient"}),
}
ATTENTIONS |= {
    f"{name} with temperature": (function, options | {"temperature": True})
    for name, (function, options) in ATTENTIONS.items()
    if function is taylorshift_attention
}


@every_place
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_masked_keys_hold_anything(attention, device, dtype):
    (function, options), generator = ATTENTIONS[attention], torch.Generator().manual_seed(4)
    if options.get("temperature"):
        temperature = torch.tensor([2.0, 3.0], device=device, requires_grad=True)
        options = options | {"temperature": temperature}
    q, k, v, grad = (
        torch.randn(2, 2, 35, 16, generator=generator).to(device, dtype) for _ in range(4)
    )
    mask = (torch.rand(2, 35, generator=generator) < 0.7).to(device)
    absent = ~mask[:, None, :, None]

    def results(*fill):
        held = torch.tensor(fill, dtype=dtype, device=device)
        held = held[torch.arange(16, device=device) % len(fill)]
        inputs = [
            x.requires_grad_() for x in (q.clone(), *(torch.where(absent, held, x) for x in (k, v)))
        ]
        out = function(*inputs, key_mask=mask, impl="triton", **options)
        own = [*inputs, options["temperature"]] if "temperature" in options else inputs
        return out, *torch.autograd.grad(out, own, grad)

    wanted = results(0.0)
    with np.errstate(all="ignore"):  # the interpreter warns of what it makes of masked rows
        got = results(float("nan"), float("inf"), -float("inf"), 6e4, -7.0)
    for ours, want in zip(got, wanted, strict=True):
        assert torch.equal(ours, want)
    for of_keys in got[2:4]:
        assert of_keys.masked_select(absent).eq(0).all()
