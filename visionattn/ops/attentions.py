"""The one table of the attentions and their forms; whoever lists them or asks what one can do
reads it.

An attention of the table is a function ``<name>_attention`` of ``visionattn.ops``, which
``visionattn.ops.OPERATIONS`` gives by name, and a definition of that name in ``reference.py``. The
table is plain values and imports no operation, so that operations read it too.
"""

from dataclasses import dataclass
from typing import Literal, get_args

FormChoice = Literal["auto", "direct", "efficient"]
"""How an attention is computed, as a caller may ask for it.

"direct" makes the weights of all pairs and is quadratic in the number of tokens, "efficient" is
linear; they compute the same. "auto" stands for the one that ``choice.py`` expects to be faster.
"""
FORM_CHOICES: tuple[str, ...] = get_args(FormChoice)
FORMS = FORM_CHOICES[1:]


@dataclass(frozen=True)
class AttentionKind:
    """What one attention can do."""

    name: str
    forms: tuple[str, ...] = FORMS
    """Its forms, between which ``form`` chooses; empty where there is one way alone."""
    causal: bool = True
    """Whether it takes ``causal``."""
    why_not_causal: str = ""
    """Where it does not, the reason."""
    temperature: bool = False
    """Whether it takes a ``temperature`` for each head, which a model learns."""
    feature_map: bool = False
    """Whether it takes a ``feature_map``."""
    states: bool = True
    """Whether ``summarize`` reduces its keys and values to a state."""
    impl: bool = True
    """Whether it takes ``impl``, since it has GPU kernels."""
    signed: bool = False
    """Whether relative tables may have entries of any sign, as scores under a softmax have. They
    are not normalised then: ``normalization`` has no meaning.
    """
    windows: bool = False
    """Whether it attends in windows of a grid: it takes ``window_size`` and ``shifted``, and needs
    a ``layout``, with or without a relative position.
    """

    @property
    def operations(self) -> tuple[str, ...]:
        """Return its names in tables of costs; the causal operation has a name of its own."""
        return (self.name, f"{self.name} causal") if self.causal else (self.name,)


ATTENTIONS: dict[str, AttentionKind] = {
    kind.name: kind
    for kind in (
        AttentionKind(
            "taylorshift",
            causal=False,
            why_not_causal="its linear form multiplies each query with one sum over all keys, of d "
            "(d + 1) / 2 x e numbers; sums up to each token are not built",
            temperature=True,
        ),
        AttentionKind("kernelized", feature_map=True),
        AttentionKind("softmax", forms=(), states=False, impl=False, signed=True),
        AttentionKind(
            "window",
            forms=(),
            causal=False,
            why_not_causal="tokens of a window follow the grid, not an order",
            states=False,
            impl=False,
            signed=True,
            windows=True,
        ),
    )
}


def get_attention(name: str) -> AttentionKind:
    """Return the attention of that name. ValueError where there is none."""
    if name not in ATTENTIONS:
        raise ValueError(f"attention {name!r}: wanted one of {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]
