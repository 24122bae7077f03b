"""What a user may do with a leaf that is no ``jax.Array``: its value by operators and NumPy, clear words from JAX's functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime.pieced_array import PiecedArray

WHOLE = np.arange(12, dtype=np.int32).reshape(6, 2)
REFUSED = r"a function of JAX was given DistributedArray\(.*jnp.asarray\(leaf\) brings it here.*like=train_step"


@pytest.fixture
def leaf() -> PiecedArray:
    return PiecedArray([jnp.asarray(WHOLE[:4]), jnp.asarray(WHOLE[4:])], 0)


@pytest.fixture
def keys() -> PiecedArray:
    made = jax.random.split(jax.random.key(3), 4)
    return PiecedArray([made[:1], made[1:]], 0)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x << 2,
        lambda x: 3 ^ x,
        lambda x: divmod(x, 5)[1],
        abs,
        operator.neg,
        operator.itemgetter((slice(1, 3), 0)),
        lambda x: np.stack(list(x)),
        lambda x: np.mean(x, axis=0),
        lambda x: jnp.stack([x, x]),
        jnp.asarray,
        jax.device_get,
        lambda x: x == WHOLE,
    ],
)
def test_its_value_is_had_by_asking(leaf: PiecedArray, work: Callable[[Any], Any]) -> None:
    np.testing.assert_array_equal(work(leaf), work(WHOLE))


def test_two_of_them_make_a_value(leaf: PiecedArray, keys: PiecedArray) -> None:
    np.testing.assert_array_equal(leaf + leaf, WHOLE + WHOLE)
    assert bool(jnp.all(keys == keys))


def test_it_is_fetched_once_to_be_looped_over(leaf: PiecedArray, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    words = PiecedArray.words
    monkeypatch.setattr(PiecedArray, "words", lambda self: fetched.append(self) or words(self))
    assert [row.tolist() for row in leaf] == WHOLE.tolist()
    assert len(fetched) == 1


@pytest.mark.parametrize(
    "function",
    [
        jnp.sum,
        jnp.mean,
        jnp.isnan,
        jnp.linalg.norm,
        jax.nn.relu,
        jax.nn.softmax,
        jax.lax.exp,
        jax.lax.stop_gradient,
        jax.jit(lambda x: x + 1),
        jax.grad(lambda x: jnp.sum(x * 1.0)),
        jax.vmap(lambda x: x + 1),
        jax.make_jaxpr(lambda x: x + 1),
        jax.device_put,
    ],
)
def test_functions_of_jax_refuse_it_with_advice(leaf: PiecedArray, function: Callable[[Any], Any]) -> None:
    """Of itself JAX says to register the class as a pytree."""
    with pytest.raises(autopar.TraceError, match=REFUSED):
        function(leaf)


@pytest.mark.parametrize("name", ["mean", "astype", "T", "at", "reshape"])
def test_what_it_lacks_of_an_array_is_named(leaf: PiecedArray, name: str) -> None:
    assert not hasattr(leaf, name)
    with pytest.raises(
        AttributeError, match=rf"no attribute '{name}': jnp.asarray\(leaf\) is a jax.Array of its value"
    ):
        getattr(leaf, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = leaf.nonsense


def test_keys_come_here_by_asarray(keys: PiecedArray) -> None:
    wanted = jax.random.split(jax.random.key(3), 4)
    here = jnp.asarray(keys)
    np.testing.assert_array_equal(jax.random.key_data(here), jax.random.key_data(wanted))
    np.testing.assert_array_equal(jax.random.key_data(keys[2]), jax.random.key_data(wanted[2]))
    with pytest.raises(TypeError, match=r"jax.random.key_data\(jnp.asarray\(key\)\)"):
        np.asarray(keys)
    with pytest.raises(autopar.TraceError, match=REFUSED):
        jax.jit(jax.random.key_data)(keys)
    with pytest.raises(TypeError, match="invalid PRNG key data"):  # JAX looks for its own class here, and asks no other
        jax.random.key_data(keys)
