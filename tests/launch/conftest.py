from importlib.metadata import version

HAS_SIDECAR = tuple(int(part) for part in version("ai-dynamo").split(".")[:2]) >= (1, 6)
"""Whether this environment has the sidecar: that of ``scripts/install --dynamo 1.6.1``."""

collect_ignore = [] if HAS_SIDECAR else ["test_openengine_script.py"]
