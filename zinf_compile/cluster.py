"""The machine that a plan is made for: rates of its device and of its disk, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .errors import ClusterError


@dataclass(frozen=True)
class Cluster:
    """Rates in bytes/s (flops: FLOP/s), latency in seconds.

    device_bandwidth: memory traffic of the device.   flops: dense float32 arithmetic.
    nvme_read, nvme_write: one direction alone.       nvme_mixed: the sum of both while both run.
    nvme_latency: from the start of a transfer to its first byte.
    update_rate: bytes of parameters, gradients and optimizer states that the update passes over, all of them in RAM.
    """

    name: str
    device_bandwidth: float
    flops: float
    nvme_read: float
    nvme_write: float
    nvme_mixed: float
    nvme_latency: float
    update_rate: float

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "name":
                continue
            least_is_zero = f.name == "nvme_latency"
            if not math.isfinite(value) or value < 0 or (value == 0 and not least_is_zero):
                unit = "seconds, zero or more" if least_is_zero else "a rate above zero"
                raise ClusterError(f"cluster {self.name!r}: {f.name}={value!r} must be {unit}.")

    @staticmethod
    def this_machine(
        *,
        device_bandwidth: float = 10e9,
        flops: float = 50e9,
        nvme_read: float = 1.0e9,
        nvme_write: float = 1.5e9,
        nvme_mixed: float = 1.5e9,
        nvme_latency: float = 100e-6,
        update_rate: float = 5e9,
    ) -> Cluster:
        """This CPU-only machine, where "device" is RAM.

        The defaults are those of a small virtual machine with a cloud disk; pass measured values where there are any.
        """
        return Cluster(
            "this machine", device_bandwidth, flops, nvme_read, nvme_write, nvme_mixed, nvme_latency, update_rate
        )
