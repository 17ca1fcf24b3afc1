"""The table of all attentions, their forms and their capabilities.

Each attention is a function ``<name>_attention`` of ``visionattn.ops``, with a definition of the
same name in ``reference.py``. ``visionattn.ops.OPERATIONS`` maps names to functions. The table
imports no operation, so that operations can read it too.
"""

from dataclasses import dataclass
from typing import Literal, get_args

FormChoice = Literal["auto", "direct", "efficient"]
"""How to compute an attention.

"direct" computes the weights of all pairs, quadratic in the number of tokens; "efficient" is
linear. Both compute the same result. "auto" chooses the form that ``form_choice.py`` expects to be
faster.
"""
FORM_CHOICES: tuple[str, ...] = get_args(FormChoice)
FORMS = FORM_CHOICES[1:]


@dataclass(frozen=True)
class AttentionKind:
    """The capabilities of one attention."""

    name: str
    forms: tuple[str, ...] = FORMS
    """The forms that the argument ``form`` accepts besides "auto"; empty if there is only one."""
    causal: bool = True
    """Whether it accepts ``causal``."""
    why_not_causal: str = ""
    """The reason if it does not accept ``causal``."""
    temperature: bool = False
    """Whether it accepts a learned ``temperature`` per head."""
    feature_map: bool = False
    """Whether it accepts a ``feature_map``."""
    states: bool = True
    """Whether ``summarize`` reduces its keys and values to a state."""
    impl: bool = True
    """Whether it has GPU kernels, and so accepts ``impl``."""
    signed: bool = False
    """Whether entries of relative tables may have any sign, as under a softmax. ``normalization``
    does not apply then.
    """
    windows: bool = False
    """Whether it attends within windows of the grid. Such an attention takes ``window_size`` and
    ``shifted``, and needs a ``layout`` even without relative position.
    """


ATTENTIONS: dict[str, AttentionKind] = {
    kind.name: kind
    for kind in (
        AttentionKind(
            "taylorshift",
            causal=False,
            why_not_causal="its linear form sums d (d + 1) / 2 x e numbers over all keys, and sums "
            "up to each token are not implemented",
            temperature=True,
        ),
        AttentionKind("kernelized", feature_map=True),
        AttentionKind("softmax", forms=(), states=False, impl=False, signed=True),
        AttentionKind(
            "window",
            forms=(),
            causal=False,
            why_not_causal="tokens of a window are adjacent on the grid, not in the sequence",
            states=False,
            impl=False,
            signed=True,
            windows=True,
        ),
    )
}


def get_attention(name: str) -> AttentionKind:
    """Return the attention with this name. Raise ValueError for an unknown name."""
    if name not in ATTENTIONS:
        raise ValueError(f"attention {name!r}: expected one of {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]
