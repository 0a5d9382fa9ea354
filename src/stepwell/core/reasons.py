"""Why a prefix was reused no further: one closed set of codes.

Every answer about reuse carries exactly one code, the first cause that stopped it.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The first cause that ended the reused prefix."""

    WHOLE_PREFIX = "whole_prefix"
    """Every page that may be reused was; the rest must be computed by rule."""
    BELOW_A_PAGE = "below_a_page"
    """The prompt has no full page before its last token."""
    NOT_SEALED = "not_sealed"
    """The next page is not here: never sealed under this namespace, or evicted since."""
    TOKENS_DIFFER = "tokens_differ"
    """A page has the key but other tokens: a collision of keys, refused."""
    NO_BOUNDARY = "no_boundary"
    """Pages go on, but from none of their ends can every group: a window or a state is not here. Usual for
    the second prompt that shares a beginning under a model with recurrent layers; the next one hits."""
    BELOW_MINIMUM = "below_minimum"
    """What could be reused is shorter than `pool.minimum_hit_tokens`."""
    CONTIGUOUS = "contiguous"
    """The pool is contiguous: requests share nothing."""
    NEEDS_LOGITS = "needs_logits"
    """The request wants the log-probabilities of its prompt, so every token is computed."""
    NO_READ = "no_read"
    """The request asked not to reuse."""
    ADAPTER_UNKNOWN = "adapter_unknown"
    """An adapter is in use whose digest is not known: nothing is reused or sealed."""
    TIER_DOWN = "tier_down"
    """The tier that may have it has failed several times, and is left alone for a while."""
