"""Files on disks, in buckets and on the hub: lists, fetches, stores and locks them, with retries.

`destination`, `source_files`, `remote` and `locks` choose between the kinds of places. This room
knows nothing of what files hold.
"""
