"""Makes our models known to transformers, without importing it: at once if it is imported already, else when it is.

Exported folders then load after `import meristem` without `trust_remote_code`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

logger = logging.getLogger(__name__)

LIBRARY = "transformers"


def register_models() -> None:
    """Tell the Auto classes about our configuration, models and tokenizer; a transformers too old for them is left."""
    try:
        from transformers import (
            AutoConfig,
            AutoModel,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            AutoTokenizer,
        )

        from meristem.export.standalone import modeling_meristem as models
        from meristem.export.standalone.configuration_meristem import MeristemConfig
        from meristem.export.standalone.tokenization_meristem import MeristemTokenizer
    except (ImportError, AttributeError) as error:
        logger.debug("exported models need trust_remote_code here (%s)", error)
        return
    AutoConfig.register(MeristemConfig.model_type, MeristemConfig, exist_ok=True)
    MeristemConfig.register_for_auto_class()  # whatever is saved again takes the code along
    for auto, model in {
        AutoModel: models.MeristemModel,
        AutoModelForCausalLM: models.MeristemForCausalLM,
        AutoModelForSequenceClassification: models.MeristemForSequenceClassification,
    }.items():
        auto.register(MeristemConfig, model, exist_ok=True)
        model.register_for_auto_class(auto.__name__)
    AutoTokenizer.register(MeristemConfig, tokenizer_class=MeristemTokenizer, exist_ok=True)
    MeristemTokenizer.register_for_auto_class()


class _Watch(MetaPathFinder):
    """Waits for the import of transformers, and then registers; many only ask whether it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != LIBRARY:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Registering(spec.loader, self)
                return spec
        return None


class _Registering(Loader):
    """The loader of transformers, after which our models are registered."""

    def __init__(self, loader: Loader, watch: _Watch) -> None:
        self._loader, self._watch = loader, watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader  # nobody else needs to know of us
        if self._watch in sys.meta_path:
            sys.meta_path.remove(self._watch)
        self._loader.exec_module(module)
        register_models()


def watch_for_transformers() -> None:
    """Register now, or when transformers is imported."""
    if LIBRARY in sys.modules:
        register_models()
    else:
        sys.meta_path.insert(0, _Watch())
