"""The tree of sealed pages, kept so that a whole path is read in a few slices.

Owns: parent, children and depth of every page, and what holds protect. Must not know: keys, tokens,
policies. Neighbours: `index` decides what is added and what leaves.

A *run* is a list of frames in which each page is the parent of the next. A page that continues the
last page of a run joins that run; any other page begins a run of its own:

    run 0:  a0 ─ a1 ─ a2 ─ a3 ─ a4        base 0
                       └── b3 ─ b4        base 3, begins below a2: run 1

So a path costs one slice per branching above it, however the frame numbers were given out and however
often they were given out before (docs/adr/0002-index-records.md has the figures). Only the last
page of a run can be without children, so only tails of runs ever leave.

A *hold* protects a page and everything above it. It is noted at its own page only; `guard` of a run
is how many of its pages, from the first on, some hold protects, and a run with a guard counts as one
hold at the page it begins below. That makes the number of protected pages known at any time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stepwell.core.check import Findings
from stepwell.core.frames import FrameIds

NO_FRAME = -1
"""Stands where a first page would have its parent."""


@dataclass(slots=True)
class Run:
    """Frames of which each is the parent of the next.

    Attributes:
        root: root key of the namespace that the whole path belongs to.
        parent: the frame that the first one continues, or `NO_FRAME`.
        base: depth of the first frame.
        frames: the frames themselves.
        guard: how many frames, from the first on, are protected.
        marks: holds by position in the run; a guarded run that begins below a position is one.
        branches: numbers of the runs that begin below a frame of this one.
    """

    root: bytes
    parent: int
    base: int
    frames: array[int]
    guard: int = 0
    marks: dict[int, int] = field(default_factory=dict)
    branches: set[int] | None = None


class Paths:
    """Parents, children and holds of the pages in a fixed number of frames.

    Attributes:
        parent: of each frame in the tree; shape [frames].
        children: how many pages continue each frame; shape [frames].
        depth: pages above each frame; shape [frames].
        size: pages in the tree.
        guarded: pages that some hold protects.
    """

    def __init__(self, count: int) -> None:
        self.parent: FrameIds = np.full(count, NO_FRAME, np.int32)
        self.children: npt.NDArray[np.int32] = np.zeros(count, np.int32)
        self.depth: npt.NDArray[np.int32] = np.zeros(count, np.int32)
        self.size = 0
        self.guarded = 0
        self._run_of: npt.NDArray[np.int32] = np.full(count, -1, np.int32)
        self._runs: list[Run | None] = []
        # Windows on the columns: one element at a time is read four times faster through them.
        self._parent_of = self.parent.data
        self._children_of = self.children.data
        self._depth_of = self.depth.data
        self._run_number = self._run_of.data
        self._spare: list[int] = []

    def _run(self, number: int) -> Run:
        run = self._runs[number]
        assert run is not None, f"run {number} is gone"
        return run

    def __contains__(self, frame: int) -> bool:
        return 0 <= frame < len(self._run_of) and self._run_number[frame] >= 0

    def root(self, frame: int) -> bytes:
        """Root key of the namespace that a frame's path belongs to."""
        return self._run(int(self._run_of[frame])).root

    def path(self, frame: int, pages: int | None = None) -> FrameIds:
        """The frames from the first page (or the last `pages` ones) to `frame`, in that order.

        Returns:
            Frame numbers; shape [pages]; a copy.
        """
        want = int(self.depth[frame]) + 1 if pages is None else pages
        slices: list[FrameIds] = []
        while want:
            run = self._run(int(self._run_of[frame]))
            end = int(self.depth[frame]) - run.base + 1
            begin = max(0, end - want)
            slices.append(np.frombuffer(run.frames, np.int32)[begin:end].copy())
            want -= end - begin
            frame = run.parent
        if len(slices) == 1:
            return slices[0]
        return np.concatenate(slices[::-1]) if slices else np.empty(0, np.int32)

    def slices(self, frame: int) -> int:
        """How many slices a path is read in."""
        count = 0
        while frame != NO_FRAME:
            count += 1
            frame = self._run(int(self._run_of[frame])).parent
        return count

    def append(self, parent: int, frames: FrameIds, root: bytes) -> None:
        """Adds pages below `parent`, each the parent of the next.

        Args:
            parent: a frame of the tree, or `NO_FRAME`.
            frames: frames that are not in the tree, at least one.
            root: root key of their namespace.
        """
        base = 0 if parent == NO_FRAME else int(self.depth[parent]) + 1
        number = self._run_for(parent, base, root)
        self._run(number).frames.frombytes(frames.tobytes())
        self.parent[frames[0]] = parent
        self.parent[frames[1:]] = frames[:-1]
        self.children[frames[:-1]] = 1
        self.children[frames[-1]] = 0
        self.depth[frames] = np.arange(base, base + len(frames), dtype=np.int32)
        self._run_of[frames] = number
        self.size += len(frames)
        if parent != NO_FRAME:
            self.children[parent] += 1

    def _run_for(self, parent: int, base: int, root: bytes) -> int:
        """The run that a child of `parent` joins, or a new one."""
        above = -1
        if parent != NO_FRAME:
            above = int(self._run_of[parent])
            if self._run(above).frames[-1] == parent:
                return above
        if not self._spare:
            self._spare.append(len(self._runs))
            self._runs.append(None)
        number = self._spare.pop()
        self._runs[number] = Run(root, parent, base, array("i"))
        if above >= 0:
            run = self._run(above)
            if run.branches is None:
                run.branches = set()
            run.branches.add(number)
        return number

    def tail(self, frame: int, limit: int) -> FrameIds:
        """The pages that could leave one after the other, from the childless `frame` upwards.

        Stays inside one run, above its guard, and ends where another page continues.

        Returns:
            At least `frame` and at most `limit` frames, tail first.
        """
        if limit == 1:
            return np.array([frame], np.int32)
        run = self._run(int(self._run_of[frame]))
        begin = max(run.guard, len(run.frames) - limit)
        frames = np.frombuffer(run.frames, np.int32)[begin:][::-1].copy()
        if not run.branches:
            return frames
        shared = self.children[frames] > 1
        return frames[: int(np.argmax(shared))] if shared.any() else frames

    def loose(self, frame: int) -> bool:
        """Whether nothing continues the page and no hold protects it."""
        if self._children_of[frame]:
            return False
        run = self._run(self._run_number[frame])
        return self._depth_of[frame] - run.base >= run.guard

    def cut(self, frames: FrameIds) -> int:
        """Removes pages that `tail` returned.

        Returns:
            The parent of the last one, or `NO_FRAME`.
        """
        last = int(frames[-1])
        number = self._run_number[last]
        run = self._run(number)
        parent = self._parent_of[last]
        if len(frames) == 1:
            run.frames.pop()
            self._run_number[last] = -1
        else:
            del run.frames[-len(frames) :]
            self._run_of[frames] = -1
        self.size -= len(frames)
        if parent != NO_FRAME:
            self._children_of[parent] -= 1
        if not run.frames:
            self._runs[number] = None
            self._spare.append(number)
            if parent != NO_FRAME:
                branches = self._run(int(self._run_of[parent])).branches
                assert branches is not None, f"run {number} hangs below no run"
                branches.remove(number)
        return parent

    def hold(self, frame: int) -> None:
        """Protects a page and all above it; ends with one `let_go`."""
        while True:
            run = self._run(int(self._run_of[frame]))
            position = int(self.depth[frame]) - run.base
            run.marks[position] = run.marks.get(position, 0) + 1
            if position < run.guard:
                return
            known_above = run.guard > 0
            self.guarded += position + 1 - run.guard
            run.guard = position + 1
            if known_above or run.parent == NO_FRAME:
                return
            frame = run.parent

    def let_go(self, frame: int) -> list[int]:
        """Ends one hold.

        Returns:
            The last frame of each run of which fewer pages are protected now, deepest run first.
        """
        loosened: list[int] = []
        while True:
            run = self._run(int(self._run_of[frame]))
            position = int(self.depth[frame]) - run.base
            run.marks[position] -= 1
            if run.marks[position]:
                return loosened
            del run.marks[position]
            if position + 1 < run.guard:
                return loosened
            guard = max(run.marks, default=-1) + 1
            self.guarded -= run.guard - guard
            run.guard = guard
            loosened.append(run.frames[-1])
            if guard or run.parent == NO_FRAME:
                return loosened
            frame = run.parent

    def below(self, frame: int) -> list[FrameIds]:
        """The page and all that continue it: frames run by run, every run after the one above it."""
        number = int(self._run_of[frame])
        todo = [(number, int(self.depth[frame]))]
        found: list[FrameIds] = []
        while todo:
            number, depth = todo.pop()
            run = self._run(number)
            begin = max(0, depth - run.base)
            found.append(np.frombuffer(run.frames, np.int32)[begin:].copy())
            lower = sorted(run.branches or ())
            todo += [(branch, depth) for branch in lower if self._run(branch).base > depth]
        return found

    def tops(self) -> list[int]:
        """The frames of all first pages."""
        return [run.frames[0] for run in self._runs if run is not None and run.parent == NO_FRAME]

    def check(self, findings: Findings) -> None:
        """Notes every broken invariant of runs, parents, children and guards."""
        children = np.zeros_like(self.children)
        size = guarded = 0
        for number, run in enumerate(self._runs):
            if run is None:
                findings.expect(self._spare.count(number) == 1, f"run {number} is lost")
                continue
            size += len(run.frames)
            guarded += run.guard
            self._check_run(number, run, findings)
            chain = [run.parent, *run.frames]
            for above, frame in zip(chain, run.frames, strict=False):
                findings.expect(self.parent[frame] == above, f"frame {frame}: parent is wrong")
                if above != NO_FRAME:
                    children[above] += 1
        inside = self._run_of >= 0
        findings.expect(size == self.size == int(inside.sum()), "the count of pages is wrong")
        findings.expect(guarded == self.guarded, "the count of protected pages is wrong")
        findings.expect(
            (children[inside] == self.children[inside]).all(), "a count of children is wrong"
        )

    def _check_run(self, number: int, run: Run, findings: Findings) -> None:
        findings.expect(len(run.frames) > 0, f"run {number} is empty")
        marks = dict(run.marks)
        for branch in run.branches or ():
            lower = self._runs[branch]
            findings.expect(lower is not None, f"run {number} has branch {branch}, which is gone")
            if lower is None:
                continue
            position = lower.base - 1 - run.base
            findings.expect(lower.root == run.root, f"run {branch} changes its root")
            findings.expect(
                0 <= position < len(run.frames) and run.frames[position] == lower.parent,
                f"run {branch} does not begin below run {number}",
            )
            if lower.guard:
                marks[position] = marks.get(position, 0) - 1
        findings.expect(
            all(count >= 0 for count in marks.values()), f"run {number} misses the mark of a branch"
        )
        findings.expect(
            run.guard == max(run.marks, default=-1) + 1, f"run {number}: its guard is wrong"
        )
        for position, frame in enumerate(run.frames):
            findings.expect(
                self._run_of[frame] == number and self.depth[frame] == run.base + position,
                f"frame {frame} does not know its place in run {number}",
            )
