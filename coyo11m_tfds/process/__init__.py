"""What a process knows of its surroundings: cores and memory, its job, its terminal, how it ends.

Import any module. This room imports no other.
"""
