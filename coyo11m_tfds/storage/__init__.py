"""Lists, fetches, stores and locks files on disks, in buckets and on the hub, with retries.

`destination`, `source_files`, `remote` and `locks` choose the kind of place. No module here depends
on the contents of files.
"""
