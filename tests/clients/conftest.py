from __future__ import annotations

import sys
from pathlib import Path

# launched_script starts what the clients ask, and so does engine_stack
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("launch", "e2e")]
