"""What is asked of the machine, and the record of what it gave.

Plain records. Neighbours: `region` fulfils an `Ask` and keeps the `RegionRecord`; `stepwell doctor` prints it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from stepwell.base.errors import InputError, RefusedError
from stepwell.memory.system import HUGE_BYTES, PAGE_BYTES

PIECE_BYTES = 256 << 20
"""Registering stops the device for as long as it takes, so not all at once; no frame lies in two pieces."""

MAX_BYTES = 2**46
"""64 TiB: more is a mistake, and larger numbers overflow somewhere on their way into the kernel."""


class Kind(StrEnum):
    """Where the bytes of a region live.

    Attributes:
        PRIVATE: in this process only.
        SHARED: in memory without a name that other processes map by its descriptor.
        NAMED: in `/dev/shm`, for processes that know the name.
        FILE: in an unnamed file of a folder, for direct storage.
        DEVICE: on a GPU.
    """

    PRIVATE = "private"
    SHARED = "shared"
    NAMED = "named"
    FILE = "file"
    DEVICE = "device"


class Trait(StrEnum):
    """What a region may be asked to have beside its bytes.

    Attributes:
        PINNED: it never leaves physical memory; registered with the GPU runtime where there is one.
        HUGE: it consists of 2 MiB pages.
        NODE: it lies on one memory node.
    """

    PINNED = "pinned"
    HUGE = "huge"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that the machine did not give.

    Attributes:
        what: a `Trait`, or `"region"` if there is no region at all.
        reason: what was needed and what there is, with numbers.
        remedy: what would help.
    """

    what: str
    reason: str
    remedy: str

    def error(self) -> RefusedError:
        """The same as an exception."""
        return RefusedError(f"{self.what} refused: {self.reason}", remedy=self.remedy)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a region should be.

    Attributes:
        size_bytes: rounded up to whole memory pages.
        kind: where the bytes live.
        pinned: see `Trait.PINNED`.
        huge: see `Trait.HUGE`; for PRIVATE and SHARED.
        node: memory node; None leaves the choice to the kernel. See `nearest_node` for a GPU's.
        name: of a NAMED region: letters, digits, `.`, `_` and `-`.
        folder: of a FILE region.
        piece_bytes: what is prepared and registered at once, whole memory pages; no frame lies in two pieces.
        may_lack: traits without which the region is still wanted; what is missing is in its record.
    """

    size_bytes: int
    kind: Kind = Kind.PRIVATE
    pinned: bool = False
    huge: bool = False
    node: int | None = None
    name: str = ""
    folder: str = ""
    may_lack: frozenset[Trait] = frozenset()
    piece_bytes: int = PIECE_BYTES

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if type(self.size_bytes) is not int or not 1 <= self.size_bytes <= MAX_BYTES:
            raise InputError(f"a region of {self.size_bytes!r} bytes", limit=f"1 to {MAX_BYTES}")
        if type(self.pinned) is not bool or type(self.huge) is not bool:
            raise InputError(
                f"pinned is {self.pinned!r}, huge is {self.huge!r}", limit="True or False"
            )
        if not isinstance(self.kind, Kind):
            raise InputError(f"the kind is {self.kind!r}", limit="a member of Kind")
        if self.node is not None and (type(self.node) is not int or not 0 <= self.node < 1024):
            raise InputError(f"the memory node is {self.node!r}", limit="0 to 1023, or None")
        page_bytes = HUGE_BYTES if self.huge else PAGE_BYTES
        if (
            type(self.piece_bytes) is not int
            or self.piece_bytes < 1
            or self.piece_bytes % page_bytes
        ):
            raise InputError(
                f"piece_bytes is {self.piece_bytes!r}", limit=f"multiples of {page_bytes}"
            )
        self._require_names()
        for trait, kinds in _POSSIBLE.items():
            if self.wants(trait) and self.kind not in kinds:
                raise InputError(
                    f"a {self.kind} region that is {trait}", limit=f"{trait}: {', '.join(kinds)}"
                )
        if not isinstance(self.may_lack, frozenset | set) or not all(
            isinstance(trait, Trait) for trait in self.may_lack
        ):
            raise InputError(f"may_lack is {self.may_lack!r}", limit="a set of Trait")

    def _require_names(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.folder, str):
            raise InputError(f"name {self.name!r}, folder {self.folder!r}", limit="text")
        if "\0" in self.folder:
            raise InputError(f"the folder {self.folder!r}", limit="no NUL")
        if bool(self.name) != (self.kind is Kind.NAMED):
            raise InputError(f"a {self.kind} region with the name {self.name!r}", limit=_NAMED)
        letters = self.name.replace("-", "").replace("_", "").replace(".", "")
        if self.name and (not letters.isalnum() or not self.name.isascii() or len(self.name) > 200):
            raise InputError(f"the name {self.name!r}", limit="up to 200 of a-z A-Z 0-9 . _ -")
        if bool(self.folder) != (self.kind is Kind.FILE):
            raise InputError(f"a {self.kind} region in the folder {self.folder!r}", limit=_FOLDER)

    def wants(self, trait: Trait) -> bool:
        """Whether the trait is asked for."""
        return {
            Trait.PINNED: self.pinned,
            Trait.HUGE: self.huge,
            Trait.NODE: self.node is not None,
        }[trait]


_NAMED = "a name for NAMED regions, and for no others"
_FOLDER = "a folder for FILE regions, and for no others"
_HOST = (Kind.PRIVATE, Kind.SHARED, Kind.NAMED)
_POSSIBLE = {Trait.PINNED: _HOST, Trait.HUGE: (Kind.PRIVATE, Kind.SHARED), Trait.NODE: _HOST}


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """What was asked and what was got.

    Attributes:
        ask: what was asked.
        size_bytes: after rounding.
        page_bytes: of one memory page of it.
        ready_bytes: touched, and registered where asked: from the first byte on.
        locked: it cannot be paged out, because the kernel locked it or has no way to.
        registered_bytes: known to the GPU runtime as pinned.
        node: where its first page lies; None before it was touched, or unknown.
        refusals: what was asked and not got.
    """

    ask: Ask
    size_bytes: int
    page_bytes: int
    ready_bytes: int = 0
    locked: bool = False
    registered_bytes: int = 0
    node: int | None = None
    refusals: tuple[Refusal, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether all of it stays where it is, as far as the machine can tell."""
        refused = any(refusal.what == Trait.PINNED for refusal in self.refusals)
        return not refused and (self.locked or self.registered_bytes == self.size_bytes)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        record = asdict(self) | {"pinned": self.pinned}
        record["ask"]["may_lack"] = sorted(self.ask.may_lack)
        return record
