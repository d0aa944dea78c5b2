"""The worker's options: one typed table, read from the command line, the environment and a YAML
file.

Nothing heavy is imported here, so that a wrong argument is answered before torch or the runtime is
loaded. `option` has what an option is, `values` the parsers of their texts, `table` the options,
`sources` reads them, and `contradictions` checks them against each other.
"""

from worker.arguments.key_file import KnownKeys, keys_in
from worker.arguments.option import Option, StrictParser, meant
from worker.arguments.sources import parse_arguments
from worker.arguments.table import OPTIONS, Arguments
from worker.arguments.values import SUBJECT_PART, discovery_key

__all__ = [
    "OPTIONS",
    "SUBJECT_PART",
    "Arguments",
    "KnownKeys",
    "Option",
    "StrictParser",
    "discovery_key",
    "keys_in",
    "meant",
    "parse_arguments",
]
