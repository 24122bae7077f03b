"""A cluster on one machine: hosts in network namespaces of their own, with links of a given rate, and Ray on each.

On loopback communication costs next to nothing, and no plan is better than another.  Here it costs what it costs on a real
network, and a link can be cut.  See :mod:`benchmarks.netns.hosts` and :mod:`benchmarks.netns.nodes`; by hand:

    python -m benchmarks.netns --hosts 4 --mbit 200 -- python train.py        (as root)
"""

from benchmarks.netns.hosts import Hosts, Network, why_not
from benchmarks.netns.nodes import RayNodes

__all__ = ["Hosts", "Network", "RayNodes", "why_not"]
