"""A plan as a file: what is written, and what may be read back.

    load(save(plan)) = plan     exactly: floats are written by their shortest text that reads back to the same bits

The file is JSON, ``{"format": "autopar.plan", "version": 10, "plan": {…}}`` with the fields of ``Plan``
(:mod:`autopar.plan_records`).  A file comes from anywhere and is believed in nothing: the types are checked field by field,
unknown fields are refused, and all must have sense beside the rest (:mod:`autopar.plan_reader`).  Nothing in it is ever
executed or unpickled.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from autopar.errors import PlanError
from autopar.files import Header, write_atomically
from autopar.plan import Plan
from autopar.plan_reader import ADVICE, believed
from autopar.plan_records import FILE_FORMAT, FILE_VERSION, OLDEST_VERSION, File, written

_CLUSTER_FORMAT = "autopar-cluster"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan as versioned JSON; who reads the path meanwhile sees the old file or the new one, never a part.

    Raises ``PlanError`` if the file cannot be written, or if :func:`load_plan` would refuse it (a figure that is not
    finite, an axis that the mesh does not have); then an existing file stays as it was.
    """
    try:
        data = encode_plan(plan)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{path}: this plan cannot be written as JSON ({error}); nothing was written") from error
    try:
        readable = decode_plan(path, data) == plan
    except PlanError as error:
        raise PlanError(f"this plan is not sound and was not written: {error}") from error
    if not readable:
        raise PlanError(f"{path}: this plan does not survive being written (a field of an unknown kind?); not written")
    try:
        write_atomically(path, data)
    except OSError as error:
        raise PlanError(f"cannot write plan file {path}: {error.strerror or error}; check the path") from error


def encode_plan(plan: Plan) -> bytes:
    """The text of the file, one line for each field of the plan."""
    encode, stored = msgspec.json.encode, written(plan)
    lines = b",\n".join(encode(name) + b": " + encode(value) for name, value in msgspec.structs.asdict(stored).items())
    return b'{"format": %s, "version": %d, "plan": {\n%s\n}}\n' % (encode(FILE_FORMAT), FILE_VERSION, lines)


def load_plan(path: str | Path) -> Plan:
    """The plan in a file that :func:`save_plan` wrote.

    Raises ``PlanError`` naming the file, the field and what to do for anything missing, unknown, ill-typed, out of
    range, or without sense on the plan's mesh.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read plan file {path}: {error.strerror or error}; check the path") from error
    return decode_plan(path, data)


def decode_plan(path: str | Path, data: bytes) -> Plan:
    """The plan of such a text; ``path`` is what errors call it.  Raises ``PlanError`` as :func:`load_plan` does."""
    try:
        _check_header(path, msgspec.json.decode(data, type=Header))
        stored = msgspec.json.decode(data, type=File).plan
    except msgspec.ValidationError as error:
        raise PlanError(f"{path}: {error}; {ADVICE}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(
            f"{path} is not complete JSON ({error}), so it is no plan file, or one that was cut short; give a file "
            "that Plan.save wrote, or plan again and save anew"
        ) from error
    return believed(path, stored)


def _check_header(path: str | Path, header: Header) -> None:
    if header.format == _CLUSTER_FORMAT:
        raise PlanError(f"{path} describes a cluster, not a plan; read it with Cluster.from_file, and give a plan here")
    if header.format != FILE_FORMAT:
        raise PlanError(
            f"{path}: $.format is {header.format!r}, not {FILE_FORMAT!r}; this is not a plan file, give one that "
            "Plan.save wrote"
        )
    if header.version > FILE_VERSION:
        raise PlanError(
            f"{path}: $.version is {header.version}, written by a newer release, and this one reads {FILE_VERSION}; "
            "upgrade autopar, or plan again with this release"
        )
    if 0 < header.version < OLDEST_VERSION:
        raise PlanError(
            f"{path}: $.version is {header.version}, written by an older release, and this one reads {FILE_VERSION}; plan "
            "again with this release and save anew"
        )
    if not OLDEST_VERSION <= header.version <= FILE_VERSION:
        raise PlanError(
            f"{path}: $.version is {header.version}, and there is no such version (this release reads {FILE_VERSION}); "
            f"{ADVICE}"
        )
