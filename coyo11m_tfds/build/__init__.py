"""A build: from the plan through its tasks, run by processes or Beam, to the final folder.

Import `driver`, `settings` and `manifest`. The room reads `source` and writes through `storage`.
"""
