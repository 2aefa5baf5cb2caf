"""Checks of `coyo11m_tfds.doctor`: one module a subject, each check a function.

Import any module. Only the command imports them; nothing that builds or reads depends on them.
"""
