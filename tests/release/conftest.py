from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "k8s"))  # image_files knows what pip installs
sys.path.append(str(Path(__file__).parents[2] / "scripts"))
