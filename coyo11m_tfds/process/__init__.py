"""The surroundings of a process: cores and memory, its job, its terminal, and how it ends.

Import any module. This room imports no other.
"""
