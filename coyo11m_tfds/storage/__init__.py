"""Files on disks, in buckets and on the hub: lists, fetches, stores and locks them, with retries.

Import any module but those of one kind of place (`local_folder`, `gcs_folder`, `gcs_objects`,
`bucket_lease`): `destination`, `source_files` and `build_lock` choose between them. This room knows
nothing of what files hold.
"""
