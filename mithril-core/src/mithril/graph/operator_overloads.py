"""Python operators on symbolic tensors: a mixin shared by graph values and model connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

from mithril.graph.errors import OperationError
from mithril.graph.registry import index as indexed, operation

T = TypeVar("T")


def _unpacked(sizes: tuple[Any, ...]) -> Any:
    """Return the sizes of ``f(2, 3)`` and of ``f((2, 3))``."""
    only = sizes[0] if len(sizes) == 1 else None
    is_shape = hasattr(type(only), "__getitem__") and not isinstance(only, Operators)  # also the shape of a connection
    return only if is_shape else sizes


def _operator(name: str, *, swap: bool = False) -> Callable[[T, Any], T]:
    def apply(self: T, other: Any) -> T:
        result: T = operation(name)(other, self) if swap else operation(name)(self, other)
        return result

    return apply


class Operators:
    """Mixin that maps arithmetic, comparison, indexing and methods to operations: ``x.sum(axis=1)``, ``x.relu()``.

    The code of mithril compares tensors by ``is``. They are keys of mappings, which compare by identity first.
    """

    __slots__ = ()

    __add__, __radd__ = _operator("add"), _operator("add", swap=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swap=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swap=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swap=True)
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _operator("floordiv", swap=True)
    __mod__, __rmod__ = _operator("mod"), _operator("mod", swap=True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", swap=True)
    __matmul__, __rmatmul__ = _operator("matmul"), _operator("matmul", swap=True)
    __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", swap=True)
    __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", swap=True)
    __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", swap=True)
    __lshift__, __rshift__ = _operator("shift_left"), _operator("shift_right")
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")

    def __eq__(self, other: object) -> Any:
        return self is other if other is None else operation("equal")(self, other)

    def __ne__(self, other: object) -> Any:
        return self is not other if other is None else operation("not_equal")(self, other)

    __hash__ = object.__hash__

    def __neg__(self) -> Self:
        return cast("Self", operation("neg")(self))

    def __invert__(self) -> Self:
        return cast("Self", operation("bitwise_not")(self))

    def __abs__(self) -> Self:
        return cast("Self", operation("abs")(self))

    def __getitem__(self, index: Any) -> Self:
        return cast("Self", indexed(self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("values do not change; use x = scatter(x, rows, updates), dynamic_update_slice() or where()")

    def __bool__(self) -> bool:
        raise TypeError(
            "a symbolic tensor has no truth value; use where(), If or while_loop for data-dependent choices"
            " (`is` compares the tensors themselves)"
        )

    def __iter__(self) -> Any:
        raise TypeError("a symbolic tensor cannot be iterated; slice it, split it, or loop over it with scan()")

    __array_ufunc__ = None  # NumPy arrays as left operands defer to these operators

    # -- methods -------------------------------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            op = operation(name)
        except OperationError as error:
            raise AttributeError(str(error)) from None

        def method(*operands: Any, **attributes: Any) -> Any:
            return op(self, *operands, **attributes)

        return method

    def reshape(self, *shape: Any) -> Self:
        """Return the same elements in another shape; one size may be -1."""
        return cast("Self", operation("reshape")(self, shape=_unpacked(shape)))

    def transpose(self, *perm: Any) -> Self:
        """Permute the axes; without arguments, reverse them."""
        return cast("Self", operation("transpose")(self, perm=_unpacked(perm) or None))

    @property
    def T(self) -> Self:
        return self.transpose()

    def _reduced(self, name: str, axis: Any, keepdims: bool, attributes: dict[str, Any]) -> Self:
        return cast("Self", operation(name)(self, axis=axis, keepdims=keepdims, **attributes))

    def sum(self, axis: Any = None, keepdims: bool = False, **attributes: Any) -> Self:
        return self._reduced("sum", axis, keepdims, attributes)

    def mean(self, axis: Any = None, keepdims: bool = False, **attributes: Any) -> Self:
        return self._reduced("mean", axis, keepdims, attributes)

    def prod(self, axis: Any = None, keepdims: bool = False, **attributes: Any) -> Self:
        return self._reduced("prod", axis, keepdims, attributes)

    def max(self, axis: Any = None, keepdims: bool = False, **attributes: Any) -> Self:
        return self._reduced("max", axis, keepdims, attributes)

    def min(self, axis: Any = None, keepdims: bool = False, **attributes: Any) -> Self:
        return self._reduced("min", axis, keepdims, attributes)

    def var(self, axis: Any = None, keepdims: bool = False, **attributes: Any) -> Self:
        return self._reduced("var", axis, keepdims, attributes)

    def astype(self, dtype: Any) -> Self:
        """Cast the elements to another dtype."""
        return cast("Self", operation("cast")(self, dtype=dtype))
