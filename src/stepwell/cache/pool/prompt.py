"""What a caller may hand over as a prompt, made into a chain of the pool's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from stepwell.base.errors import InputError
from stepwell.core.chain import Chain
from stepwell.core.key import Namespace

Prompt = Iterable[int] | npt.NDArray[Any] | Chain


def chain_of(
    prompt: Prompt, namespace: Namespace | None, page_tokens: int, secret: bytes | None
) -> Chain:
    """A chain that the caller does not share.

    Args:
        prompt: token ids, or a chain, which is forked.
        namespace: required with token ids; a chain has its own.
        page_tokens: of the pool.
        secret: of the deployment, for token ids.

    Raises:
        InputError: no namespace, pages of another size, something that is no prompt.
    """
    if not isinstance(namespace, Namespace | None):
        raise InputError(f"namespace is {namespace!r}", limit="a stepwell.Namespace")
    if isinstance(prompt, Chain):
        chain = prompt.fork()
    elif namespace is None:
        raise InputError("token ids come without a namespace", remedy="pass namespace=...")
    else:
        chain = Chain(namespace, prompt, secret=secret)
    if chain.namespace.page_tokens != page_tokens:
        raise InputError(
            f"the namespace has pages of {chain.namespace.page_tokens} tokens",
            limit=f"{page_tokens}, as this pool",
        )
    return chain
