"""Meristem: Transformers whose heads and depth are planned, grown and pruned instead of guessed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meristem.registration import watch_for_transformers

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meristem.config import Config, build_config, load_config
    from meristem.decoding import Sampling, generate, release, stream
    from meristem.errors import InputError, RunError
    from meristem.evaluation.evaluate import evaluate_run
    from meristem.evaluation.evaluate_classifier import evaluate_classifier
    from meristem.export import export_run
    from meristem.gauges import EntropyGauge
    from meristem.growth import (
        AddBlock,
        AddHead,
        BlockLoop,
        Change,
        Decision,
        Depth,
        Grower,
        Incrt,
        LoopHeads,
        Observe,
        Policy,
        Prune,
        Published,
        RandomBirths,
        RemoveBlock,
        RemoveHead,
        RepeatBlock,
        Sgt,
        Stack,
        StaticLoops,
        prepared,
    )
    from meristem.model import Classifier, Decoder
    from meristem.plan import LayerPlan, Plan
    from meristem.pretrained import import_model
    from meristem.pruning import PruneSettings, prune_run
    from meristem.runs.own_loop import restore, save
    from meristem.runs.run_folder import load_run
    from meristem.training.muon import Muon
    from meristem.training.optimizer import parameter_groups
    from meristem.training.train import resume, train

# Names come from their modules when they are first used, so that `meristem --help` need not wait for torch.
_HOMES = {
    "AddBlock": "meristem.growth",
    "AddHead": "meristem.growth",
    "BlockLoop": "meristem.growth",
    "Change": "meristem.growth",
    "Classifier": "meristem.model",
    "Config": "meristem.config",
    "Decision": "meristem.growth",
    "Decoder": "meristem.model",
    "Depth": "meristem.growth",
    "EntropyGauge": "meristem.gauges",
    "Grower": "meristem.growth",
    "Incrt": "meristem.growth",
    "InputError": "meristem.errors",
    "LayerPlan": "meristem.plan",
    "LoopHeads": "meristem.growth",
    "Observe": "meristem.growth",
    "Plan": "meristem.plan",
    "Policy": "meristem.growth",
    "Prune": "meristem.growth",
    "PruneSettings": "meristem.pruning",
    "Published": "meristem.growth",
    "RandomBirths": "meristem.growth",
    "RemoveBlock": "meristem.growth",
    "RemoveHead": "meristem.growth",
    "RepeatBlock": "meristem.growth",
    "RunError": "meristem.errors",
    "Sampling": "meristem.decoding",
    "Sgt": "meristem.growth",
    "Stack": "meristem.growth",
    "StaticLoops": "meristem.growth",
    "build_config": "meristem.config",
    "evaluate_classifier": "meristem.evaluation.evaluate_classifier",
    "evaluate_run": "meristem.evaluation.evaluate",
    "export_run": "meristem.export",
    "generate": "meristem.decoding",
    "import_model": "meristem.pretrained",
    "load_config": "meristem.config",
    "load_run": "meristem.runs.run_folder",
    "Muon": "meristem.training.muon",
    "parameter_groups": "meristem.training.optimizer",
    "prepared": "meristem.growth",
    "prune_run": "meristem.pruning",
    "release": "meristem.decoding",
    "restore": "meristem.runs.own_loop",
    "resume": "meristem.training.train",
    "save": "meristem.runs.own_loop",
    "stream": "meristem.decoding",
    "train": "meristem.training.train",
}

__all__ = [
    "AddBlock",
    "AddHead",
    "BlockLoop",
    "Change",
    "Classifier",
    "Config",
    "Decision",
    "Decoder",
    "Depth",
    "EntropyGauge",
    "Grower",
    "Incrt",
    "InputError",
    "LayerPlan",
    "LoopHeads",
    "Muon",
    "Observe",
    "Plan",
    "Policy",
    "Prune",
    "PruneSettings",
    "Published",
    "RandomBirths",
    "RemoveBlock",
    "RemoveHead",
    "RepeatBlock",
    "RunError",
    "Sampling",
    "Sgt",
    "Stack",
    "StaticLoops",
    "__version__",
    "build_config",
    "evaluate_classifier",
    "evaluate_run",
    "export_run",
    "generate",
    "import_model",
    "load_config",
    "load_run",
    "parameter_groups",
    "prepared",
    "prune_run",
    "release",
    "restore",
    "resume",
    "save",
    "stream",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'meristem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # so that Python completes names that are not loaded yet


watch_for_transformers()
