"""What messages between processes cost the meshes at their ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.bench import Bench
from autopar.cluster import Cluster, Mesh
from autopar.cost_model.exchanges import exchange_seconds
from autopar.curves import Curve
from autopar.measured_exchanges import SelfExchange
from autopar.plan import Layout
from autopar.schedule.cross_mesh import CrossMeshTransfer, Placement, cross_mesh_transfer
from autopar.schedule.instructions import Free, Receive, Run, Send, Slot, Task
from autopar.timing import Timer
from tests.test_profile import profile_of

EXCHANGES = Curve(((1e3, 1e-3), (1e6, 1.0)))
A, B, C, X = Slot(0, 0), Slot(0, 1), Slot(0, 2), Slot(1, 0)
FIRST, SECOND, OTHER = Task.forward(0, 0), Task.backward(0, 0), Task.forward(1, 0)
LISTS = (
    [Send(0, 0, A), Run(FIRST, (A,), (B,)), Send(1, 0, B), Receive(2, 0, C), Run(SECOND, (B, C), ()), Free((C,))],
    [Receive(0, 0, X), Receive(1, 0, Slot(1, 1)), Run(OTHER, (X, Slot(1, 1)), (Slot(1, 2),)), Send(2, 0, Slot(1, 2))],
)


def two_hosts(exchanges: Curve | None = EXCHANGES) -> Cluster:
    return Cluster.local().replace(hosts=2, devices_per_host=4, profile=profile_of(4, exchanges=exchanges))


def transfer(elements: int, cluster: Cluster, *, whole: bool = False) -> CrossMeshTransfer:
    """Rows (or all) on each of two devices of the first host, to two of the second."""
    mesh, layout = Mesh(("data",), (2,)), Layout(((),) if whole else (("data",),))
    source, target = Placement(layout, mesh, (0, 1)), Placement(layout, mesh, (4, 5))
    return cross_mesh_transfer((elements,), 4, source, target, cluster)


def test_tasks_pay_for_what_they_are_brought_and_for_what_they_made() -> None:
    cluster = two_hosts()
    transfers = {number: transfer(2 * elements, cluster) for number, elements in enumerate((1000, 5000, 25000))}
    of = [EXCHANGES.at(4.0 * elements) for elements in (1000, 5000, 25000)]  # a device has half of the elements
    found = exchange_seconds(LISTS, transfers, cluster)
    assert found == {
        FIRST: pytest.approx(of[0] + of[1]),  # what was there before is charged to it as well
        SECOND: pytest.approx(of[2]),
        OTHER: pytest.approx(sum(of)),
    }


def test_a_message_of_several_pieces_costs_those_of_the_busiest_device() -> None:
    cluster, mesh = two_hosts(), Mesh(("data",), (2,))
    one = Placement(Layout((("data",),)), Mesh(("data",), (1,)), (0,))
    both = cross_mesh_transfer((8000,), 4, one, Placement(Layout((("data",),)), mesh, (4, 5)), cluster)
    pieces = EXCHANGES.at(4.0 * 4000)
    found = exchange_seconds(LISTS, dict.fromkeys(range(3), both), cluster)
    assert found[SECOND] == pytest.approx(pieces)  # a piece for each of two devices
    assert found[OTHER] == pytest.approx(pieces + pieces + 2 * pieces)  # two pieces leave one device


@pytest.mark.parametrize(
    "cluster", [two_hosts(None), Cluster.local(), Cluster.local(profile=profile_of(exchanges=EXCHANGES))]
)
def test_what_was_not_measured_and_what_stays_in_a_process_costs_nothing(cluster: Cluster) -> None:
    assert exchange_seconds(LISTS, dict.fromkeys(range(3), transfer(8, two_hosts())), cluster) == {}


def test_a_step_of_a_pipeline_takes_longer_by_its_messages() -> None:
    """Two stages that compute next to nothing: the four ends of a microbatch's two messages come one after the other."""

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            x = batch["x"]
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        loss, gradients = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), {"loss": loss}

    state = [jax.ShapeDtypeStruct((32, 32), np.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((64, 32), np.float32)}

    def seconds(exchanges: Curve | None) -> float:
        options: dict[str, Any] = {"stages": [[0], [4]], "num_microbatches": 2, "schedule": "gpipe"}
        cluster = two_hosts(exchanges).replace(compute_shared_by=1)
        return float(autopar.parallelize(step, cluster=cluster, **options).plan(state, batch).step_seconds)

    each = 0.5
    longer = seconds(Curve(((1.0, each), (1e9, each)))) - seconds(None)
    # The first stage sends 0; the other receives it, receives 1, and sends back two; the first one receives the second of them.
    assert longer == pytest.approx(6 * each, rel=1e-2)


def test_a_process_sends_itself_what_it_measures() -> None:
    ends = SelfExchange(Bench(jax.devices()[:2], Timer(0.0, 3)))
    call = ends._call(1 << 12)
    for landed in call():
        assert landed.devices() == {jax.devices()[1]}
        np.testing.assert_array_equal(landed, np.zeros(1 << 10, np.float32))
    assert ends.seconds(1 << 10) > 0
