"""Logits -> the target's token of each packed row: the request's processors, then the likeliest token or a draw.

Every row is judged on its own prefix: the prompt with its left padding, the tokens so far, and the drafts before it.
Processors are applied in three tiers, by what they look at:

    scores alone   temperature, top-k, ..       all rows of all requests that share the list go through each processor
    the text       penalties, bans, lengths     at once, rejected ones too (`tiers.py`)

    anything else  grammars, the user's own     walked, with all that is behind it on the list: row after row, one call
                                                each, going on only while the drafts are what was chosen and the request
                                                does not end, so that a processor with a state is called once for every
                                                committed token, in order, and never sees a rejected prefix

A draw takes one number keyed by the request's seed and the token's position, so it is the same however many drafts
were verified along with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hf_dcut.acceptance import accept
from hf_dcut.noise import Purpose, noise
from hf_dcut.requests import Request
from hf_dcut.tiers import Prefixes, align, process, reads_scores_alone
from hf_dcut.types import Choice, Packed, Proposal

# In place of a token: nobody looked at the row; its scores are no distribution that a token could be drawn from.
UNSEEN, BROKEN = -1, -2

# A request and its rows among the logits, of which there is at least one.
Asked = tuple[Request, slice]


def choose(logits: Tensor, packed: Packed, requests: Sequence[Request], proposal: Proposal | None = None) -> Choice:
    """Returns the target's token of every row whose logits are there.

    Args:
        logits: [L, V] of the rows `packed.logit_rows`. Cast to float32 as `generate` does, so that ties break alike.
        packed: the row.
        requests: its R requests, in order.
        proposal: the distribution the row's drafts were drawn from; None for greedy drafts.

    Raises:
        RuntimeError: a token is to be drawn where no distribution is, as in `generate`.
        ValueError: a processor returns scores of another shape.
    """
    scores = logits.float()
    if takes_likeliest(requests):
        return Choice(scores.argmax(dim=-1), scores)
    spans = zip(requests, packed.logit_spans(), strict=True)
    asked = [(request, span) for request, span in spans if span.start < span.stop]
    scores = _process(scores, packed, asked)
    token = scores.argmax(dim=-1)
    drawn = [(request, span) for request, span in asked if request.samples and not request.walked]
    if drawn:
        rows = _rows(drawn, token.device)
        seed = torch.cat([token.new_full((span.stop - span.start,), request.seed) for request, span in drawn])
        token[rows] = draw(scores[rows], seed, packed.text_cells()[packed.logit_rows[rows]] + 1)
    for request, span in asked:
        if request.walked:
            with request.own_faults():
                _walk(request, span, packed, scores, token)
    if proposal is not None:
        token = _reject(token, scores, packed, requests, proposal)
    _check(token, packed, requests)
    return Choice(token, scores, _logprobs(scores, token) if any(r.keeps_logprobs for r in requests) else None)


def takes_likeliest(requests: Sequence[Request]) -> bool:
    """Returns whether the target's token is the likeliest after every row, as the model's logits say."""
    return not any(r.processors or r.walked or r.samples or r.keeps_logprobs for r in requests)


def branches(request: Request) -> bool:
    """Returns whether a request's drafts may be a tree: whoever looks at the text is given chains."""
    return not request.walked and reads_scores_alone(request.processors or ())


def draw(scores: Tensor, seed: Tensor, position: Tensor, purpose: Purpose = Purpose.TARGET) -> Tensor:
    """Returns one token a row, int64 [n], drawn from the softmax of its scores; `BROKEN` where that is none.

    The number in (0, 1) is looked up in the cumulated probabilities, in float64. Tokens of no probability never come.

    Args:
        scores: float32 [n, V].
        seed: int64 [n], of the row's request.
        position: int64 [n], of the token that is drawn.
        purpose: what the number is for.
    """
    reach = scores.softmax(dim=-1).double().cumsum(dim=-1)
    height = noise(seed, position, purpose) * reach[:, -1]
    token = torch.searchsorted(reach, height[:, None], right=True)[:, 0].clamp_max(scores.shape[-1] - 1)
    return token.masked_fill(~reach[:, -1].isfinite(), BROKEN)


def warp(request: Request, scores: Tensor) -> Tensor:
    """Returns scores float32 [n, V] under a request's processors, which must look at scores alone."""
    assert not request.walked, "these processors need each row's own prefix"
    return process(request.processors or (), scores)


def _process(scores: Tensor, packed: Packed, asked: Sequence[Asked]) -> Tensor:
    """Returns scores float32 [L, V] after the first two tiers: a call a processor for all requests that share a list.

    Those given are not written to, since recorded logits may be the same memory.
    """
    together: dict[int, list[Asked]] = {}
    for request, span in asked:
        if request.processors:
            together.setdefault(id(request.processors), []).append((request, span))
    scores = scores.clone()
    for group in together.values():
        rows, processors = _rows(group, scores.device), group[0][0].processors or ()
        prefixes = None if reads_scores_alone(processors) else _prefixes(packed, group)
        scores[rows] = process(processors, scores[rows], prefixes)
    return scores


def _prefixes(packed: Packed, asked: Sequence[Asked]) -> Prefixes:
    """Returns the text before each row of some requests."""
    texts, lengths, row = [], [], []
    for request, span in asked:
        text, drafts = request.text(packed.token.device)[0], packed.token[packed.logit_rows[span][1:]]
        texts.append(torch.cat([text, drafts]))
        lengths.append(range(len(text), len(text) + len(drafts) + 1))
        row += [request.row] * (len(drafts) + 1)
    return Prefixes(*align(texts, lengths), row)


def _walk(request: Request, span: slice, packed: Packed, scores: Tensor, token: Tensor) -> None:
    """Fills in `scores` and `token` of a request's rows, up to the first whose draft is not chosen, or an end."""
    rows = range(span.start, span.stop)
    drafts = packed.token[packed.logit_rows[span][1:]].tolist()
    seed = token.new_full((1,), request.seed)
    ahead: list[int] = []
    token[span] = UNSEEN
    for row, draft in zip(rows, [*drafts, None], strict=True):
        own = slice(row, row + 1)
        scores[own] = _walked(request, request.text(token.device, ahead), scores[own])
        position = packed.cell[packed.logit_rows[own]] + 1
        token[own] = draw(scores[own], seed, position) if request.samples else scores[own].argmax(dim=-1)
        # One more host read a token: what is chosen here decides whether the next row is looked at.
        ahead.append(int(token[row]))
        if ahead[-1] != draft or request.ending(ahead, scores[span]):
            return


def _walked(request: Request, ids: Tensor, scores: Tensor) -> Tensor:
    """Returns the scores, float32 [1, V], after the processors that are walked."""
    assert request.walked is not None
    processed = request.walked(ids, scores.clone())
    if processed.shape != scores.shape:
        shapes = f"{tuple(scores.shape)} into {tuple(processed.shape)}"
        raise ValueError(
            f"logits_processor ({_names(request.walked)}) turned scores of shape {shapes}: return the shape it is given"
        )
    return processed


def _reject(
    token: Tensor, processed: Tensor, packed: Packed, requests: Sequence[Request], proposal: Proposal
) -> Tensor:
    """Returns tokens int64 [L] by rejection sampling, for rows that have a drawn draft behind them.

    A draft x is kept with probability min(1, p(x) / q(x)); else a token is drawn from what p has over q (Leviathan et
    al., 2023). There p(x) < q(x), so that token is never x, and "the target chose the draft" still means accepted.
    The last row of a request has no draft behind it: its token is drawn from p, as it stands in `token`.

    Args:
        token: int64 [L], draws from p.
        processed: float32 [L, V], scores of p.
        packed, requests, proposal: as in `choose`.
    """
    rows = torch.arange(int(packed.start[packed.decoding]), device=token.device)
    request = torch.searchsorted(packed.start[1 : packed.decoding + 1].long(), rows, right=True)
    behind = rows + 1 < packed.start[request + 1]
    rows, request = rows[behind], request[behind]
    draft = packed.token[rows + 1]
    p, q = processed[rows].softmax(dim=-1), proposal.probability[request, packed.node[rows] + 1]
    seed = torch.tensor([r.seed for r in requests], device=token.device)[request]
    position = packed.cell[rows] + 1
    height = noise(seed, position, Purpose.ACCEPT)
    p_draft, q_draft = p.gather(1, draft[:, None])[:, 0], q.gather(1, draft[:, None])[:, 0]
    # The residual of p = q is empty, but then nothing is rejected.
    residual = (p - q).clamp_min(0.0)
    residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, p)
    recovered = draw(residual.log(), seed, position, Purpose.RECOVER)
    token = token.clone()
    token[rows] = torch.where(height * q_draft < p_draft, draft, recovered)
    return token


def _logprobs(scores: Tensor, token: Tensor) -> Tensor:
    """Returns the log-probability of each token under its scores, float32 [L]; anything for rows without a token."""
    return scores.log_softmax(dim=-1).gather(1, token.clamp_min(0)[:, None])[:, 0]


def _check(token: Tensor, packed: Packed, requests: Sequence[Request]) -> None:
    """Raises RuntimeError for a request that is to draw where no distribution is, behind no rejected draft."""
    if not any(request.samples for request in requests) or not (token == BROKEN).any():
        return
    for request, following in zip(requests, accept(token, packed).next.tolist(), strict=True):
        if following == BROKEN:
            used = [*(request.processors or ()), *(request.walked or ())]
            source = f"the scores of {_names(used)}" if used else "the model's logits"
            with request.own_faults():
                raise RuntimeError(f"{source} are no distribution: they hold inf or nan, or ban every token")


def _rows(asked: Sequence[Asked], device: torch.device) -> Tensor:
    """Returns the rows of some requests among the logits, int64 [n]."""
    return torch.tensor([row for _, span in asked for row in range(span.start, span.stop)], device=device)


def _names(processors: Iterable[object]) -> str:
    return ", ".join(type(processor).__name__ for processor in processors)
