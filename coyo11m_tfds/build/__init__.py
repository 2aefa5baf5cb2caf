"""A build: from the plan over its tasks, which processes or Beam run, to the final folder.

Import `driver`, `settings` and `manifest`. The room reads `source` and writes through `storage`.
"""
