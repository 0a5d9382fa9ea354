"""What a pool demands of its callers, and what they wish of it.

Neighbours: `pool` asks before it changes anything.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.cache.pool.answer import Flags
from stepwell.cache.pool.request import OpenRequest
from stepwell.core.chain import Chain
from stepwell.core.reasons import Reason


def check_epoch(chain: Chain, epoch: int) -> None:
    """Requires that the weights of a prompt are those of now."""
    if chain.namespace.epoch < epoch:
        raise InputError(
            f"the namespace has epoch {chain.namespace.epoch}",
            limit=f"{epoch} or more, since the weights changed in place",
            remedy="make it with dataclasses.replace(namespace, epoch=pool.epoch)",
        )


def override(chain: Chain, flags: Flags, *, contiguous: bool) -> Reason | None:
    """Why nothing may be reused whatever is here, or None."""
    if chain.namespace.refusal is not None:
        return chain.namespace.refusal
    if contiguous:
        return Reason.CONTIGUOUS
    if Flags.NEEDS_LOGITS in flags:
        return Reason.NEEDS_LOGITS
    return Reason.NO_READ if Flags.NO_READ in flags else None


def check_commit(
    request: Hashable, opened: OpenRequest, added: npt.NDArray[np.uint32], room: int
) -> None:
    """Requires that tokens can be committed: there is room, and they are the prompt's where it has some.

    Args:
        request: who commits.
        opened: its books.
        added: the tokens.
        room: tokens that it has frames and positions for.
    """
    first = opened.committed
    if first + len(added) > room:
        raise InputError(
            f"{len(added)} tokens were committed after {first}",
            limit=f"{room - first}: request {request!r} has room for {room}",
            remedy="extend the request before the step that writes them",
        )
    known = opened.chain.tokens[first : first + len(added)]
    if len(known) and not np.array_equal(known, added[: len(known)]):
        at = int(np.argmax(known != added[: len(known)]))
        raise InputError(
            f"token {first + at} was committed as {added[at]}",
            limit=f"{known[at]}, which the prompt of request {request!r} has there",
        )
    if opened.states and len(added) != (opened.bound or 0):
        raise InputError(
            f"{len(added)} tokens of request {request!r} were committed",
            limit=f"{opened.bound or 0}, as the step computed: a state cannot be cut",
            remedy="bind and commit the same count; draft only with models without states",
        )
