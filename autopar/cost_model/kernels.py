"""What one operator costs on one device under a strategy: its share of the FLOPs, the bytes it moves, the seconds.

An axis that cuts a factor divides the work by its size; an axis that cuts nothing saves nothing.  The bytes are those
of the local shards that the fusion model says are really read or written, and in each kernel never more than the
operator's own share of what it touches (slices, gathers and scatters touch less than the arrays they are given); a product
reads all of both pieces, however few of its factors are cut in either.
A product is priced by how often it uses its elements, and by the order in which it reads its operands.
A reduction is priced by how the elements of one result lie in the device's piece: in long rows, in short ones, or apart.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from autopar.cluster import Cluster, Mesh, Platform
from autopar.convolution_shapes import ConvolutionShape
from autopar.cost_model.product_orders import product_order
from autopar.cost_model.roofline import (
    Reduction,
    convolution_seconds,
    operator_seconds,
    product_seconds,
    reduction_seconds,
    row_of,
)
from autopar.graph.fusion import PRODUCTS
from autopar.graph.ir import Operator, Phase, Value
from autopar.plan import Strategy
from autopar.products import Product
from autopar.schedule.reshard import local_shape

REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min"))


@dataclass(frozen=True)
class Kernel:
    """An operator with its arrays; ``reads`` and ``writes`` are the operand and result positions that touch memory.

    A position stands in ``reads`` as often as there are kernels that repeat the operator and read there.
    """

    operator: Operator
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class KernelCost:
    """One run on one device."""

    flops: float
    bytes_moved: float
    seconds: float


def kernel_cost(kernel: Kernel, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> KernelCost:
    """The cost of one run of a kernel on one device, by roofline."""
    operator = kernel.operator
    pieces = mesh.axis_size(*(axis for axes in strategy.factors for axis in axes))
    traffic = 0.0
    for position in kernel.reads:
        value = kernel.operands[position]
        assert value is not None
        layout = strategy.operand(operator.rule, position, mesh)
        traffic += value.itemsize_bytes * math.prod(local_shape(value.shape, layout, mesh))
    for position in kernel.writes:
        value = kernel.results[position]
        layout = strategy.result(operator.rule, position, mesh)
        traffic += value.itemsize_bytes * math.prod(local_shape(value.shape, layout, mesh))
    if operator.primitive not in PRODUCTS:
        repeats = max(Counter(kernel.reads).values(), default=1)
        traffic = min(traffic, repeats * operator.bytes_moved / pieces)
    flops = operator.flops / pieces
    dtype = kernel.results[0].dtype if kernel.results else "float32"
    if operator.primitive == "conv_general_dilated":
        shape = _convolution_shape(kernel, strategy, mesh)
        return KernelCost(flops, traffic, convolution_seconds(flops, traffic, dtype, shape, cluster))
    streamed = operator.phase is Phase.UPDATE
    if operator.primitive == "dot_general" and cluster.profile is not None:  # nothing else knows of orders or rows
        product = _product(kernel, flops, strategy, mesh, on_cpu=cluster.device.platform is Platform.CPU)
        return KernelCost(flops, traffic, product_seconds(product, traffic, dtype, cluster, streamed=streamed))
    if operator.primitive in REDUCTIONS and cluster.profile is not None:
        reduction = Reduction(operator.primitive, _row(kernel, strategy, mesh))
        seconds = reduction_seconds(flops, traffic, dtype, reduction, cluster, streamed=streamed)
        return KernelCost(flops, traffic, seconds)
    seconds = operator_seconds(flops, traffic, dtype, cluster, operator.primitive, streamed=streamed)
    return KernelCost(flops, traffic, seconds)


def _row(kernel: Kernel, strategy: Strategy, mesh: Mesh) -> int | None:
    """How many elements of one result lie one after the other in the piece of the operand that one device has."""
    operator, operand = kernel.operator, kernel.operands[0]
    assert operand is not None
    shape = local_shape(operand.shape, strategy.operand(operator.rule, 0, mesh), mesh)
    return row_of(shape, range(len(shape)), operator.equation.params["axes"])


def _product(kernel: Kernel, flops: float, strategy: Strategy, mesh: Mesh, *, on_cpu: bool) -> Product:
    """Of the pieces that one device multiplies."""
    operator = kernel.operator
    left, right = (
        local_shape(value.shape, strategy.operand(operator.rule, position, mesh), mesh)
        for position, value in enumerate(kernel.operands[:2])
        if value is not None
    )
    (result,) = kernel.results
    made = local_shape(result.shape, strategy.result(operator.rule, 0, mesh), mesh)
    order = product_order((left, right), operator.equation.params["dimension_numbers"], on_cpu=on_cpu)
    return Product(flops, math.prod(left), math.prod(right), math.prod(made), order)


def _convolution_shape(kernel: Kernel, strategy: Strategy, mesh: Mesh) -> ConvolutionShape:
    """Of the piece that one device runs: cut features may be few.  Positions are never cut here."""
    operator = kernel.operator
    parameters = operator.equation.params
    numbers = parameters["dimension_numbers"]
    image, window = kernel.operands
    assert image is not None and window is not None
    (result,) = kernel.results
    image_shape = local_shape(image.shape, strategy.operand(operator.rule, 0, mesh), mesh)
    result_shape = local_shape(result.shape, strategy.result(operator.rule, 0, mesh), mesh)
    return ConvolutionShape(
        window_positions=math.prod(window.shape[dim] for dim in numbers.rhs_spec[2:]),
        image_positions=math.prod(image.shape[dim] for dim in numbers.lhs_spec[2:]),
        result_positions=math.prod(result.shape[dim] for dim in numbers.out_spec[2:]),
        image_features=image_shape[numbers.lhs_spec[1]],
        result_features=result_shape[numbers.out_spec[1]],
        is_dilated=math.prod(parameters["lhs_dilation"] or ()) > 1,
    )
