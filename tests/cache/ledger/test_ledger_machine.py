"""`Ledger` with ranks that do, fail, hang, lie and die, against a plain model of what may be found.

The bytes of a rank are a dict from frame to name. Whatever a load names must lie there on every rank, under exactly
that name, unless the test itself has spoiled it; no frame is written by one plan while another has it.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from stepwell.base.errors import InputError, MisuseError
from stepwell.cache.ledger.loads import Loaded
from stepwell.core.key import Namespace
from stepwell.core.page import Status
from stepwell.core.plan import Outcome, Plan, Verb
from stepwell.core.reasons import Reason

FIRED: collections.Counter[str] = collections.Counter()
SPACES = [Namespace(4, model="m"), Namespace(4, model="m", tenant="t")]
MATCH_STEPS = 3
OK = int(Outcome.OK)
WRONG = {int(Outcome.MISS), int(Outcome.CORRUPT)}

FAILURES = [one for one in Outcome if one is not Outcome.OK]
HOWS = ["ok"] * 5 + [
    "bad",
    "wrong",
    "wrong",
    "late",
    "late",
    "released",
    "clear first",
    "clear",
    "clear",
]

seeds = st.integers(0, 2**32 - 1)
"""What a rule does is chosen by it: a draw of Hypothesis for every small choice would take most of the time."""


@dataclasses.dataclass(eq=False)
class Sent:
    """A plan that is not clear, as the model knows it."""

    plan: Plan
    deadline_s: float
    space: int | None
    ranks: set[int]  # that are not clear
    said: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # final outcomes by rank
    lost: bool = False

    def names(self) -> list[tuple[bytes, int]]:
        plan = self.plan
        return [(plan.key(n), int(plan.which[n])) for n in range(len(plan))]

    def writes(self, rank: int) -> set[int]:
        """Frames that a rank may still write."""
        if rank not in self.ranks or self.plan.verb is Verb.LOAD:
            return set()
        said = self.said.get(rank)
        frames = self.plan.inside.tolist()
        return {f for n, f in enumerate(frames) if said is None or said[n] != OK}


@dataclasses.dataclass
class Waiting:
    """A match that nobody has loaded yet."""

    match: Any
    space: int
    prompt: tuple[int, ...]
    step: int
    frames: list[int]
    dropped: bool = False


class LedgerMachine(RuleBasedStateMachine):
    World: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self.meaning: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        self.sent: dict[int, Sent] = {}
        self.ever: set[tuple[bytes, int]] = set()
        self.waiting: dict[str, Waiting] = {}
        self.spoiled: set[tuple[int, int]] = set()
        self.behind: set[tuple[int, int]] = set()  # plan and rank that the deadline has spoken for
        self.gone: dict[int, list[int]] = {}
        self.kept: set[str] = set()
        self.steps = 0
        self.rng = random.Random(0)

    @initialize(
        model=st.sampled_from(["full", "full and window", "full and states", "windows", "no full"]),
        movers=st.integers(1, 3),
        frames=st.integers(8, 18),
        seed=seeds,
    )
    def begin(self, model: str, movers: int, frames: int, seed: int) -> None:
        """Somewhere in the middle: a few prompts are here, one is on its way up, another down."""
        self.rng = random.Random(seed)
        self.world = self.World(
            model,
            movers,
            frames,
            match_steps=MATCH_STEPS,
            breaker_faults=3,
            breaker_rest_ms=500,
            keep_percent=40,
            debug=False,
        )
        self.closed = self.world.stock.prefixes.closed
        for _ in range(self.rng.randint(0, 3)):
            self.save(0, self.prompt(), 9, "all")
            self.finish()
        self.save(0, self.prompt(), 9, "last")
        self.match("a", 0, self.prompt(), 9)
        self.match("b", 0, self.prompt(), 9)
        if "a" in self.waiting:
            self.load("a")

    # The model

    def prompt(self) -> tuple[int, ...]:
        """Few different pages and short prompts, so that requests meet."""
        return tuple(self.rng.choice([1, 1, 2, 3]) for _ in range(self.rng.randint(1, 5)))

    def chain(self, space: int, prompt: tuple[int, ...]) -> Any:
        chain = self.world.chain(*prompt, space=SPACES[space])
        for page, key in enumerate(chain.keys(0, chain.pages)):
            self.meaning[key] = (space, prompt[: page + 1])
        return chain

    def fetched(self, space: int | None = None) -> None:
        """Plans that the last call has made."""
        for number in sorted(set(self.world.plans) - set(self.sent)):
            plan = self.world.plans.pop(number)
            deadline_s = self.world.clock.now_s() + 2 * plan.within_ms / 1000
            ranks = set(range(len(self.world.ranks)))
            self.sent[number] = Sent(plan, deadline_s, space, ranks)
            if plan.verb is Verb.WIPE:
                FIRED["wipe"] += 1
        for number, sent in list(self.sent.items()):
            if not sent.ranks and len(sent.said) == len(self.world.ranks):
                assert self.world.ledger._plans.find(number) is None
                del self.sent[number]

    def forget(self, space: int | None, prefix: tuple[int, ...] = ()) -> None:
        """What begins with these pages may be found no more."""
        for name in list(self.ever):
            its_space, its = self.meaning[name[0]]
            if space in (None, its_space) and its[: len(prefix)] == prefix:
                self.ever.discard(name)

    def dropped(self, space: int | None) -> None:
        """What is on its way under a root, or held for a request, is worth nothing any more."""
        for sent in self.sent.values():
            sent.lost |= space in (None, sent.space)
        for one in self.waiting.values():
            one.dropped |= space in (None, one.space)

    def ended(self, number: int) -> None:
        """All ranks have said what became of a plan, or the deadline has for them."""
        sent = self.sent[number]
        outcomes = [set(one) == {OK} for one in zip(*sent.said.values(), strict=True)]
        names = sent.names()
        if sent.plan.verb is Verb.SAVE and not sent.lost:
            good = [name for name, fine in zip(names, outcomes, strict=True) if fine]
            self.ever.update(good)
            FIRED["saved"] += bool(good)
        if sent.plan.verb is not Verb.LOAD:
            return
        (loaded,) = [n for n in self.world.news if isinstance(n, Loaded) and n.plan == number]
        end = sum(which >> 16 == 0 for _, which in names) if self.closed else 0
        whole = next((n for n, fine in enumerate(outcomes[:end]) if not fine), end)
        assert loaded.pages == (0 if sent.lost else whole)
        for cut, oks in zip(self.world.ledger.shape.walked, loaded.records, strict=True):
            for ok in oks:
                assert ok == (all(outcomes[end : end + cut.frames]) and not sent.lost)
                end += cut.frames
        assert end == len(names)
        FIRED["loaded"] += all(outcomes) and not sent.lost
        FIRED["loaded nothing of what was dropped"] += sent.lost

    def found_before(self) -> dict[int, set[tuple[bytes, int]]]:
        """What of each load can be found: if it is found wrong, it is forgotten."""
        return {
            number: {
                name
                for name, frame in zip(sent.names(), sent.plan.inside.tolist(), strict=True)
                if self.where(name) == frame or frame in self.others(name)
            }
            for number, sent in self.sent.items()
            if sent.plan.verb is Verb.LOAD
        }

    def where(self, name: tuple[bytes, int]) -> int | None:
        """The frame of a page of the full group."""
        return self.closed.frame_of(name[0]) if self.closed and name[1] >> 16 == 0 else None

    def others(self, name: tuple[bytes, int]) -> list[int]:
        """The frames of a record of another group."""
        group = (name[1] >> 16) - bool(self.closed)
        if group < 0:
            return []
        index = self.world.stock.prefixes.walked[group]
        return index.frames_of(index.with_keys([name[0]])).reshape(-1).tolist()

    def wrong(self, number: int, found: set[tuple[bytes, int]]) -> None:
        """Forgets in the model what the ranks have found wrong."""
        sent = self.sent[number]
        for name, said in zip(sent.names(), zip(*sent.said.values(), strict=True), strict=True):
            if not set(said) & WRONG or name not in found:
                continue
            FIRED["found wrong"] += 1
            if self.closed and name[1] >> 16 == 0:
                self.forget(*self.meaning[name[0]])
            else:
                its = (name[0], name[1] >> 16)
                self.ever -= {one for one in self.ever if (one[0], one[1] >> 16) == its}

    def heard(self, number: int, found: dict[int, set[tuple[bytes, int]]]) -> None:
        """The last rank has said what became of a plan."""
        if self.sent[number].plan.verb is Verb.LOAD:
            self.wrong(number, found[number])
        self.ended(number)

    def all_said(self, number: int) -> bool:
        return len(self.sent[number].said) == len(self.world.ranks)

    # Down

    @rule(seed=seeds)
    def work(self, seed: int) -> None:
        """One rule for what all others need: Hypothesis leaves some of them out of each walk."""
        self.rng = random.Random(seed)
        if self.gone and self.rng.random() < 0.7:
            self.comes_back()
        for _ in range(self.rng.randint(1, 2)):
            self.rng.choice([self.down, self.up])()
        self.report(4)

    def down(self) -> None:
        space, prompt = self.some()
        prompt += self.prompt()
        last = self.rng.choice([1, 2, 3, 9, 9, 9])
        records = self.rng.choice(["none", "last", "last", "all"])
        self.save(space, prompt[:6], last, records)

    def save(self, space: int, prompt: tuple[int, ...], last: int, records: str) -> None:
        chain = self.chain(space, prompt)
        last = min(last, chain.pages)
        wanted: list[tuple[int, int]] = []
        for end in range(1, last + 1):
            if records == "all" or (records == "last" and end == last):
                wanted += self.world.boundary(end)
        before = self.world.count("saves_refused")
        number = self.world.save(chain, last, wanted)
        self.fetched(space)
        FIRED["save refused"] += self.world.count("saves_refused") - before
        if number is None:
            FIRED["nothing to save"] += 1
            return
        FIRED["save"] += 1
        for name in self.sent[number].names():
            its_space, its = self.meaning[name[0]]
            assert its_space == space
            assert its == prompt[: len(its)]
            assert self.where(name) is None
            assert not self.others(name)

    # Up

    def up(self) -> None:
        if not self.ever:
            # Nothing is here: something comes first, and most often whole.
            self.down()
            if self.rng.choice([True, True, False]):
                self.finish()
        request = self.rng.choice("abc")
        space, prompt = self.some()
        if self.rng.random() < 0.5:
            prompt += self.prompt()[:1]
        self.match(request, space, prompt, self.rng.choice([9, 9, 9, 2]))
        then = self.rng.choice(["load", "load", "wait", "wait", "wait", "give up", "other"])
        if then == "load" and request in self.waiting:
            self.load(request)
        elif then == "other" and self.waiting:
            self.load(self.rng.choice(sorted(self.waiting)))
        elif then == "give up":
            self.give_up(request)

    def some(self) -> tuple[int, tuple[int, ...]]:
        """A prompt: most often one that may be here."""
        there = sorted({self.meaning[name[0]] for name in self.ever})
        if there and self.rng.choice([True, True, True, False]):
            return self.rng.choice(there)
        return self.rng.choice([0, 0, 0, 1]), self.prompt()

    def match(self, request: str, space: int, prompt: tuple[int, ...], limit: int) -> None:
        chain = self.chain(space, prompt)
        match = self.world.match(chain, request, limit)
        self.waiting.pop(request, None)
        self.fetched()
        if match.reason is Reason.TIER_DOWN:
            FIRED["tier down"] += 1
        if not match.pages:
            FIRED["miss"] += 1
            return
        FIRED["hit"] += 1
        assert match.pages <= min(limit, len(prompt))
        found = self.world.ledger._loads._waiting[request].found
        frames = found.frames.tolist()
        for index, its in zip(self.world.stock.prefixes.walked, found.records, strict=True):
            frames += index.frames_of(its).reshape(-1).tolist()
        for page in range(match.pages if self.closed else 0):
            assert (chain.key(page), 0) in self.ever
        first = 1 if self.closed else 0
        for group, page in self.world.boundary(match.pages):
            for part in range(self.world.ledger.shape.walked[group].frames):
                assert (chain.key(page), ((group + first) << 16) + part) in self.ever
        self.waiting[request] = Waiting(match, space, prompt, self.steps, frames)

    def load(self, request: str) -> None:
        waiting = self.waiting.pop(request)
        pages = waiting.match.pages
        first = self.rng.randint(0, pages) if self.closed else 0
        number = self.world.load_match(waiting.match, first)
        if waiting.dropped:
            assert self.world.loaded(number).pages == 0
            assert number not in self.world.plans
            FIRED["load of what was dropped"] += 1
            return
        self.fetched(waiting.space)
        FIRED["load"] += 1
        plan = self.sent[number].plan
        chain = self.chain(waiting.space, waiting.prompt)
        asked = [(chain.key(page), 0) for page in range(first, pages)] if self.closed else []
        group = 1 if self.closed else 0
        for n, page in self.world.boundary(pages):
            parts = range(self.world.ledger.shape.walked[n].frames)
            asked += [(chain.key(page), ((n + group) << 16) + part) for part in parts]
        assert self.sent[number].names() == asked
        for n, frame in enumerate(plan.inside.tolist()):
            for rank in self.world.ranks:
                if (rank.number, frame) not in self.spoiled:
                    assert rank.names[frame] == asked[n]

    def give_up(self, request: str) -> None:
        self.world.ledger.give_up(request)
        self.world.fetch()
        self.fetched()
        FIRED["give up"] += self.waiting.pop(request, None) is not None

    # What ranks say

    def choose(self, *, ended: bool) -> tuple[int, int] | None:
        """A plan and a rank; saves are many, so first of all what is moved."""
        able: dict[Verb, list[tuple[int, int]]] = {}
        for number, sent in self.sent.items():
            for rank in sorted(sent.ranks):
                if (rank in sent.said and (number, rank) not in self.behind) == ended:
                    able.setdefault(sent.plan.verb, []).append((number, rank))
        if not able:
            return None
        verb = self.rng.choice(sorted(able, reverse=True))
        return self.rng.choice(able[verb])

    def say(self, number: int, rank: int, outcomes: Any, *, released: bool, clear: bool) -> None:
        found, sent = self.found_before(), self.sent[number]
        new = outcomes is not None and rank not in sent.said
        if new:
            sent.said[rank] = outcomes
        if clear:
            sent.ranks.discard(rank)
        self.world.say(number, rank, outcomes, released=released, clear=clear)
        if new and self.all_said(number):
            self.heard(number, found)
        self.fetched()

    @rule(seed=seeds)
    def ranks_work(self, seed: int) -> None:
        self.rng = random.Random(seed)
        if self.gone:
            self.comes_back()
        self.report(8)
        if self.rng.random() < 0.2:
            self.finish()
            FIRED["all is done"] += 1

    def report(self, most: int) -> None:
        """Ranks do something of what they were told, each in its own order."""
        for _ in range(self.rng.randint(0, most)):
            self.report_one(self.rng.choice(HOWS))

    def report_one(self, how: str) -> None:
        chosen = self.choose(ended=how == "clear")
        if chosen is None:
            return
        number, rank = chosen
        plan = self.sent[number].plan
        if how == "clear":
            # What hung has come to its end, and may have written until then.
            for frame in self.sent[number].writes(rank):
                self.world.ranks[rank].names[frame] = (b"late" * 8, number)
            self.say(number, rank, None, released=False, clear=True)
            FIRED["clear after the end"] += 1
            return
        if how == "released":
            self.say(number, rank, None, released=True, clear=False)
            FIRED["released"] += 1
            return
        bad: dict[int, Outcome] = {}
        if how in ("bad", "wrong", "late") and len(plan):
            at = self.rng.randint(0, len(plan) - 1)
            bad = {at: Outcome.CORRUPT}
            if how == "bad":
                bad = {at: self.rng.choice(FAILURES)}
            elif how == "late":
                bad = dict.fromkeys(range(at, len(plan)), Outcome.TIMEOUT)
        behind = (number, rank) in self.behind
        outcomes = self.world.ranks[rank].does(plan, bad).tolist()
        self.note_writes(rank, plan)
        if how == "clear first" and not behind:
            self.world.say(number, rank, None, clear=True)  # reports may overtake each other
        self.behind.discard((number, rank))
        self.say(number, rank, outcomes, released=True, clear=how != "late")
        FIRED[how] += 1
        FIRED[plan.verb.name] += 1
        FIRED["late outcome"] += behind

    def note_writes(self, rank: int, plan: Plan) -> None:
        if plan.verb is not Verb.LOAD:
            self.spoiled -= {(rank, frame) for frame in plan.inside.tolist()}

    def lies(self, request: str) -> None:
        """Reports that fit nothing, and loads of nothing, change nothing."""
        if request not in self.waiting:
            with pytest.raises(MisuseError, match="no match"):
                self.world.ledger.load(request, 0, self.world.device(1))
        number = self.rng.choice([0, 10**6, *self.sent])
        n = len(self.sent[number].plan) if number in self.sent else 0
        rank, size = self.rng.choice([(len(self.world.ranks), n), (0, n + 1)])
        before = self.world.sums()
        with pytest.raises(InputError):
            self.world.say(number, rank, [OK] * size, released=True, clear=True)
        assert self.world.sums() == before
        FIRED["lies"] += 1

    def spoil(self) -> None:
        """Some frame of a rank has other bytes than it should."""
        rank = self.rng.choice(self.world.ranks)
        loads = [one.plan for one in self.sent.values() if one.plan.verb is Verb.LOAD]
        wanted = {frame for plan in loads for frame in plan.inside.tolist()}
        wanted.update(frame for one in self.waiting.values() for frame in one.frames)
        frames = sorted(wanted & set(rank.names)) or sorted(rank.names)
        if frames:
            frame = self.rng.choice(frames)
            rank.names[frame] = (b"flip" * 8, 0)
            self.spoiled.add((rank.number, frame))
            FIRED["spoil"] += 1

    @rule(
        seed=seeds, seconds=st.sampled_from([0.0, 0.5, 2.5]), more=st.sampled_from([0, MATCH_STEPS])
    )
    def steps_begin(self, seed: int, seconds: float, more: int) -> None:
        self.rng = random.Random(seed)
        if self.gone:
            self.comes_back()
        self.up()
        self.step(seconds)
        for _ in range(more):
            self.step(0.0)

    def step(self, seconds: float) -> None:
        self.world.clock.advance_s(seconds)
        now_s = self.world.clock.now_s()
        self.steps += 1
        expired = [r for r, one in self.waiting.items() if one.step < self.steps - MATCH_STEPS]
        for request in expired:
            del self.waiting[request]
        FIRED["match expired"] += bool(expired)
        found = self.found_before()
        self.world.ledger.step()
        self.world.fetch()
        self.world.news += self.world.ledger.poll()
        for number, sent in list(self.sent.items()):
            silent = set(range(len(self.world.ranks))) - set(sent.said)
            if silent and sent.deadline_s <= now_s:
                FIRED["silent"] += 1
                for rank in silent:
                    sent.said[rank] = [int(Outcome.TIMEOUT)] * len(sent.plan)
                    if rank in sent.ranks:
                        self.behind.add((number, rank))
                self.heard(number, found)
        self.fetched()

    # What an operator does

    @rule(seed=seeds)
    def operator(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.up()
        space, prompt = self.some()
        what = self.rng.choice(["keep", "keep", "drop", "drop", "root", "unkeep"])
        if what == "keep":
            self.keep(self.rng.choice("kl"), space, prompt, self.rng.random() < 0.5)
        elif what == "unkeep":
            self.unkeep(self.rng.choice("kl"))
        elif what == "drop":
            self.drop(space, prompt)
        else:
            self.drop_root(self.rng.choice([0, 1, None]))
        for request in sorted(self.waiting):
            if self.waiting[request].dropped:
                self.load(request)

    @rule(seed=seeds)
    def trouble(self, seed: int) -> None:
        self.rng = random.Random(seed)
        what = self.rng.choice(["spoil", "spoil", "spoil", "lies", "lose"])
        if what == "spoil":
            self.spoil()
        elif what == "lies":
            self.lies(self.rng.choice("abc"))
        elif len(self.gone) < len(self.world.ranks):
            # Others are in the middle of something when a rank goes.
            self.down()
            for _ in range(3):
                self.report_one("late")
            self.lose()

    def keep(self, name: str, space: int, prompt: tuple[int, ...], lapses: bool) -> None:
        kept = self.world.ledger.keep(name, self.chain(space, prompt), 1.0 if lapses else None)
        assert kept <= len(prompt)
        self.kept.add(name)
        self.world.fetch()
        self.fetched()
        FIRED["keep"] += kept > 0

    def unkeep(self, name: str) -> None:
        self.world.ledger.unkeep(name)
        self.world.fetch()
        self.fetched()
        FIRED["unkeep"] += name in self.kept
        self.kept.discard(name)

    def drop(self, space: int, prompt: tuple[int, ...]) -> None:
        gone = self.world.ledger.drop(self.chain(space, prompt))
        self.forget(space, prompt if self.closed else ())
        self.dropped(space)
        self.world.fetch()
        self.fetched()
        FIRED["drop"] += gone > 0

    def drop_root(self, space: int | None) -> None:
        root = None if space is None else self.chain(space, (1,)).root
        gone = self.world.ledger.drop_root(root)
        self.forget(space)
        self.dropped(space)
        self.world.fetch()
        self.fetched()
        FIRED["drop root"] += gone > 0

    def lose(self) -> None:
        there = sorted(set(range(len(self.world.ranks))) - set(self.gone))
        rank = self.rng.choice(there)
        self.forget(None)
        self.dropped(None)
        ending = [number for number in self.sent if not self.all_said(number)]
        for number, sent in self.sent.items():
            sent.said.setdefault(rank, [int(Outcome.UNAVAILABLE)] * len(sent.plan))
            sent.ranks.discard(rank)
            self.behind.discard((number, rank))
        self.world.lose(rank)
        self.spoiled = {one for one in self.spoiled if one[0] != rank}
        self.gone[rank] = list(range(self.world.ledger.shape.frames))
        for number in filter(self.all_said, ending):
            self.ended(number)
        self.fetched()
        FIRED["lose"] += 1

    def comes_back(self) -> None:
        rank = self.rng.choice(sorted(self.gone))
        frames = self.gone.pop(rank)
        if len(frames) > 1 and self.rng.random() < 0.3:
            frames, self.gone[rank] = frames[::2], frames[1::2]
        late = [s for s in self.sent.values() if any(s.writes(r) for r in s.ranks & set(s.said))]
        FIRED["comes back while another is late"] += bool(late)
        self.world.grow(rank, frames)
        self.world.fetch()
        self.fetched()
        FIRED["comes back"] += 1

    # What holds

    @invariant()
    def no_frame_is_in_two_plans(self) -> None:
        written: collections.Counter[int] = collections.Counter()
        read: set[int] = set()
        for sent in self.sent.values():
            mine: set[int] = set()
            for rank in sent.ranks:
                mine |= sent.writes(rank)
            written.update(mine)
            if sent.plan.verb is Verb.LOAD and sent.ranks:
                read |= set(sent.plan.inside.tolist())
        assert not [frame for frame, count in written.items() if count > 1]
        assert not read & set(written)
        status = self.world.stock.frames.status if self.sent else []
        for frame in written:
            assert status[frame] in (Status.FILLING, Status.QUARANTINED, Status.LEAVING)
        for frame in read:
            assert status[frame] == Status.SEALED

    @invariant()
    def what_is_held_stays(self) -> None:
        for one in self.waiting.values():
            if not one.dropped:
                held = self.world.stock.frames.status[one.frames]
                assert (held == Status.SEALED).all()

    @invariant()
    def frames_add_up(self) -> None:
        self.world.ledger.check()
        self.world.sums()
        assert self.world.ledger.in_flight == len(self.sent)

    def finish(self) -> None:
        """All ranks do all that they were told."""
        while self.sent:
            for number in sorted(self.sent):
                for rank in sorted(self.sent[number].ranks if number in self.sent else ()):
                    sent = self.sent[number]
                    behind = (number, rank) in self.behind
                    outcomes = None
                    if rank not in sent.said or behind:
                        outcomes = self.world.ranks[rank].does(sent.plan, {}).tolist()
                        self.note_writes(rank, sent.plan)
                    self.behind.discard((number, rank))
                    self.say(number, rank, outcomes, released=True, clear=True)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for request in "abc":
            self.world.ledger.give_up(request)
        for name in ("k", "l"):
            self.world.ledger.unkeep(name)
        for rank, frames in self.gone.items():
            self.world.grow(rank, frames)
        self.waiting.clear()
        for _ in range(3):
            self.world.fetch()
            self.fetched()
            self.finish()
            self.world.clock.advance_s(1.0)
            self.world.ledger.step()
        self.finish()
        self.world.fetch()
        assert not self.world.plans
        self.world.idle()
        sums = self.world.sums()
        wrong = int(self.world.stock._wrong.any(axis=0).sum())
        assert sums.get("out", 0) <= wrong
        self.world.ledger.drop_root(None)
        self.world.fetch()
        self.fetched()
        self.finish()
        self.world.idle()
        assert not any(rank.names for rank in self.world.ranks), "a drop leaves nothing behind"


RULES = (
    *(
        "save",
        "nothing to save",
        "save refused",
        "saved",
        "hit",
        "miss",
        "tier down",
        "load",
        "loaded",
    ),
    *("load of what was dropped", "loaded nothing of what was dropped", "give up", "match expired"),
    *(
        "SAVE",
        "LOAD",
        "WIPE",
        "ok",
        "bad",
        "wrong",
        "late",
        "clear first",
        "released",
        "all is done",
    ),
    *(
        "late outcome",
        "clear after the end",
        "silent",
        "found wrong",
        "spoil",
        "lies",
        "keep",
        "unkeep",
    ),
    *("drop", "drop root", "wipe", "lose", "comes back", "comes back while another is late"),
)


def test_a_ledger_does_what_the_plain_model_allows(make_world: Any) -> None:
    FIRED.clear()
    LedgerMachine.World = make_world
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=250,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # A machine that never gets somewhere proves nothing about it.
    assert {name: FIRED[name] for name in RULES if FIRED[name] < 50} == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_ledger_does_what_the_plain_model_allows_for_long(make_world: Any) -> None:
    """Random, not derandomised: every run goes elsewhere, and a failure prints how to come back."""
    LedgerMachine.World = make_world
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=3000,
            stateful_step_count=80,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
