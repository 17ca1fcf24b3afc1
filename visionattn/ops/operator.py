"""Registration of functions as PyTorch operators, with shapes, gradients and operation counts.

A function becomes ``torch.ops.visionattn.<its name>``: a single node for a compiler, whatever loops
and branches it contains. ``operator`` declares the shapes of the results and the number of
operations; ``differentiate`` registers the gradient. Both match arguments by parameter name, not by
position. An operator without a registered gradient raises in the backward pass, so there are no
second derivatives.
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
"""Prefix of the names that ``form_ran`` writes to a profile."""
_NOTHING = nullcontext()
_FUNCTIONS: dict[CustomOpDef, Callable] = {}
_BY_OVERLOAD: dict[object, Callable] = {}
_UNCOUNTED: dict[str, Callable[..., int]] = {}


def operator(
    *, fake: Callable[..., object], flops: Callable[..., int] | None = None
) -> Callable[[Callable], CustomOpDef]:
    """Decorate a function of annotated tensors and numbers: register it as an operator under its
    own name.

    Both arguments take those parameters of the function that they need, under the same names.

    Args:
        fake: returns results of the same shapes, dtypes and strides, in uninitialized memory.
        flops: returns 2 times the number of multiply-adds in products; it gets shapes in place of
            tensors.
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
    """Return the Python function of one of our operators in ``torch.ops``; None for others."""
    if len(_BY_OVERLOAD) < len(_FUNCTIONS):
        _BY_OVERLOAD.update({each._opoverload: own for each, own in _FUNCTIONS.items()})
    return _BY_OVERLOAD.get(made)


def count_operations() -> None:
    """Let ``torch.utils.flop_counter`` count the operators registered so far.

    Importing that module without Triton prints a warning. So ``visionattn.ops`` calls this function
    on import only if Triton is installed; otherwise code that counts must call it first.
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
    """Register ``backward`` as the gradient of an operator.

    The parameter names of ``backward`` decide which tensors autograd saves. In this order, they
    are:

    - upstream gradients: ``grad`` for the first output, or ``d_x`` for the output ``x``. A missing
      gradient is passed as None if the annotation allows it, else as zeros;
    - inputs and outputs that are tensors;
    - other inputs;
    - optionally ``needs``, the set of names of the inputs that require gradients.

    Args:
        backward: the function of the gradients.
        outputs: names of the operator's results, separated by spaces.
        gradients: names of the inputs whose gradients ``backward`` returns, in this order.
        forget: takes inputs by name and returns the names of tensors that need not be saved;
            ``backward`` gets None for them.
    """
    # Resolve names once: which upstream gradients, tensors and options ``backward`` takes.
    inputs, parameters, results = _parameters(made), _parameters(backward), outputs.split()
    names, known = list(inputs), [*inputs, *results]
    positions = {"grad": 0} | {f"d_{name}": i for i, name in enumerate(results)}
    upstream = [name for name in parameters if name in positions]
    tensors = [n for n in parameters if n in results or inputs.get(n) in (Tensor, Tensor | None)]
    options = [name for name in parameters if name in inputs and name not in tensors]
    needs = ["needs"] if "needs" in parameters else []
    assert [*upstream, *tensors, *options, *needs] == list(parameters), f"{backward}: parameters"
    assert len(set(known)) == len(known), f"{made}: an output has the name of an input"

    # ``keep`` and ``run`` run at each call, so they select by precomputed positions, not by name.
    pick_upstream = _picker([positions[name] for name in upstream])
    pick_tensors, pick_options = (_picker([known.index(n) for n in x]) for x in (tensors, options))
    pick_for_forget = _picker([names.index(name) for name in _parameters(forget)] if forget else [])
    returned = gradients.split()
    pick_gradients = _picker([returned.index(n) if n in returned else len(returned) for n in names])
    may_be_none = [i for i, n in enumerate(names) if n in returned and _may_be_none(inputs[n])]
    required = [i for i, name in enumerate(upstream) if not _may_be_none(parameters[name])]
    pick_required = _picker([len(inputs) + positions[upstream[i]] for i in required])
    nothing = tuple(None for _ in names)

    def keep(ctx, inputs, output):
        everything = (*inputs, output) if isinstance(output, Tensor) else (*inputs, *output)
        saved = pick_tensors(everything)
        if forget is not None:
            forgotten = forget(*pick_for_forget(inputs))
            saved = [None if n in forgotten else x for n, x in zip(tensors, saved, strict=True)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.options = pick_options(everything)
        # With one upstream gradient, None ends ``run`` early and no zeros are needed.
        if len(required) > 1:
            ctx.shapes = [x.shape for x in pick_required(everything)]

    def run(ctx, *grads):
        upstream_grads = pick_upstream(grads)
        given = next((x for x in upstream_grads if x is not None), None)
        if given is None:
            return nothing
        # Autograd gives None for an unused output; ``backward`` gets zeros for it.
        if len(required) > 1 and any(x is None for x in upstream_grads):
            upstream_grads = list(upstream_grads)
            for i, shape in zip(required, ctx.shapes, strict=True):
                if upstream_grads[i] is None:
                    upstream_grads[i] = given.new_zeros(()).expand(shape)
        needed = ctx.needs_input_grad
        extra = [{n for n, need in zip(names, needed, strict=False) if need}] if needs else ()
        with without_autocast(given):
            grads_of_inputs = backward(*upstream_grads, *ctx.saved_tensors, *ctx.options, *extra)
        grads_of_inputs = pick_gradients((*grads_of_inputs, None))
        if not may_be_none:
            return grads_of_inputs
        grads_of_inputs = list(grads_of_inputs)
        for i in may_be_none:
            if not (i < len(needed) and needed[i]):
                grads_of_inputs[i] = None
        return tuple(grads_of_inputs)

    made.register_autograd(run, setup_context=keep)


def _refuse(ctx, *grads):
    raise NotImplementedError(
        "attention of visionattn has no second derivative; call backward() without "
        "create_graph=True, or use visionattn/ops/reference.py"
    )


def _parameters(function: Callable) -> dict[str, object]:
    """Return the annotation of each parameter of an operator or a function."""
    parameters = inspect.signature(_FUNCTIONS.get(function, function)).parameters
    return {name: parameter.annotation for name, parameter in parameters.items()}


def _may_be_none(annotation: object) -> bool:
    return annotation == Tensor | None


def _picker(indices: Sequence[int]) -> Callable[[Sequence], tuple]:
    """Return a fast function that returns the entries of a sequence at these indices."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda entries: tuple([entries[i] for i in indices])


def _by_name(asks: Callable, function: Callable) -> Callable:
    """Wrap ``asks``, which takes some parameters of ``function``, as a function of all of them.

    Keyword-only parameters of ``asks`` are already bound and are not passed.
    """
    signature = inspect.signature(function)
    parameters = inspect.signature(asks).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind != parameter.KEYWORD_ONLY]
    assert signature.parameters.keys() >= set(names), f"{function.__name__}: {asks} asks for more"

    def call(*args, out_shape=None, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return asks(*[bound.arguments[name] for name in names])

    return call


def contiguous_like(*tensors: Tensor | None, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return uninitialized, contiguous memory of the shape and dtype of each tensor; for None, a
    tensor ``[0]`` in the dtype of ``like``.
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
    """Return whether the device supports autocast, as a constant: torch 2.11 cannot compile the
    call.
    """
    return torch.amp.is_autocast_available(device_type)


def form_ran(operation: str, form: str) -> AbstractContextManager:
    """Return a context that names one call in a profile, such as
    ``form_ran("taylorshift", "efficient")``.

    Profiles of compiled graphs show the name too. Without a profiler the context does nothing. Only
    operators may enter it, because no compiler traces their bodies.
    """
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return record_function(f"{PREFIX}{operation} {form}")
