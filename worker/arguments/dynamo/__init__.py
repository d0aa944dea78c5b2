"""Options and variables of Dynamo's own workers, which this one takes in their place.

`row` has what one option is, `shared`, `trtllm` and `vllm` the tables, `engines` the rows that
count with each engine, `layer` collects the values of one source, with this worker's own, and
`dotted` reads the flags without a row.
"""

from worker.arguments.dynamo.dotted import take_dotted
from worker.arguments.dynamo.engines import PREFIXES, rows_for
from worker.arguments.dynamo.layer import Layer, Setting
from worker.arguments.dynamo.row import Row

__all__ = ["PREFIXES", "Layer", "Row", "Setting", "rows_for", "take_dotted"]
