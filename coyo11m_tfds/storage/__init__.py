"""Files on disks, in buckets and on the hub: found, fetched, stored, locked and tried again.

Nothing here knows what the files hold. Modules are imported one by one by those that use them, so
that a build on a disk does not wait for the clients of buckets.
"""
