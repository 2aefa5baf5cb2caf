"""A build: from the plan through its tasks, run by processes or Beam, to the final folder.

Import `driver` and `settings`. This package reads `source` and writes through `storage`.
"""
