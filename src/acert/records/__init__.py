"""The run folder: which files it holds, how they are written, and how they are read back.

| file | content |
| --- | --- |
| `config.json` | schema and everything needed to repeat the run |
| `metrics.jsonl` | a row per epoch |
| `env.json` | commit, versions, hardware, seconds |
| `local.json` | where the data lay on this machine; no part of a published record |
| `model.safetensors` | the weights, once the run is finished |
| `state.safetensors`, `state.previous.safetensors` | the last two states to resume from |
| `certificates.npz`, `examples.npz` | written by certification |
| `certificates.unfinished-0.npz` | what a certification under way has proven so far |
| `attacks.npz` | points of the first successful attacks; no part of a published record |

The folder above may hold `sweep.json`, the plan of a sweep.

A file is written beside its place and then renamed, so a crash leaves the old one or the new one.
Everything is read as data: JSON, safetensors and plain arrays, nothing pickled.
"""

from acert.records.certification import (
    drop_unfinished,
    is_unfinished,
    read_attacks,
    read_certificates,
    read_examples,
    read_unfinished,
    rounded_down,
    rounded_up,
    unfinished_file,
    write_attacks,
    write_certificates,
    write_examples,
    write_unfinished,
)
from acert.records.files import (
    ATTACKS,
    CERTIFICATES,
    CONFIG,
    ENVIRONMENT,
    EXAMPLES,
    LOCAL,
    METRICS,
    PREVIOUS_STATE,
    SCHEMA,
    STATE,
    SWEEP,
    WEIGHTS,
    Array,
    Arrays,
    NewerSchema,
)
from acert.records.folder import check_free, create, is_finished, make_writable
from acert.records.tensors import (
    State,
    drop_previous_state,
    read_state,
    read_weights,
    write_state,
    write_weights,
)
from acert.records.texts import (
    Row,
    first_difference,
    place_of_data,
    read_config,
    read_environment,
    read_local,
    read_metrics,
    read_sweep,
    write_config,
    write_environment,
    write_local,
    write_metrics,
    write_sweep,
)

__all__ = [
    "ATTACKS",
    "CERTIFICATES",
    "CONFIG",
    "ENVIRONMENT",
    "EXAMPLES",
    "LOCAL",
    "METRICS",
    "PREVIOUS_STATE",
    "SCHEMA",
    "STATE",
    "SWEEP",
    "WEIGHTS",
    "Array",
    "Arrays",
    "NewerSchema",
    "Row",
    "State",
    "check_free",
    "create",
    "drop_previous_state",
    "drop_unfinished",
    "first_difference",
    "is_finished",
    "is_unfinished",
    "make_writable",
    "place_of_data",
    "read_attacks",
    "read_certificates",
    "read_config",
    "read_environment",
    "read_examples",
    "read_local",
    "read_metrics",
    "read_state",
    "read_sweep",
    "read_unfinished",
    "read_weights",
    "rounded_down",
    "rounded_up",
    "unfinished_file",
    "write_attacks",
    "write_certificates",
    "write_config",
    "write_environment",
    "write_examples",
    "write_local",
    "write_metrics",
    "write_state",
    "write_sweep",
    "write_unfinished",
    "write_weights",
]
