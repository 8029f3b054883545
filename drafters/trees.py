"""Draft trees: of each request the likeliest continuations, side by side, instead of a single one.

A block drafter says for each place of its block how likely every token is. The likeliest token of each is a chain; but
where the drafter is unsure, the second likeliest is worth a place in the budget more than the tenth token of a chain
that will hardly get so far. The probability of a path is the product of its tokens' (the places do not depend on each
other), so the best tree of N nodes is that of the N likeliest paths, as in DDTree (arXiv 2604.12989). Drafts of several
drafters become one tree by joining the paths that they share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dcut.branching import ancestors_of, parents
from hf_dcut.kernels import survivals
from hf_dcut.types import Drafts


def grow(token: Tensor, probability: Tensor, nodes: int) -> Drafts:
    """Returns the tree of the likeliest paths through a block, from the likeliest node to the least.

    Args:
        token: int64 [B, D, C], candidates of each place, different ones.
        probability: float32 [B, D, C], of each.
        nodes: N.
    """
    rows, depth, width = token.shape
    survival = probability.new_ones(rows, 1)
    levels, first = [], -1
    for place in range(min(depth, nodes)):
        # Of paths of k tokens, N - k + 1 at most are among the N likeliest: each has all before its last token too.
        paths = (survival[:, :, None] * probability[:, place, None]).flatten(1)
        survival, path = paths.topk(min(paths.shape[1], nodes - place))
        levels.append((token[:, place].gather(1, path % width), path // width + first, survival))
        first = first + levels[-2][0].shape[1] if place else 0
    tokens, parent, survival = (torch.cat(column, 1) for column in zip(*levels, strict=True))
    return likeliest(tokens, parent, survival, nodes)


def merge(offers: Sequence[Drafts], nodes: int) -> Drafts:
    """Returns one tree of the likeliest nodes of several drafts of the same requests.

    A path that several of them propose is as likely as the one that is surest of it says.

    Args:
        offers: chains or trees.
        nodes: N.
    """
    sizes = [drafts.token.shape[1] for drafts in offers]
    token = torch.cat([drafts.token for drafts in offers], 1)
    survival = torch.cat([_survivals(drafts) for drafts in offers], 1)
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    own = [parents(drafts) for drafts in offers]
    parent = torch.cat([torch.where(p < 0, p, p + first) for p, first in zip(own, firsts, strict=True)], 1)
    paths = _paths(token, parent, max(sizes))
    same = (paths[:, :, None] == paths[:, None]).all(-1)
    # The first of the likeliest stands for all that are the same.
    twin = torch.where(same, survival[:, None], -torch.inf).argmax(-1)
    place = torch.arange(token.shape[1], device=token.device)
    survival = torch.where(twin == place, survival, -1.0)
    parent = torch.where(parent < 0, parent, twin.gather(1, parent.clamp_min(0)))
    return likeliest(token, parent, survival, nodes)


def likeliest(token: Tensor, parent: Tensor, survival: Tensor, nodes: int) -> Drafts:
    """Returns the likeliest of some nodes that each stand behind their parents or are less likely.

    Args:
        token, parent: int64 [B, M].
        survival: float32 [B, M]; below 0 where there is none.
        nodes: N.
    """
    spare = max(0, nodes - token.shape[1])
    token, parent = (torch.nn.functional.pad(x, (0, spare), value=v) for x, v in ((token, 0), (parent, -1)))
    survival = torch.nn.functional.pad(survival, (0, spare), value=-1.0)
    order = survival.argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order)
    place.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    order = order[:, :nodes]
    token, parent, survival = (x.gather(1, order) for x in (token, parent, survival))
    parent = torch.where(parent < 0, parent, place.gather(1, parent.clamp_min(0)))
    before = torch.nn.functional.pad(survival[:, :-1], (1, 0), value=1.0)
    confidence = torch.where(before > 0, survival / before, before.clamp(0.0, 0.0)).clamp_min(0.0)
    # What is no number counts, so that it is noticed.
    return Drafts(token, (~(survival < 0)).sum(1), confidence, parent)


def _survivals(drafts: Drafts) -> Tensor:
    """Returns the survival of each node, float32 [B, N]; -1 where there is none."""
    real = torch.arange(drafts.token.shape[1], device=drafts.token.device) < drafts.count[:, None]
    return torch.where(real, survivals(drafts.confidence, real), -1.0)


def _paths(token: Tensor, parent: Tensor, longest: int) -> Tensor:
    """Returns the tokens from the anchor to each node, int64 [B, M, longest]; -1 behind its own."""
    ancestors = ancestors_of(parent)
    place = torch.where(ancestors, ancestors.sum(-1)[:, None] - 1, longest)
    paths = token.new_full((*token.shape, longest + 1), -1)
    return paths.scatter_(2, place, token[:, None].expand_as(place))[..., :longest]
