"""Random numbers between a column-parallel layer and the row-parallel one that closes it.

Outside, all tp ranks of a data rank hold the same activations and the same random state, so dropout masks are the
same. In between each rank holds other columns (or, under sequence parallel, another part of the sequence) and must
draw other masks. There the device's default generator is switched to a stream of the rank's own, seeded from one
draw of the common stream: recompute restores the common stream, so it draws the same seed and the same masks again.

That a stream is a region's own can be read off its seed. Recompute may stop in the middle of a region and restore
the generator behind our back, or start inside one; so the generator is asked, not a flag that could be out of date.
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid.collectives.group import Group

__all__ = ["CutRegion"]

# The upper half of every region's seed. (The generator of the CPU uses the lower half only.)
_MARK = 0x5EED7E45
_LOWER = 0xFFFFFFFF


class CutRegion:
    """Switches the default generators of this process between the common stream and the rank's own.

    Args:
        group: the tp ranks.
        active: False where the model draws no random numbers: nothing is switched, nothing is drawn.
    """

    def __init__(self, group: Group, *, active: bool = True) -> None:
        self.group = group
        self.active = active
        self.left_out_of_programs = False
        """Whether compiled programs switch nothing, as they draw nothing: else each switch would end a graph."""
        self._watched: tuple[int, bytes] | None = None  # where the stream stood when the region had last to do with it
        self._drew = False
        self._common: dict[torch.device, torch.Tensor] = {}  # state of the common stream where we left it

    def enter(self, device: torch.device) -> None:
        """What follows is drawn for this rank alone. Does nothing inside a region."""
        if self.active and self.group.size > 1 and not (self.left_out_of_programs and torch.compiler.is_compiling()):
            self._enter(device)

    def leave(self) -> None:
        """Back to the common stream. Does nothing outside a region."""
        if self.active and self.group.size > 1 and not (self.left_out_of_programs and torch.compiler.is_compiling()):
            self._leave()

    def start_watch(self, device: torch.device) -> None:
        """From here on, note whether anybody but the region itself draws."""
        self._watched = _position(device)

    def end_watch(self, device: torch.device) -> bool:
        """Whether anybody did."""
        self._note(device)
        drew, self._drew, self._watched = self._drew, False, None
        return drew

    def _note(self, device: torch.device) -> None:
        if self._watched is not None:
            self._drew = self._drew or self._watched != _position(device)

    def _go_on(self, device: torch.device) -> None:
        if self._watched is not None:
            self._watched = _position(device)

    # A compiled graph ends where the generators are switched: that is done between two graphs.

    @torch.compiler.disable
    def _enter(self, device: torch.device) -> None:
        generator = _generator(device)
        if generator is None or _is_marked(generator):
            return
        self._note(device)
        lower = _draw(generator, device)
        self._common[device] = generator.get_state()
        generator.manual_seed(_MARK << 32 | (lower + self.group.rank) & _LOWER)
        self._go_on(device)

    @torch.compiler.disable
    def _leave(self) -> None:
        for device, state in self._common.items():
            generator = _generator(device)
            # One that is not marked was restored by somebody else: the state kept here is an old one.
            if generator is not None and _is_marked(generator):
                self._note(device)
                generator.set_state(state)
                self._go_on(device)
        self._common.clear()

    def reset(self) -> None:
        """Leave whatever a call that failed, or a model without a closing layer, left open."""
        self.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> CutRegion:
        return self  # the generators are the process's


def _generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


def _position(device: torch.device) -> tuple[int, bytes]:
    """Where the stream stands: another place after every draw. It waits for no device."""
    generator = _generator(device)
    if generator is None:
        return 0, b""
    if device.type == "cuda":
        return generator.get_offset(), b""
    return generator.initial_seed(), generator.get_state().numpy().tobytes()


def _is_marked(generator: torch.Generator) -> bool:
    return generator.initial_seed() >> 32 == _MARK


def _draw(generator: torch.Generator, device: torch.device) -> int:
    """32 random bits of the stream, which moves on."""
    if device.type == "cpu":
        return int(torch.randint(0, _LOWER + 1, ()).item())
    # On CUDA the stream is a counter, known to the host: mixed here, it costs no wait for the device.
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    mixed = (generator.initial_seed() * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9 + 1) % 2**64
    mixed ^= mixed >> 31
    return (mixed * 0x94D049BB133111EB % 2**64) >> 32
