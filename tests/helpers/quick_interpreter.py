"""A Triton interpreter that prepares its language once for each launch.

Triton prepares it again, in a millisecond, whenever a kernel calls a function, which takes longer
than most functions themselves. The second time changes nothing, as the launch has done it already.
"""

from triton.runtime import interpreter


def _call(function: interpreter.InterpretedFunction, *args, **kwargs):
    """What the interpreter does at a call within a kernel, without preparing its language."""
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def install() -> None:
    """Make calls within kernels quick, from now on and in this process."""
    interpreter.InterpretedFunction.__call__ = _call
