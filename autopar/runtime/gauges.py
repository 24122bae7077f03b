"""What Ray's dashboard, and Prometheus behind it, show of the processes of a run."""

from __future__ import annotations

from autopar.runtime.messages import HostStatus


class Gauges:
    """Owns the gauges of one process."""

    def __init__(self, host: str) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {}
        for name, description in (
            ("step_seconds", "Seconds of the last finished step, from its call or the end of the step before it."),
            ("array_bytes", "Bytes of arrays on the devices of the process."),
            ("resident_bytes", "Bytes of the process in the memory of its host."),
        ):
            gauge = Gauge(f"autopar_{name}", description=description, tag_keys=("host",))
            gauge.set_default_tags({"host": host})
            self._gauges[name] = gauge

    def set(self, status: HostStatus) -> None:
        """Show how the process is now."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(status, name))
