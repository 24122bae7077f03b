"""One plan for all processes that run the same script: process 0 makes it, and tells the others.

A solver with a time limit need not find the same plan twice, and processes that run different programs wait for each other
for ever.  What goes wrong in process 0 is told as well, and raised everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.plan_file import decode_plan, encode_plan

_PLAN, _ERROR = b"P", b"E"


def agreed_plan(make: Callable[[], Plan]) -> Plan:
    """The plan that ``make`` gives in process 0; raises there what it raises, and ``PlanError`` in the others."""
    own: Plan | None = None
    failure: Exception | None = None
    said = b""
    if jax.process_index() == 0:
        try:
            own = make()
            said = _PLAN + encode_plan(own)
        except Exception as error:  # noqa: BLE001 - raised again below, when the others know
            failure = error
            said = _ERROR + str(error).encode()
    told = _told(said)
    if failure is not None:
        raise failure
    if own is not None:
        return own
    if told[:1] == _ERROR:
        raise PlanError(f"process 0 found no plan: {told[1:].decode()}")
    return decode_plan("the plan of process 0", told[1:])


def _told(said: bytes) -> bytes:
    """What process 0 says."""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(said))))
    data = np.zeros(length, np.uint8)
    if said:
        data[:] = np.frombuffer(said, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes())
