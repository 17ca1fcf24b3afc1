"""Triton's interpreter in half of its time: the same numbers, checks and errors.

Most of its time goes into what does not change. It prepares its language again, in a millisecond,
whenever a kernel calls a function, which takes longer than most functions themselves; what a module
sees of the language stays prepared here until the launch ends. It describes types and shapes anew
for each operand, where there are a few dozen, which are kept here. And it tells whether sums and
products of whole numbers overflow by nine operations of its own, where numpy takes three.
"""

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

_prepared: set[int] = set()
"""The modules that the present launch has called functions of, by their globals."""
_run = interpreter.InterpretedFunction.run


def _run_afresh(kernel: interpreter.InterpretedFunction, *args, **kwargs):
    """A launch, before which nothing is prepared."""
    _prepared.clear()
    return _run(kernel, *args, **kwargs)


def _call(function: interpreter.InterpretedFunction, *args, **kwargs):
    """What the interpreter does at a call within a kernel, but for preparing a module again."""
    module = id(function.fn.__globals__)
    if module not in _prepared:
        _prepared.add(module)
        interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:  # whatever a kernel raises, as Triton itself takes it
        raise interpreter.InterpreterError(repr(error)) from error


EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_check_overflow = semantic.TritonSemantic.binary_op_sanitize_overflow_impl


def _check_overflow_at_once(self, lhs, rhs, binary_op) -> None:
    """Raise where the result in 64 bits is not one of the operands' type."""
    kind = lhs.type.scalar
    if kind.int_bitwidth not in (8, 16, 32):
        return _check_overflow(self, lhs, rhs, binary_op)
    name, sides = binary_op.__name__, [side.handle.data.astype(np.int64) for side in (lhs, rhs)]
    exact = EXACT[name](*sides)
    fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
    assert fits, f"int{kind.int_bitwidth} overflow detected for operation {name}"


_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


def _np_dtype_once(dtype) -> np.dtype:
    """numpy's dtype of one of Triton's, which its name tells."""
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _np_dtype(dtype)
    return _np_dtypes[dtype.name]


_describe = core.block_type.__init__
_described: dict[tuple, dict] = {}


def _describe_once(self, element_ty, shape) -> None:
    """Describe a block by what was found of the first one of its elements and shape."""
    sizes = (size.value if isinstance(size, core.constexpr) else size for size in shape)
    key = element_ty.name, *sizes
    if key not in _described:
        _describe(self, element_ty, shape)
        _described[key] = dict(vars(self))
    else:
        vars(self).update(_described[key])


_make_tensor = core.tensor.__init__
_made: dict[str, dict] = {}


def _make_tensor_once(self, handle, type) -> None:
    """Make a tensor with the shape that the first one of its type was given."""
    if type.name not in _made:
        _make_tensor(self, handle, type)
        _made[type.name] = {name: vars(self)[name] for name in ("shape", "numel")}
    else:
        vars(self).update(_made[type.name], handle=handle, type=type, dtype=type.scalar)


def install() -> None:
    """Make kernels quick, from now on and in this process."""
    interpreter.InterpretedFunction.run = _run_afresh
    interpreter.InterpretedFunction.__call__ = _call
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow_at_once
    interpreter._get_np_dtype = _np_dtype_once
    core.block_type.__init__ = _describe_once
    core.tensor.__init__ = _make_tensor_once
