"""Chained page hashes the plain way; frozen."""

from __future__ import annotations

import hashlib
import sys
from array import array


def page_keys(root: bytes, ids: list[int], page_tokens: int) -> list[bytes]:
    """SHA-256 of the key before and the page's ids as u32 little-endian, page after page.

    Args:
        root: stands before the first page; 32 bytes.
        ids: token ids, 0 to 2**32 - 1.
        page_tokens: ids of one page; a page that is not full gets no key.

    Returns:
        One key of 32 bytes for each full page.
    """
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    width = 4 * page_tokens
    key = root
    keys: list[bytes] = []
    for begin in range(0, len(data) - width + 1, width):
        key = hashlib.sha256(key + data[begin : begin + width]).digest()
        keys.append(key)
    return keys
