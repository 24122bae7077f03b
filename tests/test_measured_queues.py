"""Are kernels of accelerators timed one by one, and copies to their hosts priced as measured?"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autopar import _compat
from autopar.bench import Bench
from autopar.cluster import Cluster
from autopar.compilers import Compiler, target_of
from autopar.convolution_shapes import FEW_FEATURES
from autopar.cost_model.hosted import copy_seconds, seconds_per_hosted_byte
from autopar.curves import Curve
from autopar.efforts import FULL, QUICK, Effort
from autopar.measured_convolutions import CONVOLUTIONS, ON_ACCELERATORS, looped_convolution
from autopar.measured_operations import OPERATIONS
from autopar.measured_queues import ROW, QueuedKernels, _kept_apart, _repeated, _row
from autopar.timing import Timer
from tests.test_profile import profile_of

LEAST = Effort(
    (), (), (), (1 << 10, 1 << 22), (), seconds=0.0, least_runs=2, streamed_bytes=1 << 23, copied_bytes=(1 << 10, 1 << 16),
    operated_elements=1 << 16,
)  # fmt: skip


@pytest.fixture(scope="module")
def queued() -> QueuedKernels:
    """The devices of tests are processors, which this can time as well."""
    return QueuedKernels(Bench(jax.devices()[:2], Timer(0.0, 2)), LEAST, lambda what: None)


def test_curves_are_of_the_sizes_that_were_asked_for(queued: QueuedKernels) -> None:
    assert [amount for amount, _ in queued.elementwise().samples] == [8.0, 2.0 * (1 << 10), 2.0 * (1 << 22)]
    streamed = queued.streamed()
    assert [amount for amount, _ in streamed.samples] == [8.0, 2.0 * (1 << 22)]  # smaller arrays would be many
    assert streamed.at(2.0 * (1 << 22)) > 10 * streamed.at(8.0)
    assert [amount for amount, _ in queued.host_copies().samples] == [float(1 << 10), float(1 << 16)]


def test_sums_are_left_to_their_bytes_and_the_rest_is_timed(queued: QueuedKernels) -> None:
    by_name = {one.primitive: one for one in OPERATIONS}
    rates = {name: queued.seconds_per_flop(by_name[name]) for name in ("reduce_sum", "reduce_max", "exp", "sort")}
    assert rates["reduce_sum"] is None and rates["reduce_max"] is None
    assert rates["exp"] is not None and rates["sort"] is not None
    flops = {name: by_name[name].flops(LEAST.operated_elements) for name in ("exp", "sort")}
    assert rates["sort"] * flops["sort"] > 5 * rates["exp"] * flops["exp"] > 0
    assert queued.reductions() is None and queued.turned_bytes_per_second() is None


def test_convolutions_of_accelerators_are_of_the_same_families_with_more_features(queued: QueuedKernels) -> None:
    on_processors = (*CONVOLUTIONS, looped_convolution(64, 64))
    assert [one.family for one in ON_ACCELERATORS] == [one.family for one in on_processors]
    for ours, theirs in zip(ON_ACCELERATORS, on_processors, strict=True):
        assert ours.features == theirs.features <= FEW_FEATURES or ours.features > theirs.features
    few = next(one for one in ON_ACCELERATORS if one.of_weights and one.features <= FEW_FEATURES)
    assert queued.convolution_seconds(few, 4) > 0


@pytest.mark.parametrize("effort", [FULL, QUICK])
def test_accelerators_are_given_more_work(effort: Effort) -> None:
    there = effort.on_accelerators
    assert there is not None and there.on_accelerators is None
    assert max(there.array_bytes) > max(effort.array_bytes) and max(there.sides) > max(effort.sides) / 2
    assert there.fresh_bytes == ()


def test_copies_to_the_host_are_priced_as_measured() -> None:
    plain = Cluster.preset("p5.48xlarge")
    curve = Curve(((1e3, 8e-6), (1e6, 3e-5), (2e6, 5e-5)))
    profile = dataclasses.replace(profile_of(), platform="cuda", host_copies=curve)
    measured = plain.with_profile(profile)
    assert seconds_per_hosted_byte(measured) == pytest.approx(2e-5 / 1e6)
    assert copy_seconds(3, 5e6, measured) == pytest.approx(3 * 8e-6 + 5e6 * 2e-11)
    without = plain.with_profile(dataclasses.replace(profile, host_copies=None))
    assert copy_seconds(3, 5e6, without) == copy_seconds(3, 5e6, plain)


@pytest.mark.gpu_compiler
@pytest.mark.skipif(not _compat.has_gpu_compiler(), reason="the extra gpu-compiler is not installed; make verify-gpu")
def test_the_compiler_of_h100s_makes_one_kernel_of_each_and_of_all_repetitions() -> None:
    target = target_of(Compiler.H100, Cluster.preset("p5.48xlarge").part((0,)))
    whole = NamedSharding(jax.sharding.Mesh(np.array(target.devices), ("d",)), PartitionSpec())
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=whole)

    def kernels(function: object) -> int:
        lowered = jax.jit(function).lower(x)  # type: ignore[arg-type]
        text = lowered.compile(compiler_options=dict(target.options or {})).as_text()
        return text[text.index("ENTRY") :].count(" fusion(")

    assert kernels(_row) == ROW
    for name in ("exp", "erf_inv", "div", "pow"):
        (operation,) = (one for one in OPERATIONS if one.primitive == name)
        assert kernels(_kept_apart(_repeated(operation.apply, 16))) == 1, name
