"""What an audit says of hand-made findings, of models whose answer is known, and of runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from commands import Call
from meristem.comparison import PairedDifference, paired_difference
from meristem.data import ByteTokenizer, LabelledData, prepare
from meristem.errors import InputError, RunError
from meristem.evaluation import audit_model as audit_model_module
from meristem.evaluation.audit import Audit, AuditSettings, DemandKind, Gain, HeadFinding, LayerFinding, demand_kind
from meristem.evaluation.audit_model import audit_model, sequence_losses
from meristem.evaluation.audit_run import AUDIT_FILE, audit_run
from meristem.evaluation.audit_text import audit_text, verdict
from meristem.gauges.probe import heads_read
from meristem.gauges.redundancy import head_moments
from meristem.growth.apply import apply_edit
from meristem.growth.births import RelativeDemand
from meristem.growth.edits import RemoveHead
from meristem.growth.head_surgery import head_of
from meristem.growth.policies.incrt import Incrt, IncrtState, LayerDemand
from meristem.model import Classifier, Decoder
from meristem.model.growable import Growable
from meristem.plan import LayerPlan, Loop, Plan
from meristem.runs.run_folder import RunFolder
from meristem.synthetic.known_tasks import SHARPNESS, KnownTask
from meristem.synthetic.student import Student
from training.helpers import EAGER_BIRTHS, copy_run, prepared, prepared_labelled, trained, write_texts

# --- hand-made findings ----------------------------------------------------------------------------------------------

SETTINGS = AuditSettings()  # threshold 0.1 %; the loss is 1, so differences are shares
CALM = RelativeDemand(0.02, 0.01, 0.1)


def between(low: float, high: float) -> PairedDifference:
    return PairedDifference((low + high) / 2, 0.1, low, high, 100)


def head(low: float, high: float, layer: int = 0, number: int = 0) -> HeadFinding:
    return HeadFinding(layer, number, between(0.2, 0.3), between(low, high))


def layer(
    low: float, high: float, *, number: int = 0, extra: float = 1.0, heads: int = 2, demand: RelativeDemand = CALM,
    kind: DemandKind = "small",
) -> LayerFinding:  # fmt: skip
    gain = Gain(between(low, high), between(-0.01, 0.01), between(extra, extra + 0.1))
    return LayerFinding(number, heads, demand, kind, gain)


def made(heads: Sequence[HeadFinding], layers: Sequence[LayerFinding], loss: float = 1.0) -> Audit:
    return Audit(loss, 100, SETTINGS, tuple(heads), tuple(layers))


ENOUGH, WANTING, OPEN = layer(-0.1, 0.0009), layer(0.002, 0.01), layer(0.0005, 0.01)
NEEDED, SPARE, UNSURE = head(0.01, 0.1), head(-0.01, 0.0005), head(-0.01, 0.1)


@pytest.mark.parametrize(
    ("heads", "minimal"),
    [
        ([NEEDED, NEEDED], "yes"),
        ([NEEDED, UNSURE], "not shown"),
        ([UNSURE, SPARE], "no"),
        ([head(1e-7, 1e-6)], "no"),  # certain, and of no weight
        ([head(1e-7, 0.002)], "yes"),
        ([head(math.nan, math.nan)], "not shown"),
    ],
)
def test_minimal(heads: list[HeadFinding], minimal: str) -> None:
    audit = made(heads, [ENOUGH])
    assert audit.minimal == minimal
    assert verdict(audit)[0].startswith(f"minimal: {minimal}. ")


@pytest.mark.parametrize(
    ("layers", "sufficient"),
    [
        ([ENOUGH, ENOUGH], "yes"),
        ([ENOUGH, OPEN], "not shown"),
        ([OPEN, WANTING], "no"),
        ([layer(0.002, 0.01, extra=-0.01)], "no"),  # also where further training may do as well
        ([ENOUGH, replace(ENOUGH, kind="certain")], "no"),
        ([ENOUGH, LayerFinding(1, 1, CALM, "small", None, "kv_heads")], "not shown"),
        ([layer(math.nan, math.nan)], "not shown"),
        ([layer(-0.01, -0.0005)], "yes"),
        ([layer(-0.01, -0.002)], "not shown"),  # the training did harm, and shows nothing
    ],
)
def test_sufficient(layers: list[LayerFinding], sufficient: str) -> None:
    audit = made([NEEDED], layers)
    assert audit.sufficient == sufficient
    assert verdict(audit)[1].startswith(f"sufficient: {sufficient}. ")


def test_shares_are_not_of_next_to_nothing() -> None:
    audit = made([head(5e-6, 9e-6)], [layer(-1e-5, 9e-6)], loss=1e-9)
    assert (audit.unit, audit.minimal, audit.sufficient) == (0.01, "no", "yes")
    assert "Shares of 0.01, as the loss is smaller." in audit_text(audit)


def test_the_verdict_names_what_it_is_about() -> None:
    audit = made([NEEDED, head(-0.1, 1e-4, 0, 1), head(-0.1, 2e-4, 1, 0)], [ENOUGH, replace(WANTING, layer=1)])
    minimal, sufficient = verdict(audit)
    assert "Not needed, each by itself: head 1 of layer 0, head 0 of layer 1." in minimal
    assert "the loss rises by 0.02 % at most" in minimal
    assert "In layer 1 another head, trained for 200 updates, gains +0.600 [+0.200, +1.0] %" in sufficient
    assert "In layer 0 another head, trained for 200 updates, gains 0.09 % at most" in sufficient
    (minimal, sufficient) = verdict(made([UNSURE] * 10, [replace(ENOUGH, kind="certain"), replace(OPEN, layer=1)]))
    assert "as the interval includes 0: head 0 of layer 0, " in minimal
    assert "and 2 more." in minimal
    assert "In layer 1 another head, trained for 200 updates, gains +0.525 [+0.050, +1.0] %, which may be" in sufficient
    assert "The demand of layer 0 is certain and above its threshold." in sufficient
    assert sufficient.startswith("sufficient: no. In layer 1 another head")
    (_, sufficient) = verdict(made([NEEDED], [layer(0.002, 0.01, extra=-0.01)]))
    assert "may gain as much: the training was not at its end, and may lack updates rather than heads." in sufficient


@pytest.mark.parametrize(
    ("demand", "noise", "kind"),
    [
        (0.5, 0.1, "certain"),
        (0.5, 0.13, "unknown"),  # not four standard errors above zero
        (0.09, 0.001, "small"),  # above zero for certain, and below the threshold for certain
        (0.09, 0.01, "unknown"),  # which may be on either side of the threshold
        (-0.31, 0.1, "small"),
        (-0.3, 0.2, "unknown"),
        (math.nan, math.nan, "unknown"),
        (0.5, math.nan, "unknown"),
    ],
)
def test_a_demand_is_certain_small_or_unknown(demand: float, noise: float, kind: str) -> None:
    assert demand_kind(RelativeDemand(demand, noise, 0.1), certainty=4.0) == kind


def test_the_verdict_says_of_every_layer_what_is_certain_small_and_unknown() -> None:
    never = RelativeDemand(math.nan, math.nan, 0.1)
    kinds: list[DemandKind] = ["certain", "small", "small", "unknown"]
    layers = [replace(ENOUGH, layer=number, kind=kind) for number, kind in enumerate(kinds)]
    sufficient = verdict(made([NEEDED], [*layers, replace(ENOUGH, layer=4, kind="unknown", demand=never)]))[1]
    assert sufficient.endswith(
        "The demand of layer 0 is certain and above its threshold. That of layers 1, 2 is small: for certain below its "
        "threshold. That of layer 3 is unknown: by its noise it may be above its threshold or below. No demand was "
        "certain in layer 4, now or at the start."
    )


@pytest.mark.parametrize("heads", [1, 2])
def test_others_are_spoken_of_where_there_are_some(heads: int) -> None:
    audit = made([head(0.01, 0.1, 0), head(0.02, 0.1, 1)], [replace(ENOUGH, heads=heads), replace(ENOUGH, heads=1)])
    assert ("even with others of its layer in its place" in verdict(audit)[0]) == (heads == 2)


def test_the_table() -> None:
    lonely = replace(ENOUGH, layer=1, heads=1, predicted={"count": 3, "estimate": 4.25})
    unmeasured = RelativeDemand(math.nan, math.nan, 0.1)
    unknown = replace(ENOUGH, demand=unmeasured, kind="unknown", gain=None, untried="kv_heads")
    lines = audit_text(made([NEEDED, head(0.2, 0.3, 1, 0)], [unknown, lonely])).splitlines()
    assert lines[2].split() == ["0", "0", "+25.0", "[+20.0,", "+30.0]", "+5.5", "[+1.0,", "+10.0]", "yes"]
    assert "(there is no other)" in lines[3]
    assert lines[6].split() == ["0", "2", "-", "-", "-", "0.100", "unknown", "not", "tried", "not", "shown"]
    assert lines[7].split()[:8] == ["1", "1", "3", "(4.2)", "0.020", "0.010", "0.100", "small"]
    assert lines[8].endswith("95 % over 100 sequences, corrected for 2 heads and for 1 layer tried (Bonferroni).")


def test_json_has_no_nan() -> None:
    broken = replace(layer(math.nan, math.inf), demand=RelativeDemand(math.nan, math.nan, 0.1))
    facts = made([head(math.nan, math.inf)], [broken]).to_dict()
    text = json.dumps(facts, allow_nan=False)
    assert json.loads(text) == facts
    assert facts["layers"][0]["demand"] is None
    assert facts["layers"][0]["gain"]["head"]["low"] is None
    assert facts["heads"][0]["replaced"]["share"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threshold", -0.1),
        ("threshold", 1.0),
        ("feeds", 1),
        ("steps", 0),
        ("layers", -1),
        ("rate", 0.0),
        ("feeds", 10**12),
        ("steps", 10**12),
    ],
)
def test_bad_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{field} = {value}"):
        AuditSettings(**{field: value})


def test_intervals_of_any_confidence_equal_scipy() -> None:
    arm, baseline = [3.1, 3.05, 3.2, 3.0], [3.12, 3.09, 3.19, 3.06]
    result = paired_difference(arm, baseline, 0.999)
    reference = stats.ttest_rel(arm, baseline).confidence_interval(0.999)
    assert (result.low, result.high) == pytest.approx((reference.low, reference.high), rel=1e-9)


# --- models whose answer is known ------------------------------------------------------------------------------------

TASK = KnownTask("teacher", heads=2)
QUICK = AuditSettings(feeds=25, steps=100, rate=1e-2)
DIM = 4


def student(heads: Sequence[int]) -> Student:
    """Has the teacher's heads of these numbers, exactly; those that are there twice share their output."""
    model = Student(TASK.width, TASK.length, DIM, len(heads))
    attention = model.stack[0].attention
    looking, seen, read, written = TASK._directions[:, : 4 * TASK.heads].unflatten(1, (TASK.heads, 4)).unbind(-1)
    scale = SHARPNESS**0.5 * DIM**0.25  # of queries and of keys: scores are divided by the root of the head's size
    with torch.no_grad():
        queries, keys, values = attention.qkv.weight.zero_().unflatten(0, (3, len(heads), DIM)).unbind()
        outputs = attention.out.weight.zero_().unflatten(1, (len(heads), DIM))
        for place, number in enumerate(heads):
            queries[place, 0], keys[place, 0] = scale * looking[:, number], scale * seen[:, number]
            values[place, 0] = read[:, number]
            outputs[:, place, 0] = written[:, number] / TASK._size / list(heads).count(number)
    return model


def batch(number: int, sequences: int = 64) -> tuple[Tensor, Tensor]:
    """With a little noise in the targets, so that there is something that cannot be learnt."""
    tokens, targets = TASK.batch(sequences, number)
    return tokens, targets + 0.05 * torch.randn(targets.shape, generator=torch.Generator().manual_seed(number))


def audited(model: Student, settings: AuditSettings = QUICK, **options: Any) -> Audit:
    held_out = [batch(10**6 + number, 32) for number in range(4)]
    return audit_model(model, lambda: map(batch, itertools.count()), held_out, settings, **options)


def test_the_student_is_the_teacher() -> None:
    tokens, targets = TASK.batch(8, 0)
    torch.testing.assert_close(student([0, 1])(tokens), targets)
    torch.testing.assert_close(student([0, 1, 0])(tokens), targets)


def test_a_model_that_has_what_it_needs() -> None:
    audit = audited(student([0, 1]))
    assert (audit.minimal, audit.sufficient) == ("yes", "yes")
    assert all(found.replaced.low > audit.loss for found in audit.heads)
    assert audit.layers[0].demand.demand < 0.05


def test_a_duplicate_head_is_found() -> None:
    """Either of the two can leave, though switching it off alone hurts."""
    audit = audited(student([0, 1, 0]), replace(QUICK, layers=0))
    assert [audit.matters(found) for found in audit.heads] == ["no", "yes", "no"]
    assert audit.minimal == "no"
    assert "Not needed, each by itself: head 0 of layer 0, head 2 of layer 0." in verdict(audit)[0]
    for found in (audit.heads[0], audit.heads[2]):
        assert found.off.low > 0.5 * audit.loss
        assert abs(found.replaced.mean) < 1e-4 * audit.loss


def test_a_missing_head_is_found() -> None:
    audit = audited(student([0]))
    (found,) = audit.layers
    assert (audit.minimal, audit.sufficient) == ("yes", "no")
    assert found.asks
    assert found.gain is not None
    assert found.gain.head.low > 0.3 * audit.loss
    assert found.gain.further.high < found.gain.head.low
    assert audit.is_only(audit.heads[0])
    assert audit.heads[0].off == audit.heads[0].replaced


def test_noise_asks_for_nothing() -> None:
    """An untrained head writes nothing: the loss is that of the targets, and no head can lower it."""
    model, noise = student([0]), KnownTask("noise")
    with torch.no_grad():
        model.stack[0].attention.out.weight.zero_()
    held_out = [noise.batch(32, 10**6 + number) for number in range(4)]
    training = lambda: (noise.batch(32, number) for number in itertools.count())  # noqa: E731
    audit = audit_model(model, training, held_out, QUICK)
    assert (audit.minimal, audit.sufficient) == ("no", "yes")
    assert verdict(audit)[1].endswith("No demand was certain in layer 0, now or at the start.")


def test_rows_that_were_learnt_by_heart_ask_for_nothing() -> None:
    """On rows that it sees again a scout finds what to learn by heart; tested on held-out ones that is nothing."""
    task = KnownTask("noise", rows=32)
    model = student([0])
    held_out = [task.without_end.batch(32, number) for number in range(4)]
    settings = replace(QUICK, layers=0, feeds=40)

    def found(seen: bool) -> LayerFinding:
        training = lambda: (task.batch(32, number) for number in itertools.count())  # noqa: E731
        return audit_model(model, training, held_out, settings, seen=seen).layers[0]

    assert found(seen=False).kind == "certain"
    assert found(seen=True).kind == "unknown"


def test_the_start_of_a_run_is_what_demand_is_relative_to() -> None:
    told: list[str] = []
    settings, report = replace(QUICK, layers=0), lambda what, done, total: told.append(what)
    free = audited(student([0]), settings, report=report).layers[0].demand
    assert "measuring the demand without attention" in told
    told.clear()
    start = IncrtState((LayerDemand(largest=1e6, strictness=2.0),))
    bound = audited(student([0]), settings, start=start, policy=Incrt(share=0.2), report=report).layers[0]
    assert "measuring the demand without attention" not in told
    assert bound.demand.threshold == pytest.approx(0.4)
    assert 0 < bound.demand.demand < 1e-3 < free.demand
    assert not bound.asks


def weights_digest(model: torch.nn.Module) -> str:
    parts = [name.encode() + value.numpy().tobytes() for name, value in model.state_dict().items()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def random_batches(plan: Plan, classes: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Of tokens; with `classes`, of padded rows and their classes."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(4):
        tokens = torch.randint(1, plan.vocabulary, (6, plan.context + 1), generator=generator)
        if classes is None:
            found.append((tokens[:, :-1], tokens[:, 1:]))
        else:
            tokens[:3, 5:] = 0
            found.append((tokens[:, :-1], torch.randint(classes, (6,), generator=generator)))
    return found


def small_plan(*layers: LayerPlan, classes: int | None = None) -> Plan:
    return Plan(width=16, vocabulary=23, context=8, feed_forward=16, layers=layers, classes=classes)


def test_losses_of_sequences_average_to_the_loss() -> None:
    plan = small_plan(LayerPlan(2, 8, 2))
    weighted = Classifier(replace(plan, classes=3), 1, torch.tensor([0.5, 2.0, 1.0]))
    for model, batches in ((Decoder(plan, 1), random_batches(plan)), (weighted, random_batches(plan, 3))):
        losses = sequence_losses(model, batches)
        assert len(set(losses)) == len(losses) == 24
        with torch.no_grad():
            expected = [float(model.loss(*part)) for part in batches]
            alone = [float(model.loss(tokens[:1], targets[:1])) for tokens, targets in batches]
        assert [sum(losses[i : i + 6]) / 6 for i in range(0, 24, 6)] == pytest.approx(expected, rel=1e-5)
        assert losses[::6] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("classes", [None, 3])
def test_layers_of_all_kinds_and_nothing_changes(classes: int | None) -> None:
    """Heads of different sizes, shared keys and values, and groups, which cannot be given a head."""
    layers = (LayerPlan(2, 8, 2), LayerPlan(1, 16, 1), LayerPlan(4, 4, 1), LayerPlan(4, 4, 2))
    plan = small_plan(*layers, classes=classes)
    model = Decoder(plan, 0) if classes is None else Classifier(plan, 0)
    model.embedding.weight.requires_grad_(False)
    before, batches = weights_digest(model), random_batches(plan, classes)
    asked = [parameter.requires_grad for parameter in model.parameters()]
    settings = AuditSettings(feeds=3, steps=2, layers=9)
    audit = audit_model(model, lambda: itertools.cycle(batches), batches[:2], settings)
    assert weights_digest(model) == before
    assert [parameter.requires_grad for parameter in model.parameters()] == asked
    assert model.plan == plan
    assert len(audit.heads) == 11
    assert [found.gain is None for found in audit.layers] == [False, False, False, True]
    assert "kv_heads = 2: must be 1 or 4 for heads to come and go" in audit.layers[3].untried
    assert audit.sufficient != "yes"
    again = audit_model(model, lambda: itertools.cycle(batches), batches[:2], settings)
    assert json.dumps(again.to_dict()) == json.dumps(audit.to_dict())


def test_heads_are_left_out_as_they_say() -> None:
    """Both ways, computed anew: the regression is learnt on training batches, the interval is for two heads."""
    plan = small_plan(LayerPlan(2, 8, 2))
    model, batches = Decoder(plan, 3), random_batches(plan)
    held_out, training = batches[:2], batches[2:]
    audit = audit_model(model, lambda: iter(training), held_out, AuditSettings(feeds=2, layers=0))
    whole = sequence_losses(model, held_out)
    (moments,) = head_moments(heads_read(model, *batch) for batch in training)
    weight = model.stack[0].attention.out.weight
    original = weight.detach().clone()
    for found in audit.heads:
        off = original.clone()
        off[:, 8 * found.head : 8 * found.head + 8] = 0
        for written, expected in ((off, found.off), (moments.folded(original, found.head), found.replaced)):
            with torch.no_grad():
                weight.copy_(written)
            assert paired_difference(sequence_losses(model, held_out), whole, 0.975) == expected
            with torch.no_grad():
                weight.copy_(original)
    assert audit.heads[0].off != audit.heads[0].replaced


def test_nothing_but_the_new_head_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Growable] = []

    def noted(model: Growable, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        measured.append(model)
        return sequence_losses(model, batches)

    monkeypatch.setattr(audit_model_module, "sequence_losses", noted)
    plan = small_plan(LayerPlan(2, 8, 2), LayerPlan(2, 4, 1))
    model, batches = Decoder(plan, 3), random_batches(plan)
    audit_model(model, lambda: itertools.cycle(batches), batches, AuditSettings(feeds=2, steps=3))
    found = list(dict.fromkeys(id(part) for part in measured))
    copies = [next(part for part in measured if id(part) == number) for number in found if number != id(model)]
    grown = [part for part in copies if part.plan != plan]
    assert [part.plan.heads for part in copies] == [(3, 2), (2, 2), (2, 3), (2, 2)]
    for layer, part in enumerate(grown):
        assert isinstance(part, Decoder)
        newborn = part.stack[layer].attention
        weights = (newborn.qkv.weight.detach(), newborn.out.weight.detach())
        assert bool(head_of(newborn.layer, *weights, 2).out.all())
        apply_edit(part, None, RemoveHead(layer, 2))
        torch.testing.assert_close(part.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_only_the_layers_that_ask_most_are_tried() -> None:
    plan = small_plan(*[LayerPlan(2, 8, 2)] * 3)
    batches = random_batches(plan)
    start = IncrtState(tuple(LayerDemand(largest=value) for value in (1e6, 1e-6, 1e3)))
    settings = AuditSettings(feeds=3, steps=1, layers=1)
    audit = audit_model(Decoder(plan), lambda: itertools.cycle(batches), batches, settings, start=start)
    demands = [found.demand.demand for found in audit.layers]
    tried = demands.index(max(demands))
    assert [found.layer for found in audit.layers if found.gain is not None] == [tried]
    assert "was not tried: its demand is smaller than that of the layers tried." in verdict(audit)[1]
    none = audit_model(Decoder(plan), lambda: itertools.cycle(batches), batches, replace(settings, layers=0))
    assert "in layers 0, 1, 2 was not tried: none was to be tried (layers = 0)." in verdict(none)[1]


def test_a_run_that_grew_by_less_certainty_is_audited_by_the_usual_one() -> None:
    """Of noise one standard error is nothing; the policy of the run would call any demand certain."""
    plan = small_plan(*[LayerPlan(2, 8, 2)] * 3)
    batches, settings = random_batches(plan), AuditSettings(feeds=6, layers=0)
    eager = Incrt(certainty=-1e9, share=1e-9)
    for layer in audit_model(Decoder(plan), lambda: itertools.cycle(batches), batches, settings, policy=eager).layers:
        assert layer.kind == demand_kind(layer.demand, certainty=4.0)
        assert layer.kind != "certain"


def test_what_cannot_be_audited() -> None:
    plan = small_plan(LayerPlan(2, 8, 2))
    batches = random_batches(plan)
    looped = small_plan(replace(plan.layers[0], loop=Loop((0,), 1)))
    with pytest.raises(InputError, match="has loops; only layers that run once can be audited"):
        audit_model(Decoder(looped), lambda: iter(batches), batches)
    with pytest.raises(InputError, match="held-out sequences = 1: must be at least 2"):
        audit_model(Decoder(plan), lambda: iter(batches), [(batches[0][0][:1], batches[0][1][:1])])
    broken = Decoder(plan)
    with torch.no_grad():
        broken.norm.weight.fill_(math.nan)
    with pytest.raises(RunError, match="is not finite"):
        audit_model(broken, lambda: iter(batches), batches)


# --- runs ------------------------------------------------------------------------------------------------------------

GROWN = {
    "model__heads": 1, "model__schedule": "uniform", "model__head_dim": 8, "train__micro_batch": 4, "train__steps": 20,
    "growth__policy": "incrt", "incrt__calibration": 5, "incrt__decide_every": 5, "incrt__certainty": -10.0,
    "incrt__warm_up": 5, "incrt__cool_down": 5, "incrt__feed_every": 1, "incrt__feeds": 1, "incrt__hits": 1,
    "incrt__max_heads": 2, "incrt__last_birth": 20,
}  # fmt: skip
FEW = ("--sequences", "6", "--steps", "2", "--feeds", "3", "--device", "cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(text, tmp_path_factory.mktemp("plain") / "run", train__steps=3)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("classifier")
    prepared_labelled(folder / "data")
    return trained(folder / "data", folder / "run", train__steps=3, data__class_weights="balanced")


def file_digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != AUDIT_FILE]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_command(plain: RunFolder, call: Call) -> None:
    before = file_digests(plain.path)
    said = call("audit", plain.path, *FEW)
    assert said.code == 0, said.err
    assert f"{plain.path}, step 3: held-out loss" in said.out
    assert "\nminimal: " in said.out
    assert "\nsufficient: " in said.out
    assert "training another head in layer 0: 0 of 2" in said.err
    stored = json.loads((plain.path / AUDIT_FILE).read_text())
    machines = call("audit", plain.path, *FEW, "--json")
    assert json.loads(machines.out) == stored
    assert file_digests(plain.path) == before
    assert stored["sequences"] == 6
    places = [(entry["layer"], entry["head"]) for entry in stored["heads"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [entry["predicted"] for entry in stored["layers"]] == [None, None]
    assert stored["verdict"] == said.out.splitlines()[-2:]


def test_a_grown_run_knows_where_it_began(text: Path, tmp_path: Path) -> None:
    run = trained(text, tmp_path / "run", **GROWN)
    told: list[str] = []
    settings = AuditSettings(feeds=3, steps=2)
    result = audit_run(
        run.path, settings, sequences=6, device="cpu", report=lambda what, done, total: told.append(what)
    )
    assert "measuring the demand without attention" not in told
    assert all(
        found.predicted is not None and set(found.predicted) == {"count", "estimate"} for found in result.audit.layers
    )
    assert all(math.isfinite(found.demand.demand) for found in result.audit.layers)


@pytest.mark.parametrize("order", ["stack", "interleave"])
def test_a_run_whose_blocks_were_stacked_knows_what_it_expected_of_every_layer(
    order: str, text: Path, tmp_path: Path
) -> None:
    stacked = {
        "model__layers": 4, "model__heads": 2, "model__schedule": "uniform", "train__steps": 12,
        "growth__policies": ["stack", "incrt"], "growth__stack__order": order, "growth__stack__at": [5], **EAGER_BIRTHS,
    }  # fmt: skip
    run = trained(text, tmp_path / "run", **stacked)
    expected = [entry["predicted_heads"] for entry in run.read(run.events) if entry.get("predicted_heads")]
    assert (len(expected[0]), len(expected[-1])) == (2, 4)  # measured before there were all of them
    old, born = {"stack": ([0, 1], [2, 3]), "interleave": ([0, 2], [1, 3])}[order]
    for copy in (run, copy_run(run, tmp_path / "early", last=4)):  # where the log is of more layers than the model
        result = audit_run(copy.path, AuditSettings(feeds=3, steps=2), sequences=6, device="cpu")
        predicted = [layer.predicted for layer in result.audit.layers]
        if copy is run:
            assert [predicted[layer] for layer in old] == expected[0]
            assert all(predicted[layer] is not None for layer in born)
        else:
            assert predicted == expected[0]


def test_a_classifier(classifier: RunFolder) -> None:
    result = audit_run(classifier.path, AuditSettings(feeds=3, steps=2), sequences=8, device="cpu")
    assert result.audit.sequences == 8
    whole = audit_run(classifier.path, AuditSettings(feeds=3, steps=2, layers=0), sequences=10**6, device="cpu")
    assert whole.audit.sequences == len(LabelledData.open(classifier.config.data.path).split("held_out"))


def test_mistakes_are_told_in_one_line(
    plain: RunFolder, classifier: RunFolder, text: Path, tmp_path: Path, call: Call
) -> None:
    labelled = Path(classifier.config.data.path)
    prepare([write_texts(tmp_path / "texts", 2)], tmp_path / "none", tokenizer=ByteTokenizer(), held_out=0)
    prepared_labelled(tmp_path / "other", count=40)
    empty = copy_run(plain, tmp_path / "empty", last=0)
    cases = [
        ((tmp_path / "absent",), "not a run"),
        ((empty.path,), "holds no whole checkpoint yet"),
        ((plain.path, "--sequences", "1"), "sequences = 1: must be at least 2"),
        ((plain.path, "--steps", "0"), "steps = 0: must be at least 1"),
        ((plain.path, "--threshold", "2"), "threshold = 2.0"),
        ((plain.path, "--data", labelled), f"is labelled rows, and {plain.path} is the run of a language model"),
        ((classifier.path, "--data", text), f"is text, and {classifier.path} is the run of a classifier"),
        ((classifier.path, "--data", tmp_path / "other"), "was made with other classes or another vocabulary"),
        ((plain.path, "--data", tmp_path / "none"), "held-out tokens = 0: must be at least 33"),
        ((plain.path, "--data", tmp_path / "absent"), "absent"),
        ((plain.path, "--device", "tpu"), "must be auto, cpu, cuda"),
    ]
    for arguments, message in cases:
        said = call("audit", *arguments)
        assert said.code == 2, arguments
        assert message in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""
