"""Requests over a pool and its tiers, in an order that a seed chooses: the same seed, the same run.

Owns: the actors and the order. Must not know: threads or time: movers are driven, the clock is fake, copies run on fake
streams, piece by piece. Every step proves all KV and states that it reads, so one wrong byte anywhere ends the run.
Neighbours: `fingerprint` computes, `device` has the streams, `faults` breaks things. Shipped for authors of engines and
tiers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from stepwell.base.clock import Clock
from stepwell.base.errors import InvariantError
from stepwell.base.settings import HostSettings, PoolSettings
from stepwell.base.threads import Health
from stepwell.cache.joint import CallJoint
from stepwell.cache.ledger.ledger import Ledger
from stepwell.cache.ledger.records import Shape
from stepwell.cache.pool import Busy, Flags, Loading, NeverFits, PagePool, Ready
from stepwell.cache.pool.limits import Limits
from stepwell.cache.store import StoreModel, TieredStore
from stepwell.core.chain import Chain
from stepwell.core.geometry import Geometry
from stepwell.core.key import Namespace
from stepwell.move.carrier import Rank
from stepwell.move.mover import Mover
from stepwell.move.place import Place
from stepwell.testing.clock import FakeClock
from stepwell.testing.device import FakeDevice, FakePlace
from stepwell.testing.faults import FaultKind, FaultyHost, FaultyPlace, PlannedFault
from stepwell.testing.fingerprint import Fingerprint
from stepwell.tiers.host import HostSize

_REQUESTS = 4
_FAULTS = (
    (FaultKind.FLIP, "seal"),
    (FaultKind.ZEROS, "seal"),
    (FaultKind.SHORT, "seal"),
    (FaultKind.LOST, "seal"),
    (FaultKind.RAISE, "seal"),
    (FaultKind.RAISE, "copy_out"),
    (FaultKind.RAISE, "copy_in"),
    (FaultKind.LOST, "proves"),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What a simulation plays on.

    Attributes:
        geometry: of the fingerprint model, see `fingerprint.geometry`.
        page_tokens: tokens of one page.
        prompt_tokens: of the longest prompt.
        answer_tokens: of the longest answer.
        spare_pages: frames of the pool beyond those of one longest request, in pages of the full group.
        host_frames: of the host tier.
        save: as `host.save`.
        faults: of copies and of the host tier; 0: none.
    """

    geometry: Geometry
    page_tokens: int = 4
    prompt_tokens: int = 32
    answer_tokens: int = 12
    spare_pages: int = 1
    host_frames: int = 40
    save: str = "sealed"
    faults: int = 0


@dataclass(slots=True, eq=False)
class _Actor:
    """One request: what it has so far, and what it still wants."""

    name: str
    tokens: list[int]
    flags: Flags
    left: int
    open: bool = False
    loading: bool = False


class Simulation:
    """A pool, a ledger and a mover, and requests that come, go, are preempted, aborted and come back.

    Args:
        seed: of everything that is chosen.
        scene: what is played on.

    Attributes:
        log: what has happened, line by line.
        pool: the pool.
    """

    def __init__(self, seed: int, scene: Scene) -> None:
        self.scene = scene
        self.log: list[str] = []
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret
        self._clock = FakeClock()
        self._device = FakeDevice()
        self._model = Fingerprint(vocabulary=7)
        self._space = Namespace(scene.page_tokens, model="simulated")
        self._actors: list[_Actor] = []
        self._came = 0
        self._mover: Mover | None = None
        positions = scene.prompt_tokens + scene.answer_tokens
        sizes = PoolSettings(
            scene.page_tokens, 1 << 40, _REQUESTS, positions, 2 * scene.page_tokens
        )
        limits = Limits.of(scene.geometry, replace(sizes, capacity_bytes=1 << 24))
        frames = limits.request_frames(positions) + scene.spare_pages
        sizes = replace(sizes, capacity_bytes=frames * limits.frame_bytes)
        self.pool = PagePool(scene.geometry, sizes, "numpy", tiers=self._below)
        self._prompts = [self._tokens(scene.prompt_tokens) for _ in range(3)]
        half = scene.prompt_tokens // 2
        self._prompts += [self._prompts[0][:half] + self._tokens(half) for _ in range(2)]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(7) for _ in range(count)]

    def _below(self, model: StoreModel, places: Sequence[Place]) -> TieredStore:
        """The tiers: a host tier and a mover that is driven, both of which fail as planned."""
        scene, chosen, place = self.scene, self._random, places[0]
        script = [
            PlannedFault(kind, call, at=chosen.randrange(200))
            for kind, call in (chosen.choice(_FAULTS) for _ in range(scene.faults))
        ]
        size = HostSize(place.frame_bytes, tuple(place.bounds), scene.host_frames)
        settings = HostSettings(1, scene.save, match_steps=8, breaker_rest_ms=300, within_ms=500)
        shape = Shape(model.page_tokens, model.cuts, size.frames, size.frame_bytes)
        clock: Clock = self._clock
        ledger = Ledger(shape, settings, clock)
        host = FaultyHost(size, [one for one in script if one.call in ("seal", "proves")])
        host.wait()
        copies = FakePlace(place, self._device.out, self._device.into)
        failing = FaultyPlace(copies, [one for one in script if one.call.startswith("copy")])
        rank = Rank(host, (failing,), model.parts)
        self._mover = Mover(rank, ledger.report, settings, clock=clock)
        self._mover.look()
        return TieredStore(ledger, [CallJoint(self._mover)], Health())

    @property
    def store(self) -> TieredStore:
        """The tiers below the pool."""
        assert self.pool.store is not None, "made with tiers"
        return self.pool.store

    @property
    def mover(self) -> Mover:
        """Of the only rank."""
        assert self._mover is not None, "made with the pool"
        return self._mover

    def digest(self) -> str:
        """Names the run: equal runs have equal ones."""
        return hashlib.sha256("\n".join(self.log).encode()).hexdigest()

    def run(self, steps: int, check_every: int = 25) -> None:
        """Plays so many steps, and then lets everything end.

        Args:
            steps: one thing happens in each.
            check_every: steps between two looks at all invariants.

        Raises:
            AssertionError: a wrong byte was read, or something is left at the end.
            InvariantError: the books of pool or ledger are out of order.
        """
        turns: tuple[tuple[int, Callable[[], str]], ...] = (
            (30, self._act),
            (8, self._come),
            (25, self._copy),
            (25, self._move),
            (4, self._look),
            (2, self._abort),
            (1, self._drop),
            (1, self._keep),
        )
        weights = [weight for weight, _ in turns]
        with ExitStack() as stack:
            stack.callback(self._shut)
            for step in range(steps):
                _, turn = self._random.choices(turns, weights)[0]
                self.log.append(f"{step} {turn()}")
                if step % check_every == 0:
                    self._check()
            self._finish()

    def _shut(self) -> None:
        """Whatever has become of the run: copies end, and memory is given back."""
        while self.mover.work() or self._device.advance_all():
            pass
        self.pool.end(0.0)

    def _check(self) -> None:
        self.pool.check()
        self.store.check()

    def _come(self) -> str:
        """A new request, or one with the name of an earlier one."""
        if len(self._actors) >= _REQUESTS + 2:
            return "crowded"
        self._came += 1
        names = {f"r{number}" for number in range(_REQUESTS + 3)} - {
            one.name for one in self._actors
        }
        name = self._random.choice(sorted(names))
        prompt = self._random.choice(self._prompts)
        tokens = prompt[: self._random.randrange(1, len(prompt) + 1)]
        flags = self._random.choices([Flags.NONE, Flags.NO_READ, Flags.NO_WRITE], [20, 1, 1])[0]
        left = self._random.randrange(1, self.scene.answer_tokens)
        self._actors.append(_Actor(name, list(tokens), flags, left))
        return f"{name} comes with {len(tokens)} tokens, {flags.name}"

    def _act(self) -> str:
        """One request opens, or computes a little, or ends."""
        if not self._actors:
            return "nobody"
        actor = self._random.choice(self._actors)
        if not actor.open:
            return self._open(actor)
        return self._compute(actor)

    def _open(self, actor: _Actor) -> str:
        answer = self.pool.open(actor.name, actor.tokens, self._space, actor.flags)
        actor.loading = isinstance(answer, Loading)
        actor.open = isinstance(answer, Ready)
        assert not isinstance(answer, NeverFits), answer
        if isinstance(answer, Busy) and self._random.random() < 0.3:
            return f"{actor.name} {answer}; {self._preempt()}"
        return f"{actor.name} {answer}"

    def _preempt(self) -> str:
        """Somebody loses its frames, keeps its tokens, and opens again some day."""
        running = [one for one in self._actors if one.open]
        if not running:
            return "nobody runs"
        victim = self._random.choice(running)
        self.pool.close(victim.name)
        victim.open = False
        return f"{victim.name} preempted"

    def _compute(self, actor: _Actor) -> str:
        done = self._done(actor)
        missing = len(actor.tokens) - done
        if not missing:
            if not actor.left:
                self.pool.close(actor.name)
                self._actors.remove(actor)
                return f"{actor.name} ends"
            raise AssertionError(f"{actor.name} has nothing to compute")
        if not self.pool.room(actor.name):
            answer = self.pool.extend(actor.name, 0)
            if not isinstance(answer, Ready):
                return f"{actor.name} has no room; {self._preempt()}"
        stops = self._stops(actor, done)
        count = min([self._random.randrange(1, missing + 1), self.pool.room(actor.name), *stops])
        following = self._step(actor, done, count)
        if done + count < len(actor.tokens):
            return f"{actor.name} at {done + count}"
        actor.left -= 1
        if not actor.left or not isinstance(self.pool.extend(actor.name, 1), Ready):
            self.pool.close(actor.name)
            self._actors.remove(actor)
            return f"{actor.name} ends at {done + count}"
        actor.tokens.append(following)
        return f"{actor.name} answers {following}"

    def _done(self, actor: _Actor) -> int:
        return self.pool._held.requests[actor.name].committed

    def _stops(self, actor: _Actor, done: int) -> list[int]:
        answer = self.pool._held.requests[actor.name].answer
        return [stop - done for stop in answer.checkpoints if stop > done]

    def _step(self, actor: _Actor, done: int, count: int) -> int:
        """Computes tokens; proves what was there before, and what is there now."""
        view = self.pool.bind({actor.name: count})
        wrong = self._model.wrong(view, 0, actor.tokens[:done])
        assert not wrong, f"{actor.name} reads {wrong}"
        piece = actor.tokens[done : done + count]
        following = self._model.step(view, [piece])[0]
        self.pool.commit(actor.name, piece)
        return following

    def _copy(self) -> str:
        """A stream moves on."""
        before = len(self._device.log)
        self._device.advance_some(self._random)
        return f"stream {self._device.log[before:]}"

    def _move(self) -> str:
        """The mover does something."""
        return f"mover {self.mover.work()}"

    def _look(self) -> str:
        """Time passes."""
        self._clock.advance_s(self._random.choice([0.01, 0.05, 0.05, 0.3]))
        self.mover.look()
        self.pool.step()
        return "time"

    def _abort(self) -> str:
        """A request leaves, wherever it is."""
        if not self._actors:
            return "nobody"
        actor = self._random.choice(self._actors)
        self._end(actor)
        return f"{actor.name} aborted"

    def _end(self, actor: _Actor) -> None:
        if actor.open:
            self.pool.close(actor.name)
        else:
            self.pool.give_up(actor.name)
        self._actors.remove(actor)

    def _drop(self) -> str:
        prompt = self._random.choice(self._prompts)
        pages = self._random.randrange(1, len(prompt) // self.scene.page_tokens + 1)
        gone = self.pool.drop(prompt[: pages * self.scene.page_tokens], self._space)
        return f"{gone} pages dropped"

    def _keep(self) -> str:
        if self._random.random() < 0.5:
            self.store.unkeep("kept")
            return "kept no more"
        kept = self.store.keep("kept", Chain(self._space, self._random.choice(self._prompts)))
        return f"{kept} pages kept"

    def _finish(self) -> None:
        """Everybody leaves, everything that moves ends; nothing may be left."""
        for actor in tuple(self._actors):
            self._end(actor)
        self.store.unkeep("kept")
        moves = True
        while moves:
            # What ends may begin something: frames that were dropped while held are overwritten now.
            self.pool.step()
            moves = self.mover.work() or self._device.advance_all() > 0
        self.pool.step()
        self._check()
        stats, below = self.pool.stats(), self.store.stats()
        left = {name: stats[name] for name in ("frames_filling", "frames_held", "frames_moving")}
        left |= {name: below[name] for name in ("plans_open", "frames_held")}
        if any(left.values()):
            raise InvariantError([f"left at the end: {left}"])


def play(seed: int, scene: Scene, steps: int) -> Simulation:
    """Plays one seed to its end, and returns it for its log and counts."""
    simulation = Simulation(seed, scene)
    simulation.run(steps)
    return simulation


def scenes(geometries: Sequence[Geometry]) -> list[Scene]:
    """Scenes for some models, with every way to save, and with and without faults."""
    return [
        Scene(geometry, save=save, faults=faults, spare_pages=spare_pages)
        for geometry in geometries
        for save in ("sealed", "second_use", "evicted")
        for faults, spare_pages in ((0, 1), (8, 1), (8, 16))
    ]
