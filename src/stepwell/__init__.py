"""Stepwell keeps the KV cache of language-model prompts, so that a prefix is prefilled once.

Names are imported when first used: `import stepwell` loads neither torch nor any client library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepwell.base.errors import (
        InputError,
        LateError,
        MisuseError,
        RefusedError,
        StaleError,
        StepwellError,
    )
    from stepwell.base.settings import EngineSettings, HostSettings, PoolSettings, Settings
    from stepwell.base.threads import Health
    from stepwell.cache.ledger.loads import Loaded
    from stepwell.cache.ledger.records import Cleared, Match, Released
    from stepwell.cache.ledger.saves import Carried, Offer
    from stepwell.cache.pool import Busy, Flags, KVView, Loading, NeverFits, PagePool, Ready
    from stepwell.cache.store import StoreModel, TieredStore
    from stepwell.core.chain import Chain, Extra
    from stepwell.core.cut import Cut
    from stepwell.core.geometry import Geometry, Group, Rule, StateTensor
    from stepwell.core.key import Digest, Namespace
    from stepwell.core.part import Part, Shard
    from stepwell.core.reasons import Reason
    from stepwell.engine.engine import Engine
    from stepwell.memory.arena import Arena
    from stepwell.memory.ask import Ask, Kind, Trait
    from stepwell.memory.buffer import PlainBuffer
    from stepwell.memory.gpu import find_gpu
    from stepwell.memory.lease import Short
    from stepwell.memory.machine import read_machine
    from stepwell.memory.region import Region
    from stepwell.move.copy import StackPlace
    from stepwell.move.joined import JoinedPlace
    from stepwell.move.packed import PackedPlace
    from stepwell.move.stack import Stack

__version__ = "0.1.0"

_HOMES = {
    "EngineSettings": "stepwell.base.settings",
    "PoolSettings": "stepwell.base.settings",
    "Settings": "stepwell.base.settings",
    "Busy": "stepwell.cache.pool",
    "Flags": "stepwell.cache.pool",
    "KVView": "stepwell.cache.pool",
    "NeverFits": "stepwell.cache.pool",
    "PagePool": "stepwell.cache.pool",
    "Ready": "stepwell.cache.pool",
    "Chain": "stepwell.core.chain",
    "Extra": "stepwell.core.chain",
    "Geometry": "stepwell.core.geometry",
    "Group": "stepwell.core.geometry",
    "Rule": "stepwell.core.geometry",
    "StateTensor": "stepwell.core.geometry",
    "Digest": "stepwell.core.key",
    "Namespace": "stepwell.core.key",
    "Part": "stepwell.core.part",
    "Shard": "stepwell.core.part",
    "Reason": "stepwell.core.reasons",
    "Engine": "stepwell.engine.engine",
    "InputError": "stepwell.base.errors",
    "LateError": "stepwell.base.errors",
    "MisuseError": "stepwell.base.errors",
    "RefusedError": "stepwell.base.errors",
    "StaleError": "stepwell.base.errors",
    "StepwellError": "stepwell.base.errors",
    "Health": "stepwell.base.threads",
    "Arena": "stepwell.memory.arena",
    "PlainBuffer": "stepwell.memory.buffer",
    "find_gpu": "stepwell.memory.gpu",
    "read_machine": "stepwell.memory.machine",
    "Short": "stepwell.memory.lease",
    "Ask": "stepwell.memory.ask",
    "Kind": "stepwell.memory.ask",
    "Trait": "stepwell.memory.ask",
    "Region": "stepwell.memory.region",
    "QueueBusy": "stepwell.engine.request",
    "Record": "stepwell.engine.request",
    "Wishes": "stepwell.engine.request",
    "Sampling": "stepwell.engine.sampling",
    "HostSettings": "stepwell.base.settings",
    "Loading": "stepwell.cache.pool",
    "TieredStore": "stepwell.cache.store",
    "StoreModel": "stepwell.cache.store",
    "Match": "stepwell.cache.ledger.records",
    "Released": "stepwell.cache.ledger.records",
    "Cleared": "stepwell.cache.ledger.records",
    "Loaded": "stepwell.cache.ledger.loads",
    "Offer": "stepwell.cache.ledger.saves",
    "Carried": "stepwell.cache.ledger.saves",
    "Cut": "stepwell.core.cut",
    "Stack": "stepwell.move.stack",
    "StackPlace": "stepwell.move.copy",
    "PackedPlace": "stepwell.move.packed",
    "JoinedPlace": "stepwell.move.joined",
}

__all__ = [
    "Arena",
    "Ask",
    "Busy",
    "Carried",
    "Chain",
    "Cleared",
    "Cut",
    "Digest",
    "Engine",
    "EngineSettings",
    "Extra",
    "Flags",
    "Geometry",
    "Group",
    "Health",
    "HostSettings",
    "InputError",
    "JoinedPlace",
    "KVView",
    "Kind",
    "LateError",
    "Loaded",
    "Loading",
    "Match",
    "MisuseError",
    "Namespace",
    "NeverFits",
    "Offer",
    "PackedPlace",
    "PagePool",
    "Part",
    "PlainBuffer",
    "PoolSettings",
    "QueueBusy",
    "Ready",
    "Reason",
    "Record",
    "RefusedError",
    "Region",
    "Released",
    "Rule",
    "Sampling",
    "Settings",
    "Shard",
    "Short",
    "Stack",
    "StackPlace",
    "StaleError",
    "StateTensor",
    "StepwellError",
    "StoreModel",
    "TieredStore",
    "Trait",
    "Wishes",
    "__version__",
    "find_gpu",
    "read_machine",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stepwell' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"stepwell.{name} needs {error.name}, which is not installed; remedy: install the extra "
            "'hf' (torch and transformers)"
        ) from error
