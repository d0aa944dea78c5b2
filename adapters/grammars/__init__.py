"""Compiling grammars: llguidance's compiler, the sandbox it first runs in, and the cache of what
came through.

Import from the modules. This one stays empty: a sandbox process imports the package without the
rest of `adapters`.
"""
