"""The device side: a paged pool of KV with prefix reuse, for engines that use ours."""

from stepwell.cache.pool.answer import Answer, Busy, Flags, Loading, NeverFits, Ready
from stepwell.cache.pool.pool import PagePool
from stepwell.cache.pool.view import KVView

__all__ = ["Answer", "Busy", "Flags", "KVView", "Loading", "NeverFits", "PagePool", "Ready"]
