"""The configuration of a run: frozen dataclasses, read from TOML, overridden from the command line."""

from meristem.config.growth import GrowthConfig
from meristem.config.idle import idle_settings
from meristem.config.reading import (
    RESUMABLE,
    Config,
    Setting,
    all_settings,
    build_config,
    check_branch,
    check_keys,
    check_resumable,
    flatten,
    foreign_tables,
    known_values,
    load_config,
    override,
    parse_overrides,
    read_configuration,
)
from meristem.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

__all__ = [
    "RESUMABLE",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "GrowthConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Setting",
    "TrainConfig",
    "all_settings",
    "build_config",
    "check_branch",
    "check_keys",
    "check_resumable",
    "flatten",
    "foreign_tables",
    "idle_settings",
    "known_values",
    "load_config",
    "override",
    "parse_overrides",
    "read_configuration",
]
