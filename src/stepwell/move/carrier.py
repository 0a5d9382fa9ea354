"""The bytes of a mover: from device memory into frames of the host tier, and back.

Owns: what one rank has, and what is proved before a byte is handed out. Must not know: queues, threads, deadlines.
Neighbours: `mover` says when; `place` and `tiers.host` have the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.core.plan import KEY_BYTES, Outcome, Plan, Verb
from stepwell.move.fence import Fence
from stepwell.move.job import Piece
from stepwell.move.place import Place
from stepwell.tiers.host import HostTier
from stepwell.tiers.tier import Row

_SAMPLE = 16
"""With `verify = sample`, one frame in so many of those that are read is compared, whichever that is."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank has.

    Attributes:
        host: its tier.
        places: device memory, as plans number it.
        parts: digest of the part of each group, as plans number groups.
        number: of the rank.

    Raises:
        InputError: a place with other frames than the tier's, or a part that is no digest.
    """

    host: HostTier
    places: tuple[Place, ...]
    parts: tuple[bytes, ...]
    number: int = 0

    def __post_init__(self) -> None:
        size = self.host.size
        for place in self.places:
            if (place.frame_bytes, tuple(place.bounds)) != (size.frame_bytes, size.bounds):
                raise InputError(
                    f"a place has frames of {place.frame_bytes} bytes and layers at {place.bounds}",
                    limit=f"{size.frame_bytes} bytes, layers at {size.bounds}",
                )
        if any(len(part) != KEY_BYTES for part in self.parts):
            raise InputError(
                f"parts of {[len(part) for part in self.parts]} bytes", limit=f"{KEY_BYTES} each"
            )

    def refusal(self, plan: Plan) -> str:
        """Why a plan cannot be followed, or nothing: it may come from another process."""
        n, moves, device = len(plan), plan.verb is not Verb.WIPE, 0
        if moves and 0 <= plan.place < len(self.places):
            device = self.places[plan.place].frames
        keys = (len(plan.keys), len(plan.which))
        for wrong, what in (
            (len(plan.outside) != n * moves, f"has {len(plan.outside)} device frames for {n}"),
            (keys != (n * KEY_BYTES, n), f"has keys of {keys[0]} bytes for {n} frames"),
            (_beyond(plan.inside, self.host.frames), f"names frames beyond {self.host.frames}"),
            (_beyond(plan.outside, device), f"names device frames beyond {device}"),
            (_beyond(plan.which >> 16, len(self.parts)), f"names a group beyond {len(self.parts)}"),
        ):
            if wrong:
                return f"plan {plan.number} {what}"
        return ""


def _beyond(numbers: npt.NDArray[Any], count: int) -> bool:
    """Whether some of these do not count one of so many."""
    return bool(len(numbers)) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count


class Carrier:
    """Copies pieces, and proves what it reads.

    Args:
        rank: what it moves between.
        verify: which loads compare sums: `always`, `sample`, `never`.
    """

    def __init__(self, rank: Rank, verify: str) -> None:
        self._rank = rank
        self._verify = verify
        self._proofs = itertools.count()

    def prepare(self, piece: Piece, index: int, frame: int) -> Row | None:
        """Makes one frame ready, or notes why it cannot be moved.

        Args:
            piece: that is about to be copied.
            index: of the frame in it.
            frame: of the host tier.

        Returns:
            The row that is to be copied; None if there is nothing to copy.
        """
        host, verb = self._rank.host, piece.job.plan.verb
        if verb is Verb.WIPE:
            host.wipe(frame)
            return None
        if verb is Verb.SAVE:
            host.forget(frame)
        else:
            outcome = self._proved(frame, piece.name(index))
            piece.outcomes[index] = outcome
            if outcome is not Outcome.OK:
                return None
        return host.row(frame)

    def _proved(self, frame: int, name: bytes) -> Outcome:
        """Whether a frame is what a plan believes, as thoroughly as was asked."""
        host = self._rank.host
        outcome = host.proves(frame, name)
        if outcome is not Outcome.OK or self._verify == "never":
            return outcome
        if self._verify == "sample" and next(self._proofs) % _SAMPLE:
            return outcome
        layers = len(host.size.bounds) - 1
        whole = all(host.holds(frame, layer) for layer in range(layers))
        return Outcome.OK if whole else Outcome.CORRUPT

    def copy(self, piece: Piece, rows: Sequence[Row]) -> Fence:
        """Begins to move the bytes of a piece.

        Args:
            piece: all its frames were prepared.
            rows: what that gave, of those that are OK.

        Returns:
            The end of the copy.
        """
        plan = piece.job.plan
        place = self._rank.places[plan.place]
        outside = piece.outside[piece.outcomes == Outcome.OK]
        if plan.verb is Verb.SAVE:
            return place.copy_out(outside, rows)
        return place.copy_in(rows, outside)

    def seal(self, piece: Piece, index: int, frame: int) -> None:
        """Sums up one frame that a save has copied; arguments as `prepare`."""
        if piece.outcomes[index] == Outcome.OK:
            self._rank.host.seal(frame, piece.name(index))

    def withdraw(self, piece: Piece) -> None:
        """What was saved too late, or not at all, has no name."""
        if piece.job.plan.verb is Verb.SAVE:
            for frame in piece.inside.tolist():
                self._rank.host.forget(frame)
