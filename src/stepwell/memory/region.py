"""A span of memory of one kind: opened as asked, prepared piece by piece, closed when nobody uses it.

Neighbours: `mapping` makes the memory, `prepare` touches it, `gpu` registers it, `arena` cuts it into frames.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from stepwell.base.errors import InputError, MisuseError
from stepwell.core.lease import caller
from stepwell.memory import mapping as mappings
from stepwell.memory import named, registry, system
from stepwell.memory.ask import PIECE_BYTES, Ask, Kind, Refusal, RegionRecord, Trait
from stepwell.memory.closing import Closing
from stepwell.memory.gpu import Gpu
from stepwell.memory.machine import Machine, read_machine
from stepwell.memory.mapping import Mapping
from stepwell.memory.prepare import STRIDE_BYTES, no_memory, pieces, touch
from stepwell.memory.users import Use
from stepwell.memory.view import View, ViewBooks


class Region(Closing):
    """A span of memory of one kind.

    What an entry is: the whole mapping, from `open` to `close`. Whoever uses it (an arena, a view) is named, and
    `close` refuses until all have ended. Calls from several threads are ordered by one lock; touching and
    registering happen outside of it. A region that is lost is closed and reported by the next `open`; a forked
    child has none of its bytes. If a piece cannot be prepared, those before it stay as they are.

    Make one with `open`, `attach` or `attach_named`.
    """

    def __init__(self, mapping: Mapping, record: RegionRecord, gpu: Gpu | None) -> None:
        self._mapping = mapping
        self._record = record
        self._gpu = mapping.gpu = gpu
        self._users = mapping.users
        self._call = mapping.lock
        self._preparing = threading.Lock()
        self._preparer: int | None = None
        self._forks = registry.forks()
        weakref.finalize(self, registry.lose, mapping).atexit = False

    @classmethod
    def open(cls, ask: Ask, *, gpu: Gpu | None = None, machine: Machine | None = None) -> Self:
        """Maps a region; cheap, since nothing is touched before `prepare`.

        Args:
            ask: what it should be.
            gpu: registers it if it is to be pinned, and holds DEVICE regions; see `find_gpu`.
            machine: what there is; read now by default.

        Raises:
            RefusedError: the machine does not give it, or not with a trait that it must not lack.
        """
        registry.collect()
        machine = read_machine() if machine is None else machine
        place = caller(1)
        with registry.no_fork():
            mapping, refusals = mappings.open_mapping(ask, machine, gpu, place)
        locked = mapping.page_bytes == system.HUGE_BYTES
        with ExitStack() as undo:
            undo.callback(mapping.close)
            if ask.pinned and gpu is None and not locked:
                locked = mappings.lock(ask, machine, mapping, refusals)
            record = RegionRecord(ask, mapping.size_bytes, mapping.page_bytes, locked=locked)
            if ask.kind is Kind.DEVICE:
                record = replace(record, ready_bytes=mapping.size_bytes)
            region = cls(mapping, replace(record, refusals=tuple(refusals)), gpu)
            undo.pop_all()
        return region

    @classmethod
    def attach(
        cls, descriptor: int, *, gpu: Gpu | None = None, piece_bytes: int = PIECE_BYTES
    ) -> Self:
        """Maps a SHARED region of another process.

        Args:
            descriptor: came over a socket, or by inheritance; the caller keeps it and may close it.
            gpu: to register it with by `prepare`.
            piece_bytes: as its owner has it, so that no frame lies in two pieces.

        Raises:
            RefusedError: it is no shared memory, or could be made shorter by somebody.
        """
        registry.collect()
        mappings.require_sealed(descriptor)
        ask = Ask(1, Kind.SHARED, piece_bytes=piece_bytes)
        place = caller(1)
        with registry.no_fork():
            try:
                own = os.dup(descriptor)
            except OSError as error:
                remedy = "close descriptors, or raise ulimit -n"
                raise Refusal(
                    "region", f"no descriptor is left: {error}", remedy
                ).error() from error
            return cls._attach(own, ask, gpu, place)

    @classmethod
    def attach_named(
        cls, name: str, *, gpu: Gpu | None = None, piece_bytes: int = PIECE_BYTES
    ) -> Self:
        """Maps a NAMED region of another process that lives.

        Args:
            name: that its owner gave it.
            gpu: as for `attach`.
            piece_bytes: as for `attach`.

        Raises:
            RefusedError: there is none, or its owner is dead.
        """
        registry.collect()
        ask = Ask(1, Kind.NAMED, name=name, piece_bytes=piece_bytes)
        place = caller(1)
        with registry.no_fork():
            return cls._attach(named.attach(name), ask, gpu, place)

    @classmethod
    def _attach(cls, descriptor: int, ask: Ask, gpu: Gpu | None, place: str) -> Self:
        mapping = mappings.attach_mapping(descriptor, place)
        with ExitStack() as undo:
            undo.callback(mapping.close)
            huge = mapping.page_bytes == system.HUGE_BYTES
            size_bytes, pinned = mapping.size_bytes, gpu is not None
            ask = replace(ask, size_bytes=size_bytes, huge=huge, pinned=pinned)
            record = RegionRecord(ask, size_bytes, mapping.page_bytes, locked=huge)
            region = cls(mapping, record, gpu)
            undo.pop_all()
        return region

    @property
    def record(self) -> RegionRecord:
        """What was asked and what was got so far."""
        return self._record

    @property
    def size_bytes(self) -> int:
        """Whole memory pages."""
        return self._mapping.size_bytes

    @property
    def piece_bytes(self) -> int:
        """What is prepared and registered at once."""
        return self._record.ask.piece_bytes

    @property
    def place(self) -> str:
        """File and line that opened it."""
        return self._mapping.place

    @property
    def closed(self) -> bool:
        """Whether it is closed, or the parent's."""
        return not self._mapping.mapped

    @property
    def address(self) -> int:
        """Of its first byte: for adapters and movers that register it, or copy.

        Raises:
            MisuseError: it is closed.
        """
        self._require_open()
        return self._mapping.address

    @property
    def descriptor(self) -> int:
        """Of a SHARED, NAMED or FILE region, to pass on or to read and write directly.

        Raises:
            MisuseError: it is closed, or of another kind.
        """
        self._require_open()
        if self._mapping.descriptor is None:
            raise MisuseError(
                f"a {self._record.ask.kind} region has no descriptor",
                remedy="open a SHARED, NAMED or FILE region",
            )
        return self._mapping.descriptor

    def prepare(
        self,
        ready: Callable[[int], None] | None = None,
        *,
        stop: threading.Event | None = None,
    ) -> RegionRecord:
        """Touches and registers what is not ready yet, from the first byte on.

        Args:
            ready: called with the bytes that are ready, as they grow; an end of a piece is among them.
            stop: set by whoever wants it to end early; looked at every `STRIDE_BYTES`.

        Returns:
            The record afterwards; `ready_bytes` says how far it came.

        Raises:
            RefusedError: there is no memory, or the GPU runtime refuses a region that must be pinned.
            MisuseError: it is closed.
        """
        mapping = self._mapping
        self._require_open()  # in a forked child a thread of the parent may have the lock for ever
        if self._preparer == threading.get_ident():
            raise MisuseError(
                f"the region opened at {self.place} is prepared from inside of its preparation",
                remedy="do it after `prepare` has returned",
            )
        with self._preparing:
            use = self.use("its preparation")
            self._preparer = threading.get_ident()
            try:
                for first, size_bytes in pieces(mapping.size_bytes, self.piece_bytes):
                    if first + size_bytes <= self._record.ready_bytes:
                        continue
                    if not self._prepare_piece(first, size_bytes, ready, stop):
                        break
            finally:
                self._preparer = None
                self.end_use(use)
        return self._record

    def _prepare_piece(
        self,
        first: int,
        size_bytes: int,
        ready: Callable[[int], None] | None,
        stop: threading.Event | None,
    ) -> bool:
        """One piece; whether it was done to its end."""
        mapping = self._mapping
        registers = self._record.ask.pinned and self._gpu is not None
        stride_bytes = mappings.rounded(STRIDE_BYTES, mapping.page_bytes)
        for begin, part_bytes in pieces(size_bytes, stride_bytes):
            done = first + begin + part_bytes
            if done <= self._record.ready_bytes:
                continue
            if stop is not None and stop.is_set():
                return False
            address, page_bytes = mapping.address + first + begin, mapping.page_bytes
            touch(address, part_bytes, page_bytes, node=self._bound, fresh=not mapping.attached)
            if not registers and begin + part_bytes < size_bytes:
                self._record = replace(self._record, ready_bytes=done)
                if ready is not None:
                    ready(done)
        self._note_node()
        if registers:
            self._register(first, size_bytes)
        self._record = replace(self._record, ready_bytes=first + size_bytes)
        if ready is not None:
            ready(first + size_bytes)
        return True

    def _note_node(self) -> None:
        """Asks the kernel where the first page lies: a wish is not a fact."""
        if self._record.node is not None:
            return
        try:
            node = system.node_of(self._mapping.address)
        except OSError:
            return  # unknown stays None
        self._record = replace(self._record, node=node)

    def _register(self, first: int, size_bytes: int) -> None:
        refusals = self._record.refusals
        if any(refusal.what == Trait.PINNED for refusal in refusals):
            return  # refused before, and allowed to lack it: asking again stops the device for nothing
        assert self._gpu is not None, "somebody to register with"
        address = self._mapping.address + first
        try:
            self._gpu.register(address, size_bytes)
        except OSError as error:
            remedy = "less pinned memory, or a higher limit of locked memory (ulimit -l)"
            reason = (
                f"bytes {first} to {first + size_bytes} on {self._gpu.device}: {error.strerror}"
            )
            refusal = Refusal(Trait.PINNED, reason, remedy)
            if Trait.PINNED not in self._record.ask.may_lack:
                raise refusal.error() from error
            self._record = replace(self._record, refusals=(*refusals, refusal))
            return
        self._mapping.registered.append(address)
        done = self._record.registered_bytes + size_bytes
        self._record = replace(self._record, registered_bytes=done)

    @property
    def _bound(self) -> int | None:
        """The node that its memory has to come from."""
        refused = any(refusal.what == Trait.NODE for refusal in self._record.refusals)
        return None if refused else self._record.ask.node

    def use(self, who: str, *, alone: bool = False) -> Use:
        """Somebody relies on the bytes until `end_use`.

        Args:
            who: for messages.
            alone: nobody else may use it alone: two arenas would give the same bytes to two owners.

        Raises:
            MisuseError: it is closed, or somebody uses it alone.
        """
        registry.require_own(self._forks, "the region")
        use = Use(who, alone)
        with self._call.alone(), self._call:
            self._require_open()
            self._users.begin(use)
        return use

    def end_use(self, use: Use) -> None:
        """The counterpart of `use`; a second time, it does nothing. Takes no lock."""
        self._users.ended.append(use)

    def view(self, offset: int, size_bytes: int, *, readonly: bool = True) -> View:
        """Bytes for one `with` block: for whoever was told offset and length, in another process too.

        Raises:
            InputError: they do not lie in the region.
            MisuseError: it is closed, or on a device.
            RefusedError: they were not prepared, and there is no memory for them.
        """
        self._require_open()
        if self._record.ask.kind is Kind.DEVICE:
            raise MisuseError("device memory has no bytes here", remedy="use a copy of the mover")
        if type(offset) is not int or type(size_bytes) is not int:
            raise InputError(f"offset {offset!r}, length {size_bytes!r}", limit="whole numbers")
        if offset < 0 or size_bytes < 1 or offset + size_bytes > self.size_bytes:
            raise InputError(
                f"bytes {offset} to {offset + size_bytes}",
                limit=f"1 or more in 0 to {self.size_bytes}",
            )
        if offset + size_bytes > self._record.ready_bytes:
            # Shared memory that is full answers the first touch with a signal, which ends the process.
            page_bytes = self._mapping.page_bytes
            first = offset // page_bytes * page_bytes
            last = mappings.rounded(offset + size_bytes, page_bytes)
            try:
                system.populate(self._mapping.address + first, last - first, fresh=False)
            except OSError as error:
                raise no_memory(last - first, error) from error
        span = (self._mapping.address, self.size_bytes)
        part = slice(offset, offset + size_bytes)
        return View(self, None, span, part, readonly, caller(1))

    def view_began(self, books: ViewBooks) -> None:
        """See `ViewOwner`."""
        registry.require_own(self._forks, "the region")
        with self._call.alone(), self._call:
            self._require_open()
            self._users.begin_view(books)

    def view_left(self, books: ViewBooks) -> None:
        """See `ViewOwner`: the view stays a user until its last use ends."""

    def view_ended(self, books: ViewBooks) -> None:
        """See `ViewOwner`."""
        self._users.views_ended.append(books)

    def close(self) -> None:
        """Gives the memory back; a second time, and in a forked child, does nothing.

        The device is waited for before anything is unregistered.

        Raises:
            MisuseError: somebody uses it; names who.
        """
        if self._forks != registry.forks():
            return
        with self._call.alone(), self._call:
            if not self._mapping.mapped:
                return
            users = self._users.names()
            if users:
                raise MisuseError(
                    f"the region opened at {self.place} is used by {', '.join(users[:5])}",
                    limit="no users",
                    remedy="close arenas and end views first",
                )
            self._mapping.close()

    def _require_open(self) -> None:
        registry.require_own(self._forks, "the region")
        if not self._mapping.mapped:
            raise MisuseError(f"the region opened at {self.place} is closed", remedy="open another")
