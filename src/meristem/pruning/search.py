"""Taking heads out of a model one after another, the one next whose loss is missed least.

An estimate ranks all heads at once; those it puts first are left out one by one and the loss is measured; then the best
of these leave, and the next round begins.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meristem.bench.decode import model_rate
from meristem.decoding import release
from meristem.devices import autocast
from meristem.gauges.probe import Batch, heads_read, look, writing
from meristem.gauges.redundancy import HeadMoments, head_moments
from meristem.growth.apply import apply_edit
from meristem.growth.edits import DOWN, RemoveGroup, RemoveHead, SetFeedForward
from meristem.growth.events import GrowthEvent
from meristem.model import Decoder, Transformer
from meristem.pruning.refit import refit
from meristem.pruning.rows import Rows
from meristem.pruning.settings import Budget, PruneSettings, Sizes, fewest_groups, group_size
from meristem.records import finite

ROUNDS = 24  # in which all heads could leave
TIMES = 8  # that the feed-forward layers would be refitted, and the speed measured, meanwhile
SPARE = 2  # so many more heads are left out and measured than leave in a round, and as many again as leave
TRIED = 8192  # tokens at least, on which heads are told apart
GRADIENTS = 1  # of the shown batches, from which gradients are taken
WRITTEN, CALLS = 32, 3  # tokens, and times that they are written, to see how fast a model is

MET, LIMIT, LEAST = "the budget is met", "the loss would rise by more than the tolerance", "no more heads can leave"
REFIT = "the feed-forward layers take over what they can"
RULES = {
    "measured": "the loss misses it least, with the other heads in its place",
    "random": "drawn at random, as a control",
    "norm": "its weights are the smallest, as a control",
}

Report = Callable[[str, int, int], None]  # told what is being done, how far it is, and of how much


@dataclass(frozen=True)
class Group:
    """Heads of a layer that leave together, by the numbers they had at first: one, or all that share a key."""

    layer: int
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """The loss without a group, and the output projection (d, heads e) that then stands in for it, its part zero."""

    group: Group
    loss: float
    out: Tensor


@dataclass(frozen=True)
class Point:
    """A size on the way: what the model has, its loss on rows set aside, and tokens per second where measured."""

    sizes: Sizes
    loss: float
    tokens_per_second: float | None = None
    changes: int = 0  # that lead here


@dataclass(frozen=True)
class Change:
    """What was done to the model, and the event that tells of it: a group that left, or none."""

    edit: RemoveHead | RemoveGroup | SetFeedForward
    event: GrowthEvent
    group: Group | None = None


@dataclass
class Search:
    """A model that becomes smaller, and everything that was found on the way.

    `points` has the model at the start and after every removal; `changes` lead from one to the next.
    """

    model: Transformer
    rows: Rows
    settings: PruneSettings
    step: int  # that events are of
    device: torch.device
    report: Report = lambda what, done, total: None
    timed: bool = True  # whether to see how fast the model writes, every few heads
    points: list[Point] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.model.plan
        self.refused = math.inf  # the least rise of the loss at which a head had to stay, when none could leave
        self.left = [list(range(heads)) for heads in plan.heads]  # by layer, the numbers that heads had at first
        self.sizes = [group_size(plan, layer) for layer in range(len(plan.layers))]
        self.fewest = [fewest_groups(plan, layer) for layer in range(len(plan.layers))]
        groups = sum(len(heads) // size for heads, size in zip(self.left, self.sizes, strict=True))
        self.per_round, self.per_time = max(1, groups // ROUNDS), max(1, groups // TIMES)
        self.moments: list[HeadMoments] = []
        self.whole = copy.deepcopy(self.model) if self.settings.fold else None
        self.settled = 0  # the last point that was refitted and timed
        self.tried = _some(self.rows.aside)
        self.controls = self._controls()
        self.points.append(Point(Sizes.of(plan), self.loss(), self._speed()))

    @property
    def start(self) -> float:
        """The loss of the model as it was."""
        return self.points[0].loss

    def put(self, device: torch.device) -> None:
        """Move what takes much memory elsewhere, or back."""
        for model in (self.model, self.whole):
            if model is not None:
                model.to(device)

    def to(self, budget: Budget | None, tolerance: float) -> str:
        """Take heads out until a budget is met or the loss would have risen by more than `tolerance`; why it ended."""
        ended = ""
        while not ended:
            met = budget is not None and budget.is_met(self.model.plan)
            ended = MET if met else self._round(budget, tolerance)
            since = len(self.points) - 1 - self.settled
            if since >= (1 if ended else self.per_time):
                gained = self._settle()
                ended = "" if ended == LIMIT and gained else ended  # there may be room for another one now
        return ended

    def _settle(self) -> bool:
        """Let the feed-forward layers take over what they can, and see how fast the model is; whether the loss fell."""
        self.settled = len(self.points) - 1
        gained = False
        if self.whole is not None:
            before = self.points[-1].loss
            kept = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items() if DOWN in name}
            edit = refit(self.model, self.whole, self.rows.shown, self.device)
            after = self.loss()
            gained = after < before
            if gained:
                facts = {"loss_before": finite(before), "loss_after": finite(after)}
                event = GrowthEvent(self.step, "prune", "refit", REFIT, None, facts, self.model.plan.digest)
                self.changes.append(Change(edit, event))
                self.points[-1] = replace(self.points[-1], loss=after, changes=len(self.changes))
            else:
                self.model.load_state_dict(kept, strict=False)
        self.points[-1] = replace(self.points[-1], tokens_per_second=self._speed())
        return gained

    def _round(self, budget: Budget | None, tolerance: float) -> str:
        """Rank all heads, and take out the best of them; why that cannot be, if so."""
        groups = self._ranked(budget)
        removed, refused = 0, math.inf
        for group in groups:
            met = budget is not None and budget.is_met(self.model.plan)
            if removed == self.per_round or met:
                break
            trial = self._trial(group, self.rows.aside) if self._may_leave(group.layer) else None
            if trial is not None and trial.loss - self.start <= tolerance:
                self._remove(trial)
                removed += 1
                continue
            if trial is not None:
                refused = min(refused, trial.loss - self.start)
            if removed or self.settings.order != "measured":
                break  # what is best now has to be seen anew, and a control has no other choice
        self.refused = math.inf if removed else refused
        return "" if removed else LIMIT if groups else LEAST

    @torch.no_grad()
    def loss(self, model: Transformer | None = None) -> float:
        """The mean loss of a model, this one unless another is given, on the rows set aside."""
        return mean_loss(model or self.model, self.rows.aside, self.device)

    # --- which heads go first --------------------------------------------------------------------------------------

    def _ranked(self, budget: Budget | None) -> list[Group]:
        """The groups that may leave next, best first; of a control, those of a round in its order."""
        groups = [
            group for layer in range(len(self.left)) if self._may_leave(layer) for group in self._groups(layer)
            if not self._is_looped(group) and self._saved(group, budget) > 0
        ]  # fmt: skip
        if not groups:
            return []
        self.moments = self._moments()
        if self.settings.order != "measured":
            return sorted(groups, key=lambda group: self.controls[group])[: self.per_round]
        estimates = self._estimates(groups)
        groups.sort(key=lambda group: estimates[group] / self._saved(group, budget))
        now = mean_loss(self.model, self.tried, self.device)
        trials = [self._trial(group, self.tried) for group in groups[: 2 * self.per_round + SPARE]]
        known = [trial for trial in trials if math.isfinite(trial.loss)]
        known.sort(key=lambda trial: (trial.loss - now) / self._saved(trial.group, budget))
        return [trial.group for trial in known]

    def _estimates(self, groups: Sequence[Group]) -> dict[Group, float]:
        """By how much the loss would rise without each group, to second order.

        What others cannot stand in for is taken away from each token, and half the square of what the gradient makes of
        it counts (the empirical Fisher information). The first order is left out: of a trained model it is noise.
        """
        sums = dict.fromkeys(groups, torch.zeros((), device=self.device))
        layers = sorted({group.layer for group in groups})
        inverses = {layer: self.moments[layer].inverse() for layer in layers if self.settings.fold}
        terms = 0
        for tokens, targets in self.rows.shown[:GRADIENTS]:
            with autocast(self.device):
                seen = look(self.model, tokens, targets)
            terms += targets.numel()
            for layer in layers:
                out = self.model.stack[layer].attention.out.weight.detach().float()
                read = seen.heads.head_outputs[layer].transpose(1, 2).flatten(2).float()
                asked = seen.gradients[layer].float() @ out
                inverse = inverses.get(layer)
                missed = read if inverse is None else read @ inverse.float()
                for group in (group for group in groups if group.layer == layer):
                    own = self._columns(group)
                    part = missed[..., own]
                    if inverse is not None:  # the residual of a regression on the others, by a block of the inverse
                        part = part @ torch.linalg.inv(inverse[own, own]).float()
                    sums[group] = sums[group] + (asked[..., own] * part).sum(-1).square().sum() / 2
        values = torch.stack([sums[group] for group in groups]) / terms
        known = [value if math.isfinite(value) else math.inf for value in values.tolist()]
        return dict(zip(groups, known, strict=True))

    def _controls(self) -> dict[Group, float]:
        """What the orders that are controls go by: a random number, or the norm of all weights of a group."""
        groups = [group for layer in range(len(self.left)) for group in self._groups(layer)]
        drawn = random.Random(self.settings.seed)
        if self.settings.order == "random":
            return {group: drawn.random() for group in groups}
        return {group: self._norm(group) for group in groups} if self.settings.order == "norm" else {}

    def _norm(self, group: Group) -> float:
        layer, attention = self.model.plan.layers[group.layer], self.model.stack[group.layer].attention
        e, (first, *_), size = layer.head_dim, group.heads, len(group.heads)
        queries, keys, values = attention.qkv.weight.split((layer.query_width, layer.kv_width, layer.kv_width))
        parts = [queries[first * e : (first + size) * e], attention.out.weight[:, first * e : (first + size) * e]]
        if layer.kv_heads > 1 or layer.heads == 1:  # else all heads share them
            pair = slice(first // size * e, (first // size + 1) * e)
            parts += [keys[pair], values[pair]]
        return float(torch.stack([part.detach().float().square().sum() for part in parts]).sum().sqrt())

    # --- leaving a head out ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _trial(self, group: Group, batches: Sequence[Batch]) -> Trial:
        """What the loss is without a group, on some batches: nothing else changes."""
        self.report("heads left", self.points[-1].sizes.heads, self.points[0].sizes.heads)
        weight = self.model.stack[group.layer].attention.out.weight.detach()
        out = weight.clone()
        out[:, self._columns(group)] = 0
        if self.settings.fold:
            folded = self.moments[group.layer].folded(weight, self._first(group), len(group.heads))
            out = folded if bool(folded.isfinite().all()) else out
        with writing([self.model.stack[group.layer].attention.out.weight], [out]):
            return Trial(group, mean_loss(self.model, batches, self.device), out)

    def _remove(self, trial: Trial) -> None:
        """Take a group out for good."""
        group, plan = trial.group, self.model.plan
        first, size = self._first(group), len(group.heads)
        edit: RemoveHead | RemoveGroup
        out = trial.out.cpu()
        if self.sizes[group.layer] > 1:
            edit = RemoveGroup(group.layer, first // size, out)
        else:
            edit = RemoveHead(group.layer, first, out)
        moves = apply_edit(self.model, None, edit)
        if self.moments:
            self.moments[group.layer] = self.moments[group.layer].without(first, size)
        self.left[group.layer] = [head for head in self.left[group.layer] if head not in group.heads]
        facts: dict[str, Any] = {
            "head": first, "heads": list(self.model.plan.heads), "order": self.settings.order,
            "loss_with": finite(self.points[-1].loss), "loss_without": finite(trial.loss),
            "heads_at_first": list(group.heads),
        }  # fmt: skip
        event = GrowthEvent(
            self.step, "prune", "removal", RULES[self.settings.order], group.layer, facts, self.model.plan.digest,
            moves.to_dict(),
        )  # fmt: skip
        assert plan != self.model.plan
        self.changes.append(Change(edit, event, group))
        self.points.append(Point(Sizes.of(self.model.plan), trial.loss, changes=len(self.changes)))

    # --- parts -----------------------------------------------------------------------------------------------------

    def _moments(self) -> list[HeadMoments]:
        """What heads read, side by side; nothing where the others are not to stand in."""
        if not self.settings.fold:
            return []
        with autocast(self.device):
            return head_moments(heads_read(self.model, *batch) for batch in self.rows.shown[: self.rows.enough])

    def _groups(self, layer: int) -> list[Group]:
        heads, size = self.left[layer], self.sizes[layer]
        return [Group(layer, tuple(heads[start : start + size])) for start in range(0, len(heads), size)]

    def _may_leave(self, layer: int) -> bool:
        return len(self.left[layer]) // self.sizes[layer] > self.fewest[layer]

    def _is_looped(self, group: Group) -> bool:
        loop, first = self.model.plan.layers[group.layer].loop, self._first(group)
        return loop is not None and bool(set(loop.heads) & set(range(first, first + len(group.heads))))

    def _saved(self, group: Group, budget: Budget | None) -> int:
        """What the budget gains when a group leaves; of heads, if there is none."""
        if budget is None or budget.size == "heads":
            return len(group.heads)
        plan, size = self.model.plan, len(group.heads)
        layer = plan.layers[group.layer]
        kv_heads = layer.kv_heads - (1 if layer.kv_heads > 1 else 0)
        smaller = plan.with_layer(group.layer, replace(layer, heads=layer.heads - size, kv_heads=kv_heads, loop=None))
        bare = plan.with_layer(group.layer, replace(layer, loop=None))
        return budget.of(bare) - budget.of(smaller)

    def _first(self, group: Group) -> int:
        """The number that the first head of a group has now."""
        return self.left[group.layer].index(group.heads[0])

    def _columns(self, group: Group) -> slice:
        first, dim = self._first(group), self.model.plan.head_dims[group.layer]
        return slice(first * dim, (first + len(group.heads)) * dim)

    def _speed(self) -> float | None:
        """Tokens per second of a single text; None if not asked for, of a classifier, and of a context of one token."""
        context = self.model.plan.context
        if not self.timed or not isinstance(self.model, Decoder) or context < 2:
            return None
        prompt = min(WRITTEN, context // 2)
        tokens = min(WRITTEN, context - prompt)
        rate = model_rate(self.model, self.device, prompt=prompt, tokens=tokens, calls=CALLS)
        release(self.model)
        return rate


def _some(batches: list[Batch]) -> list[Batch]:
    """Enough of the batches to tell heads apart: so many tokens, and a quarter of all."""
    some: list[Batch] = []
    for batch in batches:
        if sum(tokens.numel() for tokens, _ in some) < TRIED or 4 * len(some) < len(batches):
            some.append(batch)
    return some


@torch.no_grad()
def mean_loss(model: Transformer, batches: Sequence[Batch], device: torch.device) -> float:
    """The mean loss over the sequences of some batches."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tokens, targets in batches:
        with autocast(device):
            total += model.loss(tokens, targets).double() * len(tokens)
    return float(total) / sum(len(tokens) for tokens, _ in batches)
