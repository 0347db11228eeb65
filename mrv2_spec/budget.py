"""How many drafts a step verifies: a pure function of host numbers."""

from bisect import bisect_left
from collections.abc import Sequence


def choose_draft_budget(
    *,
    num_non_draft_tokens: int,
    num_scheduled_drafts: int,
    num_real_drafts: int,
    max_draft_budget: int,
    min_tokens: int,
    graph_sizes: Sequence[int],
) -> int:
    """Choose the number of draft places of a step.

    As many as were real when last heard of, grown for nothing: up to ``min_tokens``
    in all, and up to the captured graph size that the step is padded to anyway. A step
    without any real draft stays a plain decode step, unless it is that small.

    Args:
        num_non_draft_tokens: scheduled tokens that are no drafts.
        num_scheduled_drafts: scheduled draft places.
        num_real_drafts: of these, how many were real some steps ago.
        max_draft_budget: no more than this many.
        min_tokens: a step of up to this many tokens costs as much as a smaller one.
        graph_sizes: ascending token counts of the captured graphs, or empty.

    Returns:
        A number from 0 to ``min(num_scheduled_drafts, max_draft_budget)``.
    """
    num_tokens = num_non_draft_tokens + num_real_drafts
    if num_tokens < min_tokens:
        num_tokens = min_tokens
    elif num_real_drafts == 0:
        return 0
    size = bisect_left(graph_sizes, num_tokens)
    if size < len(graph_sizes):
        num_tokens = graph_sizes[size]
    budget = min(num_tokens - num_non_draft_tokens, num_scheduled_drafts)
    return max(0, min(budget, max_draft_budget))
