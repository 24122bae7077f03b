"""What the user calls: :func:`parallelize`, with all that may be asked of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from jax.sharding import PartitionSpec

from autopar.cluster import Cluster
from autopar.errors import TraceError
from autopar.inter_op.terms import AccumulatorDtype, BatchCoupling, MicrobatchRng
from autopar.methods import Method
from autopar.options import ArgumentNames, Options, read_options
from autopar.parallelized import Parallelized
from autopar.plan import Offload, Remat, Schedule
from autopar.schedule.orders import OrderFunction
from autopar.user_shardings import UserShardings


@overload
def parallelize(function: Callable[..., Any], /, **options: Any) -> Parallelized: ...


@overload
def parallelize(
    *,
    method: str | Method = "auto",
    cluster: Cluster | None = None,
    memory_per_device: float | None = None,
    mesh_shape: tuple[int, ...] | None = None,
    constraints: Mapping[str, PartitionSpec] | None = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    batch_argnums: ArgumentNames = None,
    state_argnums: ArgumentNames = None,
    donate_argnums: str | tuple[int, ...] = "auto",
    solver_seconds: float = 60.0,
    num_microbatches: int | None = None,
    stages: int | Sequence[Sequence[int]] | None = None,
    schedule: str | Schedule | OrderFunction | None = None,
    stages_per_mesh: int | None = None,
    user_shardings: str | UserShardings = "respect",
    batch_coupling: str | BatchCoupling = "refuse",
    rng: str | MicrobatchRng = "exact",
    accumulator_dtype: str | AccumulatorDtype = "float32",
    like: Parallelized | None = None,
    remat: str | Remat | None = None,
    offload: str | Offload | None = None,
) -> Callable[[Callable[..., Any]], Parallelized]: ...


def parallelize(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Run a function of pytrees – a train step – in parallel, by a plan that is found for it.

    Use it bare (``@autopar.parallelize``), with keyword options, or as a call like ``jax.jit``'s with both:

    * ``method``: ``"auto"``, ``"intra_op"``, or a plan that an expert would write: ``"data_parallel"``, ``"zero2"``,
      ``"zero3"``, ``"tensor_parallel"``, ``"expert_parallel"``, or ``"inter_op"``, a pipeline with a stage on every device
      (where the model has fewer layers, on the next lower power of two of them); or an object of :mod:`autopar.methods`.
    * ``cluster``: the hardware; default ``Cluster.local()``.
    * ``memory_per_device``: bytes that one device may hold; default what the cluster says.
    * ``mesh_shape``: sizes of the logical mesh axes (``"data"``, ``"model"``, ``"extra"``); default all are tried.
    * ``constraints``: ``{"**/kernel": P(None, "model")}``, path patterns over the arguments' leaves.
    * ``static_argnums``, ``static_argnames``: as in ``jax.jit``.
    * ``batch_argnums``, ``state_argnums``: arguments (numbers or names) that are batch or state; default inferred.
    * ``donate_argnums``: ``"auto"`` donates the state, ``()`` nothing.
    * ``num_microbatches``: into how many pieces the batch is cut that run one after the other, their gradients summed;
      the numbers stay those of the whole batch. Default: as few as the memory allows and as is fastest.
    * ``stages``: into how many stages of a pipeline the model is cut, or the ids of the devices of each stage (stages with the
      same ids share a mesh).  ``mesh_shape`` and ``constraints`` then speak of the mesh of a stage.
    * ``schedule``: in which order the stages run the microbatches: ``"1f1b"``, ``"gpipe"``, ``"eager_1f1b"``,
      ``"interleaved_1f1b"``, ``"zb_h1"``, ``"zb_h2"``, or a function of the numbers of stages and microbatches that returns an
      :class:`autopar.Order`.
    * ``stages_per_mesh``: how many stages are dealt to each mesh, stage s to mesh s mod (stages / stages_per_mesh); more than
      one asks for ``"interleaved_1f1b"``.

    Of a pipeline, ``method="auto"`` searches what is not fixed. Where devices, a mesh shape, constraints or another method
    are demanded, stages have the same number of devices and about the same work, and run up to four microbatches each
    under ``"1f1b"``, unless fixed too.

    * ``remat``: what every layer of the model computes again in the backward pass instead of keeping it: ``"none"``, ``"dots"``
      (all but matrix products without batch dimensions and convolutions), ``"full"`` (all). Default: nothing, or, where memory
      is what limits the plan and the step says nothing of ``jax.checkpoint``, what is fastest, layer by layer.
    * ``offload``: what lies in the memory of the hosts, copied to the devices and back in each step: ``"none"``,
      ``"optimizer_state"``, the state that only the update reads (moments, averages), on one mesh, or ``"activations"``, what the
      stages of a pipeline keep of microbatches for their backward passes. Default (``"auto"``): nothing, or, where memory
      limits the plan, that state or as many of those as it needs, where no plan fits otherwise or the step is then faster.
    * ``batch_coupling``: where examples of a batch depend on each other through the parameters (batch normalisation, in-batch
      contrast, routing by capacity), ``"refuse"`` cuts no batch, and ``"per_microbatch"`` treats each microbatch as a batch
      of its own: losses, gradients and statistics are then means of the microbatches', which are other numbers.
    * ``rng``: ``"exact"`` gives a microbatch its rows of the whole batch's random numbers; with ``"per_microbatch"`` it draws
      for itself, its number folded into the key of each draw.
    * ``accumulator_dtype``: in what sums over microbatches (gradients above all) are kept where their own type is a narrower
      float: ``"float32"``, or ``"same"``, their own type: half the memory, and each addition rounds.
    * ``user_shardings``: ``"respect"`` keeps shardings that stand in the function (``with_sharding_constraint``), on its
      arguments (``Partitioned`` boxes, NNX metadata) and of state that lies on several devices, on the mesh that they
      name; ``"ignore"`` plans as if there were none.
    * ``like``: another parallelized step, which has a plan: the state, or a part of it, stays where that step's plan puts it,
      on the same mesh or stages, and only the rest is planned. For evaluation and inference beside training.
    * ``solver_seconds``: time limit of one integer program; the best solution found then is used, with its gap.
    """
    if function is None:
        return lambda decorated: parallelize(decorated, **options)
    if isinstance(function, Parallelized):
        return function
    if not callable(function):
        raise TraceError(
            f"parallelize() takes a function, not {function!r}; options go by name: parallelize(method=...)"
        )
    return Parallelized(function, read_options(options, Options()))
