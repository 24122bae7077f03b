"""How long does a call wait for memory that is new to it?

What returns is written into the memory of donated arguments as far as these reach; the rest, and the scratch block, are new:

    seconds = (1 − alias / outputs) · Σ over results  f_out(bytes)  +  f_scratch(scratch bytes)

with both curves as measured (:class:`autopar.profile.Fresh`); nothing where no profile says.  Which results share memory is not
asked: each is taken to be new in the same part.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cluster import Cluster


def new_memory_seconds(output_bytes: Iterable[int], alias_bytes: int, temp_bytes: int, cluster: Cluster) -> float:
    """Seconds of a call that returns arrays of ``output_bytes`` each, ``alias_bytes`` of them in the memory of arguments, and
    needs ``temp_bytes`` of scratch memory; all on one device.
    """
    if cluster.profile is None or (fresh := cluster.profile.fresh) is None:
        return 0.0
    sizes = [*output_bytes]
    new_share = 1.0 - alias_bytes / sum(sizes) if sum(sizes) else 0.0
    return fresh.seconds(sizes, 0.0) * new_share + fresh.seconds((), temp_bytes)
