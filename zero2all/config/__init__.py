"""The one config of a run (`run`), the settings of the trainer (`training`) and what its schedule means (`schedule`).

The settings of the other rooms stand in their own `config.py`; those of `train` stand here, because the trainer reads
the whole config. No torch here: a config is checked before anything heavy is imported.
"""

from zero2all.config.run import (
    ConfigError,
    RunConfig,
    config_from_values,
    config_values,
    config_yaml,
    find_config,
    load_config,
    preset_files,
    read_config_values,
    with_new_names,
)

__all__ = [
    "ConfigError",
    "RunConfig",
    "config_from_values",
    "config_values",
    "config_yaml",
    "find_config",
    "load_config",
    "preset_files",
    "read_config_values",
    "with_new_names",
]
