"""Grammar compilation: llguidance's compiler, the sandbox it runs in first, and the cache.

Import from the modules. This one stays empty, because a sandbox process imports the package without
the rest of `adapters`.
"""
