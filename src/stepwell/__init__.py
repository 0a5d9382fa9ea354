"""Stepwell keeps the KV cache of language-model prompts, so that a prefix is prefilled once.

Names are imported when first used: `import stepwell` loads neither torch nor any client library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepwell.base.settings import EngineSettings, PoolSettings, Settings
    from stepwell.cache.pool import Busy, Flags, KVView, NeverFits, PagePool, Ready
    from stepwell.core.chain import Chain, Extra
    from stepwell.core.geometry import Geometry, Group, Rule
    from stepwell.core.key import Digest, Namespace
    from stepwell.core.part import Part, Shard
    from stepwell.core.reasons import Reason
    from stepwell.engine.engine import Engine
    from stepwell.memory.arena import Arena
    from stepwell.memory.ask import Ask, Kind, Trait
    from stepwell.memory.lease import Short
    from stepwell.memory.region import Region

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
    "Arena": "stepwell.memory.arena",
    "Short": "stepwell.memory.lease",
    "Ask": "stepwell.memory.ask",
    "Kind": "stepwell.memory.ask",
    "Trait": "stepwell.memory.ask",
    "Region": "stepwell.memory.region",
    "QueueBusy": "stepwell.engine.request",
    "Record": "stepwell.engine.request",
    "Wishes": "stepwell.engine.request",
    "Sampling": "stepwell.engine.sampling",
}

__all__ = [
    "Arena",
    "Ask",
    "Busy",
    "Chain",
    "Digest",
    "Engine",
    "EngineSettings",
    "Extra",
    "Flags",
    "Geometry",
    "Group",
    "KVView",
    "Kind",
    "Namespace",
    "NeverFits",
    "PagePool",
    "Part",
    "PoolSettings",
    "QueueBusy",
    "Ready",
    "Reason",
    "Record",
    "Region",
    "Rule",
    "Sampling",
    "Settings",
    "Shard",
    "Short",
    "StateTensor",
    "Trait",
    "Wishes",
    "__version__",
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
