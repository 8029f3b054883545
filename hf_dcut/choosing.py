"""Logits -> the target's token of each packed row: the request's processors, then the likeliest token or a draw.

Every row is judged on its own prefix: the prompt with its left padding, the tokens so far, and the drafts before it.
Two ways, by what a request's processors look at:

    scores alone (temperature, top-k, top-p, ..)   all rows of all such requests in one call
    anything else (penalties, bans, grammars, ..)  walked: one row after the other, one call each, going on only while
                                                   the drafts are what was chosen, so that a processor with a state is
                                                   called once for every committed token, in order, and never sees a
                                                   rejected prefix

A draw takes one number keyed by the request's seed and the token's position, so it is the same however many drafts
were verified along with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_dcut.noise import Purpose, noise
from hf_dcut.requests import Request
from hf_dcut.types import Choice, Packed, Proposal

# Processors of Transformers that read neither the ids nor any state.
_SCORES_ALONE = {
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    )
}


def reads_scores_alone(processors: LogitsProcessorList) -> bool:
    """Returns whether none of the processors looks at ids or keeps a state."""
    return all(type(processor) in _SCORES_ALONE for processor in processors)


def choose(logits: Tensor, packed: Packed, requests: Sequence[Request], proposal: Proposal | None = None) -> Choice:
    """Returns the target's token of every row whose logits are there.

    Args:
        logits: [L, V] of the rows `packed.logit_rows`. Cast to float32 as `generate` does, so that ties break alike.
        packed: the row.
        requests: its R requests, in order.
        proposal: the distribution the row's drafts were drawn from; None for greedy drafts.
    """
    scores = logits.float()
    if not any(request.processors or request.samples for request in requests):
        return Choice(scores.argmax(dim=-1), scores)
    token = packed.token.new_full((len(scores),), -1)
    # Rows of requests that share their processors go together; a request that is walked stays alone.
    together: dict[tuple[int, bool], list[tuple[Request, slice]]] = {}
    processed = scores.clone()
    for request, rows in zip(requests, packed.logit_spans(), strict=True):
        if rows.start == rows.stop:
            continue
        if request.walks:
            with request.own_faults():
                _walk(request, rows, packed, processed, token)
        else:
            together.setdefault((id(request.processors), request.samples), []).append((request, rows))
    for group in together.values():
        _choose_together(group, packed, processed, token)
    if proposal is not None:
        token = _reject(token, processed, packed, requests, proposal)
    return Choice(token, processed)


def _choose_together(group: Sequence[tuple[Request, slice]], packed: Packed, processed: Tensor, token: Tensor) -> None:
    """Fills in `processed` and `token` of requests that share processors which look at scores alone.

    Where that fails they are taken one by one, which no such processor notices, so that only the culprit fails.
    """
    request = group[0][0]
    index = torch.cat([torch.arange(rows.start, rows.stop) for _, rows in group]).to(token.device)
    seed = torch.cat([token.new_full((rows.stop - rows.start,), request.seed) for request, rows in group])
    try:
        scores = _process(request.processors, token.new_empty(len(index), 0), processed[index])
        token[index] = _pick(request, scores, seed, packed.cell[packed.logit_rows[index]] + 1)
        processed[index] = scores
    except RuntimeError:
        if len(group) > 1:
            for member in group:
                _choose_together([member], packed, processed, token)
            return
        with request.own_faults():
            raise


def draw(
    scores: Tensor,
    seed: Tensor,
    position: Tensor,
    purpose: Purpose = Purpose.TARGET,
    source: str = "the scores",
) -> Tensor:
    """Returns one token a row, int64 [n], drawn from the softmax of its scores.

    The number in (0, 1) is looked up in the cumulated probabilities, in float64. Tokens of no probability never come.

    Args:
        scores: float32 [n, V].
        seed: int64 [n], of the row's request.
        position: int64 [n], of the token that is drawn.
        purpose: what the number is for.
        source: where the scores come from, for the error.

    Raises:
        RuntimeError: scores that are no distribution, as in `generate`.
    """
    reach = scores.softmax(dim=-1).double().cumsum(dim=-1)
    if not reach[:, -1].isfinite().all():
        raise RuntimeError(f"{source} are no distribution: they hold inf or nan, or ban every token")
    height = noise(seed, position, purpose) * reach[:, -1]
    return torch.searchsorted(reach, height[:, None], right=True)[:, 0].clamp_max(scores.shape[-1] - 1)


def warp(request: Request, scores: Tensor) -> Tensor:
    """Returns scores float32 [n, V] under a request's processors, which must look at scores alone."""
    assert not request.walks, "these processors need each row's own prefix"
    return _process(request.processors, torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device), scores)


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


def _walk(request: Request, rows: slice, packed: Packed, processed: Tensor, token: Tensor) -> None:
    """Fills in `processed` and `token` of a request's rows, up to the first whose draft is not chosen, or an end."""
    ids = torch.tensor([request.padded_ids], device=token.device)
    drafts = packed.token[packed.logit_rows[rows]].tolist()[1:]
    seed = token.new_full((1,), request.seed)
    for row, draft in zip(range(rows.start, rows.stop), [*drafts, None], strict=True):
        processed[row] = _process(request.processors, ids, processed[row : row + 1])[0]
        position = packed.cell[packed.logit_rows[row : row + 1]] + 1
        token[row] = _pick(request, processed[row : row + 1], seed, position)[0]
        # One more host read a token: what is chosen here decides whether the next row is looked at.
        chosen = int(token[row])
        if chosen != draft or chosen in request.eos:
            return
        ids = torch.cat([ids, ids.new_tensor([[chosen]])], dim=1)


def _process(processors: LogitsProcessorList | None, ids: Tensor, scores: Tensor) -> Tensor:
    """Returns the processed scores; those given are not written to, since recorded scores may be the same memory."""
    if not processors:
        return scores
    processed = processors(ids, scores.clone())
    if processed.shape != scores.shape:
        shapes = f"{tuple(scores.shape)} into {tuple(processed.shape)}"
        raise ValueError(
            f"logits_processor ({_names(processors)}) turned scores of shape {shapes}: return the shape it is given"
        )
    return processed


def _pick(request: Request, scores: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    if not request.samples:
        return scores.argmax(dim=-1)
    source = f"the scores of {_names(request.processors)}" if request.processors else "the model's logits"
    return draw(scores, seed, position, source=source)


def _names(processors: LogitsProcessorList) -> str:
    return ", ".join(type(processor).__name__ for processor in processors)
