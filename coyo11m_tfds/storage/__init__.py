"""Files on disks, in buckets and on the hub: listed, fetched, stored, locked, tried again.

Import any module but those of a single kind of place (`local_folder`, `gcs_folder`, `gcs_objects`),
for which `destination` and `source_files` choose. This room knows nothing of what files hold.
"""
