"""A Triton interpreter that prepares its language once for each launch and module.

Triton prepares it again, in a millisecond, whenever a kernel calls a function, which takes longer
than most functions themselves. The second time changes nothing: what a module sees of the language
stays prepared until the launch ends.
"""

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
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def install() -> None:
    """Make calls within kernels quick, from now on and in this process."""
    interpreter.InterpretedFunction.run = _run_afresh
    interpreter.InterpretedFunction.__call__ = _call
