"""The built-in processors, one file per family. They do not know which engine runs them."""
