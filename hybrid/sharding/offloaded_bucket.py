"""A bucket whose state is in host memory: `master`, `settled` and, unless replicas are summed first, `raw`.

Under "parameters" its `cut` is there too, and comes to the device with each gather. Beside the buffers of `Bucket`:

    mirror       copy of the own parameters that the host updates, of B/N elements, where they have neither a master nor
                 a place on the host.
    arrived      on the device, while the whole buffer is: the own range as it came from the host, B/N. What differs
                 from it was edited.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hybrid.sharding.bucket import Bucket
from hybrid.sharding.offload import HostStore, Ticket
from hybrid.sharding.tensors import same_bits

__all__ = ["OffloadedBucket"]


class OffloadedBucket(Bucket):
    """See the module's docstring, and `Bucket` for the other arguments.

    Args:
        host: where the state goes.
    """

    def __init__(self, *, host: HostStore, **options: Any) -> None:
        self.host = host
        self.sums_late = False
        """Whether gradients are summed over replicas before the step: until then they stay on the device."""
        self.mirror: torch.Tensor | None = None
        self.arrived: torch.Tensor | None = None
        self._coming: Ticket | None = None
        super().__init__(**options)
        trainable = any(parameter.requires_grad for parameter in self.parameters)
        if trainable and self.master is None and not self.is_cut_on_host:
            self.mirror = host.zeros(self.high - self.low, self.key.dtype)

    @property
    def is_cut_on_host(self) -> bool:
        return self.cut is not None and self.host.holds_parameters

    def _new_cut(self, num_elements: int, device: torch.device) -> torch.Tensor:
        if self.host.holds_parameters:
            return self.host.zeros(num_elements, self.key.dtype)
        return super()._new_cut(num_elements, device)

    def _new_master(self, num_elements: int, device: torch.device) -> torch.Tensor:
        return self.host.zeros(num_elements, torch.float32)

    # -- parameters ------------------------------------------------------------------------------------

    def stepped(self) -> torch.Tensor:
        return self.own_data() if self.mirror is None else self.mirror

    def allocate_data(self) -> None:
        if not self.is_cut_on_host:
            super().allocate_data()
            return
        assert self.cut is not None
        self.data.untyped_storage().resize_(self._data_bytes)
        self._coming = self.host.fill(self.data[self.low : self.high], self.cut, "parameters")

    def after_allocation(self) -> AbstractContextManager[object]:
        return nullcontext() if self._coming is None else self.host.after_copies()

    def arrive(self) -> None:
        if self._coming is not None:
            self._coming.order()
            self._coming = None
            self.arrived = self.data[self.low : self.high].clone()

    def free_data(self) -> None:
        self.arrived = None
        super().free_data()

    def take_own_from_data(self) -> None:
        own = self.data[self.low : self.high]
        if self.arrived is not None:
            assert self.cut is not None
            if same_bits(own, self.arrived):
                return
            self.host.to_host(self.cut, own, "parameters")
            self.arrived.copy_(own)
            own = self.cut
        elif self.cut is not None:
            self.cut.copy_(own)
        if self.master is not None:
            self._take_into_master(own if self.is_cut_on_host else self.host.fetch(own, "parameters"))

    def take_edits_from_data(self) -> None:
        if self.arrived is not None:
            self.take_own_from_data()
        else:
            super().take_edits_from_data()

    def store(self, position: int, value: torch.Tensor) -> None:
        super().store(position, value)
        if self.arrived is not None:
            self.arrived.copy_(self.data[self.low : self.high])

    def _copy_own(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if self.is_on_host(target):
            self.host.to_host(target, value, "parameters")
        else:
            super()._copy_own(target, value)

    def is_on_host(self, buffer: torch.Tensor) -> bool:
        """Whether a view of own shard or master is in host memory."""
        homes = (self.master, self.mirror, self.cut if self.is_cut_on_host else None)
        place = buffer.untyped_storage().data_ptr()
        return any(home is not None and home.untyped_storage().data_ptr() == place for home in homes)

    def write_back_master(self) -> None:
        if self.is_cut_on_host:
            super().write_back_master()
        elif self.master is not None:
            self.host.to_device(self.own_parameters(), self.master, "parameters")

    def fetch_mirror(self) -> None:
        """Before an update on the host: the own parameters as they are now."""
        if self.mirror is not None:
            self.host.to_host(self.mirror, self.own_parameters(), "parameters")

    def write_back_mirror(self) -> None:
        """After it: the updated ones go back."""
        if self.mirror is not None:
            self.host.to_device(self.own_parameters(), self.mirror, "parameters")

    # -- gradients -------------------------------------------------------------------------------------

    def _new_whole(self) -> torch.Tensor:
        # What is on its way to the host is given up when it has arrived there, by whoever brings it.
        return torch.empty(self.partition.num_elements, dtype=self.key.grad_dtype, device=self.data.device)

    def new_accumulator(self, dtype: torch.dtype) -> torch.Tensor | None:
        return super().new_accumulator(dtype) if self.sums_late else None

    def add_reduced(self, buffer: torch.Tensor) -> None:
        if self.sums_late:
            super().add_reduced(buffer)
        else:
            self.host.start(buffer[self.low : self.high], "gradients", held=buffer, take=self._take_arrived)

    def _take_arrived(self, own: torch.Tensor) -> None:
        """What has come to the host is added there."""
        if self.raw is None:
            self.raw = own.to(self.key.grad_dtype)
        else:
            self.raw.add_(own)

    def settle(self, scale: float) -> None:
        self.host.finish()
        if self.raw is not None and self.sums_late:
            here = self.raw
            self.raw = self.host.fetch(here, "gradients")
            self.give_up(here)
        super().settle(scale)

    def fill_zero(self, position: int) -> None:
        self.host.finish()
        super().fill_zero(position)

    def drop_all(self) -> None:
        self.host.finish()
        super().drop_all()

    # -- facts -----------------------------------------------------------------------------------------

    def parameter_bytes(self) -> int:
        extra = (tensor for tensor in (self.mirror, self.arrived) if tensor is not None)
        return super().parameter_bytes() + sum(tensor.untyped_storage().nbytes() for tensor in extra)

    def gradient_bytes(self) -> int:
        self.host.finish()
        return super().gradient_bytes()

    def host_bytes(self) -> tuple[int, int]:
        self.host.finish()
        of_parameters = (self.master, self.mirror, self.cut if self.is_cut_on_host else None)
        of_gradients = (None if self.sums_late else self.raw, self.settled)
        parameters, gradients = (
            sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)
            for tensors in (of_parameters, of_gradients)
        )
        return parameters, gradients
