"""Which forms a check runs and a count counts, so that both are about the code that is timed: named
ones, and those by size.

It knows neither operations nor models, and measures nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from visionattn.lab.cases import Case
from visionattn.ops import flops
from visionattn.ops.attentions import FORM_CHOICES
from visionattn.ops.choice import choose_form
from visionattn.ops.kernelized import eager as kernel_sums
from visionattn.ops.pairs import mean as pair_mean
from visionattn.ops.position import joint
from visionattn.ops.taylorshift import eager as taylor_sums


def forms_to_check(case: Case, has_forms: bool) -> tuple[str, ...]:
    """The form of the case. Where that is "auto" and there are several, each: the size of the check
    may take another one.
    """
    return FORM_CHOICES if case.form == "auto" and has_forms else (case.form,)


@contextmanager
def class_sums_as_on(patches: int) -> Iterator[None]:
    """Within it, Joint position sums over classes in the form, pairs or tiles, that it takes on a
    grid of so many patches.

    Likewise "direct" makes all weights of a pair together where it does so for so many tokens.
    """
    direct_is_faster, few_pairs = joint.direct_is_faster, pair_mean.few_pairs
    with ExitStack() as stack:
        for module, name, fixed in (
            (joint, "direct_is_faster", lambda keys, rows: direct_is_faster(patches, rows)),
            (pair_mean, "few_pairs", lambda n, m: few_pairs(patches, patches)),
        ):
            stack.enter_context(mock.patch.object(module, name, fixed))
        yield


@contextmanager
def auto_as_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Within it, form "auto" stands for what runs on this device for inputs of this dtype, also
    where shapes alone are followed.

    Elsewhere tensors on the meta device take the form of fewer operations.
    """

    def choose(*sizes, **options) -> str:
        return choose_form(
            *sizes, **options | {"device": torch.device(device).type, "dtype": dtype}
        )

    with ExitStack() as stack:
        for module in (flops, kernel_sums, pair_mean, taylor_sums):
            stack.enter_context(mock.patch.object(module, "choose_form", choose))
        yield
