"""An array that no one ``jax.Array`` of this process can be.

It lies on the devices of other processes (what a step on a Ray cluster returns), its pieces lie on several meshes (the stacked
parameters of a loop over layers that stages of a pipeline share: :mod:`autopar.runtime.pieced_array`), or other processes have
yet to send it, who may not do so (:mod:`autopar.runtime.reports`).  It is a leaf of
pytrees like a ``jax.Array`` and is handed to the next step without being moved.  Nothing is fetched until its value is asked
for: by ``float()``, ``np.asarray``, ``jnp.asarray``, ``jax.device_get``, an operator, or a function of NumPy.  Functions of JAX
refuse it: a model should not come into this process because somebody has forgotten ``like=``.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import jax
import numpy as np

from autopar import _compat
from autopar.errors import TraceError
from autopar.runtime.messages import Where


class Holder(Protocol):
    """The mesh on which an array lies."""

    def check(self) -> None:
        """Raise ``WorkerError`` if the mesh is lost."""

    def fetch(self, array: RemoteArray) -> np.ndarray[Any, Any]:
        """Its value; of typed keys, the words."""

    def wait(self, array: RemoteArray) -> None:
        """Return when it is there."""

    def release(self, number: int) -> None:
        """Nobody asks for the array of this number any more."""


class DistributedArray(ABC):
    """See the module docstring.  ``aval`` says shape and dtype of the whole array."""

    __slots__ = ("__weakref__", "aval")
    __array_priority__ = 100

    def __init__(self, aval: Any) -> None:
        self.aval = aval

    # ---------------------------------------------------------------------------------------------------- its lifetime

    @abstractmethod
    def is_deleted(self) -> bool:
        """Whether a step took its memory over, or it was deleted, or its mesh is gone."""

    @abstractmethod
    def delete(self) -> None:
        """Give its memory back now."""

    @abstractmethod
    def block_until_ready(self) -> DistributedArray:
        """Wait until it is computed."""

    @abstractmethod
    def words(self) -> np.ndarray[Any, Any]:
        """Its value in this process; of typed keys, the words."""

    # ---------------------------------------------------------------------------------------------- what it is like

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        """Of its elements."""
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, counted once."""
        return self.size * int(self.dtype.itemsize)

    @property
    def weak_type(self) -> bool:
        """Whether its dtype gives way to others, as in ``jax.Array``."""
        return bool(self.aval.weak_type)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    # ----------------------------------------------------------------------------------------------------- its value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if jax.numpy.issubdtype(self.dtype, jax.dtypes.prng_key):
            raise TypeError("typed PRNG keys have no NumPy value; ask for jax.random.key_data(jnp.asarray(key))")
        value = self.words()
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        value = jax.numpy.asarray(self.words())
        if jax.numpy.issubdtype(self.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(value, impl=_compat.key_impl_name(_compat.dtype_name(self.dtype)))
        return value

    def item(self) -> Any:
        """The one element."""
        return np.asarray(self).item()

    def tolist(self) -> Any:
        """Nested lists of Python numbers."""
        return np.asarray(self).tolist()

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __index__(self) -> int:
        return int(np.asarray(self).__index__())

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and not self.shape else str(self) if self.shape else self.item(), spec)

    def __getitem__(self, index: Any) -> Any:
        return (self.__jax_array__() if _compat.is_key_dtype(self.dtype) else np.asarray(self))[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])  # fetched once

    def __getattr__(self, name: str) -> Any:
        """Only asked for what is not here.  Raises ``AttributeError``, with advice where a ``jax.Array`` has it."""
        advice = ": jnp.asarray(leaf) is a jax.Array of its value in this process" if hasattr(jax.Array, name) else ""
        raise AttributeError(f"a DistributedArray has no attribute {name!r}{advice}", name=name, obj=self)


@dataclass(frozen=True)
class _Gone:
    why: str


class RemoteArray(DistributedArray):
    """An array on one mesh of other processes.  ``where`` says on which devices it lies, and cut how."""

    __slots__ = ("_finalizer", "_gone", "holder", "number", "where")

    def __init__(self, aval: Any, where: Where, holder: Holder, number: int) -> None:
        super().__init__(aval)
        self.where = where
        self.holder = holder
        self.number = number
        self._gone: _Gone | None = None
        self._finalizer = weakref.finalize(self, holder.release, number)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.where.devices))
        state = f", {self._gone.why}" if self._gone else ""
        return f"DistributedArray({self.aval.str_short()}, {self.where.layout} on {self.where.mesh}, devices {devices}{state})"

    def is_deleted(self) -> bool:
        """Whether a step took its memory over, or it was deleted, or its mesh is gone."""
        return self._gone is not None

    def delete(self) -> None:
        """Give its memory back now."""
        self.forget("deleted")
        self._finalizer()

    def forget(self, why: str) -> None:
        """Mark it as gone; for those who know that it is."""
        self._gone = self._gone or _Gone(why)

    def block_until_ready(self) -> RemoteArray:
        """Wait until it is computed."""
        self._check()
        self.holder.wait(self)
        return self

    def words(self) -> np.ndarray[Any, Any]:
        """Its value in this process; of typed keys, the words."""
        self._check()
        return self.holder.fetch(self)

    def _check(self) -> None:
        if self._gone is not None:
            raise TraceError(
                f"{self!r} has no value any more ({self._gone.why}). Pass on the state that the step returns, or keep the old "
                "one with parallelize(..., donate_argnums=())."
            )


def stored_type(aval: Any) -> tuple[tuple[int, ...], str, str | None]:
    """Shape and dtype in which an array is stored, and how its keys are made if it is one of keys."""
    if not _compat.is_key_dtype(aval.dtype):
        return tuple(aval.shape), _compat.dtype_name(aval.dtype), None
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return tuple(words.shape), _compat.dtype_name(words.dtype), _compat.key_impl_name(_compat.dtype_name(aval.dtype))


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: DistributedArray, *others: Any) -> Any:
        here = (other.__jax_array__() if isinstance(other, DistributedArray) else other for other in others)
        return getattr(self.__jax_array__(), name)(*here)

    apply.__name__ = name
    return apply


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs "
    "lt le gt ge eq ne matmul rmatmul and rand or ror xor rxor invert lshift rlshift rshift rrshift divmod rdivmod pos round"
).split():
    setattr(DistributedArray, f"__{_name}__", _operator(f"__{_name}__"))
DistributedArray.__hash__ = object.__hash__  # type: ignore[method-assign,assignment]


def _refuse(array: DistributedArray) -> NoReturn:
    raise TraceError(
        f"a function of JAX was given {array!r}, which is no array of this process. jnp.asarray(leaf) brings it here; a "
        "function of a whole state runs where the state is: autopar.parallelize(evaluate, like=train_step)"
    )


_compat.refuse_as_argument(DistributedArray, _refuse)
