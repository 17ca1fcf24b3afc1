"""Registration of operators: what compilers, autograd and operation counters know about them.

A function becomes ``torch.ops.visionattn.<its name>``: one node for a compiler, whatever loops and
choices it contains. ``operator`` declares the shapes of its results and its number of operations;
``differentiate`` names the operator of its gradients. Both match arguments by parameter name, not
by position. An operator without a registered gradient raises in the backward pass, so nothing here
has a second derivative.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.profiler import record_function

PREFIX = "visionattn.ops: "
"""Prefix of the names of operation and form in a profile."""
_NOTHING = nullcontext()
_FUNCTIONS: dict[CustomOpDef, Callable] = {}
_BY_OVERLOAD: dict[object, Callable] = {}
_UNCOUNTED: dict[str, Callable[..., int]] = {}


def operator(
    *, fake: Callable[..., object], flops: Callable[..., int] | None = None
) -> Callable[[Callable], CustomOpDef]:
    """Register a function of annotated tensors and numbers as an operator under its own name.

    Args:
        fake: returns results of the same shapes, dtypes and strides, in uninitialized memory.
        flops: returns 2 times the multiply-adds of its products; it gets shapes in place of
            tensors.

    Both take the parameters of the function that they need, under the same names.
    """

    def make(function: Callable) -> CustomOpDef:
        made = torch.library.custom_op(
            f"visionattn::{function.__name__}", function, mutates_args=()
        )
        made.register_fake(_by_name(fake, function))
        made.register_autograd(_refuse)
        _FUNCTIONS[made] = function
        if flops is not None:
            _UNCOUNTED[function.__name__] = _by_name(flops, function)
        return made

    return make


def function_of(made: object) -> Callable | None:
    """Return the function behind one of our operators in ``torch.ops``; None for others."""
    if len(_BY_OVERLOAD) < len(_FUNCTIONS):
        _BY_OVERLOAD.update({each._opoverload: own for each, own in _FUNCTIONS.items()})
    return _BY_OVERLOAD.get(made)


def count_operations() -> None:
    """Let ``torch.utils.flop_counter`` count the operators registered so far.

    Importing that module without Triton prints a warning. So ``visionattn.ops`` calls this on
    import only if Triton is present; otherwise the counting code calls it first.
    """
    from torch.utils.flop_counter import register_flop_formula

    while _UNCOUNTED:
        name, formula = _UNCOUNTED.popitem()
        register_flop_formula(getattr(torch.ops.visionattn, name))(formula)


def differentiate(
    made: CustomOpDef,
    backward: Callable[..., Sequence[Tensor | None]],
    *,
    outputs: str,
    gradients: str,
    forget: Callable[..., Sequence[str]] | None = None,
) -> None:
    """Register ``backward`` for the gradients of an operator; autograd saves the arguments that it
    takes.

    Args:
        backward: takes gradients of outputs first, ``grad`` for the first output or ``d_x`` for the
            output ``x``; then inputs and outputs that are tensors; then inputs that are not; last,
            if wanted, ``needs``, the names of inputs that require gradients. A missing gradient is
            passed as None if the annotation allows it, else as zeros.
        outputs: names of the operator's results, separated by spaces.
        gradients: the inputs whose gradients ``backward`` returns, in this order.
        forget: takes inputs by name and returns the names of tensors that need not be saved;
            ``backward`` gets None for them.
    """
    # Resolve names once, here: which upstream gradients, tensors and options ``backward`` takes.
    inputs, asked, results = _parameters(made), _parameters(backward), outputs.split()
    names, known = list(inputs), [*inputs, *results]
    places = {"grad": 0} | {f"d_{name}": i for i, name in enumerate(results)}
    upstream = [name for name in asked if name in places]
    tensors = [n for n in asked if n in results or inputs.get(n) in (Tensor, Tensor | None)]
    options = [name for name in asked if name in inputs and name not in tensors]
    needs = ["needs"] if "needs" in asked else []
    assert [*upstream, *tensors, *options, *needs] == list(asked), f"{backward}: their order"
    assert len(set(known)) == len(known), f"{made}: an output has the name of an input"

    # The code below runs at each call and uses positions found in advance instead of names.
    pick_upstream = _picker([places[name] for name in upstream])
    pick_tensors, pick_options = (_picker([known.index(n) for n in x]) for x in (tensors, options))
    pick_for_forget = _picker([names.index(name) for name in _parameters(forget)] if forget else [])
    given = gradients.split()
    pick_gradients = _picker([given.index(n) if n in given else len(given) for n in names])
    may_be_none = [i for i, n in enumerate(names) if n in given and _may_be_none(inputs[n])]
    filled = [i for i, name in enumerate(upstream) if not _may_be_none(asked[name])]
    pick_filled = _picker([len(inputs) + places[upstream[i]] for i in filled])
    nothing = tuple(None for _ in names)

    def keep(ctx, inputs, output):
        everything = (*inputs, output) if isinstance(output, Tensor) else (*inputs, *output)
        kept = pick_tensors(everything)
        if forget is not None:
            left = forget(*pick_for_forget(inputs))
            kept = [None if n in left else x for n, x in zip(tensors, kept, strict=True)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        ctx.options = pick_options(everything)
        if len(filled) > 1:  # a single one needs no shape: if it is None, nothing is left to do
            ctx.shapes = [x.shape for x in pick_filled(everything)]

    def run(ctx, *grads):
        own = pick_upstream(grads)
        some = next((x for x in own if x is not None), None)
        if some is None:
            return nothing
        # Autograd gives None for an unused output; ``backward`` gets zeros for it.
        if len(filled) > 1 and any(x is None for x in own):
            own = list(own)
            for i, shape in zip(filled, ctx.shapes, strict=True):
                own[i] = some.new_zeros(()).expand(shape) if own[i] is None else own[i]
        needed = ctx.needs_input_grad
        more = [{n for n, need in zip(names, needed, strict=False) if need}] if needs else ()
        with without_autocast(some):
            found = backward(*own, *ctx.saved_tensors, *ctx.options, *more)
        found = pick_gradients((*found, None))
        if not may_be_none:
            return found
        found = list(found)
        for i in may_be_none:
            if not (i < len(needed) and needed[i]):
                found[i] = None
        return tuple(found)

    made.register_autograd(run, setup_context=keep)


def _refuse(ctx, *grads):
    raise NotImplementedError(
        "attention of visionattn has no second derivative; call backward() without "
        "create_graph=True, or use visionattn/ops/reference.py"
    )


def _parameters(function: Callable) -> dict[str, object]:
    """Return the parameters of an operator or a function, with their annotations."""
    parameters = inspect.signature(_FUNCTIONS.get(function, function)).parameters
    return {name: parameter.annotation for name, parameter in parameters.items()}


def _may_be_none(annotation: object) -> bool:
    return annotation == Tensor | None


def _picker(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    """Return a function that picks the entries at these places out of a sequence.

    It must be fast: each call of an operator uses several.
    """
    if len(places) > 1:
        return itemgetter(*places)
    return lambda entries: tuple([entries[i] for i in places])


def _by_name(asks: Callable, function: Callable) -> Callable:
    """Wrap ``asks``, which takes some of ``function``'s parameters, as a function of all of them.

    Keyword-only parameters of ``asks`` are not passed.
    """
    signature = inspect.signature(function)
    asked = inspect.signature(asks).parameters.values()
    wanted = [parameter.name for parameter in asked if parameter.kind != parameter.KEYWORD_ONLY]
    assert signature.parameters.keys() >= set(wanted), f"{function.__name__}: {asks} asks for more"

    def call(*args, out_shape=None, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return asks(*[given.arguments[name] for name in wanted])

    return call


def contiguous_like(*tensors: Tensor | None, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return uninitialized, contiguous memory of the shape and dtype of each tensor; for None, an
    empty tensor like ``like``.
    """
    return tuple([like.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors])


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context without autocast on the device of ``x``, so that sums stay in float32."""
    device = x.device.type
    if not (_has_autocast(device) and torch.is_autocast_enabled(device)):
        return nullcontext()
    return torch.autocast(device, enabled=False)


@torch.compiler.assume_constant_result
def _has_autocast(device_type: str) -> bool:
    """Return whether the device supports autocast; torch 2.11 cannot compile this query."""
    return torch.amp.is_autocast_available(device_type)


def form_ran(operation: str, form: str) -> AbstractContextManager:
    """Return a context that names one call in a profile, such as
    ``form_ran("taylorshift", "efficient")``.

    The name shows which form ran, within a compiled graph too. Without a profiler the context does
    nothing. Only operators enter it, because no compiler traces their bodies.
    """
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return record_function(f"{PREFIX}{operation} {form}")
